"""FlexAttention: masks and packed sequences as a block mask, softcap and the learned bias as a score function."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backlight.peers.features import features_of
from backlight.spec import AttentionSpec

KNOWN = ("causal", "window", "scale", "softcap", "bias", "bias_origin", "pair_bias", "cu_seqlens_q", "cu_seqlens_k")
# a captured table is pipelined through shared memory, a tile of fp32 a stage: FlexAttention's own choice does not fit
SMALL_TILES: dict[str, int] = {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 64,
    "fwd_num_stages": 1,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 1,
}
Borders = tuple[int, ...] | None
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Numbers:
    """Plain numbers of a call: all that a compiled function may look at. shift is the key position of row 0 (eq. 1)."""

    scale: float | None
    softcap: float | None
    origin: int
    shift: int
    grouped: bool

    @staticmethod
    def of(spec: AttentionSpec, q: Tensor, k: Tensor) -> Numbers:
        """Packed sequences of equal lengths keep their place, so their shift is 0 like that of equal totals."""
        return Numbers(spec.scale, spec.softcap, spec.bias_origin, k.shape[2] - q.shape[2], q.shape[1] != k.shape[1])


def attention_of(numbers: Numbers, kernel_options: Mapping[str, int] | None = None) -> Callable[..., Any]:
    """attend(q, k, v, bias=None, block_mask=None, lse=False, pair_bias=None) -> o, or (o, lse)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    scale, softcap, origin, shift, grouped = (
        numbers.scale,
        numbers.softcap,
        numbers.origin,
        numbers.shift,
        numbers.grouped,
    )

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        block_mask: Any = None,
        lse: bool = False,
        pair_bias: Tensor | None = None,
    ) -> Any:
        sharing = 1 if pair_bias is None else q.shape[0] // pair_bias.shape[0]
        options: dict[str, Any] = {
            "score_mod": score_function(softcap, bias, origin, shift, pair_bias, sharing),
            "block_mask": block_mask,
            "scale": scale,
            "enable_gqa": grouped,
            "kernel_options": kernel_options or None,
        }
        if not lse:
            return flex_attention(q, k, v, **options)
        o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        return o, aux.lse

    return attend


@cache
def prepared(numbers: Numbers, small: bool, compiled: bool) -> Callable[..., Any]:
    """One function for each set of numbers: a compiled one is found again by the next call."""
    attend = attention_of(numbers, SMALL_TILES if small and compiled else None)
    return torch.compile(attend, dynamic=False) if compiled else attend


def score_function(
    softcap: float | None, bias: Tensor | None, origin: int, shift: int, pair_bias: Tensor | None = None, sharing: int = 1
) -> Callable[..., Tensor] | None:
    """sharing: consecutive batch entries that read one entry of the pair bias."""
    if softcap is None and bias is None and pair_bias is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            n = bias.shape[1]
            column = i + shift - j + origin
            inside = (column >= 0) & (column < n)
            score = score + torch.where(inside, bias[h, torch.clamp(column, 0, n - 1)], 0.0)
        if pair_bias is not None:
            # heads and rows that are 1 stand for all
            score = score + pair_bias[b // sharing, h % pair_bias.shape[1], i % pair_bias.shape[2], j]
        return score

    return score_mod


class Pairs(NamedTuple):
    """All that decides which rows see which keys.

    borders: cu_seqlens of packed sequences, the same for queries and keys; rows, pos: of a mask by row intervals.
    """

    spec: AttentionSpec
    sq: int
    sk: int
    borders: Borders
    device: torch.device
    rows: Tensor | None = None
    pos: Tensor | None = None


def mask_function(pairs: Pairs) -> Mask | None:
    """Which pairs are visible; None when all are."""
    spec, rows, pos = pairs.spec, pairs.rows, pairs.pos
    if not spec.masked and pairs.borders is None and rows is None:
        return None
    left, right, shift, sequence = spec.left, spec.right, pairs.sk - pairs.sq, None
    if pairs.borders is not None:
        lengths = torch.tensor(pairs.borders, device=pairs.device).diff()
        sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=pairs.device), lengths)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + shift - j
        seen = distance == distance
        if right is not None:
            seen = seen & (distance >= -right)
        if left is not None:
            seen = seen & (distance <= left)
        seen = seen if sequence is None else seen & (sequence[i] == sequence[j])
        return seen if rows is None else seen & _in_an_interval(rows, pos, b, h, i, j)

    return visible


def _in_an_interval(rows: Tensor, pos: Tensor | None, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    # batch and heads that are 1 stand for all
    own, head = b % rows.shape[0], h % rows.shape[1]
    at = i if pos is None else pos[b % pos.shape[0], i]
    seen = (rows[own, head, 0, j] <= at) & (at < rows[own, head, 1, j])
    return seen if rows.shape[2] == 2 else seen | ((rows[own, head, 2, j] <= at) & (at < rows[own, head, 3, j]))


def block_mask(pairs: Pairs) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    visible, rows = mask_function(pairs), pairs.rows
    if visible is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch, heads = (None if rows is None or rows.shape[axis] == 1 else rows.shape[axis] for axis in (0, 1))
        return create_block_mask(visible, batch, heads, pairs.sq, pairs.sk, device=pairs.device)


kept_block_mask = lru_cache(maxsize=64)(block_mask)


def attention(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """One call with the project's keywords: compiled on CUDA, eager elsewhere."""
    asked = features_of("flex", given, KNOWN)
    cu = asked.cu_seqlens_q
    if cu is not None and asked.cu_seqlens_k is not None and not torch.equal(cu, asked.cu_seqlens_k):
        raise NotImplementedError("flex has packed sequences of equal query and key lengths only")
    # the mask depends on nothing else, so that one is found again whatever the scale is
    geometry = AttentionSpec(asked.causal, asked.window)
    borders = None if cu is None else tuple(cu.tolist())
    mask = kept_block_mask(Pairs(geometry, q.shape[2], k.shape[2], borders, q.device))
    attend = prepared(Numbers.of(asked.spec, q, k), small=asked.bias is not None, compiled=q.is_cuda)
    return attend(q, k, v, asked.bias, mask, lse=True, pair_bias=asked.pair_bias)
