"""From a program to its saturated e-graph, in phases: algebra and contractions; folds, found and derived; splits.

Between single steps of a phase the normalisations and analyses run to fixpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .engine import CONSTRUCTORS, EGraph, Limits, Phase, literal
from .graph import Graph, Node
from .program import Program
from .reference import evaluate_scalar
from .rules import analyses, declared, folds, payloads
from .rules.joins import Join
from .rules.rule import Rule
from .scores import may_be_masked
from .terms import Term, ViewMap, base, fold, inner, is_num, make, normalise, num, outer, postorder, red, rewrite, show, without

ROUNDS = 8  # of looking for folds
RULESETS = ("ix", "prune", "norm", "an", "sums", "algebra", "contract", "join", "split", "expand")
# Forms that no term is worth making of.  What is known to be a constant is that constant alone: otherwise all its other forms stand in
# every product and sum that has a 1 or a 0 to give (1 = a·b makes x = a·b·x, which is flattened again).  A product or sum with
# itself in it is no way to compute it, but gives longer ones of the kind without end.
PRUNE = [
    *(
        f"(rule ((= t ({c} {' '.join(xs)})) (= t (Num v))) ((subsume ({c} {' '.join(xs)}))) :ruleset prune)"
        for c, sorts in CONSTRUCTORS.items()
        if sorts and c != "Num"
        for xs in [[f"x{i}" for i in range(len(sorts.split()))]]
    ),
    *(f"(rule ((= t ({c} ms)) (= n (idx{c[0]} ms t))) ((subsume ({c} ms))) :ruleset prune)" for c in ("Add", "Mul")),
]


@dataclass
class Saturated:
    """What saturation gives.  `stats`: one entry a phase; `folds`: the merges that were derived, as text; `laws`: of
    each rule."""

    graph: Graph
    stats: list[Phase] = field(default_factory=list)
    folds: list[str] = field(default_factory=list)
    laws: dict[str, str] = field(default_factory=dict)

    @property
    def stop(self) -> str:
        """Why saturation ended: "fixpoint", or the first limit that was met."""
        return next((p.stop for p in self.stats if p.stop != "fixpoint"), "fixpoint")


def declarations(rules: Sequence[Rule]) -> list[str]:
    """Everything the engine must know, as egglog text."""
    return [
        " ".join(f"(ruleset {r})" for r in RULESETS),
        *analyses.ALL,
        *declared.LATER,
        *declared.CONSTANTS,
        *declared.VOLUMES,
        *PRUNE,
        *(r.egglog for r in rules),
        f"(ruleset tables) (rule () ({' '.join(analyses.tables())}) :ruleset tables) (run-schedule (run tables))",
    ]


def engine(rules: Sequence[Rule]) -> EGraph:
    """An e-graph with these rules beside the analyses."""
    return EGraph(lambda: declarations(rules), tuple(r.egglog for r in rules) if rules is not declared.RULES else "all")


def strings(xs: Iterable[str]) -> str:
    xs = list(xs)
    return "(set-of " + " ".join(f'"{x}"' for x in xs) + ")" if xs else "(set-empty)"


def load(eg: EGraph, program: Program, splittable: Iterable[str] = (), fold_constants: bool = True) -> None:
    """Load the outputs of a program (class i gets handle i) and what is known of its inputs and axes."""
    eg.extents = dict(program.axes)
    split = frozenset(splittable)
    roots = [o.term for o in program.outputs]
    if fold_constants:
        roots = rewrite(roots, _constant)
    for i, t in enumerate(roots):
        eg.act(f"(set (handle {i}) {eg.name(t, 'source')})")
    views: dict[ViewMap, None] = {}
    axes: dict[str, None] = {}
    scores = may_be_masked(program, roots)
    for t in postorder(roots):
        x = eg.name(t)
        if t.op == "input":
            lo, hi, inside = _range(program, t)
            facts = ("masked", "holed") if t.attr[0] in scores else ("finite",)  # type: ignore[index]
            eg.act(
                f"{' '.join(f'(set (has {chr(34)}{f}{chr(34)} {x}) ())' for f in facts)} (set (free {x}) "
                f"{strings(leaf for a in _input_axes(t) for leaf in leaves(eg.axis(a), eg, split))})"
            )
            if not inside:
                lo, hi = min(lo, 0.0), max(hi, 0.0)
            if lo > -math.inf:
                eg.act(f"(set (lz {x}) {literal(lo)})")
            if hi < math.inf:
                eg.act(f"(set (hz {x}) {literal(hi)})")
        elif t.op == "view":
            views[t.attr] = None  # type: ignore[index]
        for a in sorted(t.free | ({t.attr[-1]} if t.op in ("red", "fold") else set()), key=eg.axis):  # type: ignore[index]
            axes[base(a)] = None
    for m in views:
        _view_facts(eg, m, program.axes, split)
        for a, ix in m:
            axes.update(dict.fromkeys([a, *ix.axes]))
    for a in axes:
        _axis_facts(eg, eg.axis(a), a, program.axes[a], split)
    eg.flush()


def _constant(t: Term, args: tuple[Term, ...]) -> Term | None:
    """A function of constants is a constant (egglog has no exp)."""
    if t.op in ("un", "bi") and all(a.op == "num" for a in args):
        with np.errstate(all="ignore"):  # 1/0 stays as it is: below
            v = float(evaluate_scalar(make(t.op, t.attr, args), {}))
        return num(v) if math.isfinite(v) and (v or math.copysign(1.0, v) > 0) else None
    return None


def leaves(part: str, eg: EGraph, split: frozenset[str]) -> list[str]:
    """The smallest parts of a canonical axis (or part)."""
    if eg.user_axis(part) in split:
        return leaves(outer(part), eg, split) + leaves(inner(part), eg, split)
    return [part]


def _axis_facts(eg: EGraph, name: str, part: str, extent: int, split: frozenset[str], whole: str = "") -> None:
    whole = whole or name
    parts = leaves(name, eg, split)
    beside = leaves(name[:-1] + "o", eg, split) if name.endswith(".i") else []  # the last block may be short
    eg.act(
        f'(set (parts "{name}") {strings(parts)}) (set (beside "{name}") {strings(beside)}) (set (extent "{name}") '
        f"{float(extent)})"
    )
    if parts == [name]:  # the outer part of a split counts 1, the inner one all elements
        eg.act(f'(leaf-of "{name}" "{whole}") (set (length "{name}") {1.0 if name.endswith(".o") else float(extent)})')
        return
    eg.act(f'(splittable "{name}" "{outer(name)}" "{inner(name)}")')
    for f in (outer, inner):
        _axis_facts(eg, f(name), f(part), extent, split, whole)


def _input_axes(t: Term) -> list[str]:
    return list(dict.fromkeys(a for ix in t.attr[1] for a in ix.axes))  # type: ignore[index]


def _range(program: Program, t: Term) -> tuple[float, float, bool]:
    """(lo, hi, inside) of an input read through its index: does the index stay in the array?"""
    name, index = t.attr  # type: ignore[misc]
    i = program.input(name)
    inside = all(0 <= lo and hi < n for (lo, hi), n in ((ix.bounds(program.axes), n) for ix, n in zip(index, i.shape)))
    lo, hi = i.range or ((0.0, 1.0) if i.dtype == "bool" else (-math.inf, math.inf))
    return lo, hi, inside


def _view_facts(eg: EGraph, m: ViewMap, extents: dict[str, int], split: frozenset[str]) -> None:
    key = eg.key("View", m)
    bound = [leaf for a, _ in m for leaf in leaves(eg.axis(a), eg, split)]
    new = dict.fromkeys(leaf for _, ix in m for a in ix.axes for leaf in leaves(eg.axis(a), eg, split))
    eg.act(f'(reads "{key}" {strings(bound)} {strings(new)})')
    if all(0 <= lo and hi < extents[a] for a, (lo, hi) in ((a, ix.bounds(extents)) for a, ix in m)):
        eg.act(f'(inside "{key}")')
    for a, ix in m:  # an injective read along one axis keeps sums of squares
        if len(ix.terms) == 1 and sum(ix.axes == other.axes for _, other in m) == 1:
            eg.act(f'(shifted "{key}" "{eg.axis(a)}" "{eg.axis(ix.axes[0])}")')


def saturate(
    program: Program,
    rules: Sequence[Rule] | None = None,
    limits: Limits | None = None,
    splittable: Iterable[str] = (),
    joins: Sequence[Join] = (),
) -> Saturated:
    """Saturate a program's e-graph.

    rules: the rewrite rules (all of `rules.RULES` if None; folds are looked for if "break-dependency" is among them).
    splittable: axes (whole, or parts like "k.o") whose reductions may be split in two.  joins: tensors that may stand side by side
    along an axis that is new (the graph's `extents` have it).  If a limit is hit the graph is smaller but as sound, and the
    phase's `stop` says which.
    """
    rules = declared.RULES if rules is None else tuple(rules)
    limits = limits or Limits()
    split = frozenset(splittable)
    if not all(program.axes.values()):  # reductions over nothing: the analyses assume that there is something
        rules, split = (), frozenset()
    out = Saturated(Graph(), laws={r.name: r.law for r in rules})
    with engine(rules) as eg:
        with _timed(out, "load", eg):
            load(eg, program, split)
            eg.loaded = eg.nodes()
        out.stats.append(eg.saturate("sums", ["(run sums)"], limits))
        out.stats.append(eg.saturate("algebra", ["(seq (run sums) (run algebra) (run contract))"], limits))
        if any(r.name == declared.PAYLOAD.name for r in rules):
            _payloads(eg, out, limits, split)
        if any(r.name == declared.BREAK.name for r in rules):
            _folds(eg, out, limits, split)
        if joins and any(r.phase == "join" for r in rules):
            declare_joins(eg, joins, split)
            out.stats.append(eg.saturate("join", ["(run join)"], limits))
        if split and any(r.phase == "split" for r in rules):
            with _timed(out, "split", eg):
                if any(r.name == declared.SPLIT_FOLD.name for r in rules):
                    _split_folds(eg, eg.freeze(), split)
                eg.saturate("split", ["(run split)"], limits)
        with _timed(out, "freeze", eg):
            out.graph = eg.freeze(len(program.outputs))
    return out


class Chosen(Protocol):
    """What `explain` needs of an extraction: class → the nodes that compute it."""

    @property
    def chosen(self) -> Mapping[int, Sequence[Node]]: ...


def explain(saturated: Saturated, found: Chosen | Mapping[int, Sequence[Node]]) -> list[tuple[str, str, str]]:
    """The rules that lead from the source to the chosen nodes, arguments before what uses them: (rule, law, "before  =  after").

    Before is the source's form of the class where it has one, else its smallest."""
    g = saturated.graph
    chosen = found if isinstance(found, Mapping) else found.chosen
    order: list[int] = []
    seen: set[int] = set()
    todo = [(c, False) for c in reversed(g.outputs)]
    while todo:
        c, done = todo.pop()
        if done:
            order.append(c)
        elif c not in seen and c in g.nodes:
            seen.add(c)
            todo.append((c, True))
            todo += [(a, False) for n in reversed(chosen.get(c, g.nodes[c][:1])) for a in reversed(n.args)]
    steps = []
    for c in order:
        for n in chosen.get(c, g.nodes[c][:1]):
            if n.why not in ("source", "congruence"):
                before = next((m for m in g.nodes[c] if m.why == "source"), g.nodes[c][0])
                if before.key == n.key:
                    before = next((m for m in g.nodes[c] if m.key != n.key), before)
                steps.append((n.why, saturated.laws.get(n.why, ""), f"{_shown(g, before)}  =  {_shown(g, n)}"))
    return list(dict.fromkeys(steps))


def _shown(g: Graph, n: Node) -> str:
    return show(make(n.op, n.attr, [g.term(a) for a in n.args]), 6)


@contextmanager
def _timed(out: Saturated, name: str, eg: EGraph) -> Iterator[None]:
    start = time.perf_counter()
    yield
    out.stats.append(Phase(name, 1, eg.nodes(), time.perf_counter() - start, "fixpoint"))


def _folds(eg: EGraph, out: Saturated, limits: Limits, split: frozenset[str]) -> None:
    """Find and derive folds, let algebra run on what they give, and look again: a fold may feed the next one."""
    start, rounds, stop = time.perf_counter(), 0, "iterations"
    done: set[tuple] = set()
    while rounds < ROUNDS:
        rounds += 1
        graph = eg.freeze()
        found = folds.find(graph, done)
        if not found:
            stop = "fixpoint"
            break
        for f in found:
            out.folds.append(f.text)
            eg.act(f"(union {eg.name(graph.term(f.cls))} {eg.name(f.value, declared.BREAK.name)})")
            for t in f.folds:
                _fold_facts(eg, t, split)
            if f.alike is not None:  # bounds speak of what is not masked: there both are equal
                for which, v in zip(("lo", "hi"), graph.interval(f.cls)):
                    if math.isfinite(v):
                        eg.act(f"(set ({which} {eg.name(f.alike)}) {literal(v)})")
            for pivot, t in f.vanishing:
                eg.act(f"(set (vanish {eg.name(graph.term(pivot))} {eg.name(t)}) ())")
        eg.flush()
        phase = eg.saturate("folds", ["(seq (run sums) (run algebra))"], limits)
        if phase.stop != "fixpoint":
            stop = phase.stop
            break
    out.stats.append(Phase("folds", rounds, eg.nodes(), time.perf_counter() - start, stop))


def _payloads(eg: EGraph, out: Saturated, limits: Limits, split: frozenset[str]) -> None:
    """What is read off at an extremum is carried along with it."""
    start = time.perf_counter()
    graph = eg.freeze()
    found = payloads.find(graph)
    if not found:
        return
    for p in found:
        eg.act(f"(union {eg.name(graph.term(p.cls))} {eg.name(p.value, declared.PAYLOAD.name)})")
        eg.act(f"(union {eg.name(graph.term(p.extreme))} {eg.name(p.pivot, declared.PIVOT.name)})")
        for t in p.folds:
            _fold_facts(eg, t, split)
    eg.flush()
    phase = eg.saturate("payloads", [], limits)
    out.stats.append(Phase("payloads", 1, phase.nodes, time.perf_counter() - start, phase.stop))


def declare_joins(eg: EGraph, joins: Iterable[Join], split: frozenset[str] = frozenset()) -> None:
    """Tell the engine which tensors may stand side by side: their axes, their views, and the relation that the rule asks for."""
    for j in joins:
        eg.extents[j.axis] = j.extent
        _axis_facts(eg, eg.axis(j.axis), j.axis, j.extent, split)
        views = (j.place_first, j.read_first, j.read_second, j.place_second)
        for m in views:
            _view_facts(eg, m, eg.extents, split)
        names = [eg.name(t, declared.CONCATENATE.name) for t in (j.first, j.second)]
        keys = " ".join(f'"{eg.key("View", m)}"' for m in views)
        eg.act(f'(joined {" ".join(names)} "{eg.axis(j.axis)}" {literal(j.places)} {keys})')
    eg.flush()


def _fold_facts(eg: EGraph, t: Term, split: frozenset[str]) -> None:
    """Free axes of a fold: those of the singletons that its component needs.  Its components are sums of finite terms."""
    h, j, k = t.attr  # type: ignore[misc]
    pivots, comps = h.needed(j, lambda i: is_num(t.args[len(h.pivots) + i], 0.0))
    free = without(normalise(a for i in (*pivots, *(len(h.pivots) + c for c in comps)) for a in t.args[i].free), k)
    if k.endswith(".i"):  # the last block may be short
        free = normalise([*free, k[:-1] + "o"])
    eg.act(f"(set (free {eg.name(t)}) {strings(leaf for a in sorted(free) for leaf in leaves(eg.axis(a), eg, split))})")


def _split_folds(eg: EGraph, graph: Graph, split: frozenset[str]) -> None:
    """fold over k = fold over k.o of folds over k.i, for every fold over an axis that may be split, and its parts likewise."""
    todo = [
        make(n.op, n.attr, [graph.term(a) for a in n.args]) for _, n in graph.items() if n.op == "fold" and n.attr[2] in split
    ]  # type: ignore[index]
    seen: set[Term] = set()
    while todo:
        t = todo.pop(0)
        h, j, k = t.attr  # type: ignore[misc]
        if t in seen or k not in split:
            continue
        seen.add(t)
        inner_folds = [fold(h, i, inner(k), t.args) for i in range(h.size)]
        whole = fold(h, j, outer(k), inner_folds)
        eg.act(f"(union {eg.name(t)} {eg.name(whole, declared.SPLIT_FOLD.name)})")
        for p, kind in enumerate(h.pivots):
            if isinstance(kind, str):  # a pivot that is a maximum or minimum is an ordinary reduction
                eg.act(f"(union {eg.name(inner_folds[p])} {eg.name(red(kind, inner(k), t.args[p]), declared.PIVOT.name)})")
        for x in (*inner_folds, whole):
            _fold_facts(eg, x, split)
        todo += [*inner_folds, whole]
    eg.flush()
