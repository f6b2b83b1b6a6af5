"""What an edit of the tiled backend's source is, and the lines of it that several defects change."""

from __future__ import annotations

from dataclasses import dataclass

BOTH = ("forward", "backward")
FORWARD, BACKWARD = ("forward",), ("backward",)


@dataclass(frozen=True)
class Edit:
    """Replace `old` by `new` in a module of the backend; `sees` says which direction imports an edited shared module."""

    module: str
    old: str
    new: str
    sees: tuple[str, ...] = BOTH

    def applied(self, text: str) -> str:
        assert self.old in text, f"the text to break is gone from {self.module}.py: {self.old!r}"
        return text.replace(self.old, self.new)


def backward(old: str, new: str) -> Edit:
    return Edit("backward", old, new)


def forward(old: str, new: str) -> Edit:
    return Edit("forward", old, new)


def tangent(old: str, new: str, module: str = "tangent") -> Edit:
    return Edit(module, old, new, ("tangent",))


def after(line: str, *more: str) -> str:
    """The line with more lines of the same indentation below it."""
    return ("\n" + " " * 8).join((line, *more))


DS = "ds = dp.sub_(delta[:, part]).mul_(p)"
DK = "add_product_(dk[:, :, keys], scores.q[:, part].mT, dx)"
DV = "add_product_(dv[:, :, keys], do[:, part].mT, a.to(scores.operand))"
DQ = "add_product_(dq[:, part], dx, scores.k[:, keys])"
DELTA = "delta = (do * y).sum(dim=-1, keepdim=True)"
DBIAS = 'add_heads_(sums["dbias"], slab, call.group, dmirrored.flip(-1))'
PUT_DQ = 'block.put_rows(out["dq"], dq.mul_(call.scale))'
PUT_DK = 'put_keys(out["dk"], slab, dk.mul_(scores.dk_factor).mT)'
PUT_DV = 'put_keys(out["dv"], slab, dv.mT)'
READ_LSE = "return do, base2(lse), delta"
SCORES_SPEC = "self.call, self.spec, self.segment, self.workspace = call, call.spec, slab.segment, workspace"
TILES = "tiles(call.spec, i0, i1, z.sq, z.sk, config)"
ROWS_AND_KEYS = (
    "i = torch.arange(tile.i0, tile.i1).repeat_interleave({group})[:, None]; j = torch.arange(tile.j0, tile.j1)[None, :]"
)


def before(line: str, *more: str) -> str:
    """The line with more lines of the same indentation, that of the loop over tiles, above it."""
    return ("\n" + " " * 16).join((*more, line))


def lost_from(line: str, factor: str, cells: str) -> Edit:
    """A product of the backward whose `factor` is 0 in some cells."""
    kept = f"{factor}.masked_fill({cells}, 0)"
    return backward(line, before(line.replace(factor, kept), ROWS_AND_KEYS.format(group="call.group")))


def every_tile(*directions: str) -> list[Edit]:
    """Tiles without a visible key are visited too, as in a kernel that masks and never skips."""
    everywhere = "tiles(call.spec.replace(causal=False, window=(None, None)), i0, i1, z.sq, z.sk, config)"
    return [Edit(d, TILES, everywhere) for d in directions]
