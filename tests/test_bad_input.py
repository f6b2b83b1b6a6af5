"""Bad input gets one sentence that names the argument, what came and what was expected; and nothing is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import backlight
from backlight import registry

HEADS, KV_HEADS, LENGTH, KEYS, D, DV = 4, 2, 6, 7, 8, 5


def q(*shape: int) -> Tensor:
    return torch.zeros(shape or (2, HEADS, LENGTH, D))


def k(*shape: int) -> Tensor:
    return torch.zeros(shape or (2, KV_HEADS, KEYS, D))


def v(*shape: int) -> Tensor:
    return torch.zeros(shape or (2, KV_HEADS, KEYS, DV))


def cu(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.fixture
def nothing_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products fail the test, and so does a kernel that comes to its end. Values of cu_seqlens are read by the backend,
    because reading them waits for the device; that must happen before any arithmetic."""

    def multiplied(*args: object, **kwargs: object) -> None:
        pytest.fail("something was computed on bad input")

    for owner, names in ((torch, ("bmm", "matmul", "baddbmm")), (torch.Tensor, ("bmm", "matmul", "__matmul__", "baddbmm_"))):
        for name in names:
            monkeypatch.setattr(owner, name, multiplied)
    for backend in registry.names():
        kind = type(registry.get(backend))
        monkeypatch.setattr(kind, "forward", _must_raise(kind.forward))


def _must_raise(forward: Callable) -> Callable:
    def forward_until_it_raises(*args: object, **kwargs: object) -> None:
        forward(*args, **kwargs)
        pytest.fail("a kernel ran on bad input")

    return forward_until_it_raises


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.zeros(3, D), torch.zeros(4, D)])
GOOD = {"q": q(), "k": k(), "v": v()}
PACKED = {
    "q": q(6, HEADS, D),
    "k": k(9, KV_HEADS, D),
    "v": v(9, KV_HEADS, DV),
    "cu_seqlens_q": cu(0, 2, 6),
    "cu_seqlens_k": cu(0, 4, 9),
}

# change to a good call -> the error and what its message must say
BATCHED_ERRORS = {
    "q is a list": ({"q": [[1.0]]}, TypeError, ["q must be", "Tensor", "list"]),
    "q is None": ({"q": None}, TypeError, ["q must be", "Tensor", "NoneType"]),
    "v is a float": ({"v": 3.0}, TypeError, ["v must be", "Tensor", "float"]),
    "q has three dimensions": ({"q": q(HEADS, LENGTH, D)}, ValueError, ["q must", "4 dimensions", "[B, H, S, D]", "(4, 6, 8)"]),
    "k has five dimensions": ({"k": k(1, 2, KV_HEADS, KEYS, D)}, ValueError, ["k must", "4 dimensions", "(1, 2, 2, 7, 8)"]),
    "v has two dimensions": ({"v": v(KEYS, DV)}, ValueError, ["v must", "4 dimensions", "(7, 5)"]),
    "heads do not divide": ({"q": q(2, 3, LENGTH, D)}, ValueError, ["heads of q", "multiple", "3", "2"]),
    "more heads in k than in q": ({"q": q(2, 1, LENGTH, D)}, ValueError, ["heads of q", "multiple", "1", "2"]),
    "k and v differ in heads": ({"v": v(2, 4, KEYS, DV)}, ValueError, ["v must", "heads of k", "2", "4"]),
    "no heads": ({"q": q(2, 0, LENGTH, D)}, ValueError, ["q", "at least one head", "0"]),
    "batch of k": ({"k": k(3, KV_HEADS, KEYS, D)}, ValueError, ["k must", "batch", "2", "3"]),
    "batch of v is 1": ({"v": v(1, KV_HEADS, KEYS, DV)}, ValueError, ["v must", "batch", "2", "1"]),
    "head dimension of k": ({"k": k(2, KV_HEADS, KEYS, 9)}, ValueError, ["k must", "head dimension", "8", "9"]),
    "length of v": ({"v": v(2, KV_HEADS, 8, DV)}, ValueError, ["v must", "length of k", "7", "8"]),
    "head dimension 0": (
        {"q": q(2, HEADS, LENGTH, 0), "k": k(2, KV_HEADS, KEYS, 0)},
        ValueError,
        ["head dimension", "at least 1", "0"],
    ),
    "value dimension 0": ({"v": v(2, KV_HEADS, KEYS, 0)}, ValueError, ["head dimension", "at least 1", "0"]),
    "integer q": ({"q": q().int(), "k": k().int(), "v": v().int()}, TypeError, ["q must be", "fp32", "int32"]),
    "boolean q": ({"q": q().bool()}, TypeError, ["q must be", "fp32", "bool"]),
    "complex q": ({"q": q().to(torch.complex64)}, TypeError, ["q must be", "fp32", "complex64"]),
    "q is nested": ({"q": NESTED}, TypeError, ["q must be", "dense", "nested", "attention_varlen"]),
    "v is nested": ({"v": NESTED}, TypeError, ["v must be", "dense", "nested", "attention_varlen"]),
    "heads after rows": (
        {"q": q(2, LENGTH, HEADS, D), "k": k(2, KEYS, KV_HEADS, D), "v": v(2, KEYS, KV_HEADS, DV)},
        ValueError,
        ["6 and 7", "[B, H, S, D]"],
    ),
    "dtype of k": ({"k": k().half()}, TypeError, ["k must", "dtype of q", "float32", "float16"]),
    "dtype of v": ({"v": v().double()}, TypeError, ["v must", "dtype of q", "float32", "float64"]),
    "device of k": ({"k": k().to("meta")}, ValueError, ["k must", "device of q", "cpu", "meta"]),
    "device of v": ({"v": v().to("meta")}, ValueError, ["v must", "device of q", "cpu", "meta"]),
    "bias has the wrong heads": ({"bias": torch.zeros(KV_HEADS, 9)}, ValueError, ["bias must", "[4, n]", "(2, 9)"]),
    "bias is dense": ({"bias": torch.zeros(HEADS, LENGTH, KEYS)}, ValueError, ["bias must", "[4, n]", "(4, 6, 7)"]),
    "bias has one dimension": ({"bias": torch.zeros(9)}, ValueError, ["bias must", "[4, n]", "(9,)"]),
    "bias is empty": ({"bias": torch.zeros(HEADS, 0)}, ValueError, ["bias must", "n >= 1", "(4, 0)"]),
    "bias is an integer table": ({"bias": torch.zeros(HEADS, 9).long()}, TypeError, ["bias must", "floating", "int64"]),
    "bias is a list": ({"bias": [[0.0]]}, TypeError, ["bias must", "Tensor", "list"]),
    "bias on another device": (
        {"bias": torch.zeros(HEADS, 9, device="meta")},
        ValueError,
        ["bias must", "device", "cpu", "meta"],
    ),
    "bias_origin is a float": (
        {"bias": torch.zeros(HEADS, 9), "bias_origin": 1.5},
        TypeError,
        ["bias_origin must", "int", "1.5"],
    ),
    "tau is a float": ({"tau": -0.5}, TypeError, ["tau must", "Tensor", "float"]),
    "tau per kv head": ({"tau": torch.zeros(KV_HEADS)}, ValueError, ["tau must", "(4,)", "(2,)"]),
    "tau is a scalar": ({"tau": torch.zeros(())}, ValueError, ["tau must", "(4,)", "()"]),
    "tau is a column": ({"tau": torch.zeros(HEADS, 1)}, ValueError, ["tau must", "(4,)", "(4, 1)"]),
    "tau of integers": ({"tau": torch.zeros(HEADS).long()}, TypeError, ["tau must", "floating", "int64"]),
    "sink per kv head": ({"sink": torch.zeros(KV_HEADS)}, ValueError, ["sink must", "(4,)", "(2,)"]),
    "sink is a float": ({"sink": 0.0}, TypeError, ["sink must", "Tensor", "float"]),
    "sink on another device": ({"sink": torch.zeros(HEADS, device="meta")}, ValueError, ["sink must", "device", "cpu", "meta"]),
    "gate like q, not like the output": ({"gate": q()}, ValueError, ["gate must", "(2, 4, 6, 5)", "(2, 4, 6, 8)"]),
    "gate per head": ({"gate": torch.zeros(HEADS)}, ValueError, ["gate must", "(2, 4, 6, 5)", "(4,)"]),
    "gate of another dtype": (
        {"gate": torch.zeros(2, HEADS, LENGTH, DV).half()},
        TypeError,
        ["gate must", "float32", "float16"],
    ),
    "gate is a number": ({"gate": 1.0}, TypeError, ["gate must", "Tensor", "float"]),
    "window is a number": ({"window": 5}, ValueError, ["window must", "pair", "5"]),
    "window has three entries": ({"window": (1, 2, 3)}, ValueError, ["window must", "pair", "(1, 2, 3)"]),
    "window is negative": ({"window": (-1, 0)}, ValueError, ["window left", ">= 0", "-1"]),
    "window right is negative": ({"window": (3, -2)}, ValueError, ["window right", ">= 0", "-2"]),
    "window of floats": ({"window": (1.5, 0)}, TypeError, ["window left", "int", "1.5"]),
    "window is a string": ({"window": "ab"}, (TypeError, ValueError), ["window", "ab"]),
    "softcap is zero": ({"softcap": 0.0}, ValueError, ["softcap must", "> 0", "0.0"]),
    "softcap is negative": ({"softcap": -30}, ValueError, ["softcap must", "> 0", "-30"]),
    "softcap is nan": ({"softcap": float("nan")}, ValueError, ["softcap must", "finite", "nan"]),
    "softcap is a string": ({"softcap": "30"}, TypeError, ["softcap must", "number", "str"]),
    "scale is infinite": ({"scale": float("inf")}, ValueError, ["scale must", "finite", "inf"]),
    "scale is a tensor": ({"scale": torch.tensor(0.5)}, TypeError, ["scale must", "number", "Tensor"]),
    "causal is a tensor": ({"causal": torch.ones(2, 2)}, TypeError, ["causal must", "bool"]),
    "causal is a string": ({"causal": "yes"}, TypeError, ["causal must", "bool", "str"]),
    "deterministic is a string": ({"deterministic": "yes"}, TypeError, ["deterministic must", "bool", "yes"]),
    "backend is unknown": ({"backend": "cuda"}, ValueError, ["backend must", "tiled", "cuda"]),
    "backend is empty": ({"backend": ""}, ValueError, ["backend must", "tiled", "''"]),
    "backend is not a name": ({"backend": 3}, (TypeError, ValueError), ["backend must", "tiled", "3"]),
}

PACKED_ERRORS = {
    "q has four dimensions": ({"q": q()}, ValueError, ["q must", "3 dimensions", "[T, H, D]", "(2, 4, 6, 8)"]),
    "gate has four dimensions": ({"gate": q()}, ValueError, ["gate must", "3 dimensions", "(2, 4, 6, 8)"]),
    "gate like q": ({"gate": q(6, HEADS, D)}, ValueError, ["gate must", "(6, 4, 5)", "(6, 4, 8)"]),
    "k and v differ in length": ({"v": v(8, KV_HEADS, DV)}, ValueError, ["v must", "length of k", "9", "8"]),
    "cu_seqlens_q is a list": ({"cu_seqlens_q": [0, 2, 6]}, TypeError, ["cu_seqlens_q must", "Tensor", "list"]),
    "cu_seqlens_q is None": ({"cu_seqlens_q": None}, TypeError, ["cu_seqlens_q must", "Tensor", "NoneType"]),
    "cu_seqlens_q of floats": ({"cu_seqlens_q": cu(0, 2, 6).float()}, TypeError, ["cu_seqlens_q must", "int32", "float32"]),
    "cu_seqlens_k of int16": (
        {"cu_seqlens_k": cu(0, 4, 9, dtype=torch.int16)},
        TypeError,
        ["cu_seqlens_k must", "int32", "int16"],
    ),
    "cu_seqlens_q has two dimensions": (
        {"cu_seqlens_q": cu(0, 2, 6)[None]},
        ValueError,
        ["cu_seqlens_q must", "one-dim", "(1, 3)"],
    ),
    "cu_seqlens_q is empty": ({"cu_seqlens_q": cu()}, ValueError, ["cu_seqlens_q must", "(0,)"]),
    "cu_seqlens_q on another device": (
        {"cu_seqlens_q": cu(0, 2, 6).to("meta")},
        ValueError,
        ["cu_seqlens_q must", "device", "meta"],
    ),
    "cu_seqlens_q starts late": ({"cu_seqlens_q": cu(1, 2, 6)}, ValueError, ["cu_seqlens_q must", "start at 0", "1"]),
    "cu_seqlens_q decreases": ({"cu_seqlens_q": cu(0, 7, 6)}, ValueError, ["cu_seqlens_q must", "not decrease", "7", "6"]),
    "cu_seqlens_q ends early": ({"cu_seqlens_q": cu(0, 2, 5)}, ValueError, ["cu_seqlens_q must", "end at", "6", "5"]),
    "cu_seqlens_q ends late": ({"cu_seqlens_q": cu(0, 2, 7)}, ValueError, ["cu_seqlens_q must", "end at", "6", "7"]),
    "cu_seqlens_k starts late": ({"cu_seqlens_k": cu(2, 4, 9)}, ValueError, ["cu_seqlens_k must", "start at 0", "2"]),
    "cu_seqlens_k decreases": ({"cu_seqlens_k": cu(0, 10, 9)}, ValueError, ["cu_seqlens_k must", "not decrease", "10", "9"]),
    "cu_seqlens_k ends early": ({"cu_seqlens_k": cu(0, 4, 8)}, ValueError, ["cu_seqlens_k must", "end at", "9", "8"]),
    "different numbers of sequences": ({"cu_seqlens_k": cu(0, 9)}, ValueError, ["cu_seqlens_q", "cu_seqlens_k", "2", "1"]),
    "keys without their own cu_seqlens": ({"cu_seqlens_k": None}, ValueError, ["cu_seqlens_", "end at", "9", "6"]),
}


def check(call, error, words: list[str]) -> None:
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"
    assert "\n" not in message, f"more than one sentence: {message}"


@pytest.mark.usefixtures("nothing_computed")
@pytest.mark.parametrize("mistake", BATCHED_ERRORS)
def test_attention(mistake: str) -> None:
    change, error, words = BATCHED_ERRORS[mistake]
    check(lambda: backlight.attention(**(GOOD | change)), error, words)


@pytest.mark.usefixtures("nothing_computed")
@pytest.mark.parametrize("mistake", PACKED_ERRORS)
def test_attention_varlen(mistake: str) -> None:
    change, error, words = PACKED_ERRORS[mistake]
    check(lambda: backlight.attention_varlen(**(PACKED | change)), error, words)


@pytest.mark.usefixtures("nothing_computed")
@pytest.mark.parametrize("mistake", BATCHED_ERRORS)
def test_explain_says_the_same(mistake: str) -> None:
    change, error, words = BATCHED_ERRORS[mistake]
    check(lambda: backlight.explain(**(GOOD | change)), error, words)


@pytest.mark.usefixtures("nothing_computed")
@pytest.mark.parametrize("mistake", PACKED_ERRORS)
def test_explain_of_packed_says_the_same(mistake: str) -> None:
    change, error, words = PACKED_ERRORS[mistake]
    if change.get("cu_seqlens_q", "given") is None:
        pytest.skip("without cu_seqlens_q, explain describes the batched call")
    check(lambda: backlight.explain(**(PACKED | change)), error, words)


def test_the_good_calls_are_good() -> None:
    """Every mistake above is one change away from a call that runs."""
    assert backlight.attention(**GOOD).shape == (2, HEADS, LENGTH, DV)
    assert backlight.attention_varlen(**PACKED).shape == (6, HEADS, DV)
    terms = {
        "bias": torch.zeros(HEADS, 9),
        "sink": torch.zeros(HEADS),
        "tau": torch.zeros(HEADS),
        "gate": torch.zeros(2, HEADS, LENGTH, DV),
    }
    options = {"window": (3, 0), "softcap": 30, "scale": 1, "causal": True, "deterministic": True, "bias_origin": 2}
    assert backlight.attention(**GOOD, **terms, **options).shape == (2, HEADS, LENGTH, DV)


def test_a_list_is_as_good_a_window_as_a_tuple() -> None:
    torch.testing.assert_close(backlight.attention(**GOOD, window=[3, None]), backlight.attention(**GOOD, window=(3, None)))


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ({"causal": True}, {"causal": 1}, "causal must be a bool, got int"),
        ({"window": (1, 0)}, {"window": (True, 0)}, "window left must be an int or None, got True"),
        ({"scale": 1.0}, {"scale": True}, "scale must be a number or None, got bool"),
        ({"bias_origin": 1}, {"bias_origin": True}, "bias_origin must be an int, got True"),
        ({}, {"scale": [1]}, "scale must be a number or None, got list"),
        ({}, {"window": ([1], 0)}, r"window left must be an int or None, got \[1\]"),
    ],
    ids=str,
)
def test_a_right_call_before_does_not_excuse_a_wrong_one(right: dict, wrong: dict, words: str) -> None:
    """Checked options are remembered, and 1 == True."""
    backlight.attention(**GOOD, **right)
    with pytest.raises(TypeError, match=words):
        backlight.attention(**GOOD, **wrong)


def test_unknown_keyword_is_refused() -> None:
    for function in (backlight.attention, backlight.explain):
        with pytest.raises(TypeError, match="is_causal"):
            function(**GOOD, is_causal=True)


def test_unsupported_carries_its_reasons() -> None:
    error = backlight.Unsupported({"fast": ("needs a GPU", "no fp64"), "slow": ("is switched off",)})
    assert isinstance(error, NotImplementedError)
    assert error.reasons == {"fast": ("needs a GPU", "no fp64"), "slow": ("is switched off",)}
    for word in ("fast", "needs a GPU", "no fp64", "slow", "is switched off"):
        assert word in str(error)


def test_refusal_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named backend that cannot run a call never falls back; without a name, every refusal is listed."""
    backend = type(registry.get("tiled"))
    monkeypatch.setattr(backend, "why_not", lambda self, call: ("it is Sunday", "and it rains"))
    for name in registry.names():
        if name != "tiled":
            monkeypatch.setattr(type(registry.get(name)), "available", lambda self: ("not here",))
    for chosen in ("tiled", None):
        with pytest.raises(backlight.Unsupported) as refusal:
            backlight.attention(**GOOD, backend=chosen)
        assert refusal.value.reasons["tiled"] == ("it is Sunday", "and it rains")
        assert "it is Sunday" in str(refusal.value)
    explanation = backlight.explain(**GOOD)
    assert explanation.chosen is None
    assert explanation.config is None
    assert "and it rains" in str(explanation)


@pytest.mark.parametrize(
    "function", [backlight.explain, backlight.statistics, backlight.attention_jvp], ids=lambda f: f.__name__
)
def test_keywords_that_nobody_reads(function: Callable) -> None:
    """The sentence named `make_spec`, and what was asked for by a precision."""
    with pytest.raises(TypeError, match="casual is no keyword of this call, which takes bias, bias_origin, causal, "):
        function(**GOOD, casual=True)
    with pytest.raises(ValueError, match="precision must be None here"):
        function(**GOOD, precision="fp8")
    assert function(**GOOD, precision=None)
