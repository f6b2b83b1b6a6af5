"""Documents of known lengths beside their intervals: calls that must run packed, and both results of each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.mask import Mask, documents


@dataclass(frozen=True)
class Documents:
    """A call over `length` positions; terms are drawn by name.

    entries: [B, S, H, D] in memory, as layers make them; otherwise [B, H, S, D].
    """

    lengths: tuple[Any, ...]
    length: int = 200
    batch: int = 1
    entries: bool = False
    by_tensor: bool = False
    causal: bool = False
    terms: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def quarter(self) -> Documents:
        """The same with a quarter of the positions, for interpreters."""
        lengths = tuple(tuple(n // 4 for n in each) if isinstance(each, tuple) else each // 4 for each in self.lengths)
        return replace(self, lengths=lengths, length=self.length // 4)

    def mask(self, device: torch.device | str = "cpu") -> Mask:
        lengths = torch.tensor(self.lengths, device=device) if self.by_tensor else [*self.lengths]
        return documents(lengths=lengths, length=self.length, causal=self.causal, device=device)

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu", d: int = 16) -> dict[str, Tensor]:
        """q, k, v of grouped heads and the terms, as leaves."""
        generator = torch.Generator().manual_seed(0)

        def rows(heads: int) -> Tensor:
            shape = (self.batch, self.length, heads, d) if self.entries else (self.batch, heads, self.length, d)
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return drawn.transpose(1, 2) if self.entries else drawn

        found = {"q": rows(4), "k": rows(2), "v": rows(2), "gate": rows(4)}
        found |= {"bias": torch.randn(4, 40, generator=generator), "sink": torch.randn(4, generator=generator)}
        found["tau"] = torch.tensor([0.4, 0.2, 0.1, 0.3])
        kept = ("q", "k", "v", *self.terms)
        like_q = ("q", "k", "v", "gate")
        return {
            name: x.to(device, dtype if name in like_q else torch.promote_types(dtype, torch.float32)).requires_grad_()
            for name, x in found.items()
            if name in kept
        }


def results(mask: Mask, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """y, lse and the gradients of both, by name."""
    y, lse = backlight.attention(**tensors, mask=mask, return_lse=True, **options)
    weights = torch.arange(y.numel(), device=y.device).reshape(y.shape).sin().to(y.dtype)
    of_lse = torch.where(lse.isfinite(), lse, 0).cos().sum()
    grads = torch.autograd.grad((y * weights).sum().to(lse.dtype) + of_lse, [*tensors.values()])
    return {"y": y.detach(), "lse": lse.detach()} | {f"d{name}": grad for name, grad in zip(tensors, grads, strict=True)}


SEVERAL = ("gate", "bias", "sink", "tau")
CASES: dict[str, Documents] = {
    "causal": Documents((130, 70), options={"causal": True}),
    "causal mask": Documents((130, 70), causal=True),
    "full": Documents((90, 110)),
    "empty documents": Documents((0, 150, 0, 50), length=280, options={"causal": True}),
    "padding": Documents((75, 60), options={"causal": True}),
    "padding,by tensor": Documents((75, 60), by_tensor=True, causal=True),
    "more than there is": Documents((75, 600), by_tensor=True),
    "no document": Documents((0,), terms=("sink",)),
    "window": Documents((130, 70), causal=True, options={"window": (20, 9)}),
    "everything": Documents((130, 50), terms=SEVERAL, options={"causal": True, "softcap": 20.0, "bias_origin": 3}),
    "heads side by side": Documents((75, 60), batch=2, terms=("gate",), options={"causal": True}),
    "rows one after another": Documents((75, 60), batch=2, entries=True, terms=SEVERAL, options={"window": (30, 5)}),
    "rows of entries": Documents(((75, 60), (140, 60)), batch=2, entries=True, causal=True, terms=("sink", "gate")),
    "filled entries": Documents(((75, 125), (140, 60)), batch=2, entries=True, terms=("bias",), options={"bias_origin": 30}),
}
