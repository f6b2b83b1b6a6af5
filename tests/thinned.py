"""Of tests over products of parameters `make test` runs few, `make later` the others: each value of each parameter is seen here
as often as the list says, and all their combinations there. Of a list of cases it may be each thing that a case asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import NamedTuple
from zlib import crc32


class Seen(NamedTuple):
    """How often `make test` shows each value of each parameter, once more for each value of the parameter `each`; with `asked`,
    of a case each thing that it asks for."""

    times: int
    each: str = ""
    asked: bool = False


ONCE, TWICE = Seen(1), Seen(2)
ASKED_ONCE, ASKED_TWICE = Seen(1, asked=True), Seen(2, asked=True)
THINNED = {
    "tests/bench/test_bench_peers.py::test_the_compiler_traces_flex_in_one_graph": ASKED_ONCE,
    "tests/conformance/test_backends.py::test_case": Seen(4, each="backend", asked=True),
    "tests/conformance/test_layouts.py::test_expanded_do": Seen(4),
    "tests/conformance/test_layouts.py::test_layout_of_do": Seen(4),
    "tests/conformance/test_layouts.py::test_layout_of_inputs": Seen(4),
    "tests/conformance/test_tiles.py::test_tiled_with_any_tile": ONCE,
    "tests/derivatives/test_every_transform.py::test_refusals": Seen(4),
    "tests/derivatives/test_every_transform.py::test_second_values": TWICE,
    "tests/derivatives/test_every_transform.py::test_values": Seen(4),
    "tests/derivatives/test_second.py::test_every_case_of_entmax": ASKED_ONCE,
    "tests/derivatives/test_tangent.py::test_every_case_of_entmax": ASKED_ONCE,
    "tests/distributed/test_ring_entmax.py::test_by_the_gate": ONCE,
    "tests/distributed/test_sharded_tangents.py::test_ring": ASKED_ONCE,
    "tests/distributed/test_simulated.py::test_ring": Seen(1, each="world", asked=True),
    "tests/doctor/test_no_false_alarm.py::test_public_call": ONCE,
    "tests/doctor/test_no_false_alarm.py::test_public_call_recipes": ONCE,
    "tests/doctor/test_no_false_alarm.py::test_sdpa": ONCE,
    "tests/doctor/test_sentences.py::test_16_bit_sums_are_named_at_full_whatever_the_length": ONCE,
    "tests/hopper/test_backward_terms.py::test_case": ASKED_TWICE,
    "tests/hopper/test_backward_terms.py::test_tiles": ONCE,
    "tests/hopper/test_emulated.py::test_backward_configs": ONCE,
    "tests/hopper/test_emulated.py::test_case": ASKED_TWICE,
    "tests/hopper/test_emulated.py::test_deterministic_tiles": ASKED_ONCE,
    "tests/hopper/test_emulated.py::test_forward_configs": ONCE,
    "tests/hopper/test_emulated.py::test_tiles": ONCE,
    "tests/hopper/test_entmax_emulated.py::test_blocks_without_a_weight_are_left_out": ONCE,
    "tests/hopper/test_entmax_emulated.py::test_case": ASKED_ONCE,
    "tests/hopper/test_entmax_emulated.py::test_configs": ONCE,
    "tests/hopper/test_entmax_emulated.py::test_tiles": ASKED_ONCE,
    "tests/hopper/test_hopper_masks.py::test_blocks_without_a_mask_come_first_where_their_maximum_is_kept": ONCE,
    "tests/hopper/test_hopper_masks.py::test_both_directions": ONCE,
    "tests/hopper/test_hopper_masks.py::test_case": ASKED_ONCE,
    "tests/hopper/test_hopper_masks.py::test_more_heads_interleave_where_few_tiles_live": ONCE,
    "tests/hopper/test_keep_first_max.py::test_elastic": ONCE,
    "tests/hopper/test_keep_first_max.py::test_forward": ONCE,
    "tests/hopper/test_narrow.py::test_tiles": ONCE,
    "tests/hopper/test_pair_members.py::test_tiles": ONCE,
    "tests/hopper/test_peaks.py::test_largest_logits": ASKED_ONCE,
    "tests/hopper/test_peaks.py::test_low_half": ONCE,
    "tests/hopper/test_second_emulated.py::test_configs": ONCE,
    "tests/hopper/test_short_rows.py::test_numbers": ONCE,
    "tests/hopper/test_tangent_emulated.py::test_configs": ONCE,
    "tests/hopper/test_terms.py::test_case": ASKED_TWICE,
    "tests/hopper/test_terms.py::test_tiles": ONCE,
    "tests/integrations/test_transformers_families.py::test_checkpointed_layers": ONCE,
    "tests/integrations/test_transformers_families.py::test_generation": ONCE,
    "tests/interpreted/test_columns.py::test_columns_apart": ONCE,
    "tests/interpreted/test_entmax_kernel.py::test_what_is_not_a_number_stays_one": ONCE,
    "tests/interpreted/test_extras_interpreted.py::test_largest_logits": ASKED_ONCE,
    "tests/interpreted/test_extras_interpreted.py::test_low_half": ASKED_ONCE,
    "tests/interpreted/test_live_tiles.py::test_every_visible_pair_is_visited": ONCE,
    "tests/interpreted/test_masks.py::test_every_term": ASKED_ONCE,
    "tests/interpreted/test_masks.py::test_tiles_that_are_not_square": ONCE,
    "tests/interpreted/test_masks.py::test_visible_keys_are_counted": ASKED_ONCE,
    "tests/interpreted/test_packed_documents.py::test_packed_is_the_same_as_intervals": ASKED_ONCE,
    "tests/interpreted/test_pair_tiles.py::test_every_form": ASKED_ONCE,
    "tests/interpreted/test_second_pairs.py::test_every_form": ASKED_ONCE,
    "tests/interpreted/test_tangent_kernel.py::test_fp32": ASKED_ONCE,
    "tests/interpreted/test_tangent_kernel.py::test_one_tangent": ONCE,
    "tests/interpreted/test_tangent_kernel.py::test_tau": ONCE,
    "tests/interpreted/test_tangent_kernel.py::test_tau_beside_everything": ONCE,
    "tests/interpreted/test_triton.py::test_a_key_seen_alone_weighs_one": ONCE,
    "tests/interpreted/test_triton.py::test_fp32": ASKED_TWICE,
    "tests/interpreted/test_triton.py::test_units_of_logits": ONCE,
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
            _, each, asked = thinned[function]
            given = {parameter: value for parameter, value in values.items() if parameter != each}
            shown = {f"{parameter}={word}" for parameter, value in given.items() for word in words(value, asked)}
            assert not any(" at 0x" in value for value in shown), f"another process would choose otherwise: {name}"
            groups.setdefault((function, values.get(each)), {})[name] = shown
    return {name for (function, _), group in groups.items() for name in group.keys() - kept(group, thinned[function].times)}


def words(value: object, asked: bool) -> set[str]:
    """What a test shows by a value: the value, or what the case asks for."""
    return asks_for(value) if asked and is_dataclass(value) else {repr(value)}


def asks_for(case: object) -> set[str]:
    """Fields that are not as usual, with the words and the signs in them; of lengths and heads, which are more."""
    found = set()
    for field in fields(case):  # type: ignore[arg-type]
        given = getattr(case, field.name)
        if is_dataclass(given):
            found |= asks_for(given)
        elif field.name not in ("name", "dtypes") and given != field.default and not callable(given):
            found |= {field.name, *(f"{field.name} {part}" for part in parts(given))}
    found = found or {"nothing"}
    if hasattr(case, "sq"):
        found |= {f"sq - sk {sign(case.sq - case.sk)}", f"hq - hkv {sign(case.hq - case.hkv)}"}
    return found


def parts(value: object) -> set[str]:
    if isinstance(value, (tuple, list, dict)):
        return set().union(*map(parts, value))
    return {value} if isinstance(value, str) else {sign(value)} if isinstance(value, (int, float)) else set()


def sign(number: float) -> str:
    return "below 0" if number < 0 else "above 0" if number > 0 else "0"


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


def first_of_each(names: Iterable[str]) -> set[str]:
    """Of each function the first name, whatever its parameters."""
    firsts: dict[str, str] = {}
    for name in names:
        firsts.setdefault(name.partition("[")[0], name)
    return set(firsts.values())
