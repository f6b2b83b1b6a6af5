"""The numbers on the kernels page are those of its record."""

from __future__ import annotations

from pathlib import Path

import make_targets_table
import make_triton_table

DOCS = Path(__file__).parents[1] / "docs"


def test_table_is_the_record() -> None:
    text = (DOCS / "kernels.md").read_text()
    assert make_triton_table.table() in text
    assert make_triton_table.page(text) == text


def test_table_of_cards_is_the_record() -> None:
    assert make_targets_table.table() in (DOCS / "kernels.md").read_text()


def test_every_kernel_file_is_named() -> None:
    """A file with a kernel that the page does not name is one that a reader will not find."""
    text = (DOCS / "kernels.md").read_text()
    folder = DOCS.parent / "src" / "backlight" / "backends" / "triton"
    with_kernels = [path for path in folder.glob("*.py") if "_kernel(" in path.read_text() and path.name != "backward.py"]
    assert len(with_kernels) >= 7
    for path in with_kernels:
        assert f"`{path.name}`" in text, path.name
