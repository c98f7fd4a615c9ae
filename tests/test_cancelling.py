"""(A·B)·C as A·(B·C): B·C is not rounded to 16 bits where A may take differences of its rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.emulate import host_compiler, run
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.extraction.cancelling import may_cancel
from eqsat_neptune.extraction.legality import legal_nodes

import eqsat_neptune as en
from eqsat_neptune import egraph, xp
from eqsat_neptune.terms import show

N, K, M, D = 1024, 64, 1024, 64


def chain(a: Any, b: Any, c: Any) -> Any:
    return (a @ b) @ c


def specs(dtype: str = "bfloat16", **bounds: Any) -> list[en.TensorSpec]:
    return [en.TensorSpec(s, dtype, **bounds) for s in ((N, K), (K, M), (M, D))]


def differences(common: float) -> list[np.ndarray]:
    """A whose rows subtract two rows of B, which have much in common."""
    rng = np.random.default_rng(0)
    a = np.zeros((N, K))
    for row in a:
        row[rng.choice(K, 2, replace=False)] = 1, -1
    b = rng.standard_normal((K, M)) + common * rng.standard_normal((1, M))
    return [x.astype(ml_dtypes.bfloat16) for x in (a, b, rng.standard_normal((M, D)))]


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler for the emulator")
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_no_worse_than_the_order_of_the_source(target: str) -> None:
    arrays = differences(100.0)
    kernel = en.optimize(chain, target, specs=specs())
    assert kernel.form != en.optimize(chain, target, specs=specs(), rules=()).form, "B·C is still the cheaper way"
    plan, want = kernel.plan, en.evaluate(kernel.program, *arrays)
    (out,) = run([lower(k, plan.buffers) for k in plan.kernels], plan.buffers, dict(zip("abc", arrays)))
    a, b, c = (x.astype(np.float64) for x in arrays)
    ours, source, made = (
        np.linalg.norm(x.astype(np.float64) - want) / np.linalg.norm(want)
        for x in (out["out0"], rounded(rounded(a @ b) @ c), rounded(a @ rounded(b @ c)))
    )
    assert ours <= 1.5 * source < 0.005 < 0.1 < made


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "hip:gfx942"])
def test_what_lies_in_memory_has_32_bits(target: str) -> None:
    """Where several kernels do it, too."""
    big = [en.TensorSpec(s, "bfloat16") for s in ((32, 4096, 64), (32, 64, 4096), (32, 4096, 64))]
    plan = en.optimize(chain, target, specs=big).plan
    assert len(plan.kernels) > 1 and {b.dtype for b in plan.buffers.values() if b.kind == "temp"} == {"float32"}
    fast = en.optimize(chain, target, specs=big, numerics="fast").plan
    assert fast.cost.seconds <= plan.cost.seconds
    if target != "hip:gfx942":
        assert "bfloat16" in {b.dtype for b in fast.buffers.values() if b.kind == "temp"}


def found(f: Any, *inputs: en.TensorSpec) -> list[str]:
    """What must not be rounded."""
    program = en.trace(f, *inputs)
    graph = egraph.saturate(program).graph
    nodes = legal_nodes(graph, program.compute_dtype, "bfloat16")
    sums, products = may_cancel(graph, nodes)
    assert all(any(n.op == "mul" for n in nodes[c]) for c in products)
    return [show(graph.term(c)) for c in sorted(sums)]


def test_signs_decide() -> None:
    a, b, c = specs()
    positive = [en.TensorSpec(s.shape, s.dtype, range=(0.0, 9.0)) for s in (a, b, c)]
    assert found(chain, a, b, c) == ["Σ[a2] b[a1, a2]·c[a2, a3]"]
    assert found(chain, positive[0], positive[1], c) == [], "|A|·|B·C| ≤ |A·B|·|C|"
    assert found(chain, positive[0], b, c) and found(chain, a, positive[1], c) and found(chain, a, b, positive[2])
    assert found(lambda a, b, c: xp.exp(a) @ b @ c, a, positive[1], c) == []
    assert found(lambda a, b, c: (2 * a @ b) @ c, a, b, c)
    assert found(lambda a, b, c: (a @ xp.maximum(b, 0)) @ c, positive[0], b, c) == []


def test_the_other_way_round() -> None:
    """A·(B·C) as (A·B)·C: now B and C must not be negative."""
    shapes = (64, 1024), (1024, 64), (64, 1024)
    a, b, c = (en.TensorSpec(s, "bfloat16") for s in shapes)
    _, positive_b, positive_c = (en.TensorSpec(s, "bfloat16", range=(0.0, 9.0)) for s in shapes)
    assert found(lambda a, b, c: a @ (b @ c), a, b, c) == ["Σ[a1] a[a0, a1]·b[a1, a2]"]
    assert found(lambda a, b, c: a @ (b @ c), a, positive_b, positive_c) == []
    assert found(lambda a, b, c: a @ (b @ c), a, b, positive_c)


def test_only_operands_of_products_of_matrices() -> None:
    a, b, _ = specs()
    assert found(lambda a, b: xp.sum((a @ b) * 0.5, axis=-1), a, b) == [], "no product of matrices has it"
    q = en.TensorSpec((512, 64), "bfloat16")

    def rowwise(q: Any, k: Any, v: Any, do: Any) -> Any:  # Σ P·(do·v), which is do·(P·v), row by row
        p = xp.softmax(q @ k.mT, axis=-1)
        return xp.sum(p * (do @ v.mT), axis=-1)

    assert found(rowwise, q, q, q, q) == []


def test_weights_of_folds_are_no_differences() -> None:
    """Softmax has no negative weights, but values have: their product with a matrix may cancel under weights as the values do."""
    q, w = en.TensorSpec((4096, 64), "bfloat16"), en.TensorSpec((64, 8), "bfloat16")
    positive = en.TensorSpec((4096, 64), "bfloat16", range=(0.0, 9.0))

    def attention(q: Any, k: Any, v: Any, w: Any) -> Any:
        return (xp.softmax(q @ k.mT, axis=-1) @ v) @ w

    assert found(attention, q, q, q, w) == ["Σ[a3] v[a2, a3]·w[a3, a4]"], (
        "but not what softmax divides: the source rounds the quotient"
    )
    assert found(attention, q, q, positive, w) == []


def test_where_nothing_is_rounded() -> None:
    """Nor is anything else changed there: on a CPU, and where results are wanted in float32."""
    for target, dtype in (("cpu", "bfloat16"), ("cuda:sm_80", "float32")):
        kernels = en.optimize(chain, target, specs=specs(dtype)).plan.kernels
        assert not any(k.wide for k in kernels)
    out32 = en.optimize(lambda a, b, c: xp.astype(a @ b @ c, "float32"), "cuda:sm_80", specs=specs())
    assert not any(k.wide for k in out32.plan.kernels)
