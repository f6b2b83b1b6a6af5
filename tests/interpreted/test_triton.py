"""The Triton kernels on a CPU, through Triton's interpreter, against the same cases and the same gate as every backend.

Run as `TRITON_INTERPRET=1 pytest tests/interpreted` (`make test` does): the interpreter is chosen when kernels are imported,
and in that process it would also be chosen for every other test. Its bf16 matmul is wrong, so fp32 and fp16 only.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import triton
import triton.language as tl

from backlight.backends.triton import primitives, softcap
from backlight.backends.triton.config import KernelConfig
from backlight.config import override
from cases import BY_NAME, EXTREMES, MASKS, PACKED, PAIR_BIAS, SINGLES, TOGETHER, Case, case_id
from gate import judge, measure
from running import run

AWKWARD = (
    "causal,s=1",
    "causal,s=127",
    "causal,sq=63,sk=200",
    "causal,d=40",
    "causal,d=16,dv=40",
    "gqa,8:1",
    "mqa,h=3",
    "sk=0,sink",
    "rows without keys,everything",
    "window sees nothing",
    "bias,longer than s",
    "bias,two-sided,sq<sk",
    "bias,origin negative",
    "bias,origin beyond the table",
    "tau,minus one",
    "tau,minus one,self only",
    "tau,mixed signs",
    "tau,nothing survives,dlse",
    "low lse,tau,bias",
    "large logits,sink",
    "softcap,saturated",
    "terms,d=192,varlen",
    "lazy,d=256",
)
# half of a program's usual rows: the last of its programs has none
CROWDED = Case("gate,tau,dv=136", b=1, causal=True, sq=40, sk=40, dv=136, gate=True, tau=(-0.7, 0.4), dlse=True)
# accumulators of 512 columns, of which 320 are real or all
WIDEST = (
    Case("d=320,causal,gqa", b=1, hq=2, hkv=1, causal=True, sq=40, sk=70, d=320, dlse=True),
    Case("d=512,terms", b=1, causal=True, sq=40, sk=40, d=512, bias=33, sink=True, softcap=1.5, gate=True),
    Case("d=512,window,varlen", hq=2, hkv=1, lengths_q=(37, 0, 20), d=512, dv=264, window=(9, 3)),
    Case("d=512,pair", b=1, hq=2, hkv=2, sq=35, sk=35, d=512, pair_bias=("heads", "rows")),
    Case("d=512,mask", mask="two runs", b=1, hq=2, hkv=2, causal=True, sq=40, sk=40, d=512),
)
# each feature beside a pair bias; what else there is of it: test_pair_tiles.py
PAIRED = tuple(case for case in PAIR_BIAS if max(case.sq, case.sk) <= 100 and case.d <= 64 and "everything" not in case.name)
CASES = (CROWDED, *WIDEST, *PAIRED, *SINGLES, *TOGETHER, *PACKED, *EXTREMES, *MASKS, *(BY_NAME[name] for name in AWKWARD))


def verdict_of(case: Case, dtype: torch.dtype) -> object:
    problem = case.make(dtype)
    yardsticks = measure(problem.call, problem.dy, problem.dlse)
    return judge(problem.call, problem.dy, problem.dlse, run(problem, "triton"), yardsticks)


# minutes of interpreted tiles; smaller cases turn the same loops
LONG = pytest.mark.slow
# test_masks.py has smaller problems with masks
MASKS_HERE = ("mask", "mask,nothing is seen", "mask,sq=0", "mask,sk=0", "mask,varlen,empty segments", "mask,pos,varlen,causal")
PAIRS_HERE = ("pair", "pair,two entries share", "pair,hidden", "pair,mask", "pair,rows without keys", "pair,sq=0", "pair,sk=0")
LONG_CASES = {"varlen,long", *(case.name for case in (*MASKS, *PAIRED) if case.name not in (*MASKS_HERE, *PAIRS_HERE))}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=LONG) if case.name in LONG_CASES else case for case in CASES], ids=case_id
)
def test_fp32(case: Case) -> None:
    verdict = verdict_of(case, torch.float32)
    assert verdict.ok, f"{case.name}\n{verdict}"


@pytest.mark.parametrize("case", TOGETHER, ids=case_id)
def test_fp16(case: Case) -> None:
    verdict = verdict_of(case, torch.float16)
    assert verdict.ok, f"{case.name}\n{verdict}"


WIDE = (
    Case("d=136,gqa", d=136, hq=4, hkv=2, b=1, sq=40, sk=70, causal=True),
    Case("d=136,everything", d=136, dv=24, b=1, causal=True, bias=30, softcap=2.0, sink=True, tau=(0.4, -0.7), gate=True),
)


@pytest.mark.parametrize("case", WIDE, ids=case_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_wide_heads(case: Case, dtype: torch.dtype) -> None:
    """16-bit heads beyond 128 compute dv and dk in two launches; fp32 has tiles of its own."""
    verdict = verdict_of(case, dtype)
    assert verdict.ok, f"{case.name}\n{verdict}"


EDGES = (
    Case("window,far edges", b=1, hq=1, hkv=1, sq=330, sk=330, d=8, window=(280, 0)),
    Case("window,far edges,two-sided", b=1, hq=1, hkv=1, sq=300, sk=330, d=8, window=(280, 20), bias=9, bias_origin=2),
    Case("window,far edges,tau", b=1, hq=1, hkv=1, sq=330, sk=330, d=8, window=(280, 0), tau=(0.4,), dlse=True),
)


@pytest.mark.parametrize("case", EDGES, ids=case_id)
def test_window_wider_than_tiles(case: Case) -> None:
    """Tiles between the edges, tiles cut by one, and none cut by both."""
    config = KernelConfig(64, 64, num_warps=4, num_stages=1)
    with override("triton.forward", config), override("triton.dq", config), override("triton.dkdv", config):
        verdict = verdict_of(case, torch.float32)
    assert verdict.ok, f"{case.name}\n{verdict}"


LONE = (
    Case("one key,tau minus one", b=1, hq=2, hkv=2, sq=100, sk=1, d=8, tau=(-1.0, -0.999999), dlse=True),
    Case("one key,causal,tau minus one", b=1, hq=2, hkv=2, sq=65, sk=1, d=8, causal=True, tau=(-1.0, -0.999999), dlse=True),
    Case("one key each,tau minus one", b=1, hq=1, hkv=1, sq=65, sk=65, d=8, window=(0, None), tau=(-1.0,), scale=0.37),
)


@pytest.mark.parametrize("case", LONE, ids=case_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_key_seen_alone_weighs_one(case: Case, dtype: torch.dtype) -> None:
    """p + tau / n is 0 then, not a rounding error that survives: also in tiles of rows that no mask cuts."""
    verdict = verdict_of(case, dtype)
    assert verdict.ok, f"{case.name}\n{verdict}"


UNITS = (
    Case("bias,scale negative", causal=True, bias=40, scale=-0.3),
    Case("bias,scale tiny", causal=True, bias=40, scale=1e-9),
    Case("softcap,saturated at 60", causal=True, softcap=60.0, logits=60.0),
    Case("softcap of 50", causal=True, softcap=50.0),
    Case("softcap of 55,saturated", causal=True, softcap=55.0, logits=200.0),
    Case("softcap of 300,saturated", causal=True, softcap=300.0, logits=500.0),
)


@pytest.mark.parametrize("case", UNITS, ids=case_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_units_of_logits(case: Case, dtype: torch.dtype) -> None:
    """The factor of the exponent is the scale, the softcap or 1."""
    verdict = verdict_of(case, dtype)
    assert verdict.ok, f"{case.name}\n{verdict}"


def test_a_lone_key_under_a_softcap_weighs_one() -> None:
    """exp2 of its logit is no power of two: without a reference the quotient of two roundings would be left."""
    problem = Case("softcap,alone", causal=True, softcap=20.0, logits=5.0).make(torch.float32)
    result = run(problem, "triton")
    assert torch.equal(result["y"][:, :, 0], problem.call.v[:, :, 0])


@triton.jit
def _softcap_kernel(x_ptr, y_ptr, slope_ptr, factor, gain, addend, V: tl.constexpr, COARSE: tl.constexpr, N: tl.constexpr):
    lanes = tl.arange(0, N)
    y, slope = softcap.softcapped(tl.load(x_ptr + lanes), factor, gain, addend, V, "apart")
    tl.store(y_ptr + lanes, y)
    tl.store(slope_ptr + lanes, slope)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("factor", [1e-12, 0.01, 1.0, -3.0])
def test_softcap(factor: float, coarse: bool, precise: bool) -> None:
    """tanh to fp32, its slope to what 16 bits can tell."""
    flags = dict.fromkeys(primitives.Variant._fields, False) | {"FP32": precise}
    special = torch.tensor([0.0, -0.0, 1e-20, -1e-6, 1e4, -1e4, 0.5])
    x = torch.cat((torch.linspace(-8.0, 8.0, 4096), torch.linspace(-0.3, 0.3, 4089), special)) / max(abs(factor), 1e-3)
    y, slope = torch.empty_like(x), torch.empty_like(x)
    _softcap_kernel[(1,)](x, y, slope, factor, 20.0, 0.0, V=primitives.Variant(**flags), COARSE=coarse, N=8192)
    truth = torch.tanh(x.double() * torch.tensor(factor).double())
    error = (y.double() - 20.0 * truth).abs()
    assert (error <= 20.0 * (4e-7 * truth.abs() + 1e-30)).all()
    assert ((slope.double() - (1 - truth**2)).abs() <= (2.1e-4 if coarse and not precise else 2e-6)).all()


@pytest.mark.parametrize("blocks", [pytest.param((16, 16), marks=LONG), (16, 64), (32, 64), (64, 64)], ids=str)
@pytest.mark.parametrize("name", ["bias,s=200", "everything,s=200"])
def test_blocks(name: str, blocks: tuple[int, int]) -> None:
    """Tile edges fall elsewhere for every block size; diagonals of dbias cross them differently."""
    config = KernelConfig(*blocks, num_warps=4, num_stages=1)
    with override("triton.forward", config), override("triton.dq", config), override("triton.dkdv", config):
        verdict = verdict_of(BY_NAME[name], torch.float32)
    assert verdict.ok, f"{name} {blocks}\n{verdict}"
