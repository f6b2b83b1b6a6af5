"""Second derivatives beside a pair bias in Triton's interpreter, against the tiled backend in float64 of the same inputs."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from dense import dense, learned
from twice import cotangents_of, judge, small_tiles, tangents_of

import backlight
from backlight import registry
from backlight.backends.triton import dpair
from cases import FP32, Case, case_id

OWN, SHARED, BY_KEY = ("batch", "heads", "rows"), ("heads", "rows"), ("heads",)
PACKED = {"lengths_q": (10, 0, 1, 17), "lengths_k": (20, 9, 12, 18), "hq": 2, "hkv": 1}
EVERYTHING = {"causal": True, "softcap": 1.5, "bias": 24, "bias_origin": 3, "sink": True, "gate": True}


def one(name: str, pair_bias: tuple[str, ...], **options: object) -> Case:
    """Two tiles each way, the second of them not full."""
    return Case(name, pair_bias=pair_bias, **({"b": 1, "hq": 1, "hkv": 1, "sq": 19, "sk": 27} | options))  # type: ignore[arg-type]


CASES = (
    one("own,gqa", OWN, b=2, hq=2),
    one("own,hidden,causal,sq>sk", (*OWN, "hidden"), sq=29, sk=19, causal=True),
    one("own,everything,strided", (*OWN, "strided"), hq=2, **EVERYTHING),
    one("own,packed", (*OWN, "hidden"), **PACKED, causal=True),
    one("shared,triangle", ("pairs", "heads", "rows"), b=4, hq=2, hkv=2),
    one("shared,gqa,window", SHARED, b=2, hq=2, window=(9, 4)),
    one("shared,all,everything", ("rows", "hidden"), b=2, hq=2, **EVERYTHING),
    one("shared,mask", ("rows",), b=2, mask="two runs"),
    one("shared,packed", SHARED, **PACKED, sink=True),
    one("shared,packed,everything", ("pairs", "rows"), **PACKED, **EVERYTHING),
    one("by key", BY_KEY, b=2, hq=2, hkv=2),
    one("by key,everything", ("batch", "hidden"), b=2, hq=2, **EVERYTHING),
    one("by key,mask,pos", (), hq=2, mask="run", pos=True),
    one("by key,packed", BY_KEY, **PACKED, window=(9, 4)),
    one("sk=0", SHARED, sq=5, sk=0, sink=True),
    one("sq=0", ("rows",), b=2, sq=0, sk=5),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_form(case: Case) -> None:
    call = case.make(FP32).call
    with small_tiles():
        judge(call, tangents_of(call), cotangents_of(call), 1e-5)


FORMS = (one("own", OWN, **EVERYTHING), one("shared", ("rows",), b=2, **EVERYTHING), one("by key", BY_KEY, **EVERYTHING))


@pytest.mark.parametrize("given", [("pair_bias",), ("q",), ("v",), ("bias", "sink")], ids=",".join)
@pytest.mark.parametrize("case", FORMS, ids=case_id)
def test_some_tangents(case: Case, given: tuple[str, ...]) -> None:
    call = case.make(FP32).call
    tangents = tangents_of(call)
    with small_tiles():
        judge(call, {name: tangents[name] for name in given}, cotangents_of(call), 1e-5)


@pytest.mark.parametrize("names", [("dy",), ("dty",), ("dtlse",), ("dlse", "dty")], ids=",".join)
@pytest.mark.parametrize("case", FORMS, ids=case_id)
def test_any_gradients_that_came_in(case: Case, names: tuple[str, ...]) -> None:
    call = case.make(FP32).call
    cotangents = cotangents_of(call)
    with small_tiles():
        judge(call, tangents_of(call), {name: cotangents[name] for name in names}, 1e-5)


@pytest.mark.parametrize("case", FORMS, ids=case_id)
def test_the_gradient_of_the_bias_alone(case: Case) -> None:
    call = case.make(FP32).call
    tangents, incoming = tangents_of(call), tuple(cotangents_of(call).values())
    triton = registry.get("triton")
    with small_tiles():
        results = triton.tangent(call, tangents, None)
        found = triton.second(call, tangents, results, incoming, frozenset({"dpair_bias"}))
        both = triton.second(call, tangents, results, incoming, frozenset({"dq", "dk", "dpair_bias"}))
    assert list(found) == ["dpair_bias"]
    assert torch.equal(found["dpair_bias"], both["dpair_bias"])


@pytest.mark.parametrize("programs", [1, 1000])
def test_members_in_groups(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Few tiles: several programs share one, and their sums are added up."""
    monkeypatch.setattr(dpair, "PROGRAMS", programs)
    monkeypatch.setattr(dpair, "FEWEST_MEMBERS", 1)
    call = one("groups", ("rows",), b=3, hq=2).make(FP32).call
    with small_tiles():
        judge(call, tangents_of(call), cotangents_of(call), 1e-5)


@pytest.mark.parametrize("d", [32, 64, 192])
def test_tiles_of_the_heuristic(d: int) -> None:
    call = one("tiles", ("rows",), b=2, sq=70, sk=130, d=d, causal=True).make(torch.float16).call
    judge(call, tangents_of(call), cotangents_of(call), 6e-3)


@pytest.mark.parametrize("pairs", [(2, 1, 2, 4, 5), (1, 1, 1, 4, 5), (2, 3, 2, 4, 5), (2, 3, 2, 1, 5)], ids=str)
def test_the_public_double_backward_of_triangle_attention(pairs: tuple[int, ...]) -> None:
    """Gradients of gradients by everything, q of five axes; the oracle in float64 is differentiated twice."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, 3, 2, 4, 16), (2, 3, 2, 5, 16), (2, 3, 2, 5, 16), pairs]
    drawn = [torch.randn(shape, generator=generator) for shape in (*shapes, shapes[0], *shapes)]
    inputs, hats = drawn[:5], drawn[5:]

    def twice(run: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [x.to(dtype).requires_grad_() for x in inputs]
        grads = torch.autograd.grad(run(*given[:4]), given[:4], given[4], create_graph=True)
        return torch.autograd.grad(grads, given, [hat.to(dtype) for hat in hats])

    def oracle(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT / 4 + b, -1) @ v

    with small_tiles():
        found = twice(lambda q, k, v, b: backlight.attention(q, k, v, pair_bias=b, backend="triton"), FP32)
    for got, want in zip(found, twice(oracle, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


def test_a_loss_on_the_tangent_against_the_oracle() -> None:
    call = one("public", ("heads", "rows"), b=2, hq=2, hkv=1, sq=10, sk=13, causal=True).make(FP32).call
    given, along = learned(call), tangents_of(call)
    cotangents = cotangents_of(call)

    def loss_of(run: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (*given.values(), *along.values())]
        y, ty = run(leaves[:4], leaves[4:])
        loss = (y * cotangents["dy"].to(dtype)).sum() + (ty * cotangents["dty"].to(dtype)).sum()
        return torch.autograd.grad(loss, leaves)

    def ours(x: list[Tensor], t: list[Tensor]) -> tuple[Tensor, Tensor]:
        return backlight.attention_jvp(*x[:3], *t[:3], pair_bias=x[3], tpair_bias=t[3], causal=True, backend="triton")

    def oracle(x: list[Tensor], t: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.func.jvp(lambda *x: dense(call, dict(zip(given, x, strict=True)))[0], tuple(x), tuple(t))

    with small_tiles():
        found = loss_of(ours, FP32)
    for got, want in zip(found, loss_of(oracle, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)
