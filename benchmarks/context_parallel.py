"""Measure the constants of `backlight.distributed.cost` on this machine's CPU, and compare its predictions with real runs.

    python benchmarks/context_parallel.py [--length 2048] [--rounds 8] [--out docs/data/distributed-cpu.json]

Worlds of 1, 2 and 4 Gloo processes with one thread each. Pieces (a block, a message, a sum) and whole calls are timed in turn,
round after round, so that other work on the machine meets all alike; every number is the median over the rounds of the slowest
rank. The model gives each rank a device of its own, so pieces are timed on one rank alone. Here ranks share cores: the same
pieces on all ranks at once say how many cores they really get, and all ranks together cannot be faster than their work
divided by that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import backlight
from backlight import api
from backlight.call import Call, Part, counting_tensors
from backlight.distributed import ContextParallel
from backlight.distributed.autograd import Options, backward
from backlight.distributed.blocks import Shards
from backlight.distributed.cost import Machine, cost, flops
from backlight.distributed.local import block_backward, block_call, block_forward
from backlight.distributed.rule import Shape
from backlight.distributed.simulation import Alone
from backlight.spec import AttentionSpec

WORLDS = (1, 2, 4)
WAYS = (("ring", "zigzag"), ("ring", "contiguous"), ("all_to_all", "zigzag"))
SHAPE = Shape(batch=1, heads=8, kv_heads=4, d=64, dv=64, element=4)
SPEC = AttentionSpec(causal=True)
GRADIENTS = frozenset({"dq", "dk", "dv"})
REPEATS = 10
WIRE = ("latency", "bandwidth")

Work = Callable[[], object]


def inputs(length: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, length, SHAPE.d, generator=generator) for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    ]


def pieces(context: ContextParallel, length: int) -> dict[str, Work]:
    """What the constants come from: a causal block of a shard's size, the smallest block, a sum, messages to the next rank."""
    own = length // context.world
    q, k, v = inputs(own)
    (block,) = Shards(SPEC, "contiguous", 1, own, own).blocks(0, 0)
    (smallest,) = Shards(SPEC, "contiguous", 1, 1, 1).blocks(0, 0)
    part, tiny = (block_call(Call(SPEC, q, k, v), one, k, v, gate=False, part=Part()) for one in (block, smallest))
    lse = block_forward(part, None)[1]
    total, added = torch.zeros_like(q), torch.ones_like(q)
    found: dict[str, Work] = {
        "forward": lambda: block_forward(part, None),
        "backward": lambda: block_backward(part, None, lse, torch.zeros_like(lse), q, GRADIENTS),
        "block": lambda: [block_forward(tiny, None) for _ in range(REPEATS)],
        "memory": lambda: [total.add_(added) for _ in range(REPEATS)],
    }
    together = {f"{name} together": found[name] for name in ("forward", "backward")}
    if context.rank > 0:
        found = {name: lambda: None for name in found}
    found |= together
    if context.world > 1:
        there, back = (context.rank + 1) % context.world, (context.rank - 1) % context.world

        def message(sent: Tensor) -> Work:
            received = torch.empty_like(sent)
            return lambda: context.communicator.exchange([(there, sent)], [(back, received)], "message", 1).wait()

        found |= {"latency": message(torch.zeros(16)), "bandwidth": message(torch.zeros(2 * k.numel()))}
    return found


def calls(world: int, length: int) -> dict[str, Work]:
    """Whole causal calls, forward and backward, of every strategy and layout."""
    found: dict[str, Work] = {}
    for strategy, layout in WAYS:
        context = ContextParallel(init_device_mesh("cpu", (world,)), layout, strategy)
        own = tuple(context.shard(x, 2).contiguous() for x in inputs(length))
        chosen, call, _ = context.prepare(api._bind, own, {"causal": True}, None)
        y, _, kept = chosen.forward(call)
        options = Options(call.spec, counting_tensors(call), False, True)
        found[f"{strategy} {layout} forward"] = lambda chosen=chosen, call=call: chosen.forward(call)
        found[f"{strategy} {layout} backward"] = lambda chosen=chosen, options=options, kept=kept, y=y: backward(
            chosen, options, tuple(kept), y, None, GRADIENTS
        )
    return found


def times(work: dict[str, Work], rounds: int) -> dict[str, float]:
    """Seconds of each piece of work, median or best: begun by all ranks together, ended by the last."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            found[name].append(float(seconds))
    # a message takes less time than a process may wait for a core: its own time is the shortest
    return {name: min(values) if name in WIRE else statistics.median(values) for name, values in found.items()}


def machine_of(seconds: dict[str, float], world: int, length: int) -> Machine:
    own = length // world
    pairs, keys = SPEC.visible_pairs(own, own), SHAPE.kv_heads * own * SHAPE.d
    latency = seconds.get("latency", 0.0)
    return Machine(
        name=f"{world} Gloo processes",
        forward=flops(SHAPE, pairs, False) / seconds["forward"],
        backward=flops(SHAPE, pairs, True) / seconds["backward"],
        bandwidth=2 * keys * SHAPE.element / seconds["bandwidth"] if world > 1 else 1.0,
        latency=latency,
        memory=12 * SHAPE.heads * own * SHAPE.d * REPEATS / seconds["memory"],
        block=seconds["block"] / REPEATS,
    )


def predict(machine: Machine, cores: float, world: int, length: int, strategy: str, layout: str, reverse: bool) -> float:
    shards = Shards(SPEC, layout, world, length, length)
    ranks = [cost(SHAPE, shards, machine, strategy, reverse, [rank]) for rank in range(world)]
    return max(max(one.seconds for one in ranks), sum(one.compute for one in ranks) / cores)


def work(rank: int, world: int, folder: str, length: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    context = ContextParallel(init_device_mesh("cpu", (world,)))
    seconds = times(pieces(context, length) | calls(world, length), rounds)
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure(world: int, length: int, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (world, folder, length, rounds), nprocs=world)
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    machine = machine_of(seconds, world, length)
    cores = {name: world * seconds[name] / seconds[f"{name} together"] for name in ("forward", "backward")}
    runs = [
        {
            "strategy": strategy,
            "layout": layout,
            "direction": direction,
            "measured": seconds[f"{strategy} {layout} {direction}"],
            "predicted": predict(machine, cores[direction], world, length, strategy, layout, direction == "backward"),
        }
        for strategy, layout in WAYS
        for direction in ("forward", "backward")
    ]
    return {"world": world, "machine": asdict(machine), "cores": cores, "runs": runs}


def memory(world: int, length: int, strategy: str) -> dict[str, object]:
    """Bytes one rank keeps for the backward, and the most it allocates at once in a step beyond its inputs."""
    context = ContextParallel(Alone(0, world), strategy=strategy)
    q, k, v = (context.shard(x, 2).clone().requires_grad_() for x in inputs(length))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    def train() -> None:
        y = backlight.attention(q, k, v, causal=True, context=context)
        torch.autograd.grad(y, [q, k, v], torch.ones_like(y))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        train()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return {"world": world, "strategy": strategy, "kept": sum(kept.values()), "peak": max(itertools.accumulate(changes))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("docs/data/distributed-cpu.json"))
    arguments = parser.parse_args()
    worlds = [measure(world, arguments.length, arguments.rounds) for world in WORLDS]
    for found in worlds:
        for run in found["runs"]:
            words = f"{run['strategy']:10} {run['layout']:10} {run['direction']:8} {found['cores'][run['direction']]:.2f} cores"
            measured, predicted = run["measured"] * 1e3, run["predicted"] * 1e3
            print(
                f"world {found['world']}  {words}  {measured:7.1f} ms, predicted {predicted:7.1f} ({predicted / measured:.2f})"
            )
    record = {
        "schema": "distributed-cpu-4",
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "shape": asdict(SHAPE) | {"length": arguments.length, "causal": True},
        "rounds": arguments.rounds,
        "worlds": worlds,
        "memory": [memory(w, arguments.length, s) for s in ("ring", "all_to_all") for w in WORLDS],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
