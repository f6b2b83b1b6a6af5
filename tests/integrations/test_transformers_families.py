"""attn_implementation="backlight" in every family: gradients of all parameters, checkpoints, generation, one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")

from small_families import FAMILIES, GENERATING, MIXTURES  # noqa: E402
from small_models import VOCABULARY, B, Found, assert_close, assert_same, both, in_one_graph, made  # noqa: E402

import backlight  # noqa: E402
from backlight.integrations.transformers import register  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory

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


def without_constants(found: Found) -> Found:
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


# --- generation --------------------------------------------------------------------------------------------------------------


def generated(model: nn.Module, implementation: str, prompt: dict[str, Tensor], **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "disable_compile": True,
    } | options
    return model.generate(**prompt, **options, return_dict_in_generate=True, output_logits=True)


def same_text(model: nn.Module, prompt: dict[str, Tensor], **options: Any) -> None:
    eager = generated(model, "eager", prompt, **options | {"disable_compile": True})
    ours = generated(model, "backlight", prompt, **options)
    assert len(ours.logits) == 6
    assert torch.equal(ours.sequences, eager.sequences)
    assert_close(torch.stack(ours.logits), torch.stack(eager.logits), "logits")


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("name", GENERATING)
@torch.no_grad()
def test_generation(name: str, cache: str | None) -> None:
    model, prompt = prepared(name)
    prompt.pop("labels")
    if "attention_mask" in prompt and not model.config.is_encoder_decoder:
        prompt["attention_mask"] = prompt["attention_mask"].flip(1)
    same_text(model.eval(), prompt, **({"use_cache": False} if cache is None else {"cache_implementation": cache}))


@torch.no_grad()
def test_whisper_continues_a_text() -> None:
    """Several rows of the decoder at once into both caches, then one row after another, several texts for each sound."""
    model, prompt = prepared("whisper")
    prompt.pop("labels")
    prompt["decoder_input_ids"] = torch.randint(3, VOCABULARY, (B, 4))
    same_text(model.eval(), prompt)
    prompt["decoder_input_ids"] = prompt["decoder_input_ids"][:, :2]
    for cache in ("dynamic", "static"):
        same_text(model, prompt, num_beams=3, cache_implementation=cache)


# --- one graph ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_training(name: str) -> None:
    """Forward and backward, the family's own padding or images in it.

    Not in the mode of training, where Whisper draws for each layer whether to skip it; and experts by batched products, because
    the grouped ones have no backward in a graph on a CPU. Both break graphs with "sdpa" as well.
    """
    model, batch = prepared(name)
    if name in MIXTURES:
        model.set_experts_implementation("batched_mm")
    assert_same(without_constants(both(model.eval(), lambda m: logits(m, batch), in_one_graph)))
    torch._dynamo.reset()


@torch.no_grad()
def test_whisper_in_one_graph_with_static_caches() -> None:
    """Steps of the decoder: the cache of the text has room, that of the sound is full from the first step on."""
    model, prompt = prepared("whisper")
    prompt.pop("labels")
    torch._dynamo.reset()
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    same_text(model.eval(), prompt, cache_implementation="static", disable_compile=False, compile_config=config)
    assert hasattr(model, "_compiled_call"), "nothing was compiled"
    torch._dynamo.reset()
