"""Deriving merges: what a part of a sum must carry so that it can be moved to other pivots.

Given g(c…, R…) over scalars, find a basis b₀ = g, b₁, … closed under change of reference:

    Σₖ bᵢ(cₖ, R) = Σⱼ coefᵢⱼ(r, R) · Σₖ bⱼ(cₖ, r)      for all r and R.

It is found by a second, small saturation with the rules of the main one.  There the cᵢ and r depend on k, the R do not; a
sum that is shifted by a pivot, c − R, is written (c − r) + D, where D = r − R does not depend on k either.  Hoisting out of
Σₖ then does all the work: what it leaves inside Σₖ, free of R, is a basis.  Each new element is expanded in its turn until
nothing new appears. A pivot that only scales (c/R) needs no change: hoisting takes it out.

A basis must be centred: an atom that g shifts by a pivot occurs in it only so shifted, never alone.  Otherwise Σ(c−R)²
would close over Σc² and Σc, which cancel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from ..engine import EGraph, Limits
from ..graph import Graph, Node
from ..terms import Term, add, is_num, make, mul, nary, num, postorder, red, rewrite, sub, substitute, un, var, variables
from . import analyses, declared
from .rule import Rule

STAGES = (3, 1, 1, 2)  # iterations before each attempt: the first that succeeds is the smallest
LIMITS = Limits(nodes=1500, seconds=0.5)
MOST = 5  # components
_USED = (
    "flatten-product",
    "exp-of-parted-sum",
    "sum-factor-out",
    "reciprocal-of-product",
    "reciprocal-of-multiple",
    "distribute",
    "sum-of-sum",
    "sum-of-constant",
    "single-product",
    "single-sum",
    "unit-factor",
    "zero-term",
    "constant-factors",
    "constant-terms",
    "constant-reciprocal",
    "exp-of-zero",
    "cancel-factor",
    "cancel-term",
)
_SCHEDULES = ("(run algebra)", "(run expand)")

Row = tuple[tuple[int, Term], ...]  # (j, coefficient over r…, R…)


@dataclass(frozen=True)
class Derived:
    """basis[i]: term over c…, r…; coef[i]: (j, coefficient over r…, R…) for each j that it takes something from."""

    basis: tuple[Term, ...]
    coef: tuple[Row, ...]

    def moved(self, old: list[Term], new: list[Term], i: int = 0) -> list[tuple[int, Term]]:
        """Coefficients of component i with terms put in for the pivots."""
        m = {var(f"r{p}"): t for p, t in enumerate(old)} | {var(f"R{p}"): t for p, t in enumerate(new)}
        return [(j, substitute(e, m)) for j, e in self.coef[i]]


@cache
def _rules() -> tuple[Rule, ...]:
    return tuple(r for r in declared.RULES if r.name in _USED)


def _declarations() -> list[str]:
    """The reals, with nothing infinite: every term has every fact that a rule may ask for, except that a sum may be 0."""
    real = [
        f"(rule ((= t {p})) ({a}) :ruleset an)"
        for p, a in itertools.product(
            ("(Un f x)", "(Add ms)", "(Mul ms)", "(Red op k x)", "(Num v)", "(Input v)"),
            ('(set (has "finite" t) ()) (set (has "noinf" t) ())',),
        )
    ]
    nonzero = ['(rule ((= t (Un "exp" x))) ((set (has "nonzero" t) ())) :ruleset an)']
    return [
        "(ruleset ix) (ruleset prune) (ruleset norm) (ruleset an) (ruleset algebra) (ruleset expand)",
        "(rule () ((nth 0) (nth 1)) :ruleset an)",
        *analyses.INDEX,
        *analyses.PAIRS,
        *analyses.AXES,
        *real,
        *nonzero,
        *declared.LATER[:6],
        *(r.egglog for r in _rules()),
    ]


def derive(g: Term, pivots: int) -> Derived | None:
    """The joint merge of g, a term over c0…, R0… R(pivots-1), or None if there is none.  Remembered by structure,
    rejections too."""
    g = simplified(g)  # sums flat
    key = (g, pivots)
    if key not in _DERIVED:
        _DERIVED[key] = None if _hopeless(g) else _derive(g, pivots)
    return _DERIVED[key]


def _hopeless(g: Term) -> bool:
    """Is a pivot inside a function that neither shifting nor scaling moves out of: anything but exp, and powers of products?"""
    for t in postorder([g]):
        if t.op == "un" and t.attr not in ("exp", "exp2") and any(v[0] == "R" for v in variables(t)):
            if t.attr not in ("recip", "sqrt", "rsqrt", "abs") or any(x.op == "add" for x in postorder([t.args[0]])):
                return True
    return False


_DERIVED: dict[tuple[Term, int], Derived | None] = {}


def forget() -> None:
    """Empty the memory of derivations (for benches)."""
    _DERIVED.clear()


def _derive(g: Term, pivots: int) -> Derived | None:
    new = {var(f"r{p}"): var(f"R{p}") for p in range(pivots)}
    basis = [substitute(g, {v: k for k, v in new.items()})]
    coef: list[Row] = []
    while len(coef) < len(basis):
        row = _row(substitute(basis[len(coef)], new), basis) if len(basis) <= MOST else None
        if row is None:
            return None
        coef.append(row)
    return Derived(tuple(basis), tuple(coef))


def _shift(g: Term) -> tuple[Term, dict[Term, Term]]:
    """g with every sum that pivots shift, c + P(R), written (c + P(r)) − D; and what each D stands for: P(r) − P(R)."""
    moved: dict[Term, Term] = {}

    def at_old(t: Term) -> Term:
        return substitute(t, {var(v): var("r" + v[1:]) for v in variables(t)})

    def f(t: Term, args: tuple[Term, ...]) -> Term | None:
        if t.op != "add":
            return None
        pivots = [a for a in args if {v[0] for v in variables(a)} == {"R"}]
        inside = [a for a in args if any(v[0] in "cr" for v in variables(a))]
        outside = [a for a in args if a not in pivots and a not in inside]
        if not pivots or not inside:
            return None
        for a in pivots:
            scale = math.prod(x.attr for x in a.args if x.op == "num") if a.op == "mul" else 1.0  # type: ignore[misc]
            p = nary("mul", [x for x in a.args if x.op != "num"]) if a.op == "mul" else a
            d = next((d for d, e in moved.items() if e is sub(at_old(p), p)), None)
            if d is None:
                d = var(f"D{len(moved)}")
                moved[d] = sub(at_old(p), p)
            inside.append(at_old(a))
            outside.append(mul(-scale, d))
        return make("add", None, [make("add", None, inside), *outside])

    return rewrite([g], f)[0], moved


def _row(g: Term, basis: list[Term]) -> Row | None:
    """Coefficients of Σ g(c, R) over the sums of the basis at r; appends what the basis lacks."""
    shifted, moved = _shift(g)
    body = [red("+", "k", b) for b in basis]
    names = dict.fromkeys(v for t in (shifted, *basis) for v in variables(t))
    with EGraph(_declarations, "derive") as eg:
        eg.axis("k")
        eg.act('(set (parts "a0") (set-of "a0")) (set (beside "a0") (set-empty)) (leaf-of "a0" "a0") (redaxis "a0")')
        eg.act(f"(set (handle 0) {eg.name(red('+', 'k', shifted), 'source')})")
        for v in (*names, *(f"Y{j}" for j in range(len(basis)))):
            eg.act(f"(set (free {eg.name(var(v))}) {_ALONG_K if v[0] in 'cr' else '(set-empty)'})")
            if v[0] in "rR":
                eg.act(f'(set (has "nonzero" {eg.name(var(v))}) ())')
        for j, b in enumerate(body):
            eg.act(f"(union {eg.name(b, 'source')} {eg.name(var(f'Y{j}'))})")
        eg.flush()
        for iterations in STAGES:
            stop = eg.saturate("derive", _SCHEDULES, replace(LIMITS, iterations=iterations)).stop
            row = _solve(eg.freeze(1), g, basis, moved)
            if row is not None or stop != "iterations":
                break
    return row


_ALONG_K = '(set-of "a0")'
Cost = Callable[[Node, Callable[[int], float]], float]


def relax(graph: Graph, cost: Cost) -> dict[int, tuple[float, Node]]:
    """The cheapest node of each class under a cost that grows with its arguments' costs."""
    best: dict[int, tuple[float, Node]] = {}

    def known(c: int) -> float:
        return best[c][0] if c in best else math.inf

    changed = True
    while changed:
        changed = False
        for c, n in graph.items():
            v = cost(n, known)
            if v < known(c):
                best[c], changed = (v, n), True
    return best


def _solve(graph: Graph, g: Term, basis: list[Term], moved: dict[Term, Term]) -> Row | None:
    """Write G = Σ g over Y… (known sums) and new sums of pure bodies, with as few new ones as possible."""

    def pure_cost(n: Node, known: Callable[[int], float]) -> float:
        if n.op == "red" or (n.op == "var" and str(n.attr)[0] not in "cr"):
            return math.inf
        return 1 + sum(map(known, n.args))

    pure = relax(graph, pure_cost)

    def build(c: int, table: dict[int, tuple[float, Node]]) -> Term:
        n = table[c][1]
        return simplify(make(n.op, n.attr, [build(a, table) for a in n.args]))

    shifted = _shifted(g)
    bodies = {n.args[0]: build(n.args[0], pure) for _, n in graph.items() if n.op == "red" and n.args[0] in pure}
    candidates = sorted((c for c, b in bodies.items() if _centred(b, shifted)), key=lambda c: (-pure[c][0], c))
    keep = set(candidates)

    def outer_cost(n: Node, known: Callable[[int], float]) -> float:
        if n.op == "var":
            return math.inf if str(n.attr)[0] in "cr" else 1.0
        if n.op == "red":
            return 1.0 if n.args[0] in keep else math.inf
        return 1 + sum(map(known, n.args))

    root = graph.outputs[0]
    if root not in relax(graph, outer_cost):
        return None
    for c in candidates:  # an inclusion-minimal set of new sums, the dearest dropped first
        keep.discard(c)
        if root not in relax(graph, outer_cost):
            keep.add(c)
    table = relax(graph, outer_cost)

    def write(c: int) -> Term:
        n = table[c][1]
        if n.op == "red":
            body = bodies[n.args[0]]
            if body not in basis:
                basis.append(body)
            return var(f"Y{basis.index(body)}")
        return simplify(make(n.op, n.attr, [write(a) for a in n.args]))

    rows = _linear(write(root))
    if rows is None:
        return None
    return tuple((j, simplified(substitute(e, moved))) for j, e in sorted(rows.items()))


def _linear(t: Term) -> dict[int, Term] | None:
    """{j: coefficient} of a term that is linear in the Y's; None if it is not."""
    if t.op == "var" and t.attr[0] == "Y":  # type: ignore[index]
        return {int(t.attr[1:]): num(1.0)}  # type: ignore[index]
    if t.op == "add":
        out: dict[int, Term] = {}
        for a in t.args:
            part = _linear(a)
            if part is None:
                return None
            for j, e in part.items():
                out[j] = add(out[j], e) if j in out else e
        return out
    if t.op == "mul":
        ys = [a for a in t.args if any(v[0] == "Y" for v in variables(a))]
        part = _linear(ys[0]) if len(ys) == 1 else None
        if part is None:
            return None
        rest = [a for a in t.args if a is not ys[0]]
        return {j: nary("mul", [*rest, e], flatten=True) for j, e in part.items()}
    return None


def _shifted(g: Term) -> frozenset[str]:
    """Atoms that g shifts by a pivot."""
    return frozenset(
        v for t in postorder([g]) if t.op == "add" and any(v[0] == "R" for v in variables(t)) for v in variables(t) if v[0] == "c"
    )


def _centred(t: Term, shifted: frozenset[str], inside: bool = False) -> bool:
    """Do shifted atoms and pivots occur only together, in a sum or as a divisor?"""
    if t.op == "var":
        return inside or (t.attr not in shifted and t.attr[0] != "r")  # type: ignore[index]
    vs = variables(t)
    inside = inside or (t.op == "add" and any(v[0] == "r" for v in vs) and any(v[0] == "c" for v in vs))
    inside = inside or (t.op == "un" and t.attr == "recip" and all(v[0] == "r" for v in vs))
    return all(_centred(a, shifted, inside) for a in t.args)


# ------------------------------------------------------------------ scalars

NEAR = 1e-12  # constants nearer than this (relatively) are rounding apart


def simplify(t: Term) -> Term:
    """One node: like terms collected, x/x, 0·x, e⁰ and constants.  Enough for singletons and coefficients."""
    if t.op == "add":
        return _collected(t)
    if t.op == "mul":
        y = nary("mul", t.args, flatten=True)
        xs = list(y.args) if y.op == "mul" else [y]
        if any(is_num(x, 0.0) for x in xs):
            return num(0.0)
        for x in list(xs):
            inverse = un("recip", x)
            if x in xs and inverse in xs and x is not inverse:
                xs.remove(x)
                xs.remove(inverse)
        return nary("mul", xs)
    if t.op == "un" and t.args[0].op == "num":
        if is_num(t.args[0], 0.0) and t.attr in ("exp", "exp2"):
            return num(1.0)
        if t.attr == "recip" and not is_num(t.args[0], 0.0):
            return num(1.0 / t.args[0].attr)  # type: ignore[operator]
    return t


def _collected(t: Term) -> Term:
    """A sum with like terms collected: Σ number·product, products up to order."""
    parts: dict[tuple[int, ...], tuple[float, float, list[Term]]] = {}  # product → (number, largest seen, factors)
    for v, factors in _terms(t, 1.0):
        key = tuple(sorted(map(id, factors)))
        old, most, _ = parts.get(key, (0.0, 0.0, factors))
        parts[key] = (old + v, max(most, abs(v)), factors)
    live = [nary("mul", [*factors, num(v)]) for v, most, factors in parts.values() if abs(v) > NEAR * most]
    return nary("add", live)


def _terms(t: Term, scale: float) -> Iterator[tuple[float, list[Term]]]:
    if t.op == "add":
        for a in t.args:
            yield from _terms(a, scale)
    elif t.op == "num" and math.isfinite(t.attr):  # type: ignore[arg-type]
        yield scale * t.attr, []  # type: ignore[operator]
    elif t.op == "mul":
        y = nary("mul", t.args, flatten=True)
        xs = list(y.args) if y.op == "mul" else [y]
        numbers = [x for x in xs if x.op == "num" and math.isfinite(x.attr)]  # type: ignore[arg-type]
        rest = [x for x in xs if x not in numbers]
        scale *= math.prod(x.attr for x in numbers)  # type: ignore[misc]
        if len(rest) == 1 and rest[0].op == "add":
            yield from _terms(rest[0], scale)
        else:
            yield scale, rest
    else:
        yield scale, [t]


def simplified(t: Term) -> Term:
    """`simplify` at every node, bottom-up."""
    return rewrite([t], lambda x, args: simplify(make(x.op, x.attr, args)) if args else None)[0]


PARTIAL = {"recip": "nonzero", "rsqrt": "positive", "sqrt": "nonnegative", "log": "positive"}


def obligations(d: Derived) -> Iterator[tuple[str, int]] | None:
    """(what, pivot): domain conditions under which every coefficient and basis element is defined; None if one is about anything
    but a single pivot.  They must hold of every singleton, for they must hold on every part."""
    out: set[tuple[str, int]] = set()
    for t in postorder([*d.basis, *(e for row in d.coef for _, e in row)]):
        if t.op == "un" and t.attr in PARTIAL:
            x = t.args[0]
            if x.op != "var" or x.attr[0] not in "rR":  # type: ignore[index]
                return None
            out.add((PARTIAL[t.attr], int(x.attr[1:])))  # type: ignore[index]
        elif t.op in ("bi", "where") or (
            t.op == "un" and t.attr not in ("exp", "exp2", "tanh", "neg", "abs", "sin", "cos", "erf")
        ):
            return None
    return iter(sorted(out))
