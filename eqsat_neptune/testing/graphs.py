"""Checks of soundness by evaluation: of a whole saturated e-graph, and of a single rule on random instances made
from its declaration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..egraph import SETTLE, Saturated, engine, load, saturate
from ..graph import Graph
from ..program import Input, Output, Program
from ..reference import Env, Value, apply
from ..rules.rule import Rule, Sexpr, is_number, is_star, parse
from ..terms import BINARY, Term, add, axis_index, bi, gather, inp, make, mul, num, postorder, red, un, view, where
from ..verification import Verdict, random_inputs

TOLERANCE = 1e-9


# ------------------------------------------------------------------ whole graphs


def blocks(g: Graph, block: int = 3) -> dict[str, int]:
    """A block size for every axis (or part) that the graph splits: small, and ragged where the extent allows."""
    parts = {a for _, n in g.items() if n.op in ("red", "fold") for a in [n.attr[-1]]} | {a for s in g.free.values() for a in s}  # type: ignore[index]
    out: dict[str, int] = {}
    for a in sorted(parts, key=len):
        while "." in a:
            a = a.rpartition(".")[0]
            out.setdefault(a, block)
    return {a: min(n, g.extents.get(a, n)) for a, n in out.items()}


def class_values(g: Graph, env: Env) -> dict[int, Value]:
    """The value of each class, by its smallest term."""
    values: dict[int, Value] = {}
    for c in sorted(g.nodes):
        n = g.nodes[c][0]
        values[c] = apply(n.op, n.attr, [values[a] for a in n.args], env)
    return values


def check_graph(
    saturated: Saturated, program: Program, seed: int = 0, arrays: Mapping[str, Any] | None = None, block: int = 3
) -> Verdict:
    """Does every e-node of every class evaluate to its class's value, and does every fact of a class hold of it?
    Random inputs unless
    `arrays` (by name) gives some; float64."""
    g = saturated.graph
    if arrays is None:
        arrays = {i.name: x for i, x in zip(program.inputs, random_inputs(program, np.random.default_rng(seed)))}
    env = Env(program.axes, arrays, blocks(g, block))
    values = class_values(g, env)
    worst = 0.0
    for c, n in g.items():
        if n is g.nodes[c][0]:
            continue  # the class's value is this node's
        args = [values[a] for a in n.args]
        error = _error(apply(n.op, n.attr, args, env), args if n.op == "add" else [], c, values, env)
        if error > TOLERANCE:
            return Verdict(
                False,
                "",
                f"class {c} = {g.term(c)} has a node of another value (error {error:.2g}), made by {n.why}: "
                f"{make(n.op, n.attr, [g.term(a) for a in n.args])}  (seed {seed})",
            )
        worst = max(worst, error)
    for c, v in values.items():
        wrong = _false_fact(g, c, v)
        if wrong:
            return Verdict(False, "", f"class {c} = {g.term(c)}: {wrong}  (seed {seed})")
    memo: dict[Term, Value] = {}
    for o, c in zip(program.outputs, g.outputs):
        error = _error(*_plain(o.term, env, memo), c, values, env)
        if error > TOLERANCE:
            return Verdict(False, "", f"output {o.term} is not the value of its class {c} (error {error:.2g}, seed {seed})")
    return Verdict(True, f"{g.size} e-nodes of {len(g.nodes)} classes agree, worst relative error {worst:.1e}")


def _plain(t: Term, env: Env, memo: dict[Term, Value]) -> tuple[Value, list[Value]]:
    """The value of a term and of its arguments, operator by operator (the interpreter reorders contractions, which shows where
    there are infinities)."""
    for x in postorder([t]):
        if x not in memo:
            memo[x] = apply(x.op, x.attr, [memo[a] for a in x.args], env)
    return memo[t], [memo[a] for a in t.args]


def _error(got: Value, terms: list[Value], c: int, values: Mapping[int, Value], env: Env) -> float:
    """How far a value is from its class's, relative to it and to `terms`, in which it may cancel; NaN and inf must agree."""
    _, (a, b) = env.align([got, values[c]])
    a, b = np.broadcast_arrays(a, b)
    finite = np.isfinite(a) & np.isfinite(b)
    if not ((a == b) | (np.isnan(a) & np.isnan(b)) | finite).all():
        return math.inf
    if not finite.any():
        return 0.0
    size = [np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=0.0) for x in (a, b, *(v for _, v in terms))]
    return float(np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0)).max() / (1e-9 + max(size)))


def _false_fact(g: Graph, c: int, value: Value) -> str:
    axes, x = value
    lo, hi = g.interval(c)
    slack = 1e-9 * (1 + np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=0.0))
    plain = ~np.isnan(x) & (x != 0.0) & (x != -math.inf)
    if (plain & ((x < lo - slack) | (x > hi + slack))).any():
        return f"not in [{lo}, {hi}]"
    for fact, bad in (
        ("finite", ~np.isfinite(x)),
        ("noinf", np.isinf(x)),
        ("masked", np.isnan(x) | (x == math.inf)),
        ("nonzero", x == 0.0),
    ):
        if g.has(c, fact) and bad.any():
            return f"not {fact}"
    for k, bound in g.normsq.get(c, {}).items():
        total = np.square(x).sum(axis=axes.index(k)) if k in axes else np.square(x) * g.extents[k]
        if (total > bound * (1 + 1e-9)).any():
            return f"sum of squares along {k} above {bound}"
    if not any(a == b or a.startswith(b + ".") for a in axes for b in g.free.get(c, axes)) and axes:
        return f"varies along {axes}, said to along {sorted(g.free[c])}"
    return ""


# ------------------------------------------------------------------ single rules

_POOL = ("k", "l", "m")  # axes that rules reduce over
_OTHER = ("a", "b")
_EXTENTS = ((3, 2, 4, 2, 3), (5, 3, 1, 1, 2), (2, 2, 2, 7, 3), (1, 3, 2, 4, 1), (2, 2, 2, 2, 2))
_NUMBERS = (2.0, -1.5, 0.5, -1.0, 1.0, 0.0, 3.0, math.inf, -math.inf)


class _Maker:
    """Makes terms from patterns: variables become random leaves, among them masked, infinite, zero and signed ones."""

    def __init__(self, rng: np.random.Generator, extents: Mapping[str, int]):
        self.rng, self.extents = rng, dict(extents)
        self.inputs: dict[str, Input] = {}
        self.axis: dict[str, str] = {}
        self.number: dict[str, float] = {}
        self.text: dict[str, str] = {}
        self.views: dict[str, tuple] = {}
        self.terms: dict[str, Term] = {}
        self.stars: dict[str, list[Term]] = {}

    def fresh(self) -> None:
        """Forget the variables of the last instance."""
        for d in (self.axis, self.number, self.text, self.views, self.terms, self.stars):
            d.clear()

    def pick(self, xs: Any) -> Any:
        return xs[int(self.rng.integers(len(xs)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def input(self, axes: Iterable[str], bounds: tuple[float, float] | None) -> Term:
        name = f"x{len(self.inputs)}"
        axes = [a for a in axes if a in self.extents]
        self.inputs[name] = Input(name, tuple(self.extents[a] for a in axes), "float64", bounds)
        return inp(name, tuple(axis_index(a) for a in axes))

    def leaf(self) -> Term:
        axes = [a for a in (*_POOL, *_OTHER) if self.chance(0.45)]
        x = self.input(axes, self.pick([None, None, None, (0.5, 2.0), (-2.0, -0.5), (0.0, 2.0), (-2.0, 0.0), (-1.0, 1.0)]))
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
                return num(self.pick(_NUMBERS))
            case 7:
                return mul(self.pick([2.0, -1.0]), x)
        return x

    def score(self) -> Term:
        """−inf where masked, some rows wholly so."""
        axes = [self.var_axis("k"), *(a for a in _OTHER if self.chance(0.5))]
        return where(self.mask(axes), self.input(axes, None), num(-math.inf))

    def mask(self, axes: list[str]) -> Term:
        return bi("lt", self.input([a for a in axes if self.chance(0.8)], None), self.pick([-1.0, 0.0, 1.0]))

    def var_axis(self, name: str) -> str:
        if name not in self.axis:
            free = [a for a in _POOL if a not in self.axis.values()]
            self.axis[name] = self.pick(free) if free and not self.chance(0.1) else self.pick(_POOL)
        return self.axis[name]

    def var_number(self, name: str) -> float:
        if name not in self.number:
            others = list(self.number.values())
            self.number[name] = -self.pick(others) if others and self.chance(0.4) else self.pick(_NUMBERS)
        return self.number[name]

    def make(self, p: Sexpr) -> Term:
        """A term that has the form of a pattern."""
        if is_number(p):
            return num(float(p))  # type: ignore[arg-type]
        if isinstance(p, str):
            if p not in self.terms:
                self.terms[p] = self.score() if p == "s" else self.leaf()
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
                return red({"sum": "+", "prod": "*"}.get(head, head), self.var_axis(args[0]), self.make(args[1]))
            case "red":
                f = self.text.setdefault(args[0], self.pick(["+", "max", "min", "*"]))
                return red(f, self.var_axis(args[1]), self.make(args[2]))
            case "bi":
                f = args[0].strip('"') if args[0].startswith('"') else self.text.setdefault(args[0], self.pick(BINARY))
                return bi(f, self.make(args[1]), self.make(args[2]))
            case "un":
                return un(self.text.setdefault(args[0], self.pick(["exp", "tanh", "abs"])), self.make(args[1]))
            case "where":
                c = (
                    self.terms.setdefault(args[0], self.mask([*_POOL, *_OTHER]))
                    if isinstance(args[0], str)
                    else self.make(args[0])
                )
                return where(c, self.make(args[1]), self.make(args[2]))
            case "view":
                a = self.pick(_POOL)
                at = self.views.setdefault(args[0], ((a, axis_index("n" + a)),))
                return view(self.make(args[1]), at)
            case "gather":
                k = self.var_axis(args[0])
                last = num(self.extents[k] - 1.0)
                i = un("floor", bi("min", un("abs", self.input(_OTHER, None)), last))  # a position that there is
                return gather(add(self.make(args[1]), self.input([k], None)) if self.chance(0.5) else self.make(args[1]), k, i)
        return make("un", head, [self.make(args[0])])

    def star(self, s: Sexpr, least: int) -> list[Term]:
        assert isinstance(s, str)
        if s not in self.stars:
            self.stars[s] = [self.leaf() for _ in range(max(least, int(self.rng.integers(0, 3))))]
        return self.stars[s]


def instances(rule: Rule, maker: _Maker, count: int) -> list[Term]:
    """Terms that have the form of the rule's pattern (or of its examples), and what its conditions say must exist beside them."""
    patterns = [parse(x)[0] for x in (rule.examples or (rule.pattern,))]
    out = [red("+", a, maker.input([a, "b"], None)) for a in _POOL]
    for _, p in zip(range(count), itertools.cycle(patterns)):
        maker.fresh()
        out.append(maker.make(p))
        out += [maker.make(c[2]) for c in rule.conditions if c[0] == "is" and not rule.examples]
    return out


def _arrays(program: Program, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs with zeros, both signs and repeated values, within their ranges."""
    out = {}
    for i in program.inputs:
        lo, hi = i.range or (-2.0, 2.0)
        x = rng.uniform(lo, hi, i.shape)
        if lo <= 0.0 <= hi:
            x = np.where(rng.random(i.shape) < 0.2, 0.0, x)
        out[i.name] = np.where(rng.random(i.shape) < 0.1, rng.choice([lo, hi]), x)
    return out


def check_rule(rule: Rule, seed: int = 0, count: int = 24, least: int = 6, rounds: int = 3, tries: int = 12) -> Verdict:
    """Is a rule sound?  It runs alone on random instances of its own pattern, and every e-node must evaluate to its
    class's value.  At least `rounds` rounds of `count` instances with other extents each, more until it has applied `least`
    times.  False too if it never applied."""
    if rule.phase == "driver":
        return _check_driver(rule)
    matches, done = 0, 0
    while done < rounds or (matches < least and done < tries):
        rng = np.random.default_rng((seed, done))
        sizes = dict(zip((*_POOL, *_OTHER), _EXTENTS[done % len(_EXTENTS)]))
        maker = _Maker(rng, sizes | {"n" + a: sizes[a] for a in _POOL})
        terms = instances(rule, maker, count)
        outputs = tuple(Output(t, (), (), "float64") for t in terms)
        program = Program(rule.name, tuple(maker.inputs.values()), outputs, maker.extents)
        graph, n = _run(rule, program)
        done, matches = done + 1, matches + n
        for trial in range(2):
            verdict = check_graph(Saturated(graph), program, arrays=_arrays(program, rng), block=2 + trial)
            if not verdict.ok:
                return replace(verdict, counterexample=f"{rule.name}: {verdict.counterexample}")
    if not matches:
        return Verdict(False, "", f"{rule.name}: no random instance met its conditions")
    return Verdict(True, f"{rule.name}: applied {matches} times on {count * done} instances")


def _check_driver(rule: Rule) -> Verdict:
    """A rule that code applies: it must occur in graphs of a few programs that need it, and these must be sound."""
    extents = {"a": 3, "k": 7}
    x, y = (inp(n, (axis_index("a"), axis_index("k"))) for n in "xy")
    masked = where(bi("lt", y, 0.3), x, num(-math.inf))
    spread = add(x, mul(-1 / 7, red("+", "k", x)))
    terms = [
        red("+", "k", mul(un("exp", add(x, mul(-1.0, red("max", "k", x)))), y)),
        un("log", red("+", "k", un("exp", add(masked, mul(-1.0, red("max", "k", masked)))))),
        red("+", "k", mul(spread, spread)),
        red("min", "k", where(bi("eq", x, red("max", "k", x)), y, num(math.inf))),
    ]
    count = 0
    for t in terms:
        inputs = tuple(Input(n, (3, 7), "float64") for n in "xy")
        program = Program(rule.name, inputs, (Output(t, (("a",),), (3,), "float64"),), extents)
        saturated = saturate(program, splittable=("k",))
        count += sum(n.why == rule.name for _, n in saturated.graph.items())
        for seed in range(3):
            verdict = check_graph(saturated, program, seed)
            if not verdict.ok:
                return replace(verdict, counterexample=f"{rule.name}: {verdict.counterexample}")
    if not count:
        return Verdict(False, "", f"{rule.name}: it made no node")
    return Verdict(True, f"{rule.name}: made {count} nodes in {len(terms)} programs")


def _run(rule: Rule, program: Program) -> tuple[Graph, int]:
    """The e-graph after a few steps of one rule; how often it matched."""
    split = ("k",) if rule.phase == "split" else ()
    matches = 0
    with engine(()) as eg:
        for text in rule.egglog.split("\n"):
            eg.run(text)
        load(eg, program, split, fold_constants=False)
        eg.everywhere('(set (has "any" t) ())')
        for _ in range(3):
            report = eg.run(f"(run-schedule (seq {SETTLE} (run {rule.phase})))")[0].report
            matches += sum(n for name, n in report.num_matches_per_rule.items() if name == rule.name)
        eg.run(f"(run-schedule {SETTLE})")
        return eg.freeze(len(program.outputs)), matches
