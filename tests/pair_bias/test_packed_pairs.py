"""A pair bias of packed sequences: rows and keys are counted in each of them, and the sequences are its batch."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import backlight
from backlight.distributed import simulated_attention
from backlight.doctor import diagnose
from backlight.spec import AttentionSpec

H, D = 4, 8
LENGTHS_Q, LENGTHS_K = (7, 0, 1, 5), (6, 3, 9, 5)
LONGEST_Q, LONGEST_K = max(LENGTHS_Q), max(LENGTHS_K)


def borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, b: Tensor, cu_q: Tensor, cu_k: Tensor, **options: object) -> Tensor:
    """A call for each sequence, with what it has of the bias."""
    found = []
    for z, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)):
        sharing = (len(cu_q) - 1) // len(b)
        own = b[z // sharing, :, : q1 - q0 if b.shape[2] > 1 else 1, : k1 - k0]
        entry = (x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        found.append(backlight.attention(*entry, pair_bias=own[None], **options)[0].transpose(0, 1))
    return torch.cat(found)


FORMS = [(1, H, 7, 9), (1, 1, 7, 9), (2, H, 7, 9), (4, H, 7, 9), (4, 1, 7, 9), (1, H, 1, 9), (2, 1, 1, 9), (2, H, 20, 12)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_same_as_a_call_for_each_sequence(form: tuple[int, ...], causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v, b = drawn(sum(LENGTHS_Q), H, D), drawn(sum(LENGTHS_K), 2, D), drawn(sum(LENGTHS_K), 2, D), drawn(*form)
    cu = borders(LENGTHS_Q), borders(LENGTHS_K)
    y = backlight.attention_varlen(q, k, v, *cu, pair_bias=b, causal=causal)
    wanted = one_by_one(q, k, v, b, *cu, causal=causal)
    torch.testing.assert_close(y, wanted)
    found, want = (torch.autograd.grad(x.square().sum(), (q, k, v, b)) for x in (y, wanted))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


def test_what_no_sequence_has_is_not_read() -> None:
    torch.manual_seed(0)
    lengths, x = (3, 5, 0), drawn(8, 2, D)
    b = torch.full((3, 2, 6, 6), torch.nan, dtype=torch.float64)
    for z, length in enumerate(lengths):
        b[z, :, :length, :length] = torch.randn(2, length, length)
    b.requires_grad_()
    y = backlight.attention_varlen(x, x, x, borders(lengths), pair_bias=b)
    dx, db = torch.autograd.grad(y.square().sum(), (x, b))
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert (db[b.isnan()] == 0).all()


@pytest.mark.parametrize("form", [(1, 2, 5, 5), (2, 1, 5, 5), (2, 2, 1, 5)], ids=str)
def test_gradcheck(form: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, b, cu = drawn(7, 2, 3), drawn(*form), borders((5, 2))
    assert torch.autograd.gradcheck(
        lambda x, b: backlight.attention_varlen(x, x, x, cu, pair_bias=b, causal=True, return_lse=True), (x, b)
    )


def test_a_forward_derivative() -> None:
    torch.manual_seed(0)
    x, b, tb, cu = drawn(7, 2, 3).detach(), drawn(1, 2, 5, 5).detach(), drawn(1, 2, 5, 5).detach(), borders((5, 2))
    _, ty = torch.func.jvp(lambda b: backlight.attention_varlen(x, x, x, cu, pair_bias=b), (b,), (tb,))
    step = 1e-5
    ahead, behind = (backlight.attention_varlen(x, x, x, cu, pair_bias=b + sign * step * tb) for sign in (1, -1))
    torch.testing.assert_close(ty, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_vmap_over_examples() -> None:
    torch.manual_seed(0)
    q, b, cu = torch.randn(3, 7, 2, D), torch.randn(1, 1, 5, 5), borders((5, 2))

    def loss(q: Tensor, b: Tensor) -> Tensor:
        return backlight.attention_varlen(q, q, q, cu, pair_bias=b).square().sum()

    found = vmap(grad(loss, argnums=1), in_dims=(0, None))(q, b)
    for i in range(3):
        torch.testing.assert_close(found[i], grad(loss, argnums=1)(q[i], b))


def test_compiled() -> None:
    x, b = (torch.randn(shape, requires_grad=True) for shape in ((7, 2, D), (1, 2, 5, 5)))
    cu = borders((5, 2))

    def attend(x: Tensor, b: Tensor) -> Tensor:
        return backlight.attention_varlen(x, x, x, cu, pair_bias=b)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found, want = (torch.autograd.grad(f(x, b).square().sum(), (x, b)) for f in (compiled, attend))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


X = torch.randn(8, 2, D)
CU = borders((3, 4, 0, 1))
WRONG = [
    ((3, 2, 4, 4), "pair_bias must be [a divisor of 4, 1 or 2, rows or 1, keys] (sequences, query heads, longest sequence)"),
    ((1, 3, 4, 4), "got shape (1, 3, 4, 4)"),
    ((2, 4, 4), "got shape (2, 4, 4)"),
    ((1, 2, 3, 4), "pair_bias must reach as far as the longest sequence, 4 rows and 4 keys, got shape (1, 2, 3, 4)"),
    ((4, 2, 1, 3), "pair_bias must reach as far as the longest sequence, 4 rows and 4 keys, got shape (4, 2, 1, 3)"),
]


@pytest.mark.parametrize(("form", "sentence"), WRONG, ids=[str(form) for form, _ in WRONG])
def test_what_is_wrong_is_said(form: tuple[int, ...], sentence: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            backlight.attention_varlen(X, X, X, CU, pair_bias=torch.zeros(form))


def test_shards_of_packed_sequences_have_none() -> None:
    for strategy in ("all_to_all", "ring"):
        with pytest.raises(ValueError, match="pair_bias must be None where packed sequences are sharded"):
            simulated_attention(X, X, X, cu_seqlens_q=CU, pair_bias=torch.zeros(1, 2, 4, 4), strategy=strategy)


def test_the_doctor_examines_it() -> None:
    def transposed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, pair_bias: Tensor) -> Tensor:
        return backlight.attention_varlen(q, k, v, cu_seqlens_q, pair_bias=pair_bias.mT)

    def right(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, pair_bias: Tensor) -> Tensor:
        return backlight.attention_varlen(q, k, v, cu_seqlens_q, pair_bias=pair_bias)

    drawn = {"spec": AttentionSpec(pair_bias=True), "shape": (1, 2, 1, 16), "cu_seqlens": borders((20, 9, 3))}
    assert diagnose(right, **drawn, dtype=torch.float32).healthy
    assert not diagnose(transposed, **drawn, dtype=torch.float32).healthy
