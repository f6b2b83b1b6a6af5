"""Every gradient of entmax, alpha's included, against autograd through an exact dense reference in fp64: to 1e-10."""

from __future__ import annotations

import pytest
import torch
from test_entmax import weights_of
from torch import Tensor

import backlight
from backlight.api import call_of
from backlight.distributed import simulated_attention
from backlight.reference import oracle

F64 = torch.float64
HEADS, GROUP = 4, 2
CAP, SCALE = 2.5, 0.6
# rows x keys: awkward, rows that see nothing, a single key, a single row
SIZES = [(13, 17), (17, 13), (9, 1), (1, 33)]
ALPHAS = {"mixed": (1.1, 1.5, 1.75, 1.99), "1.5": (1.5,) * 4, "2": (2.0,) * 4}


def inputs_of(sq: int, sk: int, alphas: tuple[float, ...], ties: bool) -> dict[str, Tensor]:
    torch.manual_seed(5)
    q, gate = (torch.randn(1, HEADS, sq, 5, dtype=F64) for _ in range(2))
    k, v = (torch.randn(1, HEADS // GROUP, sk, 5, dtype=F64) for _ in range(2))
    found = {"q": q, "k": k, "v": v, "bias": torch.randn(HEADS, 6, dtype=F64), "sink": torch.randn(HEADS, dtype=F64)}
    found |= {"gate": gate, "pair_bias": torch.randn(1, HEADS, sq, sk, dtype=F64), "entmax": torch.tensor(alphas, dtype=F64)}
    if ties:
        # keys in pairs of equal scores, and of equal weights then
        found["k"] = k[:, :, torch.arange(sk) // 2 * 2]
        found["bias"], found["pair_bias"] = torch.zeros(HEADS, 6, dtype=F64), torch.zeros(1, HEADS, sq, sk, dtype=F64)
    return {name: x.clone().requires_grad_() for name, x in found.items()}


def dense(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(y, lse) with every term there is beside entmax, causal."""
    sq, sk = x["q"].shape[2], x["k"].shape[2]
    distance = torch.arange(sq)[:, None] + (sk - sq) - torch.arange(sk)
    inside = (distance >= 0) & (distance < x["bias"].shape[1])
    ys, lses = [], []
    for h in range(HEADS):
        alpha, key_head = x["entmax"][h], h // GROUP
        s = CAP * torch.tanh(SCALE / CAP * x["q"][0, h] @ x["k"][0, key_head].mT) + x["pair_bias"][0, h]
        s = s + torch.where(inside, x["bias"][h][distance.clamp(0, x["bias"].shape[1] - 1)], 0)
        hidden = torch.cat([distance < 0, torch.zeros(sq, 1, dtype=torch.bool)], dim=-1)
        z = ((alpha - 1) * torch.cat([s, x["sink"][h].expand(sq, 1)], dim=-1)).masked_fill(hidden, -torch.inf)
        p = weights_of(z, alpha)
        largest = p.argmax(dim=-1, keepdim=True)
        theta = z.gather(-1, largest) - p.gather(-1, largest).pow(alpha - 1)
        lses.append((theta[:, 0] + 1) / (alpha - 1))
        ys.append(p[:, :sk] @ x["v"][0, key_head] * torch.sigmoid(x["gate"][0, h]))
    return torch.stack(ys)[None], torch.stack(lses)[None]


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("alphas", ALPHAS)
@pytest.mark.parametrize(("sq", "sk"), SIZES)
def test_all_gradients(sq: int, sk: int, alphas: str, ties: bool) -> None:
    inputs = inputs_of(sq, sk, ALPHAS[alphas], ties)
    wanted_y, wanted_lse = dense(inputs)
    dy, dlse = torch.randn_like(wanted_y), torch.randn_like(wanted_lse)
    wanted = torch.autograd.grad([wanted_y, wanted_lse], list(inputs.values()), [dy, dlse])
    options = {"causal": True, "softcap": CAP, "scale": SCALE}
    y, lse = backlight.attention(**inputs, **options, return_lse=True, backend="tiled")
    by_tiled = torch.autograd.grad([y, lse], list(inputs.values()), [dy, dlse])
    trace = oracle(call_of(**{name: x.detach() for name, x in inputs.items()}, **options), dy, dlse)
    assert_close(y, wanted_y, "y")
    assert_close(lse, wanted_lse, "lse")
    for name, grad, own in zip(inputs, wanted, by_tiled, strict=True):
        assert_close(own, grad, f"tiled, d{name}")
        assert_close(trace[f"d{name}"], grad, f"oracle, d{name}")


def test_a_ring() -> None:
    inputs = inputs_of(13, 17, ALPHAS["mixed"], False)
    inputs["pair_bias"] = torch.zeros_like(inputs["pair_bias"])
    wanted_y, wanted_lse = dense(inputs)
    del inputs["pair_bias"]
    dy, dlse = torch.randn_like(wanted_y), torch.randn_like(wanted_lse)
    wanted = torch.autograd.grad([wanted_y, wanted_lse], list(inputs.values()), [dy, dlse])
    options = {"causal": True, "softcap": CAP, "scale": SCALE, "world": 3, "strategy": "ring", "return_lse": True}
    found = torch.autograd.grad(simulated_attention(**inputs, **options), list(inputs.values()), [dy, dlse])
    for name, own, grad in zip(inputs, found, wanted, strict=True):
        assert_close(own, grad, f"d{name}")


def assert_close(found: Tensor, wanted: Tensor, name: str) -> None:
    size = max(1.0, float(wanted.detach().abs().max()))
    assert float((found - wanted).detach().abs().max()) <= 1e-10 * size, name
