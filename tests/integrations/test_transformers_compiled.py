"""attn_implementation="backlight" under torch.compile(fullgraph=True): one graph, the numbers of "eager"."""

from __future__ import annotations

from collections.abc import Callable
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
    in_one_graph,
    llama,
    made,
    padding,
    t5,
)

from backlight.integrations.transformers import register  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


def compiled_like(model: nn.Module, forward: Callable[[nn.Module], Tensor], rows: Tensor | None = None) -> None:
    """One graph, whose logits and gradients are those of "eager"."""
    assert_same(both(model, lambda m: forward(m) if rows is None else forward(m)[rows], in_one_graph))


@pytest.mark.parametrize("mask", ["none", "left", *(pytest.param(mask, marks=pytest.mark.slow) for mask in ("ones", "right"))])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_without_a_cache(name: str, mask: str) -> None:
    """Without a cache transformers looks for packed sequences, a window is a closure, a mask is data: each broke the graph."""
    padded = {"none": None, "ones": torch.ones(B, S, dtype=torch.long)}.get(mask, padding(mask) if mask in SIDES else None)
    tokens = torch.randint(VOCABULARY, (B, S))
    rows = None if padded is None else padded.bool()
    compiled_like(made(CAUSAL[name]), lambda m: m(tokens, attention_mask=padded, use_cache=False).logits, rows)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_compiled_by_inductor(name: str, side: str) -> None:
    """It writes the borders of one layer where others were before, without a new version: they must be read again."""
    torch._dynamo.reset()
    model, mask, tokens = made(CAUSAL[name]).eval(), padding(side), torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("eager")
    want = model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    model.set_attn_implementation("backlight")
    got = torch.compile(model, fullgraph=True)(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
    assert_close(got, want, "logits")
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiled_packed_sequences(name: str) -> None:
    """The borders are values of the graph: other borders must not need another one, and must not be those of before."""
    torch._dynamo.reset()
    model, tokens = made(CAUSAL[name]), torch.randint(VOCABULARY, (2, S))
    model.set_attn_implementation("backlight")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths in ([12], [3, 7, 2], [1] * 12):
        positions = torch.cat([torch.arange(length) for length in lengths])[None].expand(2, -1)
        alone = [model(part, use_cache=False).logits for part in tokens.split(lengths, dim=1)]
        got = compiled(tokens, position_ids=positions, use_cache=False).logits
        assert_close(got, torch.cat(alone, dim=1), str(lengths))
    torch._dynamo.reset()


@pytest.mark.parametrize("side", ["no padding", "right"])
def test_compiled_with_position_bias(side: str) -> None:
    mask = padding(side)
    tokens, answer = torch.randint(VOCABULARY, (B, S)), torch.randint(VOCABULARY, (B, 7))
    options = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": answer, "use_cache": False}
    compiled_like(made(t5), lambda m: m(**options).logits)


@pytest.mark.parametrize("name", ["llama", "mistral", "t5"])
@torch.no_grad()
def test_compiled_steps_with_a_static_cache(name: str) -> None:
    """How far the cache is filled is a value of the graph."""
    model, tokens = made((CAUSAL | WITH_POSITION_BIAS)[name]).eval(), torch.randint(1, VOCABULARY, (B, S))
    logits = {}
    for implementation in ("eager", "backlight"):
        torch._dynamo.reset()
        model.set_attn_implementation(implementation)
        options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        options |= {"cache_implementation": "static", "disable_compile": implementation == "eager"}
        options |= {"compile_config": transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)}
        text = model.generate(tokens, **options, return_dict_in_generate=True, output_logits=True)
        logits[implementation] = torch.stack(text.logits)
    torch._dynamo.reset()
    assert_close(logits["backlight"], logits["eager"], "logits")


@pytest.mark.parametrize("name", ["mistral", "t5"])
@torch.no_grad()
def test_compiled_masks_with_gaps(name: str) -> None:
    """What only values tell cannot decide what a graph does: it must be right for every mask."""
    torch._dynamo.reset()
    model, tokens = made((CAUSAL | WITH_POSITION_BIAS)[name]), torch.randint(VOCABULARY, (B, S))
    mask = torch.ones(B, S, dtype=torch.long)
    options: dict[str, Any] = {"use_cache": False, "position_ids": torch.arange(S).expand(B, S)}
    if name == "t5":
        options = {"use_cache": False, "decoder_input_ids": tokens}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for hidden in ((), (4, 5), (0, 3, 11)):
        mask[1, list(hidden)] = 0
        model.set_attn_implementation("eager")
        want = model(tokens, attention_mask=mask, **options).logits
        model.set_attn_implementation("backlight")
        rows = mask.bool() if name != "t5" else ...
        assert_close(compiled(tokens, attention_mask=mask, **options).logits[rows], want[rows], str(hidden))
    torch._dynamo.reset()


def test_compiled_mask_functions_that_are_not_known() -> None:
    """A graph reads a mask function by asking it; what it does not know it must not take for causal: it stays dense."""
    from transformers import masking_utils as masks

    from backlight.integrations.transformers import attention_mask

    left = torch.zeros(B, dtype=torch.long)
    makers = {
        "chunked": lambda: masks.chunked_causal_mask_function(4, left),
        "or": lambda: masks.or_masks(masks.causal_mask_function, masks.causal_mask_function),
        "own": lambda: masks.and_masks(masks.causal_mask_function, lambda b, h, q, k: k >= q - 3),
        "blocks": lambda: masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(torch.full((B, S), -1))),
    }
    for name, make in makers.items():
        for padded in (None, padding("left").bool()):
            torch._dynamo.reset()

            def ask(x: Tensor, make: Callable[[], Any] = make, padded: Tensor | None = padded) -> Any:
                return attention_mask(B, S, S, mask_function=make(), attention_mask=padded), x + 1

            found, _ = torch.compile(ask, fullgraph=True, backend="eager")(torch.ones(1))
            want = masks.sdpa_mask(B, S, S, mask_function=make(), attention_mask=padded, allow_is_causal_skip=False)
            assert torch.equal(found, want), name
    torch._dynamo.reset()

    def hide(x: Tensor) -> Any:
        blocks = masks.blockwise_overlay(torch.full((B, S), -1))
        return attention_mask(B, S, S, mask_function=masks.and_masks(masks.causal_mask_function, blocks)), x + 1

    with pytest.raises(RuntimeError, match="hides a row from itself"):
        torch.compile(hide, fullgraph=True, backend="eager")(torch.ones(1))
    torch._dynamo.reset()


EXPORTED = {"llama": CAUSAL, "mistral": CAUSAL, "gemma2": CAUSAL, "gpt-oss": CAUSAL, "t5": WITH_POSITION_BIAS}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("side", ["no padding", "left"])
@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_exported(name: str, side: str, strict: bool) -> None:
    """torch.export has no values either; without `strict` Python runs, but tensors are fake."""
    model, mask, tokens = made(EXPORTED[name][name]).eval(), padding(side), torch.randint(VOCABULARY, (B, S))
    options: dict[str, Any] = {"input_ids": tokens, "use_cache": False} | ({} if mask is None else {"attention_mask": mask})
    if name == "t5":
        options["decoder_input_ids"] = tokens
    model.set_attn_implementation("eager")
    want = model(**options).logits
    model.set_attn_implementation("backlight")
    # padded rows too: what nobody reads is the same as well
    whole = model(**options).logits
    got = torch.export.export(model, (), options, strict=strict).module()(**options).logits
    assert_close(got, whole, "without export")
    rows = ... if mask is None or name == "t5" else mask.bool()
    assert_close(got[rows], want[rows], "logits")


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    model = made(llama)
    tokens = torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("backlight")
    plain = model(tokens).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens).logits
    torch.testing.assert_close(compiled, plain)
    torch._dynamo.reset()
