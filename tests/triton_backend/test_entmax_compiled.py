"""The kernels of entmax, compiled for a Hopper card that is not here: nothing spills."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from compiling import recorded
from targets import CARDS, spilled, standing_in_for, target_of

from backlight.backends.triton import delta, dkdv, dq, entmax, live, small
from backlight.backends.triton.backward import backward
from backlight.backends.triton.forward import forward
from backlight.call import Call
from backlight.spec import AttentionSpec


@pytest.mark.parametrize("alpha", [1.5, None], ids=["1.5", "learned"])
def test_nothing_spills(alpha: float | None) -> None:
    q, k, v = (torch.zeros(2, 4, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    call = Call(AttentionSpec(causal=True, entmax=True, alpha=alpha), q, k, v, entmax=torch.ones(4))
    card = "sm_90"
    assert card in CARDS
    with standing_in_for(card), recorded(entmax, live, delta, dq, dkdv, small) as launches:
        y, lse, u, _ = forward(call, save_u=True)
        backward(call, y, lse, u, torch.zeros_like(y), None, frozenset(("dq", "dk", "dv", "dentmax")))
    names = set()
    for launched in launches:
        names.add(launched.kernel.fn.__name__)
        assert spilled(launched.compile(target_of(card)).asm) == 0, launched.kernel.fn.__name__
    assert names >= {"_entmax_kernel", "_entmax_rows_kernel", "_live_lists_kernel", "_dq_kernel", "_dkdv_kernel"}
