"""The kernel for e4m3 on a GPU, against the emulation in PyTorch."""

from __future__ import annotations

import pytest
import torch

from backlight import fp8
from backlight.call import Call
from backlight.fp8 import calls
from backlight.spec import AttentionSpec

pytestmark = pytest.mark.gpu
RUNS = [
    (1, 4, 2, 1000, 1500, 128, {}),
    (2, 2, 2, 512, 512, 128, {"causal": True}),
    (1, 2, 1, 300, 300, 64, {"window": (70, 30)}),
    (1, 2, 1, 213, 150, 64, {"causal": True}),
    (1, 2, 2, 2048, 2048, 64, {}),
    (2, 3, 1, 1, 127, 128, {"causal": True}),
    (1, 4, 2, 1000, 1500, 256, {}),
    (2, 2, 2, 2048, 2048, 256, {"causal": True}),
    (1, 2, 1, 300, 300, 256, {"window": (70, 30)}),
    (1, 2, 1, 213, 150, 256, {"causal": True}),
    (2, 3, 1, 1, 127, 256, {"causal": True}),
]


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_the_emulation(run: tuple[int, int, int, int, int, int, dict[str, object]], dtype: torch.dtype) -> None:
    b, hq, hkv, sq, sk, d, options = run
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, s, d, device="cuda").to(dtype) for h, s in ((hq, sq), (hkv, sk), (hkv, sk)))
    given = fp8.quantize(q, k + 1, v)
    call = Call(AttentionSpec(**options), q, k, v)
    if calls.why_not(call, given):
        pytest.skip(calls.why_not(call, given)[0])
    (y, lse), (y_wanted, lse_wanted) = (calls.forward(call, given, name) for name in ("hopper", "emulated"))
    seen = lse_wanted.isfinite()
    assert torch.equal(seen, lse.isfinite())
    # y in 16 bits, sums in 16 bits, and weights near the middle of two neighbours that went the other way: of these, few rows
    # have more or fewer than their share
    few = max(1.0, (32 / lse.numel()) ** 0.5)
    assert float((y.double() - y_wanted.double()).norm() / y_wanted.double().norm()) < 6e-3 * few
    assert float((lse - lse_wanted)[seen].abs().max()) < 0.03
    assert not y[~seen].any()
