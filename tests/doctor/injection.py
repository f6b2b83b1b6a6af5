"""Breaking the tiled backend in a test: edits of its source text, and wrappers around its two entry points.

Nothing of this can be reached from shipped code. An edit names the text it replaces and fails loudly when that text is gone, so
a refactoring of the backend cannot silently turn a mutation test into a test of nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import backlight
from backlight.backends.tiled import TiledBackend
from backlight.call import Call
from backlight.doctor.broken import misread
from backlight.doctor.catalogue import get
from backlight.doctor.mutants import Mutant, Outputs, head_of_group
from backlight.doctor.subject import Subject
from backlight.spec import LN2

PACKAGE = "backlight.backends.tiled"


def ours(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, bias=None, bias_origin=0, sink=None, tau=None, gate=None
):  # fmt: skip
    """The public call on the tiled backend, with its lse."""
    return backlight.attention(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, bias_origin=bias_origin, sink=sink,
        tau=tau, gate=gate, return_lse=True, backend="tiled",
    )  # fmt: skip


def ours_packed(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, causal=False, window=None, bias=None, sink=None, tau=None):
    """The packed public call on the tiled backend, with its lse."""
    return backlight.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, bias=bias, sink=sink, tau=tau, return_lse=True,
        backend="tiled",
    )  # fmt: skip


# --- edits of the source -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in a module of the backend; `sees` says which direction imports the edited module."""

    module: str
    old: str
    new: str
    sees: tuple[str, ...] = ("forward", "backward")


DS = "ds = dp.sub_(delta[:, part]).mul_(p)"
DK = "add_product_(dk[:, :, keys], scores.q[:, part].mT, dx)"
DV = "add_product_(dv[:, :, keys], do[:, part].mT, a.to(scores.operand))"
DQ = "add_product_(dq[:, part], dx, scores.k[:, keys])"
DELTA = "delta = (do * y).sum(dim=-1, keepdim=True)"
MASKED = "            torch.minimum(part, bound, out=part)\n        return tile_values"
STRICT = (
    "            torch.minimum(part, bound, out=part)\n"
    "        i = torch.arange(tile.i0, tile.i1).repeat_interleave(group)[:, None] + sk - sq\n"
    "        return tile_values.masked_fill_(i == torch.arange(tile.j0, tile.j1)[None, :], -math.inf)"
)
SINK_SHARE = "torch.exp(block.repeat_positions(heads_of(call.sink, slab, group, dtype)) - lse)"
SCORE_WITH_BIAS = f"((torch.log2(p.clamp(min=1e-37)) + lse2[:, part]) * {LN2} / call.spec.softcap)"

EDITS: dict[str, list[Edit]] = {
    "scale-scores-backward": [
        Edit("primitives", "self.factor = call.scale * LOG2E if", "self.factor = LOG2E if", ("backward",)),
        Edit("primitives", "return LN2 if self.spec", "return LN2 * self.call.scale if self.spec", ("backward",)),
    ],
    "transpose-dk": [Edit("backward", DK, "add_product_(dk[:, :, tile.i0 : tile.i1], scores.q[:, keys].mT, dx.mT)")],
    "transpose-dv": [Edit("backward", DV, "add_product_(dv[:, :, tile.i0 : tile.i1], do[:, keys].mT, a.mT)")],
    "transpose-dq": [Edit("backward", DQ, "add_product_(dq[:, keys], dx.mT, scores.k[:, tile.i0 : tile.i1])")],
    "mask-strict-backward": [Edit("primitives", MASKED, STRICT, ("backward",))],
    "mask-strict": [Edit("primitives", MASKED, STRICT)],
    "empty-rows-nan": [Edit("forward", "acc.div_(l.masked_fill(l == 0, 1))", "acc.div_(l)")],
    "tile-lost-dq": [
        Edit(
            "backward",
            DQ,
            "add_product_(dq[:, part], dx[:, :, max(0, 64 - tile.j0) :], scores.k[:, keys][:, max(0, 64 - tile.j0) :])",
        )
    ],
    "tile-lost-dk": [
        Edit(
            "backward",
            DK,
            "add_product_(dk[:, :, keys], scores.q[:, part][:, max(0, 64 - tile.i0) :].mT, dx[:, max(0, 64 - tile.i0) :])",
        ),
        Edit(
            "backward",
            DV,
            "add_product_(dv[:, :, keys], do[:, part][:, max(0, 64 - tile.i0) :].mT, a[:, max(0, 64 - tile.i0) :])",
        ),
    ],
    "delta-missing": [Edit("backward", DS, "ds = dp.mul_(p)")],
    "delta-negated": [Edit("backward", DS, "ds = dp.add_(delta[:, part]).mul_(p)")],
    "delta-shifted": [Edit("backward", DS, "ds = dp.sub_(delta.roll(1, dims=1)[:, part]).mul_(p)")],
    "delta-rounded": [Edit("backward", DS, "ds = dp.sub_(delta[:, part].bfloat16().to(dp.dtype)).mul_(p)")],
    "dp-split": [
        Edit(
            "backward",
            "dp = product(do[:, part], v_columns[:, :, keys],",
            "dp = product(do[:, part, : do.shape[2] // 2], v_columns[:, : do.shape[2] // 2, keys],",
        )
    ],
    "dlse-ignored": [Edit("backward", "if incoming.dlse is not None:", "if False:")],
    "dlse-sign": [Edit("backward", "delta -= block.rows_of(incoming.dlse", "delta += block.rows_of(incoming.dlse")],
    "softcap-derivative": [Edit("backward", "ds.mul_(scores.tanh.square_().neg_().add_(1))", "pass")],
    "softcap-after-bias": [
        Edit("backward", "ds.mul_(scores.tanh.square_().neg_().add_(1))", f"ds.mul_(1 - {SCORE_WITH_BIAS}**2)")
    ],
    "softcap-before-scale": [
        Edit("primitives", "else call.scale / call.spec.softcap", "else 1 / call.spec.softcap"),
        Edit("primitives", "self.spec.softcap * LOG2E", "self.spec.softcap * LOG2E * self.call.scale"),
        Edit("primitives", "is None else self.spec.softcap", "is None else self.spec.softcap * self.call.scale"),
    ],
    "dbias-batch": [Edit("primitives", "        target += part", "        target.copy_(part)", ("backward",))],
    "tau-delta": [Edit("backward", "delta -= elastic.tau * mean", "pass")],
    "tau-skip-dead": [Edit("backward", DS, "ds = dp.sub_(delta[:, part]).mul_(p if m is None else p * m)")],
    "tau-unmasked": [Edit("primitives", "        scores.mask_(a, tile)\n", "")],
    "tau-count": [Edit("primitives", "self.tau, self.n = tau, n.clamp(min=1)", "self.tau, self.n = tau, n + 1")],
    "dtau-undivided": [Edit("backward", "block.sum_positions(mean)", "block.sum_positions(mean * elastic.n)")],
    "sink-delta": [Edit("backward", DELTA, f"{DELTA} / (1 - {SINK_SHARE})")],
    "dsink-unweighted": [Edit("backward", "torch.exp(kappa - lse) * delta", "delta")],
    "gate-missing-backward": [Edit("backward", "do = do * weight", "pass")],
    "dgate-derivative": [Edit("backward", "do * y * (1 - weight)", "do * y")],
    "gate-delta": [Edit("backward", "do = do * weight", f"do = do * weight\n        {DELTA}")],
}


def edited_modules(edits: list[Edit]) -> dict[str, types.ModuleType]:
    """Fresh copies of forward and backward with the edits applied; the originals stay as they are."""
    texts: dict[tuple[str, str], str] = {}
    for edit in edits:
        for direction in edit.sees if edit.module == "primitives" else (edit.module,):
            key = (direction, edit.module)
            text = texts.get(key) or Path(importlib.import_module(f"{PACKAGE}.{edit.module}").__file__).read_text()
            assert edit.old in text, f"the text to break is gone from {edit.module}.py: {edit.old!r}"
            texts[key] = text.replace(edit.old, edit.new)
    found = {}
    for direction in {direction for direction, _ in texts}:
        original = sys.modules[f"{PACKAGE}.primitives"]
        shared = texts.get((direction, "primitives"))
        try:
            if shared is not None:
                sys.modules[f"{PACKAGE}.primitives"] = _module("primitives", shared)
            importlib.import_module(f"{PACKAGE}.{direction}")
            own = texts.get((direction, direction)) or Path(sys.modules[f"{PACKAGE}.{direction}"].__file__).read_text()
            found[direction] = _module(direction, own)
        finally:
            sys.modules[f"{PACKAGE}.primitives"] = original
    return found


def _module(name: str, text: str) -> types.ModuleType:
    module = types.ModuleType(f"{PACKAGE}.{name}")
    module.__package__ = PACKAGE
    saved = sys.modules.get(module.__name__)
    # dataclasses look their module up by name while they are made
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, f"<edited {name}>", "exec"), module.__dict__)
    finally:
        if saved is not None:
            sys.modules[module.__name__] = saved
    return module


# --- wrappers of the entry points --------------------------------------------------------------------------------------------


class Wrapped:
    """The backend's two entry points with something wrong around them."""

    def __init__(self) -> None:
        self.run_forward, self.run_backward = TiledBackend.forward, TiledBackend.backward

    def forward(self, backend: TiledBackend, call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.run_forward(backend, call, save_u)

    def backward(self, backend, call, y, lse, u, dy, dlse, needs) -> Outputs:
        return self.run_backward(backend, call, y, lse, u, dy, dlse, needs)


class ByMutant(Wrapped):
    """What the mutant says about inputs and outputs, around the real kernels; stages are left to edits."""

    def __init__(self, choose: Callable[[Call], Mutant]):
        super().__init__()
        self.choose = choose

    def forward(self, backend, call, save_u):
        mutant = self.choose(call)
        assert plain_mutant(mutant), "this mutant changes stages: it needs an edit of the source"
        y, lse, u = self.run_forward(backend, mutant.sees(call), save_u)
        out = mutant.finish({"y": y, "lse": lse}, call)
        return out["y"], out["lse"], u

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        mutant = self.choose(call)
        seen = mutant.sees(call)
        saved = mutant.saved({"y": y, "o": y, "lse": lse, "u": u}, seen)
        backward_call = mutant.sees_backward(seen)
        dy = mutant.gradient(dy, backward_call)
        out = self.run_backward(backend, backward_call, saved["y"], saved["lse"].contiguous(), saved["u"], dy, dlse, needs)
        out = mutant.finish(out, call)
        return {n: x.to(getattr(call, n[1:]).dtype).contiguous() for n, x in out.items()}


def plain_mutant(mutant: Mutant) -> bool:
    """Whether a mutant can be expressed around the kernels."""
    maps = mutant.kv_forward is head_of_group and mutant.kv_backward is head_of_group
    return not mutant.forward and not mutant.backward and maps and mutant.combine == "sum"


class Resized(Wrapped):
    """Forward, backward or both see another number of keys, or another table."""

    def __init__(self, change: Callable[[Call], Call], directions: tuple[str, ...] = ("forward", "backward")):
        super().__init__()
        self.change, self.directions = change, directions

    def forward(self, backend, call, save_u):
        return self.run_forward(backend, self.change(call) if "forward" in self.directions else call, save_u)

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        seen = self.change(call) if "backward" in self.directions else call
        out = self.run_backward(backend, seen, y, lse, u, dy, dlse, needs)
        return {n: fitted(n, x, getattr(call, n[1:])) for n, x in out.items()}


def fitted(name: str, gradient: Tensor, like: Tensor) -> Tensor:
    """Cut or padded with zeros to the shape of the input; a clamped table collects what lies beyond its end."""
    if gradient.shape == like.shape:
        return gradient
    dim = 1 if name == "dbias" else 2
    length, wanted = gradient.shape[dim], like.shape[dim]
    if length > wanted:
        head = gradient.narrow(dim, 0, wanted).clone()
        if name == "dbias":
            head[:, -1] += gradient[:, wanted:].sum(1)
        return head
    shape = list(like.shape)
    shape[dim] = wanted - length
    return torch.cat([gradient, gradient.new_zeros(shape)], dim=dim)


def keys(count: int) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, count - x.shape[2])) for x in (call.k, call.v))
        return replace(call, k=k.contiguous(), v=v.contiguous(), _segments=None)

    return change


def table(change: Callable[[Tensor, Call], Tensor]) -> Callable[[Call], Call]:
    return lambda call: replace(call, bias=change(call.bias, call).contiguous())


def extended(bias: Tensor, call: Call) -> Tensor:
    return torch.cat([bias, bias[:, -1:].expand(-1, call.k.shape[2])], dim=1)


class ScaledBias(Resized):
    """The bias is added before the softmax scale; its gradient follows."""

    def __init__(self) -> None:
        super().__init__(table(lambda bias, call: bias * call.scale))

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        out = super().backward(backend, call, y, lse, u, dy, dlse, needs)
        return out | {"dbias": out["dbias"] * call.scale}


class GroupMember(Wrapped):
    """dk and dv of one query head per group."""

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        last = torch.arange(call.q.shape[1]) % call.group == call.group - 1
        out = super().backward(backend, call, y, lse, u, dy, dlse, needs)
        one = super().backward(backend, call, y, lse, u, dy * last[None, :, None, None], dlse, needs)
        return out | {n: one[n] for n in ("dk", "dv")}


class GroupMean(Wrapped):
    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        out = super().backward(backend, call, y, lse, u, dy, dlse, needs)
        return out | {n: out[n] / call.group for n in ("dk", "dv")}


class HeadMap(Wrapped):
    """Query heads dealt to KV heads in turn."""

    def __init__(self, directions: tuple[str, ...]):
        super().__init__()
        self.directions = directions

    def _order(self, call: Call) -> Tensor:
        return torch.arange(call.q.shape[1]).view(-1, call.k.shape[1]).T.flatten()

    def forward(self, backend, call, save_u):
        if "forward" not in self.directions:
            return super().forward(backend, call, save_u)
        order = self._order(call)
        y, lse, u = super().forward(backend, replace(call, q=call.q[:, order]), save_u)
        back = order.argsort()
        return y[:, back].contiguous(), lse[:, back].contiguous(), u

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        order = self._order(call)
        seen = replace(call, q=call.q[:, order])
        out = super().backward(backend, seen, y[:, order], lse[:, order], u, dy[:, order], dlse, needs)
        return out | {"dq": out["dq"][:, order.argsort()].contiguous()}


class RowMaximum(Wrapped):
    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        s = call.scale * (call.q.float() @ call.k.float().repeat_interleave(call.group, 1).mT)
        s = s.masked_fill(~call.spec.allowed(*s.shape[-2:]), -torch.inf)
        return super().backward(backend, call, y, s.amax(-1).to(lse.dtype), u, dy, dlse, needs)


class MisreadGradient(Wrapped):
    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        return super().backward(backend, call, y, lse, u, misread(dy), dlse, needs)


class MisreadInputs(Wrapped):
    def forward(self, backend, call, save_u):
        return super().forward(backend, self._seen(call), save_u)

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        return super().backward(backend, self._seen(call), y.contiguous(), lse, u, dy, dlse, needs)

    def _seen(self, call: Call) -> Call:
        return replace(call, q=misread(call.q), k=misread(call.k), v=misread(call.v))


class LostUpdates(Wrapped):
    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        out = super().backward(backend, call, y, lse, u, dy, dlse, needs)
        kept = torch.rand((*out["dq"].shape[:3], 1)) > 0.2
        return out | {"dq": out["dq"] * kept.to(out["dq"].dtype)}


class Uncleared(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | float = 0.0

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        out = super().backward(backend, call, y, lse, u, dy, dlse, needs)
        same = isinstance(self.total, Tensor) and self.total.shape == out["dk"].shape
        self.total = (self.total if same else 0.0) + out["dk"]
        return out | {"dk": self.total}


class UnwrittenTail(Wrapped):
    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        out = super().backward(backend, call, y, lse, u, dy, dlse, needs)
        dk, full = torch.empty_like(out["dk"]), call.k.shape[2] // 64 * 64
        dk[:, :, :full] = out["dk"][:, :, :full]
        return out | {"dk": dk}


class OneNan(Wrapped):
    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        out = super().backward(backend, call, y, lse, u, dy, dlse, needs)
        out["dv"].view(-1)[77] = float("nan")
        return out


class ChangesQ(Wrapped):
    def forward(self, backend, call, save_u):
        result = super().forward(backend, call, save_u)
        call.q.detach().mul_(2)
        return result


class Remembers(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.first: dict[tuple[int, ...], tuple] = {}

    def forward(self, backend, call, save_u):
        return self.first.setdefault(tuple(call.q.shape), super().forward(backend, call, save_u))


WRAPPERS: dict[str, Callable[[], Wrapped]] = {
    "align-backward": lambda: Resized(lambda call: keys(call.q.shape[2])(call), ("backward",)),
    "call-alignment": lambda: Resized(lambda call: keys(call.q.shape[2])(call)),
    "tail-keys": lambda: Resized(lambda call: keys(call.k.shape[2] // 64 * 64)(call)),
    "tail-padding": lambda: Resized(lambda call: keys(-(-call.k.shape[2] // 16) * 16)(call), ("forward",)),
    "bias-clamped": lambda: Resized(table(extended)),
    "bias-origin": lambda: Resized(lambda call: replace(call, spec=call.spec.replace(bias_origin=call.spec.bias_origin + 1))),
    "bias-scaled": ScaledBias,
    "sink-missing-backward": lambda: ByMutant(lambda call: list(get("sink-missing-backward").variants(call))[1]),
    "bias-mirrored": lambda: Resized(table(lambda bias, call: bias[:, :1])),
    "gqa-last-writer": GroupMember,
    "gqa-mean": GroupMean,
    "gqa-map": lambda: HeadMap(("forward", "backward")),
    "gqa-map-backward": lambda: HeadMap(("backward",)),
    "lse-rowmax": RowMaximum,
    "do-stride": MisreadGradient,
    "input-stride": MisreadInputs,
    "race-lost-update": LostUpdates,
    "accumulates-over-calls": Uncleared,
    "stale-rows": UnwrittenTail,
    "nan-cell": OneNan,
    "input-changed": ChangesQ,
    "cached-result": Remembers,
}
# not expressible here (hidden tiles are never visited, no 16-bit sums on a CPU, sums in a fixed order, an output that is
# always in the graph), or not written yet: call-layout, dtau-survivors, empty-rows-mean, varlen-short
NOT_INJECTED = {
    "atomics-reorder",
    "call-layout",
    "dtau-survivors",
    "empty-rows-mean",
    "gradient-missing",
    "mask-after-softmax",
    "precision-accumulation",
    "precision-narrow",
    "precision-scores",
    "varlen-short",
}


def inject(name: str, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The public call on a tiled backend that has the defect `name`."""
    if name in EDITS:
        for direction, module in edited_modules(EDITS[name]).items():
            monkeypatch.setitem(sys.modules, f"{PACKAGE}.{direction}", module)
    else:
        wrapped = (
            WRAPPERS[name]() if name in WRAPPERS else ByMutant(lambda call: next(iter(get(name).variants(call)), Mutant()))
        )
        monkeypatch.setattr(TiledBackend, "forward", lambda self, *args: wrapped.forward(self, *args))
        monkeypatch.setattr(TiledBackend, "backward", lambda self, *args: wrapped.backward(self, *args))
    packed = "cu_seqlens" in get(name).demo
    return Subject(ours_packed if packed else ours, layout="packed" if packed else "BHSD", name=f"tiled with {name}")
