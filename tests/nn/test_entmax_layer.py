"""`EntmaxAttention`, the drop-in for AdaSplash, and what `statistics` says of entmax."""

from __future__ import annotations

import pytest
import torch

import backlight
from backlight.compat import adasplash
from backlight.nn import EntmaxAttention


def test_alpha_starts_where_it_was_asked_to_and_learns() -> None:
    torch.manual_seed(0)
    layer = EntmaxAttention(16, 2, alpha=1.5, temperature=True)
    assert torch.allclose(torch.as_tensor(layer.alpha), torch.full((2,), 1.5), atol=1e-6)
    x = torch.randn(2, 12, 16)
    layer(x).square().mean().backward()
    assert layer.sparsity is not None
    assert layer.sharpness is not None
    for parameter in (layer.sparsity, layer.sharpness):
        assert parameter.grad is not None
        assert bool((parameter.grad != 0).all())


@pytest.mark.parametrize("alpha", [1.05, 2.0])
def test_ends_of_the_range_can_be_left(alpha: float) -> None:
    layer = EntmaxAttention(8, 2, alpha=alpha)
    assert torch.allclose(torch.as_tensor(layer.alpha), torch.full((2,), alpha), atol=2e-3)
    layer(torch.randn(1, 9, 8)).square().mean().backward()
    assert layer.sparsity is not None
    assert layer.sparsity.grad is not None
    assert bool((layer.sparsity.grad != 0).any())


def test_a_fixed_alpha_is_a_number() -> None:
    layer = EntmaxAttention(16, 2, alpha=2.0, learned=False)
    assert layer.alpha == 2.0
    assert layer.sparsity is None
    assert layer(torch.randn(1, 5, 16)).shape == (1, 5, 16)


def test_parameters_stay_wide() -> None:
    layer = EntmaxAttention(16, 2, temperature=True).to(torch.bfloat16)
    assert layer.qkv.weight.dtype == torch.bfloat16
    assert layer.sparsity is not None
    assert layer.sparsity.dtype == torch.float32
    assert layer(torch.randn(1, 5, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_packed_and_sharp() -> None:
    torch.manual_seed(0)
    layer = EntmaxAttention(16, 2, temperature=True)
    assert layer.sharpness is not None
    torch.nn.init.constant_(layer.sharpness, 0.3)
    x = torch.randn(2, 7, 16)
    packed = layer(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 7, 14]))
    assert torch.allclose(packed.unflatten(0, (2, 7)), layer(x), atol=1e-5)


@pytest.mark.parametrize(
    ("alpha", "words"), [(1.0, "alpha must be from 1.05 to 2, got 1.0"), (3, "alpha must be from 1.05 to 2, got 3")]
)
def test_bad_alphas(alpha: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EntmaxAttention(8, 2, alpha=alpha)


def test_adasplash() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 9, 8)
    assert torch.equal(adasplash(q, k, v), backlight.attention(q, k, v, causal=True, entmax=1.5))
    assert torch.equal(adasplash(q, k, v, 2.0, False, niter=4), backlight.attention(q, k, v, entmax=2.0))
    lengths = torch.tensor([9, 4])
    y = adasplash(q, k, v, varlen=lengths)
    assert torch.allclose(y[:1], adasplash(q, k, v)[:1], atol=1e-6)
    assert torch.allclose(y[1:, :, :4], adasplash(q, k, v)[1:, :, :4], atol=1e-6)
    assert not y[1, :, 4:].any()
    with pytest.raises(TypeError, match="niter must be an int or None"):
        adasplash(q, k, v, niter=1.5)  # type: ignore[arg-type]


def test_statistics() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 8) * 2
    found = backlight.statistics(q, k, v, causal=True, entmax=torch.tensor([1.05, 2.0]), tile=(4, 4))
    plain = backlight.statistics(q, k, v, causal=True, tile=(4, 4))
    assert torch.allclose(found.mass, torch.ones(2).double(), atol=1e-4)
    assert torch.allclose(plain.support, torch.full((2,), 32.5).double())
    assert float(found.support[1]) < float(found.support[0]) <= 32.5
    assert float(found.live_tiles[1]) < 1
    assert not found.dead_rows.any()


@pytest.mark.parametrize(
    ("alpha", "sentence"),
    [
        (3.0, r"alpha must be 1 \(softmax\) or from 1.05 to 2, got 3.0"),
        ("1.5", "alpha must be a number"),
        (torch.tensor(1.5), r"alpha must be \[H\], got shape \(\)"),
    ],
    ids=str,
)
def test_the_drop_in_calls_alpha_by_its_name(alpha: object, sentence: str) -> None:
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises((TypeError, ValueError), match=sentence):
        adasplash(q, q, q, alpha=alpha)  # type: ignore[arg-type]
