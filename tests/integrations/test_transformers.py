"""attn_implementation="backlight" in small random models: outputs and gradients of every parameter against "eager"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")

from small_models import (  # noqa: E402
    CAUSAL,
    SIDES,
    VOCABULARY,
    WITH_POSITION_BIAS,
    B,
    S,
    assert_close,
    assert_same,
    both,
    llama,
    made,
    padding,
    t5,
)

from backlight.integrations.transformers import attention_forward, attention_mask, register  # noqa: E402
from backlight.integrations.transformers.position_bias import by_distance  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CAUSAL)
def test_causal_models(name: str, side: str) -> None:
    model, mask = made(CAUSAL[name]), padding(side)
    tokens = torch.randint(VOCABULARY, (B, S))

    def logits(model: nn.Module) -> Tensor:
        y = model(tokens, attention_mask=mask, use_cache=False).logits
        return y if mask is None else y[mask.bool()]

    found = both(model, logits)
    assert_same(found)
    learned = {"gpt-oss": "sinks"}.get(name)
    if learned:
        grads = [grad for parameter, grad in found["backlight"][1].items() if parameter.endswith(learned)]
        assert len(grads) == 2
        assert all((grad != 0).all() for grad in grads)


@pytest.mark.parametrize("side", SIDES)
def test_t5(side: str) -> None:
    """Encoder, decoder and cross attention; position bias with its gradient in both stacks."""
    model, mask = made(t5), padding(side)
    tokens, answer = torch.randint(VOCABULARY, (B, S)), torch.randint(VOCABULARY, (B, 7))

    def logits(model: nn.Module) -> Tensor:
        return model(input_ids=tokens, attention_mask=mask, decoder_input_ids=answer, use_cache=False).logits

    found = both(model, logits)
    assert_same(found)
    tables = [grad for name, grad in found["backlight"][1].items() if "relative_attention_bias" in name]
    assert len(tables) == 2
    assert all((grad.abs().sum(dim=0) > 0).all() for grad in tables), "every head's table has a gradient"


def test_t5_cross_attention_as_long_as_its_rows() -> None:
    """As many rows as keys: padding of the encoder must hide keys, not rows of the decoder."""
    model, mask = made(t5), padding("right")
    tokens, answer = torch.randint(VOCABULARY, (B, S)), torch.randint(VOCABULARY, (B, S))
    assert_same(both(model, lambda m: m(input_ids=tokens, attention_mask=mask, decoder_input_ids=answer).logits))


# GPT-OSS does not hand positions to its masks: there packed sequences need cu_seq_lens_q
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences_by_position(name: str) -> None:
    model = made(CAUSAL[name])
    tokens = torch.randint(VOCABULARY, (1, S))
    positions = torch.cat([torch.arange(3), torch.arange(7), torch.arange(2)])[None]
    found = both(model, lambda m: m(tokens, position_ids=positions, use_cache=False).logits)
    assert_same(found)
    alone = [model(part, use_cache=False).logits for part in tokens.split([3, 7, 2], dim=1)]
    assert_close(found["backlight"][0], torch.cat(alone, dim=1), "alone")


@pytest.mark.parametrize("name", CAUSAL)
def test_packed_sequences_by_borders(name: str) -> None:
    model = made(CAUSAL[name])
    model.set_attn_implementation("backlight")
    tokens, cu = torch.randint(VOCABULARY, (1, S)), torch.tensor([0, 3, 10, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(3), torch.arange(7), torch.arange(2)])[None]
    y = model(tokens, position_ids=positions, use_cache=False, cu_seq_lens_q=cu, cu_seq_lens_k=cu).logits
    alone = [model(part, use_cache=False).logits for part in tokens.split([3, 7, 2], dim=1)]
    assert_close(y, torch.cat(alone, dim=1), "alone")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_generation(name: str, side: str, cache: str) -> None:
    model, mask = made(CAUSAL[name]).eval(), padding(side)
    tokens = torch.randint(1, VOCABULARY, (B, S))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    options |= {"cache_implementation": cache, "disable_compile": True, "attention_mask": mask}
    texts, scores = {}, {}
    for implementation in ("eager", "backlight"):
        model.set_attn_implementation(implementation)
        made_text = model.generate(tokens, **options, return_dict_in_generate=True, output_logits=True)
        texts[implementation], scores[implementation] = made_text.sequences, torch.stack(made_text.logits)
    assert torch.equal(texts["backlight"], texts["eager"])
    assert_close(scores["backlight"], scores["eager"], "logits")


@pytest.mark.parametrize("side", ["no padding", "right"])
@torch.no_grad()
def test_generation_of_an_encoder_decoder(side: str) -> None:
    """One row at a time in the decoder: its position bias is a single row, its keys are the cache."""
    model, mask, tokens = made(t5).eval(), padding(side), torch.randint(1, VOCABULARY, (B, S))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "attention_mask": mask}
    logits = {}
    for implementation in ("eager", "backlight"):
        model.set_attn_implementation(implementation)
        made_text = model.generate(tokens, **options, return_dict_in_generate=True, output_logits=True)
        logits[implementation] = torch.stack(made_text.logits)
    assert logits["eager"].shape[:2] == (6, B)
    assert_close(logits["backlight"], logits["eager"], "logits")


@pytest.mark.parametrize("side", ["no padding", "right"])
@pytest.mark.parametrize("room", [0, 1, 9])
@pytest.mark.parametrize("name", WITH_POSITION_BIAS)
@torch.no_grad()
def test_position_bias_with_a_static_cache(name: str, room: int, side: str) -> None:
    """The dense bias of such a cache goes on behind the last row. Its table was read as if the last row were at the end of the
    cache: every distance was off by the room that was left."""
    from transformers import EncoderDecoderCache, StaticCache

    model, mask = made(WITH_POSITION_BIAS[name]).eval(), padding(side)
    tokens, answer = torch.randint(1, VOCABULARY, (B, S)), torch.randint(1, VOCABULARY, (B, 7))
    logits = {}
    for implementation in ("eager", "backlight"):
        model.set_attn_implementation(implementation)
        seen = model.encoder(tokens, attention_mask=mask)
        config = model.config.get_text_config(decoder=True)
        caches = [StaticCache(config=config, max_cache_len=length) for length in (answer.shape[1] + room, S)]
        cache = EncoderDecoderCache(*caches)
        # three rows into an empty cache, then two, then one at a time
        logits[implementation] = torch.cat(
            [
                model(encoder_outputs=seen, attention_mask=mask, decoder_input_ids=part, past_key_values=cache).logits
                for part in answer.split([3, 2, 1, 1], dim=1)
            ],
            dim=1,
        )
    assert_close(logits["backlight"], logits["eager"], "logits")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", WITH_POSITION_BIAS)
@torch.no_grad()
def test_generation_with_position_bias(name: str, cache: str) -> None:
    model, tokens = made(WITH_POSITION_BIAS[name]).eval(), torch.randint(1, VOCABULARY, (B, S))
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "disable_compile": True}
    logits = {}
    for implementation in ("eager", "backlight"):
        model.set_attn_implementation(implementation)
        text = model.generate(tokens, **options, cache_implementation=cache, return_dict_in_generate=True, output_logits=True)
        logits[implementation] = torch.stack(text.logits)
    assert_close(logits["backlight"], logits["eager"], "logits")


# --- refusals ----------------------------------------------------------------------------------------------------------------


def refused(model: nn.Module, message: str, **options: Any) -> None:
    model.set_attn_implementation("backlight")
    with pytest.raises(NotImplementedError, match=message):
        model(torch.randint(VOCABULARY, (B, S)), use_cache=False, **options)


@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
def test_padding_between_keys(name: str) -> None:
    """Packed, rows after a gap would be nearer than they are: with a window or a bias nothing is packed then."""
    model, mask = made((CAUSAL | WITH_POSITION_BIAS)[name]), torch.ones(B, S, dtype=torch.long)
    mask[1, 4:6] = mask[2, :3] = mask[2, 9] = 0
    tokens, options = torch.randint(VOCABULARY, (B, S)), {"attention_mask": mask}
    rows = mask.bool()
    if name == "t5":
        options["decoder_input_ids"], rows = torch.randint(VOCABULARY, (B, S)), torch.ones_like(rows)
    else:
        options["position_ids"] = torch.arange(S).expand(B, S)
    assert_same(both(model, lambda m: m(tokens, use_cache=False, **options).logits[rows]))


def test_padding_beside_a_bias_of_pairs() -> None:
    q, bias = torch.randn(B, 2, S, 8), torch.randn(1, 2, S, S)
    hidden = padding("right") == 0
    y, _ = attention_forward(nn.Module(), q, q, q, attention_mask(B, S, S, attention_mask=~hidden), position_bias=bias)
    seen = torch.ones(S, S, dtype=torch.bool).tril() & ~hidden[:, None, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias.where(seen, -torch.inf))
    assert_close(y[~hidden], want.transpose(1, 2)[~hidden], "output")
    assert not y[hidden].any(), "padded rows are 0"


def test_attention_weights_are_not_formed() -> None:
    """As with sdpa: who asks for them is told, and gets None."""
    q = torch.randn(1, 2, 3, 8)
    with pytest.warns(UserWarning, match="never forms the attention weights: output_attentions gets None"):
        y, weights = attention_forward(nn.Module(), q, q, q, None, output_attentions=True)
    assert weights is None
    assert torch.equal(y, attention_forward(nn.Module(), q, q, q, None)[0])
    model = made(llama)
    model.set_attn_implementation("backlight")
    with pytest.warns(UserWarning, match="needs 'eager'"):
        model(torch.randint(VOCABULARY, (B, S)), output_attentions=True)


def test_biases_that_are_not_by_distance_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="depend on distance alone"):
        by_distance(torch.randn(1, 2, 4, 4))
    with pytest.raises(NotImplementedError, match="one position bias for the whole batch"):
        by_distance(torch.zeros(2, 2, 4, 4))


@pytest.mark.parametrize("batch", [1, 2])
def test_biases_of_pairs(batch: int) -> None:
    """A position bias that is not by distance, or whose module does not say so, is a pair bias, with a gradient."""
    q, bias = torch.randn(2, 2, 4, 8), torch.randn(batch, 2, 4, 4, requires_grad=True)
    y, _ = attention_forward(nn.Module(), q, q, q, None, is_causal=False, position_bias=bias)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    torch.testing.assert_close(y.transpose(1, 2), wanted)
    found, want = (torch.autograd.grad(x.square().sum(), bias)[0] for x in (y, wanted))
    torch.testing.assert_close(found, want)
    mask = torch.randn(2, 1, 4, 4)
    both, _ = attention_forward(nn.Module(), q, q, q, mask, position_bias=bias)
    added = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias + mask)
    torch.testing.assert_close(both.transpose(1, 2), added)
    numbers = torch.zeros(2, 1, 1, 8, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="packed sequences beside a bias of pairs must be given as a dense mask"):
        attention_forward(nn.Module(), q, q, q, numbers, is_causal=False, position_bias=bias)


@pytest.mark.parametrize(("sq", "sk"), [(4, 4), (2, 5), (5, 2), (1, 3), (3, 1)])
def test_table_of_a_dense_bias(sq: int, sk: int) -> None:
    table = torch.randn(2, sq + sk - 1)
    distance = torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)
    dense = table[:, distance + sq - 1][None]
    assert torch.equal(by_distance(dense), table)
