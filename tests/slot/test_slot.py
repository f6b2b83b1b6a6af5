"""torch's flash operators with our answers, for CPU tensors: torch has no kernel there, so the key is free for a stand-in.

Everything above the key is torch's own: schemas, the autograd formulas, the shapes and strides that compilers are told.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import backlight
from backlight import binding, slot
from backlight._private.torch import FLASH_OPERATORS
from backlight.slot import answers
from backlight.slot.counts import Counts

aten = torch.ops.aten
INF = float("inf")


class Originals:
    """In place of torch's own kernels: they say that they were called."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.within: Callable[[], object] = lambda: None
        self.library = torch.library.Library("aten", "IMPL")
        for name in FLASH_OPERATORS:
            if hasattr(aten, name):
                self.library.impl(name, self.named(name), "CPU")

    def named(self, name: str) -> Any:
        def original(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            if name.startswith("_scaled"):
                self.within()
            if name.endswith("backward"):
                return tuple(torch.full_like(x, 7.0) for x in args[1:4])
            q = args[0]
            lse, seed = q.new_zeros(q.shape[:3]), torch.zeros(2, dtype=torch.uint64)
            if name.startswith("_flash"):
                return torch.full_like(q, 7.0), lse, seed, seed, q.new_zeros(0)
            return torch.full_like(q, 7.0), lse, None, None, q.shape[2], args[1].shape[2], seed, seed, q.new_zeros(0)

        return original


@pytest.fixture
def originals() -> Iterator[Originals]:
    found = Originals()
    yield found
    found.library = None


@pytest.fixture
def counts(originals: Originals, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Our answers on the CPU, by the one backend that runs there."""
    monkeypatch.setattr(answers, "KERNELS", ("tiled",))
    binding._bound.clear()
    found = Counts()
    library = slot.registered("CPU", answers.Answers(found))
    yield found
    del library
    binding._bound.clear()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).float().double().requires_grad_()


def check(found: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found, wanted)
    dy = torch.randn_like(wanted)
    pairs = zip(*(torch.autograd.grad(x, inputs, dy) for x in (found, wanted)), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want)


LAYOUTS = {
    "contiguous": lambda heads, rows: drawn(2, heads, rows, 16),
    "rows first": lambda heads, rows: drawn(2, rows, heads, 16).transpose(1, 2),
    "part of a projection": lambda heads, rows: drawn(2, rows, heads, 48)[..., 16:32].transpose(1, 2),
    "expanded": lambda heads, rows: drawn(2, 1, rows, 16).expand(-1, heads, -1, -1),
}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(counts: Counts, originals: Originals, layout: str, causal: bool, scale: float | None) -> None:
    q, k, v = (LAYOUTS[layout](heads, 9) for heads in (4, 2, 2))
    found = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, scale=scale)
    wanted = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    check(found[0], wanted, (q, k, v))
    s = q @ k.repeat_interleave(2, 1).mT * (scale or 0.25)
    s = s.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -INF) if causal else s
    torch.testing.assert_close(found[1], s.logsumexp(-1))
    assert found[2:4] == (None, None)
    assert found[4:6] == (9, 9)
    assert (counts.forward, counts.backward, originals.called) == (1, 1, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_as_compilers_are_told(counts: Counts, layout: str) -> None:
    """Shape, dtype and strides of every result, against torch's functions for tensors without memory."""
    q, k, v = (LAYOUTS[layout](heads, 9).detach().float() for heads in (4, 2, 2))
    bare = [x.to("meta") for x in (q, k, v)]
    for ours, theirs, turn in (
        (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward, False),
        (aten._flash_attention_forward, aten._flash_attention_backward, True),
    ):
        sides = []
        for x in ((q, k, v), bare):
            given = [y.transpose(1, 2) for y in x] if turn else list(x)
            sizes = (None, None, 9, 9) if turn else ()
            out = ours(*given, *sizes, 0.0, True, False)
            seeds = out[2:4] if turn else out[6:8]
            grads = theirs(torch.ones_like(out[0]), *given, *out[:2], None, None, 9, 9, 0.0, True, *seeds)
            sides.append([(y.shape, y.dtype, y.stride()) if isinstance(y, Tensor) else y for y in (*out, *grads)])
        assert sides[0] == sides[1]


@pytest.mark.parametrize(("rows", "keys"), [(5, 9), (9, 5)])
def test_causal_with_other_keys_than_rows_aligns_to_the_bottom_right(counts: Counts, rows: int, keys: int) -> None:
    """As torch's flash kernel does, which `torch.nn.attention.bias.causal_lower_right` relies on. SDPA's own is_causal aligns
    to the top left, and does not come here. Rows that see nothing: y = 0, lse = +inf, no gradient."""
    q, k, v = drawn(1, 2, rows, 16), drawn(1, 2, keys, 16), drawn(1, 2, keys, 16)
    visible = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    found = aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)
    blind = max(0, rows - keys)
    wanted = scaled_dot_product_attention(q[:, :, blind:], k, v, attn_mask=visible[blind:])
    assert not found[0][:, :, :blind].any()
    assert (found[1][:, :, :blind] == INF).all()
    assert found[1][:, :, blind:].isfinite().all()
    dy = torch.randn_like(q)
    got = torch.autograd.grad(found[0], (q, k, v), dy)
    for x, y in zip(got, torch.autograd.grad(wanted, (q, k, v), dy[:, :, blind:]), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (3, 2)])
def test_packed(counts: Counts, window: tuple[int, int]) -> None:
    """What `torch.nn.attention.varlen.varlen_attn` sends."""
    q, k, v = drawn(20, 4, 16), drawn(20, 2, 16), drawn(20, 2, 16)
    cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    sides = {"window_size_left": window[0], "window_size_right": window[1], "scale": 0.4}
    causal = window == (-1, 0)
    y, lse, *_ = aten._flash_attention_forward(q, k, v, cu, cu, 13, 13, 0.0, causal, False, **sides)
    reach = tuple(None if x < 0 else x for x in window)
    wanted, wanted_lse = backlight.attention_varlen(q, k, v, cu, window=reach, scale=0.4, return_lse=True)
    check(y, wanted, (q, k, v))
    torch.testing.assert_close(lse, wanted_lse)
    assert (counts.forward, counts.backward) == (1, 1)


def test_packed_rows_without_keys(counts: Counts) -> None:
    q, k, v = drawn(12, 2, 16), drawn(9, 2, 16), drawn(9, 2, 16)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 7, 12], [0, 9, 9]))
    y, lse, *_ = aten._flash_attention_forward(q, k, v, cu_q, cu_k, 7, 9, 0.0, False, False)
    assert not y[7:].any()
    assert (lse[:, 7:] == INF).all()
    check(y, backlight.attention_varlen(q, k, v, cu_q, cu_k), (q, k, v))


@pytest.mark.skipif(not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="new in torch 2.12")
def test_into_a_tensor(counts: Counts) -> None:
    q = torch.randn(20, 4, 16)
    cu, out = torch.tensor([0, 7, 20], dtype=torch.int32), torch.empty(20, 4, 16)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, q, q, q, cu, cu, 13, 13, 0.0, True, False)
    y, wanted, *_ = aten._flash_attention_forward(q, q, q, cu, cu, 13, 13, 0.0, True, False)
    assert torch.equal(out, y)
    assert torch.equal(lse, wanted)


# --- torch's own -------------------------------------------------------------------------------------------------------------


def test_dropout_is_for_torch_in_both_directions(counts: Counts, originals: Originals) -> None:
    q = drawn(1, 2, 9, 16)
    y = aten._scaled_dot_product_flash_attention(q, q, q, 0.5, True, scale=0.3)[0]
    assert (y == 7).all()
    assert (torch.autograd.grad(y.sum(), q)[0] == 21).all()
    assert originals.called == ["_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"]
    assert counts == Counts(0, 0, counts.fallbacks)
    assert dict(counts.fallbacks) == {"dropout_p is not 0": 2}


def test_torchs_own_within_torchs_own_is_one_call(counts: Counts, originals: Originals) -> None:
    """As torch's kernel for SDPA does, which calls the operator beneath it."""
    q = torch.randn(1, 2, 9, 16)
    originals.within = lambda: aten._flash_attention_forward(q, q, q, None, None, 9, 9, 0.5, False, False)
    aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    assert originals.called == ["_scaled_dot_product_flash_attention", "_flash_attention_forward"]
    assert dict(counts.fallbacks) == {"dropout_p is not 0": 1}
    aten._scaled_dot_product_flash_attention(q, q, q)
    assert counts.forward == 1


def test_what_else_is_for_torch(counts: Counts, originals: Originals, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 9, 16)
    aten._scaled_dot_product_flash_attention(q, q, q, return_debug_mask=True)
    aten._scaled_dot_product_flash_attention(q, q, q[..., :8])
    slopes = torch.ones(2)
    aten._flash_attention_forward(q, q, q, None, None, 9, 9, 0.0, False, False, alibi_slopes=slopes)
    aten._scaled_dot_product_flash_attention(q, q[:, :, :, :8], q)
    monkeypatch.setattr(answers, "KERNELS", ("hopper", "triton"))
    aten._scaled_dot_product_flash_attention(*[torch.randn(1, 2, 11, 16)] * 3)
    reasons = list(counts.fallbacks)
    assert reasons[:3] == ["return_debug_mask is True", "values have other columns than queries", "alibi_slopes is given"]
    assert reasons[3].startswith("k ")
    assert reasons[4].startswith("hopper: ")
    assert "; triton: " in reasons[4]
    assert len(originals.called) == 5
    assert counts.forward == 0
    assert str(counts).count("1 on torch's own: ") == 5


def test_a_library_that_goes_leaves_the_kernels_that_were_there(originals: Originals) -> None:
    found = Counts()
    library = slot.registered("CPU", answers.Answers(found))
    q = torch.randn(1, 2, 9, 16)
    occupied = slot.Occupied(library, lambda: None)
    del library
    aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    occupied.remove()
    aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    assert found.fallbacks.total() == 1
    assert len(originals.called) == 2


# --- the registry ------------------------------------------------------------------------------------------------------------


def test_activated_and_back() -> None:
    current = torch.nn.attention.current_flash_attention_impl
    assert "BACKLIGHT" in torch.nn.attention.list_flash_attention_impls()
    assert current() is None
    with backlight.activated() as counts:
        assert current() == "BACKLIGHT"
        assert backlight.activate() is counts
        with backlight.activated() as inner:
            assert inner is counts
        assert current() == "BACKLIGHT"
        assert slot.state().startswith("backlight.activate() is on\n0 forward")
    assert current() is None
    backlight.activate()
    backlight.deactivate()
    backlight.deactivate()
    assert current() is None
    assert "backlight.activate()" in slot.state()


def test_somebody_else_is_put_back() -> None:
    class Held:
        def remove(self) -> None:
            removed.append(True)

    removed: list[bool] = []
    attention = torch.nn.attention
    attention.register_flash_attention_impl("SOMEBODY", register_fn=Held)
    attention.activate_flash_attention_impl("SOMEBODY")
    backlight.deactivate()
    assert not removed
    with backlight.activated():
        assert removed == [True]
    assert attention.current_flash_attention_impl() == "SOMEBODY"
    attention.restore_flash_attention_impl()


def test_torch_without_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    for turn in (backlight.activate, backlight.deactivate, lambda: backlight.activated().__enter__()):
        with pytest.raises(RuntimeError, match=r"torch 2\S* has no registry for flash attention"):
            turn()
    assert slot.state() == slot.NO_REGISTRY


def test_the_order_of_kernels_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from backlight.slot import order

    asked, kept = [], [[3, 1, 2, 0, 4]]
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **kwargs: zeros(*size, **kwargs))
    monkeypatch.setattr(order, "which_kernel", lambda *x: asked.append(x))
    monkeypatch.setattr(order, "kernel_order", lambda: kept[-1])
    monkeypatch.setattr(order, "set_kernel_order", kept.append)
    back = order.flash_first()
    assert (kept[-1], len(asked)) == ([1, 3, 2, 0, 4], 1)
    back()
    assert kept[-1] == [3, 1, 2, 0, 4]
    back = order.flash_first()
    kept.append([2, 1, 3, 0, 4])
    back()
    assert kept[-1] == [2, 1, 3, 0, 4]


def test_without_the_order_cudnn_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from backlight.slot import order

    monkeypatch.setattr(order, "kernel_order", None)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    back = order.flash_first()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    back()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_import_offers_the_name_and_loads_nothing() -> None:
    code = (
        "import sys, torch, backlight\n"
        "attention = torch.nn.attention\n"
        "print('backlight.slot' in sys.modules, attention.current_flash_attention_impl())\n"
        "attention.activate_flash_attention_impl('BACKLIGHT')\n"
        "print(attention.current_flash_attention_impl())\n"
    )
    environment = {"PYTHONPATH": str(Path(backlight.__file__).parents[1]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["False", "None", "BACKLIGHT"], done.stderr
