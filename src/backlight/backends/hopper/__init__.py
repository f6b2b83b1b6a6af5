"""Gluon kernels for Hopper GPUs: TMA, wgmma, mbarriers, warp specialisation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backlight.backends.hopper.versions import triton_version
from backlight.call import ByName, Call, Memory, laid_like

MAX_HEAD_DIM = 256
# with tau: o and u of a row do not fit into registers beyond
MAX_TAU_DIM = 128
# with entmax, too; dk and dv of wider heads have no lists of tiles
MAX_ENTMAX_DIM = 128
# in forward mode: neither do o and its tangent
MAX_TANGENT_DIM = 128
CAPABILITY = (9, 0)
# coordinates of TMA have 32 bits; rows of a head are padded to whole blocks
MAX_ROWS = 1 << 31
ROW_BLOCK = 128
OLDEST_TRITON = (3, 6)


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def missing() -> tuple[str, ...]:
    """What this machine lacks."""
    if importlib.util.find_spec("triton") is None:
        return ("triton is not installed",)
    if triton_version() < OLDEST_TRITON:
        return (f"triton {'.'.join(map(str, triton_version()))} is older than 3.6",)
    if not torch.cuda.is_available():
        return ("no GPU that torch can see",)
    from backlight._private.triton import kernels_lack

    return kernels_lack()


@cache
def host() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Host functions of the two directions and what runs them; with them comes Triton. An import statement takes its time."""
    from backlight.backends.hopper.backward.host import backward
    from backlight.backends.hopper.forward.host import forward
    from backlight.backends.replaying.program import known, replayed

    return forward, backward, replayed, known


def gate_side_by_side(call: Call) -> bool:
    """Whether the gate's columns lie side by side; if not, kernels read a copy, and dgate is like that at first."""
    return call.gate is None or call.gate.stride(-1) == 1 or call.gate.shape[-1] == 1


# reasons against calls of a layout
_reasons: Memory[tuple[str, ...]] = Memory()


def _reasons_of_mask(call: Call) -> list[str]:
    """What a mask by row intervals does not go together with here."""
    if call.rows is None:
        return []
    beside = {"bias": call.spec.bias, "tau": call.spec.tau, "deterministic": call.deterministic}
    return [f"a mask by row intervals together with {name}" for name, is_asked in beside.items() if is_asked]


def _reasons_of_entmax(call: Call) -> list[str]:
    """What entmax does not go together with here."""
    if not call.spec.entmax:
        return []
    from backlight.backends.hopper.config import ALPHAS

    alpha, width = call.spec.alpha, max(call.q.shape[-1], call.v.shape[-1])
    beside = {"bias": call.spec.bias, "deterministic": call.deterministic, "a mask by row intervals": call.spec.rows}
    beside["return_max_logit"] = call.max_logit
    reasons = [f"entmax together with {name}" for name, is_asked in beside.items() if is_asked]
    if alpha is None or not ALPHAS[0] <= alpha <= ALPHAS[1]:
        shown = "that is learned" if alpha is None else f"of {alpha:g}"
        reasons.append(f"entmax with an alpha {shown}: it takes numbers from {ALPHAS[0]} to {ALPHAS[1]}")
    if width > MAX_ENTMAX_DIM:
        reasons.append(f"entmax with head dimension {width} above {MAX_ENTMAX_DIM}")
    if call.q.shape[0] * call.q.shape[1] * (call.q.shape[2] // 64 + 3) * (call.k.shape[2] // 64 + 1) >= MAX_ROWS:
        reasons.append("entmax with more blocks of rows and keys than 31 bits count")
    return reasons


class HopperBackend:
    name = "hopper"
    summary = "Hopper GPUs (sm_90), fp16 bf16: TMA and wgmma, FlashAttention-3's structure"
    takes = frozenset({"causal", "window", "softcap", "bias", "sink", "tau", "gate", "entmax", "rows", "packed"})
    order = (
        "tiles of packed sequences do not go by their mean length; dq from a kernel that owns rows, so seven products, not five"
    )
    derivatives = dict.fromkeys(("tangent", "second"), frozenset({"causal", "window", "packed"}))

    def available(self) -> tuple[str, ...]:
        return missing()

    def why_not(self, call: Call) -> tuple[str, ...]:
        reasons = _reasons.get(call.layout)
        if reasons is None:
            reasons = _reasons[call.layout] = self._find_reasons(call)
        return reasons

    def _find_reasons(self, call: Call) -> tuple[str, ...]:
        spec = call.spec
        reasons = []
        if call.q.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"dtype {call.q.dtype} is not one of fp16, bf16")
        if call.q.device.type != "cuda":
            reasons.append(f"tensors are on {call.q.device.type}, not on a GPU")
        elif capability(call.q.device) != CAPABILITY:
            reasons.append("the GPU is not a Hopper (compute capability 9.0)")
        for name, width in (("q", call.q.shape[-1]), ("v", call.v.shape[-1])):
            if width > MAX_HEAD_DIM:
                reasons.append(f"head dimension {width} of {name} is above {MAX_HEAD_DIM}")
            if width % 8 or width == 0:
                reasons.append(f"head dimension {width} of {name} is not a multiple of 8")
        reasons += _reasons_of_mask(call) + _reasons_of_entmax(call)
        if spec.tau and call.v.shape[-1] > MAX_TAU_DIM:
            reasons.append(f"tau with head dimension {call.v.shape[-1]} of v above {MAX_TAU_DIM}")
        if call.q.shape[0] * call.q.shape[1] * (call.q.shape[2] + ROW_BLOCK) >= MAX_ROWS:
            reasons.append(
                f"{call.q.shape[0] * call.q.shape[1]} heads of {call.q.shape[2]} rows need more than 31 bits to count"
            )
        if call.scale <= 0:
            reasons.append(f"scale must be positive, got {call.scale:g}")
        if not reasons:
            from backlight.backends.hopper.launch import tma_reads

            for name in ("q", "k", "v"):
                tensor = getattr(call, name)
                if tensor.numel() and not tma_reads(tensor):
                    reasons.append(
                        f"TMA cannot read {name} in place: strides {tuple(tensor.stride())} or address not 16-byte aligned"
                    )
        return tuple(reasons)

    def why_not_differentiated(self, what: str, call: Call) -> tuple[str, ...]:
        from backlight.backends.hopper.config import padded

        d, dv = call.q.shape[-1], call.v.shape[-1]
        if what == "second" and call.deterministic:
            return ("second derivatives in a fixed order of sums",)
        if max(d, dv) > MAX_TANGENT_DIM:
            return (f"tangents with head dimension {max(d, dv)} above {MAX_TANGENT_DIM}",)
        if padded(d) != padded(dv):
            return (f"tangents with head dimensions {d} and {dv}, whose tiles differ",)
        return ()

    def config(self, call: Call) -> dict[str, object]:
        from backlight.backends.hopper.config import backward_config, dq_config, elastic_config, entmax_config, forward_config

        chosen = elastic_config if call.spec.tau else entmax_config if call.spec.entmax else forward_config
        config: dict[str, object] = {"forward": chosen(call), "backward": backward_config(call)}
        return config | {"dq": dq_config(call)} if call.deterministic else config

    def code_in_use(self) -> str:
        """What happens to the kernels between Triton and ptxas."""
        from backlight.backends.hopper.ptx import in_use

        return in_use()

    def forward(self, call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        forward, _, replayed, _ = host()
        return replayed(forward, call, (), save_u)

    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        _, backward, replayed, _ = host()
        found = replayed(backward, call, (y, lse, u, dy, dlse), needs)
        if call.gate is not None and "dgate" in found and not gate_side_by_side(call):
            found["dgate"] = laid_like(found["dgate"], call.gate)
        return found

    @torch.no_grad()
    def tangent(self, call: Call, tangents: dict[str, Tensor], known: tuple[Any, ...] | None) -> tuple[Any, ...]:
        from backlight.backends.hopper.tangent.host import tangent
        from backlight.backends.replaying.program import replayed

        saved = (None, None) if known is None else (known[0], known[1].contiguous())
        y, lse, ty, tlse = replayed(tangent, call, (*map(tangents.get, ("q", "k", "v")), *saved), None)
        if known is not None:
            y, lse, _ = known
        return y, lse, None, ty, tlse, None

    @torch.no_grad()
    def second(
        self, call: Call, tangents: ByName, results: tuple[Any, ...], incoming: tuple[Any, ...], needs: frozenset[str]
    ) -> ByName:
        from backlight.backends.hopper.second.host import second

        return second(call, tangents, results, incoming, needs, self.backward)

    def replay(self, call: Call, tensors: tuple[Tensor | None, ...], choice: Any) -> Callable[..., Any] | None:
        """The program of a direction; borders of packed sequences are values, which a program does not check."""
        if (call.varlen and not call.trusted) or (tensors and not gate_side_by_side(call)):
            return None
        forward, backward, _, known = host()
        program = known(backward if tensors else forward, call, tensors, choice)
        return None if program is None else program.again


BACKEND = HopperBackend()
