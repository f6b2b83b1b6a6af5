"""Plain calls in 16 bits on this CPU: torch's kernel beside `tiled`.

    OMP_NUM_THREADS=1 python benchmarks/cpu_halves.py > docs/data/cpu-16-bit-xeon.txt

Least processor time of five runs in ms, so that neighbours count for nothing; results are compared before they are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import backlight
from backlight._private.torch import has_amx
from backlight.info import cpu_model

SHAPES = ((128, 64), (512, 64), (512, 128), (1024, 64), (2048, 64))
RUNS = 5
# two ways to round, of values around 1
CLOSE = 0.03


def fastest(attend: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> tuple[tuple[Tensor, ...], float, float]:
    """(y and gradients, forward, backward)."""
    results: tuple[Tensor, ...] = ()
    forward = backward = float("inf")
    for _ in range(RUNS):
        begin = time.process_time()
        y = attend(*inputs)
        between = time.process_time()
        results = (y.detach(), *torch.autograd.grad(y, inputs, dy))
        end = time.process_time()
        forward, backward = min(forward, between - begin), min(backward, end - between)
    return results, 1e3 * forward, 1e3 * backward


def main() -> None:
    torch.set_num_threads(1)
    kernels = f"{torch.backends.cpu.get_cpu_capability()} kernels, {'with' if has_amx() else 'no'} AMX"
    print(f"{cpu_model()}, {kernels}, 1 thread, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; B 1, H 2, causal; ms")
    ways: dict[str, Callable[..., Tensor]] = {
        "sdpa": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        "tiled": lambda q, k, v: backlight.attention(q, k, v, causal=True, backend="tiled"),
    }
    for dtype in (torch.bfloat16, torch.float16):
        for s, d in SHAPES:
            *inputs, dy = (torch.randn(1, 2, s, d, dtype=dtype) for _ in range(4))
            found = {name: fastest(attend, [x.requires_grad_() for x in inputs], dy) for name, attend in ways.items()}
            for name in ways:
                for mine, theirs in zip(found[name][0], found["sdpa"][0], strict=True):
                    assert (mine.float() - theirs.float()).abs().max() <= CLOSE * theirs.float().abs().max(), name
            times = [", ".join(f"{name} {found[name][1 + i]:.2f}" for name in ways) for i in range(2)]
            print(f"{str(dtype)[6:]} S {s} D {d}: forward {times[0]}; backward {times[1]}", flush=True)


if __name__ == "__main__":
    main()
