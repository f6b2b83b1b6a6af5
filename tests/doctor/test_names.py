"""FlashAttention-3 and FlexAttention by name: what is said when they are absent, and that layouts and keywords arrive.

FlashAttention-3's operators are replaced by the oracle in its own layout, so that the adapter around them is what is tested.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sweep import VARIANTS
from torch import Tensor

import backlight
from backlight import doctor
from backlight.call import Call
from backlight.doctor.steps.compare import compare
from backlight.doctor.subject import names
from backlight.doctor.subject.subject import Subject
from backlight.peers import fa3, flex
from backlight.problems import inputs
from backlight.reference import oracle
from backlight.spec import AttentionSpec

OPTIONS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0"
)


def as_call(
    q, k, v, cu_q=None, cu_k=None, max_q=None, max_k=None, scale=None, causal=False, left=-1, right=-1, softcap=0.0
) -> Call:
    window = (None if left < 0 else left, None if right < 0 or causal else right)
    spec = AttentionSpec(causal=causal, window=window, scale=scale, softcap=softcap or None)
    if cu_q is None:
        return Call(spec, *(x.transpose(1, 2) for x in (q, k, v)))
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    return Call(spec, *(x.transpose(0, 1)[None] for x in (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def own_layout(x: Tensor, like: Tensor) -> Tensor:
    return (x.transpose(1, 2) if like.dim() == 4 else x[0].transpose(0, 1)).contiguous().to(like.dtype)


def forward(q, k, v, *options):
    found = oracle(as_call(q, k, v, *options))
    return own_layout(found.y, q), (found.lse if q.dim() == 4 else found.lse[0]).float().clone(), q.new_empty(0)


def backward(do, q, k, v, o, lse, *options):
    found = oracle(as_call(q, k, v, *options), do.transpose(1, 2) if q.dim() == 4 else do.transpose(0, 1)[None])
    return (*(own_layout(found[name], x) for name, x in (("dq", q), ("dk", k), ("dv", v))), lse.clone())


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(f"fwd(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor, Tensor)")
    library.define(
        f"bwd(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.impl("fwd", forward, "CPU")
    library.impl("bwd", backward, "CPU")
    monkeypatch.setattr(fa3, "absent", lambda: None)
    monkeypatch.setattr(fa3, "load", lambda: None)
    monkeypatch.setattr(fa3, "on_cuda", lambda name, q: None)
    yield
    library._destroy()


@pytest.mark.parametrize(
    "variant", ["plain", "causal", "window", "two-sided", "gqa", "longer keys", "scale", "softcap", "packed"]
)
def test_fa3_is_told_everything(variant: str, operators: None) -> None:
    spec, options = VARIANTS[variant]
    problem = inputs.make(spec, (2, 4, 72, 32), dtype=torch.bfloat16, **options)
    out = Subject(names.named("fa3"), layout="BHSD").run(problem.call, problem.dy)
    assert set(out.values) == {"o", "lse", "dq", "dk", "dv"}
    assert not [n for n, x in out.values.items() if compare(n, x, problem).bad]


def test_fa3_says_what_it_cannot_do(operators: None) -> None:
    q = torch.zeros(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match="fp16 and bf16 only"):
        names.named("fa3")(q, q, q)
    with pytest.raises(NotImplementedError, match="D = Dv"):
        names.named("fa3")(q.bfloat16(), q.bfloat16(), q.bfloat16()[..., :8])


def test_fa3_without_its_library(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """The library may be named by an environment variable, as in the benchmarks; what is missing is said."""
    q = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)
    monkeypatch.delenv(fa3.VARIABLE, raising=False)
    with pytest.raises(NotImplementedError, match="BACKLIGHT_FA3 names no library"):
        names.named("fa3")(q, q, q)
    monkeypatch.setenv(fa3.VARIABLE, str(tmp_path / "_C.so"))
    with pytest.raises(NotImplementedError, match="a file that does not exist"):
        names.named("fa3")(q, q, q)
    (tmp_path / "_C.so").touch()
    with pytest.raises(NotImplementedError, match="fa3 needs a CUDA device"):
        names.named("fa3")(q, q, q)


@pytest.mark.clean_memory
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["plain", "causal", "two-sided", "gqa", "longer keys", "softcap", "bias", "packed"])
def test_flex_is_told_everything(variant: str) -> None:
    spec, options = VARIANTS[variant]
    problem = inputs.make(spec, (2, 4, 72, 32), dtype=torch.float32, **options)
    out = Subject(names.named("flex"), layout="BHSD").run(problem.call)
    assert not [n for n, x in out.values.items() if compare(n, x, problem).bad]


def test_flex_is_prepared_once_for_each_geometry() -> None:
    """A compiled function is found again by the next seed; compiling takes seconds."""
    numbers = flex.Numbers(None, 2.0, 0, 0, False)
    assert flex.prepared(numbers, False, False) is flex.prepared(flex.Numbers(None, 2.0, 0, 0, False), False, False)
    spec, device = AttentionSpec(causal=True), torch.device("cpu")
    pairs = flex.Pairs(spec, 16, 16, None, device)
    assert flex.kept_block_mask(pairs) is flex.kept_block_mask(flex.Pairs(*pairs))


def test_the_longest_of_packed_sequences_is_told() -> None:
    """As a caller tells it: not the length of all of them together."""
    told = set()

    def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False):
        told.add((max_seqlen_q, max_seqlen_k))
        return backlight.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal, backend="tiled")

    borders = torch.tensor([0, 5, 12, 16], dtype=torch.int32), torch.tensor([0, 9, 12, 24], dtype=torch.int32)
    report = doctor.diagnose(attention, AttentionSpec(causal=True), shape=(1, 2, 16, 8), sk=24, cu_seqlens=borders)
    assert report.verdict == "healthy", report.headline
    assert (7, 12) in told
    assert not told & {(16, 24)}
