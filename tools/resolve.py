"""Can every machine we name install what we pin? Asks the public index, downloads metadata only.

    python tools/resolve.py                      every platform, Python and set of extras
    python tools/resolve.py -k macos -k 3.12     only rows that contain all of these words

For each platform and Python three questions go to `uv pip compile`, in an environment without local wheels, other indexes or
configuration files, and with wheels alone (what must be compiled on the spot is not an install):

* `make demo`: the package and its pictures, within constraints.txt;
* `make test`: the package with its tests and tools, within constraints.txt;
* `unpinned`: the package without constraints, which must bring the newest torch that has a wheel there.

Ends with 0 when all resolve, 1 when one does not, 3 when the index does not answer.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = {
    "linux x86_64": "x86_64-unknown-linux-gnu",
    "linux aarch64": "aarch64-unknown-linux-gnu",
    "macos 14 arm64": "aarch64-apple-darwin",
    "windows x86_64": "x86_64-pc-windows-msvc",
}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACOS = "14.0"
RESOLVED, UNSOLVABLE, UNREACHABLE = 0, 1, 3
SHOWN = ("torch", "triton", "numpy", "matplotlib")
NO_ANSWER = re.compile(r"Failed to fetch|Request failed|error sending request|dns error|are you offline|client error", re.I)


@dataclass(frozen=True)
class Question:
    """One install somewhere: `pinned` means within constraints.txt."""

    name: str
    extras: tuple[str, ...]
    pinned: bool


QUESTIONS = (
    Question("make demo", ("report",), True),
    Question("make test", ("report", "test", "dev"), True),
    Question("unpinned", ("report", "triton"), False),
)


@dataclass(frozen=True)
class Row:
    platform: str
    python: str
    question: Question

    def __str__(self) -> str:
        return f"{self.platform:<15} {self.python:<5} {self.question.name:<9}"


@dataclass(frozen=True)
class Answer:
    code: int
    versions: Mapping[str, str]
    words: str = ""


def rows(words: Iterable[str] = ()) -> list[Row]:
    everything = [Row(*parts) for parts in product(PLATFORMS, PYTHONS, QUESTIONS)]
    return [row for row in everything if all(word in str(row) for word in words)]


def command(platform: str, python: str, source: str, extras: Sequence[str] = (), constraints: str | None = None) -> list[str]:
    """The resolver's command line. Which Python runs it does not matter, so none is fetched."""
    fixed = ["--no-config", "--no-python-downloads", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    where = ["--python-platform", PLATFORMS[platform], "--python-version", python]
    wanted = [part for extra in extras for part in ("--extra", extra)]
    within = ["--constraints", constraints] if constraints else []
    return [uv(), "pip", "compile", *fixed, *where, *wanted, *within, source]


def uv() -> str:
    """uv beside the running Python, else the one on the path."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else "uv"


def public(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without anything that points pip or uv to other wheels; where the cache lies is not such a thing."""
    dropped = {name for name in environment if name.startswith(("PIP_", "UV_")) and name != "UV_CACHE_DIR"}
    kept = {name: value for name, value in environment.items() if name not in dropped}
    return {**kept, "MACOSX_DEPLOYMENT_TARGET": MACOS}


def read(code: int, output: str, words: str) -> Answer:
    """What the resolver said: its exit status is 1 for no solution, but also 2 for an index that does not answer."""
    if code == 0:
        return Answer(RESOLVED, dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", output, re.M)))
    return Answer(UNREACHABLE if NO_ANSWER.search(words) else UNSOLVABLE, {}, words.strip())


def ask(arguments: Sequence[str], given: str | None = None) -> Answer:
    run = subprocess.run(arguments, input=given, capture_output=True, text=True, cwd=ROOT, env=public(os.environ))
    return read(run.returncode, run.stdout, run.stderr)


def newest_torch(platform: str, python: str) -> Answer:
    return ask(command(platform, python, "-"), "torch\n")


def judge(row: Row, answer: Answer, newest: Answer | None) -> Answer:
    """An unpinned package that holds torch back resolves, and is wrong all the same."""
    if answer.code or newest is None:
        return answer
    if newest.code:
        return newest
    got, expected = answer.versions.get("torch"), newest.versions.get("torch")
    if got != expected:
        return Answer(UNSOLVABLE, answer.versions, f"the package brings torch {got}, alone it would be torch {expected}")
    return answer


def resolve(row: Row) -> Answer:
    question = row.question
    constraints = "constraints.txt" if question.pinned else None
    answer = ask(command(row.platform, row.python, "pyproject.toml", question.extras, constraints))
    return judge(row, answer, None if question.pinned else newest_torch(row.platform, row.python))


def line(row: Row, answer: Answer) -> str:
    verdict = {RESOLVED: "ok", UNSOLVABLE: "FAIL", UNREACHABLE: "no answer"}[answer.code]
    versions = "  ".join(f"{name} {answer.versions[name]}" for name in SHOWN if name in answer.versions)
    return f"{row}  {verdict:<9} {versions}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-k", dest="words", action="append", default=[], help="only rows with this word; may be repeated")
    parser.add_argument("-j", dest="jobs", type=int, default=4, help="resolvers at a time (4)")
    options = parser.parse_args(arguments)
    chosen = rows(options.words)
    if not chosen:
        parser.error(f"no row contains {options.words}")
    begin = time.monotonic()
    if newest_torch(chosen[0].platform, chosen[0].python).code == UNREACHABLE:
        print("resolve: the package index does not answer, so nothing was checked: this needs a network.", file=sys.stderr)
        return UNREACHABLE
    failed: list[tuple[Row, Answer]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, (row, answer) in enumerate(zip(chosen, pool.map(resolve, chosen), strict=True), 1):
            print(f"[{number:>2}/{len(chosen)}] {line(row, answer)}", flush=True)
            if answer.code:
                failed.append((row, answer))
    for row, answer in failed:
        print(f"\n{row}\n{answer.words}", file=sys.stderr)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} resolve ({time.monotonic() - begin:.0f} s)")
    return max((answer.code for _, answer in failed), default=RESOLVED)


if __name__ == "__main__":
    sys.exit(main())
