"""Other people's kernels of forward mode, from files that somebody fetched: BACKLIGHT_RCM and BACKLIGHT_JVP_FLASH name them.

NVlabs/rcm: rcm/utils/flash_attention_jvp_triton.py. amorehead/jvp_flash_attention: jvp_flash_attention/jvp_attention.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from triton.runtime.autotuner import Autotuner

Jvp = Callable[..., tuple[Tensor, Tensor]]


def _not_called(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a stand-in for a package that the forward does not need was called")


def _stand_in(name: str, *members: str) -> None:
    """rcm's file imports the backward of flash-attn and einops; its forward calls neither."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.modules.setdefault(name.partition(".")[0], ModuleType(name.partition(".")[0]))
        module = sys.modules.setdefault(name, ModuleType(name))
        for member in members:
            setattr(module, member, _not_called)


def _one_look(work: Callable[[], object], **_: Any) -> list[float]:
    """Their kernels try some fifty tilings for each shape, the worst ten times as slow as the best: two runs of each do."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work()
    first.record()
    work()
    last.record()
    last.synchronize()
    return [first.elapsed_time(last)] * 3


def _module(variable: str) -> Any:
    spec = importlib.util.spec_from_file_location(variable.lower(), os.environ[variable])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for member in vars(module).values():
        if isinstance(member, Autotuner):
            member._do_bench = _one_look
    return module


def _rcm() -> Jvp:
    _stand_in("flash_attn.flash_attn_interface", "_flash_attn_backward", "_flash_attn_varlen_backward")
    _stand_in("einops", "rearrange")
    attention = _module("BACKLIGHT_RCM").attention

    def jvp(*tensors: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        if causal:
            raise NotImplementedError("rcm's kernel has no causal mask")
        y, ty = attention(*tensors, tensors[0].shape[-1] ** -0.5)
        return y, ty

    return jvp


def _jvp_flash() -> Jvp:
    attend = _module("BACKLIGHT_JVP_FLASH").JVPAttn.fwd_dual

    def jvp(q: Tensor, k: Tensor, v: Tensor, tq: Tensor, tk: Tensor, tv: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in ((q, tq), (k, tk), (v, tv))]
            y = forward_ad.unpack_dual(attend(*duals, causal=causal))
        return y.primal, y.tangent

    return jvp


def peers() -> dict[str, Jvp]:
    makers = {"rcm": ("BACKLIGHT_RCM", _rcm), "jvp_flash_attention": ("BACKLIGHT_JVP_FLASH", _jvp_flash)}
    return {name: make() for name, (variable, make) in makers.items() if os.environ.get(variable)}
