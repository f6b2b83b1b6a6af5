"""The loading partition of second derivatives: one warp that draws key tiles, publishes them and feeds the ring of rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.backward.key_tiles import drawn, key_tile, load_keys, publish, publish_end, tile_row
from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP, SECOND_ROWS_EMPTY
from backlight.backends.hopper.compat import tma_load
from backlight.backends.hopper.primitives import WM, bar_sync, load_tile, stage_of
from backlight.backends.hopper.second.arguments import STATES


@gluon.jit
def load_all_keys(p, t, turn, W: gl.constexpr):
    """K, V and their tangents of a warpgroup, when its dk and dv of the tile before have left."""
    full = p.buffers.keys_full.index(W)
    mbarrier.wait(p.buffers.keys_empty.index(W), (turn & 1) ^ 1)
    K: gl.constexpr = p.k_desc.block_type.nbytes
    VALUES: gl.constexpr = p.v_desc.block_type.nbytes
    mbarrier.expect(full, (K * 2 if p.V.TK else K) + (VALUES * 2 if p.V.TV else VALUES))
    load_keys(p, t, p.k_desc, W * WM, full, p.buffers.k.index(W))
    load_keys(p, t, p.v_desc, W * WM, full, p.buffers.v.index(W))
    if p.V.TK:
        load_keys(p, t, p.tk_desc, W * WM, full, p.buffers.tk.index(W))
    if p.V.TV:
        load_keys(p, t, p.tv_desc, W * WM, full, p.buffers.tv.index(W))


@gluon.jit
def load_rows(p, t, member, i, count):
    """Row block i of a query head into the next stage of the ring."""
    stage = stage_of(count, p.V.ST)
    full = p.buffers.rows_full.index(stage)
    h = t.kv_head * p.group + member
    if count >= p.V.ST:
        bar_sync(SECOND_ROWS_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    Q: gl.constexpr = p.q_desc.block_type.nbytes
    mbarrier.expect(full, (Q * 2 if p.V.TQ else Q) + p.dto_desc.block_type.nbytes + STATES * p.V.BM * 4)
    load_tile(p.q_desc, t.b, h, t.q_start, t.sq, i * p.V.BM, full, p.buffers.q.index(stage), p.V.VARLEN)
    if p.V.TQ:
        load_tile(p.tq_desc, t.b, h, t.q_start, t.sq, i * p.V.BM, full, p.buffers.tq.index(stage), p.V.VARLEN)
    load_tile(p.dto_desc, t.b, h, t.q_start, t.sq, i * p.V.BM, full, p.buffers.dto.index(stage), p.V.VARLEN)
    tma_load(p.state_desc, [tile_row(p, t, member, i) * STATES], full, p.buffers.state.index(stage))


@gluon.jit
def loader(p):
    ST: gl.constexpr = p.V.ST
    count = p.sq * 0
    turn = count
    number = gl.program_id(0)
    while number < p.n_tiles:
        t = key_tile(p, number, p.together)
        publish(p, turn, number, turn, t)
        for w in gl.static_range(2):
            load_all_keys(p, t, turn, w)
        for member in range(p.group):
            for i in range(t.begin, t.end):
                load_rows(p, t, member, i, count)
                count += 1
        turn += 1
        number = drawn(p)
    publish_end(p, turn)
    # every arrival is met, those of the last round included
    for i in gl.static_range(ST):
        if count >= ST - i:
            bar_sync(SECOND_ROWS_EMPTY + stage_of(count + i, p.V.ST), BOTH_GROUPS_AND_WARP)
