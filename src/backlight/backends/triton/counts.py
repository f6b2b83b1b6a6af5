"""How many keys each row sees under a mask by row intervals, for tau: one program per BM rows of a mask, over the tiles that
main loops visit. Of a tile that is seen whole every key counts, of others those of eq. 2."""

from __future__ import annotations

import triton
import triton.language as tl

from backlight.backends.triton.primitives import keys_of, row_block, visible
from backlight.backends.triton.visits import mask_number, visited


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _counts_kernel(
    n_ptr, mask, packing, geometry, sq, sk, n_segments, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """n [masks, sq]; geometry: its heads are those of masks."""
    block = row_block(packing, sq, sk, n_segments, geometry, V, BM)
    key_lanes = tl.arange(0, BN)[None, :]
    _, visits, intervals = keys_of(block, mask, sq, sk, n_segments, geometry, V, BN)
    n = tl.zeros([BM], tl.int32)
    for step in range(visits.start, visits.stop, BN):
        j0, is_cut = visited(step, visits, V, BN)
        n += BN
        if is_cut:
            seen = visible(block.position, j0 + key_lanes, intervals, block.segment, geometry, V, BN)
            n += tl.sum(seen.to(tl.int32), 1) - BN
    n_ptr += mask_number(block.b, block.h, geometry) * sq + block.row
    tl.store(n_ptr + tl.arange(0, BM), n, mask=tl.arange(0, BM) < block.n_rows)
