"""Borders of lengths that the host knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import backlight
from backlight import call as call_module
from backlight.call import Call, trust_borders
from backlight.compat import flash_attn
from backlight.spec import AttentionSpec


def packed(cu: Tensor, rows: int) -> Call:
    q = torch.zeros(1, 2, rows, 8)
    return Call(AttentionSpec(), q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)


@pytest.fixture
def slow_reading(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """As if every tensor lay on a device that must be waited for; which of them were read."""
    read: list[Tensor] = []
    honest = Tensor.tolist
    monkeypatch.setattr(call_module, "_waits", lambda cu: True)
    monkeypatch.setattr(Tensor, "tolist", lambda self: (read.append(self), honest(self))[1])
    return read


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [([2, 3, 4], [0, 2, 5, 9]), ((0, 5, 0), [0, 0, 5, 5]), ([], [0]), (torch.tensor([7, 1]), [0, 7, 8])],
    ids=str,
)
def test_values(lengths: Any, wanted: list[int]) -> None:
    found = backlight.cu_seqlens(lengths)
    assert found.tolist() == wanted
    assert found.dtype == torch.int32
    assert found.is_contiguous()


@pytest.mark.parametrize("inference", [False, True])
def test_nobody_reads_them(slow_reading: list[Tensor], inference: bool) -> None:
    with torch.inference_mode(inference):
        cu = backlight.cu_seqlens([3, 5])
        for _ in range(2):
            packed(cu, 8).check_borders()
    assert slow_reading == []


def test_a_change_in_place_is_noticed(slow_reading: list[Tensor]) -> None:
    cu = backlight.cu_seqlens([3, 5])
    cu[1] = 9
    with pytest.raises(ValueError, match="must not decrease, got 9 then 8"):
        packed(cu, 8).check_borders()


def test_a_wrong_total_is_refused(slow_reading: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="must end at the packed length 9, got 8"):
        packed(backlight.cu_seqlens([3, 5]), 9).check_borders()


def test_a_pair_bias_is_held_against_the_longest(slow_reading: list[Tensor]) -> None:
    call = packed(backlight.cu_seqlens([3, 5]), 8)
    call.pair_bias = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="the longest sequence, 5 rows and 5 keys"):
        call.check_borders()
    assert slow_reading == []


def test_calls_take_them() -> None:
    q = torch.randn(8, 2, 16, dtype=torch.float64, requires_grad=True)
    found = backlight.attention_varlen(q, q, q, backlight.cu_seqlens([3, 5]), causal=True)
    wanted = backlight.attention_varlen(q, q, q, torch.tensor([0, 3, 8]), causal=True)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("inference", [False, True])
def test_borders_taken_at_their_word(slow_reading: list[Tensor], inference: bool) -> None:
    with torch.inference_mode(inference):
        cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        trust_borders(cu, 8)
        for _ in range(2):
            packed(cu, 8).check_borders()
        assert slow_reading == []
        # a pair bias must reach as far as the longest, which nobody has said
        call = packed(cu, 8)
        call.pair_bias = torch.zeros(1, 1, 4, 4)
        with pytest.raises(ValueError, match="the longest sequence, 5 rows and 5 keys"):
            call.check_borders()
        with pytest.raises(ValueError, match="must end at the packed length 9, got 8"):
            packed(cu, 9).check_borders()


def test_flash_attn_waits_for_nothing(slow_reading: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as borders are checked, not read: kernels read them on the device, which the CPU's backend does on the host."""
    checked: list[bool] = []
    honest = Call._find_segments

    def checks_first(call: Call) -> Any:
        before = len(slow_reading)
        call.check_borders()
        checked.append(len(slow_reading) == before)
        return honest(call)

    monkeypatch.setattr(Call, "_find_segments", checks_first)
    q = torch.randn(8, 2, 16)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    flash_attn.flash_attn_varlen_func(q, q, q, cu, cu.clone(), 5, 5, causal=True)
    assert checked == [True]


@pytest.mark.parametrize(
    ("lengths", "device", "error", "sentence"),
    [
        ([3, -1], None, ValueError, "each of lengths must be an int >= 0, got -1"),
        ([3, 1.5], None, TypeError, "each of lengths must be an int >= 0, got 1.5"),
        ([True], None, TypeError, "each of lengths must be an int >= 0, got True"),
        (5, None, TypeError, "lengths must be a sequence of whole numbers or a tensor of them, got 5"),
        ("12", None, TypeError, "lengths must be a sequence of whole numbers or a tensor of them, got '12'"),
        ([2**30, 2**30], None, ValueError, "less than 2 .. 31 together, got 2147483648"),
        (torch.zeros(2), None, ValueError, "lengths must be whole numbers .Z., got torch.float32 of shape .2,."),
        (torch.zeros(2, dtype=torch.int32, device="meta"), None, ValueError, "on the CPU, where they are known"),
        ([3], "nowhere", ValueError, "device must be a torch.device, its name or None, got 'nowhere'"),
    ],
)
def test_what_is_refused(lengths: Any, device: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        backlight.cu_seqlens(lengths, device)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_nobody_waits_for_a_device(backend: str) -> None:
    """For new lengths in every step."""
    q = torch.randn(400, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(lengths: list[int]) -> None:
        y = backlight.attention_varlen(q, q, q, backlight.cu_seqlens(lengths, "cuda"), causal=True, backend=backend)
        torch.autograd.grad(y, q, y.detach())

    for _ in range(3):
        # compiled and recorded
        step([120, 80, 200])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lengths in ([120, 80, 200], [60, 300, 40], [0, 1, 399]):
            step(lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
