"""What kernels take as they will be printed.

A model's price is that of the best schedule, with tiles in registers and matrix instructions.  Where the code generator cannot lay out
a kernel's tiles so, it prints something else: no pipeline of warpgroups, or each element goes to a thread, which may take a hundred
times as long.  Whether it can depends on the kernel's statements, roles and tiles, and to find out takes as long as to price hundreds of
tiles: so it is asked of the kernels of plans that would win.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..codegen.lower import LoweringError, lower
from ..codegen.tile import Contract, Gather, Load, Loop, Reduce, Store, TileProgram, walk
from ..cost_models.base import Array, CostModel, Prices, Refusal
from .kernels import Pricer, Scored
from .plan import Axis, Buffer, Kernel

TRIES = 12  # tiles asked for before all of them are taken for refused


class Printing:
    """buffers: inputs and outputs of the whole program (None: a kernel's own are all there are).  asked: how often the code generator was."""

    def __init__(self, pricer: Pricer, model: CostModel, buffers: Mapping[str, Buffer] | None):
        self.pricer, self.model, self.buffers = pricer, model, buffers
        self.asked = 0
        self.known: dict[tuple, Refusal] = {}  # refusals, by what they depend on
        self.torn: dict[tuple, list[tuple[frozenset, Refusal]]] = {}  # by roles: reductions and products that tear an axis

    def corrected(self, k: Scored, i: int, slack: float) -> list[Scored] | None:
        """None if the price at this number of parts (a place) is what the kernel takes, or less by no more than the slack, in seconds.
        Else its prices have been corrected, and the result is the kernel under other roles, which might be printed."""
        i = i if k.parts > 1 else 0
        others: list[Scored] = []
        tries = 0
        while (point := int(k.point[i])) not in k.printed:
            prices = k.prices(point, self.model)
            _, choices = k.said(point, prices)
            instead = prices.instead(choices)
            if instead is None or k.said(point, last(instead))[0] <= k.seconds[i] + slack:
                break
            why = self.refusal(k, point, choices)
            if why is None:
                k.printed.add(point)
                break
            tries += 1
            where = alike(k, point, why) if tries < TRIES else at_place(k, i)
            where = where & self.similar(k, point, prices)
            where[list(k.printed)] = False
            possible = np.isfinite(np.broadcast_to(k.scores(instead).seconds, where.shape))
            k.reprice(where & possible, instead)
            k.reprice(where & ~possible, last(instead))
            if not (why.smaller or k.turned or choices.get("warpgroups")):
                k.turned = True
                others = self.pricer.one_by_one(k)
        return others if tries else None

    def refusal(self, k: Scored, point: int, choices: dict[str, object]) -> Refusal | None:
        """Why the kernel cannot be printed with the tiles of this point and these choices.  What is known of a kernel that differs in
        elementwise work only is taken for true of this one, and that one is torn of all that do as much and more."""
        one = k.one(point)
        sizes = {a: int(v[0]) for a, v in one.extent.items()}
        axes = {a: Axis(sizes[a], max(int(one.tile[a][0]), 1), role) for a, role in k.roles.items()}
        form = tuple(k.roles.items()), bool(choices.get("warpgroups"))
        shape = *form, tuple(x.tile > 1 for x in axes.values())
        exact = *form, tuple(x.tile for x in axes.values()), tuple(choices.items())
        whole, gathered = frame(k.program), gathering(k.program)
        known = self.known.get((whole, *shape)) or self.known.get((whole, *exact))
        known = known or next((r for less, r in self.torn.get(shape, ()) if less <= gathered), None)
        if known is None and (known := self._ask(k, axes, sizes, choices)) is not None:
            self.known[whole, *(exact if known.smaller else shape)] = known
            if known.torn:
                self.torn.setdefault(shape, []).append((gathered, known))
        return known

    def _ask(self, k: Scored, axes: dict[str, Axis], sizes: dict[str, int], choices: dict[str, object]) -> Refusal | None:
        self.asked += 1
        extents = k.kernel.extents | sizes
        if not any("." in a for a in axes) and all(x.extent % x.tile == 0 for x in axes.values()):
            # what was lowered has in it the size of parts, and what of the last tile exists, but no size of a whole tile
            program = replace(k.program, axes=axes, extents=extents, choices=choices)
        else:
            kernel = Kernel("k", k.kernel.stores, axes, extents, choices, wide=k.kernel.wide)
            try:
                program = lower(kernel, k.buffers, k.program.compute_dtype)
            except LoweringError as e:
                return Refusal(str(e), True)
        return self.model.refusal(program, k.buffers if self.buffers is None else self.buffers)

    def similar(self, k: Scored, point: int, prices: Prices) -> Array:
        """Points that have the same kind of schedule as this one."""
        pipeline = np.broadcast_to(k.scores(prices).choices.get("warpgroups", np.zeros(1)) > 0, k.table.shape)
        return np.asarray((k.by == k.by[point]) & (pipeline == pipeline[point]))


def frame(p: TileProgram) -> tuple:
    """A kernel without its elementwise work: what layouts have to suit."""
    out: list[tuple] = []
    for s in walk(p.body):
        match s:
            case Loop():
                out.append((s.axis, *(c.phi.axes for c in s.carries)))
            case Reduce():
                out.append((s.arg.axes, s.axes))
            case Contract():
                out.append((s.a.axes, s.b.axes, s.axes))
            case Load() | Gather() | Store():
                out.append((type(s).__name__, s.buffer, tuple(ix.axes for ix in s.index)))
    return tuple(out)


def gathering(p: TileProgram) -> frozenset[tuple]:
    """Reductions and products of a kernel: what says where axes have to lie."""
    out: set[tuple] = set()
    for s in walk(p.body):
        match s:
            case Reduce():
                out.add((frozenset(s.arg.axes), frozenset(s.axes)))
            case Contract():
                out.add((frozenset((frozenset(s.a.axes), frozenset(s.b.axes))), frozenset(s.axes)))
    return frozenset(out)


def last(prices: Prices) -> Prices:
    """The prices of what can always be printed."""
    while (other := prices.instead({})) is not None:
        prices = other
    return prices


def at_place(k: Scored, i: int) -> Array:
    """Points with the i-th number of parts."""
    return np.arange(len(k.table)) // (len(k.table) // k.parts) == i


def alike(k: Scored, point: int, why: Refusal) -> Array:
    """Points that are refused, most likely, if the one is: those with larger tiles (where threads are crowded: inside, of as many rows),
    or those of whose axes a block sees more than one position where it did there."""
    tiles = np.stack([np.broadcast_to(k.sizes.flat(t), k.table.shape) for t in k.sizes.tile.values()])
    at = tiles[:, point : point + 1]
    like = tiles >= at if why.smaller else (tiles > 1) == (at > 1)
    if why.crowded:
        rows = np.array([k.roles[a] == "grid" for a in k.sizes.tile])
        like &= (tiles == at) | ~rows[:, None]
    return np.asarray(like.all(0))
