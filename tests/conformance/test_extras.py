"""What a call returns besides y and lse, and keeps beside y: the largest logits (eq. 72), the low half of y (eq. 103)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from extras import examine, with_low
from torch import Tensor

import backlight
from backlight import operators
from backlight.reference import oracle
from cases import BF16, EXTREMES, FP16, FP32, MASKS, PACKED, PAIR_BIAS, SINGLES, TOGETHER, Case, case_id

# every kind of call; the rest of the list is about lengths and sizes
SOME = (*SINGLES, *TOGETHER, *PACKED, *EXTREMES, *MASKS, *PAIR_BIAS[:8])
EXACT = [case for case in SOME if case.tau is None]


@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_largest_logits(case: Case) -> None:
    examine(case, FP32, "tiled")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_largest_logits_on_cuda(case: Case, backend: str) -> None:
    examine(case, BF16, backend, "cuda")


@pytest.mark.parametrize("case", EXACT, ids=case_id)
def test_gradients_with_the_low_half(case: Case) -> None:
    with_low(case, FP16, "tiled")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("case", EXACT, ids=case_id)
def test_gradients_with_the_low_half_on_cuda(case: Case, backend: str) -> None:
    with_low(case, BF16, backend, "cuda")


def tied(dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """q, k, v, dy: two equal keys on top, a tail of weight 2^-13, dy of one sign per column, so that all ties of y break one
    way (eq. 101)."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.zeros(1, 1, 256, 16), torch.zeros(1, 1, 64, 16)
    q[..., 0], k[..., 2:, 0] = 8.0, -26.0
    k[..., 1] = torch.randn(64, generator=generator)
    v, dy = torch.zeros(1, 1, 64, 16), torch.rand(1, 1, 256, 16, generator=generator) + 0.5
    v[..., :2, :] = 1 + torch.rand(2, 16, generator=generator)
    return tuple(x.to(dtype).to(device) for x in (q, k, v, dy))


def error_of_dq(exact_delta: bool, backend: str, device: str = "cpu") -> float:
    q, k, v, dy = tied(BF16, device)
    leaf = q.clone().requires_grad_()
    y = backlight.attention(leaf, k, v, backend=backend, exact_delta=exact_delta)
    (dq,) = torch.autograd.grad(y, leaf, dy)
    call = backlight.api.call_of(*(x.cpu() for x in (q, k, v)))
    wanted = oracle(call, dy.cpu(), keep=("dq",))["dq"]
    return (torch.linalg.norm(dq.cpu().double() - wanted) / torch.linalg.norm(wanted)).item()


BACKENDS = ["tiled", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("triton", "hopper"))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_leave_no_bias(backend: str) -> None:
    """Rounding y moves delta, and with it dq, along the mean of the keys (eq. 102)."""
    device = "cpu" if backend == "tiled" else "cuda"
    with_it, without = (error_of_dq(exact, backend, device) for exact in (True, False))
    assert with_it < without / 4, f"{with_it:.2e} against {without:.2e}"


def inputs(*shape: int, dtype: torch.dtype = FP32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return backlight.attention(q, k, v, causal=True, return_max_logit=True)


def test_what_comes_back() -> None:
    q, k, v = inputs(2, 3, 5, 8)
    y, z = attend(q, k, v)
    also_y, lse, also_z = backlight.attention(q, k, v, causal=True, return_lse=True, return_max_logit=True)
    assert torch.equal(y, also_y)
    assert torch.equal(z, also_z)
    assert (z.shape, lse.shape, z.dtype) == ((3,), (2, 3, 5), FP32)
    assert backlight.attention(q[None], k[None], v[None], return_max_logit=True)[1].shape == (3,)
    assert backlight.attention(q.double(), k.double(), v.double(), return_max_logit=True)[1].dtype == torch.float64
    with torch.no_grad():
        assert torch.equal(attend(q, k, v)[1], z)


def test_it_has_no_gradient() -> None:
    q, k, v = inputs(1, 2, 5, 8)
    y, z = attend(q, k, v)
    assert not z.requires_grad
    assert z.grad_fn is None
    with pytest.raises(RuntimeError, match="does not require grad"):
        z.sum().backward()
    (dq,) = torch.autograd.grad(y.sum(), q)
    plain = backlight.attention(q, k, v, causal=True, backend="tiled")
    assert torch.equal(dq, torch.autograd.grad(plain.sum(), q)[0])


def test_nothing_to_see() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 0, 8)
    assert (backlight.attention(q, k, k, return_max_logit=True)[1] == -torch.inf).all()
    assert (backlight.attention(q[:, :, :0], q, q, return_max_logit=True)[1] == -torch.inf).all()


def test_documents_of_known_lengths() -> None:
    """They run packed, and batch entries may become heads."""
    q, k, v = inputs(2, 3, 12, 8)
    mask = backlight.mask.documents(lengths=[5, 7])
    found = backlight.attention(q, k, v, mask=mask, return_max_logit=True)[1]
    x = (q @ k.mT * 8**-0.5).detach()
    x[:, :, :5, 5:] = x[:, :, 5:, :5] = -torch.inf
    assert torch.allclose(found, x.amax((0, 2, 3)))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled(compiler: str) -> None:
    torch.compiler.reset()
    q, k, v = inputs(1, 2, 9, 8, dtype=BF16)

    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return backlight.attention(q, k, v, causal=True, return_max_logit=True, exact_delta=True)

    found, wanted = (
        (y, z, *torch.autograd.grad(y.sum(), (q, k, v)))
        for y, z in (torch.compile(step, fullgraph=True, backend=compiler)(q, k, v), step(q, k, v))
    )
    assert all(map(torch.equal, found, wanted))


def test_operators_keep_their_promises() -> None:
    q, k, v = inputs(1, 2, 9, 8, dtype=BF16)
    call = backlight.api.call_of(q, k, v, exact_delta=True, max_logit=True)
    arguments = operators.pack(call, None)
    torch.library.opcheck(torch.ops.backlight.attention.default, (*arguments, True))
    with torch.no_grad():
        y, lse, low, peaks = torch.ops.backlight.attention(*arguments, True)
    assert (low.shape, peaks.shape) == (y.shape, lse.shape)


def transformed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v)[1]


def test_under_vmap() -> None:
    q, k, v = (x.detach() for x in inputs(4, 2, 3, 9, 8))
    found = torch.func.vmap(transformed)(q, k, v)
    assert torch.equal(found, torch.stack([transformed(*entry) for entry in zip(q, k, v, strict=True)]))


def test_tangents_go_past_it() -> None:
    q, k, v = (x.detach() for x in inputs(1, 2, 9, 8))
    (_, z), (ty, tz) = torch.func.jvp(lambda q: attend(q, k, v), (q,), (torch.ones_like(q),))
    assert torch.equal(z, attend(q, k, v)[1])
    assert torch.equal(tz, torch.zeros_like(z))
    assert ty.abs().max() > 0


def test_second_derivatives_beside_a_low_half() -> None:
    q, k, v = inputs(1, 2, 9, 8, dtype=BF16)
    (dq,) = torch.autograd.grad(backlight.attention(q, k, v, exact_delta=True).float().square().sum(), q, create_graph=True)
    assert torch.autograd.grad(dq.float().square().sum(), k)[0].isfinite().all()


REFUSED: dict[str, tuple[dict[str, object], type[Exception], str]] = {
    "no bool": ({"return_max_logit": 1}, TypeError, "return_max_logit must be a bool, got int"),
    "no half": ({"exact_delta": "yes"}, TypeError, "exact_delta must be a bool or None, got 'yes'"),
    "tau": ({"exact_delta": True, "tau": torch.zeros(2)}, ValueError, "exact_delta must not be True together with tau"),
    "delta of entmax": ({"exact_delta": True, "entmax": 1.5}, ValueError, "exact_delta must not be True together with entmax"),
    "entmax": ({"return_max_logit": True, "entmax": 1.5}, ValueError, "return_max_logit must not be True together with entmax"),
}


@pytest.mark.parametrize("call", [backlight.attention, backlight.explain])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, call: Callable[..., object]) -> None:
    options, kind, sentence = REFUSED[name]
    q, k, v = inputs(1, 2, 5, 8)
    with pytest.raises(kind, match=sentence):
        call(q, k, v, **options)


def test_fp32_keeps_nothing() -> None:
    """Nothing is taken from y there."""
    q, k, v = inputs(1, 2, 5, 8)
    assert not backlight.api.call_of(q, k, v, exact_delta=True).exact_delta
    assert backlight.api.call_of(q.bfloat16(), k.bfloat16(), v.bfloat16(), exact_delta=True).exact_delta
