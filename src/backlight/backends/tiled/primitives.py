"""What the forward and the backward of the tiled backend share: layout of a slab, scores, mask, bias, elastic weights.

A slab holds N (batch, kv head) pairs. Its rows are position-major: row i * r + h is query position i of the h-th query head of
the group, so that any range of positions of all heads that share a key is one contiguous range of rows. Score tiles are
[N, rows, keys] in fp32 (fp64 for fp64 inputs), logits in base 2 (docs/math.md section 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from backlight import intervals
from backlight.backends.tiled.config import Slab, Tile
from backlight.backends.tiled.intervals import Intervals
from backlight.backends.tiled.pair_bias import PairBias
from backlight.call import Call
from backlight.spec import LN2, LOG2E, AttentionSpec

# --- matmuls: operands as they are, accumulation in fp32 (or fp64) -----------------------------------------------------------


def operand_dtype(call: Call) -> torch.dtype:
    """16-bit operands only where the hardware multiplies them into fp32; CPUs get fp32 operands, rounding nothing."""
    on_tensor_cores = call.q.device.type == "cuda" and call.q.dtype in (torch.float16, torch.bfloat16)
    return call.q.dtype if on_tensor_cores else call.accumulator_dtype


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`."""
    if a.dtype == out.dtype:
        return torch.bmm(a, b, out=out)
    return out.copy_(torch.bmm(a, b, out_dtype=out.dtype))


def add_product_(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """acc += a @ b."""
    if a.dtype == acc.dtype:
        acc.baddbmm_(a, b)
    else:
        acc.add_(torch.bmm(a, b, out_dtype=acc.dtype))


# --- layout ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """Positions [i0, i1) of all rows of a slab: the unit that a sweep finishes before it goes on."""

    slab: Slab
    group: int
    i0: int
    i1: int

    def rows_of(self, tensor: Tensor) -> Tensor:
        """[B,Hq,Sq,*] -> [N, (i1 - i0) * r, *], position-major."""
        return self._heads(tensor).transpose(2, 3).flatten(2, 3).flatten(0, 1)

    def put_rows(self, out: Tensor, rows: Tensor) -> None:
        """Inverse of `rows_of`, casting to the dtype of `out`."""
        heads = self._heads(out).transpose(2, 3)
        heads.copy_(rows.unflatten(1, (-1, self.group)).unflatten(0, heads.shape[:2]))

    def _heads(self, tensor: Tensor) -> Tensor:
        """[B,Hq,Sq,*] -> [batches, kv heads, r, i1 - i0, *], a view."""
        z = self.slab
        q0 = z.segment.q0
        heads = tensor[z.b0 : z.b1, z.g0 * self.group : z.g1 * self.group, q0 + self.i0 : q0 + self.i1]
        return heads.unflatten(1, (-1, self.group))

    def repeat_positions(self, heads: Tensor) -> Tensor:
        """One value per head, [N, r] -> one per row, [N, rows, 1]."""
        return heads.repeat(1, self.i1 - self.i0)[..., None]

    def sum_positions(self, rows: Tensor) -> Tensor:
        """[N, rows, 1] -> [N, r]."""
        return rows.squeeze(-1).unflatten(1, (-1, self.group)).sum(dim=1)

    def visible_counts(self, call: Call, device: torch.device) -> Tensor:
        """n_i of every row, [1, rows, 1]."""
        z = self.slab.segment
        if call.part is not None and call.part.n is not None:
            counts = call.part.n[z.q0 + self.i0 : z.q0 + self.i1]
        else:
            counts = call.spec.visible_counts(z.sq, z.sk, device, self.i0, self.i1)
        return counts.repeat_interleave(self.group)[None, :, None]

    def part(self, tile: Tile) -> slice:
        """Rows of a tile, counted from the block's first."""
        return slice((tile.i0 - self.i0) * self.group, (tile.i1 - self.i0) * self.group)


def keys_of(tensor: Tensor, slab: Slab) -> Tensor:
    """[B,Hkv,Sk,D] -> [N, Sk, D]."""
    z = slab.segment
    return tensor[slab.b0 : slab.b1, slab.g0 : slab.g1, z.k0 : z.k1].flatten(0, 1)


def put_keys(out: Tensor, slab: Slab, keys: Tensor) -> None:
    z = slab.segment
    target = out[slab.b0 : slab.b1, slab.g0 : slab.g1, z.k0 : z.k1]
    target.copy_(keys.unflatten(0, target.shape[:2]))


def columns(keys: Tensor) -> Tensor:
    """[N, Sk, D] -> [N, D, Sk]. A copy on the CPU: BLAS libraries may multiply a transposed view many times slower."""
    return keys.mT.contiguous() if keys.device.type == "cpu" else keys.mT


def heads_of(parameter: Tensor, slab: Slab, group: int, dtype: torch.dtype) -> Tensor:
    """[Hq, *] -> [N, r, *], repeated over the slab's batches."""
    heads = parameter[slab.g0 * group : slab.g1 * group].to(dtype).unflatten(0, (-1, group))
    return heads.expand(slab.b1 - slab.b0, *heads.shape).flatten(0, 1)


def add_heads_(total: Tensor, slab: Slab, group: int, heads: Tensor) -> None:
    """total [Hq, *] += heads [N, r, *], batches in ascending order."""
    target = total[slab.g0 * group : slab.g1 * group].unflatten(0, (-1, group))
    for part in heads.unflatten(0, (slab.b1 - slab.b0, -1)):
        target += part


def sink_weight(kappa: Tensor, lse: Tensor) -> Tensor:
    """p0 of eq. 9; an infinite sink is all there is, or nothing."""
    return torch.exp(kappa - lse).masked_fill_(lse == kappa, 1).masked_fill_(lse == -math.inf, 0)


class Workspace:
    """Reusable flat buffers for score tiles, so that a sweep allocates nothing per tile."""

    def __init__(self, elements: int, like: Tensor, dtype: torch.dtype):
        self._elements, self._like, self._dtype = elements, like, dtype
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = self._like.new_empty(self._elements, dtype=self._dtype)
        return self._buffers[name][: math.prod(shape)].view(shape)


# --- scores ------------------------------------------------------------------------------------------------------------------


class Scores:
    """Base-2 logits of a slab's tiles (eq. 4-7, 67), the same code for every sweep of both directions.

    `start` loads the rows of a block. `tanh` of the last softcapped tile is kept for its derivative (eq. 25).
    """

    def __init__(self, call: Call, slab: Slab, workspace: Workspace):
        self.call, self.spec, self.segment, self.workspace = call, call.spec, slab.segment, workspace
        self.dtype, self.operand = call.accumulator_dtype, operand_dtype(call)
        self.k = keys_of(call.k, slab).to(self.operand)
        self.k_columns = columns(self.k)
        # between q.k and what is exponentiated; folded into q unless that would round a 16-bit operand
        self.factor = call.scale * LOG2E if call.spec.softcap is None else call.scale / call.spec.softcap
        self.folded = self.operand == self.dtype
        self.bias = Bias(call, slab) if call.bias is not None else None
        self.pair_bias = PairBias(call, slab) if call.pair_bias is not None else None
        self.intervals = Intervals(call, slab) if call.rows is not None else None
        self.tanh: Tensor | None = None
        self.logits: Tensor | None = None

    def start(self, block: Block) -> None:
        self.block = block
        self.q = block.rows_of(self.call.q).to(self.operand)
        if self.folded:
            self.q = self.q * self.factor

    @property
    def dk_factor(self) -> float:
        """dk = scale * dx^T q (eq. 26); where `self.q` carries the factor of the logits, scale / factor is left to multiply."""
        if not self.folded:
            return self.call.scale
        return LN2 if self.spec.softcap is None else self.spec.softcap

    def tile(self, tile: Tile) -> Tensor:
        """s * log2(e), -inf where masked: [N, rows, keys], overwritten by the next call."""
        q, k = self.q[:, self.block.part(tile)], self.k_columns[:, :, tile.j0 : tile.j1]
        s2 = product(q, k, self.workspace.take("s", q.shape[0], q.shape[1], k.shape[2]))
        if not self.folded:
            s2.mul_(self.factor)
        if self.keeps_logits:
            self.logits = self.workspace.take("x", *s2.shape).copy_(s2)
        if self.spec.softcap is not None:
            self.tanh = torch.tanh(s2, out=self.workspace.take("tanh", *s2.shape))
            torch.mul(self.tanh, self.spec.softcap * LOG2E, out=s2)
        if self.bias is not None:
            self.bias.add_(s2, tile)
        if self.pair_bias is not None:
            self.pair_bias.add_(s2, tile)
        return self.mask_(s2, tile)

    @property
    def keeps_logits(self) -> bool:
        """Whether the largest logits are wanted and s is not x in base 2."""
        spec = self.spec
        return self.call.max_logit and (spec.softcap is not None or spec.bias or spec.pair_bias)

    def largest_logits(self, s2: Tensor, largest: Tensor) -> Tensor:
        """The largest x of the rows of a tile (eq. 72), of which `largest` is that of s2 [N, rows, 1]; in natural units."""
        if self.logits is None:
            return largest * LN2
        largest = self.logits.masked_fill_(s2 == -math.inf, -math.inf).amax(dim=-1, keepdim=True)
        return largest * (LN2 if self.spec.softcap is None else self.spec.softcap)

    def mask_(self, tile_values: Tensor, tile: Tile) -> Tensor:
        """-inf where the spec or the mask hides a key; touches only the rectangles that an edge crosses."""
        sq, sk, group = self.segment.sq, self.segment.sk, self.block.group
        window = self.spec.left, self.spec.right
        if self.intervals is not None:
            self.intervals.mask_(tile_values, tile)
        for i0, i1, j0, j1 in self.spec.edges(tile.i0, tile.i1, tile.j0, tile.j1, sq, sk):
            bound = _bound(window, i0 + sk - sq - j0, i1 - i0, j1 - j0, group, self.dtype, self.q.device)
            part = tile_values[:, (i0 - tile.i0) * group : (i1 - tile.i0) * group, j0 - tile.j0 : j1 - tile.j0]
            # a minimum would keep what is not a number
            if part.device.type != "cpu" or bool(part.sum().isnan()):
                part.masked_fill_(bound == -math.inf, 0)
            torch.minimum(part, bound, out=part)
        return tile_values

    def visited(self, found: list[Tile]) -> list[Tile]:
        """Without the tiles that the mask leaves nothing of."""
        return found if self.intervals is None else self.intervals.visited(found)


@lru_cache(maxsize=64)
def _bound(
    window: tuple[int | None, int | None],
    offset: int,
    rows: int,
    keys: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Upper bound of a tile's logits: +inf where visible, -inf where masked. A minimum, unlike a sum, is exact for inf too."""
    spec = AttentionSpec(window=window)
    allowed = spec.allowed_distance(spec.distance(0, rows, 0, keys, rows, rows + offset, device))
    bound = torch.full(allowed.shape, math.inf, dtype=dtype, device=device).masked_fill_(~allowed, -math.inf)
    return bound.repeat_interleave(group, dim=0)


class Bias:
    """The distance table of a slab, base 2 and mirrored so that columns run along keys: Toeplitz tiles are its windows."""

    def __init__(self, call: Call, slab: Slab):
        assert call.bias is not None
        self.spec, self.segment, self.group = call.spec, slab.segment, call.group
        table = heads_of(call.bias, slab, call.group, call.accumulator_dtype)
        self.mirrored = (table * LOG2E).flip(-1)
        self.length = table.shape[-1]

    def _overlap(self, tile: Tile) -> tuple[int, int, int, int] | None:
        """Keys [j0, j1) whose distances meet the table, and the mirrored columns [m0, m1) they read (ends may overhang)."""
        sq, sk, origin = self.segment.sq, self.segment.sk, self.spec.bias_origin
        position = tile.i0 + sk - sq + origin, tile.i1 - 1 + sk - sq + origin
        j0, j1 = max(tile.j0, position[0] - self.length + 1), min(tile.j1, position[1] + 1)
        if j0 >= j1:
            return None
        c0, c1 = self.spec.bias_columns(tile.i0, tile.i1, j0, j1, sq, sk)
        return j0, j1, self.length - c1, self.length - c0

    def add_(self, s2: Tensor, tile: Tile) -> None:
        """s2 += bias (eq. 6)."""
        overlap = self._overlap(tile)
        if overlap is None:
            return
        j0, j1, m0, m1 = overlap
        inside = self.mirrored[..., max(m0, 0) : max(0, min(m1, self.length))]
        line = pad(inside, (max(0, -m0), max(0, m1 - self.length)))
        # row i of the tile reads the window that starts rows - 1 - i columns into the line
        toeplitz = line.unfold(-1, j1 - j0, 1).flip(-2)
        part = s2[:, :, j0 - tile.j0 : j1 - tile.j0].unflatten(1, (-1, self.group))
        part += toeplitz.transpose(1, 2)

    def largest(self, tile: Tile) -> Tensor:
        """[N, r]: the largest entry that a tile's distances meet, 0 for those outside of the table."""
        overlap = self._overlap(tile)
        if overlap is None:
            return self.mirrored.new_zeros(self.mirrored.shape[:2])
        j0, j1, m0, m1 = overlap
        top = self.mirrored[..., max(m0, 0) : min(m1, self.length)].amax(dim=-1)
        covered = (j0, j1) == (tile.j0, tile.j1) and m0 >= 0 and m1 <= self.length
        return top if covered else top.clamp(min=0)

    def add_diagonals_(self, dmirrored: Tensor, ds: Tensor, tile: Tile) -> None:
        """dmirrored [N, r, n] += sums of ds along its diagonals (eq. 22)."""
        overlap = self._overlap(tile)
        if overlap is None:
            return
        j0, j1, m0, m1 = overlap
        n, rows, keys = ds.shape[0], tile.i1 - tile.i0, j1 - j0
        width = 2 * rows + keys - 2
        sheared = ds.new_zeros(n, self.group, rows, width)
        part = ds[:, :, j0 - tile.j0 : j1 - tile.j0].unflatten(1, (-1, self.group))
        sheared[..., rows - 1 : rows - 1 + keys] = part.transpose(1, 2)
        # one more column per row: cells of a diagonal line up in a column
        columns = rows + keys - 1
        aligned = sheared.as_strided((n, self.group, rows, columns), (self.group * rows * width, rows * width, width + 1, 1))
        sums = aligned.sum(dim=2)
        lo, hi = max(m0, 0), min(m1, self.length)
        if lo < hi:
            dmirrored[..., lo:hi] += sums[..., lo - m0 : hi - m0]


def _counts_of_heads(call: Call) -> Tensor:
    """n_i of every row under a mask, [B, Hq, Sq]; of all parts together where the call is one of them."""
    known = None if call.part is None else call.part.n
    return (intervals.visible_counts(call) if known is None else known).expand(call.q.shape[:3])


# --- elastic softmax ---------------------------------------------------------------------------------------------------------


class Elastic:
    """Survivors and weights of the elastic softmax (eq. 10, 11), the same expression in both directions."""

    def __init__(self, call: Call, slab: Slab, workspace: Workspace):
        assert call.tau is not None
        self.call, self.workspace = call, workspace
        self.tau_heads = heads_of(call.tau, slab, call.group, call.accumulator_dtype)
        # under a mask they differ from head to head
        self.counts = None if call.rows is None else _counts_of_heads(call)[..., None]

    def start(self, block: Block) -> None:
        self.block = block
        tau = block.repeat_positions(self.tau_heads)
        n = block.visible_counts(self.call, tau.device) if self.counts is None else block.rows_of(self.counts)
        self.tau, self.n = tau, n.clamp(min=1)
        self.tau_over_n = tau / self.n
        # every visible key survives when tau >= 0, also where p underflowed; masked keys sit at -inf and never do
        self.floor = torch.zeros_like(tau).masked_fill_(tau >= 0, -math.inf)
        self.single = None if self.call.sink is not None or not bool((n == 1).any()) else n == 1

    def exact_single_(self, p: Tensor, tile: Tile) -> Tensor:
        """Where a row sees one key, p is 1 exactly: rounding of lse must not decide on which side of the kink it falls."""
        if self.single is None:
            return p
        return p.masked_fill_(self.single[:, self.block.part(tile)] & (p > 0.5), 1.0)

    def weights(self, p: Tensor, tile: Tile, scores: Scores) -> tuple[Tensor, Tensor]:
        """(a, m): weights relu(p + tau / n) and survivors as 0/1, both [N, rows, keys]."""
        part = self.block.part(tile)
        a = torch.add(p, self.tau_over_n[:, part], out=self.workspace.take("a", *p.shape))
        scores.mask_(a, tile)
        m = torch.gt(a, self.floor[:, part], out=self.workspace.take("m", *p.shape))
        return a.clamp_(min=0), m
