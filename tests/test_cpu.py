"""The CPU backend: dtypes, memory formats, special values, threads, memory, errors.  (Kernels of every shape: test_lower.py.)"""

from __future__ import annotations

import _thread
import math
import signal
import threading
import time
import tracemalloc
import warnings
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen import tile
from eqsat_neptune.codegen.cpu import CpuKernel, contract, estimates, frozen
from eqsat_neptune.codegen.cpu.contract import Tensor, contraction
from eqsat_neptune.codegen.cpu.frozen import Frozen
from eqsat_neptune.codegen.cpu.functions import FUNCTIONS
from eqsat_neptune.codegen.cpu.kernel import Executable, prepare
from eqsat_neptune.codegen.cpu.layout import Format
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.cost_models.host import HostModel
from eqsat_neptune.cost_models.machines import Cpu
from eqsat_neptune.extraction.plan import Plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info
from tile_kernels import SOFT, affine, close, make_plan, quotient, read, run

import eqsat_neptune as en
from eqsat_neptune import terms as T
from eqsat_neptune.errors import InputError
from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import add, bi, fold, inp, iota, mul, num, red, un, where

NEG = num(-math.inf)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def attention_plan(h: int, n: int, d: int, tq: int, tk: int, dtype: str = "float32", causal: bool = False) -> Plan:
    s = mul(red("+", "d", mul(read("q", "h", "i", "d"), read("k", "h", "j", "d"))), 1 / math.sqrt(d))
    s = where(bi("le", iota("j"), iota("i")), s, NEG) if causal else s
    o = quotient(fold(SOFT, 1, "j", [s, read("v", "h", "j", "e")]), fold(SOFT, 1, "j", [s, num(1.0)]))
    roles = dict(h=("grid", 1), i=("grid", tq), d=("whole", 0), e=("whole", 0), j=("loop", tk))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype) if dtype not in ("float32", "float64") else dtype)
    shapes = {x: np.broadcast_to(np.zeros(1, kind), (h, n, d)) for x in "qkv"}
    compute = "float64" if dtype == "float64" else "float32"
    return make_plan([({"o": (o, ("h", "i", "e"))}, roles)], dict(h=h, i=n, j=n, d=d, e=d), shapes, {"o": dtype}, compute)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf) if causal else s
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


def qkv(h: int, n: int, d: int, dtype: object = np.float32) -> dict[str, np.ndarray]:
    r = rng()
    return {x: r.standard_normal((h, n, d)).astype(dtype) for x in "qkv"}


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "dtype,tolerance",
    [("float64", 1e-14), ("float32", 2e-6), ("float16", 1e-3), ("bfloat16", 8e-3), ("float8_e4m3fn", 0.13), ("float8_e5m2", 0.3)],
)
@pytest.mark.parametrize("n,tq,tk", [(100, 32, 32), (97, 64, 24)])
@pytest.mark.parametrize("causal", [False, True])
def test_floats_of_every_width(dtype: str, tolerance: float, n: int, tq: int, tk: int, causal: bool) -> None:
    x = qkv(3, n, 16, getattr(ml_dtypes, dtype, dtype) if "float" in dtype and dtype[5:] not in ("16", "32", "64") else dtype)
    got = run(attention_plan(3, n, 16, tq, tk, dtype, causal), x)["o"]
    want = attention(*x.values(), causal)
    error = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
    assert error <= tolerance
    if dtype not in ("float64", "float32"):  # nothing is lost but the rounding of the result
        rounded = np.linalg.norm(want.astype(got.dtype).astype(np.float64) - want) / np.linalg.norm(want)
        assert error <= 1.02 * rounded + 1e-6


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64", "bool"])
@pytest.mark.parametrize("role", [("loop", 4), ("whole", 0)])
def test_integers_are_exact(dtype: str, role: tuple[str, int]) -> None:
    top = min(np.iinfo(dtype).max if dtype != "bool" else 1, 2**50)
    low = max(np.iinfo(dtype).min if dtype != "bool" else 0, -(2**50))
    x = {
        "X": rng().integers(low, top, (5, 11), endpoint=True).astype(dtype),
        "Y": rng(1).integers(low, top, (5, 11), endpoint=True).astype(dtype),
    }
    a, b = read("X", "i", "k"), read("Y", "i", "k")
    exact = {n: v.astype(object) for n, v in x.items()}
    outs = {
        "least": (red("min", "k", bi("max", a, b)), ("i",)),
        "sum": (add(a, mul(-1.0, b), iota("k")), ("i", "k")),
        "odd": (bi("eq", bi("mod", a, num(2.0)), num(1.0)), ("i", "k")),
        "copy": (a, ("k", "i")),
    }
    dtypes = {"least": dtype, "sum": "int64", "odd": "bool", "copy": dtype}
    got = run(make_plan([(outs, dict(i=("grid", 2), k=role))], dict(i=5, k=11), x, dtypes, "float32"), x)
    assert np.array_equal(got["least"], np.maximum(x["X"], x["Y"]).min(1))
    assert np.array_equal(got["sum"], (exact["X"] - exact["Y"] + np.arange(11)).astype(np.int64))
    assert np.array_equal(got["odd"], x["X"].astype(object) % 2 == 1) and got["odd"].dtype == bool
    assert np.array_equal(got["copy"], x["X"].T)


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_sums_of_integer_products_are_exact(dtype: str) -> None:
    top = min(np.iinfo(dtype).max, 2**20)
    x = {"X": rng().integers(-top, top, (5, 3000)).astype(dtype), "Y": rng(1).integers(-top, top, (3000, 4)).astype(dtype)}
    p = red("+", "k", mul(read("X", "i", "k"), read("Y", "k", "j")))
    s = red("+", "k", read("X", "i", "k"))
    for role in (("loop", 700), ("whole", 0)):
        roles = dict(i=("grid", 2), k=role, j=("whole", 0))
        plan = make_plan(
            [({"P": (p, ("i", "j")), "S": (s, ("i",))}, roles)],
            dict(i=5, k=3000, j=4),
            x,
            {"P": "int64", "S": "int64"},
            "float32",
        )
        got = run(plan, x)
        assert np.array_equal(got["P"], x["X"].astype(np.int64) @ x["Y"].astype(np.int64))
        assert np.array_equal(got["S"], x["X"].astype(np.int64).sum(1))


def test_erf() -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), np.geomspace(1e-30, 1, 500), [np.inf, -np.inf, 0.0, -0.0]])
    for dtype, tolerance in ((np.float64, 1e-15), (np.float32, 6e-7)):
        y = x.astype(dtype)
        want = np.array([math.erf(v) for v in y.astype(float)])
        out = np.empty_like(y)
        FUNCTIONS["erf"](y, out=out)
        assert np.all(np.abs(out - want) <= tolerance * np.abs(want))
    assert math.isnan(run(make_plan([({"Y": (un("erf", read("X")), ())}, {})], {}, z := {"X": np.array(np.nan)}), z)["Y"])


def test_special_values() -> None:
    a = read("X", "i", "k")
    top = red("max", "k", a)
    masked = red("max", "k", where(bi("le", iota("k"), num(2.0)), a, NEG))
    chosen = red("+", "k", where(bi("le", iota("k"), num(2.0)), a, num(0.0)))
    outs = {"top": (top, ("i",)), "masked": (masked, ("i",)), "chosen": (chosen, ("i",)), "log": (un("log", a), ("i", "k"))}
    x = {
        "X": np.array([[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, np.nan, 0.0, -1.0, 2.0], [1.0, 2.0, 3.0, np.nan, np.inf], [-np.inf] * 5])
    }
    for role in (("loop", 2), ("whole", 0)):
        plan = make_plan([(outs, dict(i=("grid", 2), k=role))], dict(i=4, k=5), x)
        got = run(plan, x)
        np.testing.assert_array_equal(got["top"], [5.0, np.nan, np.nan, -np.inf])
        np.testing.assert_array_equal(got["masked"], [3.0, np.nan, 3.0, -np.inf])
        np.testing.assert_array_equal(got["chosen"], [6.0, np.nan, 6.0, -np.inf])
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got["log"], np.log(x["X"]))


def test_nan_shows_only_in_what_depends_on_it() -> None:
    x = qkv(2, 40, 8)
    x["q"][0, 7, 3] = np.nan
    x["v"][1, 5, 2] = np.nan
    got = run(attention_plan(2, 40, 8, 16, 16), x)["o"]
    want = np.zeros(got.shape, bool)
    want[0, 7], want[1, :, 2] = True, True
    assert np.array_equal(np.isnan(got), want)


def test_large_logits() -> None:
    x = qkv(1, 50, 8)
    x["q"] *= 1e4
    got = run(attention_plan(1, 50, 8, 16, 16), x)["o"]
    assert np.isfinite(got).all()
    assert np.abs(got - attention(*x.values())).max() < 1e-2  # exp of differences of 1e4 rounded in float32


def test_sum_of_many_in_float32() -> None:
    x = {"X": rng().random((3, 200_000), np.float32)}
    for role in (("whole", 0), ("loop", 1000)):
        plan = make_plan(
            [({"Y": (red("+", "k", read("X", "i", "k")), ("i",))}, dict(i=("grid", 1), k=role))],
            dict(i=3, k=200_000),
            x,
            compute="float32",
        )
        close(run(plan, x)["Y"], x["X"].astype(np.float64).sum(1), 2e-6)


@pytest.mark.parametrize("n", [5003, 50_000, 384])
@pytest.mark.parametrize("across", [False, True])
def test_long_sums_across_rows(n: int, across: bool) -> None:
    """About as exact as along rows, where NumPy adds in pairs: of what is computed, and of what is read in place."""
    x = {"X": rng().random((n, 70), np.float32)}
    terms = read("X", "k", "i") if across else un("exp", read("X", "k", "i"))
    plan = make_plan(
        [({"Y": (red("+", "k", terms), ("i",))}, dict(i=("grid", 35), k=("whole", 0)))], dict(i=70, k=n), x, compute="float32"
    )
    wide = x["X"].astype(np.float64)
    close(run(plan, x)["Y"], (wide if across else np.exp(wide)).sum(0), 3e-7)


# ------------------------------------------------------------------ memory formats

FORMATS = {
    "contiguous": lambda x: x,
    "Fortran": np.asfortranarray,
    "heads inside": lambda x: np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2),
    "channels first": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1),
    "reversed rows": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "reversed channels": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "window": lambda x: np.pad(x, ((1, 2), (3, 1), (2, 5)))[1:-2, 3:-1, 2:-5],
    "broadcast heads": lambda x: np.broadcast_to(x[:1], x.shape),
    "broadcast rows": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "broadcast channels": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
    "unaligned": lambda x: np.frombuffer(b"x" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "swapped bytes": lambda x: x.astype(x.dtype.newbyteorder()),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_inputs_of_any_strides(name: str, which: str, dtype: str) -> None:
    x = qkv(3, 37, 8, dtype)
    for n in which:
        x[n] = FORMATS[name](x[n])
    got = run(attention_plan(3, 37, 8, 16, 16, dtype), x)["o"]
    close(got, attention(*x.values()), 2e-6 if dtype == "float32" else 1e-13)


@pytest.mark.parametrize("name", FORMATS)
def test_elementwise_inputs_of_any_strides(name: str) -> None:
    a = FORMATS[name](rng().standard_normal((3, 20, 8)))
    x = {"A": a, "B": rng(1).standard_normal((20, 8))}
    y = mul(un("tanh", read("A", "h", "i", "c")), read("B", "i", "c"))
    plan = make_plan([({"Y": (y, ("c", "h", "i"))}, dict(h=("grid", 2), i=("grid", 7), c=("whole", 0)))], dict(h=3, i=20, c=8), x)
    close(run(plan, x)["Y"], (np.tanh(a) * x["B"]).transpose(2, 0, 1))


@pytest.mark.parametrize("name", [n for n in FORMATS if "broadcast" not in n and n not in ("read-only", "swapped bytes")])
def test_outputs_of_any_strides(name: str) -> None:
    x = qkv(3, 37, 8)
    out = FORMATS[name](np.full((3, 37, 8), np.nan, np.float32))
    if not out.flags.writeable:
        out = np.ndarray(out.shape, out.dtype, bytearray(out.nbytes + 1), 1)
    got = CpuKernel(attention_plan(3, 37, 8, 16, 16), None).run(x, {"o": out})  # type: ignore[arg-type]
    assert got["o"] is out
    close(out, attention(*x.values()), 2e-6)


def test_an_output_may_be_an_input() -> None:
    x = qkv(2, 30, 8)
    want = attention(*x.values())
    CpuKernel(attention_plan(2, 30, 8, 16, 16), None).run(x, {"o": x["q"]})  # type: ignore[arg-type]
    close(x["q"], want, 2e-6)


def test_other_strides_are_bound_anew() -> None:
    kernel = CpuKernel(attention_plan(3, 37, 8, 16, 16), None)  # type: ignore[arg-type]
    for _ in range(2):
        for name in FORMATS:
            x = {n: FORMATS[name](v) for n, v in qkv(3, 37, 8).items()}
            close(kernel.run(x)["o"], attention(*x.values()), 2e-6)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("role", [("loop", 2), ("whole", 0)])
def test_empty_and_single(shape: tuple[int, int], role: tuple[str, int]) -> None:
    x = {"X": rng().standard_normal(shape), "W": rng(1).standard_normal((shape[1], 3))}
    c = read("X", "i", "k")
    outs = {
        "sum": (red("+", "k", c), ("i",)),
        "top": (red("max", "k", c), ("i",)),
        "product": (red("+", "k", mul(c, read("W", "k", "j"))), ("i", "j")),
        "copy": (un("exp", c), ("i", "k")),
    }
    got = run(make_plan([(outs, dict(i=("grid", 2), k=role, j=("whole", 0)))], dict(i=shape[0], k=shape[1], j=3), x), x)
    close(got["sum"], x["X"].sum(1))
    close(got["top"], x["X"].max(1, initial=-np.inf))
    close(got["product"], x["X"] @ x["W"])
    close(got["copy"], np.exp(x["X"]))


# ------------------------------------------------------------------ contractions as matrix products


def strided(x: np.ndarray, axes: str) -> Tensor:
    return Tensor(
        {a: (n, s) for a, n, s in zip(axes, x.shape, x.strides)},
        x.dtype,
        lambda shape, strides: np.lib.stride_tricks.as_strided(x, shape, strides),
    )


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_contractions_of_any_axes_and_strides(data: st.DataObject) -> None:
    sizes = {a: data.draw(st.sampled_from([1, 2, 3, 8])) for a in "abcdef"}
    kinds = {a: data.draw(st.sampled_from(["batch", "m", "n", "k"])) for a in sizes}
    has = {"a": "batch m k", "b": "batch n k", "out": "batch m n"}

    def tensor(which: str, seed: int) -> tuple[np.ndarray, str]:
        axes = "".join(data.draw(st.permutations([a for a, k in kinds.items() if k in has[which].split()])))
        memory = data.draw(st.permutations(range(len(axes))))
        x = rng(seed).standard_normal([2 * sizes[axes[i]] for i in memory]).astype(np.float32)
        cut = [data.draw(st.sampled_from([slice(0, sizes[axes[i]]), slice(None, None, 2)])) for i in memory]
        x = x[tuple(cut)]
        return x.transpose([memory.index(i) for i in range(len(axes))]), axes

    (x, xa), (y, ya), (out, oa) = tensor("a", 1), tensor("b", 2), tensor("out", 3)
    out[...] = np.nan
    for step in contraction([], strided(out, oa), strided(x, xa), strided(y, ya), tuple(a for a, k in kinds.items() if k == "k")):
        step()
    close(out, np.einsum(f"{xa},{ya}->{oa}", x.astype(float), y.astype(float)), 1e-5)


@pytest.mark.parametrize("rows,columns,inner", [(48, 64, 64), (61, 128, 33), (100, 32, 384), (1000, 64, 32), (30, 320, 96)])
@pytest.mark.parametrize("xs", ["mk", "km"])
@pytest.mark.parametrize("ys", ["kn", "nk"])
@pytest.mark.parametrize("outs", ["mn", "nm"])
@pytest.mark.parametrize("batch", [0, 3])
def test_products_by_slabs(
    rows: int, columns: int, inner: int, xs: str, ys: str, outs: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any memory order, from a place that is aligned and from one that is not."""
    monkeypatch.setattr(contract, "has_unpacked_products", lambda: True)
    size = {"m": rows, "n": columns, "k": inner, "b": batch}
    lead = "b" if batch else ""

    def tensor(axes: str, seed: int, shift: int) -> tuple[np.ndarray, Tensor]:
        shape = [size[a] for a in lead + axes]
        x = contract.aligned_bytes(4 * math.prod(shape) + shift)[shift:].view(np.float32).reshape(shape)
        x[...] = rng(seed).standard_normal(shape)
        t = strided(x, lead + axes)
        return x, Tensor(t.dims, t.dtype, t.make, x.ctypes.data)

    for shift in (0, 4):
        (x, X), (y, Y), (out, O) = tensor(xs, 1, shift), tensor(ys, 2, shift), tensor(outs, 3, 0)
        out[...] = np.nan
        for still in (False, True):
            kept = contract.Kept()
            for _ in range(2):  # the second time there is nothing left to copy
                steps = contraction([], O, X, Y, ("k",), (1, 2) if still else (None, None), kept)
                for step in [*kept.steps, *steps]:
                    step()
            close(out, np.einsum(f"{lead}{xs},{lead}{ys}->{lead}{outs}", x.astype(float), y.astype(float)), 2e-6)


@pytest.mark.parametrize("inner", [5003, 384 * 4])
@pytest.mark.parametrize("xs", ["mk", "km"])
@pytest.mark.parametrize("ys", ["kn", "nk"])
@pytest.mark.parametrize("batch", [0, 3])
def test_long_sums_are_sums_of_sums(inner: int, xs: str, ys: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "has_unpacked_products", lambda: True)
    size, lead = {"m": 11, "n": 4, "k": inner, "b": batch}, "b" if batch else ""
    x, y = (rng(seed).random([size[a] for a in lead + axes], np.float32) for seed, axes in enumerate((xs, ys)))
    out = np.full([size[a] for a in lead + "nm"], np.nan, np.float32)
    for step in contraction([], strided(out, lead + "nm"), strided(x, lead + xs), strided(y, lead + ys), ("k",)):
        step()
    close(out, np.einsum(f"{lead}{xs},{lead}{ys}->{lead}nm", x.astype(float), y.astype(float)), 5e-7)


def test_slabs_are_small_and_leave_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "has_unpacked_products", lambda: True)
    f4 = np.dtype(np.float32)
    assert contract.slab(1024, 256, 64, f4, True) == 16
    assert contract.slab(256, 64, 256, f4, False) == 12
    for m, n, k in ((1024, 256, 64), (100, 64, 384), (77, 1024, 64), (1024, 512, 384)):
        for contiguous in (True, False):
            height = contract.slab(m, n, k, f4, contiguous)
            assert height * n * k <= contract.UNPACKED and (height == 0 or m >= 2 * height)
    assert contract.slab(1024, 100, 64, f4, True) == contract.slab(1024, 64, 1024, f4, True) == 0
    assert contract.slab(1024, 64, 64, np.dtype(np.float64), True) == 0


# ------------------------------------------------------------------ what the tile program becomes


def prepared(plan: Plan) -> tile.TileProgram:
    return prepare(lower(plan.kernels[0], plan.buffers, plan.compute_dtype))


def test_a_factor_of_the_scores_goes_to_the_queries() -> None:
    p = prepared(attention_plan(2, 1024, 64, 256, 256))
    loop = next(s for s in p.body if isinstance(s, tile.Loop))
    assert not any(isinstance(s, tile.Map) and s.fn == "mul" and len(s.out.axes) == 3 and "j" in s.out.axes for s in loop.body)
    assert any(isinstance(s, tile.Map) and s.fn == "mul" and s.out.axes == ("d", "h", "i") for s in p.body)


@pytest.mark.parametrize("role", [("loop", 16), ("whole", 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_factor_of_differences_goes_to_the_queries(role: tuple[str, int], causal: bool) -> None:
    """Weights exp((s − max s)·c): no pass over the scores multiplies."""
    c = num(0.25)
    h = T.Monoid(("max",), (((0, un("exp", mul(c, add(T.var("r0"), T.neg(T.var("R0")))))),),))
    s = red("+", "d", mul(read("q", "h", "i", "d"), read("k", "h", "j", "d")))
    s = where(bi("le", iota("j"), iota("i")), s, NEG) if causal else s
    o = quotient(fold(h, 1, "j", [s, read("v", "h", "j", "e")]), fold(h, 1, "j", [s, num(1.0)]))
    roles = dict(h=("grid", 1), i=("grid", 16), d=("whole", 0), e=("whole", 0), j=role)
    x = qkv(2, 50, 16)
    plan = make_plan([({"o": (o, ("h", "i", "e"))}, roles)], dict(h=2, i=50, j=50, d=16, e=16), x, compute="float32")
    close(run(plan, x)["o"], attention(*x.values(), causal), 2e-6)
    big = [s for s in tile.walk(prepared(plan).body) if isinstance(s, tile.Map) and {"i", "j"} <= set(s.out.axes)]
    assert sorted(s.fn for s in big) == ["exp", "sub"] + ["where"] * causal


def test_a_factor_of_what_cancels_stays() -> None:
    x = {"X": (1000 + 1e-3 * rng().standard_normal((64, 50))).astype(np.float32)}
    a = mul(read("X", "i", "k"), 0.5)
    m = red("max", "k", a)
    outs = {
        "Y": (mul(add(a, T.neg(m)), 0.7), ("i", "k")),
        "Z": (mul(add(read("X", "i", "k"), T.neg(red("min", "k", read("X", "i", "k")))), 0.7), ("i", "k")),
    }
    got = run(make_plan([(outs, dict(i=("grid", 16), k=("whole", 0)))], dict(i=64, k=50), x, compute="float32"), x)
    exact = x["X"].astype(float)
    close(got["Y"], (exact - exact.max(1, keepdims=True)) * 0.35, 2e-7)
    close(got["Z"], (exact - exact.min(1, keepdims=True)) * 0.7, 2e-7)


def test_a_large_factor_stays_where_it_cannot_overflow() -> None:
    p = mul(red("+", "d", mul(read("A", "i", "d"), read("B", "j", "d"))), 1e30)
    x = {"A": np.full((400, 4), 1e10, np.float32), "B": np.full((400, 4), 1e-10, np.float32)}
    plan = make_plan(
        [({"P": (p, ("i", "j"))}, dict(i=("grid", 200), j=("whole", 0), d=("whole", 0)))],
        dict(i=400, j=400, d=4),
        x,
        compute="float32",
    )
    close(run(plan, x)["P"], np.full((400, 400), 4e30), 1e-6)


def test_scratch_memory_is_reused() -> None:
    """One tile of scores is updated in place: no second one, and no copy of the state."""
    plan = attention_plan(2, 1024, 64, 256, 256)
    p = prepared(plan)
    arrays = [np.zeros(b.shape, b.dtype) for b in (*p.reads, *p.writes)]
    exe = Executable(p, tuple(map(Format.of, arrays)))
    tile_bytes, state = 256 * 256 * 4, 256 * 64 * 4
    assert exe.plan.layout.arena < tile_bytes + 4 * state + 16 * 256 * 4


def test_dead_tiles_are_skipped_and_full_ones_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = attention_plan(1, 64, 8, 16, 16, causal=True)
    x = qkv(1, 64, 8)
    tiles, masked = [], []
    copyto = np.copyto

    def counted(dst: np.ndarray, src: object, *args: object, **kw: object) -> None:
        if "where" in kw:
            masked.append(dst.shape)
        copyto(dst, src, *args, **kw)  # type: ignore[arg-type, call-overload]

    kernel = CpuKernel(plan, None)  # type: ignore[arg-type]
    exp = np.exp
    monkeypatch.setitem(FUNCTIONS, "exp", lambda a, out, **kw: (tiles.append(a.shape), exp(a, out=out, **kw)))
    monkeypatch.setattr(np, "copyto", counted)
    got = kernel.run(x)["o"]
    close(got, attention(*x.values(), True), 2e-6)
    assert sum(s == (16, 16) for s in tiles) == 1 + 2 + 3 + 4
    assert sum(s == (16, 16) for s in masked) == 4


# ------------------------------------------------------------------ frozen pivots


def frozen_of(plan: Plan) -> Frozen | None:
    return CpuKernel(plan, None)._frozen[0]  # type: ignore[arg-type]


def scores_plan(outputs: dict, n: int, role: tuple[str, int], extra: dict | None = None) -> Plan:
    x = {name: np.broadcast_to(np.zeros(1, np.float32), (2, n, 8)) for name in "qkv"} | (extra or {})
    roles = dict(h=("grid", 1), i=("grid", 64), d=("whole", 0), e=("whole", 0), j=role)
    return make_plan([(outputs, roles)], dict(h=2, i=n, j=n, d=8, e=8), x, compute="float32")


SCORES = mul(red("+", "d", mul(read("q", "h", "i", "d"), read("k", "h", "j", "d"))), 8**-0.5)


@pytest.mark.parametrize("role", [("loop", 64), ("whole", 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [256, 301])
def test_no_maximum_where_norms_bound_the_scores(role: tuple[str, int], causal: bool, n: int) -> None:
    s = where(bi("le", iota("j"), iota("i")), SCORES, NEG) if causal else SCORES
    total = fold(SOFT, 1, "j", [s, num(1.0)])
    outs = {
        "o": (quotient(fold(SOFT, 1, "j", [s, read("v", "h", "j", "e")]), total), ("h", "i", "e")),
        "l": (add(un("log", total), fold(SOFT, 0, "j", [s, num(0.0)])), ("h", "i")),
    }
    plan = scores_plan(outs, n, role)
    f = frozen_of(plan)
    assert f is not None
    body = list(tile.walk(f.program.body))
    assert not any(isinstance(s, tile.Reduce) and s.op == "max" for s in body)
    assert not any(isinstance(s, tile.Map) and s.fn in ("exp", "exp2") and "j" not in s.out.axes for s in body)  # no rescaling
    x = qkv(2, n, 8)
    got = run(plan, x)
    q, k, v = (y.astype(np.float64) for y in x.values())
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(8)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf) if causal else scores
    w = np.exp(scores)
    close(got["o"], w / w.sum(-1, keepdims=True) @ v, 2e-6)
    close(got["l"], np.log(w.sum(-1)), 2e-6)


def test_a_maximum_that_shows_stays() -> None:
    """In a result, in a sum with what does not scale with it, or summed over its own rows."""
    top, total = fold(SOFT, 0, "j", [SCORES, num(0.0)]), fold(SOFT, 1, "j", [SCORES, num(1.0)])
    other = {"c": np.zeros(256, np.float32)}
    for shown in (
        {"m": (top, ("h", "i"))},
        {"l": (total, ("h", "i"))},
        {"l": (un("log", add(total, 1.0)), ("h", "i"))},
        {"l": (add(un("log", total), mul(top, 0.5)), ("h", "i"))},
        {"l": (mul(un("recip", total), read("c", "i")), ("h", "i"))},
    ):
        assert frozen_of(scores_plan(shown, 256, ("loop", 64), other)) is None
    assert frozen_of(scores_plan({"l": (add(un("log", total), top), ("h", "i"))}, 256, ("loop", 64))) is not None


def test_nothing_is_frozen_without_a_bound() -> None:
    s = add(SCORES, read("b", "i", "j"))
    bias = {"b": np.zeros((256, 256), np.float32)}  # as many elements as there are weights
    o = quotient(fold(SOFT, 1, "j", [s, read("v", "h", "j", "e")]), fold(SOFT, 1, "j", [s, num(1.0)]))
    assert frozen_of(scores_plan({"o": (o, ("h", "i", "e"))}, 256, ("loop", 64), bias)) is None


def frozen_run(x: dict[str, np.ndarray]) -> tuple[np.ndarray, int]:
    """Attention of 64 × 64 tiles, and how often each of its two programs began a block."""
    n, d = x["q"].shape[1:]
    kernel = CpuKernel(attention_plan(2, n, d, 64, 64), None)  # type: ignore[arg-type]
    out = kernel.run(x)["o"]
    return out, sum(len(f.places) for name, known in kernel._bound.items() for f in known.values() if "frozen" not in name)


def test_rows_that_need_their_maximum_are_computed_again() -> None:
    n, d = 256, 8
    x = qkv(2, n, d)
    want = attention(*x.values())
    got, again = frozen_run(x)
    close(got, want, 2e-6)
    assert again == 0
    u = np.ones(d, np.float32)
    x["k"][...], x["q"][...] = u, u * rng().uniform(0.5, 1, (2, n, 1)).astype(np.float32)
    x["q"][1, 70:80] = -10 * u  # weights exp(−28): with values near the end of float32's range they would lose bits
    x["v"] *= np.float32(1e-33)
    got, again = frozen_run(x)
    assert again == 1
    close(got * 1e33, attention(x["q"], x["k"], x["v"].astype(np.float64) * 1e33), 2e-6)
    x["q"][1, 70:80] = 10 * u  # weights exp(28): with large values their sums would overflow
    x["v"] = qkv(2, n, d)["v"] * np.float32(1e28)
    got, again = frozen_run(x)
    assert again == 1
    close(got, attention(*x.values()), 2e-6)
    x["k"] *= np.float32(10)  # no bound: everything is computed as written
    got, again = frozen_run(x)
    assert again == 8 and np.isfinite(got).all()


def test_nan_and_inf_with_frozen_pivots() -> None:
    n = 256
    for name, value, rows in (("q", np.nan, 1), ("k", np.nan, n), ("v", np.nan, n), ("v", np.inf, n)):
        x = qkv(2, n, 8)
        x[name][1, 5, 3] = value
        got, _ = frozen_run(x)
        want = attention(*x.values())
        assert np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(np.isinf(got), np.isinf(want))
        assert (~np.isfinite(got)).any(-1).sum() == rows
        finite = np.isfinite(want)
        close(got[finite], want[finite], 2e-6)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize(
    "name",
    [
        "prefill_causal", "prefill_gqa", "prefill_alibi", "decode_gqa", "attention_backward", "softmax", "log_softmax", "logsumexp",
        "cross_entropy", "cross_entropy_linear", "softmax_backward", "differential_attention",
    ],
)  # fmt: skip
def test_programs_with_frozen_pivots(name: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "SMALL", 0)
    monkeypatch.setattr(frozen, "WORTH", 0)
    case = CASES[name]
    x = [a * np.float32(scale) if a.dtype == np.float32 else a for a in case.inputs("small", rng(3))]
    program = en.trace(case.function("small"), *case.specs("small"))
    plan = en.optimize(program, "cpu").plan
    assert any(CpuKernel(plan, program)._frozen)
    got = en.optimize(program, "cpu")(*x)
    want = en.evaluate(program, *x)
    for g, w in zip(got if isinstance(got, tuple) else [got], want if isinstance(want, tuple) else [want]):
        assert np.linalg.norm(g - w) <= 4e-6 * np.linalg.norm(w)


def test_tiles_fit_what_a_core_keeps_at_hand() -> None:
    case = CASES["attention_sugar"]
    program = en.trace(case.function("small"), *case.specs("small", b=2, hq=4, hkv=4, n=1024, d=64))
    kernel = en.optimize(program, "cpu", cost_model=HostModel(Cpu("two cores", 2))).plan.kernels[0]
    arrays = sorted(x.tile for x in kernel.axes.values())
    assert 2**16 <= arrays[-1] * arrays[-2] <= 2**18  # scores


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("fmt", ["contiguous", "channels first", "reversed channels", "every other", "broadcast rows"])
def test_norms_of_any_type_and_strides(dtype: str, fmt: str) -> None:
    x = FORMATS[fmt](rng().standard_normal((3, 37, 8)).astype(getattr(ml_dtypes, dtype, dtype)))
    for dims in ((2,), (1,), (0, 2), (), (0, 1, 2)):
        every = np.sqrt((x.astype(np.float64) ** 2).sum(dims)).max()
        want = every if dims else np.abs(x).astype(np.float64).reshape(-1)[:: x.size // estimates.SAMPLE].max()
        assert abs(estimates.norm(x, dims, np.dtype(np.float64)) - want) <= 1e-12 * want
    assert estimates.norm(x[:0], (2,), np.dtype(np.float32)) == 0.0
    y = x.copy()
    y[2, 30, 1] = np.nan
    assert math.isnan(estimates.norm(y, (2,), np.dtype(np.float64)))


def test_a_sample_of_vectors_is_spread_over_all_of_them() -> None:
    x = np.zeros((1, 8, 5000, 4), np.float32)
    x[0, 5, 2500:] = 1.0
    assert estimates.norm(x, (3,), np.dtype(np.float32)) == 2.0
    assert estimates.norm(x.transpose(3, 2, 1, 0), (0,), np.dtype(np.float32)) == 2.0


# ------------------------------------------------------------------ threads


def blas_threads() -> list[int]:
    return [i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"]


def test_calls_give_the_same_bits_alone_and_together() -> None:
    kernel = CpuKernel(attention_plan(4, 300, 32, 64, 64), None)  # type: ignore[arg-type]
    before = blas_threads()
    x = qkv(4, 300, 32)
    first = kernel.run(x)["o"]
    results: list[np.ndarray] = []

    def call() -> None:
        for _ in range(3):
            results.append(kernel.run(x)["o"])

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 12 and all(np.array_equal(first, r) for r in results)
    assert blas_threads() == before


def test_an_error_in_a_block_is_raised_and_leaves_the_kernel_usable() -> None:
    e, i = rng().standard_normal((50, 64)), rng().integers(0, 50, (4000,))
    rows = T.gather(read("E", "v", "c"), "v", read("I", "t"))
    x = {"E": e, "I": i}
    plan = make_plan([({"Y": (rows, ("t", "c"))}, dict(t=("grid", 100), c=("whole", 0)))], dict(t=4000, c=64, v=50), x)
    kernel = CpuKernel(plan, None)  # type: ignore[arg-type]
    before = blas_threads()
    for bad in (50, -1, 1 << 40):
        wrong = i.copy()
        wrong[1234] = bad
        with pytest.raises(InputError, match=r"E.*0 … 49"):
            kernel.run({"E": e, "I": wrong})
    assert blas_threads() == before
    assert np.array_equal(kernel.run(x)["Y"], e[i])


def test_what_lies_beyond_a_ragged_end_has_no_position() -> None:
    e = rng().standard_normal((7, 3))
    rows = T.gather(read("E", "v", "c"), "v", T.iota("k"))
    sizes = {"k": 7, "k.o": 2, "k.i": 4, "c": 3, "v": 7}
    roles = {"k.o": ("grid", 1), "k.i": ("whole", 0), "c": ("whole", 0)}
    plan = make_plan([({"Y": (T.red("+", "k.i", rows), ("k.o", "c"))}, roles)], sizes, {"E": e})
    got = CpuKernel(plan, None).run({"E": e})["Y"]  # type: ignore[arg-type]
    np.testing.assert_allclose(got, [e[:4].sum(0), e[4:].sum(0)])


def test_it_can_be_interrupted() -> None:
    kernel = CpuKernel(attention_plan(8, 1024, 64, 64, 128), None)  # type: ignore[arg-type]
    x = qkv(8, 1024, 64)
    kernel.run(x)
    before = blas_threads()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    try:
        threading.Timer(0.1, _thread.interrupt_main).start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            while time.perf_counter() - start < 20:
                kernel.run(x)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert blas_threads() == before
    close(kernel.run(x)["o"], attention(*x.values()), 3e-6)


# ------------------------------------------------------------------ memory


def peak(f: object) -> int:
    tracemalloc.start()
    try:
        f()  # type: ignore[operator]
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_of_attention_at_16384() -> None:
    n, d = 16384, 64
    x = {name: np.zeros((1, n, d), np.float32) for name in "qkv"}
    size = 4 * n * d * 4
    kernel = CpuKernel(attention_plan(1, n, d, 512, 512), None)  # type: ignore[arg-type]
    used = peak(lambda: kernel.run(x))  # the output is in it, the inputs are not
    assert used + 3 * size / 4 < 1.6 * size


def test_temporaries_are_freed_after_their_last_use() -> None:
    n = 1 << 20
    x = {"x0": np.ones(n)}
    kernels = [({f"x{i + 1}": (add(read(f"x{i}", "i"), 1.0), ("i",))}, dict(i=("grid", 1 << 14))) for i in range(6)]
    kernel = CpuKernel(make_plan(kernels, dict(i=n), x), None)  # type: ignore[arg-type]
    assert (kernel.run(x)["x6"] == 7.0).all()
    assert peak(lambda: kernel.run(x)) < 3.5 * 8 * n  # the output and two temporaries


# ------------------------------------------------------------------ errors


def test_what_does_not_fit_is_said() -> None:
    kernel = CpuKernel(attention_plan(2, 16, 8, 16, 16), None)  # type: ignore[arg-type]
    x = qkv(2, 16, 8)
    for wrong, match in (
        ({"q": x["q"], "k": x["k"]}, "v is missing"),
        (x | {"v": x["v"][:1]}, r"v has shape \(1, 16, 8\), not \(2, 16, 8\)"),
        (x | {"v": x["v"].astype(np.float64)}, "v has dtype float64, not float32"),
        (x | {"v": x["v"].tolist()}, "v is a list"),
    ):
        with pytest.raises(InputError, match=match):
            kernel.run(wrong)
    out = np.empty((2, 16, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises(InputError, match="read-only"):
        kernel.run(x, {"o": out})


def test_source_is_the_tile_programs() -> None:
    kernel = CpuKernel(attention_plan(2, 16, 8, 16, 16), None)  # type: ignore[arg-type]
    assert kernel.source.startswith("kernel k0(") and "for j" in kernel.source


def test_reads_outside_of_an_array_give_zero() -> None:
    x = {"X": rng().standard_normal((4, 10)).astype(np.float32), "W": rng(1).standard_normal(3).astype(np.float32)}
    y = red("+", "t", mul(inp("X", (affine(0, c=1), affine(-2, i=1, t=2))), read("W", "t")))
    for i in (("grid", 4), ("loop", 3), ("whole", 0)):
        plan = make_plan(
            [({"Y": (y, ("c", "i"))}, dict(c=("grid", 3), i=i, t=("whole", 0)))], dict(c=4, i=10, t=3), x, compute="float32"
        )
        padded = np.pad(x["X"], ((0, 0), (2, 2))).astype(float)
        close(run(plan, x)["Y"], sum(padded[:, 2 * t : 2 * t + 10] * x["W"][t] for t in range(3)), 1e-6)


@pytest.mark.parametrize("step,first", [(1, -3), (1, 4), (2, -5), (-1, 7), (-2, 17), (-3, 40), (1, 100), (1, -100)])
@pytest.mark.parametrize("tile", [4, 11])
def test_reads_partly_outside_of_an_array(step: int, first: int, tile: int) -> None:
    x = {"X": rng().standard_normal((4, 10)).astype(np.float32)}
    y = add(inp("X", (affine(0, c=1), affine(first, i=step))), inp("X", (affine(-2, c=1), affine(first, i=step))))
    plan = make_plan([({"Y": (y, ("c", "i"))}, dict(c=("grid", 3), i=("grid", tile)))], dict(c=4, i=11), x, compute="float32")
    at = first + step * np.arange(11)
    inside = np.where((at >= 0) & (at < 10), x["X"][:, at.clip(0, 9)], 0)
    close(run(plan, x)["Y"], inside + np.concatenate([np.zeros((2, 11)), inside[:2]]), 1e-6, least=1.0)


@pytest.mark.slow
def test_faster_than_unfused_numpy() -> None:
    x = qkv(1, 8192, 64)
    kernel = CpuKernel(attention_plan(1, 8192, 64, 512, 512), None)  # type: ignore[arg-type]

    def unfused() -> np.ndarray:
        s = x["q"] @ x["k"].swapaxes(-1, -2) / np.float32(8)
        p = np.exp(s - s.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ x["v"]

    times: dict[str, list[float]] = {"fused": [], "unfused": []}
    for _ in range(3):
        for name, f in (("fused", lambda: kernel.run(x)), ("unfused", unfused)):
            start = time.perf_counter()
            f()
            times[name].append(time.perf_counter() - start)
    assert min(times["unfused"]) > 1.5 * min(times["fused"])


@pytest.mark.parametrize("x", [[1.0, -2.0, 4.0], [1.0, 0.0, 2.0], [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("columns", [0, 2])
def test_factors_that_are_infinite_stay_in_their_sum(x: list[float], columns: int) -> None:
    """Σ x/m is NaN where m is 0 and some x are negative and some are not, or one is 0: what leaves a sum must be finite."""

    def f(x, m):
        y = en.xp.sum(x / en.xp.max(m, axis=-1, keepdims=True), axis=-1)
        return y[:, None] * en.xp.ones((1, columns)) if columns else y

    a, m = np.array([x, x]), np.array([[0.0, -1.0], [2.0, 1.0]])
    with np.errstate(all="ignore"):
        want = (a / m.max(-1, keepdims=True)).sum(-1)
    p = en.trace(f, en.TensorSpec(a.shape, "float64"), en.TensorSpec(m.shape, "float64"))
    for got in (en.optimize(p, "cpu")(a, m), en.evaluate(p, a, m)):
        np.testing.assert_allclose(got.reshape(2, -1)[:, 0], want)
