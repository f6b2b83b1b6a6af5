"""The backward with learned terms compiled for sm_90a: spills, warnings, instructions; no trace of a term in a plain kernel."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from aot import SHARED_MEMORY, Report, compiled

from backlight.backends.hopper.backward import dbias, dbias_ordered, dq_convert, dq_rows, host, prepass
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import BackwardConfig
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec

BF16, FP16 = torch.bfloat16, torch.float16
LAZY, EVERY = ("bias", "tau"), ("bias", "sink", "tau", "gate", "softcap")
# bytes; the plain kernel of narrow heads spills too (test_compiled.py)
ALLOWED_SPILLS = {64: 300, 128: 100}
ALLOWED_ELSEWHERE = {"_prepass_kernel": 16, "_dq_kernel": 64, "_bwd_narrow_kernel": 40}
ALLOWED_WITH_SOFTCAP = {64: 64, 128: 400}


def reports_of(
    d: int,
    terms: tuple[str, ...],
    dtype: torch.dtype = BF16,
    deterministic: bool = False,
    packed: bool = False,
    **options: object,
) -> dict[str, Report]:
    """What every kernel of a backward compiles to, by name."""
    batch, length = (1, 600) if packed else (2, 512)
    q, k = torch.zeros(batch, 4, length, d, dtype=dtype), torch.zeros(batch, 2, length, d, dtype=dtype)
    cu = torch.tensor([0, 200, length], dtype=torch.int32) if packed else None
    given: dict[str, torch.Tensor] = {"bias": torch.zeros(4, 512), "sink": torch.zeros(4), "tau": torch.zeros(4), "gate": q}
    given = {name: tensor for name, tensor in given.items() if name in terms}
    softcap = 30.0 if "softcap" in terms else None
    spec = AttentionSpec(**({"causal": True} | options), softcap=softcap, **dict.fromkeys(given, True))
    call = Call(spec, q, k, k, **given, cu_seqlens_q=cu, cu_seqlens_k=cu, deterministic=deterministic)
    u = q if "tau" in terms else None
    with compiled(backward, dbias_ordered, dbias, dq_convert, dq_rows, prepass) as reports:
        host.backward(call, q, torch.zeros(batch, 4, length), u, q, None, frozenset(call.gradients))
    return {report.kernel: report for report in reports}


def examine(reports: dict[str, Report], d: int, terms: tuple[str, ...]) -> None:
    for report in reports.values():
        assert not report.warnings, str(report)
        assert report.shared <= SHARED_MEMORY, str(report)
        if report.kernel != "_bwd_kernel":
            assert report.spills <= ALLOWED_ELSEWHERE.get(report.kernel, 0), str(report)
        else:
            allowed = ALLOWED_WITH_SOFTCAP if "softcap" in terms else ALLOWED_SPILLS
            assert report.spills <= allowed[64 if d <= 64 else 128], str(report)
            assert report.registers == 168, str(report)


@pytest.mark.parametrize("terms", [pytest.param(("bias",), marks=pytest.mark.slow, id="bias"), pytest.param(LAZY, id="lazy")])
@pytest.mark.parametrize("d", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_terms(d: int, terms: tuple[str, ...]) -> None:
    reports = reports_of(d, terms)
    examine(reports, d, terms)
    main = reports["_bwd_kernel"]
    assert "_dbias_ordered_kernel" not in reports
    if main.sass:
        boxes = 17 if d == 64 else 9
        # dq, and the diagonals of a tile
        assert sum(n for name, n in main.opcodes.items() if name.startswith("UTMAREDG")) == 1 + boxes, str(main)
        loads = sum(n for name, n in main.opcodes.items() if name.startswith("LDG") and "CONSTANT" in name)
        # blocks with bias at two places in the code: 34 (or 18) distances for a thread's 64 (or 32) scores, some read again
        assert 4 * boxes <= loads <= 5 * boxes, f"{main}: {loads} loads of the table"


@pytest.mark.slow
@pytest.mark.parametrize("terms", [("tau",), ("softcap",), ("sink", "gate"), EVERY], ids="+".join)
@pytest.mark.parametrize("d", [40, 64, 96, 128])
def test_more_terms(d: int, terms: tuple[str, ...]) -> None:
    examine(reports_of(d, terms), d, terms)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("d", [64, 128])
def test_ordered(d: int, dtype: torch.dtype) -> None:
    reports = reports_of(d, EVERY, dtype, deterministic=True, packed=True, causal=False, window=(100, 20))
    assert {"_dbias_ordered_kernel", "_dbias_ordered_sum_kernel", "_dq_kernel"} < reports.keys()
    examine(reports, d, EVERY)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_a_plain_kernel_holds_no_trace_of_terms(d: int) -> None:
    """No parameter, no memory and no load of a term; what a term adds is counted, so that the test sees what it looks for."""

    def parameters(report: Report) -> int:
        return len(re.findall(rf"\.param [^,)]*{report.kernel}_param_\d+", report.ptx))

    with override("hopper.backward", BackwardConfig(128 if d == 64 else 64, 128, overlap=d > 64)):
        plain, lazy = reports_of(d, ()), reports_of(d, LAZY)
    main, more = plain["_bwd_kernel"], lazy["_bwd_kernel"]
    # two descriptors, two pointers, length and origin of the table
    assert parameters(more) >= parameters(main) + 6
    assert parameters(lazy["_prepass_kernel"]) > parameters(plain["_prepass_kernel"])
    rows, boxes = (128, 17) if d == 64 else (64, 9)
    # tau / n of the rows of two stages, boxes of [8, 64], a barrier; one barrier more may move what follows it
    # at D = 128 they take the place of a tile through which dv leaves
    given_up = 0 if d == 64 else 128 * 128 * 2
    assert abs(more.shared - main.shared + given_up - (2 * rows + boxes * 512) * 4) <= 1024
    if main.sass:
        assert not main.has("LDG"), str(main)
        assert sum(n for name, n in main.opcodes.items() if name.startswith("UTMAREDG")) == 1, str(main)
