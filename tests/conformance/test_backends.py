"""Every backend against every case: as good as a correct kernel, or a refusal with its reasons."""

from __future__ import annotations

import functools

import pytest
import torch

import backlight
from backlight import registry
from cases import Case, Problem, case_id, with_dtypes
from gate import Yardsticks, judge, measure
from running import run, ways


def problem_of(case: Case, dtype: torch.dtype, device: str = "cpu") -> Problem:
    return _problem(case, dtype, device)[0]


@functools.lru_cache(maxsize=8)
def _problem(case: Case, dtype: torch.dtype, device: str) -> tuple[Problem, Yardsticks]:
    problem = case.make(dtype, device=device)
    return problem, measure(problem.call, problem.dy, problem.dlse)


@pytest.mark.parametrize("backend", registry.names())
@pytest.mark.parametrize(("case", "dtype"), with_dtypes(), ids=case_id)
def test_case(backend: str, case: Case, dtype: torch.dtype) -> None:
    problem, yardsticks = _problem(case, dtype, "cpu")
    for fixed, asked in ways(problem.call):
        if reasons := registry.why_not(registry.get(backend), asked):
            with pytest.raises(backlight.Unsupported) as refusal:
                run(problem, backend, fixed=fixed)
            assert refusal.value.reasons == {backend: reasons}
            assert all(reason in str(refusal.value) for reason in reasons)
            continue
        result = run(problem, backend, fixed=fixed)
        verdict = judge(problem.call, problem.dy, problem.dlse, result, yardsticks, names=tuple(result))
        assert verdict.ok, f"{case.name}, {fixed=}\n{verdict}"
