"""Calls like one before skip the checks: whatever decides something is part of what makes two calls alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import backlight
from backlight import binding, running
from backlight import call as call_module
from backlight.call import Call, Memory, read_cu_seqlens
from backlight.spec import AttentionSpec


@pytest.fixture(autouse=True)
def nothing_bound(monkeypatch: pytest.MonkeyPatch) -> Memory[Any]:
    monkeypatch.setattr(binding, "_bound", Memory())
    return binding._bound


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls in the order in which they reach a backend."""
    found: list[Call] = []
    honest = running.forward

    def forward(call: Call, backend: str | None, save_u: bool) -> Any:
        found.append(call)
        return honest(call, backend, save_u)

    monkeypatch.setattr(running, "forward", forward)
    return found


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls that were checked."""
    found: list[Call] = []
    honest = binding.check
    monkeypatch.setattr(binding, "check", lambda call, *rest: (found.append(call), honest(call, *rest))[1])
    return found


def qkv(dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    return [torch.randn(1, heads, 8, 8, dtype=dtype) for _ in range(3)]


def test_one_check_for_calls_of_a_kind(bound: list[Call], checks: list[Call]) -> None:
    for _ in range(3):
        q, k, v = qkv()
        backlight.attention(q, k, v, causal=True)
        assert (bound[-1].q, bound[-1].k, bound[-1].v) == (q, k, v)
    assert len(checks) == 1
    assert len({call.layout for call in bound}) == 1
    assert bound[-1].layout == bound[-1]._find_layout()
    assert bound[-1].spec == AttentionSpec(causal=True)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True},
        {"window": (3, 0)},
        {"window": [3, 0]},
        {"scale": 0.5},
        {"softcap": 2.0},
        {"bias": torch.randn(2, 4)},
        {"bias": torch.randn(2, 4), "bias_origin": 2},
        {"sink": torch.randn(2)},
        {"tau": torch.randn(2)},
        {"gate": torch.randn(1, 2, 8, 8)},
        {"deterministic": True},
    ],
    ids=lambda change: ", ".join(name if isinstance(x, Tensor) else f"{name}={x}" for name, x in change.items()),
)
def test_options_are_told_apart(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    fresh = backlight.attention(q, k, v, **change)
    monkeypatch.setattr(binding, "_bound", Memory())
    plain = backlight.attention(q, k, v)
    for _ in range(2):
        assert torch.equal(backlight.attention(q, k, v, **change), fresh)
        assert torch.equal(backlight.attention(q, k, v), plain)


def test_the_switch_of_torch_for_determinism(bound: list[Call]) -> None:
    for wanted in (False, True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            backlight.attention(*qkv())
        finally:
            torch.use_deterministic_algorithms(False)
    assert [call.deterministic for call in bound] == [False, True, False]


def autocasts() -> Iterator[AbstractContextManager[Any]]:
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        yield nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def test_autocast_is_followed(bound: list[Call]) -> None:
    for context in autocasts():
        with context:
            backlight.attention(*qkv())
    assert [call.q.dtype for call in bound] == [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]


def test_tensors_that_autocast_leaves_alone_are_remembered(checks: list[Call]) -> None:
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            backlight.attention(*qkv(torch.bfloat16))
    assert len(checks) == 1
    for _ in range(2):
        q, k, v = qkv()
        with torch.autocast("cpu", torch.bfloat16):
            backlight.attention(q.bfloat16(), k, v)
    assert len(checks) == 3


def test_a_tensor_elsewhere_is_not_excused() -> None:
    q, k, v = qkv()
    backlight.attention(q, k, v)
    with pytest.raises(ValueError, match="k must be on the device of q"):
        backlight.attention(q, k.to("meta"), v)


def test_an_unknown_backend_is_not_excused() -> None:
    backlight.attention(*qkv(), backend="tiled")
    for _ in range(2):
        with pytest.raises(ValueError, match="backend must be one of"):
            backlight.attention(*qkv(), backend="tilde")


def test_lse_whether_or_not_it_was_wanted_before() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    y = backlight.attention(q, k, v)
    both = backlight.attention(q, k, v, return_lse=True)
    assert torch.equal(y, both[0])
    assert len(y.grad_fn.next_functions) == len(both[0].grad_fn.next_functions)
    assert both[1].requires_grad
    plain = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(map(torch.equal, plain, torch.autograd.grad(both[0].sum(), (q, k, v))))


# --- borders of packed sequences ---------------------------------------------------------------------------------------------


def packed(cu_q: Tensor, cu_k: Tensor, rows: int = 8) -> Call:
    q = torch.zeros(1, 2, rows, 8)
    return Call(AttentionSpec(), q, q, q, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_borders_on_a_device_are_read_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading waits for the device, and kernels hold borders within the tensors."""
    monkeypatch.setattr(call_module, "_waits", lambda cu: True)
    cu = torch.tensor([0, 3, 8])
    read = []
    honest = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (read.append(self), honest(self))[1])
    for _ in range(3):
        packed(cu, cu).check_borders()
    assert len(read) == 1
    cu[1] = 4
    for _ in range(2):
        packed(cu, cu).check_borders()
    assert len(read) == 2
    with pytest.raises(ValueError, match="must end at the packed length 9, got 8"):
        packed(cu, cu, rows=9).check_borders()
    packed(cu, cu).check_borders()
    # once more, for a length that they had not been held against
    assert len(read) == 3


@pytest.mark.parametrize("change", ["numpy", "data", "storage"])
def test_borders_changed_behind_their_back(change: str) -> None:
    """Without a new version: what counts are values."""
    q, k, v = (torch.randn(8, 2, 8, requires_grad=True) for _ in range(3))
    memory = torch.tensor([0, 3, 8])
    cu = memory.data if change == "storage" else memory
    backlight.attention_varlen(q, k, v, cu)
    version = cu._version

    def put(values: list[int]) -> None:
        if change == "numpy":
            cu.numpy()[:] = values
        elif change == "data":
            cu.data.copy_(torch.tensor(values))
        else:
            memory.copy_(torch.tensor(values))

    put([0, 6, 8])
    assert cu._version == version
    found = backlight.attention_varlen(q, k, v, cu)
    wanted = backlight.attention_varlen(q, k, v, torch.tensor([0, 6, 8]))
    assert torch.equal(found, wanted)
    dy = torch.randn(8, 2, 8)
    assert all(map(torch.equal, torch.autograd.grad(found, (q, k, v), dy), torch.autograd.grad(wanted, (q, k, v), dy)))
    put([0, 6, 9])
    with pytest.raises(ValueError, match="cu_seqlens_q must end at the packed length 8, got 9"):
        backlight.attention_varlen(q, k, v, cu)
    put([0, 9, 8])
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease, got 9 then 8"):
        backlight.attention_varlen(q, k, v, cu)


def test_borders_that_are_wrong_stay_wrong() -> None:
    cu = torch.tensor([0, 5, 3, 8])
    for _ in range(3):
        with pytest.raises(ValueError, match="must not decrease"):
            packed(cu, cu).check_borders()
    # right as far as they were read for another purpose
    right = torch.tensor([0, 5])
    assert read_cu_seqlens("cu_seqlens_q", right, None) == (0, 5)
    with pytest.raises(ValueError, match="must end at the packed length 8"):
        packed(right, right).check_borders()


def test_borders_of_inference_are_read_every_time() -> None:
    with torch.inference_mode():
        cu = torch.tensor([0, 3, 8])
        packed(cu, cu).check_borders()
        cu[1] = 9
        with pytest.raises(ValueError, match="must not decrease"):
            packed(cu, cu).check_borders()


def test_shared_borders_are_another_layout() -> None:
    """The Hopper backward sums dbias in one slot where rows and keys share their borders, in sixteen otherwise."""
    cu, same = torch.tensor([0, 3, 8]), torch.tensor([0, 3, 8])
    assert packed(cu, cu).layout != packed(cu, same).layout


def test_borders_may_be_strided(bound: list[Call]) -> None:
    """Kernels read them one after another."""
    q, k, v = (torch.randn(8, 2, 8) for _ in range(3))
    strided = torch.tensor([0, 9, 3, 9, 8, 9])[::2]
    plain = strided.contiguous()
    wanted = backlight.attention_varlen(q, k, v, plain)
    assert bound[-1].cu_seqlens_q is bound[-1].cu_seqlens_k is plain
    for borders in ((strided,), (strided, strided), (plain, strided), (strided, plain)):
        assert torch.equal(backlight.attention_varlen(q, k, v, *borders), wanted)
        assert bound[-1].cu_seqlens_q.stride() == bound[-1].cu_seqlens_k.stride() == (1,)
        assert (bound[-1].cu_seqlens_q is bound[-1].cu_seqlens_k) == (borders[0] is borders[-1])
