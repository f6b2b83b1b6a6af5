"""Forward mode as stages (`reference.tangent`) against torch's forward mode through the dense stages, in float64."""

from __future__ import annotations

import pytest
import torch
from dense import dense, learned
from torch.func import jvp

from backlight.reference.tangent import tangent
from cases import BY_NAME, FP64, SINGLES, TAU, TOGETHER, case_id, small

OTHERS = (
    "mask,pos,two runs,tau",
    "rows without keys,everything",
    "pair",
    "pair+causal",
    "pair+softcap",
    "pair+bias",
    "pair+gqa",
)
OTHERS = (
    *OTHERS,
    "entmax",
    "entmax,1.05",
    "entmax+softcap",
    "entmax+gqa",
    "entmax,everything,sq<sk",
    "entmax,everything,batched",
)
OTHERS = (*OTHERS, "entmax,sink", "entmax,rows without keys,sink", "entmax,mask,pos", "entmax,ties", "entmax,pair,hidden")
CASES = (*SINGLES, *TOGETHER, *TAU, *(BY_NAME[name] for name in OTHERS))


def test_a_term_without_a_tangent_is_not_taken_for_one_that_stands_still() -> None:
    call = BY_NAME["causal"].make(FP64).call
    with pytest.raises(NotImplementedError, match="the oracle has no tangent of slope"):
        tangent(call, {"slope": call.q})


@pytest.mark.parametrize("case", [small(case) for case in CASES], ids=case_id)
def test_every_stage(case) -> None:
    call = case.make(FP64).call
    inputs = learned(call)
    tangents = {name: torch.randn_like(x) for name, x in inputs.items()}
    (_, lse), (ty, tlse) = jvp(
        lambda *xs: dense(call, dict(zip(inputs, xs, strict=True))), tuple(inputs.values()), tuple(tangents.values())
    )
    found = tangent(call, tangents)
    torch.testing.assert_close(found.ty, ty, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.tlse, tlse.masked_fill(lse == -torch.inf, 0), rtol=1e-10, atol=1e-10)
