"""Every card that Triton compiles for gets tiles that fit into its shared memory (docs/kernels.md has the table)."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from targets import CARDS, DTYPES, SIZES, VARIANTS, Combination, Report, grid, reports_of

# bytes of a thread
MOST_SPILLED = 700


def check(combination: Combination, reports: list[Report]) -> None:
    assert reports
    for report in reports:
        assert report.shared <= CARDS[combination.card].shared, (combination, report)
        assert report.spilled <= MOST_SPILLED, (combination, report)


# those that did not fit while tiles were chosen without a look at the card, and the largest of the others
QUICK = {
    Combination("sm_80", "full", 128, "bf16"): "_fwd_kernel",
    Combination("sm_86", "full", 128, "bf16"): "_fwd_kernel",
    Combination("sm_89", "full", 256, "fp16"): "_fwd_kernel",
    Combination("sm_90", "full", 128, "bf16"): "_dq_kernel",
    Combination("sm_100", "full", 128, "bf16"): "_dkdv_kernel",
    Combination("sm_120", "everything", 256, "bf16"): "_elastic_kernel",
    Combination("gfx942", "full", 128, "bf16"): "_fwd_kernel",
    Combination("gfx942", "bias", 128, "bf16"): "_dbias_kernel",
    Combination("sm_90", "mask", 128, "bf16"): "_fwd_kernel",
    Combination("sm_86", "mask,pos,bias", 128, "bf16"): "_dq_kernel",
    Combination("gfx942", "mask,everything,varlen", 128, "fp32"): "_counts_kernel",
}


@pytest.mark.parametrize("combination", QUICK, ids=str)
def test_what_takes_most_fits(combination: Combination) -> None:
    check(combination, reports_of(combination, QUICK[combination]))


@pytest.mark.slow
@pytest.mark.parametrize("combination", tuple(grid()), ids=str)
def test_everything_fits(combination: Combination) -> None:
    check(combination, reports_of(combination))


def test_the_grid_leaves_nothing_out() -> None:
    combinations = list(grid())
    assert len(combinations) == len(set(combinations))
    assert {(x.card, x.variant) for x in combinations} == {(card, variant) for card in CARDS for variant in VARIANTS}
    assert {(x.card, x.d) for x in combinations} == {(card, d) for card in CARDS for d in SIZES}
    assert {(x.card, x.dtype) for x in combinations} == {(card, dtype) for card in CARDS for dtype in DTYPES}
