"""What is known of a term where positions say so: masks as affine constraints, and where a term or an element of a reduction is nothing.

Terms come in, constraints (affine expressions of positions, ≥ 0 where they hold) go out: of a mask, those that it is the conjunction
of; of anything else, those outside of which it is a given value.  Loops then skip what they need not look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

from .. import terms as T
from ..terms import REDUCTIONS as IDENTITY
from ..terms import Affine, Term, affine_of
from .monoids import fold_needs, is_payload
from .real import Real


@lru_cache(1 << 12)  # every lowering of a search asks for the same
def constraints_of(c: Term) -> tuple[Affine, ...] | None:
    """The predicate as a conjunction of affine expressions that are ≥ 0, if it is one."""
    if (c.op == "bi" and c.attr == "and") or c.op == "mul":
        parts = [constraints_of(a) for a in c.args]
        known = [p for p in parts if p is not None]
        return tuple(dict.fromkeys(x for p in known for x in p)) if len(known) == len(parts) else None
    if c.op == "un" and c.attr == "not" and c.args[0].op == "bi" and c.args[0].attr in ("lt", "le"):
        n = c.args[0]
        return constraints_of(T.bi("le" if n.attr == "lt" else "lt", n.args[1], n.args[0]))
    if c.op == "bi" and c.attr in ("lt", "le", "eq"):
        a, b = map(affine_of, c.args)
        if a is None or b is None:
            return None
        up = b.plus(a, -1)
        return {"le": (up,), "lt": (up.plus(Affine(-1)),), "eq": (up, a.plus(b, -1))}[str(c.attr)]
    return None


def predicate_of(t: Term) -> tuple[Affine, ...] | None:
    """The constraints that the term is the mask of, if it is one."""
    return constraints_of(t) if t.free and t.op in ("bi", "un", "mul") else None


def _known(c: Term) -> frozenset[Affine]:
    """Constraints that hold wherever the predicate does (not necessarily all of it)."""
    if (c.op == "bi" and c.attr == "and") or c.op == "mul":
        return frozenset().union(*map(_known, c.args))
    return frozenset(constraints_of(c) or ())


# functions with f(0) = 0
_KEEPS_ZERO = frozenset(
    "neg tanh sin sinh asin asinh atan atanh tan abs sqrt sign erf expm1 log1p floor ceil round trunc".split()
)

# term → value → the constraints that make it so: a memo
Vanishing = dict[Term, dict[float, frozenset[Affine]]]


def vanishing(t: Term, to: float, memo: Vanishing, real: Real) -> frozenset[Affine]:
    """Constraints each of which, where it is negative, makes `t` equal to `to` (0, −inf or inf): a factor 0 beside real numbers, a
    term −inf beside what is no +inf.  A row without any key has a statistic −inf, and what the source makes of it, NaN, may show far
    beyond the row: in a sum over the rows."""
    for x in T.postorder([t], memo):
        memo[x] = {value: _vanishing(x, value, memo, real) for value in (0.0, -math.inf, math.inf)}
    return memo[t].get(to, frozenset())


def _vanishing(t: Term, to: float, memo: Vanishing, real: Real) -> frozenset[Affine]:
    def any_of(args: tuple[Term, ...], to: float, harmless: Callable[[Term], bool]) -> frozenset[Affine]:
        """Those by which one of the arguments becomes `to`, where all others do too or are harmless beside it."""
        wild = [memo[a][to] for a in args if not harmless(a)]
        some = frozenset().union(*(memo[a][to] for a in args))
        return some.intersection(*wild)

    def all_of(args: Iterable[Term], to: float) -> frozenset[Affine]:
        sets = [memo[a][to] for a in args]
        return frozenset.intersection(*sets) if sets else frozenset()

    match t.op, t.attr:
        case "where", _:
            c, x, y = t.args
            hit = memo[x][to]
            return hit | _known(c) if T.is_num(y, to) else hit & memo[y][to]
        case "add", _:
            return all_of(t.args, 0.0) if to == 0 else any_of(t.args, to, real.below if to < 0 else real.finite)
        case "mul", _:
            if to == 0:
                return any_of(t.args, 0.0, real.finite)
            scale = [a.attr for a in t.args if a.op == "num"]
            rest = [a for a in t.args if a.op != "num"]
            if len(rest) == 1 and scale and all(scale):
                return memo[rest[0]][to if math.prod(scale) > 0 else -to]
            return frozenset()
        case "un", ("exp" | "exp2"):
            return memo[t.args[0]][-math.inf] if to == 0 else frozenset()
        case "un", "log":
            return memo[t.args[0]][0.0] if to == -math.inf else frozenset()
        case "un", f if to == 0 and f in _KEEPS_ZERO:
            return memo[t.args[0]][0.0]
        case "bi", "and" if to == 0:
            return _known(t)
        case "bi", ("lt" | "le" | "eq") if to == 0:
            return _known(t)
        case "bi", ("max" | "min"):
            return all_of(t.args, to)
        case "red", (op, axis) if to == IDENTITY[op]:
            return frozenset(c for c in memo[t.args[0]][to] if not any(T.depends(frozenset([a]), axis) for a in c.axes))
    return frozenset()


def nothing_outside(t: Term, memo: Vanishing, real: Real) -> frozenset[Affine]:
    """Constraints outside of which an element adds nothing to this reduction."""
    if t.op == "red":
        return vanishing(t.args[0], IDENTITY[t.attr[0]], memo, real)
    h, comp, _ = t.attr
    ps, xs = fold_needs(h, comp, t.args)
    named = [p for p in ps if isinstance(h.pivots[p], str)]
    sets = [vanishing(t.args[p], IDENTITY[h.pivots[p]], memo, real) for p in named]
    sets += [vanishing(t.args[p], IDENTITY[h.pivots[p][2]], memo, real) for p in ps if is_payload(h.pivots[p])]
    for i in xs:  # what no such pivot weighs must be 0 itself
        for j, e in h.coef[i]:
            x = t.args[len(h.pivots) + j]
            if j in xs and not T.is_num(x, 0.0) and not {f"r{p}" for p in named} & set(T.variables(e)):
                sets.append(vanishing(x, 0.0, memo, real))
    return frozenset.intersection(*sets) if sets else frozenset()
