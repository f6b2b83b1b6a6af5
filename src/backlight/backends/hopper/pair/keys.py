"""dk and dv of a shared pair bias (eq. 33): a CTA owns 64 keys of the bias and walks over members.

The bias of its keys stays in shared memory for all rows. Warpgroups take row tiles in turn, in [keys, rows] tiles; dk and dv of
a member are added up over them in their order, by the first one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from backlight.backends.hopper.barriers import (
    GROUP_AND_WARP,
    PAIR_DK_EMPTY,
    PAIR_DK_FULL,
    PAIR_MEMBER_EMPTY,
    PAIR_ROWS_EMPTY,
)
from backlight.backends.hopper.compat import Maybe, arguments, tma_load, warpgroup_mma_wait
from backlight.backends.hopper.pair.members import (
    STAGES,
    Members,
    handed,
    keep_bias,
    member_of,
    threads_of,
    tile_layout,
    widened,
)
from backlight.backends.hopper.primitives import WM, bar_arrive, bar_sync, barriers, load_tile, tiles_of
from backlight.backends.hopper.terms import LOG2E

# row tiles ahead
ROW_STAGES = gl.constexpr(4)


@arguments
class Buffers:
    """Shared memory of a CTA and its mbarriers: keys of two members, a ring of row tiles."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor


@arguments
class Results:
    """Where dk and dv go; the CTA's keys, and row tiles of a member."""

    dk: Maybe
    dv: Maybe
    j0: gl.tensor
    tiles: gl.tensor


@gluon.jit
def loader(p, buffers, out):
    THREADS: gl.constexpr = threads_of(p.V.WGS, 1)
    HALVES: gl.constexpr = p.V.BN // WM
    use = p.first * 0
    for number in range(p.first, p.stop):
        count = number - p.first
        side = count % STAGES
        if count >= STAGES:
            bar_sync(PAIR_MEMBER_EMPTY + side, THREADS)
        m = member_of(p, number)
        full = buffers.keys_full.index(side)
        mbarrier.expect(full, 2 * p.k_desc.block_type.nbytes)
        load_tile(p.k_desc, m.b, m.g, 0, 0, out.j0, full, buffers.k.index(side), False)
        load_tile(p.v_desc, m.b, m.g, 0, 0, out.j0, full, buffers.v.index(side), False)
        for i in range(out.tiles):
            stage = use % ROW_STAGES
            if use >= ROW_STAGES:
                bar_sync(PAIR_ROWS_EMPTY + stage, GROUP_AND_WARP)
            full = buffers.rows_full.index(stage)
            mbarrier.expect(full, 2 * (p.q_desc.block_type.nbytes + HALVES * p.lse_desc.block_type.nbytes))
            load_tile(p.q_desc, m.b, m.h, 0, 0, i * p.V.BN, full, buffers.q.index(stage), False)
            load_tile(p.do_desc, m.b, m.h, 0, 0, i * p.V.BN, full, buffers.do.index(stage), False)
            for half in gl.static_range(HALVES):
                at = (m.b * p.heads + m.h) * p.pitch + i * p.V.BN + half * WM
                tma_load(p.lse_desc, [at], full, buffers.lse.index(stage * HALVES + half))
                tma_load(p.delta_desc, [at], full, buffers.delta.index(stage * HALVES + half))
            use = use + 1
    # every arrival is met
    count = p.stop - p.first
    for i in gl.static_range(STAGES):
        if count >= STAGES - i:
            bar_sync(PAIR_MEMBER_EMPTY + (count + i) % STAGES, THREADS)
    for i in gl.static_range(ROW_STAGES):
        if use >= ROW_STAGES - i:
            bar_sync(PAIR_ROWS_EMPTY + (use + i) % ROW_STAGES, GROUP_AND_WARP)


@gluon.jit
def row_tile(p, buffers, side, use, i, dk, dv):
    """Rows of tile i of a member, 64 at a time: dk and dv grow."""
    HALVES: gl.constexpr = p.V.BN // WM
    s_l: gl.constexpr = tile_layout(WM)
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    dtype: gl.constexpr = p.q_desc.dtype
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    zero = gl.zeros([WM, WM], gl.float32, s_l)
    stage = use % ROW_STAGES
    mbarrier.wait(buffers.rows_full.index(stage), use // ROW_STAGES & 1)
    for half in gl.static_range(HALVES):
        q = buffers.q.index(stage).slice(half * WM, WM, 0)
        do = buffers.do.index(stage).slice(half * WM, WM, 0)
        s_token = warpgroup_mma(buffers.k.index(side), q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp_token = warpgroup_mma(buffers.v.index(side), do.permute((1, 0)), zero, use_acc=False, is_async=True)
        bias = buffers.bias.index(i * HALVES + half).permute((1, 0)).load(s_l)
        minus_lse2 = buffers.lse.index(stage * HALVES + half).load(row_l)
        x = widened(bias) * LOG2E + gl.expand_dims(minus_lse2, 0)
        s, dk, dv = warpgroup_mma_wait(1, deps=[s_token, dk, dv])
        pr = gl.exp2(s * p.units.scale_log2 + x)
        p16 = gl.convert_layout(pr.to(dtype), a_l, assert_trivial=True)
        dp = warpgroup_mma_wait(0, deps=[dp_token])
        dv = warpgroup_mma(p16, do, dv, is_async=True)
        ds = pr * (dp - gl.expand_dims(buffers.delta.index(stage * HALVES + half).load(row_l), 0))
        ds16 = gl.convert_layout(ds.to(dtype), a_l, assert_trivial=True)
        dk = warpgroup_mma(ds16, q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    bar_arrive(PAIR_ROWS_EMPTY + stage, GROUP_AND_WARP)
    return dk, dv


@gluon.jit
def leave(p, out, place, m, value, D: gl.constexpr):
    BD: gl.constexpr = p.V.BD
    layout: gl.constexpr = value.type.layout
    key = gl.expand_dims(gl.arange(0, WM, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(0, layout)), 0)
    start = place.ptr + m.b.to(gl.int64) * place.batch + m.g.to(gl.int64) * place.head + out.j0.to(gl.int64) * place.row
    gl.store(start + (key * place.row + column), value.to(p.q_desc.dtype), mask=(key < p.sk - out.j0) & (column < D))


@gluon.jit
def consumer(p, buffers, out, W: gl.constexpr):
    """Row tiles W, W + WGS, ... of every member."""
    WGS: gl.constexpr = p.V.WGS
    BD: gl.constexpr = p.V.BD
    HALVES: gl.constexpr = p.V.BN // WM
    for i in range(W, out.tiles, WGS):
        for half in gl.static_range(HALVES):
            n = i * HALVES + half
            keep_bias(p, n * WM, out.j0, buffers.bias.index(n))
    for number in range(p.first, p.stop):
        count = number - p.first
        side = count % STAGES
        dk = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
        dv = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
        mbarrier.wait(buffers.keys_full.index(side), count // STAGES & 1)
        for i in range(W, out.tiles, WGS):
            dk, dv = row_tile(p, buffers, side, count * out.tiles + i, i, dk, dv)
        bar_arrive(PAIR_MEMBER_EMPTY + side, threads_of(WGS, 1))
        if W > 0:
            if count > 0:
                bar_sync(PAIR_DK_EMPTY, threads_of(WGS, 0))
            handed(buffers.dk, 2 * W - 2).store(dk)
            handed(buffers.dk, 2 * W - 1).store(dv)
            bar_arrive(PAIR_DK_FULL, threads_of(WGS, 0))
        else:
            if WGS > 1:
                bar_sync(PAIR_DK_FULL, threads_of(WGS, 0))
                for w in gl.static_range(WGS - 1):
                    dk = dk + handed(buffers.dk, 2 * w).load(dk.type.layout)
                    dv = dv + handed(buffers.dk, 2 * w + 1).load(dv.type.layout)
                if number + 1 < p.stop:
                    bar_arrive(PAIR_DK_EMPTY, threads_of(WGS, 0))
            m = member_of(p, number)
            leave(p, out, out.dk, m, dk * p.units.scale, p.V.D)
            leave(p, out, out.dv, m, dv, p.V.DV)


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
def _pair_keys_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, bias, dk, dv, members, each, groups,
    bias_heads, sharing, own_heads, heads, group, sq, sk, left, right, pitch, units,
    V: gl.constexpr,
):  # fmt: skip
    """Program (key tile, entry of the bias * groups + group of members)."""
    part = gl.program_id(1) % groups
    entry = gl.program_id(1) // groups
    p = Members(
        q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, bias, entry // bias_heads, entry % bias_heads,
        part, part * each, gl.minimum(part * each + each, members), sharing, own_heads, heads,
        group, sq, sk, left, right, pitch, units, V,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    buffers = Buffers(
        tiles_of(dtype, STAGES, WM, V.BD),
        tiles_of(dtype, STAGES, WM, V.BD),
        tiles_of(dtype, ROW_STAGES, V.BN, V.BD),
        tiles_of(dtype, ROW_STAGES, V.BN, V.BD),
        gl.allocate_shared_memory(gl.float32, [ROW_STAGES * V.BN // WM, WM], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [ROW_STAGES * V.BN // WM, WM], lse_desc.layout),
        tiles_of(bias.ptr.dtype.element_ty, V.T, WM, WM),
        tiles_of(gl.float32, 2 * (V.WGS - 1), WM, V.BD),
        barriers(STAGES, 1),
        barriers(ROW_STAGES, 1),
    )
    out = Results(dk, dv, gl.program_id(0) * WM, gl.cdiv(sq, V.BN))
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
