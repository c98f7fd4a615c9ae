"""Shapes and values that break compilers: the ten attention operators, masks of every kind, norms and chains of reductions.

Whatever the shape, type, layout or value, a kernel gives what the source gives in float64 (NaN where that is NaN, the same infinity
where that is infinite), or an EqsatError that says why not.  Where float64 is finite and the source evaluated step by step in float32
is good, ours is good.  A key that a −inf mask takes out may be skipped, so what its value would do (0·inf, 0·NaN) may be missing.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda import emulate
from eqsat_neptune.codegen.cuda.arch import emulator_arch
from eqsat_neptune.codegen.cuda.emit import emit
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.cost_models import model_for
from eqsat_neptune.extraction.extract import extract
from sweeps import some

import eqsat_neptune as en
from eqsat_neptune import egraph, xp
from eqsat_neptune.errors import InputError, ShapeError
from eqsat_neptune.forms import kernel_values
from eqsat_neptune.program import Program
from eqsat_neptune.programs import CASES
from eqsat_neptune.runtime.cpu import CpuRunner
from eqsat_neptune.scores import may_be_masked
from eqsat_neptune.targets import parse_target
from eqsat_neptune.testing import check_graph
from eqsat_neptune.testing.masked import (
    BY_INPUT,
    BY_POSITION,
    added,
    bottom_right_causal,
    chosen,
    gradient,
    gradient_of_values,
    large_but_finite,
    logsumexp_written_out,
    masks,
)
from eqsat_neptune.testing.small_tiles import SmallTilesOnCpu, SmallTilesOnGpu, plans

OPERATORS = [c.name for c in CASES.values() if c.section == "A"]
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2, "float8_e4m3fn": 0.1, "float8_e5m2": 0.2}
NEGLIGIBLE = 1e-3  # of a norm: below it errors count absolutely (terms of size 1 and more cancelled)
slow = pytest.mark.slow
needs_compiler = pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler for the emulator")

Arrays = list[np.ndarray]
Sets = list[tuple[str, Arrays]]  # named inputs


# ------------------------------------------------------------------ comparison


def agree(got: Any, p: Program, arrays: Arrays, what: str, tolerance: float, *, skipped: bool = False) -> None:
    """Do results agree with the source?  skipped: a masked key's value may be missing."""
    with np.errstate(all="ignore"):
        want, step = (as_tuple(en.evaluate(p, *arrays, dtype=d)) for d in ("float64", "float32"))
    for n, (g, w, s) in enumerate(zip(as_tuple(got), want, step, strict=True)):
        g = np.asarray(g)
        assert g.shape == w.shape, f"{what}, output {n}: shape"
        if g.dtype.kind in "iub":
            wrong = (g != w) & (g != s)  # at 1e15 float32 has ties that float64 has not
            assert not wrong.any(), f"{what}, output {n}: {wrong.sum()} of {w.size} differ"
            continue
        with np.errstate(all="ignore"):
            if g.dtype.itemsize < 4:  # what does not fit the output's type is infinite (or NaN, where that has no infinity)
                w, s = (x.astype(g.dtype).astype(np.float64) for x in (w, s))
            g, s = g.astype(np.float64), s.astype(np.float64)
            good = np.isfinite(w) & np.isfinite(s)
            good &= np.abs(s - w) <= 1e-2 * np.abs(w[good]).max(initial=0.0) + 1e-300
        assert skipped or not (np.isnan(w) & ~np.isnan(g)).any(), f"{what}, output {n}: no NaN where the source has one"
        infinite = np.isinf(w) & np.isinf(s)
        assert skipped or np.array_equal(g[infinite], w[infinite]), f"{what}, output {n}: another infinity"
        assert np.isfinite(g[good]).all(), f"{what}, output {n}: {np.sum(~np.isfinite(g[good]))} of {good.sum()} not finite"
        size = max(np.linalg.norm(w[good]), NEGLIGIBLE)
        error, theirs = (float(np.linalg.norm(x[good] - w[good])) / size for x in (g, s))
        assert error <= max(tolerance, 3 * theirs), f"{what}, output {n}: error {error:.2g} (float32 step by step: {theirs:.2g})"


def as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


# ------------------------------------------------------------------ running


def traced(fn: Callable[..., Any], specs: Sequence[en.TensorSpec]) -> Program:
    p = en.trace(fn, *specs)
    assert isinstance(p, Program)
    return p


def on_cpu(fn: Callable[..., Any], specs: Sequence[en.TensorSpec], sets: Sets, *, skips: tuple[str, ...] = ()) -> None:
    """All sets of inputs, by the plan of this machine and by plans of small tiles; no warning reaches the user."""
    p = traced(fn, specs)
    tolerance = max(TOLERANCE[s.dtype] for s in specs if s.dtype in TOLERANCE)
    for q in (*plans(p, SmallTilesOnCpu()), en.optimize(p).plan):
        run = CpuRunner(p, q)
        for name, arrays in sets:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                got = run(arrays, None)
            agree(got, p, arrays, f"{name}\n{q}", tolerance, skipped=name in skips)


def emulated(fn: Callable[..., Any], specs: Sequence[en.TensorSpec], sets: Sets, *, skips: tuple[str, ...] = ()) -> None:
    """The same by emitted CUDA text in the emulator."""
    p = traced(fn, specs)
    tolerance = max(1e-5, *(TOLERANCE[s.dtype] for s in specs if s.dtype in TOLERANCE))
    for q in plans(p, SmallTilesOnGpu()):
        source = emit([lower(k, q.buffers, q.compute_dtype) for k in q.kernels], q.buffers, emulator_arch())
        with tempfile.TemporaryDirectory() as folder:
            library = None
            for name, arrays in sets:
                inputs = {i.name: x for i, x in zip(p.inputs, arrays)}
                library = library or emulate.build(source, q.buffers, inputs, folder)
                (out,) = emulate.launch(library, source, q.buffers, inputs)
                got = [out[f"out{n}"] for n in range(len(p.outputs))]
                agree(got, p, arrays, f"{name}\n{q}", tolerance, skipped=name in skips)
            if library is not None:
                emulate.unload(library)


# ------------------------------------------------------------------ shapes of the operators


@dataclass(frozen=True)
class Shape:
    """b batches of hkv heads, each for g query heads; nq queries and nk keys of d elements, values of e."""

    b: int = 1
    hkv: int = 2
    g: int = 2
    nq: int = 19
    nk: int = 19
    d: int = 8
    e: int = 8

    def specs(self, operator: str, dtype: str = "float32") -> list[en.TensorSpec]:
        g = self.g if operator.partition("_")[2] in ("gqa", "softcap", "windowed") else 1
        rows = 1 if operator.startswith("decode") else self.nq
        q, k, v = (self.b, self.hkv * g, rows, self.d), (self.b, self.hkv, self.nk, self.d), (self.b, self.hkv, self.nk, self.e)
        slopes = [(self.hkv * g,)] if operator.endswith("alibi") else []
        return [en.TensorSpec(s, dtype) for s in (q, k, v, *slopes)]


SHAPES = {
    "ones": Shape(1, 1, 1, 1, 1, 1, 1),
    "one key": Shape(nq=1, nk=1),
    "one query": Shape(nq=1, nk=23),
    "one key of many": Shape(nq=7, nk=1),
    "two": Shape(nq=2, nk=2),
    "d=1": Shape(d=1),
    "e=1": Shape(e=1),
    "one head": Shape(hkv=1, g=1),
    "batch of 3": Shape(b=3),
    "off the tile": Shape(nq=33, nk=65),
    "more queries": Shape(nq=65, nk=33),
    "longer": Shape(nq=130, nk=257, d=4, e=4),
    "few queries": Shape(nq=5, nk=31),
    "few keys": Shape(nq=31, nk=5),
    "primes": Shape(2, 3, 5, 7, 11, 13, 17),
    "all alike": Shape(4, 4, 4, 4, 4, 4, 4),
    **{f"head dim {d}": Shape(nq=5, nk=9, d=d, e=d) for d in (16, 40, 64, 80, 96, 128, 192, 256, 512)},
    "192 and 128": Shape(nq=5, nk=9, d=192, e=128),
    "8 and 24": Shape(d=8, e=24),
    "groups of 3": Shape(g=3),
    "groups of 6": Shape(hkv=1, g=6),
    "groups of 12": Shape(hkv=1, g=12),
    "no batch": Shape(b=0),
    "no queries": Shape(nq=0),
    "d=0": Shape(d=0),
    "e=0": Shape(e=0),
}
EVERY = [(o, s) for i, o in enumerate(OPERATORS) for j, s in enumerate(SHAPES)]
EMULATED = [(o, s) for i, o in enumerate(OPERATORS) for j, s in enumerate(SHAPES) if (i + j) % 4 == 3]  # a quarter: it takes long
QUICK = {(o, s) for i, o in enumerate(OPERATORS) for j, s in enumerate(SHAPES) if (i + j) % len(OPERATORS) == 0 or s == "ones"}


def drawn(specs: Sequence[en.TensorSpec], seed: int = 1, scale: float = 1.0) -> Arrays:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(s.shape) * scale).astype(np.dtype(s.dtype)) for s in specs]


@pytest.mark.parametrize("operator, shape", some(EVERY, QUICK))
def test_shapes(operator: str, shape: str) -> None:
    specs = SHAPES[shape].specs(operator)
    p = traced(CASES[operator].function("small"), specs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = en.optimize(p)
        arrays = drawn(specs)
        arrays[3:] = [0.1 * slopes for slopes in arrays[3:]]
        got = kernel(*arrays)
    agree(got, p, arrays, str(kernel.plan), TOLERANCE["float32"])


@needs_compiler
@pytest.mark.parametrize(
    "operator, shape",
    some(
        [(o, s) for o, s in EMULATED if SHAPES[s].b * SHAPES[s].nq * SHAPES[s].e],
        [x for x in EMULATED if x[1] == "groups of 3"][1:3],
    ),
)
def test_shapes_emulated(operator: str, shape: str) -> None:
    specs = SHAPES[shape].specs(operator, "bfloat16")
    emulated(CASES[operator].function("small"), specs, [("normal", drawn(specs))])


@pytest.mark.parametrize("operator", OPERATORS)
def test_no_keys_is_an_error(operator: str) -> None:
    """A maximum over nothing has no value."""
    with pytest.raises(ShapeError, match="max over an empty axis"):
        en.trace(CASES[operator].function("small"), *Shape(nk=0).specs(operator))


# ------------------------------------------------------------------ values of the operators


def of_attention(specs: Sequence[en.TensorSpec]) -> Sets:
    """Queries, keys and values with something in them."""

    def changed(i: int, f: Callable[[np.ndarray], Any]) -> Arrays:
        arrays = drawn(specs, 3)
        with np.errstate(all="ignore"):
            arrays[i] = np.asarray(f(arrays[i].astype(np.float32))).astype(arrays[i].dtype)
        return arrays

    def put(i: int, place: tuple[Any, ...], value: float) -> Arrays:
        def f(x: np.ndarray) -> np.ndarray:
            x[place] = value
            return x

        return changed(i, f)

    large = [100 * x for x in drawn(specs, 3)[:2]] + drawn(specs, 3)[2:]
    middle = min(3, specs[1].shape[-2] - 1)  # type: ignore[operator]
    sets = [
        ("normal", drawn(specs, 3)),
        ("logits of ±1e4", large),
        ("equal logits", changed(0, lambda x: 0 * x)),
        ("tiny", changed(0, lambda x: 1e-38 * x)),
        ("NaN in a query", put(0, (..., 0, slice(None)), np.nan)),
        ("NaN in the last key", put(1, (..., -1, 0), np.nan)),
        ("NaN in a key", put(1, (..., middle, 0), np.nan)),
        ("NaN in a value", put(2, (..., 0, 0), np.nan)),
        ("inf in a value", put(2, (..., 0, 0), np.inf)),
        ("-inf in a value", put(2, (..., 0, 0), -np.inf)),
        ("inf in a key", put(1, (..., 0, 0), np.inf)),
        ("inf in a query", put(0, (..., -1, 0), np.inf)),
    ]
    if specs[0].dtype in ("float32", "bfloat16"):
        sets += [("values of 1e30", changed(2, lambda x: 1e30 * x)), ("keys of 1e15", changed(1, lambda x: 1e15 * x))]
    return sets


IN_VALUES = ("NaN in a value", "inf in a value", "-inf in a value")
RAGGED = {"square": Shape(nq=21, nk=21, d=4, e=4), "more queries": Shape(nq=29, nk=18, d=4, e=4)}


@pytest.mark.parametrize(
    "operator, shape", some([(o, s) for s in RAGGED for o in OPERATORS], {(o, "square") for o in OPERATORS[4:8]})
)
def test_values(operator: str, shape: str) -> None:
    specs = RAGGED[shape].specs(operator)
    skips = IN_VALUES if operator == "prefill_windowed" else ()  # the window leaves the first key behind
    on_cpu(CASES[operator].function("small"), specs, of_attention(specs), skips=skips)


@slow
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_values_of_every_type(operator: str, dtype: str) -> None:
    specs = RAGGED["square"].specs(operator, dtype)
    sets = of_attention(specs)
    if dtype == "float8_e4m3fn":  # it has no infinity, and 448 is its largest value
        sets = [(n, a) for n, a in sets if "inf" not in n and "1e4" not in n]
    on_cpu(CASES[operator].function("small"), specs, sets, skips=IN_VALUES if operator == "prefill_windowed" else ())


@needs_compiler
@pytest.mark.parametrize(
    "operator, dtype",
    some(
        [(o, d) for d in ("bfloat16", "float32", "float16") for o in OPERATORS],
        {("prefill_causal", "bfloat16")},
    ),
)
def test_values_emulated(operator: str, dtype: str) -> None:
    specs = Shape(nq=21, nk=37, d=16, e=16).specs(operator, dtype)
    skips = IN_VALUES if operator == "prefill_windowed" else ()
    emulated(CASES[operator].function("small"), specs, of_attention(specs), skips=skips)


# ------------------------------------------------------------------ masks


SIZES = [(11, 27), (27, 11)]


@pytest.mark.parametrize("nq, nk", SIZES)
@pytest.mark.parametrize("fn", BY_POSITION, ids=lambda f: f.__name__)
def test_masks_by_position(fn: Callable[..., Any], nq: int, nk: int) -> None:
    specs = [en.TensorSpec((2, n, 4)) for n in (nq, nk, nk)]
    on_cpu(fn, specs, [("normal", drawn(specs)), ("large", drawn(specs, scale=30))])


@pytest.mark.parametrize("nq, nk", SIZES)
@pytest.mark.parametrize("fn", some(BY_INPUT, [*BY_INPUT[:3], gradient_of_values]))
def test_masks_by_input(fn: Callable[..., Any], nq: int, nk: int) -> None:
    specs = [en.TensorSpec((2, n, 4)) for n in (nq, nk, nk)]
    on_cpu(fn, [*specs, en.TensorSpec((nq, nk))], [(name, [*drawn(specs), m]) for name, m in masks(nq, nk)])


@needs_compiler
@pytest.mark.parametrize("nq, nk", some([(11, 43), (43, 11)]))
@pytest.mark.parametrize("fn", some([*BY_POSITION, *BY_INPUT], [bottom_right_causal, logsumexp_written_out, gradient_of_values]))
def test_masks_emulated(fn: Callable[..., Any], nq: int, nk: int) -> None:
    specs = [en.TensorSpec((2, n, 16), "bfloat16") for n in (nq, nk, nk)]
    if fn in BY_POSITION:
        emulated(fn, specs, [("normal", drawn(specs)), ("large", drawn(specs, scale=30))])
    else:
        # with one key the gradient is 0, as a difference of products that are rounded to 16 bits
        sets = [(name, [*drawn(specs), m]) for name, m in masks(nq, nk) if fn is not gradient or name != "one key a row"]
        emulated(fn, [*specs, en.TensorSpec((nq, nk))], sets)


def test_scores_may_be_masked_and_factors_may_not() -> None:
    specs = [en.TensorSpec((5, 4)), en.TensorSpec((7, 4)), en.TensorSpec((7, 4)), en.TensorSpec((5, 7))]
    names = {fn.__name__: may_be_masked(p, [o.term for o in p.outputs]) for fn in BY_INPUT for p in [traced(fn, specs)]}
    assert all(found <= {"m"} for found in names.values())
    assert {n for n, found in names.items() if not found} == {"chosen", "large_but_finite"}, "a comparison is no exponential"
    bounded = traced(added, [*specs[:3], en.TensorSpec((5, 7), range=(-1e4, 0.0))])
    assert not may_be_masked(bounded, [o.term for o in bounded.outputs])


SCORED = ["softmax", "log_softmax", "logsumexp", "cross_entropy", "softmax_backward", "sink_attention"]


@pytest.mark.parametrize("name", [*SCORED, *(f.__name__ for f in BY_INPUT if f not in (chosen, large_but_finite))])
def test_every_node_agrees_where_scores_are_masked(name: str) -> None:
    """Not only the chosen form: no rule may rest on a score's being finite."""
    if name in CASES:
        fn, specs = CASES[name].function("small"), CASES[name].specs("small", "float64")
    else:
        fn = next(f for f in BY_INPUT if f.__name__ == name)
        specs = tuple(en.TensorSpec(s, "float64") for s in ((9, 4), (13, 4), (13, 4), (9, 13)))
    p = traced(fn, specs)
    masked = may_be_masked(p, [o.term for o in p.outputs])
    assert masked
    saturated = egraph.saturate(p, splittable=[a for a, n in p.axes.items() if n > 6])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        arrays = {}
        for i in p.inputs:
            x = rng.standard_normal(i.shape) if i.dtype == "float64" else rng.integers(0, 3, i.shape)
            if i.name in masked:
                x = np.where(rng.random(i.shape) < 0.4, -np.inf, x)
                x[:1] = -np.inf
            arrays[i.name] = x
        assert check_graph(saturated, p, arrays=arrays)


# ------------------------------------------------------------------ rows: norms and chains of reductions

ROWS = [
    "softmax", "log_softmax", "logsumexp", "logsumexp_sugar", "variance", "layernorm", "l2_normalize", "cross_entropy", "rmsnorm_linear",
    "softmax_sugar", "softmax_backward", "standard_deviation", "layernorm_sugar", "rmsnorm_quantize", "running_mean", "ntrans",
    "layernorm_linear", "qknorm", "kmeans_assign", "kernel_regression", "topk_gating", "top2_gating", "nearest_neighbours",
    "off_by_one_attention", "sink_attention", "sigmoid_attention", "differential_attention", "cross_entropy_linear", "gated_mlp",
    "swiglu_linear", "rmsnorm_diamond",
]  # fmt: skip
QUICK_ROWS = ROWS[:9]


def rows(shape: tuple[int, int]) -> Iterator[tuple[str, np.ndarray]]:
    n, m = shape
    rng = np.random.default_rng(2)
    z = rng.standard_normal(shape).astype(np.float32)

    def put(row: Any, column: Any, value: float) -> np.ndarray:
        x = z.copy()
        x[row, column] = value
        return x

    yield "normal", z
    yield "a row of -inf", put(1, slice(None), -np.inf)
    yield "all -inf", put(slice(None), slice(None), -np.inf)
    yield "-inf first", put(slice(None), slice(0, min(9, m - 1)), -np.inf)
    yield "-inf last", put(slice(None), slice(min(9, m - 1), None), -np.inf)
    yield "one left", np.where(np.arange(m) == rng.integers(0, m, (n, 1)), z, -np.inf).astype(np.float32)
    yield "NaN", put(1, 2, np.nan)
    yield "NaN last", put(1, -1, np.nan)
    yield "inf", put(1, 2, np.inf)
    yield "two infs", put(1, [1, 2], np.inf)
    yield "±1e4", 1e4 * z
    yield "1e15", 1e15 * z
    yield "zeros", 0 * z
    yield "-0", -0.0 * np.abs(z)
    yield "constant", 0 * z + np.float32(3.3)
    yield "1000 ± 1e-3", 1000 + np.float32(1e-3) * z
    yield "-1e4", 0 * z - np.float32(1e4)
    yield "an outlier", put(slice(None), 0, 1e6)


def of_rows(name: str, specs: Sequence[en.TensorSpec]) -> Sets:
    """The first input's last axis as rows; the others as the case draws them."""
    rest = CASES[name].inputs("small", np.random.default_rng(0), specs[0].dtype)[1:]
    shape = specs[0].shape
    sets = []
    with np.errstate(all="ignore"):
        for what, x in rows((int(np.prod(shape[:-1])), shape[-1])):  # type: ignore[arg-type]
            if what != "1e15" or specs[0].dtype == "float32":
                sets.append((what, [x.reshape(shape).astype(np.dtype(specs[0].dtype)), *rest]))
    return sets


@pytest.mark.parametrize("name", some(ROWS, QUICK_ROWS))
def test_rows(name: str) -> None:
    specs = CASES[name].specs("small")
    sets = of_rows(name, specs)
    if name == "off_by_one_attention":  # s is rounded in two ways on two ways to the exponential, which shows from 1e8 on
        sets = [(n, a) for n, a in sets if n != "1e15"]
    on_cpu(CASES[name].function("small"), specs, sets)


@pytest.mark.parametrize(
    "name, dtype",
    some(
        [
            (n, d)
            for d in ("float64", "float16", "bfloat16")
            for n in (*QUICK_ROWS, "layernorm_linear", "gated_mlp", "swiglu_linear")
        ],
        {("layernorm", "bfloat16"), ("layernorm_linear", "bfloat16"), ("log_softmax", "float16")},
    ),
)
def test_rows_of_every_type(name: str, dtype: str) -> None:
    specs = CASES[name].specs("small", dtype)
    on_cpu(CASES[name].function("small"), specs, of_rows(name, specs))


@needs_compiler
@pytest.mark.parametrize(
    "name, dtype",
    some(
        [*((n, "float32") for n in ROWS), *((n, "bfloat16") for n in QUICK_ROWS)],
        {("layernorm", "float32"), ("softmax", "bfloat16")},
    ),
)
def test_rows_emulated(name: str, dtype: str) -> None:
    specs = CASES[name].specs("small", dtype)
    emulated(CASES[name].function("small"), specs, of_rows(name, specs))


@pytest.mark.parametrize("spread", some([1e-3, 1e-2, 1.0], [1e-3]))
def test_a_variance_far_from_zero(spread: float) -> None:
    """Welford's form, never the difference of two large sums.  A running mean of 1000 is good to 6e-5 (of the difference of two
    sums nothing would be left), which counts beside the spread; two passes are as good as they are in float32."""
    x = (1000 + spread * np.random.default_rng(0).standard_normal((3, 5003))).astype(np.float32)
    for fn in (lambda x: xp.var(x, axis=-1), lambda x: xp.std(x, axis=-1), lambda x: xp.layer_norm(x, eps=0.0)):
        p = traced(fn, [en.TensorSpec(x.shape)])
        want, step = en.evaluate(p, x), en.evaluate(p, x, dtype="float32")
        theirs = np.linalg.norm(step - want) / np.linalg.norm(want)
        for q in (*plans(p, SmallTilesOnCpu()), en.optimize(p).plan):
            (got,) = CpuRunner(p, q)([x], None)
            running = 0.1 * 1000 * np.finfo(np.float32).eps / spread
            assert np.linalg.norm(got - want) / np.linalg.norm(want) <= max(2e-6, 3 * theirs, running), str(q)


# ------------------------------------------------------------------ how inputs lie in memory


def layouts(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "Fortran order", np.asfortranarray(x)
    yield "negative strides", np.ascontiguousarray(x[..., ::-1])[..., ::-1]
    yield "rows backwards", np.ascontiguousarray(x[::-1])[::-1]
    yield "every other", np.repeat(x, 2, axis=-1)[..., ::2]
    large = np.zeros([n + 3 for n in x.shape], x.dtype)
    window = large[tuple(slice(1, n + 1) for n in x.shape)]
    window[...] = x
    yield "a window", window
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    yield "not aligned", unaligned
    yield "broadcast", np.broadcast_to(x[:1], x.shape)
    yield "broadcast rows", np.broadcast_to(x[..., :1], x.shape)
    fixed = x.copy()
    fixed.setflags(write=False)
    yield "read-only", fixed


@pytest.mark.parametrize("dtype", some(["float32", "bfloat16"]))
@pytest.mark.parametrize("operator", some(OPERATORS, {"prefill_alibi", "decode_gqa"}))
def test_layouts(operator: str, dtype: str) -> None:
    specs = Shape(nq=21, nk=21).specs(operator, dtype)
    p = traced(CASES[operator].function("small"), specs)
    kernel = en.optimize(p)
    for laid in zip(*(layouts(x) for x in drawn(specs))):
        arrays = [x for _, x in laid]
        before = [x.copy() for x in arrays]
        agree(kernel(*arrays), p, arrays, laid[0][0], TOLERANCE[dtype])
        assert all(np.array_equal(x, y) for x, y in zip(arrays, before)), "inputs are only read"


# ------------------------------------------------------------------ positions that the compiler made


def rolled_and_widened(x: Any) -> Any:
    a = xp.cumulative_sum(x, axis=0)
    return xp.roll(a, -2), xp.concat([a, a[:, 0:1]], axis=1)


def tiled_backwards(x: Any) -> Any:
    a = xp.tile(xp.reshape(x, (15, 4)), (2, 2))
    return a[::-2], a


def repeated_and_continued(x: Any) -> Any:
    a = xp.repeat(xp.softmax(x, axis=1), 2, axis=0)
    return xp.concat([a, a[:1]], axis=0), a


LAYOUTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    # a view leaves what it reads, and the positions computed there are no positions
    "roll of all": (lambda x: xp.roll(x, 1), (2, 3)),
    "rotated rows": (lambda x: xp.concat([xp.reshape(x, (6, 4))[1:], xp.reshape(x, (6, 4))[:1]]), (2, 3, 4)),
    "roll of a repetition": (lambda x: xp.roll(xp.repeat(x, 2, axis=0), -1, axis=0), (5,)),
    "roll of a column": (lambda x: xp.roll(xp.reshape(x, (21, 1)), -3, axis=0), (3, 7)),
    # the axis that positions run along has another step in memory, or is a part of a dimension
    "pad of a reshape": (lambda x: xp.pad(xp.reshape(x, (12, 8)), ((1, 1), (0, 1))), (4, 6, 4)),
    "differences backwards": (lambda x: xp.diff(xp.reshape(x[:, ::-2], (10, 3)), axis=0), (5, 4, 3)),
    "roll of a tile": (lambda x: xp.roll(xp.tile(xp.reshape(xp.flip(x), (12, 2)), (2, 1)), 4, axis=0), (3, 4, 2)),
    # an output holds what others read several times
    "repeated and continued": (repeated_and_continued, (2, 6)),
    "rolled and widened": (rolled_and_widened, (7, 1)),
    "tiled backwards": (tiled_backwards, (2, 5, 6)),
    # several dimensions share the axis
    "roll of a diagonal": (lambda x: xp.roll(xp.repeat(xp.einsum("ii->i", x), 2), 1), (5, 5)),
    "roll of a diagonal of three": (lambda x: xp.roll(xp.repeat(xp.einsum("iij->ji", x[:, :, ::-1]), 2, axis=1), 1), (3, 3, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_positions_of_layouts(name: str) -> None:
    fn, shape = LAYOUTS[name]
    specs = [en.TensorSpec(shape)]
    on_cpu(fn, specs, [(name, drawn(specs))])
    for target in ("cuda:sm_90a", "hip:gfx942"):
        assert en.optimize(fn, target, specs=specs).source


@needs_compiler
@pytest.mark.parametrize("name", some(LAYOUTS, ["roll of all", "differences backwards", "tiled backwards"]))
def test_positions_of_layouts_emulated(name: str) -> None:
    fn, shape = LAYOUTS[name]
    specs = [en.TensorSpec(shape)]
    emulated(fn, specs, [(name, drawn(specs))])


PARTS: dict[str, tuple[Callable[..., Any], int]] = {  # what positions are taken from, and how many rows it has
    "slice": (lambda x: x[2:5], 3),
    "backwards": (lambda x: x[::-2], 5),
    "reshape": (lambda x: xp.reshape(x, (15, 2)), 15),
    "repetition": (lambda x: xp.repeat(x[:3], 2, axis=0), 6),
    "diagonal": (lambda x: xp.einsum("ii->i", x[:3]), 3),
}


@pytest.mark.parametrize("after", ["", "rolled"])
@pytest.mark.parametrize("name", PARTS)
def test_positions_of_a_part(name: str, after: str) -> None:
    """Out of range is out of what the program takes from, not of the array in memory that this is a part of."""
    part, n = PARTS[name]

    def fn(x: Any, i: Any) -> Any:
        rows = xp.take(part(x), i, axis=0)
        return xp.roll(rows, 1, axis=0) if after else rows

    specs = [en.TensorSpec((10, 3)), en.TensorSpec((4,), "int32")]
    p = traced(fn, specs)
    kernel, x = en.optimize(p), drawn(specs)[0]
    for good in ([0, n - 1, -n, -1], [n - 1] * 4):
        at = [x, np.array(good, np.int32)]
        agree(kernel(*at), p, at, f"{good}", TOLERANCE["float32"])
    for bad in ([0, n, 0, 0], [0, 0, 0, -n - 1], [2**31 - 1, 0, 0, 0]):
        with pytest.raises(InputError):
            kernel(x, np.array(bad, np.int32))


@needs_compiler
def test_positions_of_a_part_emulated() -> None:
    """Where a position is out of range the result is NaN."""
    p = traced(lambda x, i: xp.take(x[2:8:2], i, axis=0), [en.TensorSpec((10, 3)), en.TensorSpec((4,), "int32")])
    plan = plans(p, SmallTilesOnGpu())[0]
    x = drawn([en.TensorSpec((10, 3))])[0]
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    (out,) = emulate.run(programs, plan.buffers, {p.inputs[0].name: x, p.inputs[1].name: np.array([2, 3, -1, -4], np.int32)})
    np.testing.assert_array_equal(out["out0"], np.stack([x[6], x[0] * np.nan, x[6], x[0] * np.nan]))


# ------------------------------------------------------------------ beyond 2³¹ elements


@cache
def sparse() -> np.ndarray:
    """5·2³⁰ int8 zeros, of which hardly any are ever touched."""
    try:
        return np.zeros(5 * 2**30, np.int8)
    except MemoryError:
        pytest.skip("no address space for it")


def emulated_once(fn: Callable[..., Any], x: np.ndarray) -> np.ndarray:
    p = traced(fn, [en.TensorSpec(x.shape, "int8")])
    plan = extract(egraph.saturate(p).graph, p, model_for("cuda:sm_80")).plan
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    (out,) = emulate.run(programs, plan.buffers, {p.inputs[0].name: x})
    return out["out0"]


@needs_compiler
def test_offsets_take_64_bits() -> None:
    x = sparse()
    step = 2**26 + 3
    x[::step] = np.arange(len(x[::step]))
    assert np.array_equal(emulated_once(lambda x: 1 + x[::step], x), 1 + np.arange(len(x[::step])))
    x[3 * 2**30 : 3 * 2**30 + 50] = np.arange(50)
    assert np.array_equal(emulated_once(lambda x: 1 + x[3 * 2**30 : 3 * 2**30 + 50], x), 1 + np.arange(50))
    far = np.lib.stride_tricks.as_strided(x, (3, 40), (2**31 + 7, 1))
    far[:] = np.arange(120).reshape(3, 40)
    assert np.array_equal(emulated_once(lambda x: xp.sum(xp.astype(x, "float32"), axis=-1), far), far.sum(axis=-1))
    assert np.array_equal(en.optimize(lambda x: 1 + x, specs=[en.TensorSpec((3, 40), "int8")])(far), 1 + far)


@pytest.mark.parametrize(
    "fn, shape",
    [
        (lambda x: 2 * x + 1, (3 * 10**9,)),
        (lambda x: xp.sum(x), (3 * 10**9,)),
        (lambda x: xp.max(xp.reshape(x, (3 * 10**9, 2)), axis=-1), (6 * 10**9,)),
        (lambda x: xp.flip(x, axis=-1), (2, 3 * 10**9)),
    ],
    ids=["map", "sum", "pairs", "backwards"],
)
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a", "hip:gfx942"])
def test_positions_beyond_31_bits_are_64_bits_wide(fn: Callable[..., Any], shape: tuple[int, ...], target: str) -> None:
    """In the text: a number of a tile, or a position that is multiplied by much, is 64 bits wide before it is multiplied."""
    source = en.optimize(fn, target, specs=[en.TensorSpec(shape, "bfloat16")]).source
    body = source[source.index("\nKERNEL(") :]
    assert "i64)" in body
    assert not re.findall(r"const i64 \w+ = (?!\(i64\))[^;]*? \* \d+;", body), "it overflows before it is widened"
    for product in re.findall(r"[\w()%/ ]*? \* \d{6,}|\d{6,} \* [\w()]+", body):
        assert "(i64)" in product or "stride" in product, product
    wide = set(re.findall(r"const i64 (\w+) =", body))
    for name, expression in re.findall(r"const int (\w+) = (.*);", body):
        assert not wide & set(re.findall(r"\w+", expression)), f"int {name} = {expression}"


def test_positions_beyond_24_bits_are_exact() -> None:
    n = 2**24 + 5
    position = np.array([n - 2], np.int32)
    assert en.optimize(lambda i: xp.arange(n)[i], specs=[en.TensorSpec((1,), "int32")])(position) == n - 2
    for dtype in ("int32", "int64"):
        x = np.array([2**24 + 1, -(2**24) - 3, 2**30 + 1], dtype)
        p = traced(lambda x: 1 + x, [en.TensorSpec((3,), dtype)])
        assert p.compute_dtype == "float64" and np.array_equal(en.optimize(p)(x), x + 1)
    small = traced(lambda x: xp.argmax(x, axis=-1), [en.TensorSpec((3, 4000))])
    assert small.compute_dtype == "float32", "no position is that far"
    large = traced(lambda x: xp.argmax(x), [en.TensorSpec((4001, 5000))])
    assert large.compute_dtype == "float64"


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["flat", "rows", "argmax", "product"])
def test_more_than_2_31_elements_on_a_gpu(case: str) -> None:
    torch = pytest.importorskip("torch", reason="makes large arrays on the GPU")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if case == "flat":
        x = torch.zeros(3 * 10**9 + 5, dtype=torch.bfloat16, device="cuda")
        places = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 77, 3 * 10**9 + 4], device="cuda")
        x[places] = torch.arange(1, 6, dtype=torch.bfloat16, device="cuda")
        out = en.optimize(lambda x: 2 * x + 1, "cuda", specs=[en.TensorSpec(tuple(x.shape), "bfloat16")])(x)
        got = torch.as_tensor(out, device="cuda")
        assert got[places].tolist() == [3, 5, 7, 9, 11] and int((got != 1).sum()) == 5
        return
    shape = (70_001, 40_000)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    spec = en.TensorSpec(shape, "bfloat16")
    near = torch.tensor([0, 1, 2**31 // 40_000, 2**31 // 40_000 + 1, 70_000], device="cuda")
    if case == "rows":
        out = torch.as_tensor(en.optimize(lambda x: xp.softmax(x, axis=-1), "cuda", specs=[spec])(x), device="cuda")
        want = torch.softmax(x[near].double(), -1)
        assert ((out[near].double() - want).norm() / want.norm()).item() < 5e-3
    elif case == "argmax":
        x[70_000, 39_998] = 1e4
        out = torch.as_tensor(en.optimize(lambda x: xp.argmax(x, axis=0), "cuda", specs=[spec])(x), device="cuda")
        assert int(out[39_998]) == 70_000 and torch.equal(out[:50], x[:, :50].float().argmax(0))
    else:
        w = torch.empty((40_000, 64), dtype=torch.bfloat16, device="cuda").normal_()
        kernel = en.optimize(lambda x, w: x @ w, "cuda", specs=[spec, en.TensorSpec((40_000, 64), "bfloat16")])
        out, want = torch.as_tensor(kernel(x, w), device="cuda"), x[near].double() @ w.double()
        assert ((out[near].double() - want).norm() / want.norm()).item() < 5e-3


# ------------------------------------------------------------------ what is refused


def test_arrays_that_do_not_fit_are_refused() -> None:
    specs = Shape().specs("prefill_causal")
    kernel = en.optimize(traced(CASES["prefill_causal"].function("small"), specs))
    q, k, v = drawn(specs)
    for arrays, words in (
        ((q, k), "takes 3 arrays"),
        ((q, k, v[..., :-1]), "shape"),
        ((q, k, v[0]), "shape"),
        ((q, k, v.astype(np.float64)), "dtype"),
        ((q, k, [["a"]]), "must be a NumPy array"),
    ):
        with pytest.raises(InputError, match=words):
            kernel(*arrays)


@pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a", "hip:gfx942"])
@pytest.mark.parametrize("how", ["added", "chosen"])
def test_masks_of_the_least_number(target: str, how: str) -> None:
    """Times log₂ e it is −∞: a row of nothing else is the mean of all values, as it is in float64."""
    least = float(ml_dtypes.finfo("bfloat16").min)

    def f(q, k, v, mask):  # type: ignore[no-untyped-def]
        s = q @ k.mT * 0.125
        s = s + mask if how == "added" else xp.where(mask, s, least)
        p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
        return (p / xp.sum(p, axis=-1, keepdims=True)) @ v

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 64)).astype(ml_dtypes.bfloat16) for n in (64, 128, 128))
    kept = np.ones((64, 128), bool)
    kept[3], kept[5, :100] = False, False
    mask = kept if how == "chosen" else np.where(kept, 0.0, least).astype(ml_dtypes.bfloat16)
    args = [q, k, v, mask]
    program = en.trace(f, *[en.TensorSpec(x.shape, x.dtype.name) for x in args])
    kernel = en.optimize(program, target)
    (got,), _ = kernel_values(program, kernel.plan, parse_target(target), args)
    np.testing.assert_allclose(np.asarray(got, np.float64), en.evaluate(program, *args), atol=1e-2)
