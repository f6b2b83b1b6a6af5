"""Forward (eq. 31): one producer warp feeds NC consumer warpgroups of 64 rows each through ST-stage rings of K and V.

Inside a warpgroup the next S = Q K^T is issued before O += P V of the previous block is waited on, so the softmax runs under a
matmul; P goes from the accumulator's registers straight into the second matmul. Key blocks run from right to left, so that a
causal mask touches the first one only. CTAs are persistent: the producer draws tiles (longest first under a mask) and publishes
them with Q, so the next tile's loads and the last tile's store run under the softmax.

Learned terms (terms.py) are compiled in: the cap and the bias change scores, the sink is where a row's sum starts, the gate
waits in the buffer that O leaves through. An absent term is None: neither an argument nor a captured value. tau: elastic.py.

Registers: S and O fp32, P 16 bit. Shared memory: Q and O [NC, 64, D], K and V [ST, BN, D]. Parity: tests/hopper.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backlight.backends.hopper.again import doubtful, first_again, largest_sum, next_again, remember, ticket_of, valid
from backlight.backends.hopper.compat import Maybe, arguments, smem_reinterpret
from backlight.backends.hopper.config import (
    ForwardConfig,
    elastic_config,
    forward_config,
    heads_together,
    share_q_and_o,
)
from backlight.backends.hopper.elastic import elastic_consumer, elastic_producer
from backlight.backends.hopper.launch import Launch, multiprocessors, readable
from backlight.backends.hopper.primitives import (
    INF,
    LN2,
    WM,
    as_weights,
    bar_arrive,
    bar_sync,
    barriers,
    clamp,
    load_tile,
    mma_over_columns,
    phase_of,
    rescaled,
    row_sum_layout,
    softmax_step,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.terms import cap_factor, sigmoid, single, sink_sums, table_of
from backlight.backends.hopper.tiles import (
    BLOCK,
    END,
    HEAD,
    K_EMPTY,
    SEGMENT,
    SLOT,
    cap_of,
    draw,
    head_table,
    hide,
    lengths,
    load_gate,
    lse_of,
    nearest,
    place,
    publish,
    published,
    scored,
    seen_scores,
    tile_blocks,
    trusting,
    with_bias,
)
from backlight.call import Call
from backlight.spec import LOG2E


@arguments
class Forward:
    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    gate_desc: Maybe
    lse_ptr: gl.tensor
    u_desc: Maybe
    table_ptr: Maybe
    sink_ptr: Maybe
    tau_ptr: Maybe
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    cu_tiles_ptr: gl.tensor
    counter_ptr: gl.tensor
    q_s: gl.shared_memory_descriptor
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    o_s: gl.shared_memory_descriptor
    u_s: Maybe
    tile_s: gl.shared_memory_descriptor
    again_s: Maybe
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    gate_full: Maybe
    dynamic: gl.tensor
    n_segments: gl.tensor
    n_tiles: gl.tensor
    row_tiles: gl.tensor
    together: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    left: gl.tensor
    right: gl.tensor
    unit: gl.tensor
    unit_log2: gl.tensor
    unit_rest: gl.tensor
    cap_factor: Maybe
    cap_log2: Maybe
    n_bias: Maybe
    bias_origin: Maybe
    D: gl.constexpr
    BN: gl.constexpr
    NC: gl.constexpr
    ST: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    EVEN: gl.constexpr
    EARLY_P: gl.constexpr
    LATE_RESCALE: gl.constexpr
    VARLEN: gl.constexpr
    PINGPONG: gl.constexpr
    SHARE_QO: gl.constexpr
    FAR: gl.constexpr
    TRUST: gl.constexpr
    SOFTCAP: gl.constexpr
    BIAS: gl.constexpr
    SINK: gl.constexpr
    GATE: gl.constexpr
    SAVE_U: gl.constexpr
    V_EMPTY: gl.constexpr
    TURN: gl.constexpr
    EVERYBODY: gl.constexpr


@gluon.jit
def send(p, head, z, block, ticket, count, turn):
    """Q of a tile, then K and V of its blocks from right to left; returns how many blocks were sent so far."""
    BM: gl.constexpr = p.NC * WM
    ST: gl.constexpr = p.ST
    b = head // p.heads
    h = head % p.heads
    q_start, k_start, sq, sk = lengths(p, z)
    i0 = block * BM
    begin, _, _, end = tile_blocks(p, i0, BM, sq, sk)
    publish(p, turn & 3, head, z, block, ticket)
    for w in gl.static_range(p.NC):
        mbarrier.wait(p.q_empty.index(w), (turn & 1) ^ 1)
        mbarrier.expect(p.q_full.index(w), p.q_desc.block_type.nbytes)
        load_tile(p.q_desc, b, h, q_start, sq, i0 + w * WM, p.q_full.index(w), p.q_s.index(w), p.VARLEN)
    for j in range(end - begin):
        key = (end - 1 - j) * p.BN
        stage = stage_of(count, ST)
        if count >= ST:
            bar_sync(K_EMPTY + stage, p.EVERYBODY)
        mbarrier.expect(p.k_full.index(stage), p.k_desc.block_type.nbytes)
        load_tile(p.k_desc, b, h // p.group, k_start, sk, key, p.k_full.index(stage), p.k_s.index(stage), p.VARLEN)
        if count >= ST:
            bar_sync(p.V_EMPTY + stage, p.EVERYBODY)
        mbarrier.expect(p.v_full.index(stage), p.v_desc.block_type.nbytes)
        load_tile(p.v_desc, b, h // p.group, k_start, sk, key, p.v_full.index(stage), p.v_s.index(stage), p.VARLEN)
        count += 1
    return count


@gluon.jit
def producer(p):
    ST: gl.constexpr = p.ST
    tile = gl.program_id(0)
    count = tile * 0
    turn = tile * 0
    while tile < p.n_tiles:
        next_tile, head, z, block, exists = draw(p, tile)
        if exists:
            count = send(p, head, z, block, tile, count, turn)
            turn += 1
        tile = next_tile
    if p.TRUST:
        for w in gl.static_range(p.NC):
            mbarrier.wait(p.q_empty.index(w), (turn & 1) ^ 1)
        for w in gl.static_range(p.NC):
            tile = first_again(p, w)
            while tile >= 0:
                head, z, block, _ = place(p, tile)
                next_tile = next_again(p, head, z, block, w)
                count = send(p, head, z, block, -1 - (4 * tile + w), count, turn)
                turn += 1
                tile = next_tile
    # every arrival of the consumers is met, those of the last round included
    for i in gl.static_range(ST):
        if count >= ST - i:
            bar_sync(K_EMPTY + stage_of(count + i, ST), p.EVERYBODY)
            bar_sync(p.V_EMPTY + stage_of(count + i, ST), p.EVERYBODY)
    publish(p, turn & 3, END, 0, 0, 0)
    for w in gl.static_range(p.NC):
        mbarrier.wait(p.q_empty.index(w), (turn & 1) ^ 1)
        mbarrier.arrive(p.q_full.index(w), count=1)


@gluon.jit
def pass_by(p, n, count, W: gl.constexpr):
    """Release n blocks that this warpgroup has no use for."""
    for _ in range(n):
        stage = stage_of(count, p.ST)
        phase = phase_of(count, p.ST)
        if p.PINGPONG:
            bar_sync(p.TURN + W, 256)
            bar_arrive(p.TURN + (W + 1) % p.NC, 256)
        mbarrier.wait(p.k_full.index(stage), phase)
        bar_arrive(K_EMPTY + stage, p.EVERYBODY)
        mbarrier.wait(p.v_full.index(stage), phase)
        bar_arrive(p.V_EMPTY + stage, p.EVERYBODY)
        count += 1
    return count


@gluon.jit
def rescaled_after(p, o, rescale, block, near):
    """O, rescaled as the softmax of `block` asks for."""
    if p.TRUST:
        if block >= near:
            o = rescaled(o, rescale)
    else:
        o = rescaled(o, rescale)
    return o


@gluon.jit
def advance(
    p,
    q,
    o,
    weights,
    row_max,
    row_sum,
    rescale,
    count,
    block,
    begin,
    plain_begin,
    plain_end,
    position,
    sk,
    table_ptr,
    column,
    near,
    W: gl.constexpr,
):
    """S of a block, O += P V of the one before it, then the softmax of this block under that matmul."""
    BN: gl.constexpr = p.BN
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    MASKED: gl.constexpr = p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    stage = stage_of(count, ST)
    previous = stage_of(count - 1, ST)
    if p.PINGPONG:
        bar_sync(p.TURN + W, 256)
    s_token = mma_over_columns(q, p.k_s.index(stage), gl.zeros([WM, BN], gl.float32, s_l), p.D)
    if p.LATE_RESCALE:
        o = rescaled_after(p, o, rescale, block + 1, near)
    mbarrier.wait(p.v_full.index(previous), phase_of(count - 1, ST))
    o_token = warpgroup_mma(weights, p.v_s.index(previous), o, is_async=True)
    if p.PINGPONG:
        bar_arrive(p.TURN + (W + 1) % p.NC, 256)
    s = warpgroup_mma_wait(1, deps=[s_token])
    bar_arrive(K_EMPTY + stage, p.EVERYBODY)
    rescale = gl.full([WM], 1.0, gl.float32, gl.SliceLayout(1, s_l))
    y = cap_of(p, s)
    if p.TRUST:
        if block < near:
            p32, row_sum = trusting(p, s, y, row_max, row_sum)
        else:
            s = seen_scores(p, s, y, table_ptr, column, position, block, plain_begin, plain_end, sk)
            p32, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
    else:
        s = seen_scores(p, s, y, table_ptr, column, position, block, plain_begin, plain_end, sk)
        p32, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
    if p.EARLY_P:
        new_weights = as_weights(p32, o, dtype)
    # the wait for the next K tile ends the basic block: without it ptxas hoists the wgmma wait above the softmax
    mbarrier.wait(p.k_full.index(stage_of(count + 1, ST)), phase_of(count + 1, ST), pred=block > begin)
    if p.EARLY_P:
        o, weights = warpgroup_mma_wait(0, deps=[o_token, new_weights])
    else:
        o, p32 = warpgroup_mma_wait(0, deps=[o_token, p32])
        weights = as_weights(p32, o, dtype)
    bar_arrive(p.V_EMPTY + previous, p.EVERYBODY)
    if not p.LATE_RESCALE:
        o = rescaled_after(p, o, rescale, block, near)
    return o, weights, row_max, row_sum, rescale


@gluon.jit
def consumer(p, W: gl.constexpr):
    BN: gl.constexpr = p.BN
    BDV: gl.constexpr = p.v_s.shape[2]
    NC: gl.constexpr = p.NC
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    MASKED: gl.constexpr = p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BDV, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)

    q = p.q_s.index(W)
    if p.PINGPONG and W == NC - 1:
        bar_arrive(p.TURN, 256)
    mbarrier.wait(p.q_full.index(W), 0)
    head = published(p, 0, HEAD)
    count = head * 0
    turn = head * 0
    while head != END:
        tile = published(p, turn & 3, BLOCK) * (NC * WM)
        _, _, sq, sk = lengths(p, published(p, turn & 3, SEGMENT))
        i0 = tile + W * WM
        position = i0 + sk - sq + gl.arange(0, WM, row_l)
        # blocks of the whole tile, and those of them that this warpgroup's rows see
        tile_begin, _, _, tile_end = tile_blocks(p, tile, NC * WM, sq, sk)
        begin, plain_begin, plain_end, end = tile_blocks(p, i0, WM, sq, sk)
        begin = gl.minimum(begin, tile_end - 1)
        end = clamp(end, begin + 1, tile_end)
        ticket = ticket_of(p, turn & 3)
        table_ptr = p.table_ptr
        column = i0
        if p.BIAS:
            table_ptr = head_table(p, head)
            column = i0 + sk - sq + p.bias_origin
        if p.GATE and not p.SHARE_QO:
            load_gate(p, W, turn)

        o = gl.zeros([WM, BDV], gl.float32, o_l)
        row_max = gl.full([WM], -INF, gl.float32, row_l)
        row_sum = gl.zeros([WM, 8], gl.float32, row_sum_layout(BN))
        if p.SINK:
            row_max = gl.full([WM], gl.load(p.sink_ptr + head % p.heads).to(gl.float32) / p.unit, gl.float32, row_l)
            row_sum = sink_sums(row_sum)
        if p.HAS_RIGHT:
            count = pass_by(p, tile_end - end, count, W)
        mbarrier.wait(p.k_full.index(stage_of(count, ST)), phase_of(count, ST))
        s_token = mma_over_columns(q, p.k_s.index(stage_of(count, ST)), gl.zeros([WM, BN], gl.float32, s_l), p.D)
        s = warpgroup_mma_wait(0, deps=[s_token])
        bar_arrive(K_EMPTY + stage_of(count, ST), p.EVERYBODY)
        s = with_bias(p, scored(p, s, cap_of(p, s)), table_ptr, column, end - 1)
        if MASKED:
            s = hide(p, s, position, end - 1, sk)
        p32, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
        weights = as_weights(p32, o, dtype)
        count += 1
        mbarrier.wait(p.k_full.index(stage_of(count, ST)), phase_of(count, ST), pred=end - begin > 1)
        near = nearest(p, begin, plain_end, end, column, ticket < 0)
        for j in range(end - 1 - begin):
            o, weights, row_max, row_sum, rescale = advance(
                p,
                q,
                o,
                weights,
                row_max,
                row_sum,
                rescale,
                count,
                end - 2 - j,
                begin,
                plain_begin,
                plain_end,
                position,
                sk,
                table_ptr,
                column,
                near,
                W,
            )
            count += 1
        if p.LATE_RESCALE:
            o = rescaled_after(p, o, rescale, begin, near)

        if not p.SHARE_QO and not p.TRUST:
            mbarrier.arrive(p.q_empty.index(W), count=1)
        elif p.GATE and p.SHARE_QO:
            load_gate(p, W, turn)
        last = stage_of(count - 1, ST)
        mbarrier.wait(p.v_full.index(last), phase_of(count - 1, ST))
        o_token = warpgroup_mma(weights, p.v_s.index(last), o, is_async=True)
        total = gl.convert_layout(gl.sum(row_sum, 1), row_l, assert_trivial=True)
        lse = lse_of(p, row_max, total)
        # read again: registers are short in the loops
        head = published(p, turn & 3, HEAD)
        i0 = published(p, turn & 3, BLOCK) * (NC * WM) + W * WM
        q_start, _, sq, _ = lengths(p, published(p, turn & 3, SEGMENT))
        ticket = ticket_of(p, turn & 3)
        b = head // p.heads
        h = head % p.heads
        rows = i0 + gl.arange(0, WM, row_l)
        lse_row = head.to(gl.int64) * p.sq + q_start
        keep = rows < sq
        if p.TRUST:
            if doubtful(total, rows, sq, ticket, largest_sum(dtype)):
                remember(p, ticket, lse_row, i0, W)
            keep = keep & valid(p, ticket, W)
            if not p.SHARE_QO:
                mbarrier.arrive(p.q_empty.index(W), count=1)
        gl.store(p.lse_ptr + lse_row + rows, gl.where(total == 0.0, -INF, lse), mask=keep)
        inverse = gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_l), assert_trivial=True), 1)
        if not p.GATE:
            # the store of the tile before has left the buffer
            tma.store_wait(0)
        o = warpgroup_mma_wait(0, deps=[o_token])
        bar_arrive(p.V_EMPTY + last, p.EVERYBODY)
        o = o * inverse
        if MASKED:
            # rows without a visible key: total is 0, and o may be 0 * inf
            o = gl.where(inverse == INF, 0.0, o)
        o_s = p.o_s.index(W)
        if p.GATE:
            mbarrier.wait(p.gate_full.index(W), turn & 1)
            o = o * sigmoid(o_s.load(o_l).to(gl.float32))
        o_s.store(o.to(dtype))
        fence_async_shared()
        if p.TRUST:
            if valid(p, ticket, W):
                store_tile(p.o_desc, b, h, q_start, sq, i0, o_s, p.VARLEN)
        else:
            store_tile(p.o_desc, b, h, q_start, sq, i0, o_s, p.VARLEN)
        if p.SHARE_QO:
            tma.store_wait(0)
            mbarrier.arrive(p.q_empty.index(W), count=1)
        if p.HAS_LEFT:
            count = pass_by(p, begin - tile_begin, count, W)
        turn += 1
        mbarrier.wait(p.q_full.index(W), turn & 1)
        head = published(p, turn & 3, HEAD)
    tma.store_wait(0)
    if p.PINGPONG and W == 0:
        bar_sync(p.TURN, 256)


@gluon.jit(
    do_not_specialize=[
        "dynamic",
        "n_segments",
        "n_tiles",
        "row_tiles",
        "together",
        "heads",
        "group",
        "sq",
        "sk",
        "left",
        "right",
        "n_bias",
        "bias_origin",
    ]
)
def _fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_tiles_ptr,
    counter_ptr,
    dynamic,
    n_segments,
    n_tiles,
    row_tiles,
    together,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    unit,
    unit_log2,
    unit_rest,
    gate_desc,
    u_desc,
    table_ptr,
    sink_ptr,
    tau_ptr,
    cap_factor,
    cap_log2,
    n_bias,
    bias_origin,
    D: gl.constexpr,
    BD: gl.constexpr,
    BDV: gl.constexpr,
    BN: gl.constexpr,
    NC: gl.constexpr,
    ST: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    EVEN: gl.constexpr,
    EARLY_P: gl.constexpr,
    LATE_RESCALE: gl.constexpr,
    VARLEN: gl.constexpr,
    PINGPONG: gl.constexpr,
    SHARE_QO: gl.constexpr,
    TRUST: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    SLOTS: gl.constexpr = 4 if NC == 3 else NC
    q_s = gl.allocate_shared_memory(dtype, [SLOTS, WM, BD], gl.NVMMASharedLayout.get_default_for([WM, BD], dtype))
    k_s = gl.allocate_shared_memory(dtype, [ST, BN, BD], gl.NVMMASharedLayout.get_default_for([BN, BD], dtype))
    v_s = gl.allocate_shared_memory(dtype, [ST, BN, BDV], gl.NVMMASharedLayout.get_default_for([BN, BDV], dtype))
    o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BDV], dtype)
    if SHARE_QO:
        o_s = smem_reinterpret(q_s, dtype, [SLOTS, WM, BDV], o_layout)
    else:
        o_s = gl.allocate_shared_memory(dtype, [SLOTS, WM, BDV], o_layout)
    u_s = None
    if u_desc is not None:
        u_s = gl.allocate_shared_memory(dtype, [SLOTS, WM, BDV], o_layout)
    gate_full = None
    if gate_desc is not None:
        gate_full = barriers(NC, 1)
    tile_s = gl.allocate_shared_memory(gl.int32, [4 * SLOT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    again_s = None
    if TRUST:
        again_s = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for w in gl.static_range(NC):
            again_s.index(w).store(gl.full([1], -1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    args = Forward(
        q_desc=q_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        o_desc=o_desc,
        gate_desc=gate_desc,
        u_desc=u_desc,
        lse_ptr=lse_ptr,
        table_ptr=table_ptr,
        sink_ptr=sink_ptr,
        tau_ptr=tau_ptr,
        cu_q_ptr=cu_q_ptr,
        cu_k_ptr=cu_k_ptr,
        cu_tiles_ptr=cu_tiles_ptr,
        counter_ptr=counter_ptr,
        q_s=q_s,
        k_s=k_s,
        v_s=v_s,
        o_s=o_s,
        u_s=u_s,
        tile_s=tile_s,
        again_s=again_s,
        q_full=barriers(NC, 1),
        q_empty=barriers(NC, 1),
        k_full=barriers(ST, 1),
        v_full=barriers(ST, 1),
        gate_full=gate_full,
        dynamic=dynamic,
        n_segments=n_segments,
        n_tiles=n_tiles,
        row_tiles=row_tiles,
        together=together,
        heads=heads,
        group=group,
        sq=sq,
        sk=sk,
        left=left,
        right=right,
        unit=unit,
        unit_log2=unit_log2,
        unit_rest=unit_rest,
        cap_factor=cap_factor,
        cap_log2=cap_log2,
        n_bias=n_bias,
        bias_origin=bias_origin,
        D=D,
        BN=BN,
        NC=NC,
        ST=ST,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        EVEN=EVEN,
        EARLY_P=EARLY_P,
        LATE_RESCALE=LATE_RESCALE,
        VARLEN=VARLEN,
        PINGPONG=PINGPONG,
        SHARE_QO=SHARE_QO,
        FAR=not HAS_LEFT,
        TRUST=TRUST,
        SOFTCAP=cap_factor is not None,
        BIAS=table_ptr is not None,
        SINK=sink_ptr is not None,
        GATE=gate_desc is not None,
        SAVE_U=u_desc is not None,
        V_EMPTY=K_EMPTY + ST,
        TURN=K_EMPTY + 2 * ST,
        EVERYBODY=NC * 128 + 32,
    )
    fence_async_shared()
    if tau_ptr is not None:
        if NC == 2:
            gl.warp_specialize(
                [(elastic_consumer, (args, 0)), (elastic_consumer, (args, 1)), (elastic_producer, (args,))], [4, 1], [240, 24]
            )
        else:
            gl.warp_specialize(
                [
                    (elastic_consumer, (args, 0)),
                    (elastic_consumer, (args, 1)),
                    (elastic_consumer, (args, 2)),
                    (elastic_producer, (args,)),
                ],
                [4, 4, 1],
                [160, 160, 24],
            )
    elif NC == 2:
        gl.warp_specialize([(consumer, (args, 0)), (consumer, (args, 1)), (producer, (args,))], [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(consumer, (args, 0)), (consumer, (args, 1)), (consumer, (args, 2)), (producer, (args,))],
            [4, 4, 1],
            [160, 160, 24],
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tiles of a forward and the programs that share them; dynamic: they draw tiles from a counter."""

    config: ForwardConfig
    row_tiles: int
    n_tiles: int
    programs: int
    uneven: bool
    dynamic: bool

    @classmethod
    def of(cls, launch: Launch) -> "Schedule":
        call = launch.call
        config = forward_config(call) if call.tau is None else elastic_config(call)
        row_tiles = launch.row_tiles(config.block_m)
        n_tiles = row_tiles * launch.batch * launch.heads
        programs = min(n_tiles, multiprocessors(call.q.device)) if config.persistent else n_tiles
        uneven = call.spec.masked or call.varlen
        return cls(config, row_tiles, n_tiles, programs, uneven, uneven and programs < n_tiles)


def forward(call: Call, save_u: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y, lse, u) of a call that `why_not` accepts; u (eq. 12) with tau only, and only when asked for."""
    launch = Launch(call, choices=save_u)
    y = torch.empty_like(call.q) if launch.dv == launch.d else call.q.new_empty(*call.q.shape[:3], launch.dv)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    u = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) if save_u and call.tau is not None else None
    if y.numel() == 0 or launch.sk == 0:
        empty = -torch.inf if call.sink is None else call.sink.float()[None, :, None].expand_as(lse)
        return y.zero_(), lse.copy_(torch.as_tensor(empty)), None if u is None else u.zero_()
    schedule = launch.once("forward", lambda: Schedule.of(launch))
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, schedule.config.block_m)
    counter = launch.counter(schedule.dynamic)
    gate = None if call.gate is None else readable(call.gate)
    table = table_of(call)
    sink, tau = (None if term is None else term.contiguous() for term in (call.sink, call.tau))

    def describe() -> dict[str, Any]:
        config, cap = schedule.config, call.spec.softcap
        # of scores; with a cap they come in base 2 already
        unit = call.scale if cap is None else LN2.value
        unit_log2 = 1.0 if cap else unit * LOG2E
        args = [
            launch.rows(call.q, 64, launch.bd),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(y, 64, launch.bdv),
            lse,
            cu_q,
            cu_k,
            first_tiles,
            counter,
            int(schedule.dynamic),
            n_segments,
            schedule.n_tiles,
            schedule.row_tiles,
            heads_together(call, config),
            *launch.geometry,
            unit,
            unit_log2,
            math.log(2.0) * single(unit_log2) - single(unit),
            *(None if x is None else launch.rows(x, 64, launch.bdv) for x in (gate, u)),
            table,
            sink,
            tau,
            cap_factor(call),
            None if cap is None else cap * LOG2E,
            None if call.bias is None else call.bias.shape[1],
            None if call.bias is None else call.spec.bias_origin,
        ]
        constants = {
            "D": launch.d,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "BN": config.block_n,
            "NC": config.consumers,
            "ST": config.stages,
            "EVEN": not schedule.uneven and launch.sk % config.block_n == 0,
            "EARLY_P": config.early_p,
            "LATE_RESCALE": config.late_rescale,
            "PINGPONG": config.pingpong,
            "SHARE_QO": share_q_and_o(config, launch.bd, launch.bdv),
            "TRUST": config.trust and call.spec.left is None,
            **launch.flags,
        }
        maxnreg = 168 if config.consumers == 2 else 128
        return {"grid": (schedule.programs,), "args": args, "constants": constants, "num_warps": 4, "maxnreg": maxnreg}

    tensors = (call.q, call.k, call.v, y, lse, cu_q, cu_k, first_tiles, counter, gate, u, table, sink, tau)
    launch.start(_fwd_kernel, tensors, describe)
    return y, lse, u
