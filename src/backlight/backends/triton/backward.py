"""Backward: a pre-pass over rows, a kernel that owns rows (dq, dbias) and one that owns keys (dk, dv): eq. 33, split form.

Nothing is summed across programs, so every result repeats bitwise. dbias: a tile's diagonals are rotated into columns with one
gather and summed, finished distances go to a buffer row owned by the program, and torch sums the buffer in fixed order.
Parity contract: tests/conformance.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.launch import Launch, unit_stride
from backlight.backends.triton.primitives import (
    LOG2E,
    PHASES,
    elastic,
    key_phase,
    load_rows,
    locate,
    logits,
    row_phase,
    store_rows,
    visible,
    visible_count,
)
from backlight.call import Call


@triton.jit
def _bwd_delta_kernel(
    y_ptr,
    dy_ptr,
    u_ptr,
    gate_ptr,
    lse_ptr,
    dlse_ptr,
    tau_ptr,
    do_ptr,
    dgate_ptr,
    delta_ptr,
    mean_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_tiles_ptr,
    n_segments,
    y_strides,
    u_strides,
    dy_strides,
    gate_strides,
    do_strides,
    dgate_strides,
    dlse_strides,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    factor,
    cap2,
    n_bias,
    bias_origin,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_TAU: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """do and dgate (eq. 18), delta - dlse (eq. 20, 27, 28), and with tau the mean surviving gradient g / n per row (eq. 24)."""
    tile = tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    rows_total = sq
    q_start = 0
    if VARLEN:
        z, tile = locate(tile, cu_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        q_start = tl.load(cu_q_ptr + z)
        sq = tl.load(cu_q_ptr + z + 1) - q_start
        sk = tl.load(cu_k_ptr + z + 1) - tl.load(cu_k_ptr + z)
    i0 = tile * BM
    row_base = (i0 + q_start).to(tl.int64)
    rows = tl.arange(0, BM)
    n_rows = sq - i0
    y_ptr += b * y_strides[0] + h * y_strides[1] + row_base * y_strides[2]
    y = load_rows(y_ptr, y_strides[2], rows, n_rows, DV, BDV).to(tl.float32)
    dy_ptr += b * dy_strides[0] + h * dy_strides[1] + row_base * dy_strides[2]
    do = load_rows(dy_ptr, dy_strides[2], rows, n_rows, DV, BDV).to(tl.float32)
    delta = tl.sum(do * y, 1)
    if HAS_GATE:
        gate_ptr += b * gate_strides[0] + h * gate_strides[1] + row_base * gate_strides[2]
        weight = tl.sigmoid(load_rows(gate_ptr, gate_strides[2], rows, n_rows, DV, BDV).to(tl.float32))
        dgate_ptr += b * dgate_strides[0] + h * dgate_strides[1] + row_base * dgate_strides[2]
        store_rows(dgate_ptr, dgate_strides[2], rows, n_rows, do * y * (1 - weight), DV, BDV)
        do = do * weight
        do_ptr += b * do_strides[0] + h * do_strides[1] + row_base * do_strides[2]
        store_rows(do_ptr, do_strides[2], rows, n_rows, do, DV, BDV)
    row_offset = (b * heads + h) * rows_total + row_base
    if HAS_TAU:
        u_ptr += b * u_strides[0] + h * u_strides[1] + row_base * u_strides[2]
        u = load_rows(u_ptr, u_strides[2], rows, n_rows, DV, BDV).to(tl.float32)
        n = visible_count(i0 + rows + sk - sq, sk, left, right, HAS_LEFT, HAS_RIGHT)
        mean = tl.sum(do * u, 1) / tl.maximum(n, 1)
        delta -= tl.load(tau_ptr + h).to(tl.float32) * mean
        tl.store(mean_ptr + row_offset + rows, mean, mask=rows < n_rows)
    if HAS_DLSE:
        lse = tl.load(lse_ptr + row_offset + rows, mask=rows < n_rows, other=0.0)
        dlse_ptr += b * dlse_strides[0] + h * dlse_strides[1] + row_base * dlse_strides[2]
        dlse = tl.load(dlse_ptr + rows * dlse_strides[2], mask=rows < n_rows, other=0.0).to(tl.float32)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)
    tl.store(delta_ptr + row_offset + rows, delta, mask=rows < n_rows)


@triton.jit
def _row_lse2(lse_ptr, rows, n_rows):
    """Base-2 lse of rows; +inf where a row does not exist or sees nothing, so that its p is 0."""
    lse = tl.load(lse_ptr + rows, mask=rows < n_rows, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def _tile_gradient(
    t,
    dp,
    position,
    key,
    lse2,
    delta,
    n,
    tau,
    bias_ptr,
    sk,
    left,
    right,
    factor,
    cap2,
    n_bias,
    bias_origin,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_TAU: tl.constexpr,
    MASK: tl.constexpr,
):
    """(a, ds, dx) of a tile in either orientation: eq. 33 from the raw products t = q.k and dp = do.v."""
    s2, capped = logits(t, position, key, bias_ptr, factor, cap2, n_bias, bias_origin, HAS_SOFTCAP, BIAS)
    p = tl.exp2(s2 - lse2)
    a = p
    if MASK or HAS_TAU:
        seen = visible(position, key, sk, left, right, HAS_LEFT, HAS_RIGHT)
        p = tl.where(seen, p, 0.0)
        a = p
    if HAS_TAU:
        p = tl.where(lse2 == float("inf"), 0.0, p)
        p, a, m = elastic(p, seen & (lse2 != float("inf")), n, tau, HAS_SINK)
        dp = tl.where(m, dp, 0.0)
    ds = p * (dp - delta)
    dx = ds
    if HAS_SOFTCAP:
        dx = ds * (1.0 - capped * capped)
    return a, ds, dx


@triton.jit
def _bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    tau_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    partial_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_tiles_ptr,
    n_segments,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dq_strides,
    scale,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    factor,
    cap2,
    n_bias,
    bias_origin,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_TAU: tl.constexpr,
    HAS_GATE: tl.constexpr,
    WANT_DBIAS: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    program = tl.program_id(1) * tl.num_programs(0) + tile
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    rows_total = sq
    q_start = 0
    k_start = 0
    if VARLEN:
        z, tile = locate(tile, cu_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        q_start = tl.load(cu_q_ptr + z)
        k_start = tl.load(cu_k_ptr + z)
        sq = tl.load(cu_q_ptr + z + 1) - q_start
        sk = tl.load(cu_k_ptr + z + 1) - k_start
    elif HAS_RIGHT:
        tile = tl.num_programs(0) - 1 - tile
    i0 = tile * BM
    row_base = (i0 + q_start).to(tl.int64)
    key_base = (tile * 0 + k_start).to(tl.int64)
    g = h // group
    q_ptr += b * q_strides[0] + h * q_strides[1] + row_base * q_strides[2]
    do_ptr += b * do_strides[0] + h * do_strides[1] + row_base * do_strides[2]
    dq_ptr += b * dq_strides[0] + h * dq_strides[1] + row_base * dq_strides[2]
    k_ptr += b * k_strides[0] + g * k_strides[1] + key_base * k_strides[2]
    v_ptr += b * v_strides[0] + g * v_strides[1] + key_base * v_strides[2]
    bias_ptr += h * n_bias
    partial_ptr += program.to(tl.int64) * n_bias

    rows = tl.arange(0, BM)
    n_rows = sq - i0
    first_position = i0 + sk - sq
    last_position = tl.minimum(i0 + BM, sq) - 1 + sk - sq
    position = (first_position + rows)[:, None]
    row_offset = (b * heads + h) * rows_total + row_base
    q = load_rows(q_ptr, q_strides[2], rows, n_rows, D, BD)
    do = load_rows(do_ptr, do_strides[2], rows, n_rows, DV, BDV)
    lse2 = _row_lse2(lse_ptr + row_offset, rows, n_rows)[:, None]
    delta = tl.load(delta_ptr + row_offset + rows, mask=rows < n_rows, other=0.0)[:, None]
    tau = 0.0
    n = position * 0
    if HAS_TAU:
        tau = tl.load(tau_ptr + h).to(tl.float32)
        n = visible_count(position, sk, left, right, HAS_LEFT, HAS_RIGHT)
    dq = tl.zeros([BM, BD], tl.float32)
    # unfinished diagonal sums, by distance from the top of the next tile
    carry = tl.zeros([BN], tl.float32)
    lanes = tl.arange(0, BN)
    turn = (BM - 1 - rows)[:, None]
    for PHASE in tl.static_range(PHASES):
        if (HAS_LEFT or PHASE != 0) and (HAS_BIAS or (PHASE != 2 and PHASE != 3)):
            start, stop = key_phase(
                PHASE, first_position, last_position, sk, left, right, n_bias, bias_origin, BN, HAS_LEFT, HAS_RIGHT, HAS_BIAS
            )
            for j0 in range(start, stop, BN):
                keys = j0 + tl.arange(0, BN)
                k = load_rows(k_ptr, k_strides[2], keys, sk, D, BD)
                v = load_rows(v_ptr, v_strides[2], keys, sk, DV, BDV)
                t = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                BIAS: tl.constexpr = HAS_BIAS and PHASE != 1 and PHASE != 3
                MASK: tl.constexpr = PHASE == 0 or PHASE == 4
                _, ds, dx = _tile_gradient(
                    t, dp, position, keys[None, :], lse2, delta, n, tau, bias_ptr, sk, left, right, factor, cap2, n_bias,
                    bias_origin, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS, HAS_SINK, HAS_TAU, MASK,
                )  # fmt: skip
                dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=PRECISION)
                if WANT_DBIAS and BIAS:
                    # cell (i, j) lies on diagonal x = turn_i + j; rotated, x mod BN is its column
                    rotated = tl.gather(ds, (lanes[None, :] - turn + BN) % BN, 1)
                    finished = lanes[None, :] >= turn
                    column = first_position + BM - 1 - j0 - lanes + bias_origin
                    sums = carry + tl.sum(tl.where(finished, rotated, 0.0), 0)
                    tl.store(partial_ptr + column, sums, mask=(column >= 0) & (column < n_bias))
                    carry = tl.sum(tl.where(finished, 0.0, rotated), 0)
            if WANT_DBIAS and (PHASE == 1 or PHASE == 3):  # noqa: SIM102 - one test is the compiler's, the other the kernel's
                # outside the table nothing is summed: what is pending ends here (before the table it lies outside as well)
                if stop > start:
                    column = first_position + BM - 1 - start - lanes + bias_origin
                    tl.store(partial_ptr + column, carry, mask=(column >= 0) & (column < n_bias) & (lanes < BM - 1))
                    carry = carry * 0
            if WANT_DBIAS and PHASE == 4:
                column = first_position + BM - 1 - stop - lanes + bias_origin
                tl.store(partial_ptr + column, carry, mask=(column >= 0) & (column < n_bias) & (lanes < BM - 1))
    store_rows(dq_ptr, dq_strides[2], rows, n_rows, dq * scale, D, BD)


@triton.jit
def _bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    tau_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_tiles_ptr,
    n_segments,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dk_strides,
    dv_strides,
    scale,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    factor,
    cap2,
    n_bias,
    bias_origin,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_TAU: tl.constexpr,
    HAS_GATE: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_heads = heads // group
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    g = (tl.program_id(1) % kv_heads).to(tl.int64)
    rows_total = sq
    q_start = 0
    k_start = 0
    if VARLEN:
        z, tile = locate(tile, cu_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        q_start = tl.load(cu_q_ptr + z)
        k_start = tl.load(cu_k_ptr + z)
        sq = tl.load(cu_q_ptr + z + 1) - q_start
        sk = tl.load(cu_k_ptr + z + 1) - k_start
    j0 = tile * BN
    row_base = (tile * 0 + q_start).to(tl.int64)
    key_base = (j0 + k_start).to(tl.int64)
    k_ptr += b * k_strides[0] + g * k_strides[1] + key_base * k_strides[2]
    v_ptr += b * v_strides[0] + g * v_strides[1] + key_base * v_strides[2]
    dk_ptr += b * dk_strides[0] + g * dk_strides[1] + key_base * dk_strides[2]
    dv_ptr += b * dv_strides[0] + g * dv_strides[1] + key_base * dv_strides[2]
    lanes = tl.arange(0, BN)
    n_keys = sk - j0
    keys = (j0 + lanes)[:, None]
    last_key = tl.minimum(j0 + BN, sk) - 1
    shift = sk - sq
    k = load_rows(k_ptr, k_strides[2], lanes, n_keys, D, BD)
    v = load_rows(v_ptr, v_strides[2], lanes, n_keys, DV, BDV)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BDV], tl.float32)
    for member in range(group):
        h = g * group + member
        q_head = q_ptr + b * q_strides[0] + h * q_strides[1] + row_base * q_strides[2]
        do_head = do_ptr + b * do_strides[0] + h * do_strides[1] + row_base * do_strides[2]
        row_offset = (b * heads + h) * rows_total + row_base
        tau = 0.0
        if HAS_TAU:
            tau = tl.load(tau_ptr + h).to(tl.float32)
        for PHASE in tl.static_range(PHASES):
            if (HAS_RIGHT or PHASE != 0) and (HAS_BIAS or (PHASE != 2 and PHASE != 3)):
                start, stop = row_phase(
                    PHASE, j0, last_key, sq, sk, left, right, n_bias, bias_origin, BM, HAS_LEFT, HAS_RIGHT, HAS_BIAS
                )
                for i0 in range(start, stop, BM):
                    rows = i0 + tl.arange(0, BM)
                    position = (rows + shift)[None, :]
                    q = load_rows(q_head, q_strides[2], rows, sq, D, BD)
                    do = load_rows(do_head, do_strides[2], rows, sq, DV, BDV)
                    lse2 = _row_lse2(lse_ptr + row_offset, rows, sq)[None, :]
                    delta = tl.load(delta_ptr + row_offset + rows, mask=rows < sq, other=0.0)[None, :]
                    n = position * 0
                    if HAS_TAU:
                        n = visible_count(position, sk, left, right, HAS_LEFT, HAS_RIGHT)
                    t = tl.dot(k, tl.trans(q), input_precision=PRECISION)
                    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                    BIAS: tl.constexpr = HAS_BIAS and PHASE != 1 and PHASE != 3
                    MASK: tl.constexpr = PHASE == 0 or PHASE == 4
                    a, _, dx = _tile_gradient(
                        t, dp, position, keys, lse2, delta, n, tau, bias_ptr + h * n_bias, sk, left, right, factor, cap2,
                        n_bias, bias_origin, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BIAS, HAS_SINK, HAS_TAU, MASK,
                    )  # fmt: skip
                    dv = tl.dot(a.to(do.dtype), do, dv, input_precision=PRECISION)
                    dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=PRECISION)
    store_rows(dk_ptr, dk_strides[2], lanes, n_keys, dk * scale, D, BD)
    store_rows(dv_ptr, dv_strides[2], lanes, n_keys, dv, DV, BDV)


def backward(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    launch = Launch(call)
    out: dict[str, Tensor] = {}
    do, delta, mean = _prepass(launch, y, lse, u, dy, dlse, out)
    if call.tau is not None:
        out["dtau"] = mean.sum(dim=(0, 2)).to(call.tau.dtype)
    if call.sink is not None:
        p_sink = torch.exp(call.sink.float()[None, :, None] - lse)
        out["dsink"] = -(p_sink * delta).sum(dim=(0, 2)).to(call.sink.dtype)
    if needs & {"dq", "dbias"}:
        _dq(launch, do, lse, delta, "dbias" in needs, out)
    if needs & {"dk", "dv"}:
        _dkdv(launch, do, lse, delta, out)
    return {name: out[name] for name in needs}


def _prepass(
    launch: Launch, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, out: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    call = launch.call
    y, dy = unit_stride(y), unit_stride(dy)
    u = y if u is None else unit_stride(u)
    delta = torch.empty_like(lse)
    mean = torch.empty_like(lse) if call.tau is not None else delta
    do, dgate = dy, dy
    if call.gate is not None:
        do = launch.empty_rows(dy.shape[-1])
        dgate = out["dgate"] = torch.empty_like(call.gate)
    block = 64
    grid = launch.row_grid(block)
    if grid[0] == 0 or grid[1] == 0:
        return do, delta, mean
    _bwd_delta_kernel[grid](
        y,
        dy,
        u,
        launch.gate,
        lse,
        lse if dlse is None else dlse,
        launch.tau,
        do,
        dgate,
        delta,
        mean,
        *launch.packing_rows(block),
        y.stride()[:3],
        u.stride()[:3],
        dy.stride()[:3],
        launch.strides("gate"),
        do.stride()[:3],
        dgate.stride()[:3],
        (lse if dlse is None else dlse).stride(),
        *launch.geometry,
        BM=block,
        HAS_DLSE=dlse is not None,
        **launch.flags(),
        num_warps=4,
    )
    return do, delta, mean


def _dq(launch: Launch, do: Tensor, lse: Tensor, delta: Tensor, want_dbias: bool, out: dict[str, Tensor]) -> None:
    call = launch.call
    config = launch.config("dq")
    grid = launch.row_grid(config.block_m)
    dq = out["dq"] = torch.empty_like(call.q)
    batch, heads = call.q.shape[:2]
    partial = dq
    if want_dbias:
        assert call.bias is not None
        assert config.block_m <= config.block_n, "a diagonal must end within two neighbouring tiles"
        partial = torch.zeros(batch, heads, grid[0], call.bias.shape[1], dtype=torch.float32, device=dq.device)
    if grid[0] and grid[1]:
        _bwd_dq_kernel[grid](
            launch.q,
            launch.k,
            launch.v,
            launch.bias,
            launch.tau,
            do,
            lse,
            delta,
            dq,
            partial,
            *launch.packing_rows(config.block_m),
            launch.strides("q"),
            launch.strides("k"),
            launch.strides("v"),
            do.stride()[:3],
            dq.stride()[:3],
            call.scale,
            *launch.geometry,
            BM=config.block_m,
            BN=config.block_n,
            WANT_DBIAS=want_dbias,
            **launch.flags(),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    if want_dbias:
        assert call.bias is not None
        out["dbias"] = partial.sum(dim=(0, 2)).to(call.bias.dtype)


def _dkdv(launch: Launch, do: Tensor, lse: Tensor, delta: Tensor, out: dict[str, Tensor]) -> None:
    call = launch.call
    config = launch.config("dkdv")
    dk, dv = out["dk"], out["dv"] = torch.empty_like(call.k), torch.empty_like(call.v)
    grid = launch.key_grid(config.block_n)
    if not (grid[0] and grid[1]):
        return
    _bwd_dkdv_kernel[grid](
        launch.q,
        launch.k,
        launch.v,
        launch.bias,
        launch.tau,
        do,
        lse,
        delta,
        dk,
        dv,
        *launch.packing_keys(config.block_n),
        launch.strides("q"),
        launch.strides("k"),
        launch.strides("v"),
        do.stride()[:3],
        dk.stride()[:3],
        dv.stride()[:3],
        call.scale,
        *launch.geometry,
        BM=config.block_m,
        BN=config.block_n,
        **launch.flags(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
