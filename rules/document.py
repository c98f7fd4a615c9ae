"""docs/rules.md, made from the declarations: `python -m eqsat_neptune.rules.document` writes it, a test says when it is old."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from . import rule
from .declared import RULES
from .rule import Rule, parse, unparse

# family → what it is for; a family that is not here cannot be documented, so a new one needs a line
FAMILIES = {
    "normal": "Normalisation: runs to fixpoint between the steps of all others and takes the matched node out of the graph, so "
    "that nothing else sees both sides.",
    "associativity": "Sums and products are n-ary; nested ones become one.",
    "distributivity": "Numbers over sums always; other factors only where that separates what varies along a reduced axis.",
    "exponentials": "exp, log and their inverses.",
    "factoring": "What does not vary along an axis leaves the reduction over it.",
    "masks": "Conditions that put −∞ into scores, in one form.",
    "contractions": "Order and sharing of products, where that takes fewer multiply-adds.",
    "views": "Tensors that are read under other names.",
    "concatenation": "Products that share an operand, as one of them with the other operands side by side, where that saves more than "
    "it costs (`rules/joins.py` says which).",
    "splits": "A reduction over an axis is one over blocks of reductions inside them.",
    "folds": "Reductions that need each other, joined in one pass. Made by code (`rules/folds.py`), with merges that are derived "
    "(`rules/repair.py`); and what is read off at an extremum (`rules/payloads.py`).",
}
# what `Rule.numerics` says, in words
NUMERICS = {
    "exact": "the same operations",
    "reassociates": "the same up to rounding",
    "needs bound": "may overflow: a kernel may use the result only where bounds show that it does not",
    "needs finite": "rests on values being finite",
}
PHASES = {
    "norm": "between all steps",
    "sums": "first",
    "algebra": "main",
    "contract": "main",
    "join": "after folds",
    "split": "last",
    "expand": "only where merges are derived",
    "driver": "by code",
}


def markdown() -> str:
    """The text of docs/rules.md."""
    families = list(dict.fromkeys(r.family for r in RULES))
    out = [
        "# Rules",
        "",
        "Made by `python -m eqsat_neptune.rules.document`; do not edit. "
        f"{len(RULES)} rules in {len(families)} families, declared in `rules/declared.py`.",
        "",
        "A rule says that two terms are equal where its conditions hold. *When* has the conditions without which the law is "
        "false (a test drops each in turn and must notice); *guard* those that only keep the e-graph small.",
        "",
        *(f"- **{n}**: {text}." for n, text in NUMERICS.items()),
        "",
    ]
    for f in families:
        out += [f"## {f}", "", FAMILIES[f], ""]
        for r in RULES:
            if r.family == f:
                out += entry(r)
    notes = inspect.getdoc(rule)
    assert notes is not None
    _, _, language = notes.partition("\n\n")
    out += ["## The pattern language", "", "```text", language.rstrip(), "```", ""]
    return "\n".join(out)


def entry(r: Rule) -> list[str]:
    lines = [f"**{r.name}** — {r.law} ({r.numerics}; {PHASES[r.phase]})", ""]
    if r.pattern:
        code = [f"{unparse(p)}  =  {unparse(q)}" for p, q in zip(parse(r.pattern), parse(r.result))]
        code += [f"when   {r.when}"] if r.when else []
        code += [f"guard  {r.guard}"] if r.guard else []
        lines += ["```text", *code, "```", ""]
    return lines


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent / "docs" / "rules.md"
    path.write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
