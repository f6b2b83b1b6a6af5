"""cuEquivariance's triangle attention as a contender: one pair bias for the whole batch, or for consecutive entries of it."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from backlight.bench.contender import Contender, by_autograd, cannot, leaves_of
from backlight.bench.workload import Tensors, Workload

PACKAGE = "cuequivariance_torch"


class CuEquivariance:
    name = "cuequivariance"

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        case = workload.case
        if importlib.util.find_spec(PACKAGE) is None:
            return f"{PACKAGE} is not installed"
        if device.type != "cuda":
            return f"cuEquivariance's kernels do not run on {device.type}"
        if case.pair_bias is None or not {"heads", "rows"} <= {*case.pair_bias}:
            return "cuEquivariance's triangle attention wants a pair bias of every head and row"
        if case.causal or case.hq != case.hkv:
            return "cuEquivariance's triangle attention has neither causal masks nor grouped heads"
        return cannot("cuEquivariance", workload, ("a pair bias",))

    def build(self, tensors: Tensors) -> Contender:
        from cuequivariance_torch import triangle_attention

        call = tensors.call
        assert call.pair_bias is not None
        grid, scale = (call.pair_bias.shape[0], -1), call.scale

        def attend(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, grid) for x in (q, k, v))
            return triangle_attention(q, k, v, pair_bias[:, None], scale=scale).flatten(0, 1)

        return by_autograd(self.name, leaves_of(tensors), tensors.dy, attend, detail="triangle_attention")


ADAPTERS = (CuEquivariance(),)
