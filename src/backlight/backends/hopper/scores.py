"""What lies between the products of a tile: which scores are seen, p of scores, ds of p. Written once, for both orientations.

Forward and the kernel that owns rows have tiles [rows, keys]; the other kernels of the backward have TRANSPOSED ones, [keys,
rows]. What belongs to a row (lse, delta, tau / n) is a vector in the layout of the tile's rows.

A thread's scores lie in columns r + 8 c + e (e: 0 or 1) of the tile. Comparisons are split so that 8 c (under a window, which
has two limits, 8 c + e) is an immediate operand: no register is spent on it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.primitives import INF, before, between, key_limits
from backlight.backends.hopper.terms import above
from backlight.backends.hopper.threshold import above_threshold, slopes_of

# --- mask (eq. 2) ------------------------------------------------------------------------------------------------------------


@gluon.jit
def seen_keys(tile, position, j0, sk, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Which keys from j0 on the rows at `position` see: like `tile` [rows, keys]."""
    first, end = key_limits(position, sk, left, right, HAS_LEFT, HAS_RIGHT)
    columns = gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    if HAS_LEFT:
        seen = between(first - j0, end - j0, columns)
    else:
        seen = before(end - j0, columns)
    return seen


@gluon.jit
def row_parts(tile, HELD: gl.constexpr, TWO_LIMITS: gl.constexpr):
    """Rows of a tile [keys, rows], of which a warp holds HELD: the part that the compiler knows, and the thread's."""
    row = gl.expand_dims(gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout)), 0)
    fixed = row & (HELD - 7 if TWO_LIMITS else HELD - 8)
    return fixed, row - fixed


@gluon.jit
def rows_from(tile, first, HELD: gl.constexpr, TWO_LIMITS: gl.constexpr):
    """The rows of a tile [keys, rows] from the first on that sees a key; first: [keys]."""
    fixed, thread = row_parts(tile, HELD, TWO_LIMITS)
    return fixed >= gl.expand_dims(first, 1) - thread


@gluon.jit
def rows_before(tile, end, HELD: gl.constexpr, TWO_LIMITS: gl.constexpr):
    """The rows of a tile [keys, rows] before the first that no longer sees a key; end: [keys]."""
    fixed, thread = row_parts(tile, HELD, TWO_LIMITS)
    return fixed < gl.expand_dims(end, 1) - thread


@gluon.jit
def rows_inside(tile, first, end, HELD: gl.constexpr):
    """The rows of a tile [keys, rows] from `first` on and before `end`, [keys] both: one comparison, without a sign.

    Rows before the first one become numbers beyond every length. Where no row is inside, first is beyond all rows and end is
    not above 0: then the length becomes a number below every one of them.
    """
    fixed, thread = row_parts(tile, HELD, True)
    place = fixed - (gl.expand_dims(first, 1) - thread)
    return place.to(gl.uint32, bitcast=True) < gl.expand_dims((end - first).to(gl.uint32, bitcast=True), 1)


@gluon.jit
def seen_at(x, distance, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """x of pairs at a distance (position - key) that is seen, -inf of others: one tile that many tiles have in common."""
    if HAS_LEFT:
        x = gl.where(distance <= left, x, -INF)
    if HAS_RIGHT:
        x = gl.where(distance >= -right, x, -INF)
    return x


# --- weights and their gradient ----------------------------------------------------------------------------------------------


@gluon.jit
def of_rows(values, TRANSPOSED: gl.constexpr):
    """A vector of rows beside a tile."""
    return gl.expand_dims(values, 0 if TRANSPOSED else 1)


@gluon.jit
def weights(x, lse, scale_log2, TRANSPOSED: gl.constexpr, ENTMAX: gl.constexpr = 0):
    """p of scores x in units of 1 / scale_log2; lse in base 2. With entmax u of them; lse the threshold."""
    if ENTMAX != 0:
        found = above_threshold(x, scale_log2, lse, TRANSPOSED)
    else:
        found = gl.exp2(x * scale_log2 - of_rows(lse, TRANSPOSED))
    return found


@gluon.jit
def with_slopes(p, e, ENTMAX: gl.constexpr):
    """(p, what dp - delta is multiplied by in ds) from what `weights` gives: p twice, with entmax p and w (eq. 87)."""
    w = p
    if ENTMAX != 0:
        w = slopes_of(p, e, ENTMAX)
        p = w * p
    return p, w


@gluon.jit
def hidden_out(p, seen, TAU: gl.constexpr):
    """p of the keys that are seen. With tau -inf for the others, so that their weight is 0 whatever is added."""
    return gl.where(seen, p, -INF if TAU else 0.0)


@gluon.jit
def surviving(dp, shifted, limit):
    """dp of keys whose shifted weight p + tau / n survives (eq. 10): of others the gradient stops at the weight, not at p."""
    return dp * above(shifted, limit)


@gluon.jit
def gradient(p, dp, delta, TRANSPOSED: gl.constexpr):
    """ds = p (dp - delta) (eq. 21)."""
    return p * (dp - of_rows(delta, TRANSPOSED))
