"""The demo: comparisons that NaN cannot fool, seed cases by name, a model whose every head learns, pictures."""

from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import backlight
from backlight import cli
from backlight.demo import pictures, seeds, train
from backlight.demo.compare import difference
from backlight.demo.model import LAGS, targets_of

SEEDS = {seed.name: seed for seed in seeds.SEEDS}


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def truth():
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# --- comparison --------------------------------------------------------------------------------------------------------------


def test_equal_passes(truth):
    same = difference("dq", truth.clone(), truth, 1e-3)
    assert not same.failed
    assert (same.largest, same.mean, same.large, same.non_finite) == (0, 0, 0, 0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_fails_and_is_counted_apart(truth, bad):
    got = truth.clone()
    got[1, 2] = bad
    found = difference("dq", got, truth, 1e-3)
    assert found.failed
    assert (found.non_finite, found.large, found.largest) == (1, 0, 0)


def test_all_nan_fails(truth):
    found = difference("dq", torch.full_like(truth, torch.nan), truth, 1e-3)
    assert found.failed
    assert found.non_finite == truth.numel()


def test_missing_gradient_fails(truth):
    assert difference("dq", None, truth, 1e-3).failed


def test_one_wrong_value_fails(truth):
    got = truth.clone()
    got[0, 0] += 2e-3
    found = difference("dq", got, truth, 1e-3)
    assert found.failed
    assert found.large == 1
    assert found.largest == pytest.approx(2e-3)
    assert found.mean == pytest.approx(2e-3 / truth.numel())
    assert not difference("dq", got, truth, 3e-3).failed


def test_other_shape_is_an_error(truth):
    with pytest.raises(ValueError, match=r"dq has shape \(5, 3\), expected \(3, 5\)"):
        difference("dq", truth.mT, truth, 1e-3)


def test_comparing_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing to compare"):
        difference("dq", torch.zeros(0, 4), torch.zeros(0, 4), 1e-3)


# --- seeds -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("name", "limit"), [("identity4x4", 1e-3), ("random128x64", 5e-3)])
def test_seed_agrees_with_the_oracle(name, limit, causal):
    seed = SEEDS[name]
    assert seed.limit == limit
    _, _, differences = seeds.examine(seed, causal)
    assert [d.name for d in differences] == ["y", "dq", "dk", "dv"]
    assert not [d for d in differences if d.failed]


def test_identity_seed_by_hand():
    """One logit of 1 among four: p is e / (e + 3) on the diagonal, 1 / (e + 3) elsewhere."""
    seed = SEEDS["identity4x4"]
    inputs = seed.make()
    y = seeds.by_attention(seed, inputs, causal=False)["y"]
    total = math.e + 3
    p = torch.full((4, 4), 1 / total) + torch.eye(4) * (math.e - 1) / total
    torch.testing.assert_close(y[0, 0], p @ inputs["v"][0, 0])


def test_random_seed_is_as_named():
    inputs = SEEDS["random128x64"].make()
    assert all(tensor.shape == (1, 1, 128, 64) for tensor in inputs.values())
    assert all(tensor.min() >= -0.5 and tensor.max() <= 0.5 for tensor in inputs.values())


def nan_gradient(got):
    got["dk"][0, 0, 2, 1] = torch.nan


def doubled_gradient(got):
    got["dv"] *= 2


def lost_gradient(got):
    got["dq"] = None


@pytest.mark.parametrize("spoil", [nan_gradient, doubled_gradient, lost_gradient])
def test_spoiled_gradient_fails_the_command(monkeypatch, spoil):
    honest = seeds.by_attention

    def spoiled(*arguments):
        got = honest(*arguments)
        spoil(got)
        return got

    monkeypatch.setattr(seeds, "by_attention", spoiled)
    result = CliRunner().invoke(cli.app, ["demo", "seeds"])
    assert result.exit_code == 1
    assert "FAIL" in result.output


def test_seed_command_shows_the_report():
    result = CliRunner(env={"COLUMNS": "120"}).invoke(cli.app, ["demo", "seeds"])
    assert result.exit_code == 0
    for word in ("identity4x4", "random128x64", "max diff", "mean diff", "large", "non-finite", "dq", "dk", "dv", "PASS"):
        assert word in result.output


# --- training ----------------------------------------------------------------------------------------------------------------


def test_targets_are_the_tokens_each_lag_back():
    tokens = torch.arange(40)[None]
    targets = targets_of(tokens)
    assert targets.shape == (1, 40 - max(LAGS), len(LAGS))
    for column, lag in enumerate(LAGS):
        assert targets[0, 0, column] == max(LAGS) - lag
        assert targets[0, -1, column] == 39 - lag


@pytest.fixture(scope="module")
def short_run():
    return train.train(Console(file=io.StringIO()), steps=5)


def test_every_head_moves_within_a_few_steps(short_run):
    assert len(short_run.losses) == 5
    assert short_run.still_heads == []
    assert short_run.losses[-1] < short_run.losses[0]
    for moment in (short_run.before, short_run.after):
        assert (moment.density > 0).all()
        assert (moment.density <= 1).all()


def test_a_few_steps_are_not_called_learned(short_run):
    assert not short_run.learned


def test_heads_without_gradient_are_reported(monkeypatch):
    """Only head 0 receives gradients: the founding bug of the project, here by detaching the other heads' terms."""
    honest = backlight.attention

    def first_head_only(q, k, v, *, bias, tau, **keywords):
        bias = torch.cat([bias[:1], bias[1:].detach()])
        tau = torch.cat([tau[:1], tau[1:].detach()])
        return honest(q, k, v, bias=bias, tau=tau, **keywords)

    monkeypatch.setattr(backlight, "attention", first_head_only)
    history = train.train(Console(file=io.StringIO()), steps=2)
    assert history.still_heads == [1, 2, 3]
    assert not history.learned


def test_nan_tau_is_reported(short_run):
    spoiled = [[*values[:2], math.nan, values[3]] for values in short_run.taus]
    history = train.History(short_run.losses, spoiled, short_run.before, short_run.after)
    assert history.still_heads == [2]


@pytest.mark.slow
def test_the_whole_demo_learns(console, tmp_path):
    assert train.run(console, tmp_path)


# --- pictures ----------------------------------------------------------------------------------------------------------------


def test_pictures_are_written(short_run, console, tmp_path):
    pytest.importorskip("matplotlib")
    pictures.report(console, short_run, tmp_path / "new")
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert written == ["lazy_attention.png", "lazy_attention.svg"]
    assert (tmp_path / "new" / "lazy_attention.png").read_bytes().startswith(b"\x89PNG")


def test_text_stands_in_for_pictures(short_run, console, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "has_matplotlib", lambda: False)
    pictures.report(console, short_run, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    shown = console.file.getvalue()
    for head in range(4):
        assert f"head {head}" in shown


def test_sparkline():
    assert pictures.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == pictures.BARS
    assert pictures.sparkline([1, 1, 1]) == "▁▁▁"
    assert pictures.sparkline([0, math.nan, 1]) == "▁?█"
    assert len(pictures.sparkline(list(range(1000)), width=50)) == 50
