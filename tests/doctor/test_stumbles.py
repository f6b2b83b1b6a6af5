"""What users stumbled on: a lazy attribute, intermediates without rows, fp32-only kernels, checks that fit every finding."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import backlight
from backlight.doctor import Subject, diagnose
from backlight.doctor.steps import verdict
from backlight.doctor.subject.trouble import CouldNotRun
from backlight.problems import inputs
from backlight.spec import AttentionSpec

SHAPE = (2, 2, 24, 8)
SETTINGS = {"shape": SHAPE, "dtype": torch.float32}
CAUSAL = AttentionSpec(causal=True)


def test_the_doctor_is_an_attribute_and_is_not_loaded_before_it_is_asked_for():
    code = (
        "import sys, backlight\n"
        "print('backlight.doctor' in sys.modules, backlight.doctor.diagnose.__name__, 'doctor' in dir(backlight))"
    )
    source = str(Path(backlight.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source}, check=True)
    assert done.stdout.split() == ["False", "diagnose", "True"]


# --- intermediates ----------------------------------------------------------------------------------------------------------


def scores(q, k):
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)


def forward(q, k, v):
    s = scores(q, k)
    return {"o": s.softmax(-1) @ v, "lse": s.logsumexp(-1), "s": s, "p": s.softmax(-1)}


def backward_with(change=lambda name, x: x):
    """A raw backward that shows what it computed; `change` spoils one of its quantities."""

    def backward(do, q, k, v, o, lse):
        p = change("p", (scores(q, k) - lse[..., None]).exp())
        dp = do @ v.mT
        delta = change("delta", (do * o).sum(-1))
        ds = change("ds", p * (dp - delta[..., None]))
        scale = q.shape[-1] ** -0.5
        return {"dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": p.mT @ do, "p": p, "dp": dp, "delta": delta, "ds": ds}

    return backward


def rows_of(backward):
    report = diagnose(Subject(forward, backward, layout="BHSD"), CAUSAL, **SETTINGS)
    return report, {row.name: row for row in report.stages}


def test_intermediates_of_a_pair_are_rows_in_order():
    report, rows = rows_of(backward_with())
    assert report.verdict == "healthy"
    assert list(rows) == ["s", "p", "lse", "o", "p (bwd)", "delta", "dp", "ds", "dq", "dk", "dv"]
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["ds"].global_error < 1e-5


@pytest.mark.parametrize(
    ("spoiled", "change", "inherited"),
    [
        ("p (bwd)", lambda name, x: x.roll(1, -1) if name == "p" else x, ["ds", "dq", "dk", "dv"]),
        ("delta", lambda name, x: 0 * x if name == "delta" else x, ["ds", "dq", "dk"]),
        ("ds", lambda name, x: x.roll(1, 2) if name == "ds" else x, ["dq", "dk"]),
    ],
)
def test_the_first_wrong_intermediate_is_the_culprit_and_what_follows_inherits(spoiled, change, inherited):
    report, rows = rows_of(backward_with(change))
    assert report.verdict == "defect"
    assert rows[spoiled].status == "culprit"
    assert [rows[name].status for name in inherited] == ["inherited"] * len(inherited)
    assert rows["p"].status == "ok"


def test_another_convention_of_delta_is_no_defect():
    right = backward_with()

    def backward(do, q, k, v, o, lse):
        found = right(do, q, k, v, o, lse)
        return found | {"delta": -found["delta"]}

    report, rows = rows_of(backward)
    assert report.verdict == "healthy"
    assert rows["delta"].note == "not the oracle's, and ds is right: another convention"


# --- sentences --------------------------------------------------------------------------------------------------------------


class InWide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, do):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v) @ torch.eye(q.shape[-1])
        return torch.autograd.grad(o, (q, k, v), do)


def test_a_kernel_for_fp32_alone_is_told_so_with_the_direction_that_failed():
    report = diagnose(lambda q, k, v: InWide.apply(q, k, v), AttentionSpec(), shape=SHAPE, dtype=torch.float16)
    assert report.exit_code == 3
    assert report.headline.startswith("in the backward: ")
    assert report.headline.endswith("; in fp32 it runs: try --dtype fp32")
    assert "test_stumbles.py:" in report.headline
    forward_fails = diagnose(lambda q, k, v: q @ torch.eye(8), AttentionSpec(), shape=SHAPE)
    assert not forward_fails.headline.startswith("in the backward")
    assert forward_fails.headline.endswith("try --dtype fp32")


def test_a_kernel_that_fails_in_every_dtype_gets_no_such_advice():
    report = diagnose(lambda q, k, v: {}["o"], AttentionSpec(), shape=SHAPE)
    assert "fp32" not in report.headline


@pytest.mark.parametrize("returned", [1.0, [1.0], "dq"])
def test_a_gradient_that_is_no_tensor_is_exit_3(returned):
    report = diagnose(
        Subject(forward, lambda do, q, k, v: (returned, do, do), layout="BHSD"), CAUSAL, shape=SHAPE, dtype=torch.float32
    )
    assert report.exit_code == 3
    assert f"the backward returned a {type(returned).__name__} for dq; expected a tensor" in report.headline


def test_an_exception_in_a_raw_backward_has_its_line():
    subject = Subject(forward, lambda do, q, k, v: {}["dq"], layout="BHSD")
    problem = inputs.make(CAUSAL, SHAPE, dtype=torch.float32)
    with pytest.raises(CouldNotRun, match=r"in the backward: KeyError: 'dq' \(.*test_stumbles\.py:\d+: "):
        subject.run(problem.call, problem.dy)


# --- next checks ------------------------------------------------------------------------------------------------------------


def test_the_check_of_a_wrong_constant_has_the_constant():
    def kernel(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, Times.apply(k), v)

    report = diagnose(kernel, AttentionSpec(), **SETTINGS)
    assert report.findings[0].id == "scale-dk"
    assert report.findings[0].next_check.startswith("Divide dk by 1.37")


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.37 * gradient


def test_every_pattern_of_the_identities_has_a_check_of_its_own():
    assert len(set(verdict.CHECKS.values())) == len(verdict.CHECKS) == 8
    assert not {verdict.HALVE, *verdict.FORWARD_CHECKS.values()} & set(verdict.CHECKS.values())


def test_what_the_catalogue_does_not_know_gets_the_check_of_its_pattern():
    """dq of every second row belongs to its neighbour: I1 fails and the others hold."""

    def backward(do, q, k, v, o, lse):
        found = backward_with()(do, q, k, v, o, lse)
        dq = found["dq"].clone()
        dq[:, :, 1::2] = dq[:, :, 1::2].flip(-1)
        return {"dq": dq, "dk": found["dk"], "dv": found["dv"]}

    report = diagnose(Subject(forward, backward, layout="BHSD"), CAUSAL, **SETTINGS)
    assert report.findings[0].id == "open"
    assert report.findings[0].next_check == verdict.CHECKS[(False, True, True)]
