"""Other libraries' signatures on top of `backlight.attention`: change the import, keep the code.

from backlight.compat import flash_attn_func                 # was: from flash_attn import flash_attn_func
from backlight.compat.flash_attn_interface import flash_attn_func        # was: from flash_attn_interface import ...
from backlight.compat.flash_attn_cute import flash_attn_func             # was: from flash_attn.cute import flash_attn_func
from backlight.compat import adasplash                       # was: from adasplash import adasplash
from backlight.compat import lazy_attention                  # Lazy Attention's published call
from backlight.compat import triangle_attention, attention_pair_bias        # was: from cuequivariance_torch import ...
from backlight.compat import DS4Sci_EvoformerAttention       # was: from deepspeed.ops.deepspeed4science import ...
from backlight.compat import scaled_dot_product_attention    # was: from torch.nn.functional import ...
"""

from backlight.compat.adasplash import adasplash
from backlight.compat.cuequivariance import attention_pair_bias, triangle_attention
from backlight.compat.deepspeed import DS4Sci_EvoformerAttention
from backlight.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from backlight.compat.lazy import lazy_attention
from backlight.compat.sdpa import scaled_dot_product_attention

__all__ = [
    "DS4Sci_EvoformerAttention",
    "adasplash",
    "attention_pair_bias",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "lazy_attention",
    "scaled_dot_product_attention",
    "triangle_attention",
]
