"""Draw docs/images/distributed-{layouts,scale}.svg and write the tables of docs/distributed.md, from the cost model.

Run from the repository root: python tools/make_distributed_pictures.py
Rates of one GPU come from benchmarks/results, CPU runs from docs/data/distributed-cpu.json (benchmarks/context_parallel.py).
Links are the vendor's figures, not measured: LINKS.
"""

from __future__ import annotations

import re
from functools import cache

import matplotlib
import torch
from compact import crisp, shrink
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from records import RESULTS, ROOT, load, newest

from backlight.distributed.blocks import Shards
from backlight.distributed.cost import Cost, Machine, cost
from backlight.distributed.layout import pieces
from backlight.distributed.rule import Shape, divides
from backlight.spec import AttentionSpec

PAGE = ROOT / "docs" / "distributed.md"
KERNELS = RESULTS / "hopper-kernels-20261115.json.gz"
# its copy rate is a property of the card
PLAIN = newest("plain")
CPU = ROOT / "docs" / "data" / "distributed-cpu.json"

# bytes/s per GPU and direction, 80 % of the vendor's figure; seconds per message
LINKS = {"NVLink": (0.8 * 450e9, 10e-6), "InfiniBand": (0.8 * 50e9, 20e-6)}
NODE = 8
GPUS = (8, 16, 32, 64, 128, 256, 512)
LENGTHS = (131072, 262144, 524288, 1048576)
# one layer of a 70-billion-parameter model: 64 query heads, 8 key heads, D = 128, bf16
LAYER = Shape(batch=1, heads=64, kv_heads=8, d=128, dv=128, element=2)
CAUSAL = AttentionSpec(causal=True)
RANK_COLOURS = ("#0b4f8a", "#5aa5d6", "#f0956a", "#a3260f")


def rate(direction: str) -> float:
    """FLOP/s of the hopper kernels: causal, D = 128, S = 16384, bf16."""
    cells = load(KERNELS)["cells"]
    wanted = {"direction": direction, "d": 128, "s": 16384, "mask": "causal"}
    (cell,) = [cell for cell in cells if wanted.items() <= cell.items()]
    return 1e12 * cell["tflops"]["shipped"]


def h200(world: int) -> Machine:
    link = "NVLink" if world <= NODE else "InfiniBand"
    bandwidth, latency = LINKS[link]
    memory = 1e12 * load(PLAIN)["ceilings"]["copy_tb_s"]
    return Machine(f"H200, {link}", rate("fwd"), rate("bwd"), bandwidth, latency, memory, 20e-6)


@cache
def layer(length: int, world: int, strategy: str) -> tuple[Cost, Cost]:
    """(forward, backward) of one causal layer; zigzag ranks all do the same."""
    shards = Shards(CAUSAL, "zigzag", world, length, length)
    forward, backward = (cost(LAYER, shards, h200(world), strategy, reverse, ranks=[0]) for reverse in (False, True))
    return forward, backward


def ideal(length: int, world: int) -> float:
    """Seconds if only the visible pairs counted, evenly over the GPUs."""
    machine = h200(1)
    pairs = length * (length + 1) / 2
    work = 2.0 * LAYER.heads * pairs * LAYER.d
    return (2 * work / machine.forward + 5 * work / machine.backward) / world


def scale_rows() -> list[list[str]]:
    rows = []
    for world in GPUS:
        for strategy in ("ring", "all_to_all"):
            if strategy == "all_to_all" and not divides(LAYER, world):
                continue
            forward, backward = layer(LENGTHS[-1], world, strategy)
            seconds = forward.seconds + backward.seconds
            exposed = (forward.exposed + backward.exposed) / seconds
            rows.append(
                [
                    str(world),
                    strategy.replace("_", "-"),
                    f"{seconds * 1e3:,.0f}",
                    f"{ideal(LENGTHS[-1], world) / seconds:.0%}",
                    f"{exposed:.0%}",
                    f"{(forward.sent + backward.sent) / 1e9:.2f}",
                    f"{backward.memory / 1e9:.2f}",
                ]
            )
    return rows


def length_rows() -> list[list[str]]:
    """Efficiency of the ring: ideal time over predicted time."""
    rows = []
    for length in LENGTHS:
        found = [layer(length, world, "ring") for world in GPUS]
        shares = [
            f"{ideal(length, world) / (forward.seconds + backward.seconds):.0%}"
            for world, (forward, backward) in zip(GPUS, found, strict=True)
        ]
        rows.append([f"{length // 1024}k", *shares])
    return rows


def cpu_rows() -> list[list[str]]:
    rows = []
    for world in load(CPU)["worlds"]:
        for run in world["runs"]:
            name = f"{run['strategy'].replace('_', '-')}, {run['layout']}"
            measured, predicted = run["measured"] * 1e3, run["predicted"] * 1e3
            cells = [f"{measured:.0f}", f"{predicted:.0f}", f"{predicted / measured:.2f}"]
            cores = f"{world['cores'][run['direction']]:.2f}"
            rows.append([str(world["world"]), cores, name, run["direction"], *cells])
    return rows


def constant_rows() -> list[list[str]]:
    machines = [Machine(**world["machine"]) for world in load(CPU)["worlds"]]
    machines += [h200(8), h200(16)]
    rows = []
    for m in machines:
        alone = m.name.startswith("1 ")
        wire = ["-", "-"] if alone else [f"{m.bandwidth / 1e9:.3g}", f"{m.latency * 1e6:.0f}"]
        numbers = [
            f"{m.forward / 1e9:,.0f}",
            f"{m.backward / 1e9:,.0f}",
            *wire,
            f"{m.memory / 1e9:,.0f}",
            f"{m.block * 1e6:.0f}",
        ]
        rows.append([m.name, *numbers])
    return rows


def memory_rows() -> list[list[str]]:
    found = load(CPU)["memory"]
    names = dict.fromkeys(run["strategy"] for run in found)
    return [
        [f"{name.replace('_', '-')}, {words}", *(f"{run[key] / 2**20:.1f}" for run in found if run["strategy"] == name)]
        for name in names
        for key, words in (("kept", "kept for the backward"), ("peak", "peak of a step"))
    ]


TABLES = {
    "memory": (["MiB per rank", "1 rank", "2 ranks", "4 ranks"], memory_rows),
    "scale": (
        ["GPUs", "strategy", "ms", "of ideal", "waiting for the wire", "GB sent per GPU", "GB held per GPU"],
        scale_rows,
    ),
    "lengths": (["tokens", *(f"{world} GPUs" for world in GPUS)], length_rows),
    "cpu": (["processes", "cores they got", "call", "direction", "measured ms", "predicted ms", "ratio"], cpu_rows),
    "constants": (
        ["machine", "forward GFLOP/s", "backward GFLOP/s", "link GB/s", "latency us", "memory GB/s", "block us"],
        constant_rows,
    ),
}


def table(name: str) -> str:
    head, rows = TABLES[name][0], TABLES[name][1]()
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(page: str) -> str:
    """The page with every table between `<!-- table:name -->` and `<!-- end -->` written anew."""
    return re.sub(
        r"(<!-- table:(\w+) -->\n).*?(\n<!-- end -->)",
        lambda found: found[1] + "\n" + table(found[2]) + "\n" + found[3],
        page,
        flags=re.DOTALL,
    )


def layouts_picture() -> Figure:
    """Who computes what: a causal square of 48 positions over four ranks."""
    length, world = 48, 4
    figure = Figure(figsize=(9.2, 3.5), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 3, width_ratios=[1, 1, 1.1])
    visible = CAUSAL.allowed(length, length)
    work = {}
    for axes, layout in zip(panels, ("contiguous", "zigzag"), strict=False):
        owner = torch.zeros(length)
        for rank, ranges in enumerate(pieces(layout, length, world)):
            for start, end in ranges:
                owner[start:end] = rank
        shown = torch.where(visible, owner[:, None], torch.nan)
        axes.imshow(crisp(shown), cmap=ListedColormap(RANK_COLOURS), vmin=-0.5, vmax=world - 0.5, interpolation="none")
        axes.set(xticks=[], yticks=[], xlabel="keys", ylabel="rows, coloured by rank")
        axes.set_title(layout, fontsize=10, fontweight="bold")
        work[layout] = [Shards(CAUSAL, layout, world, length, length).pairs(rank) for rank in range(world)]
    bars = panels[2]
    for place, (layout, pairs) in enumerate(work.items()):
        at = [rank + place * 0.38 - 0.19 for rank in range(world)]
        bars.bar(at, pairs, 0.36, color=RANK_COLOURS, alpha=1.0 if layout == "zigzag" else 0.45, label=layout)
    bars.set_xticks(range(world), [f"rank {rank}" for rank in range(world)])
    bars.set_title("visible pairs (pale: contiguous)", fontsize=10, fontweight="bold")
    bars.spines[["top", "right"]].set_visible(False)
    return figure


def scale_picture() -> Figure:
    figure = Figure(figsize=(9.6, 3.3), layout="constrained", facecolor="white")
    times, shares, held = figure.subplots(1, 3)
    for length, colour in zip(LENGTHS, RANK_COLOURS, strict=True):
        found = [layer(length, world, "ring") for world in GPUS]
        seconds = [forward.seconds + backward.seconds for forward, backward in found]
        label = f"{length // 1024}k tokens"
        times.plot(GPUS, seconds, color=colour, marker="o", markersize=3.5, label=label)
        times.plot(GPUS, [ideal(length, world) for world in GPUS], color=colour, linestyle=":", linewidth=1)
        shares.plot(
            GPUS, [100 * ideal(length, w) / s for w, s in zip(GPUS, seconds, strict=True)], color=colour, marker="o", ms=3.5
        )
        held.plot(GPUS, [backward.memory / 1e9 for _, backward in found], color=colour, marker="o", markersize=3.5)
    for axes, title in ((times, "seconds per layer (dotted: ideal)"), (shares, "% of ideal"), (held, "GB held per GPU")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPUS, map(str, GPUS))
        axes.minorticks_off()
        axes.set_title(title, fontsize=10, fontweight="bold")
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    times.set_yscale("log")
    held.set_yscale("log")
    shares.set_ylim(0, 105)
    figure.legend(*times.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def main() -> None:
    matplotlib.rcParams |= {"svg.hashsalt": "backlight", "svg.fonttype": "none"}
    for name, figure in (("layouts", layouts_picture()), ("scale", scale_picture())):
        path = ROOT / "docs" / "images" / f"distributed-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        shrink(path)
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
