"""Instances of a rule, made from its declaration: terms that have the form of its pattern.

Axes are distinct, equal, of extent 1, prime, or split into blocks that do not fit; operands share axes or do not.  Variables
become leaves, among them masked, infinite, zero and signed ones; the rule's own conditions say what they should be most of the
time, and the rest tests that the conditions are asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..program import Input, Output, Program
from ..rules.rule import Rule, Sexpr, is_number, is_star, parse
from ..terms import BINARY, Term, add, axis_index, bi, gather, inp, make, mul, num, red, un, view, where

POOL = ("k", "l", "m")  # axes that rules reduce over
OTHER = ("a", "b")
NUMBERS = (2.0, -1.5, 0.5, -1.0, 1.0, 0.0, 3.0, math.inf, -math.inf)
RANGES = (None, None, None, (0.5, 2.0), (-2.0, -0.5), (0.0, 2.0), (-2.0, 0.0), (-1.0, 1.0))


@dataclass(frozen=True)
class Shapes:
    """Extents of all axes, and the block size where one is split."""

    name: str
    extents: tuple[int, ...]  # of POOL and OTHER
    block: int

    @property
    def axes(self) -> dict[str, int]:
        sizes = dict(zip((*POOL, *OTHER), self.extents))
        return sizes | {"n" + a: sizes[a] for a in POOL}


SHAPES = (
    Shapes("distinct", (3, 2, 4, 2, 5), 2),
    Shapes("size 1", (5, 3, 1, 1, 2), 2),
    Shapes("equal", (2, 2, 2, 2, 2), 2),
    Shapes("prime", (7, 5, 3, 2, 1), 3),
    Shapes("size 1, reduced", (1, 3, 2, 4, 1), 2),
    Shapes("split unevenly", (5, 4, 3, 1, 2), 3),
)


@dataclass(frozen=True)
class Hint:
    """What a rule's conditions ask of a variable."""

    positive: bool = False
    negative: bool = False
    nonzero: bool = False
    finite: bool = False
    above: float | None = None  # its lower bound is to be larger than this number
    below: float | None = None  # … its upper bound smaller
    without: frozenset[str] = frozenset()  # axis variables that it does not vary along


def hints(rule: Rule) -> dict[str, Hint]:
    """What the conditions ask of each variable, as far as a leaf can be chosen by it."""
    found: dict[str, dict[str, Any]] = {}

    def note(x: Sexpr, **what: Any) -> None:
        if isinstance(x, str):
            old = found.setdefault(x, {})
            if "without" in what:
                what["without"] |= old.get("without", frozenset())
            old.update(what)

    conditions = [c for c in rule.conditions if isinstance(c, list)]
    for c in conditions:
        match c:
            case ["finite" | "noinf", x]:
                note(x, finite=True)
            case ["nonneg", x]:
                note(x, positive=True)
            case ["nonzero", x]:
                note(x, nonzero=True)
            case ["lz" | "hz", x, v]:
                sign = {">": "positive", ">=": "positive", "<": "negative", "<=": "negative"}
                for d in conditions:
                    if d[0] in sign and d[1] == v:
                        note(x, **{sign[d[0]]: True})
                        if limit := _number(d[2]):
                            note(x, **{"above" if sign[d[0]] == "positive" else "below": limit})
            case ["indep" | "cofactor" | "addend", k, x]:
                note(x, without=frozenset([k]))
            case ["free-of", k, *xs]:
                for x in xs:
                    note(x, without=frozenset([k]))
            case ["all", [fact], xs] if fact in ("finite", "noinf"):
                note(xs, finite=True)
    return {x: Hint(**h) for x, h in found.items()}


def _number(x: Sexpr) -> float:
    """What a text says; 0 if it is no number."""
    try:
        return float(x)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0


class Maker:
    """Makes terms from patterns."""

    def __init__(
        self, rng: np.random.Generator, extents: Mapping[str, int], wanted: Mapping[str, Hint] | None = None, nans: bool = False
    ):
        """nans: some operands are NaN in places, which is computed of finite inputs."""
        self.rng, self.extents, self.wanted, self.nans = rng, dict(extents), dict(wanted or {}), nans
        self.inputs: dict[str, Input] = {}
        self.fresh()

    def fresh(self) -> None:
        """Forget the variables of the last instance, and choose how the operands of the next one share axes."""
        self.axis: dict[str, str] = {}
        self.number: dict[str, float] = {}
        self.text: dict[str, str] = {}
        self.views: dict[str, tuple] = {}
        self.terms: dict[str, Term] = {}
        self.stars: dict[str, list[Term]] = {}
        self.sharing = self.pick(["any", "any", "any", "same", "none"])
        self.mood = self.pick(["mixed", "mixed", "mixed", "infinite", "zero"])
        self.same = [a for a in (*POOL, *OTHER) if self.chance(0.5)]
        self.left = list(self.rng.permutation([*POOL, *OTHER]))

    # ---- chance
    def pick(self, xs: Sequence[Any]) -> Any:
        return xs[int(self.rng.integers(len(xs)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    # ---- leaves
    def input(self, axes: Iterable[str], bounds: tuple[float, float] | None = None, kind: str = "x") -> Term:
        name = f"{kind}{len(self.inputs)}"
        axes = [a for a in axes if a in self.extents]
        self.inputs[name] = Input(name, tuple(self.extents[a] for a in axes), "float64", bounds)
        return inp(name, tuple(axis_index(a) for a in axes))

    def axes(self) -> list[str]:
        match self.sharing:
            case "same":
                return list(self.same)
            case "none":
                n = int(self.rng.integers(0, 3))
                taken, self.left = self.left[:n], self.left[n:]
                return sorted(taken)
        return [a for a in (*POOL, *OTHER) if self.chance(0.45)]

    def leaf(self, name: str = "") -> Term:
        hint = self.wanted.get(name)
        axes, bounds = self.axes(), self.pick(RANGES)
        if hint is None:
            return self.wild(axes, bounds)
        if hint.above is not None or hint.below is not None:
            bounds = self.beside(hint)
        elif hint.positive or hint.negative:
            bounds = (-2.0, -0.5) if hint.negative else self.pick([(0.5, 2.0), (0.5, 2.0), (0.0, 2.0)])
        elif hint.nonzero:
            bounds = self.pick([(0.5, 2.0), (-2.0, -0.5)])
        if self.chance(0.4):  # not what the conditions ask: some of it only
            return self.wild(axes, bounds if self.chance(0.5) else self.pick(RANGES))
        axes = [a for a in axes if a not in {self.axis.get(k, k) for k in hint.without}]
        return self.input(axes, bounds) if hint != Hint(without=hint.without) else self.wild(axes, bounds)

    def beside(self, hint: Hint) -> tuple[float, float]:
        """A range that begins (or ends) right beside the limit that a condition has, or a little further: laws that are wrong there may be
        as good as right elsewhere."""
        above, below = hint.above, hint.below
        limit = above if above is not None else below
        assert limit is not None
        room = below - above if above is not None and below is not None else 8.0 * max(1.0, abs(limit))
        gap = self.pick([1e-3, 1e-3, 0.05]) * room
        if above is None:
            return limit - room, limit - gap
        return limit + gap, limit + room - (gap if below is not None else 0.0)

    def wild(self, axes: list[str], bounds: tuple[float, float] | None) -> Term:
        """Anything: masked, infinite, zero, signed, a constant."""
        x = self.input(axes, bounds)
        if self.nans and self.chance(0.5):
            return where(self.mask(axes), x, un("log", self.input(axes, (-2.0, -0.5))))
        if self.mood != "mixed" and self.chance(0.6):
            special = num(self.pick([math.inf, -math.inf]) if self.mood == "infinite" else 0.0)
            return where(self.mask(axes), x, special) if self.chance(0.6) else special
        match int(self.rng.integers(12)):
            case 0 | 1:
                return where(self.mask(axes), x, num(-math.inf))
            case 2:
                return where(self.mask(axes), x, num(math.inf))
            case 3:
                return un("exp", where(self.mask(axes), x, num(-math.inf)))
            case 4:
                return un("exp", x)
            case 5:
                return un("recip", x)
            case 6:
                return num(self.pick(NUMBERS))
            case 7:
                return mul(self.pick([2.0, -1.0]), x)
        return x

    def score(self) -> Term:
        """−inf where masked, some rows wholly so."""
        axes = [self.var_axis("k"), *(a for a in OTHER if self.chance(0.5))]
        return where(self.mask(axes), self.input(axes), num(-math.inf))

    def mask(self, axes: Iterable[str]) -> Term:
        return bi("lt", self.input([a for a in axes if self.chance(0.8)], None, "m"), self.pick([-1.0, 0.0, 1.0]))

    # ---- variables
    def var_axis(self, name: str) -> str:
        if name not in self.axis:
            free = [a for a in POOL if a not in self.axis.values()]
            self.axis[name] = self.pick(free) if free and not self.chance(0.1) else self.pick(POOL)
        return self.axis[name]

    def var_number(self, name: str) -> float:
        if name not in self.number:
            others = list(self.number.values())
            self.number[name] = -self.pick(others) if others and self.chance(0.4) else self.pick(NUMBERS)
        return self.number[name]

    # ---- patterns
    def make(self, p: Sexpr) -> Term:
        """A term that has the form of a pattern."""
        if is_number(p):
            return num(float(p))  # type: ignore[arg-type]
        if isinstance(p, str):
            if p not in self.terms:
                self.terms[p] = self.score() if p == "s" else self.leaf(p)
            return self.terms[p]
        head, *args = p
        match head:
            case "as":
                if args[0] not in self.terms:
                    self.terms[args[0]] = self.make(args[1])
                return self.terms[args[0]]
            case "add" | "mul":
                kids: list[Term] = []
                plain = sum(not is_star(a) for a in args)
                for a in args:
                    kids += self.star(a, 2 - plain) if is_star(a) else [self.make(a)]
                return make(head, None, [kids[i] for i in self.rng.permutation(len(kids))])
            case "num":
                return num(self.var_number(args[0]))
            case "sum" | "max" | "min" | "prod":
                k = self.var_axis(args[0])  # known before what may not vary along it
                return red({"sum": "+", "prod": "*"}.get(head, head), k, self.make(args[1]))
            case "red":
                f = self.text.setdefault(args[0], self.pick(["+", "max", "min", "*"]))
                return red(f, self.var_axis(args[1]), self.make(args[2]))
            case "bi":
                f = args[0].strip('"') if args[0].startswith('"') else self.text.setdefault(args[0], self.pick(BINARY))
                return bi(f, self.make(args[1]), self.make(args[2]))
            case "un":
                return un(self.text.setdefault(args[0], self.pick(["exp", "tanh", "abs"])), self.make(args[1]))
            case "where":
                c = args[0]
                if isinstance(c, str) and not is_number(c):
                    test = self.terms.setdefault(c, self.mask([*POOL, *OTHER]))
                else:
                    test = self.make(c)
                return where(test, self.make(args[1]), self.make(args[2]))
            case "view":
                a = self.pick(POOL)
                at = self.views.setdefault(args[0], ((a, axis_index("n" + a)),))
                return view(self.make(args[1]), at)
            case "gather":
                k = self.var_axis(args[0])
                last = num(self.extents[k] - 1.0)
                i = un("floor", bi("min", un("abs", self.input(OTHER)), last))  # a position that there is
                return gather(add(self.make(args[1]), self.input([k])) if self.chance(0.5) else self.make(args[1]), k, i)
        return make("un", head, [self.make(args[0])])

    def star(self, s: Sexpr, least: int) -> list[Term]:
        assert isinstance(s, str)
        if s not in self.stars:
            self.stars[s] = [self.leaf(s) for _ in range(max(least, self.pick([0, 1, 2, 2, 3])))]
        return self.stars[s]


def instances(rule: Rule, maker: Maker, count: int) -> list[Term]:
    """Terms that have the form of the rule's pattern (or of its examples), and what its conditions say must exist beside them."""
    patterns = [parse(x) for x in (rule.examples or (rule.pattern,))]
    out = [red("+", a, maker.input([a, "b"])) for a in POOL]
    for _, p in zip(range(count), itertools.cycle(patterns)):
        maker.fresh()
        out += map(maker.make, p)
        out += [maker.make(c[2]) for c in rule.conditions if c[0] == "is" and not rule.examples]
    return out


def program(name: str, terms: Sequence[Term], inputs: Iterable[Input], extents: Mapping[str, int]) -> Program:
    """A program whose outputs are these terms."""
    return Program(name, tuple(inputs), tuple(Output(t, (), (), "float64") for t in terms), dict(extents))
