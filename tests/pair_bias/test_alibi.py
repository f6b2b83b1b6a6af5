"""ALiBi as a table by distance: the same scores as a dense bias, a gradient of the slopes, the slopes of the paper."""

from __future__ import annotations

import pytest
import torch

import backlight
from backlight.slopes import alibi_slopes


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(7, 7), (3, 9), (9, 3)])
def test_it_is_the_dense_bias(sq: int, sk: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, sq, 4, dtype=torch.float64), torch.randn(2, 3, sk, 4, dtype=torch.float64)
    slopes = torch.rand(3, dtype=torch.float64, requires_grad=True)
    y = backlight.attention(q, k, k, causal=causal, **backlight.alibi(slopes, sq, sk, causal=causal))
    distance = (torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)).abs()
    dense = (-slopes[:, None, None] * distance)[None]
    wanted = backlight.attention(q, k, k, causal=causal, pair_bias=dense)
    torch.testing.assert_close(y, wanted)
    found, want = (torch.autograd.grad(x.square().sum(), slopes)[0] for x in (y, wanted))
    torch.testing.assert_close(found, want)


def test_the_slopes_of_the_paper() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(12).tolist() == pytest.approx([2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)])
    assert backlight.alibi(4, 10, causal=True)["bias"].shape == (4, 10)
    assert backlight.alibi(4, 10, 6)["bias"].shape == (4, 16)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.rand(2, 2), 4), "slopes must be .Hq., got shape"),
        ((torch.ones(2, dtype=torch.int64), 4), "slopes must be float16"),
        ((0, 4), "heads must be an int >= 1, got 0"),
        ((2, -1), "sq must be an int >= 0"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        backlight.alibi(*arguments)
