"""Kernels for inference, without a backward, and kernels with terms built in: what can be asked is asked, nothing else."""

from __future__ import annotations

import pytest
import torch
from legal import Legal
from slabs import OwnSlopes, Slabs
from torch import Tensor

from backlight import alibi, doctor
from backlight.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)
SHAPE = (1, 2, 40, 16)


def one_future(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """A causal mask that is off by one, and no graph."""
    s = (q @ k.mT).detach() * q.shape[-1] ** -0.5
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(2), -torch.inf).softmax(-1) @ v.detach()


@pytest.mark.parametrize("level", ["quick", pytest.param("full", marks=pytest.mark.later)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_right_forward_is_healthy(level: str, dtype: torch.dtype) -> None:
    report = doctor.diagnose((Legal().forward, None), CAUSAL, shape=SHAPE, dtype=dtype, level=level)
    assert report.verdict == "healthy", report.headline
    assert {row.name for row in report.stages} <= {"lse", "o", "p"}
    assert not [probe.name for probe in report.probes if "dO" in probe.name or probe.passed is False]


def test_a_wrong_forward_comes_before_the_gradients_that_are_missing() -> None:
    """All gradients were missing, and nothing else was looked at: every kernel for inference had the same finding."""
    report = doctor.diagnose(one_future, CAUSAL, shape=SHAPE, dtype=torch.float32)
    assert [finding.id for finding in report.findings] == ["mask-future", "gradient-missing"]
    assert doctor.diagnose((one_future, None), CAUSAL, shape=SHAPE, dtype=torch.float32).findings[0].id == "mask-future"


def test_an_output_without_a_graph_is_told_where_the_forward_is_right() -> None:
    report = doctor.diagnose(lambda q, k, v: Legal().forward(q, k, v)[0], AttentionSpec(), shape=SHAPE, dtype=torch.float32)
    assert [finding.id for finding in report.findings] == ["gradient-missing"]
    assert report.verdict == "defect"


def test_an_unknown_fault_of_the_forward_is_open() -> None:
    """Where a gradient is missing nothing was called open, which hid what no mutant explains."""

    def odd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = Legal().forward(q, k, v)[0]
        return o + 0.3 * torch.sin(7 * o.roll(3, -1))

    report = doctor.diagnose((odd, None), AttentionSpec(), shape=SHAPE, dtype=torch.float32)
    assert (report.findings[0].id, report.findings[0].stage) == ("open", "o")


@pytest.mark.parametrize("level", ["quick", *(pytest.param(x, marks=pytest.mark.later) for x in ("full", "adversarial"))])
def test_terms_that_are_built_in_are_not_drawn_anew(level: str) -> None:
    """ALiBi that a kernel makes itself was judged by random tables, and by no table at all, in probes with other inputs."""
    kernel, bias = OwnSlopes(), alibi(3, 40, causal=True)["bias"]
    subject = doctor.Subject(kernel.forward, kernel.backward, layout="BHSD")
    spec = AttentionSpec(causal=True, bias=True)
    report = doctor.diagnose(subject, spec, shape=(1, 3, 40, 16), dtype=torch.float32, bias=bias, level=level)
    assert report.verdict == "healthy", report.headline
    assert any("built in" in note for note in report.recipe["notes"])


@pytest.mark.later
@pytest.mark.parametrize("bug", ["", "exp of a difference"])
def test_scores_that_rise_along_the_keys_are_asked_at_full(bug: str) -> None:
    kernel = Slabs(bug)
    report = doctor.diagnose((kernel.forward, None), AttentionSpec(), shape=SHAPE, dtype=torch.float32, level="full")
    assert report.verdict == ("defect" if bug else "healthy"), report.headline
    assert "inputs rising" in {probe.name for probe in report.probes}
