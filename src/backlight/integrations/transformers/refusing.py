"""How the interface refuses what has no equivalent here, also inside a graph."""

from __future__ import annotations

from torch import Tensor

from backlight._private.torch import assert_in_graph
from backlight.integrations.transformers.tracing import blind

NAME = "attn_implementation='backlight'"


def require(value: bool | Tensor, wanted: bool, message: str) -> None:
    """Raises unless `value` is `wanted`: at once, or in a graph, which has no values before it runs, when it runs."""
    if isinstance(value, Tensor) and blind(value):
        assert_in_graph(value if wanted else ~value, message)
    elif bool(value) != wanted:
        raise NotImplementedError(message)
