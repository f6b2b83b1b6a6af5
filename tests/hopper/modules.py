"""Copies of kernel modules with a changed source."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(path: Path, source: str) -> ModuleType:
    """A module made of a source; Triton and the emulator read it from its file."""
    path.write_text(source)
    name = f"hopper_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def mutant(folder: Path, module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of a kernel module with one piece of its source replaced."""
    source = Path(module.__file__ or "").read_text()
    assert old in source
    return module_of(folder / "mutant.py", source.replace(old, new))
