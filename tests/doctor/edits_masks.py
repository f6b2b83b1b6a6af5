"""How to break the masks of the tiled backend (see `edits`)."""

from __future__ import annotations

from edit import (
    BACKWARD,
    DK,
    DQ,
    DV,
    FORWARD,
    PUT_DK,
    PUT_DQ,
    PUT_DV,
    ROWS_AND_KEYS,
    SCORES_SPEC,
    TILES,
    Edit,
    after,
    backward,
    every_tile,
    forward,
    lost_from,
)

LSE = "lse = (maximum + torch.log2(total)) * LN2"
FINISH = "return finish(scores, sink, m, l)"
KEYS = "first, end = spec.key_range(i0, i1, sq, sk)"
MASK_LENGTHS = "sq, sk, group = self.segment.sq, self.segment.sk, self.block.group"
MASKED = "            torch.minimum(part, bound, out=part)\n        return tile_values"
STRICT = (
    "            torch.minimum(part, bound, out=part)\n"
    "        i = torch.arange(tile.i0, tile.i1).repeat_interleave(group)[:, None] + sk - sq\n"
    "        return tile_values.masked_fill_(i == torch.arange(tile.j0, tile.j1)[None, :], -math.inf)"
)
OWN_INTERVALS = "rows = rows[:, slab.g0 * group : slab.g1 * group]"
READ_INTERVALS = "self.intervals = Intervals(call, slab) if call.rows is not None else None"
COUNT_VISIBLE = "self.counts = None if call.rows is None else _counts_of_heads(call)[..., None]"
ONE_SEGMENT = "segments = (type(call.segments()[0])(0, 0, call.q.shape[2], 0, call.k.shape[2]),)"
LONGEST_OFFSET = "int(self.call.cu_seqlens_k.diff().max() - self.call.cu_seqlens_q.diff().max())"
LSE_PADDED = """kept, read = lse.new_zeros(*lse.shape[:2], 1024), []
    at = found = 0
    for z in call.segments():
        kept[:, :, at : at + z.sq] = lse[:, :, z.q0 : z.q1]
        read.append((found, found + z.sq))
        at, found = at + (z.sq + 63) // 64 * 64, found + (z.sq + 31) // 32 * 32
    lse = torch.cat([kept[:, :, i0:i1] for i0, i1 in read], dim=2)"""
OWN_LSE = (
    "lse2 = torch.logsumexp("
    "scores.tile(tiles(call.spec.replace(causal=False), i0, i1, z.sq, z.sk, config)[0]) * math.log(2), -1, keepdim=True"
    ") / math.log(2)"
)
MASKED_ALSO = """            torch.minimum(part, bound, out=part)
        {positions}
        return tile_values.masked_fill_({hidden}, -math.inf)"""
# tiles of 32 x 32: the loop over keys ends where the diagonal's tile begins, the loop over rows begins where it ends
BEFORE_DIAGONAL = "j >= -(-(i // 32 * 32 + {sk} - {sq}) // 32) * 32"
AFTER_DIAGONAL = "i < (j // 32 * 32 + 32 + z.sq - z.sk) // 32 * 32"
TO_TILE_END = "j >= -(-(i // 32 * 32 + 32 + sk - sq) // 32) * 32"


def hiding(cells: str) -> str:
    """The end of the backend's masking, with more cells hidden."""
    return MASKED_ALSO.format(positions=ROWS_AND_KEYS.format(group="group"), hidden=cells)


def unmasked_tiles(*directions: str) -> list[Edit]:
    """The causal mask is replaced by one that ends where the diagonal's tile does."""
    whole = MASKED.replace("            torch.minimum(part, bound, out=part)\n        return tile_values", hiding(TO_TILE_END))
    nothing = whole.replace("torch.minimum(part, bound, out=part)", "pass")
    return [*every_tile(*directions), Edit("primitives", MASKED, nothing, directions)]


def another_spec(changes: str, *directions: str) -> list[Edit]:
    """Mask and loop bounds of some directions follow another spec: `changes` are keyword arguments of its `replace`."""
    found = [Edit("primitives", SCORES_SPEC, SCORES_SPEC.replace("call.spec", f"call.spec.replace({changes})"), directions)]
    return found + [Edit(d, TILES, TILES.replace("call.spec", f"call.spec.replace({changes})")) for d in directions]


MASKS: dict[str, list[Edit]] = {
    "mask-causal-backward": another_spec("causal=False", "backward"),
    "mask-added-backward": another_spec("causal=True", "backward"),
    "mask-causal-forward": another_spec("causal=False", "forward"),
    "softmax-backward": [
        *another_spec("causal=False", "backward"),
        backward(
            "dq = torch.zeros_like(scores.q, dtype=dtype)", after("dq = torch.zeros_like(scores.q, dtype=dtype)", OWN_LSE)
        ),
    ],
    "mask-strict-backward": [Edit("primitives", MASKED, STRICT, BACKWARD)],
    "mask-strict": [Edit("primitives", MASKED, STRICT)],
    "mask-future": another_spec("causal=False, window=(call.spec.left, 1)", "forward", "backward"),
    "mask-future-backward": another_spec("causal=False, window=(call.spec.left, 1)", "backward"),
    "mask-after-softmax": [
        *every_tile("forward"),
        Edit("primitives", "return self.mask_(s2, tile)", "return s2", FORWARD),
        forward("add_product_(acc_part, p.to(v.dtype)", "add_product_(acc_part, scores.mask_(p, tile).clamp_(min=0)"),
    ],
    "empty-rows-mean": [
        *every_tile("forward", "backward"),
        Edit("primitives", ".masked_fill_(~allowed, -math.inf)", ".masked_fill_(~allowed, -1e4)"),
    ],
    "empty-rows-all": [
        *every_tile("forward", "backward"),
        Edit(
            "primitives",
            "            torch.minimum(part, bound, out=part)",
            "            empty = (torch.arange(i0, i1).repeat_interleave(group) + sk < sq)[:, None]\n"
            "            torch.minimum(part, bound.masked_fill(empty, math.inf), out=part)",
        ),
    ],
    "empty-rows-nan": [forward("acc.div_(l.masked_fill(l == 0, 1))", "acc.div_(l)")],
    "empty-rows-lse": [forward(LSE, f"{LSE}\n    lse.nan_to_num_(neginf=0.0)")],
    "window+1": another_spec("window=(call.spec.left + 1, call.spec.window[1])", "backward"),
    "window-1": another_spec("window=(call.spec.left - 1, call.spec.window[1])", "backward"),
    "window-forward+1": another_spec("window=(call.spec.left + 1, call.spec.window[1])", "forward"),
    "window-forward-1": another_spec("window=(call.spec.left - 1, call.spec.window[1])", "forward"),
    "window-missing-backward": another_spec("window=(None, call.spec.window[1])", "backward"),
    "window-missing-forward": another_spec("window=(None, call.spec.window[1])", "forward"),
    "align-sign": [
        *every_tile("forward", "backward"),
        Edit(
            "primitives",
            MASKED,
            MASKED.replace("torch.minimum(part, bound, out=part)", "pass")
            .replace("        return", f"        {ROWS_AND_KEYS.format(group='group')}\n        return")
            .replace("tile_values", "tile_values.masked_fill_(j > i + sq - sk, -math.inf)"),
        ),
    ],
    "keys-by-rows": [Edit("config", KEYS, f"{KEYS}\n    end = min(end, sq)")],
    "align-backward": [
        Edit("primitives", MASK_LENGTHS, MASK_LENGTHS.replace("self.segment.sk", "self.segment.sq"), BACKWARD),
        backward(TILES, TILES.replace("z.sk", "z.sq")),
    ],
    "call-alignment": [
        Edit("primitives", MASK_LENGTHS, MASK_LENGTHS.replace("self.segment.sk", "self.segment.sq")),
        forward(TILES, TILES.replace("z.sk", "z.sq")),
        backward(TILES, TILES.replace("z.sk", "z.sq")),
    ],
    "tail-keys": [Edit("config", KEYS, f"{KEYS}\n    end = end // 64 * 64")],
    "tail-padding": [forward(FINISH, f"l = l + (-scores.segment.sk % 16) * torch.exp2(-m)\n    {FINISH}")],
    "tail-rows-dq": [backward(PUT_DQ, f"dq[:, (z.sq // 64 * 64 - i0) * call.group :] = 0\n            {PUT_DQ}")],
    "tail-keys-dkdv": [
        backward(PUT_DK, after("dk[:, :, z.sk // 64 * 64 :] = 0", PUT_DK)),
        backward(PUT_DV, after("dv[:, :, z.sk // 64 * 64 :] = 0", PUT_DV)),
    ],
    "tile-lost-dq": [
        backward(
            DQ, "add_product_(dq[:, part], dx[:, :, max(0, 64 - tile.j0) :], scores.k[:, keys][:, max(0, 64 - tile.j0) :])"
        )
    ],
    "tile-lost-dk": [
        backward(
            DK, "add_product_(dk[:, :, keys], scores.q[:, part][:, max(0, 64 - tile.i0) :].mT, dx[:, max(0, 64 - tile.i0) :])"
        ),
        backward(DV, "add_product_(dv[:, :, keys], do[:, part][:, max(0, 64 - tile.i0) :].mT, a[:, max(0, 64 - tile.i0) :])"),
    ],
    "bound-forward": [Edit("primitives", MASKED, hiding(BEFORE_DIAGONAL.format(sk="sk", sq="sq")), FORWARD)],
    "bound-dq": [lost_from(DQ, "dx", BEFORE_DIAGONAL.format(sk="z.sk", sq="z.sq"))],
    "bound-dkdv": [lost_from(DK, "dx", AFTER_DIAGONAL), lost_from(DV, "a.to(scores.operand)", AFTER_DIAGONAL)],
    "chunk-backward": [Edit("primitives", MASKED, hiding("(i // 36) != (j // 36)"), BACKWARD)],
    "diagonal-unmasked": unmasked_tiles("forward"),
    "diagonal-unmasked-backward": unmasked_tiles("backward"),
    "varlen-leak": [Edit("config", "segments = call.segments()\n    if not", f"{ONE_SEGMENT}\n    if not")],
    "varlen-leak-backward": [Edit("config", "segments = call.segments()\n    if not", f"{ONE_SEGMENT}\n    if not", BACKWARD)],
    "varlen-last-segment": [
        Edit("config", "for segment in segments:", "for segment in segments[:-1]:"),
        forward("torch.empty_like", "torch.zeros_like"),
        forward("call.q.new_empty", "call.q.new_zeros"),
        backward("torch.empty_like", "torch.zeros_like"),
    ],
    "varlen-align": [
        *every_tile("forward", "backward"),
        Edit("primitives", MASK_LENGTHS, MASK_LENGTHS.replace("self.segment.sk", f"self.segment.sq + {LONGEST_OFFSET}")),
    ],
    "varlen-rows": [backward("config = config_of(call)\n", f"config = config_of(call)\n    {LSE_PADDED}\n")],
    "varlen-short": [Edit("config", KEYS, f"{KEYS}\n    end = min(end, sk - 1)")],
}

INTERVALS: dict[str, list[Edit]] = {
    "interval-end-inclusive": [Edit("intervals", "(at < end)", "(at <= end)")],
    "interval-first-exclusive": [Edit("intervals", "(first <= at)", "(first < at)")],
    "interval-second-forgotten": [Edit("intervals", "call.rows[..., z.k0 : z.k1]", "call.rows[:, :, :2, z.k0 : z.k1]")],
    "interval-other-head": [Edit("intervals", OWN_INTERVALS, OWN_INTERVALS.replace("rows[:,", "rows.roll(-1, 1)[:,", 1))],
    "interval-other-batch": [Edit("intervals", "rows[slab.b0 : slab.b1] if rows", "rows[:1] if rows")],
    "interval-backward": [Edit("primitives", READ_INTERVALS, "self.intervals = None", BACKWARD)],
    "interval-count": [Edit("primitives", COUNT_VISIBLE, "self.counts = None")],
}
