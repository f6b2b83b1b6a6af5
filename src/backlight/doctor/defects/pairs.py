"""Defects of a bias of pairs: where it is read, where in the composition it is added, and what becomes of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import Defect, both, capped, has, masked, square
from backlight.doctor.defects.mutants import Mutant, Outputs, after, in_both_halves, with_call
from backlight.doctor.defects.tails import TILES
from backlight.doctor.defects.terms import rows_of_tiles
from backlight.reference import STAGES
from backlight.spec import LN2

SPEC = {"pair_bias": True}
DEMO = {"spec": SPEC}
CAUSAL = {"spec": SPEC | {"causal": True}}
OWN = DEMO | {"pair_bias": ("batch", "heads", "rows", "wide")}


def _pairs(call: Call) -> Tensor:
    assert call.pair_bias is not None
    return call.pair_bias


# --- where it is read --------------------------------------------------------------------------------------------------------


def of_entries(entries: Callable[[Call], Tensor], detail: str) -> Mutant:
    """Batch entry b reads the bias of entries(call)[b], and adds to the gradient of that one."""

    def finish(outputs: Outputs, call: Call) -> Tensor:
        own = torch.zeros_like(_pairs(call), dtype=outputs["dpair_bias"].dtype)
        return own.index_add(0, entries(call).to(own.device), outputs["dpair_bias"])

    return Mutant(
        sees=with_call(pair_bias=lambda call: _pairs(call)[entries(call)]), finish=after(dpair_bias=finish), detail=detail
    )


def _read_entries(call: Call) -> list[Mutant]:
    batch, own = call.q.shape[0], _pairs(call).shape[0]
    numbers = torch.arange(batch)
    found = [
        of_entries(lambda call: torch.zeros(batch, dtype=torch.int64), "the first one"),
        of_entries(lambda call: (numbers // call.sharing + 1) % own, "the next one"),
    ]
    return found if call.sharing == 1 else [*found, of_entries(lambda call: numbers % own, "the one at b modulo their number")]


def _transposed(call: Call) -> list[Mutant]:
    def turned(outputs: Outputs, call: Call) -> Tensor:
        return outputs["dpair_bias"].mT

    read = Mutant(sees=with_call(pair_bias=lambda call: _pairs(call).mT), finish=after(dpair_bias=turned), detail="bias")
    return [read, Mutant(finish=after(dpair_bias=turned), detail="gradient of the bias")]


def of_columns(at: Tensor, detail: str) -> list[Mutant]:
    """Key j reads the bias of column at[j]; the gradient is added where it was read, or where it belongs."""

    def finish(outputs: Outputs, call: Call) -> Tensor:
        gradient = outputs["dpair_bias"]
        return torch.zeros_like(gradient).index_add(3, at.to(gradient.device), gradient)

    seen = with_call(pair_bias=lambda call: _pairs(call)[..., at.to(call.q.device)])
    return [Mutant(sees=seen, finish=after(dpair_bias=finish), detail=detail), Mutant(sees=seen, detail=detail)]


def _columns(call: Call) -> list[Mutant]:
    keys, found = call.k.shape[2], []
    j = torch.arange(keys)
    for tile in TILES:
        if tile >= keys:
            break
        step = j // tile
        choices = {
            f"those of the first tile of {tile}, in every tile": j % tile,
            f"those of every second tile of {tile}, round the end": (j + step * tile) % keys,
            f"those of every second tile of {tile}, up to the end": (j + step * tile).clamp(max=keys - 1),
            f"those of the tile of {tile} before, from the second tile on": torch.where(step > 0, j - tile, j),
            f"those of the next tile of {tile}, round the end": (j + tile) % keys,
        }
        found += [mutant for words, at in choices.items() for mutant in of_columns(at, words)]
    return found


# --- where it is added -------------------------------------------------------------------------------------------------------


def _times(factor: float, detail: str) -> list[Mutant]:
    """The bias, its gradient or both times a factor."""

    def s(capped, bias, column, pair_bias, visible):
        return STAGES["s"].compute(capped, bias, column, pair_bias * factor, visible)

    def dpair_bias(ds, pair_bias):
        return factor * STAGES["dpair_bias"].compute(ds, pair_bias)

    bias = f"bias is multiplied by {detail}"
    return [
        in_both_halves(s=s, detail=f"{bias}, its gradient is not"),
        in_both_halves({"dpair_bias": dpair_bias}, s=s, detail=f"{bias}, and so is its gradient"),
        Mutant(backward={"dpair_bias": dpair_bias}, detail=f"bias is right, its gradient is multiplied by {detail}"),
    ]


def _scaled(call: Call) -> list[Mutant]:
    scaled = _times(call.scale, "the scale") if abs(call.scale - 1) > 1e-6 else []
    return [*scaled, *_times(LN2, "ln 2 (added to logits of base 2 as it is)")]


def _capped_with_it(x, softcap, pair_bias):
    return softcap * torch.tanh((x + pair_bias) / softcap)


def _s_without_it(capped, bias, column, visible):
    return STAGES["s"].compute(capped, bias, column, None, visible)


def _dpair_bias_of_dx(ds, capped, softcap, pair_bias):
    return STAGES["dpair_bias"].compute(STAGES["dx"].compute(ds, capped, softcap), pair_bias)


def _s_unmasked(capped, bias, column, pair_bias, visible):
    seen = STAGES["s"].compute(capped, bias, column, None, visible)
    return seen.masked_fill(~visible, 0) + pair_bias


def _m_all(p):
    return torch.ones_like(p)


# --- its gradient ------------------------------------------------------------------------------------------------------------


def _kept_last(keeps: Callable[[Call, int, int], bool], detail: str) -> Callable[[Call], Mutant]:
    def of(call: Call) -> Mutant:
        def dpair_bias(ds, pair_bias, b, h):
            value = STAGES["dpair_bias"].compute(ds, pair_bias)
            return value if keeps(call, b, h) else torch.zeros_like(value)

        return Mutant(backward={"dpair_bias": dpair_bias}, detail=detail)

    return of


def _last_row(ds, pair_bias):
    return ds[-1:]


def _not_summed(call: Call) -> list[Mutant]:
    found = []
    if call.sharing > 1:
        found.append(_kept_last(lambda call, b, h: b % call.sharing == call.sharing - 1, "last batch entry")(call))
        found.append(_kept_last(lambda call, b, h: b % call.sharing == 0, "first batch entry")(call))
    if _pairs(call).shape[1] < call.q.shape[1]:
        found.append(_kept_last(lambda call, b, h: h == call.q.shape[1] - 1, "last head")(call))
        found.append(_kept_last(lambda call, b, h: h == 0, "first head")(call))
    if call.sharing > 1 and _pairs(call).shape[1] < call.q.shape[1]:
        found.append(
            _kept_last(
                lambda call, b, h: b % call.sharing == call.sharing - 1 and h == call.q.shape[1] - 1,
                "last head of the last batch entry",
            )(call)
        )
        found.append(
            _kept_last(lambda call, b, h: b % call.sharing == 0 and h == 0, "first head of the first batch entry")(call)
        )
    if _pairs(call).shape[2] < call.q.shape[2]:
        found.append(Mutant(backward={"dpair_bias": _last_row}, detail="last row"))
    return found


def _dpair_bias_unmasked(capped, bias, column, pair_bias, visible, lse, dp, delta, entmax):
    s = STAGES["s"].compute(capped, bias, column, pair_bias, torch.ones_like(visible))
    p = STAGES["p"].compute(s, lse, entmax)
    ds = STAGES["ds"].compute(p, torch.ones_like(p), dp, delta, entmax)
    return STAGES["dpair_bias"].compute(ds, pair_bias)


def _dpair_bias_of(rows: slice) -> Callable[..., Tensor]:
    def dpair_bias(ds, pair_bias):
        part = torch.zeros_like(ds)
        part[rows] = ds[rows]
        return STAGES["dpair_bias"].compute(part, pair_bias)

    return dpair_bias


def shared(call: Call) -> bool:
    """Whether something reads an entry of the bias that something else reads too."""
    return call.pair_bias is not None and not call.varlen and tuple(call.pair_bias.shape[:3]) != tuple(call.q.shape[:3])


def several_entries(call: Call) -> bool:
    return call.pair_bias is not None and not call.varlen and call.pair_bias.shape[0] > 1


def with_rows(call: Call) -> bool:
    return call.pair_bias is not None and not call.varlen and call.pair_bias.shape[2] > 1


def hides(call: Call) -> bool:
    return masked(call) or call.rows is not None


_pair = partial(Defect, family="terms", needs=has("pair_bias"), demo=DEMO)

DEFECTS = [
    _pair(
        "pair-bias-transposed",
        "the {detail} is transposed: rows and keys have changed places",
        "strides of rows and keys are exchanged in an address",
        "s",
        "o is wrong everywhere, or dpair_bias alone is; identities hold",
        "Pass a symmetric bias: the comparison must turn healthy.",
        needs=both(square, with_rows),
        variants=_transposed,
    ),
    _pair(
        "pair-bias-other-batch",
        "batch entries read the pair bias of another entry: {detail}",
        "the stride of the batch is left out of the address, or the entry is not b // (B / Bb)",
        "s",
        "o is wrong in most batch entries; identities hold",
        "Give all entries the same bias: the comparison must turn healthy.",
        needs=several_entries,
        variants=_read_entries,
        demo=OWN,
    ),
    _pair(
        "pair-bias-columns",
        "tiles of keys read other columns of the pair bias: {detail}",
        "the offset of a tile's columns is left out, or moves on by another step than the keys",
        "s",
        "o is wrong from the second tile of keys on, and right where rows see the first one alone",
        "Run with one tile for all keys, or make all columns equal: the comparison must turn healthy.",
        needs=lambda call: call.pair_bias is not None and not call.varlen,
        variants=_columns,
        demo=DEMO | {"shape": (1, 2, 128, 32)},
    ),
    _pair(
        "pair-bias-scaled",
        "the pair {detail}",
        "the bias is added before the scores are scaled, or to logits of another base",
        "s",
        "o is wrong everywhere, or dpair_bias has a gain other than 1",
        "Set scale to 1: the comparison must turn healthy, if it was the scale.",
        variants=_scaled,
    ),
    _pair(
        "pair-bias-before-cap",
        "the pair bias is added before the soft cap, which bounds it too",
        "the order is cap(x + b) where it must be cap(x) + b",
        "s",
        "o is wrong where the bias is large",
        "Leave the soft cap out: the comparison must turn healthy.",
        needs=both(has("pair_bias"), capped),
        variants=lambda call: [in_both_halves({"dpair_bias": _dpair_bias_of_dx}, capped=_capped_with_it, s=_s_without_it)],
        demo={"spec": SPEC | {"softcap": 2.0}},
    ),
    _pair(
        "pair-bias-after-mask",
        "the pair bias is added after the mask: hidden pairs come back with the bias as their score",
        "scores are multiplied by the mask, and the bias is added to the product",
        "s",
        "o is wrong wherever a key is hidden",
        "Leave the mask out: the comparison must turn healthy.",
        needs=both(has("pair_bias"), hides),
        variants=lambda call: [in_both_halves(s=_s_unmasked, m=_m_all)],
        demo=CAUSAL,
    ),
    _pair(
        "pair-bias-not-summed",
        "the gradient of a shared pair bias is that of the {detail} alone",
        "the gradient is stored where it must be added to what others gave",
        "dpair_bias",
        "dpair_bias is too small and everything else is right",
        "Give each its own bias and sum the gradients by hand.",
        needs=both(has("pair_bias"), shared),
        variants=_not_summed,
    ),
    _pair(
        "pair-bias-rows",
        "the gradient of the pair bias has the share of {detail} only",
        "tiles of rows store their share over each other, or the last tiles are never added",
        "dpair_bias",
        "dpair_bias is 0, or too small, and everything else is right",
        "Set dO to 0 in those rows: dpair_bias must turn healthy.",
        variants=rows_of_tiles(_dpair_bias_of, "dpair_bias"),
        demo=DEMO | {"shape": (1, 2, 72, 32)},
    ),
    _pair(
        "pair-bias-gradient-unmasked",
        "the gradient of the pair bias is not masked: hidden pairs have one",
        "ds is formed from weights to which the mask was not applied",
        "dpair_bias",
        "dpair_bias is not 0 where no row may look; everything else is right",
        "Sum dpair_bias over hidden pairs: it must be 0.",
        needs=both(has("pair_bias"), hides),
        variants=lambda call: [Mutant(backward={"dpair_bias": _dpair_bias_unmasked})],
        demo=CAUSAL,
    ),
]
