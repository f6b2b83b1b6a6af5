"""Arguments, words and report files by chance: refused in one sentence, or understood; never anything else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from report_samples import healthy, window_defect

from backlight.doctor import diagnose
from backlight.doctor.command import options
from backlight.doctor.report import json as report_json
from backlight.spec import AttentionSpec

COUNTS = st.sampled_from([None, -1, 0, 1, 2, 3, 4, True, 1.0, "2"])


def begun(q, k, v):
    raise LookupError("begun")


def attempt(do: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives, or the sentence it was refused with; anything else is an error of the test's."""
    try:
        return do(), ""
    except (ValueError, TypeError) as error:
        return None, str(error)


def good(count: Any) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1


@given(st.lists(COUNTS, min_size=3, max_size=5), COUNTS, COUNTS, COUNTS, COUNTS)
@settings(max_examples=100, deadline=None)
def test_diagnose_begins_or_says_why_not(shape, kv_heads, sk, dv, seed):
    """The rules written down a second time: every size a positive int, query heads a multiple of key/value heads."""
    fine = len(shape) == 4 and all(map(good, shape)) and all(count is None or good(count) for count in (kv_heads, sk, dv))
    fine = fine and (good(seed) or seed == 0) and not isinstance(seed, bool) and shape[1] % (kv_heads or shape[1]) == 0
    arguments: dict[str, Any] = {"shape": tuple(shape), "kv_heads": kv_heads, "sk": sk, "dv": dv, "seed": seed}
    report, refused = attempt(lambda: diagnose(begun, AttentionSpec(), dtype=torch.float32, **arguments))
    assert fine == (report is not None), refused
    if report is not None:
        assert report.headline.startswith("LookupError: begun (")
    else:
        assert "got" in refused
        assert "\n" not in refused


WORDS = st.one_of(st.text(max_size=6), st.from_regex(r"-?\d{1,3}(,-?\d{1,3}){0,4}", fullmatch=True))


@given(WORDS)
@settings(max_examples=150)
def test_words_become_values_or_a_sentence(word):
    for name, read in {
        "--window": options.pair,
        "--shape": lambda text: options.sizes("--shape", text, 4),
        "--lengths": lambda text: options.sizes("--lengths", text),
        "--sk": lambda text: options.whole("--sk", text),
        "--tau": lambda text: options.number("--tau", text),
        "--entmax": lambda text: options.number("--entmax", text),
        "--level": lambda text: options.one_of("--level", text, options.LEVELS),
    }.items():
        _, refused = attempt(lambda read=read: read(word))
        assert not refused or (refused.startswith(name) and repr(word) in refused)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2), st.text(max_size=3), st.sampled_from([[], {}, [1], {"x": 1}, [None], "NaN"])
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    steps = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for step, inner in steps:
        found += places(inner, (*path, step))
    return found


SAMPLE = window_defect().to_dict()


@given(st.sampled_from(places(SAMPLE)), JUNK, st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_report_changed_by_hand_is_refused_or_compared(path, junk, gone):
    data = copy.deepcopy(SAMPLE)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    if gone:
        del place[path[-1]]
    else:
        place[path[-1]] = junk
    report, refused = attempt(lambda: report_json.loads(json.dumps(data)))
    if report is None:
        assert refused
        assert "\n" not in refused
        return
    for old, new in ((report, healthy()), (healthy(), report), (report, window_defect())):
        assert report_json.compare(old, new).exit_code in (0, 1)
