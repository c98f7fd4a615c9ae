"""Is a rule sound?  It runs alone on instances of its own pattern, and every node of the e-graph must have its class's value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import EqsatError, RuleError
from ..graph import Graph
from ..reference import Env
from ..rules.rule import Rule
from ..terms import Term, make, postorder
from ..verification import Verdict
from .evidence import assess
from .graphs import Values, blocks, check_graph, wrong, wrong_outputs
from .instances import SHAPES, Maker, hints, instances, program
from .merges import monoids, programs
from .running import run
from .shrink import Case, Counterexample, shrink
from .symbolic import prove_merge, proves
from .values import KINDS, arrays

NEVER = "no random instance met its conditions"


@dataclass(frozen=True)
class Sampled:
    """What evaluation found: how often the rule applied on how many instances, and a case that disagrees, if any."""

    applied: int
    instances: int
    failure: Case | None = None
    error: str = ""  # the engine's, where it cannot run the rule


def check_rule(
    rule: Rule,
    seed: int = 0,
    count: int = 24,
    least: int = 6,
    rounds: int = 3,
    tries: int = 12,
    kinds: Sequence[str] = tuple(KINDS),
    smallest: bool = True,
    exact: bool = True,
) -> Verdict:
    """Is a rule sound?  Truthy if it is; else `.counterexample` says where it is not, as small as shrinking gets it
    (`smallest=False`: as found).  `.evidence` says how it is known: see evidence.py (`exact=False`: in float64 only).

    At least `rounds` rounds of `count` instances with other extents each, more (up to `tries`) until it has applied `least` times,
    with every kind of values; at last a shorter one of operands that are NaN in places.  False too if it never applied."""
    if rule.phase == "driver":
        return _check_driver(rule)
    s = sample(rule, seed, count, least, rounds, tries, kinds)
    if s.error:
        return Verdict(False, "", f"{rule.name}: {s.error}")
    if s.failure is not None:
        case = shrink(s.failure, Rerun(rule)) if smallest else s.failure
        return Verdict(False, "", Counterexample.of(case, f"{rule.name}: a class has a node of another value"))
    if not s.applied:
        return Verdict(False, "", f"{rule.name}: {NEVER}")
    sampled = f"{rule.name}: applied {s.applied} times on {s.instances} instances"
    if not exact:
        return Verdict(True, sampled)
    known = assess(rule, seed)
    if known.counterexample:
        return Verdict(False, "", known.counterexample)
    return Verdict(True, f"{sampled}; {known}" if str(known) else sampled)


def sample(
    rule: Rule,
    seed: int = 0,
    count: int = 24,
    least: int = 6,
    rounds: int = 3,
    tries: int = 12,
    kinds: Sequence[str] = tuple(KINDS),
) -> Sampled:
    """Evaluate a rule on instances of its pattern; see `check_rule`."""
    applied, tried, done, wanted, nans = 0, 0, 0, hints(rule), False
    while not nans:
        nans = done >= rounds and (applied >= least or done >= tries)  # at last a shorter round
        size = -(-count // 2) if nans else count
        rng = np.random.default_rng((seed, done, 1) if nans else (seed, done))
        shapes = SHAPES[done % len(SHAPES)]
        maker = Maker(rng, shapes.axes, wanted, nans)
        terms = instances(rule, maker, size)
        p = program(rule.name, terms, maker.inputs.values(), maker.extents)
        try:
            graph, n = run(rule, p)
        except RuleError as e:
            return Sampled(applied, tried, None, str(e))
        done, applied, tried = done + 1, applied + n, tried + size
        for kind in kinds[:2] if nans else kinds:
            case = _disagreement(graph, Case(p, arrays(p, kind, rng), shapes.block))
            if case is not None:
                return Sampled(applied, tried, case)
    return Sampled(applied, tried)


class Rerun:
    """Runs a rule on cases that shrink: the case with what disagrees in it, or None.  At most `budget` e-graphs are made, each
    once; other values on the same terms cost no new one."""

    def __init__(self, rule: Rule, budget: int = 120):
        self.rule, self.budget = rule, budget
        self.graphs: dict[tuple, Graph | None] = {}

    def __call__(self, case: Case) -> Case | None:
        p = case.program
        key = (tuple(o.term for o in p.outputs), tuple(p.axes.items()), tuple((i.name, i.range) for i in p.inputs))
        if key not in self.graphs:
            if self.budget <= 0:
                return None
            self.budget -= 1
            try:
                self.graphs[key] = run(self.rule, p)[0]
            except RuleError:
                self.graphs[key] = None
        graph = self.graphs[key]
        try:
            return _disagreement(graph, case) if graph is not None else None
        except (EqsatError, ValueError, IndexError):  # shrunk too far: no instance any more
            return None


def _disagreement(g: Graph, case: Case) -> Case | None:
    """In IEEE arithmetic, and where zeros have no sign: sums, products and extrema of a plan may lose it, so no law may need it."""
    return _disagreement_where(g, case, signed_zeros=True) or _disagreement_where(g, case, signed_zeros=False)


def _disagreement_where(g: Graph, case: Case, signed_zeros: bool) -> Case | None:
    case = replace(case, extents=g.extents)
    values = Values(g, Env(g.extents, case.arrays, blocks(g, case.block), signed_zeros=signed_zeros))
    shape: dict[Term, tuple] = {}
    changed = [(o.term, c) for o, c in zip(case.program.outputs, g.outputs) if _shape(o.term, shape) != _shape(g.term(c), shape)]
    for left, c, _ in wrong_outputs(changed, values):
        return replace(case, text="", left=left, right=g.term(c), culprit=g.outputs.index(c))
    for w in wrong(g, values, classes=[c for c, nodes in g.nodes.items() if len(nodes) > 1]):
        left, culprit = g.term(w.cls), next((i for i, c in enumerate(g.outputs) if w.cls in _below(g, c)), -1)
        if w.node is None:
            return replace(case, text=f"{left}: {w.text}", left=None, right=None, culprit=culprit)
        right: Term = make(w.node.op, w.node.attr, [g.term(a) for a in w.node.args])
        return replace(case, text="", left=left, right=right, culprit=culprit)
    return None


def _below(g: Graph, c: int) -> set[int]:
    """The classes that any node at or below a class reads, and itself."""
    seen: set[int] = set()
    todo = [c]
    while todo:
        d = todo.pop()
        if d not in seen:
            seen.add(d)
            todo += [a for n in g.nodes[d] for a in n.args]
    return seen


def _shape(t: Term, memo: dict[Term, tuple]) -> tuple:
    """A term up to the order of sums and products."""
    for x in postorder([t]):
        if x not in memo:
            args = [memo[a] for a in x.args]
            memo[x] = (x.op, repr(x.attr), *(sorted(args) if x.op in ("add", "mul") else args))
    return memo[t]


def _check_driver(rule: Rule) -> Verdict:
    """A rule that code applies: it must occur in graphs of a few programs that need it, these must be sound, and their merges
    proved."""
    count, proved = 0, 0
    for p, saturated in programs():
        count += sum(n.why == rule.name for _, n in saturated.graph.items())
        for seed in range(3):
            verdict = check_graph(saturated, p, seed)
            if not verdict.ok:
                return replace(verdict, counterexample=f"{rule.name}: {verdict.counterexample}")
        for h in monoids(saturated.graph) if proves() else ():
            proof = prove_merge(h)
            if not proof:
                return Verdict(False, "", f"{rule.name}: the merge {h} is not proved: {proof.reason}")
            proved += 1
    if not count:
        return Verdict(False, "", f"{rule.name}: it made no node")
    return Verdict(
        True, f"{rule.name}: made {count} nodes in {len(programs())} programs" + (f"; {proved} merges proved" if proved else "")
    )
