"""The one place that draws the tensors of a call: from a seed, by name, one after the other.

Cases, the doctor's inputs and the bench's workloads differ in the order and in the dtype in which they draw. Both are arguments
here, so that a seed means the same numbers as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from backlight.call import Call
from backlight.problems.axes import Sizes
from backlight.spec import LEARNED, OF_PAIRS, TENSORS, AttentionSpec

# terms that N(0, 1) is a sensible choice for; values of tau are always chosen
NORMAL_TERMS = ("bias", "sink", "gate")
# terms of whole numbers
COUNTING_TERMS = ("rows", "pos")
LIKE_Q = {each.name for each in TENSORS if each.like_q} | {"dy"}


def parameter_dtype(dtype: torch.dtype) -> torch.dtype:
    """Learned terms per head stay fp32, or fp64 for an fp64 problem, as parameters do under mixed precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a call of this dtype."""
    return dtype if name in LIKE_Q else parameter_dtype(dtype)


def terms_to_draw(spec: AttentionSpec, chosen: Collection[str]) -> tuple[str, ...]:
    """Terms of the spec that were not chosen, but for masks and pair biases, which are drawn by words; refuses one that nobody
    knows how to draw."""
    wanted = tuple(name for name in spec.terms if name not in (*chosen, *COUNTING_TERMS, *OF_PAIRS))
    unknown = [name for name in wanted if name not in NORMAL_TERMS]
    if unknown:
        raise NotImplementedError(f"nothing is known about how to draw {unknown[0]}: its values must be given")
    return wanted


def normal(
    sizes: Sizes,
    names: Iterable[str],
    *,
    dtype: torch.dtype,
    seed: int,
    wide: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """N(0, 1) tensors by name, in the order of `names`.

    wide: drawn in this dtype on the CPU, for the caller to change and then `settle`. None: drawn on the device, each tensor in
    the dtype that it has in the call.
    """
    place = torch.device(device) if wide is None else torch.device("cpu")
    generator = torch.Generator(place).manual_seed(seed)

    def draw(name: str) -> Tensor:
        drawn_in = dtype_of(name, dtype) if wide is None else wide
        return torch.randn(sizes.shape(name), generator=generator, dtype=drawn_in, device=place)

    return {name: draw(name) for name in names}


# the first column of q where scores fall with distance
LEVEL = 8.0


def fall(drawn: Mapping[str, Tensor], slope: float) -> None:
    """Changes q and k in place: q k grows by `slope` from each key to the next, so that far keys fall behind near ones."""
    q, k = drawn["q"], drawn["k"]
    q[..., 0], k[..., 0] = LEVEL, torch.arange(k.shape[-2], device=k.device, dtype=torch.float64) * (slope / LEVEL)


def mask_terms(
    spec: AttentionSpec, sizes: Sizes, kind: str, seed: int, own: Collection[str] = ("batch", "heads")
) -> dict[str, Tensor]:
    """The mask of a spec that has one, by name, on the CPU, from numbers of its own: all others are the same without it.

    kind: one of `INTERVALS`, or of `LENGTHS` with its lengths behind a colon. own: the axes of batch and heads along which the
    mask differs; it is the same along the others.
    """
    if not spec.rows:
        return {}
    name, _, lengths = kind.partition(":")
    if lengths:
        ends = LENGTHS[name](tuple(map(int, lengths.split(","))), sizes.rows, sizes.keys)
        return {"rows": torch.stack(ends).to(torch.int32)[None, None]}
    generator = torch.Generator().manual_seed(seed + 1)
    batch, heads = (getattr(sizes, axis) if axis in own else 1 for axis in ("batch", "heads"))

    def below(most: int, *shape: int) -> Tensor:
        return torch.randint(max(1, most), shape, generator=generator)

    ends = INTERVALS[kind](below, batch, heads, sizes.rows, sizes.keys)
    found = {"rows": torch.stack(ends, dim=2).to(torch.int32)}
    if spec.pos:
        # an order of the rows in which some stand at one place
        found["pos"] = below(sizes.rows, batch, sizes.rows).to(torch.int32)
    return found


# what a pair bias may be, by words: the axes along which it differs (batch, heads, rows), and
# pairs: two consecutive batch entries share one; wide: fp32 beside 16 bits; hidden: with -inf; strided: keys lie apart
PAIR_WORDS = ("batch", "heads", "rows", "pairs", "wide", "hidden", "strided")


def pair_bias_term(
    sizes: Sizes,
    words: Collection[str],
    dtype: torch.dtype,
    seed: int,
    device: torch.device | str = "cpu",
    drawn_in: torch.dtype = torch.float64,
) -> Tensor:
    """A pair bias of these words, from numbers of its own: all others are the same without it."""
    unknown = [word for word in words if word not in PAIR_WORDS]
    if unknown:
        raise ValueError(f"a pair bias must be of {', '.join(PAIR_WORDS)}, got {unknown[0]!r}")
    generator = torch.Generator(device).manual_seed(seed + 2)
    whole = sizes.shape("pair_bias")
    shape = [size if axis in words else 1 for axis, size in zip(("batch", "heads", "rows"), whole[:3], strict=True)]
    if "pairs" in words:
        shape[0] = whole[0] if whole[0] % 2 else whole[0] // 2
    drawn = torch.randn(*shape, whole[3], generator=generator, dtype=drawn_in, device=device)
    if "hidden" in words:
        hidden = torch.rand(drawn.shape, generator=generator, device=device) < 0.3
        # of the first rows everything
        hidden[:, :, : -(-shape[2] // 8) if shape[2] > 1 else 0] = True
        drawn = drawn.masked_fill(hidden, -torch.inf)
    found = drawn.to(parameter_dtype(dtype) if "wide" in words else dtype)
    return found.mT.contiguous().mT if "strided" in words else found


def _run(below: Below, batch: int, heads: int, rows: int, keys: int) -> list[Tensor]:
    """Anywhere, of any length, also beyond the ends; some empty."""
    first = below(rows + rows // 2, batch, heads, keys) - rows // 4
    return [first, first + below(rows, batch, heads, keys) - rows // 8]


def _two_runs(below: Below, batch: int, heads: int, rows: int, keys: int) -> list[Tensor]:
    """In any order, apart, touching or one over the other."""
    return [*_run(below, batch, heads, rows // 2, keys), *_run(below, batch, heads, rows, keys)]


def _documents(below: Below, batch: int, heads: int, rows: int, keys: int) -> list[Tensor]:
    """Causal documents of about a third of the keys."""
    cuts = below(keys, batch, heads, 3).sort(dim=-1).values
    own = torch.arange(keys).expand(batch, heads, keys)
    at = torch.searchsorted(cuts, own.contiguous(), right=True)
    ends = torch.cat([cuts, torch.full_like(cuts[..., :1], max(rows, keys))], dim=-1)
    return [own, ends.gather(-1, at)]


def _nothing(below: Below, batch: int, heads: int, rows: int, keys: int) -> list[Tensor]:
    """Empty intervals, written in many ways."""
    first = below(2 * rows, batch, heads, keys)
    return [first, first - below(rows, batch, heads, keys)]


def _everything(below: Below, batch: int, heads: int, rows: int, keys: int) -> list[Tensor]:
    """Every row, written in many ways."""
    return [-below(rows, batch, heads, keys), rows + below(rows, batch, heads, keys)]


def _documents_of(lengths: tuple[int, ...], rows: int, keys: int) -> list[Tensor]:
    """Causal documents of these lengths; the last holds what is left."""
    cuts, own = torch.tensor(lengths).cumsum(0)[:-1], torch.arange(keys)
    ends = torch.cat([cuts, torch.tensor([max(rows, keys)])])
    return [own, ends[torch.searchsorted(cuts, own, right=True)]]


def _prefix_of(lengths: tuple[int, ...], rows: int, keys: int) -> list[Tensor]:
    """A prefix that every row sees, causal from there on."""
    own = torch.arange(keys)
    return [torch.where(own < lengths[0], 0, own), torch.full_like(own, rows)]


def _rollouts_of(lengths: tuple[int, ...], rows: int, keys: int) -> list[Tensor]:
    """A causal prompt, and behind it rollouts that see it and themselves: (prompt, each rollout)."""
    prompt, each = lengths
    own = torch.arange(keys)
    return [own, torch.where(own < prompt, rows, prompt + (own - prompt) // each * each + each)]


Below = Callable[..., Tensor]
LENGTHS: dict[str, Callable[[tuple[int, ...], int, int], list[Tensor]]] = {
    "documents": _documents_of,
    # the same intervals, of a mask that does not know the lengths
    "ids": _documents_of,
    "prefix": _prefix_of,
    "rollouts": _rollouts_of,
}
INTERVALS: dict[str, Callable[[Below, int, int, int, int], list[Tensor]]] = {
    "run": _run,
    "two runs": _two_runs,
    "documents": _documents,
    "nothing": _nothing,
    "everything": _everything,
}


def settle(tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """The tensors in the dtype they have in a call of this dtype, on the device."""
    return {name: x.to(device, dtype_of(name, dtype)) for name, x in tensors.items()}


def repeated(
    values: tuple[float, ...], heads: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """One value for each head, begun again when there are more heads than values."""
    return torch.tensor([values[h % len(values)] for h in range(heads)], dtype=dtype, device=device)


def borders(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """cu_seqlens of packed sequences of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def call_of(spec: AttentionSpec, tensors: Mapping[str, Tensor], cu_q: Tensor | None = None, cu_k: Tensor | None = None) -> Call:
    """The call that these tensors make; others among them (dy, dlse) are left out."""
    found = {name: tensors[name] for name in (*LEARNED, *COUNTING_TERMS) if name in tensors}
    return Call(spec, **found, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)  # type: ignore[arg-type]
