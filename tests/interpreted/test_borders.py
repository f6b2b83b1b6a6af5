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

import triton
import triton.language as tl

import backlight
from backlight.backends.replaying import small
from backlight.backends.triton.backward import backward
from backlight.backends.triton.forward import forward
from backlight.call import Call
from backlight.spec import AttentionSpec

ROWS, KEYS, HEADS, D = 40, 56, 2, 16
GUARD, MARK = 1 << 16, 77.0


@triton.jit
def _borders_kernel(cu_ptr, out_ptr, length, n, N: tl.constexpr):
    z = tl.arange(0, N)
    begin, end = small.borders(cu_ptr, z, z < n, length)
    tl.store(out_ptr + z * 2, begin, mask=z < n)
    tl.store(out_ptr + z * 2 + 1, end, mask=z < n)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_borders_lie_within_the_tensor(dtype: torch.dtype) -> None:
    """Right ones as they are, wrong ones at the nearest row, and no sequence of negative length."""
    largest = torch.iinfo(dtype).max
    values = [0, 3, 3, 9, 5, -4, largest, -largest, 40, 41, 7, 40]
    cu = torch.tensor(values, dtype=dtype)
    found = torch.full((len(values) - 1, 2), -1, dtype=torch.int32)
    _borders_kernel[(1,)](cu, found, 40, len(values) - 1, N=16)
    assert found[:3].tolist() == [[0, 3], [3, 3], [3, 9]]
    assert ((found >= 0) & (found <= 40)).all()
    assert (found[:, 0] <= found[:, 1]).all()
    first = torch.empty(len(values), dtype=torch.int32)
    small._first_tiles_kernel[(1,)](cu, first, 40, len(values) - 1, 16, BLOCK=small.BLOCK)
    assert first.diff().tolist() == [-(-(end - begin) // 16) for begin, end in found.tolist()]


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
    call = Call(spec, q, k, v, bias, sink, tau, gate, cu_q, cu_k)
    y, lse, u = forward(call, True)
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
