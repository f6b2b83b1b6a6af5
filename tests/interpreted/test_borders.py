"""Borders of packed sequences that changed unseen: read again where that costs nothing, and never followed out of a tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import backlight
from backlight.backends.replaying import small
from backlight.backends.triton.backward import backward
from backlight.backends.triton.forward import forward
from backlight.call import Call
from backlight.spec import AttentionSpec

ROWS, KEYS, HEADS, D = 40, 56, 2, 16
GUARD, MARK = 1 << 16, 77.0


@pytest.mark.parametrize("block", [4, small.BLOCK])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_borders_as_kernels_follow_them(dtype: torch.dtype, block: int) -> None:
    """Right ones as they are; of wrong ones as many rows as there are, in order, and as many tiles as those have."""
    largest = torch.iinfo(dtype).max
    for values, wanted in (
        ([0, 3, 3, 9, 17, 17, 40], [0, 3, 3, 9, 17, 17, 40]),
        ([0], [0]),
        ([0, 3, 9, 5, 30, 41, 90], [0, 3, 9, 9, 34, 40, 40]),
        ([-300, -20, 40], [0, 40, 40]),
        ([0, largest, -largest, 7], None),
        ([7, 20, 31], [0, 13, 24]),
    ):
        cu = torch.tensor(values, dtype=dtype)
        first, borders = (torch.full(cu.shape, -1, dtype=torch.int32) for _ in range(2))
        small._first_tiles_kernel[(1,)](cu, first, borders, 40, len(values) - 1, 16, BLOCK=block)
        assert wanted is None or borders.tolist() == wanted
        assert borders[0] == first[0] == 0
        assert (borders.diff() >= 0).all()
        assert borders[-1] <= 40
        assert first.diff().tolist() == [-(-n // 16) for n in borders.diff().tolist()]


class Guards:
    """Memory that lies between marks: every allocation inside, and tensors that are put there."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int]] = []

    def put(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        size = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True)) + 1 if like.numel() else 0
        buffer = torch.full((size + 2 * GUARD,), MARK, dtype=dtype or like.dtype)
        self.buffers.append((buffer, size))
        return buffer.as_strided(like.shape, like.stride(), GUARD)

    def untouched(self) -> bool:
        return all((buffer[:GUARD] == MARK).all() and (buffer[GUARD + size :] == MARK).all() for buffer, size in self.buffers)


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guards]:
    found = Guards()
    honest = torch.empty, torch.empty_like, torch.empty_strided

    def empty(*shape: object, **options: object) -> Tensor:
        made = honest[0](*shape, **options)  # type: ignore[call-overload]
        return found.put(made)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, dtype=None: found.put(honest[1](x, dtype=dtype)))
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **options: found.put(honest[2](*args, **options)))
    return found


WRONG = {
    "far beyond": ([0, 25, 4000], [0, 25, 4000]),
    "decreasing": ([0, 30, 10, 40], [0, 50, 20, 56]),
    "negative": ([-300, -20, 40], [-200, 30, 56]),
    "starts late, ends early": ([7, 20, 31], [9, 9, 40]),
    "wrapped": ([0, 2**31 - 1, -(2**31)], [0, -(2**31), 2**31 - 1]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_kernels_stay_within_their_tensors(wrong: str, guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU borders are not read again, for that would wait: kernels that trust them must not leave their memory."""
    monkeypatch.setattr(Call, "check_borders", lambda self: None)
    cu_q, cu_k = (torch.tensor(values, dtype=torch.int32) for values in WRONG[wrong])
    tensors = []
    for length in (ROWS, KEYS, KEYS, ROWS):
        x = guards.put(torch.zeros(1, HEADS, length, D))
        tensors.append(x.copy_(torch.randn(x.shape)))
    q, k, v, gate = tensors
    spec = AttentionSpec(causal=True, window=(20, None), bias=True, sink=True, tau=True, gate=True)
    bias, sink, tau = torch.randn(HEADS, 24), torch.randn(HEADS), torch.tensor([-0.7, 0.4])
    call = Call(spec, q, k, v, bias, sink, tau, gate, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    y, lse, u, _ = forward(call, True)
    backward(call, y, lse, u, torch.randn(y.shape), torch.randn(lse.shape), frozenset(call.gradients))
    assert guards.untouched()


def test_changed_behind_its_back() -> None:
    """Through memory that numpy shares, without a new version: the borders of now, and their checks."""
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    cu = torch.tensor([0, 3, 8])
    backlight.attention_varlen(q, k, v, cu, backend="triton")
    cu.numpy()[1] = 5
    wanted = backlight.attention_varlen(q, k, v, torch.tensor([0, 5, 8]), backend="triton")
    assert torch.equal(backlight.attention_varlen(q, k, v, cu, backend="triton"), wanted)
    cu.numpy()[1] = 4000
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease, got 4000 then 8"):
        backlight.attention_varlen(q, k, v, cu, backend="triton")
