"""Tangents of a subject's outputs: by the jvp it gives, or by forward mode of its own call, where it has one.

A jvp is called as jvp(q, k, v, tq, tk, tv, **extras), by keyword where it names them so, with tangents of learned terms
(`tbias`, `tsink`, ...) where it takes them. It returns (o, to), ((o, lse), (to, tlse)) or a dict of these names. A
differentiable call needs nothing: dual numbers (`torch.autograd.forward_ad`) go through it, whether torch knows the derivative
of each of its operations or an `autograd.Function` of its own has a `jvp`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.autograd import forward_ad

from backlight.call import Call
from backlight.doctor.subject.layouts import Layout
from backlight.doctor.subject.subject import QKV, Subject, parameters_of, wait
from backlight.doctor.subject.trouble import CouldNotRun, subject_code
from backlight.spec import SEQUENCE_OF

# the output that a jvp returns beside its tangent: a kernel of its own may compute it otherwise than the forward does
OUTPUT = "o (jvp)"
WORDS = {f"t{name}": (f"t{name}", f"t_{name}", f"{name}_t", f"{name}_tangent") for name in QKV}


def told(subject: Subject, tangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tangents that the subject can be told about, by name of the input."""
    accepted = None if subject.jvp is None else parameters_of(subject.jvp)

    def takes(term: str) -> bool:
        if subject.jvp is None:
            return subject.takes(term) and (not subject.params or term in subject.params)
        return accepted is None or f"t{term}" in accepted

    return {name: t for name, t in tangents.items() if name in QKV or takes(name)}


def run(subject: Subject, call: Call, tangents: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """`to`, `tlse` where the subject has it, the output of a jvp of its own, canonical layout; None: no forward mode."""
    layout = subject._layout(call)
    given = {n: layout.give(t) if n in SEQUENCE_OF else t.clone() for n, t in tangents.items()}
    if subject.jvp is not None:
        found = _by_jvp(subject, subject.jvp, call, layout, given)
    elif subject.backward is None:
        found = _by_dual_numbers(subject, call, layout, given)
    else:
        # raw functions: whatever their kernels write has no tangent
        return None
    if not isinstance(found.get("to"), Tensor):
        return None
    values = {n: layout.take_rows(found[n], n) for n in ("to", OUTPUT) if isinstance(found.get(n), Tensor)}
    if isinstance(found.get("tlse"), Tensor):
        values["tlse"] = layout.take_lse(found["tlse"])
    return {n: x.detach() for n, x in values.items()}


def _by_dual_numbers(subject: Subject, call: Call, layout: Layout, tangents: Mapping[str, Tensor]) -> dict[str, Any]:
    inputs = subject._inputs(call, layout)
    with forward_ad.dual_level():
        moving = {n: dual(x, tangents[n]) if n in tangents else x for n, x in inputs.items()}
        try:
            out = subject._forward({n: moving[n] for n in QKV}, subject._extras(call, moving, layout))
        except CouldNotRun as error:
            # what torch raises for an operation, or an autograd.Function, without a derivative in forward mode
            if isinstance(error.__cause__, NotImplementedError):
                return {}
            raise
        found = {n: out[n] for n in ("o", "lse") if isinstance(out.get(n), Tensor)}
        return {f"t{n}": forward_ad.unpack_dual(x).tangent for n, x in found.items()}


def dual(x: Tensor, tangent: Tensor) -> Tensor:
    """A dual number; what torch says about its own loading for the first of them is not the reader's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return forward_ad.make_dual(x, tangent)


def _by_jvp(
    subject: Subject, jvp: Callable[..., Any], call: Call, layout: Layout, tangents: Mapping[str, Tensor]
) -> dict[str, Any]:
    reads = replace(subject, forward=jvp, jvp=None)
    inputs = reads._inputs(call, layout)
    extras = reads._extras(call, inputs, layout) | {f"t{n}": t for n, t in tangents.items() if n not in QKV}
    with subject_code(reads.file):
        out = _invoke(jvp, [inputs[n] for n in QKV], [tangents[n] for n in QKV], extras | dict(subject.fixed))
        wait(inputs["q"])
    return _named(out)


def _invoke(jvp: Callable[..., Any], primals: list[Tensor], tangents: list[Tensor], extras: dict[str, Any]) -> Any:
    accepted = parameters_of(jvp)
    words = {**QKV, **WORDS}
    spelled = [next((w for w in choices if accepted is not None and w in accepted), None) for choices in words.values()]
    if None in spelled:
        return jvp(*primals, *tangents, **extras)
    return jvp(**dict(zip(map(str, spelled), [*primals, *tangents], strict=True)), **extras)


def _named(out: Any) -> dict[str, Any]:
    """What a jvp returned, by name."""
    if isinstance(out, Mapping):
        first = {n: out.get(n, out.get(other)) for n, other in (("o", "y"), ("to", "ty"), ("lse", None), ("tlse", None))}
    elif isinstance(out, tuple | list) and len(out) == 2:
        pairs = [x if isinstance(x, tuple | list) else (x,) for x in out]
        first = dict(zip(("o", "lse"), pairs[0], strict=False)) | dict(zip(("to", "tlse"), pairs[1], strict=False))
    else:
        first = {}
    if not all(isinstance(first.get(n), Tensor) for n in ("o", "to")):
        held = f"{type(out).__name__} of {len(out)}" if isinstance(out, tuple | list | Mapping) else type(out).__name__
        raise CouldNotRun(f"the jvp returned a {held}; expected (o, to), ((o, lse), (to, tlse)) or a dict with o and to")
    return {(OUTPUT if n == "o" else n): x for n, x in first.items()}
