"""What the bench races: an adapter says what it can express and builds a contender, which attends and returns gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from backlight.bench.workload import PHASES, Tensors, Workload
from backlight.call import Call
from backlight.spec import LEARNED, SEQUENCE_OF, TERM_NAMES

AUTOGRAD, BARE = "autograd", "bare op"
# what an adapter that compiles says as `compiles`: anew for every shape, or once for a kind of call whatever its lengths
PER_SHAPE, PER_KIND = "every shape", "every kind"
Layout = Callable[[Tensor], Tensor]
TERM_WORDS = {
    "bias": "a bias by distance",
    "sink": "a sink",
    "tau": "the elastic softmax (tau)",
    "gate": "a gate",
    "pair_bias": "a pair bias",
    "entmax": "entmax",
    "rows": "a mask by row intervals",
    "pos": "positions of rows in a mask",
}
# tensors with rows and columns of their own; the others are [Hq] or [Hq, n] in every layout
ROW_TENSORS = tuple(SEQUENCE_OF)


class Adapter(Protocol):
    """One way to compute attention. `name` is what users type and tables show.

    Optional: `compiles` (PER_SHAPE or PER_KIND) where building takes seconds that parallel processes can spend beforehand, and
    `prefer(workload, options)`, which is told the options that such a process settled on.
    """

    @property
    def name(self) -> str: ...

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        """One sentence why this workload cannot be expressed or run here; None = it can."""
        ...

    def build(self, tensors: Tensors) -> Contender:
        """A contender on these tensors, compiled and loaded as far as that can be done ahead."""
        ...


@dataclass
class Contender:
    """An adapter bound to tensors, in its own layout.

    leaves:    what gradients are taken for, by argument name.
    attend:    () -> (y, state); with gradients enabled y carries the graph.
    gradients: (y, state, retain) -> one gradient for each leaf, in order.
    canonical: own layout -> [B,H,S,D], for y and every row tensor.
    scope:     entered around everything; switches that are global in the peer.
    path:      "autograd", or "bare op" where forward and backward are called without it.
    options:   what the adapter had to settle on to make it run; recorded.
    precision: "fp8" where products are of 8 bits: judged by yardsticks of 8 bits.
    forward_only: why there is no backward, or nothing.
    """

    name: str
    leaves: dict[str, Tensor]
    dy: Tensor
    attend: Callable[[], tuple[Tensor, Any]]
    gradients: Callable[[Tensor, Any, bool], tuple[Tensor, ...]]
    canonical: Layout = field(default=lambda x: x)
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    path: str = AUTOGRAD
    detail: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    precision: str | None = None
    forward_only: str = ""

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attend()[0]

    @property
    def phases(self) -> tuple[str, ...]:
        """What can be timed."""
        return PHASES[:1] if self.forward_only else PHASES

    def both(self) -> tuple[Tensor, ...]:
        """Forward and backward, or all that there is."""
        if self.forward_only:
            return (self.forward(),)
        y, state = self.attend()
        return self.gradients(y, state, False)

    def backward_of_kept(self) -> Callable[[], tuple[Tensor, ...]]:
        """One forward now; the returned function runs its backward as often as it is called."""
        y, state = self.attend()
        return lambda: self.gradients(y, state, True)

    def results(self) -> dict[str, Tensor]:
        """y and every gradient by name, canonical layout."""
        if self.forward_only:
            return {"y": self.canonical(self.forward())}
        y, state = self.attend()
        grads = dict(zip(self.leaves, self.gradients(y, state, False), strict=True))
        shaped = {f"d{name}": self.canonical(x) if name in ROW_TENSORS else x for name, x in grads.items()}
        return {"y": self.canonical(y.detach())} | shaped


def by_autograd(name: str, leaves: dict[str, Tensor], dy: Tensor, attend: Callable[..., Tensor], **options: Any) -> Contender:
    """A contender whose backward is autograd's; `attend` takes the leaves by name."""
    inputs = tuple(leaves.values())

    def gradients(y: Tensor, state: Any, retain: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, inputs, dy, retain_graph=retain)

    return Contender(name, leaves, dy, lambda: (attend(**leaves), None), gradients, **options)


def gradients_of(call: Call) -> tuple[str, ...]:
    """What is judged and timed: a fixed alpha has no gradient."""
    fixed = {"dentmax"} if call.spec.alpha is not None else set()
    return tuple(name for name in call.gradients if name not in fixed)


def options_of(call: Call) -> dict[str, Any]:
    """The keywords of `attention` that make a call, its tensors aside."""
    return call.spec.options | ({} if call.spec.alpha is None else {"entmax": call.spec.alpha})


def leaves_of(tensors: Tensors, layout: Layout | None = None) -> dict[str, Tensor]:
    """The call's tensors as leaves; `layout` turns canonical row tensors into the contender's own, contiguous."""
    out = {}
    for name in LEARNED:
        value = getattr(tensors.call, name)
        if value is not None and f"d{name}" in gradients_of(tensors.call):
            moved = layout is not None and name in ROW_TENSORS
            out[name] = (layout(value).contiguous() if moved else value).detach().requires_grad_()  # type: ignore[misc]
    return out


def terms(workload: Workload) -> tuple[str, ...]:
    """What a plain, full, batched attention would have to add to run this workload, in words."""
    case = workload.case
    found = {
        "packed sequences": case.varlen,
        "a window": case.window != (None, None),
        "softcap": case.softcap is not None,
        **{TERM_WORDS.get(name, name): getattr(case.spec, name) for name in TERM_NAMES},
    }
    return tuple(name for name, present in found.items() if present)


def cannot(who: str, workload: Workload, able: tuple[str, ...]) -> str | None:
    """The refusal for terms outside `able`, or None."""
    missing = [term for term in terms(workload) if term not in able]
    return f"{who} cannot express {' and '.join(missing)}" if missing else None
