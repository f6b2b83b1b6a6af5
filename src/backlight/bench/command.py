"""`backlight bench`: run a suite, profile a case, compare two records, draw one, list what there is.

Exit codes: 0 done, 1 something became slower or was lost, 2 bad arguments, 3 a file is no record, 4 records that cannot be
compared, 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from backlight.command_line import INTERRUPTED, Interruptible, number, typed, whole, with_options_of, writable

if TYPE_CHECKING:
    from backlight.bench.contender import Adapter
    from backlight.bench.step import Settings
    from backlight.bench.suites import Suite

DEFAULT = "run"
SLOWER, BAD_ARGUMENTS, BAD_RECORD, NOT_COMPARABLE = 1, 2, 3, 4
MOST_ROUNDS, MOST_WORKERS = 1000, 256
LOG_WIDTH = 200
MOST_PROCESSES = 12
# the step of each case that a log, which has no live line, tells about
LOGGED = ": drawing"


class _RunByDefault(Interruptible):
    """`bench plain --quick` means `bench run plain --quick`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, "--help")
        return super().parse_args(ctx, args if args and args[0] in known else [DEFAULT, *args])

    def invoke(self, ctx: Any) -> Any:
        from backlight.bench.record import BadRecord

        try:
            return super().invoke(ctx)
        except BadRecord as error:
            raise _fail(error, BAD_RECORD) from None


app = typer.Typer(
    cls=_RunByDefault,
    help="Measure speed and memory beside the peers, every contender judged against the oracle first.",
    epilog="Exit codes: 0 done, 1 something became slower or was lost, 2 bad arguments, 3 a file is no record, "
    "4 records that cannot be compared, 130 interrupted.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto takes cuda where there is one.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for results; each device gets a folder of its own in it.")]


def _console() -> Console:
    console = Console(highlight=False)
    # a log has no width; the tables need one that cuts no number
    return console if console.is_terminal else Console(highlight=False, width=LOG_WIDTH)


def _fail(error: Exception | str, code: int = BAD_ARGUMENTS) -> typer.Exit:
    _console().print(str(error), style="red", markup=False, soft_wrap=True)
    return typer.Exit(code)


def _device(name: str) -> torch.device:
    if name == "auto":
        return _current(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be auto or a torch device such as cpu or cuda:0, got {name!r}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise ValueError(f"--device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name} was asked for, and torch sees no CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name} was asked for, and torch sees {torch.cuda.device_count()} CUDA devices")
    return _current(device)


def _refuse_ignored(context: typer.Context, names: tuple[str, ...], reason: str) -> None:
    """Options that stood on the command line and would have no effect."""
    for name in names:
        if name in typed(context):
            shown = "SUITE" if name == "suite" else f"--{name}"
            raise ValueError(f"{shown} {context.params[name]} would be ignored: {reason}")


def _check_words(context: typer.Context, contenders: str) -> None:
    if context.params["profile"]:
        _refuse_ignored(context, ("suite", "rounds", "quick", "resume", "seconds"), "--profile takes one case apart")
    if context.params["resume"] is not None:
        _refuse_ignored(context, ("suite", "contenders", "rounds", "quick", "out"), "--resume goes on as the record began")
    if contenders and not contenders.replace(",", " ").strip():
        raise ValueError(f"--contenders names nobody, got {contenders!r}")


def _writable(option: str, folder: Path) -> None:
    """Better before hours of measuring than after."""
    writable(option, folder / "x.partial")


def _current(device: torch.device) -> torch.device:
    """The device itself, with its number; CUDA's current device from here on."""
    if device.type != "cuda":
        return device
    if str(device) != "cuda":
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True)
class RunOptions:
    """The options of `run`."""

    suite: Annotated[
        str, typer.Argument(help="plain, every, variants, terms, masks, entmax, pair, fp8, cpu, smoke, memory or overhead.")
    ] = "smoke"
    device: DeviceOption = "auto"
    contenders: Annotated[str, typer.Option(help="Names to race, with commas; the suite's own choice by default.")] = ""
    out: OutOption = Path("benchmarks/results")
    rounds: Annotated[
        str | None, typer.Option(metavar="N", help="Rounds over all contenders; the suite's own number by default.")
    ] = None
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths and shorter measurements.")] = False
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the pictures beside the JSON.")] = True
    profile: Annotated[str, typer.Option(metavar="CASE", help="Take one case apart into its kernels instead of a suite.")] = ""
    resume: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Measure the cases this record lacks, with its suite and settings."),
    ] = None
    seconds: Annotated[
        str | None, typer.Option(metavar="S", help="Stop after so long; the record says so and can be resumed.")
    ] = None
    processes: Annotated[
        str, typer.Option(metavar="N", help="Compile ahead in so many processes, on CUDA; 0 = each contender in its turn.")
    ] = str(max(0, min(MOST_PROCESSES, (os.cpu_count() or 1) - 2)))

    @property
    def wanted(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.contenders.split(",") if name.strip())


@app.command(DEFAULT)
@with_options_of(RunOptions)
def run(context: typer.Context, asked: RunOptions) -> None:
    """Run SUITE and write its JSON, table and pictures."""
    from backlight.bench.record import BadRecord
    from backlight.bench.resume import CannotResume
    from backlight.bench.table import render

    try:
        _check_words(context, asked.contenders)
        plan = _plan(asked)
        if plan is None:
            return
    except BadRecord:
        raise
    except ValueError as error:
        raise _fail(error) from None
    try:
        data = _run_suite(plan)
    except CannotResume as error:
        raise _fail(error) from None
    _console().print(render(data))
    _written(plan.path)
    if asked.plot:
        _draw(data, plan.path)
    if data["status"] == "stopped":
        words = f"stopped after {plan.settings.seconds:.0f} s; go on with: backlight bench --resume {plan.path}"
        _console().print(words, style="yellow", soft_wrap=True)
    elif data["status"] != "complete":
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True)
class Plan:
    """One run of a suite, ready to begin."""

    suite: Suite
    adapters: tuple[Adapter, ...]
    device: torch.device
    path: Path
    settings: Settings
    earlier: dict[str, Any] | None


def _plan(asked: RunOptions) -> Plan | None:
    """What was asked for, checked; None when it was a profile, which is then done."""
    from backlight.bench import contenders, machine, suites
    from backlight.bench.step import Settings

    rounds = whole("--rounds", asked.rounds, most=MOST_ROUNDS)
    limit = number("--seconds", asked.seconds, least=1.0)
    workers = whole("--processes", asked.processes, least=0, most=MOST_WORKERS)
    device, wanted = _device(asked.device), asked.wanted
    folder = asked.out / machine.device_name(device)
    if asked.profile:
        workload, racing = suites.find(asked.profile, device), contenders.select(wanted or ("backlight",))
        _writable("--out", folder)
        _profile(workload, racing, device, folder, asked.plot)
        return None
    suite, quick, earlier = asked.suite, asked.quick, None
    if asked.resume is not None:
        earlier = _begun(asked.resume)
        suite, settings = earlier["suite"], earlier["settings"]
        quick, rounds, wanted = settings["quick"], settings["rounds"], tuple(settings["contenders"])
    chosen = suites.suite(suite, device, quick)
    adapters = contenders.select(wanted or chosen.contenders)
    path = folder / f"{chosen.name}-{machine.stamp()}.json" if asked.resume is None else asked.resume
    _writable("--out" if asked.resume is None else "--resume", path.parent)
    chosen_settings = Settings(rounds or chosen.rounds, quick or chosen.hasty, seconds=limit, processes=workers or 0)
    return Plan(chosen, adapters, device, path, chosen_settings, earlier)


def _begun(path: Path) -> dict[str, Any]:
    """The record of a suite that is to go on."""
    from backlight.bench import suites
    from backlight.bench.record import BadRecord
    from backlight.bench.results import load

    earlier = load(path)
    lacking = [name for name in ("quick", "rounds") if name not in earlier["settings"]]
    if lacking or earlier["suite"] not in suites.SUITES:
        raise BadRecord(f"{path} is no record of a suite: {lacking[0] if lacking else earlier['suite']!r} is unknown")
    return earlier


def _run_suite(plan: Plan) -> dict[str, Any]:
    from backlight.bench.results import load
    from backlight.bench.runner import run as run_suite

    console = _console()
    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(plan.suite.name, total=len(plan.suite.workloads))

        def report(what: str, done: int, total: int) -> None:
            if not console.is_terminal and what.endswith(LOGGED):
                console.print(f"{done + 1}/{total} {what}")
            progress.update(task, description=what, completed=done, total=total)

        try:
            run_suite(plan.suite, plan.adapters, plan.device, plan.path, plan.settings, report, plan.earlier)
        except KeyboardInterrupt:
            progress.console.print("interrupted; what was measured is kept", style="yellow")
    return load(plan.path)


def _profile(workload: Any, adapters: Any, device: torch.device, folder: Path, plot: bool) -> None:
    from backlight.bench import machine
    from backlight.bench.profile import run as run_profile
    from backlight.bench.table import profile_table

    path = folder / f"profile-{machine.stamp()}.json"
    with _console().status(f"taking {workload.id} apart"):
        data = run_profile(workload, adapters, device, path)
    for row in data["rows"]:
        if "reason" in row:
            _console().print(f"{row['contender']} {row['status']}: {row['reason']}", style="red")
    for found in data["profiles"]:
        _console().print(profile_table(found))
    _written(path)
    if plot:
        _draw(data, path)


def _draw(data: dict[str, Any], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        _console().print(f"matplotlib is not installed (extra `report`); later: backlight bench plot {path}", style="yellow")
        return
    from backlight.bench.plots import draw

    for picture in draw(data, path.parent, path.name.removesuffix(".gz").removesuffix(".json")):
        _written(picture)


def _written(path: Path) -> None:
    # a path is for copying: one line, whatever the width of the terminal
    _console().print(f"wrote {path}", soft_wrap=True)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The earlier record.")],
    new: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The later record.")],
) -> None:
    """Name what became slower beyond the spread of both runs.

    Exit code 1 when something did; 4 when the records have nothing in common or are of different devices.
    """
    from backlight.bench import regress
    from backlight.bench.results import load
    from backlight.bench.table import show_changes

    before, after = load(old), load(new)
    for reason in regress.comparable(before, after):
        _console().print(reason, style="yellow", markup=False)
    found, gone = list(regress.changes(before, after)), regress.lost(before, after)
    if not found and not gone:
        suites = f"{before['suite']} with {len(before['rows'])} rows and {after['suite']} with {len(after['rows'])}"
        raise _fail(f"the records have no time in common ({suites}): there is nothing to compare", NOT_COMPARABLE)
    show_changes(_console(), found, gone)
    untried = regress.gone_without_a_try(before, after)
    if untried:
        _console().print(f"{untried} of the earlier rows with times are not in the later record", style="yellow")
    elsewhere = regress.other_device(before, after)
    if elsewhere:
        raise _fail(f"{elsewhere}; their times say nothing about the code", NOT_COMPARABLE)
    if gone or any(change.slower for change in found):
        raise typer.Exit(SLOWER)


@app.command("plot")
def plot_record(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A record.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the pictures; the record's own by default.")] = None,
) -> None:
    """Draw the pictures of a record again."""
    from backlight.bench.results import load

    data = load(file)
    if importlib.util.find_spec("matplotlib") is None:
        raise _fail("pictures need matplotlib, which is not installed: pip install '.[report]'")
    try:
        _writable("--out" if out is not None else "the folder", file.parent if out is None else out)
    except ValueError as error:
        raise _fail(error) from None
    with _readable(file):
        _draw(data, file if out is None else out / file.name)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """What a table or a picture misses in a record that is otherwise in order."""
    from backlight.bench.record import BadRecord

    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BadRecord(f"{file} lacks something that is to be shown: {type(error).__name__} {error}") from error


@app.command("list")
def list_all(device: DeviceOption = "auto") -> None:
    """The suites with their cases, and the contenders."""
    from backlight.bench import contenders, suites

    try:
        chosen = _device(device)
    except ValueError as error:
        raise _fail(error) from None
    table = Table(title=f"Suites on {chosen.type}", title_justify="left")
    for heading in ("suite", "what it is", "cases"):
        table.add_column(heading)
    for name in suites.SUITES:
        found = suites.suite(name, chosen)
        table.add_row(name, found.summary, ", ".join(workload.id for workload in found.workloads))
    _console().print(table)
    _console().print("Contenders: " + ", ".join(contenders.adapters()))


@app.command("show")
def show_record(file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A record.")]) -> None:
    """Print the table of a record again."""
    from backlight.bench.results import load
    from backlight.bench.table import render

    data = load(file)
    with _readable(file):
        _console().print(render(data))
