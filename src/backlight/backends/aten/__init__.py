"""torch's own fused kernel for CPUs, where it is the fastest way: plain calls, both directions; the rest is for `tiled`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import has_amx
from backlight.call import Call, laid_like

aten = torch.ops.aten
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Torch chooses its tiles itself."""

    def __str__(self) -> str:
        return "torch's own"


class AtenBackend:
    name = "aten"
    summary = "torch's own fused kernel on a CPU, plain calls (causal or full) in fp32, in bf16 and fp16 where the CPU has them"
    takes = frozenset({"causal"})
    order = "refused"

    def available(self) -> tuple[str, ...]:
        return ()

    def why_not(self, call: Call) -> tuple[str, ...]:
        q, k, v = call.q, call.k, call.v
        if q.device.type != "cpu":
            return (f"device {q.device.type} is not the CPU",)
        if q.dtype not in usable():
            if q.dtype in NAMES:
                return (f"this CPU has no matrix instructions for {NAMES[q.dtype]}, and torch's kernel is slow without them",)
            return (f"dtype {q.dtype} is not one of fp16, bf16, fp32",)
        if q.shape[-1] != v.shape[-1]:
            return (f"D = {q.shape[-1]} and Dv = {v.shape[-1]} differ",)
        if call.spec.causal and q.shape[2] != k.shape[2]:
            return (f"causal with Sq = {q.shape[2]} and Sk = {k.shape[2]}: torch aligns the first rows, not the last",)
        if not call.scale > 0:
            return (f"scale = {call.scale}: torch takes the largest product before it scales it",)
        if 0 in (*q.shape, *k.shape):
            return ("a tensor without elements",)
        asked = {"return_max_logit": call.max_logit, "exact_delta": call.exact_delta}
        asked['deterministic="batch"'] = call.batch_invariant
        return tuple(f"{name}: torch's kernel knows nothing of it" for name, is_asked in asked.items() if is_asked)

    def config(self, call: Call) -> Tiles:
        return Tiles()

    @torch.no_grad()
    def forward(self, call: Call, save_u: bool) -> tuple[Tensor, Tensor, None, None]:
        return _forward(call.q, call.k, call.v, call.spec.causal, call.scale)

    @torch.no_grad()
    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        if dlse is not None:
            # torch's kernel has no gradient of lse
            from backlight.backends.tiled.backward import backward

            return backward(call, y, lse, u, dy, dlse, needs)
        return _backward((call.q, call.k, call.v, y, lse, dy), call.spec.causal, call.scale, needs)

    def replay(self, call: Call, tensors: tuple[Any, ...], choice: Any) -> Callable[..., Any] | None:
        causal, scale = call.spec.causal, call.scale
        if not tensors:
            return lambda given: _forward(given[0], given[1], given[2], causal, scale)
        if tensors[-1] is not None:
            return None
        return lambda given: _backward((*given[:3], given[-5], given[-4], given[-2]), causal, scale, choice)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, None, None]:
    y, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_with_rows(q, k, v), 0.0, causal, scale=scale)
    lse = lse.contiguous()
    # few scores none of which is a number pass for a row that sees nothing: y and lse come out as 0
    if bool((zero := lse == 0).any()):
        first = k[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        spoilt = zero & (q * first).sum(dim=-1).isnan()
        y, lse = y.masked_fill(spoilt[..., None], math.nan), lse.masked_fill(spoilt, math.nan)
    return laid_like(y, q), lse, None, None


def _backward(tensors: tuple[Tensor, ...], causal: bool, scale: float, needs: frozenset[str]) -> dict[str, Tensor]:
    q, k, v, y, lse, dy = tensors
    # the kernel goes by the strides of lse that its forward gives
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    given = *_with_rows(dy, q, k, v, y), lse
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    return {f"d{name}": laid_like(dx, x) for name, dx, x in zip("qkv", found, (q, k, v), strict=True) if f"d{name}" in needs}


def _with_rows(*tensors: Tensor) -> list[Tensor]:
    """A matrix product wants rows whose elements lie side by side and which share none; the kernel does not ask."""
    return [x if x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1] else x.contiguous() for x in tensors]


@cache
def usable() -> frozenset[torch.dtype]:
    """Without matrix instructions torch's backward takes up to 23 times that of `tiled` in 16 bits (cpu-16-bit-xeon.txt)."""
    found = {torch.float32}
    if has_amx():
        found.add(torch.bfloat16)
    return frozenset(found)


BACKEND = AtenBackend()
