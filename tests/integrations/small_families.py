"""A small random model of each family, and a batch to train it with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from small_models import CAUSAL, HEADS, SMALL, VOCABULARY, WITH_POSITION_BIAS, B, S, padding, transformers
from torch import Tensor, nn

MELS, ANSWER = 8, 7
SIDE, PATCH, LABELS = 12, 4, 5
IMAGE = VOCABULARY - 1
# as a label: the row counts for nothing
IGNORED = -100


def qwen3() -> nn.Module:
    """Norms of q and k; a window of 4 in the second layer."""
    config = transformers.Qwen3Config(**SMALL, **HEADS, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return transformers.Qwen3ForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def gemma3() -> nn.Module:
    """An image of four tokens that see each other, a window of 4 in one layer and none in the other."""
    text = transformers.Gemma3TextConfig(
        **SMALL, **HEADS, sliding_window=4, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
    )
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=PATCH,
        vision_use_head=False,
    )  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE)
    return transformers.Gemma3ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(**SMALL, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=SIDE, patch_size=PATCH, num_labels=LABELS)
    return transformers.ViTForImageClassification(config)


def whisper() -> nn.Module:
    """S frames after the encoder's convolutions."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=MELS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=S, max_target_positions=30,
        dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def tokens(length: int) -> Tensor:
    return torch.randint(3, IMAGE, (B, length))


def text() -> dict[str, Tensor]:
    words, mask = tokens(S), padding("right")
    assert mask is not None
    return {"input_ids": words, "attention_mask": mask, "labels": words.masked_fill(mask == 0, IGNORED)}


def translation() -> dict[str, Tensor]:
    return text() | {"labels": tokens(ANSWER)}


def images_in_text() -> dict[str, Tensor]:
    words = tokens(S)
    words[:, 1:5] = IMAGE
    types = (words == IMAGE).long()
    return {"input_ids": words, "token_type_ids": types, "pixel_values": torch.randn(B, 3, 8, 8), "labels": words}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, SIDE, SIDE), "labels": torch.randint(LABELS, (B,))}


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(B, MELS, 2 * S), "labels": tokens(ANSWER)}


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    **{name: (make, text) for name, make in CAUSAL.items()},
    "qwen3": (qwen3, text),
    "mixtral": (mixtral, text),
    "gemma3": (gemma3, images_in_text),
    "t5": (WITH_POSITION_BIAS["t5"], translation),
    "bert": (bert, text),
    "vit": (vit, images),
    "whisper": (whisper, speech),
}
GENERATING = [name for name in FAMILIES if name not in ("bert", "vit")]
MIXTURES = ("gpt-oss", "mixtral")
