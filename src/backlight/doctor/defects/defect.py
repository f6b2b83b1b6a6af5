"""One entry of the catalogue, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from backlight import intervals
from backlight.call import Call
from backlight.doctor.defects.mutants import Mutant

Variants = Callable[[Call], Iterable[Mutant]]
# what most demos ask for
CAUSAL: dict[str, Any] = {"spec": {"causal": True}}
CAUSAL_FULL = CAUSAL | {"level": "full"}
# a few tiles are enough for what goes wrong with tiles and rows
FEW_TILES: dict[str, Any] = {"shape": (1, 2, 72, 32)}
CAUSAL_TILES = CAUSAL | FEW_TILES


def _always(call: Call) -> bool:
    return True


@dataclass(frozen=True)
class Defect:
    """A way to be wrong. What a group of entries has in common stands once, in a `partial` above them.

    id:         stable name, used by reports, demos and tests.
    title:      the sentence shown; `{detail}` is filled from the variant that fits.
    does:       what the code does wrong, for the docs.
    stage:      the first quantity that is wrong; "p (bwd)" when only the backward's weights are.
    signal:     what shows first.
    next_check: one experiment that would prove the name false.
    family:     scale, transposition, masks, windows, alignment, tails, loops, varlen, gqa, heads, accumulation, memory, lse,
                delta, terms, precision, softcap, tangents, test.
    confirm:    what settles it.
    needs:      whether a call can show the defect at all.
    variants:   mutants to try on a call; None when only probes can show it, and then `broken` names the maker.
    fitted:     mutants from the gains that were measured, for families with a free constant; `variants` is then the demo.
    demo:       keyword arguments of `diagnose` that show it (spec fields under "spec").
    of_forward: o or lse is wrong wherever it shows, so that its many mutants need not be tried where both are right.
    """

    id: str
    title: str
    does: str
    stage: str
    signal: str
    next_check: str
    _: KW_ONLY
    family: str
    confirm: str = "mutant"
    needs: Callable[[Call], bool] = _always
    variants: Variants | None = None
    fitted: Callable[[Mapping[str, float], Call], Iterable[Mutant]] | None = None
    broken: str | None = None
    severity: str = "defect"
    demo: Mapping[str, Any] = field(default_factory=dict)
    of_forward: bool = False

    def candidates(self, call: Call, gains: Mapping[str, float] | None = None) -> list[Mutant]:
        """Mutants of this defect that make sense for the call and the measured gains."""
        if self.variants is None or not self.needs(call):
            return []
        found = self.variants(call) if self.fitted is None or gains is None else self.fitted(gains, call)
        return [mutant for mutant in found if call.entmax is None or not mutant.of_softmax]

    def sentence(self, mutant: Mutant | None = None) -> str:
        """The title with the variant's detail filled in."""
        return self.title.replace("{detail}", mutant.detail if mutant is not None else "...")


def always(*mutants: Mutant) -> Variants:
    """Variants that do not depend on the call."""
    return lambda call: mutants


# --- what a call must have -------------------------------------------------------------------------------------------------


def square(call: Call) -> bool:
    return call.q.shape[2] == call.k.shape[2]


def grouped(call: Call) -> bool:
    return call.group > 1


def ungrouped(call: Call) -> bool:
    return call.group == 1


def causal(call: Call) -> bool:
    return call.spec.right == 0


def masked(call: Call) -> bool:
    return call.spec.masked


def windowed(call: Call) -> bool:
    return call.spec.left is not None


def lengths_differ(call: Call) -> bool:
    return masked(call) and any(z.sq != z.sk for z in call.segments())


def several_heads(call: Call) -> bool:
    return call.q.shape[1] > 1


def several_kv_heads(call: Call) -> bool:
    return call.k.shape[1] > 1


def several_batches(call: Call) -> bool:
    return call.q.shape[0] > 1


def unpacked(call: Call) -> bool:
    return not call.varlen


def packed(call: Call) -> bool:
    return call.varlen and len(call.segments()) > 1


def keys_everywhere(call: Call) -> bool:
    """Whether there is a key in every segment, so that there is a largest score."""
    return all(segment.sk for segment in call.segments())


def plain_softmax(call: Call) -> bool:
    """Whether the weights of a row are a softmax of its scores alone, and there are some."""
    return call.sink is None and call.tau is None and call.entmax is None and keys_everywhere(call)


def has(term: str) -> Callable[[Call], bool]:
    return lambda call: getattr(call, term) is not None


def capped(call: Call) -> bool:
    return call.spec.softcap is not None


def both(*needs: Callable[[Call], bool]) -> Callable[[Call], bool]:
    return lambda call: all(need(call) for need in needs)


def empty_rows(call: Call) -> bool:
    return any(not bool(intervals.visible_heads(call, z).any(dim=-1).all()) for z in call.segments())


def negative_tau(call: Call) -> bool:
    return call.tau is not None and bool((call.tau < 0).any())


def positive_tau(call: Call) -> bool:
    return call.tau is not None and bool((call.tau > 0).any())
