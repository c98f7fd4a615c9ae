"""The cheapest sequence of kernels for a region.

`Search.solve(wanted)` gives the cheapest kernels that store every wanted class: it picks a kernel for the largest of them (with others
as mates where they share work) and goes on with what is left and what that kernel reads.  Guesses say what to try first; bounds that
hold for all roles and tiles keep most bodies from being lowered.  A split reduction is a run of the search for its axis, in which all
costs are arrays over the numbers of parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..cost_models.base import CostModel, Work
from ..program import DTYPES
from .bodies import Bodies, Body, State
from .kernels import Pricer, Scored, Split
from .plan import Buffer
from .prices import Prices, bits
from .printing import Printing
from .region import Region, axis_key

NEAR = 1.15  # plans this close are beyond what a model can tell apart: the one with least intermediate memory is taken
HOPEFUL = 0.6  # a guess may be this much too high: what it says is worse by more is not tried
LEARNT = 0.8  # … and where bodies of its kind took more than was guessed, so much of what the least of them took for its guess, …
ENOUGH = 2  # … of so many bodies, …
MOST_LEARNT = 1.3  # … up to so much of a guess: what is far too low (on hosts, mostly) errs by more than others of the kind say
BESIDE = 1024  # elements along axes that one root of a kernel has and another has not
PAIRS = 3  # mates tried one by one
CLOSE = 0.03  # share of a plan's time that may be missing because a small kernel is not printed as it is priced
ROUNDS = 16  # searches with prices that were corrected
TIE = 1e-3  # bodies with the same leaves whose scores differ by less do the same work


@dataclass(frozen=True)
class Limits:
    """How much a search may do in a region before it settles for what it has.

    statements  of tile programs lowered and priced (a chain of two products has about 40), over all bodies and roles
    bodies      bodies priced for one set of classes (half as many one step down, and so on)
    sets        sets of classes looked at with more than one body and in more than the plainest groups
    candidates  plans reported
    """

    statements: int = 8000
    bodies: int = 12
    sets: int = 150
    candidates: int = 12


@dataclass
class Choice:
    """A complete plan of a region: kernels in the order in which they run; `part`: place in `split` of the number of parts."""

    seconds: float
    kernels: tuple[Scored, ...]
    split: Split | None
    part: int


@dataclass
class Found:
    """best: the choice; others: those that lost, cheapest first."""

    best: Choice
    others: list[Choice]
    stats: dict[str, int] = field(default_factory=dict)


@dataclass
class _Plans:
    """seconds[i] and kernels[i]: the best plan at the i-th number of parts; exact if below the budget that the search had."""

    seconds: np.ndarray
    kernels: list[tuple[Scored, ...]]
    budget: float


@dataclass(slots=True)
class _Next:
    """A kernel to try: guess at the whole plan with it, bound on what is left to store, the kernel's body, what is left, and the least
    time that this takes if the guess at it is not much too high."""

    guess: float
    floor: float
    body: Body
    rest: frozenset[int]
    after: float


class Search:
    """One region's search.  `tick` is called with the number of kernels lowered so far."""

    def __init__(
        self,
        region: Region,
        model: CostModel,
        limits: Limits,
        tick: Callable[[int], None] | None = None,
        buffers: Mapping[str, Buffer] | None = None,
        before: Search | None = None,
    ):
        """buffers: inputs and outputs of the whole program (None: a kernel's own are all there are).  before: a search of the same
        region with fewer nodes: what it has found out of kernels is known to this one."""
        self.r, self.model, self.limits, self.tick = region, model, limits, tick
        self.pricer: Pricer = Pricer(region, model) if before is None else before.pricer
        self.printing: Printing = Printing(self.pricer, model, buffers) if before is None else before.printing
        self.partial = {
            c: a[:-2] for c, free in enumerate(region.free) for a in sorted(free) if a.endswith(".o") and a[:-2] in region.extents
        }  # class of partial results → the axis whose parts they belong to
        self._mates = Mates(region, self.partial)
        self.prices = Prices(model.floor(Work()), self._mates)
        self._copied = copied(region)  # of each class, what no kernel that stores it reads
        self._views: dict[str | None, Bodies] = {}
        self._priced: dict[tuple, list[Scored]] = {}
        self._known: set[int] = set()  # lists of kernels (by identity) that the search before has priced
        self._cheapest: dict[tuple[int, int], np.ndarray] = {}
        self._next: dict[tuple[str | None, frozenset[int]], list[_Next]] = {}
        self._complete: list[Choice] = []
        self._split: Split | None = None
        self._memo: dict[frozenset[int], _Plans] = {}
        self._ratios: dict[tuple, dict[int, float]] = {}  # by kind: of bodies that were priced (by choices), time for guess

    # ---- entry
    def run(self, budget: float = math.inf) -> Found | None:
        """The best plan and those that lost; None if no kernel fits the machine, or if nothing is found that takes less than the
        budget."""
        contexts: list[Split | None] = [None]
        for a in sorted(set(self.partial.values()), key=axis_key):
            s = Split.of(a, self.r.extents[a], self.model.splits(self.r.extents[a]))
            if s is not None:
                contexts.append(s)
        roots = frozenset(self.r.roots)
        for context in sorted(contexts, key=lambda s: self._outlook(roots, s)):
            self._split = context
            for _ in range(ROUNDS):
                self._memo = {}
                self.solve(roots, budget)
                if not self._complete or not self._corrected(min(self._complete, key=lambda c: c.seconds)):
                    break
        while True:
            if not self._complete or min(c.seconds for c in self._complete) >= budget:
                return None
            ranked: list[Choice] = []
            for c in sorted(self._complete, key=lambda c: c.seconds):
                if not any(same(c, d) for d in ranked):
                    ranked.append(c)
            near = [c for c in ranked if c.seconds <= ranked[0].seconds * NEAR and c.seconds < budget]
            best = min(near, key=lambda c: (self.memory(c), len(c.kernels), c.seconds))
            if not self._corrected(best):
                break
        ranked.remove(best)
        if not ranked and (apart := self._apart()) is not None and not same(apart, best):
            ranked.append(apart)  # something to compare with
        return Found(best, ranked[: self.limits.candidates], self.stats())

    def stats(self) -> dict[str, int]:
        """What has been looked at; of kernels by the search before, too."""
        p = self.pricer
        counts = {"lowerings": p.lowerings, "statements": p.statements, "points": p.points, "asked": self.printing.asked}
        return counts | {"sets": len(self._next)}

    def _corrected(self, c: Choice) -> bool:
        """Are some of its kernels not printed as they are priced?  Then they get other prices, and so do all plans that have them."""
        slack = c.seconds * CLOSE / len(c.kernels)
        corrected = [(k, others) for k in c.kernels if (others := self.printing.corrected(k, c.part, slack)) is not None]
        now, self._split = self._split, c.split  # it may be the plan of another run
        for k, others in corrected:
            self._kernels(k.roots, k.state).extend(others)
        self._split = now
        if corrected:
            self._cheapest.clear()
            for x in self._complete:
                x.seconds = sum(float(k.seconds[x.part if len(k.seconds) > 1 else 0]) for k in x.kernels)
        return bool(corrected)

    def _apart(self) -> Choice | None:
        """The plan that stores whatever may lie in memory."""
        self._split = None
        kernels: list[Scored] = []
        wanted = set(self.r.roots)
        while wanted:
            last = max(wanted, key=lambda c: self.r.rank[c])
            s = self._view(self.partial.get(last)).apart(last)
            scored = self._kernels((last,), s) if s is not None else []
            if s is None or not scored:
                return None
            kernels.append(min(scored, key=lambda k: float(k.seconds[0])))
            wanted = (wanted - {last}) | set(bits(s.leaves))
        return Choice(sum(float(k.seconds[0]) for k in kernels), tuple(reversed(kernels)), None, 0)

    def memory(self, c: Choice) -> float:
        """Bytes of what the plan stores beside the outputs."""
        total = 0.0
        for r in (r for k in c.kernels for r in k.roots if r not in self.r.outputs):
            parts = float(c.split.parts[c.part]) if c.split is not None and r in self.partial else 1.0
            total += parts * math.prod(self.r.extents[a] for a in self.r.free[r] if "." not in a) * DTYPES[self.r.dtype[r]]
        return total

    def _outlook(self, roots: frozenset[int], split: Split | None) -> float:
        """Guess at the best plan with this split: the most promising one is searched first and bounds the others."""
        self._split = split
        return min((o.guess for o in self._options(roots)), default=math.inf)

    # ---- plans
    def solve(self, wanted: frozenset[int], budget: float = math.inf, depth: int = 0) -> _Plans:
        """The cheapest kernels that store these classes; what takes as long as the budget need not be found."""
        n = len(self._split.parts) if self._split is not None else 1
        if not wanted:
            return _Plans(np.zeros(n), [()] * n, math.inf)
        known = self._memo.get(wanted)
        if known is not None and (known.seconds.min() < known.budget or budget <= known.budget):
            return known
        best = self._memo[wanted] = _Plans(np.full(n, math.inf), [()] * n, budget)
        top, done = depth == 0, 0
        most = max(self.limits.bodies >> depth, 3) if top or len(self._memo) <= self.limits.sets else 1
        tried: dict[tuple, list[float]] = {}

        def limits() -> tuple[float, float]:
            """Seconds from which a plan is no use; the second where it needs no intermediate memory."""
            least = self._to_beat(best, top)
            return min(budget, least), min(budget, least * NEAR)

        useless, near = limits()
        for o in self._options(wanted):
            hoped = HOPEFUL * o.guess
            if hoped >= near:
                break  # and so are all that follow
            if done >= most and not top and math.isfinite(useless):
                break
            alone = top and not o.rest  # a single kernel needs none
            limit, body = near if alone else useless, o.body
            if hoped >= limit or body.bound + o.floor >= limit:
                continue
            if HOPEFUL * (o.guess - body.guess) + self._hopeful(body) * body.guess >= limit:
                done += 1  # as good as tried
                continue
            score = body.state.score
            before = tried.setdefault((body.roots, body.state.leaves), [])
            if before and (len(before) >= 2 or abs(score - before[0]) <= TIE * before[0]):
                continue
            if math.isfinite(limit):
                if self.pricer.statements >= self.limits.statements:
                    break
                # as many as may be tried, but for this one, if those before it took much more than guessed
                if done >= most and not (body.ended and o.guess < HOPEFUL * limit):
                    continue
            before.append(score)
            kernels = self._kernels(body.roots, body.state)
            if not kernels:
                continue
            done += not (top and id(kernels) in self._known)  # those cost nothing
            took = self._took(kernels, n)
            self._ratios.setdefault(kind(body), {})[body.state.chosen] = float(took.min()) / body.guess
            slack = NEAR if alone else 1.0
            if n == 1:
                room = min(limit, float(best.seconds[0]) * slack) - float(took[0])
            else:
                fits = np.isfinite(took)
                room = float((np.minimum(limit, best.seconds * slack) - np.where(fits, took, 0.0))[fits].max(initial=-math.inf))
            if o.after < room:
                self._extend(best, kernels, self.solve(o.rest, room, depth + 1), top)
                useless, near = limits()
            if self.tick is not None:
                self.tick(self.pricer.lowerings)
        if not (self._complete or np.isfinite(best.seconds).any() or math.isfinite(budget)):
            self._unfused(best, wanted, depth)
        return best

    def _to_beat(self, best: _Plans, top: bool) -> float:
        """Seconds from which a plan is no use at any number of parts; for all that is wanted: of the best one that is complete."""
        if not top:
            return float(best.seconds.max())
        return min([float(best.seconds.min()), *(c.seconds for c in self._complete)])

    def _unfused(self, best: _Plans, wanted: frozenset[int], depth: int) -> None:
        """The plan that is always there: a kernel for each thing that may lie in memory."""
        last = max(wanted, key=lambda c: self.r.rank[c])
        s = self._view(self.partial.get(last)).apart(last)
        kernels = self._kernels((last,), s) if s is not None else []
        if s is not None and kernels:
            rest = (wanted - {last}) | frozenset(bits(s.leaves))
            self._extend(best, kernels, self.solve(rest, math.inf, depth + 1), depth == 0)

    def _extend(self, best: _Plans, kernels: list[Scored], after: _Plans, top: bool) -> None:
        """Take these kernels (one body under several roles) after that plan where this is the best so far."""
        if not (after.seconds < math.inf).any():
            return
        for k in kernels:
            # what this kernel stores must not have been stored before it
            twice = [any(r in e.roots for e in earlier for r in k.roots) for earlier in after.kernels]
            total = np.where(twice, math.inf, k.seconds + after.seconds)
            for i in range(len(best.seconds)):
                if total[i] < best.seconds[i] * (1 - 1e-9):
                    best.seconds[i], best.kernels[i] = total[i], (*after.kernels[i], k)
            if top and np.isfinite(total).any():
                i = int(np.argmin(total))
                self._complete.append(Choice(float(total[i]), (*after.kernels[i], k), self._split, i))

    def _options(self, wanted: frozenset[int]) -> list[_Next]:
        """Every next kernel, most promising first.  (Asked again with every larger budget, they stay the same.)"""
        key = self._split.axis if self._split is not None else None, wanted
        if key not in self._next:
            self._next[key] = self._ranked(wanted)
        return self._next[key]

    def _ranked(self, wanted: frozenset[int]) -> list[_Next]:
        last = max(wanted, key=lambda c: self.r.rank[c])
        bodies = self._view(self.partial.get(last))
        self._view(None)  # prices of all classes
        out = []
        axis = self._split.axis if self._split is not None else None
        # partial results may be read only where their axis is the one that this run splits
        others_parts = sum(1 << c for c, a in self.partial.items() if a != axis)
        ahead: dict[int, tuple[float, float, frozenset[int]]] = {}
        for group in self._groups(last, wanted):
            others = Bodies.union(1 << c for c in wanted if c not in group)
            no_leaf = Bodies.union(self._copied[c] for c in group) | others_parts
            for b in bodies.kernels(group):
                if b.state.leaves & no_leaf:
                    continue
                mask = others | b.state.leaves
                if mask not in ahead:
                    ahead[mask] = self._floor(mask), self.prices.guess(mask), frozenset(bits(mask))
                floor, later, rest = ahead[mask]
                if math.isfinite(floor):
                    out.append(_Next(b.guess + later, floor, b, rest, max(floor, HOPEFUL * later)))
        return sorted(out, key=lambda o: (o.guess, o.body.roots, o.body.state.chosen))

    def _hopeful(self, body: Body) -> float:
        """What share of the guess at its kernel is believed."""
        ratios = self._ratios.get(kind(body), {})
        return max(HOPEFUL, min(MOST_LEARNT, LEARNT * min(ratios.values()))) if len(ratios) >= ENOUGH else HOPEFUL

    def _kernels(self, roots: tuple[int, ...], s: State) -> list[Scored]:
        """The body under every assignment of roles that can be lowered, priced."""
        bodies = self._view(self.partial.get(roots[0]))
        parted = self._split is not None and any(c in self.partial for c in (*roots, *bits(s.leaves)))
        key = (roots, bodies.split, s.chosen, self._split.axis if self._split is not None and parted else None)
        if key not in self._priced:
            before = self.pricer.reused
            self._priced[key] = self.pricer.price(roots, bodies, s, self._split)
            if self.pricer.reused > before:
                self._known.add(id(self._priced[key]))
        return self._priced[key]

    def _took(self, kernels: list[Scored], n: int) -> np.ndarray:
        """Best time over roles at each of n numbers of parts."""
        key = id(kernels), n  # lists that are kept in `_priced`
        if key not in self._cheapest:
            self._cheapest[key] = np.min(np.stack([np.broadcast_to(k.seconds, (n,)) for k in kernels]), 0)
        return self._cheapest[key]

    # ---- what is known before lowering
    def _view(self, split: str | None) -> Bodies:
        """Bodies under one view of the axes.  Partial results are made in the view of their axis and only read in the plain one."""
        if split not in self._views:
            if split is None:  # their prices come first
                for axis in sorted(set(self.partial.values()), key=axis_key):
                    self._view(axis)
            self._views[split] = Bodies(self.r, self.model, split, self.prices)
        return self._views[split]

    def _floor(self, classes: int) -> float:
        """Bound on the time that any plan takes to store these classes (bits)."""
        return max([self.prices.floor.get(c, math.inf) for c in bits(classes)], default=0.0)

    # ---- several roots in one kernel
    def _groups(self, last: int, wanted: frozenset[int]) -> Iterator[tuple[int, ...]]:
        """Sets of wanted classes that one kernel may store, with `last` among them; the largest first."""
        mates = tuple(sorted((c for c in wanted if c != last and self._mates(c, last)), key=lambda c: self.r.rank[c]))
        if len(mates) > 1:
            yield (last, *mates)
        if len(self._memo) <= self.limits.sets:
            for m in mates[-PAIRS:]:
                yield (last, m)
        yield (last,)


class Mates:
    """Which classes one kernel could store both of to some advantage: they must share axes and something that they read.
    partial: of classes of partial results, the axis whose parts they belong to."""

    def __init__(self, region: Region, partial: Mapping[int, str]):
        self.r, self.partial = region, partial
        self._below = below(region)
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, a: int, b: int) -> bool:
        key = (a, b) if a < b else (b, a)
        if key not in self._known:
            x, y = self.r.free[a], self.r.free[b]
            sides = [math.prod(self.r.extents[e.partition(".")[0]] for e in side) for side in (x - y, y - x)]
            self._known[key] = (
                self.partial.get(a) == self.partial.get(b)
                and bool(x & y or not x or not y)
                and max(sides) <= BESIDE
                and bool(self._below[a] & self._below[b])
            )
        return self._known[key]


def kind(body: Body) -> tuple:
    """Bodies of one kind reduce the same axes and do so as often: guesses at them err alike."""
    return body.by.split, body.state.reduced, body.state.passes


def below(region: Region) -> list[int]:
    """Of each class, the inputs and stored classes that its terms may read, as bits."""
    number: dict[object, int] = {}
    out = [0] * len(region.nodes)
    for c, ns in enumerate(region.nodes):
        for n in ns:
            if n.op in ("input", "stored"):
                out[c] |= 1 << number.setdefault(n.attr, len(number))
    for _ in range(2):  # smaller classes first; twice, for cycles
        for c in sorted(range(len(out)), key=lambda c: region.rank[c]):
            for n in region.nodes[c]:
                for a in n.args:
                    out[c] |= out[a]
    return out


def copied(region: Region) -> list[int]:
    """Of each class, those (as bits) from which a kernel that stores it would only copy: parts of a tensor that a rule has made of
    them, and that tensor for its parts (an output is stored as it must be)."""
    wholes: list[set[int]] = [{n.args[0] for n in ns if n.op == "view" and not region.source[n.args[0]]} for ns in region.nodes]
    for c in sorted(range(len(wholes)), key=lambda c: -region.rank[c]):  # a part of a part
        wholes[c] |= set().union(*(wholes[w] for w in wholes[c]))
    out: list[set[int]] = [set() if c in region.outputs else set(w) for c, w in enumerate(wholes)]
    for c, ws in enumerate(wholes):
        for w in ws:
            out[w].add(c)
    return [Bodies.union(1 << x for x in xs - {c}) for c, xs in enumerate(out)]


def same(a: Choice, b: Choice) -> bool:
    """Do both plans store the same things by the same kernels?"""

    def shape(c: Choice) -> list[tuple]:
        return [(k.roots, k.state.leaves, k.state.passes, k.bodies.split) for k in c.kernels]

    return shape(a) == shape(b)
