"""Steps 3 and 4: experiments on the subject that need no reference, or only its own first answer.

Each probe is a function of a `Bench` and returns a `Probe`; a failed one may carry the id of the defect it shows in
`data["finding"]`. Probes never judge by a guessed tolerance: results must be equal bit for bit, or within a few units in the
last place where the subject itself is not repeatable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backlight import intervals
from backlight._private.torch import keep_busy
from backlight.doctor.report.model import Probe
from backlight.doctor.report.words import counted
from backlight.doctor.steps import fresh
from backlight.doctor.steps.bench import (
    REORDERED,
    REORDERED_WIDE,
    Bench,
    Failing,
    differences,
    distance,
    distances_in_words,
    gradients,
    probe,
)
from backlight.doctor.subject import layouts
from backlight.doctor.subject.memory import poisoned
from backlight.doctor.subject.subject import Observed
from backlight.doctor.subject.trouble import CouldNotRun, Unrepeatable
from backlight.problems.axes import AXES, cut_call, tensors_of, with_tensors
from backlight.spec import OF_PAIRS

REPEATS = 10
# where runs differ, they are repeated after these: equal after the same, other after another, if they draw random numbers
SEEDS = 0, 1, 0
# key tiles of the probe of hidden positions
KEY_TILE, MOST_TILES, MOST_PAIRS = 64, 6, 2**26
# by what share of itself a result of 8 bits moves at least where hidden positions are reached
REACHED = 0.25
# about 10 ms on a GPU of 2 GHz: longer than any launch, short enough to be run on every problem
IN_FLIGHT_CYCLES = 20_000_000

Layouts = Mapping[str, Callable[[Tensor], Tensor]]


# --- quick -----------------------------------------------------------------------------------------------------------------


@probe("expanded dO")
def expanded_do(bench: Bench) -> Probe:
    """What out.sum().backward() delivers against the same ones, contiguous."""
    ones = torch.ones_like(bench.problem.dy)
    plain, expanded = bench.run(ones), bench.run(ones, do_layout=layouts.expanded)
    found = differences(plain, expanded, bench.problem.eps)
    result = bench.equal(found, "an expanded dO (strides 0) changes the gradients", "do-stride")
    if result.passed is False:
        bench.failing["do-stride"] = Failing("with an expanded dO of ones", bench.problem.replace(dy=ones), expanded)
        result.data["gains"] = {
            n: head_gains(plain[n], expanded[n]) for n in ("dq", "dk", "dv") if n in plain and n in expanded
        }
    return result


def head_gains(a: Tensor, b: Tensor) -> list[float]:
    """<b, a> / <a, a> per head, for the pattern 1, 0, 0, 0."""
    a, b = a.double(), b.double()
    return ((a * b).sum((0, 2, 3)) / (a * a).sum((0, 2, 3)).clamp(min=1e-300)).tolist()


@probe("zero dO")
def zero_do(bench: Bench) -> Probe:
    out = bench.run(torch.zeros_like(bench.problem.dy))
    wrong = {n: int(((x != 0) & torch.isfinite(x)).sum()) for n, x in gradients(out).items()}
    wrong = {n: count for n, count in wrong.items() if count}
    if wrong:
        words = ", ".join(f"{counted(count, 'value')} of {n}" for n, count in wrong.items())
        return Probe("", False, f"dO = 0 must give zero gradients; not 0: {words}", data={"finding": "accumulates-over-calls"})
    return Probe("", True, "all gradients exactly 0")


@probe("poisoned memory")
def poison(bench: Bench) -> Probe:
    """Uninitialised memory filled with NaN, then with 1e4: the two results must be equal; smaller numbers tell what it does."""
    runs = runs_in_poison(bench)
    found = differences(runs[0], runs[1], bench.problem.eps)
    exposed = {n: d for n, d in found.items() if d == float("inf")}
    result = bench.equal(found, "what fresh memory holds changes the result", "stale-rows")
    if exposed:
        data = {"finding": "stale-rows", "wrong": list(exposed)}
        result = Probe("", False, f"NaN in fresh memory reaches {', '.join(exposed)}", data=data)
    if result.passed is False:
        name = result.data["wrong"][0]
        result.data["finding"] = kind = _kind_of_memory(bench, name)
        bench.failing[kind] = Failing("with 1e4 in fresh memory", bench.problem, runs[1])
        span = _changed_positions(*(r[name] for r in runs))
        if span is not None:
            result.data["span"] = span
            result.detail += f", positions {span[0]} to {span[1] - 1}"
        result.detail += f"; {FRESH_WORDS[kind]}"
    return result


FRESH_WORDS = {
    "stale-rows": "they hold the very number that was put there",
    "sum-not-cleared": "the number that was put there is added to them, once",
    "scratch-not-written": "a formula turned what was put there into something else",
}


def _kind_of_memory(bench: Bench, name: str) -> str:
    runs = []
    for value in fresh.SENTINELS:
        with poisoned(value):
            runs.append(bench.run()[name])
    return fresh.kind_of(runs[0], runs[1], bench.problem.eps)


def runs_in_poison(bench: Bench) -> list[Observed]:
    """The same call twice, fresh memory holding NaN and then 1e4."""
    runs = []
    for value in (float("nan"), 1e4):
        with poisoned(value):
            runs.append(bench.run())
    return runs


def _changed_positions(a: Tensor, b: Tensor) -> list[int] | None:
    """First and end position of [B, H, S, ..] tensors that differ."""
    if a.dim() < 3:
        return None
    rows = (~((a == b) | (torch.isnan(a) & torch.isnan(b)))).flatten(3).any(dim=-1) if a.dim() > 3 else a != b
    positions = rows.flatten(0, 1).any(dim=0).nonzero().flatten().tolist()
    return [positions[0], positions[-1] + 1] if positions else None


@probe("negated v")
def negated_v(bench: Bench) -> Probe:
    """o is linear in v: -v must give -o. A cached result does not."""
    call = bench.problem.call
    out = bench.subject.run(replace(call, v=-call.v))
    if torch.equal(out["o"], bench.base["o"]) and bool((bench.base["o"] != 0).any()):
        return Probe("", False, "o is bit for bit the same after v changed its sign", data={"finding": "cached-result"})
    off = distance(-out["o"], bench.base["o"]) / bench.problem.eps
    return (
        Probe("", True, f"o follows v ({off:.1f} eps)")
        if off <= bench.close
        else Probe("", None, "o is not odd in v; judged elsewhere")
    )


@probe("repeats")
def repeat_once(bench: Bench) -> Probe:
    return _repeats(bench, 2)


# --- full ------------------------------------------------------------------------------------------------------------------


@probe("repeats")
def repeats(bench: Bench) -> Probe:
    return _repeats(bench, REPEATS)


def _repeats(bench: Bench, count: int) -> Probe:
    """The same call again and again: bitwise, or only dq in its last bits."""
    try:
        runs = [bench.base, *(bench.run() for _ in range(count - 1))]
    except CouldNotRun as error:
        raise Unrepeatable(f"the same call works once and fails when repeated: {error}") from error
    rows, worst = [], {}
    for name, first in bench.base.values.items():
        others = [r[name] for r in runs[1:] if name in r]
        moved = torch.zeros_like(first, dtype=torch.bool)
        distinct = [first]
        for x in others:
            moved |= ~((x == first) | (torch.isnan(x) & torch.isnan(first)))
            if not any(torch.equal(x.nan_to_num(), d.nan_to_num()) for d in distinct):
                distinct.append(x)
        far = max((distance(first, x) / bench.problem.eps for x in others), default=0.0)
        rows.append({"name": name, "distinct": len(distinct), "elements": int(moved.sum()), "max_ulp": far})
        if far > 0:
            worst[name] = far
    data = {"runs": count, "rows": rows}
    bench.spread = dict(worst)
    if not worst:
        return Probe("", True, f"{count} runs are equal bit for bit", data=data)
    limit = REORDERED if bench.problem.sixteen_bit else REORDERED_WIDE
    finding = "atomics-reorder" if all(d <= limit for d in worst.values()) else "race-lost-update"
    said = f"{count} runs differ: {distances_in_words(worst)}"
    if finding == "race-lost-update" and _follow_the_seed(bench, worst):
        finding, said = "random-numbers", f"{said}; after torch.manual_seed equal seeds give equal bits, another seed others"
    return Probe("", False, said, data=data | {"finding": finding, "wrong": sorted(worst)})


def _follow_the_seed(bench: Bench, names: Iterable[str]) -> bool:
    """Whether results that differ from run to run are equal where torch's random numbers are, and there alone."""
    runs, device = [], bench.problem.call.q.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for seed in SEEDS:
            torch.manual_seed(seed)
            runs.append(bench.run())
    once, other, again = runs

    def equal(name: str, a: Observed, b: Observed) -> bool:
        return name in a and name in b and torch.equal(a[name].nan_to_num(), b[name].nan_to_num())

    return all(equal(name, once, again) and not equal(name, once, other) for name in names)


def _same_in_memory(bench: Bench, argument: str, choices: Layouts, what: str, finding: str) -> Probe:
    """The same values with other strides: a correct kernel cannot tell them apart."""
    for name, layout in choices.items():
        chosen: dict[str, Any] = {argument: layout}
        out = bench.run(**chosen)
        result = bench.equal(differences(bench.base, out, bench.problem.eps), what.format(name), finding)
        if not result.passed:
            of = "dO" if argument == "do_layout" else "q, k, v"
            bench.failing.setdefault(finding, Failing(f"with {of} {name} in memory", bench.problem, out))
            return result
    return Probe("", True, "equal for " + ", ".join(choices))


@probe("dO layouts")
def do_layouts(bench: Bench) -> Probe:
    return _same_in_memory(bench, "do_layout", layouts.DO_LAYOUTS, "the same dO, {}, changes the gradients", "do-stride")


@probe("dO in flight")
def do_in_flight(bench: Bench) -> Probe:
    """dO is written behind work that keeps the stream busy; a kernel that does not wait reads what was there before."""
    if bench.problem.call.q.device.type != "cuda":
        return Probe("", None, "needs a CUDA stream")
    bench.run(do_layout=written_late)  # whatever is compiled or loaded on first use must not wait for us
    out = bench.run(do_layout=written_late)
    bench.failing["do-in-flight"] = Failing("with a dO still in flight", bench.problem, out)
    found = differences(bench.base, out, bench.problem.eps)
    return bench.equal(found, "a dO whose producer is still running changes the gradients", "do-in-flight")


def written_late(do: Tensor) -> Tensor:
    """The same values in a buffer that holds sentinels until the stream gets there, some milliseconds from now."""
    late = torch.full_like(do, layouts.SENTINEL)
    torch.cuda.synchronize(do.device)
    keep_busy(IN_FLIGHT_CYCLES)
    return late.copy_(do)


@probe("input layouts")
def input_layouts(bench: Bench) -> Probe:
    return _same_in_memory(
        bench, "input_layout", layouts.INPUT_LAYOUTS, "the same q, k, v, {}, change the result", "input-stride"
    )


@probe("doubled dO")
def doubled_do(bench: Bench) -> Probe:
    """Gradients are linear in dO, and doubling is exact in binary."""
    out = bench.run(bench.problem.dy * 2)
    found = {
        n: distance(x, gradients(bench.base)[n] * 2) / bench.problem.eps for n, x in gradients(out).items() if n in bench.base
    }
    found = {n: d for n, d in found.items() if d > 0}
    return bench.equal(found, "2 dO does not give twice the gradients", "open")


@probe("permuted heads")
def permuted_heads(bench: Bench) -> Probe:
    """Heads in reverse order, learned terms with them: outputs in reverse order."""
    call, problem = bench.problem.call, bench.problem
    if call.q.shape[1] == 1 or bench.built_in:
        return Probe("", None, "a learned term is built in" if bench.built_in else "one head")
    flip = {name: x.flip(1 if "batch" in AXES[name] else 0) for name, x in tensors_of(call).items()}
    flip |= {} if call.rows is None else {"rows": call.rows.flip(1)}
    out = bench.subject.run(with_tensors(call, flip), problem.dy.flip(1))
    back = {n: x.flip(1) if x.dim() >= 3 else x.flip(0) for n, x in out.values.items()}
    return bench.equal(
        differences(bench.base, Observed(back), problem.eps), "reversing the heads does not reverse the results", "open"
    )


@probe("one entry alone")
def alone(bench: Bench) -> Probe:
    """The first batch entry by itself: the same numbers as inside the batch."""
    call, problem = bench.problem.call, bench.problem
    if call.q.shape[0] == 1:
        return Probe("", None, "one batch entry")
    first = cut_call(call, {"batch": slice(1)})
    part = with_tensors(first, {name: x.contiguous() for name, x in tensors_of(first).items()})
    out = bench.subject.run(part, problem.dy[:1].contiguous())
    base = Observed({n: x[:1] for n, x in bench.base.values.items() if x.dim() >= 3 and n[1:] not in OF_PAIRS})
    return bench.equal(differences(base, out, problem.eps), "a batch entry alone gives other numbers than in the batch", "open")


@probe("forbidden positions")
def forbidden(bench: Bench) -> Probe:
    """Large finite values where some rows may not look, at both edges and by key tile: those rows must not move by a bit."""
    call = bench.problem.call
    if call.q.shape[2] * call.k.shape[2] > MOST_PAIRS:
        return Probe("", None, "too many positions")
    visible = intervals.visible_whole(call).flatten(0, -3).any(dim=0)
    places = hidden_places(visible)
    if not places:
        return Probe("", None, "every row sees every key")
    for name, keys, rows in places:
        found = _reached(bench, keys, rows)
        what = f"{name} ({_range('keys', keys)}) changes {_range('rows', rows)}"
        # in 8 bits visible keys are rounded otherwise beside other hidden ones
        close = None if bench.problem.arithmetic is None else REACHED / bench.problem.unit
        result = bench.equal(found, what, "hidden-reached", close)
        if not result.passed:
            return result
    return Probe("", True, f"rows do not move: {len(places)} places, {', '.join(dict.fromkeys(p[0] for p in places))}")


def hidden_places(visible: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """(name, keys, rows that see none of them) of a [Sq, Sk] mask: at the right edge, at the left one, every key tile."""
    sq, sk = visible.shape
    if not sq or not sk:
        return []
    position, half = torch.arange(sk, device=visible.device), max(1, sq // 2)
    places = [("behind the right edge", position > torch.where(visible, position, -1)[:half].amax())]
    if sq > half:
        places.append(("before the left edge", position < torch.where(visible, position, sk)[half:].amin()))
    tile = max(KEY_TILE, -(-sk // MOST_TILES))
    places += [("key tile", (position >= j) & (position < j + tile)) for j in range(0, sk, tile)]
    found = [(name, keys, ~(visible & keys).any(dim=1)) for name, keys in places if bool(keys.any())]
    return [(name, keys, rows) for name, keys, rows in found if bool(rows.any())]


def _reached(bench: Bench, keys: Tensor, rows: Tensor) -> dict[str, float]:
    """What large numbers at `keys` move in `rows`, which cannot see them, and in the gradients of all other keys."""
    call, problem = bench.problem.call, bench.problem
    k, v, dy = call.k.clone(), call.v.clone(), problem.dy.clone()
    # rows that see the keys send no gradient, so that nothing of theirs reaches other keys
    dy[:, :, ~rows] = 0.0
    if problem.arithmetic is None:
        k[:, :, keys], v[:, :, keys] = 30.0, 1e3
    else:
        # a scale may be shared with hidden keys: as large as they were
        k[:, :, keys], v[:, :, keys] = -k[:, :, keys], -v[:, :, keys]
    plain = bench.run(dy)
    out = bench.subject.run(replace(call, k=k, v=v), dy)
    kept = dict.fromkeys(("o", "lse", "dq"), rows) | {"dk": ~keys, "dv": ~keys}
    if problem.arithmetic is not None:
        # of rows that see few keys dq and dk are small differences of what was rounded
        kept = {name: kept[name] for name in ("o", "lse", "dv")}
    a, b = (Observed({n: x[:, :, kept[n]] for n, x in r.values.items() if n in kept}) for r in (plain, out))
    return differences(a, b, problem.unit, rms=problem.arithmetic is not None)


def _range(word: str, chosen: Tensor) -> str:
    where = chosen.nonzero().flatten().tolist()
    return f"{word} {where[0]}-{where[-1]}"


@probe("beyond the end")
def beyond_the_end(bench: Bench) -> Probe:
    """The same inputs in front of NaN, and behind it: what lies outside a tensor is not to be read, not even times 0."""
    runs = {}
    for value in (float("nan"), layouts.SENTINEL):
        layout = layouts.surrounded(value)
        runs[value] = differences(bench.base, bench.run(do_layout=layout, input_layout=layout), bench.problem.eps)
    exposed, moved = runs.values()
    result = bench.equal(exposed, "NaN outside q, k, v and dO changes the result", "read-beyond-end")
    if result.passed is False:
        far = [n for n, d in moved.items() if not d <= max(bench.close, 3 * bench.spread.get(n, 0.0))]
        times_zero = "finite numbers do not, so it is multiplied by 0"
        result.detail += f"; {f'so do finite numbers ({distances_in_words(moved)})' if far else times_zero}"
    return result


@probe("tile sizes")
def tile_sizes(bench: Bench) -> Probe:
    """Other tile sizes, when the subject has any: wrong rows that move with the tile are a tile-edge defect."""
    if not bench.subject.config:
        return Probe("", None, "the subject offers no tile configuration")
    rows = []
    for name, choices in bench.subject.config.items():
        for choice in choices:
            out = bench.subject.with_fixed(**{name: choice}).run(bench.problem.call, bench.problem.dy)
            rows.append((name, choice, differences(bench.base, out, bench.problem.eps)))
    far = [(n, c, d) for n, c, d in rows if any(x > 4 / bench.problem.eps * 1e-2 for x in d.values())]
    if far:
        name, choice, found = far[0]
        return Probe("", False, f"{name} = {choice} changes the result: {distances_in_words(found)}", data={"finding": "open"})
    return Probe("", True, f"{len(rows)} configurations agree")


QUICK = (repeat_once, expanded_do, zero_do, poison, negated_v)
FULL = (
    repeats,
    expanded_do,
    zero_do,
    poison,
    negated_v,
    do_layouts,
    do_in_flight,
    input_layouts,
    doubled_do,
    permuted_heads,
    alone,
    forbidden,
    beyond_the_end,
)
# these ask the backward alone
OF_GRADIENTS = (expanded_do, zero_do, do_layouts, do_in_flight, doubled_do)
FORENSIC = (*FULL, tile_sizes)
