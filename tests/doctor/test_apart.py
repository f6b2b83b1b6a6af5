"""Kernels that would take the doctor with them: each is a report and a sentence with the kernel's own line."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import textwrap

import pytest
import torch

from backlight.doctor import Limits, diagnose
from backlight.doctor.steps import convention
from backlight.doctor.subject import apart, interpreted
from backlight.doctor.subject.subject import Subject
from backlight.doctor.subject.trouble import CouldNotRun, DeviceLost, subject_code
from backlight.problems import inputs
from backlight.spec import AttentionSpec

SHAPE = (1, 2, 16, 8)
linux = pytest.mark.skipif(not apart.possible(), reason="child processes are for Linux")


def right(q, k, v, causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def crashes(q, k, v):
    ctypes.string_at(0)


def aborts(q, k, v):
    os.abort()


def leaves(q, k, v):
    ctypes.CDLL(None)._exit(0)


def never_returns(q, k, v):
    ctypes.PyDLL(None).sleep(1000)


def waits(q, k, v):
    __import__("time").sleep(1000)


def eats(q, k, v):
    kept = []
    while True:
        kept.append(torch.ones(1 << 22))


def killed(q, k, v):
    os.kill(os.getpid(), 9)


ENDS = {
    crashes: ("the subject crashed the process: a segmentation fault (SIGSEGV)", "ctypes.string_at(0)"),
    aborts: ("the subject crashed the process: an abort (SIGABRT)", "os.abort()"),
    leaves: ("the subject ended the process with code 0 from compiled code", ""),
    never_returns: ("the subject did not return within 0.5 s, the limit of --timeout", "ctypes.PyDLL(None).sleep(1000)"),
    waits: ("the subject did not return within 0.5 s, the limit of --timeout", '__import__("time").sleep(1000)'),
    killed: ("the process was killed from outside (SIGKILL)", ""),
}


@linux
@pytest.mark.parametrize("kernel", ENDS)
def test_a_kernel_that_ends_its_process_is_exit_3_with_its_line(kernel):
    says, line = ENDS[kernel]
    seconds = 0.5 if kernel in (waits, never_returns) else 60
    report = diagnose(kernel, AttentionSpec(), shape=SHAPE, limits=Limits(seconds=seconds))
    assert (report.verdict, report.exit_code) == ("could-not-run", 3)
    assert report.headline.startswith(says)
    if line:
        assert re.search(rf"\(.*test_apart\.py:\d+: {re.escape(line)}\)$", report.headline), report.headline


@linux
@pytest.mark.parametrize("resident", [False, True])
def test_a_kernel_that_takes_all_memory_is_exit_3_with_its_line(resident, monkeypatch):
    """By a limit on what is reserved, and, where drivers reserve more than they use, on what is in use."""
    if resident:
        split = apart.split
        monkeypatch.setattr(apart, "split", lambda limits, resident_only: split(limits, resident_only=True))
    report = diagnose(eats, AttentionSpec(), shape=SHAPE, limits=Limits(memory=apart.GIB))
    assert report.exit_code == 3
    assert "took more than" in report.headline or (not resident and "you tried to allocate" in report.headline)
    assert "kept.append(torch.ones(1 << 22))" in report.headline


@linux
def test_a_healthy_kernel_is_the_same_report_from_a_child():
    told = [diagnose(right, AttentionSpec(causal=True), shape=SHAPE, limits=limits) for limits in (None, Limits())]
    for report in told:
        report.seconds = 0
        report.environment.pop("threads")
        for probe in report.probes:
            probe.seconds = 0
    assert told[0].to_dict() == told[1].to_dict()


@linux
def test_wrong_arguments_raise_here_and_not_in_the_child():
    with pytest.raises(ValueError, match="recipe must be one of"):
        diagnose(right, AttentionSpec(), recipe="none", limits=Limits())


@linux
def test_a_command_reports_a_crash_and_writes_what_was_asked_for(tmp_path):
    from test_trouble import run_here

    from backlight.doctor.report import json as report_json

    (tmp_path / "naughty.py").write_text("import ctypes\ndef fn(q, k, v):\n    ctypes.string_at(0)\n")
    done = run_here(f"{tmp_path}/naughty.py:fn", "--shape", "1,2,16,8", "--json", "-", "--report", str(tmp_path / "out"))
    assert done.returncode == 3
    report = report_json.loads(done.stdout)
    assert re.match(r"the subject crashed the process: .*naughty\.py:3: ctypes\.string_at\(0\)\)$", report.headline)
    assert report_json.load(tmp_path / "out" / "report.json").headline == report.headline


def test_a_lost_device_ends_the_examination():
    """Every call after an illegal access fails: probes took that for a refusal and the kernel for healthy."""
    calls = []

    def fn(q, k, v):
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return right(q, k, v)

    report = diagnose(fn, AttentionSpec(), shape=SHAPE, dtype=torch.float32)
    assert report.exit_code == 3
    assert "an illegal memory access was encountered (" in report.headline
    with pytest.raises(DeviceLost), subject_code():
        raise RuntimeError("CUDA error: misaligned address")


# --- layouts ----------------------------------------------------------------------------------------------------------------


def bshd(q, k, v, causal=False, **terms):
    return right(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2)


@pytest.mark.parametrize(("kernel", "layout"), [(right, "BHSD"), (bshd, "BSHD")])
def test_lengths_that_fit_both_readings_tell_the_layout(kernel, layout):
    """A layout trial crashed the doctor once: the kernel took 200 positions for heads and wrote where there were 4."""
    shapes = []

    def watched(q, k, v, causal=False):
        shapes.append(tuple(q.shape))
        return kernel(q, k, v, causal)

    problem = inputs.make(AttentionSpec(causal=True), (2, 4, 40, 8), sk=50, dtype=torch.float32)
    chosen, _ = convention.settle(Subject(watched), problem, [])
    native = (2, 4, 40, 8) if layout == "BHSD" else (2, 40, 4, 8)
    assert chosen.layout == layout
    assert shapes == [(1, 16, 16, 8), native]


def test_another_layout_is_not_tried_where_lengths_differ_and_the_first_one_runs():
    shapes = []

    def for_these_lengths(q, k, v):
        shapes.append(tuple(q.shape))
        if q.shape[2] in convention.SQUARES:
            raise ValueError("built for one length")
        return v.mean(2, keepdim=True).expand(*q.shape[:3], -1).sin()

    problem = inputs.make(AttentionSpec(), (2, 4, 40, 8), sk=50, dtype=torch.float32)
    chosen, _ = convention.settle(Subject(for_these_lengths), problem, [])
    assert chosen.layout == "BHSD"
    assert set(shapes) == {(1, 16, 16, 8), (1, 64, 64, 8), (2, 4, 40, 8)}


def test_what_merely_runs_does_not_win_over_what_resembles_the_answer():
    """Zeros are nearer to the answer than twice the answer is; only the second has anything to do with it."""

    def fn(q, k, v):
        if q.shape[1] in convention.SQUARES:
            raise ValueError("built for one length")
        return torch.zeros_like(q) if q.shape[1] == 4 else 3 * bshd(q, k, v)

    problem = inputs.make(AttentionSpec(), (2, 4, 40, 8), dtype=torch.float32)
    chosen, _ = convention.settle(Subject(fn), problem, [])
    assert chosen.layout == "BSHD"


def test_packed_tensors_go_only_to_who_takes_their_borders():
    call = inputs.make(AttentionSpec(), SHAPE).call
    assert convention.plausible(Subject(right), call) == ("BHSD", "BSHD")
    assert convention.plausible(Subject(lambda q, k, v, cu_seqlens=None: q), call) == ("BHSD", "BSHD", "packed")
    assert convention.plausible(Subject(lambda q, k, v, cu_seqlens_q: q), call) == ("packed",)


def test_a_raw_backward_is_not_called_with_an_o_of_another_width():
    subject = Subject(lambda q, k, v: torch.cat([v, v], -1), lambda do, q, k, v: pytest.fail("called"), layout="BHSD")
    problem = inputs.make(AttentionSpec(), SHAPE)
    with pytest.raises(CouldNotRun, match="o has 16 columns and v 8: the backward was not called"):
        subject.run(problem.call, problem.dy)


# --- Triton's interpreter ---------------------------------------------------------------------------------------------------


def test_bf16_in_tritons_interpreter_is_said_and_examined_in_fp16(monkeypatch):
    monkeypatch.setattr(interpreted, "misread_bf16", lambda dtype: dtype == torch.bfloat16)
    report = diagnose(right, AttentionSpec(), shape=SHAPE, dtype=torch.bfloat16)
    assert report.recipe["dtype"] == "float16"
    assert any(note.startswith("TRITON_INTERPRET=1: this Triton's") for note in report.recipe["notes"])
    large = torch.full(SHAPE, 1e5, dtype=torch.bfloat16)
    given = {name: torch.randn(SHAPE).bfloat16() for name in ("q", "k")} | {"v": large}
    assert diagnose(right, AttentionSpec(), **given).recipe["dtype"] == "float32"


def test_only_a_users_own_triton_kernels_are_meant(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreted, "dot_is_right", lambda: False)
    module = type(sys)("a_users_own")
    module.__file__ = "/somewhere/a_users_own.py"
    assert not interpreted._uses_triton(module)
    module.triton = __import__("triton")
    assert interpreted._uses_triton(module)
    monkeypatch.setitem(sys.modules, "a_users_own", module)
    assert interpreted.misread_bf16(torch.bfloat16)
    assert not interpreted.misread_bf16(torch.float16)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not interpreted.misread_bf16(torch.bfloat16)


def test_this_tritons_interpreter_is_asked_itself():
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton")
    from test_public_api import fresh

    code = """
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        from backlight.doctor.subject.interpreted import dot_is_right
        print(dot_is_right())
    """
    assert fresh(textwrap.dedent(code)) in ("True", "False")
