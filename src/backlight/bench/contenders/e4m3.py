"""backlight in e4m3: with the quantisation of q, k and v in its time, and without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.bench.contender import TERM_WORDS, Contender, by_autograd, cannot, leaves_of
from backlight.bench.contenders.ours import canonical_rows, mask_of, packed_rows
from backlight.bench.workload import Tensors, Workload
from backlight.doctor.defects.e4m3 import REFUSED

ABLE = ("packed sequences", "a window", "softcap", *(words for name, words in TERM_WORDS.items() if name not in REFUSED))


class EightBits:
    """`backlight:fp8` quantises and multiplies; `backlight:fp8-given` is given what was quantised before: a forward alone."""

    def __init__(self, name: str, given: bool):
        self.name, self.given = name, given

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        d = workload.case.d
        if d & (d - 1) or workload.dv != d:
            return f"e4m3 wants head dimensions that are a power of two and Dv = D, and D is {d}, Dv {workload.dv}"
        if self.given and workload.case.varlen:
            return "packed sequences are quantised by the call itself"
        return cannot("attention in e4m3", workload, ABLE)

    def build(self, tensors: Tensors) -> Contender:
        call = tensors.call
        # a GPU is not raced by an emulation
        backend = "hopper" if call.q.device.type == "cuda" else "emulated"
        options: dict[str, Any] = call.spec.options | {"mask": mask_of(tensors), "backend": backend}
        if self.given:
            return self._of_quantised(tensors, options)
        leaves, dy = leaves_of(tensors), tensors.dy
        if call.varlen:
            leaves, dy = leaves_of(tensors, packed_rows), packed_rows(dy).contiguous()
            options |= {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
        attend = backlight.attention_varlen if call.varlen else backlight.attention
        return by_autograd(
            self.name,
            leaves,
            dy,
            lambda **inputs: attend(**inputs, precision="fp8", **options),
            canonical=canonical_rows if call.varlen else lambda x: x,
            detail=f"{backend}, quantisation included",
            precision="fp8",
        )

    def _of_quantised(self, tensors: Tensors, options: dict[str, Any]) -> Contender:
        call = tensors.call
        centred = call.spec.softcap is None
        given = backlight.quantize(call.q, call.k, call.v, call.scale, centred=centred)
        del options["scale"]
        terms = {name: getattr(call, name) for name in ("bias", "sink", "gate", "pair_bias") if getattr(call, name) is not None}

        def attend() -> tuple[Tensor, None]:
            return backlight.attention(given, **terms, **options), None

        return Contender(
            self.name,
            {},
            tensors.dy,
            attend,
            lambda y, state, retain: (),
            detail=f"{options['backend']}, quantised beforehand",
            precision="fp8",
            forward_only="what was quantised beforehand gets no gradient",
        )


ADAPTERS = (EightBits("backlight:fp8", given=False), EightBits("backlight:fp8-given", given=True))
