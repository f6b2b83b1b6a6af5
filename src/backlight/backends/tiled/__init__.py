"""The readable backend: the tiled algorithm of docs/math.md section 4 in plain PyTorch, on any device, for every variant."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from backlight.backends.tiled.config import config_of
from backlight.call import DTYPES, ByName, Call
from backlight.config import Config


class TiledBackend:
    name = "tiled"
    summary = "plain PyTorch, any device, fp16 to fp64, every variant, linear memory"
    takes = frozenset(
        {"causal", "window", "softcap", "bias", "sink", "tau", "gate", "pair_bias", "entmax", "rows", "pos", "packed", "part"}
        | {"entmax_part"}
    )
    order = "products of one sequence at a time; tiles of packed ones do not go by their lengths"
    # a new term has no derivatives until it is named here too
    twice = frozenset(
        {"causal", "window", "softcap", "bias", "sink", "tau", "gate", "pair_bias", "entmax", "rows", "pos", "packed"}
    )
    derivatives: ClassVar = {"tangent": twice | {"part"}, "second": twice}

    def available(self) -> tuple[str, ...]:
        return ()

    def why_not(self, call: Call) -> tuple[str, ...]:
        if call.q.dtype not in DTYPES:
            return (f"dtype {call.q.dtype} is not one of fp16, bf16, fp32, fp64",)
        return ()

    def config(self, call: Call) -> Config:
        return config_of(call)

    @torch.no_grad()
    def forward(self, call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        from backlight.backends.tiled.forward import forward

        return forward(call, save_u)

    @torch.no_grad()
    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        from backlight.backends.tiled.backward import backward

        return backward(call, y, lse, u, dy, dlse, needs)

    @torch.no_grad()
    def entmax_sums(self, call: Call) -> Tensor:
        from backlight.backends.tiled.forward import entmax_sums

        return entmax_sums(call)

    @torch.no_grad()
    def tangent(self, call: Call, tangents: dict[str, Tensor], known: tuple[Any, ...] | None) -> tuple[Any, ...]:
        from backlight.backends.tiled.tangent import tangent

        return tangent(call, tangents, known, save_u=True).all

    @torch.no_grad()
    def second(
        self, call: Call, tangents: ByName, results: tuple[Any, ...], incoming: tuple[Any, ...], needs: frozenset[str]
    ) -> ByName:
        from backlight.backends.tiled.second import Cotangents, second
        from backlight.backends.tiled.tangent import Results

        return second(call, tangents, Results(*results), Cotangents(*incoming), needs)


BACKEND = TiledBackend()
