"""Masks by row intervals in the kernel for e4m3, in the emulator, against the emulation in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import emulator
from modules import mutant
from test_fp8_emulated import agree, drawn
from test_hopper_masks import random_rows

from backlight import mask
from backlight.api import call_of
from backlight.backends.hopper.fp8 import host, kernel, producer
from backlight.call import Call
from backlight.fp8 import calls

B, HEADS, KV_HEADS = 2, 4, 2


def masked(rows: Tensor, sq: int, sk: int, d: int, **options: Any) -> Call:
    q, k, v = (drawn(B, h, s, d, seed=n).half() for n, (h, s) in enumerate(((HEADS, sq), (KV_HEADS, sk), (KV_HEADS, sk))))
    return call_of(q, k + 1, v, mask=mask.Mask(rows), **options)


def packed(rows: Tensor, lengths: tuple[list[int], list[int]], **options: Any) -> Call:
    cu_q, cu_k = (torch.tensor([0, *own]).cumsum(0) for own in lengths)
    sq, sk = int(cu_q[-1]), int(cu_k[-1])
    q, k, v = (drawn(s, h, 64, seed=n).half() for n, (h, s) in enumerate(((HEADS, sq), (KV_HEADS, sk), (KV_HEADS, sk))))
    return call_of(q, k + 1, v, cu_q, cu_k, mask=mask.Mask(rows), **options)


def documents(*lengths: int) -> Tensor:
    return mask.documents(lengths=torch.tensor(lengths)).rows


def terms(sq: int, d: int) -> dict[str, Any]:
    return {
        "bias": drawn(HEADS, 60, seed=4),
        "bias_origin": 20,
        "sink": 2 * drawn(HEADS, seed=5),
        "gate": drawn(B, HEADS, sq, d, seed=6).half(),
        "softcap": 3.0,
    }


# a prompt of 100 and three drafts of 50
TREE = [-1, *range(99), *(99 if n % 50 == 0 else 99 + n for n in range(150))]
CALLS = {
    "documents": lambda: masked(documents(70, 80, 5, 145), 300, 300, 64, causal=True),
    "documents,d=128": lambda: masked(documents(130, 60, 70), 260, 260, 128, causal=True),
    "documents,d=256": lambda: masked(documents(130, 70), 200, 200, 256),
    "documents,window": lambda: masked(documents(200, 130), 330, 330, 64, window=(100, 20)),
    "prefix": lambda: masked(mask.prefix(torch.tensor([150, 70]), 300).rows, 300, 300, 64),
    "spans": lambda: masked(mask.spans([20, 140], [90, 290], 300).rows, 300, 300, 64),
    "tree": lambda: masked(mask.tree(TREE, preorder=True).rows, 250, 250, 64),
    "a mask for each head and entry": lambda: masked(random_rows(200, 330, B, HEADS, 1), 200, 330, 64),
    "two intervals": lambda: masked(random_rows(260, 330, 1, HEADS, 2), 260, 330, 64),
    "two intervals,d=128": lambda: masked(random_rows(260, 200, B, 1, 2), 260, 200, 128, causal=True),
    "nobody sees anything": lambda: masked(torch.zeros(1, 1, 2, 200, dtype=torch.int32), 130, 200, 64),
    "nobody sees anything but the sink": lambda: masked(
        torch.zeros(1, 1, 2, 200, dtype=torch.int32), 130, 200, 64, sink=drawn(HEADS, seed=5)
    ),
    "terms": lambda: masked(documents(70, 80, 63), 213, 213, 64, causal=True, **terms(213, 64)),
    "terms,d=128": lambda: masked(documents(130, 130), 260, 260, 128, **terms(260, 128)),
    "terms,d=256": lambda: masked(documents(70, 80), 150, 150, 256, **terms(150, 256)),
    "packed": lambda: packed(random_rows(340, 330, 1, HEADS, 1), ([200, 0, 20, 120], [150, 50, 0, 130]), causal=True),
}
# of lse: an eighth of one weight among 25
FEW_KEYS = 5e-3
EARLY = ("documents", "two intervals", "packed")


@pytest.mark.parametrize(("name", "late"), [*((name, True) for name in CALLS), *((name, False) for name in EARLY)])
def test_case(name: str, late: bool) -> None:
    call = CALLS[name]()
    assert not calls.beyond_kernel(call, calls.quantise(call))
    agree(call, late, FEW_KEYS)


def test_blocks_that_nobody_sees_are_not_visited() -> None:
    """Values of the second block are NaN, which any product with them would spread."""
    call = masked(documents(128, 128, 100), 356, 356, 64, causal=True)
    given = calls.quantise(call)
    rows = slice(0, 128), slice(256, 356)
    with emulator.emulated(host):
        y, _ = host.forward(call, given)
        given.keys.v.view(torch.uint8)[..., 128:256] = 0x7F
        poisoned, _ = host.forward(call, given)
    assert all(torch.equal(poisoned[:, :, own], y[:, :, own]) for own in rows)
    assert bool(poisoned[:, :, 128:256].isnan().all())


CUT_FIRST = "of_cut = (cut > full)", "of_cut = (cut >= 0)"
TAKEN = "return gl.maximum(cut, full), ", "return gl.where(cut >= 0, cut, full), "


def test_what_all_rows_attend_to_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key has nearly all of the weight and no value. In a block that is cut it came first where such blocks did:
    weights of the other keys were then flushed to zero."""
    rows = torch.tensor([0, 130], dtype=torch.int32)[:, None].repeat(1, 384)
    rows[:, 127] = 0
    call = masked(rows[None, None], 130, 384, 64)
    call.q[..., 0] = 8.0
    call.k[:, :, 0] = 1.0
    call.k[:, :, 0, 0] = 15.0
    call.v[:, :, 0] = 0.0
    agree(call, True, FEW_KEYS)
    changed = mutant(tmp_path, producer, *CUT_FIRST)
    changed = mutant(tmp_path, changed, *TAKEN)
    monkeypatch.setattr(kernel, "producer", changed.producer)
    with pytest.raises(AssertionError):
        agree(call, True, FEW_KEYS)


def test_refusals() -> None:
    call = masked(random_rows(130, 130, 1, 1, 2), 130, 130, 256)
    (reason,) = calls.beyond_kernel(call, calls.quantise(call))
    assert reason == (
        "a mask with two intervals in e4m3 with head dimension 256 above 128 needs more shared memory than there is"
    )
    q = drawn(1, 1, 250, 64, seed=0).half()
    call = call_of(q, q, q, mask=mask.tree(TREE))
    (reason,) = calls.beyond_kernel(call, calls.quantise(call))
    assert reason.startswith("does not take ")
    assert reason.endswith(" in e4m3")
