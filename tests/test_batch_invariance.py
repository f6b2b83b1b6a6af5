"""`deterministic="batch"`: the same bits for a sequence whatever else is in the call (eq. 79)."""

from __future__ import annotations

import pytest
import torch
from sequences import batched_results, differing, drawn

import backlight
from backlight.api import call_of
from cases import BF16, FP16, FP32, case_id

OPTIONS: dict[str, dict[str, object]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (70, 10)},
    "softcap": {"causal": True, "softcap": 3.0},
}
SPARSE: dict[str, dict[str, object]] = {"entmax": {"causal": True, "entmax": 1.5}}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batched"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=case_id)
@pytest.mark.parametrize("name", [*OPTIONS, *SPARSE])
def test_on_a_cpu(name: str, dtype: torch.dtype, packed: bool) -> None:
    assert not differing(150, 32, 4, dtype, packed=packed, longest=400, **(OPTIONS | SPARSE)[name])


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batched"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_on_cuda(backend: str, name: str, width: int, packed: bool) -> None:
    q = torch.zeros(1, 2, 64, width, dtype=BF16, device="cuda")
    if reasons := backlight.explain(q, q, q).reasons[backend]:
        pytest.skip("; ".join(reasons))
    for rows in (70, 600, 1500):
        found = differing(rows, width, 8, BF16, "cuda", packed, 3000, backend=backend, **OPTIONS[name])
        assert not found, found


def test_documents_run_packed_however_short_they_are() -> None:
    q = torch.randn(1, 2, 40, 16)
    mask = backlight.mask.documents(lengths=[10] * 4)
    assert "on average" in str(backlight.explain(q, q, q, mask=mask, deterministic=True))
    assert "run packed" in str(backlight.explain(q, q, q, mask=mask, deterministic="batch"))


def test_explain_says_by_what() -> None:
    q = torch.randn(1, 2, 40, 16)
    told = backlight.explain(q, q, q, deterministic="batch")
    assert told.order is not None
    assert f'deterministic="batch": {told.order}' in str(told)
    assert backlight.explain(q, q, q, deterministic=True).order is None


def test_it_is_deterministic_too() -> None:
    call = call_of(*(torch.zeros(1, 2, 4, 8) for _ in range(3)), deterministic="batch")
    assert call.deterministic
    assert call.batch_invariant
    assert not call_of(call.q, call.k, call.v, deterministic=True).batch_invariant


@pytest.mark.parametrize("value", ["yes", "Batch", 1])
def test_what_is_refused(value: object) -> None:
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TypeError, match='deterministic must be a bool, "batch" or None, got'):
        backlight.attention(q, q, q, deterministic=value)  # type: ignore[call-overload]


def test_compiled() -> None:
    torch.compiler.reset()
    q = drawn(0, 9, (2, 2), 8, FP32, "cpu")[0].transpose(0, 1)[None]

    def step(q: torch.Tensor) -> torch.Tensor:
        return backlight.attention(q, q, q, deterministic="batch")

    assert torch.equal(torch.compile(step, fullgraph=True, backend="eager")(q), step(q))


def test_a_batch_of_another_size_can_change_bits_without_it() -> None:
    """Or the promise would be for nothing: slabs of several entries are multiplied at once."""
    sequences = [drawn(n, 40, (4, 2), 16, FP16, "cpu") for n in range(3)]
    assert set(batched_results(sequences, 1)) == {"y", "lse", "dq", "dk", "dv"}
    sizes = [
        call_of(*(torch.zeros(b, 2, 40, 16) for _ in range(3)), deterministic=how) for b in (1, 3) for how in (True, "batch")
    ]
    from backlight import registry

    heads = [registry.get("tiled").config(call).heads for call in sizes]
    assert heads[0] != heads[2]
    assert heads[1] == heads[3]
