"""`audit_rule`: push every known defect, zeros and NaN through a user's own pass/fail rule and list what it lets through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backlight.doctor.defects.catalogue import DEFECTS
from backlight.doctor.defects.mutants import Mutant, run
from backlight.problems import checks, inputs
from backlight.spec import GRADIENTS, AttentionSpec

Rule = Callable[[Tensor, Tensor], Any]
JUDGED = ("o", *GRADIENTS)


@dataclass
class AuditResult:
    """passed: ids the rule let through although something is wrong; caught: ids it refused; accepts_correct: the control."""

    passed: list[str] = field(default_factory=list)
    caught: list[str] = field(default_factory=list)
    accepts_correct: bool = True

    @property
    def sound(self) -> bool:
        """Accepts a correct kernel and refuses every defect."""
        return self.accepts_correct and not self.passed

    def __str__(self) -> str:
        total = len(self.passed) + len(self.caught)
        lines = [f"the rule catches {len(self.caught)} of {total} defects"]
        lines.append("it accepts a correct kernel" if self.accepts_correct else "it refuses a correct kernel")
        if self.passed:
            lines.append("it lets through: " + ", ".join(self.passed))
        return "\n".join(lines)


def audit_rule(
    rule: Rule,
    spec: AttentionSpec,
    *,
    shape: tuple[int, int, int, int] = (2, 2, 72, 32),
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> AuditResult:
    """Which defects does `rule(actual, expected)` let through?

    rule:   called with one tensor and its reference at a time; a kernel passes when every tensor does. It may return a truth
            value, or raise AssertionError (as torch.testing.assert_close does); None counts as a pass.
    spec:   the problem; defects that cannot occur with it are left out.
    """
    if not callable(rule):
        raise TypeError(f"rule must be a function rule(actual, expected), got {type(rule).__name__} {rule!r:.60}")
    checks.check_spec(spec)
    checks.check_seed(seed)
    problem = inputs.make(spec, shape, kv_heads=kv_heads, dtype=dtype, seed=seed)
    correct = _outputs(Mutant(), problem)
    reference = {n: problem.truth["y" if n == "o" else n].to(x.dtype) for n, x in correct.items()}
    result = AuditResult(accepts_correct=_accepts(rule, correct, reference))
    for defect in DEFECTS:
        for mutant in defect.candidates(problem.call)[:1]:
            wrong = _outputs(mutant, problem)
            if all(torch.equal(wrong[n].nan_to_num(), correct[n].nan_to_num()) for n in wrong):
                continue
            (result.passed if _accepts(rule, wrong, reference) else result.caught).append(defect.id)
    for name, wrong in _extremes(correct).items():
        (result.passed if _accepts(rule, wrong, reference) else result.caught).append(name)
    return result


def _outputs(mutant: Mutant, problem: inputs.Problem) -> dict[str, Tensor]:
    call = problem.call
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    out = run(mutant, call, problem.dy, dtype=wide, storage=call.q.dtype)
    names = ("o", *call.gradients)
    return {n: out["y" if n == "o" else n].to(call.q.dtype) for n in JUDGED if n in names}


def _extremes(correct: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Zeros, NaN everywhere, and NaN in one value."""
    one = {n: x.clone() for n, x in correct.items()}
    one["dk"].view(-1)[0] = float("nan")
    return {
        "zeros": {n: x if n == "o" else torch.zeros_like(x) for n, x in correct.items()},
        "nan": {n: torch.full_like(x, float("nan")) for n, x in correct.items()},
        "nan-cell": one,
    }


def _accepts(rule: Rule, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    for name, x in actual.items():
        try:
            verdict = rule(x, expected[name])
        except AssertionError:
            return False
        if isinstance(verdict, Tensor) and verdict.numel() != 1:
            raise TypeError(
                f"rule must return one truth value or None, got a tensor of shape {tuple(verdict.shape)} for {name}"
            )
        if verdict is not None and not bool(verdict):
            return False
    return True
