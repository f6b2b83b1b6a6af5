"""The torch operators of a call in e4m3: both directions, their shapes for the compiler, the autograd glue.

`backlight::attention_fp8` takes the tensors and scalars of `backlight::attention`, of which k and v, and q too, may be in e4m3
already; then their scales come as well. Its backward rounds once more: nothing is kept but what came in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import operators
from backlight.call import Call
from backlight.fp8 import calls
from backlight.quantising import Keys, Quantised
from backlight.spec import GRADIENTS, LEARNED, TENSOR_NAMES

NO_SECOND = "attention in e4m3 has no second derivative (create_graph=True): its gradient passes through a rounding"
# of keys, then of queries
SCALES = ("k_scale", "v_scale", "mean", "q_scale", "offset")
N_TENSORS, N_SCALES, N_LEARNED = len(TENSOR_NAMES), len(SCALES), len(LEARNED)
GIVEN = f"{operators.SCHEMA}, {', '.join(f'Tensor? {name}' for name in SCALES)}, ScalarType? dtype, {operators.SCALARS}"
library = torch.library.Library("backlight", "FRAGMENT")
library.define(f"attention_fp8({GIVEN}) -> (Tensor, Tensor)")
library.define(
    f"attention_fp8_backward({GIVEN}, Tensor y, Tensor lse, Tensor dy, Tensor? dlse, bool[] needs)"
    f" -> ({', '.join(['Tensor'] * len(GRADIENTS))})"
)
N_GIVEN = N_TENSORS + N_SCALES + 1 + operators.SCALARS.count(",") + 1


def pack(call: Call, given: Quantised | Keys | None, backend: str | None) -> tuple[Any, ...]:
    """The operator's arguments."""
    q, k, v, *terms = operators.pack(call, backend)
    scales: tuple[Any, ...] = (None,) * N_SCALES
    dtype = None
    if given is not None:
        keys = given if isinstance(given, Keys) else given.keys
        k, v, scales = keys.k, keys.v, (keys.k_scale, keys.v_scale, keys.mean if keys.centred else None, None, None)
        if isinstance(given, Quantised):
            q, scales, dtype = given.q, (*scales[:3], given.q_scale, given.offset), given.dtype
    return (q, k, v, *terms[: N_TENSORS - 3], *scales, dtype, *terms[N_TENSORS - 3 :])


def unpack(args: tuple[Any, ...]) -> tuple[Call, Keys | None, Quantised | None, str | None]:
    """The call, in which tensors without memory stand for what is in e4m3; what is."""
    q, k, v, *terms = args[:N_TENSORS]
    k_scale, v_scale, mean, q_scale, offset = args[N_TENSORS : N_TENSORS + N_SCALES]
    dtype, *scalars = args[N_TENSORS + N_SCALES :]
    keys = None
    stand_ins: tuple[Any, ...] = q, k, v
    if k_scale is not None:
        centred = mean is not None
        keys = Keys(k, v, k_scale, v_scale, mean if centred else torch.zeros_like(v_scale), centred)
        dtype = q.dtype if dtype is None else dtype
        stand_ins = (stand_in(q, dtype) if q_scale is not None else q, *(stand_in(k, dtype) for _ in range(2)))
    call, backend = operators.unpack((*stand_ins, *terms, *scalars))
    queries = None if q_scale is None else Quantised(q, q_scale, offset, keys, call.scale, dtype)  # type: ignore[arg-type]
    return call, keys, queries, backend


def stand_in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a shape and no memory to speak of."""
    return torch.zeros((), dtype=dtype, device=x.device).expand(x.shape)


def _attention(*args: Any) -> tuple[Tensor, Tensor]:
    call, keys, queries, backend = unpack(args)
    if queries is None:
        queries = calls.quantise(call) if keys is None else calls.queries_of(call, keys)
    return calls.forward(call, queries, backend)


def _attention_backward(*args: Any) -> tuple[Tensor, ...]:
    *given, y, lse, dy, dlse, needs = args
    call, keys, _, _ = unpack(tuple(given))
    grads = calls.backward(call, keys, y, lse, dy, dlse, tuple(needs))
    return tuple(grads[name] if name in grads else y.new_empty(0) for name in GRADIENTS)


library.impl("attention_fp8", _attention, "CompositeExplicitAutograd")
library.impl("attention_fp8_backward", _attention_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("backlight::attention_fp8", lib=library)
def _attention_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call, *_ = unpack(args)
    shape = (*call.q.shape[:3], call.v.shape[-1])
    return (
        torch.empty(shape, dtype=call.q.dtype, device=call.q.device),
        torch.empty(shape[:3], dtype=torch.float32, device=call.q.device),
    )


@torch.library.register_fake("backlight::attention_fp8_backward", lib=library)
def _attention_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    *given, y, _lse, _dy, _dlse, needs = args
    call, *_ = unpack(tuple(given))
    inputs = [getattr(call, name) for name in LEARNED]
    return tuple(
        torch.empty_like(x) if need and x is not None else y.new_empty(0) for x, need in zip(inputs, needs, strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[: N_TENSORS + N_SCALES], *output)
    ctx.scalars = inputs[N_TENSORS + N_SCALES :]


def _gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    none = (None,) * N_GIVEN
    if dy is None and dlse is None:
        return none
    if torch.is_grad_enabled():
        raise NotImplementedError(NO_SECOND)
    *tensors, y, lse = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:N_LEARNED])
    dy = torch.zeros_like(y) if dy is None else dy
    found = torch.ops.backlight.attention_fp8_backward(*tensors, *ctx.scalars, y, lse, dy, dlse, needs)
    return (*(grad if need else None for grad, need in zip(found, needs, strict=True)), *none[N_LEARNED:])


torch.library.register_autograd("backlight::attention_fp8", _gradients, setup_context=operators.keeping(_keep), lib=library)
