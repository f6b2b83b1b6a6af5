"""The one way in: from the arguments of a call to a bound `Call`, checked.

`bind` takes the tensors in the order of `spec.TENSORS` and the options by name. `bind_like_before` does the same and leaves out
the checks where a call of the same kind has passed them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import any_autocast
from backlight.arguments import ALPHAS, check_alpha, shown
from backlight.call import Call, Memory, call_with, layout_of, manner_of
from backlight.checking import check, check_is_tensor, check_ranks
from backlight.spec import LARGEST, SEQUENCE_OF, TENSOR_NAMES, TENSORS, TERM_NAMES, AttentionSpec, Manner

Window = tuple[int | None, int | None]
# keywords that `make_manner` takes
MANNER = ("deterministic", "exact_delta", "max_logit")
# what the caller gives as `mask` and `return_max_logit`
INNER = frozenset(("rows", "pos", "max_logit"))
KEYWORDS = frozenset((*MANNER, *TERM_NAMES, "causal", "window", "scale", "softcap", "bias_origin", "mask"))
# of a call, in the order of `spec.TENSORS`, as they came: packed ones are [T, H, D]
Tensors = tuple[Any, ...]

# y is less than its fp32 sums
ROUNDED = (torch.float16, torch.bfloat16)
# where the borders begin
FIRST_BORDER = len(TENSORS) - 2
# which tensors have rows or keys, and which have the dtype of q
_BY_SEQUENCE = tuple(name in SEQUENCE_OF for name in TENSOR_NAMES)
_LIKE_Q = tuple(each.like_q for each in TENSORS)


def tensors_given(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, options: dict[str, Any]) -> Tensors:
    """The tensors of a call in order; its terms are taken out of the options."""
    if options.get("mask") is not None:
        options |= dict(zip(("rows", "pos"), mask_tensors(options["mask"]), strict=True))
    options.pop("mask", None)
    _check_keywords(options)
    if options.get("entmax") is not None:
        options["entmax"], options["alpha"] = alphas_of(options["entmax"], q)
    return (q, k, v, *[options.pop(name, None) for name in TERM_NAMES], cu_seqlens_q, cu_seqlens_k)


def _check_keywords(options: dict[str, Any]) -> None:
    """Nothing is left among the options that the call would not look at."""
    if options.pop("precision", None) is not None:
        raise ValueError("precision must be None here: only attention and attention_varlen themselves take 'fp8'")
    if "alpha" in options:
        raise TypeError("alpha is no keyword of a call: entmax takes it")
    unknown = [name for name in options if name not in KEYWORDS]
    if unknown:
        raise TypeError(f"{unknown[0]} is no keyword of this call, which takes {', '.join(sorted(KEYWORDS - INNER))}")


def mask_tensors(mask: Any) -> tuple[Any, Any]:
    """The tensors of a mask, which is one term for the caller and two for the call."""
    # who has a mask has loaded them
    from backlight.mask import Mask

    if not isinstance(mask, Mask):
        advice = "; backlight.mask.from_dense makes one of a boolean tensor" if isinstance(mask, Tensor) else ""
        raise TypeError(f"mask must be a backlight.mask.Mask or None, got {shown(mask)}{advice}")
    return mask.rows, mask.pos


def alphas_of(entmax: Any, q: Any) -> tuple[Tensor | None, float | None]:
    """entmax as the call has it: one alpha per query head, and the number that they are where it is known; 1 is a softmax."""
    if isinstance(entmax, Tensor):
        return (entmax.clamp(*ALPHAS) if entmax.dtype.is_floating_point else entmax), None
    alpha = plain(entmax)
    check_alpha("entmax", alpha)
    if alpha == 1:
        return None, None
    # queries in e4m3 have heads like any others
    q = getattr(q, "q", q)
    if not isinstance(q, Tensor) or q.dim() < 3:
        return None, None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.full((q.shape[-3 if q.dim() > 3 else 1],), float(alpha), dtype=dtype, device=q.device), float(alpha)


def bind(tensors: Tensors, options: dict[str, Any], packed: bool, sharded: bool = False, trusted: bool = False) -> Call:
    """The call of batched tensors [B, H, S, D] or packed ones [T, H, D], checked; sharded: they are parts of longer ones;
    trusted: see `Call`."""
    call = bind_batched(_batch_of_one(tensors) if packed else tensors, options, sharded)
    call.trusted = trusted
    return call


def bind_batched(tensors: Tensors, options: dict[str, Any], sharded: bool = False) -> Call:
    """`bind` for tensors that are [B, H, S, D] already, packed sequences too."""
    q, k, v, *_ = tensors
    check_ranks({"q": q, "k": k, "v": v}, 4, "[B, H, S, D]")
    rest = {name: option for name, option in options.items() if name not in MANNER}
    terms = [name for name, x in zip(TENSOR_NAMES, tensors, strict=True) if name in TERM_NAMES and x is not None]
    spec = make_spec(terms=terms, **rest)
    manner = make_manner(**{name: options[name] for name in MANNER if name in options})
    _check_together(spec, manner)
    if sharded:
        _check_sharded(manner)
    tensors = _autocast(tensors)
    if isinstance(tensors[0], Tensor) and tensors[0].dtype not in ROUNDED:
        # nothing is taken from y
        manner = Manner(manner.deterministic, manner.batch_invariant, False, manner.max_logit)
    return check(call_with(spec, tensors, manner), sharded)


def flattened(tensors: Tensors) -> tuple[Tensors, tuple[int, int]]:
    """Tensors of five axes, [B, N, H, S, D], as those of a batch of B * N, and (B, N)."""
    grid: tuple[int, int] = tuple(tensors[0].shape[:2])
    named = dict(zip(TENSOR_NAMES, tensors, strict=True))
    like_q = {each.name: x for each in TENSORS if (x := named[each.name]) is not None and each.like_q}
    check_ranks(like_q, 5, "[B, N, H, S, D], as q has")
    for name, x in like_q.items():
        if tuple(x.shape[:2]) != grid:
            raise ValueError(f"{name} must have the first two axes of q, {grid}, got {tuple(x.shape[:2])}")
    changed = {name: x.flatten(0, 1) for name, x in like_q.items()}
    if isinstance(pair_bias := named["pair_bias"], Tensor) and pair_bias.dim() == 5:
        changed["pair_bias"] = _flattened_pairs(pair_bias, grid)
    return tuple((named | changed).values()), grid


def _flattened_pairs(pair_bias: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, 1, H, S, S] -> [B, H, S, S], of which N consecutive entries share one; [B, N, H, S, S] -> [B * N, H, S, S]."""
    own = tuple(pair_bias.shape[:2])
    if own == grid:
        return pair_bias.flatten(0, 1)
    if own[1] != 1 or own[0] not in (1, grid[0]):
        raise ValueError(f"the first two axes of pair_bias must be {(grid[0], 1)}, {(1, 1)} or {grid}, got {own}")
    return pair_bias.select(1, 0)


def _batch_of_one(tensors: Tensors) -> Tensors:
    """Packed tensors [T, H, D] as a batch of one, in the same order; keys that came without borders have those of the rows."""
    *_, cu_q, cu_k = tensors
    check_is_tensor("cu_seqlens_q", cu_q)
    given = [(each, x) for each, x in zip(TENSORS, tensors, strict=True) if each.name in SEQUENCE_OF]
    check_ranks({each.name: x for each, x in given if x is not None or not each.optional}, 3, "[T, H, D]")
    cu_k = cu_q if cu_k is None else cu_k
    check_is_tensor("cu_seqlens_k", cu_k)
    # kernels read borders one after another; shared ones stay one tensor
    shared = cu_k is cu_q
    cu_q = cu_q.contiguous()
    return (*batched_all(tensors)[:FIRST_BORDER], cu_q, cu_q if shared else cu_k.contiguous())


def batched_all(tensors: Iterable[Any]) -> Tensors:
    """A call's tensors in the same order; those with rows or keys are [1, H, T, D] now, not packed [T, H, D]."""
    return tuple([batched(x) if cut else x for x, cut in zip(tensors, _BY_SEQUENCE, strict=True)])


def batched(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.transpose(0, 1)[None]


# --- options -----------------------------------------------------------------------------------------------------------------


def make_spec(
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias_origin: int = 0,
    alpha: float | None = None,
    terms: Iterable[str] = (),
) -> AttentionSpec:
    """The options, checked; `terms` names the terms that the call has."""
    left, right = _sides(window)
    options = tuple(map(plain, (causal, left, right, scale, softcap, bias_origin, alpha)))
    if torch.compiler.is_compiling():
        return _new_spec(*options, *terms)
    try:
        return _known_spec(*options, *terms)
    except TypeError:
        # also raised for what cannot be hashed: the sentence for that is in `_new_spec`
        return _new_spec(*options, *terms)


def make_manner(*, deterministic: Any = None, exact_delta: Any = None, max_logit: bool = False) -> Manner:
    """How the call is to be computed, checked."""
    deterministic, exact_delta = plain(deterministic), plain(exact_delta)
    by_batch = isinstance(deterministic, str) and deterministic == "batch"
    if not (deterministic is None or isinstance(deterministic, bool) or by_batch):
        raise TypeError(f'deterministic must be a bool, "batch" or None, got {deterministic!r}')
    if not (exact_delta is None or isinstance(exact_delta, bool)):
        raise TypeError(f"exact_delta must be a bool or None, got {exact_delta!r}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Manner(bool(deterministic), by_batch, bool(exact_delta), max_logit)


def _check_together(spec: AttentionSpec, manner: Manner) -> None:
    if manner.exact_delta and spec.tau:
        raise ValueError("exact_delta must not be True together with tau, whose delta has a second term from 16 bits")
    if manner.exact_delta and spec.entmax:
        raise ValueError("exact_delta must not be True together with entmax, whose delta comes from other sums than y")
    if manner.max_logit and spec.entmax:
        raise ValueError("return_max_logit must not be True together with entmax, which looks for a threshold, not a maximum")


def _check_sharded(manner: Manner) -> None:
    for name, is_asked, why in (
        ("return_max_logit", manner.max_logit, "a rank sees the largest logit of its own part alone"),
        ("exact_delta", manner.exact_delta, "ranks add parts of rows, whose delta they form themselves"),
        ('deterministic="batch"', manner.batch_invariant, "where rows are cut depends on the whole call"),
    ):
        if is_asked:
            raise NotImplementedError(f"{name} is not available in a context of several ranks: {why}")


def plain(option: Any) -> Any:
    """A number or bool of NumPy as Python's own; everything else as it is."""
    if option is None or isinstance(option, (bool, int, float)):
        return option
    numpy = sys.modules.get("numpy")
    return option.item() if numpy is not None and isinstance(option, numpy.generic) else option


def _sides(window: Any) -> tuple[Any, Any]:
    if window is None:
        return None, None
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(f"window must be a pair (left, right) or None, got {shown(window)}")
    return window[0], window[1]


def _new_spec(
    causal: Any, left: Any, right: Any, scale: Any, softcap: Any, bias_origin: Any, alpha: float | None, *terms: str
) -> AttentionSpec:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise TypeError(f"{name} must be a number or None, got {type(number).__name__}")
        if isinstance(number, int) and not -LARGEST <= number <= LARGEST:
            raise ValueError(f"{name} must be finite as a float, got an int of {number.bit_length()} bits")
    return AttentionSpec(
        causal=causal,
        window=(left, right),
        scale=None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        bias_origin=bias_origin,
        alpha=alpha,
        **dict.fromkeys(terms, True),
    )


# typed: 1 is not True, and must not pass for it once True has been seen
_known_spec = lru_cache(maxsize=1024, typed=True)(_new_spec)


# --- calls like one before ---------------------------------------------------------------------------------------------------

# what was found right: the spec, the manner, `Call.layout` and `Call.shared`
_bound: Memory[tuple[AttentionSpec, tuple[bool, ...], tuple[Any, ...], dict[Any, Any]]] = Memory()


def bind_like_before(
    tensors: Tensors, options: dict[str, Any], packed: bool, backend: str | None, trusted: bool = False
) -> Call:
    """`bind`, with the checks left out where a call of the same kind has passed them."""
    window = options["window"]
    kind = _kind_of(tensors, (*options.values(), *(window if isinstance(window, tuple) else ()), backend, trusted))
    call = _recall(kind, tensors, packed)
    if call is None:
        call = bind(tensors, options, packed)
        _remember(kind, tensors, call)
    call.trusted = trusted
    return call


def _kind_of(tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that checks look at, hashable: calls of one kind are all right or all wrong. None where something has no layout.

    options: everything else that checks look at, always in the same order.
    """
    q, k, v, *_, cu_q, cu_k = tensors
    if q is None:
        return None
    # asking about every type of device at once is quicker than asking about one
    if any_autocast() and torch.is_autocast_enabled(q.device.type):
        options = (*options, torch.get_autocast_dtype(q.device.type))
    try:
        layouts = [None if x is None else (*layout_of(x), x.device) for x in tensors]
    except RuntimeError:
        return None
    flags = torch.are_deterministic_algorithms_enabled(), k is q, v is q, v is k, cu_k is cu_q
    # types: 1 is not True, and must not pass for it once True has been seen
    return (*flags, *options, *map(type, options), *layouts)


def _recall(kind: tuple[Any, ...] | None, tensors: Tensors, packed: bool) -> Call | None:
    """The bound call of these tensors, if one of its kind was bound before."""
    try:
        known = _bound.get(kind)  # type: ignore[arg-type]
    except TypeError:
        # an option without a hash
        return None
    if known is None:
        return None
    spec, manner, layout, shared = known
    if packed:
        cu_q, cu_k = tensors[FIRST_BORDER:]
        tensors = (*batched_all(tensors)[:FIRST_BORDER], cu_q, cu_q if cu_k is None else cu_k)
    call = Call(spec, *tensors, *manner)  # type: ignore[call-arg]
    call._layout, call.shared = layout, shared
    return call


def _remember(kind: tuple[Any, ...] | None, tensors: Tensors, call: Call) -> None:
    """Remember that calls of this kind are right and how they are bound, unless tensors were cast or copied."""
    cu_q, cu_k = tensors[FIRST_BORDER:]
    cast = any(like_q and x is not None and x.dtype != call.q.dtype for x, like_q in zip(tensors, _LIKE_Q, strict=True))
    copied = cu_q is not call.cu_seqlens_q or (cu_k is not None and cu_k is not call.cu_seqlens_k)
    if kind is not None and not cast and not copied and _hashable(kind):
        call.shared = Memory()
        _bound[kind] = call.spec, manner_of(call), call.layout, call.shared


def _hashable(kind: tuple[Any, ...]) -> bool:
    try:
        hash(kind)
    except TypeError:
        return False
    return True


# --- autocast ----------------------------------------------------------------------------------------------------------------


def _autocast(tensors: Tensors) -> Tensors:
    """The tensors as `torch.autocast` wants them: like torch's own attention, those like q go to the autocast dtype."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(_cast(x, dtype) if like_q else x for x, like_q in zip(tensors, _LIKE_Q, strict=True))


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    eligible = isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor  # type: ignore[union-attr]
