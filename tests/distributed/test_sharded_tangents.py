"""Tangents of sharded calls are those of the whole (eq. 54), by dual numbers, torch.func and `attention_jvp`; refused twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp, linearize

import backlight
from backlight.call import Call
from backlight.distributed import simulated_attention
from backlight.distributed.context import ContextParallel
from backlight.distributed.layout import assemble
from backlight.distributed.merge import Dual, merge_tangent_
from backlight.distributed.simulation import Simulated, simulate
from backlight.spec import SEQUENCE_OF
from cases import BF16, BY_NAME, FP32, FP64, SINGLES, TOGETHER, Case, case_id
from running import leaves, options

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
MASKED = [BY_NAME[name] for name in ("mask,everything,sq<sk", "mask,pos,varlen,tau", "mask,pos,causal")]
PAIRS = [BY_NAME[name] for name in ("pair,everything,sq>sk", "pair,batch+rows", "pair,hidden,sink")]


def along(inputs: dict[str, Tensor], seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.shape, dtype=FP64, generator=generator).to(x.dtype) for name, x in inputs.items()}


def borders(call: Call) -> dict[str, Tensor | None]:
    return {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k} if call.varlen else {}


def pushed(attend: Callable[..., object], inputs: dict[str, Tensor], tangents: dict[str, Tensor]) -> tuple[object, object]:
    """Values and tangents of a call by keywords."""
    names = list(inputs)
    return jvp(lambda *x: attend(**dict(zip(names, x, strict=True))), tuple(inputs.values()), tuple(tangents.values()))


def compare(case: Case, **how: object) -> None:
    call = case.make(FP64).call
    inputs = leaves(call, requires_grad=False)
    tangents, keywords = along(inputs), options(call) | borders(call) | {"return_lse": True}
    whole = backlight.attention_varlen if call.varlen else backlight.attention
    found = pushed(partial(simulated_attention, **keywords, **how), inputs, tangents)
    torch.testing.assert_close(found, pushed(partial(whole, **keywords), inputs, tangents), **CLOSE)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER, *MASKED], ids=case_id)
def test_ring(case: Case, world: int) -> None:
    compare(case, world=world, layout="zigzag" if world == 2 else "contiguous", strategy="ring")


@pytest.mark.parametrize("case", [*SINGLES[:3], *TOGETHER, *MASKED, *PAIRS], ids=case_id)
def test_all_to_all(case: Case) -> None:
    compare(case, world=2, strategy="all_to_all")


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_any_subset(strategy: str) -> None:
    """Tangents of one input at a time; a row's weights move with the keys of other ranks too."""
    call = BY_NAME["everything,batched,sq<sk"].make(FP64).call
    inputs, keywords = leaves(call, requires_grad=False), options(call) | {"return_lse": True}
    for name, t in along(inputs).items():
        rest = {other: x for other, x in inputs.items() if other != name}
        how = {"world": 2, "strategy": strategy}
        found = pushed(partial(simulated_attention, **rest, **keywords, **how), {name: inputs[name]}, {name: t})
        wanted = pushed(partial(backlight.attention, **rest, **keywords), {name: inputs[name]}, {name: t})
        torch.testing.assert_close(found, wanted, **CLOSE, msg=lambda text, name=name: f"t{name}: {text}")


@pytest.mark.parametrize("name", ["causal,s=200", "everything,s=200"])
def test_no_less_precise_than_one_rank(name: str) -> None:
    """bf16, four ranks: partial results are merged before they are rounded."""
    call, exact = BY_NAME[name].make(BF16).call, BY_NAME[name].make(BF16).call
    inputs = leaves(call, requires_grad=False)
    tangents, keywords = along(inputs), options(call)
    wide, wide_tangents = ({n: x.double() for n, x in each.items()} for each in (leaves(exact, requires_grad=False), tangents))
    _, wanted = pushed(partial(backlight.attention, **keywords), wide, wide_tangents)
    attends = partial(backlight.attention, **keywords), partial(simulated_attention, **keywords, world=4, strategy="ring")
    one, four = (float((pushed(f, inputs, tangents)[1].double() - wanted).square().mean().sqrt()) for f in attends)
    assert four <= 1.2 * one


# --- a rank's own call -------------------------------------------------------------------------------------------------------


def sharded_jvp(call: Call, strategy: str, rank: Simulated) -> tuple[Tensor, ...]:
    """(y, lse, ty, tlse) of a rank, from its shards of inputs and tangents."""
    context = ContextParallel(rank, strategy=strategy)
    whole = leaves(call, requires_grad=False)
    both = whole | {f"t{name}": t for name, t in along(whole).items()}
    own = {n: context.shard(x, 2) if n.removeprefix("t") in SEQUENCE_OF or n in SEQUENCE_OF else x for n, x in both.items()}
    (y, lse), (ty, tlse) = backlight.attention_jvp(**own, **options(call), return_lse=True, context=context)
    return y, lse, ty, tlse


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
@pytest.mark.parametrize("name", ["causal+gqa", "everything,batched,sq<sk"])
def test_attention_jvp(name: str, strategy: str) -> None:
    call = BY_NAME[name].make(FP64).call
    parts = zip(*simulate(2, partial(sharded_jvp, call, strategy)), strict=True)
    y, lse, ty, tlse = (assemble(list(each), 2, "zigzag") for each in parts)
    inputs = leaves(call, requires_grad=False)
    tangents = {f"t{each}": t for each, t in along(inputs).items()}
    wanted = backlight.attention_jvp(**inputs, **tangents, **options(call), return_lse=True)
    torch.testing.assert_close(((y, lse), (ty, tlse)), wanted, **CLOSE)


def test_a_tangent_that_only_one_rank_has() -> None:
    """It is zero on the other, whose rows move with the keys that come by."""
    q, k, tk = (torch.randn(1, 2, 8, 4, dtype=FP64) for _ in range(3))

    def attend(rank: Simulated) -> Tensor:
        context = ContextParallel(rank, layout="contiguous", strategy="ring")
        own = (context.shard(x, 2) for x in (q, k, k))
        return backlight.attention_jvp(*own, tk=context.shard(tk, 2) if rank.rank == 0 else None, context=context)[1]

    moved = torch.cat([tk[:, :, :4], torch.zeros_like(tk[:, :, 4:])], dim=2)
    torch.testing.assert_close(torch.cat(simulate(2, attend), dim=2), backlight.attention_jvp(q, k, k, tk=moved)[1])


def test_what_is_wrong_is_said_on_every_rank() -> None:
    q = torch.randn(1, 2, 8, 4)

    def attend(rank: Simulated) -> str:
        context = ContextParallel(rank)
        own = context.shard(q, 2)
        with pytest.raises(ValueError, match="tq must have the shape of q" if rank.rank else "rank 1 refused the call"):
            backlight.attention_jvp(own, own, own, own[..., : 4 - rank.rank], context=context)
        return "told"

    assert simulate(2, attend) == ["told", "told"]


# --- derivatives of tangents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_beside_a_detached_tangent_the_backward_is_the_ordinary_one(strategy: str) -> None:
    call = BY_NAME["everything,batched,sq<sk"].make(FP32).call
    tangents = along(leaves(call, requires_grad=False))

    def gradients(attend: Callable[..., Tensor]) -> list[Tensor]:
        inputs = leaves(call)
        y, ty = pushed(partial(attend, **options(call)), inputs, tangents)
        return list(torch.autograd.grad((y - (y + ty).detach()).square().sum(), list(inputs.values())))

    for got, want in zip(
        gradients(partial(simulated_attention, strategy=strategy)), gradients(backlight.attention), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_refusals(strategy: str) -> None:
    x, k = torch.randn(1, 2, 8, 4, dtype=FP64, requires_grad=True), torch.randn(1, 2, 8, 4, dtype=FP64)

    def attend(q: Tensor) -> Tensor:
        return simulated_attention(q, k, k, strategy=strategy)

    for tangent in (torch.ones_like(x), x.detach().clone().requires_grad_()):
        ty = jvp(attend, (x,), (tangent,))[1]
        with pytest.raises(
            NotImplementedError, match="has no second derivative under context parallel: gradients and tangents"
        ):
            ty.sum().backward()
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(attend(forward_ad.make_dual(x, tangent))).tangent
        torch.testing.assert_close(dual, ty)
        with pytest.raises(NotImplementedError, match="has no second derivative under context parallel"):
            dual.sum().backward()
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative by linearize under context parallel"):
        linearize(attend, x.detach())
    with pytest.raises(NotImplementedError, match=r"has no torch\.func\.vmap under context parallel"):
        jacfwd(attend)(x.detach())
    with pytest.raises(NotImplementedError, match="forward-mode derivative of a forward-mode derivative"):
        jvp(lambda x: jvp(attend, (x,), (torch.ones_like(x),))[1], (x.detach(),), (torch.ones_like(x),))


def test_parts_in_any_order() -> None:
    """Eq. 54 is associative; a part without keys changes nothing."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=FP64, generator=generator)
    parts = [Dual(draw(1, 1, 3, 2), draw(1, 1, 3), draw(1, 1, 3, 2), draw(1, 1, 3)) for _ in range(3)]
    nothing = Dual(*(torch.zeros_like(x) for x in (parts[0].o, parts[0].lse, parts[0].to, parts[0].tlse)))
    nothing.lse.fill_(-torch.inf)

    def merged(*order: Dual) -> list[Tensor]:
        whole = Dual(*(getattr(nothing, name).clone() for name in ("o", "lse", "to", "tlse")))
        for part in order:
            merge_tangent_(whole, part)
        return [whole.o, whole.lse, whole.to, whole.tlse]

    a, b, c = parts
    torch.testing.assert_close(merged(a, b, c), merged(c, nothing, a, b))
    assert not any(bool(x.isnan().any()) for x in merged(nothing, nothing))
