"""Context parallel: one attention call over a sequence that is sharded over the ranks of a torch.distributed mesh."""

from backlight.distributed.context import ContextParallel, context_parallel
from backlight.distributed.simulated import simulated_attention
from backlight.distributed.simulation import simulate

__all__ = ["ContextParallel", "context_parallel", "simulate", "simulated_attention"]
