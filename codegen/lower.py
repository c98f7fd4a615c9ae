"""Kernel → tile program: the one place where loops are made.

Placement.  A value lives in the shortest prefix of the current loop nest whose axes cover the loop axes that it depends on.
A reduction over a loop axis runs in the loop (axis, depth) at its place, where depth = 1 + the deepest loop at that place whose
result it needs; reductions (and streamed stores) with equal keys share one loop.  So two dependent reductions over one axis
make two loops, and one fold makes one.

Folds become explicit state.  Pivots advance first, then each linear component:  xᵢ ← Σⱼ Aᵢⱼ(r, R)·xⱼ + Σ_tile Σⱼ Aᵢⱼ(m, R)·sⱼ
with r the old pivots, R the new ones, m and s the tile's singletons (the merge of `Monoid` with the tile absorbed at the
merged pivot).  Where a max or min pivot is at its identity the coefficient counts as 0.  A payload is reduced over those elements,
the old state among them, that are at the new pivot: both sides of that comparison are one value, so it cannot miss.

Any value serves as a pivot, if all state is relative to it.  One that is a function of components, divided by a sum of weights, would
move with every tile: in a loop it *lags*, and moves only where the weights have doubled since it did (so it is never far from the
truth: most of what is weighed has been counted in it).  What leaves the loop is moved to the true value there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from .. import terms as T
from ..extraction import plan
from ..extraction.plan import Buffer, Kernel
from ..program import EXACT
from ..reference import evaluate_scalar
from ..terms import Affine, Monoid, Term
from .tile import (
    Carry,
    Const,
    Contract,
    Gather,
    Iota,
    Load,
    Loop,
    Map,
    Mask,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    Value,
    operands,
    results,
)

Path = tuple[tuple[str, int], ...]  # loops from the outside in: (axis, depth)
IDENTITY = T.REDUCTIONS


class LoweringError(Exception):
    """The kernel's roles do not fit its terms (a reduction over a grid axis, an axis without a role): extraction must not ask."""


def lower(kernel: Kernel, buffers: dict[str, Buffer], compute_dtype: str = "float32") -> TileProgram:
    """The tile program of a kernel.  Its structure depends on the roles of the axes, not on extents or tiles."""
    return _Lowering(kernel, buffers, compute_dtype).run()


# ------------------------------------------------------------------ affine predicates


def affine_of(t: Term) -> Affine | None:
    """The term as an affine expression of positions with integer coefficients, if it is one."""
    match t.op:
        case "num":
            return Affine(int(t.attr)) if float(t.attr).is_integer() else None
        case "iota":
            return T.axis_index(t.attr)
        case "add":
            out = Affine()
            for a in t.args:
                x = affine_of(a)
                if x is None:
                    return None
                out = out.plus(x)
            return out
        case "mul":
            parts = [p for p in map(affine_of, t.args) if p is not None]
            moving = [p for p in parts if p.terms]
            if len(parts) < len(t.args) or len(moving) > 1:
                return None
            scale: int = math.prod([p.const for p in parts if not p.terms])
            return Affine().plus(moving[0] if moving else Affine(1), scale)
        case "un" if t.attr == "neg":
            x = affine_of(t.args[0])
            return x and Affine().plus(x, -1)
    return None


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


_KEEPS_ZERO = frozenset(
    {
        "neg",
        "tanh",
        "sin",
        "sinh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "tan",
        "abs",
        "sqrt",
        "sign",
        "erf",
        "expm1",
        "log1p",
        "floor",
        "ceil",
        "round",
        "trunc",
    }
)


Vanishing = dict[tuple[Term, float], frozenset[Affine]]


def vanishing(t: Term, to: float, memo: Vanishing) -> frozenset[Affine]:
    """Constraints each of which, where it is negative, makes `t` equal to `to` (0, −inf or inf).  A factor 0 wins."""
    for x in T.postorder([t]) if (t, to) not in memo else ():
        for value in (0.0, -math.inf, math.inf):
            if (x, value) not in memo:
                memo[x, value] = _vanishing(x, value, memo)
    return memo.get((t, to), frozenset())


def _vanishing(t: Term, to: float, memo: Vanishing) -> frozenset[Affine]:
    def all_of(args: Iterable[Term], to: float) -> frozenset[Affine]:
        sets = [memo[a, to] for a in args]
        return frozenset.intersection(*sets) if sets else frozenset()

    match t.op, t.attr:
        case "where", _:
            c, x, y = t.args
            hit = memo[x, to]
            return hit | _known(c) if T.is_num(y, to) else hit & memo[y, to]
        case "add", _:
            return all_of(t.args, 0.0) if to == 0 else frozenset().union(*(memo[a, to] for a in t.args))
        case "mul", _:
            if to == 0:
                return frozenset().union(*(memo[a, 0.0] for a in t.args))
            scale = [a.attr for a in t.args if a.op == "num"]
            rest = [a for a in t.args if a.op != "num"]
            if len(rest) == 1 and scale and all(scale):
                return memo[rest[0], to if math.prod(scale) > 0 else -to]
            return frozenset()
        case "un", ("exp" | "exp2"):
            return memo[t.args[0], -math.inf] if to == 0 else frozenset()
        case "un", "log":
            return memo[t.args[0], 0.0] if to == -math.inf else frozenset()
        case "un", f if to == 0 and f in _KEEPS_ZERO:
            return memo[t.args[0], 0.0]
        case "bi", "and" if to == 0:
            return _known(t)
        case "bi", ("lt" | "le" | "eq") if to == 0:
            return _known(t)
        case "bi", ("max" | "min"):
            return all_of(t.args, to)
        case "red", (op, axis) if to == IDENTITY[op]:
            return frozenset(c for c in memo[t.args[0], to] if not any(T.depends(frozenset([a]), axis) for a in c.axes))
    return frozenset()


# ------------------------------------------------------------------ lowering


class _Lowering:
    def __init__(self, kernel: Kernel, buffers: dict[str, Buffer], compute_dtype: str):
        self.k, self.buffers, self.dtype = kernel, buffers, compute_dtype
        self.streamed = frozenset(a for a, x in kernel.axes.items() if x.role == "loop")
        self.axes_memo: dict[frozenset[str], frozenset[str]] = {}
        self.places: dict[tuple[frozenset[str], Path], Path] = {}
        self.below_memo: dict[Term, dict[Term, int]] = {}
        self.members: dict[
            Path, dict[Term | Path | plan.Store, None]
        ] = {}  # loop → reductions, stores and inner store loops, in order
        self.collected: set[tuple[Term, Path]] = set()  # terms whose loops are registered, for all stores
        self.blocks: dict[Path, list[Stmt]] = {(): []}
        self.values: dict[tuple[object, Path], Value] = {}
        self.made: set[Path] = set()
        self.count = 0
        self.vanish_memo: Vanishing = {}
        self.reads: dict[str, None] = {}
        self.row_memo: dict[Term, bool] = {}
        self.limits = self.ragged_ends()

    # ---- axes
    def walked(self, axis: str) -> frozenset[str]:
        """An axis in terms of those that the kernel walks."""
        if axis in self.k.axes:
            return frozenset([axis])
        parts = [a for a in self.k.axes if a.startswith(axis + ".")]
        if not parts:
            raise LoweringError(f"axis {axis} has no role in {self.k.name}")
        return frozenset(parts)

    def axes(self, free: frozenset[str]) -> frozenset[str]:
        if free not in self.axes_memo:
            self.axes_memo[free] = frozenset().union(*map(self.walked, free))
        return self.axes_memo[free]

    def position(self, axis: str) -> Affine:
        """The position along a whole axis, from those of the parts that the kernel walks."""
        if axis in self.k.axes:
            return T.axis_index(axis)
        o, i = T.outer(axis), T.inner(axis)
        return Affine().plus(self.position(o), self.k.extents[i]).plus(self.position(i))

    def globally(self, ix: Affine) -> Affine:
        return ix.substitute({a: self.position(a) for a in ix.axes})

    def ragged_ends(self) -> dict[str, Affine]:
        """What elements of each axis exist, where not all of every tile do."""
        out: dict[str, Affine] = {}
        for a, x in self.k.axes.items():
            if x.extent % max(1, x.tile):
                if a.endswith(".i"):
                    raise LoweringError(f"the tile of {a} must divide its block in {self.k.name}")
                out[a] = Affine(x.extent - 1).plus(T.axis_index(a), -1)
        parts = set()  # what the kernel walks of split axes, and the parts that those belong to
        for a in self.k.axes:
            while "." in a:
                parts.add(a)
                a = a.rpartition(".")[0]
        for whole in sorted({a[:-2] for a in parts if a.endswith(".i")}):
            o, i = T.outer(whole), T.inner(whole)
            if o not in parts:
                raise LoweringError(f"{i} without {o} in {self.k.name}")
            if self.k.extents[o] * self.k.extents[i] == self.k.extents[whole]:
                continue
            if i not in self.k.axes:
                raise LoweringError(f"{i} is split again in {self.k.name}, and the blocks of {whole} do not divide it")
            out[i] = Affine(self.k.extents[whole] - 1).plus(self.position(whole), -1)
        return out

    def existence(self, axis: str, here: Path) -> frozenset[str]:
        """Other axes that say which elements of `axis` exist."""
        others = frozenset(self.limits[axis].axes) - {axis} if axis in self.limits else frozenset()
        if not others & self.streamed <= {a for a, _ in here}:
            raise LoweringError(f"what exists of {axis} depends on {sorted(others)}, outside of its loops in {self.k.name}")
        return others

    # ---- where things live
    def place(self, free: frozenset[str], ctx: Path) -> Path:
        key = free, ctx
        if key not in self.places:
            want = self.axes(free) & self.streamed
            fits = (ctx[:n] for n in range(len(ctx) + 1) if want <= {a for a, _ in ctx[:n]})
            if (found := next(fits, None)) is None:
                raise LoweringError(f"a value over {sorted(want)} is needed outside its loops in {self.k.name}")
            self.places[key] = found
        return self.places[key]

    def below(self, t: Term) -> dict[Term, int]:
        """Reductions over loop axes at or below t, with their depths."""
        if t in self.below_memo:
            return self.below_memo[t]
        for x in T.postorder([t]):
            if x in self.below_memo:
                continue
            out: dict[Term, int] = {}
            for a in self.operands(x):
                out.update(self.below_memo[a] if a in self.below_memo else self.below(a))
            if self.is_streamed(x):
                out[x] = 1 + self.deepest(out, self.axes(x.free) & self.streamed)
            self.below_memo[x] = out
        return self.below_memo[t]

    def deepest(self, below: dict[Term, int], scope: frozenset[str]) -> int:
        return max((d for r, d in below.items() if self.axes(r.free) & self.streamed <= scope), default=0)

    def is_streamed(self, t: Term) -> bool:
        if t.op not in ("red", "fold"):
            return False
        axis: str = t.attr[-1]
        role = self.k.axes[axis].role if axis in self.k.axes else None
        if role in (None, "grid"):
            raise LoweringError(f"{self.k.name} reduces over {axis}, which {'is on its grid' if role else 'it does not walk'}")
        return role == "loop"

    def operands(self, t: Term) -> tuple[Term, ...]:
        """Arguments that are evaluated: a fold carries only what its component needs."""
        if t.op == "fold":
            h, comp, _ = t.attr
            ps, xs = fold_needs(h, comp, t.args)
            n = len(h.pivots)
            return tuple(
                dict.fromkeys(
                    [t.args[p] for p in ps if p < n and not is_fn(h.pivots[p])]
                    + [t.args[n + j] for j in xs]
                    + [t.args[p] for p in ps if is_fn(h.pivots[p])]
                )
            )
        if t.op == "gather":
            return t.args[1:]
        return t.args

    def collect(self, t: Term, ctx: Path) -> None:
        """Register every loop that the value needs."""
        stack = [(t, ctx)]
        while stack:
            t, ctx = stack.pop()
            p = self.place(t.free, ctx)
            if (t, p) in self.collected:
                continue
            self.collected.add((t, p))
            here = p
            if self.is_streamed(t):
                if t.attr[-1] in {a for a, _ in p}:
                    raise LoweringError(f"a reduction over {t.attr[-1]} is needed inside a loop over it in {self.k.name}")
                here = (*p, (t.attr[-1], self.below(t)[t]))
                self.members.setdefault(here, {})[t] = None
            stack.extend((a, here) for a in reversed(self.operands(t)))

    def nest(self, s: plan.Store) -> Path:
        """Loops around a streamed store: behind all reductions that it needs, each at its place.  Axes along which something
        is also reduced go innermost."""
        streamed = self.axes(frozenset(a for ix in s.index for a in ix.axes) | s.term.free) & self.streamed
        below = self.below(s.term)
        reduced = {r.attr[-1] for r in below}
        ctx: Path = ()
        for a in sorted((a for a in self.k.axes if a in streamed), key=lambda a: a in reduced):
            ctx = (*ctx, (a, 1 + self.deepest(below, frozenset(b for b, _ in ctx))))
        return ctx

    # ---- emission
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
        )

    def member(self, m: Path | plan.Store, here: Path) -> None:
        if isinstance(m, tuple):
            self.loop(m)
        else:
            value = self.value(m.term, here)
            self.blocks[here].append(Store(m.buffer, tuple(map(self.globally, m.index)), value))

    def new(self, axes: Iterable[str], predicate: bool = False) -> Value:
        self.count += 1
        return Value(self.count, tuple(sorted(axes)), predicate)

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
                return body.args if t.attr[0] == "+" and body.op == "mul" else (body,)
            case "fold":
                return [f for a in self.operands(t) for f in (a.args if a.op == "mul" else (a,))]
            case "add":
                return [a if (m := negated(a)) is None else m for a in t.args]
        return () if predicate_of(t) is not None else self.operands(t)

    def emit(self, p: Path, stmt: Stmt) -> Value:
        self.blocks[p].append(stmt)
        return results(stmt)[0]

    def const(self, v: float, p: Path = ()) -> Value:
        key = (("const", v.hex()), ())
        if key not in self.values:
            self.values[key] = self.new(())
            self.blocks[()].insert(0, Const(self.values[key], v))
        return self.values[key]

    def map(self, p: Path, fn: str, args: Iterable[Value], role: str = "") -> Value:
        args = tuple(args)
        key = (("map", fn, args), p)
        if key not in self.values:
            axes = frozenset().union(*[a.axes for a in args])
            self.values[key] = self.emit(p, Map(self.new(axes, fn in T.PREDICATES), fn, args, role))
        return self.values[key]

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
        for x in T.postorder([t]) if t not in self.row_memo else ():
            if x not in self.row_memo:
                self.row_memo[x] = self._stands_for_row(x)
        return self.row_memo[t]

    def _stands_for_row(self, t: Term) -> bool:
        mine = self.axes(t.free)
        match t.op:
            case "input":
                wider = any(x.extent > 1 and a not in mine for a, x in self.k.axes.items())
                return self.buffers[t.attr[0]].kind == "temp" and wider
            case "red" | "fold":
                summed = mine | self.walked(t.attr[-1])
                factors = [f for a in self.operands(t) for f in (a.args if a.op == "mul" else (a,))]
                return any(self.axes(f.free) >= summed for f in factors)
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
        limits: list[frozenset[Affine]] = []
        moved: dict[Term, _FoldState] = {}
        for m in self.members[here]:
            if isinstance(m, Term):
                self.values[m, p] = self.reduction(m, here, carries, moved)
                limits.append(self.vanishing(m))
            else:
                self.member(m, here)
                limits.append(frozenset())
        common = frozenset.intersection(*limits)
        order = [c for m in self.members[here] if isinstance(m, Term) for c in sorted(self.vanishing(m), key=str) if c in common]
        self.blocks[p].append(
            Loop(axis, tuple(carries.values()), tuple(body), tuple(self.globally(c) for c in dict.fromkeys(order)))
        )
        for m, state in moved.items():
            self.values[m, p] = state.arrived(p)

    def vanishing(self, t: Term) -> frozenset[Affine]:
        """Constraints outside of which an element adds nothing to this reduction."""
        if t.op == "red":
            return vanishing(t.args[0], IDENTITY[t.attr[0]], self.vanish_memo)
        h, comp, _ = t.attr
        ps, xs = fold_needs(h, comp, t.args)
        named = [p for p in ps if isinstance(h.pivots[p], str)]
        sets = [vanishing(t.args[p], IDENTITY[h.pivots[p]], self.vanish_memo) for p in named]
        sets += [vanishing(t.args[p], IDENTITY[h.pivots[p][2]], self.vanish_memo) for p in ps if is_payload(h.pivots[p])]
        for i in xs:  # what no such pivot weighs must be 0 itself
            for j, e in h.coef[i]:
                x = t.args[len(h.pivots) + j]
                if j in xs and not T.is_num(x, 0.0) and not {f"r{p}" for p in named} & set(T.variables(e)):
                    sets.append(vanishing(x, 0.0, self.vanish_memo))
        return frozenset.intersection(*sets) if sets else frozenset()

    def carry(
        self, carries: dict[object, Carry], key: object, axes: Iterable[str], init: float, kind: str, op: str = "+"
    ) -> Carry:
        c = Carry(self.const(init), self.new(axes), self.new(()), self.new(axes), kind, op)
        carries[key] = c
        return c

    def reduction(
        self, t: Term, here: Path, carries: dict[object, Carry] | None, moved: dict[Term, _FoldState] | None = None
    ) -> Value:
        """The value of a reduction whose operands live in `here`: of the whole axis if carries is None, else advanced by one tile
        (then the result is the value after the loop).  moved: gets the folds whose value is yet to be moved to the true pivots."""
        if t.op == "fold":
            state = _FoldState(self, t, here, carries)
            value = state.component()
            if moved is not None and any(map(state.lags, state.need_p)):
                moved[t] = state
            return value
        op, axis = t.attr
        if carries is not None and (fold := self.fold_at(t, here)) is not None:
            return _FoldState(self, fold[0], here, carries).pivot(fold[1])
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

    def reduce(self, op: str, axes: list[str], x: Value, here: Path, acc: Value | None, role: str = "") -> Value:
        for a in axes:
            x = self.along(x, a, here)
        out = frozenset(x.axes) - set(axes)
        if acc is None or frozenset(acc.axes) <= out:
            return self.emit(here, Reduce(self.new(out), op, tuple(axes), x, acc, role))
        part = self.emit(here, Reduce(self.new(out), op, tuple(axes), x, None, role))
        return self.map(here, {"+": "add", "*": "mul"}.get(op, op), (acc, part))

    def contraction(self, axes: list[str], args: list[Value], here: Path, acc: Value | None, role: str = "") -> Value:
        """acc + Σ over axes of a product: factors gather around the widest one, the rest is the other operand."""
        missing = [a for a in axes if not any(a in v.axes for v in args)]
        for a in missing:
            args = [self.along(args[0], a, here), *args[1:]]
        wide = max(args, key=lambda v: len(v.axes))
        left = [v for v in args if set(v.axes) <= set(wide.axes)]
        right = [v for v in args if v not in left]
        if not right:  # all lie on one tile: still a contraction of two operands
            rest = list(args)
            rest.remove(wide)
            left, right = [wide], rest
        x, y = (vs[0] if len(vs) == 1 else self.map(here, "mul", vs) for vs in (left, right))
        out = ({*x.axes} | {*y.axes}) - set(axes)
        if acc is None or set(acc.axes) <= out:
            return self.emit(here, Contract(self.new(out), tuple(axes), x, y, acc, role))
        return self.map(here, "add", (acc, self.emit(here, Contract(self.new(out), tuple(axes), x, y, None, role))))

    def along(self, x: Value, axis: str, here: Path) -> Value:
        """The value with `axis`, along which it may be constant: then a reduction over it counts the elements that exist."""
        if axis in x.axes:
            return x
        position = self.limits.get(axis, T.axis_index(axis))  # whether an element exists may depend on other axes
        key = (("along", position), here)
        if key not in self.values:
            ramp = self.emit(here, Iota(self.new(position.axes), position))
            self.values[key] = self.map(here, "mul", (self.const(0.0), ramp))
        return self.map(here, "add", (x, self.values[key]))

    def weighted_sum(self, axis: str, w: Value | None, x: Term, here: Path, acc: Value | None) -> Value:
        """acc + Σ over the tile of w·x."""
        if w is None:
            return self.total("+", axis, x, here, acc)
        if T.is_num(x, 1.0):
            return self.reduce("+", [axis], w, here, acc)
        factors = [self.value(a, here) for a in (x.args if x.op == "mul" else (x,))]
        return self.contraction([axis], [w, *factors], here, acc, "absorb")


def live(body: Iterable[Stmt], used: set[int]) -> tuple[Stmt, ...]:
    """The statements whose results are used, going backwards; `used` grows by what they read."""
    out: list[Stmt] = []
    for s in reversed(list(body)):
        if isinstance(s, Loop):
            used.update(c.next.id for c in s.carries)
            s = replace(s, body=live(s.body, used))
        elif not isinstance(s, Store) and s.out.id not in used:
            continue
        used.update(v.id for v in operands(s))
        out.append(s)
    return tuple(reversed(out))


def divisor(t: Term) -> float | None:
    """±n if the term is the constant ±1/n, which no binary number is exactly."""
    if t.op != "num" or t.attr == 0 or not math.isfinite(1.0 / t.attr):
        return None
    n = round(1.0 / t.attr)
    return float(n) if abs(n) <= 2**24 and abs(n) & (abs(n) - 1) and 1.0 / n == t.attr else None


def negated(t: Term) -> Term | None:
    """b if the term is (−1)·b."""
    if t.op == "mul" and len(t.args) == 2:
        for x, y in (t.args, t.args[::-1]):
            if T.is_num(x, -1.0) and y.op != "num":
                return y
    return None


def is_fn(pivot: object) -> bool:
    return isinstance(pivot, tuple) and pivot[0] == "fn"


def is_payload(pivot: object) -> bool:
    return isinstance(pivot, tuple) and pivot[0] == "at"


def fold_needs(h: Monoid, comp: int, args: tuple[Term, ...]) -> tuple[list[int], list[int]]:
    n = len(h.pivots)
    return h.needed(comp, lambda j: T.is_num(args[n + j], 0.0))


class _FoldState:
    """One fold being absorbed, at one place.  Pivots and components are shared between folds by what they are made of."""

    def __init__(self, low: _Lowering, t: Term, here: Path, carries: dict[object, Carry] | None):
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
                parts.append(x if T.is_num(e, 1.0) else self.low.map(self.here, "mul", (self.coefficient(e, "old"), x), "rescale"))
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

    # ---- coefficients
    def expression(self, e: Term, at: dict[str, Value], role: str) -> Value:
        """The value of a term over variables.  (Equal parts of several coefficients are one value, thanks to `_Lowering.map`.)"""
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


def infinite_when_empty(e: Term) -> bool:
    """Is a pivot that is this function of components infinite where these are 0?  (NaN is seen to: any number serves there.)"""
    with np.errstate(all="ignore"):
        return bool(np.isinf(evaluate_scalar(e, dict.fromkeys(T.variables(e), np.float64(0.0)))))


def difference(t: Term) -> tuple[Term, Term] | None:
    """(a, b) if the term is a + (−1)·b."""
    if len(t.args) != 2:
        return None
    for a, b in (t.args, t.args[::-1]):
        if (m := negated(b)) is not None and negated(a) is None:
            return a, m
    return None


def vanishes_at_identity(e: Term, pivots: tuple[tuple[int, str], ...]) -> bool:
    """Is the coefficient 0 whenever one of these max/min pivots r is at its identity and every R is finite?  Judged on structure:
    a factor exp(a·r + …) whose argument then goes to −inf, with r nowhere else in the product."""

    def drops(t: Term, name: str, down: float) -> bool:
        if t.op == "mul":
            hit = [a for a in t.args if name in T.variables(a)]
            return len(hit) == 1 and drops(hit[0], name, down)
        return t.op == "un" and t.attr in ("exp", "exp2") and (slope(t.args[0], name) or 0.0) * down > 0

    return bool(pivots) and all(drops(e, f"r{p}", 1.0 if op == "max" else -1.0) for p, op in pivots)


def slope(t: Term, name: str) -> float | None:
    """a if t is a·name + (terms without it), a constant; None otherwise."""
    if t.op == "var":
        return 1.0 if t.attr == name else None
    if t.op not in ("add", "mul"):
        return None
    hit = [a for a in t.args if name in T.variables(a)]
    a = slope(hit[0], name) if len(hit) == 1 else None
    if a is None or t.op == "add":
        return a
    rest = [x for x in t.args if x is not hit[0]]
    return a * math.prod(float(x.attr) for x in rest) if all(x.op == "num" for x in rest) else None
