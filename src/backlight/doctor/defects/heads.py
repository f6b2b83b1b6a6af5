"""Heads, groups of heads, strides, races and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import (
    CAUSAL,
    CAUSAL_FULL,
    Defect,
    always,
    both,
    grouped,
    several_batches,
    several_heads,
    several_kv_heads,
)
from backlight.doctor.defects.mutants import Mutant, Outputs, with_call
from backlight.doctor.defects.tails import TILES

GROUPED = {"spec": {"causal": True}, "kv_heads": 2}


def _only(dim: int, index: int) -> Callable[[Tensor, Call], Tensor]:
    """dO with everything but one head or batch entry missing."""

    def gradient(dy: Tensor, call: Call) -> Tensor:
        keep = torch.zeros(dy.shape[dim], dtype=dy.dtype, device=dy.device)
        keep[index] = 1
        return dy * keep.reshape([-1 if d == dim else 1 for d in range(4)])

    return gradient


def _modulo(call: Call) -> Callable[[int, int], int]:
    return lambda h, group: h % call.k.shape[1]


def _lost_heads(call: Call) -> list[Mutant]:
    return [Mutant(gradient=_only(1, 0), detail="only head 0 receives gradients")]


def _polluted(call: Call) -> list[Mutant]:
    found = []
    for pad in sorted({-call.q.shape[2] % tile for tile in TILES} - {0}):
        if pad >= call.q.shape[2]:
            continue

        def finish(outputs: Outputs, _: Call, pad: int = pad) -> Outputs:
            if "dq" not in outputs:
                return outputs
            dq = outputs["dq"].clone()
            dq[:, 1:, :pad] = 0
            return outputs | {"dq": dq}

        found.append(Mutant(finish=finish, detail=f"the first {pad} rows"))
    return found


head_0_inputs = with_call(k=lambda call: call.k[:, :1].expand_as(call.k), v=lambda call: call.v[:, :1].expand_as(call.v))

_gqa = partial(Defect, family="gqa", needs=grouped, demo=GROUPED)
_heads = partial(Defect, family="heads", demo=CAUSAL)
_sums = partial(Defect, family="accumulation", demo=CAUSAL_FULL)
_memory = partial(Defect, family="memory", demo=CAUSAL)

DEFECTS = [
    _gqa(
        "gqa-last-writer",
        "dk and dv keep only the {detail} query head of each group: the sum over the group is missing",
        "query heads that share a key/value head overwrite each other instead of adding",
        "dk",
        "I1 and I2 fail with gain about 1/G and residual about 0.5; dq is fine",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        variants=always(Mutant(combine="last", detail="last"), Mutant(combine="first", detail="first")),
    ),
    _gqa(
        "gqa-mean",
        "dk and dv are averaged over the query heads of a group instead of summed",
        "the sum over the group is divided by the group size",
        "dk",
        "gains of dk and dv are 1/G with the residual at noise",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        variants=always(Mutant(combine="mean")),
    ),
    _gqa(
        "gqa-map",
        "query heads are assigned to key/value heads in turn (h mod Hkv) instead of in blocks (h div G)",
        "the head map differs from the usual one, consistently in forward and backward",
        "s",
        "o is wrong except where both maps agree; identities fail",
        "Reorder the query heads by the other map: the comparison must turn healthy.",
        needs=both(grouped, several_kv_heads),
        variants=lambda call: [Mutant(kv_forward=_modulo(call), kv_backward=_modulo(call))],
    ),
    _gqa(
        "gqa-map-backward",
        "the backward assigns query heads to key/value heads by h mod Hkv, the forward by h div G",
        "the head map of the backward is wrong",
        "p (bwd)",
        "I1, I2 and I3 fail; o is fine",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        needs=both(grouped, several_kv_heads),
        variants=lambda call: [Mutant(kv_backward=_modulo(call))],
    ),
    _heads(
        "heads-lost",
        "{detail}; dq, dk and dv of the others are zero",
        "the backward does not read dO beyond the first head",
        "dp",
        "gains 1, 0, 0, 0 on dq, dk and dv together; I1 and I3 hold as 0 = 0 while I2 fails",
        "Permute the heads: the head that works must stay in first place.",
        needs=several_heads,
        variants=_lost_heads,
    ),
    _heads(
        "batches-lost",
        "only the first batch entry receives gradients",
        "the grid or the batch stride of the backward covers one batch entry",
        "dp",
        "gradients are 0 for every batch entry but the first",
        "Permute the batch: the entry that works must stay in first place.",
        needs=several_batches,
        variants=always(Mutant(gradient=_only(0, 0))),
    ),
    _heads(
        "head0-do",
        "the backward reads dO of head 0 for every head",
        "the head index or head stride of dO is missing in the backward",
        "dp",
        "head 0 is right; the others have gains near 0; I2 and I3 fail",
        "Make dO equal in all heads: the comparison must turn healthy.",
        needs=several_heads,
        variants=always(Mutant(gradient=lambda dy, call: dy[:, :1].expand_as(dy))),
    ),
    _heads(
        "batch0-do",
        "the backward reads dO of the first batch entry for every batch entry",
        "the batch stride of dO is missing in the backward",
        "dp",
        "the first batch entry is right, the others are not",
        "Make dO equal in all batch entries: the comparison must turn healthy.",
        needs=several_batches,
        variants=always(Mutant(gradient=lambda dy, call: dy[:1].expand_as(dy))),
    ),
    _heads(
        "head-shift-do",
        "the backward reads dO of the previous head",
        "the head index of dO is off by one",
        "dp",
        "all gradients are wrong in every head; I2 and I3 fail",
        "Make dO equal in all heads: the comparison must turn healthy.",
        needs=several_heads,
        variants=always(Mutant(gradient=lambda dy, call: dy.roll(1, dims=1))),
    ),
    _heads(
        "head0-kv",
        "the backward reads k and v of head 0 for every head",
        "the head offset of k and v is missing in the backward",
        "p (bwd)",
        "head 0 is right; I2 and I3 fail in the others; o is fine",
        "Make k and v equal in all heads: the comparison must turn healthy.",
        confirm="mutant; permuted heads",
        needs=several_kv_heads,
        variants=always(Mutant(sees_backward=head_0_inputs)),
    ),
    _heads(
        "head-pollution",
        "dq of {detail} of every head but the first is overwritten by the padding of the head before it",
        "rows beyond the end of a head are stored and land in the next head",
        "dq",
        "the first rows of heads >= 1 are wrong, as many as the padding of the last tile",
        "Choose a length that is a multiple of the tile: the comparison must turn healthy.",
        confirm="another length moves the number of wrong rows",
        needs=lambda call: several_heads(call) and not call.varlen and bool(call.q.shape[2] % 128),
        variants=_polluted,
    ),
    _heads(
        "do-stride",
        "dO is read with strides that are not its own: gradients change when only the memory layout of dO does",
        "the kernel is given q's strides (or assumes a contiguous dO); out.sum().backward() delivers strides 0",
        "dp",
        "another layout of the same dO gives other gradients",
        "Pass dO.contiguous(): the comparison must turn healthy.",
        confirm="a contiguous copy of dO repairs it",
        broken="do_stride",
    ),
    _heads(
        "input-stride",
        "q, k or v is read with strides that are not its own: results change when only the memory layout does",
        "the kernel assumes contiguous inputs and does not check",
        "s",
        "another layout of the same q, k, v gives other results",
        "Pass q.contiguous(), k.contiguous(), v.contiguous(): the comparison must turn healthy.",
        confirm="contiguous copies repair it",
        broken="input_stride",
        demo=CAUSAL_FULL,
    ),
    _sums(
        "do-in-flight",
        "the backward does not wait for dO: it reads it while the kernel that writes it is still running",
        "the backward runs on another stream, or copies dO there, without waiting for the stream that produces it",
        "dp",
        "a dO that is written at the last moment gives other gradients than one that lay there for long",
        "Call torch.cuda.synchronize() before the backward: the comparison must turn healthy.",
        confirm="a synchronisation before the backward repairs it",
        broken="side_stream",
        demo=CAUSAL | {"level": "full", "device": "cuda"},
    ),
    _sums(
        "race-lost-update",
        "contributions get lost from run to run: two writers update the same address without an atomic",
        "read, add, write from several programs; the last writer wins",
        "dq",
        "repeats differ by far more than reordering; the exact probe is off by whole contributions",
        "Run one program at a time (or use atomics): repeats must become identical.",
        confirm="exact-arithmetic probe: harmless reordering vanishes there, a lost update does not",
        broken="race",
    ),
    _sums(
        "random-numbers",
        "results follow torch's random numbers: dropout is on, or another term that is drawn",
        "a module in train mode, or a dropout rate above 0",
        "o",
        "repeats differ; after torch.manual_seed equal seeds give equal bits, and another seed others",
        "Call it in eval mode, with a dropout rate of 0: the comparison must turn healthy.",
        confirm="the same seed before each run gives the same bits, another seed others",
        broken="dropped",
    ),
    _sums(
        "atomics-reorder",
        "dq differs in the last bits from run to run: atomic adds in varying order, harmless",
        "floating-point sums in another order each time",
        "dq",
        "only dq varies, by a few units in the last place; exact-arithmetic inputs give equal bits",
        "Ask for deterministic mode: repeats must become identical.",
        confirm="exact-arithmetic probe passes",
        broken="atomics",
        severity="note",
    ),
    _memory(
        "accumulates-over-calls",
        "gradients of an earlier call are still in the buffer: a zero dO does not give zero gradients",
        "the output buffer is not cleared before accumulation",
        "dq",
        "do = 0 gives gradients that are not 0; a second identical call gives another result",
        "Clear the gradient buffer before the call: the comparison must turn healthy.",
        confirm="zero-dO probe",
        broken="accumulates",
    ),
    _memory(
        "stale-rows",
        "part of the output is never written: it holds whatever was in memory before",
        "an output allocated without initialisation is not fully stored, usually in the last partial tile",
        "dq",
        "filling fresh memory with NaN, or with 1e4, changes the result",
        "Allocate with zeros instead of empty: the wrong values must become 0.",
        confirm="poisoned allocations; the rows are a tail tile or lie beyond the last segment",
        broken="stale_rows",
    ),
    _memory(
        "nan-cell",
        "a few values are NaN or infinite",
        "0/0, inf - inf, or an overflow in a few cells; rules built on max() skip NaN and pass it",
        "dk",
        "non-finite values, counted before any norm",
        "Run the same cell alone: the NaN must persist, or it comes from its neighbours.",
        confirm="position of the values",
        broken="nan_cell",
    ),
    _memory(
        "input-changed",
        "the call changes its own inputs",
        "an in-place operation acts on a tensor the caller still owns",
        "s",
        "inputs differ bit for bit after the call",
        "Pass clones: the caller's tensors must stay as they were.",
        confirm="comparison with copies taken before",
        broken="in_place",
    ),
    _memory(
        "cached-result",
        "the result of an earlier call is returned: outputs do not follow the inputs",
        "a cache is keyed by shape or address and not by content",
        "o",
        "negating v does not negate o",
        "Call with other values of the same shape: o must change.",
        confirm="the new output equals the old one bit for bit",
        broken="cached",
    ),
    _memory(
        "gradient-missing",
        "the output is cut off from the inputs: no gradient arrives",
        "the output is detached, or an input takes no part in the graph",
        "dq",
        "autograd returns no gradient",
        "Print out.grad_fn: it is None, or its graph does not reach the input.",
        confirm="grad_fn of the output",
        broken="detached",
    ),
    _memory(
        "gradient-zero",
        "the gradients are all zero",
        "the backward returns buffers it never filled, or a mask removes everything",
        "dp",
        "gains 0 on dq, dk and dv in every head",
        "Print the norm of dO inside the backward: it is 0 there and not outside, or the name is wrong.",
        variants=always(Mutant(gradient=lambda dy, call: torch.zeros_like(dy))),
    ),
]
