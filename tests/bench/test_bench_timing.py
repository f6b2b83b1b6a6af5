"""Times come in the number asked for, from the function asked about, and are summarised as said."""

from __future__ import annotations

import pytest
import torch

from backlight.bench import contenders, timing
from backlight.bench.timing import Effort
from backlight.bench.workload import Workload
from backlight.problems.case import FP32, Case

CPU = torch.device("cpu")
TICK_S = 1e-6


class Clock:
    """Stands in for `time`: only sleeping and looking at it take time, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


def test_percentiles_interpolate() -> None:
    assert timing.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert timing.percentile([1.0, 2.0], 0.2) == pytest.approx(1.2)
    assert timing.percentile([7.0], 0.8) == 7.0


def test_summary_pools_rounds_and_keeps_their_medians() -> None:
    found = timing.summary([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
    assert found["median_ms"] == 4.0
    assert found["round_medians_ms"] == [2.0, 6.0]
    assert found["n"] == 6
    assert found["p20_ms"] == pytest.approx(2.0)
    assert found["p80_ms"] == pytest.approx(6.0)


def test_samples_are_milliseconds_of_one_run(clock: Clock) -> None:
    found = timing.samples(lambda: clock.sleep(0.02), CPU, Effort(warm_ms=0, rep_ms=1, least=3))
    assert found == pytest.approx([20.0] * 3, abs=0.01)


def test_a_fast_function_gets_many_samples() -> None:
    assert len(timing.samples(lambda: None, CPU, Effort(warm_ms=1, rep_ms=20))) > 100


class Card:
    """Stands in for a card: every run takes `run_s` on the host, the first one `first_s`."""

    def __init__(self, clock: Clock, run_s: float, first_s: float):
        self.clock, self.run_s, self.first_s, self.runs = clock, run_s, first_s, 0

    def __call__(self) -> None:
        self.runs += 1
        self.clock.sleep(self.first_s if self.runs == 1 else self.run_s)

    def events(self, work: timing.Work, count: int) -> list[float]:
        begins = []
        for _ in range(count):
            begin = self.clock.perf_counter()
            work()
            begins.append((self.clock.perf_counter() - begin) * 1e3)
        return begins


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Card:
    found = Card(clock, run_s=0.002, first_s=0.2)
    monkeypatch.setattr(timing, "_event_samples", found.events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_a_first_run_that_builds_something_is_neither_a_sample_nor_an_estimate(card: Card) -> None:
    """cuDNN's plan and a compiled inference graph made the first forward look slow: one sample was taken, and it was cold."""
    found = timing.samples(card, torch.device("cuda"), Effort(warm_ms=10, rep_ms=40, least=2))
    assert max(found) == pytest.approx(2.0, abs=0.01)
    assert len(found) >= 4


def test_a_window_on_a_card_is_bounded_and_warm(card: Card) -> None:
    card.run_s, card.first_s = 0.03, 0.03
    found = timing.samples(card, torch.device("cuda"), Effort(warm_ms=50, rep_ms=10, least=3))
    assert len(found) == 3
    # one to build, one to estimate, then the warm ones
    assert card.runs <= 1 + 1 + 1 + 3


def test_work_of_seconds_is_measured_once(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention's gradient of a learned bias takes seconds: three samples a round would take a run's time."""
    monkeypatch.setattr(timing, "SLOW_MS", 30.0)
    card.run_s, card.first_s = 0.04, 0.04
    found = timing.samples(card, torch.device("cuda"), Effort(warm_ms=50, rep_ms=100, least=3))
    assert len(found) == 1
    assert found[0] >= 40
    assert card.runs == 2
    assert timing.slow([found])
    assert not timing.slow([])
    assert not timing.slow([[20.0]])


def test_host_time_is_of_one_call(clock: Clock) -> None:
    found = timing.host_samples(lambda: clock.sleep(0.002), CPU, Effort(0, 1, least=2))
    assert found == pytest.approx([2.0] * 2, abs=0.01)


def test_phases_run_what_they_say() -> None:
    tensors = Workload(Case("causal", b=1, hq=2, hkv=2, sq=32, sk=32, d=8, causal=True, bias=4), FP32).draw(CPU)
    contender = contenders.adapter("backlight").build(tensors)
    y = timing.phase_of(contender, "forward")()
    assert not y.requires_grad
    backward = timing.phase_of(contender, "backward")
    once, twice = backward(), backward()
    assert len(once) == 4
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))
    assert all(torch.allclose(a, b) for a, b in zip(once, timing.phase_of(contender, "both")(), strict=True))
    assert all(leaf.grad is None for leaf in contender.leaves.values())
