"""`context_parallel`: the sequence of every attention call inside is sharded over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from backlight import registry
from backlight.arguments import (
    INTEGERS,
    check_borders,
    check_choice,
    check_dtype,
    check_flag,
    check_number,
    check_tensor,
    check_whole,
    shown,
)
from backlight.call import Call, read_cu_seqlens
from backlight.contexts import entered
from backlight.distributed import rule
from backlight.distributed.autograd import Strategy, run
from backlight.distributed.blocks import Shards
from backlight.distributed.communicator import Communicator, TorchCommunicator
from backlight.distributed.dtensor import localise
from backlight.distributed.handshake import (
    STRATEGIES,
    UNSHARD,
    Agreement,
    Settings,
    agree,
    agree_shard,
    borders,
    refuse,
    signature,
)
from backlight.distributed.heads import AllToAll
from backlight.distributed.layout import LAYOUTS, assemble, cut, pieces, positions_of
from backlight.distributed.local import check_backend, typical_block
from backlight.distributed.masking import KEYS_OF_ROWS, ROWS_OF_POS, gathered
from backlight.distributed.ring import Ring
from backlight.mask import Mask

CHECKS = ("always", "first")
IGNORED_LABEL = -100
MOST_KINDS = 4096


class ContextParallel:
    """A mesh and the way sequences are cut over it. Made by `context_parallel`; passed as `attention(..., context=...)`.

    Attributes: rank, world, layout, strategy.
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup | Communicator,
        layout: str = "zigzag",
        strategy: str = "auto",
        sum_learned: bool = True,
        check: str = "always",
        timeout: float | None = None,
    ):
        known = {"layout": (layout, tuple(LAYOUTS)), "strategy": (strategy, STRATEGIES), "check": (check, CHECKS)}
        for name, (value, choices) in known.items():
            check_choice(name, value, choices)
        check_flag("sum_learned", sum_learned)
        check_number("timeout", timeout, above=0, optional=True)
        self.communicator = _communicator(mesh, timeout)
        self.mesh = mesh if isinstance(mesh, DeviceMesh) else None
        self.layout, self.strategy, self.sum_learned, self.check = layout, strategy, sum_learned, check
        # kinds of calls the ranks have agreed upon, and how many calls there were
        self._known: set[tuple[tuple[int, ...], ...]] = set()
        self._calls, self._backward_compared = 0, True

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world(self) -> int:
        return self.communicator.world

    # --- sequences -----------------------------------------------------------------------------------------------------------

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions along `dim` of a tensor that every rank holds whole: inputs, position ids, labels."""
        dim = _axis("whole", whole, dim)
        return cut(whole, dim, pieces(self.layout, whole.shape[dim], self.world)[self.rank])

    def shard_mask(self, whole: Mask) -> Mask:
        """The mask of this rank's keys and rows, of one for the whole sequence; its intervals still count rows of the whole."""
        if not isinstance(whole, Mask):
            raise TypeError(f"whole must be a backlight.mask.Mask, got {shown(whole)}")
        pos = None if whole.pos is None else self.shard(whole.pos, ROWS_OF_POS)
        return Mask(self.shard(whole.rows, KEYS_OF_ROWS), pos)

    def unshard(self, shard: Tensor, dim: int) -> Tensor:
        """The whole tensor on every rank, in its own order, from the shards of all; not differentiable."""
        try:
            dim = _axis("shard", shard, dim)
        except Exception:
            refuse(self.communicator, UNSHARD)
            raise
        held = agree_shard(self.communicator, shard, dim, self.layout)
        last = shard.detach().movedim(dim, -1)
        padded = pad(last, (0, max(held) - last.shape[-1])).contiguous()
        shards = [x[..., :length] for x, length in zip(self.communicator.all_gather(padded, UNSHARD), held, strict=True)]
        return assemble(shards, last.dim() - 1, self.layout).movedim(-1, dim)

    def positions(self, length: int, cu_seqlens: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """Where this rank's positions lie in the whole sequence of `length`, or, with cu_seqlens, each in its own sequence."""
        check_whole("length", length, least=0)
        own = positions_of(pieces(self.layout, length, self.world)[self.rank], device)
        if cu_seqlens is None:
            return own
        check_borders("cu_seqlens", cu_seqlens)
        read_cu_seqlens("cu_seqlens", cu_seqlens, length)
        starts = cu_seqlens.to(own.device, torch.int64)
        return own - starts[torch.searchsorted(starts, own, right=True) - 1]

    def labels(self, tokens: Tensor, dim: int = -1, ignored: int = IGNORED_LABEL) -> Tensor:
        """This rank's next-token labels: shifted before they are cut, since the next token may lie on another rank.

        In the dtype of the tokens; int64 where that does not hold `ignored`.
        """
        dim = _axis("tokens", tokens, dim)
        check_dtype("tokens", tokens, INTEGERS)
        check_whole("ignored", ignored)
        if not _fits(ignored, tokens.dtype):
            tokens = tokens.long()
        if not tokens.shape[dim]:
            return self.shard(tokens, dim)
        beyond = torch.full_like(tokens.narrow(dim, 0, 1), ignored)
        return self.shard(torch.cat([tokens.narrow(dim, 1, tokens.shape[dim] - 1), beyond], dim), dim)

    # --- attention -----------------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def attention(self, bind: Callable[[], Call], backend: str | None) -> tuple[Tensor, Tensor]:
        """(y, lse) of this rank's rows; `bind()` makes the local call. Called by `backlight.attention`."""
        strategy, call, placed = self.prepare(bind, backend)
        y, lse = run(strategy, call, self.sum_learned, self._calls, self._backward_compared)
        return placed(y), placed(lse)

    def explain(self, bind: Callable[[], Call], backend: str | None) -> tuple[Call, dict[str, tuple[str, ...]]]:
        """A call such as this rank's backend gets, and every backend's reasons against it. Nothing is sent."""
        call, _ = localise(bind(), self.mesh, self.layout)
        run = call if self.strategy == "all_to_all" else typical_block(call)
        return run, registry.refusals(run)

    def prepare(self, bind: Callable[[], Call], backend: str | None) -> tuple[Strategy, Call, Callable[[Tensor], Tensor]]:
        """The strategy all ranks agreed upon, this rank's call, and what makes DTensors of outputs where inputs are some."""
        settings = Settings(self.layout, self.strategy, self.sum_learned, backend)
        try:
            call, placed = localise(bind(), self.mesh, self.layout)
            mine = signature(call, settings)
            check_backend(call, backend, whole=self.strategy == "all_to_all")
        except Exception:
            refuse(self.communicator)
            raise
        strategy, shards = self._plan(call, mine, backend)
        return strategy, gathered(self.communicator, call, shards), placed

    def _plan(self, call: Call, mine: tuple[int, ...], backend: str | None) -> tuple[Strategy, Shards]:
        agreed = agree(self.communicator, mine, call, self.layout)
        self._count(agreed)
        sq, sk = agreed.sq, agreed.sk
        cu_q, cu_k = borders(call)
        n_bias = 0 if call.bias is None else call.bias.shape[1]
        shards = Shards(call.spec, self.layout, self.world, sq, sk, cu_q, cu_k, n_bias)
        shape = rule.Shape(
            batch=call.q.shape[0],
            heads=call.q.shape[1],
            kv_heads=call.k.shape[1],
            d=call.q.shape[3],
            dv=call.v.shape[3],
            element=call.q.element_size(),
            gate=call.spec.gate,
            tau=call.spec.tau,
        )
        name = rule.choose(shape, shards) if self.strategy == "auto" else self.strategy
        if name == "all_to_all":
            if not rule.divides(shape, self.world):
                have = f"{shape.kv_heads} heads for {self.world} ranks"
                raise ValueError(f"strategy all_to_all needs heads of k that divide by the ranks, got {have}")
            return AllToAll(self.communicator, shards, backend), shards
        return Ring(self.communicator, shards, backend), shards

    def _count(self, agreed: Agreement) -> None:
        """What ranks have agreed upon is the same on all of them, so they count alike and compare the same backwards."""
        self._calls += 1
        self._backward_compared = self.check == "always" or agreed.shown not in self._known
        if len(self._known) >= MOST_KINDS:
            self._known.clear()
        self._known.add(agreed.shown)


def _axis(name: str, tensor: Any, dim: Any) -> int:
    """`dim` of the tensor, counted from the front."""
    check_tensor(name, tensor)
    check_whole("dim", dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim must be one of the {tensor.dim()} dimensions of {name}, got {dim}")
    return dim % tensor.dim()


def _fits(number: int, dtype: torch.dtype) -> bool:
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _communicator(mesh: DeviceMesh | dist.ProcessGroup | Communicator, timeout: float | None) -> Communicator:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            name = (mesh.mesh_dim_names or ("cp",))[-1]
            sizes = tuple(mesh.shape)
            raise ValueError(f"mesh must have one dimension, got {mesh.ndim} of sizes {sizes}; take one, as in mesh[{name!r}]")
        return TorchCommunicator(mesh.get_group(), mesh.device_type, timeout)
    if isinstance(mesh, dist.ProcessGroup):
        return TorchCommunicator(mesh, "cuda" if dist.get_backend(mesh) == "nccl" else "cpu", timeout)
    if hasattr(mesh, "exchange") and hasattr(mesh, "rank"):
        return mesh
    raise TypeError(f"mesh must be a DeviceMesh, a process group or a Communicator, got {shown(mesh)}")


@contextmanager
def context_parallel(
    mesh: DeviceMesh | dist.ProcessGroup | Communicator,
    layout: str = "zigzag",
    *,
    strategy: str = "auto",
    sum_learned: bool = True,
    check: str = "always",
    timeout: float | None = None,
) -> Iterator[ContextParallel]:
    """Attention calls inside take q, k, v (and gate) as this rank's shard of the sequence and see the keys of all ranks.

    A mask is sharded too (`ContextParallel.shard_mask`); its intervals count rows of the whole sequence.

    Args:
        mesh: a one-dimensional `DeviceMesh` (of a larger one, take a dimension: mesh["cp"]), or its process group.
        layout: "zigzag" balances causal work; "contiguous" keeps neighbours together (see `layout`).
        strategy: "ring" sends keys from rank to rank while it computes; "all_to_all" trades sequence for heads and needs
            heads of k that divide by the ranks; "auto" takes the one that sends fewer bytes (see `rule`).
        sum_learned: gradients of bias, sink and tau come back summed over the mesh, the same on every rank. False leaves each
            rank its share, for a wrapper (FSDP, DDP) that reduces all parameters over the same ranks anyway.
        check: "always" compares what all ranks are about to do before every call and before its backward; "first" leaves the
            comparison before the backward out once a kind of call has had one, which saves a round trip but turns ranks whose
            backwards differ into time-outs. Options are compared before every call either way.
        timeout: seconds to wait for another rank; None = the process group's own.

    The backward of activation checkpointing recomputes the forward: keep `loss.backward()` inside the block as well, or pass
    the context itself, `attention(..., context=ctx)`, which needs no block.
    """
    context = ContextParallel(mesh, layout, strategy, sum_learned, check, timeout)
    with entered(context):
        yield context
