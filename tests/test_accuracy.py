"""Where the textbook's own error is large, ours is no larger: statistics of values far from zero, beside NumPy's in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.emulate import host_compiler, run
from eqsat_neptune.codegen.lower import lower

import eqsat_neptune as en
from eqsat_neptune import xp


def normalised(x: np.ndarray) -> np.ndarray:
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + x.dtype.type(1e-5))


STATISTICS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "var": (lambda x: xp.var(x, axis=-1), lambda x: x.var(-1)),
    "std": (lambda x: xp.std(x, axis=-1), lambda x: x.std(-1)),
    "layer_norm": (xp.layer_norm, normalised),
}


def rows(n: int, count: int) -> np.ndarray:
    return (1000 + 1e-3 * np.random.default_rng(n).standard_normal((count, n))).astype(np.float32)


def no_worse(name: str, x: np.ndarray, got: np.ndarray) -> None:
    plain = STATISTICS[name][1]
    want = plain(x.astype(np.float64))
    ours, numpys = (np.linalg.norm(y - want) / np.linalg.norm(want) for y in (got, plain(x)))
    assert ours <= 2 * numpys, f"{name} of {x.shape[-1]} values: relative error {ours}, NumPy's is {numpys}"


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_far_from_zero(name: str) -> None:
    for n in (100, 384, 500, 1000, 3000):
        x = rows(n, 200)
        no_worse(name, x, en.optimize(STATISTICS[name][0], "cpu", specs=[en.TensorSpec(x.shape, "float32")])(x))


@pytest.mark.slow
@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler for the emulator")
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_far_from_zero_on_a_gpu(name: str) -> None:
    for n in (500, 1000, 40000):
        x = rows(n, 16)
        plan = en.optimize(STATISTICS[name][0], "cuda:sm_80", specs=[en.TensorSpec(x.shape, "float32")]).plan
        (out,) = run([lower(k, plan.buffers) for k in plan.kernels], plan.buffers, {"x": x})
        no_worse(name, x, out["out0"])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "f, n",
    [
        (lambda xp, x: xp.sum(x, axis=1) ** 2 / 3, 100),
        (lambda xp, x: xp.max(x, axis=1) ** 2 * 0.1, 100),
        (lambda xp, x: xp.mean(x, axis=-1) ** 2 / 6, 6),
        (lambda xp, x: xp.var(x, axis=-1) ** 2 / 12, 12),
        (lambda xp, x: xp.mean(x, axis=1) ** 3, 6),
    ],
    ids=["sum", "max", "mean", "var", "cube"],
)
def test_powers_of_row_statistics(f, n: int, dtype: str) -> None:  # type: ignore[no-untyped-def]
    """x·x·(1/n) is (x/n)·x: one factor takes the division, the others stay."""
    x = np.random.default_rng(0).standard_normal((8, n)).astype(dtype)
    p = en.trace(lambda t: f(en.xp, t), en.TensorSpec(x.shape, dtype))
    np.testing.assert_allclose(en.optimize(p)(x), en.evaluate(p, x), rtol=1e-4)
