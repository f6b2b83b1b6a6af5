"""FlexAttention as a contender, compiled.

Its default tiles do not fit into shared memory everywhere; then smaller ones are taken, and the record says which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import compiler_settings
from backlight.bench.contender import PER_SHAPE, TERM_WORDS, Contender, by_autograd, cannot, leaves_of
from backlight.bench.workload import Tensors, Workload
from backlight.call import Call
from backlight.peers import flex
from backlight.peers.features import gated

# tried in this order until the kernels fit into shared memory: a captured bias is pipelined through it, a tile of fp32 a stage
KERNEL_OPTIONS: tuple[dict[str, int], ...] = (
    {},
    {"fwd_num_stages": 2},
    {"fwd_num_stages": 2, "bwd_num_stages": 2},
    {"fwd_num_stages": 1, "bwd_num_stages": 1},
    flex.SMALL_TILES,
)
# how Triton and inductor say that a kernel needs more shared memory than there is
TOO_LARGE = ("out of resource", "OutOfResources", "shared memory")
ABLE = (
    "packed sequences",
    "a window",
    "softcap",
    *(TERM_WORDS[name] for name in ("bias", "sink", "gate", "pair_bias", "rows", "pos")),
)


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
        block_mask = block_mask_of(tensors.call)
        return first_that_fits(
            (*first, *(options for options in KERNEL_OPTIONS if options not in first)),
            lambda options: _compiled(self.name, tensors, block_mask, options),
        )


def first_that_fits(candidates: Sequence[dict[str, int]], build: Callable[[dict[str, int]], Contender]) -> Contender:
    """What `build` makes of the first options that fit; when none do, the last error."""
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
    """The call as a function of its leaves and a block mask."""
    through = flex.attention_of(flex.Numbers.of(call.spec, call.q, call.k), kernel_options)

    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any = None, **terms: Tensor) -> Tensor:
        bias, sink, gate, pairs = (terms.get(name) for name in ("bias", "sink", "gate", "pair_bias"))
        if sink is None:
            return gated(through(q, k, v, bias, block_mask, pair_bias=pairs), gate)
        o, lse = through(q, k, v, bias, block_mask, lse=True, pair_bias=pairs)
        # a sink in the denominator multiplies the output by exp(lse) / (exp(lse) + exp(sink))
        o = (o * torch.sigmoid(lse - sink[:, None])[..., None]).to(q.dtype)
        return gated(o, gate)

    return attend


def block_mask_of(call: Call) -> Any:
    borders = None if call.cu_seqlens_q is None else tuple(call.cu_seqlens_q.tolist())
    lengths = call.q.shape[2], call.k.shape[2]
    return flex.block_mask(flex.Pairs(call.spec, *lengths, borders, call.q.device, call.rows, call.pos))


ADAPTERS = (Flex(),)
