"""The picture of signed errors is drawn from a record, with its text as text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

TOOL = Path(__file__).parents[1] / "tools" / "make_sums_picture.py"


def test_every_kernel_has_a_line_in_every_panel() -> None:
    spec = importlib.util.spec_from_file_location("make_sums_picture", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    kernels = ("backlight", "backlight, low half", "FA3")
    errors = [
        {"inputs": kind, "length": length, "kernel": kernel}
        | {what: {"signed": (-1) ** n * 1e-4 / (n + 1)} for what in tool.QUANTITIES}
        for kind in ("QK-norm", "ties")
        for length in (512, 2048, 8192)
        for n, kernel in enumerate(kernels)
    ]
    drawn = tool.picture(errors)
    root = ElementTree.fromstring(drawn)
    lines = [each for each in root if each.tag.endswith("polyline")]
    assert len(lines) == 2 * 3 * len(kernels)
    assert all(len((each.get("points") or "").split()) == 3 for each in lines)
    assert {kernel for kernel in kernels if f">{kernel}<" in drawn} == set(kernels)
    assert len(drawn) < 15_000
