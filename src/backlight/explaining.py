"""What a call would do, without doing it: `explain`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from backlight import registry
from backlight.api import binding_of, check_backend, check_flags
from backlight.binding import bind
from backlight.call import Call
from backlight.contexts import Context, innermost

if TYPE_CHECKING:
    from backlight.mask import Mask

# of the tiles that `explain` counts
TILE = (128, 128)


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, with which configuration, and why not the others.

    tiles: with a mask, the shares of tiles of `TILE` rows and keys that are empty (left out), full (not masked) and partial.
    documents: with a mask of documents that knows their lengths, whether the call runs packed, and why.
    order: with deterministic="batch", by what the order of sums is kept apart from the rest of the batch.
    """

    chosen: str | None
    config: object
    reasons: dict[str, tuple[str, ...]]
    tiles: tuple[float, float, float] | None = None
    documents: str | None = None
    order: str | None = None

    def __str__(self) -> str:
        lines = []
        for name, why in self.reasons.items():
            if name == self.chosen:
                lines.append(f"{name}: runs this call with {self.config}")
            elif why:
                lines += [f"{name}: {reason}" for reason in why]
            else:
                lines.append(f"{name}: could run this call; an earlier backend is preferred")
        if self.tiles is not None:
            empty, full, partial = (f"{share:.0%}" for share in self.tiles)
            lines.append(f"mask: of tiles of {TILE[0]} x {TILE[1]}, {empty} are empty, {full} full and {partial} partial")
        if self.documents is not None:
            lines.append(f"mask: {self.documents}")
        if self.order is not None:
            lines.append(f'deterministic="batch": {self.order}')
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    backend: str | None = None,
    context: Context | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **options: Any,
) -> Explanation:
    """What `attention` (or, with cu_seqlens_q, `attention_varlen`) would do with the same arguments; computes nothing, but
    reads a mask, if there is one.

    Under a context (`backlight.distributed.context_parallel`): what this rank would do with its blocks; nothing is sent.
    """
    check_flags(return_lse, return_max_logit)
    check_backend(backend)
    bound = binding_of(q, k, v, cu_seqlens_q, cu_seqlens_k, options | {"max_logit": return_max_logit})
    context, tiles, said = innermost(context), None, None
    if context is None:
        call = bound()
        tiles = None if call.rows is None or call.rows.is_meta else _tile_shares(call)
        call, said = _as_documents(options.get("mask"), bound, backend, call)
        reasons = registry.refusals(call)
    else:
        call, reasons = context.explain(partial(bound, sharded=True), backend)
    wanted = reasons if backend is None else {backend: reasons[backend]}
    chosen = next((name for name, why in wanted.items() if not why), None)
    config = None if chosen is None else registry.get(chosen).config(call)
    order = registry.get(chosen).order if chosen is not None and call.batch_invariant else None
    return Explanation(chosen, config, reasons, tiles, said, order)


def _as_documents(mask: Mask | None, bound: partial[Call], backend: str | None, call: Call) -> tuple[Call, str | None]:
    """The call that runs, and a sentence about it where the mask knows the lengths of documents."""
    if mask is None or mask.borders is None:
        return call, None
    from backlight import documents

    tensors, options, packed = bound.args
    reason = documents.against(mask, tensors, packed, backend, call.batch_invariant)
    if reason is not None:
        return call, f"documents of known lengths run by their intervals, not packed, because {reason}"
    tensors, options, packed = documents.as_packed(mask, tensors, {"causal": False} | options)
    found = bind(tensors, options, packed, trusted=True)
    return found, "documents of known lengths run packed, as attention_varlen does: tiles begin at their borders"


def _tile_shares(call: Call) -> tuple[float, float, float]:
    from backlight import intervals

    return intervals.tile_shares(call, TILE)
