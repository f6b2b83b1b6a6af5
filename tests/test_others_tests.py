"""The tools that run other projects' tests: how combinations are drawn, and that the pages show what the records hold."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["transformers_tests", "flash_attn_tests"])
def test_the_page_shows_the_record(name: str) -> None:
    found = tool(name)
    shown = found.PAGE.read_text().partition(found.BEGIN)[2].partition(found.END)[0].strip()
    assert shown == found.table(json.loads(found.RECORD.read_text()))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 5), (7, 900)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(0, 1), pytest.param((2, 3), id="named")])
def theirs(seqlen_q: int, seqlen_k: int, causal: bool, dropout_p: float, shape: tuple[int, int]) -> None:
    assert (seqlen_q < seqlen_k, causal in (False, True), dropout_p, len(shape)) == (True, True, 0, 2)


def test_combinations_are_drawn_from_marks() -> None:
    """Every one that applies, once: dropout does not, and long sequences are left out where somebody asks for it."""
    found = tool("flash_attn_tests")
    every = found.drawn(theirs, 50, 0, random.Random(0))
    short = found.drawn(theirs, 50, 100, random.Random(0))
    assert (len(every), len(short)) == (8, 4)
    assert {given["seqlen_k"] for given in short} == {5}
    assert {found.outcome(theirs, given, 5) for given in every} == {("passed", "")}
    assert found.outcome(theirs, every[0] | {"dropout_p": 1.0}, 5)[0] == "failed"
    assert found.outcome(theirs, {}, 5) == ("does not apply", "needs a fixture")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_of_the_runner_are_ours(interleaved: bool) -> None:
    from backlight.compat.flash_rotary import rotated

    x, angle = torch.randn(2, 5, 3, 8), torch.rand(9, 3)
    got = tool("flash_attn_tests").apply_rotary_emb(
        x, angle.cos(), angle.sin(), interleaved=interleaved, seqlen_offsets=torch.tensor([1, 4])
    )
    position = (torch.tensor([1, 4])[:, None] + torch.arange(5)).flatten()
    want = rotated(x.flatten(0, 1), position, angle.cos(), angle.sin(), interleaved)
    torch.testing.assert_close(got, want.view_as(x))
