"""Calls of the kind that is examined, of lengths that a probe chooses."""

from __future__ import annotations

from typing import Any

from backlight.call import Call
from backlight.problems import inputs
from backlight.problems.problem import Problem

REFUSED = "packed sequences, masks and pair biases have no lengths of their own"


def has_own_lengths(call: Call) -> bool:
    return call.varlen or call.rows is not None or call.pair_bias is not None


def of_kind(problem: Problem, shape: tuple[int, int, int, int], sk: int | None = None) -> Problem:
    """Ordinary inputs with the spec, key/value heads, widths and dtype of a problem."""
    call = problem.call
    q, k, v = call.q, call.k, call.v
    settings: dict[str, Any] = {"seed": problem.seed, "device": q.device, "dtype": q.dtype}
    settings |= {"kv_heads": k.shape[1], "sk": sk, "dv": v.shape[3]}
    settings |= {} if call.bias is None else {"bias": call.bias.shape[1]}
    return inputs.make(call.spec, shape, **settings)
