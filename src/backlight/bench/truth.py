"""The truth for a sample of heads of a large call, in bounded memory.

A slice is one key/value head with its query heads, of one batch entry or of all of them. Its rows are cut into pieces; a piece
is a small call of its own (rows are independent of each other), judged by the same oracle and yardsticks as everything else.
Row quantities are put side by side again, quantities that sum over rows are summed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.bench.room import available_bytes
from backlight.call import Call
from backlight.problems.axes import KEY_GRADIENTS, ROW_GRADIENTS, Sizes, cut, cut_call, tensors_of, with_tensors
from backlight.problems.problem import Arithmetic, Problem
from backlight.reference import Trace
from backlight.spec import OF_PAIRS, PER_HEAD, Segment

ROWS = ("y", "lse", *ROW_GRADIENTS)
PARAMETERS = tuple(f"d{name}" for name in PER_HEAD)
# float64 matrices of a piece that the oracle and the noise floor hold at once
MATRICES = 16
PIECE_BYTES = {"cuda": 16 << 30, "cpu": 1 << 30}
# (row, key) pairs of all judged heads together; beyond it fewer heads are judged, never none
PAIRS_LIMIT = {"cuda": 1 << 29, "cpu": 40 << 20}
SAMPLES = 3


@dataclass(frozen=True)
class Slice:
    """Batch entries [b0, b1) of key/value head g."""

    b0: int
    b1: int
    g: int

    @property
    def label(self) -> str:
        batches = f"batch {self.b0}" if self.b1 == self.b0 + 1 else f"batches {self.b0} to {self.b1 - 1}"
        return f"{batches}, kv head {self.g}"

    def take(self, name: str, value: Tensor, group: int) -> Tensor:
        """This slice of a tensor: inputs by their name, gradients by theirs."""
        return cut(name, value, self.ranges(group))

    def ranges(self, group: int) -> dict[str, slice]:
        heads = slice(self.g * group, (self.g + 1) * group)
        return {"batch": slice(self.b0, self.b1), "heads": heads, "kv_heads": slice(self.g, self.g + 1)}


def sample(call: Call, seed: int = 0) -> tuple[Slice, ...]:
    """Which heads are judged: the last, the first and a random one, as many as the device affords.

    Gradients of learned terms sum over the batch, so with such a term a slice spans every batch entry.
    """
    batch, heads = call.k.shape[:2]
    chance = random.Random(seed)
    if call.pair_bias is not None and call.pair_bias.shape[1] < call.q.shape[1]:
        raise NotImplementedError("the gradient of a pair bias that heads share cannot be judged one head at a time")
    if any(getattr(call, name) is not None for name in (*PER_HEAD, *OF_PAIRS)):
        wanted = [Slice(0, batch, g) for g in (heads - 1, 0, chance.randrange(heads))]
    else:
        spots = ((batch - 1, heads - 1), (0, 0), (chance.randrange(batch), chance.randrange(heads)))
        wanted = [Slice(b, b + 1, g) for b, g in spots]
    distinct = list(dict.fromkeys(wanted))[:SAMPLES]
    cost = call.group * sum(z.sq * z.sk for z in call.segments() if wanted[0].b0 <= z.batch < wanted[0].b1)
    return tuple(distinct[: max(1, PAIRS_LIMIT[_kind(call)] // max(1, cost))])


def narrowed(call: Call, part: Slice) -> Call:
    """The call of one slice."""
    own = cut_call(call, part.ranges(call.group))
    return with_tensors(own, {name: x.detach() for name, x in tensors_of(own).items()})


def problem_of(call: Call, dy: Tensor, arithmetic: Arithmetic | None = None) -> Problem:
    """A problem whose truth and yardsticks were computed piece by piece."""
    whole = Problem(call, dy, arithmetic=arithmetic)
    parts = {kind: _Assembly(call, squares=kind == "noise") for kind in ("truth", "noise", "eager", "flashlike", "kink")}
    kinked = False
    for piece, z, rows, keys in pieces(call):
        small = Problem(piece, dy[z.batch : z.batch + 1, :, rows], arithmetic=arithmetic)
        kink = small.kink
        kinked = kinked or kink is not None
        values = {"truth": small.truth, "noise": small.noise, "eager": small.eager, "flashlike": small.flashlike}
        for kind, trace in (values | {"kink": small.truth if kink is None else kink}).items():
            parts[kind].add(trace, z.batch, rows, keys)
    # Problem computes these on first use; here they are known already
    whole.__dict__ |= {kind: part.trace() for kind, part in parts.items() if kind != "noise"}
    whole.__dict__["noise"] = dict(parts["noise"].trace())
    whole.__dict__["kink"] = parts["kink"].trace() if kinked else None
    return whole


def pieces(call: Call) -> Iterator[tuple[Call, Segment, slice, slice]]:
    """(small call, its segment, its rows, its keys): a batch of one whose geometry is that of those rows in the whole call.

    A piece ends at the last key its rows may see, `after` keys behind their own position. Bottom-right alignment puts the last
    row at the last key, so positions move by `after`, and windows and table columns move back by as much.
    """
    spec = call.spec
    for z in call.segments():
        step = rows_per_piece(z, call)
        for i0 in range(0, z.sq, step):
            i1 = min(z.sq, i0 + step)
            position_end = i1 + z.sk - z.sq
            end = z.sk if spec.right is None else min(z.sk, position_end + spec.right)
            first = 0 if spec.left is None else spec.first_key(i0, z.sq, z.sk)
            if step >= z.sq:
                first, end = 0, z.sk
            after = end - position_end
            left = None if spec.left is None else spec.left + after
            right = None if spec.right is None else spec.right - after
            rows, keys = slice(z.q0 + i0, z.q0 + i1), slice(z.k0 + first, z.k0 + end)
            shifted = (
                spec
                if after == 0 or step >= z.sq
                else spec.replace(causal=False, window=(left, right), bias_origin=spec.bias_origin - after)
            )
            ranges = {"batch": slice(z.batch, z.batch + 1), "rows": rows, "keys": keys}
            yield cut_call(call, ranges, spec=shifted, cu_seqlens_q=None, cu_seqlens_k=None), z, rows, keys


def rows_per_piece(z: Segment, call: Call) -> int:
    """All rows where they fit, and where the first rows see nothing (Sq > Sk); otherwise as many as the budget holds."""
    kind = _kind(call)
    budget = min(PIECE_BYTES[kind], available_bytes(call.q.device) // 3)
    fitting = max(64, budget // (8 * MATRICES * max(1, z.sk)))
    return max(1, z.sq) if z.sq > z.sk else int(min(max(1, z.sq), fitting))


class _Assembly:
    """Puts the pieces of one trace together; noise adds in squares."""

    def __init__(self, call: Call, squares: bool):
        self.squares = squares
        sizes, names = Sizes.of(call), (*ROWS, *KEY_GRADIENTS, *PARAMETERS)
        self.values = {name: call.q.new_zeros(sizes.shape(name), dtype=torch.float64) for name in names}
        self.sharing = call.sharing
        if call.pair_bias is not None:
            self.values["dpair_bias"] = torch.zeros_like(call.pair_bias, dtype=torch.float64)

    def add(self, trace: Mapping[str, Tensor], batch: int, rows: slice, keys: slice) -> None:
        for name, out in self.values.items():
            value = trace[name].double()
            if name in ROWS:
                out[batch, :, rows] = value[0]
            elif name in KEY_GRADIENTS:
                out[batch, :, keys] += value[0] ** 2 if self.squares else value[0]
            elif name[1:] in OF_PAIRS:
                own = out[batch // self.sharing, :, rows if out.shape[2] > 1 else slice(None), keys]
                own += value[0] ** 2 if self.squares else value[0]
            else:
                out += value**2 if self.squares else value

    def trace(self) -> Trace:
        if self.squares:
            for name in self.values.keys() - {*ROWS}:
                self.values[name].sqrt_()
        return Trace(self.values)


def _kind(call: Call) -> str:
    return "cuda" if call.q.device.type == "cuda" else "cpu"
