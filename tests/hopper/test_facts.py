"""tools/kernels.py and tools/sass.py: what is counted of a kernel's machine code, and what is said of two records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import kernels
import sass
from records import load

# an outer loop, in it one with a matmul, which waits for a barrier out of line
CODE = """
_some_kernel:
.text._some_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   ULDC UR4, c[0x0][0x210] ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
.L_x_2:
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/              @!P1 BRA `(.L_x_1) ;
        /*0060*/                   LDC R2, c[0x0][0x218] ;
        /*0070*/              @!P2 BRA `(.L_x_0) ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*00a0*/               @P0 BRA `(.L_x_2) ;
        /*00b0*/                   BRA `(.L_x_3) ;
        /*00c0*/                   NOP ;
"""


def test_instructions_and_loops() -> None:
    code = sass.instructions(CODE)
    assert len(code) == 12
    # the wait, the matmul's loop with it, the loop around both
    assert sorted(map(len, sass.loops(code))) == [3, 7, 10]
    assert sass.facts(CODE) == {"instructions": 12, "loop": 7, "hash": sass.digest(code)}
    assert sass.facts("") == {"instructions": None, "loop": None, "hash": None}


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("_some_kernel", "_other_kernel", True),
        (".L_x_3", ".L_x_7", True),
        ("c[0x0][0x218]", "c[0x0][0x220]", True),
        ("/*0040*/", "/*0140*/", True),
        ("R24, gdesc", "R32, gdesc", False),
        ("c[0x0][0x218]", "c[0x0][0x210]", False),
        ("@!P1", "@P1", False),
    ],
)
def test_the_hash_knows_code_from_names(old: str, new: str, same: bool) -> None:
    assert old in CODE
    assert (sass.facts(CODE)["hash"] == sass.facts(CODE.replace(old, new))["hash"]) == same


RECORD = Path(__file__).resolve().parents[2] / "docs" / "data" / "hopper-kernels-before-after.json.gz"


def row(**changes: Any) -> dict[str, Any]:
    numbers = dict.fromkeys((*kernels.COSTS, "HGMMA"), 8)
    return {"call": "d=64", "kernel": "old", "hash": "a", **numbers, **changes}


def test_a_comparison_tells_what_rose() -> None:
    before = {"rows": [row(), row(), row(), row(call="gone")]}
    after = {"rows": [row(kernel="new"), row(hash="b", spills=9), row(hash="b", loop=7)]}
    lines, same, bad = kernels.comparison(before, after)
    assert (len(lines), same, bad) == (5, 1, 1)
    assert [line.rsplit(" | ", 1)[1] for line in lines[2:]] == ["same |", "more spills |", "other |"]
    assert "old -> new" in lines[2]
    assert "8 -> 9" in lines[3]


def test_a_call_with_another_number_of_kernels_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="shorter"):
        kernels.comparison({"rows": [row(), row()]}, {"rows": [row()]})


def test_the_page_is_the_record_and_nothing_became_worse() -> None:
    record = load(RECORD)
    assert RECORD.with_name("hopper-kernels-before-after.md").read_text() == kernels.page(record)
    assert {version: kernels.section(version, **both)[1] for version, both in record.items()} == dict.fromkeys(record, 0)
