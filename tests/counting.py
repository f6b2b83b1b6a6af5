"""What a piece of work does on the host, counted."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import backlight

PACKAGE = str(Path(backlight.__file__).parent)
MAKERS = ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "ones")
METHODS = ("new_empty", "new_zeros", "contiguous", "clone", "to", "zero_", "fill_", "copy_", "__getitem__")


def memory_operations(work: Callable[[], Any]) -> Counter[str]:
    """Allocations, fills, copies and views by name."""
    found: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (*((torch, name) for name in MAKERS), *((Tensor, name) for name in METHODS)):
            honest = getattr(owner, name)

            def counted(*args: Any, honest: Any = honest, name: str = name, **options: Any) -> Any:
                found[name] += 1
                return honest(*args, **options)

            patch.setattr(owner, name, counted)
        work()
    return found


def functions_entered(work: Callable[[], Any], but: tuple[str, ...] = ()) -> Counter[str]:
    """Python functions of the package, except those of some files."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and path.name not in but:
            found[f"{path.name}:{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found
