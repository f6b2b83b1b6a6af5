"""A Hopper card that is not there: Triton's own classes run down to it, and it writes down what its launcher gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.backends.nvidia.driver as nvidia
from torch import Tensor
from triton.backends.compiler import GPUTarget

from backlight.call import Memory


class Card:
    """What stands below Triton's Python: it encodes maps and takes launches. CPU tensors stand in for its memory."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.launches: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []

    def encode(self, *args: Any) -> tuple[Any, ...]:
        self.encoded.append(args)
        return ("map", *args[:1], *map(str, args[1:]))

    @property
    def driver(self) -> Any:
        """For `triton.runtime.driver._active`."""
        card = self

        class Launcher(nvidia.CudaLauncher):
            def __init__(self, src: Any, metadata: Any):
                compiled = Compiled(src.fn.__name__, card)
                self.launch = nvidia.wrap_handle_tensordesc(compiled, dict(src.signature), metadata.tensordesc_meta)
                self.global_scratch_size, self.global_scratch_align = metadata.global_scratch_size, 1
                self.profile_scratch_size, self.profile_scratch_align = metadata.profile_scratch_size, 1
                self.launch_cooperative_grid, self.launch_pdl, self.num_ctas = False, False, 1
                self.gsan_enabled, self.arg_annotations, self.kernel_signature = False, "annotations", "signature"

        return SimpleNamespace(
            launcher_cls=Launcher,
            utils=SimpleNamespace(
                load_binary=lambda *args: (1, 2, 40, 0, 1024),
                unload_module=lambda module: None,
                get_device_properties=lambda device: {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32},
                fill_tma_descriptor=self.encode,
                fill_tma_descriptor_tiled=self.encode,
            ),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 7,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_active_torch_device=lambda: torch.device("cpu"),
            allocate_default_profile_scratch=lambda size, align, stream: None,
        )


class Compiled:
    """The launcher of a kernel; compiled code, so it is no Python function."""

    def __init__(self, name: str, card: Card):
        self.name, self.card = name, card

    def __call__(self, *args: Any) -> None:
        self.card.names.append(self.name)
        self.card.launches.append(args)


def flat(args: Any) -> list[Any]:
    """A launcher's arguments in one row, pointers as addresses; without hooks and their records, which only Triton passes."""
    hooks = (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook)
    found: list[Any] = []
    for x in args:
        if isinstance(x, (list, tuple)) and x[:1] != ("map",):
            found += flat(x)
        elif isinstance(x, Tensor) or type(x).__name__ == "Address":
            found.append(x.data_ptr())
        else:
            found.append(None if any(x is hook for hook in hooks) or type(x).__name__ == "LazyDict" else x)
    return found


class Everything(Memory[bool]):
    """In place of what a program remembers to have come once: the first call is recorded."""

    def __contains__(self, key: object) -> bool:
        return True
