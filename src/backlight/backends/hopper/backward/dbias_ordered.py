"""dbias in a fixed order: one CTA owns one offset between row tile and key tile, and recomputes ds of all tiles at that offset.

Tiles at one offset carry the same bias, the same distances and the same mask, so ds [128 keys, 64 rows] is summed element by
element in registers; its diagonals are left once, as `dbias.py` describes, in a place of their own, and
`_dbias_ordered_sum_kernel` adds them up in ascending order. Two products more than the main kernel needs, over the band only:
for deterministic calls, and for heads wider than 128.
"""

# device code: compiled by Triton from its own types, never run by Python

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from backlight.backends.hopper.backward.dbias import CELLS, GROUPS, parts_of
from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.compat import warpgroup_mma_wait
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import barriers, load_tile, mma_over_columns, phase_of, stage_of
from backlight.backends.hopper.scores import gradient, hidden_out, of_rows, seen_at, weights
from backlight.backends.hopper.terms import TABLE_PAD, bias_tile, cap_factor, capped, table_of, threshold, unit_of
from backlight.spec import LOG2E

# rows of a tile, eight-row groups of it; keys of a tile are 16 * GROUPS
ROWS = gl.constexpr(64)
BLOCKS = gl.constexpr(8)
BLOCK = 64
# what a tile leaves, in cells: BLOCKS row groups of 512 and, behind them, the edge that belongs to the group before the first
GROUP_CELLS = gl.constexpr(512)
EDGE = gl.constexpr(4096)
TILE_CELLS = gl.constexpr(4608)


@gluon.jit
def leave(pointer, value):
    """Write [key groups, cells] to memory."""
    cells = gl.reshape(value, [GROUPS, CELLS])
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, cells.type.layout))
    cell = gl.arange(0, CELLS, gl.SliceLayout(0, cells.type.layout))
    gl.store(pointer + gl.expand_dims(group * CELLS, 1) + gl.expand_dims(cell, 0), cells)


@gluon.jit(do_not_specialize=["padded_rows", "heads", "group", "sq", "sk", "left", "right", "n_bias", "origin"])
def _dbias_ordered_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    lse_ptr,
    delta_ptr,
    share_ptr,
    table_ptr,
    tau_ptr,
    partial_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_padded_ptr,
    padded_rows,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    scale_log2,
    cap,
    n_bias,
    origin,
    D: gl.constexpr,
    DV: gl.constexpr,
    BD: gl.constexpr,
    BDV: gl.constexpr,
    PAD: gl.constexpr,
    ST: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    VARLEN: gl.constexpr,
):
    BN: gl.constexpr = 16 * GROUPS
    dtype: gl.constexpr = q_desc.dtype
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    key_l: gl.constexpr = gl.SliceLayout(1, s_l)
    z = gl.program_id(1) // heads
    h = gl.program_id(1) % heads
    kv_head = h // group
    b = z
    q_start = z * 0
    k_start = z * 0
    padded_row = gl.program_id(1) * padded_rows
    if VARLEN:
        b = z * 0
        q_start = gl.load(cu_q_ptr + z)
        k_start = gl.load(cu_k_ptr + z)
        sq = gl.load(cu_q_ptr + z + 1) - q_start
        sk = gl.load(cu_k_ptr + z + 1) - k_start
        padded_row = h * padded_rows + gl.load(cu_padded_ptr + z) * PAD
    # rows begin `gap` after the keys of a tile; `column` is where its first row and key lie in the table
    offset = sk - sq + origin
    gap = (gl.program_id(0) - ((offset + ROWS - 1) >> 6)) * ROWS
    column = gap + offset
    key = gl.arange(0, BN, key_l)
    row = gl.arange(0, ROWS, row_l)
    distance = gl.expand_dims(row, 0) - gl.expand_dims(key, 1) + gap + sk - sq
    zero = gl.zeros([BN, ROWS], gl.float32, s_l)
    bias = bias_tile(table_ptr + h.to(gl.int64) * (n_bias + 2 * TABLE_PAD), column, n_bias, zero, True)
    bias = seen_at(bias, distance, left, right, HAS_LEFT, HAS_RIGHT)
    limit = 0.0
    if tau_ptr is not None:
        limit = threshold(gl.load(tau_ptr + h).to(gl.float32))

    q_s = gl.allocate_shared_memory(dtype, [ST, ROWS, BD], gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype))
    do_s = gl.allocate_shared_memory(dtype, [ST, ROWS, BDV], gl.NVMMASharedLayout.get_default_for([ROWS, BDV], dtype))
    k_s = gl.allocate_shared_memory(dtype, [ST, BN, BD], gl.NVMMASharedLayout.get_default_for([BN, BD], dtype))
    v_s = gl.allocate_shared_memory(dtype, [ST, BN, BDV], gl.NVMMASharedLayout.get_default_for([BN, BDV], dtype))
    full = barriers(ST, 1)
    empty = barriers(ST, 1)
    fence_async_shared()
    SIZE: gl.constexpr = (
        q_desc.block_type.nbytes + do_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes
    )
    # key tiles whose rows exist
    first = gl.cdiv(gl.maximum(-gap, 0), BN)
    last = gl.maximum(gl.minimum(gl.cdiv(sk, BN), gl.cdiv(gl.maximum(sq - gap, 0), BN)), first)
    total = zero
    for step in range(first - (ST - 1), last):
        ahead = step + ST - 1
        if ahead < last:
            count = ahead - first
            stage = stage_of(count, ST)
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase_of(count, ST) ^ 1)
            mbarrier.expect(bar, SIZE)
            load_tile(q_desc, b, h, q_start, sq, ahead * BN + gap, bar, q_s.index(stage), VARLEN)
            load_tile(do_desc, b, h, q_start, sq, ahead * BN + gap, bar, do_s.index(stage), VARLEN)
            load_tile(k_desc, b, kv_head, k_start, sk, ahead * BN, bar, k_s.index(stage), VARLEN)
            load_tile(v_desc, b, kv_head, k_start, sk, ahead * BN, bar, v_s.index(stage), VARLEN)
        if step >= first:
            count = step - first
            stage = stage_of(count, ST)
            mbarrier.wait(full.index(stage), phase_of(count, ST))
            # products 1 and 2
            s_token = mma_over_columns(k_s.index(stage), q_s.index(stage), zero, D)
            dp_token = mma_over_columns(v_s.index(stage), do_s.index(stage), zero, DV)
            rows = padded_row + step * BN + gap + row
            lse = gl.load(lse_ptr + rows)
            delta = gl.load(delta_ptr + rows)
            s, dp = warpgroup_mma_wait(0, deps=[s_token, dp_token])
            mbarrier.arrive(empty.index(stage), count=1)
            if cap is not None:
                s = capped(s, cap)
            p = weights(s + bias, lse, scale_log2, True)
            # with tau, too: the gradient of a hidden key has p, which is 0, as a factor
            p = hidden_out(p, gl.expand_dims(step * BN + key < sk, 1), False)
            if tau_ptr is not None:
                # not `surviving`: a shorter loop, but ten more registers
                dp = gl.where(p + of_rows(gl.load(share_ptr + rows), True) > limit, dp, 0.0)
            total = total + gradient(p, dp, delta, True)

    near, far = gl.split(gl.permute(gl.reshape(total, [GROUPS, 2, 8, BLOCKS, 8]), (0, 2, 4, 3, 1)))
    near = parts_of(near, BLOCKS)
    far = parts_of(far, BLOCKS)
    place = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    partial_ptr += place * TILE_CELLS
    for c in gl.static_range(BLOCKS):
        value = near[c]
        if c + 1 < BLOCKS:
            value = value + far[c + 1]
        leave(partial_ptr + c * GROUP_CELLS, value)
    leave(partial_ptr + EDGE, far[0])


@triton.jit(do_not_specialize=["segments", "heads", "n", "offsets", "sq", "sk", "origin"])
def _dbias_ordered_sum_kernel(
    partial_ptr, dbias_ptr, cu_q_ptr, cu_k_ptr, segments, heads, n, offsets, sq, sk, origin,
    VARLEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Column = 64 offset + rest + 8 c + x - b - 16 w; c = -1 stands last."""
    h = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = column < n
    total = tl.zeros([BLOCK], tl.float32)
    for z in range(segments):
        if VARLEN:
            sq = tl.load(cu_q_ptr + z + 1) - tl.load(cu_q_ptr + z)
            sk = tl.load(cu_k_ptr + z + 1) - tl.load(cu_k_ptr + z)
        gap = sk - sq + origin
        rest = gap - ((gap + 63) >> 6) * 64
        base = (z * heads + h).to(tl.int64) * offsets * TILE_CELLS
        for cell in range(64):
            w = cell // 8
            b = cell % 8
            place = column - rest + b + 16 * w
            block = place // 8
            inner = w * 64 + b * 8 + place % 8
            at = block // 8 * TILE_CELLS + block % 8 * GROUP_CELLS + inner
            total += tl.load(partial_ptr + base + at, mask=exists & (block // 8 < offsets), other=0.0)
            edge = (block + 1) // 8
            at = edge * TILE_CELLS + EDGE + inner
            total += tl.load(partial_ptr + base + at, mask=exists & ((block + 1) % 8 == 0) & (edge < offsets), other=0.0)
    tl.store(dbias_ptr + h * n + column, total.to(dbias_ptr.dtype.element_ty), mask=exists)


def ordered_dbias(launch: Launch, rows: Rows) -> Tensor:
    """[Hq, n] in the dtype of bias, bitwise repeatable."""
    call, spec = launch.call, launch.call.spec
    assert call.bias is not None
    n = call.bias.shape[1]
    segments = launch.batch if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    # multiples of 64 whose tile, 128 keys x 64 rows, can meet a column of the table
    offsets = (n + 189) // 64 + 1
    partial = torch.empty(segments, launch.heads, offsets, TILE_CELLS.value, dtype=torch.float32, device=call.q.device)
    out = torch.empty(launch.heads, n, dtype=call.bias.dtype, device=call.q.device)
    cu_q, cu_k, _, _ = launch.packing(call.cu_seqlens_q, 128)
    table = table_of(call)
    tau = None if call.tau is None else call.tau.contiguous()

    def describe_tiles() -> dict[str, Any]:
        args = [
            launch.rows(call.q, ROWS.value, launch.bd),
            launch.rows(rows.do, ROWS.value, launch.bdv),
            launch.rows(call.k, 16 * GROUPS.value, launch.bd),
            launch.rows(call.v, 16 * GROUPS.value, launch.bdv),
            rows.lse2,
            rows.delta,
            rows.share,
            table,
            tau,
            partial,
            cu_q,
            cu_k,
            rows.first_tiles,
            rows.tiles * rows.config.block_m,
            *launch.geometry,
            unit_of(call) * LOG2E,
            None if spec.softcap is None else cap_factor(call),
            n,
            spec.bias_origin,
        ]
        constants = {
            "D": launch.d,
            "DV": launch.dv,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "PAD": rows.config.block_m,
            "ST": 2 if max(launch.bd, launch.bdv) <= 128 else 1,
            **launch.flags,
        }
        return {"grid": (offsets, segments * launch.heads), "args": args, "constants": constants, "num_warps": 8}

    def describe_sum() -> dict[str, Any]:
        args = [partial, out, cu_q, cu_k, segments, launch.heads, n, offsets, launch.sq, launch.sk, spec.bias_origin]
        constants = {"VARLEN": call.varlen, "BLOCK": BLOCK}
        return {"grid": (-(-n // BLOCK), launch.heads), "args": args, "constants": constants, "num_warps": 1}

    state = (rows.lse2, rows.delta, rows.share, table, tau, partial, cu_q, cu_k, rows.first_tiles)
    launch.start(_dbias_ordered_kernel, (call.q, rows.do, call.k, call.v, *state), describe_tiles)
    launch.start(_dbias_ordered_sum_kernel, (partial, out, cu_q, cu_k), describe_sum)
    return out
