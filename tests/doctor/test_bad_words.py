"""Bad input of every kind to the doctor: commands, calls from Python, captures. One sentence each, and exit code 3.

A sentence names the argument and the value. Nothing here may be taken silently for something else.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import backlight.doctor
from backlight.doctor import command
from backlight.spec import AttentionSpec

NAN, INF = float("nan"), float("inf")
HUGE = "99999999999999999999"


def doctor(*arguments: str):
    return CliRunner(env={"COLUMNS": "200"}).invoke(command.app, list(arguments), prog_name="backlight doctor")


def flat(output: str) -> str:
    return re.sub(r"[\s│╭╮╰╯─]+", " ", output)


@pytest.fixture
def never(monkeypatch):
    """An engine that must not be reached."""

    def engine(*_, **__):
        raise AssertionError("an examination was begun")

    monkeypatch.setattr(backlight.doctor, "diagnose", engine, raising=False)


# --- the command line -------------------------------------------------------------------------------------------------------

WORDS: list[tuple[str, str]] = [
    # options that are not there, that lack their value, that are no number
    ("sdpa --frobnicate", "--frobnicate"),
    ("sdpa --seed", "'--seed' requires an argument"),
    ("sdpa sdpa", "(sdpa)"),
    ("sdpa --causal=maybe", "--causal"),
    *[
        (f"sdpa --{name} {word}", f"--{name} must be a finite number, got '{word}'")
        for name in ("scale", "softcap", "tau", "entmax")
        for word in ("x", "1,2", "nan", "inf")
    ],
    *[
        (f"sdpa --{name} {word}", f"--{name} must be a whole number from 1 to 2147483647, got '{word}'")
        for name in ("bias", "kv-heads", "sk", "dv")
        for word in ("x", "1,2", "1.5", "0", "-1", HUGE)
    ],
    *[
        (f"sdpa --seed {word}", f"--seed must be a whole number from 0 to 2147483647, got '{word}'")
        for word in ("x", "1,2", "1.5", "-1", HUGE)
    ],
    *[
        (
            f"sdpa --bias 4 --bias-origin {word}",
            f"--bias-origin must be a whole number from -2147483647 to 2147483647, got '{word}'",
        )
        for word in ("x", "1.5", HUGE)
    ],
    *[
        (f"sdpa --timeout {word}", f"--timeout must be a finite number of at least 0, got '{word}'")
        for word in ("x", "-1", "nan", "inf")
    ],
    # numbers that mean nothing
    ("sdpa --softcap 0", "softcap must be > 0 or None, got 0.0"),
    ("sdpa --softcap -3", "softcap must be > 0 or None, got -3.0"),
    ("backlight --entmax 0.5", "--entmax must be from 1.05 to 2, got '0.5'"),
    ("backlight --entmax 3", "--entmax must be from 1.05 to 2, got '3'"),
    ("backlight --entmax 1.5 --tau -1", "give one of the two, got both"),
    ("backlight --tau=-inf", "--tau must be a finite number, got '-inf'"),
    # shapes
    *[
        (f"sdpa --shape {word}", f"got '{word}'")
        for word in ("0,1,1,1", "1,0,1,1", "1,1,0,1", "1,1,1,0", "1,2,3", "1,2,3,4,5", "a,b,c,d", "1,2,3.5,4", "-1,2,3,4", ",")
    ],
    (f"sdpa --shape 1,1,{HUGE},8", f"--shape wants 4 positive numbers up to 2147483647, got '1,1,{HUGE},8'"),
    *[
        (f"backlight --lengths {word}", f"--lengths wants some positive numbers up to 2147483647, got '{word}'")
        for word in ("0", "3,0", "-2")
    ],
    ("backlight --lengths x", "--lengths wants whole numbers with commas between them, got 'x'"),
    ("backlight --lengths 3,a", "--lengths wants whole numbers with commas between them, got '3,a'"),
    # windows
    *[(f"sdpa --window {word}", f"got '{word}'") for word in ("5", "1,2,3", "a,b", "1.5,0", f"{HUGE},0")],
    ("sdpa --window=-1,0", "window left must be >= 0 or None for unbounded, got -1"),
    ("sdpa --window=0,-2", "window right must be >= 0 or None for unbounded, got -2"),
    # words of a list
    ("sdpa --dtype int8", "--dtype must be one of bf16, fp16, fp32, fp64, got 'int8'"),
    ("sdpa --dtype BF16", "--dtype must be one of bf16, fp16, fp32, fp64, got 'BF16'"),
    (
        "sdpa --recipe cake",
        "--recipe must be one of gaussian, peaky, dominant, low_lse, high_lse, jumps, rising, falling, outliers, got 'cake'",
    ),
    ("sdpa --level deep", "--level must be one of quick, full, forensic, adversarial, got 'deep'"),
    ("sdpa --layout SBHD", "--layout must be one of auto, BHSD, BSHD, packed, got 'SBHD'"),
    # devices
    ("sdpa --device abacus", "--device: device must be a torch device such as cpu or cuda:0, got 'abacus'"),
    ("sdpa --device meta", "--device: device must hold values, got meta"),
    # names
    ("sdpaa", "no kernel is called 'sdpaa'; there are sdpa"),
    ("sdpa:fast", "sdpa has no backend 'fast'"),
    ("nowhere.py:fn", "no file nowhere.py"),
    (":fn", "':fn' names no function"),
    ("os.path:", "'os.path:' names no function"),
    ("os.path:fly", "os.path has no 'fly'"),
    (".relative:fn", "'.relative' is neither a file that ends in .py nor the name of a module"),
    ("a..b:fn", "'a..b' is neither a file that ends in .py nor the name of a module"),
    ("kernel.txt:fn", "No module named 'kernel'"),
    ("no_such_module_here:fn", "No module named 'no_such_module_here'"),
    ("math:pi", "got float 3.14"),
    ("fractions:Fraction", "got the class Fraction"),
    ("sdpa --against sdpaa", "no kernel is called 'sdpaa'"),
    ("sdpa --against nowhere.py:fn", "no file nowhere.py"),
    ("--demo window+3", "no demo is called 'window+3'; did you mean"),
    ("--demo zzz", "no demo is called 'zzz'; see backlight doctor --list"),
    # words that would be ignored
    ("sdpa --demo window+1", "name a kernel or a demo, not both: got 'sdpa' and --demo window+1"),
    ("--demo window+1 --causal", "--causal True would be ignored: a demo brings its own"),
    ("--demo window+1 --shape 1,1,8,8", "--shape 1,1,8,8 would be ignored: a demo brings its own"),
    ("demo:case-a --window 3,0", "--window 3,0 would be ignored: a demo brings its own"),
    ("sdpa --bias-origin 3", "--bias-origin 3 would be ignored: there is no --bias"),
    ("backlight --lengths 3,4 --sk 8", "--sk 8 would be ignored: --lengths gives the lengths of queries and keys"),
    ("sdpa --layout BSHD", "--layout is for functions of yours: sdpa reads BHSD, got 'BSHD'"),
    ("sdpa --layout packed", "--layout is for functions of yours: sdpa reads BHSD, got 'packed'"),
    ("tiled --layout BSHD", "--layout is for functions of yours: tiled reads BHSD or packed, got 'BSHD'"),
    *[
        (f"sdpa --capture GOOD --{name} {word}", f"--{name} {word} would be ignored: captured tensors bring their own")
        for name, word in (
            ("shape", "1,1,8,8"),
            ("kv-heads", "1"),
            ("sk", "4"),
            ("dv", "4"),
            ("lengths", "8"),
            ("dtype", "fp16"),
            ("recipe", "peaky"),
        )
    ],
    ("backlight --capture TAU --tau 1", "--tau would be ignored: "),
    ("backlight --capture ALPHA --entmax 1.5", "--entmax would be ignored: "),
    # files
    ("sdpa --capture nowhere.pt", "no capture file nowhere.pt"),
    ("sdpa --capture .", "no capture file ."),
    ("compare nowhere.json nowhere.json", "nowhere.json cannot be read: No such file or directory"),
    ("compare . .", ". cannot be read: Is a directory"),
    ("compare nowhere.json", "Missing argument"),
    ("compare a b c", "(c)"),
]


@pytest.mark.parametrize(("words", "sentence"), WORDS, ids=[words.replace(HUGE, "huge") for words, _ in WORDS])
def test_bad_words_get_a_sentence_and_exit_code_3(never, tmp_path, words, sentence):
    tensors = {name: torch.ones(1, 1, 8, 8) for name in ("q", "k", "v")}
    torch.save(tensors, tmp_path / "good.pt")
    torch.save(tensors | {"tau": torch.zeros(1)}, tmp_path / "tau.pt")
    torch.save(tensors | {"entmax": torch.full((1,), 1.5)}, tmp_path / "alpha.pt")
    places = {"GOOD": str(tmp_path / "good.pt"), "TAU": str(tmp_path / "tau.pt"), "ALPHA": str(tmp_path / "alpha.pt")}
    result = doctor(*(places.get(word, word) for word in words.split()))
    assert result.exit_code == 3, result.output
    assert sentence in flat(result.output)
    assert "Traceback" not in result.output
    assert "broke off" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_missing_device_is_exit_3(never, device):
    result = doctor("sdpa", "--device", device)
    assert result.exit_code == 3
    assert f"--device: device {device} was asked for, and torch sees no CUDA device" in flat(result.output)


# words only the engine understands: they are its own sentences
ENGINE = [
    ("sdpa --kv-heads 3", "query heads must be a multiple of key/value heads, got 4 and 3"),
    ("sdpa --kv-heads 8", "query heads must be a multiple of key/value heads, got 4 and 8"),
    ("sdpa --shape 1,1,2000000000,64", "the shape B 1, Hq 1, Hkv 1, Sq 2000000000, Sk 2000000000, D 64, Dv 64 is too large"),
    ("sdpa --sk 2000000000", "Sk 2000000000, D 64, Dv 64 is too large: the float64 oracle needs about"),
    ("sdpa --scale 0 --recipe dominant", "scale must be > 0, got 0.0"),
    ("sdpa --scale=-1 --recipe low_lse", "scale must be > 0, got -1.0"),
    ("sdpa --softcap 5 --shape 1,1,16,8", "sdpa has no softcap"),
    ("backlight --bias 2000000000 --shape 1,64,16,8", "D 8, Dv 8, bias 2000000000 is too large"),
    (
        "backlight --bias 4 --bias-origin 2000000000 --shape 1,1,16,8 --dtype fp32 --seed 1 --tau 1e400",
        "--tau must be a finite number, got '1e400'",
    ),
]


@pytest.mark.parametrize(("words", "sentence"), ENGINE, ids=[words for words, _ in ENGINE])
def test_words_that_only_the_engine_can_judge(words, sentence):
    result = doctor(*words.split())
    assert result.exit_code == 3, result.output
    assert sentence in flat(result.output)
    assert "broke off" not in result.output


# --- from Python ------------------------------------------------------------------------------------------------------------


def fn(q, k, v):
    raise AssertionError("an examination was begun")


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def qkv(q=(1, 2, 8, 4), k=(1, 2, 8, 4), v=(1, 2, 8, 4)) -> dict[str, torch.Tensor]:
    return {"q": x(*q), "k": x(*k), "v": x(*v)}


PACKED = {"q": x(1, 2, 8, 4), "k": x(1, 2, 8, 4), "v": x(1, 2, 8, 4)}
BIAS, TAU, SINK, GATE = (AttentionSpec(**{name: True}) for name in ("bias", "tau", "sink", "gate"))

CALLS: list[tuple[dict[str, Any], str]] = [
    ({"spec": None}, "spec must be an AttentionSpec, got NoneType None"),
    ({"spec": {"causal": True}}, "spec must be an AttentionSpec, got dict"),
    ({"subject": 3}, "subject must be a callable, .* got int 3"),
    ({"subject": torch.nn.Linear}, "got the class Linear: make an object of it"),
    ({"level": "deep"}, "level must be one of quick, full, forensic, adversarial, got 'deep'"),
    ({"shape": (0, 2, 8, 4)}, "B of shape must be at least 1, got 0: of an empty tensor there is nothing to judge"),
    ({"shape": (1, 0, 8, 4)}, "Hq of shape must be at least 1, got 0"),
    ({"shape": (1, 2, 0, 4)}, "Sq of shape must be at least 1, got 0"),
    ({"shape": (1, 2, 8, 0)}, "D of shape must be at least 1, got 0"),
    ({"shape": (1, 2, 8, -4)}, "D of shape must be at least 1, got -4"),
    ({"shape": (1, 2, 8)}, r"shape must be four sizes \(B, Hq, Sq, D\), got \(1, 2, 8\)"),
    ({"shape": 8}, "shape must be four sizes .*, got 8"),
    ({"shape": (1, 2, 8.0, 4)}, "Sq of shape must be a whole number, got 8.0"),
    ({"shape": (True, 2, 8, 4)}, "B of shape must be a whole number, got True"),
    ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
    ({"kv_heads": -1}, "kv_heads must be at least 1, got -1"),
    ({"kv_heads": 3}, "multiple of key/value heads, got 4 and 3"),
    ({"kv_heads": "2"}, "kv_heads must be a whole number, got '2'"),
    ({"sk": 0}, "sk must be at least 1, got 0: of an empty tensor there is nothing to judge"),
    ({"dv": 0}, "dv must be at least 1, got 0"),
    ({"dv": 1.5}, "dv must be a whole number, got 1.5"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
    ({"seed": 2**63}, "seed must be at most"),
    ({"recipe": "cake"}, "recipe must be one of gaussian, .* got 'cake'"),
    ({"dtype": torch.int32}, "dtype must be one of float16, bfloat16, float32, float64, got torch.int32"),
    ({"dtype": "bf16"}, "dtype must be one of .*, got bf16"),
    ({"device": "abacus"}, "device must be a torch device such as cpu or cuda:0, got 'abacus'"),
    ({"device": "meta"}, "device must hold values, got meta"),
    ({"shape": (1, 1, 10**9, 64)}, "Sq 1000000000, .* is too large: the float64 oracle needs about .* GiB, and cpu has"),
    # terms
    ({"spec": BIAS, "bias": 0}, "the number of columns of bias must be at least 1, got 0"),
    ({"spec": BIAS, "bias": -3}, "the number of columns of bias must be at least 1, got -3"),
    ({"spec": BIAS, "bias": 2.5}, "bias must be a tensor .* or a number of columns or None, got 2.5"),
    ({"spec": BIAS, "bias": True}, "bias must be a tensor .* got True"),
    (
        {"spec": BIAS, "bias": x(3, 5)},
        r"bias must be floating point of shape \[Hq, n\] with Hq = 4, got torch.float32 of \(3, 5\)",
    ),
    ({"spec": BIAS, "bias": x(4, 0)}, r"bias must be .* got torch.float32 of \(4, 0\)"),
    ({"spec": BIAS, "bias": x(4, 5, dtype=torch.int64)}, r"bias must be floating point .* got torch.int64"),
    ({"bias": 7}, "bias was given and would be ignored: the spec says bias=False"),
    ({"tau": 0.5}, "tau was given and would be ignored: the spec says tau=False"),
    ({"sink": x(4)}, "sink was given and would be ignored"),
    ({"gate": x(2, 4, 200, 64)}, "gate was given and would be ignored"),
    ({"spec": TAU, "tau": NAN}, "tau must be finite, got nan"),
    ({"spec": TAU, "tau": x(3)}, r"tau must be floating point of shape \[Hq\] with Hq = 4, got torch.float32 of \(3,\)"),
    ({"spec": TAU, "tau": "one"}, "tau must be a tensor .* or a number or None, got 'one'"),
    ({"spec": SINK, "sink": 3.0}, r"sink must be a tensor \[Hq\] or None, got 3.0"),
    ({"spec": SINK, "sink": x(4, 1)}, r"sink must be floating point .* got torch.float32 of \(4, 1\)"),
    ({"spec": GATE, "gate": x(1, 1)}, r"gate must be floating point of shape \(2, 4, 200, 64\), got torch.float32 of \(1, 1\)"),
    # tensors
    ({"q": x(1, 2, 8, 4)}, "q, k and v must be given together, got none for k and v"),
    ({"k": x(1, 2, 8, 4)}, "q, k and v must be given together, got none for q and v"),
    (qkv() | {"v": None}, "q, k and v must be given together, got none for v"),
    (qkv() | {"q": [1.0]}, "q must be a tensor, got list"),
    (qkv(q=(2, 8, 4)), r"q must have 4 dimensions \[B, H, S, D\], got shape \(2, 8, 4\)"),
    (qkv(q=(1, 2, 0, 4)), r"q must not be empty, got shape \(1, 2, 0, 4\): there is nothing to judge"),
    (qkv(q=(0, 2, 8, 4)), r"q must not be empty, got shape \(0, 2, 8, 4\)"),
    (qkv(k=(1, 2, 0, 4), v=(1, 2, 0, 4)), r"k must not be empty, got shape \(1, 2, 0, 4\)"),
    (qkv(v=(1, 2, 8, 0)), r"v must not be empty, got shape \(1, 2, 8, 0\)"),
    (qkv(k=(2, 2, 8, 4)), "q, k and v must have one batch size, got 1, 2 and 1"),
    (qkv(k=(1, 2, 8, 5)), "k must have the head size of q, got 5 and 4"),
    (qkv(k=(1, 2, 9, 4)), "k and v must have the same heads and length"),
    (qkv(k=(1, 3, 8, 4), v=(1, 3, 8, 4)), "multiple of key/value heads, got 2 and 3"),
    (qkv() | {"k": x(1, 2, 8, 4, dtype=torch.float64)}, "k must be torch.float32 on cpu as q is, got torch.float64 on cpu"),
    (qkv() | {"q": x(1, 2, 8, 4, dtype=torch.int64)}, "dtype of q must be one of .* got torch.int64"),
    (qkv() | {"q": x(1, 2, 8, 4).to("meta")}, "q must be a plain dense tensor with values, got .* on meta"),
    (qkv() | {"q": x(1, 2, 8, 4).to_sparse()}, "q must be a plain dense tensor with values, got torch.sparse_coo"),
    (qkv() | {"do": x(1, 2, 8, 5)}, r"do must be floating point of shape \(1, 2, 8, 4\), got torch.float32 of \(1, 2, 8, 5\)"),
    (qkv() | {"do": x(1, 2, 8, 4, dtype=torch.int64)}, "do must be floating point .* got torch.int64"),
    ({"do": x(1, 1, 1, 1)}, r"do must be floating point of shape \(2, 4, 200, 64\), got torch.float32 of \(1, 1, 1, 1\)"),
    # packed
    ({"cu_seqlens": [0, 4, 8, 9]}, r"cu_seqlens must be a tensor, a pair of tensors or None, got \[0, 4, 8, 9\]"),
    ({"cu_seqlens": "0,4"}, "cu_seqlens_q must be an int32 or int64 tensor .* got '0,4'"),
    ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens_q must be an int32 or int64 tensor .* got torch.float32"),
    ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens_q must be .* got torch.int64 of shape \(1,\)"),
    ({"cu_seqlens": torch.tensor(8)}, r"cu_seqlens_q must be .* got torch.int64 of shape \(\)"),
    ({"cu_seqlens": torch.tensor([0, 0])}, "the last of cu_seqlens_q must be at least 1, got 0"),
    ({"cu_seqlens": torch.tensor([1, 4])}, "cu_seqlens_q must start at 0, got 1"),
    ({"cu_seqlens": torch.tensor([0, 5, 3, 8])}, "cu_seqlens_q must not decrease, got 5 then 3"),
    ({"cu_seqlens": (torch.tensor([0, 8]), None)}, "cu_seqlens must be a tensor, a pair of tensors or None"),
    (PACKED | {"cu_seqlens": torch.tensor([0, 9])}, "cu_seqlens_q must end at the packed length 8, got 9"),
    (qkv(q=(2, 2, 8, 4), k=(2, 2, 8, 4), v=(2, 2, 8, 4)) | {"cu_seqlens": torch.tensor([0, 8])}, "need a batch of 1, got 2"),
]


@pytest.mark.parametrize(("arguments", "sentence"), CALLS, ids=[f"{n}: {s[:40]}" for n, (_, s) in enumerate(CALLS)])
def test_bad_arguments_of_diagnose_get_a_sentence(arguments, sentence):
    words = {"subject": fn, "spec": AttentionSpec()} | arguments
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        backlight.doctor.diagnose(words.pop("subject"), words.pop("spec"), **words)
    assert "\n" not in str(caught.value)
    assert caught.traceback[-1].path.name in ("checks.py", "examination.py", "inputs.py", "subject.py", "call.py")


AUDITS: list[tuple[dict[str, Any], str]] = [
    ({"rule": 0.01}, r"rule must be a function rule\(actual, expected\), got float 0.01"),
    ({"spec": None}, "spec must be an AttentionSpec, got NoneType None"),
    ({"shape": (0, 1, 8, 8)}, "B of shape must be at least 1, got 0"),
    ({"kv_heads": 0}, "kv_heads must be at least 1, got 0"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"dtype": torch.int8}, "dtype must be one of .* got torch.int8"),
    (
        {"rule": lambda a, b: (a - b).abs() < 1},
        r"rule must return one truth value or None, got a tensor of shape \(2, 2, 72, 32\)",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), AUDITS, ids=[sentence[:40] for _, sentence in AUDITS])
def test_bad_arguments_of_audit_rule_get_a_sentence(arguments, sentence):
    words = {"rule": torch.equal, "spec": AttentionSpec()} | arguments
    with pytest.raises((ValueError, TypeError), match=sentence):
        backlight.doctor.audit_rule(words.pop("rule"), words.pop("spec"), **words)


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="kv_head"):
        backlight.doctor.diagnose(fn, AttentionSpec(), kv_head=2)
    with pytest.raises(TypeError, match="kv_head"):
        backlight.doctor.run_once(fn, AttentionSpec(), kv_head=2)


# --- captures ---------------------------------------------------------------------------------------------------------------

CAPTURES: dict[str, tuple[Any, str]] = {
    "no dict": ([1, 2], "holds a list; expected a dict with q, k, v and more"),
    "a tensor": (x(3), "holds a Tensor; expected a dict"),
    "empty": ({}, "holds no q, k, v; its tensors are none"),
    "no v": ({"q": x(1, 1, 2, 4), "k": x(1, 1, 2, 4)}, "holds no v; its tensors are k, q"),
    "no tensors": ({"q": 1, "k": 2, "v": 3}, "holds no q, k, v; its tensors are none"),
    "twice": (qkv() | {"query": x(1, 2, 8, 4)}, "holds q more than once, as q and query"),
    "twice by case": (qkv() | {"Q": x(1, 2, 8, 4)}, "holds q more than once, as Q and q"),
    "two gradients": (qkv() | {"dout": x(1, 2, 8, 4), "dy": x(1, 2, 8, 4)}, "holds do more than once, as dout and dy"),
    "packed without borders": (qkv((8, 2, 4), (8, 2, 4), (8, 2, 4)), "packed [T,H,D] tensors need cu_seqlens_q"),
    "five dimensions": (qkv((1, 1, 2, 8, 4)), "q must have 4 dimensions"),
    "two dimensions": (qkv((8, 4)), "q must have 4 dimensions"),
    "one packed": (qkv((1, 2, 8, 4), (8, 2, 4), (8, 2, 4)), "k must have 4 dimensions"),
    "whole numbers": ({n: x(1, 2, 8, 4, dtype=torch.int64) for n in "qkv"}, "dtype of q must be one of"),
    "two dtypes": (qkv() | {"v": x(1, 2, 8, 4, dtype=torch.float16)}, "v must be torch.float32 on cpu as q is"),
    "heads": (qkv(k=(1, 3, 8, 4), v=(1, 3, 8, 4)), "multiple of key/value heads, got 2 and 3"),
    "an empty one": (qkv((1, 2, 0, 4)), "q must not be empty"),
    "sparse": (qkv() | {"k": x(1, 2, 8, 4).to_sparse()}, "k must be a plain dense tensor with values"),
    "gradient of another shape": (qkv() | {"do": x(1, 2, 7, 4)}, "do must be floating point of shape (1, 2, 8, 4)"),
    "bias of other heads": (qkv() | {"bias": x(1, 5)}, "bias must be floating point of shape [Hq, n] with Hq = 2"),
    "tau without heads": (qkv() | {"tau": torch.tensor(1.0)}, "tau must be floating point of shape [Hq] with Hq = 2"),
    "gate of another shape": (qkv() | {"gate": x(1, 2, 8, 3)}, "gate must be floating point of shape (1, 2, 8, 4)"),
    "NaN": (qkv() | {"v": x(1, 2, 8, 4) * NAN}, "v has 64 NaN of 64 values, the first at [0, 0, 0, 0]"),
    "NaN in a term": (qkv() | {"sink": torch.tensor([0.0, NAN])}, "sink has 1 NaN of 2 values, the first at [1]"),
    "infinite term": (qkv() | {"bias": x(2, 3) * -INF}, "bias has 6 infinite of 6 values"),
    "borders too long": (
        qkv((8, 2, 4), (8, 2, 4), (8, 2, 4)) | {"cu_seqlens": torch.tensor([0, 9])},
        "cu_seqlens_q must end at the packed length 8",
    ),
    "borders of floats": (
        qkv((8, 2, 4), (8, 2, 4), (8, 2, 4)) | {"cu_seqlens": torch.tensor([0.0, 8.0])},
        "cu_seqlens_q must be an int32 or int64",
    ),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_bad_captures_get_a_sentence_and_exit_code_3(tmp_path, name):
    content, sentence = CAPTURES[name]
    torch.save(content, tmp_path / "dump.pt")
    result = doctor("backlight", "--capture", str(tmp_path / "dump.pt"))
    assert result.exit_code == 3, result.output
    assert sentence in flat(result.output)
    assert "broke off" not in result.output


FILES = {"empty": b"", "text": b"hello", "zip": b"PK\x03\x04 cut short", "zeros": bytes(100)}


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_captures(never, tmp_path, name, suffix):
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    path = tmp_path / f"dump.{suffix}"
    path.write_bytes(FILES[name])
    result = doctor("sdpa", "--capture", str(path))
    assert result.exit_code == 3
    assert f"dump.{suffix}couldnotbereadas" in re.sub(r"\s+", "", result.output)


def test_there_are_many_of_them():
    assert len(WORDS) + len(ENGINE) + 2 >= 110
    assert len(CALLS) + len(AUDITS) >= 80
    assert len(CAPTURES) + 2 * len(FILES) >= 30
