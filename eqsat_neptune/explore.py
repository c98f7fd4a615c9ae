"""The compiler one step at a time, for notebooks and curious readers: families of rules, their effect, derived merges, e-classes.

Nothing else in the package uses this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .compiler import joins, optimize, splittable
from .cost_models import model_for
from .egraph import saturate
from .errors import EqsatError, RuleError
from .extraction.plan import Plan
from .graph import Graph
from .kernel import Kernel
from .program import Program
from .report import Report, Section, seconds
from .rules import RULES, Rule
from .rules.repair import derive
from .targets import parse_target
from .terms import Monoid, Term, make, postorder, show, variables


def families() -> dict[str, tuple[Rule, ...]]:
    """All rules by family, in the order in which they are declared."""
    return {f: tuple(r for r in RULES if r.family == f) for f in dict.fromkeys(r.family for r in RULES)}


def rules_of(*names: str) -> tuple[Rule, ...]:
    """The rules of these families, for `optimize(…, rules=…)`.  RuleError for a family that there is not."""
    known = families()
    if wrong := [n for n in names if n not in known]:
        raise RuleError(f"there is no family of rules {wrong[0]!r}", f"there are {', '.join(known)}")
    return tuple(r for n in dict.fromkeys(names) for r in known[n])


@dataclass
class Stage:
    """What a program becomes with some families of rules.  added: those that this stage has and the one before it had not."""

    added: tuple[str, ...]
    rules: tuple[Rule, ...]
    kernel: Kernel

    @property
    def nodes(self) -> int:
        """e-nodes of the saturated graph."""
        return self.kernel.egraph["nodes"]

    @property
    def temporaries(self) -> int:
        """Bytes that the plan keeps in memory between its kernels."""
        return self.kernel.plan.temporaries


@dataclass
class Stages:
    """Prints as a table, one line a stage."""

    title: str
    stages: list[Stage] = field(default_factory=list)

    def __getitem__(self, i: int) -> Stage:
        return self.stages[i]

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    @property
    def report(self) -> Report:
        head = ("rules added", "rules", "e-nodes", "kernels", "intermediates", "predicted", "chosen form")
        rows = [
            (
                "+ " + ", ".join(s.added) if s.added else "none",
                str(len(s.rules)),
                str(s.nodes),
                str(len(s.kernel.plan.kernels)),
                f"{s.temporaries / 2**20:.1f} MiB",
                seconds(s.kernel.cost.seconds),
                "; ".join(s.kernel.form),
            )
            for s in self.stages
        ]
        return Report(self.title, [Section("", [head, *rows])])

    def __str__(self) -> str:
        return str(self.report)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self.report._repr_html_()


def by_family(program: Program, *groups: str, target: str = "cpu", **options: Any) -> Stages:
    """Compile a program again and again: with no rules, with those of the first group of families, of the first two, and so on.

    A group is one family or several, separated by blanks.  options go to `optimize`.
    """
    names: list[str] = []
    out = Stages(f"{program.name} for {target}")
    for group in ("", *groups):
        added = tuple(group.split())
        names += added
        chosen = rules_of(*names)
        out.stages.append(Stage(added, chosen, optimize(program, target, rules=chosen, **options)))
    return out


def merges(what: Kernel | Plan | Graph) -> list[Monoid]:
    """The joint monoids of the folds in a plan or a graph, each once."""
    if isinstance(what, Graph):
        return list(dict.fromkeys(n.attr[0] for _, n in what.items() if n.op == "fold"))  # type: ignore[index]
    plan = what.plan if isinstance(what, Kernel) else what
    terms = postorder(s.term for k in plan.kernels for s in k.stores)
    return list(dict.fromkeys(t.attr[0] for t in terms if t.op == "fold"))  # type: ignore[index]


def derivation(body: Term) -> Report:
    """How Σₖ body moves to other pivots: body is a term over variables c0, c1, … (they vary along k) and R0, R1, … (pivots).

    The sums of the first column are carried together at old pivots r; the second column says what each is at new ones.
    """
    pivots = sorted({v for v in variables(body) if v[0] == "R"})
    found = derive(body, len(pivots)) if pivots else None
    if found is None:
        why = "no merge was found: sums at one pivot do not give the sum at another" if pivots else "it has no pivot R0"
        return Report(f"Σ {body}", [Section("", [(why,)])])
    rows = []
    for j, (b, row) in enumerate(zip(found.basis, found.coef)):
        rows.append((f"x{j}(r) = Σ {b}", f"x{j}(R) = " + " + ".join(f"{show(e)}·x{i}(r)" for i, e in row)))
    return Report(f"Σ {body}", [Section("", rows)])


def classes(program: Program, *names: str, target: str = "cpu") -> tuple[Graph, Report]:
    """The saturated e-graph of a program under these families (all of them if none is named), and a table: for each class its
    forms in terms of other classes, each with the rule that made it."""
    rules = rules_of(*names) if names else None
    model = model_for(target)
    graph = saturate(program, rules, splittable=splittable(program, parse_target(target)), joins=joins(program, model)).graph
    rows = []
    for c, nodes in graph.nodes.items():
        for n in nodes:
            args = [make("var", f"#{a}") for a in n.args]
            rows.append((f"#{c}" if n is nodes[0] else "", show(make(n.op, n.attr, args), 3), "" if n.why == "source" else n.why))
    return graph, Report(f"{program.name}: {graph.size} e-nodes in {len(graph.nodes)} classes", [Section("", rows)])


def accuracy(kernel: Kernel, *arrays: Any) -> float:
    """Largest error of a kernel's outputs against the program evaluated in float64, relative to their largest value."""
    import numpy as np

    from .reference import evaluate

    if kernel.target != "cpu":
        raise EqsatError(f"accuracy runs the kernel here, this one is for {kernel.target}", 'optimize for target="cpu"')
    got, want = kernel(*arrays), evaluate(kernel.program, *map(np.asarray, arrays))
    pairs = zip(got, want) if isinstance(want, tuple) else [(got, want)]
    return max(float(np.abs(np.asarray(g, np.float64) - w).max() / np.abs(w).max()) for g, w in pairs)
