"""Bodies of kernels: which e-node each class takes, and which classes are read from memory.

A DAG-aware K-best search from the leaves up.  A state is a set of choices; two states join only where their choices agree, and work
that both contain counts once.  Sets are bits of integers.  What depends on roles and tiles is not known here: work is counted without
recomputation, so that a state's bound holds for every kernel that it may become.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .. import terms as T
from ..cost_models.base import CostModel, Work
from ..graph import Node
from ..program import DTYPES
from .region import Region

PARTS = 32  # parts of a split reduction, before their number is chosen
BEAM = 10
BLOCK = 256  # elements of an axis that a block holds at most, for guesses
LIGHT = 0.02  # of a pass: reducing an axis again without a product of tensors
SPECIAL = frozenset(
    "exp exp2 expm1 log log2 log10 log1p recip sqrt rsqrt tanh erf sinh cosh sin cos tan asin acos atan asinh acosh atanh pow mod floordiv".split()
)

Vec = tuple[float, float, float, float]  # seconds of tensor, plain, special work and of memory traffic
ZERO: Vec = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to get a class: by a node (product: the node of its argument that it sums directly), or from memory.

    kind   "node", "read" (this class lies in memory), "view" (its operand does), "inline" (a view computed here)
    """

    kind: str
    node: Node | None
    product: Node | None
    children: tuple[int, ...]
    items: int
    leaf: int  # class that must be stored, or -1
    reduced: int  # axes reduced here
    renamed: int  # axes that an inlined view takes away or brings in


@dataclass(slots=True)
class State:
    """A body (so far).  chosen: bits of options; classes: bits of classes computed or read; leaves: bits of classes that other
    kernels must store; reduced: bits of axes; passes: how often the work runs: once, and again for every reduction over an axis
    that the body below has reduced (far less if no product of tensors is below: then the axis may lie whole in a block)."""

    score: float
    chosen: int
    classes: int
    items: int
    leaves: int
    reduced: int
    passes: float
    vec: Vec


def bits(mask: int) -> list[int]:
    """Places of the bits that are set."""
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out


class Prices:
    """What it takes to store classes: bounds that always hold, and guesses that rank.  Kernels that several plans share count once."""

    def __init__(self, launch: float, mates: Callable[[int, int], bool]):
        self.launch, self.mates = launch, mates
        self.floor: dict[int, float] = {}  # class → bound on a plan that stores it
        self.own: dict[int, float] = {}  # class → guess at the kernel that stores it
        self.body: dict[int, tuple[Bodies, int]] = {}  # … and the work that this kernel does
        self.kernels: dict[int, int] = {}  # class → classes whose kernels its likely plan has
        self.memo: dict[int, tuple[float, int]] = {}

    def forget(self) -> None:
        self.memo.clear()

    def bound(self, leaves: int) -> float:
        return max([self.floor.get(c, self.launch) for c in bits(leaves)], default=0.0)

    def made(self, leaves: int) -> int:
        return self._union(leaves)[1]

    def guess(self, leaves: int) -> float:
        return self._union(leaves)[0] if leaves else 0.0

    def _union(self, leaves: int) -> tuple[float, int]:
        """(guess, kernels) for all of these classes.  A class that comes out of another's kernel adds the work that is not shared."""
        if leaves not in self.memo:
            order = sorted(bits(leaves), key=lambda c: (-self.own.get(c, self.launch), c))
            out, more = 0, 0.0
            family: dict[int, int] = {}  # leading class → work of its kernel
            for c in order:
                lead = next((d for d in family if self.mates(c, d) and c in self.body and d in self.body and self.body[c][0] is self.body[d][0]), None)
                if lead is None:
                    out |= self.kernels.get(c, 1 << c)
                    family[c] = self.body[c][1] if c in self.body else 0
                else:
                    bodies, items = self.body[c]
                    more += bodies.blend(family[lead] | items) - bodies.blend(family[lead])
                    family[lead] |= items
            self.memo[leaves] = more + sum(self.own.get(c, self.launch) for c in bits(out)), out
        return self.memo[leaves]


class Bodies:
    """All bodies of a region under one view of the axes: `split` names the axis that is seen as two parts, if any."""

    def __init__(self, region: Region, model: CostModel, split: str | None, prices: Prices):
        self.r, self.split, self.prices = region, split, prices
        self.workers = model.workers
        self.parts = frozenset([split + ".o", split + ".i"]) if split else frozenset()
        self.bit: dict[str, int] = {}
        self.size: list[float] = []
        base = model.floor(Work())
        self.launch = base
        self.rate = tuple((model.floor(Work(**{f: 1e15})) - base) / 1e15 for f in ("tensor", "ops", "special", "bytes"))
        self.item_bits: dict[object, int] = {}
        self.item_vecs: list[Vec] = []
        self.vec_memo: dict[int, Vec] = {0: ZERO}
        self.item_axes: list[int] = []  # axes over which an item works
        self.read_mask = 0  # items that read memory
        self.mask_memo: dict[frozenset[str], int] = {}
        self.count_memo: dict[int, float] = {}
        n = len(region.nodes)
        self.zero = [any(x.op == "num" and x.attr == 0.0 for x in region.nodes[c]) for c in range(n)]
        self.options: list[list[Option]] = []
        self.offset: list[int] = []
        at = 0
        for c in range(n):
            self.options.append(list(self._options(c)))
            self.offset.append(at)
            at += len(self.options[c]) + 1
        self.table: list[list[State]] = [[] for _ in range(n)]
        self.wide: dict[int, list[State]] = {}
        self.write_memo: dict[tuple[int, ...], float] = {}
        self.root_memo: dict[tuple[int, ...], list[tuple[State, float, float, frozenset[int]]]] = {}
        self._fill()

    # ---- axes and counts
    def mask(self, axes: frozenset[str]) -> int:
        """Axes as bits, the split axis as its parts."""
        if axes not in self.mask_memo:
            m = 0
            for a in sorted(axes):
                for x in sorted(self.parts) if a == self.split else (a,):
                    if x not in self.bit:
                        self.bit[x] = 1 << len(self.bit)
                        self.size.append(self._extent(x))
                    m |= self.bit[x]
            self.mask_memo[axes] = m
        return self.mask_memo[axes]

    def _extent(self, a: str) -> float:
        if a.endswith(".o"):
            return float(min(PARTS, max(self._extent(a[:-2]), 1)))
        if a.endswith(".i"):
            return math.ceil(self._extent(a[:-2]) / min(PARTS, max(self._extent(a[:-2]), 1)))
        return float(self.r.extents[a])

    def count(self, mask: int) -> float:
        if mask not in self.count_memo:
            self.count_memo[mask] = math.prod(s for i, s in enumerate(self.size) if mask >> i & 1)
        return self.count_memo[mask]

    def ax(self, c: int) -> int:
        return self.mask(self.r.free[c])

    # ---- work
    def item(self, key: object, tensor: float = 0.0, ops: float = 0.0, special: float = 0.0, bytes_: float = 0.0, axes: int = 0) -> int:
        if key not in self.item_bits:
            self.item_bits[key] = 1 << len(self.item_vecs)
            self.item_axes.append(axes)
            if bytes_:
                self.read_mask |= self.item_bits[key]
            self.item_vecs.append((tensor * self.rate[0], ops * self.rate[1], special * self.rate[2], bytes_ * self.rate[3]))
        return self.item_bits[key]

    def vec(self, items: int) -> Vec:
        """Work of a set of items."""
        if items not in self.vec_memo:
            a = b = c = d = 0.0
            rest = items
            while rest:
                low = rest & -rest
                v = self.item_vecs[low.bit_length() - 1]
                a, b, c, d = a + v[0], b + v[1], c + v[2], d + v[3]
                rest ^= low
            self.vec_memo[items] = (a, b, c, d)
        return self.vec_memo[items]

    def blend(self, items: int) -> float:
        """Likely seconds of a set of items: the dominant resource, and a part of the others."""
        v = self.vec(items)
        most = max(v)
        return most + 0.25 * (v[0] + v[1] + v[2] + v[3] - most)

    def read(self, c: int) -> int:
        """Item of reading a class from memory."""
        return self.item(("read", c), bytes_=self.count(self.ax(c)) * DTYPES[self.r.dtype[c]], axes=self.ax(c))

    def product(self, key: object, groups: list[int], summed: int) -> int:
        """Item of Σ over `summed` of a product of tensors with these axes."""
        every = summed
        for g in groups:
            every |= g
        wide = max(groups, key=lambda g: (self.count(g), g))
        right = 0
        for g in groups:
            if g & ~wide:
                right |= g
        work = self.count(every)
        left = sum(1 for g in groups if not g & ~wide)
        ahead = (left - 1) * self.count(wide)  # factors are gathered into two operands
        if len(groups) - left > 1:
            ahead += (len(groups) - left - 1) * self.count(right)
        if right and wide & ~right & ~summed and right & ~wide & ~summed:
            return self.item(key, tensor=2.0 * work, ops=ahead, axes=every)
        return self.item(key, ops=work, axes=every)

    def _options(self, c: int):  # type: ignore[no-untyped-def]
        r = self.r
        nodes = r.nodes[c]
        m = r.stored(c)
        if m is not None:
            yield Option("node", nodes[0], None, (), self.item(("stored", m.name), bytes_=self.count(self.ax(c)) * DTYPES[m.dtype], axes=self.ax(c)), -1, 0, 0)
            return
        fixed = next((n for n in nodes if n.op in ("num", "iota")), None) or r.input_of(c)
        if fixed is not None:
            items = 0
            if fixed.op == "input":
                b = r.inputs[fixed.attr[0]]  # type: ignore[index]
                items = self.item(("input", fixed.attr), bytes_=min(self.count(self.ax(c)), math.prod(b.shape)) * DTYPES[b.dtype], axes=self.ax(c))  # type: ignore[index]
            yield Option("node", fixed, None, (), items, -1, 0, 0)
            return
        partial = any(a.endswith(".o") for a in r.free[c]) and not (self.split and self.split + ".o" in r.free[c])
        if partial or (self.split and any(self._foreign(a) for a in r.free[c])):
            return  # only read from memory here
        for j, n in enumerate(nodes):
            match n.op:
                case "red":
                    yield from self._sums(c, j, n)
                case "fold":
                    o = self._fold(c, n)
                    if o is not None:
                        yield o
                case "view":
                    yield from self._views(c, n)
                case "gather":
                    x = n.args[0]
                    items = self.item(("gather", c), bytes_=self.count(self.ax(c)) * DTYPES[r.dtype[x]], axes=self.ax(c))
                    source = r.input_of(x) is not None or r.stored(x) is not None
                    yield Option("node", n, None, (n.args[1],), items, -1 if source else x, 0, 0)
                case _:
                    yield Option("node", n, None, tuple(dict.fromkeys(n.args)), self._elementwise(c, j, n), -1, 0, 0)

    def _foreign(self, axis: str) -> bool:
        return axis.endswith((".o", ".i")) and axis not in self.parts

    def _walks(self, axis: str) -> bool:
        """May a kernel of this view reduce over the axis?  A split axis is reduced by its inner part alone, and parts of other
        axes by their outer one alone (the merge of stored partial results)."""
        if axis == self.split or axis == f"{self.split}.o":
            return False
        return not axis.endswith(".i") or axis in self.parts

    def _elementwise(self, c: int, j: int, n: Node) -> int:
        size = self.count(self.ax(c))
        if n.op in ("add", "mul"):
            return self.item(("map", c, n.op, n.args), ops=size * (len(n.args) - 1), axes=self.ax(c))
        special = 1.0 if n.op in ("un", "bi") and n.attr in SPECIAL else 0.0
        return self.item(("map", c, n.attr, n.args), ops=size * (0.5 if special or n.op == "bi" else 1.0), special=special * size, axes=self.ax(c))

    def _sums(self, c: int, j: int, n: Node):  # type: ignore[no-untyped-def]
        op, axis = n.attr  # type: ignore[misc]
        if not self._walks(axis):
            return
        k = self.mask(frozenset([axis]))
        x = n.args[0]
        if op == "+":
            for m in self.r.nodes[x]:
                if m.op == "mul":
                    # nested sums are one product over several axes
                    items = self.product(("sum", c, m.args), [self.ax(a) for a in m.args], k)
                    yield Option("node", n, m, tuple(dict.fromkeys(m.args)), items, -1, k, 0)
        yield Option("node", n, None, (x,), self.item(("sum", c, op, x), ops=self.count(self.ax(x) | k), axes=self.ax(x) | k), -1, k, 0)

    def _fold(self, c: int, n: Node) -> Option | None:
        h, comp, axis = n.attr  # type: ignore[misc]
        if not self._walks(axis):
            return None
        p = len(h.pivots)
        pivots, comps = h.needed(comp, lambda i: self.zero[n.args[p + i]])
        k = self.mask(frozenset([axis]))
        over, items, children = k, 0, []
        own = tuple(n.args[i] for i in pivots)
        for i in pivots:
            if not (isinstance(h.pivots[i], tuple) and h.pivots[i][0] == "fn"):
                over |= self.ax(n.args[i])
            children.append(n.args[i])
            items |= self.item(("pivot", axis, n.args[i], str(h.pivots[i])), ops=self.count(self.ax(n.args[i]) | k), axes=self.ax(n.args[i]) | k)
        for i in comps:
            for j, e in h.coef[i]:
                x = n.args[p + j]
                if self.zero[x]:
                    continue
                children.append(x)
                here = over | self.ax(x)
                if e.op != "num":
                    items |= self.item(("weight", axis, own, str(e)), ops=self.count(over), special=self.count(over), axes=over)
                    key = ("absorb", axis, own, x, str(e))
                    items |= self.product(key, [over, self.ax(x)], k) if self.ax(x) & ~over else self.item(key, ops=self.count(here), axes=here)
                else:
                    items |= self.item(("absorb", axis, x), ops=self.count(self.ax(x) | k), axes=self.ax(x) | k)
        return Option("node", n, None, tuple(dict.fromkeys(children)), items, -1, k, 0)

    def _views(self, c: int, n: Node):  # type: ignore[no-untyped-def]
        x = n.args[0]
        r = self.r
        if any(T.depends(frozenset([a]), p) for a, _ in n.attr for p in self.parts) or any(a.endswith((".o", ".i")) for a in r.free[x]):  # type: ignore[attr-defined]
            return
        fixed = r.input_of(x) is not None or r.stored(x) is not None
        if fixed or r.cut[x]:
            items = self.item(("view", c), bytes_=self.count(self.ax(c)) * DTYPES[r.dtype[x]], axes=self.ax(c))
            yield Option("view", n, None, (), items, -1 if fixed else x, 0, 0)
        if not fixed:
            names = frozenset(b for a, ix in n.attr for b in (a, *ix.axes))  # type: ignore[attr-defined]
            yield Option("inline", n, None, (x,), 0, -1, 0, self.mask(names))

    # ---- states
    def _fill(self) -> None:
        order = sorted(range(len(self.options)), key=lambda c: self.r.rank[c])
        version = [0] * len(order)
        seen: dict[int, int] = {}
        for rnd in range(3):
            changed = False
            for c in order:
                stamp = sum(version[x] for o in self.options[c] for x in o.children)
                if seen.get(c) == stamp:
                    continue
                seen[c] = stamp
                states = self._states(c)
                if [s.chosen for s in states] != [s.chosen for s in self.table[c]]:
                    self.table[c] = states
                    version[c] += 1
                    changed = True
                self._price(c)
            if not changed:
                break

    def _price(self, c: int) -> None:
        """A plan that stores c: its bound, and a guess at its time."""
        if not self.r.cut[c] or not self.table[c]:
            return
        p = self.prices
        best, guess, made = math.inf, math.inf, 0
        for s in self.table[c]:
            if s.leaves >> c & 1:
                continue
            best = min(best, self.bound(s, (c,)) + p.bound(s.leaves))
            own = self.guess(s, (c,))
            total = own + p.guess(s.leaves)
            if total < guess:
                guess, made = total, p.made(s.leaves) | 1 << c
                p.own[c], p.body[c] = own, (self, s.items)
        if made:
            p.floor[c], p.kernels[c] = best, made
            p.forget()

    def _states(self, c: int, beam: int = BEAM) -> list[State]:
        out: list[State] = []
        me = 1 << c
        for i, o in enumerate(self.options[c]):
            chosen = 1 << (self.offset[c] + i)
            v = self.vec(o.items)
            if o.leaf >= 0 and self.r.rank[o.leaf] >= self.r.rank[c] and self.r.cut[c]:
                continue
            partial = [State(0.0, chosen, me, o.items, 1 << o.leaf if o.leaf >= 0 else 0, 0, 1, v)]
            for x in o.children:
                nxt: list[State] = []
                for e in self.reach(x):
                    if e.classes & me or e.leaves & me:
                        continue
                    if o.renamed and (e.reduced & o.renamed):
                        continue
                    for s in partial:
                        j = self.join(s, e)
                        if j is not None:
                            nxt.append(j)
                partial = self.best(nxt, 1, beam)
                if not partial:
                    break
            for s in partial:
                if o.reduced & s.reduced:
                    s.passes += 1.0 if s.vec[0] > 0 else LIGHT
                    self.rate_state(s)
                elif not o.children:
                    self.rate_state(s)
                s.reduced |= o.reduced
                out.append(s)
        return self.best(out, 2, beam)

    def reach(self, x: int) -> list[State]:
        """How a class may come into a body: computed there, or read from memory."""
        own = self.table[x]
        if not self.r.cut[x] or self.r.stored(x) is not None:
            return own
        items = self.read(x)
        s = State(0.0, 1 << (self.offset[x] + len(self.options[x])), 1 << x, items, 1 << x, 0, 1, self.vec(items))
        return [*own, s]

    def join(self, a: State, b: State) -> State | None:
        """Both bodies in one, or None where they disagree about a class."""
        common = a.classes & b.classes
        if common and (a.chosen & b.chosen).bit_count() != common.bit_count():
            return None
        both = a.items & b.items
        v, w = a.vec, b.vec
        if both:
            u = self.vec(both)
            vec = (v[0] + w[0] - u[0], v[1] + w[1] - u[1], v[2] + w[2] - u[2], v[3] + w[3] - u[3])
        else:
            vec = (v[0] + w[0], v[1] + w[1], v[2] + w[2], v[3] + w[3])
        s = State(0.0, a.chosen | b.chosen, a.classes | b.classes, a.items | b.items, a.leaves | b.leaves, a.reduced | b.reduced, max(a.passes, b.passes), vec)
        self.rate_state(s)
        return s

    def rate_state(self, s: State) -> None:
        """A guess for ranking: mostly the dominant resource, more for every further pass, and what the leaves cost to make."""
        v = s.vec
        most = max(v)
        s.score = (most + 0.25 * (v[0] + v[1] + v[2] + v[3] - most)) * (0.5 + 0.5 * s.passes) + self.prices.guess(s.leaves)

    @staticmethod
    def best(states: list[State], per: int, beam: int) -> list[State]:
        """The best states, few for each set of leaves; the most fused ones always stay."""
        if len(states) <= 1:
            return states
        states.sort(key=lambda s: (s.score, s.chosen))
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
    def kernels(self, roots: tuple[int, ...], keep: int = 32) -> list[tuple[State, float, float, frozenset[int]]]:
        """Bodies that compute all roots, each with a bound on its time, a guess at it, and what it reads that must be stored."""
        if roots not in self.root_memo:
            mine = 0
            for r in roots:
                mine |= 1 << r
            top = max(self.r.rank[r] for r in roots)
            out: list[State] = []
            for i, r in enumerate(roots):
                if r not in self.wide:
                    self.wide[r] = self._states(r, keep)
                own = [s for s in self.wide[r] if not s.leaves & mine and all(self.r.rank[x] < top for x in bits(s.leaves))]
                out = own if i == 0 else self.best([j for a in out for b in own if (j := self.join(a, b)) is not None], 2, keep)
            self.root_memo[roots] = [(s, self.bound(s, roots), self.guess(s, roots), frozenset(bits(s.leaves))) for s in out]
        return self.root_memo[roots]

    def apart(self, root: int) -> State | None:
        """The body that reads from memory whatever may lie there: the kernel that can always be made."""
        rank = self.r.rank

        def state(c: int, top: bool) -> State | None:
            if not top and self.r.cut[c] and self.r.stored(c) is None:
                return self.reach(c)[-1]
            for i, o in enumerate(self.options[c]):
                if o.kind == "inline" or any(rank[x] >= rank[c] for x in (*o.children, *([o.leaf] if o.leaf >= 0 else []))):
                    continue
                out: State | None = State(
                    0.0, 1 << (self.offset[c] + i), 1 << c, o.items, 1 << o.leaf if o.leaf >= 0 else 0, o.reduced, 1, self.vec(o.items)
                )
                for x in o.children:
                    below = state(x, False)
                    out = self.join(out, below) if out is not None and below is not None else None
                if out is not None:
                    out.reduced |= o.reduced
                    return out
            return None

        return state(root, True)

    def writes(self, roots: tuple[int, ...]) -> float:
        """Seconds that it takes to write these classes."""
        if roots not in self.write_memo:
            self.write_memo[roots] = sum(self.count(self.ax(r)) * DTYPES[self.r.dtype[r]] for r in roots) * self.rate[3]
        return self.write_memo[roots]

    def bound(self, s: State, roots: tuple[int, ...]) -> float:
        """Least time of the kernel alone."""
        v = s.vec
        return self.launch + max(v[0], v[1], v[2], v[3] + self.writes(roots))

    def guess(self, s: State, roots: tuple[int, ...]) -> float:
        """Likely time of the kernel alone: the score, with what every block computes again and with workers that the grid leaves idle."""
        v = s.vec
        moved = v[3] + self.writes(roots)
        axes = 0
        for r in roots:
            axes |= self.ax(r)
        free = axes & ~s.reduced
        most = max(v[0], v[1], v[2], moved)
        t, o, f = v[0], v[1], v[2]
        whole = free  # axes along which every block reads something of its own
        for i in bits(s.items):
            w = self.item_vecs[i]
            if w[3] > 0.05 * v[3]:
                whole &= self.item_axes[i]
            if w[0] + w[1] + w[2] > 0.03 * most:
                again = -1.0
                for b in bits(free & ~self.item_axes[i]):
                    if self.size[b] > BLOCK:
                        again = abs(again) * math.ceil(self.size[b] / BLOCK)
                if again > 0:
                    t, o, f = t + w[0] * (again - 1), o + w[1] * (again - 1), f + w[2] * (again - 1)
        most = max(t, o, f, moved)
        blocks = self.count(free & whole)
        for b in bits(free & ~whole):
            blocks *= math.ceil(self.size[b] / 64)
        idle = max(1.0, self.workers / max(blocks, 1.0))
        return self.launch + (most + 0.25 * (t + o + f + moved - most)) * (0.5 + 0.5 * s.passes) * (1 + 0.6 * (idle - 1))

    def choice(self, s: State, c: int) -> Option | None:
        """The option that a body takes for a class; None: it is read from memory."""
        k = len(self.options[c])
        i = ((s.chosen >> self.offset[c]) & ((1 << (k + 1)) - 1)).bit_length() - 1
        return self.options[c][i] if 0 <= i < k else None
