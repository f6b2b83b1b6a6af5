"""docs/api.md: every public name is on it, and everything on it is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
MODULES = ("", ".mask", ".nn", ".compat", ".doctor", ".distributed", ".integrations.transformers")
ENTRY = re.compile(r"^::: ([\w.]+)\n(?:    options: \{ members: \[([^]]*)\] \})?", re.MULTILINE)


def entries(page: str) -> set[str]:
    """Names that have an entry, and those that an entry lists as members."""
    members = {f"{entry}.{member}" for entry, listed in ENTRY.findall(page) for member in re.findall(r"\w+", listed)}
    return members | {entry for entry, _ in ENTRY.findall(page)}


def named(page: str) -> set[str]:
    """Names with an entry, and those in a sentence, which says whose other name they are."""
    return entries(page) | set(re.findall(r"`(backlight\.[\w.]+)`", page))


@pytest.mark.parametrize("module", [f"backlight{name}" for name in MODULES])
def test_every_public_name_is_on_the_page(module: str) -> None:
    public = importlib.import_module(module).__all__
    assert public
    assert not sorted({f"{module}.{name}" for name in public} - named(PAGE))


@pytest.mark.parametrize("name", sorted(named(PAGE)))
def test_what_is_on_the_page_exists_and_says_what_it_is(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        owner = importlib.import_module(module)
        found = getattr(owner, attribute) if hasattr(owner, attribute) else importlib.import_module(name)
    except ModuleNotFoundError:
        # a member of a class
        where, _, of = module.rpartition(".")
        found = getattr(getattr(importlib.import_module(where), of), attribute)
    assert isinstance(found, str) or (found.__doc__ and not found.__doc__.startswith(f"{attribute}(")), name


def test_the_test_would_notice() -> None:
    assert "backlight.nn.KVCache" in named(PAGE)
    assert "backlight.nn.KVCache" not in named(PAGE.replace("::: backlight.nn.KVCache", ""))
    assert "backlight.mask.tree" in named(PAGE)
    assert "backlight.mask.tree" not in named(PAGE.replace(" tree,", ""))
