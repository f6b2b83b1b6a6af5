"""The Triton kernels of entmax in Triton's interpreter: thresholds, live tiles that are skipped, and every gradient."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from contextlib import ExitStack

from backlight.api import call_of
from backlight.backends.triton import BACKEND, entmax, live
from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.launch import Launch
from backlight.backends.triton.live import sweep
from backlight.config import override
from cases import Case, Problem, case_id
from gate import judge, measure

SMALL = {"b": 1, "hq": 2, "hkv": 1, "sq": 40, "sk": 40, "d": 8}
CASES = (
    Case("1.5", causal=True, entmax=1.5, **SMALL),
    Case("2,sink,dlse", causal=True, entmax=2.0, sink=True, dlse=True, **SMALL),
    Case("learned", entmax=(1.5, 1.8), dlse=True, **SMALL),
    Case("learned,1.05", entmax=(1.05, 1.25), causal=True, gate=True, **SMALL),
    Case("1.25,everything", entmax=1.25, causal=True, softcap=2.0, bias=24, sink=True, gate=True, dlse=True, **SMALL),
    Case("packed", entmax=(1.5, 1.3), lengths_q=(9, 0, 21), lengths_k=(14, 3, 20), causal=True, d=8, bias=9, dlse=True),
    Case("mask", entmax=1.5, mask="two runs", dlse=True, **SMALL),
    Case("rows without keys", entmax=1.5, causal=True, dlse=True, **{**SMALL, "sk": 12}),
    Case("sink,infinite", entmax=(1.5, 2.0), sink=(float("inf"), float("-inf")), dlse=True, **SMALL),
    Case("pair", entmax=1.5, pair_bias=("heads", "rows"), causal=True, **{**SMALL, "b": 2}),
    Case("pair,own", entmax=1.5, pair_bias=("batch", "heads", "rows"), **{**SMALL, "hkv": 2}),
    Case("pair,keys", entmax=1.5, pair_bias=("batch",), **SMALL),
    Case("sk=0", entmax=1.5, sink=True, dlse=True, **{**SMALL, "sk": 0}),
)


def outcome(problem: Problem) -> dict[str, torch.Tensor]:
    """Of the backend itself: numbers stay compiled in, where the public call would be given a leaf."""
    call, dlse = problem.call, problem.dlse
    y, lse, u, _ = BACKEND.forward(call, True)
    return {"y": y, "lse": lse} | BACKEND.backward(call, y, lse, u, problem.dy, dlse, frozenset(call.gradients))


def verdict_of(case: Case, dtype: torch.dtype) -> object:
    problem = case.make(dtype)
    yardsticks = measure(problem.call, problem.dy, problem.dlse)
    return judge(problem.call, problem.dy, problem.dlse, outcome(problem), yardsticks)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_fp32(case: Case) -> None:
    verdict = verdict_of(case, torch.float32)
    assert verdict.ok, f"{case.name}\n{verdict}"


@pytest.mark.parametrize("case", CASES[:3], ids=case_id)
def test_fp16(case: Case) -> None:
    verdict = verdict_of(case, torch.float16)
    assert verdict.ok, f"{case.name}\n{verdict}"


# scores so far apart that most tiles are dead; tiles of the kernels differ from those in which life is counted
DEAD = Case("dead tiles", b=1, hq=2, hkv=1, sq=96, sk=96, d=8, causal=True, logits=12.0, entmax=1.5)
TILES = {"entmax": (16, 16), "live": (32, 16), "dq": (16, 32), "dkdv": (64, 16)}


def test_dead_tiles_are_left_out() -> None:
    problem = DEAD.make(torch.float32)
    with ExitStack() as stack:
        for kernel, (rows, keys) in TILES.items():
            stack.enter_context(override(f"triton.{kernel}", KernelConfig(rows, keys, 4, 1)))
        yardsticks = measure(problem.call, problem.dy, problem.dlse)
        verdict = judge(problem.call, problem.dy, problem.dlse, outcome(problem), yardsticks)
        assert verdict.ok, f"{verdict}"
        launch = Launch(problem.call)
        sweep(launch, yardsticks.truth.lse.float(), None, None, wants_slopes=False)
    live = launch.live.tiles
    assert live.shape == (2, 3, 6)
    visited = torch.ones(96, 96).tril().unflatten(0, (3, 32)).unflatten(2, (6, 16)).amax(dim=(1, 3))
    assert 0 < int(live.sum()) < 2 * int(visited.sum())


def falling(sq: int, sk: int, **options: object) -> Problem:
    """A bias that falls by 1 a key, over a table that reaches half as far as the keys do."""
    case = Case("falling", b=2, hq=4, hkv=2, sq=sq, sk=sk, d=8, causal=True, bias=sk, entmax=(1.5, 1.3, 2.0, 1.7), **options)
    problem = case.make(torch.float32)
    problem.call.bias.copy_(-torch.arange(sk).float().expand(4, -1))
    return problem


@pytest.mark.parametrize(
    ("sq", "sk", "options"), [(200, 200, {}), (30, 210, {"sink": True, "dlse": True}), (40, 160, {"scale": -0.4})]
)
def test_tiles_beyond_the_reach_of_norms_are_left_out(sq: int, sk: int, options: dict[str, object]) -> None:
    problem = falling(sq, sk, **options)
    call, dlse = problem.call, problem.dlse
    asked: list[int] = []

    def counted(*args: object) -> object:
        found = honest(*args)
        asked.append(int(found))
        return found

    with ExitStack() as stack, pytest.MonkeyPatch.context() as monkeypatch:
        for kernel in ("entmax", "live"):
            stack.enter_context(override(f"triton.{kernel}", KernelConfig(16, 16, 4, 1)))
        honest = live.reached
        for module in (entmax, live):
            monkeypatch.setattr(module, "reached", counted)
        y, lse, u, _ = BACKEND.forward(call, True)
        forward = sum(asked)
        found = BACKEND.backward(call, y, lse, u, problem.dy, dlse, frozenset(call.gradients))
    verdict = judge(call, problem.dy, dlse, {"y": y, "lse": lse} | found)
    assert verdict.ok, f"{verdict}"
    seen = torch.ones(sq, sk).tril(sk - sq)
    padded = torch.nn.functional.pad(seen, (0, -sk % 16, 0, -sq % 16))
    tiles = 8 * int(padded.unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).amax(dim=(1, 3)).sum())
    sweeps = 1 if dlse is None else 2
    assert 0 < forward < tiles
    assert 0 < sum(asked) - forward < sweeps * tiles / 2


@pytest.mark.parametrize("falls", [False, True], ids=["plain", "by norms"])
@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.7, 2.0, (1.3, 1.9)], ids=str)
def test_what_is_not_a_number_stays_one(alpha: float | tuple[float, float], falls: bool) -> None:
    """It lies above no threshold, and weighed nothing: rows that see it came out as zeros, or without that key."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    k[0, 0, 3, 2] = torch.nan
    bias = -torch.arange(40.0).expand(2, -1) if falls else None
    entmax = alpha if isinstance(alpha, float) else torch.tensor(alpha)
    with ExitStack() as stack:
        for kernel in ("entmax", "live"):
            stack.enter_context(override(f"triton.{kernel}", KernelConfig(16, 16, 4, 1)))
        y, lse, _, _ = BACKEND.forward(call_of(q, k, v, causal=True, entmax=entmax, bias=bias), False)
    spoilt = torch.zeros(1, 2, 40, dtype=torch.bool)
    spoilt[0, 0, 3:] = True
    assert torch.equal(lse.isnan(), spoilt)
    assert torch.equal(y.isnan(), spoilt[..., None].expand_as(y))
