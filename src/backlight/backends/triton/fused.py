"""The whole backward in one kernel, for short sequences that share a pair bias: a program owns a head and goes from one
batch entry to the next, in a [keys, rows] tile that holds all of them.

Its part of dpair_bias stays in registers; `_pair_sums_kernel` adds the parts up in a fixed order. delta is made on the way.
Five products a pair instead of seven, one exponential instead of three.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.config import width_of
from backlight.backends.triton.dpair import Parts, summed
from backlight.backends.triton.launch import Launch, compact, rows_of
from backlight.backends.triton.loads import at, store_tile, stream_tile
from backlight.backends.triton.pair import Pair, pair_tile, store_pair
from backlight.backends.triton.primitives import LOG2E, logits_of, tile_gradient

# programs that run side by side on a large card
SLOTS = 396
WIDEST = 32
LARGEST = tl.constexpr(3.0e38)


class Given(NamedTuple):
    """What the kernel reads: rows of q, k, v, y, do, and the rest by pointers; dlse is None where there is none."""

    q: Any
    k: Any
    v: Any
    y: Any
    do: Any
    lse_ptr: Any
    dlse_ptr: Any
    pair: Any


class Made(NamedTuple):
    """The gradients; dpair is None where nobody asks for it."""

    dq: Any
    dk: Any
    dv: Any
    dpair: Any


@triton.jit(do_not_specialize=["sq", "sk"])
def _fused_kernel(
    given, made, q_desc, y_desc, do_desc, k_desc, v_desc, pair_desc, scale, geometry, sq, sk,
    V: tl.constexpr, PAIR_TMA: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program (slot, entry of the bias * heads + head). dpair: [slots,Bb,Hq,Sq,Sk], its batch the first two axes."""
    pair = given.pair
    TMA: tl.constexpr = q_desc is not None
    entry = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    rows = tl.arange(0, BM)
    exists = rows < sq
    keys = tl.arange(0, BN)[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for member in range(tl.program_id(0), pair.sharing, tl.num_programs(0)):
        b = entry * pair.sharing + member
        q = stream_tile(given.q, q_desc, (b, h, 0), 0, sq, BM, V.D, V.BD, TMA)
        k = stream_tile(given.k, k_desc, (b, h, 0), 0, sk, BN, V.D, V.BD, TMA)
        v = stream_tile(given.v, v_desc, (b, h, 0), 0, sk, BN, V.DV, V.BDV, TMA)
        do = stream_tile(given.do, do_desc, (b, h, 0), 0, sq, BM, V.DV, V.BDV, TMA)
        y = stream_tile(given.y, y_desc, (b, h, 0), 0, sq, BM, V.DV, V.BDV, TMA)
        offset = tl.cast(b * geometry.heads + h, tl.int64) * sq + rows
        lse = tl.load(given.lse_ptr + offset, mask=exists, other=float("inf"))
        # finite where a row sees nothing: its bias is -inf
        minus_lse2 = tl.minimum(-lse * LOG2E, LARGEST)[None, :]
        t = tl.dot(k, tl.trans(q), input_precision=V.PRECISION)
        dp = tl.dot(v, tl.trans(do), input_precision=V.PRECISION)
        delta = tl.sum(do.to(tl.float32) * y.to(tl.float32), 1)
        if given.dlse_ptr is not None:
            dlse = tl.load(given.dlse_ptr + offset, mask=exists, other=0.0).to(tl.float32)
            delta -= tl.where(lse == float("-inf"), 0.0, dlse)
        s, slope = logits_of(t, geometry.unit, minus_lse2, geometry, V, "apart")
        # read again: what is kept in registers leaves no room for it
        s += pair_tile(pair, pair_desc, (b, h, 0, 0), sq, V, PAIR_TMA, BM, BN, True) * LOG2E
        p = tl.exp2(s)
        if not WHOLE:
            p = tl.where(keys < sk, p, 0.0)
        dv = tl.dot(p.to(do.dtype), do, input_precision=V.PRECISION)
        ds, dx = tile_gradient(p, p, dp, delta[None, :], slope, V)
        if made.dpair is not None:
            total += ds
        dx = dx.to(q.dtype)
        dk = tl.dot(dx, q, input_precision=V.PRECISION)
        dq = tl.dot(tl.trans(dx), k, input_precision=V.PRECISION)
        store_tile(at(made.dv, b, h, 0), made.dv.row, sk, dv, BN, V.DV, V.BDV)
        store_tile(at(made.dk, b, h, 0), made.dk.row, sk, dk * scale, BN, V.D, V.BD)
        store_tile(at(made.dq, b, h, 0), made.dq.row, sq, dq * scale, BM, V.D, V.BD)
    if made.dpair is not None:
        entries = tl.num_programs(1) // geometry.heads
        store_pair(made.dpair, (tl.program_id(0) * entries + entry, h, 0, 0), sq, tl.trans(total), BM, BN)


def fits(launch: Launch) -> bool:
    """Whether a head is one tile, which the other kernels would visit one by one too, nothing leaves pairs out and no other
    term has a gradient."""
    call, spec = launch.call, launch.call.spec
    if not spec.pair_bias or width_of(call) > WIDEST or call.q.dtype == torch.float32 or call.group > 1:
        return False
    if spec.masked or spec.rows or spec.bias or spec.sink or spec.gate or spec.keeps_u or call.varlen or call.part is not None:
        return False
    config = launch.config("fused")
    return 0 < call.q.shape[2] <= config.block_m and 0 < call.k.shape[2] <= config.block_n and call.q.numel() > 0


def fused_of(
    launch: Launch, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor | None, want_dpair: bool
) -> tuple[dict[str, Tensor], Tensor | None]:
    """dq, dk and dv by name, and dpair_bias."""
    call = launch.call
    assert call.pair_bias is not None
    config = launch.config("fused")
    y, dy = launch.readable(y), launch.readable(dy)
    dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    heads, sq, sk = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    entries, bias_heads = call.pair_bias.shape[:2]
    slots = max(1, min(SLOTS // (entries * heads), call.sharing))
    pairs = sq * sk
    parts = torch.empty(slots, entries, heads, pairs, dtype=torch.float32, device=lse.device) if want_dpair else None
    dpair = None if parts is None else Pair(parts, heads * pairs, pairs, sk, 1, 1, sq, sk)
    pair_tma, (pair, pair_desc) = launch.pair(config)
    own = (rows_of(x) for x in (launch.q, launch.k, launch.v, y, dy))
    launch.start(
        _fused_kernel,
        (slots, entries * heads),
        Given(*own, lse, None if dlse is None else compact(dlse), pair),
        Made(*(rows_of(x) for x in (dq, dk, dv)), dpair),
        *launch.all_described(config, (launch.q, y, dy), (launch.k, launch.v)),
        pair_desc,
        float(call.scale),
        launch.geometry,
        *(sq, sk),
        V=launch.variant,
        PAIR_TMA=pair_tma,
        WHOLE=launch.whole_tiles(config.block_n),
        **config.launch,
    )
    out = {"dq": dq, "dk": dk, "dv": dv}
    if parts is None:
        return out, None
    own_heads = heads // bias_heads
    members = Parts(parts, heads * pairs, pairs, entries * heads * pairs, pairs, own_heads)
    return out, summed(launch, members, slots * own_heads, 32)
