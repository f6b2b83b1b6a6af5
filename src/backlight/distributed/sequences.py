"""Tensors along the sequence: this rank's share of one, and the whole one from the shares of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from backlight.arguments import INTEGERS, check_borders, check_dtype, check_tensor, check_whole, shown
from backlight.call import read_cu_seqlens
from backlight.distributed.communicator import Communicator
from backlight.distributed.handshake import UNSHARD, agree_shard, refuse
from backlight.distributed.layout import assemble, cut, pieces, positions_of
from backlight.distributed.masking import KEYS_OF_ROWS, ROWS_OF_POS
from backlight.mask import Mask

IGNORED_LABEL = -100


class Sequences:
    """Sequences cut over the ranks of a communicator as a layout says."""

    def __init__(self, communicator: Communicator, layout: str):
        self.communicator, self.layout = communicator, layout

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def world(self) -> int:
        return self.communicator.world

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions along `dim` of a tensor that every rank holds whole: inputs, position ids, labels."""
        dim = _axis("whole", whole, dim)
        return cut(whole, dim, pieces(self.layout, whole.shape[dim], self.world)[self.rank])

    def shard_mask(self, whole: Mask) -> Mask:
        """The mask of this rank's keys and rows, of one for the whole sequence; its intervals still count rows of the whole."""
        if not isinstance(whole, Mask):
            raise TypeError(f"whole must be a backlight.mask.Mask, got {shown(whole)}")
        pos = None if whole.pos is None else self.shard(whole.pos, ROWS_OF_POS)
        return Mask(self.shard(whole.rows, KEYS_OF_ROWS), pos)

    def unshard(self, shard: Tensor, dim: int) -> Tensor:
        """The whole tensor on every rank, in its own order, from the shards of all; not differentiable."""
        try:
            dim = _axis("shard", shard, dim)
        except Exception:
            refuse(self.communicator, UNSHARD)
            raise
        held = agree_shard(self.communicator, shard, dim, self.layout)
        last = shard.detach().movedim(dim, -1)
        padded = pad(last, (0, max(held) - last.shape[-1])).contiguous()
        shards = [x[..., :length] for x, length in zip(self.communicator.all_gather(padded, UNSHARD), held, strict=True)]
        return assemble(shards, last.dim() - 1, self.layout).movedim(-1, dim)

    def positions(self, length: int, cu_seqlens: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """Where this rank's positions lie in the whole sequence of `length`, or, with cu_seqlens, each in its own sequence."""
        check_whole("length", length, least=0)
        own = positions_of(pieces(self.layout, length, self.world)[self.rank], device)
        if cu_seqlens is None:
            return own
        check_borders("cu_seqlens", cu_seqlens)
        read_cu_seqlens("cu_seqlens", cu_seqlens, length)
        starts = cu_seqlens.to(own.device, torch.int64)
        return own - starts[torch.searchsorted(starts, own, right=True) - 1]

    def labels(self, tokens: Tensor, dim: int = -1, ignored: int = IGNORED_LABEL) -> Tensor:
        """This rank's next-token labels: shifted before they are cut, since the next token may lie on another rank.

        In the dtype of the tokens; int64 where that does not hold `ignored`.
        """
        dim = _axis("tokens", tokens, dim)
        check_dtype("tokens", tokens, INTEGERS)
        check_whole("ignored", ignored)
        if not _fits(ignored, tokens.dtype):
            tokens = tokens.long()
        if not tokens.shape[dim]:
            return self.shard(tokens, dim)
        beyond = torch.full_like(tokens.narrow(dim, 0, 1), ignored)
        return self.shard(torch.cat([tokens.narrow(dim, 1, tokens.shape[dim] - 1), beyond], dim), dim)


def _axis(name: str, tensor: Any, dim: Any) -> int:
    """`dim` of the tensor, counted from the front."""
    check_tensor(name, tensor)
    check_whole("dim", dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim must be one of the {tensor.dim()} dimensions of {name}, got {dim}")
    return dim % tensor.dim()


def _fits(number: int, dtype: torch.dtype) -> bool:
    return torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
