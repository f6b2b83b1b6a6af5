"""Bad arguments for meshes and for transformers' interfaces; `test_bad_neighbours.py` tries them."""

from __future__ import annotations

import torch
from bad_arguments import NO_BORDERS, NO_FLAG, NO_NUMBER, NO_PAIR, NO_TENSOR, NO_WHOLE, Entry, floats, numbers
from torch import nn

from backlight.distributed import ContextParallel, simulate, simulated_attention
from backlight.distributed.simulation import Alone
from backlight.integrations.transformers import attention_forward, attention_mask, register

# --- meshes ------------------------------------------------------------------------------------------------------------------


def one() -> ContextParallel:
    return ContextParallel(Alone(0, 1))


SIMULATED = {"q": floats(1, 2, 6, 8), "k": floats(1, 2, 6, 8), "v": floats(1, 2, 6, 8)}
NO_AXIS = [*NO_WHOLE, (2, "2"), (-3, "-3"), (None, "None")]

MESHES = (
    Entry(
        "ContextParallel",
        ContextParallel,
        {"mesh": Alone(0, 2)},
        {
            "mesh": [(4, "4"), (None, "None"), ("cp", "'cp'")],
            "layout": [("striped", "'striped'"), (None, "None"), (["zigzag"], "['zigzag']")],
            "strategy": [("rings", "'rings'"), (1, "1")],
            "check": [("never", "'never'"), (True, "True")],
            "sum_learned": NO_FLAG,
            "timeout": [*NO_NUMBER, (0, "0"), (-1.0, "-1.0")],
        },
    ),
    Entry(
        "ContextParallel.shard",
        lambda **arguments: one().shard(**arguments),
        {"whole": floats(3, 4), "dim": 1},
        {"whole": NO_TENSOR, "dim": NO_AXIS},
    ),
    Entry(
        "ContextParallel.unshard",
        lambda **arguments: one().unshard(**arguments),
        {"shard": floats(3, 4), "dim": 1},
        {"shard": NO_TENSOR, "dim": NO_AXIS},
    ),
    Entry(
        "ContextParallel.positions",
        lambda **arguments: one().positions(**arguments),
        {"length": 5, "cu_seqlens": numbers(0, 2, 5)},
        {
            "length": [*NO_WHOLE, (-1, "-1"), (None, "None")],
            "cu_seqlens": [*NO_BORDERS, (numbers(0, 4), "4"), (numbers(1, 5), "1"), (numbers(0, 6, 5), "6")],
        },
    ),
    Entry(
        "ContextParallel.labels",
        lambda **arguments: one().labels(**arguments),
        {"tokens": numbers(1, 2, 3)},
        {
            "tokens": [*NO_TENSOR, (floats(3), "float32"), (torch.zeros(3, dtype=torch.bool), "bool")],
            "dim": [*NO_WHOLE, (1, "1")],
            "ignored": NO_WHOLE,
        },
    ),
    Entry(
        "simulate",
        simulate,
        {"world": 2, "work": lambda rank: rank.rank},
        {
            "world": [*NO_WHOLE, (0, "0"), (-2, "-2")],
            "work": [(None, "None"), (3, "3")],
            "timeout": [*NO_NUMBER, (0, "0"), (None, "None")],
        },
    ),
    Entry(
        "simulated_attention",
        simulated_attention,
        SIMULATED,
        {
            "q": [*NO_TENSOR, (floats(2, 6, 8), "(2, 6, 8)"), (floats(1, 3, 6, 8), "3")],
            "k": [*NO_TENSOR, (floats(1, 2, 6, 7), "7")],
            "v": [*NO_TENSOR, (floats(1, 2, 5, 8), "5")],
            "world": [*NO_WHOLE, (0, "0")],
            "layout": [("striped", "'striped'")],
            "strategy": [("rings", "'rings'")],
            "backend": [("cuda", "'cuda'")],
            "window": [*NO_PAIR, ((-1, 0), "-1")],
            "gate": [(floats(1, 2, 6, 7), "(1, 2, 6, 7)")],
            "return_lse": NO_FLAG,
        },
    ),
)

# --- transformers ------------------------------------------------------------------------------------------------------------

QUERY, KEY = floats(2, 4, 5, 8), floats(2, 2, 5, 8)
FORWARD = {"module": nn.Module(), "query": QUERY, "key": KEY, "value": KEY, "attention_mask": None}
PACKED = {"module": nn.Module(), "query": QUERY[:1], "key": KEY[:1], "value": KEY[:1], "attention_mask": None}

INTERFACES = (
    Entry(
        "attention_forward",
        attention_forward,
        FORWARD,
        {
            "query": [*NO_TENSOR, (floats(4, 5, 8), "(4, 5, 8)"), (QUERY.long(), "int64")],
            "key": [*NO_TENSOR, (floats(2, 5, 8), "(2, 5, 8)"), (floats(2, 3, 5, 8), "3")],
            "value": [*NO_TENSOR, (floats(2, 2, 6, 8), "6")],
            "attention_mask": [
                *NO_TENSOR,
                (floats(2, 1, 5, 4), "(2, 1, 5, 4)"),
                (numbers(1, 1), "(2,)"),
            ],
            "dropout": [*NO_NUMBER, (1.1, "1.1"), (-1, "-1"), (None, "None")],
            "scaling": [("2", "str"), (float("nan"), "nan")],
            "is_causal": NO_FLAG[:2],
            "sliding_window": [*NO_WHOLE, (0, "0"), (-4, "-4")],
            "softcap": [(0.0, "0.0"), ("2", "str")],
            "s_aux": [(floats(3), "(3,)"), (1.0, "float")],
            "position_bias": [
                *NO_TENSOR,
                (floats(4, 5, 5), "(4, 5, 5)"),
                (floats(1, 4, 1, 5), "(1, 4, 1, 5)"),
                (floats(1, 4, 5, 4), "(1, 4, 5, 4)"),
                (floats(1, 3, 5, 5), "(1, 3, 5, 5)"),
            ],
            "cu_seq_lens_q": [(numbers(0, 5), "(2, 4, 5, 8)"), ([0, 5], "[0, 5]")],
            "cu_seq_lens_k": [(numbers(0, 5), "(2,)")],
            "cache": [({}, "{}")],
        },
        # the call's own names; a batch with borders is found at query; a mask may be right and without equivalent
        named={
            "query": "q",
            "key": "k",
            "value": "v",
            "attention_mask": "mask",
            "scaling": "scale",
            "s_aux": "sink",
            "cu_seq_lens_q": "cu_seq_lens_q",
        },
    ),
    Entry(
        "attention_forward, packed",
        attention_forward,
        PACKED | {"cu_seq_lens_q": numbers(0, 2, 5)},
        {"cu_seq_lens_q": NO_BORDERS, "cu_seq_lens_k": NO_BORDERS},
    ),
    Entry(
        "attention_mask",
        attention_mask,
        {"batch_size": 2, "q_length": 5, "kv_length": 5},
        {
            "batch_size": [*NO_WHOLE, (-1, "-1")],
            "q_length": [*NO_WHOLE, (7, "7")],
            "kv_length": NO_WHOLE,
            "kv_offset": [*NO_WHOLE, (-1, "-1")],
            "mask_function": [(3, "3"), ("causal", "'causal'")],
            "attention_mask": [*NO_TENSOR, (numbers(1, 1), "(2,)"), (floats(2, 5), "float32"), (floats(3, 5).bool(), "(3, 5)")],
        },
    ),
    Entry("register", register, {}, {"name": [(None, "None"), ("", "''"), (3, "3")]}),
)
