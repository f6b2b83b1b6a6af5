"""`attention_jvp` of every case against forward mode through the dense stages, in float64; rounding against plain PyTorch's."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from dense import dense, learned
from torch import Tensor
from torch.func import jvp

import backlight
from backlight.backends.tiled.forward import forward
from backlight.backends.tiled.tangent import tangent
from backlight.call import Call
from backlight.config import Config, override
from backlight.doctor.steps.compare import RHO_PASS
from backlight.spec import SEQUENCE_OF
from cases import BF16, BY_NAME, CASES, FP32, FP64, SINGLES, TAU, TOGETHER, Case, case_id, small
from running import canonical, leaves, options, packed

pytestmark = pytest.mark.clean_memory


def finite(case: Case) -> bool:
    """The dense stages have no tangent at an infinite sink."""
    return not (isinstance(case.sink, tuple) and any(abs(x) == float("inf") for x in case.sink))


CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SMALL = [small(case) for case in CASES if finite(case) and case.entmax is None]
# alpha has its tangent in all of them, a number's too
SMALL_ENTMAX = [small(case) for case in CASES if finite(case) and case.entmax is not None and "1.5+" not in case.name]
PAIRS = tuple(BY_NAME[name] for name in ("pair,everything,sq>sk", "pair,batch+rows", "pair,hidden,own,gqa"))
OTHERS = tuple(BY_NAME[name] for name in ("mask,pos,two runs,tau", "rows without keys,everything"))
# small, as the truth about them takes long
ENTMAX = tuple(
    small(BY_NAME[name])
    for name in (
        "entmax",
        "entmax,2.0",
        "entmax+gqa",
        "entmax,everything,batched",
        "entmax,everything,sq>sk",
        "entmax,rows without keys,sink",
        "entmax,varlen",
        "entmax,mask,pos",
        "entmax,pair,own",
        "entmax,pair,hidden",
    )
)
# several tiles a row, and rows that meet their first key in the second
TILES, SMALL_TILES = Config(block_m=16, block_n=8, edge=4, heads=2), Config(block_m=3, block_n=2, edge=1, heads=3)
SEVERAL = (*SINGLES, *TOGETHER, *TAU, *PAIRS, *OTHERS, *ENTMAX)


def tiles_of(case: Case) -> Config:
    return TILES if case.entmax is None else SMALL_TILES


def tangents_of(inputs: dict[str, Tensor], seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(x.shape, dtype=FP64, generator=generator).to(x.dtype) for name, x in inputs.items()}


def truth(call: Call, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """y, lse, ty, tlse of tangents by name; rows that see nothing have none."""
    inputs = learned(call)
    along = [tangents.get(name, torch.zeros_like(x)) for name, x in inputs.items()]
    (y, lse), (ty, tlse) = jvp(
        lambda *xs: dense(call, dict(zip(inputs, xs, strict=True))), tuple(inputs.values()), tuple(along)
    )
    return y, lse, ty, tlse.masked_fill(lse == -torch.inf, 0)


def run(call: Call, tangents: dict[str, Tensor], **changes: object) -> tuple[Tensor, ...]:
    """The same of the public call, in canonical layout."""
    inputs = leaves(call, requires_grad=False)
    given = {f"t{name}": packed(t) if call.varlen and name in SEQUENCE_OF else t for name, t in tangents.items()}
    keywords = options(call) | {"return_lse": True} | changes
    if call.varlen:
        borders = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
        given = dict.fromkeys(("tq", "tk", "tv")) | given
        (y, lse), (ty, tlse) = backlight.attention_varlen_jvp(**inputs, **given, **borders, **keywords)
    else:
        (y, lse), (ty, tlse) = backlight.attention_jvp(**inputs, **given, **keywords)
    first, second = canonical(call, {"y": y, "lse": lse}), canonical(call, {"y": ty, "lse": tlse})
    return first["y"], first["lse"], second["y"], second["lse"]


def assert_all_close(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for name, got, want in zip(("y", "lse", "ty", "tlse"), found, wanted, strict=True):
        torch.testing.assert_close(got, want, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_every_case(case: Case) -> None:
    call = case.make(FP64).call
    tangents = tangents_of(learned(call))
    assert_all_close(run(call, tangents), truth(call, tangents))


@pytest.mark.parametrize("case", SMALL_ENTMAX, ids=case_id)
def test_every_case_of_entmax(case: Case) -> None:
    test_every_case(case)


@pytest.mark.parametrize("case", SEVERAL, ids=case_id)
def test_several_tiles(case: Case) -> None:
    """From nothing, and where y, lse and u are known."""
    call = case.make(FP64).call
    tangents = tangents_of(learned(call))
    wanted = truth(call, tangents)
    with override("tiled", tiles_of(case)):
        assert_all_close(run(call, tangents), wanted)
        known = tangent(call, tangents, forward(call, True)[:3], save_u=True)
        fresh = tangent(call, tangents, None, save_u=True)
    assert_all_close((known.y, known.lse, known.ty, known.tlse), wanted)
    for name in ("u", "tu") if call.tau is not None else ("u",) if call.entmax is not None else ():
        torch.testing.assert_close(getattr(known, name), getattr(fresh, name), **CLOSE)


SUBSETS = ("everything,batched,sq<sk", "everything,sq>sk", "softcap+sink", "mask,pos,causal", "pair,everything,sq<sk")
SUBSETS = (*SUBSETS, "entmax,sink", "entmax,pair,own")


@pytest.mark.parametrize("name", SUBSETS)
def test_any_subset(name: str) -> None:
    """Tangents are linear in tangents."""
    call = small(BY_NAME[name]).make(FP64).call
    tangents = tangents_of(learned(call))
    names, along_one = list(tangents), {each: truth(call, {each: t}) for each, t in tangents.items()}
    y, lse, *_ = along_one["q"]
    known = forward(call, True)[:3]
    for subset in ([], *[[each] for each in names], *[[each for each in names if each != other] for other in names]):
        given = {each: tangents[each] for each in subset}
        moved = [sum((along_one[each][i] for each in subset), torch.zeros_like(x)) for i, x in ((2, y), (3, lse))]
        for config in (nullcontext(), override("tiled", Config(block_m=3, block_n=2, edge=1))):
            with config:
                assert_all_close(run(call, given), (y, lse, *moved))
                found = tangent(call, given, known, save_u=True)
                assert_all_close((found.y, found.lse, found.ty, found.tlse), (y, lse, *moved))


EITHER = ("causal+gqa", "everything,batched,sq<sk", "everything,sq>sk", "mask,pos,two runs,tau", "pair,everything,sq<sk")
EITHER = (*EITHER, "entmax,everything,batched", "entmax,sink", "entmax,pair,own")


@pytest.mark.parametrize("name", EITHER)
def test_either_direction_by_the_other(name: str) -> None:
    """I14: cotangents against tangents, and gradients against tangents, are one number."""
    problem = BY_NAME[name].make(FP64)
    call = problem.call
    inputs = leaves(call)
    tangents = tangents_of(learned(call))
    _, _, ty, tlse = run(call, tangents)
    from running import run as backward

    dlse = torch.randn_like(tlse) if problem.dlse is None else problem.dlse
    grads = backward(replace(problem, dlse=dlse))
    left = (problem.dy * ty).sum() + (dlse * tlse).sum()
    right = sum((grads[f"d{each}"] * tangents[each]).sum() for each in inputs)
    torch.testing.assert_close(left, right, **CLOSE)


def test_a_scaling_that_changes_no_score() -> None:
    """I15: q grows as k shrinks; and a common tangent of all logits and the sink moves lse alone."""
    call = BY_NAME["causal+sink"].make(FP64).call
    _, _, ty, tlse = run(call, {"q": call.q, "k": -call.k})
    torch.testing.assert_close((ty, tlse), (torch.zeros_like(ty), torch.zeros_like(tlse)), **CLOSE)
    call = compose_table()
    _, _, ty, tlse = run(call, {"bias": torch.full_like(call.bias, 0.7), "sink": torch.full_like(call.sink, 0.7)})
    torch.testing.assert_close((ty, tlse), (torch.zeros_like(ty), torch.full_like(tlse, 0.7)), **CLOSE)


def compose_table() -> Call:
    case = Case("table", causal=True, bias=65, sink=True)
    return case.make(FP64).call


@pytest.mark.parametrize("terms", [{"tau": (-0.7, 0.4)}, {"entmax": (1.5, 1.25)}], ids=["tau", "entmax"])
@pytest.mark.parametrize("sink", [float("inf"), -float("inf")])
def test_infinite_sinks(sink: float, terms: dict[str, tuple[float, ...]]) -> None:
    """All there is, or as good as absent."""
    case = Case("sink", causal=True, sq=20, sk=9, gate=True, **terms)
    call = case.make(FP64).call
    tangents = tangents_of(learned(call))
    given = tangents | {"sink": torch.full((2,), 0.3, dtype=FP64)}
    y, _, ty, tlse = run(replace_sink(call, sink), given)
    if sink > 0:
        assert y.isfinite().all()
        assert ty.isfinite().all()
        torch.testing.assert_close(tlse, torch.full_like(tlse, 0.3))
    else:
        torch.testing.assert_close((ty, tlse), run(call, tangents)[2:])


def replace_sink(call: Call, sink: float) -> Call:
    spec = call.spec.replace(sink=True)
    return replace(call, spec=spec, sink=torch.full((call.q.shape[1],), sink, dtype=FP64))


# --- rounding ----------------------------------------------------------------------------------------------------------------


def error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square."""
    return float((found.double() - wanted).square().mean().sqrt())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=case_id)
@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER, *TAU, *PAIRS[:2], BY_NAME["entmax+sink"]], ids=case_id)
def test_rounding(case: Case, dtype: torch.dtype) -> None:
    """No worse than forward mode of plain PyTorch in the same dtype, by the factor of the numeric gate."""
    call = case.make(dtype).call
    tangents = tangents_of(learned(call))
    exact = replace(call, **{name: x.double() for name, x in learned(call).items()})
    wanted = truth(exact, {name: t.double() for name, t in tangents.items()})
    eager = truth(replace(call, **{name: x.to(dtype) for name, x in learned(call).items()}), along(tangents, dtype))
    with override("tiled", TILES):
        found = run(call, tangents)
    seen = wanted[1] > -torch.inf
    for name, got, want, plain in zip(("ty", "tlse"), found[2:], wanted[2:], eager[2:], strict=True):
        floor = torch.finfo(got.dtype).eps * float(want.abs().max() if want.numel() else 0)
        here = seen[..., None].expand_as(want) if name == "ty" else seen
        if bool(here.any()):
            limit = RHO_PASS * max(error(plain[here], want[here]), floor)
            assert error(got[here], want[here]) <= limit, name


def along(tangents: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) for name, t in tangents.items()}


def test_a_common_part_of_the_scores_tangent_is_taken_out() -> None:
    """Keys with a common component give ts of a row a common part, in fp32 a thousand times the rest: nu removes it."""
    call = Case("common", d=16, sq=64, sk=64).make(FP32).call
    tangents = {"q": torch.zeros_like(call.q), "k": torch.randn_like(call.k) + 1000.0}
    exact = replace(call, **{name: x.double() for name, x in learned(call).items()})
    wanted = truth(exact, {name: t.double() for name, t in tangents.items()})
    with override("tiled", TILES):
        ty = run(call, tangents)[2]
    scores = float((call.q.double() @ tangents["k"].double().mT).abs().max()) * 0.25
    assert error(ty, wanted[2]) <= 1e-7 * scores


# --- entmax ------------------------------------------------------------------------------------------------------------------


def test_a_common_tangent_of_logits_moves_lse_alone_with_entmax() -> None:
    """I15: so does one of all scores and the sink."""
    call = replace(compose_table(), entmax=torch.tensor([1.3, 1.8], dtype=FP64))
    call = replace(call, spec=call.spec.replace(entmax=True))
    _, _, ty, tlse = run(call, {"bias": torch.full_like(call.bias, 0.7), "sink": torch.full_like(call.sink, 0.7)})
    torch.testing.assert_close((ty, tlse), (torch.zeros_like(ty), torch.full_like(tlse, 0.7)), **CLOSE)


def test_alpha_held_within_its_range_does_not_move() -> None:
    """Beyond it y does not depend on alpha, at its ends as in between."""
    x = torch.randn(1, 4, 6, 3, dtype=FP64, generator=torch.Generator().manual_seed(0))
    alpha = torch.tensor([1.0, 1.05, 2.0, 2.5], dtype=FP64)
    along = torch.ones_like(alpha)
    found = backlight.attention_jvp(x, x, x, entmax=alpha, tentmax=along)
    torch.testing.assert_close(found, jvp(lambda alpha: backlight.attention(x, x, x, entmax=alpha), (alpha,), (along,)))
    moves = found[1].abs().amax(dim=(0, 2, 3)) > 0
    assert moves.tolist() == [False, True, True, False]


def test_a_tangent_of_alpha_needs_an_alpha_that_is_learned() -> None:
    x, along = torch.randn(1, 2, 3, 4), torch.ones(2)
    with pytest.raises(TypeError, match=r"tentmax must be None where entmax is a number, got a tangent of 1\.5"):
        backlight.attention_jvp(x, x, x, entmax=1.5, tentmax=along)
    with pytest.raises(TypeError, match="tentmax must be None where entmax is, got a tangent of nothing"):
        backlight.attention_jvp(x, x, x, tentmax=along)
    with pytest.raises(ValueError, match="tentmax must have the shape of entmax"):
        backlight.attention_jvp(x, x, x, entmax=torch.full((2,), 1.5), tentmax=torch.ones(3))


def test_tiles_left_out_by_norms() -> None:
    """A bias that falls with distance: far tiles have no scores formed, and tangents are those of the dense stages."""
    case = Case("far", causal=True, sq=96, sk=96, bias=96, entmax=(1.5, 1.25))
    call = case.make(FP64).call
    call = replace(call, bias=-torch.arange(96, dtype=FP64).expand(2, 96) * 2.0)
    tangents = tangents_of(learned(call))
    with override("tiled", TILES):
        found = run(call, tangents)
    assert_all_close(found, truth(call, tangents))
