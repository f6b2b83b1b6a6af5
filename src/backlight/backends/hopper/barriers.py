"""Named hardware barriers of all Hopper kernels: their numbers, who arrives, who waits.

There are sixteen. Triton takes 0, 1 and 2 + partition, but none for a partition of one warp: 8 to 15 are free everywhere, 6
and 7 where at most the first four partitions have more warps. A ring has a number for each of its stages.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# --- threads that come to a barrier, those that wait included ----------------------------------------------------------------

TWO_WARPS = gl.constexpr(32 + 32)
GROUP_AND_WARP = gl.constexpr(128 + 32)
BOTH_GROUPS = gl.constexpr(128 + 128)
BOTH_GROUPS_AND_WARP = gl.constexpr(128 + 128 + 32)

# --- forward: all consumers (a warpgroup each) and the producer's warp -------------------------------------------------------

# + stage of K, then + stage of V: consumers arrive, the producer waits. Then + warpgroup: its turn, handed on by the one before
FORWARD_EMPTY = gl.constexpr(8)
# all of them wait for each other, with entmax
FORWARD_MEETING = gl.constexpr(6)

# --- backward, main kernel: `gradients` (both warpgroups), `loader` and `reducer` (a warp each) ------------------------------

KV_EMPTY = gl.constexpr(6)  # `gradients` arrives, or `reducer` where dk and dv leave through K and V; `loader` waits
OUT_FULL = gl.constexpr(7)  # `gradients` arrives with dk and dv, `reducer` waits
Q_EMPTY = gl.constexpr(8)  # + stage: `gradients` arrives, `loader` waits


@gluon.constexpr_function
def kv_threads(early):
    """Those at KV_EMPTY: where dk and dv leave early, `gradients` arrives there."""
    return BOTH_GROUPS_AND_WARP if early else TWO_WARPS


@gluon.constexpr_function
def do_empty(stages):
    """+ stage: `gradients` arrives, `loader` waits."""
    return Q_EMPTY + stages


@gluon.constexpr_function
def dq_full(stages):
    """`gradients` arrives with a tile of dq, `reducer` waits."""
    return Q_EMPTY + 2 * stages


@gluon.constexpr_function
def diagonals_full(stages):
    """`gradients` arrives with sums of ds along diagonals, `reducer` waits."""
    return Q_EMPTY + 2 * stages + 1


# --- backward, kernel for narrow heads: two `gradients` (a warpgroup each), `loader`, two `reducer` (a warp each) ------------

NARROW_Q_EMPTY = gl.constexpr(6)  # + stage: both `gradients` arrive, `loader` waits
NARROW_DO_EMPTY = gl.constexpr(8)  # + stage: both `gradients` arrive, `loader` waits
NARROW_DQ_FULL = gl.constexpr(10)  # + warpgroup: its `gradients` arrives with dq, or dk and dv; its `reducer` waits
NARROW_DS_FULL = gl.constexpr(12)  # + 2 * warpgroup + buffer: that one's `gradients` arrives with ds, the other one's waits

# --- dq from a kernel that owns rows: two consumers (a warpgroup each), `producer` (a warp) ----------------------------------

ROWS_K_EMPTY = gl.constexpr(8)  # + stage: both consumers arrive, `producer` waits
ROWS_V_EMPTY = gl.constexpr(12)  # + stage: both consumers arrive, `producer` waits

# --- second derivatives: two `gradients` (a warpgroup each), `loader`, two `reducer` (a warp each) ----------------------------

SECOND_ROWS_EMPTY = gl.constexpr(6)  # + stage: both `gradients` arrive, `loader` waits


@gluon.constexpr_function
def second_out_full(stages):
    """+ warpgroup: its `gradients` arrives with dq, or dk and dv; its `reducer` waits."""
    return SECOND_ROWS_EMPTY + stages


# --- pair bias, kernel that walks over members: two or three consumers (a warpgroup each), `loader` (a warp) ------------------

PAIR_MEMBER_EMPTY = gl.constexpr(8)  # + stage: all consumers arrive, `loader` waits
PAIR_DQ_FULL = gl.constexpr(10)  # + stage: the others arrive with their dq, the first one waits
PAIR_DQ_EMPTY = gl.constexpr(12)  # + stage: the first one arrives, the others wait
