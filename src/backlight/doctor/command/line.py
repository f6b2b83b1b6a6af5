"""`backlight doctor`: examine a kernel, show what was found, keep the evidence.

Exit codes: 0 healthy, 1 defect, 2 loss of precision only, 3 could not run (bad arguments included), 130 interrupted. Whatever
the subject does, none of the first three is given without an examination that reached its end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from backlight.doctor.command.options import DTYPES, Asked
from backlight.doctor.command.perform import COULD_NOT_RUN, perform, wide_console
from backlight.doctor.command.subjects import own_kernels

INTERRUPTED = 130
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
        from backlight.doctor.command import lists

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


def typed(context: typer.Context) -> frozenset[str]:
    """Names of the options that stood on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
