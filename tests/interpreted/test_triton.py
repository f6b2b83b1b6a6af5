"""The Triton kernels on a CPU, through Triton's interpreter, against the same cases and the same gate as every backend.

Run as `TRITON_INTERPRET=1 pytest tests/interpreted` (`make test` does): the interpreter is chosen when kernels are imported,
and in that process it would also be chosen for every other test. Its bf16 matmul is wrong, so fp32 and fp16 only.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from backlight.backends.triton.config import KernelConfig
from backlight.config import override
from cases import BY_NAME, PACKED, SINGLES, TOGETHER, Case, case_id
from gate import judge, measure
from running import run

AWKWARD = (
    "causal,s=1",
    "causal,s=127",
    "causal,sq=63,sk=200",
    "causal,d=40",
    "causal,d=16,dv=40",
    "gqa,8:1",
    "mqa,h=3",
    "sk=0,sink",
    "rows without keys,everything",
    "window sees nothing",
    "bias,longer than s",
    "bias,two-sided,sq<sk",
    "bias,origin negative",
    "bias,origin beyond the table",
    "tau,minus one",
    "tau,minus one,self only",
    "tau,mixed signs",
    "tau,nothing survives,dlse",
    "low lse,tau,bias",
    "large logits,sink",
    "softcap,saturated",
)
CASES = (*SINGLES, *TOGETHER, *PACKED, *(BY_NAME[name] for name in AWKWARD))


def verdict_of(case: Case, dtype: torch.dtype) -> object:
    problem = case.make(dtype)
    yardsticks = measure(problem.call, problem.dy, problem.dlse)
    return judge(problem.call, problem.dy, problem.dlse, run(problem, "triton"), yardsticks)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_fp32(case: Case) -> None:
    verdict = verdict_of(case, torch.float32)
    assert verdict.ok, f"{case.name}\n{verdict}"


@pytest.mark.parametrize("case", TOGETHER, ids=case_id)
def test_fp16(case: Case) -> None:
    verdict = verdict_of(case, torch.float16)
    assert verdict.ok, f"{case.name}\n{verdict}"


@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (32, 64), (64, 64)], ids=str)
@pytest.mark.parametrize("name", ["bias,s=200", "everything,s=200"])
def test_blocks(name: str, blocks: tuple[int, int]) -> None:
    """Tile edges fall elsewhere for every block size; diagonals of dbias cross them differently."""
    config = KernelConfig(*blocks, num_warps=4, num_stages=1)
    with override("triton.forward", config), override("triton.dq", config), override("triton.dkdv", config):
        verdict = verdict_of(BY_NAME[name], torch.float32)
    assert verdict.ok, f"{name} {blocks}\n{verdict}"
