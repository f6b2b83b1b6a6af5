"""FlashAttention 2 of the flash_attn package: [B,S,H,D], a window with -1 for unbounded, softcap 0 for none."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch import Tensor

from backlight.peers.features import features_of, on_cuda

PACKAGE = "flash_attn"
KNOWN = ("causal", "window", "scale", "softcap")


def attention(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """One call with the project's keywords."""
    asked = features_of("fa2", given, KNOWN)
    if importlib.util.find_spec(PACKAGE) is None:
        raise NotImplementedError(f"fa2 needs the package {PACKAGE}, which is not installed")
    on_cuda("fa2", q)
    out = importlib.import_module(PACKAGE).flash_attn_func(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=asked.scale,
        causal=asked.causal,
        window_size=tuple(-1 if side is None else side for side in asked.window),
        softcap=asked.softcap or 0.0,
    )
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)
