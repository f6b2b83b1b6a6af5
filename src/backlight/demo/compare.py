"""Differences from the oracle that cannot be fooled by a NaN.

Non-finite values are counted on their own, before any maximum is taken, and every rule is written `not (error <= limit)`, so
that a comparison with NaN fails instead of passing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one quantity is from the truth. `largest` and `mean` are taken over its finite elements."""

    name: str
    shape: tuple[int, ...]
    limit: float
    non_finite: int
    large: int
    largest: float
    mean: float

    @property
    def failed(self) -> bool:
        return self.non_finite > 0 or self.large > 0 or not (self.largest <= self.limit)


def difference(name: str, got: Tensor | None, want: Tensor, limit: float) -> Difference:
    """Compare `got` with the finite truth `want`, same shape. A gradient that never arrived (None) counts as all NaN."""
    if got is None:
        got = torch.full_like(want, torch.nan)
    if got.shape != want.shape:
        raise ValueError(f"{name} has shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if not want.numel():
        raise ValueError(f"{name} is empty: there is nothing to compare")
    error = (got.detach().to(want.dtype) - want).abs()
    finite = torch.isfinite(error)
    known = error[finite]
    return Difference(
        name=name,
        shape=tuple(want.shape),
        limit=limit,
        non_finite=int((~finite).sum()),
        large=int((~(known <= limit)).sum()),
        largest=float(known.max()) if known.numel() else torch.nan,
        mean=float(known.mean()) if known.numel() else torch.nan,
    )


def table(title: str, differences: list[Difference]) -> Table:
    """One row per quantity, verdict last."""
    shown = Table(title=title, title_justify="left", padding=(0, 0))
    for heading in ("quantity", "shape"):
        shown.add_column(heading)
    for heading in ("max diff", "mean diff", "limit", "large", "non-finite"):
        shown.add_column(heading, justify="right")
    shown.add_column("verdict")
    for d in differences:
        shown.add_row(
            d.name,
            "x".join(map(str, d.shape)),
            f"{d.largest:.2e}",
            f"{d.mean:.2e}",
            f"{d.limit:.0e}",
            str(d.large),
            str(d.non_finite),
            "[bold red]FAIL[/]" if d.failed else "[green]ok[/]",
        )
    return shown
