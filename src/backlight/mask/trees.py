"""Masks of trees: a node sees itself and its ancestors."""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.arguments import check_flag
from backlight.mask.inputs import Wholes, one_run, per_entry
from backlight.mask.mask import Mask, as_int32


def tree(parents: Wholes, *, preorder: bool = False, device: torch.device | str | None = None) -> Mask:
    """Each node of a tree sees itself and its ancestors: drafts that share beginnings, rollouts of one prompt.

        tree([-1, 0, 0, 1, 2])           0
            x . . . .                   / \\
            x x . . .                  1   2
            x . x . .                  |   |
            x x . x .                  3   4
            x . x . x

    Nodes come in any order. Row i is compared as pos_i, the place of node i when the tree is walked from its root, children
    after parents and subtrees one after another: the descendants of a node are one run of places.

    parents:  [S] or [B, S]: the parent of each node, negative for a root; several trees are several roots.
    preorder: the nodes stand in that walk's order already. The mask then has no pos: rows [j, j + size of the subtree) see
        key j.

    A prompt is a chain of nodes: `parents` of a prompt of 2 and two drafts is [-1, 0, 1, 1]. For rows of the drafts alone see
    `Mask.last_rows`. Work is O(S log S) on the device of parents. Where that waits for nothing, parents are checked.
    """
    check_flag("preorder", preorder)
    found = per_entry("parents", parents, "S", device).long()
    size = found.shape[1]
    if found.device.type == "cpu":
        _check(found, size, preorder)
    own = torch.arange(size, device=found.device).expand_as(found)
    above = torch.where((found < size) & (found != own), found, -1).clamp(min=-1)
    if preorder:
        return one_run(own[:, None], _ends(above)[:, None])
    before, sizes = _walk(above)
    return Mask(one_run(before[:, None], (before + sizes)[:, None]).rows, as_int32(before))


def _ends(parents: Tensor) -> Tensor:
    """Where the subtree of each node ends, [B, S], of nodes in preorder: at the next sibling of it, or of the nearest ancestor
    that has one. That ancestor is found by pointer doubling."""
    size = parents.shape[1]
    order = parents.sort(dim=1, stable=True)
    same = order.values[:, 1:] == order.values[:, :-1]
    sibling = torch.full_like(parents, size)
    sibling = sibling.scatter(1, order.indices[:, :-1], torch.where(same, order.indices[:, 1:], size))
    nearest = torch.where((sibling < size) | (parents < 0), torch.arange(size, device=parents.device), parents)
    for _ in range(size.bit_length()):
        nearest = nearest.gather(1, nearest)
    return sibling.gather(1, nearest)


def _check(parents: Tensor, size: int, preorder: bool) -> None:
    own = torch.arange(size)
    wrong = (parents >= size) | (parents == own) | (preorder & (parents > own))
    if bool(wrong.any()):
        b, node = wrong.nonzero()[0].tolist()
        earlier = "an earlier node" if preorder else f"another node below {size}"
        raise ValueError(f"the parent of node {node} must be {earlier}, or negative for a root, got {int(parents[b, node])}")
    above = parents.clamp(min=-1)
    for _ in range(size.bit_length()):
        above = torch.where(above < 0, -1, above.gather(1, above.clamp(min=0)))
    if bool((above >= 0).any()):
        raise ValueError(f"parents must form a tree, got a circle above node {int((above >= 0).nonzero()[0, 1])}")
    if preorder and not bool((_walk(parents.clamp(min=-1))[0] == own).all()):
        raise ValueError("with preorder=True each subtree must be one run of nodes, its root first; leave preorder out")


def _walk(parents: Tensor) -> tuple[Tensor, Tensor]:
    """(place in preorder, size of the subtree) of each node, [B, S] each; children in the order of their numbers.

    An Euler tour, ranked by pointer doubling: event v enters node v, event S + v leaves it, event 2S is the end.
    """
    size = parents.shape[1]
    if not size:
        return parents, parents
    own = torch.arange(size, device=parents.device).expand_as(parents)
    order = parents.sort(dim=1, stable=True)
    # neighbours in this order are siblings where they have the same parent
    same = order.values[:, 1:] == order.values[:, :-1]
    none = torch.full_like(parents, 2 * size)
    leave = torch.where(parents < 0, none, size + parents)
    following = torch.where(same, order.indices[:, 1:], leave.gather(1, order.indices[:, :-1]))
    leave = leave.scatter(1, order.indices[:, :-1], following)
    first = torch.cat([torch.ones_like(same[:, :1]), ~same], dim=1) if size > 1 else torch.ones_like(parents, dtype=torch.bool)
    slots = torch.cat([own + size, none[:, :1]], dim=1)
    eldest = torch.where(first & (order.values >= 0), order.values, size)
    enter = slots.scatter(1, eldest, order.indices)[:, :size]
    after = torch.cat([enter, leave, none[:, :1]], dim=1)
    # nodes entered from an event to the next one, and which that is
    tour = torch.stack([(torch.arange(2 * size + 1, device=parents.device) < size).long().expand_as(after), after])
    for _ in range((2 * size).bit_length()):
        further = tour.gather(2, tour[1:].expand_as(tour))
        further[0].add_(tour[0])
        tour = further
    entered, left = tour[0, :, :size], tour[0, :, size : 2 * size]
    return size - entered, entered - left
