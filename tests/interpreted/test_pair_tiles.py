"""The pair bias in the Triton kernels, in tiles so small that a bias has several of them, whole and cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from backlight.backends.triton import BACKEND, dpair, fused
from backlight.backends.triton import launch as host
from backlight.backends.triton.config import KernelConfig
from backlight.config import override
from cases import Case, case_id
from gate import judge
from running import run

KERNELS = ("forward", "dq", "dkdv", "dv", "dk", "dbias", "dpair", "fused")
SHARED, OWN, BY_KEY = ("heads", "rows"), ("batch", "heads", "rows"), ("heads",)
SMALL = {"d": 16, "sq": 37, "sk": 51}
PACKED = {"lengths_q": (37, 0, 1, 33), "lengths_k": (37, 9, 40, 17)}
EVERYTHING = {"softcap": 3.0, "bias": 30, "bias_origin": 6, "sink": True, "gate": True, "dlse": True}


@contextmanager
def tiles(block_m: int, block_n: int, tma: bool = False) -> Iterator[None]:
    with ExitStack() as forced:
        for kernel in KERNELS:
            sizes = (min(block_m, block_n), block_n) if kernel == "dbias" else (block_m, block_n)
            forced.enter_context(override(f"triton.{kernel}", KernelConfig(*sizes, num_warps=4, num_stages=1, tma=tma)))
        yield


def one(name: str, pair_bias: tuple[str, ...], **options: object) -> Case:
    return Case(name, pair_bias=pair_bias, **(SMALL | options))  # type: ignore[arg-type]


CASES = (
    one("own", OWN, b=1, dlse=True),
    one("own,causal,sq>sk", OWN, b=1, sq=50, sk=30, causal=True, softcap=3.0),
    one("own,hidden,strided,gqa", (*OWN, "hidden", "strided"), b=1, hq=4, window=(20, 9)),
    one("shared", SHARED, b=3),
    one("shared by two", ("pairs", "heads", "rows"), b=4, causal=True),
    one("shared,everything", ("pairs", "heads", "rows", "hidden"), b=4, hkv=1, causal=True, **EVERYTHING),
    one("heads share", ("batch", "rows", "strided"), hq=4, dlse=True),
    one("all share,mask", ("rows", "hidden"), mask="two runs"),
    one("by key", BY_KEY, b=3, hq=4, softcap=3.0),
    one("by key,all share", ("hidden",), hq=4, causal=True, dlse=True),
    one("by key,own,mask", ("batch", "heads"), mask="run", pos=True),
    one("packed,own", (*OWN, "hidden"), **PACKED, causal=True, dlse=True),
    one("packed,own,mask", OWN, **PACKED, mask="two runs", hkv=1),
    one("packed,shared", SHARED, **PACKED, dlse=True),
    one("packed,shared by two", ("pairs", "heads", "rows", "strided"), **PACKED, hkv=1, causal=True, **EVERYTHING),
    one("packed,all share,window", ("rows", "hidden"), **PACKED, window=(20, 9)),
    one("packed,by key", BY_KEY, **PACKED, hq=4, causal=True, softcap=3.0, dlse=True),
    one("packed,by key,all share,mask", ("pairs",), **PACKED, mask="run", pos=True),
)


def verdict_of(case: Case, dtype: torch.dtype = torch.float32) -> object:
    problem = case.make(dtype)
    return judge(problem.call, problem.dy, problem.dlse, run(problem, "triton"))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_form(case: Case) -> None:
    with tiles(16, 32):
        verdict = verdict_of(case)
    assert verdict.ok, f"{case.name}\n{verdict}"


@pytest.mark.parametrize("programs", [1, 40, 1000])
def test_members_in_groups(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Few tiles: several programs share one, and their sums are added up."""
    monkeypatch.setattr(dpair, "PROGRAMS", programs)
    monkeypatch.setattr(dpair, "FEWEST_MEMBERS", 1)
    with tiles(16, 32):
        verdict = verdict_of(one("groups", ("rows",), b=5, sq=20))
    assert verdict.ok, verdict


@pytest.mark.parametrize("slots", [4, 1000])
@pytest.mark.parametrize(
    "case",
    [
        one("shared", SHARED, b=5),
        one("shared by two,hidden", ("pairs", "heads", "rows", "hidden"), b=4, dlse=True),
        one("all share,wide,strided", ("rows", "wide", "strided"), b=3, d=20, dv=12, softcap=3.0),
    ],
    ids=case_id,
)
def test_the_backward_in_one_kernel(monkeypatch: pytest.MonkeyPatch, case: Case, slots: int) -> None:
    """Fewer programs than heads: each goes from one batch entry to the next."""
    monkeypatch.setattr(fused, "SLOTS", slots)
    monkeypatch.setattr("backlight.backends.triton.backward.split", None)
    with tiles(64, 64):
        verdict = verdict_of(case, torch.float16)
    assert verdict.ok, f"{case.name}\n{verdict}"


LEFT: list[dict[str, object]] = [{"hq": 4}, {"causal": True}, {"sink": True, "gate": True}, {"mask": "run"}, {"bias": 9}]


@pytest.mark.parametrize("options", LEFT, ids=str)
def test_what_the_one_kernel_leaves_to_others(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    monkeypatch.setattr("backlight.backends.triton.backward.fused_of", None)
    with tiles(64, 64):
        verdict = verdict_of(one("left", SHARED, **options), torch.float16)
    assert verdict.ok, verdict


@pytest.mark.parametrize("words", [SHARED, BY_KEY], ids=str)
def test_one_kernel_without_the_gradient_of_the_bias(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    problem, needs = one("given", words, dlse=True).make(torch.float16), frozenset({"dq", "dk", "dv"})
    found = []
    with tiles(64, 64):
        y, lse, *_ = BACKEND.forward(problem.call, False)
        for fits in (fused.fits, lambda launch: False):
            monkeypatch.setattr("backlight.backends.triton.backward.fits", fits)
            found.append(BACKEND.backward(problem.call, y, lse, None, problem.dy, problem.dlse, needs))
    for name in needs:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("words", [SHARED, OWN, ("rows",), ("batch", "rows"), (*SHARED, "wide", "hidden")], ids=str)
def test_tiles_by_descriptor(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    """As TMA reads them, which knows no end of a row but the tensor's own."""
    monkeypatch.setattr(host, "describable", lambda tensor: True)
    with tiles(16, 32, tma=True):
        verdict = verdict_of(one("described", words, sq=40, sk=56), torch.float16)
    assert verdict.ok, verdict
