"""The kernel for e4m3 in the emulator, against float64 of the same rounded inputs with the same rounding of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import emulator

from backlight import fp8
from backlight.backends.hopper.fp8 import host
from backlight.call import Call
from backlight.intervals import visible_whole
from backlight.spec import AttentionSpec

CASES = {
    "full,150x200": (1, 2, 1, 150, 200, 64, {}),
    "even": (2, 1, 1, 128, 256, 64, {}),
    "causal": (1, 2, 1, 330, 330, 64, {"causal": True}),
    "causal,sq=150,sk=213": (1, 1, 1, 150, 213, 64, {"causal": True}),
    "causal,sq=213,sk=150": (1, 1, 1, 213, 150, 64, {"causal": True}),
    "window": (1, 1, 1, 300, 300, 64, {"window": (70, 30)}),
    "d=128": (1, 1, 1, 140, 300, 128, {"causal": True}),
}


def wanted(given: fp8.Quantised, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double() for x in fp8.dequantized(given))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = given.scale * q @ k.mT / torch.log(torch.tensor(2.0, dtype=torch.float64))
    s = s.masked_fill(~visible_whole(Call(spec, q, k, v)), -torch.inf)
    top = s.amax(-1, keepdim=True).ceil().clamp(min=-1e30)
    p = torch.exp2(s - top + 8).float().to(torch.float8_e4m3fn).double()
    total = p.sum(-1, keepdim=True)
    y = (p @ v / total).nan_to_num(0.0)
    lse = (top + torch.log2(total) - 8)[..., 0] * torch.log(torch.tensor(2.0, dtype=torch.float64)) + given.offset.double()
    return y, lse


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, late: bool) -> None:
    b, hq, hkv, sq, sk, d, options = CASES[name]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(b, h, s, d, generator=generator).half() for h, s in ((hq, sq), (hkv, sk), (hkv, sk)))
    spec = AttentionSpec(**options)
    given = fp8.quantize(q, k + 1, v)
    with emulator.emulated(host, late=late):
        y, lse = host.forward(Call(spec, q, k, v), given)
    y_wanted, lse_wanted = wanted(given, spec)
    seen = lse_wanted.isfinite()
    assert torch.equal(seen, lse.isfinite())
    # a weight near the middle of two neighbours may go either way
    assert float((y.double() - y_wanted).square().mean().sqrt() / y_wanted.square().mean().sqrt()) < 3e-3
    assert float((lse.double() - lse_wanted)[seen].abs().max()) < 1e-3
    assert not y[~seen].any()
