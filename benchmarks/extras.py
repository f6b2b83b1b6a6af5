"""What is returned besides y, on a card: PYTHONPATH=src python benchmarks/extras.py FILE.json

Time of a forward with `return_max_logit`, and of forward and backward with `exact_delta`, beside those without, in turns; then
signed errors of o, delta and dq over the length, with the low half of o and without it, beside FlashAttention-3 and cuDNN where
they are installed (docs/sums.md). Every variant is checked against float64 before it is timed.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from backlight import registry
from backlight.api import call_of
from backlight.call import Call
from backlight.config import override
from backlight.peers import fa3

ROUNDS, LAUNCHES = 9, 5
NEEDS = frozenset({"dq", "dk", "dv"})
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
WIDTH, HEADS = 128, 4


def milliseconds(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Medians of rounds in turn."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for n in range(ROUNDS + 2):
        for name, work in works.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(LAUNCHES):
                work()
            last.record()
            last.synchronize()
            if n >= 2:
                times[name].append(first.elapsed_time(last) / LAUNCHES)
    return {name: statistics.median(taken) for name, taken in times.items()}


# --- time --------------------------------------------------------------------------------------------------------------------


def check(call: Call, backend: Any) -> None:
    """The largest logit, and y with its low half, against float64 on the rows of one head."""
    y, _, low, peaks = backend.forward(replace(call, max_logit=True, exact_delta=call.tau is None), True)
    found = peaks.amax((0, 2))
    plain = call.tau is None and call.sink is None and call.spec.softcap is None and call.bias is None
    rows = slice(call.q.shape[2] - 256, call.q.shape[2])
    wanted = torch.full_like(found, -torch.inf).double()
    for b in range(call.q.shape[0]):
        for h in range(call.q.shape[1]):
            x = call.q[b, h].double() @ call.k[b, h // call.group].double().T * call.scale
            if call.spec.causal:
                x.masked_fill_(~torch.ones_like(x, dtype=torch.bool).tril(x.shape[1] - x.shape[0]), -torch.inf)
            wanted[h] = torch.maximum(wanted[h], x.max())
            if b == h == 0 and low is not None and plain:
                truth = torch.softmax(x[rows], -1) @ call.v[0, 0].double()
                high = y[0, 0, rows].double()
                short, whole = (torch.linalg.norm(z - truth) for z in (high, high + low[0, 0, rows].double()))
                assert whole < short, f"the low half does not help: {whole:.3g} against {short:.3g}"
    far = (found.double() - wanted).abs().max().item()
    assert far <= 2.0**-8 + 1e-5 * wanted.abs().max().item(), f"the largest logits are {far:.3g} off"


@dataclass(frozen=True)
class Job:
    """A call to be timed; terms by name, made where they are needed."""

    batch: int
    length: int
    width: int
    causal: bool = False
    backend: str = "hopper"
    softcap: float | None = None
    term: str | None = None

    def call(self, batch: int, heads: int) -> Call:
        torch.manual_seed(0)
        shape = batch, heads, self.length, self.width
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        terms = {"sink": (heads,), "bias": (heads, 128), "tau": (heads,)}
        given = {} if self.term is None else {self.term: torch.full(terms[self.term], -0.3, device="cuda")}
        return call_of(q, k, v, causal=self.causal, softcap=self.softcap, **given)

    def works(self, call: Call) -> dict[str, Callable[[], object]]:
        run, peaking, exact = registry.get(self.backend), replace(call, max_logit=True), replace(call, exact_delta=True)
        works: dict[str, Callable[[], object]] = {
            "forward": lambda: run.forward(call, call.keeps),
            "forward, max_logit": lambda: run.forward(peaking, call.keeps),
        }
        if call.tau is None:
            y, lse, low, _ = run.forward(exact, True)
            dy = torch.randn_like(y)
            works["forward, exact_delta"] = lambda: run.forward(exact, True)
            works["backward"] = lambda: run.backward(call, y, lse, None, dy, None, NEEDS)
            works["backward, exact_delta"] = lambda: run.backward(exact, y, lse, low, dy, None, NEEDS)
        return works

    def cost(self) -> dict[str, Any]:
        check(replace(self, length=min(self.length, 2048)).call(1, 16), registry.get(self.backend))
        call = self.call(self.batch, 16)
        ms = milliseconds(self.works(call))
        ratios = {"max_logit": ms["forward, max_logit"] / ms["forward"]}
        if call.tau is None:
            before = ms["forward"] + ms["backward"]
            ratios["exact_delta"] = (ms["forward, exact_delta"] + ms["backward, exact_delta"]) / before
            ratios["exact_delta forward"] = ms["forward, exact_delta"] / ms["forward"]
            ratios["exact_delta backward"] = ms["backward, exact_delta"] / ms["backward"]
        print(self, {name: f"{x:.4f}" for name, x in ratios.items()}, flush=True)
        return {**asdict(self), "heads": 16, "ms": ms}


JOBS = (
    *(Job(2, 8192, width, causal) for width in (64, 128) for causal in (False, True)),
    Job(16, 1024, 128, True),
    Job(2, 8192, 64, True, term="sink"),
    Job(2, 8192, 128, True, softcap=30.0),
    Job(2, 8192, 128, True, term="bias"),
    Job(2, 4096, 128, True, term="tau"),
    Job(2, 4096, 128, True, backend="triton"),
)


def compile_kernels(job: Job | tuple[bool, bool]) -> None:
    """Into the cache on disk, by a process of its own: one after the other they take longer than all that is measured."""
    if isinstance(job, tuple):
        ours(*job)(*qk_norm(LENGTHS[0]))
    else:
        for each in (job, replace(job, length=min(job.length, 2048))):
            for work in each.works(each.call(1, 2)).values():
                work()
    torch.cuda.synchronize()


# --- errors ------------------------------------------------------------------------------------------------------------------


def qk_norm(length: int) -> tuple[Tensor, ...]:
    """q and k of RMS 1 with gains: logits of a standard deviation near 4."""
    generator = torch.Generator("cuda").manual_seed(length)
    q, k, v, dy = (torch.randn(1, HEADS, length, WIDTH, generator=generator, device="cuda") for _ in range(4))
    gains = (2 * torch.exp(0.3 * torch.randn(2, WIDTH, generator=generator, device="cuda"))).unbind(0)
    q, k = (F.rms_norm(x, (WIDTH,)) * gain for x, gain in zip((q, k), gains, strict=True))
    return tuple(x.bfloat16() for x in (q, k, v, dy))


def ties(length: int) -> tuple[Tensor, ...]:
    """Two equal keys on top of each row, all others of weight 2^-13 together; dy of one sign per column (eq. 101)."""
    generator = torch.Generator("cuda").manual_seed(length)
    v, dy = (torch.rand(1, HEADS, length, WIDTH, generator=generator, device="cuda") for _ in range(2))
    q, k = (torch.zeros(1, HEADS, length, WIDTH, device="cuda") for _ in range(2))
    q[..., 0] = 8.0
    k[..., 0] = -(13 * math.log(2) + math.log(length / 2)) * WIDTH**0.5 / 8
    k[..., :2, 0] = 0
    # what the weights do not see, so that PK has a direction
    k[..., 1] = torch.randn(1, HEADS, length, generator=generator, device="cuda")
    v[..., :2, :] += 1
    v[..., 2:, :] = 0
    sign = torch.where(torch.arange(WIDTH, device="cuda") % 2 == 0, 1.0, -1.0)
    return tuple(x.bfloat16() for x in (q, k, v, dy.add(0.5).mul(sign)))


def truth(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """o, delta and dq in float64, rows by rows."""
    parts: dict[str, list[Tensor]] = {"o": [], "delta": [], "dq": []}
    scale = WIDTH**-0.5
    for h in range(HEADS):
        kh, vh = k[0, h].double(), v[0, h].double()
        for rows in torch.arange(q.shape[2], device="cuda").split(2048):
            p = torch.softmax(q[0, h, rows].double() @ kh.T * scale, -1)
            d = dy[0, h, rows].double()
            o = p @ vh
            delta = (d * o).sum(-1, keepdim=True)
            parts["o"].append(o)
            parts["delta"].append(delta)
            parts["dq"].append((p * (d @ vh.T - delta)) @ kh * scale)
    return {name: torch.cat(some) for name, some in parts.items()}


def judged(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Relative rms error, and the signed error g - 1 of eq. 104 with its z."""
    x = found.reshape(wanted.shape).double()
    along = ((x - wanted) * wanted).sum(-1)
    square = (wanted * wanted).sum()
    return {
        "error": ((x - wanted).square().sum() / square).sqrt().item(),
        "signed": (along.sum() / square).item(),
        "z": (along.sum() / along.square().sum().sqrt().clamp(min=1e-300)).item(),
    }


def ours(low: bool, keep: bool) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from backlight.backends.hopper.config import forward_config

        backend, call = registry.get("hopper"), replace(call_of(q, k, v), exact_delta=low)
        config = replace(forward_config(call), keep_first_max=keep)
        with override("hopper.forward", config):
            y, lse, rest, _ = backend.forward(call, True)
        dq = backend.backward(call, y, lse, rest, dy, None, NEEDS)["dq"]
        o = y.float() if rest is None else y.float() + rest.float()
        return y, (o * dy.float()).sum(-1), dq

    return run


def peer(attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = q.detach().requires_grad_()
        y = attend(q, k.detach().requires_grad_(), v.detach().requires_grad_())
        (dq,) = torch.autograd.grad(y, q, dy)
        return y.detach(), (y.detach().float() * dy.float()).sum(-1), dq

    return run


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fa3.attention(q, k, v)[0]


WAYS = [(low, keep) for low in (False, True) for keep in (True, False)]


def errors() -> list[dict[str, Any]]:
    kernels = {
        f"backlight{', low half' if low else ''}{'' if keep else ', maximum of every block'}": ours(low, keep)
        for low, keep in WAYS
    }
    kernels |= {"cuDNN": peer(cudnn)} | ({} if fa3.absent() else {"FA3": peer(flash)})
    found = []
    for name, draw in {"QK-norm": qk_norm, "ties": ties}.items():
        for length in LENGTHS:
            given = draw(length)
            wanted = truth(*given)
            for kernel, run in kernels.items():
                try:
                    parts = dict(zip(("o", "delta", "dq"), run(*given), strict=True))
                except (RuntimeError, NotImplementedError) as error:
                    print(name, length, kernel, "cannot:", str(error)[:100], flush=True)
                    continue
                judgement = {what: judged(x, wanted[what]) for what, x in parts.items()}
                found.append({"inputs": name, "length": length, "kernel": kernel, **judgement})
                shown = {what: (f"{j['error']:.2e}", f"{j['signed']:+.1e}") for what, j in judgement.items()}
                print(name, length, kernel, shown, flush=True)
    return found


def main(path: str) -> None:
    versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(versions, fa3.absent() or "FA3 is there", flush=True)
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(len(JOBS) + len(WAYS)) as pool:
        pool.map(compile_kernels, [*JOBS, *WAYS], chunksize=1)
    print(f"kernels compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    record: dict[str, Any] = versions | {"shape of errors": [1, HEADS, "length", WIDTH]}
    record["cost"] = [job.cost() for job in JOBS]
    with open(path, "w") as file:
        json.dump(record, file)
    record["errors"] = errors()
    with open(path, "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main(sys.argv[1])
