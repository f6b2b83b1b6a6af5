"""Which part of a pair bias a CTA owns, which heads it visits, and the part in shared memory.

Heads of the batch that share an entry of the bias are its members. A CTA owns 64 rows of the bias, reads them once, hides in
them what no member sees, and goes from member to member (`rows.py`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from backlight.backends.hopper.arguments import Sizes
from backlight.backends.hopper.backward.dq_convert import dq_half_layout
from backlight.backends.hopper.compat import Maybe, arguments, smem_reinterpret, tma_load
from backlight.backends.hopper.primitives import INF, WM, load_tile

# a ring of two members
STAGES = gl.constexpr(2)


class Bias(NamedTuple):
    """A pair bias [Bb,Hb,Sq,Sk] or its gradient in memory: pointer and strides, 0 along axes it does not have. keys: Sk, of
    which the kernel knows whether whole vectors end there."""

    ptr: Any
    batch: Any
    head: Any
    row: Any
    key: Any
    keys: Any


class Place(NamedTuple):
    """A tensor [B,H,S,D] that is written: pointer and strides."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Units(NamedTuple):
    """scale; log2(e) * scale; what the bias and lse, in base 2, are multiplied by where they begin a sum of products."""

    scale: Any
    scale_log2: Any
    bias: Any
    lse: Any


class Variant(NamedTuple):
    """What is compiled in. BD: width of all tiles; WGS: warpgroups that multiply; T: tiles of BN keys that each of them has;
    DPAIR: whether dpair_bias is made; FIRST, LAST: whether this slab of keys begins dq, and ends it."""

    D: int
    DV: int
    BD: int
    WGS: int
    T: int
    BN: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    DPAIR: bool = False
    FIRST: bool = True
    LAST: bool = True


@arguments
class Members(Sizes):
    """Sizes, other arguments of a kernel, its CTA's entry of the bias and members, from `first` to `stop`."""

    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    lse_desc: tma.tensor_descriptor
    delta_desc: tma.tensor_descriptor
    bias: Maybe
    entry_b: gl.tensor
    entry_h: gl.tensor
    part: gl.tensor
    first: gl.tensor
    stop: gl.tensor
    sharing: gl.tensor
    own_heads: gl.tensor
    pitch: gl.tensor
    units: Maybe
    V: gl.constexpr


@arguments
class Member:
    """Batch entry, query head, key head."""

    b: gl.tensor
    h: gl.tensor
    g: gl.tensor


@gluon.constexpr_function
def tile_layout(N):
    """Accumulator of a warpgroup's product [64, N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def threads_of(groups, warps):
    return 128 * groups + 32 * warps


@gluon.jit
def member_of(p, number):
    b = p.entry_b * p.sharing + number // p.own_heads
    h = p.entry_h + number % p.own_heads
    return Member(b, h, h // p.group)


@gluon.jit
def load_rows(p, m, i0, full, q, do, lse, delta):
    """Rows from i0 on: q, do, lse, delta."""
    load_tile(p.q_desc, m.b, m.h, 0, 0, i0, full, q, False)
    load_tile(p.do_desc, m.b, m.h, 0, 0, i0, full, do, False)
    at = (m.b * p.heads + m.h) * p.pitch + i0
    tma_load(p.lse_desc, [at], full, lse)
    tma_load(p.delta_desc, [at], full, delta)


@gluon.jit
def keep_bias(p, i0, j0, dst):
    """The bias of rows from i0 and keys from j0 on, as the members see it: -inf where they do not."""
    BN: gl.constexpr = dst.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BN, BN // 8], [4, 1], [1, 0])
    row = gl.expand_dims(i0 + gl.arange(0, WM, gl.SliceLayout(1, layout)), 1)
    key = gl.expand_dims(j0 + gl.arange(0, BN, gl.SliceLayout(0, layout)), 0)
    start = p.bias.ptr + p.entry_b.to(gl.int64) * p.bias.batch + p.entry_h.to(gl.int64) * p.bias.head
    place = row.to(gl.int64) * p.bias.row + key.to(gl.int64) * p.bias.key
    exists = (row < p.sq) & (key < p.bias.keys)
    value = gl.load(start + place, mask=exists, other=0.0).to(gl.float32)
    seen = key < p.sk
    position = row + (p.sk - p.sq)
    if p.V.HAS_LEFT:
        seen = seen & (key >= position - p.left)
    if p.V.HAS_RIGHT:
        seen = seen & (key <= position + p.right)
    dst.store(gl.where(seen, value, -INF).to(p.bias.ptr.dtype.element_ty))


@gluon.jit
def in_fp32(x):
    """fp32 of 16 bits: of bf16 in one instruction each."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    return x.to(gl.float32)


@gluon.jit
def added(total, x):
    """total + x. Fused with the product that makes x, the sum would keep both factors in registers."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [total, x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def handed(buffer, n):
    """Tile n of a buffer, as warpgroups hand accumulators to each other: in the order of their fragments."""
    D: gl.constexpr = buffer.shape[2]
    return smem_reinterpret(buffer.index(n), gl.float32, [WM, D], dq_half_layout(D))
