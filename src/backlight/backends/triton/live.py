"""Backward with entmax, before everything else: which tiles have a weight above zero, for the kernels that follow to visit no
others (eq. 85), and sums of each row over its keys: W, which a gradient at lse needs, and the gradient by alpha (eq. 87, 89).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import head_table
from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.entmax import CHUNK, Place, Work, either, scores
from backlight.backends.triton.launch import Launch, compact, rows_of
from backlight.backends.triton.loads import key_tile, own_tile
from backlight.backends.triton.powers import above, alpha_of, raised, sink_above
from backlight.backends.triton.primitives import LOG2E, Frame, key_span, row_block
from backlight.backends.triton.reach import TOGETHER, candidates_of, reach_of, reached
from backlight.backends.triton.visits import Mask, intervals_of, tiles_of, visited, visits_of
from backlight.call import Call

LIST_BLOCK = 256


class Given(NamedTuple):
    """Rows of q, k, v and do, and the rest by pointers; dlse is None where there is none, eta where rows have all of their keys
    here."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse_ptr: Any
    dlse_ptr: Any
    eta_ptr: Any
    table_ptr: Any
    sink_ptr: Any
    pair: Any
    reach: Any = None


class Made(NamedTuple):
    """W [B,Hq,Sq], a byte for each tile of the kernel, parts of dentmax by program, and F, W, W2 and the sum of p ln p
    [4,B,Hq,Sq]; None for what is not wanted."""

    slopes_ptr: Any
    live_ptr: Any
    dalpha_ptr: Any
    sums_ptr: Any


@triton.jit
def with_sink(w, entropy, sink_ptr, lse, alpha, V: tl.constexpr):
    """Sums of slopes and of p ln p with the sink's."""
    e = 1 / (alpha - 1)
    sink = tl.load(sink_ptr).to(tl.float32)
    u0 = sink_above(sink, lse, alpha)
    w0 = raised(u0, e, V, 1)
    w += w0
    entropy += tl.where(u0 > 0, w0 * u0 * e * tl.log(tl.where(u0 > 0, u0, 1.0)), 0.0)
    return w, entropy


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _entmax_rows_kernel(
    given, made, k_desc, v_desc, pair_desc, frame, sq, sk, n_segments, V: tl.constexpr, PAIR_TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    geometry = frame.geometry
    TMA: tl.constexpr = k_desc is not None
    BY_ALPHA: tl.constexpr = made.dalpha_ptr is not None
    LIVE: tl.constexpr = made.live_ptr is not None
    SUMS: tl.constexpr = made.sums_ptr is not None
    WEIGHTS: tl.constexpr = BY_ALPHA or SUMS or made.slopes_ptr is not None
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    lanes = tl.arange(0, BM)
    exists = lanes < block.n_rows
    q = own_tile(given.q, block, BM, V.D, V.BD)
    if BY_ALPHA:
        do = own_tile(given.do, block, BM, V.DV, V.BDV)
    alpha = alpha_of(block.h, geometry, V)
    e = 1 / (alpha - 1)
    from_first = tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row
    lse = tl.load(given.lse_ptr + from_first + lanes, mask=exists, other=float("-inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    span = key_span(block, geometry, V, BN)
    key_tiles = tiles_of(sk, n_segments, V, BN)
    visits = visits_of(span, frame.mask, block.b, block.h, block.tile, tl.num_programs(0), key_tiles, geometry, V, BN)
    intervals = intervals_of(frame.mask, block.b, block.h, block.segment, sq, sk, n_segments, geometry, V, BN)
    table_ptr = head_table(given.table_ptr, block.h, geometry, True)
    place = Place(block, span, intervals, table_ptr, given.pair, pair_desc)
    live_ptr = made.live_ptr
    if LIVE:
        live_ptr += (tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + block.tile) * key_tiles
    w = tl.zeros([BM], tl.float32)
    entropy = w
    of_keys = w
    moved = w
    f = w
    w2 = w
    REACH: tl.constexpr = given.reach is not None
    # tiles that are told of together: under norms, those of them that may reach above the thresholds
    TILES: tl.constexpr = TOGETHER if REACH else CHUNK
    if REACH:
        candidates = candidates_of(given.reach, q, block, alpha, key_tiles, geometry, BN)
        work = Work(q, given.k, place, geometry, visits, None, 0.0, e, 0.0)
        sees = exists & (lse > float("-inf"))
        low = tl.min(tl.where(sees, lse * (alpha - 1) - 1, float("inf")), 0)
        list_ptr = given.reach.list + (tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + block.tile) * key_tiles
    if visits.start < visits.stop:
        for chunk in range(visits.start, visits.stop, TILES * BN):
            bits = tl.zeros([BM], tl.int32)
            stop = tl.minimum(chunk + TILES * BN, visits.stop)
            if REACH:
                asked = reached(list_ptr, candidates, chunk, low, work, BM, BN)
                stop = chunk + asked * BN
            for step in range(chunk, stop, BN):
                j0, at_edge = visited(step, visits, V, BN)
                if REACH:
                    j0 = tl.load(list_ptr + (step - chunk) // BN).to(tl.int32) * BN
                k = key_tile(given.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
                x = scores(q, k, j0, at_edge, place, geometry, V, PAIR_TMA, BM, BN)
                if LIVE:
                    top = above(tl.max(x, 1) * geometry.unit - lse2, alpha)
                    bits |= (top > 0).to(tl.int32) << ((step - chunk) // BN)
                if WEIGHTS:
                    u = above(x * geometry.unit - lse2[:, None], alpha)
                    slopes = raised(u, e, V, 1)
                    w += tl.sum(slopes, 1)
                if BY_ALPHA or SUMS:
                    p = slopes * u
                    # p ln p
                    own = tl.where(u > 0, p * e * tl.log(u), 0.0)
                    entropy += tl.sum(own, 1)
                if SUMS:
                    f += tl.sum(p, 1)
                    w2 += tl.sum(raised(u, e, V, 2), 1)
                if BY_ALPHA:
                    v = key_tile(given.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
                    dp = tl.dot(do, tl.trans(v), input_precision=V.PRECISION)
                    of_keys += tl.sum((p * e - own) * dp, 1)
                    moved += tl.sum(slopes * dp, 1)
            if LIVE:
                told = tl.arange(0, TILES)
                tiles = chunk // BN + told
                exist = tiles < key_tiles
                if REACH:
                    tiles = tl.load(list_ptr + told, mask=told < asked, other=0).to(tl.int32)
                    exist = told < asked
                alive = (tl.reduce(bits, 0, either) >> told) & 1
                tl.store(live_ptr + tiles, alive.to(tl.int8), mask=exist)
    if V.SINK:
        w, entropy = with_sink(w, entropy, given.sink_ptr + block.h, lse, alpha, V)
    weighs = w > 0
    safe_w = tl.where(weighs, w, 1.0)
    if made.slopes_ptr is not None:
        tl.store(made.slopes_ptr + from_first + lanes, safe_w, mask=exists)
    if SUMS:
        step = tl.cast(tl.num_programs(1), tl.int64) * sq
        sums_ptr = made.sums_ptr + from_first + lanes
        tl.store(sums_ptr, f, mask=exists)
        tl.store(sums_ptr + step, w, mask=exists)
        tl.store(sums_ptr + 2 * step, w2, mask=exists)
        tl.store(sums_ptr + 3 * step, entropy, mask=exists)
    if BY_ALPHA:
        if given.eta_ptr is None:
            eta = (e - entropy) / safe_w
        else:
            eta = tl.load(given.eta_ptr + from_first + lanes, mask=exists, other=0.0)
        rows = of_keys - eta * moved
        if given.dlse_ptr is not None:
            rows -= tl.load(given.dlse_ptr + from_first + lanes, mask=exists, other=0.0).to(tl.float32) * (e - eta)
        part = tl.sum(tl.where(exists & weighs, rows, 0.0), 0) * e
        tl.store(made.dalpha_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), part)


@triton.jit(do_not_specialize=["granule_rows", "granule_keys", "owned", "others"])
def _live_lists_kernel(
    live_ptr, list_ptr, counts_ptr, granule_rows, granule_keys, owned, others, OF_ROWS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GM: tl.constexpr, GN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, or of keys, head): the tiles of the other kind in which any tile [GM, GN] that it meets lives."""
    owner = tl.program_id(0)
    number = tl.cast(tl.program_id(1), tl.int64) * owned + owner
    live_ptr += tl.cast(tl.program_id(1), tl.int64) * granule_rows * granule_keys
    list_ptr += number * tl.maximum(others, 1)
    count = 0
    DOWN: tl.constexpr = (BM + GM - 1) // GM
    ACROSS: tl.constexpr = (BN + GN - 1) // GN
    for start in range(0, others, BLOCK):
        other = start + tl.arange(0, BLOCK)
        if OF_ROWS:
            row = owner * BM // GM + other * 0
            key = other * BN // GN
        else:
            row = other * BM // GM
            key = owner * BN // GN + other * 0
        alive = other * 0
        for i in tl.static_range(DOWN):
            for j in tl.static_range(ACROSS):
                inside = (other < others) & (row + i < granule_rows) & (key + j < granule_keys)
                alive |= tl.load(live_ptr + (row + i) * granule_keys + key + j, mask=inside, other=0).to(tl.int32)
        place = count + tl.cumsum(alive, 0) - alive
        tl.store(list_ptr + place, other.to(list_ptr.dtype.element_ty), mask=alive > 0)
        count += tl.sum(alive, 0)
    tl.store(counts_ptr + number, count)


class Live(NamedTuple):
    """Tiles [block_m, block_n] of all heads, a byte each: [B * Hq, row tiles, key tiles]."""

    tiles: Tensor
    config: KernelConfig

    def lists(self, launch: Launch, config: KernelConfig, of_rows: bool) -> Mask:
        return lists_of(launch, self, config, of_rows)


def sweep(
    launch: Launch, lse: Tensor, dlse: Tensor | None, do: Tensor | None, wants_slopes: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(W [B,Hq,Sq], dentmax [Hq]), the second where `do` is given; and `launch.live`, where tiles are left out and it is not
    known."""
    call, config = launch.call, launch.config("live")
    assert call.entmax is not None
    grid = launch.row_grid(config.block_m)
    batch, heads, sq, _ = call.q.shape
    slopes = torch.empty((batch, heads, sq), dtype=torch.float32, device=lse.device) if wants_slopes else None
    parts = None if do is None else torch.empty((batch, heads, grid[0]), dtype=torch.float32, device=lse.device)
    live = None
    if launch.skips and launch.live is None:
        shape = (grid[1], grid[0], max(1, -(-call.k.shape[2] // config.block_n)))
        live = torch.zeros(shape, dtype=torch.int8, device=lse.device)
        launch.live = Live(live, config)
    # of a part dlse is -delta, which this gradient does not see
    _start(launch, lse, None if launch.known_part is not None else dlse, do, Made(slopes, live, parts, None))
    return slopes, None if parts is None else launch.head_sums(parts, call.entmax.dtype, "dentmax")


def part_sums(call: Call) -> Tensor:
    """[4,B,Hq,Sq]: F, W, W2 and the sum of p ln p of a part's rows at its lse."""
    launch = Launch(call)
    assert launch.known_part is not None
    lse = compact(launch.known_part.lse)
    made = torch.empty((4, *lse.shape), dtype=torch.float32, device=lse.device)
    _start(launch, lse, None, None, Made(None, None, None, made))
    return made


def _start(launch: Launch, lse: Tensor, dlse: Tensor | None, do: Tensor | None, made: Made) -> None:
    call, config, part = launch.call, launch.config("live"), launch.known_part
    grid = launch.row_grid(config.block_m)
    eta = None if part is None or part.eta is None else compact(part.eta)
    if grid[0] and grid[1]:
        packing, geometry, *lengths = launch.shared(call.cu_seqlens_q, config.block_m)
        pair_tma, (pair, pair_desc) = launch.pair(config)
        rows = (rows_of(x) for x in (launch.q, launch.k, launch.v, launch.q if do is None else do))
        launch.start(
            _entmax_rows_kernel,
            grid,
            Given(
                *rows,
                lse,
                None if dlse is None else compact(dlse),
                eta,
                launch.table,
                launch.sink,
                pair,
                reach_of(launch, config),
            ),
            made,
            *launch.all_described(config, (), (launch.k, launch.v)),
            pair_desc,
            Frame(launch.given_mask(config, of_rows=True), packing, geometry),
            *lengths,
            V=launch.variant._replace(LIVE=False),
            PAIR_TMA=pair_tma,
            **config.launch,
        )


def lists_of(launch: Launch, live: Live, config: KernelConfig, of_rows: bool) -> Mask:
    """The tiles that kernels of a configuration visit, by row tiles or by key tiles, as a mask that hides nothing."""
    call = launch.call
    number, granule_rows, granule_keys = live.tiles.shape
    row_tiles, key_tiles = -(-call.q.shape[2] // config.block_m), -(-call.k.shape[2] // config.block_n)
    # kernels that own keys count one tile more than there are
    owned, others = (row_tiles, key_tiles) if of_rows else (key_tiles + 1, row_tiles)
    device = live.tiles.device
    lists = torch.empty(number * owned * max(1, others), dtype=torch.int32, device=device)
    counts = torch.empty(number * owned, dtype=torch.int32, device=device)
    grid = (row_tiles if of_rows else key_tiles, number)
    if grid[0] and grid[1]:
        launch.start(
            _live_lists_kernel,
            grid,
            *(live.tiles, lists, counts, granule_rows, granule_keys, owned, others),
            OF_ROWS=of_rows,
            BM=config.block_m,
            BN=config.block_n,
            GM=live.config.block_m,
            GN=live.config.block_n,
            BLOCK=LIST_BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return Mask(launch.q, lists, counts, launch.q, launch.q, 0)
