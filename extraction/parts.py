"""The regions of a program, one after the other: each is searched once, however often it comes, as a whole and in pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from .. import terms as T
from ..cost_models.base import CostModel, Work
from ..errors import PlanError
from .build import Builder, Part
from .classes import Classes
from .plan import Buffer
from .region import Binding, Region, canonical, without
from .regions import Cone, Pieces
from .search import Found, Limits, Search

MANY = 3  # products in a region that is searched in pieces, too; …
LARGE = 128  # classes in a region that is not searched as a whole if it has pieces: a layer of a transformer has 100

Tick = Callable[[int], None]
Key = tuple[object, ...]


@dataclass(frozen=True)
class _Known:
    """What a search has found that was to take less than the budget."""

    found: Found | None
    budget: float


class Parts:
    """made: axes that rules have made; buffers: inputs and outputs of the program; cuts and alone: as of `regions`."""

    def __init__(
        self,
        classes: Classes,
        build: Builder,
        model: CostModel,
        limits: Limits,
        made: Set[str],
        buffers: Mapping[str, Buffer],
        cuts: frozenset[int],
        alone: frozenset[int],
    ):
        self.classes, self.build, self.model, self.limits, self.made, self.buffers = classes, build, model, limits, made, buffers
        self.cuts, self.alone = cuts, alone
        self.stats = {"searched": 0} | dict.fromkeys(("lowerings", "statements", "points", "sets", "asked"), 0)
        self._known: dict[Key, _Known] = {}
        self._ways: dict[Key, list[tuple[int, int]] | None] = {}  # region → its pieces that are regions of their own (None: it is one)

    def add(self, cone: Cone, tick: Tick) -> None:
        """The next region."""
        region, binding = self._region(cone)
        split = Pieces(self.classes, self.cuts, self.alone, cone)
        if region.key not in self._ways:
            self._ways[region.key] = self._way(region, binding, split, tick)
        way = self._ways[region.key]
        for c in [cone] if way is None else [c for first, end in way for c in split.between(first, end)]:
            region, binding = self._region(c)
            found = self._search(region, binding, math.inf, tick)
            if found is None:
                what = T.show(self.classes.term(c.roots[0]), 4)
                raise PlanError(f"no kernel for {what} fits {self.model.name}", "please report this program")
            self.build.add(Part(region, binding, found), c.roots)

    def _way(self, region: Region, binding: Binding, split: Pieces, tick: Tick) -> list[tuple[int, int]] | None:
        """The pieces of a region that take less one after the other than the region as a whole (None: they do not).  One that follows
        another joins it where both take less as one.  Looked for where launches take longer than what is computed, and in what is too
        large for the search."""
        whole = len(region.nodes) <= LARGE
        computing, launches = self.model.floor(Work(tensor=split.flops)), split.products[-1] * self.model.floor(Work())
        if len(split) == 1 or (whole and (split.products[-1] < MANY or computing >= launches)):
            return None
        way: list[tuple[int, int]] = []
        times: list[float] = []
        for i in range(len(split)):
            alone = self._time(split.between(i, i + 1), math.inf, tick)
            if way:
                first = way[-1][0]
                joined = split.between(first, i + 1)
                apart = times[-1] + alone
                if sum(len(c.nodes) for c in joined) <= LARGE and (together := self._time(joined, apart, tick)) < apart:
                    way[-1], times[-1] = (first, i + 1), together
                    continue
            way.append((i, i + 1))
            times.append(alone)
        total = sum(times)
        if not whole and math.isfinite(total):
            return way
        found = self._search(region, binding, total, tick)
        return way if found is None or found.best.seconds >= total else None

    def _time(self, cones: list[Cone], budget: float, tick: Tick) -> float:
        """Seconds that these regions take one after the other (infinite where it is not less than the budget)."""
        total = 0.0
        for cone in cones:
            found = self._search(*self._region(cone), budget - total, tick)
            total += found.best.seconds if found is not None else math.inf
            if total >= budget:
                return math.inf
        return total

    def _region(self, cone: Cone) -> tuple[Region, Binding]:
        lies = {c: self.build.stored.get(c) or self.build.memory(c) for c in cone.leaves}
        return canonical(self.classes, cone, lies, self.made)

    def _search(self, region: Region, binding: Binding, budget: float, tick: Tick) -> Found | None:
        """The search of a region.  A search that is bounded may find less where there is more to find: what rules say of axes that they
        made is looked at apart, and has to be better than what is there without."""
        known = self._known.get(region.key)
        if known is not None and (known.found is not None or budget <= known.budget):
            return known.found
        plain = without(region, {a for a, real in binding.axes.items() if real in self.made})
        first = Search(plain, self.model, self.limits, tick, self.buffers)
        found = first.run(budget)
        counts = first.stats()
        if plain is not region:
            # half as many bodies: most that are worth it are priced, and what is not much better than the first plan is no loss
            second = Search(region, self.model, replace(self.limits, bodies=self.limits.bodies // 2), tick, self.buffers, first)
            better = second.run(found.best.seconds if found is not None else budget)
            counts = second.stats() | {"sets": counts["sets"] + second.stats()["sets"]}
            if found is None:
                found = better
            elif better is not None:
                others = sorted((found.best, *better.others, *found.others), key=lambda c: c.seconds)
                found = Found(better.best, others[: self.limits.candidates])
        self._known[region.key] = _Known(found, budget)
        self.stats["searched"] += 1
        for k, n in counts.items():
            self.stats[k] += n
        return found
