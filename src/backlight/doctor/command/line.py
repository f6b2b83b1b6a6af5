"""`backlight doctor`: examine a kernel, show what was found, keep the evidence.

Exit codes: 0 healthy, 1 defect, 2 loss of precision only, 3 could not run (bad arguments included), 130 interrupted. Whatever
the subject does, none of the first three is given without an examination that reached its end.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from backlight.command_line import OWN_PROCESS, Interruptible, typed, with_options_of
from backlight.doctor.command.options import Asked
from backlight.doctor.command.perform import COULD_NOT_RUN, perform, wide_console
from backlight.doctor.command.subjects import own_kernels

# typer carries its own copy of click in some versions, so the base class is reached through typer's public exception
UsageError: Any = typer.BadParameter.__base__
Context: Any = TyperCommand.context_class

EPILOG = """Examples: [bold]backlight doctor sdpa --causal[/] | [bold]my_kernel.py:fn --window 95,0 --report out[/] |
[bold]demo:window+1[/] | [bold]compare old.json new.json[/]. Exit codes: 0 healthy, 1 defect, 2 loss of precision only,
3 could not run, 130 interrupted."""


class DoctorGroup(Interruptible):
    """`doctor SUBJECT ...` is the examination; other words (`compare`, `schema`, `serve`) are commands of their own."""

    to_stderr = True

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


class UnnamedContext(Context):
    """Of a command without a word of its own: usage lines would have two spaces there."""

    @property
    def command_path(self) -> str:
        return str(super().command_path).rstrip()


class Unnamed(TyperCommand):
    context_class = UnnamedContext


app = typer.Typer(cls=DoctorGroup, add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(cls=Unnamed, epilog=EPILOG)
@with_options_of(Asked)
def examine(context: typer.Context, words: Asked) -> None:
    """Examine an attention kernel: which quantity goes wrong first, where, and the name of the defect.

    Also: [bold]backlight doctor compare OLD.json NEW.json[/] tells what got better or worse between two reports,
    [bold]backlight doctor schema[/] prints the JSON Schema of a report, [bold]backlight doctor serve[/] is an MCP server.
    """
    asked = replace(words, typed=typed(context))
    if asked.list_:
        from backlight.doctor.command import lists

        lists.show(wide_console(), own_kernels())
        raise typer.Exit
    if not asked.name:
        raise typer.BadParameter("name a kernel, or use --demo NAME or --list")
    perform(asked, apart=context.obj == OWN_PROCESS and not asked.in_process)


@app.command()
def schema() -> None:
    """The JSON Schema of a report, for programs that read one."""
    from backlight.doctor.report.schema import text

    typer.echo(text(), nl=False)


@app.command()
def serve() -> None:
    """A server of the Model Context Protocol on standard input and output, with the doctor as its tools."""
    from backlight.doctor.command.serve import serve

    serve()


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
