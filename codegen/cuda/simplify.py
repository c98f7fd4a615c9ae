"""Tile program → tile program: constants that multiply what goes into an exponential move into it, and what fills many registers
for statements behind a loop only is made behind that loop.

Every value v is kept as f·v' with a constant f > 0, so that exp(c·s − c·m) becomes exp2(s·(c·log₂e) − m·(c·log₂e)): one
multiply-add for each element, the second product once a row.  (Where s may be so large that the product overflows, a mask's least
number, say, it is the difference that is multiplied.)  Positive factors pass through max, min, comparisons with 0 and
±∞, `where` with such a constant, sums of equal factors, and carried max and min pivots.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..tile import Carry, Const, Contract, Gather, Load, Loop, Map, Reduce, Stmt, Store, TileProgram, Value, live, operands, walk

LOG2E = 1.0 / math.log(2.0)
_FIXED = (0.0, math.inf, -math.inf)  # f·x = x for every f > 0


def fold_exponentials(p: TileProgram) -> TileProgram:
    return _Scaling(p).run()


def exponents(p: TileProgram) -> set[int]:
    """Values that end up in exponents: themselves, their extrema, or their differences."""
    found: set[int] = set()

    def visit(body: tuple[Stmt, ...]) -> None:
        for s in reversed(body):
            match s:
                case Map(fn="exp" | "exp2"):
                    found.add(s.args[0].id)
                case Map(fn="where") if s.out.id in found:
                    found.update(a.id for a in s.args[1:])
                case Map(fn="add" | "sub" | "max" | "min") if s.out.id in found:
                    found.update(a.id for a in s.args)
                case Map(fn="mul") if s.out.id in found:
                    found.update(a.id for a in s.args if a.axes == s.out.axes)
                case Reduce(op="max" | "min") if s.out.id in found:
                    found.update(a.id for a in (s.arg, s.acc) if a)
                case Loop():
                    before = -1
                    while before != len(found):
                        before = len(found)
                        found.update(c.next.id for c in s.carries if {c.out.id, c.phi.id} & found)
                        visit(s.body)

    visit(p.body)
    return found


# numbers that a factor may take out of range; those of other types have room to spare
LARGEST = {"bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": 1.7976931348623157e308}


def magnitudes(p: TileProgram) -> dict[int, float]:
    """How large a finite value of the program may be for what it is loaded from, or a constant: by sums, choices and multiples of
    these.  Products of tensors, and sums along an axis, are left out of account: no mask comes from there."""
    found: dict[int, float] = {}

    def of(v: Value | None) -> float:
        return found.get(v.id, 0.0) if v is not None else 0.0

    def visit(body: tuple[Stmt, ...]) -> None:
        for s in body:
            match s:
                case Const():
                    found[s.out.id] = abs(s.value) if math.isfinite(s.value) else 0.0
                case Load():
                    found[s.out.id] = LARGEST.get(p.buffer(s.buffer).dtype, 0.0)
                case Map(fn="where"):
                    found[s.out.id] = max(map(of, s.args[1:]))
                case Map(fn="add" | "sub" | "max" | "min" | "neg"):
                    found[s.out.id] = max(map(of, s.args))
                case Map(fn="mul"):
                    tensors = [a for a in s.args if a.id not in consts]
                    factor = math.prod(abs(consts[a.id]) for a in s.args if a.id in consts)
                    found[s.out.id] = of(tensors[0]) * factor if len(tensors) == 1 else 0.0
                case Reduce(op="max" | "min"):
                    found[s.out.id] = max(of(s.arg), of(s.acc))
                case Loop():
                    for _ in range(2):  # what one iteration hands on, the next one may hand on elsewhere
                        for c in s.carries:
                            found[c.phi.id] = found[c.out.id] = max(of(c.init), of(c.next))
                        visit(s.body)

    consts = {s.out.id: s.value for s in walk(p.body) if isinstance(s, Const)}
    visit(p.body)
    return found


FEW = 1024  # elements of a tile: what is smaller may be read before a loop, which hides the trip to memory


def behind_loops(p: TileProgram) -> TileProgram:
    """What no loop reads is made after the loops that stand before its first reader: its registers are the loops' then.  Values of
    few elements stay where they are."""
    return replace(p, body=_behind(p, p.body))


def _behind(p: TileProgram, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    out: list[Stmt] = []
    for s in reversed(body):  # readers have moved before
        if isinstance(s, Loop):
            s = replace(s, body=_behind(p, s.body))
        elif not isinstance(s, Store) and math.prod(p.axes[a].tile for a in s.out.axes if a in p.axes) > FEW:
            written = s.buffer if isinstance(s, Load | Gather) else None
            loops = 0  # place after the last loop that s may follow
            for n, x in enumerate(out):
                inside = x.body if isinstance(x, Loop) else (x,)
                if s.out in reads_of(x) or any(isinstance(y, Store) and y.buffer == written for y in walk(inside)):
                    break
                loops = n + 1 if isinstance(x, Loop) else loops
            out.insert(loops, s)
            continue
        out.insert(0, s)
    return tuple(out)


def reads_of(s: Stmt) -> set[Value]:
    """Values that a statement reads, in the body of a loop too."""
    inside = {v for x in walk(s.body) for v in operands(x)} | {c.next for c in s.carries} if isinstance(s, Loop) else set()
    return {*operands(s), *inside}


class _Scaling:
    def __init__(self, p: TileProgram):
        self.p = p
        self.count = max((s.out.id for s in walk(p.body) if not isinstance(s, Loop | Store)), default=0)
        for s in walk(p.body):
            if isinstance(s, Loop):
                self.count = max([self.count, *(v.id for c in s.carries for v in (c.init, c.phi, c.next, c.out))])
        self.constants: dict[int, float] = {}
        self.new_constants: dict[str, Value] = {}
        self.reps: dict[int, tuple[Value, float]] = {}
        self.made: dict[tuple[int, float], Value] = {}  # (value, factor) → product
        self.defs: dict[int, Stmt] = {}
        self.exponents = exponents(p)
        self.differences = {s.out.id: s.args for s in walk(p.body) if isinstance(s, Map) and s.fn == "sub"}
        self.magnitudes, self.largest = magnitudes(p), LARGEST["float64" if p.compute_dtype == "float64" else "float32"]

    def run(self) -> TileProgram:
        body = self.block(self.p.body)
        consts: tuple[Stmt, ...] = tuple(Const(v, float.fromhex(h)) for h, v in self.new_constants.items())
        return replace(self.p, body=live(consts + body, set()))

    def new(self, axes: tuple[str, ...]) -> Value:
        self.count += 1
        return Value(self.count, axes)

    def const(self, x: float) -> Value:
        if x.hex() not in self.new_constants:
            self.new_constants[x.hex()] = v = self.new(())
            self.constants[v.id] = x
        return self.new_constants[x.hex()]

    def rep(self, v: Value) -> tuple[Value, float]:
        return self.reps.get(v.id, (v, 1.0))

    def times(self, v: Value, f: float, out: list[Stmt]) -> Value:
        """f·v for a value of the new program."""
        if f == 1.0 or self.constants.get(v.id) in _FIXED:
            return v
        if v.id in self.constants:
            return self.const(self.constants[v.id] * f)
        d = self.defs.get(v.id)
        if isinstance(d, Map) and d.fn == "mul" and (small := [a for a in d.args if len(a.axes) < len(v.axes)]):
            if (v.id, f) not in self.made:  # a factor of fewer elements takes it up
                few = min(small, key=lambda a: math.prod(self.p.axes[x].tile for x in a.axes if x in self.p.axes))
                at = d.args.index(few)  # one of them, if it is there twice
                args = (*d.args[:at], self.times(few, f, out), *d.args[at + 1 :])
                self.made[v.id, f] = self.new(v.axes)
                out.append(Map(self.made[v.id, f], "mul", args, d.role))
            return self.made[v.id, f]
        if (v.id, f) not in self.made:
            self.made[v.id, f] = self.new(v.axes)
            out.append(Map(self.made[v.id, f], "mul", (v, self.const(f))))
        return self.made[v.id, f]

    def plain(self, v: Value, out: list[Stmt]) -> Value:
        return self.times(*self.rep(v), out)

    def block(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            new = self.statement(s, out)
            if new is not None:
                out.append(new)
                if not isinstance(new, Loop | Store):
                    self.defs[new.out.id] = new
        return tuple(out)

    def statement(self, s: Stmt, out: list[Stmt]) -> Stmt | None:
        match s:
            case Const():
                self.constants[s.out.id] = s.value
                return s
            case Map():
                return self.map(s, out)
            case Reduce(op="max" | "min"):
                x, f = self.rep(s.arg)
                if s.acc is None:
                    self.reps[s.out.id] = s.out, f
                    return replace(s, arg=x)
                a, g = self.rep(s.acc)
                if self.constants.get(a.id) in _FIXED:
                    g = f
                if f == g:
                    self.reps[s.out.id] = s.out, f
                    return replace(s, arg=x, acc=a)
                return replace(s, arg=self.times(x, f, out), acc=self.times(a, g, out))
            case Reduce():
                return replace(s, arg=self.plain(s.arg, out), acc=s.acc and self.plain(s.acc, out))
            case Contract():
                return replace(s, a=self.plain(s.a, out), b=self.plain(s.b, out), acc=s.acc and self.plain(s.acc, out))
            case Gather():
                return replace(s, position=self.plain(s.position, out))
            case Store():
                return replace(s, arg=self.plain(s.arg, out))
            case Loop():
                return self.loop(s, out)
        return s

    def map(self, s: Map, out: list[Stmt]) -> Stmt | None:
        reps = [self.rep(a) for a in s.args]
        values = [self.constants.get(v.id) for v, _ in reps]
        if s.fn == "mul":
            scale = [c for c in values if c is not None]
            rest = [r for r, c in zip(reps, values) if c is None]
            f = math.prod(scale)
            if len(rest) == 1 and len(scale) > 0 and 0 < f < math.inf and 1e-20 < f * rest[0][1] < 1e20:
                self.reps[s.out.id] = rest[0][0], rest[0][1] * f
                return None
        elif s.fn == "where":
            c = self.plain(s.args[0], out)
            common = self.common(reps[1:], values[1:])
            if common is not None:
                self.reps[s.out.id] = s.out, common
                return replace(s, args=(c, reps[1][0], reps[2][0]))
        elif s.fn in ("max", "min", "sub") or (s.fn == "add" and all(c is None for c in values)):
            common = self.common(reps, values)
            if common is not None:
                self.reps[s.out.id] = s.out, common
                return replace(s, args=tuple(v for v, _ in reps))
            if s.fn == "add" and s.out.id in self.exponents and self.has_room(s.out, LOG2E):
                # the sum in units of log 2: its terms are scaled, not the sum
                self.reps[s.out.id] = s.out, 1.0 / LOG2E
                return replace(s, args=tuple(self.times(v, f * LOG2E, out) for v, f in reps))
        elif s.fn in ("lt", "le", "eq", "ne"):
            if self.common(reps, values) is not None:
                return replace(s, args=tuple(v for v, _ in reps))
        elif s.fn == "exp":
            return Map(s.out, "exp2", (self.exponent(s.args[0], LOG2E, out),), s.role)
        elif s.fn == "exp2":
            return Map(s.out, "exp2", (self.exponent(s.args[0], 1.0, out),), s.role)
        return replace(s, args=tuple(self.plain(a, out) for a in s.args))

    def common(self, reps: list[tuple[Value, float]], values: list[float | None]) -> float | None:
        """The factor that all share, constants 0 and ±∞ aside."""
        factors = {f for (_, f), c in zip(reps, values) if c not in _FIXED}
        return factors.pop() if len(factors) == 1 else None

    def has_room(self, v: Value, factor: float) -> bool:
        """May the terms of a value of the old program be multiplied without overflow?"""
        return self.magnitudes.get(v.id, 0.0) * factor <= self.largest

    def exponent(self, of: Value, base: float, out: list[Stmt]) -> Value:
        """A value of the old program times base, with the product moved into a difference."""
        v, f = self.rep(of)
        d = self.defs.get(v.id)
        # both terms of a difference must be too large for it to be none
        terms = self.differences.get(of.id, (of,))
        if isinstance(d, Map) and d.fn == "sub" and f * base != 1.0 and any(self.has_room(a, base) for a in terms):
            new = Map(self.new(v.axes), "sub", tuple(self.times(a, f * base, out) for a in d.args))
            out.append(new)
            return new.out
        return self.times(v, f * base, out)

    # ---- loops
    def loop(self, s: Loop, out: list[Stmt]) -> Stmt:
        inits = {c.phi.id: self.rep(c.init) for c in s.carries}
        factors = self.pivot_factors(s, inits)
        carries = []
        for c in s.carries:
            f = factors.get(c.phi.id, 1.0)
            init, g = inits[c.phi.id]
            start = self.const(self.constants[init.id] / f) if f != 1.0 else self.times(init, g, out)
            self.reps[c.phi.id] = c.phi, f
            carries.append((c, start, f))
        before = dict(self.made)
        body = list(self.block(s.body))
        done = []
        for c, start, f in carries:
            v, g = self.rep(c.next)
            nxt = v if g == f else self.times(v, g / f, body)
            self.reps[c.out.id] = c.out, f
            done.append(Carry(start, c.phi, nxt, c.out, c.kind, c.op))
        self.made = before  # what was made in the loop is not seen after it
        return Loop(s.axis, tuple(done), tuple(body), s.constraints)

    def pivot_factors(self, s: Loop, inits: dict[int, tuple[Value, float]]) -> dict[int, float]:
        """Factors of carried max and min pivots: those of what they are the maximum of, found by a trial run of the body."""
        pivots = {}
        for r in s.body:
            if isinstance(r, Reduce) and r.op in ("max", "min") and r.acc is not None:
                for c in s.carries:
                    if c.next == r.out and c.phi == r.acc and inits[c.phi.id][0].id in self.constants:
                        pivots[c.phi.id] = r.arg
        if not pivots:
            return {}
        trial = _Scaling(self.p)
        trial.count, trial.constants, trial.reps, trial.defs = self.count, dict(self.constants), dict(self.reps), dict(self.defs)
        trial.block(s.body)
        return {phi: trial.rep(arg)[1] for phi, arg in pivots.items()}
