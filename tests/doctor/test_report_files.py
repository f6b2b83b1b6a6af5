"""Captured tensors, shrinking and repro scripts."""

from __future__ import annotations

import ast
import sys

import pytest
import torch

from backlight.doctor.command import repro
from backlight.doctor.command.shrink import shrink, smaller_cases
from backlight.doctor.report import Finding
from backlight.doctor.subject.capture import load_capture, save_capture
from backlight.doctor.subject.case import Case
from backlight.spec import AttentionSpec


def tensors(b=2, h=4, kv=2, s=24, sk=32, d=16, dv=16):
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float32).half()

    return {"q": draw(b, h, s, d), "k": draw(b, kv, sk, d), "v": draw(b, kv, sk, dv), "do": draw(b, h, s, dv)}


# --- capture -----------------------------------------------------------------------------------------------------------------


def test_pt_round_trip(tmp_path):
    saved = tensors()
    loaded = load_capture(save_capture(tmp_path / "deep" / "dump.pt", saved))
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_safetensors_round_trip(tmp_path):
    files = pytest.importorskip("safetensors.torch")
    saved = tensors()
    files.save_file(saved, tmp_path / "dump.safetensors")
    loaded = load_capture(tmp_path / "dump.safetensors")
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_safetensors_absent_gets_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "dump.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        load_capture(tmp_path / "dump.safetensors")


def test_other_spellings_are_understood_and_other_entries_left_out(tmp_path):
    own = tensors()
    dump = {"Query": own["q"], "key": own["k"], "value": own["v"], "grad_output": own["do"], "step": 3, "x": own["q"]}
    torch.save(dump, tmp_path / "dump.pt")
    assert load_capture(tmp_path / "dump.pt").keys() == {"q", "k", "v", "do"}


class Payload:
    def __reduce__(self):
        return (sys.exit, (7,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"q": torch.ones(1, 1, 2, 4)}, "holds no k, v; its tensors are q"),
        ([1, 2], "holds a list; expected a dict"),
        ({"q": Payload()}, "could not be read"),
        ({name: torch.ones(6, 1, 4) for name in "qkv"}, "need cu_seqlens_q"),
    ],
    ids=["missing", "no-dict", "code", "packed"],
)
def test_bad_dumps_get_a_sentence_and_never_run_code(tmp_path, content, message):
    torch.save(content, tmp_path / "dump.pt")
    with pytest.raises(ValueError, match=message):
        load_capture(tmp_path / "dump.pt")


def test_no_file():
    with pytest.raises(FileNotFoundError, match="no capture file"):
        load_capture("nowhere.pt")


# --- cases -------------------------------------------------------------------------------------------------------------------


def test_a_captured_case_takes_shape_dtype_and_terms_from_its_tensors():
    captured = tensors() | {"sink": torch.zeros(4)}
    case = Case.captured(captured, AttentionSpec(causal=True), level="full")
    assert (case.shape, case.kv_heads, case.sk, case.dtype) == ((2, 4, 24, 16), 2, 32, torch.float16)
    assert case.spec == AttentionSpec(causal=True, sink=True)
    cut = case.replace(shape=(1, 2, 12, 8), kv_heads=1, sk=16, dv=8).arguments()
    assert cut["q"].shape == (1, 2, 12, 8)
    assert cut["k"].shape == (1, 1, 16, 8)
    assert cut["do"].shape == (1, 2, 12, 8)
    assert cut["sink"].shape == (2,)
    assert "sink" not in case.replace(spec=AttentionSpec()).arguments()


def test_a_packed_capture_becomes_canonical():
    packed = {name: x.transpose(1, 2)[0].contiguous() for name, x in tensors(b=1, kv=4, sk=24).items()}
    packed["cu_seqlens_q"] = torch.tensor([0, 10, 24], dtype=torch.int32)
    arguments = Case.captured(packed, AttentionSpec()).arguments()
    assert arguments["q"].shape == (1, 4, 24, 16)
    assert torch.equal(arguments["q"][0, :, 3], packed["q"][3])
    assert arguments["cu_seqlens"] == (packed["cu_seqlens_q"], packed["cu_seqlens_q"])


# --- shrinking ---------------------------------------------------------------------------------------------------------------

FULL = AttentionSpec(causal=True, window=(95, 0), softcap=30.0, bias=True, sink=True, gate=True)


def test_everything_irrelevant_goes():
    """A finding that needs two heads and the window keeps exactly those."""
    case = Case(spec=FULL, shape=(4, 8, 256, 64), kv_heads=4, sk=300, dv=32)
    result = shrink(case, lambda c: c.shape[1] >= 2 and c.spec.left is not None)
    assert result.case.shape == (1, 2, 8, 8)
    assert (result.case.kv_heads, result.case.sk, result.case.dv) == (1, 8, 8)
    assert result.case.spec == AttentionSpec(window=(1, 0))
    assert "without softcap" in result.steps


def test_nothing_is_lost_when_nothing_may_go():
    case = Case(spec=FULL)
    result = shrink(case, lambda c: False)
    assert result.case is case
    assert result.steps == []
    assert result.tried == len(list(smaller_cases(case)))


def test_shrinking_stops_in_time():
    case = Case(shape=(1024, 4, 512, 64))
    assert shrink(case, lambda c: True, seconds=0.0).steps == ["stopped: time was up"]


def test_groups_stay_whole():
    case = Case(shape=(1, 12, 64, 16), kv_heads=3)
    while case is not None:
        assert case.shape[1] % case.kv_heads == 0
        case = next((smaller for step, smaller in smaller_cases(case) if step.startswith("H")), None)


def test_packed_sequences_shrink_by_count_and_by_length():
    result = shrink(Case(lengths=(100, 60, 40)), lambda c: len(c.lengths) >= 2)
    assert result.case.lengths == (25, 15)


def test_packed_keys_of_other_lengths_are_written_out():
    case = Case(lengths=(5, 9), key_lengths=(9, 9))
    text = repro.script(case, "kernel.py:fn", FINDING)
    assert "cu_seqlens=(torch.tensor([0, 5, 14], dtype=torch.int32), torch.tensor([0, 9, 18], dtype=torch.int32))" in text
    assert [borders.tolist() for borders in case.arguments()["cu_seqlens"]] == [[0, 5, 14], [0, 9, 18]]
    assert not [step for step, _ in smaller_cases(case) if "sequences" in step or "lengths" in step]


# --- scripts -----------------------------------------------------------------------------------------------------------------

FINDING = Finding("scale-dk", 'dk is "too large" by a constant.')


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(spec=FULL, kv_heads=2, bias=9),
        Case(lengths=(5, 9)),
        Case(lengths=(5, 9), key_lengths=(9, 9)),
        Case.captured(tensors(), AttentionSpec(causal=True)),
    ],
    ids=["plain", "full", "packed", "packed keys", "captured"],
)
def test_scripts_parse_and_say_what_they_need(case):
    text = repro.script(case, "kernel.py:fn", FINDING, ["B 4 -> 2"], layout="BSHD")
    assert ast.get_docstring(ast.parse(text)).startswith('dk is "too large" by a constant. [scale-dk]')
    for wanted in ("'kernel.py:fn'", "'scale-dk'", "layout='BSHD'", "B 4 -> 2", str(case.dtype).removeprefix("torch.")):
        assert wanted in text


@pytest.mark.parametrize(
    "subject",
    [
        r"C:\Users\me\kernel.py:fn",
        r"/home/\Ursula/\N{x}/kernel.py:fn",
        '/a/"""b"""/k.py:fn',
        "/new\nline/k.py:fn",
        "/it's/k.py:fn",
    ],
)
def test_any_path_makes_a_script_that_parses(subject):
    r"""A home with \U in its path made repro.py a syntax error: the path stood raw in the docstring."""
    tree = ast.parse(repro.script(Case(), subject, FINDING))
    (assigned,) = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "SUBJECT"]
    assert ast.literal_eval(assigned.value) == subject
    assert f"Examined: {subject}" in ast.get_docstring(tree, clean=False)


def test_a_script_is_tried_in_a_fresh_process():
    good = repro.try_script("import backlight.spec, sys; sys.exit(0)")
    assert good.reproduced
    bad = repro.try_script("import sys; sys.stderr.write('nothing found'); sys.exit(1)")
    assert not bad.reproduced
    assert "nothing found" in bad.output
    assert not repro.try_script("import time; time.sleep(60)", timeout=0.5).reproduced
