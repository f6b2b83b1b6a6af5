"""Part `train`: fit `LazyCopier`, then show that bias and tau of every head have learned.

Attention density is the share of visible keys that keep a weight above zero, read from the float64 oracle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from backlight.call import Call
from backlight.demo import pictures
from backlight.demo.model import LAGS, VOCABULARY, LazyCopier, batch_of, loss_of
from backlight.reference import oracle
from backlight.spec import AttentionSpec

STEPS, BATCH, LENGTH = 200, 8, 96
# a parameter without a gradient stays exactly where it was; they start at sizes of 0.02 (bias) and 0.3 (tau)
MOVED = 1e-2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The learned terms at one moment: bias [H,n], tau [H], density [H], weights a [H,S,S] on a held-out sequence."""

    bias: Tensor
    tau: Tensor
    density: Tensor
    a: Tensor


@dataclass(frozen=True, slots=True)
class History:
    """losses and taus [H] after every step, and the learned terms before and after."""

    losses: list[float]
    taus: list[list[float]]
    before: Snapshot
    after: Snapshot

    @property
    def bias_change(self) -> Tensor:
        """Largest change of the table, per head."""
        return (self.after.bias - self.before.bias).abs().amax(dim=1)

    @property
    def tau_change(self) -> Tensor:
        """Furthest that tau went from where it started, per head; it may well come back."""
        return (torch.tensor(self.taus) - self.before.tau).abs().amax(dim=0)

    @property
    def still_heads(self) -> list[int]:
        """Heads whose bias or tau did not learn, NaN included."""
        moved = (self.bias_change > MOVED) & (self.tau_change > MOVED)
        return [head for head, ok in enumerate(moved.tolist()) if not ok]

    @property
    def learned(self) -> bool:
        """Less than half of the loss of blind guessing is left, and every head took part."""
        return self.losses[-1] < 0.5 * math.log(VOCABULARY) and not self.still_heads


@torch.no_grad()
def snapshot(model: LazyCopier, tokens: Tensor) -> Snapshot:
    q, k, v = model.project(tokens[:1])
    spec = AttentionSpec(causal=True, bias=True, tau=True)
    trace = oracle(Call(spec, q, k, v, bias=model.bias, tau=model.tau), keep=("a", "m"))
    visible = spec.visible_pairs(tokens.shape[1], tokens.shape[1])
    return Snapshot(
        bias=model.bias.detach().clone(),
        tau=model.tau.detach().clone(),
        density=trace.m.sum(dim=(0, 2, 3)) / visible,
        a=trace.a[0],
    )


def train(console: Console, steps: int = STEPS) -> History:
    """Train from a fixed seed, with a progress bar; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LazyCopier()
    terms = [model.bias, model.tau]
    others = [p for name, p in model.named_parameters() if name not in ("bias", "tau")]
    optimizer = torch.optim.Adam([{"params": terms, "lr": 0.05}, {"params": others, "lr": 3e-3}])
    generator = torch.Generator().manual_seed(1)
    held_out = batch_of(1, LENGTH, generator)
    before = snapshot(model, held_out)
    losses, taus = [], []
    columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("train", total=steps, loss=math.nan)
        for _ in range(steps):
            tokens = batch_of(BATCH, LENGTH, generator)
            loss = loss_of(model(tokens), tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            taus.append(model.tau.tolist())
            progress.update(task, advance=1, loss=losses[-1])
    return History(losses, taus, before, snapshot(model, held_out))


def head_table(history: History) -> Table:
    """One row per head: what moved, and how sparse its attention became."""
    before, after = history.before, history.after
    shown = Table(title="Learned terms, head by head", title_justify="left", padding=(0, 0))
    for heading in ("head", "bias change", "peaks at", "tau before", "furthest", "after", "density before", "after"):
        shown.add_column(heading, justify="right")
    shown.add_column("learned")
    furthest = (torch.tensor(history.taus) - before.tau).abs().argmax(dim=0)
    for head in range(after.tau.numel()):
        peaks = after.bias[head].topk(2).indices.tolist()
        shown.add_row(
            str(head),
            f"{history.bias_change[head]:.2f}",
            ", ".join(str(distance) for distance in sorted(peaks)),
            f"{before.tau[head]:+.3f}",
            f"{history.taus[int(furthest[head])][head]:+.3f}",
            f"{after.tau[head]:+.3f}",
            f"{before.density[head]:.0%}",
            f"{after.density[head]:.0%}",
            "[bold red]no[/]" if head in history.still_heads else "[green]yes[/]",
        )
    return shown


def run(console: Console, out: Path) -> bool:
    lags = ", ".join(map(str, LAGS))
    console.print(f"Task: name the tokens {lags} steps back. No position embedding: only the bias knows distance.")
    history = train(console)
    console.print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.4f} (blind guessing: {math.log(VOCABULARY):.3f})")
    console.print(pictures.sparkline(history.losses), style="cyan")
    console.print(head_table(history))
    pictures.report(console, history, out)
    if not history.learned:
        still = f"heads {history.still_heads} stood still" if history.still_heads else "the loss did not fall by half"
        console.print(f"[bold red]FAIL[/]: {still}")
    return history.learned
