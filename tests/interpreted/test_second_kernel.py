"""The Triton kernels of second derivatives in Triton's interpreter, against the tiled backend in float64 of the same inputs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from contextlib import ExitStack

import backlight
from backlight import registry
from backlight.backends.tiled.second import Cotangents, second
from backlight.backends.tiled.tangent import tangent
from backlight.backends.triton.config import KernelConfig
from backlight.call import Call
from backlight.config import override
from backlight.spec import LEARNED
from cases import BY_NAME, FP32, Case, case_id

NAMES = ("dy", "dlse", "dty", "dtlse")
CASES = (
    Case("causal,gqa,sq<sk", hq=4, hkv=2, sq=19, sk=37, causal=True),
    Case("full,dv", sq=37, sk=21, d=16, dv=24),
    Case("everything", b=1, sq=20, sk=36, causal=True, window=(25, 0), softcap=1.5, bias=24, bias_origin=3, sink=True, gate=True),
    Case("varlen,empty k", lengths_q=(10, 17, 7), lengths_k=(0, 20, 20), window=(9, 4), sink=True, bias=12),
    Case("rows without keys", b=1, causal=True, sq=37, sk=10, sink=True, gate=True),
    Case("mask", b=1, mask="two runs", sq=37, sk=33, bias=12),
    Case("mask,pos,varlen", mask="run", pos=True, lengths_q=(12, 10), lengths_k=(20, 9), causal=True, gate=True),
    Case("sk=0", sq=5, sk=0, sink=True, bias=8),
    Case("sq=0", sq=0, sk=5, bias=8, gate=True),
)
SMALL = KernelConfig(16, 16, 4, 1)
KERNELS = ("second_dq", "second_dkdv", "second_dbias", "dq", "dkdv", "dbias", "tangent")


def learned(call: Call) -> dict[str, Tensor]:
    return {name: x for name in LEARNED if (x := getattr(call, name)) is not None}


def tangents_of(call: Call) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(x.shape, generator=generator).to(x.dtype) for name, x in learned(call).items()}


def cotangents_of(call: Call) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    shape = (*call.q.shape[:3], call.v.shape[-1])
    shapes = dict(zip(NAMES, (shape, shape[:3], shape, shape[:3]), strict=True))
    drawn = {name: torch.randn(size, generator=generator) for name, size in shapes.items()}
    return {name: x.to(call.q.dtype) if x.dim() == 4 else x for name, x in drawn.items()}


def small_tiles(config: KernelConfig = SMALL) -> ExitStack:
    forced = ExitStack()
    for kernel in KERNELS:
        forced.enter_context(override(f"triton.{kernel}", config))
    return forced


def judge(call: Call, tangents: dict[str, Tensor], cotangents: dict[str, Tensor], limit: float) -> None:
    """All gradients, of the tangent's results that the float64 problem has."""
    exact = replace(call, **{name: x.double() for name, x in learned(call).items()})
    needs = frozenset([*(f"d{name}" for name in learned(call)), *(f"dt{name}" for name in tangents)])
    along = {name: t.double() for name, t in tangents.items()}
    results = tangent(exact, along, None, save_u=False)
    incoming = [cotangents.get(name) for name in NAMES]
    wanted = second(exact, along, results, Cotangents(*(None if x is None else x.double() for x in incoming)), needs)
    y, lse, _, ty, tlse, _ = results.all
    rounded = (y.to(call.q.dtype), lse.float(), None, ty.to(call.q.dtype), tlse.float(), None)
    found = registry.get("triton").second(call, tangents, rounded, tuple(incoming), needs)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        got = found[name]
        assert got.dtype == getattr(call, name[1:] if name[1:] in LEARNED else name[2:]).dtype
        assert got.isfinite().all(), name
        if want.numel():
            scale = max(1.0, float(want.abs().max()))
            assert float((got.double() - want).abs().max()) <= limit * scale, name


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_fp32(case: Case) -> None:
    call = case.make(FP32).call
    with small_tiles():
        judge(call, tangents_of(call), cotangents_of(call), 1e-5)
