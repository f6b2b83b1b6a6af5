"""One process of the FSDP2 test: a sharded model takes the steps of an unsharded one. Arguments: rank, world size, store."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from backlight.nn import Attention, LazyAttention

DIM = 16


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(LazyAttention(DIM, 4, kv_heads=2, distances=6, sink=True), Attention(DIM, 4, gate=True, qk_norm=True))


def main(rank: int, world: int, store: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=600)
    )
    plain, sharded = model(), model()
    mesh = init_device_mesh("cpu", (world,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, sharded)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(2 * world, 9, DIM, generator=generator)
        plain(x).square().mean().backward()
        sharded(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, want), got in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want, atol=1e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    dist.destroy_process_group()
    Path(f"{store}.{rank}").write_text("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
