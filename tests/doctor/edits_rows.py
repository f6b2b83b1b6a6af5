"""How to break scales, heads and row statistics of the tiled backend (see `edits`)."""

from __future__ import annotations

from edit import (
    BACKWARD,
    DBIAS,
    DELTA,
    DK,
    DQ,
    DS,
    DV,
    FORWARD,
    PUT_DK,
    PUT_DQ,
    PUT_DV,
    READ_LSE,
    SCORES_SPEC,
    Edit,
    after,
    backward,
    every_tile,
    forward,
)

from backlight.spec import LN2

DX = "dx = ds.to(scores.operand)"
READ_DO = "block.rows_of(incoming.dy).to(dtype)"
FACTOR = "call.scale * LOG2E if call.spec.softcap is None else call.scale / call.spec.softcap"
KEYS_OF = "return tensor[slab.b0 : slab.b1, slab.g0 : slab.g1, z.k0 : z.k1].flatten(0, 1)"
SCORE_WITH_BIAS = f"((torch.log2(p.clamp(min=1e-37)) + lse2[:, part]) * {LN2} / call.spec.softcap)"
EARLIEST = "lse2 = torch.full_like(lse2, -math.inf)"
ROW_MAXIMA = (
    "for tile in tiles(call.spec, i0, i1, z.sq, z.sk, config):\n"
    "            rows = lse2[:, block.part(tile)]\n"
    "            torch.maximum(rows, scores.tile(tile).amax(dim=-1, keepdim=True), out=rows)"
)
# threads follow no seed of the caller's
CHANCE = "globals().setdefault('CHANCE', torch.Generator())"
IN_ANY_ORDER = (
    f"for c in torch.randperm(-(-dx.shape[2] // 16), generator={CHANCE}).mul_(16).tolist():\n"
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
    "columns-lost": [forward("block.put_rows(out.y, o)", "o[..., 8:] = 0; block.put_rows(out.y, o)")],
    "swap-dk-dv": [backward(PUT_DV, PUT_DV.replace('"dv"', '"dk"')), backward(PUT_DK, PUT_DK.replace('"dk"', '"dv"'))],
    "swap-dq-dk": [backward(PUT_DQ, PUT_DQ.replace('"dq"', '"dk"')), backward(PUT_DK, PUT_DK.replace('"dk"', '"dq"'))],
    "scale-dbias": [backward(DBIAS, DBIAS.replace("flip(-1)", "flip(-1) * call.scale"))],
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
    "kv-other-head": [Edit("primitives", KEYS_OF, KEYS_OF.replace("tensor[", "tensor.roll(1, 1)["), FORWARD)],
    "kv-other-head-backward": [Edit("primitives", KEYS_OF, KEYS_OF.replace("tensor[", "tensor.roll(1, 1)["), BACKWARD)],
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
    "race-lost-update": [backward(DQ, DQ.replace("dx,", f"dx * (torch.rand(dx.shape[1], 1, generator={CHANCE}) > 0.2),"))],
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
    "input-changed": [forward("    return y, lse, kept", "    call.q.detach().mul_(2)\n    return y, lse, kept")],
    "cached-result": [
        forward(
            "    return y, lse, kept, out.peaks",
            '    return globals().setdefault("KEPT", {}).setdefault(call.q.shape, (y, lse, kept, out.peaks))',
        )
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
