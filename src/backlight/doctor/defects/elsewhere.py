"""What belongs to another head, row or column: learned terms, k or v, lse as it is stored, sums over a group, delta."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.borrowed import Rows, other_heads, shifts
from backlight.doctor.defects.defect import (
    CAUSAL,
    CAUSAL_TILES,
    Defect,
    Variants,
    both,
    grouped,
    has,
    several_heads,
    several_kv_heads,
)
from backlight.doctor.defects.mutants import Mutant, Outputs, after, in_both_halves, with_call
from backlight.reference import STAGES

# heads [H] -> the head that each reads
Heads = Callable[[Tensor], Tensor]
GROUPED = CAUSAL | {"kv_heads": 2}


def _maps(call: Call) -> Iterator[tuple[Heads, str]]:
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    if call.group > 1:
        yield lambda h: h // call.group, "head h div G, the number of their key/value head"
        yield lambda h: h % kv_heads, "head h mod Hkv, the number of a key/value head"
        yield lambda h: h % call.group, "head h mod G, their place in the group"
        yield lambda h: h // call.group * call.group, "the first head of their group"
        yield lambda h: h // kv_heads % heads, "head h div Hkv"
    yield lambda h: h * 0, "head 0"
    yield lambda h: (h + 1) % heads, "the next head"
    yield lambda h: (h - 1) % heads, "the head before"


def _forward(variants: Variants) -> Variants:
    """Mutants whose forward is wrong."""
    return lambda call: [mutant for mutant in variants(call) if mutant.forward_changed]


def _backward(*variants: Variants) -> Variants:
    """Mutants whose backward alone is wrong."""
    return lambda call: [mutant for each in variants for mutant in each(call) if not mutant.forward_changed]


def _of_heads(term: str) -> Callable[[Call], list[Mutant]]:
    """A learned term of another head; its gradient is put where it was read, or where it belongs."""

    def variants(call: Call) -> list[Mutant]:
        found, number = [], torch.arange(call.q.shape[1], device=call.q.device)
        known = [number]
        for of_heads, words in _maps(call):
            at = of_heads(number)
            if any(torch.equal(at, other) for other in known):
                continue
            known.append(at)

            def read(seen: Call, at: Tensor = at) -> Tensor:
                return getattr(seen, term)[at]

            def gathered(outputs: Outputs, _: Call, at: Tensor = at) -> Tensor:
                gradient = outputs[f"d{term}"]
                return torch.zeros_like(gradient).index_add(0, at, gradient)

            seen = with_call(**{term: read})
            finish = after(**{f"d{term}": gathered})
            found += [
                Mutant(sees=seen, detail=words),
                Mutant(sees=seen, finish=finish, detail=words),
                Mutant(sees=seen, sees_backward=_of_the(call, lambda call: call), detail=f"{words}, in the forward"),
                Mutant(sees_backward=seen, detail=words),
            ]
        return found

    return variants


def _of_rows(call: Call) -> list[Mutant]:
    """The sink at an index that counts rows, where it must count heads."""
    heads, rows = call.q.shape[1], call.q.shape[2]

    def of(per_head: int, per_entry: int) -> Callable[..., Tensor]:
        def lse(s, b, h):
            at = (torch.arange(s.shape[0], device=s.device) + per_head * h + per_entry * b) % heads
            assert call.sink is not None
            return torch.logaddexp(STAGES["lse"].compute(s, None), call.sink.to(s)[at])

        return lse

    choices = {"i mod Hq": (0, 0), "(h Sq + i) mod Hq": (rows, 0), "((b Hq + h) Sq + i) mod Hq": (rows, heads * rows)}
    return [Mutant(forward={"lse": of(*steps)}, detail=f"head {words}, in row i") for words, steps in choices.items()]


# --- the distance of a bias --------------------------------------------------------------------------------------------------


def _distances(call: Call) -> list[Mutant]:
    """The table's column from another distance: in both directions, or in one of them."""
    origin, shift = call.spec.bias_origin, call.k.shape[2] - call.q.shape[2]
    choices: dict[str, Callable[[Tensor], Tensor]] = {}
    if shift and not call.varlen:
        choices["i - j, without the offset Sk - Sq of the rows"] = lambda column: column - shift
    # under a causal mask it changes nothing, and is no demo
    choices["|i - j|"] = lambda column: (column - origin).abs() + origin
    found = []
    for words, of in choices.items():
        s, dbias = _read_at(of)
        found += [
            in_both_halves({"dbias": dbias}, s=s, detail=words),
            in_both_halves(s=s, detail=f"{words}; dbias has the right one"),
            Mutant(forward={"s": s}, detail=f"{words}, in the forward"),
            Mutant(backward={"s": s}, detail=f"the distance {words}"),
            Mutant(backward={"s": s, "dbias": dbias}, detail=f"the distance {words}"),
        ]
    return found


def _read_at(of: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Stages s and dbias with another column."""

    def s(capped, bias, column, pair_bias, visible):
        return STAGES["s"].compute(capped, bias, of(column), pair_bias, visible)

    def dbias(ds, bias, column):
        return STAGES["dbias"].compute(ds, bias, of(column))

    return s, dbias


# --- k and v -----------------------------------------------------------------------------------------------------------------


def _one_operand(call: Call) -> list[Mutant]:
    """k, or v, of the key/value head h mod Hkv and the other one of h div G; gradients go where it was read, or belong."""
    heads, kv_heads = torch.arange(call.q.shape[1], device=call.q.device), call.k.shape[1]
    in_blocks, in_turn = heads // call.group, heads % kv_heads

    def expanded(**at: Tensor) -> Callable[[Call], Call]:
        changes = {name: (lambda c, name=name: getattr(c, name)[:, at.get(name, in_blocks)]) for name in ("k", "v")}
        return with_call(**changes)

    def summed(**at: Tensor) -> Callable[[Outputs, Call], Outputs]:
        def total(outputs: Outputs, call: Call) -> Outputs:
            found = dict(outputs)
            for name, of in (("dk", call.k), ("dv", call.v)):
                if name in outputs:
                    target = torch.zeros(of.shape, dtype=outputs[name].dtype, device=of.device)
                    found[name] = target.index_add(1, at.get(name[1:], in_blocks), outputs[name])
            return found

        return total

    found = []
    for name in ("k", "v"):
        other, right = expanded(**{name: in_turn}), _of_the(call, expanded())
        found += [
            Mutant(sees=other, finish=summed(**{name: in_turn}), detail=name),
            Mutant(sees=other, finish=summed(), detail=f"{name}, and dk and dv of the right ones,"),
            Mutant(sees=other, sees_backward=right, finish=summed(), detail=f"{name}, in the forward alone,"),
        ]
    return found


def _of_the(call: Call, sees: Callable[[Call], Call]) -> Callable[[Call], Call]:
    """A view of the call itself, for a half that does not share the other's."""
    return lambda _: sees(call)


SUMS = {
    "all query heads of the group but the last": "but the last",
    "all query heads of the group but the first": "but the first",
    "the query heads h mod Hkv instead of the group's": "in turn",
    "the first query head of the group": "first",
    "the last query head of the group": "last",
}


def _part_of_group(call: Call) -> list[Mutant]:
    found = []
    for words, combine in SUMS.items():
        both_of = call.group > 2 if combine.startswith("but") else combine == "in turn"
        if both_of:
            found.append(Mutant(combine=combine, detail=f"dk and dv are summed over {words}"))
        if both_of or not combine.startswith("but"):
            found += [Mutant(combine=combine, combined=(n,), detail=f"{n} is summed over {words}") for n in ("dk", "dv")]
    return found


# --- rows of lse as they are stored, columns of delta ------------------------------------------------------------------------


def _stored(call: Call) -> list[Mutant]:
    def mutant(place: Rows, words: str) -> Mutant:
        def saved(outputs: Outputs, call: Call) -> Outputs:
            return outputs | {"lse": place(outputs["lse"])}

        def finish(outputs: Outputs, call: Call) -> Outputs:
            return outputs | {"lse": place(outputs["lse"])} if "lse" in outputs else outputs

        return Mutant(saved=saved, finish=finish, detail=words)

    return [mutant(place, words) for places in (other_heads, shifts) for place, words in places(call)]


def _columns(call: Call) -> list[Mutant]:
    """delta over some of the columns of dO and o."""
    d, dv = call.q.shape[-1], call.v.shape[-1]
    ends = {dv // step * step: f"whole vectors of {step} columns" for step in (64, 32, 16, 8)} | {dv // 2: "the first half"}
    ends |= {d: "as many columns as q has"}
    parts = {(0, end): words for end, words in ends.items() if 0 < end < dv} | {(dv // 2, dv): "the second half"}

    def mutant(part: slice, words: str) -> Mutant:
        def delta(dy, y, dlse):
            found = (dy[:, part] * y[:, part]).sum(dim=-1)
            return found if dlse is None else found - dlse

        return Mutant(backward={"delta": delta}, detail=words)

    return [mutant(slice(*part), words) for part, words in parts.items()]


_elsewhere = partial(Defect, family="heads", demo=GROUPED)
DEFECTS = [
    _elsewhere(
        "bias-other-head",
        "heads read the bias table of {detail}",
        "the index of the head in the table's address is another one, that of k and v for instance",
        "s",
        "o is wrong in the heads whose two indices differ; weights are those of another bias",
        "Make the table equal in all heads: the comparison must turn healthy.",
        needs=both(has("bias"), several_heads),
        variants=_forward(_of_heads("bias")),
        demo=GROUPED | {"spec": {"causal": True, "bias": True}},
    ),
    _elsewhere(
        "sink-other-head",
        "heads have the sink of {detail}",
        "the index of the head in the sink's address is another one, that of k and v for instance",
        "lse",
        "o and lse are wrong in the heads whose two indices differ; weights of the keys keep their ratios",
        "Make the sink equal in all heads: the comparison must turn healthy.",
        needs=both(has("sink"), several_heads, lambda call: call.entmax is None),
        variants=lambda call: [*_forward(_of_heads("sink"))(call), *_of_rows(call)],
        demo=GROUPED | {"spec": {"causal": True, "sink": True}},
    ),
    _elsewhere(
        "bias-distance",
        "the bias is read at the distance {detail}",
        "rows and keys are counted from other places than the mask counts them, or the sign of the distance is dropped",
        "s",
        "o is wrong, or the gradients alone; weights are those of another bias",
        "Fill each row of the table with one number: the comparison must turn healthy.",
        needs=has("bias"),
        variants=_forward(_distances),
        family="terms",
        demo=CAUSAL_TILES | {"spec": {"causal": True, "bias": True}, "sk": 60},
    ),
    _elsewhere(
        "bias-read-backward",
        "the backward reads the bias of {detail}, the forward the right one",
        "the table's address in the backward has another index of the head, or another place of rows and keys",
        "p (bwd)",
        "I2 and I3 fail; o is fine",
        "Fill the whole table with one number: the comparison must turn healthy.",
        needs=has("bias"),
        variants=_backward(_of_heads("bias"), _distances),
        family="terms",
        demo=GROUPED | {"spec": {"causal": True, "bias": True}},
    ),
    _elsewhere(
        "gqa-map-one",
        "query heads take {detail} from the key/value head h mod Hkv, and the other of k and v from h div G",
        "k and v are addressed by two lines of code, and one of them has another map of heads",
        "s",
        "o is wrong except where both maps agree; with k right, so is lse",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        family="gqa",
        needs=both(grouped, several_kv_heads, lambda call: not call.varlen),
        variants=_one_operand,
    ),
    _elsewhere(
        "gqa-sum-part",
        "{detail}",
        "the loop over the query heads of a group ends early, begins late, or takes heads in turn",
        "dk",
        "dq and o are right; dk and dv lack the shares of some query heads",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        family="gqa",
        needs=grouped,
        variants=_part_of_group,
        demo=GROUPED | {"shape": (2, 6, 136, 64)},
    ),
    _elsewhere(
        "lse-stored-elsewhere",
        "the forward stores lse at another place: rows get that of {detail}",
        "strides or padding of the buffer differ from those that the store assumes",
        "lse",
        "o is right; lse is that of other rows, and the backward reads it",
        "Compare lse as a sorted list: where it is only misplaced both lists are equal.",
        family="lse",
        variants=_stored,
        needs=lambda call: not call.varlen,
        demo=CAUSAL_TILES,
    ),
    _elsewhere(
        "delta-columns",
        "delta, the row sum of dO * o, is summed over a part of the columns: {detail}",
        "the loop over the columns of o ends early, or has the width of q",
        "delta",
        "I3 only; dv is perfect",
        "Set dO to 0 in the other columns: the comparison must turn healthy.",
        family="delta",
        needs=lambda call: call.tau is None and call.gate is None and call.entmax is None and call.v.shape[-1] > 1,
        variants=_columns,
        demo=CAUSAL,
    ),
]
