"""Gluon kernels for Hopper GPUs: TMA, wgmma, mbarriers, warp specialisation."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from backlight.call import Call

MAX_HEAD_DIM = 256
CAPABILITY = (9, 0)
# coordinates of TMA have 32 bits; rows of a head are padded to whole blocks
MAX_ROWS = 1 << 31
ROW_BLOCK = 128
OLDEST_TRITON = (3, 6)


@cache
def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


@cache
def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


class HopperBackend:
    name = "hopper"
    parts = False
    summary = "Hopper GPUs (sm_90), fp16 bf16: TMA and wgmma, FlashAttention-3's structure"

    def available(self) -> tuple[str, ...]:
        if importlib.util.find_spec("triton") is None:
            return ("triton is not installed",)
        if triton_version() < OLDEST_TRITON:
            return (f"triton {'.'.join(map(str, triton_version()))} is older than 3.6",)
        if not torch.cuda.is_available():
            return ("no GPU that torch can see",)
        return ()

    def why_not(self, call: Call) -> tuple[str, ...]:
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
        if getattr(call, "part", None) is not None:
            reasons.append("parts of a larger problem are not supported")
        for term in spec.terms:
            reasons.append(f"{term} is not supported")
        if spec.softcap is not None:
            reasons.append("softcap is not supported")
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

    def config(self, call: Call) -> dict[str, object]:
        from backlight.backends.hopper.config import backward_config, dq_config, forward_config

        config = {"forward": forward_config(call), "backward": backward_config(call)}
        return config | {"dq": dq_config(call)} if call.deterministic else config

    @torch.no_grad()
    def forward(self, call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        from backlight.backends.hopper.forward import forward

        return (*forward(call), None)

    @torch.no_grad()
    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        from backlight.backends.hopper.backward import backward

        return backward(call, y, lse, dy, dlse, needs)


BACKEND = HopperBackend()
