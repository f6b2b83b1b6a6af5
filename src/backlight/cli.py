"""The `backlight` command. What a command needs is imported inside it, so that help answers quickly."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from backlight import __version__
from backlight.command_line import OWN_PROCESS, Interruptible
from backlight.demo import parts

app = typer.Typer(
    cls=Interruptible,
    help="Attention whose backward pass you can see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

# a sub-command with options of its own: everything after its name is handed on untouched
HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _console() -> Console:
    return Console(highlight=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        _console().print(f"backlight {__version__}")
        raise typer.Exit


@app.callback()
def backlight(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Attention whose backward pass you can see."""


@app.command()
def info() -> None:
    """Versions, devices, and the backends with the reasons why one cannot run here."""
    from backlight.info import show

    show(_console())


@app.command()
def demo(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[PART]...", help=f"Parts to run: {', '.join(parts.NAMES)}. All by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("reports/demo"),
) -> None:
    """See it work on this machine: the seed cases against the oracle, and a small model that trains."""
    unknown = [name for name in names or () if name not in parts.NAMES]
    if unknown:
        words = f"no demo part is called {unknown[0]!r}; there are {', '.join(parts.NAMES)}"
        _console().print(words, style="red", markup=False)
        raise typer.Exit(2)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except (OSError, ValueError) as error:
        _console().print(f"--out {out} cannot be written: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    raise typer.Exit(parts.run(_console(), out, names or parts.NAMES))


@app.command(context_settings=HANDED_ON, add_help_option=False)
def doctor(context: typer.Context) -> None:
    """Examine an attention kernel: which quantity goes wrong first, where, and the defect's name."""
    _hand_on("doctor", context)


@app.command(context_settings=HANDED_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Measure speed beside the peers, on cases whose results were checked in the same run."""
    _hand_on("bench", context)


def _hand_on(name: str, context: typer.Context) -> None:
    """Run the command of `backlight.<name>.command`, or say in a sentence that this version does not have it."""
    command = _command_of(name)
    if command is None:
        _console().print(f"`backlight {name}` is not part of this version.")
        raise typer.Exit(2)
    command(args=context.args, prog_name=f"backlight {name}", obj=context.obj)


def _command_of(name: str) -> typer.Typer | None:
    package, module = f"backlight.{name}", f"backlight.{name}.command"
    try:
        return importlib.import_module(module).app
    except ModuleNotFoundError as missing:
        # only the command's own absence is an answer; anything missing inside it is an error
        if missing.name in (package, module):
            return None
        raise


def main() -> None:
    app(prog_name="backlight", obj=OWN_PROCESS)
