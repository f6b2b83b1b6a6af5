"""Which calls the kernels of shared pair biases take, and the shapes of their CTAs."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Warpgroups that multiply, and columns of their tiles, in the kernel that owns rows and in the one that owns keys; ahead:
    products of the next tile run under this one."""

    rows_groups: int = 3
    rows_keys: int = 32
    rows_ahead: bool = True
    keys_groups: int = 3
    keys_rows: int = 128

    def slabs(self, sk: int, element_size: int) -> tuple[int, int]:
        """(slabs of keys that dq is made in, tiles of a warpgroup in one): sums of ds have to stay in registers, the bias in
        shared memory."""
        most = (384 if element_size == 2 else 192) // self.rows_groups // self.rows_keys
        tiles = -(-sk // (self.rows_groups * self.rows_keys))
        slabs = -(-tiles // most)
        each = -(-tiles // slabs)
        # K and V come in tiles of 64
        return slabs, each if self.rows_keys == WM else each + each % 2

    def row_tile(self, sq: int, element_size: int) -> int:
        """Rows of a tile in the kernel that owns keys: a long bias leaves no room for many."""
        return self.keys_rows if sq * element_size <= 1536 else WM


def pair_config() -> PairConfig:
    return resolve("hopper.pair", PairConfig)


def members_of(call: Call) -> int:
    """Heads that share an entry of the bias."""
    assert call.pair_bias is not None
    return call.sharing * (call.q.shape[1] // call.pair_bias.shape[1])


def takes(call: Call) -> bool:
    """Whether the kernels can make dq, dk, dv and dpair_bias of a call with 16 bits on a Hopper GPU."""
    b, spec = call.pair_bias, call.spec
    if b is None or b.shape[2] == 1 or call.varlen or call.part is not None or call.group > 1:
        return False
    if spec.softcap is not None or spec.bias or spec.rows or call.scale < SMALLEST_SCALE:
        return False
    length, width = max(call.q.shape[2], call.k.shape[2]), max(call.q.shape[-1], call.v.shape[-1])
    fits = width <= WIDEST and length * b.element_size() <= LONGEST
    return fits and min(call.q.shape[2], call.k.shape[2]) > SHORTEST and members_of(call) >= FEWEST_MEMBERS


def groups_of(members: int, tiles: int, programs: int) -> tuple[int, int]:
    """(members to a group, groups): a tile of the bias is shared by several programs, so that their rounds are full."""
    most = max(1, min(members // 8, -(-4 * programs // tiles)))

    def time(groups: int) -> int:
        rounds = -(-tiles * groups // programs)
        # a program begins with its part of the bias and ends with that of the gradient: worth two members
        return rounds * (-(-members // groups) + 2)

    each = -(-members // min(range(1, most + 1), key=lambda groups: (time(groups), groups)))
    return each, -(-members // each)
