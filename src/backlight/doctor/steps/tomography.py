"""Step 4: looking inside a fused kernel through its outputs.

One-hot columns of v make o the forward's weights; one-hot rows of dO make dv the backward's weights; orthonormal rows of q make
dk the matrix ds, and orthonormal keys make dq the same matrix as the dq kernel has it. The probe replaces v, dO, q or k, so it
looks at the kernel, not at the user's data. Of long sequences some blocks are read: sums over tiles, one pass for all of them,
tell which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.doctor.report.words import counted
from backlight.doctor.steps.localise import diagonals
from backlight.doctor.subject.subject import Subject
from backlight.problems.axes import cut_call, tensors_of, with_tensors
from backlight.problems.problem import Problem
from backlight.reference import oracle

# weights below this may underflow in a correct kernel's output dtype
FAINT = 1e-4
# up to WHOLE positions every block is read; of more, MOST_BLOCKS of heads that together have at most MOST_CELLS
WHOLE, LONGEST, MOST_BLOCKS, MOST_CELLS = 512, 8192, 8, 2**25


@dataclass
class Recovered:
    """A matrix read off the kernel, [B, Hq, Sq, Sk], beside the oracle's, and the cells that are wrong by support alone.

    known: which cells [Sq, Sk] were read; the others are 0 in `value` and `truth`. call, dy: what the probe put in.
    """

    name: str
    value: Tensor
    truth: Tensor
    leaks: Tensor
    holes: Tensor
    known: Tensor
    call: Call
    dy: Tensor | None = None

    @property
    def gain(self) -> float:
        return float((self.value * self.truth).sum() / (self.truth**2).sum().clamp(min=1e-300))

    @property
    def relative(self) -> float:
        return float((self.value - self.truth).norm() / self.truth.norm().clamp(min=1e-300))

    def support_words(self, call: Call) -> str:
        """'192 leaked cells, all at i-j = 96', or ''."""
        offset = call.k.shape[2] - call.q.shape[2] if not call.varlen else 0
        words = []
        for kind, cells in (("leaked", self.leaks), ("missing", self.holes)):
            count = int(cells.sum())
            if count:
                found = diagonals(cells, offset)
                first = ", ".join(map(str, list(found)[:3]))
                place = f"{'all ' if count > 1 else ''}at i-j = {first}" if len(found) <= 3 else f"on {len(found)} diagonals"
                words.append(f"{counted(count, f'{kind} cell')}, {place}")
        return "; ".join(words)


def neutral(call: Call) -> Call:
    """Gates wide open: the probes read weights, not gates."""
    return call if call.gate is None else replace(call, gate=torch.full_like(call.gate, 30.0))


def part(problem: Problem) -> Problem:
    """The problem, or one batch entry and few heads of one that is too long to be read as a whole."""
    call = problem.call
    sq, sk = call.q.shape[2], call.k.shape[2]
    if max(sq, sk) <= WHOLE:
        return problem
    kv = max(1, min(call.k.shape[1], MOST_CELLS // (sq * sk * call.group)))
    cut = cut_call(call, {"batch": slice(1), "heads": slice(kv * call.group), "kv_heads": slice(kv)})
    few = with_tensors(cut, {name: x.contiguous() for name, x in tensors_of(cut).items()})
    return problem.replace(call=few, dy=problem.dy[:1, : kv * call.group].contiguous(), dlse=None)


def blocks(length: int, size: int, wrong: Tensor | None = None) -> list[int]:
    """Where the blocks begin that are read: all of a short sequence; of a long one the ends, the middle and the worst."""
    starts = list(range(0, length, size))
    if length <= WHOLE:
        return starts
    chosen = [0, len(starts) - 1, len(starts) // 2]
    if wrong is not None and bool((wrong > 0).any()):
        # neighbours of the worst block tell where a tile ends
        worst = int(wrong.argmax()) // size
        chosen = [worst, worst + 1, worst - 1, *chosen]
    chosen += [round(i * (len(starts) - 1) / (MOST_BLOCKS - 1)) for i in range(MOST_BLOCKS)]
    kept = [at for at in dict.fromkeys(chosen) if 0 <= at < len(starts)][:MOST_BLOCKS]
    return [starts[at] for at in sorted(kept)]


def _coarse(length: int, width: int, like: Tensor) -> Tensor:
    """[length, width] of ones where a position belongs to a tile: sums over whole tiles instead of single positions."""
    tile = -(-length // width)
    at = torch.arange(length, device=like.device)
    found = torch.zeros(length, width, dtype=like.dtype, device=like.device)
    found[at, at // tile] = 1
    return found


def _wrong_positions(value: Tensor, truth: Tensor, length: int, eps: float) -> Tensor:
    """How far sums over tiles of positions, the last axis, are off beyond rounding; [length]."""
    tile = -(-length // truth.shape[-1])
    size = truth.abs() + truth.abs().mean(dim=-1, keepdim=True)
    off = ((value - truth).abs() / size.clamp(min=1e-300) - 4 * eps).clamp(min=0).flatten(0, -2).amax(dim=0)
    return off.repeat_interleave(tile)[:length]


def forward_weights(subject: Subject, problem: Problem) -> Recovered:
    """Weights of the forward: v = one-hot columns, ceil(Sk / Dv) forward passes for all heads at once."""
    call = neutral(problem.call)
    sk, dv = call.v.shape[2:]
    truth = oracle(call, keep=("a",)).a
    value, known = torch.zeros_like(truth), torch.zeros(truth.shape[2:], dtype=torch.bool, device=truth.device)
    wrong = None
    if sk > WHOLE:
        tiles = _coarse(sk, dv, call.v)
        sums = subject.run(replace(call, v=tiles.expand_as(call.v).contiguous()))["o"].double()
        wrong = _wrong_positions(sums, truth @ tiles.double(), sk, problem.eps)
    for j0 in blocks(sk, dv, wrong):
        v = torch.zeros_like(call.v)
        width = min(dv, sk - j0)
        v[:, :, range(j0, j0 + width), range(width)] = 1
        value[..., j0 : j0 + width] = subject.run(replace(call, v=v))["o"][..., :width].double()
        known[:, j0 : j0 + width] = True
    return _judge("p", value, truth, call, known)


def backward_weights(subject: Subject, problem: Problem) -> Recovered:
    """Weights of the backward: dO = one-hot rows, one query head per group at a time, gives dv = weightsT."""
    call = neutral(problem.call)
    sq, dv = call.q.shape[2], call.v.shape[3]
    truth = oracle(call, keep=("a",)).a
    value, known = torch.zeros_like(truth), torch.zeros(truth.shape[2:], dtype=torch.bool, device=truth.device)
    wrong = None
    if sq > WHOLE:
        tiles, heads = _coarse(sq, dv, problem.dy), slice(0, None, call.group)
        dy = torch.zeros_like(problem.dy)
        dy[:, heads] = tiles
        sums = subject.run(call, dy)["dv"].double()
        wrong = _wrong_positions(sums, truth[:, heads].mT @ tiles.double(), sq, problem.eps)
    starts = blocks(sq, dv, wrong)
    for heads in _members(call):
        for i0 in starts:
            width = min(dv, sq - i0)
            dy = torch.zeros_like(problem.dy)
            dy[:, heads, i0 : i0 + width, :width] = torch.eye(width, dtype=dy.dtype, device=dy.device)
            found = subject.run(call, dy)["dv"].double()
            value[:, heads, i0 : i0 + width] = found[..., :width].mT
            known[i0 : i0 + width] = True
    return _judge("p (bwd)", value, truth, call, known)


def _members(call: Call) -> Iterable[slice]:
    """One query head of each group at a time: their key gradients are not mixed."""
    return (slice(member, None, call.group) for member in range(call.group))


def _orthogonal(problem: Problem, length: int) -> Tensor:
    """Rows of which every D that follow each other, from a multiple of D on, are orthogonal."""
    d = problem.call.q.shape[3]
    generator = torch.Generator().manual_seed(problem.seed)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0] * d**0.5
    return basis.repeat(-(-length // d), 1)[:length].to(problem.call.q.dtype).to(problem.call.q.device)


def score_gradient(subject: Subject, problem: Problem) -> Recovered:
    """ds (dx under a soft-cap): orthogonal rows of q in blocks of at most D, dO in one block and one head per group."""
    call = neutral(problem.call)
    b, hq, sq, d = call.q.shape
    rows = _orthogonal(problem, sq)
    call = replace(call, q=rows.expand(b, hq, sq, d).contiguous())
    truth = oracle(call, problem.dy, keep=("dx",)).dx
    value, known = torch.zeros_like(truth), torch.zeros(truth.shape[2:], dtype=torch.bool, device=truth.device)
    starts = blocks(sq, d)
    for heads in _members(call):
        for i0 in starts:
            block = slice(i0, min(i0 + d, sq))
            dy = torch.zeros_like(problem.dy)
            dy[:, heads, block] = problem.dy[:, heads, block]
            dk = subject.run(call, dy)["dk"].double()
            inverse = torch.linalg.pinv(rows[block].double())
            value[:, heads, block] = (dk @ inverse).mT / call.scale
            known[block] = True
    return _judge("ds", value, truth, call, known, exact=False, dy=problem.dy)


@dataclass
class Block:
    """ds of some rows, with dO in all of them: the call that shows it has q = 0 everywhere else. ds is [B, Hq, rows, Sk]."""

    rows: slice
    ds: Tensor
    call: Call


def score_gradient_by_rows(subject: Subject, problem: Problem) -> list[Block]:
    """ds again, so that other rows have a delta too: which one a row took can be told. One head of each group alone."""
    whole = neutral(problem.call)
    sq, d = whole.q.shape[2:]
    rows, found = _orthogonal(problem, sq), []
    for i0 in blocks(sq, d):
        block = slice(i0, min(i0 + d, sq))
        q = torch.zeros_like(whole.q)
        q[:, :, block] = rows[block]
        call = replace(whole, q=q)
        inverse = torch.linalg.pinv(rows[block].double())
        ds = torch.zeros(*whole.q.shape[:2], block.stop - i0, whole.k.shape[2], dtype=torch.float64, device=q.device)
        for heads in _members(call):
            dy = torch.zeros_like(problem.dy)
            dy[:, heads] = problem.dy[:, heads]
            ds[:, heads] = (subject.run(call, dy)["dk"].double() @ inverse).mT / call.scale
        found.append(Block(block, ds, call))
    return found


def score_gradient_of_dq(subject: Subject, problem: Problem) -> Recovered:
    """ds as dq is made of it: orthogonal keys in one block of D after the other, all other keys 0."""
    call = neutral(problem.call)
    sk, d = call.k.shape[2:]
    keys, starts = _orthogonal(problem, sk), blocks(sk, d)
    truth = torch.zeros(*call.q.shape[:3], sk, dtype=torch.float64, device=call.q.device)
    value, known = torch.zeros_like(truth), torch.zeros(truth.shape[2:], dtype=torch.bool, device=truth.device)
    for j0 in starts:
        block = slice(j0, min(j0 + d, sk))
        k = torch.zeros_like(call.k)
        k[:, :, block] = keys[block]
        probe = replace(call, k=k)
        truth[..., block] = oracle(probe, problem.dy, keep=("dx",)).dx[..., block]
        dq = subject.run(probe, problem.dy)["dq"].double()
        value[..., block] = dq @ torch.linalg.pinv(keys[block].double()) / call.scale
        known[:, block] = True
    return _judge("ds (dq)", value, truth, call, known, exact=False, dy=problem.dy)


def _judge(
    name: str, value: Tensor, truth: Tensor, call: Call, known: Tensor, exact: bool = True, dy: Tensor | None = None
) -> Recovered:
    truth = truth.masked_fill(~known, 0)
    if not exact:
        none = torch.zeros_like(truth, dtype=torch.bool)
        return Recovered(name, value, truth, none, none, known, call, dy)
    hidden = ~intervals.visible_whole(call).to(truth.device).expand_as(truth)
    leaks = hidden & (value != 0)
    holes = ~hidden & (truth > FAINT) & (value == 0) & known
    return Recovered(name, value, truth, leaks, holes, known, call, dy)
