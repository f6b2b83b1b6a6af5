"""Deliberately wrong attention kernels, one for each entry of the catalogue: for demos, docs and tests.

Most are the mutant of the entry run as a kernel: fp32 arithmetic, matmul operands rounded to the storage dtype, an
`autograd.Function` around both halves. Defects that no mutant can express (strides, races, memory, precision) are plain PyTorch
code below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.catalogue import get
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.mutants import Mutant, Stages, in_both_halves, run
from backlight.doctor.subject.subject import Subject
from backlight.problems.problem import recast
from backlight.spec import LEARNED, TENSORS, TERM_NAMES, AttentionSpec

Outputs = dict[str, Tensor]
OPTIONAL = tuple(each.name for each in TENSORS if each.optional)


class Kernel:
    """How a broken kernel runs; makers override one method."""

    def __init__(self, mutant: Callable[[Call], Mutant] | None = None):
        self.mutant = mutant or (lambda call: Mutant())

    def forward(self, call: Call) -> Outputs:
        return self._run(call, None, None)

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        return self._run(call, dy, dlse)

    def tangent(self, call: Call, tangents: Mapping[str, Tensor]) -> Outputs:
        return self._run(call, None, None, tangents)

    def _run(self, call: Call, dy: Tensor | None, dlse: Tensor | None, tangents: Mapping[str, Tensor] | None = None) -> Outputs:
        wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        return run(self.mutant(call), call, dy, dlse, dtype=wide, storage=call.q.dtype, tangents=tangents)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Kernel, rest: Mapping[str, Any], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        given: dict[str, Any] = dict(zip(LEARNED, tensors, strict=True)) | dict(rest)
        call = Call(**given)
        out = kernel.forward(call)
        ctx.kernel, ctx.call = kernel, call
        return out["y"].to(call.q.dtype), out["lse"].to(call.accumulator_dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        call = ctx.call
        out = ctx.kernel.backward(call, dy, dlse if bool(dlse.any()) else None)
        gradients = [None if getattr(call, n) is None else out[f"d{n}"].to(getattr(call, n).dtype) for n in LEARNED]
        return None, None, *gradients


class _WithTangent(_Attention):
    """The same with forward mode."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        call = ctx.call
        moving = {name: t for name, t in zip(LEARNED, tangents[2:], strict=True) if t is not None}
        out = ctx.kernel.tangent(call, moving)
        return out["ty"].to(call.q.dtype), out["tlse"].to(call.accumulator_dtype)


def attention_of(kernel: Kernel, function: type[_Attention] = _Attention) -> Callable[..., tuple[Tensor, Tensor]]:
    """A differentiable attention call around a kernel: (o, lse)."""

    def broken_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        window: tuple[int | None, int | None] = (None, None),
        scale: float | None = None,
        softcap: float | None = None,
        bias_origin: int = 0,
        **tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        unknown = [name for name in tensors if name not in OPTIONAL]
        if unknown:
            raise TypeError(f"broken_attention has no {' and no '.join(unknown)}")
        terms = {name: tensors.get(name) for name in TERM_NAMES}
        used: dict[str, Any] = {name: x is not None for name, x in terms.items()}
        spec = AttentionSpec(causal, window, scale, softcap, bias_origin=bias_origin, **used)
        learned = {name: x for name, x in terms.items() if name in LEARNED}
        rest = {"spec": spec} | {name: tensors.get(name) for name in OPTIONAL if name not in learned}
        return function.apply(kernel, rest, q, k, v, *learned.values())

    return _naming_tensors(broken_attention)


def _naming_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with every optional tensor as a keyword: the doctor tells a subject what its signature names."""
    signature = inspect.signature(function)
    plain = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    optional = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONAL]
    function.__signature__ = signature.replace(parameters=[*plain, *optional])  # type: ignore[attr-defined]
    return function


# --- defects without a mutant ----------------------------------------------------------------------------------------------


class DoStride(Kernel):
    """Reads dO with the strides a contiguous dO would have, from wherever dO begins."""

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        return super().backward(call, misread(dy), dlse)


class InputStride(Kernel):
    """Reads q, k and v as if they were contiguous."""

    def forward(self, call: Call) -> Outputs:
        return super().forward(self._misread(call))

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        return super().backward(self._misread(call), dy, dlse)

    def _misread(self, call: Call) -> Call:
        return replace(call, q=misread(call.q), k=misread(call.k), v=misread(call.v))


def misread(x: Tensor) -> Tensor:
    """What a kernel sees that addresses `x` with contiguous strides; beyond the end of the storage it reads zeros."""
    storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())[x.storage_offset() :]
    missing = max(0, x.numel() - storage.numel())
    return torch.cat([storage[: x.numel()], storage.new_zeros(missing)]).view(x.shape)


class SideStream(Kernel):
    """The backward reads dO on a stream of its own and does not wait for the one that fills it."""

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        with torch.cuda.stream(torch.cuda.Stream(dy.device)):
            early = dy.clone()
        torch.cuda.synchronize(dy.device)
        return super().backward(call, early, dlse)


class Race(Kernel):
    """Every run loses the contribution of another few key tiles to dq."""

    TILE = 32

    def __init__(self) -> None:
        super().__init__()
        # no seed of the caller's decides what threads do
        self.chance = torch.Generator()

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        lost = torch.rand(call.q.shape[1], -(-call.k.shape[2] // self.TILE), generator=self.chance) < 0.3

        def dq(dx: Tensor, k: Tensor, scale: float, h: int) -> Tensor:
            keep = (~lost[h]).repeat_interleave(self.TILE)[: dx.shape[1]].to(dx.dtype)
            return scale * ((dx * keep) @ k)

        wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
        return run(Mutant(backward={"dq": dq}), call, dy, dlse, dtype=wide, storage=call.q.dtype)


class Atomics(Kernel):
    """dq is summed over key tiles in another order each time, in fp32: correct."""

    TILE = 16

    def __init__(self) -> None:
        super().__init__()
        self.chance = torch.Generator()

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        order = torch.randperm(-(-call.k.shape[2] // self.TILE), generator=self.chance).tolist()

        def dq(dx: Tensor, k: Tensor, scale: float) -> Tensor:
            total = torch.zeros(dx.shape[0], k.shape[1], dtype=torch.float32)
            for tile in order:
                keys = slice(tile * self.TILE, (tile + 1) * self.TILE)
                total = total + scale * (dx[:, keys].float() @ k[keys].float())
            return total.to(dx.dtype)

        return run(Mutant(backward={"dq": dq}), call, dy, dlse, dtype=torch.float32, storage=call.q.dtype)


class Dropped(Kernel):
    """A tenth of o is dropped, as a module in train mode does it; the backward drops the same."""

    RATE = 0.1

    def forward(self, call: Call) -> Outputs:
        out = super().forward(call)
        self.kept = (torch.rand_like(out["y"], dtype=torch.float32) >= self.RATE) / (1 - self.RATE)
        return out | {"y": out["y"] * self.kept}

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        return super().backward(call, dy * self.kept, dlse)


class Accumulates(Kernel):
    """The buffer of dq survives from call to call and is never cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[tuple[int, ...], Tensor] = {}

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        out = super().backward(call, dy, dlse)
        total = self.buffers.get(tuple(out["dq"].shape), torch.zeros_like(out["dq"])) + out["dq"]
        self.buffers[tuple(total.shape)] = total
        return out | {"dq": total}


class StaleRows(Kernel):
    """dq of the last, partial tile of 64 rows is allocated and never stored."""

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        out = super().backward(call, dy, dlse)
        dq, full = torch.empty_like(out["dq"]), call.q.shape[2] // 64 * 64
        dq[:, :, :full] = out["dq"][:, :, :full]
        return out | {"dq": dq}


class NanCell(Kernel):
    """One row of dk is 0/0."""

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        out = super().backward(call, dy, dlse)
        dk = out["dk"].clone()
        dk[0, -1, min(5, dk.shape[2] - 1)] = float("nan")
        return out | {"dk": dk}


class EmptyLse(Kernel):
    """lse of a row that sees nothing is +inf, as some kernels have it."""

    def forward(self, call: Call) -> Outputs:
        out = super().forward(call)
        return out | {"lse": out["lse"].masked_fill(out["lse"] == -torch.inf, torch.inf)}


class InPlace(Kernel):
    """Scales q in place before the scores."""

    def forward(self, call: Call) -> Outputs:
        call.q.mul_(call.scale)
        return super().forward(replace(call, spec=call.spec.replace(scale=1.0)))

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        out = super().backward(replace(call, spec=call.spec.replace(scale=1.0)), dy, dlse)
        return out | {"dq": out["dq"] * call.scale}


class Cached(Kernel):
    """Remembers the first result for each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[tuple[int, ...], Outputs] = {}

    def forward(self, call: Call) -> Outputs:
        return self.cache.setdefault(tuple(call.q.shape), super().forward(call))


class LowPrecisionAccumulation(Kernel):
    """dq is rounded to the storage dtype after every tile of 32 keys."""

    def backward(self, call: Call, dy: Tensor, dlse: Tensor | None) -> Outputs:
        storage = torch.bfloat16 if call.q.dtype not in (torch.float16, torch.bfloat16) else call.q.dtype

        def dq(dx: Tensor, k: Tensor, scale: float) -> Tensor:
            total = torch.zeros(dx.shape[0], k.shape[1], dtype=dx.dtype)
            for j in range(0, dx.shape[1], 32):
                total = (total + scale * (dx[:, j : j + 32] @ k[j : j + 32])).to(storage).to(dx.dtype)
            return total

        return run(Mutant(backward={"dq": dq}), call, dy, dlse, dtype=torch.float32, storage=call.q.dtype)


class LowPrecisionScores(Kernel):
    """q kT is rounded to bf16 in both directions."""

    def __init__(self) -> None:
        def x(q: Tensor, k: Tensor, scale: float) -> Tensor:
            return (scale * (q @ k.mT)).to(torch.bfloat16).to(q.dtype)

        super().__init__(lambda call: in_both_halves(x=x))


class Narrow(Kernel):
    """Computes in bf16 whatever the inputs are."""

    def _run(self, call: Call, dy: Tensor | None, dlse: Tensor | None, tangents: Mapping[str, Tensor] | None = None) -> Outputs:
        narrow = recast(recast(call, torch.bfloat16), torch.float32)
        dy = None if dy is None else dy.to(torch.bfloat16).float()
        return run(Mutant(), narrow, dy, dlse, dtype=torch.float32, storage=torch.bfloat16)


class UncentredTangent(Kernel):
    """p ts is rounded before its part along p is taken out."""

    def __init__(self) -> None:
        uncentred: Stages = {
            "ta": lambda p, ts: p * ts,
            "tav": lambda ta, v, tlse, p: ta @ v - tlse[:, None] * (p @ v),
        }
        super().__init__(lambda call: Mutant(tangent=uncentred))


def detached() -> Callable[..., tuple[Tensor, Tensor]]:
    """The output leaves the graph before it is returned."""
    inner = attention_of(Kernel())

    def broken_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
        o, lse = inner(q, k, v, causal=causal)
        return o.detach(), lse

    return broken_attention


MAKERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "do_stride": lambda: attention_of(DoStride()),
    "input_stride": lambda: attention_of(InputStride()),
    "side_stream": lambda: attention_of(SideStream()),
    "race": lambda: attention_of(Race()),
    "atomics": lambda: attention_of(Atomics()),
    "dropped": lambda: attention_of(Dropped()),
    "accumulates": lambda: attention_of(Accumulates()),
    "stale_rows": lambda: attention_of(StaleRows()),
    "nan_cell": lambda: attention_of(NanCell()),
    "empty_lse": lambda: attention_of(EmptyLse()),
    "in_place": lambda: attention_of(InPlace()),
    "cached": lambda: attention_of(Cached()),
    "detached": detached,
    "low_precision_accumulation": lambda: attention_of(LowPrecisionAccumulation()),
    "narrow": lambda: attention_of(Narrow()),
    "low_precision_scores": lambda: attention_of(LowPrecisionScores()),
    "uncentred_tangent": lambda: attention_of(UncentredTangent(), _WithTangent),
}


def kernel(name: str) -> Callable[..., Any]:
    """A broken attention callable for a catalogue id (or case-a .. case-d)."""
    defect = get(name)
    if defect.broken is not None:
        return MAKERS[defect.broken]()
    function = _WithTangent if defect.family == "tangents" else _Attention
    return attention_of(Kernel(lambda call: first_variant(defect, call)), function)


def first_variant(defect: Defect, call: Call) -> Mutant:
    assert defect.variants is not None
    return next(iter(defect.variants(call)), Mutant())


def healthy() -> Callable[..., Any]:
    """The same code without a defect: what every broken kernel is measured against."""
    return attention_of(Kernel())


def subject(name: str) -> Subject:
    """The broken kernel as a subject, as `demo:<name>`; packed layouts are handed over in canonical form."""
    return Subject(kernel(name), layout="BHSD", name=f"demo:{name}")
