"""Derivatives of derivatives: how one operator of a call follows from the others (docs/math.md section 11).

Arguments, after the tensors and scalars of a call: `attention` takes save_u; `attention_backward` y, lse, u, dy, dlse, needs;
`attention_jvp` a tangent, or None, for each learned tensor, and y, lse, u where they are known; `attention_second` tangents, y,
lse, u, ty, tlse, tu, gradients at y, lse, ty and tlse, and needs. Results of a forward (y, lse, u) among the arguments are
functions of the tensors: derivatives by them are in those by the tensors already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.derivatives import NO_FORWARD_TWICE, NO_THIRD, Guard
from backlight.spec import LEARNED, TENSOR_NAMES, Manner

# causal, both ends of the window, scale, softcap, bias_origin and alpha come before the manner; trusted and backend after it
N_OPTIONS = 7
N_TENSORS, N_SCALARS, N_LEARNED = len(TENSOR_NAMES), N_OPTIONS + len(Manner._fields) + 2, len(LEARNED)
N_CALL = N_TENSORS + N_SCALARS
TAU, ENTMAX = (TENSOR_NAMES.index(name) for name in ("tau", "entmax"))
EXACT_DELTA = N_OPTIONS + Manner._fields.index("exact_delta")
Maybe = Tensor | None
NONE: tuple[Maybe, ...] = (None,) * N_LEARNED


@dataclass(frozen=True)
class Run:
    """The operators, or autograd functions that stand for them."""

    backward: Callable[..., Any]
    jvp: Callable[..., Any]
    second: Callable[..., Any]


# --- what is kept ------------------------------------------------------------------------------------------------------------


def _save(ctx: Any, tensors: Sequence[Maybe], scalars: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.scalars = scalars


def keep_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Of `attention`."""
    y, lse, u, peaks = output
    ctx.mark_non_differentiable(u, peaks)
    # as many as the direct path saves: checkpoints may recompute by one what ran by the other
    _save(ctx, (*inputs[:N_TENSORS], y, lse, u if _keeps(inputs, inputs[N_TENSORS:]) else None), inputs[N_TENSORS:N_CALL])
    ctx.saves_u = inputs[-1]


def _keeps(tensors: Sequence[Maybe], scalars: Sequence[Any]) -> bool:
    """`Call.keeps`."""
    return _keeps_u(tensors) or scalars[EXACT_DELTA]


def _keeps_u(tensors: Sequence[Maybe]) -> bool:
    """As `AttentionSpec.keeps_u`, by the tensors of a call."""
    return tensors[TAU] is not None or tensors[ENTMAX] is not None


def keep_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, (*inputs[:N_TENSORS], *inputs[N_CALL:-1]), inputs[N_TENSORS:N_CALL])
    ctx.needs = tuple(inputs[-1])


def keep_jvp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, lse, u, ty, tlse, tu = output
    known = inputs[N_CALL + N_LEARNED :]
    ctx.known = known[0] is not None
    ctx.mark_non_differentiable(*((y, lse, u, tu) if ctx.known else (u, tu)))
    forward = known if ctx.known else (y, lse, u)
    tangents = inputs[N_CALL : N_CALL + N_LEARNED]
    _save(ctx, (*inputs[:N_TENSORS], *tangents, *forward, ty, tlse, tu), inputs[N_TENSORS:N_CALL])


def keep_second(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, (*inputs[:N_TENSORS], *inputs[N_CALL:-1]), inputs[N_TENSORS:N_CALL])
    ctx.needs = tuple(inputs[-1])


# --- reverse mode ------------------------------------------------------------------------------------------------------------


def gradients(ctx: Any, dy: Maybe, dlse: Maybe, run: Run) -> tuple[Any, ...]:
    """Backward of `attention`."""
    none = (None,) * (N_CALL + 1)
    if dy is None and dlse is None:
        return none
    *tensors, y, lse, u = ctx.saved_tensors
    needs = ctx.needs_input_grad[:N_LEARNED]
    if not _keeps(tensors, ctx.scalars):
        # a tensor without the axes of transforms
        u = torch.empty(0, dtype=y.dtype, device=y.device)
    elif not ctx.saves_u:
        u = torch.ops.backlight.attention(*tensors, *ctx.scalars, True)[2]
    found = run.backward(*tensors, *ctx.scalars, y, lse, u, torch.zeros_like(y) if dy is None else dy, dlse, list(needs))
    return (*_used(found, needs), *none[N_LEARNED:])


def twice(ctx: Any, hats: Sequence[Maybe], run: Run) -> tuple[Any, ...]:
    """Backward of `attention_backward`: the gradients that came in are tangents now (I14)."""
    *tensors, y, lse, u, dy, dlse = ctx.saved_tensors
    hats = _given(hats, ctx.needs, tensors)
    rest = N_CALL - N_LEARNED
    if not any(hat is not None for hat in hats):
        return (None,) * (N_CALL + 6)
    wanted = ctx.needs_input_grad[:N_LEARNED]
    *_, ty, tlse, tu = run.jvp(*tensors, *ctx.scalars, *hats, y, lse, u)
    found = NONE
    if any(wanted):
        found = _second(run, tensors, ctx.scalars, hats, (y, lse, u, ty, tlse, tu), (None, None, dy, dlse), (*wanted, *_no()))
        found = found[:N_LEARNED]
    # y, lse, u, dy, dlse, needs
    return *_used(found, wanted), *(None,) * rest, None, None, None, ty, None if dlse is None else tlse, None


def through_tangent(ctx: Any, grads: Sequence[Maybe], run: Run) -> tuple[Any, ...]:
    """Backward of `attention_jvp`; beside a tangent that nobody differentiates it is the ordinary one."""
    saved = ctx.saved_tensors
    tensors, tangents, results = saved[:N_TENSORS], saved[N_TENSORS : N_TENSORS + N_LEARNED], saved[N_TENSORS + N_LEARNED :]
    dy, dlse, _, dty, dtlse, _ = grads
    wanted = ctx.needs_input_grad[:N_LEARNED]
    wanted_t = ctx.needs_input_grad[N_CALL : N_CALL + N_LEARNED]
    primal, tangent = NONE, NONE
    if dty is not None or dtlse is not None:
        needs = (*wanted, *wanted_t)
        found = _used(_second(run, tensors, ctx.scalars, tangents, results, (dy, dlse, dty, dtlse), needs), needs)
        primal, tangent = found[:N_LEARNED], found[N_LEARNED:]
    elif dy is not None or dlse is not None:
        y, lse, u, *_ = results
        incoming = torch.zeros_like(y) if dy is None else dy
        primal = _used(run.backward(*tensors, *ctx.scalars, y, lse, u, incoming, dlse, list(wanted)), wanted)
    return *primal, *(None,) * (N_CALL - N_LEARNED), *tangent, None, None, None


def third(ctx: Any, hats: Sequence[Maybe], run: Run) -> tuple[Any, ...]:
    """Backward of `attention_second` by what it is linear in: the tangents and the gradients at y and lse.

    Its arguments that it is not linear in came through `Guard`.
    """
    tensors, _, (y, lse, u, *_), (dy, dlse, dty, dtlse) = _parts(ctx)
    hats = _given(hats[:N_LEARNED], ctx.needs, tensors)
    by_tangents, ty, tlse = NONE, None, None
    if any(hat is not None for hat in hats):
        *_, ty, tlse, tu = run.jvp(*tensors, *ctx.scalars, *hats, y, lse, u)
        wanted = ctx.needs_input_grad[N_CALL : N_CALL + N_LEARNED]
        if any(wanted) and not (dty is None and dtlse is None):
            results, incoming = (y, lse, u, ty, tlse, tu), (None, None, dty, dtlse)
            found = _second(run, tensors, ctx.scalars, hats, results, incoming, (*wanted, *_no()))
            by_tangents = _used(found[:N_LEARNED], wanted)
    by_outputs = (None if dy is None else ty, None if dlse is None else tlse)
    return *(None,) * N_CALL, *by_tangents, *(None,) * 6, *by_outputs, None, None, None


# --- forward mode ------------------------------------------------------------------------------------------------------------


def pushed(ctx: Any, tangents: Sequence[Maybe], run: Run) -> tuple[Any, ...]:
    """Tangents of `attention`."""
    *tensors, y, lse, u = ctx.saved_tensors
    tangents = tangents[:N_LEARNED]
    if not any(t is not None for t in tangents):
        return None, None, None, None
    u = torch.empty(0, dtype=y.dtype, device=y.device) if u is None else u
    *_, ty, tlse, _ = run.jvp(*tensors, *ctx.scalars, *tangents, y, lse, u)
    return ty, tlse, None, None


def pushed_backward(ctx: Any, tangents: Sequence[Maybe], run: Run) -> tuple[Any, ...]:
    """Tangents of `attention_backward`: forward over reverse."""
    *tensors, y, lse, u, dy, dlse = ctx.saved_tensors
    moving, (ty, tlse, _, tdy, tdlse) = tangents[:N_LEARNED], tangents[N_CALL : N_CALL + 5]
    if not any(t is not None for t in moving):
        tdy = torch.zeros_like(dy) if tdy is None else tdy
        return run.backward(*tensors, *ctx.scalars, y, lse, u, tdy, tdlse, list(ctx.needs))
    tu = u
    # of tau alone it is kept
    if tensors[TAU] is not None or ty is None or tlse is None:
        *_, ty, tlse, tu = run.jvp(*tensors, *ctx.scalars, *moving, y, lse, u)
    results, incoming = (y, lse, u, ty, tlse, tu), (tdy, tdlse, dy, dlse)
    found = _second(run, tensors, ctx.scalars, moving, results, incoming, (*ctx.needs, *_no()))
    # placeholders are tangents of placeholders
    return found[:N_LEARNED]


def pushed_jvp(ctx: Any, tangents: Sequence[Maybe], run: Run) -> tuple[Any, ...]:
    """Tangents of `attention_jvp` by its tangents, in which it is linear."""
    if any(t is not None for t in tangents[:N_LEARNED]):
        raise NotImplementedError(NO_FORWARD_TWICE)
    saved = ctx.saved_tensors
    tensors, (y, lse, u, *_) = saved[:N_TENSORS], saved[N_TENSORS + N_LEARNED :]
    *_, ty, tlse, _ = run.jvp(*tensors, *ctx.scalars, *tangents[N_CALL : N_CALL + N_LEARNED], y, lse, u)
    still = (None, None) if ctx.known else (torch.zeros_like(y), torch.zeros_like(lse))
    return *still, None, ty, tlse, None


def pushed_second(ctx: Any, tangents: Sequence[Maybe], run: Run) -> tuple[Any, ...]:
    """Tangents of `attention_second` by what it is linear in."""
    tensors, given, (y, lse, u, *_), (_, _, dty, dtlse) = _parts(ctx)
    moving, (tdy, tdlse, *rest) = tangents[N_CALL : N_CALL + N_LEARNED], tangents[N_CALL + N_LEARNED + 6 : -1]
    if any(t is not None for t in (*tangents[:N_LEARNED], *rest)):
        raise NotImplementedError(NO_THIRD)
    *_, ty, tlse, tu = run.jvp(*tensors, *ctx.scalars, *moving, y, lse, u)
    results, incoming = (y, lse, u, ty, tlse, tu), (tdy, tdlse, dty, dtlse)
    found = _second(run, tensors, ctx.scalars, moving, results, incoming, (*ctx.needs[:N_LEARNED], *_no()))
    # those by tangents do not depend on tangents
    assert y is not None
    still = [
        torch.zeros_like(x) if need and x is not None else torch.empty(0, dtype=y.dtype, device=y.device)
        for x, need in zip(given, ctx.needs[N_LEARNED:], strict=True)
    ]
    return *found[:N_LEARNED], *still


# --- parts -------------------------------------------------------------------------------------------------------------------


def _no() -> tuple[bool, ...]:
    return (False,) * N_LEARNED


def _used(found: Sequence[Maybe], needs: Sequence[bool]) -> tuple[Maybe, ...]:
    """Without the placeholders."""
    return tuple(x if need else None for x, need in zip(found, needs, strict=True))


def _given(hats: Sequence[Maybe], needs: Sequence[bool], tensors: Sequence[Maybe]) -> tuple[Maybe, ...]:
    """Without gradients of placeholders."""
    used = zip(hats, needs[:N_LEARNED], tensors[:N_LEARNED], strict=True)
    return tuple(hat if need and x is not None else None for hat, need, x in used)


def _parts(ctx: Any) -> tuple[Sequence[Maybe], Sequence[Maybe], Sequence[Maybe], Sequence[Maybe]]:
    """Tensors, tangents, results and incoming gradients of `attention_second`."""
    saved, first = ctx.saved_tensors, N_TENSORS + N_LEARNED
    return saved[:N_TENSORS], saved[N_TENSORS:first], saved[first : first + 6], saved[first + 6 :]


def _second(
    run: Run,
    tensors: Sequence[Maybe],
    scalars: Sequence[Any],
    tangents: Sequence[Maybe],
    results: Sequence[Maybe],
    incoming: Sequence[Maybe],
    needs: Sequence[bool],
) -> tuple[Maybe, ...]:
    """`attention_second`, which says no where a derivative by its nonlinear arguments is asked for."""
    dy, dlse, dty, dtlse = incoming
    # a loss that does not look at the tangent is linear in what it gives
    learned = [_guarded(x) for x in tensors[:N_LEARNED]]
    dty, dtlse = _guarded(dty), _guarded(dtlse)
    rest = tensors[N_LEARNED:]
    return run.second(*learned, *rest, *scalars, *tangents, *results, dy, dlse, dty, dtlse, list(needs))


def _guarded(x: Maybe) -> Maybe:
    return x if x is None or not torch.is_grad_enabled() else Guard.apply(x)
