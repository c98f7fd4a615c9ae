"""Products that the source takes in float32: GPUs do not round their computed operands to the program's 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.emulate import host_compiler, run
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.serial import from_json, to_json
from eqsat_neptune.codegen.tile import Contract, Load, walk
from eqsat_neptune.extraction.plan import Plan

import eqsat_neptune as en
from eqsat_neptune import xp
from eqsat_neptune.runtime import available

emulated = pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler for the emulator")


def wide(x: Any) -> Any:
    return xp.astype(x, "float32")


def attention(q: Any, k: Any, v: Any, weights: Callable[[Any, Any], Any]) -> Any:
    """Scores and softmax in float32; `weights` says in which dtype they meet the values."""
    p = xp.softmax(wide(q) @ wide(k).mT / 8, axis=-1)
    return xp.astype(weights(p, v), q.dtype)


def normalised(x: Any) -> Any:
    c = wide(x) - xp.mean(wide(x), axis=-1, keepdims=True)
    return c / xp.sqrt(xp.mean(c * c, axis=-1, keepdims=True) + 1e-5)


# name → (function of x (64, 64) and w (64, 32), is one of its products wide?); all return the dtype of x
PROGRAMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "cast after": (lambda x, w: wide(xp.exp(x)) @ wide(w), True),
    "cast before": (lambda x, w: xp.exp(wide(x)) @ w, True),
    "cast to float64": (lambda x, w: xp.exp(xp.astype(x, "float64")) @ w, True),
    "scaled": (lambda x, w: (wide(x) * 0.3) @ w, True),
    "gated": (lambda x, w: xp.sum(wide(x)[:, :, None] * wide(x)[:, :, None] * wide(w)[None], axis=1), True),
    "two products": (lambda x, w: wide(x @ x) @ wide(w), True),
    "einsum": (lambda x, w: xp.einsum("ik,kd->id", xp.exp(wide(x)), wide(w)), True),
    "tensordot": (lambda x, w: xp.tensordot(xp.exp(wide(x)), wide(w), axes=1), True),
    "masked sum": (
        lambda x, w: xp.sum(xp.where(x[:, :, None] > 0, xp.exp(wide(x))[:, :, None] * wide(w)[None], 0.0), axis=1),
        True,
    ),
    "running sum": (lambda x, w: xp.cumulative_sum(xp.exp(wide(x))[:, :, None] * wide(w)[None], axis=1)[:, -1], True),
    "large number": (lambda x, w: xp.where(x > 0, wide(x), 0.1) @ w, True),
    "inputs": (lambda x, w: wide(x) @ wide(w), False),
    "parts of inputs": (lambda x, w: wide(x)[:, ::2] @ wide(xp.concat([w[:16], w[48:]])), False),
    "selected": (lambda x, w: xp.maximum(wide(x), 0) @ -wide(w), False),
    "masked": (lambda x, w: xp.where(x > 0, wide(x), 0.0) @ wide(w), False),
    "cast back": (lambda x, w: xp.astype(xp.exp(wide(x)), x.dtype) @ w, False),
    "normalised and cast back": (lambda x, w: xp.astype(normalised(x), x.dtype) @ w, False),
    "no product of matrices": (lambda x, w: xp.mean(normalised(x) ** 2, axis=-1, keepdims=True) * wide(w[0]), False),
    "sum in float32": (lambda x, w: xp.sum(xp.exp(x)[:, :, None] * w[None], axis=1, dtype="float32"), False),
    "not used": (lambda x, w: [xp.exp(wide(x)) @ w, x @ w][1], False),
}


def traced(f: Callable[..., Any], dtype: str = "bfloat16") -> Any:
    return en.trace(lambda x, w: xp.astype(f(x, w), x.dtype), en.TensorSpec((64, 64), dtype), en.TensorSpec((64, 32), dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_source_decides(name: str, dtype: str) -> None:
    f, is_wide = PROGRAMS[name]
    program = traced(f, dtype)
    assert program.wide is is_wide
    assert program.renamed({}, {"x": "y"}).wide is is_wide and from_json(to_json(program)) == program
    assert not traced(f, "float32").wide, "nothing has 16 bits"


def test_two_types_of_16_bits() -> None:
    """What is computed of a float16 may be rounded to bfloat16, beside one, and the other way round: only what is read is held."""
    specs = en.TensorSpec((64, 64), "float16"), en.TensorSpec((64, 32), "bfloat16")
    assert not en.trace(lambda x, w: xp.astype(wide(x) @ wide(w), "float16"), *specs).wide
    assert en.trace(lambda x, w: xp.astype(xp.maximum(wide(x), 0) @ wide(w), "float16"), *specs).wide


def test_integers_of_8_bits_are_held() -> None:
    specs = en.TensorSpec((64, 64), "bfloat16"), en.TensorSpec((64, 32), "int8"), en.TensorSpec((32,), "float32")
    assert not en.trace(lambda x, w, s: xp.astype((wide(x) @ wide(w)) * s, "bfloat16"), *specs).wide
    assert en.trace(lambda x, w, s: xp.astype(wide(x) @ (wide(w) * s), "bfloat16"), *specs).wide


def computed(plan: Plan) -> list[bool]:
    """Of each product in a plan: is one of its operands computed?"""
    out = []
    for k in plan.kernels:
        body = list(walk(lower(k, plan.buffers, plan.compute_dtype).body))
        loads = {s.out.id for s in body if isinstance(s, Load)}
        out += [not {s.a.id, s.b.id} <= loads for s in body if isinstance(s, Contract)]
    return out


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "hip:gfx942"])
def test_operands_stay_wide(target: str) -> None:
    """In kernels, and in memory between them; and on the fast units what the inputs are."""
    heads = [en.TensorSpec((2, 512, 64), "bfloat16")] * 3
    slow = en.optimize(lambda *x: attention(*x, lambda p, v: p @ wide(v)), target, specs=heads)
    fast = en.optimize(lambda *x: attention(*x, lambda p, v: xp.astype(p, v.dtype) @ v), target, specs=heads)
    exact = en.optimize(lambda q, k: xp.astype(wide(q) @ wide(k).mT, q.dtype), target, specs=heads[:2])
    assert "contract_plain<" in calls(slow) and "contract<" in calls(slow)
    assert all(k.wide for k in slow.plan.kernels) and any(computed(slow.plan)) and not all(computed(slow.plan))
    for kernel in (fast, exact):
        assert "contract_plain<" not in calls(kernel) and not any(k.wide for k in kernel.plan.kernels)
    assert fast.cost.seconds < slow.cost.seconds, "the price says so"
    assert "computed operands in float32" in str(slow.report()) and "computed operands in float32" not in str(fast.report())
    two = en.optimize(traced(lambda x, w: wide(xp.exp(x) @ xp.exp(x)) @ wide(w)), target)
    assert {b.dtype for b in two.plan.buffers.values() if b.kind == "temp"} <= {"float32"}


def calls(kernel: en.Kernel) -> str:
    """The emitted kernels without what stands before them."""
    return "".join(kernel.source.partition(k.name)[2] for k in kernel.plan.kernels[:1])


def emulated_run(kernel: en.Kernel, **inputs: np.ndarray) -> np.ndarray:
    plan = kernel.plan
    (out,) = run([lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels], plan.buffers, inputs)
    return out["out0"].astype(np.float64)


@emulated
@pytest.mark.parametrize("name", ["cast after", "cast before"])
def test_beyond_float16(name: str) -> None:
    """e^12 is beyond float16, the results are not."""
    program = traced(lambda x, w: PROGRAMS[name][0](x, w) * 1e-3, "float16")
    rng = np.random.default_rng(0)
    x, w = (rng.uniform(*r, s).astype(np.float16) for r, s in (((0.0, 12.0), (64, 64)), ((-1.0, 1.0), (64, 32))))
    want = en.evaluate(program, x, w)
    assert np.exp(x.astype(float)).max() > 65504 > np.abs(want).max()
    got = emulated_run(en.optimize(program, "cuda:sm_80"), x=x, w=w)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).mean())


@emulated
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_as_exact_as_float32(target: str) -> None:
    """A product that cancels all but 2^-9 of its operands: rounded to bfloat16, they would leave nothing."""
    program = traced(lambda x, w: (1.0 + wide(x) * 0.001) @ wide(w))
    assert program.wide
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (64, 64)).astype(ml_dtypes.bfloat16)
    w = rng.choice([-1.0, 1.0], (32, 32))
    w = np.concatenate([w, -w]).astype(ml_dtypes.bfloat16)  # columns add up to 0
    want = en.evaluate(program, x, w)
    got = emulated_run(en.optimize(program, target), x=x, w=w)
    assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="makes arrays on the GPU")
    if available() or not torch.cuda.is_available():
        pytest.skip(available() or "PyTorch sees no GPU")
    torch.manual_seed(0)
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*(n for n, (_, is_wide) in PROGRAMS.items() if is_wide), "attention", "chain"])
def test_on_a_gpu(torch: Any, name: str) -> None:
    """Extents that tiles do not divide, and operands that only float32 tells apart."""

    def draw(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").to(torch.bfloat16)

    arrays = [draw(64, 64), draw(64, 32)]
    program = traced(PROGRAMS[name][0]) if name in PROGRAMS else None
    if name == "attention":
        arrays = [draw(2, 1000, 64) for _ in range(3)]
        program = en.trace(
            lambda *x: attention(*x, lambda p, v: p @ wide(v)), *[en.TensorSpec(tuple(x.shape), "bfloat16") for x in arrays]
        )
    elif name == "chain":  # the first product's rows are all but equal, the last one takes their differences
        two = torch.eye(72, device="cuda") - torch.eye(72, device="cuda").roll(1, 1)
        arrays = [two.repeat(14, 1)[:1000].to(torch.bfloat16), draw(72, 200) + 100 * draw(1, 200), draw(200, 72)]
        program = en.trace(
            lambda a, b, c: xp.astype((wide(a) @ wide(b)) @ wide(c), "bfloat16"),
            *[en.TensorSpec(tuple(x.shape), "bfloat16") for x in arrays],
        )
    assert program is not None and program.wide
    kernel = en.optimize(program, "cuda")
    out = kernel(*arrays)
    want = torch.from_numpy(
        np.asarray(en.evaluate(program, *[x.float().cpu().numpy().astype(ml_dtypes.bfloat16) for x in arrays]))
    )
    assert torch.isfinite(out).all()
    assert ((out.double().cpu() - want).norm() / want.norm()).item() < 4e-3
