"""What a release consists of: the wheel and the sdist, built and looked into, and the files around them."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import backlight

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PLACEHOLDERS = re.compile(r"example\.(com|org|net)|your-?(name|org)|CHANGE-?ME|TODO|<[a-z]+>", re.IGNORECASE)
# CFF 1.2.0: what must be there, and what else may
CITATION_NEEDS = {"cff-version", "message", "title", "authors"}
CITATION_MAY = {"type", "abstract", "version", "license", "keywords", "date-released", "repository-code", "url", "doi"}


def files(*patterns: str) -> set[str]:
    """Those of the repository, and those that will be once they are added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run([*command, *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip("not a checkout of git")
    return {name for name in run.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, by the backend that pyproject.toml names, in a process of its own: it works in the root."""
    pytest.importorskip("hatchling", reason="hatchling is not installed (extra `test` brings it)")
    folder = tmp_path_factory.mktemp("dist")
    code = "import sys, hatchling.build as b; print(b.build_wheel(sys.argv[1])); print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    wheel, sdist = done.stdout.split()[-2:]
    return folder / wheel, folder / sdist


def test_the_wheel_is_the_package(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    assert wheel.name == f"backlight-{backlight.__version__}-py3-none-any.whl"
    info = f"backlight-{backlight.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = email.message_from_bytes(archive.read(f"{info}METADATA"))
        entries = archive.read(f"{info}entry_points.txt").decode()
    package = {name for name in names if not name.startswith(info)}
    assert package == {name.removeprefix("src/") for name in files("src")}
    assert {name.removeprefix(info) for name in names - package} == {
        *("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert (metadata["Name"], metadata["Version"], metadata["License-Expression"]) == (
        *("backlight", backlight.__version__, "Apache-2.0"),
    )
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "backlight = backlight.cli:main" in entries
    assert "[pytest11]" in entries
    needed = [line for line in metadata.get_all("Requires-Dist") or () if "extra ==" not in line]
    assert {re.split(r"[^\w-]", line)[0] for line in needed} == {"torch", "numpy", "rich", "typer", "jinja2"}


def test_what_lies_in_the_wheel_works(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Nothing of the checkout is in reach: files of data are found in the package."""
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path / "site")
    work = """
import sys, torch, backlight
from backlight.demo.text import Text
from backlight.doctor.report.html import html
from backlight.doctor import diagnose

assert backlight.__file__.startswith(sys.argv[1]), backlight.__file__
q = torch.randn(1, 2, 9, 8, requires_grad=True)
backlight.attention(q, q, q, causal=True).sum().backward()
assert len(Text.alice()) > 100_000
report = diagnose(backlight.attention, backlight.AttentionSpec(causal=True), shape=(1, 2, 20, 8), dtype=torch.float32)
assert report.verdict == "healthy", report.headline
assert "<style>" in html(report)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
    for command in (["-c", work, str(tmp_path / "site")], ["-m", "backlight", "doctor", "schema"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_sdist_is_the_repository(built: tuple[Path, Path]) -> None:
    _, sdist = built
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert not files() - names
    # pictures drawn beside a record are ignored by git and taken all the same: a release is made from a clean checkout
    drawn = {name for name in names if name.startswith("benchmarks/results/") and name.endswith((".svg", ".png"))}
    assert not names - drawn - {"PKG-INFO"} - files()


def test_no_address_is_made_up() -> None:
    """Addresses of the project are real or absent; `docs/stability.md` lists where they go once there is a home."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = {path.name: path.read_text() for path in (ROOT / "SECURITY.md", ROOT / "CITATION.cff", *FORMS)}
    texts["urls"] = "".join(project.get("urls", {}).values())
    assert not [name for name, text in texts.items() if PLACEHOLDERS.search(text) or re.search(r"\w@\w+\.\w", text)]
    assert all(author.keys() == {"name"} for author in project["authors"])


def test_the_citation_is_that_of_this_version() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra `docs` brings it)")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert CITATION_NEEDS <= citation.keys() <= CITATION_NEEDS | CITATION_MAY
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["version"] == backlight.__version__
    project = (ROOT / "pyproject.toml").read_text()
    assert f'license = "{citation["license"]}"' in project
    assert all(f'{{ name = "{author["name"]}" }}' in project for author in citation["authors"])
    assert f"## {backlight.__version__} " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one(form: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra `docs` brings it)")
    data = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert data.keys() <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= data.keys() <= {"name", "description", "title", "labels", "assignees", "body"}
    asked = [entry for entry in data["body"] if entry["type"] != "markdown"]
    assert all(entry["type"] in {"textarea", "input", "dropdown", "checkboxes"} for entry in asked)
    assert len({entry["id"] for entry in asked}) == len(asked) > 2
    assert len({entry["attributes"]["label"] for entry in asked}) == len(asked)
    assert any(entry.get("validations", {}).get("required") for entry in asked)
    for entry in data["body"]:
        assert entry.keys() <= {"type", "id", "attributes", "validations"}
        assert ("value" if entry["type"] == "markdown" else "label") in entry["attributes"]


def test_commands_in_the_forms_are_commands() -> None:
    """Every option that a form tells people to type is one of the command."""
    text = "".join(form.read_text() for form in FORMS)
    lines = re.findall(r"`backlight ((?:doctor|bench)[^`]*)`", " ".join(text.split()))
    assert any("--json report.json" in line for line in lines)
    for command in ({"doctor"}, {"bench", "run"}):
        options = {word for line in lines if command <= {*line.split()} for word in re.findall(r"--[a-z-]+", line)}
        shown = subprocess.run(
            [sys.executable, "-m", "backlight", *sorted(command), "--help"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        assert options
        assert options <= {*re.findall(r"--[a-z-]+", shown)}
