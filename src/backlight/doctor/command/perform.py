"""One examination for the command line: run it, show the report, write the files, leave with the exit code."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from backlight.command_line import INTERRUPTED
from backlight.doctor.command import streams
from backlight.doctor.command.options import Asked, absolute
from backlight.doctor.command.subjects import examiner
from backlight.doctor.subject import apart as child_process
from backlight.doctor.subject import trouble

if TYPE_CHECKING:
    from backlight.doctor.report.model import Report
    from backlight.doctor.subject.case import Case

COULD_NOT_RUN = 3
REPORT_WIDTH = 100


def wide_console(stderr: bool = False) -> Console:
    """A console; when nobody is looking (a pipe, a file) it is as wide as the report, not the customary 80 columns."""
    console = Console(highlight=False, stderr=stderr)
    if not console.is_terminal:
        console.width = REPORT_WIDTH
    return console


def tell(name: str, console: Console) -> None:
    """The story behind a demo, before its report."""
    from backlight.doctor.defects.stories import STORIES

    if name in STORIES:
        console.print(Text(STORIES[name].title, style="bold"))
        console.print(Text(STORIES[name].tells), width=min(console.width, REPORT_WIDTH))
        console.print()


def perform(asked: Asked, apart: bool = False) -> NoReturn:
    """Examine what was asked for, and leave with the report's exit code. What goes wrong on the way is a report too.

    apart: in a child process, while this one watches; it reports what the child cannot, such as a crash.
    """
    if apart and child_process.possible():
        watch(asked)
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
        case, limits, link = asked.case(), asked.limits, child_process.link()
        asked.writable()
        with aside, trouble.patience(limits.seconds, give_up, None if link is None else link.last_words):
            found, outcome = examined(asked, case)
    except (Exception, SystemExit) as error:
        found = failed(asked.name, what_happened(error))
    conclude(found, asked, outcome)


def watch(asked: Asked) -> None:
    """Returns in the child alone; its parent waits there and leaves with the child's exit code."""
    try:
        limits = asked.limits
    except ValueError:
        # the examination says so, before anything of the kernel's runs
        return
    streams.flush()
    watched = child_process.split(limits, resident_only=not asked.device.startswith("cpu"))
    if watched is None:
        return
    place, _, _ = asked.name.rpartition(":")
    ended = watched.wait(place if place.endswith(".py") else None)
    if ended.said:
        # taking torch down once more would take as long as all the rest of this process
        streams.flush()
        os._exit(int(ended.said))
    # whatever the child was drawing is unfinished
    wide_console(stderr=True).show_cursor()
    if ended.interrupted:
        raise typer.Exit(INTERRUPTED)
    conclude(failed(asked.name, ended.sentence), asked)


def leave(code: int) -> NoReturn:
    """The end of an examination: its exit code, and to a parent that watches the word that it is one."""
    link = child_process.link()
    if link is not None:
        link.tell(str(code))
    raise typer.Exit(code)


def examined(asked: Asked, case: Case) -> tuple[Report, str]:
    """The report, and what became of its script."""
    from backlight.doctor.defects import stories

    subject, against, status = asked.name, asked.against, Console(stderr=True).status
    if subject.startswith("demo:"):
        case, against = stories.prepare(subject.removeprefix("demo:"), case, against)
        tell(subject.removeprefix("demo:"), wide_console(stderr=True))
    run = examiner(subject, case, asked.layout, against)
    with status(f"examining {subject} ({case.level})"):
        found = run(case)
    outcome = ""
    if (asked.report is not None or case.level == "forensic") and found.verdict in ("defect", "precision"):
        from backlight.doctor.command import keep

        with status("shrinking the case and running its script once"):
            outcome = keep.reproduce(found, case, absolute(subject), run, asked.report, asked.layout)
    if asked.sanitize or (case.level == "forensic" and case.device.startswith("cuda")):
        from backlight.doctor.command.sanitize import sanitize as watch_memory

        with status("running the kernel once under each tool of compute-sanitizer"):
            watch_memory(found, case, absolute(subject), asked.layout)
    return found, outcome


def what_happened(error: BaseException) -> str:
    """One sentence. Trouble of the subject and bad words say it themselves; anything else names the line of ours that broke."""
    if isinstance(error, trouble.CouldNotRun) or trouble.reads_as_written(error):
        return trouble.said(error)
    return f"the examination broke off: {trouble.said(error)} ({trouble.last_line(error)})"


def failed(subject: str, sentence: str) -> Report:
    from backlight.doctor.report.model import Report

    return Report(subject, "could-not-run", sentence)


def conclude(found: Report, asked: Asked, reproduced: str = "") -> NoReturn:
    """Show the report, write what was asked for, and leave with its exit code: 3 as well when something cannot be written."""
    from backlight.doctor.command import keep
    from backlight.doctor.report import json, terminal

    said, code = wide_console(stderr=asked.for_programs), found.exit_code
    try:
        if asked.format not in MACHINE:
            terminal.render(found, said)
        if reproduced:
            said.print(Text(f"repro    {reproduced}"))
        for path in keep.keep_report(found, asked.report) if asked.report is not None else ():
            said.print(Text(f"written  {path}"))
        if asked.json is not None and not asked.to_stdout:
            said.print(Text(f"written  {json.save(found, asked.json)}"))
        if asked.for_programs:
            typer.echo(MACHINE["json" if asked.to_stdout else asked.format](found), nl=False)
            streams.seal()
    except SystemExit:
        # rich leaves with 1, our code for a defect, when nobody reads any more
        pass
    except OSError as error:
        wide_console(stderr=True).print(Text(f"the report could not be written: {error}", style="red"))
        code = COULD_NOT_RUN
    leave(code)


def _line(found: Report) -> str:
    from backlight.doctor.report.line import line

    return line(found) + "\n"


def _json(found: Report) -> str:
    from backlight.doctor.report import json

    return json.dumps(found)


def _sarif(found: Report) -> str:
    from backlight.doctor.command.subjects import version
    from backlight.doctor.report import sarif

    return sarif.dumps(found, version())


MACHINE: dict[str, Callable[[Report], str]] = {"line": _line, "json": _json, "sarif": _sarif}
