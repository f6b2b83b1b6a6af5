"""Wrong constants and transposed products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.constants import is_repetition, times
from backlight.doctor.defects.defect import Defect, always, both, square, ungrouped
from backlight.doctor.defects.mutants import Mutant, Outputs, after, other_spec
from backlight.spec import LN2, LOG2E

GAIN_NEXT = "Multiply the tensor by the inverse of the constant: the whole comparison must turn healthy."


def scaled(names: tuple[str, ...], factor: float, detail: str = "") -> Mutant:
    def finish(outputs: Outputs, call: Call) -> Outputs:
        return outputs | {name: outputs[name] * factor for name in names if name in outputs}

    return Mutant(finish=finish, detail=detail or f"{factor:.4g} times what it should be")


def one_constant(*names: str) -> Callable[[Mapping[str, float], Call], Iterable[Mutant]]:
    """Mutants from the measured gain of `names`, when they agree and the others are untouched."""

    def fitted(gains: Mapping[str, float], call: Call) -> Iterable[Mutant]:
        found = [gains[name] for name in names if name in gains]
        if len(found) < len(names) or max(abs(g - found[0]) for g in found) > 0.01 * max(1, abs(found[0])):
            return
        gain = sum(found) / len(found)
        if abs(gain) > 1e-3 and abs(gain - 1) > 1e-3 and not is_repetition(gain, call):
            yield scaled(names, gain, times(gain, call))

    return fitted


def repetition(gains: Mapping[str, float], call: Call) -> Iterable[Mutant]:
    for name in ("dq", "dk", "dv"):
        if name in gains and is_repetition(gains[name], call):
            count = round(gains[name])
            yield scaled((name,), float(count), f"{name} is {count} times what it should be")


def _scale_entry(name: str, does: str, factor: float) -> Defect:
    return _scale(
        f"scale-{name}",
        f"{name} is {{detail}}: one constant is wrong, everything else about it is right",
        does,
        name,
        f"gain of {name} constant over heads, residual at noise; I1 shows the same constant when it is dq or dk",
        GAIN_NEXT,
        confirm="the constant matches the table; a mutant with that factor explains the data",
        variants=always(scaled((name,), factor)),
        fitted=one_constant(name),
    )


def scores_factor(factor: float) -> Callable[..., Tensor]:
    def x(q, k, scale):
        return factor * scale * (q @ k.mT)

    return x


def other_scores(call: Call) -> list[Mutant]:
    choices = [(1 / call.scale, "without the softmax scale"), (call.scale, "with the softmax scale applied twice")]
    choices += [(LOG2E, "with an extra factor log2 e"), (LN2, "with an extra factor ln 2")]
    found = [Mutant(backward={"x": scores_factor(f)}, detail=words) for f, words in choices]
    for scale, words in other_widths(call):
        detail = f"with the softmax scale {words}"
        alone = Mutant(backward={"x": scores_factor(scale / call.scale)}, detail=f"{detail}, dq and dk with their own")
        found += [Mutant(sees_backward=other_spec(scale=scale), detail=detail), alone]
    return found


def other_widths(call: Call) -> list[tuple[float, str]]:
    """(scale, words): one over the root of a width that is not the call's own."""
    d, dv = call.q.shape[-1], call.v.shape[-1]
    widths = {1 << (d - 1).bit_length(): "D rounded up to a power of two", dv: "the width of v"}
    widths |= {-(-d // step) * step: f"D rounded up to a multiple of {step}" for step in (128, 64, 32, 16, 8)}
    widths |= {call.q.shape[1] * d: "the width of all heads", d // 2: "half of D"}
    found = {width**-0.5: f"1/sqrt({width}), {words}" for width, words in widths.items() if width > 0}
    return [(scale, words) for scale, words in found.items() if abs(scale - call.scale) > 1e-6 * call.scale]


_scale = partial(Defect, family="scale")
_transposed = partial(Defect, family="transposition", needs=square)

DEFECTS = [
    _scale_entry("dq", "the factor of dq = scale * ds k is missing, doubled or another constant", 8.0),
    _scale_entry("dk", "the factor of dk = scale * dsT q is missing, doubled or another constant", 1.01),
    _scale_entry("dv", "dv carries a factor it must not have", 0.125),
    _scale(
        "scale-ds",
        "dq and dk are both {detail}: ds is scaled as a whole",
        "the gradient of the scores carries a wrong constant, often ln 2 or log2 e from base-2 exponents",
        "ds",
        "I1, I2 and I3 hold, gains of dq and dk agree and are not 1",
        GAIN_NEXT,
        confirm="a mutant with that factor on dq and dk explains the data",
        variants=always(scaled(("dq", "dk"), LN2)),
        fitted=one_constant("dq", "dk"),
    ),
    Defect(
        "accumulate-repeated",
        "{detail}: the same product is added to the same address more than once",
        "several threads, or several passes of a loop, add the same contribution; one owner per (row, column) repairs it",
        "dk",
        "gain is an integer, residual at noise",
        "Change the number of threads (or tiles) per block: the factor must follow.",
        family="accumulation",
        confirm="the factor follows the thread shape; if the adds are not atomic it moves from run to run",
        variants=always(scaled(("dk",), 16.0, "dk is 16 times what it should be")),
        fitted=repetition,
    ),
    _scale(
        "scale-scores-backward",
        "the backward recomputes the scores {detail}",
        "the forward's scores are right, those of the backward carry another factor, so its weights differ from the forward's",
        "p (bwd)",
        "I2 and I3 fail, o is fine",
        "Print one row of the recomputed scores in the backward and in the forward: their ratio must be this constant.",
        confirm="a mutant with that factor on the backward's scores explains dq, dk and dv together",
        variants=other_scores,
    ),
    _transposed(
        "transpose-dk",
        "dk is computed with ds instead of its transpose",
        "dk = scale * ds q instead of scale * dsT q",
        "dk",
        "I1 fails with residual about 1.4, I3 fails, dq and dv are fine",
        "Run with Sq != Sk: the product must no longer fit, or the error must change shape.",
        variants=always(Mutant(backward={"dk": lambda dx, q, scale: scale * (dx @ q)})),
    ),
    _transposed(
        "transpose-dv",
        "dv is computed with the weights instead of their transpose",
        "dv = p do instead of pT do",
        "dv",
        "I2 fails, dq and dk are fine",
        "Run with Sq != Sk: the product must no longer fit, or the error must change shape.",
        variants=always(Mutant(backward={"dv": lambda a, do: a @ do})),
    ),
    _transposed(
        "transpose-dq",
        "dq is computed with the transpose of ds",
        "dq = scale * dsT k instead of scale * ds k",
        "dq",
        "I1 fails, dk and dv are fine",
        "Run with Sq != Sk: the product must no longer fit, or the error must change shape.",
        variants=always(Mutant(backward={"dq": lambda dx, k, scale: scale * (dx.mT @ k)})),
    ),
    _transposed(
        "swap-dk-dv",
        "dk and dv are returned in each other's place",
        "the outputs of the backward are swapped",
        "dk",
        "I1, I2 and I3 fail, gains about 0",
        "Swap the two returned tensors: the comparison must turn healthy.",
        needs=lambda call: call.k.shape == call.v.shape,
        variants=always(Mutant(finish=after(dk=lambda out, call: out["dv"], dv=lambda out, call: out["dk"]))),
    ),
    _transposed(
        "swap-dq-dk",
        "dq and dk are returned in each other's place",
        "the outputs of the backward are swapped",
        "dq",
        "I1 and I3 fail, dv is fine",
        "Swap the two returned tensors: the comparison must turn healthy.",
        needs=both(square, ungrouped),
        variants=always(Mutant(finish=after(dq=lambda out, call: out["dk"], dk=lambda out, call: out["dq"]))),
    ),
]
