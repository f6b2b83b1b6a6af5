"""Code written for FlashAttention or for Lazy Attention's own kernel: change the import, keep the call."""

import torch

from backlight.compat import flash_attn_func, flash_attn_varlen_func, lazy_attention

torch.manual_seed(0)

# FlashAttention: [B, S, H, D], window (-1 = open), ALiBi slopes (which here get a gradient)
q, k, v = (torch.randn(2, 64, heads, 32, requires_grad=True) for heads in (8, 2, 2))
slopes = torch.full((8,), 0.1, requires_grad=True)
out = flash_attn_func(q, k, v, causal=True, window_size=(31, -1), alibi_slopes=slopes)
out.sum().backward()
assert slopes.grad is not None
assert (slopes.grad != 0).all()

cu = torch.tensor([0, 20, 64], dtype=torch.int32)
packed = flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 44, 44, causal=True)
print("flash_attn_func", tuple(out.shape), "flash_attn_varlen_func", tuple(packed.shape))

# Lazy Attention: [B, H, S, D], bias [H, n], tau [H], right padding by lengths
q, k, v = (torch.randn(2, 4, 50, 32, requires_grad=True) for _ in range(3))
bias, tau = torch.zeros(4, 16, requires_grad=True), torch.full((4,), -0.5, requires_grad=True)
y = lazy_attention(q, k, v, bias, tau, varlen=torch.tensor([50, 31]))
y.sum().backward()
assert (y[1, :, 31:] == 0).all(), "padded rows are zero"
print("lazy_attention", tuple(y.shape))
