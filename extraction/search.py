"""The cheapest sequence of kernels for a region.

`Search.solve(D)` gives the cheapest kernels that store every class of D: it picks a kernel for the largest class (with others of D as
mates where they share work), and goes on with what is left of D and what that kernel reads.  Bounds that hold for every choice of roles
and tiles keep most bodies from being lowered.  A split reduction is one run of the search for each axis: all costs are then arrays
over the numbers of parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..cost_models.base import CostModel, Work
from .bodies import Bodies, Prices, State, bits
from .kernels import Pricer, Scored, Split
from .region import Region, axis_key


BESIDE = 1024  # elements along axes that one root of a kernel has and another has not


@dataclass(frozen=True)
class Limits:
    """How much a search may do in a region before it settles for what it has.

    statements  of tile programs lowered and priced (an attention kernel has about 40), over all bodies and roles
    bodies      bodies priced for one set of classes (half as many one step down, and so on)
    sets        sets of classes looked at with more than one body
    candidates  plans reported
    """

    statements: int = 12000
    bodies: int = 12
    sets: int = 250
    candidates: int = 12


@dataclass
class Choice:
    """A complete plan of a region: kernels in the order in which they run, with the number of parts chosen (its place in `split`)."""

    seconds: float
    kernels: tuple[Scored, ...]
    split: Split | None
    part: int


@dataclass
class Found:
    best: Choice
    others: list[Choice]
    stats: dict[str, int] = field(default_factory=dict)


@dataclass
class _Plans:
    """seconds[i] and kernels[i]: the best plan at the i-th number of parts; exact if below the budget that the search had."""

    seconds: np.ndarray
    kernels: list[tuple[Scored, ...]]
    budget: float


class Search:
    def __init__(self, region: Region, model: CostModel, limits: Limits, tick: Callable[[int], None] | None = None):
        self.r, self.model, self.limits, self.tick = region, model, limits, tick
        self.pricer = Pricer(region, model, axis_key)
        self.bodies: dict[str | None, Bodies] = {}
        self.prices = Prices(model.floor(Work()), self.mates)
        self.priced: dict[tuple, list[Scored]] = {}
        self.complete: list[Choice] = []
        self.split: Split | None = None
        self.memo: dict[frozenset[int], _Plans] = {}
        self.mate_memo: dict[tuple[int, int], bool] = {}
        self.below = self._below()
        self.partial: dict[int, str] = {}
        for c, free in enumerate(region.free):
            split = next((a[:-2] for a in sorted(free) if a.endswith(".o")), None)
            if split is not None:
                self.partial[c] = split

    # ---- entry
    def run(self) -> Found | None:
        contexts: list[Split | None] = [None]
        axes = sorted(set(self.partial.values()), key=axis_key)
        for a in axes:
            s = Split.of(a, self.r.extents[a], self.model.splits(self.r.extents[a]))
            if s is not None:
                contexts.append(s)
        roots = frozenset(self.r.roots)
        for context in sorted(contexts, key=lambda s: self.outlook(roots, s)):
            self.split, self.memo = context, {}
            self.solve(roots)
        if not self.complete:
            return None
        ranked: list[Choice] = []
        for c in sorted(self.complete, key=lambda c: c.seconds):
            if not any(same(c, d) for d in ranked):
                ranked.append(c)
        n = sum(len(ns) for ns in self.r.nodes)
        stats = {"nodes": n, "lowerings": self.pricer.lowerings, "points": self.pricer.points, "regions": 1}
        return Found(ranked[0], ranked[1 : self.limits.candidates], stats)

    def _below(self) -> list[int]:
        """Of each class, what the nodes of all classes below it read from memory or reduce, as bits."""
        number: dict[object, int] = {}

        def bit(key: object) -> int:
            return 1 << number.setdefault(key, len(number))

        n = len(self.r.nodes)
        out = [0] * n
        for c, ns in enumerate(self.r.nodes):
            for x in ns:
                if x.op in ("input", "stored"):
                    out[c] |= bit(x.attr)
        order = sorted(range(n), key=lambda c: self.r.rank[c])
        for _ in range(2):
            for c in order:
                for x in self.r.nodes[c]:
                    for a in x.args:
                        out[c] |= out[a]
        return out

    # ---- views of the axes
    def view(self, split: str | None) -> Bodies:
        if split not in self.bodies:
            if split is None:  # partial results are only read there: their prices come first
                for axis in sorted(set(self.partial.values()), key=axis_key):
                    self.view(axis)
            self.bodies[split] = Bodies(self.r, self.model, split, self.prices)
        return self.bodies[split]

    def floor(self, classes: frozenset[int]) -> float:
        """Bound on the time that any plan takes to store these classes."""
        self.view(None)
        return max((self.prices.floor.get(c, math.inf) for c in sorted(classes)), default=0.0)

    def guess(self, classes: frozenset[int]) -> float:
        mask = 0
        for c in classes:
            mask |= 1 << c
        return self.prices.guess(mask)

    # ---- plans
    def solve(self, wanted: frozenset[int], budget: float = math.inf, depth: int = 0) -> _Plans:
        """The cheapest kernels that store these classes; what takes as long as the budget need not be found."""
        n = len(self.split.parts) if self.split is not None else 1
        if not wanted:
            return _Plans(np.zeros(n), [()] * n, math.inf)
        known = self.memo.get(wanted)
        if known is not None and (known.seconds.min() < known.budget or budget <= known.budget):
            return known
        best = _Plans(np.full(n, math.inf), [()] * n, budget)
        self.memo[wanted] = best  # ends cycles
        tried: dict[tuple, list[float]] = {}
        top, done, most = depth == 0, 0, max(self.limits.bodies >> depth, 3)
        if len(self.memo) > self.limits.sets and not top:
            most = 1
        for guess, low, group, s, rest in self.options(wanted):
            limit = min(budget, best.seconds.min() if top else best.seconds.max())
            if top and self.complete:
                limit = min(limit, min(c.seconds for c in self.complete))
            before = tried.setdefault((group, s.leaves), [])
            if low >= limit or 0.6 * guess >= limit or len(before) >= 2 or any(abs(s.score - x) <= 1e-3 * x for x in before):
                continue
            if math.isfinite(limit) and (done >= most or self.pricer.statements >= self.limits.statements):
                break
            before.append(s.score)
            kernels = self.kernels(group, s)
            if not kernels:
                continue
            done += 1
            room = np.minimum(limit, best.seconds) - cheapest(kernels, n)
            if max(self.floor(rest), 0.6 * self.guess(rest)) >= room.max():
                continue
            self.extend(best, kernels, self.solve(rest, float(room.max()), depth + 1), top)
            if self.tick is not None:
                self.tick(self.pricer.lowerings)
        if not np.isfinite(best.seconds).any() and not math.isfinite(budget):
            self.unfused(best, wanted, depth)
        return best

    def unfused(self, best: _Plans, wanted: frozenset[int], depth: int) -> None:
        """The plan that is always there: a kernel for each thing that may lie in memory."""
        last = max(wanted, key=lambda c: self.r.rank[c])
        s = self.view(self.partial.get(last)).apart(last)
        kernels = self.kernels((last,), s) if s is not None else []
        if s is not None and kernels:
            rest = (wanted - {last}) | frozenset(bits(s.leaves))
            self.extend(best, kernels, self.solve(rest, math.inf, depth + 1), depth == 0)

    def extend(self, best: _Plans, kernels: list[Scored], after: _Plans, top: bool) -> None:
        """Take these kernels (one body under several roles) after that plan where this is the best so far."""
        for k in kernels:
            total = k.seconds + after.seconds
            for i in range(len(best.seconds)):
                if total[i] < best.seconds[i] * (1 - 1e-9):
                    best.seconds[i], best.kernels[i] = total[i], (*after.kernels[i], k)
            if top and np.isfinite(total).any():
                i = int(np.argmin(total))
                self.complete.append(Choice(float(total[i]), (*after.kernels[i], k), self.split, i))

    def outlook(self, roots: frozenset[int], split: Split | None) -> float:
        """Guess at the best plan that this split allows: the most promising one is searched first and bounds the others."""
        self.split = split
        return min((o[0] for o in self.options(roots)), default=math.inf)

    def options(self, wanted: frozenset[int]) -> list[tuple[float, float, tuple[int, ...], State, frozenset[int]]]:
        """(guess, bound, roots, body, what is left to store) of every next kernel, most promising first."""
        last = max(wanted, key=lambda c: self.r.rank[c])
        bodies = self.view(self.partial.get(last))
        out = []
        ahead: dict[frozenset[int], tuple[float, float]] = {}
        for group in self.groups(last, wanted):
            others = wanted - frozenset(group)
            for s, low, guess, leaves in bodies.kernels(group):
                if leaves and self.partial and not self.allowed(leaves):
                    continue
                rest = others | leaves
                if rest not in ahead:
                    ahead[rest] = self.floor(rest), self.guess(rest)
                floor, later = ahead[rest]
                if math.isfinite(low + floor):
                    out.append((guess + later, low + floor, group, s, rest))
        return sorted(out, key=lambda o: (o[0], o[2], o[3].chosen))

    def allowed(self, leaves: frozenset[int]) -> bool:
        """Partial results may be read only where their axis is the one that this run splits."""
        axis = self.split.axis if self.split is not None else None
        return all(self.partial.get(c, axis) == axis for c in leaves)

    def groups(self, last: int, wanted: frozenset[int]) -> list[tuple[int, ...]]:
        """Sets of wanted classes that one kernel may store, with `last` among them; the largest first."""
        mates = tuple(sorted((c for c in wanted if c != last and self.mates(c, last)), key=lambda c: self.r.rank[c]))
        out = [(last, *mates)] if mates else []
        if len(mates) > 1:
            out += [(last, m) for m in mates]
        return [*out, (last,)]

    def mates(self, a: int, b: int) -> bool:
        """Could one kernel store both to some advantage?  They must share axes and something that they read or reduce."""
        key = (a, b) if a < b else (b, a)
        if key not in self.mate_memo:
            self.mate_memo[key] = self._mates(a, b)
        return self.mate_memo[key]

    def _mates(self, a: int, b: int) -> bool:
        if self.partial.get(a) != self.partial.get(b):
            return False
        x, y = self.r.free[a], self.r.free[b]
        if x and y and not x & y:
            return False
        if any(math.prod(self.r.extents[e.partition(".")[0]] for e in side) > BESIDE for side in (x - y, y - x)):
            return False
        return bool(self.below[a] & self.below[b])

    def kernels(self, roots: tuple[int, ...], s: State) -> list[Scored]:
        bodies = self.view(self.partial.get(roots[0]))
        key = (roots, bodies.split, s.chosen, self.split.axis if self.split is not None and self._sees_split(roots, s) else None)
        if key not in self.priced:
            self.priced[key] = self.pricer.price(roots, bodies, s, self.split)
        return self.priced[key]

    def _sees_split(self, roots: tuple[int, ...], s: State) -> bool:
        return any(c in self.partial for c in roots) or any(s.leaves >> c & 1 for c in self.partial)


def cheapest(kernels: list[Scored], n: int) -> np.ndarray:
    """Best time over roles at each number of parts."""
    return np.min(np.stack([np.broadcast_to(k.seconds, (n,)) for k in kernels]), 0)


def same(a: Choice, b: Choice) -> bool:
    """Do both plans store the same things by the same kernels?"""

    def shape(c: Choice) -> list[tuple]:
        return [(k.roots, k.state.leaves, k.state.passes, k.bodies.split) for k in c.kernels]

    return shape(a) == shape(b)
