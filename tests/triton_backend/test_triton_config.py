"""Which tiles the Triton kernels run with: the shipped tables, and the fallbacks beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch

from backlight import info
from backlight.backends.triton import BACKEND, config
from backlight.backends.triton.config import KernelConfig, entry, heuristic, kernels_of, table_for, table_in_use, tables
from backlight.backends.triton.device import INTERPRETED, KIB, Device, device_of
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


def test_a_shared_pair_bias_has_a_kernel_for_its_gradient() -> None:
    q = torch.zeros(4, 2, 8, 32, dtype=torch.bfloat16)
    for shape, more in (((1, 2, 8, 8), ("dpair",)), ((4, 1, 8, 8), ("dpair",)), ((4, 2, 8, 8), ()), ((1, 1, 1, 8), ())):
        call = Call(AttentionSpec(pair_bias=True), q, q, q, pair_bias=torch.zeros(shape, dtype=q.dtype))
        assert kernels_of(call) == ("forward", "dq", "dkdv", *more)
        for kernel in (*kernels_of(call), "fused"):
            assert heuristic(kernel, call, H200).tma
            assert not heuristic(kernel, call, Device("some card", "sm_80", 99 * KIB)).tma


def test_short_rows_with_a_pair_bias_have_forward_tiles_of_their_own() -> None:
    """As measured on an H200; all other tiles are the same for every length."""
    found = []
    for rows in (64, 65):
        q = torch.zeros(4, 2, rows, 32, dtype=torch.bfloat16)
        call = Call(AttentionSpec(pair_bias=True), q, q, q, pair_bias=torch.zeros(1, 2, rows, rows, dtype=q.dtype))
        found.append({kernel: config.chosen(kernel, call, H200) for kernel in kernels_of(call)})
    short, longer = found
    assert short.pop("forward") == KernelConfig(64, 64, 4, 2, tma=True, registers=96)
    assert longer.pop("forward") == KernelConfig(128, 64, 4, 3, tma=True)
    assert short == longer


@pytest.mark.parametrize("folder", DEVICES)
def test_a_shipped_table_covers_what_is_launched_and_nothing_else(folder: str) -> None:
    """An entry that no call looks up is a measurement that no user gets."""
    table, used = next(x.best for x in tables() if x.folder == folder), set()
    for d in (64, 128, 256):
        for variant in VARIANTS:
            call = call_of(d, variant)
            for kernel in kernels_of(call):
                assert entry(table, kernel, call) is not None
                used.add(f"{kernel}/{d}/{variant}")
    assert set(table) <= used
    assert all(config.block_m <= config.block_n for key, config in table.items() if key.startswith("dbias"))


@pytest.mark.parametrize("folder", DEVICES)
def test_the_best_is_the_fastest_row(folder: str) -> None:
    record = json.loads((files("backlight") / "data" / "tuning" / folder / "triton.json").read_text())
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
@pytest.mark.parametrize("d", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("shared", [64, 99, 163, 227])
def test_the_heuristic_knows_every_kernel(d: int, dtype: torch.dtype, shared: int) -> None:
    for variant in VARIANTS:
        call = call_of(d, variant, dtype)
        for kernel in kernels_of(call):
            tiles = heuristic(kernel, call, Device("some card", "sm_100", shared * KIB))
            assert kernel != "dbias" or tiles.block_m <= tiles.block_n


def test_tiles_stay_within_what_the_kernels_count_on() -> None:
    with pytest.raises(ValueError, match="block_m \\+ block_n"):
        KernelConfig(128, 256, 8, 2)


# --- which card gets which table ---------------------------------------------------------------------------------------------

H200 = Device("NVIDIA H200", "sm_90", 227 * KIB)


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H20", "NVIDIA GH200 480GB", "NVIDIA H800"])
def test_hopper_cards_share_what_was_measured(name: str) -> None:
    found = table_for(Device(name, "sm_90", 227 * KIB))
    assert found is not None
    assert found.folder == "nvidia-h200"


@pytest.mark.parametrize("card", [Device("a lesser H200", "sm_90", 163 * KIB), Device("NVIDIA B200", "sm_100", 227 * KIB)])
def test_a_table_stays_with_its_architecture_and_its_memory(card: Device) -> None:
    """Less shared memory than its tiles were measured with, or matrix units of another kind."""
    assert table_for(card) is None
    call = call_of(128, "causal")
    assert config.chosen("dq", call, card) == heuristic("dq", call, card) != config.chosen("dq", call, H200)


def properties(**known: object) -> SimpleNamespace:
    return SimpleNamespace(**({"name": "a card", "major": 8, "minor": 6} | known))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Device]]:
    """`device_of` of a card that says this of itself."""
    device_of.cache_clear()

    def found(hip: str | None = None, **known: object) -> Device:
        device_of.cache_clear()
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties(**known))
        return device_of(torch.device("cuda", 0))

    yield found
    device_of.cache_clear()


def test_shared_memory_is_asked_for_then_looked_up(card: Callable[..., Device]) -> None:
    assert card(shared_memory_per_block_optin=101376) == Device("a card", "sm_86", 101376)
    assert card() == Device("a card", "sm_86", 99 * KIB)
    assert [card(major=major, minor=minor).shared // KIB for major, minor in ((8, 0), (8, 9), (9, 0), (12, 0), (7, 5))] == [
        *(163, 99, 227, 99, 64)
    ]
    amd = card(hip="6.4", gcnArchName="gfx942:sramecc+:xnack-", shared_memory_per_block_optin=0)
    assert amd == Device("a card", "gfx942", 64 * KIB)


def test_words_for_the_table_in_use(card: Callable[..., Device]) -> None:
    cuda = torch.device("cuda", 0)
    card(name="NVIDIA H20", major=9, minor=0, shared_memory_per_block_optin=232448)
    assert table_in_use(cuda) == "tiles measured on NVIDIA H200, 227 KiB of shared memory"
    card(shared_memory_per_block_optin=101376)
    assert table_in_use(cuda) == "tiles for 99 KiB of shared memory, not measured on sm_86"
    assert table_for(INTERPRETED) is None


def test_info_names_the_table_of_each_device(card: Callable[..., Device], monkeypatch: pytest.MonkeyPatch) -> None:
    card(name="NVIDIA L40S", minor=9, shared_memory_per_block_optin=101376, total_memory=48 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert ("cuda:0 triton", "tiles for 99 KiB of shared memory, not measured on sm_89") in list(info.devices())


# --- how wide heads may be ---------------------------------------------------------------------------------------------------


def test_heads_beyond_the_widest_are_refused_in_words() -> None:
    assert "head dimension 520 of q is above 512" in BACKEND.why_not(call_of(520, "causal"))
    assert "tau with head dimension 264 of v above 256" in BACKEND.why_not(call_of(264, "lazy"))
    assert not any("dimension" in reason for reason in BACKEND.why_not(call_of(512, "bias")))
    for what in ("tangent", "second"):
        assert "wider than 256" in BACKEND.why_not_differentiated(what, call_of(320, "causal"))[0]
        assert BACKEND.why_not_differentiated(what, call_of(256, "causal")) == ()


def test_fp32_of_the_widest_heads_needs_a_large_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for shared, fits in ((99, False), (163, True), (227, True)):
        card = Device("some card", "sm_100", shared * KIB)
        monkeypatch.setattr(config, "device_of", lambda device, card=card: card)
        assert (config.why_no_room(call_of(512, "causal", torch.float32)) == ()) == fits
