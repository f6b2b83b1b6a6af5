"""ALiBi's slopes by the wrong rule: every head has its bias times a number of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import Defect, both, has, several_heads
from backlight.doctor.defects.mutants import Mutant, Outputs, after, with_call


def _powers(count: int, exponent: float, start: int = 1) -> Tensor:
    """2 ** (-exponent (h + start) / count) for `count` heads."""
    return torch.tensor([2.0 ** (-exponent * (h + start) / count) for h in range(count)], dtype=torch.float64)


def paper(heads: int) -> Tensor:
    """ALiBi's own: those of the power of two below, then every second one of twice that power."""
    below = 2 ** math.floor(math.log2(heads))
    return torch.cat([_powers(below, 8), _powers(2 * below, 8)[::2][: heads - below]])


def rules(heads: int) -> dict[str, Tensor]:
    """Slopes [heads] that are made by another rule than the paper's."""
    below, above = 2 ** math.floor(math.log2(heads)), 2 ** math.ceil(math.log2(heads))
    rest = heads - below
    first, twice = _powers(below, 8), _powers(2 * below, 8)
    found = {
        "the rule for powers of two, for any number of heads": _powers(heads, 8),
        f"those of the first of {above} heads": _powers(above, 8)[:heads],
        f"those of {above} heads, every second one first": torch.cat([_powers(above, 8)[1::2], _powers(above, 8)[::2]])[:heads],
        "exponents that begin at 0": torch.cat([_powers(below, 8, 0), _powers(2 * below, 8, 0)[::2][:rest]]),
        f"the second half begun at the second of {2 * below}": torch.cat([first, twice[1::2][:rest]]),
        f"the second half without steps of two, from {2 * below} heads": torch.cat([first, twice[:rest]]),
        "the reverse order of heads": paper(heads).flip(0),
    }
    return found


def _slopes(call: Call) -> list[Mutant]:
    right, found = paper(call.q.shape[1]), []
    for words, slopes in rules(call.q.shape[1]).items():
        if torch.allclose(slopes, right):
            continue
        factors = (slopes / right)[:, None].to(call.q.device)
        seen = with_call(bias=_times(factors))

        def scaled(outputs: Outputs, _: Call, factors: Tensor = factors) -> Tensor:
            return outputs["dbias"] * factors

        found.append(Mutant(sees=seen, finish=after(dbias=scaled), detail=words))
        found.append(Mutant(sees=seen, sees_backward=with_call(bias=_times(1 / factors)), detail=f"{words}, in the forward"))
        found.append(Mutant(sees_backward=seen, detail=f"{words}, in the backward"))
    return found


def _times(factors: Tensor) -> Callable[[Call], Tensor]:
    def bias(call: Call) -> Tensor:
        assert call.bias is not None
        return call.bias.double() * factors

    return bias


DEFECTS = [
    partial(Defect, family="terms", needs=both(has("bias"), several_heads))(
        "bias-slopes",
        "ALiBi's slopes follow another rule, so the bias of each head is off by a factor of its own: {detail}",
        "numbers of heads that are no power of two take every second slope of twice the power below; others count from 1",
        "s",
        "o is wrong in some heads or in all; the logarithm of the weights is off in proportion to the distance",
        "Run with a number of heads that is a power of two, or print the slopes beside those of backlight.alibi.",
        variants=_slopes,
        demo={"spec": {"causal": True, "bias": True}, "shape": (1, 6, 72, 32)},
    )
]
