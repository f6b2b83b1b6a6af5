"""What Triton keeps to itself: launches below its Python, and what Gluon kernels are written with.

Where a name for launches is missing, every launch is Triton's own, which is slower and right. Where one for kernels is missing,
the `hopper` backend cannot run and says so, and the `triton` backend takes its calls.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
import triton

from backlight._private.names import Cost, Names

_LAUNCHES = "every launch goes through Triton's own Python, which costs host time"
_NO_HOPPER = "the hopper backend cannot run; the triton backend takes its calls"

NAMES = Names(
    {
        "triton.knobs.runtime.launch_enter_hook": Cost(_LAUNCHES, gpu=True),
        "triton.knobs.runtime.launch_exit_hook": Cost(_LAUNCHES, gpu=True),
        "triton.backends.nvidia.driver.wrap_handle_tensordesc": Cost(_LAUNCHES, gpu=True),
        "triton.runtime.driver": Cost("the current stream is asked of torch, which takes longer", gpu=True),
        "triton.language.core._aggregate": Cost(_NO_HOPPER, gpu=True),
        "triton.language.core.base_value": Cost(_NO_HOPPER, gpu=True),
        "triton.experimental.gluon.language._core.builtin": Cost(_NO_HOPPER, gpu=True),
        "triton.experimental.gluon.language._core._unwrap_if_constexpr": Cost(_NO_HOPPER, gpu=True),
        "triton._C.libtriton.ir": Cost(_NO_HOPPER, gpu=True),
        "triton.backends.nvidia.compiler.CUDAOptions": Cost("the Hopper backward is slower with Triton 3.9", gpu=True),
        "triton.runtime.cache.get_cache_manager": Cost("the Hopper backward takes more instructions", gpu=True),
        "triton.backends.nvidia.compiler.get_ptxas": Cost("records name the ptxas on the path, if any", gpu=True),
    }
)

# --- launches ----------------------------------------------------------------------------------------------------------------

_ENTER = NAMES.take("triton.knobs.runtime.launch_enter_hook", None)
_EXIT = NAMES.take("triton.knobs.runtime.launch_exit_hook", None)
_wrapper = NAMES.take("triton.backends.nvidia.driver.wrap_handle_tensordesc", None)
_driver = NAMES.take("triton.runtime.driver", None)
NO_HOOKS = None if _ENTER is None or _EXIT is None else (_ENTER, _EXIT)


def heard() -> bool:
    """Whether somebody (a profiler) wants to hear of launches: only Triton's own function announces them."""
    if NO_HOOKS is None:
        return True
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(hooks != NO_HOOKS or _ENTER.calls or _EXIT.calls)


def _stream_by_driver(device: int) -> int:
    return _driver.active.get_current_stream(device)


def _stream_by_torch(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


stream_of: Callable[[int], int] = _stream_by_torch if _driver is None else _stream_by_driver


def opened(wrapped: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The compiled launcher inside Triton's function around it, and what puts another in its place.

    A kernel without descriptors has no such function: the compiled launcher stands there itself. None where Triton builds it in
    another way.
    """
    if _wrapper is None:
        return None
    if not isinstance(wrapped, FunctionType):
        return (wrapped, lambda launcher: launcher) if callable(wrapped) else None
    names = wrapped.__code__.co_freevars
    if wrapped.__closure__ is None or "launcher" not in names:
        return None
    cells = dict(zip(names, wrapped.__closure__, strict=True))

    def with_launcher(launcher: Callable[..., Any]) -> Callable[..., Any]:
        closure = tuple((cells | {"launcher": CellType(launcher)}).values())
        return FunctionType(wrapped.__code__, wrapped.__globals__, wrapped.__name__, wrapped.__defaults__, closure)

    return cells["launcher"].cell_contents, with_launcher


# --- kernels -----------------------------------------------------------------------------------------------------------------

# None where missing: whoever needs them asks `kernels_lack` first
aggregate: Any = NAMES.take("triton.language.core._aggregate", None)
base_value: Any = NAMES.take("triton.language.core.base_value", None)
builtin: Any = NAMES.take("triton.experimental.gluon.language._core.builtin", None)
unwrap_if_constexpr: Any = NAMES.take("triton.experimental.gluon.language._core._unwrap_if_constexpr", None)
ir: Any = NAMES.take("triton._C.libtriton.ir", None)
# what a launch may ask of the compiler
_options = NAMES.take("triton.backends.nvidia.compiler.CUDAOptions", None)
compiler_options: frozenset[str] = frozenset(getattr(_options, "__dataclass_fields__", ()))
# makes a folder of Triton's cache, by a key
kernel_cache: Any = NAMES.take("triton.runtime.cache.get_cache_manager", None)
_assembler = NAMES.take("triton.backends.nvidia.compiler.get_ptxas", None)


def assembler() -> str | None:
    """The ptxas that compiles for Hopper: since 3.9 not the one of that name."""
    return None if _assembler is None else str(_assembler(90).path)


def kernels_lack() -> tuple[str, ...]:
    """Reasons against kernels in Gluon: names that this Triton does not have."""
    return tuple(f"this Triton has no {path}" for path, cost in NAMES.missing.items() if cost.without == _NO_HOPPER)


def slower(gpu: bool) -> dict[str, str]:
    """What is missing, or built in another way, and what happens without it."""
    found = NAMES.slower(gpu)
    if gpu and _wrapper is not None and not _opens():
        found["the closure of triton.backends.nvidia.driver.wrap_handle_tensordesc"] = _LAUNCHES
    return found


def _opens() -> bool:
    """Whether Triton wraps its launchers in the way `opened` knows."""

    class Launcher:
        def __call__(self, *args: Any) -> None:
            pass

    inside = Launcher()
    try:
        found = opened(_wrapper(inside, {"x": "tensordesc<fp16[64, 64]>"}, [{}]))
    except Exception:
        return False
    return found is not None and found[0] is inside


# --- at exit -----------------------------------------------------------------------------------------------------------------


def _empty_layouts() -> None:
    """Takes the functions out of Gluon's classes of layouts.

    Triton's compiled part keeps those classes for ever once a kernel has asked for the layout of a result, and their functions
    keep all of Gluon. Since 3.9 it is bound by nanobind, which prints a page about all that is left when Python ends.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("triton.experimental.gluon.language"):
            layouts = [x for x in vars(module).values() if isinstance(x, type) and x.__name__.endswith("Layout")]
            for layout in layouts:
                for key in [key for key, value in vars(layout).items() if callable(value) or isinstance(value, property)]:
                    delattr(layout, key)


if type(getattr(ir, "builder", None)).__module__.startswith("nanobind"):
    atexit.register(_empty_layouts)
