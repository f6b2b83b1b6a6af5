"""alpha-entmax in the oracle: thresholds, weights and gradients against an exact reference under autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import backlight
from backlight.api import call_of
from backlight.backends.tiled import entmax as tiled_entmax
from backlight.backends.tiled.config import Tile
from backlight.backends.tiled.primitives import Scores
from backlight.binding import ALPHAS
from backlight.config import Config, override
from backlight.reference import GRADIENTS, oracle
from backlight.reference.entmax import slope, threshold
from backlight.thresholds import Bound, Sums, power

ANY = (1.05, 1.1, 1.25, 1.5, 1.75, 2.0)
F64 = torch.float64


def rows_of(kind: str, n: int = 37) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    z = torch.randn(5, n, generator=generator, dtype=F64)
    kinds = {
        "gaussian": z,
        "peaky": 6 * z,
        "flat": 0.01 * z,
        "ties": (2 * z).round() / 2,
        "equal": torch.full_like(z, 0.3),
        "one key": z[:, :1],
        "hidden": z.masked_fill(z > 0.2, -torch.inf),
        "far below": z - 400,
    }
    return kinds[kind]


def weights_of(z: Tensor, alpha: Tensor) -> Tensor:
    """alpha-entmax of rows (already times alpha - 1), by autograd: the threshold of the sorted support for 1.5 and 2, elsewhere
    one Newton step of sum(u ** e) - 1 from a root that bisection found."""
    e = 1 / (alpha - 1)
    with torch.no_grad():
        low, high = z.amax(dim=-1) - 1, z.amax(dim=-1)
        for _ in range(200):
            middle = (low + high) / 2
            above = (z - middle[:, None]).clamp(min=0).pow(e).sum(dim=-1) > 1
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        inside = z > low[:, None]
    u = torch.where(inside, z - low[:, None], 0)
    slopes = torch.where(inside, u.detach().clamp(min=1e-300).pow((e - 1).detach()), 0).sum(dim=-1)
    theta = low + (u.pow(e).sum(dim=-1) - 1) / (e.detach() * slopes)
    return torch.where(inside, z - theta[:, None], 0).clamp(min=0).pow(e)


@pytest.mark.parametrize("kind", ["gaussian", "peaky", "flat", "ties", "equal", "one key", "hidden", "far below"])
@pytest.mark.parametrize("alpha", ANY)
def test_thresholds(alpha: float, kind: str) -> None:
    z = (alpha - 1) * rows_of(kind)
    theta = threshold(z, torch.tensor(alpha, dtype=F64))
    weights = (z - theta[:, None]).clamp(min=0).pow(1 / (alpha - 1))
    assert torch.allclose(
        weights.sum(dim=-1), torch.ones(5, dtype=F64), rtol=0, atol=1e-12 * max(1.0, float(theta.abs().max())) * 25
    )
    assert bool((theta < z.amax(dim=-1)).all())


def test_rows_of_nothing_and_infinity() -> None:
    z = torch.tensor([[-torch.inf, -torch.inf], [torch.inf, 0.0]], dtype=F64)
    assert threshold(z, torch.tensor(1.5, dtype=F64)).tolist() == [-torch.inf, torch.inf]
    assert threshold(z[:, :0], torch.tensor(1.5, dtype=F64)).tolist() == [-torch.inf, -torch.inf]


def lower_bound(z: Tensor, e: Tensor) -> Tensor:
    """Eq. 84 over tiles of 64 keys."""
    nothing = torch.zeros(len(z), 1, dtype=F64)
    bound = Bound(torch.full_like(nothing, -torch.inf), nothing, nothing)
    for tile in z.split(64, dim=-1):
        new = torch.maximum(bound.theta, tile.amax(dim=-1, keepdim=True) - 1)
        u = (tile - new).clamp(min=0)
        bound = bound.joined(new, *(power(u, exponent).sum(dim=-1, keepdim=True) for exponent in (e, e - 1)), e)
    return bound.theta


@pytest.mark.parametrize(("alpha", "steps"), [(1.5, 2), (1.25, 1)])
def test_few_steps_are_enough_for_sixteen_bits(alpha: float, steps: int) -> None:
    """As the Triton kernels make them: eq. 84 by tiles, then so many steps of eq. 83, then the last of eq. 86."""
    torch.manual_seed(0)
    drawn = torch.randn(8, 1024, dtype=F64)
    scores = torch.cat([0.5 * drawn, drawn, 2 * drawn, (2 * drawn).sort(dim=-1).values, (2 * drawn).round()])
    z, e = (alpha - 1) * scores, torch.full((40, 1), 1 / (alpha - 1), dtype=F64)
    theta = lower_bound(z, e)
    assert bool((theta[:, 0] <= threshold(z, torch.tensor(alpha, dtype=F64)) + 1e-12).all())
    for _ in range(steps + 1):
        sums = Sums(*(torch.zeros_like(theta) for _ in range(3)))
        sums.add_(slice(None), (z - theta).clamp(min=0), e)
        theta = theta + sums.step(e, z.amax(dim=-1, keepdim=True) - theta)
    assert float((theta[:, 0] - threshold(z, torch.tensor(alpha, dtype=F64))).abs().max()) < 1e-6


@pytest.mark.parametrize("alpha", ANY)
@pytest.mark.parametrize("sink", [None, 0.4, -30.0])
def test_gradients_are_those_of_the_exact_reference(alpha: float, sink: float | None) -> None:
    """Everything that has a gradient, alpha included; a sink of -30 lies below every threshold."""
    torch.manual_seed(3)
    q, k, v, dy = (torch.randn(1, 2, 9, 4, dtype=F64) for _ in range(4))
    dlse = torch.randn(1, 2, 9, dtype=F64)
    alphas = torch.full((2,), alpha, dtype=F64)
    sinks = None if sink is None else torch.full((2,), sink, dtype=F64)
    learned = [x.requires_grad_() for x in (q, k, v, alphas) + (() if sinks is None else (sinks,))]
    ys, lses = [], []
    for h in range(2):
        a = alphas[h]
        z = ((a - 1) * q[0, h] @ k[0, h].mT / 2).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        if sinks is not None:
            z = torch.cat([z, ((a - 1) * sinks[h]).expand(9, 1)], dim=-1)
        p = weights_of(z, a)
        largest = p.argmax(dim=-1, keepdim=True)
        # theta = z - p ** (alpha - 1) for whoever weighs something
        theta = z.gather(-1, largest) - p.gather(-1, largest).pow(a - 1)
        lses.append((theta[:, 0] + 1) / (a - 1))
        ys.append(p[:, :9] @ v[0, h])
    y, lse = torch.stack(ys)[None], torch.stack(lses)[None]
    wanted = torch.autograd.grad([y, lse], learned, [dy, dlse])
    trace = oracle(call_of(q, k, v, causal=True, scale=0.5, sink=sinks, entmax=alphas), dy, dlse)
    assert torch.allclose(trace.y, y, rtol=1e-11, atol=1e-11)
    assert torch.allclose(trace.lse, lse, rtol=1e-11, atol=1e-11)
    for name, grad in zip(("dq", "dk", "dv", "dentmax", "dsink"), wanted, strict=False):
        scale = max(1.0, float(grad.abs().max()))
        assert float((trace[name] - grad).abs().max()) <= 1e-10 * scale * (1 if alpha > 1.2 else 10), name


@pytest.mark.parametrize("alpha", ANY)
def test_gradcheck(alpha: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 2, dtype=F64, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 3, dtype=F64, requires_grad=True)
    # finite differences must stay inside the range
    alphas = torch.tensor([min(max(alpha, 1.06), 1.99)] * 2, dtype=F64, requires_grad=True)
    sink = torch.randn(2, dtype=F64, requires_grad=True)
    gate = torch.randn(1, 2, 4, 2, dtype=F64, requires_grad=True)

    def run(q, k, v, bias, alphas, sink, gate):  # type: ignore[no-untyped-def]
        options = {"causal": True, "softcap": 3.0, "bias": bias, "entmax": alphas, "sink": sink, "gate": gate}
        return backlight.attention(q, k, v, **options, return_lse=True, backend="tiled")

    assert gradcheck(run, (q, k, v, bias, alphas, sink, gate), eps=1e-7, atol=2e-6, rtol=1e-5)


def test_single_keys_ties_and_empty_rows() -> None:
    """Eq. 92: a single key has all the weight; rows that see nothing give zeros; equal scores share."""
    q, k = torch.zeros(1, 1, 4, 2, dtype=F64), torch.randn(1, 1, 2, 2, dtype=F64)
    v = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]], dtype=F64)
    for alpha in ANY:
        found = oracle(call_of(q, k, v, causal=True, entmax=alpha), torch.ones_like(q), torch.ones(1, 1, 4, dtype=F64))
        assert torch.equal(found.y[0, 0, :2], torch.zeros(2, 2, dtype=F64))
        assert torch.allclose(found.y[0, 0, 2:], torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=F64), atol=1e-13)
        assert found.lse[0, 0, :2].tolist() == [-torch.inf, -torch.inf]
        assert all(bool(torch.isfinite(found[name]).all()) for name in GRADIENTS)
        assert not found.dq[0, 0, :2].any()
    sunk = oracle(call_of(q, k, v, causal=True, entmax=1.5, sink=torch.tensor([0.7], dtype=F64)))
    assert sunk.lse[0, 0, :2].tolist() == pytest.approx([0.7, 0.7])
    assert sunk.p_sink[0, 0, :2].tolist() == pytest.approx([1.0, 1.0])


def test_towards_one_it_becomes_softmax() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=F64)
    y = backlight.attention(q, k, v)
    assert torch.equal(backlight.attention(q, k, v, entmax=1), y)
    off = [float((backlight.attention(q, k, v, entmax=alpha) - y).abs().max()) for alpha in (2.0, 1.5, 1.25, 1.05)]
    assert off == sorted(off, reverse=True)
    assert off[-1] < 0.1


def test_the_slope_of_a_weight() -> None:
    p = torch.tensor([0.0, 0.25, 1.0], dtype=F64)
    assert slope(p, torch.tensor(1.5, dtype=F64)).tolist() == [0.0, 0.5, 1.0]
    assert slope(p, torch.tensor(2.0, dtype=F64)).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("entmax", "words"),
    [
        (0.5, "entmax must be 1 (softmax) or from 1.05 to 2, got 0.5"),
        (2.5, "entmax must be 1 (softmax) or from 1.05 to 2, got 2.5"),
        (float("nan"), "entmax must be 1 (softmax) or from 1.05 to 2, got nan"),
        (True, "entmax must be a number, a tensor [Hq] or None, got True"),
        ("sparse", "entmax must be a number, a tensor [Hq] or None, got 'sparse'"),
        (torch.ones(3), "entmax must have shape (2,), one per query head, got (3,)"),
        (torch.ones(2, dtype=torch.int64), "entmax must have a floating-point dtype, got torch.int64"),
    ],
)
def test_bad_alphas(entmax: object, words: str) -> None:
    q = torch.randn(1, 2, 4, 4)
    with pytest.raises((TypeError, ValueError)) as caught:
        backlight.attention(q, q, q, entmax=entmax)  # type: ignore[call-overload]
    assert str(caught.value) == words


def test_not_with_tau() -> None:
    q, tau = torch.randn(1, 2, 4, 4), torch.zeros(2)
    with pytest.raises(ValueError, match=r"those of entmax are sparse already: give one of the two, got both$"):
        backlight.attention(q, q, q, tau=tau, entmax=1.5)


def test_a_learned_alpha_is_held_within_its_range() -> None:
    q = torch.randn(1, 2, 4, 4)
    alphas = torch.tensor([0.2, 7.0], requires_grad=True)
    y = backlight.attention(q, q, q, entmax=alphas)
    assert torch.equal(y, backlight.attention(q, q, q, entmax=torch.tensor(ALPHAS)))
    y.sum().backward()
    assert alphas.grad is not None
    assert not alphas.grad.any()


def test_against_the_package() -> None:
    entmax = pytest.importorskip("entmax")
    torch.manual_seed(5)
    s = torch.randn(6, 30, dtype=F64) * 2
    q, k, v = torch.eye(6, dtype=F64)[None, None], s.mT[None, None].contiguous(), torch.eye(30, dtype=F64)[None, None]
    for alpha, theirs in ((1.5, entmax.entmax15), (2.0, entmax.sparsemax), (1.3, None)):
        wanted = entmax.entmax_bisect(s, alpha, dim=-1, n_iter=60) if theirs is None else theirs(s, dim=-1)
        found = oracle(call_of(q, k, v, scale=1.0, entmax=alpha)).p[0, 0]
        assert float((found - wanted).abs().max()) < 1e-12


@pytest.mark.parametrize("options", [{}, {"sink": torch.tensor([0.5, -2.0], dtype=F64)}, {"softcap": 3.0}, {"scale": -0.4}])
@pytest.mark.parametrize("reaching", [300, 90])
def test_tiles_beyond_the_reach_of_norms_are_left_out(
    options: dict[str, object], reaching: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a bias that falls with distance: as many digits as without, and fewer products; beyond a short table nothing is left
    out."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 8, dtype=F64, requires_grad=True) for _ in range(3))
    bias = (-0.3 * torch.arange(reaching, dtype=F64)).repeat(2, 1).requires_grad_()
    alphas = torch.tensor([1.3, 1.9], dtype=F64, requires_grad=True)
    counts: list[int] = []
    honest = Scores.tile

    def counted(self: Scores, tile: Tile) -> Tensor:
        counts.append((tile.i1 - tile.i0) * (tile.j1 - tile.j0))
        return honest(self, tile)

    monkeypatch.setattr(Scores, "tile", counted)

    def results() -> tuple[list[Tensor], int]:
        counts.clear()
        with override("tiled", Config(32, 32, 32, 2)):
            y, lse = backlight.attention(q, k, v, causal=True, bias=bias, entmax=alphas, return_lse=True, **options)
            gradients = torch.autograd.grad(y.square().sum() + lse.sin().sum(), (q, k, v, bias, alphas))
        return [y, lse, *gradients], sum(counts)

    found, done = results()
    monkeypatch.setattr(tiled_entmax, "limits", lambda call: False)
    wanted, all_done = results()
    assert done < (0.8 if reaching == 300 else 1.1) * all_done
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).detach().abs().max()) < 1e-10
