"""The kernel for e4m3 in the emulator, against float64 of the same rounded inputs with the same rounding of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import emulator

from backlight import fp8
from backlight.api import call_of
from backlight.backends.hopper.fp8 import host
from backlight.call import Call
from backlight.fp8 import calls, emulated
from backlight.intervals import visible_whole
from backlight.spec import AttentionSpec

CASES = {
    "full,150x200": (1, 2, 1, 150, 200, 64, {}),
    "even": (2, 1, 1, 128, 256, 64, {}),
    "causal": (1, 2, 1, 330, 330, 64, {"causal": True}),
    "causal,sq=150,sk=213": (1, 1, 1, 150, 213, 64, {"causal": True}),
    "causal,sq=213,sk=150": (1, 1, 1, 213, 150, 64, {"causal": True}),
    "window": (1, 1, 1, 300, 300, 64, {"window": (70, 30)}),
    "d=128": (1, 1, 1, 140, 300, 128, {"causal": True}),
    "d=256,150x200": (1, 2, 1, 150, 200, 256, {}),
    "d=256,causal": (2, 1, 1, 330, 330, 256, {"causal": True}),
    "d=256,causal,sq=150,sk=413": (1, 2, 1, 150, 413, 256, {"causal": True}),
    "d=256,causal,sq=213,sk=150": (1, 1, 1, 213, 150, 256, {"causal": True}),
    "d=256,window": (1, 1, 1, 300, 300, 256, {"window": (70, 30)}),
}


def wanted(given: fp8.Quantised, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double() for x in fp8.dequantized(given))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = given.scale * q @ k.mT / torch.log(torch.tensor(2.0, dtype=torch.float64))
    s = s.masked_fill(~visible_whole(Call(spec, q, k, v)), -torch.inf)
    top = s.amax(-1, keepdim=True).ceil().clamp(min=-1e30)
    p = torch.exp2(s - top + 8).float().to(torch.float8_e4m3fn).double()
    total = p.sum(-1, keepdim=True)
    y = (p @ v / total).nan_to_num(0.0)
    lse = (top + torch.log2(total) - 8)[..., 0] * torch.log(torch.tensor(2.0, dtype=torch.float64)) + given.offset.double()
    return y, lse


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, late: bool) -> None:
    b, hq, hkv, sq, sk, d, options = CASES[name]
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(b, h, s, d, generator=generator).half() for h, s in ((hq, sq), (hkv, sk), (hkv, sk)))
    spec = AttentionSpec(**options)
    given = fp8.quantize(q, k + 1, v)
    with emulator.emulated(host, late=late):
        y, lse = host.forward(Call(spec, q, k, v), given)
    y_wanted, lse_wanted = wanted(given, spec)
    seen = lse_wanted.isfinite()
    assert torch.equal(seen, lse.isfinite())
    # a weight near the middle of two neighbours may go either way
    assert float((y.double() - y_wanted).square().mean().sqrt() / y_wanted.square().mean().sqrt()) < 3e-3
    assert float((lse.double() - lse_wanted)[seen].abs().max()) < 1e-3
    assert not y[~seen].any()


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEADS, ROWS, COLUMNS = 2, 150, 200
TERMS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "bias": {"bias": drawn(HEADS, 60, seed=4), "bias_origin": 20, "causal": True},
    "sink": {"sink": 2 * drawn(HEADS, seed=5), "causal": True},
    "sink alone": {"sink": torch.full((HEADS,), torch.inf)},
    "no sink": {"sink": torch.full((HEADS,), -torch.inf)},
    "gate": {"gate": drawn(1, HEADS, ROWS, 64, seed=6).half()},
    "all": {
        "softcap": 3.0,
        "bias": drawn(HEADS, 300, seed=4),
        "sink": 2 * drawn(HEADS, seed=5),
        "gate": drawn(1, HEADS, ROWS, 64, seed=6).half(),
        "window": (90, 20),
    },
}


def agree(call: Call, late: bool, most: float = 1e-3) -> None:
    """The kernel, in the emulator, with the emulation in PyTorch.

    most: error of lse. A weight that went to its other neighbour shows where few keys are seen: an eighth of a hundredth.
    """
    given = calls.quantise(call)
    with emulator.emulated(host, late=late):
        y, lse = host.forward(call, given)
    y_wanted, lse_wanted = emulated.forward(call, given)
    seen = lse_wanted.isfinite()
    assert torch.equal(lse[~seen], lse_wanted[~seen])
    assert float((y.double() - y_wanted.double()).norm()) <= 3e-3 * float(y_wanted.double().norm())
    if seen.any():
        assert float((lse.double() - lse_wanted)[seen].abs().max()) < most


def test_a_bias_of_minus_infinity_hides_keys() -> None:
    """Whole blocks of them too, where nothing else hides any."""
    q, k, v = (drawn(1, 1, rows, 64, seed=n).half() for n, rows in enumerate((128, 256, 256)))
    bias = drawn(1, 400, seed=4)
    bias[:, 100:330] = -torch.inf
    agree(call_of(q, k + 1, v, bias=bias, bias_origin=200), True, 5e-3)


def inputs(d: int) -> list[Tensor]:
    shapes = (HEADS, ROWS), (1, COLUMNS), (1, COLUMNS)
    return [drawn(1, h, s, d, seed=n).half() for n, (h, s) in enumerate(shapes)]


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("name", TERMS)
def test_terms(name: str, late: bool) -> None:
    q, k, v = inputs(64)
    agree(call_of(q, k + 1, v, **TERMS[name]), late)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("name", ["softcap", "bias", "sink", "sink alone", "gate", "all"])
def test_terms_of_wide_heads(name: str, late: bool) -> None:
    q, k, v = inputs(256)
    options = dict(TERMS[name])
    if "gate" in options:
        options["gate"] = drawn(1, HEADS, ROWS, 256, seed=6).half()
    agree(call_of(q, k + 1, v, **options), late)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (90, 20)}], ids=str)
def test_softcap_of_heads_of_128(options: dict[str, Any], late: bool) -> None:
    q, k, v = inputs(128)
    agree(call_of(q, k + 1, v, softcap=3.0, **options), late, 2e-3)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize(
    ("name", "d"),
    [*((name, 64) for name in ("plain", "causal", "bias", "sink", "gate")), ("causal", 256), ("gate", 256)],
)
def test_packed(name: str, d: int, late: bool) -> None:
    """Sequences of all lengths, one without rows, one without keys."""
    cu_q, cu_k = torch.tensor([0, 130, 130, 200, 340]), torch.tensor([0, 200, 201, 201, 400])
    q, k, v = (drawn(s, h, d, seed=n).half() for n, (h, s) in enumerate(((HEADS, 340), (1, 400), (1, 400))))
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "bias": TERMS["bias"],
        "sink": TERMS["sink"],
        "gate": {"gate": drawn(340, HEADS, d, seed=6).half()},
    }
    agree(call_of(q, k + 1, v, cu_q, cu_k, **options[name]), late)
