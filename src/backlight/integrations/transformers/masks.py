"""From transformers' mask functions to sequence numbers.

transformers describes a mask as a function of (batch, head, row, key) built from a few known pieces. The geometry among them
(causal, sliding window) reaches the attention call as keywords of its own. What is left, padding and packing, is a number per
key and per row: 0 = hidden, else the sequence it belongs to. A function with other pieces (image spans, chunks, a model's own)
is asked about every row and key, and becomes row intervals; in a graph, where that would wait, it stays a dense mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.arguments import check_tensor, check_whole, shown
from backlight.integrations.transformers.given import dense_of_function, of_function
from backlight.integrations.transformers.probing import UnknownMask, probe
from backlight.integrations.transformers.tracing import blind

# numbers of a mask that says nothing but which keys are padding, and of one that packs sequences
PADDING, PACKED = torch.int8, torch.int64

# factories of transformers.masking_utils and what their masks mean here
GEOMETRY = ("sliding_window_overlay", "sliding_window_bidirectional_overlay")


@dataclass(slots=True)
class Pattern:
    """What a mask function says: keys ahead hidden or not, and packed sequence numbers [B, S] if there are any.

    other: there is more, which only intervals can say.
    """

    causal: bool = False
    packed: Tensor | None = None
    other: bool = False


def read(mask_function: Callable[..., Any]) -> Pattern:
    """Take a mask function apart."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return Pattern(causal=mask_function is causal_mask_function)
    return _take_apart(mask_function)


def _take_apart(mask_function: Callable[..., Any]) -> Pattern:
    pattern = Pattern()
    for name, values in _pieces(mask_function):
        if name == "causal_mask_function":
            pattern.causal = True
        elif name == "packed_sequence_mask_function":
            pattern.packed = values["packed_sequence_mask"]
        elif name not in (*GEOMETRY, "bidirectional_mask_function"):
            pattern.other = True
    return pattern


def _pieces(mask_function: Callable[..., Any]) -> list[tuple[str, dict[str, Any]]]:
    """(factory, what it closed over) of every mask in a conjunction."""
    name = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".<locals>")[0]
    if getattr(mask_function, "__module__", None) != "transformers.masking_utils":
        return [(name, {})]
    values = dict(inspect.getclosurevars(mask_function).nonlocals)
    if name == "and_masks":
        return [piece for part in values["mask_functions"] for piece in _pieces(part)]
    return [(name, values)]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    use_vmap: bool = False,
    **_: Any,
) -> Tensor | None:
    """The mask interface: None where geometry says it all, else sequence numbers [B, 1, 1, kv_length + q_length], keys first,
    or row intervals [B, 1, 2 or 4, kv_length], int32, or a dense mask [B, 1, q_length, kv_length], which say geometry too.

    Arguments are those transformers hands to every mask interface; `attention_mask` is the padding mask [B, seen keys],
    `use_vmap` says that a model added pieces of its own. Four dimensions tell transformers that the mask is finished:
    `generate` makes masks early and hands them to the model again.
    """
    _check(batch_size, q_length, kv_length, kv_offset, mask_function, attention_mask)
    pattern = _pattern(mask_function, batch_size, kv_length, device, use_vmap)
    sizes, offsets = (batch_size, q_length, kv_length), (q_offset, kv_offset)
    if pattern.other:
        assert mask_function is not None
        return of_function(mask_function, attention_mask, sizes, offsets, device, use_vmap)
    start = q_offset - kv_offset
    whole = not isinstance(start, Tensor) and start + q_length == kv_length
    as_long = attention_mask is not None and kv_length + kv_offset == attention_mask.shape[-1]
    if attention_mask is not None and as_long and not blind(attention_mask) and attention_mask.all():
        attention_mask = None
    if attention_mask is None and pattern.packed is None and (whole or not pattern.causal):
        return None
    if mask_function is not None and q_length == 1 and pattern.causal and pattern.packed is None:
        # a step with a cache: one row of a dense mask is small, and packing would copy the cache. Masks have one shape then,
        # whether the cache has room or is full, and exporters join those of two steps.
        return dense_of_function(mask_function, attention_mask, sizes, offsets, device)
    keys = torch.ones(batch_size, kv_length, dtype=PADDING, device=device)
    if pattern.packed is not None:
        keys = pattern.packed.to(device, PACKED) + 1
    if attention_mask is not None:
        real = torch.nn.functional.pad(attention_mask, (0, max(0, kv_length + kv_offset - attention_mask.shape[-1])))
        keys = keys * real[:, kv_offset : kv_offset + kv_length].to(device, torch.bool)
    if not pattern.causal:
        # rows of a full mask keep what they see; whether they are padding themselves is not known here
        return torch.cat([keys, keys.new_ones(batch_size, q_length)], dim=1)[:, None, None]
    if not isinstance(start, Tensor) and not 0 <= start <= kv_length - q_length:
        places = f"{q_length} from key {start} of {kv_length} on"
        raise ValueError(f"q_length must be of rows that sit at keys, got {places} (q_offset - kv_offset is {start})")
    # keys behind the last row belong to a cache with room to spare
    positions = torch.arange(kv_length, device=device)
    keys = keys * (positions < start + q_length)
    rows = keys.index_select(1, torch.arange(q_length, device=device) + start)
    return torch.cat([keys, rows], dim=1)[:, None, None]


def _check(batch: Any, q_length: Any, kv_length: Any, kv_offset: Any, mask_function: Any, padding: Any) -> None:
    lengths = {"batch_size": batch, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    for name, length in lengths.items():
        check_whole(name, length, least=0)
    if not (mask_function is None or callable(mask_function)):
        raise TypeError(f"mask_function must be a function of (batch, head, row, key) or None, got {shown(mask_function)}")
    if padding is None:
        return
    check_tensor("attention_mask", padding, "[batch_size, seen keys]")
    if padding.shape[0] != batch or padding.is_floating_point():
        came = f"shape {tuple(padding.shape)} of {padding.dtype}"
        raise ValueError(f"attention_mask must be [{batch}, seen keys] of a bool or integer dtype, got {came}")


def _pattern(
    mask_function: Callable[..., Any] | None, batch: int, length: int, device: torch.device | str, use_vmap: bool
) -> Pattern:
    if mask_function is None:
        return Pattern(causal=True)
    if not torch.compiler.is_dynamo_compiling():
        return read(mask_function)
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return Pattern(causal=mask_function is causal_mask_function)
    if use_vmap:
        return Pattern(other=True)
    try:
        return Pattern(*probe(mask_function, batch, length, device))
    except UnknownMask:
        return Pattern(other=True)
