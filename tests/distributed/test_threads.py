"""Blocks belong to the thread that entered them."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import backlight
from backlight import contexts
from backlight.distributed import context_parallel, simulate
from backlight.distributed.simulation import Simulated

Q = torch.randn(1, 2, 12, 8)


class Told:
    """A context that only says that it was asked."""

    def __init__(self, name: str = "told"):
        self.name = name

    def attention(self, *_: Any) -> Any:
        raise LookupError(self.name)

    explain = attention


def run_in(start: Callable[[Callable[[], None]], Any], work: Callable[[], Any]) -> Any:
    """What `work` returned or raised in a thread of its own."""
    found: list[Any] = []
    done = threading.Event()

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)
        done.set()

    start(run)
    assert done.wait(60)
    return found[0]


def of_python(run: Callable[[], None]) -> None:
    threading.Thread(target=run).start()


def of_another(run: Callable[[], None]) -> None:
    """Like the threads of autograd's engine: not started by `threading`."""
    _thread.start_new_thread(run, ())


def attend() -> torch.Tensor:
    return backlight.attention(Q, Q, Q, causal=True)


@pytest.mark.parametrize("start", [of_python, of_another])
def test_a_thread_that_entered_no_block_is_in_none(start: Callable) -> None:
    """It used to join the block of whoever was in one, and waited for ranks that knew nothing of its call."""
    plain, chosen = attend(), backlight.explain(Q, Q, Q).chosen
    with contexts.entered(Told()):
        with pytest.raises(LookupError, match="told"):
            attend()
        assert torch.equal(run_in(start, attend), plain)
        assert run_in(start, lambda: backlight.explain(Q, Q, Q).chosen) == chosen
    assert torch.equal(attend(), plain)
    assert not contexts.blocks


def test_threads_in_blocks_of_their_own() -> None:
    """Each rank of a simulated world enters its own block; all are open at once."""
    whole = attend()
    meeting = threading.Barrier(2)

    def work(rank: Simulated) -> torch.Tensor:
        with context_parallel(rank) as context:
            meeting.wait(60)
            y = backlight.attention(*[context.shard(Q, 2)] * 3, causal=True)
            meeting.wait(60)
            return context.unshard(y, 2)

    for y in simulate(2, work):
        torch.testing.assert_close(y, whole)
    assert not contexts.blocks


def test_a_backward_that_recomputes_finds_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs it runs in a thread of autograd's own, which has entered nothing."""
    monkeypatch.setattr(contexts, "current_graph_task", lambda: 7)
    with contexts.entered(Told("outer")), contexts.entered(Told("inner")):
        assert str(run_in(of_another, attend)) == "inner"
        assert isinstance(run_in(of_python, attend), torch.Tensor), "a backward of a thread that is in no block"


def test_a_backward_that_recomputes_does_not_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "current_graph_task", lambda: 7)

    def in_a_second_block() -> Any:
        with contexts.entered(Told("second")):
            return run_in(of_another, attend)

    with contexts.entered(Told("first")):
        refused = run_in(of_python, in_a_second_block)
    assert isinstance(refused, RuntimeError)
    assert "context must be passed to attention(..., context=...)" in str(refused)


def test_blocks_are_left_in_any_order() -> None:
    first, second = contexts.entered(Told("first")), contexts.entered(Told("second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    with pytest.raises(LookupError, match="second"):
        attend()
    second.__exit__(None, None, None)
    assert attend().shape == Q.shape


@pytest.mark.parametrize("context", ["cp", 3, object])
def test_what_is_no_context(context: object) -> None:
    for call in (backlight.attention, backlight.explain):
        with pytest.raises(TypeError, match="context must be a ContextParallel or None, got"):
            call(Q, Q, Q, context=context)
