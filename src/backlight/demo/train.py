"""Part `train`: three small language models learn the same book, with softmax, with Lazy Attention and with entmax.

All see the same passages in the same order, from the same starting weights. What they have learned is shown head by head: bias
by distance and tau, or alpha, and density, the share of visible keys that keep a weight above zero.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from backlight.demo import pictures
from backlight.demo.history import MARGIN, EntmaxMoment, History, LazyMoment, Moment
from backlight.demo.model import KINDS, CharacterModel
from backlight.demo.text import Text
from backlight.nn import statistics

STEPS, BATCH, LENGTH = 100, 12, 96
RATE = 4e-3
# bias, tau and alpha are few and start far from where they end: Adam moves them by about this much a step
TERM_RATE = 4e-2
MOMENTS = 10
PROMPT = "Alice was"


def examine(model: CharacterModel, step: int, passages: Tensor) -> Moment:
    """Loss and learned terms on held-out passages."""
    layers = list(model.lazy_layers())
    with torch.no_grad(), statistics(model) as found:
        loss = model.loss(passages).item()
    kept = [found[f"blocks.{i}.attention"] for i in range(len(model.blocks))]
    alphas = alphas_of(model)
    if alphas is not None:
        return EntmaxMoment(step, loss, alphas, torch.stack([one.density.cpu() for one in kept]))
    if not layers:
        return Moment(step, loss)
    return LazyMoment(
        step=step,
        loss=loss,
        bias=torch.stack([layer.bias.detach().cpu().clone() for layer in layers]),
        tau=torch.stack([layer.tau.detach().cpu().clone() for layer in layers]),
        density=torch.stack([one.density.cpu() for one in kept]),
        mass=torch.stack([one.mass.cpu() for one in kept]),
    )


def alphas_of(model: CharacterModel) -> Tensor | None:
    """[layers, H] of a model with entmax."""
    found = [torch.as_tensor(layer.alpha).detach().cpu().clone() for layer in model.entmax_layers()]
    return torch.stack(found) if found else None


def optimizer_of(model: CharacterModel) -> torch.optim.Optimizer:
    terms = model.few_parameters()
    few = {id(parameter) for parameter in terms}
    others = [parameter for parameter in model.parameters() if id(parameter) not in few]
    return torch.optim.Adam([{"params": others, "lr": RATE}, {"params": terms, "lr": TERM_RATE}], betas=(0.9, 0.99))


def fit(
    kind: str,
    text: Text,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    length: int = LENGTH,
    seed: int = 0,
    device: torch.device | str = "cpu",
    seen: Callable[[float], None] = lambda loss: None,
) -> History:
    """Train one model from a seed; the global random state is left as it was. `seen(loss)` is called after every step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CharacterModel(kind, len(text.characters)).to(device)
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(seed)
    held_out = text.evaluation(16, length).to(device)
    history = History(kind, moments=[examine(model, 0, held_out)])
    for step in range(1, steps + 1):
        loss = model.loss(text.batch(batch, length, generator).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.losses.append(loss.item())
        if kind == "lazy":
            history.taus.append(torch.stack([layer.tau.detach().cpu().clone() for layer in model.lazy_layers()]))
        alphas = alphas_of(model)
        if alphas is not None:
            history.alphas.append(alphas)
        if step == steps or step % max(1, steps // MOMENTS) == 0:
            history.moments.append(examine(model, step, held_out))
        seen(history.losses[-1])
    start = text.encode(PROMPT).to(device)
    history.sample = text.decode(model.continue_text(start, 160, torch.Generator().manual_seed(seed)))
    return history


def train(console: Console, *, steps: int = STEPS, seed: int = 0, device: torch.device | str = "cpu") -> dict[str, History]:
    """Train all kinds, with a progress bar; kind -> history."""
    text = Text.alice()
    columns = (TextColumn("{task.description:7} {task.completed}/{task.total}"), BarColumn())
    found = {}
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}"), TimeElapsedColumn(), console=console) as progress:
        for kind in KINDS:
            task = progress.add_task(kind, total=steps, loss=float("nan"))

            def seen(loss: float, task: TaskID = task) -> None:
                progress.update(task, advance=1, loss=loss)

            found[kind] = fit(kind, text, steps=steps, seed=seed, device=device, seen=seen)
    return found


def loss_table(found: dict[str, History]) -> Table:
    """One row per model: where held-out text started and ended."""
    shown = Table(title="Nats per character on held-out text", title_justify="left", padding=(0, 1))
    for heading in ("model", "before", "after", "gained", f"at least {MARGIN}"):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    for kind, history in found.items():
        before, after = history.moments[0].loss, history.moments[-1].loss
        verdict = "[green]yes[/]" if history.gain >= MARGIN else "[bold red]no[/]"
        shown.add_row(kind, f"{before:.3f}", f"{after:.3f}", f"{history.gain:.3f}", verdict)
    return shown


def head_table(history: History) -> Table:
    """One row per head of the lazy model: what moved, and how sparse its attention became."""
    first, last = history.lazy_moments[0], history.lazy_moments[-1]
    shown = Table(title="Lazy Attention, head by head", title_justify="left", padding=(0, 0))
    for heading in ("layer", "head", "bias change", "peak at", "tau before", "after", "density", "mass"):
        shown.add_column(heading, justify="right")
    shown.add_column("learned")
    for layer, head in torch.cartesian_prod(*map(torch.arange, last.tau.shape)).tolist():
        shown.add_row(
            str(layer),
            str(head),
            f"{history.bias_change[layer, head]:.2f}",
            str(int(last.bias[layer, head].argmax())),
            f"{first.tau[layer, head]:+.2f}",
            f"{last.tau[layer, head]:+.2f}",
            f"{last.density[layer, head]:.0%}",
            f"{last.mass[layer, head]:.2f}",
            "[bold red]no[/]" if (layer, head) in history.still_heads else "[green]yes[/]",
        )
    return shown


def alpha_table(history: History) -> Table:
    """One row per head of the model with entmax: where its alpha went, and how sparse its attention became."""
    first, last = history.entmax_moments[0], history.entmax_moments[-1]
    shown = Table(title="Entmax, head by head", title_justify="left", padding=(0, 0))
    for heading in ("layer", "head", "alpha before", "after", "density before", "after"):
        shown.add_column(heading, justify="right")
    shown.add_column("learned")
    for layer, head in torch.cartesian_prod(*map(torch.arange, last.alpha.shape)).tolist():
        values = [f"{moment.alpha[layer, head]:.2f}" for moment in (first, last)]
        shares = [f"{moment.density[layer, head]:.0%}" for moment in (first, last)]
        learned = "[bold red]no[/]" if (layer, head) in history.still_heads else "[green]yes[/]"
        shown.add_row(str(layer), str(head), *values, *shares, learned)
    return shown


def report(console: Console, found: dict[str, History], out: Path) -> bool:
    """Show what was learned, write the pictures under `out`; true when every model learned."""
    console.print(loss_table(found))
    console.print(head_table(found["lazy"]))
    console.print(alpha_table(found["entmax"]))
    for kind, history in found.items():
        console.print(f"{kind:7} {pictures.sparkline(history.losses)}", style="cyan")
    for kind, history in found.items():
        console.print(f"{kind} writes: {' '.join((PROMPT + history.sample).split())}", highlight=False, markup=False)
    pictures.report(console, found, out)
    for kind, history in found.items():
        if history.still_heads:
            console.print(f"[bold red]FAIL[/]: {kind}: heads {history.still_heads} stood still")
        elif not history.learned:
            console.print(f"[bold red]FAIL[/]: {kind}: gained {history.gain:.3f} nats, at least {MARGIN} were expected")
    return all(history.learned for history in found.values())


def run(console: Console, out: Path) -> bool:
    console.print(
        "Three models of one book, character by character: softmax, Lazy Attention (learned bias by distance, tau), and entmax "
        "(learned alpha)."
    )
    return report(console, train(console), out)
