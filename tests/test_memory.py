"""Linear memory: no allocation of either direction grows like Sq x Sk, in any variant.

PyTorch's profiler records every allocation of the CPU allocator, those inside C++ operators included.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import backlight
from cases import FP32, FP64, SINGLES, TOGETHER, Case, case_id
from running import forward, leaves


@dataclass(frozen=True)
class Memory:
    """Bytes: the largest single allocation, and the most that was alive beyond what lived before."""

    largest: int
    peak: int


def memory_of(work) -> Memory:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return Memory(max(event.nbytes() for event in events), peak)


def stretched(case: Case, length: int) -> Case:
    """The same composition with `length` as its longest side; packed: one long sequence between short ones."""
    from dataclasses import replace

    short = length * 3 // 4
    if case.varlen:
        lengths_q = (5, 0, short if case.lengths_k and case.lengths_k[0] > case.lengths_q[0] else length, 3)
        lengths_k = (5, 0, short if case.lengths_k and case.lengths_k[0] < case.lengths_q[0] else length, 3)
        return replace(case, lengths_q=lengths_q, lengths_k=lengths_k, tau=case.tau and (0.4, 0.1))
    sq, sk = (short if case.sq < case.sk else length), (short if case.sk < case.sq else length)
    return replace(case, b=1, sq=sq, sk=sk, tau=case.tau and (0.4, 0.1))


def step(case: Case, length: int, dtype: torch.dtype = FP32) -> Memory:
    problem = stretched(case, length).make(dtype)
    inputs = leaves(problem.call)
    tensors: list[Tensor] = list(inputs.values())

    def train() -> None:
        y, lse = forward(problem.call, inputs)
        torch.autograd.grad([y, lse], tensors, [torch.ones_like(y), torch.zeros_like(lse)])

    train()
    return memory_of(train)


def test_the_measurement_sees_a_square() -> None:
    """Dense attention allocates S x S, and the instrument says so."""
    x = torch.randn(256, 8)
    assert memory_of(lambda: torch.softmax(x @ x.mT, -1) @ x).largest == 256 * 256 * 4
    assert memory_of(lambda: torch.softmax(x @ x.mT, -1) @ x).peak >= 2 * 256 * 256 * 4


@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER], ids=case_id)
def test_linear_in_length(case: Case) -> None:
    """Twice the length takes at most about twice the memory: a square would take four times."""
    half, full = step(case, 512), step(case, 1024)
    assert full.largest < 1024 * 1024 * 4
    assert full.largest <= 2.2 * half.largest, (half, full)
    assert full.peak <= 2.2 * half.peak, (half, full)


def test_float64_is_linear_too() -> None:
    half, full = step(TOGETHER[0], 512, FP64), step(TOGETHER[0], 1024, FP64)
    assert full.peak <= 2.2 * half.peak, (half, full)


def test_saved_for_backward_is_linear() -> None:
    """Between the passes live y, lse and, with tau, u: eq. 34."""
    saved: list[Tensor] = []
    q = torch.randn(1, 2, 512, 16, requires_grad=True)
    tau = torch.zeros(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        y = backlight.attention(q, q, q, causal=True, tau=tau)
    assert y.requires_grad
    assert saved
    beyond = [x for x in saved if x.data_ptr() not in (q.data_ptr(), tau.data_ptr())]
    e = 4
    assert sum(x.numel() * x.element_size() for x in beyond) <= 2 * 512 * (2 * e * 16 + 4)


def test_forward_without_gradients_keeps_nothing() -> None:
    q = torch.randn(1, 2, 1024, 16)
    with torch.no_grad():
        backlight.attention(q, q, q, causal=True)
        outputs = []
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            outputs.append(backlight.attention(q, q, q, causal=True))
    left = sum(event.nbytes() for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    assert left == outputs[0].numel() * 4


@pytest.mark.slow
def test_peak_at_16k() -> None:
    """B=1 H=8 D=64 S=16384, forward and backward: below 8x the bytes of q, k and v together."""
    q, k, v = (torch.randn(1, 8, 16384, 64, requires_grad=True) for _ in range(3))
    do = torch.randn(1, 8, 16384, 64)

    def train() -> None:
        torch.autograd.grad(backlight.attention(q, k, v, causal=True), (q, k, v), do)

    assert memory_of(train).peak < 8 * 3 * q.numel() * 4
