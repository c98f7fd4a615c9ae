"""Facts and bounds of classes: every operator, on operands that differ in what is known of them, keeps to what they say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from test_egraph import program, x

from eqsat_neptune.egraph import Limits, saturate
from eqsat_neptune.terms import BINARY, UNARY, Term, add, bi, mul, num, red, sub, un, where
from eqsat_neptune.testing import check_graph

pytestmark = pytest.mark.slow

# name → values, and the bounds that are declared of them
OPERANDS: dict[str, tuple[list[float], tuple[float, float]]] = {
    "any": ([-2.0, -0.5, 0.0, 0.5, 3.0, -1.0], (-math.inf, math.inf)),
    "positive": ([1.0, 2.0, 3.0, 4.0, 1.5, 2.5], (1.0, 4.0)),
    "negative": ([-3.0, -1.0, -2.0, -1.5, -2.5, -1.2], (-3.0, -1.0)),
    "nonneg": ([0.0, 1.0, 2.0, 0.5, 0.0, 1.0], (0.0, 2.0)),
    "small": ([-0.5, 0.5, 0.25, 0.0, -0.25, 0.1], (-0.5, 0.5)),
}
AXES = {"k": 12, "l": 12}  # along each, all six values, kept and masked
NUMBERS = (0.0, 1.0, -1.0, math.inf, -math.inf)
OPERATORS: dict[str, Callable[[Term, Term], Term]] = {
    "add": add,
    "mul": mul,
    "sub": sub,
    "where": lambda a, b: where(bi("lt", a, b), a, b),
    **{f: lambda a, b, f=f: bi(f, a, b) for f in BINARY if f != "atan2"},  # type: ignore[misc]  # zeros have no sign here
}


def operands(axis: str) -> list[Term]:
    """Along an axis: as they are, masked by −∞ (as scores are), by 0 (as weights are) and by ∞; and numbers."""
    out = [num(v) for v in NUMBERS]
    mask = x(f"mask_{axis}", axis)
    for name in OPERANDS:
        t = x(f"{name}_{axis}", axis)
        out += [t, *(where(mask, t, num(v)) for v in (-math.inf, 0.0, math.inf))]
    return [*out, un("exp", where(mask, x(f"any_{axis}", axis), num(-math.inf)))]


def wrong(terms: Sequence[Term]) -> str:
    """What is wrong of the first term for which something is; "" if nothing is."""
    bounds = {f"{n}_{a}": b for n, (_, b) in OPERANDS.items() for a in AXES} | {f"mask_{a}": (0.0, 1.0) for a in AXES}
    p = program(*dict.fromkeys(terms), axes=AXES, bounds=bounds)
    arrays = {f"{n}_{a}": np.array(2 * v) for n, (v, _) in OPERANDS.items() for a in AXES}
    arrays |= {f"mask_{a}": np.repeat([1.0, 0.0], 6) for a in AXES}
    verdict = check_graph(saturate(p, limits=Limits(20_000, 60.0)), p, arrays={i.name: arrays[i.name] for i in p.inputs})
    return "" if verdict.ok else verdict.counterexample


@pytest.mark.parametrize("name", OPERATORS)
def test_of_two(name: str) -> None:
    rights = operands("l")
    assert not [text for a in operands("k") if (text := wrong([OPERATORS[name](a, b) for b in rights]))]


def test_of_one() -> None:
    for f in UNARY:
        assert not wrong([un(f, t) for t in operands("k")])
    for op in ("+", "max", "min", "*"):
        assert not wrong([red(op, "k", t) for t in operands("k") if t.free])


def test_of_several() -> None:
    """Trees of two and three operators."""
    r = random.Random(0)
    leaves = {a: operands(a) for a in AXES}

    def draw(depth: int, axis: str) -> Term:
        if depth == 0:
            return r.choice(leaves[axis])
        kind, t = r.random(), draw(depth - 1, axis)
        if kind < 0.25:
            return un(r.choice(sorted(UNARY)), t)
        if kind < 0.35:
            return red(r.choice(["+", "max", "min"]), axis, t) if axis in t.free else t
        both = [t, draw(r.randrange(depth), r.choice(sorted(AXES)))]
        r.shuffle(both)
        return OPERATORS[r.choice(sorted(OPERATORS))](*both)

    for _ in range(200):
        assert not wrong([t for t in (draw(r.choice([2, 3]), "k") for _ in range(12)) if t.op != "num"])
