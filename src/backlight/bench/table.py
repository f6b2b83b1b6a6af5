"""The record in the terminal: one line a case and phase, one column a contender, coloured by our speed over the peer's."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from backlight.bench.contender import BARE
from backlight.bench.contenders.ours import OURS
from backlight.bench.machine import machine_line
from backlight.bench.regress import Change, spread
from backlight.bench.results import TIMED
from backlight.bench.suites import MEMORY, OVERHEAD

LEVEL, CLOSE = 1.0, 0.9
WIDE = 0.1
MARKS = {"wrong": ("wrong", "bold red"), "failed": ("failed", "red"), "refused": ("-", "dim"), "running": ("…", "dim")}


def rows_by(data: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["contender"]): row for row in data["rows"]}


def contenders(data: dict[str, Any]) -> list[str]:
    """Names in the order raced, those that ran at all."""
    ran = {row["contender"] for row in data["rows"] if row["status"] in (*TIMED, "wrong", "failed")}
    return [name for name in data["settings"]["contenders"] if name in ran]


def ratio(
    rows: dict[tuple[str, str], dict[str, Any]], case: str, peer: str, phase: str, theirs: str | None = None
) -> float | None:
    """Time of the peer (on case `theirs`, if another) over our time: above 1 we are faster. None without both."""
    keys = ((case if theirs is None else theirs, peer), (case, OURS))
    both = [rows.get(key, {}).get("times", {}).get(phase) for key in keys]
    return None if both[0] is None or both[1] is None else both[0]["median_ms"] / both[1]["median_ms"]


def render(data: dict[str, Any]) -> Group:
    """Tables of a run and the footnotes that explain empty cells."""
    tables = [_memory_table(data)] if data["kind"] == MEMORY else [*_speed_tables(data), *_cost_tables(data)]
    # a run killed before its first case knows neither
    head = [machine_line(data["machine"])] if data["machine"] else []
    head += [_ceilings(data)] if data["ceilings"] else []
    return Group(Text("\n".join(head), style="dim"), *tables, *_footnotes(data))


def unit(data: dict[str, Any]) -> tuple[str, float]:
    """(name, factor on TFLOP/s) that keeps the figures of this run readable."""
    rates = [rate for row in data["rows"] for rate in row.get("tflops", {}).values()]
    largest = max(rates or data["ceilings"].get("matmul_tflops", {}).values(), default=1.0)
    return ("TFLOP/s", 1.0) if largest >= 1 else ("GFLOP/s", 1e3)


def phases(data: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(phase for row in data["rows"] for phase in row.get("times", {})))


def _ceilings(data: dict[str, Any]) -> str:
    name, factor = unit(data)
    found = data["ceilings"]
    matmul = ", ".join(f"{dtype} {rate * factor:.4g} {name}" for dtype, rate in found["matmul_tflops"].items())
    return f"measured ceilings: matmul {matmul}; copy {found['copy_tb_s'] * 1e3:.4g} GB/s"


def _headings(table: Table, data: dict[str, Any]) -> None:
    paths = {row["contender"]: row.get("path") for row in data["rows"]}
    for name in contenders(data):
        table.add_column(f"{name} (bare op)" if paths.get(name) == BARE else name, justify="right")


def _speed_tables(data: dict[str, Any]) -> list[Table]:
    """One table a phase: rates, or microseconds where host time is measured, with our speed over the peer's behind."""
    rows, tables = rows_by(data), []
    for phase in phases(data):
        what = "microseconds" if data["kind"] == OVERHEAD else unit(data)[0]
        title = f"{data['suite']}, {phase}: {what} (and our speed / the peer's)"
        table = Table(title=title, title_justify="left", title_style="bold")
        table.add_column("case", no_wrap=True)
        _headings(table, data)
        for case in data["cases"]:
            table.add_row(case["id"], *(_speed_cell(data, rows, case["id"], name, phase) for name in contenders(data)))
        tables.append(table)
    return tables


def _speed_cell(data: dict[str, Any], rows: dict[tuple[str, str], dict[str, Any]], case: str, name: str, phase: str) -> Text:
    row = rows.get((case, name), {"status": "refused"})
    times = row.get("times", {}).get(phase)
    if row["status"] not in TIMED or times is None:
        return _mark(row)
    shown = times["median_ms"] * 1e3 if data["kind"] == OVERHEAD else row["tflops"][phase] * unit(data)[1]
    text = Text(f"{shown:.1f}" if shown >= 1 else f"{shown:.2g}")
    if row["status"] == "suspect":
        text.append("~")
    if name != OURS and (ours := ratio(rows, case, name, phase)) is not None:
        text.append(f" ({ours:.2f}x)", style=_colour(ours))
    return text


def costs(data: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """case id -> contender -> phase -> time over the same contender's plain of the same shape; only cases that have one."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["rows"]:
        if row["status"] in TIMED and row.get("over_plain"):
            found.setdefault(row["case"], {})[row["contender"]] = row["over_plain"]
    return found


def _cost_tables(data: dict[str, Any]) -> list[Table]:
    """What a term costs: time over plain, phase by phase, and our whole time over what plain costs the peers."""
    found, rows = costs(data), rows_by(data)
    if not found:
        return []
    names = [name for name in contenders(data) if any(name in by_name for by_name in found.values())]
    title = f"{data['suite']}, cost of a term: time / own plain of the same shape (forward, backward, both)"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("case", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    peers = [name for name in contenders(data) if name != OURS]
    for peer in peers:
        table.add_column(f"ours / plain {peer}", justify="right")
    plain = {case["id"]: case.get("plain", "") for case in data["cases"]}
    for case, by_name in found.items():
        cells = [" ".join(f"{x:.2f}" for x in by_name.get(name, {}).values()) or "-" for name in names]
        against = [ratio(rows, case, peer, "both", plain[case]) for peer in peers]
        table.add_row(
            case, *cells, *("-" if value is None else Text(f"{1 / value:.2f}", style=_colour(value)) for value in against)
        )
    return [table]


def _memory_table(data: dict[str, Any]) -> Table:
    title = f"{data['suite']}: peak MiB of forward and backward beyond the inputs (and over the bytes of q, k, v)"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("case", no_wrap=True)
    table.add_column("q, k, v", justify="right")
    _headings(table, data)
    rows = rows_by(data)
    for case in data["cases"]:
        cells = []
        for name in contenders(data):
            row = rows.get((case["id"], name), {"status": "refused"})
            found = row.get("memory", {})
            shown = f"{found['peak_bytes'] / 2**20:.0f} ({found['relative']:.2f}x)" if "peak_bytes" in found else None
            cells.append(_mark(row) if shown is None else Text(shown))
        table.add_row(case["id"], f"{case['input_bytes'] / 2**20:.0f}", *cells)
    return table


def _mark(row: dict[str, Any]) -> Text:
    return Text(*MARKS.get(row["status"], ("?", "dim")))


def _colour(ours: float) -> str:
    return "green" if ours >= LEVEL else "yellow" if ours >= CLOSE else "red"


def _footnotes(data: dict[str, Any]) -> list[Text]:
    """Reasons, each once, with the cases it holds for."""
    notes: dict[tuple[str, str, str], list[str]] = {}
    for row in data["rows"]:
        if row["status"] in ("wrong", "failed", "refused"):
            notes.setdefault((row["status"], row["contender"], row.get("reason", "")), []).append(row["case"])
        for phase, reason in row.get("untimed", {}).items():
            notes.setdefault((f"no {phase}", row["contender"], reason), []).append(row["case"])
    styles = {"wrong": "bold red", "failed": "red"}
    total = len(data["cases"])
    lines = []
    for (status, name, reason), cases in notes.items():
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        where = "every case" if len(cases) == total else ", ".join(cases[:3]) + more
        lines.append(Text(f"{name} {status} ({where}): {reason}", style=styles.get(status, "dim")))
    if any(row["status"] == "suspect" for row in data["rows"]):
        lines.append(Text("~ between the gate's two limits: read its error in the JSON before its speed", style="yellow"))
    times = [found for row in data["rows"] for found in row.get("times", {}).values()]
    wide = sum(spread(found) > WIDE for found in times)
    if wide:
        lines.append(Text(f"{wide} of {len(times)} times vary by more than ±{WIDE:.0%}: the machine was busy", style="yellow"))
    return lines


def show_changes(console: Console, found: list[Change], gone: list[tuple[str, str, str]]) -> None:
    """Two runs: what became slower or faster than its spread."""
    table = Table(title="new time / old time", title_justify="left")
    for heading in ("case", "contender", "phase", "ratio", "spread allows", ""):
        table.add_column(heading, justify="right" if heading in ("ratio", "spread allows") else "left")
    for change in found:
        if change.slower or change.faster:
            word, style = ("slower", "red") if change.slower else ("faster", "green")
            figures = f"{change.ratio:.3f}", f"{change.allowed:.3f}"
            table.add_row(change.case, change.contender, change.phase, *figures, word, style=style)
    for case, name, what in gone:
        table.add_row(case, name, "", "", "", Text(what, style="red"))
    slower = sum(change.slower for change in found)
    if table.row_count:
        console.print(table)
    console.print(f"{len(found)} times in both runs: {slower} slower, {sum(x.faster for x in found)} faster, {len(gone)} lost")


def profile_table(found: dict[str, Any]) -> Table:
    """One profiled contender: phases, their parts, and what the compiler made of our kernels."""
    table = Table(title=f"{found['case']}, {found['contender']} ({found['detail']})", title_justify="left", title_style="bold")
    for heading in ("phase", "part", "calls", "ms", "share", "GFLOP/s", "of ceiling"):
        table.add_column(heading, justify="left" if heading in ("phase", "part") else "right", overflow="fold")
    for phase, whole in found["phases"].items():
        table.add_row(phase, "all", *_profile_cells(whole | {"share": 1.0, "calls": 1}), style="bold")
        for part in whole["parts"]:
            table.add_row("", part["name"][:90], *_profile_cells(part))
    for kernel in found["compiled"]:
        spent = f"{kernel['registers']} registers, {kernel['spills']} spills, {kernel['shared_bytes']} bytes shared"
        table.add_row("compiled", f"{kernel['kernel']}: {spent}, {kernel['warps']} warps, {kernel['stages']} stages")
    return table


def _profile_cells(part: dict[str, Any]) -> tuple[str, ...]:
    rate = "" if part["tflops"] is None else f"{part['tflops'] * 1e3:.1f}"
    ceiling = "" if part["of_ceiling"] is None else f"{part['of_ceiling']:.1%}"
    return f"{part['calls']:g}", f"{part['time_ms']:.3f}", f"{part['share']:.1%}", rate, ceiling
