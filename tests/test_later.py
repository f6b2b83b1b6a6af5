"""The list of tests for later names tests that exist: a renamed one would come back into `make test` unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from later import LATER

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", LATER)
def test_it_exists(name: str) -> None:
    file, function = name.split("::")
    assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text()
