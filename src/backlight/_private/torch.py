"""What torch knows and has no public name for.

Most of these tell whether somebody looks at a call (a mode, a transform, a profiler) before it takes the direct path. Where one
is missing the answer is "perhaps", and the call takes the operators, which are right in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from backlight._private.names import Cost, Names

_OPERATORS = "every call goes through torch's dispatcher, which costs host time"
_NO_CUDNN = "backlight.activate() switches cuDNN off in SDPA, for calls with a mask too"

NAMES = Names(
    {
        "torch._C._are_functorch_transforms_active": Cost(_OPERATORS),
        "torch._C._len_torch_dispatch_stack": Cost(_OPERATORS),
        "torch._C._len_torch_function_stack": Cost(_OPERATORS),
        "torch._C._is_tracing": Cost("the question whether torch.jit traces is asked in Python"),
        "torch._C._autograd._profiler_enabled": Cost(_OPERATORS),
        "torch._C._functorch.is_functorch_wrapped_tensor": Cost(_OPERATORS),
        "torch._C._functorch.is_legacy_batchedtensor": Cost(_OPERATORS),
        "torch.autograd.forward_ad._current_level": Cost(_OPERATORS),
        "torch.autograd.function._SingleLevelFunction": Cost("autograd checks for transforms once more in every call"),
        "torch._C._is_any_autocast_enabled": Cost("every call asks about autocast by type of device"),
        "torch._C._cuda_getDevice": Cost("every call asks whether CUDA is initialised", gpu=True),
        "torch._C._dynamo.guards._empty_strided_cuda": Cost("allocations of a replayed call take longer", gpu=True),
        "torch.utils._python_dispatch.TorchDispatchMode": Cost("calls are not replayed: each repeats its host work", gpu=True),
        "torch.cuda._sleep": Cost("the doctor keeps a stream busy with matrix products", gpu=True),
        "torch._C._current_graph_task_id": Cost("a backward that recomputes in autograd's own thread needs context= by name"),
        "torch.utils._pytree.register_pytree_node": Cost("a mask is no tree of tensors: vmap and export do not look into it"),
        "torch.cpu._is_amx_tile_supported": Cost("plain calls in bf16 on a CPU do not run on torch's own kernel"),
        "torch._assert_async": Cost("conditions that only values decide go through another operator"),
        "torch._functorch.config": Cost("FlexAttention's backward may not be timed alone", gpu=True),
        "torch._fused_sdp_choice": Cost(_NO_CUDNN, gpu=True),
        "torch._C._get_sdp_priority_order": Cost(_NO_CUDNN, gpu=True),
        "torch._C._set_sdp_priority_order": Cost(_NO_CUDNN, gpu=True),
    }
)


def _perhaps(*_: Any) -> bool:
    return True


# --- who looks ---------------------------------------------------------------------------------------------------------------

transforms_active: Callable[[], Any] = NAMES.take("torch._C._are_functorch_transforms_active", _perhaps)
dispatch_modes: Callable[[], Any] = NAMES.take("torch._C._len_torch_dispatch_stack", _perhaps)
function_modes: Callable[[], Any] = NAMES.take("torch._C._len_torch_function_stack", _perhaps)
tracing: Callable[[], Any] = NAMES.take("torch._C._is_tracing", torch.jit.is_tracing)
profiling: Callable[[], Any] = NAMES.take("torch._C._autograd._profiler_enabled", _perhaps)
is_wrapped: Callable[[Any], Any] = NAMES.take("torch._C._functorch.is_functorch_wrapped_tensor", _perhaps)
# the gradients of torch.autograd.grad(..., is_grads_batched=True)
is_batched: Callable[[Any], Any] = NAMES.take("torch._C._functorch.is_legacy_batchedtensor", _perhaps)

# `_current_level` changes: it is read where it lies, -1 outside every `dual_level`
_here = NAMES.take("torch.autograd.forward_ad._current_level", None) is not None
forward_mode: Any = torch.autograd.forward_ad if _here else SimpleNamespace(_current_level=0)

any_autocast: Callable[[], Any] = NAMES.take("torch._C._is_any_autocast_enabled", _perhaps)


has_amx: Callable[[], Any] = NAMES.take("torch.cpu._is_amx_tile_supported", lambda: False)


# --- shorter ways ------------------------------------------------------------------------------------------------------------

_one_level = NAMES.take("torch.autograd.function._SingleLevelFunction", None)


def apply_of(function: Any) -> Callable[..., Any]:
    """`function.apply` of an autograd function, without its look for transforms."""
    return function.apply if _one_level is None else super(torch.autograd.Function, function).apply


# `torch.cuda.current_device` without its check that CUDA is there: a tensor is
current_device: Callable[[], int] = NAMES.take("torch._C._cuda_getDevice", torch.cuda.current_device)
# torch's allocation for compiled code: on the current device, and with less parsing of arguments; None: there is none
empty_strided_cuda: Any = NAMES.take("torch._C._dynamo.guards._empty_strided_cuda", None)


class NoMode:
    """In place of a mode that sees operations: it sees none."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


DispatchMode: Any = NAMES.take("torch.utils._python_dispatch.TorchDispatchMode", NoMode)

# of the backward that runs in this thread, -1 outside of one
current_graph_task: Callable[[], int] = NAMES.take("torch._C._current_graph_task_id", lambda: -1)
# raises when a graph runs and the condition, a tensor, is false
assert_in_graph: Callable[[Any, str], None] = NAMES.take(
    "torch._assert_async", lambda condition, message: torch.ops.aten._assert_async.msg(condition, message)
)

# a class whose instances are trees of tensors, how to take one apart and how to put it together
register_pytree: Callable[..., Any] = NAMES.take("torch.utils._pytree.register_pytree_node", lambda *_, **__: None)

# --- SDPA's flash slot -------------------------------------------------------------------------------------------------------

# torch's operators for flash attention, and what answers each (`slot.answers`); the last is new in 2.12
FLASH_OPERATORS = {
    "_scaled_dot_product_flash_attention": "sdpa",
    "_scaled_dot_product_flash_attention_backward": "sdpa_backward",
    "_flash_attention_forward": "flash",
    "_flash_attention_backward": "flash_backward",
    "_flash_attention_forward_no_dropout_inplace": "flash_in_place",
}
# which kernel SDPA takes for q, k, v, as a number; the order in which it asks them; None: not to be had
which_kernel: Any = NAMES.take("torch._fused_sdp_choice", None)
kernel_order: Any = NAMES.take("torch._C._get_sdp_priority_order", None)
set_kernel_order: Any = NAMES.take("torch._C._set_sdp_priority_order", None)

# --- for the doctor and the benchmarks ---------------------------------------------------------------------------------------


def _multiply(cycles: int) -> None:
    """Products of which one takes more than 2 ** 20 cycles of any GPU."""
    x = torch.zeros(4096, 4096, device="cuda")
    for _ in range(-(-cycles >> 20)):
        x = x @ x


# a number of cycles, in which the current stream is busy
keep_busy: Callable[[int], None] = NAMES.take("torch.cuda._sleep", _multiply)


def compiler_settings() -> Any:
    """Settings of torch.compile's gradients; a namespace that changes nothing where they are missing."""
    return NAMES.take("torch._functorch.config", SimpleNamespace())
