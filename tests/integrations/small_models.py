"""Small random models of transformers, and how outputs and gradients of theirs are compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")

B, S, VOCABULARY = 3, 12, 40
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIDES = {"no padding": None, "left": [0, 3, 7], "right": [0, -3, -7]}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **HEADS))


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, **HEADS, sliding_window=4))


def gpt_oss() -> nn.Module:
    """Sinks, and a window of 4 in every other layer."""
    config = transformers.GptOssConfig(**SMALL, **HEADS, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return model


def gemma2() -> nn.Module:
    """Soft-capped scores, its own scale, a window of 4 in every other layer."""
    config = transformers.Gemma2Config(
        **SMALL, **HEADS, attn_logit_softcapping=0.5, sliding_window=4, query_pre_attn_scalar=3, hidden_activation="gelu"
    )
    return transformers.Gemma2ForCausalLM(config)


CAUSAL: dict[str, Callable[[], nn.Module]] = {"llama": llama, "mistral": mistral, "gpt-oss": gpt_oss, "gemma2": gemma2}


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=10,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    for stack in (model.encoder, model.decoder):
        nn.init.normal_(stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    return model


def umt5() -> nn.Module:
    """A table of its own in every layer."""
    config = transformers.UMT5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, relative_attention_num_buckets=8, relative_attention_max_distance=10,
    )  # fmt: skip
    model = transformers.UMT5ForConditionalGeneration(config)
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            nn.init.normal_(block.layer[0].SelfAttention.relative_attention_bias.weight)
    return model


WITH_POSITION_BIAS: dict[str, Callable[[], nn.Module]] = {"t5": t5, "umt5": umt5}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


def padding(side: str) -> Tensor | None:
    if SIDES[side] is None:
        return None
    mask = torch.ones(B, S, dtype=torch.long)
    for row, count in zip(mask, SIDES[side], strict=True):
        if count:
            row[:count] = 0 if count > 0 else row[:count]
            row[count:] = 0 if count < 0 else row[count:]
    return mask


Found = dict[str, tuple[Tensor, dict[str, Tensor]]]


def both(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], prepare: Callable[[nn.Module], nn.Module] = lambda model: model
) -> Found:
    """Implementation -> (output, gradients by parameter) of `forward`, which returns what counts as output; ours is of what
    `prepare` makes of the model."""
    found = {}
    for implementation in ("eager", "backlight"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        y = forward(prepare(model) if implementation == "backlight" else model)
        torch.manual_seed(1)
        (y * torch.randn_like(y)).sum().backward()
        found[implementation] = (y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    return found


def in_one_graph(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def assert_close(got: Tensor, want: Tensor, name: str) -> None:
    """In norm, to what two layers of fp32 arithmetic leave; a lost key or a wrong sign is worth 1e-2 and more. (float64 is
    no better: eager forms its weights in fp32 there too, and makes NaN of rows that are padding.)"""
    error, size = (got - want).norm(), want.norm()
    assert error <= 1e-5 * size + 1e-12, f"{name}: off by {error:.1e} of {size:.1e}"


def assert_same(found: Found) -> None:
    (y, grads), (other, other_grads) = found["backlight"], found["eager"]
    assert y.numel()
    assert_close(y, other, "output")
    assert set(grads) == set(other_grads)
    for name, grad in grads.items():
        assert_close(grad, other_grads[name], name)
