"""Standard output belongs to the report: what a subject prints goes to standard error, prints of compiled code included."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Any

OUT, ERR = 1, 2


class OutputAside:
    """While this block runs, standard output is standard error, for Python and for everything that writes to descriptor 1."""

    def __init__(self) -> None:
        self.python: Any = None
        self.kept: int | None = None

    def __enter__(self) -> OutputAside:
        flush()
        self.python = sys.stdout
        # a process without these descriptors has nothing to protect
        with suppress(OSError):
            self.kept = os.dup(OUT)
            os.dup2(ERR, OUT)
        sys.stdout = sys.stderr
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.restore()

    def restore(self) -> None:
        """As it was before the block; once."""
        if self.python is None:
            return
        flush()
        sys.stdout, self.python = self.python, None
        if self.kept is not None:
            os.dup2(self.kept, OUT)
            os.close(self.kept)
            self.kept = None


def seal() -> None:
    """Closes standard output to the rest of this process: subjects may have registered functions that print at exit."""
    flush()
    # only a program's own stream, not one that a caller put in its place
    if sys.stdout is sys.__stdout__:
        with suppress(OSError):
            os.dup2(ERR, OUT)


def show_crashes() -> None:
    """A segmentation fault cannot be turned into a sentence, but the line it happened in can be shown."""
    with suppress(OSError, ValueError, AttributeError):
        if not faulthandler.is_enabled():
            faulthandler.enable(sys.__stderr__)  # type: ignore[arg-type]


def flush() -> None:
    """Everything printed so far leaves this process, also what compiled code keeps in its own buffers."""
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)
