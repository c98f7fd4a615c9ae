"""The least that a body of a kernel takes, whatever roles, tiles, numbers of parts and schedules are chosen for it.

Options count work for guesses: all elements, and 32 parts of what is split.  Kernels may do less:

- tiles on which a mask leaves nothing are skipped,
- there may be as few as two parts,
- some elementwise operations vanish where they are lowered (masks on tiles that they keep whole, negations, products of numbers),
- a product that is named as a class of its own still is summed as a product,
- what is inlined under other names is computed where it is read only,
- arrays that are read in several ways are in memory once.

The share of tiles that a mask leaves alive is taken from samples, here and in the models, so a bound is exact up to what these differ.
"""

from __future__ import annotations

import numpy as np

from .. import terms as T
from ..codegen.predicates import constraints_of
from ..cost_models.base import Sizes
from ..cost_models.walk import live_share
from ..terms import Affine, Term
from .region import Region

FEWEST = 2.0  # parts
SAMPLED = 0.97  # of a share that is known from samples


class Fewest:
    """Elements along axes, where there are as few parts as there may be."""

    def __init__(self, extents: dict[str, int]):
        self.extents = extents

    def whole(self, axis: str) -> float:
        return max(self.whole(axis[:-2]) if axis.endswith((".o", ".i")) else float(self.extents[axis]), 0.0)

    def count(self, axes: frozenset[str]) -> float:
        n = 1.0
        for a in axes:
            if not a.endswith((".o", ".i")):
                n *= self.extents[a]
            elif a.endswith(".o"):
                n *= self.whole(a) if a[:-2] + ".i" in axes else min(FEWEST, self.whole(a))
            elif a[:-2] + ".o" not in axes:
                n *= min(1.0, self.whole(a))  # of a part
        return n


def masks(region: Region) -> tuple[Affine, ...]:
    """Every affine constraint that a kernel of the region may skip tiles by."""
    memo: dict[int, Term | None] = {}
    out: dict[Affine, None] = {}
    order = sorted(range(len(region.nodes)), key=lambda c: region.rank[c])

    def position(c: int, depth: int = 0) -> Term | None:
        """A class as an expression of positions and numbers, if it is one."""
        if c not in memo:
            memo[c] = None  # no class is found in itself
            for n in region.nodes[c] if depth < 8 else ():
                if n.op == "num":
                    memo[c] = T.make("num", n.attr)
                elif n.op == "iota":
                    memo[c] = T.iota(n.attr)  # type: ignore[arg-type]
                elif n.op in ("add", "mul") or (n.op == "un" and n.attr == "neg"):
                    args = [position(a, depth + 1) for a in n.args]
                    if all(a is not None for a in args):
                        memo[c] = T.make(n.op, n.attr, [a for a in args if a is not None])
                if memo[c] is not None:
                    break
        return memo[c]

    for c in order:
        for n in region.nodes[c]:
            if n.op == "bi" and n.attr in ("lt", "le", "eq"):
                x, y = map(position, n.args)
                if x is None or y is None:
                    continue
                t = T.bi(n.attr, x, y)
                out |= dict.fromkeys(constraints_of(t) or ())
                if any(m.op == "un" and m.attr == "not" and m.args[0] == c for ns in region.nodes for m in ns):
                    out |= dict.fromkeys(constraints_of(T.un("not", t)) or ())
    return tuple(out)


def alive(constraints: tuple[Affine, ...], extents: dict[str, int]) -> float:
    """Share of elements that all of these keep."""
    axes = sorted({T.base(a) for c in constraints for a in c.axes})
    if not axes:
        return 1.0
    one = Sizes({a: np.ones(1) for a in axes}, {a: np.full(1, float(extents[a])) for a in axes})
    return min(1.0, SAMPLED * float(live_share(constraints, one)[0][0])) if all(extents[a] for a in axes) else 1.0


class Least:
    """What of a region's work is there at the least."""

    def __init__(self, region: Region):
        self.fewest = Fewest(region.extents)
        constraints = masks(region)
        self.masked = frozenset(T.base(a) for c in constraints for a in c.axes)
        self.alive = alive(constraints, region.extents)

    def share(self, axes: frozenset[str], elements: float) -> tuple[float, float]:
        """What there is to compute and what there is to read or write, at the least, relative to so many elements along these axes."""
        there = min(self.fewest.count(axes) / elements, 1.0) if elements else 1.0
        return there * (self.alive if any(T.base(a) in self.masked for a in axes) else 1.0), there
