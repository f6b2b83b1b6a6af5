"""Tile sizes of the Hopper kernels: pure functions of the head dimensions, the mask, and whether sequences are short.

Widths are powers of two (TMA fills the columns beyond D with zeros). `docs/experiments.md` has the measurements behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backlight.backends.hopper.versions import triton_version
from backlight.call import Call
from backlight.config import resolve

SHARED_MEMORY = 227 * 1024
BARRIERS = 1024
TOGETHER = 8
# bytes of L2 that heads which run at one time may fill in the backward
L2 = 32 << 20
# share of tiles under a mask by row intervals below which each key meets few rows
FEW = 0.4
# rows of a sequence up to which 128 rows a tile beat 192 at D = 64
SHORT = 1024
LONG = 8 * SHORT


class RowTiles:
    """Row blocks of warpgroups that share rings of K and V."""

    __slots__ = ()
    consumers: int
    stages: int
    pingpong: bool

    def __post_init__(self) -> None:
        if 2 * self.stages + self.pingpong * self.consumers > 8:
            raise ValueError(f"{self} needs more than the 8 named barriers that are free")

    @property
    def block_m(self) -> int:
        return 64 * self.consumers


@dataclass(frozen=True, slots=True)
class ForwardConfig(RowTiles):
    """`consumers` warpgroups of 64 rows, blocks of `block_n` keys.

    pingpong:       warpgroups take turns with their matmuls.
    persistent:     one CTA per multiprocessor draws tiles; otherwise one CTA per tile.
    together:       heads whose row blocks interleave (0: by the mask).
    early_p:        P is converted to 16 bits before the wait for O += P V of the block before.
    late_rescale:   O is rescaled after the next S = Q K^T is issued. Like early_p it takes work out of the gap between two
                    matmuls and costs registers.
    keep_first_max: blocks without a mask are weighed by the maximum of the blocks before them; tiles that overflow because of
                    that are done again.
    q_buffers:      2: Q of the next tile arrives while this one is worked on.
    drawn:          tiles of different lengths are drawn from a counter; otherwise each CTA has its own in advance.
    """

    block_n: int
    consumers: int
    stages: int = 2
    pingpong: bool = False
    persistent: bool = True
    together: int = 0
    early_p: bool = False
    late_rescale: bool = False
    keep_first_max: bool = False
    q_buffers: int = 1
    drawn: bool = True


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def rows_of(call: Call) -> int:
    """Rows of a sequence, the mean of packed ones; many where a sequence must not depend on others."""
    return LONG if call.batch_invariant and call.varlen else call.q.shape[2] // sequences_of(call)


def keys_of(call: Call) -> int:
    """Keys of a sequence, as `rows_of` counts rows."""
    return LONG if call.batch_invariant and call.varlen else call.k.shape[2] // sequences_of(call)


def sequences_of(call: Call) -> int:
    return 1 if call.cu_seqlens_q is None else max(1, call.cu_seqlens_q.shape[0] - 1)


def forward_config(call: Call, low: bool = False) -> ForwardConfig:
    """low: the low half of y is kept, which leaves through shared memory where there is room."""
    return resolve("hopper.forward", lambda: forward_heuristic(call, low))


def forward_heuristic(call: Call, low: bool = False) -> ForwardConfig:
    width = max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))
    masked, keep, rows, keys = is_masked(call), keeps_first_max(call), rows_of(call), keys_of(call)
    if width <= 64 and call.spec.softcap is not None:
        # squares of scores need registers: fewer scores for each of the three
        return ForwardConfig(64, 3, keep_first_max=keep)
    if intervals_of(call) == 2 and width <= 128:
        # the ends of holes need registers, and shared memory
        return ForwardConfig(128, 2, keep_first_max=keep, q_buffers=1 if width > 64 else 2)
    # where rows are short, loads of the next tile have to be under way before this one ends; where they are masked, too, what
    # they save without maxima does not pay for the check at their end
    if width <= 64 and rows <= SHORT:
        keep = keep and (keys > SHORT or not masked)
        return ForwardConfig(128, 2, stages=4, q_buffers=2, drawn=call.varlen, keep_first_max=keep)
    if width <= 64:
        return ForwardConfig(
            128, 3, pingpong=masked or keep, late_rescale=masked, keep_first_max=keep, q_buffers=1 if masked else 2
        )
    if width <= 128 and masked and max(rows, keys) <= SHORT // 2:
        return ForwardConfig(64, 2, stages=4, q_buffers=1 if low else 2, drawn=call.varlen)
    if width <= 128:
        return ForwardConfig(128, 2, keep_first_max=keep, q_buffers=1 if low else 2)
    return ForwardConfig(64, 2, early_p=not masked, late_rescale=not masked and not keep, keep_first_max=keep)


def keeps_first_max(call: Call) -> bool:
    """Whether rows keep their first maximum: float16 has no room above it, and a window has few blocks without a mask."""
    return call.q.dtype == torch.bfloat16 and call.spec.left is None


def elastic_config(call: Call) -> ForwardConfig:
    """With tau: no options but block_n, consumers, stages, persistent, together and keep_first_max."""
    return resolve("hopper.elastic", lambda: elastic_heuristic(call))


def elastic_heuristic(call: Call) -> ForwardConfig:
    width = max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))
    keep = keeps_first_max(call)
    if width > 128:
        # wide q and k leave no shared memory for more stages
        return ForwardConfig(64, 2)
    if width > 64:
        # bias and cap leave no registers for keeping the first maximum as well
        return ForwardConfig(64, 2, stages=4, keep_first_max=keep and not (call.spec.bias and call.spec.softcap is not None))
    # squares of scores need registers
    if call.spec.softcap is not None or (call.spec.masked and rows_of(call) <= SHORT):
        return ForwardConfig(64, 2, stages=4, keep_first_max=keep)
    return ForwardConfig(64, 3, stages=4, keep_first_max=keep)


# alphas whose exponents 1 / (alpha - 1) are compiled in, and those that the kernels take besides
COMPILED = {1.5: 2, 1.25: 4}
ALPHAS = 1.25, 1.5


def rate_of(call: Call) -> float:
    """alpha - 1, of a call with entmax."""
    return (call.spec.alpha or 0.0) - 1


def exponent_of(call: Call) -> int:
    """1 / (alpha - 1) where it is compiled in, -1 where not; 0 without entmax."""
    return 0 if call.entmax is None else COMPILED.get(call.spec.alpha or 0.0, -1)


def entmax_config(call: Call) -> ForwardConfig:
    """With entmax: no options but block_n, consumers, stages, persistent, together and drawn."""
    return resolve("hopper.entmax", lambda: entmax_heuristic(call))


def entmax_heuristic(call: Call) -> ForwardConfig:
    # where rows are long, fewer and larger steps pay for what is spilled
    if max(padded(call.q.shape[-1]), padded(call.v.shape[-1])) <= 64 and rows_of(call) >= LONG and exponent_of(call) > 0:
        return ForwardConfig(128, 2)
    return ForwardConfig(64, 2, stages=4)


def share_q_and_o(config: ForwardConfig, bd: int, bdv: int, intervals: int = 0) -> bool:
    """Whether O has to leave through the shared memory of Q."""
    return _shared_bytes(config, bd, bdv, intervals, outputs=1) > SHARED_MEMORY


def _shared_bytes(config: ForwardConfig, bd: int, bdv: int, intervals: int, outputs: int) -> int:
    slots = 4 if config.consumers == 3 else config.consumers
    elements = slots * 64 * (config.q_buffers * bd + outputs * bdv) + config.stages * config.block_n * (bd + bdv)
    return 2 * elements + config.stages * 8 * intervals * config.block_n + BARRIERS


def low_in_memory(config: ForwardConfig, bd: int, bdv: int, intervals: int = 0) -> bool:
    """Whether the low half of y has room beside O."""
    return _shared_bytes(config, bd, bdv, intervals, outputs=2) <= SHARED_MEMORY


def intervals_of(call: Call) -> int:
    """Row intervals of each key, 0 without a mask of them."""
    return 0 if call.rows is None else call.rows.shape[2] // 2


def is_masked(call: Call) -> bool:
    """Whether rows of a sequence may see different numbers of keys."""
    return call.spec.masked or call.rows is not None


def heads_together(call: Call, config: ForwardConfig | TangentConfig) -> int:
    """Query heads whose row blocks interleave under a mask: a divisor of all heads.

    Longest rows of several heads first: balanced to the end, and CTAs that run at one time read the same part of few K and V.
    """
    total = call.q.shape[0] * call.q.shape[1]
    limit = config.together or (TOGETHER if is_masked(call) or call.varlen else 1)
    return max(n for n in range(1, min(limit, total) + 1) if total % n == 0)


@dataclass(frozen=True, slots=True)
class TangentConfig(RowTiles):
    """`consumers` warpgroups of 64 rows, blocks of `block_n` keys; options of the same name are those of `ForwardConfig`.

    ahead: s of a block is multiplied behind the outputs of the block before; otherwise after them.
    lazy:  a row keeps its maximum until it is exceeded 2^8 times, so that sums are seldom rescaled (bf16: float16 has no room).
    """

    block_n: int
    consumers: int
    stages: int = 2
    pingpong: bool = False
    ahead: bool = True
    lazy: bool = False
    persistent: bool = True
    together: int = 0
    drawn: bool = True


def tangent_config(call: Call) -> TangentConfig:
    return resolve("hopper.tangent", lambda: tangent_heuristic(call))


def tangent_heuristic(call: Call) -> TangentConfig:
    width = max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))
    # both ends of a window need registers, and wide heads leave none
    if width > 64 or call.spec.left is not None:
        return TangentConfig(64, 2, pingpong=True)
    # for s beside p and g of 128 keys, ptxas of Triton 3.9 finds no registers: it would wait for every product
    return TangentConfig(128, 2, pingpong=True, ahead=triton_version() < (3, 9))


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Tiles of `block_m` rows x `block_n` keys.

    split:      dq comes from a kernel of its own.
    wide:       heads wider than 128: two warpgroups share 64 keys and split columns.
    overlap:    exp2 stays under the matmul of dp, which the compiler would wait for first.
    narrow:     a partition for each warpgroup, 128 x 128 tiles (`backward/narrow/`).
    persistent: one CTA per multiprocessor draws key tiles; otherwise one CTA per tile.
    together:   key heads whose tiles interleave (0: by the mask).
    ordered:    deterministic calls add dq in a fixed order (`backward/order.py`), where that can be had.
    """

    block_m: int
    block_n: int
    stages: int = 2
    split: bool = False
    wide: bool = False
    overlap: bool = False
    narrow: bool = False
    persistent: bool = True
    together: int = 0
    ordered: bool = False


@dataclass(frozen=True, slots=True)
class DqConfig:
    """Key blocks of the kernel that owns rows, 128 of them; K and V have rings of their own."""

    block_n: int
    stages: int = 2
    v_stages: int = 2


@dataclass(frozen=True, slots=True)
class SecondConfig:
    """Row blocks of the kernel of second derivatives, whose key tiles are 128; other options are those of `BackwardConfig`.

    direct: dq is added to memory from registers, not by TMA from shared memory.
    ahead:  scores of the next block and their tangents are multiplied behind dq of this one.
    """

    block_m: int
    stages: int = 2
    direct: bool = False
    ahead: bool = False
    persistent: bool = True
    together: int = 0


def second_config(call: Call) -> SecondConfig:
    return resolve("hopper.second", lambda: second_heuristic(call))


def second_heuristic(call: Call) -> SecondConfig:
    """dk, dv and four tiles of scores have to fit into registers."""
    width = max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))
    return SecondConfig(64 if width <= 64 else 32)


def backward_config(call: Call) -> BackwardConfig:
    return resolve("hopper.backward", lambda: backward_heuristic(call))


def backward_heuristic(call: Call) -> BackwardConfig:
    width = max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))
    if width > 128:
        return BackwardConfig(64, 64, wide=True, overlap=True)
    if width > 64:
        return BackwardConfig(64, 128, overlap=True)
    if call.spec.softcap is not None or exponent_of(call) < 0:
        # the capped scores stay in registers, and so do powers by exp2 and log2
        return BackwardConfig(64, 128, overlap=True)
    if intervals_of(call) == 2:
        # so do the ends of holes
        return BackwardConfig(64, 128, overlap=True)
    plain = call.bias is None and call.tau is None
    # adding in a fixed order costs less than a kernel for dq where rows are narrow and tiles begin at their diagonal
    in_turn = plain and call.entmax is None and call.group == 1 and call.spec.right is not None
    return BackwardConfig(128, 128, narrow=plain, ordered=in_turn)


def room_for_dv(config: BackwardConfig, bd: int, bdv: int, dbias: bool) -> bool:
    """Whether dk and dv of a tile can leave while the next K and V arrive: dk takes the memory of a dq tile, dv its own."""
    if config.split or config.wide:
        return False
    rows, keys = config.block_m, config.block_n
    stage = 2 * rows * (bd + bdv) + 12 * rows
    diagonals = 256 * (rows + 8) if dbias else 0
    used = 2 * keys * (bd + bdv) + config.stages * stage + 2 * rows * keys + 4 * rows * bd + diagonals
    return used + 2 * keys * bdv + BARRIERS <= SHARED_MEMORY


def keys_together(call: Call, config: BackwardConfig | SecondConfig, few: bool = False) -> int:
    """Key heads whose tiles interleave under a mask: a divisor of all of them.

    Longest tiles of several heads first, as in the forward; but what those heads read and add to has to stay in L2: rows of one
    query head each, or of two, since the CTAs of a group are not in step. few: each key meets few rows, as in a window.
    """
    total = call.k.shape[0] * call.k.shape[1]
    width = padded(call.q.shape[-1])
    head = rows_of(call) * (2 * (width + padded(call.v.shape[-1])) + 4 * width) * min(call.group, 2)
    limit = TOGETHER if call.spec.left is not None or few else max(1, min(TOGETHER, L2 // max(1, head)))
    limit = config.together or (limit if is_masked(call) or call.varlen else 1)
    return max(n for n in range(1, min(limit, total) + 1) if total % n == 0)


def dq_config(call: Call) -> DqConfig:
    return resolve("hopper.dq", lambda: dq_heuristic(call))


def dq_heuristic(call: Call) -> DqConfig:
    width = max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))
    return DqConfig(128 if width <= 64 else 64, v_stages=2 if width <= 128 else 1)
