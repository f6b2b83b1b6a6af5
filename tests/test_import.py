"""`import backlight` costs little more than `import torch`. Modules are counted, not seconds: machines may be busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
# what a machine with everything installed must not load for a call that may never use it
HEAVY = ("triton", "rich", "typer", "jinja2", "matplotlib", "transformers", "hypothesis", "pytest", "sympy")
HEAVY_TORCH = ("torch._dynamo", "torch._inductor", "torch._export", "torch.onnx", "torch.distributed.tensor")
SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
import backlight
print(json.dumps({"new": sorted(set(sys.modules) - before), "initialised": torch.cuda.is_initialized()}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    # torch's own warnings are torch's; ours would be errors
    command = [sys.executable, "-W", "error:::backlight", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "backlight" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def test_nothing_heavy_is_loaded(imported: dict[str, list[str]]) -> None:
    loaded = [name for name in imported["new"] if name.split(".")[0] in HEAVY or name.startswith(HEAVY_TORCH)]
    assert not loaded


def test_few_modules_are_loaded(imported: dict[str, list[str]]) -> None:
    """Our own front door, and next to nothing that torch has not loaded itself."""
    ours = [name for name in imported["new"] if name.split(".")[0] == "backlight"]
    others = [name for name in imported["new"] if name not in ours]
    assert len(ours) <= 20, ours
    assert len(others) <= 5, others


def test_no_device_is_touched(imported: dict[str, bool]) -> None:
    assert imported["initialised"] is False
