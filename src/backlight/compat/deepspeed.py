"""DeepSpeed4Science's Evoformer attention: its name, arguments and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.arguments import check_tensor, shown
from backlight.compat.masked import hidden_by, of_keys, with_key_bias


def DS4Sci_EvoformerAttention(Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]) -> Tensor:
    """`deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention`: softmax of Q.K / sqrt(D) + bias1 + bias2.

    Args:
        Q, K, V: [B, N, S, H, D].
        biases: up to two, either of which may be None, in this order:
            bias1 [B, N, 1, 1, Sk], a bias by key. Where it has no gradient and is a mask (0 or at most -1e4), it hides keys: a
            row of which none is left gives 0. Anything else rides on more columns of Q and K. No sum of the two is formed.
            bias2 [B, 1, H, Sq, Sk], shared by the N entries without a copy.

    Returns:
        [B, N, Sq, H, D]. All of Q, K, V and both biases have a gradient.
    """
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        check_tensor(name, x, "[B, N, S, H, D]")
    bias1, bias2 = _two(biases)
    q, k, v = (x.transpose(2, 3) for x in (Q, K, V))
    options: dict[str, Any] = {"scale": q.shape[-1] ** -0.5}
    if bias1 is not None:
        wanted = (*k.shape[:2], 1, 1, k.shape[3])
        _check("bias1", bias1, wanted)
        visible = hidden_by(bias1)
        if visible is not None:
            options["mask"] = of_keys(visible.reshape(-1, k.shape[3]), q.shape[3])
        else:
            q, k = with_key_bias(q, k, bias1[:, :, 0], options["scale"])
    if bias2 is not None:
        _check("bias2", bias2, (q.shape[0], 1, q.shape[2], q.shape[3], k.shape[3]))
        options["pair_bias"] = bias2 if bias2.dtype in (q.dtype, torch.float32) else bias2.to(q.dtype)
    return backlight.attention(q, k, v, **options).transpose(2, 3)


def _two(biases: Any) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(biases, (list, tuple)) or len(biases) > 2:
        raise ValueError(f"biases must be a list of at most two, [bias1, bias2], got {shown(biases)}")
    first, second = (*biases, None, None)[:2]
    return first, second


def _check(name: str, bias: Any, wanted: tuple[int, ...]) -> None:
    check_tensor(name, bias)
    if tuple(bias.shape) != wanted:
        raise ValueError(f"{name} must be {list(wanted)}, got shape {tuple(bias.shape)}")
