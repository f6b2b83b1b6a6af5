"""The drawer of problems: every term is drawn, cut and checked by the table in `spec`, and one it does not know is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backlight.bench.workload import Workload
from backlight.cases import BY_NAME
from backlight.problems import draw, inputs
from backlight.problems.axes import AXES, Sizes, cut_call, tensors_of
from backlight.problems.case import BF16, FP64
from backlight.problems.checks import SHAPES
from backlight.spec import LEARNED, TERM_NAMES, AttentionSpec

EVERY_TERM = AttentionSpec(causal=True, bias_origin=3, **dict.fromkeys(TERM_NAMES, True))


def made(**settings):
    return inputs.make(EVERY_TERM, (2, 4, 20, 8), kv_heads=2, sk=30, dv=6, **settings)


def test_every_term_is_drawn_in_its_shape_and_dtype() -> None:
    call = made(dtype=BF16).call
    sizes = Sizes.of(call)
    assert tuple(tensors_of(call)) == LEARNED
    for name, x in tensors_of(call).items():
        # one pair bias for the whole batch
        assert x.shape == ((1, *sizes.shape(name)[1:]) if name == "pair_bias" else sizes.shape(name))
        assert x.dtype == draw.dtype_of(name, BF16)


def test_one_seed_gives_one_problem_everywhere() -> None:
    """The three who draw agree with themselves, and a case means the same whoever draws it."""
    case = BY_NAME["everything,batched,sq<sk"]
    for once, again in (
        (made(seed=3).call, made(seed=3).call),
        (case.make(FP64).call, case.make(FP64).call),
        (Workload(case, FP64).draw(torch.device("cpu")).call, Workload(case, FP64).draw(torch.device("cpu")).call),
    ):
        assert all(torch.equal(x, getattr(again, name)) for name, x in tensors_of(once).items())
    drawn, raced = case.make(FP64, margin=0.0).call, Workload(case, FP64).draw(torch.device("cpu")).call
    assert all(x.shape == getattr(raced, name).shape for name, x in tensors_of(drawn).items())
    assert torch.equal(drawn.tau, raced.tau)


def test_a_call_is_cut_along_all_its_axes() -> None:
    call = made().call
    part = cut_call(call, {"batch": slice(1), "heads": slice(2), "kv_heads": slice(1), "rows": slice(5), "keys": slice(7)})
    assert {name: tuple(x.shape) for name, x in tensors_of(part).items()} == {
        "q": (1, 2, 5, 8),
        "k": (1, 1, 7, 8),
        "v": (1, 1, 7, 6),
        "bias": (2, 18),
        "sink": (2,),
        "tau": (2,),
        "gate": (1, 2, 5, 6),
        "pair_bias": (1, 2, 5, 7),
        "entmax": (2,),
    }
    assert (part.rows.shape, part.pos.shape) == ((1, 2, 4, 7), (1, 5))


def test_shapes_are_told_as_the_table_has_them() -> None:
    learned = {"bias": "[Hq, n]", "sink": "[Hq]", "tau": "[Hq]", "gate": "[B, Hq, Sq, Dv]", "pair_bias": "[B, Hq, Sq, Sk]"}
    learned["entmax"] = "[Hq]"
    assert learned | {"rows": "[B, Hq, 2 or 4, Sk]", "pos": "[B, Sq]"} == SHAPES


def test_a_term_that_nobody_can_draw_is_refused() -> None:
    spec = SimpleNamespace(terms=("bias", "novelty"))
    assert draw.terms_to_draw(spec, ("novelty",)) == ("bias",)
    with pytest.raises(NotImplementedError, match="nothing is known about how to draw novelty"):
        draw.terms_to_draw(spec, ())


def test_a_term_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="no term is called 'novelty'; there are bias, sink, tau, gate"):
        made(novelty=torch.zeros(4))


def test_an_axis_of_unknown_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AXES, "novelty", ("heads", "colours"))
    with pytest.raises(NotImplementedError, match="novelty has an axis of colours"):
        Sizes.of(made().call).shape("novelty")
