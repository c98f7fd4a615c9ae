"""Every scalar function of the terms, in every backend and analysis: what adding one must provide."""

from __future__ import annotations

import math

import numpy as np
import pytest
from eqsat_neptune.codegen.cuda import emulate
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

import eqsat_neptune as en
from eqsat_neptune import reference
from eqsat_neptune.egraph import saturate
from eqsat_neptune.program import Input, Output, Program
from eqsat_neptune.terms import BINARY, PREDICATES, UNARY, Term, axis_index, bi, inp, num, un, where
from eqsat_neptune.testing import check_graph

N = 97
AT = (axis_index("a0"),)
INPUTS = (Input("x", (N,), "float32"), Input("y", (N,), "float32"), Input("z", (N,), "float32", (0.25, 0.75)))
X, Y, Z = (inp(i.name, AT) for i in INPUTS)


def applied(f: str, *args: Term) -> Term:
    return un(f, args[0]) if f in UNARY else bi(f, *args[:2])


def dtype(f: str) -> str:
    return "bool" if f in PREDICATES else "float32"


def arrays() -> dict[str, np.ndarray]:
    """Both signs, zeros, integers, equal pairs, and what lies outside the domain of some function."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-4, 4, (2, N)).astype(np.float32)
    x[:9], y[:9] = [-2, -1, -0.5, 0, 0.5, 1, 2, 3, 2.5], [2, -1, 3, 0, 0.5, -2, 2, 1, 2]
    return {"x": x, "y": y, "z": rng.uniform(0.25, 0.75, N).astype(np.float32)}


def same(got: np.ndarray, f: str, x: np.ndarray, y: np.ndarray) -> None:
    args = [a.astype(np.float64) for a in (x, y)]
    with np.errstate(all="ignore"):
        want = reference.UN[f](args[0]) if f in UNARY else reference.BI[f](*args)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=4e-6, atol=1e-6, err_msg=f)


@pytest.mark.parametrize("f", [*UNARY, *BINARY])
def test_on_the_cpu(f: str) -> None:
    a = arrays()
    outs = tuple(Output(applied(f, *args), (("a0",),), (N,), dtype(f)) for args in ((X, Y), (Z, Y)))
    k = en.optimize(Program("f", INPUTS, outs, {"a0": N}, True), rules=())
    for got, x in zip(k(*a.values()), ("x", "z")):
        same(got, f, a[x], a["y"])


@pytest.mark.parametrize("f", [*UNARY, *BINARY])
def test_what_the_analyses_say_of_it(f: str) -> None:
    """Bounds and facts hold for plain, bounded and masked arguments."""
    masked = where(bi("lt", Y, num(0.0)), X, num(-math.inf))
    terms = [applied(f, *args) for args in ((X, Y), (Z, Y), (Z, Z), (masked, masked), (masked, Z), (un("exp", masked), Z))]
    program = Program("f", INPUTS, tuple(Output(t, (("a0",),), (N,), dtype(f)) for t in terms), {"a0": N})
    saturated = saturate(program)
    for seed in range(2):
        verdict = check_graph(saturated, program, seed)
        assert verdict, verdict.counterexample


@pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler on this machine")
def test_emitted() -> None:
    """One kernel with all functions, run in the emulator."""
    names = [*UNARY, *BINARY]
    buffers = {i.name: Buffer(i.name, i.shape, i.dtype, "input") for i in INPUTS}
    buffers |= {f"{f}_": Buffer(f"{f}_", (N,), dtype(f), "output") for f in names}
    stores = tuple(Store(f"{f}_", applied(f, X, Y), AT) for f in names)
    kernel = Kernel("k0", stores, {"a0": Axis(N, 32, "grid")}, {"a0": N}, {"warps": 4, "stages": 1})
    a = arrays()
    (out,) = emulate.run([lower(kernel, buffers)], buffers, a)
    for f in names:
        same(out[f"{f}_"], f, a["x"], a["y"])
