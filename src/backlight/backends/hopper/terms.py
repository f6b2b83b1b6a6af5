"""Learned terms of the score, for both directions and both orientations of a tile.

Scores x are kept in units of `unit` (scale, or the cap under softcap): s = unit * x, and exp2 takes x * (unit * log2 e).
Without terms x is the raw product q.k; the cap replaces it by a tanh and the bias, divided by `unit`, is added, so neither
costs more than its own arithmetic and tiles without them are those of the plain kernel.
"""

from __future__ import annotations

import struct

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.primitives import per_thread
from backlight.call import Call

# zeros on both sides of the table, at least twice as wide as a tile: far tiles are read there, without a mask
TABLE_PAD = gl.constexpr(512)
LOG2E = gl.constexpr(1.4426950408889634)


# --- host --------------------------------------------------------------------------------------------------------------------


def unit_of(call: Call) -> float:
    """What a score is multiplied by to become a logit (natural units)."""
    return call.scale if call.spec.softcap is None else call.spec.softcap


def cap_factor(call: Call) -> float | None:
    """Raw product to argument of tanh (eq. 5)."""
    return None if call.spec.softcap is None else call.scale / call.spec.softcap


# --- softcap -----------------------------------------------------------------------------------------------------------------


# tanh(x) = x (1 + x^2 P(x^2)) up to a largest |x|: coefficients of P, relative error below 1.3e-7 (minimax)
TINY = 0.2, (-0.333296984, 0.130380273)
SHORT = 0.4, (-0.333318823, 0.13277629, -0.0477942206)
LONG = 1.0, (-0.333329868, 0.133264089, -0.0534987076, 0.0203597593, -0.0062593392, 0.00105826459)


def single(x: float) -> float:
    """x as fp32 has it."""
    return struct.unpack("f", struct.pack("f", x))[0]


def _bits(x: float) -> str:
    """A constant of PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', x))[0]:08X}"


def _series(coefficients: tuple[float, ...], x: str, out: str) -> list[str]:
    *rest, before, last = map(_bits, (1.0, *coefficients))
    lines = [f"mul.f32 t, {x}, {x};", f"fma.rn.f32 y, t, {last}, {before};"]
    return [*lines, *(f"fma.rn.f32 y, t, y, {c};" for c in reversed(rest)), f"mul.f32 {out}, {x}, y;"]


def _ratio(x: str, out: str) -> list[str]:
    """(1 - e) / (1 + e), e = exp(-2 |x|); the series where |x| is small, since 1 - e has no digits to lose."""
    return [
        *_series(LONG[1], x, "z"),
        f"abs.f32 t, {x};",
        f"setp.le.f32 small, t, {_bits(LONG[0])};",
        f"mul.f32 t, t, {_bits(-2.0 * LOG2E.value)};",
        "ex2.approx.ftz.f32 t, t;",
        "add.f32 y, t, 0f3F800000;",
        "rcp.approx.ftz.f32 y, y;",
        "sub.f32 t, 0f3F800000, t;",
        "mul.f32 t, t, y;",
        f"copysign.f32 t, {x}, t;",
        f"selp.f32 {out}, z, t, small;",
    ]


def _cap_ptx(n: int, whole: bool) -> str:
    """unit * tanh(factor s), divided by s unless `whole`, for n values s of one thread; operands: s, factor, unit.

    A warp takes the shortest way that serves all its values. They are taken four at a time: one would wait for itself.
    """
    xs, outs, factor, unit = [f"${n + i}" for i in range(n)], [f"${i}" for i in range(n)], f"${2 * n}", f"${3 * n}"
    lines = ["{", ".reg .pred beyond, small;", f".reg .f32 t<{n}>, y<4>, c<3>, square, power, x, z, t, y, w;"]
    lines += [".reg .s32 most<4>, now;", *(f"mul.f32 t{i}, {x}, {x};" for i, x in enumerate(xs))]
    # squares compare like the integers of their bits, and those three at a time
    lines += [f"mov.b32 most{i}, t{i};" for i in range(4)]
    for i in range(4, n):
        lines += [f"mov.b32 now, t{i};", f"max.s32 most{i % 4}, most{i % 4}, now;"]
    lines += ["max.s32 most0, most0, most1;", "max.s32 most2, most2, most3;", "max.s32 most0, most0, most2;"]
    lines += ["mov.b32 z, most0;", f"mul.f32 square, {factor}, {factor};", "mul.f32 z, z, square;"]
    lines += [f"mul.f32 w, {factor}, {unit};"]

    def unless(limit: float, label: str) -> list[str]:
        vote = "vote.sync.any.pred beyond, beyond, 0xffffffff;"
        # beyond is also what is no number, of a key that a mask hides: what stands beside it may be large
        return [f"setp.gtu.f32 beyond, z, {_bits(limit * limit)};", vote, f"@beyond bra {label};"]

    def leave(first: int) -> list[str]:
        if whole:
            return [f"mul.f32 {outs[first + i]}, {xs[first + i]}, y{i};" for i in range(4)]
        return [f"mov.f32 {outs[first + i]}, y{i};" for i in range(4)]

    def short(coefficients: tuple[float, ...]) -> list[str]:
        """Coefficients of s^2, in which factor and unit are: one multiplication less for each value."""
        out, last = ["mov.f32 power, w;"], len(coefficients) - 1
        for i, c in enumerate(coefficients):
            out += ["mul.f32 power, power, square;", f"mul.f32 c{i}, power, {_bits(c)};"]
        for first in range(0, n, 4):
            out += [f"fma.rn.f32 y{i}, t{first + i}, c{last}, c{last - 1};" for i in range(4)]
            for c in reversed(range(last - 1)):
                out += [f"fma.rn.f32 y{i}, t{first + i}, y{i}, c{c};" for i in range(4)]
            out += [*(f"fma.rn.f32 y{i}, t{first + i}, y{i}, w;" for i in range(4)), *leave(first)]
        return out

    def long() -> list[str]:
        """Coefficients of (factor s)^2: the others would be too small for fp32."""
        out, (*rest, before, last) = [], map(_bits, (1.0, *LONG[1]))
        for first in range(0, n, 4):
            out += [f"mul.f32 t{first + i}, t{first + i}, square;" for i in range(4)]
            out += [f"fma.rn.f32 y{i}, t{first + i}, {last}, {before};" for i in range(4)]
            for c in reversed(rest):
                out += [f"fma.rn.f32 y{i}, t{first + i}, y{i}, {c};" for i in range(4)]
            out += [*(f"mul.f32 y{i}, y{i}, w;" for i in range(4)), *leave(first)]
        return out

    lines += [*unless(TINY[0], "SMALL"), *short(TINY[1]), "bra.uni DONE;"]
    lines += ["SMALL:", *unless(SHORT[0], "MIDDLE"), *short(SHORT[1]), "bra.uni DONE;"]
    lines += ["MIDDLE:", *unless(LONG[0], "LARGE"), *long(), "bra.uni DONE;", "LARGE:"]
    for s, out in zip(xs, outs, strict=True):
        lines += [f"mul.f32 x, {s}, {factor};", *_ratio("x", "x")]
        if whole:
            lines += [f"mul.f32 {out}, x, {unit};"]
        else:
            lines += [f"mul.f32 x, x, {unit};", f"div.full.f32 x, x, {s};"]
            lines += [f"setp.eq.f32 small, {s}, 0f00000000;", f"selp.f32 {out}, w, x, small;"]
    return " ".join([*lines, "DONE:", "}"])


# by how many values of a thread are decided about at once
RATIO_16, RATIO_32 = (gl.constexpr(_cap_ptx(n, False)) for n in (16, 32))
CAPPED_16, CAPPED_32 = (gl.constexpr(_cap_ptx(n, True)) for n in (16, 32))


@gluon.constexpr_function
def _three_inputs(n):
    return ",".join(["=&f"] * n + ["f"] * 3 * n)


@gluon.jit
def cap_ratio(s, factor, unit):
    """y with unit * tanh(factor s) = s y: what s is multiplied by, in place of a constant, under softcap."""
    N: gl.constexpr = min(32, per_thread(s.shape, s.type.layout))
    ASM: gl.constexpr = RATIO_16 if N == 16 else RATIO_32
    return gl.inline_asm_elementwise(ASM, _three_inputs(N), [s, factor, unit], dtype=gl.float32, is_pure=True, pack=N)


@gluon.jit
def cap_whole(s, factor, unit, AT_ONCE: gl.constexpr = 32):
    """unit * tanh(factor s): needs no register for s any more, and a multiplication more than with `cap_ratio`."""
    N: gl.constexpr = min(AT_ONCE, per_thread(s.shape, s.type.layout))
    ASM: gl.constexpr = CAPPED_16 if N == 16 else CAPPED_32
    return gl.inline_asm_elementwise(ASM, _three_inputs(N), [s, factor, unit], dtype=gl.float32, is_pure=True, pack=N)


@gluon.jit
def capped(t, factor, AT_ONCE: gl.constexpr = 16):
    """Eq. 5 in units of the cap: tanh(scale t / cap). Its square is what the gradient needs (`cap_slope`)."""
    # the squares of 32 values do not fit into registers beside the accumulators of the backward
    return cap_whole(t, factor, 1.0, AT_ONCE)


@gluon.jit
def cap_slope(x):
    """d capped / d (factor t) (eq. 25), from the capped score before the bias."""
    return 1.0 - x * x


# --- bias --------------------------------------------------------------------------------------------------------------------


@gluon.jit
def key_band(first, last, origin, n, B: gl.constexpr):
    """Key blocks [begin, end) that meet the table of rows at positions first .. last."""
    return gl.maximum(first + origin - n + 1, 0) // B, gl.cdiv(gl.maximum(last + origin + 1, 0), B)


@gluon.jit
def row_band(first, last, shift, origin, n, B: gl.constexpr):
    """Row blocks [begin, end) that meet the table of keys first .. last; shift = sk - sq."""
    return gl.maximum(first - origin - shift, 0) // B, gl.cdiv(gl.maximum(last - origin + n - shift, 0), B)


@gluon.jit
def peek(address):
    """A load without side effects: equal addresses are read once."""
    return gl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def bias_tile(table_ptr, column, n, tile, TRANSPOSED: gl.constexpr):
    """Bias of a tile of scores whose first row and first key have table entry `column` (position - key + origin).

    table_ptr: the head's padded table. TRANSPOSED: tiles [keys, rows]. A wgmma fragment holds rows r + {0, 8} and columns
    8 c + 2 l + {0, 1}: what a thread has in common is added first, so that the rest is an immediate and the 34 distances that
    a thread meets in 64 x 128 scores are 34 loads.
    """
    down = gl.arange(0, tile.shape[0], gl.SliceLayout(1, tile.type.layout))
    across = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    thread = gl.expand_dims(down - (down & 8), 1) - gl.expand_dims(across & 6, 0)
    # & -7, not a difference: what the compiler sees as a constant becomes part of the load
    fixed = gl.expand_dims(down & 8, 1) - gl.expand_dims(across & -7, 0)
    # beyond the padding all is zero, wherever the tile lies
    column = gl.minimum(gl.maximum(column, -(TABLE_PAD // 2)), n + TABLE_PAD // 2) + TABLE_PAD
    if TRANSPOSED:
        return peek(((table_ptr + column) - thread) - fixed)
    return peek(((table_ptr + column) + thread) + fixed)


# --- sink and gate -----------------------------------------------------------------------------------------------------------


@gluon.jit
def sink_sums(row_sum):
    """Partial row sums [rows, 8] that start with the sink's exp2(0) = 1, counted once."""
    first = gl.arange(0, 8, gl.SliceLayout(0, row_sum.type.layout)) == 0
    return row_sum + gl.expand_dims(gl.where(first, 1.0, 0.0), 0)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp2(x * -LOG2E))


# --- tau ---------------------------------------------------------------------------------------------------------------------


@gluon.jit
def visible_count(position, sk, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Eq. 3: keys that rows at `position` see."""
    first = position * 0
    end = first + sk
    if HAS_LEFT:
        first = gl.maximum(position - left, 0)
    if HAS_RIGHT:
        end = gl.minimum(position + right + 1, end)
    return gl.maximum(end - first, 0)


@gluon.jit
def threshold(tau):
    """Eq. 10: what a shifted weight must exceed to survive; with tau >= 0 every visible key does, also where p underflowed."""
    return gl.where(tau >= 0, -float("inf"), 0.0)


@gluon.jit
def above(x, limit):
    """1.0 where x > limit, else 0: the product with it is part of the FFMA that follows, a selection would not be."""
    return gl.inline_asm_elementwise("set.gt.f32.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def weights16(weight, dtype: gl.constexpr):
    """Eq. 11: A of shifted weights, in 16 bits."""
    if dtype == gl.bfloat16:
        a = gl.inline_asm_elementwise(
            "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [weight], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        a = gl.inline_asm_elementwise(
            "cvt.rn.relu.f16x2.f32 $0, $2, $1;", "=r,f,f", [weight], dtype=gl.float16, is_pure=True, pack=2
        )
    return a


@gluon.jit
def survivors(weight, bar, dtype: gl.constexpr):
    """Eq. 10: M of shifted weights, in 16 bits.

    Decided in fp32; bf16 has the same range, so that rounding first changes no sign and pairs are compared at once.
    """
    if dtype == gl.bfloat16:
        m = gl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $2, $1; set.gt.bf16x2.bf16x2 $0, pair, $3; }",
            "=r,f,f,r",
            [weight, bar.to(gl.bfloat16)],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        m = gl.inline_asm_elementwise(
            "{ .reg .f32 a, b; set.gt.f32.f32 a, $1, $3; set.gt.f32.f32 b, $2, $4; cvt.rn.f16x2.f32 $0, b, a; }",
            "=r,f,f,f,f",
            [weight, bar],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )
    return m


@gluon.jit
def survivors_of(a, bar):
    """M from A in bfloat16, where every key is visible: rounding and relu change nothing above 0 and nothing above -inf."""
    return gl.inline_asm_elementwise(
        "set.gt.bf16x2.bf16x2 $0, $1, $2;", "=r,r,r", [a, bar.to(gl.bfloat16)], dtype=gl.bfloat16, is_pure=True, pack=2
    )
