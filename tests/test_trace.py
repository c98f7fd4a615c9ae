"""Tracing: positional code becomes the right terms over named axes, and what cannot be traced is explained."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import random_programs

import eqsat_neptune as en
from eqsat_neptune import xp
from eqsat_neptune.errors import DtypeError, EqsatError, InputError, ShapeError, TraceError
from eqsat_neptune.program import Program
from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import Term, postorder

RNG = np.random.default_rng(3)


def specs(*shapes: tuple[int, ...], dtype: str = "float64") -> list[en.TensorSpec]:
    return [en.TensorSpec(s, dtype) for s in shapes]


def traced(fn: Any, *shapes: tuple[int, ...], dtype: str = "float64") -> Program:
    program = en.trace(fn, *specs(*shapes, dtype=dtype))
    assert isinstance(program, Program)
    return program


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Any:
    """The programs run on NumPy too, where a mean of nothing warns."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def agrees(fn: Any, *shapes: tuple[int, ...]) -> Program:
    """Trace, evaluate, compare with the function run on NumPy arrays."""
    program = traced(fn, *shapes)
    arrays = [RNG.standard_normal(s) for s in shapes]
    results, wants = en.evaluate(program, *arrays), fn(*arrays)
    for result, want in zip(results, wants) if isinstance(wants, tuple) else [(results, wants)]:
        assert result.shape == np.shape(want)
        np.testing.assert_allclose(result, want, rtol=1e-11, atol=1e-12)
    return program


def nodes(program: Program, op: str) -> list[Term]:
    return [t for t in postorder([o.term for o in program.outputs]) if t.op == op]


# ----------------------------------------------------------------------------------------------------------- the namespace


def softmax(x: Any) -> Any:
    e = np.exp if isinstance(x, np.ndarray) else xp.exp
    p = e(x - x.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("seed", range(200))
def test_random_programs(seed: int) -> None:
    random_programs.check(random_programs.draw(seed))


@pytest.mark.parametrize("seed", range(100))
def test_random_programs_with_empty_and_tiny_axes(seed: int) -> None:
    random_programs.check(random_programs.draw(seed, extents=random_programs.SMALL_EXTENTS))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_programs(block: int) -> None:
    for seed in range(1000 + 500 * block, 1500 + 500 * block):
        random_programs.check(random_programs.draw(seed, steps=4 + seed % 15))


# ------------------------------------------------------------------------------------------------------------------- terms


def test_attention_is_the_textbook_term() -> None:
    program = agrees(lambda q, k, v: softmax(q @ k.mT / q.shape[-1] ** 0.5) @ v, (2, 5, 4), (2, 7, 4), (2, 7, 3))
    assert len(program.axes) == 5
    assert not nodes(program, "view") and not nodes(program, "gather")
    (score,) = [t for t in nodes(program, "red") if t.args[0].op == "mul" and {a.op for a in t.args[0].args} == {"input"}]
    (peak,) = [t for t in nodes(program, "red") if t.attr[0] == "max"]
    assert peak.args[0].args[0] is score
    assert {t.attr[1] for t in nodes(program, "red")} == {peak.attr[1], score.attr[1]}       # one key axis, one head axis


def test_axes_unify_only_where_the_program_forces_it() -> None:
    program = traced(lambda x, y: (xp.sum(x, axis=0), xp.sum(y, axis=0)), (4, 4), (4, 4))
    assert len(program.axes) == 4
    assert len(traced(lambda x, y: x + y, (4, 4), (4, 4)).axes) == 2
    assert len(traced(lambda x, y: x @ y, (4, 4), (4, 4)).axes) == 3


def test_gram_matrix_reads_its_input_under_two_names() -> None:
    program = agrees(lambda x: x @ x.mT, (5, 3))
    assert sorted(program.axes.values()) == [3, 5, 5]
    assert not nodes(program, "view") and len(nodes(program, "input")) == 2


def test_gram_matrix_of_a_computed_tensor_shares_it() -> None:
    program = agrees(lambda x, w: (x @ w) @ (x @ w).mT, (5, 3), (3, 4))
    (rename,) = nodes(program, "view")
    products = [t for t in nodes(program, "red") if t.args[0].op == "mul" and all(a.op == "input" for a in t.args[0].args)]
    assert products == [rename.args[0]]


def test_self_attention_shares_its_projections() -> None:
    def fn(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
        return softmax((x @ wq) @ (x @ wk).mT) @ (x @ wv) + x

    program = agrees(fn, (6, 4), (4, 4), (4, 4), (4, 4))
    assert len({t.attr for t in nodes(program, "view")}) == 1                   # keys and values go by the same second name
    assert len(nodes(program, "view")) == 2
    assert program.outputs[0].dims[0] == ("a0",)                                # queries keep the name that x has


def test_heads_split_an_axis_everywhere() -> None:
    def fn(x: Any, w: Any, wo: Any) -> Any:
        h = (x @ w).reshape(5, 2, 3)
        return softmax(h).reshape(5, 6) @ wo

    program = agrees(fn, (5, 4), (4, 6), (6, 4))
    assert sorted(program.axes.values()) == [2, 3, 4, 4, 5]
    assert not nodes(program, "view") and not nodes(program, "gather")
    strides = {tuple(c for _, c in ix.terms) for t in nodes(program, "input") for ix in t.attr[1]}
    assert (3, 1) in strides


def test_grouped_heads() -> None:
    def fn(q: Any, k: Any, v: Any) -> Any:
        b, hq, n, d = q.shape
        g = hq // k.shape[1]
        q = q.reshape(b, k.shape[1], g, n, d)
        return (softmax(q @ k[:, :, None].mT) @ v[:, :, None]).reshape(b, hq, n, v.shape[-1])

    program = agrees(fn, (2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4))
    assert not nodes(program, "view") and not nodes(program, "gather")
    assert program.outputs[0].dims[1] == tuple(a for a in program.outputs[0].dims[1] if program.axes[a] in (3, 2))
    assert len(program.outputs[0].dims[1]) == 2


@pytest.mark.parametrize("shape, to", [
    ((6, 4), (24,)), ((6, 4), (2, 3, 4)), ((6, 4), (6, 2, 2)), ((6, 4), (3, 8)), ((24,), (4, 6)), ((6, 4), (8, 3)),
    ((2, 1, 12), (6, 1, 4, 1)), ((6, 4, 5), (8, 3, 5)), ((5, 6, 4), (5, 8, 3)), ((6,), (6, 1)), ((), (1, 1)),
    ((1, 1), ()), ((4, 6), (-1, 3)),
])
def test_reshapes(shape: tuple[int, ...], to: tuple[int, ...]) -> None:
    agrees(lambda x: x.reshape(to) * 2.0, shape)
    agrees(lambda x: (x * x).reshape(to), shape)
    program = agrees(lambda x: x.sum(axis=0, keepdims=True).reshape(-1) if x.ndim else x, shape)
    assert not nodes(program, "gather")


def test_reshape_of_one_tensor_splits_it_in_the_other() -> None:
    program = agrees(lambda x, y: (x.reshape(2, 3) + 1.0, x + y), (6,), (6,))
    assert sorted(program.axes.values()) == [2, 3]
    assert program.outputs[1].dims == ((program.outputs[0].dims[0][0], program.outputs[0].dims[1][0]),)


def test_incompatible_factorisations_meet() -> None:
    agrees(lambda x, y: x.reshape(24) + y.reshape(24), (6, 4), (8, 3))
    agrees(lambda x: x.reshape(3, 2, 4).reshape(3, 8) + x.reshape(2, 12).reshape(4, 6).reshape(3, 8), (6, 4))


def test_an_axis_on_both_sides_of_a_split() -> None:
    agrees(lambda x: x.reshape(2, 1, 12, 1) - x, (12, 2))
    agrees(lambda x, w: (x @ w).reshape(2, 1, 12, 1) - x @ w, (12, 3), (3, 2))


def concat(*xs: Any) -> Any:
    return np.concat(xs) if isinstance(xs[0], np.ndarray) else xp.concat(xs)


def test_views_of_an_axis_that_is_split_later() -> None:
    program = agrees(lambda x, w: ((x @ w)[:, ::-1], (x @ w).reshape(5, 2, 3)), (5, 4), (4, 6))
    assert nodes(program, "view") and not nodes(program, "gather")              # the view's own axis is split too
    program = agrees(lambda x, w: ((x @ w)[:, 1:], (x @ w).reshape(5, 2, 3)), (5, 4), (4, 6))
    assert nodes(program, "gather")                                             # five elements cannot be
    agrees(lambda x, w: (x @ w)[:, 1:6] + (x @ w).reshape(5, 5, 2)[:, :, 0], (5, 4), (4, 10))
    agrees(lambda x, w: (concat(x @ w, x[:1]), (x @ w).reshape(2, 3, 4)), (6, 4), (4, 4))


def test_joining_merged_dimensions() -> None:
    agrees(lambda x, y: concat(y, x.reshape(12), y), (4, 3), (5,))
    agrees(lambda x, y, w: concat(y, (x @ w).reshape(8), y), (4, 3), (5,), (3, 2))


# ----------------------------------------------------------------------------------------------------------------- indexing


@pytest.mark.parametrize("key", [
    0, -1, (1, 2), (slice(1, 4),), (slice(None, None, -1),), (slice(None, None, 2), slice(1, None, 2)), (slice(4, 0, -2),), ...,
    (..., 0), (0, ...), (slice(1, 2), ..., slice(0, 1)), None, (None, ..., None), (slice(None), None, 1), (slice(2, 2),),
    (slice(-3, None), slice(None, -2)), (slice(100),), (), (1, 2, 3), (slice(5, 1),), (..., None, slice(None, None, -3)),
], ids=str)
def test_basic_indexing(key: Any) -> None:
    program = agrees(lambda x: x[key] * 1.5, (5, 4, 6))
    assert not nodes(program, "view") and not nodes(program, "gather")
    agrees(lambda x: np.sort(x, axis=-1)[key] if isinstance(x, np.ndarray) else xp.top_k(x, 6)[0][..., ::-1][key], (5, 4, 6))
    agrees(lambda x, w: (x @ w)[key] + 1.0, (5, 4, 3), (3, 6))


def test_slices_of_inputs_cost_nothing() -> None:
    program = agrees(lambda x: x[1:, :2] * x[:-1, 2:4] + x[::-1][1:, -2:], (5, 4))
    assert {t.op for t in postorder([program.outputs[0].term])} == {"input", "mul", "add"}


def test_slices_that_do_not_overlap_move_into_what_is_sliced() -> None:
    program = agrees(lambda x, w: softmax((x @ w)[:, :3]) * (x @ w)[:, 3:], (5, 4), (4, 6))
    assert not nodes(program, "view")

    def packed(x: Any, w: Any) -> Any:
        qkv = (x @ w).reshape(5, 3, 2, 4)
        q, k, v = (qkv[:, i] for i in range(3))
        return q[:, 0] @ k[:, 0].mT @ v[:, 1]

    program = agrees(packed, (5, 6), (6, 24))
    assert all(dict(t.attr).keys() == {"a0"} for t in nodes(program, "view"))   # only the second name of the rows is left


def test_moving_a_slice_inwards_captures_no_name() -> None:
    agrees(lambda x, w: (x @ w)[:, 1:5] * x, (5, 4), (4, 6))                    # the slice's axis becomes the one summed over

    def crossed(x: Any, w: Any) -> Any:
        h = x @ w
        u = h[:, None, :5] + h[None, :, 5:]
        return u[0][:, 1:] + x[:, 0]                        # columns get the name that the rows of h had

    agrees(crossed, (4, 3), (3, 10))


def test_slices_that_overlap_share_what_is_sliced() -> None:
    program = agrees(lambda x, w: (x @ w)[:, :4] * (x @ w)[:, 2:], (5, 3), (3, 6))
    products = [t for t in nodes(program, "red")]
    assert len(products) == 1 and len(nodes(program, "view")) == 2


def test_renames_do_not_move_into_computed_tensors() -> None:
    program = agrees(lambda x, w: x @ (x @ w).mT, (5, 4), (4, 4))
    assert len(nodes(program, "input")) == 3                                    # x under its second name, x and w of the product
    assert not nodes(program, "view")


@pytest.mark.parametrize("fn", [
    lambda x, i: x[i], lambda x, i: x[:, i], lambda x, i: x[..., i, :], lambda x, i: x[i, i], lambda x, i: x[i, :, i],
    lambda x, i: x[i, 0], lambda x, i: x[0, :, i], lambda x, i: x[None, i, 1:], lambda x, i: x[:, i[:, None], i],
    lambda x, i: x[i[:, None], None, i[None, :]], lambda x, i: x[i - 4], lambda x, i: x[1, i, ..., None], lambda x, i: x[i][i],
    lambda x, i: x[i, 1:, ::-1], lambda x, i: x[:, 0, i], lambda x, i: x[i, :, 0],
])
def test_integer_tensors_as_indices(fn: Any) -> None:
    x, i = RNG.standard_normal((4, 4, 4)), RNG.integers(0, 4, 5)
    program = en.trace(fn, en.TensorSpec(x.shape, "float64"), en.TensorSpec(i.shape, "int64"))
    np.testing.assert_array_equal(en.evaluate(program, x, i), fn(x, i))


def test_negative_indices_count_from_the_end_unless_none_can_be() -> None:
    x, i = RNG.standard_normal(5), np.array([-1, 2, -5])
    program = en.trace(lambda x, i: x[i], en.TensorSpec((5,), "float64"), en.TensorSpec((3,), "int64"))
    np.testing.assert_array_equal(en.evaluate(program, x, i), x[i])
    assert nodes(program, "where")
    for spec in (en.TensorSpec((3,), "int64", range=(0, 4)), en.TensorSpec((3,), "uint8")):
        assert not nodes(en.trace(lambda x, i: x[i], en.TensorSpec((5,), "float64"), spec), "where")
    assert not any(t.args[1].op == "where" for t in nodes(traced(lambda x: x[xp.argmax(x)], (5,)), "gather"))


def test_known_positions_are_slices() -> None:
    program = agrees(lambda x: x[:, np.arange(0, 6, 2)] if isinstance(x, np.ndarray) else x[:, xp.arange(0, 6, 2)], (3, 6))
    assert not nodes(program, "gather")


# ------------------------------------------------------------------------------------------------------------ size 1 and 0


def test_axes_of_extent_one_do_not_occur() -> None:
    program = agrees(lambda x, y: (x * y).mean(axis=1, keepdims=True) - x, (3, 1, 4), (1, 1, 4))
    assert sorted(program.axes.values()) == [3, 4]


@pytest.mark.parametrize("fn, shapes", [
    (lambda x: x + 1.0, [(0, 3)]), (lambda x: x.sum(axis=0), [(0, 3)]), (lambda x: x.sum(), [(2, 0)]),
    (lambda x: x.max(axis=1), [(0, 3)]),
    (lambda x, y: x @ y, [(3, 0), (0, 4)]), (lambda x, y: x @ y, [(0, 3), (3, 4)]), (lambda x: x.reshape(0, 2, 2), [(0, 4)]),
    (lambda x: x[1:1], [(3, 2)]), (lambda x, y: x[:, None] * y, [(0,), (3,)]), (lambda x: x.mT @ x, [(0, 3)]),
    (lambda x: x[:0].sum(axis=0) + x.sum(axis=0), [(4, 3)]),
])
def test_empty_axes(fn: Any, shapes: list[tuple[int, ...]]) -> None:
    agrees(fn, *shapes)


def test_reductions_of_nothing() -> None:
    program = traced(lambda x: (xp.prod(x, axis=0), xp.any(x, axis=0), xp.all(x, axis=0)), (0, 2))
    one, no, yes = en.evaluate(program, np.zeros((0, 2)))
    assert one.tolist() == [1, 1] and no.tolist() == [False, False] and yes.tolist() == [True, True]
    for f in (xp.max, xp.min, xp.argmax, xp.argmin, xp.softmax, xp.logsumexp):
        with pytest.raises(ShapeError, match="over an empty axis"):
            traced(lambda x, f=f: f(x, axis=0), (0, 2))


# ------------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("a, b, want", [
    ("float32", "float64", "float64"), ("bfloat16", "float32", "float32"), ("bfloat16", "float16", "float32"),
    ("float8_e4m3fn", "float8_e5m2", "float16"), ("float8_e4m3fn", "bfloat16", "bfloat16"), ("int8", "uint8", "int16"),
    ("int32", "int64", "int64"), ("int32", "float16", "float16"), ("bool", "int8", "int8"), ("bool", "bfloat16", "bfloat16"),
    ("uint32", "int8", "int64"),
])
def test_promotion(a: str, b: str, want: str) -> None:
    for x, y in ((a, b), (b, a)):
        program = en.trace(lambda x, y: xp.where(x == y, x, y), en.TensorSpec((3,), x), en.TensorSpec((3,), y))
        assert program.outputs[0].dtype == want


def test_no_integer_holds_both() -> None:
    with pytest.raises(DtypeError, match="no integer dtype holds both uint64 and int8"):
        en.trace(lambda x, y: x + y, en.TensorSpec((3,), "uint64"), en.TensorSpec((3,), "int8"))


@pytest.mark.parametrize("dtype, fn, want", [
    ("bfloat16", lambda x: x * 2.5, "bfloat16"), ("int32", lambda x: x * 2, "int32"), ("int32", lambda x: x * 2.0, "float32"),
    ("float16", lambda x: x + np.float64(1), "float16"), ("float16", lambda x: np.float64(1) + x, "float16"),
    ("int32", lambda x: x / 2, "float32"), ("float64", lambda x: x / 3, "float64"), ("int16", lambda x: xp.sum(x), "int64"),
    ("uint8", lambda x: xp.sum(x), "uint64"), ("bool", lambda x: xp.sum(x), "int64"), ("int8", lambda x: xp.mean(x), "float32"),
    ("float16", lambda x: x > 0, "bool"), ("float16", lambda x: xp.argmax(x), "int64"), ("bool", lambda x: x + 1, "int64"),
    ("float16", lambda x: xp.where(x > 0, 1.0, 0.0), "float32"), ("bool", lambda x: ~x, "bool"), ("int8", lambda x: ~x, "int8"),
    ("bfloat16", lambda x: np.array(2.0) * x, "bfloat16"), ("bfloat16", lambda x: xp.exp(x), "bfloat16"),
    ("float32", lambda x: xp.astype(x, "int8"), "int8"), ("float32", lambda x: x.astype(xp.bfloat16), "bfloat16"),
])
def test_result_dtypes(dtype: str, fn: Any, want: str) -> None:
    assert en.trace(fn, en.TensorSpec((3,), dtype)).outputs[0].dtype == want


# ----------------------------------------------------------------------------------------------------- names, determinism


def test_names_of_inputs_and_axes() -> None:
    def fn(x: Any, *weights: Any, bias: Any, scale: float = 2.0) -> Any:
        for w in weights:
            x = x @ w
        return (x + bias) * scale

    program = en.trace(fn, *specs((2, 3), (3, 4), (4, 5)), bias=en.TensorSpec((5,), "float64"))
    assert program.name == "fn"
    assert [i.name for i in program.inputs] == ["x", "weights0", "weights1", "bias"]
    assert list(program.axes) == ["a0", "a1", "a2", "a3"]
    assert list(program.axes.values()) == [2, 3, 4, 5]
    assert traced(lambda a0, x: a0 + x, (2, 3), (2, 3)).axes == {"a1": 2, "a2": 3}
    assert traced(functools.partial(fn, bias=1.0), (2, 3)).name == "fn"
    assert traced(lambda x: x, (2,)).name == "program"


def test_tracing_is_deterministic_across_processes() -> None:
    code = ("import eqsat_neptune as en; from eqsat_neptune.programs import CASES\n"
            "for c in CASES.values(): print(en.trace(c.function('small'), *c.specs('small')))")
    texts = [subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": str(s)}, capture_output=True,
                            text=True, encoding="utf-8", check=True).stdout for s in (1, 2)]
    assert texts[0] == texts[1] and len(texts[0]) > 1000


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_library_programs_have_no_gathers_but_their_own(case: Any) -> None:
    program = en.trace(case.function("small"), *case.specs("small"))
    assert (len(nodes(program, "gather")) > 0) == (case.name == "cross_entropy")


def test_tracing_is_linear_in_layers() -> None:
    counts = []
    for layers in (2, 4, 8):
        from eqsat_neptune.programs import transformer_layers

        weights = [en.TensorSpec(s) for s in [(8, 8)] * 4 + [(8, 12), (12, 8)]] * layers
        program = en.trace(transformer_layers(layers, 2), en.TensorSpec((9, 8)), *weights)
        counts.append(sum(1 for _ in postorder([o.term for o in program.outputs])))
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


# ------------------------------------------------------------------------------------------------------------------- errors


def matmul_rows(x):
    return x @ x                                            # line of the error


def branch(x):
    if x[0, 0] > 0:                                         # line of the error
        return x
    return -x


def numpy_function(x):
    return np.exp(x)                                        # line of the error


def numpy_reduction(x):
    return np.mean(x, axis=0)                               # line of the error


def numpy_array(x):
    return np.asarray(x) + 1                                # line of the error


def python_number(x):
    return x * math.sqrt(x[0, 0])                           # line of the error


def assignment(x):
    x[0] = 1.0                                              # line of the error
    return x


def constant_array(x):
    return x + np.ones((2, 3))                              # line of the error


def reversed_constant(x):
    return np.ones((2, 3)) * x                              # line of the error


def loop(x):
    return xp.stack([row for row in xp.zeros((1000, 2))])   # line of the error


def boolean_index(x):
    return x[x > 0]                                         # line of the error


def absent_function(x):
    return xp.concatenate([x, x])                           # line of the error


def sorting(x):
    return xp.sort(x)                                       # line of the error


def bad_axis(x):
    return xp.sum(x, axis=2)                                # line of the error


def bad_reshape(x):
    return xp.reshape(x, (4, 2))                            # line of the error


def bad_broadcast(x):
    return x + xp.zeros((2, 4))                             # line of the error


def bits(x):
    return x & (x > 0)                                      # line of the error


def within_a_helper(x):
    def helper(y):
        return y.mT + y                                     # line of the error

    return helper(x)


def absent_method(x):
    return x.flatten()                                      # line of the error


def list_index(x):
    return x[[0, 1]]                                        # line of the error


def unknown_dtype(x):
    return xp.astype(x, "float128")                         # line of the error


def of_a_list(x):
    return x * [1, 2, 3]                                    # line of the error


def length_from_a_tensor(x):
    return xp.arange(x[0, 0])                               # line of the error


def kept_dimensions(x):
    return xp.max(x, axis=0, keepdims="yes")                # line of the error


def kept_by_argmax(x):
    return xp.argmax(x, axis=0, keepdims=2)                 # line of the error


@pytest.mark.parametrize("fn, error, words", [
    (matmul_rows, ShapeError, ["(2, 3)", "3 columns against 2 rows", ".mT"]),
    (branch, TraceError, ["truth", "xp.where"]),
    (numpy_function, TraceError, ["np.exp", "xp.exp"]),
    (numpy_reduction, TraceError, ["np.mean", "xp.mean"]),
    (numpy_array, TraceError, ["NumPy array", "xp"]),
    (python_number, TraceError, ["Python number", "xp.f(x)"]),
    (assignment, TraceError, ["assigned", "xp.where"]),
    (constant_array, TraceError, ["constant", "input", "(2, 3)"]),
    (reversed_constant, TraceError, ["constant", "input"]),
    (loop, TraceError, ["1000", "slices"]),
    (boolean_index, TraceError, ["depends on values", "xp.where"]),
    (absent_function, TraceError, ["xp.concatenate", "use xp.concat"]),
    (sorting, TraceError, ["xp.sort", "top_k"]),
    (bad_axis, ShapeError, ["axis 2", "2 dimensions", "-2 … 1"]),
    (bad_reshape, ShapeError, ["(2, 3)", "6 elements", "(4, 2)"]),
    (bad_broadcast, ShapeError, ["(2, 3)", "(2, 4)", "3 against 4"]),
    (bits, DtypeError, ["bitwise_and", "float64", "tighter"]),
    (within_a_helper, ShapeError, ["(3, 2)", "(2, 3)"]),
    (absent_method, TraceError, ["flatten", "xp.reshape"]),
    (list_index, TraceError, ["list", "xp.concat"]),
    (unknown_dtype, DtypeError, ["float128", "bfloat16"]),
    (of_a_list, TraceError, ["list"]),
    (length_from_a_tensor, TraceError, ["arange", "values"]),
    (kept_dimensions, TraceError, ["keepdims", "'yes'", "True or False"]),
    (kept_by_argmax, TraceError, ["keepdims", "2"]),
], ids=lambda v: getattr(v, "__name__", None))
def test_errors_name_cause_remedy_and_line(fn: Any, error: type[EqsatError], words: list[str]) -> None:
    with pytest.raises(error) as info:
        traced(fn, (2, 3))
    code = fn.__code__
    lines = open(code.co_filename, encoding="utf-8").read().splitlines()
    line = next(n for n in range(code.co_firstlineno, len(lines)) if "# line of the error" in lines[n - 1])
    assert info.value.where == f"{__file__}:{line}"
    assert str(info.value).startswith(f"{__file__}:{line}: ")
    assert info.value.hint
    for w in words:
        assert w in str(info.value)


@pytest.mark.parametrize("call, words", [
    (lambda: en.trace(matmul_rows), ["missing a required argument: 'x'", "matmul_rows(x)"]),
    (lambda: en.trace(matmul_rows, *specs((2, 2), (2, 2))), ["too many positional arguments"]),
    (lambda: en.trace(matmul_rows, np.zeros((2, 2))), ["'x'", "TensorSpec(x.shape, x.dtype)"]),
    (lambda: en.trace(matmul_rows, 3), ["'x'", "functools.partial"]),
    (lambda: en.trace(lambda x: None, *specs((2,))), ["returned nothing", "return"]),
    (lambda: en.trace(lambda x: 3.0, *specs((2,))), ["returned a float", "xp.asarray"]),
    (lambda: en.trace(lambda x: {"y": x}, *specs((2,))), ["returned a dict"]),
    (lambda: en.trace(lambda x: (x, 1), *specs((2,))), ["returned a int as result 1"]),
    (lambda: en.trace(lambda x: (), *specs((2,))), ["returned no tensor"]),
    (lambda: en.trace(3, *specs((2,))), ["needs a function"]),
    (lambda: xp.arange(3), ["inside a function"]),
    (lambda: xp.exp(2.0), ["inside a function"]),
])
def test_errors_around_the_function(call: Any, words: list[str]) -> None:
    with pytest.raises(TraceError) as info:
        call()
    for w in words:
        assert w in str(info.value)


def test_a_tensor_of_another_trace() -> None:
    kept: list[Any] = []
    traced(lambda x: kept.append(x) or x, (2,))
    with pytest.raises(TraceError, match="another"):
        traced(lambda x: x + kept[0], (2,))
    with pytest.raises(TraceError, match="after tracing ended"):
        kept[0] + 1
    with pytest.raises(TraceError, match="another trace"):
        traced(lambda x: kept[0], (2,))


def test_exceptions_of_the_function_pass_unchanged() -> None:
    mine = ValueError("mine")

    def fn(x: Any) -> Any:
        raise mine

    with pytest.raises(ValueError) as info:
        traced(fn, (2,))
    assert info.value is mine


def test_attributes_can_be_probed() -> None:
    program = traced(lambda x: x if hasattr(x, "numpy") or hasattr(xp, "sort") or getattr(x, "cuda", None) else x + 1, (2,))
    assert nodes(program, "add")


def test_a_tensor_as_the_standard_has_it() -> None:
    def fn(x: Any) -> Any:
        assert (x.shape, x.ndim, x.size, x.dtype, len(x)) == ((2, 3), 2, 6, xp.float64, 2)
        assert x.__array_namespace__(api_version="2024.12") is xp
        assert x.T.shape == x.mT.shape == (3, 2)
        assert x.to_device(x.device) is x
        a, b = x
        y = x
        y += a
        y -= b * 2
        return -(+y) ** 2 // abs(x + 0.5) % 3.0, (x > 0) & ~(x > 1) | (x < -1) ^ (x == 0), 2 ** x, 1.0 / (3 - x), divmod_like(x)

    def divmod_like(x: Any) -> Any:
        return 7.0 // x + 7.0 % x

    program = traced(fn, (2, 3))
    x = RNG.standard_normal((2, 3))
    y = x + x[0] - x[1] * 2
    wants = (-(y ** 2) // abs(x + 0.5) % 3.0, (x > 0) & ~(x > 1) | (x < -1) ^ (x == 0), 2 ** x, 1 / (3 - x), 7 // x + 7 % x)
    for result, want in zip(en.evaluate(program, x), wants):
        np.testing.assert_allclose(result, want, rtol=1e-12)


# ---------------------------------------------------------------------------------------------------------- dynamic extents


def dynamic_attention(q: Any, k: Any, v: Any) -> Any:
    return softmax(q @ k.mT) @ v


def test_dynamic_extents() -> None:
    program = en.trace(dynamic_attention, *[en.TensorSpec((2, n, 4), "float64") for n in "mnn"])
    assert program.extent_names == ("m", "n")
    assert program.bind({"m": 3, "n": 5}) is program.bind(m=3, n=5)
    assert [i.shape for i in program.bind(m=3, n=5).inputs] == [(2, 3, 4), (2, 5, 4), (2, 5, 4)]
    for m, n in ((3, 5), (1, 7), (5, 5)):
        arrays = [RNG.standard_normal((2, e, 4)) for e in (m, n, n)]
        np.testing.assert_allclose(en.evaluate(program, *arrays), dynamic_attention(*arrays), rtol=1e-12)


def test_dynamic_extents_that_do_not_fit() -> None:
    program = en.trace(dynamic_attention, *[en.TensorSpec((2, n, 4), "float64") for n in "mnn"])
    with pytest.raises(ShapeError, match="no number was given for extent 'n'"):
        program.bind(m=3)
    with pytest.raises(ShapeError, match="no extent 'k'"):
        program.bind(m=3, n=3, k=3)
    with pytest.raises(ShapeError, match="must be an int"):
        program.bind(m=3, n=-1)
    with pytest.raises(InputError, match=r"'v' has shape \(2, 6, 4\), its spec says \(2, n, 4\), and n is 5 in input 'k'"):
        program.bind_shapes([(2, 3, 4), (2, 5, 4), (2, 6, 4)])
    with pytest.raises(InputError, match="'q' has shape"):
        program.bind_shapes([(3, 3, 4), (2, 5, 4), (2, 5, 4)])
    with pytest.raises(InputError, match="takes 3 arrays"):
        program.bind_shapes([(2, 3, 4)])


def test_dynamic_programs_report_errors_early_but_no_false_ones() -> None:
    with pytest.raises(ShapeError, match="columns against"):
        en.trace(lambda q, k: q @ k, en.TensorSpec(("m", "d")), en.TensorSpec(("n", "d")))
    halves = en.trace(lambda x: x.reshape(x.shape[0] // 2, 2, x.shape[1] // 12, 12), en.TensorSpec(("m", "n")))
    assert halves.bind(m=6, n=24).outputs[0].shape == (3, 2, 2, 12)

    def at_most_100(x: Any) -> Any:
        if x.shape[0] > 100:
            raise ValueError("too long")
        return x + 1

    assert en.trace(at_most_100, en.TensorSpec(("n",))).bind(n=7).axes == {"a0": 7}


# ----------------------------------------------------------------------------------------------------- which tensor is renamed


@pytest.mark.parametrize("swapped", [False, True])
def test_what_was_computed_first_is_read_under_the_other_name(swapped: bool) -> None:
    def fn(x, a, b, c):  # type: ignore[no-untyped-def]
        for w in (a, b, c):
            y = abs(x @ w)
            x = y + x if swapped else x + y
        return x

    found = nodes(agrees(fn, (4, 8), (8, 8), (8, 8), (8, 8)), "view")
    assert len(found) == 2 and all(v.args[0].op == "add" for v in found)  # the states before, not a product of them


def test_slices_of_a_recurrence_move_into_its_products() -> None:
    def fn(h, c, u):  # type: ignore[no-untyped-def]
        for _ in range(3):
            g = h @ u
            c = abs(g[:, :6]) * c + g[:, 6:12]
            h = g[:, 12:] * c
        return h

    program = agrees(fn, (4, 6), (4, 6), (6, 18))
    assert not any(e.const for v in nodes(program, "view") for _, e in v.attr)  # type: ignore[attr-defined]
