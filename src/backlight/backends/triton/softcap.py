"""The softcap of eq. 5 and its slope, in as few instructions per score as fp32 accuracy allows.

gain * tanh(t * factor) is t times an even function of t. Where all |t * factor| of a warp's share of a tile are small, and
softcaps are chosen so that they mostly are, a short series gives that function; its variable w = limit - t^2 is negative
where t is too large for it, so that the check costs one instruction for two scores. Then a longer series takes over, and
where that is too short as well, two special functions per score.
"""

import struct

import triton
import triton.language as tl

# e^2x = 2^(x * this)
TWO_LOG2E = tl.constexpr(2.8853900817779268)

# tanh(x) / x = 1 + C1 x^2 + C2 x^4 up to NEAR, relative error 2.3e-7
NEAR, C1, C2 = map(tl.constexpr, (0.22, -0.3332803655, 0.1297732247))
# 1 - tanh(x)^2 = LINEAR_0 + LINEAR_1 x^2 within 1.9e-4, by three terms within 1.3e-6; its log2 by two terms within 6.9e-5
LINEAR_0, LINEAR_1 = map(tl.constexpr, (0.999808047, -0.9684105822))
SQUARE_0, SQUARE_1, SQUARE_2 = map(tl.constexpr, (0.9999986959, -0.9995174346, 0.6399494114))
LOG_0, LOG_1 = map(tl.constexpr, (-6.906890497e-5, -1.431205332))
# tanh(x) / x = 1 + x^2 (...) up to FAR, relative error 8.4e-8
FAR = tl.constexpr(0.6)
L1, L2, L3, L4 = map(tl.constexpr, (-0.3333259751, 0.1331311667, -0.05221180712, 0.01561263347))
# the series is used up to this t at most: with a tiny factor its coefficients would leave the range of fp32
LARGEST_SQUARE = tl.constexpr(1e8)


def _bits(x: float) -> str:
    """A constant of PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', x))[0]:08X}"


def _capped_ptx(n: int, slope_terms: int, within: bool = False) -> str:
    """s = gain * tanh(t * factor) + addend and, with terms for it, slope = 1 - tanh(t * factor)^2, of n scores of a thread.

    Outputs come first, then t, addend, limit, coefficients, factor and gain, each n times. `within`: log2 of the slope is added
    to s, in the short series without its constant, which addend already has. Written here rather than in Triton even where it
    is a short series: that of a whole tile would be in registers at once.
    """
    apart = slope_terms > 0 and not within
    places = iter(range(0, 100 * n, n))
    s, slope = next(places), next(places) if apart else 0
    t, addend, limit, *terms, factor, gain = (next(places) for _ in range(8 + slope_terms))
    lines = [".reg .pred far;", f".reg .f32 w<{n}>, x, z, y, most;", f".reg .b32 sign<{n}>;"]
    for i in range(n):
        lines += [f"neg.f32 x, ${t + i};", f"fma.rn.f32 w{i}, x, ${t + i}, ${limit};"]
        lines += [*_horner("y", f"w{i}", [f"${x}" for x in terms[:3]]), f"fma.rn.f32 ${s + i}, ${t + i}, y, ${addend + i};"]
        if within:
            lines += [f"fma.rn.f32 ${s + i}, w{i}, ${terms[4]}, ${s + i};"]
        elif apart:
            lines += _horner(f"${slope + i}", f"w{i}", [f"${x}" for x in terms[3:]])
    lines += [f"mov.b32 sign{i}, w{i};" for i in range(n)]
    # in a tree: a chain of n / 2 would be waited for
    left = [f"sign{i}" for i in range(n)]
    while len(left) > 1:
        first, second, third, left = left[0], left[1], left[min(2, len(left) - 1)], left[3:] + left[:1]
        lines += [f"lop3.b32 {first}, {first}, {second}, {third}, 0xFE;"]
    lines += [f"setp.lt.s32 far, {left[0]}, 0;", "vote.sync.any.pred far, far, 0xffffffff;", "@!far bra.uni DONE;"]

    def results(i: int, when: str) -> list[str]:
        """From y = tanh."""
        found = [f"{when}fma.rn.f32 ${s + i}, y, ${gain}, ${addend + i};", "neg.f32 x, y;"]
        if within:
            found += [f"fma.rn.f32 x, x, y, {_bits(1.0)};", "lg2.approx.ftz.f32 x, x;", f"sub.f32 x, x, ${terms[3]};"]
            found += [f"{when}add.f32 ${s + i}, ${s + i}, x;"]
        elif apart:
            found += [f"{when}fma.rn.f32 ${slope + i}, x, y, {_bits(1.0)};"]
        return found

    lines += ["mov.f32 most, 0f00000000;"]
    for i in range(n):
        lines += [f"mul.f32 x, ${t + i}, ${factor};", "mul.f32 z, x, x;", "max.f32 most, most, z;"]
        lines += _horner("y", "z", [_bits(1.0), *(_bits(c.value) for c in (L1, L2, L3, L4))])
        lines += ["mul.f32 y, y, x;", *results(i, "")]
    lines += [f"setp.gt.f32 far, most, {_bits(FAR.value**2)};", "vote.sync.any.pred far, far, 0xffffffff;"]
    lines += ["@!far bra.uni DONE;"]
    for i in range(n):
        lines += [f"mul.f32 x, ${t + i}, ${factor};", "abs.f32 z, x;", f"setp.gt.f32 far, z, {_bits(FAR.value)};"]
        # 1 - 2 / (1 + e), e = e^2x
        lines += [f"mul.f32 x, x, {_bits(TWO_LOG2E.value)};", "ex2.approx.ftz.f32 x, x;", f"add.f32 x, x, {_bits(1.0)};"]
        lines += ["rcp.approx.ftz.f32 x, x;", f"fma.rn.f32 y, x, {_bits(-2.0)}, {_bits(1.0)};", *results(i, "@far ")]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


def _horner(out: str, x: str, terms: list[str]) -> list[str]:
    """PTX for a polynomial, lowest coefficient first."""
    *rest, last = terms
    lines = []
    for term in reversed(rest):
        lines += [f"fma.rn.f32 {out}, {x}, {last}, {term};"]
        last = out
    return lines


def _names(n: int, outputs: int, slope_terms: int) -> str:
    return ",".join(["=&f"] * (n * outputs) + ["f"] * (n * (8 + slope_terms)))


PACK = tl.constexpr(16)
NONE_PTX, NONE_NAMES = tl.constexpr(_capped_ptx(16, 0)), tl.constexpr(_names(16, 1, 0))
LINEAR_PTX, LINEAR_NAMES = tl.constexpr(_capped_ptx(16, 2)), tl.constexpr(_names(16, 2, 2))
SQUARE_PTX, SQUARE_NAMES = tl.constexpr(_capped_ptx(16, 3)), tl.constexpr(_names(16, 2, 3))
WITHIN_PTX, WITHIN_NAMES = tl.constexpr(_capped_ptx(16, 2, within=True)), tl.constexpr(_names(16, 1, 2))


@triton.jit
def softcapped(t, factor, gain, addend, V: tl.constexpr, SLOPE: tl.constexpr):
    """s = gain * tanh(t * factor) + addend, tanh to a few units in the last place: its error is multiplied by the cap, which
    may be large; and, as SLOPE says, 1 - tanh(t * factor)^2: "none" or "apart" (for bf16 within 2e-4, half a unit of which is
    2e-3); with "within" s may hold its log2 to 7e-5, and then the second result is 1."""
    slope = t
    if V.FP32:
        tanh = precise_tanh(t * factor)
        if SLOPE != "none":
            slope = 1.0 - tanh * tanh
        return tanh * gain + addend, slope
    f2 = factor * factor
    # constants last: the interpreter takes a constant divided by a number for a constant
    limit = tl.minimum((1.0 / tl.maximum(f2, 1e-30)) * NEAR * NEAR, LARGEST_SQUARE)
    y = limit * f2
    scale = factor * gain
    # the series around `limit`; its value at t = 0, where w = limit, is exactly `scale`
    a0 = scale * (1.0 + y * (C1 + y * C2))
    a2 = scale * (C2 * f2 * f2)
    a1 = ((scale - a0) - a2 * limit * limit) / limit
    if V.NVIDIA:
        if SLOPE == "none":
            s = tl.inline_asm_elementwise(
                NONE_PTX, NONE_NAMES, [t, addend, limit, a0, a1, a2, factor, gain], tl.float32, is_pure=True, pack=PACK
            )
        elif SLOPE == "within":
            s0 = LOG_0 + LOG_1 * y
            terms = [t, addend + s0, limit, a0, a1, a2, s0, -LOG_1 * f2, factor, gain]
            s = tl.inline_asm_elementwise(WITHIN_PTX, WITHIN_NAMES, terms, tl.float32, is_pure=True, pack=PACK)
            slope = tl.full(t.shape, 1.0, tl.float32)
        elif V.PAIRED:
            terms = [t, addend, limit, a0, a1, a2, LINEAR_0 + LINEAR_1 * y, -LINEAR_1 * f2, factor, gain]
            s, slope = tl.inline_asm_elementwise(
                LINEAR_PTX, LINEAR_NAMES, terms, (tl.float32, tl.float32), is_pure=True, pack=PACK
            )
        else:
            s0, s1, s2 = square_series(y, f2)
            terms = [t, addend, limit, a0, a1, a2, s0, s1, s2, factor, gain]
            s, slope = tl.inline_asm_elementwise(
                SQUARE_PTX, SQUARE_NAMES, terms, (tl.float32, tl.float32), is_pure=True, pack=PACK
            )
        return s, slope
    w = limit - t * t
    ratio = a0 + w * (a1 + w * a2)
    tanh = precise_tanh(t * factor)
    if SLOPE != "none":
        s0, s1, s2 = square_series(y, f2)
        slope = tl.where(w < 0, 1.0 - tanh * tanh, s0 + w * (s1 + w * s2))
    return tl.where(w < 0, tanh * gain, t * ratio) + addend, slope


@triton.jit
def square_series(y, f2):
    """Coefficients in w of the slope by three terms."""
    return SQUARE_0 + y * (SQUARE_1 + y * SQUARE_2), -(SQUARE_1 + 2.0 * y * SQUARE_2) * f2, SQUARE_2 * f2 * f2


@triton.jit
def precise_tanh(x):
    """1 - 2e / (1 + e), e = e^-2|x|; up to FAR, where the difference cancels, the long series takes over."""
    magnitude = tl.abs(x)
    e = tl.exp2(-magnitude * TWO_LOG2E)
    ratio = 1.0 - 2.0 * e / (1.0 + e)
    square = x * x
    series = x * (1.0 + square * (L1 + square * (L2 + square * (L3 + square * L4))))
    return tl.where(magnitude < FAR, series, tl.where(x < 0, -ratio, ratio))
