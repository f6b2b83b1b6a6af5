"""The example under torchrun, as its docstring says: two processes, the same loss curve as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_same_curve_as_one_process() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_long_context.py"), "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "2 processes, 192 tokens here, layout zigzag" in done.stdout
    losses = [tuple(map(float, found)) for found in re.findall(r"loss (\S+)   one process (\S+)", done.stdout)]
    assert len(losses) == 4
    assert losses[-1][0] < losses[0][0]
    assert all(abs(cut - whole) < 1e-4 for cut, whole in losses)
