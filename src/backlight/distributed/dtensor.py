"""DTensors in, DTensors out: sharded along the sequence over the mesh of the context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from backlight.call import Call
from backlight.distributed.layout import cut, pieces
from backlight.distributed.masking import KEYS_OF_ROWS, ROWS_OF_POS
from backlight.spec import LEARNED, SEQUENCE_OF, TERM_NAMES

SEQUENCE = 2
MASK_DIMS = {"rows": KEYS_OF_ROWS, "pos": ROWS_OF_POS}


def localise(call: Call, mesh: DeviceMesh | None, layout: str) -> tuple[Call, Callable[[Tensor], Tensor]]:
    """The call on local tensors, and what turns an output back into a DTensor; plain tensors pass unchanged."""
    learned: dict[str, Any] = {name: _replicated(name, getattr(call, name)) for name in TERM_NAMES if name not in SEQUENCE_OF}
    if not isinstance(call.q, DTensor):
        for name in SEQUENCE_OF:
            if isinstance(getattr(call, name), DTensor):
                raise TypeError(f"{name} is a DTensor but q is not: pass all of them as DTensors or none")
        return replace(call, **learned), _same
    if layout != "contiguous":
        # Shard(2) puts neighbours on one rank; under another layout rows would sit at places that are not theirs
        raise ValueError(f"layout must be contiguous where q, k and v are DTensors, which are sharded so, got {layout!r}")
    local: dict[str, Any] = {name: _sharded(name, getattr(call, name), mesh) for name in SEQUENCE_OF}
    # a mask came for the whole sequence, as q, k and v did
    for name, dim in MASK_DIMS.items():
        if learned[name] is not None:
            own = pieces(layout, learned[name].shape[dim], call.q.device_mesh.size())[call.q.device_mesh.get_local_rank()]
            learned[name] = cut(learned[name], dim, own).contiguous()
    of_mesh, length = call.q.device_mesh, call.q.shape[SEQUENCE]

    def placed(output: Tensor) -> Tensor:
        shape = (*output.shape[:SEQUENCE], length, *output.shape[SEQUENCE + 1 :])
        whole = output.new_empty(shape, device="meta")
        return DTensor.from_local(output, of_mesh, [Shard(SEQUENCE)], run_check=False, shape=whole.shape, stride=whole.stride())

    return replace(call, **local, **learned), placed


def local_tangents(
    call: Call, tangents: tuple[Tensor | None, ...], mesh: DeviceMesh | None, layout: str
) -> tuple[Tensor | None, ...]:
    """Tangents are sharded and placed as what they are tangents of."""
    given: dict[str, Any] = {name: t for name, t in zip(LEARNED, tangents, strict=True) if t is not None}
    local, _ = localise(replace(call, **given), mesh, layout)
    return tuple(getattr(local, name) if name in given else None for name in LEARNED)


def _same(output: Tensor) -> Tensor:
    return output


def _sharded(name: str, tensor: Tensor | None, mesh: DeviceMesh | None) -> Tensor | None:
    if tensor is None:
        return None
    if not isinstance(tensor, DTensor):
        raise TypeError(f"{name} must be a DTensor like q, got {type(tensor).__name__}")
    if tensor.device_mesh != mesh or tuple(tensor.placements) != (Shard(SEQUENCE),):
        raise ValueError(
            f"{name} must be sharded as (Shard(dim={SEQUENCE}),) over the mesh of the context, "
            f"got {tuple(tensor.placements)} over {tensor.device_mesh}"
        )
    return tensor.to_local()


def _replicated(name: str, tensor: Tensor | None) -> Tensor | None:
    if not isinstance(tensor, DTensor):
        return tensor
    if any(not isinstance(placement, Replicate) for placement in tensor.placements):
        raise ValueError(f"{name} must be replicated over its mesh, got {tuple(tensor.placements)}")
    return tensor.to_local()
