"""`backlight doctor`: examine a kernel, show what was found, keep the evidence.

Exit codes: 0 healthy, 1 defect, 2 loss of precision only, 3 could not run (bad arguments included), 130 interrupted. Whatever
the subject does, none of the first three is given without an examination that reached its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from backlight.doctor import streams, trouble
from backlight.doctor.options import DTYPES, Asked, absolute

if TYPE_CHECKING:
    from backlight.doctor.case import Case
    from backlight.doctor.report.model import Report
    from backlight.doctor.subject import Subject

COULD_NOT_RUN, INTERRUPTED = 3, 130
REPORT_WIDTH = 100
TIMEOUT = "300"
# typer carries its own copy of click in some versions, so the base class is reached through typer's public exception
UsageError: Any = typer.BadParameter.__base__

ATTENTION = partial(typer.Option, rich_help_panel="Attention")
INPUTS = partial(typer.Option, rich_help_panel="Inputs")
EXAMINATION = partial(typer.Option, rich_help_panel="Examination")

EPILOG = """Examples: [bold]backlight doctor sdpa --causal[/] | [bold]my_kernel.py:fn --window 95,0 --report out[/] |
[bold]demo:window+1[/] | [bold]compare old.json new.json[/]. Exit codes: 0 healthy, 1 defect, 2 loss of precision only,
3 could not run, 130 interrupted."""


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
        except KeyboardInterrupt:
            # click would leave with 1, our code for a defect
            wide_console(stderr=True).print("interrupted", style="yellow")
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(cls=DoctorGroup, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(epilog=EPILOG)
def examine(
    context: typer.Context,
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SUBJECT", help="A name (see --list), path.py:function, module:function, or demo:DEFECT."),
    ] = None,
    causal: Annotated[bool, ATTENTION("--causal", help="Hide keys after the row's own position.")] = False,
    window: Annotated[str | None, ATTENTION(metavar="L,R", help="Reach around the row's own position; * is unbounded.")] = None,
    scale: Annotated[str | None, ATTENTION(metavar="X", help="Factor on q.k; default D ** -0.5.")] = None,
    softcap: Annotated[str | None, ATTENTION(metavar="X", help="c in c * tanh(score / c).")] = None,
    bias: Annotated[str | None, ATTENTION(metavar="N", help="Learned bias by distance, N columns.")] = None,
    bias_origin: Annotated[str, ATTENTION(metavar="N", help="Column of distance 0.")] = "0",
    sink: Annotated[bool, ATTENTION("--sink", help="Learned logit in the denominator.")] = False,
    tau: Annotated[str | None, ATTENTION(metavar="X", help="Elastic softmax with this tau.")] = None,
    gate: Annotated[bool, ATTENTION("--gate", help="Output times sigmoid(gate).")] = False,
    shape: Annotated[str, INPUTS(metavar="B,H,S,D", help="Batch, query heads, query length, head size.")] = "2,4,200,64",
    kv_heads: Annotated[str | None, INPUTS(metavar="N", help="Key/value heads, if fewer.")] = None,
    sk: Annotated[str | None, INPUTS(metavar="N", help="Key length, if different.")] = None,
    dv: Annotated[str | None, INPUTS(metavar="N", help="Value head size, if different.")] = None,
    lengths: Annotated[str | None, INPUTS(metavar="S1,S2,...", help="Packed sequences of these lengths.")] = None,
    dtype: Annotated[str, INPUTS(help=", ".join(DTYPES) + ".")] = "bf16",
    recipe: Annotated[str, INPUTS(help="gaussian, peaky (saturated rows), dominant (one key), low_lse.")] = "gaussian",
    seed: Annotated[str, INPUTS(metavar="N", help="Seed of the inputs.")] = "0",
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
    timeout: Annotated[
        str, EXAMINATION(metavar="SECONDS", help="Give up when one call of the kernel takes longer; 0 = never.")
    ] = TIMEOUT,
    demo: Annotated[str | None, EXAMINATION(metavar="NAME", help="Examine a deliberately broken kernel.")] = None,
    list_: Annotated[bool, EXAMINATION("--list", help="List kernels, demos and the defect catalogue.")] = False,
) -> None:
    """Examine an attention kernel: which quantity goes wrong first, where, and the name of the defect.

    Also: [bold]backlight doctor compare OLD.json NEW.json[/] tells what got better or worse between two reports.
    """
    words = {name: value for name, value in locals().items() if name != "context"}
    asked = Asked(typed=typed(context), **words)
    if asked.list_:
        from backlight.doctor import lists

        lists.show(wide_console(), own_kernels())
        raise typer.Exit
    if not asked.name:
        raise typer.BadParameter("name a kernel, or use --demo NAME or --list")
    perform(asked)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="A report as JSON.")],
    new: Annotated[Path, typer.Argument(help="A later report as JSON.")],
) -> None:
    """What got better or worse between two reports; exit code 1 when something got worse, 3 when neither judged anything."""
    from backlight.doctor.report import json

    console = wide_console()
    try:
        before, after = json.load(old), json.load(new)
    except ValueError as error:
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
    if before.exit_code == after.exit_code == COULD_NOT_RUN:
        console.print(Text("neither examination could run: there is nothing to compare", style="red"))
        raise typer.Exit(COULD_NOT_RUN)
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

    own = subject == "backlight" or subject in registry.names()
    if subject in names.NAMED or subject.startswith("sdpa:") or own:
        reads = ("auto", "BHSD", "packed") if own else ("auto", "BHSD")
        if layout not in reads:
            raise ValueError(f"--layout is for functions of yours: {subject} reads {' or '.join(reads[1:])}, got {layout!r}")
    if subject in names.NAMED or subject.startswith("sdpa:"):
        return Subject(names.named(subject), layout="BHSD", name=subject)
    if subject.startswith("demo:"):
        return stories.subject_of(subject.removeprefix("demo:"))
    if own:
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
    from backlight.doctor.names import NAMED

    packs = case.packed and layout == "auto" and subject not in NAMED and not subject.startswith(("sdpa:", "demo:"))
    target = resolve(subject, "packed" if packs else layout)
    reference = None if against is None else resolve(against)

    def run(case: Case) -> Report:
        report = diagnose(target, case.spec, against=reference, **case.arguments())
        report.subject = subject
        return report

    return run


def tell(name: str, console: Console) -> None:
    """The story behind a demo, before its report."""
    from backlight.doctor.stories import STORIES

    if name in STORIES:
        console.print(Text(STORIES[name].title, style="bold"))
        console.print(Text(STORIES[name].tells), width=min(console.width, REPORT_WIDTH))
        console.print()


def typed(context: typer.Context) -> frozenset[str]:
    """Names of the options that stood on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def perform(asked: Asked) -> NoReturn:
    """Examine what was asked for, and leave with the report's exit code. What goes wrong on the way is a report too."""
    aside = streams.OutputAside()

    def give_up(sentence: str) -> None:
        """The subject hangs in another thread: report and leave without it."""
        aside.restore()
        try:
            conclude(failed(asked.name, sentence), asked)
        finally:
            streams.flush()
            os._exit(COULD_NOT_RUN)

    streams.show_crashes()
    outcome = ""
    try:
        case, seconds = asked.case(), asked.seconds
        asked.writable()
        with aside, trouble.patience(seconds, give_up):
            found, outcome = examined(asked, case)
    except (Exception, SystemExit) as error:
        found = failed(asked.name, what_happened(error))
    conclude(found, asked, outcome)


def examined(asked: Asked, case: Case) -> tuple[Report, str]:
    """The report, and what became of its script."""
    from backlight.doctor import stories

    subject, against, status = asked.name, asked.against, Console(stderr=True).status
    if subject.startswith("demo:"):
        case, against = stories.prepare(subject.removeprefix("demo:"), case, against)
        tell(subject.removeprefix("demo:"), wide_console(stderr=True))
    run = examiner(subject, case, asked.layout, against)
    with status(f"examining {subject} ({case.level})"):
        found = run(case)
    outcome = ""
    if (asked.report is not None or case.level == "forensic") and found.verdict in ("defect", "precision"):
        from backlight.doctor import keep

        with status("shrinking the case and running its script once"):
            outcome = keep.reproduce(found, case, absolute(subject), run, asked.report, asked.layout)
    if asked.sanitize or (case.level == "forensic" and case.device.startswith("cuda")):
        from backlight.doctor.sanitize import sanitize as watch_memory

        with status("running the kernel once under each tool of compute-sanitizer"):
            watch_memory(found, case, absolute(subject), asked.layout)
    return found, outcome


def what_happened(error: BaseException) -> str:
    """One sentence: the subject's trouble and bad words as they were put, anything else with the line of ours it broke."""
    if isinstance(error, trouble.CouldNotRun) or trouble.reads_as_written(error):
        return trouble.said(error)
    return f"the examination broke off: {trouble.said(error)} ({trouble.last_line(error)})"


def failed(subject: str, sentence: str) -> Report:
    from backlight.doctor.report.model import Report

    return Report(subject, "could-not-run", sentence)


def conclude(found: Report, asked: Asked, reproduced: str = "") -> NoReturn:
    """Show the report, write what was asked for, and leave with its exit code: 3 as well when something cannot be written."""
    from backlight.doctor import keep
    from backlight.doctor.report import json, terminal

    said, code = wide_console(stderr=asked.to_stdout), found.exit_code
    try:
        terminal.render(found, said)
        if reproduced:
            said.print(Text(f"repro    {reproduced}"))
    except SystemExit:
        # rich leaves with 1, our code for a defect, when nobody reads any more
        raise typer.Exit(code) from None
    try:
        for path in keep.keep_report(found, asked.report) if asked.report is not None else ():
            said.print(Text(f"written  {path}"))
        if asked.to_stdout:
            typer.echo(json.dumps(found), nl=False)
            streams.seal()
        elif asked.json is not None:
            said.print(Text(f"written  {json.save(found, asked.json)}"))
    except OSError as error:
        wide_console(stderr=True).print(Text(f"the report could not be written: {error}", style="red"))
        raise typer.Exit(COULD_NOT_RUN) from None
    raise typer.Exit(code)
