"""Rows of outputs that are exactly 0 and must not be; what stays wrong beside memory that nobody wrote."""

from __future__ import annotations

import pytest
import torch
from strips import OutputAlone, Strips
from test_found_in_the_wild import WILD, examine

from backlight import doctor
from backlight.doctor.steps import zeros
from backlight.problems import inputs
from backlight.spec import AttentionSpec


def values_of(problem: inputs.Problem) -> dict[str, torch.Tensor]:
    return {"o": problem.truth.y.clone(), **{name: problem.truth[name].clone() for name in ("lse", "dq", "dk", "dv")}}


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(causal=True), AttentionSpec(window=(8, 0))])
def test_zeros_that_are_right_are_no_reading(spec: AttentionSpec) -> None:
    """Rows that see nothing, keys that nobody sees, the first row of a causal mask."""
    problem = inputs.make(spec, (1, 2, 40, 16), sk=24)
    assert not zeros.read(values_of(problem), problem)


def test_rows_are_read_with_their_heads() -> None:
    problem = inputs.make(AttentionSpec(causal=True), (1, 4, 40, 16))
    values = values_of(problem)
    values["o"][:, 1:] = 0
    values["dk"][:, :, 8:24] = 0
    (found,) = zeros.read(values, problem)
    assert (found.id, found.stage) == ("part-zero", "o")
    details = {mutant.detail for mutant in found.candidates(problem.call)}
    assert details == {"o of heads >= 1 and dk of keys 8-23"}


def test_gradients_that_are_all_zero_have_another_name() -> None:
    problem = inputs.make(AttentionSpec(), (1, 2, 40, 16))
    values = values_of(problem)
    for name in ("dq", "dk", "dv"):
        values[name].zero_()
    assert not zeros.read(values, problem)


def test_heads_that_nobody_computes_are_told_at_quick() -> None:
    kernel = OutputAlone("first head alone")
    subject = doctor.Subject(kernel.forward, layout="BHSD", forward_only=True)
    report = doctor.diagnose(subject, AttentionSpec(causal=True), shape=(1, 4, 40, 16), dtype=torch.float32)
    assert report.findings[0].id == "part-zero"
    assert "heads >= 1" in report.findings[0].title


def test_keys_that_nobody_stores_are_told_at_quick() -> None:
    kernel = Strips("columns of the list beyond the keys")
    subject = doctor.Subject(kernel.forward, kernel.backward, layout="BHSD")
    report = doctor.diagnose(subject, AttentionSpec(causal=True), shape=(1, 2, 40, 16), dtype=torch.float32)
    assert (report.findings[0].id, report.findings[0].stage) == ("part-zero", "dk")
    assert "keys 20-39" in report.findings[0].title


def test_an_lse_that_is_not_finite_is_told_behind_rows_that_are_not_stored() -> None:
    bug = "no keys, stored elsewhere"
    report = examine(bug, WILD[bug])
    assert [each.id for each in report.findings[:2]] == ["stale-rows", "nan-cell"]
    assert report.findings[1].stage == "lse"
    assert any("this remains" in line for line in report.findings[1].evidence)
