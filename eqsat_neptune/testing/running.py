"""One rule, run alone on the outputs of a program."""

from __future__ import annotations

from dataclasses import replace

from ..egraph import declare_joins, engine, load
from ..engine import EGraph, bindings
from ..errors import RuleError
from ..graph import Graph
from ..program import Program
from ..rules import joins
from ..rules.rule import Rule


def settle(eg: EGraph) -> None:
    """Facts and normalisation to fixpoint, as between the steps of a phase, but all forms stay, for they are what is checked, and it
    ends soon: a false rule may put a term below itself, and then bounds grow for ever."""
    for _ in range(10):
        for _ in range(20):
            if not eg.run("(run-schedule (seq (run ix) (run an)))")[0].report.updated:
                break
        if not eg.run("(run-schedule (run norm))")[0].report.updated:
            break


MOST = 25  # steps after which a normalisation must have come to rest


def run(rule: Rule, program: Program) -> tuple[Graph, int]:
    """The e-graph after a few steps of one rule; how often it matched.  RuleError if the engine cannot run it, or if it is a
    normalisation and does not come to rest (it would run for ever)."""
    split = ("k",) if rule.phase == "split" else ()
    matches, steps = 0, 3
    if rule.phase == "norm":  # step by step: to fixpoint, one that grows would not come back
        rule, steps = replace(rule, phase="sums"), MOST
    try:
        with engine(()) as eg:
            for text in rule.egglog.split("\n"):
                eg.run(text)
            load(eg, program, split, fold_constants=False)
            if rule.phase == "join":
                declare_joins(eg, joins.find(program))
            eg.everywhere('(set (has "any" t) ())')
            for step in range(steps):
                settle(eg)
                report = eg.run(f"(run-schedule (run {rule.phase}))")[0].report
                matches += sum(n for name, n in report.num_matches_per_rule.items() if name == rule.name)
                if not report.updated:
                    break
                if step + 1 == MOST:
                    raise RuleError("as a normalisation it does not come to rest")
            settle(eg)
            return eg.freeze(len(program.outputs), revive=False), matches
    except bindings().EggSmolError as e:
        raise RuleError(f"the engine cannot run it: {str(e).strip().splitlines()[-1]}") from None
    except KeyError:
        raise RuleError("it leaves a class without a node") from None
