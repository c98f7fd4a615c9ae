"""Folds as explicit state: what of a fold's monoid is carried through a loop, and the statements that absorb a tile into it.

Pivots advance first, then each linear component:  xᵢ ← Σⱼ Aᵢⱼ(r, R)·xⱼ + Σ_tile Σⱼ Aᵢⱼ(m, R)·sⱼ
with r the old pivots, R the new ones, m and s the tile's singletons (the merge of `Monoid` with the tile absorbed at the
merged pivot).  Where a max or min pivot is at its identity the coefficient counts as 0.  A payload is reduced over those elements,
the old state among them, that are at the new pivot: both sides of that comparison are one value, so it cannot miss.

Any value serves as a pivot, if all state is relative to it.  One that is a function of components, divided by a sum of weights, would
move with every tile: in a loop it *lags*, and moves only where the weights have doubled since it did (so it is never far from the
truth: most of what is weighed has been counted in it).  What leaves the loop is moved to the true value there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import terms as T
from ..terms import REDUCTIONS as IDENTITY
from ..terms import Term
from .monoids import difference, fold_needs, infinite_when_empty, is_fn, is_payload, vanishes_at_identity
from .placing import LoweringError, Path
from .tile import Carry, Value

if TYPE_CHECKING:
    from .lower import Lowering


class FoldState:
    """One fold being absorbed, at one place.  Pivots and components are shared between folds by what they are made of."""

    def __init__(self, low: Lowering, t: Term, here: Path, carries: dict[object, Carry] | None):
        self.low, self.t, self.here, self.carries = low, t, here, carries
        self.h, self.comp, self.axis = t.attr
        self.n = len(self.h.pivots)
        self.singles = t.args
        self.need_p, self.need_x = fold_needs(self.h, self.comp, t.args)
        self.new: dict[tuple[str, int], Value] = {}  # ("p" | "x", index) → new value
        self.after: dict[tuple[str, int], Value] = {}  # → value after the loop
        self.old: dict[tuple[str, int], Value | None] = {}
        self.left = False  # is the loop printed?

    def zero(self, j: int) -> bool:
        return T.is_num(self.singles[self.n + j], 0.0)

    def component(self) -> Value:
        todo = [("p", p) for p in self.need_p] + [("x", j) for j in self.need_x]
        while todo:  # a component may need a pivot that is made of other components
            ready = [w for w in todo if self.ready(*w)]
            if not ready:
                raise LoweringError(f"circular state in {self.h}")
            for w in ready:
                self.advance(*w)
            todo = [w for w in todo if w not in ready]
        what = ("p", self.comp) if self.comp < self.n else ("x", self.comp - self.n)
        return self.new[what] if self.carries is None else self.after[what]

    def lags(self, p: int) -> bool:
        return self.carries is not None and is_fn(self.h.pivots[p]) and self.weight(p) is not None

    def weight(self, p: int) -> int | None:
        """The component that a pivot is divided by, if there is one and no other pole (where nothing is counted it is undefined)."""
        e = self.h.pivots[p][1]  # type: ignore[index]
        inverses = {t.args[0] for t in T.postorder([e]) if t.op == "un" and t.attr == "recip"}
        if len(inverses) != 1 or infinite_when_empty(e):
            return None
        (x,) = inverses
        j = int(x.attr[1:]) if x.op == "var" else -1  # type: ignore[index]
        return j if j >= 0 and [i for i, _ in self.h.coef[j]] == [j] else None

    def lag(self, p: int, now: Value, old: Value) -> Value:
        """The pivot, moved if its weights have doubled; how much they were is state beside it."""
        low, here, j = self.low, self.here, self.weight(p)
        assert j is not None and self.carries is not None
        key = ("weight", self.key("p", p))
        c = low.carry(self.carries, key, self.axes("p", p), 0.0, "linear")
        ((_, e),) = self.h.coef[j]
        then = c.phi if T.is_num(e, 1.0) else low.map(here, "mul", (self.coefficient(e, "old"), c.phi), "rescale")
        moves = low.map(here, "lt", (low.map(here, "mul", (then, low.const(2.0))), self.new["x", j]))
        self.carries[key] = Carry(c.init, c.phi, low.map(here, "where", (moves, self.new["x", j], then)), c.out, c.kind, c.op)
        return low.map(here, "where", (moves, now, old), "pivot")

    def arrived(self, p: Path) -> Value:
        """What the fold is after the loop, at the true values of pivots that lag.  p: where the loop is."""
        self.here, self.left = p, True
        for i in self.need_p:
            self.old["p", i] = self.new["p", i] = self.after["p", i]
        i = self.comp if self.comp < self.n else self.comp - self.n
        return self.true_pivot(i) if self.comp < self.n else self.moved(i)

    def true_pivot(self, p: int) -> Value:
        if not self.lags(p):
            return self.after["p", p]
        e = self.h.pivots[p][1]
        return self.expression(e, {v: self.moved(int(v[1:])) for v in T.variables(e)}, "pivot")

    def moved(self, i: int) -> Value:
        """Component i at the true pivots."""
        parts = []
        for j, e in self.row(i):
            e = self.at_rest(e)
            for v in T.variables(e):
                self.new["p", int(v[1:])] = self.true_pivot(int(v[1:]))
            if not T.is_num(e, 0.0):
                x = self.after["x", j]
                parts.append(
                    x if T.is_num(e, 1.0) else self.low.map(self.here, "mul", (self.coefficient(e, "old"), x), "rescale")
                )
        return parts[0] if len(parts) == 1 else self.low.map(self.here, "add", parts, "rescale")

    def at_rest(self, e: Term) -> Term:
        """A coefficient where only pivots that lag move."""
        same = {T.var(v): T.var("R" + v[1:]) for v in T.variables(e) if v[0] == "r" and not self.lags(int(v[1:]))}
        if not same:
            return e
        from ..rules.repair import simplified  # only here: what loads a kernel needs no rules

        return simplified(T.substitute(e, same))

    def pivot(self, i: int) -> Value:
        """A pivot that is a maximum or minimum of its own, after the loop."""
        self.advance("p", i)
        return self.after["p", i]

    def ready(self, kind: str, i: int) -> bool:
        if kind == "p":
            p = self.h.pivots[i]
            if isinstance(p, str):
                return True
            if is_payload(p):
                return ("p", p[1]) in self.new
            return all(("x", j) in self.new for j in ([p[1]] if p[0] == "mean" else [int(v[1:]) for v in T.variables(p[1])]))
        return all(("p", int(v[1:])) in self.new for _, e in self.row(i) for v in T.variables(e))

    def row(self, i: int) -> list[tuple[int, Term]]:
        return [(j, e) for j, e in self.h.coef[i] if j in self.need_x]

    def key(self, kind: str, i: int) -> object:
        """What the state is made of: equal keys are the same state."""
        ps, xs = self.h.needed(i if kind == "p" else self.n + i, self.zero)
        pivot = self.h.pivots[i] if kind == "p" else None
        if isinstance(pivot, str):
            return ("pivot", pivot, self.axis, self.singles[i])
        singles = tuple(self.singles[p] for p in ps), tuple(self.singles[self.n + j] for j in xs)
        if kind == "x" and all(isinstance(self.h.pivots[p], str) for p in ps):  # whatever else is in the monoid
            number = {T.var(f"{s}{p}"): T.var(f"{s}{n}") for n, p in enumerate(ps) for s in "rR"}
            rows = tuple(tuple((xs.index(j), T.substitute(e, number)) for j, e in self.h.coef[x] if j in xs) for x in xs)
            return ("component", tuple(self.h.pivots[p] for p in ps), rows, xs.index(i), self.axis, *singles)
        return (kind, self.h, i, self.axis, *singles)

    def axes(self, kind: str, i: int) -> frozenset[str]:
        ps, xs = self.h.needed(i if kind == "p" else self.n + i, self.zero)
        free = frozenset().union(*[self.singles[p].free for p in ps], *[self.singles[self.n + j].free for j in xs])
        return self.low.axes(T.without(T.normalise(free), self.axis)) | self.low.existence(self.axis, self.here)

    def advance(self, kind: str, i: int) -> None:
        low, key = self.low, self.key(kind, i)
        what = (kind, i)
        memo = (("state", key, "next"), self.here)
        if memo in low.values:  # another fold of the group has made it
            self.new[what] = low.values[memo]
            if self.carries is not None:
                self.old[what], self.after[what] = self.carries[key].phi, self.carries[key].out
            return
        pivot = self.h.pivots[i] if kind == "p" else None
        axes = self.axes(kind, i)
        c = None
        if self.carries is not None:
            op = pivot if isinstance(pivot, str) else pivot[2] if pivot is not None and is_payload(pivot) else "+"
            init = IDENTITY[op]
            if key not in self.carries:  # else a component that moves with this one has asked for it
                low.carry(self.carries, key, axes, init, "linear" if kind == "x" or is_payload(pivot) else "pivot", op)
            c = self.carries[key]
        self.old[what] = None if c is None else c.phi
        nxt = self.advance_pivot(i) if kind == "p" else self.advance_linear(i)
        self.new[what] = low.values[memo] = nxt
        if c is not None and self.carries is not None:
            self.carries[key] = Carry(c.init, c.phi, nxt, c.out, c.kind, c.op)
            self.after[what] = c.out

    def advance_pivot(self, i: int) -> Value:
        low, here, pivot = self.low, self.here, self.h.pivots[i]
        old = self.old["p", i]
        if isinstance(pivot, str):
            return low.reduce(pivot, [self.axis], low.value(self.singles[i], here), here, old, "pivot")
        if is_payload(pivot):
            return self.advance_payload(i)
        if pivot[0] == "fn":
            now = self.expression(pivot[1], {f"y{j}": v for (k, j), v in self.new.items() if k == "x"}, "pivot")
            return self.lag(i, now, old) if old is not None and self.lags(i) else now
        # R = r + (tile's weighted sum of (m − r)) / new count: differences from the old mean, never raw sums
        m, j = low.value(self.singles[i], here), pivot[1]
        w, n_new = self.contribution(j), self.new["x", j]
        if old is None:
            return self.ratio(self.weighted(m, w), n_new)
        moved = self.weighted(low.map(here, "sub", (m, old)), w)
        if (rest := self.residue(i, j)) is not None:  # old elements differ from the old mean by what its rounding left
            moved = low.map(here, "add", (self.carry_of(rest), moved))
            if not self.zero(rest):
                moved = low.map(here, "add", (moved, low.total("+", self.axis, self.singles[self.n + rest], here, None)))
        return low.map(here, "add", (old, self.ratio(moved, n_new)), "pivot")

    def residue(self, i: int, j: int) -> int | None:
        """The component, if it is carried, that is the sum of differences from the mean in pivot i, which counts j."""

        def none(t: Term, x: int) -> bool:
            """Is this component 0 at every element?  Otherwise it sums more than differences from the mean."""
            if t.op == "fold" and t.attr[:2] == (self.h, self.n + x):  # type: ignore[index]
                return none(t.args[self.n + x], x)
            return T.is_num(t, 0.0)

        for x in self.need_x:
            if not none(self.singles[self.n + x], x):
                continue
            row = dict(self.h.coef[x])
            if set(row) == {x, j} and T.is_num(row[x], 1.0) and (d := difference(row[j])) is not None:
                if [t.op for t in d] == ["var", "var"] and [t.attr for t in d] == [f"r{i}", f"R{i}"]:
                    return x
        return None

    def advance_payload(self, i: int) -> Value:
        """Combined over what is at the new pivot: of the tile, and of the state so far."""
        low, here = self.low, self.here
        _, q, op, nans = self.h.pivots[i]  # type: ignore[misc]
        nothing, new = low.const(IDENTITY[op]), self.new["p", q]

        def kept(x: Value, at: Value) -> Value:
            hit = low.map(here, "eq", (at, new))
            if nans:
                hit = low.map(here, "or", (hit, low.map(here, "isnan", (at,))))
            return low.map(here, "where", (hit, x, nothing))

        tile = kept(low.value(self.singles[i], here), low.value(self.singles[q], here))
        old, at = self.old.get(("p", i)), self.old.get(("p", q))
        return low.reduce(op, [self.axis], tile, here, None if old is None or at is None else kept(old, at))

    def weighted(self, m: Value, w: Value | None) -> Value:
        """Σ over the tile of w·m."""
        if w is None:
            return self.low.reduce("+", [self.axis], m, self.here, None)
        return self.low.contraction([self.axis], [w, m], self.here, None)

    def contribution(self, j: int) -> Value | None:
        """Count component j on each element, at the new pivots (None: 1)."""
        low, here = self.low, self.here
        x = self.singles[self.n + j]
        e = dict(self.row(j)).get(j)
        if e is None or len(self.row(j)) != 1:
            raise LoweringError("a mean's count must be a component that moves by itself")
        if T.is_num(e):
            return None if T.is_num(x, 1.0) and T.is_num(e, 1.0) else low.value(x, here)
        w = self.coefficient(e, None)
        return w if T.is_num(x, 1.0) else low.map(here, "mul", (w, low.value(x, here)))

    def ratio(self, s: Value, n: Value) -> Value:
        """s / n, and 0 where nothing was counted."""
        low, here = self.low, self.here
        zero = low.const(0.0)
        q = low.map(here, "div", (s, n))
        return low.map(here, "where", (low.map(here, "eq", (n, zero)), zero, q))

    def advance_linear(self, i: int) -> Value:
        low, here = self.low, self.here
        acc: Value | None = None
        if self.carries is not None:  # the old state at the new pivots
            parts = []
            for j, e in self.row(i):
                old = self.old.get(("x", j)) or self.carry_of(j)
                parts.append(old if T.is_num(e, 1.0) else low.map(here, "mul", (self.coefficient(e, "old"), old), "rescale"))
            acc = parts[0] if len(parts) == 1 else low.map(here, "add", parts, "rescale")
        for j, e in self.row(i):
            x = self.singles[self.n + j]
            if self.zero(j):
                continue
            if T.is_num(e):
                acc = low.total("+", self.axis, x if T.is_num(e, 1.0) else T.mul(e, x), here, acc)
            else:
                acc = low.weighted_sum(self.axis, self.coefficient(e, None, merges=not self.zero(i)), x, here, acc)
        return low.const(0.0) if acc is None else acc

    def carry_of(self, j: int) -> Value:
        """The old value of a component that has not been advanced yet."""
        key = self.key("x", j)
        if self.carries is None:
            raise LoweringError("no carried state")
        if key not in self.carries:
            self.low.carry(self.carries, key, self.axes("x", j), 0.0, "linear")
        return self.carries[key].phi

    def expression(self, e: Term, at: dict[str, Value], role: str) -> Value:
        """The value of a term over variables.  (Equal parts of several coefficients are one value, thanks to `Lowering.map`.)"""
        low, here = self.low, self.here
        out: dict[Term, Value] = {}
        for t in T.postorder([e]):
            mine = role if t is e else ""
            match t.op:
                case "var":
                    out[t] = at[str(t.attr)]
                case "num":
                    out[t] = low.const(t.attr)
                case "add" if (ab := difference(t)) is not None:
                    out[t] = low.map(here, "sub", (out[ab[0]], out[ab[1]]), mine)
                case _:
                    fn = str(t.attr) if t.op in ("un", "bi") else t.op
                    out[t] = low.map(here, fn, [out[a] for a in t.args], mine)
        return out[e]

    def coefficient(self, e: Term, side: str | None, merges: bool = False) -> Value:
        """A(r, R): r the old pivots (side "old") or the singletons of each element (None); 0 where a max/min pivot r is at its
        identity.  merges: elements are states themselves, which may be empty."""
        low, here = self.low, self.here
        names = T.variables(e)
        order = [p for p in range(self.n) if f"r{p}" in names and isinstance(self.h.pivots[p], str)]
        boundless = any(is_fn(p := self.h.pivots[int(v[1:])]) and infinite_when_empty(p[1]) for v in names)
        safe = not boundless and vanishes_at_identity(e, tuple((p, str(self.h.pivots[p])) for p in order))
        at, guards = {}, []
        for v in names:
            p = int(v[1:])
            if v[0] == "R":
                at[v] = self.safe_pivot(p) if safe and p in order else self.defined(p, self.new["p", p])
                continue
            r = self.old_pivot(p) if side == "old" else low.value(self.singles[p], here)
            at[v] = self.defined(p, r) if side == "old" or merges else r
            if p in order and not safe:
                guards.append((at[v], IDENTITY[str(self.h.pivots[p])]))
        role = "weight" if side is None else "rescale"
        out = self.expression(e, at, role)
        for r, identity in guards:
            out = low.map(here, "where", (low.map(here, "eq", (r, low.const(identity))), low.const(0.0), out), role)
        return out

    def old_pivot(self, p: int) -> Value:
        v = self.old["p", p]
        if v is None:
            raise LoweringError("no carried pivot")
        return v

    def defined(self, p: int, v: Value) -> Value:
        """A pivot that is a function of components is NaN as long as they are 0.  Any other value serves then, if it serves
        everywhere."""
        if not is_fn(self.h.pivots[p]) or (self.lags(p) and not self.left):
            return v
        return self.low.map(self.here, "where", (self.low.map(self.here, "isnan", (v,)), self.low.const(0.0), v), "pivot")

    def safe_pivot(self, p: int) -> Value:
        """The new pivot with its identity replaced by 0: then exp(r − R) is 0, not NaN, for r at the identity."""
        low, R = self.low, self.new["p", p]
        hit = low.map(self.here, "eq", (R, low.const(IDENTITY[str(self.h.pivots[p])])))
        return low.map(self.here, "where", (hit, low.const(0.0), R), "pivot")
