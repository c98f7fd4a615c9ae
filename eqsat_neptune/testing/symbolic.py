"""Proofs by computer algebra: for all real values and, where something is reduced, for every length.

A rule is read as an equation of expressions whose variables are symbols; its conditions say what the symbols are (real, positive,
constant along an axis).  A reduction over an axis becomes a symbol of its own, after everything has left it that may.  What may
leave is a lemma, and each lemma is proved for every length by induction: `LEMMAS` holds them as data, and their base and step
are equations between scalars, which `scalar` proves.  Merges of folds rest on four scalar laws (`prove_merge`); that they
hold for folds of any length is induction again: a fold of one element is its singleton, and a merge moves both sides to the
merged pivots (change of reference) and adds them (distribution).

Real values only: what masks, infinities and NaN do is sampled (check.py).  sympy is needed, and nothing else here is.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any

from ..errors import EqsatError
from ..rules.repair import Derived
from ..rules.rule import Rule, Sexpr, is_number, is_star, parse
from ..terms import UNARY, Monoid, Term, postorder

Expr = Any  # a sympy expression


class Unproved(Exception):
    """No proof was found; the message says what is in the way."""


@dataclass(frozen=True)
class Proof:
    """Truthy if proved.  steps: the laws and lemmas that it rests on; reason: why there is none."""

    ok: bool
    steps: tuple[str, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@cache
def algebra() -> Any:
    """The sympy module.  EqsatError where it is not installed."""
    try:
        import sympy
    except ImportError:
        raise EqsatError("proofs need sympy", "pip install sympy") from None
    return sympy


def proves() -> bool:
    """Is sympy there?"""
    return importlib.util.find_spec("sympy") is not None


def rational(v: float) -> Expr:
    """A constant; what is within rounding of a simple fraction is that fraction."""
    sp = algebra()
    if not math.isfinite(v):
        return sp.oo if v > 0 else -sp.oo if v < 0 else sp.nan
    near = Fraction(v).limit_denominator(1 << 16)
    f = near if abs(float(near) - v) <= 1e-14 * abs(v) else Fraction(v)
    return sp.Rational(f.numerator, f.denominator)


def scalar(left: Expr, right: Expr) -> bool:
    """Are two expressions equal for all values of their symbols?"""
    sp = algebra()
    if left == right:
        return True
    if any(e.has(sp.oo, -sp.oo, sp.zoo, sp.nan) for e in (left, right)):
        return False
    gap = sp.expand(left - right)
    if gap == 0:
        return True
    gap = sp.expand(sp.numer(sp.together(sp.powsimp(gap, force=False))))
    return gap == 0 or sp.simplify(gap) == 0


# ------------------------------------------------------------------ lemmas: reductions of every length, by induction


@dataclass(frozen=True)
class Lemma:
    """⊕ₖ f(xₖ) = F(⊕¹ₖ g₁(xₖ), …), for every length: both sides built up one element at a time.

    Base: f(x) = F(g(x)).  Step: F(B) ⊕ f(x) = F(B ⊕ g(x)) for all B and x, which are the parts that the lemma holds for already.
    cases: orders of the arguments in which a maximum is one of them, for lemmas about max and min."""

    law: str
    op: str
    f: Callable[..., Expr]
    inner: tuple[tuple[str, Callable[..., Expr]], ...]  # the reductions on the right: (operator, body)
    whole: Callable[..., Expr]  # F
    variables: int = 1
    assume: Mapping[str, bool] = field(default_factory=dict)  # of the constant c

    def proved(self) -> bool:
        sp = algebra()
        c = sp.Symbol("c", real=True, **self.assume)
        x = sp.symbols(f"x0:{self.variables}", real=True)
        base = scalar(self.f(c, *x), self.whole(c, *(g(c, *x) for _, g in self.inner)))
        if any(o in ("max", "min") for o in (self.op, *(o for o, _ in self.inner))):
            return base and all(self._step(c, x, sign) for sign in (1, -1))
        return base and self._step(c, x, 0)

    def _step(self, c: Expr, x: Sequence[Expr], sign: int) -> bool:
        """sign: is the accumulated value above (1) or below (−1) the new one?"""
        sp = algebra()
        gap = sp.Symbol("d", nonnegative=True)
        new = [g(c, *x) for _, g in self.inner]
        old = [n + sign * gap if sign else sp.Symbol(f"B{i}", real=True) for i, n in enumerate(new)]
        joined = [combine(o, a, b) for (o, _), a, b in zip(self.inner, old, new)]
        return scalar(combine(self.op, self.whole(c, *old), self.f(c, *x)), self.whole(c, *joined))


def combine(op: str, a: Expr, b: Expr) -> Expr:
    """a ⊕ b; for max and min the order of both must be known."""
    sp = algebra()
    if op in ("+", "*"):
        return a + b if op == "+" else a * b
    gap = sp.factor(sp.expand(a - b))
    if gap.is_nonnegative or gap.is_nonpositive:
        return a if (gap.is_nonnegative if op == "max" else gap.is_nonpositive) else b
    raise Unproved(f"{a} and {b} have no known order")


LEMMAS: dict[str, Lemma] = {
    "sums add": Lemma(
        "Σ (x + y) = Σ x + Σ y",
        "+",
        lambda c, x, y: x + y,
        (("+", lambda c, x, y: x), ("+", lambda c, x, y: y)),
        lambda c, a, b: a + b,
        2,
    ),
    "factors leave sums": Lemma("Σ c·x = c·Σ x", "+", lambda c, x: c * x, (("+", lambda c, x: x),), lambda c, a: c * a),
    "factors leave products": Lemma(
        "Π x·y = Π x · Π y",
        "*",
        lambda c, x, y: x * y,
        (("*", lambda c, x, y: x), ("*", lambda c, x, y: y)),
        lambda c, a, b: a * b,
        2,
    ),
    **{
        f"terms leave {op}": Lemma(
            f"{op} (c + x) = c + {op} x", op, lambda c, x: c + x, ((op, lambda c, x: x),), lambda c, a: c + a
        )
        for op in ("max", "min")
    },
    **{
        f"{sign} factors leave {op}": Lemma(
            f"{op} c·x = c·{op if sign == 'positive' else other} x for {sign} c",
            op,
            lambda c, x: c * x,
            ((op if sign == "positive" else other, lambda c, x: x),),
            lambda c, a: c * a,
            1,
            {sign: True},
        )
        for op, other in (("max", "min"), ("min", "max"))
        for sign in ("positive", "negative")
    },
}


@cache
def lemmas() -> dict[str, bool]:
    """Each lemma: is it proved?  Two more rest on these."""
    out = {name: lemma.proved() for name, lemma in LEMMAS.items()}
    # Σⱼ Σₖ xⱼₖ = Σₖ Σⱼ xⱼₖ by induction over j: base trivial, step Σₖ (Sₖ + xₖ) = Σₖ Sₖ + Σₖ xₖ, which is "sums add"
    out["sums exchange"] = out["sums add"]
    out["reductions split"] = all(_associative(op) for op in ("+", "*", "max", "min"))
    out["monotone functions leave"] = all(_monotone(op, up) for op in ("max", "min") for up in (True, False))
    return out


def _associative(op: str) -> bool:
    """(A ⊕ B) ⊕ x = A ⊕ (B ⊕ x), ⊕ commutes, and e ⊕ x = x: so any bracketing, with elements that do not exist as e, is the
    reduction.  A and B are what the lemma holds for, x is one more element."""
    sp = algebra()
    x = sp.Symbol("x", real=True)
    unit = {"+": sp.Integer(0), "*": sp.Integer(1), "max": -sp.oo, "min": sp.oo}[op]
    if op in ("+", "*"):
        a, b = sp.symbols("A B", real=True)
        same = scalar(combine(op, combine(op, a, b), x), combine(op, a, combine(op, b, x)))
        return same and scalar(combine(op, a, b), combine(op, b, a)) and combine(op, unit, x) == x
    d, e = sp.symbols("d e", nonnegative=True)
    for low, middle, high in itertools.permutations(range(3)):
        values: list[Any] = [None] * 3
        values[low], values[middle], values[high] = x, x + d, x + d + e
        a, b, c = values
        if not scalar(combine(op, combine(op, a, b), c), combine(op, a, combine(op, b, c))) or not scalar(
            combine(op, a, b), combine(op, b, a)
        ):
            return False
    return bool((sp.Max if op == "max" else sp.Min)(unit, x) == x)


def _monotone(op: str, up: bool) -> bool:
    """max f(x) = f(max x) for any f that keeps the order, f(min x) for one that turns it: of two values a ≤ b, f(a) and f(b)."""
    sp = algebra()
    a = sp.Symbol("a", real=True)
    gap, rise = sp.symbols("d e", nonnegative=True)
    b, fa = a + gap, sp.Symbol("fa", real=True)
    fb = fa + rise if up else fa - rise
    f = {a: fa, b: fb}
    inner = op if up else {"max": "min", "min": "max"}[op]
    return scalar(combine(op, fa, fb), f[combine(inner, a, b)])


# ------------------------------------------------------------------ rules


class _Reader:
    """Reads one equation of a rule (which has as many as its pattern has expressions) as expressions."""

    def __init__(self, rule: Rule, truth: Sequence[bool], elements: int, which: int = 0):
        self.rule, self.truth, self.elements = rule, truth, elements
        self.sp = algebra()
        self.conditions = [c for c in parse(rule.when) + parse(rule.guard) if isinstance(c, list)]
        self.pattern, self.result = parse(rule.pattern)[which], parse(rule.result)[which]
        self.deps: dict[Expr, frozenset[str]] = {}  # symbol → axes that it varies along
        self.values: dict[str, Expr] = {}
        self.members: dict[str, list[Expr]] = {}  # stars that a map goes over: their elements
        self.kinds: dict[str, str] = {}  # star → the operator that it is part of
        self.asked: dict[str, int] = {}  # opaque condition → which of `truth`
        self.used: set[str] = set()
        self.split = {c[1]: (c[2], c[3]) for c in self.conditions if c[0] == "splittable"}
        self.axes = frozenset(a for a in _axes(self.pattern) | _axes(self.result) if a not in self.split)
        self.inside: tuple[str, ...] = ()  # axes of the reductions around
        self._stars(self.pattern)
        self._mapped = {a for f in _forms(self.result, "map") for a in f[2:]}
        # tensors side by side along c: view → the axis that it takes and the one that it gives; below it, does the first one lie there?
        self.views: dict[str, tuple[str, str]] = {}
        self.known: dict[str, dict[str, bool]] = {}
        self.home: dict[str, str] = {}  # variable → what stands for its own axis
        for x, y, c, n, p, q, r, s in (d[1:] for d in self.conditions if d[0] == "joined"):
            self.home |= {x: f"@{x}", y: f"@{y}"}
            self.views |= {p: (c, f"@{x}"), q: (f"@{x}", c), r: (f"@{y}", c), s: (c, f"@{y}")}
            test = str(["bi", '"lt"', ["iota", c], ["num", n]])
            self.known |= {p: {test: True}, s: {test: False}}
        self.given: dict[str, bool] = {}  # conditions whose truth is known here
        self.zero = {w: v for c in self.conditions if (vw := _opposite(c)) for v, w in [vw]}

    def sides(self) -> tuple[Expr, Expr]:
        return self.expr(self.pattern), self.expr(self.result)

    # ---- symbols
    def _stars(self, p: Sexpr) -> None:
        if isinstance(p, list):
            for a in p[1:]:
                if is_star(a) and p[0] in ("add", "mul"):
                    self.kinds.setdefault(a, p[0])  # type: ignore[arg-type]
                self._stars(a)
        for c in self.conditions if p is self.pattern else ():
            if c[0] in ("part", "divide") and c[1] in self.kinds:
                self.kinds[c[3]] = self.kinds[c[4]] = self.kinds[c[1]]

    def _assumptions(self, x: str) -> dict[str, bool]:
        """What the conditions say of a variable's value."""
        facts: set[str] = set()
        for c in self.conditions:
            if c[0] == "all" and c[2] == x:
                facts.add(c[1][0])
            elif c[0] in ("nonneg", "nonzero", "finite", "noinf") and c[1] == x:
                facts.add(c[0])
            elif c[0] in ("part", "divide") and c[3] == x:
                facts |= {"nonzero"} if c[2][0] == "regular" else set()
            elif c[0] == "regular" and c[2] == x:
                facts.add("nonzero")
            elif c[0] in ("lz", "hz") and c[1] == x:
                for d in self.conditions:
                    if d[0] in ("<", ">", "<=", ">=") and d[1] == c[2] and is_number(d[2]):
                        v = float(d[2])
                        if d[0] == ">" and v >= 0 and c[0] == "lz":
                            facts |= {"nonneg", "nonzero"}
                        elif d[0] == ">=" and v >= 0 and c[0] == "lz":
                            facts.add("nonneg")
                        elif d[0] == "<" and v <= 0 and c[0] == "hz":
                            facts.add("negative")
        if _under_log(self.pattern, x):  # elsewhere the pattern has no real value
            facts |= {"nonneg", "nonzero"}
        out = {"real": True}
        if "negative" in facts:
            out["negative"] = True
        elif {"nonneg", "nonzero"} <= facts:
            out["positive"] = True
        elif "nonneg" in facts:
            out["nonnegative"] = True
        elif "nonzero" in facts:
            out["nonzero"] = True
        return out

    def _along(self, x: str) -> frozenset[str]:
        """The axes that a variable may vary along."""
        out = set(self.axes)
        for a in self.axes & set(self.split):
            out.discard(a)
        for c in self.conditions:
            k = None
            if c[0] in ("indep", "cofactor", "addend") and c[2] == x:
                k = c[1]
            elif c[0] == "free-of" and x in c[2:]:
                k = c[1]
            elif c[0] in ("part", "divide") and c[2][0] in ("indep", "cofactor", "addend") and c[3] == x:
                k = c[2][1]
            elif c[0] == "all" and c[2] == x and c[1][0] in ("indep", "cofactor", "addend"):
                k = c[1][1]
            elif c[0] == "is" and c[1] == x and c[2][0] in ("max", "min", "sum", "prod"):
                k = c[2][1]
            if k is not None:
                out.discard(k)
        if x in self.home:
            out.add(self.home[x])
        return frozenset(out)

    def symbol(self, name: str, about: str) -> Expr:
        s = self.sp.Symbol(name, **self._assumptions(about))
        self.deps[s] = self._along(about)
        return s

    def variable(self, x: str) -> Expr:
        if x not in self.values:
            self.values[x] = self.symbol(x, x)
        return self.values[x]

    def number(self, e: Sexpr) -> Expr:
        """A constant: a variable, or what a rule computes from some."""
        if isinstance(e, str):
            if is_number(e):
                return rational(float(e))
            if e in self.zero:
                return -self.number(self.zero[e])
            nonzero = any(c[0] == "!=" and c[1] == e and is_number(c[2]) and float(c[2]) == 0 for c in self.conditions)
            s = self.sp.Symbol(e, real=True, **({"nonzero": True} if nonzero else {}))
            self.deps.setdefault(s, frozenset())
            return s
        a = [self.number(x) for x in e[1:]]
        match e[0]:
            case "*":
                return a[0] * a[1]
            case "+":
                return a[0] + a[1]
            case "-":
                return a[0] - a[1]
            case "/":
                return a[0] / a[1]
        raise Unproved(f"{e[0]} of constants")

    def star(self, s: str, op: str) -> list[Expr]:
        """The elements of a star variable, of which one stands for all where only their sum or product counts."""
        for c in self.conditions:
            if c[0] in ("part", "divide") and c[1] == s:
                return [*self.star(c[3], op), *self.star(c[4], op)]
        if self.kinds.get(s, op) != op:
            raise Unproved(f"{s} is part of a {self.kinds[s]}")
        if s in self._mapped:
            if s not in self.members:
                self.members[s] = [self.symbol(f"{s}{i}", s) for i in range(self.elements)]
            return self.members[s]
        return [self.variable(s)]

    # ---- expressions
    def expr(self, p: Sexpr) -> Expr:
        sp = self.sp
        if isinstance(p, str):
            return rational(float(p)) if is_number(p) else self.variable(p)
        head, *args = p
        match head:
            case "num":
                return self.number(args[0])
            case "as":
                self.values[args[0]] = self.expr(args[1])
                return self.values[args[0]]
            case "add" | "mul":
                parts: list[Expr] = []
                for a in args:
                    if is_star(a):
                        parts += self.star(a, head)
                    elif isinstance(a, list) and a[0] == "map":
                        parts += [self.applied(a[1], x) for x in self.star(a[2], self.kinds[a[2]])]
                    else:
                        parts.append(self.expr(a))
                return self.tidy(sp.Add(*parts) if head == "add" else sp.Mul(*parts))
            case "sum" | "max" | "min" | "prod":
                return self.reduction({"sum": "+", "prod": "*"}.get(head, head), args[0], args[1])
            case "red":
                return self.generic(args)
            case "where":
                if self.inside:
                    raise Unproved("a choice under a reduction")
                return self.expr(args[1] if self.holds(args[0]) else args[2])
            case "view" if args[0] in self.views:
                before, self.given = self.given, self.known.get(args[0], {})
                e = self.expr(args[1])
                self.given = before
                return self.placed(e, *self.views[args[0]])
            case "view":
                return self.moved(self.expr(args[1]), f"@{args[0]}", None)
            case "gather":
                return self.moved(self.expr(args[1]), f"[{args[2]}]", args[0])
            case "un":
                return sp.Function(args[0], real=True)(self.expr(args[1]))
        if head in UNARY and len(args) == 1:
            return self.tidy(unary(head, self.expr(args[0])))
        raise Unproved(f"{head} is not read")

    def applied(self, form: list, x: Expr) -> Expr:
        """A form of a map at one element."""
        self.values["_"] = x
        out = self.expr(form)
        del self.values["_"]
        return out

    def tidy(self, e: Expr) -> Expr:
        sp = self.sp
        return e if e.has(sp.oo, -sp.oo, sp.nan, sp.zoo) else sp.expand(e)

    def holds(self, c: Sexpr) -> bool:
        """The truth of a condition: each unknown one is tried both ways."""
        if isinstance(c, list) and c[0] == "bi" and c[1].strip('"') in ("and", "or"):
            a, b = self.holds(c[2]), self.holds(c[3])
            return a and b if c[1].strip('"') == "and" else a or b
        if isinstance(c, list) and c[0] == "not":
            return not self.holds(c[1])
        if str(c) in self.given:
            return self.given[str(c)]
        i = self.asked.setdefault(str(c), len(self.asked))
        if i >= len(self.truth):
            raise Unproved("too many conditions")
        return self.truth[i]

    def along(self, e: Expr) -> frozenset[str]:
        return frozenset().union(*(self.deps[s] for s in e.free_symbols))

    def moved(self, e: Expr, suffix: str, axis: str | None) -> Expr:
        """An expression read at another position (of one axis; None: of any): so are its symbols."""
        new = {}
        for s in sorted(e.free_symbols, key=str):
            if axis is None or axis in self.deps[s]:
                new[s] = self.sp.Symbol(f"{s}{suffix}", **{k: v for k, v in s.assumptions0.items() if v and k in _KEPT})
                self.deps[new[s]] = self.deps[s] - ({axis} if axis else set())
        return e.subs(new, simultaneous=True)

    def placed(self, e: Expr, axis: str, place: str) -> Expr:
        """An expression whose symbols that vary along an axis are read at another place, which may be where they were at first."""
        new = {}
        for s in sorted(e.free_symbols, key=str):
            if axis in self.deps[s]:
                x = s.name.partition(" at ")[0]
                new[s] = self.values[x] if self.home[x] == place else self.sp.Symbol(f"{x} at {place}", real=True)
                self.deps[new[s]] = self.deps[s] - {axis} | {place}
        return e.subs(new, simultaneous=True)

    # ---- reductions
    def reduction(self, op: str, axis: str, body: Sexpr) -> Expr:
        outside, self.inside = self.inside, (*self.inside, axis)
        e = self.expr(body)
        self.inside = outside
        axes = frozenset(self.split.get(axis, (axis,)))
        for k in sorted(axes):
            if any(k in self._bound(s) for s in e.free_symbols):
                raise Unproved(f"{k} is reduced twice")
            e = self.summed(k, e) if op == "+" else self.extreme(op, k, e) if op in ("max", "min") else self.atom(op, {k}, e)
        return e

    def generic(self, args: list) -> Expr:
        """A reduction by an operator that is a variable: only splitting is known of all of them."""
        f, axis, body = args
        e = self.expr(body)
        axes = frozenset(self.split.get(axis, (axis,)))
        self.used.add("reductions split")
        inner = e.name.split("|") if isinstance(e, self.sp.Symbol) and e.name.startswith(f"red {f}|") else None
        if inner:
            axes, text = axes | frozenset(inner[1].split()), inner[2]
        else:
            text = str(e)
        s = self.sp.Symbol(f"red {f}|{' '.join(sorted(axes))}|{text}", real=True)
        self.deps[s] = frozenset()
        return s

    def _bound(self, s: Expr) -> frozenset[str]:
        return self.reduced[s][1] if s in self.reduced else frozenset()

    @property
    def reduced(self) -> dict[Expr, tuple[str, frozenset[str], Expr]]:
        """Symbols of reductions: (operator, axes, body)."""
        return self.__dict__.setdefault("_reduced", {})

    def atom(self, op: str, axes: Iterable[str], body: Expr) -> Expr:
        """The symbol of a reduction that nothing more can leave."""
        axes = frozenset(axes)
        positive = {"positive": True} if body.is_positive else {}
        s = self.sp.Symbol(f"{op}[{' '.join(sorted(axes))}]({body})", real=True, **positive)
        self.reduced[s] = (op, axes, body)
        self.deps[s] = self.along(body) - axes
        return s

    def summed(self, k: str, e: Expr) -> Expr:
        """Σₖ e as Σ of products of sums that cannot be taken apart."""
        sp = self.sp
        if e.has(sp.oo, -sp.oo):
            raise Unproved("infinity is summed")
        e = sp.expand(e)
        terms = sp.Add.make_args(e)
        if len(terms) > 1:
            self.used.add("sums add")
        out = sp.Integer(0)
        for t in terms:
            factors = _factors(t)
            free = [f for f in factors if k not in self.along(f)]
            rest = [f for f in factors if k in self.along(f)]
            if free:
                self.used.add("factors leave sums")
            out += sp.Mul(*free) * self._product_sum(frozenset([k]), rest)
        return sp.expand(out)

    def _product_sum(self, axes: frozenset[str], factors: list[Expr]) -> Expr:
        """Σ over axes of a product: sums among the factors are merged into it, and what shares no axis is summed apart."""
        sp = self.sp
        sums = [f for f in factors if f in self.reduced and self.reduced[f][0] == "+"]
        inner = [self.reduced[f][1] for f in sums]
        others = [f for f in factors if f not in sums]
        bound = frozenset().union(*inner)
        clash = len(bound) != sum(map(len, inner)) or any(self.along(f) & bound for f in others) or bound & axes
        if sums and not clash:
            self.used.add("sums exchange")
            axes |= bound
            factors = others + [g for f in sums for g in _factors(self.reduced[f][2])]
        groups: list[tuple[set[str], list[Expr]]] = [({a}, []) for a in sorted(axes)]
        for f in factors:
            touched = self.along(f) & axes
            hit = [g for g in groups if g[0] & touched]
            if not hit:
                groups.append((set(), [f]))
                continue
            merged = (set().union(*(g[0] for g in hit)), [x for g in hit for x in g[1]] + [f])
            groups = [g for g in groups if g not in hit] + [merged]
        out = sp.Integer(1)
        for over, fs in groups:
            out *= self.atom("+", over, sp.Mul(*fs)) if over else sp.Mul(*fs)
        return out

    def extreme(self, op: str, k: str, e: Expr) -> Expr:
        """maxₖ e (or min) with everything moved out that may be."""
        sp = self.sp
        if k not in self.along(e):
            return e
        other = {"max": "min", "min": "max"}[op]
        if e.is_Add:
            free = [t for t in e.args if k not in self.along(t)]
            if free:
                self.used.add(f"terms leave {op}")
                return sp.Add(*free) + self.extreme(op, k, sp.Add(*(t for t in e.args if k in self.along(t))))
        factors = _factors(e)
        free = sp.Mul(*(f for f in factors if k not in self.along(f)))
        if free != 1 and (free.is_positive or free.is_negative):
            sign = "positive" if free.is_positive else "negative"
            self.used.add(f"{sign} factors leave {op}")
            return sp.expand(
                free * self.extreme(op if free.is_positive else other, k, sp.Mul(*(f for f in factors if k in self.along(f))))
            )
        if e.is_Pow and e.exp == -1 and (e.base.is_positive or e.base.is_negative):
            self.used.add("monotone functions leave")
            return 1 / self.extreme(other, k, e.base)
        if isinstance(e, sp.exp) or (isinstance(e, sp.log) and e.args[0].is_positive):
            self.used.add("monotone functions leave")
            return e.func(self.extreme(op, k, e.args[0]))
        known = {"positive": True} if e.is_positive else {"negative": True} if e.is_negative else {}
        s = sp.Symbol(f"{op}[{k}]({e})", real=True, **known)
        self.deps[s] = self.along(e) - {k}
        return s


_KEPT = ("real", "positive", "negative", "nonnegative", "nonzero")


def _factors(t: Expr) -> list[Expr]:
    """Factors of a product; powers stay whole, exp of a sum comes apart."""
    sp = algebra()
    return [f for f in sp.Mul.make_args(sp.expand_power_exp(t)) if f != 1]


def _axes(p: Sexpr) -> set[str]:
    """Names of axes in a pattern."""
    if not isinstance(p, list) or not p:
        return set()
    out = (
        {p[1]}
        if p[0] in ("sum", "max", "min", "prod", "gather") and isinstance(p[1], str)
        else {p[2]}
        if p[0] == "red"
        else set()
    )
    return out.union(*map(_axes, p[1:]))  # type: ignore[arg-type]


def _forms(p: Sexpr, head: str) -> list[list]:
    if not isinstance(p, list):
        return []
    return ([p] if p and p[0] == head else []) + [f for a in p for f in _forms(a, head)]


def _opposite(c: list) -> tuple[str, str] | None:
    """(v, w) of a condition that says v + w = 0 up to rounding."""
    match c:
        case ["<=", ["abs", ["+", str(v), str(w)]], ["*", str(), _]]:
            return v, w
    return None


def _under_log(p: Sexpr, x: str) -> bool:
    """Is a variable the argument of a logarithm, or a factor of it?"""
    return any(f[1] == x or (isinstance(f[1], list) and f[1][0] == "mul" and x in f[1]) for f in _forms(p, "log"))


def unary(f: str, x: Expr) -> Expr:
    sp = algebra()
    direct = {"exp": sp.exp, "log": sp.log, "sqrt": sp.sqrt, "abs": sp.Abs, "sin": sp.sin, "cos": sp.cos, "tanh": sp.tanh}
    direct |= {
        "sinh": sp.sinh,
        "cosh": sp.cosh,
        "tan": sp.tan,
        "atan": sp.atan,
        "sign": sp.sign,
        "erf": sp.erf,
        "floor": sp.floor,
    }
    if f in direct:
        return direct[f](x)
    match f:
        case "recip":
            return 1 / x
        case "neg":
            return -x
        case "rsqrt":
            return 1 / sp.sqrt(x)
        case "exp2":
            return sp.exp(x * sp.log(2))
        case "expm1":
            return sp.exp(x) - 1
        case "log1p":
            return sp.log(1 + x)
        case "log2" | "log10":
            return sp.log(x) / sp.log(2 if f == "log2" else 10)
    raise Unproved(f"{f} is not read")


def prove_rule(rule: Rule) -> Proof:
    """Is the rule's law an identity, for all real values that meet its conditions and every length of what is reduced?

    A rule over a multiset (map) is proved for one and two elements, of which either may be the sum or product of others: that is
    the induction over their number."""
    if rule.phase == "driver":
        return Proof(False, reason="made by code: see prove_merge")
    used: set[str] = set()
    try:
        for which, elements in itertools.product(range(len(parse(rule.pattern))), (1, 2) if "(map " in rule.result else (1,)):
            for truth in itertools.product((True, False), repeat=2 if "where" in rule.pattern + rule.result else 0):
                reader = _Reader(rule, truth, elements, which)
                left, right = reader.sides()
                if not scalar(left, right):
                    return Proof(False, reason=f"{left} = {right} is not shown")
                used |= reader.used
    except (Unproved, RecursionError) as e:
        return Proof(False, reason=str(e))
    missing = [u for u in sorted(used) if not lemmas()[u]]
    return Proof(not missing, tuple(sorted(used)), f"lemma not proved: {missing}" if missing else "")


# ------------------------------------------------------------------ merges of folds


def expression(t: Term, names: Mapping[str, Expr]) -> Expr:
    """A term over scalar holes, as an expression over `names`."""
    sp = algebra()
    out: dict[Term, Expr] = {}
    for x in postorder([t]):
        a = [out[y] for y in x.args]
        match x.op:
            case "num":
                out[x] = rational(x.attr)
            case "var":
                out[x] = names[x.attr]
            case "add":
                out[x] = sp.Add(*a)
            case "mul":
                out[x] = sp.Mul(*a)
            case "un":
                out[x] = unary(x.attr, a[0])
            case _:
                raise Unproved(f"{x.op} in a coefficient")
    return out[t]


LAWS = ("distribution", "composition", "identity")


def prove_merge(merge: Derived | Monoid) -> Proof:
    """The scalar laws of a merge, for all pivots and components: it distributes over the parts' sums, moving from r to r′ to r″
    is moving from r to r″, and moving from r to r changes nothing; of a derivation also that it does what it is for, the
    change of reference.  Means have a merge that does not depend on the bracketing."""
    sp = algebra()
    rows = merge.coef
    pivots = sorted({int(v[1:]) for row in rows for _, e in row for v in _names(e)})
    at = [{p: sp.Symbol(f"{'rst'[i]}{p}", positive=True) for p in pivots} for i in range(3)]  # positive: where roots are real

    def a(i: int, j: int, old: int, new: int) -> Expr:
        names = {f"r{p}": s for p, s in at[old].items()} | {f"R{p}": s for p, s in at[new].items()}
        return sp.Add(*(expression(e, names) for k, e in rows[i] if k == j))

    n = range(len(rows))
    x, y = ([sp.Symbol(f"{v}{j}", real=True) for j in n] for v in "xy")
    try:
        for i in n:
            moved = sp.Add(*(a(i, j, 0, 1) * (x[j] + y[j]) for j in n))
            if not scalar(moved, sp.Add(*(a(i, j, 0, 1) * v[j] for j in n for v in (x, y)))):
                return Proof(False, reason=f"component {i} does not distribute")
            for k in n:
                if not scalar(sp.Add(*(a(i, j, 1, 2) * a(j, k, 0, 1) for j in n)), a(i, k, 0, 2)):
                    return Proof(False, reason=f"components {i}, {k} do not compose")
                read = any(j == i for row in rows for j, _ in row)  # else it is computed from the others, and never moved itself
                if read and not scalar(a(i, k, 0, 0), sp.Integer(int(i == k))):
                    return Proof(False, reason=f"component {i} changes where no pivot does")
        steps = list(LAWS)
        if isinstance(merge, Derived):
            if not _changes_reference(merge):
                return Proof(False, reason="the change of reference does not hold")
            steps.append("change of reference")
        elif any(isinstance(p, tuple) and p[0] == "mean" for p in merge.pivots):
            if not _means_merge():
                return Proof(False, reason="means do not merge")
            steps.append("means")
        if isinstance(merge, Monoid) and any(isinstance(p, tuple) and p[0] == "at" for p in merge.pivots):
            if not _payloads_merge():
                return Proof(False, reason="payloads do not merge")
            steps.append("payloads")
    except Unproved as e:
        return Proof(False, reason=str(e))
    return Proof(True, tuple(steps))


def _names(e: Term) -> list[str]:
    return [t.attr for t in postorder([e]) if t.op == "var"]


def _changes_reference(d: Derived) -> bool:
    """bᵢ(c, R) = Σⱼ coefᵢⱼ(r, R)·bⱼ(c, r) for each element c: so for the sum over any number of them, by distribution."""
    sp = algebra()
    names = {v for t in (*d.basis, *(e for row in d.coef for _, e in row)) for v in _names(t)}
    old = {v: sp.Symbol(v, positive=True) for v in names}
    old |= {v.replace("R", "r"): sp.Symbol(v.replace("R", "r"), positive=True) for v in names if v[0] == "R"}
    old |= {v.replace("r", "R"): sp.Symbol(v.replace("r", "R"), positive=True) for v in names if v[0] == "r"}
    new = old | {v: old["R" + v[1:]] for v in old if v[0] == "r"}
    return all(
        scalar(expression(b, new), sp.Add(*(expression(e, old) * expression(d.basis[j], old) for j, e in row)))
        for b, row in zip(d.basis, d.coef)
    )


@cache
def _means_merge() -> bool:
    """The merged mean, r + (s − r)·m/(n + m), is the mean of all that both count, in any bracketing."""
    sp = algebra()
    r, s, t = sp.symbols("r s t", real=True)
    n, m, o = sp.symbols("n m o", positive=True)

    def merged(a: Expr, na: Expr, b: Expr, nb: Expr) -> Expr:
        return a + (b - a) * nb / (na + nb)

    whole = scalar(merged(r, n, s, m), (n * r + m * s) / (n + m))
    left = merged(merged(r, n, s, m), n + m, t, o)
    return whole and scalar(left, merged(r, n, merged(s, m, t, o), m + o))


@cache
def _payloads_merge() -> bool:
    """Payloads of the sides whose pivot is the merged one: for every order of three pivots, any bracketing gives those of the
    elements that attain it.  Payloads are sets here, which stand for any ⊕ that is associative, commutative and idempotent."""

    def merged(a: tuple[int, frozenset[int]], b: tuple[int, frozenset[int]]) -> tuple[int, frozenset[int]]:
        top = max(a[0], b[0])
        return top, frozenset().union(*(s for r, s in (a, b) if r == top))

    for ranks in itertools.product(range(3), repeat=3):
        a, b, c = ((r, frozenset([i])) for i, r in enumerate(ranks))
        whole = (max(ranks), frozenset(i for i, r in enumerate(ranks) if r == max(ranks)))
        if not merged(merged(a, b), c) == merged(a, merged(b, c)) == whole or merged(a, b) != merged(b, a):
            return False
    return True
