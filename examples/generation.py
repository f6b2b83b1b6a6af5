"""Token by token with a cache, and all at once: the same outputs. With a window, the cache forgets what nobody can see."""

import torch

from backlight.nn import KVCache, LazyAttention

torch.manual_seed(0)
layer = LazyAttention(dim=64, heads=4, kv_heads=2, distances=32, window=(47, 0))
x = torch.randn(1, 200, 64)

with torch.inference_mode():
    at_once = layer(x)
    cache = KVCache()
    prompt = layer(x[:, :120], cache=cache)
    steps = [layer(x[:, i : i + 1], cache=cache) for i in range(120, 200)]

torch.testing.assert_close(torch.cat([prompt, *steps], dim=1), at_once)
assert cache.kept <= 48
print(f"{cache.length} keys seen, {cache.kept} kept; step by step and at once agree")
