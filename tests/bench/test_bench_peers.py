"""Adapters: what each refuses and why, and that what they build computes the case it was given.

FlexAttention and FlashAttention-3 need a GPU. Here their operators are replaced by dense stand-ins with the same signatures,
so layouts, masks, score functions, keywords and gradients are checked; their own kernels are judged by the gate where they run.
"""

from __future__ import annotations

import importlib.util
import lzma
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from backlight.bench import contenders
from backlight.bench.contenders.flex import KERNEL_OPTIONS, Flex, attention, block_mask_of, first_that_fits
from backlight.bench.gate import Gate
from backlight.bench.workload import Workload
from backlight.call import Call
from backlight.peers import fa3, flex
from backlight.problems.case import BF16, FP32, Case
from backlight.reference import oracle
from backlight.spec import AttentionSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN = Case("plain", b=2, hq=4, hkv=2, sq=70, sk=70, d=16, causal=True)
VARIANTS = (
    PLAIN,
    Case("full", b=2, hq=2, hkv=2, sq=70, sk=70, d=16),
    Case("sq<sk", b=1, hq=2, hkv=2, sq=40, sk=70, d=16, causal=True),
    Case("window", b=1, hq=2, hkv=2, sq=70, sk=70, d=16, causal=True, window=(20, 0)),
    Case("softcap", b=1, hq=2, hkv=2, sq=70, sk=70, d=16, causal=True, softcap=2.0),
    Case("bias", b=2, hq=4, hkv=2, sq=70, sk=70, d=16, causal=True, bias=32),
    Case("bias,two-sided", b=1, hq=2, hkv=2, sq=40, sk=70, d=16, bias=50, bias_origin=20),
    Case("sink", b=2, hq=2, hkv=2, sq=70, sk=70, d=16, causal=True, sink=True),
    Case("gate", b=2, hq=2, hkv=2, sq=70, sk=70, d=16, causal=True, gate=True),
    Case("varlen", hq=4, hkv=2, d=16, causal=True, lengths_q=(33, 5, 50)),
    Case("varlen,bias", hq=2, hkv=2, d=16, causal=True, lengths_q=(33, 5, 50), bias=24),
    Case("lazy", b=2, hq=4, hkv=2, sq=70, sk=70, d=16, causal=True, bias=32, tau=(-1.0, 0.5)),
)


def judged(name: str, case: Case, dtype: torch.dtype = FP32) -> Any:
    tensors = Workload(case, dtype).draw(CPU)
    contender = contenders.adapter(name).build(tensors)
    with contender.scope():
        return Gate(tensors).judge(contender.results())


@pytest.mark.parametrize("name", ["backlight", "backlight:tiled", "eager", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case.name)
def test_what_runs_on_a_cpu_is_right_or_refused(name: str, case: Case) -> None:
    reason = contenders.adapter(name).refuse(Workload(case, FP32), CPU)
    if reason is not None:
        assert name.startswith("sdpa")
        return
    verdict = judged(name, case)
    assert verdict.status == "ok", verdict


@pytest.mark.parametrize(
    ("name", "case", "device", "words"),
    [
        ("sdpa-flash", Case("sq<sk", sq=9, sk=20, causal=True), CPU, "top left"),
        ("sdpa-flash", Case("window", window=(3, 0)), CPU, "a window"),
        ("sdpa-flash", Case("lazy", bias=4, tau=(-1.0,)), CPU, "a bias by distance and the elastic softmax (tau)"),
        ("sdpa-flash", PLAIN, CUDA, "fp16 and bf16 only"),
        ("sdpa-cudnn", PLAIN, CPU, "does not run on cpu"),
        ("sdpa-efficient", PLAIN, CPU, "does not run on cpu"),
        ("sdpa-math", Case("varlen", lengths_q=(3, 4)), CPU, "packed sequences"),
        ("flex", PLAIN, CPU, "no compiled backward on cpu"),
        ("flex", Case("tau", tau=(-1.0,)), CUDA, "the elastic softmax (tau)"),
        ("flex", Case("unequal", lengths_q=(3, 4), lengths_k=(4, 5)), CUDA, "equal query and key lengths"),
        ("fa3", PLAIN, CPU, "needs a CUDA device"),
        ("adasplash", PLAIN, CPU, "not installed"),
        ("eager", Case("huge", b=64, hq=64, hkv=64, sq=65536, sk=65536), CPU, "S x S matrices"),
    ],
)
def test_refusals_say_why(name: str, case: Case, device: torch.device, words: str) -> None:
    assert words in contenders.adapter(name).refuse(Workload(case, FP32), device)


@pytest.mark.parametrize(
    ("dtype", "case", "words"),
    [
        (FP32, PLAIN, "fp16 and bf16"),
        (BF16, Case("dv", d=16, dv=32), "Dv = D"),
        (BF16, Case("bias", bias=4), "a bias by distance"),
        (BF16, PLAIN, "BACKLIGHT_FA3"),
    ],
)
def test_fa3_refusals_on_hopper(dtype: torch.dtype, case: Case, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delenv(fa3.VARIABLE, raising=False)
    assert words in contenders.adapter("fa3").refuse(Workload(case, dtype), CUDA)


ENTMAX = Case("entmax", sq=64, sk=64, d=16, causal=True, entmax=1.5)


@pytest.mark.parametrize(
    ("case", "device", "words"),
    [
        (PLAIN, CUDA, "a different function"),
        (replace(ENTMAX, entmax=(1.5,)), CUDA, "no gradient by alpha"),
        (ENTMAX, CPU, "does not run on cpu"),
        (replace(ENTMAX, sq=65, sk=65), CUDA, "a power of two"),
        (replace(ENTMAX, causal=False), CUDA, "is causal"),
        (replace(ENTMAX, scale=0.3), CUDA, "scales by"),
        (replace(ENTMAX, sink=True), CUDA, "a sink"),
        (ENTMAX, CUDA, None),
    ],
)
def test_adasplash_refusals(case: Case, device: torch.device, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    refused = contenders.adapter("adasplash").refuse(Workload(case, BF16), device)
    assert (refused is None) if words is None else words in refused


@pytest.mark.parametrize("name", ["backlight", "eager"])
def test_a_fixed_alpha_has_no_gradient(name: str) -> None:
    verdict = judged(name, ENTMAX)
    assert verdict.status == "ok", verdict
    assert set(verdict.quantities) == {"y", "dq", "dk", "dv"}


def test_fa3_needs_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "sm_90" in contenders.adapter("fa3").refuse(Workload(PLAIN, BF16), CUDA)


def test_unknown_contender_is_named() -> None:
    with pytest.raises(ValueError, match="no contender is called 'nobody'; there are backlight,"):
        contenders.adapter("nobody")


def test_select_keeps_order_and_drops_repeats() -> None:
    assert [adapter.name for adapter in contenders.select(("eager", "backlight", "eager"))] == ["eager", "backlight"]


# --- FlexAttention, dense stand-in ---------------------------------------------------------------------------------------


def dense_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    kernel_options=None,
    return_aux=None,
):
    """`flex_attention` as its documentation defines it, without tiles; tiles of more than one stage do not fit."""
    if (kernel_options or {}).get("fwd_num_stages", 3) > dense_flex.stages:
        raise RuntimeError("No valid triton configs. OutOfMemoryError: out of resource: Required: 245760 Hardware limit:232448")
    group = q.shape[1] // k.shape[1]
    assert enable_gqa or group == 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    b, h, i, j = torch.meshgrid(*(torch.arange(n) for n in s.shape), indexing="ij")
    if score_mod is not None:
        s = score_mod(s, b, h, i, j)
    if block_mask is not None:
        s = s.masked_fill(~block_mask(b, h, i, j), -torch.inf)
    lse = torch.logsumexp(s, dim=-1)
    o = (torch.exp(s - lse[..., None]).to(v.dtype) @ v).to(q.dtype)
    return o if return_aux is None else (o, SimpleNamespace(lse=lse))


dense_flex.stages = 3


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", dense_flex)
    monkeypatch.setattr(flex, "block_mask", flex.mask_function)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return monkeypatch


@pytest.mark.parametrize("case", [case for case in VARIANTS if case.tau is None], ids=lambda case: case.name)
def test_flex_expresses_the_case(case: Case, stand_in: pytest.MonkeyPatch) -> None:
    verdict = judged("flex", case)
    assert verdict.status == "ok", verdict


BIASED = Case("bias", b=1, hq=2, hkv=2, sq=40, sk=40, d=16, causal=True, bias=8)


def test_flex_takes_the_first_kernel_options_that_fit(stand_in: pytest.MonkeyPatch) -> None:
    """With a captured bias the default tiles of FlexAttention need more shared memory than an H200 has."""
    tensors = Workload(BIASED, FP32).draw(CPU)
    assert Flex().build(tensors).options == {}
    stand_in.setattr(dense_flex, "stages", 2)
    found = Flex().build(tensors)
    assert found.options == {"fwd_num_stages": 2}
    assert found.detail == "torch.compile, fwd_num_stages=2"
    stand_in.setattr(dense_flex, "stages", 0)
    with pytest.raises(RuntimeError, match="out of resource"):
        Flex().build(tensors)


def test_flex_begins_with_what_another_process_found(stand_in: pytest.MonkeyPatch) -> None:
    tried = []
    stand_in.setattr("backlight.bench.contenders.flex._compiled", lambda name, tensors, mask, options: tried.append(options))
    adapter, workload = Flex(), Workload(BIASED, FP32)
    adapter.prefer(workload, {"fwd_num_stages": 1})
    adapter.build(workload.draw(CPU))
    adapter.build(Workload(PLAIN, FP32).draw(CPU))
    assert tried == [{"fwd_num_stages": 1}, {}]


def test_other_errors_of_flex_are_not_tried_away() -> None:
    tried = []

    def build(options: dict[str, int]) -> None:
        tried.append(options)
        raise RuntimeError("unsupported head dimension")

    with pytest.raises(RuntimeError, match="unsupported"):
        first_that_fits(KERNEL_OPTIONS, build)
    assert tried == [{}]


@pytest.mark.clean_memory
@pytest.mark.parametrize("case", [case for case in VARIANTS if case.tau is None], ids=lambda case: case.name)
def test_the_compiler_traces_flex_in_one_graph(case: Case) -> None:
    """The real `flex_attention`, forward only: it has no backward on a CPU."""
    call = Workload(case, FP32).draw(CPU).call
    torch._dynamo.reset()
    options = KERNEL_OPTIONS[-1]
    traced = torch.compile(attention(call, options), dynamic=False, fullgraph=True, backend="eager")
    terms = {name: getattr(call, name) for name in ("bias", "sink", "gate") if getattr(call, name) is not None}
    y = traced(call.q, call.k, call.v, block_mask=block_mask_of(call), **terms)
    torch.testing.assert_close(y.double(), oracle(call).y, rtol=0, atol=1e-5)


def test_flex_block_mask_is_the_spec_s_mask() -> None:
    case = Case("window", b=1, hq=1, hkv=1, sq=300, sk=300, d=16, window=(90, 20))
    call = Workload(case, FP32).draw(CPU).call
    mask = block_mask_of(call)
    i, j = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    assert torch.equal(mask.mask_mod(0, 0, i, j), case.spec.allowed(300, 300))


# --- FlashAttention-3, stand-in operators --------------------------------------------------------------------------------

FA3_OPTIONS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0"
)


def fa3_call(
    q, k, v, cu_q=None, cu_k=None, max_q=None, max_k=None, scale=None, causal=False, left=-1, right=-1, softcap=0.0
) -> Call:
    spec = AttentionSpec(
        causal=causal,
        window=(None if left < 0 else left, None if right < 0 or causal else right),
        scale=scale,
        softcap=softcap or None,
    )
    if cu_q is None:
        return Call(spec, *(x.transpose(1, 2) for x in (q, k, v)))
    assert max_q == int(cu_q.diff().max())
    assert max_k == int(cu_k.diff().max())
    return Call(spec, *(x.transpose(0, 1)[None] for x in (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def fa3_layout(x: Tensor, like: Tensor) -> Tensor:
    return (x.transpose(1, 2) if like.dim() == 4 else x[0].transpose(0, 1)).contiguous().to(like.dtype)


def fa3_forward(q, k, v, *options):
    found = oracle(fa3_call(q, k, v, *options))
    return fa3_layout(found.y, q), found.lse.float().clone(), q.new_empty(0)


def fa3_backward(do, q, k, v, o, lse, *options):
    call = fa3_call(q, k, v, *options)
    found = oracle(call, do.transpose(1, 2) if q.dim() == 4 else do.transpose(0, 1)[None])
    return (*(fa3_layout(found[name], x) for name, x in (("dq", q), ("dk", k), ("dv", v))), lse.clone())


@pytest.fixture
def fa3_operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(f"fwd(Tensor q, Tensor k, Tensor v, {FA3_OPTIONS}) -> (Tensor, Tensor, Tensor)")
    library.define(
        f"bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {FA3_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("fwd", fa3_forward, "CPU")
    library.impl("bwd", fa3_backward, "CPU")
    monkeypatch.setattr(fa3, "load", lambda: None)
    yield
    library._destroy()


FA3_CASES = [case for case in VARIANTS if case.name in ("plain", "full", "sq<sk", "window", "softcap", "gate", "varlen")]


@pytest.mark.parametrize("case", FA3_CASES, ids=lambda case: case.name)
def test_fa3_layouts_and_keywords(case: Case, fa3_operators: None) -> None:
    for name in ("fa3", "fa3-bare"):
        if case.gate and name == "fa3-bare":
            continue
        verdict = judged(name, case)
        assert verdict.status == "ok", (name, verdict)


def test_bare_operators_are_labelled(fa3_operators: None) -> None:
    tensors = Workload(PLAIN, BF16).draw(CPU)
    assert contenders.adapter("fa3").build(tensors).path == "autograd"
    assert contenders.adapter("fa3-bare").build(tensors).path == "bare op"


def test_a_packed_library_is_unpacked_once(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    packed = tmp_path / "_C.so.xz"
    packed.write_bytes(lzma.compress(b"library" * 1000))
    first = fa3.unpacked(packed)
    assert first.read_bytes() == b"library" * 1000
    assert first.name == "_C.so"
    first.write_bytes(b"kept")
    assert fa3.unpacked(packed).read_bytes() == b"kept"
    assert fa3.unpacked(first) == first


def test_a_named_library_that_is_missing_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fa3.VARIABLE, str(tmp_path / "_C.so"))
    assert fa3.absent() == "BACKLIGHT_FA3 names a file that does not exist"
