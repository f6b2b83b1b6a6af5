"""`backlight::attention_jvp` and `backlight::attention_second`: the operators of sections 10 and 11 of docs/math.md.

Arguments and results are those that `rules` lists; gradients that nobody needs, and results that were given, come back empty.
What only some calls need is imported by them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import rules
from backlight._private.torch import forward_mode, transforms_active
from backlight.call import Call
from backlight.derivatives import NO_TANGENT_IN_GRAPH
from backlight.operators import SCALARS, SCHEMA, empty_outputs, keeping, library, pack, run, transformed, unpack
from backlight.rules import N_CALL, N_LEARNED
from backlight.spec import LEARNED

TANGENTS = ", ".join(f"Tensor? t{name}" for name in LEARNED)
NEEDS = (*(f"d{name}" for name in LEARNED), *(f"dt{name}" for name in LEARNED))
library.define(
    f"attention_jvp({SCHEMA}, {SCALARS}, {TANGENTS}, Tensor? y, Tensor? lse, Tensor? u) -> ({', '.join(['Tensor'] * 6)})"
)
library.define(
    f"attention_second({SCHEMA}, {SCALARS}, {TANGENTS}, Tensor y, Tensor lse, Tensor u, Tensor ty, Tensor tlse, Tensor tu, "
    f"Tensor? dy, Tensor? dlse, Tensor? dty, Tensor? dtlse, bool[] needs) -> ({', '.join(['Tensor'] * len(NEEDS))})"
)


def _tangents(args: tuple[Any, ...]) -> dict[str, Tensor]:
    """By the name of the input, those that were given."""
    given = zip(LEARNED, args[N_CALL : N_CALL + N_LEARNED], strict=True)
    return {name: t for name, t in given if t is not None}


def _some(x: Tensor | None) -> Tensor | None:
    """A tensor that is no placeholder."""
    return x if x is not None and x.numel() else None


# --- backends ----------------------------------------------------------------------------------------------------------------


def _attention_jvp(*args: Any) -> tuple[Tensor, ...]:
    call, backend = unpack(args[:N_CALL])
    y, lse, u = args[-3:]
    known = None if y is None else (y, lse, u if call.spec.keeps_u else None)
    from backlight import differentiating

    found = differentiating.tangent(call, backend, _tangents(args), known)
    kept = (None, None, None) if known is not None else found[:3]
    # results of an operator are different tensors
    return tuple(call.q.new_empty(0) if x is None else x for x in (*kept, *found[3:]))


def _attention_second(*args: Any) -> tuple[Tensor, ...]:
    call, backend = unpack(args[:N_CALL])
    y, lse, u, ty, tlse, tu, *incoming, needs = args[N_CALL + N_LEARNED :]
    results = (y, lse, u if call.spec.keeps_u else None, ty, tlse, _some(tu) if call.spec.tau else None)
    wanted = frozenset(name for name, need in zip(NEEDS, needs, strict=True) if need)
    from backlight import differentiating

    found = differentiating.second(call, backend, _tangents(args), results, tuple(incoming), wanted)
    return tuple(found[name] if name in found else y.new_empty(0) for name in NEEDS)


library.impl("attention_jvp", _attention_jvp, "CompositeExplicitAutograd")
library.impl("attention_second", _attention_second, "CompositeExplicitAutograd")


@torch.library.register_vmap("backlight::attention_jvp", lib=library)
def _attention_jvp_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    from backlight import second_batching

    return second_batching.attention_jvp(torch.ops.backlight.attention_jvp, info.batch_size, in_dims, args)


@torch.library.register_vmap("backlight::attention_second", lib=library)
def _attention_second_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    from backlight import second_batching

    return second_batching.attention_second(torch.ops.backlight.attention_second, info.batch_size, in_dims, args)


# --- shapes for fake tensors -------------------------------------------------------------------------------------------------


@torch.library.register_fake("backlight::attention_jvp", lib=library)
def _attention_jvp_fake(*args: Any) -> tuple[Tensor, ...]:
    call, _ = unpack(args[:N_CALL])
    known = args[-3] is not None
    y, lse = args[-3:-1] if known else empty_outputs(call)
    nothing = call.q.new_empty
    with_u = call.spec.keeps_u
    tu = torch.empty_like(y) if call.spec.tau and "v" in _tangents(args) else nothing(0)
    tangents = torch.empty_like(y), torch.empty_like(lse), tu
    if known:
        return nothing(0), nothing(0), nothing(0), *tangents
    return y, lse, torch.empty_like(y) if with_u else nothing(0), *tangents


@torch.library.register_fake("backlight::attention_second", lib=library)
def _attention_second_fake(*args: Any) -> tuple[Tensor, ...]:
    inputs = (*args[:N_LEARNED], *args[N_CALL : N_CALL + N_LEARNED])
    q, needs = args[0], args[-1]
    return tuple(
        torch.empty_like(x) if need and x is not None else q.new_empty(0) for x, need in zip(inputs, needs, strict=True)
    )


# --- autograd ----------------------------------------------------------------------------------------------------------------


def _attention_jvp_gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    return rules.through_tangent(ctx, grads, run())


def _attention_second_gradients(ctx: Any, *hats: Tensor | None) -> tuple[Any, ...]:
    return rules.third(ctx, hats, run())


torch.library.register_autograd(
    "backlight::attention_jvp", _attention_jvp_gradients, setup_context=keeping(rules.keep_jvp), lib=library
)
torch.library.register_autograd(
    "backlight::attention_second", _attention_second_gradients, setup_context=keeping(rules.keep_second), lib=library
)


# --- the call ----------------------------------------------------------------------------------------------------------------


def attention_jvp(
    call: Call, tangents: tuple[Tensor | None, ...], backend: str | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((y, lse), (ty, tlse)) of a bound call and a tangent, or None, for each of its learned tensors; differentiable."""
    args = (*pack(call, backend), *tangents)
    compiling = torch.compiler.is_compiling()
    if transforms_active() if compiling else transformed():
        from backlight import in_graph

        found = (in_graph.attention_jvp if compiling else in_graph.attention_jvp_outside)(*args)
    elif compiling and forward_mode._current_level >= 0:
        raise NotImplementedError(NO_TANGENT_IN_GRAPH)
    else:
        found = torch.ops.backlight.attention_jvp(*args, None, None, None)
    y, lse, _, ty, tlse, _ = found
    return (y, lse), (ty, tlse)
