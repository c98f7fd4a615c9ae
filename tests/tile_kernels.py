"""Kernels written by hand, run by the CPU backend and compared with float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from eqsat_neptune.codegen.check import check
from eqsat_neptune.codegen.cpu import CpuKernel
from eqsat_neptune.codegen.cpu.kernel import prepare
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Plan, Store

from eqsat_neptune import terms as T
from eqsat_neptune.reference import Env, evaluate_term
from eqsat_neptune.terms import Affine, Monoid, Term, add, axis_index, inp, mul, num, sub, un, var

Roles = Mapping[str, tuple[str, int]]  # axis → (role, tile); the tile of a whole axis does not matter
Outputs = Mapping[str, tuple[Term, tuple[str, ...]]]

SOFT = Monoid(("max",), (((0, un("exp", sub(var("r0"), var("R0")))),),))  # (max s; Σ exp(s − max)·x)


def read(name: str, *axes: str | Affine) -> Term:
    return inp(name, tuple(axis_index(a) if isinstance(a, str) else a for a in axes))


def affine(const: int = 0, **terms: int) -> Affine:
    return Affine(const, tuple(terms.items()))


def quotient(x: Term, y: Term) -> Term:
    return mul(x, un("recip", y))


# variance about a carried mean: r0 = mean, x0 = Σ1, x1 = Σ(c − r), x2 = Σ(c − r)²
_D = sub(var("r0"), var("R0"))
MOMENTS = Monoid(
    (("mean", 0),),
    (((0, num(1.0)),), ((1, num(1.0)), (0, _D)), ((2, num(1.0)), (1, mul(2.0, _D)), (0, mul(_D, _D)))),
)


def moments(component: int, axis: str, x: Term) -> Term:
    """Component 0 is the mean; 1: the count; 3: Σ(x − mean)²."""
    return T.fold(MOMENTS, component, axis, [x, num(1.0), num(0.0), num(0.0)])


def make_plan(
    kernels: list[tuple[Outputs, Roles]],
    extents: Mapping[str, int],
    inputs: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str] | None = None,
    compute: str = "float64",
) -> Plan:
    """A kernel writes its outputs along their axes; those that a later kernel reads are temporaries."""
    dtypes = dict(dtypes or {})
    later = [{n for o, _ in kernels[i + 1 :] for t, _ in o.values() for n in inputs_of(t)} for i in range(len(kernels))]
    buffers = {n: Buffer(n, x.shape, x.dtype.name, "input") for n, x in inputs.items()}
    out = []
    for i, (outputs, roles) in enumerate(kernels):
        stores = []
        for name, (term, axes) in outputs.items():
            kind = "temp" if name in later[i] else "output"
            buffers[name] = Buffer(name, tuple(extents[a] for a in axes), dtypes.get(name, compute), kind, axes)
            stores.append(Store(name, term, tuple(map(axis_index, axes))))
        axes_ = {
            a: Axis(extents[a], extents[a] if role == "whole" else max(1, min(tile, extents[a])), role)
            for a, (role, tile) in roles.items()
        }
        out.append(Kernel(f"k{i}", tuple(stores), axes_, dict(extents)))
    return Plan(tuple(out), buffers, compute)


def inputs_of(t: Term) -> set[str]:
    return {x.attr[0] for x in T.postorder([t]) if x.op == "input"}


def run(plan: Plan, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs, poisoned before."""
    for k in plan.kernels:
        check(prepare(check(lower(k, plan.buffers, plan.compute_dtype))))
    outputs = {}
    for b in plan.buffers.values():
        if b.kind == "output":
            outputs[b.name] = np.full(b.shape, 77, b.dtype)
            if outputs[b.name].dtype.kind == "f":
                outputs[b.name].fill(np.nan)
    return CpuKernel(plan, None).run(dict(inputs), outputs)  # type: ignore[arg-type]


def verify(
    outputs: Outputs,
    roles: Roles,
    extents: Mapping[str, int],
    inputs: Mapping[str, np.ndarray],
    block: Mapping[str, int] | None = None,
    tolerance: float = 1e-11,
    least: float = 1e-300,
) -> dict[str, np.ndarray]:
    """Run one kernel in float64 and compare with the reference interpreter."""
    plan = make_plan([(outputs, roles)], extents, inputs)
    got = run(plan, inputs)
    env = Env({a: n for a, n in extents.items() if "." not in a}, inputs, block)
    for name, (term, axes) in outputs.items():
        close(got[name], env.expand(evaluate_term(term, env), axes), tolerance, str(plan.kernels[0]), least)
    return got


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-11, message: str = "", least: float = 1e-300) -> None:
    """Error relative to the largest value, or to `least` if that is larger; NaN and inf in the same places."""
    got, want = np.asarray(got, np.float64), np.broadcast_to(np.asarray(want, np.float64), np.shape(got))
    assert np.array_equal(np.isnan(got), np.isnan(want)), (
        f"NaN where there should be none, or none where there should be\n{message}"
    )
    finite = np.isfinite(want)
    assert np.array_equal(got[~finite], want[~finite], equal_nan=True), message
    scale = max(least, float(np.abs(want[finite]).max(initial=0.0)))
    error = float(np.abs(got[finite] - want[finite]).max(initial=0.0)) / scale
    assert error <= tolerance, f"relative error {error}\n{message}"


__all__ = ["SOFT", "add", "affine", "close", "make_plan", "moments", "quotient", "read", "run", "verify"]
