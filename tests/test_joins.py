"""Products that share an operand, side by side in one kernel: which, that it is sound, and where it pays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda import emulate
from eqsat_neptune.codegen.cuda.arch import emulator_arch, hopper_emulator_arch
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.cost_models import model_for
from eqsat_neptune.rules import RULES
from eqsat_neptune.rules.joins import Size, find

import eqsat_neptune as en
from eqsat_neptune.compiler import joins
from eqsat_neptune.egraph import Saturated, saturate
from eqsat_neptune.program import Program
from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import Affine, axis_index
from eqsat_neptune.testing import check_graph

GPU = "cuda:sm_90a"
PLAIN = [r for r in RULES if r.name != "concatenate"]


def heads(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Two small networks on one input."""
    xp = x.__array_namespace__()
    return xp.tanh(x @ a) @ c, xp.tanh(x @ b) @ d


def three(x: Any, a: Any, b: Any, c: Any) -> Any:
    """One product as wide as another, and a matrix times a vector."""
    xp = x.__array_namespace__()
    return xp.sum(xp.tanh(x @ a), axis=-1) + xp.sum(xp.exp(x @ b), axis=-1) * xp.tanh(x @ c)


def projected(x: Any, wq: Any, wk: Any, wv: Any, groups: int = 2, d: int = 8) -> Any:
    """Projections to heads, of which `groups` share keys and values, and what is made of them."""
    xp = x.__array_namespace__()
    n = x.shape[0]
    q = xp.permute_dims(xp.reshape(x @ wq, (n, -1, groups, d)), (1, 2, 0, 3))
    k, v = (xp.permute_dims(xp.reshape(x @ w, (n, -1, 1, d)), (1, 2, 0, 3)) for w in (wk, wv))
    s = q @ k.mT
    p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
    return (p / xp.sum(p, axis=-1, keepdims=True)) @ v


def traced(f: Any, *shapes: tuple[int, ...], dtype: str = "bfloat16") -> Program:
    program = en.trace(f, *(en.TensorSpec(s, dtype) for s in shapes))
    assert isinstance(program, Program)
    return program


HEADS = ((64, 512), (512, 256), (512, 64), (256, 16), (64, 8))
SMALL = ((5, 24), (24, 16), (24, 6), (16, 3), (6, 2))
PROJECTED = ((7, 24), (24, 32), (24, 16), (24, 16))
ONE_HEAD_EACH = ((64, 1024), *((1024, 1024),) * 3)


def one_head_each(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
    return projected(x, wq, wk, wv, 1, 128)


# ---------------------------------------------------------------- which


def test_products_of_one_operand_are_found() -> None:
    p = traced(heads, *HEADS)
    (j,) = find(p)
    own, other = (next(a for a, _ in m) for m in (j.read_first, j.read_second))
    assert (p.axes[own], p.axes[other]) == (j.places, j.extent - j.places) and {256, 64} == {p.axes[own], p.axes[other]}
    at = axis_index(j.axis)
    assert j.read_first == ((own, at),) and j.read_second == ((other, Affine(-j.places, at.terms)),)
    assert j.place_first == ((j.axis, axis_index(own)),)
    assert j.place_second == ((j.axis, Affine(j.places, axis_index(other).terms)),)
    assert j.whole.free == (j.first.free - {own}) | {j.axis} and j.axis not in p.axes


def test_three_products_are_joined_one_after_the_other() -> None:
    first, second = find(traced(three, (5, 24), (24, 16), (24, 6), (24,)))
    assert second.first is first.whole and second.extent == 16 + 6 + 1
    assert second.read_second == () and second.place_second == ((second.axis, Affine(22)),)  # a product without columns


def test_axes_of_equal_extent_are_renamed() -> None:
    joined = find(traced(projected, *PROJECTED))
    assert [j.extent for j in joined] == [3, 4]  # two heads of queries, one of keys, one of values
    assert len(joined[1].read_second) == len(joined[1].place_second) - 1 == 1


@pytest.mark.parametrize("name", ["gated_mlp", "matmul_chain", "prefill_global", "linear_attention", "rmsnorm_linear"])
def test_products_with_the_same_axes_or_none_to_share_are_left_alone(name: str) -> None:
    case = CASES[name]
    assert not find(en.trace(case.function("small"), *case.specs("small")))


def test_it_is_asked_whether_it_pays() -> None:
    asked: list[tuple[Size, Size, Size]] = []

    def pays(*sizes: Size) -> bool:
        asked.append(sizes)  # type: ignore[arg-type]
        return False

    assert not find(traced(heads, *HEADS), pays)
    ((a, b, both),) = asked
    products = {2.0 * 64 * 512 * n: 64 * 512 + 512 * n + 64 * n for n in (256, 64)}
    assert {a.flops: a.elements, b.flops: b.elements} == products
    assert both.flops == 2 * 2.0 * 64 * 512 * 320 and both.elements == a.elements + b.elements - 64 * 512


def test_outputs_are_not_joined_for_a_plan() -> None:
    p = traced(lambda x, a, b: (x @ a, x @ b), (64, 512), (512, 256), (512, 64))
    assert find(p) and not joins(p, model_for(GPU))


def test_only_small_products_pay() -> None:
    model = model_for(GPU)
    assert joins(traced(heads, *HEADS), model)
    assert not joins(traced(heads, (8192, 4096), (4096, 4096), (4096, 1024), (4096, 16), (1024, 16)), model)
    assert not joins(traced(heads, *HEADS), model_for("cpu"))  # a host's launch costs less than the work


# ---------------------------------------------------------------- that it is sound


def with_joins(p: Program) -> Saturated:
    return saturate(p, splittable=[a for a, n in p.axes.items() if n > 6], joins=find(p))


@pytest.mark.parametrize(
    ("f", "shapes"),
    [(heads, SMALL), (three, ((5, 24), (24, 16), (24, 6), (24,))), (projected, PROJECTED)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_every_node_has_the_value_of_its_class(f: Any, shapes: tuple) -> None:
    p = traced(f, *shapes, dtype="float64")
    s = with_joins(p)
    assert s.stop == "fixpoint" and any(n.why == "concatenate" and n.op == "view" for _, n in s.graph.items())
    for seed in range(2):
        verdict = check_graph(s, p, seed)
        assert verdict, verdict.counterexample


def test_the_graph_grows_by_the_tensor_and_its_parts() -> None:
    p = traced(heads, *HEADS)
    assert with_joins(p).graph.size - saturate(p, splittable=[a for a, n in p.axes.items() if n > 6]).graph.size == 8


def test_without_the_rule_nothing_is_joined() -> None:
    p = traced(heads, *HEADS)
    assert saturate(p, rules=PLAIN, joins=find(p)).graph.extents == p.axes


# ---------------------------------------------------------------- where it pays


def test_products_whose_columns_are_different_axes_are_one_kernel() -> None:
    """Queries and keys have the same axes, values others: apart, they are two kernels, or are computed again for every block of rows.
    (On sm_90a one kernel that stores all three takes as long.)"""
    p = traced(one_head_each, *ONE_HEAD_EACH)
    best, plain = (en.optimize(p, "cuda:sm_80", **rules) for rules in ({}, {"rules": PLAIN}))
    assert best.cost.seconds * 1.2 < plain.cost.seconds and len(best.plan.kernels) == 2
    first, second = best.plan.kernels
    (made,) = {s.buffer for s in first.stores if wide(s.index, p)}
    assert best.plan.buffers[made].dtype == "bfloat16"  # as its parts would be
    assert {i.name for i in p.inputs} <= reads(first, best) and made in reads(second, best)
    assert "concatenate" in str(best.explain())


def test_outputs_that_share_an_operand_are_planned_together() -> None:
    p = traced(heads, *HEADS)
    best, plain = en.optimize(p, GPU), en.optimize(p, GPU, rules=PLAIN)
    assert best.cost.seconds * 1.3 < plain.cost.seconds and len(best.plan.kernels) <= len(plain.plan.kernels)


def reads(k: Any, kernel: Any) -> set[str]:
    return {b.name for b in lower(k, kernel.plan.buffers, kernel.plan.compute_dtype).reads}


def wide(index: Any, p: Program) -> set[str]:
    """Axes that the program has not."""
    return {a for ix in index for a in ix.axes if a.partition(".")[0] not in p.axes}


@pytest.mark.parametrize("target", [GPU, "cpu"])
@pytest.mark.parametrize("name", ["lora", "gated_mlp", "rmsnorm_diamond", "layers1"])
def test_no_plan_is_worse(name: str, target: str) -> None:
    case = CASES[name]
    p = en.trace(case.function("full"), *case.specs("full"))
    assert en.optimize(p, target).cost.seconds <= en.optimize(p, target, rules=PLAIN).cost.seconds * (1 + 1e-9)


def test_names_change_nothing() -> None:
    p = traced(one_head_each, *ONE_HEAD_EACH)
    axes = {a: f"axis{n}" for n, a in enumerate(reversed(p.axes))}
    inputs = {i.name: f"in{n}" for n, i in enumerate(reversed(p.inputs))}
    one, two = (en.optimize(q, GPU).plan for q in (p, p.renamed(axes, inputs)))
    assert one.cost.seconds == two.cost.seconds and len(one.kernels) == len(two.kernels)


def test_a_name_that_is_taken_is_not_given_again() -> None:
    p = traced(one_head_each, *ONE_HEAD_EACH)
    q = p.renamed({a: f"c{n}" for n, a in enumerate(p.axes)}, {})
    assert {j.axis for j in find(q)}.isdisjoint(q.axes) and en.optimize(q, GPU).cost.seconds == en.optimize(p, GPU).cost.seconds


# ---------------------------------------------------------------- that it runs


def arrays(p: Program, dtype: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [(rng.standard_normal(i.shape) / np.sqrt(i.shape[0])).astype(dtype) for i in p.inputs]


def joined(p: Program, kernel: Any) -> bool:
    return any(wide(s.index, p) for k in kernel.plan.kernels for s in k.stores)


def test_on_the_host() -> None:
    """By a plan for another machine, for which it pays."""
    p = traced(one_head_each, *ONE_HEAD_EACH[:1], *((1024, 256),) * 3)
    kernel = en.optimize(p, "cpu", cost_model=model_for("cuda:sm_80"))
    assert joined(p, kernel)
    xs = arrays(p, ml_dtypes.bfloat16)
    want = en.evaluate(p, *xs)
    np.testing.assert_allclose(kernel(*xs).astype(np.float64), want, rtol=1e-2, atol=1e-2 * np.abs(want).max())


@pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize(
    ("target", "arch", "rows", "k"), [("cuda:sm_80", emulator_arch(), 64, 512), (GPU, hopper_emulator_arch(), 128, 1024)]
)
def test_as_emitted(target: str, arch: Any, rows: int, k: int) -> None:
    """On sm_90a by tensor maps, at positions before an array's start."""
    p = traced(one_head_each, (rows, k), *((k, k),) * 3)
    kernel = en.optimize(p, target)
    assert joined(p, kernel)
    want = en.evaluate(p, *arrays(p, ml_dtypes.bfloat16))
    assert np.abs(emulated(p, kernel, arch) - want).max() < 1e-2 * np.abs(want).max()


@pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("columns", [(24, 16), (24, 13), (20, 8)])
def test_side_by_side_as_written(columns: tuple[int, int]) -> None:
    """What lies beside one another is copied in chunks of 16 bytes where no chunk lies half in an array."""

    def f(x: Any, a: Any, b: Any) -> Any:
        return x.__array_namespace__().concat([x @ a, x @ b], axis=1)

    p = traced(f, (65, 256), *((256, n) for n in columns))
    kernel = en.optimize(p, "cuda:sm_80")
    np.testing.assert_allclose(emulated(p, kernel), en.evaluate(p, *arrays(p, ml_dtypes.bfloat16)), atol=2e-2)
    assert all((f"fill<PACKED_{x} != 0" in kernel.source) == (columns[0] % 8 == 0) for x in "ab")


def emulated(p: Program, kernel: Any, arch: Any = None) -> np.ndarray:
    plan = kernel.plan
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    xs = {i.name: x for i, x in zip(p.inputs, arrays(p, ml_dtypes.bfloat16))}
    (out,) = emulate.run(programs, plan.buffers, xs, arch)
    return out["out0"].astype(np.float64)
