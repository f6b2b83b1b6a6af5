"""`--sanitize`: NVIDIA's compute-sanitizer over one forward and one backward of the subject, in subprocesses.

The repro script runs with `--once`: it calls the kernel and nothing else, since everything is many times slower under these
tools. They watch addresses, not meanings: an address that is valid and wrong goes unseen, and bulk copies raise false alarms.
So an access outside a tensor is a finding; hazards and uninitialised reads are notes, and evidence for other findings.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from backlight.doctor.command import repro
from backlight.doctor.report.model import Finding, Probe, Report, Severity
from backlight.doctor.report.words import counted
from backlight.doctor.steps.fresh import MEMORY
from backlight.doctor.subject.capture import save_capture
from backlight.doctor.subject.case import Case

PROGRAM = "compute-sanitizer"
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
MESSAGE = re.compile(r"^=+ (?:Error: |Warning: )?((?:Invalid|Misaligned|Uninitialized|Race reported|Malloc|Program hit).*)$")
PLACE = re.compile(r"^=+\s+at (.+)$")


@dataclass(frozen=True)
class Tool:
    """One of the program's tools: what an alarm of it means, and how much it counts."""

    name: str
    means: str
    severity: Severity
    supports: tuple[str, ...]


TOOLS = (
    Tool("memcheck", "memory outside a tensor is read or written", "defect", ("head-pollution", "nan-cell", "stale-rows")),
    Tool("racecheck", "shared memory is used by two threads without a barrier between", "note", ("race-lost-update",)),
    Tool("initcheck", "memory is read that nobody wrote", "note", (*MEMORY, "accumulates-over-calls")),
)


def sanitize(report: Report, case: Case, subject: str, layout: str = "auto", seconds: float = 300.0) -> None:
    """Adds one probe a tool to the report, and findings for what they saw; `seconds` bounds each tool."""
    reason = unavailable(case)
    if reason:
        report.probes.append(Probe("sanitizer", None, reason))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "repro.py"
        # the layout is known by now: finding it again would need the oracle, which is slow under these tools
        layout = report.recipe.get("layout", layout)
        path.write_text(repro.script(case, subject, Finding("healthy", report.headline), layout=layout), encoding="utf-8")
        if case.tensors is not None:
            save_capture(Path(scratch) / repro.INPUTS, case.tensors)
        for tool in TOOLS:
            found, message = watch(tool, path, seconds)
            report.probes.append(found)
            if found.passed is False:
                _conclude(report, tool, found, message)


def unavailable(case: Case) -> str:
    """Why nothing can be watched; '' when it can."""
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not on PATH; it comes with the CUDA toolkit"
    return "" if case.device.startswith("cuda") else f"{PROGRAM} watches CUDA kernels, and the case runs on {case.device}"


def watch(tool: Tool, path: Path, seconds: float) -> tuple[Probe, str]:
    """The script under one tool: its probe, and the first message."""
    name, started = f"sanitizer {tool.name}", time.perf_counter()
    # PyTorch's allocator keeps freed memory mapped: accesses beyond a tensor would land in it unseen
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [PROGRAM, "--tool", tool.name, sys.executable, str(path), "--once"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(name, None, f"no answer within {seconds:.0f} s"), ""
    took, output = time.perf_counter() - started, done.stdout + done.stderr
    summary = SUMMARY.search(output)
    if summary is None:
        last = (output.strip().splitlines() or ["it said nothing"])[-1]
        return Probe(name, None, f"the tool gave no summary: {last[:200]}", took), ""
    count, message = int(summary[1]), first_message(output)
    if not count:
        return Probe(name, True, "nothing seen", took), ""
    detail = f"{counted(count, 'alarm')}: {message or tool.means}"
    return Probe(name, False, detail, took, {"alarms": count, "finding": f"sanitizer-{tool.name}"}), message


def first_message(output: str) -> str:
    """'Invalid __global__ read of size 4 bytes at kernel+0x1a0', or ''."""
    said = ""
    for line in output.splitlines():
        if said and (place := PLACE.match(line)):
            return f"{said} at {place[1]}"
        if not said and (found := MESSAGE.match(line)):
            said = found[1].strip()
    return said


def _conclude(report: Report, tool: Tool, found: Probe, message: str) -> None:
    chief = next((f for f in report.ranked if f.severity != "note"), None)
    if chief is not None and chief.id in tool.supports:
        chief.evidence.append(f"{PROGRAM} {tool.name}: {found.detail}")
        return
    check = f"Run the repro script with --once under {PROGRAM} --tool {tool.name}, with nothing else on the machine."
    serious = tool.severity == "defect"
    finding = Finding(
        f"sanitizer-{tool.name}",
        f"{tool.means}: {message or counted(found.data['alarms'], 'alarm')}",
        tool.severity,
        "",
        None,
        [f"{PROGRAM} {tool.name}: {found.detail}"],
        "established (the tool saw the access)" if serious else "open",
        "high" if serious else "low",
        check,
        None,
        60.0 if serious else 0.8,
    )
    report.findings.append(finding)
    report.findings.sort(key=lambda f: -f.score)
    if serious and report.verdict in ("healthy", "precision"):
        report.verdict, report.headline = "defect", finding.title
