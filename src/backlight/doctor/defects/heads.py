"""Heads, groups of heads, strides, races and memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, Defect, always, grouped, several_batches, several_heads
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

DEFECTS = [
    Defect(
        "gqa-last-writer",
        "dk and dv keep only the {detail} query head of each group: the sum over the group is missing",
        "query heads that share a key/value head overwrite each other instead of adding",
        "gqa",
        "dk",
        "I1 and I2 fail with gain about 1/G and residual about 0.5; dq is fine",
        "mutant",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        needs=grouped,
        variants=always(Mutant(combine="last", detail="last"), Mutant(combine="first", detail="first")),
        demo=GROUPED,
    ),
    Defect(
        "gqa-mean",
        "dk and dv are averaged over the query heads of a group instead of summed",
        "the sum over the group is divided by the group size",
        "gqa",
        "dk",
        "gains of dk and dv are 1/G with the residual at noise",
        "mutant",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        needs=grouped,
        variants=always(Mutant(combine="mean")),
        demo=GROUPED,
    ),
    Defect(
        "gqa-map",
        "query heads are assigned to key/value heads in turn (h mod Hkv) instead of in blocks (h div G)",
        "the head map differs from the usual one, consistently in forward and backward",
        "gqa",
        "s",
        "o is wrong except where both maps agree; identities fail",
        "mutant",
        "Reorder the query heads by the other map: the comparison must turn healthy.",
        needs=lambda call: call.group > 1 and call.k.shape[1] > 1,
        variants=lambda call: [Mutant(kv_forward=_modulo(call), kv_backward=_modulo(call))],
        demo=GROUPED,
    ),
    Defect(
        "gqa-map-backward",
        "the backward assigns query heads to key/value heads by h mod Hkv, the forward by h div G",
        "the head map of the backward is wrong",
        "gqa",
        "p (bwd)",
        "I1, I2 and I3 fail; o is fine",
        "mutant",
        "Run with one query head per key/value head: the comparison must turn healthy.",
        needs=lambda call: call.group > 1 and call.k.shape[1] > 1,
        variants=lambda call: [Mutant(kv_backward=_modulo(call))],
        demo=GROUPED,
    ),
    Defect(
        "heads-lost",
        "{detail}; dq, dk and dv of the others are zero",
        "the backward does not read dO beyond the first head",
        "heads",
        "dp",
        "gains 1, 0, 0, 0 on dq, dk and dv together; I1 and I3 hold as 0 = 0 while I2 fails",
        "mutant",
        "Permute the heads: the head that works must stay in first place.",
        needs=several_heads,
        variants=_lost_heads,
        demo=CAUSAL,
    ),
    Defect(
        "batches-lost",
        "only the first batch entry receives gradients",
        "the grid or the batch stride of the backward covers one batch entry",
        "heads",
        "dp",
        "gradients are 0 for every batch entry but the first",
        "mutant",
        "Permute the batch: the entry that works must stay in first place.",
        needs=several_batches,
        variants=always(Mutant(gradient=_only(0, 0))),
        demo=CAUSAL,
    ),
    Defect(
        "head0-do",
        "the backward reads dO of head 0 for every head",
        "the head index or head stride of dO is missing in the backward",
        "heads",
        "dp",
        "head 0 is right; the others have gains near 0; I2 and I3 fail",
        "mutant",
        "Make dO equal in all heads: the comparison must turn healthy.",
        needs=several_heads,
        variants=always(Mutant(gradient=lambda dy, call: dy[:, :1].expand_as(dy))),
        demo=CAUSAL,
    ),
    Defect(
        "batch0-do",
        "the backward reads dO of the first batch entry for every batch entry",
        "the batch stride of dO is missing in the backward",
        "heads",
        "dp",
        "the first batch entry is right, the others are not",
        "mutant",
        "Make dO equal in all batch entries: the comparison must turn healthy.",
        needs=several_batches,
        variants=always(Mutant(gradient=lambda dy, call: dy[:1].expand_as(dy))),
        demo=CAUSAL,
    ),
    Defect(
        "head-shift-do",
        "the backward reads dO of the previous head",
        "the head index of dO is off by one",
        "heads",
        "dp",
        "all gradients are wrong in every head; I2 and I3 fail",
        "mutant",
        "Make dO equal in all heads: the comparison must turn healthy.",
        needs=several_heads,
        variants=always(Mutant(gradient=lambda dy, call: dy.roll(1, dims=1))),
        demo=CAUSAL,
    ),
    Defect(
        "head0-kv",
        "the backward reads k and v of head 0 for every head",
        "the head offset of k and v is missing in the backward",
        "heads",
        "p (bwd)",
        "head 0 is right; I2 and I3 fail in the others; o is fine",
        "mutant; permuted heads",
        "Make k and v equal in all heads: the comparison must turn healthy.",
        needs=lambda call: call.k.shape[1] > 1,
        variants=always(Mutant(sees_backward=head_0_inputs)),
        demo=CAUSAL,
    ),
    Defect(
        "head-pollution",
        "dq of {detail} of every head but the first is overwritten by the padding of the head before it",
        "rows beyond the end of a head are stored and land in the next head",
        "heads",
        "dq",
        "the first rows of heads >= 1 are wrong, as many as the padding of the last tile",
        "another length moves the number of wrong rows",
        "Choose a length that is a multiple of the tile: the comparison must turn healthy.",
        needs=lambda call: several_heads(call) and not call.varlen and bool(call.q.shape[2] % 128),
        variants=_polluted,
        demo=CAUSAL,
    ),
    Defect(
        "do-stride",
        "dO is read with strides that are not its own: gradients change when only the memory layout of dO does",
        "the kernel is given q's strides (or assumes a contiguous dO); out.sum().backward() delivers strides 0",
        "heads",
        "dp",
        "another layout of the same dO gives other gradients",
        "a contiguous copy of dO repairs it",
        "Pass dO.contiguous(): the comparison must turn healthy.",
        broken="do_stride",
        demo=CAUSAL,
    ),
    Defect(
        "input-stride",
        "q, k or v is read with strides that are not its own: results change when only the memory layout does",
        "the kernel assumes contiguous inputs and does not check",
        "heads",
        "s",
        "another layout of the same q, k, v gives other results",
        "contiguous copies repair it",
        "Pass q.contiguous(), k.contiguous(), v.contiguous(): the comparison must turn healthy.",
        broken="input_stride",
        demo=CAUSAL | {"level": "full"},
    ),
    Defect(
        "do-in-flight",
        "the backward does not wait for dO: it reads it while the kernel that writes it is still running",
        "the backward runs on another stream, or copies dO there, without waiting for the stream that produces it",
        "accumulation",
        "dp",
        "a dO that is written at the last moment gives other gradients than one that lay there for long",
        "a synchronisation before the backward repairs it",
        "Call torch.cuda.synchronize() before the backward: the comparison must turn healthy.",
        broken="side_stream",
        demo=CAUSAL | {"level": "full", "device": "cuda"},
    ),
    Defect(
        "race-lost-update",
        "contributions get lost from run to run: two writers update the same address without an atomic",
        "read, add, write from several programs; the last writer wins",
        "accumulation",
        "dq",
        "repeats differ by far more than reordering; the exact probe is off by whole contributions",
        "exact-arithmetic probe: harmless reordering vanishes there, a lost update does not",
        "Run one program at a time (or use atomics): repeats must become identical.",
        broken="race",
        demo=CAUSAL | {"level": "full"},
    ),
    Defect(
        "atomics-reorder",
        "dq differs in the last bits from run to run: atomic adds in varying order, harmless",
        "floating-point sums in another order each time",
        "accumulation",
        "dq",
        "only dq varies, by a few units in the last place; exact-arithmetic inputs give equal bits",
        "exact-arithmetic probe passes",
        "Ask for deterministic mode: repeats must become identical.",
        broken="atomics",
        severity="note",
        demo=CAUSAL | {"level": "full"},
    ),
    Defect(
        "accumulates-over-calls",
        "gradients of an earlier call are still in the buffer: a zero dO does not give zero gradients",
        "the output buffer is not cleared before accumulation",
        "memory",
        "dq",
        "do = 0 gives gradients that are not 0; a second identical call gives another result",
        "zero-dO probe",
        "Clear the gradient buffer before the call: the comparison must turn healthy.",
        broken="accumulates",
        demo=CAUSAL,
    ),
    Defect(
        "stale-rows",
        "part of the output is never written: it holds whatever was in memory before",
        "an output allocated without initialisation is not fully stored, usually in the last partial tile",
        "memory",
        "dq",
        "filling fresh memory with NaN, or with 1e4, changes the result",
        "poisoned allocations; the rows are a tail tile or lie beyond the last segment",
        "Allocate with zeros instead of empty: the wrong values must become 0.",
        broken="stale_rows",
        demo=CAUSAL,
    ),
    Defect(
        "nan-cell",
        "a few values are NaN or infinite",
        "0/0, inf - inf, or an overflow in a few cells; rules built on max() skip NaN and pass it",
        "memory",
        "dk",
        "non-finite values, counted before any norm",
        "position of the values",
        "Run the same cell alone: the NaN must persist, or it comes from its neighbours.",
        broken="nan_cell",
        demo=CAUSAL,
    ),
    Defect(
        "input-changed",
        "the call changes its own inputs",
        "an in-place operation acts on a tensor the caller still owns",
        "memory",
        "s",
        "inputs differ bit for bit after the call",
        "comparison with copies taken before",
        "Pass clones: the caller's tensors must stay as they were.",
        broken="in_place",
        demo=CAUSAL,
    ),
    Defect(
        "cached-result",
        "the result of an earlier call is returned: outputs do not follow the inputs",
        "a cache is keyed by shape or address and not by content",
        "memory",
        "o",
        "negating v does not negate o",
        "the new output equals the old one bit for bit",
        "Call with other values of the same shape: o must change.",
        broken="cached",
        demo=CAUSAL,
    ),
    Defect(
        "gradient-missing",
        "the output is cut off from the inputs: no gradient arrives",
        "the output is detached, or an input takes no part in the graph",
        "memory",
        "dq",
        "autograd returns no gradient",
        "grad_fn of the output",
        "Print out.grad_fn: it is None, or its graph does not reach the input.",
        broken="detached",
        demo=CAUSAL,
    ),
    Defect(
        "gradient-zero",
        "the gradients are all zero",
        "the backward returns buffers it never filled, or a mask removes everything",
        "memory",
        "dp",
        "gains 0 on dq, dk and dv in every head",
        "mutant",
        "Print the norm of dO inside the backward: it is 0 there and not outside, or the name is wrong.",
        variants=always(Mutant(gradient=lambda dy, call: torch.zeros_like(dy))),
        demo=CAUSAL,
    ),
]
