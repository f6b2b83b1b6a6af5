"""Names that a probe gives directly, beside those of the catalogue: no mutant of the oracle has them and no demo shows them.

What memory that nobody wrote does to a result is told apart by finite sentinels; `stale-rows` of the catalogue is the third of
these names, an output that is never stored.
"""

from __future__ import annotations

from functools import partial

from backlight.doctor.defects.defect import Defect

_fresh = partial(Defect, family="memory", confirm="finite sentinels in fresh memory")

PROBED: dict[str, Defect] = {
    each.id: each
    for each in (
        _fresh(
            "sum-not-cleared",
            "whatever was in memory is part of a sum: a buffer is added onto and never cleared, or a summand never stored",
            "atomic adds go into memory without initialisation, or partial sums are not stored for all heads and tiles",
            "dq",
            "other numbers in fresh memory move every value they reach by one multiple of their difference",
            "Allocate with zeros instead of empty: the values must become right.",
        ),
        _fresh(
            "scratch-not-written",
            "scratch memory is read where nobody wrote it, and takes part in the result",
            "a row statistic, a partial result or a padded tile is loaded beyond what was stored; times 0, only NaN shows it",
            "delta",
            "other numbers in fresh memory change values, neither to those numbers nor by a multiple of them",
            "Fill the scratch buffers with zeros: if the result turns healthy, one of them is read where it is not written.",
        ),
        *(
            Defect(
                f"cut-{name}",
                f"{name} is cut to 16 bits, not rounded: errors lean towards zero",
                f"the lower bits of {name} are dropped instead of rounded to nearest",
                name,
                f"{leaning} too small by a fraction of eps, in nearly all rows",
                f"Keep {name} in fp32, or round to nearest: the lean must go away.",
                family="precision",
                confirm="signed errors",
                severity="precision",
            )
            for name, leaning in (("p", "o and dv"), ("o", "o"), ("ds", "dq and dk"))
        ),
        Defect(
            "delta-biased",
            "delta leans to one side by more than a 16-bit o explains: dq and dk drift in a common direction",
            "o is cut and not rounded, or rounded more than once, before delta is taken from it",
            "delta",
            "two equal keys on top put o on ties of the format; the rows of ds do not sum to 0 there, all with one sign",
            "Take delta from o in fp32: the bias on ties must fall below 1e-5.",
            family="precision",
            confirm="ties (eq. 105)",
            severity="precision",
        ),
        Defect(
            "dsink-rounded",
            "terms of dsink are rounded to 16 bits before they are summed: errors of rows add up",
            "sink weight times delta is formed, or stored, in 16 bits, row by row, and the sum is taken afterwards",
            "dsink",
            "right on ordinary inputs; where all terms are rounded to the same side dsink is off by as much as each of them",
            "Keep the terms, or the whole sum, in fp32: dsink must be right to 1e-5 on these inputs.",
            family="precision",
            confirm="terms that are all rounded up",
            severity="precision",
        ),
        Defect(
            "sum-drifts",
            "o drifts with the number of keys: its sum is not kept in fp32",
            "the running sum of p v is kept in 16 bits or fewer, so small terms vanish beside a large sum",
            "o",
            "with v near 1 the error of o has one sign and grows with the number of keys",
            "Accumulate in fp32: the drift must fall below 1e-6 per key.",
            family="precision",
            confirm="growth (eq. 106)",
            severity="precision",
        ),
        Defect(
            "operand-prescaled",
            "{detail}: where scores are large the weights are off",
            "the softmax scale, or log2 e, is folded into an operand that is rounded to 16 bits again",
            "s",
            "right on ordinary inputs; on outliers an oracle with that operand rounded reproduces the data",
            "Multiply the scores instead of the operand: rho_A must fall to about 1.",
            family="precision",
            confirm="an oracle with the operand scaled and rounded",
            severity="precision",
        ),
        Defect(
            "eight-bits",
            "computes in 8 bits ({detail}) where its inputs have more: ask with --precision fp8",
            "operands of the products are rounded to an 8-bit float",
            "o",
            "o is off by some percent, without a direction; values of v between two codes come back alike",
            "Run with --precision fp8 (precision='fp8'): it must be healthy by what 8 bits can do.",
            family="eight bits",
            confirm="format of v",
            severity="precision",
        ),
        Defect(
            "e4m3-coarse",
            "{detail}: coarser than e4m3 with scales of blocks allows",
            "operands have fewer bits than e4m3, scales cover too much, or more than the operands is rounded",
            "o",
            "rho_B against the 8-bit yardstick is above 1.25, and no known way of rounding has these numbers",
            "Round one operand after the other in 16 bits: rho_B must fall to about 1 with one of them.",
            family="eight bits",
            confirm="rho_B",
            severity="precision",
        ),
        Defect(
            "e4m3-ds-underflow",
            "small gradients of scores are flushed to 0 in the 8-bit backward",
            "ds is rounded with a scale that is too large for what it holds",
            "ds",
            "the rms error stays at some percent, while 0.2 % and more of |ds| is missing",
            "Divide ds by the largest |ds| of its tile before it is rounded: the share must fall below 2e-3.",
            family="eight bits",
            confirm="unit vectors as rows of q",
            severity="precision",
        ),
        Defect(
            "maximum-hidden-tile",
            "rows are NaN where the first tile of keys that they meet is hidden from them: tiles of {detail}",
            "the running maximum is still -inf, and -inf minus -inf is formed; later keys cannot mend a NaN",
            "lse",
            "the rows that are not finite are those that see nothing in the first tile their own tile visits",
            "Subtract 0 where the maximum is -inf: the comparison must turn healthy.",
            family="lse",
            confirm="which rows are not finite, against all tile sizes",
        ),
        Defect(
            "hard-inputs",
            "right on ordinary inputs and wrong on {detail}",
            "a running maximum that starts or stays at the wrong value, an exp that leaves its range, or a bound on the scores",
            "o",
            "values beyond what a correct kernel gives, on inputs of this recipe only",
            "Run with --recipe {detail}: the defect must show at every level.",
            family="lse",
            confirm="inputs of other recipes",
        ),
        Defect(
            "read-beyond-end",
            "memory outside q, k, v or dO is read and reaches the result",
            "a load of the last tile has no mask, and its rows meet a weight of 0: 0 x NaN is NaN",
            "s",
            "NaN in front of or behind a tensor changes the result; the tensor itself is the same",
            "Mask the loads of the last tile (other = 0): the probe must pass.",
            family="memory",
            confirm="NaN, and finite numbers, around the inputs",
        ),
        Defect(
            "write-beyond-end",
            "memory outside of what the kernel allocates is written: other tensors change",
            "a store has no mask for its last tile, or an index belongs to another number of heads, rows or columns",
            "o",
            "a margin around each allocation does not hold afterwards what was put there",
            "Allocate a tile more than is needed: the comparison must not change, and nothing else may.",
            family="memory",
            confirm="margins around every allocation of the first call",
        ),
        Defect(
            "hidden-reached",
            "positions that a row may not see change its result: {detail}",
            "hidden keys are loaded and multiplied by a weight that is small and not 0, or a bound is one tile too far",
            "p",
            "large numbers at hidden positions move rows that cannot see them",
            "Set k and v to 0 at the keys in the evidence: the rows beside them must not move by a bit.",
            family="masks",
            confirm="large finite numbers at hidden positions",
        ),
    )
}
