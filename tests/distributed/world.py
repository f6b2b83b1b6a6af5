"""One process of a Gloo world: runs checks, writes what came of them. Arguments: rank, world, folder, slow|default|names."""

from __future__ import annotations

import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import checks  # noqa: E402, F401 - found once the path is set
import refusals  # noqa: E402, F401 - its last check ends the world
from ranks import CHECKS, Rank, checks_of  # noqa: E402


def main(number: int, world: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=timedelta(seconds=600))
    rank = Rank(number, world, init_device_mesh("cpu", (world,)))
    results: dict[str, dict[str, object]] = {}
    for name in names:
        start = time.perf_counter()
        try:
            CHECKS[name](rank)
            error = ""
        except Exception:
            error = traceback.format_exc()
        results[name] = {"error": error, "seconds": time.perf_counter() - start}
        (folder / f"rank{number}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    size, kind = int(sys.argv[2]), sys.argv[4]
    chosen = checks_of(size, kind == "slow") if kind in ("slow", "default") else sys.argv[4:]
    main(int(sys.argv[1]), size, Path(sys.argv[3]), chosen)
