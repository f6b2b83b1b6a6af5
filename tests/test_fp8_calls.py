"""`attention(..., precision="fp8")`: terms, masks and packing as they mean elsewhere; gradients, compilers, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import backlight
from backlight import fp8
from backlight.api import call_of
from backlight.errors import Unsupported
from backlight.fp8 import calls
from backlight.intervals import visible_whole


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


HEADS, KV_HEADS, D = 4, 2, 64


def inputs(sq: int, sk: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = drawn(2, HEADS, sq, D), drawn(2, KV_HEADS, sk, D, seed=1) + 1, drawn(2, KV_HEADS, sk, D, seed=2)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def terms(sq: int, sk: int) -> dict[str, dict[str, Any]]:
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (70, 30)},
        "softcap": {"softcap": 3.0, "causal": True},
        "bias": {"bias": drawn(HEADS, 60, seed=3), "bias_origin": 20},
        "sink": {"sink": 3 * drawn(HEADS, seed=4), "causal": True},
        "gate": {"gate": drawn(2, HEADS, sq, D, seed=5)},
        "pair_bias": {"pair_bias": drawn(2, 1, sq, sk, seed=6)},
        "mask": {"mask": backlight.mask.documents(lengths=[sk // 3, sk - sk // 3])},
        "all": {
            "bias": drawn(HEADS, 60, seed=3),
            "sink": 3 * drawn(HEADS, seed=4),
            "gate": drawn(2, HEADS, sq, D, seed=5),
            "causal": True,
        },
    }


def dense(given: fp8.Quantised, call: Any) -> tuple[Tensor, Tensor]:
    """Eq. 97 and 98 without blocks, in float64, of a call that is not packed."""
    q, k, v = (x.double() for x in fp8.dequantized(given))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    sq, sk = q.shape[2], k.shape[2]
    s = call.scale * q @ k.mT + given.offset.double()[..., None]
    if call.spec.softcap is not None:
        s = call.spec.softcap * torch.tanh(s / call.spec.softcap)
    if call.bias is not None:
        column = call.spec.distance(0, sq, 0, sk, sq, sk) + call.spec.bias_origin
        inside = (column >= 0) & (column < call.bias.shape[1])
        s = s + torch.where(inside, call.bias.double()[:, column.clamp(0, call.bias.shape[1] - 1)], 0.0)
    if call.pair_bias is not None:
        s = s + call.pair_bias.double()
    s = s.masked_fill(~visible_whole(call), -torch.inf) - given.offset.double()[..., None]
    sink = torch.full_like(s[..., :1], -torch.inf)
    if call.sink is not None:
        sink = call.sink.double()[:, None, None] - given.offset.double()[..., None]
    s2, sink2 = s / math.log(2.0), sink / math.log(2.0)
    top = torch.maximum(s2.amax(-1, keepdim=True), sink2).ceil().clamp(min=-1e30)
    p = torch.exp2(s2 - top + 8).float().to(torch.float8_e4m3fn).double()
    total = p.sum(-1, keepdim=True) + torch.exp2(sink2 - top + 8)
    y = (p @ v / total).nan_to_num(0.0)
    if call.gate is not None:
        y = y * torch.sigmoid(call.gate.double())
    return y, (top + torch.log2(total) - 8)[..., 0] * math.log(2.0) + given.offset.double()


@pytest.mark.parametrize("lengths", [(150, 150), (200, 300), (1, 129)], ids=str)
@pytest.mark.parametrize("name", terms(8, 8))
def test_terms_mean_what_they_mean(name: str, lengths: tuple[int, int]) -> None:
    """Against the same rounding without blocks, and against attention without rounding."""
    sq, sk = lengths
    if name == "mask" and sq != sk:
        pytest.skip("documents have as many rows as keys")
    options = terms(sq, sk)[name]
    q, k, v = inputs(sq, sk)
    call = call_of(q, k, v, **options)
    y, lse = backlight.attention(q, k, v, precision="fp8", return_lse=True, **options)
    y_wanted, lse_wanted = dense(calls.quantise(call), call)
    assert relative(y, y_wanted) < 2e-3
    seen = lse_wanted.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert float((lse.double() - lse_wanted)[seen].abs().max()) < 2e-3
    exact, exact_lse = backlight.attention(q, k, v, return_lse=True, **options)
    assert relative(y, exact) < 0.12
    assert float((lse - exact_lse)[seen].square().mean().sqrt()) < 0.05


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": True}], ids=str)
def test_packed_sequences(options: dict[str, Any]) -> None:
    """Each as if it were alone, but for scales of v and the mean of the keys, which all of them share."""
    cu_q, cu_k = torch.tensor([0, 130, 130, 200, 340]), torch.tensor([0, 200, 201, 201, 400])
    q, k, v = drawn(340, HEADS, D), drawn(400, KV_HEADS, D, seed=1) + 1, drawn(400, KV_HEADS, D, seed=2)
    options = {name: drawn(HEADS, seed=4) if name == "sink" else value for name, value in options.items()}
    y, lse = backlight.attention_varlen(q, k, v, cu_q, cu_k, precision="fp8", return_lse=True, **options)
    exact, exact_lse = backlight.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    assert relative(y, exact) < 0.09
    seen = exact_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert float((lse - exact_lse)[seen].abs().max()) < 0.2
    whole = torch.tensor([0, 340]), torch.tensor([0, 400])
    together = backlight.attention_varlen(q, k, v, *whole, precision="fp8", **options)
    apart = backlight.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), precision="fp8", **options)
    assert torch.equal(together.transpose(0, 1)[None], apart)


@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "bias", "sink", "gate", "pair_bias", "mask", "all"])
def test_gradients(name: str) -> None:
    """Of attention at the rounded inputs; direction and size are those of the inputs themselves."""
    sq = sk = 150
    options = terms(sq, sk)[name]
    q, k, v = inputs(sq, sk)
    learned = {"q": q, "k": k, "v": v, **{n: x for n, x in options.items() if isinstance(x, Tensor)}}
    rest = {n: x for n, x in options.items() if n not in learned}
    dy, dlse = drawn(2, HEADS, sq, D, seed=8), drawn(2, HEADS, sq, seed=9)

    def gradients(dtype: torch.dtype, **extra: Any) -> tuple[Tensor, ...]:
        own = {n: x.to(dtype).requires_grad_() for n, x in learned.items()}
        results = backlight.attention(**own, return_lse=True, **rest, **extra)
        return torch.autograd.grad(results, list(own.values()), (dy.to(dtype), dlse.to(results[1].dtype)))

    for n, x, want in zip(learned, gradients(torch.float32, precision="fp8"), gradients(torch.float64), strict=True):
        x, want = x.double(), want.double()
        cosine = float((x * want).sum() / (x.norm() * want.norm()))
        assert cosine > 0.985, (n, cosine)
        assert abs(float((x * want).sum() / want.square().sum()) - 1) < 0.04, n


def test_gradients_of_packed_sequences() -> None:
    cu = torch.tensor([0, 130, 130, 200, 340])
    q, k, v = (drawn(340, heads, D, seed=n).requires_grad_() for n, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    dy = drawn(340, HEADS, D, seed=8)
    found, wanted = (
        torch.autograd.grad(backlight.attention_varlen(q, k, v, cu, causal=True, **extra), (q, k, v), dy)
        for extra in ({"precision": "fp8"}, {})
    )
    for x, want in zip(found, wanted, strict=True):
        assert x.shape == want.shape
        assert relative(x, want) < 0.15


def test_quantised_forms_are_the_call() -> None:
    q, k, v = inputs(100, 300, torch.bfloat16)
    wanted = backlight.attention(q, k, v, causal=True, precision="fp8", return_lse=True)
    given, keys = backlight.quantize(q, k, v), backlight.quantize_keys(k, v)
    for found in (
        backlight.attention(given, causal=True, return_lse=True),
        backlight.attention(q, keys, causal=True, return_lse=True),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert found[0].dtype == torch.bfloat16
    plain = backlight.quantize_keys(k, v, centred=False)
    assert torch.equal(backlight.attention(q, plain, softcap=3.0), backlight.attention(q, k, v, softcap=3.0, precision="fp8"))
    x = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(backlight.attention(x, keys, causal=True).float().sum(), x)
    assert dq.isfinite().all()
    assert dq.abs().max() > 0


def test_five_axes() -> None:
    q, k, v = (x.unflatten(0, (1, 2)) for x in inputs(40, 40))
    y, lse = backlight.attention(q, k, v, precision="fp8", return_lse=True)
    assert torch.equal(y[0], backlight.attention(q[0], k[0], v[0], precision="fp8"))
    assert lse.shape == q.shape[:4]


@pytest.mark.parametrize("keys", [False, True], ids=["tensors", "keys"])
def test_under_the_compiler(keys: bool) -> None:
    q, k, v = inputs(40, 60)
    sink = drawn(HEADS, seed=4)
    given = backlight.quantize_keys(k, v) if keys else None

    def loss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        if given is None:
            y = backlight.attention(q, k, v, causal=True, sink=sink, precision="fp8")
        else:
            y = backlight.attention(q, given, causal=True, sink=sink)
        return (y * y).sum() + 0 * (k.sum() + v.sum())

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        own = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        results.append(torch.autograd.grad(function(*own), own))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_an_empty_context_of_rows() -> None:
    q, k, v = inputs(200, 65)
    y, lse = backlight.attention(q, k, v, causal=True, precision="fp8", return_lse=True)
    assert not y[:, :, :135].any()
    assert bool((lse[:, :, :135] == -torch.inf).all())
    sink = drawn(HEADS, seed=4)
    _, lse = backlight.attention(q, k, v, causal=True, sink=sink, precision="fp8", return_lse=True)
    torch.testing.assert_close(lse[:, :, :135], sink[None, :, None].expand(2, -1, 135))


def test_refusals() -> None:
    q, k, v = inputs(8, 8)
    keys = backlight.quantize_keys(k, v)
    with pytest.raises(ValueError, match="precision must be 'fp8' or None, got 'fp4'"):
        backlight.attention(q, k, v, precision="fp4")
    with pytest.raises(Unsupported, match="emulated: does not take tau in e4m3"):
        backlight.attention(q, k, v, tau=torch.zeros(HEADS), precision="fp8")
    with pytest.raises(Unsupported, match="does not take entmax in e4m3"):
        backlight.attention(q, k, v, entmax=1.5, precision="fp8")
    for option, value, name in (
        ("return_max_logit", True, ""),
        ("exact_delta", True, ""),
        ("deterministic", "batch", '="batch"'),
    ):
        with pytest.raises(Unsupported, match=f"does not take {option}{name} in e4m3"):
            backlight.attention(*(x.bfloat16() for x in (q, k, v)), precision="fp8", **{option: value})
    with pytest.raises(ValueError, match="backend must be hopper, emulated or None in e4m3, got 'triton'"):
        backlight.attention(q, k, v, backend="triton", precision="fp8")
    with pytest.raises(ValueError, match="centred=False"):
        backlight.attention(q, keys, softcap=3.0)
    with pytest.raises(TypeError, match="v must be None where k is what quantize_keys returned"):
        backlight.attention(q, keys, v)
    with pytest.raises(TypeError, match="k and v must be None where q is what quantize returned"):
        backlight.attention(backlight.quantize(q, k, v), k, v)
    with pytest.raises(ValueError, match=r"scale was given to quantize as 0.125, got 1 here"):
        backlight.attention(backlight.quantize(q, k, v), scale=1.0)
    with pytest.raises(ValueError, match="k and v must both be"):
        backlight.attention(q, k, v[..., :32], precision="fp8")
    with pytest.raises(TypeError, match="attention_varlen quantises packed sequences itself"):
        backlight.attention_varlen(q[0].transpose(0, 1), keys, None, torch.tensor([0, 8]))
    with pytest.raises(NotImplementedError, match=r"not by torch\.func"):
        torch.func.jvp(lambda x: backlight.attention(x, k, v, precision="fp8"), (q,), (q,))
    x = q.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(backlight.attention(x, k, v, precision="fp8").sum(), x, create_graph=True)


def test_entmax_of_queries_that_are_quantised_is_refused() -> None:
    """A number was dropped where q is what `quantize` returned: the result was that of a softmax."""
    q, k, v = inputs(8, 8)
    for entmax in (1.5, torch.full((HEADS,), 1.5)):
        with pytest.raises(Unsupported, match="does not take entmax in e4m3"):
            backlight.attention(backlight.quantize(q, k, v), entmax=entmax)
    assert backlight.attention(backlight.quantize(q, k, v), entmax=1).shape == q.shape


def test_what_e4m3_would_not_look_at() -> None:
    q, k, v = inputs(8, 8)
    for flag in ("return_lse", "return_max_logit"):
        with pytest.raises(TypeError, match=f"{flag} must be a bool, got 'no'"):
            backlight.attention(q, k, v, precision="fp8", **{flag: "no"})
    with pytest.raises(Unsupported, match="does not take fp64 in e4m3"):
        backlight.attention(q.double(), k.double(), v.double(), precision="fp8")


def test_what_was_quantised_is_shown_in_a_line() -> None:
    q, k = torch.zeros(1, 2, 3, 16), torch.zeros(1, 1, 5, 16)
    assert repr(backlight.quantize_keys(k, k)) == "Keys(k (1, 1, 5, 16), centred, cpu)"
    assert repr(backlight.quantize(q, k, k)) == "Quantised(q (1, 2, 3, 16), Keys(k (1, 1, 5, 16), centred, cpu))"
