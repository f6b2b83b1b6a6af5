"""The forward with learned terms compiled for sm_90a: spills, warnings, instructions; no trace of a term in a plain kernel."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from aot import SHARED_MEMORY, TRITON, Report, compiled
from modules import module_of

from backlight.backends.hopper.config import elastic_config, forward_config
from backlight.backends.hopper.forward import consumer, kernel, scores, steps, tiles
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.spec import AttentionSpec

BF16, FP16 = torch.bfloat16, torch.float16
# by warpgroups, of which three have 160 registers each: values of a tile, once around its loops
ALLOWED_SPILLS = {3: 80, 2: 0}
# with bias and tau two sweeps share a tile's values
ALLOWED_SPILLS_BIAS_AND_TAU = {3: 76, 2: 20} if TRITON == (3, 7) else {3: 72, 2: 12}


def call_of(
    d: int, terms: tuple[str, ...], dtype: torch.dtype = BF16, packed: bool = False, window: tuple[int, int] | None = None
) -> Call:
    batch, length = (1, 5000) if packed else (1, 2048)
    q, k = torch.zeros(batch, 4, length, d, dtype=dtype), torch.zeros(batch, 2, length, d, dtype=dtype)
    cu = torch.tensor([0, 2000, length], dtype=torch.int32) if packed else None
    given: dict[str, torch.Tensor] = {"bias": torch.zeros(4, 512), "sink": torch.zeros(4), "tau": torch.zeros(4), "gate": q}
    given = {name: tensor for name, tensor in given.items() if name in terms}
    spec = AttentionSpec(
        causal=window is None,
        window=window or (None, None),
        softcap=30.0 if "softcap" in terms else None,
        **dict.fromkeys(given, True),
    )
    return Call(spec, q, k, k, **given, cu_seqlens_q=cu, cu_seqlens_k=cu)


def report_of(call: Call, module: ModuleType = forward) -> Report:
    with compiled(module) as reports:
        module.forward(call, save_u=True)
    (report,) = (report for report in reports if report.kernel == "_fwd_kernel")
    return report


def instructions(report: Report) -> list[str]:
    """PTX without line numbers, names of files and comments."""
    lines = (re.sub(r"//.*", "", line).strip() for line in report.ptx.splitlines())
    code = [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func", "$L__info"))]
    end = next((i for i, line in enumerate(code) if line.startswith(".section")), len(code))
    return code[:end]


FEW = (("bias", "tau"),)
MANY = (
    ("softcap",),
    ("bias",),
    ("sink",),
    ("gate",),
    ("tau",),
    ("bias", "sink", "softcap", "gate"),
    ("bias", "sink", "softcap", "gate", "tau"),
)


def examine(call: Call, terms: tuple[str, ...]) -> None:
    report = report_of(call)
    config = elastic_config(call) if call.spec.tau else forward_config(call)
    consumers = config.consumers
    allowed = ALLOWED_SPILLS_BIAS_AND_TAU if {"bias", "tau"} <= set(terms) else ALLOWED_SPILLS
    assert report.spills <= allowed[consumers], str(report)
    assert not report.warnings, str(report)
    assert report.shared <= SHARED_MEMORY, str(report)
    assert report.registers == (168 if consumers == 2 else 128), str(report)
    if "bias" in terms and report.sass and not call.varlen:
        # a thread meets 34 distances in 64 x 128 scores, 18 in 64 x 64; blocks at several places in the code of each warpgroup:
        # the first and the others, with tau the sweep for lse as well, where those without a mask may have a loop of their own
        loads = sum(n for name, n in report.opcodes.items() if name.startswith("LDG") and "CONSTANT" in name)
        kept = config.keep_first_max and call.spec.left is None and call.spec.softcap is None
        places = 2 + (0 if call.tau is None else 1 + kept)
        assert loads == (config.block_n // 8 + 1) * 2 * places * consumers, f"{report}: {loads} loads of the table"


@pytest.mark.parametrize("terms", FEW, ids="+".join)
@pytest.mark.parametrize("d", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_terms(d: int, terms: tuple[str, ...]) -> None:
    examine(call_of(d, terms), terms)


@pytest.mark.slow
@pytest.mark.parametrize("terms", MANY, ids="+".join)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_more_terms(d: int, terms: tuple[str, ...]) -> None:
    examine(call_of(d, terms), terms)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_everything_packed_with_a_window(d: int, dtype: torch.dtype) -> None:
    terms = ("bias", "sink", "softcap", "gate", "tau")
    examine(call_of(d, terms, dtype, packed=True, window=(100, 20)), terms)


# --- no trace ----------------------------------------------------------------------------------------------------------------

TESTS_OF_TERMS = re.compile(r"if p\.V\.(BIAS|SINK|GATE|SOFTCAP)( and not p\.V\.(SHARE_QO|MASKED))?:")


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_a_plain_kernel_holds_no_trace_of_terms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, d: int) -> None:
    """The same instructions as from a source whose branches for terms have been cut out, and no argument for a term."""
    call = call_of(d, ())
    report = report_of(call)

    def cut(module: ModuleType, tests: int) -> ModuleType:
        source = Path(module.__file__ or "").read_text()
        assert len(TESTS_OF_TERMS.findall(source)) == tests
        return module_of(tmp_path / f"{module.__name__.split('.')[-1]}_without.py", TESTS_OF_TERMS.sub("if False:", source))

    kernel_without = module_of(tmp_path / "kernel_without.py", Path(kernel.__file__).read_text())
    consumer_without = cut(consumer, 1)
    for without in (cut(scores, 9), cut(steps, 3), cut(tiles, 1)):
        for name in vars(without).keys() & vars(consumer_without).keys():
            if getattr(getattr(without, name), "__module__", "") == without.__name__:
                monkeypatch.setattr(consumer_without, name, getattr(without, name))
    assert consumer_without.with_bias is not scores.with_bias
    monkeypatch.setattr(kernel_without, "plain_consumer", consumer_without.plain_consumer)
    monkeypatch.setattr(forward, "_fwd_kernel", kernel_without._fwd_kernel)
    without_terms = report_of(call)
    monkeypatch.undo()
    assert instructions(report) == instructions(without_terms)
    parameters = re.findall(r"\.param [^,)]*_fwd_kernel_param_\d+", report.ptx)
    with_bias = re.findall(r"\.param [^,)]*_fwd_kernel_param_\d+", report_of(call_of(d, ("bias",))).ptx)
    assert len(with_bias) == len(parameters) + 3
