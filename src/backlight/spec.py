"""What is computed: the options of one attention call and the geometry they draw.

This module is the only home of masks, alignment, windows, visible-key counts and tile ranges. The oracle, the backends, the
tests and the pictures all ask here. Equation numbers refer to `docs/math.md`.

Rows are aligned to the bottom right: query row `i` sits at key position `i' = i + Sk - Sq` (eq. 1), so that the last row sees
the last key. Causal attention, Sq < Sk and Sq > Sk (`x` visible, `.` masked; with Sq > Sk the first rows see nothing)::

    Sq=3 Sk=5   x x x . .        Sq=5 Sk=3   . . .
                x x x x .                    . . .
                x x x x x                    x . .
                                             x x .
                                             x x x

`window=(left, right)` keeps keys `i'-left .. i'+right`, both ends included, so the window always contains the row's own
position; `None` leaves a side unbounded. Causal is the same as `right = min(right, 0)`. `window=(2, 0)`, Sq = Sk = 5::

    x . . . .
    x x . . .
    x x x . .
    . x x x .
    . . x x x

Masks by row intervals (`AttentionSpec.rows`) come on top of these; their geometry needs tensors and lives in `intervals`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# no row is this far from a key: kernels count positions in 32 bits, and a reach must not leave them when one is added to it
BEYOND = 1 << 30
# caps outside are as good as none, or as one that all scores have reached: fp32 holds neither them nor what they divide
CAPS = 2.0**-100, 2.0**100
LARGEST = sys.float_info.max
# a compiler puts a symbol in the place of a number that differs from call to call
WHOLE = (int, torch.SymInt)

Index = TypeVar("Index", int, Tensor)


# --- the tensors of a call ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Input:
    """A tensor of a call.

    axes:     what its axes count: batch, heads (of queries), kv_heads, rows, keys, dim, values, distances, ends, borders.
    optional: the call may come without it.
    learned:  it has a gradient; otherwise it counts something, and batch and heads may be 1 for all alike.
    like_q:   it has the dtype of q; otherwise any floating-point dtype or, where it is not learned, an integer one. (An entry
              for every pair of row and key is large: it has the dtype of q or fp32.)
    """

    name: str
    axes: tuple[str, ...]
    optional: bool = True
    learned: bool = True
    like_q: bool = False

    @property
    def sequence(self) -> str | None:
        """ "rows" or "keys" where it has an entry for each: packed sequences and shards of a sequence cut it. None for what
        has an entry for every pair of them."""
        return None if self.of_pairs else next((axis for axis in ("rows", "keys") if axis in self.axes), None)

    @property
    def of_pairs(self) -> bool:
        """It has an entry for every pair of row and key; batch, heads and rows may be fewer (`Call.sharing`)."""
        return {"rows", "keys"} <= {*self.axes}


# terms that a call may have, in the order of every signature; those that are not learned come last
TERMS = (
    Input("bias", ("heads", "distances")),
    Input("sink", ("heads",)),
    Input("tau", ("heads",)),
    Input("gate", ("batch", "heads", "rows", "values"), like_q=True),
    Input("pair_bias", ("batch", "heads", "rows", "keys")),
    Input("entmax", ("heads",)),
    Input("rows", ("batch", "heads", "ends", "keys"), learned=False),
    Input("pos", ("batch", "rows"), learned=False),
)
TENSORS = (
    Input("q", ("batch", "heads", "rows", "dim"), optional=False, like_q=True),
    Input("k", ("batch", "kv_heads", "keys", "dim"), optional=False, like_q=True),
    Input("v", ("batch", "kv_heads", "keys", "values"), optional=False, like_q=True),
    *TERMS,
    Input("cu_seqlens_q", ("borders",), learned=False),
    Input("cu_seqlens_k", ("borders",), learned=False),
)
TERM_NAMES = tuple(term.name for term in TERMS)
TENSOR_NAMES = tuple(each.name for each in TENSORS)
# those with a gradient: q, k, v and the terms
LEARNED = tuple(each.name for each in TENSORS if each.learned)
GRADIENTS = tuple(f"d{name}" for name in LEARNED)
assert TENSOR_NAMES[: len(LEARNED)] == LEARNED, "tensors with a gradient come before those without"
# terms that belong to a head alone, whatever the batch and the lengths
PER_HEAD = tuple(term.name for term in TERMS if term.axes[0] == "heads")
# those with rows or keys and columns for each, and which of the two
SEQUENCE_OF = {each.name: each.sequence for each in TENSORS if each.sequence is not None and each.learned}
# those with an entry for every pair of row and key
OF_PAIRS = tuple(term.name for term in TERMS if term.of_pairs)
# what a call may have that a backend must know; a backend declares its own (`Backend.takes`), the registry refuses the rest
FEATURES = ("causal", "window", "softcap", *TERM_NAMES, "packed", "part", "entmax_part")


# --- the options of a call ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The mathematics of one attention call (eq. 4-13), without its tensors and without its lengths.

    causal:      mask keys after the row's own position.
    window:      (left, right) reach around the row's own position, ends included; None = unbounded, and so is a reach beyond
                 every distance there can be.
    scale:       factor on q.k before everything else; None = D ** -0.5.
    softcap:     c in c * tanh(x / c), applied before bias and mask; None = absent.
    bias:        a learned table [Hq, n] is added by distance i' - j.
    bias_origin: column of distance 0 in that table. Distances outside the table get no bias; they are not masked.
    sink:        a learned logit [Hq] joins the denominator and carries no value.
    tau:         elastic softmax: weights become relu(p + tau / n) with a learned tau [Hq] and n the number of visible keys of
                 the row. Negative tau prunes: keys with p <= -tau / n are dropped. Positive tau adds uniform attention.
    gate:        the output is multiplied by sigmoid(gate), gate shaped like the output.
    pair_bias:   a learned logit [Bb, Hq|1, Sq|1, Sk] is added after softcap and bias, before masks. Bb divides B: each entry
                 serves B / Bb consecutive ones of the batch. -inf hides a pair but not from n: not together with tau. Packed
                 sequences count as the batch, and i and j in their own sequence: the longest decides Sq and Sk.
    entmax:      weights are alpha-entmax of the scores with a learned alpha [Hq] from 1.05 to 2: exactly zero for keys whose
                 score lies below a threshold of the row. A sink is one more entry. lse is (theta + 1) / (alpha - 1) (eq. 88).
                 Not together with tau.
    rows:        a mask by row intervals [B|1, Hq|1, 2 or 4, Sk]: key j is seen by rows first_j <= i < end_j, or by those of a
                 second interval, and by none that causal, window or a border hides from it.
    pos:         the intervals are compared with pos_i [B|1, Sq] instead of i; causal, window and borders are not.
    alpha:       the entmax of every head where it was given as a number: kernels are compiled for it. It changes no result.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: bool = False
    bias_origin: int = 0
    sink: bool = False
    tau: bool = False
    gate: bool = False
    pair_bias: bool = False
    entmax: bool = False
    rows: bool = False
    pos: bool = False
    alpha: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.window, tuple) and len(self.window) == 2):
            raise ValueError(f"window must be a pair (left, right), got {self.window!r}")
        for side, reach in zip(("left", "right"), self.window, strict=True):
            if reach is None:
                continue
            if isinstance(reach, bool) or not isinstance(reach, WHOLE):
                raise TypeError(f"window {side} must be an int or None, got {reach!r}")
            if reach < 0:
                raise ValueError(f"window {side} must be >= 0 or None for unbounded, got {reach}")
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            # compilers follow comparisons of a number that differs from call to call, but not `math.isfinite`
            if value is not None and not -LARGEST <= value <= LARGEST:
                raise ValueError(f"{name} must be finite, got {value}")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be > 0 or None, got {self.softcap}")
        if isinstance(self.bias_origin, bool) or not isinstance(self.bias_origin, WHOLE):
            raise TypeError(f"bias_origin must be an int, got {self.bias_origin!r}")
        self._keep_within_reach()

    def _keep_within_reach(self) -> None:
        """Numbers beyond every distance, and caps beyond every score, become ones that mean the same and overflow nowhere."""
        if self.softcap is not None and not CAPS[0] <= self.softcap <= CAPS[1]:
            object.__setattr__(self, "softcap", CAPS[0] if self.softcap < CAPS[0] else CAPS[1])
        left, right = self.window
        if (left is not None and left >= BEYOND) or (right is not None and right >= BEYOND):
            sides = tuple(None if reach is None or reach >= BEYOND else reach for reach in self.window)
            object.__setattr__(self, "window", sides)
        if self.bias_origin > BEYOND or self.bias_origin < -BEYOND:
            object.__setattr__(self, "bias_origin", max(-BEYOND, min(BEYOND, self.bias_origin)))

    @property
    def left(self) -> int | None:
        return self.window[0]

    @property
    def right(self) -> int | None:
        """Reach to the right with causal folded in."""
        right = self.window[1]
        return (0 if right is None else min(right, 0)) if self.causal else right

    @property
    def masked(self) -> bool:
        """Whether causal or a window can hide a key."""
        return self.left is not None or self.right is not None

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the terms in use, in signature order."""
        return tuple(name for name in TERM_NAMES if getattr(self, name))

    @property
    def keeps_u(self) -> bool:
        """Whether a backward needs u of the forward: sums over v by other weights than those of o (eq. 12, 87)."""
        return self.tau or self.entmax

    @property
    def features(self) -> tuple[str, ...]:
        """What the options ask of a backend, of `FEATURES`."""
        window = self.window != (None, None)
        asked = {"causal": self.causal, "window": window, "softcap": self.softcap is not None}
        return (*(name for name, is_asked in asked.items() if is_asked), *self.terms)

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `attention` that make this spec, all but the terms, which are tensors."""
        names = ("causal", "window", "scale", "softcap", "bias_origin")
        return {name: getattr(self, name) for name in names}

    def resolve_scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def replace(self, **changes: Any) -> AttentionSpec:
        """The same with some fields changed; what they give is checked again."""
        return replace(self, **changes)

    # --- one row -------------------------------------------------------------------------------------------------------------

    def first_key(self, i: Index, sq: int, sk: int) -> Index:
        """lo_i of eq. 2: the first visible key of row i."""
        position = i + (sk - sq)
        if isinstance(position, Tensor):
            return torch.zeros_like(position) if self.left is None else (position - self.left).clamp(min=0)
        return 0 if self.left is None else max(0, position - self.left)

    def last_key(self, i: Index, sq: int, sk: int) -> Index:
        """hi_i of eq. 2: the last visible key of row i; smaller than `first_key` where nothing is visible."""
        position = i + (sk - sq)
        if isinstance(position, Tensor):
            return torch.full_like(position, sk - 1) if self.right is None else (position + self.right).clamp(max=sk - 1)
        return sk - 1 if self.right is None else min(sk - 1, position + self.right)

    def visible_counts(
        self, sq: int, sk: int, device: torch.device | str | None = None, i0: int = 0, i1: int | None = None
    ) -> Tensor:
        """n_i of eq. 3 for rows [i0, i1), by default all: int64 [i1 - i0]."""
        i = torch.arange(i0, sq if i1 is None else i1, device=device)
        return (self.last_key(i, sq, sk) - self.first_key(i, sq, sk) + 1).clamp(min=0)

    def visible_pairs(self, sq: int, sk: int) -> int:
        """Number of visible (row, key) pairs of one head: the N of eq. 42."""
        return int(self.visible_counts(sq, sk).sum())

    def allowed(self, sq: int, sk: int, device: torch.device | str | None = None) -> Tensor:
        """Dense visibility [sq, sk], for references, tests and pictures."""
        return self.allowed_tile(0, sq, 0, sk, sq, sk, device)

    def allowed_tile(
        self, i0: int, i1: int, j0: int, j1: int, sq: int, sk: int, device: torch.device | str | None = None
    ) -> Tensor:
        """Visibility of rows [i0, i1) and keys [j0, j1): bool [i1 - i0, j1 - j0]."""
        return self.allowed_distance(self.distance(i0, i1, j0, j1, sq, sk, device))

    def distance(
        self, i0: int, i1: int, j0: int, j1: int, sq: int, sk: int, device: torch.device | str | None = None
    ) -> Tensor:
        """i' - j of rows [i0, i1) and keys [j0, j1): int64 [i1 - i0, j1 - j0]."""
        position = torch.arange(i0, i1, device=device) + (sk - sq)
        return position[:, None] - torch.arange(j0, j1, device=device)[None, :]

    def allowed_distance(self, distance: Tensor) -> Tensor:
        """Visibility depends on the distance i' - j alone: -right <= distance <= left."""
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            allowed &= distance <= self.left
        if self.right is not None:
            allowed &= distance >= -self.right
        return allowed

    # --- tiles (eq. 30) ------------------------------------------------------------------------------------------------------

    def key_range(self, i0: int, i1: int, sq: int, sk: int) -> tuple[int, int]:
        """Keys [j0, j1) that rows [i0, i1) must visit; empty when j0 >= j1."""
        j0, j1 = self.first_key(i0, sq, sk), self.last_key(i1 - 1, sq, sk) + 1
        return (j0, j1) if j0 < j1 else (j0, j0)

    def full_key_range(self, i0: int, i1: int, sq: int, sk: int) -> tuple[int, int]:
        """Keys [j0, j1) visible to every row of [i0, i1): tiles inside need no mask."""
        j0, j1 = self.first_key(i1 - 1, sq, sk), self.last_key(i0, sq, sk) + 1
        return (j0, j1) if j0 < j1 else (j0, j0)

    def row_range(self, j0: int, j1: int, sq: int, sk: int) -> tuple[int, int]:
        """Rows [i0, i1) that see at least one key of [j0, j1); empty when i0 >= i1."""
        shift = sk - sq
        i0 = 0 if self.right is None else max(0, j0 - self.right - shift)
        i1 = sq if self.left is None else min(sq, j1 + self.left - shift)
        return (i0, i1) if i0 < i1 else (i0, i0)

    def edges(self, i0: int, i1: int, j0: int, j1: int, sq: int, sk: int) -> Iterator[tuple[int, int, int, int]]:
        """Rectangles (i0, i1, j0, j1) of a tile that hold all of its masked pairs: one for each side of the window."""
        shift = sk - sq
        if self.right is not None:
            # masked from the key after the first row's last one, for rows whose last key lies before the tile's end
            first, end = max(j0, self.last_key(i0, sq, sk) + 1), min(i1, max(i0, j1 - 1 - self.right - shift))
            if first < j1 and i0 < end:
                yield i0, end, first, j1
        if self.left is not None:
            last, begin = min(j1, self.first_key(i1 - 1, sq, sk)), max(i0, j0 + self.left + 1 - shift)
            if j0 < last and begin < i1:
                yield begin, i1, j0, last

    def bias_columns(self, i0: int, i1: int, j0: int, j1: int, sq: int, sk: int) -> tuple[int, int]:
        """Table columns [c0, c1) that distances of the tile would read; they may lie outside the table."""
        shift = sk - sq + self.bias_origin
        return i0 - (j1 - 1) + shift, (i1 - 1) - j0 + shift + 1


class Manner(NamedTuple):
    """How a call is computed, whatever it computes.

    deterministic:   the same call gives the same bits.
    batch_invariant: a sequence gives the same bits whatever else is in the call (eq. 79); deterministic, too.
    exact_delta:     the forward keeps what rounding took from y, for the delta of the backward (eq. 103).
    max_logit:       the forward returns the largest logit of each row, too (eq. 72).
    """

    deterministic: bool = False
    batch_invariant: bool = False
    exact_delta: bool = False
    max_logit: bool = False


_flags = tuple(option.name for option in fields(AttentionSpec) if option.name in TERM_NAMES)
assert _flags == TERM_NAMES, "AttentionSpec needs a flag for every term, in the order of TERMS"


@dataclass(frozen=True, slots=True)
class Segment:
    """One independent problem inside a call: rows [q0, q1) against keys [k0, k1) of a batch entry or a packed sequence. number:
    which of the call's problems it is."""

    batch: int
    q0: int
    q1: int
    k0: int
    k1: int
    number: int = 0

    @property
    def sq(self) -> int:
        return self.q1 - self.q0

    @property
    def sk(self) -> int:
        return self.k1 - self.k0


@lru_cache(maxsize=256)
def packed_segments(cu_seqlens_q: tuple[int, ...], cu_seqlens_k: tuple[int, ...]) -> tuple[Segment, ...]:
    """Segments of a packed call: segment z owns rows cu_q[z]..cu_q[z+1] and keys cu_k[z]..cu_k[z+1]."""
    sides = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
    return tuple(Segment(0, q0, q1, k0, k1, z) for z, ((q0, q1), (k0, k1)) in enumerate(sides))
