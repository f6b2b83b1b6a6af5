"""Exact arithmetic tells a 16-bit sum from an operand that was scaled and rounded before an fp32 sum."""

from __future__ import annotations

import math

import pytest
import torch

from backlight.doctor.defects import broken
from backlight.doctor.defects.mutants import Mutant, run
from backlight.doctor.steps.exact import exact_arithmetic
from backlight.doctor.subject.subject import Subject
from backlight.problems import inputs
from backlight.spec import LOG2E, AttentionSpec


class Prescaled(broken.Kernel):
    """k times scale log2 e in 16 bits feeds exp2 and dq, which is multiplied by ln 2 at the end: many Triton kernels do so."""

    def backward(self, call, dy, dlse):
        def dq(dx, k, scale):
            return math.log(2) * (dx @ (scale * LOG2E * k).to(call.k.dtype).to(dx.dtype))

        return run(Mutant(backward={"dq": dq}), call, dy, dlse, dtype=torch.float32, storage=call.q.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_a_prescaled_operand_is_no_16_bit_sum(dtype, causal):
    problem = inputs.make(AttentionSpec(causal=causal), (1, 1, 64, 16), dtype=dtype)
    found = exact_arithmetic(Subject(broken.attention_of(Prescaled()), layout="BHSD"), problem)
    assert found.passed, found.detail
    assert "dq sum an operand that was scaled" in found.detail


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_16_bit_sum_is_still_seen(dtype):
    problem = inputs.make(AttentionSpec(causal=True), (1, 1, 64, 16), dtype=dtype)
    found = exact_arithmetic(Subject(broken.attention_of(broken.LowPrecisionAccumulation()), layout="BHSD"), problem)
    assert found.passed is False
    assert "dq" in found.data["wrong"]
