"""`attn_implementation="backlight"` for Hugging Face transformers.

    from backlight.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="backlight")

Attention sinks, soft-capping, sliding windows, relative position biases, grouped heads, padding, packed sequences and caches
keep their meaning. Padding and packing become packed sequences; image spans, prefixes, chunks, a model's own mask functions and
dense masks become row intervals (`backlight.mask`). Attention dropout runs on torch's own attention, with a warning and counted
in `fallbacks`. What has no equivalent here (paged caches) is refused with a sentence.
"""

from backlight.integrations.transformers.dropped import fallbacks
from backlight.integrations.transformers.forward import attention_forward
from backlight.integrations.transformers.masks import attention_mask
from backlight.integrations.transformers.packing import Packing

NAME = "backlight"


def register(name: str = NAME) -> str:
    """Make `attn_implementation=name` known to transformers, attention and mask alike; returns the name."""
    if not (isinstance(name, str) and name):
        raise TypeError(f"name must be a text that is not empty, got {name!r}")
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    return name


__all__ = ["Packing", "attention_forward", "attention_mask", "fallbacks", "register"]
