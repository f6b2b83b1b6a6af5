"""What tile sizes depend on of a device: its architecture and the shared memory that one program may have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

KIB = 1024
# bytes of shared memory a program may ask for, by architecture, where neither torch nor Triton says
BY_ARCHITECTURE = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_87": 163 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_103": 227 * KIB,
    "sm_120": 99 * KIB,
    "sm_121": 99 * KIB,
    "gfx950": 160 * KIB,
}
# of every other card: AMD's have this much, and no NVIDIA card since sm_80, the oldest that Triton supports, has less
LEAST = 64 * KIB


@dataclass(frozen=True, slots=True)
class Device:
    """name: as torch names the card; arch: "sm_90", "gfx942"; shared: bytes of shared memory a program may have."""

    name: str
    arch: str
    shared: int


# kernels that the interpreter runs have no limit
INTERPRETED = Device("Triton's interpreter", "cpu", 227 * KIB)


@cache
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        # "gfx942:sramecc+:xnack-"; an optional larger amount, as NVIDIA has it, there is none
        arch = str(getattr(found, "gcnArchName", "gfx")).partition(":")[0]
        return Device(found.name, arch, BY_ARCHITECTURE.get(arch, LEAST))
    arch = f"sm_{found.major}{found.minor}"
    shared = getattr(found, "shared_memory_per_block_optin", None)
    return Device(found.name, arch, int(shared or BY_ARCHITECTURE.get(arch, LEAST)))
