"""The stages of attention, forward and backward, as formulas; the graph between them is read off their signatures.

Each function below is one stage of one head of one segment: it takes earlier stages (or inputs) by name and returns its own
value. The oracle evaluates them in order in float64; the doctor evaluates a single stage from a kernel's own upstream values to
tell a local error from an inherited one, and replaces single stages to build mutants. Equations are those of `docs/math.md`.

Inputs of a head: q [Sq,D], k [Sk,D], v [Sk,Dv]; bias [n], sink [], tau [], gate [Sq,Dv], pair_bias [Sq or 1,Sk], entmax [] or
None; the incoming gradients dy [Sq,Dv] and dlse [Sq] or None. Geometry: `visible` [Sq,Sk] bool, `n` [Sq,1] counts, `column`
[Sq,Sk] bias column. With a mask by row intervals, which `visible` and `n` have in them already, also `rows` [2w,Sk] and `pos`
[Sq], what is compared with them, else None; `own` [Sq,Sk] is what the spec alone lets be seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.reference import entmax as sparse

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """One named quantity: which values it reads and how it follows from them."""

    name: str
    equation: str
    reads: tuple[str, ...]
    compute: Callable[..., Tensor]

    @staticmethod
    def of(compute: Callable[..., Tensor], name: str | None = None, equation: str = "") -> Stage:
        return Stage(name or compute.__name__, equation, tuple(inspect.signature(compute).parameters), compute)

    def __call__(self, values: Mapping[str, object]) -> Tensor:
        return self.compute(*(values[name] for name in self.reads))


STAGES: dict[str, Stage] = {}


def stage(equation: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        STAGES[compute.__name__] = Stage.of(compute, equation=equation)
        return compute

    return register


# --- forward ---------------------------------------------------------------------------------------------------------------


@stage("4")
def x(q, k, scale):
    return scale * (q @ k.mT)


@stage("5")
def capped(x, softcap):
    return x if softcap is None else softcap * torch.tanh(x / softcap)


@stage("6, 7, 67")
def s(capped, bias, column, pair_bias, visible):
    if bias is not None:
        inside = (column >= 0) & (column < bias.numel())
        lookup = torch.cat([bias, bias.new_zeros(1)])
        capped = capped + lookup[torch.where(inside, column, bias.numel())]
    if pair_bias is not None:
        capped = capped + pair_bias
    return capped.masked_fill(~visible, -torch.inf)


@stage("8, 88")
def lse(s, sink, entmax=None):
    if entmax is not None:
        return sparse.lse(s, sink, entmax)
    if sink is None:
        return torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    return torch.logsumexp(torch.cat([s, sink.expand(s.shape[0], 1)], dim=-1), dim=-1)


@stage("9, 80")
def p(s, lse, entmax=None):
    if entmax is not None:
        return sparse.weight(s, lse[:, None], entmax)
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[:, None])


@stage("9, 80")
def p_sink(lse, sink, entmax=None):
    """The limits of an infinite sink: 1 where it is all there is (+inf), 0 where it is as good as absent (-inf)."""
    if sink is None:
        return torch.zeros_like(lse)
    if entmax is not None:
        return sparse.weight(sink, lse, entmax).masked_fill(lse == sink, 1).masked_fill(lse == -torch.inf, 0)
    return torch.exp(sink - lse).masked_fill(lse == sink, 1).masked_fill(lse == -torch.inf, 0)


@stage("10")
def m(p, tau, n, visible, entmax=None):
    """1 where a key survives; all visible keys do without tau, or with tau >= 0. With entmax, those that weigh anything."""
    if entmax is not None:
        return (visible & (p > 0)).to(p.dtype)
    if tau is None or tau >= 0:
        return visible.to(p.dtype)
    return (visible & (p + tau / n.clamp(min=1) > 0)).to(p.dtype)


@stage("11")
def a(p, m, tau, n):
    return p if tau is None else m * (p + tau / n.clamp(min=1))


@stage("12")
def o(a, v):
    return a @ v


@stage("12, 87")
def u(m, v, n, p=None, p_sink=None, entmax=None):
    """What a backward needs besides o: the mean of v over survivors; with entmax, by its slopes."""
    if entmax is not None:
        w, total = sparse.slopes(p, p_sink, entmax)
        return w @ v / total[:, None]
    return m @ v / n.clamp(min=1)


@stage("13")
def y(o, gate):
    return o if gate is None else o * torch.sigmoid(gate)


# --- backward --------------------------------------------------------------------------------------------------------------


@stage("18")
def do(dy, gate):
    return dy if gate is None else dy * torch.sigmoid(gate)


@stage("18")
def dgate(dy, o, gate):
    if gate is None:
        return torch.zeros_like(dy)
    weight = torch.sigmoid(gate)
    return dy * o * weight * (1 - weight)


@stage("19")
def dp(do, v):
    return do @ v.mT


@stage("19")
def dv(a, do):
    return a.mT @ do


@stage("20, 87")
def delta(p, m, dp, dlse, p_sink=None, entmax=None):
    """delta - dlse: what kernels consume. With entmax a mean by its slopes, and dlse over their sum."""
    if entmax is not None:
        w, total = sparse.slopes(p, p_sink, entmax)
        return ((w * dp).sum(dim=-1) - (0 if dlse is None else dlse)) / total
    delta = (p * m * dp).sum(dim=-1)
    return delta if dlse is None else delta - dlse


@stage("21, 87")
def ds(p, m, dp, delta, entmax=None):
    if entmax is not None:
        return sparse.slope(p, entmax) * (dp - delta[:, None])
    return p * (m * dp - delta[:, None])


@stage("22")
def dbias(ds, bias, column):
    if bias is None:
        return ds.new_zeros(0)
    inside = (column >= 0) & (column < bias.numel())
    return ds.new_zeros(bias.numel()).index_add(0, column[inside], ds[inside])


@stage("23, 87")
def dsink(p_sink, delta, entmax=None):
    if entmax is not None:
        p_sink = sparse.slope(p_sink, entmax)
    return -(p_sink * delta).sum()


@stage("24")
def dtau(m, dp, n, tau):
    if tau is None:
        return dp.new_zeros(())
    return ((m * dp).sum(dim=-1) / n.clamp(min=1).squeeze(-1)).sum()


@stage("68")
def dpair_bias(ds, pair_bias):
    """Of one head of one batch entry; those that share an entry of the bias are summed where they are placed."""
    if pair_bias is None:
        return ds.new_zeros(0)
    return ds.sum(dim=0, keepdim=True) if pair_bias.shape[0] != ds.shape[0] else ds


@stage("89")
def dentmax(p, p_sink, dp, dlse, entmax):
    return dp.new_zeros(()) if entmax is None else sparse.by_alpha(p, p_sink, dp, dlse, entmax)


@stage("25")
def dx(ds, capped, softcap):
    return ds if softcap is None else ds * (1 - (capped / softcap) ** 2)


@stage("26")
def dq(dx, k, scale):
    return scale * (dx @ k)


@stage("26")
def dk(dx, q, scale):
    return scale * (dx.mT @ q)


FORWARD = ("x", "capped", "s", "lse", "p", "p_sink", "m", "a", "o", "u", "y")
BACKWARD = ("do", "dgate", "dp", "dv", "delta", "ds", "dbias", "dsink", "dtau", "dpair_bias", "dentmax", "dx", "dq", "dk")
OUTPUTS = ("y", "lse")
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsink", "dtau", "dgate", "dpair_bias", "dentmax")


def graph(stages: Mapping[str, Stage] = STAGES) -> dict[str, tuple[str, ...]]:
    """Stage -> the stages it reads (inputs and geometry left out)."""
    return {name: tuple(r for r in stage.reads if r in stages) for name, stage in stages.items()}


class Trace(Mapping[str, Tensor]):
    """Every kept quantity of one call by name, heads assembled: matrices [B,Hq,Sq,Sk], rows [B,Hq,Sq], gradients like inputs.

    With packed sequences the matrices are block matrices [1,Hq,Tq,Tk]: -inf in `s` and 0 elsewhere outside the segments.
    """

    def __init__(self, values: Values):
        self._values = values

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"this trace holds no {name!r}; it holds {', '.join(self.__dict__['_values'])}") from None

    def __iter__(self):
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return "Trace(" + ", ".join(f"{name} {tuple(value.shape)}" for name, value in self._values.items()) + ")"
