"""From a body to the terms that a kernel stores, under canonical names or the program's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .. import terms as T
from ..terms import Affine, Term
from .bodies import Bodies, State
from .plan import Buffer, Store
from .region import Memory, Region


@dataclass
class Names:
    """How a region's classes, axes and arrays are called: canonically in the search, by their real names in the plan."""

    axis: Callable[[str], str]
    array: Callable[[str], str]
    memory: Callable[[int], Memory]  # where a class lies that a kernel of this region stores


def rename(ix: Affine, axis: Callable[[str], str]) -> Affine:
    return Affine(ix.const, tuple((axis(a), k) for a, k in ix.terms))


class Terms:
    """The term of a class in a body."""

    def __init__(self, bodies: Bodies, state: State, names: Names):
        self.b, self.s, self.n = bodies, state, names
        self.r: Region = bodies.r
        self.memo: dict[int, Term] = {}

    def of(self, c: int) -> Term:
        """(Iterative: kernels may be chains of thousands of operations.)"""
        todo = [c]
        while todo:
            x = todo[-1]
            if x not in self.memo:
                o = self.b.choice(self.s, x)
                if missing := [y for y in (o.children if o is not None else ()) if y not in self.memo]:
                    todo.extend(reversed(missing))
                    continue
                self.memo[x] = self.narrowed(x)
            todo.pop()
        return self.memo[c]

    def narrowed(self, c: int) -> Term:
        """Free of the axes that its class is free of: x·(y/x) is the same at every position of x, and the first one will do."""
        t, own = self.compute(c), frozenset(map(self.n.axis, self.r.free[c]))
        extra = [a for a in t.free - own if not T.depends(own, a)]
        if not extra or any(x.op in ("red", "fold") and T.depends(frozenset(extra), x.attr[-1]) for x in T.postorder([t])):  # type: ignore[index]
            return t
        first = {a: Affine() for a in extra}

        def at(x: Term, args: tuple[Term, ...]) -> Term | None:
            if x.op == "iota":
                return T.num(0.0) if x.attr in first else None
            if x.op == "input":
                name, index = x.attr  # type: ignore[misc]
                return T.inp(name, tuple(ix.substitute(first) for ix in index))
            return None

        return T.rewrite([t], at)[0]

    def read(self, c: int, index: dict[str, Affine] | None = None) -> Term:
        """A stored class.  An output may hold it several times, along axes that the class lacks: the first copy is read."""
        m = self.n.memory(c)
        own = {self.n.axis(a) for a in self.r.free[c]}
        first = {a: Affine() for ix in m.index for a in ix.axes if T.base(a) not in map(T.base, own)}
        return T.inp(m.name, tuple(ix.substitute({**first, **(index or {})}) for ix in m.index))

    def compute(self, c: int) -> Term:
        o = self.b.choice(self.s, c)
        axis = self.n.axis
        if o is None:
            return self.read(c)
        n = o.node
        assert n is not None
        match o.kind:
            case "view":
                x = n.args[0]
                m = {axis(a): rename(ix, axis) for a, ix in n.attr}  # type: ignore[attr-defined]
                own = self.r.input_of(x)
                if own is not None:
                    name, index = own.attr  # type: ignore[misc]
                    return T.inp(self.n.array(name), tuple(rename(ix, axis).substitute(m) for ix in index))
                return self.read(x, m)
            case "inline":
                return self.inline(n.args[0], {axis(a): rename(ix, axis) for a, ix in n.attr})  # type: ignore[attr-defined]
        match n.op:
            case "input":
                name, index = n.attr  # type: ignore[misc]
                return T.inp(self.n.array(name), tuple(rename(ix, axis) for ix in index))
            case "stored":
                return self.read(c)
            case "iota":
                return T.iota(axis(n.attr))  # type: ignore[arg-type]
            case "gather":
                x, i = n.args
                own = self.r.input_of(x)
                if own is not None:
                    name, index = own.attr  # type: ignore[misc]
                    src = T.inp(self.n.array(name), tuple(rename(ix, axis) for ix in index))
                else:
                    src = self.read(x)
                return T.gather(src, axis(n.attr), self.of(i))  # type: ignore[arg-type]
            case "red":
                op, a = n.attr  # type: ignore[misc]
                if o.product is not None:
                    return T.red(op, axis(a), T.make("mul", None, [self.of(x) for x in o.product.args]))
                return T.red(op, axis(a), self.of(n.args[0]))
            case "fold":
                h, comp, a = n.attr  # type: ignore[misc]
                zero = self.b.zero
                needed, products = set(o.children), dict(o.products)
                args = [
                    T.make("mul", None, [self.of(y) for y in products[x].args])
                    if x in products
                    else self.of(x)
                    if x in needed
                    else T.num(0.0)
                    if zero[x]
                    else self.filler(x, self.r.free[c] | {a})
                    for x in n.args
                ]
                return T.fold(h, comp, axis(a), args)
        return T.make(n.op, n.attr, [self.of(x) for x in n.args])

    def filler(self, c: int, free: frozenset[str]) -> Term:
        """A singleton that the component does not need: any term will do.  That which other components of the fold have is best, for they
        have the pivots in common then; but not if the component would seem to depend on axes that it does not have."""
        for n in self.r.nodes[c]:
            if n.op == "num":
                return T.make("num", n.attr)
        t = self.memo.get(c)
        own = frozenset(map(self.n.axis, free))
        return t if t is not None and T.normalise(own | t.free) == T.normalise(own) else T.num(1.0)

    def inline(self, x: int, index: dict[str, Affine]) -> Term:
        """The operand of a view computed at other positions; 0 where they leave its extent."""

        def at(t: Term, args: tuple[Term, ...]) -> Term | None:
            match t.op:
                case "red" | "fold":
                    assert t.attr[-1] not in index, f"{t} reduces over an axis of the view of it"  # type: ignore[index]
                case "input":
                    name, ix = t.attr  # type: ignore[misc]
                    return T.inp(name, tuple(i.substitute(index) for i in ix))
                case "iota":
                    return position(index[t.attr]) if t.attr in index else None  # type: ignore[index]
                case "gather" if guards and args[1] is not t.args[1]:
                    # where the view leaves the extent its operand has no positions, and the gather is not to take them for wrong
                    return T.gather(args[0], t.attr, T.where(inside, args[1], 0.0))  # type: ignore[arg-type]
            return None

        guards = []
        for a, ix in index.items():
            lo, hi = ix.bounds(self.real_extents)
            if lo < 0:
                guards.append(T.bi("le", 0.0, position(ix)))
            if hi >= self.real_extents[a]:
                guards.append(T.bi("lt", position(ix), float(self.real_extents[a])))
        inside = functools.reduce(lambda g, h: T.bi("and", g, h), guards) if guards else T.num(1.0)
        out = T.rewrite([self.of(x)], at)[0]
        return T.where(inside, out, 0.0) if guards else out

    @property
    def real_extents(self) -> dict[str, int]:
        return {self.n.axis(a): n for a, n in self.r.extents.items()}


def position(ix: Affine) -> Term:
    parts: list[Term | float] = [T.iota(a) if k == 1 else T.mul(T.iota(a), float(k)) for a, k in ix.terms]
    if ix.const or not parts:
        parts.append(float(ix.const))
    return T.add(*parts)


def stores_of(
    region: Region, roots: tuple[int, ...], bodies: Bodies, state: State, names: Names
) -> tuple[tuple[Store, ...], dict[str, Buffer]]:
    """What the kernel writes, and every array that it may touch (shapes of split ones are stand-ins)."""
    terms = Terms(bodies, state, names)
    stores: list[Store] = []
    buffers: dict[str, Buffer] = {}
    for r in roots:
        term = terms.of(r)
        for m in region.outputs.get(r) or (names.memory(r),):
            stores.append(Store(m.name, term, m.index))
            buffers[m.name] = Buffer(m.name, m.shape, m.dtype, "output" if r in region.outputs else "temp", known=m.known)
    for m in region.inputs.values():
        buffers[m.name] = Buffer(m.name, m.shape, m.dtype, "input", known=m.known)
    for c in range(len(region.nodes)):
        if region.stored(c) is not None or state.leaves >> c & 1:
            m = names.memory(c)
            buffers.setdefault(m.name, Buffer(m.name, m.shape, m.dtype, "temp", known=m.known))
    return tuple(stores), buffers
