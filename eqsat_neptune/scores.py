"""Which inputs may hold −∞ as a mask: those that reach an exponential as scores do.

Inputs count as finite, which lets x − x vanish and factors leave their sums.  But scores and additive masks come with −∞ in
them, and a row of nothing else must give what the source gives.  Such an input is only added to, scaled by constants, compared,
chosen, read elsewhere and maximised before it meets an exponential; one that is multiplied, summed or put into another function
is not meant to be −∞ (nor would the source survive it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .program import FLOATS, Program
from .terms import PREDICATES, Term, postorder

_EXPONENTIALS = frozenset({"exp", "exp2"})


def may_be_masked(program: Program, roots: Sequence[Term]) -> frozenset[str]:
    """Names of the inputs of a program (with these terms as outputs) that may hold −∞."""
    users: dict[Term, list[Term]] = {}
    leaves: dict[str, list[Term]] = {}
    for t in postorder(roots):
        if t.op == "input":
            leaves.setdefault(t.attr[0], []).append(t)
        for a in dict.fromkeys(t.args):
            users.setdefault(a, []).append(t)
    unbounded = [i.name for i in program.inputs if i.dtype in FLOATS and (i.range is None or i.range[0] == -math.inf)]
    return frozenset(name for name in unbounded if name in leaves and _is_score(leaves[name], users))


def _is_score(leaves: list[Term], users: dict[Term, list[Term]]) -> bool:
    seen: set[Term] = set()
    todo, meets = list(leaves), False
    while todo:
        t = todo.pop()
        if t in seen:
            continue
        seen.add(t)
        for u in users.get(t, ()):
            if u.op in ("un", "bi") and u.attr in PREDICATES:
                continue
            if u.op == "un" and u.attr in _EXPONENTIALS:
                meets = True
                continue
            if not _keeps_minus_infinity(u, t):
                return False
            todo.append(u)
    return meets


def _keeps_minus_infinity(u: Term, t: Term) -> bool:
    match u.op:
        case "add":
            return True
        case "mul":
            return all(a is t or a.op == "num" for a in u.args) and sum(a is t for a in u.args) == 1
        case "red":
            return u.attr[0] in ("max", "min")
        case "bi":
            return u.attr in ("max", "min")
        case "where" | "view":
            return True
        case "gather":
            return u.args[1] is not t
    return False
