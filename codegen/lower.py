"""Kernel → tile program: the one place where loops are made.

A kernel's stores say which values are wanted.  `placing.py` says in which loops they live, `statements.py` makes the statements that
a block has, `predicates.py` what a loop may skip, and `folds.py` what a fold carries through it; this module goes from the values wanted
to those that they are made of, and around loops."""

from __future__ import annotations

import math
from collections.abc import Iterable

from .. import terms as T
from ..extraction import plan
from ..extraction.plan import Buffer, Kernel
from ..program import EXACT
from ..terms import REDUCTIONS as IDENTITY
from ..terms import Affine, Term
from .folds import FoldState
from .monoids import fold_needs, negated
from .placing import LoweringError, Path
from .predicates import Vanishing, nothing_outside, predicate_of
from .real import Real
from .statements import Statements
from .tile import Carry, Gather, Iota, Load, Loop, Mask, Store, TileProgram, Value, live


def lower(kernel: Kernel, buffers: dict[str, Buffer], compute_dtype: str = "float32") -> TileProgram:
    """The tile program of a kernel.  Its structure depends on the roles of the axes, not on extents or tiles."""
    return Lowering(kernel, buffers, compute_dtype).run()


class Lowering(Statements):
    def __init__(self, kernel: Kernel, buffers: dict[str, Buffer], compute_dtype: str):
        super().__init__(kernel)
        self.buffers, self.dtype = buffers, compute_dtype
        self.made: set[Path] = set()
        self.vanish_memo: Vanishing = {}
        self.real = Real(buffers, kernel.extents)
        self.reads: dict[str, None] = {}
        self.row_memo: dict[Term, bool] = {}

    def run(self) -> TileProgram:
        top: list[Path | plan.Store] = []
        for s in self.k.stores:
            ctx = self.nest(s)
            for n in range(1, len(ctx)):
                self.members.setdefault(ctx[:n], {})[ctx[: n + 1]] = None
            if ctx:
                self.members.setdefault(ctx, {})[s] = None
            top.append(ctx[:1] if ctx else s)
            self.collect(s.term, ctx)
        for m in top:
            self.member(m, ())
        bufs = self.buffers
        return TileProgram(
            self.k.name,
            dict(self.k.axes),
            dict(self.k.extents),
            self.limits,
            live(self.blocks[()], set()),
            tuple(bufs[b] for b in self.reads),
            tuple(bufs[b] for b in dict.fromkeys(s.buffer for s in self.k.stores)),
            self.dtype,
            dict(self.k.choices),
            self.k.wide,
        )

    def member(self, m: Path | plan.Store, here: Path) -> None:
        if isinstance(m, tuple):
            self.loop(m)
        else:
            value = self.value(m.term, here)
            self.blocks[here].append(Store(m.buffer, tuple(map(self.globally, m.index)), value))

    def value(self, t: Term, ctx: Path) -> Value:
        """The value of a term that is needed in ctx.  (Iterative: kernels may be chains of thousands of operations.)"""
        want = t, self.place(t.free, ctx)
        stack = [want]
        while stack:
            t, p = stack[-1]
            if (t, p) not in self.values:
                if self.is_streamed(t):
                    self.loop((*p, (t.attr[-1], self.below(t)[t])))
                elif todo := [w for a in self.asks(t) if (w := (a, self.place(a.free, p))) not in self.values]:
                    stack.extend(reversed(todo))
                    continue
                else:
                    self.values[t, p] = self.compute(t, p)
            stack.pop()
        return self.values[want]

    def asks(self, t: Term) -> Iterable[Term]:
        """What `compute` asks for."""
        match t.op:
            case "red":
                _, body = self.summed(t.attr[0], t.attr[1], t.args[0])
                return factors(body) if t.attr[0] == "+" else (body,)
            case "fold":
                return [f for a in self.operands(t) for f in factors(a)]
            case "add":
                return [a if (m := negated(a)) is None else m for a in t.args]
        return () if predicate_of(t) is not None else self.operands(t)

    def compute(self, t: Term, p: Path) -> Value:
        match t.op:
            case "num":
                return self.const(t.attr)
            case "input":
                name, index = t.attr
                self.reads[name] = None
                return self.emit(p, Load(self.new(self.axes(t.free)), name, tuple(map(self.globally, index))))
            case "iota":
                return self.emit(p, Iota(self.new(self.axes(t.free)), self.globally(T.axis_index(t.attr))))
            case "gather":
                return self.gather(t, p)
            case "red" | "fold":
                return self.reduction(t, p, None)
            case "view":
                raise LoweringError("a view reaches lowering: extraction reads it from a buffer")
        if (cs := predicate_of(t)) is not None:
            return self.emit(p, Mask(self.new(self.axes(t.free), True), tuple(map(self.globally, cs))))
        if t.op == "add":  # a + (−1)·b is a subtraction
            minus = [negated(a) for a in t.args]
            plus = [a for a, m in zip(t.args, minus) if m is None]
            less = [m for m in minus if m is not None]
            if plus and less:
                left, right = (self.sum_of(xs, p) for xs in (plus, less))
                return self.map(p, "sub", (left, right))
        if (parts := self.mean_parts(t)) is not None:
            n, x, rest = parts
            mean = self.map(p, "div", (self.value(x, p), self.const(n)))
            return self.map(p, "mul", [mean, *(self.value(a, p) for a in rest)]) if rest else mean
        if t.op in ("add", "mul") and len(t.args) == 1:  # where no rule takes products of one factor apart
            return self.value(t.args[0], p)
        fn = str(t.attr) if t.op in ("un", "bi") else t.op
        return self.map(p, fn, [self.value(a, p) for a in t.args])

    def mean_parts(self, t: Term) -> tuple[float, Term, list[Term]] | None:
        """(n, x, others) if t is x·(1/n)·others with an x that stands for a whole row: 1/n is rounded, x/n is not, and one
        division a row costs nothing."""
        if t.op != "mul":
            return None
        divisors = [(a, n) for a in t.args if (n := divisor(a)) is not None]
        if len(divisors) != 1:
            return None
        c, n = divisors[0]
        x = next((a for a in t.args if a is not c and self.stands_for_row(a)), None)
        if x is None:
            return None
        rest = list(t.args)
        rest.remove(c)
        rest.remove(x)  # one of them: in x²/n the other is a factor
        return n, x, rest

    def stands_for_row(self, t: Term) -> bool:
        """Is the value one of few: a sum over rows of something as wide, or made of one?"""
        stack = [t]
        while stack:  # what a gather reads from is no value here, and its axes have no role
            x = stack[-1]
            if x not in self.row_memo and (todo := [a for a in self.operands(x) if a not in self.row_memo]):
                stack.extend(todo)
                continue
            if x not in self.row_memo:
                self.row_memo[x] = self._stands_for_row(x)
            stack.pop()
        return self.row_memo[t]

    def _stands_for_row(self, t: Term) -> bool:
        mine = self.axes(t.free)
        match t.op:
            case "input":
                wider = any(x.extent > 1 and a not in mine for a, x in self.k.axes.items())
                return self.buffers[t.attr[0]].kind == "temp" and wider
            case "red" | "fold":
                summed = mine | self.walked(t.attr[-1])
                return any(self.axes(f.free) >= summed for a in self.operands(t) for f in factors(a))
            case "add" | "mul" | "un":
                return any(self.row_memo[a] and self.axes(a.free) == mine for a in t.args)
        return False

    def sum_of(self, xs: list[Term], p: Path) -> Value:
        return self.value(xs[0], p) if len(xs) == 1 else self.map(p, "add", [self.value(a, p) for a in xs])

    def gather(self, t: Term, p: Path) -> Value:
        x, i = t.args
        if x.op != "input":
            raise LoweringError("a gather reads memory: extraction stores what it gathers from")
        name, index = x.attr
        dims = [n for n, ix in enumerate(index) if t.attr in ix.axes]
        if len(dims) != 1:
            raise LoweringError("a gather's axis must index one dimension")
        self.reads[name] = None
        dim = dims[0]
        step = dict(index[dim].terms)[t.attr]
        rest = tuple(self.globally(Affine(ix.const, tuple(x for x in ix.terms if x[0] != t.attr))) for ix in index)
        at = self.value(i, p)
        n, length = self.k.extents[t.attr], self.buffers[name].shape[dim]
        if step != 1 or rest[dim] != Affine() or n != length:
            # the axis is a part of the dimension: its positions are moved there, and wrong ones out of the dimension
            outside = 2.0 * max(length - rest[dim].bounds(self.k.extents)[0], 1)
            if abs(step) * (n - 1) > EXACT and self.dtype == "float32":
                raise LoweringError("positions of a gather that float32 cannot hold")
            low, high = self.map(p, "le", (self.const(0.0), at)), self.map(p, "lt", (at, self.const(float(n))))
            there = self.map(p, "mul", (at, self.const(float(step)))) if step != 1 else at
            at = self.map(p, "where", (self.map(p, "and", (low, high)), there, self.const(outside)))
        return self.emit(p, Gather(self.new(self.axes(t.free)), name, rest, dim, at))

    # ---- reductions
    def loop(self, here: Path) -> None:
        """Emit a loop with all its members: every reduction of the group advances together."""
        if here in self.made:
            return
        self.made.add(here)
        axis, p = here[-1][0], here[:-1]
        body = self.blocks[here] = []
        carries: dict[object, Carry] = {}
        moved: dict[Term, FoldState] = {}
        for m in self.members[here]:
            if isinstance(m, Term):
                self.values[m, p] = self.reduction(m, here, carries, moved)
            else:
                self.member(m, here)
        nothing = (nothing_outside(m, self.vanish_memo, self.real) if isinstance(m, Term) else frozenset() for m in self.members[here])
        skips = sorted(frozenset.intersection(*nothing), key=str)
        self.blocks[p].append(Loop(axis, tuple(carries.values()), tuple(body), tuple(map(self.globally, skips))))
        for m, state in moved.items():
            self.values[m, p] = state.arrived(p)

    def carry(
        self, carries: dict[object, Carry], key: object, axes: Iterable[str], init: float, kind: str, op: str = "+"
    ) -> Carry:
        c = Carry(self.const(init), self.new(axes), self.new(()), self.new(axes), kind, op)
        carries[key] = c
        return c

    def reduction(
        self, t: Term, here: Path, carries: dict[object, Carry] | None, moved: dict[Term, FoldState] | None = None
    ) -> Value:
        """The value of a reduction whose operands live in `here`: of the whole axis if carries is None, else advanced by one tile
        (then the result is the value after the loop).  moved: gets the folds whose value is yet to be moved to the true pivots."""
        if t.op == "fold":
            state = FoldState(self, t, here, carries)
            value = state.component()
            if moved is not None and any(map(state.lags, state.need_p)):
                moved[t] = state
            return value
        op, axis = t.attr
        if carries is not None and (fold := self.fold_at(t, here)) is not None:
            return FoldState(self, fold[0], here, carries).pivot(fold[1])
        out = self.axes(t.free)
        if not T.depends(t.args[0].free, axis):
            out |= self.existence(axis, here)
        c = None if carries is None else self.carry(carries, t, out, IDENTITY[op], "sum", op)
        nxt = self.total(op, axis, t.args[0], here, None if c is None else c.phi)
        if c is None or carries is None:
            return nxt
        carries[t] = Carry(c.init, c.phi, nxt, c.out, c.kind, op)
        return c.out

    def fold_at(self, t: Term, here: Path) -> tuple[Term, int] | None:
        """A fold that is carried in the same loop, and which of its pivots this maximum or minimum is."""
        op, axis = t.attr
        for f in self.members[here]:
            if op in ("max", "min") and isinstance(f, Term) and f.op == "fold" and f.attr[2] == axis:
                h, comp, _ = f.attr
                for i in fold_needs(h, comp, f.args)[0]:
                    if h.pivots[i] == op and f.args[i] is t.args[0]:
                        return f, i
        return None

    def total(self, op: str, axis: str, body: Term, here: Path, acc: Value | None) -> Value:
        """acc ⊕ the reduction over one tile of `axis`, and over whole axes summed right inside."""
        axes, body = self.summed(op, axis, body)
        if op == "+" and body.op == "mul":
            return self.contraction(axes, [self.value(a, here) for a in body.args], here, acc)
        return self.reduce(op, axes, self.value(body, here), here, acc)

    def summed(self, op: str, axis: str, body: Term) -> tuple[list[str], Term]:
        """All axes that are summed at once, and what is summed over them."""
        axes = [axis]
        while op == "+" and body.op == "red" and body.attr[0] == "+" and not self.is_streamed(body):
            axes.append(body.attr[1])
            body = body.args[0]
        return axes, body

    def weighted_sum(self, axis: str, w: Value | None, x: Term, here: Path, acc: Value | None) -> Value:
        """acc + Σ over the tile of w·x."""
        if w is None:
            return self.total("+", axis, x, here, acc)
        if T.is_num(x, 1.0):
            return self.reduce("+", [axis], w, here, acc)
        return self.contraction([axis], [w, *(self.value(a, here) for a in factors(x))], here, acc, "absorb")


def factors(t: Term) -> tuple[Term, ...]:
    return t.args if t.op == "mul" else (t,)


def divisor(t: Term) -> float | None:
    """±n if the term is the constant ±1/n, which no binary number is exactly."""
    if t.op != "num" or t.attr == 0 or not math.isfinite(1.0 / t.attr):
        return None
    n = round(1.0 / t.attr)
    return float(n) if abs(n) <= 2**24 and abs(n) & (abs(n) - 1) and 1.0 / n == t.attr else None
