"""What the tangent's kernels share: their arguments, tangents of scores, the reference of a row, a sink's part."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.launch import Launch, compact, rows_of
from backlight.backends.triton.primitives import Frame, sink_weight
from backlight.backends.triton.table import table_of


class Moving(NamedTuple):
    """What is compiled in beside the variant: which tangents there are."""

    Q: bool
    K: bool
    V: bool
    BIAS: bool
    SINK: bool
    TAU: bool
    GATE: bool
    PAIR: bool
    # some score has one
    SCORES: bool
    # y and u are not known
    FRESH: bool


class Tensors(NamedTuple):
    """Rows of tensors, and of their tangents."""

    q: Any
    k: Any
    v: Any
    gate: Any
    y: Any
    u: Any
    tq: Any
    tk: Any
    tv: Any
    tgate: Any
    ty: Any
    tu: Any


class Values(NamedTuple):
    """What has no rows of its own, and tangents of it."""

    lse_ptr: Any
    table_ptr: Any
    tau_ptr: Any
    sink_ptr: Any
    tlse_ptr: Any
    ttable_ptr: Any
    ttau_ptr: Any
    tsink_ptr: Any
    scale: Any


@triton.jit
def moved_scores(q, tq, k, tk, scale, BM: tl.constexpr, BN: tl.constexpr, V: tl.constexpr, T: tl.constexpr):
    """Tangents of scores before the cap (eq. 47)."""
    ts = tl.zeros([BM, BN], tl.float32)
    if T.Q:
        ts = tl.dot(tq, tl.trans(k), ts, input_precision=V.PRECISION)
    if T.K:
        ts = tl.dot(q, tl.trans(tk), ts, input_precision=V.PRECISION)
    return ts * scale


@triton.jit
def reference(p, ts, nu, opened):
    """(nu, opened): of rows that meet their first weights in this tile the mean of ts there."""
    total = tl.sum(p, 1)
    mean = tl.sum(p * ts, 1) / tl.where(total > 0, total, 1.0)
    nu += tl.where((opened == 0) & (total > 0), mean, 0.0)
    return nu, tl.where(total > 0, 1.0, opened)


@triton.jit
def sink_moves(values, lse, nu, h, sees_nothing, T: tl.constexpr):
    """What a sink adds to e."""
    p_sink = sink_weight(tl.load(values.sink_ptr + h).to(tl.float32), lse, sees_nothing)
    moved = -nu
    if T.SINK:
        moved += tl.load(values.tsink_ptr + h).to(tl.float32)
    return p_sink * moved


def start_tangent(
    kernel: Any,
    launch: Launch,
    config: KernelConfig,
    tangents: dict[str, Tensor],
    results: tuple[Tensor, ...],
    pairs: tuple[Any, ...],
    fresh: bool,
) -> None:
    """One launch. results: y, u, ty, tu, lse, tlse; pairs: the pair bias and its tangent, for the kernel that takes them."""
    call = launch.call
    grid = launch.row_grid(config.block_m)
    if not (grid[0] and grid[1]):
        return
    # absent tensors still need a pointer; what is compiled in never reads it
    own = {"q": launch.q, "k": launch.k, "v": launch.v, "gate": launch.gate}
    tq, tk, tv, tgate = (launch.readable(tangents[name]) if name in tangents else x for name, x in own.items())
    ttable = table_of(launch.start, tangents["bias"], 1.0) if "bias" in tangents else launch.table
    ttau, tsink = (compact(tangents[n]) if n in tangents else x for n, x in (("tau", launch.tau), ("sink", launch.sink)))
    y, u, ty, tu, lse, tlse = results
    moving = Moving(
        *(name in tangents for name in ("q", "k", "v", "bias", "sink", "tau", "gate", "pair_bias")),
        SCORES=not {"q", "k", "bias", "pair_bias"}.isdisjoint(tangents),
        FRESH=fresh,
    )
    packing, geometry, *lengths = launch.shared(call.cu_seqlens_q, config.block_m)
    launch.start(
        kernel,
        grid,
        Tensors(*(rows_of(x) for x in (*own.values(), y, u, tq, tk, tv, tgate, ty, tu))),
        Values(lse, launch.table, launch.tau, launch.sink, tlse, ttable, ttau, tsink, float(call.scale)),
        *launch.all_described(config, (), (launch.k, launch.v, tk, tv)),
        *pairs,
        Frame(launch.mask(config, of_rows=True), packing, geometry),
        *lengths,
        V=launch.variant,
        T=moving,
        **config.launch,
    )
