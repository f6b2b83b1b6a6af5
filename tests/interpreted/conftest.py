"""Triton's interpreter patches its language at every call of a device function, which was a third of the tests' time; here it
does so only where the launch has not done it already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def taken_numpy() -> None:
    """Triton 3.6 makes numbers of arrays with one element."""
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if triton.__version__.startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip(f"the interpreter of Triton {triton.__version__} needs numpy<2.4, here is {numpy.__version__}")


@pytest.fixture(autouse=True, scope="session")
def patched_once() -> Iterator[None]:
    interpreter = pytest.importorskip("triton.runtime.interpreter")
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

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        yield
