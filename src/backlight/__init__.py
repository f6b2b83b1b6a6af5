"""backlight: attention whose backward pass you can see."""

from backlight.api import Explanation, attention, attention_varlen, explain
from backlight.errors import Unsupported
from backlight.spec import AttentionSpec
from backlight.survivors import AttentionStatistics, statistics

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "AttentionStatistics",
    "Explanation",
    "Unsupported",
    "__version__",
    "attention",
    "attention_varlen",
    "explain",
    "statistics",
]
