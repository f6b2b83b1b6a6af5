"""The Triton kernels compiled ahead of time for cards that are not here, and what they are compiled by."""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
from compiling import Launched, recorded
from targets import spilled
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from backlight.backends.intervals import tiles
from backlight.backends.triton import (
    config,
    dbias,
    delta,
    dkdv,
    dpair,
    dq,
    elastic,
    forward,
    fused,
    second_dbias,
    second_dkdv,
    second_dpair,
    second_dq,
    second_rows,
    small,
    table,
    tangent,
    tangent_elastic,
)
from backlight.backends.triton import launch as host
from backlight.backends.triton.backward import backward
from backlight.backends.triton.config import KernelConfig, kernels_of
from backlight.backends.triton.device import Device
from backlight.backends.triton.second import second
from backlight.call import Call
from backlight.config import override
from backlight.spec import LEARNED, AttentionSpec

SM80, SM90, GFX942 = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
KERNELS = (forward, elastic, delta, dq, dkdv, dbias, dpair, fused, table, small, tiles, host)
EVERYTHING = {"causal": True, "window": (100, None), "softcap": 20.0, "bias": True, "sink": True, "tau": True, "gate": True}
MASK, POS = {"rows": True, "causal": True}, {"rows": True, "pos": True, "causal": True, "bias": True}
# kernels without a product of tiles
SMALL = {
    *("_delta_kernel", "_table_kernel", "_dbias_sums_kernel", "_head_sums_kernel"),
    *("_fold_kernel", "_live_kernel", "_key_lists_kernel", "_order_kernel", "_counts_kernel", "_pair_sums_kernel"),
}


def call_of(length: int = 256, d: int = 64, dtype: torch.dtype = torch.bfloat16, intervals: int = 1, **spec: object) -> Call:
    wanted = AttentionSpec(**spec)  # type: ignore[arg-type]
    q, k, v, gate = (torch.zeros(2, 4, length, d, dtype=dtype) for _ in range(4))
    return Call(
        wanted, q, k, v,
        bias=torch.zeros(4, 64) if wanted.bias else None,
        sink=torch.zeros(4) if wanted.sink else None,
        tau=torch.zeros(4) if wanted.tau else None,
        gate=gate if wanted.gate else None,
        rows=torch.zeros(2, 4, 2 * intervals, length, dtype=torch.int32) if wanted.rows else None,
        pos=torch.zeros(2, length, dtype=torch.int32) if wanted.pos else None,
        pair_bias=torch.zeros(1, 4, length, length, dtype=dtype) if wanted.pair_bias else None,
    )  # fmt: skip


def launches_of(call: Call) -> list[Launched]:
    with recorded(*KERNELS) as launches:
        y, lse, u, _ = forward.forward(call, save_u=True)
        backward(call, y, lse, u, torch.zeros_like(y), None, frozenset(call.gradients))
    return launches


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand in for those of a Hopper card."""
    monkeypatch.setattr(host.Launch, "nvidia", True)
    monkeypatch.setattr(host, "hopper", lambda tensor: True)
    monkeypatch.setattr(host, "describable", lambda tensor: True)


@pytest.mark.parametrize("target", [SM80, pytest.param(GFX942, marks=pytest.mark.slow)], ids=["sm_80", "gfx942"])
@pytest.mark.parametrize(
    "spec",
    [{"causal": True}, {"causal": True, "bias": True}, MASK, pytest.param(POS, marks=pytest.mark.slow)],
    ids=["causal", "bias", "mask", "pos"],
)
def test_compiles_elsewhere(target: GPUTarget, spec: dict[str, object]) -> None:
    names = set()
    for launched in launches_of(call_of(**spec)):
        done = launched.compile(target)
        names.add(launched.kernel.fn.__name__)
        assert done.asm["cubin" if target.backend == "cuda" else "hsaco"]
    with_bias = {"_table_kernel", "_dbias_kernel", "_dbias_sums_kernel"} if "bias" in spec else set()
    with_mask = {"_fold_kernel", "_live_kernel"} if "rows" in spec else set()
    with_lists = {"_key_lists_kernel"} if "rows" in spec and "pos" not in spec else set()
    with_pos = {"_order_kernel"} if "pos" in spec else set()
    assert (
        names == {"_fwd_kernel", "_delta_kernel", "_dq_kernel", "_dkdv_kernel"} | with_bias | with_mask | with_lists | with_pos
    )


@pytest.mark.parametrize("intervals", [1, 2])
def test_lists_of_key_tiles_that_are_counted(intervals: int) -> None:
    """As the Hopper kernels ask for them, of every head."""
    call = call_of(intervals=intervals, **MASK)
    tiling = tiles.Tiling(64, 128, 4, 2)
    with recorded(tiles) as launches:
        tiles.live_tiles(
            lambda kernel, grid, args, named, _: kernel[grid](*args, **named), call, tiling, False, (torch.zeros(8), 3)
        )
    (launched,) = launches
    # each Triton puts the words in an order of its own
    added = [set(words.split(".")) for words in re.findall(r"\b(?:atom|red)\.\S+", launched.compile(SM90).asm["ptx"])]
    assert added
    assert all({"global", "gpu", "relaxed", "add", "f32"} <= words for words in added)


@pytest.mark.slow
def test_what_is_written_in_ptx_compiles_for_ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.Launch, "nvidia", True)
    for launched in launches_of(call_of(**EVERYTHING)):
        assert launched.compile(SM80).asm["cubin"]


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"causal": True},
        EVERYTHING,
        MASK,
        {"pair_bias": True},
        pytest.param(POS | {"intervals": 2}, marks=pytest.mark.slow),
        pytest.param(EVERYTHING | {"rows": True}, marks=pytest.mark.slow),
    ],
    ids=["full", "causal", "everything", "mask", "pair", "pos", "mask,everything"],
)
def test_hopper_matmuls_are_not_serialised(spec: dict[str, object], tmp_path: object) -> None:
    """A loop that may run zero times, left while a wgmma is in flight, makes ptxas wait after every single one (C7515)."""
    with ExitStack() as forced:
        for kernel in kernels_of(call_of(**spec)):
            forced.enter_context(override(f"triton.{kernel}", KernelConfig(64, 64, 4, 2, tma=True)))
        launches = launches_of(call_of(**spec))
    for launched in launches:
        name = launched.kernel.fn.__name__
        ptx = launched.compile(SM90).asm["ptx"]
        source = tmp_path / f"{name}.ptx"  # type: ignore[operator]
        source.write_text(ptx)
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert not re.findall(r"C75\d\d", log), f"{name}: {log}"
        if name not in SMALL:
            assert "wgmma.mma_async" in ptx
            assert "cp.async.bulk.tensor" in ptx


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("registers", [0, 168])
def test_short_rows_have_one_kernel(registers: int) -> None:
    """Five products, the tile of the bias read before the loop, and the sums of dpair_bias."""
    with override("triton.fused", KernelConfig(64, 64, 4, 2, tma=True, registers=registers)):
        launches = {launched.kernel.fn.__name__: launched for launched in launches_of(call_of(64, d=32, pair_bias=True))}
    assert set(launches) == {"_fwd_kernel", "_fused_kernel", "_pair_sums_kernel"}
    ptx = launches["_fused_kernel"].compile(SM90).asm["ptx"]
    assert ptx.count("wgmma.mma_async") == 2 * 32 // 16 + 3 * 64 // 16
    assert ptx.count("ex2.approx") == 64 * 64 // 128


@pytest.mark.parametrize("spec", [{"causal": True}, EVERYTHING, POS], ids=["causal", "everything", "pos"])
def test_lengths_do_not_compile_again(spec: dict[str, object]) -> None:
    """Lengths of 1, odd ones and multiples of 16 meet the same compiled kernels."""
    keys = [
        [launched.specialization(SM90) for launched in launches_of(call_of(length, **spec))] for length in (1, 77, 256, 4096)
    ]
    assert all(key == keys[0] for key in keys)


def test_a_term_that_is_absent_leaves_no_trace() -> None:
    """The variant is compiled in: its flags are part of what a kernel is looked up by."""
    plain, biased = (
        {launched.kernel.fn.__name__: launched for launched in launches_of(call_of(causal=True, **terms))}
        for terms in ({}, {"bias": True})
    )
    assert plain["_fwd_kernel"].specialization(SM90) != biased["_fwd_kernel"].specialization(SM90)
    assert "exp2" not in plain["_delta_kernel"].compile(SM90).asm["ttgir"]


@pytest.mark.usefixtures("nvidia")
@pytest.mark.slow
def test_wide_heads_in_fp32_compile_quickly_and_fit() -> None:
    """Their products are unrolled: 32 x 32 tiles of four warps kept ptxas busy for most of a minute, and only the largest cards
    had the shared memory for them."""
    for launched in launches_of(call_of(d=256, dtype=torch.float32, causal=True, bias=True, tau=True)):
        done = launched.compile(SM90)
        assert done.metadata.shared <= 99 * 1024, launched.kernel.fn.__name__
        assert done.asm["ptx"].count("fma.rn.f32") < 2500, launched.kernel.fn.__name__


@pytest.mark.usefixtures("nvidia")
@pytest.mark.slow
@pytest.mark.parametrize("spec", [{"causal": True}, {"causal": True, "softcap": 20.0, "sink": True, "gate": True}], ids=str)
def test_the_widest_heads_fit(spec: dict[str, object]) -> None:
    """Tiles of 512 columns: what programs hold at a time is as much as a Hopper card has for them."""
    for launched in launches_of(call_of(d=512, dtype=torch.bfloat16, **spec)):
        done = launched.compile(SM90)
        assert done.metadata.shared <= 227 * 1024, launched.kernel.fn.__name__
        if launched.kernel.fn.__name__ in ("_fwd_kernel", "_dq_kernel", "_dkdv_kernel"):
            assert "wgmma.mma_async" in done.asm["ptx"], launched.kernel.fn.__name__


@pytest.mark.usefixtures("nvidia")
def test_a_softcap_within_bounds_rescales_nothing() -> None:
    """exp2 of its logits fits into fp32 and bf16, and so do their sums; not with a bias or a sink, nor into fp16."""
    for spec, dtype, rescaled in (
        ({"softcap": 50.0}, torch.bfloat16, False),
        ({"softcap": 60.0}, torch.bfloat16, True),
        ({"softcap": 50.0}, torch.float16, True),
        ({"softcap": 50.0, "bias": True}, torch.bfloat16, True),
        ({"softcap": 50.0, "sink": True}, torch.bfloat16, True),
        ({}, torch.bfloat16, True),
    ):
        launched = launches_of(call_of(dtype=dtype, causal=True, **spec))
        forwards = [x for x in launched if x.kernel.fn.__name__ == "_fwd_kernel"]
        assert forwards[0].compile(SM90).asm["ttir"].count("math.exp2") == 1 + rescaled, (spec, dtype)


# matrix products of a tile, each of which is d / 16 instructions
PRODUCTS = {"_fwd_kernel": 2, "_elastic_kernel": 3, "_dq_kernel": 3, "_dkdv_kernel": 4, "_dbias_kernel": 2}


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize(("direct", "mask"), [(False, False), (True, False), (False, True)])
def test_a_kernel_is_one_loop_over_tiles(direct: bool, mask: bool) -> None:
    """Edges and the table are branches inside it: a loop for each kind of tile would fill its pipeline again and again."""
    call = call_of(causal=True, window=(100, None), bias=True, tau=True, rows=mask)
    with ExitStack() as forced:
        for kernel in kernels_of(call):
            forced.enter_context(override(f"triton.{kernel}", KernelConfig(64, 64, 4, 2, tma=True, direct=direct)))
        for launched in launches_of(call):
            name = launched.kernel.fn.__name__
            if name in PRODUCTS:
                expected = PRODUCTS[name] - launched.options.get("LSE_ONLY", False)
                assert launched.compile(SM90).asm["ptx"].count("wgmma.mma_async") == expected * 64 // 16, name


@pytest.mark.usefixtures("nvidia")
def test_bias_is_read_in_pairs_where_it_is_used() -> None:
    """A pair per load, in the matmul's own layout, and once for all elements on its diagonal that a thread holds: a table that
    went through shared memory would cost more than the product."""
    launches = launches_of(call_of(causal=True, bias=True))
    for launched in launches:
        if launched.kernel.fn.__name__ in ("_dq_kernel", "_dkdv_kernel"):
            done = launched.compile(SM90)
            across = launched.options["BN" if launched.kernel.fn.__name__ == "_dq_kernel" else "BM"]
            assert done.asm["ptx"].count("ld.global.nc.v2.f32") == across // 8 + 1
            assert not re.search(r"convert_layout.*f32.*->.*f32", done.asm["ttgir"])


@pytest.mark.parametrize(("sq", "sk"), [(0, 65), (65, 0)])
def test_nothing_to_read_needs_no_descriptor(sq: int, sk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TMA is on, an empty k or v once became a descriptor, which cannot be empty."""
    monkeypatch.setattr(host.Launch, "nvidia", True)
    monkeypatch.setattr(host, "hopper", lambda tensor: True)
    config = KernelConfig(64, 64, num_warps=4, num_stages=2, tma=1)
    q, k = torch.zeros(1, 2, sq, 64, dtype=torch.bfloat16), torch.zeros(1, 2, sk, 64, dtype=torch.bfloat16)
    call = Call(AttentionSpec(), q, k, k)
    with override("triton.forward", config), override("triton.dq", config), override("triton.dkdv", config):
        assert len(launches_of(call)) >= 1
    with_keys = host.Launch(Call(AttentionSpec(), k if sk else q, k if sk else q, k if sk else q))
    assert with_keys.descriptors(config, 64, with_keys.k)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    "spec", [{}, {"causal": True}, {"causal": True, "bias": True, "sink": True, "gate": True}, MASK, {"pair_bias": True}]
)
def test_tangents_compile_for_hopper(d: int, spec: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tangent, "device_of", lambda device: Device("a card", "sm_90", 227 * 1024))
    call = call_of(d=d, **spec)
    tangents = {name: x for name in LEARNED if (x := getattr(call, name)) is not None}
    with recorded(tangent, table, small, tiles) as launches:
        tangent.tangent(call, tangents, None)
    (found,) = (launched for launched in launches if launched.kernel.fn.__name__ == "_tangent_kernel")
    # nothing is spilled but, beside three terms, four numbers
    assert spilled(found.compile(SM90).asm) <= (16 if "bias" in spec else 0)


@pytest.mark.slow
@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("known", [False, True], ids=["fresh", "known"])
@pytest.mark.parametrize("d", [64, 128])
def test_tangents_of_tau_compile_for_hopper(d: int, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to four accumulators, which wide heads leave too few registers for."""
    for module in (config, tangent_elastic):
        monkeypatch.setattr(module, "device_of", lambda device: Device("a card", "sm_90", 227 * 1024))
    call = call_of(d=d, causal=True, tau=True)
    tangents = {name: x for name in LEARNED if (x := getattr(call, name)) is not None}
    y, lse = torch.zeros_like(call.q), torch.zeros(call.q.shape[:3])
    with recorded(tangent_elastic, forward, table, small, tiles) as launches:
        tangent_elastic.tangent_elastic(call, tangents, (y, lse, torch.zeros_like(y)) if known else None)
    (found,) = (launched for launched in launches if launched.kernel.fn.__name__ == "_tangent_elastic_kernel")
    made = found.compile(SM90)
    # of known rows 16 before Triton 3.9
    assert spilled(made.asm) <= (0 if d == 64 else 80 if known else 288)
    assert made.metadata.shared <= 227 * 1024


# bytes of a thread: two accumulators of 128 columns leave too few registers for the addresses of four tiles that stay
# (dkdv); dq takes 28 % less time with tiles that spill these than with those that spill nothing (docs/data/second-h200.txt.gz)
SPILLED = {"_second_dkdv_kernel": {64: 0, 128: 80}, "_second_dq_kernel": {128: 48}}


@pytest.mark.slow
@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("spec", [{}, {"causal": True}], ids=["full", "causal"])
def test_second_derivatives_compile_for_hopper(d: int, spec: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Double backward: the tangent beside known results, rows, then kernels that own rows and keys."""
    for module in (config, tangent):
        monkeypatch.setattr(module, "device_of", lambda device: Device("a card", "sm_90", 227 * 1024))
    call = call_of(d=d, **spec)
    hats = {name: getattr(call, name) for name in ("q", "k", "v")}
    y, lse = torch.zeros_like(call.q), torch.zeros(call.q.shape[:3])
    with recorded(tangent, second_rows, second_dq, second_dkdv, second_dbias, small) as launches:
        _, _, _, ty, tlse, _ = tangent.tangent(call, hats, (y, lse, None))
        second(call, hats, (y, lse, None, ty, tlse, None), (None, None, y, None), frozenset(call.gradients))
    names = [launched.kernel.fn.__name__ for launched in launches]
    assert names == ["_tangent_known_kernel", "_second_rows_kernel", "_second_dq_kernel", "_second_dkdv_kernel"]
    for name, launched in zip(names, launches, strict=True):
        assert spilled(launched.compile(SM90).asm) <= SPILLED.get(name, {}).get(d, 0), name


@pytest.mark.slow
@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("spec", [{}, {"causal": True, "bias": True}], ids=["full", "causal,bias"])
def test_second_derivatives_of_every_gradient_fit(d: int, spec: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients at y and at its tangent, tiles of dq at D = 128 once asked for more shared memory than a Hopper has."""
    for module in (config, tangent):
        monkeypatch.setattr(module, "device_of", lambda device: Device("a card", "sm_90", 227 * 1024))
    call = call_of(d=d, **spec)
    hats = {name: x for name in LEARNED if (x := getattr(call, name)) is not None}
    y, lse = torch.zeros_like(call.q), torch.zeros(call.q.shape[:3])
    with recorded(second_rows, second_dq, second_dkdv, table, small) as launches:
        second(call, hats, (y, lse, None, y, lse, None), (y, lse, y, lse), frozenset({"dq", "dk", "dv"}))
    mains = [launched for launched in launches if launched.kernel.fn.__name__ in ("_second_dq_kernel", "_second_dkdv_kernel")]
    assert len(mains) == 2
    for launched in mains:
        assert launched.compile(SM90).metadata.shared <= 227 * 1024, launched.kernel.fn.__name__


# bytes of a thread, with gradients at y and at its tangent: six products of a tile and the pair bias leave no register free
SPILLED_BESIDE_PAIRS = {
    "_second_dpair_kernel": {64: 32, 128: 32, 256: 32},
    "_second_dq_kernel": {128: 32},
    "_second_dkdv_kernel": {128: 40},
}


@pytest.mark.slow
@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", [(2, 4, 256, 256), (1, 4, 256, 256), (1, 4, 1, 256)], ids=["own", "shared", "by key"])
def test_second_derivatives_beside_a_pair_bias_fit(d: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """With every tangent and every gradient that can come in."""
    for module in (config, tangent):
        monkeypatch.setattr(module, "device_of", lambda device: Device("a card", "sm_90", 227 * 1024))
    call = replace(call_of(d=d, pair_bias=True), pair_bias=torch.zeros(shape, dtype=torch.bfloat16))
    hats = {name: x for name in LEARNED if (x := getattr(call, name)) is not None}
    y, lse = torch.zeros_like(call.q), torch.zeros(call.q.shape[:3])
    with recorded(second_rows, second_dq, second_dkdv, second_dpair, dpair, small) as launches:
        second(call, hats, (y, lse, None, y, lse, None), (y, lse, y, lse), frozenset(call.gradients))
    mains = [launched for launched in launches if launched.kernel.fn.__name__.startswith("_second_d")]
    keys = ["_second_dkdv_kernel"] * (1 if d <= 64 else 2)
    owner = ["_second_dpair_kernel"] if shape == (1, 4, 256, 256) else []
    assert [launched.kernel.fn.__name__ for launched in mains] == ["_second_dq_kernel", *keys, *owner]
    for launched in mains:
        name, done = launched.kernel.fn.__name__, launched.compile(SM90)
        assert done.metadata.shared <= 227 * 1024, name
        assert spilled(done.asm) <= SPILLED_BESIDE_PAIRS.get(name, {}).get(d, 0), name
