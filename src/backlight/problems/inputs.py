"""Input sets and what is known about them: recipes, and a `Problem` that computes the oracle and the yardsticks once.

All tensors are quantised to the kernel's dtype first and upcast for the oracle afterwards: starting from float64 and casting
down would hide the kernel's own error behind the cast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.problems import checks
from backlight.problems.noise import noise
from backlight.reference import GRADIENTS, OUTPUTS, Oracle, Trace, eager, flashlike, oracle
from backlight.reference.trace import STAGES, Stage
from backlight.spec import AttentionSpec

KEPT = (*OUTPUTS, *GRADIENTS, "o", "u", "delta", "p_sink")
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
# a correct fp32 kernel moves p by about 1e-6 of itself; entries closer than this to the kink of eq. 10 may fall on either side
KINK = 3e-6


@dataclass
class Problem:
    """One call with its incoming gradients; truth and yardsticks are computed on first use and kept."""

    call: Call
    dy: Tensor
    dlse: Tensor | None = None
    recipe: str = "gaussian"
    seed: int = 0

    @cached_property
    def units(self) -> dict[tuple[str, torch.dtype], Any]:
        """Where `compare` keeps the noise of each quantity."""
        return {}

    @cached_property
    def truth(self) -> Trace:
        return oracle(self.call, self.dy, self.dlse, KEPT)

    @cached_property
    def noise(self) -> dict[str, Tensor]:
        return noise(self.call, self.dy, self.dlse, self.truth.lse)

    @cached_property
    def eager(self) -> Trace:
        return self._yardstick(eager)

    @cached_property
    def flashlike(self) -> Trace:
        return self._yardstick(flashlike)

    @cached_property
    def kink(self) -> Trace | None:
        """The outputs with every near-kink survivor flipped (eq. 35), or None when no entry sits near the kink."""
        if self.call.tau is None or not bool((self.call.tau < 0).any()):
            return None
        flipped = Oracle(stages=STAGES | {"m": Stage.of(_flipped, "m")})(self.call, self.dy, self.dlse, KEPT)
        same = all(torch.equal(flipped[name], self.truth[name]) for name in KEPT)
        return None if same else flipped

    @property
    def sixteen_bit(self) -> bool:
        return self.call.q.dtype in SIXTEEN_BIT

    @property
    def eps(self) -> float:
        return torch.finfo(self.call.q.dtype).eps

    def _yardstick(self, run: Callable[..., Trace]) -> Trace:
        """The yardstick's values; a float64 problem borrows the fp32 error, scaled down, since fp64 is the oracle itself."""
        if self.call.q.dtype != torch.float64:
            return run(self.call, self.dy, self.dlse, KEPT)
        lower = recast(self.call, torch.float32)
        dlse = None if self.dlse is None else self.dlse.float()
        measured, exact = run(lower, self.dy.float(), dlse, KEPT), oracle(lower, self.dy.float(), dlse, KEPT)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return Trace({n: self.truth[n] + (measured[n].double() - exact[n]).nan_to_num() * ratio for n in measured})

    def replace(self, **changes: Any) -> Problem:
        """The same problem with some fields changed; nothing that was computed is carried over."""
        kept: dict[str, Any] = {n: changes.get(n, getattr(self, n)) for n in ("call", "dy", "dlse", "recipe", "seed")}
        return Problem(**kept)


def _flipped(p, tau, n, visible):
    if tau is None or tau >= 0:
        return visible.to(p.dtype)
    margin = p + tau / n.clamp(min=1)
    near = visible & (margin.abs() <= KINK * -tau / n.clamp(min=1))
    return ((visible & (margin > 0)) ^ near).to(p.dtype)


def recast(call: Call, dtype: torch.dtype) -> Call:
    """The call with every tensor in another dtype."""
    tensors: dict[str, Any] = {n: getattr(call, n) for n in ("q", "k", "v", "bias", "sink", "tau", "gate")}
    cast: dict[str, Any] = {n: None if x is None else x.to(dtype) for n, x in tensors.items()}
    return replace(call, **cast)


# --- recipes ---------------------------------------------------------------------------------------------------------------


def _gaussian(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q, k


def _peaky(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q * 3, k


def _dominant(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One key draws most of every row: a shared direction in q, answered by one key."""
    d = q.shape[-1]
    pull = (6 / (_positive(scale) * d)) ** 0.5
    k = k.clone()
    if k.shape[-2]:
        k[..., k.shape[-2] // 3, :] = pull
    return q + pull, k


def _low_lse(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All logits near -120: exp of a natural-log lse below -88 underflows in fp32."""
    shift = (120 / (_positive(scale) * q.shape[-1])) ** 0.5
    return q + shift, k - shift


def _positive(scale: float) -> float:
    if not scale > 0:
        raise ValueError(f"this recipe aims at scores of a certain size, for which scale must be > 0, got {scale}")
    return scale


RECIPES: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "gaussian": _gaussian,
    "peaky": _peaky,
    "dominant": _dominant,
    "low_lse": _low_lse,
}
DEFAULT_SHAPE = (2, 4, 200, 64)
TAU_CYCLE = (-1.0, 0.5, -2.0, -0.5)


def make(
    spec: AttentionSpec,
    shape: tuple[int, int, int, int] = DEFAULT_SHAPE,
    *,
    kv_heads: int | None = None,
    sk: int | None = None,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    recipe: str = "gaussian",
    seed: int = 0,
    device: torch.device | str = "cpu",
    bias: Tensor | int | None = None,
    sink: Tensor | None = None,
    tau: Tensor | float | None = None,
    gate: Tensor | None = None,
    cu_seqlens: tuple[Tensor, Tensor] | Tensor | None = None,
) -> Problem:
    """Tensors of one recipe: q [B,Hq,S,D], k [B,kv_heads,sk,D], v [..,dv], dO like o, learned terms as the spec asks."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    b, hq, sq, d = checks.four_sizes("shape", shape)
    hkv, sk, dv = (
        default if size is None else checks.size(name, size)
        for name, size, default in (("kv_heads", kv_heads, hq), ("sk", sk, sq), ("dv", dv, d))
    )
    cu_q, cu_k = checks.borders(cu_seqlens)
    if cu_q is not None and cu_k is not None:
        b, sq, sk = 1, int(cu_q[-1]), int(cu_k[-1])
        for name, total in (("cu_seqlens_q", sq), ("cu_seqlens_k", sk)):
            checks.size(f"the last of {name}", total)
    checks.check_heads(hq, hkv)
    checks.check_dtype("dtype", dtype)
    device = checks.usable_device(device)
    columns = bias if isinstance(bias, int) else max(1, spec.bias_origin + max(1, sk // 2)) if spec.bias else 0
    checks.check_room((b, hq, sq, d), hkv, sk, dv, columns, device)
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    q, k, v, dy = draw(b, hq, sq, d), draw(b, hkv, sk, d), draw(b, hkv, sk, dv), draw(b, hq, sq, dv)
    q, k = RECIPES[recipe](q, k, spec.resolve_scale(d))
    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    terms: dict[str, Any] = {}
    if spec.bias:
        terms["bias"] = bias if isinstance(bias, Tensor) else draw(hq, columns).to(parameter)
    if spec.sink:
        terms["sink"] = sink if isinstance(sink, Tensor) else draw(hq).to(parameter)
    if spec.tau:
        cycle = torch.tensor([TAU_CYCLE[h % len(TAU_CYCLE)] for h in range(hq)])
        terms["tau"] = tau if isinstance(tau, Tensor) else (cycle if tau is None else torch.full((hq,), tau)).to(parameter)
    if spec.gate:
        terms["gate"] = gate if isinstance(gate, Tensor) else draw(b, hq, sq, dv).to(dtype)
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    placed: dict[str, Any] = {name: x.to(device) for name, x in terms.items()}
    if cu_q is not None and cu_k is not None:
        placed["cu_seqlens_q"] = cu_q.to(device)
        placed["cu_seqlens_k"] = placed["cu_seqlens_q"] if cu_k is cu_q else cu_k.to(device)
    call = Call(spec, q, k, v, **placed)
    checks.check_call(call)
    return Problem(call, dy.to(dtype).to(device), None, recipe, seed)


def given(
    spec: AttentionSpec,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    do: Tensor | None,
    terms: dict[str, Any],
    cu_seqlens: tuple[Tensor, Tensor] | Tensor | None,
    seed: int,
) -> Problem:
    """A problem from the user's own tensors, canonical layout; a missing dO or learned term is drawn."""
    if q is None or k is None or v is None:
        missing = [name for name, x in (("q", q), ("k", k), ("v", v)) if x is None]
        raise ValueError(f"q, k and v must be given together, got none for {' and '.join(missing)}")
    checks.check_qkv(q, k, v)
    if do is not None:
        checks.check_like_output("do", do, q, v)
    b, hq, sq, d = q.shape
    drawn = make(
        spec, (b, hq, sq, d), kv_heads=k.shape[1], sk=k.shape[2], dv=v.shape[3], dtype=q.dtype, seed=seed, device=q.device,
        cu_seqlens=cu_seqlens, **terms,
    )  # type: ignore[arg-type]  # fmt: skip
    call = replace(drawn.call, q=q.detach(), k=k.detach(), v=v.detach(), _segments=None)
    checks.check_call(call)
    return Problem(call, drawn.dy if do is None else do.detach().to(q.dtype), None, "captured", seed)


def shrink(problem: Problem, length: int = 256, heads: int = 2) -> Problem | None:
    """The first batch entries, heads and positions of a problem; None for packed sequences and odd alignments."""
    call = problem.call
    if call.varlen or call.q.shape[2] != call.k.shape[2]:
        return None
    length = min(length + call.q.shape[2] % 128, call.q.shape[2])
    hkv = min(heads, call.k.shape[1])
    hq, b = hkv * call.group, min(2, call.q.shape[0])
    cut: dict[str, Any] = {"q": call.q[:b, :hq, :length], "k": call.k[:b, :hkv, :length], "v": call.v[:b, :hkv, :length]}
    cut |= {n: getattr(call, n)[:hq] for n in ("bias", "sink", "tau") if getattr(call, n) is not None}
    if call.gate is not None:
        cut["gate"] = call.gate[:b, :hq, :length]
    smaller = replace(call, **{n: x.contiguous() for n, x in cut.items()}, _segments=None)
    return Problem(smaller, problem.dy[:b, :hq, :length].contiguous(), None, problem.recipe, problem.seed)
