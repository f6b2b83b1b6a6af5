"""Device code of entmax: powers of what lies above a threshold (eq. 80), and how far logits do, from those less lse."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def raised(u, e, V: tl.constexpr, LESS: tl.constexpr):
    """u ** (e - LESS) where u > 0, else 0; u is not negative. Whole exponents that are compiled in are products."""
    if V.ENTMAX > 0:
        if V.ENTMAX == LESS:
            found = tl.where(u > 0, 1.0, 0.0)
        elif V.ENTMAX < LESS:
            found = u * 0.0
        else:
            found = u
            for _ in tl.static_range(V.ENTMAX - LESS - 1):
                found = found * u
    else:
        found = tl.where(u > 0, tl.exp2((e - LESS) * tl.log2(u)), 0.0)
    return found


# below everything that a sum of weights can be: what is divided by it stays finite
TINY = tl.constexpr(1.0e-30)


@triton.jit
def rooted(f, e, V: tl.constexpr):
    """(f ** (1 / e), that over f, f over that), 0 for 0; f is not negative."""
    if V.ENTMAX == 1:
        root = f
        over = tl.where(f > 0, 1.0, 0.0)
        rest = over
    elif V.ENTMAX == 2:
        over = tl.rsqrt(tl.maximum(f, TINY))
        root = f * over
        rest = root
    else:
        root = tl.where(f > 0, tl.exp2(tl.log2(f) / e), 0.0)
        over = root / tl.maximum(f, TINY)
        rest = f / tl.maximum(root, TINY)
    return root, over, rest


@triton.jit
def newton(f, w, rest):
    """Eq. 81: the step of a threshold, 0 where nothing weighs; rest: f over f ** (1 / e)."""
    return (f - rest) / tl.maximum(w, TINY)


@triton.jit
def alpha_of(h, geometry, V: tl.constexpr):
    """alpha of a head; 0 without entmax."""
    alpha = 0.0
    if V.ENTMAX != 0:
        alpha = tl.load(geometry.alphas + h).to(tl.float32)
    return alpha


@triton.jit
def above(s, alpha):
    """u of eq. 80 from base-2 logits less lse2."""
    return tl.maximum(s * ((alpha - 1) * LN2) + 1.0, 0.0)


@triton.jit
def sink_above(sink, lse, alpha):
    """u of the sink; an infinite one is all there is, or nothing. 0 for rows that see nothing and have none."""
    u = tl.where(lse == sink, 1.0, tl.maximum((sink - lse) * (alpha - 1) + 1.0, 0.0))
    return tl.where(lse == float("-inf"), 0.0, u)
