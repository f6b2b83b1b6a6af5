"""Lazy Attention's published call, against a plain transcription of its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backlight.compat import lazy_attention

B, H, S, D = 3, 2, 9, 8


def tensors() -> dict[str, Tensor]:
    made = {name: torch.randn(B, H, S, D, dtype=torch.float64, requires_grad=True) for name in ("q", "k", "v")}
    bias = torch.randn(H, 5, dtype=torch.float64, requires_grad=True)
    tau = torch.tensor([-0.7, 0.3], dtype=torch.float64, requires_grad=True)
    return made | {"bias": bias, "tau": tau}


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, tau: Tensor, window: int, lengths: list[int]) -> Tensor:
    """Row by row, sequence by sequence."""
    out = torch.zeros_like(q)
    rows = []
    for b, length in enumerate(lengths):
        for h in range(H):
            for i in range(length):
                s = q[b, h, i] @ k[b, h, : i + 1].T * D**-0.5
                near = torch.arange(i, -1, -1) < window
                s = s + torch.where(near, bias[h, torch.arange(i, -1, -1).clamp(max=window - 1)], 0.0)
                weight = torch.relu(s.softmax(-1) + tau[h] / (i + 1))
                rows.append(((b, h, i), weight @ v[b, h, : i + 1]))
    where = tuple(torch.tensor([place[axis] for place, _ in rows]) for axis in range(3))
    return out.index_put(where, torch.stack([row for _, row in rows]))


@pytest.mark.parametrize("window", [None, 5, 3, 1])
@pytest.mark.parametrize("lengths", [None, [9, 4, 0], [1, 9, 9]], ids=str)
def test_against_the_formula(lengths: list[int] | None, window: int | None) -> None:
    inputs = tensors()
    y = lazy_attention(**inputs, window_size=window, varlen=None if lengths is None else torch.tensor(lengths))
    want = formula(**inputs, window=window or 5, lengths=lengths or [S] * B)
    torch.testing.assert_close(y, want)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, list(inputs.values()), dy, retain_graph=True)
    expected = torch.autograd.grad(want, list(inputs.values()), dy)
    for name, grad, other in zip(inputs, grads, expected, strict=True):
        torch.testing.assert_close(grad, other, msg=lambda text, name=name: f"d{name}: {text}")


def test_padding_may_hold_anything() -> None:
    """Padded rows are zero and have zero gradients even where the padding is NaN."""
    inputs = {name: value.detach() for name, value in tensors().items()}
    for name in ("q", "k", "v"):
        inputs[name][1, :, 4:] = torch.nan
        inputs[name].requires_grad_()
    y = lazy_attention(**inputs, varlen=torch.tensor([9, 4, 9], dtype=torch.int32))
    assert (y[1, :, 4:] == 0).all()
    assert torch.isfinite(y).all()
    y.sum().backward()
    for name in ("q", "k", "v"):
        assert (inputs[name].grad[1, :, 4:] == 0).all()
        assert torch.isfinite(inputs[name].grad).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_size": 6}, "window_size must lie between 1 and the columns of bias, 5, got 6"),
        ({"window_size": 0}, "window_size must lie between 1 and the columns of bias, 5, got 0"),
        ({"varlen": torch.tensor([9, 4])}, r"varlen must be \[3\] integer lengths, got shape \(2,\)"),
        ({"varlen": torch.tensor([9.0, 4.0, 1.0])}, "varlen must be .* of torch.float32"),
        ({"varlen": torch.tensor([True, False, True])}, r"varlen must be \[3\] integer lengths, .* of torch.bool"),
        ({"varlen": torch.tensor([10, 4, 1])}, r"varlen must lie between 0 and the padded length 9, got \[10, 4, 1\]"),
    ],
)
def test_bad_arguments_get_a_sentence(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lazy_attention(**tensors(), **changes)
