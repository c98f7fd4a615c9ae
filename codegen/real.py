"""What is known of values, whatever the inputs: that they are real numbers, that they are no +∞ and no NaN, that they are not 0, from
the terms and from what `plan.Buffer.known` says of memory.  Neither overflow nor underflow is considered."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .. import terms as T
from ..extraction.plan import Buffer
from ..terms import Affine, Monoid, Term

FINITE, BELOW, NONZERO, NONNEG = "finite", "below", "nonzero", "nonneg"  # below: a real number or −∞
_BOUNDED = frozenset({"tanh", "erf", "atan", "sign", "exp", "exp2", "expm1"})  # real numbers of −∞, too
_REAL = frozenset({"neg", "abs", "floor", "ceil", "round", "trunc", "sin", "cos", "sinh", "cosh", "asinh"})
_KEEPS_BELOW = frozenset({"floor", "ceil", "round", "trunc"})
_KEEPS_NONZERO = frozenset({"neg", "abs", "sign", "tanh", "erf", "atan", "sinh", "asinh", "expm1", "recip"})
_SEVERAL = ("max", "min")
_POSITIVE = ("exp", "exp2")

Facts = frozenset[str]


def reached(mask: Term, axis: str, extents: Mapping[str, int]) -> bool:
    """Does the condition hold somewhere along the axis, wherever one is along all others?  False where that cannot be told: for
    what are no affine constraints, or takes the axis in steps."""
    from .predicates import constraints_of  # which imports this module

    constraints = constraints_of(mask)
    if (
        constraints is None
        or any(a not in extents for a in (axis, *(a for c in constraints for a in c.axes)))
        or not extents[axis]
    ):
        return False
    ends = [Affine(0, ((axis, 1),)), Affine(extents[axis] - 1, ((axis, -1),))]  # both ≥ 0, too
    least, most = [], []  # of the position along the axis
    for c in (*ends, *constraints):
        step = dict(c.terms).get(axis, 0)
        rest = Affine(c.const, tuple(x for x in c.terms if x[0] != axis))
        if step == 1:
            least.append(Affine().plus(rest, -1))
        elif step == -1:
            most.append(rest)
        elif step or rest.bounds(dict(extents))[0] < 0:
            return False
    return all(m.plus(n, -1).bounds(dict(extents))[0] >= 0 for m in most for n in least)


class Real:
    """Facts of terms that read these buffers, over axes of these extents."""

    def __init__(self, buffers: Mapping[str, Buffer], extents: Mapping[str, int]):
        self.buffers, self.extents = buffers, extents
        self.memo: dict[Term, Facts] = {}

    def finite(self, t: Term) -> bool:
        return FINITE in self.facts(t)

    def below(self, t: Term) -> bool:
        return BELOW in self.facts(t)

    def facts(self, t: Term) -> Facts:
        for x in T.postorder([t], self.memo):
            if x not in self.memo:  # facts of one may rest on those of others
                facts = self._facts(x)
                self.memo[x] = facts | {BELOW} if FINITE in facts else facts
        return self.memo[t]

    def _facts(self, t: Term) -> Facts:
        args = [self.memo[a] for a in t.args]
        common: Facts = frozenset.intersection(*args) if args else frozenset()
        match t.op, t.attr:
            case "num", v:
                facts = {FINITE} if math.isfinite(v) else {BELOW} if v == -math.inf else set()  # type: ignore[arg-type, type-var]
                return frozenset(facts | ({NONZERO} if v else set()) | ({NONNEG} if v >= 0 else set()))  # type: ignore[operator]
            case "iota", _:
                return frozenset({FINITE, NONNEG})
            case (("input" | "gather"), _):
                x = t if t.op == "input" else t.args[0]
                b = self.buffers.get(x.attr[0]) if x.op == "input" else None  # type: ignore[index]
                facts = set(b.known) if b is not None else set()
                return frozenset(facts | ({BELOW} if b is not None and b.kind == "input" else set()))  # no input is +∞
            case "add", _:
                some = {NONZERO} if NONNEG in common and any(NONZERO in a for a in args) else set()
                return frozenset(common & {FINITE, BELOW, NONNEG} | some)
            case "mul", _:
                return common & {FINITE, NONZERO, NONNEG} | self._product(t)
            case "where", _:
                return args[1] & args[2]
            case "bi", f if f in T.PREDICATES:
                return frozenset({FINITE, NONNEG})
            case "bi", f if f in _SEVERAL:
                return common
            case "un", f if f in T.PREDICATES:
                return frozenset({FINITE, NONNEG})
            case "un", str(f):
                return self._unary(f, args[0])
            case "red", (op, axis):
                kept = {FINITE, BELOW, NONNEG} if op == "+" else {FINITE, NONZERO, NONNEG} if op == "*" else args[0]
                return args[0] & kept | ({FINITE} if op == "max" and self._attained(t.args[0], axis) else set())
            case "fold", (h, component, axis):
                return self._folded(t, h, component, axis)
            case "view", _:
                return args[0] - {NONZERO}  # 0 where it leaves what it reads
        return frozenset()

    def _attained(self, x: Term, axis: str) -> bool:
        """Is one element along the axis a real number, everywhere?  Of what is masked: where something is left."""
        if FINITE in self.facts(x):
            return True
        return (
            x.op == "where"
            and T.is_num(x.args[2], -math.inf)
            and self.finite(x.args[1])
            and reached(x.args[0], axis, self.extents)
        )

    def _folded(self, t: Term, h: Monoid, component: int, axis: str) -> Facts:
        """Of folds whose pivots are maxima: what has moved to the greatest is no greater than before.  Where that is a real number,
        a sum that counts its element as 1 is no less, if others count by exponentials (by a ratio they may count negatively)."""
        pivots, linear = h.needed(component)
        if any(h.pivots[p] != "max" or not self.below(t.args[p]) for p in pivots):
            return frozenset()
        if component < len(h.pivots):
            return frozenset({BELOW} | ({FINITE} if self._attained(t.args[component], axis) else set()))
        xs = [t.args[len(h.pivots) + j] for j in linear]
        if not all(self.finite(x) for x in xs):
            return frozenset()
        ones = len(xs) == 1 and T.is_num(xs[0], 1.0) and all(e.op == "un" and e.attr in _POSITIVE for _, e in h.coef[linear[0]])
        counts = ones and len(pivots) == 1 and self._attained(t.args[pivots[0]], axis)
        return frozenset({FINITE} | ({NONZERO, NONNEG} if counts else set()))

    def _product(self, t: Term) -> Facts:
        """What squares and multiples are."""
        rest = [a for a in t.args if a.op != "num"]
        positive = all(a.attr > 0 and math.isfinite(a.attr) for a in t.args if a.op == "num")  # type: ignore[operator, arg-type]
        if not positive or not rest:
            return frozenset()
        if len(rest) == 1:
            return self.memo[rest[0]] & {BELOW, NONNEG}
        return frozenset({NONNEG}) if len(rest) == 2 and rest[0] is rest[1] else frozenset()

    def _unary(self, f: str, x: Facts) -> Facts:
        out: set[str] = set()
        positive = {NONZERO, NONNEG} <= x
        if (f in _BOUNDED and BELOW in x) or (f in _REAL and FINITE in x):
            out.add(FINITE)
        if f in _KEEPS_BELOW and BELOW in x:
            out.add(BELOW)
        if FINITE in x and ((f == "recip" and NONZERO in x) or (f in ("rsqrt", "log", "log2", "log10") and positive)):
            out.add(FINITE)
        if f in ("sqrt", "log1p") and {FINITE, NONNEG} <= x:
            out.add(FINITE)
        if (f in ("exp", "exp2", "cosh") and FINITE in x) or (f in _KEEPS_NONZERO and {FINITE, NONZERO} <= x):
            out.add(NONZERO)
        if f in ("sqrt", "rsqrt") and positive and FINITE in x:
            out.add(NONZERO)
        if f in ("exp", "exp2", "abs", "cosh", "sqrt", "rsqrt") or (f in ("recip", "tanh", "erf") and NONNEG in x):
            out.add(NONNEG)
        return frozenset(out)
