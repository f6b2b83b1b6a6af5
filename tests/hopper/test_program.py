"""Which host functions become programs, and that a program does what its function did."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from cards import Everything

from backlight.backends.hopper.config import ForwardConfig
from backlight.backends.replaying import program
from backlight.backends.replaying.program import known, launched, replayed
from backlight.call import Call, Memory
from backlight.config import override
from backlight.spec import AttentionSpec

ELSEWHERE, EMPTY = torch.ones(3), torch.empty(0)
SHAPE = (1, 2, 8, 4)


class Kernel:
    """Writes down its addresses, and sets the last tensor to the sum of the first over the last axis."""

    def __init__(self) -> None:
        self.took: list[list[int]] = []
        self.prepared_for: list[int] = []

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        self.took.append([x.data_ptr() for x in tensors])
        tensors[-1].copy_(tensors[0].sum(-1))

    def prepared(self, addresses: list[int], stream: int) -> tuple[Callable[..., None], list[int]]:
        self.prepared_for.append(stream)
        return self.again, addresses

    def again(self, *addresses: int) -> None:
        given, out = (floats(address, shape) for address, shape in ((addresses[0], SHAPE), (addresses[-1], SHAPE[:3])))
        self.took.append(list(addresses))
        out.copy_(given.sum(-1))


KERNEL = Kernel()


def floats(address: int, shape: tuple[int, ...]) -> Tensor:
    memory = (ctypes.c_float * math.prod(shape)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def start(*tensors: Tensor) -> None:
    with torch.utils._python_dispatch._disable_current_modes():
        KERNEL(tensors)
    launched(KERNEL, tensors)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_programs", Memory())
    monkeypatch.setattr(program, "_once", Everything())
    monkeypatch.setattr(program, "stream_of", lambda device: 7)
    KERNEL.took.clear()
    KERNEL.prepared_for.clear()


def call(shared: bool = False, **options: Any) -> Call:
    q, k, v = (torch.randn(SHAPE) for _ in range(3))
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
    host, kept = Host(plain), []
    for _ in range(3):
        here = call()
        y, none = replayed(host, here, (None,), "choice")
        assert none is None
        assert torch.equal(y, here.k.sum(-1))
        assert KERNEL.took[-1] == [here.k.data_ptr(), here.q.data_ptr(), y.data_ptr()]
        kept.append((here, y))
    assert host.ran == 1
    assert len({took[-1] for took in KERNEL.took}) == 3


def test_what_comes_once_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording takes longer than most host functions, and many lengths never come again."""
    monkeypatch.setattr(program, "_once", Memory())
    host, modes = Host(plain), []

    def watched(*args: Any) -> Any:
        modes.append(torch._C._len_torch_dispatch_stack())
        return host(*args)

    for _ in range(4):
        here = call()
        assert torch.equal(replayed(watched, here, (None,), None)[0], here.k.sum(-1))
    assert modes == [0, 1]


def test_results_by_name() -> None:
    def work(call: Call, dy: Tensor, choice: Any) -> dict[str, Tensor]:
        delta, dk = out_of(call), torch.empty_like(call.k)
        start(dy, EMPTY, delta)
        return {"dk": dk, "delta": delta, "dy": dy}

    host = Host(work)
    for _ in range(3):
        k = torch.randn(1, 8, 2, 4).transpose(1, 2)
        here, dy = Call(AttentionSpec(), call().q, k, k), torch.randn(SHAPE)
        found = replayed(host, here, (dy,), None)
        assert list(found) == ["dk", "delta", "dy"]
        assert found["dk"].stride() == k.stride()
        assert torch.equal(found["delta"], dy.sum(-1))
        assert found["dy"] is dy
    assert host.ran == 1


def test_what_is_not_returned_shares_one_allocation() -> None:
    """Every part begins where an allocation could; zeros are zeroed each time."""
    parts: list[tuple[int, ...]] = []

    class Wide(Kernel):
        def __call__(self, tensors: Sequence[Tensor]) -> None:
            pass

        def again(self, *addresses: int) -> None:
            parts.append(addresses)
            counter = floats(addresses[3], (1,))
            assert counter.item() == 0
            for address in addresses[1:4]:
                floats(address, (3,)).fill_(7)

    def work(call: Call, dy: Tensor | None, choice: Any) -> tuple[Tensor]:
        first, second, counter, y = torch.empty(3), torch.empty(130), torch.zeros(3), out_of(call)
        launched(Wide(), [call.q, first, second, counter, EMPTY, y])  # type: ignore[arg-type]
        return (y,)

    host, made = Host(work), []
    for _ in range(4):
        with Allocations() as seen:
            replayed(host, call(), (None,), None)
        made.append(seen.sizes)
    assert host.ran == 1
    assert made[1:] == [[16 * 4, 512 + 1024, 512]] * 3
    for _, first, second, counter, empty, _ in parts:
        assert second - first == 512
        assert not first <= counter < first + 512 + 1024
        assert empty == 0


class Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty_strided:
            self.sizes.append(made.numel() * made.element_size())
        return made


def test_equal_addresses_are_prepared_once_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    host, here, block = Host(plain), call(), torch.empty(SHAPE[:3])
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **options: block)
    for stream in (1, 1, 1, 2, 1, 2):
        monkeypatch.setattr(program, "stream_of", lambda device, stream=stream: stream)
        replayed(host, here, (None,), None)
    assert KERNEL.prepared_for == [1, 2]
    replayed(host, call(), (None,), None)
    assert KERNEL.prepared_for == [1, 2, 2]


def test_a_profiler_gets_launches_that_tell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are prepared launches used while somebody listens, nor are those of that time kept."""
    host, here, block = Host(plain), call(), torch.empty(SHAPE[:3])
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **options: block)
    for listening in (False, True, True, False, True):
        monkeypatch.setattr(program, "heard", lambda listening=listening: listening)
        replayed(host, here, (None,), None)
    # the first call runs its host function
    assert len(KERNEL.prepared_for) == 4


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
    dy = torch.randn(SHAPE)
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


def test_one_tensor_in_two_places_has_a_program_of_its_own() -> None:
    """Which of the two a launch meant cannot be told; later calls with two tensors must not suffer."""

    def work(call: Call, dy: Tensor, choice: Any) -> tuple[Tensor]:
        y = out_of(call)
        start(dy, y)
        return (y,)

    host = Host(work)
    for _ in range(3):
        here = call()
        assert torch.equal(replayed(host, here, (here.q,), None)[0], here.q.sum(-1))
        assert known(host, here, (here.q,), None) is None
    assert host.ran == 1
    for _ in range(3):
        here, dy = call(), torch.randn(SHAPE)
        assert torch.equal(replayed(host, here, (dy,), None)[0], dy.sum(-1))
        assert known(host, here, (dy,), None) is not None
    assert host.ran == 2


def test_what_else_decides_is_asked_every_time() -> None:
    host = Host(plain)
    for setting in (True, False, True, None, False):
        replayed(host, call(), (None,), 1, setting)
    assert host.ran == 3


def test_forced_configurations_run_always() -> None:
    host = Host(plain)
    for _ in range(2):
        with override("hopper.forward", ForwardConfig(64, 2)):
            replayed(host, call(), (None,), None)
    assert host.ran == 2


def test_packed_sequences_are_checked_every_time() -> None:
    """Borders are values: a layout that was right says nothing about the next."""

    def work(call: Call, dy: Tensor | None, choice: Any) -> tuple[Tensor]:
        y = out_of(call)
        start(call.k, call.cu_seqlens_q, call.cu_seqlens_k, y)
        return (y,)

    host, cu, other = Host(work), torch.tensor([0, 3, 8]), torch.tensor([0, 5, 8])
    for cu_q, cu_k in ((cu, cu), (other, other), (cu, other), (other, cu), (cu, cu)):
        here = call(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        assert torch.equal(replayed(host, here, (None,), None)[0], here.k.sum(-1))
        assert KERNEL.took[-1][1:3] == [cu_q.data_ptr(), cu_k.data_ptr()]
    assert host.ran == 2
    cu[1] = 9
    with pytest.raises(ValueError, match="must not decrease, got 9 then 8"):
        replayed(host, call(cu_seqlens_q=other, cu_seqlens_k=cu), (None,), None)
    wrong = torch.tensor([0, 5, 7])
    for _ in range(2):
        with pytest.raises(ValueError, match="must end at the packed length 8, got 7"):
            replayed(host, call(cu_seqlens_q=wrong, cu_seqlens_k=wrong), (None,), None)
    assert host.ran == 2


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
