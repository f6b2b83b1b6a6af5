"""Kernels that compute in 8 bits: recognised, judged by what 8 bits can do, and probed for what their scales do."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from edits_e4m3 import in_e4m3
from torch import Tensor
from typer.testing import CliRunner

import backlight
from backlight.cli import app
from backlight.doctor import Subject, diagnose
from backlight.doctor.defects import broken, catalogue
from backlight.doctor.defects.e4m3 import E4M3, Manner
from backlight.doctor.defects.mutants import run
from backlight.doctor.report.model import Report
from backlight.doctor.report.schema import schema
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.eight_bits.format import WIDER, format_of_v
from backlight.doctor.steps.eight_bits.scales import scale_group, static_scales
from backlight.doctor.steps.eight_bits.underflow import LIMIT, underflow
from backlight.problems import inputs
from backlight.spec import AttentionSpec

PLAIN, CAUSAL = AttentionSpec(), AttentionSpec(causal=True)
SHAPE = (2, 2, 72, 64)
WHOLE = (0, 1, 2, 3)
SHARED = {"tensor": WHOLE, "entry": (1, 2, 3), "head": (2, 3), "row": (3,)}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Rounded(torch.autograd.Function):
    """x in an 8-bit float, one scale for what lies along `dims`; gradients pass."""

    @staticmethod
    def forward(ctx, x, dims, fixed, dtype):
        top = torch.finfo(dtype).max
        scale = x.float().abs().amax(dims, keepdim=True).clamp(min=1e-30) / top if fixed is None else torch.tensor(fixed)
        return (x.float() / scale).clamp(-top, top).to(dtype).float() * scale

    @staticmethod
    def backward(ctx, dx):
        return dx, None, None, None


class Flushed(torch.autograd.Function):
    """The same of the gradient that comes back, with a scale that is `larger` than it should be."""

    @staticmethod
    def forward(ctx, s, larger):
        ctx.larger = larger
        return s.clone()

    @staticmethod
    def backward(ctx, ds):
        scale = ds.abs().amax((2, 3), keepdim=True).clamp(min=1e-30) / 448 * ctx.larger
        return (ds / scale).to(torch.float8_e4m3fn).float() * scale, None


def plain_kernel(dims=(2, 3), fixed=None, dtype=torch.float8_e4m3fn, larger=0.0):
    """Another design than ours: scales that are no powers of two, no turn, no mean taken off, a backward in fp32."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        q8, k8 = (Rounded.apply(x, dims, fixed, dtype) for x in (q, k))
        s = q8 @ k8.mT * q.shape[-1] ** -0.5
        s = Flushed.apply(s, larger) if larger else s
        if causal:
            s = s.masked_fill(~CAUSAL.allowed(*s.shape[-2:], s.device), -torch.inf)
        p = torch.exp(s - s.amax(-1, keepdim=True)) * 256
        p = Rounded.apply(p, (3,), 1.0, torch.float8_e4m3fn)
        return (p / p.sum(-1, keepdim=True) @ Rounded.apply(v, (2, 3), None, dtype)).to(q.dtype)

    return attention


def bench_of(kernel, spec=PLAIN, **settings) -> Bench:
    problem = inputs.problem_of(spec, **{"shape": SHAPE} | settings).replace(arithmetic=E4M3)
    subject = Subject(kernel, layout="BHSD")
    return Bench(subject, problem, subject.run(problem.call, problem.dy))


# --- the yardstick -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        (CAUSAL, {"kv_heads": 1}),
        (PLAIN, {"recipe": "outliers", "shape": (1, 2, 200, 64)}),
        (AttentionSpec(bias=True, sink=True, causal=True), {}),
        (AttentionSpec(softcap=5.0), {}),
    ],
    ids=["causal gqa", "outliers", "bias sink", "softcap"],
)
def test_the_healthy_way_has_the_numbers_of_the_emulation(spec, settings) -> None:
    """Written anew on the oracle, it differs from the emulation by the rounding of results alone."""
    problem = inputs.problem_of(spec, **{"shape": SHAPE} | settings)
    found = run(Manner().mutant(), problem.call, problem.dy, dtype=torch.float32, storage=problem.call.q.dtype)
    seen = Subject(in_e4m3, layout="BHSD").run(problem.call, problem.dy)
    for name in ("o", "dq", "dk", "dv"):
        key = "y" if name == "o" else name
        apart, error = (float((seen[name].double() - other).norm()) for other in (found[key], problem.truth[key]))
        assert apart < 0.2 * error, name
    assert float((found["lse"] - seen["lse"]).abs().max()) < 1e-2


# --- no alarm ----------------------------------------------------------------------------------------------------------------

HEALTHY = {
    "plain": (PLAIN, {}),
    "causal gqa": (CAUSAL, {"kv_heads": 1}),
    "window": (AttentionSpec(window=(20, 5)), {}),
    "bias sink": (AttentionSpec(bias=True, sink=True, causal=True), {}),
    "softcap": (AttentionSpec(softcap=5.0), {}),
    "longer keys": (CAUSAL, {"sk": 101}),
    "fewer keys": (CAUSAL, {"sk": 40}),
    "pair bias": (AttentionSpec(pair_bias=True), {}),
    "mask": (AttentionSpec(rows=True), {}),
    "fp32": (PLAIN, {"dtype": torch.float32}),
    **{recipe: (PLAIN, {"recipe": recipe, "seed": 3}) for recipe in inputs.RECIPES if recipe != "gaussian"},
}
# more variants and all at level full
SAMPLE = ("causal gqa", "bias sink", "fewer keys", "dominant", "outliers")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.slow) for n in HEALTHY])
def test_the_emulation_is_healthy(name: str) -> None:
    spec, settings = HEALTHY[name]
    report = diagnose(Subject(in_e4m3, layout="BHSD"), spec, precision="fp8", **{"shape": SHAPE} | settings)
    assert (report.verdict, report.finding_ids) == ("healthy", ())


@pytest.mark.parametrize(
    "name", ["fewer keys", *(pytest.param(n, marks=pytest.mark.slow) for n in HEALTHY if n != "fewer keys")]
)
def test_the_emulation_is_healthy_at_full(name: str) -> None:
    spec, settings = HEALTHY[name]
    report = diagnose(Subject(in_e4m3, layout="BHSD"), spec, precision="fp8", level="full", **{"shape": SHAPE} | settings)
    assert (report.verdict, report.finding_ids) == ("healthy", ())


def test_keys_rounded_otherwise_are_not_hidden_keys_reached() -> None:
    """Another hidden tile moves the scale and mean of all keys: dv of visible ones moved by 8.6 eps, beyond the limit of 8."""
    report = diagnose(Subject(in_e4m3, layout="BHSD"), CAUSAL, shape=(2, 4, 200, 64), precision="fp8", level="full")
    assert (report.verdict, report.finding_ids) == ("healthy", ())


@pytest.mark.parametrize("spec", [PLAIN, CAUSAL], ids=["plain", "causal"])
def test_another_design_is_healthy(spec) -> None:
    report = diagnose(plain_kernel(), spec, shape=SHAPE, precision="fp8")
    assert (report.verdict, report.finding_ids) == ("healthy", ())


# --- recognised --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [in_e4m3, plain_kernel()], ids=["ours", "another design"])
def test_8_bits_are_recognised_and_the_option_is_named(kernel) -> None:
    report = diagnose(kernel, CAUSAL, shape=SHAPE)
    assert report.verdict == "precision"
    assert report.finding_ids == ("eight-bits",)
    assert "e4m3" in report.headline
    assert "--precision fp8" in report.findings[0].next_check
    assert all(row.status in ("ok", "precision") for row in report.stages)


def test_a_defect_of_a_recognised_kernel_comes_first() -> None:
    report = diagnose(broken.subject("e4m3-v-order"), PLAIN, shape=SHAPE)
    assert report.finding_ids[:2] == ("e4m3-v-order", "eight-bits")
    assert report.verdict == "defect"


@pytest.mark.parametrize("name", ["call-scale", "precision-narrow", "call-causal-lost"])
def test_wrong_kernels_of_more_bits_are_not_taken_for_8(name: str) -> None:
    demo = catalogue.demo_arguments(name)
    report = diagnose(broken.subject(name), **demo | {"shape": SHAPE})
    assert report.finding_ids[0] == name
    assert "eight-bits" not in report.finding_ids


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")])
def test_format_of_v(dtype, wanted) -> None:
    assert format_of_v(bench_of(plain_kernel(dtype=dtype))) == wanted
    assert format_of_v(bench_of(plain_kernel(dtype=dtype), CAUSAL, sk=40)) == wanted


def test_format_of_16_bits() -> None:
    assert format_of_v(bench_of(broken.healthy())) == WIDER
    assert format_of_v(bench_of(in_e4m3)) == "e4m3"


def test_e5m2_is_coarser_than_the_yardstick() -> None:
    report = diagnose(plain_kernel(dtype=torch.float8_e5m2), PLAIN, shape=SHAPE, precision="fp8")
    assert report.verdict == "precision"
    assert report.finding_ids == ("e4m3-coarse",)


# --- scales ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", SHARED)
def test_scale_group(group: str) -> None:
    assert scale_group(bench_of(plain_kernel(SHARED[group]))).data["group"] == group


def test_scale_group_of_blocks() -> None:
    found = scale_group(bench_of(in_e4m3, CAUSAL))
    assert found.data["group"] == "block"
    assert "128 to 255" in found.detail


def test_static_scales() -> None:
    assert static_scales(bench_of(plain_kernel(fixed=1.0))).passed is False
    assert static_scales(bench_of(in_e4m3)).detail.endswith("every bit of o")
    assert static_scales(bench_of(in_e4m3, dtype=torch.float16)).passed is True
    report = diagnose(plain_kernel(fixed=1.0), PLAIN, shape=SHAPE, precision="fp8")
    assert report.finding_ids[0] == "e4m3-static-scales"


@pytest.mark.parametrize(("larger", "lost"), [(1.0, False), (4096.0, True)])
def test_underflow_of_ds(larger: float, lost: bool) -> None:
    found = underflow(bench_of(plain_kernel(larger=larger), CAUSAL))
    assert (found.data["share"] > LIMIT) == lost
    assert found.passed is not lost


def test_underflow_is_a_loss_of_precision() -> None:
    report = diagnose(plain_kernel(larger=1024.0), PLAIN, shape=SHAPE, precision="fp8", level="full")
    assert report.finding_ids[0] == "e4m3-ds-underflow"
    assert report.verdict == "precision"


def test_another_design_is_healthy_at_full_with_notes() -> None:
    report = diagnose(plain_kernel(), PLAIN, shape=SHAPE, precision="fp8", level="full")
    assert report.verdict == "healthy"
    assert {f.severity for f in report.findings} <= {"note"}


def test_one_scale_of_another_design_is_named_by_its_group() -> None:
    report = diagnose(plain_kernel(WHOLE), PLAIN, shape=SHAPE, precision="fp8", level="full")
    assert report.verdict == "precision"
    assert report.finding_ids[0] == "e4m3-one-scale"
    assert "the whole tensor" in report.headline


# --- defects -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["e4m3-mean-lost", "e4m3-v-order", "e4m3-turned-once"])
def test_a_broken_emulation_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are slow (`test_mutation`), and all are held to their record there."""
    import shares

    report = shares.examine(name, monkeypatch)
    assert report.findings[0].id == name


def test_defects_of_other_kernels_are_named_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that never arrives, at a kernel of 8 bits."""

    def lost(q, k, v, *, causal=False):
        return in_e4m3(q, k, v)

    report = diagnose(lost, CAUSAL, shape=SHAPE, precision="fp8")
    assert report.findings[0].id == "call-causal-lost"


def test_rows_without_keys_ignore_the_gradient_of_lse() -> None:
    """The mean of the keys was added to dq of such rows: the lse of a row that sees nothing is -inf and no function of q."""
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for n in (8, 4, 4))
    _, lse = backlight.attention(q, k, v, causal=True, precision="fp8", return_lse=True)
    (dq,) = torch.autograd.grad(lse, q, torch.ones_like(lse))
    assert bool((dq[:, :, :4] == 0).all())
    assert bool((dq[:, :, 4:] != 0).any())


# --- words -------------------------------------------------------------------------------------------------------------------


def test_what_has_no_yardstick_is_refused() -> None:
    with pytest.raises(ValueError, match="no yardstick for tau"):
        diagnose(in_e4m3, AttentionSpec(tau=True), shape=SHAPE, precision="fp8")
    with pytest.raises(ValueError, match="precision must be one of fp8, or None, got 'int8'"):
        diagnose(in_e4m3, PLAIN, shape=SHAPE, precision="int8")


def doctor(*words: str):
    return CliRunner().invoke(app, ["doctor", *words, "--in-process"])


def test_names_of_ours_compute_in_8_bits(tmp_path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    written = tmp_path / "report.json"
    found = doctor("backlight", "--precision", "fp8", "--shape", "1,2,40,32", "--json", str(written))
    assert found.exit_code == 0, found.output
    told = json.loads(written.read_text())
    jsonschema.validate(told, schema())
    assert Report.from_dict(told).recipe["precision"] == "fp8"
    assert next(p for p in told["probes"] if p["name"] == "format of v")["data"]["format"] == "e4m3"


def test_the_emulation_has_a_name() -> None:
    found = doctor("emulated", "--shape", "1,2,40,32", "--format", "line")
    assert found.exit_code == 2
    assert "eight-bits" in found.output


def test_names_that_do_not_compute_in_8_bits_say_so() -> None:
    found = doctor("tiled", "--precision", "fp8", "--shape", "1,2,40,32")
    assert found.exit_code == 3
    assert "backlight, hopper, emulated compute in it, tiled does not" in " ".join(found.output.split())


def test_a_problem_keeps_what_it_is_judged_as() -> None:
    problem = inputs.problem_of(PLAIN, shape=SHAPE).replace(arithmetic=E4M3)
    assert problem.replace(dy=problem.dy * 2).arithmetic is E4M3
    assert replace(problem).unit == 0.125
    assert problem.eps == 2**-7


def test_a_kernel_that_loses_a_key_is_not_of_8_bits() -> None:
    """All columns of o came back alike, and few different ones were taken for a format: matrices were not read then."""

    def first_keys_lost(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k[:, :, 24:], v[:, :, 24:])

    report = diagnose(first_keys_lost, PLAIN, shape=(1, 2, 40, 16), dtype=torch.float32)
    assert report.verdict == "defect"
    assert "eight-bits" not in report.finding_ids
