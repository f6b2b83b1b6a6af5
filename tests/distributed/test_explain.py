"""`explain` under a context: what a rank would do with its blocks, asked of one rank alone."""

from __future__ import annotations

import pytest
import torch

import backlight
from backlight.backends.tiled import TiledBackend
from backlight.contexts import entered
from backlight.distributed import ContextParallel
from backlight.distributed.simulation import Alone

Q = torch.randn(1, 4, 16, 8)
CU = torch.tensor([0, 5, 16])
TAU = torch.zeros(4)


class Silent(Alone):
    """Whoever sends anything through it fails."""

    def __getattribute__(self, name: str) -> object:
        assert name in ("rank", "world", "__class__", "exchange"), name
        return super().__getattribute__(name)


NO_PARTS = "does not take parts of a larger problem"


def context(strategy: str) -> ContextParallel:
    return ContextParallel(Silent(0, 2), strategy=strategy)


@pytest.mark.parametrize("strategy", ["ring", "all_to_all", "auto"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"tau": TAU, "sink": TAU}], ids=str)
def test_the_backend_that_would_run(strategy: str, options: dict[str, object]) -> None:
    explanation = backlight.explain(Q, Q, Q, context=context(strategy), **options)
    # heads are whole with all_to_all, so that torch's own kernel may have a plain call
    chosen = "aten" if strategy == "all_to_all" and "tau" not in options else "tiled"
    assert explanation.chosen == chosen
    assert explanation.reasons[chosen] == ()
    assert explanation.config is not None


def test_packed_sequences() -> None:
    packed = Q[0].transpose(0, 1)
    assert backlight.explain(packed, packed, packed, CU, causal=True, context=context("ring")).chosen == "tiled"


def test_a_backend_without_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not chosen for blocks, even by name: as `attention` has it."""
    monkeypatch.setattr(TiledBackend, "takes", TiledBackend.takes - {"part"})
    ring = context("ring")
    assert backlight.explain(Q, Q, Q, context=ring).reasons["tiled"] == (NO_PARTS,)
    assert backlight.explain(Q, Q, Q, context=ring).chosen is None
    assert backlight.explain(Q, Q, Q, context=ring, backend="tiled").chosen is None
    assert backlight.explain(Q, Q, Q, context=ring, backend="tiled", tau=TAU).reasons["tiled"] == (NO_PARTS,)
    assert backlight.explain(Q, Q, Q, context=context("all_to_all"), tau=TAU).chosen == "tiled"
    assert backlight.explain(Q, Q, Q, tau=TAU).chosen == "tiled"


def test_inside_the_block_of_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TiledBackend, "takes", TiledBackend.takes - {"part"})
    with entered(context("ring")):
        assert backlight.explain(Q, Q, Q).chosen is None
    assert backlight.explain(Q, Q, Q).chosen == "aten"


def test_wrong_arguments_get_the_same_sentence() -> None:
    with pytest.raises(ValueError, match="the heads of q must be a multiple of the heads of k"):
        backlight.explain(Q, Q[:, :3], Q[:, :3], context=context("ring"))
    with pytest.raises(ValueError, match="backend must be one of"):
        backlight.explain(Q, Q, Q, context=context("ring"), backend="cuda")
