"""Terms: hash-consed tensor expressions with named, hierarchical axes.

A term has a set of free axes; broadcasting is by name, so no reshape, transpose or broadcast node exists.  An axis is a
string.  Axis "k" may be seen as the pair "k.o" (block) and "k.i" (place in the block): a term that depends on "k"
depends on both, one reduced over "k.i" still depends on "k.o".  Splits nest: "k.i.o".

    op       attr                      args
    num      float                     ()
    input    (name, index)             ()            index: an `Affine` for each dimension of the array
    iota     axis                      ()            the position along the axis, 0 … extent-1
    var      name                      ()            a scalar hole: only in coefficients of monoids and in rules
    add mul  None                      two or more   n-ary sum and product
    un       function name             (x,)          see `UNARY`
    bi       function name             (x, y)        see `BINARY`; comparisons give 0 or 1
    where    None                      (c, x, y)     x where c ≠ 0, else y; what is not chosen does not count, even NaN
    red      (op, axis)                (x,)          op in `REDUCTIONS`
    fold     (monoid, component, axis) singletons    see `Monoid`
    view     index map                 (x,)          x read through ((axis of x, Affine), …): a tensor under other names
    gather   axis                      (x, i)        x at position i along its axis; i's own axes join x's other ones

A read through an index that leaves the array (a `where` may guard it) gives 0; a gather out of range is an error.
Terms compare and hash by identity: equal terms are the same object.  Order of arguments is kept (a+b is not b+a here:
the e-graph identifies them), so that a program means the same text in every process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any
from weakref import WeakValueDictionary

# ------------------------------------------------------------------ axes


def outer(axis: str) -> str:
    return axis + ".o"


def inner(axis: str) -> str:
    return axis + ".i"


def base(axis: str) -> str:
    """The whole axis that a part belongs to: k.i.o → k."""
    return axis.partition(".")[0]


def normalise(axes: Iterable[str]) -> frozenset[str]:
    """The coarsest equal set of axes: {k.o, k.i} is {k}, {k, k.o} is {k}."""
    out = set(axes)
    if not any("." in a for a in out):
        return frozenset(out)
    for a in sorted(out, key=len, reverse=True):
        if a not in out:
            continue
        parent, dot, _ = a.rpartition(".")
        while dot:
            if parent in out:
                out.discard(a)
                break
            if outer(parent) in out and inner(parent) in out:
                out -= {outer(parent), inner(parent)}
                out.add(parent)
                a = parent
                parent, dot, _ = a.rpartition(".")
                continue
            parent, dot, _ = parent.rpartition(".")
    return frozenset(out)


def without(axes: frozenset[str], axis: str) -> frozenset[str]:
    """The axes left after a reduction over `axis` (or a part of one): {k} without k.i is {k.o}."""
    out = {a for a in axes if a != axis and not a.startswith(axis + ".")}
    for a in axes:
        if axis.startswith(a + "."):
            out.discard(a)
            for step in axis[len(a) + 1 :].split("."):
                out.add(a + (".i" if step == "o" else ".o"))
                a += "." + step
    return normalise(out)


def blocks_around(axis: str) -> frozenset[str]:
    """What says how much of a part of an axis exists, the last block being short: k.i → k.o, and k.i.i → k.o and k.i.o."""
    whole, *steps = axis.split(".")
    out = set()
    for step in steps:
        if step == "i":
            out.add(outer(whole))
        whole = f"{whole}.{step}"
    return frozenset(out)


def depends(axes: frozenset[str], axis: str) -> bool:
    """Does a term with these free axes vary along `axis` (or along a part of it)?"""
    return any(a == axis or a.startswith(axis + ".") or axis.startswith(a + ".") for a in axes)


@dataclass(frozen=True)
class Affine:
    """const + Σ coefficient·axis: the index into one dimension of an array."""

    const: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(a for a, _ in self.terms)

    def plus(self, other: Affine, scale: int = 1) -> Affine:
        t = dict(self.terms)
        for a, c in other.terms:
            t[a] = t.get(a, 0) + scale * c
        return Affine(self.const + scale * other.const, tuple((a, c) for a, c in t.items() if c))

    def substitute(self, m: dict[str, Affine]) -> Affine:
        out = Affine(self.const)
        for a, c in self.terms:
            out = out.plus(m.get(a, axis_index(a)), c)
        return out

    def bounds(self, extents: dict[str, int]) -> tuple[int, int]:
        """Smallest and largest value over the axes' ranges."""
        ends = [(0, c * (extents[a] - 1)) for a, c in self.terms]
        return self.const + sum(min(e) for e in ends), self.const + sum(max(e) for e in ends)

    def __str__(self) -> str:
        parts = [a if c == 1 else f"{c}·{a}" for a, c in self.terms] + ([str(self.const)] if self.const or not self.terms else [])
        return "+".join(parts)


def axis_index(axis: str) -> Affine:
    return Affine(0, ((axis, 1),))


Index = tuple[Affine, ...]

# ------------------------------------------------------------------ scalar functions (their NumPy meaning is in reference.py)

UNARY = (
    "neg",
    "recip",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "rsqrt",
    "abs",
    "sign",
    "floor",
    "ceil",
    "round",
    "trunc",
    "tanh",
    "sinh",
    "cosh",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "not",
    "isnan",
    "isinf",
    "isfinite",
)
BINARY = (
    "max",
    "min",
    "lt",
    "le",
    "eq",
    "ne",
    "and",
    "or",
    "pow",
    "floordiv",
    "mod",
    "atan2",
    "hypot",
    "copysign",
    "xor",
)
PREDICATES = frozenset({"lt", "le", "eq", "ne", "and", "or", "xor", "not", "isnan", "isinf", "isfinite"})
REDUCTIONS: dict[str, float] = {"+": 0.0, "*": 1.0, "max": -math.inf, "min": math.inf}  # operator → its identity


# ------------------------------------------------------------------ terms


class Term:
    __slots__ = ("__weakref__", "args", "attr", "free", "op")
    op: str
    attr: Any  # see the table at the head of this module
    args: tuple[Term, ...]
    free: frozenset[str]  # free axes, in coarsest form

    def __repr__(self) -> str:
        return show(self)

    def __copy__(self) -> Term:
        return self

    def __deepcopy__(self, memo: object) -> Term:
        return self

    def __reduce__(self) -> Any:
        return make, (self.op, self.attr, self.args)  # the one term that is equal to it there


_TABLE: WeakValueDictionary[tuple, Term] = WeakValueDictionary()
_LOCK = threading.Lock()


def make(op: str, attr: object = None, args: Iterable[Term] = ()) -> Term:
    """The term with this operator, attribute and arguments."""
    args = tuple(args)
    key = (op, attr.hex() if op == "num" else attr, args)  # type: ignore[attr-defined]   # -0.0 and 0.0 are two constants
    with _LOCK:
        t = _TABLE.get(key)
        if t is None:
            t = object.__new__(Term)
            t.op, t.attr, t.args, t.free = op, attr, args, _free(op, attr, args)
            _TABLE[key] = t
        return t


def _free(op: str, attr: object, args: tuple[Term, ...]) -> frozenset[str]:
    below = normalise(frozenset().union(*[a.free for a in args]))
    match op:
        case "input":
            return normalise(a for ix in attr[1] for a in ix.axes)  # type: ignore[index]
        case "iota":
            return frozenset([attr])  # type: ignore[list-item]
        case "red" | "fold":
            axis: str = attr[-1]  # type: ignore[index]
            return without(below, axis) if depends(below, axis) else normalise(below | blocks_around(axis))
        case "view":
            return view_free(below, attr)  # type: ignore[arg-type]
        case "gather":
            return normalise(without(args[0].free, attr) | args[1].free)  # type: ignore[arg-type]
    return below


def view_free(axes: frozenset[str], index: ViewMap) -> frozenset[str]:
    """Free axes of a view of a term that has `axes`."""
    out = axes
    for a, _ in index:
        out = without(out, a)
    return normalise(out | {b for a, ix in index if depends(axes, a) for b in ix.axes})


ViewMap = tuple[tuple[str, Affine], ...]


def num(v: float) -> Term:
    return make("num", float(v))


def var(name: str) -> Term:
    return make("var", name)


def iota(axis: str) -> Term:
    return make("iota", axis)


def inp(name: str, index: Index) -> Term:
    return make("input", (name, tuple(index)))


def lift(x: Term | float) -> Term:
    return x if isinstance(x, Term) else num(x)


def nary(op: str, xs: Iterable[Term], flatten: bool = False) -> Term:
    """n-ary sum or product; finite constants fold into one, units vanish.  Nesting stays (analyses read it) unless `flatten`."""
    unit = 0.0 if op == "add" else 1.0
    c, rest = unit, []
    for x in xs:
        for y in x.args if flatten and x.op == op else (x,):
            if y.op == "num" and math.isfinite(y.attr):  # type: ignore[arg-type]
                c = c + y.attr if op == "add" else c * y.attr  # type: ignore[operator]
            else:
                rest.append(y)
    if c != unit or not rest:
        rest.append(num(c))
    return rest[0] if len(rest) == 1 else make(op, None, rest)


def add(*xs: Term | float) -> Term:
    return nary("add", map(lift, xs))


def mul(*xs: Term | float) -> Term:
    return nary("mul", map(lift, xs))


def neg(x: Term) -> Term:
    return mul(-1.0, x)


def sub(x: Term | float, y: Term | float) -> Term:
    return add(x, neg(lift(y)))


def un(f: str, x: Term | float) -> Term:
    x = lift(x)
    if f == "neg":
        return neg(x)
    if f == "recip" and x.op == "num" and x.attr != 0:
        return num(1.0 / x.attr)  # type: ignore[operator]
    return make("un", f, (x,))


def div(x: Term | float, y: Term | float) -> Term:
    return mul(x, un("recip", y))


def bi(f: str, x: Term | float, y: Term | float) -> Term:
    return make("bi", f, (lift(x), lift(y)))


def where(c: Term, x: Term | float, y: Term | float) -> Term:
    return make("where", None, (c, lift(x), lift(y)))


def red(op: str, axis: str, x: Term) -> Term:
    return make("red", (op, axis), (x,))


def fold(monoid: Monoid, component: int, axis: str, singletons: Iterable[Term]) -> Term:
    return make("fold", (monoid, component, axis), singletons)


def view(x: Term, index: ViewMap) -> Term:
    return make("view", tuple(index), (x,))


def gather(x: Term, axis: str, i: Term) -> Term:
    return make("gather", axis, (x, i))


def affine_of(t: Term) -> Affine | None:
    """The term as an affine expression of positions with integer coefficients; None if it is none."""
    match t.op:
        case "num":
            return Affine(int(t.attr)) if float(t.attr).is_integer() else None  # type: ignore[arg-type, call-overload]
        case "iota":
            return axis_index(t.attr)  # type: ignore[arg-type]
        case "add":
            out = Affine()
            for a in t.args:
                x = affine_of(a)
                if x is None:
                    return None
                out = out.plus(x)
            return out
        case "mul":
            parts = [p for p in map(affine_of, t.args) if p is not None]
            moving = [p for p in parts if p.terms]
            if len(parts) < len(t.args) or len(moving) > 1:
                return None
            scale: int = math.prod([p.const for p in parts if not p.terms])
            return Affine().plus(moving[0] if moving else Affine(1), scale)
        case "un" if t.attr == "neg":
            x = affine_of(t.args[0])
            return x and Affine().plus(x, -1)
    return None


def is_num(t: Term, v: float | None = None) -> bool:
    return t.op == "num" and (v is None or t.attr == v)


# ------------------------------------------------------------------ walking


def postorder(roots: Iterable[Term], known: Container[Term] = ()) -> Iterator[Term]:
    """Every term below the roots once, arguments first, without those that are known and what only they are made of.  Iterative:
    programs may be thousands of nodes deep."""
    seen: set[Term] = set()
    for r in roots:
        stack: list[Term | None] = [r]  # behind None: a term whose arguments are done
        while stack:
            t = stack.pop()
            if t is None:
                yield stack.pop()  # type: ignore[misc]
            elif t not in seen and t not in known:
                seen.add(t)
                if not t.args:
                    yield t
                    continue
                stack += (t, None)
                for a in reversed(t.args):
                    if a not in seen:
                        stack.append(a)


def rewrite(roots: Iterable[Term], f: Callable[[Term, tuple[Term, ...]], Term | None]) -> list[Term]:
    """Rebuild bottom-up: f(term, new arguments) gives the new term, or None to keep operator and attribute."""
    roots = list(roots)
    out: dict[Term, Term] = {}
    for t in postorder(roots):
        args = tuple(out[a] for a in t.args)
        new = f(t, args)
        out[t] = new if new is not None else (t if args == t.args else make(t.op, t.attr, args))
    return [out[r] for r in roots]


def substitute(t: Term, m: dict[Term, Term]) -> Term:
    """Replace whole subterms (typically variables)."""
    return rewrite([t], lambda x, args: m.get(x))[0]


@lru_cache(1 << 12)  # coefficients of folds are asked for theirs again and again
def variables(t: Term) -> tuple[str, ...]:
    return tuple(x.attr for x in postorder([t]) if x.op == "var")


# ------------------------------------------------------------------ folds: joint monoids with derived merges


@dataclass(frozen=True)
class Monoid:
    """A state (pivots r₀…, linear components x₀…) with an associative merge.

    Merging moves each side from its own pivots r to the merged pivots R by  xᵢ(R) = Σⱼ coef[i][j](r, R)·xⱼ(r)  and adds.
    pivots[p] is "max" or "min"; ("mean", j): the mean weighted by the counts in linear component j; ("fn", e): the value of
    the term e over variables y0, y1 … (the linear components at the merged state); or ("at", q, op, nans): a payload, op ("max"
    or "min") over the elements that attain the max or min pivot q < p (and, if nans, those that make it NaN).  coef[i] is a
    tuple of (j, term) whose term has the variables r0… (old pivots) and R0… (new pivots).  A side whose max/min pivot is the identity (−inf, inf) is empty
    and contributes 0, never NaN.
    """

    pivots: tuple[str | tuple, ...]
    coef: tuple[tuple[tuple[int, Term], ...], ...]

    @property
    def size(self) -> int:
        return len(self.pivots) + len(self.coef)

    def __str__(self) -> str:
        ps = ", ".join(f"r{i}: {p if isinstance(p, str) else f'{p[0]}({p[1]})'}" for i, p in enumerate(self.pivots))
        xs = "; ".join(f"x{i}(R) = " + " + ".join(f"{e}·x{j}" for j, e in row) for i, row in enumerate(self.coef))
        return f"⟨{ps} | {xs}⟩"

    def needed(self, component: int, zero: Callable[[int], bool] = lambda j: False) -> tuple[list[int], list[int]]:
        """(pivots, linear components) that a fold must carry to give `component`.  zero(j): is singleton xⱼ identically 0?"""
        key = component, tuple(map(zero, range(len(self.coef))))
        if key not in self._needed:
            self._needed[key] = self._reached(component, zero)
        pivots, comps = self._needed[key]
        return list(pivots), list(comps)

    @cached_property
    def _needed(self) -> dict[tuple[int, tuple[bool, ...]], tuple[list[int], list[int]]]:
        return {}

    def _reached(self, component: int, zero: Callable[[int], bool]) -> tuple[list[int], list[int]]:
        n = len(self.pivots)
        pivots: set[int] = set()
        comps: set[int] = set()
        todo: list[tuple[str, int]] = [("p", component) if component < n else ("x", component - n)]
        while todo:
            kind, i = todo.pop()
            if (i in pivots) if kind == "p" else (i in comps):
                continue
            if kind == "p":
                pivots.add(i)
                p = self.pivots[i]
                if isinstance(p, tuple):
                    todo += (
                        [("x", int(v[1:])) for v in variables(p[1])] if p[0] == "fn" else [("p" if p[0] == "at" else "x", p[1])]
                    )
                continue
            comps.add(i)
            for j, e in self.coef[i]:
                if j != i and zero(j) and not self._fed(j, zero):
                    continue
                todo.append(("x", j))
                todo += [("p", int(v[1:])) for v in variables(e)]
        return sorted(pivots), sorted(comps)

    def _fed(self, j: int, zero: Callable[[int], bool]) -> bool:
        """Does component j, itself 0 on every element, receive anything from another one that is not?"""
        return any(i != j and not zero(i) for i, _ in self.coef[j])


# ------------------------------------------------------------------ printing

_REDUCE_SIGN = {"+": "Σ", "*": "Π", "max": "max", "min": "min"}


def _open(t: Term) -> bool:
    """Would a factor written after t be read as part of it?  Σ x·y means Σ (x·y)."""
    return t.op == "red" or (t.op == "mul" and _open(t.args[-1]))


def show(t: Term, depth: int = 12) -> str:
    """Mathematical notation, cut at `depth`."""
    if depth == 0:
        return "…"
    a = [show(x, depth - 1) for x in t.args]
    match t.op:
        case "num":
            return f"{t.attr:.6g}"
        case "input":
            name, index = t.attr  # type: ignore[misc]
            return f"{name}[{', '.join(map(str, index))}]" if index else name
        case "iota":
            return f"#{t.attr}"
        case "var":
            return str(t.attr)
        case "add":
            return "(" + " + ".join(a) + ")"
        case "mul":
            return "·".join([*(f"({s})" if _open(x) else s for s, x in zip(a[:-1], t.args)), a[-1]])
        case "un":
            return f"{t.attr}({a[0]})"
        case "bi":
            return f"{t.attr}({a[0]}, {a[1]})"
        case "where":
            return f"where({', '.join(a)})"
        case "red":
            op, axis = t.attr  # type: ignore[misc]
            return f"{_REDUCE_SIGN[op]}[{axis}] {a[0]}"
        case "fold":
            h, c, axis = t.attr  # type: ignore[misc]
            return f"fold[{axis}].{c}⟨{'|'.join(str(p if isinstance(p, str) else p[0]) for p in h.pivots)}⟩({', '.join(a)})"
        case "view":
            return f"{a[0]}{{{', '.join(f'{x}→{i}' for x, i in t.attr)}}}"  # type: ignore[attr-defined]
        case "gather":
            return f"{a[0]}[{t.attr}={a[1]}]"
    return f"{t.op}({', '.join(a)})"
