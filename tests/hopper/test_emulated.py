"""The Hopper kernels' own source in the emulator, judged by the oracle: numerics and synchronisation, both orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import emulator
from modules import mutant

from backlight.backends.hopper import BACKEND, primitives
from backlight.backends.hopper.backward import dq_convert, dq_rows, gradients, host, loader, prepass, reducer, row_block
from backlight.backends.hopper.backward import kernel as main_kernel
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import BackwardConfig, DqConfig, ForwardConfig
from backlight.backends.hopper.forward import consumer, kernel, producer, scores, tiles
from backlight.backends.hopper.forward import host as forward
from backlight.config import override
from cases import CASES, FP16, Case, Problem, case_id
from gate import judge

LATE, EARLY = pytest.param(True, id="late"), pytest.param(False, id="early", marks=pytest.mark.slow)
# late finds waits that are missing; early, buffers that are overwritten too soon
ORDERS = pytest.mark.parametrize("late", [LATE, EARLY])
ELSEWHERE = "tensors are on cpu, not on a GPU"

# the cases of the one list that the backend takes, and some that cross several tiles of every kernel
UNPAIRED = [case for case in CASES if case.pair_bias is None and case.entmax is None]
PLAIN = [case for case in UNPAIRED if not (case.bias or case.sink or case.tau or case.gate or case.softcap or case.mask)]
SUPPORTED = [case for case in PLAIN if BACKEND.why_not(case.make(FP16).call) == (ELSEWHERE,)]
TILES = (
    Case("full,300x500", b=1, sq=300, sk=500, d=64),
    Case("full,even", b=1, sq=256, sk=256, d=64, hq=4, hkv=1),
    Case("causal,400", b=1, sq=400, sk=400, d=64, dlse=True),
    Case("causal,sq=150,sk=420", b=1, sq=150, sk=420, d=64, causal=True),
    Case("causal,sq=420,sk=150", b=1, sq=420, sk=150, d=64, causal=True),
    Case("window,500", b=1, sq=500, sk=500, d=64, window=(140, 70)),
    Case("window,far from the diagonal", b=1, hq=1, hkv=1, sq=420, sk=420, d=64, window=(10, 0)),
    Case("packed,causal", hq=2, hkv=1, lengths_q=(300, 1, 0, 140), d=64, causal=True),
    Case("packed,window", hq=1, hkv=1, lengths_q=(300, 5, 140), lengths_k=(200, 60, 140), d=64, window=(90, 20), dlse=True),
    Case("d=96", b=1, hq=2, hkv=1, sq=200, sk=200, d=96, causal=True),
    Case("d=128", b=1, hq=2, hkv=1, sq=260, sk=260, d=128, causal=True),
    Case("d=192", b=1, hq=2, hkv=1, sq=150, sk=200, d=192, causal=True, dlse=True),
    Case("d=192,dv=128", b=1, hq=2, hkv=1, sq=150, sk=200, d=192, dv=128, causal=True),
    Case("d=256", b=1, hq=2, hkv=1, sq=200, sk=200, d=256, window=(60, 10)),
    Case("d=64,dv=128", b=1, sq=150, sk=140, d=64, dv=128),
)


def examine(problem: Problem, late: bool, deterministic: bool = False) -> None:
    call = replace(problem.call, deterministic=deterministic, _segments=None)
    with emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, late=late):
        y, lse, *_ = forward.forward(call)
        made = host.backward(call, y, lse, None, problem.dy, problem.dlse, frozenset(("dq", "dk", "dv")))
    verdict = judge(call, problem.dy, problem.dlse, {"y": y, "lse": lse} | made)
    assert verdict.ok, f"{problem.case.name}\n{verdict}"


def test_supported_cases_are_many() -> None:
    assert len(SUPPORTED) > 50


@ORDERS
@pytest.mark.parametrize("case", SUPPORTED, ids=case_id)
def test_case(case: Case, late: bool) -> None:
    examine(case.make(FP16), late)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("case", TILES, ids=case_id)
def test_tiles(case: Case, late: bool) -> None:
    examine(case.make(FP16), late)


@ORDERS
@pytest.mark.parametrize("case", TILES, ids=case_id)
def test_deterministic_tiles(case: Case, late: bool) -> None:
    examine(case.make(FP16), late, deterministic=True)


@ORDERS
@pytest.mark.parametrize(
    "config",
    [
        ForwardConfig(128, 2),
        ForwardConfig(64, 3, stages=3),
        ForwardConfig(128, 2, pingpong=True),
        ForwardConfig(64, 3, pingpong=True, together=1),
        ForwardConfig(64, 2, persistent=False),
        ForwardConfig(128, 2, late_rescale=True, early_p=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (80, 30)}], ids=str)
def test_forward_configs(options: dict[str, object], config: ForwardConfig, late: bool) -> None:
    problem = Case("forward", b=1, hq=2, hkv=1, sq=330, sk=330, d=64, **options).make(FP16)
    with override("hopper.forward", config), emulator.emulated(forward, late=late):
        y, lse, *_ = forward.forward(problem.call)
    verdict = judge(problem.call, None, None, {"y": y, "lse": lse})
    assert verdict.ok, str(verdict)


@ORDERS
@pytest.mark.parametrize(
    "config",
    [
        BackwardConfig(64, 128, persistent=False),
        BackwardConfig(64, 128, stages=3, overlap=True),
        BackwardConfig(64, 128, overlap=True, together=2),
        BackwardConfig(128, 128),
        BackwardConfig(64, 128, split=True),
        BackwardConfig(128, 128, overlap=True),
        BackwardConfig(64, 64, wide=True),
        BackwardConfig(64, 64, split=True, wide=True, together=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (80, 30)}], ids=str)
def test_backward_configs(options: dict[str, object], config: BackwardConfig, late: bool) -> None:
    problem = Case("backward", b=1, hq=2, hkv=1, sq=330, sk=330, d=64, **options).make(FP16)
    with override("hopper.backward", config), override("hopper.dq", DqConfig(64, stages=3, v_stages=1)):
        examine(problem, late)


def layouts(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "transposed", x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*x.shape[:2], x.shape[2] + 9, x.shape[3] + 16), torch.nan, dtype=x.dtype)
    inner = wide[:, :, 4:-5, 8:-8]
    inner.copy_(x)
    yield "sliced", inner
    uneven = torch.full((*x.shape[:3], x.shape[3] + 3), torch.nan, dtype=x.dtype)[..., 1:-2]
    uneven.copy_(x)
    yield "unaligned", uneven


@pytest.mark.parametrize("which", range(3), ids=["transposed", "sliced", "unaligned"])
def test_strides(which: int) -> None:
    """q, k, v and do are read through their own strides; a do that TMA cannot read is copied."""
    problem = Case("strides", b=2, hq=2, hkv=1, sq=100, sk=140, d=32, causal=True).make(FP16)
    call = problem.call

    def lay(x: torch.Tensor) -> torch.Tensor:
        return list(layouts(x))[which][1]

    if which < 2:
        call = replace(call, q=lay(call.q), k=lay(call.k), v=lay(call.v), _segments=None)
    examine(replace(problem, call=call, dy=lay(problem.dy)), late=False)


def test_expanded_do() -> None:
    """`out.sum().backward()` hands a gradient whose strides are all 0."""
    problem = Case("expanded", b=2, hq=2, hkv=2, sq=70, sk=70, d=16).make(FP16)
    examine(replace(problem, dy=torch.ones((), dtype=FP16).expand(problem.dy.shape)), late=False)


def test_packed_neighbours_do_not_leak() -> None:
    """The last tile of a sequence overlaps the next one in memory: what lies there, NaN included, is not seen."""
    problem = Case("packed", hq=2, hkv=2, lengths_q=(50, 70, 33), d=32, causal=True).make(FP16)
    call = problem.call
    tensors = {name: getattr(call, name).clone() for name in ("q", "k", "v")}
    dy = problem.dy.clone()
    for tensor in (*tensors.values(), dy):
        tensor[:, :, 50:120] = torch.nan
    spoiled = replace(call, **tensors, _segments=None)
    results = []
    for each, gradient in ((call, problem.dy), (spoiled, dy)):
        with emulator.emulated(forward, backward, dq_convert, dq_rows, prepass):
            y, lse, *_ = forward.forward(each)
            grads = host.backward(each, y, lse, None, gradient, None, frozenset(("dq", "dk", "dv")))
        results.append({"y": y, "lse": lse[..., None]} | grads)
    for name, clean in results[0].items():
        for rows in (slice(0, 50), slice(120, None)):
            assert torch.equal(clean[:, :, rows], results[1][name][:, :, rows]), name


@pytest.mark.parametrize("needs", [("dq",), ("dk",), ("dv",), ("dk", "dv")], ids=str)
def test_needs(needs: tuple[str, ...]) -> None:
    problem = Case("needs", b=1, sq=140, sk=140, d=16, causal=True).make(FP16)
    with emulator.emulated(forward, backward, dq_convert, dq_rows, prepass):
        y, lse, *_ = forward.forward(problem.call)
        made = host.backward(problem.call, y, lse, None, problem.dy, None, frozenset(needs))
    assert set(made) == set(needs)
    verdict = judge(problem.call, problem.dy, None, made, names=needs)
    assert verdict.ok, str(verdict)


# --- the emulator sees what it claims to see ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "    wait_full(p.v, count - 1)\n    o_token, beyond_token = start_outputs(p, rows.weights, previous",
            "    o_token, beyond_token = start_outputs(p, rows.weights, previous",
        ),
        ("release(p.v, previous)", "pass"),
        ("warpgroup_mma_wait(2 if BEYOND > 0 else 1, deps=[s_token])", "warpgroup_mma_wait(2, deps=[s_token])"),
        ("    tma.store_wait(0)\n    if p.V.PINGPONG and W == 0:", "    if p.V.PINGPONG and W == 0:"),
        ("        if k_count >= ST - i:\n", "        if k_count < 0:\n"),
        ("top = gl.where(new_max == -INF, 0.0, top)", "pass"),
        ("seen = before(end - block * B, columns)", "seen = before(end - block * B - 1, columns)"),
        ("mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)", "mbarrier.expect(ring.full.index(stage), 64)"),
    ],
    ids=[
        "no wait for v",
        "v never released",
        "s read in flight",
        "store left behind",
        "arrival never met",
        "empty row",
        "mask off by one",
        "bytes",
    ],
)
def test_a_broken_forward_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    problem = Case("broken", b=1, hq=1, hkv=1, sq=300, sk=270, d=16, causal=True).make(FP16)
    parts = (
        (primitives, "softmax_step", consumer),
        (scores, "hide", consumer),
        (consumer, "plain_consumer", kernel),
        (producer, "producer", kernel),
        (tiles, "dismiss_apart", producer),
    )
    ((module, name, user),) = [part for part in parts if old in Path(part[0].__file__).read_text()]
    monkeypatch.setattr(user, name, getattr(mutant(tmp_path, module, old, new), name))
    with emulator.emulated(forward, late=True):
        try:
            y, lse, *_ = forward.forward(problem.call)
        except (RuntimeError, AssertionError):
            return
    assert not judge(problem.call, None, None, {"y": y, "lse": lse}).ok


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0], dq_tile)\n    tma.store_wait(0)\n", "0], dq_tile)\n"),
        ("p.buffers.dk)\n        tma.store_wait(0)\n", "p.buffers.dk)\n"),
        ("bar_arrive(dq_full(p.V.ST), BOTH_GROUPS_AND_WARP)", "pass"),
        ("bar_arrive(OUT_FULL, BOTH_GROUPS_AND_WARP)", "pass"),
        ("        else:\n            bar_arrive(KV_EMPTY, kv_threads(p.V.EARLY))\n", "        else:\n            pass\n"),
        ("        if p.V.EARLY:\n            bar_arrive(KV_EMPTY, kv_threads(p.V.EARLY))\n", "        if p.V.EARLY:\n"),
        ("        bar_sync(KV_EMPTY, kv_threads(p.V.EARLY))\n    mbarrier", "        pass\n    mbarrier"),
        ("dp = warpgroup_mma_wait(0, deps=[dp_token])", "dp = warpgroup_mma_wait(1, deps=[dp_token])"),
        ("mbarrier.wait(p.buffers.kv_full.index(0), turn & 1)", "pass"),
    ],
    ids=[
        "dq left",
        "dk left",
        "dq never full",
        "dk never full",
        "k never released",
        "k never free",
        "k overwritten",
        "dp read in flight",
        "no wait for k",
    ],
)
def test_a_broken_backward_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    problem = Case("broken", b=1, hq=1, hkv=1, sq=300, sk=270, d=16, causal=True).make(FP16)
    parts = (
        (loader, "loader", main_kernel),
        (gradients, "gradients", main_kernel),
        (reducer, "reducer", main_kernel),
        (row_block, "row_block", gradients),
    )
    ((module, name, user),) = [part for part in parts if old in Path(part[0].__file__).read_text()]
    monkeypatch.setattr(user, name, getattr(mutant(tmp_path, module, old, new), name))
    config = BackwardConfig(64, 128, split="else:" in old)
    with override("hopper.backward", config), emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, late=True):
        y, lse, *_ = forward.forward(problem.call)
        try:
            result = host.backward(problem.call, y, lse, None, problem.dy, None, frozenset(("dq", "dk", "dv")))
        except (RuntimeError, AssertionError):
            return
    assert not judge(problem.call, problem.dy, None, {"y": y, "lse": lse} | result).ok
