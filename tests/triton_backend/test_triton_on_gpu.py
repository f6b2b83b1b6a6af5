"""What the Triton kernels write in PTX, where it runs: the softcap in every range of its arguments."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from backlight.backends.triton import softcap
from backlight.backends.triton.primitives import Variant

N = 8192


@triton.jit
def _softcap_kernel(
    x_ptr, s_ptr, slope_ptr, factor, gain, addend, V: tl.constexpr, SLOPE: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    lanes = tl.arange(0, N)
    s, slope = softcap.softcapped(tl.load(x_ptr + lanes), factor, gain, addend, V, SLOPE)
    tl.store(s_ptr + lanes, s)
    tl.store(slope_ptr + lanes, slope)


# the short series alone, the long one, special functions, all of them in one warp
REACHES = {"near": 0.21, "middle": 0.59, "far": 12.0}


@pytest.mark.gpu
@pytest.mark.skipif(torch.version.hip is not None, reason="PTX")
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("slope", ["none", "apart", "within"])
@pytest.mark.parametrize("factor", [1e-12, 0.01, -3.0])
def test_softcap_on_a_gpu(factor: float, slope: str, paired: bool, reach: float) -> None:
    variant = Variant(**dict.fromkeys(Variant._fields, False) | {"NVIDIA": True, "PAIRED": paired})
    generator = torch.Generator("cuda").manual_seed(0)
    x = (torch.rand(N, device="cuda", generator=generator) * 2 - 1) * reach / max(abs(factor), 1e-3)
    x[:4] = torch.tensor([0.0, -0.0, 1e-20, -1e-6])
    s, steep = torch.empty_like(x), torch.ones_like(x)
    _softcap_kernel[(1,)](x, s, steep, factor, 20.0, 0.0, V=variant, SLOPE=slope, N=N, num_warps=4)
    truth = torch.tanh(x.double() * torch.tensor(factor).double())
    slopes = 1 - truth**2
    if slope == "within":
        # of a slope of 1e-4 and less, 1 - tanh^2 keeps few digits
        clear = slopes > 1e-4
        tolerance = 1e-4 + 20.0 * 4e-7 * truth.abs() + 1e-6 / slopes
        assert ((s.double() - 20.0 * truth - slopes.log2()).abs() <= tolerance)[clear].all()
        assert (s[~clear] < 20.0).all()
        return
    assert ((s.double() - 20.0 * truth).abs() <= 20.0 * (4e-7 * truth.abs() + 1e-30)).all()
    if slope == "apart":
        assert ((steep.double() - slopes).abs() <= (2.1e-4 if paired else 3e-6)).all()
