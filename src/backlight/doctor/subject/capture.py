"""Tensors saved from a real run, to be examined again: some defects show on real activations and not on random ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backlight.spec import TERM_NAMES

# canonical name -> names found in dumps
NAMES = {
    "q": ("q", "query"),
    "k": ("k", "key"),
    "v": ("v", "value"),
    "do": ("do", "dout", "d_out", "grad_out", "grad_output", "dy"),
    **{name: (name,) for name in TERM_NAMES},
    "sink": ("sink", "sinks"),
    "cu_seqlens_q": ("cu_seqlens_q", "cu_seqlens"),
    "cu_seqlens_k": ("cu_seqlens_k",),
}
REQUIRED = ("q", "k", "v")


def load_capture(path: str | Path) -> dict[str, Tensor]:
    """Read a dump: a dict of tensors in a `.pt` file (`torch.save`) or a `.safetensors` file.

    Returns the tensors under their canonical names: q, k, v [B,H,S,D] or packed [T,H,D] with cu_seqlens_q; optionally do, bias,
    sink, tau, gate, cu_seqlens_k. Entries with other names are left out. Nothing in the file is executed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no capture file {path}")
    read = _read_safetensors if path.suffix == ".safetensors" else _read_pt
    tensors = {str(name): value for name, value in read(path).items() if isinstance(value, Tensor)}
    stored = {name.lower(): value for name, value in tensors.items()}
    found = {}
    for name, spellings in NAMES.items():
        matches = [spelled for spelled in tensors if spelled.lower() in spellings]
        if len(matches) > 1:
            raise ValueError(f"{path} holds {name} more than once, as {' and '.join(sorted(matches))}: keep one of them")
        if matches:
            found[name] = tensors[matches[0]].detach()
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        raise ValueError(f"{path} holds no {', '.join(missing)}; its tensors are {', '.join(sorted(stored)) or 'none'}")
    if found["q"].dim() == 3 and "cu_seqlens_q" not in found:
        raise ValueError(f"{path} holds q with 3 dimensions: packed [T,H,D] tensors need cu_seqlens_q beside them")
    return found


def save_capture(path: str | Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write tensors so that `load_capture` reads them back."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, path)
    return path


def _read_pt(path: Path) -> Mapping[str, Any]:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} could not be read as a dict of tensors: {said}") from error
    if not isinstance(stored, Mapping):
        raise ValueError(f"{path} holds a {type(stored).__name__}; expected a dict with q, k, v and more")
    return stored


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"reading {path.name} needs the package safetensors: pip install safetensors") from error
    try:
        return load_file(path)
    except Exception as error:
        raise ValueError(f"{path} could not be read as safetensors: {error}") from error
