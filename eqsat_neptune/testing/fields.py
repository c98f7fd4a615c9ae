"""Exact evaluation: no rounding, so two values are equal or they are not.

Algebraic laws are tested over pairs of residues, Z_p × Z_q with q | p − 1: both halves add and multiply, and exp takes the second
half b to wᵇ in the first, where w has order q.  Its result has no second half, so exp may be applied once on a path; a
second one is outside the fragment.  An order has no meaning there: a maximum is an arbitrary function of its row, a comparison an
arbitrary predicate.  What holds for those holds for the real ones.

A false identity passes at a random point with a probability of at most D/q (Schwartz–Zippel): both sides are quotients of
polynomials in the inputs x and in wˣ, which are uniform over sets of p and q elements, and D bounds the degree of their
difference.  That needs exponents linear in the inputs with small coefficients; others are outside the fragment too.

Laws of order (max, min, abs, comparisons) are tested in exact rationals, with −inf and inf.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np

from ..errors import RuleError
from ..graph import Graph
from ..program import Program
from ..reference import Env, Value, apply
from ..rules.rule import Rule
from ..terms import Term, gather, make, num, postorder
from .graphs import blocks
from .instances import SHAPES, Maker, hints, instances, program
from .running import run
from .shrink import Case, Counterexample
from .values import arrays

P = 4611686018427376319
Q = 2305843009213688159
W = 4  # a square, so its order is q
ORDERED = ("lt", "le", "eq", "ne")


class Outside(Exception):
    """A term has no meaning in the domain; the message says why."""


class Undefined(Exception):
    """A division by zero at this point: another one must be drawn."""


@dataclass(frozen=True, slots=True)
class Residue:
    """A pair (mod p, mod q); the second half is None where exp was applied below."""

    p: int
    q: int | None

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Residue):
            return _absorbed(other)
        return Residue((self.p + other.p) % P, None if self.q is None or other.q is None else (self.q + other.q) % Q)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, Residue):
            raise Outside("infinity is multiplied")
        return Residue(self.p * other.p % P, None if self.q is None or other.q is None else self.q * other.q % Q)

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        return self.p != 0


def _absorbed(x: float) -> float:
    if x == -math.inf:
        return x
    raise Outside("inf or NaN is added")


# ------------------------------------------------------------------ evaluation


class Exact(ABC):
    """Evaluates terms over arrays of exact numbers."""

    def __init__(self, env: Env):
        self.env = env
        self.memo: dict[Term, Value] = {}

    def __call__(self, t: Term) -> Value:
        for x in postorder([t]):
            if x not in self.memo:
                axes, v = self.step(x.op, x.attr, [self.memo[a] for a in x.args])
                self.memo[x] = axes, v if isinstance(v, np.ndarray) else _array(v)
        return self.memo[t]

    def step(self, op: str, attr: Any, args: Sequence[Value]) -> Value:
        env = self.env
        match op:
            case "num":
                return (), _array(self.number(attr))
            case "iota":
                return (attr,), np.array([self.number(float(i)) for i in range(env.size(attr))], dtype=object)
            case "input" | "view":
                return apply(op, attr, args, env)
            case "gather":
                axes, i = args[1]
                return apply(op, attr, [args[0], (axes, np.vectorize(self.position, otypes=[float])(i))], env)
            case "red":
                f, axis = attr
                pad = self.number({"+": 0.0, "*": 1.0, "max": -math.inf, "min": math.inf}[f])
                order, x = env.explicit(axis, args[0], pad)
                rows = x.reshape(len(x), -1)
                out = np.empty(rows.shape[1], dtype=object)
                for j in range(rows.shape[1]):
                    out[j] = self.reduced(f, list(rows[:, j]))
                return env.whole(order[1:], out.reshape(x.shape[1:]))
            case "fold":
                raise Outside("a fold")
        axes, xs = env.align(args)
        shape = np.broadcast_shapes(*(x.shape for x in xs))
        columns = [np.broadcast_to(x, shape).ravel() for x in xs]
        out = np.empty(math.prod(shape), dtype=object)
        for j, values in enumerate(zip(*columns)):
            out[j] = self.scalar(op, attr, values)
        return axes, out.reshape(shape)

    def scalar(self, op: str, attr: Any, xs: Sequence[Any]) -> Any:
        match op:
            case "add":
                return reduce(lambda x, y: x + y, xs)
            case "mul":
                return reduce(lambda x, y: x * y, xs)
            case "where":
                return xs[1] if xs[0] else xs[2]
            case "un":
                return self.unary(attr, xs[0])
        return self.binary(attr, *xs)

    # what differs between the domains
    @abstractmethod
    def number(self, v: float) -> Any: ...

    @abstractmethod
    def position(self, x: Any) -> float: ...

    @abstractmethod
    def unary(self, f: str, x: Any) -> Any: ...

    @abstractmethod
    def binary(self, f: str, x: Any, y: Any) -> Any: ...

    @abstractmethod
    def reduced(self, f: str, xs: list[Any]) -> Any: ...

    @abstractmethod
    def same(self, x: Any, y: Any) -> bool: ...

    def agree(self, a: Value, b: Value) -> bool:
        _, (x, y) = self.env.align([a, b])
        x, y = np.broadcast_arrays(x, y)
        return all(self.same(u, v) for u, v in zip(x.ravel(), y.ravel()))


def _array(x: Any) -> np.ndarray:
    out = np.empty((), dtype=object)
    out[()] = x
    return out


class Fields(Exact):
    """Terms over Z_p × Z_q at one random point."""

    def __init__(self, env: Env, rng: np.random.Generator):
        super().__init__(env)
        self.rng = rng
        self.functions: dict[tuple, Residue] = {}

    def draw(self) -> Residue:
        return Residue(int(self.rng.integers(P)), int(self.rng.integers(Q)))

    def arbitrary(self, key: tuple, values: Callable[[], Residue]) -> Residue:
        """An arbitrary function: a value drawn once for each argument."""
        if key not in self.functions:
            self.functions[key] = values()
        return self.functions[key]

    def number(self, v: float) -> Any:
        if not math.isfinite(v):
            return v
        f = Fraction(v)
        return Residue(f.numerator * pow(f.denominator, -1, P) % P, f.numerator * pow(f.denominator, -1, Q) % Q)

    def position(self, x: Any) -> float:
        return float(x.p)

    def unary(self, f: str, x: Any) -> Any:
        if f == "exp":
            if x == -math.inf:
                return Residue(0, None)
            if not isinstance(x, Residue) or x.q is None:
                raise Outside("a second exp on a path" if isinstance(x, Residue) else "exp of inf")
            return Residue(pow(W, x.q, P), None)
        if f == "recip":
            if not isinstance(x, Residue):
                raise Outside("1/inf")
            if not x.p or x.q == 0:
                raise Undefined
            return Residue(pow(x.p, -1, P), None if x.q is None else pow(x.q, -1, Q))
        if f == "neg":
            return x * self.number(-1.0)
        if f == "not":
            return self.number(float(not x))
        raise Outside(f"{f} has no meaning in a field")

    def binary(self, f: str, x: Any, y: Any) -> Any:
        if f in ORDERED:
            return self.arbitrary((f, x, y), lambda: self.number(float(self.rng.integers(2))))
        if f in ("max", "min"):
            return self.arbitrary((f, x, y), self.draw)
        if f in ("and", "or", "xor"):
            a, b = bool(x), bool(y)
            return self.number(float({"and": a and b, "or": a or b, "xor": a != b}[f]))
        raise Outside(f"{f} has no meaning in a field")

    def reduced(self, f: str, xs: list[Any]) -> Any:
        if f in ("+", "*"):
            return reduce((lambda x, y: x + y) if f == "+" else (lambda x, y: x * y), xs, self.number(0.0 if f == "+" else 1.0))
        return self.arbitrary((f, *xs), self.draw)

    def same(self, x: Any, y: Any) -> bool:
        if not (isinstance(x, Residue) and isinstance(y, Residue)):
            return bool(x == y)
        return x.p == y.p and (x.q is None or y.q is None or x.q == y.q)


class Rationals(Exact):
    """Terms over the rationals, with inf, −inf and NaN."""

    def number(self, v: float) -> Any:
        return Fraction(v) if math.isfinite(v) else v

    def position(self, x: Any) -> float:
        return float(x)

    def unary(self, f: str, x: Any) -> Any:
        if f == "recip":
            if x == 0:
                raise Undefined
            return 1 / x if isinstance(x, Fraction) else Fraction(0) if math.isinf(x) else x
        if f in ("abs", "neg"):
            return abs(x) if f == "abs" else -x
        if f == "not":
            return Fraction(not x)
        if isinstance(x, Fraction) and f in ("floor", "ceil", "trunc", "round", "sign"):
            steps: dict[str, Callable[[Fraction], int]] = {
                "floor": math.floor,
                "ceil": math.ceil,
                "trunc": math.trunc,
                "round": round,
            }
            return Fraction((x > 0) - (x < 0)) if f == "sign" else Fraction(steps[f](x))
        raise Outside(f"{f} is not rational")

    def binary(self, f: str, x: Any, y: Any) -> Any:
        if f in ("max", "min"):
            return self.reduced(f, [x, y])
        if f in (*ORDERED, "and", "or", "xor"):
            a, b = bool(x), bool(y)
            test = {"lt": x < y, "le": x <= y, "eq": x == y, "ne": x != y, "and": a and b, "or": a or b, "xor": a != b}
            return Fraction(test[f])
        raise Outside(f"{f} is not rational")

    def reduced(self, f: str, xs: list[Any]) -> Any:
        if f in ("+", "*"):
            return reduce((lambda x, y: x + y) if f == "+" else (lambda x, y: x * y), xs, Fraction(f == "*"))
        if any(x != x for x in xs):
            return math.nan
        return (max if f == "max" else min)(xs, default=-math.inf if f == "max" else math.inf)

    def same(self, x: Any, y: Any) -> bool:
        return bool(x == y) or (x != x and y != y)


# ------------------------------------------------------------------ error bounds


def degree(t: Term, extents: Mapping[str, int]) -> tuple[int, int]:
    """Degrees of numerator and denominator of a term as a quotient of polynomials in inputs x and wˣ.  Outside if an exponent is
    not linear."""
    size = _sizes(extents)
    memo: dict[Term, tuple[int, int]] = {}
    for x in postorder([t]):
        d = [memo[a] for a in x.args]
        match x.op:
            case "num" | "iota":
                memo[x] = 0, 0
            case "add":
                below = sum(b for _, b in d)
                memo[x] = max(a + below - b for a, b in d), below
            case "mul":
                memo[x] = sum(a for a, _ in d), sum(b for _, b in d)
            case "un" if x.attr == "recip":
                memo[x] = d[0][1], d[0][0]
            case "un" if x.attr == "exp":
                memo[x] = _exponent(x.args[0], size)
            case "red" if x.attr[0] in ("+", "*"):
                n, (a, b) = size(x.attr[1]), d[0]
                memo[x] = (a + (n - 1) * b, n * b) if x.attr[0] == "+" else (n * a, n * b)
            case "where":
                memo[x] = max(d[1][0], d[2][0]), max(d[1][1], d[2][1])
            case "view" | "gather":
                memo[x] = d[0]
            case _:
                memo[x] = 1, 0  # an input, an arbitrary function
    return memo[t]


def _sizes(extents: Mapping[str, int]) -> Callable[[str], int]:
    return lambda axis: extents[axis.partition(".")[0]]  # a part has no more


def _exponent(t: Term, size: Callable[[str], int]) -> tuple[int, int]:
    """Degree of exp(t), numerator and denominator, in the variables wˣ (or w^(x/2), … where coefficients are fractions)."""
    memo: dict[Term, tuple[Fraction, Fraction, int]] = {}  # sums of positive and of negative coefficients; common denominator
    for x in postorder([t]):
        d = [memo[a] for a in x.args]
        match x.op:
            case "num" | "iota":
                memo[x] = Fraction(0), Fraction(0), 1
            case "add":
                memo[x] = (
                    sum(a for a, _, _ in d) + Fraction(0),
                    sum(b for _, b, _ in d) + Fraction(0),
                    math.lcm(*(c for *_, c in d)),
                )
            case "mul":
                numbers = [Fraction(a.attr) for a in x.args if a.op == "num" and math.isfinite(a.attr)]
                rest = [v for a, v in zip(x.args, d) if a.op != "num"]
                if len(rest) > 1 or len(numbers) + len(rest) != len(x.args):
                    raise Outside("an exponent is not linear: no error bound")
                c = math.prod(numbers, start=Fraction(1))
                a, b, m = rest[0] if rest else (Fraction(0), Fraction(0), 1)
                memo[x] = (a * c, b * c, m * c.denominator) if c >= 0 else (b * -c, a * -c, m * c.denominator)
            case "red" if x.attr[0] == "+":
                a, b, m = d[0]
                memo[x] = a * size(x.attr[1]), b * size(x.attr[1]), m
            case "where":
                (a, b, m), (e, f, n) = d[1], d[2]
                memo[x] = max(a, e), max(b, f), math.lcm(m, n)
            case "view" | "gather":
                memo[x] = d[0]
            case "input":
                memo[x] = Fraction(1), Fraction(0), 1
            case "red" | "bi":  # an arbitrary function
                memo[x] = Fraction(1), Fraction(0), 1
            case _:
                raise Outside("an exponent is not linear: no error bound")
    up, down, m = memo[t]
    return math.ceil(up * m), math.ceil(down * m)


# ------------------------------------------------------------------ rules


class _Short(Maker):
    """Constants are powers of two, so that what a rule computes from them is not rounded."""

    def var_number(self, name: str) -> float:
        if name not in self.number:
            others = list(self.number.values())
            self.number[name] = -self.pick(others) if others and self.chance(0.4) else self.pick(self.numbers)
        return self.number[name]

    numbers: tuple[float, ...] = (2.0, 0.5, -1.0, -2.0, 4.0, 0.0, math.inf, -math.inf)


class _Algebraic(_Short):
    """Instances of which all is a plain number: what the conditions ask holds."""

    numbers = (2.0, 0.5, -1.0, -2.0, 4.0, 0.25)

    def wild(self, axes: list[str], bounds: tuple[float, float] | None) -> Term:
        return self.input(axes, bounds if bounds and 0.0 not in bounds else (0.5, 2.0))

    def leaf(self, name: str = "") -> Term:
        hint = self.wanted.get(name)
        axes = self.axes()
        if hint is not None:
            axes = [a for a in axes if a not in {self.axis.get(k, k) for k in hint.without}]
        return self.input(axes, (-2.0, -0.5) if hint is not None and hint.negative else (0.5, 2.0))

    def make(self, p: Any) -> Term:
        if isinstance(p, list) and p[0] == "gather":
            return gather(self.make(p[2]), self.var_axis(p[1]), num(0.0))
        if isinstance(p, list) and p[0] == "un":
            self.text.setdefault(p[1], "exp")
        if isinstance(p, list) and p[0] == "red":
            self.text.setdefault(p[1], self.pick(["+", "*"]))
        return super().make(p)


@dataclass(frozen=True)
class Tested:
    """What exact evaluation found.  instances: how many were compared; bound: on the probability that a false identity passes (0
    where none is claimed); reason: why nothing could be compared."""

    instances: int
    bound: float = 0.0
    reason: str = ""
    counterexample: str | None = None


def field_test(rule: Rule, seed: int = 0, count: int = 4, points: int = 2) -> Tested:
    """The rule over Z_p × Z_q: every class of its e-graph has one value, at random points."""
    return _test(rule, seed, count, points, rational=False)


def rational_test(rule: Rule, seed: int = 0, count: int = 8, points: int = 2) -> Tested:
    """The rule in exact rationals, on instances with masks and infinities."""
    return _test(rule, seed, count, points, rational=True)


def _test(rule: Rule, seed: int, count: int, points: int, rational: bool) -> Tested:
    reason = ""
    passed: dict[tuple[Term, Term], float] = {}  # equation → probability that it passed at all its points though false
    for n, shapes in enumerate(SHAPES[:3]):
        rng = np.random.default_rng((seed, n, int(rational)))
        maker = (_Short if rational else _Algebraic)(rng, shapes.axes, hints(rule))
        p = program(rule.name, instances(rule, maker, count), maker.inputs.values(), maker.extents)
        try:
            graph, _ = run(rule, p)
        except RuleError:
            continue
        pairs = list(_pairs(graph, p))
        for point in range(points):
            env = Env(graph.extents, {}, blocks(graph, shapes.block), dtype=object)
            kind = ("plain", "ties", "rows masked")[point % 3]
            floats = arrays(p, kind, rng)
            domain: Exact = Rationals(env) if rational else Fields(env, rng)
            for name, x in floats.items():
                env.inputs[name] = _exactly(x) if rational else _drawn(x.shape, domain)
            for left, right in pairs:
                try:
                    agree = domain.agree(domain(left), domain(right))
                    d = (0, 0) if rational else _joint(left, right, graph.extents)
                except Outside as e:
                    reason = reason or str(e)
                    continue
                except Undefined:
                    continue
                if not agree and not rational and _ordered(left, right):
                    reason = reason or "the law needs that max and min are those of an order"
                    continue
                if not agree:
                    case = Case(
                        p,
                        floats,
                        shapes.block,
                        "in exact rationals" if rational else "over Z_p × Z_q",
                        left,
                        right,
                        extents=graph.extents,
                    )
                    return Tested(len(passed), counterexample=Counterexample.of(case, f"{rule.name}: two sides differ exactly"))
                passed[left, right] = passed.get((left, right), 1.0) * (d[0] + d[1]) / Q
    if not passed:
        return Tested(0, reason=f"outside the fragment: {reason}" if reason else "it did not apply")
    return Tested(len(passed), bound=max(passed.values()) if not rational else 0.0)


def _pairs(g: Graph, p: Program) -> Iterator[tuple[Term, Term]]:
    """Terms that the graph says are equal."""
    for o, c in zip(p.outputs, g.outputs):
        if o.term is not g.term(c):
            yield o.term, g.term(c)
    for c, nodes in g.nodes.items():
        for n in nodes[1:]:
            yield g.term(c), make(n.op, n.attr, [g.term(a) for a in n.args])


def _ordered(*terms: Term) -> bool:
    """Do they have anything that the fields take for an arbitrary function?"""
    functions = (*ORDERED, "max", "min")
    return any(t.op in ("bi", "red") and (t.attr if t.op == "bi" else t.attr[0]) in functions for t in postorder(terms))


def _joint(left: Term, right: Term, extents: Mapping[str, int]) -> tuple[int, int]:
    """Degree of left − right over a common denominator."""
    (a, b), (c, d) = degree(left, extents), degree(right, extents)
    return max(a + d, c + b), b + d


def _exactly(x: np.ndarray) -> np.ndarray:
    out = np.empty(x.shape, dtype=object)
    for i in np.ndindex(x.shape):
        out[i] = Fraction(float(x[i]))
    return out


def _drawn(shape: tuple[int, ...], domain: Exact) -> np.ndarray:
    assert isinstance(domain, Fields)
    out = np.empty(shape, dtype=object)
    for i in np.ndindex(shape):
        out[i] = domain.draw()
    return out
