"""Numbers for the report's drawings: head x tile maps, ULP histograms, run-to-run tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from backlight.doctor.report.model import Picture, Probe
from backlight.doctor.steps.compare import RHO_PASS, TILE, Comparison
from backlight.problems.problem import Problem

EDGES = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024]
HEADS_SHOWN = 32
ALWAYS_SHOWN = ("o", "dq", "dk", "dv", "to")


def pictures(comparisons: Mapping[str, Comparison], probes: list[Probe], problem: Problem) -> list[Picture]:
    found = [head_tiles(c) for c in comparisons.values() if c.truth.dim() >= 3 and (c.bad or c.name in ALWAYS_SHOWN)]
    found.append(ulp(comparisons, problem))
    found += [repeats(p) for p in probes if p.name == "repeats" and "rows" in p.data and "runs" in p.data]
    return found


def head_tiles(c: Comparison) -> Picture:
    b, h, _ = c.cells.shape
    values = [[_plain(x) for x in row] for row in c.cells.flatten(0, 1).tolist()][:HEADS_SHOWN]
    heads = [f"b{i} h{j}" for i in range(b) for j in range(h)][:HEADS_SHOWN]
    data = {"stage": c.name, "unit": "rho_A", "limit": RHO_PASS, "tile": TILE, "heads": heads, "values": values}
    return Picture("head_tile", f"{c.name}: error per head and tile, in units of plain PyTorch's", data)


def _plain(x: float) -> float | None:
    return None if x != x else x


def ulp(comparisons: Mapping[str, Comparison], problem: Problem) -> Picture:
    edges = torch.tensor(EDGES, dtype=torch.float64)
    counts = {}
    for name, c in comparisons.items():
        if name in ("lse", "tlse") or not c.ulp.numel():
            continue
        bins = torch.bucketize(c.ulp.cpu(), edges, right=True).sub(1).clamp(min=0)
        counts[name] = torch.bincount(bins, minlength=len(EDGES)).tolist()
    return Picture(
        "ulp",
        f"distance from the oracle in units in the last place of {str(problem.call.q.dtype)[6:]}",
        {"edges": EDGES, "counts": counts},
    )


def repeats(found: Probe) -> Picture:
    rows = found.data["rows"]
    return Picture("repeats", "the same call, run again", {"runs": found.data["runs"], "rows": rows})
