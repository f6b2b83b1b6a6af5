"""Mutant oracles: the float64 oracle in flash form, with one thing changed.

A real kernel's backward does not see the forward's weights: it recomputes scores from q and k, weights from the saved lse, and
delta from the saved output. So a mutant has two halves, each an `Oracle` over stages of `reference.trace`, and a defect is a
change of a stage, of what a half sees, of the head map, or of the finished outputs. `run` evaluates it in float64 (to explain
data) or in fp32 with operands rounded to the storage dtype (to be a broken kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.problems.axes import cut_call
from backlight.reference import STAGES, Oracle, Stage, Trace
from backlight.reference.entmax import slopes
from backlight.reference.oracle import KEY_VECTORS
from backlight.reference.tangent import FORWARD_MODE, moved, tangent
from backlight.spec import GRADIENTS, LEARNED, TENSORS, AttentionSpec, Segment

Stages = Mapping[str, Callable[..., Tensor]]
Outputs = dict[str, Tensor]
Tangents = dict[str, Tensor]
SAVED_ROWS = ("lse", "y", "o", "u")
RECOMPUTED = ("x", "capped", "s", "p", "p_sink", "m", "a")
GRADIENT_STAGES = (
    "do",
    "dgate",
    "dp",
    "dv",
    "delta",
    "ds",
    "dbias",
    "dsink",
    "dtau",
    "dpair_bias",
    "dentmax",
    "dx",
    "dq",
    "dk",
)
# matmul operands that a kernel rounds to its storage dtype
OPERANDS = ("a", "ta", "dx", "y", "ty", "do", *(f"d{each.name}" for each in TENSORS if each.like_q))
# (how a group is joined, is the head its first, its last) of heads that are added where one is left out
BUT_ONE = {(f"but the {word}", *ends) for word, ends in (("last", (True, False)), ("last", (False, False)))}
BUT_ONE |= {(f"but the {word}", *ends) for word, ends in (("first", (False, True)), ("first", (False, False)))}


def flash_delta(dy, y, do, u, tau, dlse, p=None, p_sink=None, entmax=None):
    """delta from saved tensors (eq. 27, 28, 87), less dlse."""
    if entmax is not None:
        delta = (do * u).sum(dim=-1)
        return delta if dlse is None else delta - dlse / slopes(p, p_sink, entmax)[1]
    delta = (dy * y).sum(dim=-1)
    if tau is not None:
        delta = delta - tau * (do * u).sum(dim=-1)
    return delta if dlse is None else delta - dlse


def flash_dgate(dy, y, gate):
    return torch.zeros_like(dy) if gate is None else dy * y * (1 - torch.sigmoid(gate))


def flash_dtau(do, u, tau):
    return do.new_zeros(()) if tau is None else (do * u).sum()


FORWARD_HALF = {name: STAGES[name] for name in ("x", "capped", "s", "lse", "p", "p_sink", "m", "a", "o", "u", "y")}
BACKWARD_HALF = {name: STAGES[name] for name in (*RECOMPUTED, *GRADIENT_STAGES)} | {
    "delta": Stage.of(flash_delta, "delta"),
    "dgate": Stage.of(flash_dgate, "dgate"),
    "dtau": Stage.of(flash_dtau, "dtau"),
}


@dataclass(frozen=True)
class Half(Oracle):
    """One direction; `saved` joins the inputs of each head, `combine` is how a group's `combined` (dk, dv) are joined.

    `only` restricts the work to some (batch, KV head) pairs; the rest of every output stays blank.
    """

    saved: Mapping[str, Tensor] = field(default_factory=dict)
    combine: str = "sum"
    combined: tuple[str, ...] = KEY_VECTORS
    only: frozenset[tuple[int, int]] | None = None

    def _heads(
        self, call: Call, dy: Tensor | None, dlse: Tensor | None
    ) -> Iterator[tuple[int, int, Segment, dict[str, object]]]:
        heads = super()._heads(call, dy, dlse) if self.only is None or call.varlen else self._single_heads(call, dy, dlse)
        for b, h, segment, inputs in heads:
            if not self._wanted(b, h, call):
                continue
            rows = slice(segment.q0, segment.q1)
            saved = {name: x[b, h, rows].to(self.dtype) for name, x in self.saved.items()}
            yield b, h, segment, {**inputs, **saved, "h": h, "b": b}

    def _wanted(self, b: int, h: int, call: Call) -> bool:
        places = {(b, self.kv_head(h, call.group)), (b, h // call.group)}
        if self.combine == "in turn":
            places.add((b, h % call.k.shape[1]))
        return self.only is None or bool(places & self.only)

    def _single_heads(
        self, call: Call, dy: Tensor | None, dlse: Tensor | None
    ) -> Iterator[tuple[int, int, Segment, dict[str, object]]]:
        """The wanted heads alone, cut out before they are cast: casts are most of the work of trying many mutants."""
        for b, h in product(range(call.q.shape[0]), range(call.q.shape[1])):
            if not self._wanted(b, h, call):
                continue
            g = self.kv_head(h, call.group)
            head = cut_call(call, {"batch": slice(b, b + 1), "heads": slice(h, h + 1), "kv_heads": slice(g, g + 1)})
            incoming = (None if x is None else x[b : b + 1, h : h + 1] for x in (dy, dlse))
            for _, _, segment, inputs in Oracle(self.stages, self.dtype)._heads(head, *incoming):
                yield b, h, replace(segment, batch=b, number=segment.number if call.varlen else b), inputs

    def _place(self, out: Tensor, name: str, value: Tensor, b: int, h: int, segment: Segment, call: Call) -> None:
        if name in self.combined and self.combine != "sum":
            g, keys = self.kv_head(h, call.group), slice(segment.k0, segment.k1)
            if self.combine == "in turn":
                g = h % call.k.shape[1]
            first, last = h % call.group == 0, h % call.group == call.group - 1
            if (self.combine == "last" and last) or (self.combine == "first" and first):
                out[b, g, keys] = value
            elif self.combine == "in turn" or (self.combine, first, last) in BUT_ONE:
                out[b, g, keys] += value
            elif self.combine == "mean":
                out[b, g, keys] += value / call.group
            return
        super()._place(out, name, value, b, h, segment, call)


def _same_call(call: Call) -> Call:
    return call


def _same_gradient(dy: Tensor, call: Call) -> Tensor:
    return dy


def _same_tangents(tangents: Tangents) -> Tangents:
    return tangents


def _same_outputs(outputs: Outputs, call: Call) -> Outputs:
    return outputs


def _nothing_borrowed(saved: Outputs, dy: Tensor) -> Outputs:
    return {}


def head_of_group(h: int, group: int) -> int:
    return h // group


@dataclass(frozen=True)
class Mutant:
    """What differs from the truth. Unset fields change nothing.

    forward, backward:       stages replaced in that half (parameter names are the graph).
    tangent:                 stages of `reference.tangent` replaced in forward mode, which has those of `forward` too.
    sees, sees_backward:     the call as both halves see it, or as the backward alone does.
    along:                   the tangents, by name of the input, as forward mode reads them.
    gradient, saved:         dO and the saved rows (lse, y, o, u) as the backward reads them.
    borrowed:                more rows for the backward's stages, by name, from the saved ones and dO of all heads.
    kv_forward, kv_backward: which key/value head a query head reads; combine: how a group's `combined` are joined.
    finish:                  the last change of the outputs (y, lse, dq, ...). detail: words for the sentence shown.
    """

    forward: Stages = field(default_factory=dict)
    backward: Stages = field(default_factory=dict)
    tangent: Stages = field(default_factory=dict)
    sees: Callable[[Call], Call] = _same_call
    sees_backward: Callable[[Call], Call] = _same_call
    along: Callable[[Tangents], Tangents] = _same_tangents
    gradient: Callable[[Tensor, Call], Tensor] = _same_gradient
    saved: Callable[[Outputs, Call], Outputs] = _same_outputs
    borrowed: Callable[[Outputs, Tensor], Outputs] = _nothing_borrowed
    kv_forward: Callable[[int, int], int] = head_of_group
    kv_backward: Callable[[int, int], int] = head_of_group
    combine: str = "sum"
    combined: tuple[str, ...] = KEY_VECTORS
    finish: Callable[[Outputs, Call], Outputs] = _same_outputs
    detail: str = ""

    @property
    def forward_changed(self) -> bool:
        return bool(self.forward) or self.sees is not _same_call or self.kv_forward is not head_of_group

    @property
    def of_softmax(self) -> bool:
        """Whether a stage that depends on entmax is replaced by one that does not look at it."""
        halves = ((self.forward, FORWARD_HALF), (self.backward, BACKWARD_HALF))
        changed = [(name, f, half[name].reads) for stages, half in halves for name, f in stages.items() if name in half]
        return any("entmax" in reads and "entmax" not in Stage.of(f, name).reads for name, f, reads in changed)

    @property
    def outputs_kept(self) -> bool:
        return self.finish is _same_outputs


def in_both_halves(backward: Stages | None = None, *, detail: str = "", **stages: Callable[..., Tensor]) -> Mutant:
    """A mutant whose two halves have the same `stages` replaced, and the backward those of `backward` as well."""
    return Mutant(forward=stages, backward=stages | dict(backward or {}), detail=detail)


KEPT = ("y", "lse", *GRADIENTS)


def run(
    mutant: Mutant,
    call: Call,
    dy: Tensor | None = None,
    dlse: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    storage: torch.dtype | None = None,
    truth: Trace | None = None,
    keep: tuple[str, ...] = KEPT,
    only: frozenset[tuple[int, int]] | None = None,
    tangents: Mapping[str, Tensor] | None = None,
) -> Outputs:
    """Outputs and gradients of the mutant, and tangents of its outputs along `tangents`.

    `truth` lets an unchanged forward be reused; `storage` rounds operands to it.
    """

    def rounding(name: str, value: Tensor) -> Tensor:
        return value if storage is None or name not in OPERANDS else value.to(storage).to(dtype)

    seen = mutant.sees(call)
    if seen.k.shape[:3] != call.k.shape[:3]:
        # the mutant counts key/value heads otherwise
        only = None
    if seen.q.shape[:3] != call.q.shape[:3]:
        only, dlse = None, None if dlse is None else relayout(dlse, seen)
    if truth is not None and not mutant.forward_changed:
        forward: Mapping[str, Tensor] = {name: truth[name] for name in SAVED_ROWS}
    else:
        stages = FORWARD_HALF | {name: Stage.of(f, name) for name, f in mutant.forward.items()}
        keep_forward = (*SAVED_ROWS, *(name for name in keep if name in FORWARD_HALF))
        forward = Half(stages, dtype, rounding, mutant.kv_forward, only=only)(seen, keep=keep_forward)
    outputs: Outputs = {name: forward[name] for name in forward if name in keep or name in SAVED_ROWS}
    if dy is not None:
        saved = mutant.saved({name: forward[name] for name in SAVED_ROWS}, seen)
        stages = BACKWARD_HALF | {name: Stage.of(f, name) for name, f in mutant.backward.items()}
        backward_call = mutant.sees_backward(seen)
        gradient = mutant.gradient(dy if seen.q.shape[:3] == call.q.shape[:3] else relayout(dy, seen), backward_call)
        saved |= mutant.borrowed(saved, gradient.to(dtype))
        half = Half(stages, dtype, rounding, mutant.kv_backward, saved, mutant.combine, mutant.combined, only)
        unknown = [name for name in call.gradients if name not in GRADIENT_STAGES]
        if unknown:
            raise NotImplementedError(f"no mutant of the oracle computes {unknown[0]}")
        names = [name for name in keep if name in GRADIENT_STAGES]
        outputs |= dict(half(backward_call, gradient, dlse, names).items())
    if tangents is not None and seen.q.shape == call.q.shape:
        changed = {name: Stage.of(f, name) for name, f in {**mutant.forward, **mutant.tangent}.items()}
        half = Half(FORWARD_MODE | changed, dtype, rounding, mutant.kv_forward, only=only)
        outputs |= dict(tangent(seen, _seen_tangents(mutant, call, tangents), half).items())
    return mutant.finish(outputs, call)


def _seen_tangents(mutant: Mutant, call: Call, tangents: Mapping[str, Tensor]) -> Tangents:
    """The tangents of what the mutant sees: its view of a call is linear in the tensors."""
    seen = mutant.sees(moved(call, tangents))
    return mutant.along({name: x for name in LEARNED if (x := getattr(seen, name)) is not None})


def relayout(dy: Tensor, seen: Call) -> Tensor:
    """dO for a call whose heads and positions changed places."""
    return dy.transpose(1, 2) if dy.transpose(1, 2).shape[:3] == seen.q.shape[:3] else dy


# --- small changes, in words -----------------------------------------------------------------------------------------------


def other_spec(**changes: object) -> Callable[[Call], Call]:
    """The call with another spec."""

    def sees(call: Call) -> Call:
        return replace(call, spec=call.spec.replace(**changes))

    return sees


def with_call(**changes: Callable[[Call], Any]) -> Callable[[Call], Call]:
    """The call with some tensors replaced."""

    def sees(call: Call) -> Call:
        changed: dict[str, Any] = {name: change(call) for name, change in changes.items()}
        return replace(call, **changed, _segments=None)

    return sees


def after(**changes: Callable[[Outputs, Call], Tensor]) -> Callable[[Outputs, Call], Outputs]:
    """Outputs with some of them replaced."""

    def finish(outputs: Outputs, call: Call) -> Outputs:
        return outputs | {name: change(outputs, call) for name, change in changes.items() if name in outputs}

    return finish


def showing(s: Callable[..., Tensor]) -> Stages:
    """Stage s of another mask that may show hidden keys, and m with it: whom s shows survives."""

    def m(p, s, tau, n, entmax):
        return STAGES["m"].compute(p, tau, n, s > -torch.inf, entmax)

    return {"s": s, "m": m}


def top_left(spec: AttentionSpec) -> Callable[..., Tensor]:
    """Stage s with rows aligned to the first key instead of the last."""
    return shifted_rows(spec, lambda sq, sk: 0)


def bottom_left(spec: AttentionSpec) -> Callable[..., Tensor]:
    """Stage s with the offset Sk - Sq of the rows turned round."""
    return shifted_rows(spec, lambda sq, sk: sq - sk)


def shifted_rows(spec: AttentionSpec, offset: Callable[[int, int], int]) -> Callable[..., Tensor]:
    """Stage s whose row i lies at key i + offset(sq, sk)."""

    def s(capped, bias, column, pair_bias, visible):
        sq, sk = capped.shape
        column = column + (sq - sk + offset(sq, sk))
        return STAGES["s"].compute(capped, bias, column, pair_bias, spec.allowed_distance(column - spec.bias_origin))

    return s


def zeroed(x: Tensor, rows: slice) -> Tensor:
    """[.., S, C] with some positions set to 0."""
    x = x.clone()
    x[..., rows, :] = 0
    return x
