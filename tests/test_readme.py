"""README and docs tell the truth: their code runs, their links lead somewhere, tables match the package, the site builds.
Examples run too."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import make_masks_page
import make_speed_table as made
import pytest
import test_api_page as api_page
from records import newest

import backlight
from backlight import registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(README)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
# pages of which a test of their own runs the code
ELSEWHERE = {"doctor.md": "tests/doctor/test_report_docs.py"}
CODE_PAGES = [page for page in PAGES[1:] if page.name not in ELSEWHERE and BLOCK.search(page.read_text())]
NEEDS = {"layers.md": "transformers", "masks.md": "transformers"}
# examples that take arguments: a short run
ARGUMENTS = {"train_lm": ["--steps", "40", "--out", "{tmp}"], "meanflow": ["--steps", "5", "--out", "{tmp}/samples.png"]}
LINKS = [
    (page, target)
    for page in PAGES
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
    if not target.startswith(("http:", "https:"))
]


def rows_after(heading):
    """Cells of the first table below a heading, header row first."""
    section = README.split(f"## {heading}\n", 1)[1]
    table = section[section.index("|") :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table if not set(line) <= set("|- ")]


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_code_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_pages_that_teach_have_code():
    assert {"index.md", "backward.md", "layers.md", "kernels.md", "faq.md"} <= {page.name for page in CODE_PAGES}
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


@pytest.mark.parametrize("page", CODE_PAGES, ids=lambda page: page.name)
def test_code_of_a_page_runs_from_top_to_bottom(page):
    """Blocks of one page share their names, as a reader's session would."""
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{page.name} needs {NEEDS[page.name]}")
    text = page.read_text()
    names = {"__name__": page.stem}
    for block in BLOCK.finditer(text):
        first_line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * first_line + block[1], str(page), "exec"), names)


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra `docs`)")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed (extra `docs`)")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text()
    # a function with the name of its module has no entry, and nothing warns
    assert not [name for name in sorted(api_page.entries(api_page.PAGE)) if f'id="{name}"' not in api]
    assert "http" not in re.sub(r"https?://(www\.w3\.org|squidfunk\.github\.io)[^\"]*", "", api.split("<body", 1)[0]), "network"


@pytest.mark.parametrize(("page", "target"), LINKS, ids=[f"{page.name}:{target}" for page, target in LINKS])
def test_links_lead_somewhere(page, target):
    assert (page.parent / target).exists()


def test_status_table_matches_the_registry():
    """A backend is `planned` exactly as long as the registry does not know it."""
    header, *rows = rows_after("Status")
    for column, heading in enumerate(header[1:], start=1):
        name = re.match(r"`(\w+)`", heading)[1]
        planned = {row[column] == "planned" for row in rows}
        assert planned == {name not in registry.names()}


@pytest.mark.parametrize(("row", "what"), [("tangents (forward mode)", "tangent"), ("second derivatives", "second")])
def test_status_table_names_what_has_no_derivative(row, what):
    """Cells of `tiled` and `triton`: yes, or what of a backend's features lacks that derivative."""
    header, *rows = rows_after("Status")
    (cells,) = [cells for cells in rows if cells[0].startswith(row)]
    assert cells[0].endswith("of all of these")
    for name in ("tiled", "triton"):
        (column,) = [place for place, heading in enumerate(header) if heading.startswith(f"`{name}`")]
        backend = registry.get(name)
        lacks = sorted(backend.takes - backend.derivatives[what] - {"part", "entmax_part"})
        assert cells[column] == (f"but for {', '.join(lacks)}" if lacks else "yes")


def test_number_of_defects_is_right_to_a_hundred():
    from backlight.doctor.defects.catalogue import BY_ID

    word = {1: "some hundred", 2: "some two hundred", 3: "some three hundred"}[round(len(BY_ID) / 100)]
    assert f"knows {word} ways to be wrong" in README


def test_keyword_table_matches_the_signature():
    section = README.split("| keyword |", 1)[1].split("\n\n", 1)[0]
    described = set(re.findall(r"`(\w+)=", section))
    keywords = {
        name
        for name, parameter in inspect.signature(backlight.attention).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert described == keywords


def test_picture_is_small():
    for image in (ROOT / "docs" / "images").iterdir():
        assert image.stat().st_size < 200_000


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(example, tmp_path):
    if example.stem == "with_transformers":
        pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")
    result = subprocess.run(
        [sys.executable, str(example), *(word.format(tmp=tmp_path) for word in ARGUMENTS.get(example.stem, ()))],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr


def test_speed_table_is_the_record() -> None:
    """The ratios in the README are what the newest record says, to the digit."""
    text = (ROOT / "README.md").read_text()
    assert made.table() in text
    assert all(record.name in text for record in made.records())
    page = (ROOT / "docs" / "hopper.md").read_text()
    for shown in (text, page):
        assert made.variants_table() in shown
        assert newest("variants").name in shown
    assert made.cells_table(made.NEWEST) in page
    experiments = (ROOT / "docs" / "experiments.md").read_text()
    assert made.cells_table(made.OLDEST) in experiments
    assert made.versions_table() in experiments
    assert made.terms_table() in page
    assert newest("terms").name in page
    assert made.wide_table() in page
    assert made.flex_bias() in text
    for page in (text, (ROOT / "docs" / "training.md").read_text()):
        assert made.training_table() in page
    assert made.overhead_table() in (ROOT / "docs" / "host.md").read_text()
    pairs = (ROOT / "docs" / "pair-bias.md").read_text()
    assert made.pair_table() in pairs
    assert newest("pair").name in pairs


def test_masks_page_is_the_record() -> None:
    text = make_masks_page.PAGE.read_text()
    assert make_masks_page.page(text) == text, "a newer record is there: python tools/make_masks_page.py"
    assert newest("masks").name in text
    measured = text[text.index(make_masks_page.BEGIN) : text.index(make_masks_page.END)]
    assert re.findall(r"\d ms|\d %|\dx", text.replace(measured, "")) == []


def test_the_masks_page_would_notice_another_record(monkeypatch: pytest.MonkeyPatch) -> None:
    text, honest = make_masks_page.PAGE.read_text(), make_masks_page.load

    def slower(path: Path) -> dict[str, Any]:
        data = honest(path)
        for row in data["rows"]:
            if row["case"].startswith("documents,"):
                row["times"]["both"]["median_ms"] *= 1.1
        return data

    monkeypatch.setattr(make_masks_page, "load", slower)
    assert make_masks_page.page(text) != text


def test_the_share_of_tokens_is_that_of_the_example() -> None:
    """Of eight rollouts that share their prompt: the example's own prompt and lengths."""
    tree = ast.parse((ROOT / "examples" / "shared_prompt.py").read_text())
    constants: dict[str, Any] = {}
    for line in tree.body:
        if isinstance(line, ast.Assign):
            names = [name.id for target in line.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            if {"PROMPT", "LENGTHS"} & {*names}:
                values = ast.literal_eval(line.value)
                constants |= dict(zip(names, values if len(names) > 1 else [values], strict=True))
    prompt, lengths = constants["PROMPT"], constants["LENGTHS"]
    share = (prompt + sum(lengths)) / (prompt * len(lengths) + sum(lengths))
    word = {4: "a quarter", 5: "a fifth", 6: "a sixth"}[round(1 / share)]
    assert f"{word} of the tokens" in README
    assert f"{word} of its tokens" in (ROOT / "docs" / "masks.md").read_text()
    assert len(lengths) == 8
