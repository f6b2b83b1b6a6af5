"""Suites hold the cases, shapes and contenders that the protocol names."""

from __future__ import annotations

import pytest
import torch

from backlight.bench import suites
from backlight.bench.contenders import adapter

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", suites.SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites_are_what_the_protocol_says(name: str, device: str) -> None:
    found = suites.suite(name, torch.device(device))
    ids = [workload.id for workload in found.workloads]
    assert len(set(ids)) == len(ids)
    assert found.contenders[0] == "backlight"
    assert all(adapter(peer).name == peer for peer in found.contenders)


def test_plain_covers_the_grid() -> None:
    found = suites.suite("plain", torch.device("cuda"))
    shapes = {(w.case.d, w.case.sq, w.case.causal) for w in found.workloads}
    assert shapes == {(d, s, c) for d in (64, 128, 256) for s in suites.LENGTHS for c in (True, False)}
    assert all(w.case.b * w.case.sq == 32768 and w.case.hq * w.case.d == 2048 for w in found.workloads)
    assert {"sdpa-flash", "sdpa-cudnn", "flex", "fa3"} <= set(found.contenders)
    quick = suites.suite("plain", torch.device("cuda"), quick=True)
    assert {w.case.sq for w in quick.workloads} == {512, 2048, 8192, 16384}


def test_every_goes_beyond_the_even_shapes() -> None:
    found = suites.suite("every", torch.device("cuda"))
    cases = [workload.case for workload in found.workloads]
    assert {case.d for case in cases} == {64, 80, 96, 128, 192, 256}
    assert (min(case.sq for case in cases), max(case.sq for case in cases)) == (256, 65536)
    assert {case.window[0] for case in cases} == {None, 127, 1023, 4095}
    assert any(case.d == 192 and case.dv == 128 for case in cases)
    assert {case.hq // case.hkv for case in cases} >= {1, 3, 4, 5, 8}
    assert found.contenders == ("backlight", "fa3", "sdpa-cudnn")
    assert len(suites.suite("every", torch.device("cuda"), quick=True).workloads) == len(cases) - 2


def test_variants_cover_what_nobody_else_differentiates() -> None:
    cases = [workload.case for workload in suites.suite("variants", torch.device("cuda")).workloads]
    assert any(case.window == (1023, 0) for case in cases)
    assert any(case.hq == 8 * case.hkv for case in cases)
    assert any(case.varlen and sum(case.lengths_q) == 32768 for case in cases)
    assert any(case.bias == 512 and case.tau is None for case in cases)
    assert any(case.bias == 512 and case.tau is not None for case in cases)
    for name in ("sink", "softcap", "gate"):
        assert any(getattr(case, name) for case in cases)


def test_every_variant_has_plain_of_its_shape_beside_it() -> None:
    for device in ("cuda", "cpu"):
        suite = suites.suite("variants", torch.device(device))
        by_id = {workload.id: workload.case for workload in suite.workloads}
        for case in by_id.values():
            plain_id = suite.plain.get(f"{case.name}/{'bf16' if device == 'cuda' else 'fp32'}")
            if plain_id is None:
                assert case.varlen or case.name.startswith("causal")
                continue
            plain = by_id[plain_id]
            shape = ("b", "hq", "sq", "sk", "d", "causal")
            assert [getattr(plain, x) for x in shape] == [getattr(case, x) for x in shape]
            assert (plain.hkv, plain.bias, plain.tau, plain.sink, plain.window) == (plain.hq, None, None, False, (None, None))


def test_the_published_shape_is_among_the_variants() -> None:
    """B4 H16 L4096 D64 with a table of 4096: where the elastic softmax was published at 4.5 times softmax attention."""
    suite = suites.suite("variants", torch.device("cuda"))
    (found,) = (w for w in suite.workloads if w.case.bias == 4096)
    case = found.case
    assert (case.b, case.hq, case.sq, case.d, case.tau) == (4, 16, 4096, 64, (-1.0,))
    assert found.dtype == torch.bfloat16
    assert found.id in suite.plain


def test_cpu_and_memory_hold_the_bars() -> None:
    ids = {workload.id for workload in suites.suite("cpu", CPU).workloads}
    assert {"causal,s=4096/fp32", "full,s=4096/fp32", "causal,s=4096/bf16", "lazy,s=4096/fp32"} <= ids
    ids = {workload.id for workload in suites.suite("memory", CPU).workloads}
    assert {"causal,s=16384/fp32", "causal,s=16384/bf16"} <= ids


def test_cases_are_found_by_name_or_id() -> None:
    assert suites.find("plain,d=64,s=512,causal", CPU).case.sq == 512
    assert suites.find("causal,s=4096/bf16", CPU).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no case is called 'causal,s=3'; close to it: causal,s="):
        suites.find("causal,s=3", CPU)
