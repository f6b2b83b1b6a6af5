"""Bad arguments for layers, their cache and the drop-ins; `test_bad_neighbours.py` tries them.

An entry is a good call and, for each of its arguments, values that are none, with what the message must show of the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from backlight import compat
from backlight.nn import Attention, KVCache, LazyAttention, statistics

Bad = dict[str, list[tuple[Any, str]]]


@dataclass(frozen=True)
class Entry:
    """A function, a good call of it, and values that must not pass: argument -> (value, what a message shows of it)."""

    name: str
    call: Callable[..., Any]
    good: dict[str, Any]
    bad: Bad = field(default_factory=dict)
    # the name of an argument in messages where it is not its own
    named: dict[str, str] = field(default_factory=dict)

    def mistakes(self) -> Iterator[tuple[str, Any, str]]:
        for argument, values in self.bad.items():
            for value, shown in values:
                yield argument, value, shown


def floats(*shape: int) -> Tensor:
    return torch.zeros(shape)


def numbers(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# --- kinds of bad values -----------------------------------------------------------------------------------------------------

NO_TENSOR = [([1.0], "[1.0]"), (3.0, "3.0"), ("x", "'x'")]
NO_WHOLE = [(2.5, "2.5"), ("4", "'4'"), (True, "True"), (numbers(3), "a tensor of shape (1,)"), (2**70, str(2**70))]
NO_FLAG = [(1, "1"), ("yes", "'yes'"), (None, "None")]
NO_NUMBER = [("2", "'2'"), (True, "True"), (float("nan"), "nan"), (float("inf"), "inf")]
NO_PAIR = [(0, "0"), ((), "()"), ((1, 2, 3), "(1, 2, 3)"), ("ab", "'ab'")]
NO_BORDERS = [
    ([0, 5], "[0, 5]"),
    (floats(2), "float32"),
    (numbers(0, 5, dtype=torch.int16), "int16"),
    (numbers(0, 5)[None], "(1, 2)"),
    (numbers(), "(0,)"),
]

# --- layers ------------------------------------------------------------------------------------------------------------------

LAYER: Bad = {
    "dim": [*NO_WHOLE, (0, "0"), (-24, "-24"), (None, "None")],
    "heads": [*NO_WHOLE, (0, "0"), (5, "5")],
    "kv_heads": [*NO_WHOLE, (0, "0"), (3, "3"), (8, "8")],
    "head_dim": [*NO_WHOLE, (0, "0"), (7, "7")],
    # the sentence of the call, which shows the type
    "causal": [(1, "int"), ("yes", "str"), (None, "None")],
    "window": [*NO_PAIR, ((-1, 0), "-1"), ((1.5, 0), "1.5"), ((True, 0), "True")],
    "scale": NO_NUMBER[2:],
    "softcap": [*NO_NUMBER[2:], (0.0, "0.0"), (-1, "-1")],
    "rope": [*NO_NUMBER, (1.0, "1.0"), (-5, "-5")],
    "qk_norm": NO_FLAG,
    "sink": NO_FLAG,
    "gate": NO_FLAG,
    "linear_bias": NO_FLAG,
    "backend": [("cuda", "'cuda'"), ("", "''"), (3, "3")],
    "device": [("gpu7", "'gpu7'"), (2.5, "2.5")],
    "dtype": [(torch.int64, "int64"), ("float32", "'float32'"), (torch.complex64, "complex64")],
}
FORWARD: Bad = {
    "x": [
        *NO_TENSOR,
        (floats(5, 24), "(5, 24)"),
        (floats(2, 5, 23), "(2, 5, 23)"),
        (floats(2, 5, 24).long(), "int64"),
        (floats(2, 5, 24).half(), "float16"),
        (torch.zeros(2, 5, 24, device="meta"), "meta"),
    ],
    "positions": [
        ([0, 1, 2, 3, 4], "[0, 1, 2, 3, 4]"),
        (numbers(3), "(1,)"),
        (numbers(0, 1, 2, 3), "(4,)"),
        (torch.zeros(1, 5, dtype=torch.int64), "(1, 5)"),
        (torch.zeros(2, 1, dtype=torch.int64), "(2, 1)"),
        (floats(5), "float32"),
        (torch.zeros(5, dtype=torch.bool), "bool"),
        (torch.zeros(5, dtype=torch.int64, device="meta"), "meta"),
    ],
    "cache": [({}, "{}"), ((), "()"), (KVCache, "KVCache")],
}


def forward(**arguments: Any) -> Tensor:
    with torch.no_grad():
        return Attention(24, 4)(**arguments)


def measured(model: Any) -> None:
    with statistics(model):
        pass


def filled() -> KVCache:
    cache = KVCache()
    cache.append(floats(2, 4, 3, 8), floats(2, 4, 3, 8))
    return cache


KEYS: Bad = {
    "k": [
        *NO_TENSOR,
        (floats(2, 4, 3), "(2, 4, 3)"),
        (floats(2, 4, 3, 8).long(), "int64"),
        (floats(2, 4, 3, 1), "1"),
        (floats(2, 4, 1, 8), "(2, 4, 1)"),
    ],
    "v": [
        *NO_TENSOR,
        (floats(1, 4, 3, 8), "(1, 4, 3, 8)"),
        (floats(2, 1, 3, 8), "(2, 1, 3, 8)"),
        (floats(2, 4, 1, 8), "(2, 4, 1, 8)"),
        (floats(2, 4, 3, 1), "1"),
        (floats(2, 4, 3, 8).double(), "float64"),
        (torch.zeros(2, 4, 3, 8, device="meta"), "meta"),
    ],
    "left": [*NO_WHOLE, (-1, "-1")],
}
PACKED = {"x": floats(5, 24), "cu_seqlens": numbers(0, 2, 5)}
PACKED_POSITIONS = [(numbers(3), "(1,)"), (torch.zeros(1, 5, dtype=torch.int64), "(1, 5)")]

LAYERS = (
    Entry("Attention", Attention, {"dim": 24, "heads": 4}, LAYER),
    Entry(
        "LazyAttention",
        LazyAttention,
        {"dim": 24, "heads": 4},
        {
            "distances": [*NO_WHOLE, (0, "0"), (None, "None")],
            "tau": [*NO_NUMBER, (None, "None"), (1e300, "1e+300")],
            "two_sided": NO_FLAG,
            "window": NO_PAIR,
        },
    ),
    Entry("Attention.forward", forward, {"x": floats(2, 5, 24)}, FORWARD),
    Entry(
        "Attention.forward, packed",
        forward,
        PACKED,
        {
            "x": [(floats(1, 5, 24), "(1, 5, 24)"), (floats(5, 23), "(5, 23)")],
            "cu_seqlens": [
                *NO_BORDERS,
                (numbers(1, 5), "1"),
                (numbers(0, 4), "4"),
                (numbers(0, 7, 5), "7"),
                (torch.zeros(2, dtype=torch.int64, device="meta"), "meta"),
            ],
            "positions": PACKED_POSITIONS,
            "cache": [(KVCache(), "a KVCache")],
        },
    ),
    Entry("KVCache", KVCache, {}, {"capacity": [*NO_WHOLE, (0, "0"), (-5, "-5"), (None, "None")]}),
    Entry(
        "KVCache.append",
        lambda **arguments: filled().append(**arguments),
        {"k": floats(2, 4, 3, 8), "v": floats(2, 4, 3, 8)},
        KEYS,
        # a length of k that is not v's is found at v
        named={"k": ""},
    ),
    Entry("KVCache.crop", lambda length: filled().crop(length), {"length": 2}, {"length": [*NO_WHOLE, (-1, "-1"), (4, "4")]}),
    Entry(
        "KVCache.reorder",
        lambda rows: filled().reorder(rows),
        {"rows": numbers(1, 0)},
        {
            "rows": [
                ([1, 0], "[1, 0]"),
                (floats(2), "float32"),
                (numbers(0, 1, 1), "(3,)"),
                (numbers(0, 2), "[0, 2]"),
                (numbers(0, -1), "[0, -1]"),
                (numbers(0, 1)[None], "(1, 2)"),
            ]
        },
    ),
    Entry(
        "nn.statistics",
        measured,
        {"model": Attention(24, 4)},
        {"model": [(None, "None"), ("model", "'model'"), (nn.Linear(2, 2), "Linear")]},
    ),
)

# --- drop-ins ----------------------------------------------------------------------------------------------------------------

FLASH: Bad = {
    "dropout_p": [*NO_NUMBER, (0.1, "0.1"), (None, "None")],
    "softmax_scale": NO_NUMBER,
    "causal": NO_FLAG,
    "window_size": [*NO_PAIR, (None, "None"), ((-2, 0), "-2"), ((1.5, 0), "1.5"), ((0, True), "True")],
    "softcap": [*NO_NUMBER, (-1.0, "-1.0"), (None, "None")],
    "alibi_slopes": [
        *NO_TENSOR,
        (floats(3), "(3,)"),
        (floats(3, 4), "(3, 4)"),
        (floats(4).long(), "int64"),
        (torch.zeros(4, device="meta"), "meta"),
    ],
    "deterministic": NO_FLAG,
    "return_attn_probs": NO_FLAG,
}
BATCHED_Q = [*NO_TENSOR, (floats(5, 4, 8), "(5, 4, 8)"), (floats(2, 5, 4, 8).long(), "int64")]
PACKED_Q = [*NO_TENSOR, (floats(2, 5, 4, 8), "(2, 5, 4, 8)")]
LENGTHS: Bad = {
    "max_seqlen_q": [(2.5, "2.5"), ("4", "'4'"), (True, "True"), (-1, "-1"), (floats(), "a tensor of shape ()")],
    "max_seqlen_k": [(2.5, "2.5"), (None, "None"), (numbers(3, 3), "(2,)")],
    "block_table": [(floats(1, 1), "(1, 1)")],
}
FLASH_PACKED = {
    "q": floats(5, 4, 8),
    "k": floats(5, 2, 8),
    "v": floats(5, 2, 8),
    "cu_seqlens_q": numbers(0, 2, 5),
    "cu_seqlens_k": numbers(0, 2, 5),
    "max_seqlen_q": 3,
    "max_seqlen_k": 3,
}
CACHE = {
    "q": floats(2, 3, 4, 8),
    "k_cache": floats(2, 9, 2, 8),
    "v_cache": floats(2, 9, 2, 8),
    "k": floats(2, 3, 2, 8),
    "v": floats(2, 3, 2, 8),
    "rotary_cos": floats(9, 2),
    "rotary_sin": floats(9, 2),
    "cache_seqlens": numbers(2, 5),
}
LAZY = {"q": floats(2, 4, 5, 8), "k": floats(2, 4, 5, 8), "v": floats(2, 4, 5, 8), "bias": floats(4, 3), "tau": floats(4)}

DROP_INS = (
    Entry(
        "flash_attn_func",
        compat.flash_attn_func,
        {"q": floats(2, 5, 4, 8), "k": floats(2, 5, 2, 8), "v": floats(2, 5, 2, 8)},
        FLASH | {"q": BATCHED_Q, "k": [*NO_TENSOR, (floats(2, 5, 2, 7), "7")], "v": [*NO_TENSOR, (floats(2, 6, 2, 8), "6")]},
    ),
    Entry(
        "flash_attn_varlen_func",
        compat.flash_attn_varlen_func,
        FLASH_PACKED,
        LENGTHS
        | {"q": PACKED_Q, "cu_seqlens_q": [*NO_BORDERS, (numbers(0, 4, 6), "6")], "cu_seqlens_k": NO_BORDERS}
        | {"alibi_slopes": FLASH["alibi_slopes"], "window_size": NO_PAIR},
    ),
    Entry(
        "flash_attn_qkvpacked_func",
        compat.flash_attn_qkvpacked_func,
        {"qkv": floats(2, 5, 3, 4, 8)},
        {"qkv": [*NO_TENSOR, (floats(2, 5, 2, 4, 8), "(2, 5, 2, 4, 8)"), (floats(5, 3, 4, 8), "(5, 3, 4, 8)")]},
    ),
    Entry(
        "flash_attn_kvpacked_func",
        compat.flash_attn_kvpacked_func,
        {"q": floats(2, 5, 4, 8), "kv": floats(2, 5, 2, 4, 8)},
        {"kv": [*NO_TENSOR, (floats(2, 5, 3, 4, 8), "(2, 5, 3, 4, 8)")], "q": NO_TENSOR},
    ),
    Entry(
        "flash_attn_varlen_qkvpacked_func",
        compat.flash_attn_varlen_qkvpacked_func,
        {"qkv": floats(5, 3, 4, 8), "cu_seqlens": numbers(0, 2, 5), "max_seqlen": 3},
        {
            "qkv": [*NO_TENSOR, (floats(5, 2, 4, 8), "(5, 2, 4, 8)"), (floats(2, 5, 3, 4, 8), "(2, 5, 3, 4, 8)")],
            "cu_seqlens": NO_BORDERS,
            "max_seqlen": [(2.5, "2.5"), (-1, "-1")],
        },
    ),
    Entry(
        "flash_attn_varlen_kvpacked_func",
        compat.flash_attn_varlen_kvpacked_func,
        {n: x for n, x in FLASH_PACKED.items() if n not in "kv"} | {"kv": floats(5, 2, 4, 8)},
        {"kv": [*NO_TENSOR, (floats(5, 3, 4, 8), "(5, 3, 4, 8)")], "cu_seqlens_k": NO_BORDERS},
    ),
    Entry(
        "flash_attn_with_kvcache",
        compat.flash_attn_with_kvcache,
        CACHE,
        {n: FLASH[n] for n in ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")}
        | {
            "q": [*NO_TENSOR, (floats(3, 4, 8), "(3, 4, 8)")],
            "k_cache": [*NO_TENSOR, (floats(2, 9, 2, 7), "(2, 9, 2, 7)"), (floats(1, 9, 2, 8), "1"), (floats(2, 9, 3, 8), "3")],
            "v_cache": [*NO_TENSOR, (floats(2, 8, 2, 8), "(2, 8, 2, 8)"), (floats(2, 9, 2, 8).half(), "float16")],
            "k": [*NO_TENSOR, (floats(2, 3, 4, 8), "(2, 3, 4, 8)"), (floats(1, 3, 2, 8), "(1, 3, 2, 8)"), (None, "v alone")],
            "v": [
                *NO_TENSOR,
                (floats(2, 2, 2, 8), "(2, 2, 2, 8)"),
                (None, "k alone"),
                (floats(2, 3, 2, 8).double(), "float64"),
            ],
            "rotary_cos": [*NO_TENSOR, (floats(8, 2), "(8, 2)"), (floats(9, 5), "(9, 5)"), (floats(9, 2).long(), "int64")],
            "rotary_sin": [*NO_TENSOR, (floats(9, 3), "(9, 3)"), (None, "None")],
            "cache_seqlens": [
                (None, "None"),
                (-1, "-1"),
                (7, "7"),
                (2.5, "2.5"),
                (numbers(2, 7), "[2, 7]"),
                (numbers(2), "(1,)"),
            ],
            "cache_batch_idx": [*NO_TENSOR, (numbers(0), "(1,)"), (floats(2), "float32")],
            "cache_leftpad": [*NO_TENSOR, (numbers(0), "(1,)"), (floats(2), "float32")],
            "block_table": [(floats(1, 1), "(1, 1)")],
            "rotary_interleaved": NO_FLAG,
            "num_splits": NO_WHOLE,
            "return_softmax_lse": NO_FLAG,
        },
    ),
    Entry(
        "lazy_attention",
        compat.lazy_attention,
        LAZY | {"varlen": numbers(5, 3)},
        {
            "q": [*NO_TENSOR, (floats(4, 5, 8), "(4, 5, 8)")],
            "k": [*NO_TENSOR, (floats(1, 4, 5, 8), "(1, 4, 5, 8)"), (floats(2, 4, 6, 8), "(2, 4, 6, 8)")],
            "v": [*NO_TENSOR, (floats(3, 4, 5, 8), "(3, 4, 5, 8)"), (floats(2, 4, 4, 8), "(2, 4, 4, 8)")],
            "bias": [*NO_TENSOR, (floats(4), "(4,)"), (floats(3, 3), "(3, 3)")],
            "tau": [*NO_TENSOR, (floats(4, 1), "(4, 1)"), (floats(3), "(3,)")],
            "window_size": [*NO_WHOLE[:3], (0, "0"), (4, "4")],
            "varlen": [
                ([5, 3], "[5, 3]"),
                (True, "True"),
                (torch.tensor([True, False]), "torch.bool"),
                (floats(2), "float32"),
                (numbers(5), "(1,)"),
                (numbers(6, 3), "[6, 3]"),
                (numbers(-1, 3), "[-1, 3]"),
            ],
        },
    ),
)
