"""The pre-pass into e4m3 in Triton's interpreter, against the same in torch operations."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from backlight import quantising
from backlight.backends.triton import quantise

# an entry near the middle of two neighbours may go the other way: sums come in another order
NEIGHBOURS = 1e-3


def drawn(batch: int, heads: int, rows: int, d: int, seed: int) -> Tensor:
    """[B, H, S, D] that lies in memory as [B, S, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, rows, heads, d, generator=generator).half().transpose(1, 2)


def agree(found: quantising.Quantised, wanted: quantising.Quantised) -> None:
    pairs = [(found, wanted, name) for name in ("q", "q_scale", "offset")]
    pairs += [(found.keys, wanted.keys, name) for name in ("k", "v", "k_scale", "v_scale", "mean")]
    for a, b, name in pairs:
        x, want = (getattr(each, name) for each in (a, b))
        assert (x.shape, x.dtype) == (want.shape, want.dtype), name
        if name in ("offset", "mean"):
            torch.testing.assert_close(x, want, atol=1e-5, rtol=1e-5)
            continue
        other = x.float() != want.float()
        assert float(other.float().mean()) <= NEIGHBOURS, name
        # e4m3 has steps of at most an eighth
        torch.testing.assert_close(x.float(), want.float(), atol=2.0**-9, rtol=0.13)
        if name.endswith("scale"):
            assert not other.any(), name


@pytest.mark.parametrize("centred", [True, False], ids=["centred", "plain"])
@pytest.mark.parametrize(
    ("d", "batch", "heads", "kv_heads", "sq", "sk"), [(64, 2, 4, 2, 200, 300), (128, 1, 2, 1, 130, 257), (256, 1, 1, 1, 1, 128)]
)
def test_as_in_torch(d: int, batch: int, heads: int, kv_heads: int, sq: int, sk: int, centred: bool) -> None:
    q, k, v = drawn(batch, heads, sq, d, 0), drawn(batch, kv_heads, sk, d, 1) + 1, 5 * drawn(batch, kv_heads, sk, d, 2)
    scale = d**-0.5
    found = quantise.quantised(q, k, v, scale, centred, (None, None))
    agree(found, quantising.queries_in_torch(q, quantising.keys_in_torch(k, v, centred, None), scale, None))
    # keys first, queries later: the same bits
    later = quantise.queries_of(q, quantise.keys_of(k, v, centred, None), scale, None)
    for a, b in ((later, found), (later.keys, found.keys)):
        for name in ("q", "q_scale", "offset") if a is later else ("k", "v", "k_scale", "v_scale", "mean"):
            assert torch.equal(getattr(a, name).float(), getattr(b, name).float()), name
    numbers, offset, mean = quantise.rounded(q, k, v, scale, centred, (None, None))
    for x, want in zip(numbers, quantising.dequantized(found), strict=True):
        assert torch.equal(x, want.half())
    assert torch.equal(offset, found.offset)
    assert torch.equal(mean, found.keys.mean)


def test_packed() -> None:
    """Tiles begin where sequences do; between them lie zeros."""
    cu_q, cu_k = torch.tensor([0, 130, 130, 400, 517]), torch.tensor([0, 1, 200, 328, 600])
    q, k, v = drawn(1, 4, 517, 64, 0), drawn(1, 2, 600, 64, 1) + 1, drawn(1, 2, 600, 64, 2)
    tiles = quantising.tiles_of(cu_q, 517), quantising.tiles_of(cu_k, 600)
    assert tiles[0].counts.tolist() == [128, 2, 128, 128, 14, 117, 0, 0]
    assert tiles[0].sources.tolist()[:6] == [0, 128, 130, 258, 386, 400]
    found = quantise.quantised(q, k, v, 0.125, True, tiles)
    agree(found, quantising.queries_in_torch(q, quantising.keys_in_torch(k, v, True, tiles[1]), 0.125, tiles[0]))
    numbers, offset, _ = quantise.rounded(q, k, v, 0.125, True, tiles)
    for x, want in zip(numbers, quantising.dequantized(found), strict=True):
        assert torch.equal(x, want.half())
    assert torch.equal(offset, found.offset)


def test_every_code_is_the_nearest() -> None:
    """All of them, and all middles between them, through v, whose scale is 1 here."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes[:-1] * 0.75 + codes[1:] * 0.25, torch.full((1,), 448.0)])
    v = torch.cat([numbers, -numbers]).half()[None, None, :, None].expand(1, 1, -1, 64)
    k = torch.zeros_like(v)
    found = quantise.keys_of(k, v, True, None)
    assert bool((found.v_scale == 1).all())
    places = quantising.in_order(found.v.float())[0, 0, 0, : v.shape[2]]
    assert torch.equal(places, v[0, 0, :, 0].float().to(torch.float8_e4m3fn).float())


def test_the_way_back() -> None:
    x = drawn(2, 3, 150, 64, 0)
    wanted = x.float() @ quantising.rotation(64, x.device).T
    torch.testing.assert_close(quantise.turned_back(x).float(), wanted, atol=4e-3, rtol=1e-3)
