"""Double backward on a card: PYTHONPATH=src python benchmarks/second.py [every]

Gradients of dq, dk and dv by q, k, v and dy, checked against float64 first; then the parts and the whole, beside our backward.
With `every`, all options of the kernel are timed, and triton's kernels. Each part runs in a process of its own with a limit: a
kernel that waits for ever ends its part only.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

import backlight
from backlight import registry
from backlight.backends.hopper.config import SecondConfig
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec

LENGTH, SHAPES, LIMIT = 8192, {64: (4, 32), 128: (4, 16)}, 90
ROUNDS, LAUNCHES = 7, 3
NEEDS = frozenset(("dq", "dk", "dv"))
OPTIONS = {
    64: (SecondConfig(64), SecondConfig(64, ahead=True), SecondConfig(64, 3), SecondConfig(64, direct=True)),
    128: (SecondConfig(32), SecondConfig(32, direct=True), SecondConfig(32, 3, direct=True)),
}


def inputs(batch: int, heads: int, length: int, width: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v, dy and what is given at dq, dk, dv."""
    generator = torch.Generator("cuda").manual_seed(3)
    counts = (heads, kv_heads, kv_heads, heads, heads, kv_heads, kv_heads)
    return [torch.randn(batch, n, length, width, device="cuda", generator=generator).to(dtype) for n in counts]


def double(given: list[Tensor], backend: str | None, **options: Any) -> Callable[[], tuple[Tensor, ...]]:
    q, k, v, dy = (x.detach().clone().requires_grad_() for x in given[:4])
    y = backlight.attention(q, k, v, backend=backend, **options)
    grads = torch.autograd.grad(y, (q, k, v), dy, create_graph=True)
    return lambda: torch.autograd.grad(grads, (q, k, v, dy), given[4:], retain_graph=True)


def check(width: int, options: dict[str, Any], dtype: torch.dtype, length: int = 517) -> None:
    given = inputs(2, 4, length, width, 2, dtype)
    wanted = double([x.double() for x in given], "tiled", **options)()
    found = double(given, "hopper", **options)()
    errors = [float((x.double() - want).abs().max() / want.abs().max()) for x, want in zip(found, wanted, strict=True)]
    words = ", ".join(f"{name} {error:.1e}" for name, error in zip(("dq", "dk", "dv", "ddy"), errors, strict=True))
    verdict = "good" if max(errors) < (1e-2 if dtype == torch.bfloat16 else 2e-3) else "BAD"
    print(f"numbers D {width} {options} {str(dtype)[6:]}: {words}: {verdict}", flush=True)


def warm(width: int, causal: bool, config: SecondConfig) -> None:
    """Compiles, and compares with the options that are the default."""
    given = inputs(1, 2, 512, width, 2, torch.bfloat16)
    usual = double(given, "hopper", causal=causal)()
    with override("hopper.second", config):
        found = double(given, "hopper", causal=causal)()
    far = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, usual, strict=True))
    print(f"numbers D {width} causal={causal} {config}: {far:.1e} from the default", flush=True)


def milliseconds(work: Callable[[], object]) -> float:
    """The median of rounds; the host is ahead of the card in each."""
    times = []
    for _ in range(ROUNDS + 1):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(LAUNCHES):
            work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / LAUNCHES)
    return sorted(times[1:])[ROUNDS // 2]


def race(width: int, causal: bool, every: bool) -> None:
    batch, heads = SHAPES[width]
    given = inputs(batch, heads, LENGTH, width, heads, torch.bfloat16)
    q, k, v, dy, hq, hk, hv = given
    call, tangents = Call(AttentionSpec(causal=causal), q, k, v), {"q": hq, "k": hk, "v": hv}
    hopper, portable = registry.get("hopper"), registry.get("triton")
    y, lse, *_ = hopper.forward(call, False)
    label = f"D {width} {'causal' if causal else 'full'}"
    product = 2e-9 * LENGTH**2 * width * heads * batch / (2 if causal else 1)

    def report(name: str, products: int, work: Callable[[], object]) -> float:
        try:
            taken = milliseconds(work)
        except Exception as error:
            print(label, name, repr(error)[:200], flush=True)
            return float("nan")
        print(f"{label} {name}: {taken:.3f} ms, {products * product / taken:.0f} TFLOP/s of {products} products", flush=True)
        return taken

    back = report("backward", 5, lambda: hopper.backward(call, y, lse, None, dy, None, NEEDS))
    if every:
        report("tangent beside y", 6, lambda: hopper.tangent(call, tangents, None))
    report("tangent", 5, lambda: hopper.tangent(call, tangents, (y, lse, None)))
    _, _, _, ty, tlse, _ = hopper.tangent(call, tangents, (y, lse, None))
    results, came = (y, lse, None, ty, tlse, None), (None, None, dy, None)
    report("second", 10, lambda: hopper.second(call, tangents, results, came, NEEDS))
    for config in OPTIONS[width] if every and causal else OPTIONS[width][1:2] if causal and width == 64 else ():
        with override("hopper.second", config):
            report(f"second {config}", 10, lambda: hopper.second(call, tangents, results, came, NEEDS))
    if every:
        report("triton's second", 15, lambda: portable.second(call, tangents, results, came, NEEDS))
    for name in (None, "triton") if every else (None,):
        taken = milliseconds(double(given, name, causal=causal))
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        double(given, name, causal=causal)()
        peak = (torch.cuda.max_memory_allocated() - held) / q.nbytes
        print(f"{label} DOUBLE BACKWARD, {name or 'default'}: {taken:.3f} ms = {taken / back:.2f}x backward; peak {peak:.1f} q")


def main() -> None:
    every = "every" in sys.argv
    # the first four compile what is timed
    checks: list[tuple[Any, ...]] = [(d, {"causal": c}, torch.bfloat16, 512) for d in SHAPES for c in (True, False)]
    checks += [(d, {"window": (100, 20)}, torch.bfloat16) for d in SHAPES]
    checks += [(96, {"causal": True}, torch.float16), (32, {}, torch.float16)]
    parts = {f"check{n}": partial(check, *each) for n, each in enumerate(checks)}
    parts |= {
        f"warm{d}-{n}": partial(warm, d, True, c)
        for d in SHAPES
        for n, c in enumerate(OPTIONS[d])
        if every or (d, n) == (64, 1)
    }
    together = len(parts)
    parts |= {f"speed{d}": partial(speed, d, every) for d in SHAPES}
    for name in sys.argv[1:]:
        if name in parts:
            parts[name]()
            return
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; bf16, S {LENGTH}, {SHAPES}",
        flush=True,
    )
    names = list(parts)
    in_turn = [names[:together], *([name] for name in names[together:])]
    for some in in_turn:
        began = time.time()
        begun = [subprocess.Popen([sys.executable, __file__, name, *sys.argv[1:]]) for name in some]
        for name, process in zip(some, begun, strict=True):
            try:
                process.wait(max(1.0, began + LIMIT - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                print(f"{name} did not end in {LIMIT} s", flush=True)
        print(f"-- {some[0]} to {some[-1]}: {time.time() - began:.0f} s", flush=True)


def speed(width: int, every: bool) -> None:
    for causal in (True, False):
        race(width, causal, every)


if __name__ == "__main__":
    main()
