"""alpha-entmax of dense scores by autograd, alpha included: what plain PyTorch needs to say it."""

from __future__ import annotations

import torch
from torch import Tensor

# as many as the digits of fp64
HALVINGS = 60


def weights(s: Tensor, alphas: Tensor, sink: Tensor | None) -> Tensor:
    """Weights of scores [B,Hq,Sq,Sk], an alpha and a sink for each head; rows that see nothing have none.

    Bisection finds the thresholds. One Newton step from there has their derivatives, by the scores and by alpha.
    """
    alpha = alphas.to(s.dtype).view(1, -1, 1, 1)
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
    hidden = torch.isinf(s)
    z, e = ((alpha - 1) * s.masked_fill(hidden, 0)).masked_fill(hidden, -torch.inf), 1 / (alpha - 1)
    with torch.no_grad():
        high = torch.nan_to_num(z.amax(dim=-1, keepdim=True), neginf=0.0) if s.shape[-1] else z.new_zeros(*s.shape[:3], 1)
        low = high - 1
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            above = (z - middle).clamp(min=0).pow(e).sum(dim=-1, keepdim=True) >= 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        inside = z > low
    u = torch.where(inside, z - low, 1)
    total = torch.where(inside, u.pow(e), 0).sum(dim=-1, keepdim=True)
    slope = torch.where(inside, u.pow(e - 1), 0).sum(dim=-1, keepdim=True).detach()
    theta = low + torch.where(slope > 0, (total - 1) / (e.detach() * slope.clamp(min=torch.finfo(s.dtype).tiny)), 0)
    p = torch.where(inside, z - theta, 0).clamp(min=0).pow(e)
    return p if sink is None else p[..., :-1]
