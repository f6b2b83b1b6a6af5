"""Forward mode on a card: PYTHONPATH=src python benchmarks/jvp.py > docs/data/jvp-h200.txt

Time of `attention` and `attention_jvp` with all three tangents, peak memory as S grows, and a step as MeanFlow takes it (value,
tangent, gradient of the value) beside torch's own through SDPA's math path. Numbers are checked against float64 first. Other
kernels run in the same rounds where BACKLIGHT_RCM or BACKLIGHT_JVP_FLASH name their files (jvp_peers.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import triton
from jvp_peers import Jvp, peers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import backlight

ROUNDS, LAUNCHES = 7, 4


def inputs(batch: int, heads: int, length: int, width: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v and their tangents."""
    generator = torch.Generator("cuda").manual_seed(length + width)
    shape = batch, heads, length, width
    return [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(6)]


def milliseconds(*works: Callable[[], object]) -> list[float]:
    """Medians of rounds in turn."""
    times: list[list[float]] = [[] for _ in works]
    for n in range(ROUNDS + 2):
        for work, taken in zip(works, times, strict=True):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(LAUNCHES):
                work()
            last.record()
            last.synchronize()
            if n >= 2:
                taken.append(first.elapsed_time(last) / LAUNCHES)
    return [statistics.median(taken) for taken in times]


def peak(work: Callable[[], object]) -> int:
    """Bytes beyond what is there before; results included."""
    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def error(jvp: Jvp, causal: bool, width: int) -> float:
    """Largest error of ty over its largest entry."""
    tensors = inputs(1, 2, 1024, width)
    ty = jvp(*tensors, causal=causal)[1]
    wanted = backlight.attention_jvp(*(x.double() for x in tensors), causal=causal, backend="tiled")[1]
    return float((ty - wanted).abs().max() / wanted.abs().max())


def able(jvp: Jvp, causal: bool, width: int) -> float | str:
    """Its error, or why it has none."""
    try:
        found = error(jvp, causal, width)
    except Exception as trouble:  # anything may come out of other people's kernels
        return f"{type(trouble).__name__}: {trouble}".splitlines()[0][:80]
    return found if found < 0.03 else f"wrong by {found:.1e}"


def race(width: int, causal: bool, others: dict[str, Jvp]) -> None:
    tensors = inputs(2, 16, 8192, width)
    contenders = {"jvp": backlight.attention_jvp, "triton's": partial(backlight.attention_jvp, backend="triton"), **others}
    errors = {name: able(jvp, causal, width) for name, jvp in contenders.items()}
    running = {name: jvp for name, jvp in contenders.items() if isinstance(errors[name], float)}
    forward, *taken = milliseconds(
        lambda: backlight.attention(*tensors[:3], causal=causal),
        *(partial(jvp, *tensors, causal=causal) for jvp in running.values()),
    )
    times = dict(zip(running, taken, strict=True))
    work = 4 * 32 * 8192**2 * width * (0.5 if causal else 1.0) / 1e9
    words = [f"D {width:3} {'causal' if causal else 'full  '}  forward {forward:.3f} ({work / forward:.0f})"]
    for name, found in errors.items():
        if isinstance(found, str):
            words.append(f"{name} {found}")
        else:
            taken_by = times[name]
            words.append(
                f"{name} {taken_by:.3f} ({3 * work / taken_by:.0f}), ratio {taken_by / forward:.2f}, error of ty {found:.1e}"
            )
    print("  ".join(words), flush=True)


def memory(length: int) -> None:
    tensors = inputs(1, 8, length, 64)
    used = peak(lambda: backlight.attention_jvp(*tensors, causal=True))
    print(f"S {length:5}  {used:9} bytes, {used / (2 * tensors[0].numel()):.2f} q", flush=True)


def meanflow(attend: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor]) -> None:
    """The tangent enters a target, which is not differentiated."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    y, ty = attend(q, k, v, *tensors[3:])
    torch.autograd.grad((y - ty.detach()).square().mean(), (q, k, v))


def by_torch(q: Tensor, k: Tensor, v: Tensor, tq: Tensor, tk: Tensor, tv: Tensor) -> tuple[Tensor, Tensor]:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.func.jvp(F.scaled_dot_product_attention, (q, k, v), (tq, tk, tv))


def step(length: int, attend: Callable[..., tuple[Tensor, Tensor]]) -> str:
    tensors = inputs(1, 16, length, 64)
    try:
        used = peak(lambda: meanflow(attend, tensors))
        (taken,) = milliseconds(lambda: meanflow(attend, tensors))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return "out of memory"
    return f"{taken:.3f} ms, {used / 1e9:.3f} GB"


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print("\nB 2, H 16, S 8192, bf16, tangents of q, k and v: ms (TFLOP/s of two and of six products)")
    others = peers()
    for width in (64, 128):
        for causal in (False, True):
            race(width, causal, others)
    print("\nB 1, H 8, D 64, bf16, causal: peak bytes of a jvp, results included, over the bytes of q")
    for length in (2048, 8192, 32768):
        memory(length)
    print("\nMeanFlow step, B 1, H 16, D 64, bf16, full: time and peak memory, ours and SDPA's math path under torch.func.jvp")
    for length in (1024, 4096, 16384):
        print(f"S {length:5}  ours {step(length, backlight.attention_jvp)}  sdpa {step(length, by_torch)}", flush=True)


if __name__ == "__main__":
    main()
