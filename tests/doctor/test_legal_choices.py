"""Choices that kernels are free to make are no defects: bases, lazy rescaling, splits, orders, layouts, roundings."""

from __future__ import annotations

import pytest
import torch
from legal import CHOICES
from sweep import complaint

from backlight import doctor
from backlight.spec import AttentionSpec

CALLS = {
    "causal": (AttentionSpec(causal=True), {}),
    "fewer keys": (AttentionSpec(), {"sk": 56}),
    "window": (AttentionSpec(window=(20, 0)), {"kv_heads": 1}),
    "more keys": (AttentionSpec(causal=True), {"sk": 90}),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY = [(choice, call, dtype) for choice in CHOICES for call in CALLS for dtype in DTYPES]
# each choice once at `quick` for `make test`
BRIEF = [(choice, list(CALLS)[n % 4], DTYPES[n % 3]) for n, choice in enumerate(CHOICES)]


@pytest.mark.parametrize("level", ["quick", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("choice", "call", "dtype"), [pytest.param(*one, marks=[] if one in BRIEF else [pytest.mark.later]) for one in EVERY]
)
def test_no_complaint(choice: str, call: str, dtype: torch.dtype, level: str) -> None:
    spec, more = CALLS[call]
    kernel = CHOICES[choice]
    subject = doctor.Subject(kernel.forward, kernel.backward, layout="BHSD", name=choice)
    report = doctor.diagnose(subject, spec, shape=(1, 2, 72, 32), dtype=dtype, level=level, **more)
    assert not complaint(report)
