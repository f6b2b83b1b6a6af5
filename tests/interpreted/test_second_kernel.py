"""The Triton kernels of second derivatives in Triton's interpreter, against the tiled backend in float64 of the same inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from dense import dense, learned
from twice import cotangents_of, judge, small_tiles, tangents_of

import backlight
from backlight import registry
from backlight.backends.triton import config
from backlight.backends.triton.device import Device
from backlight.differentiating import choose
from cases import FP32, Case, case_id

# two tiles each way, the second of them not full
CASES = (
    Case("batched", sq=19, sk=19),
    Case("causal,gqa,sq<sk", b=1, hq=4, hkv=2, sq=19, sk=29, causal=True),
    Case("dv,sq>sk", b=1, hq=1, hkv=1, sq=29, sk=19, d=16, dv=24),
    Case("varlen,empty k", lengths_q=(10, 17, 7), lengths_k=(0, 20, 9), hq=1, hkv=1, window=(9, 4), sink=True),
    Case("rows without keys", b=1, causal=True, sq=29, sk=10, sink=True, gate=True),
    Case("mask", b=1, hq=2, hkv=1, mask="two runs", sq=29, sk=20),
    Case("bias,softcap", b=1, hq=1, hkv=1, sq=19, sk=29, softcap=1.5, bias=24, bias_origin=3),
    Case("sk=0", sq=5, sk=0, sink=True, bias=8),
    Case("sq=0", sq=0, sk=5, bias=8, gate=True),
)
TOGETHER = {"causal": True, "window": (25, 0), "softcap": 1.5, "bias": 24, "bias_origin": 3, "sink": True, "gate": True}
EVERYTHING = Case("everything", b=1, hq=2, hkv=1, sq=20, sk=36, **TOGETHER)
LONGER = (
    EVERYTHING,
    Case("everything,varlen", lengths_q=(10, 17, 7), lengths_k=(20, 0, 20), **TOGETHER),
    Case("everything,mask", b=1, mask="two runs", sq=37, sk=33, **TOGETHER),
    Case("mask,pos,varlen", mask="run", pos=True, lengths_q=(12, 10), lengths_k=(20, 9), causal=True, gate=True, bias=12),
    Case("bias,gqa", b=2, hq=2, hkv=1, sq=19, sk=21, bias=24, bias_origin=7),
)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_fp32(case: Case) -> None:
    call = case.make(FP32).call
    with small_tiles():
        judge(call, tangents_of(call), cotangents_of(call), 1e-5)


@pytest.mark.parametrize("case", LONGER, ids=case_id)
def test_together(case: Case) -> None:
    call = case.make(FP32).call
    with small_tiles():
        judge(call, tangents_of(call), cotangents_of(call), 1e-5)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink", "gate"])
def test_one_tangent(name: str) -> None:
    call = EVERYTHING.make(FP32).call
    with small_tiles():
        judge(call, {name: tangents_of(call)[name]}, cotangents_of(call), 1e-5)


@pytest.mark.parametrize("names", [(), ("dy",), ("dty",), ("dtlse",), ("dlse", "dty"), ("dy", "dtlse")], ids=",".join)
def test_any_gradients_that_came_in(names: tuple[str, ...]) -> None:
    call = replace(EVERYTHING, sq=11, sk=13, hq=1).make(FP32).call
    cotangents = cotangents_of(call)
    with small_tiles():
        judge(call, tangents_of(call), {name: cotangents[name] for name in names}, 1e-5)


@pytest.mark.parametrize("gradient", ["dq", "dk", "dbias", "dsink", "dgate", "dtk"])
def test_one_gradient(gradient: str) -> None:
    call = replace(EVERYTHING, sq=11, sk=13, hq=1).make(FP32).call
    tangents, incoming = tangents_of(call), tuple(cotangents_of(call).values())
    triton = registry.get("triton")
    with small_tiles():
        results = triton.tangent(call, tangents, None)
        found = triton.second(call, tangents, results, incoming, frozenset({gradient}))
        both = triton.second(call, tangents, results, incoming, frozenset({gradient, "dq", "dtq"}))
    assert list(found) == [gradient]
    assert torch.equal(found[gradient], both[gradient])


@pytest.mark.parametrize(("d", "dtype"), [(64, torch.float16), (192, torch.float16)], ids=str)
def test_tiles_of_the_heuristic(d: int, dtype: torch.dtype) -> None:
    """Wide heads take two launches for dk and dv."""
    call = Case("tiles", b=1, hq=1, hkv=1, causal=True, sq=70, sk=130, d=d).make(dtype).call
    judge(call, tangents_of(call), cotangents_of(call), 6e-3)


def test_the_public_double_backward_against_the_oracle() -> None:
    """Gradients of gradients by everything, as `create_graph=True` asks for them; the oracle is differentiated twice."""
    call = Case("public", hq=4, hkv=2, sq=10, sk=13, causal=True).make(FP32).call
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(call.q.shape, generator=generator)
    hats = tuple(tangents_of(call).values())

    def twice(run: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        inputs = [x.to(dtype).requires_grad_() for x in (*learned(call).values(), dy)]
        grads = torch.autograd.grad(run(*inputs[:3]), inputs[:3], inputs[3], create_graph=True)
        return torch.autograd.grad(grads, inputs, [hat.to(dtype) for hat in hats])

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dense(call, {"q": q, "k": k, "v": v})[0]

    with small_tiles():
        found = twice(lambda *x: backlight.attention(*x, causal=True, backend="triton"), FP32)
    for got, want in zip(found, twice(oracle, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=2e-5)


def test_tau_is_refused_by_name_and_left_to_tiled_without_one() -> None:
    call = Case("tau", b=1, hq=1, hkv=1, sq=9, sk=9, tau=(-0.7,)).make(FP32).call
    q = call.q.requires_grad_()
    for backend in ("triton", None):
        (dq,) = torch.autograd.grad(
            backlight.attention(q, call.k, call.v, tau=call.tau, backend=backend).square().sum(), q, create_graph=True
        )
        if backend is None:
            assert torch.autograd.grad(dq.square().sum(), q)[0].isfinite().all()
        else:
            with pytest.raises(NotImplementedError, match="triton: has no second derivative with tau"):
                torch.autograd.grad(dq.square().sum(), q)


def test_what_does_not_fit_is_refused_by_name_and_left_to_tiled_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 of wide heads, on a card without the shared memory for four tensors of keys."""
    wide = Case("wide", b=1, hq=1, hkv=1, sq=4, sk=4, d=192)
    monkeypatch.setattr(config, "device_of", lambda device: Device("a card", "sm_86", 99 * 1024))
    call = wide.make(FP32).call
    assert choose("second", call, None).name == "tiled"
    assert choose("tangent", call, None).name == "triton"
    assert choose("second", wide.make(torch.float16).call, None).name == "triton"
    with pytest.raises(NotImplementedError, match="no second derivative in fp32 of heads wider than 128 with 99 KiB"):
        choose("second", call, "triton")
