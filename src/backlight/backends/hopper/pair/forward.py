"""Forward of heads that share a pair bias (eq. 31): a CTA owns 64 rows of the bias and walks over members.

The bias of its rows stays in shared memory for all keys. Warpgroups take members in turn, each with a ring of key tiles of its
own; they meet nowhere but in the bias.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from backlight.backends.hopper.barriers import GROUP_AND_WARP, PAIR_BIAS_FULL, PAIR_KEYS_EMPTY
from backlight.backends.hopper.compat import Maybe, arguments, warpgroup_mma_wait
from backlight.backends.hopper.pair.members import STAGES, keep_bias, member_of, threads_of, tile_layout, widened
from backlight.backends.hopper.primitives import (
    LN2,
    WM,
    as_weights,
    bar_arrive,
    bar_sync,
    barriers,
    load_tile,
    log2_of_sum,
    rescaled,
    row_sum_layout,
    softmax_step,
    tiles_of,
)
from backlight.backends.hopper.terms import sigmoid


@arguments
class Rows:
    """Arguments of the kernel, its entry of the bias, the members from `first` to `stop`, and its rows; `Members` of the
    backward has more."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    bias: Maybe
    gate: Maybe
    y: Maybe
    lse_ptr: gl.tensor
    entry_b: gl.tensor
    entry_h: gl.tensor
    first: gl.tensor
    stop: gl.tensor
    sharing: gl.tensor
    own_heads: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    left: gl.tensor
    right: gl.tensor
    units: Maybe
    i0: gl.tensor
    tiles: gl.tensor
    V: gl.constexpr


@arguments
class Buffers:
    """Shared memory of a CTA and its mbarriers: of each warpgroup the rows of two members and two key tiles."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def loader(p, buffers):
    """Key tiles of WGS members side by side; with the first one of a member come its rows."""
    WGS: gl.constexpr = p.V.WGS
    rounds = gl.cdiv(p.stop - p.first, WGS)
    for round in range(rounds):
        for j in range(p.tiles):
            use = round * p.tiles + j
            stage = use % STAGES
            for w in gl.static_range(WGS):
                number = p.first + round * WGS + w
                if number < p.stop:
                    if use >= STAGES:
                        bar_sync(PAIR_KEYS_EMPTY + (w * STAGES + stage), GROUP_AND_WARP)
                    m = member_of(p, number)
                    full = buffers.full.index(w * STAGES + stage)
                    if j == 0:
                        mbarrier.expect(full, p.q_desc.block_type.nbytes + 2 * p.k_desc.block_type.nbytes)
                        load_tile(p.q_desc, m.b, m.h, 0, 0, p.i0, full, buffers.q.index(w * STAGES + round % STAGES), False)
                    else:
                        mbarrier.expect(full, 2 * p.k_desc.block_type.nbytes)
                    load_tile(p.k_desc, m.b, m.g, 0, 0, j * p.V.BN, full, buffers.k.index(w * STAGES + stage), False)
                    load_tile(p.v_desc, m.b, m.g, 0, 0, j * p.V.BN, full, buffers.v.index(w * STAGES + stage), False)
    # every arrival is met
    for w in gl.static_range(WGS):
        uses = (p.stop - p.first - w + WGS - 1) // WGS * p.tiles
        for i in gl.static_range(STAGES):
            if uses >= STAGES - i:
                bar_sync(PAIR_KEYS_EMPTY + (w * STAGES + (uses + i) % STAGES), GROUP_AND_WARP)


@gluon.jit
def leave(p, m, o, row_max, row_sum):
    """y and lse of a member's rows."""
    BD: gl.constexpr = p.V.BD
    layout: gl.constexpr = o.type.layout
    total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, layout))
    seen = total > 0
    exponent, fraction = log2_of_sum(gl.where(seen, total, 1.0))
    top = gl.convert_layout(row_max, gl.SliceLayout(1, layout)) * p.units.scale_log2
    line = gl.arange(0, WM, gl.SliceLayout(1, layout))
    lse = gl.where(seen, (top + exponent + fraction) * LN2, top)
    gl.store(p.lse_ptr + ((m.b * p.heads + m.h).to(gl.int64) * p.sq + p.i0) + line, lse, mask=line < p.sq - p.i0)
    o = o * gl.expand_dims(1.0 / gl.where(seen, total, 1.0), 1)
    row = gl.expand_dims(line, 1)
    column = gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(0, layout)), 0)
    exists = (row < p.sq - p.i0) & (column < p.V.DV)
    if p.gate is not None:
        start = p.gate.ptr + m.b.to(gl.int64) * p.gate.batch + m.h.to(gl.int64) * p.gate.head + p.i0.to(gl.int64) * p.gate.row
        o = o * sigmoid(gl.load(start + (row * p.gate.row + column), mask=exists, other=0.0).to(gl.float32))
    start = p.y.ptr + m.b.to(gl.int64) * p.y.batch + m.h.to(gl.int64) * p.y.head + p.i0.to(gl.int64) * p.y.row
    gl.store(start + (row * p.y.row + column), o.to(p.q_desc.dtype), mask=exists)


@gluon.jit
def consumer(p, buffers, W: gl.constexpr):
    """Members W, W + WGS, ..."""
    WGS: gl.constexpr = p.V.WGS
    BD: gl.constexpr = p.V.BD
    BN: gl.constexpr = p.V.BN
    s_l: gl.constexpr = tile_layout(BN)
    for j in range(W, p.tiles, WGS):
        keep_bias(p, p.i0, j * BN, buffers.bias.index(j))
    bar_sync(PAIR_BIAS_FULL, threads_of(WGS, 0))
    for number in range(p.first + W, p.stop, WGS):
        round = (number - p.first) // WGS
        q = buffers.q.index(W * STAGES + round % STAGES)
        o = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
        row_max = gl.full([WM], -float("inf"), gl.float32, gl.SliceLayout(1, s_l))
        row_sum = gl.zeros([WM, 8], gl.float32, row_sum_layout(BN))
        for j in range(p.tiles):
            use = round * p.tiles + j
            stage = W * STAGES + use % STAGES
            # in units of the product, which is added to it
            x = widened(buffers.bias.index(j).load(s_l)) * p.units.bias
            mbarrier.wait(buffers.full.index(stage), use // STAGES & 1)
            s_token = warpgroup_mma(q, buffers.k.index(stage).permute((1, 0)), x, use_acc=True, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s_token])
            weight, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.units.scale_log2, True)
            o_token = warpgroup_mma(
                as_weights(weight, o, p.q_desc.dtype), buffers.v.index(stage), rescaled(o, rescale), is_async=True
            )
            o = warpgroup_mma_wait(0, deps=[o_token])
            bar_arrive(PAIR_KEYS_EMPTY + stage, GROUP_AND_WARP)
        leave(p, member_of(p, number), o, row_max, row_sum)


@gluon.jit(do_not_specialize=["members", "each", "groups", "bias_heads", "sharing", "own_heads", "heads", "group", "sq", "sk", "left", "right"])
def _pair_forward_kernel(
    q_desc, k_desc, v_desc, bias, gate, y, lse_ptr, members, each, groups, bias_heads, sharing, own_heads, heads, group,
    sq, sk, left, right, units, V: gl.constexpr,
):  # fmt: skip
    """Program (row tile, entry of the bias * groups + group of members). V.T: key tiles."""
    part = gl.program_id(1) % groups
    entry = gl.program_id(1) // groups
    p = Rows(
        q_desc, k_desc, v_desc, bias, gate, y, lse_ptr, entry // bias_heads, entry % bias_heads, part * each,
        gl.minimum(part * each + each, members), sharing, own_heads, heads, group, sq, sk, left, right, units,
        gl.program_id(0) * WM, gl.cdiv(sk, V.BN), V,
    )  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    buffers = Buffers(
        tiles_of(dtype, V.WGS * STAGES, WM, V.BD),
        tiles_of(dtype, V.WGS * STAGES, V.BN, V.BD),
        tiles_of(dtype, V.WGS * STAGES, V.BN, V.BD),
        tiles_of(bias.ptr.dtype.element_ty, V.T, WM, V.BN),
        barriers(V.WGS * STAGES, 1),
    )
    fence_async_shared()
    if V.WGS == 3:
        gl.warp_specialize(
            [
                (consumer, (p, buffers, 0)),
                (consumer, (p, buffers, 1)),
                (consumer, (p, buffers, 2)),
                (loader, (p, buffers)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (p, buffers, 0)),
                (consumer, (p, buffers, 1)),
                (consumer, (p, buffers, 2)),
                (consumer, (p, buffers, 3)),
                (loader, (p, buffers)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )
