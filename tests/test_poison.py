"""The fixture that poisons memory does so; a kernel that reads what it never wrote is found."""

from __future__ import annotations

import pytest
import torch

from backlight import registry
from cases import BY_NAME, FP32
from gate import judge
from running import run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_uninitialised_memory_is_nan(dtype: torch.dtype) -> None:
    like = torch.ones(3, 4, dtype=dtype)
    made = (
        torch.empty(3, 4, dtype=dtype),
        torch.empty((3, 4), dtype=dtype),
        torch.empty_like(like),
        torch.empty_strided((3, 4), (1, 3), dtype=dtype),
        torch.empty_permuted((3, 4), (1, 0), dtype=dtype),
        like.new_empty(3, 4),
        like.new_empty((3, 4)),
        like.new_empty_strided((3, 4), (1, 3)),
    )
    for x in made:
        assert x.shape == (3, 4)
        assert x.dtype == dtype
        assert bool(x.isnan().all())


def test_integers_are_poisoned_too() -> None:
    assert torch.empty(5, dtype=torch.int32).tolist() == [2**31 - 1] * 5


def test_requires_grad_survives() -> None:
    x = torch.empty(2, requires_grad=True)
    assert x.requires_grad
    assert x.is_leaf


def test_other_factories_are_untouched() -> None:
    assert not torch.zeros(3).isnan().any()
    assert not torch.full((3,), 2.0).isnan().any()
    assert not torch.randn(3).isnan().any()


@pytest.mark.clean_memory
def test_marker_leaves_the_allocators_alone() -> None:
    assert torch.empty.__module__ != "conftest"
    assert not hasattr(torch.empty, "__wrapped__")


def test_a_row_that_was_never_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that allocates dk and forgets its last row: with luck such memory holds zeros, here it holds NaN."""
    backend = type(registry.get("tiled"))
    complete = backend.backward

    def forgetful(*args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        grads = complete(*args, **kwargs)
        dk = torch.empty_like(grads["dk"])
        dk[:, :, :-1] = grads["dk"][:, :, :-1]
        return grads | {"dk": dk}

    problem = BY_NAME["causal"].make(FP32)
    assert judge(problem.call, problem.dy, None, run(problem, "tiled")).ok
    monkeypatch.setattr(backend, "backward", forgetful)
    verdict = judge(problem.call, problem.dy, None, run(problem, "tiled"))
    assert verdict.defective == {"dk"}
    assert "not finite" in verdict.defects[0]
