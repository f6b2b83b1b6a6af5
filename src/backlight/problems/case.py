"""A case is pure data: the options, the shapes and the awkwardness of one attention problem.

`case.make(dtype)` draws its tensors, already quantised to that dtype, together with the incoming gradients. Learned per-head
terms (bias, sink, tau, entmax) stay fp32, or fp64 for an fp64 problem, as parameters do under mixed precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.call import Call
from backlight.problems.axes import Sizes
from backlight.problems.draw import (
    borders,
    call_of,
    fall,
    mask_terms,
    normal,
    pair_bias_term,
    parameter_dtype,
    repeated,
    settle,
    terms_to_draw,
)
from backlight.problems.kink import KINK_MARGIN
from backlight.problems.kink import margin as kink_margin
from backlight.spec import PER_HEAD, AttentionSpec

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPE_NAMES = {FP16: "fp16", BF16: "bf16", FP32: "fp32", FP64: "fp64"}
EVERY_DTYPE = (FP32, BF16, FP16, FP64)

REDRAWS = 100


@dataclass(frozen=True)
class Case:
    """One problem. Lengths (`lengths_q`) make it packed and then replace b, sq and sk; tau is repeated over the heads, and
    so are a sink that is not drawn and entmax, which is compiled in where it is a number. `mask` names how intervals are
    drawn, `mask_of` the axes along which they differ; `pair_bias` says what that one is like (`draw.PAIR_WORDS`). Scores are
    `logits` times as large, and `falling` lower for each key of distance: the first columns of q and k make them so."""

    name: str
    b: int = 2
    hq: int = 2
    hkv: int = 2
    sq: int = 65
    sk: int = 65
    d: int = 16
    dv: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: int | None = None
    bias_origin: int = 0
    sink: bool | tuple[float, ...] = False
    tau: tuple[float, ...] | None = None
    gate: bool = False
    pair_bias: tuple[str, ...] | None = None
    entmax: tuple[float, ...] | float | None = None
    mask: str | None = None
    mask_of: tuple[str, ...] = ("batch", "heads")
    pos: bool = False
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    dlse: bool = False
    logits: float = 1.0
    logit_shift: float = 0.0
    falling: float = 0.0
    equal_values: bool = False
    value_shift: float = 0.0
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            bias=self.bias is not None,
            bias_origin=self.bias_origin,
            sink=bool(self.sink),
            tau=self.tau is not None,
            gate=self.gate,
            pair_bias=self.pair_bias is not None,
            entmax=self.entmax is not None,
            alpha=self.entmax if isinstance(self.entmax, float) else None,
            rows=self.mask is not None,
            pos=self.pos,
        )

    @property
    def varlen(self) -> bool:
        return self.lengths_q is not None

    @property
    def sizes(self) -> Sizes:
        """Lengths of all axes; a packed case is one batch entry."""
        dv = self.d if self.dv is None else self.dv
        b, sq, sk = self.b, self.sq, self.sk
        if self.lengths_q is not None:
            lengths_k = self.lengths_q if self.lengths_k is None else self.lengths_k
            b, sq, sk = 1, sum(self.lengths_q), sum(lengths_k)
        return Sizes(b, self.hq, self.hkv, sq, sk, self.d, dv, self.bias or 0)

    @property
    def pair_sizes(self) -> Sizes:
        """`sizes` as a pair bias counts them."""
        if self.lengths_q is None:
            return self.sizes
        lengths_k = self.lengths_q if self.lengths_k is None else self.lengths_k
        return self.sizes.of_sequences(self.lengths_q, lengths_k)

    def chosen(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Terms whose values stand in the case, repeated over the heads."""
        named = [name for name in self.spec.terms if name in PER_HEAD]
        listed = {name: getattr(self, name) for name in named if isinstance(getattr(self, name), tuple)}
        if isinstance(self.entmax, float):
            listed["entmax"] = (self.entmax,)
        return {name: repeated(values, self.hq, parameter_dtype(dtype), device) for name, values in listed.items()}

    def make(
        self, dtype: torch.dtype = FP32, seed: int = 0, device: torch.device | str = "cpu", margin: float = KINK_MARGIN
    ) -> Problem:
        """Tensors of the case; redrawn (same seed, same tensors) until no weight sits on a kink."""
        for redraw in range(REDRAWS):
            problem = self._draw(dtype, seed + 1000 * redraw, device)
            if kink_margin(problem.call) >= margin:
                return problem
        raise RuntimeError(
            f"{self.name}: no draw out of {REDRAWS} keeps |p + tau/n|, or |z - theta|, away from 0; make the case smaller"
        )

    def _draw(self, dtype: torch.dtype, seed: int, device: torch.device | str) -> Problem:
        chosen = self.chosen(dtype, device)
        if self.pair_bias is not None:
            chosen["pair_bias"] = pair_bias_term(self.pair_sizes, self.pair_bias, dtype, seed).to(device)
        names = ("q", "k", "v", *terms_to_draw(self.spec, chosen), "dy", *(("dlse",) if self.dlse else ()))
        drawn = normal(self.sizes, names, dtype=dtype, seed=seed, wide=FP64)
        drawn["q"] = drawn["q"] * self.logits
        if self.falling:
            fall(drawn, self.falling / self.spec.resolve_scale(self.d))
        if self.logit_shift:
            reach = abs(self.logit_shift / self.spec.resolve_scale(self.d)) ** 0.5
            drawn["q"][..., 0], drawn["k"][..., 0] = reach, reach if self.logit_shift > 0 else -reach
        if self.equal_values:
            drawn["v"] = drawn["v"][:, :, :1].expand_as(drawn["v"])
        drawn["v"] = drawn["v"] + self.value_shift
        tensors = settle(drawn, dtype, device) | chosen
        if self.mask is not None:
            masked = mask_terms(self.spec, self.sizes, self.mask, seed, self.mask_of)
            tensors |= {name: x.to(device) for name, x in masked.items()}
        lengths = (self.lengths_q, self.lengths_q if self.lengths_k is None else self.lengths_k)
        cu_q, cu_k = (None if each is None else borders(each, device) for each in lengths)
        return Problem(self, call_of(self.spec, tensors, cu_q, cu_k), tensors["dy"], tensors.get("dlse"))


@dataclass(frozen=True)
class Problem:
    """A case with its tensors: the bound call and the gradients that come in from above."""

    case: Case
    call: Call
    dy: Tensor
    dlse: Tensor | None


# --- the list ----------------------------------------------------------------
