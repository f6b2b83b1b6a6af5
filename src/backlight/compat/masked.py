"""What stands beside a pair bias in other libraries' calls: masks of keys, and a second bias, by key."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from backlight._private.torch import is_wrapped
from backlight.mask import Mask

# head dimensions that every kernel takes are multiples of this
MULTIPLE = 8
# what is as low as this, or lower, hides a key; others write -1e4, -1e9 or the least number of a dtype
HIDES = -1e4


def of_keys(visible: Tensor, rows: int) -> Mask:
    """The mask of a boolean tensor [B, Sk], True where all rows see the key. Nothing waits for the device."""
    end = visible.to(torch.int32) * rows
    return Mask(torch.stack([torch.zeros_like(end), end], dim=1)[:, None])


# (version, which keys are seen) of biases by key that were read where that waits for a device. Elsewhere they are read again:
# a version tells of no change by way of numpy or `.data`, and a tensor of inference mode has none.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def hidden_by(bias: Tensor) -> Tensor | None:
    """Which keys a bias by key leaves visible, if it is a mask: 0 where a key is seen, `HIDES` or less where it is not.

    None where it is more than that, and where that cannot be known: it has a gradient or a tangent, or is part of a graph or of
    a transform. Waits for a device, once for each version of a tensor.
    """
    if bias.requires_grad or bias.is_meta or torch.compiler.is_compiling() or is_wrapped(bias):
        return None
    if torch.autograd.forward_ad.unpack_dual(bias).tangent is not None:
        return None
    if bias.is_inference() or bias.device.type == "cpu":
        return _read(bias)
    known = _known.get(bias)
    if known is None or known[0] != bias._version:
        known = _known[bias] = (bias._version, _read(bias))
    return known[1]


def _read(bias: Tensor) -> Tensor | None:
    visible = bias == 0
    return visible if bool((visible | (bias <= HIDES)).all()) else None


def with_key_bias(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q and k with more columns, whose scaled products are those of q and k plus a bias by key.

    q [..., Sq, D], k [..., Sk, D], bias broadcast to [..., Sk]. The bias is held by two columns of k, the second of which has
    what the dtype of k rounds away of the first; in q stands a power of two. Gradients of the bias come by way of k.
    """
    factor = 2.0 ** round(-math.log2(abs(scale)))
    wanted = bias.to(torch.float64 if k.dtype == torch.float64 else torch.float32) / (scale * factor)
    least = torch.finfo(k.dtype).min / 4
    wanted = wanted.clamp(min=least).expand(k.shape[:-1])
    high = wanted.to(k.dtype)
    low = (wanted - high).to(k.dtype)
    columns = -(-(k.shape[-1] + 2) // MULTIPLE) * MULTIPLE - k.shape[-1]
    ones = torch.nn.functional.pad(q.new_full((*q.shape[:-1], 2), factor), (0, columns - 2))
    both = torch.nn.functional.pad(torch.stack([high, low], dim=-1), (0, columns - 2))
    return torch.cat([q, ones], dim=-1), torch.cat([k, both], dim=-1)
