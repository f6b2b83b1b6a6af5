"""Memory around what a kernel allocates: tiles written beyond an end harm nobody, and show."""

from __future__ import annotations

import pytest
import torch
from tiles import cells, memory, store

from backlight.doctor import Subject, diagnose
from backlight.doctor.subject.memory import spacious
from backlight.spec import AttentionSpec

TILE = 64


class WholeTiles:
    """A forward and a backward that store whole tiles of rows, in memory for which they alone must care."""

    def __init__(self) -> None:
        self.escaped = 0

    def forward(self, q, k, v):
        right = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, dim=-1) @ v.float()
        o, rows = torch.empty_like(q), -(-q.shape[2] // TILE) * TILE
        tiles = torch.nn.functional.pad(right.detach(), (0, 0, 0, rows - q.shape[2]))
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                at = cells(o.stride(), b, h, torch.arange(rows), q.shape[3])
                self.escaped += int((at + o.storage_offset() >= len(memory(o))).sum())
                # the tail of one head before the head of the next: what is stored last stays
                store(o, at, tiles[b, h], torch.ones_like(at, dtype=torch.bool))
        return o

    def backward(self, do, q, k, v):
        with torch.enable_grad():
            inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
            a, b, c = inputs
            out = torch.softmax(a @ b.mT * a.shape[-1] ** -0.5, dim=-1) @ c
            return tuple(x.to(q.dtype) for x in torch.autograd.grad(out, inputs, do.float()))


@pytest.mark.parametrize("length", [TILE, 2 * TILE])
def test_a_kernel_of_whole_tiles_is_healthy_and_stays_inside(length):
    """The doctor asks for lengths of its own, which such a kernel does not take and does not refuse."""
    kernel = WholeTiles()
    report = diagnose((kernel.forward, kernel.backward), AttentionSpec(), shape=(1, 2, length, 16), dtype=torch.float32)
    assert not kernel.escaped
    assert report.verdict == "healthy", report.headline


def test_what_is_written_beyond_the_end_is_a_defect():
    kernel = WholeTiles()
    subject = Subject(kernel.forward, kernel.backward, layout="BHSD")
    report = diagnose(subject, AttentionSpec(), shape=(1, 2, 72, 16), dtype=torch.float32)
    assert not kernel.escaped
    assert report.findings[0].id == "write-beyond-end"
    assert "896 elements beyond a tensor of shape [1, 2, 72, 16] of the forward" in report.findings[0].evidence[0]


def test_room_changes_nothing_else():
    plain = torch.zeros(3, 4).t()
    with spacious() as room:
        made = [torch.zeros(3, 4), torch.empty_like(plain), torch.full((2, 3), 5.0), torch.zeros(2, dtype=torch.int64)]
        parameter = torch.zeros(2, requires_grad=True)
    assert torch.equal(made[0], torch.zeros(3, 4))
    assert made[1].stride() == torch.empty_like(plain).stride()
    assert torch.equal(made[2], torch.full((2, 3), 5.0))
    assert parameter.requires_grad
    assert len(room.allocated) == 3
    assert not room.written_beyond("forward")
