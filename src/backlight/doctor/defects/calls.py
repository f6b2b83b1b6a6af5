"""Faults of the test: the kernel computes something consistent, but not what was asked."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, Defect, always, both, capped, causal, has, lengths_differ, windowed
from backlight.doctor.defects.masks import without_causal
from backlight.doctor.defects.mutants import Mutant, Outputs, after, in_both_halves, other_spec, top_left, with_call
from backlight.doctor.defects.scale import other_widths
from backlight.doctor.defects.terms import no_bias
from backlight.doctor.defects.windows import WINDOW, window_edges, without_window


def _scales(call: Call) -> list[Mutant]:
    d, scale = call.q.shape[-1], call.scale
    choices = {"1 (no scale)": 1.0, f"1/sqrt(D) = {d**-0.5:.4g}": d**-0.5, f"1/D = {1 / d:.4g}": 1 / d}
    choices |= {f"scale squared = {scale**2:.4g}": scale**2, f"sqrt(D) = {d**0.5:.4g}": d**0.5}
    choices |= {words: width for width, words in other_widths(call)}
    choices |= {f"twice the scale = {2 * scale:.4g}": 2 * scale, f"half the scale = {scale / 2:.4g}": scale / 2}
    return [Mutant(sees=other_spec(scale=s), detail=word) for word, s in choices.items() if abs(s - scale) > 1e-6 * scale]


def _swap(a: str, b: str) -> Defect:
    """Two of q, k and v passed in each other's place."""

    def finish(outputs: Outputs, call: Call) -> Outputs:
        return outputs | {f"d{a}": outputs[f"d{b}"], f"d{b}": outputs[f"d{a}"]} if f"d{a}" in outputs else outputs

    swapped = with_call(**{a: lambda call: getattr(call, b), b: lambda call: getattr(call, a)})
    return _test_fault(
        f"call-swap-{a}{b}",
        f"{a} and {b} change places in the call",
        "arguments are passed by position in another order",
        "s",
        f"o is wrong; d{a} and d{b} change places",
        "Pass q, k, v by keyword: the comparison must turn healthy.",
        needs=lambda call: getattr(call, a).shape == getattr(call, b).shape,
        variants=always(Mutant(sees=swapped, finish=finish)),
        demo=CAUSAL,
    )


def _transposed(call: Call) -> list[Mutant]:
    def sees(call: Call) -> Call:
        return with_call(**{n: (lambda c, n=n: getattr(c, n).transpose(1, 2)) for n in ("q", "k", "v")})(call)

    def finish(outputs: Outputs, call: Call) -> Outputs:
        return {n: x.transpose(1, 2) if x.dim() >= 3 else x for n, x in outputs.items()}

    return [Mutant(sees=sees, finish=finish)]


def _no_sink(call: Call) -> torch.Tensor:
    assert call.sink is not None
    return torch.full_like(call.sink, -torch.inf)


def _can_transpose(call: Call) -> bool:
    """Heads and positions can change places, at a price that stays small."""
    hq, sq, hkv, sk = call.q.shape[1], call.q.shape[2], call.k.shape[1], call.k.shape[2]
    plain = not call.varlen and not call.spec.terms
    return plain and hq > 1 and sq != hq and sq % max(sk, 1) == 0 and hq * sq * call.q.shape[0] <= 1 << 13 and hkv > 0


_test_fault = partial(Defect, family="test", confirm="mutant of the call", severity="test-fault")


def _lost(name: str, title: str, signal: str, next_check: str, by_position: bool = False, **rest: Any) -> Defect:
    """An argument that never reached what runs."""
    ways = "an argument is passed by position, has another name," if by_position else "an argument has another name,"
    return _test_fault(name, title, f"{ways} or is dropped by a wrapper", "s", signal, next_check, **rest)


DEFECTS = [
    _lost(
        "call-causal-lost",
        "what runs computes causal=False: the flag never reached it",
        "o differs from row 0 on; identities hold; a full matrix of weights",
        "Call with is_causal (or causal) by keyword, or ask for causal=False: the comparison must turn healthy.",
        by_position=True,
        needs=causal,
        variants=lambda call: [Mutant(sees=without_causal(call))],
        demo=CAUSAL,
    ),
    _lost(
        "call-window-lost",
        "what runs computes full attention without the window: the window never reached it",
        "o differs only in rows beyond the window; identities hold",
        "Ask for no window: the comparison must turn healthy.",
        by_position=True,
        needs=windowed,
        variants=lambda call: [Mutant(sees=without_window(call))],
        demo=WINDOW,
    ),
    _test_fault(
        "call-window-convention",
        "the window is {detail}, in forward and backward alike: another convention for its edge",
        "one side counts the keys of the window, the other the reach beyond the row's own key",
        "s",
        "o differs on one diagonal; identities hold",
        "Ask for a window one longer (or shorter): the comparison must turn healthy.",
        needs=lambda call: call.spec.window != (None, None),
        variants=window_edges((1, -1), "both"),
        demo=WINDOW,
    ),
    _test_fault(
        "call-alignment",
        "the mask is aligned to the first key instead of the last: the other convention for Sq != Sk",
        "causal masks of cross attention and decoding have two conventions, top-left and bottom-right",
        "s",
        "o differs only when Sq and Sk differ; identities hold",
        "Run with Sq = Sk: the comparison must turn healthy.",
        needs=lengths_differ,
        variants=lambda call: [in_both_halves(s=top_left(call.spec))],
        demo=CAUSAL | {"sk": 180},
    ),
    _test_fault(
        "call-scale",
        "what runs uses the softmax scale {detail}",
        "the scale has another default, or is applied outside as well",
        "s",
        "o is wrong everywhere; identities hold",
        "Ask for that scale: the comparison must turn healthy.",
        variants=_scales,
    ),
    _swap("q", "k"),
    _swap("k", "v"),
    _test_fault(
        "call-layout",
        "heads and positions change places: what runs reads [B, S, H, D] where [B, H, S, D] was promised",
        "the layout differs; shapes fit, so nothing complains",
        "s",
        "o is wrong everywhere; identities hold within the other reading",
        "Declare the other layout: the comparison must turn healthy.",
        needs=_can_transpose,
        variants=_transposed,
    ),
    _test_fault(
        "call-grad-of-sum",
        "the gradients are those of out.sum(): the incoming dO was not used",
        "backward() was called on a sum, or the kernel assumes a dO of ones",
        "dp",
        "o is right; gradients equal those for dO = 1",
        "Double dO: the gradients must double, and do not.",
        variants=always(Mutant(gradient=lambda dy, call: torch.ones_like(dy))),
        demo=CAUSAL,
    ),
    _lost(
        "call-bias-lost",
        "what runs computes no bias: the table never reached it",
        "o is wrong; identities hold",
        "Set the bias to 0: the comparison must turn healthy.",
        needs=has("bias"),
        variants=always(Mutant(sees=no_bias)),
        demo={"spec": {"causal": True, "bias": True}},
    ),
    _lost(
        "call-softcap-lost",
        "what runs computes no soft-cap: the option never reached it",
        "o is wrong where scores are large; identities hold",
        "Raise the cap to 1e4: the comparison must turn healthy.",
        needs=capped,
        variants=always(Mutant(sees=other_spec(softcap=None))),
        demo={"spec": {"causal": True, "softcap": 2.0}},
    ),
    _lost(
        "call-sink-lost",
        "what runs computes no sink: it never reached what runs, and its gradient is 0",
        "o and lse are wrong, most in rows of few keys; weights sum to one; dsink is 0",
        "Set the sink to -30: the comparison must turn healthy.",
        needs=both(has("sink"), lambda call: call.entmax is None),
        variants=always(Mutant(sees=with_call(sink=_no_sink), finish=after(dsink=lambda out, call: out["dsink"] * 0))),
        demo={"spec": {"causal": True, "sink": True}},
    ),
]
