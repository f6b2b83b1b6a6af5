"""What sweeps over the keys of all ranks need of a ring, for those that stand in files of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from backlight.call import Call
from backlight.distributed.blocks import Block, Shards
from backlight.distributed.communicator import Communicator


class Keys(Protocol):
    """What `ring.Ring` is here."""

    @property
    def communicator(self) -> Communicator: ...

    @property
    def shards(self) -> Shards: ...

    @property
    def backend(self) -> str | None: ...

    @property
    def rank(self) -> int: ...

    def visits(self, mine: Sequence[Tensor], what: str) -> Iterator[tuple[int, int, list[Tensor]]]: ...

    def masks(self, call: Call) -> Callable[[Block, int], tuple[Tensor | None, Tensor | None]]: ...

    def zeros(self, call: Call) -> Tensor: ...

    def no_lse(self, call: Call) -> Tensor: ...
