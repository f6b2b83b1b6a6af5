"""dq and dpair_bias in one sweep (eq. 33, 69): a CTA owns 64 rows of the bias and a slab of its keys, and walks over members.

Each warpgroup has keys of its own: its part of the bias stays in shared memory, its sums of ds in registers. dq of a member is
added up over the warpgroups in their order, by the first of them; over slabs, which have a launch each, in an fp32 buffer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from backlight.backends.hopper.barriers import PAIR_DQ_EMPTY, PAIR_DQ_FULL, PAIR_MEMBER_EMPTY
from backlight.backends.hopper.compat import Maybe, arguments, warpgroup_mma_wait
from backlight.backends.hopper.pair.members import (
    STAGES,
    Members,
    added,
    handed,
    in_fp32,
    keep_bias,
    load_rows,
    member_of,
    threads_of,
    tile_layout,
)
from backlight.backends.hopper.primitives import WM, bar_arrive, bar_sync, barriers, load_tile, tiles_of


@arguments
class Buffers:
    """Shared memory of a CTA and its mbarriers: of each stage a member's rows, and its keys in tiles of 64."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@arguments
class Results:
    """Where dq and dpair_bias go, and dq between slabs; the CTA's rows and slab of keys."""

    dq: Maybe
    dpair: Maybe
    between_ptr: gl.tensor
    i0: gl.tensor
    slab: gl.tensor


@gluon.jit
def loader(p, buffers, out):
    """Members, two ahead."""
    THREADS: gl.constexpr = threads_of(p.V.WGS, 1)
    TILES: gl.constexpr = p.V.WGS * p.V.T * p.V.BN // WM
    for number in range(p.first, p.stop):
        count = number - p.first
        stage = count % STAGES
        if count >= STAGES:
            bar_sync(PAIR_MEMBER_EMPTY + stage, THREADS)
        m = member_of(p, number)
        full = buffers.full.index(stage)
        mbarrier.expect(
            full, 2 * (p.q_desc.block_type.nbytes + p.lse_desc.block_type.nbytes + TILES * p.k_desc.block_type.nbytes)
        )
        load_rows(
            p,
            m,
            out.i0,
            full,
            buffers.q.index(stage),
            buffers.do.index(stage),
            buffers.lse.index(stage),
            buffers.delta.index(stage),
        )
        for n in gl.static_range(TILES):
            load_tile(p.k_desc, m.b, m.g, 0, 0, out.slab + n * WM, full, buffers.k.index(stage * TILES + n), False)
            load_tile(p.v_desc, m.b, m.g, 0, 0, out.slab + n * WM, full, buffers.v.index(stage * TILES + n), False)
    # every arrival is met
    count = p.stop - p.first
    for i in gl.static_range(STAGES):
        if count >= STAGES - i:
            bar_sync(PAIR_MEMBER_EMPTY + (count + i) % STAGES, THREADS)


@gluon.jit
def tile_of(buffer, stage, n, V: gl.constexpr):
    """Keys of tile n of BN of the slab."""
    TILES: gl.constexpr = V.WGS * V.T * V.BN // WM
    tile = buffer.index(stage * TILES + n * V.BN // WM)
    return tile if V.BN == WM else tile.slice(n * V.BN % WM, V.BN, 0)


@gluon.jit
def key_tile(p, buffers, stage, minus_lse2, delta, dq, total, N: gl.constexpr):
    """One tile of keys of a member; dq in flight, before and after."""
    BN: gl.constexpr = p.V.BN
    s_l: gl.constexpr = tile_layout(BN)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=tile_layout(p.V.BD), k_width=2)
    k = tile_of(buffers.k, stage, N, p.V)
    v = tile_of(buffers.v, stage, N, p.V)
    zero = gl.zeros([WM, BN], gl.float32, s_l)
    # in units of the product: s begins with the bias less lse
    x = in_fp32(buffers.bias.index(N).load(s_l)) * p.units.bias + gl.expand_dims(minus_lse2 * p.units.lse, 1)
    s_token = warpgroup_mma(buffers.q.index(stage), k.permute((1, 0)), x, use_acc=True, is_async=True)
    dp_token = warpgroup_mma(buffers.do.index(stage), v.permute((1, 0)), zero, use_acc=False, is_async=True)
    s, dq = warpgroup_mma_wait(1, deps=[s_token, dq])
    pr = gl.exp2(s * p.units.scale_log2)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    ds = pr * (dp - gl.expand_dims(delta, 1))
    if p.V.DPAIR:
        total = added(total, ds)
    ds16 = gl.convert_layout(ds.to(p.q_desc.dtype), a_l, assert_trivial=True)
    return warpgroup_mma(ds16, k, dq, is_async=True), total


@gluon.jit
def store_dpair(p, out, total, N: gl.constexpr):
    BN: gl.constexpr = p.V.BN
    layout: gl.constexpr = total.type.layout
    row = gl.expand_dims(out.i0 + gl.arange(0, WM, gl.SliceLayout(1, layout)), 1)
    key = gl.expand_dims(out.slab + N * BN + gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    start = out.dpair.ptr + p.part.to(gl.int64) * out.dpair.batch + p.entry_h.to(gl.int64) * out.dpair.head
    place = row.to(gl.int64) * out.dpair.row + key.to(gl.int64) * out.dpair.key
    gl.store(start + place, total.to(out.dpair.ptr.dtype.element_ty), mask=(row < p.sq) & (key < out.dpair.keys))


@gluon.jit
def leave_dq(p, out, m, dq):
    """dq of a member's rows, or what the slabs so far add to it."""
    BD: gl.constexpr = p.V.BD
    layout: gl.constexpr = dq.type.layout
    row = gl.expand_dims(out.i0 + gl.arange(0, WM, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(0, layout)), 0)
    exists = (row < p.sq) & (column < p.V.D)
    between = out.between_ptr + ((m.b * p.heads + m.h).to(gl.int64) * p.pitch + out.i0) * BD
    between = between + ((row - out.i0) * BD + column)
    if not p.V.FIRST:
        dq = gl.load(between) + dq
    if p.V.LAST:
        start = out.dq.ptr + m.b.to(gl.int64) * out.dq.batch + m.h.to(gl.int64) * out.dq.head
        start = start + out.i0.to(gl.int64) * out.dq.row
        gl.store(start + ((row - out.i0) * out.dq.row + column), (dq * p.units.scale).to(p.q_desc.dtype), mask=exists)
    else:
        gl.store(between, dq)


@gluon.jit
def consumer(p, buffers, out, W: gl.constexpr):
    """The keys of warpgroup W."""
    WGS: gl.constexpr = p.V.WGS
    T: gl.constexpr = p.V.T
    BN: gl.constexpr = p.V.BN
    BD: gl.constexpr = p.V.BD
    s_l: gl.constexpr = tile_layout(BN)
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)
    for t in gl.static_range(T):
        keep_bias(p, out.i0, out.slab + (W * T + t) * BN, buffers.bias.index(W * T + t))
    d0 = gl.zeros([WM, BN], gl.float32, s_l)
    d1 = d0
    d2 = d0
    d3 = d0
    for number in range(p.first, p.stop):
        count = number - p.first
        stage = count % STAGES
        mbarrier.wait(buffers.full.index(stage), count // STAGES & 1)
        minus_lse2 = buffers.lse.index(stage).load(row_l)
        delta = buffers.delta.index(stage).load(row_l)
        dq = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
        dq, d0 = key_tile(p, buffers, stage, minus_lse2, delta, dq, d0, W * T)
        if T > 1:
            dq, d1 = key_tile(p, buffers, stage, minus_lse2, delta, dq, d1, W * T + 1)
        if T > 2:
            dq, d2 = key_tile(p, buffers, stage, minus_lse2, delta, dq, d2, W * T + 2)
        if T > 3:
            dq, d3 = key_tile(p, buffers, stage, minus_lse2, delta, dq, d3, W * T + 3)
        dq = warpgroup_mma_wait(0, deps=[dq])
        bar_arrive(PAIR_MEMBER_EMPTY + stage, threads_of(WGS, 1))
        if W > 0:
            if count >= STAGES:
                bar_sync(PAIR_DQ_EMPTY + stage, threads_of(WGS, 0))
            handed(buffers.dq, stage * (WGS - 1) + W - 1).store(dq)
            bar_arrive(PAIR_DQ_FULL + stage, threads_of(WGS, 0))
        else:
            if WGS > 1:
                bar_sync(PAIR_DQ_FULL + stage, threads_of(WGS, 0))
                for w in gl.static_range(WGS - 1):
                    dq = dq + handed(buffers.dq, stage * (WGS - 1) + w).load(dq.type.layout)
                if number + STAGES < p.stop:
                    bar_arrive(PAIR_DQ_EMPTY + stage, threads_of(WGS, 0))
            leave_dq(p, out, member_of(p, number), dq)
    if p.V.DPAIR:
        store_dpair(p, out, d0, W * T)
        if T > 1:
            store_dpair(p, out, d1, W * T + 1)
        if T > 2:
            store_dpair(p, out, d2, W * T + 2)
        if T > 3:
            store_dpair(p, out, d3, W * T + 3)


@gluon.jit(
    do_not_specialize=[
        "members",
        "each",
        "groups",
        "bias_heads",
        "sharing",
        "own_heads",
        "heads",
        "group",
        "sq",
        "sk",
        "left",
        "right",
    ]
)
def _pair_rows_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, bias, dq, dpair, between_ptr, slab, members, each, groups,
    bias_heads, sharing, own_heads, heads, group, sq, sk, left, right, pitch, units, V: gl.constexpr,
):  # fmt: skip
    """Program (row tile, entry of the bias * groups + group of members). dpair: [groups * Bb,Hb,Sq,Sk]."""
    part = gl.program_id(1) % groups
    entry = gl.program_id(1) // groups
    entries = gl.num_programs(1) // groups // bias_heads
    p = Members(
        heads, group, sq, sk, left, right, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, bias,
        entry // bias_heads, entry % bias_heads, part * entries + entry // bias_heads, part * each,
        gl.minimum(part * each + each, members), sharing, own_heads, pitch, units, V,
    )  # fmt: skip
    TILES: gl.constexpr = V.WGS * V.T * V.BN // WM
    dtype: gl.constexpr = q_desc.dtype
    buffers = Buffers(
        tiles_of(dtype, STAGES, WM, V.BD),
        tiles_of(dtype, STAGES, WM, V.BD),
        tiles_of(dtype, STAGES * TILES, WM, V.BD),
        tiles_of(dtype, STAGES * TILES, WM, V.BD),
        gl.allocate_shared_memory(gl.float32, [STAGES, WM], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, WM], lse_desc.layout),
        tiles_of(bias.ptr.dtype.element_ty, V.WGS * V.T, WM, V.BN),
        tiles_of(gl.float32, STAGES * max(1, V.WGS - 1), WM, V.BD),
        barriers(STAGES, 1),
    )
    out = Results(dq, dpair, between_ptr, gl.program_id(0) * WM, slab)
    fence_async_shared()
    if V.WGS == 2:
        gl.warp_specialize(
            [(consumer, (p, buffers, out, 0)), (consumer, (p, buffers, out, 1)), (loader, (p, buffers, out))], [4, 1], [240, 24]
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (p, buffers, out, 0)),
                (consumer, (p, buffers, out, 1)),
                (consumer, (p, buffers, out, 2)),
                (loader, (p, buffers, out)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
