"""Cutting a large program into regions that are searched one by one, so that the search grows linearly with the program.

A cut is forced where every sensible plan has one: at the result of a product of matrices that feeds another product which would
need it again and again, when storing it costs little beside computing it.  Programs on small tensors have no such place and are one
region, however long: `Pieces` has the places where few values go from one product to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from ..cost_models.base import CostModel, Work
from ..graph import Node
from .classes import ELEMENTWISE, Classes

WIDE = 1024  # elements along new axes that no block holds beside each other
WORTH = 2.5  # a cut is forced where recomputing takes this many times as long as storing and reading
LARGEST = 400  # classes of the source in a region made of several roots
WAIST = 3  # values that go from one piece to the next: what goes from layer to layer, what all of them need, and what skips some


@dataclass
class Cone:
    """What a region may use: its roots, the usable nodes of its classes, and the classes that other regions have stored."""

    roots: tuple[int, ...]
    nodes: dict[int, list[Node]]
    leaves: frozenset[int]


def forced_cuts(cl: Classes, model: CostModel) -> frozenset[int]:
    """Classes that every plan stores because that is cheaper, or because they are gathered from."""
    out = {n.args[0] for n in cl.source.values() if n.op == "gather" and not cl.is_input(n.args[0])}
    base = model.floor(Work())
    below: dict[int, frozenset[int]] = {}  # products to be computed again with a class
    for c in cl.source_order:
        n = cl.source[c]
        own = frozenset([c]) if cl.flops(c) else frozenset()
        below[c] = own.union(*[frozenset() if a in out else below[a] for a in n.args])
        if c in out or not below[c] or cl.is_input(c):
            continue
        again = model.floor(Work(tensor=sum(cl.flops(x) for x in below[c]))) - base
        if again > WORTH * (model.floor(Work(bytes=2.0 * cl.bytes(c)))) and _widest_use(cl, c, out) >= WIDE:
            out.add(_top_of_chain(cl, c))
    return frozenset(out)


@dataclass(frozen=True)
class Place:
    """A place in the order of the source, where it might be cut.

    last      the class before it
    values    what has been computed by then, is stored by nobody, and is needed later
    products  how many have been computed by then
    narrow    are the values few, as small as what the program is given or gives, and read as they are?
    """

    last: int
    values: frozenset[int]
    products: int
    narrow: bool


def _places(cl: Classes, order: Sequence[int], stored: Set[int]) -> Iterator[Place]:
    """The place behind each class of a part of the source that is not there without a reduction."""
    place = {c: i for i, c in enumerate(order)}
    last = {_before_views(cl, a): place[c] for c in order if cl.source[c].op != "view" for a in cl.source[c].args}
    most = max(map(cl.elements, [*cl.outputs, *(c for c in cl.source_order if cl.is_input(c))]))
    given: set[int] = set()
    alive: set[int] = set()
    products = 0
    for c in order:
        n = cl.source[c]
        there = all(a in given or a not in place for a in n.args)
        if cl.is_input(c) or cl.is_trivial(c) or (n.op in (*ELEMENTWISE, "view") and there):
            given.add(c)
        if c in given or n.op == "view":
            continue
        products += cl.flops(c) > 0
        alive = {x for x in {*alive, c} if last.get(x, 0) > place[c] and x not in stored}
        narrow = len(alive) <= WAIST and all(cl.elements(x) <= most and cl.readable(x) for x in alive)
        yield Place(c, frozenset(alive), products, narrow)


def _deepest_first(cl: Classes, roots: Sequence[int], within: Set[int]) -> list[int]:
    """Classes of a part of the source, arguments first, and those first that take most steps: what is made of inputs alone comes where it
    is needed, so that little lies between the steps of a recurrence."""
    steps: dict[int, int] = {}
    for c in cl.source_order:
        steps[c] = max((steps[a] for a in cl.source[c].args), default=0) + (cl.source[c].op in ("red", "fold"))
    out: dict[int, None] = {}
    stack = [(c, False) for c in reversed(roots)]
    while stack:
        c, done = stack.pop()
        if done:
            out[c] = None
        elif c in within and c not in out:
            stack.append((c, True))
            stack.extend((a, False) for a in sorted(reversed(cl.source[c].args), key=steps.__getitem__))
    return list(out)


class Pieces:
    """A region as a sequence of pieces, of a product each where few values go from one to the next, and those between two of them as
    regions of their own.

    products  how many there are up to the end of each piece
    flops     of all products
    """

    def __init__(self, cl: Classes, cuts: frozenset[int], alone: frozenset[int], cone: Cone):
        self._cl, self._cuts, self._alone, self._cone = cl, cuts, alone, cone
        self._order = _deepest_first(cl, cone.roots, _inside(cl, cone.roots, cuts).keys())
        self._kept = frozenset(r for r in cone.roots if cl.readable(r))  # stored anyway, and there for what comes later
        best: dict[int, Place] = {}
        products = 0
        for p in _places(cl, self._order, self._kept):
            products = p.products
            if p.narrow and products and (products not in best or len(p.values) < len(best[products].values)):
                best[products] = p
        best.pop(products, None)
        self.flops = sum(map(cl.flops, self._order))
        self._at = {c: i for i, c in enumerate(self._order)}
        self._places = list(best.values())
        self.products = [p.products for p in self._places] + [products]

    def __len__(self) -> int:
        return len(self._places) + 1

    def between(self, first: int, end: int) -> list[Cone]:
        """The pieces from the first on up to that before the end, as one region if they are connected."""
        start, stop = self._behind(first), self._behind(end)
        last = self._places[end - 1].values if end < len(self) else frozenset()
        roots = [c for c in self._order[start:stop] if c in last or c in self._cone.roots]
        before = {r for r in self._kept if self._at[r] < start} | (self._places[first - 1].values if first else frozenset())
        return regions(self._cl, self._cuts | before, self._alone, roots)

    def _behind(self, piece: int) -> int:
        """Classes before a piece."""
        return 0 if piece == 0 else len(self._order) if piece == len(self) else self._at[self._places[piece - 1].last] + 1


def _widest_use(cl: Classes, c: int, cuts: set[int]) -> int:
    """Largest number of elements along axes that a product has and this factor of it has not, over products that c reaches
    without passing another one."""
    best, seen, stack = 1, set(), [c]
    while stack:
        x = stack.pop()
        for u in cl.consumers.get(x, ()):
            if u in seen:
                continue
            seen.add(u)
            product = next((r for r in _summed(cl, u) if cl.flops(r)), None)
            if product is not None:
                new = 1
                for a in cl.graph.free[product] - cl.graph.free[x]:
                    new *= cl.program.axes.get(a, 1)
                best = max(best, new)
            elif u not in cuts:
                stack.append(u)
    return best


def _summed(cl: Classes, c: int) -> list[int]:
    """Sums right above a product of tensors."""
    if cl.source[c].op != "mul":
        return []
    out, stack = [], [c]
    while stack:
        for u in cl.consumers.get(stack.pop(), ()):
            if cl.source[u].op == "red":
                out.append(u)
                stack.append(u)
    return out


def _top_of_chain(cl: Classes, c: int) -> int:
    """The last elementwise operation through which everything made of c goes, if all up to it keep c's shape: they belong to the
    kernel that makes c."""
    place = {x: i for i, x in enumerate(cl.source_order)}
    inside, open_, top = {c}, {c}, c
    while True:
        if len(open_) == 1:
            top = next(iter(open_))
        if any(x in cl.outputs for x in open_):
            return _before_views(cl, top)
        users = {u for x in open_ for u in cl.consumers.get(x, ()) if u not in inside}
        if not users:
            return _before_views(cl, top)
        u = min(users, key=place.__getitem__)
        n = cl.source[u]
        renames = n.op == "view" and all(not ix.const and len(ix.terms) == 1 and ix.terms[0][1] == 1 for _, ix in n.attr)  # type: ignore[attr-defined]
        if not (renames or (n.op in ELEMENTWISE and cl.elements(u) == cl.elements(c) and not _summed(cl, u))):
            return _before_views(cl, top)
        inside.add(u)
        open_.add(u)
        open_ = {x for x in open_ if any(y not in inside for y in cl.consumers.get(x, ())) or x == u}


def _before_views(cl: Classes, c: int) -> int:
    while cl.source[c].op == "view":
        c = cl.source[c].args[0]
    return c


def regions(
    cl: Classes, cuts: frozenset[int], alone: frozenset[int] = frozenset(), roots: Sequence[int] | None = None
) -> list[Cone]:
    """Regions in an order in which they can run.  alone: cuts that are regions of their own, so that all others read them.  roots: what
    these regions store (None: the cuts and the outputs)."""
    if roots is None:
        roots = [c for c in cl.source_order if c in cuts or c in cl.outputs]
    inside = {r: _inside(cl, [r], cuts) for r in roots}
    group = _merge(cl, roots, inside, alone)
    below = _Leaves(cl, cuts)
    bits = below.bits
    out = []
    for members in group:
        allowed = 0
        for r in members:
            for c in inside[r]:
                allowed |= bits[c] if cl.is_input(c) else 0
                for a in (c, *cl.source[c].args):
                    allowed |= bits[a] if a in cuts else 0
        out.append(_cone(cl, tuple(members), cuts, below, allowed))
    return out


def _inside(cl: Classes, roots: Sequence[int], cuts: frozenset[int]) -> dict[int, None]:
    """Classes of the roots' cone in the source, without other cuts."""
    seen: dict[int, None] = {}
    stack = list(roots)
    while stack:
        c = stack.pop()
        if c not in seen and (c in roots or c not in cuts):
            seen[c] = None
            stack.extend(cl.source[c].args)
    return seen


def _merge(cl: Classes, roots: Sequence[int], inside: dict[int, dict[int, None]], alone: frozenset[int]) -> list[list[int]]:
    """Roots that share a reduction inside, or read parts of one tensor that a rule has made, or lie in each other's cones, belong to one
    region, as long as it stays small."""
    group: dict[int, list[int]] = {r: [r] for r in roots}
    holders: dict[int, list[int]] = {}
    for r in (r for r in roots if r not in alone):
        for c in inside[r]:
            if cl.source[c].op in ("red", "fold") or (c in inside and c != r):
                holders.setdefault(c, []).append(r)
            for w in cl.wholes.get(c, ()):
                holders.setdefault(w, []).append(r)
    for c, rs in holders.items():
        for r in rs if c not in inside else [*rs, c]:
            a, b = group[rs[0]], group[r]
            if a is not b and len(set().union(*[inside[x] for x in (*a, *b)])) <= LARGEST:
                a.extend(b)
                for x in b:
                    group[x] = a
    unique = {id(g): g for g in (group[r] for r in roots)}
    return _ordered(cl, list(unique.values()), inside)


def _ordered(cl: Classes, groups: list[list[int]], inside: dict[int, dict[int, None]]) -> list[list[int]]:
    """Groups so that each comes after those whose roots it reads; groups that would wait for each other are taken apart."""
    place = {c: i for i, c in enumerate(cl.source_order)}
    of = {r: i for i, g in enumerate(groups) for r in g}
    needs = [
        {of[a] for r in g for c in inside[r] for a in cl.source[c].args if a in of and of[a] != i} for i, g in enumerate(groups)
    ]
    out: list[list[int]] = []
    done: set[int] = set()
    while len(done) < len(groups):
        ready = [i for i in range(len(groups)) if i not in done and needs[i] <= done]
        if not ready:
            return [[r] for r in sorted(of, key=place.__getitem__)]
        done.update(ready)
        out += [sorted(groups[i], key=place.__getitem__) for i in ready]
    return out


class _Leaves:
    """class → inputs and cuts that its term in the source reads (else its smallest one), as bits."""

    def __init__(self, cl: Classes, cuts: frozenset[int]):
        self._cl, self._cuts = cl, cuts
        self.bits = {c: 1 << i for i, c in enumerate(sorted(c for c in cl.nodes if cl.is_input(c) or c in cuts))}
        self._known: dict[int, int] = {}

    def __getitem__(self, c: int) -> int:
        cl, known = self._cl, self._known
        stack = [c]
        while stack:
            x = stack[-1]
            args = (cl.source[x] if x in cl.source else cl.least[x][1]).args
            missing = [a for a in args if a not in self._cuts and a not in known]
            if missing:
                stack += missing
                continue
            known[x] = self.bits[x] if cl.is_input(x) else 0
            for a in args:
                known[x] |= self.bits[a] if a in self._cuts else known[a]
            stack.pop()
        return known[c]


def _cone(cl: Classes, roots: tuple[int, ...], cuts: frozenset[int], below: _Leaves, allowed: int) -> Cone:
    from .legality import usable

    nodes: dict[int, list[Node]] = {}
    leaves: set[int] = set()
    stack = list(roots)
    while stack:
        c = stack.pop()
        if c in nodes:
            continue
        if c in cuts and c not in roots:
            leaves.add(c)
            nodes[c] = [Node("stored", c)]
            continue
        fine = [
            n
            for n in cl.nodes[c]
            if not any((below.bits[a] if a in cuts and a not in roots else below[a]) & ~allowed for a in n.args)
        ]
        nodes[c] = fine
        stack.extend(a for n in fine for a in n.args)
    kept = usable(nodes, roots)
    return Cone(roots, kept, frozenset(c for c in leaves if c in kept))
