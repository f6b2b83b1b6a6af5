"""The Triton kernels of `flash`, compiled: every bug is named on a GPU too, and a sequence of 4096 is read by blocks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs compiled kernels", allow_module_level=True)

sys.path.append(str(Path(__file__).parents[1] / "interpreted"))

from flash import Flash

from backlight import doctor
from backlight.spec import AttentionSpec

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CAUSAL = AttentionSpec(causal=True)
LONG = (1, 2, 4096, 64)
# bug -> (the name that comes first, words of a reading)
READ = {
    "bound rounded": ("bound-forward", "in every second tile of 64 rows"),
    "dkdv bound": ("bound-dkdv", "tiles of 64 x 64 on the diagonal are lost"),
    "lse row": ("lse-read", "that of the first row of its tile of 64"),
    "channels": ("dp-channels", "dp leaves out channels 48-63 of dO and v"),
    "k layout": ("kv-layout-backward", "the backward's k is read as [B, S, H, D]"),
}


def examine(bug: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> doctor.Report:
    kernels = Flash(bug, 64)
    subject = doctor.Subject(kernels.forward, kernels.backward, layout="BHSD", name="flash")
    return doctor.diagnose(subject, CAUSAL, shape=shape, dtype=dtype, level="full", device="cuda")


@pytest.mark.parametrize("length", [320, 4096])
@pytest.mark.parametrize("bug", READ)
def test_read_and_named(bug: str, length: int) -> None:
    name, words = READ[bug]
    report = examine(bug, (*LONG[:2], length, LONG[3]), torch.bfloat16)
    said = [reading.sentence for reading in report.readings]
    assert any(words in sentence for sentence in said), (said, report.headline)
    assert report.findings[0].id == name, report.headline


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [320, 4096])
def test_healthy(length: int, dtype: torch.dtype) -> None:
    report = examine("", (*LONG[:2], length, LONG[3]), dtype)
    assert report.verdict == "healthy", report.headline
    assert not report.readings
