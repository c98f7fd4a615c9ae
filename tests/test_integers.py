"""Integer results wrap around as NumPy's do: in the reference, on the CPU, and in the text for GPUs (in their emulator)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.emulate import host_compiler, run
from eqsat_neptune.codegen.hip import hip_emulator
from eqsat_neptune.codegen.lower import lower
from sweeps import some

import eqsat_neptune as en
from eqsat_neptune import TensorSpec
from eqsat_neptune.errors import InputError
from eqsat_neptune.integers import wrapped
from eqsat_neptune.program import Program

WIDTHS = (8, 16, 32, 64)
DTYPES = [f"{sign}int{bits}" for sign in ("u", "") for bits in WIDTHS]
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "negative": lambda x: -x,
    "sum": lambda x: x + x,
    "difference": lambda x: x - (x + x) - x - x,
    "square": lambda x: x * x,
    "cube": lambda x: x * x * x,
    "scaled": lambda x: x * 3 - 100,
    "absolute": lambda x: abs(x),
    "inverted": lambda x: ~x,
}


def functions(dtype: str) -> dict[str, Callable[[Any], Any]]:
    """Those whose exact result float64 can hold: ~x of uint64 is about 2^64."""
    return {n: f for n, f in FUNCTIONS.items() if (dtype, n) != ("uint64", "inverted")}


def numbers(dtype: str, exact: float) -> np.ndarray:
    """Ends of the dtype's range and around zero, as large as float64 allows of a result that is `exact` times as long."""
    bits = min(8 * np.dtype(dtype).itemsize, int(52 / exact))
    lo, hi = (0, 2**bits - 1) if dtype[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    some = np.random.default_rng(bits).integers(lo, hi, 20)
    return np.array([lo, lo + 1, 1, 2, hi // 2, hi - 1, hi, *some], dtype=dtype)


def traced(f: Callable[[Any], Any], x: np.ndarray) -> Program:
    p = en.trace(f, TensorSpec(x.shape, x.dtype.name))
    assert isinstance(p, Program)
    return p


def numpys(f: Callable[[Any], Any], x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(f(x))


EXACT = {"square": 2.0, "cube": 3.0, "scaled": 1.1, "sum": 1.1, "difference": 1.1}


@pytest.mark.parametrize("dtype", DTYPES)
def test_arithmetic_wraps(dtype: str) -> None:
    for name, f in functions(dtype).items():
        x = numbers(dtype, EXACT.get(name, 1.0))
        p, want = traced(f, x), numpys(f, x)
        for got in (en.evaluate(p, x), en.optimize(p)(x)):
            assert got.dtype == want.dtype == dtype
            np.testing.assert_array_equal(got, want, name)


@pytest.mark.parametrize(
    "dtype, values, f",
    [
        ("uint32", [1, 0, 7], lambda x: -x),
        ("uint32", [3000000000], lambda x: x + x),
        ("int32", [70000, -70000], lambda x: x * x),
        ("int32", [2**31 - 1, -(2**31)], lambda x: x + x),
        ("int16", [32767, -32768], lambda x: x * x * x),  # beyond 2^31 on the way
        ("uint64", [1], lambda x: -x),
        ("int64", [2**33, -(2**32)], lambda x: x * x),  # powers of two are exact in float64
    ],
)
def test_as_numpy(dtype: str, values: list[int], f: Callable[[Any], Any]) -> None:
    x = np.array(values, dtype)
    p = traced(f, x)
    for got in (en.evaluate(p, x), en.optimize(p)(x)):
        np.testing.assert_array_equal(got, numpys(f, x))


def test_what_wraps_is_not_read_back() -> None:
    """A result that is stored in a narrow dtype is also part of another, which wants it whole."""
    xp = en.xp

    def f(x: Any) -> Any:
        s = xp.sum(x * x, dtype="int32")
        return s, xp.astype(x, "float64") * s

    x = np.full((640, 960), 700, np.int32)
    p = traced(f, x)
    for total, scaled in (en.evaluate(p, x), en.optimize(p)(x)):
        whole = 640 * 960 * 700**2
        assert total == np.int64(whole).astype(np.int32)
        np.testing.assert_allclose(scaled, 700.0 * whole)


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler for the emulator")
@pytest.mark.parametrize("arch", some([None, "gfx942"]))
def test_emitted_conversions_wrap(arch: str | None) -> None:
    """All dtypes and functions in one program, in float32 (what fits it) and in float64."""
    for dtypes in (["uint8", "int8"], DTYPES):
        cases = [(d, f, numbers(d, EXACT.get(n, 1.0))) for d in dtypes for n, f in functions(d).items()]

        def every(*xs: Any, cases: list = cases) -> tuple[Any, ...]:
            return tuple(f(x) for x, (_, f, _) in zip(xs, cases))

        p = en.trace(every, *(TensorSpec(x.shape, d) for d, _, x in cases))
        assert isinstance(p, Program)
        plan = en.optimize(p, "cuda:sm_80").plan
        inputs = {i.name: x for i, (_, _, x) in zip(p.inputs, cases)}
        kernels = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
        (got,) = run(kernels, plan.buffers, inputs, hip_emulator(arch) if arch else None)
        for n, (d, f, x) in enumerate(cases):
            np.testing.assert_array_equal(got[f"out{n}"], numpys(f, x), d)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrapped(dtype: str) -> None:
    """Against Python's integers, far beyond 64 bits too."""
    x = np.array(
        [
            0.0,
            -0.0,
            0.9,
            -0.9,
            -1.0,
            255.5,
            2.0**31,
            -(2.0**31),
            2.0**53,
            2.0**63,
            -(2.0**63),
            2.0**64 - 2048,
            -3 * 2.0**63,
            1e25,
            -1e25,
        ]
    )
    bits = 8 * np.dtype(dtype).itemsize
    want = [int(v) % 2**bits for v in x]
    want = want if dtype[0] == "u" else [w - 2**bits if w >= 2 ** (bits - 1) else w for w in want]
    np.testing.assert_array_equal(wrapped(x, np.dtype(dtype)), np.array(want, dtype))
    np.testing.assert_array_equal(wrapped(np.array([np.nan, np.inf, -np.inf]), np.dtype(dtype)), np.zeros(3, dtype))


def test_inputs_that_float64_cannot_hold() -> None:
    x = np.array([2**60 + 1])
    with pytest.raises(InputError, match=r"'x' has integers beyond ±9007199254740992 \(2\^53\).*exact up to there"):
        en.evaluate(traced(lambda x: x, x), x)
    small = np.array([2**24 + 1])
    with pytest.raises(InputError, match=r"2\^24.*or evaluate in float64"):
        en.evaluate(traced(lambda x: x, small), small, dtype="float32")
