"""Which pivots of a loop's state may be any value, and the loop's body where they stay what they are.

A pivot is a carried maximum (or minimum) that other state is relative to: moving it from r to R multiplies that state by a factor
e(r, R) with e(r, r) = 1.  If no result depends on where it is (codegen/invariance.py), it may lag behind the maximum (lazy) or stay at
that of the first tiles (frozen) as long as nothing overflows: in the state, which is checked, or after the loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..invariance import Forms, Unknown
from ..tile import Carry, Const, Contract, Loop, Map, Reduce, Stmt, Store, TileProgram, Value, live, operands, walk

Coefficients = dict[int, float]  # pivot (its phi) → coefficient, in a value that is linear in pivots


class Pivots:
    """free: may the pivots be any values?  frozen: the body where they stay; None if other state would still be moved.  rising: might
    something after the loop overflow where they are far from the true ones?
    scale: of each, the largest |c| where exp2(c · (element − pivot)) (or exp) is taken."""

    def __init__(self, p: TileProgram, loop: Loop):
        self.p, self.loop = p, loop
        self.consts = {s.out.id: s.value for s in walk(p.body) if isinstance(s, Const)}
        defs = {s.out.id: s for s in loop.body if not isinstance(s, Store | Loop)}
        self.candidates: dict[int, Carry] = {}
        for c in loop.carries:
            d = defs.get(c.next.id)
            if c.kind == "pivot" and isinstance(d, Reduce) and d.op in ("max", "min") and d.acc == c.phi:
                self.candidates[c.phi.id] = c
        self.nexts = {c.next.id: c.phi for c in self.candidates.values()}
        self.scale: dict[int, float] = {}
        self.factors = self._factors()
        frozen = self.freeze() if self.candidates else None
        self.frozen: tuple[Stmt, ...] | None = frozen
        self.free = frozen is not None or (bool(self.candidates) and set(self.candidates) <= set(self.scale))
        self.rising = False
        if self.free:
            try:
                self.rising = Forms(p, set(self.nexts), extremes=True).rising
            except Unknown:
                self.free = False

    @property
    def mixed(self) -> bool:
        """Does a product read a multiple of an exponential?  It may be larger than the exponential itself."""
        made: set[int] = set()  # of exponentials, without being one
        exponentials: set[int] = set()
        for s in self.loop.body:
            if isinstance(s, Map):
                if s.fn in ("exp", "exp2"):
                    exponentials.add(s.out.id)
                elif any(a.id in made | exponentials for a in s.args):
                    made.add(s.out.id)
        return any(v.id in made for s in self.loop.body if isinstance(s, Contract) for v in (s.a, s.b))

    # ---- values that are linear in pivots
    def _linear(self, s: Stmt, known: Mapping[int, Coefficients]) -> Coefficients | None:
        """The pivots' coefficients in a statement's result, if nothing else is in it."""
        if not isinstance(s, Map):
            return None
        args = [known.get(a.id) for a in s.args]
        if s.fn == "where" and args[1:] and (args[1] is None) != (args[2] is None):  # the guard: 0 in place of an infinite pivot
            other = s.args[1] if args[1] is None else s.args[2]
            return (args[1] or args[2]) if self.consts.get(other.id) == 0.0 else None
        if s.fn == "mul" and sum(a is not None for a in args) == 1:
            rest = [self.consts.get(v.id) for v, a in zip(s.args, args) if a is None]
            if any(x is None for x in rest):
                return None
            f = math.prod(x for x in rest if x is not None)
            return {k: f * c for a in args if a for k, c in a.items()}
        if s.fn in ("sub", "add") and len(args) == 2 and all(a is not None for a in args):
            sign = -1.0 if s.fn == "sub" else 1.0
            out = dict(args[0] or {})
            for k, c in (args[1] or {}).items():
                out[k] = out.get(k, 0.0) + sign * c
            return out
        return None

    def _factors(self) -> dict[int, tuple[int, float]]:
        """Value → (pivot, c): exp2(c·old − c·new)."""
        phis: dict[int, Coefficients] = {i: {i: 1.0} for i in self.candidates}
        nexts: dict[int, Coefficients] = {}
        out: dict[int, tuple[int, float]] = {}
        old, new = dict(phis), {n: {phi.id: 1.0} for n, phi in self.nexts.items()}
        for s in self.loop.body:
            if not isinstance(s, Map):
                continue
            for table in (old, new):
                if (found := self._linear(s, table)) is not None:
                    table[s.out.id] = found
            if s.fn == "sub" and len(s.args) == 2 and s.args[0].id in old and s.args[1].id in new:
                a, b = old[s.args[0].id], new[s.args[1].id]
                if a == b and len(a) == 1:
                    nexts[s.out.id] = a
            elif s.fn == "mul" and sum(a.id in nexts for a in s.args) == 1:
                rest = [self.consts.get(a.id) for a in s.args if a.id not in nexts]
                if all(x is not None for x in rest):
                    f = math.prod(x for x in rest if x is not None)
                    a = next(nexts[x.id] for x in s.args if x.id in nexts)
                    nexts[s.out.id] = {k: f * c for k, c in a.items()}
            elif s.fn in ("exp", "exp2") and s.args[0].id in nexts:
                ((pivot, c),) = nexts[s.args[0].id].items()
                out[s.out.id] = pivot, c * (1.0 if s.fn == "exp2" else 1.0 / math.log(2.0))
                self.scale[pivot] = max(self.scale.get(pivot, 0.0), abs(out[s.out.id][1]))
        return out

    # ---- the body with pivots that do not move
    def freeze(self) -> tuple[Stmt, ...] | None:
        """None if state would still have to be rescaled."""
        same: dict[int, Value] = dict(self.nexts)
        ones = set(self.factors)

        def value(v: Value) -> Value:
            while v.id in same:
                v = same[v.id]
            return v

        out: list[Stmt] = []
        for s in self.loop.body:
            if isinstance(s, Reduce) and s.out.id in self.nexts:
                continue
            if isinstance(s, Map):
                if s.out.id in ones:
                    continue
                args = tuple(map(value, s.args))
                if s.fn == "mul" and any(a.id in ones for a in args):
                    rest = [a for a in args if a.id not in ones]
                    if len(rest) == 1:
                        same[s.out.id] = rest[0]
                        continue
                    if not rest:
                        ones.add(s.out.id)
                        continue
                    args = tuple(rest)
                if any(a.id in ones for a in args):
                    return None
                out.append(replace(s, args=args))
            elif isinstance(s, Reduce):
                out.append(replace(s, arg=value(s.arg), acc=s.acc and value(s.acc)))
            elif isinstance(s, Contract):
                out.append(replace(s, a=value(s.a), b=value(s.b), acc=s.acc and value(s.acc)))
            else:
                if any(v.id in same or v.id in ones for v in operands(s)):
                    return None
                out.append(s)
        used = {c.next.id for c in self.loop.carries if c.phi.id not in self.candidates}
        body = live(tuple(out), used)
        defs = {s.out.id: s for s in body if not isinstance(s, Store | Loop)}
        for c in self.loop.carries:  # what is left must only be added to
            d = defs.get(c.next.id)
            if c.phi.id not in self.candidates and isinstance(d, Reduce | Contract) and d.acc != c.phi:
                return None
        return body
