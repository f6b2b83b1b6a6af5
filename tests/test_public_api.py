"""The public face, pinned: names, signatures, and what importing the package costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import backlight

SOURCE = Path(__file__).parents[1] / "src"

OPTIONS = {
    "causal": False,
    "window": None,
    "scale": None,
    "softcap": None,
    "bias": None,
    "bias_origin": 0,
    "sink": None,
    "tau": None,
    "gate": None,
    "pair_bias": None,
    "entmax": None,
    "mask": None,
    "return_lse": False,
    "return_max_logit": False,
    "deterministic": None,
    "exact_delta": None,
    "backend": None,
    "context": None,
    "precision": None,
}


def test_exported_names() -> None:
    exported = {"AttentionSpec", "AttentionStatistics", "Explanation", "Unsupported", "__version__"}
    exported |= {"alibi", "attention", "attention_varlen", "cu_seqlens", "doctor", "explain", "mask", "statistics"}
    exported |= {"attention_jvp", "attention_varlen_jvp", "activate", "activated", "deactivate"}
    exported |= {"quantize", "quantize_keys"}
    assert set(backlight.__all__) == exported
    assert all(hasattr(backlight, name) for name in exported)


def keyword_only(function) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def positional(function) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_signatures() -> None:
    assert positional(backlight.attention) == ["q", "k", "v"]
    assert keyword_only(backlight.attention) == OPTIONS
    assert positional(backlight.attention_varlen) == ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"]
    assert inspect.signature(backlight.attention_varlen).parameters["cu_seqlens_k"].default is None
    assert keyword_only(backlight.attention_varlen) == OPTIONS


@pytest.mark.parametrize("name", backlight.mask.__all__)
def test_annotations_of_masks_resolve(name: str) -> None:
    assert typing.get_type_hints(getattr(backlight.mask, name))


def test_annotations_resolve() -> None:
    """They are strings, and one that only a type checker imports is none for whoever asks at run time."""
    functions = [backlight.attention, backlight.attention_varlen, backlight.explain, backlight.statistics]
    for function in functions:
        assert "return" in typing.get_type_hints(function)
    for function in functions[:2]:
        assert typing.get_type_hints(function)["mask"] == backlight.mask.Mask | None


def test_options_are_keywords_only() -> None:
    """A flag passed by position can land in another parameter; here it cannot."""
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(TypeError):
        backlight.attention(q, q, q, True)


def test_explain_takes_the_same_keywords() -> None:
    q = torch.randn(1, 2, 4, 8)
    explanation = backlight.explain(
        q, q, q, causal=True, window=(2, 0), scale=0.5, softcap=3.0, bias=torch.zeros(2, 4), bias_origin=1,
        sink=torch.zeros(2), tau=torch.zeros(2), gate=torch.zeros_like(q), return_lse=True, deterministic=True, backend=None,
    )  # fmt: skip
    assert explanation.chosen in explanation.reasons
    assert explanation.reasons[explanation.chosen] == ()
    assert explanation.chosen in str(explanation)
    assert str(explanation.config) in str(explanation)


def test_explain_of_packed_sequences() -> None:
    q = torch.randn(6, 2, 8)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    assert backlight.explain(q, q, q, cu, causal=True).chosen == "tiled"
    assert backlight.explain(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu).chosen == "tiled"


def test_public_functions_are_documented() -> None:
    for name in ("attention", "attention_varlen", "explain", "AttentionSpec", "Unsupported", "Explanation"):
        assert len(getattr(backlight, name).__doc__ or "") > 60, name
    for name in OPTIONS:
        assert f"{name}:" in backlight.attention.__doc__, name


def test_shapes_and_dtypes_of_what_comes_back() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    assert backlight.attention(q, k, v).shape == (2, 4, 5, 6)
    y, lse = backlight.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), return_lse=True)
    assert (y.dtype, lse.dtype, lse.shape) == (torch.bfloat16, torch.float32, (2, 4, 5))
    y, lse = backlight.attention(q.double(), k.double(), v.double(), return_lse=True)
    assert (y.dtype, lse.dtype) == (torch.float64, torch.float64)
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 7])
    packed = (q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1))
    y, lse = backlight.attention_varlen(*packed, cu_q, cu_k, return_lse=True)
    assert (y.shape, lse.shape) == ((5, 4, 6), (4, 5))


def fresh(code: str) -> str:
    """Output of a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1500, env={"PYTHONPATH": str(SOURCE), "PATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_brings_no_optional_package() -> None:
    """Nor a backend: those load with the first call that needs one."""
    code = (
        "import sys, backlight\n"
        "names = ('triton', 'matplotlib', 'transformers', 'typer', 'rich', 'jinja2', 'backlight.backends.tiled',"
        " 'backlight.reference', 'backlight.doctor')\n"
        "print([name for name in names if name in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_runs_where_optional_packages_are_missing() -> None:
    """Optional packages hidden from the import system: forward, backward and explain still work on a CPU."""
    code = (
        "import sys\n"
        "class Hiding:\n"
        "    def __init__(self, finder):\n"
        "        self.finder = finder\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        hidden = name.split('.')[0] in ('triton', 'matplotlib', 'transformers', 'rich', 'typer', 'jinja2')\n"
        "        return None if hidden else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]\n"
        "import torch, backlight\n"
        "q = torch.randn(1, 2, 5, 8, requires_grad=True)\n"
        "backlight.attention(q, q, q, causal=True).sum().backward()\n"
        "print(bool(q.grad.isfinite().all()), backlight.explain(q, q, q).chosen)"
    )
    assert fresh(code) == "True aten"


def test_operators_are_registered_on_import() -> None:
    """A compiler may trace the operators before any call has been made."""
    code = "import torch, backlight\nprint(torch.ops.backlight.attention, torch.ops.backlight.attention_backward)"
    assert fresh(code) == "backlight.attention backlight.attention_backward"


def test_no_behaviour_hangs_on_the_environment() -> None:
    for path in (SOURCE / "backlight").glob("*.py"):
        read = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "attr", None) in ("environ", "getenv")]
        assert not read, f"{path.name} reads the environment on line {read[0].lineno}"
