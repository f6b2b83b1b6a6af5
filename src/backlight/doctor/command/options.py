"""Words of the command line as values; a word that means nothing, or would be ignored, gets a sentence."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backlight.doctor.subject.case import Case

LEVELS = ("quick", "full", "forensic")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LAYOUTS = ("auto", "BHSD", "BSHD", "packed")
LARGEST = 2**31 - 1
ATTENTION = ("causal", "window", "scale", "softcap", "bias", "bias_origin", "sink", "tau", "gate")
# what captured tensors say themselves
OF_A_CAPTURE = ("shape", "kv_heads", "sk", "dv", "lengths", "dtype", "recipe")


@dataclass(frozen=True)
class Asked:
    """One command line; `typed` names the options that stood on it."""

    typed: frozenset[str]
    subject: str | None
    causal: bool
    window: str | None
    scale: str | None
    softcap: str | None
    bias: str | None
    bias_origin: str
    sink: bool
    tau: str | None
    gate: bool
    shape: str
    kv_heads: str | None
    sk: str | None
    dv: str | None
    lengths: str | None
    dtype: str
    recipe: str
    seed: str
    capture: Path | None
    device: str
    layout: str
    level: str
    against: str | None
    report: Path | None
    json: Path | None
    sanitize: bool
    timeout: str
    demo: str | None
    list_: bool

    @property
    def name(self) -> str:
        """The subject as `resolve` reads it; '' when none was named."""
        return f"demo:{self.demo}" if self.demo is not None else self.subject or ""

    @property
    def to_stdout(self) -> bool:
        return self.json is not None and str(self.json) == "-"

    @property
    def seconds(self) -> float:
        """How long one call of the subject may take; 0 = for ever."""
        return number("--timeout", self.timeout, least=0.0)  # type: ignore[return-value]

    def case(self) -> Case:
        """What to examine the subject with; ValueError with a sentence for words that mean nothing or would be ignored."""
        from backlight.doctor.subject.capture import load_capture
        from backlight.doctor.subject.case import Case

        self._refuse_ignored()
        settings = self._settings()
        spec = self._spec()
        if self.capture is None:
            return Case(spec=spec, **settings)
        tensors = load_capture(self.capture)
        held = [name for name in ("bias", "tau") if name in tensors and name in self.typed]
        if held:
            raise ValueError(f"{option(held[0])} would be ignored: {self.capture} holds {held[0]}")
        kept = {name: settings[name] for name in ("seed", "level", "device", "bias", "tau")}
        return Case.captured(tensors, spec, **kept)

    def writable(self) -> None:
        """Raises where the files asked for cannot be written: better before the examination than after."""
        if self.report is not None:
            writable("--report", self.report / "report.html")
        if self.json is not None and not self.to_stdout:
            writable("--json", self.json)

    def _spec(self) -> Any:
        from backlight.spec import AttentionSpec

        return AttentionSpec(
            causal=self.causal,
            window=pair(self.window),
            scale=number("--scale", self.scale),
            softcap=number("--softcap", self.softcap),
            bias=self.bias is not None,
            bias_origin=whole("--bias-origin", self.bias_origin, least=-LARGEST) or 0,
            sink=self.sink,
            tau=self.tau is not None,
            gate=self.gate,
        )

    def _settings(self) -> dict[str, Any]:
        import torch

        from backlight.problems.checks import usable_device
        from backlight.problems.inputs import RECIPES

        one_of("--layout", self.layout, LAYOUTS)
        try:
            usable_device(self.device)
        except ValueError as error:
            raise ValueError(f"--device: {error}") from None
        return {
            "shape": sizes("--shape", self.shape, 4),
            "kv_heads": whole("--kv-heads", self.kv_heads),
            "sk": whole("--sk", self.sk),
            "dv": whole("--dv", self.dv),
            "lengths": None if self.lengths is None else sizes("--lengths", self.lengths),
            "dtype": getattr(torch, DTYPES[one_of("--dtype", self.dtype, DTYPES)]),
            "recipe": one_of("--recipe", self.recipe, RECIPES),
            "seed": whole("--seed", self.seed, least=0),
            "level": one_of("--level", self.level, LEVELS),
            "device": self.device,
            "bias": whole("--bias", self.bias),
            "tau": number("--tau", self.tau),
        }

    def _refuse_ignored(self) -> None:
        if self.demo is not None and self.subject is not None:
            raise ValueError(f"name a kernel or a demo, not both: got {self.subject!r} and --demo {self.demo}")
        if "bias_origin" in self.typed and self.bias is None and self.capture is None:
            raise ValueError(f"--bias-origin {self.bias_origin} would be ignored: there is no --bias")
        if self.lengths is not None:
            self._refuse(("sk",), "--lengths gives the lengths of queries and keys")
        if self.capture is not None:
            self._refuse(OF_A_CAPTURE, "captured tensors bring their own")
        if self.name.startswith("demo:"):
            from backlight.doctor.defects.stories import own_settings

            chosen = own_settings(self.name.removeprefix("demo:"))
            self._refuse((*ATTENTION, "capture", "layout", *chosen), "a demo brings its own")

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        ignored = [name for name in names if name in self.typed]
        if ignored:
            raise ValueError(f"{option(ignored[0])} {getattr(self, ignored[0])} would be ignored: {reason}")


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def absolute(subject: str) -> str:
    """`kernel.py:fn` with its full path, so that a script finds it from anywhere; other names unchanged."""
    place, _, attribute = subject.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else subject


def pair(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return (None, None)
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2:
        raise ValueError(f"--window wants two sides as in 95,0 or *,0, got {text!r}")
    try:
        left, right = (None if side in ("", "*", "none") else int(side) for side in sides)
    except ValueError:
        raise ValueError(f"--window wants whole numbers or *, as in 95,0, got {text!r}") from None
    if max(left or 0, right or 0) > LARGEST:
        raise ValueError(f"--window wants sides up to {LARGEST}, or * for no bound, got {text!r}")
    return left, right


def sizes(option: str, text: str, count: int | None = None) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ValueError(f"{option} wants whole numbers with commas between them, got {text!r}") from None
    if (count is not None and len(values) != count) or min(values) < 1 or max(values) > LARGEST:
        raise ValueError(f"{option} wants {count or 'some'} positive numbers up to {LARGEST}, got {text!r}")
    return values


def one_of(option: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def whole(option: str, text: str | None, least: int = 1, most: int = LARGEST) -> int | None:
    """A whole number; None where the option was not given."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        raise ValueError(f"{option} must be a whole number from {least} to {most}, got {text!r}")
    return value


def number(option: str, text: str | None, least: float = -math.inf) -> float | None:
    """A finite number; None where the option was not given."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        bound = f" of at least {least:g}" if math.isfinite(least) else ""
        raise ValueError(f"{option} must be a finite number{bound}, got {text!r}")
    return value


def writable(option: str, path: Path) -> None:
    """Raises with a sentence unless a file can be written there; leaves nothing behind but folders."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        if not new and not path.is_file() and not path.is_dir():
            # a pipe: whoever reads it would take our trial for the end
            return
        with path.open("ab"):
            pass
        if new:
            os.remove(path)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{option} {path} cannot be written: {what}") from None
