"""Which tiles the Triton kernels run with: the shipped tables, and the fallbacks beside them."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import torch

from backlight.backends.triton.config import KernelConfig, entry, heuristic, kernels_of, table_of
from backlight.call import Call
from backlight.spec import AttentionSpec

VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "bias": {"causal": True, "bias": True},
    "lazy": {"causal": True, "bias": True, "tau": True},
    "softcap": {"causal": True, "softcap": 20.0},
    "window": {"causal": True, "window": (1023, 0)},
}
DEVICES = [path.name for path in (files("backlight") / "data" / "tuning").iterdir() if (path / "triton.json").is_file()]


def call_of(d: int, variant: str, dtype: torch.dtype = torch.bfloat16) -> Call:
    spec = AttentionSpec(**VARIANTS[variant])  # type: ignore[arg-type]
    q = torch.zeros(1, 2, 8, d, dtype=dtype)
    return Call(spec, q, q, q, bias=torch.zeros(2, 4) if spec.bias else None, tau=torch.zeros(2) if spec.tau else None)


def test_kernels_follow_the_call() -> None:
    assert kernels_of(call_of(64, "causal")) == ("forward", "dq", "dkdv")
    assert kernels_of(call_of(64, "lazy")) == ("lse", "elastic", "dq", "dkdv", "dbias")
    assert kernels_of(call_of(136, "bias")) == ("forward", "dq", "dv", "dk", "dbias")
    assert kernels_of(call_of(136, "causal", torch.float32)) == ("forward", "dq", "dkdv")


@pytest.mark.parametrize("device", DEVICES)
def test_a_shipped_table_covers_what_is_launched_and_nothing_else(device: str) -> None:
    """An entry that no call looks up is a measurement that no user gets."""
    table, used = table_of(device), set()
    for d in (64, 128, 256):
        for variant in VARIANTS:
            call = call_of(d, variant)
            for kernel in kernels_of(call):
                assert entry(table, kernel, call) is not None
                used.add(f"{kernel}/{d}/{variant}")
    assert set(table) <= used
    assert all(config.block_m <= config.block_n for key, config in table.items() if key.startswith("dbias"))


@pytest.mark.parametrize("device", DEVICES)
def test_the_best_is_the_fastest_row(device: str) -> None:
    record = json.loads((files("backlight") / "data" / "tuning" / device / "triton.json").read_text())
    for key, chosen in record["best"].items():
        kernel, d, variant = key.split("/")
        rows = [row for row in record["rows"] if (row["kernel"], str(row["d"]), row["variant"]) == (kernel, d, variant)]
        timed = {row["config"]: row["ms"] for row in rows if row["ms"]}
        assert timed[",".join(map(str, chosen))] == min(timed.values()), key


def test_a_variant_without_an_entry_takes_the_plain_one() -> None:
    plain, own = KernelConfig(64, 64, 4, 2), KernelConfig(32, 64, 4, 2)
    table = {"dq/64/causal": plain, "dq/64/full": own, "dq/128/softcap": own, "dq/128/causal": plain}
    assert entry(table, "dq", call_of(64, "softcap")) == plain
    assert entry(table, "dq", call_of(64, "full")) == own
    assert entry(table, "dq", call_of(128, "softcap")) == own
    assert entry(table, "dq", call_of(40, "causal")) == plain
    assert entry(table, "dq", call_of(256, "causal")) is None
    assert entry({"forward/64/causal": plain}, "lse", call_of(64, "lazy")) == plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("d", [16, 64, 128, 256])
def test_the_heuristic_knows_every_kernel(d: int, dtype: torch.dtype) -> None:
    for variant in VARIANTS:
        call = call_of(d, variant, dtype)
        for kernel in kernels_of(call):
            config = heuristic(kernel, call)
            assert kernel != "dbias" or config.block_m <= config.block_n


def test_tiles_stay_within_what_the_kernels_count_on() -> None:
    with pytest.raises(ValueError, match="block_m \\+ block_n"):
        KernelConfig(128, 256, 8, 2)
