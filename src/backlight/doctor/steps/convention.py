"""Step 0: which layout the subject reads, and which logarithm its lse is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.steps.compare import compare
from backlight.doctor.subject.layouts import surrounded
from backlight.doctor.subject.memory import MARGIN
from backlight.doctor.subject.subject import Observed, Subject
from backlight.doctor.subject.trouble import CouldNotRun, DeviceLost
from backlight.problems import inputs
from backlight.problems.axes import AXES, tensors_of, with_tensors
from backlight.problems.problem import Problem
from backlight.reference import oracle
from backlight.spec import LOG2E

REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError)
# the layout is found when o is off by less than MATCHES. A defective kernel in the right layout still RESEMBLES the answer;
# tensors read in the wrong layout have next to no correlation with it
MATCHES, RESEMBLES = 0.05, 0.5
# by how much one reading of a call must resemble the answer more than the other
CLEARLY = 0.2
# lengths of the call that both readings fit: the second for kernels that want whole tiles
SQUARES = (16, 64)
FOUR_AXES = (("batch", "heads", "rows"), ("batch", "kv_heads", "keys"))
# how close a fitted (a, b) must be to a known convention
TOLERANCE, OFFSET = 1e-3, 0.01


def settle(subject: Subject, problem: Problem, notes: list[str]) -> tuple[Subject, Observed]:
    """The subject with its layout decided, and its first answer: layouts are told apart by o alone.

    All of it runs with room around what the subject allocates, and so does the rest where that first answer needed it.
    """
    guarded = subject.with_room()
    if subject.layout == "auto":
        names = plausible(subject, problem.call)
        layout = names[0] if len(names) == 1 else fits_both(guarded, problem) or _tried(guarded, problem, names)
        guarded = guarded.with_layout(layout)
        if layout != "BHSD":
            notes.append(f"layout {layout}, found by matching o")
    first = guarded.run(problem.call, problem.dy)
    return replace(guarded, roomy=subject.roomy or bool(first.written_beyond)), first


def plausible(subject: Subject, call: Call) -> tuple[str, ...]:
    """Layouts that the signature allows, the likeliest first: nobody reads packed sequences without their borders."""
    if call.varlen:
        return ("packed", "BHSD", "BSHD")
    if not subject.takes("cu_seqlens_q"):
        return ("BHSD", "BSHD")
    return ("packed",) if subject.requires("cu_seqlens_q") else ("BHSD", "BSHD", "packed")


def fits_both(subject: Subject, problem: Problem) -> str:
    """The layout by one call with as many heads as positions, which no reading of it leaves; '' when that does not tell.

    A kernel that takes heads for positions may read and write outside of tensors whose lengths differ: [B, S, H, D] and
    [B, H, S, D] have one shape here, and whose o the answer is tells which of the two was read.
    """
    call = problem.call
    if call.varlen:
        return ""
    for length in SQUARES:
        try:
            square = inputs.make(
                call.spec, (1, length, length, call.q.shape[3]), dv=call.v.shape[3], dtype=call.q.dtype, device=call.q.device
            )
            o = subject.with_layout("BHSD").run(square.call, input_layout=surrounded(MARGIN))["o"]
        except DeviceLost:
            raise
        except REFUSALS:
            continue
        if o.shape != square.dy.shape:
            continue
        turned = {n: x.transpose(1, 2) for n, x in tensors_of(square.call).items() if AXES[n][:3] in FOUR_AXES}
        found = {
            "BHSD": correlation(o, oracle(square.call).y),
            "BSHD": correlation(o.transpose(1, 2), oracle(with_tensors(square.call, turned)).y),
        }
        best = max(found, key=lambda name: found[name])
        return best if found[best] >= RESEMBLES and found[best] - min(found.values()) >= CLEARLY else ""
    return ""


def _tried(subject: Subject, problem: Problem, names: tuple[str, ...]) -> str:
    """The layout by trial on the problem itself: what fits before what resembles the answer before what merely runs."""
    errors, ran = dict[str, str](), dict[str, tuple[bool, float]]()
    for name in names:
        if ran and reads_beyond(problem.call):
            # a kernel that runs as it was called is not asked to take these lengths for others
            break
        try:
            forward = subject.with_layout(name).run(problem.call)
        except DeviceLost:
            raise
        except REFUSALS as error:
            errors[name] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            continue
        if forward["o"].shape != problem.truth.y.shape:
            errors[name] = f"o has shape {tuple(forward['o'].shape)}, expected {tuple(problem.truth.y.shape)}"
            continue
        score = compare("o", forward["o"], problem).relative
        ran[name] = (not correlation(forward["o"], problem.truth.y) >= RESEMBLES, score)
        if score <= MATCHES:
            return name
    if not ran and len(set(errors.values())) == 1:
        raise CouldNotRun(errors[names[0]])
    if not ran:
        raise CouldNotRun("the subject ran in no layout; " + "; ".join(f"{name}: {said}" for name, said in errors.items()))
    best = min(ran, key=lambda name: ran[name]) if not all(stranger for stranger, _ in ran.values()) else next(iter(ran))
    if names[0] in errors and ran[best][0]:
        # the kernel refused its own layout; that it accepts the shapes of another one says nothing about it
        raise CouldNotRun(f"{errors[names[0]]} (layout {names[0]}; it runs as {best}, on something else)")
    return best


def reads_beyond(call: Call) -> bool:
    """Whether a kernel that takes heads for positions would leave a tensor: a term by head, or rows and keys of two lengths."""
    by_head = [name for name in tensors_of(call) if AXES[name][:3] not in FOUR_AXES]
    return bool(by_head) or call.rows is not None or call.q.shape[2] != call.k.shape[2]


def correlation(x: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between two tensors; 0 where there is nothing finite to compare."""
    usable = torch.isfinite(x) & torch.isfinite(truth)
    a, b = x[usable].double(), truth[usable].double()
    return float((a @ b) / (a.norm() * b.norm()).clamp(min=1e-300))


CONVENTIONS = {"natural": 1.0, "base 2": LOG2E}


def natural_lse(subject: Subject, problem: Problem, values: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """The values with lse turned into natural logarithms where a known convention explains it."""
    found = dict(values)
    if "lse" not in found or found["lse"].shape != problem.truth.lse.shape:
        found.pop("lse", None)
        return found
    if not isinstance(subject.lse, str):
        a, b = subject.lse
        notes.append(f"lse convention: {a:.4g} x lse + {b:.4g}, as declared")
        found["lse"] = (found["lse"].double() - b).div(a).to(found["lse"].dtype)
        return found
    a, b = fit(found["lse"], problem.truth.lse)
    choices = CONVENTIONS | ({"divided by the softmax scale": 1 / problem.call.scale} if problem.call.scale else {})
    known = next((n for n, factor in choices.items() if abs(a - factor) <= TOLERANCE * factor and abs(b) <= OFFSET), None)
    if known is None:
        notes.append(f"lse fits {a:.4g} x lse + {b:.3g}: no convention we know")
    elif known != "natural":
        notes.append(f"lse convention: {known}")
        found["lse"] = found["lse"].double().div(choices[known]).to(found["lse"].dtype)
    return found


def fill_empty_rows(problem: Problem, values: dict[str, Tensor]) -> str:
    """Puts -inf, our convention, into lse of rows that see nothing; what stood there, or '' when nothing had to change.

    NaN is no convention and stays.
    """
    if "lse" not in values:
        return ""
    lse, empty = values["lse"], problem.truth.lse == -torch.inf
    other = empty & (lse != -torch.inf) & ~torch.isnan(lse)
    if not bool(other.any()):
        return ""
    values["lse"] = lse.masked_fill(other, -torch.inf)
    return f"{float(lse[other][0]):.4g}"


def fit(lse: Tensor, truth: Tensor) -> tuple[float, float]:
    """(a, b) of lse = a * truth + b over finite rows, least squares."""
    usable = torch.isfinite(lse) & torch.isfinite(truth)
    x, y = truth[usable].double(), lse[usable].double()
    if x.numel() < 2 or float(x.var()) == 0:
        return 1.0, 0.0
    a = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return a, float(y.mean()) - a * float(x.mean())
