"""Merges to prove: of skeletons that programs have, and of the folds in a program's graph."""

from __future__ import annotations

import math
from functools import cache

from ..egraph import Saturated, saturate
from ..graph import Graph
from ..program import Input, Output, Program
from ..rules import repair
from ..terms import Monoid, Term, add, axis_index, bi, div, inp, iota, mul, num, red, sub, un, var, where
from .symbolic import Proof, prove_merge

_C = [var(f"c{i}") for i in range(4)]
_R = [var(f"R{i}") for i in range(3)]


def _exp(x: Term) -> Term:
    return un("exp", x)


# what is summed, over atoms c and pivots R → the number of pivots
SKELETONS: dict[str, tuple[Term, int]] = {
    "exponential": (_exp(sub(_C[0], _R[0])), 1),
    "scaled exponential": (_exp(sub(_C[0], mul(0.125, _R[0]))), 1),
    "weighted exponential": (mul(_exp(sub(_C[0], _R[0])), _C[1], _C[2]), 1),
    "exponential of two atoms": (_exp(add(_C[0], mul(-1.0, _C[1]), mul(-1.0, _R[0]))), 1),
    "two maxima": (_exp(sub(sub(_C[0], _R[0]), _R[1])), 2),
    "variance": (mul(sub(_C[0], _R[0]), sub(_C[0], _R[0])), 1),
    "weighted variance": (mul(_C[1], sub(_C[0], _R[0]), sub(_C[0], _R[0])), 1),
    "variance about a quotient": (mul(_C[1], sub(_C[0], div(_R[0], _R[1])), sub(_C[0], div(_R[0], _R[1]))), 2),
    "covariance": (mul(sub(_C[0], _R[0]), sub(_C[1], _R[1])), 2),
    "third moment": (mul(*[sub(_C[0], _R[0])] * 3), 1),
    "centred product": (mul(sub(_C[0], _R[0]), _C[1]), 1),
    "exponential times centred": (mul(_exp(sub(_C[0], _R[0])), sub(_C[1], _R[1]), _C[2]), 2),
    "quotient": (div(_C[0], _R[0]), 1),
}
# what has no merge, and must be refused
REFUSED: dict[str, tuple[Term, int]] = {
    "exponential of a quotient": (_exp(div(sub(_C[0], _R[0]), _R[1])), 2),
    "temperature": (mul(_C[1], _exp(div(_C[0], _R[0]))), 1),
    "hyperbolic tangent": (un("tanh", sub(_C[0], _R[0])), 1),
    "square root": (un("sqrt", sub(_C[0], _R[0])), 1),
    "reciprocal of a difference": (un("recip", sub(_C[0], _R[0])), 1),
}


def prove_skeleton(name: str) -> Proof:
    """Is the merge that is derived for a skeleton proved?"""
    derived = repair.derive(*SKELETONS[name])
    return prove_merge(derived) if derived is not None else Proof(False, reason="no merge was derived")


def monoids(g: Graph) -> list[Monoid]:
    """The merges of a graph's folds, each once."""
    return list(dict.fromkeys(n.attr[0] for _, n in g.items() if n.op == "fold"))


@cache
def programs() -> tuple[tuple[Program, Saturated], ...]:
    """Small programs that need folds, each with its graph: what the rules that are made by code are tested on."""
    extents = {"a": 3, "k": 7}
    x, y = (inp(n, (axis_index("a"), axis_index("k"))) for n in "xy")
    masked = where(bi("lt", y, 0.3), x, num(-math.inf))
    spread = add(x, mul(-1 / 7, red("+", "k", x)))
    terms = [
        red("+", "k", mul(_exp(add(x, mul(-1.0, red("max", "k", x)))), y)),
        un("log", red("+", "k", _exp(add(masked, mul(-1.0, red("max", "k", masked)))))),
        red("+", "k", mul(spread, spread)),
        red("min", "k", where(bi("eq", x, red("max", "k", x)), iota("k"), math.inf)),
    ]
    inputs = tuple(Input(n, (3, 7), "float64") for n in "xy")
    made = [Program("folds", inputs, (Output(t, (("a",),), (3,), "float64"),), extents) for t in terms]
    return tuple((p, saturate(p, splittable=("k",))) for p in made)
