"""The softcap as it is written in PTX, run instruction by instruction: no card is needed to see what it computes."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

pytest.importorskip("triton")
from backlight.backends.triton import softcap

F32 = np.float32
LANES = 32
GAIN = F32(20.0)
ADDEND = F32(-3.5)
# arithmetic on float32; a fused multiply-add rounds once
OPERATIONS = {
    "neg.f32": lambda a: -a,
    "abs.f32": np.abs,
    "mov.f32": lambda a: a,
    "mov.b32": lambda a: a.view(np.int32),
    "mul.f32": lambda a, b: a * b,
    "add.f32": lambda a, b: a + b,
    "sub.f32": lambda a, b: a - b,
    "max.f32": np.maximum,
    "fma.rn.f32": lambda a, b, c: (a.astype(np.float64) * b + c).astype(F32),
    "lop3.b32": lambda a, b, c, table: a | b | c,
    "setp.lt.s32": lambda a, b: a < b,
    "setp.gt.f32": lambda a, b: a > b,
    "ex2.approx.ftz.f32": np.exp2,
    "lg2.approx.ftz.f32": np.log2,
    "rcp.approx.ftz.f32": lambda a: F32(1) / a,
}


class Warp:
    def __init__(self, inputs: list[np.ndarray], outputs: int, pack: int):
        self.registers = {f"${(outputs + i) * pack + j}": x[j] for i, x in enumerate(inputs) for j in range(pack)}

    def value(self, name: str) -> object:
        if name.startswith("0f"):
            return np.full(LANES, struct.unpack(">f", bytes.fromhex(name[2:]))[0], F32)
        return int(name, 0) if re.fullmatch(r"\d+|0x\w+", name) else self.registers[name]

    def run(self, text: str) -> None:
        for line in (line.strip() for line in text.strip("{} ").removesuffix("DONE:").split(";")):
            if not line or line.startswith(".reg"):
                continue
            negated, predicate, operation, rest = re.fullmatch(r"(?:@(!?)(\w+) )?(\S+) (.*)", line).groups()  # type: ignore[union-attr]
            where = np.full(LANES, True) if predicate is None else self.registers[predicate] ^ (negated == "!")
            target, *sources = (x.strip() for x in rest.split(","))
            if operation == "bra.uni":
                assert where.all() or not where.any()
                if where.all():
                    return
            elif operation == "vote.sync.any.pred":
                self.registers[target] = np.full(LANES, self.registers[sources[0]].any())
            else:
                # what a series makes of too large a number is replaced afterwards
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    found = OPERATIONS[operation](*map(self.value, sources))
                self.registers[target] = found if predicate is None else np.where(where, found, self.registers[target])


def computed(text: str, outputs: int, t: np.ndarray, addend: float, factor: float, *slope: float) -> list[np.ndarray]:
    """What the assembly makes of t [pack, lanes] with the coefficients of `softcapped`; slope: those of its series."""
    c1, c2 = F32(softcap.C1.value), F32(softcap.C2.value)
    f2, scale, limit, y = series_of(factor)
    a0, a2 = scale * (1 + y * (c1 + y * c2)), scale * (c2 * f2 * f2)
    a1 = ((scale - a0) - a2 * limit * limit) / limit
    pack = t.shape[0]
    warp = Warp([t, *(np.full_like(t, x) for x in (addend, limit, a0, a1, a2, *slope, factor, GAIN))], outputs, pack)
    warp.run(text)
    return [np.stack([warp.registers[f"${i * pack + j}"] for j in range(pack)]).astype(np.float64) for i in range(outputs)]


def series_of(factor: float) -> tuple[np.float32, ...]:
    f2 = F32(factor) * F32(factor)
    limit = min(F32(softcap.NEAR.value**2) / max(f2, F32(1e-30)), F32(softcap.LARGEST_SQUARE.value))
    return f2, F32(factor) * GAIN, limit, limit * f2


@pytest.mark.parametrize("reach", [0.21, 0.59, 12.0], ids=["near", "middle", "far"])
@pytest.mark.parametrize("factor", [1e-12, 0.00625, -3.0])
def test_softcap_in_ptx(factor: float, reach: float) -> None:
    """The short series, the long one and special functions: tanh to fp32, its slope to what 16 bits can tell."""
    pack = softcap.PACK.value
    t = (np.random.default_rng(0).uniform(-1, 1, (pack, LANES)) * reach / max(abs(factor), 1e-3)).astype(F32)
    t[0, :3] = (0.0, 1e-20, -1e-6)
    f2, _, _, y = series_of(factor)
    tanh = np.tanh(t.astype(np.float64) * float(F32(factor)))
    slope = 1 - tanh**2

    (s,) = computed(softcap.NONE_PTX.value, 1, t, 0.0, factor)
    assert (np.abs(s - GAIN * tanh) <= GAIN * (4e-7 * np.abs(tanh) + 1e-30)).all()

    linear = (F32(x.value) for x in (softcap.LINEAR_0, softcap.LINEAR_1))
    l0, l1 = linear
    s, found = computed(softcap.LINEAR_PTX.value, 2, t, ADDEND, factor, l0 + l1 * y, -l1 * f2)
    assert np.abs(s - (GAIN * tanh + ADDEND)).max() < 5e-6
    assert np.abs(found - slope).max() < 2.1e-4

    q0, q1, q2 = (F32(x.value) for x in (softcap.SQUARE_0, softcap.SQUARE_1, softcap.SQUARE_2))
    coefficients = (q0 + y * (q1 + y * q2), -(q1 + 2 * y * q2) * f2, q2 * f2 * f2)
    s, found = computed(softcap.SQUARE_PTX.value, 2, t, ADDEND, factor, *coefficients)
    assert np.abs(s - (GAIN * tanh + ADDEND)).max() < 5e-6
    assert np.abs(found - slope).max() < 2e-6

    g0, g1 = (F32(x.value) for x in (softcap.LOG_0, softcap.LOG_1))
    constant = g0 + g1 * y
    (s,) = computed(softcap.WITHIN_PTX.value, 1, t, ADDEND + constant, factor, constant, -g1 * f2)
    clear = slope > 1e-3
    assert np.abs(s - (GAIN * tanh + ADDEND + np.log2(np.where(clear, slope, 1.0))))[clear].max() < 5e-4
    assert (s[~clear] < GAIN).all()


def test_one_large_score_among_small_ones() -> None:
    """A warp that holds it takes another path for all of its scores, and the right one for each."""
    t = np.full((softcap.PACK.value, LANES), 1e-2, F32)
    t[7, 13] = 5.0
    t[8, 0] = -0.4
    (s,) = computed(softcap.NONE_PTX.value, 1, t, 0.0, 1.0)
    assert np.abs(s - GAIN * np.tanh(t.astype(np.float64))).max() < GAIN * 4e-7
