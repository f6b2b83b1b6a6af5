"""A bound call in e4m3: which forward runs it, and gradients straight through the rounding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backlight import registry, running
from backlight.backends.tiled.primitives import sink_weight
from backlight.call import Call
from backlight.errors import Unsupported
from backlight.fp8 import emulated
from backlight.fp8.rounding import quantised, quantize_queries, rounded, rounded_of, tiles_of_call, turned_back
from backlight.quantising import Keys, Quantised
from backlight.spec import GRADIENTS

WIDTHS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
# what the emulation takes of `spec.FEATURES`, and the kernel
EMULATED = frozenset(("causal", "window", "softcap", "bias", "sink", "gate", "pair_bias", "rows", "pos", "packed"))
KERNEL = frozenset(("causal", "window", "softcap", "bias", "sink", "gate", "rows", "packed"))
# head dimension up to which the kernel has shared memory for masks with two intervals of rows for a key
TWO_INTERVALS = 128
NOT_CENTRED = "softcap bends scores with their mean: quantise the keys with centred=False"
BACKENDS = (None, "hopper", "emulated")


def quantise(call: Call) -> Quantised:
    """A call's q, k and v; with a softcap as they are, since it bends the mean as well (eq. 97)."""
    return quantised(call.q, call.k, call.v, call.scale, call.spec.softcap is None, tiles_of_call(call))


def queries_of(call: Call, keys: Keys) -> Quantised:
    if keys.centred and call.spec.softcap is not None:
        raise ValueError(NOT_CENTRED)
    return quantize_queries(call.q, keys, call.scale)


# --- forward -----------------------------------------------------------------------------------------------------------------


def unknown(call: Call, takes: frozenset[str]) -> tuple[str, ...]:
    asked = [feature for feature in call.features if feature not in takes]
    return tuple(f"does not take {registry.NAMED.get(feature, feature)} in e4m3" for feature in asked)


def why_not(call: Call, given: Quantised) -> tuple[str, ...]:
    """Reasons against the kernel for Hopper GPUs."""
    reasons = registry.get("hopper").available()
    if reasons:
        return reasons
    if given.q.device.type != "cuda":
        return (f"device {given.q.device.type} is no GPU",)
    return beyond_kernel(call, given)


def beyond_kernel(call: Call, given: Quantised) -> tuple[str, ...]:
    """Reasons against it that do not lie in the machine."""
    if given.q.shape[-1] not in WIDTHS:
        return (f"head dimension {given.q.shape[-1]} is not one of {', '.join(map(str, WIDTHS))}",)
    if given.dtype not in DTYPES:
        return (f"dtype {given.dtype} is not one of fp16, bf16",)
    if call.rows is not None and call.rows.shape[2] > 2 and given.q.shape[-1] > TWO_INTERVALS:
        return (
            f"a mask with two intervals in e4m3 with head dimension {given.q.shape[-1]} above {TWO_INTERVALS} needs more "
            "shared memory than there is",
        )
    return unknown(call, KERNEL)


def forward(call: Call, given: Quantised, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(y, lse) of quantised inputs with the options and terms of a call."""
    check_backend(backend)
    refused = {}
    if backend != "emulated":
        reasons = why_not(call, given)
        if not reasons:
            from backlight.backends.hopper.fp8 import host

            return host.forward(call, given)
        refused["hopper"] = reasons
    if backend != "hopper":
        reasons = unknown(call, EMULATED)
        if not reasons:
            return emulated.forward(call, given)
        refused["emulated"] = reasons
    raise Unsupported(refused)


def check_backend(backend: str | None) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be hopper, emulated or None in e4m3, got {backend!r}")


# --- gradients ---------------------------------------------------------------------------------------------------------------


def backward(
    call: Call, keys: Keys | None, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor | None, needs: tuple[bool, ...]
) -> dict[str, Tensor]:
    """The backward of 16 bits at the rounded inputs, its rows as the forward had them (section 17.2).

    A sink is no term of that backward, which knows its weight from lse; what it takes and gives is found here.
    """
    if keys is None:
        args = call.q, call.k, call.v, call.scale, call.spec.softcap is None, tiles_of_call(call)
        (q, k, v), offset, mean = rounded(*args)
    else:
        (q, k, v), offset, mean = rounded_of(queries_of(call, keys))
    # lse of a row that sees nothing is no function of anything
    dlse = None if dlse is None else dlse.masked_fill(lse == -math.inf, 0)
    spec = call.spec.replace(sink=False, scale=call.scale)
    inner = replace(call, spec=spec, q=q, k=k, v=v, sink=None)
    wanted = tuple(need and name != "dsink" for name, need in zip(GRADIENTS, needs, strict=True))
    asked = dict(zip(GRADIENTS, needs, strict=True))
    grads = running.backward(inner, None, y, lse - offset, None, dy.contiguous(), dlse, wanted)
    # sums of ds over the keys of a row: what the mean of the keys is multiplied by
    common = dlse
    if call.sink is not None:
        delta = (dy.float() * y.float()).sum(-1)
        if dlse is not None:
            delta = delta - dlse
        of_sink = sink_weight(call.sink.float()[:, None], lse)
        if asked["dsink"]:
            grads["dsink"] = -(of_sink * delta).sum((0, 2)).to(call.sink.dtype)
        common = of_sink * delta if dlse is None else of_sink * delta + dlse
    if asked["dq"]:
        dq = turned_back(grads["dq"])
        if common is not None:
            along = mean.repeat_interleave(call.q.shape[1] // mean.shape[1], 1)[:, :, None]
            dq = (dq + call.scale * common[..., None] * along).to(dq.dtype)
        grads["dq"] = dq
    if asked["dk"]:
        grads["dk"] = turned_back(grads["dk"])
    return grads


def scaled(given: Quantised, options: dict[str, Any]) -> None:
    """The scale of quantised queries is theirs."""
    if options.get("scale") not in (None, given.scale):
        raise ValueError(f"scale was given to quantize as {given.scale:g}, got {options['scale']:g} here")
