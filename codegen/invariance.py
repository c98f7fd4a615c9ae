"""How the values of a tile program depend on its pivots: is every result the same whatever number a pivot is?

A pivot is a maximum or minimum m whose value is treated as unknown.  Each other value is, as a function of it,

    x + a·m      "plus"     (an argument of exp; m itself)
    x · exp(a·m) "times"    (weights, their sums)

with x and a free of m, or of no known form.  A value that is free of m has a = 0, and zeros have every form.  In a loop the pivot
before and after an iteration are two unknowns, so that state moved to the new pivot is seen to have the same x.

After loops the greater (or smaller) of a pivot and something else may be an unknown of its own: what is the same whatever both are
is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .tile import Carry, Const, Contract, Loop, Map, Mask, Reduce, Stmt, Store, TileProgram, Value, operands

COMPARISONS = frozenset({"lt", "le", "eq", "ne"})


class Unknown(Exception):
    """A value whose dependence on a pivot has neither form."""


@dataclass(frozen=True)
class Form:
    """coef: unknown → a, those that are not 0.  times: which of the two forms."""

    coef: tuple[tuple[int, float], ...] = ()
    times: bool = False

    @staticmethod
    def of(coef: dict[int, float], times: bool) -> Form:
        left = tuple(sorted((s, a) for s, a in coef.items() if abs(a) > 1e-9))
        return Form(left, times and bool(left))

    @property
    def free(self) -> bool:
        return not self.coef


FREE = Form()


def total(forms: Iterable[tuple[float, Form]], times: bool) -> Form:
    out: dict[int, float] = {}
    for c, f in forms:
        for s, a in f.coef:
            out[s] = out.get(s, 0.0) + c * a
    return Form.of(out, times)


class Forms:
    """The form of each value; raises Unknown where there is none, or where a result depends on a pivot.

    rising: is there an exponential after the loops that might overflow where a pivot is not the true one?"""

    def __init__(self, p: TileProgram, pivots: set[int], extremes: bool = False):
        """pivots: results of reductions by max or min.  extremes: may those of pivots and other values be unknowns, too?"""
        self.pivots, self.extremes = pivots, extremes
        self.rising = False
        self.depth = 0
        self.maps: dict[int, Map] = {}
        self.form: dict[int, Form] = {}
        self.consts: dict[int, float] = {}
        self.aliases: set[int] = set()  # values that are a pivot, or 0 where it is infinite: as good a pivot
        self.axes: dict[int, frozenset[str]] = {}  # unknown → its axes
        self.hidden: dict[int, int] = {}  # predicate → the pivot that it compares with a number
        self.zeros: set[int] = set()  # values that are 0 in this trip of a loop
        self.body(p.body)

    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if not isinstance(s, Map) and any(v.id in self.hidden for v in operands(s)):
                raise Unknown(s)
            match s:
                case Loop():
                    self.loop(s)
                case Store():
                    if not self.form[s.arg.id].free:
                        raise Unknown(s)
                case Const():
                    self.consts[s.out.id], self.form[s.out.id] = s.value, FREE
                case _:
                    self.zeros.discard(s.out.id)
                    self.form[s.out.id] = self.of(s)

    def unknown(self, v: Value) -> Form:
        self.axes[v.id] = frozenset(v.axes)
        self.aliases.add(v.id)
        return Form(((v.id, 1.0),))

    def zero(self, v: Value) -> bool:
        return self.consts.get(v.id) == 0.0 or v.id in self.zeros

    def of(self, s: Stmt) -> Form:
        match s:
            case Map():
                return self.map(s)
            case Reduce():
                if s.out.id in self.pivots:
                    return self.unknown(s.out)
                forms = [self.form[v.id] for v in (s.arg, *([s.acc] if s.acc else [])) if not self.zero(v)]
                self.same(s, forms)
                if forms and not forms[0].free:
                    if s.op == "*" or (s.op == "+") != forms[0].times:
                        raise Unknown(s)
                    self.outside(s, s.axes, forms[0])
                return forms[0] if forms else FREE
            case Contract():
                a, b = self.form[s.a.id], self.form[s.b.id]
                if any(not f.free and not f.times for f in (a, b)):
                    raise Unknown(s)
                out = total([(1.0, a), (1.0, b)], True)
                for f in (a, b):
                    self.outside(s, s.axes, f)
                if s.acc is not None and not self.zero(s.acc):
                    self.same(s, [out, self.form[s.acc.id]])
                return out
            case Mask():
                return FREE
        if any(not self.form[v.id].free for v in (getattr(s, "position", None),) if v is not None):
            raise Unknown(s)
        return FREE

    def same(self, s: Stmt, forms: list[Form]) -> None:
        if any(f != forms[0] for f in forms):
            raise Unknown(s)

    def outside(self, s: Stmt, summed: tuple[str, ...], f: Form) -> None:
        if any(self.axes[u] & set(summed) for u, _ in f.coef):
            raise Unknown(s)

    def map(self, s: Map) -> Form:
        self.maps[s.out.id] = s
        if any(a.id in self.hidden for a in s.args):
            c, x, y = (*s.args, *s.args)[:3]
            if s.fn == "where" and c.id in self.hidden and y.id == self.hidden[c.id] and x.id in self.consts:
                self.aliases.add(s.out.id)
                return self.form[y.id]
            raise Unknown(s)
        forms = [self.form[a.id] for a in s.args]
        zero = [self.zero(a) for a in s.args]
        if any(zero) if s.fn == "mul" else all(zero) and s.fn in ("add", "sub", "neg"):
            self.zeros.add(s.out.id)
            return FREE
        if all(f.free for f in forms):
            return FREE
        match s.fn:
            case "add" | "sub" | "neg":
                signs = [-1.0 if s.fn == "neg" or (s.fn == "sub" and n) else 1.0 for n in range(len(forms))]
                if not any(f.times for f in forms):
                    return total(list(zip(signs, forms)), False)
                left = [f for f, a in zip(forms, s.args) if not self.zero(a)]
                self.same(s, left)
                return left[0]
            case "mul":
                plus = [n for n, f in enumerate(forms) if not f.free and not f.times]
                if not plus:
                    return total([(1.0, f) for f in forms], True)
                rest = [self.consts.get(a.id) for n, a in enumerate(s.args) if n != plus[0]]
                factors = [c for c in rest if c is not None and math.isfinite(c)]
                if len(factors) < len(rest):
                    raise Unknown(s)
                return total([(math.prod(factors), forms[plus[0]])], False)
            case "recip" if forms[0].times:
                return total([(-1.0, forms[0])], True)
            case "exp" | "exp2" if not forms[0].times:
                self.rising |= self.depth == 0 and not self.at_most_zero(s.args[0])
                base = 1.0 if s.fn == "exp" else math.log(2.0)
                return Form.of({u: base * a for u, a in forms[0].coef}, True)
            case "log" | "log2" if forms[0].times:
                base = 1.0 if s.fn == "log" else 1.0 / math.log(2.0)
                return Form.of({u: base * a for u, a in forms[0].coef}, False)
            case "where" if forms[0].free:
                kept = [f for f, a in zip(forms[1:], s.args[1:]) if not (self.zero(a) or math.isinf(self.consts.get(a.id, 0.0)))]
                self.same(s, kept)
                if any(
                    f.times == math.isinf(self.consts.get(a.id, 0.0)) for f in kept for a in s.args[1:] if a.id in self.consts
                ):
                    raise Unknown(s)  # 0 is neutral among factors only, an infinity among terms only
                return kept[0]
            case "max" | "min" if self.extremes and self.depth == 0 and not any(f.times for f in forms):
                self.axes[s.out.id] = frozenset(s.out.axes)
                return Form(((s.out.id, 1.0),))
            case fn if fn in COMPARISONS:
                if all(f.times or self.zero(a) for f, a in zip(forms, s.args)) and any(map(self.zero, s.args)):
                    return FREE  # the sign of a factor
                known = [f for f, a in zip(forms, s.args) if not self.zero(a)]
                if all(f == known[0] for f in known) and (known[0].times or not any(map(self.zero, s.args))):
                    return FREE  # both by the same positive factor, or shifted alike
                if fn == "eq" and s.args[0].id in self.aliases and math.isinf(self.consts.get(s.args[1].id, 0.0)):
                    self.hidden[s.out.id] = s.args[0].id
                    return FREE
        raise Unknown(s)

    # ---- bounds
    def multiple(self, v: Value) -> tuple[int, float]:
        """(x, c) with v = c·x."""
        c = 1.0
        while (s := self.maps.get(v.id)) is not None and s.fn == "mul":
            rest = [a for a in s.args if a.id not in self.consts]
            if len(rest) != 1:
                break
            c *= math.prod(self.consts[a.id] for a in s.args if a.id in self.consts)
            (v,) = rest
        return v.id, c

    def at_most_zero(self, v: Value) -> bool:
        """Is it x − max(x, …) or min(x, …) − x, scaled by a constant > 0?"""
        s = self.maps.get(v.id)
        if s is None:
            return False
        if s.fn == "sub":
            return self.beyond("max", *s.args) or self.beyond("min", *reversed(s.args))
        x, c = self.multiple(v)
        d = self.maps.get(x)
        if d is None or c == 0.0:
            return False
        if d.fn == "sub":
            return c > 0.0 and self.at_most_zero(d.out)
        return d.fn == ("max" if c < 0.0 else "min") and any(self.consts.get(a.id) == 0.0 for a in d.args)

    def beyond(self, fn: str, x: Value, y: Value) -> bool:
        """Is y the greater (or smaller: fn) of x and something else?"""
        top, c = self.multiple(y)
        d = self.maps.get(top)
        if d is None or d.fn != fn or not c > 0.0:
            return False
        of, b = self.multiple(x)
        return any(u == of and math.isclose(c * a, b, rel_tol=1e-12) for u, a in map(self.multiple, d.args))

    # ---- loops
    def loop(self, s: Loop) -> None:
        makers = {x.out.id: x for x in s.body if isinstance(x, Reduce)}

        def pivot(c: Carry) -> bool:
            return (
                c.next.id in self.pivots
                and (r := makers.get(c.next.id)) is not None
                and r.acc is not None
                and r.acc.id == c.phi.id
            )

        known = set(self.axes)
        moving = {c.next.id: c.phi.id for c in s.carries if pivot(c)}
        guess: dict[int, Form] = {}
        for c in s.carries:
            guess[c.phi.id] = self.unknown(c.phi) if pivot(c) else self.form[c.init.id]
        zeros = {c.phi.id for c in s.carries if self.zero(c.init)}
        for last in (False, True):
            self.form.update(guess)
            self.zeros = self.zeros - zeros if last else self.zeros | zeros  # what is 0 has every form
            self.depth += 1
            self.body(s.body)
            self.depth -= 1
            for c in s.carries:
                new = self.form[c.next.id]
                before = Form.of({moving.get(u, u): a for u, a in new.coef}, new.times)
                if not {u for u, _ in before.coef} <= known | set(moving.values()):
                    raise Unknown(s)
                if last and before != guess[c.phi.id]:
                    raise Unknown(s)
                if not last and c.phi.id in zeros:
                    guess[c.phi.id] = before
        for c in s.carries:
            self.form[c.out.id] = self.form[c.next.id]
            if pivot(c):
                self.aliases.add(c.out.id)
