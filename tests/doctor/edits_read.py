"""More ways to break the tiled backend: layouts, row maxima, the soft cap's function, rows of dpair."""

from __future__ import annotations

from edit import DS, Edit, backward, forward

# the call as the whole backward sees it
SLABS = "    for slab in slabs(call, config):\n        _backward_slab("
AS_BSHD = "call.k.contiguous().view(call.k.shape[0], call.k.shape[2], call.k.shape[1], -1).transpose(1, 2)"
TANH = 'self.tanh = torch.tanh(s2, out=self.workspace.take("tanh", *s2.shape))'
DPAIRS = 'scores.pair_bias.add_gradient_(sums["dpair_bias"], ds, tile)'
ROW = "torch.arange(tile.i0, tile.i1).repeat_interleave(call.group)[:, None]"
PARTS_WEIGHTS = "p = scores.tile(tile).sub_(lse2[:, part]).exp2_()"
OWN_WEIGHTS = "p = torch.softmax(scores.tile(tile) / 1.4426950408889634, dim=-1).nan_to_num_(0.0)"
MOVED = "        m_old.copy_(m_new)"
OVERFLOWED = (
    "        gone = (torch.exp2(largest - m_old) == math.inf) & (m_old > -math.inf)\n"
    "        acc_part.masked_fill_(gone, 0)\n"
    "        m_old.copy_(m_new.masked_fill(gone, math.inf))"
)
SHORT_TILES = Edit("config", "min(sk, 4096)", "min(sk, 64)")
TILE_COLUMNS = "part = tensor[own, heads, rows, tile.j0 : tile.j1]"
PRODUCT = 's2 = product(q, k, self.workspace.take("s",'
SWEPT = "return finish(scores, sink, m, l), acc.div_(l.masked_fill(l == 0, 1))"

READ: dict[str, list[Edit]] = {
    "kv-layout-backward": [
        backward(SLABS, f"    call = __import__('dataclasses').replace(call, k={AS_BSHD}, _segments=None)\n{SLABS}")
    ],
    "softcap-function": [Edit("primitives", TANH, "self.tanh = s2 / (1 + s2.abs()); s2.copy_(self.tanh)")],
    "maximum-start": [forward("(*scores.q.shape[:2], 1), -math.inf,", "(*scores.q.shape[:2], 1), 0.0,")],
    "merge-overflow": [
        forward(
            SWEPT,
            "whole = torch.exp2(m + torch.log2(l)); "
            "return torch.log(whole), acc.div_(l.masked_fill(l == 0, 1)).mul_(whole).div_(whole)",
        )
    ],
    "part-softmax-backward": [
        backward(PARTS_WEIGHTS, OWN_WEIGHTS),
        backward(DS, "ds = dp.sub_((p * dp).sum(dim=-1, keepdim=True)).mul_(p)"),
    ],
    "merge-difference": [SHORT_TILES, forward(MOVED, OVERFLOWED)],
    "pair-bias-columns": [
        SHORT_TILES,
        Edit("pair_bias", TILE_COLUMNS, TILE_COLUMNS.replace("tile.j0 : tile.j1", ": tile.j1 - tile.j0")),
    ],
    "score-columns": [Edit("primitives", PRODUCT, PRODUCT.replace("(q, k,", "(q[..., :16], k[:, :16],"))],
    "pair-bias-rows": [backward(DPAIRS, DPAIRS.replace(" ds,", f" ds.masked_fill({ROW} >= 64, 0),"))],
}
