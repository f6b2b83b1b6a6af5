"""Hand-made reports for the tests of the report's faces; the engine has tests of its own."""

from __future__ import annotations

import math

from backlight.doctor.report import Finding, Picture, Probe, Report, StageRow, Where

ENVIRONMENT = {"device": "cpu", "torch": "2.13.0", "python": "3.11.2", "tf32": "off", "deterministic": "off"}
RECIPE = {
    "seed": 0,
    "dtype": "bfloat16",
    "recipe": "gaussian",
    "level": "full",
    "shapes": {"q": [2, 4, 200, 64], "k": [2, 4, 200, 64], "v": [2, 4, 200, 64]},
    "strides": {"do": "contiguous"},
}
SPEC = {
    "causal": True,
    "window": [95, 0],
    "scale": None,
    "softcap": None,
    "bias": False,
    "bias_origin": 0,
    "sink": False,
    "tau": False,
    "gate": False,
}


def window_defect() -> Report:
    """A backward window one too wide, as in the sketch of the doctor's page."""
    worst = Where(batch=(0,), heads=(2,), rows=(96, 104), text="b0 h2 rows 96-103")
    rows = [
        StageRow(
            "p (bwd)", "culprit", 1.0, [1.0] * 4, 9.2, 14.0, 0.021, 0.020, 0, worst, note="192 leaked cells, all at i-j = 96"
        ),
        StageRow("o", "ok", 1.0, [1.0] * 4, 0.6, 1.0, 2.1e-3, 1.9e-3, ulp_max=1.0),
        StageRow("ds", "inherited", 1.0, [1.0] * 4, 8.1, 12.0, 0.025, 2.4e-3, worst=worst),
        StageRow("dq", "inherited", 1.0, [1.0] * 4, 7.9, 12.0, 0.024, 2.2e-3, worst=worst, ulp_max=310.0),
        StageRow("dk", "inherited", 1.0, [1.0] * 4, 7.9, 12.0, 0.024, 2.2e-3, worst=worst, note="local error at noise"),
        StageRow("dv", "inherited", 1.0, [1.0] * 4, 7.2, 11.0, 0.022, 2.1e-3, worst=worst),
    ]
    finding = Finding(
        "window+1",
        "The backward pass sees one key more than the window allows.",
        "defect",
        "p",
        Where(diagonals=(96,), text="i-j = 96"),
        [
            "192 cells that must be zero are not, all at i-j = 96",
            "an oracle with window 96,0 in backward reproduces dq, dk and dv",
        ],
        "established (explains 99.99 % of the error energy)",
        "high",
        "Run again with --window 96,0: the leak must move to i-j = 97.",
        0.99993,
        9.0,
    )
    runner_up = Finding("open", "Something before dv is wrong.", "defect", "p", score=1.0, next_check="Look at p in backward.")
    return Report(
        "my_kernel.fn",
        "defect",
        "backward window is one too wide",
        "my_kernel.py:12",
        rows,
        [runner_up, finding],
        [
            Probe("zero dO", True, "all gradients exactly 0", 0.01),
            Probe("dO layouts", True, "", 0.05, {"layouts": ["expanded", "sliced"]}),
            Probe("exact support", False, "192 cells outside the window are not zero", 0.2),
            Probe("tile sweep", None, "the kernel has no tile config", 0.0),
        ],
        ["dq of row 0 in every segment: that row sees one key, so p = 1 and ds = p (dp - delta) = 0"],
        [heat_map(), support(), ulp(), repeats()],
        ENVIRONMENT,
        RECIPE,
        SPEC,
        {"oracle": "gradcheck passed", "identities": "hold", "yardsticks": "agree"},
        "import torch\n\nprint('window+1 <here> & there')\n",
        2.13,
    )


def heat_map() -> Picture:
    values = [[0.6 + 0.05 * ((h * 7 + t * 3) % 5) for t in range(13)] for h in range(8)]
    for h in range(8):
        for t in range(6, 13):
            values[h][t] = 4.0 + h / 2 + 0.4 * (t - 6)
    heads = [f"b{b} h{h}" for b in range(2) for h in range(4)]
    return Picture(
        "head_tile", "dk", {"stage": "dk", "unit": "rho_A", "limit": 2.0, "tile": 16, "heads": heads, "values": values}
    )


def support(sq: int = 100, window: int = 47) -> Picture:
    def cell(i: int, j: int) -> int:
        return 2 if i - j == window + 1 else 1 if 0 <= i - j <= window else 0

    cells = [[cell(i, j) for j in range(sq)] for i in range(sq)]
    data = {"stage": "p (bwd)", "head": "b0 h2", "sq": 2 * sq, "sk": 2 * sq, "step": 2, "leaks": 192, "holes": 0}
    return Picture("support", "p in backward", data | {"cells": cells})


def ulp() -> Picture:
    counts = {
        "o": [4000, 2100, 300, 12, 0, 0, 0, 0],
        "dq": [2000, 1800, 900, 500, 300, 220, 90, 30],
        "dk": [2100, 1700, 950, 480, 310, 200, 95, 28],
    }
    return Picture("ulp", "Distance from the oracle", {"edges": [0, 1, 2, 4, 8, 16, 32, 64], "counts": counts})


def repeats() -> Picture:
    rows = [
        {"name": "dq", "distinct": 4, "elements": 61, "max_ulp": 2.0},
        {"name": "dk", "distinct": 1, "elements": 0, "max_ulp": 0.0},
    ]
    return Picture("repeats", "Ten runs on the same inputs", {"runs": 10, "rows": rows})


def one_head_only() -> Report:
    """dO read with the wrong head stride: only head 0 receives gradients, and one value is NaN."""
    names = ("dq", "dk", "dv")
    where = Where(heads=(1, 2, 3), text="heads >= 1")
    rows = [StageRow(name, "suspect", 0.25, [1.0, 0.0, 0.0, 0.0], 120.0, math.inf, 0.9, None, worst=where) for name in names]
    rows[0].nonfinite = 3
    finding = Finding("do-head-stride", "Only head 0 reads the incoming gradient.", "defect", "dp", where, score=5.0)
    return Report("fn", "defect", "only head 0 receives gradients", stages=rows, findings=[finding])


def healthy() -> Report:
    rows = [StageRow(name, "ok", 1.0, [1.0, 1.0001], 0.6, 1.0, 2e-3, 2e-3) for name in ("o", "dq", "dk", "dv")]
    note = Finding("atomics", "dq varies by a few ULP: its sum is added in another order.", "note", "dq", score=9.0)
    return Report(
        "sdpa",
        "healthy",
        "gradients are right",
        "",
        rows,
        [note],
        environment=ENVIRONMENT,
        recipe=RECIPE,
        spec=SPEC,
        seconds=0.8,
    )


def could_not_run() -> Report:
    return Report("fa3", "could-not-run", "fa3 needs a CUDA device and this machine has none")
