"""Tables of ratios for README and docs/hopper.md, from the newest records: python docs/make_speed_table.py (prints them)."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200"
LENGTHS = (2048, 4096, 8192, 16384)
# what, contender, peer, head dimensions
LINES = (
    ("`hopper` / FlashAttention-3", "backlight", "fa3", (64, 128)),
    ("`hopper` / cuDNN", "backlight", "sdpa-cudnn", (64, 128)),
    ("`hopper` / FlashAttention-2", "backlight", "sdpa-flash", (64, 128)),
    ("`triton` / FlexAttention", "backlight:triton", "flex", (64, 128)),
    ("`triton` / FlexAttention", "backlight:triton", "flex", (256,)),
)


def record_of(*contenders: str) -> Path:
    """The newest record of `plain` in which all of them were timed."""
    for path in sorted(RESULTS.glob("plain-*.json"), reverse=True):
        if set(contenders) <= {row["contender"] for row in json.loads(path.read_text())["rows"] if row["status"] == "ok"}:
            return path
    raise FileNotFoundError(f"no record of {contenders}")


def records() -> list[Path]:
    return sorted({record_of(contender, peer) for _, contender, peer, _ in LINES})


def ratios(data: dict, contender: str, peer: str, dims: tuple[int, ...], phase: str) -> list[float]:
    speeds = {(row["case"], row["contender"]): row["tflops"][phase] for row in data["rows"] if row["status"] == "ok"}
    found = []
    for (case, name), speed in speeds.items():
        place = re.match(r"plain,d=(\d+),s=(\d+),", case)
        if name == contender and place and int(place[1]) in dims and int(place[2]) in LENGTHS:
            found.append(speed / speeds[case, peer])
    return found


def table() -> str:
    lines = ["| speed ratio, S 2k to 16k, causal and full | D | forward | backward |", "|---|---|---|---|"]
    for what, contender, peer, dims in LINES:
        data, cells = json.loads(record_of(contender, peer).read_text()), []
        for phase in ("forward", "backward"):
            found = ratios(data, contender, peer, dims, phase)
            mean = math.exp(sum(map(math.log, found)) / len(found))
            cells.append(f"{mean:.2f} ({min(found):.2f} to {max(found):.2f})")
        lines.append(f"| {what} | {', '.join(map(str, dims))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def terms_table() -> str:
    """What a learned term costs on Hopper: forward and backward over plain, a column for each head dimension and length."""
    cells = json.loads(sorted(RESULTS.glob("hopper-terms-*.json"))[-1].read_text())["cells"]
    cells.sort(key=lambda cell: (cell["d"], cell["s"]))
    heads = [f"D {cell['d']}, S {cell['s']}" for cell in cells]
    lines = [f"| time over plain, causal, forward + backward | {' | '.join(heads)} |", "|---" * (len(cells) + 1) + "|"]
    names = {"bias": "bias (512)", "tau": "tau", "lazy": "Lazy: bias and tau", "sdpa": "FlashAttention-2, no term"}
    for name in ("sink", "gate", "bias", "tau", "lazy", "softcap", "sdpa"):
        ratios = [sum(cell["ms"][name].values()) / sum(cell["ms"]["plain"].values()) for cell in cells]
        lines.append(f"| {names.get(name, name)} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join(lines)


def wide_range() -> str:
    """Ratios to FA3 at D = 256 of what is shipped there, by device time, from the newest record of options."""
    runs = json.loads(sorted(RESULTS.glob("hopper-options-*.json"))[-1].read_text())["runs"]
    shipped = {("fwd", "full"): "pr", ("fwd", "causal"): "base", ("bwd", "full"): "d", ("bwd", "causal"): "d"}
    found: dict[str, list[float]] = {"fwd": [], "bwd": []}
    for cell in (cell for run in runs for cell in run["cells"] if cell["d"] == 256):
        speeds, name = cell["tflops"], shipped[cell["direction"], cell["mask"]]
        # the kernels of a direction were settled in one run: the others do not have the shipped variant
        if name in speeds and ("pr" in speeds or "d" in speeds):
            found[cell["direction"]].append(speeds[name] / speeds["fa3"])
    fwd, bwd = found["fwd"], found["bwd"]
    return f"{min(fwd):.2f} to {max(fwd):.2f} of FlashAttention-3 forward, {min(bwd):.2f} to {max(bwd):.2f} backward"


def variants_record() -> Path:
    return sorted(RESULTS.glob("variants-*.json"))[-1]


def variants_table() -> str:
    """Forward and backward of every variant in one run: ours over our own plain, and peers' times over ours."""
    rows: dict[str, dict[str, dict]] = {}
    for row in json.loads(variants_record().read_text())["rows"]:
        rows.setdefault(row["case"].split("/")[0], {})[row["contender"]] = row
    ours = [name for name in ("backlight", "backlight:triton") if any(name in found for found in rows.values())]
    peers = ("fa3", "sdpa-flash", "flex")
    heads = [
        "forward + backward, bf16",
        "ms",
        "over plain",
        *(f"{name} over plain" for name in ours[1:]),
        *(f"{name} takes" for name in peers),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, found in rows.items():
        if "times" not in found["backlight"]:
            continue
        mine = found["backlight"]["times"]["both"]["median_ms"]
        cells = [f"{found[name]['over_plain']['both']:.2f}" if "over_plain" in found.get(name, {}) else "" for name in ours]
        slower = [
            f"{found[p]['times']['both']['median_ms'] / mine:.2f}x" if "times" in found.get(p, {}) else "-" for p in peers
        ]
        lines.append(f"| {case} | {mine:.2f} | {' | '.join(cells + slower)} |")
    return "\n".join(lines)


def training_table() -> str:
    """Tokens per second of a whole training step, from the newest record of benchmarks/train_step.py."""
    record = json.loads(sorted(RESULTS.glob("train-step-*.json"))[-1].read_text())
    names = {"plain": "softmax", "bias": "learned bias (512)", "lazy": "Lazy: bias and tau"}
    lines = ["| tokens per second | backlight | SDPA | FlexAttention |", "|---|---|---|---|"]
    for variant, rows in record["variants"].items():
        cells = [_training_cell(rows[name], record["shape"]["layers"]) for name in ("backlight", "sdpa", "flex")]
        lines.append(f"| {names[variant]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _training_cell(row: dict, layers: int) -> str:
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:,}"
    if "two_layers_ms" in row:
        return f"2 of {layers} layers alone take {row['two_layers_ms'] / 1e3:.1f} s a step"
    return row["refused"].split(":")[0].split(";")[0]


def overhead_table() -> str:
    """Host time of one tiny call, in microseconds, from the newest `overhead` record."""
    rows = json.loads(sorted(RESULTS.glob("overhead-*.json"))[-1].read_text())["rows"]
    phases = ("host forward", "host both", "graph forward", "graph both")
    lines = [
        "| us, B 1, H 2, S 64, D 64 | host, forward | host, forward and backward | CUDA graph, forward | CUDA graph, both |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["status"] == "ok":
            times = " | ".join(f"{row['times'][phase]['median_ms'] * 1e3:.0f}" for phase in phases)
            lines.append(f"| {row['contender']}, {row['case'].split(',')[1].split('/')[0]} | {times} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), terms_table(), variants_table(), training_table(), overhead_table(), wide_range(), sep="\n\n")
