"""`backlight bench`: run a suite, profile a case, compare two records, draw one, list what there is."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

DEFAULT = "run"
LOG_WIDTH = 200
MOST_PROCESSES = 12
# the step of each case that a log, which has no live line, tells about
LOGGED = ": drawing"


class _RunByDefault(TyperGroup):
    """`bench plain --quick` means `bench run plain --quick`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, "--help")
        return super().parse_args(ctx, args if args and args[0] in known else [DEFAULT, *args])


app = typer.Typer(
    cls=_RunByDefault,
    help="Measure speed and memory beside the peers, every contender judged against the oracle first.",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, ...; auto takes cuda where there is one.")]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for results; each device gets a folder of its own in it.")]


def _console() -> Console:
    console = Console(highlight=False)
    # a log has no width; the tables need one that cuts no number
    return console if console.is_terminal else Console(highlight=False, width=LOG_WIDTH)


def _fail(error: Exception) -> typer.Exit:
    _console().print(str(error), style="red")
    return typer.Exit(2)


def _device(name: str) -> torch.device:
    if name == "auto":
        return _current(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be auto or a torch device such as cpu or cuda:0, got {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda was asked for, and torch sees no CUDA device")
    return _current(device)


def _current(device: torch.device) -> torch.device:
    """The device itself, with its number; CUDA's current device from here on."""
    if device.type != "cuda":
        return device
    if str(device) != "cuda":
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


@app.command(DEFAULT)
def run(
    suite: Annotated[str, typer.Argument(help="plain, variants, terms, cpu, smoke, memory or overhead.")] = "smoke",
    device: DeviceOption = "auto",
    contenders: Annotated[str, typer.Option(help="Names to race, with commas; the suite's own choice by default.")] = "",
    out: OutOption = Path("benchmarks/results"),
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds over all contenders; the suite's own number by default.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths and shorter measurements.")] = False,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the pictures beside the JSON.")] = True,
    profile: Annotated[str, typer.Option(metavar="CASE", help="Take one case apart into its kernels instead of a suite.")] = "",
    resume: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Measure the cases this record lacks, with its suite and settings."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Stop after so long; the record says so and can be resumed.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=0, help="Compile ahead in so many processes, on CUDA; 0 = each contender in its turn.")
    ] = max(0, min(MOST_PROCESSES, (os.cpu_count() or 1) - 2)),
) -> None:
    """Run SUITE and write its JSON, table and pictures."""
    from backlight.bench import machine, peers, suites
    from backlight.bench.results import load
    from backlight.bench.resume import CannotResume
    from backlight.bench.step import Settings
    from backlight.bench.table import render

    try:
        chosen_device = _device(device)
        wanted = tuple(name.strip() for name in contenders.split(",") if name.strip())
        folder = out / machine.device_name(chosen_device)
        if profile:
            _profile(suites.find(profile, chosen_device), peers.select(wanted or ("backlight",)), chosen_device, folder, plot)
            return
        earlier = None if resume is None else load(resume)
        if earlier is not None:
            suite, quick, rounds = earlier["suite"], earlier["settings"]["quick"], earlier["settings"]["rounds"]
            wanted = tuple(earlier["settings"]["contenders"])
        chosen = suites.suite(suite, chosen_device, quick)
        adapters = peers.select(wanted or chosen.contenders)
        path = folder / f"{chosen.name}-{machine.stamp()}.json" if resume is None else resume
    except ValueError as error:
        raise _fail(error) from None
    settings = Settings(rounds or chosen.rounds, quick or chosen.hasty, seconds=seconds, processes=processes)
    try:
        data = _run_suite(chosen, adapters, chosen_device, path, settings, earlier)
    except CannotResume as error:
        raise _fail(error) from None
    _console().print(render(data))
    _written(path)
    if plot:
        _draw(data, path)
    if data["status"] == "stopped":
        words = f"stopped after {seconds:.0f} s; go on with: backlight bench --resume {path}"
        _console().print(words, style="yellow", soft_wrap=True)
    elif data["status"] != "complete":
        raise typer.Exit(130)


def _run_suite(
    suite: Any, adapters: Any, device: torch.device, path: Path, settings: Any, earlier: dict[str, Any] | None
) -> dict[str, Any]:
    from backlight.bench.results import load
    from backlight.bench.runner import run as run_suite

    console = _console()
    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(suite.name, total=len(suite.workloads))

        def report(what: str, done: int, total: int) -> None:
            if not console.is_terminal and what.endswith(LOGGED):
                console.print(f"{done + 1}/{total} {what}")
            progress.update(task, description=what, completed=done, total=total)

        try:
            run_suite(suite, adapters, device, path, settings, report, earlier)
        except KeyboardInterrupt:
            progress.console.print("interrupted; what was measured is kept", style="yellow")
    return load(path)


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

    for picture in draw(data, path.parent, path.stem):
        _written(picture)


def _written(path: Path) -> None:
    # a path is for copying: one line, whatever the width of the terminal
    _console().print(f"wrote {path}", soft_wrap=True)


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The earlier record.")],
    new: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The later record.")],
) -> None:
    """Name what became slower beyond the spread of both runs; exit code 1 when something did."""
    from backlight.bench import regress
    from backlight.bench.results import load
    from backlight.bench.table import show_changes

    try:
        before, after = load(old), load(new)
    except ValueError as error:
        raise _fail(error) from None
    for reason in regress.comparable(before, after):
        _console().print(reason, style="yellow")
    found, gone = list(regress.changes(before, after)), regress.lost(before, after)
    show_changes(_console(), found, gone)
    if gone or any(change.slower for change in found):
        raise typer.Exit(1)


@app.command("plot")
def plot_record(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A record.")],
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the pictures; the record's own by default.")] = None,
) -> None:
    """Draw the pictures of a record again."""
    from backlight.bench.results import load

    try:
        data = load(file)
    except ValueError as error:
        raise _fail(error) from None
    _draw(data, file if out is None else out / file.name)


@app.command("list")
def list_all(device: DeviceOption = "auto") -> None:
    """The suites with their cases, and the contenders."""
    from backlight.bench import peers, suites

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
    _console().print("Contenders: " + ", ".join(peers.adapters()))


@app.command("show")
def show_record(file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A record.")]) -> None:
    """Print the table of a record again."""
    from backlight.bench.results import load
    from backlight.bench.table import render

    try:
        _console().print(render(load(file)))
    except ValueError as error:
        raise _fail(error) from None
