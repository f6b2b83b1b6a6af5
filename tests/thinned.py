"""Of tests over products of parameters `make test` runs few, `make later` the others: each value of each parameter is seen here
as often as the list says, and all their combinations there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from zlib import crc32


class Seen(NamedTuple):
    """How often `make test` shows each value of each parameter, once more for each value of the parameter `each`."""

    times: int
    each: str = ""


ONCE, TWICE = Seen(1), Seen(2)
THINNED = {
    "tests/conformance/test_backends.py::test_case": Seen(1, each="backend"),
    "tests/conformance/test_layouts.py::test_expanded_do": Seen(4),
    "tests/conformance/test_layouts.py::test_layout_of_do": Seen(4),
    "tests/conformance/test_layouts.py::test_layout_of_inputs": Seen(4),
    "tests/conformance/test_tiles.py::test_tiled_with_any_tile": TWICE,
    "tests/derivatives/test_every_transform.py::test_refusals": Seen(4),
    "tests/derivatives/test_every_transform.py::test_second_values": Seen(4),
    "tests/derivatives/test_every_transform.py::test_values": Seen(4),
    "tests/doctor/test_no_false_alarm.py::test_public_call": ONCE,
    "tests/doctor/test_no_false_alarm.py::test_public_call_recipes": ONCE,
    "tests/doctor/test_no_false_alarm.py::test_sdpa": TWICE,
    "tests/doctor/test_sentences.py::test_16_bit_sums_are_named_at_full_whatever_the_length": ONCE,
    "tests/hopper/test_backward_terms.py::test_tiles": ONCE,
    "tests/hopper/test_emulated.py::test_backward_configs": TWICE,
    "tests/hopper/test_emulated.py::test_forward_configs": TWICE,
    "tests/hopper/test_emulated.py::test_tiles": ONCE,
    "tests/hopper/test_hopper_masks.py::test_both_directions": ONCE,
    "tests/hopper/test_keep_first_max.py::test_elastic": TWICE,
    "tests/hopper/test_keep_first_max.py::test_forward": TWICE,
    "tests/hopper/test_narrow.py::test_tiles": ONCE,
    "tests/hopper/test_short_rows.py::test_numbers": ONCE,
    "tests/hopper/test_terms.py::test_tiles": ONCE,
    "tests/integrations/test_transformers_families.py::test_checkpointed_layers": ONCE,
    "tests/integrations/test_transformers_families.py::test_generation": ONCE,
    "tests/mask/test_attention.py::test_any_tiles": ONCE,
    "tests/test_compile.py::test_opcheck_forward": ONCE,
    "tests/test_gate.py::test_correct_arithmetic_passes": ONCE,
    "tests/test_gate.py::test_defect_turns_it_red": ONCE,
    "tests/test_gate.py::test_one_value_that_is_not_finite": ONCE,
}


def left_out(tests: Iterable[tuple[str, Mapping[str, object]]], thinned: Mapping[str, Seen] = THINNED) -> set[str]:
    """Names of tests, of those given with their parameters, that can wait."""
    groups: dict[tuple[str, object], dict[str, set[str]]] = {}
    for name, values in tests:
        function = name.partition("[")[0]
        if function in thinned:
            each = thinned[function].each
            shown = {f"{parameter}={value!r}" for parameter, value in values.items() if parameter != each}
            assert not any(" at 0x" in value for value in shown), f"another process would choose otherwise: {name}"
            groups.setdefault((function, values.get(each)), {})[name] = shown
    return {name for (function, _), group in groups.items() for name in group.keys() - kept(group, thinned[function].times)}


def kept(tests: Mapping[str, set[str]], times: int) -> set[str]:
    """Names of few tests that show everything so often, or as often as all do: first those with the most that is missing."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    # no value is preferred for its place in the list, and every process finds the same
    order = sorted(tests, key=lambda name: crc32(" ".join(sorted(tests[name])).encode()))
    for missing in range(max(map(len, tests.values()), default=0), 0, -1):
        for name in order:
            if name not in found and sum(seen[each] < times for each in tests[name]) >= missing:
                found.add(name)
                seen.update(tests[name])
    return found
