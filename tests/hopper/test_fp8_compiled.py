"""The kernel for e4m3 compiled for sm_90a: nothing is spilled, wgmma is not serialised, weights stay in their registers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aot import SHARED_MEMORY, compiled

from backlight import fp8
from backlight.backends.hopper.fp8 import host
from backlight.call import Call
from backlight.spec import AttentionSpec


@pytest.mark.parametrize(("d", "causal"), [(128, False), (128, True), (64, True)])
def test_kernel(d: int, causal: bool) -> None:
    q, k, v = (torch.randn(1, heads, 256, d).bfloat16() for heads in (4, 2, 2))
    with compiled(host) as reports:
        host.forward(Call(AttentionSpec(causal=causal), q, k, v), fp8.quantize(q, k, v))
    (report,) = reports
    assert not report.warnings, str(report)
    assert report.spills == 0, str(report)
    assert report.shared <= SHARED_MEMORY, str(report)
    if report.sass:
        # products of e4m3; sums of pairs; a shuffle belongs to a maximum or a sum of rows, none to a weight
        assert report.has("QGMMA")
        assert report.has("HADD2")
        assert sum(n for name, n in report.opcodes.items() if name.startswith("SHFL")) <= 32
