"""The founding cases, by name. They are small on purpose: everything about them can be looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import backlight
from backlight.call import Call
from backlight.reference import oracle
from backlight.spec import AttentionSpec
from gate import judge


def identity4x4() -> tuple[Tensor, Tensor, Tensor, float]:
    """4x4, identity-like q and k, simple v, scale 1."""
    eye = torch.eye(4)
    return eye + 0.1, eye - 0.1, torch.arange(16.0).reshape(4, 4) / 16, 1.0


def random128x64() -> tuple[Tensor, Tensor, Tensor, None]:
    """128x64, uniform in [-0.5, 0.5]."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.rand(128, 64, generator=generator) - 0.5 for _ in range(3))
    return q, k, v, None


SEEDS = {"identity4x4": (identity4x4, 1e-3), "random128x64": (random128x64, 5e-3)}


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((value.double() - expected[name]).abs().max()) for name, value in got.items()}


def passes(found: dict[str, float], limit: float) -> bool:
    """NaN fails: a NaN is not <= anything."""
    return all(error <= limit for error in found.values())


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seed", SEEDS)
def test_seed(seed: str, causal: bool) -> None:
    make, limit = SEEDS[seed]
    q, k, v, scale = make()
    q, k, v = (x[None, None].clone().requires_grad_() for x in (q, k, v))
    do = torch.linspace(-1, 1, v.numel()).reshape(v.shape)
    y = backlight.attention(q, k, v, causal=causal, scale=scale)
    dq, dk, dv = torch.autograd.grad(y, (q, k, v), do)
    call = Call(AttentionSpec(causal=causal, scale=scale), q, k, v)
    truth = oracle(call, do)
    got = {"y": y.detach(), "dq": dq, "dk": dk, "dv": dv}
    found = differences(got, truth)
    assert passes(found, limit), found

    poisoned = got | {"dk": dk.clone().index_fill_(2, torch.tensor([3]), torch.nan)}
    assert not passes(differences(poisoned, truth), limit)
    wrong = got | {"dk": 2 * dk}
    assert not passes(differences(wrong, truth), limit)


def test_row_0_of_a_causal_problem_has_no_query_gradient() -> None:
    """It sees one key: p = 1, so ds = p (dp - delta) = 0. A zero here is right, not a lost row."""
    q, k, v, scale = identity4x4()
    q, k, v = (x[None, None].clone().requires_grad_() for x in (q, k, v))
    backlight.attention(q, k, v, causal=True, scale=scale).square().sum().backward()
    assert float(q.grad[0, 0, 0].abs().max()) < 1e-6
    assert float(q.grad[0, 0, 1:].abs().max()) > 1e-3


@pytest.mark.parametrize("backend", [None, "tiled"])
def test_heads(backend: str | None) -> None:
    """H=4, L=8, D=16, a table of 16, `out.sum().backward()`: bias and tau gradients of every head match the oracle.

    The bug behind it: dO was addressed with q's head stride. The sum hands over a dO expanded from one element, and only head 0
    read it; a comparison with one head and a random dO saw nothing.
    """
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 4, 8, 16, generator=generator).requires_grad_() for _ in range(3))
    bias = (0.1 * torch.randn(4, 16, generator=generator)).requires_grad_()
    tau = torch.tensor([-0.8, -0.4, 0.3, -1.2], requires_grad=True)
    y, lse = backlight.attention(q, k, v, causal=True, bias=bias, tau=tau, return_lse=True, backend=backend)
    y.sum().backward()
    call = Call(AttentionSpec(causal=True, bias=True, tau=True), q, k, v, bias, tau=tau)
    ones = torch.ones_like(y)
    truth = oracle(call, ones)
    for h in range(4):
        assert float(truth.dtau[h].abs()) > 1e-2
        torch.testing.assert_close(tau.grad[h].double(), truth.dtau[h], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(bias.grad[h].double(), truth.dbias[h], rtol=1e-4, atol=1e-5)
        assert bool(bias.grad[h, :8].any())
        assert not bias.grad[h, 8:].any()
    grads = {f"d{name}": x.grad for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias), ("tau", tau))}
    result = {"y": y.detach(), "lse": lse.detach()} | grads
    verdict = judge(call, ones, None, result)
    assert verdict.ok, verdict

    only_head_0 = result | {"dbias": bias.grad.clone(), "dtau": tau.grad.clone()}
    only_head_0["dbias"][1:] = 0
    only_head_0["dtau"][1:] = 0
    assert judge(call, ones, None, only_head_0).defective == {"dbias", "dtau"}


@pytest.mark.parametrize("quantity", ["dq", "dk", "dv"])
def test_a_nan_gradient_fails(quantity: str) -> None:
    """A running `max(worst, difference)` skips NaN, so a NaN gradient once counted as a pass."""
    q, k, v, _ = random128x64()
    call = Call(AttentionSpec(causal=True), *(x[None, None] for x in (q, k, v)))
    do = torch.ones_like(call.q)
    truth = oracle(call, do)
    result = {name: truth[name].float() for name in ("y", "lse", "dq", "dk", "dv")}
    assert judge(call, do, None, result).ok
    result[quantity][0, 0, 5, 5] = torch.nan
    assert judge(call, do, None, result).defective == {quantity}
