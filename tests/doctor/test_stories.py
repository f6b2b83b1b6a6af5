"""The four founding cases. Each was a real bug that cost days; each docstring tells its story."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backlight import doctor
from backlight.doctor.defects import broken
from backlight.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)
SHAPE = (2, 4, 72, 64)


def test_case_a_the_mask_that_never_arrived() -> None:
    """Under `causal`, ds of kernel and reference differed above the diagonal, and row 0 of dq was all zero. The kernel was
    right. The test called the reference by position, the reference had another argument order, and `causal` never reached it.
    The zero row is correct too: row 0 sees one key, so p = 1 and ds = p (dp - delta) = 0.

    The doctor judges the kernel by the oracle, judges the reference by the same oracle, names what the reference computes, and
    lists the zero row as expected.
    """

    def reference(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, is_causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal)

    def as_the_test_called_it(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        # by position, in another order: the scale's place receives nothing and is_causal keeps its default
        del causal
        return reference(q, k, v, None)

    report = doctor.diagnose(
        F.scaled_dot_product_attention, CAUSAL, against=as_the_test_called_it, shape=SHAPE, dtype=torch.float32
    )
    assert report.verdict == "healthy"
    fault = report.findings[0]
    assert (fault.id, fault.severity) == ("call-causal-lost", "test-fault")
    assert "reference" in fault.title
    assert "causal=False" in fault.title
    assert any("dq of row 0" in line for line in report.expected_zeros)


def test_case_a_no_zero_row_is_promised_when_a_sink_takes_part() -> None:
    spec = AttentionSpec(causal=True, sink=True)
    report = doctor.diagnose(broken.healthy(), spec, shape=SHAPE)
    assert report.verdict == "healthy"
    assert not any("dq of row 0" in line for line in report.expected_zeros)


def test_case_b_dk_off_by_a_constant() -> None:
    """Many threads added the same product to the same global address, so dk came out multiplied by 16. The gain is constant
    over heads with the residual at noise, it is an integer, and the report asks for the thread shape to be changed."""
    report = doctor.diagnose(broken.subject("case-b"), CAUSAL, shape=SHAPE)
    finding = report.findings[0]
    assert finding.id == "accumulate-repeated"
    assert finding.mechanism.startswith("established")
    assert "16 times" in finding.title
    assert "threads" in finding.next_check
    row = next(row for row in report.stages if row.name == "dk")
    assert all(abs(gain - 16) < 0.05 for gain in row.gains)
    assert row.status == "culprit"
    assert {row.name for row in report.stages if row.status == "ok"} == {"lse", "o", "dq", "dv"}


def test_case_b_with_lost_adds_varies_from_run_to_run() -> None:
    """If the repeated adds are not atomic the factor moves, which the repeat probe shows."""

    chance = torch.Generator()

    class Racing(broken.Kernel):
        def backward(self, call, dy, dlse):
            out = super().backward(call, dy, dlse)
            times = torch.randint(1, 17, (*out["dk"].shape[:3], 1), generator=chance)
            return out | {"dk": out["dk"] * times}

    report = doctor.diagnose(doctor.Subject(broken.attention_of(Racing()), layout="BHSD"), CAUSAL, shape=SHAPE)
    assert report.findings[0].id == "race-lost-update"
    assert next(p for p in report.probes if p.name == "repeats").passed is False


def test_a_module_that_was_left_in_train_mode() -> None:
    """Dropout was called a race: results differ from run to run. They follow torch's seed, as those of a race do not."""

    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.1)

        def forward(self, q, k, v, causal=False):
            s = (q @ k.mT) * q.shape[-1] ** -0.5
            hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
            return self.dropout(s.masked_fill(hidden, -torch.inf).softmax(-1)) @ v

    module = Dropping()
    report = doctor.diagnose(module, CAUSAL, shape=(1, 2, 72, 32), dtype=torch.float32)
    assert report.findings[0].id == "random-numbers"
    assert "eval mode" in report.findings[0].next_check
    assert doctor.diagnose(module.eval(), CAUSAL, shape=(1, 2, 72, 32), dtype=torch.float32).verdict == "healthy"


def test_a_first_call_that_differs_draws_no_random_numbers() -> None:
    """Equal after one seed, as every later call is: it takes another seed to tell."""

    class Warming(broken.Kernel):
        calls = 0

        def backward(self, call, dy, dlse):
            out = super().backward(call, dy, dlse)
            self.calls += 1
            return out | {"dk": out["dk"] * (2 if self.calls == 2 else 1)}

    subject = doctor.Subject(broken.attention_of(Warming()), layout="BHSD")
    report = doctor.diagnose(subject, CAUSAL, shape=(1, 2, 72, 32))
    assert "race-lost-update" in [finding.id for finding in report.findings]
    assert "random-numbers" not in [finding.id for finding in report.findings]


def test_case_c_only_head_0_receives_gradients() -> None:
    """A backward addressed dO with q's head stride; dO's own was never passed. `out.sum().backward()` delivers a dO expanded
    from one element, all strides 0: head 0 reads the right value, head h reads past it. With a contiguous dO both strides agree
    and the bug is invisible; the gradient test used one head and a random dO. The first repair went into a file that Python did
    not import, so the report prints file and line of what ran."""
    report = doctor.diagnose(broken.subject("case-c"), CAUSAL, shape=SHAPE)
    finding = report.findings[0]
    assert finding.id == "do-stride"
    rows = {row.name: row.status for row in report.stages}
    assert (rows["dp"], rows["o"]) == ("culprit", "ok"), "the report shows the run with an expanded dO, in which it fails"
    assert {rows[name] for name in ("dq", "dk", "dv")} == {"inherited"}
    assert next(p for p in report.probes if p.name == "expanded dO").passed is False
    assert report.location.split(":")[0].endswith("broken.py")
    assert int(report.location.split(":")[1]) > 0


def test_case_c_gains_are_one_zero_zero_zero() -> None:
    """The pattern itself: only head 0 reads its dO; I1 and I3 hold as 0 = 0 while I2 fails."""
    report = doctor.diagnose(broken.subject("heads-lost"), CAUSAL, shape=SHAPE)
    assert report.findings[0].id == "heads-lost"
    for name in ("dq", "dk", "dv"):
        gains = next(row.gains for row in report.stages if row.name == name)
        assert gains[0] == pytest.approx(1, abs=0.01)
        assert gains[1:] == [0.0, 0.0, 0.0]
    failing = [line for line in report.findings[0].evidence if line.startswith("identity")]
    assert [line.split()[1] for line in failing] == ["I2"]


def test_case_d_the_nan_that_passed() -> None:
    """A running max(worst, diff) skips NaN, so a NaN gradient counted as a pass. The doctor counts non-finite values on their
    own and before any norm."""
    report = doctor.diagnose(broken.subject("case-d"), CAUSAL, shape=SHAPE)
    finding = report.findings[0]
    assert finding.id == "nan-cell"
    assert finding.where is not None
    assert finding.where.rows == (5, 6)
    row = next(row for row in report.stages if row.name == "dk")
    assert row.nonfinite == 64


def running_maximum(actual: Tensor, expected: Tensor) -> bool:
    """The rule of case D: NaN is never larger than the worst so far."""
    worst = 0.0
    for difference in (actual.float() - expected.float()).abs().flatten().tolist():
        worst = max(worst, difference)
    return worst <= 1.0


def test_case_d_audit_shows_what_a_rule_lets_through() -> None:
    """The same rule, and an all-but-useless tolerance of 1.0, pushed through every mutant, zeros and NaN."""
    audit = doctor.audit_rule(running_maximum, CAUSAL, shape=(1, 2, 40, 16))
    assert audit.accepts_correct
    assert {"nan", "nan-cell", "scale-dk"} <= set(audit.passed)
    assert not audit.sound
    assert "lets through" in str(audit)


def test_audit_of_a_better_rule() -> None:
    """Relative rms, NaN-proof: catches the structural defects and NaN, still not a 1 % scale."""

    def relative_rms(actual: Tensor, expected: Tensor) -> bool:
        error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
        return bool(error <= 0.02)

    audit = doctor.audit_rule(relative_rms, CAUSAL, shape=(1, 2, 40, 16))
    assert audit.accepts_correct
    assert {"nan", "nan-cell", "zeros", "mask-causal-backward", "delta-missing"} <= set(audit.caught)
    assert "scale-dk" in audit.passed


def test_audit_understands_assertions() -> None:
    def rule(actual: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)

    audit = doctor.audit_rule(rule, CAUSAL, shape=(1, 2, 40, 16))
    assert audit.accepts_correct
    assert "nan" in audit.caught
