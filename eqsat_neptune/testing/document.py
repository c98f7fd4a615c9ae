"""docs/soundness.md, made from the registry: `python -m eqsat_neptune.testing.document` writes it, a test says when it is old."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

from ..rules import RULES
from ..rules.document import FAMILIES, NUMERICS
from ..rules.rule import Rule, unparse
from .evidence import KINDS, Evidence, assess
from .fields import P, Q
from .merges import REFUSED, SKELETONS, prove_skeleton
from .symbolic import LEMMAS, lemmas

_HEAD = """\
# Soundness

Made by `python -m eqsat_neptune.testing.document` (needs sympy); do not edit. What each rule rests on, how that is known, and what it
does to rounding. `docs/rules.md` has the rules' patterns; CONTRIBUTING.md says how to add one.

Every rule, whatever else is known of it, runs alone on instances of its own pattern (`check_rule`): axes distinct, equal, of extent 1,
prime, split unevenly; operands that share axes or do not; values with zeros of both signs (and of none: plans lose it), ties, masked rows,
nothing but masks, a mean far above the spread, ±1e30 and denormals, infinities. Every node of the e-graph must have its class's value up to
what rounding can explain: each value carries an error bound. Each side condition is dropped in turn, and the weaker rule must be caught; so
must nearly all corruptions of each rule (`eqsat_neptune.testing.mutation`). Beside that there is stronger evidence:
"""
_EMPTY = """\
No rule is applied where an axis has extent 0: reductions over nothing are evaluated as written.
"""


def markdown() -> str:
    """The text of docs/soundness.md."""
    known = {r.name: assess(r) for r in RULES}
    counts = Counter(e.kind for e in known.values())
    out = [_HEAD]
    out += [f"- **{kind}** ({counts[kind]} rules): {text}." for kind, text in KINDS.items()]
    out += [
        "",
        f"Fields: Z_p × Z_q with p = {P} and q = {Q}, which divides p − 1; exp is a power of an element of order q. Proofs are of "
        "real values: masks, infinities and NaN are sampled.",
        "",
        _EMPTY,
        *(f"- *{n}*: {text}." for n, text in NUMERICS.items()),
        "",
    ]
    for family in dict.fromkeys(r.family for r in RULES):
        out += [
            f"## {family}",
            "",
            FAMILIES[family],
            "",
            "| rule | law | numerics | evidence | conditions |",
            "|---|---|---|---|---|",
        ]
        out += [_row(r, known[r.name]) for r in RULES if r.family == family]
        out.append("")
    out += [
        "## Lemmas",
        "",
        "What proofs of reductions use, each proved for every length by induction: `testing/symbolic.py`.",
        "",
    ]
    out += ["| lemma | law | proved |", "|---|---|---|"]
    laws = {name: lemma.law for name, lemma in LEMMAS.items()} | {
        "sums exchange": "Σⱼ Σₖ x = Σₖ Σⱼ x",
        "reductions split": "⊕ₖ x = ⊕ over blocks of ⊕ inside, for +, ·, max, min",
        "monotone functions leave": "max f(x) = f(max x) for f that keeps the order, f(min x) for one that turns it",
    }
    out += [f"| {name} | {_cell(laws[name])} | {'yes' if ok else 'no'} |" for name, ok in lemmas().items()]
    out += [
        "",
        "## Merges",
        "",
        "What folds rest on: for g(c, R), summed over c at pivots R, the merge that `rules/repair.py` derives, and the scalar laws that "
        "are proved of it for all values. Refused, as they have none: " + ", ".join(REFUSED) + ".",
        "",
        "| skeleton | g | pivots | proved |",
        "|---|---|---|---|",
    ]
    for name, (g, pivots) in SKELETONS.items():
        proof = prove_skeleton(name)
        out.append(f"| {name} | {_cell(str(g))} | {pivots} | {', '.join(proof.steps) if proof else 'no: ' + proof.reason} |")
    return "\n".join(out) + "\n"


def _row(r: Rule, e: Evidence) -> str:
    conditions = "; ".join(f"`{unparse(c)}`" for c in r.conditions)
    return f"| {r.name} | {_cell(r.law)} | {r.numerics} | {_evidence(e)} | {_cell(conditions)} |"


def _evidence(e: Evidence) -> str:
    out = []
    if e.proof:
        out.append("proved" + (f" ({', '.join(e.proof.steps)})" if e.proof.steps else ""))
    if e.field.instances:
        p = e.field.bound
        out.append("fields" + (f", error < 1e{math.floor(math.log10(p)) + 1}" if p else ""))
    if e.rational.instances:
        out.append("rationals")
    return "; ".join(out) or "sampled"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    default = Path(__file__).resolve().parent.parent.parent / "docs" / "soundness.md"
    path = Path(sys.argv[1]) if sys.argv[1:] else default
    path.write_text(markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
