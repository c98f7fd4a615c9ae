"""Slices of computed tensors, moved to what they are computed from where that costs nothing.

    (x @ w)[:, :n]  →  x @ w[:, :n]

is free if no other use needs those elements, and then nothing wider is ever in memory.  It is done for a term all of whose uses
are slices that do not overlap; a term that is used under another name as a whole (a rename) stays one term with views of it.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ..terms import Affine, Term, ViewMap, add, axis_index, inp, iota, make, mul, postorder, view


def sink_slices(roots: Sequence[Term], extents: Mapping[str, int]) -> list[Term]:
    """The same roots with slices moved inwards."""
    return _Sinker(extents).run(roots)


class _Sinker:
    def __init__(self, extents: Mapping[str, int]):
        self.extents = dict(extents)
        self._asked: dict[Term, dict[ViewMap, None]] = {}   # how each term is read: () as a whole, else by which slices
        self._sunk: set[Term] = set()
        self._built: dict[tuple[Term, ViewMap], Term] = {}

    def run(self, roots: Sequence[Term]) -> list[Term]:
        order = list(postorder(roots))
        for r in roots:
            self._asked.setdefault(r, {})[()] = None
        for t in reversed(order):                           # users first
            asked = list(self._asked[t])
            if t.op != "view" and self._can_sink(t, asked):
                self._sunk.add(t)
            for s in asked:
                for a, m in self._below(t, s):
                    self._asked.setdefault(a, {})[m] = None
        return [self._build(r, ()) for r in roots]

    def _can_sink(self, t: Term, asked: Sequence[ViewMap]) -> bool:
        if not all(asked) or not t.args:
            return False
        if t.op in ("red", "gather") and any(self._bound(t) in e.axes for s in asked for _, e in s):
            return False                                    # the operator would capture an axis of the slice
        return t.op != "fold" and all(self._disjoint(s, r) for i, s in enumerate(asked) for r in asked[:i])

    @staticmethod
    def _bound(t: Term) -> str:
        return t.attr[1] if t.op == "red" else t.attr       # type: ignore[index, return-value]

    def _disjoint(self, s: ViewMap, r: ViewMap) -> bool:
        """Do two slices of one term have no element in common?"""
        for a, e in s:
            f = dict(r).get(a)
            if f is None:
                continue
            (low, high), (lo, hi) = e.bounds(self.extents), f.bounds(self.extents)
            step = math.gcd(*(c for _, c in e.terms), *(c for _, c in f.terms))
            if high < lo or hi < low or (step and (e.const - f.const) % step):
                return True
        return False

    def _below(self, t: Term, s: ViewMap) -> Iterable[tuple[Term, ViewMap]]:
        """How the arguments are read when t is read by slice s."""
        if t.op == "view":
            return [(t.args[0], self._slice(t.args[0], self._composed(t, s)))]
        return [(a, self._restricted(a, s, t) if t in self._sunk else ()) for a in t.args]

    def _restricted(self, a: Term, s: ViewMap, user: Term) -> ViewMap:
        """The part of a slice that concerns an argument; what the user binds in its first one is not it."""
        hidden = self._bound(user) if user.op in ("red", "gather") and a is user.args[0] else None
        return tuple((k, e) for k, e in s if k in a.free and k != hidden)

    def _composed(self, t: Term, s: ViewMap) -> ViewMap:
        m, own = dict(s), dict(t.attr)                      # type: ignore[call-overload]
        out = {a: e.substitute(m) for a, e in own.items()} | {a: e for a, e in s if a in t.args[0].free and a not in own}
        return tuple((a, e) for a, e in out.items() if e != axis_index(a))

    def _slice(self, x: Term, m: ViewMap) -> ViewMap:
        """The entries of a map that choose elements, in a canonical order; () if x must be whole: something is renamed only, or
        the map leaves x's range (a `where` guards it), or the two kinds of entries cannot be told apart by name."""
        chosen = []
        for a, e in sorted(m, key=lambda entry: entry[0]):
            if self._renames(a, e):
                continue
            low, high = e.bounds(self.extents)
            if low < 0 or high >= self.extents[a]:
                return ()
            chosen.append((a, e))
        renamed = {a for a, e in m if self._renames(a, e)}
        return () if any(b in renamed for _, e in chosen for b in e.axes) else tuple(chosen)

    def _renames(self, a: str, e: Affine) -> bool:
        return e.const == 0 and len(e.terms) == 1 and e.terms[0][1] == 1 and self.extents[e.terms[0][0]] == self.extents[a]

    def _build(self, root: Term, slice_: ViewMap) -> Term:
        stack = [(root, slice_)]
        while stack:
            key = t, s = stack[-1]
            if key in self._built:
                stack.pop()
            elif t.op == "view":
                x, m = t.args[0], self._composed(t, s)
                part = self._slice(x, m) if x in self._sunk else ()
                if (x, part) not in self._built:
                    stack.append((x, part))
                else:
                    rest = tuple((a, e) for a, e in m if (a, e) not in part)
                    self._built[key] = view(self._built[x, part], rest) if rest else self._built[x, part]
            elif s and t not in self._sunk and t.args:
                if (t, ()) not in self._built:
                    stack.append((t, ()))
                else:
                    self._built[key] = view(self._built[t, ()], s)
            else:
                below = [(a, self._restricted(a, s, t)) for a in t.args]
                if missing := [b for b in below if b not in self._built]:
                    stack.extend(missing)
                else:
                    args = [self._built[b] for b in below]
                    self._built[key] = self._leaf(t, dict(s)) if not t.args else make(t.op, t.attr, args)
        return self._built[root, slice_]

    def _leaf(self, t: Term, m: dict[str, Affine]) -> Term:
        if t.op == "input":
            return inp(t.attr[0], tuple(ix.substitute(m) for ix in t.attr[1]))  # type: ignore[index]
        if t.op == "iota" and t.attr in m:
            e = m[t.attr]
            return add(*[mul(iota(a), float(c)) for a, c in e.terms], float(e.const))
        return t
