"""Entmax on the host of the forward: memory for the blocks of keys that live, and numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.hopper.config import ForwardConfig, rate_of
from backlight.backends.hopper.forward.arguments import Entmax
from backlight.backends.hopper.launch import Launch
from backlight.call import Call

# sweeps that step to thresholds, at most (four bytes of a tile say whether another follows)
STEPS = 3


@dataclass(frozen=True, slots=True)
class Living:
    """Bytes [heads, row blocks of 64, key tiles] of blocks that live, by a bound of thresholds and near them; bytes [tiles, 4]
    of steps that were not the last one; W of rows."""

    bounded: Tensor
    live: Tensor
    unsettled: Tensor
    slopes: Tensor | None

    @classmethod
    def of(cls, launch: Launch, config: ForwardConfig, wants_slopes: bool) -> Living:
        heads, device = launch.batch * launch.heads, launch.call.q.device
        row_blocks = launch.row_tiles(config.block_m) * config.consumers
        shape = (heads, row_blocks, launch.key_tiles(config.block_n))
        slopes = torch.empty((heads, launch.sq), dtype=torch.float32, device=device) if wants_slopes else None
        tiles = (heads * launch.row_tiles(config.block_m), 4)
        bounded, live, unsettled = (torch.zeros(size, dtype=torch.int8, device=device) for size in (shape, shape, tiles))
        return cls(bounded, live, unsettled, slopes)

    @property
    def key_tiles(self) -> int:
        return self.live.shape[2]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.bounded, self.live, self.unsettled, self.slopes

    def argument(self, call: Call, unit: float) -> Entmax:
        """unit: from scores to logits."""
        return Entmax(1 / rate_of(call), rate_of(call) * unit, *self.tensors)
