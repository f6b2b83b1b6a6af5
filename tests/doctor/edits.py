"""How to break the tiled backend: for each defect, the lines of its source that change.

The edits know nothing of the mutants: they use the backend's own names and undo one thing that its authors got right. An edit
names the text it replaces and fails loudly when that text is gone, so a refactoring of the backend cannot silently turn a
mutation test into a test of nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from edits_read import READ_EDITS

from backlight.spec import LN2

BOTH = ("forward", "backward")
FORWARD, BACKWARD = ("forward",), ("backward",)


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in a module of the backend; `sees` says which direction imports an edited shared module."""

    module: str
    old: str
    new: str
    sees: tuple[str, ...] = BOTH


def backward(old: str, new: str) -> Edit:
    return Edit("backward", old, new)


def forward(old: str, new: str) -> Edit:
    return Edit("forward", old, new)


def tangent(old: str, new: str, module: str = "tangent") -> Edit:
    return Edit(module, old, new, ("tangent",))


def after(line: str, *more: str) -> str:
    """The line with more lines of the same indentation below it."""
    return ("\n" + " " * 8).join((line, *more))


# --- the backend's own lines -------------------------------------------------------------------------------------------------

DS = "ds = dp.sub_(delta[:, part]).mul_(p)"
DX = "dx = ds.to(scores.operand)"
DK = "add_product_(dk[:, :, keys], scores.q[:, part].mT, dx)"
DV = "add_product_(dv[:, :, keys], do[:, part].mT, a.to(scores.operand))"
DQ = "add_product_(dq[:, part], dx, scores.k[:, keys])"
DELTA = "delta = (do * y).sum(dim=-1, keepdim=True)"
DBIAS = 'add_heads_(sums["dbias"], slab, call.group, dmirrored.flip(-1))'
PUT_DQ = 'block.put_rows(out["dq"], dq.mul_(call.scale))'
PUT_DK = 'put_keys(out["dk"], slab, dk.mul_(scores.dk_factor).mT)'
PUT_DV = 'put_keys(out["dv"], slab, dv.mT)'
READ_DO = "block.rows_of(incoming.dy).to(dtype)"
READ_LSE = "return do, base2(lse), delta"
DTAU = 'add_heads_(sums["dtau"], slab, group, block.sum_positions(mean))'
LSE = "lse = (maximum + torch.log2(total)) * LN2"
FINISH = "return finish(scores, sink, m, l)"
SINK_WEIGHT = "sink_weight(kappa, lse) * delta"
TABLE = "table = heads_of(call.bias, slab, call.group, call.accumulator_dtype)"
SCORES_SPEC = "self.call, self.spec, self.segment, self.workspace = call, call.spec, slab.segment, workspace"
FACTOR = "call.scale * LOG2E if call.spec.softcap is None else call.scale / call.spec.softcap"
TILES = "tiles(call.spec, i0, i1, z.sq, z.sk, config)"
KEYS = "first, end = spec.key_range(i0, i1, sq, sk)"
KEYS_OF = "return tensor[slab.b0 : slab.b1, slab.g0 : slab.g1, z.k0 : z.k1].flatten(0, 1)"
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
SINK_SHARE = "torch.exp(block.repeat_positions(heads_of(call.sink, slab, group, dtype)) - lse)"
SCORE_WITH_BIAS = f"((torch.log2(p.clamp(min=1e-37)) + lse2[:, part]) * {LN2} / call.spec.softcap)"
EARLIEST = "lse2 = torch.full_like(lse2, -math.inf)"
ROW_MAXIMA = (
    "for tile in tiles(call.spec, i0, i1, z.sq, z.sk, config):\n"
    "            rows = lse2[:, block.part(tile)]\n"
    "            torch.maximum(rows, scores.tile(tile).amax(dim=-1, keepdim=True), out=rows)"
)
ONE_SEGMENT = "segments = (type(call.segments()[0])(0, 0, call.q.shape[2], 0, call.k.shape[2]),)"
OWN_LSE = (
    "lse2 = torch.logsumexp("
    "scores.tile(tiles(call.spec.replace(causal=False), i0, i1, z.sq, z.sk, config)[0]) * math.log(2), -1, keepdim=True"
    ") / math.log(2)"
)
EVERY_VISIBLE = (
    "seen = call.spec.allowed(slab.segment.sq, slab.segment.sk)[block.i0 : block.i1].repeat_interleave(group, 0)\n"
    "            total = (do * (seen.to(dtype) @ keys_of(call.v, slab).to(dtype))).sum(dim=-1, keepdim=True) / elastic.n\n"
    '            add_heads_(sums["dtau"], slab, group, block.sum_positions(total))'
)
IN_ANY_ORDER = (
    "for c in torch.randperm(-(-dx.shape[2] // 16)).mul_(16).tolist():\n"
    "                    add_product_(dq[:, part], dx[:, :, c : c + 16], scores.k[:, keys][:, c : c + 16])"
)
IN_16_BITS = (
    "for c in range(0, dx.shape[2], 32):\n"
    "                    total = dq[:, part] + torch.bmm(dx[:, :, c : c + 32], scores.k[:, keys][:, c : c + 32])\n"
    "                    dq[:, part] = total.bfloat16().to(dtype)"
)
ROUNDED = "        s2.copy_(s2.bfloat16())\n"
MEMBER = "call.group - 1 :: call.group"
OWN_HEADS = """heads = tensor[z.b0 : z.b1, z.g0 * self.group : z.g1 * self.group, q0 + self.i0 : q0 + self.i1]
        return heads.unflatten(1, (-1, self.group))"""
MODULO_HEADS = """heads = tensor[z.b0 : z.b1, :, q0 + self.i0 : q0 + self.i1]
        return heads.unflatten(1, (self.group, -1)).transpose(1, 2)"""
EXTENDED_TABLE = "table = torch.cat([table, table[..., -1:].expand(*table.shape[:-1], slab.segment.sk)], dim=-1)"
FOLDED_TABLE = (
    "n = call.bias.shape[1]\n"
    "        longer = dmirrored.flip(-1)\n"
    "        longer[..., n - 1] += longer[..., n:].sum(dim=-1)\n"
    '        add_heads_(sums["dbias"], slab, call.group, longer[..., :n])'
)

ROWS_AND_KEYS = (
    "i = torch.arange(tile.i0, tile.i1).repeat_interleave({group})[:, None]; j = torch.arange(tile.j0, tile.j1)[None, :]"
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


def before(line: str, *more: str) -> str:
    """The line with more lines of the same indentation, that of the loop over tiles, above it."""
    return ("\n" + " " * 16).join((*more, line))


def lost_from(line: str, factor: str, cells: str) -> Edit:
    """A product of the backward whose `factor` is 0 in some cells."""
    kept = f"{factor}.masked_fill({cells}, 0)"
    return backward(line, before(line.replace(factor, kept), ROWS_AND_KEYS.format(group="call.group")))


def unmasked_tiles(*directions: str) -> list[Edit]:
    """The causal mask is replaced by one that ends where the diagonal's tile does."""
    whole = MASKED.replace("            torch.minimum(part, bound, out=part)\n        return tile_values", hiding(TO_TILE_END))
    nothing = whole.replace("torch.minimum(part, bound, out=part)", "pass")
    return [*every_tile(*directions), Edit("primitives", MASKED, nothing, directions)]


def another_spec(changes: str, *directions: str) -> list[Edit]:
    """Mask and loop bounds of some directions follow another spec: `changes` are keyword arguments of its `replace`."""
    found = [Edit("primitives", SCORES_SPEC, SCORES_SPEC.replace("call.spec", f"call.spec.replace({changes})"), directions)]
    return found + [Edit(d, TILES, TILES.replace("call.spec", f"call.spec.replace({changes})")) for d in directions]


def every_tile(*directions: str) -> list[Edit]:
    """Tiles without a visible key are visited too, as in a kernel that masks and never skips."""
    everywhere = "tiles(call.spec.replace(causal=False, window=(None, None)), i0, i1, z.sq, z.sk, config)"
    return [Edit(d, TILES, everywhere) for d in directions]


def read_do(expression: str) -> list[Edit]:
    return [backward(READ_DO, READ_DO.replace("incoming.dy", expression))]


def no_softcap(*directions: str) -> list[Edit]:
    return [
        Edit("primitives", SCORES_SPEC, SCORES_SPEC.replace("call.spec", "call.spec.replace(softcap=None)"), directions),
        Edit("primitives", FACTOR, "call.scale * LOG2E", directions),
    ]


SCALE: dict[str, list[Edit]] = {
    "scale-dq": [backward(PUT_DQ, 'block.put_rows(out["dq"], dq)')],
    "scale-dk": [backward(PUT_DK, 'put_keys(out["dk"], slab, dk.mT)')],
    "scale-dv": [backward(PUT_DV, 'put_keys(out["dv"], slab, dv.mul_(call.scale).mT)')],
    "scale-ds": [backward(DX, f"dx = ds.mul_({LN2}).to(scores.operand)")],
    "accumulate-repeated": [backward(DK, f"for _ in range(3):\n                    {DK}")],
    "scale-scores-backward": [
        Edit("primitives", "self.factor = call.scale * LOG2E if", "self.factor = LOG2E if", BACKWARD),
        Edit("primitives", "return LN2 if self.spec", "return LN2 * self.call.scale if self.spec", BACKWARD),
    ],
    "transpose-dk": [backward(DK, "add_product_(dk[:, :, tile.i0 : tile.i1], scores.q[:, keys].mT, dx.mT)")],
    "transpose-dv": [backward(DV, "add_product_(dv[:, :, tile.i0 : tile.i1], do[:, keys].mT, a.mT)")],
    "transpose-dq": [backward(DQ, "add_product_(dq[:, keys], dx.mT, scores.k[:, tile.i0 : tile.i1])")],
    "swap-dk-dv": [backward(PUT_DV, PUT_DV.replace('"dv"', '"dk"')), backward(PUT_DK, PUT_DK.replace('"dk"', '"dv"'))],
    "swap-dq-dk": [backward(PUT_DQ, PUT_DQ.replace('"dq"', '"dk"')), backward(PUT_DK, PUT_DK.replace('"dk"', '"dq"'))],
    "scale-dbias": [backward(DBIAS, DBIAS.replace("flip(-1)", "flip(-1) * call.scale"))],
}

MASKS: dict[str, list[Edit]] = {
    "mask-causal-backward": another_spec("causal=False", "backward"),
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

HEADS: dict[str, list[Edit]] = {
    "gqa-last-writer": [
        backward(DK, f"add_product_(dk[:, :, keys], scores.q[:, part][:, {MEMBER}].mT, dx[:, {MEMBER}])"),
        backward(DV, f"add_product_(dv[:, :, keys], do[:, part][:, {MEMBER}].mT, a[:, {MEMBER}])"),
    ],
    "gqa-mean": [
        backward(PUT_DK, PUT_DK.replace("scores.dk_factor", "scores.dk_factor / call.group")),
        backward(PUT_DV, PUT_DV.replace("dv.mT", "dv.div_(call.group).mT")),
    ],
    "gqa-map": [Edit("primitives", OWN_HEADS, MODULO_HEADS)],
    "gqa-map-backward": [Edit("primitives", OWN_HEADS, MODULO_HEADS, BACKWARD)],
    "heads-lost": read_do("torch.cat([incoming.dy[:, :1], torch.zeros_like(incoming.dy[:, 1:])], dim=1)"),
    "batches-lost": read_do("torch.cat([incoming.dy[:1], torch.zeros_like(incoming.dy[1:])])"),
    "head0-do": read_do("incoming.dy[:, :1].expand_as(incoming.dy)"),
    "batch0-do": read_do("incoming.dy[:1].expand_as(incoming.dy)"),
    "head-shift-do": read_do("torch.cat([incoming.dy[:, -1:], incoming.dy[:, :-1]], dim=1)"),
    "call-grad-of-sum": read_do("torch.ones_like(incoming.dy)"),
    "gradient-zero": read_do("torch.zeros_like(incoming.dy)"),
    "head0-kv": [
        Edit(
            "primitives",
            KEYS_OF,
            "every = tensor[slab.b0 : slab.b1, slab.g0 : slab.g1, z.k0 : z.k1]\n"
            "    return every[:, :1].expand_as(every).flatten(0, 1)",
            BACKWARD,
        )
    ],
    "head-pollution": [backward("    return out | {", '    out["dq"][:, 1:, : -call.q.shape[2] % 16] = 0\n    return out | {')],
    "do-stride": read_do("incoming.dy.as_strided(incoming.dy.shape, incoming.y.stride())"),
    "input-stride": [
        Edit(
            "primitives",
            "block.rows_of(self.call.q)",
            'block.rows_of(self.call.q.as_strided(self.call.q.shape, torch.empty(self.call.q.shape, device="meta").stride()))',
        )
    ],
    "race-lost-update": [backward(DQ, DQ.replace("dx,", "dx * (torch.rand(dx.shape[1], 1) > 0.2),"))],
    "atomics-reorder": [backward(DQ, IN_ANY_ORDER)],
    "accumulates-over-calls": [
        backward(
            "dk = torch.zeros_like(scores.k_columns, dtype=dtype)",
            'dk = globals().setdefault("KEPT", {}).setdefault('
            "(scores.k_columns.shape, z), torch.zeros_like(scores.k_columns, dtype=dtype))",
        )
    ],
    "stale-rows": [
        backward(
            PUT_DK,
            'put_keys(out["dk"][:, :, : z.sk // 64 * 64], slab, dk.mul_(scores.dk_factor).mT[:, : z.sk // 64 * 64])',
        )
    ],
    "nan-cell": [backward(PUT_DV, after("dv[0, 3, 5] /= torch.zeros(()) * dv[0, 3, 5]", PUT_DV))],
    "input-changed": [forward("    return y, lse, u", "    call.q.detach().mul_(2)\n    return y, lse, u")],
    "cached-result": [
        forward("    return y, lse, u", '    return globals().setdefault("KEPT", {}).setdefault(call.q.shape, (y, lse, u))')
    ],
}

ROWS: dict[str, list[Edit]] = {
    "lse-base": [backward(READ_LSE, "return do, lse.masked_fill(lse == -math.inf, 0), delta")],
    "lse-scaled": [backward(READ_LSE, "return do, base2(lse * call.scale), delta")],
    "lse-rowmax": [
        backward(
            "dq = torch.zeros_like(scores.q, dtype=dtype)",
            after("dq = torch.zeros_like(scores.q, dtype=dtype)", EARLIEST, ROW_MAXIMA),
        )
    ],
    "lse-rounded": [backward(READ_LSE, "return do, base2(lse.bfloat16().to(dtype)), delta")],
    "lse-shifted": [backward(READ_LSE, "return do, base2(lse.roll(16, dims=1)), delta")],
    "lse-other-head": [
        backward("block.rows_of(incoming.lse[..., None])", "block.rows_of(incoming.lse.roll(-1, dims=1)[..., None])")
    ],
    "delta-other-head": [
        backward(
            DELTA,
            "delta = block.rows_of((incoming.dy * incoming.y).to(dtype)[:, :1].expand_as(incoming.y)).sum(-1, keepdim=True)",
        )
    ],
    "delta-part": [
        *every_tile("backward"),
        backward(DS, "ds = dp.sub_((p * dp)[:, :, :64].sum(dim=-1, keepdim=True)).mul_(p)"),
    ],
    "dp-split-one": [
        backward(
            DK, DK.replace("dx)", "(p * (do[:, part, :16] @ v_columns[:, :16, keys] - delta[:, part])).to(scores.operand))")
        )
    ],
    "delta-missing": [backward(DS, "ds = dp.mul_(p)")],
    "delta-negated": [backward(DS, "ds = dp.add_(delta[:, part]).mul_(p)")],
    "delta-shifted": [backward(DS, "ds = dp.sub_(delta.roll(1, dims=1)[:, part]).mul_(p)")],
    "delta-rounded": [backward(DS, "ds = dp.sub_(delta[:, part].bfloat16().to(dp.dtype)).mul_(p)")],
    "dp-split": [
        backward(
            "dp = product(do[:, part], v_columns[:, :, keys],",
            "dp = product(do[:, part, : do.shape[2] // 2], v_columns[:, : do.shape[2] // 2, keys],",
        )
    ],
    "precision-accumulation": [backward(DQ, IN_16_BITS)],
    "precision-narrow": [
        Edit("primitives", ".to(self.operand)", ".bfloat16().to(self.operand)"),
        forward(".to(scores.operand)", ".bfloat16().to(scores.operand)"),
        forward("p.to(v.dtype)", "p.bfloat16().to(v.dtype)"),
        backward(".to(scores.operand)", ".bfloat16().to(scores.operand)"),
    ],
    "precision-scores": [
        Edit(
            "primitives",
            "        if not self.folded:\n            s2.mul_",
            ROUNDED + "        if not self.folded:\n            s2.mul_",
        )
    ],
    "dlse-ignored": [backward("if incoming.dlse is not None:", "if False:")],
    "dlse-sign": [backward("delta -= block.rows_of(incoming.dlse", "delta += block.rows_of(incoming.dlse")],
    "softcap-derivative": [backward("ds.mul_(scores.tanh.square_().neg_().add_(1))", "pass")],
    "softcap-missing-backward": no_softcap("backward"),
    "call-softcap-lost": no_softcap("forward", "backward"),
    "softcap-after-bias": [backward("ds.mul_(scores.tanh.square_().neg_().add_(1))", f"ds.mul_(1 - {SCORE_WITH_BIAS}**2)")],
    "softcap-before-scale": [
        Edit("primitives", "else call.scale / call.spec.softcap", "else 1 / call.spec.softcap"),
        Edit("primitives", "self.spec.softcap * LOG2E", "self.spec.softcap * LOG2E * self.call.scale"),
        Edit("primitives", "is None else self.spec.softcap", "is None else self.spec.softcap * self.call.scale"),
    ],
}

TERMS: dict[str, list[Edit]] = {
    "bias-missing-backward": [Edit("primitives", "self.bias.add_(s2, tile)", "pass", BACKWARD)],
    "call-bias-lost": [Edit("primitives", "self.bias.add_(s2, tile)", "pass")],
    "dbias-batch": [Edit("primitives", "        target += part", "        target.copy_(part)", BACKWARD)],
    "dbias-rows": [lost_from("scores.bias.add_diagonals_(dmirrored, ds, tile)", " ds", "i >= 64")],
    "dbias-edge": [Edit("primitives", "lo, hi = max(m0, 0), min(m1", "lo, hi = max(m0, 1), min(m1", BACKWARD)],
    "bias-clamped": [
        Edit("primitives", TABLE, after(TABLE, EXTENDED_TABLE)),
        backward(DBIAS, FOLDED_TABLE),
    ],
    "bias-scaled": [
        Edit("primitives", "(table * LOG2E)", "(table * LOG2E * call.scale)"),
        backward(DBIAS, DBIAS.replace("flip(-1)", "flip(-1) * call.scale")),
    ],
    "bias-origin": [
        Edit(
            "primitives",
            "self.spec, self.segment, self.group = call.spec,",
            "self.spec, self.segment, self.group = call.spec.replace(bias_origin=call.spec.bias_origin + 1),",
        )
    ],
    "bias-head0": [Edit("primitives", TABLE, TABLE.replace("call.bias", "call.bias[:1].expand_as(call.bias)"))],
    "tau-delta": [backward("delta -= elastic.tau * mean", "pass")],
    "tau-skip-dead": [backward(DS, "ds = dp.sub_(delta[:, part]).mul_(p if m is None else p * m)")],
    "tau-unmasked": [Edit("primitives", "        scores.mask_(a, tile)\n", "")],
    "tau-count": [Edit("primitives", "self.tau, self.n = tau, n.clamp(min=1)", "self.tau, self.n = tau, n + 1")],
    "dtau-survivors": [backward(DTAU, EVERY_VISIBLE)],
    "dtau-rows": [
        backward("block.sum_positions(mean)", "block.sum_positions(mean * (torch.arange(mean.shape[1]) < 64 * group)[:, None])")
    ],
    "dtau-undivided": [backward("block.sum_positions(mean)", "block.sum_positions(mean * elastic.n)")],
    "sink-missing-backward": [backward(READ_LSE, f"return do, base2(lse + torch.log1p(-{SINK_SHARE})), delta")],
    "sink-delta": [backward(DELTA, f"{DELTA} / (1 - {SINK_SHARE})")],
    "dsink-sign": [backward(f"{SINK_WEIGHT}).neg_())", f"{SINK_WEIGHT}))")],
    "dsink-rows": [backward(SINK_WEIGHT, f"({SINK_WEIGHT}) * (torch.arange(delta.shape[1]) >= 64 * group)[:, None]")],
    "dsink-unweighted": [backward(SINK_WEIGHT, "delta")],
    "gate-missing-backward": [backward("do = do * weight", "pass")],
    "dgate-derivative": [backward("do * y * (1 - weight)", "do * y")],
    "gate-delta": [backward("do = do * weight", f"do = do * weight\n        {DELTA}")],
}

ADD_PAIRS = (
    "        if self.pair_bias is not None:\n            self.pair_bias.add_(s2, tile)\n        return self.mask_(s2, tile)"
)
TANH = 'self.tanh = torch.tanh(s2, out=self.workspace.take("tanh", *s2.shape))'
CAP = "LOG2E * self.spec.softcap"
DPAIRS = 'scores.pair_bias.add_gradient_(sums["dpair_bias"], ds, tile)'
SUM_PAIRS = "target += part.sum(dim=summed, keepdim=True) if summed else part"
DCAP = "ds.mul_(scores.tanh.square_().neg_().add_(1))"
ALL_TILES = TILES.replace("call.spec", "call.spec.replace(causal=False)")

PAIRS: dict[str, list[Edit]] = {
    "pair-bias-transposed": [
        Edit("pair_bias", "self._of_tile(self.bias, own, tile)", "self._of_tile(self.bias.mT, own, tile)"),
        Edit("pair_bias", "self._of_tile(total, own, tile)", "self._of_tile(total.mT, own, tile)"),
    ],
    "pair-bias-other-batch": [
        Edit("pair_bias", "yield slice(0, b1 - b0), slice(b0, b1)", "yield slice(0, b1 - b0), slice(0, 1)")
    ],
    "pair-bias-scaled": [Edit("pair_bias", "unit: float = LOG2E", "unit: float = 1.0")],
    "pair-bias-before-cap": [
        Edit("primitives", TANH, after(f"self.pair_bias.add_(s2.mul_({CAP}), tile); s2.div_({CAP})", "    " + TANH)),
        Edit("primitives", ADD_PAIRS, "        return self.mask_(s2, tile)"),
        backward(DPAIRS, f"{DCAP}; {DPAIRS}; scores.tanh = None"),
    ],
    "pair-bias-after-mask": [
        Edit(
            "primitives",
            ADD_PAIRS,
            "        self.mask_(s2, tile).masked_fill_(s2 == -math.inf, 0)\n"
            "        self.pair_bias.add_(s2, tile)\n        return s2",
        ),
        forward(TILES, ALL_TILES),
        backward(TILES, ALL_TILES),
    ],
    "pair-bias-not-summed": [Edit("pair_bias", SUM_PAIRS, "target += part[-1:] if summed else part")],
    "pair-bias-gradient-unmasked": [
        backward(
            DPAIRS,
            "free = scores.q[:, part] @ scores.k_columns[:, :, keys]; scores.pair_bias.add_(free, tile); "
            "free.sub_(lse2[:, part]).exp2_().mul_(do[:, part] @ v_columns[:, :, keys] - delta[:, part]); "
            + DPAIRS.replace(" ds,", " free,"),
        ),
        backward(TILES, ALL_TILES),
    ],
}

# the backend knows y and lse when its tangent is asked for; nu is what its sweep has taken out of ts
CENTRED = "ty = ty.sub_(rows.e_cast * y) if ty is not rows.w else ty - rows.e_cast * y"
READ_TK = 'self.tk = keys_of(tangents["k"], slab).to(scores.operand) if "k" in tangents else None'
READ_TV = 'self.tv = keys_of(tangents["v"], slab).to(self.scores.operand) if "v" in tangents else None'
TLSE = "(rows.nu + rows.e)"

TANGENTS: dict[str, list[Edit]] = {
    "tangent-mu-missing": [tangent(CENTRED, "ty = ty + rows.nu * y")],
    "tangent-mu-sign": [tangent(CENTRED, "ty = ty + (2 * rows.nu + rows.e) * y")],
    "tangent-lse-sign": [tangent(TLSE, f"{TLSE}.neg()")],
    "tangent-values-missing": [tangent(READ_TV, "self.tv = None")],
    "tangent-weights-fixed": [tangent("add_product_(w[:, part], g, self.v[:, keys])", "pass"), tangent(CENTRED, "pass")],
    "tangent-scale": [tangent("mul_(scores.dk_factor)", "mul_(scores.dk_factor * scores.call.scale)", "moving")],
    "tangent-input": [tangent(READ_TK, "self.tk = None", "moving")],
    "tangent-softcap": [tangent("ts.mul_(self.slope)", "pass", "moving")],
    "tangent-uncentred": [tangent("nu[:, part].add_(mean)", "mean.zero_()")],
}

EDITS = SCALE | MASKS | INTERVALS | HEADS | ROWS | TERMS | PAIRS | TANGENTS
EDITS |= {name: [Edit(*edit) for edit in edits] for name, edits in READ_EDITS.items()}
