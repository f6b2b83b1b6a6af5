"""Tokens per second of whole training steps: a 350M-parameter decoder at length 8192 in bf16, blocks compiled.

    PYTHONPATH=src python benchmarks/train_step.py --out benchmarks/results/nvidia-h200

The decoder is built once from `backlight.nn`; contenders differ only in the call in its middle: ours, SDPA, FlexAttention.
Before a contender is timed, two layers of it are compared with dense fp32 attention: its gradients may be at most twice as far
away as those of dense bf16 attention. Rounds alternate between contenders; results are written after every round. What a
contender cannot express (SDPA and FlexAttention have no elastic softmax) is a row with its reason. FlexAttention with a learned
bias is timed on two layers first: where all of them would take longer than --patience seconds a step, those two are the row.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from backlight.bench.contenders.flex import KERNEL_OPTIONS, TOO_LARGE
from backlight.bench.machine import machine
from backlight.nn import Attention, LazyAttention
from backlight.spec import AttentionSpec

VARIANTS = ("plain", "bias", "lazy")
DISTANCES = 512
GATE = 2.0


@dataclass(frozen=True)
class Shape:
    """350M parameters by default: 24 blocks of width 1024, 16 heads of 64."""

    vocabulary: int = 50304
    dim: int = 1024
    heads: int = 16
    layers: int = 24
    length: int = 8192
    batch: int = 2


# --- attention: one set of parameters, several calls --------------------------------------------------------------------------


class Biased(LazyAttention):
    """The bias of Lazy Attention under plain softmax."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.tau.requires_grad_(False)

    def terms(self) -> dict[str, Tensor]:
        return {name: term for name, term in super().terms().items() if name != "tau"}


KINDS: dict[str, type[Attention]] = {"plain": Attention, "bias": Biased, "lazy": LazyAttention}
Attend = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]


def by_sdpa(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if "bias" not in layer.terms():
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_bias(layer, q.shape[2]).to(q.dtype))


def dense_bias(layer: Attention, length: int) -> Tensor:
    """[1, H, S, S]: the learned table spread out, -inf above the diagonal."""
    bias = layer.terms()["bias"]
    distance = AttentionSpec().distance(0, length, 0, length, length, length, bias.device)
    table = functional.pad(bias, (0, 1))
    dense = table[:, distance.clamp(0, bias.shape[1])]
    return dense.masked_fill(distance < 0, -math.inf)[None]


def by_dense(layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax or elastic softmax written out, every intermediate in the dtype of q: truth in fp32, yardstick in bf16."""
    terms, length = layer.terms(), q.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    if "bias" in terms:
        s = s + dense_bias(layer, length).to(q.dtype).masked_fill(~visible, 0)
    weight = s.softmax(dim=-1)
    if "tau" in terms:
        n = torch.arange(1, length + 1, device=q.device)[:, None]
        weight = torch.relu(weight + (terms["tau"][:, None, None] / n).to(q.dtype)) * visible
    return weight @ v


class ByFlex:
    """FlexAttention with the causal block mask and, for a bias, a score function that captures the table."""

    def __init__(self, length: int, device: torch.device, options: dict[str, int]):
        self.options = options
        self.mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device.type)

    def __call__(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        table = layer.terms().get("bias")
        score = None
        if table is not None:
            columns = table.shape[1]

            def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                distance = i - j
                near = distance < columns
                return s + torch.where(near, table[h, torch.where(near, distance, 0)], 0.0)

        return flex_attention(q, k, v, score_mod=score, block_mask=self.mask, kernel_options=self.options or None)


# --- the decoder --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, shape: Shape, variant: str, attend: Attend | None, backend: str | None):
        super().__init__()
        options: dict[str, Any] = {"backend": backend} | ({} if variant == "plain" else {"distances": DISTANCES})
        self.norm, self.mlp_norm = nn.RMSNorm(shape.dim), nn.RMSNorm(shape.dim)
        self.attention = KINDS[variant](shape.dim, shape.heads, **options)
        self.mlp = nn.Sequential(
            nn.Linear(shape.dim, 4 * shape.dim, bias=False), nn.GELU(), nn.Linear(4 * shape.dim, shape.dim, bias=False)
        )
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.attend is None:
            x = x + self.attention(h)
        else:
            y = self.attend(self.attention, *self.attention.project(h))
            x = x + self.attention.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, shape: Shape, variant: str, attend: Attend | None = None, backend: str | None = None):
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.dim)
        nn.init.normal_(self.embed.weight, std=shape.dim**-0.5)
        self.blocks = nn.ModuleList(Block(shape, variant, attend, backend) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)

    def forward(self, passages: Tensor) -> Tensor:
        """Mean cross-entropy of passages [B, S + 1]; the embedding reads as well."""
        x = self.embed(passages[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.read(x, passages[:, 1:])

    def read(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = functional.linear(self.norm(x), self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def compile_parts(self, backend: str) -> None:
        """Blocks share their code, so one compilation serves all of them."""
        for block in self.blocks:
            block.compile(fullgraph=True, backend=backend)
        self.read = torch.compile(self.read, fullgraph=True, backend=backend)  # type: ignore[method-assign]


def fresh(shape: Shape, variant: str, device: torch.device, dtype: torch.dtype, **options: Any) -> Decoder:
    """The same weights for every contender; learned terms away from zero."""
    torch.manual_seed(0)
    model = Decoder(shape, variant, **options).to(device)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention.bias"):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


# --- gate ---------------------------------------------------------------------------------------------------------------------


def gradients(model: Decoder, passages: Tensor) -> dict[str, Tensor]:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(zip(parameters, torch.autograd.grad(model(passages), list(parameters.values())), strict=True))


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative error in norm of each gradient; NaN stays NaN."""
    return {name: float((got[name].float() - want[name].float()).norm() / want[name].float().norm()) for name in want}


def gate(shape: Shape, variant: str, device: torch.device, compiler: str, choice: dict[str, Any]) -> dict[str, Any]:
    """Two layers at length 512: the contender's gradients against dense fp32, in units of dense bf16's own error."""
    small = Shape(vocabulary=512, dim=shape.dim, heads=shape.heads, layers=2, length=min(512, shape.length), batch=2)
    passages = torch.randint(small.vocabulary, (2, small.length + 1), generator=torch.Generator().manual_seed(2)).to(device)
    start = fresh(small, variant, device, torch.bfloat16)
    # the truth starts from the rounded weights, as the contenders do
    truth = fresh(small, variant, device, torch.float32, attend=by_dense)
    truth.load_state_dict(start.state_dict())
    want = gradients(truth, passages)
    yardstick = worst(gradients(fresh(small, variant, device, torch.bfloat16, attend=by_dense), passages), want)
    model = fresh(small, variant, device, torch.bfloat16, **decoder_options(choice, small.length, device))
    model.compile_parts(compiler)
    error = worst(gradients(model, passages), want)
    # one unit in the last place of bf16 keeps tiny yardsticks from judging
    ratios = {name: error[name] / (yardstick[name] + 2**-9) for name in error}
    name, ratio = max(ratios.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
    return {"worst": name, "ratio": ratio, "error": error[name], "yardstick": yardstick[name], "passed": ratio <= GATE}


# --- timing -------------------------------------------------------------------------------------------------------------------


class Trainer:
    """One contender: model, optimizer, and a step that can be timed."""

    def __init__(self, shape: Shape, variant: str, device: torch.device, compiler: str, choice: dict[str, Any]):
        self.device, self.shape = device, shape
        self.model = fresh(shape, variant, device, torch.bfloat16, **decoder_options(choice, shape.length, device))
        self.model.compile_parts(compiler)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        generator = torch.Generator().manual_seed(3)
        self.passages = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), generator=generator).to(device)
        self.losses: list[float] = []

    def step(self) -> Tensor:
        loss = self.model(self.passages)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(self, steps: int) -> float:
        """Seconds per step."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
        self.wait()
        took = (time.perf_counter() - start) / steps
        self.losses.append(float(loss))
        return took


@contextmanager
def surviving(row: dict[str, Any]) -> Iterator[None]:
    """A failing contender is a row with its reason, not the end of the run."""
    try:
        yield
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300] if str(error) else ''}"


def contenders(variant: str, shape: Shape, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Name -> options to try in turn, or the reason why not."""
    found: dict[str, Any] = {}
    for name in arguments.ours:
        found["backlight" if name == "auto" else f"backlight:{name}"] = [{"backend": None if name == "auto" else name}]
    if variant == "lazy":
        return found | {"sdpa": "has no elastic softmax", "flex": "has no elastic softmax: the relu acts after normalisation"}
    found["sdpa"] = [{"attend": by_sdpa}]
    if variant == "bias" and not arguments.dense:
        gib = shape.heads * shape.length**2 * 2 / 2**30
        found["sdpa"] = f"wants the bias as [heads, S, S]: {gib:.1f} GiB a layer and as much for its gradient; --dense tries"
    found["flex"] = [{"flex": options} for options in KERNEL_OPTIONS]
    if device.type != "cuda":
        found["flex"] = f"has no compiled backward on {device.type}"
    return found


def decoder_options(choice: dict[str, Any], length: int, device: torch.device) -> dict[str, Any]:
    """A block mask belongs to its length, so FlexAttention is made for each."""
    return {"attend": ByFlex(length, device, choice["flex"])} if "flex" in choice else choice


def gated_choice(row: dict[str, Any], choices: list[dict[str, Any]], check: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """The first of several choices whose kernels fit, with the gate's verdict written into the row."""
    for number, choice in enumerate(choices):
        try:
            row["gate"] = check(choice)
        except Exception as error:
            if number + 1 == len(choices) or not any(words in str(error) for words in TOO_LARGE):
                raise
        else:
            return choice
    raise ValueError("no choices to try")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    shape = Shape(**{name: getattr(arguments, name) for name in Shape.__dataclass_fields__})
    deadline = time.monotonic() + arguments.seconds
    # every contender compiles the same block for two lengths, each for itself
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    compiler = "inductor" if device.type == "cuda" else "aot_eager"
    record: dict[str, Any] = {"machine": machine(device), "shape": asdict(shape), "compiler": compiler, "variants": {}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"train-step-{time.strftime('%Y%m%d-%H%M%S')}.json"

    def write() -> None:
        path.write_text(json.dumps(record, indent=1) + "\n")

    for variant in arguments.variants:
        rows: dict[str, Any] = {}
        record["variants"][variant] = rows
        trainers: dict[str, Trainer] = {}
        for name, choices in contenders(variant, shape, device, arguments).items():
            row = rows[name] = {}
            if isinstance(choices, str):
                row["refused"] = choices
                continue
            if time.monotonic() > deadline:
                row["failed"] = "out of time"
                continue
            with surviving(row):
                begun = time.monotonic()
                chosen = gated_choice(row, choices, partial(gate, shape, variant, device, compiler))
                if not row["gate"]["passed"]:
                    raise ValueError(f"gate: {row['gate']['worst']} is {row['gate']['ratio']:.1f} times the yardstick off")
                if variant == "bias" and "flex" in chosen:
                    two = Trainer(replace(shape, layers=2), variant, device, compiler, chosen)
                    two.step()
                    row["two_layers_ms"] = round(1e3 * two.time(1), 1)
                    del two
                    if row["two_layers_ms"] * shape.layers / 2e3 > arguments.patience:
                        raise TimeoutError(f"two of {shape.layers} layers take {row['two_layers_ms'] / 1e3:.1f} s a step")
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                trainer = Trainer(shape, variant, device, compiler, chosen)
                for _ in range(arguments.warmup):
                    trainer.step()
                trainer.wait()
                row["ready_after_s"] = round(time.monotonic() - begun, 1)
                row["parameters"] = trainer.parameters
                if device.type == "cuda":
                    row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
                row["ms"] = []
                trainers[name] = trainer
            say(variant, name, row)
            write()
        for _ in range(arguments.rounds):
            for name, trainer in trainers.items():
                if time.monotonic() > deadline or "failed" in rows[name]:
                    continue
                with surviving(rows[name]):
                    rows[name]["ms"].append(round(1e3 * trainer.time(arguments.steps), 2))
            write()
        for name, trainer in trainers.items():
            row = rows[name]
            if row["ms"]:
                row["ms_median"] = statistics.median(row["ms"])
                row["tokens_per_s"] = round(shape.batch * shape.length / row["ms_median"] * 1e3)
                row["losses"] = trainer.losses
            say(variant, name, row)
        write()
        del trainers
        # not before: it would also forget the compiled blocks of contenders still to be timed
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return record


def say(variant: str, name: str, row: dict[str, Any]) -> None:
    shown = {key: value for key, value in row.items() if key not in ("losses", "gate")}
    ratio = f" gate {row['gate']['ratio']:.2f}" if "gate" in row else ""
    sys.stderr.write(f"{variant} {name}:{ratio} {shown}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480, help="nothing new is begun after this many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--ours", nargs="+", default=["auto"], help="auto, or names of our backends")
    parser.add_argument("--dense", action="store_true", help="SDPA with the bias spread out, memory permitting")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--patience", type=float, default=10, help="longest step, in seconds, that is timed as a whole")
    for name, size in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
