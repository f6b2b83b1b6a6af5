"""What lies in benchmarks/results is there because a page or a tool uses it, and is small."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from compact import COMPACT, LONG_DATA

from backlight.bench.results import read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
TOOLS = list((ROOT / "tools").glob("*.py"))
# of everything; and of what is neither source nor prose, which does not grow with what the library can do
MOST_BYTES, MOST_OF_RECORDS = 6_000_000, 500_000
SOURCE_AND_PROSE = {".py", ".md", ".toml", ".yml", ".html", ".css", ".cff", ""}


def tracked(*patterns: str) -> list[Path]:
    run = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip("not a checkout of git")
    return [path for name in run.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_every_record_is_named_on_a_page_or_in_a_tool() -> None:
    text = "".join(path.read_text() for path in (*PAGES, *TOOLS))
    records = tracked("benchmarks/results/*.json.gz")
    assert records
    assert not [path.name for path in records if path.name.removesuffix(".json.gz") not in text]


def test_every_picture_of_a_record_is_shown() -> None:
    text = "".join(path.read_text() for path in PAGES)
    shown = {Path(target).name for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)}
    assert {path.name for path in tracked("benchmarks/results/*.svg", "benchmarks/results/*.png")} <= shown


def test_records_and_pictures_are_compact() -> None:
    """If not: python tools/compact.py FILE."""
    assert not tracked("benchmarks/results/*.json"), "compressed as .json.gz"
    for path in tracked("benchmarks/results/*.json.gz", "benchmarks/results/*.svg", "docs/images/*.svg", "src/*/triton.json"):
        text = read(path)
        assert COMPACT[path.suffixes[0]](text) == text, path


def test_long_data_is_compressed() -> None:
    """If not: python tools/compact.py FILE. What changes with many commits stays as lines that git can merge."""
    lines = {"doctor-shares.json", "versions.json", "hopper-kernels-before-after.md"}
    found = {path.name for path in tracked("docs/data/*") if path.suffix != ".gz" and path.stat().st_size > LONG_DATA}
    assert found <= lines


def test_the_repository_is_small() -> None:
    sizes = {path: path.stat().st_size for path in tracked()}
    assert sum(sizes.values()) < MOST_BYTES
    assert sum(size for path, size in sizes.items() if path.suffix not in SOURCE_AND_PROSE) < MOST_OF_RECORDS


def test_a_compact_record_holds_the_same_numbers_to_seven_digits() -> None:
    data = {"rows": [{"ms": 0.25, "n": 817890304123}, {"ms": 1e-07, "name": "é"}], "empty": [], "none": None}
    short = COMPACT[".json"](json.dumps({"copy_tb_s": 4.265077816174569, **data}, indent=1))
    assert json.loads(short) == {"copy_tb_s": 4.265078, **data}
    assert len(short.splitlines()) == 9


def test_a_compact_picture_draws_the_same() -> None:
    drawn = """<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="20pt">
 <metadata>who drew it</metadata>
 <defs><style type="text/css">*{stroke-linejoin: round}</style></defs>
 <g id="axes_1"><!-- 512 -->
  <path id="marker" d="M 0.123456 10.126 \nL 3.5 0 \nz\n" style="fill: none; stroke: #b0b0b0" transform="scale(0.015625)"/>
  <g id="line" style="fill: none; stroke: #b0b0b0"><use xlink:href="#marker" x="-12.344999"/>
   <use xlink:href="#marker" transform="translate(63.623047 0)"/></g>
 </g>
</svg>"""
    assert COMPACT[".svg"](drawn).splitlines() == [
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="20pt">'
        '<defs><style type="text/css">*{stroke-linejoin: round}',
        ".s0{fill:none;stroke:#b0b0b0}</style>",
        "</defs>",
        '<path id="n0" d="M0.123456 10.13L3.5 0z" transform="scale(0.015625)" class="s0"/>',
        '<g class="s0"><use xlink:href="#n0" x="-12.34"/>',
        '<use xlink:href="#n0" x="63.62"/>',
        "</g>",
        "</svg>",
    ]


def test_neighbours_of_one_style_say_it_once_and_straight_lines_name_one_coordinate() -> None:
    row = '<path d="M 1 2 L 9 2 L 9 4" clip-path="url(#box)" style="stroke: #b0b0b0"/>'
    glass = '<path d="M 0 0 L 1 1" style="opacity: 0.5"/>'
    words = """<text style="font: 8px 'DejaVu Sans', 'Bitstream Vera Sans', sans-serif" transform="rotate(-0 3 4)">S</text>"""
    sheet = '<defs><style type="text/css">*{}</style></defs>'
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg">{sheet}{2 * row}{2 * glass}{words}</svg>'
    small = COMPACT[".svg"](drawn)
    assert small.splitlines()[1:] == [
        ".s0{stroke:#b0b0b0}",
        ".s1{opacity:0.5}",
        ".s2{font:8px 'DejaVu Sans',Verdana,sans-serif}</style>",
        "</defs>",
        '<g clip-path="url(#n0)" class="s0"><path d="M1 2H9V4"/>',
        '<path d="M1 2H9V4"/>',
        "</g>",
        '<path d="M0 0L1 1" class="s1"/>',
        '<path d="M0 0L1 1" class="s1"/>',
        '<text class="s2">S</text>',
        "</svg>",
    ]
    assert COMPACT[".svg"](small) == small


def test_lines_of_a_grid_and_marks_at_an_axis_are_one_path_each() -> None:
    grid, mark, words = 'class="s0"', 'class="s1"', '<text x="1" y="9" class="s2">1</text>'
    rows = "".join(
        f'<path d="M{x} 9V1" {grid}/><use xlink:href="#tick" x="{x}" y="9" {mark}/>{words if x == 2 else ""}' for x in (1, 2, 3)
    )
    sheet = "<defs><style>*{}\n.s0{fill:none;stroke:#b0b0b0}\n.s1{stroke:#000000}\n.s2{font-size:8px}</style></defs>"
    drawn = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'{sheet}<defs><path id="tick" d="M0 0V3.5" {mark}/></defs>{rows}'
        f'<path d="M1 1L3 7" {grid}/><path d="M4 9V1" {grid}/></svg>'
    )
    assert COMPACT[".svg"](drawn).splitlines()[5:] == [
        '<path d="M1 9V1M2 9V1M3 9V1" class="s0"/>',
        '<path d="M1 9v3.5M2 9v3.5M3 9v3.5" class="s1"/>',
        '<text x="1" y="9" class="s2">1</text>',
        '<g class="s0"><path d="M1 1L3 7"/>',
        '<path d="M4 9V1"/>',
        "</g>",
        "</svg>",
    ]


def test_a_long_curve_ends_where_it_ended() -> None:
    points = [(1.04 * number, 50 + (-1) ** number * 0.333 * number) for number in range(40)]
    drawn = f'<svg xmlns="http://www.w3.org/2000/svg"><path d="M{"L".join(f"{x} {y}" for x, y in points)}"/></svg>'
    (line,) = re.findall(r'd="M([^"]+)"', COMPACT[".svg"](drawn))
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", line)]
    x, y = sum(numbers[0::2]), sum(numbers[1::2])
    assert (x, y) == pytest.approx(points[-1], abs=0.051)
    assert len(line) < 400
