"""The forward on the host: which tiles there are, the kernel's arguments, its launch."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.compat import OWN_REGISTERS
from backlight.backends.hopper.config import (
    ForwardConfig,
    elastic_config,
    entmax_config,
    exponent_of,
    forward_config,
    heads_together,
    intervals_of,
    is_masked,
    low_in_memory,
    share_q_and_o,
)
from backlight.backends.hopper.forward import peaks as peak_ways
from backlight.backends.hopper.forward.arguments import Extras, Mask, Scale, Terms, Variant
from backlight.backends.hopper.forward.entmax import STEPS, Living
from backlight.backends.hopper.forward.kernel import _fwd_kernel
from backlight.backends.hopper.launch import Launch, descriptor, multiprocessors, readable, vector_fields
from backlight.backends.hopper.primitives import LN2, columns_beyond
from backlight.backends.hopper.terms import cap_factor, single
from backlight.backends.intervals.tiles import LiveTiles, Tiling, live_tiles
from backlight.call import Call
from backlight.spec import LOG2E


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tiles of a forward and the programs that share them; dynamic: they draw tiles from a counter."""

    config: Any
    row_tiles: int
    n_tiles: int
    programs: int
    uneven: bool
    dynamic: bool

    @classmethod
    def of(cls, launch: Launch, config: Any) -> "Schedule":
        call = launch.call
        row_tiles = launch.row_tiles(config.block_m)
        n_tiles = row_tiles * launch.batch * launch.heads
        programs = min(n_tiles, multiprocessors(call.q.device)) if config.persistent else n_tiles
        uneven = is_masked(call) or call.varlen
        return cls(config, row_tiles, n_tiles, programs, uneven, uneven and config.drawn and programs < n_tiles)

    def arguments(self, launch: Launch, packing: Packing, n_segments: int, counter: Tensor) -> tuple[Any, ...]:
        """By what a kernel finds its tiles and their rows, and the factors of scores."""
        numbers = int(self.dynamic), n_segments, self.n_tiles, self.row_tiles, heads_together(launch.call, self.config)
        return packing, counter, *numbers, *launch.geometry, scale_of(launch.call)


def config_of(call: Call, low: bool) -> ForwardConfig:
    if call.entmax is not None:
        return entmax_config(call)
    return forward_config(call, low) if call.tau is None else elastic_config(call)


def scale_of(call: Call) -> Scale:
    """With a cap, scores come in base 2 already."""
    unit = call.scale if call.spec.softcap is None else LN2.value
    unit_log2 = 1.0 if call.spec.softcap else unit * LOG2E
    return Scale(unit, unit_log2, math.log(2.0) * single(unit_log2) - single(unit))


def variant_of(launch: Launch, schedule: Schedule, save_u: bool, keeps_low: bool) -> Variant:
    call, config, flags = launch.call, schedule.config, launch.flags
    even = not schedule.uneven and launch.sk % config.block_n == 0
    intervals = intervals_of(call)
    share = share_q_and_o(config, launch.bd, launch.bdv, intervals)
    assert not (share and config.q_buffers > 1), "O would overwrite the Q of the next tile"
    keep_first_max = config.keep_first_max and (call.spec.left is None or intervals > 0)
    # of two tiles of O each writes its own columns
    one_tile = columns_beyond(launch.dv, launch.bdv) == 0
    full_first = intervals > 0 and keep_first_max and call.spec.softcap is None
    return Variant(
        D=launch.d,
        DV=launch.dv,
        BD=launch.bd,
        BDV=launch.bdv,
        BN=config.block_n,
        NC=config.consumers,
        ST=config.stages,
        QB=config.q_buffers,
        **flags,
        MASKED=flags["HAS_LEFT"] or flags["HAS_RIGHT"] or intervals > 0 or not even,
        EARLY_P=config.early_p,
        LATE_RESCALE=config.late_rescale,
        PINGPONG=config.pingpong,
        KEEP_FIRST_MAX=keep_first_max,
        SHARE_QO=share,
        SOFTCAP=call.spec.softcap is not None,
        BIAS=call.bias is not None,
        SINK=call.sink is not None,
        GATE=call.gate is not None,
        TAU=call.tau is not None,
        SAVE_U=save_u,
        BIAS_KEEPS_MAX=keep_first_max and call.bias is not None and call.spec.softcap is None,
        INTERVALS=intervals,
        FULL_FIRST=full_first,
        PLACES=places_of(launch, config, intervals),
        ENTMAX=exponent_of(call),
        STEPS=STEPS,
        PEAKS=way_of_peaks(call, keep_first_max).value,
        LOW=launch.dv if keeps_low else 0,
        LOW_SHARED=keeps_low and one_tile and not share and low_in_memory(config, launch.bd, launch.bdv, intervals),
    )


def way_of_peaks(call: Call, keep_first_max: bool) -> Any:
    """How the largest logits of rows are found."""
    if not call.max_logit:
        return peak_ways.NO_PEAKS
    apart = call.spec.softcap is not None or call.spec.bias
    if apart or (keep_first_max and call.spec.tau) or (call.spec.sink and not keep_first_max):
        return peak_ways.BY_SCORES
    return peak_ways.BY_WEIGHTS if keep_first_max else peak_ways.BY_MAXIMUM


def places_of(launch: Launch, config: ForwardConfig, intervals: int) -> int:
    """Places for the intervals of key blocks: with twice as many as stages, K is released as soon as it was read."""
    fit = intervals > 0 and launch.bd <= 64 and not share_q_and_o(config, launch.bd, launch.bdv, 2 * intervals)
    return 2 * config.stages if fit else config.stages


def forward(call: Call, save_u: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What `Backend.forward` returns, of a call that `why_not` accepts."""
    launch = Launch(call, choices=save_u)
    y = launch.empty_rows(launch.dv, call.q.dtype)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    kept = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) if save_u and call.keeps else None
    peaks = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device) if call.max_logit else None
    if y.numel() == 0 or launch.sk == 0:
        empty = -torch.inf if call.sink is None else call.sink.float()[None, :, None].expand_as(lse)
        nothing = None if peaks is None else peaks.fill_(-torch.inf)
        return y.zero_(), lse.copy_(torch.as_tensor(empty)), None if kept is None else kept.zero_(), nothing
    u, low = (kept, None) if call.spec.keeps_u else (None, kept)
    schedule = launch.once("forward", lambda: Schedule.of(launch, config_of(call, low is not None)))
    living = Living.of(launch, schedule.config, u is not None) if call.entmax is not None else None
    gate = None if call.gate is None else readable(call.gate)
    start_kernel(launch, schedule, Tensors(y, lse, u, low, peaks, gate), living)
    return y, lse, kept, peaks


def look_for_living(launch: Launch, lse: Tensor) -> tuple[Living, ForwardConfig]:
    """The blocks of keys that entmax leaves alive, and W, of a forward whose lse is known; and its tiles."""
    call = launch.call
    schedule = launch.once("living", lambda: Schedule.of(launch, config_of(call, False)))
    living = Living.of(launch, schedule.config, True)
    start_kernel(launch, schedule, Tensors(call.q, lse), living, known=True)
    return living, schedule.config


class Tensors(NamedTuple):
    """What the kernel fills, None for what is not wanted, and the gate."""

    y: Tensor
    lse: Tensor
    u: Tensor | None = None
    low: Tensor | None = None
    peaks: Tensor | None = None
    gate: Tensor | None = None


def start_kernel(launch: Launch, schedule: Schedule, made: Tensors, living: Living | None, known: bool = False) -> None:
    """One launch; where lse is `known`, it fills what `living` says of it alone."""
    call = launch.call
    y, lse, u, low, peaks, gate = made
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, schedule.config.block_m)
    tiles = visited_tiles(launch, schedule, cu_q, cu_k, first_tiles)
    counter = launch.counter(schedule.dynamic)
    learned = launch.table, launch.sink, launch.tau

    def describe() -> dict[str, Any]:
        config, cap = schedule.config, call.spec.softcap
        variant = variant_of(launch, schedule, u is not None, low is not None)
        args = [
            launch.rows(call.q, 64, launch.bd),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(y, 64, launch.bd if known else launch.bdv),
            lse,
            *schedule.arguments(launch, Packing(cu_q, cu_k, first_tiles), n_segments, counter),
            *(None if x is None else launch.rows(x, 64, launch.bdv) for x in (gate, u)),
            Terms(*learned, cap_factor(call), None if cap is None else cap * LOG2E),
            None if call.bias is None else call.bias.shape[1],
            None if call.bias is None else call.spec.bias_origin,
            *mask_arguments(launch, schedule, tiles, living),
            Extras(peaks, None if peaks is None else float(call.scale), None if variant.LOW_SHARED else low),
            launch.rows(low, 64, launch.bdv) if low is not None and variant.LOW_SHARED else None,
            *((None,) * 3 if low is None or variant.LOW_SHARED else low.stride()[:3]),
        ]
        constants = {"V": variant._replace(KNOWN=known, GATE=gate is not None)}
        options = {"num_warps": 4, "maxnreg": 168 if config.consumers == 2 else 128}
        if call.tau is not None or call.entmax is not None:
            # sweeps share a tile's values
            options |= OWN_REGISTERS
        return {"grid": (schedule.programs,), "args": args, "constants": constants, **options}

    mask = (None,) * 4 if tiles is None else (tiles.folded, tiles.live, tiles.counts, tiles.first_key_tiles)
    entmax = () if living is None else living.tensors
    tensors = (call.q, call.k, call.v, y, lse, cu_q, cu_k, first_tiles, counter, gate, u, *learned, *mask, *entmax, peaks, low)
    launch.start(_fwd_kernel, tensors, describe)


def visited_tiles(launch: Launch, schedule: Schedule, cu_q: Tensor, cu_k: Tensor, first_tiles: Tensor) -> LiveTiles | None:
    """The key blocks that row tiles visit under a mask by row intervals."""
    call, config = launch.call, schedule.config
    if call.rows is None:
        return None
    packing: tuple[Tensor, ...] = ()
    if call.cu_seqlens_k is not None:
        packing = (cu_q, cu_k, first_tiles, launch.first_tiles(call.cu_seqlens_k, config.block_n))
    tiling = Tiling(config.block_m, config.block_n, schedule.row_tiles, launch.key_tiles(config.block_n), *packing)
    return live_tiles(launch.start_beside, call, tiling, of_rows=True)


def mask_arguments(launch: Launch, schedule: Schedule, tiles: LiveTiles | None, living: Living | None) -> tuple[Any, ...]:
    """What limits the key blocks that are visited: a mask by row intervals, or entmax."""
    if living is not None:
        return (*(None,) * 4, living.key_tiles, None, living.argument(launch.call, scale_of(launch.call).unit))
    if tiles is None:
        return (None,) * 7
    block = schedule.config.block_n
    folded = descriptor(tiles.folded, vector_fields(tiles.folded.numel(), block))
    mask = Mask(tiles.live, tiles.counts, tiles.first_key_tiles)
    return folded, mask, tiles.batch_step, tiles.head_step, launch.key_tiles(block), tiles.most, None
