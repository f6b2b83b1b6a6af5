"""Edits of the source of the 8-bit emulation and of what quantises for it: the defects of family "eight bits"."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from edit import Edit

import backlight
from backlight import quantising
from backlight.doctor.subject.subject import Subject
from backlight.fp8 import calls, emulated, rounding

MODULES = {"quantising": quantising, "emulated": emulated}
# who imports names of the edited module
READERS = {"quantising": (rounding, emulated), "emulated": ()}


def _quantising(old: str, new: str) -> list[Edit]:
    return [Edit("quantising", old, new)]


TURN = "return (torch.tensor(_signs(d))[:, None] * matrix / math.sqrt(d)).to(device)"
OF_BLOCK = "scale = power_of_two(padded.abs().amax((-2, -1)))"
V_SCALES = "v * keys.v_scale[:, :, None]"
PRODUCT = "o = o * rescale + p @ v[:, tile.j0 : tile.j1]"
CUT = """o = o * rescale
        for j in range(0, p.shape[-1], 32):
            each = p[..., j : j + 32, None] * v[:, None, tile.j0 + j : tile.j0 + j + 32]
            unit = 2.0 ** torch.frexp(torch.maximum(o.abs(), each.abs().amax(2)).clamp(min=1e-30))[1] / 2**13
            o = (torch.trunc(each / unit[:, :, None]).sum(2) + torch.trunc(o / unit)) * unit"""

E4M3_EDITS: dict[str, list[Edit]] = {
    "e4m3-descale": _quantising(V_SCALES, "v"),
    "e4m3-turned-once": _quantising(
        "k8, k_scale = by_blocks(in_tiles((k32 - mean[:, :, None]) @ rotation(k.shape[-1], k.device), tiles))",
        "k8, k_scale = by_blocks(in_tiles(k32 - mean[:, :, None], tiles))",
    ),
    "e4m3-mean-lost": _quantising("[:, :, None]).sum(-1) * scale", "[:, :, None]).sum(-1) * 0.0"),
    "e4m3-v-order": _quantising("in_register_order(padded).contiguous()", "padded.contiguous()"),
    "e4m3-scale-neighbour": _quantising(
        "rows(keys.k, keys.k_scale, keys.tiles)", "rows(keys.k, keys.k_scale.roll(1, 2), keys.tiles)"
    ),
    "e4m3-scale-channel": _quantising(V_SCALES, "v * keys.v_scale.roll(1, 2)[:, :, None]"),
    "e4m3-static-scales": _quantising(OF_BLOCK, "scale = torch.full_like(padded[..., 0, 0], 2.0**-6)"),
    "e4m3-unturned": _quantising(TURN, "return torch.eye(d).to(device)"),
    "e4m3-one-scale": _quantising(OF_BLOCK, "scale = power_of_two(padded.abs().amax()).expand(padded.shape[:3]).contiguous()"),
    "e4m3-not-centred": _quantising("k.double().mean(2).float() if centred", "torch.zeros_like(k32[:, :, 0]) if centred"),
    "e4m3-p-unscaled": [Edit("emulated", "HEADROOM = 8.0", "HEADROOM = 0.0")],
    "e4m3-sum-cut": [Edit("emulated", PRODUCT, CUT)],
}


def in_e4m3(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, bias=None, bias_origin=0, sink=None, gate=None,
    pair_bias=None, mask=None,
):  # fmt: skip
    """The public call in e4m3, with its lse."""
    return backlight.attention(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, bias_origin=bias_origin, sink=sink,
        gate=gate, pair_bias=pair_bias, mask=mask, precision="fp8", return_lse=True,
    )  # fmt: skip


def broken_in_e4m3(name: str, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The public call in e4m3 on an emulation that has the defect `name`."""
    for module in {edit.module for edit in E4M3_EDITS[name]}:
        edited = _edited(module, edits_of(name, module))
        for reader in READERS[module]:
            for own in [own for own in vars(reader) if callable(getattr(MODULES[module], own, None))]:
                monkeypatch.setattr(reader, own, getattr(edited, own))
        if module == "emulated":
            monkeypatch.setattr(calls, "emulated", edited)
    return Subject(in_e4m3, layout="BHSD", name=f"e4m3 with {name}")


def edits_of(name: str, module: str) -> list[Edit]:
    return [edit for edit in E4M3_EDITS[name] if edit.module == module]


def edited_text(name: str, edits: list[Edit]) -> str:
    text = Path(str(MODULES[name].__file__)).read_text(encoding="utf-8")
    for edit in edits:
        text = edit.applied(text)
    return text


def _edited(name: str, edits: list[Edit]) -> Any:
    original, text = MODULES[name], edited_text(name, edits)
    module = types.ModuleType(original.__name__)
    with pytest.MonkeyPatch.context() as patched:
        # dataclasses look their module up by name while they are made
        patched.setitem(sys.modules, original.__name__, module)
        exec(compile(text, f"<edited {name}>", "exec"), module.__dict__)
    return module
