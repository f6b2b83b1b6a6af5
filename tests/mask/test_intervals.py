"""The geometry of row intervals (eq. 61-65) against dense masks: the fold, counts, and classes of tiles."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.spec import AttentionSpec

end = st.integers(-4, 16)
reach = st.none() | st.integers(0, 9)


@st.composite
def intervals_of_keys(draw, keys: int) -> Tensor:
    width = draw(st.sampled_from([2, 4]))
    return torch.tensor([[draw(end) for _ in range(keys)] for _ in range(width)], dtype=torch.int32).reshape(width, keys)


@st.composite
def calls(draw, with_pos: bool = False, with_spec: bool = True, batch: int = 2, heads: int = 2) -> Call:
    """Calls without columns: batched, or packed with segments of any lengths."""
    packed = draw(st.booleans())
    lengths = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=3))
    sq, sk = (sum(n) for n in zip(*lengths, strict=True)) if packed else lengths[0]
    b = 1 if packed else batch
    own_batch, own_heads = draw(st.sampled_from([1, b])), draw(st.sampled_from([1, heads]))
    width = draw(st.sampled_from([2, 4]))
    numbers = draw(st.lists(end, min_size=own_batch * own_heads * width * sk, max_size=own_batch * own_heads * width * sk))
    rows = torch.tensor(numbers, dtype=torch.int32).reshape(own_batch, own_heads, width, sk)
    pos = None
    if with_pos:
        places = draw(st.lists(end, min_size=own_batch * sq, max_size=own_batch * sq))
        pos = torch.tensor(places, dtype=torch.int32).reshape(own_batch, sq)
    spec = AttentionSpec(rows=True, pos=with_pos)
    if with_spec:
        spec = spec.replace(causal=draw(st.booleans()), window=(draw(reach), draw(reach)))
    cu = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in zip(*lengths, strict=True)]
    q, k = torch.empty(b, heads, sq, 0), torch.empty(b, heads, sk, 0)
    return Call(
        spec, q, k, k, rows=rows, pos=pos, **(dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=True)) if packed else {})
    )


def by_hand(call: Call) -> Tensor:
    """Dense visibility from the words of the contract, entry by entry."""
    b, h, sq, _ = call.q.shape
    sk = call.k.shape[2]
    found = torch.zeros(b, h, sq, sk, dtype=torch.bool)
    for z in call.segments():
        for head, i, j in itertools.product(range(h), range(z.q0, z.q1), range(z.k0, z.k1)):
            rows = call.rows[z.batch % call.rows.shape[0], head % call.rows.shape[1], :, j].tolist()
            at = i if call.pos is None else int(call.pos[z.batch % call.pos.shape[0], i])
            distance = (i - z.q0) + (z.sk - z.sq) - (j - z.k0)
            near = (call.spec.left is None or distance <= call.spec.left) and (
                call.spec.right is None or distance >= -call.spec.right
            )
            inside = any(rows[n] <= at < rows[n + 1] for n in range(0, len(rows), 2))
            found[z.batch, head, i, j] = near and inside
    return found


@given(st.booleans().flatmap(lambda pos: calls(with_pos=pos)))
def test_dense_visibility(call: Call) -> None:
    assert torch.equal(intervals.visible_whole(call).expand(call.q.shape[0], call.q.shape[1], -1, -1), by_hand(call))


@given(intervals_of_keys(4))
def test_disjoint(rows: Tensor) -> None:
    """Eq. 61: the same rows; sorted, apart by at least one row, empty ones last and all alike."""
    found = intervals.disjoint(rows)
    positions = torch.arange(-6, 20)
    assert torch.equal(intervals.seen(found, positions), intervals.seen(rows, positions))
    first, ends = intervals.pairs(found)
    empty = first >= ends
    assert bool((first[empty] == intervals.NOWHERE[0]).all())
    assert bool((ends[empty] == intervals.NOWHERE[1]).all())
    if first.shape[0] == 2:
        assert bool((empty[1] | (~empty[0] & (ends[0] < first[1]))).all())


@given(calls())
def test_fold(call: Call) -> None:
    """Eq. 62: what is folded says everything by itself, inside the rows of q."""
    found = intervals.folded(call)
    sq = call.q.shape[2]
    dense = intervals.seen(found, torch.arange(sq)).expand(call.q.shape[0], call.q.shape[1], -1, -1)
    assert torch.equal(dense, by_hand(call))
    first, ends = intervals.pairs(found)
    empty = first >= ends
    assert bool((first[empty] == sq).all())
    assert bool((ends[empty] == 0).all())
    assert bool(((first >= 0) & (ends <= sq)).all())


@given(st.booleans().flatmap(lambda pos: calls(with_pos=pos, with_spec=not pos)))
def test_counts(call: Call) -> None:
    """Eq. 63, read at positions where there are some."""
    assert torch.equal(intervals.visible_counts(call).expand(call.q.shape[:3]), by_hand(call).sum(dim=-1).int())


@given(calls(), st.integers(1, 5), st.integers(1, 5))
def test_classes_of_tiles(call: Call, bm: int, bn: int) -> None:
    """Eq. 64: what is called empty is, what is called full is, and a full tile of one run is called so."""
    rows, sq, sk = intervals.folded(call), call.q.shape[2], call.k.shape[2]
    extremes = intervals.extremes(rows, bn)
    dense = intervals.seen(rows, torch.arange(sq))
    for i0 in range(0, sq, bm):
        i1 = min(i0 + bm, sq)
        empty, full = intervals.classes(extremes, i0, i1)
        for tile in range(extremes.shape[-1]):
            part = dense[..., i0:i1, tile * bn : (tile + 1) * bn].flatten(2)
            whole = (tile + 1) * bn <= sk
            assert not bool((empty[..., tile] & part.any(dim=-1)).any())
            assert not bool((full[..., tile] & ~part.all(dim=-1)).any())
            if whole and rows.shape[2] == 2:
                assert torch.equal(full[..., tile], part.all(dim=-1))


def test_extremes_of_int32_are_no_special_rows() -> None:
    least, most = -(2**31), 2**31 - 1
    rows = torch.tensor([[least, most, 0, least], [most, least, most, least]], dtype=torch.int32)
    wanted = [True, False, True, False]
    for found in (intervals.disjoint(rows), intervals.fold_rows(rows, AttentionSpec(), 4, 4)):
        assert intervals.seen(found, torch.arange(4)).all(dim=0).tolist() == wanted
    assert intervals.shifted(rows, 5).tolist()[0] == [least, most - 5, -5, least]


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_waits_for_a_device(packed: bool) -> None:
    """Tensors without values have none to wait for."""
    cu = torch.zeros(3, dtype=torch.int32, device="meta") if packed else None
    q, rows = torch.empty(1, 2, 6, 4, device="meta"), torch.zeros(1, 2, 4, 6, dtype=torch.int32, device="meta")
    call = Call(AttentionSpec(causal=True, rows=True), q, q, q, rows=rows, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert intervals.folded(call).shape == rows.shape
    assert intervals.visible_counts(call).shape == (1, 2, 6)
    assert intervals.extremes(intervals.folded(call), 4).shape == (1, 2, 2, 4, 2)
