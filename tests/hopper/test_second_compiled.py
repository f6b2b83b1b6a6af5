"""The kernel of second derivatives compiled for sm_90a: wgmma is not serialised, and what is spilled are places of operands."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from aot import SHARED_MEMORY, Report, compiled

from backlight.backends.hopper.backward import dq_convert
from backlight.backends.hopper.second import host, prepass
from backlight.call import Call
from backlight.spec import AttentionSpec

# bytes of a thread: dk, dv and four tiles of scores leave few registers for places of nine operands
ALLOWED_SPILLS = {64: 560, 128: 860}


def reports_of(d: int, dtype: torch.dtype = torch.bfloat16, given: str = "qkv", **options: object) -> dict[str, Report]:
    q, k, v = (torch.zeros(1, heads, 2048, d, dtype=dtype) for heads in (4, 2, 2))
    call, lse = Call(AttentionSpec(**options), q, k, v), torch.zeros(1, 4, 2048)
    tangents = (torch.zeros_like(x) if name in given else None for name, x in zip("qkv", (q, k, v), strict=True))
    with compiled(host, dq_convert, prepass) as reports:
        host.by_inputs(call, q, lse, torch.zeros_like(q), torch.zeros_like(lse), torch.zeros_like(q), None, *tangents)
    return {report.kernel: report for report in reports}


def examine(d: int, reports: dict[str, Report]) -> None:
    assert reports.keys() == {"_second_prepass_kernel", "_second_kernel", "_dq_convert_kernel"}
    for report in reports.values():
        assert not report.warnings, str(report)
        assert report.spills <= (ALLOWED_SPILLS[d] if report.kernel == "_second_kernel" else 0), str(report)
        assert report.shared <= SHARED_MEMORY, str(report)
    main = reports["_second_kernel"]
    assert main.registers == 168, str(main)
    if main.sass:
        for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert main.has(opcode), f"{main}: no {opcode}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "options"),
    [
        (64, {"causal": True}),
        (128, {"causal": True}),
        (64, {"window": (100, 20)}),
        (128, {"given": "q", "dtype": torch.float16}),
    ],
    ids=str,
)
def test_second_derivatives(d: int, options: dict[str, object]) -> None:
    examine(d, reports_of(d, **options))
