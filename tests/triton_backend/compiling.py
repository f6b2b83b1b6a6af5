"""Compile the kernels that host code launches for another machine, without a GPU: see them instead of running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature


@dataclass(frozen=True)
class Launched:
    """One launch that did not happen: kernel, its arguments, its options."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    def bound(self, target: Any) -> tuple[Any, Any, Any]:
        """(backend, bound arguments with their specialisation, options), as the JIT would bind them for the target."""
        backend = make_backend(target)
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        return (backend, *binder(*self.args, **self.options)[:2])

    def specialization(self, target: Any) -> str:
        """What the JIT looks a compiled kernel up by, as far as the arguments decide it."""
        return repr(self.bound(target)[2])

    def compile(self, target: Any) -> Any:
        backend = make_backend(target)
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        bound, specialization, chosen = binder(*self.args, **self.options)
        chosen, signature, constexprs, attrs = self.kernel._pack_args(
            backend, dict(self.options), bound, specialization, chosen
        )
        return triton.compile(ASTSource(self.kernel, signature, constexprs, attrs), target=target, options=chosen.__dict__)


class Recorder:
    def __init__(self, kernel: Any, launches: list[Launched]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.launches.append(Launched(self.kernel, args, options))


@contextmanager
def recorded(*modules: Any) -> Iterator[list[Launched]]:
    """Inside, launching a kernel of the modules (a jitted function named `_..._kernel`) is only written down."""
    launches: list[Launched] = []
    before = [
        (module, name, kernel)
        for module in modules
        for name, kernel in vars(module).items()
        if name.startswith("_") and name.endswith("_kernel")
    ]
    try:
        for module, name, kernel in before:
            setattr(module, name, Recorder(kernel, launches))
        yield launches
    finally:
        for module, name, kernel in before:
            setattr(module, name, kernel)
