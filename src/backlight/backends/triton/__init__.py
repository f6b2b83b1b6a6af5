"""Portable Triton kernels: every variant, on any GPU Triton compiles for."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from backlight.backends.triton.columns import gradients_like, outputs_like, side_by_side
from backlight.call import ByName, Call

MAX_HEAD_DIM = 512
# with tau or entmax, o and u of a row; of derivatives, o and its tangent: they fit no further
MAX_TAU_DIM = 256
MAX_DIFFERENTIATED_DIM = 256


def interpreting() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; it is chosen before the kernels are imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def on_gpu() -> bool:
    return torch.cuda.is_available()


@cache
def host() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Host functions of the two directions and what runs them; with them comes Triton. An import statement takes its time."""
    from backlight.backends.replaying.program import known, replayed
    from backlight.backends.triton.backward import backward
    from backlight.backends.triton.forward import forward

    # a caller's tensors may want gradients, but not of what is copied on the way
    return torch.no_grad()(forward), torch.no_grad()(backward), replayed, known


def setting(dtype: torch.dtype) -> bool | None:
    """What decides besides the call: whether torch allows fp32 matmuls in tf32."""
    return torch.backends.cuda.matmul.allow_tf32 if dtype == torch.float32 else None


class TritonBackend:
    name = "triton"
    summary = "portable GPU kernels, fp16 bf16 fp32, every variant"
    takes = frozenset(
        {"causal", "window", "softcap", "bias", "sink", "tau", "gate", "pair_bias", "entmax", "rows", "pos", "packed", "part"}
        | {"entmax_part"}
    )
    order = "a program for each tile of a sequence, no sum across programs; dq, dk and dv from kernels of their own"
    # a new term has no derivatives until it is named here too
    twice = frozenset({"causal", "window", "softcap", "bias", "sink", "gate", "pair_bias", "rows", "pos", "packed"})
    derivatives: ClassVar[dict[str, frozenset[str]]] = {
        "tangent": twice | {"tau", "part"},
        "second": twice,
    }

    def available(self) -> tuple[str, ...]:
        if not installed():
            return ("triton is not installed",)
        if not on_gpu() and not interpreting():
            return ("no GPU that torch can see",)
        return ()

    def why_not(self, call: Call) -> tuple[str, ...]:
        reasons = []
        if call.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            reasons.append(f"dtype {call.q.dtype} is not one of fp16, bf16, fp32")
        if call.q.device.type != "cuda" and not interpreting():
            reasons.append(f"tensors are on {call.q.device.type}, not on a GPU")
        for name, width in (("q", call.q.shape[-1]), ("v", call.v.shape[-1])):
            if width > MAX_HEAD_DIM:
                reasons.append(f"head dimension {width} of {name} is above {MAX_HEAD_DIM}")
            elif width > MAX_TAU_DIM:
                terms = [term for term in ("tau", "entmax") if term in call.features]
                reasons += [f"{term} with head dimension {width} of {name} above {MAX_TAU_DIM}" for term in terms]
        return tuple(reasons) or self._without_room(call)

    def _without_room(self, call: Call) -> tuple[str, ...]:
        if max(call.q.shape[-1], call.v.shape[-1]) <= MAX_TAU_DIM or call.q.dtype != torch.float32:
            return ()
        from backlight.backends.triton.config import why_no_room

        return why_no_room(call)

    def config(self, call: Call) -> dict[str, object]:
        from backlight.backends.triton.config import config_of, kernels_of

        return {kernel: config_of(kernel, call) for kernel in kernels_of(call)}

    def table_in_use(self, device: torch.device) -> str:
        """Where tile sizes on a device come from."""
        from backlight.backends.triton.config import table_in_use

        return table_in_use(device)

    def forward(self, call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        forward, _, replayed, _ = host()
        given, call = call, side_by_side(call)
        found = forward(call, save_u) if interpreting() else replayed(forward, call, (), save_u, setting(call.q.dtype))
        if call is given:
            return found
        y, lse, u, peaks = found
        y, u = outputs_like(given, y, u)
        return y, lse, u, peaks

    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        _, backward, replayed, _ = host()
        tensors = (y, lse, u, dy, dlse)
        given, call = call, side_by_side(call)
        found = (
            backward(call, *tensors, needs)
            if interpreting()
            else replayed(backward, call, tensors, needs, setting(call.q.dtype))
        )
        return found if call is given else gradients_like(given, found)

    def entmax_sums(self, call: Call) -> Tensor:
        from backlight.backends.triton.live import part_sums

        with torch.no_grad():
            return part_sums(call)

    def tangent(self, call: Call, tangents: dict[str, Tensor], known: tuple[Any, ...] | None) -> tuple[Any, ...]:
        if call.tau is not None:
            from backlight.backends.triton.tangent_elastic import tangent_elastic as tangent
        else:
            from backlight.backends.triton.tangent import tangent
        with torch.no_grad():
            y, lse, u, ty, tlse, tu = tangent(side_by_side(call), tangents, known)
            if known is None:
                y, u = outputs_like(call, y, u)
            ty, tu = outputs_like(call, ty, tu)
        return y, lse, u, ty, tlse, tu

    def why_not_differentiated(self, what: str, call: Call) -> tuple[str, ...]:
        width = max(call.q.shape[-1], call.v.shape[-1])
        if width > MAX_DIFFERENTIATED_DIM:
            return (f"has no derivatives of heads wider than {MAX_DIFFERENTIATED_DIM}, and these have {width} columns",)
        if what != "second":
            beside = {"a pair bias": call.pair_bias, "parts of a larger problem": call.part} if call.tau is not None else {}
            return tuple(f"has no forward-mode derivative of tau with {name}" for name, x in beside.items() if x is not None)
        from backlight.backends.triton.config import why_no_second

        return why_no_second(call)

    def second(
        self, call: Call, tangents: ByName, results: tuple[Any, ...], incoming: tuple[Any, ...], needs: frozenset[str]
    ) -> ByName:
        from backlight.backends.triton.second import second

        with torch.no_grad():
            found = second(side_by_side(call), tangents, results, incoming, needs)
            return found | gradients_like(call, {name: x for name, x in found.items() if name in call.gradients})

    def replay(self, call: Call, tensors: tuple[Tensor | None, ...], choice: Any) -> Callable[..., Any] | None:
        """The program of a direction; borders of packed sequences are values, which a program does not check."""
        if (call.varlen and not call.trusted) or call.part is not None or interpreting():
            return None
        forward, backward, _, known = host()
        dtype = call.q.dtype
        now = setting(dtype)
        program = known(backward if tensors else forward, call, tensors, choice, now)
        if program is None or now is None:
            return None if program is None else program.again
        return lambda inputs: program.again(inputs) if setting(dtype) == now else None


BACKEND = TritonBackend()
