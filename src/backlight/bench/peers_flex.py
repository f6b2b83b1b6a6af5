"""FlexAttention, compiled: masks as block masks, softcap and the learned bias as a score function with captured gradients.

Its default tiles do not fit into shared memory everywhere; then smaller ones are taken, and the record says which.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import compiler_settings
from backlight.bench.contender import PER_SHAPE, Contender, by_autograd, cannot, gated, leaves_of
from backlight.bench.workload import Tensors, Workload
from backlight.call import Call
from backlight.doctor.subject.names import SMALL_TILES

# tried in this order until the kernels fit into shared memory: a captured bias is pipelined through it, a tile of fp32 a stage
KERNEL_OPTIONS: tuple[dict[str, int], ...] = (
    {},
    {"fwd_num_stages": 2},
    {"fwd_num_stages": 2, "bwd_num_stages": 2},
    {"fwd_num_stages": 1, "bwd_num_stages": 1},
    SMALL_TILES,
)
# how Triton and inductor say that a kernel needs more shared memory than there is
TOO_LARGE = ("out of resource", "OutOfResources", "shared memory")
ABLE = ("packed sequences", "a window", "softcap", "a bias by distance", "a sink", "a gate")
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Flex:
    name = "flex"
    compiles = PER_SHAPE

    def __init__(self) -> None:
        self._preferred: dict[str, dict[str, int]] = {}

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"FlexAttention has no compiled backward on {device.type}"
        if workload.case.lengths_k is not None:
            return "a document mask for packed sequences needs equal query and key lengths"
        return cannot("FlexAttention", workload, ABLE)

    def prefer(self, workload: Workload, options: dict[str, int]) -> None:
        """Begin with these options when this workload is built."""
        self._preferred[workload.id] = options

    def build(self, tensors: Tensors) -> Contender:
        """The first of KERNEL_OPTIONS whose kernels fit, compiled for training and for inference."""
        preferred = self._preferred.get(tensors.workload.id)
        first = [] if preferred is None else [preferred]
        block_mask = make_block_mask(tensors.call)
        return first_that_fits(
            (*first, *(options for options in KERNEL_OPTIONS if options not in first)),
            lambda options: _compiled(self.name, tensors, block_mask, options),
        )


def first_that_fits(candidates: Sequence[dict[str, int]], build: Callable[[dict[str, int]], Contender]) -> Contender:
    """What `build` makes of the first options it does not find too large; the last such error when all are."""
    for number, options in enumerate(candidates):
        try:
            return build(options)
        except Exception as error:
            if number + 1 == len(candidates) or not any(words in str(error) for words in TOO_LARGE):
                raise
    raise ValueError("no kernel options to try")


def _compiled(name: str, tensors: Tensors, block_mask: Any, options: dict[str, int]) -> Contender:
    # compiled code of earlier workloads counts against dynamo's limit of recompilations
    torch.compiler.reset()
    # the backward is timed with its graph kept, which donated buffers forbid
    compiler_settings().donated_buffer = False
    compiled = torch.compile(attention(tensors.call, options), dynamic=False, fullgraph=True)

    def attend(**leaves: Tensor) -> Tensor:
        return compiled(block_mask=block_mask, **leaves)

    detail = "torch.compile, " + (", ".join(f"{key}={value}" for key, value in options.items()) or "default options")
    found = by_autograd(name, leaves_of(tensors), tensors.dy, attend, detail=detail, options=dict(options))
    found.both()
    found.forward()
    return found


def attention(call: Call, kernel_options: dict[str, int] | None = None) -> Callable[..., Tensor]:
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
            "kernel_options": kernel_options or None,
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
