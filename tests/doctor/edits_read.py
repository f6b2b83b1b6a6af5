"""More ways to break the tiled backend: layouts, row maxima, the soft cap's function, rows of dpair."""

from __future__ import annotations

from edit import Edit, backward, forward

# the call as the whole backward sees it
SLABS = "    for slab in slabs(call, config):\n        _backward_slab("
AS_BSHD = "call.k.contiguous().view(call.k.shape[0], call.k.shape[2], call.k.shape[1], -1).transpose(1, 2)"
TANH = 'self.tanh = torch.tanh(s2, out=self.workspace.take("tanh", *s2.shape))'
DPAIRS = 'scores.pair_bias.add_gradient_(sums["dpair_bias"], ds, tile)'
ROW = "torch.arange(tile.i0, tile.i1).repeat_interleave(call.group)[:, None]"
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
    "pair-bias-rows": [backward(DPAIRS, DPAIRS.replace(" ds,", f" ds.masked_fill({ROW} >= 64, 0),"))],
}
