"""The no-false-alarm sweep as data: correct kernels x variants x dtypes x recipes x seeds, and what counts as a complaint.

The tests run it on the CPU and, where there is one, on a GPU. One problem serves every subject: its oracle is the dear part.

python tests/doctor/sweep.py FILE puts what a run counted into docs/data/doctor-sweep.json, which docs/doctor.md shows: FILE is
the --junitxml of `pytest -m slow tests/doctor/test_no_false_alarm.py`, or holds one JSON object a line (subject, device, clean,
verdict).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

import backlight
from backlight import registry
from backlight.doctor.report.model import Report
from backlight.doctor.steps.examination import Examination
from backlight.doctor.subject import names
from backlight.doctor.subject.subject import Subject
from backlight.problems import inputs
from backlight.problems.problem import Problem
from backlight.spec import AttentionSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
RECIPES = ("gaussian", "peaky", "dominant")
CU = torch.tensor([0, 30, 31, 31, 72], dtype=torch.int32)

VARIANTS: dict[str, tuple[AttentionSpec, dict[str, Any]]] = {
    "plain": (AttentionSpec(), {}),
    "causal": (AttentionSpec(causal=True), {}),
    "window": (AttentionSpec(causal=True, window=(20, 0)), {}),
    "two-sided": (AttentionSpec(window=(10, 15)), {}),
    "gqa": (AttentionSpec(causal=True), {"kv_heads": 2}),
    "longer keys": (AttentionSpec(causal=True), {"sk": 100}),
    "longer rows": (AttentionSpec(causal=True), {"sk": 40}),
    "scale": (AttentionSpec(scale=0.3), {}),
    "softcap": (AttentionSpec(causal=True, softcap=2.0), {}),
    "bias": (AttentionSpec(causal=True, bias=True), {}),
    "tau": (AttentionSpec(causal=True, tau=True), {}),
    "sink": (AttentionSpec(causal=True, sink=True), {}),
    "gate": (AttentionSpec(causal=True, gate=True), {}),
    "all": (AttentionSpec(causal=True, bias=True, tau=True, sink=True, gate=True), {}),
    "packed": (AttentionSpec(causal=True), {"cu_seqlens": CU}),
    "packed bias tau": (AttentionSpec(causal=True, bias=True, tau=True), {"cu_seqlens": CU}),
}

CPU_SHAPES, CPU_SEEDS = ((1, 4, 65, 64), (2, 4, 72, 32)), 20
CPU_SUBJECTS = ("tiled", "sdpa:math", "sdpa:flash", "flex")
GPU_SHAPE, GPU_SEEDS = (2, 2, 200, 64), 5
GPU_VARIANTS = VARIANTS | {
    "gqa": (AttentionSpec(causal=True), {"kv_heads": 2, "shape": (1, 4, 200, 64)}),
    "longer keys": (AttentionSpec(causal=True), {"sk": 260}),
    "longer rows": (AttentionSpec(causal=True), {"sk": 130}),
    "wide heads": (AttentionSpec(causal=True), {"shape": (1, 2, 129, 128)}),
}
# sums by atomics, and lse of rows that see nothing: true of correct kernels, and said as notes
TRUE_NOTES = ("atomics-reorder", "empty-rows-lse")
PEERS = ("sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "sdpa:math", "flex", "fa3")


@dataclass(frozen=True)
class Run:
    """One examination: a subject by name, and the problem it is examined with."""

    subject: str
    variant: str
    dtype: str
    recipe: str
    seed: int
    device: str = "cuda"

    @property
    def problem(self) -> Problem:
        return problem_of(self.variant, self.dtype, self.recipe, self.seed, self.device)

    def examine(self, level: str = "quick") -> Report:
        problem = self.problem
        return Examination(subject_of(self.subject, problem.call.varlen), problem, level).report()


def gpu_subjects() -> tuple[str, ...]:
    """Peers by name, then every backend of the registry."""
    return (*PEERS, *registry.names())


def gpu_runs(subjects: tuple[str, ...] | None = None) -> Iterator[Run]:
    """The whole sweep; runs of one problem follow each other."""
    grid = itertools.product(GPU_VARIANTS, DTYPES, RECIPES, range(GPU_SEEDS), subjects or gpu_subjects())
    return (Run(subject, variant, dtype, recipe, seed) for variant, dtype, recipe, seed, subject in grid)


@lru_cache(maxsize=8)
def problem_of(variant: str, dtype: str, recipe: str, seed: int, device: str = "cuda") -> Problem:
    spec, options = (GPU_VARIANTS if device == "cuda" else VARIANTS)[variant]
    chosen = {"shape": GPU_SHAPE if device == "cuda" else CPU_SHAPES[seed % len(CPU_SHAPES)]} | options
    return inputs.make(spec, dtype=DTYPES[dtype], recipe=recipe, seed=seed, device=device, **chosen)


@lru_cache(maxsize=64)
def subject_of(name: str, packed: bool) -> Subject:
    if name in registry.names():
        return names.own(name, backlight.attention, backlight.attention_varlen, "packed" if packed else "BHSD")
    return Subject(names.named(name), layout="BHSD", name=name)


def complaint(report: Report, notes: tuple[str, ...] = ()) -> str:
    """What the report holds against the subject; '' when nothing. `notes`: ids of notes that are true of a correct kernel."""
    said = [f"{f.id}: {f.title}" for f in report.findings if f.id not in notes]
    if said:
        return said[0]
    if report.verdict != "healthy":
        return f"{report.verdict}: {report.headline}"
    rows = [f"{r.name} is {r.status}: {r.note}" for r in report.stages if r.status != "ok"]
    failed = [f"{p.name}: {p.detail}" for p in report.probes if p.passed is False and p.data.get("finding") not in notes]
    return (rows + failed + [""])[0]


def refused(run: Run, report: Report) -> bool:
    """Whether the subject declined the problem. Our own backends must have announced it, so a crash of theirs is no refusal."""
    if report.verdict != "could-not-run":
        return False
    if run.subject not in registry.names():
        return True
    backend = registry.get(run.subject)
    return bool(registry.why_not(backend, run.problem.call))


# --- what was counted --------------------------------------------------------------------------------------------------------

FILE = Path(__file__).parents[2] / "docs" / "data" / "doctor-sweep.json"
LEVELS_FILE = FILE.with_name("doctor-levels-h200.json")


def load() -> dict[str, dict[str, dict[str, int]]]:
    """Device -> subject -> how many examinations there were, and how many raised a complaint."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def table(data: dict[str, dict[str, dict[str, int]]]) -> str:
    """The table of docs/doctor.md."""
    lines = ["| device | kernel | examinations | complaints |", "|---|---|---|---|"]
    for device, subjects in sorted(data.items()):
        lines += [f"| {device} | `{name}` | {n['examined']} | {n['complaints']} |" for name, n in sorted(subjects.items())]
    return "\n".join(lines)


def levels_table() -> str:
    """The table of docs/doctor.md for the dearer levels on a card: examinations and complaints."""
    data = json.loads(LEVELS_FILE.read_text(encoding="utf-8"))
    lines = ["| kernel | `quick` | `full` | `forensic` |", "|---|---|---|---|"]
    for name, levels in sorted(data.items()):
        seen = (levels.get(level) for level in ("quick", "full", "forensic"))
        cells = ("-" if each is None else f"{each['examined']}, {each['complaints']}" for each in seen)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def counted(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = {}

    def add(device: str, subject: str, examined: int, complaints: int) -> None:
        entry = found.setdefault(device, {}).setdefault(subject, {"examined": 0, "complaints": 0})
        entry["examined"] += examined
        entry["complaints"] += complaints

    if path.suffix == ".xml":
        cases = ElementTree.parse(path).getroot().iter("testcase")
        for case in (case for case in cases if "many_seeds" in case.get("name", "")):
            assert case.find("failure") is None, f"{case.get('name')} failed: its counts are not complete"
            for entry in case.iter("property"):
                add("cpu", str(entry.get("name")), int(str(entry.get("value"))), 0)
    else:
        for line in path.read_text(encoding="utf-8").splitlines():
            run = json.loads(line)
            if run["verdict"] != "declined":
                add(run.get("device", "cuda"), run["subject"], 1, not run["clean"])
    return found


if __name__ == "__main__":
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(json.dumps(load() | counted(Path(sys.argv[1])), indent=1, sort_keys=True) + "\n", encoding="utf-8")
