"""Several ranks as threads of one process and the communicator between them; or one rank whose others send zeros."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from backlight.arguments import check_number, check_whole, shown
from backlight.distributed.communicator import Pending, late

Result = TypeVar("Result")
TIMEOUT = 60.0


class _Mail:
    """Letter boxes between ranks and a meeting point, shared by all of them."""

    def __init__(self, world: int):
        self.boxes: dict[tuple[int, int, int], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self.barrier = threading.Barrier(world)
        self.tables: list[Any] = [None] * world
        self.lock = threading.Lock()

    def box(self, sender: int, receiver: int, tag: int) -> queue.Queue[Tensor]:
        with self.lock:
            return self.boxes[sender, receiver, tag]


class Simulated:
    """The communicator of one simulated rank."""

    def __init__(self, rank: int, world: int, mail: _Mail, timeout: float):
        self.rank, self.world, self.mail, self.timeout = rank, world, mail, timeout
        self.bytes_sent = 0

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], step: str, tag: int = 0
    ) -> Pending:
        if not all(tensor.is_contiguous() for _, tensor in (*sends, *receives)):
            raise ValueError(f"only contiguous tensors can be sent, as by torch.distributed; step '{step}'")
        for peer, tensor in sends:
            self.bytes_sent += tensor.numel() * tensor.element_size()
            self.mail.box(self.rank, peer, tag).put(tensor.clone())
        return _Letters(self, receives, step, tag)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor], step: str) -> None:
        others = [part for peer, part in enumerate(sent) if peer != self.rank]
        self.bytes_sent += sum(part.numel() * part.element_size() for part in others)
        for buffer, parts in zip(received, self._meet(list(sent), step), strict=True):
            buffer.copy_(parts[self.rank])
        self._meet(None, step)

    def all_reduce(self, tensor: Tensor, step: str) -> None:
        total = torch.stack(self._meet(tensor.clone(), step)).sum(0)
        tensor.copy_(total)

    def all_gather(self, tensor: Tensor, step: str) -> list[Tensor]:
        return self._meet(tensor.clone(), step)

    def gather_numbers(self, row: Sequence[int], step: str) -> list[list[int]]:
        return self._meet(list(row), step)

    def _meet(self, value: Any, step: str) -> list[Any]:
        """The values of all ranks."""
        try:
            self.mail.tables[self.rank] = value
            self.mail.barrier.wait(self.timeout)
            values = list(self.mail.tables)
            self.mail.barrier.wait(self.timeout)
        except threading.BrokenBarrierError as error:
            raise late(self.rank, step, "every rank", self.timeout) from error
        return values


class _Letters:
    def __init__(self, rank: Simulated, receives: Sequence[tuple[int, Tensor]], step: str, tag: int):
        self.rank, self.receives, self.step, self.tag = rank, receives, step, tag

    def wait(self) -> None:
        me = self.rank
        for peer, buffer in self.receives:
            try:
                buffer.copy_(me.mail.box(peer, me.rank, self.tag).get(timeout=me.timeout))
            except queue.Empty as error:
                raise late(me.rank, self.step, f"rank {peer}", me.timeout) from error


def simulate(world: int, work: Callable[[Simulated], Result], timeout: float = TIMEOUT) -> list[Result]:
    """`work` on every rank, each in a thread of its own; the results in rank order, or the first rank's exception."""
    check_whole("world", world, least=1)
    if not callable(work):
        raise TypeError(f"work must be a function of one simulated rank, got {shown(work)}")
    check_number("timeout", timeout, above=0)
    mail = _Mail(world)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = work(Simulated(rank, world, mail, timeout))
        except BaseException as error:
            errors[rank] = error
            mail.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # a rank that waited in vain complains about the one that failed first
    failed = [error for error in errors if error is not None]
    for error in [*(e for e in failed if not isinstance(e, TimeoutError)), *failed]:
        raise error
    return results


class Alone:
    """One rank of a world whose others send zeros: to measure what a rank allocates and computes by itself.

    Shards must be equally long: the others are taken to hold as much as this one.
    """

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], step: str, tag: int = 0
    ) -> Pending:
        for _, buffer in receives:
            buffer.zero_()
        return self

    def wait(self) -> None:
        """What was asked for is there already."""

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor], step: str) -> None:
        for buffer in received:
            buffer.zero_()

    def all_reduce(self, tensor: Tensor, step: str) -> None:
        """The others add nothing."""

    def all_gather(self, tensor: Tensor, step: str) -> list[Tensor]:
        return [tensor if rank == self.rank else torch.zeros_like(tensor) for rank in range(self.world)]

    def gather_numbers(self, row: Sequence[int], step: str) -> list[list[int]]:
        return [list(row) for _ in range(self.world)]
