"""Masks by row intervals around the call: statistics, explain, layers and their caches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import backlight
import backlight.nn
from backlight import attention, intervals, mask
from backlight.mask import Mask
from backlight.reference import oracle
from cases import FP64, MASKS
from running import packed


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_statistics_count_what_the_mask_leaves() -> None:
    for name in ("mask", "mask+tau", "mask,documents,causal,gqa", "mask,pos,causal", "mask,varlen,one for all"):
        problem = next(case for case in MASKS if case.name == name).make(FP64)
        call = problem.call
        given = {term: getattr(call, term) for term in call.spec.terms if term not in ("rows", "pos")}
        tensors = [packed(x) if call.varlen else x for x in (call.q, call.k, call.v)]
        borders = (call.cu_seqlens_q, call.cu_seqlens_k) if call.varlen else ()
        made = Mask(call.rows, call.pos)
        found = backlight.statistics(
            *tensors, *borders, mask=made, causal=call.spec.causal, softcap=call.spec.softcap, tile=(8, 8), **given
        )
        trace, seen = oracle(call, keep=("m",)), intervals.visible_whole(call).expand(call.q.shape[0], call.q.shape[1], -1, -1)
        torch.testing.assert_close(found.density, trace.m.sum(dim=(0, 2, 3)) / seen.sum(dim=(0, 2, 3)))
        whole, some, count = (torch.zeros(call.q.shape[1]) for _ in range(3))
        for z in call.segments():
            for i in range(z.q0, z.q1, 8):
                for j in range(z.k0, z.k1, 8):
                    part = seen[z.batch, :, i : min(i + 8, z.q1), j : min(j + 8, z.k1)].flatten(1)
                    whole, some, count = whole + part.all(dim=1), some + part.any(dim=1), count + 1
        torch.testing.assert_close(found.full_tiles, (whole / count).double())
        torch.testing.assert_close(found.empty_tiles, (1 - some / count).double())
        torch.testing.assert_close(found.partial_tiles, ((some - whole) / count).double())


def test_explain_says_how_much_is_left_out() -> None:
    q = torch.zeros(1, 2, 512, 8)
    found = backlight.explain(q, q, q, mask=mask.documents(lengths=[256, 256]), causal=True)
    assert found.tiles == (10 / 16, 2 / 16, 4 / 16)
    assert "mask: of tiles of 128 x 128, 62% are empty, 12% full and 25% partial" in str(found)
    assert backlight.explain(q, q, q).tiles is None
    packed_q = q[0].transpose(0, 1)
    cu = torch.tensor([0, 128, 512])
    assert backlight.explain(packed_q, packed_q, packed_q, cu, mask=mask.rows([0] * 512, [512] * 512)).tiles == (0.0, 1.0, 0.0)
    tree = mask.tree([-1, *range(511)])
    assert backlight.explain(q, q, q, mask=tree).tiles == (6 / 16, 6 / 16, 4 / 16)


def test_layers_take_a_mask() -> None:
    layer = backlight.nn.Attention(16, 4, causal=True, rope=None).double()
    x = drawn(2, 9, 16)
    documents = mask.documents(lengths=[4, 5])
    q, k, v = layer.project(x)
    wanted = layer.out(attention(q, k, v, causal=True, mask=documents).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x, mask=documents), wanted)
    with backlight.nn.statistics(layer) as found:
        layer(x, mask=documents)
    torch.testing.assert_close(found[""].empty_tiles, torch.zeros(4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"mask must be a backlight\.mask\.Mask or None"):
        layer(x, mask=documents.dense())


@pytest.mark.parametrize("window", [(None, None), (3, 0)], ids=["all held", "some forgotten"])
def test_a_cache_takes_the_mask_of_all_keys(window: tuple[int | None, int | None]) -> None:
    layer = backlight.nn.Attention(16, 4, causal=True, window=window).double()
    x, documents = drawn(2, 9, 16), mask.documents(lengths=[4, 5])
    wanted = layer(x, mask=documents)
    cache = backlight.nn.KVCache()
    with torch.no_grad():
        for i0, i1 in ((0, 3), (3, 5), (5, 6), (6, 9)):
            now = Mask(documents.rows[..., :i1]).last_rows(i1 - i0)
            torch.testing.assert_close(layer(x[:, i0:i1], cache=cache, mask=now), wanted[:, i0:i1])
        with pytest.raises(ValueError, match="mask must be of the 10 keys that the cache has seen with those of x, got 9"):
            layer(x[:, :1], cache=cache, mask=documents)
    assert cache.length == 9
