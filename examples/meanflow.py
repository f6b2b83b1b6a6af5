"""Train a small MeanFlow model on two moons and draw what it samples in one step. Its loss needs forward mode of attention.

    python examples/meanflow.py                      2000 steps, minutes on a CPU
    python examples/meanflow.py --steps 20           a look

The model u(z, r, t) is the mean velocity between the times r and t of a path from data (0) to noise (1). Its target holds the
derivative of u along the path, one `torch.func.jvp` of the whole model; the target is detached, so that the backward is the
ordinary one.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import jvp

from backlight.nn import Attention

TOKENS, DIM, BATCH = 4, 32, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention(DIM, heads=2, rope=None, causal=False)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class MeanVelocity(nn.Module):
    """Of points [B, 2] and times [B, 1]; a point is spread over tokens, which attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(4, 16) * torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None])
        self.embed, self.read = nn.Linear(36, TOKENS * DIM), nn.Linear(TOKENS * DIM, 2)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        given = torch.cat([z, t, t - r], dim=-1)
        phase = given @ self.waves
        x = self.embed(torch.cat([given, phase.sin(), phase.cos()], dim=-1))
        return self.read(self.blocks(x.unflatten(-1, (TOKENS, DIM))).flatten(-2))


def two_moons(n: int) -> Tensor:
    angle, lower = math.pi * torch.rand(n), torch.rand(n) < 0.5
    x, y = angle.cos() - 0.5, angle.sin() - 0.25
    points = torch.stack([torch.where(lower, -x, x), torch.where(lower, -y, y)], dim=-1)
    return 1.3 * points + 0.08 * torch.randn(n, 2)


def loss_of(model: MeanVelocity) -> Tensor:
    data, noise = two_moons(BATCH), torch.randn(BATCH, 2)
    t, r = torch.rand(2, BATCH, 1).sort(dim=0, descending=True).values
    r = torch.where(torch.rand(BATCH, 1) < 0.5, t, r)
    z, velocity = (1 - t) * data + t * noise, noise - data
    u, along = jvp(model, (z, r, t), (velocity, torch.zeros_like(r), torch.ones_like(t)))
    error = (u - (velocity - (t - r) * along).detach()).square().sum(dim=-1)
    return (error / (error.detach() + 0.01)).mean()


@torch.no_grad()
def sample(model: MeanVelocity, n: int) -> Tensor:
    """One step from noise to data."""
    noise, zero = torch.randn(n, 2), torch.zeros(n, 1)
    return noise - model(noise, zero, zero + 1)


def distance(a: Tensor, b: Tensor) -> float:
    """Energy distance of two sets of points, 0 where they are drawn alike."""
    return float(2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean())


def draw(path: Path, data: Tensor, samples: Tensor) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure, axes = plt.subplots(1, 2, figsize=(6, 3), sharex=True, sharey=True)
    for axis, points, title in zip(axes, (data, samples), ("data", "one step from noise"), strict=True):
        axis.scatter(*points.T, s=3, linewidths=0)
        axis.set(title=title, aspect="equal", xlim=(-2.6, 2.6), ylim=(-2.2, 2.2))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"picture: {path}")


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--out", type=Path, default=Path("reports") / "meanflow" / "samples.png")
arguments = parser.parse_args()

torch.manual_seed(arguments.seed)
model = MeanVelocity()
averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
data = two_moons(1000)
print(f"step 0: energy distance of one-step samples {distance(sample(model, 1000), data):.4f}")
for step in range(1, arguments.steps + 1):
    optimizer.zero_grad()
    loss_of(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    averaged.update_parameters(model)
    if step % 500 == 0 or step == arguments.steps:
        print(f"step {step}: energy distance of one-step samples {distance(sample(averaged, 1000), data):.4f}", flush=True)
draw(arguments.out, data, sample(averaged, 1000))
