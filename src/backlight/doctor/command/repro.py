"""A stand-alone script for one finding: seed, dtype, shapes, spec, expected id. It is run once before it is handed out."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from backlight.doctor.report.model import Finding
from backlight.doctor.subject.case import Case

INPUTS = "inputs.pt"
CASE_IMPORT = "from backlight.doctor.subject.capture import load_capture\nfrom backlight.doctor.subject.case import Case\n"

TEMPLATE = '''"""{title} [{id}]

Written by backlight doctor. Exit code 0: the finding appeared again; 1: it did not. With --once the kernel is called,
forward and backward, and nothing else is done: for profilers and sanitizers.
Examined: {shown}
Inputs:   {inputs}
{smaller}"""

import sys
{path_import}
import torch

from backlight.doctor import diagnose, run_once
{case_import}from backlight.doctor.command import resolve
from backlight.spec import AttentionSpec

SUBJECT = {subject!r}
EXPECTED = {id!r}

spec = AttentionSpec({spec})
{prepare}subject = resolve(SUBJECT{layout})
arguments = {arguments}
if "--once" in sys.argv:
    run_once(subject, spec, **arguments)
    sys.exit(0)
report = diagnose(subject, spec, **arguments)
found = [finding.id for finding in report.ranked]
sys.stdout.write(f"{{report.headline}}\\nfound: {{', '.join(found) or 'nothing'}}; expected: {{EXPECTED}}\\n")
sys.exit(0 if EXPECTED in found else 1)
'''


@dataclass(frozen=True)
class Trial:
    """One run of a script: whether the expected finding came back, and what it wrote."""

    reproduced: bool
    output: str


def script(case: Case, subject: str, finding: Finding, steps: Sequence[str] = (), layout: str = "auto") -> str:
    """The text of the script. A captured case reads `inputs.pt`, which lies beside it (`capture.save_capture`)."""
    captured = case.tensors is not None
    drawn = {
        "shape": case.shape,
        "kv_heads": case.kv_heads,
        "sk": case.sk,
        "dv": case.dv,
        "dtype": case.dtype,
        "recipe": case.recipe,
        "seed": case.seed,
        "level": case.level,
        "device": str(case.device),
        "precision": case.precision,
        "bias": case.bias if case.spec.bias else None,
        "tau": case.tau if case.spec.tau else None,
        "entmax": case.entmax if case.spec.entmax else None,
    }
    arguments = [f"{name}={value!r}" for name, value in drawn.items() if value is not None]
    if case.lengths is not None:
        packed = (case.lengths,) if case.key_lengths is None else (case.lengths, case.key_lengths)
        borders = [f"torch.tensor({[0, *accumulate(lengths)]}, dtype=torch.int32)" for lengths in packed]
        arguments.append(f"cu_seqlens={borders[0]}" if len(borders) == 1 else f"cu_seqlens=({', '.join(borders)})")
    names = ("level", "device", "seed", "precision", "bias", "tau", "entmax")
    kept = [f"{name}={drawn[name]!r}" for name in names if drawn[name] is not None]
    settings = ", ".join(["spec", *kept])
    return TEMPLATE.format(
        title=in_docstring(finding.title),
        id=finding.id,
        shown=in_docstring(subject),
        subject=subject,
        inputs=in_docstring(describe(case)),
        smaller=f"Shrunk:   {in_docstring('; '.join(steps))}\n" if steps else "",
        path_import="from pathlib import Path\n" if captured else "",
        case_import=CASE_IMPORT if captured else "",
        layout=(f", layout={layout!r}" if layout != "auto" else "")
        + ("" if case.precision is None else f", precision={case.precision!r}"),
        spec=", ".join(f"{name}={value!r}" for name, value in case.differences().items()),
        prepare=f"case = Case.captured(load_capture(Path(__file__).with_name({INPUTS!r})), {settings})\n" if captured else "",
        arguments="case.arguments()" if captured else "dict(\n" + "".join(f"    {word},\n" for word in arguments) + ")",
    )


def in_docstring(text: str) -> str:
    r"""The text, safe between three quotes: \Users is no escape sequence, and no quote ends the docstring early."""
    return repr(text)[1:-1].replace('"', '\\"')


def describe(case: Case) -> str:
    """One line: shapes, dtype, strides and where the numbers come from."""
    b, h, s, d = case.shape
    dtype = str(case.dtype).removeprefix("torch.")
    shapes = f"q [{b}, {h}, {s}, {d}], k [{b}, {case.kv_heads or h}, {case.sk or s}, {d}], {dtype}"
    if case.lengths is not None:
        shapes = f"packed sequences of {list(case.lengths)}, {h} heads of {d}, {dtype}"
    if case.tensors is not None:
        return f"{shapes}; captured tensors in {INPUTS}, strides {list(case.narrowed()['q'].stride())} for q"
    return f"{shapes}, contiguous; seed {case.seed}, recipe {case.recipe}"


def try_script(text: str, folder: str | Path | None = None, timeout: float = 300.0) -> Trial:
    """Run a script in a fresh process; `folder` is where the files it reads lie, and where it stays as `repro.py`."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(folder or scratch) / "repro.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        known = os.pathsep.join(entry for entry in sys.path if entry)
        try:
            done = subprocess.run(
                [sys.executable, str(path)],
                env=os.environ | {"PYTHONPATH": known},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Trial(False, f"no answer within {timeout:.0f} s")
    return Trial(done.returncode == 0, done.stdout + done.stderr)
