"""What the installed Triton makes of the Hopper kernels, without a GPU: python tools/kernels.py facts.json

Compiles a fixed list of calls for sm_90a and writes, for every kernel of each: registers at entry, bytes spilled, shared
memory, and how often barriers and wgmma occur in its SASS (in the code, not in time). `make matrix` runs it once per Triton.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hopper"))

import triton
from aot import Report
from test_backward_terms_compiled import reports_of
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
TERMS = (("bias",), ("bias", "tau"), ("softcap",))
COUNTED = ("BAR.SYNC", "BAR.ARV", "WARPGROUP.ARRIVE", "HGMMA")


def calls() -> Iterator[tuple[str, list[Report]]]:
    for variant in PLAIN:
        yield str(variant), variant.reports()
    for d in (64, 128):
        for terms in TERMS:
            name = f"d={d} causal {'+'.join(terms)}"
            yield name, [report_of(call_of(d, terms)), *reports_of(d, terms).values()]


def facts(report: Report) -> dict[str, Any]:
    """Numbers of one kernel; counts are null where the Triton wheel has no disassembler."""
    counts = {name: sum(n for code, n in report.opcodes.items() if f"{code}.".startswith(f"{name}.")) for name in COUNTED}
    known = counts if report.sass else dict.fromkeys(COUNTED)
    return {
        "kernel": report.kernel.strip("_").removesuffix("_kernel"),
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
        **known,
        "warnings": list(report.warnings),
    }


def collected(found: Iterable[tuple[str, list[Report]]]) -> list[dict[str, Any]]:
    rows = []
    for name, reports in found:
        print(f"{name}: {len(reports)} kernels", flush=True)
        rows += [{"call": name, **facts(report)} for report in reports]
    return rows


def main(path: str) -> None:
    Path(path).write_text(json.dumps({"triton": triton.__version__, "rows": collected(calls())}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
