"""A mask by row intervals, as plain tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight import intervals
from backlight._private.torch import register_pytree
from backlight.arguments import check_device, check_flag, check_tensor, check_whole, shown


@dataclass(frozen=True, eq=False)
class Mask:
    """Which rows see a key: for each key one run of rows, or two.

    Made by the functions of `backlight.mask`, or of tensors that are intervals already. Key j is seen by rows first_j <= i <
    end_j. Rows are counted as they lie in q (not from the bottom right, as causal is), over all of q if sequences are packed.
    Intervals may begin below 0 and end beyond the last row; one that ends where it begins, or before, is empty. The mask comes
    on top of causal, window and borders: a key is seen where all of them let it be seen.

    rows: int32 [B or 1, Hq or 1, 2 or 4, Sk]: first, end and, of a second interval, first, end of each key.
    pos:  int32 [B or 1, Sq] or None: row i is compared as pos_i with the intervals, instead of as i.
    borders: int32 [1 or 2, n] or None: the same said as packed sequences, by whoever knows that it is the same
        (`documents(lengths=...)`). Borders of rows and, in a second line, of keys, over all batch entries of `rows`, one entry
        after another. A call runs on kernels for packed sequences where it can.
    causal: with borders, whether rows see only keys up to themselves.
    """

    rows: Tensor
    pos: Tensor | None = None
    borders: Tensor | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        check_tensor("rows", self.rows, "[B, H, ends, Sk]")
        check_int32("rows", self.rows)
        if self.rows.shape[2] not in (2, 4):
            raise ValueError(f"rows must hold 2 or 4 ends of each key, [B, H, ends, Sk], got shape {shape_of(self.rows)}")
        self._check_borders()
        if self.pos is None:
            return
        check_tensor("pos", self.pos, "[B, Sq]")
        check_int32("pos", self.pos)
        check_device("pos", self.pos, "rows", self.rows.device)
        sizes = self.rows.shape[0], self.pos.shape[0]
        if sizes[0] != sizes[1] and 1 not in sizes:
            raise ValueError(f"pos must have the batch size of rows, {sizes[0]}, or 1, got {sizes[1]}")

    def _check_borders(self) -> None:
        check_flag("causal", self.causal)
        if self.borders is None:
            return
        check_tensor("borders", self.borders, "[sides, n]")
        check_int32("borders", self.borders)
        check_device("borders", self.borders, "rows", self.rows.device)
        if self.borders.shape[0] not in (1, 2):
            raise ValueError(f"borders must be of rows or of rows and keys, [1 or 2, n], got shape {shape_of(self.borders)}")
        if self.pos is not None or self.rows.shape[1:3] != (1, 2):
            raise ValueError("borders go with one interval for each key, the same for all heads, and without pos")
        if not _in_order(self.borders, self.rows.shape[0] * self.rows.shape[3]):
            raise ValueError(
                f"borders must rise from 0 to the number of positions of all entries, {self.rows.shape[0] * self.rows.shape[3]}"
            )
        object.__setattr__(self, "_apart", _times_written(self.rows, self.borders))

    @property
    def agrees(self) -> bool:
        """False where rows or borders alone were written in place since: they may no longer say the same. Inside compiled
        code and for tensors of inference mode nobody counts, and it is True."""
        known = None if torch.compiler.is_compiling() else getattr(self, "_apart", None)
        return known is None or self.borders is None or known == _times_written(self.rows, self.borders)

    @property
    def state(self) -> dict[str, Any]:
        """What the mask is made of by name, for `torch.save`; `Mask(**state)` is the mask again."""
        known = {} if self.borders is None else {"borders": self.borders, "causal": self.causal}
        return {"rows": self.rows, "pos": self.pos, **known}

    @property
    def device(self) -> torch.device:
        return self.rows.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Mask:
        """The mask on another device."""
        rows, pos, borders = (None if x is None else x.to(device, non_blocking=non_blocking) for x in _leaves(self))
        return Mask(rows, pos) if borders is None else with_borders(rows, borders, self.causal)  # type: ignore[arg-type]

    def copy_(self, other: Mask) -> Mask:
        """Another mask of the same shapes into the memory of this one: for a captured CUDA graph, which reads it there."""
        if not isinstance(other, Mask):
            raise TypeError(f"other must be a backlight.mask.Mask, got {shown(other)}")
        if self.causal != other.causal or [*map(shape_of, _leaves(self))] != [*map(shape_of, _leaves(other))]:
            raise ValueError(f"other must be like this mask, {self!r}, got {other!r}")
        for own, new in zip(_leaves(self), _leaves(other), strict=True):
            if own is not None:
                own.copy_(new)
        return self

    def dense(self, sq: int | None = None) -> Tensor:
        """Which row sees which key, bool [B or 1, Hq or 1, Sq, Sk], without causal, window and borders.

        sq: rows of q; as many as there are keys, or positions, where it is not said.
        """
        check_whole("sq", sq, least=0, optional=True)
        if self.pos is None:
            positions = torch.arange(self.rows.shape[3] if sq is None else sq, device=self.device)[None]
        elif sq is not None and sq != self.pos.shape[1]:
            raise ValueError(f"sq must be the number of positions, {self.pos.shape[1]}, or None, got {sq}")
        else:
            positions = self.pos
        return intervals.seen(self.rows, positions[:, None])

    def last_rows(self, sq: int) -> Mask:
        """The mask of the last `sq` rows alone: what a call takes whose q holds only those, beside all of the keys.

        A mask knows no length of q. Without pos, it is taken to have a row for each key; with more rows than keys, the first
        ones come before all that the mask was made for, as they do under causal.

            documents(lengths=[2, 3], causal=True)        .last_rows(2)
                x . . . .
                x x . . .
                . . x . .
                . . x x .                                   . . x x .
                . . x x x                                   . . x x x
        """
        check_whole("sq", sq, least=0)
        if self.pos is not None:
            if sq > self.pos.shape[1]:
                raise ValueError(f"sq must be at most the number of positions, {self.pos.shape[1]}, got {sq}")
            return Mask(self.rows, self.pos[:, self.pos.shape[1] - sq :])
        if sq == self.rows.shape[3]:
            return self
        return Mask(intervals.shifted(self.rows, self.rows.shape[3] - sq))

    def __repr__(self) -> str:
        pos = "" if self.pos is None else f", pos {shape_of(self.pos)}"
        borders = "" if self.borders is None else f", borders {shape_of(self.borders)}{', causal' if self.causal else ''}"
        return f"Mask(rows {shape_of(self.rows)}{pos}{borders}, {self.device})"


def with_borders(rows: Tensor, borders: Tensor, causal: bool) -> Mask:
    """A mask whose maker knows that the borders are in order: the device is not waited for to look at them."""
    mask = _of_leaves((rows, borders), causal)
    object.__setattr__(mask, "_apart", _times_written(rows, borders))
    return mask


def _in_order(borders: Tensor, last: int) -> bool:
    """Kernels go by borders without a look; where values cannot be read, inside compiled code, they come from a mask."""
    if torch.compiler.is_compiling() or type(borders) is not Tensor or borders.is_meta:
        return True
    ends = borders[:, :1].eq(0).all() & borders[:, -1:].eq(last).all()
    return bool(ends & borders.diff(dim=1).ge(0).all()) and borders.shape[1] > 0


def _times_written(rows: Tensor, borders: Tensor) -> int | None:
    """How often rows were written in place beyond borders."""
    if torch.compiler.is_compiling() or rows.is_inference() or borders.is_inference():
        return None
    return rows._version - borders._version


def _leaves(mask: Mask) -> tuple[Any, Any, Any]:
    return mask.rows, mask.pos, mask.borders


def _tensors(mask: Mask) -> tuple[list[Any], bool | None]:
    """The leaves, and `causal` where the second of them are borders."""
    if mask.borders is not None:
        return [mask.rows, mask.borders], mask.causal
    return [mask.rows] if mask.pos is None else [mask.rows, mask.pos], None


def _of_leaves(leaves: Any, causal: bool | None) -> Mask:
    """Leaves may be anything: axes, specs, tensors of a transform. Nothing is checked."""
    rows, *others = leaves
    second = others[0] if others else None
    mask = object.__new__(Mask)
    object.__setattr__(mask, "rows", rows)
    object.__setattr__(mask, "pos", second if causal is None else None)
    object.__setattr__(mask, "borders", None if causal is None else second)
    object.__setattr__(mask, "causal", bool(causal))
    return mask


register_pytree(Mask, _tensors, _of_leaves, serialized_type_name="backlight.mask.Mask")


# --- tensors of a mask -------------------------------------------------------------------------------------------------------


def shape_of(tensor: Any) -> Any:
    return tuple(tensor.shape) if isinstance(tensor, Tensor) else shown(tensor)


def check_int32(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {tensor.dtype}")


def as_int32(tensor: Tensor) -> Tensor:
    """Whole numbers as int32; those beyond it become the nearest, which hide and clip alike."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    return tensor.clamp(least, most).to(torch.int32) if tensor.dtype == torch.int64 else tensor.to(torch.int32)
