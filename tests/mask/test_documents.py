"""Documents of known lengths run on the kernels of packed sequences, and give what their intervals give."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import backlight
from backlight import mask, operators
from backlight.call import Call
from backlight.mask import Mask
from packed_documents import CASES, Documents, results

PACKED = "documents of known lengths run packed"


def ran(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Calls as backends get them, from now on."""
    from backlight import running

    seen: list[Call] = []
    for name in ("forward", "backward"):
        real = getattr(running, name)
        monkeypatch.setattr(running, name, lambda call, *rest, real=real: (seen.append(call), real(call, *rest))[1])
    return seen


@pytest.mark.parametrize("name", CASES)
def test_packed_is_the_same_as_intervals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    tensors, made = case.tensors(torch.float64), case.mask()
    seen = ran(monkeypatch)
    got = results(made, tensors, **case.options)
    assert [(call.rows, call.varlen, call.trusted) for call in seen] == [(None, True, True)] * 2
    want = results(Mask(made.rows), tensors, **case.options)
    assert all(call.rows is not None and not call.varlen for call in seen[2:])
    assert got.keys() == want.keys()
    for part, value in want.items():
        assert got[part].shape == value.shape
        torch.testing.assert_close(got[part], value, msg=lambda text, part=part: f"{part}: {text}")
    assert backlight.explain(**tensors, mask=made, **case.options).documents.startswith(PACKED)


def test_through_operators() -> None:
    """A profiler looks at the call, and so do hooks of autograd."""
    case = CASES["rows of entries"]
    tensors, made = case.tensors(torch.float64), case.mask()
    want = results(made, tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        got = results(made, tensors)
    assert {"backlight::attention", "backlight::attention_backward"} <= {event.name for event in profile.events()}
    for part, value in want.items():
        torch.testing.assert_close(got[part], value)


def test_borders_cross_the_operators() -> None:
    case = CASES["padding"]
    q, k, v = case.tensors(torch.float32).values()
    cu_q, cu_k = case.mask().borders.unbind(0)
    call = Call(backlight.spec.AttentionSpec(causal=True), q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, trusted=True)
    assert operators.unpack(operators.pack(call, None))[0].trusted
    torch.library.opcheck(torch.ops.backlight.attention.default, (*operators.pack(call, None), False))


REASONS: dict[str, tuple[str, dict[str, object]]] = {
    "short ones": ("its documents are shorter than 64 positions on average", {"lengths": (20, 30, 150, 0)}),
    "entries apart": ("batch entries do not lie side by side", {"lengths": ((60, 40), (100, 100)), "batch": 2}),
    "heads with terms of their own": ("batch entries do not lie side by side", {"batch": 2, "terms": ("sink",)}),
}


@pytest.mark.parametrize("name", REASONS)
def test_intervals_where_packing_is_not_possible_or_does_not_pay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason, changes = REASONS[name]
    case = Documents(**{"lengths": (130, 70), **changes})
    tensors, made = case.tensors(torch.float64), case.mask()
    seen = ran(monkeypatch)
    results(made, tensors)
    assert all(call.rows is not None for call in seen)
    assert reason in backlight.explain(**tensors, mask=made).documents


def test_what_else_stays_with_intervals() -> None:
    q = torch.randn(1, 2, 200, 8)
    made = mask.documents(lengths=[120, 80])
    assert "not one of as many rows as keys" in backlight.explain(q[:, :, :9], q, q, mask=made).documents
    assert (
        "rows and keys of the batch" in backlight.explain(q, q, q, mask=made, pair_bias=torch.zeros(1, 1, 200, 200)).documents
    )
    packed = q[0].transpose(0, 1)
    cu = torch.tensor([0, 50, 200])
    assert "is packed already" in backlight.explain(packed, packed, packed, cu, mask=made).documents
    for other in (mask.documents(torch.arange(200) // 100), mask.chunks(100, 200), made.last_rows(150)):
        assert other.borders is None
        assert backlight.explain(q[:, :, -150:], q, q, mask=mask.chunks(100, 200)).documents is None
    assert made.last_rows(200) is made


def test_ids_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 200, 8)
    seen = ran(monkeypatch)
    by_ids = backlight.attention(q, q, q, mask=mask.documents(torch.arange(200) // 100, causal=True))
    by_lengths = backlight.attention(q, q, q, mask=mask.documents(lengths=[100, 100], causal=True))
    assert [call.varlen for call in seen] == [False, True]
    torch.testing.assert_close(by_ids, by_lengths)


def test_bad_calls_get_the_sentences_of_intervals() -> None:
    q, made = torch.randn(1, 2, 200, 8), mask.documents(lengths=[120, 80], causal=True)
    with pytest.raises(ValueError, match=r"the rows of a mask must be \[1, 1 or 2, 2 or 4, 150\]"):
        backlight.attention(q[:, :, :150], q[:, :, :150], q[:, :, :150], mask=made)
    with pytest.raises(TypeError, match="causal must be a bool, got int"):
        backlight.attention(q, q, q, mask=made, causal=0)
    with pytest.raises(ValueError, match=r"q must have 4 dimensions \[B, H, S, D\]"):
        backlight.attention(q[0], q, q, mask=made)


def test_borders_of_a_caller_are_checked_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of one layout, of which one may go unchecked."""
    x, made = torch.randn(2, 200, 2, 8), mask.documents(lengths=[[120, 80], [60, 140]])
    packed, batched = x.flatten(0, 1), x.transpose(1, 2)
    seen = ran(monkeypatch)
    for _ in range(2):
        y = backlight.attention(batched, batched, batched, mask=made)
        torch.testing.assert_close(
            backlight.attention_varlen(packed, packed, packed, made.borders[0]), y.transpose(1, 2).flatten(0, 1)
        )
    assert [call.trusted for call in seen] == [True, False, True, False]
    assert seen[0].layout == seen[1].layout
    assert seen[2].shared is not seen[3].shared
    wrong = torch.tensor([0, 9, 3, 400, 400, 400], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease"):
        backlight.attention_varlen(packed, packed, packed, wrong)


def test_five_axes() -> None:
    q = torch.randn(2, 3, 2, 200, 8, dtype=torch.float64)
    made = mask.documents(lengths=[120, 60], length=200)
    torch.testing.assert_close(backlight.attention(q, q, q, mask=made), backlight.attention(q, q, q, mask=Mask(made.rows)))


def test_autocast_and_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    q, made = torch.randn(1, 2, 200, 8, requires_grad=True), mask.documents(lengths=[120, 80], causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert backlight.attention(q, q, q, mask=made).dtype == torch.bfloat16
    (want,) = torch.autograd.grad(backlight.attention(q, q, q, mask=made).square().sum(), q)
    y = checkpoint(lambda q: backlight.attention(q, q, q, mask=made), q, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), q)[0], want)


def test_transforms_take_intervals() -> None:
    """Of tensors, of masks and of gradients."""
    qs = torch.randn(3, 1, 2, 200, 8, dtype=torch.float64)
    several = [mask.documents(lengths=lengths, causal=True) for lengths in ([120, 80], [60, 140], [1, 199])]
    leaves = [torch.utils._pytree.tree_flatten(each)[0] for each in several]
    _, shape = torch.utils._pytree.tree_flatten(several[0])
    stacked = torch.utils._pytree.tree_unflatten([torch.stack(each) for each in zip(*leaves, strict=True)], shape)
    want = torch.stack([backlight.attention(q, q, q, mask=each) for q, each in zip(qs, several, strict=True)])
    torch.testing.assert_close(torch.vmap(lambda q, m: backlight.attention(q, q, q, mask=m))(qs, stacked), want)

    def loss(q: Tensor) -> Tensor:
        return backlight.attention(q, q, q, mask=several[0]).square().sum()

    q = qs[0].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(qs[0]), torch.autograd.grad(loss(q), q)[0])


# --- the mask ----------------------------------------------------------------------------------------------------------------


def test_a_mask_carries_its_borders() -> None:
    found = mask.documents(lengths=[2, 0, 3], causal=True)
    assert found.borders.tolist() == [[0, 2, 2, 5]]
    assert mask.documents(lengths=[2, 3], length=9).borders.tolist() == [[0, 2, 5, 9, 9], [0, 2, 5, 5, 9]]
    of_entries = mask.documents(lengths=torch.tensor([[2, -1], [7, 9]]), length=9)
    assert of_entries.borders.tolist() == [[0, 2, 2, 9, 9, 9, 16, 18, 18, 18], [0, 2, 2, 2, 9, 9, 16, 18, 18, 18]]
    assert mask.documents(lengths=[], length=0).borders is None
    assert repr(found) == "Mask(rows (1, 1, 2, 5), borders (1, 4), causal, cpu)"
    kept = io.BytesIO()
    torch.save(found.state, kept)
    kept.seek(0)
    again = Mask(**torch.load(kept, weights_only=True))
    assert torch.equal(again.borders, found.borders)
    assert again.causal
    assert found.to("meta").borders.device.type == "meta"
    leaves, shape = torch.utils._pytree.tree_flatten(found)
    assert [x.shape for x in leaves] == [(1, 1, 2, 5), (1, 4)]
    again = torch.utils._pytree.tree_unflatten(leaves, shape)
    assert again.borders is found.borders
    assert again.causal


def test_huge_lengths_are_held_within() -> None:
    found = mask.documents(lengths=torch.tensor([3, 2**62, 2**62]), length=9)
    assert found.borders[0].tolist() == [0, 3, 9, 9, 9, 9]
    assert torch.equal(found.rows, mask.documents(lengths=[3, 6], length=9).rows)


def test_a_mask_in_the_memory_of_another() -> None:
    q = torch.randn(1, 2, 200, 8)
    held, new = (mask.documents(lengths=lengths) for lengths in ([120, 80], [60, 140]))
    want = backlight.attention(q, q, q, mask=new)
    assert held.copy_(new) is held
    torch.testing.assert_close(backlight.attention(q, q, q, mask=held), want)
    torch.testing.assert_close(held.rows, new.rows)
    with pytest.raises(ValueError, match=r"other must be like this mask, Mask\(.*\), got Mask\("):
        held.copy_(mask.documents(lengths=[200]))
    with pytest.raises(TypeError, match=r"other must be a backlight\.mask\.Mask, got 3"):
        held.copy_(3)


WRONG = {
    "dtype": ({"borders": torch.zeros(1, 3)}, TypeError, "borders must be int32, got torch.float32"),
    "axes": ({"borders": torch.zeros(3, dtype=torch.int32)}, ValueError, r"borders must be \[sides, n\], got shape \(3,\)"),
    "sides": ({"borders": torch.zeros(3, 2, dtype=torch.int32)}, ValueError, r"borders must be of rows or of rows and keys"),
    "device": ({"borders": torch.zeros(1, 2, dtype=torch.int32, device="meta")}, ValueError, "borders must be on the device"),
    "pos": (
        {"borders": torch.zeros(1, 2, dtype=torch.int32), "pos": torch.zeros(1, 5, dtype=torch.int32)},
        ValueError,
        "borders go with one interval for each key, the same for all heads, and without pos",
    ),
    "causal": ({"causal": 1}, TypeError, "causal must be a bool, got 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_borders_get_a_sentence(name: str) -> None:
    given, error, sentence = WRONG[name]
    with pytest.raises(error, match=sentence):
        Mask(torch.zeros(1, 1, 2, 5, dtype=torch.int32), **given)


# --- compiled ----------------------------------------------------------------------------------------------------------------


@pytest.mark.clean_memory
@pytest.mark.parametrize("inside", [False, True], ids=["mask given", "mask made inside"])
def test_compiled_once_for_other_lengths(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are values; only their number is a shape, of which a second one makes the graph dynamic."""
    torch._dynamo.reset()
    compilations = 0

    def counting(graph, _):
        nonlocal compilations
        compilations += 1
        return graph.forward

    def step(q: Tensor, lengths: Tensor, given: Mask | None) -> Tensor:
        made = mask.documents(lengths=lengths, length=400, causal=True) if given is None else given
        return backlight.attention(q, q, q, mask=made)

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    q = torch.randn(2, 400, 2, 8, dtype=torch.float64).transpose(1, 2).detach().requires_grad_()
    seen = ran(monkeypatch)
    wanted = 1
    for lengths in ([120, 80, 200], [60, 300, 5], [0, 1, 399], [100, 100, 100, 90], [80, 80, 80, 80, 80]):
        numbers = torch.tensor(lengths)
        given = None if inside else mask.documents(lengths=numbers, length=400, causal=True)
        got, want = (each(q, numbers, given) for each in (compiled, step))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), q)[0] for y in (got, want)))
        wanted = max(wanted, 1 + (len(lengths) > 3))
        assert compilations == wanted
    assert all(call.varlen and call.trusted for call in seen)
    torch._dynamo.reset()


def test_rows_written_in_place_count() -> None:
    """Borders that are older than rows would be a silently wrong mask; `copy_` writes both."""
    length = 256
    q, k, v = (torch.randn(1, 2, length, 16, dtype=torch.float64) for _ in range(3))
    held, new = (mask.documents(lengths=lengths, causal=True) for lengths in ([100, 156], [64, 192]))
    expected = backlight.attention(q, k, v, mask=new)
    held.rows.copy_(new.rows)
    assert "written in place" in str(backlight.explain(q, k, v, mask=held).documents)
    torch.testing.assert_close(backlight.attention(q, k, v, mask=held), expected)
    both = mask.documents(lengths=[100, 156], causal=True).copy_(new)
    assert "written in place" not in str(backlight.explain(q, k, v, mask=both).documents)
    torch.testing.assert_close(backlight.attention(q, k, v, mask=both), expected)
    with torch.inference_mode():
        torch.testing.assert_close(backlight.attention(q, k, v, mask=mask.documents(lengths=[64, 192], causal=True)), expected)


@pytest.mark.parametrize("borders", [[[0, 300]], [[4, 256]], [[0, 200, 100, 256]], [[0, 256], [0, 100]], [[-8, 256]]], ids=str)
def test_borders_out_of_order_are_refused(borders: list[list[int]]) -> None:
    """Kernels of packed sequences read and write where borders say."""
    rows = mask.documents(lengths=[100, 156]).rows
    assert Mask(rows, borders=torch.tensor([[0, 100, 256]], dtype=torch.int32)).borders is not None
    with pytest.raises(ValueError, match="borders must rise from 0 to the number of positions of all entries, 256"):
        Mask(rows, borders=torch.tensor(borders, dtype=torch.int32))


@pytest.mark.parametrize("lengths", [[-5, 300], [1 << 31, 1], [0, 0], [100, -100, 400]], ids=str)
def test_lengths_out_of_range_make_borders_in_order(lengths: list[int]) -> None:
    made = mask.documents(lengths=torch.tensor(lengths), length=256)
    assert made.borders is not None
    assert Mask(**made.state).borders is made.borders


@pytest.mark.parametrize(
    ("lengths", "length", "sentence"),
    [
        ([3, -1], None, "lengths must be at least 0, got -1"),
        ([[3, 1], [-2, 4]], 9, "lengths must be at least 0, got -2"),
        ([5, 5], 6, "lengths must fit into length, 6, got 10 together"),
        ([[1, 2], [4, 4]], 7, "lengths must fit into length, 7, got 8 together"),
    ],
)
def test_lengths_that_the_host_knows_are_looked_at(lengths: list[Any], length: int | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mask.documents(lengths=lengths, length=length)
