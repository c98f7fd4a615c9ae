"""From a body to a kernel: the roles of its axes, its tile program, and what that costs at every tile size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field

import numpy as np

from .. import terms as T
from ..codegen.lower import LoweringError, lower
from ..codegen.tile import TileProgram, walk
from ..cost_models.base import CostModel, Prices, Scores, Sizes
from ..terms import Term
from .bodies import Bodies, State
from .plan import Axis, Buffer, Kernel, Store
from .region import Memory, Region, axis_key
from .stores import Names, stores_of

MOST_POINTS = 2000
MOST_ROLES = 8
MOST_OPERATIONS = 1000  # of a kernel that computes parts of tensors again: each layer of a network may double them
PLAIN = (("warpgroups", 0), ("cluster", 1), ("together", 1))  # choices that are left out where they are so
SHORT = 64  # elements of a reduced axis that a block may go through one by one


@dataclass
class Split:
    """Numbers of parts to try for one axis, and the block that goes with each."""

    axis: str
    parts: np.ndarray
    block: np.ndarray

    @property
    def halves(self) -> tuple[str, str]:
        return T.outer(self.axis), T.inner(self.axis)

    @classmethod
    def of(cls, axis: str, extent: int, counts: tuple[int, ...]) -> Split | None:
        seen: dict[int, int] = {}
        for s in counts:
            block = -(-extent // s)
            step = 64 if block >= 256 else 16
            block = -(-block // step) * step
            seen.setdefault(block, -(-extent // block))
        pairs = [(p, b) for b, p in seen.items() if p > 1]
        if not pairs:
            return None
        return cls(axis, np.array([p for p, _ in pairs], float), np.array([b for _, b in pairs], float))


@dataclass
class Scored:
    """A kernel with roles, priced.

    parts       how many numbers of parts there are (1 if nothing is split)
    table       time at every point, those of one number of parts after the other
    kernel      what was lowered, at stand-in sizes; buffers: what it reads and writes
    seconds     best time at each number of parts; point: where that is
    printed     points at which it is known to be printed as it is priced (see printing.py)
    by          whose price each point has: 0: the model's own, n: that of others[n − 1], for what is printed instead
    turned      has it been looked at under roles that might be printed?
    """

    roots: tuple[int, ...]
    bodies: Bodies
    state: State
    roles: dict[str, str]
    sizes: Sizes
    parts: int
    program: TileProgram
    table: np.ndarray
    kernel: Kernel
    buffers: dict[str, Buffer]
    split: Split | None
    seconds: np.ndarray = field(init=False)
    point: np.ndarray = field(init=False)
    by: np.ndarray = field(init=False)
    printed: set[int] = field(default_factory=set)
    others: list[Prices] = field(default_factory=list)
    turned: bool = False
    _scores: dict[int, Scores] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by = np.zeros(len(self.table), int)
        self.choose()

    def prices(self, point: int, model: CostModel) -> Prices:
        """Who has priced it there."""
        n = int(self.by[point])
        return self.others[n - 1] if n else model

    def reprice(self, points: np.ndarray, prices: Prices) -> None:
        """Give these points other prices, and choose anew."""
        if not any(x is prices for x in self.others):
            self.others.append(prices)
        points = points & np.isfinite(self.table)
        self.by = np.where(points, next(n for n, x in enumerate(self.others, 1) if x is prices), self.by)
        self.table = np.where(points, self.scores(prices).seconds, self.table)
        self.choose()

    def scores(self, prices: Prices) -> Scores:
        """What these prices say of all points, looked up once."""
        if id(prices) not in self._scores:
            self.known(prices, prices.cost(self.program, self.sizes))
        return self._scores[id(prices)]

    def known(self, prices: Prices, scores: Scores) -> None:
        """Keep what these prices say."""
        self._scores[id(prices)] = scores

    def said(self, point: int, prices: Prices) -> tuple[float, dict[str, object]]:
        """Seconds at one point by these prices, and the choices that go with them (none that say what holds without them)."""
        scores = self.scores(prices)
        choices: dict[str, object] = {n: int(v[point]) for n, v in scores.choices.items()}
        for n, plain in PLAIN:
            if choices.get(n) == plain:
                del choices[n]
        return float(scores.seconds[point]), choices

    def choose(self) -> None:
        """Take the best point for each number of parts."""
        table = self.table.reshape(self.parts, -1)
        self.point = table.argmin(1) + np.arange(len(table)) * table.shape[1]
        self.seconds = self.table[self.point]

    def of(self, bodies: Bodies, state: State) -> Scored:
        """The same kernel as another search has come to it."""
        out = copy(self)
        out.bodies, out.state, out.printed, out.others = bodies, state, set(self.printed), list(self.others)
        return out

    def one(self, point: int) -> Sizes:
        """Tiles and extents of one point."""

        return self.sizes.pick(np.array([point]))

    def at(self, i: int, model: CostModel) -> tuple[dict[str, int], dict[str, int], Scores]:
        """(tiles, extents, price with its parts) at the i-th number of parts."""
        point = int(self.point[i if len(self.point) > 1 else 0])
        one = self.one(point)
        tiles = {a: int(v[0]) for a, v in one.tile.items()}
        price = self.prices(point, model).cost(self.program, one, detail=True)
        return tiles, {a: int(v[0]) for a, v in one.extent.items()}, price


class Pricer:
    """Lowers bodies under every useful assignment of roles and prices all tiles at once."""

    def __init__(self, region: Region, model: CostModel):
        self.r, self.model = region, model
        self.lowerings = 0
        self.statements = 0
        self.points = 0
        self.reused = 0  # bodies whose kernels another search has priced
        self._known: dict[tuple, list[Scored]] = {}

    def names(self) -> Names:
        return Names(lambda a: a, lambda x: x, self.memory)

    def memory(self, c: int) -> Memory:
        m = self.r.stored(c)
        if m is not None:
            return m
        if c in self.r.outputs:
            return self.r.outputs[c][0]
        axes = self.r.layout[c]
        # of parts as many as there may be: models take no more to be read than an array has
        shape = tuple(self.extent(a) if not a.endswith(".o") else self.r.extents.get(a[:-2], self.extent(a)) for a in axes)
        return Memory(f"t{c}", shape, self.r.dtype[c], tuple(map(T.axis_index, axes)), self.r.known[c])

    def extent(self, axis: str) -> int:
        """Extent of an axis; of parts, a stand-in."""
        if axis.endswith(".o"):
            return 2
        if axis.endswith(".i"):
            return -(-self.extent(axis[:-2]) // 2)
        return self.r.extents[axis]

    def price(self, roots: tuple[int, ...], bodies: Bodies, state: State, split: Split | None) -> list[Scored]:
        """The kernel under each assignment of roles that can be lowered."""
        if bodies.operations(state, roots) > MOST_OPERATIONS:
            return []
        stores, buffers = stores_of(self.r, roots, bodies, state, self.names())
        terms = [s.term for s in stores]
        held = frozenset(a for s in stores for a in s.term.free) | frozenset(a for s in stores for ix in s.index for a in ix.axes)
        reduced, sums = reductions(terms)
        axes = walked_axes(held, reduced)
        if split is not None and not any(a in split.halves for a in axes):
            split = None  # it is the same kernel whatever is split
        key = roots, bodies.split, state.leaves, tuple(terms), None if split is None else split.axis
        if key not in self._known:  # other choices may come to the same terms
            every = itertools.islice(self.assignments(axes, held, reduced, sums, split), 4 * MOST_ROLES)
            scored = (self.score(roots, bodies, state, stores, buffers, roles, split) for roles in every)
            self._known[key] = list(itertools.islice((s for s in scored if s is not None), MOST_ROLES))
        elif any(k.bodies is not bodies for k in self._known[key]):  # of another search
            self._known[key] = [k.of(bodies, state) for k in self._known[key]]
            self.reused += 1
        return self._known[key]

    def assignments(
        self, axes: list[str], held: frozenset[str], reduced: frozenset[str], sums: list[frozenset[str]], split: Split | None
    ) -> Iterator[dict[str, str]]:
        """Roles of all axes, the likelier ones first.  sums: axes that one product sums together."""
        axes = sorted(axes, key=axis_key)
        options: list[tuple[str, ...]] = []
        for a in axes:
            if a not in reduced:
                options.append(("grid",))
            elif a.endswith(".o"):
                options.append(("whole",))
            elif not self.extent(a):
                options.append(("loop",))  # no iteration: the result is where the reduction starts
            else:
                together = max((math.prod(self.extent(x) for x in g) for g in sums if a in g), default=0)
                contracted = together > 0 and a not in held
                ways = self.model.roles(self.extent(a), contracted)
                if split is not None and a == split.halves[1] and not contracted:  # small parts may do what large ones cannot
                    ways += tuple(w for w in self.model.roles(int(split.block.min()), False) if w not in ways)
                if contracted and "loop" not in ways and "loop" in self.model.roles(together, True):
                    ways = (*ways, "loop")
                options.append(ways)
        for chosen in itertools.product(*options):
            roles = dict(zip(axes, chosen))
            if all(self._fits(g, roles) for g in sums):
                yield roles

    def _fits(self, together: frozenset[str], roles: dict[str, str]) -> bool:
        """May these axes of one product lie whole in a block as far as they do?"""
        whole = math.prod(self.extent(a) for a in together if roles[a] == "whole")
        return len(together) == 1 or whole == 1 or "whole" in self.model.roles(whole, True)

    def score(
        self,
        roots: tuple[int, ...],
        bodies: Bodies,
        state: State,
        stores: tuple[Store, ...],
        buffers: dict[str, Buffer],
        roles: dict[str, str],
        split: Split | None,
        single: str = "",
    ) -> Scored | None:
        """None if it cannot be lowered, or does not fit the machine.  single: an axis in tiles of one element."""
        extents = dict(self.r.extents)
        for a in roles:
            for x in [a, a[:-2] + ".o", a[:-2] + ".i"] if a.endswith((".o", ".i")) else [a]:
                extents[x] = self.extent(x)
        whole = {a: Axis(extents[a], extents[a], role) for a, role in roles.items()}
        kernel = Kernel("k", stores, whole, extents, wide=self.r.wide or bodies.wide(state))
        try:
            program = lower(kernel, buffers, self.r.compute_dtype)
        except LoweringError:
            return None
        self.lowerings += 1
        self.statements += sum(1 for _ in walk(program.body))
        sizes, parts = self.sizes(program, split, single)
        self.points += sizes.points
        scores = self.model.cost(program, sizes)
        seconds = np.broadcast_to(scores.seconds, (sizes.points,))
        if sizes.only is not None:
            seconds = np.where(sizes.flat(sizes.only), seconds, np.inf)
        if not np.isfinite(seconds).any():
            return None
        out = Scored(roots, bodies, state, roles, sizes, parts, program, seconds, kernel, buffers, split)
        out.known(self.model, scores)
        return out

    def one_by_one(self, k: Scored) -> list[Scored]:
        """The kernel as it goes through a short axis that it reduces element by element, so that its tiles do not have it: a merge of
        a few parts, say, or a sum of squares of differences."""
        reduced, sums = reductions([s.term for s in k.kernel.stores])
        out = []
        for a, role in k.roles.items():
            short = float(np.max(k.sizes.extent[a])) <= SHORT
            if role == "whole" and short and a in reduced and not any(a in g for g in sums):
                roles = k.roles | {a: "loop"}
                out.append(self.score(k.roots, k.bodies, k.state, k.kernel.stores, k.buffers, roles, k.split, a))
        return [x for x in out if x is not None]

    def sizes(self, program: TileProgram, split: Split | None, single: str = "") -> tuple[Sizes, int]:
        """All combinations of tile sizes, for every number of parts if an axis is split.  A part has no ragged tile."""
        extents = {a: self.extent(a) for a in program.axes}
        if split is not None and split.halves[1] in extents:
            extents[split.halves[1]] = int(split.block.max())
        ladder = thin(self.model.tiles(program, extents) | ({single: (1,)} if single else {}))
        parts = len(split.parts) if split is not None else 1
        axes = list(program.axes)
        several = [a for a in axes if len(ladder[a]) > 1]  # only these are axes of the grid of points
        which, *grids = np.meshgrid(np.arange(parts), *[np.array(ladder[a], float) for a in several], indexing="ij", sparse=True)
        tile = {a: np.array(ladder[a], float) for a in axes} | dict(zip(several, grids))
        extent = {a: np.full(1, float(max(self.extent(a), 0))) for a in axes}
        only = None
        if split is not None:
            for name, values in zip(split.halves, (split.parts, split.block)):
                if name in extent:
                    extent[name] = values[which]
                    if program.axes[name].role == "whole":
                        tile[name] = values[which]
                    elif program.axes[name].role == "grid":
                        tile[name] = np.ones(1)
            inner = split.halves[1]
            if inner in extent:
                only = np.mod(extent[inner], tile[inner]) == 0
        return Sizes(tile, extent, only), parts


def thin(ladder: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Fewer sizes of the longest ladders until the product is small enough."""
    out = dict(ladder)
    while math.prod(len(v) for v in out.values()) > MOST_POINTS:
        a = max(out, key=lambda x: len(out[x]))
        out[a] = out[a][::2] if len(out[a]) > 2 else out[a][-1:]
    return out


def walked_axes(held: frozenset[str], reduced: frozenset[str]) -> list[str]:
    """Axes that a kernel walks: those of its values and reductions, an axis that is seen in parts only as parts."""
    every = held | reduced
    out = set()
    for a in every:
        if a + ".i" in every:
            out |= {a + ".o", a + ".i"}
        else:
            out.add(a)
    out |= {a[:-2] + ".o" for a in out if a.endswith(".i")}
    return sorted(out)


def reductions(terms: list[Term]) -> tuple[frozenset[str], list[frozenset[str]]]:
    """Axes that the terms reduce, and sets of axes that one product of two tensors sums."""
    reduced: set[str] = set()
    sums: dict[frozenset[str], None] = {}
    for t in T.postorder(terms):
        if t.op not in ("red", "fold"):
            continue
        axes = {t.attr[-1]}  # type: ignore[index]
        reduced |= axes
        bodies = t.args if t.op == "fold" else t.args[:1]
        while t.op == "red" and t.attr[0] == "+" and bodies[0].op == "red" and bodies[0].attr[0] == "+":  # type: ignore[index]
            axes.add(bodies[0].attr[1])  # type: ignore[index]
            bodies = bodies[0].args
        wide = [x for b in bodies for x in (b.args if b.op == "mul" else (b,)) if any(T.depends(x.free, a) for a in axes)]
        if any((x.free - y.free) and (y.free - x.free) for x in wide for y in wide):
            sums[frozenset(axes)] = None
    return frozenset(reduced), list(sums)
