"""Entmax of a ring: a row's threshold takes the keys of all ranks, found jointly (eq. 94).

Keys come by once for lower bounds of the thresholds: each block of them solves its own rows, and eq. 84 joins the blocks.
They come by again for each step to the thresholds, at which F and W are plain sums over blocks, and a last time with v. Ranks
make as many steps as the one that needs most.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from backlight.call import Call, Part
from backlight.distributed.handshake import meet
from backlight.distributed.keys import Keys
from backlight.distributed.local import NARROW, block_call, block_forward, block_lse, block_sums
from backlight.distributed.rows import Prepared, gated, stored
from backlight.thresholds import Bound, Sums, power

# steps to the thresholds, at most, and what is small enough to be followed by none, relative to a threshold above 1; of 16 bits
# the last sweep squares what is left, where eq. 83 holds
MOST_STEPS = {torch.float64: 40, torch.float32: 12}
MOST_STEPS_16 = 6
CLOSE, CLOSE_64, CLOSE_SMOOTH = 2.0**-20, 2.0**-49, 2.0**-9


def ring_entmax(ring: Keys, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """(y, lse, u) of this rank's rows."""
    return _Rows(ring, call).forward()


class _Rows:
    """The rows of a rank. Thresholds are fp64 [B,Hq,Sq]; blocks get them as lse, rounded to the accumulator dtype."""

    def __init__(self, ring: Keys, call: Call):
        assert call.entmax is not None
        self.ring, self.call = ring, call
        self.alpha = call.entmax.double()[None, :, None]
        self.e = 1 / (self.alpha - 1)
        self.kappa = None if call.sink is None else call.sink.double()[None, :, None]

    # --- thresholds and lse --------------------------------------------------------------------------------------------------

    def lse_of(self, theta: Tensor) -> Tensor:
        return ((theta + 1) * self.e).to(self.call.accumulator_dtype)

    def theta_of(self, lse: Tensor) -> Tensor:
        return lse.double() / self.e - 1

    @property
    def sink_z(self) -> Tensor | None:
        """-inf where the sink takes no part in a threshold: an infinite one is all there is."""
        if self.kappa is None:
            return None
        return ((self.alpha - 1) * self.kappa).masked_fill(self.kappa == math.inf, -math.inf)

    # --- sweeps --------------------------------------------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        theta, largest = self._bound()
        for _ in range(MOST_STEPS.get(self.call.q.dtype, MOST_STEPS_16)):
            # as blocks are given it
            lse = self.lse_of(theta)
            rounded = self.theta_of(lse)
            step = self._sums(lse, "forward, step to thresholds")[0].step(
                self.e, torch.where(rounded > -math.inf, largest - rounded, 0)
            )
            theta = rounded + step
            far = bool((step.abs() > self._close(rounded)).any())
            if not any(going for (going,) in meet(self.ring.communicator, [int(far)], "thresholds")):
                break
        return self._last(self.lse_of(theta))

    def _close(self, theta: Tensor) -> Tensor:
        dtype = self.call.q.dtype
        close = (CLOSE_64 if dtype == torch.float64 else CLOSE) * torch.nan_to_num(theta.abs(), posinf=0).clamp(min=1)
        narrow = dtype not in MOST_STEPS
        return torch.where(self.e >= 2, CLOSE_SMOOTH, close) if narrow else close

    def _bound(self) -> tuple[Tensor, Tensor]:
        """(a lower bound of thresholds, an upper bound of the largest z): the keys of a block alone have their largest at most
        1 above their own threshold."""
        ring, call = self.ring, self.call
        theta, mask = ring.no_lse(call), ring.masks(call)
        line, slope, largest = torch.zeros_like(theta), torch.zeros_like(theta), theta.clone()
        if self.sink_z is not None:
            # the first group of keys is the sink alone
            largest = largest.copy_(self.sink_z)
            theta = largest - 1
            line = (theta > -math.inf).double()
            slope = line.clone()
        for _, source, (k,) in ring.visits([call.k], "forward, bounds of thresholds"):
            for block in ring.shards.blocks(ring.rank, source):
                rows, around = (slice(None), slice(None), slice(block.q0, block.q1)), mask(block, source)
                alone = block_call(call, block, k, k[..., :NARROW], gate=False, part=Part(), mask=around)
                own = self.theta_of(block_lse(alone, ring.backend))
                largest[rows] = torch.maximum(largest[rows], own + 1)
                bound = Bound(theta[rows], line[rows], slope[rows])
                new = torch.maximum(bound.theta, own)
                f, w, _, _ = block_sums(replace(alone, part=Part(self.lse_of(new))), ring.backend).double()
                theta[rows], line[rows], slope[rows] = bound.joined(new, f, w, self.e)
        return theta, largest

    def _sums(self, lse: Tensor, what: str) -> tuple[Sums, Tensor]:
        """Over the keys of all ranks and the sink: F, W and W2, and the sum of p ln p."""
        ring, call, mask = self.ring, self.call, self.ring.masks(self.call)
        sums = torch.zeros(4, *lse.shape, dtype=torch.float64, device=lse.device)
        for _, source, (k,) in ring.visits([call.k], what):
            for block in ring.shards.blocks(ring.rank, source):
                part = block_call(call, block, k, k[..., :NARROW], gate=False, part=Part(lse), mask=mask(block, source))
                sums[..., block.q0 : block.q1] += block_sums(part, ring.backend)
        return self._with_sink(sums, lse)

    def _with_sink(self, sums: Tensor, lse: Tensor) -> tuple[Sums, Tensor]:
        f, w, w2, entropy = sums
        if self.kappa is not None:
            u = self.sink_above(lse)
            p = power(u, self.e)
            f, w, w2 = f + p, w + power(u, self.e - 1), w2 + power(u, self.e - 2)
            entropy = entropy + torch.xlogy(p, u) * self.e
        return Sums(f, w, w2), entropy

    def _last(self, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 86 with v: one more step on the way."""
        ring, call, mask = self.ring, self.call, self.ring.masks(self.call)
        o, u = ring.zeros(call), ring.zeros(call)
        found = torch.zeros(4, *lse.shape, dtype=torch.float64, device=lse.device)
        for _, source, (k, v) in ring.visits([call.k, call.v], "forward"):
            for block in ring.shards.blocks(ring.rank, source):
                rows = slice(block.q0, block.q1)
                part = block_call(call, block, k, v, gate=False, part=Part(lse), mask=mask(block, source))
                o_part, _, u_part = block_forward(part, ring.backend, save_u=True)
                assert u_part is not None
                o[:, :, rows] += o_part
                u[:, :, rows] += u_part
                found[..., rows] += block_sums(part, ring.backend)
        sums, _ = self._with_sink(found, lse)
        weighs = sums.w > 0
        u.div_(torch.where(weighs, sums.w, 1)[..., None].to(u.dtype))
        o.sub_(u * torch.where(weighs, sums.f - 1, 0)[..., None].to(u.dtype))
        lse = self.lse_of(self.theta_of(lse) + sums.newton(self.e))
        if self.kappa is not None:
            endless = (self.kappa == math.inf).expand(lse.shape)
            lse = lse.masked_fill(endless, math.inf)
            o, u = (x.masked_fill(endless[..., None], 0) for x in (o, u))
        return gated(call, o), lse, stored(u, call.q)

    # --- backward ------------------------------------------------------------------------------------------------------------

    def sink_above(self, lse: Tensor) -> Tensor:
        """u of the sink; an infinite one is all there is, or nothing."""
        assert self.kappa is not None
        u = (1 + (self.alpha - 1) * (self.kappa - lse.double())).clamp(min=0).masked_fill(lse == self.kappa, 1)
        return u.masked_fill(lse == -math.inf, 0)

    def row_sums(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """(W, 1 where nothing weighs, and eta of eq. 89, zero there): a sweep of its own, for gradients at lse and by alpha."""
        sums, entropy = self._sums(lse, "backward, sums of rows")
        weighs = sums.w > 0
        w = torch.where(weighs, sums.w, 1)
        return w, torch.where(weighs, (self.e - entropy) / w, 0)


def prepare_entmax(
    ring: Keys, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> tuple[Prepared, Part]:
    """`rows.prepare` with entmax (eq. 87, 89), and what blocks are told of their rows."""
    assert u is not None
    dtype, rows = call.accumulator_dtype, _Rows(ring, call)
    out: dict[str, Tensor] = {}
    begun: dict[str, Tensor] = {}
    do = dy.to(dtype)
    if call.gate is not None:
        weight = torch.sigmoid(call.gate.to(dtype))
        if "dgate" in needs:
            out["dgate"] = stored(do * y.to(dtype) * (1 - weight), call.gate)
        do = do * weight
    delta = (do * u.to(dtype)).sum(dim=-1)
    w = eta = None
    if dlse is not None or "dentmax" in needs:
        w, eta = rows.row_sums(lse)
    if dlse is not None:
        assert w is not None
        assert eta is not None
        # a row that sees nothing has no lse to differentiate, unless a sink gives it one
        dlse = dlse.double().masked_fill(lse == -math.inf, 0)
        delta = delta - (dlse / w).to(dtype)
        if "dentmax" in needs:
            begun["dentmax"] = -(rows.e * dlse * (rows.e - eta)).sum(dim=(0, 2)).to(dtype)
    if "dsink" in needs:
        slope = power(rows.sink_above(lse), rows.e - 1).to(dtype)
        out["dsink"] = -(slope * delta).sum(dim=(0, 2))
    return Prepared(delta, out, begun), Part(lse, eta=None if eta is None else eta.to(dtype))
