"""How often the compiler begins anew for a model with attn_implementation="backlight": never more often than with "sdpa"."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")

from small_models import CAUSAL, VOCABULARY, made  # noqa: E402

from backlight.integrations.transformers import register  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory


def tokens(batch: int, length: int) -> tuple[Tensor, None]:
    return torch.randint(VOCABULARY, (batch, length)), None


def padded(length: int, hidden: int) -> tuple[Tensor, Tensor]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :hidden] = 0
    return torch.randint(VOCABULARY, (2, length)), mask


CALLS: dict[str, Callable[[], list[tuple[Tensor, Tensor | None]]]] = {
    "lengths": lambda: [tokens(2, length) for length in (9, 17, 33, 6)],
    "batches": lambda: [tokens(batch, 9) for batch in (2, 3, 5)],
    "padding": lambda: [padded(length, hidden) for length, hidden in ((9, 3), (17, 0), (33, 8), (33, 1))],
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_graphs(name: str, what: str) -> None:
    register()
    model, found = made(CAUSAL[name]).eval(), {}
    for implementation in ("sdpa", "backlight"):
        torch._dynamo.reset()
        model.set_attn_implementation(implementation)
        counter = CompileCounter()
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for words, mask in CALLS[what]():
            compiled(words, attention_mask=mask, use_cache=False)
        found[implementation] = counter.frame_count
    torch._dynamo.reset()
    assert 1 <= found["backlight"] <= found["sdpa"]
