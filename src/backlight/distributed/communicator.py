"""How ranks talk: one small interface, and torch.distributed behind it.

`Communicator` is all that the strategies know. `TorchCommunicator` is a process group (NCCL, Gloo); `simulation.Simulated` runs
several ranks as threads of one process. A wait that takes too long raises `TimeoutError` with the rank, the step and the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# messages of one pair of ranks are told apart by tags where the engine has them (Gloo); NCCL keeps them in order
HANDSHAKE_TAG = 1
DATA_TAG = 2


class Pending(Protocol):
    """Messages in flight."""

    def wait(self) -> None:
        """Return when the receiving buffers are filled and the sent ones may be overwritten."""
        ...


class Communicator(Protocol):
    rank: int
    world: int

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], step: str, tag: int = 0
    ) -> Pending:
        """Start sending tensors to peers and receiving into buffers from peers, both contiguous; `step` is for messages."""
        ...

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor], step: str) -> None:
        """sent[r] goes to rank r, received[r] is filled by rank r; flat tensors of one dtype."""
        ...

    def all_reduce(self, tensor: Tensor, step: str) -> None:
        """tensor = its sum over all ranks."""
        ...

    def all_gather(self, tensor: Tensor, step: str) -> list[Tensor]:
        """The tensors of all ranks, of equal shapes."""
        ...

    def gather_numbers(self, row: Sequence[int], step: str) -> list[list[int]]:
        """The rows of all ranks, on the host. Rows are equally long, whatever step a rank is in (`handshake.meet`)."""
        ...


def late(rank: int, step: str, peers: str, seconds: float | None) -> TimeoutError:
    waited = "" if seconds is None else f" for {seconds:g} s"
    return TimeoutError(f"context parallel, rank {rank}: waited{waited} for {peers} in step '{step}'")


def lost(rank: int, step: str, peers: str) -> ConnectionError:
    return ConnectionError(f"context parallel, rank {rank}: lost the connection to {peers} in step '{step}'")


def _everyone(peers: Sequence[int]) -> str:
    return "rank " + " and ".join(str(peer) for peer in sorted(set(peers)))


class TorchCommunicator:
    """A process group of torch.distributed.

    timeout: seconds a wait may take on the host, None = the group's own. On GPUs only the check of options waits on the host;
    a later step that hangs is ended by NCCL's watchdog.
    """

    def __init__(self, group: dist.ProcessGroup, device_type: str, timeout: float | None = None):
        self.group, self.timeout = group, timeout
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], step: str, tag: int = DATA_TAG
    ) -> Pending:
        messages: list[tuple[Callable, int, Tensor]] = [(dist.isend, peer, tensor) for peer, tensor in sends if tensor.numel()]
        messages += [(dist.irecv, peer, tensor) for peer, tensor in receives if tensor.numel()]
        numbered: dict[tuple[Callable, int], int] = {}
        operations = []
        for operation, peer, tensor in messages:
            number = numbered[operation, peer] = numbered.get((operation, peer), -1) + 1
            operations.append(dist.P2POp(operation, tensor, group=self.group, tag=16 * tag + number, group_peer=peer))
        peers = [peer for _, peer, _ in messages]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise lost(self.rank, step, _everyone(peers)) from error
        return _Works(self, works, peers, step, messages)

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[Tensor], step: str) -> None:
        outgoing, sizes = torch.cat(list(sent)), [len(part) for part in received]
        incoming = outgoing.new_empty(sum(sizes))
        work = dist.all_to_all_single(incoming, outgoing, sizes, [len(part) for part in sent], self.group, async_op=True)
        self.wait(work, step, "every rank")
        for part, filled in zip(received, incoming.split(sizes), strict=True):
            part.copy_(filled)

    def all_reduce(self, tensor: Tensor, step: str) -> None:
        self.wait(dist.all_reduce(tensor, group=self.group, async_op=True), step, "every rank")

    def all_gather(self, tensor: Tensor, step: str) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        self.wait(dist.all_gather(gathered, tensor, self.group, async_op=True), step, "every rank")
        return gathered

    def gather_numbers(self, row: Sequence[int], step: str) -> list[list[int]]:
        mine = torch.tensor(row, dtype=torch.int64, device=self.device)
        if self.device.type != "cpu":
            gathered = [torch.empty_like(mine) for _ in range(self.world)]
            work = dist.all_gather(gathered, mine, self.group, async_op=True)
            self.wait(work, step, "every rank", on_host=True)
            return [other.tolist() for other in gathered]
        # one message per peer, so that a wait in vain knows for whom
        rows = {peer: torch.empty_like(mine) for peer in range(self.world) if peer != self.rank}
        self.exchange([(peer, mine) for peer in rows], list(rows.items()), step, HANDSHAKE_TAG).wait()
        rows[self.rank] = mine
        return [rows[peer].tolist() for peer in range(self.world)]

    def wait(self, work: dist.Work, step: str, peers: str, on_host: bool = False) -> None:
        try:
            # on a GPU, waiting with a limit would hold up the host; the stream waits instead
            if self.timeout is None or not (on_host or self.device.type == "cpu"):
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise late(self.rank, step, peers, self.timeout) from error
            raise lost(self.rank, step, peers) from error


class _Works:
    """What `exchange` started; holds on to the tensors until they have been sent and received."""

    def __init__(self, communicator: TorchCommunicator, works: list[dist.Work], peers: list[int], step: str, messages: list):
        self.communicator, self.works, self.peers, self.step, self.messages = communicator, works, peers, step, messages

    def wait(self) -> None:
        # a coalescing engine answers with one work for all messages
        single = len(self.works) == len(self.peers)
        for place, work in enumerate(self.works):
            self.communicator.wait(work, self.step, f"rank {self.peers[place]}" if single else _everyone(self.peers))
        self.works, self.messages = [], []
