"""One examination as data: all that `diagnose` is told apart from the subject. Commands, shrinking and scripts share it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from backlight.problems import checks
from backlight.problems.axes import cut, cut_mask, cut_pairs
from backlight.problems.draw import borders
from backlight.spec import LEARNED, OF_PAIRS, TERM_NAMES, AttentionSpec


@dataclass(frozen=True, eq=False)
class Case:
    """What to examine a subject with. shape is (B, Hq, Sq, D); kv_heads, sk, dv default to the query side.

    bias: columns of the drawn table; tau, entmax: value of every head; pair_bias: words for the drawn one (`draw.PAIR_WORDS`);
    None = as the recipe draws it. lengths: packed sequences instead of a batch; key_lengths: of their keys, where other.
    tensors: captured inputs in canonical layout, from which the leading batches, heads, rows and columns are taken when the
    shape is smaller than they are. precision: what a kernel is judged as, None for the dtype of its inputs.
    """

    spec: AttentionSpec = field(default_factory=AttentionSpec)
    shape: tuple[int, int, int, int] = (2, 4, 200, 64)
    kv_heads: int | None = None
    sk: int | None = None
    dv: int | None = None
    dtype: torch.dtype = torch.bfloat16
    recipe: str = "gaussian"
    seed: int = 0
    level: str = "quick"
    device: str = "cpu"
    bias: int | None = None
    tau: float | None = None
    entmax: float | None = None
    pair_bias: tuple[str, ...] | None = None
    lengths: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    tensors: dict[str, Tensor] | None = None
    precision: str | None = None

    def replace(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def packed(self) -> bool:
        return self.lengths is not None or (self.tensors is not None and "cu_seqlens_q" in self.tensors)

    @staticmethod
    def captured(tensors: dict[str, Tensor], spec: AttentionSpec, **settings: Any) -> Case:
        """A case of captured tensors: shape and dtype are theirs, and learned terms found among them join the spec."""
        if tensors["q"].dim() == 3:
            rows = {name: x.transpose(0, 1)[None] for name, x in tensors.items() if x.dim() == 3}
            tensors = tensors | rows
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        checks.check_qkv(q, k, v)
        if "do" in tensors:
            checks.check_like_output("do", tensors["do"], q, v)
        for term in TERM_NAMES:
            # a bias of pairs of packed sequences counts by sequence: it is checked with the call
            if term in tensors and not (term in OF_PAIRS and "cu_seqlens_q" in tensors):
                checks.check_term(term, tensors[term], q, v)
        return Case(
            spec=spec.replace(**{term: True for term in TERM_NAMES if term in tensors}),
            shape=(q.shape[0], q.shape[1], q.shape[2], q.shape[3]),
            kv_heads=k.shape[1],
            sk=k.shape[2],
            dv=v.shape[3],
            dtype=q.dtype,
            tensors=tensors,
            **settings,
        )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `diagnose`, the spec left out."""
        shared = {"level": self.level, "seed": self.seed, "device": self.device}
        shared |= {} if self.precision is None else {"precision": self.precision}
        if self.tensors is not None:
            moved = {name: x.to(self.device) for name, x in self.narrowed().items()}
            return shared | {"recipe": "captured"} | self._drawn_terms() | moved | self._boundaries()
        drawn: dict[str, Any] = {"recipe": self.recipe, "shape": self.shape, "dtype": self.dtype}
        drawn |= {name: getattr(self, name) for name in ("kv_heads", "sk", "dv") if getattr(self, name) is not None}
        return shared | drawn | self._drawn_terms() | self._boundaries()

    def _drawn_terms(self) -> dict[str, Any]:
        chosen = {name: getattr(self, name) for name in ("bias", "tau", "entmax", "pair_bias") if getattr(self.spec, name)}
        return {name: value for name, value in chosen.items() if value is not None}

    def _boundaries(self) -> dict[str, Any]:
        if self.lengths is not None:
            own = borders(self.lengths)
            return {"cu_seqlens": own if self.key_lengths is None else (own, borders(self.key_lengths))}
        if not self.packed:
            return {}
        assert self.tensors is not None
        cu_q = self.tensors["cu_seqlens_q"]
        return {"cu_seqlens": (cu_q, self.tensors.get("cu_seqlens_k", cu_q))}

    def narrowed(self) -> dict[str, Tensor]:
        """The captured tensors cut to this case's shape, learned terms only where the spec still has them."""
        assert self.tensors is not None
        b, h, s, d = self.shape
        kv, sk, dv = (own if size is None else size for size, own in ((self.kv_heads, h), (self.sk, s), (self.dv, d)))
        lengths = {"batch": b, "heads": h, "kv_heads": kv, "rows": s, "keys": sk, "dim": d, "values": dv}
        ranges = {axis: slice(length) for axis, length in lengths.items()}
        known = [name for name in (*LEARNED, "do") if name in self.tensors]
        wanted = [name for name in known if name not in TERM_NAMES or getattr(self.spec, name)]
        learned = {name: cut(name, self.tensors[name], ranges) for name in wanted if name not in OF_PAIRS}
        batch = len(self.tensors["q"])
        of_pairs = {"heads": ranges["heads"]} if self.packed else ranges
        learned |= {name: cut_pairs(self.tensors[name], batch, of_pairs) for name in wanted if name in OF_PAIRS}
        masks = [name for name in ("rows", "pos") if name in self.tensors and getattr(self.spec, name)]
        return learned | {name: cut_mask(name, self.tensors[name], ranges) for name in masks}

    def differences(self) -> dict[str, Any]:
        """Fields of the spec that differ from plain attention."""
        plain = AttentionSpec()
        names = [f.name for f in fields(plain)]
        return {name: getattr(self.spec, name) for name in names if getattr(self.spec, name) != getattr(plain, name)}
