"""Soundness of a whole saturated e-graph: every node of a class has the class's value, every fact of a class holds of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..egraph import Saturated
from ..graph import Graph, Node
from ..program import Program
from ..reference import Env
from ..terms import Term, make, postorder
from ..verification import Verdict, random_inputs
from .conditioning import Approx, disagree, step

TOLERANCE = 1e-9  # of a whole program, relative to the class's largest value, beside what its conditioning allows


def blocks(g: Graph, block: int = 3) -> dict[str, int]:
    """A block size for every axis (or part) that the graph splits: small, and ragged where the extent allows."""
    parts = {a for _, n in g.items() if n.op in ("red", "fold") for a in [n.attr[-1]]} | {a for s in g.free.values() for a in s}
    out: dict[str, int] = {}
    for a in sorted(parts, key=len):
        while "." in a:
            a = a.rpartition(".")[0]
            out.setdefault(a, block)
    return {a: min(n, g.extents.get(a, n)) for a, n in out.items()}


class Values(dict[int, Approx]):
    """The value of each class, by its smallest term, with an error bound; made when it is first asked for."""

    def __init__(self, g: Graph, env: Env):
        self.g, self.env = g, env

    def __missing__(self, c: int) -> Approx:
        n = self.g.nodes[c][0]
        self[c] = step(n.op, n.attr, [self[a] for a in n.args], self.env)
        return self[c]


def class_values(g: Graph, env: Env) -> Values:
    """The values of all classes."""
    values = Values(g, env)
    for c in sorted(g.nodes):
        values[c]
    return values


@dataclass(frozen=True)
class Wrong:
    """A class and what disagrees with it: a node of another value, or (node None) a fact that does not hold."""

    cls: int
    node: Node | None
    text: str


def wrong(g: Graph, values: Values, tolerance: float = 0.0, classes: Iterable[int] | None = None) -> Iterator[Wrong]:
    """What disagrees, smallest classes first.  tolerance: see `check_graph`; 0 leaves only rounding."""
    env = values.env
    for c in sorted(g.nodes if classes is None else classes):
        for n in g.nodes[c][1:]:
            args = [values[a] for a in n.args]
            got = step(n.op, n.attr, args, env)
            floor = tolerance * _scale(got, values[c], *(args if n.op == "add" else [])) if tolerance else 0.0
            if disagree(got, values[c], env, floor).any():
                yield Wrong(c, n, f"has a node of another value (error {_gap(got, values[c], env)}), made by {n.why}")
        false = _false_fact(g, c, values[c])
        if false:
            yield Wrong(c, None, false)


def check_graph(
    saturated: Saturated, program: Program, seed: int = 0, arrays: Mapping[str, Any] | None = None, block: int = 3
) -> Verdict:
    """Does every e-node of every class evaluate to its class's value, and does every fact of a class hold of it?

    Random inputs unless `arrays` (by name) gives some; float64.  Two values agree if they differ by no more than rounding can
    explain (see conditioning.py), or by 1e-9 of the largest element of both and of the terms that cancel in them."""
    g = saturated.graph
    if arrays is None:
        arrays = {i.name: x for i, x in zip(program.inputs, random_inputs(program, np.random.default_rng(seed)))}
    env = Env(g.extents, arrays, blocks(g, block), sure_zeros=False)
    values = class_values(g, env)
    for w in wrong(g, values, TOLERANCE):
        nodes = f": {make(w.node.op, w.node.attr, [g.term(a) for a in w.node.args])}" if w.node else ""
        return Verdict(False, "", f"class {w.cls} = {g.term(w.cls)} {w.text}{nodes}  (seed {seed})")
    for o, c, gap in wrong_outputs(((o.term, c) for o, c in zip(program.outputs, g.outputs)), values, TOLERANCE):
        return Verdict(False, "", f"output {o} is not the value of its class {c} (error {gap}, seed {seed})")
    return Verdict(True, f"{g.size} e-nodes of {len(g.nodes)} classes agree")


def wrong_outputs(outputs: Iterable[tuple[Term, int]], values: Values, tolerance: float = 0.0) -> Iterator[tuple[Term, int, str]]:
    """Terms that do not have the value of their class, with the class and the error: a rule may have taken the term's own node
    out of the graph."""
    memo: dict[Term, Approx] = {}
    for t, c in outputs:
        got, args = _plain(t, values.env, memo)
        if disagree(got, values[c], values.env, tolerance * _scale(got, values[c], *args)).any():
            yield t, c, _gap(got, values[c], values.env)


def _scale(*values: Approx) -> float:
    return 1e-9 + max(float(np.abs(np.where(np.isfinite(v.x), v.x, 0.0)).max(initial=0.0)) for v in values)


def _gap(a: Approx, b: Approx, env: Env) -> str:
    """The largest difference, as text."""
    _, (x, y) = env.align([a.value, b.value])
    finite = np.isfinite(x) & np.isfinite(y)
    if not ((x == y) | (np.isnan(x) & np.isnan(y)) | finite).all():
        return "inf"
    gap = np.abs(np.where(finite, x, 0.0) - np.where(finite, y, 0.0)).max(initial=0.0)
    return f"{gap / _scale(a, b):.2g}"


def _plain(t: Term, env: Env, memo: dict[Term, Approx]) -> tuple[Approx, list[Approx]]:
    """The value of a term and of its arguments, operator by operator (the interpreter reorders contractions, which shows where
    there are infinities)."""
    for x in postorder([t]):
        if x not in memo:
            memo[x] = step(x.op, x.attr, [memo[a] for a in x.args], env)
    return memo[t], [memo[a] for a in t.args]


def _false_fact(g: Graph, c: int, value: Approx) -> str:
    axes, x = value.value
    sure = np.isfinite(value.error)
    lo, hi = g.interval(c)
    slack = np.where(sure, 1e-9 * (1 + np.abs(np.where(np.isfinite(x) & sure, x, 0.0)).max(initial=0.0)) + value.error, np.inf)
    plain = ~np.isnan(x) & (np.abs(x) > value.error) & (x != -math.inf) & sure
    if (plain & ((x < lo - slack) | (x > hi + slack))).any():
        return f"not in [{lo}, {hi}]"
    for fact, bad in (
        ("finite", ~np.isfinite(x)),
        ("noinf", np.isinf(x)),
        ("masked", np.isnan(x) | (x == math.inf)),
        ("nonzero", (x == 0.0) & (value.error == 0.0)),
    ):
        if g.has(c, fact) and (bad & sure).any():
            return f"not {fact}"
    for k, bound in g.normsq.get(c, {}).items():
        squares = np.square(np.where(sure, x, 0.0))
        total = squares.sum(axis=axes.index(k)) if k in axes else squares * g.extents[k]
        if (total > bound * (1 + 1e-9)).any():
            return f"sum of squares along {k} above {bound}"
    if not any(a == b or a.startswith(b + ".") for a in axes for b in g.free.get(c, axes)) and axes and _varies(x, value.error):
        return f"varies along {axes}, said to along {sorted(g.free[c])}"
    return ""


def _varies(x: np.ndarray, error: np.ndarray) -> bool:
    """Are not all elements one number?  (A fold's array has the axes of its pivots even if a component needs none of them.)"""
    flat, e = np.ravel(x), np.ravel(error)
    with np.errstate(all="ignore"):
        alike = (
            (flat == flat[:1])
            | (np.isnan(flat) & np.isnan(flat[:1]))
            | (np.abs(flat - flat[:1]) <= e + e[:1] + 1e-9 * np.abs(flat))
        )
    return not alike.all()
