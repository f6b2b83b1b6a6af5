"""A Hugging Face model on backlight: one call registers it, one argument chooses it. Here with attention sinks and padding."""

import torch

from backlight.integrations.transformers import register

try:
    from transformers import GptOssConfig, GptOssForCausalLM
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers") from None

register()
torch.manual_seed(0)
config = GptOssConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=2,
    num_experts_per_tok=1,
    sliding_window=8,
)
model = GptOssForCausalLM(config)
tokens = torch.randint(64, (2, 20))
mask = torch.ones_like(tokens)
mask[1, :5] = 0

logits = {}
for implementation in ("eager", "backlight"):
    model.set_attn_implementation(implementation)
    logits[implementation] = model(tokens, attention_mask=mask).logits[mask.bool()]

torch.testing.assert_close(logits["backlight"], logits["eager"], atol=1e-4, rtol=1e-4)
logits["backlight"].square().mean().backward()
sinks = model.model.layers[0].self_attn.sinks
assert sinks.grad is not None
assert (sinks.grad != 0).all(), "every head's sink has a gradient"
print("backlight and eager agree; gradient of the sinks:", [f"{value:.1e}" for value in sinks.grad.tolist()])
