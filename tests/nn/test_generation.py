"""Generation: step by step gives what one pass gives, whatever the steps, the window and the terms."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch

from backlight.nn import Attention, KVCache, LazyAttention

DIM, HEADS, LENGTH = 24, 4, 23

LAYERS = {
    "plain": lambda: Attention(DIM, HEADS),
    "grouped, sink, gate, norms": lambda: Attention(DIM, HEADS, kv_heads=2, sink=True, gate=True, qk_norm=True),
    "window": lambda: Attention(DIM, HEADS, window=(4, 0)),
    "window of one": lambda: Attention(DIM, HEADS, window=(0, 0)),
    "lazy": lambda: LazyAttention(DIM, HEADS, distances=5),
    "lazy, window": lambda: LazyAttention(DIM, HEADS, kv_heads=2, distances=9, window=(6, None)),
}
STEPS = {"one by one": [1] * LENGTH, "a prompt, then one by one": [9] + [1] * (LENGTH - 9), "in pieces": [2, 7, 1, 5, 8]}


def made(name: str) -> Attention:
    layer = LAYERS[name]().double()
    with torch.no_grad():
        for term in ("bias", "sink"):
            if getattr(layer, term, None) is not None:
                getattr(layer, term).normal_()
        if isinstance(layer, LazyAttention):
            layer.tau.copy_(torch.tensor([-0.9, -0.3, 0.0, 0.5]))
    return layer


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_steps_give_what_one_pass_gives(name: str, steps: list[int]) -> None:
    layer, cache = made(name), KVCache(capacity=4)
    x = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    at_once = layer(x)
    in_steps = torch.cat([layer(part, cache=cache) for part in x.split(steps, dim=1)], dim=1)
    torch.testing.assert_close(in_steps, at_once)
    assert cache.length == LENGTH
    if layer.spec.left is not None:
        assert cache.kept <= layer.spec.left + steps[-1], "keys that no row can see any more are forgotten"


@torch.no_grad()
def test_a_windowed_cache_stays_small() -> None:
    layer, cache = made("window"), KVCache(capacity=4)
    for _ in range(200):
        layer(torch.randn(1, 1, DIM, dtype=torch.float64), cache=cache)
    assert cache.length == 200
    assert cache._k.shape[2] <= 16


@torch.no_grad()
def test_crop_takes_tokens_back() -> None:
    layer, cache = made("lazy"), KVCache()
    x = torch.randn(1, 12, DIM, dtype=torch.float64)
    layer(x[:, :8], cache=cache)
    layer(torch.randn(1, 3, DIM, dtype=torch.float64), cache=cache)
    cache.crop(8)
    torch.testing.assert_close(layer(x[:, 8:], cache=cache), layer(x)[:, 8:])
    with pytest.raises(ValueError, match="length must lie between 0 and 12"):
        cache.crop(13)


@torch.no_grad()
def test_crop_refuses_what_is_forgotten() -> None:
    layer, cache = made("window"), KVCache()
    for _ in range(9):
        layer(torch.randn(1, 1, DIM, dtype=torch.float64), cache=cache)
    with pytest.raises(ValueError, match="length must lie between 4 and 9, which the cache still holds, got 2"):
        cache.crop(2)


@torch.no_grad()
def test_reorder_moves_sequences() -> None:
    layer, cache = made("lazy"), KVCache()
    x = torch.randn(3, 6, DIM, dtype=torch.float64)
    layer(x[:, :5], cache=cache)
    rows = torch.tensor([2, 2, 0])
    cache.reorder(rows)
    moved = torch.cat([x[rows, :5], x[:, 5:]], dim=1)
    torch.testing.assert_close(layer(x[:, 5:], cache=cache), layer(moved)[:, 5:])


def test_a_cache_refuses_gradients() -> None:
    layer = made("plain")
    with pytest.raises(RuntimeError, match="a KVCache keeps no gradients"):
        layer(torch.randn(1, 2, DIM, dtype=torch.float64), cache=KVCache())


@torch.no_grad()
def test_refusals() -> None:
    x = torch.randn(1, 2, DIM)
    with pytest.raises(ValueError, match="cache needs a causal layer"):
        Attention(DIM, HEADS, causal=False)(x, cache=KVCache())
    with pytest.raises(ValueError, match="cache must be None with cu_seqlens"):
        Attention(DIM, HEADS)(x[0], cu_seqlens=torch.tensor([0, 2]), cache=KVCache())
    with pytest.raises(ValueError, match="capacity must be an int >= 1, got 0"):
        KVCache(0)
    layer, cache = Attention(DIM, HEADS), KVCache()
    layer(x, cache=cache)
    with pytest.raises(ValueError, match=r"k must have the batch and heads the cache holds, \(1, 4\), got \(2, 4\)"):
        layer(x.expand(2, -1, -1), cache=cache)


@torch.inference_mode()
def test_inference_mode() -> None:
    layer, cache = made("lazy"), KVCache(capacity=2)
    x = torch.randn(1, 7, DIM, dtype=torch.float64)
    in_steps = torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(in_steps, layer(x))


# --- nothing silent ----------------------------------------------------------------------------------------------------------


def keys(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*(shape or (2, 4, 3, 8)), dtype=dtype)


def state(cache: KVCache) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    rooms = [room for room in (cache._k, cache._v) if room is not None]
    held = [room[:, :, cache._begin : cache._end].clone() for room in rooms]
    return (cache.length, cache.kept, cache._begin, cache._end), held


def assert_unchanged(cache: KVCache, before: tuple[tuple[int, ...], list[torch.Tensor]]) -> None:
    after = state(cache)
    assert after[0] == before[0]
    assert all(torch.equal(now, then) for now, then in zip(after[1], before[1], strict=True))


MISMATCHES = {
    "v of one sequence": (keys(), keys(1, 4, 3, 8), ValueError, "v must have the batch, heads and length of k"),
    "v of one head": (keys(), keys(2, 1, 3, 8), ValueError, r"v must have .* got shape \(2, 1, 3, 8\)"),
    "v of one position": (keys(), keys(2, 4, 1, 8), ValueError, r"v must have .* got shape \(2, 4, 1, 8\)"),
    "k one column wide": (keys(2, 4, 3, 1), keys(), ValueError, "k must have the head dimension the cache holds, 8, got 1"),
    "v one column wide": (keys(), keys(2, 4, 3, 1), ValueError, "v must have the head dimension the cache holds, 8, got 1"),
    "k and v of fp32": (keys().float(), keys().float(), TypeError, "k must have the dtype the cache holds"),
    "v of fp32": (keys(), keys().float(), TypeError, "v must have the dtype of k"),
}


@pytest.mark.parametrize("mistake", MISMATCHES)
@torch.no_grad()
def test_a_cache_broadcasts_nothing(mistake: str) -> None:
    """Assignment into the room would stretch a dimension of 1 and cast a dtype without a word."""
    k, v, error, words = MISMATCHES[mistake]
    cache = KVCache(capacity=16)
    cache.append(keys(), keys())
    before = state(cache)
    with pytest.raises(error, match=words):
        cache.append(k, v)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("filled", [0, 3, 4], ids=["empty", "with room", "full"])
@pytest.mark.parametrize("name", ["lazy", "window"])
@torch.no_grad()
def test_a_call_that_raises_adds_nothing(name: str, filled: int) -> None:
    """Keys of a failed call used to stay: the next step then saw them twice and sat at a wrong position."""
    layer, cache, x = made(name), KVCache(capacity=4), torch.randn(2, 9, DIM, dtype=torch.float64)
    if filled:
        layer(x[:, :filled], cache=cache)
    before = state(cache)
    layer.backend = "hopper"
    with pytest.raises(NotImplementedError):
        layer(x[:, filled:], cache=cache)
    assert_unchanged(cache, before)
    layer.backend = None
    torch.testing.assert_close(layer(x[:, filled:], cache=cache), layer(x)[:, filled:])


def test_a_window_that_reaches_what_is_forgotten_is_refused() -> None:
    """Row 8 sees keys 5 to 8; after row 9 the cache held 6 to 9. Cut back to 8 it gave the row 6 to 8 without a word."""
    layer, x = Attention(8, 2, window=(3, 0)), torch.randn(1, 12, 8)
    with torch.no_grad():
        whole, cache = layer(x), KVCache()
        for i in range(10):
            layer(x[:, i : i + 1], cache=cache)
        cache.crop(9)
        torch.testing.assert_close(layer(x[:, 9:10], cache=cache), whole[:, 9:10])
        cache.crop(8)
        with pytest.raises(ValueError, match=r"left must be at most 2, the keys that the cache still holds of the 8 .* got 3"):
            layer(x[:, 8:9], cache=cache)
        assert cache.length == 8
        with pytest.raises(ValueError, match=r"left must be at most 2, .* got None"):
            cache.append(*(torch.zeros(1, 2, 1, 4) for _ in range(2)))


def test_crop_takes_whole_numbers() -> None:
    cache = KVCache()
    cache.append(keys(), keys())
    for length in (2.5, 2.0, True, "2", None):
        with pytest.raises(TypeError, match="length must be an int"):
            cache.crop(length)
    assert (cache.length, cache.kept) == (3, 3)


@torch.inference_mode()
def test_a_cache_of_inference_mode_stays_there() -> None:
    cache = KVCache()
    cache.append(keys(), keys())
    with torch.inference_mode(False), pytest.raises(RuntimeError, match=r"k must be appended under torch.inference_mode\(\)"):
        cache.append(keys(), keys())


@torch.no_grad()
def test_one_cache_for_two_layers_is_refused() -> None:
    """Layers of one shape would read each other's keys, and nothing would show it."""
    first, second, cache = made("plain"), made("plain"), KVCache()
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    first(x, cache=cache)
    with pytest.raises(ValueError, match="holds keys of another layer: use one cache per layer"):
        second(x, cache=cache)
    assert cache.length == 3
    copied = pickle.loads(pickle.dumps(cache))
    torch.testing.assert_close(first(x, cache=copied), first(x, cache=copy.deepcopy(cache)))
    cache.clear()
    second(x, cache=cache)
    # a layer that is gone has no keys to mix with
    del second
    gc.collect()
    first(x, cache=cache)
    assert repr(cache) == "KVCache(6 keys seen, 6 kept)"
