"""Tile sizes are invisible: small odd tiles, one row or key per tile, and the backend's own choice pass the same gate.

Shapes of the case list fit into one default tile on a CPU; these configurations make every loop of the tiled backend turn.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from backlight import registry
from backlight.config import Config, override
from cases import BF16, BY_NAME, FP32, Case, case_id
from gate import judge, measure
from running import run

CONFIGS = {
    "16x32": Config(block_m=16, block_n=32, edge=8, heads=2),
    "odd": Config(block_m=13, block_n=7, edge=5, heads=3),
    "one row": Config(block_m=1, block_n=64, edge=1),
    "one key": Config(block_m=64, block_n=1, edge=64),
    "edge above block": Config(block_m=8, block_n=8, edge=64),
    "all heads": Config(block_m=32, block_n=16, edge=16, heads=1000),
}
CASES = [
    BY_NAME[name]
    for name in (
        "causal",
        "window",
        "sq>sk",
        "tau",
        "everything,sq<sk",
        "everything,sq>sk",
        "everything,batched,sq<sk",
        "everything,batched,sq>sk",
        "rows without keys,everything",
        "window sees nothing",
        "keys without rows",
        "varlen,empty k",
        "bias,two-sided,sq<sk",
        "bias,origin beyond the table",
        "tau,minus one",
        "tau,nothing survives,dlse",
        "low lse,tau,bias",
        "sk=0",
    )
]


# 16-bit inputs change the casts, not the loops: two configurations are enough for them
RUNS = [*((config, FP32) for config in CONFIGS), ("16x32", BF16), ("odd", BF16)]


@lru_cache(maxsize=2)
def measured(case: Case, dtype: torch.dtype) -> tuple[Any, Any]:
    """A problem and its yardsticks, which are the same for all tiles and take longer than the backend."""
    problem = case.make(dtype)
    return problem, measure(problem.call, problem.dy, problem.dlse)


@pytest.mark.parametrize(("config", "dtype"), RUNS, ids=case_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_tiled_with_any_tile(config: str, case: Case, dtype: torch.dtype) -> None:
    problem, yardsticks = measured(case, dtype)
    with override("tiled", CONFIGS[config]):
        assert registry.get("tiled").config(problem.call) == CONFIGS[config]
        result = run(problem, "tiled")
    verdict = judge(problem.call, problem.dy, problem.dlse, result, yardsticks)
    assert verdict.ok, f"{case.name} with {CONFIGS[config]}\n{verdict}"


def test_override_ends_with_its_block() -> None:
    call = BY_NAME["causal"].make(FP32).call
    before = registry.get("tiled").config(call)
    with override("tiled", CONFIGS["odd"]):
        with override("tiled", CONFIGS["16x32"]):
            assert registry.get("tiled").config(call) == CONFIGS["16x32"]
        assert registry.get("tiled").config(call) == CONFIGS["odd"]
    assert registry.get("tiled").config(call) == before


@pytest.mark.parametrize("field", ["block_m", "block_n", "edge", "heads"])
def test_config_refuses_nonsense(field: str) -> None:
    sizes = {"block_m": 8, "block_n": 8, "edge": 8, "heads": 1}
    with pytest.raises(ValueError, match=f"{field} must be >= 1, got 0"):
        Config(**(sizes | {field: 0}))
