"""How many injected defects are found and named: measured here, kept as docs/data/doctor-shares.json, shown in docs/doctor.md.

python tests/doctor/shares.py examines every injection twice, as it is and as a black box that returns o and gradients alone,
and writes the file; it takes some minutes, unless it is given the names of a few, or -j16 for 16 processes. The tests hold
the file to the truth: an injection whose outcome differs from its record fails, and so does a table in the docs that differs
from the file.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backlight import doctor
from backlight.doctor.defects import catalogue
from backlight.doctor.subject.subject import Subject

FILE = Path(__file__).parents[2] / "docs" / "data" / "doctor-shares.json"
SMALL = (2, 4, 72, 64)
KINDS = {
    "edit": "lines of the backend's source replaced",
    "caller": "the public call called wrongly",
    "wrapper": "code around the backend's entry points",
}
# these live in lse alone: a kernel that does not return it cannot have them
NEEDS_LSE = {"dlse-ignored", "dlse-sign", "e4m3-mean-lost", "empty-rows-lse", "lse-stored-elsewhere", "tangent-lse-sign"}
NAMED, NOT_APPLICABLE = "named", "not applicable"
# what the file does not repeat
USUAL = {"injection": "edit", "white box": NAMED, "black box": NAMED}


def arguments(name: str, shape: tuple[int, int, int, int] = SMALL) -> dict[str, Any]:
    """The demo's arguments, smaller where the demo does not ask for a shape, other lengths or a level."""
    demo = catalogue.get(name).demo
    kept = {"shape", "sk", "cu_seqlens", "level", "recipe"} & set(demo)
    # the demo's window of 41 keys must be shorter than the sequence
    shape = SMALL if "window" in demo.get("spec", {}) else shape
    return catalogue.demo_arguments(name) | ({} if kept else {"shape": shape})


def black_box(subject: Subject) -> Subject:
    """The subject with everything but o cut off."""
    forward = subject.forward

    @functools.wraps(forward)
    def only_o(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)[0]

    return replace(subject, forward=only_o)


def outcome(name: str, report: doctor.Report) -> str:
    """`named`, or what was said instead with the stage it points at, or `unseen`."""
    if not report.findings:
        return "unseen"
    first = report.findings[0]
    return NAMED if first.id == name else f"{first.id} at {first.stage}"


def examine(name: str, monkeypatch: pytest.MonkeyPatch, boxed: bool = False) -> doctor.Report:
    from injection import inject

    subject = inject(name, monkeypatch)
    if boxed:
        return doctor.diagnose(black_box(subject), **catalogue.demo_arguments(name))
    return doctor.diagnose(subject, **arguments(name))


def measure(names: Collection[str] = (), processes: int = 1) -> dict[str, Any]:
    """Every entry of the catalogue, or some of them beside the records of the others."""
    kept = {name: entry for name, entry in load()["defects"].items() if name not in names} if names else {}
    wanted = [name for name in catalogue.names() if name not in kept]
    if processes > 1:
        with multiprocessing.get_context("spawn").Pool(processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            seen = dict(zip(wanted, pool.imap(measured, wanted), strict=True))
    else:
        seen = {name: measured(name) for name in wanted}
    found = {name: kept.get(name) or seen[name] for name in catalogue.names()}
    return {"schema": 1, "totals": totals(found), "defects": found}


def measured(name: str) -> dict[str, str]:
    """How one entry is injected, and what is said of it as it is and as a black box."""
    from injection import NOT_INJECTED, kind_of

    if name in NOT_INJECTED:
        return {"injection": "none", "white box": NOT_APPLICABLE, "black box": NOT_APPLICABLE}
    seen = {}
    for boxed, label in ((False, "white box"), (True, "black box")):
        if boxed and name in NEEDS_LSE:
            seen[label] = NOT_APPLICABLE
            continue
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen[label] = outcome(name, examine(name, monkeypatch, boxed))
    found = {"injection": kind_of(name)} | seen
    sys.stderr.write(f"{name}: {found}\n")
    return found


def totals(found: dict[str, dict[str, str]]) -> dict[str, Any]:
    def share(label: str) -> dict[str, int]:
        outcomes = [entry[label] for entry in found.values() if entry[label] != NOT_APPLICABLE]
        return {"injected": len(outcomes), "found": len(outcomes) - outcomes.count("unseen"), "named": outcomes.count(NAMED)}

    kinds = Counter(entry["injection"] for entry in found.values())
    return {
        "catalogue": len(found),
        "injections": {kind: kinds[kind] for kind in (*KINDS, "none")},
        "white box": share("white box"),
        "black box": share("black box"),
    }


def load() -> dict[str, Any]:
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return data | {"defects": {name: USUAL | entry for name, entry in data["defects"].items()}}


def write(data: dict[str, Any]) -> None:
    """A line for each defect."""
    short = {
        name: {key: value for key, value in entry.items() if value != USUAL[key]} for name, entry in data["defects"].items()
    }
    lines = ",\n".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in short.items())
    head = json.dumps({key: value for key, value in data.items() if key != "defects"})
    FILE.write_text(f'{head[:-1]}, "defects":{{\n{lines}\n}}}}\n', encoding="utf-8")


def table(data: dict[str, Any]) -> str:
    """The table of docs/doctor.md."""
    lines = ["| kernel | injected | found | named first |", "|---|---|---|---|"]
    words = {"white box": "returns o, lse and gradients", "black box": "returns o and gradients only"}
    for label, entry in ((words[key], data["totals"][key]) for key in words):
        lines.append(f"| {label} | {entry['injected']} | {entry['found']} | {entry['named']} |")
    return "\n".join(lines)


def independence(data: dict[str, Any]) -> str:
    """How the injections are made, for docs/doctor.md."""
    lines = ["| how it is injected | defects |", "|---|---|"]
    counts = data["totals"]["injections"]
    return "\n".join(lines + [f"| {words} | {counts[kind]} |" for kind, words in KINDS.items()])


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    torch.set_num_threads(1)
    FILE.parent.mkdir(parents=True, exist_ok=True)
    given = sys.argv[1:]
    at_once = int(given.pop(0).removeprefix("-j")) if given and given[0].startswith("-j") else 1
    write(measure(given, at_once))
