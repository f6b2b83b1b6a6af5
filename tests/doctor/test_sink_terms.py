"""Terms of dsink that are rounded before they are summed show where all of them err to one side."""

from __future__ import annotations

import pytest
import torch
from strips import Strips

from backlight import doctor
from backlight.doctor.steps import sink_terms
from backlight.problems import inputs
from backlight.reference import oracle
from backlight.spec import AttentionSpec

ROUNDED = "terms of the sink rounded"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_all_terms_err_to_one_side(dtype: torch.dtype, causal: bool) -> None:
    problem = inputs.make(AttentionSpec(causal=causal, sink=True), (1, 2, 40, 16), dtype=dtype)
    trial = sink_terms.leaning(problem)
    assert trial is not None
    truth = oracle(trial.call, trial.dy, keep=("y", "delta", "dsink", "lse", "p_sink"))
    rows = trial.dy.amax(-1)[0, 0] > 0
    torch.testing.assert_close(truth.delta[0, 0], rows.double())
    terms = truth.p_sink[0, 0, rows]
    lean = terms.to(dtype).double() / terms - 1
    assert bool((lean > 0).all())
    assert float(terms.to(dtype).double().sum() / terms.sum()) - 1 == pytest.approx(sink_terms.lean_of_rounded(trial), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bug", ["", ROUNDED])
def test_rounded_terms_are_told_at_full(dtype: torch.dtype, bug: str) -> None:
    kernel = Strips(bug)
    subject = doctor.Subject(kernel.forward, kernel.backward, layout="BHSD")
    report = doctor.diagnose(subject, AttentionSpec(sink=True), shape=(1, 2, 24, 16), dtype=dtype, level="full")
    assert report.verdict == ("precision" if bug else "healthy"), report.headline
    probe = next(each for each in report.probes if each.name == "terms of dsink")
    assert probe.passed is not bool(bug)
    assert [each.id for each in report.findings] == (["dsink-rounded"] if bug else [])


def test_a_dsink_of_16_bits_cannot_be_told() -> None:
    """Rounding the sum once moves it by as much as rounding each term does."""
    kernel = Strips()

    def backward(**given):
        found = kernel.backward(**given)
        return found | {"dsink": found["dsink"].bfloat16()}

    def forward(q, k, v, *, causal=False, sink=None):
        return kernel.forward(q, k, v, causal=causal, sink=sink)

    def taking(do, q, k, v, o, lse, *, causal=False, sink=None):
        return backward(do=do, q=q, k=k, v=v, o=o, lse=lse, causal=causal, sink=sink)

    subject = doctor.Subject(forward, taking, layout="BHSD")
    spec = AttentionSpec(sink=True)
    report = doctor.diagnose(subject, spec, shape=(1, 2, 24, 16), dtype=torch.bfloat16, level="full")
    probe = next(each for each in report.probes if each.name == "terms of dsink")
    assert probe.passed is None
    assert "16 bits" in probe.detail
