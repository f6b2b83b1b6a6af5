"""`backlight doctor` as a command: words in, exit codes and files out. The engine is replaced where only words are tested."""

from __future__ import annotations

import json
import re

import pytest
import torch
from report_samples import could_not_run, healthy, one_head_only, window_defect
from typer.testing import CliRunner

import backlight.doctor
from backlight.call import Call
from backlight.doctor import command
from backlight.doctor.defects import catalogue
from backlight.doctor.defects.catalogue import BY_ID
from backlight.doctor.defects.stories import STORIES
from backlight.doctor.report import Report
from backlight.doctor.report import json as report_json
from backlight.doctor.subject import names
from backlight.doctor.subject.capture import save_capture
from backlight.problems.recipes import RECIPES
from backlight.reference import oracle
from backlight.spec import AttentionSpec


def doctor(*arguments: str):
    return CliRunner().invoke(command.app, list(arguments), prog_name="backlight doctor")


@pytest.fixture
def asked(monkeypatch):
    """Replaces the engine by one that remembers what it was asked and answers `asked.report`."""

    class Asked:
        report: Report = healthy()

        def __call__(self, subject, spec, **settings):
            self.subject, self.spec, self.settings = subject, spec, settings
            return self.report

    engine = Asked()
    monkeypatch.setattr(backlight.doctor, "diagnose", engine, raising=False)
    return engine


# --- what reaches the engine -------------------------------------------------------------------------------------------------


def test_every_option_arrives(asked):
    options = "--causal --window 95,0 --scale 0.5 --softcap 30 --bias 20 --bias-origin 3 --sink --tau -0.5 --gate"
    inputs = (
        "--shape 1,4,32,16 --kv-heads 2 --sk 40 --dv 8 --dtype fp16 --recipe peaky --seed 7 --level full --against sdpa:math"
    )
    result = doctor("sdpa", *options.split(), *inputs.split())
    assert result.exit_code == 0, result.output
    assert asked.spec == AttentionSpec(True, (95, 0), 0.5, 30.0, True, 3, True, True, True)
    assert asked.settings.pop("against").name == "sdpa:math"
    assert asked.settings == {
        "shape": (1, 4, 32, 16),
        "kv_heads": 2,
        "sk": 40,
        "dv": 8,
        "dtype": torch.float16,
        "recipe": "peaky",
        "seed": 7,
        "level": "full",
        "device": "cpu",
        "bias": 20,
        "tau": -0.5,
    }
    assert asked.subject.name == "sdpa"


def test_alpha_arrives(asked):
    assert doctor("backlight", "--entmax", "1.5").exit_code == 0
    assert asked.spec == AttentionSpec(entmax=True)
    assert asked.settings["entmax"] == 1.5
    assert "tau" not in asked.settings


@pytest.mark.parametrize(("text", "pair"), [("95,0", (95, 0)), ("*,0", (None, 0)), ("3,", (3, None)), ("none,2", (None, 2))])
def test_windows(asked, text, pair):
    doctor("sdpa", "--window", text)
    assert asked.spec.window == pair


def test_packed_sequences_choose_the_packed_call(asked):
    doctor("backlight", "--lengths", "10,7,3")
    assert asked.settings["cu_seqlens"].tolist() == [0, 10, 17, 20]
    assert asked.subject.layout == "packed"
    assert asked.subject.forward.func is backlight.attention_varlen


def test_a_capture_is_replayed(asked, tmp_path):
    tensors = {name: torch.randn(1, 2, 12, 8) for name in ("q", "k", "v", "do")} | {"tau": torch.zeros(2)}
    assert doctor("sdpa", "--causal", "--capture", str(save_capture(tmp_path / "a.pt", tensors))).exit_code == 0
    assert asked.spec == AttentionSpec(causal=True, tau=True)
    assert torch.equal(asked.settings["do"], tensors["do"])


# --- subjects ----------------------------------------------------------------------------------------------------------------

KERNEL = """
from neighbour import scale

def fn(q, k, v, causal=False):
    return v * scale

class Box:
    attend = staticmethod(fn)

pair = (fn, lambda do, q, k, v: (do, do, do))
"""


@pytest.fixture
def kernel_file(tmp_path, monkeypatch):
    (tmp_path / "neighbour.py").write_text("scale = 3\n")
    path = tmp_path / "my_kernel.py"
    path.write_text(KERNEL)
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    return path


def test_functions_of_files(kernel_file):
    found = command.resolve(f"{kernel_file}:fn", layout="BSHD")
    assert found.layout == "BSHD"
    assert found.forward(0, 0, 2) == 6
    assert found.location.endswith("my_kernel.py:4")
    assert command.resolve(f"{kernel_file}:Box.attend").forward(0, 0, 2) == 6
    assert command.resolve(f"{kernel_file}:pair").backward is not None


def test_functions_of_modules():
    found = command.resolve("torch.nn.functional:scaled_dot_product_attention")
    assert found.forward is torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize(
    "name", [*names.NAMED, "backlight", "tiled", *(f"demo:{name}" for name in STORIES), "demo:case-a/reference"]
)
def test_every_name_resolves(name):
    assert command.resolve(name).name == name


@pytest.mark.parametrize("name", BY_ID)
def test_every_catalogue_entry_has_a_demo(asked, name):
    result = doctor("--demo", name)
    assert result.exit_code == 0, result.output
    assert asked.subject.name == f"demo:{name}"


@pytest.mark.parametrize("name", ["sdpa", "sdpa:math"])
@pytest.mark.parametrize("features", [{}, {"causal": True}, {"causal": True, "window": (9, 0), "bias_origin": 2, "scale": 0.3}])
def test_adapters_compute_what_the_spec_says(name, features):
    """Grouped heads and Sq != Sk: PyTorch's own causal flag would align to the top left."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(2, h, s, 16, generator=generator) for h, s in ((4, 40), (2, 50), (2, 50), (4, 40)))
    inputs = {"q": q, "k": k, "v": v} | ({"bias": torch.randn(4, 20, generator=generator)} if "bias_origin" in features else {})
    for x in inputs.values():
        x.requires_grad_()
    o = names.named(name)(**inputs, **features)
    found = torch.autograd.grad(o, list(inputs.values()), do)
    truth = oracle(Call(AttentionSpec(**features, bias="bias" in inputs), **inputs), do)
    for x, exact in zip((o, *found), (truth.y, *(truth[f"d{n}"] for n in inputs)), strict=True):
        torch.testing.assert_close(x, exact.float())


@pytest.mark.parametrize(
    ("name", "features", "sentence"),
    [
        ("sdpa", {"softcap": 3.0, "sink": torch.zeros(1)}, "sdpa has no softcap and no sink"),
        ("flex", {"tau": torch.zeros(1)}, "flex has no tau"),
        ("fa3", {"bias": torch.zeros(1, 1)}, "fa3 has no bias"),
    ],
)
def test_adapters_refuse_what_their_kernel_lacks(name, features, sentence):
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match=sentence):
        names.named(name)(x, x, x, **features)


# --- bad words ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sdpaa"], "no kernel is called 'sdpaa'; there are sdpa, sdpa:math"),
        (["nowhere.py:fn"], "no file nowhere.py"),
        (["os.path:fly"], "os.path has no 'fly'"),
        (["no_such_module_here:fn"], "No module named 'no_such_module_here'"),
        (["demo:window+3"], "did you mean window+1"),
        (["sdpa:fast"], "sdpa has no backend 'fast'; there are math, flash, efficient, cudnn"),
        (["sdpa", "--window", "5"], "--window wants two sides"),
        (["sdpa", "--window", "a,b"], "--window wants whole numbers"),
        (["sdpa", "--window", "-1,0"], "window left must be >= 0"),
        (["sdpa", "--shape", "1,2,3"], "--shape wants 4 positive numbers"),
        (["sdpa", "--shape", "1,2,3,0"], "--shape wants 4 positive numbers"),
        (["sdpa", "--dtype", "int8"], "--dtype must be one of bf16, fp16, fp32, fp64"),
        (["sdpa", "--level", "deep"], "--level must be one of quick, full, forensic"),
        (["sdpa", "--capture", "nowhere.pt"], "no capture file nowhere.pt"),
        (["sdpa", "--frobnicate"], "No such option: --frobnicate"),
        (["sdpa", "--seed", "x"], "--seed must be a whole number from 0 to 2147483647, got 'x'"),
    ],
)
def test_bad_words_get_a_sentence_and_exit_code_3(asked, arguments, sentence):
    result = doctor(*arguments)
    assert result.exit_code == 3
    # versions of click quote an option or put a colon before it
    said = re.sub(r"[\s│]+", " ", result.output)
    assert sentence in said.replace("option '--frobnicate'", "option: --frobnicate")


def test_help_names_every_option_and_the_exit_codes():
    for arguments in ([], ["--help"]):
        shown = re.sub(r"\s+", " ", doctor(*arguments).output)
        for word in (
            "--causal",
            "--window",
            "--capture",
            "--against",
            "--report",
            "--demo",
            "--list",
            "compare OLD.json NEW.json",
        ):
            assert word in shown
        assert "0 healthy, 1 defect, 2 loss of precision only, 3 could not run" in shown


def test_help_names_every_recipe_and_writes_usage_lines_with_single_spaces():
    words = re.sub(r"[\s│]+", " ", CliRunner().invoke(command.app, ["--help"], prog_name="backlight doctor").output)
    assert all(f" {name}" in words for name in RECIPES)
    wrong = CliRunner().invoke(command.app, ["--causal"], prog_name="backlight doctor")
    for output in (wrong.output, CliRunner().invoke(command.app, ["--help"], prog_name="backlight doctor").output):
        assert "Usage: backlight doctor [OPTIONS] [SUBJECT]" in output
    assert "'backlight doctor --help'" in wrong.output


def test_list_shows_kernels_stories_and_the_whole_catalogue():
    shown = doctor("--list").output
    for name in (*names.NAMED, "tiled", *STORIES, *BY_ID):
        assert re.search(rf"^\s+{re.escape(name)}\s", shown, re.MULTILINE), name


# --- what comes out ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "code"), [(healthy(), 0), (one_head_only(), 1), (Report("fn", "precision", "x"), 2), (could_not_run(), 3)]
)
def test_exit_codes(asked, report, code):
    asked.report = report
    result = doctor("sdpa")
    assert result.exit_code == code
    assert report.headline in result.output


def test_json_file_and_standard_output(asked, tmp_path):
    asked.report = window_defect()
    assert doctor("sdpa", "--json", str(tmp_path / "r.json")).exit_code == 1
    assert report_json.load(tmp_path / "r.json").finding_ids == ("window+1", "open")
    result = doctor("sdpa", "--json", "-")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["subject"] == "sdpa"


def test_report_folder_of_a_healthy_kernel(asked, tmp_path):
    assert doctor("sdpa", "--report", str(tmp_path / "out")).exit_code == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.html", "report.json"}


def test_a_crash_inside_the_kernel_is_told_not_thrown(kernel_file, monkeypatch):
    def crash(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access\nmore lines")

    monkeypatch.setattr(backlight.doctor, "diagnose", crash, raising=False)
    result = doctor(f"{kernel_file}:fn")
    assert result.exit_code == 3
    assert "CUDA error: an illegal memory access" in result.output
    assert "more lines" not in result.output


# --- compare -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_reports(tmp_path):
    return str(report_json.save(window_defect(), tmp_path / "old.json")), str(
        report_json.save(healthy(), tmp_path / "new.json")
    )


def test_compare(two_reports):
    old, new = two_reports
    forward, back, same = doctor("compare", old, new), doctor("compare", new, old), doctor("compare", old, old)
    assert (forward.exit_code, back.exit_code, same.exit_code) == (0, 1, 0)
    assert "verdict: defect -> healthy" in forward.output
    assert re.search(r"gone\s+window\+1", forward.output)
    assert re.search(r"new\s+window\+1", back.output)
    assert "no difference" in same.output


def test_compare_of_something_else(two_reports, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    result = doctor("compare", two_reports[0], str(tmp_path / "x.json"))
    assert result.exit_code == 3
    assert "is not a report" in re.sub(r"\s+", " ", result.output)
    assert doctor("compare", two_reports[0]).exit_code == 3


# --- with the real engine ----------------------------------------------------------------------------------------------------

BROKEN = """
import torch
from torch.nn.functional import scaled_dot_product_attention

def fn(q, k, v, is_causal=False):
    k = k.clone()
    if k.requires_grad:
        k.register_hook(lambda dk: 3.5 * dk)
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
"""


def test_a_broken_kernel_from_file_to_working_script(tmp_path):
    path = tmp_path / "broken_kernel.py"
    path.write_text(BROKEN)
    result = doctor(f"{path}:fn", "--causal", "--shape", "1,2,24,16", "--report", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    report = report_json.load(tmp_path / "out" / "report.json")
    assert report.finding_ids[0] == "scale-dk"
    assert report.location.endswith("broken_kernel.py:5")
    assert report.repro == (tmp_path / "out" / "repro.py").read_text()
    assert "AttentionSpec()" in report.repro, "causal has nothing to do with it and must be gone"
    assert "scale-dk came back in a fresh process" in re.sub(r"\s+", " ", result.output)


def test_a_captured_run_is_examined_and_reproduced(tmp_path):
    path = tmp_path / "captured_kernel.py"
    path.write_text(BROKEN)
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(1, 2, 24, 16, generator=generator).bfloat16() for name in ("query", "key", "value", "dout")}
    torch.save(tensors, tmp_path / "dump.pt")
    result = doctor(f"{path}:fn", "--capture", str(tmp_path / "dump.pt"), "--report", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"report.html", "report.json", "repro.py", "inputs.pt"}
    assert "captured tensors in inputs.pt" in (tmp_path / "out" / "repro.py").read_text()


@pytest.mark.parametrize(("name", "code"), [("case-a", 0), ("case-b", 1), ("case-c", 1), ("case-d", 1)])
def test_the_four_stories(name, code, tmp_path):
    """The seed bugs, by name, with the kernels as they were written; see the texts in `doctor/defects/stories.py`."""
    result = doctor("--demo", name, "--shape", "1,4,72,32", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == code, result.output
    assert STORIES[name].title in result.output
    assert report_json.load(tmp_path / "r.json").finding_ids[0] == catalogue.STORIES[name]


def test_what_a_kernel_cannot_do_is_not_called_its_defect():
    result = doctor("sdpa", "--softcap", "5", "--shape", "1,1,16,8")
    assert result.exit_code == 3
    assert "sdpa has no softcap" in result.output
