"""Triton's interpreter without work that changes no result: it was three quarters of these tests' time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def taken_numpy() -> None:
    """Triton 3.6 makes numbers of arrays with one element."""
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if triton.__version__.startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} needs numpy<2.4, here is {numpy.__version__}")


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter() -> Iterator[None]:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patching_once(interpreter))
        monkeypatch.setattr(interpreter, "_get_np_dtype", remembering(interpreter._get_np_dtype))
        core = interpreter.tl.core
        monkeypatch.setattr(core.block_type, "__init__", sharing_blocks(core.block_type.__init__))
        monkeypatch.setattr(core.tensor, "__init__", sharing_shapes(core.tensor.__init__))
        # without `debug` nobody looks at what the arithmetic in 64 bits beside each operation finds
        builder = interpreter.interpreter_builder
        assert not builder.options.debug
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


def patching_once(interpreter: Any) -> Callable[..., Any]:
    """It patches its language at every call of a device function; here only where the launch has not done it already."""
    language, patch = interpreter.tl, interpreter._patch_lang

    @functools.cache
    def seen_from(function: Callable[..., Any]) -> tuple[Any, ...]:
        """Triton's own device functions see `tl.core` alone, which a launch does not patch."""
        return tuple(
            each for each in (language, language.core) if any(each is known for known in function.__globals__.values())
        )

    def patch_once(function: Callable[..., Any]) -> Any:
        if any(language.core.is_builtin(each.load) for each in seen_from(function)):
            return patch(function)
        return interpreter._LangPatchScope()

    return patch_once


def remembering(numpy_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """It writes its table of dtypes anew for each that it looks up."""
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype_of(dtype)
        return known[name]

    return remembered


def sharing_blocks(describe: Callable[..., None]) -> Callable[..., None]:
    """It checks and names the type of a block anew for each of its values."""
    known: dict[Any, dict[str, Any]] = {}

    def described(block: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, getattr(element_ty, "address_space", None), *(getattr(n, "value", n) for n in shape))
        if key not in known:
            describe(block, element_ty, shape)
            known[key] = vars(block).copy()
        vars(block).update(known[key])

    return described


def sharing_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """It makes constants of the lengths of a block anew for each of its values."""
    known: dict[str, dict[str, Any]] = {}

    def made(value: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            make(value, handle, type)
            known[type.name] = {name: each for name, each in vars(value).items() if name not in ("handle", "type")}
        vars(value).update(known[type.name], handle=handle, type=type)

    return made
