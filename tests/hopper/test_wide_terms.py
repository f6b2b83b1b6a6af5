"""Learned terms with heads wider than 128, compiled for sm_90a; what they compute is judged with the case list (WIDE)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aot import SHARED_MEMORY, Report, compiled

from backlight.backends.hopper.backward import dbias, dbias_ordered, dq_convert, dq_rows, host, prepass
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.spec import AttentionSpec

BF16 = torch.bfloat16
BIAS, MOST = ("bias",), ("bias", "sink", "softcap", "gate")
LAZY, EVERY = ("bias", "tau"), (*MOST, "tau")
# bytes, around the loops; the plain kernels of wide heads spill too (test_compiled.py)
ALLOWED_SPILLS = {"_fwd_kernel": 128, "_bwd_kernel": 128}


def reports_of(d: int, dv: int, terms: tuple[str, ...]) -> dict[str, Report]:
    q, k = torch.zeros(1, 4, 512, d, dtype=BF16), torch.zeros(1, 2, 512, d, dtype=BF16)
    v, y = torch.zeros(1, 2, 512, dv, dtype=BF16), torch.zeros(1, 4, 512, dv, dtype=BF16)
    given: dict[str, torch.Tensor] = {"bias": torch.zeros(4, 512), "sink": torch.zeros(4), "tau": torch.zeros(4), "gate": y}
    given = {name: tensor for name, tensor in given.items() if name in terms}
    spec = AttentionSpec(causal=True, softcap=30.0 if "softcap" in terms else None, **dict.fromkeys(given, True))
    call = Call(spec, q, k, v, **given)
    with compiled(forward, backward, dbias_ordered, dbias, dq_convert, dq_rows, prepass) as reports:
        forward.forward(call, save_u=True)
        u = y if "tau" in terms else None
        host.backward(call, y, torch.zeros(1, 4, 512), u, y, None, frozenset(call.gradients))
    return {report.kernel: report for report in reports}


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("d", "dv", "terms"),
    [
        slow(256, 256, BIAS),
        slow(256, 256, MOST),
        slow(192, 192, MOST),
        slow(192, 128, LAZY),
        slow(192, 128, EVERY),
        slow(64, 256, MOST),
    ],
)
def test_compiled(d: int, dv: int, terms: tuple[str, ...]) -> None:
    reports = reports_of(d, dv, terms)
    assert {"_fwd_kernel", "_bwd_kernel", "_dq_convert_kernel", "_dbias_ordered_kernel"} <= reports.keys()
    for report in reports.values():
        # C7519: matmuls of the scores one after the other, as when they grow on top of the bias
        assert not report.warnings, str(report)
        assert report.shared <= SHARED_MEMORY, str(report)
        assert report.spills <= ALLOWED_SPILLS.get(report.kernel, 0), str(report)
