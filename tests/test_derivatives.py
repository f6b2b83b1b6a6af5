"""Every public entry under every transform: the derivative of a plain definition in float64, or one sentence that says no.

A derivative that does not exist reads as zero when nobody refuses it: each refusal here was a wrong number once, or could be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import backlight
from backlight import compat, nn
from backlight._private.torch import dispatch_modes
from backlight.distributed.simulated import simulated_attention

pytestmark = [
    pytest.mark.clean_memory,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning"),
]

B, H, S, D = 1, 2, 4, 3
Function = Callable[[Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, tau: Tensor | None = None, sink: Tensor | None = None):
    """Causal attention of [B, H, S, D] in operations of torch, which torch can differentiate as often as it likes."""
    rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        distance = (rows - keys).clamp(0, bias.shape[1] - 1)
        s = s + bias[:, distance] * (rows - keys < bias.shape[1])
    s = s.masked_fill(keys > rows, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[2]]
    if tau is not None:
        p = torch.relu(p + tau[None, :, None, None] / (rows + 1)) * (keys <= rows)
    return p @ v


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


K, V, BIAS = draw(B, H, S, D, seed=1), draw(B, H, S, D, seed=2), draw(H, 3, seed=3)
TAU, SINK, GATE = torch.tensor([-0.3, 0.4]).double(), draw(H, seed=4), draw(B, H, S, D, seed=5)
CU = torch.tensor([0, S])
SINGLE, EYE = draw(B, S, 1, seed=7), torch.eye(H * D).double()
# causal as a pair bias
TRIANGLE = torch.zeros(B, H, S, S).double().masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)


def packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)


def batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def swapped(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


class Layer:
    """A layer as a function of its input, and what it computes written out."""

    def __init__(self, kind: str):
        torch.manual_seed(6)
        if kind == "lazy":
            self.layer = nn.LazyAttention(H * 2, H, distances=3, rope=None, dtype=torch.float64)
            with torch.no_grad():
                self.layer.bias.normal_()
                self.layer.tau.copy_(TAU)
        else:
            self.layer = nn.Attention(H * 2, H, sink=True, rope=None, dtype=torch.float64)

    def ours(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def truth(self, x: Tensor) -> Tensor:
        q, k, v = self.layer.project(x)
        return self.layer.out(swapped(plain(q, k, v, **self.layer.terms())).flatten(-2))


@dataclass(frozen=True)
class Entry:
    """ours and truth: the same function of a tensor of this shape."""

    ours: Function
    truth: Function
    shape: tuple[int, ...] = (B, H, S, D)


QKV, KV = (B, S, 3, H, D), (B, S, 2, H, D)


def of_packed(run: Callable[..., Tensor]) -> Function:
    return lambda x: run(*x.unbind(-3))


ENTRIES = {
    "attention, q": Entry(lambda x: backlight.attention(x, K, V, causal=True), lambda x: plain(x, K, V)),
    "attention, one tensor": Entry(lambda x: backlight.attention(x, x, x, causal=True), lambda x: plain(x, x, x)),
    "attention, terms": Entry(
        lambda x: backlight.attention(x, K, x, causal=True, bias=BIAS, tau=TAU, sink=SINK, gate=GATE),
        lambda x: plain(x, K, x, BIAS, TAU, SINK) * GATE.sigmoid(),
    ),
    "attention, bias": Entry(
        lambda x: backlight.attention(K, K, V, causal=True, bias=x), lambda x: plain(K, K, V, x), tuple(BIAS.shape)
    ),
    "attention, tau": Entry(
        lambda x: backlight.attention(K, K, V, causal=True, tau=x - 0.5), lambda x: plain(K, K, V, None, x - 0.5), (H,)
    ),
    "attention, lse": Entry(
        lambda x: backlight.attention(x, K, V, causal=True, return_lse=True)[1],
        lambda x: (x @ K.mT * D**-0.5).masked_fill(~torch.ones(S, S).tril().bool(), -torch.inf).logsumexp(-1),
    ),
    "attention_varlen": Entry(
        lambda x: backlight.attention_varlen(x, packed(K), packed(V), CU, causal=True),
        lambda x: packed(plain(batched(x), K, V)),
        (S, H, D),
    ),
    "flash_attn_func": Entry(
        lambda x: compat.flash_attn_func(x, swapped(K), swapped(V), causal=True),
        lambda x: swapped(plain(swapped(x), K, V)),
        (B, S, H, D),
    ),
    "flash_attn_qkvpacked_func": Entry(
        lambda x: compat.flash_attn_qkvpacked_func(x, causal=True),
        of_packed(lambda q, k, v: swapped(plain(swapped(q), swapped(k), swapped(v)))),
        QKV,
    ),
    "flash_attn_kvpacked_func": Entry(
        lambda x: compat.flash_attn_kvpacked_func(swapped(K), x, causal=True),
        of_packed(lambda k, v: swapped(plain(K, swapped(k), swapped(v)))),
        KV,
    ),
    "flash_attn_varlen_func": Entry(
        lambda x: compat.flash_attn_varlen_func(x, packed(K), packed(V), CU, CU, S, S, causal=True),
        lambda x: packed(plain(batched(x), K, V)),
        (S, H, D),
    ),
    "flash_attn_varlen_qkvpacked_func": Entry(
        lambda x: compat.flash_attn_varlen_qkvpacked_func(x, CU, S, causal=True),
        of_packed(lambda q, k, v: packed(plain(batched(q), batched(k), batched(v)))),
        QKV[1:],
    ),
    "flash_attn_varlen_kvpacked_func": Entry(
        lambda x: compat.flash_attn_varlen_kvpacked_func(packed(K), x, CU, CU, S, S, causal=True),
        of_packed(lambda k, v: packed(plain(K, batched(k), batched(v)))),
        KV[1:],
    ),
    "lazy_attention": Entry(lambda x: compat.lazy_attention(x, K, V, BIAS, TAU), lambda x: plain(x, K, V, BIAS, TAU)),
    "scaled_dot_product_attention": Entry(
        lambda x: compat.scaled_dot_product_attention(x, K, V, is_causal=True), lambda x: plain(x, K, V)
    ),
    "triangle_attention": Entry(
        lambda x: compat.triangle_attention(x[:, None], K[:, None], V[:, None], TRIANGLE[:, None])[:, 0],
        lambda x: plain(x, K, V),
    ),
    "attention_pair_bias": Entry(
        lambda x: compat.attention_pair_bias(
            SINGLE, x, K, V, TRIANGLE, None, H, None, 0 * EYE[:, :1], EYE, is_cached_z_proj=True
        )[0],
        lambda x: swapped(plain(x, K, V)).flatten(2) / 2,
    ),
    "DS4Sci_EvoformerAttention": Entry(
        lambda x: compat.DS4Sci_EvoformerAttention(
            *(each.transpose(1, 2)[:, None] for each in (x, K, V)), [None, TRIANGLE[:, None]]
        )[:, 0],
        lambda x: swapped(plain(x, K, V)),
    ),
    "nn.Attention": Entry(Layer("plain").ours, Layer("plain").truth, (B, S, H * 2)),
    "nn.LazyAttention": Entry(Layer("lazy").ours, Layer("lazy").truth, (B, S, H * 2)),
}


def test_every_entry_is_here() -> None:
    # a cache is written in place, and has no gradients
    assert set(compat.__all__) - {"flash_attn_with_kvcache"} <= set(ENTRIES)


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# other signatures of the same call need no second way through it
WAYS = [
    (name, way) for name in ENTRIES for way in ("direct", "observed") if way == "direct" or not name.startswith("flash_attn")
]


@pytest.fixture(params=WAYS, ids=", ".join)
def entry(request: pytest.FixtureRequest) -> Iterator[Entry]:
    """Nobody looks, and the operators are left out where there is no transform; or somebody does."""
    name, way = request.param
    with nullcontext() if way == "direct" else Looking():
        yield ENTRIES[name]


# --- what exists is right ----------------------------------------------------------------------------------------------------


def scalar(f: Function) -> Function:
    return lambda x: f(x).square().sum()


def by_autograd(f: Function, x: Tensor, **options: Any) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(scalar(f)(x), x, **options)[0].detach()


def batched_gradients(f: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = f(x)
    return torch.autograd.grad(y, x, torch.stack([torch.ones_like(y), y.detach()]), is_grads_batched=True)[0]


def checkpointed(f: Function, x: Tensor, reentrant: bool) -> Tensor:
    return by_autograd(lambda x: checkpoint(f, x, use_reentrant=reentrant), x)


def backward_into(f: Function, x: Tensor, reentrant: bool) -> Tensor:
    x = x.clone().requires_grad_()
    checkpoint(f, x, use_reentrant=reentrant).square().sum().backward()
    assert x.grad is not None
    return x.grad


def two(x: Tensor) -> Tensor:
    return torch.stack([x, x + 0.1])


VALUES: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad": lambda f, x: grad(scalar(f))(x),
    "vjp": lambda f, x: vjp(f, x)[1](torch.ones_like(f(x)))[0],
    "jacrev": lambda f, x: jacrev(f)(x),
    "jacrev, in chunks": lambda f, x: jacrev(f, chunk_size=2)(x),
    "vmap": lambda f, x: vmap(f)(two(x)),
    "vmap of vmap": lambda f, x: vmap(vmap(f))(torch.stack([two(x), two(x) - 0.2])),
    "vmap of grad": lambda f, x: vmap(grad(scalar(f)))(two(x)),
    "grad of vmap": lambda f, x: grad(lambda x: vmap(scalar(f))(x).sum())(two(x)),
    "vmap of jacrev": lambda f, x: vmap(jacrev(f))(two(x)),
    "autograd": by_autograd,
    "autograd with create_graph": lambda f, x: by_autograd(f, x, create_graph=True),
    "autograd of vmap": lambda f, x: by_autograd(vmap(f), two(x)),
    "batched gradients": batched_gradients,
    "functional.jacobian": lambda f, x: functional.jacobian(f, x),
    "functional.jacobian, create_graph": lambda f, x: functional.jacobian(f, x, create_graph=True).detach(),
    "functional.jacobian, vectorize": lambda f, x: functional.jacobian(f, x, vectorize=True),
    "functional.vjp": lambda f, x: functional.vjp(f, x, torch.ones_like(f(x)))[1],
    "checkpoint": lambda f, x: checkpointed(f, x, False),
    "checkpoint, reentrant": lambda f, x: backward_into(f, x, True),
}


@pytest.mark.parametrize("transform", VALUES)
def test_values(entry: Entry, transform: str) -> None:
    x = draw(*entry.shape, seed=7)
    torch.testing.assert_close(VALUES[transform](entry.ours, x), VALUES[transform](entry.truth, x))


class OnlyForward(TorchFunctionMode):
    """Leaves while torch works, and so does not see what a backward recomputes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["attention, q", "attention, terms", "nn.Attention", "nn.LazyAttention"])
def test_checkpoints_that_run_by_the_operators_and_recompute_without(name: str, reentrant: bool) -> None:
    entry = ENTRIES[name]
    x = draw(*entry.shape, seed=7)
    with OnlyForward():
        found = backward_into(entry.ours, x, reentrant)
    torch.testing.assert_close(found, backward_into(entry.truth, x, reentrant))


@pytest.mark.parametrize("kind", ["plain", "lazy"])
def test_functional_calls(kind: str) -> None:
    """Gradients with respect to the parameters of a layer."""
    layer = Layer(kind)
    parameters = {name: x.detach() for name, x in layer.layer.named_parameters()}
    x = draw(B, S, H * 2, seed=7)
    found = grad(lambda p: functional_call(layer.layer, p, (x,)).square().sum())(parameters)
    wanted = torch.autograd.grad(layer.truth(x).square().sum(), list(layer.layer.parameters()))
    for name, want in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(found[name], want, msg=lambda text, name=name: f"{name}: {text}")


# --- forward mode, second derivatives ----------------------------------------------------------------------------------------


def linear(f: Function) -> Function:
    """The gradient of this needs no gradient itself: the case in which torch takes ours for a constant."""
    return lambda x: f(x).sum()


def penalty_upstream(f: Function, x: Tensor) -> Tensor:
    """A weight before the call, whose own gradient is penalised."""
    w = torch.tensor(1.5, dtype=x.dtype, requires_grad=True)
    (dw,) = torch.autograd.grad(linear(f)(x * w), w, create_graph=True)
    return torch.autograd.grad(dw.square(), w)[0]


def penalty_of_others(f: Function, x: Tensor) -> Tensor:
    """The gradient of the input is penalised, the weight gets the gradient of that."""
    w = torch.tensor(1.5, dtype=x.dtype, requires_grad=True)
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(linear(f)(x * w), x, create_graph=True)
    return torch.autograd.grad(dx.norm(), w)[0]


def penalty_of_itself(f: Function, x: Tensor) -> Tensor | None:
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(linear(f)(x), x, create_graph=True)
    (linear(f)(x) + dx.square().sum()).backward()
    return x.grad


def batched_second(f: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(scalar(f)(x), x, create_graph=True)
    return torch.autograd.grad(dx, x, two(torch.ones_like(dx)), is_grads_batched=True)[0]


def checkpointed_second(f: Function, x: Tensor) -> Tensor:
    return penalty_of_others(lambda x: checkpoint(f, x, use_reentrant=False), x)


def dual(f: Function, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def pushed(f: Function, x: Tensor) -> Tensor:
    return jvp(f, (x,), (torch.ones_like(x),))[1]


SECOND: dict[str, Callable[[Function, Tensor], Any]] = {
    "jvp": pushed,
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "linearize": lambda f, x: linearize(f, x)[1](torch.ones_like(x)),
    "hessian": lambda f, x: hessian(linear(f))(x),
    "jvp of grad": lambda f, x: pushed(grad(linear(f)), x),
    "grad of jvp": lambda f, x: grad(lambda x: pushed(linear(f), x))(x),
    "grad of grad": lambda f, x: grad(lambda x: grad(linear(f))(x).sum())(x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(linear(f)))(x),
    "jacrev of jacfwd": lambda f, x: jacrev(jacfwd(linear(f)))(x),
    "vmap of jvp": lambda f, x: vmap(lambda x: pushed(f, x))(two(x)),
    "jvp of vmap": lambda f, x: pushed(vmap(f), two(x)),
    "vmap of hessian": lambda f, x: vmap(hessian(linear(f)))(two(x)),
    "hessian of vmap": lambda f, x: hessian(lambda x: vmap(linear(f))(x).sum())(two(x)),
    "dual numbers": dual,
    "functional.jvp": lambda f, x: functional.jvp(f, x, torch.ones_like(x)),
    "functional.jacobian, forward": lambda f, x: functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "functional.hessian": lambda f, x: functional.hessian(linear(f), x),
    "functional.hessian, vectorize": lambda f, x: functional.hessian(linear(f), x, vectorize=True),
    "functional.hessian, forward": lambda f, x: functional.hessian(
        linear(f), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "functional.hvp": lambda f, x: functional.hvp(linear(f), x, torch.ones_like(x)),
    "functional.vhp": lambda f, x: functional.vhp(linear(f), x, torch.ones_like(x)),
    "penalty upstream": penalty_upstream,
    "penalty of others": penalty_of_others,
    "penalty of itself": penalty_of_itself,
    "penalty of a checkpoint": checkpointed_second,
    "batched second gradients": batched_second,
    "functional.jvp, create_graph": lambda f, x: functional.jvp(f, x, torch.ones_like(x), create_graph=True)[1].detach(),
    "gradgradcheck": lambda f, x: torch.autograd.gradgradcheck(f, x.clone().requires_grad_()),
}


# torch's older vmap, which has no rule for what autograd does to tensors that it saves while a mode looks
OLD_VMAP = ("functional.jacobian, forward", "functional.hessian, forward")
# other names for the same number, where torch has trouble with the plain definition
SAME = {"functional.hessian, forward": "functional.hessian"}


@pytest.mark.parametrize("transform", SECOND)
def test_second_values(entry: Entry, transform: str) -> None:
    if transform in OLD_VMAP and dispatch_modes():
        pytest.skip("torch's own: no batching rule for aten::detach under a mode")
    x = draw(*entry.shape, seed=7)
    torch.testing.assert_close(SECOND[transform](entry.ours, x), SECOND[SAME.get(transform, transform)](entry.truth, x))


@pytest.mark.parametrize("transform", ["hessian", "penalty of others", "functional.hvp", "dual numbers"])
def test_these_values_are_not_zero(transform: str) -> None:
    found = SECOND[transform](ENTRIES["attention, one tensor"].truth, draw(B, H, S, D, seed=7))
    found = found[1] if isinstance(found, tuple) else found
    assert found.abs().max() > 1e-3


# --- what does not exist is refused ------------------------------------------------------------------------------------------


def by_autograd_thrice(f: Function, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(scalar(f)(x), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x, create_graph=True)
    return torch.autograd.grad(ddx.sum(), x)[0]


REFUSED: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad of grad of grad": lambda f, x: grad(lambda x: grad(lambda x: grad(scalar(f))(x).sum())(x).sum())(x),
    "jvp of hessian": lambda f, x: pushed(hessian(scalar(f)), x),
    "hessian of jvp": lambda f, x: hessian(lambda x: pushed(scalar(f), x))(x),
    "grad of hessian": lambda f, x: grad(lambda x: hessian(scalar(f))(x).sum())(x),
    "autograd, three times": by_autograd_thrice,
    "jvp of jvp": lambda f, x: pushed(lambda x: pushed(f, x), x),
    "jacfwd of jacfwd": lambda f, x: jacfwd(jacfwd(scalar(f)))(x),
}
SENTENCE = r"^backlight\.attention has no (second|third|forward-mode) derivative"


@pytest.mark.parametrize("transform", REFUSED)
def test_refusals(entry: Entry, transform: str) -> None:
    x = draw(*entry.shape, seed=7)
    with pytest.raises(NotImplementedError, match=SENTENCE) as caught:
        REFUSED[transform](entry.ours, x)
    assert len(str(caught.value).splitlines()) == 1


SHARDED = ("penalty upstream", "penalty of others", "penalty of itself", "functional.hessian")


@pytest.mark.parametrize("transform", [*SHARDED, "jvp of grad", "grad of jvp", "grad of grad", "linearize"])
@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_refusals_of_sharded_calls(transform: str, strategy: str) -> None:
    def sharded(x: Tensor) -> Tensor:
        return simulated_attention(x, K, V, world=2, layout="contiguous", strategy=strategy, causal=True)

    x = draw(B, H, S, D, seed=7)
    wanted = by_autograd(lambda x: plain(x, K, V), x)
    for name in ("autograd with create_graph", "grad"):
        torch.testing.assert_close(VALUES[name](sharded, x), wanted)
    torch.testing.assert_close(pushed(sharded, x), pushed(lambda x: plain(x, K, V), x))
    torch.testing.assert_close(dual(sharded, x), pushed(lambda x: plain(x, K, V), x))
    with pytest.raises(NotImplementedError, match=SENTENCE):
        SECOND[transform](sharded, x)


def test_an_attention_beside_what_is_differentiated() -> None:
    """Tangents and second derivatives of something else pass a call by that has no part in them."""
    x = draw(B, H, S, D, seed=7)

    def beside(x: Tensor) -> Tensor:
        return (x.sin() * backlight.attention(K, K, V, causal=True)).sum()

    fixed = plain(K, K, V)
    torch.testing.assert_close(pushed(beside, x), (x.cos() * fixed).sum())
    torch.testing.assert_close(hessian(beside)(x).reshape(x.numel(), -1).diagonal(), (-x.sin() * fixed).flatten())
    torch.testing.assert_close(functional.hessian(beside, x).reshape(x.numel(), -1).diagonal(), (-x.sin() * fixed).flatten())


# --- compiled ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "jacrev"])
def test_compiled_values(transform: str) -> None:
    """Inside a graph, and around one."""
    entry, x = ENTRIES["attention, terms"], draw(B, H, S, D, seed=7)
    wanted = VALUES[transform](entry.truth, x)
    inside = torch.compile(lambda x: VALUES[transform](entry.ours, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(inside(x), wanted)
    torch.testing.assert_close(VALUES[transform](torch.compile(entry.ours, backend="aot_eager"), x), wanted)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["jvp", "hessian", "jvp of grad", "grad of grad", "grad of jvp"])
def test_compiled_second_values(transform: str) -> None:
    entry, x = ENTRIES["attention, terms"], draw(B, H, S, D, seed=7)
    wanted = SECOND[transform](entry.truth, x)
    inside = torch.compile(lambda x: SECOND[transform](entry.ours, x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(inside(x), wanted)
    for warm in (False, True):
        compiled = torch.compile(entry.ours, backend="aot_eager")
        if warm:
            compiled(x)
        torch.testing.assert_close(SECOND[transform](compiled, x), wanted)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["grad of grad of grad", "jvp of jvp"])
def test_compiled_refusals(transform: str) -> None:
    entry, x = ENTRIES["attention, q"], draw(B, H, S, D, seed=7)
    inside = torch.compile(lambda x: REFUSED[transform](entry.ours, x), fullgraph=True, backend="aot_eager")
    # the compiler puts its own words around ours
    with pytest.raises(Exception, match=r"backlight\.attention has no (third|forward-mode) derivative"):
        inside(x)


@pytest.mark.usefixtures("nothing_compiled")
def test_dual_numbers_in_a_graph_are_refused() -> None:
    entry, x = ENTRIES["attention, q"], draw(B, H, S, D, seed=7)
    with pytest.raises(Exception, match=r"has no forward-mode derivative by dual numbers"):
        torch.compile(lambda x: dual(entry.ours, x), fullgraph=True, backend="aot_eager")(x)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("transform", ["functional.hvp", "penalty of others"])
def test_double_backward_of_compiled_functions_is_refused_by_torch(transform: str) -> None:
    entry, x = ENTRIES["attention, q"], draw(B, H, S, D, seed=7)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        SECOND[transform](torch.compile(entry.ours, backend="aot_eager"), x)
