"""`context_parallel`: the sequence of every attention call inside is sharded over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from backlight import registry
from backlight.arguments import check_choice, check_flag, check_number, shown
from backlight.call import Call, check_pair_sizes
from backlight.contexts import entered
from backlight.distributed import rule
from backlight.distributed.autograd import Strategy, Tensors, run, run_tangent
from backlight.distributed.blocks import Shards
from backlight.distributed.communicator import Communicator, TorchCommunicator
from backlight.distributed.dtensor import local_tangents, localise
from backlight.distributed.handshake import STRATEGIES, Agreement, Settings, agree, borders, refuse, signature
from backlight.distributed.heads import AllToAll
from backlight.distributed.layout import LAYOUTS
from backlight.distributed.local import check_backend, typical_block
from backlight.distributed.masking import gathered
from backlight.distributed.ring import Ring
from backlight.distributed.sequences import Sequences

CHECKS = ("always", "first")
MOST_KINDS = 4096


class ContextOptions(TypedDict, total=False):
    """Keywords of `context_parallel`, explained there; `ContextParallel` has their defaults."""

    strategy: str
    sum_learned: bool
    check: str
    timeout: float | None


class ContextParallel(Sequences):
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
        super().__init__(_communicator(mesh, timeout), layout)
        self.mesh = mesh if isinstance(mesh, DeviceMesh) else None
        self.strategy, self.sum_learned, self.check = strategy, sum_learned, check
        # kinds of calls the ranks have agreed upon, and how many calls there were
        self._known: set[tuple[tuple[int, ...], ...]] = set()
        self._calls, self._backward_compared = 0, True

    @torch.compiler.disable
    def attention(self, bind: Callable[[], Call], backend: str | None) -> tuple[Tensor, Tensor]:
        """(y, lse) of this rank's rows; `bind()` makes the local call. Called by `backlight.attention`."""
        strategy, call, placed = self.prepare(bind, backend)
        y, lse = run(strategy, call, self.sum_learned, self._calls, self._backward_compared)
        return placed(y), placed(lse)

    @torch.compiler.disable
    def attention_jvp(
        self, bind: Callable[[], tuple[Call, Tensors]], backend: str | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """((y, lse), (ty, tlse)) of this rank's rows; `bind()` makes the local call and its tangents."""
        tangents: Tensors = ()

        def call_alone() -> Call:
            nonlocal tangents
            call, tangents = bind()
            tangents = local_tangents(call, tangents, self.mesh, self.layout)
            return call

        strategy, call, placed = self.prepare(call_alone, backend, tangent=True)
        first, second = run_tangent(strategy, call, tangents, self.sum_learned, self._calls, self._backward_compared)
        return (placed(first[0]), placed(first[1])), (placed(second[0]), placed(second[1]))

    def explain(self, bind: Callable[[], Call], backend: str | None) -> tuple[Call, dict[str, tuple[str, ...]]]:
        """A call such as this rank's backend gets, and every backend's reasons against it. Nothing is sent."""
        call, _ = localise(bind(), self.mesh, self.layout)
        run = call if self.strategy == "all_to_all" else typical_block(call)
        return run, registry.refusals(run)

    def prepare(
        self, bind: Callable[[], Call], backend: str | None, tangent: bool = False
    ) -> tuple[Strategy, Call, Callable[[Tensor], Tensor]]:
        """The strategy all ranks agreed upon, this rank's call, and a function that makes DTensors of outputs if inputs are."""
        settings = Settings(self.layout, self.strategy, self.sum_learned, backend)
        try:
            call, placed = localise(bind(), self.mesh, self.layout)
            mine = signature(call, settings)
            check_backend(call, backend, whole=self.strategy == "all_to_all", tangent=tangent)
        except Exception:
            refuse(self.communicator)
            raise
        strategy, shards = self._plan(call, mine, backend)
        return strategy, gathered(self.communicator, call, shards), placed

    def _plan(self, call: Call, mine: tuple[int, ...], backend: str | None) -> tuple[Strategy, Shards]:
        agreed = agree(self.communicator, mine, call, self.layout)
        self._count(agreed)
        sq, sk = agreed.sq, agreed.sk
        if call.pair_bias is not None:
            check_pair_sizes(call.pair_bias, (*call.q.shape[:2], sq, sk))
        n_bias = 0 if call.bias is None else call.bias.shape[1]
        shards = Shards(call.spec, self.layout, self.world, sq, sk, borders(call), n_bias)
        shape = rule.Shape(
            batch=call.q.shape[0],
            heads=call.q.shape[1],
            kv_heads=call.k.shape[1],
            d=call.q.shape[3],
            dv=call.v.shape[3],
            element=call.q.element_size(),
            gate=call.spec.gate,
            tau=call.spec.tau,
            entmax=call.spec.entmax,
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
    mesh: DeviceMesh | dist.ProcessGroup | Communicator, layout: str = "zigzag", **options: Unpack[ContextOptions]
) -> Iterator[ContextParallel]:
    """Attention calls inside take q, k, v (and gate) as this rank's shard of the sequence and see the keys of all ranks.

    A mask is sharded too (`ContextParallel.shard_mask`); its intervals count rows of the whole sequence. A pair_bias is given
    whole on every rank, in the order of the whole sequence, and needs strategy "all_to_all".

    Args:
        mesh: a one-dimensional `DeviceMesh` (of a larger one, take a dimension: mesh["cp"]), or its process group.
        layout: "zigzag" balances causal work; "contiguous" keeps neighbours together (see `layout`).
        strategy: "ring" sends keys from rank to rank while it computes; "all_to_all" trades sequence for heads and needs
            heads of k that divide by the ranks; "auto", the default, takes the one that sends fewer bytes (see `rule`).
        sum_learned: gradients of bias, sink, tau and entmax come back summed over the mesh, the same on every rank. False
            leaves each its share, for a wrapper (FSDP, DDP) that reduces all parameters over the same ranks anyway. Default:
            True.
        check: "always", the default, compares what all ranks are about to do before every call and before its backward; "first"
            leaves the comparison before the backward out once a kind of call has had one, which saves a round trip but turns
            ranks whose backwards differ into time-outs. Options are compared before every call either way.
        timeout: seconds to wait for another rank; None = the process group's own.

    The backward of activation checkpointing recomputes the forward: keep `loss.backward()` inside the block as well, or pass
    the context itself, `attention(..., context=ctx)`, which needs no block.
    """
    context = ContextParallel(mesh, layout, **options)
    with entered(context):
        yield context
