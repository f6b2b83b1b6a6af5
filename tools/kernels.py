"""What the installed Triton makes of the Hopper kernels, without a GPU.

    python tools/kernels.py facts.json                       every call of the list; `--few` for some of them
    python tools/kernels.py --compare before.json after.json a table of what changed; fails where code became worse
        --keep record.json.gz                                and both are kept, with a page of tables beside them

Compiles a fixed list of calls for sm_90a and writes, for every kernel of each: registers at entry, bytes spilled, shared
memory, instructions in all and in the largest inner loop, how often barriers and wgmma occur in its SASS (in the code, not in
time), and a hash of it (`sass.py`). `make matrix` runs it once per Triton; a change of the kernels' sources that should not
change their speed is compared before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hopper"))

import sass
import triton
from aot import Report
from compact import COMPACT, compressed
from records import load
from test_backward_terms_compiled import EVERY, LAZY, reports_of
from test_compiled import Variant
from test_compiled_terms import call_of, report_of

PLAIN = (
    Variant(64),
    Variant(64, causal=True),
    Variant(96, causal=True),
    Variant(128),
    Variant(128, causal=True),
    Variant(128, causal=True, deterministic=True),
    Variant(128, causal=True, window=(100, 0), packed=True),
    Variant(192, causal=True),
    Variant(256),
    Variant(256, causal=True),
)
TERMS = (("bias",), LAZY, ("softcap",))
# what only a backward distinguishes: rings, splits and the ordered dbias
MORE_PLAIN = (
    Variant(16, causal=True),
    Variant(64, causal=True, deterministic=True),
    Variant(64, window=(100, 20), packed=True),
    Variant(192, dv=128, causal=True),
    Variant(256, causal=True, deterministic=True),
)
FEW_PLAIN = (Variant(64, causal=True), Variant(128, causal=True), Variant(128, causal=True, deterministic=True))
COUNTED = ("BAR.SYNC", "BAR.ARV", "WARPGROUP.ARRIVE", "HGMMA")
# may not rise
COSTS = ("instructions", "loop", "registers", "spills", "shared", "BAR.SYNC")


def calls() -> Iterator[tuple[str, list[Report]]]:
    for variant in (*PLAIN, *MORE_PLAIN):
        yield str(variant), variant.reports()
    for d in (64, 128):
        for terms in TERMS:
            name = f"d={d} causal {'+'.join(terms)}"
            yield name, [report_of(call_of(d, terms)), *reports_of(d, terms).values()]
    for d in (64, 128):
        reports = reports_of(d, EVERY, deterministic=True, packed=True, causal=False, window=(100, 20))
        yield f"d={d} window packed deterministic {'+'.join(EVERY)}", [*reports.values()]
    yield "d=256 causal bias", [*reports_of(256, ("bias",)).values()]


def few() -> Iterator[tuple[str, list[Report]]]:
    for variant in FEW_PLAIN:
        yield str(variant), variant.reports()
    for d in (64, 128):
        yield f"d={d} causal {'+'.join(LAZY)}", [*reports_of(d, LAZY).values()]
    yield "d=128 causal deterministic bias", [*reports_of(128, ("bias",), deterministic=True).values()]


def facts(report: Report) -> dict[str, Any]:
    """Numbers of one kernel; counts are null where the Triton wheel has no disassembler."""
    counts = {name: sum(n for code, n in report.opcodes.items() if f"{code}.".startswith(f"{name}.")) for name in COUNTED}
    known = counts if report.sass else dict.fromkeys(COUNTED)
    return {
        "kernel": report.kernel.strip("_").removesuffix("_kernel"),
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
        **sass.facts(report.sass),
        **known,
        "warnings": list(report.warnings),
    }


def collected(found: Iterable[tuple[str, list[Report]]]) -> list[dict[str, Any]]:
    rows = []
    for name, reports in found:
        print(f"{name}: {len(reports)} kernels", flush=True)
        rows += [{"call": name, **facts(report)} for report in reports]
    return rows


# --- before and after --------------------------------------------------------------------------------------------------------


def pairs(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Kernels of the calls that both records have, in the order of their launches: a kernel may have a new name."""
    known = defaultdict(list)
    for row in after:
        known[row["call"]].append(row)
    for call in dict.fromkeys(row["call"] for row in before if row["call"] in known):
        yield from zip((row for row in before if row["call"] == call), known[call], strict=True)


def worse(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Costs that rose; none where the code is the same."""
    if old["hash"] and old["hash"] == new["hash"]:
        return []
    return [name for name in COSTS if (new[name] or 0) > (old[name] or 0)]


def comparison(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], int, int]:
    """Lines of a table, one for each kernel; how many kernels have the same code; how many became worse."""
    lines = [
        "| call | kernel | " + " | ".join(COSTS) + " | HGMMA | code |",
        "|---|---|" + "---:|" * (len(COSTS) + 1) + "---|",
    ]
    same = bad = 0
    for old, new in pairs(before["rows"], after["rows"]):
        names = old["kernel"], new["kernel"]
        numbers = [(old[name], new[name]) for name in (*COSTS, "HGMMA")]
        cells = [f"{a}" if a == b else f"{a} -> {b}" for a, b in (names, *numbers)]
        rose = worse(old, new)
        equal = bool(old["hash"]) and old["hash"] == new["hash"]
        same, bad = same + equal, bad + bool(rose)
        word = "same" if equal else f"more {', '.join(rose)}" if rose else "other"
        lines.append(f"| {old['call']} | {' | '.join(cells)} | {word} |")
    return lines, same, bad


def section(version: str, before: dict[str, Any], after: dict[str, Any]) -> tuple[str, int]:
    """A table under a sentence; how many kernels became worse."""
    lines, same, bad = comparison(before, after)
    sentence = f"Triton {version}: {len(lines) - 2} kernels, {same} with the same code, {bad} with more of something."
    return "\n".join([sentence, "", *lines]), bad


def page(record: dict[str, Any]) -> str:
    """All sections of a kept record."""
    head = [
        "# Hopper kernels before and after a change of their sources",
        "",
        "Made by `tools/kernels.py --compare`, without a GPU: what ptxas makes of each kernel for sm_90a. `loop`: instructions",
        "of the largest inner loop with matmuls. `same`: equal instructions, addresses and places of parameters aside.",
    ]
    return "\n\n".join(["\n".join(head), *(section(version, **both)[0] for version, both in sorted(record.items()))]) + "\n"


def compare(before: Path, after: Path, keep: Path | None) -> int:
    old, new = (json.loads(path.read_text()) for path in (before, after))
    if old["triton"] != new["triton"]:
        raise SystemExit(f"{before} is of Triton {old['triton']}, {after} of {new['triton']}")
    text, bad = section(new["triton"], old, new)
    print(text)
    if keep is not None:
        record = load(keep) if keep.is_file() else {}
        record[new["triton"]] = {"before": {"rows": old["rows"]}, "after": {"rows": new["rows"]}}
        keep.write_bytes(compressed(COMPACT[".json"](json.dumps(record, sort_keys=True))))
        keep.with_name(keep.name.replace(".json.gz", ".md")).write_text(page(record))
    return min(bad, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("facts", type=Path, nargs="?", help="where to write")
    parser.add_argument("--few", action="store_true", help="some of the calls")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="two records of one Triton")
    parser.add_argument("--keep", type=Path, help="with --compare: the record to add both to")
    given = parser.parse_args()
    if given.compare:
        return compare(*given.compare, given.keep)
    if given.facts is None:
        parser.error("where should the facts go?")
    made = {"triton": triton.__version__, "rows": collected(few() if given.few else calls())}
    given.facts.write_text(json.dumps(made, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
