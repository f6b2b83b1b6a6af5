"""Plain PyTorch: dense scores, autograd, every variant. What a user writes first, and an oracle for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.peers.entmax import weights
from backlight.peers.features import gated
from backlight.spec import Segment


def attention(call: Call) -> Callable[..., Tensor]:
    """The call as a function of its leaves q, k, v and terms, in canonical layout."""
    segments = call.segments()
    geometry = {z: _geometry(call, z) for z in (segments if call.varlen else segments[:1])}
    # a number, and no leaf
    fixed = {} if call.spec.alpha is None or call.entmax is None else {"entmax": call.entmax}

    def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None, **terms: Tensor) -> Tensor:
        given = _Terms(**(fixed | terms))
        if call.group > 1:
            k, v = k.repeat_interleave(call.group, 1), v.repeat_interleave(call.group, 1)
        if not call.varlen:
            return gated(_dense(call, q, k, v, geometry[segments[0]], given), gate)
        parts = [
            _dense(call, q[:, :, z.q0 : z.q1], k[:, :, z.k0 : z.k1], v[:, :, z.k0 : z.k1], geometry[z], given) for z in segments
        ]
        return gated(torch.cat(parts, dim=2), gate)

    return attend


class _Geometry(NamedTuple):
    """What is hidden [Sq,Sk], the table column of each pair [Sq,Sk], and the number of visible keys [Sq,1].

    Under a mask the first and the last are those of each head, [B or 1, Hq or 1, Sq, ...].
    """

    hidden: Tensor | None
    column: Tensor | None
    n: Tensor


def _geometry(call: Call, z: Segment) -> _Geometry:
    spec, device = call.spec, call.q.device
    hidden = ~spec.allowed(z.sq, z.sk, device) if spec.masked else None
    column = spec.distance(0, z.sq, 0, z.sk, z.sq, z.sk, device) + spec.bias_origin if spec.bias else None
    if call.rows is None:
        return _Geometry(hidden, column, spec.visible_counts(z.sq, z.sk, device)[:, None])
    seen = intervals.visible_heads(call, z)[None] if call.varlen else intervals.visible_whole(call)
    return _Geometry(~seen, column, seen.sum(dim=-1, keepdim=True).clamp(min=1))


class _Terms(NamedTuple):
    bias: Tensor | None = None
    sink: Tensor | None = None
    tau: Tensor | None = None
    pair_bias: Tensor | None = None
    entmax: Tensor | None = None


def _dense(call: Call, q: Tensor, k: Tensor, v: Tensor, geometry: _Geometry, terms: _Terms) -> Tensor:
    hidden, column, n = geometry
    bias, sink, tau, pair_bias, entmax = terms
    s = (q @ k.mT).to(call.accumulator_dtype) * call.scale
    if call.spec.softcap is not None:
        s = call.spec.softcap * torch.tanh(s / call.spec.softcap)
    if bias is not None and column is not None:
        inside = (column >= 0) & (column < bias.shape[1])
        s = s + bias[:, column.clamp(0, bias.shape[1] - 1)] * inside
    if pair_bias is not None:
        s = s + pair_bias.repeat_interleave(q.shape[0] // max(1, pair_bias.shape[0]), dim=0)
    if hidden is not None:
        s = s.masked_fill(hidden, -torch.inf)
    if entmax is not None:
        return weights(s, entmax, sink).to(v.dtype) @ v
    if sink is None:
        p = torch.softmax(s, dim=-1)
    else:
        logits = torch.cat([s, sink.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
        p = torch.softmax(logits, dim=-1)[..., :-1]
    if tau is not None:
        a = torch.relu(p + tau.view(-1, 1, 1) / n)
        p = a if hidden is None else a.masked_fill(hidden, 0)
    return p.to(v.dtype) @ v
