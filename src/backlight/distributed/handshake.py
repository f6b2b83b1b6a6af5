"""Before anything is sent: do all ranks mean the same call? Whatever differs becomes one sentence, the same on every rank."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backlight.call import DTYPES, Call, read_cu_seqlens
from backlight.distributed.communicator import Communicator
from backlight.distributed.layout import LAYOUTS, Borders, lengths
from backlight.spec import LEARNED, TERM_NAMES

STEP, BACKWARD, UNSHARD, TANGENT = "options check", "backward check", "unshard", "tangents check"
# ranks that make different calls must still understand each other, so every message has the same size: the step's name,
# how many numbers follow, and the numbers
NAME_BYTES, NUMBERS = 40, 40
ABSENT = -(1 << 62)
STRATEGIES = ("auto", "ring", "all_to_all")


@dataclass(frozen=True)
class Field:
    """One thing ranks must agree on, as an integer on the wire and as words in a message."""

    name: str
    read: Callable[[Call, Settings], Any]
    words: Callable[[int], str] = str


@dataclass(frozen=True)
class Settings:
    """What a context adds to a call."""

    layout: str
    strategy: str
    sum_learned: bool
    backend: str | None


def _optional(value: int | None) -> int:
    return ABSENT if value is None else value


def _optional_words(number: int) -> str:
    return "None" if number == ABSENT else str(number)


def _bits(value: float | None) -> int:
    return ABSENT if value is None else struct.unpack("<q", struct.pack("<d", value))[0]


def _bits_words(number: int) -> str:
    return "None" if number == ABSENT else f"{struct.unpack('<d', struct.pack('<q', number))[0]:g}"


def _is_given(name: str, call: Call, _: Settings) -> int:
    return int(getattr(call.spec, name))


def _flag_words(number: int) -> str:
    return "given" if number else "not given"


def _pair_size(place: int, call: Call, _: Settings) -> int:
    return ABSENT if call.pair_bias is None else call.pair_bias.shape[place]


def _sizes(rows: Tensor | None) -> int:
    """Batch, heads and ends of a mask, as one number."""
    return ABSENT if rows is None else (rows.shape[0] << 36) + (rows.shape[1] << 4) + rows.shape[2]


def _sizes_words(number: int) -> str:
    return "None" if number == ABSENT else f"{number >> 36} x {number >> 4 & (1 << 32) - 1} x {number & 15}"


def _text(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _border(call: Call, side: int) -> int:
    found = borders(call)
    return _text(None if found is None else found[side])


def _gradients(call: Call, _: Settings) -> int:
    inputs = (getattr(call, name) for name in LEARNED)
    return sum((x is not None and x.requires_grad) << place for place, x in enumerate(inputs)) * torch.is_grad_enabled()


def _gradients_words(number: int) -> str:
    return " ".join(name for place, name in enumerate(LEARNED) if number >> place & 1) or "nothing"


# in an order that is the same on every rank
ALL_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


FIELDS = (
    Field("the batch size", lambda c, s: c.q.shape[0]),
    Field("the heads of q", lambda c, s: c.q.shape[1]),
    Field("the heads of k", lambda c, s: c.k.shape[1]),
    Field("the head dimension of q", lambda c, s: c.q.shape[3]),
    Field("the head dimension of v", lambda c, s: c.v.shape[3]),
    Field("dtype", lambda c, s: DTYPES.index(c.q.dtype), lambda n: str(DTYPES[n])),
    Field("causal", lambda c, s: int(c.spec.causal), lambda n: str(bool(n))),
    Field("window left", lambda c, s: _optional(c.spec.window[0]), _optional_words),
    Field("window right", lambda c, s: _optional(c.spec.window[1]), _optional_words),
    Field("scale", lambda c, s: _bits(c.scale), _bits_words),
    Field("softcap", lambda c, s: _bits(c.spec.softcap), _bits_words),
    Field("the length of bias", lambda c, s: _optional(None if c.bias is None else c.bias.shape[1]), _optional_words),
    Field("bias_origin", lambda c, s: c.spec.bias_origin),
    # of bias the length is compared
    *(Field(name, partial(_is_given, name), _flag_words) for name in TERM_NAMES if name != "bias"),
    *(
        Field(f"the {axis} of pair_bias", partial(_pair_size, place), _optional_words)
        for place, axis in enumerate(("batch size", "heads", "rows", "keys"))
    ),
    Field("the sizes of the mask", lambda c, s: _sizes(c.rows), _sizes_words),
    Field(
        "the batch size of the mask's pos", lambda c, s: _optional(None if c.pos is None else c.pos.shape[0]), _optional_words
    ),
    Field("cu_seqlens_q", lambda c, s: _border(c, 0), lambda n: f"values with checksum {n:08x}"),
    Field("cu_seqlens_k", lambda c, s: _border(c, 1), lambda n: f"values with checksum {n:08x}"),
    Field("deterministic", lambda c, s: int(c.deterministic), lambda n: str(bool(n))),
    Field("the inputs that require gradients", _gradients, _gradients_words),
    Field("layout", lambda c, s: tuple(LAYOUTS).index(s.layout), lambda n: tuple(LAYOUTS)[n]),
    Field("strategy", lambda c, s: STRATEGIES.index(s.strategy), lambda n: STRATEGIES[n]),
    Field("sum_learned", lambda c, s: int(s.sum_learned), lambda n: str(bool(n))),
    Field("backend", lambda c, s: _text(s.backend), lambda n: f"a name with checksum {n:08x}"),
)


def borders(call: Call) -> Borders | None:
    """Values of cu_seqlens, which name the whole packed sequence, not this rank's shard."""
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return None
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    return read_cu_seqlens("cu_seqlens_q", cu_q, None), read_cu_seqlens("cu_seqlens_k", cu_k, None)


def signature(call: Call, settings: Settings) -> tuple[int, ...]:
    """The call as numbers: what must agree, then the lengths of this rank's shard."""
    agreed = tuple(int(field.read(call, settings)) for field in FIELDS)
    return (*agreed, call.q.shape[2], call.k.shape[2])


def meet(communicator: Communicator, numbers: Sequence[int], step: str) -> list[list[int]]:
    """The numbers of all ranks; raises on every rank if they are not in the same step."""
    name = step.encode()[:NAME_BYTES].ljust(NAME_BYTES)
    named = NAME_BYTES // 8
    row = [*struct.unpack(f"<{named}q", name), len(numbers), *numbers, *[0] * (NUMBERS - len(numbers))]
    rows = communicator.gather_numbers(row, step)
    steps = [struct.pack(f"<{named}q", *row[:named]).decode().strip() for row in rows]
    if len(set(steps)) > 1:
        shown = ", ".join(f"rank {rank} is in step '{of_rank}'" for rank, of_rank in enumerate(steps))
        raise ValueError(f"context parallel: ranks must make the same calls in the same order, but {shown}")
    return [row[named + 1 :][: row[named]] for row in rows]


def refuse(communicator: Communicator, step: str = STEP) -> None:
    """Tell the others that this rank's own arguments were wrong; it raises its own error afterwards."""
    meet(communicator, [1], step)


def _check_nobody_refused(rows: list[list[int]]) -> None:
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    if refused:
        raise ValueError(f"context parallel: {_ranks(refused)} refused the call; see the message there")


def _check_equal(name: str, values: Sequence[int], words: Callable[[int], str] = str) -> None:
    if len(set(values)) > 1:
        shown = ", ".join(f"rank {rank} has {words(value)}" for rank, value in enumerate(values))
        raise ValueError(f"context parallel: ranks disagree on {name}: {shown}")


@dataclass(frozen=True)
class Agreement:
    """(Sq, Sk) of the whole problem, and what all ranks have shown: the same on every rank."""

    sq: int
    sk: int
    shown: tuple[tuple[int, ...], ...]


def agree(communicator: Communicator, mine: tuple[int, ...], call: Call, layout: str) -> Agreement:
    """What the whole problem is, if all ranks show the same options and fitting shards; else one error on all."""
    rows = meet(communicator, [0, *mine], STEP)
    _check_nobody_refused(rows)
    for place, field in enumerate(FIELDS):
        _check_equal(field.name, [row[1 + place] for row in rows], field.words)
    sq, sk = (tuple(row[place] for row in rows) for place in (-2, -1))
    cu_q, cu_k = borders(call) or (None, None)
    check_lengths("q", sq, cu_q, layout)
    check_lengths("k", sk, cu_k, layout)
    return Agreement(sum(sq), sum(sk), tuple(map(tuple, rows)))


def agree_backward(communicator: Communicator, number: int, has_dlse: bool) -> bool:
    """Whether any rank has a gradient for lse, if all of them are in the backward of the same call; else one error on all."""
    rows = meet(communicator, [number, int(has_dlse)], BACKWARD)
    _check_equal("the call whose backward runs", [row[0] for row in rows], lambda n: f"call {n}")
    return any(row[1] for row in rows)


def agree_tangents(communicator: Communicator, given: Sequence[bool]) -> list[bool]:
    """Which inputs have a tangent on some rank: the others' keys come with theirs."""
    rows = meet(communicator, [int(each) for each in given], TANGENT)
    return [any(column) for column in zip(*rows, strict=True)]


def agree_shard(communicator: Communicator, shard: Tensor, dim: int, layout: str) -> list[int]:
    """How much of `dim` each rank holds, if the shards of all ranks make one tensor; else one error on all."""
    rows = meet(communicator, [0, ALL_DTYPES.index(shard.dtype), shard.dim(), dim, *shard.shape], UNSHARD)
    _check_nobody_refused(rows)
    for place, name, words in (
        (1, "the dtype of the shard", lambda n: str(ALL_DTYPES[n])),
        (2, "the dimensions of the shard", str),
        (3, "dim", str),
    ):
        _check_equal(name, [row[place] for row in rows], words)
    for place in range(shard.dim()):
        if place != dim:
            _check_equal(f"the size of dimension {place} of the shard", [row[4 + place] for row in rows])
    held = [row[4 + dim] for row in rows]
    check_lengths("the tensor", tuple(held), None, layout)
    return held


def check_lengths(name: str, held: tuple[int, ...], cu_seqlens: tuple[int, ...] | None, layout: str) -> None:
    world = len(held)
    whole = sum(held) if cu_seqlens is None else cu_seqlens[-1]
    wanted = lengths(layout, whole, world)
    if held != wanted:
        source = "" if cu_seqlens is None else f", the end of cu_seqlens_{name}"
        raise ValueError(
            f"context parallel: shards of {name} must have {_list(wanted)} positions on ranks 0 to {world - 1} "
            f"(layout {layout}, {whole} in all{source}), got {_list(held)}"
        )


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
