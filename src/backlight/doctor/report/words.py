"""Numbers and settings as people read them; shared by the terminal and the HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from backlight.doctor.report.model import Report, StageRow

VERDICTS = {"healthy": "HEALTHY", "defect": "DEFECT", "precision": "PRECISION", "could-not-run": "COULD NOT RUN"}

LEGEND = {
    "gain": "size against the float64 oracle, fitted per head: 1 is right",
    "rho_A": "error / error of plain PyTorch in the same dtype: passes up to 2, fails above 4",
    "rho_B": "error / error of a textbook flash kernel: above 1.25 is a loss of precision",
    "culprit": "the first quantity that is wrong although everything it was computed from is right",
    "inherited": "wrong only because something before it is wrong",
}

GAIN_SPREAD = 2e-3


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, `-` for nothing, no exponent where a reader can do without."""
    if value is None:
        return "-"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:.{digits - 1}e}"


def counted(count: int, thing: str) -> str:
    """'1 value', '2 values'."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def ratio(value: float | None) -> str:
    """A ratio needs two digits."""
    return number(value, 2)


def gain(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) and abs(value) < 1000 else number(value, 4)


def percent(share: float | None) -> str:
    """An explained share: 0.99999 -> 99.99 %. Nothing explains rounding noise, so 100 is never shown."""
    if share is None:
        return "-"
    return f"{min(math.floor(share * 1e4) / 100, 99.99):.2f} %"


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def gains_differ(row: StageRow) -> bool:
    """Whether heads have different gains: then the vector is worth more than the mean."""
    return not all(abs(value - row.gains[0]) <= GAIN_SPREAD for value in row.gains)


def gains_words(gains: Sequence[float], most: int = 16) -> str:
    shown = "  ".join(gain(value) for value in gains[:most])
    return shown if len(gains) <= most else f"{shown}  ... {len(gains) - most} more heads"


def spec_words(spec: Mapping[str, Any]) -> str:
    """The features in use: `causal, window 95,0, softcap 30`; `plain softmax attention` when there are none."""
    parts = []
    for name, value in spec.items():
        if name == "window" and value is not None:
            if any(side is not None for side in value):
                parts.append("window " + ",".join("*" if side is None else str(side) for side in value))
        elif name == "bias_origin":
            if value and spec.get("bias"):
                parts.append(f"bias origin {value}")
        elif value is True:
            parts.append(name)
        elif value not in (None, False):
            parts.append(f"{name} {number(value) if isinstance(value, float) else value}")
    return ", ".join(parts) or "plain softmax attention"


def setting(value: Any, between: str = ",") -> str:
    """One recipe entry in a line; entries of a mapping that are equal share their value: `q k v 2x4x200x64`."""
    if isinstance(value, Mapping):
        shared: dict[str, list[str]] = {}
        for name, item in value.items():
            shared.setdefault(setting(item, between), []).append(name)
        return "  ".join(f"{' '.join(names)} {words}" for words, names in shared.items())
    if isinstance(value, list | tuple):
        return (between if all(isinstance(item, int) for item in value) else ", ").join(setting(item) for item in value) or "-"
    return number(value) if isinstance(value, float) else str(value)


def settings(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Recipe entries as words, empty ones and the notes left out; shapes read 2x4x200x64."""
    kept = {name: value for name, value in recipe.items() if name != "notes" and value not in (None, {}, [])}
    return {name: setting(value, "x" if name == "shapes" else ",") for name, value in kept.items()}


def notes(recipe: Mapping[str, Any]) -> list[str]:
    """Remarks of the examination about how it went."""
    return [str(note) for note in recipe.get("notes", ())]


def verdict(report: Report) -> str:
    """The verdict in capitals; a kernel that computes something consistent, but not what was asked, is a TEST FAULT."""
    chief = next((finding for finding in report.ranked if finding.severity != "note"), None)
    if report.verdict == "defect" and chief is not None and chief.severity == "test-fault":
        return "TEST FAULT"
    return VERDICTS[report.verdict]


def top_facts(report: Report) -> str:
    """`confidence high   mechanism established` of the best finding, or nothing."""
    best = [finding for finding in report.ranked if finding.severity != "note"]
    if not best or report.verdict in ("healthy", "could-not-run"):
        return ""
    return f"confidence {best[0].confidence}   mechanism {best[0].mechanism.split(' (')[0]}"
