"""`Attention`: projections around the public call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

import backlight
from backlight.arguments import check_flag, check_number, check_whole
from backlight.binding import make_spec
from backlight.mask import Mask
from backlight.nn.cache import KVCache
from backlight.nn.checks import check_cache, check_factory, check_input, check_known, check_positions, held_mask, remember_owner
from backlight.nn.rotary import angles, packed_positions, rotate

LOW_PRECISION = (torch.float16, torch.bfloat16)


class LayerOptions(TypedDict, total=False):
    """Keywords of a layer that it hands on: the first five to the call, the others to its parameters."""

    causal: bool
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    backend: str | None
    device: torch.device | str | None
    dtype: torch.dtype | None


class Attention(nn.Module):
    """Self-attention: x [B, S, dim] -> [B, S, dim], or packed [T, dim] with `cu_seqlens`.

    Parameters: `qkv` and `out` (linear), and by option `gate` (linear), `q_norm` and `k_norm` (RMSNorm over a head), `sink`
    [heads]. `sink` stays fp32 when the module is cast to fp16 or bf16: its gradient is a sum over every row of the batch.

    Args:
        dim: width of x.
        heads: query heads.
        kv_heads: key/value heads, a divisor of `heads`; None = `heads`.
        head_dim: None = dim / heads.
        causal, window, scale, softcap, backend: as in `backlight.attention`, but causal by default.
        rope: base of the rotary embedding (10000.0 is common), None = none. Columns turn in halves.
        qk_norm: RMSNorm on q and k before the rotation.
        sink: a learned logit per head in the denominator.
        gate: the output of the heads is multiplied by sigmoid(gate(x)).
        linear_bias: bias vectors in the projections.
        device, dtype: of the parameters, as in `torch.nn.Linear`.
    """

    fp32_parameters: tuple[str, ...] = ("sink",)

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope: float | None = 10000.0,
        qk_norm: bool = False,
        sink: bool = False,
        gate: bool = False,
        linear_bias: bool = False,
        **options: Unpack[LayerOptions],
    ):
        super().__init__()
        for name, count in (("dim", dim), ("heads", heads)):
            check_whole(name, count, least=1)
        for name, part in (("kv_heads", kv_heads), ("head_dim", head_dim)):
            check_whole(name, part, least=1, optional=True)
        for name, flag in (("qk_norm", qk_norm), ("sink", sink), ("gate", gate), ("linear_bias", linear_bias)):
            check_flag(name, flag)
        check_known(options, LayerOptions.__annotations__)
        factory: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
        self.backend = options.get("backend")
        check_factory(self.backend, **factory)
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim must be a multiple of heads when head_dim is not given, got {dim} and {heads}")
            head_dim = dim // heads
        check_number("rope", rope, above=1, optional=True)
        if rope is not None and head_dim % 2:
            raise ValueError(f"rope needs an even head_dim, got {head_dim}; rope=None leaves it out")
        self.dim, self.heads, self.kv_heads, self.head_dim = dim, heads, kv_heads, head_dim
        asked: dict[str, Any] = {"causal": True} | {name: x for name, x in options.items() if name not in (*factory, "backend")}
        self.spec = make_spec(**asked).replace(sink=sink, gate=gate)
        self.rope = rope
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim, bias=linear_bias, **factory)
        self.out = nn.Linear(heads * head_dim, dim, bias=linear_bias, **factory)
        self.gate = nn.Linear(dim, heads * head_dim, bias=linear_bias, **factory) if gate else None
        self.q_norm = nn.RMSNorm(head_dim, **factory) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, **factory) if qk_norm else None
        self.sink = self._term((heads,), **factory) if sink else None
        self.reset_parameters()

    @staticmethod
    def _term(shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Parameter:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return nn.Parameter(torch.empty(shape, device=device, dtype=wide))

    def reset_parameters(self) -> None:
        """Fresh values: linear weights normal with variance 1 / fan-in, their biases 0, norms 1, sink 0."""
        for linear in (self.qkv, self.out, self.gate):
            if linear is not None:
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()
        if self.sink is not None:
            nn.init.zeros_(self.sink)

    def forward(
        self,
        x: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: [B, S, dim]; with `cu_seqlens` [T, dim], sequences one after another.
            cu_seqlens: [Z + 1] int32 or int64, borders of the packed sequences.
            positions: integers [S] or [B, S] ([T] when packed) for the rotary embedding; default: counted from 0 in each
                sequence, or on from what the cache has seen.
            cache: keys and values of the past; those of x are added to it. Needs a causal layer and no gradients.
            mask: which rows of x see a key (`backlight.mask`), on top of causal and window; with a cache, of all keys that it
                has seen, also those it has forgotten, and those of x.
        """
        check_input(self, x, cu_seqlens)
        check_cache(self, cache, cu_seqlens)
        q, k, v = self.project(x, cu_seqlens=cu_seqlens, positions=positions, offset=0 if cache is None else cache.length)
        options = self.options(x) | {"mask": mask}
        if cu_seqlens is not None:
            return self.out(backlight.attention_varlen(q, k, v, cu_seqlens, **options).flatten(-2))
        staged = None if cache is None else cache.stage(k, v, left=self.spec.left)
        if staged is not None:
            k, v = staged.held
            options["mask"] = held_mask(mask, staged.seen, k.shape[2])
        y = self.out(backlight.attention(q, k, v, **options).transpose(1, 2).flatten(-2))
        if cache is not None and staged is not None:
            cache.commit(staged)
            remember_owner(self, cache)
        return y

    def project(
        self, x: Tensor, *, cu_seqlens: Tensor | None = None, positions: Tensor | None = None, offset: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as the public call takes them: [B, H, S, D], or [T, H, D] when packed."""
        check_input(self, x, cu_seqlens)
        check_positions(positions, x)
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (norm(x.to(norm.weight.dtype)) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if self.rope is not None:
            if positions is None:
                length = x.shape[-2]
                if cu_seqlens is None:
                    positions = torch.arange(offset, offset + length, device=x.device)
                else:
                    positions = packed_positions(cu_seqlens, length)
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            cos, sin = angles(positions, self.head_dim, self.rope, dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # under autocast the norms have answered in the dtype of their weights
        q, k = q.to(v.dtype), k.to(v.dtype)
        return (q, k, v) if cu_seqlens is not None else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    def terms(self) -> dict[str, Tensor]:
        """The learned terms of the call, by keyword."""
        return {} if self.sink is None else {"sink": self.sink}

    def options(self, x: Tensor | None = None) -> dict[str, Any]:
        """Keywords of the public call; the gate needs x."""
        options = self.spec.options | {"backend": self.backend}
        if self.gate is not None and x is not None:
            gate = self.gate(x).unflatten(-1, (self.heads, self.head_dim))
            options["gate"] = gate.transpose(1, 2) if x.dim() == 3 else gate
        return options | self.terms()

    def extra_repr(self) -> str:
        shown = [f"{self.dim}, heads={self.heads}", f"kv_heads={self.kv_heads}", f"head_dim={self.head_dim}"]
        shown += [f"causal={self.spec.causal}", f"window={self.spec.window}"] if self.spec.masked else []
        return ", ".join([*shown, f"rope={self.rope}"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attention:
        """Casts and moves of the module; learned terms are moved, but not cast below fp32."""
        terms = [getattr(self, name) for name in self.fp32_parameters]
        kept = {id(x) for term in terms if term is not None for x in (term, term.grad) if x is not None}

        def apply(tensor: Tensor) -> Tensor:
            done = fn(tensor)
            narrowed = id(tensor) in kept and done.dtype in LOW_PRECISION and tensor.dtype not in LOW_PRECISION
            return tensor.to(done.device) if narrowed else done

        return super()._apply(apply, recurse)
