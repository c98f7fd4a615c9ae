"""Bad input gets one line that says what is wrong and what would do; unusual but meaningful input gets its documented result."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import eqsat_neptune as en
from eqsat_neptune import EqsatError, TensorSpec, errors
from eqsat_neptune.program import Program
from eqsat_neptune.runtime import available
from eqsat_neptune.terms import add, inp, mul

SHAPE = (3, 4)
SPEC = TensorSpec(SHAPE)
X = np.arange(12, dtype=np.float32).reshape(SHAPE)


def total(x: Any, y: Any) -> Any:
    return x + 2.0 * y


def doubled(x: Any) -> Any:
    return 2.0 * x


@pytest.fixture(scope="module")
def program() -> Program:
    return en.trace(total, SPEC, SPEC)


@pytest.fixture(scope="module")
def kernel(program: Program) -> en.Kernel:
    return en.optimize(program)


def refused(kind: str, needle: str, f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calling f raises errors.<kind>, in one line that has `needle` in it."""
    with pytest.raises(EqsatError) as e:
        f(*args, **kwargs)
    assert type(e.value).__name__ == kind, f"{type(e.value).__name__}: {e.value}"
    assert needle in str(e.value)
    assert "\n" not in str(e.value)


# ------------------------------------------------------------------ options


@pytest.mark.parametrize(
    "options, kind, needle",
    [
        ({"numerics": "quick"}, "EqsatError", "'safe', 'fast', 'strict'"),
        ({"numerics": None}, "EqsatError", "'safe', 'fast', 'strict'"),
        ({"tune": -1}, "EqsatError", "tune must be an int ≥ 0"),
        ({"tune": "3"}, "EqsatError", "tune must be an int ≥ 0"),
        ({"tune": True}, "EqsatError", "tune must be an int ≥ 0"),
        ({"verify": "no"}, "EqsatError", "verify must be True or False"),
        ({"memory_limit": -1}, "EqsatError", "memory_limit must be a number of bytes"),
        ({"memory_limit": "1GB"}, "EqsatError", "memory_limit must be a number of bytes"),
        ({"progress": 3}, "EqsatError", "progress must be True, False, None or a callable"),
        ({"progress": "yes"}, "EqsatError", "progress must be True, False, None or a callable"),
        ({"rules": 3}, "EqsatError", "eqsat_neptune.rules.RULES"),
        ({"rules": ["flatten-sum"]}, "EqsatError", "eqsat_neptune.rules.RULES"),
        ({"cost_model": "fast"}, "EqsatError", "cost_models.model_for"),
        ({"specs": [SPEC, SPEC]}, "EqsatError", "leave out specs"),
    ],
    ids=lambda v: f"{next(iter(v))}={next(iter(v.values()))!r}" if isinstance(v, dict) else "",
)
def test_options(program: Program, options: dict[str, Any], kind: str, needle: str) -> None:
    refused(kind, needle, en.optimize, program, **options)


@pytest.mark.parametrize("target", ["gpu", "CPU", "cpu:0", "cuda:", "cuda:sm_90b", "cuda:sm_10", "hip", "hip:gfx000", "", None])
def test_unknown_target(program: Program, target: Any) -> None:
    refused("TargetError", "cuda:sm_90a", en.optimize, program, target)


def test_what_is_no_program() -> None:
    refused("EqsatError", "a traced program or a function", en.optimize, 3)
    refused("EqsatError", "specs=[TensorSpec(…), …]", en.optimize, total)
    refused("TraceError", "give a TensorSpec for each parameter", en.optimize, total, specs=[SPEC])
    refused("EqsatError", "trace the function first", en.verify, total)
    refused("EqsatError", "what optimize returns", en.verify, en.trace(doubled, SPEC), 3)
    refused("InputError", "trace the function first", en.evaluate, total, X, X)


def test_a_function_with_specs() -> None:
    assert np.array_equal(en.optimize(total, specs=[SPEC, SPEC])(X, X), 3 * X)


def test_progress_is_called_with_the_stage(program: Program) -> None:
    calls: list[tuple[Any, ...]] = []
    en.optimize(program, rules=[], progress=lambda *a: calls.append(a))  # rules=: never from the cache
    assert calls and all(isinstance(s, str) and isinstance(done, int) and (n is None or done <= n) for s, done, n in calls)


@pytest.mark.parametrize("numerics", ["safe", "fast", "strict"])
def test_every_numerics_gives_the_program(numerics: str) -> None:
    def f(x: Any) -> Any:
        xp = x.__array_namespace__()
        return xp.sum(xp.exp(x - xp.max(x, axis=-1, keepdims=True)) * 3.0, axis=-1)

    p = en.trace(f, SPEC)
    k = en.optimize(p, numerics=numerics)
    np.testing.assert_allclose(k(X), en.evaluate(p, X), rtol=2e-6)
    assert numerics != "strict" or k.explain() == "the program runs as it was written: no rule was needed"


def test_tune_measures_and_gives_the_program(program: Program) -> None:
    k = en.optimize(program, tune=2)
    assert np.array_equal(k(X, X), 3 * X) and "Measured on the device" in str(k.report())
    refused("EqsatError", "leave out tune=", en.optimize, program, "hip:gfx942", tune=1)
    if available() is not None:
        refused("DriverNotFound", 'use target="cpu"', en.optimize, program, "cuda:sm_80", tune=1)


def test_tune_takes_the_fastest(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cost model thinks: here the clock says that the plan which runs second is faster."""
    from eqsat_neptune import tuning
    from eqsat_neptune.targets import Target

    ticks = itertools.cycle([3.0, 1.0, 2.0])

    def clock(call: Callable[[], Any]) -> float:
        call()
        return next(ticks)

    monkeypatch.setattr(tuning, "_host_seconds", clock)
    plan = en.optimize(program).plan
    plans = [replace(plan, kernels=tuple(replace(k, name=f"{k.name}_{i}") for k in plan.kernels)) for i in range(3)]
    assert tuning.fastest(plans, program, Target("cpu")) == (plans[1], [3.0, 1.0, 2.0])


def test_no_plan_within_the_memory_limit() -> None:
    def f(x: Any) -> Any:
        """The sum over all of x, needed at every element: its value must go through memory."""
        xp = x.__array_namespace__()
        return x / xp.sum(x)

    p = en.trace(f, TensorSpec((4096, 4096)))
    k = en.optimize(p, "cuda:sm_80")
    temps = sum(b.size for b in k.plan.buffers.values() if b.kind == "temp")
    assert temps > 0
    refused("PlanError", "the leanest one found takes", en.optimize, p, "cuda:sm_80", memory_limit=0)
    assert en.optimize(p, "cuda:sm_80", memory_limit=4 * temps).plan == k.plan


# ------------------------------------------------------------------ specs and tracing (more in test_trace.py)


@pytest.mark.parametrize(
    "make, kind",
    [
        (lambda: TensorSpec((-1,)), "ShapeError"),
        (lambda: TensorSpec((2.5,)), "ShapeError"),  # type: ignore[arg-type]
        (lambda: TensorSpec(("2n",)), "ShapeError"),
        (lambda: TensorSpec(7), "ShapeError"),  # type: ignore[arg-type]
        (lambda: TensorSpec((2,), "float31"), "DtypeError"),
        (lambda: TensorSpec((2,), "complex64"), "DtypeError"),
        (lambda: TensorSpec((2,), range=(1, 0)), "ShapeError"),
        (lambda: en.trace(3, SPEC), "TraceError"),  # type: ignore[arg-type]
        (lambda: en.trace(doubled, X), "TraceError"),  # type: ignore[arg-type]
        (lambda: en.trace(lambda x: None, SPEC), "TraceError"),
        (lambda: en.trace(lambda x: x if x.sum() > 0 else -x, SPEC), "TraceError"),
        (lambda: en.trace(lambda x: np.exp(x), SPEC), "TraceError"),
        (lambda: en.trace(lambda x: x @ x, SPEC), "ShapeError"),
        (lambda: en.trace(lambda x: x.reshape(5, 5), SPEC), "ShapeError"),
        (lambda: en.trace(lambda x: x.__array_namespace__().max(x), TensorSpec((0, 3))), "ShapeError"),
    ],
)
def test_specs_and_functions(make: Callable[[], Any], kind: str) -> None:
    with pytest.raises(EqsatError) as e:
        make()
    assert isinstance(e.value, getattr(errors, kind)) and "\n" not in str(e.value)


def test_errors_in_a_function_say_where() -> None:
    def f(x: Any) -> Any:
        y = x + 1.0
        return y @ x

    with pytest.raises(errors.ShapeError) as e:
        en.trace(f, SPEC)
    line = f.__code__.co_firstlineno + 2
    assert f"{__file__}:{line}" in str(e.value) and e.value.where == f"{__file__}:{line}"


def test_what_a_function_raises_itself_passes() -> None:
    def f(x: Any) -> Any:
        return {}["a"]

    with pytest.raises(KeyError, match="a"):
        en.trace(f, SPEC)


@pytest.mark.parametrize("bounds", [(1,), (1, 2, 3), "ab", 3, (None, 1), (0, 10**400), (0, 1j)])
def test_ranges_that_are_none(bounds: Any) -> None:
    refused("ShapeError", "range must be two numbers", TensorSpec, (2,), range=bounds)


@pytest.mark.parametrize("specs", [3, SPEC, 1.5, True])
def test_specs_that_are_no_list(specs: Any) -> None:
    refused("EqsatError", "specs must be a list of TensorSpecs", en.optimize, doubled, specs=specs)


@pytest.mark.parametrize(
    "f",
    [
        lambda xp, x: x * 10**400,
        lambda xp, x: 10**400 - x,
        lambda xp, x: x < 10**400,
        lambda xp, x: x ** (10**400),
        lambda xp, x: xp.where(x > 0, -(10**400), x),
        lambda xp, x: xp.clip(x, 0, 10**400),
        lambda xp, x: x + xp.full((4,), 10**400),
        lambda xp, x: x + xp.arange(10**400, 10**400 + 4),
        lambda xp, x: x + xp.linspace(0, 10**400, 4),
    ],
)
def test_numbers_beyond_every_dtype(f: Callable[..., Any]) -> None:
    """Refused with the user's line."""
    refused(
        "DtypeError", f"{__file__}:{f.__code__.co_firstlineno}: an integer of 1329 bits", en.trace, lambda x: f(en.xp, x), SPEC
    )


@pytest.mark.parametrize(
    "f",
    [
        lambda xp, x: xp.repeat(x, -1),
        lambda xp, x: xp.repeat(x, -2, axis=0),
        lambda xp, x: xp.tile(x, (-1, 1)),
        lambda xp, x: xp.broadcast_to(x, (-1, *SHAPE)),
        lambda xp, x: xp.zeros((-1,)),
        lambda xp, x: xp.full(-2, 1.0),
        lambda xp, x: xp.eye(-1),
        lambda xp, x: xp.eye(2, -1),
        lambda xp, x: xp.linspace(0, 1, -1),
        lambda xp, x: xp.one_hot(xp.astype(x, "int32"), -1),
        lambda xp, x: xp.diff(x, n=-1),
    ],
)
def test_negative_extents(f: Callable[..., Any]) -> None:
    refused("ShapeError", "must be at least 0, not -", en.trace, lambda x: f(en.xp, x), SPEC)


def test_extents_beyond_every_memory() -> None:
    refused("ShapeError", "beyond 2^63", TensorSpec, (2**63,))
    refused("ShapeError", "beyond 2^63", en.trace, lambda x: en.xp.broadcast_to(x, (10**400, *SHAPE)), SPEC)


@pytest.mark.parametrize("by", [-1, 64])
def test_shifts(by: int) -> None:
    spec = TensorSpec(SHAPE, "int32")
    refused("DtypeError", "shift by 0 … 63 bits", en.trace, lambda x: x << by, spec)
    refused("DtypeError", "shift by 0 … 63 bits", en.trace, lambda x: x >> by, spec)


# ------------------------------------------------------------------ arguments of a kernel


class OnGpu:
    """What CuPy, Numba and PyCUDA arrays have in common."""

    shape, dtype = SHAPE, np.dtype(np.float32)
    __cuda_array_interface__ = {"shape": SHAPE, "typestr": "<f4", "data": (0, False), "version": 3, "strides": None}  # noqa: RUF012


@pytest.mark.parametrize(
    "y, kind, needle",
    [
        (X.T, "InputError", "y has shape (4, 3), the kernel was made for (3, 4)"),
        (X[0], "InputError", "y has shape (4,), the kernel was made for (3, 4)"),
        (X[None], "InputError", "y has shape (1, 3, 4), the kernel was made for (3, 4)"),
        (X.astype(np.float64), "InputError", 'y.astype("float32")'),
        (X.astype(np.float16), "InputError", 'y.astype("float32")'),
        (X.astype(np.int32), "InputError", 'y.astype("float32")'),
        (X.astype(complex), "InputError", 'y.astype("float32")'),
        (X.astype(object), "InputError", 'y.astype("float32")'),
        (X.astype(">f4"), "InputError", "y has dtype >f4"),
        (X.tolist(), "InputError", "y must be a NumPy array, not list"),
        (3.0, "InputError", "y must be a NumPy array, not float"),
        (None, "InputError", "y must be a NumPy array, not NoneType"),
        (np.ma.masked_array(X, X > 3), "InputError", "y is a masked array"),
        (OnGpu(), "WrongDevice", 'target="cuda"'),
    ],
    ids=lambda v: "" if isinstance(v, str) else f"{type(v).__name__}{getattr(v, 'shape', '')}{getattr(v, 'dtype', '')}",
)
def test_arguments(kernel: en.Kernel, y: Any, kind: str, needle: str) -> None:
    refused(kind, needle, kernel, X, y)


def test_number_of_arguments_and_streams(kernel: en.Kernel) -> None:
    refused("InputError", "total takes 2 arrays (x, y), got 1", kernel, X)
    refused("InputError", "total takes 2 arrays (x, y), got 3", kernel, X, X, X)
    refused("InputError", "leave out stream=", kernel, X, X, stream=1)


def test_tensors_of_other_libraries(kernel: en.Kernel) -> None:
    torch = pytest.importorskip("torch")
    t = torch.from_numpy(X)
    assert np.array_equal(kernel(t, t), 3 * X)
    refused("InputError", "cannot be read as a NumPy array", kernel, t, t.clone().requires_grad_())
    refused("InputError", "cannot be read as a NumPy array", kernel, t, t.to(torch.bfloat16))
    refused("WrongDevice", "meta", kernel, t, t.to("meta"))


def test_strides_of_every_kind(kernel: en.Kernel) -> None:
    big = np.arange(400, dtype=np.float32).reshape(20, 20)
    for view in (
        big[:3, :4],
        big.T[:3, :4],
        big[2::-1, 3::-1],
        big[::5, ::5][:3],
        big[6:0:-2, 1:8:2],
        np.broadcast_to(np.float32(5), SHAPE),
        np.broadcast_to(big[0, :4], SHAPE),
        np.asfortranarray(X),
    ):
        before = view.copy()
        assert np.array_equal(kernel(view, X), view + 2 * X) and np.array_equal(kernel(X, view), X + 2 * view)
        assert np.array_equal(kernel(view, view), 3 * view) and np.array_equal(view, before)
    raw = np.zeros(4 * 12 + 1, np.uint8)[1:].view(np.float32).reshape(SHAPE)  # starts between two elements' addresses
    raw[:] = X
    assert not raw.flags.aligned and np.array_equal(kernel(raw, X), 3 * X)
    frozen = X.copy()
    frozen.flags.writeable = False
    assert np.array_equal(kernel(frozen, frozen), 3 * X)


def test_numbers_serve_for_inputs_without_axes() -> None:
    k = en.optimize(doubled, specs=[TensorSpec(())])
    assert k(3.0) == 6.0 and k(np.float32(3)) == 6.0 and k(np.array(3, np.float32)).shape == ()


def test_inputs_may_have_any_name() -> None:
    """Outputs and temporaries of a plan have names too."""

    def f(out0: Any, t0: Any) -> Any:
        return out0 / out0.__array_namespace__().sum(out0) + t0

    p = en.trace(f, SPEC, SPEC)
    np.testing.assert_allclose(en.optimize(p)(X, X), en.evaluate(p, X, X), rtol=2e-6)
    renamed = p.renamed({}, {p.inputs[0].name: "out0", p.inputs[1].name: "t0"})
    np.testing.assert_allclose(en.optimize(renamed)(X, X), en.evaluate(p, X, X), rtol=2e-6)


# ------------------------------------------------------------------ empty axes


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_outputs_without_elements(target: str) -> None:
    def f(x: Any, y: Any) -> Any:
        return 2.0 * x, y + 1.0, x[:, :2]

    k = en.optimize(f, target, specs=[TensorSpec((0, 3)), TensorSpec((3,))])
    assert [b.name for b in k.plan.buffers.values() if b.kind == "output"] and "no elements" in str(k.report())
    assert {s.buffer for kernel in k.plan.kernels for s in kernel.stores} == {"out1"} and k.source
    if target == "cpu":
        a, b, c = k(np.ones((0, 3), np.float32), np.ones(3, np.float32))
        assert (a.shape, b.tolist(), c.shape) == ((0, 3), [2, 2, 2], (0, 2))


def test_reductions_over_nothing() -> None:
    def f(x: Any) -> Any:
        xp = x.__array_namespace__()
        return xp.sum(x, axis=0), xp.prod(x, axis=0), x.mT @ x, xp.all(x, axis=0), xp.any(x, axis=0)

    k = en.optimize(f, specs=[TensorSpec((0, 3))])
    got = k(np.ones((0, 3), np.float32))
    assert [g.tolist() for g in got] == [[0] * 3, [1] * 3, [[0] * 3] * 3, [True] * 3, [False] * 3]
    refused("ShapeError", "empty axis", en.optimize, lambda x: x.__array_namespace__().min(x, axis=0), specs=[TensorSpec((0, 3))])


# ------------------------------------------------------------------ NaN, infinities and large values


def softmax(x: Any) -> Any:
    xp = x.__array_namespace__()
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def attention(q: Any, k: Any, v: Any) -> Any:
    return softmax(q @ k.mT) @ v


def masked_attention(q: Any, k: Any, v: Any) -> Any:
    """Key j is seen by queries i ≥ j - 2; the last keys by none."""
    xp = q.__array_namespace__()
    i, j = xp.arange(q.shape[-2])[:, None], xp.arange(k.shape[-2])
    return softmax(xp.where(j <= i + 2, q @ k.mT, -xp.inf)) @ v


@pytest.fixture(scope="module")
def fused() -> tuple[Program, en.Kernel]:
    p = en.trace(attention, TensorSpec((5, 4)), TensorSpec((9, 4)), TensorSpec((9, 3)))
    return p, en.optimize(p)


def qkv() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(s).astype(np.float32) for s in ((5, 4), (9, 4), (9, 3))]


def test_logsumexp_of_minus_infinity() -> None:
    x = np.array([[-np.inf] * 3, [0, 1, 2], [np.inf, 0, 0], [np.nan, 0, 0]], np.float32)
    spec = TensorSpec(x.shape)

    def written_out(x: Any) -> Any:
        xp = x.__array_namespace__()
        m = xp.max(x, axis=-1, keepdims=True)
        return m[:, 0] + xp.log(xp.sum(xp.exp(x - m), axis=-1))

    sugar = en.optimize(lambda x: x.__array_namespace__().logsumexp(x, axis=-1), specs=[spec])(x)
    assert sugar[0] == -np.inf and np.isclose(sugar[1], 2.4076059) and sugar[2] == np.inf and np.isnan(sugar[3])
    plain = en.optimize(written_out, specs=[spec])(x)
    assert np.isnan(plain[0]) and np.isclose(plain[1], 2.4076059) and np.isnan(plain[3])


def test_nan_shows_where_it_counts_and_nowhere_else(fused: tuple[Program, en.Kernel]) -> None:
    p, k = fused
    for n, at, rows, columns in ((0, (2, 1), [2], [0, 1, 2]), (1, (7, 0), range(5), range(3)), (2, (4, 1), range(5), [1])):
        arrays = qkv()
        arrays[n][at] = np.nan
        want = np.zeros((5, 3), bool)
        want[np.ix_(list(rows), list(columns))] = True
        assert np.array_equal(np.isnan(k(*arrays)), want) and np.array_equal(np.isnan(en.evaluate(p, *arrays)), want)


def test_what_a_mask_hides() -> None:
    """NaN in a value whose weight a mask makes 0 may show or not; elsewhere everything is as without it."""
    p = en.trace(masked_attention, TensorSpec((5, 4)), TensorSpec((9, 4)), TensorSpec((9, 3)))
    k, (q, key, v) = en.optimize(p), qkv()
    want = en.evaluate(p, q, key, v)
    np.testing.assert_allclose(k(q, key, v), want, rtol=1e-5)
    v[8] = np.nan  # no query sees key 8
    got = k(q, key, v)
    shown = np.isnan(got)
    np.testing.assert_allclose(got[~shown], want[~shown], rtol=1e-5)
    v[8], v[6, 1] = 0.0, np.nan  # query 4 sees key 6
    got = k(q, key, v)
    assert np.isnan(got[4, 1]) and not np.isnan(got[:, [0, 2]]).any()


def test_rows_that_are_masked_out_are_nan() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        xp = q.__array_namespace__()
        i, j = xp.arange(q.shape[-2])[:, None], xp.arange(k.shape[-2])
        return softmax(xp.where(j < i, q @ k.mT, -xp.inf)) @ v  # query 0 sees nothing

    p = en.trace(f, TensorSpec((5, 4)), TensorSpec((9, 4)), TensorSpec((9, 3)))
    got, want = en.optimize(p)(*qkv()), en.evaluate(p, *qkv())
    assert np.isnan(want[0]).all() and np.isnan(got[0]).all()
    np.testing.assert_allclose(got[1:], want[1:], rtol=1e-5)


@pytest.mark.parametrize("size", [1e4, 1e18])
def test_large_logits(fused: tuple[Program, en.Kernel], size: float) -> None:
    p, k = fused
    q, key, v = qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = k(q * np.float32(size), key, v)
    np.testing.assert_allclose(got, en.evaluate(p, q * np.float32(size), key, v), rtol=2e-3 if size == 1e4 else 1e-5)


def test_infinite_logits_follow_the_source(fused: tuple[Program, en.Kernel]) -> None:
    p, k = fused
    for value in (np.inf, -np.inf):
        q, key, v = qkv()
        key[:, 0], q[:, 0] = 0.0, 1.0
        key[2, 0] = value
        got, want = k(q, key, v), en.evaluate(p, q, key, v)
        assert np.array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want, rtol=1e-5, equal_nan=True)


def test_mean_much_larger_than_the_spread() -> None:
    def f(x: Any) -> Any:
        return x.__array_namespace__().var(x, axis=-1)

    p = en.trace(f, TensorSpec((4, 1000)))
    x = (1000 + 1e-3 * np.random.default_rng(0).standard_normal((4, 1000))).astype(np.float32)
    want = en.evaluate(p, x)
    as_written = np.abs(en.evaluate(p, x, dtype="float32") - want).max()
    assert np.abs(en.optimize(p)(x) - want).max() < 3 * as_written < 0.1 * want.max()


def test_ties_go_to_the_first() -> None:
    def f(x: Any) -> Any:
        xp = x.__array_namespace__()
        return xp.argmax(x, axis=-1), xp.argmin(x, axis=-1)

    x = np.array([[1, 3, 3, 0, 0], [2, 2, 2, 2, 2], [-np.inf] * 5], np.float32)
    high, low = en.optimize(f, specs=[TensorSpec(x.shape)])(x)
    assert high.tolist() == [1, 0, 0] and low.tolist() == [3, 0, 0]


def test_a_gather_out_of_range() -> None:
    def f(x: Any, i: Any) -> Any:
        return x.__array_namespace__().take(x, i, axis=0)

    k = en.optimize(f, specs=[TensorSpec((5, 2)), TensorSpec((3,), "int32")])
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    assert np.array_equal(k(x, np.array([4, 0, 2], np.int32)), x[[4, 0, 2]])
    assert np.array_equal(k(x, np.array([-1, -5, 0], np.int32)), x[[-1, -5, 0]])
    for bad, named in (([0, 5, 1], "5"), ([0, 0, -6], "-6"), ([-15, 0, 0], "-15"), ([2**31 - 1, 0, 0], str(2**31 - 1))):
        for run in (k, lambda *arrays: en.evaluate(k.program, *arrays)):
            with pytest.raises(errors.InputError, match=rf"out of range: {named} .*into .*of extent 5 \(indices lie in -5 … 4\)"):
                run(x, np.array(bad, np.int32))


def test_dtypes_of_results() -> None:
    def f(x: Any, y: Any) -> Any:
        return x @ y

    for dtype in ("float64", "float32", "float16", "bfloat16"):
        k = en.optimize(f, specs=[TensorSpec((3, 4), dtype), TensorSpec((4, 2), dtype)])
        x, y = (np.ones(s).astype(np.dtype(dtype)) / 3 for s in ((3, 4), (4, 2)))
        out = k(x.astype(dtype), y.astype(dtype))
        assert out.dtype.name == dtype and k.plan.compute_dtype == ("float64" if dtype == "float64" else "float32")
        if dtype == "float64":
            np.testing.assert_allclose(out, x @ y, rtol=1e-15)


def test_two_calls_give_the_same_bits(fused: tuple[Program, en.Kernel]) -> None:
    _, k = fused
    assert k(*qkv()).tobytes() == k(*qkv()).tobytes()


# ------------------------------------------------------------------ dynamic extents


def test_dynamic_extents() -> None:
    p = en.trace(total, TensorSpec(("n", 4)), TensorSpec(("n", 4)))
    k = en.optimize(p, verify=True)
    for n in (1, 3, 0, 3):
        assert np.array_equal(k(np.ones((n, 4), np.float32), np.ones((n, 4), np.float32)), np.full((n, 4), 3, np.float32))
    assert k.bind(n=3) is k.bind({"n": 3}) and isinstance(k.bind(n=3), en.Kernel)
    x = X.copy()
    refused("InputError", "its spec says (n, 4)", k, x, np.ones((2, 4), np.float32))
    refused("InputError", "its spec says (n, 4)", k, x, np.ones((3, 5), np.float32))
    refused("InputError", "its spec says (n, 4)", k, x, x[0])
    refused("InputError", "2 arrays, 1 were given", k, x)
    refused("InputError", "expected arrays", k, x, 3)
    refused("InputError", "convert it", k, x, x.astype(np.float64))
    refused("ShapeError", "has no extent 'm'", k.bind, m=3)
    refused("ShapeError", "an int ≥ 0", k.bind, n=-1)
    refused("ShapeError", "no number was given", k.bind)
    for what in ("plan", "source", "cost", "form", "egraph", "from_cache"):
        refused("EqsatError", "kernel.bind(n=…)", getattr, k, what)
    for method in (k.report, k.explain, k.compile, lambda: k.save("x")):
        refused("EqsatError", "kernel.bind(n=…)", method)
    refused("EqsatError", "bind its extents first", en.verify, p)
    refused("TargetError", "cuda:sm_90a", en.optimize, p, "gpu")


# ------------------------------------------------------------------ no compiler, no driver, another device


@pytest.mark.skipif(available() is None, reason="there is a GPU here")
def test_without_a_driver(program: Program) -> None:
    refused("DriverNotFound", 'use target="cpu"', en.optimize, program, "cuda")
    k = en.optimize(program, "cuda:sm_90a")  # needs no device …
    assert "__global__" in k.source
    refused("DriverNotFound", 'use target="cpu"', k, OnGpu(), OnGpu())  # … until it is called


def test_host_arrays_for_a_gpu_kernel(program: Program) -> None:
    refused("WrongDevice", 'optimize(..., target="cpu")', en.optimize(program, "cuda:sm_90a"), X, X)
    refused("WrongDevice", "", en.optimize(program, "hip:gfx942"), X, X)


def test_without_a_compiler(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    from eqsat_neptune.runtime import hipcc, nvrtc

    monkeypatch.setattr(nvrtc, "nvrtc_paths", lambda: [])
    monkeypatch.setattr(nvrtc, "find_nvcc", lambda: None)
    refused("CompilerNotFound", "pip install nvidia-cuda-nvrtc", en.optimize(program, "cuda:sm_86").compile)
    monkeypatch.setattr(hipcc, "_candidates", lambda: iter(()))
    hipcc.find_compiler.cache_clear()
    try:
        refused("CompilerNotFound", "apt-get install", en.optimize(program, "hip:gfx90a").compile)
    finally:
        hipcc.find_compiler.cache_clear()


# ------------------------------------------------------------------ verify


def test_verify_finds_what_is_wrong(program: Program, kernel: en.Kernel) -> None:
    verdict = en.verify(program, kernel)
    assert verdict and verdict.ok and "kernel agrees with float64" in verdict.evidence and verdict.counterexample is None
    other = en.optimize(en.trace(lambda x, y: x + 2.001 * y, SPEC, SPEC))
    verdict = en.verify(program, other)
    assert not verdict and not verdict.ok and verdict.counterexample
    assert "error" in verdict.counterexample and "seed" in verdict.counterexample


@pytest.mark.parametrize("seed", ["a", -1, 1.5, None, True])
def test_seeds_of_verify(program: Program, kernel: en.Kernel, seed: Any) -> None:
    refused("EqsatError", "seed must be an int ≥ 0", en.verify, program, kernel, seed=seed)
    refused("EqsatError", "seed must be an int ≥ 0", en.verify, program, program.outputs[0].term, seed=seed)


def test_verify_compares_terms(program: Program) -> None:
    t = program.outputs[0].term
    x, y = (inp(i.name, o) for i, o in zip(program.inputs, [program.outputs[0].index(program.axes)] * 2))
    assert en.verify(program, t) and en.verify(program, add(y, x, y))
    assert not en.verify(program, add(x, y)) and not en.verify(program, mul(x, y))


# ------------------------------------------------------------------ saved kernels


def test_saved_kernels(kernel: en.Kernel, tmp_path: Any) -> None:
    f = tmp_path / "kernel"
    kernel.save(f)
    assert np.array_equal(en.load(f)(X, X), 3 * X) and np.array_equal(en.load(str(f))(X, X), 3 * X)
    raw = f.read_bytes()
    head, _, payload = raw.partition(b"\n")
    for bad, needle in (
        (b"", "not a saved kernel"),
        (b"\x80\x04.", "not a saved kernel"),
        (raw.replace(b'"version": "', b'"version": "9.'), "version 9."),
        (head, "damaged"),
        (raw[:-9], "damaged"),
        (head + b"\n[]", "damaged"),
        (head + b"\n" + payload.replace(b"add", b"exec"), "damaged"),
        (head + b"\n" + payload.replace(b"grid", b"host"), "damaged"),
        (head + b"\n" + bytes([*payload[:200], payload[200] ^ 1, *payload[201:]]), "damaged"),
        (b"[" * 200000, "not a saved kernel"),
        (head + b"\n" + b"[" * 100000, "damaged"),
    ):
        f.write_bytes(bad)
        refused("SavedKernelError", needle, en.load, f)
    refused("SavedKernelError", "cannot read", en.load, tmp_path / "nothing")
    refused("SavedKernelError", "cannot read", en.load, tmp_path)
    (tmp_path / "file").write_text("")
    refused("SavedKernelError", "cannot write", kernel.save, tmp_path / "file" / "kernel")


def test_paths_that_are_none(kernel: en.Kernel) -> None:
    for path in ("a\0b", "\ud800"):
        refused("SavedKernelError", "no file can have this name", kernel.save, path)
        refused("SavedKernelError", "no file can have this name", en.load, path)
    for other in (None, 3, b"kernel", ["kernel"]):
        refused("SavedKernelError", "must be a str or a pathlib.Path", kernel.save, other)
        refused("SavedKernelError", "must be a str or a pathlib.Path", en.load, other)
