"""Level `adversarial`: is this a kernel, or something that fits the examination? For code that was written to pass a test.

Values, shapes and addresses that nobody could know come from the system's own randomness; the seed stands in the evidence. A
kernel that is wrong already is not asked: its defects have better names.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from backlight._private.torch import DispatchMode, keep_busy
from backlight.doctor.report.model import Probe
from backlight.doctor.steps import convention
from backlight.doctor.steps.bench import Bench, differences, probe
from backlight.doctor.steps.compare import compare, judged
from backlight.doctor.steps.probes import IN_FLIGHT_CYCLES
from backlight.doctor.subject.subject import Observed
from backlight.doctor.subject.trouble import CouldNotRun, DeviceLost
from backlight.problems import inputs
from backlight.problems.problem import Problem

CALLS = 24
SHAPES = 3
LENGTHS = (17, 161)
ATTENTION = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention", "flex_attention")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul")
WEIGHTS = ("_softmax", "_safe_softmax", "exp", "exp2", "logsumexp")


def hidden(
    problem: Problem,
    shape: tuple[int, int, int, int] | None = None,
    kv_heads: int | None = None,
    kept: Iterable[str] = (),
) -> Problem:
    """The same kind of problem with numbers, and a shape if one is given, that nobody knew before; `kept` terms stay."""
    call = problem.call
    b, hq, sq, d = call.q.shape if shape is None else shape
    own: dict[str, Any] = {"kv_heads": kv_heads or call.k.shape[1]}
    if shape is None:
        own |= {"sk": call.k.shape[2]}
    if call.bias is not None:
        own["bias"] = call.bias.shape[1]
    if call.varlen:
        own["cu_seqlens"] = (call.cu_seqlens_q, call.cu_seqlens_k)
    own |= {name: getattr(call, name) for name in kept}
    return inputs.make(
        call.spec,
        (b, hq, sq, d),
        dv=call.v.shape[3],
        dtype=call.q.dtype,
        seed=secrets.randbits(31),
        device=call.q.device,
        **own,
    )


def wrong(bench: Bench, problem: Problem, observed: Observed) -> list[str]:
    """Names of outputs that are beyond what a correct kernel does."""
    values = convention.natural_lse(bench.subject, problem, observed.values, [])
    convention.fill_empty_rows(problem, values)
    known = judged(values, problem)
    return [n for n, x in known.items() if n in bench.base and compare(n, x, problem).bad]


def game(name: str) -> Callable[[Callable[[Bench], Probe]], Callable[[Bench], Probe]]:
    """A probe for kernels that are right so far."""

    def wrap(function: Callable[[Bench], Probe]) -> Callable[[Bench], Probe]:
        def run(bench: Bench) -> Probe:
            if wrong(bench, bench.problem, bench.base):
                return Probe("", None, "wrong on the inputs of the examination already")
            return function(bench)

        return probe(name)(run)

    return wrap


def failed(finding: str, detail: str, names: list[str], **data: Any) -> Probe:
    return Probe("", False, detail, data={"finding": finding, "wrong": names} | data)


@game("hidden seed")
def hidden_seed(bench: Bench) -> Probe:
    problem = hidden(bench.problem, kept=bench.built_in)
    names = wrong(bench, problem, bench.run(problem=problem))
    if names:
        return failed("other-inputs", f"seed {problem.seed}: {', '.join(names)} wrong", names, seed=problem.seed)
    return Probe("", True, f"right for seed {problem.seed}", data={"seed": problem.seed})


@game("one number changed")
def one_number(bench: Bench) -> Probe:
    """The last key and value that a row of the middle sees: a result remembered by the first numbers does not notice."""
    call = bench.problem.call
    z = call.segments()[-1]
    if not z.sq or not z.sk:
        return Probe("", None, "an empty sequence")
    k, v = call.k.clone(), call.v.clone()
    k[-1, -1, z.k1 - 1, -1] += 1
    v[-1, -1, z.k1 - 1, -1] += 4
    changed = bench.problem.replace(call=replace(call, k=k, v=v))
    names = wrong(bench, changed, bench.run(problem=changed))
    if names:
        return failed("cached-result", f"one number of k and of v changed: {', '.join(names)} wrong", names)
    return Probe("", True, "the results follow")


@game("other numbers in the same memory")
def same_memory(bench: Bench) -> Probe:
    memory: dict[str, torch.Tensor] = {}
    bench.run(memory=memory)
    other = hidden(bench.problem, kept=bench.built_in)
    found = differences(bench.run(problem=other), bench.run(problem=other, memory=memory), bench.problem.eps)
    return bench.equal(found, "other numbers at the same addresses give other results than elsewhere", "cached-result")


@game("the same numbers in other memory")
def other_memory(bench: Bench) -> Probe:
    call = bench.problem.call
    held = [torch.full_like(x, 1e4) for x in (call.q, call.k, call.v, bench.problem.dy) for _ in range(3)]
    found = differences(bench.base, bench.run(), bench.problem.eps)
    del held
    return bench.equal(found, "the same numbers at other addresses change the result", "other-memory")


@game("many calls")
def many_calls(bench: Bench) -> Probe:
    turns = [bench.problem, hidden(bench.problem, kept=bench.built_in)]
    first = [bench.base, bench.run(problem=turns[1])]
    for count in range(CALLS):
        which = count % 2
        result = bench.equal(
            differences(first[which], bench.run(problem=turns[which]), bench.problem.eps),
            f"call {count + 3} gives another result than before",
            "other-calls",
        )
        if not result.passed:
            return result
    return Probe("", True, f"{CALLS} calls in turn repeat themselves")


@game("shapes never seen")
def unseen_shapes(bench: Bench) -> Probe:
    call = bench.problem.call
    if call.varlen or bench.built_in:
        return Probe("", None, "packed sequences" if call.varlen else "a learned term is built in")
    right, refused = [], []
    for shape, kv_heads in drawn_shapes(bench.problem):
        problem = hidden(bench.problem, shape, kv_heads)
        try:
            names = wrong(bench, problem, bench.run(problem=problem))
        except DeviceLost:
            raise
        except (CouldNotRun, RuntimeError) as error:
            refused.append(f"{shape}: {str(error).splitlines()[0][:80]}")
            continue
        if names:
            words = (
                f"shape {','.join(map(str, shape))}, {kv_heads} key/value heads, seed {problem.seed}: {', '.join(names)} wrong"
            )
            return failed("other-shapes", words, names, seed=problem.seed, shape=list(shape))
        right.append("x".join(map(str, shape)))
    if not right:
        return Probe("", None, f"the subject refused: {refused[0]}")
    return Probe("", True, f"right for {', '.join(right)}" + (f"; refused {len(refused)} others" if refused else ""))


def drawn_shapes(problem: Problem) -> list[tuple[tuple[int, int, int, int], int]]:
    """(B, Hq, S, D) with a number of key/value heads: other batches, heads in the same groups, odd lengths, the same D."""
    call, chance = problem.call, random.SystemRandom()
    found = []
    for _ in range(SHAPES):
        kv = chance.randint(1, 4)
        found.append(((chance.randint(1, 3), kv * call.group, chance.randrange(*LENGTHS), call.q.shape[3]), kv))
    return found


@game("another stream")
def another_stream(bench: Bench) -> Probe:
    device = bench.problem.call.q.device
    if device.type != "cuda":
        return Probe("", None, "needs a CUDA stream")
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        keep_busy(IN_FLIGHT_CYCLES)
        observed = bench.run()
    torch.cuda.synchronize(device)
    found = differences(bench.base, observed, bench.problem.eps)
    return bench.equal(found, "on a stream that is not the default one the result changes", "other-stream")


class Operations(DispatchMode):
    """Names of the operations of torch that run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.names[name] = self.names.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    @property
    def telling(self) -> list[str]:
        """Those that are attention, or together make it."""
        whole = [name for name in self.names if any(word in name for word in ATTENTION)]
        products, weights = ([n for n in self.names if n in known] for known in (PRODUCTS, WEIGHTS))
        return whole or ([*products, *weights] if products and weights else [])


@probe("left to torch")
def left_to_torch(bench: Bench) -> Probe:
    """Which operations of torch a call consists of, here and at an odd length: kernels fall back where they have no path."""
    problems = {"here": bench.problem}
    if not bench.problem.call.varlen and not bench.built_in:
        shape, kv_heads = drawn_shapes(bench.problem)[0]
        problems[f"at length {shape[2]}"] = hidden(bench.problem, shape, kv_heads)
    found = {}
    for words, problem in problems.items():
        try:
            with Operations() as seen:
                bench.run(problem=problem)
        except DeviceLost:
            raise
        except (CouldNotRun, RuntimeError):
            continue
        if seen.telling:
            found[words] = seen.telling
    if not found:
        return Probe("", True, "no operation of torch does the work")
    words, names = next(iter(found.items()))
    detail = f"{', '.join(names)} ({words})"
    return Probe("", False, detail, data={"finding": "computed-by-torch", "operations": names, "places": list(found)})


PROBES = (
    hidden_seed,
    one_number,
    same_memory,
    other_memory,
    many_calls,
    unseen_shapes,
    another_stream,
    left_to_torch,
)
