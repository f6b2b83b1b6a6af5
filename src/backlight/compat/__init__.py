"""Other libraries' signatures on top of `backlight.attention`: change the import, keep the code.

from backlight.compat import flash_attn_func                 # was: from flash_attn import flash_attn_func
from backlight.compat import lazy_attention                  # Lazy Attention's published call
"""

from backlight.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from backlight.compat.lazy import lazy_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "lazy_attention",
]
