"""Numbers at the end of their range mean what the limit means: a window beyond every key, a sink of +inf or -inf."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

import backlight
from backlight.call import Call
from backlight.reference import oracle
from backlight.spec import BEYOND, AttentionSpec

SQ, SK = 12, 7
BIG = (BEYOND, 2**31 - 1, 2**31, 2**32, 2**40 + 3, sys.maxsize, 2**63, 2**80)


def tensors(sq: int = SQ, sk: int = SK) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(1, 2, n, 8, requires_grad=True) for name, n in (("q", sq), ("k", sk), ("v", sk))}


@pytest.mark.parametrize("big", BIG)
def test_a_side_beyond_every_key_is_unbounded(big: int) -> None:
    unbounded = AttentionSpec(window=(None, 3))
    for spec, wanted in (
        (AttentionSpec(window=(big, 3)), unbounded),
        (AttentionSpec(window=(2, big)), AttentionSpec(window=(2, None))),
        (AttentionSpec(window=(big, big)), AttentionSpec()),
        (AttentionSpec(window=(big, big), causal=True), AttentionSpec(causal=True)),
    ):
        for sq, sk in ((SQ, SK), (SK, SQ)):
            assert torch.equal(spec.visible_counts(sq, sk), wanted.visible_counts(sq, sk))
            assert torch.equal(spec.allowed(sq, sk), wanted.allowed(sq, sk))
    assert AttentionSpec(window=(BEYOND - 1, 3)).window == (BEYOND - 1, 3)


@pytest.mark.parametrize("big", BIG)
@pytest.mark.parametrize("observed", [False, True])
def test_the_call_with_such_a_window(big: int, observed: bool) -> None:
    tau = torch.tensor([-0.5, 0.3])

    def run(window: tuple[int | None, int | None]) -> list[Tensor]:
        x = tensors()
        # under a profiler a call goes through the operator, whose numbers have 64 bits
        with torch.profiler.profile() if observed else torch.enable_grad():
            y = backlight.attention(**x, window=window, tau=tau, backend="tiled")
        return [y, *torch.autograd.grad(y.sum(), tuple(x.values()))]

    assert all(map(torch.equal, run((big, big)), run((None, None))))
    assert all(map(torch.equal, run((big, 1)), run((None, 1))))


@pytest.mark.parametrize("big", [*BIG, *(-x for x in BIG)])
def test_a_table_beyond_every_distance_is_never_met(big: int) -> None:
    x, bias = tensors(), torch.randn(2, 5, requires_grad=True)
    y = backlight.attention(**x, bias=bias, bias_origin=big, backend="tiled")
    assert torch.equal(y, backlight.attention(**x, backend="tiled"))
    (dbias,) = torch.autograd.grad(y.sum(), bias)
    assert torch.equal(dbias, torch.zeros_like(bias))


@pytest.mark.parametrize("entmax", [None, 1.5], ids=["softmax", "entmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("softcap", [1e-300, 1e-45, 1e-40, 3e38, 1e39, 1e100, sys.float_info.max])
def test_a_softcap_that_fp32_does_not_hold(softcap: float, dtype: torch.dtype, entmax: float | None) -> None:
    """Beyond every score it is none, below every score all scores are level: it was NaN, with entmax 0 and an lse of inf."""
    x = {name: t.detach().to(dtype).requires_grad_() for name, t in tensors().items()}

    def run(softcap: float | None, scale: float | None) -> list[Tensor]:
        y, lse = backlight.attention(
            **x, softcap=softcap, scale=scale, entmax=entmax, causal=True, return_lse=True, backend="tiled"
        )
        return [y, lse, *torch.autograd.grad(y.square().sum(), tuple(x.values()))]

    for got, wanted in zip(run(softcap, None), run(None, None if softcap > 1 else 0.0), strict=True):
        torch.testing.assert_close(got, wanted)


HIDING = {
    "causal": {"causal": True},
    "window": {"window": (1, 0)},
    "elastic": {"causal": True, "tau": torch.tensor([-0.3, 0.2])},
    "sink": {"causal": True, "sink": torch.tensor([0.5, -0.5])},
    "softcap": {"causal": True, "softcap": 5.0},
    "bias": {"window": (2, 1), "bias": torch.zeros(2, 3)},
    "max logit": {"causal": True, "return_max_logit": True},
}


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("how", HIDING)
def test_a_hidden_key_may_be_anything(how: str, value: float) -> None:
    """A score that is not a number stayed one where a mask hides it: rows that do not see the key were NaN."""
    x, keywords = {name: t.detach() for name, t in tensors(SK, SK).items()}, {"return_max_logit": False} | HIDING[how]
    with_max = keywords.pop("return_max_logit")
    spec = AttentionSpec(causal=keywords.get("causal", False), window=keywords.get("window", (None, None)))
    sees = spec.allowed(SK, SK)[:, 4]
    clean = backlight.attention(**x, **keywords, return_lse=True, backend="tiled")
    x["k"][0, :, 4] = value * x["q"][0, :, 5].sign()
    found = backlight.attention(**x, **keywords, return_lse=True, return_max_logit=with_max, backend="tiled")
    for got, wanted in zip(found, clean, strict=False):
        assert torch.equal(got[:, :, ~sees], wanted[:, :, ~sees])
    assert not found[1][:, :, 5].isfinite().any() or how == "softcap"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sk", [1, 6, 17, 40])
def test_queries_that_are_no_numbers_give_none(sk: int, causal: bool) -> None:
    """torch's kernel takes a few scores that are not numbers for a row that sees nothing: y and lse were 0."""
    q, k, v = torch.randn(2, 4, sk, 8), torch.randn(2, 2, sk, 8), torch.randn(2, 2, sk, 8)
    k[1, 1, 0], v[0] = 0, 0
    q[0, 1, sk - 1, 3] = math.nan
    q[1, 2, 0] = math.nan
    y, lse = backlight.attention(q, k, v, causal=causal, return_lse=True, backend="aten")
    spoilt = q.isnan().any(dim=-1)
    assert torch.equal(lse.isnan(), spoilt)
    assert torch.equal(y.isnan(), spoilt[..., None].expand_as(y))


@pytest.mark.parametrize("tau", [None, (0.4, -0.7)], ids=["softmax", "elastic"])
def test_a_sink_of_plus_infinity_takes_everything(tau: tuple[float, float] | None) -> None:
    """p = 0, p0 = 1 and lse = +inf: o is 0 but for what tau adds, and only dlse reaches the sink (eq. 9 to 12, 23)."""
    x, sink = tensors(), torch.tensor([math.inf, math.inf], requires_grad=True)
    elastic = {} if tau is None else {"tau": torch.tensor(tau)}
    y, lse = backlight.attention(**x, sink=sink, causal=True, return_lse=True, **elastic)
    assert (lse == math.inf).all()
    counts = AttentionSpec(causal=True).visible_counts(SQ, SK)
    if tau is None:
        assert (y == 0).all()
    else:
        # tau * mean over visible values where tau > 0, nothing survives where it is negative
        means = torch.stack([x["v"][0, 0, : max(n, 1)].mean(0) * (n > 0) for n in counts.tolist()])
        torch.testing.assert_close(y[0, 0], 0.4 * means)
        assert (y[0, 1] == 0).all()
    dlse = torch.randn(lse.shape)
    dq, dk, _, dsink = torch.autograd.grad((y, lse), (*x.values(), sink), (torch.randn(y.shape), dlse))
    assert (dq == 0).all()
    assert (dk == 0).all()
    torch.testing.assert_close(dsink, dlse.sum(dim=(0, 2)))


def test_a_sink_of_minus_infinity_is_none() -> None:
    """Also in rows that see nothing: their lse is -inf again, and dlse is ignored."""
    x, sink = tensors(), torch.full((2,), -math.inf, requires_grad=True)
    y, lse = backlight.attention(**x, sink=sink, causal=True, return_lse=True)
    plain, plain_lse = backlight.attention(**x, causal=True, return_lse=True)
    assert torch.equal(y, plain)
    assert torch.equal(lse, plain_lse)
    assert (lse == -math.inf).any()
    incoming = torch.randn(y.shape), torch.randn(lse.shape)
    *grads, dsink = torch.autograd.grad((y, lse), (*x.values(), sink), incoming)
    assert all(map(torch.equal, grads, torch.autograd.grad((plain, plain_lse), tuple(x.values()), incoming)))
    assert torch.equal(dsink, torch.zeros(2))


def test_the_oracle_knows_both() -> None:
    x = {name: value.detach().double() for name, value in tensors().items()}
    sink = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    call = Call(AttentionSpec(causal=True, sink=True), *x.values(), sink=sink)
    dy, dlse = torch.randn(1, 2, SQ, 8).double(), torch.randn(1, 2, SQ).double()
    trace = oracle(call, dy, dlse)
    assert not any(value.isnan().any() for value in trace.values())
    assert (trace.p_sink[0, 0] == 1).all()
    assert (trace.p_sink[0, 1] == 0).all()
    torch.testing.assert_close(trace.dsink, torch.stack([dlse[0, 0].sum(), dlse.new_zeros(())]))
    plain = oracle(Call(AttentionSpec(causal=True), *(value[:, 1:] for value in x.values())), dy[:, 1:], dlse[:, 1:])
    assert torch.equal(trace.dq[:, 1:], plain.dq)
