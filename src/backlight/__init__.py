"""backlight: attention whose backward pass you can see."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backlight import doctor, mask
    from backlight.api import attention, attention_varlen
    from backlight.attention_statistics import AttentionStatistics, statistics
    from backlight.errors import Unsupported
    from backlight.explaining import Explanation, explain
    from backlight.fp8.rounding import quantize, quantize_keys
    from backlight.packing import cu_seqlens
    from backlight.slopes import alibi
    from backlight.slot import activate, activated, deactivate
    from backlight.spec import AttentionSpec
    from backlight.tangents import attention_jvp, attention_varlen_jvp

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "AttentionStatistics",
    "Explanation",
    "Unsupported",
    "__version__",
    "activate",
    "activated",
    "alibi",
    "attention",
    "attention_jvp",
    "attention_varlen",
    "attention_varlen_jvp",
    "cu_seqlens",
    "deactivate",
    "doctor",
    "explain",
    "mask",
    "quantize",
    "quantize_keys",
    "statistics",
]

HOMES = {
    "AttentionSpec": "spec",
    "Unsupported": "errors",
    "attention": "api",
    "attention_jvp": "tangents",
    "attention_varlen": "api",
    "attention_varlen_jvp": "tangents",
}
# loaded by who asks for them
LATER = {
    "AttentionStatistics": "attention_statistics",
    "Explanation": "explaining",
    "activate": "slot",
    "activated": "slot",
    "alibi": "slopes",
    "cu_seqlens": "packing",
    "deactivate": "slot",
    "explain": "explaining",
    "quantize": "fp8.rounding",
    "quantize_keys": "fp8.rounding",
    "statistics": "attention_statistics",
}


def __getattr__(name: str) -> Any:
    if name in ("doctor", "fp8", "mask"):
        return importlib.import_module(f"{__name__}.{name}")
    if name in LATER:
        return getattr(importlib.import_module(f"{__name__}.{LATER[name]}"), name)
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load()
    return globals()[name]


def _load() -> None:
    for name, home in HOMES.items():
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    # a name for `activate_flash_attention_impl`: nothing of ours runs, or is loaded, before somebody asks for it
    offer = getattr(importlib.import_module("torch.nn.attention"), "register_flash_attention_impl", None)
    if offer is not None:
        offer("BACKLIGHT", register_fn=_occupy_slot)


def _occupy_slot() -> Any:
    return importlib.import_module(f"{__name__}.slot").occupy()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# pytest imports this package in every run, for its plugin, and most runs need none of it: torch takes seconds. Everywhere else,
# and where torch is there already, operators are registered and functions found when the import is over
if "torch" in sys.modules or "_pytest" not in sys.modules:
    _load()
