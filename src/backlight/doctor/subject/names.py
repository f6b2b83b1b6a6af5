"""Kernels by name: what PyTorch ships, peers if they are installed, and any function of the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from backlight.doctor.subject.subject import Subject
from backlight.doctor.subject.trouble import subject_code
from backlight.peers import fa2, fa3, flex, sdpa

# a name of this package that always computes in 8 bits, and those that do where they are asked
EMULATED = "emulated"
IN_E4M3 = ("backlight", "hopper", EMULATED)
NAMED = {
    "sdpa": "PyTorch's scaled_dot_product_attention, its own choice of backend",
    "sdpa:math": "the same, composed of plain operations",
    "sdpa:flash": "the same, flash backend (CPU too)",
    "sdpa:efficient": "the same, memory-efficient backend (CUDA)",
    "sdpa:cudnn": "the same, cuDNN backend (CUDA)",
    "flex": "PyTorch's FlexAttention; compiled on CUDA, eager elsewhere",
    "fa2": "the flash_attn package (CUDA)",
    "fa3": "the flash_attn_interface package, or the library BACKLIGHT_FA3 names (Hopper)",
}


class UnknownSubject(ValueError):
    """No kernel goes by this name; the message says which names exist."""


def named(name: str) -> Callable[..., Any]:
    """The callable of one of `NAMED`."""
    if name.startswith("sdpa"):
        _, _, backend = name.partition(":")
        if backend and backend not in sdpa.BACKENDS:
            raise UnknownSubject(f"sdpa has no backend {backend!r}; there are {', '.join(sdpa.BACKENDS)}")
        return _renamed(partial(sdpa.attention, backend=backend or None), name)
    peers: dict[str, Callable[..., Any]] = {"flex": flex.attention, "fa2": fa2.attention, "fa3": fa3.attention}
    return peers[name]


def own(
    name: str, attention: Callable[..., Any], attention_varlen: Callable[..., Any], layout: str, precision: str | None = None
) -> Subject:
    """The public call of this package as a subject: `backlight` chooses a backend, any other name forces it."""
    precision = "fp8" if name == EMULATED else precision
    if precision is not None and name not in IN_E4M3:
        raise ValueError(f"--precision {precision}: {', '.join(IN_E4M3)} compute in it, {name} does not")
    options = {"return_lse": True, "backend": None if name == "backlight" else name}
    options |= {} if precision is None else {"precision": precision}
    if layout == "packed":
        return Subject(partial(attention_varlen, **options), layout="packed", name=name)
    return Subject(partial(attention, **options), layout="BHSD", name=name)


def user_subject(reference: str) -> Subject:
    """A function of the user's; a function of its name and `_jvp` beside it gives its tangents."""
    function, owner = _located(reference)
    jvp = getattr(owner, f"{reference.rpartition(':')[2].rpartition('.')[2]}_jvp", None)
    found = Subject.of(function)
    return replace(found, jvp=jvp) if callable(jvp) and found.jvp is None else found


def user_function(reference: str) -> Callable[..., Any]:
    """`path/to/file.py:fn` or `package.module:fn`; attributes of objects work too (`file.py:Model.forward`)."""
    return _located(reference)[0]


def _located(reference: str) -> tuple[Any, Any]:
    """What a reference names, and the module or object that holds it."""
    place, _, attribute = reference.rpartition(":")
    if not place or not attribute:
        raise UnknownSubject(f"{reference!r} names no function: write file.py:function or module:function")
    if place.endswith(".py"):
        module = _module_from_file(Path(place))
    elif not all(part.isidentifier() for part in place.split(".")):
        raise UnknownSubject(f"{place!r} is neither a file that ends in .py nor the name of a module")
    else:
        with subject_code():
            module = importlib.import_module(place)
    found: Any = module
    owner: Any = module
    for part in attribute.split("."):
        with subject_code(module.__file__):
            known = hasattr(found, part)
        if not known:
            raise UnknownSubject(f"{place} has no {attribute!r}; it defines {', '.join(_callables(module)) or 'no functions'}")
        owner, found = found, getattr(found, part)
    return found, owner


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownSubject(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # the file's neighbours are importable, as if it were run as a script; an already imported module keeps its name
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)
    with subject_code(path):
        spec.loader.exec_module(module)
    return module


def _callables(module: ModuleType) -> list[str]:
    items = vars(module).items()
    return [name for name, item in items if callable(item) and getattr(item, "__module__", None) == module.__name__]


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name  # type: ignore[attr-defined]
    return function
