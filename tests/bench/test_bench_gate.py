"""The gate turns wrong numbers red, says which and why, and lets right ones through."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backlight.bench import contenders
from backlight.bench.gate import Gate
from backlight.bench.workload import Tensors, Workload
from backlight.problems.case import BF16, FP32, Case

CPU = torch.device("cpu")
CASE = Case("lazy", b=2, hq=4, hkv=2, sq=100, sk=100, d=16, causal=True, bias=32, tau=(-1.0, 0.5))
Results = dict[str, Tensor]


@pytest.fixture(scope="module", params=[FP32, BF16], ids=["fp32", "bf16"])
def judged(request: pytest.FixtureRequest) -> tuple[Gate, Tensors]:
    tensors = Workload(CASE, request.param).draw(CPU)
    return Gate(tensors), tensors


def correct(tensors: Tensors) -> Results:
    return {name: x.clone() for name, x in contenders.adapter("backlight").build(tensors).results().items()}


def test_right_numbers_pass(judged: tuple[Gate, Tensors]) -> None:
    gate, tensors = judged
    verdict = gate.judge(correct(tensors))
    assert (verdict.status, verdict.reasons) == ("ok", ())
    assert set(verdict.quantities) == {"y", "dq", "dk", "dv", "dbias", "dtau"}
    assert verdict.judged == ("batches 0 to 1, kv head 1", "batches 0 to 1, kv head 0")


def scaled(name: str, factor: float) -> Callable[[Results], None]:
    return lambda results: results[name].mul_(factor)


def last_head_lost(results: Results) -> None:
    results["dbias"][-1] = 0


def one_tile_lost(results: Results) -> None:
    results["dk"][-1, -1, 64:] = 0


def not_a_number(results: Results) -> None:
    results["dv"][0, 0, 3, 2] = torch.nan


def heads_swapped(results: Results) -> None:
    results["dq"] = results["dq"].flip(1)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (scaled("dk", 1.05), "dk: a head is 1.05 times what it should be"),
        (scaled("y", 0.0), "y: "),
        (scaled("dtau", -1.0), "dtau: "),
        (last_head_lost, "dbias: "),
        (one_tile_lost, "dk: error"),
        (not_a_number, "dv: 1 values are NaN or infinite"),
        (heads_swapped, "dq: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_numbers_are_named(judged: tuple[Gate, Tensors], spoil: Callable[[Results], None], words: str) -> None:
    gate, tensors = judged
    results = correct(tensors)
    spoil(results)
    verdict = gate.judge(results)
    assert verdict.status == "wrong"
    assert any(reason.startswith(words) for reason in verdict.reasons), verdict.reasons


def test_a_missing_gradient_is_wrong(judged: tuple[Gate, Tensors]) -> None:
    gate, tensors = judged
    results = correct(tensors)
    del results["dbias"]
    assert gate.judge(results).reasons == ("dbias was not returned",)
