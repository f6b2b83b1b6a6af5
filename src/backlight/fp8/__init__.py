"""Attention of e4m3 tensors: quantised inputs, the forward on Hopper GPUs or emulated, gradients straight through the rounding.

Experimental: docs/fp8.md says what has been seen of it.
"""

from backlight.fp8.entry import attention
from backlight.fp8.rounding import quantize, quantize_keys
from backlight.quantising import Keys, Quantised, dequantized

__all__ = ["Keys", "Quantised", "attention", "dequantized", "quantize", "quantize_keys"]
