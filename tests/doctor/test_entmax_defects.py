"""What the doctor tries on calls with entmax: its own defects, and of a softmax's those that hold for entmax as well."""

from __future__ import annotations

import pytest
import torch

from backlight.doctor.defects import catalogue, sparse
from backlight.doctor.defects.mutants import Mutant, run
from backlight.problems import inputs
from backlight.problems.along import draw
from backlight.spec import AttentionSpec

NAMES = [defect.id for defect in sparse.DEFECTS]


def problem(**terms: bool) -> inputs.Problem:
    return inputs.make(AttentionSpec(causal=True, **terms), (1, 2, 24, 8), dtype=torch.float64)


def offered(case: inputs.Problem) -> set[str]:
    return {defect.id for defect in catalogue.OF_VALUES if defect.candidates(case.call)}


def test_defects_of_entmax_need_entmax() -> None:
    assert not offered(problem()) & set(NAMES)
    # 24 keys are more than a tile of 16
    assert set(NAMES) <= offered(problem(entmax=True))


def test_mutants_that_compute_a_softmax_are_left_out() -> None:
    case = problem(entmax=True, sink=True)
    assert not offered(case) & {"sink-missing-backward", "sink-delta", "dsink-unweighted"}
    # a mask, a scale or a row of delta goes wrong with entmax as without
    assert {"mask-causal-backward", "delta-missing", "lse-base", "transpose-dv"} <= offered(case)
    for defect in catalogue.OF_VALUES:
        assert not any(mutant.of_softmax for mutant in defect.candidates(case.call)), defect.id


def test_the_mutant_that_changes_nothing_is_the_oracle() -> None:
    case = problem(entmax=True, sink=True)
    found = run(Mutant(), case.call, case.dy)
    for name in ("y", "lse", "dq", "dk", "dv", "dentmax", "dsink"):
        torch.testing.assert_close(found[name], case.truth[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sink", [False, True])
def test_each_mutant_is_finite_and_wrong(name: str, sink: bool) -> None:
    case = problem(entmax=True, sink=sink)
    wrong = False
    for mutant in catalogue.get(name).candidates(case.call):
        found = run(mutant, case.call, case.dy, truth=case.truth)
        assert all(bool(torch.isfinite(x).all()) for x in found.values()), mutant.detail
        wrong |= any(not torch.allclose(found[n], case.truth[n]) for n in ("y", "lse", "dq", "dentmax"))
    assert wrong


@pytest.mark.parametrize("name", [defect.id for defect in catalogue.OF_TANGENTS if defect.id != "tangent-uncentred"])
def test_each_mutant_of_forward_mode_is_finite_and_wrong(name: str) -> None:
    case = problem(entmax=True, sink=True)
    tangents = draw(case.call, 3)
    right = run(Mutant(), case.call, tangents=tangents)
    mutants = catalogue.get(name).candidates(case.call) or [Mutant()]
    for mutant in mutants:
        found = run(mutant, case.call, tangents=tangents)
        assert all(bool(torch.isfinite(found[n]).all()) for n in ("ty", "tlse")), mutant.detail
        # without a softcap none of it can be missing
        differs = any(not torch.allclose(found[n], right[n]) for n in ("ty", "tlse"))
        assert differs is (name != "tangent-softcap"), mutant.detail
