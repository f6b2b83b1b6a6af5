"""Attention in e4m3 as the oracle would do it (eq. 96-98), with every step open to change: yardsticks, mutants, broken kernels.

A call is seen as its rounded tensors. What centring took from a row's scores joins it as one more column of q, against ones in
k, so that stages and heads stay those of any other call; gradients lose the column at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from backlight.call import Call
from backlight.doctor.defects.mutants import BACKWARD_HALF, Mutant, Outputs, Stages, flash_delta, run
from backlight.problems.problem import Arithmetic
from backlight.quantising import BLOCK, power_of_two, rotation
from backlight.reference import STAGES, Trace
from backlight.spec import LN2, LOG2E

FORMAT = torch.float8_e4m3fn
EPS, LARGEST = torch.finfo(FORMAT).eps, torch.finfo(FORMAT).max
# products that an 8-bit tensor core aligns at a time, and the fraction bits that it keeps of them (eq. 99)
STEP, KEPT_BITS = 32, 13
GROUPS = {"block": (-2, -1), "head": (-2, -1), "entry": (-3, -2, -1), "tensor": (-4, -3, -2, -1)}
REFUSED = ("tau", "entmax")


def _as_made(name: str, scale: Tensor) -> Tensor:
    return scale


def _in_place(v: Tensor) -> Tensor:
    return v


@dataclass(frozen=True)
class Manner:
    """How a kernel computes in e4m3.

    group:    who shares a scale of q and k: a "block" of 128 rows, a "head", an "entry" of the batch, the "tensor"; v has one
              for each column, or the tensor's. static: one scale for whatever comes, instead.
    turned:   whether q and k are multiplied by the Hadamard matrix. centred, returned: whether the mean of the keys is taken
              off, and given back to lse. headroom: weights are rounded times 2 to this.
    used:     the scale by which a tensor is multiplied again, of its name and the scale by which it was divided.
    order:    where the product with v finds a key. cut: the sum of that product keeps 13 bits and is never moved to fp32.
    backward: its four products are in e4m3 as well.
    """

    group: str = "block"
    static: float | None = None
    turned: tuple[bool, bool] = (True, True)
    centred: bool = True
    returned: bool = True
    headroom: float = 8.0
    used: Callable[[str, Tensor], Tensor] = _as_made
    order: Callable[[Tensor], Tensor] = _in_place
    cut: bool = False
    backward: bool = False

    def mutant(self, detail: str = "") -> Mutant:
        weights = {"lse": self._lse, "p": self._p} | ({"o": self._cut_sum} if self.cut else {})
        backward: Stages = {"dq": dq_centred, **(LOW_BACKWARD if self.backward else {})}
        return Mutant(weights, backward, sees=self.seen, finish=self._finish, detail=detail)

    # --- tensors ----------------------------------------------------------------------------------------------------------

    def seen(self, call: Call) -> Call:
        mean, (by_q, by_k) = self._mean(call), self._turns(call)
        q, k, v = (x.detach().float() for x in (call.q, call.k, call.v))
        offset = (q * mean.repeat_interleave(call.group, 1)).sum(-1, keepdim=True)
        q8, k8 = self._rounded("q", q @ by_q), self._rounded("k", (k - mean) @ by_k)
        q8 = torch.cat([q8, offset if self.returned else torch.zeros_like(offset)], -1)
        spec, v8 = call.spec.replace(scale=call.scale), self.order(self._rounded("v", v))
        return replace(call, spec=spec, q=q8, k=pad(k8, (0, 1), value=1.0), v=v8, _segments=None)

    def _mean(self, call: Call) -> Tensor:
        """Of the keys [B, Hkv, 1, D], as far as it is taken off; a softcap bends scores with their mean."""
        if self.centred and call.spec.softcap is None and call.k.shape[2]:
            return call.k.detach().double().mean(2, keepdim=True).float()
        return call.k.new_zeros(*call.k.shape[:2], 1, call.k.shape[3], dtype=torch.float32)

    def _turns(self, call: Call) -> tuple[Tensor, Tensor]:
        width, device = call.q.shape[-1], call.q.device
        one = torch.eye(width, device=device)
        turns = [rotation(width, device) if turned and not width & (width - 1) else one for turned in self.turned]
        return turns[0], turns[1]

    def _rounded(self, name: str, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        scale = self._scale(name, x)
        return low(x, scale, self.used(name, scale))

    def _scale(self, name: str, x: Tensor) -> Tensor:
        """What divides a tensor, for each of its rows, or columns of v."""
        if self.static is not None:
            return x.new_full((1, 1, 1, 1), self.static)
        if name == "v" and self.group != "tensor":
            return power_of_two(x.abs().amax(2, keepdim=True))
        if self.group == "block":
            rows = x.shape[2]
            blocks = pad(x, (0, 0, 0, -rows % BLOCK)).unflatten(2, (-1, BLOCK)).abs().amax((-2, -1))
            return power_of_two(blocks).repeat_interleave(BLOCK, 2)[:, :, :rows, None]
        return power_of_two(x.abs().amax(GROUPS[self.group], keepdim=True))

    def _finish(self, outputs: Outputs, call: Call) -> Outputs:
        turns = dict(zip(("dq", "dk"), self._turns(call), strict=True))
        found = {name: outputs[name][..., :-1] @ turns[name].to(outputs[name]).T for name in turns if name in outputs}
        if "dq" in found:
            found["dq"] = found["dq"] + outputs["dq"][..., -1:] * self._mean(call).repeat_interleave(call.group, 1)
        return outputs | found

    # --- weights ----------------------------------------------------------------------------------------------------------

    def _weights(self, s: Tensor, sink: Tensor | None, q: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """(rounded weights, their sum and the sink's, the logarithm that both are relative to), of scores less their offset."""
        offset = scale * q[:, -1] * LOG2E
        s2 = pad(s, (0, 1), value=-math.inf) * LOG2E - offset[:, None]
        sink2 = None if sink is None else ((sink * LOG2E) - offset).clamp(max=1e30)
        top = s2.amax(-1).ceil() if sink2 is None else torch.maximum(s2.amax(-1), sink2).ceil()
        top = top.masked_fill(top == -math.inf, 0)
        p = torch.exp2(s2[:, :-1] - top[:, None] + self.headroom).to(FORMAT).to(s.dtype)
        total = p.sum(-1)
        total = total if sink2 is None else total + torch.exp2(sink2 - top + self.headroom)
        return p, total, top + offset

    def _lse(self, s: Tensor, sink: Tensor | None, q: Tensor, scale: float) -> Tensor:
        _, total, top = self._weights(s, sink, q, scale)
        lse = (top + torch.log2(total) - self.headroom) * LN2
        return lse if sink is None else lse.masked_fill(sink == math.inf, math.inf)

    def _p(self, s: Tensor, sink: Tensor | None, q: Tensor, scale: float) -> Tensor:
        p, total, _ = self._weights(s, sink, q, scale)
        return p / total.masked_fill(total == 0, 1)[:, None]

    def _cut_sum(self, s: Tensor, sink: Tensor | None, v: Tensor, q: Tensor, scale: float) -> Tensor:
        """STEP products and what came before are aligned to the largest of them and cut, one by one (eq. 99)."""
        p, total, _ = self._weights(s, sink, q, scale)
        o = v.new_zeros(len(s), v.shape[1])
        for j in range(0, len(v), STEP):
            products = p[:, j : j + STEP, None] * v[j : j + STEP]
            largest = torch.maximum(o.abs(), products.abs().amax(1))
            unit = torch.exp2(torch.frexp(largest)[1].to(o.dtype) - KEPT_BITS)
            o = torch.where(largest == 0, o, (torch.trunc(products / unit[:, None]).sum(1) + torch.trunc(o / unit)) * unit)
        return o / total.masked_fill(total == 0, 1)[:, None]


def low(x: Tensor, scale: Tensor, used: Tensor | None = None) -> Tensor:
    """x as e4m3 has it, beyond whose range it saturates."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(FORMAT).to(x.dtype) * (scale if used is None else used)


def dq_centred(dx, k, scale, delta, p_sink, dlse):
    """By keys less their mean; the row sums of ds, by which the mean is multiplied, are the last column (eq. 29, 100)."""
    common = p_sink * delta if dlse is None else p_sink * delta + dlse
    return scale * torch.cat([dx @ k[:, :-1], common[:, None]], -1)


def _of_head(x: Tensor) -> Tensor:
    return low(x, power_of_two(x.abs().amax())) if x.numel() else x


# delta from the rounded dO, so that rows of ds sum to 0 (eq. 100)
LOW_BACKWARD: Stages = {
    "do": lambda dy, gate: _of_head(STAGES["do"].compute(dy, gate)),
    "a": lambda p, m, tau, n: _of_head(STAGES["a"].compute(p, m, tau, n)),
    "delta": lambda dy, y, do, u, tau, dlse, gate: flash_delta(do if gate is None else dy, y, do, u, tau, dlse),
    "dx": lambda ds, capped, softcap: _of_head(BACKWARD_HALF["dx"].compute(ds, capped, softcap)),
}


# --- yardsticks --------------------------------------------------------------------------------------------------------------


def _measured(manner: Manner, call: Call, dy: Tensor | None, dlse: Tensor | None, keep: tuple[str, ...]) -> Trace:
    found = run(manner.mutant(), call, dy, dlse, dtype=torch.float32, storage=call.q.dtype, keep=tuple(keep))
    return Trace({name: x for name, x in found.items() if name in keep})


BLOCKS = Manner(backward=True)
PLAIN = Manner("head", turned=(False, False), centred=False, backward=True)


def _flashlike(call: Call, dy: Tensor | None, dlse: Tensor | None, keep: Any) -> Trace:
    return _measured(BLOCKS, call, dy, dlse, keep)


def _eager(call: Call, dy: Tensor | None, dlse: Tensor | None, keep: Any) -> Trace:
    return _measured(PLAIN, call, dy, dlse, keep)


E4M3 = Arithmetic("fp8", EPS, _eager, _flashlike)
PRECISIONS = {"fp8": E4M3}
