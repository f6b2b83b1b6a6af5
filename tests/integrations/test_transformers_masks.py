"""attn_implementation="backlight" with masks that become row intervals: outputs and all gradients against "eager".

Eager gives rows that see nothing a weight on every key; they are padding, and no output that counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test` brings it)")

from small_models import (  # noqa: E402
    HEADS,
    SMALL,
    VOCABULARY,
    B,
    S,
    assert_close,
    assert_same,
    both,
    gpt_oss,
    llama,
    made,
    mistral,
    padding,
    t5,
)

import backlight  # noqa: E402
from backlight import mask as masks  # noqa: E402
from backlight.integrations.transformers import attention_forward, attention_mask, given, register  # noqa: E402

# transformers looks into allocators of its own
pytestmark = pytest.mark.clean_memory

PLACES = torch.arange(S)
CAUSAL = PLACES[:, None] >= PLACES


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    register()


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keywords of every call that the interface makes."""
    found: list[dict[str, Any]] = []
    honest = backlight.attention

    def attention(*tensors: Tensor, **keywords: Any) -> Any:
        found.append(keywords)
        return honest(*tensors, **keywords)

    monkeypatch.setattr(backlight, "attention", attention)
    return found


def vision(text: Any) -> dict[str, Any]:
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"image_size": 8, "patch_size": 4, "vision_use_head": False}
    return {"text_config": text, "vision_config": transformers.SiglipVisionConfig(**tower), "image_token_index": VOCABULARY - 1}


def gemma3() -> nn.Module:
    """A window of 4 in one layer and none in the other; images see all of themselves in both."""
    text = transformers.Gemma3TextConfig(**SMALL, **HEADS, sliding_window=4, query_pre_attn_scalar=8)
    text.layer_types = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3Config(**vision(text), mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def paligemma() -> nn.Module:
    text = transformers.GemmaConfig(**SMALL, **HEADS)
    config = transformers.PaliGemmaConfig(**vision(text), projection_dim=32, hidden_size=32)
    return transformers.PaliGemmaForConditionalGeneration(config)


def image_types() -> Tensor:
    """1 where a token belongs to an image, for every batch entry others."""
    types = torch.zeros(B, S, dtype=torch.long)
    types[0, 2:5] = types[0, 7:11] = types[1, 4:8] = 1
    return types


def spans() -> Tensor:
    """bool [B, 1, S, S]: causal, and images see all of themselves."""
    types = image_types()
    group = (types.diff(dim=1, prepend=torch.zeros(B, 1, dtype=torch.long)) == 1).cumsum(1).masked_fill(types == 0, -1)
    same = (group[:, :, None] == group[:, None]) & (group >= 0)[:, :, None]
    return (CAUSAL | same)[:, None]


def prefix() -> Tensor:
    lengths = torch.tensor([3, 7, 0])[:, None, None]
    return (CAUSAL | (lengths > PLACES))[:, None]


def documents() -> Tensor:
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    return (CAUSAL & (ids[:, None] == ids))[None, None].expand(B, 1, S, S)


def demonstrations() -> Tensor:
    """Keys 2 to 4 are seen among themselves and by the last rows: two runs."""
    apart = (PLACES >= 2) & (PLACES < 5)
    return (CAUSAL & (~apart | apart[:, None] | (PLACES[:, None] >= 9)))[None, None].expand(B, 1, S, S)


def per_head() -> Tensor:
    """Head h looks back on h + 2 keys."""
    reach = torch.arange(2, 6)[:, None, None]
    return (CAUSAL & (PLACES[:, None] - PLACES < reach))[None].expand(B, 4, S, S)


DENSE: dict[str, Callable[[], Tensor]] = {
    "spans": spans,
    "prefix": prefix,
    "documents": documents,
    "demonstrations": demonstrations,
    "per head": per_head,
}


def additive(visible: Tensor, hidden: float) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, hidden)


def logits(mask: Any, **options: Any) -> Callable[[nn.Module], Tensor]:
    """Eager adds its mask to the scores, so it gets the float one of a boolean one."""
    tokens = torch.randint(VOCABULARY - 1, (B, S))

    def forward(model: nn.Module) -> Tensor:
        eager = model.config._attn_implementation == "eager"
        own = additive(mask, -torch.inf) if eager and mask.dtype == torch.bool else mask
        return model(tokens, attention_mask=own, use_cache=False, **options).logits

    return forward


# --- dense masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_dense_masks(name: str, called: list[dict[str, Any]]) -> None:
    assert_same(both(made(llama), logits(DENSE[name]())))
    assert len(called) == 2
    assert called[0]["mask"] is called[1]["mask"], "both layers have the same intervals"


@pytest.mark.parametrize("make", [gpt_oss, mistral], ids=["gpt-oss", "mistral"])
def test_dense_masks_replace_the_window(make: Callable[[], nn.Module]) -> None:
    """A mask that is given says everything: the window of a layer is not applied a second time, in any implementation."""
    assert_same(both(made(make), logits(spans())))


def test_dense_masks_as_sdpa_takes_them() -> None:
    model, forward = made(llama), logits(spans())
    model.set_attn_implementation("sdpa")
    wanted = forward(model)
    model.set_attn_implementation("backlight")
    assert_close(forward(model), wanted, "logits")


@pytest.mark.parametrize("hidden", [-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min])
def test_float_masks(hidden: float) -> None:
    assert_same(both(made(llama), logits(additive(prefix(), hidden))))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_as_a_dense_mask(side: str) -> None:
    real = padding(side).bool()
    forward = logits(additive(CAUSAL & real[:, None, None], torch.finfo(torch.float32).min))
    assert_same(both(made(llama), lambda m: forward(m)[real]))


def test_one_row_for_all() -> None:
    """[B, 1, 1, Sk], as encoders have it: every row sees the same keys."""
    real = padding("right").bool()
    assert_same(both(made(llama), logits(real[:, None, None])))


def test_dense_mask_with_a_position_bias() -> None:
    """T5's decoder with spans, its table of distances learned."""
    tokens, answer = torch.randint(VOCABULARY, (B, S)), torch.randint(VOCABULARY, (B, S))
    options = {"input_ids": tokens, "decoder_input_ids": answer, "use_cache": False}
    mask = additive(spans(), -torch.inf)
    assert_same(both(made(t5), lambda m: m(**options, decoder_attention_mask=mask).logits))


def test_dense_mask_of_the_last_rows() -> None:
    """Rows of a mask are those of q, whatever the cache holds."""
    model, tokens, mask = made(llama).eval(), torch.randint(VOCABULARY, (B, S)), demonstrations()
    model.set_attn_implementation("backlight")
    whole = model(tokens, attention_mask=mask, use_cache=False).logits
    first = model(tokens[:, :7], attention_mask=mask[:, :, :7, :7], use_cache=True)
    rest = model(tokens[:, 7:], attention_mask=mask[:, :, 7:], past_key_values=first.past_key_values).logits
    assert_close(torch.cat([first.logits, rest], dim=1), whole, "logits")


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (CAUSAL, (True, None)),
        (torch.ones(S, S, dtype=torch.bool), (False, None)),
        (CAUSAL & ~CAUSAL.tril(-4), (True, (3, 0))),
        (torch.ones(S, S).tril(2).bool(), (False, (None, 2))),
        (torch.ones(S, S).tril(2).triu(-3).bool(), (False, (3, 2))),
        (CAUSAL[5:], (True, None)),
        ((CAUSAL & ~CAUSAL.tril(-4))[5:], (True, (3, 0))),
        (CAUSAL[-1:], (False, None)),
    ],
)
def test_geometry_is_recognised(mask: Tensor, expected: tuple[Any, Any], called: list[dict[str, Any]]) -> None:
    """A dense mask that is causal, a window or nothing at all costs no intervals."""
    sq = mask.shape[0]
    q, k, v = torch.randn(B, 4, sq, 8), torch.randn(B, 2, S, 8), torch.randn(B, 2, S, 8)
    y, _ = attention_forward(nn.Module(), q, k, v, mask[None, None])
    (keywords,) = called
    assert (keywords["causal"], keywords["window"]) == expected
    assert "mask" not in keywords
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert_close(y, wanted.transpose(1, 2), "output")


def test_a_mask_that_is_almost_causal() -> None:
    """One key more in one batch entry: no window."""
    mask = CAUSAL[None, None].repeat(B, 1, 1, 1)
    mask[2, 0, 3, 4] = True
    assert_same(both(made(llama), logits(mask)))


def test_intervals_are_found_once_and_again_when_a_mask_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made_of: list[Tensor] = []
    honest = given.from_dense
    monkeypatch.setattr(given, "from_dense", lambda visible: made_of.append(visible) or honest(visible))
    model, mask, tokens = made(llama), spans(), torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("backlight")
    before = model(tokens, attention_mask=mask).logits
    assert len(made_of) == 1
    model(tokens, attention_mask=mask)
    assert len(made_of) == 1
    mask.copy_(prefix())
    after = model(tokens, attention_mask=mask).logits
    assert len(made_of) == 2
    assert not torch.equal(after, before)
    assert torch.equal(after, model(tokens, attention_mask=mask.clone()).logits)
    made_of.clear()
    kept = len(given._known)
    del mask
    gc.collect()
    assert len(given._known) < kept, "a mask that is gone is forgotten"


def test_masks_of_inference_mode_are_read_again() -> None:
    model, tokens = made(llama), torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("backlight")
    with torch.inference_mode():
        mask = spans()
        model(tokens, attention_mask=mask)
        mask.copy_(prefix())
        got = model(tokens, attention_mask=mask).logits
    assert_close(got, model(tokens, attention_mask=prefix()).logits, "logits")


def test_padding_that_changed_in_place_is_packed_again() -> None:
    """Numbers of rows and keys were packed as they had been first."""
    q, k, real = torch.randn(B, 4, S, 8), torch.randn(B, 2, S, 8), torch.ones(B, S, dtype=torch.bool)
    real[:, :2] = False
    mask = attention_mask(B, S, S, attention_mask=real)
    assert mask is not None
    before, _ = attention_forward(torch.nn.Module(), q, k, k, mask)
    mask.copy_(attention_mask(B, S, S, attention_mask=real.roll(1, dims=1)))
    after, _ = attention_forward(torch.nn.Module(), q, k, k, mask)
    assert not torch.equal(after, before)
    assert torch.equal(after, attention_forward(torch.nn.Module(), q, k, k, mask.clone())[0])


# --- intervals, given as such ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_intervals_are_taken_as_they_are(name: str) -> None:
    model, tokens, dense = made(llama), torch.randint(VOCABULARY, (B, S)), DENSE[name]()
    model.set_attn_implementation("backlight")
    wanted = model(tokens, attention_mask=dense).logits
    assert torch.equal(model(tokens, attention_mask=masks.from_dense(dense).rows).logits, wanted)


def test_compiled_intervals() -> None:
    """A graph takes any intervals, made before it, and dense masks, whose values it cannot look at, as a bias of pairs."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(B, heads, S, 8) for heads in (4, 2, 2))
    module = nn.Module()
    compiled = torch.compile(lambda mask: attention_forward(module, q, k, v, mask)[0], fullgraph=True, backend="aot_eager")
    for dense in (spans(), prefix()):
        got = compiled(masks.from_dense(dense).rows)
        want = attention_forward(module, q, k, v, dense)[0]
        assert_close(got, want, "output")
        for same in (dense, additive(dense, -torch.inf)):
            assert_close(compiled(same), want, "dense")
    torch._dynamo.reset()


# --- mask functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("make", [gemma3, paligemma], ids=["gemma3", "paligemma"])
def test_images_in_a_text(make: Callable[[], nn.Module], padded: str | None) -> None:
    """Gemma 3's images, and PaliGemma's prompt, which all of its rows see; the models make these masks themselves."""
    model, tokens = made(make), torch.randint(VOCABULARY - 1, (B, S))
    types = image_types() if make is gemma3 else (torch.tensor([3, 7, 9])[:, None] <= PLACES).long()
    mask = None if padded is None else padding(padded)
    real = torch.ones(B, S, dtype=torch.bool) if mask is None else mask.bool()

    def forward(model: nn.Module) -> Tensor:
        return model(tokens, attention_mask=mask, token_type_ids=types, use_cache=False).logits[real]

    assert_same(both(model, forward))
    spanned, types = forward(model), torch.full_like(types, make is paligemma)
    assert not torch.allclose(spanned, forward(model)), "the spans make a difference"


@torch.no_grad()
def test_generation_after_images() -> None:
    """Masks are made early there, once with all of the prompt and then with one row, and handed to the model as finished."""
    model, tokens, types = made(gemma3).eval(), torch.randint(1, VOCABULARY - 1, (B, S)), image_types()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = {}
    for implementation in ("eager", "backlight"):
        model.set_attn_implementation(implementation)
        text = model.generate(tokens, token_type_ids=types, **options, return_dict_in_generate=True, output_logits=True)
        found[implementation] = torch.stack(text.logits)
    assert_close(found["backlight"], found["eager"], "logits")


@pytest.mark.parametrize("padded", [False, True])
def test_mask_functions(padded: bool) -> None:
    """Chunks (Llama 4), alternatives and functions of a model's own, with rows and keys counted from elsewhere."""
    from transformers.masking_utils import and_masks, causal_mask_function, chunked_causal_mask_function, or_masks, sdpa_mask

    gone = torch.tensor([12, 3, 12, 12, 6, 12, 9, 12, 12, 12, 12, 12])
    functions = (
        chunked_causal_mask_function(4, torch.tensor([0, 1, 2])),
        or_masks(causal_mask_function, lambda b, h, q, k: k < 2),
        and_masks(causal_mask_function, lambda b, h, q, k: q < gone[k]),
    )
    real = padding("left").bool() if padded else None
    for function in functions:
        for sizes in ({"q_length": S, "kv_length": S}, {"q_length": 3, "kv_length": 8, "q_offset": 7, "kv_offset": 2}):
            options = {"batch_size": B, **sizes, "mask_function": function, "attention_mask": real}
            rows = attention_mask(**options)
            assert rows.dtype == torch.int32
            found = masks.Mask(rows).dense(sizes["q_length"]).expand(B, 1, -1, -1)
            assert torch.equal(found, sdpa_mask(**options, use_vmap=True, allow_is_causal_skip=False))


# --- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [None, -torch.inf, -1e9, 0.5])
def test_dense_masks_that_are_a_bias_of_pairs(hidden: float | None) -> None:
    """Three runs of rows, which no intervals say, and numbers that hide nothing, or not quite."""
    dilated = ((PLACES[:, None] - PLACES) % 4 == 0)[None, None].expand(B, 1, S, S)
    assert_same(both(made(llama), logits(dilated if hidden is None else additive(dilated, hidden))))


def test_the_gradient_of_a_dense_mask() -> None:
    """One that a model learns, or adds a learned bias to."""
    q, mask = torch.randn(B, 2, S, 8), torch.randn(1, 2, S, S, requires_grad=True)
    y, _ = attention_forward(torch.nn.Module(), q, q, q, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    found, want = (torch.autograd.grad(x.square().sum(), mask)[0] for x in (y, wanted))
    torch.testing.assert_close(found, want)


def test_three_runs_of_a_function_stay_dense() -> None:
    def every_fourth(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k) % 4 == 0

    found = attention_mask(1, S, S, mask_function=every_fourth)
    assert torch.equal(found, every_fourth(None, None, PLACES[:, None], PLACES)[None, None])


def test_masks_of_other_shapes_are_refused() -> None:
    model, tokens = made(llama), torch.randint(VOCABULARY, (B, S))
    model.set_attn_implementation("backlight")
    for mask, message in (
        (spans()[..., :-1], r"got a mask of shape \(3, 1, 12, 11\) and torch\.bool"),
        (spans().long(), r"got a mask of shape \(3, 1, 12, 12\) and torch\.int64"),
        (spans().int(), r"got a mask of shape \(3, 1, 12, 12\) and torch\.int32"),
        (spans().expand(B, 3, S, S), r"shape \(3, 3, 12, 12\)"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            model(tokens, attention_mask=mask)
    cu = torch.tensor([0, 3, S], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="not both"):
        model(tokens[:1], attention_mask=spans()[:1], cu_seq_lens_q=cu, cu_seq_lens_k=cu)


@pytest.mark.parametrize("cached", [7, 8])
def test_a_step_has_one_row_of_a_dense_mask_whether_or_not_the_cache_is_full(cached: int) -> None:
    """Exporters join the masks of two steps."""
    from transformers.masking_utils import causal_mask_function

    seen = torch.ones(2, cached + 1, dtype=torch.long)
    seen[0, :3] = 0
    mask = attention_mask(2, 1, 9, cached, 0, causal_mask_function, seen)
    assert mask is not None
    want = torch.zeros(2, 9, dtype=torch.bool)
    want[:, : cached + 1] = seen.bool()
    assert torch.equal(mask, want[:, None, None])
