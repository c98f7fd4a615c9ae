"""Breaking dependences: find sums over k that need another reduction over k, and join both in one fold.

For Σₖ body, where body needs a reduction over k (its pivot), the body is written as g(c…, R…): the cᵢ can be computed with no
reduction over k, the R are pivots.  `repair.derive` gives the merge; the sum becomes a component of a fold, moved from the pivots
that the fold keeps (r) to the values that the body has (R): Σⱼ coef₀ⱼ(r, R)·foldⱼ.  Where both are the same that is just fold₀.

A pivot may be a maximum or minimum, a mean (a sum with a count, possibly weighted), or a function of other components.  It
may also be another value than the body's own: any value serves if it is carried consistently, so where the body has P =
f(max, …) the fold keeps the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..graph import Graph, Node
from ..terms import (
    REDUCTIONS,
    Monoid,
    Term,
    add,
    base,
    depends,
    fold,
    is_num,
    make,
    mul,
    nary,
    num,
    postorder,
    substitute,
    var,
    variables,
)
from . import infinities, repair
from .declared import BREAK

_ATOM, _PIVOT, _FUNCTION, _OPAQUE, _LATER = 1.0, 1.5, 2.0, 3.0, 1000.0  # cost of leaves of a skeleton: the cheapest is taken
_DEPTH = 10
_VARIANTS = 3


@dataclass(frozen=True)
class Pivot:
    """What a fold keeps as pivot.  kind: "max", "min" or "mean"; body: class that it reduces; weight: class that a mean
    counts (None: elements); scale: the class's value is scale·pivot."""

    kind: str
    body: int
    weight: int | None = None
    scale: float = 1.0


@dataclass
class Found:
    """A union to make: class = value, a term with folds.  vanishing: (pivot class, fold term) pairs for the fact "vanish".
    alike: the fold that equals the class but where a pivot is masked (there the fold is 0, and the class NaN)."""

    cls: int
    value: Term
    folds: list[Term]
    vanishing: list[tuple[int, Term]] = field(default_factory=list)
    text: str = ""
    alike: Term | None = None


def axes_of_sums(g: Graph) -> list[str]:
    """Whole axes that sums run over, in the graph's order."""
    return list(dict.fromkeys(n.attr[1] for _, n in g.items() if n.op == "red" and n.attr[0] == "+" and "." not in n.attr[1]))  # type: ignore[index]


class Finder:
    """Dependences over one axis of a graph."""

    def __init__(self, g: Graph, k: str, below: Mapping[int, int], bit: int, by_term: Mapping[Term, int]):
        self.g, self.k, self.below, self.bit, self.by_term = g, k, below, bit, by_term
        self.sums = [(c, n) for c, n in g.items() if n.op == "red" and n.attr == ("+", k)]
        self._numbers: dict[int, float | None] = {}
        self.cone = self._cone()
        self.clean = self._clean()
        self.pivots = self._pivots()

    # ---- what needs a reduction over k
    def _cone(self) -> list[int]:
        """Classes below the bodies of the sums that may need a reduction over k, to a limited depth."""
        seen: dict[int, None] = {}
        layer = [n.args[0] for _, n in self.sums]
        for _ in range(_DEPTH):
            layer = [c for c in dict.fromkeys(layer) if c not in seen and self.below[c] & self.bit]
            seen.update(dict.fromkeys(layer))
            layer = [a for c in layer for n in self.g.nodes[c] if n.op != "view" for a in n.args]
        return sorted(seen)

    def _clean(self) -> set[int]:
        """Classes of the cone that can be computed with no reduction over k.  A view counts: it is read from memory."""
        clean: set[int] = set()
        cone = set(self.cone)

        def ok(c: int) -> bool:
            return c in clean or (c not in cone and not self.below[c] & self.bit)

        changed = True
        while changed:
            changed = False
            for c in self.cone:
                if c not in clean and any(
                    n.op == "view" or (not _reduces(n, self.k) and all(map(ok, n.args))) for n in self.g.nodes[c]
                ):
                    clean.add(c)
                    changed = True
        return clean

    def is_clean(self, c: int) -> bool:
        return c in self.clean or not self.below[c] & self.bit

    def varies(self, c: int) -> bool:
        return depends(self.g.free.get(c, frozenset()), self.k)

    def number(self, c: int) -> float | None:
        if c not in self._numbers:  # classes may have thousands of nodes, and are asked for each of their uses
            self._numbers[c] = next((float(n.attr) for n in self.g.nodes[c] if n.op == "num"), None)  # type: ignore[arg-type]
        return self._numbers[c]

    def _pivots(self) -> dict[int, Pivot]:
        """Classes of the cone that are a maximum, minimum or mean over k of something clean."""
        out: dict[int, Pivot] = {}
        n_k = float(self.g.extents[self.k])
        for c in self.cone:
            if self.varies(c) or self.is_clean(c):
                continue
            for n in self.g.nodes[c]:
                if n.op == "red" and n.attr[1] == self.k and self.is_clean(n.args[0]):  # type: ignore[index]
                    if n.attr[0] in ("max", "min"):  # type: ignore[index]
                        out[c] = Pivot(n.attr[0], n.args[0])  # type: ignore[index]
                        break
                    if n.attr[0] == "+":  # type: ignore[index]
                        out.setdefault(c, Pivot("mean", n.args[0], None, n_k))
                elif n.op == "mul" and len(n.args) == 2 and (w := self._weighted(n)):
                    out.setdefault(c, w)
        return out

    def _weighted(self, n: Node) -> Pivot | None:
        """Σ w·x · (Σ w)⁻¹ with w > 0: a mean of x that counts w."""
        for top, inverse in (n.args, n.args[::-1]):
            for r in self.g.nodes[inverse]:
                if r.op != "un" or r.attr != "recip":
                    continue
                weights = [m.args[0] for m in self.g.nodes[r.args[0]] if m.op == "red" and m.attr == ("+", self.k)]
                for w in weights:
                    if not (
                        self.is_clean(w) and self.varies(w) and all(self.g.has(w, f) for f in ("nonneg", "nonzero", "finite"))
                    ):
                        continue
                    for m in self.g.nodes[top]:
                        if m.op == "red" and m.attr == ("+", self.k):
                            for p in self.g.nodes[m.args[0]]:
                                if p.op == "mul" and len(p.args) == 2 and w in p.args:
                                    x = p.args[1] if p.args[0] == w else p.args[0]
                                    if self.is_clean(x):
                                        return Pivot("mean", x, w)
        return None

    # ---- skeletons
    def costs(
        self, allowed: Iterable[int], leaves: Mapping[int, float], later: bool
    ) -> tuple[dict[int, tuple[float, Node | None]], ...]:
        """Cheapest skeleton of each class of the cone: (cost, node, or None for a leaf), anywhere and as the body of
        a sum.  In a body no
        factor may be free of k: it has been moved out elsewhere."""
        allowed = set(allowed)
        best: dict[int, tuple[float, Node | None]] = {}
        body: dict[int, tuple[float, Node | None]] = {}

        def any_cost(c: int) -> float:
            if self.is_clean(c):
                return 0.5 if self.number(c) is not None else _ATOM
            return best[c][0] if c in best else math.inf

        def body_cost(c: int) -> float:
            if self.number(c) is not None:
                return 0.5
            if not self.varies(c):
                return math.inf
            if self.is_clean(c):
                return _ATOM
            return body[c][0] if c in body else math.inf

        def offer(table: dict[int, tuple[float, Node | None]], c: int, v: float, n: Node | None) -> bool:
            if v < (table[c][0] if c in table else math.inf):
                table[c] = (v, n)
                return True
            return False

        for c in self.cone:
            if not self.is_clean(c):
                if c in allowed:
                    offer(best, c, _PIVOT, None)
                if c in leaves:
                    offer(best, c, leaves[c], None)
                if later and self.varies(c):
                    offer(best, c, _LATER, None)
        changed = True
        while changed:
            changed = False
            for c in self.cone:
                if self.is_clean(c):
                    continue
                for n in self.g.nodes[c]:
                    if n.op not in ("add", "mul", "un"):
                        continue
                    v = 1 + sum(map(any_cost, n.args))
                    changed |= offer(best, c, v, n)
                    changed |= offer(body, c, v if n.op != "mul" else 1 + sum(map(body_cost, n.args)), n)
        return best, body

    def skeleton(
        self, c: int, tables: tuple[dict[int, tuple[float, Node | None]], ...], names: dict[int, Term], top: bool = True
    ) -> Term | None:
        """The term of class c over var("c…") and over names (pivots); fills `names` with atoms."""
        best, body = tables
        if c in names:
            return names[c]
        if self.is_clean(c):
            v = self.number(c)
            if v is not None:
                return num(v)
            names[c] = var(f"c{sum(t.op == 'var' and t.attr[0] == 'c' for t in names.values())}")  # type: ignore[index]
            return names[c]
        table = body if top else best
        if c not in table:
            return None
        n = table[c][1]
        if n is None:
            names[c] = var(f"c{sum(t.op == 'var' and t.attr[0] == 'c' for t in names.values())}")  # type: ignore[index]
            return names[c]
        args = []
        for a in n.args:
            t = self.skeleton(a, tables, names, top and n.op == "mul")
            if t is None:
                return None
            args.append(t)
        return _rounded(repair.simplify(make(n.op, n.attr, args)))

    # ---- functions of folds
    def closed(self, bodies: tuple[int, ...]) -> dict[int, Term]:
        """Classes free of k that are expressions over components of folds at these pivots, as terms over var("F…")
        (see `folds`)."""
        self.folds: list[Node] = []
        cost: dict[int, tuple[float, Term]] = {}
        for c in self.cone:
            for n in self.g.nodes[c]:
                if n.op == "fold" and n.attr[2] == self.k:  # type: ignore[index]
                    h, j, _ = n.attr  # type: ignore[misc]
                    if j >= len(h.pivots) and n.args[: len(h.pivots)] == bodies and all(isinstance(p, str) for p in h.pivots):
                        cost[c] = (1.0, var(f"F{len(self.folds)}"))
                        self.folds.append(n)
                        break
        changed = bool(cost)
        while changed:
            changed = False
            for c in self.cone:
                if self.varies(c) or self.is_clean(c):
                    continue
                for n in self.g.nodes[c]:
                    if n.op not in ("add", "mul", "un"):
                        continue
                    parts = [cost.get(a) if (v := self.number(a)) is None else (0.5, num(v)) for a in n.args]
                    known = [p for p in parts if p is not None]
                    total = 1 + sum(p[0] for p in known)
                    if len(known) == len(parts) and total < (cost[c][0] if c in cost else math.inf):
                        cost[c] = (total, make(n.op, n.attr, [p[1] for p in known]))
                        changed = True
        return {c: t for c, (_, t) in cost.items()}

    # ---- search
    def search(self, level: str, done: set[tuple]) -> Iterator[Found]:
        """Folds for the sums over k that have none.  `done`: what has been tried before, accepted or not."""
        sums = [
            (c, n.args[0])
            for c, n in self.sums
            if not self.is_clean(n.args[0]) and not any(self._serves(m, level) for m in self.g.nodes[c])
        ]
        if not sums:
            return
        extremes: list[tuple[int, ...]] = [(p,) for p, v in self.pivots.items() if v.kind != "mean"]
        means: list[tuple[int, ...]] = [(p,) for p, v in self.pivots.items() if v.kind == "mean"]
        every = [tuple(self.pivots)] if len(self.pivots) > 1 else []
        count: dict[int, int] = {}
        sets: dict[str, list[tuple[int, ...]]] = {
            "extreme": extremes,
            "function": extremes or [()],
            "mean": means,
            "several": every,
            "other": extremes + means,
            "later": extremes + means,
        }
        for pset in sets[level]:
            functions = self.closed(tuple(self.pivots[p].body for p in pset)) if level == "function" else {}
            opaque = {c: pset[0] for c in self.cone if self._over(c, pset[0])} if level == "other" else {}
            wider = {p for p in self.pivots if self._widens(p, pset[0])} if level == "extreme" else set()
            opaque |= {p: pset[0] for p in wider}
            leaves = {c: _FUNCTION for c in functions if c not in pset} | dict.fromkeys(opaque, _OPAQUE)
            if level in ("function", "other") and not leaves:
                continue
            tables = self.costs(pset, leaves, level == "later")
            for c, b in sums:
                if level == "extreme" and self._passed_over(pset[0], wider, b):
                    continue
                if count.get(c, 0) < _VARIANTS and (f := self._try(c, b, pset, functions, opaque, tables, done)):
                    count[c] = count.get(c, 0) + 1
                    yield f

    def _serves(self, n: Node, level: str) -> bool:
        """Is this a fold, or made of folds, such that its sum needs no other?  One with several pivots carries what an earlier pass
        could have supplied: that is worth a look."""
        if level == "later" and _folds(n, self.k):
            return len(n.attr[0].pivots) < 2  # type: ignore[index, union-attr]
        return _folds(n, self.k) or n.why == BREAK.name

    def _over(self, c: int, pivot: int) -> bool:
        """Is c, free of k and no pivot itself, computed from the pivot by something that a skeleton does not look into?"""
        if self.varies(c) or self.is_clean(c) or c in self.pivots or not any(n.op in ("bi", "where") for n in self.g.nodes[c]):
            return False
        seen, todo = set(), [c]
        while todo:
            d = todo.pop()
            if d == pivot:
                return True
            if d in seen or d in self.pivots or self.varies(d) or self.is_clean(d):
                continue
            seen.add(d)
            todo += [a for n in self.g.nodes[d] if n.op in ("add", "mul", "un", "bi", "where") for a in n.args]
        return False

    def _widens(self, c: int, pivot: int) -> bool:
        """Is c the same extremum as the pivot, over one more axis?"""
        kind = self.pivots[pivot].kind
        return any(n.op == "red" and n.attr[0] == kind and n.args[0] == pivot for n in self.g.nodes[c])  # type: ignore[index]

    def _passed_over(self, pivot: int, wider: set[int], body: int) -> bool:
        """Does another pivot serve this body better?  Of an extremum over k and other axes, that over k alone is nearer to what
        varies along those, and nothing must be known of other places there; what does not vary along them cannot have it."""

        def has_axes_of(p: int) -> bool:
            return self.g.free.get(p, frozenset()) <= self.g.free.get(body, frozenset())

        nearer = any(self._widens(pivot, p) and has_axes_of(p) for p, v in self.pivots.items() if v.kind != "mean")
        return nearer or (bool(wider) and not has_axes_of(pivot))

    def _try(
        self,
        c: int,
        body: int,
        pset: tuple[int, ...],
        functions: Mapping[int, Term],
        opaque: Mapping[int, int],
        tables: tuple[dict[int, tuple[float, Node | None]], ...],
        done: set[tuple],
    ) -> Found | None:
        names: dict[int, Term] = {}
        leaves = [*pset, *(f for f in functions if f not in pset), *opaque]
        for i, p in enumerate(leaves):  # numbered again below, by those that occur
            v = self.pivots.get(p)
            names[p] = var(f"R{i}") if v is None or v.scale == 1.0 else mul(v.scale, var(f"R{i}"))
        g = self.skeleton(body, tables, names)
        if g is None or body not in tables[1] or tables[1][body][1] is None:
            return None
        used = [i for i in range(len(leaves)) if f"R{i}" in set(variables(g))]
        if not used or (functions and not set(range(len(pset))) <= set(used)):  # functions read folds at all of pset
            return None
        g = _rounded(repair.simplified(substitute(g, {var(f"R{i}"): var(f"R{n}") for n, i in enumerate(used)})))
        atoms = [(t, a) for a, t in names.items() if t.op == "var" and t.attr[0] == "c"]  # type: ignore[index]
        classes = [leaves[i] for i in used]
        key = (self.g.term(c), g, self.k, tuple(self.g.term(a) for _, a in atoms), tuple(self.g.term(p) for p in classes))
        if key in done:
            return None
        done.add(key)
        return self._join(c, g, atoms, classes, functions, opaque)

    # ---- instances
    def _join(
        self,
        c: int,
        g: Term,
        atoms: list[tuple[Term, int]],
        classes: list[int],
        functions: Mapping[int, Term],
        opaque: Mapping[int, int],
    ) -> Found | None:
        d = repair.derive(g, len(classes))
        needs = repair.obligations(d) if d else None
        if d is None or needs is None:
            return None
        plain = [self.pivots.get(opaque.get(p, p)) for p in classes]  # None: a function of components
        for what, p in needs:
            if not self._satisfied(what, plain[p]):
                return None
        if any(v is not None and v.kind == "mean" for v in plain) and not all(self.g.has(a, "noinf") for a in dict(atoms).values()):
            return None  # means move by differences, which may be 0: times an infinity that is NaN
        build = _Builder(self, d, plain)
        for p, c_ in enumerate(classes):
            if plain[p] is None and not build.function(p, functions[c_], self.folds):
                return None
        monoid, singles = build.monoid(dict(atoms))
        old = [self.g.term(opaque.get(p, p)) for p in classes]
        new = [self.g.term(p) for p in classes]
        masked = {p for p, v in enumerate(plain) if v is not None and not self.g.has(v.body, "finite")}
        if not build.vanishes(masked):
            return None
        row, folds, vanishing, ones = [], [], [], []
        for j, e in build.coef(0):
            m = {}
            for p in range(len(classes)):
                scale = num(1.0 / plain[p].scale) if plain[p] is not None else num(1.0)  # type: ignore[union-attr]
                r = mul(scale, old[p])
                big = new[p] if classes[p] in opaque else mul(scale, new[p])  # only a pivot's class is a multiple of it
                if classes[p] not in opaque and p not in masked:  # r = R, finite: the difference is 0
                    r = big
                m[var(f"r{p}")], m[var(f"R{p}")] = r, big
            coef = self._moved(e, m, {p for p in range(len(classes)) if classes[p] not in opaque and p not in masked})
            if is_num(coef, 0.0):
                continue
            f = fold(monoid, len(classes) + j, self.k, singles)
            folds.append(f)
            ones.append(is_num(self._at_rest(e), 1.0))
            vanishing += [(opaque.get(classes[p], classes[p]), f) for p in sorted(masked)]
            row.append(mul(coef, f))
        value = add(*row) if len(row) > 1 else row[0]
        dropping = [(v.kind, self.g.term(v.body)) for v in plain if v is not None and v.kind != "mean"]
        if not infinities.hold(self.g, self.by_term, self.k, self.g.term(c), value, dropping):
            return None
        alike = folds[0] if ones == [True] and not any(p in opaque for p in classes) else None
        return Found(c, value, folds, vanishing, f"{g}  →  {monoid}", alike)

    @staticmethod
    def _moved(e: Term, m: dict[Term, Term], same: set[int]) -> Term:
        """A coefficient at given pivots; where old and new pivot are the same finite value, differences are 0 and ratios 1."""
        hole = {var(f"{x}{p}"): var(f"s{p}") for p in same for x in "rR"}
        e = repair.simplified(substitute(e, hole))
        values = {var(f"s{p}"): m[var(f"R{p}")] for p in same}
        return substitute(e, values | m)  # unsimplified: M − M is NaN where M = −∞, as it must be

    @staticmethod
    def _at_rest(e: Term) -> Term:
        """A coefficient where old and new pivots are the same finite values."""
        return repair.simplified(substitute(e, {var(v): var(f"s{v[1:]}") for v in variables(e) if v[0] in "rR"}))

    def _satisfied(self, what: str, pivot: Pivot | None) -> bool:
        """Does every value that a part may take for the pivot satisfy a domain condition?"""
        if pivot is None:
            return False
        b = pivot.body
        lo, hi = self.g.interval(b)
        positive = lo >= 0 and self.g.has(b, "nonzero")
        return {
            "positive": positive,
            "nonnegative": lo >= 0,
            "nonzero": positive or ((hi <= 0 or pivot.kind != "mean") and self.g.has(b, "nonzero")),
        }[what] and self.g.has(b, "finite")


class _Builder:
    """Assembles a monoid from a derivation: components that functions of folds read come first, counts of means last."""

    def __init__(self, finder: Finder, d: repair.Derived, plain: list[Pivot | None]):
        self.finder, self.d, self.plain = finder, d, plain
        self.pre: dict[tuple, int] = {}  # (monoid, component, single's class) → index
        self.rows: list[tuple[tuple[int, Term], ...]] = []
        self.single: list[int] = []  # class of each component of `pre` at one element
        self.kinds: list[str | tuple | None] = [p.kind if p is not None and p.kind != "mean" else None for p in plain]

    def function(self, p: int, e: Term, folds: list[Node]) -> bool:
        """Make pivot p a function of components of these folds."""
        g, m = self.finder.g, {}
        for v in dict.fromkeys(variables(e)):
            n = folds[int(v[1:])]
            h, comp, _ = n.attr  # type: ignore[misc]
            np = len(h.pivots)
            for i in range(len(h.coef)):
                if (h, i, n.args[np + i]) not in self.pre:
                    self.pre[h, i, n.args[np + i]] = len(self.rows)
                    self.rows.append(())
                    self.single.append(n.args[np + i])
            for i, row in enumerate(h.coef):
                self.rows[self.pre[h, i, n.args[np + i]]] = tuple((self.pre[h, j, n.args[np + j]], c) for j, c in row)
            m[var(v)] = var(f"y{self.pre[h, comp - np, n.args[comp]]}")
            for t in postorder([e]):  # what is divided by must be positive on every part
                if t.op == "un" and t.attr in repair.PARTIAL and var(v) in t.args:
                    s = n.args[comp]
                    if not (g.interval(s)[0] >= 0 and g.has(s, "nonzero") and all(j == comp - np for j, _ in h.coef[comp - np])):
                        return False
        if any(t.op == "un" and t.attr in repair.PARTIAL and t.args[0].op != "var" for t in postorder([e])):
            return False
        self.kinds[p] = ("fn", substitute(e, m))
        return True

    def coef(self, i: int) -> list[tuple[int, Term]]:
        """Row of basis element i, over all components."""
        return [(j + len(self.pre), e) for j, e in self.d.coef[i]]

    def opened(self, c: int, depth: int = 4) -> Term:
        """A class as sums and multiples of classes, which are variables: deep enough to see what cancels, and no deeper, or
        simplifying would rewrite what is below."""
        n = self.finder.g.nodes[c][0]
        if n.op == "num":
            return num(n.attr)  # type: ignore[arg-type]
        if depth and (n.op == "add" or (n.op == "mul" and any(self.finder.number(a) is not None for a in n.args))):
            return make(n.op, None, [self.opened(a, depth - 1) for a in n.args])
        return _hole(c)

    def monoid(self, atoms: dict[Term, int]) -> tuple[Monoid, list[Term]]:
        """The monoid and the singletons of a fold, given the atoms' classes."""
        g = self.finder.g
        shifted = {v for b in self.d.basis for t in postorder([b]) if t.op == "add" for v in variables(t)}
        m = {t: self.opened(c) if t.attr in shifted else _hole(c) for t, c in atoms.items()}
        at_one = {var(f"y{j}"): _hole(c) for j, c in enumerate(self.single)}
        values: list[Term] = []
        for p, (v, kind) in enumerate(zip(self.plain, self.kinds)):
            if v is not None:
                one = self.opened(v.body)
            else:
                assert isinstance(kind, tuple)
                one = repair.simplified(substitute(kind[1], at_one))
            m[var(f"r{p}")] = one
            values.append(g.term(v.body) if v is not None else self.filled(one))
        rows = [*self.rows, *(tuple(self.coef(i)) for i in range(len(self.d.basis)))]
        singles = [*map(g.term, self.single), *(self.filled(repair.simplified(substitute(b, m))) for b in self.d.basis)]
        for p, v in enumerate(self.plain):
            if v is not None and v.kind == "mean":
                w = num(1.0) if v.weight is None else g.term(v.weight)
                j = next((j for j, (t, row) in enumerate(zip(singles, rows)) if t is w and row == ((j, num(1.0)),)), None)
                if j is None:
                    j = len(rows)
                    rows.append(((j, num(1.0)),))
                    singles.append(w)
                self.kinds[p] = ("mean", j)
        self.all_rows = rows
        return Monoid(tuple(k for k in self.kinds if k is not None), tuple(rows)), values + singles

    def filled(self, t: Term) -> Term:
        """Classes put in for their variables."""
        return substitute(t, {var(v): self.finder.g.term(int(v[1:])) for v in variables(t)})

    def vanishes(self, masked: set[int]) -> bool:
        """Does every coefficient that mentions a pivot go to 0 where a masked pivot goes to its identity, so that what
        is masked counts 0?  Then dropping it from a merge is right."""
        from ..reference import evaluate_scalar

        functions = {f"r{p}" for p, v in enumerate(self.plain) if v is None}
        for p in masked:
            v = self.plain[p]
            if v is None or v.kind == "mean":
                return False
            for row in self.all_rows:
                for _, e in row:
                    vs = set(variables(e))
                    if f"r{p}" not in vs:
                        if vs & functions:  # a function of nothing but masked elements is NaN
                            return False
                        continue
                    values = {x: REDUCTIONS[v.kind] if x == f"r{p}" else 0.7 if x[0] == "R" else -0.3 for x in vs}
                    if evaluate_scalar(e, values) != 0.0:
                        return False
        return True


def _folds(n: Node, k: str) -> bool:
    return n.op == "fold" and n.attr[2] == k  # type: ignore[index]


def _reduces(n: Node, k: str) -> bool:
    return n.op in ("red", "fold") and base(n.attr[-1]) == k  # type: ignore[index]


def _rounded(t: Term) -> Term:
    """±1 for a constant within rounding of it: n·(1/n) is 1."""
    if t.op in ("add", "mul"):
        args = [num(float(round(a.attr))) if a.op == "num" and 0 < abs(abs(a.attr) - 1.0) < 1e-12 else a for a in t.args]  # type: ignore[arg-type]
        return nary(t.op, args) if any(a is not b for a, b in zip(args, t.args)) else t
    return t


def _hole(c: int) -> Term:
    return var(f"k{c}")


def reductions_below(g: Graph) -> tuple[dict[int, int], dict[str, int]]:
    """(class → set of the whole axes that some node at or below it reduces over, as bits; axis → its bit); not below views."""
    bits: dict[str, int] = {}
    own = dict.fromkeys(g.nodes, 0)
    for c, n in g.items():
        if n.op in ("red", "fold"):
            own[c] |= bits.setdefault(base(n.attr[-1]), 1 << len(bits))  # type: ignore[index]
    out, changed = own, True
    while changed:
        changed = False
        for c, ns in g.nodes.items():
            new = out[c]
            for n in ns:
                if n.op != "view":
                    for a in n.args:
                        new |= out[a]
            if new != out[c]:
                out[c], changed = new, True
    return out, bits


# What may be a pivot, in the order in which it is tried: a maximum or minimum; besides, functions of components of folds at
# the same pivot; a mean; several of these; any value that is computed from a pivot; and with atoms that an earlier pass
# must supply.
LEVELS = ("extreme", "function", "mean", "several", "other", "later")


def find(g: Graph, done: set[tuple]) -> list[Found]:
    """The folds of the first level that has new ones; `done` remembers what was tried.  Found ones may feed others:
    look again."""
    below, bits = reductions_below(g)
    by_term = {g.term(c): c for c in g.nodes}
    finders = [Finder(g, k, below, bits[k], by_term) for k in axes_of_sums(g)]
    for level in LEVELS:
        found = [f for finder in finders for f in finder.search(level, done)]
        if found:
            return found
    return []
