"""The two operators, their shapes for the compiler, and the autograd glue between them.

`backlight::attention` runs a backend's forward, `backlight::attention_backward` its backward. A spec crosses the operator
boundary as plain scalars (`SCALARS`), packed and unpacked only here. Backends are imported when a call first needs one.

Operators are for those who look at a call before it runs: compilers, transforms, modes, tensor subclasses, profilers. When
nobody does (`unobserved`), the same backend is called without them: crossing the dispatcher four times costs more host time
than everything else in a small call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backlight import batching, functional, registry
from backlight._private.torch import (
    apply_of,
    current_device,
    dispatch_modes,
    forward_mode,
    function_modes,
    is_batched,
    is_wrapped,
    profiling,
    tracing,
    transforms_active,
)
from backlight.call import Call, layout_of
from backlight.derivatives import NO_TANGENT, refuse_second
from backlight.spec import AttentionSpec

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sink, Tensor? tau, Tensor? gate, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k"
)
SCALARS = "bool causal, int? left, int? right, float? scale, float? softcap, int bias_origin, bool deterministic, str? backend"
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink", "dtau", "dgate")
# those of tensors with rows of their own
ROW_GRADIENTS = ("dq", "dk", "dv", "dgate")

_library = torch.library.Library("backlight", "DEF")
_library.define(f"attention({TENSORS}, {SCALARS}, bool save_u) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"attention_backward({TENSORS}, {SCALARS}, Tensor y, Tensor lse, Tensor u, Tensor dy, Tensor? dlse, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


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
            return _forward_here(call, backend, save_u)
    return _forward_here(call, backend, save_u)


def _forward_here(call: Call, backend: str | None, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    shared = call.shared
    again = None if shared is None else shared.get(save_u)
    found = None if again is None else again(registry.inputs(call))
    if found is None:
        chosen = registry.choose(call, backend)
        found = chosen.forward(call, save_u)
        _learn(chosen, call, (), save_u, save_u)
    return found


def _backward(
    call: Call, backend: str | None, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: Any
) -> dict[str, Tensor]:
    if _elsewhere(call.q):
        with torch.cuda.device(call.q.device):
            return _backward_here(call, backend, (y, lse, u, dy, dlse), needs)
    return _backward_here(call, backend, (y, lse, u, dy, dlse), needs)


def _backward_here(
    call: Call, backend: str | None, tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], needs: Any
) -> dict[str, Tensor]:
    shared = call.shared
    if shared is None:
        return registry.choose(call, backend).backward(call, *tensors, _names(needs))
    given = (*registry.inputs(call), *tensors)
    q, k, v, *_ = given
    # saved tensors may come back laid out in another way, from where hooks have put them
    key = (needs, k is q, v is q, v is k, *[None if x is None else layout_of(x) for x in given])
    again = shared.get(key)
    found = None if again is None else again(given)
    if found is None:
        chosen = registry.choose(call, backend)
        found = chosen.backward(call, *tensors, _names(needs))
        _learn(chosen, call, tensors, _names(needs), key)
    return found


def _learn(backend: Any, call: Call, tensors: tuple[Any, ...], choice: Any, key: Any) -> None:
    """How to do again what was done, if the backend can say and there are more calls of the kind."""
    if call.shared is not None and hasattr(backend, "again"):
        again = backend.again(call, tensors, choice)
        if again is not None:
            call.shared[key] = again


def _elsewhere(tensor: Tensor) -> bool:
    """On a GPU that is not the current one: kernels start on the current one."""
    return tensor.is_cuda and tensor.get_device() != current_device()


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


@torch.library.register_vmap("backlight::attention", lib=_library)
def _attention_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return batching.attention(torch.ops.backlight.attention, info.batch_size, in_dims, args)


@torch.library.register_vmap("backlight::attention_backward", lib=_library)
def _attention_backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    return batching.attention_backward(torch.ops.backlight.attention_backward, info.batch_size, in_dims, args)


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


def _attention_gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None, _du: None) -> tuple[Any, ...]:
    return functional.gradients(ctx, dy, dlse, torch.ops.backlight.attention_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    functional.keep(ctx, inputs, output)


torch.library.register_autograd("backlight::attention", _attention_gradients, setup_context=_keep, lib=_library)
# without it torch would take gradients for constants
torch.library.register_autograd("backlight::attention_backward", refuse_second, lib=_library)


def transformed() -> bool:
    """Whether torch.func or forward mode is at work, or may be: operators are followed through one level of it alone.

    Without a look at `is_compiling`: where a graph breaks, compilers take this function by itself, and say yes in it.
    """
    # what traces holds operators
    return bool(transforms_active() or forward_mode._current_level >= 0) and not tracing()


# --- without operators -------------------------------------------------------------------------------------------------------


class _Unobserved(torch.autograd.Function):
    """`_Attention` on bound calls; what autograd must see of one comes beside it: packed where the caller's tensors are."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, backend: str | None, return_lse: bool, *tensors: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        y, lse, u = _forward(call, backend, True)
        if _is_packed(tensors):
            # results, not views of something: in-place changes are seen
            y, lse = _packed(y).detach(), lse[0].detach()
        ctx.save_for_backward(*tensors, call.cu_seqlens_q, call.cu_seqlens_k, y, lse, u)
        ctx.options = call.spec, call.deterministic, backend, call.shared
        # a second output costs the engine more than it costs us to leave it out
        return (y, lse) if return_lse else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        return _gradients(ctx, dy, dlse)


def _gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k, y, lse, u = saved
    needs = ctx.needs_input_grad[3:]
    if dy is None:
        if dlse is None:
            return (None,) * (3 + len(GRADIENTS))
        dy = torch.zeros_like(y)
    # with gradients enabled (create_graph=True) autograd looks too: at gradients, which have none of their own
    packed, observed = _is_packed(saved), torch.is_grad_enabled() or not unobserved((*saved, dy, dlse))
    if packed:
        q, k, v, gate, y, dy = (None if x is None else x.transpose(0, 1)[None] for x in (q, k, v, gate, y, dy))
        lse, dlse = (None if x is None else x[None] for x in (lse, dlse))
    spec, deterministic, backend, shared = ctx.options
    call = Call(spec, q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k, deterministic)
    call.shared = shared
    if observed:
        args = (*pack(call, backend), y, lse, y.new_empty(0) if u is None else u, dy, dlse, list(needs))
        found = (functional.AttentionBackward.apply if transformed() else torch.ops.backlight.attention_backward)(*args)
        grads = {name: grad for name, grad, need in zip(GRADIENTS, found, needs, strict=True) if need}
    else:
        grads = _backward(call, backend, y, lse, u, dy, dlse, needs)  # type: ignore[arg-type]
    if packed:
        grads = {name: _packed(grad) if name in ROW_GRADIENTS else grad for name, grad in grads.items()}
    return (None, None, None, *map(grads.get, GRADIENTS))


def _is_packed(tensors: Sequence[Any]) -> bool:
    return tensors[0].dim() == 3


def _packed(x: Tensor) -> Tensor:
    """[1, H, T, D] as [T, H, D], in place."""
    return x[0].transpose(0, 1)


def unobserved(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing but autograd looks at operators on these tensors."""
    if (
        torch.compiler.is_compiling()
        or dispatch_modes()
        or function_modes()
        or transforms_active()
        or tracing()
        or profiling()
        or forward_mode._current_level >= 0
    ):
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in PLAIN or x.is_meta or is_wrapped(x) or is_batched(x):
            return False
    return True


PLAIN = (Tensor, torch.nn.Parameter)
# the checks of `Function.apply` are those of `unobserved`
_apply_unobserved = apply_of(_Unobserved)


def attention(call: Call, backend: str | None) -> tuple[Tensor, Tensor]:
    """(y, lse) of a bound call, differentiable."""
    if unobserved((*_inputs(call), call.cu_seqlens_q, call.cu_seqlens_k)):
        return attention_unobserved(call, backend, True)  # type: ignore[return-value]
    args = pack(call, backend)
    compiling = torch.compiler.is_compiling()
    if transforms_active() if compiling else transformed():
        from backlight import in_graph

        y, lse, _ = (in_graph.attention if compiling else in_graph.attention_outside)(*args)
    elif compiling and forward_mode._current_level >= 0:
        # a tangent is not followed through a graph; where there may be breaks in it, there may also be no tangent
        raise NotImplementedError(NO_TANGENT)
    else:
        # u is needed by the backward alone
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in _inputs(call))
        y, lse, _ = torch.ops.backlight.attention(*args, call.tau is not None and wanted)
    return y, lse


def attention_unobserved(
    call: Call, backend: str | None, return_lse: bool, packed: tuple[Tensor | None, ...] = ()
) -> tuple[Tensor, Tensor | None]:
    """`attention` where nobody looks; lse only where it is wanted.

    packed: the caller's q, k, v, bias, sink, tau, gate where those of the call are views that autograd has not seen; results
    are packed too.
    """
    tensors = packed or _inputs(call)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        found = _apply_unobserved(call, backend, return_lse, *tensors)
        return found if return_lse else (found, None)
    y, lse, _ = _forward(call, backend, False)
    return (_packed(y), lse[0]) if packed else (y, lse)


def _inputs(call: Call) -> tuple[Tensor | None, ...]:
    return call.q, call.k, call.v, call.bias, call.sink, call.tau, call.gate
