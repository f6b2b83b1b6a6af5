"""The operators of both directions, their shapes for the compiler, and the autograd glue; `second_operators` differentiates on.

`backlight::attention` runs a backend's forward, `backlight::attention_backward` its backward. A spec crosses the operator
boundary as plain scalars (`SCALARS`), packed and unpacked only here. Operators are for what looks at a call before it runs:
compilers, transforms, modes, tensor subclasses, profilers. Where nothing does, `direct` calls the backend without them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import rules, running
from backlight._private.torch import forward_mode, tracing, transforms_active
from backlight.call import Call, call_with
from backlight.derivatives import NO_TANGENT_IN_GRAPH
from backlight.spec import GRADIENTS, LEARNED, TENSOR_NAMES, TENSORS, TERM_NAMES, AttentionSpec, Manner

SCHEMA = ", ".join(f"Tensor{'?' if each.optional else ''} {each.name}" for each in TENSORS)
SCALARS = (
    "bool causal, SymInt? left, SymInt? right, float? scale, float? softcap, SymInt bias_origin, float? alpha, "
    f"{', '.join(f'bool {name}' for name in Manner._fields)}, bool trusted, str? backend"
)
library = torch.library.Library("backlight", "DEF")
library.define(f"attention({SCHEMA}, {SCALARS}, bool save_u) -> (Tensor, Tensor, Tensor, Tensor)")
library.define(
    f"attention_backward({SCHEMA}, {SCALARS}, Tensor y, Tensor lse, Tensor u, Tensor dy, Tensor? dlse, bool[] needs)"
    f" -> ({', '.join(['Tensor'] * len(GRADIENTS))})"
)


def pack(call: Call, backend: str | None) -> tuple[Any, ...]:
    """The operator's arguments up to `save_u`: tensors, then scalars."""
    spec = call.spec
    # compilers do not follow `manner_of`
    manner = [getattr(call, name) for name in Manner._fields]
    return (
        *[getattr(call, name) for name in TENSOR_NAMES],
        *(spec.causal, *spec.window, spec.scale, spec.softcap, spec.bias_origin, spec.alpha),
        *(*manner, call.trusted, backend),
    )


def unpack(args: tuple[Any, ...]) -> tuple[Call, str | None]:
    tensors = dict(zip(TENSOR_NAMES, args, strict=False))
    causal, left, right, scale, softcap, bias_origin, alpha, *manner, trusted, backend = args[len(TENSOR_NAMES) :]
    spec = AttentionSpec(
        causal=causal,
        window=(left, right),
        scale=scale,
        softcap=softcap,
        bias_origin=bias_origin,
        alpha=alpha,
        **{name: tensors[name] is not None for name in TERM_NAMES},
    )
    call = call_with(spec, tuple(tensors.values()), manner)
    call.trusted = trusted
    return call, backend


# --- backends ----------------------------------------------------------------------------------------------------------------


def _attention(*args: Any) -> tuple[Tensor, ...]:
    *call_args, save_u = args
    call, backend = unpack(tuple(call_args))
    y, lse, *others = running.forward(call, backend, save_u)
    return y, lse, *(y.new_empty(0) if x is None else x for x in others)


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    *call_args, y, lse, u, dy, dlse, needs = args
    call, backend = unpack(tuple(call_args))
    # beside a tangent nobody has kept a low half
    kept = u if call.spec.keeps_u or (call.exact_delta and u.numel()) else None
    grads = running.backward(call, backend, y, lse, kept, dy, dlse, tuple(needs))
    return tuple(grads[name] if name in grads else y.new_empty(0) for name in GRADIENTS)


library.impl("attention", _attention, "CompositeExplicitAutograd")
library.impl("attention_backward", _attention_backward, "CompositeExplicitAutograd")


@torch.library.register_vmap("backlight::attention", lib=library)
def _attention_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    from backlight import batching

    return batching.attention(torch.ops.backlight.attention, info.batch_size, in_dims, args)


@torch.library.register_vmap("backlight::attention_backward", lib=library)
def _attention_backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    from backlight import batching

    return batching.attention_backward(torch.ops.backlight.attention_backward, info.batch_size, in_dims, args)


# --- shapes for fake tensors -------------------------------------------------------------------------------------------------


@torch.library.register_fake("backlight::attention", lib=library)
def _attention_fake(*args: Any) -> tuple[Tensor, ...]:
    *call_args, save_u = args
    call, _ = unpack(tuple(call_args))
    y, lse = empty_outputs(call)
    u = torch.empty_like(y) if save_u and call.keeps else y.new_empty(0)
    return y, lse, u, torch.empty_like(lse) if call.max_logit else y.new_empty(0)


@torch.library.register_fake("backlight::attention_backward", lib=library)
def _attention_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    *call_args, y, _lse, _u, _dy, _dlse, needs = args
    call, _ = unpack(tuple(call_args))
    inputs = [getattr(call, name) for name in LEARNED]
    return tuple(
        torch.empty_like(x) if need and x is not None else y.new_empty(0) for x, need in zip(inputs, needs, strict=True)
    )


def empty_outputs(call: Call) -> tuple[Tensor, Tensor]:
    """Uninitialised (y, lse) of a call: y in the dimension order of q's strides, lse contiguous."""
    dv = call.v.shape[-1]
    y = torch.empty_like(call.q) if dv == call.q.shape[-1] else call.q.new_empty(*call.q.shape[:3], dv)
    return y, call.q.new_empty(call.q.shape[:3], dtype=call.accumulator_dtype)


# --- autograd ----------------------------------------------------------------------------------------------------------------


def run() -> rules.Run:
    """The operators by which derivatives of one are computed; what stands for them where a transform has come since."""
    if transformed():
        from backlight import functional

        return functional.RUN
    ops = torch.ops.backlight
    return rules.Run(ops.attention_backward, ops.attention_jvp, ops.attention_second)


def _attention_gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None, *_none: None) -> tuple[Any, ...]:
    return rules.gradients(ctx, dy, dlse, run())


def _attention_twice(ctx: Any, *hats: Tensor | None) -> tuple[Any, ...]:
    return rules.twice(ctx, hats, run())


def keeping(keep: Any) -> Any:
    """torch gives arguments by name, and calls them as it likes."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        keep(ctx, inputs, output)

    return setup_context


torch.library.register_autograd(
    "backlight::attention", _attention_gradients, setup_context=keeping(rules.keep_forward), lib=library
)
torch.library.register_autograd(
    "backlight::attention_backward", _attention_twice, setup_context=keeping(rules.keep_backward), lib=library
)


def transformed() -> bool:
    """Whether torch.func or forward mode is at work, or may be: operators are followed through one level of it alone.

    Does not ask `is_compiling`: where a graph breaks, compilers compile this function by itself, and it would say yes.
    """
    # a tracer records operators
    return bool(transforms_active() or forward_mode._current_level >= 0) and not tracing()


# --- the call ----------------------------------------------------------------------------------------------------------------


def attention(call: Call, backend: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """(y, lse, largest logits of rows) of a bound call, through the operators; the first two are differentiable."""
    args = pack(call, backend)
    compiling = torch.compiler.is_compiling()
    if transforms_active() if compiling else transformed():
        from backlight import in_graph

        y, lse, _, peaks = (in_graph.attention if compiling else in_graph.attention_outside)(*args)
    elif compiling and forward_mode._current_level >= 0:
        # no tangent is followed through a graph, so a call inside `dual_level` may lose one
        raise NotImplementedError(NO_TANGENT_IN_GRAPH)
    else:
        # u is needed by the backward alone
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in args[: len(LEARNED)])
        y, lse, _, peaks = torch.ops.backlight.attention(*args, call.keeps and wanted)
    return y, lse, peaks
