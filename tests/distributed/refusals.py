"""What ranks of a Gloo world say when one of them is wrong, does something else or does not come: see `checks.py`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, check
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import backlight
from backlight.distributed import ContextParallel

# --- failures ----------------------------------------------------------------------------------------------------------------


def raises(error: type[Exception], words: str, work: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(words)):
        work()


@check((2, 4))
def unequal_options_are_named_everywhere(rank: Rank) -> None:
    q = torch.randn(1, 2, 4, 8)
    context = rank.context()
    shown = "ranks disagree on window left: rank 0 has 0, rank 1 has 1"
    raises(ValueError, shown, lambda: backlight.attention(q, q, q, window=(rank.number, 0), context=context))
    assert backlight.attention(q, q, q, context=context).shape == q.shape, "the world is usable after a refusal"


@check((2, 4))
def wrong_shards_are_named_everywhere(rank: Rank) -> None:
    length = 4 + (rank.number == 1)
    q = torch.randn(1, 2, length, 8)
    context = rank.context(layout="contiguous")
    raises(ValueError, "shards of q must have", lambda: backlight.attention(q, q, q, context=context))
    packed, cu = torch.randn(4, 2, 8), torch.tensor([0, 3, 9])
    raises(
        ValueError, "the end of cu_seqlens_q", lambda: backlight.attention_varlen(packed, packed, packed, cu, context=context)
    )


@check((2, 4))
def one_rank_with_bad_arguments(rank: Rank) -> None:
    """The rank itself says what is wrong with its arguments; the others say which rank it was."""
    q = torch.randn(1, 2, 4, 8)
    k = torch.randn(1, 2, 4, 7 if rank.number == 1 else 8)
    words = "k must have the head dimension of q, 8, got 7" if rank.number == 1 else "rank 1 refused the call"
    raises(ValueError, words, lambda: backlight.attention(q, k, k, context=rank.context()))


# --- ranks that do different things: one sentence on every rank, where Gloo used to end the process -------------------------


def usable(rank: Rank) -> None:
    q = torch.randn(1, 2, 4, 8)
    assert backlight.attention(q, q, q, context=rank.context()).shape == q.shape, "the world is usable after a refusal"


@check((2,))
def first_check_notices_other_windows(rank: Rank) -> None:
    """Both kinds are known to both ranks; one takes the first and one the second. It used to end quietly, and wrong."""
    context, q = rank.context(check="first", strategy="ring"), torch.randn(1, 2, 4, 8)
    windows = ((1, 0), (2, 0))
    for window in (*windows, *windows):
        backlight.attention(q, q, q, window=window, context=context)
    shown = "ranks disagree on window left: rank 0 has 1, rank 1 has 2"
    raises(ValueError, shown, lambda: backlight.attention(q, q, q, window=windows[rank.number], context=context))
    usable(rank)


@check((2,))
def attention_on_one_rank_and_unshard_on_the_other(rank: Rank) -> None:
    context, q = rank.context(), torch.randn(1, 2, 4, 8)
    call = (lambda: backlight.attention(q, q, q, context=context)) if rank.number == 0 else (lambda: context.unshard(q, 2))
    raises(ValueError, "but rank 0 is in step 'options check', rank 1 is in step 'unshard'", call)
    usable(rank)


@check((2,))
def forward_on_one_rank_and_backward_on_the_other(rank: Rank) -> None:
    context, q = rank.context(), torch.randn(1, 2, 4, 8, requires_grad=True)
    y = backlight.attention(q, q, q, context=context)
    call = y.sum().backward if rank.number == 0 else (lambda: backlight.attention(q, q, q, context=context))
    raises(ValueError, "but rank 0 is in step 'backward check', rank 1 is in step 'options check'", call)
    usable(rank)


@check((2,))
def backwards_in_another_order(rank: Rank) -> None:
    """The calls have other shapes, so that messages of one do not fit the other."""
    context = rank.context(strategy="ring")
    inputs = [torch.randn(1, 2, length, 8, requires_grad=True) for length in (4, 6)]
    outputs = [backlight.attention(x, x, x, context=context) for x in inputs]
    shown = "ranks disagree on the call whose backward runs: rank 0 has call 1, rank 1 has call 2"
    raises(ValueError, shown, lambda: outputs[rank.number].sum().backward())
    usable(rank)


@check((2,))
def lse_in_the_loss_of_one_rank(rank: Rank) -> None:
    """All-to-all sends gradients of lse: a rank without one sends zeros."""
    torch.manual_seed(5)
    whole, context = torch.randn(1, 2, 8, 8), rank.context(strategy="all_to_all")
    weight = torch.zeros(8)
    weight[context.positions(8)] = 1.0 - rank.number
    dist.all_reduce(weight)
    x = whole.clone().requires_grad_()
    y, lse = backlight.attention(x, x, x, return_lse=True)
    (wanted,) = torch.autograd.grad(y.sum() + (lse * weight).sum(), x)
    own = context.shard(whole, 2).clone().requires_grad_()
    y, lse = backlight.attention(own, own, own, return_lse=True, context=context)
    (got,) = torch.autograd.grad(y.sum() + lse.sum() if rank.number == 0 else y.sum(), own)
    torch.testing.assert_close(got, context.shard(wanted, 2))


@check((2,))
def shards_that_make_no_tensor(rank: Rank) -> None:
    context = rank.context(layout="contiguous")
    both = ((torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32)), "dtype of the shard: rank 0 has torch.float32, rank 1")
    for shards, words in (
        both,
        ((torch.zeros(2, 3), torch.zeros(2, 4)), "the size of dimension 1 of the shard: rank 0 has 3, rank 1 has 4"),
        ((torch.zeros(2, 3), torch.zeros(2, 3, 1)), "the dimensions of the shard: rank 0 has 2, rank 1 has 3"),
        ((torch.zeros(2, 3), torch.zeros(5, 3)), "shards of the tensor must have 4, 3 positions"),
    ):
        raises(ValueError, words, lambda own=shards[rank.number]: context.unshard(own, 0))
    words = "dim must be one of the 2 dimensions" if rank.number else "rank 1 refused the call"
    raises(ValueError, words, lambda: context.unshard(torch.zeros(2, 3), 5 * rank.number))
    assert context.unshard(torch.zeros(2, 3), 0).shape == (4, 3)


@check((1, 2))
def dtensors_under_zigzag(rank: Rank) -> None:
    """Shard(2) means neighbours; taken for zigzag shards, causal rows saw the wrong keys."""
    whole = torch.randn(1, 2, 8, 8)
    placed = DTensor.from_local(rank.context(layout="contiguous").shard(whole, 2), rank.mesh, [Shard(2)])
    words = "layout must be contiguous where q, k and v are DTensors, which are sharded so, got 'zigzag'"
    raises(ValueError, words, lambda: backlight.attention(placed, placed, placed, causal=True, context=rank.context()))
    usable(rank)


@check((2, 4))
def meshes_of_two_dimensions(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, rank.world // 2), mesh_dim_names=("dp", "cp"))
    raises(ValueError, "mesh must have one dimension, got 2", lambda: ContextParallel(mesh))
    assert ContextParallel(mesh["cp"]).world == rank.world // 2


@check((2,))
def a_rank_that_does_not_come(rank: Rank) -> None:
    """The last check of this world: after a time-out the connection is gone."""
    q = torch.randn(1, 2, 4, 8)
    if rank.number == 0:
        words = "rank 0: waited for 2 s for rank 1 in step 'options check'"
        raises(TimeoutError, words, lambda: backlight.attention(q, q, q, context=rank.context(timeout=2.0)))
    else:
        time.sleep(5)
