"""Kernels that compute in e4m3 and do it wrong: scales, turns, means, weights, sums. Mutants are of the 8-bit way (`e4m3`).

These are tried where a call is judged as one of 8 bits, and there before everything else: they reproduce the rounding itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import pad

from backlight.call import Call
from backlight.doctor.defects.defect import Defect, Variants
from backlight.doctor.defects.e4m3 import REFUSED, Manner
from backlight.quantising import BLOCK, GROUP, in_order, in_register_order

FAMILY = "eight bits"
QUICK = {"precision": "fp8", "shape": (2, 2, 72, 64)}
FULL = QUICK | {"level": "full"}


def possible(call: Call) -> bool:
    return call.k.shape[2] > 0 and all(getattr(call, name) is None for name in REFUSED)


def _manners(*manners: tuple[str, Manner]) -> Variants:
    found = [manner.mutant(detail) for detail, manner in manners]
    return lambda call: found


def _descaled(name: str, power: int) -> Callable[[str, Tensor], Tensor]:
    return lambda x, scale: scale**power if x == name else scale


def _of_next_block(name: str) -> Callable[[str, Tensor], Tensor]:
    return lambda x, scale: scale.roll(-BLOCK, 2) if x == name and scale.shape[2] > BLOCK else scale


def _of_column(away: int) -> Callable[[str, Tensor], Tensor]:
    return lambda x, scale: scale.roll(away, 3) if x == "v" else scale


def _ordered(order: Callable[[Tensor], Tensor]) -> Manner:
    """The keys of v in the order of registers, met by weights that lie in the order of keys; or the other way round."""

    def mixed(v: Tensor) -> Tensor:
        whole = pad(v, (0, 0, 0, -v.shape[2] % GROUP))
        return order(whole.mT).mT[:, :, : v.shape[2]]

    return Manner(order=mixed)


_wrong = partial(Defect, family=FAMILY, confirm="an 8-bit mutant that has the same numbers", needs=possible, demo=QUICK)
_shown_by_inputs = partial(_wrong, demo=FULL)
_coarse = partial(_shown_by_inputs, severity="precision")

DEFECTS = [
    _wrong(
        "e4m3-descale",
        "{detail} in e4m3",
        "what was divided by a scale before it was rounded is not multiplied by it afterwards, or twice",
        "s",
        "o or the scores are off by a power of two, which differs from block to block or from column to column",
        "Set that scale to 1 on inputs of size 1: the comparison must turn healthy.",
        variants=_manners(
            *(
                (f"the scale of {name} is {words}", Manner(used=_descaled(name, power)))
                for name in ("v", "q", "k")
                for power, words in ((0, "forgotten after the product"), (2, "multiplied in twice"))
            )
        ),
    ),
    _wrong(
        "e4m3-turned-once",
        "{detail} is turned by the Hadamard matrix and the other is not: scores are of two bases",
        "one of the two passes that quantise leaves the turn out, or uses another sign",
        "s",
        "scores have no relation to q k; v and the masks are right",
        "Leave the turn out of both: the comparison must turn healthy.",
        variants=_manners(("q", Manner(turned=(True, False))), ("k", Manner(turned=(False, True)))),
    ),
    _wrong(
        "e4m3-mean-lost",
        "lse lacks what centring the keys took off: scale q . (mean of k)",
        "the mean of the keys is subtracted before they are rounded and not given back to lse",
        "lse",
        "o is right; lse is off by a number that is linear in q",
        "Add scale q . (mean of k) to lse: it must turn healthy.",
        variants=_manners(("", Manner(returned=False))),
    ),
    _wrong(
        "e4m3-v-order",
        "the product with v meets its keys in another order than the weights: inside every sixteen they are permuted",
        "v is stored in the order of registers and the weights are not, or the other way round",
        "o",
        "o is wrong and lse right; a v that is equal in every sixteen keys hides it",
        "Make v equal in every sixteen keys: o must turn healthy.",
        variants=_manners(("", _ordered(in_register_order)), ("", _ordered(in_order))),
    ),
    _shown_by_inputs(
        "e4m3-scale-neighbour",
        "{detail} is multiplied by the scale of the next block",
        "the index of a scale counts tiles of another size, or from another start",
        "s",
        "right where all blocks are of one size; wrong by powers of two where they differ",
        "Give all blocks the scale of the largest: the comparison must turn healthy.",
        variants=_manners(*((name, Manner(used=_of_next_block(name))) for name in ("k", "q"))),
    ),
    _shown_by_inputs(
        "e4m3-scale-channel",
        "columns of o have the scale of another column of v",
        "the scales of the columns of v are shifted, or those of another head",
        "o",
        "right where all columns of v are of one size; columns are wrong by powers of two where they differ",
        "Give all columns of v the scale of the largest: the comparison must turn healthy.",
        variants=_manners(*(("", Manner(used=_of_column(away))) for away in (-1, 1))),
    ),
    _wrong(
        "e4m3-static-scales",
        "scales do not follow the inputs: q times 2^8 beside k over 2^8 gives another o",
        "q, k or v are cast with a fixed scale, or with one of another call",
        "s",
        "right on inputs of the size that was expected; larger ones saturate at 448, smaller ones flush to 0",
        "Divide by the largest |x| of each block or head: the bits of o must stay.",
        confirm="a change of units that no 8-bit float notices",
        variants=_manners(("", Manner(static=1.0))),
    ),
    _coarse(
        "e4m3-unturned",
        "q and k are rounded as they are: a column of outliers takes the bits of the others",
        "no Hadamard matrix spreads outliers over all columns before q and k are rounded",
        "s",
        "fine on even inputs; coarser where a column stands out",
        "Turn q and k by one signed Hadamard matrix: rho_B on --recipe outliers must fall to about 1.",
        severity="note",
        variants=_manners(
            *(
                ("", Manner(group, turned=(False, False), centred=centred))
                for group in ("block", "head")
                for centred in (True, False)
            )
        ),
    ),
    _coarse(
        "e4m3-one-scale",
        "one scale for {detail}: beside outliers everything else is coarse",
        "the largest number anywhere decides how all are rounded; small ones lose bits or flush to 0",
        "s",
        "fine on even inputs; coarser than scales of blocks where one head or block is much larger than the rest",
        "Give every block of 128 rows, or at least every head, its own scale: rho_B must fall to about 1.",
        variants=_manners(
            ("the whole tensor", Manner("tensor")),
            ("the whole tensor", Manner("tensor", turned=(False, False))),
            ("the whole tensor", Manner("tensor", turned=(False, False), centred=False)),
            ("all heads of a batch entry", Manner("entry")),
            ("all heads of a batch entry", Manner("entry", turned=(False, False), centred=False)),
        ),
    ),
    _coarse(
        "e4m3-not-centred",
        "keys are rounded with their mean: a common offset takes the bits that tell keys apart",
        "the mean of the keys, which changes no weight, is not taken off before they are rounded",
        "s",
        "fine where keys have no common part; coarse where they have",
        "Subtract the mean of the keys and add scale q . mean to lse: rho_B must fall to about 1.",
        variants=_manners(("", Manner(centred=False)), ("", Manner("head", centred=False))),
    ),
    _coarse(
        "e4m3-p-unscaled",
        "weights up to 1 are rounded as they are: those below 2^-9 of the largest flush to 0",
        "p is cast to e4m3 without the factor 2^8 that its range has room for",
        "p",
        "one dominant key takes all: what the others weigh together is lost",
        "Round 256 p and divide by 256 with the sum: rho_B must fall to about 1.",
        variants=_manners(*(("", Manner(group, headroom=0.0)) for group in ("block", "head"))),
    ),
    _coarse(
        "e4m3-sum-cut",
        "o shrinks with the number of keys: its sum is left in the 8-bit product's own accumulator",
        "the accumulator of 8-bit products keeps 13 bits; it is never moved to fp32",
        "o",
        "with v near 1 the error of o has one sign and grows with the number of keys",
        "Add the product of every 128 keys to fp32 registers: the drift must fall below 1e-6 per key.",
        confirm="growth (eq. 99, 106)",
        variants=_manners(("", Manner(cut=True))),
    ),
]
