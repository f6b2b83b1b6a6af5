"""What the axes of a call's tensors count, and cutting a call along them, whatever terms it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from backlight.call import Call
from backlight.intervals import shifted
from backlight.spec import LEARNED, OF_PAIRS, SEQUENCE_OF, TENSORS

OUTPUT_AXES = ("batch", "heads", "rows", "values")
ROW_AXES = ("batch", "heads", "rows")
AXES: dict[str, tuple[str, ...]] = {each.name: each.axes for each in TENSORS} | {
    **{f"d{each.name}": each.axes for each in TENSORS if each.learned},
    **dict.fromkeys(("y", "o", "u", "dy", "do"), OUTPUT_AXES),
    **dict.fromkeys(("lse", "dlse", "delta"), ROW_AXES),
}
# gradients by what they have: rows of queries or keys; the others have neither, or pairs of them
ROW_GRADIENTS = tuple(f"d{name}" for name, side in SEQUENCE_OF.items() if side == "rows")
KEY_GRADIENTS = tuple(f"d{name}" for name, side in SEQUENCE_OF.items() if side == "keys")


@dataclass(frozen=True)
class Sizes:
    """How long each axis is; distances are the columns of a table by distance, ends those of the row intervals of a key."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    dim: int
    values: int
    distances: int = 0
    ends: int = 2

    @staticmethod
    def of(call: Call) -> Sizes:
        batch, heads, rows, dim = call.q.shape
        distances = 0 if call.bias is None else call.bias.shape[1]
        ends = 2 if call.rows is None else call.rows.shape[2]
        return Sizes(batch, heads, call.k.shape[1], rows, call.k.shape[2], dim, call.v.shape[3], distances, ends)

    def of_sequences(self, lengths_q: Sequence[int], lengths_k: Sequence[int]) -> Sizes:
        """As a pair bias counts packed sequences: they are a batch, as long as the longest of them."""
        rows, keys = (max(lengths, default=0) for lengths in (lengths_q, lengths_k))
        return replace(self, batch=len(lengths_q), rows=rows, keys=keys)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the call, of its output or of a gradient."""
        unknown = [axis for axis in AXES[name] if not hasattr(self, axis)]
        if unknown:
            raise NotImplementedError(f"{name} has an axis of {unknown[0]}, whose length is not known here")
        return tuple(getattr(self, axis) for axis in AXES[name])


def cut(name: str, x: Tensor, ranges: Mapping[str, slice]) -> Tensor:
    """The part of a tensor inside `ranges` (axis -> slice); axes that are not named stay whole."""
    return x[tuple(ranges.get(axis, slice(None)) for axis in AXES[name])]


def tensors_of(call: Call) -> dict[str, Tensor]:
    """q, k, v and the learned terms that the call has, by name."""
    return {name: x for name in LEARNED if (x := getattr(call, name)) is not None}


def with_tensors(call: Call, tensors: Mapping[str, Tensor], **changes: Any) -> Call:
    """The call with other tensors."""
    changed: dict[str, Any] = dict(tensors) | changes
    return replace(call, **changed, _segments=None)


def cut_call(call: Call, ranges: Mapping[str, slice], **changes: Any) -> Call:
    """The call of a part: every tensor cut along the same axes."""
    whole = {name: x for name, x in tensors_of(call).items() if name not in OF_PAIRS}
    parts = {name: cut(name, x, ranges) for name, x in whole.items()}
    if call.pair_bias is not None:
        of_pairs = ranges
        if call.varlen:
            if not ranges.keys().isdisjoint(("rows", "keys")):
                raise NotImplementedError(
                    "rows and keys of packed sequences with a pair_bias are not cut: it counts by sequence"
                )
            # all sequences are one batch entry
            of_pairs = {axis: at for axis, at in ranges.items() if axis != "batch"}
        parts["pair_bias"] = cut_pairs(call.pair_bias, call.q.shape[0], of_pairs)
    return with_tensors(call, parts | _cut_mask(call, ranges), **changes)


def cut_pairs(x: Tensor, batch: int, ranges: Mapping[str, slice]) -> Tensor:
    """The part of a pair bias of a call of that batch; entries that no longer serve equally many are repeated."""
    sizes = dict(zip(AXES["pair_bias"], x.shape, strict=True))
    wanted = {axis: at for axis, at in ranges.items() if axis == "keys" or sizes.get(axis, 1) > 1}
    if "batch" in wanted and x.shape[0] != batch:
        owners = [b // (batch // x.shape[0]) for b in range(batch)[wanted.pop("batch")]]
        x = x[owners[0] : owners[0] + 1] if len(set(owners)) == 1 else x[owners]
    return cut("pair_bias", x, wanted)


def _cut_mask(call: Call, ranges: Mapping[str, slice]) -> dict[str, Tensor]:
    """The mask of a part, its rows counted from the part's first; batch and heads of 1 stand for all, and stay."""
    given = {name: x for name in ("rows", "pos") if (x := getattr(call, name)) is not None}
    found = {name: cut_mask(name, x, ranges) for name, x in given.items()}
    start = ranges["rows"].start if "rows" in ranges else None
    return found | {"rows": shifted(found["rows"], start)} if start and "rows" in found and "pos" not in found else found


def cut_mask(name: str, x: Tensor, ranges: Mapping[str, slice]) -> Tensor:
    """`cut` of a tensor of a mask."""
    shared = [axis for axis, size in zip(AXES[name], x.shape, strict=True) if size == 1 and axis in ("batch", "heads")]
    return cut(name, x, {axis: at for axis, at in ranges.items() if axis not in shared})
