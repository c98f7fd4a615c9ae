"""Bodies of kernels: which option each class takes, and which classes are read from memory.

A DAG-aware K-best search from the leaves up.  A state is a set of choices; two states join only where their choices agree, and work
that both contain counts once.  Sets are bits of integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter

from ..cost_models.base import CostModel
from .options import Option, Options, Vec
from .prices import Prices, bits
from .region import Region

BEAM = 10  # states of a class that take part in bodies of others
WIDE = 32  # … of a class that a kernel stores
LIGHT = 0.02  # of a pass: reducing an axis again without a product of tensors
BLOCK = 256  # elements of an axis that a block holds at most, for guesses
ROUNDS = 3  # through a graph with cycles
BEST_FIRST = attrgetter("score", "chosen")


@dataclass(slots=True)
class State:
    """A body (so far).

    score    for ranking: likely seconds, leaves included
    chosen   bits of (class, option), with one more option a class: read from memory
    classes  bits of classes that are computed or read
    items    bits of work
    leaves   bits of classes that other kernels must store
    reduced  bits of axes
    passes   how often the work runs: once, and again for every reduction over an axis that the body below has reduced (far less
             if no product of tensors is below: then the axis may lie whole in a block)
    vec      seconds by resource, if all products are of tiles that nothing else reads
    factors  bits of classes that products of matrices read
    elements bits of classes that anything else reads
    mixed    does a product of matrices read what is loaded and computed upon by element first?
    again    seconds that blocks spend on what others compute, too
    """

    score: float
    chosen: int
    classes: int
    items: int
    leaves: int
    reduced: int
    passes: float
    vec: Vec
    factors: int = 0
    elements: int = 0
    mixed: bool = False
    again: float = 0.0


@dataclass(slots=True)
class Body:
    """A body that stores some roots, and a guess at its kernel's time.  ended: it is the most fused one, but for what comes of
    reductions along one axis (`Bodies.ended`)."""

    by: Bodies
    roots: tuple[int, ...]
    state: State
    guess: float
    ended: bool = False
    _bound: float | None = None

    @property
    def bound(self) -> float:
        """Bound on its kernel's time (worked out for few of all bodies)."""
        if self._bound is None:
            self._bound = self.by.bound(self.state, self.roots)
        return self._bound


class Bodies(Options):
    """All bodies of a region under one view of the axes."""

    def __init__(self, region: Region, model: CostModel, split: str | None, prices: Prices):
        super().__init__(region, model, split)
        self.prices, self.workers = prices, model.workers
        self.offset: list[int] = []  # first bit of each class in `chosen`
        at = 0
        for options in self.options:
            self.offset.append(at)
            at += len(options) + 1
        # by bit of `chosen`; and options that may do a body's work in another way
        self.owner = [(c, o) for c, options in enumerate(self.options) for o in (*options, None)]
        self.shown = {k: o.shown for k, (_, o) in enumerate(self.owner) if o is not None and o.shown < 1.0}
        self.partly = self.union(1 << k for k in self.shown)
        self.inlining = self.union(1 << k for k, (_, o) in enumerate(self.owner) if o is not None and o.renamed)
        self.sharing = [
            [(1 << (at + i), o) for i, o in enumerate(options) if o.items and o.leaf < 0 and not o.renamed]
            for at, options in zip(self.offset, self.options)
        ]
        self.several = self.union(1 << c for c, options in enumerate(self.options) if len(options) > 1 and self.sharing[c])
        self.table: list[list[State]] = [[] for _ in self.options]
        self.loaded = sum(1 << c for c in range(len(self.options)) if self._in_memory(c))
        reduced = self.union(o.reduced for options in self.options for o in options)
        self.kept = self.union(map(self.ax, region.roots)) & ~reduced  # axes that lie on the grid of every kernel that has them
        self._wide: dict[int, list[State]] = {}
        self._roots: dict[tuple[int, ...], list[Body]] = {}
        self._writes: dict[tuple[int, ...], float] = {}
        self._least_writes: dict[int, float] = {}
        self._late: dict[int, int] = {}  # of each rank, classes that have it or a larger one
        self._plainly: dict[tuple[int, int], int] = {}
        self._fill()

    # ---- the table
    def _fill(self) -> None:
        order = sorted(range(len(self.options)), key=lambda c: self.r.rank[c])
        version = [0] * len(order)
        seen: dict[int, int] = {}
        for _ in range(ROUNDS):
            changed = False
            for c in order:
                stamp = sum(version[x] for o in self.options[c] for x in o.children)
                if seen.get(c) == stamp:
                    continue
                seen[c] = stamp
                states = self._states(c, BEAM)
                if [s.chosen for s in states] != [s.chosen for s in self.table[c]]:
                    self.table[c] = states
                    version[c] += 1
                    changed = True
                self._price(c)
            if not changed:
                break

    def _price(self, c: int) -> None:
        """Enter what a plan takes that stores c."""
        states = [s for s in self.table[c] if not s.leaves >> c & 1]
        if not self.r.cut[c] or not states:
            return
        p = self.prices
        floor = min(self.bound(s, (c,)) + p.bound(s.leaves) for s in states)
        own = [self.guess(s, (c,)) for s in states]
        i = min(range(len(states)), key=lambda i: own[i] + p.guess(states[i].leaves))
        p.put(c, floor, own[i], (self, states[i].items), p.made(states[i].leaves) | 1 << c)

    def _states(self, c: int, beam: int) -> list[State]:
        out: list[State] = []
        me, rank = 1 << c, self.r.rank
        for i, o in enumerate(self.options[c]):
            if o.leaf >= 0 and rank[o.leaf] >= rank[c] and self.r.cut[c]:
                continue
            partial = [self._start(c, i, o)]
            axes = self.ax(c) | o.reduced
            for x in o.children:
                joined: list[State] = []
                repeats = self._repeats(axes & ~self.ax(x)) - 1
                for e in self.reach(x):
                    if (e.classes | e.leaves) & me or e.reduced & o.renamed:
                        continue
                    mixed = not e.mixed and self._prepared(x, e, o)
                    again = max(e.vec[:3]) * repeats if repeats else 0.0
                    for s in partial:
                        if (j := self.join(s, e, mixed, again)) is not None:
                            joined.append(j)
                partial = self.best(joined, 1, beam)
                if not partial:
                    break
            for s in partial:
                once_more = bool(o.reduced & s.reduced)
                if once_more:
                    s.passes += 1.0 if s.vec[0] > 0 else LIGHT
                s.reduced |= o.reduced
                if once_more or not o.children:
                    self._rate(s)
                out.append(s)
        return self.best(out, 2, beam)

    def _start(self, c: int, i: int, o: Option) -> State:
        leaves = 1 << o.leaf if o.leaf >= 0 else 0
        factors = self.union(1 << g[0] for g in o.sides if len(g) == 1 and g[0] >= 0)
        elements = self.union(1 << x for x in o.children) & ~factors
        return State(0.0, 1 << (self.offset[c] + i), 1 << c, o.items, leaves, 0, 1.0, self.vec(o.items), factors, elements)

    def _repeats(self, missing: int) -> int:
        """How many blocks compute what lacks these axes."""
        return self.tiles(missing & self.kept, BLOCK)

    def _prepared(self, x: int, e: State, o: Option) -> bool:
        """Is x, computed or read as in e, an operand of o's product (or the largest factor of one) that is made by element of what
        is loaded?"""
        for side in o.sides:
            if side[0] == x and not (e.vec[0] or e.reduced):
                return len(side) > 1 or not (self.loaded | e.leaves) >> x & 1
        return False

    def reach(self, x: int) -> list[State]:
        """How a class may come into a body: computed there, or read from memory."""
        own = self.table[x]
        if not self.r.read[x] or self.r.stored(x) is not None:
            return own
        items = self.read(x)
        return [*own, State(0.0, 1 << (self.offset[x] + len(self.options[x])), 1 << x, items, 1 << x, 0, 1.0, self.vec(items))]

    def join(self, a: State, b: State, mixed: bool = False, again: float = 0.0) -> State | None:
        """Both bodies in one, or None where they disagree about a class.  mixed, again: what is known of both together."""
        common = a.classes & b.classes
        if common and (a.chosen & b.chosen).bit_count() != common.bit_count():
            return None
        t, o, f, m = a.vec
        x, y, z, w = b.vec
        t, o, f, m = t + x, o + y, f + z, m + w
        if both := a.items & b.items:
            x, y, z, w = self._vecs.get(both) or self.vec(both)
            t, o, f, m = t - x, o - y, f - z, m - w
        leaves, factors, elements = a.leaves | b.leaves, a.factors | b.factors, a.elements | b.elements
        items = a.items | b.items
        passes = a.passes if a.passes > b.passes else b.passes
        if a.again > again:
            again = a.again
        if b.again > again:
            again = b.again
        mixed = mixed or a.mixed or b.mixed or bool(factors & elements & (self.loaded | leaves))
        score = 0.0
        plain = not (mixed and self.slow > 1.0) and not (items & self.affected and factors & self.long & (self.loaded | leaves))
        if plain:  # as `_rate` has it
            most = max(t, o, f, m)
            score = (most + 0.25 * (t + o + f + m - most)) * (0.5 + 0.5 * passes) + again
            if leaves:
                score += self.prices.guess(leaves)
        s = State(
            score,
            a.chosen | b.chosen,
            a.classes | b.classes,
            items,
            leaves,
            a.reduced | b.reduced,
            passes,
            (t, o, f, m),
            factors,
            elements,
            mixed,
            again,
        )
        if not plain:
            self._rate(s)
        return s

    def busy(self, s: State) -> Vec:
        """Seconds by resource."""
        v = s.vec
        if (long := self.plainly(s)) and (t := self.vec(long)[0]):
            v = (max(v[0] - t, 0.0), v[1] + t * self.plain, v[2], v[3])
        return (v[0] * self.slow, v[1], v[2], v[3]) if s.mixed else v

    def plainly(self, s: State) -> int:
        """Products (items) that no matrix unit does, since an operand lies in memory with more than 16 bits, or is computed and not
        rounded to them."""
        items = s.items & self.affected
        if not items:
            return 0
        long = s.factors & (self.long & (self.loaded | s.leaves) | self.computed & ~s.leaves) | self.made
        if not long:
            return 0
        key = items, long
        if key not in self._plainly:
            self._plainly[key] = self.union(1 << i for i in bits(items) if self.alone[i] & long)
        return self._plainly[key]

    def _rate(self, s: State) -> None:
        """A guess for ranking: mostly the dominant resource, more for every further pass, and what the leaves cost to make."""
        v = self.busy(s) if s.mixed or s.items & self.affected else s.vec
        most = max(v)
        work = (most + 0.25 * (v[0] + v[1] + v[2] + v[3] - most)) * (0.5 + 0.5 * s.passes)
        s.score = work + s.again + self.prices.guess(s.leaves)

    @staticmethod
    def best(states: list[State], per: int, beam: int) -> list[State]:
        """The best states, few for each set of leaves; the most fused ones always stay."""
        if len(states) <= 1:
            return states
        states.sort(key=BEST_FIRST)
        least = min(s.leaves.bit_count() for s in states)
        out: list[State] = []
        count: dict[tuple[int, float], int] = {}
        same: set[int] = set()
        fused = 0
        for s in states:
            key = (s.leaves, s.passes)
            if s.chosen in same or count.get(key, 0) >= per:
                continue
            is_fused = s.leaves.bit_count() == least
            if len(out) < beam or (is_fused and fused < 2):
                out.append(s)
                same.add(s.chosen)
                count[key] = count.get(key, 0) + 1
                fused += is_fused
        return out

    # ---- what the search asks
    def kernels(self, roots: tuple[int, ...]) -> list[Body]:
        """Bodies that compute all roots, best first."""
        if roots not in self._roots:
            top = max(self.r.rank[r] for r in roots)
            if top not in self._late:
                self._late[top] = self.union(1 << x for x, rank in enumerate(self.r.rank) if rank >= top)
            mine = self.union(1 << r for r in roots) | self._late[top]
            each = WIDE if len(roots) <= 2 else max(WIDE // len(roots), 4)
            out: list[State] = []
            for i, r in enumerate(roots):
                if r not in self._wide:
                    self._wide[r] = self._states(r, WIDE)
                own = [s for s in self._wide[r] if not s.leaves & mine]
                joined = [j for a in out for b in own[:each] if (j := self.join(a, b)) is not None]
                out = own if i == 0 else self.best(joined, 2, each)
            out = [self.shared(s, roots) for s in out]
            known = {s.chosen for s in out}
            ended = [s for s in self.ended(out[0], roots) if s.chosen not in known] if out else []
            self._roots[roots] = [
                Body(self, roots, s, self.guess(s, roots), last) for some, last in ((out, False), (ended, True)) for s in some
            ]
        return self._roots[roots]

    def shared(self, s: State, roots: tuple[int, ...]) -> State:
        """The body with other options where these add no work to what it does anyway: where a class is a pivot of a fold that the
        body computes, say, rather than a multiple of another maximum."""
        taken: dict[int, Option | None] = {}
        for c in bits(s.classes & self.several):
            for place, o in self.sharing[c]:
                if place & s.chosen or o.items & ~s.items or o.reduced & ~s.reduced:
                    continue
                taken = taken or self.taken(s)
                old = taken.get(c)  # None, too, where the body needs the class no more
                if old is None or not old.items:
                    break
                if not all(x in taken for x in o.children):
                    continue
                if not old.items & ~o.items and set(old.children) <= set(o.children):
                    continue  # nothing would go
                if not any(self.needs(taken, x) >> c & 1 for x in o.children):
                    kept = self.kept_items(taken | {c: o}, roots)
                    if kept & s.items == kept != s.items and not self.captured(taken | {c: o}):
                        taken[c] = o
                        s = self.reached(s, taken, roots)
                        taken = self.taken(s)
                        break
        return s

    def ended(self, s: State, roots: tuple[int, ...]) -> list[State]:
        """The body ended before each axis that it reduces: all that comes of reductions along it is read from memory.  Guesses are
        least sure of the most fused body, and would leave no other where it takes much more than they say: where all blocks compute
        the same, above all."""
        taken, out = self.taken(s), []
        top = max(self.r.rank[r] for r in roots)
        for axis in bits(s.reduced):
            ends: dict[int, Option | None] = {
                c: None
                for c, o in taken.items()
                if o is not None and o.reduced >> axis & 1 and self.r.read[c] and c not in roots and self.r.rank[c] < top
            }
            if ends:
                out.append(self.reached(replace(s, passes=1.0, again=0.0), taken | ends, roots))
        return out

    def taken(self, s: State) -> dict[int, Option | None]:
        """The option of each class of a body; None: it is read from memory."""
        return {c: o for c, o in (self.owner[k] for k in bits(s.chosen))}

    def wide(self, s: State) -> bool:
        """Does the body multiply, in a sum, what may cancel there?  Then it must not round its operands."""
        cancels = self.r.cancels
        if not any(cancels):
            return False
        for c, o in self.taken(s).items():
            if o is not None:
                own = [o.node] if o.kind == "node" and o.node.op == "mul" and self.r.summed[c] else []
                if any(cancels[a] for m in (*own, o.product, *(m for _, m in o.products)) if m is not None for a in m.args):
                    return True
                if o.node.op == "fold" and any(cancels[x] for x in o.children):
                    return True
        return False

    def needs(self, taken: dict[int, Option | None], c: int, whole: bool = True) -> int:
        """Bits of the classes that a class is computed from in a body, itself among them; whole: those below inlined views, too."""
        seen, todo = 0, [c]
        while todo:
            x = todo.pop()
            if not seen >> x & 1:
                seen |= 1 << x
                if (o := taken[x]) is not None and (whole or not o.renamed):
                    todo += o.children
        return seen

    def captured(self, taken: dict[int, Option | None]) -> bool:
        """Would an inlined view put other positions where what it shows reduces over the axis of that name?"""
        return any(
            o is not None
            and o.renamed
            and any((below := taken[x]) is not None and below.reduced & o.renamed for x in bits(self.needs(taken, c)))
            for c, o in taken.items()
        )

    def operations(self, s: State, roots: tuple[int, ...]) -> int:
        """How many the kernel's terms have, if there are inlined views: all that is below one is there once more, for other positions."""
        if not s.chosen & self.inlining:
            return 0
        taken = self.taken(s)
        count: dict[int, int] = {}  # of classes below inlined views, and of the roots
        todo = list(roots)
        while todo:
            c = todo[-1]
            own = [x for x in bits(self.needs(taken, c, whole=False)) if taken[x] is not None]
            shown = [o.children[0] for x in own if (o := taken[x]) is not None and o.renamed]
            if missing := [x for x in shown if x not in count]:
                todo += missing
                continue
            count[c] = len(own) + sum(count[x] for x in shown)
            todo.pop()
        return sum(count[r] for r in roots)

    def kept_items(self, taken: dict[int, Option | None], roots: tuple[int, ...]) -> int:
        """The work of what the roots reach by these options."""
        items, todo, seen = 0, list(roots), set(roots)
        while todo:
            c = todo.pop()
            o = taken[c]
            if o is None:
                items |= self.read(c)
                continue
            items |= o.items
            for x in o.children:
                if x not in seen:
                    seen.add(x)
                    todo.append(x)
        return items

    def reached(self, s: State, taken: dict[int, Option | None], roots: tuple[int, ...]) -> State:
        """What is left of a body with these options."""
        chosen = classes = items = leaves = reduced = 0
        todo = list(roots)
        while todo:
            c = todo.pop()
            if classes >> c & 1:
                continue
            classes |= 1 << c
            o = taken[c]
            if o is None:
                chosen |= 1 << (self.offset[c] + len(self.options[c]))
                items, leaves = items | self.read(c), leaves | 1 << c
                continue
            chosen |= 1 << (self.offset[c] + self.options[c].index(o))
            items, reduced, leaves = items | o.items, reduced | o.reduced, leaves | (1 << o.leaf if o.leaf >= 0 else 0)
            todo += o.children
        new = replace(s, chosen=chosen, classes=classes, items=items, leaves=leaves, reduced=reduced, vec=self.vec(items))
        self._rate(new)
        return new

    def apart(self, root: int) -> State | None:
        """The body that reads from memory whatever may lie there, partial results aside: the kernel that can always be made."""
        rank = self.r.rank
        parted = [any("." in a for a in free) for free in self.r.free]

        known: dict[int, State | None] = {}

        def state(c: int) -> State | None:
            if c != root and self.r.read[c] and self.r.stored(c) is None:
                return self.reach(c)[-1]
            for i, o in enumerate(self.options[c]):
                below = [x for x in (*o.children, o.leaf) if x >= 0]
                if o.kind == "inline" or any(rank[x] >= rank[c] or parted[x] > parted[c] for x in below):
                    continue
                out: State | None = self._start(c, i, o)
                for x in o.children:
                    child = known[x]
                    out = self.join(out, child) if out is not None and child is not None else None
                if out is not None:
                    out.reduced |= o.reduced
                    return out
            return None

        for c in sorted((c for c in range(len(self.options)) if rank[c] <= rank[root]), key=lambda c: (rank[c], c == root)):
            known[c] = state(c)  # once each, though many may need it
        return known[root]

    def writes(self, roots: tuple[int, ...]) -> float:
        """Seconds that it takes to write these classes."""
        if roots not in self._writes:
            self._writes[roots] = sum(self.bytes(r, self.r.dtype[r]) for r in roots) * self.rate[3]
        return self._writes[roots]

    def least_writes(self, roots: tuple[int, ...]) -> float:
        """Seconds that it takes to write these classes at the least."""
        for r in roots:
            if r not in self._least_writes:
                share = self.least.share(self.axes(self.ax(r)), self.count(self.ax(r)))[1]
                self._least_writes[r] = share * self.writes((r,))
        return sum(self._least_writes[r] for r in roots)

    def bound(self, s: State, roots: tuple[int, ...]) -> float:
        """Least time of the kernel alone."""
        v = self.sure(s.items)
        if (long := self.plainly(s)) and (t := self.sure(long)[0]):
            v = (max(v[0] - t, 0.0), v[1] + t * self.plain, v[2], v[3])
        shown = math.prod(self.shown[k] for k in bits(s.chosen & self.partly))
        return self.launch + max(shown * max(v[:3]), shown * v[3] + self.least_writes(roots))

    def guess(self, s: State, roots: tuple[int, ...]) -> float:
        """Likely time of the kernel alone: with what every block computes again, and with workers that the grid leaves idle."""
        v = self.busy(s)
        moved = v[3] + self.writes(roots)
        axes = 0
        for r in roots:
            axes |= self.ax(r)
        free = axes & ~s.reduced
        whole = free  # axes along which every block reads something of its own
        busy = [v[0], v[1], v[2]]
        least = 0.03 * max(*busy, moved)
        plainly = self.plainly(s)
        for i in bits(s.items):
            w = self.vecs[i]
            if plainly >> i & 1:
                w = (0.0, w[1] + w[0] * self.plain, w[2], w[3])
            if w[3] > 0.05 * v[3]:
                whole &= self.item_axes[i]
            if w[0] + w[1] + w[2] > least:
                again = self.tiles(free & ~self.item_axes[i], BLOCK)
                if again > 1:
                    busy = [x + y * (again - 1) for x, y in zip(busy, w)]
        most = max(*busy, moved)
        whole |= free & self.mask(frozenset(self.parts[1:]))  # a block has one part
        blocks = self.count(free & whole) * self.tiles(free & ~whole, 64)
        idle = max(1.0, self.workers / max(blocks, 1.0))
        return self.launch + (most + 0.25 * (sum(busy) + moved - most)) * (0.5 + 0.5 * s.passes) * (1 + 0.6 * (idle - 1))

    def choice(self, s: State, c: int) -> Option | None:
        """The option that a body takes for a class; None: it is read from memory."""
        k = len(self.options[c])
        i = ((s.chosen >> self.offset[c]) & ((1 << (k + 1)) - 1)).bit_length() - 1
        return self.options[c][i] if 0 <= i < k else None
