"""Device code of the bias: the tiles that meet its table (`table.py`), and how they read it."""

import triton
import triton.language as tl

# zeros on both sides of the expanded bias table: more than twice what the tiles of any kernel span
TABLE_PAD = tl.constexpr(512)


@triton.jit
def bias_tile(table_ptr, start, geometry, V: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """[DOWN, ACROSS] tile whose element (i, j) is entry start + j - i of a head's table, in the order the kernel reads it.

    Neighbours across are loaded in pairs. A pair that would start at an odd entry is taken from the second copy of the table,
    which lies one entry off. What tells threads of a matmul's fragment apart is added first: the rest, 8 down and multiples
    of 8 across, ends up in the instruction, and pairs on one diagonal are loaded once.
    """
    # beyond the padding all is zero, wherever the tile lies
    start = tl.minimum(tl.maximum(start, TABLE_PAD // 2), geometry.n_bias + 3 * (TABLE_PAD // 2))
    pitch = table_pitch(geometry)
    down = tl.arange(0, DOWN)[:, None]
    pairs = tl.arange(0, ACROSS // 2)[None, :] * 2
    first = start - (down - (down & 8))
    first += (first & 1) * (pitch - 1)
    address = (table_ptr + (first + (pairs & 6))) + ((pairs - (pairs & 6)) - (down & 8))
    if V.NVIDIA:
        # a load that Triton does not recognise stays where it is used: its pipeliner would copy the tile through shared memory
        even, odd = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];",
            "=f,=f,l",
            [address.to(tl.int64)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        even = tl.load(address)
        odd = tl.load(address + 1)
    return tl.join(even, odd).reshape([DOWN, ACROSS])


@triton.jit
def add_bias(x, factor, table_ptr, entry, tile, span, geometry, V: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """x + factor * bias for a tile of scores that begins at `tile` of a span; beyond the table nothing is read."""
    if (tile > span.band_low) & (tile < span.band_high):
        x += bias_tile(table_ptr, entry, geometry, V, DOWN, ACROSS) * factor
    return x


@triton.jit
def table_pitch(geometry):
    """Entries of one copy of a head's table: padded on both sides, and even."""
    return (geometry.n_bias + 2 * TABLE_PAD + 1) // 2 * 2


@triton.jit
def head_table(table_ptr, h, geometry, MIRRORED: tl.constexpr):
    """Both copies of a head's table by ascending distance, or by descending."""
    return table_ptr + (tl.cast(h, tl.int64) * 4 + MIRRORED * 2) * table_pitch(geometry)


@triton.jit
def table_entry(column, geometry, MIRRORED: tl.constexpr):
    """Where the bias of table column `column` stands in a head's table."""
    if MIRRORED:
        return geometry.n_bias + TABLE_PAD - 1 - column
    return column + TABLE_PAD
