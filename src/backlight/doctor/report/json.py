"""Reports as JSON files, and what changed between two of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from backlight.doctor.report.model import Report

# between two runs on other seeds or machines a ratio moves by this much without meaning anything
RATIO_MOVED = 1.5
# ratios below this are both fine, whatever their quotient
RATIO_MATTERS = 1.25

VERDICT_RANK = {"healthy": 0, "precision": 1, "defect": 2, "could-not-run": 3}
STATUS_RANK = {"ok": 0, "unseen": 0, "precision": 1, "inherited": 2, "suspect": 2, "culprit": 3}


def dumps(report: Report) -> str:
    return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"


def loads(text: str) -> Report:
    return Report.from_dict(json.loads(text))


def save(report: Report, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(report), encoding="utf-8")
    return path


def load(path: str | Path) -> Report:
    """Read a report; a file that is none gets a sentence."""
    try:
        return loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a report of this version: {error}") from error


@dataclass
class Comparison:
    """Differences between two reports, each a plain sentence."""

    better: list[str] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """1 when something got worse or a new defect, precision loss or test fault appeared; else 0."""
        return 1 if self.worse or self.new else 0


def compare(old: Report, new: Report) -> Comparison:
    """What got better or worse from `old` to `new`; findings are matched by id, stages by name."""
    result = Comparison()
    change = VERDICT_RANK[new.verdict] - VERDICT_RANK[old.verdict]
    if change:
        (result.worse if change > 0 else result.better).append(f"verdict: {old.verdict} -> {new.verdict}")
    before = {finding.id: finding for finding in old.findings}
    after = {finding.id: finding for finding in new.findings}
    for source, other, serious in ((before, after, result.gone), (after, before, result.new)):
        for name in source.keys() - other.keys():
            finding = source[name]
            (result.notes if finding.severity == "note" else serious).append(f"{name}: {finding.title}")
    for bucket in (result.gone, result.new, result.notes):
        bucket.sort()
    _compare_stages(old, new, result)
    for name in ("spec", "recipe", "environment"):
        result.notes += _settings(name, getattr(old, name), getattr(new, name))
    return result


def _compare_stages(old: Report, new: Report, result: Comparison) -> None:
    before, after = ({row.name: row for row in report.stages} for report in (old, new))
    for name in before:
        if name not in after:
            result.notes.append(f"{name}: observed before, not observed now")
    for name, row in after.items():
        if name not in before:
            result.notes.append(f"{name}: observed now, not observed before")
            continue
        was = before[name]
        change = STATUS_RANK[row.status] - STATUS_RANK[was.status]
        if change:
            (result.worse if change > 0 else result.better).append(f"{name}: {was.status} -> {row.status}")
        if row.nonfinite != was.nonfinite:
            bucket = result.worse if row.nonfinite > was.nonfinite else result.better
            bucket.append(f"{name}: {was.nonfinite} -> {row.nonfinite} non-finite values")
        for label, a, b in (("rho_A", was.rho_a, row.rho_a), ("rho_B", was.rho_b, row.rho_b)):
            moved = _moved(a, b)
            if moved:
                (result.worse if moved > 0 else result.better).append(f"{name}: {label} {a:.3g} -> {b:.3g}")


def _moved(a: float | None, b: float | None) -> int:
    """1 when a ratio got worse, -1 when better, 0 when it stayed or was never of interest. NaN counts as worst."""
    if a is None or b is None:
        return 0
    a, b = (math.inf if math.isnan(value) else value for value in (a, b))
    if a == b or not max(a, b) > RATIO_MATTERS:
        return 0
    return 1 if b > RATIO_MOVED * a else -1 if a > RATIO_MOVED * b else 0


def _settings(name: str, old: dict, new: dict) -> list[str]:
    return [
        f"{name} {key}: {old.get(key)} -> {new.get(key)}" for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key)
    ]
