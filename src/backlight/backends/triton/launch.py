"""Host side that all kernels of a call share: pointers, strides, geometry, compile-time flags, grids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.backends.triton.config import KernelConfig, config_of, padded
from backlight.call import Call
from backlight.spec import LOG2E


def unit_stride(tensor: Tensor) -> Tensor:
    """Kernels read any strides in place as long as the last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class Launch:
    def __init__(self, call: Call):
        self.call = call
        if call.varlen and not (call.q.is_cuda and torch.cuda.is_current_stream_capturing()):
            # wrong cu_seqlens would send kernels out of bounds; a graph under capture was checked when it was warmed up
            call.segments()
        self.q, self.k, self.v = (unit_stride(x) for x in (call.q, call.k, call.v))
        # absent tensors still need a pointer; the flags keep kernels from reading it
        self.gate = self.q if call.gate is None else unit_stride(call.gate)
        self.bias, self.sink, self.tau = (self.q if x is None else x.contiguous() for x in (call.bias, call.sink, call.tau))

    def config(self, kernel: str) -> KernelConfig:
        return config_of(kernel, self.call)

    def strides(self, name: str) -> tuple[int, int, int]:
        return getattr(self, name).stride()[:3]

    @property
    def geometry(self) -> tuple[Any, ...]:
        """heads, group, sq, sk, left, right, factor, cap2, n_bias, bias_origin."""
        call, spec = self.call, self.call.spec
        cap = spec.softcap
        return (
            call.q.shape[1],
            call.group,
            call.q.shape[2],
            call.k.shape[2],
            spec.left or 0,
            spec.right or 0,
            call.scale * LOG2E if cap is None else call.scale / cap,
            0.0 if cap is None else cap * LOG2E,
            0 if call.bias is None else call.bias.shape[1],
            spec.bias_origin,
        )

    def flags(self) -> dict[str, Any]:
        call, spec = self.call, self.call.spec
        d, dv = call.q.shape[-1], call.v.shape[-1]
        return {
            "D": d,
            "DV": dv,
            "BD": padded(d),
            "BDV": padded(dv),
            "HAS_LEFT": spec.left is not None,
            "HAS_RIGHT": spec.right is not None,
            "HAS_SOFTCAP": spec.softcap is not None,
            "HAS_BIAS": spec.bias,
            "HAS_SINK": spec.sink,
            "HAS_TAU": spec.tau,
            "HAS_GATE": spec.gate,
            "VARLEN": call.varlen,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        }

    def row_grid(self, block: int) -> tuple[int, int]:
        batch, heads, sq, _ = self.call.q.shape
        return self._tiles(sq, self.call.cu_seqlens_q, block), batch * heads

    def key_grid(self, block: int) -> tuple[int, int]:
        batch, heads, sk, _ = self.call.k.shape
        return self._tiles(sk, self.call.cu_seqlens_k, block), batch * heads

    def packing_rows(self, block: int) -> tuple[Any, ...]:
        return self._packing(self.call.cu_seqlens_q, block)

    def packing_keys(self, block: int) -> tuple[Any, ...]:
        return self._packing(self.call.cu_seqlens_k, block)

    def _tiles(self, length: int, cu_seqlens: Tensor | None, block: int) -> int:
        # packed: an upper bound that needs no value of cu_seqlens; programs beyond the last tile return at once
        return -(-length // block) if cu_seqlens is None else length // block + cu_seqlens.shape[0] - 1

    def _packing(self, cu_seqlens: Tensor | None, block: int) -> tuple[Any, ...]:
        """cu_seqlens_q, cu_seqlens_k, first tile of each segment, number of segments."""
        if cu_seqlens is None:
            return self.q, self.q, self.q, 0
        tiles = (cu_seqlens.diff() + block - 1) // block
        cu_tiles = torch.nn.functional.pad(tiles.cumsum(0, dtype=torch.int32), (1, 0))
        return self.call.cu_seqlens_q, self.call.cu_seqlens_k, cu_tiles, cu_seqlens.shape[0] - 1

    def empty_rows(self, width: int) -> Tensor:
        """Uninitialised [B,Hq,Sq,width] in the dimension order of q's strides."""
        q = self.call.q
        return torch.empty_like(q) if width == q.shape[-1] else q.new_empty(*q.shape[:3], width)
