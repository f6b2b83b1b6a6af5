"""What of ds overflows in fp16 is told, and is no finding."""

from __future__ import annotations

import pytest
import torch
from strips import Strips

from backlight import doctor
from backlight.doctor.steps import range_of_ds
from backlight.problems import inputs
from backlight.spec import AttentionSpec


def asked(bug: str, **more) -> doctor.Report:
    kernel = Strips(bug)
    subject = doctor.Subject(kernel.forward, kernel.backward, layout="BHSD")
    given = {"shape": (1, 2, 24, 24), "dtype": torch.float16, "level": "full"} | more
    return doctor.diagnose(subject, AttentionSpec(causal=True), **given)


@pytest.mark.parametrize(("bug", "words"), [("", "after the scale"), ("narrowed before the scale", "before the scale")])
def test_where_ds_is_rounded_is_told(bug: str, words: str) -> None:
    report = asked(bug)
    assert report.verdict == "healthy", report.headline
    probe = next(each for each in report.probes if each.name == "range of ds")
    assert probe.passed
    assert words in probe.detail


def test_other_formats_are_not_asked() -> None:
    assert not any(each.name == "range of ds" for each in asked("", dtype=torch.bfloat16).probes)


def test_a_large_scale_has_no_such_inputs() -> None:
    assert range_of_ds.large(inputs.make(AttentionSpec(scale=1.0), (1, 2, 24, 16), dtype=torch.float16)) is None
