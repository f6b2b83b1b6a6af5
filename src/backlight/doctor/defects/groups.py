"""Which key/value head a query head reads, by other rules than in blocks or in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, Defect, Variants, both, several_heads, several_kv_heads, unpacked
from backlight.doctor.defects.mutants import Mutant, Outputs, with_call

# (query head, group) -> key/value head
Map = Callable[[int, int], int]
# query heads that one program takes
AT_ONCE = (2, 3, 4, 8, 16)


def _in_tiles(count: int) -> Map:
    return lambda h, group: h // count * count // group


def _maps(call: Call) -> Iterator[tuple[Map, str]]:
    kv_heads = call.k.shape[1]
    for count in AT_ONCE if call.group > 1 else ():
        yield (
            _in_tiles(count),
            f"of the first of {count} that are taken together: a tile of heads crosses the border of a group",
        )
    yield lambda h, group: 0, "0, all of them"
    yield lambda h, group: h // kv_heads % kv_heads, "h div Hkv"
    yield lambda h, group: h % group % kv_heads, "h mod G"
    yield lambda h, group: min(h, kv_heads - 1), "h, and the last one where there is no such head"
    yield lambda h, group: (h // group + 1) % kv_heads, "after their own"
    yield lambda h, group: (h // group - 1) % kv_heads, "before their own"


def _others(of: Callable[[Call, Map, str], list[Mutant]]) -> Variants:
    """Maps that are neither the right one nor h mod Hkv, which has a name of its own, each once."""

    def variants(call: Call) -> list[Mutant]:
        heads, group, kv_heads = range(call.q.shape[1]), call.group, call.k.shape[1]
        known, found = [[h // group for h in heads], [h % kv_heads for h in heads]], []
        for of_head, words in _maps(call):
            at = [of_head(h, group) for h in heads]
            if at not in known:
                known.append(at)
                found += of(call, of_head, words)
        return found

    return variants


def _everywhere(call: Call, of_head: Map, words: str) -> list[Mutant]:
    return [
        Mutant(kv_forward=of_head, kv_backward=of_head, detail=words),
        Mutant(kv_forward=of_head, detail=f"{words}; the backward reads the right one"),
        replace(_stored_at_home(call, of_head, words), sees_backward=Mutant().sees_backward),
    ]


def _in_backward(call: Call, of_head: Map, words: str) -> list[Mutant]:
    other = _stored_at_home(call, of_head, words)

    def right(call: Call) -> Call:
        return _expanded(call, _in_blocks)

    return [Mutant(kv_backward=of_head, detail=words), replace(other, sees=right)]


def _in_blocks(h: int, group: int) -> int:
    return h // group


def _expanded(call: Call, of_head: Map) -> Call:
    """The call with a key/value head for every query head."""
    at = [of_head(h, call.group) for h in range(call.q.shape[1])]
    return with_call(k=lambda c: c.k[:, at], v=lambda c: c.v[:, at])(call)


def _stored_at_home(original: Call, of_head: Map, words: str) -> Mutant:
    """k and v of another head; dk and dv go to the head that should have been read."""

    def other(_: Call) -> Call:
        return _expanded(original, of_head)

    def summed(outputs: Outputs, call: Call) -> Outputs:
        sums = {name: outputs[name].unflatten(1, (-1, call.group)).sum(dim=2) for name in ("dk", "dv") if name in outputs}
        return outputs | sums

    return Mutant(sees=other, sees_backward=other, finish=summed, detail=words)


_map = partial(
    Defect, family="gqa", needs=both(several_heads, several_kv_heads, unpacked), demo=CAUSAL | {"shape": (1, 6, 72, 32)}
)
DEFECTS = [
    _map(
        "kv-other-head",
        "query heads h read the key/value head {detail}",
        "the number of the key/value head is formed from that of a program, or divided by another count than the group's",
        "s",
        "o is wrong in some query heads, and right with the keys and values of another head",
        "Make k and v equal in all heads: the comparison must turn healthy.",
        variants=_others(_everywhere),
        of_forward=True,
        demo=CAUSAL | {"shape": (1, 6, 72, 32), "kv_heads": 2},
    ),
    _map(
        "kv-other-head-backward",
        "in the backward query heads h read the key/value head {detail}, in the forward the right one",
        "the backward forms the number of the key/value head by another rule than the forward",
        "p (bwd)",
        "I1, I2 and I3 fail; o is fine",
        "Make k and v equal in all heads: the comparison must turn healthy.",
        variants=_others(_in_backward),
        demo=CAUSAL | {"shape": (1, 6, 72, 32), "kv_heads": 2},
    ),
]
