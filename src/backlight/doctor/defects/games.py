"""What a kernel does that fits the examination and not the task: names for the probes of level `adversarial`.

They are no entries of the catalogue: no mutant of the oracle has them and no demo shows them.
"""

from __future__ import annotations

from functools import partial

from backlight.doctor.defects.defect import Defect

_game = partial(Defect, family="gaming", confirm="the probe itself")

GAMES: dict[str, Defect] = {
    each.id: each
    for each in (
        _game(
            "other-inputs",
            "right on the inputs of the examination and wrong on others of the same shape",
            "the result depends on numbers that were expected, not on those that came",
            "o",
            "inputs of a seed that nobody could know",
            "Run with --seed and the seed in the evidence: the defect must show without this level.",
        ),
        _game(
            "other-shapes",
            "right at the shape of the examination and wrong at others",
            "some shapes take another path, or only one was ever tried",
            "o",
            "shapes drawn when the examination runs",
            "Run with --shape and the shape in the evidence: the defect must show without this level.",
        ),
        _game(
            "other-memory",
            "the same numbers at other addresses change the result",
            "something is remembered by address, or memory beside a tensor is read",
            "o",
            "the same call in memory that was never used before",
            "Call twice with copies of the same tensors: the results must differ.",
        ),
        _game(
            "other-calls",
            "the result depends on how many calls came before",
            "calls are counted, or something is kept from one to the next",
            "o",
            "two problems in turn, many times",
            "Call it alone in a new process as often as the evidence says: the last result must differ from the first.",
        ),
        _game(
            "other-stream",
            "the result changes on a stream that is not the default one",
            "work is started on another stream than the caller's, and nobody waits",
            "o",
            "the call on a busy stream of its own",
            "Synchronise the device before the call: the comparison must turn healthy.",
        ),
        _game(
            "computed-by-torch",
            "the result is computed by operations of torch: {detail}",
            "attention, or its products and softmax, is left to torch",
            "o",
            "operations of torch are counted during a call",
            "Profile one call: the operations named here must take the time.",
            severity="note",
        ),
    )
}
