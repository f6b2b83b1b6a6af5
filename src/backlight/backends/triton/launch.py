"""Host side that all kernels of a call share: tensors with their strides, geometry, what is compiled in, grids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from backlight.backends.intervals.tiles import Tiling, live_tiles, mask_steps
from backlight.backends.replaying.preparing import Preparing
from backlight.backends.replaying.program import start
from backlight.backends.triton import small
from backlight.backends.triton.config import KernelConfig, config_of, padded
from backlight.backends.triton.counts import _counts_kernel
from backlight.backends.triton.pair import Pair
from backlight.backends.triton.primitives import Geometry, Packing, Rows, Variant
from backlight.backends.triton.table import table_of
from backlight.backends.triton.visits import Mask
from backlight.call import Call, Part
from backlight.spec import LOG2E

SMALLEST_UNIT = 1e-6
# alphas whose exponents 1 / (alpha - 1) are compiled in
COMPILED = {2.0: 1, 1.5: 2, 1.25: 4}


def compact(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def rows_of(tensor: Tensor) -> Rows:
    return Rows(tensor, *tensor.stride()[:3])


def hopper(tensor: Tensor) -> bool:
    """Hopper or later."""
    return tensor.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(tensor.device)[0] >= 9


def describable(tensor: Tensor) -> bool:
    """TMA: 16-byte aligned base and strides, no stride of 0, and something to read."""
    aligned = tensor.data_ptr() % 16 == 0 and all(s > 0 and s * tensor.element_size() % 16 == 0 for s in tensor.stride()[:3])
    return aligned and tensor.numel() > 0 and hopper(tensor)


class Launch(Preparing):
    small = small

    def __init__(self, call: Call):
        super().__init__(call)
        self.q, self.k, self.v = (self.readable(x) for x in (call.q, call.k, call.v))
        # absent tensors still need a pointer; what is compiled in never reads it
        self.gate = self.q if call.gate is None else self.readable(call.gate)
        self.sink, self.tau = (self.q if x is None else compact(x) for x in (call.sink, call.tau))
        self.alphas = None if call.entmax is None else compact(call.entmax)
        # tiles in which entmax leaves anything, once they are known (`live.sweep`)
        self.live: Any = None
        self._masks: dict[tuple[int, int, bool], Mask] = {}

    def start(self, kernel: Any, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """`kernel[grid](*args, **named)`: a launch that can be made again (docs/host.md)."""
        start(kernel, grid, args, named)

    def start_small(self, kernel: Any, programs: int, args: Sequence[Any], which: str = "") -> None:
        self.start(kernel, (programs,), *args, BLOCK=small.BLOCK, num_warps=4, enable_fp_fusion=True)

    def start_rows(self, kernel: Any, name: str, tensors: Sequence[Tensor | None], values: Sequence[Any], **named: Any) -> None:
        """A kernel whose programs own rows and read K and V: `tensors` have rows, `values` are what it takes besides."""
        config = self.config(name)
        grid = self.row_grid(config.block_m)
        if grid[0] and grid[1]:
            tma, descriptors = self.descriptors(config, config.block_n, self.k, self.v)
            own = (rows_of(x) for x in (self.q, self.k, self.v))
            others = (None if x is None else rows_of(x) for x in tensors)
            shared = (self.mask(config, of_rows=True), *self.shared(self.call.cu_seqlens_q, config.block_m))
            pair_tma, pair = self.pair(config)
            named |= {"V": self.variant, "TMA": tma, "PAIR_TMA": pair_tma, "WHOLE": self.whole_tiles(config.block_n)}
            self.start(kernel, grid, *own, *descriptors, *others, *values, *pair, *shared, **named, **config.launch)

    @property
    def known_part(self) -> Part | None:
        """The part of rows whose lse is known, which a call with tau or entmax may be."""
        part = self.call.part
        return None if part is None or part.lse is None else part

    @property
    def nvidia(self) -> bool:
        return self.call.q.is_cuda and torch.version.hip is None

    @cached_property
    def table(self) -> Tensor:
        """The bias as `bias_tile` reads it."""
        return self.q if self.call.bias is None else table_of(self.start, self.call.bias, LOG2E / self.logit_units[1])

    def pair(self, config: KernelConfig) -> tuple[bool, tuple[Pair, Any]]:
        """Whether main loops read the pair bias through TMA, and what they read it by."""
        b = self.call.pair_bias
        pair = self.pair_of(b)
        if b is None or b.shape[2] == 1 or b.stride(3) != 1 or not config.tma or self.call.varlen or not describable(b):
            return False, (pair, pair.ptr)
        from triton.tools.tensor_descriptor import TensorDescriptor

        tile = [1, 1, config.block_m, config.block_n]
        return True, (pair, TensorDescriptor(b, list(b.shape), list(b.stride()), tile))

    def whole_tiles(self, block_n: int) -> bool:
        """Beside a pair bias, which has few lengths and short products: whether nothing cuts a tile of keys."""
        call = self.call
        cut = call.spec.masked or call.spec.rows or call.varlen or call.k.shape[2] % block_n
        return call.pair_bias is not None and not cut

    def pair_of(self, tensor: Tensor | None) -> Pair:
        """The pair bias, or what is shaped like it."""
        if tensor is None:
            return Pair(self.q, 0, 0, 0, 0, 1, 0, 0)
        batch, head, row = (0 if tensor.shape[axis] == 1 else tensor.stride(axis) for axis in range(3))
        return Pair(tensor, batch, head, row, tensor.stride(3), self.call.sharing, tensor.shape[2], tensor.shape[3])

    @property
    def skips(self) -> bool:
        """Whether tiles in which entmax leaves nothing are left out. Packed sequences and masks have lists of their own."""
        return self.call.entmax is not None and self.call.rows is None and not self.call.varlen

    def mask(self, config: KernelConfig, of_rows: bool) -> Mask:
        """The mask by row intervals, as a kernel reads it whose programs own row tiles or key tiles; or lists of live tiles."""
        if self.live is None:
            return self.given_mask(config, of_rows)
        kind = (config.block_m, config.block_n, of_rows)
        if kind not in self._masks:
            self._masks[kind] = self.live.lists(self, config, of_rows)
        return self._masks[kind]

    def given_mask(self, config: KernelConfig, of_rows: bool) -> Mask:
        if self.call.rows is None:
            return Mask(self.q, self.q, self.q, self.q, self.q, 0)
        kind = (config.block_m, config.block_n, of_rows)
        if kind not in self._masks:
            self._masks[kind] = self._find_mask(config, of_rows)
        return self._masks[kind]

    def _find_mask(self, config: KernelConfig, of_rows: bool) -> Mask:
        call, block_m, block_n = self.call, config.block_m, config.block_n
        packing: tuple[Tensor, ...] = ()
        if call.cu_seqlens_q is not None and call.cu_seqlens_k is not None:
            sides = ((call.cu_seqlens_q, block_m), (call.cu_seqlens_k, block_n))
            packing = (*(self.borders(*side) for side in sides), *(self.first_tiles(*side) for side in sides))
        counts = self.row_grid(block_m)[0], self.key_grid(block_n)[0]
        tiles = live_tiles(self.start_beside, call, Tiling(block_m, block_n, *counts, *packing), of_rows)
        pos_batch = 0 if call.pos is None or call.pos.shape[0] == 1 else 1
        return Mask(tiles.folded, tiles.live, tiles.counts, tiles.first_key_tiles, tiles.pos, pos_batch)

    def start_beside(self, kernel: Any, grid: tuple[int, ...], args: list[Any], constants: dict[str, Any], _which: str) -> None:
        self.start(kernel, grid, *args, **constants, num_warps=4, enable_fp_fusion=True)

    @cached_property
    def counts(self) -> Tensor:
        """Visible keys of rows where kernels do not count them: of parts [Sq], under a mask [B|1, Hq|1, Sq]."""
        part = self.known_part
        if part is not None and part.n is not None:
            return compact(part.n)
        return self.q if self.call.rows is None or self.call.tau is None else self._count(self.call.rows)

    def _count(self, rows: Tensor) -> Tensor:
        call, config = self.call, self.config("elastic")
        mask = self.mask(config, of_rows=True)
        batch, heads = mask.live.shape[0] // rows.shape[1], rows.shape[1]
        n = torch.empty((batch, heads, call.q.shape[2]), dtype=torch.int32, device=rows.device)
        tiles, _ = self.row_grid(config.block_m)
        if tiles:
            packing, geometry, *lengths = self.shared(call.cu_seqlens_q, config.block_m, self.q)
            named = {"V": self.variant, "BM": config.block_m, "BN": config.block_n}
            args = [n, mask, packing, geometry._replace(heads=heads), *lengths]
            self.start_beside(_counts_kernel, (tiles, batch * heads), args, named, "rows")
        return n

    @property
    def logit_units(self) -> tuple[float, float]:
        """(factor, unit) of `Geometry`.

        The scale stays out of the sum with the bias unless it is too small to divide by, or not positive. In fp32 too: Triton
        starts the product q.k from what is added to it, and every step of that sum would round at the size of bias / scale.
        """
        scale, cap = float(self.call.scale), self.call.spec.softcap
        if cap is not None:
            return scale / cap, cap * LOG2E
        if self.call.pair_bias is not None:
            # a tile of it comes late: the product must not wait for what is added to it
            return scale, LOG2E
        precise = self.call.bias is not None and self.call.q.dtype == torch.float32
        return (scale * LOG2E, 1.0) if precise or scale < SMALLEST_UNIT else (1.0, scale * LOG2E)

    def config(self, kernel: str) -> KernelConfig:
        return config_of(kernel, self.call)

    @property
    def geometry(self) -> Geometry:
        call, spec = self.call, self.call.spec
        factor, unit = self.logit_units
        mask_batch, mask_head = mask_steps(call)
        return Geometry(
            heads=call.q.shape[1],
            group=call.group,
            left=spec.left or 0,
            right=spec.right or 0,
            n_bias=0 if call.bias is None else call.bias.shape[1],
            bias_origin=spec.bias_origin,
            factor=factor,
            unit=unit,
            mask_batch=mask_batch,
            mask_head=mask_head,
            alphas=self.alphas,
        )

    @property
    def exponent(self) -> int:
        """`Variant.ENTMAX`."""
        if self.call.entmax is None:
            return 0
        return COMPILED.get(self.call.spec.alpha or 0.0, -1)

    @property
    def variant(self) -> Variant:
        call, spec = self.call, self.call.spec
        d, dv = call.q.shape[-1], call.v.shape[-1]
        return Variant(
            D=d,
            DV=dv,
            BD=padded(d),
            BDV=padded(dv),
            LEFT=spec.left is not None,
            RIGHT=spec.right is not None,
            CAUSAL=spec.right == 0,
            SOFTCAP=spec.softcap is not None,
            BIAS=spec.bias,
            PAIR=0 if call.pair_bias is None else 1 if call.pair_bias.shape[2] == 1 else 2,
            SINK=spec.sink,
            TAU=spec.tau,
            ENTMAX=self.exponent,
            LIVE=self.live is not None,
            GATE=spec.gate,
            VARLEN=call.varlen,
            PART=self.known_part is not None,
            INTERVALS=0 if call.rows is None else call.rows.shape[2] // 2,
            POS=spec.pos,
            LINEAR=spec.softcap is None and not spec.pair_bias and self.logit_units[0] == 1.0,
            FP32=call.q.dtype == torch.float32,
            NVIDIA=self.nvidia,
            PAIRED=call.q.dtype == torch.bfloat16 and hopper(call.q),
            PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
        )

    def descriptors(self, config: KernelConfig, block: int, *tensors: Tensor) -> tuple[bool, tuple[Any, ...]]:
        """Whether main loops read these tensors through TMA, and their descriptors of `block` rows a tile.

        Packed sequences do not: a descriptor ends with its tensor, not with a segment.
        """
        if not config.tma or self.call.varlen or not all(map(describable, tensors)):
            return False, tensors
        from triton.tools.tensor_descriptor import TensorDescriptor

        return True, tuple(
            TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block, padded(x.shape[-1])]) for x in tensors
        )

    def all_described(self, config: KernelConfig, rows: Sequence[Tensor], keys: Sequence[Tensor]) -> tuple[Any, ...]:
        """Descriptors of tensors by row tiles, then by key tiles; None for each unless main loops read all through TMA."""
        tma, by_rows = self.descriptors(config, config.block_m, *rows)
        tma_keys, by_keys = self.descriptors(config, config.block_n, *keys)
        return (*by_rows, *by_keys) if tma and tma_keys else (None,) * (len(rows) + len(keys))

    def row_grid(self, block: int) -> tuple[int, int]:
        batch, heads, sq, _ = self.call.q.shape
        return self.tiles(sq, self.call.cu_seqlens_q, block), batch * heads

    def key_grid(self, block: int) -> tuple[int, int]:
        batch, heads, sk, _ = self.call.k.shape
        return self.tiles(sk, self.call.cu_seqlens_k, block), batch * heads

    def shared(self, cu_seqlens: Tensor | None, block: int, n: Tensor | None = None) -> tuple[Any, ...]:
        """packing by tiles of `block` along `cu_seqlens` and n, geometry, sq, sk, number of segments."""
        call = self.call
        n = self.counts if n is None else n
        lengths = (self.geometry, call.q.shape[2], call.k.shape[2])
        if cu_seqlens is None:
            return (Packing(self.q, self.q, self.q, n), *lengths, 0)
        cu_q, cu_k, first, n_segments = self.packing(cu_seqlens, block)
        return (Packing(cu_q, cu_k, first, n), *lengths, n_segments)

    def readable(self, tensor: Tensor) -> Tensor:
        """[B,H,S,D], copied where the last dimension is not contiguous: kernels read all other strides in place."""
        if tensor.stride(-1) == 1 or not tensor.numel():
            return tensor
        batch, heads, rows, columns = tensor.shape
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        grid = (-(-rows * columns // small.BLOCK), batch * heads)
        args = (rows_of(tensor), tensor.stride(-1), copied, heads, rows, columns)
        self.start(small._copy_kernel, grid, *args, BLOCK=small.BLOCK, num_warps=4, enable_fp_fusion=True)
        return copied
