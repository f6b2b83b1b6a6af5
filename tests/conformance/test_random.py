"""Compositions, lengths, head dimensions and tiles that nobody thought of, drawn by hypothesis, through the same gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from backlight import registry
from backlight.config import Config, override
from cases import BF16, FEATURES, FP16, FP32, FP64, Case, compatible, compose
from gate import judge
from running import run

length = st.integers(0, 40)
reach = st.none() | st.integers(0, 20)


@st.composite
def drawn_cases(draw) -> Case:
    features = draw(st.sets(st.sampled_from(sorted(FEATURES))).filter(compatible))
    case = compose(*sorted(features))
    hkv = draw(st.integers(1, 3))
    sizes = {
        "b": draw(st.integers(1, 3)),
        "hkv": hkv,
        "hq": hkv * draw(st.integers(1, 3)),
        "sq": draw(length),
        "sk": draw(length),
        "d": draw(st.integers(1, 20)),
        "dv": draw(st.integers(1, 20)),
    }
    if "window" in features:
        sizes["window"] = (draw(reach), draw(reach))
    if "bias" in features:
        sizes |= {"bias": draw(st.integers(1, 50)), "bias_origin": draw(st.integers(-10, 50))}
    if "tau" in features:
        sizes["tau"] = tuple(draw(st.lists(st.floats(-3, 3).map(lambda x: round(x, 2)), min_size=1, max_size=3)))
    if "varlen" in features:
        pairs = draw(st.lists(st.tuples(length, length), min_size=1, max_size=4))
        sizes |= {"lengths_q": tuple(a for a, _ in pairs), "lengths_k": tuple(b for _, b in pairs)}
    return replace(case, **sizes)


configs = st.none() | st.builds(
    Config, block_m=st.integers(1, 40), block_n=st.integers(1, 40), edge=st.integers(1, 40), heads=st.integers(1, 8)
)


DRAWN = given(
    case=drawn_cases(), dtype=st.sampled_from([FP32, FP32, BF16, FP16, FP64]), config=configs, seed=st.integers(0, 99)
)


@pytest.mark.parametrize("backend", registry.names())
@settings(max_examples=40)
@DRAWN
def test_drawn_case(backend: str, case: Case, dtype: torch.dtype, config: Config | None, seed: int) -> None:
    examine(backend, case, dtype, config, seed)


@pytest.mark.later
@pytest.mark.parametrize("backend", registry.names())
@settings(max_examples=120)
@DRAWN
def test_many_drawn_cases(backend: str, case: Case, dtype: torch.dtype, config: Config | None, seed: int) -> None:
    examine(backend, case, dtype, config, seed)


def examine(backend: str, case: Case, dtype: torch.dtype, config: Config | None, seed: int) -> None:
    problem = case.make(dtype, seed)
    if registry.why_not(registry.get(backend), problem.call):
        return
    if config is None or backend != "tiled":
        result = run(problem, backend)
    else:
        with override(backend, config):
            result = run(problem, backend)
    verdict = judge(problem.call, problem.dy, problem.dlse, result)
    note(str(verdict))
    assert verdict.ok
