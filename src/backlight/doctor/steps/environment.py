"""What a report says about the machine, the subject's surroundings and the oracle's own health."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.autograd import forward_ad

from backlight.call import Call
from backlight.doctor.steps.invariants import identities
from backlight.doctor.subject import forward_mode
from backlight.peers.eager import attention
from backlight.problems import inputs
from backlight.problems.along import draw
from backlight.problems.axes import tensors_of
from backlight.problems.problem import Problem
from backlight.reference import oracle
from backlight.reference.tangent import tangent
from backlight.spec import TERM_NAMES, AttentionSpec


def environment(device: torch.device) -> dict[str, str]:
    """Versions, device and the switches that change results."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})",
        "threads": str(torch.get_num_threads()),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = "absent"
    return found


@lru_cache(maxsize=1)
def self_check() -> dict[str, Any]:
    """The oracle against autograd on a small problem with every term, and the identities on the oracle; cached per process."""
    problems = _every_term(), _every_term(without=("tau",))
    difference = max(_autograd_difference(problem.call, problem.dy) for problem in problems)
    plain = inputs.make(AttentionSpec(causal=True), (1, 2, 16, 8), dtype=torch.float32, seed=3)
    values = {"o": plain.truth.y.float()} | {n: plain.truth[n].float() for n in ("dq", "dk", "dv")}
    worst = max(i.ratio for i in identities(plain, values))
    return {"oracle_vs_autograd": difference, "identities": worst, "passed": difference <= 1e-10 and worst <= 2.0}


def _every_term(without: tuple[str, ...] = ("entmax",)) -> Problem:
    """With all terms but those that do not go with the others: entmax, or tau."""
    terms = {name: True for name in TERM_NAMES if name not in without}
    spec = AttentionSpec(causal=True, window=(7, 0), softcap=3.0, **terms)
    return inputs.make(spec, (1, 2, 9, 4), kv_heads=1, sk=11, dtype=torch.float64, seed=3)


@lru_cache(maxsize=1)
def tangents_checked() -> bool:
    """The oracle's tangents against forward mode through plain PyTorch; for subjects that have one, since it takes a moment."""
    return all(_tangents_agree(problem.call) for problem in (_every_term(), _every_term(without=("tau",))))


def _tangents_agree(call: Call) -> bool:
    tangents = draw(call, seed=3)
    with forward_ad.dual_level():
        moving = {name: forward_mode.dual(x, tangents[name]) for name, x in tensors_of(call).items()}
        ty = forward_ad.unpack_dual(attention(call)(**moving)).tangent
    found = tangent(call, tangents).ty
    return bool((ty - found).abs().max() <= 1e-10 * found.abs().max().clamp(min=1))


def _autograd_difference(call: Call, dy: torch.Tensor) -> float:
    """Largest relative distance between the hand-written backward and autograd through plain PyTorch."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors_of(call).items()}
    y = attention(call)(**leaves)
    found = torch.autograd.grad(y, list(leaves.values()), dy)
    trace = oracle(call, dy)
    pairs = [(y.detach(), trace.y), *((g, trace[f"d{n}"]) for n, g in zip(leaves, found, strict=True))]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)
