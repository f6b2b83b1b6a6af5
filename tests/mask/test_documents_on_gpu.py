"""Documents of known lengths on a GPU: packed, the same as their intervals, and nobody waits for the lengths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import backlight
from backlight import mask
from backlight.mask import Mask
from packed_documents import CASES, results

BACKENDS = ["hopper", "triton"]


def far(got: Tensor, want: Tensor) -> float:
    """Of what is finite; what is not must be the same."""
    got, want = got.double().cpu(), want.double()
    assert torch.equal(got.isfinite(), want.isfinite())
    kept = want.isfinite()
    return ((got[kept] - want[kept]).norm() / want[kept].norm().clamp(min=1e-3)).item()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_is_the_same_as_intervals(backend: str, name: str, d: int) -> None:
    case = CASES[name]
    tensors, made = case.tensors(torch.bfloat16, "cuda", d), case.mask("cuda")
    found = backlight.explain(**tensors, mask=made, backend=backend, **case.options)
    assert found.documents.startswith("documents of known lengths run packed")
    if found.reasons[backend]:
        pytest.skip("; ".join(found.reasons[backend]))
    got = results(made, tensors, backend=backend, **case.options)
    exact = {each: x.detach().cpu().double().requires_grad_() for each, x in tensors.items()}
    want = results(Mask(made.rows.cpu()), exact, **case.options)
    for part, value in want.items():
        assert far(got[part], value) < 2e-2, part


@contextmanager
def nobody_waits() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_waits_for_lengths(backend: str) -> None:
    """Of a new mask in every call, by tensor and by list."""
    drawn = torch.randn(1, 2, 400, 64, device="cuda", dtype=torch.bfloat16)
    q = drawn.requires_grad_()
    by_tensor = [torch.tensor(lengths, device="cuda") for lengths in ([120, 80, 200], [60, 300, 5], [0, 1, 399])]

    def step(made: Mask) -> None:
        y = backlight.attention(q, q, q, mask=made, causal=True, backend=backend)
        torch.autograd.grad(y, q, y.detach())

    reasons = backlight.explain(q, q, q, mask=mask.documents(lengths=by_tensor[0], length=400), causal=True).reasons[backend]
    if reasons:
        pytest.skip("; ".join(reasons))
    for _ in range(3):
        # compiled and recorded
        step(mask.documents(lengths=by_tensor[0], length=400))
    with nobody_waits():
        for lengths in by_tensor:
            step(mask.documents(lengths=lengths, length=400))


@pytest.mark.gpu
def test_backends_that_would_wait_take_intervals() -> None:
    q = torch.randn(1, 2, 400, 64, device="cuda")
    made = mask.documents(lengths=[120, 280], device="cuda")
    for options, x in (({"backend": "tiled"}, q), ({}, q.double())):
        assert "would wait for the device" in backlight.explain(x, x, x, mask=made, **options).documents
