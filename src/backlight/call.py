"""One bound attention call: the spec, its tensors in canonical layout, and the checks that need no arithmetic.

Canonical layout is `[B, H, S, D]` for every call; packed sequences are the case B = 1 with `cu_seqlens`. Every backend and the
oracle read this object, so arguments are listed once, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from backlight.spec import LEARNED, TENSOR_NAMES, AttentionSpec, Manner, Segment, packed_segments

Known = TypeVar("Known")
ByName = dict[str, Tensor]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Marks a call whose keys are one part of a larger problem's (docs/math.md section 9).

    What a part returns is still to be summed, so y, u, dq, dk and dv come back in the accumulator dtype. A part with tau or
    entmax cannot find the lse of the whole row in its own keys, so it is given; a forward with `lse` returns that same lse.
    With entmax it returns summands at that threshold, p v and w v, and a backward takes dlse for -delta as it stands (eq. 94).

    lse:  [B,Hq,Sq] over all parts, sink included; None without tau and entmax, and for a block of keys taken as all there are.
    n:    int32: visible keys of each row over all parts, [Sq]; with a mask, [B|1,Hq|1,Sq]; None without tau.
    tlse: the tangent of lse, for tangents of an elastic part, which are summands then.
    eta:  [B,Hq,Sq] of eq. 89 over all parts, for the gradient by alpha.
    """

    lse: Tensor | None = None
    n: Tensor | None = None
    tlse: Tensor | None = None
    eta: Tensor | None = None


@dataclass(slots=True, eq=False)
class Call:
    """q [B,Hq,Sq,D], k [B,Hkv,Sk,D], v [B,Hkv,Sk,Dv], the terms, and cu_seqlens [Z+1] when sequences are packed.

    The tensors are those of `spec.TENSORS`, in that order. A call is not changed once it is made. (`frozen=True` would enforce
    that, but making a frozen instance takes as long as a launch.)
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sink: Tensor | None = None
    tau: Tensor | None = None
    gate: Tensor | None = None
    pair_bias: Tensor | None = None
    entmax: Tensor | None = None
    rows: Tensor | None = None
    pos: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    # how the call is computed, whatever it computes (`Manner`)
    deterministic: bool = False
    batch_invariant: bool = False
    exact_delta: bool = False
    max_logit: bool = False
    part: Part | None = None
    _segments: tuple[Segment, ...] | None = field(default=None, repr=False)
    # cu_seqlens are those of a mask, made to be borders of these rows and keys: nobody waits for a device to check them
    trusted: bool = False
    _layout: tuple[Any, ...] | None = field(default=None, init=False, repr=False)
    # what calls of one kind have in common (`binding.bind_like_before`), for whoever finds something out about them
    shared: dict[Any, Any] | None = field(default=None, init=False, repr=False)

    @property
    def layout(self) -> tuple[Any, ...]:
        """All that a backend's decisions may depend on, hashable: options, shapes, strides, dtypes, alignments; no value."""
        if self._layout is None:
            self._layout = self._find_layout()
        return self._layout

    def _find_layout(self) -> tuple[Any, ...]:
        part = self.part
        return (
            *_options_of(self.spec),
            *manner_of(self),
            self.q.device,
            *[None if x is None else layout_of(x) for x in all_tensors(self)],
            # packed queries and keys with the same borders, which may be one tensor
            self.cu_seqlens_q is self.cu_seqlens_k,
            None if part is None else (True, *[None if x is None else layout_of(x) for x in (part.lse, part.n)]),
        )

    @property
    def group(self) -> int:
        """r = Hq / Hkv: query heads per key/value head."""
        return self.q.shape[1] // max(1, self.k.shape[1])

    @property
    def sharing(self) -> int:
        """Consecutive batch entries, or packed sequences, that share an entry of the pair bias; 1 without one."""
        return 1 if self.pair_bias is None else self.problems // max(1, self.pair_bias.shape[0])

    @property
    def problems(self) -> int:
        """Batch entries, or packed sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def owns_pairs(self) -> bool:
        """Whether every head of every batch entry or packed sequence has a pair bias of its own."""
        b = self.pair_bias
        return b is not None and tuple(b.shape[:2]) == (self.problems, self.q.shape[1])

    def pairs_of(self, tensor: Tensor, segment: Segment) -> Tensor:
        """What a segment has of the pair bias, or of a tensor shaped like it: [Hq|1, Sq|1, Sk], a view."""
        rows = slice(None) if tensor.shape[2] == 1 else slice(0, segment.sq)
        return tensor[segment.number // self.sharing, :, rows, : segment.sk]

    @property
    def scale(self) -> float:
        return self.spec.resolve_scale(self.q.shape[-1])

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """fp32 for every input dtype but fp64 (numerics contract)."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    @property
    def keeps(self) -> bool:
        """Whether the forward keeps a tensor like y for the backward: u, or the low half of y (eq. 103)."""
        return self.spec.keeps_u or self.exact_delta

    @property
    def output_dtype(self) -> torch.dtype:
        """Of y, u, dq, dk and dv: the dtype of q, unless they are parts of sums."""
        return self.q.dtype if self.part is None else self.accumulator_dtype

    @property
    def features(self) -> tuple[str, ...]:
        """What a backend must know to run the call, of `spec.FEATURES`."""
        packed = ("packed",) if self.varlen else ()
        part = () if self.part is None else ("part", "entmax_part") if self.spec.entmax else ("part",)
        return (*self.spec.features, *packed, *part)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the gradients this call has, in argument order."""
        return ("dq", "dk", "dv", *(f"d{term}" for term in self.spec.terms if term in LEARNED))

    def check_borders(self) -> None:
        """Raises unless cu_seqlens are borders of these rows and keys. Where reading them waits for a device, that happens
        once for each version. For kernels that read borders themselves and stay within the tensors whatever they are."""
        cu_q, cu_k, sq, sk = self.cu_seqlens_q, self.cu_seqlens_k, self.q.shape[2], self.k.shape[2]
        if cu_q is None or cu_k is None or self.trusted or self._segments is not None:
            return
        if not (_is_checked(cu_q, sq) and ((cu_k is cu_q and sk == sq) or _is_checked(cu_k, sk))):
            self.segments()
        elif self.pair_bias is not None:
            rows, keys = _host_values[cu_q][1], _host_values[cu_k][1]
            if rows is None or keys is None:
                self.segments()
            else:
                check_pair_lengths(self.pair_bias, rows, keys)

    def segments(self) -> tuple[Segment, ...]:
        """The independent problems of the call; reads cu_seqlens on the host."""
        if self._segments is None:
            self._segments = self._find_segments()
        return self._segments

    def _find_segments(self) -> tuple[Segment, ...]:
        batch, _, sq, _ = self.q.shape
        sk = self.k.shape[2]
        if self.cu_seqlens_q is None:
            return tuple(Segment(b, 0, sq, 0, sk, b) for b in range(batch))
        assert self.cu_seqlens_k is not None
        cu_k = cu_q = read_cu_seqlens("cu_seqlens_q", self.cu_seqlens_q, sq)
        if self.cu_seqlens_k is not self.cu_seqlens_q or sk != sq:
            cu_k = read_cu_seqlens("cu_seqlens_k", self.cu_seqlens_k, sk)
        if self.pair_bias is not None:
            check_pair_lengths(self.pair_bias, cu_q, cu_k)
        return packed_segments(cu_q, cu_k)


# the tensors of a call in the order of `spec.TENSORS`: all, those with a gradient, and those that follow them
all_tensors = attrgetter(*TENSOR_NAMES)
learned_tensors = attrgetter(*LEARNED)
counting_tensors = attrgetter(*TENSOR_NAMES[len(LEARNED) :])
manner_of = attrgetter(*Manner._fields)
_options_of = attrgetter(*(option.name for option in fields(AttentionSpec)))
assert tuple(each.name for each in fields(Call))[1 : 1 + len(TENSOR_NAMES)] == TENSOR_NAMES, "Call and spec.TENSORS differ"


def call_with(spec: AttentionSpec, tensors: Sequence[Any], manner: Sequence[bool]) -> Call:
    """A call of tensors in the order of `spec.TENSORS`, computed in this `Manner`."""
    return Call(spec, *tensors, *manner)  # type: ignore[call-arg]


# y, lse and the largest logits of heads, where they are wanted
Found = tuple[Tensor, Tensor | None, Tensor | None]


def wanted(found: Found, return_lse: bool, return_max_logit: bool) -> tuple[Tensor, ...]:
    """All that is wanted, in order."""
    y, lse, max_logit = found
    if not return_max_logit:
        return y, lse  # type: ignore[return-value]
    return (y, lse, max_logit) if return_lse else (y, max_logit)  # type: ignore[return-value]


def tensors_of(call: Call) -> tuple[Tensor | None, ...]:
    """All tensors; borders of keys that are those of the rows stand there once."""
    found = all_tensors(call)
    return found if found[-1] is not found[-2] else (*found[:-1], None)


def check_pair_sizes(pair_bias: Tensor, sizes: tuple[int, ...]) -> None:
    """Raises unless a pair bias fits a call of these sizes: batch, query heads, rows, keys."""
    batch, heads, rows, keys = sizes
    shape = tuple(pair_bias.shape)
    fits = len(shape) == 4 and shape[1] in (1, heads) and shape[2] in (1, rows) and shape[3] == keys
    if not (fits and (shape[0] == batch or (shape[0] > 0 and batch % shape[0] == 0))):
        wanted = f"[a divisor of {batch}, {one_or(heads)}, {one_or(rows)}, {keys}] (batch, query heads, rows, keys)"
        raise ValueError(f"pair_bias must be {wanted}, got shape {shape}")


def check_packed_pair_sizes(pair_bias: Tensor, sequences: int, heads: int) -> None:
    """Raises unless a pair bias fits packed sequences; of their lengths nothing is known yet."""
    shape = tuple(pair_bias.shape)
    fits = len(shape) == 4 and shape[1] in (1, heads)
    if not (fits and (shape[0] == sequences or (shape[0] > 0 and sequences % shape[0] == 0))):
        wanted = f"[a divisor of {sequences}, {one_or(heads)}, rows or 1, keys] (sequences, query heads, longest sequence)"
        raise ValueError(f"pair_bias must be {wanted}, got shape {shape}")


def check_pair_lengths(pair_bias: Tensor, cu_q: Sequence[int], cu_k: Sequence[int]) -> None:
    """Raises unless a pair bias reaches as far as the longest of packed sequences."""
    rows, keys = (max((b - a for a, b in pairwise(cu)), default=0) for cu in (cu_q, cu_k))
    _, _, own_rows, own_keys = pair_bias.shape
    if (own_rows < rows and own_rows != 1) or own_keys < keys:
        longest = f"the longest sequence, {rows} rows and {keys} keys"
        raise ValueError(f"pair_bias must reach as far as {longest}, got shape {tuple(pair_bias.shape)}")


def one_or(size: int) -> str:
    return "1" if size == 1 else f"1 or {size}"


class Memory(dict[tuple[Any, ...], Known]):
    """Decisions by layout. When full it starts anew: lengths that never come again must not pile up."""

    MOST = 4096

    def __setitem__(self, layout: tuple[Any, ...], decision: Known) -> None:
        if len(self) >= self.MOST:
            self.clear()
        super().__setitem__(layout, decision)


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """What a kernel is told about a tensor besides its address, of which alignment alone matters."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() & 15


# Values of cu_seqlens and the lengths they were checked against, by tensor. Memory may change behind a tensor's back (numpy,
# `.data`, another tensor of the same storage), so what was read is trusted only where reading again would wait for the device
# and a kernel reads the borders itself, held within the tensors: the layers of a model share one cu_seqlens.
_host_values: WeakIdKeyDictionary = WeakIdKeyDictionary()


def know_borders(cu_seqlens: Tensor, values: tuple[int, ...]) -> None:
    """These are its values, which begin at 0 and never decrease: nobody need wait for a device to read them."""
    _host_values[cu_seqlens] = (cu_seqlens._version, values, {values[-1]})


def trust_borders(cu_seqlens: Tensor, total: int) -> None:
    """Takes it at somebody's word that these are borders of so many rows, where reading them would wait for a device."""
    if _waits(cu_seqlens) and not _is_checked(cu_seqlens, total):
        _host_values[cu_seqlens] = (_version(cu_seqlens), None, {total})


def _is_checked(cu_seqlens: Tensor, total: int) -> bool:
    known = _host_values.get(cu_seqlens)
    if known is None or total not in known[2] or not _waits(cu_seqlens):
        return False
    # without a version a change of what was read would not be noticed; what was not read is somebody's word
    return known[1] is None if cu_seqlens.is_inference() else known[0] == cu_seqlens._version


def _version(cu_seqlens: Tensor) -> int | None:
    """How often it was written in place, which a tensor of inference mode does not know."""
    return None if cu_seqlens.is_inference() else cu_seqlens._version


def _waits(cu_seqlens: Tensor) -> bool:
    """Whether reading values waits for a device."""
    return cu_seqlens.device.type != "cpu"


def read_cu_seqlens(name: str, cu_seqlens: Tensor, total: int | None) -> tuple[int, ...]:
    """Host values of a cu_seqlens tensor, checked: starts at 0, never decreases, ends at the packed length (None: anywhere)."""
    version = _version(cu_seqlens)
    values = tuple(cu_seqlens.tolist())
    known = _host_values.get(cu_seqlens)
    if known is None or known[:2] != (version, values):
        known = _host_values[cu_seqlens] = (version, values, set())
    checked = known[2]
    if total in checked:
        return values
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0, got {values[0]}")
    for z, (a, b) in enumerate(pairwise(values)):
        if b < a:
            raise ValueError(f"{name} must not decrease, got {a} then {b} at position {z + 1}")
    if total is not None and values[-1] != total:
        raise ValueError(f"{name} must end at the packed length {total}, got {values[-1]}")
    checked.add(total)
    return values


def laid_like(found: Tensor, given: Tensor) -> Tensor:
    """In the memory order that `empty_like` of the tensor has: what compilers are told."""
    wanted = torch.empty_like(given, dtype=found.dtype)
    return found if found.stride() == wanted.stride() else wanted.copy_(found)
