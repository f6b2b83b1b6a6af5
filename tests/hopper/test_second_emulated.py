"""The kernels of second derivatives, their own source in the emulator, against the tiled backend in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import emulator

from backlight.backends.hopper.backward import dq_convert
from backlight.backends.hopper.config import SecondConfig
from backlight.backends.hopper.second import host, prepass
from backlight.backends.tiled.second import Cotangents, second
from backlight.backends.tiled.tangent import tangent
from backlight.call import Call
from backlight.config import override
from cases import FP16, Case, case_id

CASES = (
    Case("full,150x200", b=1, hq=2, hkv=1, sq=150, sk=200, d=64),
    Case("even", b=2, hq=1, hkv=1, sq=128, sk=128, d=16),
    Case("causal", b=1, hq=2, hkv=1, sq=330, sk=330, d=32, causal=True),
    Case("causal,sq=150,sk=213", b=1, hq=1, hkv=1, sq=150, sk=213, d=64, causal=True),
    Case("causal,sq=213,sk=150", b=1, hq=1, hkv=1, sq=213, sk=150, d=64, causal=True),
    Case("window", b=1, hq=1, hkv=1, sq=300, sk=300, d=32, window=(70, 30)),
    Case("packed", hq=2, hkv=1, lengths_q=(130, 1, 0, 70), d=32, causal=True),
    Case("d=128", b=1, hq=1, hkv=1, sq=140, sk=140, d=128, causal=True),
    Case("d=96,dv=72", b=1, hq=1, hkv=1, sq=70, sk=140, d=96, dv=72),
)


def drawn(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.dtype)


def examine(call: Call, given: str = "qkv", late: bool = True, with_lse: bool = False) -> None:
    tangents = {name: drawn(getattr(call, name), 5 + n) for n, name in enumerate("qkv") if name in given}
    along = {name: t.double() for name, t in tangents.items()}
    exact = replace(call, **{name: getattr(call, name).double() for name in "qkv"})
    results = tangent(exact, along, None, save_u=False)
    y, lse, ty, tlse = results.y.half(), results.lse.float(), results.ty.half(), results.tlse.float()
    dty, dtlse = drawn(y, 11), drawn(lse, 12) if with_lse else None
    incoming = Cotangents(None, None, dty.double(), None if dtlse is None else dtlse.double())
    wanted = second(exact, along, results, incoming, frozenset({"dq", "dk", "dv"}))
    with emulator.emulated(host, dq_convert, prepass, late=late):
        found = host.by_inputs(call, y, lse, ty, tlse, dty, dtlse, *(tangents.get(name) for name in "qkv"))
    for name, want in wanted.items():
        scale = max(1.0, float(want.abs().max()))
        assert float((found[name].double() - want).abs().max()) <= 6e-3 * scale, name


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_case(case: Case, late: bool) -> None:
    examine(case.make(FP16).call, late=late, with_lse=case.causal)


@pytest.mark.parametrize("given", ["q", "k", "qk", "qv", "kv"])
def test_some_tangents(given: str) -> None:
    examine(Case("some", b=1, hq=1, hkv=1, sq=70, sk=140, d=16, causal=True).make(FP16).call, given)


@pytest.mark.parametrize(
    "config",
    [
        SecondConfig(64, stages=3),
        SecondConfig(32, direct=True, persistent=False),
        SecondConfig(64, ahead=True, together=2),
        SecondConfig(32, direct=True, ahead=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (80, 30)}], ids=str)
def test_configs(options: dict[str, object], config: SecondConfig) -> None:
    call = Case("configs", b=1, hq=2, hkv=2, sq=330, sk=330, d=16, **options).make(FP16).call
    with override("hopper.second", config):
        examine(call)
