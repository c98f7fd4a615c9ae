"""Pivots frozen at 0: a tile program without its running maxima, for arguments that do not need them.

A fold's pivot is free: any number gives the same result, and the maximum is merely one that never overflows.  Where the norms of
the arguments suggest that no exponent is large, 0 is tried: that saves the pass that finds the maximum, the one that subtracts
it, and the rescaling of state.  Whether it served is seen afterwards in guard buffers, one number a row: no sum overflowed, and
the weights' own sum is of a size at which neither they nor its inverse lost bits.  Blocks with rows that fail are computed again
as written.

With exponents bounded, masks act on weights (0) rather than exponents (−inf), and exp(c·x) is 2^(c'·x) where that is quicker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...extraction.plan import Buffer
from ...program import elements
from ...terms import axis_index
from ..invariance import Form, Forms, Unknown
from ..tile import Carry, Const, Contract, Loop, Map, Reduce, Stmt, Store, TileProgram, Value, live, operands, walk
from .estimates import Estimate, Estimates, Norm, norm
from .functions import FAST_EXP2
from .rewrite import Fresh, loose_limits, rename

MOST = 40.0  # exponents that are expected to do no harm
LEAST, LARGEST = 2.0**-10, 2.0**80  # sums of weights such that products with them, or their inverse, keep float32's bits
WORTH = 4.0  # weights for each element of the operands whose norms must be found
SMALL = 1 << 17  # weights below which it is not worth the calls


@dataclass(frozen=True)
class Guard:
    """A buffer along `axes` with a number for each row, which must be finite and in a range."""

    buffer: str
    axes: tuple[str, ...]
    least: float = -math.inf
    largest: float = math.inf

    def good(self, x: np.ndarray) -> bool:
        """Are all of them?  (NaN compares as false.)"""
        low, high = x.min(initial=math.inf), x.max(initial=-math.inf)
        return bool(low >= self.least and high <= self.largest and low > -math.inf and high < math.inf) or x.size == 0


@dataclass(frozen=True)
class Frozen:
    """program: also writes the guards.  exponents: how large they are, as the arguments tell."""

    program: TileProgram
    exponents: tuple[Estimate, ...]
    guards: tuple[Guard, ...]

    @cached_property
    def norms(self) -> list[Norm]:
        return list(dict.fromkeys(n for e in self.exponents for n in e.norms()))

    def fits(self, arrays: dict[str, np.ndarray]) -> bool:
        """Are the exponents small enough for these arguments?  arrays: by buffer."""
        dtype = np.dtype(self.program.compute_dtype)
        with np.errstate(all="ignore"):
            norms = {n: norm(arrays[n.buffer], n.dims, dtype) for n in self.norms}
        return all(e.of(norms) <= MOST for e in self.exponents)

    def failed(self, arrays: dict[str, np.ndarray], block: Callable[[int], dict[str, slice]], blocks: int) -> list[int]:
        """Blocks with rows that must be computed again.  block: its part of each axis."""
        doubtful = [g for g in self.guards if not g.good(arrays[g.buffer])]
        if not doubtful:
            return []
        parts = map(block, range(blocks))
        return [
            n for n, at in enumerate(parts) if not all(g.good(arrays[g.buffer][tuple(at[a] for a in g.axes)]) for g in doubtful)
        ]


def freeze(p: TileProgram) -> Frozen | None:
    """The program with pivots frozen, if that leaves its results as they are, pays, and can be foreseen to succeed."""
    statements = list(walk(p.body))
    tops = [s.out.id for s in statements if isinstance(s, Reduce) and s.op in ("max", "min")]
    if not tops or not any(isinstance(s, Map) and s.fn == "exp" for s in statements) or loose_limits(p):
        return None  # without exponentials there is nothing that a pivot serves
    for pivots in dict.fromkeys([tuple(tops), *((t,) for t in tops)]):
        try:
            return _Freeze(p, set(pivots)).run()
        except Unknown:
            continue
    return None


class _Freeze:
    def __init__(self, p: TileProgram, pivots: set[int]):
        self.p, self.pivots = p, pivots
        self.forms = Forms(p, pivots)
        self.fresh = Fresh(p)
        self.now: dict[int, Value | float] = {}  # value → what stands for it
        self.made: dict[int, Stmt] = {}  # what computes it now
        self.numbers: dict[str, Const] = {}
        self.nexts = {c.next.id: c for s in walk(p.body) if isinstance(s, Loop) for c in s.carries}
        self.carries = {c.phi.id: c for c in self.nexts.values()} | {c.out.id: c for c in self.nexts.values()}
        self.source = {s.out.id: s for s in walk(p.body) if not isinstance(s, Loop | Store)}
        self.guards: list[Guard] = []
        self.writes: list[Buffer] = []
        self.whole: set[str] = set()  # axes of one tile that guards are summed over
        self.sums: set[int] = set()  # pivots that a sum of weights depends on

    def run(self) -> Frozen:
        weights = [s for s in self.source.values() if isinstance(s, Map) and s.fn == "exp" and not self.form(s.out).free]
        estimates = Estimates(self.p, self.source, lambda v: v.id in self.forms.aliases)
        sizes = {s.out: estimates.of(s.args[0]) for s in weights}
        sizes = {v: e for v, e in sizes.items() if e is None or any(e.norms()) or e.of({}) > MOST}  # the others are small anyway
        norms = dict.fromkeys((n for e in sizes.values() if e is not None for n in e.norms()), 0.0)
        exponents = tuple(dict.fromkeys(e for e in sizes.values() if e is not None))
        if not exponents or len(exponents) < len(set(sizes.values())) or any(e.of(norms) > MOST for e in exponents):
            raise Unknown(self.p)
        steepest = max(abs(a) for s in weights for _, a in self.form(s.out).coef)
        if any(abs(a) > 1.001 * steepest for f in self.forms.form.values() if f.times for _, a in f.coef):
            raise Unknown(self.p)  # squares of weights would leave the range of exponents
        made = sum(elements(tuple(self.p.axes[a].extent for a in v.axes)) for v in sizes)
        read = sum(self.p.buffer(b).size for b in {n.buffer for n in norms})
        if made < max(SMALL, WORTH * read):
            raise Unknown(self.p)
        body = list(self.body(self.p.body, ()))
        if not self.pivots <= self.sums:
            raise Unknown(self.p)
        body = [*self.numbers.values(), *live(body, set())]
        axes = {a: replace(x, role="whole") if a in self.whole else x for a, x in self.p.axes.items()}
        writes = (*self.p.writes, *self.writes)
        return Frozen(replace(self.p, axes=axes, body=live(body, set()), writes=writes), exponents, tuple(self.guards))

    def form(self, v: Value) -> Form:
        return self.forms.form[v.id]

    # ---- operands
    def get(self, v: Value) -> Value | float:
        return self.now.get(v.id, v)

    def value(self, v: Value | float) -> Value:
        """A number as a value."""
        if isinstance(v, Value):
            return v
        key = repr(v)
        if key not in self.numbers:
            self.numbers[key] = Const(self.fresh(()), v)
            self.made[self.numbers[key].out.id] = self.numbers[key]
        return self.numbers[key].out

    def same_axes(self, new: Iterable[Value], old: Iterable[Value]) -> None:
        if {a for v in new for a in v.axes} != {a for v in old for a in v.axes}:
            raise Unknown("an axis is lost")

    # ---- statements
    def body(self, body: tuple[Stmt, ...], around: tuple[str, ...]) -> Iterator[Stmt]:
        for s in body:
            for new in self.statement(s, around):
                if not isinstance(new, Loop | Store):
                    self.made[new.out.id] = new
                yield new
            if isinstance(s, Reduce | Contract) and s.out.id not in self.pivots and s.out.id not in self.nexts:
                yield from self.guard(s.out, around)
            elif isinstance(s, Loop):
                for c in s.carries:
                    if c.next.id not in self.pivots:
                        yield from self.guard(c.out, around)

    def statement(self, s: Stmt, around: tuple[str, ...]) -> Iterator[Stmt]:
        match s:
            case Const():
                self.now[s.out.id] = s.value
            case Loop():
                carries: list[Carry] = []
                for c in s.carries:
                    if c.next.id in self.pivots:
                        self.now[c.phi.id] = self.now[c.out.id] = 0.0
                    else:
                        carries.append(replace(c, init=self.value(self.get(c.init))))
                inner = tuple(self.body(s.body, (*around, s.axis)))
                yield replace(s, carries=tuple(replace(c, next=self.value(self.get(c.next))) for c in carries), body=inner)
            case Map():
                yield from self.map(s)
            case Reduce() if s.out.id in self.pivots:
                self.now[s.out.id] = 0.0
            case Store():
                yield replace(s, arg=self.value(self.get(s.arg)))
            case _:
                arrays = [v for v in operands(s) if v.axes]
                new = {v.id: self.value(self.get(v)) for v in operands(s)}
                self.same_axes([new[v.id] for v in arrays], arrays)
                yield rename(s, new)

    def map(self, s: Map) -> Iterator[Stmt]:
        if s.out.id in self.forms.hidden:
            return
        if s.out.id in self.forms.aliases:
            self.now[s.out.id] = 0.0
            return
        args = [self.get(a) for a in s.args]
        if s.fn == "exp" and not self.form(s.out).free and isinstance(args[0], Value):
            yield from self.weight(s, args[0])
            return
        if s.fn in ("add", "mul"):
            unit = 0.0 if s.fn == "add" else 1.0
            args = [a for a in args if a != unit] or [unit]
        elif s.fn == "sub" and args[1] == 0.0:
            args = args[:1]
        numbers = [a for a in args if isinstance(a, float)]
        if len(numbers) == len(args) and s.fn in ("add", "mul", "sub", "exp"):
            match s.fn:
                case "add":
                    x = math.fsum(numbers)
                case "mul":
                    x = math.prod(numbers)
                case "exp":
                    x = math.exp(numbers[0])
                case _:
                    x = numbers[0] - sum(numbers[1:])
            self.now[s.out.id] = x
            return
        values = [self.value(a) for a in args]
        self.same_axes(values, s.args)
        if len(values) == 1 and s.fn in ("add", "mul", "sub"):
            self.now[s.out.id] = values[0]
            return
        yield replace(s, args=tuple(values))

    def weight(self, s: Map, arg: Value) -> Iterator[Stmt]:
        """exp of an argument that is bounded where it is not masked."""
        masks, x, scale = self.unmasked(arg)
        base = math.e
        if FAST_EXP2 and isinstance(self.made.get(x.id), Contract) and abs(scale) * math.log2(math.e) <= 1.0:
            base, scale = 2.0, scale * math.log2(math.e)
        if scale != 1.0:
            scaled = Map(self.fresh(x.axes), "mul", (x, self.value(scale)))
            yield scaled
            x = scaled.out
        outs = [self.fresh(x.axes)]
        for m in reversed(masks):
            outs.append(self.fresh({*m.axes, *outs[-1].axes}))
        self.same_axes(outs[-1:], [s.out])
        outs[-1] = s.out
        yield Map(outs[0], "exp" if base == math.e else "exp2", (x,), s.role)
        for m, inner, out in zip(reversed(masks), outs, outs[1:]):
            yield Map(out, "where", (m, inner, self.value(0.0)), s.role)

    def unmasked(self, x: Value) -> tuple[list[Value], Value, float]:
        """(masks, y, c) such that x is c·y where all masks hold, and −inf elsewhere."""
        masks, scale = [], 1.0
        while isinstance(s := self.made.get(x.id), Map):
            numbers = [n.value for a in s.args if isinstance(n := self.made.get(a.id), Const)]
            rest = [a for a in s.args if not isinstance(self.made.get(a.id), Const)]
            if s.fn == "where" and rest == list(s.args[:2]) and numbers == [-math.inf]:
                masks.append(s.args[0])
                x = s.args[1]
            elif s.fn == "mul" and len(rest) == 1 and math.prod(numbers) > 0:
                scale *= math.prod(numbers)
                x = rest[0]
            else:
                break
        return masks, x, scale

    # ---- guards
    def guard(self, v: Value, around: tuple[str, ...]) -> Iterator[Stmt]:
        form = self.form(v)
        if form.free:
            return
        x = self.get(v)
        if not isinstance(x, Value) or not set(around) <= set(v.axes):
            raise Unknown(v)
        weights = self.positive(v)
        if weights:
            self.sums |= self.unknowns(form)
        rows = frozenset().union(*(self.forms.axes[u] for u, _ in form.coef))
        inner = tuple(a for a in v.axes if a not in rows and self.p.axes[a].trips == 1)
        if inner and not weights:
            total = Reduce(self.fresh(set(x.axes) - set(inner)), "+", inner, x)
            yield total
            x = total.out
            self.whole |= set(inner)
        name = f"guard{len(self.guards)}"
        self.guards.append(Guard(name, x.axes, LEAST, LARGEST) if weights else Guard(name, x.axes))
        self.writes.append(Buffer(name, tuple(self.p.axes[a].extent for a in x.axes), self.p.compute_dtype, "temp", x.axes))
        yield Store(name, tuple(map(axis_index, x.axes)), x)

    def unknowns(self, form: Form) -> set[int]:
        """The pivots that a form depends on."""
        return {u if u in self.pivots else self.carries[u].next.id for u, _ in form.coef}

    def positive(self, v: Value, seen: Sequence[int] = ()) -> bool:
        """Is it a sum of weights?"""
        if v.id in self.carries:
            c = self.carries[v.id]
            return v.id in seen or (self.forms.zero(c.init) and self.positive(c.next, (*seen, c.phi.id, c.out.id)))
        match s := self.source.get(v.id):
            case Map(_, "exp"):
                return True
            case Map(_, "mul"):
                return all(self.positive(a, seen) for a in s.args)
            case Map(_, "where"):
                return all(self.forms.zero(a) or self.positive(a, seen) for a in s.args[1:])
            case Reduce(_, "+"):
                return self.positive(s.arg, seen) and (s.acc is None or self.positive(s.acc, seen))
        return False
