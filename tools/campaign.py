"""Records of a card, one after the other, within a time: PYTHONPATH=src python tools/campaign.py FOLDER [--minutes 9] [NAME...]

    python tools/campaign.py --list
    python tools/campaign.py /tmp/records entmax fp8 ordered

Each name is a command of this repository with a limit of its own; `python tools/campaign.py --list` shows them. What a command
prints is kept beside what it writes, as NAME.log, and a command that outlasts its limit is stopped: those that write as they go
leave what they have. Nothing begins that has less than half of its time left. Ends with 1 if a command failed or was stopped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = "-m backlight bench run {suite} --out {folder} --no-plot --processes 12 --seconds {seconds}"


@dataclass(frozen=True)
class Part:
    """A command of Python, which may name {folder}, {name} and {seconds}, the time it should end itself in."""

    name: str
    limit: int
    what: str
    command: str


def suite(name: str, limit: int, what: str, more: str = "") -> Part:
    command = BENCH.format(suite=name, folder="{folder}", seconds="{seconds}")
    return Part(name, limit, what, f"{command} {more}".rstrip())


PARTS = (
    Part("tests", 280, "the tests that need a card", "tools/card.py --limit {seconds} --out {folder}/tests.json"),
    suite("entmax", 150, "entmax beside AdaSplash-2 and the softmax", "--contenders backlight,backlight:hopper,adasplash"),
    suite("fp8", 150, "e4m3 beside 16 bits, with and without the quantisation"),
    Part("ordered", 100, "deterministic backwards", "benchmarks/ordered.py {folder}/ordered.json"),
    Part("extras", 120, "largest logits, low halves of o, signed errors", "benchmarks/extras.py {folder}/extras.json"),
    Part("second", 150, "double backward", "benchmarks/second.py"),
    suite("pair", 120, "pair bias beside cuEquivariance and SDPA"),
    Part("slot", 60, "a decoder on SDPA, and with backlight.activate()", "tools/slot_speed.py"),
    Part("slot-compiled", 90, "the same, compiled", "tools/slot_speed.py --compile"),
    Part("transformers", 90, "a Llama of transformers", "tools/transformers_speed.py"),
    Part("healthy", 150, "correct kernels before the doctor", "tests/doctor/healthy_on_card.py {seconds}"),
    suite("every", 400, "shapes where others may be faster, beside FA3 and cuDNN"),
    suite("overhead", 90, "host time"),
    suite("plain", 480, "the even shapes, every peer"),
    Part("jvp", 120, "forward mode", "benchmarks/jvp.py"),
)  # fmt: skip
# what a command needs to write its record after the time that it was told
MARGIN = 10


def run(part: Part, folder: Path, limit: float) -> str:
    """What became of a command: ok, failed or stopped."""
    given = {"folder": str(folder), "name": part.name, "seconds": str(max(1, int(limit) - MARGIN))}
    command = [sys.executable, *(word.format(**given) for word in shlex.split(part.command))]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with (folder / f"{part.name}.log").open("w") as log:
        # a session of its own, so that the processes which it begins end with it
        begun = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return "ok" if begun.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(begun.pid, signal.SIGKILL)
            begun.wait()
            return "stopped"


def campaign(parts: Iterable[Part], folder: Path, minutes: float) -> dict[str, str]:
    """What became of each part; a line of it is printed as it ends, with the last line that it printed."""
    end, found = time.monotonic() + 60 * minutes, {}
    for part in parts:
        limit = min(part.limit, end - time.monotonic())
        begun = time.monotonic()
        found[part.name] = run(part, folder, limit) if limit >= part.limit / 2 else "no time left"
        log = folder / f"{part.name}.log"
        last = log.read_text().strip().rsplit("\n", 1)[-1][:100] if log.exists() else ""
        print(f"{part.name:<14} {found[part.name]:<13} {time.monotonic() - begun:4.0f} s  {last}", flush=True)
    return found


def main(words: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", nargs="?", type=Path, help="where records and logs go")
    options.add_argument("names", nargs="*", help="what to measure, in this order; everything by default")
    options.add_argument("--minutes", type=float, default=60, help="nothing new is begun after this many")
    options.add_argument("--list", action="store_true", help="the names, and exit")
    asked = options.parse_args(words)
    if asked.list or asked.folder is None:
        for part in PARTS:
            print(f"{part.name:<14} {part.limit:4} s  {part.what}")
        return 0
    by_name = {part.name: part for part in PARTS}
    unknown = [name for name in asked.names if name not in by_name]
    if unknown:
        options.error(f"unknown: {', '.join(unknown)}; there are {', '.join(by_name)}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    found = campaign([by_name[name] for name in asked.names] or PARTS, asked.folder.resolve(), asked.minutes)
    return int({*found.values()} != {"ok"})


if __name__ == "__main__":
    sys.exit(main())
