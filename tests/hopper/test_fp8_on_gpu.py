"""The kernel for e4m3 on a GPU, against the emulation in PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backlight import fp8, mask
from backlight.api import call_of
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
    (1, 4, 2, 1000, 1500, 64, {"softcap": 3.0}),
    (1, 4, 2, 1000, 1500, 128, {"softcap": 3.0}),
    (2, 2, 2, 512, 512, 128, {"softcap": 3.0, "causal": True}),
    (1, 2, 1, 300, 300, 128, {"softcap": 3.0, "window": (70, 30)}),
    (1, 4, 2, 1000, 1500, 256, {"softcap": 3.0}),
    (1, 2, 1, 300, 300, 256, {"softcap": 3.0, "window": (70, 30)}),
]
MASKS = {
    "documents": (1100, lambda: mask.documents(lengths=[300, 1, 400, 399]), {"causal": True}),
    "documents,window": (1100, lambda: mask.documents(lengths=[300, 1, 400, 399]), {"window": (200, 50)}),
    "long documents": (4000, lambda: mask.documents(lengths=[1500, 2500]), {"causal": True}),
    "prefix": (1000, lambda: mask.prefix(torch.tensor([500, 70]), 1000), {}),
    "spans": (1000, lambda: mask.spans([20, 400], [290, 777], 1000), {}),
    "tree": (
        850,
        lambda: mask.tree([-1, *range(249), *(249 if n % 200 == 0 else 249 + n for n in range(600))], preorder=True),
        {},
    ),
    "two intervals": (1000, lambda: mask.Mask(holes(1000, 4)), {}),
    "nobody sees anything": (300, lambda: mask.Mask(torch.zeros(1, 1, 2, 300, dtype=torch.int32)), {}),
}


@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_the_emulation(run: tuple[int, int, int, int, int, int, dict[str, object]], dtype: torch.dtype) -> None:
    b, hq, hkv, sq, sk, d, options = run
    torch.manual_seed(0)
    q, k, v = (torch.randn(b, h, s, d, device="cuda").to(dtype) for h, s in ((hq, sq), (hkv, sk), (hkv, sk)))
    call = Call(AttentionSpec(**options), q, k + 1, v)
    compare(call, calls.quantise(call))


@pytest.mark.parametrize("terms", [False, True], ids=["", "terms"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_masks_against_the_emulation(name: str, d: int, terms: bool) -> None:
    length, make, options = MASKS[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, length, d, device="cuda").bfloat16() for h in (4, 2, 2))
    seen = make()
    if terms:
        heads = torch.randn(4, 300, device="cuda")
        options = options | {"bias": heads, "sink": heads[:, 0], "gate": torch.randn_like(q), "softcap": 3.0}
    call = call_of(q, k + 1, v, mask=mask.Mask(seen.rows.cuda()), **options)
    compare(call, calls.quantise(call))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_masks_of_packed_sequences(d: int) -> None:
    """One of them without rows, one without keys."""
    cu_q, cu_k = (torch.tensor(borders, device="cuda") for borders in ([0, 700, 700, 720, 1140], [0, 650, 700, 700, 1230]))
    torch.manual_seed(0)
    q, k, v = (torch.randn(s, h, d, device="cuda").bfloat16() for s, h in ((1140, 4), (1230, 2), (1230, 2)))
    call = call_of(q, k + 1, v, cu_q, cu_k, mask=mask.Mask(holes(1230, 4)[:, :, :2].cuda()), causal=True)
    compare(call, calls.quantise(call))


def holes(length: int, heads: int) -> Tensor:
    """Two intervals for each key, in runs of keys, so that blocks are full and empty too."""
    generator = torch.Generator().manual_seed(length)
    first = torch.randint(-9, length, (1, heads, 2, 1, length), generator=generator)
    size = torch.randint(-length // 5, length, (1, heads, 2, 1, length), generator=generator)
    same = torch.arange(length) // 190 * 190
    return torch.cat([first, first + size], 3)[..., same].reshape(1, heads, 4, length).to(torch.int32)


def compare(call: Call, given: fp8.Quantised) -> None:
    if calls.why_not(call, given):
        pytest.skip(calls.why_not(call, given)[0])
    (y, lse), (y_wanted, lse_wanted) = (calls.forward(call, given, name) for name in ("hopper", "emulated"))
    seen = lse_wanted.isfinite()
    assert torch.equal(seen, lse.isfinite())
    # y in 16 bits, sums in 16 bits, and weights near the middle of two neighbours that went the other way: of these, few rows
    # have more or fewer than their share
    few = max(1.0, (32 / lse.numel()) ** 0.5)
    assert float((y.double() - y_wanted.double()).norm()) <= 6e-3 * few * float(y_wanted.double().norm())
    if seen.any():
        assert float((lse - lse_wanted)[seen].abs().max()) < 0.03
    assert not y[~seen].any()
