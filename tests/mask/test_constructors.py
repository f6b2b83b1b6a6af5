"""Every constructor of `backlight.mask` against a boolean mask that is written from its words alone, entry by entry."""

from __future__ import annotations

import doctest
import inspect
import io
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from backlight import mask
from backlight.mask import Mask


def entries(rows: int, keys: int, sees: Callable[[int, int], bool]) -> Tensor:
    return torch.tensor([[bool(sees(i, j)) for j in range(keys)] for i in range(rows)], dtype=torch.bool).reshape(rows, keys)


def assert_is(found: Mask, rows: int, keys: int, *sees: Callable[[int, int], bool]) -> None:
    """One function for each batch entry."""
    wanted = torch.stack([entries(rows, keys, each) for each in sees])[:, None]
    assert torch.equal(found.dense(rows), wanted)


# --- documents ---------------------------------------------------------------------------------------------------------------

IDS = [[0, 0, 0, 1, 1, 5, 5, 5, 5, 2], [3, 3, 3, 3, 3, 3, 3, -1, -1, -1]]


@pytest.mark.parametrize("causal", [False, True])
def test_documents_from_ids(causal: bool) -> None:
    def of(ids: list[int]) -> Callable[[int, int], bool]:
        return lambda i, j: ids[i] == ids[j] >= 0 and (j <= i or not causal)

    assert_is(mask.documents(IDS[0], causal=causal), 10, 10, of(IDS[0]))
    assert_is(mask.documents(torch.tensor(IDS), causal=causal), 10, 10, of(IDS[0]), of(IDS[1]))


@pytest.mark.parametrize("causal", [False, True])
def test_documents_from_lengths(causal: bool) -> None:
    numbers = [0, 0, 0, 2, 2, 3]
    found = mask.documents(lengths=[3, 0, 2, 1], causal=causal)
    assert_is(found, 6, 6, lambda i, j: numbers[i] == numbers[j] and (j <= i or not causal))
    padded = mask.documents(lengths=torch.tensor([[3, 2], [1, 6]]), length=8, causal=causal)
    both = [0, 0, 0, 1, 1, -1, -1, -1], [0, 1, 1, 1, 1, 1, 1, -1]
    assert_is(
        padded, 8, 8, *[lambda i, j, n=n: n[i] == n[j] >= 0 and (j <= i or not causal) for n in both]
    )  # fmt: skip


def test_a_number_that_comes_back_begins_another_document() -> None:
    assert_is(mask.documents([0, 0, 1, 0]), 4, 4, lambda i, j: {i, j} <= {0, 1} or i == j)


@given(st.lists(st.integers(0, 2), max_size=12), st.booleans())
def test_any_documents(ids: list[int], causal: bool) -> None:
    def one_run(i: int, j: int) -> bool:
        low, high = min(i, j), max(i, j)
        return len(set(ids[low : high + 1])) == 1 and (j <= i or not causal)

    assert_is(mask.documents(ids, causal=causal), len(ids), len(ids), one_run)


# --- sequences ---------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 8))
def test_prefix(a: int, b: int, length: int) -> None:
    assert_is(mask.prefix(a, length), length, length, lambda i, j: j < a or j <= i)
    both = [lambda i, j, n=n: j < n or j <= i for n in (a, b)]
    assert_is(mask.prefix(torch.tensor([a, b]), length), length, length, *both)


SPANS = ([(1, 4)], [(0, 2), (2, 5)], [(3, 3), (6, 20)], [(5, 2), (-3, 2)], [])


@pytest.mark.parametrize("spans", SPANS, ids=str)
@pytest.mark.parametrize("window", [None, 0, 2])
def test_spans(spans: list[tuple[int, int]], window: int | None) -> None:
    def sees(i: int, j: int) -> bool:
        within = any(a <= i < b and a <= j < b for a, b in spans)
        return within or (j <= i and (window is None or i - j <= window))

    assert_is(mask.spans([a for a, _ in spans], [b for _, b in spans], 9, window=window), 9, 9, sees)


def test_spans_of_batch_entries() -> None:
    found = mask.spans(torch.tensor([[1, 5], [0, 0]]), torch.tensor([[3, 7], [4, 0]]), 8)
    both = [[(1, 3), (5, 7)], [(0, 4)]]
    sees = [lambda i, j, s=s: j <= i or any(a <= i < b and a <= j < b for a, b in s) for s in both]
    assert_is(found, 8, 8, *sees)


@pytest.mark.parametrize("size", [1, 2, 5, 11])
def test_blocks_and_chunks(size: int) -> None:
    assert_is(mask.blocks(size, 11), 11, 11, lambda i, j: j // size <= i // size)
    assert_is(mask.chunks(size, 11), 11, 11, lambda i, j: j // size == i // size and j <= i)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**32, 2**40, 2**62])
def test_blocks_and_chunks_longer_than_any_sequence(size: int) -> None:
    """Sums with the size left int32: keys of such chunks were hidden from every row, or torch divided by zero."""
    assert_is(mask.blocks(size, 11), 11, 11, lambda i, j: True)
    assert_is(mask.chunks(size, 11), 11, 11, lambda i, j: j <= i)


def test_blocks_by_their_starts() -> None:
    numbers = [0, 0, 0, 1, 1, 1, 1, 2]
    assert_is(mask.blocks(starts=[7, 3], length=8), 8, 8, lambda i, j: numbers[j] <= numbers[i])
    assert_is(mask.blocks(starts=[], length=3), 3, 3, lambda i, j: True)


@given(st.lists(st.integers(-2, 9), max_size=8))
def test_evict(gone: list[int]) -> None:
    assert_is(mask.evict(gone), len(gone), len(gone), lambda i, j: j <= i < gone[j])


def test_evict_per_head() -> None:
    gone = torch.tensor([[[2, 5, 5, 5, 5], [5, 2, 4, 5, 5]]])
    found = mask.evict(gone).dense()[0]
    for h in range(2):
        assert torch.equal(found[h], entries(5, 5, lambda i, j, h=h: j <= i < gone[0, h, j]))


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 8))
def test_global_first(n: int, window: int, length: int) -> None:
    found = mask.global_first(n, window, length)
    assert_is(found, length, length, lambda i, j: j <= i and (j < n or i - j <= window))


# --- trees -------------------------------------------------------------------------------------------------------------------


def ancestors(parents: list[int], node: int) -> set[int]:
    found = {node}
    while parents[node] >= 0:
        node = parents[node]
        found.add(node)
    return found


@st.composite
def forests(draw) -> list[int]:
    """Parents of nodes in any order."""
    size = draw(st.integers(1, 14))
    order = draw(st.permutations(range(size)))
    parents = [-1] * size
    for place, node in enumerate(order):
        above = draw(st.integers(-1, place - 1))
        parents[node] = -1 if above < 0 else order[above]
    return parents


@given(forests())
def test_tree(parents: list[int]) -> None:
    found = mask.tree(parents)
    assert_is(found, len(parents), len(parents), lambda i, j: j in ancestors(parents, i))
    assert sorted(found.pos[0].tolist()) == list(range(len(parents)))


def in_preorder(parents: list[int]) -> list[int]:
    """The same forest with its nodes numbered as they are met."""
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parents):
        children.setdefault(above, []).append(node)
    order: list[int] = []

    def visit(node: int) -> None:
        order.append(node)
        for child in children.get(node, []):
            visit(child)

    for root in children.get(-1, []):
        visit(root)
    number = {node: place for place, node in enumerate(order)}
    return [number.get(parents[node], -1) for node in order]


@given(forests())
def test_tree_in_preorder_needs_no_positions(parents: list[int]) -> None:
    ordered = in_preorder(parents)
    found = mask.tree(ordered, preorder=True)
    assert found.pos is None
    assert_is(found, len(parents), len(parents), lambda i, j: j in ancestors(ordered, i))


def test_trees_of_batch_entries() -> None:
    both = [[-1, 0, 0, 1], [3, 0, 3, -1]]
    assert_is(mask.tree(both), 4, 4, *[lambda i, j, p=p: j in ancestors(p, i) for p in both])


def test_a_prompt_and_its_drafts() -> None:
    """Rows of the drafts alone."""
    parents = [-1, 0, 1, 2, 2, 3]
    found = mask.tree(parents).last_rows(3)
    assert_is(found, 3, 6, lambda i, j: j in ancestors(parents, i + 3))


# --- intervals, boolean masks, functions -------------------------------------------------------------------------------------


def test_rows() -> None:
    first, end = [0, 2, -5, 3, 1], [2, 4, 9, 3, 0]
    assert_is(mask.rows(first, end), 4, 5, lambda i, j: first[j] <= i < end[j])
    first2, end2 = [3, 0, 0, 1, 2], [4, 1, 0, 2, 3]
    two = mask.rows(first, end, first2, end2)
    assert_is(two, 4, 5, lambda i, j: first[j] <= i < end[j] or first2[j] <= i < end2[j])
    pos = [7, 1, -1]
    placed = mask.rows(first, end, pos=pos)
    assert_is(placed, 3, 5, lambda i, j: first[j] <= pos[i] < end[j])


def test_ends_beyond_32_bits_hide_and_clip_alike() -> None:
    found = mask.rows([-(2**60), 2**60, 0], [2**60, 2**61, 2**40])
    assert_is(found, 3, 3, lambda i, j: j != 1)


@st.composite
def columns_of_runs(draw, most: int) -> list[list[bool]]:
    rows = draw(st.integers(1, 7))
    return [draw(st.lists(st.booleans(), min_size=rows, max_size=rows).filter(lambda c: runs(c) <= most)) for _ in range(5)]


def runs(column: list[bool]) -> int:
    return sum(now and not before for before, now in zip([False, *column], column, strict=False))


@given(columns_of_runs(2))
def test_from_dense(columns: list[list[bool]]) -> None:
    visible = torch.tensor(columns).T
    found = mask.from_dense(visible)
    assert torch.equal(found.dense(visible.shape[0])[0, 0], visible)
    assert found.rows.shape[2] == (4 if any(runs(column) == 2 for column in columns) else 2)


@given(columns_of_runs(4).filter(lambda columns: max(map(runs, columns)) > 2))
def test_from_dense_refuses_three_runs(columns: list[list[bool]]) -> None:
    many = next(j for j, column in enumerate(columns) if runs(column) > 2)
    with pytest.raises(
        ValueError, match=rf"key {many} \(batch entry 0, head 0\) is seen by {runs(columns[many])} runs of rows"
    ):
        mask.from_dense(torch.tensor(columns).T)


def test_from_dense_of_batch_and_heads() -> None:
    visible = torch.zeros(2, 3, 4, 5, dtype=torch.bool)
    visible[1, 2, 1:3, 4] = True
    assert torch.equal(mask.from_dense(visible).dense(4), visible)
    assert torch.equal(mask.from_dense(visible[:, 2]).dense(4), visible[:, 2:])
    assert mask.from_dense(visible[:, :, :0]).dense(0).shape == (2, 3, 0, 5)
    assert mask.from_dense(visible[..., :0]).dense(4).shape == (2, 3, 4, 0)


def test_from_mask_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    """In strips of columns, and as FlexAttention's own `create_mask` evaluates it."""
    from torch.nn.attention.flex_attention import create_mask

    document = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    reach = torch.tensor([1, 2, 9])

    def sees(b, h, q, k):
        return (document[b, q] == document[b, k]) & (q >= k) & (q - k <= reach[h])

    wanted = create_mask(sees, 2, 3, 6, 6, device="cpu")
    assert torch.equal(mask.from_mask_mod(sees, 2, 3, 6, 6, "cpu").dense(), wanted)
    monkeypatch.setattr("backlight.mask.given.STRIP", 50)
    assert torch.equal(mask.from_mask_mod(sees, 2, 3, 6, 6, "cpu").dense(), wanted)
    plain = mask.from_mask_mod(lambda b, h, q, k: q >= k, None, None, 3, 6, "cpu")
    assert torch.equal(plain.dense(3)[0, 0], entries(3, 6, lambda i, j: i >= j))


def test_from_mask_mod_names_the_key_of_a_later_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backlight.mask.given.STRIP", 18)
    with pytest.raises(ValueError, match=r"key 4 .* is seen by 3 runs"):
        mask.from_mask_mod(lambda b, h, q, k: (k != 4) | (q % 2 == 0), None, None, 6, 6, "cpu")


# --- drawings ----------------------------------------------------------------------------------------------------------------

DRAWN = [name for name in mask.__all__ if name not in ("Mask", "from_mask_mod", "from_dense")]


@pytest.mark.parametrize("name", DRAWN)
def test_the_drawing_in_the_docstring_is_the_mask(name: str) -> None:
    """The first call of a docstring and the drawing below it, which may have another beside it."""
    text = inspect.getdoc(getattr(mask, name)) or ""
    calls = [m.group(0) for m in re.finditer(rf"^ *{name}\(.*$", text, re.M)]
    assert calls, f"{name} draws nothing"
    sources = re.findall(rf"{name}\((?:[^()]|\([^()]*\))*\)", calls[0])
    drawn = [line for line in text[text.index(calls[0]) :].splitlines()[1:] if re.match(r"^ +[x.]( [x.])+", line)]
    for place, source in enumerate(sources):
        found = eval(f"mask.{source}", {"mask": mask})
        keys = found.rows.shape[3]
        pictures = [re.findall(r"(?<!\S)[x.](?: [x.])+(?!\S)", line)[place] for line in drawn]
        assert all(len(line.split()) == keys for line in pictures)
        wanted = torch.tensor([[cell == "x" for cell in line.split()] for line in pictures])
        assert torch.equal(found.dense(len(pictures))[0, 0], wanted), source


def test_docstrings_hold_no_doctests_that_nobody_runs() -> None:
    finder = doctest.DocTestFinder()
    assert not [test for test in finder.find(mask, "mask") if test.examples]


# --- the tensors -------------------------------------------------------------------------------------------------------------


def test_a_mask_is_its_tensors() -> None:
    found = mask.tree([-1, 0, 0])
    kept = io.BytesIO()
    torch.save(found.state, kept)
    kept.seek(0)
    again = Mask(**torch.load(kept, weights_only=True))
    assert torch.equal(again.rows, found.rows)
    assert torch.equal(again.pos, found.pos)
    assert found.to("meta").rows.device.type == "meta"
    assert found.to("meta").pos.device.type == "meta"
    assert repr(found) == "Mask(rows (1, 1, 2, 3), pos (1, 3), cpu)"
    leaves, shape = torch.utils._pytree.tree_flatten({"m": found})
    assert [x.shape for x in leaves] == [(1, 1, 2, 3), (1, 3)]
    assert torch.utils._pytree.tree_unflatten(leaves, shape)["m"].rows is found.rows


@pytest.mark.parametrize("sq", [0, 2, 5, 8])
def test_last_rows(sq: int) -> None:
    """Aligned to the bottom right, as causal is."""
    found = mask.documents(lengths=[2, 3], causal=True).last_rows(sq)
    numbers = [0, 0, 1, 1, 1]
    shift = 5 - sq
    assert_is(found, sq, 5, lambda i, j: i + shift >= j and numbers[i + shift] == numbers[j] if i + shift >= 0 else False)


def test_constructors_wait_for_no_device() -> None:
    """On tensors without values."""
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    for found in (
        mask.documents(ids, causal=True),
        mask.documents(lengths=ids, length=8),
        mask.prefix(ids[:, 0], 8),
        mask.spans(ids, ids, 8, window=2),
        mask.blocks(starts=ids, length=8),
        mask.evict(ids),
        mask.global_first(ids[:, 0], 2, 8),
        mask.tree(ids),
        mask.tree(ids, preorder=True),
        mask.rows(ids, ids, ids, ids, pos=ids),
        mask.chunks(2, 8, device="meta"),
    ):
        assert found.rows.is_meta
        assert found.rows.shape[3] == 8


# --- bad input ---------------------------------------------------------------------------------------------------------------

FLOAT, INT = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: mask.documents(), "documents needs ids or lengths"),
    (lambda: mask.documents([0], lengths=[1]), "documents needs ids or lengths"),
    (lambda: mask.documents([0], length=1), "length goes with lengths"),
    (lambda: mask.documents(FLOAT), r"ids must be whole numbers, got torch.float32"),
    (lambda: mask.documents([0.5, 1.0]), r"ids must be whole numbers, got torch.float32"),
    (lambda: mask.documents("abc"), r"ids must be whole numbers or a tensor of them, got 'abc'"),
    (lambda: mask.documents(INT[None, None]), r"ids must be \[S\] or \[B, S\], got shape \(1, 1, 3\)"),
    (lambda: mask.documents(INT, causal=1), "causal must be a bool, got 1"),
    (lambda: mask.documents(INT == 0), "ids must be whole numbers, got torch.bool"),
    (lambda: mask.prefix(2, -1), "length must be an int >= 0, got -1"),
    (lambda: mask.prefix(INT[None], 3), r"lengths must be a number or \[B\]"),
    (lambda: mask.prefix(2.5, 3), "lengths must be whole numbers, got torch.float32"),
    (lambda: mask.spans([1], [2, 3], 4), r"ends must have the shape of starts, \(1, 1\), got \(1, 2\)"),
    (lambda: mask.spans([1], [2], 4, window=-1), "window must be an int >= 0 or None, got -1"),
    (lambda: mask.spans(INT, INT.to("meta"), 4), "ends must be on the device of starts, cpu, got meta"),
    (lambda: mask.blocks(length=3), "blocks needs size or starts"),
    (lambda: mask.blocks(2, 3, starts=[0]), "blocks needs size or starts"),
    (lambda: mask.blocks(2), "blocks needs length"),
    (lambda: mask.blocks(0, 3), "size must be an int >= 1, got 0"),
    (lambda: mask.chunks(2.0, 3), "size must be an int >= 1, got 2.0"),
    (lambda: mask.evict(INT[None, None, None]), r"evicted_at must be \[Sk\], \[B, Sk\] or \[B, H, Sk\]"),
    (lambda: mask.global_first(1, None, 3), "window must be an int >= 0, got None"),
    (lambda: mask.tree([-1, 1]), "the parent of node 1 must be another node below 2, or negative for a root, got 1"),
    (lambda: mask.tree([-1, 7]), "the parent of node 1 must be another node below 2"),
    (lambda: mask.tree([1, 2, 0]), "parents must form a tree, got a circle above node 0"),
    (lambda: mask.tree([1, -1], preorder=True), "the parent of node 0 must be an earlier node"),
    (lambda: mask.tree([-1, 0, 0, 1], preorder=True), "with preorder=True each subtree must be one run of nodes"),
    (lambda: mask.rows(INT, FLOAT), "end must be whole numbers, got torch.float32"),
    (lambda: mask.rows(INT, INT[:2]), "end must have as many keys as first, 3, got 2"),
    (lambda: mask.rows(INT.expand(2, 3), INT.expand(4, 3)), "the ends of a mask must agree in batch and heads"),
    (lambda: mask.rows(INT, INT, INT), "first2 and end2 must come together"),
    (lambda: mask.rows(INT, INT.to("meta")), "end must be on the device of first, cpu, got meta"),
    (lambda: mask.rows(INT, INT, pos=INT.to("meta")), "pos must be on the device of rows, cpu, got meta"),
    (lambda: mask.rows(INT, INT, pos=FLOAT), "pos must be whole numbers, got torch.float32"),
    (lambda: mask.from_dense(FLOAT), "visible must be a boolean tensor, got torch.float32"),
    (lambda: mask.from_dense([[True]]), "visible must be a boolean tensor"),
    (lambda: mask.from_dense(FLOAT == 0), r"visible must be \[Sq, Sk\], \[B, Sq, Sk\] or \[B, H, Sq, Sk\]"),
    (lambda: mask.from_mask_mod(3, None, None, 2, 2, "cpu"), "mask_mod must be a function"),
    (lambda: mask.from_mask_mod(lambda b, h, q, k: q, None, None, 2, 2, "cpu"), "mask_mod must return a boolean tensor"),
    (lambda: mask.from_mask_mod(lambda b, h, q, k: q == k, 0, None, 2, 2, "cpu"), "B must be an int >= 1 or None, got 0"),
    (lambda: mask.chunks(2, 3, device="gpu7"), "device must be a torch.device, its name or None, got 'gpu7'"),
    (lambda: mask.documents([0], device=2.5), "device must be a torch.device, its name or None, got 2.5"),
    (lambda: Mask(INT), r"rows must be \[B, H, ends, Sk\], got shape \(3,\)"),
    (lambda: Mask(INT.int()[None, None].expand(1, 3, 3)[None]), "rows must hold 2 or 4 ends of each key"),
    (lambda: Mask(torch.zeros(1, 1, 2, 3)), "rows must be int32, got torch.float32"),
    (lambda: Mask("x"), "rows must be a torch.Tensor, got 'x'"),
    (lambda: Mask(torch.zeros(1, 1, 2, 3).int(), INT[None]), "pos must be int32, got torch.int64"),
    (
        lambda: Mask(torch.zeros(2, 1, 2, 3).int(), torch.zeros(3, 3).int()),
        "pos must have the batch size of rows, 2, or 1, got 3",
    ),
    (lambda: mask.chunks(1, 3).dense(-1), "sq must be an int >= 0 or None, got -1"),
    (lambda: mask.tree([-1, 0]).dense(3), "sq must be the number of positions, 2, or None, got 3"),
    (lambda: mask.tree([-1, 0]).last_rows(3), "sq must be at most the number of positions, 2, got 3"),
]


@pytest.mark.parametrize(("wrong", "sentence"), BAD, ids=[sentence[:50] for _, sentence in BAD])
def test_bad_input_gets_one_sentence(wrong: Callable[[], object], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence) as error:
        wrong()
    assert "\n" not in str(error.value)
