"""Masks where calls are drawn, cut, examined and sharded: problems, peers, the doctor's subjects, context parallel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import backlight
from backlight import intervals, mask
from backlight.distributed import simulated_attention
from backlight.doctor import diagnose
from backlight.doctor.subject.case import Case as Examined
from backlight.doctor.subject.subject import Subject
from backlight.mask import Mask
from backlight.peers import eager, flex
from backlight.problems import inputs
from backlight.problems.axes import cut_call, tensors_of
from backlight.reference import oracle
from backlight.spec import AttentionSpec
from cases import FP32, FP64, MASKS, Case, case_id

BY_NAME = {case.name: case for case in MASKS}


# --- peers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mask+sink", "mask,everything,sq<sk", "mask,everything,batched,sq>sk"])
def test_plain_pytorch_is_an_oracle_for_the_oracle(name: str) -> None:
    problem = BY_NAME[name].make(FP64)
    leaves = {each: x.detach().clone().requires_grad_() for each, x in tensors_of(problem.call).items()}
    y = eager.attention(problem.call)(**leaves)
    found = torch.autograd.grad(y, list(leaves.values()), problem.dy)
    trace = oracle(problem.call, problem.dy)
    for one, other in ((y, trace.y), *((g, trace[f"d{each}"]) for each, g in zip(leaves, found, strict=True))):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["mask,two runs", "mask,per head", "mask,pos,causal", "mask,one for all", "mask+varlen"])
def test_flex_sees_the_same(name: str) -> None:
    from torch.nn.attention.flex_attention import create_mask

    call = BY_NAME[name].make(FP32).call
    borders = None if call.cu_seqlens_q is None else tuple(call.cu_seqlens_q.tolist())
    (b, h, sq, _), sk = call.q.shape, call.k.shape[2]
    visible = flex.mask_function(flex.Pairs(call.spec, sq, sk, borders, call.q.device, call.rows, call.pos))
    assert visible is not None
    assert torch.equal(create_mask(visible, b, h, sq, sk, device="cpu"), intervals.visible_whole(call).expand(b, h, -1, -1))


# --- problems ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in MASKS if not case.varlen and case.sq > 20 and case.sk > 20], ids=case_id)
def test_a_part_of_a_call_sees_what_it_saw(case: Case) -> None:
    call = case.make(FP32).call
    ranges = {"batch": slice(0, 1), "heads": slice(1, 2), "rows": slice(5, 19), "keys": slice(3, 17)}
    part = cut_call(call, ranges, spec=call.spec.replace(causal=False, window=(None, None)))
    whole = intervals.visible_whole(cut_call(call, {}, spec=part.spec)).expand(call.q.shape[0], call.q.shape[1], -1, -1)
    assert torch.equal(intervals.visible_whole(part), whole[:1, 1:2, 5:19, 3:17])


def test_a_mask_changes_no_other_number() -> None:
    """The same seed, with a mask and without."""
    with_mask, without = (Case("drawn", mask=kind, sink=True, dlse=True).make(FP32, seed=3) for kind in ("two runs", None))
    for name, x in tensors_of(without.call).items():
        assert torch.equal(x, getattr(with_mask.call, name)), name
    assert torch.equal(with_mask.dy, without.dy)
    spec = AttentionSpec(causal=True)
    drawn, plain = inputs.make(spec.replace(rows=True), (1, 2, 20, 8)), inputs.make(spec, (1, 2, 20, 8))
    assert torch.equal(drawn.call.q, plain.call.q)
    assert drawn.call.rows.shape == (1, 2, 4, 20)


# --- the doctor --------------------------------------------------------------------------------------------------------------

SPEC = AttentionSpec(causal=True, rows=True)
SHAPE = (2, 2, 40, 16)


def with_mask(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Mask) -> Tensor:
    assert isinstance(mask, Mask)
    return backlight.attention(q, k, v, causal=causal, mask=mask)


def with_tensors(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, rows: Tensor, pos: Tensor | None = None) -> Tensor:
    return backlight.attention(q, k, v, causal=causal, mask=Mask(rows, pos))


@pytest.mark.parametrize("subject", [with_mask, with_tensors])
def test_a_subject_is_told_the_mask(subject) -> None:
    assert not Subject.of(subject).untold(inputs.make(SPEC, SHAPE).call)
    report = diagnose(subject, SPEC, shape=SHAPE)
    assert report.verdict == "healthy", report.findings


def test_a_subject_without_a_mask_is_found_out() -> None:
    def deaf(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
        return backlight.attention(q, k, v, causal=causal)

    assert Subject.of(deaf).untold(inputs.make(SPEC, SHAPE).call) == ["rows"]
    assert diagnose(deaf, SPEC, shape=SHAPE).verdict == "defect"


def test_a_mask_of_the_callers_own() -> None:
    made = mask.documents(lengths=[15, 25])
    assert diagnose(with_mask, SPEC, mask=made, shape=SHAPE).verdict == "healthy"
    with pytest.raises(ValueError, match="rows was given and would be ignored: the spec says rows=False"):
        diagnose(with_mask, AttentionSpec(), mask=made, shape=SHAPE)
    with pytest.raises(ValueError, match="rows must be int32 of shape 1 or 2 x 1 or 2 x 2 or 4 x 40"):
        diagnose(with_mask, SPEC, mask=mask.documents(lengths=[15]), shape=SHAPE)


def test_captured_masks_are_cut_with_the_case() -> None:
    problem = inputs.make(SPEC, SHAPE)
    tensors = tensors_of(problem.call) | {"rows": problem.call.rows[:, :1]}
    case = Examined.captured(tensors, AttentionSpec(causal=True))
    assert case.spec == SPEC
    smaller = case.replace(shape=(1, 1, 20, 16), kv_heads=1, sk=30).narrowed()
    assert smaller["rows"].shape == (1, 1, 4, 30)


# --- context parallel --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [("ring", "zigzag"), ("ring", "contiguous"), ("all_to_all", "zigzag")], ids=str)
@pytest.mark.parametrize(
    "make", [lambda: mask.documents(lengths=[13, 4, 20]), lambda: mask.tree([-1, *range(20), 4, *range(21, 36)])]
)
def test_shards_see_what_the_whole_sees(make, how: tuple[str, str]) -> None:
    strategy, layout = how
    q, k, v = (torch.randn(2, 4, 37, 8, dtype=torch.float64) for _ in range(3))
    found = simulated_attention(q, k, v, mask=make(), world=2, strategy=strategy, layout=layout)
    torch.testing.assert_close(found, backlight.attention(q, k, v, mask=make()))


def test_a_context_shards_a_mask() -> None:
    from backlight.distributed.context import ContextParallel
    from backlight.distributed.simulation import simulate

    made = mask.tree([-1, *range(10)])

    def shard(rank) -> Mask:
        return ContextParallel(rank, "contiguous").shard_mask(made)

    found = simulate(2, shard)
    assert torch.equal(torch.cat([each.rows for each in found], dim=3), made.rows)
    assert torch.equal(torch.cat([each.pos for each in found], dim=1), made.pos)
    with pytest.raises(TypeError, match=r"whole must be a backlight\.mask\.Mask, got 3"):
        simulate(1, lambda rank: ContextParallel(rank).shard_mask(3))
