"""Yardstick B: the error a good flash kernel cannot avoid.

Matmul operands are rounded to the inputs' dtype, everything else is fp32, keys are visited in tiles with a running maximum
(eq. 31), elastic softmax in two sweeps (eq. 32), entmax from its threshold (eq. 80), and delta comes from the rounded outputs
(eq. 27, 28, 87). A kernel much worse than this rounds somewhere it should not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.reference import entmax as sparse
from backlight.reference import trace
from backlight.reference.oracle import Oracle
from backlight.reference.trace import Trace, Values

TILE = 64
TABLES = ("bias", "pair_bias")
PRODUCED = ("lse", "o", "u", "y", "do", "delta", "dq", "dk", "dv", "dbias", "dsink", "dtau", "dgate", "dpair_bias", "dentmax")


@dataclass(frozen=True)
class Flashlike(Oracle):
    storage: torch.dtype = torch.bfloat16

    def run_head(self, inputs: Mapping[str, object], names: Iterable[str]) -> Values:
        head: dict[str, Any] = dict(inputs)
        head |= self._forward(head) if head["entmax"] is None else self._forward_entmax(head)
        if head["dy"] is not None:
            head |= self._backward(head)
        return head  # type: ignore[return-value]

    def _operand(self, value: Tensor) -> Tensor:
        return value.to(self.storage).to(self.dtype)

    def _tiles(self, head: Mapping[str, Tensor]) -> Iterator[tuple[slice, Tensor, Tensor, dict]]:
        """Key tiles with their scores: (keys, capped, s, the tile's geometry)."""
        for j0 in range(0, head["k"].shape[0], TILE):
            keys = slice(j0, j0 + TILE)
            capped = trace.capped(trace.x(head["q"], head["k"][keys], head["scale"]), head["softcap"])
            column, visible = head["column"][:, keys], head["visible"][:, keys]
            pair_bias = None if head["pair_bias"] is None else head["pair_bias"][:, keys]
            s = trace.s(capped, head["bias"], column, pair_bias, visible)
            yield keys, capped, s, {"column": column, "visible": visible, "pair_bias": pair_bias}

    def _forward(self, head: Mapping[str, Tensor]) -> Values:
        rows = head["q"].shape[0]
        sink = head["sink"]
        largest = torch.finfo(head["q"].dtype).max
        row_max = head["q"].new_full((rows,), -torch.inf) if sink is None else sink.repeat(rows).clamp(max=largest)
        row_sum = torch.zeros_like(row_max) if sink is None else torch.ones_like(row_max)
        acc = head["q"].new_zeros(rows, head["v"].shape[1])
        for keys, _, s, _ in self._tiles(head):
            new_max = torch.maximum(row_max, s.amax(dim=-1))
            finite = new_max.masked_fill(new_max == -torch.inf, 0)
            rescale = torch.exp(row_max - finite)
            p = torch.exp(s - finite[:, None])
            row_sum = row_sum * rescale + p.sum(dim=-1)
            acc = acc * rescale[:, None] + self._operand(p) @ head["v"][keys]
            row_max = new_max
        lse = row_max + torch.log(row_sum)
        if sink is not None:
            lse = lse.masked_fill(sink == torch.inf, torch.inf)
        o = acc / row_sum.masked_fill(row_sum == 0, 1)[:, None]
        u = torch.zeros_like(o)
        if head["tau"] is not None:
            o = torch.zeros_like(o)
            for keys, _, s, tile in self._tiles(head):
                p = trace.p(s, lse)
                m = trace.m(p, head["tau"], head["n"], tile["visible"])
                o += self._operand(trace.a(p, m, head["tau"], head["n"])) @ head["v"][keys]
                u += m @ head["v"][keys] / head["n"].clamp(min=1)
        return {"lse": lse, "o": o, "u": self._operand(u), "y": self._operand(trace.y(o, head["gate"]))}

    def _forward_entmax(self, head: Mapping[str, Tensor]) -> Values:
        """The threshold in fp32, o and u by rounded weights and slopes (eq. 86, 87)."""
        alpha, v = head["entmax"], head["v"]
        s = torch.cat([s for _, _, s, _ in self._tiles(head)] or [v.new_empty(head["q"].shape[0], 0)], dim=-1)
        lse = trace.lse(s, head["sink"], alpha)
        p, p_sink = trace.p(s, lse, alpha), trace.p_sink(lse, head["sink"], alpha)
        w, total = sparse.slopes(p, p_sink, alpha)
        o, u = self._operand(p) @ v, self._operand(w) @ v / total[:, None]
        return {"lse": lse, "o": o, "u": self._operand(u), "y": self._operand(trace.y(o, head["gate"]))}

    def _entmax_rows(self, head: Mapping[str, Tensor], do: Tensor) -> tuple[Tensor, Tensor]:
        """delta by the rounded u (eq. 87), and dentmax (eq. 89)."""
        alpha, dlse = head["entmax"], head["dlse"]
        s = torch.cat([s for _, _, s, _ in self._tiles(head)] or [do.new_empty(do.shape[0], 0)], dim=-1)
        p, p_sink = trace.p(s, head["lse"], alpha), trace.p_sink(head["lse"], head["sink"], alpha)
        delta = (do * head["u"]).sum(dim=-1)
        if dlse is not None:
            delta = delta - dlse / sparse.slopes(p, p_sink, alpha)[1]
        return delta, trace.dentmax(p, p_sink, trace.dp(do, head["v"]), dlse, alpha)

    def _backward(self, head: Mapping[str, Tensor]) -> Values:
        dy, y, tau, n, dlse = head["dy"], head["y"], head["tau"], head["n"], head["dlse"]
        do = self._operand(trace.do(dy, head["gate"]))
        dgate = torch.zeros_like(dy) if head["gate"] is None else dy * y * (1 - torch.sigmoid(head["gate"]))
        delta = (dy * y).sum(dim=-1)
        dtau = dy.new_zeros(())
        if tau is not None:
            per_key = (do * head["u"]).sum(dim=-1)
            delta = delta - tau * per_key
            dtau = per_key.sum()
        if dlse is not None:
            delta = delta - dlse
        alpha, dentmax = head["entmax"], dy.new_zeros(())
        if alpha is not None:
            delta, dentmax = self._entmax_rows(head, do)
        out = {name: torch.zeros_like(head[name[1:]]) for name in ("dq", "dk", "dv")}
        dbias, dpair_bias = (dy.new_zeros(0) if (x := head[name]) is None else torch.zeros_like(x) for name in TABLES)
        for keys, capped, s, tile in self._tiles(head):
            p = trace.p(s, head["lse"], alpha)
            m = trace.m(p, tau, n, tile["visible"], alpha)
            out["dv"][keys] = self._operand(trace.a(p, m, tau, n)).mT @ do
            ds = trace.ds(p, m, trace.dp(do, head["v"][keys]), delta, alpha)
            dx = self._operand(trace.dx(ds, capped, head["softcap"]))
            out["dq"] += trace.dq(dx, head["k"][keys], head["scale"])
            out["dk"][keys] = trace.dk(dx, head["q"], head["scale"])
            dbias = dbias + trace.dbias(ds, head["bias"], tile["column"]) if head["bias"] is not None else dbias
            if head["pair_bias"] is not None:
                dpair_bias[:, keys] = trace.dpair_bias(ds, tile["pair_bias"])
        return out | {
            "do": do,
            "delta": delta,
            "dbias": dbias,
            "dsink": trace.dsink(trace.p_sink(head["lse"], head["sink"], alpha), delta, alpha),
            "dtau": dtau,
            "dgate": dgate,
            "dpair_bias": dpair_bias,
            "dentmax": dentmax,
        }


def flashlike(call: Call, dy: Tensor | None = None, dlse: Tensor | None = None, keep: Iterable[str] | None = None) -> Trace:
    compute = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    wanted = PRODUCED if keep is None else tuple(keep)
    result = Flashlike(dtype=compute, storage=call.q.dtype)(call, dy, dlse, [name for name in wanted if name in PRODUCED])
    rounded = dict.fromkeys(("y", "dq", "dk", "dv", "dgate"), call.q.dtype)
    if call.pair_bias is not None:
        rounded["dpair_bias"] = call.pair_bias.dtype
    return Trace({name: value.to(rounded.get(name, compute)).to(compute) for name, value in result.items()})
