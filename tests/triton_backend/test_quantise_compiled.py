"""The pre-pass into e4m3 compiled for sm_90a: nothing is spilled, codes are made by the hardware, the turn is a matmul."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "hopper"))

from aot import SHARED_MEMORY, compiled

from backlight.backends.triton import quantise


@pytest.mark.parametrize("d", [64, 128, 256])
def test_kernels(d: int) -> None:
    q, k, v = (torch.randn(1, heads, 256, d).bfloat16() for heads in (4, 2, 2))
    with compiled(quantise) as reports:
        quantise.quantised(q, k, v, d**-0.5, True, (None, None))
        quantise.rounded(q, k, v, d**-0.5, True, (None, None))
        quantise.turned_back(q)
    assert len(reports) == 7
    for report in reports:
        assert report.spills == 0, str(report)
        assert report.shared <= SHARED_MEMORY, str(report)
        if report.kernel in ("_quantise_kernel", "_turn_back_kernel") and report.sass:
            assert report.has("HGMMA"), str(report)
    codes = [report for report in reports if report.kernel == "_quantise_kernel"]
    assert all("e4m3x2.f32" in report.ptx for report in codes)
