"""Tables of ratios for README, docs/hopper.md and docs/experiments.md, from the newest records.

python tools/make_speed_table.py     prints them
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from records import RESULTS, ROOT, load, newest, timed

TERMS = ["bias", "lazy", "sink", "softcap", "gate"]
WIDE = ROOT / "docs" / "data" / "wide-terms-h200.jsonl"
LENGTHS = (2048, 4096, 8192, 16384)
NEWEST, OLDEST = "3.9.0", "3.6.0"
# what, contender, peer, head dimensions, Triton
LINES = (
    ("`hopper` / FlashAttention-3", "backlight", "fa3", (64, 128), NEWEST),
    ("`hopper` / FlashAttention-3", "backlight", "fa3", (64, 128), OLDEST),
    ("`hopper` / FlashAttention-3", "backlight", "fa3", (256,), NEWEST),
    ("`hopper` / FlashAttention-3", "backlight", "fa3", (256,), OLDEST),
    ("`hopper` / cuDNN", "backlight", "sdpa-cudnn", (64, 128), NEWEST),
    ("`hopper` / cuDNN", "backlight", "sdpa-cudnn", (256,), NEWEST),
    ("`hopper` / FlashAttention-2", "backlight", "sdpa-flash", (64, 128), OLDEST),
    ("`triton` / FlexAttention", "backlight:triton", "flex", (64, 128), OLDEST),
    ("`triton` / FlexAttention", "backlight:triton", "flex", (256,), OLDEST),
)


def record_of(contenders: tuple[str, ...], dims: tuple[int, ...], triton: str) -> Path:
    """The newest record of `plain` with this Triton in which all of them were timed up to the longest sequences of these head
    dimensions."""
    wanted = {(f"plain,d={d},s={LENGTHS[-1]},full/bf16", name) for d in dims for name in contenders}

    def fits(data: dict[str, Any]) -> bool:
        return data["machine"]["triton"] == triton and wanted <= {(row["case"], row["contender"]) for row in timed(data)}

    return newest("plain", f"with {contenders} at D = {dims} and Triton {triton}", fits)


def records() -> list[Path]:
    return sorted({record_of((contender, peer), dims, triton) for _, contender, peer, dims, triton in LINES})


def ratios(data: dict, contender: str, peer: str, dims: tuple[int, ...], phase: str) -> list[float]:
    speeds = {(row["case"], row["contender"]): row["tflops"][phase] for row in timed(data)}
    found = []
    for (case, name), speed in speeds.items():
        place = re.match(r"plain,d=(\d+),s=(\d+),", case)
        if name == contender and place and int(place[1]) in dims and int(place[2]) in LENGTHS:
            found.append(speed / speeds[case, peer])
    return found


def table() -> str:
    lines = ["| speed ratio, S 2k to 16k, causal and full | D | Triton | forward | backward |", "|---|---|---|---|---|"]
    for what, contender, peer, dims, triton in LINES:
        data, cells = load(record_of((contender, peer), dims, triton)), [triton]
        for phase in ("forward", "backward"):
            found = ratios(data, contender, peer, dims, phase)
            mean = math.exp(sum(map(math.log, found)) / len(found))
            cells.append(f"{mean:.2f} ({min(found):.2f} to {max(found):.2f})")
        lines.append(f"| {what} | {', '.join(map(str, dims))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cells_table(triton: str) -> str:
    """Every cell of the newest `plain` records that have FA3 and cuDNN, with this Triton: TFLOP/s of `hopper`, ratios."""
    speeds = {}
    for dims in ((64, 128), (256,)):
        for row in timed(load(record_of(("backlight", "fa3", "sdpa-cudnn"), dims, triton))):
            if any(f"d={d}," in row["case"] for d in dims):
                speeds[row["case"], row["contender"]] = row["tflops"]
    lines = ["| D | S | mask | forward | / FA3 | / cuDNN | backward | / FA3 | / cuDNN |", "|---" * 9 + "|"]
    for case, name in speeds:
        place = re.match(r"plain,d=(\d+),s=(\d+),(\w+)", case)
        if name == "backlight" and place:
            cells = list(place.groups())
            for phase in ("forward", "backward"):
                mine = speeds[case, name][phase]
                cells += [f"{mine:.0f}", *(f"{mine / speeds[case, peer][phase]:.2f}" for peer in ("fa3", "sdpa-cudnn"))]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def versions_table() -> str:
    """Every cell with the newest Triton over the same cell with the oldest, of the same hour: speed of `hopper` alone."""
    old, new = (
        {
            row["case"]: row["tflops"]
            for row in load(record_of(("backlight", "fa3"), (64, 128, 256), triton))["rows"]
            if row["contender"] == "backlight"
        }
        for triton in (OLDEST, NEWEST)
    )
    lines = [
        f"| Triton {NEWEST} / {OLDEST} | causal, forward | causal, backward | full, forward | full, backward |",
        "|---|---|---|---|---|",
    ]
    for d, s in dict.fromkeys(re.findall(r"d=(\d+),s=(\d+)", " ".join(old))):
        cells = [
            f"{new[case][phase] / old[case][phase]:.2f}"
            for case in (f"plain,d={d},s={s},causal/bf16", f"plain,d={d},s={s},full/bf16")
            for phase in ("forward", "backward")
        ]
        lines.append(f"| D = {d}, S = {s} | {' | '.join(cells)} |")
    return "\n".join(lines)


def variants_table() -> str:
    """Every variant in one run, forward and backward together: ours over our own plain, and peers' times over ours.

    Plain is the run's own causal case of that shape: timed beside a long variant it was up to 18 % slower.
    """
    rows: dict[str, dict[str, dict]] = {}
    for row in load(newest("variants"))["rows"]:
        rows.setdefault(row["case"].split("/")[0], {})[row["contender"]] = row
    peers = [name for name in ("fa3", "sdpa-flash", "flex") if any("times" in found.get(name, {}) for found in rows.values())]
    heads = ["bf16, forward + backward", "ms", "over plain", *(f"{name} takes" for name in peers)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, found in rows.items():
        mine = found["backlight"]
        ms = mine["times"]["both"]["median_ms"]
        plain = rows.get(re.sub(r"^\w+|,table=\d+", lambda part: "" if part[0].startswith(",") else "causal", case), {})
        over = "" if case.startswith(("causal", "varlen")) else f"{ms / plain['backlight']['times']['both']['median_ms']:.2f}"
        cells = [f"{ms:.2f}", over]
        for peer in peers:
            times = found.get(peer, {}).get("times")
            cells.append("-" if times is None else f"{times['both']['median_ms'] / ms:.2f}x")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def terms_table() -> str:
    """Forward and backward of every learned term over plain, by head dimension and length, from the newest `terms` record."""
    over: dict[tuple[str, str], dict[int, float]] = {}
    for row in load(newest("terms"))["rows"]:
        place = re.match(r"(\w+),d=(\d+),s=(\d+)", row["case"])
        if place and row["contender"] == "backlight" and "over_plain" in row:
            over.setdefault((place[1], place[2]), {})[int(place[3])] = row["over_plain"]["both"]
    lengths = sorted({s for found in over.values() for s in found})
    lines = [f"| over plain | D | {' | '.join(f'S = {s}' for s in lengths)} |", "|---" * (2 + len(lengths)) + "|"]
    for (name, d), found in sorted(over.items(), key=lambda item: (TERMS.index(item[0][0]), int(item[0][1]))):
        lines.append(f"| {name} | {d} | {' | '.join(f'{found[s]:.2f}' if s in found else '-' for s in lengths)} |")
    return "\n".join(lines)


def wide_table() -> str:
    """Learned terms with heads wider than 128 beside `triton`: forward and backward in ms."""
    ms: dict[tuple[str, str], dict[str, float]] = {}
    for line in WIDE.read_text().splitlines():
        row = json.loads(line)
        ms.setdefault((f"{row['d']}, {row['dv']}", row["name"]), {})[row["who"]] = row["fwd"] + row["bwd"]
    lines = ["| ms, forward + backward | D, Dv | `hopper` | over plain | `triton` takes |", "|---|---|---|---|---|"]
    for (dims, name), found in ms.items():
        over = "" if name == "plain" else f"{found['hopper'] / ms[dims, 'plain']['hopper']:.2f}"
        lines.append(f"| {name} | {dims} | {found['hopper']:.2f} | {over} | {found['triton'] / found['hopper']:.2f}x |")
    return "\n".join(lines)


def _bias_rows(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in data["rows"] if row["case"].startswith("bias,d=64")}


def flex_bias() -> str:
    """How many times as long FlexAttention takes for a learned bias, from the newest record in which it was raced."""
    path = newest("variants", "with a bias in FlexAttention", lambda data: "times" in _bias_rows(data).get("flex", {}))
    flex, ours = (_bias_rows(load(path))[name] for name in ("flex", "backlight"))
    ratio = flex["times"]["both"]["median_ms"] / ours["times"]["both"]["median_ms"]
    backend = ours["detail"].split(",")[0]
    return f"{ratio:.0f} times as long as `{backend}` ([record]({path.relative_to(ROOT)}))"


def training_table() -> str:
    """Tokens per second of a whole training step, from the newest record of benchmarks/train_step.py."""
    record = load(newest("train-step"))
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
    phases = ("host forward", "host both", "graph forward", "graph both")
    lines = [
        "| us, B 1, H 2, S 64, D 64 | host, forward | host, forward and backward | CUDA graph, forward | CUDA graph, both |",
        "|---|---|---|---|---|",
    ]
    for row in timed(load(newest("overhead"))):
        times = " | ".join(f"{row['times'][phase]['median_ms'] * 1e3:.0f}" for phase in phases)
        lines.append(f"| {row['contender']}, {row['case'].split(',')[1].split('/')[0]} | {times} |")
    return "\n".join(lines)


def masks_table() -> str:
    """Masks by row intervals beside plain causal attention, packed documents and FlexAttention, from the newest record."""
    rows: dict[str, dict[str, dict]] = {}
    for row in timed(load(newest("masks"))):
        rows.setdefault(row["case"].split("/")[0], {})[row["contender"]] = row
    heads = ["bf16, S 16384, H D = 2048", "D", "forward, ms", "both, ms", "both, TFLOP/s", "flex takes, forward", "both"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case, found in rows.items():
        name, d = case.split(",d=")
        mine, flex = (
            {phase: found[who]["times"][phase]["median_ms"] for phase in ("forward", "both")} for who in ("backlight", "flex")
        )
        cells = [name, d, f"{mine['forward']:.2f}", f"{mine['both']:.2f}", f"{found['backlight']['tflops']['both']:.0f}"]
        lines.append(f"| {' | '.join((*cells, *(f'{flex[phase] / mine[phase]:.2f}x' for phase in mine)))} |")
    return "\n".join(lines)


def pair_table() -> str:
    """A pair bias beside our plain call and the peers, all gradients; each shape from the newest record of it."""
    ms: dict[str, dict[str, dict[str, float]]] = {}
    for row in (row for path in sorted(RESULTS.glob("pair-2*.json.gz")) for row in timed(load(path))):
        name, shape = row["case"].split("/")[0].split(",", 1)
        who = "plain" if (name, row["contender"]) == ("plain", "backlight") else row["contender"] if name == "pair" else None
        if who and "times" in row:
            ms.setdefault(shape, {})[who] = {phase: row["times"][phase]["median_ms"] for phase in ("forward", "both")}
    heads = ["bf16, ms: forward, forward and backward", "backlight", "without the bias", "SDPA efficient", "FlexAttention"]
    heads.append("cuEquivariance")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for shape, found in ms.items():
        times = (found.get(who) for who in ("backlight", "plain", "sdpa-efficient", "flex", "cuequivariance"))
        cells = ("-" if each is None else f"{each['forward']:.2f}, {each['both']:.2f}" for each in times)
        lines.append(f"| {shape.upper().replace('=', ' ').replace(',', ', ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(
        table(),
        cells_table(NEWEST),
        cells_table(OLDEST),
        versions_table(),
        variants_table(),
        training_table(),
        overhead_table(),
        pair_table(),
        sep="\n\n",
    )
