"""The slot that torch has for flash attention, with our kernels in it: code that calls SDPA runs on them unchanged.

`torch.nn.attention` keeps a registry of who may fill the slot; `import backlight` puts the name BACKLIGHT there, and nothing
else happens before somebody activates it. Then torch's operators for flash attention on CUDA tensors are ours, for eager code,
its autograd formulas, compiled graphs and captures alike; what no kernel of ours takes goes on to the kernel that was there.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backlight._private.torch import FLASH_OPERATORS
from backlight.slot.answers import Answers, TorchsOwn
from backlight.slot.counts import Counts
from backlight.slot.order import flash_first

NAME = "BACKLIGHT"
NO_REGISTRY = (
    f"torch {torch.__version__} has no registry for flash attention (torch.nn.attention.register_flash_attention_impl)"
)

_counts = Counts()
_torchs_own = threading.local()


def activate() -> Counts:
    """Run `scaled_dot_product_attention` on our kernels from here on: forward and backward, compiled code and CUDA graphs too.

    The same as `torch.nn.attention.activate_flash_attention_impl("BACKLIGHT")`. Concerns the calls on CUDA tensors that torch
    gives to its flash kernel, and those it would give to cuDNN though flash takes them. Those with dropout, and others that our
    kernels refuse, run on torch's own. Touches the current CUDA device: call it after `torch.cuda.set_device`. Without a CUDA
    device nothing changes.

    Returns:
        Counts of the calls from here on: how many ran on our kernels, how many did not, and why.
    """
    attention = _registry()
    if attention.current_flash_attention_impl() != NAME:
        attention.activate_flash_attention_impl(NAME)
    return _counts


def deactivate() -> None:
    """Put torch's own kernels back; nothing happens where others than ours are active."""
    attention = _registry()
    if attention.current_flash_attention_impl() == NAME:
        attention.restore_flash_attention_impl()


@contextmanager
def activated() -> Iterator[Counts]:
    """`activate` for a block; what was active before is active again behind it."""
    attention = _registry()
    before = attention.current_flash_attention_impl()
    counts = activate()
    try:
        yield counts
    finally:
        if before != NAME:
            deactivate()
            if before is not None:
                attention.activate_flash_attention_impl(before)


def state() -> str:
    """Whether the slot is ours, in sentences, with the counts."""
    try:
        active = _registry().current_flash_attention_impl()
    except RuntimeError as error:
        return str(error)
    if active != NAME:
        return "torch's own kernels; backlight.activate() changes that"
    return f"backlight.activate() is on\n{_counts}"


def _registry() -> Any:
    attention = torch.nn.attention
    if not hasattr(attention, "register_flash_attention_impl"):
        raise RuntimeError(NO_REGISTRY)
    return attention


# --- for the registry --------------------------------------------------------------------------------------------------------


class Occupied:
    """What the registry keeps while the slot is ours."""

    def __init__(self, library: Any, restore: Callable[[], None]):
        self.library, self.restore = library, restore

    def remove(self) -> None:
        # a library that nobody holds takes its kernels with it
        self.library = None
        self.restore()


def occupy() -> Occupied:
    """Put our kernels into the slot; the registry calls this."""
    global _counts
    if torch.version.hip:
        raise RuntimeError("backlight.activate() is for CUDA: on ROCm torch's flash operators have other results")
    _counts = Counts()
    if not torch.cuda.is_available():
        return Occupied(None, lambda: None)
    return Occupied(registered("CUDA", Answers(_counts)), flash_first())


def registered(key: str, answers: Answers) -> Any:
    """A library with all of the operators for a dispatch key, while somebody holds it."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name, method in FLASH_OPERATORS.items():
            if hasattr(torch.ops.aten, name):
                original = torch.library.get_kernel(f"aten::{name}", key)
                answer = _ours_or(original, getattr(answers, method), answers.counts)
                library.impl(name, answer, key, with_keyset=True, allow_override=True)
    return library


def _ours_or(original: Any, ours: Callable[..., Any], counts: Counts) -> Callable[..., Any]:
    def operator(keys: Any, *args: Any, **kwargs: Any) -> Any:
        # torch's operators for SDPA call those for flash attention: one call, decided once
        if getattr(_torchs_own, "running", False):
            return original.call_boxed(keys, *args, **kwargs)
        try:
            return ours(*args, **kwargs)
        except TorchsOwn as reason:
            counts.fallbacks[str(reason)] += 1
        _torchs_own.running = True
        try:
            return original.call_boxed(keys, *args, **kwargs)
        finally:
            _torchs_own.running = False

    return operator
