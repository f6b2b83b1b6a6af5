"""tools/resolve.py: what it asks, in which environment, and what it makes of answers; `make resolve` asks the index itself."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_SOLUTION = "  x No solution found when resolving dependencies:\n  because torch==2.13.0 depends on triton==3.7.1"
NO_NETWORK = "error: Request failed after 3 retries\n  Caused by: Failed to fetch: `https://index/simple/torch/`"


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("resolve", ROOT / "tools" / "resolve.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "resolve", module)
    spec.loader.exec_module(module)
    return module


def test_every_platform_python_and_question_has_a_row(resolve: ModuleType) -> None:
    rows = resolve.rows()
    assert len({str(row) for row in rows}) == len(rows) == 4 * 4 * 3
    declared = set(re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()))
    assert {row.python for row in rows} == declared
    assert {str(row.question.name) for row in resolve.rows(["macos", "3.12"])} == {"make demo", "make test", "unpinned"}


def test_the_questions_are_what_the_makefile_installs(resolve: ModuleType) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for question in resolve.QUESTIONS:
        if question.pinned:
            assert f"'.[{','.join(question.extras)}]'" in makefile, question.name


def test_nothing_local_reaches_the_resolver(resolve: ModuleType) -> None:
    given = {"PIP_FIND_LINKS": "/wheels", "PIP_EXTRA_INDEX_URL": "file:///x", "UV_INDEX": "file:///y", "UV_FIND_LINKS": "/w"}
    kept = {"PATH": "/bin", "SSL_CERT_FILE": "/etc/c.pem", "UV_CACHE_DIR": "/cache"}
    assert resolve.public({**given, **kept}) == {**kept, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    command = resolve.command("windows x86_64", "3.13", "pyproject.toml", ("report",), "constraints.txt")
    assert "--no-config" in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert command[command.index("--python-platform") + 1] == "x86_64-pc-windows-msvc"
    assert command[command.index("--constraints") + 1] == "constraints.txt"


def test_no_solution_and_no_network_are_told_apart(resolve: ModuleType) -> None:
    assert resolve.read(0, "torch==2.13.0\ntriton==3.7.1 ; x\n", "").versions == {"torch": "2.13.0", "triton": "3.7.1"}
    assert resolve.read(1, "", NO_SOLUTION) == resolve.Answer(resolve.UNSOLVABLE, {}, NO_SOLUTION.strip())
    assert resolve.read(2, "", NO_NETWORK).code == resolve.UNREACHABLE
    assert resolve.read(2, "", "error: unexpected argument").code == resolve.UNSOLVABLE


def test_an_unpinned_package_that_holds_torch_back_fails(resolve: ModuleType) -> None:
    row = resolve.rows(["linux x86_64", "3.11", "unpinned"])[0]
    old, new = resolve.Answer(0, {"torch": "2.13.0"}), resolve.Answer(0, {"torch": "2.15.0"})
    held = resolve.judge(row, old, new)
    assert held.code == resolve.UNSOLVABLE
    assert held.words == "the package brings torch 2.13.0, alone it would be torch 2.15.0"
    assert resolve.judge(row, new, new) == new


@pytest.mark.parametrize(("code", "words"), [(0, ""), (1, NO_SOLUTION), (2, NO_NETWORK)], ids=["solved", "unsolved", "offline"])
def test_the_exit_status_and_the_words(
    resolve: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, words: str
) -> None:
    def answer(arguments: list[str], given: str | None = None) -> object:
        if given is not None and code != 2:
            return resolve.read(0, "torch==2.15.0", "")
        return resolve.read(code, "torch==2.15.0", words)

    monkeypatch.setattr(resolve, "ask", answer)
    status = resolve.main(["-k", "linux aarch64", "-k", "3.12"])
    out, err = capsys.readouterr()
    assert status == {0: 0, 1: 1, 2: 3}[code]
    if code == 2:
        assert "does not answer" in err
        assert err.count("\n") == 1
    else:
        assert out.count("linux aarch64") == 3
        assert f"{0 if code else 3} of 3 resolve" in out
        assert ("depends on triton==3.7.1" in err) == bool(code)
