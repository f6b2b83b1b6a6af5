"""Device code that moves tiles and rows between memory and registers; addresses are 64-bit."""

import triton
import triton.language as tl


@triton.jit
def at(tensor, b, h, row):
    """Pointer to a row; 64-bit, since sizes beyond 2^31 elements are ordinary."""
    return (
        tensor.ptr
        + tl.cast(b, tl.int64) * tensor.batch
        + tl.cast(h, tl.int64) * tensor.head
        + tl.cast(row, tl.int64) * tensor.row
    )


@triton.jit
def load_tile(ptr, stride, start, n, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """[B, BD] of the rows from `start` on; zero outside of 0 .. n-1 and beyond D."""
    lanes = tl.arange(0, B)
    columns = tl.arange(0, BD)
    pointers = ptr + tl.cast(start, tl.int64) * stride + lanes[:, None] * stride + columns[None, :]
    inside = ((start + lanes >= 0) & (start + lanes < n))[:, None]
    if D != BD:
        inside = inside & (columns < D)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def own_tile(tensor, block, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """`load_tile` of a block's rows."""
    return load_tile(at(tensor, block.b, block.h, block.row), tensor.row, 0, block.n_rows, B, D, BD)


@triton.jit
def stream_tile(
    tensor, descriptor, place, start, n, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """`load_tile` in a main loop, of n rows; place: batch entry, head, the first of them. Through the tensor's descriptor where
    there is one, which costs no address registers."""
    b, h, first = place
    if TMA:
        return descriptor.load([b, h, start, 0]).reshape([B, BD])
    return load_tile(at(tensor, b, h, first), tensor.row, start, n, B, D, BD)


@triton.jit
def key_tile(tensor, descriptor, block, j0, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """`stream_tile` of the keys from j0 on that a block of rows sees."""
    place = (block.b, block.g, block.segment.k_start)
    return stream_tile(tensor, descriptor, place, j0, block.segment.sk, B, D, BD, TMA)


@triton.jit
def row_state(b, h, row, pitch16, geometry):
    """Offset of a row in the fp32 row buffers, whose pitch is a multiple of 16 so that vectors of them load aligned."""
    return tl.cast(b * geometry.heads + h, tl.int64) * (pitch16 * 16) + row


@triton.jit
def spread_vector(ptr, start, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """[DOWN, ACROSS] tile with rows ptr[start .. start + ACROSS), read in the layout of its use, by pairs (`bias_tile`)."""
    pairs = tl.broadcast_to(tl.arange(0, ACROSS // 2)[None, :] * 2, [DOWN, ACROSS // 2])
    even, odd = tl.inline_asm_elementwise(
        "ld.global.nc.v2.f32 {$0, $1}, [$2];",
        "=f,=f,l",
        [((ptr + start + (pairs & 6)) + (pairs - (pairs & 6))).to(tl.int64)],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return tl.join(even, odd).reshape([DOWN, ACROSS])


@triton.jit
def row_tile(ptr, start, n, other, V: tl.constexpr, DIRECT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """One number per row for a [DOWN, ACROSS] tile of keys and rows."""
    if DIRECT:
        value = spread_vector(ptr, start, DOWN, ACROSS)
    else:
        value = load_vector(ptr, start, n, other, ACROSS, V.VARLEN)[None, :]
    return value


@triton.jit
def load_vector(ptr, start, n, other, B: tl.constexpr, EDGE: tl.constexpr):
    lanes = tl.arange(0, B)
    if EDGE:
        return tl.load(ptr + start + lanes, mask=start + lanes < n, other=other)
    return tl.load(ptr + start + lanes)


@triton.jit
def store_tile(ptr, stride, n, value, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """The first n rows and D columns of a tile."""
    lanes = tl.arange(0, B)
    columns = tl.arange(0, BD)
    mask = (lanes < n)[:, None]
    if D != BD:
        mask = mask & (columns < D)[None, :]
    tl.store(ptr + lanes[:, None] * stride + columns[None, :], value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_gated(y_rows, gate_rows, block, o, V: tl.constexpr, BM: tl.constexpr):
    """y of a row block: o, under the gate where there is one; returned as it was before it was rounded."""
    if V.GATE:
        gate = own_tile(gate_rows, block, BM, V.DV, V.BDV)
        o = o * tl.sigmoid(gate.to(tl.float32))
    store_tile(at(y_rows, block.b, block.h, block.row), y_rows.row, block.n_rows, o, BM, V.DV, V.BDV)
    return o
