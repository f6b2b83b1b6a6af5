"""Layers: `Attention`, `LazyAttention`, `EntmaxAttention`, a cache for generation, and statistics of what attention does."""

from backlight.nn.attention import Attention
from backlight.nn.cache import KVCache
from backlight.nn.entmax import EntmaxAttention
from backlight.nn.lazy import LazyAttention
from backlight.nn.measure import AttentionStatistics, statistics

__all__ = ["Attention", "AttentionStatistics", "EntmaxAttention", "KVCache", "LazyAttention", "statistics"]
