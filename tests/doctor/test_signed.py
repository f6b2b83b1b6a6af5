"""Errors with a sign: what is cut leans towards zero, what is rounded does not."""

from __future__ import annotations

import pytest
import torch

from backlight.doctor import Subject, diagnose
from backlight.spec import AttentionSpec


def cut(x):
    """The upper 16 bits of fp32: bf16 without rounding."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


def rounded(x):
    return x.bfloat16().float()


def kernel(what):
    act = {name: cut if name == what else rounded for name in ("p", "o", "ds")}

    def forward(q, k, v):
        s = q.float() @ k.float().mT * q.shape[-1] ** -0.5
        lse = s.logsumexp(dim=-1)
        return act["o"](act["p"](torch.exp(s - lse[..., None])) @ v.float()).bfloat16(), lse

    def backward(do, q, k, v, o, lse):
        scale, (do, q, k, v, o) = q.shape[-1] ** -0.5, (x.float() for x in (do, q, k, v, o))
        p = torch.exp(scale * q @ k.mT - lse[..., None])
        ds = act["ds"](p * (do @ v.mT - (do * o).sum(-1, keepdim=True)))
        found = {"dq": scale * ds @ k, "dk": scale * ds.mT @ q, "dv": act["p"](p).mT @ do}
        return {name: x.bfloat16() for name, x in found.items()}

    return Subject(forward, backward, layout="BHSD")


@pytest.mark.parametrize("what", ["p", "o", "ds"])
def test_what_is_cut_is_named(what):
    report = diagnose(kernel(what), AttentionSpec(), shape=(1, 4, 136, 64))
    assert (report.verdict, report.findings[0].id) == ("precision", f"cut-{what}"), report.headline


@pytest.mark.parametrize("seed", range(3))
def test_what_is_rounded_does_not_lean(seed):
    assert diagnose(kernel("nothing"), AttentionSpec(), shape=(1, 4, 136, 64), seed=seed).healthy
