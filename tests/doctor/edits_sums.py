"""How to break what the tiled backend sums and where it looks terms up: sinks, maxima, merges, heads of terms (see `edits`)."""

from __future__ import annotations

from edit import BACKWARD, DELTA, DK, DV, TILES, Edit, backward, every_tile, forward
from edits_terms import TABLE, TANH

START_OF_SUM = "return maximum, torch.ones_like(maximum)"
START = "scores.block.repeat_positions(sink * LOG2E)"
SWEEP = "softmax_sweep(scores, v, sink, block_tiles, with_output=elastic is None)"
RETURN_MASKED = "return self.mask_(s2, tile)"
RESCALE = "            acc_part.mul_(rescale)\n"
ADD = "            add_product_(acc_part, p.to(v.dtype), v[:, tile.j0 : tile.j1])\n"
AVERAGE = (
    "            own = torch.zeros_like(acc_part); add_product_(own, p.to(v.dtype), v[:, tile.j0 : tile.j1])\n"
    "            count = 1 + tile.j0 // 64\n"
    "            acc_part.mul_((count - 1) / count).add_(own / p.sum(dim=-1, keepdim=True) / count)\n"
)
SINKS = "sink = None if call.sink is None else heads_of(call.sink, slab,"
OTHER_TABLE = TABLE.replace("call.bias", "call.bias[torch.arange(len(call.bias)) // call.group]")
OWN_ORIGIN = "self.spec, self.segment, self.group = call.spec,"
BOTTOM_LEFT = (
    "self.spec, self.segment, self.group = call.spec.replace("
    "bias_origin=call.spec.bias_origin - slab.segment.sk + slab.segment.sq),"
)
MASK_LENGTHS = "sq, sk, group = self.segment.sq, self.segment.sk, self.block.group"
BUT_LAST = "(torch.arange({rows}.shape[1]) % call.group < call.group - 1)[:, None]"

SUMS: dict[str, list[Edit]] = {
    "sink-missing-forward": [forward(SWEEP, SWEEP.replace("sink", "None"))],
    "sink-repeated": [forward(START_OF_SUM, "return maximum, torch.full_like(maximum, 3.0)")],
    "sink-scaled": [forward(START, START.replace("sink * LOG2E", "sink"))],
    "softcap-after-mask": [
        *every_tile("forward", "backward"),
        Edit("primitives", TANH, TANH.replace("torch.tanh(s2,", "torch.tanh(self.mask_(s2, tile),")),
        Edit("primitives", RETURN_MASKED, "return s2"),
    ],
    "hidden-finite": [
        *every_tile("forward", "backward"),
        Edit("primitives", RETURN_MASKED, "return self.mask_(s2, tile).masked_fill_(s2 == -math.inf, 0)"),
    ],
    "rescale-missing": [forward(RESCALE, "")],
    "divided-per-tile": [
        forward(ADD, ADD + "            acc_part.div_(l_part.masked_fill(l_part == 0, 1))\n"),
        forward("acc.div_(l.masked_fill(l == 0, 1))", "acc"),
    ],
    "merge-weights": [forward(RESCALE + ADD, AVERAGE), forward("acc.div_(l.masked_fill(l == 0, 1))", "acc")],
    "bias-other-head": [Edit("primitives", TABLE, OTHER_TABLE)],
    "bias-read-backward": [Edit("primitives", TABLE, OTHER_TABLE, BACKWARD)],
    "bias-distance": [Edit("primitives", OWN_ORIGIN, BOTTOM_LEFT)],
    "sink-other-head": [forward(SINKS, SINKS.replace("call.sink, slab", "call.sink.roll(1), slab"))],
    "gqa-sum-part": [
        backward(DK, DK.replace(", dx)", f", dx * {BUT_LAST.format(rows='dx')})")),
        backward(DV, DV.replace("a.to(scores.operand)", f"(a * {BUT_LAST.format(rows='a')}).to(scores.operand)")),
    ],
    "lse-stored-elsewhere": [forward("return y, lse, kept, out.peaks", "return y, lse.roll(1, 1), kept, out.peaks")],
    "delta-columns": [backward(DELTA, "delta = (do * y)[..., :32].sum(dim=-1, keepdim=True)")],
    "align-forward": [
        Edit("primitives", MASK_LENGTHS, MASK_LENGTHS.replace("self.segment.sk", "self.segment.sq"), ("forward",)),
        forward(TILES, TILES.replace("z.sk", "z.sq")),
    ],
}
