"""dpair_bias of the parts that groups of members have added up."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["groups", "pairs", "bias_heads"])
def _pair_parts_kernel(parts_ptr, dpair, groups, pairs, keys, bias_heads, BLOCK: tl.constexpr):
    """dpair [Bb,Hb,Sq,Sk]: sums of parts [groups,Bb,Hb,Sq,Sk] in fp32, always in the same order."""
    entry = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = at < pairs
    step = tl.cast(tl.num_programs(1), tl.int64) * pairs
    parts_ptr += entry.to(tl.int64) * pairs
    total = tl.zeros([BLOCK], tl.float32)
    for group in range(groups):
        total += tl.load(parts_ptr + group * step + at, mask=exists, other=0.0)
    start = dpair.ptr + (entry // bias_heads).to(tl.int64) * dpair.batch + (entry % bias_heads).to(tl.int64) * dpair.head
    place = (at // keys).to(tl.int64) * dpair.row + (at % keys).to(tl.int64) * dpair.key
    tl.store(start + place, total.to(dpair.ptr.dtype.element_ty), mask=exists)
