"""Part `seeds`: the two founding cases, forward and backward, against the float64 oracle.

`identity4x4`   q and k are the identity, v counts, scale 1, the gradient is that of a plain sum: small enough to check by hand.
`random128x64`  128 rows of 64, uniform in [-0.5, 0.5], random incoming gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from torch import Tensor

import backlight
from backlight.call import Call
from backlight.demo.compare import Difference, difference, table
from backlight.reference import oracle
from backlight.spec import AttentionSpec

QUANTITIES = ("y", "dq", "dk", "dv")
SHOWN_IN_FULL = 16

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Seed:
    """A named problem: `make()` gives q, k, v, dy as float32 [1,1,S,D]; `limit` bounds every difference from the oracle."""

    name: str
    limit: float
    scale: float | None
    make: Callable[[], Tensors]


def identity4x4() -> Tensors:
    identity = torch.eye(4)[None, None]
    v = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4) / 4
    return {"q": identity, "k": identity.clone(), "v": v, "dy": torch.ones(()).expand(1, 1, 4, 4)}


def random128x64() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(1, 1, 128, 64, generator=generator) - 0.5 for name in ("q", "k", "v", "dy")}


SEEDS = (
    Seed("identity4x4", limit=1e-3, scale=1.0, make=identity4x4),
    Seed("random128x64", limit=5e-3, scale=None, make=random128x64),
)


def by_attention(seed: Seed, inputs: Tensors, causal: bool) -> dict[str, Tensor | None]:
    """y, dq, dk, dv of the public call."""
    q, k, v = (inputs[name].detach().clone().requires_grad_() for name in ("q", "k", "v"))
    y = backlight.attention(q, k, v, causal=causal, scale=seed.scale)
    y.backward(inputs["dy"])
    return {"y": y.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def by_oracle(seed: Seed, inputs: Tensors, causal: bool) -> Tensors:
    """The same in float64, from the formulas."""
    call = Call(AttentionSpec(causal=causal, scale=seed.scale), inputs["q"], inputs["k"], inputs["v"])
    return dict(oracle(call, inputs["dy"], keep=QUANTITIES))


def examine(seed: Seed, causal: bool) -> tuple[Tensors, dict[str, Tensor | None], list[Difference]]:
    """Inputs, what the public call returned, and its differences from the oracle."""
    inputs = seed.make()
    got, want = by_attention(seed, inputs, causal), by_oracle(seed, inputs, causal)
    return inputs, got, [difference(name, got[name], want[name], seed.limit) for name in QUANTITIES]


def run(console: Console, out: Path) -> bool:
    """Print one report per case and mask; true when every quantity is within its limit."""
    failed = False
    for seed in SEEDS:
        for causal in (False, True):
            inputs, got, differences = examine(seed, causal)
            console.print(f"\n[bold]{seed.name}[/], {'causal' if causal else 'full'}")
            console.print(_values(inputs))
            console.print(_values(got))
            console.print(table("against the oracle", differences))
            failed |= any(d.failed for d in differences)
    console.print("[bold red]FAIL[/]" if failed else "[bold green]PASS[/]: both seed cases agree with the oracle")
    return not failed


def _values(tensors: Mapping[str, Tensor | None]) -> Columns:
    return Columns([_matrix(name, tensor) for name, tensor in tensors.items()], padding=(0, 3))


def _matrix(name: str, tensor: Tensor | None) -> Table | str:
    if tensor is None:
        return f"{name}: no gradient"
    rows = tensor[0, 0]
    if rows.numel() > SHOWN_IN_FULL:
        return f"{name} {rows.shape[0]} x {rows.shape[1]} in [{rows.min():+.4f}, {rows.max():+.4f}]"
    shown = Table(title=name, show_header=False, box=None, padding=(0, 1))
    for row in rows.tolist():
        shown.add_row(*(f"{value:+.3f}" for value in row))
    return shown
