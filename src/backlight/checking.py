"""What must be true of the tensors of a call before anything is computed: one sentence for each way to get it wrong.

A message names the argument, what came and what was expected. Values of cu_seqlens are checked where they are read
(`call.read_cu_seqlens`), because reading them here would wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.call import DTYPES, Call, check_packed_pair_sizes, check_pair_sizes, one_or
from backlight.spec import TERMS, Input


def check(call: Call, sharded: bool = False) -> Call:
    """Returns the call if all is right that needs no arithmetic to tell. q, k and v are tensors of the right rank already.

    sharded: q, k and v are parts of longer sequences, whose lengths are not known here.
    """
    _check_tensors(call)
    _check_shapes(call)
    _check_terms(call)
    if call.cu_seqlens_q is not None:
        _check_cu_seqlens(call)
    if call.pair_bias is not None:
        _check_pair_sizes(call, call.pair_bias, sharded)
    return call


def _check_tensors(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    dtype, device = q.dtype, q.device
    if dtype not in DTYPES:
        raise TypeError(f"q must be fp16, bf16, fp32 or fp64, got {dtype}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must have the dtype of q, {dtype}, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on the device of q, {device}, got {tensor.device}")


def check_is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got {value.layout}")
    if value.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one: pack it and call attention_varlen")


def _check_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {tensor.device}")


def check_ranks(tensors: dict[str, Any], wanted: int, layout: str) -> None:
    for name, tensor in tensors.items():
        check_is_tensor(name, tensor)
        if tensor.dim() != wanted:
            raise ValueError(f"{name} must have {wanted} dimensions {layout}, got shape {tuple(tensor.shape)}")


def _check_shapes(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    (batch, hq, _, d), (batch_k, hkv, sk, dk), (batch_v, hv, sv, dv) = q.shape, k.shape, v.shape
    for name, size in (("k", batch_k), ("v", batch_v)):
        if size != batch:
            raise ValueError(f"{name} must have the batch size of q, {batch}, got {size}")
    if hv != hkv:
        raise ValueError(f"v must have the heads of k, {hkv}, got {hv}")
    if hq == 0 or hkv == 0:
        raise ValueError(f"q and k must have at least one head, got {hq} and {hkv}")
    if hq % hkv:
        layout = "[B, H, S, D]" if call.cu_seqlens_q is None else "[T, H, D]"
        raise ValueError(f"the heads of q must be a multiple of the heads of k, got {hq} and {hkv}; tensors are {layout}")
    if d == 0 or dv == 0:
        raise ValueError(f"head dimensions must be at least 1, got {d} for q and k, {dv} for v")
    if dk != d:
        raise ValueError(f"k must have the head dimension of q, {d}, got {dk}")
    if sv != sk:
        raise ValueError(f"v must have the length of k, {sk}, got {sv}")


def _check_terms(call: Call) -> None:
    for term in TERMS:
        tensor = getattr(call, term.name)
        if tensor is None:
            continue
        check_is_tensor(NAMED.get(term.name, term.name), tensor)
        if term.learned and not tensor.dtype.is_floating_point:
            raise TypeError(f"{term.name} must have a floating-point dtype, got {tensor.dtype}")
        if not term.learned and tensor.dtype != torch.int32:
            raise TypeError(f"{NAMED[term.name]} must be int32, got {tensor.dtype}")
        _check_device(NAMED.get(term.name, term.name), tensor, call.q)
        SHAPES[term.axes](term, tensor, call)
        if term.like_q and tensor.dtype != call.q.dtype:
            raise TypeError(f"{term.name} must have the dtype of q, {call.q.dtype}, got {tensor.dtype}")
    if call.pos is not None:
        _check_pos_with(call)
    if call.entmax is not None and call.tau is not None:
        raise ValueError(
            "tau prunes the weights of a softmax, and those of entmax are sparse already: give one of the two, got both"
        )


def _check_pos_with(call: Call) -> None:
    """What positions of rows go with."""
    if call.rows is None:
        raise ValueError("the pos of a mask needs its rows, got None")
    if call.tau is not None and call.spec.masked:
        raise ValueError("tau counts visible keys, which causal or window beside a mask with pos do not allow: put them in it")


def _check_per_head(term: Input, tensor: Tensor, call: Call) -> None:
    heads = call.q.shape[1]
    if tuple(tensor.shape) != (heads,):
        raise ValueError(f"{term.name} must have shape ({heads},), one per query head, got {tuple(tensor.shape)}")


def _check_table(term: Input, tensor: Tensor, call: Call) -> None:
    heads = call.q.shape[1]
    if tensor.dim() != 2 or tensor.shape[0] != heads or tensor.shape[1] == 0:
        raise ValueError(
            f"{term.name} must be a table [{heads}, n] with one row per query head and n >= 1, got shape {tuple(tensor.shape)}"
        )


def _check_like_output(term: Input, tensor: Tensor, call: Call) -> None:
    wanted = (*call.q.shape[:3], call.v.shape[-1])
    if tuple(tensor.shape) != wanted:
        shown = wanted if call.cu_seqlens_q is None else (wanted[2], wanted[1], wanted[3])
        came = tensor.shape if call.cu_seqlens_q is None else tensor[0].transpose(0, 1).shape
        raise ValueError(f"{term.name} must have the shape of the output, {shown}, got {tuple(came)}")


def _check_ends(term: Input, tensor: Tensor, call: Call) -> None:
    (batch, heads, *_), keys = call.q.shape, call.k.shape[2]
    shape = tuple(tensor.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2] in (2, 4) and shape[3] == keys
    if not fits:
        wanted = f"[{one_or(batch)}, {one_or(heads)}, 2 or 4, {keys}]"
        raise ValueError(f"{NAMED[term.name]} must be {wanted} (batch, query heads, ends, keys), got shape {shape}")


def _check_positions(term: Input, tensor: Tensor, call: Call) -> None:
    batch, _, rows, _ = call.q.shape
    shape = tuple(tensor.shape)
    if not (len(shape) == 2 and shape[0] in (1, batch) and shape[1] == rows):
        raise ValueError(f"{NAMED[term.name]} must be [{one_or(batch)}, {rows}] (batch, rows of q), got shape {shape}")


def _check_pairs(term: Input, tensor: Tensor, call: Call) -> None:
    if tensor.dtype not in (call.q.dtype, torch.float32):
        raise TypeError(f"{term.name} must have the dtype of q, {call.q.dtype}, or float32, got {tensor.dtype}")
    if call.tau is not None:
        raise ValueError(f"tau counts visible keys, of which {term.name} may hide any with -inf: give one of the two, got both")


def _check_pair_sizes(call: Call, pair_bias: Tensor, sharded: bool) -> None:
    if call.varlen:
        if sharded:
            raise ValueError(
                "pair_bias must be None where packed sequences are sharded: its rows and keys are whole sequences'"
            )
        check_packed_pair_sizes(pair_bias, call.problems, call.q.shape[1])
    elif not sharded:
        check_pair_sizes(pair_bias, (*call.q.shape[:3], call.k.shape[2]))


# what the caller knows as one argument
NAMED = {"rows": "the rows of a mask", "pos": "the pos of a mask"}
# by axes: a term of a new shape needs a sentence of its own
SHAPES = {
    ("heads",): _check_per_head,
    ("heads", "distances"): _check_table,
    ("batch", "heads", "rows", "values"): _check_like_output,
    ("batch", "heads", "rows", "keys"): _check_pairs,
    ("batch", "heads", "ends", "keys"): _check_ends,
    ("batch", "rows"): _check_positions,
}
_unchecked = [term.name for term in TERMS if term.axes not in SHAPES]
assert not _unchecked, f"no check for the shape of {_unchecked}"


def _check_cu_seqlens(call: Call) -> None:
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        cu = getattr(call, name)
        check_is_tensor(name, cu)
        if cu.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {cu.dtype}")
        if cu.dim() != 1 or cu.shape[0] == 0:
            raise ValueError(f"{name} must be one-dimensional with at least one entry, got shape {tuple(cu.shape)}")
        _check_device(name, cu, call.q)
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    if call.cu_seqlens_q.shape != call.cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must name the same number of sequences, "
            f"got {call.cu_seqlens_q.shape[0] - 1} and {call.cu_seqlens_k.shape[0] - 1}"
        )
