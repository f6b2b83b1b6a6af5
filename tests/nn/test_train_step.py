"""benchmarks/train_step.py, rehearsed on a CPU: records, refusals, and a gate that a wrong gradient does not pass."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import backlight

pytestmark = [
    pytest.mark.clean_memory,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning"),
]

PATH = Path(__file__).parents[2] / "benchmarks" / "train_step.py"
TINY = "--device cpu --dim 32 --heads 2 --layers 1 --length 64 --vocabulary 100 --batch 1 --rounds 2 --steps 1 --warmup 1"


@pytest.fixture(scope="module")
def train_step():
    spec = importlib.util.spec_from_file_location("train_step", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_step"] = module
    spec.loader.exec_module(module)
    yield module
    torch._dynamo.reset()


def record_of(train_step, monkeypatch, out: Path, variants: str) -> dict:
    monkeypatch.setattr(sys, "argv", ["train_step.py", "--out", str(out), *TINY.split(), "--variants", *variants.split()])
    # settings of the compiler are the script's own
    with torch._dynamo.config.patch(recompile_limit=64, automatic_dynamic_shapes=False):
        train_step.main()
    (path,) = out.glob("train-step-*.json")
    return json.loads(path.read_text())


def test_a_small_run_leaves_a_record(train_step, monkeypatch, tmp_path) -> None:
    record = record_of(train_step, monkeypatch, tmp_path, "plain lazy")
    rows = record["variants"]
    for variant in ("plain", "lazy"):
        ours = rows[variant]["backlight"]
        assert ours["gate"]["passed"]
        assert len(ours["ms"]) == 2
        assert ours["tokens_per_s"] > 0
        assert ours["losses"][-1] < ours["losses"][0] + 0.1
    assert rows["plain"]["sdpa"]["tokens_per_s"] > 0
    assert "no compiled backward" in rows["plain"]["flex"]["refused"]
    assert "elastic softmax" in rows["lazy"]["flex"]["refused"]


def test_a_wrong_gradient_does_not_pass(train_step, monkeypatch) -> None:
    """The founding bug: only head 0 gets its gradients. Outputs and loss are perfect."""
    honest = backlight.attention

    def first_head_only(q, k, v, *, bias, tau, **options):
        return honest(
            q, k, v, bias=torch.cat([bias[:1], bias[1:].detach()]), tau=torch.cat([tau[:1], tau[1:].detach()]), **options
        )

    shape, device = train_step.Shape(dim=32, heads=2, length=64), torch.device("cpu")
    assert train_step.gate(shape, "lazy", device, "eager", {"backend": None})["passed"]
    torch._dynamo.reset()
    monkeypatch.setattr(backlight, "attention", first_head_only)
    verdict = train_step.gate(shape, "lazy", device, "eager", {"backend": None})
    assert not verdict["passed"]
    assert verdict["worst"].endswith(("bias", "tau"))


def test_the_default_shape_has_350_million_parameters(train_step) -> None:
    with torch.device("meta"):
        model = train_step.Decoder(train_step.Shape(), "lazy")
    assert 340e6 < sum(parameter.numel() for parameter in model.parameters()) < 360e6


def test_what_takes_too_long_is_two_layers_and_a_reason(train_step, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(train_step, "contenders", lambda *_: {"flex": [{"flex": {}}]})
    monkeypatch.setattr(train_step, "decoder_options", lambda *_: {"attend": train_step.by_dense})
    row = record_of(train_step, monkeypatch, tmp_path, "bias --patience 0")["variants"]["bias"]["flex"]
    assert row["two_layers_ms"] > 0
    assert row["failed"].startswith("TimeoutError: two of 1 layers take")
    assert "tokens_per_s" not in row
