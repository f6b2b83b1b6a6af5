"""The largest logits and the low half of y from the Triton kernels, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from extras import examine, with_low

from cases import BY_NAME, FP16, FP32, Case, case_id

NAMES = (
    "plain",
    "causal",
    "window",
    "softcap",
    "softcap,saturated",
    "bias",
    "sink",
    "tau",
    "gate",
    "gqa",
    "varlen",
    "sk=0,sink",
    "causal,d=16,dv=40",
    "rows without keys,everything",
    "window sees nothing",
    "mask",
    "mask,nothing is seen",
    "large logits,sink",
)
HIDING = tuple(case for case in BY_NAME.values() if case.pair_bias is not None and case.sq <= 60 and case.d <= 32)[:4]
CASES = (*(BY_NAME[name] for name in NAMES), *HIDING)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=case_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_largest_logits(case: Case, dtype: torch.dtype) -> None:
    examine(case, dtype, "triton")


@pytest.mark.parametrize("case", [case for case in CASES if case.tau is None], ids=case_id)
def test_low_half(case: Case) -> None:
    with_low(case, FP16, "triton")
