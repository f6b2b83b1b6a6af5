"""Statistics against the oracle's own weights and survivors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backlight
from backlight import nn as backlight_nn
from backlight.call import Call
from backlight.cases import BY_NAME
from backlight.nn import Attention, LazyAttention, statistics
from backlight.reference import oracle

DIM, HEADS = 24, 4

LAYERS = {
    "softmax": lambda: Attention(DIM, HEADS, kv_heads=2),
    "sink, softcap": lambda: Attention(DIM, HEADS, sink=True, softcap=2.0),
    "lazy": lambda: LazyAttention(DIM, HEADS, distances=5),
    "lazy, window, sink": lambda: LazyAttention(DIM, HEADS, kv_heads=1, distances=5, window=(11, 0), sink=True),
    "lazy, two-sided": lambda: LazyAttention(DIM, HEADS, distances=5, two_sided=True, causal=False),
}


def made(name: str) -> Attention:
    layer = LAYERS[name]().double()
    with torch.no_grad():
        if isinstance(layer, LazyAttention):
            layer.bias.normal_()
            layer.tau.copy_(torch.tensor([-2.0, -0.9, -0.3, 0.4]))
    return layer


@pytest.mark.parametrize("length", [7, 300], ids=["one tile of rows", "three"])
@pytest.mark.parametrize("name", LAYERS)
def test_statistics_are_those_of_the_oracle(name: str, length: int) -> None:
    layer = made(name)
    x = torch.randn(2, length, DIM, dtype=torch.float64)
    with statistics(layer) as found:
        layer(x)
    q, k, v = layer.project(x)
    spec = layer.spec.replace(gate=False)
    trace = oracle(Call(spec, q, k, v, **layer.terms()), keep=("a", "m"))
    alive = trace.m.sum(dim=-1)
    torch.testing.assert_close(found[""].density, alive.sum(dim=(0, 2)) / (2 * spec.visible_pairs(length, length)))
    torch.testing.assert_close(found[""].mass, trace.a.sum(dim=-1).mean(dim=(0, 2)).double())
    torch.testing.assert_close(found[""].dead_rows, (alive == 0).double().mean(dim=(0, 2)))


def oracle_tiles(call: Call, rows: int, keys: int) -> torch.Tensor:
    """Share of tiles with a visible key in which the oracle keeps one, by head; no packed sequences."""
    m, (sq, sk) = oracle(call, keep=("m",)).m, (call.q.shape[2], call.k.shape[2])
    seen = call.spec.allowed(sq, sk).expand_as(m)

    def any_of(mask: torch.Tensor) -> torch.Tensor:
        corners = [(i, j) for i in range(0, sq, rows) for j in range(0, sk, keys)]
        return torch.stack([mask[:, :, i : i + rows, j : j + keys].flatten(2).any(dim=2) for i, j in corners], dim=2)

    return any_of(m > 0).sum(dim=(0, 2)) / any_of(seen).sum(dim=(0, 2))


@pytest.mark.parametrize("tile", [(128, 128), (16, 8), (7, 5)], ids=str)
@pytest.mark.parametrize(
    "name",
    ["tau", "sink+tau", "bias+tau", "window+tau", "tau+gqa", "tau+sq<sk", "tau+sq>sk", "softcap+tau", "rows without keys,tau"],
)
def test_the_call_by_itself(name: str, tile: tuple[int, int]) -> None:
    call = BY_NAME[name].make(torch.float64).call
    terms = {term: getattr(call, term) for term in call.spec.terms}
    options = {"causal": call.spec.causal, "window": call.spec.window, "softcap": call.spec.softcap}
    found = backlight.statistics(call.q, call.k, call.v, tile=tile, bias_origin=call.spec.bias_origin, **options, **terms)
    trace = oracle(call, keep=("a", "m"))
    counts = call.spec.visible_counts(call.q.shape[2], call.k.shape[2])
    rows, alive = (counts > 0).sum() * call.q.shape[0], trace.m.sum(dim=-1)
    torch.testing.assert_close(found.density, alive.sum(dim=(0, 2)) / (counts.sum() * call.q.shape[0]))
    torch.testing.assert_close(found.mass, trace.a.sum(dim=(0, 2, 3)) / rows)
    torch.testing.assert_close(found.dead_rows, ((alive == 0) & (counts > 0)).double().sum(dim=(0, 2)) / rows)
    torch.testing.assert_close(found.live_tiles, oracle_tiles(call, *tile).double())


def test_a_sharp_head_leaves_dead_tiles() -> None:
    """A bias that keeps ten distances, and a tau that ends the rest: two tiles of a row are live, one in the first."""
    q, k, v = (torch.randn(1, 2, 1024, 16) for _ in range(3))
    bias = torch.full((2, 10), 12.0)
    found = backlight.statistics(q, k, v, causal=True, bias=bias, tau=torch.tensor([-1.0, 0.0]))
    torch.testing.assert_close(found.live_tiles, torch.tensor([15 / 36, 1.0], dtype=torch.float64))
    assert found.density[0] < 0.02


def test_what_cannot_be_meant() -> None:
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(ValueError, match="tile must be two positive sizes"):
        backlight.statistics(q, q, q, tile=(0, 8))
    with pytest.raises(ValueError, match="backend must be one of"):
        backlight.statistics(q, q, q, backend="fast")


def test_packed_is_the_sum_of_its_parts() -> None:
    layer = made("lazy, window, sink")
    x = torch.randn(30, DIM, dtype=torch.float64)
    with statistics(layer) as packed:
        layer(x, cu_seqlens=torch.tensor([0, 10, 20, 30]))
    with statistics(layer) as batched:
        layer(x.view(3, 10, DIM))
    for name in ("density", "mass", "dead_rows", "live_tiles"):
        torch.testing.assert_close(getattr(packed[""], name), getattr(batched[""], name))


def test_every_layer_of_a_model_by_name_and_only_inside_the_block() -> None:
    model = nn.ModuleDict({"first": Attention(DIM, HEADS), "second": LazyAttention(DIM, HEADS)})
    x = torch.randn(1, 6, DIM)
    with statistics(model) as found:
        model["second"](model["first"](x))
    assert set(found) == {"first", "second"}
    torch.testing.assert_close(found["first"].mass, torch.ones(HEADS, dtype=torch.float64))
    torch.testing.assert_close(found["first"].density, torch.ones(HEADS, dtype=torch.float64))
    found.clear()
    model["second"](x)
    assert not found


def test_dead_rows_are_counted() -> None:
    layer = LazyAttention(DIM, HEADS, tau=-1.0)
    with statistics(layer) as found:
        layer(3 * torch.randn(16, 8, DIM))
    assert (found[""].dead_rows == 1 / 8).all(), "the first row sees one key, p = 1 = -tau / n: dead, whatever rounding says"
    layer = LazyAttention(DIM, HEADS, tau=-100.0)
    with statistics(layer) as found:
        layer(torch.randn(1, 8, DIM))
    assert (found[""].dead_rows == 1).all()
    assert (found[""].mass == 0).all()


def test_a_cache_is_refused() -> None:
    layer = Attention(DIM, HEADS)
    with torch.no_grad(), statistics(layer), pytest.raises(ValueError, match="cache must be None where statistics are taken"):
        layer(torch.randn(1, 2, DIM), cache=backlight_nn.KVCache())


def test_what_skipping_saves() -> None:
    """A bias that falls with distance: far tiles lie below every threshold, by their norms already; without one none does."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 8, dtype=torch.float64)
    falling = -torch.arange(256.0, dtype=torch.float64).expand(2, -1)
    options = {"causal": True, "entmax": torch.tensor([1.3, 1.8], dtype=torch.float64), "tile": (16, 16)}
    found = backlight.statistics(q, k, v, bias=falling, **options)
    assert bool((found.live_tiles <= found.formed_tiles).all())
    assert bool((found.formed_tiles < 0.5).all())
    torch.testing.assert_close(found.saved, 1 - (2 * found.formed_tiles + 12 * found.live_tiles) / 14)
    plain = backlight.statistics(q, k, v, **options)
    assert plain.formed_tiles.tolist() == [1, 1]
    assert backlight.statistics(q, k, v, causal=True, bias=falling).saved.tolist() == [0, 0]
