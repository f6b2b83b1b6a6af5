"""attn_implementation="backlight" in every family: gradients of all parameters, checkpoints, generation, a Trainer, one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")

from small_families import FAMILIES, GENERATING, whisper  # noqa: E402
from small_models import B, S, VOCABULARY, assert_close, assert_same, both, made  # noqa: E402

import backlight  # noqa: E402
from backlight.integrations.transformers import register  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory

Grads = dict[str, Tensor]
ROUNDING = 1e-5


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def prepared(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    make, batch = FAMILIES[name]
    return made(make), batch()


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Those of rows that are no padding."""
    y = model(**batch).logits
    mask = batch.get("attention_mask")
    return y if mask is None or y.shape[:2] != mask.shape else y[mask.bool()]


def without_constants(found: dict[str, tuple[Tensor, Grads]]) -> dict[str, tuple[Tensor, Grads]]:
    """A constant along the keys changes no weight, where no sink and no rotation is: what comes out for it is rounding."""
    (_, ours), (_, eager) = found["backlight"], found["eager"]
    for name in [name for name in eager if name.endswith(("key.bias", "k_proj.bias")) and eager[name].norm() < ROUNDING]:
        assert eager.pop(name).shape == ours[name].shape
        assert ours.pop(name).norm() < ROUNDING, name
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_all_parameters(name: str) -> None:
    model, batch = prepared(name)
    found = both(model, lambda m: logits(m, batch))
    assert set(found["backlight"][1]) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert_same(without_constants(found))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpointed_layers(name: str, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer attends once more in the backward, and the gradients are what they were."""
    model, batch = prepared(name)
    plain = both(model, lambda m: logits(m, batch))["eager"]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    calls = []
    for function in ("attention", "attention_varlen"):
        honest = getattr(backlight, function)
        monkeypatch.setattr(backlight, function, lambda *x, honest=honest, **options: calls.append(0) or honest(*x, **options))
    forward = []

    def counted(model: nn.Module) -> Tensor:
        calls.clear()
        y = logits(model, batch)
        forward.append(len(calls))
        return y

    again = both(model, counted)["backlight"]
    assert len(calls) == 2 * forward[-1] > 0
    assert_same(without_constants({"backlight": again, "eager": plain}))
