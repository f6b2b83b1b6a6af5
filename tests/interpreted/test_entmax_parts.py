"""Entmax of a part of a row's keys by the Triton kernels in Triton's interpreter: what blocks of a ring ask for.

The ring itself runs ranks as threads, which the interpreter does not take.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from backlight.backends.tiled import BACKEND as TILED
from backlight.backends.triton import BACKEND
from backlight.call import Call, Part
from cases import Case, case_id

SMALL = {"b": 2, "hq": 2, "hkv": 1, "sq": 36, "sk": 40, "d": 8}
CASES = (
    Case("1.5", causal=True, entmax=1.5, **SMALL),
    Case("learned,bias,gate", causal=True, entmax=(1.3, 1.8), gate=True, bias=9, **SMALL),
    Case("packed", entmax=(1.5, 1.25), lengths_q=(9, 0, 14), lengths_k=(14, 3, 13), causal=True, d=8),
    Case("mask", entmax=2.0, mask="two runs", **SMALL),
)


def part_of(case: Case) -> tuple[Call, torch.Tensor]:
    """Of a call whose rows have other keys elsewhere too, so that their thresholds lie higher; and a gradient at its output."""
    problem = case.make(torch.float32)
    lse = TILED.forward(problem.call, False)[1]
    torch.manual_seed(1)
    part = Part((lse + torch.rand_like(lse)).masked_fill(lse == -torch.inf, 0.5), eta=torch.randn_like(lse))
    return replace(problem.call, part=part), problem.dy


def compare(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-5 * max(1.0, float(wanted.abs().max())), rtol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_forward(case: Case) -> None:
    call, _ = part_of(replace(case, gate=False))
    y, lse, u, _ = BACKEND.forward(call, True)
    assert torch.equal(lse, call.part.lse)
    compare(y, TILED.forward(call, True)[0])
    compare(u, TILED.forward(call, True)[2])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_sums(case: Case) -> None:
    call, _ = part_of(case)
    wanted = TILED.entmax_sums(call)
    # beyond alpha 1.5 the third has no bound, and no use
    for number in (0, 1, 3) if call.spec.alpha != 1.5 else range(4):
        compare(BACKEND.entmax_sums(call)[number], wanted[number])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_backward(case: Case) -> None:
    """dlse is -delta of the whole row, as it stands."""
    call, dy = part_of(case)
    torch.manual_seed(2)
    nothing, minus_delta = torch.zeros(1).expand(dy.shape), torch.randn(dy.shape[:3])
    needs = frozenset({"dq", "dk", "dv", "dentmax"} | ({"dbias"} if call.bias is not None else set()))
    given = (call, nothing, call.part.lse, nothing, dy, minus_delta, needs)
    found, wanted = BACKEND.backward(*given), TILED.backward(*given)
    assert found.keys() == needs
    for name in needs:
        compare(found[name], wanted[name])
