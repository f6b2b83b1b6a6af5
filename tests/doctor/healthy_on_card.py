"""Correct kernels on a GPU at every level, one process for each kernel and dtype, until the time is up.

python tests/doctor/healthy_on_card.py [SECONDS] prints one JSON object a line (subject, variant, dtype, level, verdict, clean,
said, seconds), the form that `sweep.py` counts, then a table on standard error. Kernels that are not installed are declined.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# set before torch is imported: many processes share the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

from sweep import PEERS, TRUE_NOTES, Run, complaint, refused

SECONDS = 140.0
SUBJECTS = ("hopper", "triton", *(name for name in PEERS if name != "sdpa:math"), "tiled")
DTYPES = ("bf16", "fp16")
FIRST = ("causal", "plain", "gqa", "longer keys", "window", "wide heads", "softcap", "sink", "bias", "packed")


def plan() -> Iterator[tuple[str, str, str, int]]:
    """(level, variant, recipe, seed), the dearest looks first and everything else at quick for as long as there is time."""
    yield from (("full", variant, "gaussian", 0) for variant in FIRST[:4])
    yield from (("forensic", variant, "gaussian", 1) for variant in FIRST[:2])
    yield from (("full", variant, "gaussian", 2) for variant in FIRST[4:])
    for seed, recipe, variant in itertools.product(range(3, 8), ("gaussian", "peaky", "dominant"), FIRST):
        yield "quick", variant, recipe, seed


def work(subject: str, dtype: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    for level, variant, recipe, seed in plan():
        if time.monotonic() > end:
            return
        started = time.monotonic()
        run = Run(subject, variant, dtype, recipe, seed)
        line = {"subject": subject, "variant": variant, "dtype": dtype, "recipe": recipe, "seed": seed, "level": level}
        try:
            report = run.examine(level)
            said = complaint(report, TRUE_NOTES)
            verdict = "declined" if refused(run, report) else report.verdict
        except Exception as error:
            said, verdict = f"{type(error).__name__}: {str(error)[:200]}", "crashed"
        clean = verdict == "declined" or not said
        line |= {"verdict": verdict, "clean": clean, "said": "" if verdict == "declined" else said}
        print(json.dumps(line | {"seconds": round(time.monotonic() - started, 2)}), flush=True)


def main() -> None:
    if len(sys.argv) == 4:
        work(sys.argv[1], sys.argv[2], float(sys.argv[3]))
        return
    seconds = float(sys.argv[1]) if len(sys.argv) == 2 else SECONDS
    end = time.monotonic() + seconds
    jobs = [
        subprocess.Popen([sys.executable, __file__, subject, dtype, str(seconds - 20)], stdout=subprocess.PIPE, text=True)
        for subject, dtype in itertools.product(SUBJECTS, DTYPES)
    ]
    counts: Counter[tuple[str, str, str]] = Counter()
    for job in jobs:
        try:
            text, _ = job.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
            text, _ = job.communicate()
        print(text, end="", flush=True)
        for each in map(json.loads, filter(None, (text or "").splitlines())):
            outcome = "declined" if each["verdict"] == "declined" else "clean" if each["clean"] else "complaint"
            counts[each["subject"], each["level"], outcome] += 1
    for key, count in sorted(counts.items()):
        print(*key, count, file=sys.stderr)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    main()
