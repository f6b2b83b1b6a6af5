"""What docs/masks.md says about speed, from the newest record of the suite `masks` and that of benchmarks/build_masks.py.

python tools/make_masks_page.py     writes it into the page
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from make_speed_table import masks_table
from records import ROOT, load, newest, timed

PAGE = ROOT / "docs" / "masks.md"
BUILDING = ROOT / "docs" / "data" / "mask-building-h200.json"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
WIDTH = 140


def measured() -> str:
    """The paragraphs and the table between the marks."""
    path = newest("masks")
    data = load(path)
    where = f"Beside FlexAttention on one {data['machine']['card']}, bf16, with Triton {data['machine']['triton']}, in one run"
    parts = [f"{where} (record `{path.name}`; {_masks(data)}):", masks_table(), _ratios(data), _building(), building_table()]
    return "\n\n".join(part if part.startswith("|") else textwrap.fill(part, WIDTH, break_on_hyphens=False) for part in parts)


def _masks(data: dict[str, Any]) -> str:
    """The masks of the record in words."""
    given = {kind: sizes for kind, _, sizes in (str(case["case"].get("mask")).partition(":") for case in data["cases"])}
    documents = [int(size) for size in given["documents"].split(",")]
    prompt, rollout = (int(size) for size in given["rollouts"].split(","))
    prefix = max(int(str(case["case"]["mask"])[7:]) for case in data["cases"] if "prefix:" in str(case["case"].get("mask")))
    several = (data["cases"][0]["keys"] - prompt) // rollout
    spread = f"{len(documents)} causal documents of {min(documents)} to {max(documents)} positions"
    return f"{spread}, a prefix of {prefix}, a prompt of {prompt} with {several} rollouts of {rollout}"


def _ratios(data: dict[str, Any]) -> str:
    ms = {
        row["case"].split("/")[0]: row["times"]["both"]["median_ms"] for row in timed(data) if row["contender"] == "backlight"
    }
    dims = [name.removeprefix("causal,d=") for name in ms if name.startswith("causal,d=")]

    def longer(name: str, plain: str) -> list[str]:
        return [f"{ms[f'{name},d={d}'] / ms[f'{plain},d={d}']:.2f}" for d in dims]

    at = f"at D = {' and '.join(dims)}"
    causal = " and ".join(longer("causal as intervals", "causal"))
    packed = " and ".join(longer("documents", "packed documents"))
    first = f"Plain causal attention written as intervals takes {causal} times as long as `causal=True` {at}, "
    across = "tiles that lie across two documents are visited for both, and masked."
    if not any(name.startswith("documents by ids,") for name in ms):
        # a record from before documents of known lengths ran packed
        return f"{first}documents {packed} times as long as the packed call of the same lengths: {across}"
    by_ids = " and ".join(longer("documents by ids", "packed documents"))
    return (
        f"{first}documents of known lengths {packed} times as long as the packed call of the same lengths, on whose kernels "
        f"they run. By ids, as intervals, they take {by_ids} times as long: {across}"
    )


def _building() -> str:
    record = json.loads(BUILDING.read_text())
    return (
        f"Making a mask of {record['positions']} positions from tensors on the same card (`docs/data/{BUILDING.name}`), the "
        "device's own time and the host's clock around a call and a wait; no constructor makes the host wait:"
    )


def building_table() -> str:
    lines = ["| constructor | device, ms | clock, ms |", "|---|---|---|"]
    for name, row in json.loads(BUILDING.read_text())["rows"].items():
        lines.append(f"| `{name}` | {row['device_ms']:.3f} | {row['clock_ms']:.2f} |")
    return "\n".join(lines)


def page(text: str) -> str:
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{measured()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
