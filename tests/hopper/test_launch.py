"""The host side: descriptors without Triton's checks, direct launches, refusals."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper import BACKEND, compiled, config, launch
from backlight.backends.hopper.backward.prepass import _prepass_kernel
from backlight.backends.replaying import replay
from backlight.call import Call, Memory
from backlight.registry import Backend
from backlight.spec import AttentionSpec
from cases import BY_NAME, FP16


def call_of(shape: tuple[int, ...] = (2, 4, 64, 64), dtype: torch.dtype = torch.float16, **spec: Any) -> Call:
    q = torch.zeros(shape, dtype=dtype)
    return Call(AttentionSpec(**spec), q, q, q)


# --- descriptors -------------------------------------------------------------------------------------------------------------


def test_descriptors_are_what_triton_would_build() -> None:
    q = torch.zeros(2, 48, 4, 64, dtype=torch.float16).transpose(1, 2)
    block = [1, 1, 64, 64]
    theirs = TensorDescriptor(q, list(q.shape), list(q.stride()), block, launch.swizzled(tuple(block), q.dtype))
    ours = launch.tile_descriptor(q, 64, 64, ragged=False)
    assert isinstance(ours, TensorDescriptor)
    assert vars(ours).keys() == vars(theirs).keys()
    assert ours.base is q
    for name, value in vars(theirs).items():
        assert name == "base" or getattr(ours, name) == value, name


def test_kernels_that_read_other_tiles_are_compiled_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a descriptor are part of its type: what was compiled for others must not be started."""
    started = []

    class Kernel:
        arg_names = ("desc",)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: started.append(args) or Kernel()

    monkeypatch.setattr(compiled, "_compiled", {})
    q, kernel = torch.zeros(1, 2, 256, 64, dtype=torch.float16), Kernel()
    made = [compiled.start(kernel, (1,), [launch.tile_descriptor(q, rows, 64, False)], {}) for rows in (64, 128, 64)]
    assert len(started) == 3
    assert made[0] is made[2]
    assert made[0] is not made[1]


@pytest.mark.parametrize(
    ("view", "readable"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: x[:, :, 3:, 8:], True),
        (lambda x: x[:1].as_strided((1, 4, 64, 64), (5, 4096, 64, 1)), True),
        (lambda x: x[..., 1:], False),
        (lambda x: x.transpose(2, 3), False),
        (lambda x: x[:1].expand(2, -1, -1, -1), False),
        (lambda x: x.new_zeros(2, 4, 64, 68)[..., :64], False),
    ],
    ids=["contiguous", "bshd", "sliced", "stride of a single batch", "address", "columns", "expanded", "rows of 136 bytes"],
)
def test_what_tma_reads(view: Any, readable: bool) -> None:
    tensor = view(torch.zeros(2, 4, 64, 64, dtype=torch.float16))
    assert launch.tma_reads(tensor) is readable
    if readable:
        launch.tile_descriptor(tensor, 64, 64, ragged=False)


def test_copies_are_readable() -> None:
    given = torch.arange(4 * 64 * 64 + 1, dtype=torch.float16)
    contiguous = given[1:].view(1, 4, 64, 64)
    for tensor in (contiguous, contiguous.transpose(2, 3), contiguous[:, :, :1].expand(-1, -1, 64, -1)):
        copy = launch.readable(tensor)
        assert launch.tma_reads(copy)
        assert torch.equal(copy, tensor)
    assert launch.readable(copy) is copy


# --- launches ----------------------------------------------------------------------------------------------------------------


class Driver:
    """A driver for a Hopper GPU that is not there: it compiles, and writes launches down."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        record = self.launches.append

        class Launcher:
            def __init__(self, src: Any, metadata: Any):
                pass

            def __call__(self, *args: Any) -> None:
                record(args)

        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            load_binary=lambda *args: (1, 2, 40, 0, 1024),
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32},
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    fake = Driver()
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(launch, "_known", Memory())
    monkeypatch.setattr(triton.runtime.driver, "_active", fake)
    _prepass_kernel.device_caches.clear()
    yield fake
    # compiled kernels unload themselves, while the driver that loaded them is there
    compiled._compiled.clear()
    launch._known.clear()
    _prepass_kernel.device_caches.clear()
    gc.collect()


def prepass(rows: int, dtype: torch.dtype = torch.float16) -> None:
    from backlight.backends.hopper.backward.prepass import prepass as run

    call = call_of((1, 2, rows, 64), dtype)
    lse, tiles = torch.zeros(1, 2, rows), config.BackwardConfig(64, 128)
    run(launch.Launch(call), tiles, call.q, lse, None, call.q, None, True, {}, frozenset(("dq", "dk", "dv")))


def check_alike(jitted: tuple[Any, ...], direct: tuple[Any, ...]) -> None:
    """Arguments of two launches, groups of them included; what was a tensor is an address."""
    assert len(jitted) == len(direct)
    for theirs, ours in zip(jitted, direct, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert isinstance(ours, replay.Address)
        elif isinstance(theirs, tuple):
            assert isinstance(ours, tuple)
            check_alike(theirs, ours)
        else:
            assert type(theirs) is type(ours)
            if isinstance(theirs, (int, float, str, bool)):
                assert theirs == ours


def test_direct_launches_pass_what_triton_passes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second time on Triton's JIT is not asked; the launcher gets the same kinds of arguments in the same order."""
    prepass(100)
    assert len(compiled._compiled) == 1
    with monkeypatch.context() as patch:
        patch.setattr(type(_prepass_kernel), "run", None)
        prepass(100)
    assert len(driver.launches) == 2
    check_alike(*driver.launches)


def test_lengths_do_not_compile_again(driver: Driver) -> None:
    prepass(100)
    prepass(333)
    prepass(1)
    assert len(compiled._compiled) == 1
    assert [args[0] for args in driver.launches] == [2, 6, 1]


def test_another_dtype_is_another_kernel(driver: Driver) -> None:
    prepass(100)
    prepass(100, torch.bfloat16)
    assert len(compiled._compiled) == 2


# --- refusals and configurations ---------------------------------------------------------------------------------------------


def test_protocol() -> None:
    assert isinstance(BACKEND, Backend)
    assert BACKEND.available() or torch.cuda.is_available()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of(dtype=torch.float32), "dtype torch.float32 is not one of fp16, bf16"),
        (call_of(), "tensors are on cpu, not on a GPU"),
        (call_of((1, 1, 8, 20)), "head dimension 20 of q is not a multiple of 8"),
        (call_of((1, 1, 8, 264)), "head dimension 264 of v is above 256"),
        (call_of((1, 1, 8, 136), tau=True), "tau with head dimension 136 of v above 128"),
        (call_of(scale=-1.0), "scale must be positive, got -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_why_not(call: Call, reason: str) -> None:
    assert reason in BACKEND.why_not(call)


@pytest.mark.parametrize("name", ["bias", "tau", "sink", "gate", "softcap"])
def test_terms_are_taken(name: str) -> None:
    assert BACKEND.why_not(BY_NAME[name].make(FP16, margin=0).call) == ("tensors are on cpu, not on a GPU",)


def test_unreadable_strides_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(2, 4, 64, 64, dtype=torch.float16)
    call = Call(AttentionSpec(), q, q, q[:1].expand_as(q))
    monkeypatch.setattr("backlight.backends.hopper.capability", lambda device: (9, 0))
    moved = SimpleNamespace(spec=call.spec, scale=call.scale, k=call.k, v=call.v, rows=None)
    moved.q = SimpleNamespace(**{name: getattr(q, name) for name in ("dtype", "shape", "stride", "data_ptr", "numel")})
    moved.q.device = torch.device("cuda")
    assert BACKEND._find_reasons(moved) == (
        "TMA cannot read v in place: strides (0, 4096, 64, 1) or address not 16-byte aligned",
    )


def test_too_many_rows() -> None:
    q = torch.zeros(1, dtype=torch.float16).expand(1 << 10, 1 << 10, 1 << 11, 8)
    reasons = BACKEND.why_not(Call(AttentionSpec(), q, q, q))
    assert "1048576 heads of 2048 rows need more than 31 bits to count" in reasons


def test_configs() -> None:
    small, wide = call_of(), call_of((2, 4, 64, 128))
    assert config.forward_config(small) == config.ForwardConfig(128, 2, stages=4, q_buffers=2, drawn=False)
    assert config.forward_config(call_of((1, 2, 2048, 64))) == config.ForwardConfig(128, 3, q_buffers=2)
    assert config.forward_config(wide) == config.ForwardConfig(128, 2, q_buffers=2)
    assert config.backward_config(small) == config.BackwardConfig(128, 128, narrow=True)
    assert config.backward_config(wide) == config.BackwardConfig(64, 128, overlap=True)
    assert config.forward_config(call_of((1, 2, 2048, 64), causal=True)).pingpong
    assert config.forward_config(call_of((1, 2, 1024, 64), causal=True)).consumers == 2
    assert config.backward_config(call_of((2, 4, 64, 256))) == config.BackwardConfig(64, 64, wide=True, overlap=True)
    with pytest.raises(ValueError, match="named barriers"):
        config.ForwardConfig(64, 3, stages=3, pingpong=True)


def test_heads_together() -> None:
    """Heads interleave under a mask only, and always in groups that come out even."""
    assert config.heads_together(call_of(), config.ForwardConfig(128, 3)) == 1
    assert config.heads_together(call_of(causal=True), config.ForwardConfig(128, 3)) == 8
    assert config.heads_together(call_of((3, 5, 64, 64), causal=True), config.ForwardConfig(128, 3)) == 5
    assert config.heads_together(call_of((1, 7, 64, 64), causal=True), config.ForwardConfig(128, 3, together=6)) == 1


def test_key_heads_together() -> None:
    """Under a mask, as many as L2 holds what they read and add to; a window keeps that small whatever the length."""

    def together(rows: int, d: int, **options: object) -> int:
        return config.keys_together(call_of((1, 64, rows, d), **options), config.BackwardConfig(128, 128))

    assert together(8192, 64) == 1
    assert [together(rows, 64, causal=True) for rows in (512, 8192, 16384, 1 << 17)] == [8, 8, 4, 1]
    assert [together(rows, 128, causal=True) for rows in (2048, 8192, 16384)] == [8, 4, 2]
    assert together(16384, 128, window=(1023, 0)) == 8
    uneven = [call_of((batch, heads, 16384, 128), causal=True) for batch, heads in ((2, 5), (1, 7), (1, 16))]
    assert [config.keys_together(call, config.BackwardConfig(64, 128)) for call in uneven] == [2, 1, 2]
    assert [config.keys_together(call, config.BackwardConfig(64, 128), few=True) for call in uneven] == [5, 7, 8]
    q, k = torch.zeros(1, 32, 8192, 128, dtype=torch.float16), torch.zeros(1, 4, 8192, 128, dtype=torch.float16)
    assert config.keys_together(Call(AttentionSpec(causal=True), q, k, k), config.BackwardConfig(64, 128)) == 2
    # more packed sequences than rows
    one, cu = call_of((1, 2, 1, 64)).q, torch.tensor([0, 0, 1], dtype=torch.int32)
    packed = Call(AttentionSpec(), one, one, one, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert config.keys_together(packed, config.BackwardConfig(128, 128)) == 2


@pytest.mark.parametrize("dbias", [False, True], ids=["", "dbias"])
@pytest.mark.parametrize("d", [64, 128])
def test_room_for_dv(d: int, dbias: bool) -> None:
    tiles = config.BackwardConfig(128 if d == 64 else 64, 128)
    assert config.room_for_dv(tiles, d, d, dbias) == (d == 64 or not dbias)
    assert not config.room_for_dv(config.BackwardConfig(64, 128, stages=3), 128, 128, dbias)
    assert not config.room_for_dv(config.BackwardConfig(64, 64, wide=True), 256, 256, dbias)


def test_the_gradient_of_a_gate_lies_as_the_gate_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read a copy of a gate whose columns lie apart; compilers are told the layout of the gate itself."""
    made = torch.arange(2 * 4 * 64 * 64.0).view(2, 4, 64, 64)
    q = torch.zeros(2, 4, 64, 64, dtype=torch.float16)
    ran = (None, None, lambda *args: {"dgate": made}, lambda *args: SimpleNamespace(again="replayed"))
    monkeypatch.setattr("backlight.backends.hopper.host", lambda: ran)
    for gate, replayed in ((q, "replayed"), (q.mT.contiguous().mT, None)):
        call = Call(AttentionSpec(gate=True), q, q, q, gate=gate)
        found = BACKEND.backward(call, q, q[..., 0], None, q, None, frozenset({"dgate"}))["dgate"]
        assert torch.equal(found, made)
        assert found.stride() == gate.stride()
        program = BACKEND.replay(call, (q,), None)
        assert program == replayed
