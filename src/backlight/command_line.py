"""What the commands share: how they are interrupted, a dataclass as the options of a command, and words as values.

A word that means nothing gets a sentence that names the option.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperGroup

Options = TypeVar("Options")

LARGEST = 2**31 - 1
INTERRUPTED = 130
# handed from `backlight` to its commands: the process is theirs, so they may divide it; a caller's own they may not
OWN_PROCESS = "own process"


class Interruptible(TyperGroup):
    """Ctrl-C leaves with 130; click would leave with 1, which is a verdict for most of our commands."""

    to_stderr = False

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            Console(highlight=False, stderr=self.to_stderr).print("interrupted", style="yellow")
            raise typer.Exit(INTERRUPTED) from None


def with_options_of(
    options: type[Options],
) -> Callable[[Callable[[typer.Context, Options], None]], Callable[..., None]]:
    """A command whose options are the fields of a dataclass (`Annotated[type, typer.Option(...)]`): one list of them, not two.

    The function is called with the context and the dataclass. Fields with `metadata={"typed": False}` are no options.
    """
    hints = get_type_hints(options, include_extras=True)
    listed = [each for each in fields(options) if each.metadata.get("typed", True)]  # type: ignore[arg-type]

    def wrap(function: Callable[[typer.Context, Options], None]) -> Callable[..., None]:
        def command(context: typer.Context, **words: Any) -> None:
            function(context, options(**words))

        context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        command.__signature__ = inspect.Signature([context, *(_parameter(each, hints) for each in listed)])  # type: ignore
        command.__annotations__ = {"context": typer.Context} | {each.name: hints[each.name] for each in listed}
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        return command

    return wrap


def _parameter(each: Field[Any], hints: dict[str, Any]) -> inspect.Parameter:
    assert each.default is not MISSING, f"{each.name} needs a default"
    return inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=hints[each.name])


def typed(context: typer.Context) -> frozenset[str]:
    """Names of the options that stood on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# --- words as values ---------------------------------------------------------------------------------------------------------


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
