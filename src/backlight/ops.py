"""The two operators, their shapes for the compiler, and the autograd glue between them.

`backlight::attention` runs a backend's forward, `backlight::attention_backward` its backward. A spec crosses the operator
boundary as plain scalars (`SCALARS`), packed and unpacked only here. Backends are imported when a call first needs one.

Operators are for those who look at a call before it runs: compilers, transforms, modes, tensor subclasses, profilers. When
nobody does (`_unobserved`), the same backend is called without them: crossing the dispatcher four times costs more host time
than everything else in a small call.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack, is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from backlight import batching, registry
from backlight.call import Call
from backlight.spec import AttentionSpec

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, Tensor? tau, Tensor? gate, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
SCALARS = "bool causal, int? left, int? right, float? scale, float? softcap, int bias_origin, bool deterministic, str? backend"
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink", "dtau", "dgate")

_library = torch.library.Library("backlight", "DEF")
_library.define(f"attention({TENSORS}, {SCALARS}, bool save_u) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"attention_backward({TENSORS}, {SCALARS}, Tensor y, Tensor lse, Tensor u, Tensor dy, Tensor? dlse, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

N_TENSORS, N_SCALARS = 9, 8


def pack(call: Call, backend: str | None) -> tuple[Any, ...]:
    """The operator's arguments up to `save_u`: tensors, then scalars."""
    spec = call.spec
    return (
        *(call.q, call.k, call.v, call.bias, call.sink, call.tau, call.gate, call.cu_seqlens_q, call.cu_seqlens_k),
        *(spec.causal, *spec.window, spec.scale, spec.softcap, spec.bias_origin, call.deterministic, backend),
    )


def unpack(args: tuple[Any, ...]) -> tuple[Call, str | None]:
    q, k, v, bias, sink, tau, gate, cu_q, cu_k, causal, left, right, scale, softcap, bias_origin, deterministic, backend = args
    spec = AttentionSpec(
        causal=causal,
        window=(left, right),
        scale=scale,
        softcap=softcap,
        bias=bias is not None,
        bias_origin=bias_origin,
        sink=sink is not None,
        tau=tau is not None,
        gate=gate is not None,
    )
    return Call(spec, q, k, v, bias, sink, tau, gate, cu_q, cu_k, deterministic), backend


# --- kernels -----------------------------------------------------------------------------------------------------------------


def _forward(call: Call, backend: str | None, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    if _elsewhere(call.q):
        with torch.cuda.device(call.q.device):
            return registry.choose(call, backend).forward(call, save_u)
    return registry.choose(call, backend).forward(call, save_u)


def _backward(
    call: Call, backend: str | None, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: Any
) -> dict[str, Tensor]:
    if _elsewhere(call.q):
        with torch.cuda.device(call.q.device):
            return registry.choose(call, backend).backward(call, y, lse, u, dy, dlse, _names(needs))
    return registry.choose(call, backend).backward(call, y, lse, u, dy, dlse, _names(needs))


# `torch.cuda.current_device` without its check that CUDA is there: a tensor is
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _elsewhere(tensor: Tensor) -> bool:
    """On a GPU that is not the current one: kernels start on the current one."""
    return tensor.is_cuda and tensor.get_device() != _current_device()


@cache
def _names(needs: tuple[bool, ...]) -> frozenset[str]:
    return frozenset(name for name, need in zip(GRADIENTS, needs, strict=True) if need)


def _attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call_args, save_u = args
    call, backend = unpack(tuple(call_args))
    y, lse, u = _forward(call, backend, save_u)
    return y, lse, y.new_empty(0) if u is None else u


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    *call_args, y, lse, u, dy, dlse, needs = args
    call, backend = unpack(tuple(call_args))
    grads = _backward(call, backend, y, lse, u if call.tau is not None else None, dy, dlse, tuple(needs))
    return tuple(grads[name] if name in grads else y.new_empty(0) for name in GRADIENTS)


_library.impl("attention", _attention, "CompositeExplicitAutograd")
_library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")


torch.library.register_vmap("backlight::attention", batching.attention, lib=_library)
torch.library.register_vmap("backlight::attention_backward", batching.attention_backward, lib=_library)


# --- shapes for fake tensors -------------------------------------------------------------------------------------------------


@torch.library.register_fake("backlight::attention", lib=_library)
def _attention_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *call_args, save_u = args
    call, _ = unpack(tuple(call_args))
    y, lse = empty_outputs(call)
    return y, lse, torch.empty_like(y) if save_u and call.tau is not None else y.new_empty(0)


@torch.library.register_fake("backlight::attention_backward", lib=_library)
def _attention_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    *call_args, y, _lse, _u, _dy, _dlse, needs = args
    call, _ = unpack(tuple(call_args))
    inputs = (call.q, call.k, call.v, call.bias, call.sink, call.tau, call.gate)
    return tuple(
        torch.empty_like(x) if need and x is not None else y.new_empty(0) for x, need in zip(inputs, needs, strict=True)
    )


def empty_outputs(call: Call) -> tuple[Tensor, Tensor]:
    """Uninitialised (y, lse) of a call: y in the dimension order of q's strides, lse contiguous."""
    dv = call.v.shape[-1]
    y = torch.empty_like(call.q) if dv == call.q.shape[-1] else call.q.new_empty(*call.q.shape[:3], dv)
    return y, call.q.new_empty(call.q.shape[:3], dtype=call.accumulator_dtype)


# --- autograd ----------------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        # u is needed by the backward alone
        with torch._C._AutoDispatchBelowAutograd():
            y, lse, u = torch.ops.backlight.attention.default.redispatch(keyset, *args[:-1], True)
        ctx.save_for_backward(*args[:N_TENSORS], y, lse, u)
        ctx.scalars = args[N_TENSORS : N_TENSORS + N_SCALARS]
        ctx.mark_non_differentiable(u)
        return y, lse, u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None, _du: None) -> tuple[Any, ...]:
        *tensors, y, lse, u = ctx.saved_tensors
        needs = ctx.needs_input_grad[1 : 1 + len(GRADIENTS)]
        none = (None,) * (1 + N_TENSORS + N_SCALARS + 1)
        if dy is None and dlse is None:
            return none
        if dy is None:
            dy = torch.zeros_like(y)
        grads = torch.ops.backlight.attention_backward(*tensors, *ctx.scalars, y, lse, u, dy, dlse, list(needs))
        used = tuple(grad if need else None for grad, need in zip(grads, needs, strict=True))
        return (None, *used, *none[1 + len(GRADIENTS) :])


def _attention_autograd(keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    below = keyset & torch._C._after_autograd_keyset
    tensors = args[: len(GRADIENTS)]
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        if torch._C._are_functorch_transforms_active():
            return _apply_at_this_level(below, *args)
        return _Attention.apply(below, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.backlight.attention.default.redispatch(below, *args)


def _refuse_tangents(tensors: tuple[Tensor | None, ...]) -> None:
    """Below this point a tangent would be dropped, which reads as a derivative of zero."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("backlight.attention has no forward-mode derivative (jvp); use reverse mode (vjp, grad)")


def _apply_at_this_level(keyset: Any, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`_Attention.apply` inside torch.func.grad: the dispatcher has already come down to one level of it."""
    if sum(level.key() == TransformType.Grad for level in get_interpreter_stack() or ()) > 1:
        raise NotImplementedError("backlight.attention has no second derivative: torch.func.grad may be applied once")
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, _Attention).apply(keyset, *args)


_library.impl("attention", _attention_autograd, "Autograd", with_keyset=True)


# --- without operators -------------------------------------------------------------------------------------------------------


class _Unobserved(torch.autograd.Function):
    """`_Attention` on bound calls; what autograd must see of one comes beside it."""

    @staticmethod
    def forward(ctx: Any, call: Call, backend: str | None, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, lse, u = _forward(call, backend, True)
        ctx.save_for_backward(*tensors, call.cu_seqlens_q, call.cu_seqlens_k, y, lse, u)
        ctx.options = call.spec, call.deterministic, backend
        return y, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return (_gradients_once if torch.is_grad_enabled() else _gradients)(ctx, dy, dlse)


def _gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k, y, lse, u = ctx.saved_tensors
    needs = ctx.needs_input_grad[2:]
    if dy is None:
        if dlse is None:
            return (None,) * (2 + len(GRADIENTS))
        dy = torch.zeros_like(y)
    spec, deterministic, backend = ctx.options
    call = Call(spec, q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k, deterministic)
    if _unobserved((q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k, y, dy, dlse)):
        grads = _backward(call, backend, y, lse, u, dy, dlse, needs)
        return (None, None, *map(grads.get, GRADIENTS))
    args = (*pack(call, backend), y, lse, y.new_empty(0) if u is None else u, dy, dlse, list(needs))
    found = torch.ops.backlight.attention_backward(*args)
    return (None, None, *(grad if need else None for grad, need in zip(found, needs, strict=True)))


_gradients_once = once_differentiable(_gradients)


def _unobserved(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing but autograd looks at operators on these tensors."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return False
    for x in tensors:
        if x is None:
            continue
        # legacy: the gradients of torch.autograd.grad(..., is_grads_batched=True)
        if type(x) not in PLAIN or x.is_meta or is_functorch_wrapped_tensor(x) or is_legacy_batchedtensor(x):
            return False
    return True


PLAIN = (Tensor, torch.nn.Parameter)
# the checks of `Function.apply` are those of `_unobserved`
_apply_unobserved = super(torch.autograd.Function, _Unobserved).apply


def attention(call: Call, backend: str | None) -> tuple[Tensor, Tensor]:
    """(y, lse) of a bound call, differentiable."""
    tensors = (call.q, call.k, call.v, call.bias, call.sink, call.tau, call.gate)
    if not _unobserved((*tensors, call.cu_seqlens_q, call.cu_seqlens_k)):
        y, lse, _ = torch.ops.backlight.attention(*pack(call, backend), False)
    elif torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        y, lse = _apply_unobserved(call, backend, *tensors)
    else:
        y, lse, _ = _forward(call, backend, False)
    return y, lse
