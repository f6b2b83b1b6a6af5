"""Which Triton compiles the kernels."""

from __future__ import annotations

from functools import cache


@cache
def triton_version() -> tuple[int, ...]:
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])
