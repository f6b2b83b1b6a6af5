"""Rings of K and V between the producer and the consumers, and the turns that consumers take with their matmuls."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.barriers import BOTH_GROUPS, FORWARD_EMPTY
from backlight.backends.hopper.compat import arguments
from backlight.backends.hopper.primitives import bar_arrive, bar_sync, phase_of, stage_of


@arguments
class Ring:
    """Tiles [ST, BN, D] and the mbarriers of full ones; EMPTY: the first named barrier of empty ones.

    THREADS: who comes to a named barrier, all consumers and the producer's warp.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    EMPTY: gl.constexpr
    THREADS: gl.constexpr


@gluon.jit
def ring_stage(ring, count):
    """Where tile number `count` of a ring lies."""
    return stage_of(count, ring.tiles.shape[0])


@gluon.jit
def wait_full(ring, count, pred=True):
    """Until tile number `count` has arrived."""
    mbarrier.wait(ring.full.index(ring_stage(ring, count)), phase_of(count, ring.tiles.shape[0]), pred=pred)


@gluon.jit
def release(ring, stage):
    bar_arrive(ring.EMPTY + stage, ring.THREADS)


@gluon.jit
def wait_empty(ring, stage):
    bar_sync(ring.EMPTY + stage, ring.THREADS)


@gluon.jit
def skip_stage(ring, count):
    """Release a tile that this warpgroup has no use for."""
    wait_full(ring, count)
    release(ring, ring_stage(ring, count))
    return count + 1


@gluon.jit
def wait_turn(p, W: gl.constexpr):
    """Until it is this warpgroup's turn with its matmuls."""
    bar_sync(FORWARD_EMPTY + 2 * p.V.ST + W, BOTH_GROUPS)


@gluon.jit
def hand_on_turn(p, W: gl.constexpr):
    bar_arrive(FORWARD_EMPTY + 2 * p.V.ST + (W + 1) % p.V.NC, BOTH_GROUPS)
