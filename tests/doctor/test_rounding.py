"""Where a 16-bit kernel rounds is read off ties, and sums that are not fp32 off their growth (math.md: eq. 105-107)."""

from __future__ import annotations

import pytest
import torch
from injection import ours

from backlight.doctor import Subject, diagnose
from backlight.doctor.steps import rounding
from backlight.problems import inputs
from backlight.reference import oracle
from backlight.spec import AttentionSpec


def attention(finish, delta=None):
    """Plain attention in fp32 whose o is brought to 16 bits by `finish`, and whose delta may be taken in another way."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
            weights = torch.exp(s - s.amax(-1, keepdim=True))
            o = finish(weights.to(v.dtype).float() @ v.float(), weights.sum(-1, keepdim=True), q.dtype)
            ctx.save_for_backward(q, k, v, o, weights / weights.sum(-1, keepdim=True))
            return o

        @staticmethod
        def backward(ctx, do):
            q, k, v, o, p = ctx.saved_tensors
            scale = q.shape[-1] ** -0.5
            dp = do.float() @ v.float().mT
            row = (do.float() * o.float()).sum(-1, keepdim=True) if delta is None else delta(p, dp)
            ds = (p * (dp - row)).to(q.dtype).float()
            return (
                (scale * ds @ k.float()).to(q.dtype),
                (scale * ds.mT @ q.float()).to(q.dtype),
                (p.mT @ do.float()).to(q.dtype),
            )

    return lambda q, k, v: Attention.apply(q, k, v)


def once(acc, total, dtype):
    return (acc / total).to(dtype)


def twice(acc, total, dtype):
    return (acc.to(dtype).float() / total).to(dtype)


def cut(acc, total, dtype):
    mask = -65536 if dtype == torch.bfloat16 else -8192
    return ((acc / total).contiguous().view(torch.int32) & mask).view(torch.float32).to(dtype)


def measured(kernel, dtype=torch.bfloat16, causal=False):
    problem = inputs.make(AttentionSpec(causal=causal), (1, 2, 64, 64), dtype=dtype)
    ties = rounding.tie_problem(problem)
    out = Subject(kernel, layout="BHSD").run(ties.call, ties.dy)
    truth = oracle(ties.call, ties.dy, keep=("y", "delta"))
    return float((out["o"] != truth.y.to(dtype)).double().mean()), rounding.delta_bias(out["dk"], ties.call, truth.delta)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_a_healthy_kernel_rounds_o_once_and_has_the_bias_of_16_bits(dtype, causal):
    wrong, bias = measured(ours, dtype, causal)
    unit = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
    assert wrong == 0
    assert rounding.FROM_16_BITS * unit < bias < rounding.BIASED * unit


def test_what_rounding_does_on_ties():
    """The shares of the table in math.md, section 18."""
    assert measured(attention(once))[0] == 0
    assert 0.15 < measured(attention(twice))[0] < 0.35
    wrong, bias = measured(attention(cut))
    assert wrong > 0.4
    assert bias > rounding.BIASED
    exact = measured(attention(once, lambda p, dp: (p * dp).sum(-1, keepdim=True)))
    assert abs(exact[1]) < 2e-4


SETTINGS = {"shape": (1, 2, 64, 64), "level": "full"}


def test_a_second_rounding_is_a_note_and_no_finding():
    report = diagnose(attention(twice), AttentionSpec(), **SETTINGS)
    assert any("rounded more than once" in note for note in report.recipe["notes"])
    assert report.verdict == "healthy"


def test_delta_from_a_16_bit_o_is_said_and_accused_of_nothing():
    report = diagnose(attention(once), AttentionSpec(), **SETTINGS)
    ties = next(probe for probe in report.probes if probe.name == "ties")
    assert "delta taken from a 16-bit o" in ties.detail
    assert not report.findings


def test_a_sum_that_drifts_with_the_number_of_keys():
    def coarse(q, k, v):
        s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        p = torch.exp(s - s.amax(-1, keepdim=True))
        total = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
        for j in range(0, k.shape[2], 64):
            total = total + (p[..., j : j + 64] @ v[:, :, j : j + 64].float()).to(q.dtype) * 0.999
        return (total.float() / p.sum(-1, keepdim=True)).to(q.dtype)

    problem = inputs.make(AttentionSpec(), (1, 2, 64, 64))
    from backlight.doctor.steps.bench import Bench
    from backlight.doctor.steps.sheet import Sheet

    subject = Subject(coarse, layout="BHSD")
    sheet = Sheet(subject, problem, "full")
    probe = rounding._growth(sheet, Bench(subject, problem, subject.run(problem.call)))
    assert len(probe.data["lean"]) == len(rounding.LENGTHS)
    healthy = rounding._growth(sheet, Bench(Subject(ours, layout="BHSD"), problem, subject.run(problem.call)))
    assert healthy.passed
    assert abs(probe.data["lean"][-1]) > 10 * abs(healthy.data["lean"][-1])


# --- beyond the end -----------------------------------------------------------------------------------------------------------


class Overrun(torch.autograd.Function):
    """Loads a whole last tile of v, beyond its end, and multiplies what is there by weights of 0."""

    @staticmethod
    def forward(ctx, q, k, v, times):
        o, _ = ours(q, k, v)
        behind = v.as_strided((16, v.shape[3]), (v.shape[3], 1), v.storage_offset() + v.numel())
        ctx.save_for_backward(q, k, v)
        return o + times * behind.sum().to(o.dtype)

    @staticmethod
    def backward(ctx, do):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            ours(q, k, v)[0].backward(do)
        return q.grad, k.grad, v.grad, None


def overrun(times):
    def run(q, k, v):
        if v.untyped_storage().nbytes() < (v.storage_offset() + v.numel() + 16 * v.shape[3]) * v.element_size():
            return ours(q, k, v)[0]
        return Overrun.apply(q, k, v, times)

    return run


@pytest.mark.parametrize(("times", "words"), [(0.0, "so it is multiplied by 0"), (0.01, "so do finite numbers")])
def test_memory_beyond_the_end_is_not_to_be_read(times, words):
    report = diagnose(overrun(times), AttentionSpec(), shape=(1, 2, 40, 16), dtype=torch.float32, level="full")
    found = {finding.id: finding for finding in report.findings}
    assert "read-beyond-end" in found, report.headline
    assert any(words in line for line in found["read-beyond-end"].evidence)
