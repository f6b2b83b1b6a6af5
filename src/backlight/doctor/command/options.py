"""Words of the command line as values; a word that means nothing, or would be ignored, gets a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backlight.command_line import LARGEST, number, one_of, option, sizes, whole, writable
from backlight.doctor.subject.apart import GIB, Limits

if TYPE_CHECKING:
    from backlight.doctor.subject.case import Case

LEAST_ALPHA, MOST_ALPHA = 1.05, 2
LEVELS = ("quick", "full", "forensic", "adversarial")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
PRECISIONS = ("fp8",)
FORMATS = ("text", "line", "json", "sarif")
LAYOUTS = ("auto", "BHSD", "BSHD", "packed")
TIMEOUT = "300"
# what captured tensors say themselves
OF_A_CAPTURE = ("shape", "kv_heads", "sk", "dv", "lengths", "dtype", "recipe")

ATTENTION = partial(typer.Option, rich_help_panel="Attention")
INPUTS = partial(typer.Option, rich_help_panel="Inputs")
EXAMINATION = partial(typer.Option, rich_help_panel="Examination")


@dataclass(frozen=True)
class Asked:
    """One command line, which is also the list of its options; `typed` names those that stood on it."""

    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="SUBJECT",
            help="A name (see --list), path.py:function, module:function, or demo:DEFECT. "
            "Forward mode is examined where there is one, or a function_jvp beside it.",
        ),
    ] = None
    causal: Annotated[bool, ATTENTION("--causal", help="Hide keys after the row's own position.")] = False
    window: Annotated[str | None, ATTENTION(metavar="L,R", help="Reach around the row's own position; * is unbounded.")] = None
    scale: Annotated[str | None, ATTENTION(metavar="X", help="Factor on q.k; default D ** -0.5.")] = None
    softcap: Annotated[str | None, ATTENTION(metavar="X", help="c in c * tanh(score / c).")] = None
    bias: Annotated[str | None, ATTENTION(metavar="N", help="Learned bias by distance, N columns.")] = None
    bias_origin: Annotated[str, ATTENTION(metavar="N", help="Column of distance 0.")] = "0"
    sink: Annotated[bool, ATTENTION("--sink", help="Learned logit in the denominator.")] = False
    tau: Annotated[str | None, ATTENTION(metavar="X", help="Elastic softmax with this tau.")] = None
    entmax: Annotated[str | None, ATTENTION(metavar="X", help="Entmax with this alpha, 1.05 to 2, in every head.")] = None
    gate: Annotated[bool, ATTENTION("--gate", help="Output times sigmoid(gate).")] = False
    pair_bias: Annotated[bool, ATTENTION("--pair-bias", help="Learned bias of every pair.")] = False
    rows: Annotated[bool, ATTENTION("--mask", help="A mask by row intervals.")] = False
    shape: Annotated[str, INPUTS(metavar="B,H,S,D", help="Batch, query heads, query length, head size.")] = "2,4,200,64"
    kv_heads: Annotated[str | None, INPUTS(metavar="N", help="Key/value heads, if fewer.")] = None
    sk: Annotated[str | None, INPUTS(metavar="N", help="Key length, if different.")] = None
    dv: Annotated[str | None, INPUTS(metavar="N", help="Value head size, if different.")] = None
    lengths: Annotated[str | None, INPUTS(metavar="S1,S2,...", help="Packed sequences of these lengths.")] = None
    dtype: Annotated[str, INPUTS(help=", ".join(DTYPES) + ".")] = "bf16"
    recipe: Annotated[
        str, INPUTS(help="gaussian, peaky (saturated), dominant (a key), low_lse, high_lse, jumps, rising, falling, outliers.")
    ] = "gaussian"
    seed: Annotated[str, INPUTS(metavar="N", help="Seed of the inputs.")] = "0"
    capture: Annotated[Path | None, INPUTS(help="Replay tensors saved as .pt or .safetensors.")] = None
    device: Annotated[str, INPUTS(help="Where the kernel runs.")] = "cpu"
    layout: Annotated[str, INPUTS(help="What the kernel reads: auto, BHSD, BSHD, packed.")] = "auto"
    level: Annotated[
        str, EXAMINATION(help="quick (seconds), full (a minute), forensic (everything), adversarial (made for the test?).")
    ] = "quick"
    precision: Annotated[
        str | None,
        EXAMINATION(metavar="fp8", help="Judge by what a kernel of this precision can do; ours compute in it."),
    ] = None
    against: Annotated[str | None, EXAMINATION(metavar="SUBJECT", help="Judge this reference of yours too.")] = None
    report: Annotated[
        Path | None,
        EXAMINATION(metavar="DIR", help="Write report.html, report.json and a repro script."),
    ] = None
    json: Annotated[Path | None, EXAMINATION(metavar="FILE", help="Write the report as JSON; - is standard output.")] = None
    format: Annotated[str, EXAMINATION(help="What standard output gets: text, line (verdict and ids), json, sarif.")] = "text"
    sanitize: Annotated[
        bool, EXAMINATION("--sanitize", help="Also run the kernel once under each tool of compute-sanitizer (CUDA).")
    ] = False
    timeout: Annotated[
        str, EXAMINATION(metavar="SECONDS", help="Give up when one call of the kernel takes longer; 0 = never.")
    ] = TIMEOUT
    memory: Annotated[
        str | None,
        EXAMINATION(metavar="GIB", help="Give up when more memory is used; 0 = no limit, default 90 % of what is free."),
    ] = None
    in_process: Annotated[
        bool, EXAMINATION("--in-process", help="No child process: for debuggers. A crash of the kernel ends the doctor.")
    ] = False
    demo: Annotated[str | None, EXAMINATION(metavar="NAME", help="Examine a deliberately broken kernel.")] = None
    list_: Annotated[bool, EXAMINATION("--list", help="List kernels, demos and the defect catalogue.")] = False
    typed: frozenset[str] = field(default=frozenset(), metadata={"typed": False})

    @property
    def name(self) -> str:
        """The subject as `resolve` reads it; '' when none was named."""
        return f"demo:{self.demo}" if self.demo is not None else self.subject or ""

    @property
    def to_stdout(self) -> bool:
        return self.json is not None and str(self.json) == "-"

    @property
    def for_programs(self) -> bool:
        """Whether standard output is read by a program, so that nothing else may stand there."""
        return self.to_stdout or self.format in FORMATS[1:]

    @property
    def seconds(self) -> float:
        """How long one call of the subject may take; 0 = for ever."""
        return number("--timeout", self.timeout, least=0.0)  # type: ignore[return-value]

    @property
    def limits(self) -> Limits:
        """What the kernel may take of this machine."""
        gib = number("--memory", self.memory, least=0.0)
        return Limits(self.seconds, None if gib is None else int(gib * GIB))

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
        held = [name for name in ("bias", "tau", "entmax") if name in tensors and name in self.typed]
        if held:
            raise ValueError(f"{option(held[0])} would be ignored: {self.capture} holds {held[0]}")
        kept = {name: settings[name] for name in ("seed", "level", "device", "precision", "bias", "tau", "entmax")}
        return Case.captured(tensors, spec, **kept)

    def writable(self) -> None:
        """Raises where the files asked for cannot be written: better before the examination than after."""
        if self.report is not None:
            writable("--report", self.report / "report.html")
        if self.json is not None and not self.to_stdout:
            writable("--json", self.json)

    def _spec(self) -> Any:
        from backlight.spec import TERM_NAMES, AttentionSpec

        # a term without an option of its own cannot be asked for here
        terms = {name: getattr(self, name, None) not in (None, False) for name in TERM_NAMES}
        return AttentionSpec(
            causal=self.causal,
            window=pair(self.window),
            scale=number("--scale", self.scale),
            softcap=number("--softcap", self.softcap),
            bias_origin=whole("--bias-origin", self.bias_origin, least=-LARGEST) or 0,
            **terms,
        )

    def _settings(self) -> dict[str, Any]:
        import torch

        from backlight.problems.checks import usable_device
        from backlight.problems.recipes import RECIPES

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
            "precision": None if self.precision is None else one_of("--precision", self.precision, PRECISIONS),
            "bias": whole("--bias", self.bias),
            "tau": number("--tau", self.tau),
            "entmax": self._alpha(),
        }

    def _alpha(self) -> float | None:
        alpha = number("--entmax", self.entmax)
        if alpha is not None and not LEAST_ALPHA <= alpha <= MOST_ALPHA:
            raise ValueError(f"--entmax must be from {LEAST_ALPHA} to {MOST_ALPHA}, got {self.entmax!r}")
        return alpha

    def _refuse_ignored(self) -> None:
        one_of("--format", self.format, FORMATS)
        if self.to_stdout and "format" in self.typed:
            raise ValueError(f"--json - would be ignored: --format {self.format} says what standard output gets")
        if self.demo is not None and self.subject is not None:
            raise ValueError(f"name a kernel or a demo, not both: got {self.subject!r} and --demo {self.demo}")
        if self.tau is not None and self.entmax is not None:
            raise ValueError("--tau prunes a softmax, and --entmax is another one: give one of the two, got both")
        if "bias_origin" in self.typed and self.bias is None and self.capture is None:
            raise ValueError(f"--bias-origin {self.bias_origin} would be ignored: there is no --bias")
        if self.lengths is not None:
            self._refuse(("sk",), "--lengths gives the lengths of queries and keys")
        if self.capture is not None:
            self._refuse(OF_A_CAPTURE, "captured tensors bring their own")
        if self.name.startswith("demo:"):
            from backlight.doctor.defects.stories import own_settings
            from backlight.spec import AttentionSpec

            chosen = own_settings(self.name.removeprefix("demo:"))
            attention = [each.name for each in fields(AttentionSpec)]
            self._refuse((*attention, "capture", "layout", *chosen), "a demo brings its own")

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        ignored = [name for name in names if name in self.typed]
        if ignored:
            raise ValueError(f"{option(ignored[0])} {getattr(self, ignored[0])} would be ignored: {reason}")


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
