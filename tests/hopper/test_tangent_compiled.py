"""The tangent kernel compiled for sm_90a: wgmma is not serialised, hardly anything is spilled in the loop over key blocks."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from aot import SHARED_MEMORY, Report, compiled

from backlight.backends.hopper.tangent import host
from backlight.call import Call
from backlight.spec import AttentionSpec

# what a tile's end needs again; in the loops over key blocks of both warpgroups two numbers at most
ALLOWED_SPILLS = 320
ALLOWED_IN_LOOPS = 4
LABEL, BRANCH = re.compile(r"^(\.L\w+):"), re.compile(r"\bBRA\S* .*?(\.L\w+)")


def report_of(
    d: int, dtype: torch.dtype = torch.bfloat16, given: str = "qkv", known: bool = False, **options: object
) -> Report:
    q, k, v = (torch.zeros(1, heads, 2048, d, dtype=dtype) for heads in (4, 2, 2))
    call = Call(AttentionSpec(**options), q, k, v)
    with compiled(host) as reports:
        tangents = (torch.zeros_like(x) if name in given else None for name, x in zip("qkv", (q, k, v), strict=True))
        host.tangent(call, *tangents, *((q, torch.zeros(q.shape[:3])) if known else ()))
    (report,) = reports
    return report


def spilled_in_loop(sass: str) -> int:
    """Accesses to local memory in loops with products and exponentials that contain no other such loop."""
    lines = sass.splitlines()
    places = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line))}
    loops = []
    for i, line in enumerate(lines):
        branch = BRANCH.search(line)
        if branch and places.get(branch[1], i) < i:
            body = "\n".join(lines[places[branch[1]] : i])
            if "HGMMA" in body and "MUFU.EX2" in body:
                loops.append(body)
    inner = [body for body in loops if not any(other != body and other in body for other in loops)]
    assert inner
    return sum(len(re.findall(r"\b(?:LDL|STL)\b", body)) for body in inner)


def examine(report: Report) -> None:
    assert not report.warnings, str(report)
    assert report.spills <= ALLOWED_SPILLS, str(report)
    assert report.shared <= SHARED_MEMORY, str(report)
    assert report.registers == 168, str(report)
    if report.sass:
        for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert report.has(opcode), f"{report}: no {opcode}"
        assert spilled_in_loop(report.sass) <= ALLOWED_IN_LOOPS, str(report)


def test_tangent() -> None:
    examine(report_of(128, causal=True))


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "dtype": torch.float16},
        {"window": (100, 20)},
        {"given": "qk"},
        {"given": "v", "causal": True},
        {"known": True, "causal": True},
    ],
    ids=str,
)
def test_more_tangents(d: int, options: dict[str, object]) -> None:
    examine(report_of(d, **options))
