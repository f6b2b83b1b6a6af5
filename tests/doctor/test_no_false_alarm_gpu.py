"""Correct kernels on a GPU get no finding: SDPA's backends, FlexAttention, FlashAttention-3 and every backend of ours.

pytest tests/doctor/test_no_false_alarm_gpu.py needs a CUDA device. A peer that declines a problem is skipped with its own
words; that its sum is added by atomics, in another order each time, is a note and true.
"""

from __future__ import annotations

import itertools

import pytest
from sweep import DTYPES, GPU_SEEDS, GPU_VARIANTS, RECIPES, TRUE_NOTES, Run, complaint, gpu_subjects, refused

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.clean_memory, pytest.mark.filterwarnings("ignore")]
PROBLEMS = list(itertools.product(GPU_VARIANTS, DTYPES, RECIPES))


@pytest.fixture(scope="module", autouse=True)
def room_for_compiled_kernels():
    """FlexAttention is compiled once for each variant and dtype; dynamo's default limit is meant for a single model."""
    import torch._dynamo

    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=8192):
        yield


@pytest.mark.parametrize("subject", gpu_subjects())
@pytest.mark.parametrize(("variant", "dtype", "recipe"), PROBLEMS, ids=["-".join(problem) for problem in PROBLEMS])
def test_no_false_alarm(variant: str, dtype: str, recipe: str, subject: str) -> None:
    for seed in range(GPU_SEEDS):
        run = Run(subject, variant, dtype, recipe, seed)
        report = run.examine()
        if refused(run, report):
            pytest.skip(report.headline[:200])
        said = complaint(report, notes=TRUE_NOTES)
        assert not said, f"seed {seed}: {said}"
