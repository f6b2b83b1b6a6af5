"""From the arguments of `attention` with precision="fp8" to the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.arguments import check_flag
from backlight.binding import Tensors, bind, flattened
from backlight.errors import Unsupported
from backlight.fp8 import calls
from backlight.fp8.operators import pack, stand_in
from backlight.fp8.rounding import quantize, quantize_keys
from backlight.operators import transformed
from backlight.quantising import Keys, Quantised, check_keys, check_queries

PRECISIONS = (None, "fp8")
# ways of computing a call that this one has not, and the keywords that ask for them
MANNERS = {"batch_invariant": 'deterministic="batch"', "exact_delta": "exact_delta", "max_logit": "return_max_logit"}
NO_PACKED_KEYS = "attention_varlen quantises packed sequences itself: give it tensors and precision='fp8'"
NO_TRANSFORM = "attention in e4m3 is followed by autograd and by torch.compile, not by torch.func or forward mode"
NO_CONTEXT = "attention in e4m3 has no form for shards of a sequence: leave the context, or precision='fp8'"


def asked_for(q: Any, k: Any, precision: Any) -> bool:
    """Whether a call is one in e4m3."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be 'fp8' or None, got {precision!r}")
    return precision is not None or isinstance(q, Quantised) or isinstance(k, Keys)


def attend(tensors: Tensors, options: dict[str, Any], packed: bool, return_lse: bool, backend: str | None, context: Any) -> Any:
    """(y, lse) or y, as `attention` gives them."""
    if context is not None:
        raise Unsupported({"fp8": (NO_CONTEXT,)})
    if transformed():
        raise NotImplementedError(NO_TRANSFORM)
    check_flag("return_lse", return_lse)
    check_flag("return_max_logit", options.get("max_logit", False))
    calls.check_backend(backend)
    q, k, v, *terms = tensors
    if isinstance(q, Tensor) and q.dim() == 5 and not packed and isinstance(k, Tensor):
        flat, grid = flattened(tensors)
        y, lse = attend(flat, options, packed, True, backend, None)
        y, lse = y.unflatten(0, grid), lse.unflatten(0, grid)
        return (y, lse) if return_lse else y
    given: Any = None
    if isinstance(q, Quantised) or isinstance(k, Keys):
        given, (q, k, v), options = _given(q, k, v, options, packed)
    call = bind((q, k, v, *terms), options, packed)
    refused = [f"does not take {keyword} in e4m3" for name, keyword in MANNERS.items() if getattr(call, name)]
    if call.q.dtype == torch.float64:
        refused.append("does not take fp64 in e4m3, whose results are in fp32 or less")
    if refused:
        raise Unsupported({"fp8": tuple(refused)})
    if given is None:
        check_keys(call.k, call.v)
    elif call.spec.softcap is not None and (given if isinstance(given, Keys) else given.keys).centred:
        raise ValueError(calls.NOT_CENTRED)
    y, lse = torch.ops.backlight.attention_fp8(*pack(call, given, backend))
    if packed:
        y, lse = y[0].transpose(0, 1), lse[0]
    return (y, lse) if return_lse else y


def _given(q: Any, k: Any, v: Any, options: dict[str, Any], packed: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What is quantised, tensors that stand for it, options."""
    if packed:
        raise TypeError(NO_PACKED_KEYS)
    if isinstance(q, Quantised):
        if k is not None or v is not None:
            raise TypeError("k and v must be None where q is what quantize returned")
        calls.scaled(q, options)
        keys, options = q.keys, options | {"scale": q.scale}
        return q, (*(stand_in(x, q.dtype) for x in (q.q, keys.k, keys.k)),), options
    if v is not None:
        raise TypeError("v must be None where k is what quantize_keys returned")
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
    check_queries(q, k.k)
    return k, (q, *(stand_in(k.k, q.dtype) for _ in range(2))), options


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
    """`backlight.attention` with precision="fp8", without terms.

    Args:
        q: [B, Hq, Sq, D], D a power of two; fp16, bf16 or fp32.
        k: [B, Hkv, Sk, D], or what `quantize_keys` made of keys and values, which then get no gradient.
        v: [B, Hkv, Sk, D]; None where k says it.
        causal: row i sees keys up to i + Sk - Sq.
        window: how many keys to the left and to the right of that place a row sees.
        scale: of the scores; None is D ** -0.5.
        return_lse: also return the log-sum-exp of each row.
        backend: "hopper" (H100, H200; D 64, 128 or 256; fp16 or bf16) or "emulated" (plain PyTorch, slow); None takes the first
            that can.

    Returns:
        y like q; with `return_lse` also lse [B, Hq, Sq], fp32.
    """
    if isinstance(k, Keys) != (v is None):
        raise TypeError("k and v must both be tensors, or k what quantize_keys returned and v None")
    calls.check_backend(backend)
    if isinstance(k, Tensor):
        assert v is not None
        check_keys(k, v)
        check_queries(q, k)
    options = {"causal": causal, "window": window, "scale": scale}
    return attend((q, k, v, *(None,) * 10), options, False, return_lse, backend, None)


__all__ = ["attention", "quantize", "quantize_keys"]
