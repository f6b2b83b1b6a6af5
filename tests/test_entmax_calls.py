"""Entmax around the call: what transforms it, shards it or differentiates it takes it, or refuses in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backlight
from backlight import differentiating
from backlight.api import call_of
from backlight.distributed import simulated_attention
from backlight.operators import pack, unpack
from backlight.registry import get

F64 = torch.float64


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(3, 1, 2, 8, 4, dtype=F64))


def test_a_number_is_told_to_kernels_and_crosses_operators() -> None:
    q, k, v = inputs()
    call = call_of(q, k, v, entmax=1.5)
    assert call.spec.alpha == 1.5
    assert call.entmax is not None
    assert call.entmax.tolist() == [1.5, 1.5]
    assert unpack(pack(call, None))[0].spec == call.spec
    assert call_of(q, k, v, entmax=torch.full((2,), 1.5)).spec.alpha is None
    assert call_of(q, k, v, entmax=1).spec == backlight.AttentionSpec()
    with pytest.raises(TypeError, match="alpha is no keyword of a call: entmax takes it"):
        backlight.explain(q, k, v, alpha=1.5)
    assert call_of(q, k, v, entmax=2).layout != call_of(q, k, v, entmax=1.5).layout


def test_five_axes_and_packed_heads() -> None:
    q, k, v = inputs()
    wanted = backlight.attention(q, k, v, entmax=1.3)
    assert torch.equal(backlight.attention(q[None], k[None], v[None], entmax=1.3)[0], wanted)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    y = backlight.attention_varlen(*packed, torch.tensor([0, 8]), entmax=1.3)
    assert torch.allclose(y.transpose(0, 1)[None], wanted, atol=1e-13)


def test_vmap_over_alpha() -> None:
    q, k, v = inputs()
    alphas = torch.tensor([[1.2, 1.5], [2.0, 1.7]], dtype=F64)
    found = torch.func.vmap(lambda a: backlight.attention(q, k, v, entmax=a))(alphas)
    for y, alpha in zip(found, alphas, strict=True):
        assert torch.allclose(y, backlight.attention(q, k, v, entmax=alpha), atol=1e-13)


def test_functional_gradients() -> None:
    q, k, v = inputs()
    alphas = torch.tensor([1.2, 1.6], dtype=F64)
    found = torch.func.grad(lambda a: backlight.attention(q, k, v, entmax=a).square().sum())(alphas)
    learned = alphas.clone().requires_grad_()
    backlight.attention(q, k, v, entmax=learned).square().sum().backward()
    assert torch.allclose(found, learned.grad, atol=1e-12)


def test_checkpoints_and_operators_agree() -> None:
    """Operators keep u as the direct path does."""
    q, k, v = (x.requires_grad_() for x in inputs())
    with torch.autograd.graph.save_on_cpu():
        y = backlight.attention(q, k, v, causal=True, entmax=1.5)
    (dq,) = torch.autograd.grad(y.square().sum(), q)
    z = torch.utils.checkpoint.checkpoint(
        lambda q: backlight.attention(q, k, v, causal=True, entmax=1.5), q, use_reentrant=False
    )
    assert torch.equal(torch.autograd.grad(z.square().sum(), q)[0], dq)


def test_derivatives_of_a_call_that_names_another_backend_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name a call takes `tiled`, whatever ran the forward: tests/derivatives has the values."""
    q, k, v = inputs()
    for name in ("triton", "hopper"):
        monkeypatch.setattr(type(get(name)), "available", lambda self: ())
        monkeypatch.setattr(type(get(name)), "why_not", lambda self, call: ())
        with pytest.raises(backlight.Unsupported, match=f"{name}: has no forward-mode derivative with entmax"):
            backlight.attention_jvp(q, k, v, q, entmax=1.5, backend=name)
        call = call_of(q, k, v, entmax=1.5)
        with pytest.raises(backlight.Unsupported, match=f"{name}: has no second derivative with entmax"):
            differentiating.choose("second", call, name)
        for what in ("tangent", "second"):
            assert differentiating.choose(what, call, None).name == "tiled"


def test_tangents_of_a_ring_refuse() -> None:
    """The tangent of a threshold that ranks find together; where heads are traded every rank has whole rows."""
    q, k, v = inputs()
    alphas = torch.tensor([1.3, 1.8], dtype=F64)

    def moved(attend: Any, **how: Any) -> Any:
        def of(q: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
            return attend(q, k, v, causal=True, entmax=alphas, return_lse=True, **how)

        return torch.func.jvp(of, (q, alphas), (k, torch.ones_like(alphas)))

    wanted = moved(backlight.attention)
    torch.testing.assert_close(moved(simulated_attention, world=2, strategy="all_to_all"), wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(backlight.Unsupported, match="tiled: has no forward-mode derivative with"):
        moved(simulated_attention, world=2, strategy="ring")


@pytest.mark.parametrize("strategy", ["all_to_all", "ring"])
def test_context_parallel(strategy: str) -> None:
    """Heads are traded, or thresholds are found over the keys of all ranks: tests/distributed/test_ring_entmax.py."""
    q, k, v = inputs()
    alphas = torch.tensor([1.3, 1.8], dtype=F64)
    wanted = backlight.attention(q, k, v, causal=True, entmax=alphas)
    found = simulated_attention(q, k, v, causal=True, entmax=alphas, world=2, strategy=strategy)
    assert torch.allclose(found, wanted, atol=1e-12)


def test_hopper_is_chosen_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.bfloat16() for x in inputs())
    hopper = get("hopper")
    monkeypatch.setattr(type(hopper), "available", lambda self: ())
    reasons = hopper.why_not(call_of(q, k, v, entmax=1.5))
    learned = hopper.why_not(call_of(q, k, v, entmax=torch.full((q.shape[1],), 1.5)))
    assert not any("entmax" in reason for reason in reasons)
    assert any("learned" in reason for reason in learned)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"entmax": torch.tensor([1.5, 1.5])}, "an alpha that is learned"),
        ({"entmax": 1.75}, "an alpha of 1.75"),
        ({"entmax": 1.5, "bias": torch.zeros(2, 3)}, "entmax together with bias"),
    ],
)
def test_what_hopper_says_to_others(options: dict[str, Any], words: str) -> None:
    q, k, v = (x.bfloat16() for x in inputs())
    assert any(words in reason for reason in get("hopper").why_not(call_of(q, k, v, **options)))


def test_compiled_in_one_graph() -> None:
    q, k, v = (x.float().requires_grad_() for x in inputs())
    alphas = torch.tensor([1.3, 1.8], requires_grad=True)

    def loss(q: torch.Tensor, alphas: torch.Tensor) -> torch.Tensor:
        return (backlight.attention(q, k, v, entmax=alphas) + backlight.attention(q, k, v, entmax=1.5)).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    wanted = torch.autograd.grad(loss(q, alphas), (q, alphas))
    for found, want in zip(torch.autograd.grad(compiled(q, alphas), (q, alphas)), wanted, strict=True):
        assert torch.allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("where", ["q", "k", "entmax", "sink", "bias"])
def test_what_is_not_a_number_stays_one(where: str) -> None:
    """A NaN lay above no threshold, weighed nothing, and y was 0 as if all were well."""
    given = {"q": torch.randn(1, 2, 3, 4), "k": torch.randn(1, 2, 3, 4), "sink": torch.zeros(2), "bias": torch.zeros(2, 1)}
    given |= {"v": torch.randn(1, 2, 3, 4), "entmax": torch.full((2,), 1.5)}
    given[where].select({"q": 1, "k": 1}.get(where, 0), 0).fill_(torch.nan)
    y = backlight.attention(**given, backend="tiled")
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("causal", [False, True])
def test_one_key_that_is_not_a_number_or_endless(causal: bool, value: float, alpha: float) -> None:
    """Beside finite keys, and with no other row or head that kept its tile, y was 0 as if nothing were seen."""
    q, k, v = torch.randn(1, 1, 6, 4).abs(), torch.randn(1, 1, 6, 4), torch.randn(1, 1, 6, 4)
    k[0, 0, 3] = value
    y, lse = backlight.attention(q, k, v, entmax=alpha, causal=causal, backend="tiled", return_lse=True)
    seeing = torch.arange(6) >= (3 if causal else 0)
    assert torch.equal(y[0, 0].isnan(), seeing[:, None].expand(6, 4))
    assert torch.equal(~lse[0, 0].isfinite(), seeing)
