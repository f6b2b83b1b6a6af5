"""Which calls the kernel of shared pair biases takes, and the shapes of its CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.call import Call
from backlight.config import resolve

WM = 64
WIDEST = 32
# shorter rows have the Triton kernel that holds a whole head; fewer members do not pay for reading the bias first
SHORTEST, FEWEST_MEMBERS = 64, 16
SMALLEST_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class PairConfig:
    """consumers: warpgroups that multiply, two or three; keys: of one of their tiles, 64 or 32."""

    consumers: int = 2
    keys: int = 64

    def slabs(self, sk: int, element_size: int) -> tuple[int, int]:
        """(slabs of keys that dq is made in, tiles of a warpgroup in one): sums of ds have to stay in registers, the bias in
        shared memory."""
        most = (384 if element_size == 2 else 192) // self.consumers // self.keys
        tiles = -(-sk // (self.consumers * self.keys))
        slabs = -(-tiles // most)
        each = -(-tiles // slabs)
        # K and V come in tiles of 64
        return slabs, each if self.keys == WM else each + each % 2


def pair_config() -> PairConfig:
    return resolve("hopper.pair", PairConfig)


def members_of(call: Call) -> int:
    """Heads that share an entry of the bias."""
    assert call.pair_bias is not None
    return call.sharing * (call.q.shape[1] // call.pair_bias.shape[1])


def takes(call: Call) -> bool:
    """Whether the kernel can make dq and dpair_bias of a call with 16 bits on a Hopper GPU."""
    b, spec = call.pair_bias, call.spec
    if b is None or b.shape[2] == 1 or call.varlen or call.part is not None:
        return False
    if spec.softcap is not None or spec.bias or spec.rows or call.scale < SMALLEST_SCALE:
        return False
    wide = max(call.q.shape[-1], call.v.shape[-1]) > WIDEST
    return not wide and min(call.q.shape[2], call.k.shape[2]) > SHORTEST and members_of(call) >= FEWEST_MEMBERS


def groups_of(members: int, tiles: int, programs: int) -> tuple[int, int]:
    """(members to a group, groups): a tile of the bias is shared by several programs, so that their rounds are full."""
    most = max(1, min(members // 8, -(-4 * programs // tiles)))

    def time(groups: int) -> int:
        rounds = -(-tiles * groups // programs)
        # a program begins with its part of the bias and ends with that of the gradient: worth two members
        return rounds * (-(-members // groups) + 2)

    each = -(-members // min(range(1, most + 1), key=lambda groups: (time(groups), groups)))
    return each, -(-members // each)
