"""Attention dropout runs on torch's own attention: the same weights are dropped as with "eager", and the call is counted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")

from small_models import (  # noqa: E402
    CAUSAL,
    SIDES,
    SMALL,
    VOCABULARY,
    WITH_POSITION_BIAS,
    B,
    S,
    assert_same,
    both,
    made,
    padding,
)

from backlight.integrations.transformers import attention_forward, fallbacks, register  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory

COUNTED = "attention dropout is not 0"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    register()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no kernel with attention dropout")
        fallbacks.clear()
        yield


def dropping(model: nn.Module, share: float = 0.3) -> nn.Module:
    """The model with dropout in its attention, and nowhere else: "eager" and ours then draw the same numbers."""
    for module in model.modules():
        for name in ("attention_dropout", "dropout"):
            if "Attention" in type(module).__name__ and isinstance(getattr(module, name, None), float):
                setattr(module, name, share)
    return model


def seeded(model: nn.Module, tokens: Tensor, rows: Tensor, **options: Tensor | None) -> Tensor:
    torch.manual_seed(2)
    return model(tokens, use_cache=False, **options).logits[rows]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CAUSAL)
def test_the_same_weights_are_dropped_as_with_eager(name: str, side: str) -> None:
    model, mask, tokens = dropping(made(CAUSAL[name])), padding(side), torch.randint(VOCABULARY, (B, S))
    rows = torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool()
    assert_same(both(model, lambda m: seeded(m, tokens, rows, attention_mask=mask)))
    assert fallbacks == {COUNTED: SMALL["num_hidden_layers"]}


@pytest.mark.parametrize("side", SIDES)
def test_position_biases(side: str) -> None:
    model, mask, tokens = dropping(made(WITH_POSITION_BIAS["t5"])), padding(side), torch.randint(VOCABULARY, (B, S))
    decoder = torch.randint(VOCABULARY, (B, 7))
    rows = torch.ones(B, 7, dtype=torch.bool)
    assert_same(both(model, lambda m: seeded(m, tokens, rows, attention_mask=mask, decoder_input_ids=decoder)))
    assert fallbacks[COUNTED] == 6


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt-oss"])
def test_packed_sequences(name: str) -> None:
    """One row of three sequences: positions that begin again."""
    model, lengths = dropping(made(CAUSAL[name])), (5, 3, 9)
    tokens, rows = torch.randint(VOCABULARY, (1, sum(lengths))), torch.ones(1, sum(lengths), dtype=torch.bool)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    assert_same(both(model, lambda m: seeded(m, tokens, rows, position_ids=positions)))
    assert fallbacks[COUNTED] == 2


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_borders_say_what_a_dense_mask_says(causal: bool, window: int | None) -> None:
    """Without a gradient to look at, dropout of almost nothing shows the mask."""
    q, k = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 14, 8)
    cu_q, cu_k = torch.tensor([0, 4, 4, 11]), torch.tensor([0, 3, 6, 14])
    options = {"is_causal": causal, "sliding_window": window, "cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k}
    want, _ = attention_forward(nn.Module(), q, k, k, None, **options)
    got, _ = attention_forward(nn.Module(), q, k, k, None, dropout=1e-9, **options)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", ["bool", "float", "intervals", "none"])
def test_masks_of_rows_and_keys(kind: str, softcap: float | None) -> None:
    q, k, bias = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 9, 8), torch.randn(1, 4, 6, 9)
    seen = torch.rand(2, 1, 6, 9) > 0.3
    seen[1, :, 2] = False
    masks = {"bool": seen, "float": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf), "none": None}
    masks["intervals"] = torch.tensor([0, 4], dtype=torch.int32).reshape(1, 1, 2, 1).repeat(2, 1, 1, 9)
    options = {"softcap": softcap, "position_bias": bias, "is_causal": False}
    want, _ = attention_forward(nn.Module(), q, k, k, masks[kind], **options)
    got, _ = attention_forward(nn.Module(), q, k, k, masks[kind], dropout=1e-9, **options)
    torch.testing.assert_close(got, want)


def test_a_warning_says_that_torchs_own_attention_runs() -> None:
    model, tokens = dropping(made(CAUSAL["llama"])), torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("backlight")
    with pytest.warns(UserWarning, match="no kernel with attention dropout: training with it runs on torch's own"):
        model(tokens)


def test_evaluation_is_ours() -> None:
    model, tokens = dropping(made(CAUSAL["llama"])).eval(), torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("backlight")
    model(tokens)
    assert not fallbacks


def test_bert_trains_with_its_own_dropout() -> None:
    config = transformers.BertConfig(**SMALL, num_attention_heads=4, attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.0)
    model, mask, tokens = (
        made(lambda: transformers.BertForMaskedLM(config)),
        padding("right"),
        torch.randint(VOCABULARY, (B, S)),
    )
    model.gradient_checkpointing_enable()

    def forward(m: nn.Module) -> Tensor:
        torch.manual_seed(2)
        return m(tokens, attention_mask=mask).logits[mask.bool()]

    found = both(model, forward)
    for _, grads in found.values():
        # a constant along the keys changes no weight: what comes out is rounding
        for name in [name for name in grads if name.endswith("key.bias")]:
            assert grads.pop(name).norm() < 1e-6
    assert_same(found)
    assert fallbacks[COUNTED] >= 2


def test_graphs() -> None:
    model, tokens = dropping(made(CAUSAL["mistral"])), torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("backlight")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(3)
    want = model(tokens, attention_mask=padding("left"), use_cache=False).logits
    torch.manual_seed(3)
    got = compiled(tokens, attention_mask=padding("left"), use_cache=False).logits
    torch.testing.assert_close(got, want)
