"""QK-clip, the other half of MuonClip: logits of attention that grow too large are scaled back where they come from.

With large steps the weights of q and k grow, and with them the logits, until softmax is one-hot and training stalls. After each
step the largest logit of every head (`return_max_logit=True`, no second pass over q and k) says by how much; the weights of
heads above a limit are scaled down by it, half in q and half in k. Other heads are left alone.

    python examples/qk_clip.py                     seconds on a CPU
"""

import torch
from torch import Tensor, nn

import backlight

HEADS, WIDTH, LENGTH, LIMIT = 4, 16, 64, 10.0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH, bias=False) for _ in range(4))
        # of the last call, [HEADS]
        self.max_logit = torch.zeros(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (weight(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for weight in (self.q, self.k, self.v))
        y, self.max_logit = backlight.attention(q, k, v, causal=True, return_max_logit=True)
        return self.out(y.transpose(1, 2).flatten(-2))


@torch.no_grad()
def qk_clip(attention: Attention, limit: float) -> None:
    """Logits are products of q and k: the root of the factor for each.

    With grouped heads k takes the root of the smallest factor of its group, and each q of the group what is left of its own.
    """
    factor = (limit / attention.max_logit).clamp(max=1)
    # a head that sees nothing (-inf), or only negative logits, has nothing to scale down
    factor = torch.where(attention.max_logit > 0, factor, 1.0).sqrt()
    for weight in (attention.q.weight, attention.k.weight):
        weight.unflatten(0, (HEADS, WIDTH)).mul_(factor[:, None, None])


def train(clip: bool, steps: int = 40) -> list[float]:
    """The largest logit of each step: tokens are to be found again among those before, which asks for large logits."""
    torch.manual_seed(0)
    attention, generator = Attention(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(attention.parameters(), lr=0.03)
    found = []
    for _ in range(steps):
        half = torch.randn(8, LENGTH // 2, HEADS * WIDTH, generator=generator)
        x = torch.cat([half, half], dim=1)
        loss = (attention(x)[:, LENGTH // 2 :] - x[:, : LENGTH // 2]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(attention.max_logit.max().item())
        if clip:
            with torch.no_grad():
                attention(x)
            qk_clip(attention, LIMIT)
            with torch.no_grad():
                attention(x)
            assert attention.max_logit.max() <= LIMIT * (1 + 1e-4)
    return found


if __name__ == "__main__":
    free, clipped = train(clip=False), train(clip=True)
    print(f"largest logit of {len(free)} steps: {max(free):.0f} without QK-clip, {max(clipped):.0f} with it (limit {LIMIT:g})")
    assert max(free) > 2 * LIMIT
    assert max(clipped) < 2 * LIMIT
