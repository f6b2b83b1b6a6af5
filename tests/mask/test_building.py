"""How many operations a constructor of masks asks of a device, and that none of them waits for it.

On a GPU each is a launch of some microseconds on the host, whatever its size: a mask is made in the time that these take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backlight import mask
from backlight.mask import Mask

S = 96
# tensors without values: whoever looks at one fails
IDS, SHORT = (torch.zeros(2, S, dtype=dtype, device="meta") for dtype in (torch.int64, torch.int32))
LENGTHS, FEW = IDS[:, :3].contiguous(), IDS[:, 0].contiguous()
# views and memory that nobody fills
FREE = ("empty", "empty_like", "empty_strided", "lift_fresh", "_unsafe_view", "detach", "alias")
# operations that copy before they write
TWO = ("scatter", "scatter_reduce", "masked_fill", "constant_pad_nd", "sort")


class Launched(TorchDispatchMode):
    """Names of the operations that would launch something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self.names += [name] * (2 if name in TWO else 1)
        return func(*args, **(kwargs or {}))


def launched(work: Callable[[], Any]) -> list[str]:
    with Launched() as found:
        work()
    return found.names


MOST: dict[str, tuple[int, Callable[[], Mask]]] = {
    "documents": (7, lambda: mask.documents(IDS)),
    "documents, int32": (7, lambda: mask.documents(SHORT)),
    "documents, causal": (8, lambda: mask.documents(IDS, causal=True)),
    "documents of lengths": (17, lambda: mask.documents(lengths=LENGTHS, length=S)),
    "documents of lengths, causal": (18, lambda: mask.documents(lengths=LENGTHS, length=S, causal=True)),
    "prefix": (5, lambda: mask.prefix(FEW, S)),
    "prefix of a number": (5, lambda: mask.prefix(4, S, device="meta")),
    "spans": (9, lambda: mask.spans(LENGTHS, LENGTHS, S)),
    "spans, window": (12, lambda: mask.spans(LENGTHS, LENGTHS, S, window=3)),
    "blocks": (5, lambda: mask.blocks(7, S, device="meta")),
    "blocks by starts": (7, lambda: mask.blocks(starts=LENGTHS, length=S)),
    "chunks": (6, lambda: mask.chunks(7, S, device="meta")),
    "evict": (4, lambda: mask.evict(IDS)),
    "global_first": (6, lambda: mask.global_first(FEW, 3, S)),
    "tree in preorder": (24 + S.bit_length(), lambda: mask.tree(IDS, preorder=True)),
    "tree": (43 + 2 * (2 * S).bit_length(), lambda: mask.tree(IDS)),
    "rows": (3, lambda: mask.rows(IDS, IDS)),
}


@pytest.mark.parametrize("name", MOST)
def test_a_mask_is_made_by_few_operations(name: str) -> None:
    most, make = MOST[name]
    names = launched(make)
    assert len(names) <= most, names


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_any_whole_numbers_in_any_layout(dtype: torch.dtype) -> None:
    """They are not copied to int64 first, and other strides bring no warning of torch's."""
    ids = torch.tensor([[0, 0, 1, 0, 0], [7, 7, 7, 100, 100]])
    lengths, ends = torch.tensor([[2, 0], [1, 4]]), torch.tensor([[3, 1], [2, 5]])
    for make in (
        mask.documents,
        lambda x: mask.documents(x, causal=True),
        lambda x: mask.documents(lengths=x[:, :2] % 3, length=5),
        lambda x: mask.blocks(starts=x[:, :3], length=5),
        lambda x: mask.spans(lengths.to(x.dtype).t().contiguous().t(), ends.to(x.dtype), 5, window=1),
        mask.evict,
        lambda x: mask.prefix(x[:, 3], 5),
        lambda x: mask.global_first(x[:, 3], 1, 5),
        lambda x: mask.rows(x, x[:, :1].expand(-1, 5)),
    ):
        assert torch.equal(make(ids.to(dtype).t().contiguous().t()).rows, make(ids).rows)
