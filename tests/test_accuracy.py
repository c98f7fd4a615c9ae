"""Where the textbook's own error is large, ours is no larger: statistics of values far from zero, beside NumPy's in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.emulate import host_compiler, run
from eqsat_neptune.codegen.lower import lower

import eqsat_neptune as en
from eqsat_neptune import xp
from eqsat_neptune.programs import CASES


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


def stepwise(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Linear attention with every step rounded to bfloat16, as an eager library has it; products add up in float32."""

    def half(x: np.ndarray) -> np.ndarray:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)

    def feature(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float32)
        return half(np.where(x > 0, half(x + 1), half(np.exp(np.minimum(x, 0)))))

    a = half(feature(q) @ feature(k).swapaxes(-1, -2))
    return half(half(a / half(a.sum(-1, keepdims=True))) @ v.astype(np.float32))


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler for the emulator")
@pytest.mark.parametrize("mean", [0.0, 10.0])
def test_a_product_is_rounded_in_memory_as_it_would_be_in_a_kernel(mean: float) -> None:
    """keys · values lies in memory in 16 bits, because the product with it takes it so."""
    case, extents = CASES["linear_attention"], {"h": 1, "n": 2048, "d": 64}
    kernel = en.optimize(case.function("full"), "cuda:sm_90a", specs=case.specs("full", **extents))
    assert "bfloat16" in {b.dtype for b in kernel.plan.buffers.values() if b.kind == "temp"}
    rng = np.random.default_rng(0)
    q, k, v = ((rng.standard_normal((1, 2048, 64)) + m).astype(ml_dtypes.bfloat16) for m in (0.0, 0.0, mean))
    want = en.evaluate(kernel.program, q, k, v)
    (out,) = run([lower(x, kernel.plan.buffers) for x in kernel.plan.kernels], kernel.plan.buffers, {"q": q, "k": k, "v": v})
    ours, steps = (np.linalg.norm(x.astype(np.float64) - want) for x in (out["out0"], stepwise(q, k, v)))
    assert ours <= steps


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
