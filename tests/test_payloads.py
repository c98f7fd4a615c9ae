"""argmax, argmin and top_k of computed values: the position is found whatever kernel computes the values, however often, in what
rounding; and comparisons of a value with its own extremum see one rounding of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from eager_models import Eager, ManyCores
from eqsat_neptune.codegen.cuda import emulate
from eqsat_neptune.codegen.hip import hip_emulator
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.serial import from_json, to_json
from eqsat_neptune.cost_models import model_for
from eqsat_neptune.extraction.extract import extract
from eqsat_neptune.extraction.plan import Kernel, Plan, Store
from eqsat_neptune.rules.payloads import is_payload
from sweeps import some

import eqsat_neptune as en
from eqsat_neptune import egraph, rules, terms, xp
from eqsat_neptune.program import Program
from eqsat_neptune.runtime.cpu import CpuRunner
from eqsat_neptune.terms import Term, postorder
from eqsat_neptune.testing import check_graph

ROWS, INNER, COLUMNS = 19, 12, 45
needs_compiler = pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler for the emulator")


def argmaxima(x: Any, w: Any) -> Any:
    y = x @ w
    return xp.argmax(y, axis=-1), xp.argmin(y, axis=-1), xp.argmax(y, axis=0), xp.argmax(y), xp.max(y, axis=-1)


def best_three(x: Any, w: Any) -> Any:
    return xp.top_k(x @ w, 3)


def of_one_row(x: Any, w: Any) -> Any:
    """With little else to do side by side, the columns are split."""
    y = x[0] @ w
    return xp.argmax(y), xp.max(y)


def of_masked(x: Any, w: Any) -> Any:
    """The last row has nothing but −∞."""
    y = xp.where(xp.arange(ROWS)[:, None] + xp.arange(COLUMNS) < ROWS - 1, x @ w, -xp.inf)
    return xp.argmax(y, axis=-1), xp.argmax(xp.where(y > 0.5, -xp.inf, y), axis=0)


def by_hand(x: Any, w: Any) -> Any:
    """The last place of the minimum, and how much of another tensor stands at the places of the maximum."""
    y = x @ w
    at = y == xp.min(y, axis=-1, keepdims=True)
    last = xp.max(xp.where(at, xp.arange(COLUMNS), -xp.inf), axis=-1)
    most = xp.max(xp.where(y == xp.max(y, axis=-1, keepdims=True), w[0], -xp.inf), axis=-1)
    return last, most


POSITIONS = {f.__name__: f for f in (argmaxima, best_three, of_one_row, of_masked, by_hand)}


MODELS = {"gpu": Eager(), "tiny": Eager(shared_block=3000, shared_sm=3000, registers=4096), "cpu": ManyCores()}


def program(fn: Callable[..., Any], dtype: str) -> Program:
    out = en.trace(fn, en.TensorSpec((ROWS, INNER), dtype), en.TensorSpec((INNER, COLUMNS), dtype))
    assert isinstance(out, Program)
    return out


@cache
def plans(name: str, dtype: str, model: str) -> tuple[Program, tuple[Plan, ...]]:
    """The best plan and those that lost."""
    p = program((POSITIONS | COMPARED)[name], dtype)
    split = [t.attr[1] for t in postorder(o.term for o in p.outputs) if t.op == "red" and p.axes[t.attr[1]] >= 16]
    found = extract(egraph.saturate(p, splittable=dict.fromkeys(split)).graph, p, MODELS[model])
    return p, (found.plan, *(c.plan for c in found.candidates))


def exact(dtype: str) -> list[np.ndarray]:
    """Small integers, whose products and sums no rounding touches: many ties."""
    rng = np.random.default_rng(5)
    return [rng.integers(-2, 3, s).astype(emulate.numpy_dtype(dtype)) for s in ((ROWS, INNER), (INNER, COLUMNS))]


def rounded(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    return [rng.standard_normal(s).astype(emulate.numpy_dtype(dtype)) for s in ((ROWS, INNER), (INNER, COLUMNS))]


def agree(p: Program, got: Sequence[Any], arrays: list[np.ndarray]) -> None:
    """Positions to the last one, values to rounding."""
    want = en.evaluate(p, *arrays)
    for n, (g, w) in enumerate(zip(got, want, strict=True)):
        g = np.asarray(g)
        if g.dtype.kind in "iub":
            np.testing.assert_array_equal(g, w, f"output {n}")
        else:
            assert np.linalg.norm(g.astype(float) - w) <= (4e-3 if g.dtype.itemsize == 2 else 2e-6) * np.linalg.norm(w), n


# ------------------------------------------------------------------ payloads


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_carried_with_their_extremum(name: str) -> None:
    p = program(POSITIONS[name], "float32")
    saturated = egraph.saturate(p, splittable=[a for a, n in p.axes.items() if n >= 16])
    assert any(n.op == "fold" and is_payload(n.attr) and n.attr[2].endswith(".o") for _, n in saturated.graph.items())
    for seed in range(2):
        assert check_graph(saturated, p, seed)
    arrays = {i.name: x for i, x in zip(p.inputs, exact("float64"))}
    assert check_graph(saturated, p, arrays=arrays)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"]))
@pytest.mark.parametrize("name", POSITIONS)
def test_every_plan_finds_the_position(name: str, dtype: str, model: str) -> None:
    p, every = plans(name, dtype, model)
    assert any(len(q.kernels) > 1 for q in every), "the values and what is found in them in one kernel only"
    for q in every:
        for t in postorder(s.term for k in q.kernels for s in k.stores):
            assert not (t.op == "bi" and t.attr == "eq" and any(y.op == "red" for x in t.args for y in postorder([x])))
        for arrays in (exact(dtype), rounded(dtype)):
            agree(p, CpuRunner(p, q)(arrays, None), arrays)


def test_parts_of_a_split_carry_their_own() -> None:
    _, every = plans("of_one_row", "bfloat16", "gpu")
    carried = [
        t for q in every for t in postorder(s.term for k in q.kernels for s in k.stores) if t.op == "fold" and is_payload(t.attr)
    ]
    assert {".i", ".o"} <= {t.attr[2][-2:] for t in carried}


def in_one_unit(every: Sequence[Plan], arrays: list[np.ndarray]) -> tuple[list[Any], dict[str, Any], dict[str, np.ndarray]]:
    """All plans' tile programs, buffers and inputs: compiling is what takes time."""
    programs, buffers, inputs = [], {}, {}
    for n, q in enumerate(every):
        names = {b: f"p{n}_{b}" for b in q.buffers}
        buffers |= {names[b.name]: replace(b, name=names[b.name]) for b in q.buffers.values()}
        inputs |= {names[b.name]: x for b, x in zip((b for b in q.buffers.values() if b.kind == "input"), arrays)}
        programs += [lower(renamed(k, names, f"p{n}_{k.name}"), buffers, q.compute_dtype) for k in q.kernels]
    return programs, buffers, inputs


def renamed(k: Kernel, names: dict[str, str], name: str) -> Kernel:
    def f(t: Term, args: tuple[Term, ...]) -> Term | None:
        return terms.make("input", (names[t.attr[0]], t.attr[1])) if t.op == "input" else None

    stores = terms.rewrite([s.term for s in k.stores], f)
    return replace(k, name=name, stores=tuple(Store(names[s.buffer], t, s.index) for s, t in zip(k.stores, stores, strict=True)))


def few(every: Sequence[Plan]) -> list[Plan]:
    """One plan of each shape: which buffers lie between kernels, and roles."""
    shapes: dict[tuple, Plan] = {}
    for q in every:
        shapes.setdefault(tuple(tuple(sorted(x.role for x in k.axes.values())) for k in q.kernels), q)
    return list(shapes.values())[:3]


@needs_compiler
@pytest.mark.parametrize("dtype", some(["bfloat16", "float32"]))
@pytest.mark.parametrize("arch", some(["cuda", "gfx942", "gfx1100"]))
@pytest.mark.parametrize("name", some(POSITIONS, [n for n in POSITIONS if n != "best_three"]))
def test_emulated_kernels_find_the_position(name: str, arch: str, dtype: str) -> None:
    p, every = plans(name, dtype, "gpu")
    every = few(every)
    assert any(len(q.kernels) > 1 for q in every)
    arrays = exact(dtype)
    programs, buffers, inputs = in_one_unit(every, arrays)
    where = None if arch == "cuda" else hip_emulator(arch)
    for out in emulate.run(programs, buffers, inputs, where, seeds=(0, 7)):
        for n in range(len(every)):
            agree(p, [out[f"p{n}_out{i}"] for i in range(len(p.outputs))], arrays)


def test_nan_is_found_first() -> None:
    x = np.random.default_rng(0).standard_normal((4, 3000)).astype(np.float32)
    x[1, [700, 2900]], x[2] = np.nan, -np.inf
    p = en.trace(lambda x: (xp.argmax(x, axis=-1), xp.argmin(x, axis=-1), xp.top_k(x, 2)[1]), en.TensorSpec(x.shape))
    got, want = en.optimize(p)(x), en.evaluate(p, x)
    for g, w in zip(got, want):
        np.testing.assert_array_equal(g, w)
    assert got[0][1] == got[1][1] == 700 and got[0][2] == 0 and list(got[2][2]) == [0, 1]


def test_merges_of_payloads_survive_the_trip_through_text() -> None:
    _, every = plans("argmaxima", "float32", "gpu")
    for q in every:
        assert from_json(to_json(q)) == q


# ------------------------------------------------------------------ comparisons


def one_hot_of_maximum(x: Any, w: Any) -> Any:
    y = xp.exp(x @ w * 0.3)
    top = xp.max(y, axis=-1, keepdims=True)
    return xp.where(y == top, y, 0.0), top


def how_many_maxima(x: Any, w: Any) -> Any:
    y = 0.3 * (x @ w)
    return xp.sum(xp.astype(y >= xp.max(y, axis=-1, keepdims=True), xp.float32), axis=-1), y + 1.0


def without_the_least(x: Any, w: Any) -> Any:
    y = xp.tanh(x @ w)
    return xp.sum(xp.where(-y < xp.max(-y, axis=0), y, 0.0), axis=0), xp.any(y != xp.min(y, axis=0), axis=0)


SELECTS = ("red", "fold", "input", "num", "iota", "where")


def is_negation(t: Term) -> bool:
    return t.op == "mul" and any(terms.is_num(a, -1.0) for a in t.args)


COMPARED = {f.__name__: f for f in (one_hot_of_maximum, how_many_maxima, without_the_least)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COMPARED)
def test_both_sides_of_a_comparison_read_one_value(name: str, dtype: str, model: str) -> None:
    p, every = plans(name, dtype, model)
    for q in every:
        compared = [t for k in q.kernels for s in k.stores for t in postorder([s.term]) if t.op == "bi"]
        assert compared and not any(x.op in ("red", "fold") and x.attr[0] == "+" for t in compared for x in postorder([t]))
        made = {s.buffer: s.term for k in q.kernels for s in k.stores}
        read = [made[x.attr[0]] for x in dict.fromkeys(postorder(compared)) if x.op == "input"]
        computed = [t for t in read if not all(x.op in SELECTS or is_negation(x) for x in postorder([t]))]
        assert len(computed) == 1, "what the others are selected from"
        arrays = rounded(dtype)
        agree(p, CpuRunner(p, q)(arrays, None), arrays)


def test_a_rounded_output_is_not_read_back_where_rounding_shows() -> None:
    def scores_and_weights(x: Any, w: Any) -> Any:
        y = x @ w
        return y, xp.softmax(y, axis=-1)

    p = program(scores_and_weights, "bfloat16")
    arrays = [20 * a for a in rounded("bfloat16")]
    for model in (*MODELS.values(), model_for("cpu")):
        found = extract(egraph.saturate(p).graph, p, model)
        for q in (found.plan, *(c.plan for c in found.candidates)):
            _, weights = CpuRunner(p, q)(arrays, None)
            np.testing.assert_allclose(weights.astype(float), en.evaluate(p, *arrays)[1], atol=2e-3)


def test_without_the_rule_comparisons_are_still_right() -> None:
    chosen = tuple(r for r in rules.RULES if r.name != "carry-payload")
    p = program(argmaxima, "bfloat16")
    arrays = exact("bfloat16")
    kernel = en.optimize(p, rules=chosen)
    agree(p, kernel(*arrays), arrays)
    assert math.isfinite(kernel.cost.seconds)
