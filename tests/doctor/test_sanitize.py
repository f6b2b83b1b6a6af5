"""compute-sanitizer in a subprocess: what is said without it, what its summaries become, that it is handed the kernel alone.

The tool needs a GPU and the CUDA toolkit; here a program of the same name stands first on PATH, runs what it is given and
prints what the real one prints.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import backlight
from backlight.doctor import command
from backlight.doctor.command import sanitize
from backlight.doctor.report.model import Finding, Report
from backlight.doctor.subject.case import Case
from backlight.problems import checks
from backlight.spec import AttentionSpec

KERNEL = """
from pathlib import Path
from torch.nn.functional import scaled_dot_product_attention

def fn(q, k, v):
    with open(Path(__file__).with_name("calls"), "a") as calls:
        calls.write(f"{tuple(q.shape)} {q.requires_grad}\\n")
    return scaled_dot_product_attention(q, k, v)
"""
QUIET = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "========= ERROR SUMMARY: 0 errors",
}
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _bwd_dq_kernel+0x1a0 in kernel.py:123
=========     by thread (32,0,0) in block (0,0,0)
=========     Address 0x7f3c is out of bounds
========= Invalid __global__ read of size 4 bytes
=========     at other+0x10
========= ERROR SUMMARY: 2 errors"""
HAZARD = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _bwd+0x20 and Read access at _bwd+0x90 [12 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"""
UNWRITTEN = """========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 2 bytes
=========     at _fwd_kernel+0x40
========= ERROR SUMMARY: 1 error"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program called compute-sanitizer that says `says[tool]`; memcheck runs the command first if it is asked to."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(run: bool = False, **says: str) -> None:
        lines = repr(QUIET | says)
        program = folder / sanitize.PROGRAM
        program.write_text(
            f"#!{sys.executable}\n"
            "import subprocess, sys\n"
            "assert sys.argv[1] == '--tool'\n"
            f"if {run} and sys.argv[2] == 'memcheck': subprocess.run(sys.argv[3:], check=True)\n"
            f"sys.stdout.write({lines}[sys.argv[2]] + '\\n')\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return make


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    (tmp_path / "kernel.py").write_text(KERNEL)
    return f"{tmp_path / 'kernel.py'}:fn"


@pytest.fixture(autouse=True)
def cpu_counts_as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "arguments", _on_the_cpu(Case.arguments))
    monkeypatch.setattr(sanitize.repro, "script", _script_on_the_cpu(sanitize.repro.script))


def _on_the_cpu(arguments):
    return lambda self: arguments(self.replace(device="cpu"))


def _script_on_the_cpu(script):
    return lambda case, *args, **kwargs: script(case.replace(device="cpu"), *args, **kwargs)


CASE = Case(spec=AttentionSpec(), shape=(1, 2, 24, 16), dtype=torch.float32, device="cuda")


def healthy() -> Report:
    return Report("kernel", "healthy", "no defect found", recipe={"layout": "BHSD"})


def test_nothing_seen(tool, kernel, tmp_path) -> None:
    """A tool is handed one forward and one backward, and nothing of the examination."""
    tool(run=True)
    report = healthy()
    sanitize.sanitize(report, CASE, kernel)
    assert [(p.name, p.passed) for p in report.probes] == [(f"sanitizer {name}", True) for name in QUIET]
    assert (report.verdict, report.findings) == ("healthy", [])
    assert (tmp_path / "calls").read_text().splitlines() == ["(1, 2, 24, 16) True"]


def test_an_access_outside_a_tensor_is_a_defect(tool, kernel) -> None:
    tool(memcheck=OUT_OF_BOUNDS)
    report = healthy()
    sanitize.sanitize(report, CASE, kernel)
    (finding,) = report.findings
    assert (finding.id, finding.severity, report.verdict, report.exit_code) == ("sanitizer-memcheck", "defect", "defect", 1)
    place = "Invalid __global__ read of size 4 bytes at _bwd_dq_kernel+0x1a0 in kernel.py:123"
    assert report.headline == f"memory outside a tensor is read or written: {place}"
    assert report.probes[0].detail == f"2 alarms: {place}"


def test_hazards_and_unwritten_memory_are_notes(tool, kernel) -> None:
    """These tools raise false alarms on bulk copies: they never turn a healthy kernel into a defect."""
    tool(racecheck=HAZARD, initcheck=UNWRITTEN)
    report = healthy()
    sanitize.sanitize(report, CASE, kernel)
    assert [(f.id, f.severity) for f in report.findings] == [("sanitizer-racecheck", "note"), ("sanitizer-initcheck", "note")]
    assert (report.verdict, report.exit_code) == ("healthy", 0)
    assert report.probes[1].detail.startswith("1 alarm: Race reported between Write access at _bwd+0x20")
    assert "at _fwd_kernel+0x40" in report.findings[1].title


def test_what_a_tool_saw_is_evidence_for_what_was_found_otherwise(tool, kernel) -> None:
    tool(initcheck=UNWRITTEN)
    report = healthy()
    report.verdict, report.findings = "defect", [Finding("stale-rows", "part of the output is never written", score=120.0)]
    sanitize.sanitize(report, CASE, kernel)
    (finding,) = report.findings
    assert finding.evidence == [f"compute-sanitizer initcheck: {report.probes[-1].detail}"]


def test_a_tool_that_fails_is_not_a_verdict(tool, kernel) -> None:
    tool(memcheck="========= Error: No attachable process found. compute-sanitizer timed-out.")
    report = healthy()
    sanitize.sanitize(report, CASE, kernel)
    assert report.probes[0].passed is None
    assert "no summary" in report.probes[0].detail
    assert report.verdict == "healthy"


def test_absence_is_said(kernel, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = healthy()
    sanitize.sanitize(report, CASE, kernel)
    (probe,) = report.probes
    assert probe.passed is None
    assert probe.detail == "compute-sanitizer is not on PATH; it comes with the CUDA toolkit"


def test_the_option_reaches_it(tool, kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    tool()
    monkeypatch.setattr(backlight.doctor, "diagnose", lambda *args, **kwargs: healthy())
    result = CliRunner().invoke(command.app, [kernel, "--sanitize", "--shape", "1,2,24,16", "--dtype", "fp32"])
    assert result.exit_code == 0
    assert "compute-sanitizer watches CUDA kernels" in " ".join(result.output.split())
    # engine and tool are stand-ins, and so is the device
    monkeypatch.setattr(checks, "usable_device", lambda device: device)
    result = CliRunner().invoke(
        command.app, [kernel, "--sanitize", "--shape", "1,2,24,16", "--dtype", "fp32", "--device", "cuda"]
    )
    assert "sanitizer memcheck" in " ".join(result.output.split())
