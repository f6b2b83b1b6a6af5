"""The doctor names bugs of real code structure: the Triton kernels of `flash`, broken in one line each, in the interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from flash import Flash

from backlight import doctor
from backlight.spec import AttentionSpec

pytestmark = pytest.mark.later

SHAPE, LONGER = (1, 2, 48, 16), 80
CAUSAL: dict[str, Any] = {"causal": True}
# bug -> (the name that must come first, spec, length of the keys, recipe)
BUGS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "bound": ("bound-forward", CAUSAL, LONGER, "gaussian"),
    "dq bound": ("bound-dq", CAUSAL, 48, "gaussian"),
    "dkdv bound": ("bound-dkdv", CAUSAL, 48, "gaussian"),
    "diagonal unmasked": ("diagonal-unmasked", CAUSAL, 48, "gaussian"),
    "unmasked forward": ("mask-causal-forward", CAUSAL, 48, "gaussian"),
    "unmasked backward": ("mask-causal-backward", CAUSAL, 48, "gaussian"),
    "softmax again": ("softmax-backward", CAUSAL, 48, "gaussian"),
    "local chunk": ("chunk-backward", CAUSAL, 48, "gaussian"),
    "lse tile": ("lse-shifted", CAUSAL, 48, "gaussian"),
    "lse head": ("lse-other-head", CAUSAL, 48, "gaussian"),
    "lse padded": ("lse-other-head", CAUSAL, 48, "gaussian"),
    "delta tile": ("delta-shifted", CAUSAL, 48, "gaussian"),
    "delta head": ("delta-other-head", CAUSAL, 48, "gaussian"),
    "delta padded": ("delta-other-head", CAUSAL, 48, "gaussian"),
    "offset sign": ("align-sign", CAUSAL, LONGER, "gaussian"),
    "key length": ("keys-by-rows", {}, LONGER, "gaussian"),
    "dq channels": ("dp-split-one", CAUSAL, 48, "gaussian"),
    "dsink stored": ("dsink-rows", CAUSAL | {"sink": True}, 48, "gaussian"),
}


def examine(bug: str, spec: dict[str, Any], keys: int, recipe: str, dtype: torch.dtype = torch.float32) -> doctor.Report:
    kernels = Flash(bug)
    subject = doctor.Subject(kernels.forward, kernels.backward, layout="BHSD", name="flash")
    return doctor.diagnose(subject, AttentionSpec(**spec), shape=SHAPE, sk=keys, recipe=recipe, dtype=dtype)


@pytest.mark.parametrize("bug", BUGS)
def test_named_first(bug: str) -> None:
    name, *given = BUGS[bug]
    report = examine(bug, *given)
    assert report.verdict == "defect"
    assert [finding.id for finding in report.findings][:1] == [name], report.headline


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("keys", [48, LONGER])
@pytest.mark.parametrize("spec", [{}, CAUSAL, CAUSAL | {"sink": True}], ids=lambda spec: "+".join(spec) or "plain")
def test_healthy_without_a_bug(spec: dict[str, Any], keys: int, dtype: torch.dtype) -> None:
    report = examine("", spec, keys, "gaussian", dtype)
    assert report.verdict == "healthy", report.headline
    assert not report.findings
