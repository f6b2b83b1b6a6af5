"""The same cases on a CUDA device, judged by the oracle on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import backlight
from backlight import registry
from cases import BF16, CASES, FP16, FP32, FP64, Case, case_id
from gate import judge
from running import run, ways

RUNS = [(case, dtype) for case in CASES for dtype in dict.fromkeys((BF16, FP32, *case.dtypes))]


def examine(case: Case, dtype: torch.dtype, backend: str, device: str) -> list[str]:
    """Why the backend refuses the case; if it does not, its results are judged."""
    host, there = case.make(dtype), case.make(dtype, device=device)
    assert torch.equal(host.call.q, there.call.q.cpu())
    refused = []
    for fixed, asked in ways(there.call):
        reasons = registry.why_not(registry.get(backend), asked)
        if reasons:
            with pytest.raises(backlight.Unsupported) as refusal:
                run(there, backend, fixed=fixed)
            assert refusal.value.reasons == {backend: reasons}
            refused.append(reasons)
            continue
        result = run(there, backend, fixed=fixed)
        assert {value.device.type for value in result.values()} == {torch.device(device).type}
        result = {name: value.cpu() for name, value in result.items()}
        verdict = judge(host.call, host.dy, host.dlse, result, names=tuple(result))
        assert verdict.ok, f"{case.name}, {fixed=}\n{verdict}"
    # what ran in one of two ways was not refused
    return refused[-1] if len(refused) == len(ways(there.call)) else []


@pytest.mark.gpu
@pytest.mark.parametrize("backend", registry.names())
@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=case_id)
def test_case_on_cuda(backend: str, case: Case, dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    # the gate expects fp32 products, not TF32
    assert not torch.backends.cuda.matmul.allow_tf32
    if reasons := examine(case, dtype, backend, "cuda"):
        record_property("refused", "; ".join(reasons))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", registry.names())
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=case_id)
@pytest.mark.parametrize("length", [512, 1000])
def test_several_tiles_on_cuda(backend: str, dtype: torch.dtype, length: int) -> None:
    everything = next(case for case in CASES if case.name == "everything,s=200")
    examine(replace(everything, name=f"everything,s={length}", sq=length, sk=length, tau=(0.4, 0.1)), dtype, backend, "cuda")


@pytest.mark.gpu
def test_mixed_devices_are_named() -> None:
    q = torch.zeros(1, 1, 4, 8, device="cuda")
    with pytest.raises(ValueError, match=r"k must be on the device of q, cuda:0, got cpu"):
        backlight.attention(q, q.cpu(), q)


def test_examination_works_on_the_host() -> None:
    """What the device tests do, on a machine without one."""
    examine(CASES[0], BF16, "tiled", "cpu")
