"""What tests of the Triton kernels of second derivatives share: a problem's directions, small tiles, and the judgement by the
tiled backend in float64 of the same inputs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch
from dense import learned
from torch import Tensor

from backlight import registry
from backlight.backends.tiled.second import Cotangents, second
from backlight.backends.tiled.tangent import tangent
from backlight.backends.triton.config import KernelConfig
from backlight.call import Call
from backlight.config import override
from backlight.spec import LEARNED

NAMES = ("dy", "dlse", "dty", "dtlse")
SMALL = KernelConfig(16, 16, 4, 1)
KERNELS = (
    "second_dq",
    "second_dq_of_both",
    "second_dkdv",
    "second_dbias",
    "second_dpair",
    "dq",
    "dkdv",
    "dbias",
    "dpair",
    "tangent",
    "tangent_known",
    "forward",
)


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
