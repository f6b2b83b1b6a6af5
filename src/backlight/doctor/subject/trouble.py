"""What a subject may do to whoever examines it, turned into one sentence with the subject's own line.

All code of a subject, its import included, runs inside `subject_code`: an exception, `sys.exit` or `os._exit` comes out as
`CouldNotRun`, and a call that outlasts the `patience` of the command line ends the process with a sentence.
`os._exit` is caught for the command line alone: a program of the user's keeps its own.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

PACKAGE = Path(__file__).parents[2]
LONGEST_LINE, LONGEST_MESSAGE = 120, 400
# exceptions whose text is a sentence by custom; the text of others ('x' of a KeyError) needs their name before it
SENTENCES = (ValueError, TypeError, RuntimeError, NotImplementedError, OSError)
# CUDA errors after which every call of the process fails
DEVICE_LOST = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")
# compiled code may keep the interpreter to itself, and our timer with it: faulthandler needs neither and comes this much later
GRACE = 2.0


class CouldNotRun(RuntimeError):
    """The subject did not produce something that can be compared; the message is a sentence for the report."""


class Unrepeatable(CouldNotRun):
    """The same call worked before, so no answer of the subject can be relied on."""


class DeviceLost(CouldNotRun):
    """The device refuses all work from here on: nothing after this call can be judged."""


class ProcessExit(SystemExit):
    """What `os._exit` becomes while code of a subject runs."""


class subject_code:
    """Run code of a subject defined in `file`; whatever it raises but an interruption comes out as `CouldNotRun`.

    doing: "backward" where it is not the forward.

    A class and not a generator: those cannot hand on a StopIteration of the code inside.
    """

    def __init__(self, file: str | Path | None = None, doing: str = ""):
        self.file, self.doing = file, f"in the {doing}: " if doing else ""

    def __enter__(self) -> None:
        self.timer = _started(self.file)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
            faulthandler.cancel_dump_traceback_later()
        if isinstance(error, Exception | SystemExit) and not isinstance(error, CouldNotRun):
            lost, said_in_full = any(words in str(error) for words in DEVICE_LOST), self.doing + sentence(error, self.file)
            if "memory" in said_in_full.lower():
                # what the kernel's own variables hold would leave none for the report
                traceback.clear_frames(trace)
            raise (DeviceLost if lost else CouldNotRun)(said_in_full) from error


def sentence(error: BaseException, file: str | Path | None = None) -> str:
    """One line: what the exception says, and the innermost line of the subject it came through."""
    line = own_line(error, file)
    return f"{said(error)} ({line})" if line else said(error)


def said(error: BaseException) -> str:
    if isinstance(error, ProcessExit):
        return f"the subject ends the process with os._exit({error.code!r})"
    if isinstance(error, SystemExit):
        return f"the subject ends the program with sys.exit({error.code!r})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # a line that ends in a colon says nothing without the lines after it
    text = " ".join(lines) if lines[0].endswith(":") else lines[0]
    named = isinstance(error, SENTENCES)
    return (text if named else f"{type(error).__name__}: {text}")[:LONGEST_MESSAGE]


def reads_as_written(error: BaseException) -> bool:
    """Whether the exception was raised by a `raise` statement of this package: its text is meant for the reader."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _inside(frames[-1].filename, PACKAGE) and (frames[-1].line or "").startswith("raise ")


# --- the subject's own line -------------------------------------------------------------------------------------------------


def own_line(error: BaseException, file: str | Path | None = None) -> str:
    """`kernel.py:12: return table[name]`, the innermost frame in `file`, else in a file of the user's; '' if there is none."""
    places = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0))
    return shown_line(places, file)


def last_line(error: BaseException) -> str:
    """The innermost line of all, whoever wrote it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def running_line(thread: int, file: str | Path | None = None) -> str:
    """The same for a thread that is still running."""
    places, frame = list[tuple[str, int]](), sys._current_frames().get(thread)
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return shown_line(places[::-1], file)


def shown_line(places: list[tuple[str, int]], file: str | Path | None) -> str:
    """The innermost of these (file, line) places, outermost first, that lies in `file`, else in a file of the user's."""
    inside = [place for place in places if file is not None and _same_file(place[0], file) and not _inside(place[0], PACKAGE)]
    chosen = (inside or [place for place in places if of_the_user(place[0])])[-1:]
    if not chosen:
        return ""
    path, number = chosen[0]
    text = linecache.getline(path, number).strip()[:LONGEST_LINE]
    return f"{short_path(path)}:{number}: {text}" if text else f"{short_path(path)}:{number}"


def short_path(path: str | Path) -> str:
    """Relative to the working folder where it lies below it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return str(path)
    return str(path) if relative.startswith("..") else relative


def _same_file(one: str, other: str | Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def of_the_user(path: str) -> bool:
    library = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")), PACKAGE, _torch()
    return not path.startswith("<") and not any(_inside(path, folder) for folder in library if folder is not None)


def _torch() -> Path | None:
    module = sys.modules.get("torch")
    return Path(module.__file__).parent if module is not None and module.__file__ else None


def _inside(path: str, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


# --- exits and silence ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Patience:
    """How long one call may take, and who is told when it takes longer; that function ends the process.

    last_words: a file for the traceback where even that function is not heard; the process then ends by itself.
    """

    seconds: float
    give_up: Callable[[str], None]
    last_words: IO[Any] | None = None


_patience: list[Patience] = []


@contextmanager
def patience(seconds: float, give_up: Callable[[str], None], last_words: IO[Any] | None = None) -> Iterator[None]:
    """For a command line: every call of a subject may take `seconds`, 0 = for ever, and none may end the process."""
    _patience.append(Patience(seconds, give_up, last_words))
    try:
        with _no_exit():
            yield
    finally:
        _patience.pop()


@contextmanager
def _no_exit() -> Iterator[None]:
    """`os._exit` raises in this thread of this process; forked children and other threads leave as ever."""
    leave, here = os._exit, (os.getpid(), threading.get_ident())

    def refuse(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != here:
            leave(status)
        raise ProcessExit(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def _started(file: str | Path | None) -> threading.Timer | None:
    """A timer for one call, if calls have a time limit."""
    if not _patience or _patience[-1].seconds <= 0:
        return None
    current, thread = _patience[-1], threading.get_ident()

    def expire() -> None:
        line = running_line(thread, file)
        where = f" ({line})" if line else ""
        current.give_up(f"the subject did not return within {current.seconds:g} s, the limit of --timeout{where}")

    if current.last_words is not None:
        faulthandler.dump_traceback_later(current.seconds + GRACE, exit=True, file=current.last_words)
    timer = threading.Timer(current.seconds, expire)
    timer.daemon = True
    timer.start()
    return timer
