"""The call: which forward runs it, and gradients straight through the rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import registry
from backlight.call import Call
from backlight.errors import Unsupported
from backlight.fp8 import emulated
from backlight.quantising import Keys, Quantised, dequantized, quantize_keys, quantize_queries, rotation
from backlight.spec import AttentionSpec

WIDTHS = (64, 128)
NO_SECOND = "fp8.attention has no second derivative (create_graph=True): its gradient passes through a rounding"
DTYPES = (torch.float16, torch.bfloat16)


def attention(
    q: Tensor,
    k: Tensor | Keys,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention whose products are those of e4m3 tensors; gradients as if nothing had been rounded but the inputs.

    Args:
        q: [B, Hq, Sq, D], D a power of two; fp16, bf16 or fp32.
        k: [B, Hkv, Sk, D], or what `quantize_keys` made of keys and values, which then get no gradient.
        v: [B, Hkv, Sk, D]; None where k says it.
        causal: row i sees keys up to i + Sk - Sq.
        window: how many keys to the left and to the right of that place a row sees.
        scale: of the scores; None is D ** -0.5.
        return_lse: also return the log-sum-exp of each row.
        backend: "hopper" (H100, H200; D 64 or 128; fp16 or bf16) or "emulated" (plain PyTorch, slow); None takes the first
            that can.

    Returns:
        y like q; with `return_lse` also lse [B, Hq, Sq], fp32.
    """
    if isinstance(k, Keys) != (v is None):
        raise TypeError("k and v must both be tensors, or k what quantize_keys returned and v None")
    spec = AttentionSpec(causal=causal, window=window, scale=scale)
    y, lse = _Straight.apply(q, k if isinstance(k, Tensor) else None, v, k if isinstance(k, Keys) else None, spec, backend)
    return (y, lse) if return_lse else y


def why_not(given: Quantised) -> tuple[str, ...]:
    """Reasons against the kernel for Hopper GPUs."""
    reasons = registry.get("hopper").available()
    if reasons:
        return reasons
    if given.q.device.type != "cuda":
        return (f"device {given.q.device.type} is no GPU",)
    if given.q.shape[-1] not in WIDTHS:
        return (f"head dimension {given.q.shape[-1]} is not one of {', '.join(map(str, WIDTHS))}",)
    if given.dtype not in DTYPES:
        return (f"dtype {given.dtype} is not one of fp16, bf16",)
    return ()


def forward(given: Quantised, spec: AttentionSpec, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(y, lse) of quantised inputs."""
    if backend not in (None, "hopper", "emulated"):
        raise ValueError(f"backend must be hopper, emulated or None, got {backend!r}")
    if backend != "emulated":
        reasons = why_not(given)
        if not reasons:
            from backlight.backends.hopper.fp8 import host

            return host.forward(given, spec)
        if backend == "hopper":
            raise Unsupported({"hopper": reasons})
    return emulated.forward(given, spec)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, v: Tensor | None, keys: Keys | None, spec: AttentionSpec, backend: str | None
    ) -> tuple[Tensor, Tensor]:
        if keys is None:
            assert k is not None
            assert v is not None
            keys = quantize_keys(k, v)
        given = quantize_queries(q, keys, spec.scale)
        y, lse = forward(given, spec, backend)
        ctx.given, ctx.spec = given, spec
        ctx.dtypes = q.dtype, None if k is None else k.dtype, None if v is None else v.dtype
        ctx.save_for_backward(y, lse)
        return y, lse

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlse: Tensor) -> Any:
        """The backward of 16 bits at the rounded inputs, its rows as the forward had them (section 17.2)."""
        if torch.is_grad_enabled():
            raise NotImplementedError(NO_SECOND)
        given: Quantised = ctx.given
        y, lse = ctx.saved_tensors
        q, k, v = (x.to(y.dtype) for x in dequantized(given))
        call = Call(AttentionSpec(ctx.spec.causal, ctx.spec.window, scale=given.scale), q, k, v)
        needs = frozenset(name for name, need in zip(("dq", "dk", "dv"), ctx.needs_input_grad, strict=False) if need)
        with torch.no_grad():
            # rows that see nothing have no offset either
            grads = registry.choose(call, None).backward(call, y, lse - given.offset, None, dy.contiguous(), dlse, needs)
        turn = rotation(y.shape[-1], y.device)
        dq = dk = None
        if "dq" in grads:
            group = given.q.shape[1] // given.keys.k.shape[1]
            common = given.scale * dlse[..., None] * given.keys.mean.repeat_interleave(group, 1)[:, :, None]
            dq = (grads["dq"].float() @ turn.T + common).to(ctx.dtypes[0])
        if "dk" in grads:
            dk = (grads["dk"].float() @ turn.T).to(ctx.dtypes[1])
        return dq, dk, grads.get("dv"), None, None, None
