"""Kernels that fit the examination and not the task: healthy at `quick`, found at level `adversarial`."""

from __future__ import annotations

import pytest
import torch

from backlight.doctor import Subject, diagnose
from backlight.doctor.steps import adversarial
from backlight.spec import AttentionSpec

SHAPE = (2, 2, 40, 16)
SETTINGS = {"shape": SHAPE, "dtype": torch.float32}


def right(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def knows_the_seed():
    first = []

    def fn(q, k, v):
        # the numbers of the first call of this shape, and their negatives
        known = [x for x in first if x.shape == v.shape]
        if not known:
            first.append(v.detach().abs().clone())
            return right(q, k, v)
        return right(q, k, v) if torch.equal(known[0], v.detach().abs()) else right(q, k, v) * 1.5

    return fn


def knows_the_shape():
    return lambda q, k, v: right(q, k, v) if q.shape[2] in (16, SHAPE[2]) else right(q, k, v) * 1.5


def counts_calls():
    calls = []

    def fn(q, k, v):
        calls.append(1)
        return right(q, k, v) * (1.5 if len(calls) > 25 else 1)

    return fn


def remembers_addresses():
    kept = {}

    def fn(q, k, v):
        where = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        if where in kept and kept[where][0] is q:
            return right(*kept[where][1])
        kept[where] = (q, [x.detach().clone().requires_grad_(x.requires_grad) for x in (q, k, v)])
        return right(q, k, v)

    return fn


def looks_at_the_first_numbers():
    kept = {}

    def fn(q, k, v):
        key = (q.shape, *(float(x.detach().flatten()[0]) for x in (q, k, v)))
        if key not in kept:
            kept[key] = v.detach().clone()
        return right(q, k, v - v.detach() + kept[key])

    return fn


GAMES = {
    knows_the_seed: ("other-inputs", "hidden seed"),
    knows_the_shape: ("other-shapes", "shapes never seen"),
    counts_calls: ("other-calls", "many calls"),
    remembers_addresses: ("cached-result", "other numbers in the same memory"),
    looks_at_the_first_numbers: ("cached-result", "one number changed"),
}


@pytest.mark.parametrize("make", GAMES)
def test_a_game_is_found_at_this_level_and_at_no_other(make):
    name, shown_by = GAMES[make]
    assert diagnose(Subject(make(), layout="BHSD"), AttentionSpec(), **SETTINGS).verdict == "healthy"
    report = diagnose(Subject(make(), layout="BHSD"), AttentionSpec(), level="adversarial", **SETTINGS)
    assert report.verdict == "defect"
    assert name in report.finding_ids
    assert shown_by in [probe.name for probe in report.probes if probe.passed is False]
    assert next(f for f in report.findings if f.id == name).next_check


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(causal=True, bias=True, sink=True)], ids=["plain", "terms"])
def test_a_kernel_without_tricks_is_healthy(spec):
    from backlight.doctor.defects import broken

    report = diagnose(broken.healthy(), spec, level="adversarial", **SETTINGS)
    assert report.verdict == "healthy", report.headline
    assert [f.severity for f in report.findings] in ([], ["note"])


def test_who_leaves_the_work_to_torch_is_told():
    report = diagnose(right, AttentionSpec(), level="adversarial", **SETTINGS)
    assert report.verdict == "healthy"
    assert report.finding_ids == ("computed-by-torch",)
    assert "scaled_dot_product" in report.findings[0].title


def test_shapes_and_seeds_are_never_the_same():
    from backlight.problems import inputs

    problem = inputs.make(AttentionSpec(), SHAPE)
    seeds = {adversarial.hidden(problem).seed for _ in range(5)}
    assert len(seeds) == 5
    shapes = [shape for _ in range(10) for shape, _ in adversarial.drawn_shapes(problem)]
    assert len({shape[2] for shape in shapes}) > 5
    assert {shape[3] for shape in shapes} == {SHAPE[3]}


def test_a_kernel_that_is_wrong_already_is_not_asked():
    report = diagnose(lambda q, k, v: 2 * right(q, k, v), AttentionSpec(), level="adversarial", **SETTINGS)
    asked = {probe.name: probe.passed for probe in report.probes}
    assert report.verdict == "defect"
    assert asked["hidden seed"] is None
    assert not set(report.finding_ids) & {"other-inputs", "other-shapes", "other-calls"}
