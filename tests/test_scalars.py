"""Scalar arguments as they come from elsewhere: numbers of NumPy, numbers of any size, and errors that cross processes."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import backlight

PLAIN: dict[str, Any] = {
    "causal": True,
    "window": (2, 1),
    "scale": 0.25,
    "softcap": 4.0,
    "bias_origin": 1,
    "deterministic": True,
}


def attend(**options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 6, 4)
    return backlight.attention(q, q, q, bias=torch.ones(2, 3), **(PLAIN | options))


@pytest.mark.parametrize(
    "option",
    [
        {"causal": np.True_},
        {"window": (np.int64(2), np.uint8(1))},
        {"window": [np.int8(2), 1]},
        {"scale": np.float32(0.25)},
        {"scale": np.float64(0.25)},
        {"softcap": np.float16(4)},
        {"softcap": np.int64(4)},
        {"bias_origin": np.int64(1)},
        {"deterministic": np.True_},
    ],
    ids=lambda value: str(value)[:60],
)
def test_numbers_of_numpy_mean_the_same(option: dict[str, Any]) -> None:
    wanted = attend()
    # once bound, once remembered
    for _ in range(2):
        assert torch.equal(attend(**option), wanted)


@pytest.mark.parametrize(
    ("option", "error", "sentence"),
    [
        ({"causal": np.int64(1)}, TypeError, "causal must be a bool, got int"),
        ({"causal": np.array(True)}, TypeError, "causal must be a bool, got ndarray"),
        ({"causal": torch.tensor(True)}, TypeError, "causal must be a bool, got Tensor"),
        ({"window": (np.True_, 1)}, TypeError, "window left must be an int or None, got True"),
        ({"window": (1, np.float32(2))}, TypeError, "window right must be an int or None, got 2.0"),
        ({"scale": np.True_}, TypeError, "scale must be a number or None, got bool"),
        ({"scale": np.complex64(1)}, TypeError, "scale must be a number or None, got complex"),
        ({"scale": np.array(0.25)}, TypeError, "scale must be a number or None, got ndarray"),
        ({"scale": np.float32("nan")}, ValueError, "scale must be finite, got nan"),
        ({"scale": -float("inf")}, ValueError, "scale must be finite, got -inf"),
        ({"scale": 10**400}, ValueError, "scale must be finite as a float, got an int of 1329 bits"),
        ({"softcap": 10**400}, ValueError, "softcap must be finite as a float, got an int of 1329 bits"),
        ({"softcap": float("inf")}, ValueError, "softcap must be finite, got inf"),
        ({"bias_origin": np.float32(1)}, TypeError, "bias_origin must be an int, got 1.0"),
        ({"bias_origin": np.True_}, TypeError, "bias_origin must be an int, got True"),
        ({"deterministic": np.int64(1)}, TypeError, 'deterministic must be a bool, "batch" or None, got 1'),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_they_are_not_is_said(option: dict[str, Any], error: type[Exception], sentence: str) -> None:
    for _ in range(2):
        with pytest.raises(error) as caught:
            attend(**option)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("tile", [5, None, (128,), (0, 1), (1.5, 2)])
def test_tiles_of_statistics(tile: Any) -> None:
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match="tile must be two positive sizes"):
        backlight.statistics(q, q, q, tile=tile)


# --- errors ------------------------------------------------------------------------------------------------------------------


def test_a_refusal_survives_pickling() -> None:
    refusal = backlight.Unsupported({"hopper": ("no GPU that torch can see",), "tiled": ("a", "b")})
    again = pickle.loads(pickle.dumps(refusal))
    assert type(again) is backlight.Unsupported
    assert (again.reasons, str(again)) == (refusal.reasons, str(refusal))


def test_a_refusal_comes_back_from_another_process() -> None:
    """An exception that cannot be unpickled ends the thread that waits for results, and the caller waits for ever."""
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply_async(backlight.attention, (q, q, q), {"backend": "triton"})
        with pytest.raises(backlight.Unsupported, match="no backend can run this call") as caught:
            result.get(timeout=240)
    assert list(caught.value.reasons) == ["triton"]
