"""Inputs of an examination: drawn as a recipe says, or the caller's own tensors, checked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from backlight.mask import Mask
from backlight.problems import checks, draw
from backlight.problems.axes import Sizes, with_tensors
from backlight.problems.problem import Problem
from backlight.problems.recipes import RECIPES
from backlight.spec import TERM_NAMES, AttentionSpec

DEFAULT_SHAPE = (2, 4, 200, 64)
DRAWN_MASK = "two runs"
# one for the whole batch, as parameters and projections of pairs are
DRAWN_PAIRS = ("heads", "rows", "wide")
TAU_CYCLE = (-1.0, 0.5, -2.0, -0.5)
ALPHA_CYCLE = (1.5, 1.25, 1.75, 1.1)


class Settings(TypedDict, total=False):
    """Keywords of `problem_of`: what the caller brings beside q, k and v, and how the rest is drawn (see `make`)."""

    do: Tensor | None
    bias: Tensor | int | None
    sink: Tensor | None
    tau: Tensor | float | None
    gate: Tensor | None
    pair_bias: Tensor | tuple[str, ...] | None
    mask: Mask | None
    cu_seqlens: Tensor | tuple[Tensor, Tensor] | None
    shape: tuple[int, int, int, int]
    kv_heads: int | None
    sk: int | None
    dv: int | None
    dtype: torch.dtype
    recipe: str
    seed: int
    device: torch.device | str


def problem_of(
    spec: AttentionSpec,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    **settings: Unpack[Settings],
) -> Problem:
    """The caller's tensors, or tensors drawn as the settings say."""
    drawn: dict[str, Any] = dict(settings)
    unknown = drawn.keys() - {*Settings.__annotations__, *TERM_NAMES}
    if unknown:
        raise TypeError(f"no argument is called {min(unknown)!r}; there are {', '.join(Settings.__annotations__)}")
    checks.check_spec(spec)
    terms = {name: drawn.pop(name, None) for name in TERM_NAMES}
    mask = drawn.pop("mask", None)
    terms |= {} if mask is None else {"rows": mask.rows, "pos": mask.pos}
    checks.check_terms(spec, terms)
    tensors, cu_seqlens, seed = Given(q, k, v, drawn.pop("do", None)), drawn.pop("cu_seqlens", None), drawn.pop("seed", 0)
    checks.check_seed(seed)
    if tensors.any:
        return given(spec, tensors, terms, cu_seqlens, seed)
    problem = make(spec, seed=seed, cu_seqlens=cu_seqlens, **drawn, **terms)
    if tensors.do is not None:
        checks.check_like_output("do", tensors.do, problem.call.q, problem.call.v)
        problem = problem.replace(dy=tensors.do.detach().to(problem.call.q))
    return problem


def make(
    spec: AttentionSpec,
    shape: tuple[int, int, int, int] = DEFAULT_SHAPE,
    *,
    kv_heads: int | None = None,
    sk: int | None = None,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    recipe: str = "gaussian",
    seed: int = 0,
    device: torch.device | str = "cpu",
    **given: Any,
) -> Problem:
    """Tensors of one recipe: q [B,Hq,S,D], k [B,kv_heads,sk,D], v [..,dv], dO like o, learned terms as the spec asks.

    given: `cu_seqlens`, and terms by name: a tensor, a number of columns for `bias`, a value for every head of `tau`, words for
    `pair_bias` (`draw.PAIR_WORDS`). Terms that are not given are drawn.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {recipe!r}")
    cu_q, cu_k = checks.borders(given.pop("cu_seqlens", None))
    sizes = _sizes(spec, shape, (kv_heads, sk, dv), (cu_q, cu_k), given.get("bias"))
    checks.check_heads(sizes.heads, sizes.kv_heads)
    checks.check_dtype("dtype", dtype)
    device = checks.usable_device(device)
    checks.check_room(sizes, device)
    chosen = _chosen(spec, given, sizes.heads, dtype)
    names = ("q", "k", "v", "dy", *draw.terms_to_draw(spec, chosen))
    drawn = draw.normal(sizes, names, dtype=dtype, seed=seed, wide=torch.float32)
    drawn["q"], drawn["k"] = RECIPES[recipe](drawn["q"], drawn["k"], spec.resolve_scale(sizes.dim))
    chosen = draw.mask_terms(spec, sizes, DRAWN_MASK, seed) | chosen
    if spec.pair_bias and "pair_bias" not in chosen:
        counted = sizes
        if cu_q is not None and cu_k is not None:
            counted = sizes.of_sequences(*(cu.diff().tolist() for cu in (cu_q, cu_k)))
        chosen["pair_bias"] = draw.pair_bias_term(counted, given.get("pair_bias") or DRAWN_PAIRS, dtype, seed)
    placed = draw.settle(drawn, dtype, device) | {name: x.to(device) for name, x in chosen.items()}
    if cu_q is not None and cu_k is not None:
        same, cu_q = cu_k is cu_q, cu_q.to(device)
        cu_k = cu_q if same else cu_k.to(device)
    call = draw.call_of(spec, placed, cu_q, cu_k)
    checks.check_call(call)
    return Problem(call, placed["dy"], None, recipe, seed)


def _sizes(
    spec: AttentionSpec,
    shape: tuple[int, int, int, int],
    others: tuple[int | None, int | None, int | None],
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    bias: Any,
) -> Sizes:
    """The lengths of all axes; kv_heads, sk and dv are those of the query side unless they are given."""
    b, hq, sq, d = checks.four_sizes("shape", shape)
    hkv, sk, dv = (
        default if size is None else checks.size(name, size)
        for name, size, default in zip(("kv_heads", "sk", "dv"), others, (hq, sq, d), strict=True)
    )
    cu_q, cu_k = cu_seqlens
    if cu_q is not None and cu_k is not None:
        b, sq, sk = 1, int(cu_q[-1]), int(cu_k[-1])
        for name, total in (("cu_seqlens_q", sq), ("cu_seqlens_k", sk)):
            checks.size(f"the last of {name}", total)
    columns = bias if isinstance(bias, int) else max(1, spec.bias_origin + max(1, sk // 2)) if spec.bias else 0
    return Sizes(b, hq, hkv, sq, sk, d, dv, columns)


def _chosen(spec: AttentionSpec, terms: dict[str, Any], heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Terms that are not drawn: tensors that were given, tau and entmax."""
    unknown = [name for name in terms if name not in TERM_NAMES]
    if unknown:
        raise TypeError(f"no term is called {unknown[0]!r}; there are {', '.join(TERM_NAMES)}")
    chosen = {name: terms[name] for name in spec.terms if isinstance(terms.get(name), Tensor)}
    if spec.tau and "tau" not in chosen:
        tau = terms.get("tau")
        chosen["tau"] = draw.repeated(TAU_CYCLE if tau is None else (tau,), heads).to(draw.parameter_dtype(dtype))
    if spec.entmax and "entmax" not in chosen:
        alpha = terms.get("entmax")
        chosen["entmax"] = draw.repeated(ALPHA_CYCLE if alpha is None else (alpha,), heads).to(draw.parameter_dtype(dtype))
    return chosen


@dataclass(frozen=True)
class Given:
    """Tensors of the caller's, canonical layout; q, k and v come together, and a missing dO or term is drawn."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    do: Tensor | None = None

    @property
    def any(self) -> bool:
        return self.q is not None or self.k is not None or self.v is not None


def given(
    spec: AttentionSpec,
    tensors: Given,
    terms: dict[str, Any],
    cu_seqlens: tuple[Tensor, Tensor] | Tensor | None = None,
    seed: int = 0,
) -> Problem:
    """A problem from the user's own tensors."""
    q, k, v, do = tensors.q, tensors.k, tensors.v, tensors.do
    if q is None or k is None or v is None:
        missing = [name for name, x in (("q", q), ("k", k), ("v", v)) if x is None]
        raise ValueError(f"q, k and v must be given together, got none for {' and '.join(missing)}")
    checks.check_qkv(q, k, v)
    if do is not None:
        checks.check_like_output("do", do, q, v)
    b, hq, sq, d = q.shape
    settings: dict[str, Any] = {
        "kv_heads": k.shape[1],
        "sk": k.shape[2],
        "dv": v.shape[3],
        "dtype": q.dtype,
        "device": q.device,
    }
    drawn = make(spec, (b, hq, sq, d), seed=seed, cu_seqlens=cu_seqlens, **settings, **terms)
    call = with_tensors(drawn.call, {"q": q.detach(), "k": k.detach(), "v": v.detach()})
    checks.check_call(call)
    return Problem(call, drawn.dy if do is None else do.detach().to(q.dtype), None, "captured", seed)
