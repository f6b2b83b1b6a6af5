"""Four bugs that cost people days, small enough to read, and the catalogue's defects as demos: `backlight doctor --demo NAME`.

Each kernel here is plain attention with one thing done wrong, the way it was done wrong in the field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from backlight.doctor.defects.catalogue import BY_ID, demo_arguments
from backlight.doctor.subject.case import Case
from backlight.doctor.subject.names import UnknownSubject
from backlight.doctor.subject.subject import Subject
from backlight.problems.checks import borders
from backlight.spec import AttentionSpec

THREADS = 16
LEVELS = ("quick", "full", "forensic", "adversarial")


@dataclass(frozen=True)
class Story:
    """A seed case: what happened, the kernel that ran, and the author's reference where that was the culprit."""

    title: str
    tells: str
    kernel: Callable[..., Any]
    spec: AttentionSpec
    level: str = "quick"
    reference: Callable[..., Any] | None = None


# --- case A ------------------------------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, mask: Any = None, causal: bool = False) -> Tensor:
    """Attention as people write it, right in itself; `mask` is read only when it is a tensor."""
    s = q.float() @ k.float().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if isinstance(mask, Tensor):
        s = s.masked_fill(~mask, -torch.inf)
    if causal:
        s = s.masked_fill(~AttentionSpec(causal=True).allowed(s.shape[-2], s.shape[-1], s.device), -torch.inf)
    return (s.softmax(dim=-1) @ v.float()).to(q.dtype)


def kernel(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """The kernel that was suspected for days, and was right."""
    return attention(q, k, v, causal=causal)


def reference_called_by_position(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """The call in the test: the fifth argument was meant to be `causal`, and is `mask`."""
    return attention(q, k, v, None, causal)


# --- case B ------------------------------------------------------------------------------------------------------------------


def every_thread_adds(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """All threads of a group add the same product to the same element of dk."""
    return attention(q, _with_gradient(k, lambda dk: dk * THREADS), v, causal=causal)


def _with_gradient(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    copy = x.clone()
    if copy.requires_grad:
        copy.register_hook(change)
    return copy


# --- case C ------------------------------------------------------------------------------------------------------------------


class _StrideOfQ(torch.autograd.Function):
    """The backward addresses dO with q's head stride: right for a contiguous dO, wrong for what `out.sum()` delivers."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.causal = causal
        return attention(q, k, v, causal=causal)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (do,) = gradients
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            o = attention(q, k, v, causal=ctx.causal)
            return *torch.autograd.grad(o, (q, k, v), _read_with_head_stride(do, q.stride(1))), None


def _read_with_head_stride(do: Tensor, head_stride: int) -> Tensor:
    """dO as the kernel loads it; what lies outside the storage reads as 0."""
    memory = torch.as_strided(do, (do.untyped_storage().nbytes() // do.element_size(),), (1,), 0)
    strides = (do.stride(0), head_stride, do.stride(2), do.stride(3))
    address = torch.full(do.shape, int(do.storage_offset()), device=do.device)
    for axis, stride in enumerate(strides):
        shape = [1] * do.dim()
        shape[axis] = -1
        address = address + stride * torch.arange(do.shape[axis], device=do.device).view(shape)
    return torch.where(address < memory.numel(), memory[address.clamp(max=memory.numel() - 1)], 0)


def head_stride_of_q(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    return _StrideOfQ.apply(q, k, v, causal)


# --- case D ------------------------------------------------------------------------------------------------------------------


def one_nan(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """One element of dv is NaN; `max(worst, difference)` skips it, so the author's test stayed green."""

    def poison(dv: Tensor) -> Tensor:
        dv = dv.clone()
        dv[-1, -1, dv.shape[2] // 2, 0] = torch.nan
        return dv

    return attention(q, k, _with_gradient(v, poison), causal=causal)


STORIES = {
    "case-a": Story(
        "The mask that never arrived",
        "Kernel and reference disagreed above the diagonal, and row 0 of dq was all zero. Days went into the kernel. It was "
        "right: the test called the reference by position and `causal` landed in another parameter.",
        kernel,
        AttentionSpec(causal=True),
        reference=reference_called_by_position,
    ),
    "case-b": Story(
        "dk off by a constant",
        f"{THREADS} threads added the same product to the same address: dk came out {THREADS} times too large.",
        every_thread_adds,
        AttentionSpec(),
    ),
    "case-c": Story(
        "Only head 0 receives gradients",
        "The backward read dO with q's head stride. A contiguous dO hides it; the dO of out.sum().backward() has stride 0, and "
        "every head but the first reads somewhere else.",
        head_stride_of_q,
        AttentionSpec(),
        "full",
    ),
    "case-d": Story(
        "The NaN that passed",
        "The test kept a running max(worst, difference). A comparison with NaN is false, so a NaN gradient counted as a pass.",
        one_nan,
        AttentionSpec(causal=True),
    ),
}


# --- demos by name -----------------------------------------------------------------------------------------------------------


def subject_of(name: str) -> Subject:
    """The kernel of a demo: a story's, the reference of a story (`case-a/reference`), or a broken kernel of the catalogue."""
    from backlight.doctor.defects import broken

    story, _, part = name.partition("/")
    if story in STORIES:
        function = STORIES[story].reference if part == "reference" else STORIES[story].kernel
        if function is None:
            raise UnknownSubject(f"{story} has no reference")
        return Subject(function, layout="BHSD", name=f"demo:{name}")
    return replace(broken.subject(_known(name)), name=f"demo:{name}")


def prepare(name: str, case: Case, against: str | None) -> tuple[Case, str | None]:
    """The case that shows a demo: spec and shape are the demo's own, the level is raised where the defect needs it."""
    if name in STORIES:
        story = STORIES[name]
        reference = f"demo:{name}/reference" if story.reference is not None else against
        return case.replace(spec=story.spec, level=_higher(case.level, story.level)), reference
    shown = demo_arguments(_known(name))
    level = _higher(case.level, shown.pop("level", "quick"))
    packed = [None if cu is None else tuple(cu.diff().tolist()) for cu in borders(shown.pop("cu_seqlens", None))]
    lengths, of_keys = packed
    return case.replace(level=level, lengths=lengths, key_lengths=None if of_keys == lengths else of_keys, **shown), against


def own_settings(name: str) -> tuple[str, ...]:
    """Settings of a case that `prepare` replaces whatever they were, besides those of the attention itself."""
    if name in STORIES:
        return ()
    shown = demo_arguments(_known(name))
    return ("lengths", *("lengths" if setting == "cu_seqlens" else setting for setting in shown if setting != "level"))


def _known(name: str) -> str:
    if name not in BY_ID:
        close = get_close_matches(name, [*BY_ID, *STORIES])
        hint = f"did you mean {' or '.join(close)}?" if close else "see backlight doctor --list"
        raise UnknownSubject(f"no demo is called {name!r}; {hint}")
    return name


def _higher(a: str, b: str) -> str:
    return max(a, b, key=LEVELS.index)
