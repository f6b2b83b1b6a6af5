"""Masks by row intervals in the Triton kernels, in tiles so small that lists hold cut tiles, whole ones, and none at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from backlight import intervals, registry
from backlight.backends.intervals.kernels import NO_ROW
from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.launch import Launch
from backlight.call import Part
from backlight.config import override
from backlight.mask import Mask, documents, prefix, rows
from cases import KINK_MARGIN, Case, Problem, kink_margin
from gate import judge
from running import run

KERNELS = ("forward", "lse", "elastic", "dq", "dkdv", "dv", "dk", "dbias")
EVERYTHING = {"softcap": 20.0, "bias": 30, "bias_origin": 6, "sink": True, "tau": (-0.7, 0.4), "gate": True, "dlse": True}
# packed sequences of which one has no rows and one no keys
PACKED = {"lengths_q": (20, 0, 20, 5), "lengths_k": (10, 3, 30, 0)}


@contextmanager
def tiles(block_m: int, block_n: int) -> Iterator[None]:
    with ExitStack() as forced:
        for kernel in KERNELS:
            # the kernel of dbias wants tiles that are at least as wide as high
            sizes = (min(block_m, block_n), block_n) if kernel == "dbias" else (block_m, block_n)
            forced.enter_context(override(f"triton.{kernel}", KernelConfig(*sizes, num_warps=4, num_stages=1)))
        yield


def random_ends(sq: int, sk: int, batch: int = 1, heads: int = 1, two: bool = False, pos: bool = False, seed: int = 0) -> Mask:
    """Runs of keys with one interval each, so that tiles are whole and empty too; some keys that nobody sees, one that all see
    but the first rows, which see nothing."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, 1 + two, sk)
    first = torch.randint(-9, sq, shape, generator=generator)
    end = first + torch.randint(-5, sq, shape, generator=generator)
    same = torch.arange(sk) // 13 * 13
    first, end = first[..., same], end[..., same]
    first[..., sk // 2], end[..., sk // 2] = -(2**31), 2**31 - 1
    first = first.clamp(min=3)
    order = torch.stack([torch.randperm(sq, generator=generator) for _ in range(batch)]).to(torch.int32) if pos else None
    return Mask(intervals.from_pairs(first, end), order)


def masked(case: Case, mask: Mask, dtype: torch.dtype = torch.float32) -> Problem:
    """The problem of a case under a mask, away from the kink of the elastic softmax."""
    for seed in range(50):
        problem = case.make(dtype, seed)
        spec = problem.call.spec.replace(rows=True, pos=mask.pos is not None)
        call = replace(problem.call, spec=spec, rows=mask.rows, pos=mask.pos)
        if kink_margin(call) >= KINK_MARGIN:
            return replace(problem, call=call)
    raise AssertionError(f"{case.name}: every draw comes too near to the kink")


@dataclass(frozen=True)
class Masked:
    case: Case
    make: Callable[[], Mask]

    def __str__(self) -> str:
        return self.case.name


def one(name: str, make: Callable[[], Mask], **options: object) -> Masked:
    return Masked(Case(name, **({"b": 1, "d": 16, "sq": 40, "sk": 40} | options)), make)  # type: ignore[arg-type]


PROBLEMS = (
    one("documents", lambda: documents(lengths=[16, 23, 1], causal=True), hq=4, dlse=True),
    one("documents,causal", lambda: documents(lengths=[16, 23, 1]), causal=True, sink=True),
    one("documents,window", lambda: documents(lengths=[16, 23, 1]), window=(12, 5), gate=True),
    one("documents,softcap", lambda: documents(lengths=[35, 5], causal=True), softcap=5.0),
    one("prefix", lambda: prefix([20, 7], 40), b=2),
    one("a run", lambda: random_ends(40, 40), tau=(-0.7, 0.4), dlse=True),
    one("two runs", lambda: random_ends(40, 40, two=True), dlse=True),
    one("two runs,causal,sq<sk", lambda: random_ends(20, 50, two=True), sq=20, sk=50, causal=True),
    one("two runs,causal,sq>sk", lambda: random_ends(50, 20, two=True), sq=50, sk=20, causal=True, dlse=True),
    one("per head", lambda: random_ends(40, 40, heads=4), hq=4),
    one("per batch entry", lambda: random_ends(40, 40, batch=2, two=True), b=2, hq=1, hkv=1, tau=(-0.7,)),
    one("everything", lambda: random_ends(30, 40, batch=2, heads=2), b=2, hkv=1, sq=30, dv=24, causal=True, **EVERYTHING),
    one("pos", lambda: random_ends(40, 40, pos=True)),
    one("pos,causal", lambda: random_ends(40, 40, batch=2, two=True, pos=True), b=2, hq=1, hkv=1, causal=True, dlse=True),
    one("pos,window,sq<sk", lambda: random_ends(20, 50, heads=2, pos=True), b=2, sq=20, sk=50, window=(30, 9), bias=20),
    one("pos,everything", lambda: random_ends(30, 40, heads=2, two=True, pos=True), hkv=1, sq=30, **EVERYTHING),
    one("packed", lambda: random_ends(45, 43), **PACKED),
    one("packed,causal,tau", lambda: random_ends(45, 43, heads=2, two=True), causal=True, tau=(-0.7, 0.4), bias=20, **PACKED),
    one("packed,pos", lambda: random_ends(45, 43, two=True, pos=True), tau=(-0.7, 0.4), dlse=True, **PACKED),
    one("packed,pos,window", lambda: random_ends(45, 43, heads=2, pos=True), window=(20, 4), bias=20, sink=True, **PACKED),
)


def verdict_of(problem: Problem) -> object:
    return judge(problem.call, problem.dy, problem.dlse, run(problem, "triton"))


@pytest.mark.parametrize("which", PROBLEMS, ids=str)
def test_every_term(which: Masked) -> None:
    problem = masked(which.case, which.make())
    with tiles(16, 16):
        verdict = verdict_of(problem)
    assert verdict.ok, f"{which}\n{verdict}"


@pytest.mark.parametrize("blocks", [(16, 16), (32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("which", [each for each in PROBLEMS if "pos," not in each.case.name or each.case.tau], ids=str)
def test_visible_keys_are_counted(which: Masked, blocks: tuple[int, int]) -> None:
    """For tau, whatever else the problem has; with pos not beside causal and window."""
    call = masked(which.case, which.make()).call
    call = replace(call, spec=call.spec.replace(tau=True), tau=torch.zeros(call.q.shape[1]))
    with tiles(*blocks):
        assert torch.equal(Launch(call).counts, intervals.visible_counts(call))


@pytest.mark.parametrize("blocks", [(32, 16), (16, 32)], ids=str)
@pytest.mark.parametrize("name", ["everything", "pos,causal", "packed,causal,tau"])
def test_tiles_that_are_not_square(name: str, blocks: tuple[int, int]) -> None:
    which = next(each for each in PROBLEMS if each.case.name == name)
    problem = masked(which.case, which.make())
    with tiles(*blocks):
        verdict = verdict_of(problem)
    assert verdict.ok, f"{which}\n{verdict}"


def test_wide_heads() -> None:
    """16-bit heads beyond 128: dv and dk in two launches."""
    problem = masked(Case("d=136", b=1, d=136, sq=40, sk=70, causal=True), random_ends(40, 70, heads=2), torch.float16)
    with tiles(16, 16):
        verdict = verdict_of(problem)
    assert verdict.ok, verdict


@pytest.mark.parametrize("pos", [False, True])
def test_a_key_seen_alone_weighs_one(pos: bool) -> None:
    """Each row sees one key, in the middle of a tile: p + tau / n is 0 then, not a rounding error that survives."""
    case = Case("alone", b=1, d=16, sq=40, sk=40, tau=(-1.0, -0.999999), bias=9, dlse=True)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)) if pos else None
    problem = masked(case, rows(torch.arange(40), torch.arange(1, 41), pos=order))
    with tiles(16, 16):
        verdict = verdict_of(problem)
    assert verdict.ok, verdict


def test_nothing_is_seen() -> None:
    nobody = torch.full((40,), 7)
    problem = masked(Case("nothing", b=1, d=16, sq=40, sk=40, bias=9, dlse=True), rows(nobody, nobody))
    with tiles(16, 16):
        result = run(problem, "triton")
    assert torch.equal(result.pop("lse"), torch.full((1, 2, 40), -torch.inf))
    assert all(not value.any() for value in result.values())


def test_positions_of_any_size() -> None:
    """Ends within the range of kernels are exact beside positions of any size, and the outermost ends leave nothing out."""
    edge = NO_ROW.value
    pos = torch.tensor([-(2**31), -edge - 1, -edge, -5, 0, 5, edge - 1, 2**31 - 2], dtype=torch.int32).repeat(5)
    first = torch.tensor([-(2**31), 1 - edge, -5, 0, 6], dtype=torch.int32).repeat(8)
    end = torch.tensor([2**31 - 1, 6, edge - 1, 0, 2**31 - 1, 1], dtype=torch.int32).repeat(7)[:40]
    problem = masked(Case("far", b=1, d=16, sq=40, sk=40), rows(first, end, pos=pos))
    with tiles(16, 16):
        verdict = verdict_of(problem)
    assert verdict.ok, verdict


@pytest.mark.parametrize("pos", [False, True])
def test_the_parts_of_a_row(pos: bool) -> None:
    """Keys in two parts (context parallel), with lse and n of the whole row: what they give adds up to the whole."""
    problem = masked(Case("parts", b=1, d=16, sq=40, sk=64, tau=(0.4, -0.7)), random_ends(40, 64, heads=2, pos=pos))
    whole, triton = problem.call, registry.get("triton")
    n = intervals.visible_counts(whole)
    with tiles(16, 16):
        y, lse, u, _ = triton.forward(whole, True)
        needs = frozenset({"dq", "dk", "dv"})
        wanted = triton.backward(whole, y, lse, u, problem.dy, None, needs)
        parts = [
            replace(whole, k=whole.k[:, :, keys], v=whole.v[:, :, keys], rows=whole.rows[..., keys], part=Part(lse, n))  # type: ignore[index]
            for keys in (slice(0, 24), slice(24, 64))
        ]
        found = [triton.forward(part, True)[0] for part in parts]
        gradients = [triton.backward(part, y, lse, u, problem.dy, None, needs) for part in parts]
    torch.testing.assert_close(found[0] + found[1], y)
    torch.testing.assert_close(gradients[0]["dq"] + gradients[1]["dq"], wanted["dq"])
    for name in ("dk", "dv"):
        torch.testing.assert_close(torch.cat([each[name] for each in gradients], 2), wanted[name])


def test_tiles_that_no_row_sees_are_not_read() -> None:
    """Keys of other documents hold NaN: the kernels of rows and of keys leave their tiles out."""
    problem = masked(Case("documents", b=1, d=16, sq=64, sk=64), documents(lengths=[32, 32]))
    for x in (problem.call.k, problem.call.v):
        x[:, :, 32:] = torch.nan
    with tiles(16, 16):
        result = run(problem, "triton")
    assert all(result[name][:, :, :32].isfinite().all() for name in ("y", "dq", "dk", "dv"))
