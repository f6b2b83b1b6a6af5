"""The report in a terminal: verdict first, one row a stage, then what explains it and how to prove that wrong. 100 columns."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from backlight.doctor.report import words
from backlight.doctor.report.model import Finding, Probe, Reading, Report, StageRow

WIDTH = 100
MOST_FINDINGS = 5
MOST_EVIDENCE = 8

VERDICT_STYLE = {
    "healthy": "bold black on green",
    "defect": "bold white on red",
    "precision": "bold black on yellow",
    "could-not-run": "bold white on magenta",
}
STATUS_STYLE = {
    "ok": "green",
    "suspect": "yellow",
    "culprit": "bold red",
    "inherited": "yellow",
    "precision": "magenta",
    "unseen": "dim",
}


def render(report: Report, console: Console | None = None) -> None:
    """Write the report to a console (a new one on standard output when none is given), never wider than 100 columns."""
    console = console or Console()
    console.print(renderable(report), width=min(console.width, WIDTH), highlight=False)


def text(report: Report, colour: bool = False) -> str:
    """The report as a string, 100 columns wide; with ANSI colours when `colour` is set."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=WIDTH,
        force_terminal=colour,
        color_system="standard" if colour else None,
        legacy_windows=False,
    )
    render(report, console)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def renderable(report: Report) -> RenderableType:
    parts: list[RenderableType] = [_verdict(report), _subject(report), Text()]
    if report.stages:
        parts += [_stages(report.stages), Text()]
    parts += [Padding(_finding(rank, finding), (0, 0, 1, 0)) for rank, finding in enumerate(_shown(report), 1)]
    hidden = len(report.findings) - MOST_FINDINGS
    if hidden > 0:
        parts += [Text(f"{hidden} weaker findings are in the JSON and HTML reports.", style="dim"), Text()]
    if report.readings:
        parts += [_readings(report.readings), Text()]
    if report.probes:
        parts += [_probes(report.probes), Text()]
    if report.expected_zeros:
        parts += [_zeros(report.expected_zeros), Text()]
    parts.append(_provenance(report))
    return Group(*parts)


def _shown(report: Report) -> list[Finding]:
    return report.ranked[:MOST_FINDINGS]


def _verdict(report: Report) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    label = Text(f" {words.verdict(report)} ", style=VERDICT_STYLE[report.verdict])
    grid.add_row(label, Text(report.headline, style="bold"), Text(words.top_facts(report)))
    return grid


def _subject(report: Report) -> RenderableType:
    where = f"  {report.location}" if report.location else ""
    line = Text.assemble(("subject  ", "dim"), report.subject, (where, "cyan"))
    about = Text.assemble(("spec     ", "dim"), words.spec_words(report.spec))
    return Group(line, about) if report.spec else line


def _stages(rows: list[StageRow]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in ("gain", "rho_A", "rho_B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("worst cell", max_width=26)
    table.add_column("note", ratio=1)
    for row in rows:
        status = row.status.upper() if row.status == "culprit" else row.status
        table.add_row(
            row.name,
            Text(status, style=STATUS_STYLE.get(row.status, "")),
            words.gain(row.gain),
            words.ratio(row.rho_a),
            words.ratio(row.rho_b),
            Text(str(row.worst) if row.worst and row.status != "ok" else "-"),
            _note(row),
        )
    return table


def _note(row: StageRow) -> Text:
    note = Text()
    if row.nonfinite:
        note.append(words.counted(row.nonfinite, "non-finite value"), style="bold red")
    said = "" if row.nonfinite and "not finite" in row.note else row.note
    for part in (said, f"gain by head {words.gains_words(row.gains)}" if words.gains_differ(row) else ""):
        if part:
            note.append(("; " if note else "") + part)
    return note


def _finding(rank: int, finding: Finding) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=2, justify="right")
    grid.add_column(ratio=1)
    title = Text(finding.title, style="bold")
    title.append(f"  [{finding.id}]", style="dim not bold")
    grid.add_row(Text(f"{rank}.", style="bold"), title)
    facts = [finding.severity, f"stage {finding.stage}" if finding.stage else "", str(finding.where or "")]
    facts += [f"confidence {finding.confidence}", f"mechanism {finding.mechanism}"]
    if finding.severity == "note":
        facts = facts[:3]
    grid.add_row("", Text("; ".join(fact for fact in facts if fact), style="dim"))
    for line in finding.evidence[:MOST_EVIDENCE]:
        grid.add_row("", Text.assemble(("- ", "dim"), line))
    if len(finding.evidence) > MOST_EVIDENCE:
        grid.add_row("", Text(f"- and {len(finding.evidence) - MOST_EVIDENCE} more in the report files", style="dim"))
    if finding.next_check:
        grid.add_row("", Text.assemble(("Next check: ", "bold cyan"), finding.next_check))
    return grid


def _readings(readings: list[Reading]) -> RenderableType:
    lines = (Text.assemble(("  - ", "dim"), (f"{each.stage}: ", "bold"), each.sentence) for each in readings)
    return Group(Text("Read off the kernel's own matrices:"), *lines)


def _probes(probes: list[Probe]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    for probe in probes:
        if probe.passed is False:
            grid.add_row(Text("failed", style="red"), Text.assemble((probe.name, "bold"), f": {probe.detail}"))
    passed = ", ".join(probe.name for probe in probes if probe.passed)
    if passed:
        grid.add_row(Text("passed", style="green"), Text(passed))
    skipped = ", ".join(probe.name + (f" ({probe.detail})" if probe.detail else "") for probe in probes if probe.passed is None)
    if skipped:
        grid.add_row(Text("not run", style="dim"), Text(skipped, style="dim"))
    return grid


def _zeros(zeros: list[str]) -> RenderableType:
    return Group(Text("Zeros that are right, not a defect:"), *(Text(f"  - {line}") for line in zeros))


def _provenance(report: Report) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style="dim", ratio=1)
    if report.recipe:
        grid.add_row("inputs", "; ".join(f"{name} {value}" for name, value in words.settings(report.recipe).items()))
    for note in words.notes(report.recipe):
        grid.add_row("note", note)
    if report.environment:
        grid.add_row("machine", "; ".join(f"{name} {value}" for name, value in report.environment.items()))
    if report.self_check:
        grid.add_row("self-check", "; ".join(f"{name} {words.setting(value)}" for name, value in report.self_check.items()))
    grid.add_row("took", words.duration(report.seconds))
    if report.stages:
        for name in ("gain", "rho_A", "rho_B"):
            grid.add_row(name, words.LEGEND[name])
    return grid
