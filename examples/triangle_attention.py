"""An AlphaFold-style triangle attention layer, trained for some steps: which points belong together, from some of their pairs.

Entry (i, j) of a pair representation looks at the entries (i, k) of its row, and the pair (j, k) says how much, through a bias
that all rows share: a dense pair bias [B, 1, H, N, N] beside q [B, N, H, N, D]. Its gradient is what trains that projection.
"""

import torch
from torch import Tensor, nn

import backlight

POINTS, GROUPS, CHANNELS, HEADS, STEPS = 12, 3, 16, 2, 80


class TriangleAttention(nn.Module):
    """Around the starting node; the ending node is the same on the transposed representation."""

    def __init__(self, channels: int, heads: int, starting: bool = True):
        super().__init__()
        self.heads, self.starting = heads, starting
        self.norm = nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.pair_bias = nn.Linear(channels, heads, bias=False)
        self.gate = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, z: Tensor) -> Tensor:
        """[B, N, N, C] -> [B, N, N, C]."""
        x = self.norm(z if self.starting else z.transpose(1, 2))
        # [B, N, H, N, D] each: N rows of the representation, each a sequence of N entries
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        gate = self.gate(x).unflatten(-1, (self.heads, -1)).transpose(2, 3)
        # [B, 1, H, N, N]: a view, which the N rows share
        bias = self.pair_bias(x).permute(0, 3, 1, 2)[:, None]
        y = self.out(backlight.attention(q, k, v, pair_bias=bias, gate=gate).transpose(2, 3).flatten(3))
        return y if self.starting else y.transpose(1, 2)


class Together(nn.Module):
    """What is known of pairs in, a logit for every pair out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, CHANNELS)
        self.layers = nn.ModuleList([TriangleAttention(CHANNELS, HEADS, starting) for starting in (True, False)])
        self.read = nn.Sequential(nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 1))

    def forward(self, together: Tensor, known: Tensor) -> Tensor:
        z = self.embed(torch.stack([together & known, known], dim=-1).float())
        for layer in self.layers:
            z = z + layer(z)
        return self.read(z)[..., 0]


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    """Which points are of one group [B, N, N], and which of these pairs are known, one way and the other."""
    group = torch.randint(GROUPS, (size, POINTS))
    known = (torch.rand(size, POINTS, POINTS) < 0.6).triu()
    return group[:, :, None] == group[:, None], known | known.mT


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Together()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        together, known = batch_of(16)
        logits = model(together, known)
        loss = nn.functional.binary_cross_entropy_with_logits(logits[~known], together[~known].float())
        optimizer.zero_grad()
        loss.backward()
        assert all((layer.pair_bias.weight.grad != 0).any() for layer in model.layers), "the pair bias is learned"
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0 or step == STEPS - 1:
            right = ((logits > 0) == together)[~known].float().mean().item()
            print(f"step {step}: loss of unknown pairs {losses[-1]:.3f}, {right:.0%} right")
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), "it learns"
