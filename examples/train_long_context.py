"""Train on sequences cut over several processes: the same loss curve as one process that holds them whole.

    torchrun --nproc-per-node 2 examples/train_long_context.py        two processes, on GPUs if there are two, else on the CPU
    python examples/train_long_context.py                             one process

What context parallel asks of a training loop is marked: cut the inputs, give the positions, add up the gradients.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from backlight.demo.text import Text
from backlight.distributed import context_parallel
from backlight.nn import LazyAttention

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--length", type=int, default=384)
parser.add_argument("--layout", choices=["zigzag", "contiguous"], default="zigzag")
parser.add_argument("--strategy", choices=["auto", "ring", "all_to_all"], default="auto")
arguments = parser.parse_args()


class Model(nn.Module):
    """One block of Lazy Attention: bias by distance and tau are learned like every other parameter."""

    def __init__(self, vocabulary: int, dim: int = 64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.attention = LazyAttention(dim, heads=4, kv_heads=2, distances=32)
        self.read = nn.Linear(dim, vocabulary)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        return self.read(x + self.attention(x, positions=positions))


def losses(text, context=None):
    """The loss of every step. Without a context: one process, whole sequences."""
    torch.manual_seed(0)
    model = Model(len(text.characters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    length, curve = arguments.length, []
    for _ in range(arguments.steps):
        passages = text.batch(2, length, generator).to(device)
        tokens, labels, positions = passages[:, :-1], passages[:, 1:], torch.arange(length, device=device)
        if context is not None:
            # every process draws the same passages and keeps its part; labels were shifted before the cut
            tokens, labels = context.shard(tokens, 1), context.shard(labels, 1)
            positions = context.positions(length, device=device)
        total = cross_entropy(model(tokens, positions).flatten(0, 1), labels.flatten(), reduction="sum")
        # a share of the mean over the whole sequence, not the mean of a share
        loss = total / passages[:, 1:].numel()
        loss.backward()
        if context is not None:
            # the only other communication: gradients and the loss are sums over the processes
            for tensor in (*(parameter.grad for parameter in model.parameters()), loss.detach()):
                dist.all_reduce(tensor)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


if "RANK" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29577"}
on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))

text = Text.alice()
# the training loop reduces all gradients alike, so the learned terms keep their shares (sum_learned=False)
with context_parallel(mesh, arguments.layout, strategy=arguments.strategy, sum_learned=False) as context:
    cut = losses(text, context)
whole = losses(text)
if mesh.get_rank() == 0:
    print(f"{context.world} processes, {len(context.positions(arguments.length))} tokens here, layout {context.layout}")
    for step, (sharded, one) in enumerate(zip(cut, whole, strict=True)):
        print(f"step {step:3d}   loss {sharded:.5f}   one process {one:.5f}   difference {abs(sharded - one):.1e}")
    worst = max(abs(a - b) for a, b in zip(cut, whole, strict=True))
    print(f"largest difference {worst:.1e}")
    assert worst < 1e-4, "the curves differ"
dist.destroy_process_group()
