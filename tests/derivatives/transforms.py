"""Transforms of a function of one tensor: those whose values exist, second derivatives too, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from entries import Function
from torch import Tensor
from torch.autograd import forward_ad, functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint


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


# --- what does not exist -----------------------------------------------------------------------------------------------------


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
