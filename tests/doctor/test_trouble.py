"""Subjects that misbehave: every one of them is exit code 3 and a sentence with the kernel's own line, never a verdict."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from report_samples import healthy
from typer.testing import CliRunner

import backlight.doctor
from backlight.doctor import assert_healthy, command, diagnose
from backlight.doctor.command import streams
from backlight.doctor.report import json as report_json
from backlight.doctor.report import terminal
from backlight.doctor.subject import trouble
from backlight.spec import AttentionSpec

SMALL = ("--shape", "1,2,16,8", "--dtype", "fp32")
SHAPE = (1, 2, 16, 8)
GOOD = "    return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n"


def doctor(*arguments: str):
    return CliRunner().invoke(command.app, list(arguments), prog_name="backlight doctor")


def tight(output: str) -> str:
    """Without white space: long paths are folded."""
    return re.sub(r"[\s│]+", "", output)


def flat(output: str) -> str:
    return re.sub(r"[\s│]+", " ", output)


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Writes the body of fn(q, k, v), and what stands above it, to a file; the subject's name."""
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.delitem(sys.modules, "naughty", raising=False)

    def write(body: str, above: str = "") -> str:
        path = tmp_path / "naughty.py"
        path.write_text(f"import os, sys, torch\n{above}\ndef fn(q, k, v):\n{body}")
        return f"{path}:fn"

    yield write
    sys.modules.pop("naughty", None)


# --- what a subject raises --------------------------------------------------------------------------------------------------

RAISED = {
    "key": ("    return {}['o']\n", "KeyError: 'o'", "return {}['o']"),
    "zero": ("    return q / (1 // 0)\n", "ZeroDivisionError: ", "return q / (1 // 0)"),
    "name": ("    return kernle(q)\n", "NameError: name 'kernle' is not defined", "return kernle(q)"),
    "attribute": ("    return q.atend(k)\n", "AttributeError: 'Tensor' object has no attribute 'atend'", "return q.atend(k)"),
    "memory": ("    raise MemoryError\n", "MemoryError", "raise MemoryError"),
    "torch": ("    return q @ k\n", "Expected size for first two dimensions", "return q @ k"),
    "library": ("    import json; json.loads('{')\n", "Expecting property name", "import json; json.loads('{')"),
    "exit": ("    sys.exit(0)\n", "the subject ends the program with sys.exit(0)", "sys.exit(0)"),
    "exit with words": ("    sys.exit('bye')\n", "the subject ends the program with sys.exit('bye')", "sys.exit('bye')"),
    "process": ("    os._exit(0)\n", "the subject ends the process with os._exit(0)", "os._exit(0)"),
    "stop": ("    raise StopIteration\n", "StopIteration", "raise StopIteration"),
    "recursion": ("    return fn(q, k, v)\n", "maximum recursion depth exceeded", "return fn(q, k, v)"),
    "backward": (
        "    q = q.clone()\n    if q.requires_grad: q.register_hook(lambda g: g.nothing)\n" + GOOD,
        "AttributeError: 'Tensor' object has no attribute 'nothing'",
        "register_hook(lambda g: g.nothing)",
    ),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_inside_the_kernel_is_exit_3_with_its_own_line(kernel, name):
    body, says, line = RAISED[name]
    result = doctor(kernel(body), *SMALL)
    assert result.exit_code == 3, result.output
    shown = flat(result.output)
    assert "COULD NOT RUN" in shown
    assert flat(says) in shown
    assert re.search(rf"naughty\.py:\d+:.*{re.escape(tight(line))}", tight(shown)), shown
    assert "Traceback" not in result.output


IMPORTED = {
    "raise": ("raise OSError('no GPU here')", "no GPU here", "raise OSError('no GPU here')"),
    "exit": ("sys.exit(0)", "the subject ends the program with sys.exit(0)", "sys.exit(0)"),
    "process": ("os._exit(0)", "the subject ends the process with os._exit(0)", "os._exit(0)"),
    "syntax": ("def broken(:", "SyntaxError: invalid syntax", "def broken(:"),
    "missing": ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'", "import no_such"),
    "own": ("assert torch.zeros(1) == 1, 'needs ones'", "AssertionError: needs ones", "assert torch.zeros(1) == 1"),
}


@pytest.mark.parametrize("name", IMPORTED)
def test_an_exception_at_import_is_exit_3_with_its_own_line(kernel, name):
    above, says, line = IMPORTED[name]
    result = doctor(kernel(GOOD, above), *SMALL)
    assert result.exit_code == 3, result.output
    shown = flat(result.output)
    assert says in shown
    assert re.search(rf"naughty\.py:2:{re.escape(tight(line))}", tight(shown)), shown


def test_a_long_path_is_folded_not_cut(kernel, monkeypatch):
    monkeypatch.setattr(terminal, "WIDTH", 60)
    monkeypatch.setenv("COLUMNS", "60")
    result = doctor(kernel("    return q / (1 // 0)\n"), *SMALL)
    assert "naughty.py:4:" in tight(result.output)


RETURNED = {
    "nothing": ("    pass\n", "the subject returned NoneType"),
    "an empty tuple": ("    return ()\n", "the subject returned no o but nothing"),
    "a dict without o": ("    return {'out': q}\n", "the subject returned no o but 'out'"),
    "a list of lists": ("    return [[1.0]]\n", "the subject returned a list for o"),
    "whole numbers": ("    return q.long()\n", "the subject returned o as torch.int64"),
    "another device": ("    return q.to('meta')\n", "the subject returned o as torch.float32 on meta"),
    "a generator": ("    yield q\n", "the subject returned generator"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_cannot_be_compared_is_exit_3(kernel, name):
    body, says = RETURNED[name]
    result = doctor(kernel(body), *SMALL)
    assert result.exit_code == 3, result.output
    assert says in flat(result.output)


@pytest.mark.parametrize(
    ("attribute", "says"), [("number", "got int 3"), ("Kernel", "got the class Kernel"), ("pair", "got tuple (")]
)
def test_what_is_no_kernel_is_exit_3(kernel, attribute, says):
    path = kernel(GOOD, "number = 3\nclass Kernel:\n    def __call__(self, q, k, v): ...\npair = (1, 2)").removesuffix(":fn")
    result = doctor(f"{path}:{attribute}", *SMALL)
    assert result.exit_code == 3
    assert says in flat(result.output)


def test_an_exception_after_some_answers_is_no_verdict(kernel):
    """A kernel that works a few times and then raises: it was called healthy, with a probe "not run"."""
    body = "    calls.append(1)\n    if len(calls) > 2: raise KeyError('third call')\n" + GOOD
    result = doctor(kernel(body, "calls = []"), *SMALL, "--json", "-")
    report = json.loads(result.stdout)
    assert (report["verdict"], result.exit_code) == ("could-not-run", 3), report["headline"]
    assert "the same call works once and fails when repeated: KeyError: 'third call'" in report["headline"]


def test_the_engine_returns_a_report_where_it_used_to_throw():
    def fn(q, k, v):
        return {}["o"]

    report = diagnose(fn, AttentionSpec(), shape=SHAPE)
    assert (report.verdict, report.exit_code) == ("could-not-run", 3)
    assert "KeyError: 'o' (" in report.headline
    assert re.search(r'test_trouble\.py:\d+: return \{\}\["o"\]', report.headline)
    with pytest.raises(backlight.doctor.Unhealthy, match="KeyError"):
        assert_healthy(fn, AttentionSpec(), shape=SHAPE)


def test_a_process_of_the_users_may_still_exit(monkeypatch):
    """`os._exit` is caught for the command line, in the thread that calls the kernel, and given back afterwards."""
    before = os._exit
    with trouble.patience(0, lambda sentence: None):
        assert os._exit is not before
    assert os._exit is before


def test_a_failure_of_the_doctors_own_says_so(kernel, monkeypatch):
    def broken(*_, **__):
        return {}["x"]

    monkeypatch.setattr(backlight.doctor, "diagnose", broken, raising=False)
    result = doctor(kernel(GOOD), *SMALL)
    assert result.exit_code == 3
    assert "the examination broke off: KeyError: 'x' (test_trouble.py:" in flat(result.output)


def test_an_interruption_is_130(kernel):
    result = doctor(kernel("    raise KeyboardInterrupt\n"), *SMALL)
    assert result.exit_code == 130
    assert "interrupted" in result.output


def test_nobody_reading_is_no_defect(kernel, monkeypatch):
    """rich leaves with 1 when the pipe behind it is closed: `backlight doctor ... | head` said "defect"."""

    def closed(*_):
        raise SystemExit(1)

    monkeypatch.setattr(terminal, "render", closed)
    assert doctor(kernel(GOOD), *SMALL).exit_code == 0


# --- what a subject prints --------------------------------------------------------------------------------------------------


def test_prints_do_not_reach_the_json(kernel):
    result = doctor(
        kernel("    print('hello from the kernel')\n" + GOOD, "print('hello from the import')"), *SMALL, "--json", "-"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verdict"] == "healthy"
    assert "hello from the kernel" in result.stderr
    assert "hello from the import" in result.stderr


def run_here(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, for what a process does when it ends."""
    source = str(Path(backlight.doctor.__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "backlight", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
    )


def test_prints_of_compiled_code_and_prints_at_exit_do_not_reach_the_json(kernel):
    above = "import atexit, ctypes\nC = ctypes.CDLL(None)\natexit.register(print, 'at exit')"
    body = "    C.printf(b'from C')\n    os.write(1, b'from the descriptor')\n" + GOOD
    done = run_here(kernel(body, above), *SMALL, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "healthy"
    for words in ("from C", "from the descriptor", "at exit"):
        assert words in done.stderr


def test_standard_output_comes_back():
    streams_before = sys.stdout
    with streams.OutputAside() as aside:
        assert sys.stdout is sys.stderr
        aside.restore()
        assert sys.stdout is streams_before
    assert sys.stdout is streams_before


# --- what never returns -----------------------------------------------------------------------------------------------------

HANGS = {"in Python": "while True: pass", "in C": "__import__('time').sleep(1000)"}


@pytest.mark.parametrize("how", HANGS)
def test_a_kernel_that_hangs_does_not_hang_the_doctor(kernel, tmp_path, how):
    subject = kernel(f"    {HANGS[how]}\n")
    done = run_here(subject, *SMALL, "--timeout", "1", "--json", "-", "--report", str(tmp_path / "out"))
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "could-not-run"
    assert report["headline"].startswith("the subject did not return within 1 s, the limit of --timeout (")
    assert f"naughty.py:4: {HANGS[how]})" in report["headline"]
    assert report_json.load(tmp_path / "out" / "report.json").headline == report["headline"]


def test_a_crash_of_the_process_is_no_verdict_and_shows_its_line(kernel):
    done = run_here(kernel("    import ctypes; ctypes.string_at(0)\n"), *SMALL)
    assert done.returncode == 3
    assert "the subject crashed the process" in flat(done.stdout)
    assert re.search(r'naughty\.py", line 4 in fn', done.stderr)


def test_calls_that_return_in_time_are_left_alone():
    told = []
    with trouble.patience(0.2, told.append):
        for _ in range(3):
            with trouble.subject_code():
                pass
        torch.zeros(1)
        __import__("time").sleep(0.4)
    assert not told


# --- where nothing can be written -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--report", "--json"])
def test_a_place_that_cannot_be_written_is_told_before_anything_runs(kernel, tmp_path, option):
    (tmp_path / "file").write_text("")
    result = doctor(kernel("    raise KeyError('must not run')\n"), *SMALL, option, str(tmp_path / "file" / "out"))
    assert result.exit_code == 3
    unwrapped = re.sub(r"\s+", "", result.output)
    assert f"{option}{tmp_path / 'file' / 'out'}" in unwrapped
    assert "cannotbewritten:" in unwrapped
    assert "must not run" not in result.output


def test_a_pipe_gets_one_report_and_no_trial(kernel, tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    assert doctor(kernel(GOOD), *SMALL, "--json", str(pipe)).exit_code == 0
    reader.join(timeout=30)
    assert json.loads(found[0])["verdict"] == "healthy"


def test_a_disk_that_fills_up_meanwhile_is_exit_3_too(kernel, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backlight.doctor.report.json, "save", full)
    monkeypatch.setattr(backlight.doctor, "diagnose", lambda *_, **__: healthy(), raising=False)
    result = doctor(kernel(GOOD), *SMALL, "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 3
    assert "the report could not be written: [Errno 28] No space left on device" in flat(result.output)


# --- inputs about which nothing can be said ---------------------------------------------------------------------------------


def right(q, k, v, causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def drawn(dtype: torch.dtype = torch.float32, **changes: float) -> dict[str, torch.Tensor]:
    """q, k, v, do; `changes` are values put at [0, 1, 3, 5]."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 2, 16, 8, generator=generator).to(dtype) for name in ("q", "k", "v", "do")}
    for name, value in changes.items():
        tensors[name][0, 1, 3, 5] = value
    return tensors


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "1 NaN"), (float("inf"), "1 infinite"), (-float("inf"), "1 infinite")]
)
def test_inputs_that_are_not_finite_are_nobodys_defect(name, value, word):
    """A right kernel was called defective, mechanism established, because a captured tensor held a NaN."""
    report = diagnose(right, AttentionSpec(), **drawn(**{name: value}))
    assert (report.verdict, report.exit_code, report.findings) == ("could-not-run", 3, [])
    assert f"{name} has {word} of 256 values, the first at [0, 1, 3, 5]" in report.headline


def test_a_capture_with_nan_is_exit_3(kernel, tmp_path):
    torch.save(drawn(k=float("nan"), v=float("inf")), tmp_path / "dump.pt")
    result = doctor(kernel(GOOD), "--capture", str(tmp_path / "dump.pt"))
    assert result.exit_code == 3
    shown = flat(result.output)
    assert "k has 1 NaN of 256 values, the first at [0, 1, 3, 5]; v has 1 infinite of 256 values" in shown


@pytest.mark.parametrize(
    ("dtype", "factor", "which"), [(torch.float32, 1e25, "q"), (torch.bfloat16, 1e30, "q"), (torch.float16, 3e4, "do")]
)
def test_inputs_beyond_the_range_of_the_dtype_are_nobodys_defect(dtype, factor, which):
    """Every kernel with fp32 sums overflows on them; the float64 oracle does not."""
    tensors = drawn()
    names = ("q", "k") if which == "q" else ("v", "do")
    tensors |= {name: (tensors[name] * factor).clamp(-6e4, 6e4) if which == "do" else tensors[name] * factor for name in names}
    report = diagnose(right, AttentionSpec(), **{name: x.to(dtype) for name, x in tensors.items()})
    assert (report.verdict, report.findings) == ("could-not-run", [])
    assert f"the inputs are too large for {str(dtype)[6:]}: a textbook kernel gets" in report.headline


def test_large_but_finite_inputs_are_still_judged():
    tensors = drawn(torch.float32)
    tensors |= {name: tensors[name] * 1e4 for name in ("q", "k")}
    assert diagnose(right, AttentionSpec(), **tensors).verdict == "healthy"
