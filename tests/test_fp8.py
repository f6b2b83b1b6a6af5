"""e4m3: what is rounded, errors as simulated (docs/fp8.md), gradients straight through, what is refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import backlight
from backlight import fp8
from backlight.call import Call
from backlight.errors import Unsupported
from backlight.fp8 import calls
from backlight.quantising import in_order, in_register_order, power_of_two, rotation
from backlight.spec import AttentionSpec


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def exact(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    return backlight.attention(q.double(), k.double(), v.double(), backend="tiled", **options)


# --- quantising --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1e-3, 0.9, 448.0, 448.1, 896.0, 1e6])
def test_scales_are_the_smallest_powers_of_two(largest: float) -> None:
    scale = float(power_of_two(torch.tensor(largest)))
    assert math.log2(scale) == int(math.log2(scale))
    assert largest / scale <= 448 < 2 * largest / scale * (1 + 1e-6)


@pytest.mark.parametrize("d", [2, 64, 256])
def test_rotations_keep_scores(d: int) -> None:
    turn = rotation(d, torch.device("cpu")).double()
    torch.testing.assert_close(turn @ turn.T, torch.eye(d, dtype=torch.float64), atol=1e-6, rtol=0)


def test_places_of_keys_are_those_of_the_registers() -> None:
    """Of an accumulator's columns a thread t holds 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t: an operand's 4 t to 4 t + 3."""
    keys = torch.arange(32.0)
    places = in_register_order(keys)
    assert places[:8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11]
    assert places[16:20].tolist() == [16, 17, 24, 25]
    assert torch.equal(in_order(places), keys)


def test_what_was_rounded_is_exact_in_bf16() -> None:
    q, k, v = drawn(1, 4, 200, 64), drawn(1, 2, 150, 64, seed=1) + 3, drawn(1, 2, 150, 64, seed=2) * 100
    given = fp8.quantize(q, k, v)
    rounded = fp8.dequantized(given)
    for x in rounded:
        assert torch.equal(x.bfloat16().float(), x)
    turn = rotation(64, q.device)
    for x, wanted in zip(rounded, (q @ turn, (k - k.mean(2, keepdim=True)) @ turn, v), strict=True):
        assert relative(x, wanted.double()) < 0.03


# --- the forward -------------------------------------------------------------------------------------------------------------


def dense(given: fp8.Quantised, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Eq. 98 without blocks, in float64."""
    q, k, v = (x.double() for x in fp8.dequantized(given))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = given.scale / math.log(2.0) * q @ k.mT
    s = s.masked_fill(~spec.allowed(q.shape[2], k.shape[2]), -torch.inf)
    top = s.amax(-1, keepdim=True).ceil().clamp(min=-1e30)
    p = torch.exp2(s - top + 8).float().to(torch.float8_e4m3fn).double()
    total = p.sum(-1, keepdim=True)
    return (p @ v / total).nan_to_num(0.0), (top + torch.log2(total) - 8)[..., 0] * math.log(2.0) + given.offset.double()


@pytest.mark.parametrize(
    ("sq", "sk", "options"),
    [
        (1, 1, {}),
        (63, 65, {}),
        (600, 300, {}),
        (127, 127, {"causal": True}),
        (65, 200, {"causal": True}),
        (200, 65, {"causal": True}),
        (300, 300, {"window": (70, 30)}),
    ],
    ids=str,
)
def test_emulated_in_blocks_as_without(sq: int, sk: int, options: dict[str, object]) -> None:
    """Weights above 2^-14 are rounded the same whatever the maximum so far; what is flushed below that is small."""
    given = fp8.quantize(drawn(2, 4, sq, 64), drawn(2, 2, sk, 64, seed=1) + 1, drawn(2, 2, sk, 64, seed=2))
    spec = AttentionSpec(**options)
    y, lse = calls.forward(Call(spec, *fp8.dequantized(given)), given, "emulated")
    y_wanted, lse_wanted = dense(given, spec)
    seen = lse_wanted.isfinite()
    assert torch.equal(seen, lse.isfinite())
    assert relative(y, y_wanted) < 2e-3
    assert float((lse.double() - lse_wanted)[seen].abs().max()) < 2e-3
    assert not y[~seen].any()


@pytest.mark.parametrize(("factor", "limit"), [(1.0, 5.3e-2), (3.0**0.5, 8.5e-2)], ids=["sd 1", "sd 3"])
def test_errors_are_those_of_the_table(factor: float, limit: float) -> None:
    """Section 17.1, D = 128, S = 1024, within 1.1 of it."""
    q, k, v = (drawn(1, 2, 1024, 128, seed=n).bfloat16() for n in range(3))
    q, k = q * factor, k * factor
    assert relative(fp8.attention(q, k, v), exact(q, k, v)) < 1.1 * limit


def with_outliers(seed: int) -> Tensor:
    """FlashAttention 3's recipe: one entry in a thousand is ten times as large."""
    few = torch.rand(1, 2, 1024, 128, generator=torch.Generator().manual_seed(100 + seed)) < 1e-3
    return (drawn(1, 2, 1024, 128, seed=seed) + 10 * drawn(1, 2, 1024, 128, seed=50 + seed) * few).bfloat16()


def per_tensor(x: Tensor) -> Tensor:
    scale = x.float().abs().max() / 448
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).double()


def test_outliers_are_spread() -> None:
    """Section 17.1 has 5.5e-2; scales of whole tensors, and weights that are not multiplied by 256, have 8.6e-2."""
    q, k, v = (with_outliers(seed) for seed in range(3))
    wanted = exact(q, k, v)
    found = relative(fp8.attention(q, k, v), wanted)
    assert found < 1.1 * 5.5e-2
    s = per_tensor(q) @ per_tensor(k).mT / 128**0.5
    p = torch.exp(s - s.amax(-1, keepdim=True))
    others = p.float().to(torch.float8_e4m3fn).double() @ per_tensor(v) / p.sum(-1, keepdim=True)
    assert relative(others, wanted) > 1.5 * found


def test_an_offset_of_keys_costs_nothing() -> None:
    q, k, v = (drawn(1, 2, 512, 128, seed=n).bfloat16() for n in range(3))
    moved = k + 8 * drawn(128, seed=9).bfloat16()
    y, lse = fp8.attention(q, moved, v, return_lse=True)
    assert relative(y, exact(q, moved, v)) < 1.1 * 5.5e-2
    wanted = backlight.attention(q.double(), moved.double(), v.double(), return_lse=True, backend="tiled")[1]
    assert float((lse - wanted).square().mean().sqrt()) < 0.02


def test_keys_are_quantised_once() -> None:
    q, k, v = drawn(1, 4, 100, 64), drawn(1, 2, 300, 64, seed=1), drawn(1, 2, 300, 64, seed=2)
    keys = fp8.quantize_keys(k, v)
    assert torch.equal(fp8.attention(q, keys, causal=True), fp8.attention(q, k, v, causal=True))
    last = fp8.attention(q[:, :, -1:], keys, causal=True)
    assert relative(last, fp8.attention(q, keys, causal=True)[:, :, -1:].double()) < 0.06


# --- gradients ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 5)}], ids=str)
def test_gradients_are_those_of_attention_at_the_rounded_inputs(options: dict[str, object]) -> None:
    """With y and lse of the forward; where y is that of softmax too, they are near those of the inputs themselves."""
    q, k, v = (drawn(1, h, 200, 64, seed=n).requires_grad_() for n, h in enumerate((4, 2, 2)))
    dy, dlse = drawn(1, 4, 200, 64, seed=5), drawn(1, 4, 200, seed=6)
    y, lse = fp8.attention(q, k, v, return_lse=True, **options)
    found = torch.autograd.grad((y, lse), (q, k, v), (dy, dlse))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    results = backlight.attention(*wide, return_lse=True, backend="tiled", **options)
    wanted = torch.autograd.grad(results, wide, (dy.double(), dlse.double()))
    for name, x, want in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        cosine = float((x.double() * want).sum() / (x.double().norm() * want.norm()))
        assert cosine > 0.99, (name, cosine)
        assert abs(float((x.double() * want).sum() / want.square().sum()) - 1) < 0.03, name


def test_keys_that_were_quantised_before_get_no_gradient() -> None:
    q, k, v = (drawn(1, 2, 40, 64, seed=n).requires_grad_() for n in range(3))
    keys = fp8.quantize_keys(k.detach(), v.detach())
    (dq,) = torch.autograd.grad(fp8.attention(q, keys).sum(), q)
    (wanted, _, _) = torch.autograd.grad(fp8.attention(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close(dq, wanted)


# --- refusals ----------------------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    q, k = drawn(1, 2, 8, 64), drawn(1, 2, 8, 64, seed=1)
    with pytest.raises(ValueError, match="powers of two, got 48"):
        fp8.attention(q[..., :48], k[..., :48], k[..., :48])
    with pytest.raises(ValueError, match="k and v must both be"):
        fp8.attention(q, k, k[..., :32])
    with pytest.raises(ValueError, match="does not go with keys"):
        fp8.attention(q[:, :1], k, k)
    with pytest.raises(TypeError, match="quantize_keys"):
        fp8.attention(q, k)
    with pytest.raises(ValueError, match="backend must be hopper, emulated or None"):
        fp8.attention(q, k, k, backend="triton")
    with pytest.raises(ValueError, match="must have a key"):
        fp8.attention(q, k[:, :, :0], k[:, :, :0])
    if not torch.cuda.is_available():
        with pytest.raises(Unsupported, match="hopper"):
            fp8.attention(q, k, k, backend="hopper")
    x = q.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(fp8.attention(x, k, k).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: fp8.attention(x, k, k), (q,), (q,))


def test_the_page_has_the_numbers_of_the_run() -> None:
    docs = Path(__file__).parents[1] / "docs"
    gains = re.findall(r"^S (\d+) gain-1 (\S+)", (docs / "data" / "fp8-h200.txt").read_text(), re.MULTILINE)
    page = (docs / "fp8.md").read_text()
    assert len(gains) == 5
    assert f"| S | {' | '.join(length for length, _ in gains)} |" in page
    assert f"| gain - 1 | {' | '.join(gain for _, gain in gains)} |" in page
