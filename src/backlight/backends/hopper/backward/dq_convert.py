"""dq from the accumulator: what the main kernels add up, tile by tile, and the kernel that converts it.

Tiles are added in the order of a main kernel's register fragments, by TMA from shared memory laid out that way; those of wide
heads in pieces (`dq_pieces`). `_dq_convert_kernel` reads them through the same layout, scales and converts.
"""

# device code: compiled by Triton from its own types, never run by Python

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.compat import smem_reinterpret, tma_load
from backlight.backends.hopper.config import dq_width
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import barriers, dq_pieces, locate, store_tile


@gluon.constexpr_function
def dq_fragments(BM, BD):
    """Accumulator of the main kernel's dq [BM, BD]: eight warps."""
    along = 4 if BM == 64 else 8
    return gl.NVMMADistributedLayout([3, 0], [along, 8 // along], [16, BD * along // 8, 16])


@gluon.constexpr_function
def dq_tile_layout(BM, BD):
    """Shared memory in the order of those fragments: two registers of two rows make 16 bytes, then lanes, registers, warps."""
    along = 4 if BM == 64 else 8
    columns = BD * along // 8
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    column = 8
    while column < columns:
        bases.append([0, column])
        column *= 2
    row = 16
    while row < BM:
        bases.append([row, 0])
        row *= 2
    while column < BD:
        bases.append([0, column])
        column *= 2
    return gl.SharedLinearLayout(offset_bases=bases, block_bases=[], alignment=1024)


@gluon.constexpr_function
def dq_half_layout(BD):
    """The 64 rows of a warpgroup in the order of `dq_tile_layout(128, BD)`, of which they are a half."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    column = 8
    while column < BD:
        bases.append([0, column])
        column *= 2
    return gl.SharedLinearLayout(offset_bases=[*bases, [16, 0], [32, 0]], block_bases=[], alignment=1024)


@gluon.jit
def load_sums(acc_desc, line, bar, dst):
    """A tile of the accumulator from a line of its descriptor on, which may be the first of several boxes."""
    BM: gl.constexpr = acc_desc.block_type.shape[0]
    BD: gl.constexpr = acc_desc.block_type.shape[1]
    BOXES: gl.constexpr = dst.shape[1] // BD
    boxes = smem_reinterpret(dst, gl.float32, [BOXES, BM, BD], acc_desc.layout)
    for i in gl.static_range(BOXES):
        tma_load(acc_desc, [line + i * BM, 0], bar, boxes.index(i))


@gluon.jit
def convert_tile(sums, scale, out, dtype: gl.constexpr):
    """A tile of the accumulator as 16 bits."""
    BM: gl.constexpr = sums.shape[0]
    BD: gl.constexpr = sums.shape[1]
    fragments = smem_reinterpret(sums, gl.float32, [BM, BD], dq_tile_layout(BM, BD)).load(dq_fragments(BM, BD))
    out.store((fragments * scale).to(dtype))


@gluon.jit(do_not_specialize=["n_segments", "heads", "sq", "tiles"])
def _dq_convert_kernel(
    acc_desc, dq_desc, packing, n_segments, heads, sq, tiles, scale, D: gl.constexpr, VARLEN: gl.constexpr
):  # fmt: skip
    BM: gl.constexpr = acc_desc.block_type.shape[0]
    RANK: gl.constexpr = len(dq_desc.block_type.shape)
    BD: gl.constexpr = dq_desc.block_type.shape[RANK - 1]
    PIECES: gl.constexpr = dq_pieces(D, BD)
    FIRST: gl.constexpr = PIECES[0][1]
    BEYOND: gl.constexpr = PIECES[1][1] if len(PIECES) > 1 else 0
    LINES: gl.constexpr = BM * (FIRST + BEYOND) // acc_desc.block_type.shape[1]
    tile = gl.program_id(0)
    head = gl.program_id(1)
    line = (head * tiles + tile) * LINES
    start = tile * 0
    if VARLEN:
        z, first = locate(tile, packing.cu_row_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        tile -= first
        start = gl.load(packing.cu_q_ptr + z)
        sq = gl.load(packing.cu_q_ptr + z + 1) - start
    dtype: gl.constexpr = dq_desc.dtype
    first_s = gl.allocate_shared_memory(gl.float32, [BM, FIRST], acc_desc.layout)
    out_s = gl.allocate_shared_memory(dtype, [BM, BD], gl.NVMMASharedLayout.get_default_for([BM, BD], dtype))
    full = barriers(1, 1)
    fence_async_shared()
    mbarrier.expect(full.index(0), BM * (FIRST + BEYOND) * 4)
    load_sums(acc_desc, line, full.index(0), first_s)
    if BEYOND > 0:
        beyond_s = gl.allocate_shared_memory(gl.float32, [BM, BEYOND], acc_desc.layout)
        load_sums(acc_desc, line + FIRST // acc_desc.block_type.shape[1] * BM, full.index(0), beyond_s)
    mbarrier.wait(full.index(0), 0)
    convert_tile(first_s, scale, out_s.slice(0, FIRST, 1) if BEYOND > 0 else out_s, dtype)
    if BEYOND > 0:
        convert_tile(beyond_s, scale, out_s.slice(FIRST, BEYOND, 1), dtype)
    fence_async_shared()
    store_tile(dq_desc, head // heads, head % heads, start, sq, tile * BM, out_s, VARLEN)
    tma.store_wait(0)


def convert_dq(launch: Launch, rows: Rows, dq: Tensor) -> None:
    block = rows.config.block_m
    acc = rows.accumulator
    packing = Packing(rows.cu_q, None, None, rows.first_tiles)

    def describe() -> dict[str, Any]:
        args = [
            rows.tiles_of_dq(dq_width(launch.d), block),
            launch.rows(dq, block, launch.bd),
            packing,
            rows.n_segments,
            launch.heads,
            launch.sq,
            rows.tiles,
            launch.call.scale,
        ]
        constants = {"D": launch.d, "VARLEN": launch.call.varlen}
        return {"grid": (rows.tiles, launch.batch * launch.heads), "args": args, "constants": constants, "num_warps": 8}

    launch.start(_dq_convert_kernel, (acc, dq, *packing), describe)
