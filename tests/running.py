"""Run a problem through the public call and bring everything back in canonical layout, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

import backlight
from backlight.call import Call
from backlight.mask import Mask
from backlight.problems.axes import KEY_GRADIENTS, ROW_GRADIENTS
from backlight.spec import LEARNED, SEQUENCE_OF
from cases import Problem

Layout = Callable[[Tensor], Tensor]


def options(call: Call) -> dict[str, object]:
    """Keywords of the public call that carry no tensor with a gradient."""
    spec = call.spec
    return {
        "causal": spec.causal,
        "window": spec.window,
        "scale": spec.scale,
        "softcap": spec.softcap,
        "bias_origin": spec.bias_origin,
        "deterministic": call.deterministic,
        "mask": None if call.rows is None else Mask(call.rows, call.pos),
    }


def packed(value: Tensor | None) -> Tensor | None:
    """[1, H, T, D] -> [T, H, D]."""
    return None if value is None else value[0].transpose(0, 1).contiguous()


def unpacked(value: Tensor) -> Tensor:
    """[T, H, D] -> [1, H, T, D]."""
    return value.transpose(0, 1)[None]


def leaves(call: Call, requires_grad: bool = True) -> dict[str, Tensor]:
    """The call's tensors as fresh leaves in the layout of the public call."""
    out = {}
    for name in LEARNED:
        value = getattr(call, name)
        if value is not None:
            value = packed(value) if call.varlen and name in SEQUENCE_OF else value
            out[name] = value.detach().clone().requires_grad_(requires_grad)
    return out


def forward(call: Call, inputs: Mapping[str, Tensor], backend: str | None = None, **changes: object) -> tuple[Tensor, Tensor]:
    """(y, lse) of the public call on `inputs`, in the public call's own layout."""
    keywords = options(call) | {"return_lse": True, "backend": backend} | changes
    if call.varlen:
        return backlight.attention_varlen(**inputs, cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, **keywords)
    return backlight.attention(**inputs, **keywords)


def ways(call: Call) -> tuple[tuple[bool, Call], ...]:
    """(`fixed` of `run`, the call that it makes): two where alpha of an entmax is a number, which may be learned."""
    learned = False, replace(call, spec=call.spec.replace(alpha=None))
    return ((False, call),) if call.spec.alpha is None else (learned, (True, call))


def run(
    problem: Problem,
    backend: str | None = None,
    inputs: Mapping[str, Tensor] | None = None,
    dy: Tensor | None = None,
    fixed: bool = False,
    **changes: object,
) -> dict[str, Tensor]:
    """y, lse and every gradient in canonical layout. `inputs` and `dy` replace the drawn ones, in the public call's layout.

    fixed: alpha of an entmax is given as a number; otherwise as a tensor with its gradient.
    """
    call = problem.call
    inputs = leaves(call) if inputs is None else dict(inputs)
    if fixed:
        # a number, which kernels compile in and which has no gradient
        changes["entmax"] = call.spec.alpha
        inputs.pop("entmax", None)
    if dy is None:
        dy = packed(problem.dy) if call.varlen else problem.dy
    y, lse = forward(call, inputs, backend, **changes)
    outputs, incoming = [y], [dy]
    if problem.dlse is not None:
        outputs.append(lse)
        incoming.append(problem.dlse[0] if call.varlen else problem.dlse)
    grads = torch.autograd.grad(outputs, list(inputs.values()), incoming)
    result = {"y": y.detach(), "lse": lse.detach()} | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}
    return canonical(call, result)


def canonical(call: Call, result: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not call.varlen:
        return dict(result)
    out = dict(result)
    for name in ("y", *ROW_GRADIENTS, *KEY_GRADIENTS):
        if name in out:
            out[name] = unpacked(out[name])
    out["lse"] = out["lse"][None]
    return out
