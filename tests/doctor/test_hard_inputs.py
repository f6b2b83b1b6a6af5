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
@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_kernel_that_is_right_on_ordinary_inputs_only(kernel, level):
    """Where all weights vanish nearly every defect fits; only those that leave ordinary inputs alone are believed."""
    report = diagnose(kernel, AttentionSpec(), level=level, **SETTINGS)
    assert report.verdict == "defect"
    assert report.findings[0].id in ("maximum-start", "merge-overflow", "hard-inputs")
    assert any("with ordinary inputs nothing is" in line for line in report.findings[0].evidence)


def padded(q, k, v):
    """Keys are padded to a multiple of 64 with zeros, and the padding counts."""
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % 64)) for x in (k, v))
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v


def test_padding_shows_with_other_lengths_at_quick():
    """64 keys need no padding; at quick there are more keys than rows as well, and scores that a padded 0 drowns."""
    report = diagnose(padded, AttentionSpec(), shape=(1, 2, 64, 16), dtype=torch.float32)
    assert report.verdict == "defect"
    assert report.findings[0].id == "tail-padding", report.headline


class FoldedScale(torch.autograd.Function):
    """A backward that multiplies k by scale times log2 e, rounds it, and takes exp2: ordinary inputs do not mind."""

    @staticmethod
    def forward(ctx, q, k, v):
        s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        lse = s.logsumexp(dim=-1, keepdim=True)
        o = (torch.exp(s - lse) @ v.double()).to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        scale, log2e = q.shape[-1] ** -0.5, 1.4426950408889634
        q, v, o, do = (x.double() for x in (q, v, o, do))
        scaled = (k * (scale * log2e)).double()
        p = torch.exp2(q @ scaled.mT - lse * log2e)
        ds = p * (do @ v.mT - (do * o).sum(dim=-1, keepdim=True))
        found = (ds @ scaled / log2e, ds.mT @ q * scale, p.mT @ do)
        return tuple(x.to(k.dtype) for x in found)


def folded(q, k, v):
    return FoldedScale.apply(q, k, v)


@pytest.mark.later
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_scale_folded_into_k_is_no_defect(dtype):
    """Triton's tutorial does so: its gradients are off where outliers make scores of hundreds."""
    settings = {"shape": (1, 2, 72, 64), "dtype": dtype}
    report = diagnose(folded, AttentionSpec(), level="full", **settings)
    assert report.verdict == "healthy", report.headline
    asked = next(probe for probe in report.probes if probe.name == "inputs outliers")
    assert "k times scale times log2 e is rounded before the product, in the backward" in asked.detail
    report = diagnose(folded, AttentionSpec(), recipe="outliers", **settings)
    assert [finding.id for finding in report.findings] == ["operand-prescaled"], report.headline
    assert report.verdict == "precision"


def test_low_scores_are_right_for_others():
    report = diagnose(torch.nn.functional.scaled_dot_product_attention, AttentionSpec(causal=True), **SETTINGS)
    assert report.healthy
    assert any(probe.name == "low scores" and probe.passed for probe in report.probes)


def test_lse_jumps_by_more_than_90():
    problem = inputs.make(AttentionSpec(), (1, 2, 72, 16), recipe="jumps")
    lse = problem.truth.lse
    assert float(lse[..., 32:64].mean() - lse[..., :32].mean()) > 90


def test_packed_problems_are_left_alone():
    cu = torch.tensor([0, 13, 40], dtype=torch.int32)
    assert hard_inputs.drawn(inputs.make(AttentionSpec(), (1, 2, 40, 16), cu_seqlens=cu), "jumps") is None
