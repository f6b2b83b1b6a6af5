"""FlexAttention, compiled: masks as block masks, softcap and the learned bias as a score function with captured gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backlight.bench.contender import Contender, by_autograd, cannot, gated, leaves_of
from backlight.bench.workload import Tensors, Workload
from backlight.call import Call

ABLE = ("packed sequences", "a window", "softcap", "a bias by distance", "a sink", "a gate")
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex:
    name = "flex"

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"FlexAttention has no compiled backward on {device.type}"
        if workload.case.lengths_k is not None:
            return "a document mask for packed sequences needs equal query and key lengths"
        return cannot("FlexAttention", workload, ABLE)

    def build(self, tensors: Tensors) -> Contender:
        import torch._dynamo
        import torch._functorch.config as functorch

        # compiled code of earlier workloads counts against dynamo's limit of recompilations
        torch._dynamo.reset()
        # the backward is timed with its graph kept, which donated buffers forbid
        functorch.donated_buffer = False
        block_mask = make_block_mask(tensors.call)
        compiled = torch.compile(attention(tensors.call), dynamic=False, fullgraph=True)

        def attend(**leaves: Tensor) -> Tensor:
            return compiled(block_mask=block_mask, **leaves)

        return by_autograd(self.name, leaves_of(tensors), tensors.dy, attend, detail="torch.compile, default options")


def attention(call: Call) -> Callable[..., Tensor]:
    """The call as a function of its leaves and a block mask, through `flex_attention`."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    # plain numbers only: the compiled function must not look into the call
    scale, grouped, softcap, origin, shift = (
        call.spec.scale,
        call.group > 1,
        call.spec.softcap,
        call.spec.bias_origin,
        shift_of(call),
    )

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        sink: Tensor | None = None,
        gate: Tensor | None = None,
        block_mask: Any = None,
    ) -> Tensor:
        options: dict[str, Any] = {
            "score_mod": score_function(softcap, bias, origin, shift),
            "block_mask": block_mask,
            "scale": scale,
            "enable_gqa": grouped,
        }
        if sink is None:
            return gated(flex_attention(q, k, v, **options), gate)
        o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        # a sink in the denominator multiplies the output by exp(lse) / (exp(lse) + exp(sink))
        o = (o * torch.sigmoid(aux.lse - sink[:, None])[..., None]).to(q.dtype)
        return gated(o, gate)

    return attend


def shift_of(call: Call) -> int:
    """Key position of row 0 (eq. 1); packed sequences of equal lengths keep their place."""
    return 0 if call.varlen else call.k.shape[2] - call.q.shape[2]


def score_function(softcap: float | None, bias: Tensor | None, origin: int, shift: int) -> Callable[..., Tensor] | None:
    if softcap is None and bias is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            n = bias.shape[1]
            column = i + shift - j + origin
            inside = (column >= 0) & (column < n)
            score = score + torch.where(inside, bias[h, torch.clamp(column, 0, n - 1)], 0.0)
        return score

    return score_mod


def mask_function(call: Call) -> Mask | None:
    spec = call.spec
    left, right, shift = spec.left, spec.right, shift_of(call)
    documents = _documents(call)
    if left is None and right is None and documents is None:
        return None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + shift - j
        visible = distance == distance
        if right is not None:
            visible = visible & (distance >= -right)
        if left is not None:
            visible = visible & (distance <= left)
        if documents is not None:
            visible = visible & (documents[i] == documents[j])
        return visible

    return mask_mod


def _documents(call: Call) -> Tensor | None:
    """Number of the packed sequence each position belongs to, or None."""
    if call.cu_seqlens_q is None:
        return None
    lengths = call.cu_seqlens_q.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def make_block_mask(call: Call) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    mask_mod = mask_function(call)
    if mask_mod is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_block_mask(mask_mod, None, None, call.q.shape[2], call.k.shape[2], device=call.q.device)


ADAPTERS = (Flex(),)
