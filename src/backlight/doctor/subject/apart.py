"""A child process for a subject that may crash, hang or take all memory: whoever watches it lives on and has a sentence.

The child is a fork of a process that has imported torch and touched no device: milliseconds, where a new process needs seconds
for torch alone. What it has to say it sends as one line; a child that ends without that line was ended by the subject, and the
dump of `faulthandler` tells where. Only on Linux: elsewhere a fork of a process with torch in it is not to be relied on.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from backlight.doctor.subject.trouble import shown_line

GIB = 2**30
# of the memory that is free when the examination starts
SHARE = 0.9
POLL = 0.02
# a child that has said what it has to say may take this long over functions registered for its exit
LINGER = 10.0
# after an interruption from the keyboard, which reaches the child too unless only its parent was meant
COURTESY = 1.0
PR_SET_PDEATHSIG = 1
SIGNALS = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGABRT: "an abort",
    signal.SIGFPE: "an arithmetic fault",
    signal.SIGILL: "an illegal instruction",
    signal.SIGBUS: "a bus error",
}
FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.M)


@dataclass(frozen=True)
class Limits:
    """What a subject may take.

    seconds: for one call of the subject, 0 = no limit. memory: bytes that the child may add to what it starts with; None = 90 %
    of what is free, 0 = no limit.
    """

    seconds: float = 300.0
    memory: int | None = None

    @property
    def bytes(self) -> int:
        return int(SHARE * free_memory()) if self.memory is None else self.memory


@dataclass(frozen=True)
class Ended:
    """How a child ended: what it said, or a sentence about its death."""

    said: str = ""
    sentence: str = ""
    interrupted: bool = False


@dataclass(frozen=True)
class Link:
    """The child's side: where it speaks, and where the dump of a crash goes."""

    pipe: int
    last_words: IO[Any]

    def tell(self, line: str) -> None:
        left = (line + "\n").encode()
        while left:
            left = left[os.write(self.pipe, left) :]


_link: list[Link] = []


def possible() -> bool:
    return sys.platform == "linux"


def link() -> Link | None:
    """In a child of `split`: its way to speak. None in any other process."""
    return _link[-1] if _link else None


def split(limits: Limits, resident_only: bool = False) -> Watched | None:
    """Two processes from here on: None in the child, in its parent a handle whose `wait` tells how the child ended.

    resident_only: memory counts where it is used, not where it is reserved; drivers of devices reserve far more than they use.
    What this process has already does not count.
    """
    # both processes keep it
    last_words = tempfile.TemporaryFile()  # noqa: SIM115
    most = limits.bytes
    reading, writing = os.pipe()
    parent = os.getpid()
    # a collection in the child would touch, and so copy, every page of the parent's objects
    gc.freeze()
    pid = os.fork()
    if pid:
        gc.unfreeze()
        os.close(writing)
        return Watched(pid, reading, last_words, limits, most and most + resident(parent))
    os.close(reading)
    _link.append(Link(writing, last_words))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    faulthandler.enable(last_words)
    faulthandler.register(signal.SIGUSR1, last_words)
    if most and not resident_only:
        import resource

        most += reserved(os.getpid())
        resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return None


@dataclass
class Watched:
    """The parent's side."""

    pid: int
    pipe: int
    last_words: IO[bytes]
    limits: Limits
    memory: int
    said: bytes = b""
    too_large: bool = False

    def wait(self, file: str | Path | None = None) -> Ended:
        """Until the child has ended. `file` is where the subject is written: its own line is shown where there are several."""
        with _told_of_interruptions() as pressed:
            status = self._watch(pressed)
        os.close(self.pipe)
        self.last_words.seek(0)
        dump = self.last_words.read().decode(errors="replace")
        self.last_words.close()
        if self.said.endswith(b"\n"):
            return Ended(said=self.said.decode()[:-1])
        if pressed or os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT:
            return Ended(interrupted=True)
        if dump:
            with suppress(OSError, ValueError, AttributeError):
                sys.__stderr__.write(dump)  # type: ignore[union-attr]
        return Ended(sentence=self._sentence(status, dump, file))

    def _watch(self, pressed: list[float]) -> int:
        """The child's status. It is ended when it takes too much memory, lingers after its answer or ignores the keyboard."""
        listening, answered = True, None
        while True:
            if listening and select.select([self.pipe], [], [], POLL)[0]:
                listening = self._read()
            elif not listening:
                time.sleep(POLL)
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                while listening and select.select([self.pipe], [], [], 0)[0]:
                    listening = self._read()
                return status
            now = time.monotonic()
            if self.said.endswith(b"\n"):
                answered = answered or now
            if self.memory and not answered and resident(self.pid) > self.memory:
                self.too_large = True
                self._signal(signal.SIGUSR1)
                time.sleep(10 * POLL)
                self._signal(signal.SIGKILL)
            elif (answered and now > answered + LINGER) or (pressed and now > pressed[0] + 3 * COURTESY):
                self._signal(signal.SIGKILL)
            elif len(pressed) == 1 and now > pressed[0] + COURTESY:
                pressed.append(now)
                self._signal(signal.SIGINT)

    def _read(self) -> bool:
        chunk = os.read(self.pipe, 1 << 16)
        self.said += chunk
        return bool(chunk)

    def _signal(self, which: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, which)

    def _sentence(self, status: int, dump: str, file: str | Path | None) -> str:
        code = os.waitstatus_to_exitcode(status)
        line = line_of_dump(dump, file)
        where = f" ({line})" if line else ""
        if self.too_large:
            return f"the subject took more than {self.limits.bytes / GIB:.3g} GiB of memory, the limit of --memory{where}"
        if dump.startswith("Timeout ("):
            return f"the subject did not return within {self.limits.seconds:g} s, the limit of --timeout{where}"
        if code >= 0:
            return f"the subject ended the process with code {code} from compiled code{where}"
        known = signal.Signals(-code)
        if known == signal.SIGKILL:
            return f"the process was killed from outside (SIGKILL), which is what systems do when memory runs out{where}"
        return f"the subject crashed the process: {SIGNALS.get(known, 'a signal')} ({known.name}){where}"


def line_of_dump(dump: str, file: str | Path | None = None) -> str:
    """The subject's own line in a dump of `faulthandler`, the thread that crashed before the others; '' if there is none."""
    threads = re.split(r"^(?=Current thread|Thread )", dump, flags=re.M)
    for part in sorted(threads, key=lambda text: not text.startswith("Current")):
        places = [(path, int(number)) for path, number in FRAME.findall(part)]
        line = shown_line(places[::-1], file)
        if line:
            return line
    return ""


@contextmanager
def _told_of_interruptions() -> Iterator[list[float]]:
    """Times at which somebody pressed Ctrl-C: the child answers it, not we."""
    pressed: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(time.monotonic()) if not pressed else None)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


# --- memory -----------------------------------------------------------------------------------------------------------------


def resident(pid: int) -> int:
    """Bytes of memory that a process uses by itself; 0 when it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def reserved(pid: int) -> int:
    """Bytes of memory of its own that a process has asked for, used or not."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def free_memory() -> int:
    """Bytes that a new process can have, within the limits of a container."""
    table = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.M))
    free = int(table["MemAvailable"]) * 1024
    with suppress(OSError, ValueError):
        most = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, most - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(free, GIB)
