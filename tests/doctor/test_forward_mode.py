"""Subjects with a jvp: how the doctor finds it, what it says of it, and that I14 tells forward mode from the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from injection import ours
from sweep import complaint
from torch import Tensor

import backlight
from backlight import doctor
from backlight.doctor.defects import broken
from backlight.doctor.defects.mutants import Mutant
from backlight.doctor.report import json, terminal
from backlight.doctor.report.html import html
from backlight.doctor.report.model import FORWARD_MODE
from backlight.doctor.steps.duality import duality
from backlight.doctor.subject import names
from backlight.doctor.subject.subject import Subject
from backlight.problems import inputs
from backlight.problems.along import Along, draw
from backlight.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)
EVERYTHING = AttentionSpec(causal=True, bias=True, sink=True, gate=True, tau=True)
WITH_PAIRS = EVERYTHING.replace(tau=False, pair_bias=True)
WITH_ENTMAX = EVERYTHING.replace(tau=False, entmax=True)
SMALL = (1, 2, 40, 16)
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention as people write it, in the dtype of its inputs: torch knows its tangents."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~AttentionSpec(causal=True).allowed(q.shape[2], k.shape[2], q.device), -torch.inf)
    return s.softmax(dim=-1) @ v


def plain_jvp(change: Callable[[Tensor], Tensor], q, k, v, tq, tk, tv, causal=False) -> tuple[Tensor, Tensor]:
    o, to = torch.func.jvp(partial(plain, causal=causal), (q, k, v), (tq, tk, tv))
    return o, change(to)


def with_jvp(change: Callable[[Tensor], Tensor]) -> Subject:
    def jvp(q, k, v, tq, tk, tv, causal=False):
        return plain_jvp(change, q, k, v, tq, tk, tv, causal)

    return Subject(plain, jvp=jvp, layout="BHSD")


def tangents_of(report: doctor.Report) -> list[str]:
    return [row.name for row in report.stages if row.name in FORWARD_MODE]


# --- where a jvp comes from --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
def test_dual_numbers_go_through_a_differentiable_call(dtype: torch.dtype) -> None:
    report = doctor.diagnose(plain, CAUSAL, shape=SMALL, dtype=dtype)
    assert not complaint(report)
    assert tangents_of(report) == ["to"]
    assert report.recipe["tangents"] == "dual numbers through the call"


@pytest.mark.parametrize("name", ["tiled", "sdpa:math"])
def test_kernels_by_name(name: str) -> None:
    subject = Subject(names.named(name), layout="BHSD") if name in names.NAMED else Subject(ours, layout="BHSD")
    report = doctor.diagnose(subject, CAUSAL, shape=SMALL, kv_heads=1)
    assert not complaint(report)
    assert tangents_of(report) == (["to"] if name in names.NAMED else ["tlse", "to"])


@pytest.mark.parametrize("spec", [EVERYTHING, WITH_PAIRS, WITH_ENTMAX], ids=["tau", "pair bias", "entmax"])
def test_a_jvp_of_its_own_is_called_with_every_tangent_it_takes(spec: AttentionSpec) -> None:
    given: dict[str, Any] = {}

    def jvp(*tensors: Tensor, **options: Any) -> Any:
        given.update(options)
        return backlight.attention_jvp(*tensors, return_lse=True, backend="tiled", **options)

    report = doctor.diagnose((ours, None, jvp), spec, shape=SMALL)
    assert not complaint(report)
    assert tangents_of(report) == ["o (jvp)", "tlse", "to"]
    assert {f"t{name}" for name in spec.terms} <= given.keys()
    assert "test_forward_mode.py" in report.recipe["tangents"]


def test_packed_sequences() -> None:
    def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=False):
        return backlight.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, return_lse=True, backend="tiled")

    def jvp(q, k, v, tq, tk, tv, cu_seqlens_q, cu_seqlens_k, causal=False):
        sequences = (cu_seqlens_q, cu_seqlens_k)
        return backlight.attention_varlen_jvp(q, k, v, tq, tk, tv, *sequences, causal=causal, return_lse=True, backend="tiled")

    borders = torch.tensor([0, 30, 31, 31, 72], dtype=torch.int32)
    for subject in (Subject(packed, layout="packed"), Subject(packed, jvp=jvp, layout="packed")):
        report = doctor.diagnose(subject, CAUSAL, shape=SMALL, cu_seqlens=borders)
        assert not complaint(report)
        assert {"tlse", "to"} <= set(tangents_of(report))


def test_other_words_for_tangents_and_results_by_name() -> None:
    def jvp(query, key, value, q_tangent, k_tangent, v_tangent, is_causal=False):
        y, ty = plain_jvp(lambda to: to, query, key, value, q_tangent, k_tangent, v_tangent, is_causal)
        return {"y": y, "ty": ty}

    report = doctor.diagnose(Subject(plain, jvp=jvp), CAUSAL, shape=SMALL)
    assert not complaint(report)
    assert tangents_of(report) == ["o (jvp)", "to"]


def test_a_function_of_that_name_beside_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "kernel_with_jvp.py"
    file.write_text(
        "import backlight\n\n\n"
        "def fn(q, k, v, causal=False):\n    return backlight.attention(q, k, v, causal=causal, backend='tiled')\n\n\n"
        "def fn_jvp(q, k, v, tq, tk, tv, causal=False):\n"
        "    y, ty = backlight.attention_jvp(q, k, v, tq, tk, tv, causal=causal, backend='tiled')\n    return y, -ty\n"
    )
    subject = names.user_subject(f"{file}:fn")
    report = doctor.diagnose(subject, CAUSAL, shape=SMALL)
    assert report.verdict == "defect"
    assert [row.name for row in report.stages if row.status == "culprit"] == ["to"]
    assert next(row for row in report.stages if row.name == "to").gain == pytest.approx(-1, abs=0.01)


def test_without_a_jvp_nothing_is_said_of_it() -> None:
    def raw_backward(do, q, k, v, o, lse=None, causal=False):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(plain(q, k, v, causal=causal), (q, k, v), do)

    for subject in (broken.healthy(), (plain, raw_backward)):
        report = doctor.diagnose(subject, CAUSAL, shape=SMALL)
        assert report.healthy
        assert not tangents_of(report)
        assert "tangent" not in terminal.text(report)


def test_a_jvp_that_returns_something_else() -> None:
    report = doctor.diagnose(Subject(plain, jvp=lambda q, k, v, tq, tk, tv: tq), CAUSAL, shape=SMALL)
    assert report.verdict == "could-not-run"
    assert report.headline == "the jvp returned a Tensor; expected (o, to), ((o, lse), (to, tlse)) or a dict with o and to"


# --- what is wrong, and on which side ----------------------------------------------------------------------------------------


def test_forward_mode_is_wrong_and_the_backward_is_not() -> None:
    report = doctor.diagnose(broken.subject("tangent-values-missing"), CAUSAL, shape=SMALL)
    (finding,) = report.findings
    assert finding.id == "tangent-values-missing"
    assert any(line.endswith("the gradients agree with the oracle, so forward mode is wrong") for line in finding.evidence)
    assert {row.name: row.status for row in report.stages} == dict.fromkeys(("lse", "o", "dq", "dk", "dv", "tlse"), "ok") | {
        "to": "culprit"
    }


def test_the_backward_is_wrong_and_forward_mode_is_not() -> None:
    def doubled(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        copy = k.clone()
        if copy.requires_grad:
            copy.register_hook(lambda dk: 2 * dk)
        return plain(q, copy, v, causal)

    report = doctor.diagnose(doubled, CAUSAL, shape=SMALL)
    assert report.findings[0].stage == "dk"
    assert any(
        line.endswith("the tangents agree with the oracle, so the backward is wrong") for line in report.findings[0].evidence
    )
    assert next(row for row in report.stages if row.name == "to").status == "ok"


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_entmax_by_dual_numbers(dtype: torch.dtype) -> None:
    report = doctor.diagnose(ours, AttentionSpec(causal=True, softcap=3.0, sink=True, entmax=True), shape=SMALL, dtype=dtype)
    assert not complaint(report)
    assert tangents_of(report) == ["tlse", "to"]


def test_a_tangent_of_alpha_that_is_ignored() -> None:
    def jvp(*tensors: Tensor, tentmax: Tensor, **options: Any) -> Any:
        return backlight.attention_jvp(*tensors, return_lse=True, backend="tiled", **options)

    report = doctor.diagnose((ours, None, jvp), AttentionSpec(causal=True, entmax=True), shape=SMALL)
    assert report.finding_ids == ("tangent-input",)
    assert report.findings[0].title == "forward mode: the tangent of entmax is ignored"


def test_a_tangent_that_is_centred_as_a_softmax_is() -> None:
    """The mean of ts by P, where entmax has it by the slopes."""
    stages = {"tlse": lambda p, tr: (p * tr).sum(dim=-1)}
    kernel = broken.Kernel(lambda call: Mutant(tangent=stages))
    subject = Subject(broken.attention_of(kernel, broken._WithTangent), layout="BHSD")
    report = doctor.diagnose(subject, AttentionSpec(causal=True, entmax=True), shape=SMALL)
    assert {row.name: row.status for row in report.stages if row.status != "ok"} == {"tlse": "culprit", "to": "suspect"}


def test_both_are_wrong() -> None:
    def doubled(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        copy = k.clone()
        if copy.requires_grad:
            copy.register_hook(lambda dk: 2 * dk)
        return plain(q, copy, v, causal)

    report = doctor.diagnose(Subject(doubled, jvp=with_jvp(lambda to: -to).jvp), CAUSAL, shape=SMALL)
    assert {finding.stage for finding in report.findings} == {"dk", "to"}
    assert {row.name for row in report.stages if row.status == "culprit"} == {"dk", "to"}
    assert any("neither side agrees" in line for finding in report.findings for line in finding.evidence)


def test_tangents_of_a_wrong_forward_are_handed_down() -> None:
    """Forward, backward and forward mode without the mask: one cause, and the two derivatives agree."""
    report = doctor.diagnose(lambda q, k, v, causal=False: plain(q, k, v), CAUSAL, shape=SMALL)
    assert report.finding_ids == ("call-causal-lost",)
    assert next(row for row in report.stages if row.name == "to").status == "inherited"
    assert any("forward mode and backward agree with each other" in line for line in report.findings[0].evidence)


def test_the_place_of_a_fault_nobody_knows() -> None:
    def change(to: Tensor) -> Tensor:
        to = to.clone()
        to[:, 1, 8:16] *= 3
        return to

    report = doctor.diagnose(with_jvp(change), CAUSAL, shape=SMALL)
    (finding,) = report.findings
    assert (finding.id, finding.stage) == ("open", "to")
    assert finding.where is not None
    assert finding.where.text == "head 1, rows 8-15"


def test_values_that_are_not_finite() -> None:
    def change(to: Tensor) -> Tensor:
        to = to.clone()
        to[0, 1, 7, 3] = float("nan")
        return to

    report = doctor.diagnose(with_jvp(change), CAUSAL, shape=SMALL)
    assert report.headline == "1 value of to is NaN or infinite, first at b0 h1 row 7"


def test_the_output_beside_the_tangent() -> None:
    def jvp(q, k, v, tq, tk, tv, causal=False):
        o, to = plain_jvp(lambda to: to, q, k, v, tq, tk, tv, causal)
        return 2 * o, to

    report = doctor.diagnose(Subject(plain, jvp=jvp), CAUSAL, shape=SMALL)
    assert [row.name for row in report.stages if row.status == "culprit"] == ["o (jvp)"]
    assert report.verdict == "defect"


def test_lse_in_another_base_moves_in_that_base() -> None:
    def base_2(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
        o, lse = ours(q, k, v, causal=causal)
        return o, lse / torch.log(torch.tensor(2.0))

    report = doctor.diagnose(Subject(base_2, layout="BHSD"), CAUSAL, shape=SMALL)
    assert not complaint(report)
    assert tangents_of(report) == ["tlse", "to"]


def test_every_face_of_a_report_shows_it() -> None:
    report = doctor.diagnose(broken.subject("tangent-input"), CAUSAL, shape=SMALL)
    page, data = html(report), json.dumps(report)
    assert "<title>tlse: culprit" in page
    assert "<title>to: inherited" in page
    assert '"name": "tlse"' in data
    assert "the tangent of q is ignored" in terminal.text(report)


# --- the identity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
@pytest.mark.parametrize("spec", [CAUSAL, EVERYTHING, WITH_PAIRS], ids=["causal", "tau", "pair bias"])
def test_the_identity_holds_for_the_oracle_and_for_nothing_else(spec: AttentionSpec, dtype: torch.dtype) -> None:
    problem = inputs.make(spec, (2, 4, 40, 16), kv_heads=2, dtype=dtype)
    along = Along.direction(problem, draw(problem.call, 0))
    right = {f"d{name}": along.truth[f"d{name}"].to(t.dtype) for name, t in along.tangents.items()}
    right["to"] = along.truth.ty.to(dtype)
    law = duality(along, right)
    assert law is not None
    assert law.holds
    for name in right:
        broken_law = duality(along, right | {name: -right[name]})
        assert broken_law is not None
        assert not broken_law.holds, name
