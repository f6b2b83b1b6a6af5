"""Rows that keep the maximum of their first blocks (`keep_first_max`), also where scores grow far above it."""

from __future__ import annotations

from pathlib import Path

import emulator
import numpy as np
import pytest

pytest.importorskip("triton")

from modules import mutant
from test_terms import examine

from backlight.backends.hopper import terms
from backlight.backends.hopper.config import ForwardConfig
from backlight.backends.hopper.forward import consumer, kernel, overflow, producer, scores, steps
from backlight.backends.hopper.forward import host as forward
from backlight.config import override
from backlight.reference import oracle
from cases import FP16, Case, case_id
from gate import judge

# scores that grow by far more than weights in 16 bits allow, so that tiles are done again
HOT = {"logits": 12.0}
CASES = (
    Case("causal,700", b=1, hq=2, hkv=1, sq=700, sk=700, d=64, causal=True),
    Case("causal,hot", b=1, hq=2, hkv=1, sq=700, sk=700, d=64, causal=True, **HOT),
    Case("full,sink,hot", b=1, hq=2, hkv=1, sq=300, sk=700, d=64, sink=True, **HOT),
    Case("a row's last key ends a block", b=1, hq=1, hkv=1, sq=300, sk=427, d=64, causal=True),
    Case("rows without keys", b=1, hq=1, hkv=1, sq=500, sk=300, d=64, causal=True),
    Case("packed,bias,hot", hq=2, hkv=1, lengths_q=(300, 1, 0, 400), d=64, causal=True, bias=70, **HOT),
    Case("gate,hot", b=1, hq=1, hkv=1, sq=400, sk=400, d=64, causal=True, gate=True, **HOT),
    Case("softcap,bias", b=1, hq=2, hkv=1, sq=600, sk=600, d=64, causal=True, softcap=20.0, bias=50, **HOT),
    Case("window", b=1, hq=1, hkv=1, sq=500, sk=500, d=64, window=(140, 70)),
)
WITH_TAU = (
    Case("lazy", b=1, hq=1, hkv=1, sq=700, sk=700, d=64, causal=True, bias=90, tau=(-0.8,)),
    Case("lazy,hot", b=1, hq=2, hkv=1, sq=700, sk=700, d=64, causal=True, bias=90, tau=(-0.8, 0.3), **HOT),
    Case("tau,very hot", b=1, hq=1, hkv=1, sq=500, sk=500, d=64, causal=True, tau=(-0.8,), logits=100.0),
    Case("packed,tau", hq=2, hkv=1, lengths_q=(300, 1, 0, 600), d=64, causal=True, tau=(-1.0, 0.4)),
)
KEEP_FIRST_MAX = ForwardConfig(128, 3, pingpong=True, late_rescale=True, keep_first_max=True)
FORWARD = (
    KEEP_FIRST_MAX,
    ForwardConfig(64, 2, keep_first_max=True),
    ForwardConfig(128, 2, early_p=True, keep_first_max=True),
    ForwardConfig(128, 2, keep_first_max=True, q_buffers=2),
)
ELASTIC = (
    ForwardConfig(128, 3, keep_first_max=True),
    ForwardConfig(64, 2, keep_first_max=True),
    ForwardConfig(128, 3, keep_first_max=True, q_buffers=2),
)
ORDERS = pytest.mark.parametrize("late", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["late", "early"])


@ORDERS
@pytest.mark.parametrize("config", FORWARD, ids=["3 in turns", "2", "2, early p", "2, two of q"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_forward(case: Case, config: ForwardConfig, late: bool) -> None:
    with override("hopper.forward", config):
        examine(case, late)


SHARED = ForwardConfig(64, 2, keep_first_max=True)
ALONE = ForwardConfig(64, 2, persistent=False, keep_first_max=True)
WIDE = Case("shared q and o,hot", b=1, hq=2, hkv=1, sq=200, sk=300, d=256, causal=True, **HOT)
GATED = Case("shared q and o,gate,hot", b=1, hq=1, hkv=1, sq=200, sk=200, d=256, gate=True, **HOT)
GROUPED = Case("a cta for each tile,hot", b=2, hq=4, hkv=2, sq=260, sk=330, d=16, causal=True, **HOT)


@pytest.mark.parametrize(
    ("case", "config"), [(WIDE, SHARED), (GATED, SHARED), (GROUPED, ALONE)], ids=["wide", "gated", "alone"]
)
def test_other_buffers_and_grids(case: Case, config: ForwardConfig) -> None:
    with override("hopper.forward", config):
        examine(case, late=True)


@pytest.mark.parametrize("hot", [0, 150, 299], ids=["first rows", "middle", "last rows"])
def test_single_hot_rows(hot: int) -> None:
    """One row of one head rises above its first blocks: its tile is done again, for its warpgroup alone."""
    case = Case("one row", b=1, hq=3, hkv=1, sq=300, sk=700, d=64)
    problem = case.make(FP16)
    problem.call.q[0, 1, hot] *= 60.0
    with override("hopper.forward", KEEP_FIRST_MAX), emulator.emulated(forward, late=True):
        y, lse, *_ = forward.forward(problem.call)
    verdict = judge(problem.call, None, None, {"y": y, "lse": lse})
    assert verdict.ok, str(verdict)


@ORDERS
@pytest.mark.parametrize("config", ELASTIC, ids=["3", "2", "3, two of q"])
@pytest.mark.parametrize("case", WITH_TAU, ids=case_id)
def test_elastic(case: Case, config: ForwardConfig, late: bool) -> None:
    with override("hopper.elastic", config):
        examine(case, late)


BROKEN = {
    "not remembered": (overflow, "remember_overflow(p, ticket, lse_row, i0, W)", "pass", steps, "rows_to_store"),
    "all but the last forgotten": (
        overflow,
        "buffers.overflow.index(W).load(four), 0).to(gl.float32)",
        "buffers.overflow.index(W).load(four), 0) * 0.0 - 1.0",
        steps,
        "rows_to_store",
    ),
    "done again without care": (scores, "far_end = gl.where(careful, view.begin, far_end)", "pass", consumer, "far_blocks_end"),
    "done again too soon": (producer, "q_phase(p, turn + i) ^ 1)", "q_phase(p, turn + i))", kernel, "producer"),
    "any sum will do": (overflow, "else 2.0**15", "else 2.0**120", consumer, "largest_sum"),
    "never rescaled": (
        consumer,
        "o, o_beyond = rescaled_after(p, o, o_beyond, rows.rescale, block + 1, far_end)",
        "pass",
        kernel,
        "plain_consumer",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, user, attribute = BROKEN[name]
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    monkeypatch.setattr(user, attribute, getattr(mutant(tmp_path, module, old, new), attribute))
    case = Case("broken", b=1, hq=3, hkv=1, sq=700, sk=700, d=16, causal=True, **HOT)
    with override("hopper.forward", KEEP_FIRST_MAX), pytest.raises((RuntimeError, AssertionError)):
        examine(case, late=True)


def test_elastic_tiles_are_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(tmp_path, overflow, "remember_overflow(p, ticket, lse_row, i0, W)", "pass")
    monkeypatch.setattr(steps, "rows_to_store", broken.rows_to_store)
    with override("hopper.elastic", ELASTIC[0]), pytest.raises(AssertionError):
        examine(WITH_TAU[2], late=True)


@pytest.mark.parametrize("factor", [0.0371, 4e-4])
@pytest.mark.parametrize("largest", [0.19, 0.39, 0.99, 8.0, 100.0])
def test_capped_scores_are_those_of_tanh(largest: float, factor: float) -> None:
    """On each of the four ways, to fp32 accuracy; a product of 0 too."""
    rng = np.random.default_rng(0)
    factor, unit = np.float32(factor), np.float32(43.3)
    s = (rng.uniform(-1, 1, (512, 32)) * largest / factor).astype(np.float32)
    s[0, 0], s[1, 1] = 0.0, largest / factor
    registers = [*s.T, *([np.full(512, factor)] * 32), *([np.full(512, unit)] * 32)]
    ratio, whole = (np.stack(emulator.run_ptx(asm.value, registers, 32), 1) for asm in (terms.RATIO_32, terms.CAPPED_32))
    wanted = unit * np.tanh(np.float64(factor) * s)
    for given in (s * np.float64(ratio), np.float64(whole)):
        assert (np.abs(given - wanted) <= 6e-7 * np.abs(wanted)).all()


def test_lse_keeps_its_digits_where_the_logarithm_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """MUFU's log2 has a relative error of 2^-22: of a sum of a hundred terms, that is more than lse may lose."""
    exact = emulator.language.log2
    monkeypatch.setattr(emulator.language, "log2", staticmethod(lambda x: exact(x) * np.float32(1 + 2.0**-22)))
    examine(Case("digits", b=1, hq=2, hkv=1, sq=300, sk=700, d=64), late=True)


def test_lse_has_no_bias_from_rounded_constants() -> None:
    """The scale in the exponent and the scale of the maximum are rounded for themselves; lse must not show by how much."""
    problem = Case("constants", b=1, hq=2, hkv=1, sq=256, sk=640, d=192).make(FP16)
    with emulator.emulated(forward, late=True):
        _, lse, *_ = forward.forward(problem.call)
    assert abs((lse.double() - oracle(problem.call, keep=("lse",))["lse"]).mean()) < 8e-8
