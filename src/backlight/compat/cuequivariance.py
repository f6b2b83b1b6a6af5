"""cuEquivariance's attention with a pair bias: its names, arguments and layout.

Keys that a mask hides are hidden and not moved to -1e9: a row of which every key is hidden gives 0, and not the mean of all
values. The bias keeps its dtype, and its gradient comes in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.arguments import check_flag, check_number, check_tensor, check_whole, shown
from backlight.compat.masked import of_keys


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> Tensor:
    """`cuequivariance_torch.triangle_attention`: softmax of q.k * scale + bias over keys that the mask leaves.

    Args:
        q, k, v: [B, N, H, S, D]; for B = 1 also [N, H, S, D].
        bias: [B, 1, H, Sq, Sk], or without the B; the N entries share it without a copy. It has a gradient.
        mask: [B, N, 1, 1, Sk], or without the B; boolean or what counts as such, True where a key is seen.
        scale: factor on q.k, default D ** -0.5.
        return_aux: refused: the largest score of a row is not returned.

    Returns:
        out, shaped like q, with Dv columns.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("bias", bias)):
        check_tensor(name, x)
        if x.dim() != q.dim() or x.dim() not in (4, 5):
            raise ValueError(f"{name} must have 5 dimensions, or 4 without the batch, as q has, got shape {tuple(x.shape)}")
    check_flag("return_aux", return_aux)
    if return_aux:
        raise NotImplementedError("return_aux must be False: the largest score of a row is not returned")
    check_number("scale", scale, optional=True)
    single = q.dim() == 4
    if single:
        q, k, v, bias = (x[None] for x in (q, k, v, bias))
    options: dict[str, Any] = {"scale": scale, "pair_bias": _usable(bias, q)}
    if mask is not None:
        options["mask"] = of_keys(_keys_seen(mask, q, k), q.shape[3])
    y = backlight.attention(q, k, v, **options)
    return y[0] if single else y


def _usable(bias: Tensor, q: Tensor) -> Tensor:
    """The bias in a dtype that the call takes."""
    return bias if bias.dtype in (q.dtype, torch.float32) else bias.to(torch.float32)


def _keys_seen(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """[B * N, Sk] of a mask [B, N, 1, 1, Sk] or, for B = 1, [N, 1, 1, Sk]."""
    check_tensor("mask", mask)
    batch, n, keys = q.shape[0], q.shape[1], k.shape[3]
    wanted = (batch, n, 1, 1, keys)
    if tuple(mask.shape) != wanted and (batch, *mask.shape) != (1, *wanted[1:]):
        raise ValueError(f"mask must be {list(wanted)} (B, N, 1, 1, keys), got shape {tuple(mask.shape)}")
    return mask.reshape(batch * n, keys).to(torch.bool)


def attention_pair_bias(
    s: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    z: Tensor,
    mask: Tensor | None,
    num_heads: int,
    w_proj_z: Tensor | None,
    w_proj_g: Tensor,
    w_proj_o: Tensor,
    w_ln_z: Tensor | None = None,
    b_ln_z: Tensor | None = None,
    b_proj_z: Tensor | None = None,
    b_proj_g: Tensor | None = None,
    b_proj_o: Tensor | None = None,
    inf: float = 1e6,
    eps: float = 1e-5,
    attn_scale: float | None = None,
    return_z_proj: bool = True,
    is_cached_z_proj: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`cuequivariance_torch.attention_pair_bias`: the bias is made of z, the output gated by s and projected.

    Args:
        s: [B * M, S, Ds]; q: [B * M, H, S, D]; k, v: [B * M, H, Sk, D]. M consecutive entries share a z.
        z: [B, S, Sk, Dz], of which layer norm and projection make the bias; with is_cached_z_proj the bias, [B, H, S, Sk].
        mask: [B, Sk] or [B * M, Sk], 0 where a key is hidden; None = every key is seen. `inf` is not needed.
        w_proj_z: [H, Dz]; w_proj_g: [H * D, Ds]; w_proj_o: [Ds, H * D]; b_proj_*: their biases; w_ln_z, b_ln_z: [Dz].

    Returns:
        out [B * M, S, Ds], and the bias [B, H, S, Sk], or None unless return_z_proj.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("z", z)):
        check_tensor(name, x, "[B, ., ., .]")
    check_tensor("s", s, "[B * M, S, Ds]")
    check_whole("num_heads", num_heads, least=1)
    for name, flag in (("return_z_proj", return_z_proj), ("is_cached_z_proj", is_cached_z_proj)):
        check_flag(name, flag)
    if q.shape[1] != num_heads:
        raise ValueError(f"q must have num_heads heads, {num_heads}, got shape {tuple(q.shape)}")
    bias = z if is_cached_z_proj else _projected(z, w_proj_z, b_proj_z, w_ln_z, b_ln_z, eps)
    gate = torch.nn.functional.linear(s, w_proj_g, b_proj_g).unflatten(-1, (num_heads, -1)).transpose(1, 2).to(q.dtype)
    options: dict[str, Any] = {} if mask is None else {"mask": of_keys(_of_entries(mask, q, k), q.shape[2])}
    y = backlight.attention(q, k, v, scale=attn_scale, gate=gate, pair_bias=_usable(bias, q), **options)
    out = torch.nn.functional.linear(y.transpose(1, 2).flatten(2).to(w_proj_o.dtype), w_proj_o, b_proj_o)
    return out, bias if return_z_proj else None


def _projected(z: Tensor, w: Any, b: Tensor | None, w_ln: Tensor | None, b_ln: Tensor | None, eps: float) -> Tensor:
    """[B, S, Sk, Dz] -> [B, H, S, Sk], a view of what lies heads last."""
    if not isinstance(w, Tensor):
        raise TypeError(f"w_proj_z must be a torch.Tensor unless z is the projection itself, got {shown(w)}")
    normed = torch.nn.functional.layer_norm(z, z.shape[-1:], w_ln, b_ln, eps)
    return torch.nn.functional.linear(normed, w, b).movedim(-1, 1)


def _of_entries(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    check_tensor("mask", mask, "[B, Sk]")
    entries, keys = q.shape[0], k.shape[2]
    if mask.shape[1] != keys or not mask.shape[0] or entries % mask.shape[0]:
        raise ValueError(f"mask must be [B, {keys}] with B a divisor of {entries}, got shape {tuple(mask.shape)}")
    return mask.to(torch.bool).repeat_interleave(entries // mask.shape[0], dim=0)
