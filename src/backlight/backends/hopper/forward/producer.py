"""The producer partition of the forward: one warp that draws tiles, publishes them with Q, and feeds the rings of K and V.

With tau keys are visited twice (elastic.py): K of all blocks of a tile, then K and V of all blocks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.forward.overflow import first_overflows, next_overflows
from backlight.backends.hopper.forward.tiles import END, K_EMPTY, draw, lengths, place, publish, q_buffer, q_phase, tile_blocks
from backlight.backends.hopper.primitives import WM, bar_sync, load_tile, stage_of


@gluon.jit
def feed(p, desc, tiles, full, EMPTY: gl.constexpr, count, b, h, start, length, row):
    """Rows of a key head into the next stage of a ring, once it is free."""
    stage = stage_of(count, p.ST)
    if count >= p.ST:
        bar_sync(EMPTY + stage, p.RING_THREADS)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    load_tile(desc, b, h, start, length, row, full.index(stage), tiles.index(stage), p.VARLEN)


@gluon.jit
def send(p, tile, head, z, block, ticket, count, turn):
    """Q of a tile, then K and V of its blocks from right to left.

    Returns which tile comes next, if that was still to be drawn (`producer`), and how many tiles of V were sent so far.
    """
    BM: gl.constexpr = p.NC * WM
    b = head // p.heads
    h = head % p.heads
    q_start, k_start, sq, sk = lengths(p, z)
    i0 = block * BM
    begin, _, _, end = tile_blocks(p, i0, BM, sq, sk)
    publish(p, turn & 3, head, z, block, ticket)
    for w in gl.static_range(p.NC):
        at = q_buffer(p, turn, w)
        mbarrier.wait(p.q_empty.index(at), q_phase(p, turn) ^ 1)
        mbarrier.expect(p.q_full.index(at), p.q_desc.block_type.nbytes)
        load_tile(p.q_desc, b, h, q_start, sq, i0 + w * WM, p.q_full.index(at), p.q_s.index(at), p.VARLEN)
    # tiles of K that were sent beyond those of V
    ahead = 0
    if p.TAU:
        for j in range(end - begin):
            feed(p, p.k_desc, p.k_s, p.k_full, K_EMPTY, 2 * count + j, b, h // p.group, k_start, sk, (end - 1 - j) * p.BN)
        ahead = count + end - begin
    for j in range(end - begin):
        key = (end - 1 - j) * p.BN
        feed(p, p.k_desc, p.k_s, p.k_full, K_EMPTY, count + ahead, b, h // p.group, k_start, sk, key)
        feed(p, p.v_desc, p.v_s, p.v_full, p.V_EMPTY, count, b, h // p.group, k_start, sk, key)
        count += 1
        if p.QB > 1:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
            if (j == 0) & (ticket >= 0):
                tile = draw(p, tile)
    return tile, count


@gluon.jit
def producer(p):
    ST: gl.constexpr = p.ST
    tile = gl.program_id(0)
    count = tile * 0
    turn = tile * 0
    while tile < p.n_tiles:
        ticket = tile
        head, z, block, exists = place(p, tile)
        # the counter takes as long to answer as a load. It is asked while consumers have work: on the tile before, as long as Q
        # has one buffer, or on the first block of this one
        if p.QB == 1:
            tile = draw(p, tile)
        if exists:
            tile, count = send(p, tile, head, z, block, ticket, count, turn)
            turn += 1
        elif p.QB > 1:
            tile = draw(p, tile)
    if p.KEEP_FIRST_MAX:
        for i in gl.static_range(p.QB):
            for w in gl.static_range(p.NC):
                mbarrier.wait(p.q_empty.index(q_buffer(p, turn + i, w)), q_phase(p, turn + i) ^ 1)
        # numbers of tiles fall in each warpgroup's list: what several have in common is done once
        tiles = first_overflows(p)
        tile = gl.maximum(gl.maximum(tiles[0], tiles[1]), tiles[2])
        while tile >= 0:
            head, z, block, _ = place(p, tile)
            tiles, owners = next_overflows(p, tiles, tile, head, z, block)
            _, count = send(p, tile, head, z, block, -1 - (8 * tile + owners), count, turn)
            turn += 1
            tile = gl.maximum(gl.maximum(tiles[0], tiles[1]), tiles[2])
    # every arrival of the consumers is met, those of the last round included
    k_count = count * 2 if p.TAU else count
    for i in gl.static_range(ST):
        if k_count >= ST - i:
            bar_sync(K_EMPTY + stage_of(k_count + i, ST), p.RING_THREADS)
        if count >= ST - i:
            bar_sync(p.V_EMPTY + stage_of(count + i, ST), p.RING_THREADS)
    publish(p, turn & 3, END, 0, 0, 0)
    for w in gl.static_range(p.NC):
        mbarrier.wait(p.q_empty.index(q_buffer(p, turn, w)), q_phase(p, turn) ^ 1)
        mbarrier.arrive(p.q_full.index(q_buffer(p, turn, w)), count=1)
