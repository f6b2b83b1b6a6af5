"""Attention with a mask: the oracle against plain torch with a dense mask, the tiled backend against the oracle.

And what a mask goes through on its way: operators, `vmap`, compilers, remembered calls, checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import backlight
import backlight.nn
from backlight import attention, attention_varlen, mask
from backlight.api import call_of
from backlight.backends.tiled.intervals import Intervals
from backlight.config import Config, override
from backlight.mask import Mask
from backlight.reference import oracle
from backlight.spec import AttentionSpec
from cases import FP32, FP64, MASKS, Case, Problem, case_id
from gate import judge
from running import leaves, run

BATCH, HEADS, GROUPS, LENGTH, D = 2, 4, 2, 23, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(sq: int = LENGTH, sk: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    return drawn(BATCH, HEADS, sq, D), drawn(BATCH, GROUPS, sk, D, seed=1), drawn(BATCH, GROUPS, sk, D, seed=2)


def plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """softmax over visible keys, by torch's own operations."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = torch.exp(q @ k.mT * q.shape[-1] ** -0.5) * visible
    return weights @ v / weights.sum(dim=-1, keepdim=True).clamp(min=1e-300)


MADE: dict[str, Callable[[], Mask]] = {
    "documents": lambda: mask.documents(lengths=[9, 3, 11]),
    "documents, causal": lambda: mask.documents(lengths=torch.tensor([[9, 3, 11], [1, 20, 0]]), length=LENGTH, causal=True),
    "prefix": lambda: mask.prefix([4, 11], LENGTH),
    "spans": lambda: mask.spans([3, 14], [8, 20], LENGTH),
    "spans, window": lambda: mask.spans([[3, 14], [0, 22]], [[8, 20], [2, 23]], LENGTH, window=3),
    "tree": lambda: mask.tree([-1, *[i // 2 for i in range(LENGTH - 1)]]),
    "tree, preorder": lambda: mask.tree([-1, *range(10), 4, *range(11, 22)], preorder=True),
    "blocks": lambda: mask.blocks(4, LENGTH),
    "chunks": lambda: mask.chunks(5, LENGTH),
    "evict": lambda: mask.evict((torch.arange(LENGTH) + 5).expand(1, HEADS, LENGTH) + torch.arange(HEADS)[:, None]),
    "global_first": lambda: mask.global_first([1, 3], 4, LENGTH),
    "rows": lambda: mask.rows([0] * LENGTH, range(LENGTH), [20] * LENGTH, [22] * LENGTH),
    "from_dense": lambda: mask.from_dense((torch.arange(LENGTH)[:, None] + torch.arange(LENGTH)) % 7 < 60),
    "from_mask_mod": lambda: mask.from_mask_mod(lambda b, h, q, k: (q - k).abs() <= h, None, HEADS, LENGTH, LENGTH, "cpu"),
}
OPTIONS: dict[str, dict[str, object]] = {"alone": {}, "causal": {"causal": True}, "window": {"window": (6, 3)}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_every_constructor_is_the_dense_mask(make: Callable[[], Mask], options: dict[str, object]) -> None:
    """Forward and gradients, by oracle, tiled backend and plain torch."""
    made = make()
    spec = AttentionSpec(**options)  # type: ignore[arg-type]
    visible = made.dense(LENGTH) & spec.allowed(LENGTH, LENGTH)
    inputs = [x.requires_grad_() for x in qkv()]
    dy = drawn(BATCH, HEADS, LENGTH, D, seed=7)
    wanted = plain(*inputs, visible)
    gradients = torch.autograd.grad(wanted, inputs, dy)
    trace = oracle(call_of(*inputs, mask=made, **options), dy)
    y = attention(*inputs, mask=made, **options)
    ours = torch.autograd.grad(y, inputs, dy)
    for found in ((trace.y, trace.dq, trace.dk, trace.dv), (y, *ours)):
        for one, other in zip(found, (wanted, *gradients), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sq", [1, 9, 40])
def test_last_rows_go_with_causal(sq: int) -> None:
    """The bottom right for both."""
    whole = mask.documents(lengths=[9, 3, 11])
    q, k, v = qkv(sq)
    y = attention(q, k, v, mask=whole.last_rows(sq), causal=True)
    same = attention(q, k, v, mask=mask.documents(lengths=[9, 3, 11], causal=True).last_rows(sq))
    torch.testing.assert_close(y, same)
    if sq <= LENGTH:
        padded = torch.cat([q.new_zeros(BATCH, HEADS, LENGTH - sq, D), q], dim=2)
        torch.testing.assert_close(y, attention(padded, k, v, mask=whole, causal=True)[:, :, LENGTH - sq :])


# --- the tiled backend -------------------------------------------------------------------------------------------------------

TILES = (Config(16, 16, 8, 1), Config(7, 5, 3, 3), Config(1, 64, 1, 8))


@pytest.mark.parametrize("config", TILES, ids=str)
@pytest.mark.parametrize("case", MASKS, ids=case_id)
def test_any_tiles(case: Case, config: Config) -> None:
    problem = case.make(FP32)
    with override("tiled", config):
        found = run(problem, "tiled")
    verdict = judge(problem.call, problem.dy, problem.dlse, found)
    assert verdict.ok, verdict


@st.composite
def masked_cases(draw) -> Case:
    packed = draw(st.booleans())
    length = st.integers(0, 20)
    pairs = draw(st.lists(st.tuples(length, length), min_size=1, max_size=3))
    lengths = {"lengths_q": tuple(a for a, _ in pairs), "lengths_k": tuple(b for _, b in pairs)} if packed else {}
    pos = draw(st.booleans())
    spatial = {
        "causal": draw(st.booleans()),
        "window": (draw(st.none() | st.integers(0, 9)), draw(st.none() | st.integers(0, 9))),
    }
    tau = draw(st.booleans()) and not (pos and (spatial["causal"] or spatial["window"] != (None, None)))
    hkv = draw(st.integers(1, 2))
    return Case(
        "drawn",
        b=draw(st.integers(1, 2)),
        hkv=hkv,
        hq=hkv * draw(st.integers(1, 2)),
        sq=draw(length),
        sk=draw(length),
        d=4,
        mask=draw(st.sampled_from(["run", "two runs", "documents", "nothing", "everything"])),
        mask_of=tuple(draw(st.sets(st.sampled_from(["batch", "heads"])))),
        pos=pos,
        bias=draw(st.none() | st.integers(1, 9)),
        sink=draw(st.booleans()),
        gate=draw(st.booleans()),
        softcap=draw(st.none() | st.just(1.5)),
        tau=(-0.7, 0.4) if tau else None,
        dlse=draw(st.booleans()),
        **spatial,
        **lengths,
    )


configs = st.builds(
    Config, block_m=st.integers(1, 20), block_n=st.integers(1, 20), edge=st.integers(1, 20), heads=st.integers(1, 4)
)


@settings(max_examples=80)
@given(masked_cases(), configs, st.integers(0, 99))
def test_drawn_masks(case: Case, config: Config, seed: int) -> None:
    problem = case.make(FP64, seed)
    with override("tiled", config):
        found = run(problem, "tiled")
    trace = oracle(problem.call, problem.dy, problem.dlse)
    for name, value in found.items():
        torch.testing.assert_close(value, trace[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_empty_tiles_are_left_out_and_full_ones_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 x 8 tiles over two documents, half are visited, and all of those are full."""
    q = drawn(1, 2, 64, D)
    seen: list[str] = []
    real = Intervals.mask_

    def counted(self: Intervals, values: Tensor, tile) -> None:
        seen.append(self.kind(tile))
        real(self, values, tile)

    monkeypatch.setattr(Intervals, "mask_", counted)
    with override("tiled", Config(8, 8, 8, 2)):
        attention(q, q, q, mask=mask.documents(lengths=[32, 32]))
        assert seen == ["full"] * 32
        seen.clear()
        attention(q, q, q, mask=mask.documents(lengths=[32, 32], causal=True))
        assert sorted(set(seen)) == ["full", "partial"]
        assert len(seen) == 20


def test_deterministic_backward_repeats_bitwise() -> None:
    problem = next(case for case in MASKS if case.name == "mask,everything,batched,sq<sk").make(FP32)
    once, again = run(problem, "tiled", deterministic=True), run(problem, "tiled", deterministic=True)
    assert all(torch.equal(once[name], again[name]) for name in once)


# --- what a mask goes through ------------------------------------------------------------------------------------------------


def test_a_packed_call_clips_to_its_segments() -> None:
    """Rows are counted over all of q, and nothing is seen across a border."""
    x = drawn(12, HEADS, D)
    cu = torch.tensor([0, 5, 12])
    everything = mask.rows([-3] * 12, [99] * 12)
    torch.testing.assert_close(attention_varlen(x, x, x, cu, mask=everything), attention_varlen(x, x, x, cu))
    late = mask.rows([0] * 5 + [8] * 7, [3] * 5 + [12] * 7)
    y = attention_varlen(x, x, x, cu, mask=late)
    assert not y[3:8].any()
    batched = x.transpose(0, 1)[None]
    torch.testing.assert_close(y[8:].transpose(0, 1), attention(batched[:, :, 8:12], batched[:, :, 5:], batched[:, :, 5:])[0])


def test_vmap_over_masks() -> None:
    """Over masks alone, over everything, and over neither."""
    q, k, v = qkv()
    several = [mask.chunks(size, LENGTH) for size in (2, 5, 9)]
    rows = torch.stack([each.rows for each in several])
    by_map = torch.vmap(lambda rows: attention(q, k, v, mask=Mask(rows)))(rows)
    one_by_one = torch.stack([attention(q, k, v, mask=each) for each in several])
    torch.testing.assert_close(by_map, one_by_one)
    qs = torch.stack([q, q + 1, q * 2])
    both = torch.vmap(lambda q, m: attention(q, k, v, mask=m))(qs, _stacked(several))
    torch.testing.assert_close(both[2], attention(qs[2], k, v, mask=several[2]))
    shared = torch.vmap(lambda q: attention(q, k, v, mask=several[1]))(qs)
    torch.testing.assert_close(shared[1], attention(qs[1], k, v, mask=several[1]))
    own = mask.evict((torch.arange(LENGTH) + 3).expand(BATCH, HEADS, LENGTH))
    torch.testing.assert_close(torch.vmap(lambda q: attention(q, k, v, mask=own))(qs)[2], attention(qs[2], k, v, mask=own))


def _stacked(masks: list[Mask]) -> Mask:
    _, shape = torch.utils._pytree.tree_flatten(masks[0])
    return torch.utils._pytree.tree_unflatten([torch.stack([m.rows for m in masks])], shape)


def test_gradients_of_a_mapped_mask() -> None:
    q, k, v = qkv()
    rows = torch.stack([mask.chunks(size, LENGTH).rows for size in (2, 5)])

    def loss(q: Tensor, rows: Tensor) -> Tensor:
        return attention(q, k, v, mask=Mask(rows)).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(q, rows)
    for n in range(2):
        torch.testing.assert_close(found[n], torch.func.grad(loss)(q, rows[n]))


def test_vmap_over_positions_is_refused() -> None:
    q, k, v = qkv()
    rows = mask.chunks(2, LENGTH).rows
    pos = torch.arange(LENGTH, dtype=torch.int32).expand(3, 1, LENGTH)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.vmap over pos is not supported, which has no axis of heads"):
        torch.vmap(lambda pos: attention(q, k, v, mask=Mask(rows, pos)))(pos)


@pytest.mark.clean_memory
def test_compiled_with_changing_masks() -> None:
    """One graph, compiled once, for masks of one shape."""
    torch._dynamo.reset()
    compilations = 0

    def counting(graph, _):
        nonlocal compilations
        compilations += 1
        return graph.forward

    def step(q: Tensor, k: Tensor, v: Tensor, m: Mask) -> Tensor:
        return attention(q, k, v, mask=m, causal=True)

    compiled = torch.compile(step, fullgraph=True, backend=counting)
    q, k, v = (x.requires_grad_() for x in qkv())
    for size in (2, 5, 9):
        made = mask.blocks(size, LENGTH)
        y = compiled(q, k, v, made)
        torch.testing.assert_close(y, step(q, k, v, made))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), q)[0], torch.autograd.grad(step(q, k, v, made).sum(), q)[0])
    assert compilations == 1
    torch._dynamo.reset()


@pytest.mark.clean_memory
def test_compiled_constructor() -> None:
    """A mask may be made inside the graph."""
    torch._dynamo.reset()

    def step(q: Tensor, ids: Tensor) -> Tensor:
        return attention(q, q, q, mask=mask.documents(ids, causal=True))

    q, ids = drawn(BATCH, HEADS, LENGTH, D), (torch.arange(LENGTH) // 6).expand(BATCH, -1).contiguous()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, ids), step(q, ids))
    torch._dynamo.reset()


@pytest.mark.clean_memory
@pytest.mark.parametrize("name", ["mask,two runs", "mask,everything,batched,sq<sk", "mask,pos,varlen,tau"])
def test_opcheck(name: str) -> None:
    from backlight import operators

    problem = next(case for case in MASKS if case.name == name).make(FP32)
    args = [
        x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
        for x in operators.pack(problem.call, None)
    ]
    torch.library.opcheck(torch.ops.backlight.attention.default, (*args, False))


def test_a_remembered_call_reads_the_new_mask() -> None:
    q, k, v = qkv()
    for _ in range(2):
        for size in (2, 5):
            made = mask.chunks(size, LENGTH)
            torch.testing.assert_close(attention(q, k, v, mask=made), plain(q, k, v, made.dense()))


def test_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = (x.requires_grad_() for x in qkv())
    made = mask.tree([-1, *[i // 2 for i in range(LENGTH - 1)]])
    wanted = torch.autograd.grad(attention(q, k, v, mask=made).sum(), q)[0]
    y = checkpoint(lambda q: attention(q, k, v, mask=made), q, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), q)[0], wanted)


def test_autocast_leaves_a_mask_alone() -> None:
    q, k, v = (x.float() for x in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        y = attention(q, k, v, mask=mask.chunks(5, LENGTH))
    assert y.dtype == torch.bfloat16


def test_backends_without_masks_say_so() -> None:
    from backlight import registry

    q, k, v = qkv()
    call = call_of(q, k, v, mask=mask.tree([-1] * LENGTH))
    for name in registry.names():
        backend = registry.get(name)
        unknown = {"rows", "pos"} - backend.takes
        words = {"rows": "masks by row intervals", "pos": "masks with positions of rows"}
        if unknown and not backend.available():
            assert set(registry.why_not(backend, call)) == {f"does not take {words[feature]}" for feature in unknown}
    assert {"rows", "pos"} <= registry.get("tiled").takes


# --- bad input ---------------------------------------------------------------------------------------------------------------


def rows_of(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


BAD: list[tuple[object, str]] = [
    (torch.ones(LENGTH, LENGTH) > 0, "mask must be a backlight.mask.Mask or None, got a tensor .*from_dense makes one"),
    ("causal", "mask must be a backlight.mask.Mask or None, got 'causal'"),
    (
        Mask(rows_of(1, 1, 2, 7)),
        r"the rows of a mask must be \[1 or 2, 1 or 4, 2 or 4, 23\] \(batch, query heads, ends, keys\)",
    ),
    (Mask(rows_of(3, 1, 2, LENGTH)), r"the rows of a mask must be .* got shape \(3, 1, 2, 23\)"),
    (Mask(rows_of(1, 3, 2, LENGTH)), r"the rows of a mask must be .* got shape \(1, 3, 2, 23\)"),
    (Mask(rows_of(1, 1, 2, LENGTH), rows_of(1, 5)), r"the pos of a mask must be \[1 or 2, 23\] \(batch, rows of q\)"),
    (Mask(rows_of(1, 1, 2, LENGTH).to("meta")), "the rows of a mask must be on the device of q, cpu, got meta"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD, ids=[sentence[:40] for _, sentence in BAD])
@pytest.mark.parametrize("call", [attention, backlight.explain, backlight.statistics], ids=lambda f: f.__name__)
def test_a_bad_mask_gets_one_sentence(call: Callable[..., object], bad: object, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence) as error:
        call(*qkv(), mask=bad)
    assert "\n" not in str(error.value)


def test_tau_does_not_count_what_is_tested_twice() -> None:
    tree = mask.tree([-1] * LENGTH)
    tau = torch.zeros(HEADS, dtype=torch.float64)
    attention(*qkv(), mask=tree, tau=tau)
    for option in ({"causal": True}, {"window": (3, None)}):
        with pytest.raises(
            ValueError, match="tau counts visible keys, which causal or window beside a mask with pos do not allow"
        ):
            attention(*qkv(), mask=tree, tau=tau, **option)


def test_a_packed_call_has_one_batch_entry() -> None:
    x = drawn(LENGTH, HEADS, D)
    with pytest.raises(ValueError, match=r"the rows of a mask must be \[1, 1 or 4, 2 or 4, 23\]"):
        attention_varlen(x, x, x, torch.tensor([0, LENGTH]), mask=Mask(rows_of(2, 1, 2, LENGTH)))


def test_cases_cover_what_masks_can_be() -> None:
    assert {case.mask for case in MASKS} == {"run", "two runs", "documents", "nothing", "everything"}
    assert {(), ("batch",), ("heads",), ("batch", "heads")} == {case.mask_of for case in MASKS}
    assert any(case.pos and case.lengths_q for case in MASKS)
    partly: list[Problem] = [case.make(FP32) for case in MASKS if case.mask in ("run", "two runs")]
    assert all(leaves(problem.call) for problem in partly)
