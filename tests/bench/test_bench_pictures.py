"""Tables and pictures are made from a record alone; a red contender has no speed in either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_records import record, times, variants_record
from rich.console import Console

from backlight.bench.table import profile_table, ratio, render, rows_by

pytest.importorskip("matplotlib")


def printed(data: dict[str, Any]) -> str:
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(data))
    return console.export_text()


def test_table_shows_rates_ratios_and_reasons() -> None:
    text = printed(record())
    assert "fa3-bare (bare op)" in text
    assert "500.0 (0.80x)" in text
    assert "400.0" in text
    assert "sdpa-flash wrong (every case): dq: error 50 times that of eager PyTorch" in text
    assert "sdpa-cudnn failed (every case): RuntimeError: no engine" in text
    assert "adasplash refused (every case): adasplash is not installed" in text
    assert "Test card (SM 1980 MHz, cap 700 W)" in text


def test_a_red_contender_has_no_speed_even_if_times_were_left_in_the_record() -> None:
    data = record()
    for row in data["rows"]:
        if row["contender"] == "sdpa-flash":
            row |= {"times": {"forward": times(1e-3)}, "tflops": {"forward": 123456.0}}
    assert "123456" not in printed(data)


def test_slow_machines_are_shown_in_gigaflops() -> None:
    data = record(scale=1.0)
    for row in data["rows"]:
        row["tflops"] = {phase: rate / 1e5 for phase, rate in row.get("tflops", {}).items()}
    assert "GFLOP/s" in printed(data)


def test_ratio_is_our_speed_over_theirs() -> None:
    data = record(scale=2.0)
    assert ratio(rows_by(data), data["cases"][0]["id"], "fa3-bare", "forward") == pytest.approx(0.4)
    assert ratio(rows_by(data), data["cases"][0]["id"], "sdpa-flash", "forward") is None


def test_every_picture_is_drawn_from_a_record(tmp_path: Path) -> None:
    from backlight.bench.plots import draw

    paths = draw(record(), tmp_path, "run")
    names = {f"run-{what}.{kind}" for what in ("rates", "ratios", "memory", "roofline", "profile") for kind in ("png", "svg")}
    assert {path.name for path in paths} == names
    assert all(path.stat().st_size > 4000 for path in paths)
    assert (tmp_path / "run-rates.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "run-rates.svg").read_text()


def test_pictures_repeat_bit_for_bit(tmp_path: Path) -> None:
    from backlight.bench.plots import draw

    first, second = (draw(record(), tmp_path / name, "run") for name in ("a", "b"))
    drawings = [[path.read_bytes() for path in paths if path.suffix == ".svg"] for paths in (first, second)]
    assert drawings[0] == drawings[1]


def test_lines_hold_the_recorded_rates() -> None:
    from backlight.bench.plots import rates

    data = record()
    figure = rates(data)
    panel = figure.axes[0]
    lines = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in panel.get_lines()}
    assert set(lines) == {"backlight", "fa3-bare (bare op)"}
    assert [point[0] for point in lines["backlight"]] == [512, 1024, 2048]
    assert [point[1] for point in lines["backlight"]] == pytest.approx([400.0] * 3)


def test_cases_of_one_length_become_bars() -> None:
    from backlight.bench.plots import rates

    data = record()
    data["cases"] = data["cases"][:1]
    data["rows"] = [row for row in data["rows"] if row["case"] == data["cases"][0]["id"]]
    figure = rates(data)
    heights = sorted(bar.get_height() for bar in figure.axes[0].patches)
    assert heights[-2:] == pytest.approx([400.0, 500.0])


def test_a_record_without_times_draws_nothing(tmp_path: Path) -> None:
    from backlight.bench.plots import draw

    data = record()
    data["rows"] = [row for row in data["rows"] if row["status"] == "refused"]
    data["profiles"] = []
    assert draw(data, tmp_path, "run") == []


def test_profile_table_names_kernels_and_registers() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(profile_table(record()["profiles"][0]))
    text = console.export_text()
    assert "_bwd_dkdv_kernel" in text
    assert "168 registers, 0 spills, 98304 bytes shared" in text
    assert "80.0%" in text


def test_what_a_term_costs_is_a_table_and_a_picture(tmp_path: Path) -> None:
    from backlight.bench.plots import cost_bars, draw
    from backlight.bench.results import add_costs

    assert cost_bars(record()) is None
    data = variants_record()
    add_costs(data)
    text = printed(data)
    assert "cost of a term" in text
    assert "1.20 1.20 1.20" in text
    assert "3.00 3.00 3.00" in text
    # ours on the variant, 1.8 units, over the peer's plain, 2 units
    assert "ours / plain flex" in text
    assert "0.90" in text
    (axes,) = cost_bars(data).axes
    ends = sorted(round(bar.get_x() + bar.get_width(), 6) for bar in axes.patches)
    assert ends == [1.2, 3.0]
    names = {path.name for path in draw(data, tmp_path, "run")}
    assert "run-costs.png" in names
    # two cases of one length: bars, not lines over S
    assert "run-rates.png" in names


def test_memory_of_many_variants_fills_a_grid() -> None:
    from backlight.bench.plots import MEMORY_COLUMNS, memory

    data = record()
    cases, rows = [], []
    for number in range(MEMORY_COLUMNS + 2):
        for case in data["cases"][:3]:
            options = {**case["case"], "softcap": float(number)}
            cases.append({**case, "id": f"{case['id']},{number}", "case": options})
            rows += [{**row, "case": cases[-1]["id"]} for row in data["rows"] if row["case"] == case["id"]]
    figure = memory(data | {"cases": cases, "rows": rows})
    assert len([axes for axes in figure.axes if axes.get_lines()]) == MEMORY_COLUMNS + 2
