"""Contenders in e4m3: judged by yardsticks of their own; what has no backward is timed forward only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backlight.bench import contenders, runner, suites
from backlight.bench.gate import Gate, Verdict
from backlight.bench.step import Settings
from backlight.bench.workload import Tensors, Workload
from backlight.problems.case import BF16, Case

CPU = torch.device("cpu")
NAMES = ("backlight:fp8", "backlight:fp8-given")
CASES = (
    Case("full", b=1, hq=2, hkv=2, sq=200, sk=200, d=32),
    Case("causal,gqa", b=2, hq=4, hkv=2, sq=150, sk=190, d=16, causal=True),
    Case("terms", b=1, hq=2, hkv=2, sq=140, sk=140, d=32, causal=True, bias=32, sink=True, gate=True),
    Case("softcap", b=1, hq=2, hkv=2, sq=140, sk=140, d=32, causal=True, softcap=5.0),
    Case("varlen", hq=2, hkv=2, d=32, causal=True, lengths_q=(130, 5, 70)),
)


def drawn(case: Case) -> tuple[Tensors, Gate]:
    tensors = Workload(case, BF16).draw(CPU)
    return tensors, Gate(tensors)


def verdict_of(name: str, tensors: Tensors, gate: Gate, spoil: Any = None) -> Verdict:
    contender = contenders.adapter(name).build(tensors)
    results = contender.results()
    if spoil is not None:
        spoil(results)
    return gate.judge(results, contender.precision, bool(contender.forward_only))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_numbers_pass(name: str, case: Case) -> None:
    reason = contenders.adapter(name).refuse(Workload(case, BF16), CPU)
    if reason is not None:
        assert (name, case.name) == ("backlight:fp8-given", "varlen")
        return
    tensors, gate = drawn(case)
    verdict = verdict_of(name, tensors, gate)
    assert (verdict.status, verdict.reasons) == ("ok", ())
    assert ("dq" in verdict.quantities) == (name == "backlight:fp8")


def one_tile_lost(results: dict[str, torch.Tensor]) -> None:
    results["y"][0, 0, 128:] = 0


def a_fifth_too_much(results: dict[str, torch.Tensor]) -> None:
    results["y"] *= 1.2


@pytest.mark.parametrize("spoil", [one_tile_lost, a_fifth_too_much])
@pytest.mark.parametrize("name", NAMES)
def test_wrong_numbers_do_not_pass(name: str, spoil: Any) -> None:
    verdict = verdict_of(name, *drawn(CASES[0]), spoil)
    assert verdict.status == "wrong"
    assert verdict.reasons[0].startswith("y:")


def test_e4m3_is_wrong_by_yardsticks_of_16_bits() -> None:
    tensors, gate = drawn(CASES[0])
    assert gate.judge(contenders.adapter("backlight:fp8").build(tensors).results()).status == "wrong"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("d=80", b=1, hq=2, hkv=2, sq=64, sk=64, d=80), "power of two and Dv = D, and D is 80, Dv 80"),
        (Case("dv", b=1, hq=2, hkv=2, sq=64, sk=64, d=64, dv=32), "Dv = D, and D is 64, Dv 32"),
        (Case("tau", b=1, hq=2, hkv=2, sq=64, sk=64, d=64, tau=(-1.0,)), "the elastic softmax (tau)"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_refusals(name: str, case: Case, words: str) -> None:
    assert words in str(contenders.adapter(name).refuse(Workload(case, BF16), CPU))


def test_what_has_no_backward_is_timed_forward_only(tmp_path: Path) -> None:
    suite = suites.suite("smoke", CPU)
    small = Workload(Case("small", b=1, hq=2, hkv=2, sq=128, sk=128, d=32), BF16)
    suite = replace(suite, workloads=(small,), contenders=NAMES)
    path = tmp_path / "run.json"
    runner.run(suite, contenders.select(NAMES), CPU, path, Settings(1, True))
    rows = {row["contender"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows["backlight:fp8"]["times"]) == {"forward", "backward", "both"}
    assert set(rows["backlight:fp8-given"]["times"]) == {"forward"}
    assert rows["backlight:fp8-given"]["untimed"]["backward"] == "what was quantised beforehand gets no gradient"
