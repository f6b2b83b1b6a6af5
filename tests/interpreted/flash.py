"""A flash attention of the tests' own, written as kernels are: loop bounds, tiles, strides, and switches that break it.

Forward, dq and dk/dv are kernels apart. `BUG` is the name of what is wrong in a launch, "" for nothing: each is one line of the
kind that real kernels got wrong. It shares nothing with the mutants of the doctor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 32


@triton.jit
def _visible(i, j, sq, sk, CAUSAL: tl.constexpr, BUG: tl.constexpr):
    offset = sq - sk if BUG == "offset sign" else sk - sq
    inside = (i[:, None] < sq) & (j[None, :] < sk)
    if CAUSAL:
        inside = inside & (j[None, :] <= i[:, None] + offset)
    if BUG == "local chunk":
        half = (sq + 1) // 2
        inside = inside & (i[:, None] // half == j[None, :] // half)
    return inside


@triton.jit
def _load(base, rows, length, D: tl.constexpr, WIDTH: tl.constexpr):
    c = tl.arange(0, D)
    return tl.load(base + rows[:, None] * D + c[None, :], mask=(rows[:, None] < length) & (c[None, :] < WIDTH), other=0.0)


@triton.jit
def _load_keys(ptr, h, heads, rows, length, D: tl.constexpr, WIDTH: tl.constexpr, BSHD: tl.constexpr):
    """k or v of a head of [B, H, S, D], or of memory that is taken for [B, S, H, D]."""
    if BSHD:
        c = tl.arange(0, D)
        at = ((h // heads * length + rows[:, None]) * heads + h % heads) * D + c[None, :]
        return tl.load(ptr + at, mask=(rows[:, None] < length) & (c[None, :] < WIDTH), other=0.0)
    return _load(ptr + h * length * D, rows, length, D, WIDTH)


@triton.jit
def _end_of(i0, sq, sk, M: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr, ROUNDED: tl.constexpr):
    """Where the loop over keys of a tile of rows ends under the causal mask."""
    end = i0 + sk - sq if BEFORE else i0 + M + sk - sq
    if ROUNDED:
        # whole pairs of tiles, as a loop of two tiles a step has them
        end = end // (2 * N) * (2 * N)
    return min(sk, end)


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, lse_ptr, sq, sk, lse_stride, scale,
    CAUSAL: tl.constexpr, SINK: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    i0, h = tl.program_id(0) * M, tl.program_id(1)
    i = i0 + tl.arange(0, M)
    q = _load(q_ptr + h * sq * D, i, sq, D, D)
    m = tl.full([M], 0.0 if BUG == "maximum start" else float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINK:
        m = tl.zeros([M], tl.float32) + tl.load(sink_ptr + h)
        total = tl.full([M], 1.0, tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    end = sk
    if BUG == "key length":
        end = sq
    if CAUSAL and BUG != "offset sign":
        end = min(end, _end_of(i0, sq, sk, M, N, BUG == "bound", BUG == "bound rounded"))
    for j0 in range(0, end, N):
        j = j0 + tl.arange(0, N)
        k, v = _load(k_ptr + h * sk * D, j, end if BUG == "key length" else sk, D, D), _load(v_ptr + h * sk * D, j, sk, D, D)
        s = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        seen = _visible(i, j, sq, end if BUG == "key length" else sk, CAUSAL, BUG)
        if BUG == "diagonal unmasked" and j0 + N <= i0 + M + sk - sq:
            seen = (i[:, None] < sq) & (j[None, :] < sk)
        if BUG == "lost in head 1" and h % 2 == 1:
            seen = seen & ((j[None, :] < N) | (j[None, :] >= 2 * N))
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p, rescale = tl.exp(s - safe[:, None]), tl.exp(m - safe)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    c = tl.arange(0, D)
    tl.store(o_ptr + h * sq * D + i[:, None] * D + c[None, :], acc.to(q.dtype), mask=i[:, None] < sq)
    tl.store(lse_ptr + h * lse_stride + i, m + tl.log(total), mask=i < sq)


@triton.jit
def _delta(do_ptr, o_ptr, delta_ptr, sq, delta_stride, D: tl.constexpr, M: tl.constexpr):
    i, h = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1)
    do, o = _load(do_ptr + h * sq * D, i, sq, D, D), _load(o_ptr + h * sq * D, i, sq, D, D)
    tl.store(delta_ptr + h * delta_stride + i, tl.sum(do.to(tl.float32) * o.to(tl.float32), 1), mask=i < sq)


@triton.jit
def _rows(
    ptr, h, i, sq, stride, M: tl.constexpr, TILE_LOST: tl.constexpr, HEAD_LOST: tl.constexpr, ROW_LOST: tl.constexpr = False
):
    """lse or delta of rows i, 0 beyond the end and where a row sees nothing."""
    base = ptr if HEAD_LOST else ptr + h * stride
    at = i % M if TILE_LOST else i
    if ROW_LOST:
        at = i // M * M
    row = tl.load(base + at, mask=i < sq, other=0.0)
    return tl.where(row == float("-inf"), 0.0, row)


@triton.jit
def _dq(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, sink_ptr, dq_ptr, dsink_ptr, sq, sk, heads, stride, scale,
    CAUSAL: tl.constexpr, SINK: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BUG: tl.constexpr,
):  # fmt: skip
    i0, h = tl.program_id(0) * M, tl.program_id(1)
    i = i0 + tl.arange(0, M)
    q, do = _load(q_ptr + h * sq * D, i, sq, D, D), _load(do_ptr + h * sq * D, i, sq, D, D)
    lse = _rows(lse_ptr, h, i, sq, stride, M, BUG == "lse tile", BUG == "lse head", BUG == "lse row")
    delta = _rows(delta_ptr, h, i, sq, stride, M, BUG == "delta tile", BUG == "delta head")
    if SINK:
        share = -tl.sum(tl.where(i < sq, tl.exp(tl.load(sink_ptr + h) - lse) * delta, 0.0), 0)
        if BUG == "dsink stored":
            tl.store(dsink_ptr + h, share)
        else:
            tl.atomic_add(dsink_ptr + h, share)
    acc = tl.zeros([M, D], tl.float32)
    end = sk
    if CAUSAL and BUG != "offset sign":
        end = _end_of(i0, sq, sk, M, N, BUG == "dq bound", BUG == "dq bound rounded")
    for j0 in range(0, end, N):
        j = j0 + tl.arange(0, N)
        k = _load_keys(k_ptr, h, heads, j, sk, D, D, BUG == "k layout")
        v = _load_keys(v_ptr, h, heads, j, sk, D, D // 2 if BUG == "dq channels" else WIDTH, False)
        s = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        p = tl.where(_visible(i, j, sq, sk, CAUSAL, BUG), tl.exp(s - lse[:, None]), 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee").to(tl.float32)
        if BUG == "delta of a tile":
            delta = tl.sum(p * dp, 1)
        ds = p * (dp - delta[:, None])
        acc += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    c = tl.arange(0, D)
    tl.store(dq_ptr + h * sq * D + i[:, None] * D + c[None, :], (acc * scale).to(q.dtype), mask=i[:, None] < sq)


@triton.jit
def _dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, sq, sk, heads, stride, scale,
    CAUSAL: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr,
):  # fmt: skip
    j0, h = tl.program_id(0) * N, tl.program_id(1)
    j = j0 + tl.arange(0, N)
    k = _load_keys(k_ptr, h, heads, j, sk, D, D, BUG == "k layout")
    v = _load_keys(v_ptr, h, heads, j, sk, D, WIDTH, False)
    dk, dv = tl.zeros([N, D], tl.float32), tl.zeros([N, D], tl.float32)
    first = 0
    if CAUSAL and BUG != "offset sign":
        first = max(0, (j0 + sq - sk + (N if BUG == "dkdv bound" else 0)) // M * M)
        if BUG == "dkdv bound rounded":
            # the first tile of rows, rounded up to whole pairs
            first = (first + M) // (2 * M) * (2 * M)
    for i0 in range(first, sq, M):
        i = i0 + tl.arange(0, M)
        q, do = _load(q_ptr + h * sq * D, i, sq, D, D), _load(do_ptr + h * sq * D, i, sq, D, D)
        lse = _rows(lse_ptr, h, i, sq, stride, M, BUG == "lse tile", BUG == "lse head", BUG == "lse row")
        delta = _rows(delta_ptr, h, i, sq, stride, M, BUG == "delta tile", BUG == "delta head")
        s = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        p = tl.where(_visible(i, j, sq, sk, CAUSAL, BUG), tl.exp(s - lse[:, None]), 0.0)
        dv += tl.dot(tl.trans(p).to(do.dtype), do, input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee").to(tl.float32)
        if BUG == "delta of a tile":
            delta = tl.sum(p * dp, 1)
        ds = p * (dp - delta[:, None])
        dk += tl.dot(tl.trans(ds).to(q.dtype), q, input_precision="ieee")
    c = tl.arange(0, D)
    at = h * sk * D + j[:, None] * D + c[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(k.dtype), mask=j[:, None] < sk)
    tl.store(dv_ptr + at, dv.to(v.dtype), mask=j[:, None] < sk)


class Flash:
    """The kernels behind two functions, with one bug or none."""

    def __init__(self, bug: str = "", tile: int = TILE):
        self.bug, self.tile = bug, tile

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, sink: Tensor | None = None):
        o, lse = torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)
        if self.bug == "merge" and not causal:
            return self._in_parts(q, k, v, o, lse)
        self._forward(q, k, v, sink, o, lse, causal and self.bug != "unmasked forward")
        return o, lse

    def _in_parts(self, q, k, v, o, lse):
        """The keys in two parts, merged by exp of their lse: no common maximum is subtracted."""
        total, middle = torch.zeros_like(o, dtype=torch.float32), k.shape[2] // 2
        weight = torch.zeros_like(lse)
        for part in (slice(None, middle), slice(middle, None)):
            self._forward(q, k[:, :, part], v[:, :, part], None, o, lse, False)
            total += torch.exp(lse)[..., None] * o.float()
            weight += torch.exp(lse)
        return (total / weight[..., None]).to(q.dtype), torch.log(weight)

    def _forward(self, q, k, v, sink, o, lse, causal) -> None:
        (batch, heads, sq, d), sk, tile = q.shape, k.shape[2], self.tile
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        sinks = None if sink is None else sink.float().repeat(batch)
        _forward[triton.cdiv(sq, tile), batch * heads](
            q, k, v, sinks, o, lse, sq, sk, sq, d**-0.5,
            CAUSAL=causal, SINK=sink is not None, D=d, M=tile, N=tile, BUG=self.bug.replace("local chunk", ""),
        )  # fmt: skip

    def backward(self, do, q, k, v, o, lse, *, causal: bool = False, sink: Tensor | None = None):
        (batch, heads, sq, d), sk, tile = q.shape, k.shape[2], self.tile
        do, q, k, v, o = (x.contiguous() for x in (do, q, k, v, o))
        stride = self._padded(sq) if self.bug in ("lse padded", "delta padded") else sq
        kept = torch.zeros(batch * heads, stride, device=q.device)
        kept[:, :sq] = lse.reshape(-1, sq)
        if self.bug == "softmax again":
            self._forward(q, k, v, sink, torch.zeros_like(o), kept, False)
        causal = causal and self.bug not in ("unmasked backward", "softmax again")
        delta = torch.zeros(batch * heads, stride, device=q.device)
        rows, keys = (triton.cdiv(sq, tile), batch * heads), (triton.cdiv(sk, tile), batch * heads)
        _delta[rows](do, o, delta, sq, stride, D=d, M=tile)
        # the kernels below read with the stride of the rows, whatever was padded
        if self.bug == "lse padded":
            delta = delta[:, :sq].contiguous()
        elif self.bug == "delta padded":
            kept = kept[:, :sq].contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dsink = None if sink is None else torch.zeros(batch * heads, device=q.device)
        sinks = None if sink is None else sink.float().repeat(batch)
        width = 3 * d // 4 if self.bug == "channels" else d
        common = {"CAUSAL": causal, "WIDTH": width, "D": d, "M": tile, "N": tile, "BUG": self.bug}
        _dq[rows](q, k, v, do, kept, delta, sinks, dq, dsink, sq, sk, heads, sq, d**-0.5, SINK=sink is not None, **common)
        _dkdv[keys](q, k, v, do, kept, delta, dk, dv, sq, sk, heads, sq, d**-0.5, **common)
        gradients = {"dq": dq, "dk": dk, "dv": dv}
        return gradients if dsink is None else gradients | {"dsink": dsink.reshape(batch, heads).sum(0)}

    def _padded(self, rows: int) -> int:
        return triton.cdiv(rows, self.tile) * self.tile
