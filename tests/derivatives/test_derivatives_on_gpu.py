"""Tangents and second derivatives on a CUDA device, a case for each variant, against the tiled backend in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from dense import learned
from torch import Tensor

from backlight import differentiating, registry
from backlight.backends.tiled.second import Cotangents, second
from backlight.backends.tiled.tangent import Results, tangent
from backlight.call import Call
from backlight.errors import Unsupported
from cases import BF16, BY_NAME, FP16, FP32, Case, case_id

pytestmark = pytest.mark.gpu
BACKENDS = ("hopper", "triton")
# largest error, relative to the largest value or 1; cases that make rounding worse are held to what `tiled` has in that dtype
LIMITS = {FP32: 5e-5, FP16: 6e-3, BF16: 3e-2}
NAMES = (
    *("plain", "causal", "window", "softcap", "bias", "sink", "gate", "gqa", "varlen", "sq<sk", "tau", "mask", "pair"),
    *("causal,d=16,dv=40", "rows without keys,sink,dlse", "window sees nothing", "bias,two-sided,sq<sk", "varlen,empty k"),
    *("varlen,window,unequal", "sk=0,sink", "mask,nothing is seen", "mask,varlen,empty segments", "mask,pos,varlen,causal"),
    *("softcap,saturated", "pair,keys", "pair+softcap", "pair,batch+rows", "pair,hidden,sink", "everything,s=200"),
)
LONG = tuple(
    Case(f"long,{name},d={d}", b=1, hq=4, hkv=2, sq=333, sk=517, d=d, **options)
    for d in (64, 128)
    for name, options in {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 20)}}.items()
)
PACKED = Case("long,packed", hq=2, hkv=1, lengths_q=(300, 1, 0, 130), d=64, causal=True)
RUNS = [
    *((case, BF16) for case in (*map(BY_NAME.__getitem__, NAMES), *LONG, PACKED)),
    *((case, FP16) for case in (LONG[0], LONG[4])),
    *((BY_NAME[name], FP32) for name in ("causal", "softcap", "tau", "everything,s=200")),
]


def drawn(like: Tensor, seed: int) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like)


def tangents_of(call: Call) -> dict[str, Tensor]:
    return {name: drawn(x, 5 + n) for n, (name, x) in enumerate(learned(call).items())}


def in_double(call: Call) -> Call:
    return replace(call, **{name: x.double() for name, x in learned(call).items()})


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    for name, want in wanted.items():
        at = want.isfinite()
        assert torch.equal(at, found[name].isfinite()), name
        if at.any():
            yield name, float((found[name].double() - want)[at].abs().max()) / max(1.0, float(want[at].abs().max()))


def judge(found: dict[str, Tensor], coarse: Callable[[], dict[str, Tensor]], wanted: dict[str, Tensor], limit: float) -> None:
    """Within the limit, or within twice the error of `tiled` in the same dtype."""
    beyond = {name: error for name, error in errors(found, wanted) if error > limit}
    if beyond:
        allowed = dict(errors(coarse(), wanted))
        assert not {name: (error, allowed[name]) for name, error in beyond.items() if error > 2 * allowed[name]}


def named(results: Results) -> dict[str, Tensor]:
    return {"y": results.y, "lse": results.lse, "ty": results.ty, "tlse": results.tlse}


def backend_for(what: str, call: Call, name: str, record_property: Callable[[str, object], None]) -> bool:
    """Whether the backend has this derivative; why not is recorded."""
    try:
        differentiating.choose(what, call, name)
    except Unsupported as refusal:
        record_property("refused", "; ".join(refusal.reasons[name]))
        return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=case_id)
def test_tangents(
    case: Case, dtype: torch.dtype, known: bool, backend: str, record_property: Callable[[str, object], None]
) -> None:
    call = case.make(dtype, device="cuda").call
    if not backend_for("tangent", call, backend, record_property):
        return
    tangents = tangents_of(call)
    exact = tangent(in_double(call), {name: t.double() for name, t in tangents.items()}, None, save_u=True)
    u = None if exact.u is None else exact.u.to(dtype)
    saved = (exact.y.to(dtype), exact.lse.float(), u) if known else None
    y, lse, _, ty, tlse, _ = registry.get(backend).tangent(call, tangents, saved)
    found = {"y": y, "lse": lse, "ty": ty, "tlse": tlse}
    judge(found, lambda: named(tangent(call, tangents, None, save_u=False)), named(exact), LIMITS[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("came", ["all", "dty"])
@pytest.mark.parametrize(("case", "dtype"), RUNS, ids=case_id)
def test_second_derivatives(
    case: Case, dtype: torch.dtype, came: str, backend: str, record_property: Callable[[str, object], None]
) -> None:
    """With gradients at everything that the tangent gives, and as a double backward has them."""
    call = case.make(dtype, device="cuda").call
    if not backend_for("second", call, backend, record_property):
        return
    tangents = tangents_of(call)
    along = {name: t.double() for name, t in tangents.items()}
    results = tangent(in_double(call), along, None, save_u=True)
    y, lse, u, ty, tlse, tu = results.all
    rounded = tuple(None if x is None else x.float() if x.dim() == 3 else x.to(dtype) for x in (y, lse, u, ty, tlse, tu))
    dy, dty, dlse, dtlse = drawn(rounded[0], 21), drawn(rounded[0], 22), drawn(rounded[1], 23), drawn(rounded[1], 24)
    incoming = (dy, dlse, dty, dtlse) if came == "all" else (None, None, dty, None)
    needs = frozenset([*(f"d{name}" for name in tangents), *(f"dt{name}" for name in tangents)])
    given = Cotangents(*(None if x is None else x.double() for x in incoming))
    wanted = second(in_double(call), along, results, given, needs)
    found = registry.get(backend).second(call, tangents, rounded, incoming, needs)

    def coarse() -> dict[str, Tensor]:
        own = tangent(call, tangents, None, save_u=True)
        return second(call, tangents, own, Cotangents(*incoming), needs)

    judge(found, coarse, wanted, LIMITS[dtype])
