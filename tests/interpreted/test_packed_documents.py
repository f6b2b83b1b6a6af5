"""Documents of known lengths in the Triton kernels: packed, beside their intervals."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import backlight
from backlight import documents
from backlight.mask import Mask
from packed_documents import CASES, Documents, results


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_packed_is_the_same_as_intervals(case: Documents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SHORTEST", 1)
    case = case.quarter()
    tensors, made = case.tensors(torch.float32), case.mask()
    assert backlight.explain(**tensors, mask=made, **case.options).documents.startswith("documents of known lengths run packed")
    got, want = (results(each, tensors, backend="triton", **case.options) for each in (made, Mask(made.rows)))
    for part, value in want.items():
        torch.testing.assert_close(got[part], value, rtol=1e-4, atol=1e-4, msg=lambda text, part=part: f"{part}: {text}")
