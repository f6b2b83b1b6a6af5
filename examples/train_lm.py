"""Train small language models of Alice in Wonderland, with softmax, Lazy Attention and entmax, and draw what they learned.

    python examples/train_lm.py                         800 steps each: minutes on a CPU
    python examples/train_lm.py --device cuda           seconds to a minute on a GPU
    python examples/train_lm.py --steps 100 --out pics  what `make demo` runs

The model, the loop and the pictures are the modules `text`, `model`, `train` and `pictures` of `backlight.demo`. The attention
is one line in `model.py`: `Attention(dim, heads)`, `LazyAttention(dim, heads, distances=64)` or `EntmaxAttention(dim, heads)`.
"""

import argparse
import sys
from pathlib import Path

import torch
from rich.console import Console

from backlight.demo import train

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=800)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--out", type=Path, default=Path("reports") / "train_lm")
arguments = parser.parse_args()

console = Console()
found = train.train(console, steps=arguments.steps, seed=arguments.seed, device=arguments.device)
sys.exit(0 if train.report(console, found, arguments.out) else 1)
