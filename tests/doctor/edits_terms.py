"""How to break the terms of the tiled backend, pair biases, entmax and tangents among them (see `edits`)."""

from __future__ import annotations

from edit import BACKWARD, DBIAS, DELTA, DS, FORWARD, READ_LSE, TILES, Edit, after, backward, forward, lost_from, tangent

DTAU = 'add_heads_(sums["dtau"], slab, group, block.sum_positions(mean))'
SINK_WEIGHT = "sink_weight(kappa, lse) * delta"
TABLE = "table = heads_of(call.bias, slab, call.group, call.accumulator_dtype)"
SINK_SHARE = "torch.exp(block.repeat_positions(heads_of(call.sink, slab, group, dtype)) - lse)"
EVERY_VISIBLE = (
    "seen = call.spec.allowed(slab.segment.sq, slab.segment.sk)[block.i0 : block.i1].repeat_interleave(group, 0)\n"
    "            total = (do * (seen.to(dtype) @ keys_of(call.v, slab).to(dtype))).sum(dim=-1, keepdim=True) / elastic.n\n"
    '            add_heads_(sums["dtau"], slab, group, block.sum_positions(total))'
)
EXTENDED_TABLE = "table = torch.cat([table, table[..., -1:].expand(*table.shape[:-1], slab.segment.sk)], dim=-1)"
FOLDED_TABLE = (
    "n = call.bias.shape[1]\n"
    "        longer = dmirrored.flip(-1)\n"
    "        longer[..., n - 1] += longer[..., n:].sum(dim=-1)\n"
    '        add_heads_(sums["dbias"], slab, call.group, longer[..., :n])'
)

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
    "bias-sign": [Edit("primitives", "(table * LOG2E)", "(table * -LOG2E)")],
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


def of_entmax(old: str, new: str) -> Edit:
    return Edit("entmax", old, new, FORWARD)


# from 1 below the largest score by plain Newton steps, as few as the loop is given
BOUND = "theta, largest, {tiles} = self._bound(scores, tiles)"
FROM_THE_TOP = [
    of_entmax(BOUND.format(tiles="tiles"), after(BOUND.format(tiles="_"), "theta = largest - 1")),
    of_entmax("step = sums.step(self.e, room)", "step = sums.newton(self.e)"),
    of_entmax("range(MOST_SWEEPS)", "range(1)"),
]
LAST, LAST_LSE = "return self._last(scores, v, theta, tiles)", "theta + sums.newton(self.e) + 1"
UNMOVED_O = of_entmax("o.sub_(u * torch.where(sums.w > 0, sums.f - 1, 0))", "pass")
ABOVE = "above = entmax.above(scores.tile(tile), lse2, part)"
# alpha = 2 without a mask: the threshold of the largest k - 1
FEWER = (
    "z = torch.cat([scores.tile(tile).mul(self.gain) for tile in tiles], dim=-1)",
    "k = ((z > theta).sum(dim=-1, keepdim=True) - 1).clamp(min=1)",
    "theta = (z.sort(dim=-1, descending=True).values.cumsum(dim=-1).gather(-1, k - 1) - 1) / k",
)

ENTMAX: dict[str, list[Edit]] = {
    "entmax-not-converged": [*FROM_THE_TOP, UNMOVED_O, of_entmax(LAST_LSE, "theta + 1")],
    "entmax-support": [of_entmax(LAST, after(*FEWER, LAST)), UNMOVED_O, of_entmax(LAST_LSE, "theta + 1")],
    "entmax-last-step": [*FROM_THE_TOP, UNMOVED_O],
    "entmax-delta": [backward("delta = (do * block.rows_of(incoming.u))", "delta = (block.rows_of(incoming.dy) * y)")],
    "entmax-dead-tile": [
        backward(
            ABOVE,
            f"{ABOVE}; cut = above.unflatten(1, (-1, 16)).unflatten(-1, (-1, 16)); "
            "cut.mul_((cut[:, :, :1] > 0).any(dim=-1, keepdim=True))",
        )
    ],
    "entmax-dalpha": [Edit("entmax", "found = self.of_keys - eta * self.moved", "found = self.of_keys", BACKWARD)],
}

# the backend knows y and lse when its tangent is asked for; nu is what its sweep has taken out of ts
CENTRED = "ty = ty.sub_(rows.e_cast * mean) if ty is not rows.w else ty - rows.e_cast * mean"
READ_TK = 'self.tk = keys_of(tangents["k"], slab).to(scores.operand) if "k" in tangents else None'
READ_TV = 'self.tv = keys_of(tangents["v"], slab).to(self.scores.operand) if "v" in tangents else None'
TLSE = "(rows.nu + rows.e)"

TANGENTS: dict[str, list[Edit]] = {
    "tangent-mu-missing": [tangent(CENTRED, "ty = ty + rows.nu * mean")],
    "tangent-mu-sign": [tangent(CENTRED, "ty = ty + (2 * rows.nu + rows.e) * mean")],
    "tangent-lse-sign": [tangent(TLSE, f"{TLSE}.neg()")],
    "tangent-values-missing": [tangent(READ_TV, "self.tv = None")],
    "tangent-weights-fixed": [tangent("add_product_(w[:, part], g, self.v[:, keys])", "pass"), tangent(CENTRED, "pass")],
    "tangent-scale": [tangent("mul_(scores.dk_factor)", "mul_(scores.dk_factor * scores.call.scale)", "moving")],
    "tangent-input": [tangent(READ_TK, "self.tk = None", "moving")],
    "tangent-softcap": [tangent("ts.mul_(self.slope)", "pass", "moving")],
    "tangent-uncentred": [tangent("nu[:, part].add_(mean)", "mean.zero_()")],
}
