"""dq from the accumulator: what the main kernels add up, tile by tile, and the kernel that converts it.

Tiles are added in the order of a main kernel's register fragments: by TMA from shared memory laid out that way, or from
registers by `add_fragments`. `_dq_convert_kernel` reads them through the same layout, scales and converts. Fragments of second
derivatives are of dq^T (second/row_block.py): TURNED.
"""

# device code: compiled by Triton from its own types, never run by Python

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.compat import smem_reinterpret, tma_load
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import barriers, locate, store_tile

if TYPE_CHECKING:
    from backlight.backends.hopper.second.prepass import Rows as SecondRows


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


@gluon.constexpr_function
def turned_fragments(BM):
    """Accumulator of a warpgroup's dq^T [BD, BM]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])


@gluon.constexpr_function
def turned_tile_layout(BD, BM):
    """Shared memory of dq^T [BD, BM] in the order of those fragments."""
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    column = 8
    while column < BM:
        bases.append([0, column])
        column *= 2
    row = 16
    while row < BD:
        bases.append([row, 0])
        row *= 2
    return gl.SharedLinearLayout(offset_bases=bases, block_bases=[], alignment=1024)


@gluon.jit
def add_fragments(acc_ptr, row, dq):
    """Add a dq tile [64, BD], fragments in registers, to the accumulator rows from `row`: the order of `dq_tile_layout`."""
    BD: gl.constexpr = dq.shape[1]
    HALF: gl.constexpr = BD // 2
    layout: gl.constexpr = dq.type.layout
    line = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(0, layout)), 0)
    # what the thread has in common first: the rest is an immediate
    thread = column % 8 // 2 * 4 + line % 8 * 16 + line // 16 * (16 * HALF) + column // HALF * (64 * HALF)
    fixed = column % 2 + line // 8 % 2 * 2 + column % HALF // 8 * 128
    add_quads(((acc_ptr + row.to(gl.int64) * BD) + thread) + fixed, dq)


@gluon.jit
def add_quads(pointers, values):
    """Add to global memory: four values that lie next to each other in a thread's registers and in memory, 16 bytes at once."""
    gl.inline_asm_elementwise(
        "{ red.global.add.v4.f32 [$4], {$8, $9, $10, $11}; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [pointers.to(gl.int64), values],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit(do_not_specialize=["n_segments", "heads", "sq", "tiles"])
def _dq_convert_kernel(
    acc_desc, dq_desc, packing, n_segments, heads, sq, tiles, scale, VARLEN: gl.constexpr, TURNED: gl.constexpr = False,
):  # fmt: skip
    BM: gl.constexpr = acc_desc.block_type.shape[0]
    BD: gl.constexpr = acc_desc.block_type.shape[1]
    tile = gl.program_id(0)
    head = gl.program_id(1)
    row = (head * tiles + tile) * BM
    start = tile * 0
    if VARLEN:
        z, first = locate(tile, packing.cu_row_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        tile -= first
        start = gl.load(packing.cu_q_ptr + z)
        sq = gl.load(packing.cu_q_ptr + z + 1) - start
    dtype: gl.constexpr = dq_desc.dtype
    acc_s = gl.allocate_shared_memory(gl.float32, [BM, BD], acc_desc.layout)
    out_s = gl.allocate_shared_memory(dtype, [BM, BD], gl.NVMMASharedLayout.get_default_for([BM, BD], dtype))
    full = barriers(1, 1)
    fence_async_shared()
    mbarrier.expect(full.index(0), BM * BD * 4)
    tma_load(acc_desc, [row, 0], full.index(0), acc_s)
    mbarrier.wait(full.index(0), 0)
    if TURNED:
        fragments = smem_reinterpret(acc_s, gl.float32, [BD, BM], turned_tile_layout(BD, BM)).load(turned_fragments(BM))
        out_s.permute((1, 0)).store((fragments * scale).to(dtype))
    else:
        fragments = smem_reinterpret(acc_s, gl.float32, [BM, BD], dq_tile_layout(BM, BD)).load(dq_fragments(BM, BD))
        out_s.store((fragments * scale).to(dtype))
    fence_async_shared()
    store_tile(dq_desc, head // heads, head % heads, start, sq, tile * BM, out_s, VARLEN)
    tma.store_wait(0)


def convert_dq(launch: Launch, rows: Rows | SecondRows, width: int, dq: Tensor, turned: bool = False) -> None:
    """rows: what the pre-pass left; width: columns of the tiles."""
    block = rows.config.block_m
    packing = Packing(rows.cu_q, None, None, rows.first_tiles)

    def describe() -> dict[str, Any]:
        tiles = rows.tiles_of_dq(width, block), launch.rows(dq, block, width)
        args = (*tiles, packing, rows.n_segments, launch.heads, launch.sq, rows.tiles, launch.call.scale)
        constants = {"VARLEN": launch.call.varlen, "TURNED": turned}
        grid = (rows.tiles, launch.batch * launch.heads)
        return {"grid": grid, "args": args, "constants": constants, "num_warps": 4 if turned else 8}

    launch.start(_dq_convert_kernel, (rows.accumulator, dq, *packing), describe)
