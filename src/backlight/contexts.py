"""Which context a call belongs to: the one it names, or that of the innermost block its own thread is in.

Blocks are per thread, like `torch.no_grad`: a thread started inside a block is not in it. One case needs more: a backward that
recomputes (activation checkpointing) runs on GPUs in a thread of autograd's own, which has entered nothing; it belongs to the
thread that is in a block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from backlight._private.torch import current_graph_task
from backlight.arguments import shown
from backlight.call import Call


class Context(Protocol):
    """Where a sequence lies when this process holds only a part of it: see `backlight.distributed.context_parallel`."""

    def attention(self, bind: Callable[[], Call], backend: str | None) -> tuple[Tensor, Tensor]:
        """(y, lse) of this process' rows, differentiable; `bind()` makes the call they belong to, or raises."""
        ...

    def attention_jvp(
        self, bind: Callable[[], tuple[Call, tuple[Tensor | None, ...]]], backend: str | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """((y, lse), (ty, tlse)) of this process' rows; `bind()` makes the call and its tangents."""
        ...

    def explain(self, bind: Callable[[], Call], backend: str | None) -> tuple[Call, dict[str, tuple[str, ...]]]:
        """A call such as a backend of this process would get, and every backend's reasons against it."""
        ...


# thread -> its blocks, the innermost last; a thread without a block has no entry, so an empty dict answers at once
blocks: dict[int, list[Context]] = {}
_lock = threading.Lock()


@contextmanager
def entered(context: Context) -> Iterator[None]:
    """Calls of this thread inside that name no context use this one."""
    global _look_up
    thread = threading.get_ident()
    if _look_up is _of_this_thread:
        # compiled code must look it up at every call; done here because `disable` imports all of torch's compiler
        _look_up = torch.compiler.disable(_of_this_thread)
    with _lock:
        blocks.setdefault(thread, []).append(context)
    try:
        yield
    finally:
        with _lock:
            blocks[thread].remove(context)
            if not blocks[thread]:
                del blocks[thread]


def innermost(context: Context | None) -> Context | None:
    """The context named, or that of the innermost block of this thread."""
    if context is not None:
        if not (hasattr(context, "attention") and hasattr(context, "explain")):
            raise TypeError(f"context must be a ContextParallel or None, got {shown(context)}")
        return context
    return _look_up() if blocks else None


def _of_this_thread() -> Context | None:
    own = blocks.get(threading.get_ident())
    if own:
        return own[-1]
    if not _in_a_thread_of_autograd():
        return None
    with _lock:
        open_blocks = [stack[-1] for stack in blocks.values()]
    if len({id(context) for context in open_blocks}) > 1:
        raise RuntimeError(
            f"context must be passed to attention(..., context=...) where a backward recomputes it, got None while "
            f"{len(open_blocks)} threads are in blocks of their own"
        )
    return open_blocks[0] if open_blocks else None


_look_up: Callable[[], Context | None] = _of_this_thread


def _in_a_thread_of_autograd() -> bool:
    """Python did not start the threads of the engine, so `threading` has a dummy for each."""
    return isinstance(threading.current_thread(), threading._DummyThread) and current_graph_task() != -1
