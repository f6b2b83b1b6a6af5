"""Entmax of a ring: thresholds over the keys of all ranks are those of one rank, and so is every gradient, alpha's included."""

from __future__ import annotations

import pytest
import torch
from test_simulated import examine, run_simulated

from backlight.cases import BY_NAME, ENTMAX
from backlight.distributed import entmax, rule, simulated_attention
from backlight.distributed.handshake import meet
from cases import BF16, FP32, FP64, Case, case_id
from running import run

WHOLE = [case for case in ENTMAX if case.pair_bias is None]
EVERYTHING = [case for case in WHOLE if "everything" in case.name]
MASKED = [case for case in WHOLE if case.mask is not None]
QUICK = [*EVERYTHING, *MASKED[:2]] + [
    BY_NAME[name]
    for name in (
        "entmax,2.0",
        "entmax,s=127",
        "entmax,200x63",
        "entmax,rows without keys,sink",
        "entmax,sink,infinite",
        "entmax,ties",
    )
]


def difference(case: Case, **how: object) -> dict[str, float]:
    """From one rank to several, in fp64, relative to the largest entry above 1."""
    problem = case.make(FP64)
    one, several = run(problem, backend="tiled"), run_simulated(problem, strategy="ring", **how)
    found = {}
    for name, whole in one.items():
        apart = torch.where(whole == several[name], 0, (whole - several[name]).abs())
        size = whole[torch.isfinite(whole)].abs()
        found[name] = float(apart.max()) / max(1.0, float(size.max()) if size.numel() else 1.0) if apart.numel() else 0.0
    return found


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in WHOLE], ids=case_id)
@pytest.mark.parametrize(("world", "layout"), [(2, "zigzag"), pytest.param(3, "contiguous", marks=pytest.mark.slow)])
def test_as_one_rank(case: Case, world: int, layout: str) -> None:
    found = difference(case, world=world, layout=layout)
    assert all(x <= 1e-10 for x in found.values()), found


@pytest.mark.parametrize("case", EVERYTHING, ids=case_id)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=case_id)
def test_by_the_gate(case: Case, dtype: torch.dtype) -> None:
    examine(case, dtype, world=4, layout="zigzag", strategy="ring")


def test_parts_alone_do_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: without steps, thresholds are those of bounds."""
    monkeypatch.setattr(entmax, "MOST_STEPS", {FP64: 0})
    assert difference(BY_NAME["entmax,s=127"], world=3)["y"] > 1e-10


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_few_sweeps(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the rule counts on, of gaussian scores in bf16; ranks make equally many."""
    steps: list[int] = []

    def counted(communicator: object, numbers: list[int], step: str) -> list[list[int]]:
        if step == "thresholds":
            steps.append(communicator.rank)  # type: ignore[attr-defined]
        return meet(communicator, numbers, step)  # type: ignore[arg-type]

    monkeypatch.setattr(entmax, "meet", counted)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 32, dtype=BF16)
    simulated_attention(2 * q, k, v, causal=True, entmax=alpha, world=2, strategy="ring")
    assert steps.count(0) == steps.count(1)
    assert 2 + steps.count(0) <= rule.ENTMAX_SWEEPS + 1
