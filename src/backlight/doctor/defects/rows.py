"""Per-row data of the backward: lse, delta, dp, the soft-cap's derivative, and precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, CAUSAL_FULL, Defect, Variants, always, both, capped, has
from backlight.doctor.defects.mutants import Mutant, Outputs, flash_delta, in_both_halves, other_spec
from backlight.doctor.defects.tails import TILES
from backlight.spec import LN2, LOG2E


def saved_lse(change: Callable[[Tensor], Tensor], detail: str = "") -> Mutant:
    def saved(outputs: Outputs, call: Call) -> Outputs:
        return outputs | {"lse": change(outputs["lse"])}

    return Mutant(saved=saved, detail=detail)


def lse_scales(call: Call) -> list[Mutant]:
    scale = call.scale
    return [
        saved_lse(lambda lse: lse * scale, "multiplied by the softmax scale"),
        saved_lse(lambda lse: lse / scale, "divided by the softmax scale"),
    ]


def changed_delta(change: Callable[[Tensor], Tensor], detail: str = "") -> Mutant:
    def delta(dy, y, do, u, tau, dlse, p, p_sink, entmax):
        return change(flash_delta(dy, y, do, u, tau, dlse, p, p_sink, entmax))

    return Mutant(backward={"delta": delta}, detail=detail)


def in_16_bits(changed: Callable[[Callable[[Tensor], Tensor], str], Mutant]) -> Variants:
    """What `changed` changes, rounded to each of the two formats."""

    def rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x: x.to(dtype).to(x.dtype)

    return always(changed(rounding(torch.bfloat16), "bf16"), changed(rounding(torch.float16), "fp16"))


def shifted_delta(call: Call) -> list[Mutant]:
    def by(step: int) -> Callable[[Tensor], Tensor]:
        return lambda delta: delta.roll(step)

    def of_first(tile: int) -> Callable[[Tensor], Tensor]:
        return lambda delta: delta[torch.arange(len(delta), device=delta.device) % tile]

    tiles = [tile for tile in TILES if tile < call.q.shape[2]]
    steps = [1, -1] + [sign * tile for tile in tiles for sign in (1, -1)]
    moved = [changed_delta(by(step), f"{abs(step)} rows {'up' if step < 0 else 'down'}") for step in steps]
    return moved + [changed_delta(of_first(tile), f"those of the first tile of {tile}") for tile in tiles]


def split_dp(call: Call) -> list[Mutant]:
    def part(first: bool) -> Callable[..., Tensor]:
        def dp(do, v):
            half = slice(None, v.shape[1] // 2) if first else slice(v.shape[1] // 2, None)
            return do[:, half] @ v[:, half].mT

        return dp

    return [Mutant(backward={"dp": part(first)}, detail=word) for first, word in ((True, "first"), (False, "second"))]


def _row_max(s):
    return torch.exp(s - s.amax(dim=-1, keepdim=True).clamp(min=-1e30))


def _no_dlse(dy, y, do, u, tau, entmax):
    return flash_delta(dy, y, do, u, tau, None, entmax=entmax)


def _flipped_dlse(dy, y, do, u, tau, dlse, p, p_sink, entmax):
    return flash_delta(dy, y, do, u, tau, None if dlse is None else -dlse, p, p_sink, entmax)


def _derivative_of_s(ds, s, softcap):
    return ds * (1 - (s.masked_fill(s == -torch.inf, 0) / softcap) ** 2)


def _cap_before_scale(q, k, scale, softcap):
    return scale * softcap * torch.tanh((q @ k.mT) / softcap)


SOFTCAP = {"spec": {"causal": True, "softcap": 2.0}}


def _dlse(name: str, title: str, does: str, next_check: str, delta: Callable[..., Tensor]) -> Defect:
    """A delta that treats the gradient of lse wrongly."""
    signal = "gradients are right for a loss on o and wrong for a loss on lse"
    mutants = always(Mutant(backward={"delta": delta}))
    return Defect(name, title, does, "delta", signal, next_check, family="lse", variants=mutants, demo=CAUSAL_FULL)


_lse = partial(Defect, family="lse", demo=CAUSAL)
_delta = partial(Defect, family="delta", demo=CAUSAL)
_precision = partial(Defect, family="precision", severity="precision", demo=CAUSAL | {"dtype": torch.float32})
_softcap = partial(Defect, family="softcap", needs=capped, demo=SOFTCAP)

DEFECTS = [
    _lse(
        "lse-base",
        "the backward reads the saved lse in the wrong base ({detail})",
        "the forward stores a base-2 lse and the backward expects natural logarithms, or the reverse",
        "p (bwd)",
        "I2 fails; ds and dv are scaled row by row; o is fine",
        "Multiply the saved lse by ln 2 (or log2 e): the comparison must turn healthy.",
        confirm="mutant; rows with lse = 0 are right",
        variants=always(
            saved_lse(lambda lse: lse * LOG2E, "base 2 read as natural"),
            saved_lse(lambda lse: lse * LN2, "natural read as base 2"),
        ),
    ),
    _lse(
        "lse-scaled",
        "the lse the backward reads is {detail}",
        "scores and lse carry the softmax scale differently",
        "p (bwd)",
        "I2 fails; ds and dv are scaled row by row; o is fine",
        "Set scale = 1 and fold the factor into q: the comparison must turn healthy.",
        variants=lse_scales,
    ),
    _lse(
        "lse-rowmax",
        "the backward normalises with the row maximum alone: the logarithm of the row sum is missing",
        "m is saved where m + log(l) is needed",
        "p (bwd)",
        "I2 fails; dv is too large by the row sums",
        "Sum the backward's weights over a row: the sum must be 1, and is not.",
        variants=always(Mutant(backward={"p": _row_max})),
    ),
    _lse(
        "lse-rounded",
        "the saved lse is rounded to 16 bits ({detail})",
        "lse is stored in the dtype of the inputs; an error of e in lse scales the weights of the row by exp(e)",
        "p (bwd)",
        "I2 fails slightly; error grows with the size of lse",
        "Store lse in fp32: the comparison must turn healthy.",
        variants=in_16_bits(saved_lse),
        demo=CAUSAL | {"recipe": "peaky"},
    ),
    _delta(
        "delta-missing",
        "delta, the row sum of dO * o, is missing: ds = p dp instead of p (dp - delta)",
        "the row sum of p dp is not subtracted",
        "delta",
        "I3 only; dv is perfect; row sums of ds are about 1 instead of 0",
        "Sum ds over a row: the sum must be 0, and is delta.",
        variants=always(changed_delta(torch.zeros_like)),
    ),
    _delta(
        "delta-negated",
        "delta, the row sum of dO * o, is added instead of subtracted: ds = p (dp + delta)",
        "the sign of delta is wrong",
        "delta",
        "I3 only; dv is perfect",
        "Flip the sign of delta: the comparison must turn healthy.",
        variants=always(changed_delta(torch.neg)),
    ),
    _delta(
        "delta-shifted",
        "delta, the row sum of dO * o, is taken from other rows ({detail})",
        "the row offset of delta is off, usually by a tile",
        "delta",
        "I3 only; dv is perfect",
        "Make all rows of dO and o equal: the comparison must turn healthy.",
        confirm="mutant over row shifts",
        variants=shifted_delta,
    ),
    _delta(
        "dp-split",
        "dp = dO vT sums only the {detail} half of the columns of v",
        "v is processed in two parts and one of them is left out of dp = do vT",
        "dp",
        "I3 only; dv is perfect; gain of ds about one half",
        "Set the other half of v to zero: the comparison must turn healthy.",
        needs=lambda call: call.v.shape[-1] > 1,
        variants=split_dp,
    ),
    _precision(
        "delta-rounded",
        "delta, the row sum of dO * o, is rounded to 16 bits ({detail})",
        "delta is stored in the dtype of the inputs although dp - delta cancels",
        "delta",
        "no identity fails; the error of dq and dk is above the algorithm's own",
        "Store delta in fp32: rho_B of dq and dk must fall to about 1.",
        variants=in_16_bits(changed_delta),
    ),
    _precision(
        "precision-accumulation",
        "dq is accumulated in 16 bits: errors grow with the number of key tiles",
        "the running sum of dq is rounded to the storage dtype after each tile",
        "dq",
        "rho_A below 1, rho_B grows with S; inputs made for exact sums do not come out exact; no identity fails",
        "Accumulate in fp32: the exact-arithmetic probe must pass.",
        confirm="exact-arithmetic probe",
        broken="low_precision_accumulation",
        demo={"shape": (1, 2, 320, 64), "level": "full"},
    ),
    _precision(
        "precision-narrow",
        "the arithmetic runs in {detail} although the inputs are fp32",
        "matmuls use TF32 or 16-bit operands; every result is right to that format's precision and no further",
        "s",
        "every tensor is off by what the narrower format would give; gains and identities hold at that level",
        "Disable TF32 (torch.backends.cuda.matmul.allow_tf32 = False) or autocast: the comparison must turn healthy.",
        confirm="switch the format off",
        broken="narrow",
    ),
    _precision(
        "precision-scores",
        "the scores are rounded to 16 bits before the softmax",
        "q kT is stored in the dtype of the inputs; the weights inherit an error of |s| eps",
        "s",
        "rho_B above 1.25 on o and every gradient, worse with larger logits",
        "Keep the scores in fp32: rho_B of every tensor must fall to about 1.",
        confirm="compare recipes gaussian and peaky",
        broken="low_precision_scores",
        demo=CAUSAL | {"recipe": "peaky"},
    ),
    _dlse(
        "dlse-ignored",
        "the gradient that arrives through lse is ignored",
        "dlse is not subtracted from delta",
        "Back-propagate lse.sum() alone: dq must not be 0.",
        _no_dlse,
    ),
    _dlse(
        "dlse-sign",
        "the gradient that arrives through lse enters with the wrong sign",
        "delta + dlse is formed instead of delta - dlse",
        "Back-propagate lse.sum() alone: dq must point along the weighted mean of k.",
        _flipped_dlse,
    ),
    _softcap(
        "softcap-derivative",
        "the derivative of the soft-cap is missing in the backward",
        "ds is not multiplied by 1 - (s/c)^2",
        "ds",
        "dq and dk are too large where scores are large; dv is fine",
        "Raise the cap to 1e4: the comparison must turn healthy.",
        variants=always(Mutant(backward={"dx": lambda ds: ds})),
    ),
    _softcap(
        "softcap-missing-backward",
        "the backward recomputes the scores without the soft-cap",
        "the cap is applied in the forward only",
        "p (bwd)",
        "I2 and I3 fail; o is fine",
        "Raise the cap to 1e4: the comparison must turn healthy.",
        variants=always(Mutant(sees_backward=other_spec(softcap=None))),
    ),
    _softcap(
        "softcap-after-bias",
        "the soft-cap's derivative is taken at the score with the bias added",
        "1 - (s/c)^2 uses s after the bias instead of the capped score before it",
        "ds",
        "dq and dk are wrong, dv and dbias are fine",
        "Set the bias to 0: the comparison must turn healthy.",
        needs=both(capped, has("bias")),
        variants=always(Mutant(backward={"dx": _derivative_of_s})),
        demo={"spec": {"causal": True, "softcap": 2.0, "bias": True}},
    ),
    _softcap(
        "softcap-before-scale",
        "the soft-cap is applied before the softmax scale",
        "scale * c tanh(qk / c) is computed instead of c tanh(scale qk / c)",
        "s",
        "o is wrong everywhere",
        "Set scale = 1: the comparison must turn healthy.",
        confirm="mutant of the forward's scores",
        needs=lambda call: capped(call) and abs(call.scale - 1) > 1e-6,
        variants=lambda call: [_early_cap(call)],
    ),
]


def _early_cap(call: Call) -> Mutant:
    """Both halves with the cap on the raw product; the derivative follows."""
    scale = call.scale

    def dx(ds, capped, softcap):
        return ds * (1 - (capped / (scale * softcap)) ** 2)

    return in_both_halves({"dx": dx}, capped=_cap_before_scale)
