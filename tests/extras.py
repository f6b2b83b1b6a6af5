"""A case with what a call returns besides y and lse, and keeps beside y, on one backend."""

from __future__ import annotations

import pytest
import torch

import backlight
from backlight import registry
from backlight.reference import max_logit
from cases import Case
from gate import judge
from running import forward, leaves, run

# Hopper kernels that keep a row's first maximum know the largest logit by a weight of 16 bits
LIMIT = {"tiled": 0.0, "triton": 0.0, "hopper": 2.0**-8}


def examine(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """The largest logits of a case, of all heads, or the refusal that the call has without them."""
    there = case.make(dtype, device=device).call
    inputs = leaves(there)
    if registry.why_not(registry.get(backend), there):
        with pytest.raises(backlight.Unsupported):
            forward(there, inputs, backend, return_max_logit=True)
        return
    y, lse, found = forward(there, inputs, backend, return_max_logit=True)
    alone = forward(there, inputs, backend)
    assert torch.equal(y, alone[0])
    assert torch.equal(lse, alone[1])
    assert not found.requires_grad
    wanted = max_logit(case.make(dtype).call)
    assert found.shape == wanted.shape
    largest = wanted.masked_fill(wanted == -torch.inf, 0).abs()
    # sums of products in fp32
    far = torch.where(found.cpu() == wanted, 0.0, (found.double().cpu() - wanted).abs())
    assert (far <= LIMIT[backend] + 4e-6 * (1 + largest)).all(), f"{case.name}: {found} is not {wanted}"


def with_low(case: Case, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """A case with `exact_delta`, through the public call."""
    host, there = case.make(dtype), case.make(dtype, device=device)
    if registry.why_not(registry.get(backend), there.call):
        with pytest.raises(backlight.Unsupported):
            run(there, backend, exact_delta=True)
        return
    found = {name: x.cpu() for name, x in run(there, backend, exact_delta=True).items()}
    verdict = judge(host.call, host.dy, host.dlse, found)
    assert verdict.ok, f"{case.name}\n{verdict}"
