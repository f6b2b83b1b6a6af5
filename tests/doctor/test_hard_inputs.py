"""Inputs that ordinary ones do not resemble: right on Gaussian inputs is not right."""

from __future__ import annotations

import pytest
import torch

from backlight.doctor import diagnose
from backlight.doctor.steps import hard_inputs
from backlight.problems import inputs
from backlight.spec import AttentionSpec

SETTINGS = {"shape": (1, 2, 72, 16), "dtype": torch.float32}


def no_maximum(q, k, v):
    """exp without a maximum taken out: right until a score leaves the range of exp."""
    p = torch.exp(q @ k.mT * q.shape[-1] ** -0.5)
    return p / p.sum(dim=-1, keepdim=True).clamp(min=1e-30) @ v


def stuck_maximum(q, k, v):
    """The running maximum starts at -30 and not at -inf."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    p = torch.exp(s - s.amax(dim=-1, keepdim=True).clamp(min=-30.0))
    return p / (p.sum(dim=-1, keepdim=True) + 1e-6) @ v


@pytest.mark.parametrize("kernel", [no_maximum, stuck_maximum])
def test_a_kernel_that_is_right_on_ordinary_inputs_only(kernel):
    assert diagnose(kernel, AttentionSpec(), **SETTINGS).healthy
    report = diagnose(kernel, AttentionSpec(), level="full", **SETTINGS)
    assert report.verdict == "defect"
    assert any("with ordinary inputs nothing is" in line for line in report.findings[0].evidence)


def test_lse_jumps_by_more_than_90():
    problem = inputs.make(AttentionSpec(), (1, 2, 72, 16), recipe="jumps")
    lse = problem.truth.lse
    assert float(lse[..., 32:64].mean() - lse[..., :32].mean()) > 90


def test_packed_problems_are_left_alone():
    cu = torch.tensor([0, 13, 40], dtype=torch.int32)
    assert hard_inputs.drawn(inputs.make(AttentionSpec(), (1, 2, 40, 16), cu_seqlens=cu), "jumps") is None
