"""Putting a defect into the tiled backend, in a test: edits of its source text, and wrong ways to call it.

Nothing of this can be reached from shipped code. `kind_of` says how a defect is injected:

edit     lines of the backend's source are replaced (`edits.EDITS`)
caller   the backend is right and the public call is called wrongly: faults of the test are made where tests make them
wrapper  written around the backend's entry points, where no line of its source could carry the defect
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from edits import BOTH, EDITS, Edit
from edits_e4m3 import E4M3_EDITS, broken_in_e4m3

import backlight
from backlight.backends.tiled import TiledBackend
from backlight.call import Call
from backlight.doctor.defects.catalogue import get
from backlight.doctor.subject.subject import Subject

PACKAGE = "backlight.backends.tiled"
# in the order of their imports
SHARED = ("config", "intervals", "pair_bias", "primitives", "entmax", "moving")
DIRECTIONS = ("forward", "backward", "tangent")
NOT_INJECTED = {"do-in-flight": "a CPU finishes dO before it calls the backward; the broken kernel shows it on a GPU"}


def ours(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, bias=None, bias_origin=0, sink=None, tau=None, gate=None,
    pair_bias=None, mask=None, entmax=None,
):  # fmt: skip
    """The public call on the tiled backend, with its lse."""
    return backlight.attention(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, bias_origin=bias_origin, sink=sink,
        tau=tau, gate=gate, pair_bias=pair_bias, mask=mask, entmax=entmax, return_lse=True, backend="tiled",
    )  # fmt: skip


def ours_packed(q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, causal=False, window=None, bias=None, sink=None, tau=None):
    """The packed public call on the tiled backend, with its lse."""
    return backlight.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, window=window, bias=bias, sink=sink, tau=tau, return_lse=True,
        backend="tiled",
    )  # fmt: skip


# --- wrong ways to call ------------------------------------------------------------------------------------------------------


def _transposed(q, k, v, **options):
    o, lse = ours(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    return o.transpose(1, 2), lse.transpose(1, 2)


def _v_in_turn(q, k, v, **options):
    group = q.shape[1] // k.shape[1]
    return ours(q, k.repeat_interleave(group, dim=1), v.repeat(1, group, 1, 1), **options)


def _detached(q, k, v, **options):
    o, lse = ours(q, k, v, **options)
    return o.detach(), lse


def _dropped(q, k, v, **options):
    o, lse = ours(q, k, v, **options)
    return torch.nn.functional.dropout(o, 0.1), lse


def _factors(heads: int) -> torch.Tensor:
    """Slopes 2 ** (-8 h / n) of head h = 1, 2, ... in place of those for numbers that are no power of two, six for instance."""
    wrong = torch.tensor([2.0 ** (-8 * h / heads) for h in range(1, heads + 1)])
    right = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    return (wrong / right)[:, None]


CALLERS: dict[str, Callable[..., Any]] = {
    "call-causal-lost": lambda q, k, v, causal, **options: ours(q, k, v, **options),
    "call-window-lost": lambda q, k, v, window, **options: ours(q, k, v, **options),
    "call-window-convention": lambda q, k, v, window, **options: ours(q, k, v, window=(window[0] + 1, window[1]), **options),
    "call-scale": lambda q, k, v, **options: ours(q * q.shape[-1] ** 0.5, k, v, **options),
    "call-swap-qk": lambda q, k, v, **options: ours(k, q, v, **options),
    "call-swap-kv": lambda q, k, v, **options: ours(q, v, k, **options),
    "call-layout": _transposed,
    "call-sink-lost": lambda q, k, v, sink, **options: ours(q, k, v, sink=sink * 0 - 1e4, **options),
    "gqa-map-one": _v_in_turn,
    "gradient-missing": _detached,
    "random-numbers": _dropped,
    "bias-slopes": lambda q, k, v, bias, **options: ours(q, k, v, bias=bias * _factors(q.shape[1]), **options),
}


# --- around the entry points -------------------------------------------------------------------------------------------------


class BiasOfDistanceJMinusI:
    """The table read at j - i: under a causal mask only its first column is ever met, and the rest gets no gradient."""

    def __init__(self) -> None:
        self.run_forward, self.run_backward = TiledBackend.forward, TiledBackend.backward

    def forward(self, backend, call, save_u):
        return self.run_forward(backend, self._seen(call), save_u)

    def backward(self, backend, call, y, lse, u, dy, dlse, needs):
        out = self.run_backward(backend, self._seen(call), y, lse, u, dy, dlse, needs)
        longer = call.bias.new_zeros(call.bias.shape)
        longer[:, :1] = out["dbias"]
        return out | {"dbias": longer}

    def _seen(self, call: Call) -> Call:
        assert call.spec.causal
        assert call.spec.bias_origin == 0
        return replace(call, bias=call.bias[:, :1].contiguous())


class HalvesOfTheKeys:
    """Two halves of the keys merged by a second kernel, which takes [split, batch, head, row] for [batch, head, split, row]."""

    def __init__(self) -> None:
        self.run_forward, self.run_backward = TiledBackend.forward, TiledBackend.backward

    def forward(self, backend, call, save_u):
        half = call.k.shape[2] // 2
        found = []
        for keys in (slice(None, half), slice(half, None)):
            part = replace(call, k=call.k[:, :, keys], v=call.v[:, :, keys], _segments=None)
            found.append(self.run_forward(backend, part, save_u))
        kept = torch.stack([lse for _, lse, *_ in found])
        own = kept.flatten().view(*kept.shape[1:3], 2, kept.shape[3])
        lse = own.logsumexp(2)
        y = sum(torch.exp(own[:, :, n] - lse)[..., None] * each[0].float() for n, each in enumerate(found))
        return y.to(call.output_dtype), lse, *found[0][2:]

    def backward(self, backend, *given):
        return self.run_backward(backend, *given)


WRAPPERS: dict[str, Callable[[], Any]] = {"bias-mirrored": BiasOfDistanceJMinusI, "merge-elsewhere": HalvesOfTheKeys}


# --- the mechanism -----------------------------------------------------------------------------------------------------------


def kind_of(name: str) -> str:
    return "edit" if name in EDITS else "caller" if name in CALLERS else "wrapper"


def inject(name: str, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The public call on a tiled backend that has the defect `name`."""
    if name in E4M3_EDITS:
        return broken_in_e4m3(name, monkeypatch)
    packed = "cu_seqlens" in get(name).demo
    called = ours_packed if packed else ours
    if name in EDITS:
        for direction, module in edited_modules(EDITS[name]).items():
            monkeypatch.setitem(sys.modules, f"{PACKAGE}.{direction}", module)
    elif name in CALLERS:
        called = functools.wraps(ours)(CALLERS[name])
    else:
        wrapped = WRAPPERS[name]()
        monkeypatch.setattr(TiledBackend, "forward", lambda self, *args: wrapped.forward(self, *args))
        monkeypatch.setattr(TiledBackend, "backward", lambda self, *args: wrapped.backward(self, *args))
    return Subject(called, layout="packed" if packed else "BHSD", name=f"tiled with {name}")


def edited_texts(edits: list[Edit]) -> dict[tuple[str, str], str]:
    """The source with the edits applied, by direction and module."""
    texts: dict[tuple[str, str], str] = {}
    for edit in edits:
        for direction in edit.sees if edit.module in SHARED else (edit.module,):
            text = texts.get((direction, edit.module)) or _source(edit.module)
            texts[direction, edit.module] = edit.applied(text)
    return texts


def edited_modules(edits: list[Edit]) -> dict[str, types.ModuleType]:
    """Fresh copies of forward, backward and tangent with the edits applied; the originals stay as they are."""
    for name in (*SHARED, *DIRECTIONS):
        # imported while all is right: one that is first imported beside an edited file would keep the edit
        importlib.import_module(f"{PACKAGE}.{name}")
    texts = edited_texts(edits)
    found = {}
    # the backward reads the forward: imported for the first time in here, that would be a forward with the defect
    for direction in BOTH:
        importlib.import_module(f"{PACKAGE}.{direction}")
    for direction in {direction for direction, _ in texts}:
        originals = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in SHARED}
        try:
            for name in SHARED:
                # primitives read the intervals of a mask, and the pair bias
                again = name == "primitives" and any((direction, each) in texts for each in ("intervals", "pair_bias"))
                if (direction, name) in texts or again:
                    text = texts.get((direction, name)) or _source(name)
                    sys.modules[f"{PACKAGE}.{name}"] = _module(name, text)
            found[direction] = _module(direction, texts.get((direction, direction)) or _source(direction))
        finally:
            sys.modules.update({f"{PACKAGE}.{name}": module for name, module in originals.items()})
    return found


def _source(name: str) -> str:
    return Path(importlib.import_module(f"{PACKAGE}.{name}").__file__).read_text()


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
