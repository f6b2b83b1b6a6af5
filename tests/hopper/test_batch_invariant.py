"""A packed sequence among others in the emulator: `deterministic="batch"` gives it the same bits (eq. 79)."""

from __future__ import annotations

from dataclasses import replace

import emulator
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sequences import drawn

from backlight.backends.hopper.backward import dq_convert, dq_rows, host, prepass
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import forward_config, rows_of
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.spec import AttentionSpec

NEEDS = frozenset({"dq", "dk", "dv"})
OWN, LONG, SHORT = 300, 1500, 20


def call_of(lengths: list[int], own: int) -> tuple[Call, Tensor]:
    """Sequence number `own` is always the same one."""
    parts = [drawn(0 if n == own else n + 7, rows, (2, 1), 64, torch.float16, "cpu") for n, rows in enumerate(lengths)]
    q, k, v, dy = (torch.cat(some).transpose(0, 1)[None].contiguous() for some in zip(*parts, strict=True))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    call = Call(AttentionSpec(causal=True), q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, deterministic=True, batch_invariant=True)
    return call, dy


def results(lengths: list[int], own: int) -> list[Tensor]:
    call, dy = call_of(lengths, own)
    with emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, late=True):
        y, lse, *_ = forward.forward(call)
        made = host.backward(call, y, lse, None, dy, None, NEEDS)
    rows = slice(sum(lengths[:own]), sum(lengths[: own + 1]))
    return [lse[:, :, rows], *(x[:, :, rows] for x in (y, *made.values()))]


def test_neighbours_do_not_matter() -> None:
    alone = results([OWN], 0)
    for lengths, own in (([SHORT, OWN, SHORT], 1), ([OWN, 129, 0, 64], 0)):
        assert all(map(torch.equal, alone, results(lengths, own))), lengths


def test_tiles_go_by_no_length() -> None:
    """Without the promise the mean of all sequences decides, so that others do."""
    few, many = call_of([OWN, SHORT], 0)[0], call_of([OWN, *[LONG] * 3], 0)[0]
    assert forward_config(few) == forward_config(many)
    assert rows_of(few) == rows_of(many)
    usual = [replace(call, batch_invariant=False) for call in (few, many)]
    assert forward_config(usual[0]) != forward_config(usual[1])
