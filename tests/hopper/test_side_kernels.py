"""The small kernels against the operations of torch that they stand for, in the emulator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import aot
import emulator

from backlight.backends.hopper import side_kernels
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.terms import TABLE_PAD, unit_of
from backlight.call import Call
from backlight.spec import AttentionSpec

LENGTHS = [[5], [0], [], [64, 1, 0, 63, 65, 129], [3] * 40]


def packed(lengths: list[int], dtype: torch.dtype) -> Call:
    cu = torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to(dtype)
    q = torch.zeros(1, 2, sum(lengths), 64, dtype=torch.float16)
    return Call(AttentionSpec(), q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [64, 192])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_first_tiles(lengths: list[int], block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over more sequences than a block of the kernel holds."""
    monkeypatch.setattr(side_kernels, "BLOCK", 16)
    call = packed(lengths, dtype)
    with emulator.emulated():
        found = Launch(call).first_tiles(call.cu_seqlens_q, block)
    wanted = [sum(-(-n // block) for n in lengths[:z]) for z in range(len(lengths) + 1)]
    assert found.dtype == torch.int32
    assert found.tolist() == wanted


@pytest.mark.parametrize(
    ("rows", "keys"),
    [([0, 20, 4000], [0, 30, 7]), ([-9, 50, 3, 40], [0, 90, 3, 90]), ([0, 40, 0, 40, 0, 40], [0, 9, 5, 3, 1, 0])],
)
def test_borders_are_put_in_order(rows: list[int], keys: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever cu_seqlens has become since it was checked: kernels read their tensors only, and buffers hold all tiles."""
    monkeypatch.setattr(Call, "check_borders", lambda self: None)
    q, k = (torch.zeros(1, 2, length, 64, dtype=torch.float16) for length in (40, 90))
    call = Call(AttentionSpec(), q, k, k, cu_seqlens_q=torch.tensor(rows), cu_seqlens_k=torch.tensor(keys))
    with emulator.emulated():
        launch = Launch(call)
        for side, length in ((call.cu_seqlens_q, 40), (call.cu_seqlens_k, 90)):
            cu_q, cu_k, first, _ = launch.packing(side, 16)
            for borders, end in ((cu_q, 40), (cu_k, 90)):
                assert borders[0] == 0
                assert (borders.diff() >= 0).all()
                assert borders[-1] <= end
            assert first[-1] <= launch.tiles(length, side, 16)
            own = cu_q if side is call.cu_seqlens_q else cu_k
            assert first.diff().tolist() == [-(-n // 16) for n in own.diff().tolist()]


@pytest.mark.parametrize(("batch", "heads", "tiles"), [(1, 1, 1), (3, 2, 5), (2, 3, 40)])
def test_head_sums(batch: int, heads: int, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_kernels, "BLOCK", 16)
    q = torch.zeros(batch, heads, 8, 64, dtype=torch.float16)
    parts = torch.randint(-50, 50, (batch, heads, tiles)).float()
    with emulator.emulated():
        found = Launch(Call(AttentionSpec(), q, q, q)).head_sums(parts, torch.float16, "dsink")
    assert torch.equal(found, parts.sum(dim=(0, 2)).half())


@pytest.mark.parametrize("softcap", [None, 7.0])
@pytest.mark.parametrize("n", [1, 100, 2000])
def test_table(n: int, softcap: float | None) -> None:
    """In units of scores, zeros around it, whatever the strides of the bias."""
    q = torch.zeros(1, 3, 8, 64, dtype=torch.float16)
    for bias in (torch.randn(3, n), torch.randn(n, 3).half().T, torch.randn(1, n).expand(3, n)):
        call = Call(AttentionSpec(bias=True, softcap=softcap), q, q, q, bias=bias)
        with emulator.emulated():
            found = Launch(call).table
        wanted = torch.nn.functional.pad(bias.float() / unit_of(call), (TABLE_PAD.value,) * 2)
        assert found is not None
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_compiled() -> None:
    """For every dtype that can come; with Triton's own types a mistake would show on a GPU only."""
    q = torch.zeros(2, 3, 8, 64, dtype=torch.float16)
    with aot.compiled(side_kernels) as reports:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            call = Call(AttentionSpec(bias=True), q, q, q, bias=torch.zeros(3, 4, dtype=dtype))
            assert Launch(call).table is not None
            Launch(call).head_sums(torch.zeros(1, 6, 1), dtype, "dsink")
        for dtype in (torch.int32, torch.int64):
            call = packed([5, 3], dtype)
            Launch(call).first_tiles(call.cu_seqlens_q, 64)
    assert [report.kernel for report in reports] == ["_table_kernel", "_head_sums_kernel"] * 4 + ["_first_tiles_kernel"] * 2
    assert not any(report.spills or report.warnings for report in reports)
