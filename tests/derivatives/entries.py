"""Every public entry as a function of one tensor, beside the same function written in operations of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import backlight
from backlight import compat, nn

B, H, S, D = 1, 2, 4, 3
Function = Callable[[Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, tau: Tensor | None = None, sink: Tensor | None = None):
    """Causal attention of [B, H, S, D] in operations of torch, which torch can differentiate as often as it likes."""
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        distance = (rows - keys).clamp(0, bias.shape[1] - 1)
        s = s + bias[:, distance] * (rows - keys < bias.shape[1])
    s = s.masked_fill(keys > rows, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[2]]
    if tau is not None:
        p = torch.relu(p + tau[None, :, None, None] / (rows + 1)) * (keys <= rows)
    return p @ v


def sparse(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, bias: Tensor | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y, lse) of causal entmax attention. Newton's last steps carry the derivatives of the threshold."""
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias[:, (rows - keys).clamp(0, bias.shape[1] - 1)] * (rows - keys < bias.shape[1])
    rate = (alpha - 1)[:, None, None]
    z = rate * torch.where(keys > rows, -1e3, s)
    if sink is not None:
        z = torch.cat([z, rate * sink[:, None, None].expand(*s.shape[:3], 1)], -1)

    def power(z: Tensor, theta: Tensor, exponent: Tensor) -> Tensor:
        dead = z <= theta
        return torch.where(dead, 0, torch.where(dead, 1, z - theta) ** exponent)

    def newton(z: Tensor, theta: Tensor, rate: Tensor) -> Tensor:
        sums = (power(z, theta, exponent).sum(-1, keepdim=True) for exponent in (1 / rate, 1 / rate - 1))
        return theta + (next(sums) - 1) * rate / next(sums)

    theta = z.detach().amax(-1, keepdim=True) - 1
    for _ in range(8):
        theta = newton(z.detach(), theta, rate.detach())
    for _ in range(2):
        theta = newton(z, theta, rate)
    return power(z, theta, 1 / rate)[..., : k.shape[2]] @ v, ((theta + 1) / rate)[..., 0]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


K, V, BIAS = draw(B, H, S, D, seed=1), draw(B, H, S, D, seed=2), draw(H, 3, seed=3)
TAU, SINK, GATE = torch.tensor([-0.3, 0.4]).double(), draw(H, seed=4), draw(B, H, S, D, seed=5)
ALPHA = torch.tensor([1.3, 1.5]).double()
CU = torch.tensor([0, S])
SINGLE, EYE = draw(B, S, 1, seed=7), torch.eye(H * D).double()
# causal as a pair bias
TRIANGLE = torch.zeros(B, H, S, S).double().masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)


def packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


class Layer:
    """A layer as a function of its input, and what it computes written out."""

    def __init__(self, kind: str):
        torch.manual_seed(6)
        if kind == "lazy":
            self.layer = nn.LazyAttention(H * 2, H, distances=3, rope=None, dtype=torch.float64)
            with torch.no_grad():
                self.layer.bias.normal_()
                self.layer.tau.copy_(TAU)
        else:
            self.layer = nn.Attention(H * 2, H, sink=True, rope=None, dtype=torch.float64)

    def ours(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def truth(self, x: Tensor) -> Tensor:
        q, k, v = self.layer.project(x)
        return self.layer.out(swapped(plain(q, k, v, **self.layer.terms())).flatten(-2))


@dataclass(frozen=True)
class Entry:
    """ours and truth: the same function of a tensor of this shape."""

    ours: Function
    truth: Function
    shape: tuple[int, ...] = (B, H, S, D)


QKV, KV = (B, S, 3, H, D), (B, S, 2, H, D)


def of_packed(run: Callable[..., Tensor]) -> Function:
    return lambda x: run(*x.unbind(-3))


ENTRIES = {
    "attention, q": Entry(lambda x: backlight.attention(x, K, V, causal=True), lambda x: plain(x, K, V)),
    "attention, one tensor": Entry(lambda x: backlight.attention(x, x, x, causal=True), lambda x: plain(x, x, x)),
    "attention, terms": Entry(
        lambda x: backlight.attention(x, K, x, causal=True, bias=BIAS, tau=TAU, sink=SINK, gate=GATE),
        lambda x: plain(x, K, x, BIAS, TAU, SINK) * GATE.sigmoid(),
    ),
    "attention, bias": Entry(
        lambda x: backlight.attention(K, K, V, causal=True, bias=x), lambda x: plain(K, K, V, x), tuple(BIAS.shape)
    ),
    "attention, tau": Entry(
        lambda x: backlight.attention(K, K, V, causal=True, tau=x - 0.5), lambda x: plain(K, K, V, None, x - 0.5), (H,)
    ),
    "attention, entmax": Entry(
        lambda x: backlight.attention(x, K, x, causal=True, bias=BIAS, sink=SINK, gate=GATE, entmax=ALPHA),
        lambda x: sparse(x, K, x, ALPHA, BIAS, SINK)[0] * GATE.sigmoid(),
    ),
    "attention, alpha": Entry(
        lambda x: backlight.attention(K, K, V, causal=True, entmax=x / 9 + 1.6),
        lambda x: sparse(K, K, V, x / 9 + 1.6)[0],
        (H,),
    ),
    "attention, entmax, lse": Entry(
        lambda x: backlight.attention(x, K, V, causal=True, entmax=1.5, return_lse=True)[1],
        lambda x: sparse(x, K, V, ALPHA * 0 + 1.5)[1],
    ),
    "attention, lse": Entry(
        lambda x: backlight.attention(x, K, V, causal=True, return_lse=True)[1],
        lambda x: (x @ K.mT * D**-0.5).masked_fill(~torch.ones(S, S).tril().bool(), -torch.inf).logsumexp(-1),
    ),
    "attention_varlen": Entry(
        lambda x: backlight.attention_varlen(x, packed(K), packed(V), CU, causal=True),
        lambda x: packed(plain(batched(x), K, V)),
        (S, H, D),
    ),
    "flash_attn_func": Entry(
        lambda x: compat.flash_attn_func(x, swapped(K), swapped(V), causal=True),
        lambda x: swapped(plain(swapped(x), K, V)),
        (B, S, H, D),
    ),
    "flash_attn_qkvpacked_func": Entry(
        lambda x: compat.flash_attn_qkvpacked_func(x, causal=True),
        of_packed(lambda q, k, v: swapped(plain(swapped(q), swapped(k), swapped(v)))),
        QKV,
    ),
    "flash_attn_kvpacked_func": Entry(
        lambda x: compat.flash_attn_kvpacked_func(swapped(K), x, causal=True),
        of_packed(lambda k, v: swapped(plain(K, swapped(k), swapped(v)))),
        KV,
    ),
    "flash_attn_varlen_func": Entry(
        lambda x: compat.flash_attn_varlen_func(x, packed(K), packed(V), CU, CU, S, S, causal=True),
        lambda x: packed(plain(batched(x), K, V)),
        (S, H, D),
    ),
    "flash_attn_varlen_qkvpacked_func": Entry(
        lambda x: compat.flash_attn_varlen_qkvpacked_func(x, CU, S, causal=True),
        of_packed(lambda q, k, v: packed(plain(batched(q), batched(k), batched(v)))),
        QKV[1:],
    ),
    "flash_attn_varlen_kvpacked_func": Entry(
        lambda x: compat.flash_attn_varlen_kvpacked_func(packed(K), x, CU, CU, S, S, causal=True),
        of_packed(lambda k, v: packed(plain(K, batched(k), batched(v)))),
        KV[1:],
    ),
    "lazy_attention": Entry(lambda x: compat.lazy_attention(x, K, V, BIAS, TAU), lambda x: plain(x, K, V, BIAS, TAU)),
    "adasplash": Entry(lambda x: compat.adasplash(x, K, V, 1.25), lambda x: sparse(x, K, V, ALPHA * 0 + 1.25)[0]),
    "scaled_dot_product_attention": Entry(
        lambda x: compat.scaled_dot_product_attention(x, K, V, is_causal=True), lambda x: plain(x, K, V)
    ),
    "triangle_attention": Entry(
        lambda x: compat.triangle_attention(x[:, None], K[:, None], V[:, None], TRIANGLE[:, None])[:, 0],
        lambda x: plain(x, K, V),
    ),
    "attention_pair_bias": Entry(
        lambda x: compat.attention_pair_bias(
            SINGLE, x, K, V, TRIANGLE, None, H, None, 0 * EYE[:, :1], EYE, is_cached_z_proj=True
        )[0],
        lambda x: swapped(plain(x, K, V)).flatten(2) / 2,
    ),
    "DS4Sci_EvoformerAttention": Entry(
        lambda x: compat.DS4Sci_EvoformerAttention(
            *(each.transpose(1, 2)[:, None] for each in (x, K, V)), [None, TRIANGLE[:, None]]
        )[:, 0],
        lambda x: swapped(plain(x, K, V)),
    ),
    "nn.Attention": Entry(Layer("plain").ours, Layer("plain").truth, (B, S, H * 2)),
    "nn.LazyAttention": Entry(Layer("lazy").ours, Layer("lazy").truth, (B, S, H * 2)),
}
