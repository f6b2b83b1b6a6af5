"""A problem: one call with its incoming gradients, and what is known about it.

All tensors are quantised to the kernel's dtype first and upcast for the oracle afterwards: starting from float64 and casting
down would hide the kernel's own error behind the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.problems import kink
from backlight.problems.axes import cut_call, tensors_of, with_tensors
from backlight.problems.noise import noise
from backlight.reference import GRADIENTS, OUTPUTS, Oracle, Trace, eager, flashlike, oracle

KEPT = (*OUTPUTS, *GRADIENTS, "o", "u", "delta", "p_sink")
FIELDS = ("call", "dy", "dlse", "recipe", "seed", "arithmetic")
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Arithmetic:
    """What a kernel computes in where that is less than the dtype of its inputs: name, eps, and both yardsticks in it."""

    name: str
    eps: float
    eager: Callable[..., Trace]
    flashlike: Callable[..., Trace]


@dataclass
class Problem:
    """One call with its incoming gradients; truth and yardsticks are computed on first use and kept.

    arithmetic: None is that of the inputs' dtype.
    """

    call: Call
    dy: Tensor
    dlse: Tensor | None = None
    recipe: str = "gaussian"
    seed: int = 0
    arithmetic: Arithmetic | None = None

    @cached_property
    def units(self) -> dict[tuple[str, torch.dtype], Any]:
        """Where `compare` keeps the noise of each quantity."""
        return {}

    @cached_property
    def truth(self) -> Trace:
        return oracle(self.call, self.dy, self.dlse, KEPT)

    @cached_property
    def noise(self) -> dict[str, Tensor]:
        return noise(self.call, self.dy, self.dlse, self.truth.lse)

    @cached_property
    def eager(self) -> Trace:
        return self._yardstick(eager if self.arithmetic is None else self.arithmetic.eager)

    @cached_property
    def flashlike(self) -> Trace:
        return self._yardstick(flashlike if self.arithmetic is None else self.arithmetic.flashlike)

    @cached_property
    def kink(self) -> Trace | None:
        """The outputs with every near-kink survivor flipped (eq. 35), or None when no entry sits near the kink."""
        if self.call.tau is None or not bool((self.call.tau < 0).any()):
            return None
        flipped = Oracle(stages=kink.FLIPPED)(self.call, self.dy, self.dlse, KEPT)
        same = all(torch.equal(flipped[name], self.truth[name]) for name in flipped)
        return None if same else flipped

    @property
    def sixteen_bit(self) -> bool:
        """In 16 bits or fewer."""
        return self.call.q.dtype in SIXTEEN_BIT or self.arithmetic is not None

    @property
    def eps(self) -> float:
        """Of results: another order of sums moves them by a few of these."""
        own = torch.finfo(self.call.q.dtype).eps
        return own if self.arithmetic is None else max(own, torch.finfo(torch.bfloat16).eps)

    @property
    def unit(self) -> float:
        """Eps of the operands of products."""
        return self.eps if self.arithmetic is None else self.arithmetic.eps

    def _yardstick(self, run: Callable[..., Trace]) -> Trace:
        """The yardstick's values; a float64 problem borrows the fp32 error, scaled down, since fp64 is the oracle itself."""
        if self.call.q.dtype != torch.float64 or self.arithmetic is not None:
            return run(self.call, self.dy, self.dlse, KEPT)
        lower = recast(self.call, torch.float32)
        dlse = None if self.dlse is None else self.dlse.float()
        measured, exact = run(lower, self.dy.float(), dlse, KEPT), oracle(lower, self.dy.float(), dlse, KEPT)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return Trace({n: self.truth[n] + (measured[n].double() - exact[n]).nan_to_num() * ratio for n in measured})

    def replace(self, **changes: Any) -> Problem:
        """The same problem with some fields changed; nothing that was computed is carried over."""
        kept: dict[str, Any] = {n: changes.get(n, getattr(self, n)) for n in FIELDS}
        return Problem(**kept)


def recast(call: Call, dtype: torch.dtype) -> Call:
    """The call with every tensor in another dtype."""
    return with_tensors(call, {name: x.to(dtype) for name, x in tensors_of(call).items()})


def shrink(problem: Problem, length: int = 256, heads: int = 2) -> Problem | None:
    """The first batch entries, heads and positions of a problem; None for packed sequences and odd alignments."""
    call = problem.call
    if call.varlen or call.q.shape[2] != call.k.shape[2]:
        return None
    length = min(length + call.q.shape[2] % 128, call.q.shape[2])
    hkv = min(heads, call.k.shape[1])
    hq, b = hkv * call.group, min(2, call.q.shape[0])
    ranges = {"batch": slice(b), "heads": slice(hq), "kv_heads": slice(hkv), "rows": slice(length), "keys": slice(length)}
    part = cut_call(call, ranges)
    smaller = with_tensors(part, {name: x.contiguous() for name, x in tensors_of(part).items()})
    return problem.replace(call=smaller, dy=problem.dy[:b, :hq, :length].contiguous(), dlse=None)
