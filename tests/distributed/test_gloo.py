"""Context parallel over Gloo in 1, 2 and 4 processes. Starting a world costs seconds, so each runs all of its checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SECONDS = 1500

sys.path.insert(0, str(HERE))

import checks  # noqa: E402, F401 - found once the path is set
import refusals  # noqa: E402, F401
from ranks import checks_of  # noqa: E402


def run_world(size: int, kind: str, folder: Path) -> tuple[list[dict], str]:
    """What every rank wrote about its checks, and what all of them printed."""
    paths = os.pathsep.join([str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "world.py"), str(rank), str(size), str(folder), kind],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        output = "\n".join(rank.communicate(timeout=SECONDS)[0] for rank in ranks)
    except subprocess.TimeoutExpired:
        output = f"no end after {SECONDS} s"
    finally:
        for rank in ranks:
            rank.kill()
    files = [folder / f"rank{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], output


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("kind", ["default", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_world(size: int, kind: str, tmp_path: Path) -> None:
    results, output = run_world(size, kind, tmp_path)
    names = checks_of(size, kind == "slow")
    unfinished = [f"rank {rank}: {name}" for rank in range(size) for name in names if name not in results[rank]]
    failed = [f"rank {rank}: {n}\n{r['error']}" for rank in range(size) for n, r in results[rank].items() if r["error"]]
    assert not failed, f"{len(failed)} of {len(names) * size} checks failed\n" + "\n".join(failed[:3])
    assert not unfinished, f"never finished: {unfinished[:5]}\n{output[-2000:]}"
