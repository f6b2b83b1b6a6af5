"""What the tangent's kernels share: their arguments, tangents of scores, the reference of a row, a sink's part."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.launch import Launch, compact, rows_of
from backlight.backends.triton.loads import key_tile, own_tile
from backlight.backends.triton.primitives import Frame, logits_of, sink_weight
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


class Own(NamedTuple):
    """What a row block with known lse brings to every tile of keys. minus_lse2: [BM, 1], in base 2."""

    block: Any
    q: Any
    tq: Any
    minus_lse2: Any
    table_ptr: Any
    ttable_ptr: Any
    span: Any


@triton.jit
def own_queries(tensors, block, V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr):
    """q and its tangent; where there is none, nobody asks for it."""
    q = own_tile(tensors.q, block, BM, V.D, V.BD)
    tq = q
    if T.Q:
        tq = own_tile(tensors.tq, block, BM, V.D, V.BD)
    return q, tq


@triton.jit
def own_lse(values, block, sq, geometry, BM: tl.constexpr):
    """(where lse of the rows is, lse, which rows see nothing)."""
    rows = tl.arange(0, BM)
    offset = tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row + rows
    lse = tl.load(values.lse_ptr + offset, mask=rows < block.n_rows, other=float("-inf"))
    return offset, lse, lse == float("-inf")


@triton.jit
def own_tables(values, block, geometry):
    return head_table(values.table_ptr, block.h, geometry, True), head_table(values.ttable_ptr, block.h, geometry, True)


@triton.jit
def both_scores(own, tensors, k_desc, tk_desc, scale, j0, geometry, V: tl.constexpr, T: tl.constexpr, BN: tl.constexpr):
    """s less lse, in base 2, and its tangent of a tile of keys (eq. 47)."""
    TMA: tl.constexpr = k_desc is not None
    BM: tl.constexpr = own.q.shape[0]
    block = own.block
    k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
    t = tl.dot(own.q, tl.trans(k), input_precision=V.PRECISION)
    tk = k
    if T.K:
        tk = key_tile(tensors.tk, tk_desc, block, j0, BN, V.D, V.BD, TMA)
    ts = moved_scores(own.q, own.tq, k, tk, scale, BM, BN, V, T)
    s, slope = logits_of(t, geometry.unit, own.minus_lse2, geometry, V, "apart" if T.SCORES else "none")
    if V.SOFTCAP and T.SCORES:
        ts = ts * slope
    entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
    if V.BIAS:
        s = add_bias(s, geometry.unit, own.table_ptr, entry, j0, own.span, geometry, V, BM, BN)
    if T.BIAS:
        ts = add_bias(ts, 1.0, own.ttable_ptr, entry, j0, own.span, geometry, V, BM, BN)
    return s, ts


@triton.jit
def moves(p, ts, nu, opened, waiting, e):
    """g of a tile, the rows' reference with what it settles, and e with the tile's part."""
    if waiting > 0:
        nu, opened = reference(p, ts, nu, opened)
        waiting = (tl.min(opened, 0) == 0).to(tl.int32)
    g = p * (ts - nu[:, None])
    e += tl.sum(g, 1)
    return g, nu, opened, waiting, e


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
