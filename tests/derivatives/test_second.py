"""Backward through the tangent and double backward, of every case, against torch's own derivatives of the dense stages."""

from __future__ import annotations

import itertools

import pytest
import torch
from dense import dense, learned
from test_tangent import CLOSE, ENTMAX, PAIRS, SMALL_ENTMAX, TILES, error, finite, tangents_of, tiles_of
from torch import Tensor
from torch.func import jvp

import backlight
from backlight.backends.tiled.second import Cotangents, second
from backlight.backends.tiled.tangent import tangent
from backlight.call import Call
from backlight.config import Config, override
from backlight.spec import SEQUENCE_OF
from cases import BY_NAME, CASES, FP32, FP64, SINGLES, TOGETHER, Case, case_id, small
from running import forward, leaves, packed

pytestmark = pytest.mark.clean_memory

SMALL = [small(case) for case in CASES if finite(case) and case.entmax is None]
NAMES = ("dy", "dlse", "dty", "dtlse")


def cotangents_of(call: Call, seed: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (*call.q.shape[:3], call.v.shape[-1])
    shapes = dict(zip(NAMES, (shape, shape[:3], shape, shape[:3]), strict=True))
    return {name: torch.randn(size, dtype=FP64, generator=generator) for name, size in shapes.items()}


def truth(call: Call, tangents: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by inputs (dq, ...) and by tangents (dtq, ...)."""
    inputs = {name: x.clone().requires_grad_() for name, x in learned(call).items()}
    along = {name: tangents.get(name, torch.zeros_like(x)).clone().requires_grad_() for name, x in inputs.items()}
    results = jvp(lambda *xs: dense(call, dict(zip(inputs, xs, strict=True))), tuple(inputs.values()), tuple(along.values()))
    (y, lse), (ty, tlse) = results
    seen = lse.detach() > -torch.inf
    loss = torch.zeros((), dtype=FP64)
    for name, x in zip(NAMES, (y, lse, ty, tlse), strict=True):
        if name in cotangents:
            weight = cotangents[name]
            loss = loss + ((x * weight).sum() if x.dim() == 4 else (x[seen] * weight[seen]).sum())
    leaf = [*inputs.values(), *along.values()]
    names = [*(f"d{name}" for name in inputs), *(f"dt{name}" for name in along)]
    grads = torch.autograd.grad(loss, leaf, allow_unused=True) if loss.requires_grad else [None] * len(leaf)
    return {name: torch.zeros_like(x) if g is None else g for name, x, g in zip(names, leaf, grads, strict=True)}


def ours(call: Call, tangents: dict[str, Tensor], cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    needs = frozenset([*(f"d{name}" for name in learned(call)), *(f"dt{name}" for name in tangents)])
    incoming = Cotangents(*(cotangents.get(name) for name in NAMES))
    return second(call, tangents, tangent(call, tangents, None, save_u=True), incoming, needs)


def assert_all_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, got in found.items():
        torch.testing.assert_close(got, wanted[name], **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_every_case(case: Case) -> None:
    call = case.make(FP64).call
    tangents, cotangents = tangents_of(learned(call)), cotangents_of(call)
    found = ours(call, tangents, cotangents)
    assert len(found) == 2 * len(tangents)
    assert_all_close(found, truth(call, tangents, cotangents))


@pytest.mark.parametrize("case", SMALL_ENTMAX, ids=case_id)
def test_every_case_of_entmax(case: Case) -> None:
    test_every_case(case)


@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER, *PAIRS, BY_NAME["mask,pos,two runs,tau"], *ENTMAX], ids=case_id)
def test_several_tiles(case: Case) -> None:
    call = case.make(FP64).call
    tangents, cotangents = tangents_of(learned(call)), cotangents_of(call)
    with override("tiled", tiles_of(case)):
        found = ours(call, tangents, cotangents)
    assert_all_close(found, truth(call, tangents, cotangents))


SUBSETS = ("everything,batched,sq<sk", "everything,sq>sk", "softcap+sink", "pair,everything,sq<sk", "entmax,everything,batched")


@pytest.mark.parametrize("name", [*SUBSETS, "entmax,sink"])
def test_any_subset(name: str) -> None:
    """Of tangents, of gradients that come in, and of those that are asked for."""
    call = small(BY_NAME[name]).make(FP64).call
    tangents, cotangents = tangents_of(learned(call)), cotangents_of(call)
    given = [{each: tangents[each]} for each in tangents]
    incoming = [{each: cotangents[each] for each in names} for n in range(5) for names in itertools.combinations(NAMES, n)]
    pairs = [*((some, cotangents) for some in given), *((tangents, some) for some in incoming)]
    for along, coming in pairs:
        wanted = truth(call, along, coming)
        assert_all_close(ours(call, along, coming), wanted)
    results = tangent(call, tangents, None, save_u=True)
    wanted = truth(call, tangents, cotangents)
    for gradient in wanted:
        alone = second(call, tangents, results, Cotangents(*cotangents.values()), frozenset({gradient}))
        assert list(alone) == [gradient]
        assert_all_close(alone, wanted)


# --- through the public calls ------------------------------------------------------------------------------------------------

PUBLIC = ("plain", "causal+gqa", "softcap+bias", "everything,batched,sq<sk", "everything,sq>sk", "mask,pos,two runs,tau")
PUBLIC = (*PUBLIC, "pair,everything,sq<sk", "pair,keys", "pair,hidden,sink", "pair,everything,varlen")
PUBLIC = (*PUBLIC, "entmax,everything,sq>sk", "entmax,varlen", "entmax,pair,hidden", "entmax,rows without keys,sink")


def double_backward(function, inputs: dict[str, Tensor], dy: Tensor, dlse: Tensor, hats: dict[str, Tensor]) -> list[Tensor]:
    """Gradients by the inputs, dy and dlse of the first gradients, weighed."""
    inputs = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    dy, dlse = dy.clone().requires_grad_(), dlse.clone().requires_grad_()
    y, lse = function(inputs)
    seen = lse.detach() > -torch.inf
    value = (y * dy).sum() + (lse[seen] * dlse[seen]).sum()
    grads = torch.autograd.grad(value, list(inputs.values()), create_graph=True)
    loss = sum((g * hats[name]).sum() for name, g in zip(inputs, grads, strict=True))
    return list(torch.autograd.grad(loss, [*inputs.values(), dy, dlse]))


@pytest.mark.parametrize("name", PUBLIC)
def test_double_backward(name: str) -> None:
    call = small(BY_NAME[name]).make(FP64).call
    cotangents, hats = cotangents_of(call), tangents_of(learned(call))
    wanted = double_backward(lambda x: dense(call, x), learned(call), cotangents["dy"], cotangents["dlse"], hats)
    dy, dlse = cotangents["dy"], cotangents["dlse"]
    if call.varlen:
        dy, dlse, hats = packed(dy), dlse[0], {k: packed(x) if k in SEQUENCE_OF else x for k, x in hats.items()}
        *grads, ddy, ddlse = wanted
        grads = [packed(x) if k in SEQUENCE_OF else x for k, x in zip(learned(call), grads, strict=True)]
        wanted = [*grads, packed(ddy), ddlse[0]]
    found = double_backward(lambda x: forward(call, x), leaves(call), dy, dlse, hats)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("name", ["everything,batched,sq<sk", "entmax,everything,batched"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_on_both_results(compiled: bool, name: str) -> None:
    """Gradients through `attention_jvp`, by the tangents too; compiled in one graph."""
    call = small(BY_NAME[name]).make(FP64).call
    inputs, along = learned(call), {f"t{name}": t for name, t in tangents_of(learned(call)).items()}
    weights = cotangents_of(call)
    from running import options

    def loss(**given: Tensor) -> Tensor:
        (y, lse), (ty, tlse) = backlight.attention_jvp(**given, **options(call), return_lse=True)
        terms = zip((y, lse, ty, tlse), (weights[name] for name in NAMES), strict=True)
        return sum((torch.where(x > -torch.inf, x, 0) * w).sum() for x, w in terms)

    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    leaf = {name: x.detach().clone().requires_grad_() for name, x in (inputs | along).items()}
    found = torch.autograd.grad(run(**leaf), list(leaf.values()))
    wanted = truth(call, tangents_of(learned(call)), weights)
    for name, got in zip(leaf, found, strict=True):
        torch.testing.assert_close(got, wanted[f"d{name}"], **CLOSE, msg=lambda text, name=name: f"d{name}: {text}")


def test_beside_a_detached_tangent_the_backward_is_the_ordinary_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """MeanFlow and its kin: the tangent enters the target of a loss. No second derivative is computed."""
    from backlight.backends.tiled import TiledBackend

    monkeypatch.setattr(TiledBackend, "second", lambda *_: pytest.fail("a second derivative"))
    call = BY_NAME["everything,batched,sq<sk"].make(FP32).call
    inputs = leaves(call)
    tangents = {f"t{name}": t for name, t in tangents_of(learned(call)).items()}
    from running import options

    y, ty = backlight.attention_jvp(**inputs, **tangents, **options(call))
    found = torch.autograd.grad((y - (y + ty).detach()).square().sum(), list(inputs.values()))
    plain = backlight.attention(**inputs, **options(call))
    wanted = torch.autograd.grad((plain - (plain + ty).detach()).square().sum(), list(inputs.values()))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("terms", [{"tau": (-0.7,)}, {"entmax": (1.5,)}], ids=["tau", "entmax"])
def test_memory_is_linear(terms: dict[str, tuple[float, ...]]) -> None:
    """Long rows with small tiles: nothing of the size of the scores is held."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, tuple) else (found,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return found

    call = Case("long", b=1, hq=1, hkv=1, sq=256, sk=256, d=4, causal=True, gate=True, **terms).make(FP32, margin=0).call
    tangents = tangents_of(learned(call))
    cotangents = {name: x.float() for name, x in cotangents_of(call).items()}
    with override("tiled", Config(block_m=32, block_n=32, edge=32)), Sizes():
        ours(call, tangents, cotangents)
    assert largest <= 256 * 16
    assert error(call.q, call.q.double()) == 0


@pytest.mark.parametrize(
    "name",
    [
        "causal+gqa",
        "softcap+sink",
        "bias+tau",
        "everything,batched,sq<sk",
        "pair,two entries share",
        "entmax+bias",
    ],
)
def test_rounding(name: str) -> None:
    """In fp32 near the truth, by the size of what is summed."""
    problem = BY_NAME[name].make(FP32)
    call = problem.call
    tangents, cotangents = tangents_of(learned(call)), cotangents_of(call)
    exact = BY_NAME[name].make(FP32).call
    for each, x in learned(call).items():
        setattr(exact, each, x.double())
    wanted = truth(exact, {each: t.double() for each, t in tangents.items()}, cotangents)
    with override("tiled", TILES):
        found = ours(call, tangents, {each: x.float() for each, x in cotangents.items()})
    for each, got in found.items():
        scale = float(wanted[each].abs().max())
        assert error(got, wanted[each]) <= 2e-5 * max(scale, 1e-3), each
