"""Masks by row intervals in the Hopper kernels' own source, run by the emulator and judged by the oracle."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import emulator
import triton
from aot import SHARED_MEMORY, compiled

from backlight import mask
from backlight.backends.hopper import BACKEND, config
from backlight.backends.hopper.backward import dq_convert, dq_rows, host, key_tiles, loader, prepass
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.backward.narrow import loader as narrow_loader
from backlight.backends.hopper.config import BackwardConfig, ForwardConfig
from backlight.backends.hopper.forward import host as forward
from backlight.backends.intervals.tiles import LiveTiles, live_tiles
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec
from cases import CASES, FP16, Case, case_id
from gate import judge

B, HEADS = 2, 2
ELSEWHERE = "tensors are on cpu, not on a GPU"


def reasons_against(call: Call) -> list[str]:
    """Why the backend would not take a call on a Hopper GPU."""
    untold = [name for name in call.spec.features if name not in BACKEND.takes]
    return [*untold, *(reason for reason in BACKEND.why_not(call) if reason != ELSEWHERE)]


TAKEN = [case for case in CASES if case.mask is not None and not reasons_against(case.make(FP16).call)]


def random_rows(sq: int, sk: int, batch: int, heads: int, intervals: int) -> Tensor:
    """Intervals of every kind, some empty, some out of range, in runs of keys so that tiles are full and empty too."""
    generator = torch.Generator().manual_seed(sq)
    first = torch.randint(-9, sq + 9, (batch, heads, intervals, 1, sk), generator=generator)
    size = torch.randint(-sq // 5, sq, (batch, heads, intervals, 1, sk), generator=generator)
    same = torch.arange(sk) // 90 * 90
    return torch.cat([first, first + size], 3)[..., same].reshape(batch, heads, 2 * intervals, sk).to(torch.int32)


def documents(*lengths: int) -> Tensor:
    return mask.documents(lengths=torch.tensor(lengths)).rows


def call_of(
    rows: Tensor, sq: int, sk: int, d: int, lengths: tuple[list[int], list[int]] | None = None, **options: Any
) -> tuple[Call, Tensor]:
    generator = torch.Generator().manual_seed(1)
    batch = 1 if lengths else B
    q, k, v, dy = (
        torch.randn(batch, heads, n, d, generator=generator).half() for heads, n in ((HEADS, sq), (1, sk), (1, sk), (HEADS, sq))
    )
    sink = torch.tensor([0.5, -1.0]) if options.pop("sink", False) else None
    gate = torch.randn(batch, HEADS, sq, d, generator=generator).half() if options.pop("gate", False) else None
    spec = AttentionSpec(**options, rows=True, sink=sink is not None, gate=gate is not None)
    borders = [None, None] if lengths is None else [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in lengths]
    return Call(spec, q, k, v, sink=sink, gate=gate, rows=rows, cu_seqlens_q=borders[0], cu_seqlens_k=borders[1]), dy


PROBLEMS: dict[str, tuple[Any, ...]] = {
    "documents": (documents(70, 80, 5, 145), 300, 300, 64, None, {"causal": True}),
    "documents,d=128": (documents(130, 60, 70), 260, 260, 128, None, {"causal": True, "softcap": 20.0}),
    "documents,d=256": (documents(130, 70), 200, 200, 256, None, {}),
    "window": (documents(200, 130), 330, 330, 64, None, {"window": (100, 20)}),
    "a mask for each head and entry": (random_rows(200, 330, B, HEADS, 1), 200, 330, 64, None, {"sink": True}),
    "two intervals": (random_rows(260, 330, 1, HEADS, 2), 260, 330, 64, None, {"gate": True}),
    "two intervals,d=128": (random_rows(260, 200, B, 1, 2), 260, 200, 128, None, {"causal": True}),
    "nobody sees anything": (torch.zeros(1, 1, 2, 200, dtype=torch.int32), 130, 200, 64, None, {}),
    "packed": (random_rows(340, 330, 1, HEADS, 1), 340, 330, 64, ([200, 0, 20, 120], [150, 50, 0, 130]), {"causal": True}),
}


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_both_directions(name: str, late: bool) -> None:
    rows, sq, sk, d, lengths, options = PROBLEMS[name]
    call, dy = call_of(rows, sq, sk, d, lengths, **options)
    assert BACKEND.why_not(call) == (ELSEWHERE,)
    examine(name, call, dy, None, late)


def examine(name: str, call: Call, dy: Tensor, dlse: Tensor | None, late: bool) -> None:
    needs = frozenset({"dq", "dk", "dv", *(f"d{term}" for term in ("sink", "gate") if getattr(call, term) is not None)})
    with emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, late=late):
        y, lse, *_ = forward.forward(call)
        gradients = host.backward(call, y, lse, None, dy, dlse, needs)
    verdict = judge(call, dy, dlse, {"y": y, "lse": lse} | gradients)
    assert verdict.ok, f"{name}\n{verdict}"


FIRST_MAX = {
    64: [
        ForwardConfig(128, 3, pingpong=True, late_rescale=True, keep_first_max=True),
        ForwardConfig(128, 2, stages=4, q_buffers=2, keep_first_max=True),
    ],
    128: [ForwardConfig(128, 2, keep_first_max=True)],
}


@pytest.mark.parametrize("factor", [1.0, 40.0], ids=["", "overflow"])
@pytest.mark.parametrize(
    "name", ["documents", "a mask for each head and entry", "nobody sees anything", "packed", "two intervals,d=128"]
)
def test_blocks_without_a_mask_come_first_where_their_maximum_is_kept(name: str, factor: float) -> None:
    """As bf16 has it; large scores rise so far above the first maximum that tiles are done again."""
    rows, sq, sk, d, lengths, options = PROBLEMS[name]
    call, _dy = call_of(rows, sq, sk, d, lengths, **options)
    call.q.mul_(factor)
    for chosen in FIRST_MAX[d]:
        with override("hopper.forward", chosen), emulator.emulated(forward, late=True):
            y, lse, *_ = forward.forward(call)
        verdict = judge(call, None, None, {"y": y, "lse": lse})
        assert verdict.ok, f"{name}, {chosen}\n{verdict}"


@pytest.mark.parametrize("share", [0.0, 2.0], ids=["many", "few"])
@pytest.mark.parametrize("name", ["documents", "documents,d=128", "a mask for each head and entry", "packed"])
def test_more_heads_interleave_where_few_tiles_live(name: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, sq, sk, d, lengths, options = PROBLEMS[name]
    call, dy = call_of(rows, sq, sk, d, lengths, **options)
    given, seen = emulator.Emulation(key_tiles.side_by_side, late=False).entry, []

    def noted(p: Any) -> Any:
        seen.append((int(given(p)), int(p.counter_ptr.storage[p.counter + 1])))
        return seen[-1][0]

    made: list[LiveTiles] = []

    def kept(*args: Any, **named: Any) -> LiveTiles:
        made.append(live_tiles(*args, **named))
        return made[-1]

    # the present rule keeps one head of these
    monkeypatch.setattr(config, "L2", 1)
    monkeypatch.setattr(backward, "FEW", share)
    monkeypatch.setattr(backward, "live_tiles", kept)
    for module in (loader, narrow_loader):
        monkeypatch.setattr(module, "side_by_side", noted)
    examine(name, call, dy, None, late=True)
    assert set(seen) == {(call.k.shape[0] if share else 1, int(made[-1].counts.sum()))}


@pytest.mark.parametrize(("batch", "kv_heads", "together"), [(1, 8, 8), (3, 5, 5), (1, 7, 7), (2, 3, 2), (1, 1, 1)])
def test_every_key_tile_has_one_number(batch: int, kv_heads: int, together: int) -> None:
    group, n = 2, 3
    place = emulator.Emulation(key_tiles.key_tile, late=False).entry
    counts = emulator.argument(torch.ones(n + 1, 2, dtype=torch.int32))
    variant = SimpleNamespace(INTERVALS=1, VARLEN=False, BN=128, BM=64, HAS_LEFT=False, HAS_RIGHT=False, BIAS=False)
    p: Any = SimpleNamespace(
        heads=kv_heads * group, group=group, key_tiles=n, sq=np.int32(300), sk=np.int32(300), left=0, right=0,
        mask=SimpleNamespace(counts_ptr=counts), mask_batch=0, mask_head=0, V=variant,
    )  # fmt: skip
    found = [place(p, emulator.tensor(number), together) for number in range(batch * kv_heads * n)]
    cells = [(int(t.b), int(t.kv_head), int(t.j0)) for t in found]
    assert sorted(cells) == [(b, h, j * 128) for b in range(batch) for h in range(kv_heads) for j in range(n)]
    # the first tiles of as many heads side by side
    assert len({cell[:2] for cell in cells[:together]}) == together
    assert {cell[2] for cell in cells[:together]} == {0}


def test_taken_cases_are_many() -> None:
    assert len(TAKEN) > 15


@pytest.mark.parametrize("case", TAKEN, ids=case_id)
def test_case(case: Case) -> None:
    problem = case.make(FP16)
    examine(case.name, problem.call, problem.dy, problem.dlse, late=True)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"bias": 9}, "bias"),
        ({"tau": (-0.7,)}, "tau"),
        ({"pos": True}, "pos"),
    ],
)
def test_what_masks_do_not_go_together_with(options: dict[str, Any], word: str) -> None:
    call = Case("refused", mask="run", d=64, **options).make(FP16).call
    assert any(word in reason for reason in reasons_against(call))


def test_deterministic_masks_are_refused() -> None:
    call = replace(Case("deterministic", mask="run", d=64).make(FP16).call, deterministic=True, _segments=None)
    assert "a mask by row intervals together with deterministic" in BACKEND.why_not(call)


def test_a_split_that_is_forced_is_not_wrong_in_silence() -> None:
    rows, sq, sk, d, _, options = PROBLEMS["documents"]
    call, dy = call_of(rows, sq, sk, d, **options)
    with override("hopper.backward", BackwardConfig(64, 128, split=True)), pytest.raises(AssertionError, match="owns rows"):
        examine("split", call, dy, None, late=False)


# bytes of the backward, none elsewhere; at D = 256 as many as without a mask (test_compiled.py), which Triton 3.9 comes near.
# the narrow kernel's one comparison without a sign spills 76 bytes with Triton 3.6 where two spilled 48: 4 % faster on the card
NARROW = 80 if triton.__version__.startswith("3.6") else 56
ALLOWED_SPILLS = {("_bwd_narrow_kernel", 64): NARROW, ("_bwd_kernel", 256): 32}


@pytest.mark.slow
@pytest.mark.parametrize("intervals", [1, 2])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_compiled(d: int, intervals: int) -> None:
    q = torch.empty(1, 2, 4096, d, dtype=torch.bfloat16)
    rows = torch.zeros(1, 1, 2 * intervals, 4096, dtype=torch.int32)
    call = Call(AttentionSpec(causal=True, rows=True), q, q, q, rows=rows)
    lse = torch.empty(1, 2, 4096)
    with compiled(forward, backward, prepass, dq_convert) as reports:
        forward.forward(call)
        host.backward(call, q, lse, None, q, None, frozenset(("dq", "dk", "dv")))
    assert len(reports) == 4
    for report in reports:
        assert report.spills <= ALLOWED_SPILLS.get((report.kernel, d), 0), str(report)
        assert not report.warnings, str(report)
        assert report.shared <= SHARED_MEMORY, str(report)
