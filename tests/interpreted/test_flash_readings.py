"""What the doctor reads inside the Triton kernels of `flash`, interpreted: tiles, periods, rows, channels and layouts."""

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
from backlight.doctor.steps import deep
from backlight.doctor.steps.examination import Examination
from backlight.problems import inputs
from backlight.spec import AttentionSpec

pytestmark = pytest.mark.later

SHAPE, TILE = (1, 2, 48, 16), 16
CAUSAL: dict[str, Any] = {"causal": True}
# bug -> (the name that comes first, kind of the reading, words of it, spec, recipe)
BUGS: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "bound rounded": ("bound-forward", "lost", "in every second tile of 16 rows from row 0 on", CAUSAL, "gaussian"),
    "dq bound rounded": ("bound-dq", "lost", "in every second tile of 16 rows from row 0 on", CAUSAL, "gaussian"),
    "dkdv bound rounded": ("bound-dkdv", "lost", "keys 16-31 of rows 16-31 are lost", CAUSAL, "gaussian"),
    "diagonal unmasked": ("diagonal-unmasked", "leaked", "triangles beyond the diagonal", CAUSAL, "gaussian"),
    "unmasked backward": ("mask-causal-backward", "leaked", "the triangle above the diagonal is filled", CAUSAL, "gaussian"),
    "lost in head 1": ("cells-lost", "lost", "keys 16-31 are lost in every row in head 1", CAUSAL, "gaussian"),
    "lse row": ("lse-read", "row factor", "that of the first row of its tile of 16", CAUSAL, "gaussian"),
    "lse head": ("lse-other-head", "row factor", "that of head 0", CAUSAL, "gaussian"),
    "delta head": ("delta-other-head", "delta", "that of head 0", CAUSAL, "gaussian"),
    "delta of a tile": ("delta-part", "delta", "delta differs from one range of 16 keys to the next", CAUSAL, "gaussian"),
    "channels": ("dp-channels", "channels", "dp leaves out channels 12-15 of dO and v", CAUSAL, "gaussian"),
    "k layout": ("kv-layout-backward", "keys", "the backward's k is read as [B, S, H, D]", CAUSAL, "gaussian"),
    "maximum start": ("maximum-start", "", "", {}, "low_lse"),
    "merge": ("merge-overflow", "", "", {}, "high_lse"),
}


class WithReadings(Examination):
    """`quick`, and of `full` what reads matrices: the rest would run an interpreted kernel a hundred times."""

    def _probe(self, observed):
        bench = super()._probe(observed)
        deep._tomography(self, bench)
        return bench


def examine(bug: str, spec: dict[str, Any], recipe: str, reads: bool) -> doctor.Report:
    kernels = Flash(bug, TILE)
    subject = doctor.Subject(kernels.forward, kernels.backward, layout="BHSD", name="flash")
    problem = inputs.make(AttentionSpec(**spec), SHAPE, recipe=recipe, dtype=torch.float32)
    return (WithReadings if reads else Examination)(subject, problem, "quick").report()


@pytest.mark.parametrize("bug", BUGS)
def test_read_and_named(bug: str) -> None:
    name, kind, words, spec, recipe = BUGS[bug]
    report = examine(bug, spec, recipe, bool(kind))
    assert [finding.id for finding in report.findings][:1] == [name], report.headline
    if kind:
        said = [reading.sentence for reading in report.readings if reading.kind == kind]
        assert any(words in sentence for sentence in said), [reading.sentence for reading in report.readings]


@pytest.mark.parametrize("spec", [{}, CAUSAL], ids=["plain", "causal"])
def test_a_healthy_kernel_has_nothing_to_read(spec: dict[str, Any]) -> None:
    report = examine("", spec, "gaussian", True)
    assert (report.verdict, report.readings, report.findings) == ("healthy", [], []), report.headline
