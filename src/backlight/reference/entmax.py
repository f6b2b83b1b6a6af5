"""The threshold of alpha-entmax rows (eq. 80) and the weights that follow from it, for the oracle and the yardsticks.

The threshold is exact by sorting for alpha 1.5 and 2. For other alphas it is bisected to the end and polished by Newton steps
on the norm (eq. 81); gradients are those of the implicit function (eq. 87-89), never of the steps. All of it runs in float64.
Autograd may differentiate it twice, away from the support's border.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALVINGS, POLISHING = 48, 3
# the first has the first derivatives of the implicit function, the second its second ones
DIFFERENTIABLE = 2


def exponent(alpha: Tensor) -> Tensor:
    """e of eq. 80."""
    return 1 / (alpha - 1)


def threshold(z: Tensor, alpha: Tensor) -> Tensor:
    """theta of rows z [rows, n] whose entries may be -inf; -inf where a row has none. Autograd may look: the last steps, from a
    threshold that is right already, have the derivatives of the implicit function."""
    if not z.shape[-1]:
        return z.new_full(z.shape[:-1], -torch.inf)
    largest = z.detach().amax(dim=-1)
    usual = torch.isfinite(largest)
    # entries further below the largest than 1 weigh nothing: rows start there, so that sums of squares lose no digits
    below = (z - largest.masked_fill(~usual, 0)[:, None]).masked_fill(~usual[:, None], 0).clamp(min=-1)
    with torch.no_grad():
        found = {1.5: _by_sorting_squares, 2.0: _by_sorting}.get(float(alpha.detach()))
        theta = _by_halving(below, exponent(alpha)) if found is None else found(below)
    for _ in range(DIFFERENTIABLE):
        theta = _polished(theta, below, exponent(alpha))
    return torch.where(usual, theta + largest, largest)


def _power(u: Tensor, exponent: Tensor) -> Tensor:
    """u ** exponent where u > 0; 0 elsewhere, with derivatives 0. What is not a number stays none."""
    dead = u <= 0
    return torch.where(dead, 0, torch.where(dead, 1, u).pow(exponent))


def _counts(z: Tensor) -> Tensor:
    return torch.arange(1, z.shape[-1] + 1, dtype=z.dtype, device=z.device)


def _by_sorting(z: Tensor) -> Tensor:
    """alpha = 2: the largest k entries for the largest k of which the last stays above what they give."""
    ordered, k = z.sort(dim=-1, descending=True).values, _counts(z)
    candidates = (ordered.cumsum(dim=-1) - 1) / k
    return _last_within(ordered, candidates)


def _by_sorting_squares(z: Tensor) -> Tensor:
    """alpha = 1.5: mean - sqrt((1 - sum of squared differences) / k) of the largest k entries."""
    ordered, k = z.sort(dim=-1, descending=True).values, _counts(z)
    mean = ordered.cumsum(dim=-1) / k
    spread = (ordered**2).cumsum(dim=-1) - k * mean**2
    candidates = mean - ((1 - spread) / k).clamp(min=0).sqrt()
    return _last_within(ordered, candidates)


def _last_within(ordered: Tensor, candidates: Tensor) -> Tensor:
    last = (candidates < ordered).sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return candidates.gather(-1, last).squeeze(-1)


def _by_halving(z: Tensor, e: Tensor) -> Tensor:
    low, high = z.new_full(z.shape[:-1], -1.0), z.new_zeros(z.shape[:-1])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = (z - middle[:, None]).clamp(min=0).pow(e).sum(dim=-1) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    for _ in range(POLISHING):
        low = _polished(low, z, e)
    return low


def _polished(theta: Tensor, z: Tensor, e: Tensor) -> Tensor:
    """Eq. 81, one step."""
    u = z - theta[:, None]
    total, slope = (_power(u, exponent).sum(dim=-1) for exponent in (e, e - 1))
    return theta + (total - total.pow(1 - 1 / e)) / slope


def lse(s: Tensor, sink: Tensor | None, alpha: Tensor) -> Tensor:
    """(theta + 1) / (alpha - 1) of eq. 88; the sink is one more entry."""
    z = s if sink is None else torch.cat([s, sink.expand(s.shape[0], 1)], dim=-1)
    a, infinite = alpha.double(), torch.isinf(z)
    # autograd must not multiply an infinity
    z = torch.where(infinite, z, (a - 1) * z.double().masked_fill(infinite, 0))
    return ((threshold(z, a) + 1) / (a - 1)).to(s.dtype)


def weight(s: Tensor, lse: Tensor, alpha: Tensor) -> Tensor:
    """P of eq. 80 from a score and the lse of its row: u = 1 + (alpha - 1)(s - lse)."""
    below = s - lse.masked_fill(lse == -torch.inf, 0)
    gone = (below == -torch.inf) | (lse == -torch.inf)
    u = 1 + (alpha - 1) * below.masked_fill(gone, 0)
    return _power(u, exponent(alpha)).masked_fill(gone, 0)


def slope(p: Tensor, alpha: Tensor) -> Tensor:
    """w of eq. 80, p ** (2 - alpha); 0 where nothing weighs."""
    return torch.where(p > 0, p.pow(2 - alpha), 0)


def slopes(p: Tensor, p_sink: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """(w, W), the sum W with the sink's, 1 for rows in which nothing weighs: they divide by it."""
    w = slope(p, alpha)
    total = w.sum(dim=-1) + slope(p_sink, alpha)
    return w, total.masked_fill(total == 0, 1)


def by_alpha(p: Tensor, p_sink: Tensor, dp: Tensor, dlse: Tensor | None, alpha: Tensor) -> Tensor:
    """Gradient by alpha, eq. 89."""
    e = exponent(alpha)
    w, total = slopes(p, p_sink, alpha)
    entropy = torch.xlogy(p, p).sum(dim=-1) + torch.xlogy(p_sink, p_sink)
    eta = (e - entropy) / total
    of_keys = ((p * e - torch.xlogy(p, p) - w * eta[:, None]) * dp).sum(dim=-1)
    empty = (p.sum(dim=-1) + p_sink) == 0
    of_lse = 0 if dlse is None else (dlse * (e - eta)).masked_fill(empty, 0)
    return e * (of_keys - of_lse).sum()


# --- forward mode ------------------------------------------------------------------------------------------------------------


def by_tangent_of_alpha(p: Tensor, alpha: Tensor) -> Tensor:
    """phi of eq. 108: what a tangent of alpha adds to the tangent of a score."""
    e, u = exponent(alpha), p.pow(alpha - 1)
    return e**2 * (u - 1) - e * torch.xlogy(u, p)


def mean_by_slopes(p: Tensor, p_sink: Tensor, r: Tensor, r_sink: Tensor | float, alpha: Tensor) -> Tensor:
    """Eq. 109, the tangent of lse."""
    w, total = slopes(p, p_sink, alpha)
    return ((w * r).sum(dim=-1) + slope(p_sink, alpha) * r_sink) / total
