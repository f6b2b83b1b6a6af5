"""Forward mode on a Hopper GPU through the public call, against the tiled backend in float64."""

from __future__ import annotations

import pytest
import torch

import backlight

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def hopper() -> None:
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    if reasons := backlight.explain(q, q, q).reasons["hopper"]:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (100, 20)}, {"causal": True, "scale": 0.3}],
    ids=["full", "causal", "window", "scale"],
)
def test_against_float64(options: dict[str, object], d: int, dtype: torch.dtype) -> None:
    """Three times: the last call is replayed."""
    torch.manual_seed(0)
    shapes = [(2, heads, length, d) for heads, length in ((4, 333), (2, 517), (2, 517))]
    tensors = [torch.randn(shape, device="cuda").to(dtype) for shape in (*shapes, *shapes)]
    (y, lse), (ty, tlse) = backlight.attention_jvp(*(x.double() for x in tensors), **options, return_lse=True, backend="tiled")
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-3
    for _ in range(3):
        found = backlight.attention_jvp(*tensors, **options, return_lse=True, backend="hopper")
        for got, want in zip((*found[0], *found[1]), (y, lse, ty, tlse), strict=True):
            assert float((got - want).abs().max()) <= limit * max(1.0, float(want.abs().max()))


def test_chosen_and_refused() -> None:
    """What the kernel does not take goes to the next backend; named, it says why."""
    q = torch.randn(1, 2, 100, 64, dtype=torch.bfloat16, device="cuda")
    sink = torch.zeros(2, device="cuda")
    with pytest.raises(NotImplementedError, match="hopper: has no forward-mode derivative with sink"):
        backlight.attention_jvp(q, q, q, q, sink=sink, backend="hopper")
    assert backlight.attention_jvp(q, q, q, q, sink=sink)[1].isfinite().all()
    wide = torch.randn(1, 2, 100, 192, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(NotImplementedError, match="tangents with head dimension 192 above 128"):
        backlight.attention_jvp(wide, wide, wide, wide, backend="hopper")
