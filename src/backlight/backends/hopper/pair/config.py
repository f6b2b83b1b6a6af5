"""Which calls the kernels of shared pair biases take, and the shapes of their CTAs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backlight.call import Call
from backlight.config import resolve

WM = 64
WIDEST = 32
# shorter rows have the Triton kernel that holds a whole head; fewer members do not pay for reading the bias first
SHORTEST, FEWEST_MEMBERS = 64, 16
# bytes of a bias: 64 rows or keys of all of it stay in shared memory
LONGEST = 2048
SMALLEST_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class PairConfig:
    """Warpgroups that multiply, and columns of their tiles, in each of the three kernels."""

    forward_groups: int = 3
    forward_keys: int = 128
    rows_groups: int = 2
    rows_keys: int = 64
    rows_ahead: bool = False
    keys_groups: int = 3
    keys_rows: int = 128

    def slabs(self, sk: int) -> tuple[int, int]:
        """(slabs of keys that dq is made in, tiles of a warpgroup in one): sums of ds have to stay in registers."""
        most = (384 // self.rows_groups) // self.rows_keys
        tiles = -(-sk // (self.rows_groups * self.rows_keys))
        slabs = -(-tiles // most)
        each = -(-tiles // slabs)
        # K and V come in tiles of 64
        return slabs, each if self.rows_keys == WM else each + each % 2

    def forward_tile(self, sk: int, element_size: int) -> int:
        """Keys of a tile of the forward: fewer where the bias leaves no room, or the last tile would be half empty."""
        return WM if sk * element_size > 1536 or 0 < sk % 128 <= 64 else self.forward_keys


def pair_config(call: Call) -> PairConfig:
    return resolve("hopper.pair", PairConfig)


def members_of(call: Call) -> int:
    """Heads that share an entry of the bias."""
    assert call.pair_bias is not None
    return call.sharing * (call.q.shape[1] // call.pair_bias.shape[1])


def reasons_of_pair(call: Call) -> list[str]:
    """What of a pair bias these kernels do not take."""
    b, spec = call.pair_bias, call.spec
    if b is None:
        return []
    beside = {
        "a soft cap": spec.softcap is not None,
        "a bias by distance": spec.bias,
        "a sink": spec.sink,
        "a mask by row intervals": spec.rows,
        "packed sequences": call.varlen,
        "grouped heads": call.group > 1,
    }
    reasons = [f"a pair bias together with {name}" for name, is_there in beside.items() if is_there]
    if b.shape[2] == 1:
        reasons.append("a pair bias by key")
    elif members_of(call) < FEWEST_MEMBERS:
        reasons.append(f"a pair bias that fewer than {FEWEST_MEMBERS} heads share")
    if max(call.q.shape[-1], call.v.shape[-1]) > WIDEST:
        reasons.append(f"a pair bias with heads wider than {WIDEST}")
    longest = max(call.q.shape[2], call.k.shape[2])
    if not SHORTEST < longest or longest * b.element_size() > LONGEST:
        reasons.append(f"a pair bias with {longest} rows or keys, not {SHORTEST + 1} to {LONGEST // b.element_size()}")
    if call.scale < SMALLEST_SCALE:
        reasons.append(f"a pair bias with scale {call.scale:g} below {SMALLEST_SCALE:g}")
    if b.dtype not in (torch.float32, call.q.dtype):
        reasons.append(f"a pair bias of {b.dtype}")
    return reasons


def groups_of(members: int, tiles: int, programs: int) -> tuple[int, int]:
    """(members to a group, groups): a tile of the bias is shared by several programs, so that their rounds are full."""
    most = max(1, min(members // 8, -(-4 * programs // tiles)))

    def time(groups: int) -> int:
        rounds = -(-tiles * groups // programs)
        # a program begins with its part of the bias and ends with that of the gradient: worth two members
        return rounds * (-(-members // groups) + 2)

    each = -(-members // min(range(1, most + 1), key=lambda groups: (time(groups), groups)))
    return each, -(-members // each)
