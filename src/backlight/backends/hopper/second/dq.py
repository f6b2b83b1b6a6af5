"""dq of second derivatives from its accumulator, whose tiles lie in the order of a warpgroup's fragments of dq^T."""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.compat import smem_reinterpret, tma_load
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import barriers, locate, store_tile
from backlight.backends.hopper.second.prepass import Rows


@gluon.constexpr_function
def dq_layout(BD, BM):
    """Shared memory of dq^T [BD, BM]: two registers of two rows make 16 bytes, then lanes, registers, warps."""
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


@gluon.jit(do_not_specialize=["n_segments", "heads", "sq", "tiles"])
def _second_dq_kernel(acc_desc, dq_desc, packing, n_segments, heads, sq, tiles, scale, VARLEN: gl.constexpr):
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
    fragments_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    fragments = smem_reinterpret(acc_s, gl.float32, [BD, BM], dq_layout(BD, BM)).load(fragments_l)
    out_s.permute((1, 0)).store((fragments * scale).to(dtype))
    fence_async_shared()
    store_tile(dq_desc, head // heads, head % heads, start, sq, tile * BM, out_s, VARLEN)
    tma.store_wait(0)


def convert_dq(launch: Launch, rows: Rows, dq: Tensor) -> None:
    block = rows.config.block_m
    packing = Packing(rows.cu_q, None, None, rows.first_tiles)

    def describe() -> dict[str, Any]:
        args = [
            rows.tiles_of_dq,
            launch.rows(dq, block, rows.bd),
            packing,
            rows.n_segments,
            launch.heads,
            launch.sq,
            rows.tiles,
            launch.call.scale,
        ]
        constants = {"VARLEN": launch.call.varlen}
        return {"grid": (rows.tiles, launch.batch * launch.heads), "args": args, "constants": constants, "num_warps": 4}

    launch.start(_second_dq_kernel, (rows.acc, dq, *packing), describe)
