"""`backlight doctor`: examine a kernel, show what was found, keep the evidence.

Exit codes: 0 healthy, 1 defect, 2 loss of precision only, 3 could not run (bad arguments included).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from backlight.doctor.options import absolute, one_of, pair, sizes

if TYPE_CHECKING:
    from backlight.doctor.case import Case
    from backlight.doctor.report.model import Report
    from backlight.doctor.subject import Subject

COULD_NOT_RUN = 3
REPORT_WIDTH = 100
LEVELS = ("quick", "full", "forensic")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
LAYOUTS = ("auto", "BHSD", "BSHD", "packed")
# typer carries its own copy of click in some versions, so the base class is reached through typer's public exception
UsageError: Any = typer.BadParameter.__base__

ATTENTION = partial(typer.Option, rich_help_panel="Attention")
INPUTS = partial(typer.Option, rich_help_panel="Inputs")
EXAMINATION = partial(typer.Option, rich_help_panel="Examination")

EPILOG = """Examples: [bold]backlight doctor sdpa --causal[/] | [bold]my_kernel.py:fn --window 95,0 --report out[/] |
[bold]demo:window+1[/] | [bold]compare old.json new.json[/]. Exit codes: 0 healthy, 1 defect, 2 loss of precision only,
3 could not run."""


class DoctorGroup(TyperGroup):
    """`doctor SUBJECT ...` is the examination; other words (`compare`) are commands of their own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # options before the subject belong to the examination, help included
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["examine", *(args or ["--help"])])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return "" if name == "examine" else name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            # click's own code for a usage error is our code for a loss of precision
            error.exit_code = COULD_NOT_RUN
            raise


app = typer.Typer(cls=DoctorGroup, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(epilog=EPILOG)
def examine(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SUBJECT", help="A name (see --list), path.py:function, module:function, or demo:DEFECT."),
    ] = None,
    causal: Annotated[bool, ATTENTION("--causal", help="Hide keys after the row's own position.")] = False,
    window: Annotated[str | None, ATTENTION(metavar="L,R", help="Reach around the row's own position; * is unbounded.")] = None,
    scale: Annotated[float | None, ATTENTION(help="Factor on q.k; default D ** -0.5.")] = None,
    softcap: Annotated[float | None, ATTENTION(help="c in c * tanh(score / c).")] = None,
    bias: Annotated[int | None, ATTENTION(metavar="N", help="Learned bias by distance, N columns.")] = None,
    bias_origin: Annotated[int, ATTENTION(help="Column of distance 0.")] = 0,
    sink: Annotated[bool, ATTENTION("--sink", help="Learned logit in the denominator.")] = False,
    tau: Annotated[float | None, ATTENTION(metavar="X", help="Elastic softmax with this tau.")] = None,
    gate: Annotated[bool, ATTENTION("--gate", help="Output times sigmoid(gate).")] = False,
    shape: Annotated[str, INPUTS(metavar="B,H,S,D", help="Batch, query heads, query length, head size.")] = "2,4,200,64",
    kv_heads: Annotated[int | None, INPUTS(help="Key/value heads, if fewer.")] = None,
    sk: Annotated[int | None, INPUTS(help="Key length, if different.")] = None,
    dv: Annotated[int | None, INPUTS(help="Value head size, if different.")] = None,
    lengths: Annotated[str | None, INPUTS(metavar="S1,S2,...", help="Packed sequences of these lengths.")] = None,
    dtype: Annotated[str, INPUTS(help=", ".join(DTYPES) + ".")] = "bf16",
    recipe: Annotated[str, INPUTS(help="gaussian, peaky (saturated rows), dominant (one key), low_lse.")] = "gaussian",
    seed: Annotated[int, INPUTS(help="Seed of the inputs.")] = 0,
    capture: Annotated[Path | None, INPUTS(help="Replay tensors saved as .pt or .safetensors.")] = None,
    device: Annotated[str, INPUTS(help="Where the kernel runs.")] = "cpu",
    layout: Annotated[str, INPUTS(help="What the kernel reads: auto, BHSD, BSHD, packed.")] = "auto",
    level: Annotated[str, EXAMINATION(help="quick (seconds), full (a minute), forensic (everything).")] = "quick",
    against: Annotated[str | None, EXAMINATION(metavar="SUBJECT", help="Judge this reference of yours too.")] = None,
    report: Annotated[
        Path | None,
        EXAMINATION(metavar="DIR", help="Write report.html, report.json and a repro script."),
    ] = None,
    json: Annotated[Path | None, EXAMINATION(metavar="FILE", help="Write the report as JSON; - is standard output.")] = None,
    sanitize: Annotated[
        bool, EXAMINATION("--sanitize", help="Also run the kernel once under each tool of compute-sanitizer (CUDA).")
    ] = False,
    demo: Annotated[str | None, EXAMINATION(metavar="NAME", help="Examine a deliberately broken kernel.")] = None,
    list_: Annotated[bool, EXAMINATION("--list", help="List kernels, demos and the defect catalogue.")] = False,
) -> None:
    """Examine an attention kernel: which quantity goes wrong first, where, and the name of the defect.

    Also: [bold]backlight doctor compare OLD.json NEW.json[/] tells what got better or worse between two reports.
    """
    from backlight.doctor import lists, stories

    console = wide_console()
    if list_:
        lists.show(console, own_kernels())
        raise typer.Exit
    if demo is not None:
        subject = f"demo:{demo}"
    if subject is None:
        raise typer.BadParameter("name a kernel, or use --demo NAME or --list")
    try:
        spec_settings = {
            "causal": causal,
            "window": pair(window),
            "scale": scale,
            "softcap": softcap,
            "bias": bias is not None,
            "bias_origin": bias_origin,
            "sink": sink,
            "tau": tau is not None,
            "gate": gate,
        }
        case = make_case(
            spec_settings,
            capture,
            shape=sizes("--shape", shape, 4),
            kv_heads=kv_heads,
            sk=sk,
            dv=dv,
            lengths=None if lengths is None else sizes("--lengths", lengths),
            dtype=one_of("--dtype", dtype, DTYPES),
            recipe=recipe,
            seed=seed,
            level=one_of("--level", level, LEVELS),
            device=device,
            bias=bias,
            tau=tau,
        )
        layout = one_of("--layout", layout, LAYOUTS)
        if subject.startswith("demo:"):
            case, against = stories.prepare(subject.removeprefix("demo:"), case, against)
            tell(subject.removeprefix("demo:"), wide_console(stderr=True))
        run = examiner(subject, case, layout, against)
        with Console(stderr=True).status(f"examining {subject} ({case.level})"):
            found = run(case)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        conclude(failed(subject, error), report, json, console)
    if (report is not None or case.level == "forensic") and found.verdict in ("defect", "precision"):
        from backlight.doctor import keep

        with Console(stderr=True).status("shrinking the case and running its script once"):
            outcome = keep.reproduce(found, case, absolute(subject), run, report, layout)
    else:
        outcome = ""
    if sanitize or (case.level == "forensic" and case.device.startswith("cuda")):
        from backlight.doctor.sanitize import sanitize as watch_memory

        with Console(stderr=True).status("running the kernel once under each tool of compute-sanitizer"):
            watch_memory(found, case, absolute(subject), layout)
    conclude(found, report, json, console, outcome)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="A report as JSON.")],
    new: Annotated[Path, typer.Argument(help="A later report as JSON.")],
) -> None:
    """What got better or worse between two reports; exit code 1 when something got worse."""
    from backlight.doctor.report import json

    console = wide_console()
    try:
        before, after = json.load(old), json.load(new)
    except (ValueError, OSError) as error:
        console.print(Text(str(error), style="red"))
        raise typer.Exit(COULD_NOT_RUN) from error
    result = json.compare(before, after)
    console.print(Text(f"{before.subject} ({before.verdict}) -> {after.subject} ({after.verdict})", style="bold"))
    table = Table.grid(padding=(0, 2))
    labels = {"new": "red", "worse": "red", "gone": "green", "better": "green", "notes": "dim"}
    for label, style in labels.items():
        for line in getattr(result, label):
            table.add_row(Text(label.removesuffix("s"), style=style), Text(line))
    console.print(table if table.row_count else Text("no difference"))
    raise typer.Exit(result.exit_code)


def wide_console(stderr: bool = False) -> Console:
    """A console; when nobody is looking (a pipe, a file) it is as wide as the report, not the customary 80 columns."""
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = REPORT_WIDTH
    return console


# --- from words to an examination --------------------------------------------------------------------------------------------


def resolve(subject: str, layout: str = "auto") -> Subject:
    """A subject by name: a kernel of PyTorch's or a peer's, one of our backends, a demo, or a function of the user's."""
    from dataclasses import replace

    import backlight
    from backlight import registry
    from backlight.doctor import names, stories
    from backlight.doctor.subject import Subject

    if subject in names.NAMED or subject.startswith("sdpa:"):
        return Subject(names.named(subject), layout="BHSD", name=subject)
    if subject.startswith("demo:"):
        return stories.subject_of(subject.removeprefix("demo:"))
    if subject == "backlight" or subject in registry.names():
        return names.own(subject, backlight.attention, backlight.attention_varlen, layout)
    if ":" not in subject:
        known = [*names.NAMED, "backlight", *registry.names()]
        raise names.UnknownSubject(f"no kernel is called {subject!r}; there are {', '.join(known)}, or write file.py:function")
    found = Subject.of(names.user_function(subject))
    return found if layout == "auto" else replace(found, layout=layout)


def own_kernels() -> list[tuple[str, str]]:
    """(name, summary) of the package's public call and of every backend."""
    from backlight import registry

    backends = [(name, registry.get(name).summary) for name in registry.names()]
    return [("backlight", "the public call, its own choice of backend"), *backends]


def examiner(subject: str, case: Case, layout: str = "auto", against: str | None = None) -> Callable[[Case], Report]:
    """A function that examines the named subject with a case; names are resolved once."""
    from backlight.doctor import diagnose

    target = resolve(subject, "packed" if case.packed and layout == "auto" else layout)
    reference = None if against is None else resolve(against)

    def run(case: Case) -> Report:
        report = diagnose(target, case.spec, against=reference, **case.arguments())
        report.subject = subject
        return report

    return run


def make_case(spec_settings: dict[str, Any], capture: Path | None, **settings: Any) -> Case:
    import torch

    from backlight.doctor.capture import load_capture
    from backlight.doctor.case import Case
    from backlight.spec import AttentionSpec

    spec = AttentionSpec(**spec_settings)
    if capture is not None:
        chosen = {name: settings[name] for name in ("seed", "level", "device")}
        return Case.captured(load_capture(capture), spec, **chosen)
    return Case(spec=spec, **settings | {"dtype": getattr(torch, DTYPES[settings["dtype"]])})


def tell(name: str, console: Console) -> None:
    """The story behind a demo, before its report."""
    from backlight.doctor.stories import STORIES

    if name in STORIES:
        console.print(Text(STORIES[name].title, style="bold"))
        console.print(Text(STORIES[name].tells), width=min(console.width, REPORT_WIDTH))
        console.print()


def failed(subject: str, error: Exception) -> Report:
    from backlight.doctor.report.model import Report

    return Report(subject, "could-not-run", str(error).splitlines()[0] if str(error) else type(error).__name__)


def conclude(found: Report, folder: Path | None, json_file: Path | None, console: Console, reproduced: str = "") -> NoReturn:
    """Show the report, write what was asked for, and leave with its exit code."""
    from backlight.doctor import keep
    from backlight.doctor.report import json, terminal

    to_stdout = json_file is not None and str(json_file) == "-"
    said = wide_console(stderr=True) if to_stdout else console
    terminal.render(found, said)
    if reproduced:
        said.print(Text(f"repro    {reproduced}"))
    if folder is not None:
        for path in keep.keep_report(found, folder):
            said.print(Text(f"written  {path}"))
    if to_stdout:
        typer.echo(json.dumps(found), nl=False)
    elif json_file is not None:
        said.print(Text(f"written  {json.save(found, json_file)}"))
    raise typer.Exit(found.exit_code)
