"""The demo: comparisons that NaN cannot fool, seed cases by name, a model whose every head learns, pictures."""

from __future__ import annotations

import copy
import functools
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
from backlight.demo.model import CharacterModel
from backlight.demo.text import Text

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


def test_the_text_is_the_book():
    text = Text.alice()
    assert len(text) > 100_000
    assert text.text.count("Alice") > 300
    assert text.decode(text.encode("curiouser")) == "curiouser"
    assert len(text.training) + len(text.held_out) == len(text)


def test_batches_are_passages_of_the_training_part():
    text = Text.alice()
    passages = text.batch(4, 20, torch.Generator().manual_seed(0))
    assert passages.shape == (4, 21)
    training = text.decode(text.training)
    assert all(text.decode(passage) in training for passage in passages)
    evaluation = text.evaluation(3, 20)
    assert all(text.decode(passage) in text.decode(text.held_out) for passage in evaluation)
    assert not any(text.decode(passage) in training for passage in evaluation)


@pytest.fixture(scope="module")
def short_run():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(train, "fit", functools.partial(train.fit, batch=8, length=32))
        return train.train(Console(file=io.StringIO()), steps=4)


def test_every_head_moves_within_a_few_steps(short_run):
    for history in short_run.values():
        assert len(history.losses) == 4
        assert history.still_heads == []
        assert history.moments[-1].loss < history.moments[0].loss < 1.05 * math.log(69)
        assert history.sample
    for moment in short_run["lazy"].moments:
        assert (moment.density > 0).all()
        assert (moment.density <= 1).all()
    assert short_run["lazy"].bias_change.shape == (2, 4)
    assert short_run["entmax"].alpha_change.shape == (2, 4)
    assert (short_run["entmax"].moments[-1].density < 1).any()


def test_a_few_steps_are_not_called_learned(short_run):
    assert not any(history.learned for history in short_run.values())


def test_the_seed_decides_everything():
    text = Text.alice()
    first, again, other = (train.fit("lazy", text, steps=2, batch=2, length=16, seed=seed) for seed in (3, 3, 4))
    assert first.losses == again.losses
    assert torch.equal(first.moments[-1].bias, again.moments[-1].bias)
    assert first.sample == again.sample
    assert first.losses != other.losses


def test_all_models_start_from_the_same_weights():
    torch.manual_seed(0)
    softmax = CharacterModel("softmax", 10)
    others = []
    for kind in ("lazy", "entmax"):
        torch.manual_seed(0)
        others.append(CharacterModel(kind, 10).state_dict())
    for name, value in softmax.state_dict().items():
        assert all(torch.equal(value, other[name]) for other in others), name


def test_made_text_is_that_of_whole_passes():
    """A cache gives the characters that a pass over the whole text would have given."""
    torch.manual_seed(0)
    model = CharacterModel("lazy", 10).double()
    start = torch.randint(10, (5,))
    made = model.continue_text(start, 6, torch.Generator().manual_seed(1), temperature=1e-6)
    so_far = start
    for character in made:
        assert model(so_far[None])[0, -1].argmax() == character
        so_far = torch.cat([so_far, character[None]])


def test_heads_without_gradient_are_reported(monkeypatch):
    """Only head 0 receives gradients: the founding bug of the project, here by detaching the other heads' terms."""
    honest = backlight.attention

    def first_head_only(q, k, v, *, bias=None, tau=None, **keywords):
        if bias is not None:
            bias = torch.cat([bias[:1], bias[1:].detach()])
            tau = torch.cat([tau[:1], tau[1:].detach()])
        return honest(q, k, v, bias=bias, tau=tau, **keywords)

    monkeypatch.setattr(backlight, "attention", first_head_only)
    history = train.fit("lazy", Text.alice(), steps=2, batch=2, length=16)
    assert history.still_heads == [(layer, head) for layer in range(2) for head in (1, 2, 3)]
    assert not history.learned


def test_nan_tau_is_reported(short_run):
    history = copy.deepcopy(short_run["lazy"])
    history.taus[1][1, 2] = math.nan
    assert history.still_heads == [(1, 2)]


def test_nan_loss_is_not_learning(short_run):
    history = copy.deepcopy(short_run["softmax"])
    history.moments[-1] = train.Moment(step=4, loss=math.nan)
    assert not history.learned


@pytest.fixture(scope="module")
def reported(short_run, tmp_path_factory):
    """The verdict on the short run, what was said of it, the folder of its pictures."""
    console, folder = Console(file=io.StringIO(), width=120), tmp_path_factory.mktemp("reported") / "new"
    return train.report(console, short_run, folder), console.file.getvalue(), folder


def test_report_fails_on_what_did_not_learn(reported):
    learned, said, _ = reported
    assert not learned
    assert "at least 1.5 were expected" in said


@pytest.mark.slow
def test_the_whole_demo_learns(console, tmp_path):
    assert train.run(console, tmp_path)


# --- pictures ----------------------------------------------------------------------------------------------------------------


def test_pictures_are_written(reported):
    pytest.importorskip("matplotlib")
    *_, folder = reported
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["train_entmax.png", "train_entmax.svg", "train_lm.png", "train_lm.svg"]
    assert (folder / "train_lm.png").read_bytes().startswith(b"\x89PNG")


def test_text_stands_in_for_pictures(short_run, console, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "has_matplotlib", lambda: False)
    pictures.report(console, short_run, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    shown = console.file.getvalue()
    for layer in range(2):
        for head in range(4):
            assert f"layer {layer} head {head}" in shown


def test_sparkline():
    assert pictures.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == pictures.BARS
    assert pictures.sparkline([1, 1, 1]) == "▁▁▁"
    assert pictures.sparkline([0, math.nan, 1]) == "▁?█"
    assert len(pictures.sparkline(list(range(1000)), width=50)) == 50
