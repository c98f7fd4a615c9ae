"""The interpreter against definitions written out by hand, above all where axes are split raggedly and folds are merged."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import eqsat_neptune as en
from eqsat_neptune.errors import InputError
from eqsat_neptune.reference import BI, UN, Env, apply, erf, evaluate_term
from eqsat_neptune.terms import (
    BINARY,
    PREDICATES,
    REDUCTIONS,
    UNARY,
    Affine,
    Monoid,
    Term,
    add,
    axis_index,
    bi,
    fold,
    gather,
    inp,
    iota,
    mul,
    num,
    red,
    sub,
    un,
    var,
    view,
    where,
)

RNG = np.random.default_rng(5)
A, B = axis_index("a"), axis_index("b")
K = axis_index("k")


def value(term: Term, axes: str, env: Env) -> np.ndarray:
    """The array over the given axes (one letter each), broadcast where the term does not depend on one."""
    own, x = evaluate_term(term, env)
    assert set(own) <= set(axes)
    return np.broadcast_to(env.expand((own, x), list(axes)), [env.size(a) for a in axes])


# ---------------------------------------------------------------------------------------------------------------- scalars


def test_tables_have_every_function() -> None:
    assert set(UN) == set(UNARY)
    assert set(BI) == set(BINARY)


def test_predicates_give_floats() -> None:
    x = np.array([-1.0, 0.0, np.inf, np.nan])
    for f in PREDICATES:
        out = UN[f](x) if f in UN else BI[f](x, np.zeros(4))
        assert out.dtype == np.float64
        assert set(out.tolist()) <= {0.0, 1.0}


def test_erf_to_the_last_bit() -> None:
    x = np.concatenate([np.linspace(-7, 7, 1001), [np.inf, -np.inf, np.nan]])
    np.testing.assert_array_equal(erf(x), [math.erf(v) for v in x])


@pytest.mark.parametrize("f, x, want", [
    ("round", 2.5, 2.0), ("round", -1.5, -2.0), ("trunc", -1.7, -1.0), ("floor", -1.2, -2.0), ("sign", -0.0, 0.0),
    ("rsqrt", 4.0, 0.5), ("not", 0.0, 1.0), ("not", -3.0, 0.0), ("recip", 0.0, np.inf), ("exp2", 3.0, 8.0),
])
def test_unary_meaning(f: str, x: float, want: float) -> None:
    with np.errstate(all="ignore"):
        assert UN[f](np.float64(x)) == want


@pytest.mark.parametrize("f, x, y, want", [
    ("floordiv", -7, 2, -4), ("mod", -7, 2, 1), ("mod", 7, -2, -1), ("pow", 2, 0.5, 2**0.5), ("max", 1, np.nan, np.nan),
    ("and", 2, 0, 0), ("or", 0, -1, 1), ("xor", 3, 4, 0), ("le", 1, 1, 1), ("lt", 1, 1, 0), ("ne", np.nan, np.nan, 1),
])
def test_binary_meaning(f: str, x: float, y: float, want: float) -> None:
    np.testing.assert_equal(float(BI[f](np.float64(x), np.float64(y))), float(want))


# ------------------------------------------------------------------------------------------------------------------ leaves


def test_values_align_by_name() -> None:
    x, y = RNG.standard_normal((3, 4)), RNG.standard_normal((4,))
    env = Env({"a": 3, "b": 4}, {"x": x, "y": y})
    t = add(mul(inp("x", (A, B)), inp("y", (B,))), iota("a"), 2.0)
    np.testing.assert_array_equal(value(t, "ab", env), x * y + np.arange(3)[:, None] + 2)
    np.testing.assert_array_equal(value(t, "ba", env), (x * y + np.arange(3)[:, None] + 2).T)


@pytest.mark.parametrize("index", [Affine(1, (("a", 2),)), Affine(6, (("a", -3),)), Affine(2, (("a", 1), ("b", 2))), Affine(3)])
def test_affine_reads_in_range(index: Affine) -> None:
    x = RNG.standard_normal(9)
    env = Env({"a": 3, "b": 2}, {"x": x})
    terms = dict(index.terms)
    want = [[x[index.const + terms.get("a", 0) * a + terms.get("b", 0) * b] for b in range(2)] for a in range(3)]
    np.testing.assert_array_equal(value(inp("x", (index,)), "ab", env), want)


def test_reads_that_leave_the_array_give_zero() -> None:
    x = RNG.standard_normal((4, 2))
    env = Env({"a": 6, "b": 2}, {"x": x})
    got = value(inp("x", (Affine(-1, (("a", 1),)), B)), "ab", env)
    np.testing.assert_array_equal(got, np.concatenate([np.zeros((1, 2)), x, np.zeros((1, 2))]))
    env = Env({"a": 6, "b": 2, "k": 4}, {"x": x})
    got = value(view(mul(2.0, inp("x", (K, B))), (("k", Affine(3, (("a", -1),))),)), "ab", env)
    np.testing.assert_array_equal(got, np.concatenate([2 * x[::-1], np.zeros((2, 2))]))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_read_may_leave_by_one(shift: int) -> None:
    x = RNG.standard_normal(6)[1:5]                                             # with neighbours in memory that must not show
    got = value(inp("x", (Affine(shift, (("a", 1),)),)), "a", Env({"a": 4}, {"x": x}))
    np.testing.assert_array_equal(got, [0, *x[:-1]] if shift < 0 else [*x[1:], 0])


def test_view_is_simultaneous_and_may_take_a_diagonal() -> None:
    x = RNG.standard_normal((3, 3))
    env = Env({"a": 3, "b": 3}, {"x": x})
    t = mul(1.0, inp("x", (A, B)))
    np.testing.assert_array_equal(value(view(t, (("a", B), ("b", A))), "ab", env), x.T)
    np.testing.assert_array_equal(value(view(t, (("b", A),)), "a", env), np.diag(x))


@pytest.mark.parametrize("make", [
    lambda x: x[::-1, ::-1], lambda x: x[:, ::2], lambda x: np.asfortranarray(x), lambda x: np.broadcast_to(x[:1], x.shape),
])
def test_any_strides(make) -> None:
    x = make(RNG.standard_normal((4, 6)))
    program = en.trace(lambda x: x.mT @ x, en.TensorSpec(x.shape, "float64"))
    np.testing.assert_allclose(en.evaluate(program, x), x.T @ x, rtol=1e-12)


# -------------------------------------------------------------------------------------------------------------- reductions


@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op: str) -> None:
    x = RNG.standard_normal((3, 4))
    env = Env({"a": 3, "k": 4}, {"x": x})
    f = {"+": np.sum, "*": np.prod, "max": np.max, "min": np.min}[op]
    np.testing.assert_allclose(value(red(op, "k", inp("x", (A, K))), "a", env), f(x, axis=1), rtol=1e-14)
    # over an axis that the term lacks: the same value so many times
    want = {"+": 4 * x[:, 0], "*": x[:, 0] ** 4}.get(op, x[:, 0])
    np.testing.assert_allclose(value(red(op, "k", inp("x", (A, Affine(0)))), "a", env), want, rtol=1e-14)


@pytest.mark.parametrize("n, block", [(8, 4), (7, 3), (5, 8), (9, 2), (1, 4)])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_split_reduction_is_the_reduction(op: str, n: int, block: int) -> None:
    x, y = RNG.standard_normal((3, n)), RNG.standard_normal((n,))
    env = Env({"a": 3, "k": n}, {"x": x, "y": y}, {"k": block})
    for t in (inp("x", (A, K)), mul(inp("x", (A, K)), inp("y", (K,))), num(3.0), inp("x", (A, Affine(0))), iota("k")):
        whole = value(red(op, "k", t), "a", env)
        np.testing.assert_allclose(value(red(op, "k.o", red(op, "k.i", t)), "a", env), whole, rtol=1e-12)
        if "k" in t.free:                                                       # else the two sums do not interchange
            np.testing.assert_allclose(value(red(op, "k.i", red(op, "k.o", t)), "a", env), whole, rtol=1e-12)


@pytest.mark.parametrize("n, block, smaller, split", [
    (12, 6, 2, "k.i"), (11, 4, 2, "k.i"), (13, 5, 2, "k.i"), (13, 5, 3, "k.i"), (13, 6, 4, "k.i"),
    (11, 3, 2, "k.o"), (7, 2, 3, "k.o"),
])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_nested_splits(op: str, n: int, block: int, smaller: int, split: str) -> None:
    x = RNG.standard_normal((2, n))
    env = Env({"a": 2, "k": n}, {"x": x}, {"k": block, split: smaller})
    for t in (inp("x", (A, K)), num(1.5), iota("k")):
        whole = value(red(op, "k", t), "a", env)
        if split == "k.i":
            parts = red(op, "k.o", red(op, "k.i.o", red(op, "k.i.i", t)))
        else:
            parts = red(op, "k.o.o", red(op, "k.o.i", red(op, "k.i", t)))
        np.testing.assert_allclose(value(parts, "a", env), whole, rtol=1e-12)


def test_a_part_is_read_at_the_position_of_the_whole() -> None:
    x = RNG.standard_normal(7)
    env = Env({"k": 7}, {"x": x}, {"k": 3})
    block_max = red("max", "k.i", inp("x", (K,)))
    assert block_max.free == {"k.o"}
    axes, got = evaluate_term(block_max, env)
    assert axes == ("k.o",)
    np.testing.assert_array_equal(got, [x[:3].max(), x[3:6].max(), x[6]])
    axes, got = evaluate_term(sub(inp("x", (K,)), block_max), env)
    assert axes == ("k",)
    np.testing.assert_array_equal(got, x - np.repeat([x[:3].max(), x[3:6].max(), x[6]], 3)[:7])


def test_short_blocks_count_only_what_exists() -> None:
    env = Env({"k": 7}, block={"k": 3})
    count = red("+", "k.i", num(1.0))
    axes, got = evaluate_term(count, env)
    assert axes == ("k.o",) and count.free == {"k.o"}
    np.testing.assert_array_equal(got, [3, 3, 1])
    assert red("+", "k.o", count).free == frozenset() and red("+", "k.i", inp("x", (A,))).free == {"a", "k.o"}
    assert red("+", "k.i.i", num(1.0)).free == {"k.o", "k.i.o"} and red("+", "k.o.o", num(1.0)).free == frozenset()
    assert red("+", "k.i", inp("x", (K,))).free == {"k.o"} and red("+", "k.i", red("+", "k.o", inp("x", (K,)))).free == frozenset()


def test_contraction_in_any_layout() -> None:
    x, y = RNG.standard_normal((2, 3, 4, 5)), RNG.standard_normal((2, 5, 3, 6))
    s = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6}
    ix = {k: axis_index(k) for k in s}
    env = Env(s, {"x": x, "y": y})
    for axes in ("d", "bd", "ad", "de", "cde", "abcde"):
        t = mul(inp("x", [ix[k] for k in "abcd"]), inp("y", [ix[k] for k in "adbe"]), 0.5)
        for a in axes:
            t = red("+", a, t)
        left = "".join(k for k in s if k not in axes)
        np.testing.assert_allclose(value(t, left, env), np.einsum(f"abcd,adbe->{left}", x, y) * 0.5, rtol=1e-12)


def test_products_of_sums_are_never_in_memory() -> None:
    n = 256
    x = RNG.standard_normal((n, n))
    program = en.trace(lambda x, y: x @ y, *[en.TensorSpec((n, n), "float64")] * 2)
    tracemalloc.start()
    en.evaluate(program, x, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * x.nbytes


def test_values_are_freed_after_their_last_use() -> None:
    x = RNG.standard_normal(1 << 17)

    def chain(x):
        for _ in range(40):
            x = en.xp.tanh(x) * 1.5
        return x

    program = en.trace(chain, en.TensorSpec(x.shape, "float64"))
    tracemalloc.start()
    en.evaluate(program, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * x.nbytes


def test_deep_programs_do_not_recurse() -> None:
    def chain(x):
        for _ in range(5000):
            x = 1.0 - x
        return x

    program = en.trace(chain, en.TensorSpec((2,), "float64"))
    np.testing.assert_allclose(en.evaluate(program, np.array([0.25, 3.0])), [0.25, 3.0])


# ------------------------------------------------------------------------------------------------------------------ gather


def test_gather_joins_the_axes_of_its_index() -> None:
    x, i = RNG.standard_normal((3, 5)), RNG.integers(0, 5, (3, 2))
    env = Env({"a": 3, "k": 5, "b": 2}, {"x": x, "i": i})
    t = gather(inp("x", (A, K)), "k", inp("i", (A, B)))
    np.testing.assert_array_equal(value(t, "ab", env), np.take_along_axis(x, i, axis=1))
    # an index over the very axis that is read
    j = RNG.integers(0, 5, 5)
    env = Env({"a": 3, "k": 5}, {"x": x, "j": j})
    np.testing.assert_array_equal(value(gather(inp("x", (A, K)), "k", inp("j", (K,))), "ak", env), x[:, j])


@pytest.mark.parametrize("bad", [-1, 5, np.nan])
def test_gather_out_of_range(bad: float) -> None:
    env = Env({"k": 5, "b": 2}, {"x": np.zeros(5), "i": np.array([0, bad])})
    with pytest.raises(InputError, match="out of range"):
        evaluate_term(gather(inp("x", (K,)), "k", inp("i", (B,))), env)


# ------------------------------------------------------------------------------------------------------------------- folds

R0, R1 = var("R0"), var("R1")
SOFTMAX = Monoid(("max",), (((0, un("exp", sub(var("r0"), R0))),), ((1, un("exp", sub(var("r0"), R0))),)))
# mean, its count, and the sum of squared distances, moved by Chan's formula: q + (r − R)²·n
WELFORD = Monoid(
    (("mean", 0),),
    (((0, num(1.0)),), ((1, num(1.0)), (0, mul(sub(var("r0"), R0), sub(var("r0"), R0))))),
)


def softmax_sums(s: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    m = s.max(-1)
    with np.errstate(all="ignore"):
        p = np.where(np.isneginf(s), 0.0, np.exp(s - m[..., None]))
    return [m, p.sum(-1), (p * v).sum(-1)]


@pytest.mark.parametrize("n, block", [(8, 4), (7, 3), (13, 5), (1, 1), (3, 8)])
def test_fold_and_its_splits(n: int, block: int) -> None:
    s, v = 5 * RNG.standard_normal((3, n)), RNG.standard_normal((n,))
    env = Env({"a": 3, "k": n}, {"s": s, "v": v}, {"k": block})
    single = [inp("s", (A, K)), num(1.0), inp("v", (K,))]
    for i, want in enumerate(softmax_sums(s, v)):
        np.testing.assert_allclose(value(fold(SOFTMAX, i, "k", single), "a", env), want, rtol=1e-12)
        inner = [fold(SOFTMAX, j, "k.i", single) for j in range(3)]
        np.testing.assert_allclose(value(fold(SOFTMAX, i, "k.o", inner), "a", env), want, rtol=1e-12)


def test_empty_parts_contribute_nothing() -> None:
    s, v = RNG.standard_normal((3, 6)), RNG.standard_normal(6)
    s[0], s[1, :3], s[2, ::2] = -np.inf, -np.inf, -np.inf                        # a masked row, a masked first block, holes
    v[0] = np.nan                                                               # behind a mask in each row
    env = Env({"a": 3, "k": 6}, {"s": s, "v": v}, {"k": 3})
    single = [inp("s", (A, K)), num(1.0), inp("v", (K,))]
    wants = softmax_sums(s, np.nan_to_num(v))
    for i, want in enumerate(wants):
        np.testing.assert_allclose(value(fold(SOFTMAX, i, "k", single), "a", env), want, rtol=1e-12)
        inner = [fold(SOFTMAX, j, "k.i", single) for j in range(3)]
        np.testing.assert_allclose(value(fold(SOFTMAX, i, "k.o", inner), "a", env), want, rtol=1e-12)


def test_a_single_masked_element_contributes_nothing() -> None:
    env = Env({"a": 2, "k": 1}, {"s": np.array([[-np.inf], [3.0]]), "v": np.array([5.0])})
    single = [inp("s", (A, K)), num(1.0), inp("v", (K,))]
    for i, want in enumerate(([-np.inf, 3.0], [0.0, 1.0], [0.0, 5.0])):
        np.testing.assert_array_equal(value(fold(SOFTMAX, i, "k", single), "a", env), want)


@pytest.mark.parametrize("n, block", [(8, 4), (7, 3), (1, 2)])
def test_fold_with_a_mean_pivot(n: int, block: int) -> None:
    x = 1000 + 1e-3 * RNG.standard_normal((3, n))
    env = Env({"a": 3, "k": n}, {"x": x}, {"k": block})
    single = [inp("x", (A, K)), num(1.0), num(0.0)]
    wants = [x.mean(1), np.full(3, n), x.var(1) * n]
    for i, want in enumerate(wants):
        np.testing.assert_allclose(value(fold(WELFORD, i, "k", single), "a", env), want, rtol=1e-6)
        inner = [fold(WELFORD, j, "k.i", single) for j in range(3)]
        np.testing.assert_allclose(value(fold(WELFORD, i, "k.o", inner), "a", env), want, rtol=1e-6)


def test_fold_with_a_pivot_that_is_a_function_of_components() -> None:
    """Σ w·(x − D)² with D = Σ w·x / Σ w, by the linear components w, w·x, w·(x−D), w·(x−D)² moved from D to D'."""
    d = mul(var("y1"), un("recip", var("y0")))
    step = sub(var("r0"), R0)
    h = Monoid((("fn", d),), (
        ((0, num(1.0)),), ((1, num(1.0)),), ((2, num(1.0)), (0, step)),
        ((3, num(1.0)), (2, mul(2.0, step)), (0, mul(step, step))),
    ))
    x, w = RNG.standard_normal((2, 9)), RNG.uniform(0.5, 2.0, 9)
    env = Env({"a": 2, "k": 9}, {"x": x, "w": w}, {"k": 4})
    wx = mul(inp("w", (K,)), inp("x", (A, K)))
    single = [inp("x", (A, K)), inp("w", (K,)), wx, num(0.0), num(0.0)]
    mean = (w * x).sum(1) / w.sum()
    wants = {0: mean, 4: (w * (x - mean[:, None]) ** 2).sum(1)}
    for i, want in wants.items():
        np.testing.assert_allclose(value(fold(h, i, "k", single), "a", env), want, rtol=1e-12)
        inner = [fold(h, j, "k.i", single) for j in range(5)]
        np.testing.assert_allclose(value(fold(h, i, "k.o", inner), "a", env), want, rtol=1e-12)
    env = Env({"a": 2, "k": 9}, {"x": x, "w": w}, {"k": 8, "k.i": 2})           # the last block has a part of nothing but holes
    level: list[Term] = single
    for axis in ("k.i.i", "k.i.o", "k.o"):
        level = [fold(h, j, axis, level) for j in range(5)]
    for i, want in wants.items():
        np.testing.assert_allclose(value(level[i], "a", env), want, rtol=1e-12)


def test_apply_gives_one_operator() -> None:
    env = Env({"a": 2, "b": 3})
    x, y = (("a",), np.array([1.0, 2.0])), (("b",), np.array([3.0, 4.0, 5.0]))
    axes, got = apply("mul", None, [x, y], env)
    assert axes == ("a", "b")
    np.testing.assert_array_equal(got, np.outer(x[1], y[1]))
    np.testing.assert_array_equal(apply("where", None, [x, y, ((), np.float64(0))], env)[1], np.tile(y[1], (2, 1)))


def test_where_does_not_look_at_what_it_does_not_choose() -> None:
    env = Env({"a": 2}, {"x": np.array([np.nan, 2.0])})
    t = where(bi("lt", iota("a"), 1.0), 0.0, inp("x", (A,)))
    np.testing.assert_array_equal(value(t, "a", env), [0.0, 2.0])


# ---------------------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("dtype", [
    "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32", "int8", "uint16", "int64", "bool",
])
def test_evaluate_takes_every_dtype(dtype: str) -> None:
    x = RNG.integers(0, 2, (3, 4)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    out = en.evaluate(en.trace(lambda x: en.xp.sum(x, axis=1), en.TensorSpec((3, 4), dtype)), x)
    np.testing.assert_array_equal(out, x.astype(np.float64).sum(axis=1))
    assert out.dtype.kind == ("f" if dtype.startswith(("float", "bf")) else "u" if dtype.startswith("u") else "i")


def test_integers_are_exact_to_2_53() -> None:
    program = en.trace(lambda x: x + 1, en.TensorSpec((1,), "int64"))
    assert en.evaluate(program, np.array([2**53 - 1]))[0] == 2**53
    with pytest.raises(InputError, match=r"'x' has integers beyond"):
        en.evaluate(program, np.array([2**53 + 2]))


def test_float32_evaluation_rounds_each_step() -> None:
    x = np.float32([1e8, 1.0])
    program = en.trace(lambda x: x + 1.0 - x, en.TensorSpec((2,)))
    np.testing.assert_array_equal(en.evaluate(program, x, dtype="float32"), [0.0, 1.0])
    np.testing.assert_array_equal(en.evaluate(program, x), [1.0, 1.0])


@pytest.mark.parametrize("arrays, message", [
    ((np.zeros((2, 3)),), "takes 2 arrays, 1 were given"),
    ((np.zeros((2, 3)), np.zeros((3, 2))), r"'y' has shape \(3, 2\)"),
    ((np.zeros((2, 3)), np.zeros((2, 3), np.float32)), "'y' has dtype float32"),
    ((np.zeros((2, 3)), "text"), "'y' has shape"),
])
def test_bad_arrays(arrays: tuple, message: str) -> None:
    program = en.trace(lambda x, y: x + y, *[en.TensorSpec((2, 3), "float64")] * 2)
    with pytest.raises(InputError, match=message):
        en.evaluate(program, *arrays)


def test_numbers_for_inputs_without_dimensions() -> None:
    program = en.trace(lambda x, c: x * c, en.TensorSpec((2,), "float32"), en.TensorSpec((), "float32"))
    np.testing.assert_array_equal(en.evaluate(program, np.float32([1, 2]), 3.0), [3, 6])


def test_outputs_keep_structure() -> None:
    spec = en.TensorSpec((2,), "float64")
    x = np.array([1.0, 2.0])
    one = en.evaluate(en.trace(lambda x: (x + 1,), spec), x)
    assert isinstance(one, tuple) and len(one) == 1
    assert isinstance(en.evaluate(en.trace(lambda x: x + 1, spec), x), np.ndarray)
    assert [o.shape for o in en.evaluate(en.trace(lambda x: [x, x[0]], spec), x)] == [(2,), ()]


def test_evaluate_rejects_what_is_no_program() -> None:
    with pytest.raises(InputError, match="traced program"):
        en.evaluate(lambda x: x, np.zeros(2))
    with pytest.raises(InputError, match="cannot evaluate in"):
        en.evaluate(en.trace(lambda x: x, en.TensorSpec((2,))), np.zeros(2, np.float32), dtype="int32")


def test_any_bracketing_of_a_fold_is_the_fold() -> None:
    s, v = 4 * RNG.standard_normal(6), RNG.standard_normal(6)
    single = [inp("s", (K,)), num(1.0), inp("v", (K,))]
    env = Env({"k": 6}, {"s": s, "v": v})
    want = [float(evaluate_term(fold(SOFTMAX, i, "k", single), env)[1]) for i in range(3)]
    for block, inner in itertools.product((1, 2, 4, 5), (1, 2, 3)):
        env = Env({"k": 6}, {"s": s, "v": v}, {"k": block, "k.i": inner})
        level: list[Term] = single
        for axis in ("k.i.i", "k.i.o", "k.o"):
            level = [fold(SOFTMAX, j, axis, level) for j in range(3)]
        np.testing.assert_allclose([float(evaluate_term(t, env)[1]) for t in level], want, rtol=1e-12)
