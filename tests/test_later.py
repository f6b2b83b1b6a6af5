"""The lists of tests for later name tests that exist: a renamed one would come back into `make test` unseen."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from cases import CASES, Case
from later import LATER
from thinned import THINNED, Seen, asks_for, first_of_each, left_out

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", LATER)
def test_it_exists(name: str) -> None:
    file, function = name.split("::")
    assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text()


@pytest.mark.parametrize("name", THINNED)
def test_a_thinned_one_exists(name: str) -> None:
    file, function = name.split("::")
    assert f"def {function}(" in (ROOT / file).read_text()


def test_every_value_stays() -> None:
    values = {"case": range(7), "dtype": ["fp32", "bf16"], "late": [False, True]}
    every = {f"a.py::f[{each}]": dict(zip(values, each, strict=True)) for each in product(*values.values())}
    alone = {"b.py::g[0]": {"case": 0}, "b.py::h": {}}
    for times in (1, 2, 3):
        waiting = left_out([*every.items(), *alone.items()], {"a.py::f": Seen(times), "b.py::g": Seen(times)})
        assert waiting < every.keys()
        stays = [every[name] for name in every.keys() - waiting]
        assert len(stays) < 7 * times + 3
        for name, wanted in values.items():
            assert all(sum(each[name] == value for each in stays) >= times for value in wanted)


def test_what_is_named_apart_sees_every_value_in_the_same_tests() -> None:
    every = {f"a.py::f[{i}-{j}-{k}]": {"i": i, "j": j, "k": k} for i in range(3) for j in range(4) for k in range(5)}
    waiting = left_out(every.items(), {"a.py::f": Seen(1, each="i")})
    stays = [each for name, each in every.items() if name not in waiting]
    pairs = [{(each["j"], each["k"]) for each in stays if each["i"] == i} for i in range(3)]
    assert pairs[0] == pairs[1] == pairs[2]
    assert {j for j, _ in pairs[0]} == set(range(4))
    assert {k for _, k in pairs[0]} == set(range(5))


def test_what_a_case_asks_for() -> None:
    heads = {"hq", "hq above 0", "hq - hkv above 0"}
    assert asks_for(Case("plain")) == {"nothing", "sq - sk 0", "hq - hkv 0"}
    assert asks_for(Case("gqa", hq=4, tau=(-0.7, 0.4))) == {*heads, "sq - sk 0", "tau", "tau below 0", "tau above 0"}
    pair = {"pair_bias", "pair_bias rows", "pair_bias hidden"}
    assert asks_for(Case("pair", sk=9, pair_bias=("rows", "hidden"))) == {
        *pair, "sk", "sk above 0", "sq - sk above 0", "hq - hkv 0"
    }  # fmt: skip


@pytest.mark.parametrize("times", [1, 2, 4])
def test_everything_that_cases_ask_for_stays(times: int) -> None:
    every = {f"c.py::h[{case.name}]": {"case": case} for case in CASES}
    waiting = left_out(every.items(), {"c.py::h": Seen(times, asked=True)})
    assert len(waiting) > len(every) / 2
    stays = [asks_for(each["case"]) for name, each in every.items() if name not in waiting]
    asked = [asks_for(case) for case in CASES]
    for word in set().union(*asked):
        assert sum(word in each for each in stays) >= min(times, sum(word in each for each in asked)), word


def test_the_first_of_each_function() -> None:
    names = ["a.py::f[2]", "a.py::f[1]", "a.py::g", "b.py::f[2]", "a.py::ff[1-[x]]", "a.py::f[3]"]
    assert first_of_each(names) == {"a.py::f[2]", "a.py::g", "b.py::f[2]", "a.py::ff[1-[x]]"}
