"""Memory that nobody wrote: it is the output, it was added to, or it fed a formula. Three defects, three names."""

from __future__ import annotations

import pytest
import torch

from backlight.doctor import Subject, diagnose
from backlight.doctor.defects import broken
from backlight.doctor.steps import probes
from backlight.spec import AttentionSpec

CAUSAL = AttentionSpec(causal=True)


class AddedOnto(broken.Kernel):
    """dq is added, tile by tile, onto an fp32 buffer that nobody cleared, and scaled when it is stored."""

    def backward(self, call, dy, dlse):
        out = super().backward(call, dy, dlse)
        total = torch.empty(out["dq"].shape, dtype=torch.float32)
        total += out["dq"].float() / call.scale
        return out | {"dq": (total * call.scale).to(call.q.dtype)}


class DeltaBeyondTheEnd(broken.Kernel):
    """delta of the last, partial tile is loaded from scratch that was stored up to the last whole tile."""

    def backward(self, call, dy, dlse):
        out = super().backward(call, dy, dlse)
        scratch = torch.empty(call.q.shape[2], dtype=torch.float32)
        full = call.q.shape[2] // 64 * 64
        scratch[:full] = 0
        dq = out["dq"].float() - scratch[:, None] * call.k.float().mean(dim=2, keepdim=True)
        return out | {"dq": dq.to(call.q.dtype)}


class TimesZero(broken.Kernel):
    """What lies behind the last key is multiplied by 0: harmless until it is NaN."""

    def backward(self, call, dy, dlse):
        out = super().backward(call, dy, dlse)
        behind = torch.empty(1, dtype=torch.float32)
        return out | {"dv": (out["dv"].float() + 0 * behind).to(call.v.dtype)}


NAMES = {
    broken.StaleRows: "stale-rows",
    AddedOnto: "sum-not-cleared",
    DeltaBeyondTheEnd: "scratch-not-written",
    TimesZero: "scratch-not-written",
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("maker", NAMES)
def test_what_fresh_memory_does_has_a_name(maker, dtype):
    subject = Subject(broken.attention_of(maker()), layout="BHSD")
    report = diagnose(subject, CAUSAL, shape=(1, 2, 72, 16), dtype=dtype)
    assert report.findings[0].id == NAMES[maker]
    assert report.verdict == "defect"
    assert report.findings[0].evidence[-1].endswith("everything is right"), [f.id for f in report.findings]


# --- forbidden positions ------------------------------------------------------------------------------------------------------


class SmallWeight(broken.Kernel):
    """Keys of the first tile get a weight of 1e-5 in rows that left them behind: invisible unless v is large there."""

    def forward(self, call):
        out = super().forward(call)
        y = out["y"].clone()
        y[:, :, 96:] += 1e-5 * call.v[:, :, :32].sum(dim=2, keepdim=True).to(y.dtype)
        return out | {"y": y}


def test_hidden_positions_are_tried_at_both_edges_and_by_tile():
    spec = AttentionSpec(causal=True, window=(40, 0))
    names = [name for name, _, _ in probes.hidden_places(spec.allowed(136, 136, torch.device("cpu")))]
    assert names == ["behind the right edge", "before the left edge", "key tile", "key tile", "key tile"]
    assert not probes.hidden_places(torch.ones(8, 8, dtype=torch.bool))


def test_a_leak_before_the_left_edge_is_named():
    subject = Subject(broken.attention_of(SmallWeight()), layout="BHSD")
    spec = AttentionSpec(causal=True, window=(40, 0))
    settings = {"shape": (1, 2, 136, 16), "dtype": torch.bfloat16}
    assert diagnose(subject, spec, **settings).healthy
    report = diagnose(subject, spec, level="full", **settings)
    assert report.findings[0].id == "hidden-reached"
    assert "before the left edge" in report.headline
