"""Checks of soundness by evaluation: of a whole saturated e-graph, and of a single rule on random instances made from its declaration."""
from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .egraph import SETTLE, Saturated, engine, load
from .graph import Graph, Node
from .program import Input, Output, Program
from .reference import Env, Value, apply
from .rules.rule import Rule, Sexpr, is_number, is_star, parse
from .terms import BINARY, Term, add, axis_index, base, bi, gather, inp, iota, make, mul, num, postorder, red, un, view, where
from .verification import Verdict, random_inputs

TOLERANCE = 1e-9


# ------------------------------------------------------------------ whole graphs

def blocks(g: Graph, block: int = 3) -> dict[str, int]:
    """A block size for every axis (or part) that the graph splits: small, and ragged where the extent allows."""
    parts = {a for _, n in g.items() if n.op in ("red", "fold") for a in [n.attr[-1]]} | {a for s in g.free.values() for a in s}   # type: ignore[index]
    out: dict[str, int] = {}
    for a in sorted(parts, key=len):
        while "." in a:
            a = a.rpartition(".")[0]
            out.setdefault(a, block)
    return {a: min(n, g.extents.get(a, n)) for a, n in out.items()}


def class_values(g: Graph, env: Env) -> dict[int, Value]:
    """The value of each class, by its smallest term."""
    values: dict[int, Value] = {}
    for c in sorted(g.nodes):
        n = g.nodes[c][0]
        values[c] = apply(n.op, n.attr, [values[a] for a in n.args], env)
    return values


def check_graph(saturated: Saturated, program: Program, seed: int = 0, arrays: Mapping[str, Any] | None = None, block: int = 3) -> Verdict:
    """Does every e-node of every class evaluate to its class's value, and does every fact of a class hold of it?  Random inputs unless
    `arrays` (by name) gives some; float64."""
    g = saturated.graph
    if arrays is None:
        arrays = {i.name: x for i, x in zip(program.inputs, random_inputs(program, np.random.default_rng(seed)))}
    env = Env(program.axes, arrays, blocks(g, block))
    values = class_values(g, env)
    worst = 0.0
    for c, n in g.items():
        error = _error(n, apply(n.op, n.attr, [values[a] for a in n.args], env), c, values, env)
        if error > TOLERANCE:
            return Verdict(False, "", f"class {c} = {g.term(c)} has a node of another value (error {error:.2g}), made by {n.why}: "
                           f"{make(n.op, n.attr, [g.term(a) for a in n.args])}  (seed {seed})")
        worst = max(worst, error)
    for c, v in values.items():
        wrong = _false_fact(g, c, v)
        if wrong:
            return Verdict(False, "", f"class {c} = {g.term(c)}: {wrong}  (seed {seed})")
    for o, c in zip(program.outputs, g.outputs):
        from .reference import evaluate_term
        error = _error(Node("output", None), evaluate_term(o.term, env), c, values, env)
        if error > TOLERANCE:
            return Verdict(False, "", f"output {o.term} is not the value of its class {c} (error {error:.2g}, seed {seed})")
    return Verdict(True, f"{g.size} e-nodes of {len(g.nodes)} classes agree, worst relative error {worst:.1e}")


def _error(n: Node, got: Value, c: int, values: Mapping[int, Value], env: Env) -> float:
    """How far a node is from its class's value, relative to the magnitudes it is computed from; NaN and inf must agree."""
    _, (a, b) = env.align([got, values[c]])
    a, b = np.broadcast_arrays(a, b)
    finite = np.isfinite(a) & np.isfinite(b)
    if not ((a == b) | (np.isnan(a) & np.isnan(b)) | finite).all():
        return math.inf
    if not finite.any():
        return 0.0
    size = [np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=0.0) for x in (a, b)]
    if n.op == "add":                                       # cancellation: rounding is relative to the terms
        size += [np.abs(np.where(np.isfinite(values[k][1]), values[k][1], 0.0)).max(initial=0.0) for k in n.args]
    return float(np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0)).max() / (1e-9 + max(size)))


def _false_fact(g: Graph, c: int, value: Value) -> str:
    axes, x = value
    lo, hi = g.interval(c)
    slack = 1e-9 * (1 + np.abs(np.where(np.isfinite(x), x, 0.0)).max(initial=0.0))
    plain = ~np.isnan(x) & (x != 0.0) & (x != -math.inf)
    if (plain & ((x < lo - slack) | (x > hi + slack))).any():
        return f"not in [{lo}, {hi}]"
    for fact, bad in (("finite", ~np.isfinite(x)), ("noinf", np.isinf(x)), ("masked", np.isnan(x) | (x == math.inf)), ("nonzero", x == 0.0)):
        if g.has(c, fact) and bad.any():
            return f"not {fact}"
    for k, bound in g.normsq.get(c, {}).items():
        total = np.square(x).sum(axis=axes.index(k)) if k in axes else np.square(x) * g.extents[k]
        if (total > bound * (1 + 1e-9)).any():
            return f"sum of squares along {k} above {bound}"
    if not any(a == b or a.startswith(b + ".") for a in axes for b in g.free.get(c, axes)) and axes:
        return f"varies along {axes}, said to along {sorted(g.free[c])}"
    return ""
