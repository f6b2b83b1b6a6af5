"""Learned terms: distance bias, elastic softmax, sink and gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects import elastic
from backlight.doctor.defects.defect import (
    CAUSAL_TILES,
    Defect,
    always,
    both,
    has,
    negative_tau,
    several_batches,
    several_heads,
)
from backlight.doctor.defects.mutants import Mutant, Outputs, after, flash_delta, flash_dtau, in_both_halves, with_call
from backlight.doctor.defects.scale import one_constant, scaled
from backlight.doctor.defects.tails import TILES, tails
from backlight.reference import STAGES


def read_bias(column_of: Callable[[Tensor, Tensor], Tensor], factor: float = 1.0) -> Mutant:
    """Both halves with another column, or another factor, for the bias table; dbias follows."""

    def s(capped, bias, column, pair_bias, visible):
        return STAGES["s"].compute(capped, bias * factor, column_of(column, bias), pair_bias, visible)

    def dbias(ds, bias, column):
        return factor * STAGES["dbias"].compute(ds, bias, column_of(column, bias))

    return in_both_halves({"dbias": dbias}, s=s)


def _mirrored(call: Call) -> list[Mutant]:
    return [read_bias(lambda column, bias: 2 * call.spec.bias_origin - column)]


def _subtracted(call: Call) -> list[Mutant]:
    """In both directions, with the gradient that belongs to it or with the one of a bias that is added."""
    turned = read_bias(lambda column, bias: column, -1.0)
    own = {name: f for name, f in turned.backward.items() if name != "dbias"}
    return [turned, replace(turned, backward=own, detail=", and dbias has the sign of one that is added")]


def _origin(call: Call) -> list[Mutant]:
    return [
        replace(read_bias(lambda column, bias: column + 1), detail="one column too far right"),
        replace(read_bias(lambda column, bias: column - 1), detail="one column too far left"),
    ]


def _batches(call: Call) -> list[Mutant]:
    def only(batch: int) -> Callable[..., Tensor]:
        def dbias(ds, bias, column, b):
            value = STAGES["dbias"].compute(ds, bias, column)
            return value if b == batch else torch.zeros_like(value)

        return dbias

    last = call.q.shape[0] - 1
    return [Mutant(backward={"dbias": only(b)}, detail=word) for b, word in ((last, "last"), (0, "first"))]


def _edge(call: Call) -> list[Mutant]:
    def without(column: int) -> Callable[..., Tensor]:
        def change(outputs, call):
            dbias = outputs["dbias"].clone()
            dbias[:, column] = 0
            return dbias

        return change

    return [Mutant(finish=after(dbias=without(c)), detail=word) for c, word in ((-1, "last"), (0, "first"))]


def _counts(call: Call) -> list[Mutant]:
    """Elastic softmax with another row count in the place of n."""

    def using(count: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Callable[..., Tensor]]:
        def m(p, tau, n, visible):
            return STAGES["m"].compute(p, tau, count(n, visible), visible)

        def a(p, m, tau, n, visible):
            return STAGES["a"].compute(p, m, tau, count(n, visible))

        return {"m": m, "a": a}

    def through(count: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Callable[..., Tensor]]:
        """The backward with the same count everywhere."""

        def delta(dy, y, do, u, tau, n, dlse, visible):
            return flash_delta(dy, y, do, u * n / count(n, visible), tau, dlse)

        def dtau(do, u, n, tau, visible):
            return flash_dtau(do, u * n / count(n, visible), tau)

        return using(count) | {"delta": delta, "dtau": dtau}

    choices = [(lambda n, visible: n + 1, "n + 1"), (lambda n, visible: (n - 1).clamp(min=1), "n - 1")]
    choices.append((lambda n, visible: torch.full_like(n, visible.shape[1]), "the number of all keys"))
    return [Mutant(forward=using(f), backward=half(f), detail=word) for f, word in choices for half in (through, using)]


def rows_of_tiles(sum_over: Callable[[slice], Callable[..., Tensor]], name: str) -> Callable[[Call], list[Mutant]]:
    """A learned term's gradient from some of the rows: what one tile leaves, or what whole tiles hold."""

    def variants(call: Call) -> list[Mutant]:
        rows = call.q.shape[2]
        parts = {(start, rows): f"the last {rows - start} rows" for start in tails(rows)}
        for tile in (tile for tile in TILES if tile < rows):
            parts[0, tile] = f"the first {tile} rows"
            parts[0, rows // tile * tile] = f"the first {rows // tile * tile} rows"
            parts[rows - tile, rows] = f"the last {tile} rows"
        wanted = {part: words for part, words in parts.items() if part != (0, rows)}
        return [Mutant(backward={name: sum_over(slice(*part))}, detail=words) for part, words in wanted.items()]

    return variants


def _dbias_of(rows: slice) -> Callable[..., Tensor]:
    return lambda ds, bias, column: STAGES["dbias"].compute(ds[rows], bias, column[rows])


def _dtau_of(rows: slice) -> Callable[..., Tensor]:
    return lambda do, u, tau: flash_dtau(do[rows], u[rows], tau)


def _dsink_of(rows: slice) -> Callable[..., Tensor]:
    return lambda p_sink, delta: STAGES["dsink"].compute(p_sink[rows], delta[rows])


def _every_visible(do, visible, v, n, tau):
    return ((do * (visible.to(v.dtype) @ v)).sum(dim=-1) / n.clamp(min=1).squeeze(-1)).sum()


def _undivided(do, u, n, tau):
    return (do * u * n).sum()


def _without_sink(s, lse):
    own = torch.logsumexp(s, dim=-1) if s.shape[1] else lse
    return torch.exp(s - own.masked_fill(own == -torch.inf, 0)[:, None])


def _sinkless_lse(outputs: Outputs, call: Call) -> Outputs:
    """The saved lse with the sink's share taken out again."""
    assert call.sink is not None
    share = torch.exp(call.sink.to(outputs["lse"].dtype)[None, :, None] - outputs["lse"])
    return outputs | {"lse": outputs["lse"] + torch.log1p(-share.clamp(max=1 - 1e-12))}


def _sinkless_delta(dy, y, p_sink):
    """Row sums with the sink's share left out: weights as if they summed to one."""
    return (dy * y).sum(dim=-1) / (1 - p_sink).clamp(min=1e-30)


def _zero_table(call: Call) -> Tensor:
    assert call.bias is not None
    return torch.zeros_like(call.bias)


def _head_0_table(call: Call) -> Tensor:
    assert call.bias is not None
    return call.bias[:1].expand_as(call.bias)


no_bias, head_0_table = with_call(bias=_zero_table), with_call(bias=_head_0_table)


def _term(name: str) -> partial[Defect]:
    """Entries of one term: what a call needs to show them, and a demo that has it."""
    return partial(Defect, family="terms", needs=has(name), demo={"spec": {"causal": True, name: True}})


def _of_some_rows(name: str, sum_over: Callable[[slice], Callable[..., Tensor]], **options: Any) -> Defect:
    """The gradient of a term that all rows share."""
    return _term(name)(
        f"d{name}-rows",
        f"d{name} is summed over {{detail}} only",
        "tiles of rows overwrite each other's sum, or the loop over them ends early",
        f"d{name}",
        f"d{name} wrong, everything else right",
        "Set dO to 0 in all other rows: the comparison must turn healthy.",
        **{"needs": both(has(name), lambda call: not call.varlen), "variants": rows_of_tiles(sum_over, f"d{name}")} | options,
    )


_bias, _tau, _sink, _gate = map(_term, ("bias", "tau", "sink", "gate"))

DEFECTS = [
    _bias(
        "bias-missing-backward",
        "the backward recomputes the scores without the bias",
        "the bias is added in the forward only",
        "p (bwd)",
        "I2 and I3 fail; o is fine",
        "Set the bias to 0: the comparison must turn healthy.",
        variants=always(Mutant(sees_backward=no_bias)),
    ),
    _bias(
        "dbias-batch",
        "dbias holds the {detail} batch entry only: the sum over the batch is missing",
        "the table is shared by the batch, so its gradient is a sum over it",
        "dbias",
        "dbias wrong, everything else right; right with one batch entry",
        "Run with B = 1: the comparison must turn healthy.",
        needs=both(has("bias"), several_batches),
        variants=_batches,
    ),
    _of_some_rows("bias", _dbias_of, demo=CAUSAL_TILES | {"spec": {"causal": True, "bias": True}}),
    _bias(
        "dbias-edge",
        "the {detail} column of the bias table receives no gradient",
        "a bound check on the table's edge is off by one",
        "dbias",
        "dbias wrong at one distance only",
        "Make the table one column longer: the missing column must move.",
        confirm="mutant; a longer table moves the distance",
        variants=_edge,
    ),
    _bias(
        "scale-dbias",
        "dbias is {detail}: one constant is wrong, everything else about it is right",
        "the softmax scale, or a base-2 factor, reached dbias; the bias is added after the scale",
        "dbias",
        "gain of dbias constant over heads",
        "Multiply dbias by the inverse of the constant: the comparison must turn healthy.",
        family="scale",
        confirm="the constant matches the table",
        variants=always(scaled(("dbias",), 0.125)),
        fitted=one_constant("dbias"),
    ),
    _bias(
        "bias-mirrored",
        "the bias is read at distance j - i instead of i - j",
        "the sign of the distance is flipped",
        "s",
        "o is wrong; identities hold",
        "Use a table that is symmetric around distance 0: the comparison must turn healthy.",
        variants=_mirrored,
    ),
    _bias(
        "bias-clamped",
        "distances beyond the table use its last entry instead of no bias",
        "the column is clamped where it must be left out",
        "s",
        "o is wrong only in rows that reach beyond the table",
        "Use a table longer than the sequence: the comparison must turn healthy.",
        variants=always(read_bias(lambda column, bias: column.clamp(0, bias.numel() - 1))),
    ),
    _bias(
        "bias-scaled",
        "the bias is multiplied by the softmax scale",
        "the bias is added before the scale is applied",
        "s",
        "o is wrong; the effect of the bias is scale times too small",
        "Set scale = 1: the comparison must turn healthy.",
        needs=lambda call: call.bias is not None and abs(call.scale - 1) > 1e-6,
        variants=lambda call: [read_bias(lambda column, bias: column, call.scale)],
    ),
    _bias(
        "bias-sign",
        "the bias is subtracted from the scores{detail}",
        "the bias enters with the sign of the distance turned round, as a slope times j - i for i - j",
        "s",
        "o is wrong; identities hold",
        "Negate the bias: the comparison must turn healthy.",
        variants=_subtracted,
    ),
    _bias(
        "bias-origin",
        "the bias table is read {detail}",
        "the column of distance 0 is off by one",
        "s",
        "o is wrong; identities hold",
        "Shift the table by one column: the comparison must turn healthy.",
        variants=_origin,
    ),
    _bias(
        "bias-head0",
        "every head reads the bias table of head 0",
        "the head offset of the table is missing",
        "s",
        "head 0 is right, the others are not",
        "Make the table equal in all heads: the comparison must turn healthy.",
        needs=both(has("bias"), several_heads),
        variants=always(Mutant(sees=head_0_table)),
    ),
    _tau(
        "tau-delta",
        "elastic softmax: delta is taken as the row sum of do * o",
        "with tau that sum contains tau/n times the surviving values as well; delta = do.o - (tau/n) do.U",
        "delta",
        "I3 only; dq off by 20 to 40 %; dv and dtau are fine",
        "Set tau = 0: the comparison must turn healthy.",
        variants=always(Mutant(backward={"delta": lambda dy, y: (dy * y).sum(dim=-1)})),
    ),
    _tau(
        "tau-skip-dead",
        "elastic softmax: keys of zero weight are left out of ds, where they carry -p delta",
        "tiles or keys with zero weight are skipped in the backward although they still compete in the normaliser",
        "ds",
        "I3 only; dq off by 5 to 23 %",
        "Set tau >= 0: no key is dropped and the comparison must turn healthy.",
        needs=negative_tau,
        variants=always(Mutant(backward={"ds": lambda p, m, dp, delta: p * m * (dp - delta[:, None])})),
    ),
    elastic.UNMASKED,
    _tau(
        "tau-count",
        "elastic softmax: tau is divided by {detail} instead of the number of visible keys",
        "n is off by one, or counts hidden keys",
        "p",
        "o is wrong, most in early rows",
        "Compare row by row: the error must shrink like 1/n.",
        variants=_counts,
    ),
    _tau(
        "dtau-survivors",
        "dtau counts every visible key, also those the elastic softmax dropped",
        "the sum of dp runs over visible keys instead of surviving ones",
        "dtau",
        "dtau wrong for heads with negative tau, everything else right",
        "Set tau >= 0: the comparison must turn healthy.",
        needs=negative_tau,
        variants=always(Mutant(backward={"dtau": _every_visible})),
    ),
    _of_some_rows("tau", _dtau_of),
    _tau(
        "dtau-undivided",
        "dtau is not divided by the number of visible keys",
        "the factor 1/n of each row is missing",
        "dtau",
        "dtau wrong, everything else right",
        "Run with a window: the error must become the constant window length.",
        variants=always(Mutant(backward={"dtau": _undivided})),
    ),
    _sink(
        "sink-missing-backward",
        "the backward recomputes the weights without the sink",
        "the lse of the backward lacks the sink's share, so the weights sum to one",
        "p (bwd)",
        "I2 fails; dv is too large",
        "Set the sink to -30: the comparison must turn healthy.",
        needs=both(has("sink"), lambda call: call.entmax is None),
        variants=always(
            *(
                replace(each, finish=finish)
                for finish in (Mutant().finish, after(dsink=lambda outputs, call: torch.zeros_like(outputs["dsink"])))
                for each in (Mutant(backward={"p": _without_sink}), Mutant(saved=_sinkless_lse))
            )
        ),
    ),
    _sink(
        "sink-delta",
        "delta leaves out the sink's share of the row",
        "delta is formed as if the weights of the keys summed to one",
        "delta",
        "the sink's law for the sum of dk fails; dv is fine",
        "Set the sink to -30: the comparison must turn healthy.",
        needs=both(has("sink"), lambda call: call.tau is None),
        variants=always(Mutant(backward={"delta": _sinkless_delta})),
    ),
    _sink(
        "dsink-sign",
        "dsink has the wrong sign",
        "the sink's gradient is -sum p_sink delta",
        "dsink",
        "dsink wrong by a factor -1, everything else right",
        "Flip the sign: the comparison must turn healthy.",
        variants=always(Mutant(finish=after(dsink=lambda out, call: -out["dsink"]))),
    ),
    _of_some_rows("sink", _dsink_of, demo=CAUSAL_TILES | {"spec": {"causal": True, "sink": True}}),
    _sink(
        "dsink-unweighted",
        "dsink sums delta without the sink's weight",
        "the factor exp(sink - lse) of each row is missing",
        "dsink",
        "dsink wrong, everything else right",
        "Set the sink to -30: dsink must vanish, and does not.",
        variants=always(Mutant(backward={"dsink": lambda delta: -delta.sum()})),
    ),
    _gate(
        "gate-missing-backward",
        "the gate is not applied to dO before the backward",
        "dO = dY sigmoid(gate) is taken as dY",
        "dp",
        "dq, dk and dv are wrong, dgate is right",
        "Set the gate to +30: the comparison must turn healthy.",
        variants=always(Mutant(backward={"do": lambda dy: dy})),
    ),
    _gate(
        "dgate-derivative",
        "dgate lacks the factor 1 - sigmoid(gate)",
        "the derivative of the sigmoid is left out",
        "dgate",
        "dgate wrong, everything else right",
        "Set the gate to 0: dgate must be off by exactly 2.",
        variants=always(Mutant(backward={"dgate": lambda dy, y: dy * y})),
    ),
    _gate(
        "gate-delta",
        "delta applies the gate twice",
        "delta = dO.y is formed from the gated output and the gated dO",
        "delta",
        "I3 only; dv and dgate are right",
        "Set the gate to +30: the comparison must turn healthy.",
        variants=always(Mutant(backward={"delta": lambda do, y: (do * y).sum(dim=-1)})),
    ),
]
