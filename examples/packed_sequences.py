"""Three sequences packed into one tensor give what each gives alone, without padding and without masks."""

import torch

import backlight

torch.manual_seed(0)
lengths = [5, 17, 42]
cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
q, k, v = (torch.randn(sum(lengths), heads, 32) for heads in (4, 2, 2))

packed = backlight.attention_varlen(q, k, v, cu_seqlens, causal=True)

for sequence in range(len(lengths)):
    rows = slice(cu_seqlens[sequence], cu_seqlens[sequence + 1])
    one = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
    alone = backlight.attention(*one, causal=True)[0].transpose(0, 1)
    torch.testing.assert_close(packed[rows], alone)
print("packed and alone agree for lengths", lengths)
