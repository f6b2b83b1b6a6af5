"""Entmax on Hopper compiled for sm_90a: spills, warnings, shared memory, instructions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aot import SHARED_MEMORY, Report, compiled

from backlight.backends.hopper.backward import alive, dq_convert, host, prepass
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import entmax_config, exponent_of
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.spec import AttentionSpec

BF16, FP16 = torch.bfloat16, torch.float16
# by head dimension: values of a tile, around its loops. The squares of a cap add to them, and so do higher powers
ALLOWED_SPILLS = {64: 80, 128: 256}
ALLOWED_SPILLS_MORE = {64: 256, 128: 1024}
ALLOWED_BACKWARD = 128


def call_of(
    d: int,
    terms: tuple[str, ...] = (),
    dtype: torch.dtype = BF16,
    alpha: float = 1.5,
    packed: bool = False,
    window: tuple[int, int] | None = None,
) -> Call:
    batch, length = (1, 5000) if packed else (1, 2048)
    q, k = torch.zeros(batch, 4, length, d, dtype=dtype), torch.zeros(batch, 2, length, d, dtype=dtype)
    cu = torch.tensor([0, 2000, length], dtype=torch.int32) if packed else None
    given: dict[str, torch.Tensor] = {"sink": torch.zeros(4), "gate": q}
    given = {name: tensor for name, tensor in given.items() if name in terms}
    spec = AttentionSpec(
        causal=window is None,
        window=window or (None, None),
        softcap=30.0 if "softcap" in terms else None,
        entmax=True,
        alpha=alpha,
        **dict.fromkeys(given, True),
    )
    return Call(spec, q, k, k, **given, entmax=torch.full((4,), alpha), cu_seqlens_q=cu, cu_seqlens_k=cu)


def reports_of(call: Call, *modules: ModuleType) -> list[Report]:
    with compiled(*modules) as reports:
        y, lse, u, _ = forward.forward(call, save_u=True)
        if backward in modules:
            host.backward(call, y, lse, u, y, lse, frozenset({"dq", "dk", "dv"}))
    return reports


def examine(call: Call) -> None:
    (report,), config = reports_of(call, forward), entmax_config(call)
    more = call.spec.softcap is not None or exponent_of(call) != 2
    allowed = ALLOWED_SPILLS_MORE if more else ALLOWED_SPILLS
    assert report.spills <= allowed[call.q.shape[-1]], str(report)
    assert not report.warnings, str(report)
    assert report.shared <= SHARED_MEMORY, str(report)
    assert report.registers == (168 if config.consumers == 2 else 128), str(report)
    if report.sass:
        assert report.has("HGMMA"), str(report)
        assert report.has("FFMA.SAT"), "what lies above a threshold is a multiply-add that saturates"


def examine_backward(call: Call) -> None:
    _, look, *reports = reports_of(call, forward, backward, prepass, alive, dq_convert)
    assert look.spills == 0, str(look)
    assert {report.kernel for report in reports} >= {"_alive_kernel", "_prepass_kernel"}
    for report in reports:
        assert report.spills <= (ALLOWED_BACKWARD if report.kernel.startswith("_bwd") else 0), str(report)
        assert not report.warnings, str(report)
        assert report.shared <= SHARED_MEMORY, str(report)


@pytest.mark.parametrize("d", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_forward(d: int) -> None:
    examine(call_of(d))


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("options", [{}, {"alpha": 1.25}, {"alpha": 1.37}, {"terms": ("softcap",)}], ids=str)
def test_backward(d: int, options: dict[str, Any]) -> None:
    examine_backward(call_of(d, **options))


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("alpha", [1.25, 1.37])
def test_alphas(d: int, alpha: float) -> None:
    examine(call_of(d, alpha=alpha))


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_everything_packed_with_a_window(d: int, dtype: torch.dtype) -> None:
    examine(call_of(d, ("sink", "softcap", "gate"), dtype, packed=True, window=(100, 20)))
