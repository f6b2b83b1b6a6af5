"""Device code of kernels that recompute a tile of second derivatives for ds alone: those of dbias and dpair_bias (eq. 58)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import stream_tile
from backlight.backends.triton.moving import below_cap, product, scores_and_cap, sums_of
from backlight.backends.triton.primitives import Frame
from backlight.backends.triton.second_rows import Prepared


class Tensors(NamedTuple):
    """What they read: rows of tensors, and the rest by pointers."""

    q: Any
    tq: Any
    do: Any
    dto: Any
    k: Any
    v: Any
    tk: Any
    tv: Any
    sums: Any
    table_ptr: Any
    ttable_ptr: Any
    pairs: Any
    scale: Any


def start_for_ds(kernel: Any, grid: tuple[int, ...], launch: Launch, given: Prepared, config: KernelConfig, *own: Any) -> None:
    """own: arguments behind the tensors that are the kernel's own."""
    call = launch.call
    tensors = (launch.q, given.tq, given.do, given.dto, launch.k, launch.v, given.tk, given.tv)
    others = (given.sums, launch.table, given.ttable, given.pairs(launch), float(call.scale))
    packing, geometry, *lengths = launch.shared(call.cu_seqlens_q, config.block_m)
    launch.start(
        kernel,
        grid,
        Tensors(*(rows_of(x) for x in tensors), *others),
        *own,
        Frame(launch.mask(config, of_rows=True), packing, geometry),
        *lengths,
        V=launch.variant,
        T=given.moving,
        **config.launch,
    )


@triton.jit
def recomputed(
    tensors, rows_at, keys_at, offset, addend, geometry,
    V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(base-2 logits less lse2, their tangents, b, c of eq. 58, mu, eta, delta), without bias and mask.

    rows_at, keys_at: batch entry, head, the sequence's first row, the tile's place in it, its length. offset: of the sequence
    in row buffers; addend: to the logits.
    """
    batch, h, q_start, i0, sq = rows_at
    _, g, k_start, j0, sk = keys_at
    rows, keys = (batch, h, q_start), (batch, g, k_start)
    q = stream_tile(tensors.q, 0, rows, i0, sq, BM, V.D, V.BD, False)
    k = stream_tile(tensors.k, 0, keys, j0, sk, BN, V.D, V.BD, False)
    v = stream_tile(tensors.v, 0, keys, j0, sk, BN, V.DV, V.BDV, False)
    minus_lse2, mu, eta, delta = sums_of(tensors.sums, offset, i0, sq, BM, V.VARLEN)
    t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
    s, _, slope = scores_and_cap(t, addend + minus_lse2, geometry, V)
    tx = tl.zeros([BM, BN], tl.float32)
    if T.Q:
        tq = stream_tile(tensors.tq, 0, rows, i0, sq, BM, V.D, V.BD, False)
        tx = tl.dot(tq, tl.trans(k), tx, input_precision=V.PRECISION)
    if T.K:
        tk = stream_tile(tensors.tk, 0, keys, j0, sk, BN, V.D, V.BD, False)
        tx = tl.dot(q, tl.trans(tk), tx, input_precision=V.PRECISION)
    do, dto = q, q
    if T.DO:
        do = stream_tile(tensors.do, 0, rows, i0, sq, BM, V.DV, V.BDV, False)
    if T.DTO:
        dto = stream_tile(tensors.dto, 0, rows, i0, sq, BM, V.DV, V.BDV, False)
    b = product(dto, v, T.DTO, V)
    c = product(do, v, T.DO, V)
    if T.DTO and T.V:
        tv = stream_tile(tensors.tv, 0, keys, j0, sk, BN, V.DV, V.BDV, False)
        c += tl.dot(dto, tl.trans(tv), input_precision=V.PRECISION)
    return s, below_cap(tx * tensors.scale, slope, V), b, c, mu, eta, delta
