"""Forward (eq. 31, eq. 32): the kernel, its arguments and its launch.

One producer warp (producer.py) feeds NC consumer warpgroups of 64 rows each (consumer.py, with tau elastic.py) through ST-stage
rings of K and V. Key blocks run from right to left, so that a causal mask touches the first one only. CTAs are persistent: the
producer draws tiles (longest first under a mask) and publishes them with Q, so the next tile's loads and the last tile's store
run under the softmax.

Learned terms (terms.py) are compiled in: the cap and the bias change scores, the sink is where a row's sum starts, the gate
waits in the buffer that O leaves through. An absent term is None: neither an argument nor a captured value.

Shared memory: Q and O [NC, 64, D], K and V [ST, BN, D]. Parity: tests/hopper.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from backlight.backends.hopper.compat import Maybe, arguments, smem_reinterpret
from backlight.backends.hopper.config import (
    ForwardConfig,
    elastic_config,
    forward_config,
    heads_together,
    share_q_and_o,
)
from backlight.backends.hopper.forward.consumer import plain_consumer
from backlight.backends.hopper.forward.elastic import elastic_consumer
from backlight.backends.hopper.forward.producer import producer
from backlight.backends.hopper.forward.tiles import K_EMPTY, SLOT
from backlight.backends.hopper.launch import Launch, multiprocessors, readable
from backlight.backends.hopper.primitives import LN2, WM, barriers
from backlight.backends.hopper.terms import cap_factor, single, table_of
from backlight.call import Call
from backlight.spec import LOG2E


@arguments
class Forward:
    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    gate_desc: Maybe
    lse_ptr: gl.tensor
    u_desc: Maybe
    table_ptr: Maybe
    sink_ptr: Maybe
    tau_ptr: Maybe
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    cu_tiles_ptr: gl.tensor
    counter_ptr: gl.tensor
    q_s: gl.shared_memory_descriptor
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    o_s: gl.shared_memory_descriptor
    u_s: Maybe
    tile_s: gl.shared_memory_descriptor
    overflow_s: Maybe
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    gate_full: Maybe
    dynamic: gl.tensor
    n_segments: gl.tensor
    n_tiles: gl.tensor
    row_tiles: gl.tensor
    together: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    left: gl.tensor
    right: gl.tensor
    unit: gl.tensor
    unit_log2: gl.tensor
    unit_rest: gl.tensor
    cap_factor: Maybe
    cap_log2: Maybe
    n_bias: Maybe
    bias_origin: Maybe
    D: gl.constexpr
    BN: gl.constexpr
    NC: gl.constexpr
    ST: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    EVEN: gl.constexpr
    EARLY_P: gl.constexpr
    LATE_RESCALE: gl.constexpr
    VARLEN: gl.constexpr
    PINGPONG: gl.constexpr
    SHARE_QO: gl.constexpr
    QB: gl.constexpr
    BIAS_KEEPS_MAX: gl.constexpr
    FAR: gl.constexpr
    KEEP_FIRST_MAX: gl.constexpr
    SOFTCAP: gl.constexpr
    BIAS: gl.constexpr
    SINK: gl.constexpr
    GATE: gl.constexpr
    TAU: gl.constexpr
    SAVE_U: gl.constexpr
    V_EMPTY: gl.constexpr
    TURN: gl.constexpr
    RING_THREADS: gl.constexpr


@gluon.jit
def consumer(p, W: gl.constexpr):
    if p.TAU:
        elastic_consumer(p, W)
    else:
        plain_consumer(p, W)


@gluon.jit(
    do_not_specialize=[
        "dynamic",
        "n_segments",
        "n_tiles",
        "row_tiles",
        "together",
        "heads",
        "group",
        "sq",
        "sk",
        "left",
        "right",
        "n_bias",
        "bias_origin",
    ]
)
def _fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    lse_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_tiles_ptr,
    counter_ptr,
    dynamic,
    n_segments,
    n_tiles,
    row_tiles,
    together,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    unit,
    unit_log2,
    unit_rest,
    gate_desc,
    u_desc,
    table_ptr,
    sink_ptr,
    tau_ptr,
    cap_factor,
    cap_log2,
    n_bias,
    bias_origin,
    D: gl.constexpr,
    BD: gl.constexpr,
    BDV: gl.constexpr,
    BN: gl.constexpr,
    NC: gl.constexpr,
    ST: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    EVEN: gl.constexpr,
    EARLY_P: gl.constexpr,
    LATE_RESCALE: gl.constexpr,
    VARLEN: gl.constexpr,
    PINGPONG: gl.constexpr,
    SHARE_QO: gl.constexpr,
    KEEP_FIRST_MAX: gl.constexpr,
    QB: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    SLOTS: gl.constexpr = 4 if NC == 3 else NC
    q_s = gl.allocate_shared_memory(dtype, [QB * SLOTS, WM, BD], gl.NVMMASharedLayout.get_default_for([WM, BD], dtype))
    k_s = gl.allocate_shared_memory(dtype, [ST, BN, BD], gl.NVMMASharedLayout.get_default_for([BN, BD], dtype))
    v_s = gl.allocate_shared_memory(dtype, [ST, BN, BDV], gl.NVMMASharedLayout.get_default_for([BN, BDV], dtype))
    o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BDV], dtype)
    if SHARE_QO:
        o_s = smem_reinterpret(q_s, dtype, [SLOTS, WM, BDV], o_layout)
    else:
        o_s = gl.allocate_shared_memory(dtype, [SLOTS, WM, BDV], o_layout)
    u_s = None
    if u_desc is not None:
        u_s = gl.allocate_shared_memory(dtype, [SLOTS, WM, BDV], o_layout)
    gate_full = None
    if gate_desc is not None:
        gate_full = barriers(NC, 1)
    tile_s = gl.allocate_shared_memory(gl.int32, [4 * SLOT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    overflow_s = None
    if KEEP_FIRST_MAX:
        overflow_s = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        for w in gl.static_range(NC):
            overflow_s.index(w).store(gl.full([1], -1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    args = Forward(
        q_desc=q_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        o_desc=o_desc,
        gate_desc=gate_desc,
        u_desc=u_desc,
        lse_ptr=lse_ptr,
        table_ptr=table_ptr,
        sink_ptr=sink_ptr,
        tau_ptr=tau_ptr,
        cu_q_ptr=cu_q_ptr,
        cu_k_ptr=cu_k_ptr,
        cu_tiles_ptr=cu_tiles_ptr,
        counter_ptr=counter_ptr,
        q_s=q_s,
        k_s=k_s,
        v_s=v_s,
        o_s=o_s,
        u_s=u_s,
        tile_s=tile_s,
        overflow_s=overflow_s,
        q_full=barriers(NC if QB == 1 else QB * SLOTS, 1),
        q_empty=barriers(NC if QB == 1 else QB * SLOTS, 1),
        k_full=barriers(ST, 1),
        v_full=barriers(ST, 1),
        gate_full=gate_full,
        dynamic=dynamic,
        n_segments=n_segments,
        n_tiles=n_tiles,
        row_tiles=row_tiles,
        together=together,
        heads=heads,
        group=group,
        sq=sq,
        sk=sk,
        left=left,
        right=right,
        unit=unit,
        unit_log2=unit_log2,
        unit_rest=unit_rest,
        cap_factor=cap_factor,
        cap_log2=cap_log2,
        n_bias=n_bias,
        bias_origin=bias_origin,
        D=D,
        BN=BN,
        NC=NC,
        ST=ST,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        EVEN=EVEN,
        EARLY_P=EARLY_P,
        LATE_RESCALE=LATE_RESCALE,
        VARLEN=VARLEN,
        PINGPONG=PINGPONG,
        SHARE_QO=SHARE_QO,
        QB=QB,
        BIAS_KEEPS_MAX=KEEP_FIRST_MAX and table_ptr is not None and cap_factor is None,
        FAR=not HAS_LEFT,
        KEEP_FIRST_MAX=KEEP_FIRST_MAX,
        SOFTCAP=cap_factor is not None,
        BIAS=table_ptr is not None,
        SINK=sink_ptr is not None,
        GATE=gate_desc is not None,
        TAU=tau_ptr is not None,
        SAVE_U=u_desc is not None,
        V_EMPTY=K_EMPTY + ST,
        TURN=K_EMPTY + 2 * ST,
        RING_THREADS=NC * 128 + 32,
    )
    fence_async_shared()
    if NC == 2:
        gl.warp_specialize([(consumer, (args, 0)), (consumer, (args, 1)), (producer, (args,))], [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(consumer, (args, 0)), (consumer, (args, 1)), (consumer, (args, 2)), (producer, (args,))],
            [4, 4, 1],
            [160, 160, 24],
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tiles of a forward and the programs that share them; dynamic: they draw tiles from a counter."""

    config: ForwardConfig
    row_tiles: int
    n_tiles: int
    programs: int
    uneven: bool
    dynamic: bool

    @classmethod
    def of(cls, launch: Launch) -> "Schedule":
        call = launch.call
        config = forward_config(call) if call.tau is None else elastic_config(call)
        row_tiles = launch.row_tiles(config.block_m)
        n_tiles = row_tiles * launch.batch * launch.heads
        programs = min(n_tiles, multiprocessors(call.q.device)) if config.persistent else n_tiles
        uneven = call.spec.masked or call.varlen
        return cls(config, row_tiles, n_tiles, programs, uneven, uneven and config.drawn and programs < n_tiles)


def forward(call: Call, save_u: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """(y, lse, u) of a call that `why_not` accepts; u (eq. 12) with tau only, and only when asked for."""
    launch = Launch(call, choices=save_u)
    y = torch.empty_like(call.q) if launch.dv == launch.d else call.q.new_empty(*call.q.shape[:3], launch.dv)
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    u = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) if save_u and call.tau is not None else None
    if y.numel() == 0 or launch.sk == 0:
        empty = -torch.inf if call.sink is None else call.sink.float()[None, :, None].expand_as(lse)
        return y.zero_(), lse.copy_(torch.as_tensor(empty)), None if u is None else u.zero_()
    schedule = launch.once("forward", lambda: Schedule.of(launch))
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, schedule.config.block_m)
    counter = launch.counter(schedule.dynamic)
    gate = None if call.gate is None else readable(call.gate)
    table = table_of(call)
    sink, tau = (None if term is None else term.contiguous() for term in (call.sink, call.tau))

    def describe() -> dict[str, Any]:
        config, cap = schedule.config, call.spec.softcap
        # of scores; with a cap they come in base 2 already
        unit = call.scale if cap is None else LN2.value
        unit_log2 = 1.0 if cap else unit * LOG2E
        args = [
            launch.rows(call.q, 64, launch.bd),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(y, 64, launch.bdv),
            lse,
            cu_q,
            cu_k,
            first_tiles,
            counter,
            int(schedule.dynamic),
            n_segments,
            schedule.n_tiles,
            schedule.row_tiles,
            heads_together(call, config),
            *launch.geometry,
            unit,
            unit_log2,
            math.log(2.0) * single(unit_log2) - single(unit),
            *(None if x is None else launch.rows(x, 64, launch.bdv) for x in (gate, u)),
            table,
            sink,
            tau,
            cap_factor(call),
            None if cap is None else cap * LOG2E,
            None if call.bias is None else call.bias.shape[1],
            None if call.bias is None else call.spec.bias_origin,
        ]
        constants = {
            "D": launch.d,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "BN": config.block_n,
            "NC": config.consumers,
            "ST": config.stages,
            "EVEN": not schedule.uneven and launch.sk % config.block_n == 0,
            "EARLY_P": config.early_p,
            "LATE_RESCALE": config.late_rescale,
            "PINGPONG": config.pingpong,
            "SHARE_QO": share_q_and_o(config, launch.bd, launch.bdv),
            "KEEP_FIRST_MAX": config.keep_first_max and call.spec.left is None,
            "QB": config.q_buffers,
            **launch.flags,
        }
        maxnreg = 168 if config.consumers == 2 else 128
        return {"grid": (schedule.programs,), "args": args, "constants": constants, "num_warps": 4, "maxnreg": maxnreg}

    tensors = (call.q, call.k, call.v, y, lse, cu_q, cu_k, first_tiles, counter, gate, u, table, sink, tau)
    launch.start(_fwd_kernel, tensors, describe)
    return y, lse, u
