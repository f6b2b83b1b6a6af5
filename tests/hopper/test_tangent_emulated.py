"""The tangent kernel's own source in the emulator, against the tiled backend in float64 of the same inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import emulator
from modules import mutant

from backlight.backends.hopper import BACKEND
from backlight.backends.hopper.config import TangentConfig
from backlight.backends.hopper.tangent import consumer, host, kernel, producer
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
    Case("packed,no keys", hq=1, hkv=1, lengths_q=(70, 65), lengths_k=(0, 90), d=32),
    Case("d=128", b=1, hq=1, hkv=1, sq=140, sk=140, d=128, causal=True),
    Case("d=96,dv=72", b=1, hq=1, hkv=1, sq=70, sk=140, d=96, dv=72),
)


def tangents_of(call: Call) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(getattr(call, name).shape, generator=generator).to(call.q.dtype) for name in "qkv"}


def examine(call: Call, tangents: dict[str, Tensor], late: bool = True, known: bool = False) -> None:
    exact = replace(call, **{name: getattr(call, name).double() for name in "qkv"})
    wanted = tangent(exact, {name: t.double() for name, t in tangents.items()}, None, save_u=False)
    saved = (wanted.y.to(call.q.dtype), wanted.lse.float()) if known else ()
    with emulator.emulated(host, late=late):
        y, lse, ty, tlse = host.tangent(call, *(tangents.get(name) for name in "qkv"), *saved)
    for name, got, want in (("y", y, wanted.y), ("lse", lse, wanted.lse), ("ty", ty, wanted.ty), ("tlse", tlse, wanted.tlse)):
        at = want.isfinite()
        assert torch.equal(at, got.isfinite()), name
        scale = max(1.0, float(want[at].abs().max()))
        assert float((got.double() - want)[at].abs().max()) <= (3e-3 if "y" in name else 2e-5) * scale, name


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_case(case: Case, known: bool, late: bool) -> None:
    call = case.make(FP16).call
    examine(call, tangents_of(call), late, known)


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("given", ["q", "k", "v", "qk", "qv", "kv"])
def test_some_tangents(given: str, known: bool) -> None:
    call = Case("some", b=1, hq=1, hkv=1, sq=70, sk=140, d=16, causal=True).make(FP16).call
    tangents = tangents_of(call)
    examine(call, {name: tangents[name] for name in given}, known=known)


@pytest.mark.parametrize(
    "config",
    [
        TangentConfig(64, 3, pingpong=True),
        TangentConfig(128, 2, pingpong=True, ahead=0),
        TangentConfig(64, 2, stages=4),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (80, 30)}], ids=str)
def test_configs(options: dict[str, object], config: TangentConfig) -> None:
    call = Case("configs", b=1, hq=2, hkv=1, sq=330, sk=330, d=16, **options).make(FP16).call
    with override("hopper.tangent", config):
        examine(call, tangents_of(call))


def test_refusals() -> None:
    def why_not(d: int, dv: int) -> tuple[str, ...]:
        return BACKEND.why_not_differentiated("tangent", Case("widths", b=1, sq=8, sk=8, d=d, dv=dv).make(FP16).call)

    assert why_not(64, 64) == why_not(96, 72) == ()
    assert why_not(192, 128) == ("tangents with head dimension 192 above 128",)
    assert why_not(64, 128) == ("tangents with head dimensions 64 and 128, whose tiles differ",)
    assert BACKEND.derivatives["tangent"] < BACKEND.takes


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    wait_full(p.v, count)\n    ts = p32\n", "    ts = p32\n"),
        ("    release(p.v, previous)\n    ts_token", "    ts_token"),
        ("outputs(p, o_token, w_token, PIECES)", "outputs(p, o_token, w_token, PIECES + 1)"),
        ("mean, nu)", "mean + 1.0, nu)"),
        ("rows.nu + row_totals", "row_totals"),
        ("w * inverse - shift * y", "w * inverse"),
        ("mbarrier.expect(full, desc.block_type.nbytes * 2", "mbarrier.expect(full, desc.block_type.nbytes * 3"),
    ],
    ids=["no wait for v", "v never released", "o read in flight", "nu moves", "tlse without nu", "not centred", "bytes"],
)
def test_a_broken_kernel_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """All but one: any nu is right, as long as it is the same throughout."""
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    call = Case("broken", b=1, hq=1, hkv=1, sq=200, sk=270, d=16, causal=True).make(FP16).call
    (module,) = (module for module in (consumer, producer) if old in Path(module.__file__ or "").read_text())
    name = module.__name__.rpartition(".")[2]
    monkeypatch.setattr(kernel, name, getattr(mutant(tmp_path, module, old, new), name))
    if "mean" in old:
        examine(call, tangents_of(call))
        return
    with pytest.raises((AssertionError, RuntimeError)):
        examine(call, tangents_of(call))
