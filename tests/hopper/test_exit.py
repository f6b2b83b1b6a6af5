"""A process that has compiled our kernels ends without a word: Triton 3.9 prints what its bindings find left of Gluon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

TESTS = Path(__file__).parents[1]
SCRIPT = """
import sys
import torch
from aot import compiled
{prepare}
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.spec import AttentionSpec

q = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16)
call = Call(AttentionSpec(), q, q, q)
with compiled(forward) as reports:
    forward.forward(call)
print([report.kernel for report in reports])
"""


def ended(prepare: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (TESTS.parent / "src", TESTS / "hopper", TESTS, os.environ.get("PYTHONPATH", ""))))
    # a kernel from Triton's cache is not compiled, and leaves nothing
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_ALWAYS_COMPILE": "1", "OMP_NUM_THREADS": "1"}
    script = SCRIPT.format(prepare=prepare)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "_fwd_kernel" in done.stdout
    return done


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9), reason="before 3.9 Triton's bindings say nothing at exit"
)
def test_nothing_is_said_at_exit() -> None:
    assert "leaked" not in ended().stderr
    # as long as this is so, the other half of the test means something
    left = ended("import atexit; import backlight._private.triton as door; atexit.unregister(door._empty_layouts)")
    assert "nanobind: leaked" in left.stderr, "Triton lets its layouts go: `_empty_layouts` is no longer needed"
