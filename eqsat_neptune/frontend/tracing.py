"""What a traced function has made so far: its axes, and what terms over them may be read under other names."""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextvars import ContextVar

from ..errors import TraceError
from ..terms import (
    PREDICATES,
    Affine,
    Index,
    Term,
    add,
    axis_index,
    bi,
    gather,
    inp,
    iota,
    make,
    mul,
    num,
    postorder,
    view,
)
from .axes import AxisTable
from .tensor import Tensor
from .wide import WIDE

Number = bool | int | float
Map = dict[str, Affine]
BINDERS = frozenset({"red", "fold", "view", "gather"})
_UNBOUNDED = (-math.inf, math.inf)


class Trace:
    """What is known while one function is traced: the axes, and which of them each term depends on."""

    def __init__(self) -> None:
        self.axes = AxisTable()
        self.ranges: dict[str, tuple[float, float]] = {}                        # of inputs whose values are bounded
        self.wide: set[Term] = set()                                            # sums of what the source has in float32 or float64
        # free axes of a term, and those of them that lie below a reduction, view or gather, under their provisional names; how many of
        # these lie in each other
        self._info: dict[Term, tuple[tuple[str, ...], tuple[str, ...], int]] = {}

    def _known(self, term: Term) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        stack = [term]
        while stack:
            t = stack[-1]
            if t in self._info:
                stack.pop()
                continue
            if t.op == "input":
                own = tuple(dict.fromkeys(a for ix in _read_of(t)[1] for a in ix.axes))
                self._info[t] = own, (), 0
            elif t.op == "iota":
                self._info[t] = (t.attr,), (), 0                                # type: ignore[assignment]
            elif missing := [a for a in t.args if a not in self._info]:
                stack.extend(missing)
            else:
                below = [self._info[a] for a in t.args]
                free = dict.fromkeys(a for own, _, _ in below for a in own)
                locked = dict.fromkeys(a for _, own, _ in below for a in own)
                self._info[t] = tuple(free), tuple(locked), max((depth for _, _, depth in below), default=0)
        return self._info[term]

    def free(self, term: Term) -> frozenset[str]:
        """The live axes that a term varies along."""
        return frozenset(self.axes.resolve(self._known(term)[0]))

    def locked(self, term: Term) -> frozenset[str]:
        """Those that it cannot be read along under another name without a view."""
        return frozenset(self.axes.resolve(self._known(term)[1]))

    def depth(self, term: Term) -> int:
        """How many reductions, views and gathers lie in each other in a term."""
        return self._known(term)[2]

    def bound(self, term: Term, free: Iterable[str]) -> Term:
        """Register a term whose operator binds axes."""
        if term.op in BINDERS:
            names = tuple(sorted(free, key=self.axes.age))
            self._info[term] = names, names, 1 + max(self.depth(a) for a in term.args)
        return term

    def summed(self, op: str, term: Term, dtype: str) -> None:
        """Note a reduction of what has this dtype, if it is a sum that is wide."""
        if op == "+" and term.op == "red" and dtype in WIDE:
            self.wide.add(term)

    def reindex(self, term: Term, m: Map) -> Term:
        """The term read at m[a] in place of each live axis a.  Where that leaves an axis' range the value is unspecified."""
        free = self.free(term)
        m = {a: m[a] for a in sorted(m, key=self.axes.age) if a in free and m[a] != axis_index(a)}
        if not m:
            return term
        after = (free - m.keys()) | {b for e in m.values() for b in e.axes}
        self.axes.apart(after)
        if not self.locked(term) & m.keys():
            return self._push(term, m)
        if term.op == "view":                               # a view of a view is one view
            first = {a: self.axes.resolved(e) for a, e in term.attr}            # type: ignore[attr-defined]
            source = term.args[0]
            mapped = set(self.axes.resolve(first))
            m = {a: e.substitute(m) for a, e in first.items()} | {a: e for a, e in m.items() if a in self.free(source) - mapped}
            term = source
        for a, e in m.items():                              # else the view could not be moved into the reduction
            for x in self._reduced(term, a).difference(e.axes):
                for b in e.axes:
                    self.axes.apart((b, x))
        return self.bound(view(term, tuple(m.items())), after)

    def _reduced(self, term: Term, axis: str) -> set[str]:
        """What is reduced to make a term vary along an axis: the live axes of the reductions through which the axis goes.  Not behind
        tensors that are only renamed: a view that would be moved into those stays there."""
        out: set[str] = set()
        stack = [(term, axis)]
        seen = set(stack)
        while stack:
            t, a = stack.pop()
            if t.op in ("red", "fold"):
                out.update(self.axes.resolve((t.attr[-1],)))                    # type: ignore[index]
            below = [(x, a) for x in t.args]
            if t.op == "view":
                own = {k: self.axes.resolved(e) for k, e in t.attr}             # type: ignore[attr-defined]
                below = [] if a in self.axes.resolve(own) else below
                for b, e in own.items():
                    parts = self.axes.resolve((b,))
                    renamed = e == axis_index(a) and self.axes.size(parts) == self.axes.extent[a]
                    below += [(t.args[0], k) for k in parts if a in e.axes and not renamed]
            for x, b in below:
                if (x, b) not in seen and b in self.locked(x):
                    seen.add((x, b))
                    stack.append((x, b))
        return out

    def _push(self, term: Term, m: Map) -> Term:
        """Substitute at the leaves.  The term is elementwise in the axes of m."""
        out: dict[Term, Term] = {}
        stack = [term]
        while stack:
            t = stack[-1]
            if t in out:
                stack.pop()
            elif not self.free(t) & m.keys():
                out[t] = t
            elif t.op == "input":
                name, index = _read_of(t)
                out[t] = inp(name, tuple(self.axes.resolved(ix).substitute(m) for ix in index))
            elif t.op == "iota":
                out[t] = affine_term(self.axes.resolved(axis_index(t.attr)).substitute(m))      # type: ignore[arg-type]
            elif missing := [a for a in t.args if a not in out]:
                stack.extend(missing)
            else:
                out[t] = make(t.op, t.attr, [out[a] for a in t.args])
        return out[term]

    def read_linear(self, term: Term, axes: Sequence[str], e: Affine, m: Map) -> Term:
        """Read the dimension that `axes` form at index e: by adding to m what `reindex` is to do later, where the index of each
        axis is affine, else at once by gathers (div and mod of the position)."""
        sizes = tuple(self.axes.extent[a] for a in axes)
        if (digits := self.axes.digits_by_splitting(e, sizes)) is not None:
            m.update(zip(axes, digits))
            return term
        low, high = e.bounds(self.axes.extent)
        position, last = affine_term(e), math.prod(sizes) - 1
        position = bi("max", position, 0.0) if low < 0 else position            # a gather must not leave the dimension
        return self.gather_linear(term, axes, bi("min", position, last) if high > last else position)

    def gather_linear(self, term: Term, axes: Sequence[str], position: Term) -> Term:
        """Read the dimension that `axes` form at a computed position, whose own axes the term does not have."""
        for i, a in reversed(list(enumerate(axes))):
            n = self.axes.extent[a]
            here = position if i == 0 else bi("mod", position, num(n))
            position = bi("floordiv", position, num(n))
            free = self.free(term)
            if a not in free:
                continue
            own = self.free(here)
            self.axes.apart(free | own)
            term = self.bound(gather(term, a, here), (free - {a}) | own)
        return term

    def lower_bound(self, term: Term) -> float:
        """A number that the term is never below: enough to see that an index is not negative."""
        low: dict[Term, float] = {}
        for t in postorder([term]):
            a = [low[x] for x in t.args]
            match t.op:
                case "num":
                    low[t] = t.attr                                             # type: ignore[assignment]
                case "input":
                    low[t] = self.ranges.get(_read_of(t)[0], _UNBOUNDED)[0]
                case "iota":
                    low[t] = 0
                case "add":
                    low[t] = math.fsum(a) if -math.inf not in a else -math.inf
                case "mul" | "fold":
                    low[t] = 0 if a and min(a) >= 0 else -math.inf
                case "where":
                    low[t] = min(a[1:])
                case "red":
                    low[t] = a[0] if t.attr[0] in ("max", "min") or a[0] >= 0 else -math.inf    # type: ignore[index]
                case "bi":
                    if t.attr in ("max", "min"):
                        low[t] = max(a) if t.attr == "max" else min(a)
                    else:
                        positive = {"floordiv": min(a) >= 0, "mod": a[1] >= 0, "hypot": True}
                        low[t] = 0 if t.attr in PREDICATES or positive.get(t.attr) else -math.inf       # type: ignore[call-overload]
                case "un" if t.attr in ("floor", "ceil", "round", "trunc", "sign", "tanh", "expm1", "log1p", "erf"):
                    low[t] = 0 if a[0] >= 0 else -math.inf
                case "un":
                    low[t] = 0 if t.attr in PREDICATES or t.attr in ("abs", "exp", "exp2", "sqrt") else -math.inf
                case "view":
                    low[t] = min(a[0], 0)
                case "gather":
                    low[t] = a[0]
                case _:
                    low[t] = -math.inf
        return low[term]

    # -------------------------------------------------------------- tensors

    def tensor(self, term: Term, dims: Iterable[Sequence[str]], dtype: str) -> Tensor:
        own = tuple(tuple(d) for d in dims)
        self.axes.apart(self.axes.resolve(a for d in own for a in d))
        return Tensor(self, term, own, dtype)

    def empty(self, shape: Iterable[int], dtype: str) -> Tensor:
        """A tensor without elements: its term does not matter."""
        return self.tensor(num(0.0), [self.axes.fresh(n) for n in shape], dtype)

    def constant(self, value: Number, dtype: str) -> Tensor:
        return self.tensor(num(value), (), dtype)

    def positions(self, axes: Sequence[str]) -> Term:
        """The position along the dimension that these live axes form."""
        return affine_term(self.axes.linear(axes))


_CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


def current() -> Trace:
    trace = _CURRENT.get()
    if trace is None:
        raise TraceError("xp works on traced tensors only", "call it inside a function given to trace() or optimize()")
    return trace


def _read_of(t: Term) -> tuple[str, Index]:
    return t.attr                                                               # type: ignore[return-value]


def affine_term(e: Affine) -> Term:
    return add(*[mul(iota(a), float(c)) for a, c in e.terms], float(e.const))
