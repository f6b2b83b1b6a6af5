"""The command line: what it prints, what it returns, and that it needs neither triton nor matplotlib."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import backlight
from backlight import cli, info, registry
from backlight.demo import parts


@pytest.fixture
def run():
    def invoke(*arguments):
        return CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, list(arguments))

    return invoke


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"backlight {backlight.__version__}"


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for command in ("info", "doctor", "bench", "demo"):
        assert command in result.output


def test_info_shows_versions_and_every_backend(run):
    result = run("info")
    assert result.exit_code == 0
    assert torch.__version__ in result.output
    assert backlight.__version__ in result.output
    assert info.cpu_model() in result.output
    for name in registry.names():
        assert name in result.output


def test_info_shows_why_a_backend_cannot_run(run, monkeypatch):
    absent = types.SimpleNamespace(summary="a kernel", available=lambda: ("it needs sm_90",))
    monkeypatch.setattr(registry, "names", lambda: ("hopper",))
    monkeypatch.setattr(registry, "get", lambda name: absent)
    result = run("info")
    assert result.exit_code == 0
    assert "it needs sm_90" in result.output
    assert "available" not in result.output


def test_unknown_distribution_is_not_installed():
    assert info.version_of("no-such-distribution-anywhere") == info.NOT_INSTALLED
    assert info.version_of("no-such-distribution-anywhere", "torch") == metadata.version("torch")


HANDED_ON = ("doctor", "bench")


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_missing_command_says_so(run, monkeypatch, name):
    monkeypatch.setattr(cli, "_command_of", lambda name: None)
    result = run(name, "--option", "value")
    assert result.exit_code == 2
    assert result.output.strip() == f"`backlight {name}` is not part of this version."


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_command_gets_its_arguments_untouched(run, monkeypatch, name):
    fake, seen = typer.Typer(), []

    @fake.command()
    def command(subject: str, causal: bool = False):
        seen.append((subject, causal))
        raise typer.Exit(1)

    monkeypatch.setattr(cli, "_command_of", lambda name: fake)
    result = run(name, "sdpa", "--causal")
    assert seen == [("sdpa", True)]
    assert result.exit_code == 1


@pytest.mark.parametrize("missing", ["backlight.bench", "backlight.bench.command"])
def test_a_command_may_be_absent(monkeypatch, missing):
    monkeypatch.setattr(cli, "importlib", importer_without(missing))
    assert cli._command_of("bench") is None


def test_what_a_command_needs_may_not_be_absent(monkeypatch):
    monkeypatch.setattr(cli, "importlib", importer_without("jinja2"))
    with pytest.raises(ModuleNotFoundError):
        cli._command_of("bench")


def importer_without(missing):
    def import_module(name):
        raise ModuleNotFoundError(name=missing)

    return types.SimpleNamespace(import_module=import_module)


def test_unknown_demo_part_is_named(run):
    result = run("demo", "nonsense")
    assert result.exit_code == 2
    assert "'nonsense'" in result.output
    for name in parts.NAMES:
        assert name in result.output


@pytest.mark.parametrize(("holds", "code", "said"), [(True, 0, "all good"), (False, 1, "FAILED")])
def test_demo_returns_the_verdict_of_its_parts(run, monkeypatch, tmp_path, holds, code, said):
    ran = []
    module = types.SimpleNamespace(run=lambda console, out: ran.append(out) or holds)
    monkeypatch.setattr(parts, "importlib", types.SimpleNamespace(import_module=lambda name: module))
    result = run("demo", "seeds", "--out", str(tmp_path))
    assert ran == [tmp_path]
    assert result.exit_code == code
    assert said in result.output


# --- bad words ---------------------------------------------------------------------------------------------------------------

BAD_WORDS = [
    ("nonsense", 2, "nonsense"),
    ("--nonsense", 2, "--nonsense"),
    ("--version=yes", 2, "--version"),
    ("info extra", 2, "(extra)"),
    ("info --deep", 2, "--deep"),
    ("demo nonsense", 2, "no demo part is called 'nonsense'; there are machine, seeds, doctor, train"),
    ("demo seeds nonsense", 2, "no demo part is called 'nonsense'"),
    ("demo Seeds", 2, "no demo part is called 'Seeds'"),
    ("demo [bold]", 2, "no demo part is called '[bold]'"),
    ("demo --out", 2, "--out"),
    ("demo seeds --out FILE", 2, "cannot be written: "),
    ("demo seeds --out FILE/deeper", 2, "cannot be written: "),
    ("demo --steps 3", 2, "--steps"),
    # what is handed on keeps the codes of the command it is handed to
    ("doctor sdpa --seed x", 3, "--seed must be a whole number from 0 to 2147483647, got 'x'"),
    ("doctor sdpa --nonsense", 3, "--nonsense"),
    ("doctor nonsense", 3, "no kernel is called 'nonsense'"),
    ("doctor compare FILE FILE", 3, "is not a report of this version"),
    ("bench nonsense", 2, "no suite is called 'nonsense'"),
    ("bench smoke --rounds x", 2, "--rounds must be a whole number from 1 to 1000, got 'x'"),
    ("bench show FILE", 3, "is not JSON"),
    ("bench compare FILE FILE", 3, "is not JSON"),
]


@pytest.mark.parametrize(("words", "code", "sentence"), BAD_WORDS, ids=[words for words, _, _ in BAD_WORDS])
def test_bad_words_get_a_sentence(run, monkeypatch, tmp_path, words, code, sentence):
    monkeypatch.setattr(parts.Part, "run", lambda *_: pytest.fail("the demo was begun"))
    (tmp_path / "file").write_text("")
    result = run(*(word.replace("FILE", str(tmp_path / "file")) for word in words.split()))
    assert result.exit_code == code, result.output
    assert sentence in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", ["info", "demo"])
def test_an_interruption_is_130(run, monkeypatch, tmp_path, name):
    """click leaves with 1, which for `demo` means that a part failed."""

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "show", interrupt)
    monkeypatch.setattr(parts.Part, "run", interrupt)
    result = run(name, *(["--out", str(tmp_path)] if name == "demo" else []))
    assert result.exit_code == 130
    assert "interrupted" in result.output


def test_command_line_needs_no_optional_package():
    script = (
        "import sys\n"
        "for name in ('triton', 'matplotlib', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "sys.argv = ['backlight', 'info']\n"
        "from backlight.cli import main\n"
        "main()\n"
    )
    source = str(Path(backlight.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert result.returncode == 0, result.stderr
    assert "tiled" in result.stdout
