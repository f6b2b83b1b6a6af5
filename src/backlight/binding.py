"""From keyword arguments to one bound `Call`: every check that needs no arithmetic, each with one sentence.

A message names the argument, what came and what was expected. Values of cu_seqlens are checked where they are read
(`call.read_cu_seqlens`), because reading them here would wait for the device.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import any_autocast
from backlight.arguments import shown
from backlight.call import DTYPES, Call, Memory, layout_of
from backlight.spec import LARGEST, AttentionSpec

Window = tuple[int | None, int | None]


def make_spec(
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_origin: int = 0,
    sink: Tensor | None = None,
    tau: Tensor | None = None,
    gate: Tensor | None = None,
) -> AttentionSpec:
    left, right = _sides(window)
    causal, left, right, scale, softcap, bias_origin = map(plain, (causal, left, right, scale, softcap, bias_origin))
    options = (causal, left, right, scale, softcap, bias_origin, bias is not None, sink is not None, tau is not None)
    if torch.compiler.is_compiling():
        return _new_spec(*options, gate is not None)
    try:
        return _known_spec(*options, gate is not None)
    except TypeError:
        # also raised for what cannot be hashed: the sentence for that is in `_new_spec`
        return _new_spec(*options, gate is not None)


def plain(option: Any) -> Any:
    """A number or bool of NumPy as Python's own; everything else as it is."""
    if option is None or isinstance(option, (bool, int, float)):
        return option
    numpy = sys.modules.get("numpy")
    return option.item() if numpy is not None and isinstance(option, numpy.generic) else option


def _sides(window: Any) -> tuple[Any, Any]:
    if window is None:
        return None, None
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(f"window must be a pair (left, right) or None, got {shown(window)}")
    return window[0], window[1]


def _new_spec(
    causal: Any,
    left: Any,
    right: Any,
    scale: Any,
    softcap: Any,
    bias_origin: Any,
    bias: bool,
    sink: bool,
    tau: bool,
    gate: bool,
) -> AttentionSpec:
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be a bool, got {type(causal).__name__}")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise TypeError(f"{name} must be a number or None, got {type(number).__name__}")
        if isinstance(number, int) and not -LARGEST <= number <= LARGEST:
            raise ValueError(f"{name} must be finite as a float, got an int of {number.bit_length()} bits")
    return AttentionSpec(
        causal=causal,
        window=(left, right),
        scale=None if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        bias=bias,
        bias_origin=bias_origin,
        sink=sink,
        tau=tau,
        gate=gate,
    )


# typed: 1 is not True, and must not pass for it once True has been seen
_known_spec = lru_cache(maxsize=1024, typed=True)(_new_spec)


# --- calls like one before ---------------------------------------------------------------------------------------------------

# q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k as they came
Tensors = tuple[Tensor | None, ...]
# what was found right: the spec, whether it is deterministic, `Call.layout` and `Call.shared`
_bound: Memory[tuple[AttentionSpec, bool, tuple[Any, ...], dict[Any, Any]]] = Memory()


def kind_of(tensors: Tensors, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that checks look at, hashable: calls of one kind are all right or all wrong. None where something has no layout.

    options: the rest, in any order that is always the same.
    """
    q, k, v, *_, cu_q, cu_k = tensors
    if q is None:
        return None
    # quicker than the question about one type of device
    if any_autocast() and torch.is_autocast_enabled(q.device.type):
        options = (*options, torch.get_autocast_dtype(q.device.type))
    try:
        layouts = [None if x is None else (*layout_of(x), x.device) for x in tensors]
    except RuntimeError:
        return None
    flags = torch.are_deterministic_algorithms_enabled(), k is q, v is q, v is k, cu_k is cu_q
    # types: 1 is not True, and must not pass for it once True has been seen
    return (*flags, *options, *map(type, options), *layouts)


def recall(kind: tuple[Any, ...] | None, tensors: Tensors) -> Call | None:
    """The bound call of these tensors, if one of its kind was bound before."""
    try:
        known = _bound.get(kind)  # type: ignore[arg-type]
    except TypeError:
        # an option without a hash
        return None
    if known is None:
        return None
    spec, deterministic, layout, shared = known
    q, k, v, bias, sink, tau, gate, cu_q, cu_k = tensors
    if cu_q is not None:
        q, k, v, gate = (batched(x) for x in (q, k, v, gate))
        cu_k = cu_q if cu_k is None else cu_k
    call = Call(spec, q, k, v, bias, sink, tau, gate, cu_q, cu_k, deterministic)  # type: ignore[arg-type]
    call._layout, call.shared = layout, shared
    return call


def remember(kind: tuple[Any, ...] | None, tensors: Tensors, call: Call) -> None:
    """Calls of this kind are right, and bound like this one; not where tensors were cast or copied."""
    q, k, v, *_, gate, cu_q, cu_k = tensors
    cast = any(x is not None and x.dtype != call.q.dtype for x in (q, k, v, gate))
    copied = cu_q is not call.cu_seqlens_q or (cu_k is not None and cu_k is not call.cu_seqlens_k)
    if kind is not None and not cast and not copied and _hashable(kind):
        call.shared = Memory()
        _bound[kind] = call.spec, call.deterministic, call.layout, call.shared


def batched(x: Tensor | None) -> Tensor | None:
    """Packed [T, H, D] as the case B = 1 of [B, H, S, D], in place."""
    return None if x is None else x.transpose(0, 1)[None]


def _hashable(kind: tuple[Any, ...]) -> bool:
    try:
        hash(kind)
    except TypeError:
        return False
    return True


# --- checks ------------------------------------------------------------------------------------------------------------------


def check(call: Call) -> Call:
    """The call itself, whose q, k, v are tensors of the right rank, once all else that has no arithmetic in it is right."""
    _check_tensors(call)
    _check_shapes(call)
    _check_parameters(call)
    if call.cu_seqlens_q is not None:
        _check_cu_seqlens(call)
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
        raise ValueError(f"the heads of q must be a multiple of the heads of k, got {hq} and {hkv}")
    if d == 0 or dv == 0:
        raise ValueError(f"head dimensions must be at least 1, got {d} for q and k, {dv} for v")
    if dk != d:
        raise ValueError(f"k must have the head dimension of q, {d}, got {dk}")
    if sv != sk:
        raise ValueError(f"v must have the length of k, {sk}, got {sv}")


def _check_parameters(call: Call) -> None:
    q, hq = call.q, call.q.shape[1]
    if call.bias is not None:
        _check_parameter("bias", call.bias, q)
        if call.bias.dim() != 2 or call.bias.shape[0] != hq or call.bias.shape[1] == 0:
            raise ValueError(
                f"bias must be a table [{hq}, n] with one row per query head and n >= 1, got shape {tuple(call.bias.shape)}"
            )
    for name in ("sink", "tau"):
        parameter = getattr(call, name)
        if parameter is not None:
            _check_parameter(name, parameter, q)
            if tuple(parameter.shape) != (hq,):
                raise ValueError(f"{name} must have shape ({hq},), one per query head, got {tuple(parameter.shape)}")
    if call.gate is not None:
        wanted = (*q.shape[:3], call.v.shape[-1])
        _check_parameter("gate", call.gate, q)
        if tuple(call.gate.shape) != wanted:
            shown = wanted if call.cu_seqlens_q is None else (wanted[2], wanted[1], wanted[3])
            came = call.gate.shape if call.cu_seqlens_q is None else call.gate[0].transpose(0, 1).shape
            raise ValueError(f"gate must have the shape of the output, {shown}, got {tuple(came)}")
        if call.gate.dtype != q.dtype:
            raise TypeError(f"gate must have the dtype of q, {q.dtype}, got {call.gate.dtype}")


def _check_parameter(name: str, parameter: Tensor, q: Tensor) -> None:
    check_is_tensor(name, parameter)
    if not parameter.dtype.is_floating_point:
        raise TypeError(f"{name} must have a floating-point dtype, got {parameter.dtype}")
    _check_device(name, parameter, q)


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


def autocast(q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """The tensors as `torch.autocast` wants them: like torch's own attention, q, k, v and gate go to the autocast dtype."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return q, *others
    return tuple(_cast(x, torch.get_autocast_dtype(device)) for x in (q, *others))


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    eligible = isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor  # type: ignore[union-attr]
