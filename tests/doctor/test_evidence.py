"""The verdict follows the evidence: what probes saw inside a kernel decides the stage, the hint and the next check."""

from __future__ import annotations

import pytest
import torch

from backlight.doctor import Subject, diagnose
from backlight.doctor.defects import broken
from backlight.doctor.steps import accused
from backlight.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)
SETTINGS = {"shape": (1, 2, 40, 16), "dtype": torch.float32}


def forward(q, k, v):
    s = _scores(q, k)
    return torch.softmax(s, dim=-1) @ v, s.logsumexp(dim=-1)


def _scores(q, k):
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)


def ripple(x):
    """No defect of the catalogue, and no rounding."""
    i, j = torch.arange(x.shape[-2])[:, None], torch.arange(x.shape[-1])
    return x * (1 + 0.5 * torch.sin(1.0 + i * 0.7 + j * j * 0.3))


def kernel(p_changed=None, ds_changed=None, ds_of_dk_changed=None, dq_changed=None):
    def same(x):
        return x

    def backward(do, q, k, v, o, lse):
        scale = q.shape[-1] ** -0.5
        p = (p_changed or same)(torch.exp(_scores(q, k) - lse[..., None]))
        ds = (ds_changed or same)(p * (do @ v.mT - (do * o).sum(-1, keepdim=True)))
        dk = scale * (ds_of_dk_changed or same)(ds).mT @ q
        return {"dq": (dq_changed or same)(scale * ds @ k), "dk": dk, "dv": p.mT @ do}

    return Subject(forward, backward, layout="BHSD")


def first(subject, **settings):
    report = diagnose(subject, CAUSAL, **SETTINGS | settings)
    assert report.findings[0].id == "open", report.headline
    return report, report.findings[0]


def test_full_says_that_the_weights_of_the_backward_are_wrong():
    report, finding = first(kernel(p_changed=ripple), level="full")
    assert finding.stage == "p (bwd)"
    assert report.headline.startswith("p (bwd) is wrong")
    assert finding.next_check == accused.NEXT_CHECKS["p (bwd)"]
    assert any(line.startswith("inside the kernel: p (bwd) is off by") and "right: p" in line for line in finding.evidence)


def test_full_says_that_ds_is_wrong():
    report, finding = first(kernel(ds_changed=ripple), level="full")
    assert (finding.stage, finding.next_check) == ("ds", accused.NEXT_CHECKS["ds"])
    assert {row.name: row.status for row in report.stages}["p (bwd)"] == "ok"


def test_a_wrong_dv_accuses_the_weights_where_nothing_was_seen_inside():
    report, finding = first(kernel(p_changed=ripple))
    assert finding.stage == "p (bwd)"
    rows = {row.name: row for row in report.stages}
    assert rows["p (bwd)"].status == "culprit"
    assert rows["p (bwd)"].note.startswith("not seen itself; inferred from")
    assert {rows[name].status for name in ("dq", "dk", "dv")} == {"inherited"}


def test_a_hint_that_was_not_confirmed_is_dropped():
    """I1 and I3 fail: quick reads that dk was transposed or written elsewhere. One-hot probes show that its ds is wrong."""
    subject = kernel(ds_of_dk_changed=ripple)
    reads = "the pattern of identities and gains reads"
    _, quick = first(subject)
    assert any(line.startswith(f"{reads}: dk") for line in quick.evidence)
    _, full = first(subject, level="full")
    assert full.stage == "ds"
    assert not any(line.startswith(reads) for line in full.evidence)
    assert any(line.startswith("dq is right") for line in full.evidence)


def test_what_was_seen_to_be_right_is_not_accused():
    report, finding = first(kernel(dq_changed=ripple), level="full")
    assert finding.stage == "dq"
    assert {row.name: row.status for row in report.stages}["ds"] == "ok"


@pytest.mark.parametrize("pattern", accused.ACCUSED)
def test_every_pattern_accuses_something(pattern):
    assert accused.ACCUSED[pattern]


# --- what remains after a finding ---------------------------------------------------------------------------------------------


class StaleAndScaled(broken.StaleRows):
    def backward(self, call, dy, dlse):
        out = super().backward(call, dy, dlse)
        return out | {"dk": out["dk"] * 3}


class InPlaceAndScaled(broken.InPlace):
    def backward(self, call, dy, dlse):
        out = super().backward(call, dy, dlse)
        return out | {"dk": out["dk"] * 3}


class RaceAndScaled(broken.Race):
    def backward(self, call, dy, dlse):
        out = super().backward(call, dy, dlse)
        return out | {"dv": out["dv"] * 3}


class StrideAndStale(broken.StaleRows):
    def backward(self, call, dy, dlse):
        return super().backward(call, broken.misread(dy), dlse)


def examined(maker, **settings):
    subject = Subject(broken.attention_of(maker()), layout="BHSD")
    return diagnose(subject, CAUSAL, **{"shape": (1, 2, 72, 16), "dtype": torch.bfloat16} | settings)


TWO_DEFECTS = {
    StaleAndScaled: ("stale-rows", "scale-dk", "with fresh memory set to 0"),
    InPlaceAndScaled: ("input-changed", "scale-dk", "with the inputs put back"),
    RaceAndScaled: ("race-lost-update", "scale-dv", "in what repeats itself"),
}


@pytest.mark.parametrize("maker", TWO_DEFECTS)
def test_a_finding_does_not_silence_another(maker):
    """Memory, races and changed inputs were once the only thing said about a kernel that had them."""
    first, second, words = TWO_DEFECTS[maker]
    found = {finding.id: finding for finding in examined(maker).findings}
    assert list(found)[:2] in ([first, second], [first, "accumulate-repeated"])
    other = list(found.values())[1]
    assert any(line.startswith(f"this remains {words}") for line in other.evidence)


@pytest.mark.parametrize("name", ["stale-rows", "input-changed"])
def test_what_turns_healthy_by_its_own_next_check_is_all_there_is(name):
    report = diagnose(broken.subject(name), CAUSAL, shape=(1, 2, 72, 16), dtype=torch.bfloat16)
    assert [f.id for f in report.findings] == [name]
    assert report.findings[0].evidence[-1].endswith("everything is right")


def test_a_stride_is_told_beside_memory_that_nobody_wrote():
    found = [finding.id for finding in examined(StrideAndStale).findings]
    assert {"stale-rows", "do-stride"} <= set(found)


# --- the run in which it fails ------------------------------------------------------------------------------------------------


def test_the_report_shows_the_run_in_which_it_fails():
    """With a contiguous dO nothing is wrong, and a report of that run is green from end to end."""
    report = diagnose(broken.subject("do-stride"), CAUSAL, shape=(2, 4, 40, 64))
    assert report.findings[0].id == "do-stride"
    rows = {row.name: row for row in report.stages}
    assert (rows["dp"].status, rows["o"].status) == ("culprit", "ok")
    assert {rows[name].status for name in ("dq", "dk", "dv")} == {"inherited"}
    assert any("show the run with an expanded dO of ones" in note for note in report.recipe["notes"])
    shown = {p.data["stage"]: p.data for p in report.pictures if p.kind == "head_tile"}
    assert max(max(row) for row in shown["dv"]["values"]) > shown["dv"]["limit"]


def test_rows_of_a_wrong_first_run_stay_those_of_that_run():
    class StrideAndScaled(broken.DoStride):
        def backward(self, call, dy, dlse):
            out = super().backward(call, dy, dlse)
            return out | {"dk": out["dk"] * 3}

    report = examined(StrideAndScaled)
    assert {f.id for f in report.findings} >= {"do-stride"}
    rows = {row.name: row.status for row in report.stages}
    assert (rows["dk"], rows["dq"]) == ("culprit", "ok")
