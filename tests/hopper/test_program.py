"""Which host functions become programs, and that a program does what its function did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from backlight.backends.hopper import program
from backlight.backends.hopper.config import ForwardConfig
from backlight.backends.hopper.program import launched, replayed
from backlight.call import Call, Memory
from backlight.config import override
from backlight.spec import AttentionSpec

ELSEWHERE, EMPTY = torch.ones(3), torch.empty(0)


class Kernel:
    """Writes down its tensors, and sets the last to the sum of the first over the last axis."""

    def __init__(self) -> None:
        self.took: list[list[Tensor]] = []

    def __call__(self, tensors: list[Tensor]) -> None:
        self.took.append(list(tensors))
        tensors[-1].copy_(tensors[0].sum(-1))


KERNEL = Kernel()


def start(*tensors: Tensor) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        KERNEL(list(tensors))
    launched(KERNEL, tensors)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_programs", Memory())
    KERNEL.took.clear()


def call(shared: bool = False, **options: Any) -> Call:
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    return Call(AttentionSpec(), q, q if shared else k, v, **options)


class Host:
    """A host function that counts how often it ran."""

    def __init__(self, work: Callable[..., Any]):
        self.work, self.ran = work, 0

    def __call__(self, *args: Any) -> Any:
        self.ran += 1
        return self.work(*args)


def out_of(call: Call) -> Tensor:
    return torch.empty(call.q.shape[:3])


def plain(call: Call, dy: Tensor | None, choice: Any) -> tuple[Tensor, None]:
    y = out_of(call)
    start(call.k, call.q, y)
    return y, None


def test_a_function_that_allocates_and_launches_runs_once() -> None:
    host = Host(plain)
    for _ in range(3):
        here = call()
        y, none = replayed(host, here, (None,), "choice")
        assert none is None
        assert torch.equal(y, here.k.sum(-1))
        assert KERNEL.took[-1][0] is here.k
        assert KERNEL.took[-1][1] is here.q
    assert host.ran == 1
    assert len({id(took[-1]) for took in KERNEL.took}) == 3


def test_results_by_name() -> None:
    def work(call: Call, dy: Tensor, choice: Any) -> dict[str, Tensor]:
        delta, dk = out_of(call), torch.empty_like(call.k)
        start(dy, EMPTY, delta)
        return {"dk": dk, "delta": delta, "dy": dy}

    host = Host(work)
    for _ in range(3):
        k = torch.randn(1, 8, 2, 4).transpose(1, 2)
        here, dy = Call(AttentionSpec(), call().q, k, k), torch.randn(1, 2, 8, 4)
        found = replayed(host, here, (dy,), None)
        assert list(found) == ["dk", "delta", "dy"]
        assert found["dk"].stride() == k.stride()
        assert torch.equal(found["delta"], dy.sum(-1))
        assert found["dy"] is dy
    assert host.ran == 1


def test_zeros_are_zero_every_time() -> None:
    def work(call: Call, dy: Tensor | None, choice: Any) -> tuple[Tensor]:
        return (torch.zeros(2, 3, dtype=torch.int32),)

    host = Host(work)
    for _ in range(3):
        (found,) = replayed(host, call(), (None,), None)
        assert found.shape == (2, 3)
        assert found.dtype == torch.int32
        assert not found.any()
        found.fill_(1)
    assert host.ran == 1


@pytest.mark.parametrize(
    "also",
    [
        lambda call, y: y.zero_(),
        lambda call, y: call.q + 1,
        lambda call, y: call.q.transpose(0, 1),
        lambda call, y: start(ELSEWHERE, call.q, torch.empty(())),
        lambda call, y: launched(None, []),
    ],
    ids=["fills", "computes", "views", "reads another tensor", "launches what cannot be repeated"],
)
def test_a_function_that_does_more_runs_always(also: Callable[..., Any]) -> None:
    def work(call: Call, dy: Tensor | None, choice: Any) -> tuple[Tensor]:
        y = out_of(call)
        also(call, y)
        start(call.k, call.q, y)
        return (y,)

    host = Host(work)
    for _ in range(3):
        here = call()
        assert torch.equal(replayed(host, here, (None,), None)[0], here.k.sum(-1))
    assert host.ran == 3


def test_a_result_from_elsewhere() -> None:
    host = Host(lambda call, dy, choice: (ELSEWHERE,))
    for _ in range(2):
        assert replayed(host, call(), (None,), None)[0] is ELSEWHERE
    assert host.ran == 2


def test_layouts_choices_and_shared_tensors_have_programs_of_their_own() -> None:
    host = Host(plain)
    dy = torch.randn(1, 2, 8, 4)
    calls = [
        (call(), None, 1),
        (call(shared=True), None, 1),
        (call(), None, 2),
        (call(deterministic=True), None, 1),
        (call(), dy, 1),
        (call(), dy.transpose(2, 3).contiguous().transpose(2, 3), 1),
    ]
    for _ in range(2):
        for here, given, choice in calls:
            assert torch.equal(replayed(host, here, (given,), choice)[0], here.k.sum(-1))
    assert host.ran == len(calls)


def test_one_tensor_in_two_places_is_not_remembered() -> None:
    """Which of the two a launch meant cannot be told; later calls with two tensors must not suffer."""

    def work(call: Call, dy: Tensor, choice: Any) -> tuple[Tensor]:
        y = out_of(call)
        start(dy, y)
        return (y,)

    host = Host(work)
    here = call()
    replayed(host, here, (here.q,), None)
    for _ in range(2):
        here, dy = call(), torch.randn(1, 2, 8, 4)
        assert torch.equal(replayed(host, here, (dy,), None)[0], dy.sum(-1))
    assert host.ran == 2


def test_packed_sequences_and_forced_configurations_run_always() -> None:
    host = Host(plain)
    cu = torch.tensor([0, 8])
    for _ in range(2):
        replayed(host, call(cu_seqlens_q=cu, cu_seqlens_k=cu), (None,), None)
        with override("hopper.forward", ForwardConfig(64, 2)):
            replayed(host, call(), (None,), None)
    assert host.ran == 4


def test_an_error_is_not_remembered() -> None:
    def work(call: Call, dy: Tensor | None, choice: Any) -> Any:
        if host.ran == 1:
            raise RuntimeError("out of memory")
        return plain(call, dy, choice)

    host = Host(work)
    with pytest.raises(RuntimeError, match="out of memory"):
        replayed(host, call(), (None,), None)
    assert not torch._C._len_torch_dispatch_stack()
    for _ in range(2):
        here = call()
        assert torch.equal(replayed(host, here, (None,), None)[0], here.k.sum(-1))
    assert host.ran == 2
