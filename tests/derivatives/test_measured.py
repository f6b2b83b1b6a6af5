"""What pages say that derivatives cost on a card is what the records say."""

from __future__ import annotations

import re
from pathlib import Path

from backlight.bench.results import read

DOCS = Path(__file__).parents[2] / "docs"
JVP = (DOCS / "data" / "jvp-h200.txt").read_text()
OPTIONS = read(DOCS / "data" / "jvp-options-h200.txt.gz")
HOPPER = read(DOCS / "data" / "second-hopper-h200.txt.gz")
SECOND = read(DOCS / "data" / "second-h200.txt.gz")


def page(name: str) -> str:
    return " ".join((DOCS / name).read_text().split())


def test_the_table_of_forward_mode() -> None:
    found = re.findall(
        r"D +(\d+) (\w+) +forward ([\d.]+) \(\d+\)  jvp ([\d.]+) \((\d+)\), ratio ([\d.]+), .*?ratio ([\d.]+)", JVP
    )
    assert len(found) == 4
    text = page("hopper.md")
    for d, mask, forward, both, rate, ratio, portable in found:
        cells = f"| {float(forward):.2f} | {float(both):.2f} | {rate} | {ratio} | {float(portable):.1f} |"
        assert f"| D = {d}, {mask} {cells}" in text


def test_ratios_and_steps_of_forward_mode() -> None:
    ratios = {d: [float(x) for x in re.findall(rf"D +{d} \w+ .*?jvp .*?ratio ([\d.]+)", JVP)] for d in (64, 128)}
    text = page("derivatives.md")
    assert f"take {max(ratios[64]):.1f} times our forward at D = 64" in text
    assert f"and {min(ratios[128]):.1f} to {max(ratios[128]):.1f} times at D = 128" in text
    steps = {s: (float(ms), float(gb)) for s, ms, gb in re.findall(r"S +(\d+)  ours ([\d.]+) ms, ([\d.]+) GB", JVP)}
    ms, gb = steps["4096"]
    assert f"takes {ms:.1f} ms and {1000 * gb:.0f} MB at S 4096" in text
    ms, gb = steps["16384"]
    assert f"at S 16384 it is {ms:.1f} ms and {gb:.2f} GB" in text


def test_options_of_forward_mode() -> None:
    def ratios(d: int, options: str) -> list[float]:
        return [float(x) for x in re.findall(rf"TIME D +{d} \w+ +{options}: .* ratio ([\d.]+)", OPTIONS)]

    text = page("hopper.md")
    assert f"{max(ratios(128, 'block_n=64 consumers=2')):.1f} times the forward without turns" in text
    assert f"{max(ratios(128, 'block_n=64 consumers=2 ahead=0 pingpong=1')):.1f} with turns" in text
    assert f"at D = 64 took {max(ratios(64, 'block_n=64 consumers=3 pingpong=1')):.1f}." in text


def test_double_backward() -> None:
    found = {
        int(d): (float(ms), float(triton), float(hopper))
        for d, ms, triton, hopper in re.findall(
            r"d=(\d+) causal DOUBLE BACKWARD.*?: ([\d.]+) ms = ([\d.]+)x backward triton, ([\d.]+)x backward hopper", SECOND
        )
    }
    (ms64, triton64, hopper64), (ms128, triton128, hopper128) = found[64], found[128]
    text = page("derivatives.md")
    assert f"{ms64:.1f} ms at D = 64 and {ms128:.1f} ms at D = 128 (B 1, H 16, causal)" in text
    assert (
        f"{triton64:.2f} and {triton128:.2f} times `triton`'s own backward, {hopper64:.2f} and {hopper128:.2f} times `hopper`'s"
        in text
    )


def test_double_backward_on_hopper() -> None:
    assert "BAD" not in HOPPER
    found = {
        (mask, d): (float(ms), ratio)
        for d, mask, ms, ratio in re.findall(r"D (\d+) (\w+) DOUBLE BACKWARD, default: ([\d.]+) ms = ([\d.]+)x", HOPPER)
    }
    rates = dict(re.findall(r"D (\d+) causal second: [\d.]+ ms, (\d+) TFLOP/s of 10", HOPPER))
    text = page("derivatives.md")
    (ms64, causal64), (ms128, causal128) = found["causal", "64"], found["causal", "128"]
    assert f"it takes {ms64:.1f} and {ms128:.1f} ms, {causal64} and {causal128} times our backward" in text
    assert f"{found['full', '64'][1]} and {found['full', '128'][1]} times without a mask" in text
    assert f"run at {rates['64']} TFLOP/s, at D = 128 at {rates['128']}" in text


def test_others_and_another_triton() -> None:
    text = page("derivatives.md")
    peers = (DOCS / "data" / "jvp-peers-h200.txt").read_text()
    full, causal = (line for line in peers.splitlines() if line.startswith("D"))
    ours, rcm, other = (float(re.findall(rf"  {name} ([\d.]+)", full)[0]) for name in ("jvp", "rcm", "jvp_flash_attention"))
    assert f"NVlabs/rcm takes {rcm:.2f} ms without a mask where ours takes {ours:.2f}" in text
    ours, slow = (float(re.findall(rf"  {name} ([\d.]+)", causal)[0]) for name in ("jvp", "jvp_flash_attention"))
    assert f"jvp_flash_attention takes {other:.1f} ms, and causal {slow:.2f} ms where ours takes {ours:.2f}" in text
    newer = (DOCS / "data" / "jvp-triton39-h200.txt").read_text()
    narrow, wide = ([float(x) for x in re.findall(rf"D +{d} \w+ .*?jvp .*?ratio ([\d.]+)", newer)] for d in (64, 128))
    assert f"{min(narrow):.1f} to {max(narrow):.1f} times our forward at D = 64" in text
    assert f"and {min(wide):.1f} to {max(wide):.1f} times at D = 128" in text
