"""The CUDA lowering: emitted kernels run in the emulator against float64, and compile for every architecture."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import eqsat_neptune.extraction  # before codegen.lower
import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda import emit as emit_module
from eqsat_neptune.codegen.cuda import simple as simple_module
from eqsat_neptune.codegen.cuda.arch import cuda_arch, hopper_emulator_arch
from eqsat_neptune.codegen.cuda.emit import emit, feasible, is_packed, packing, precision_of, resources
from eqsat_neptune.codegen.cuda.emulate import host_compiler, numpy_dtype, run
from eqsat_neptune.codegen.cuda.layout import Unsupported
from eqsat_neptune.codegen.cuda.planner import plan
from eqsat_neptune.codegen.cuda.reductions import Reductions
from eqsat_neptune.codegen.cuda.simple import Simple
from eqsat_neptune.codegen.hip.arch import hip_arch
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.tile import Loop
from eqsat_neptune.cost_models import model_for
from eqsat_neptune.cost_models.base import Sizes
from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

import eqsat_neptune as en
from eqsat_neptune import terms as T
from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import Affine, add, bi, inp, iota, mul, num, sub, un, where
from eqsat_neptune.terms import axis_index as A

BF16 = ml_dtypes.bfloat16
ARCHES = ("sm_80", "sm_89", "sm_90a", "sm_120a")
SOFT = T.Monoid(("max",), (((0, un("exp", sub(T.var("r0"), T.var("R0")))),),))

needs_compiler = pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler for the emulator")


@dataclass
class Job:
    """Kernels over buffers, inputs and the float64 result of each output."""

    kernels: list[Kernel]
    buffers: dict[str, Buffer]
    inputs: dict[str, np.ndarray]
    want: dict[str, np.ndarray]
    tolerance: float = 5e-3
    compute: str = "float32"
    programs: list = field(init=False)

    def __post_init__(self) -> None:
        self.programs = [lower(k, self.buffers, self.compute) for k in self.kernels]

    def check(self, out: dict[str, np.ndarray]) -> None:
        for name, want in self.want.items():
            got = np.asarray(out[name]).astype(np.float64)
            assert got.shape == want.shape
            assert np.array_equal(np.isnan(got), np.isnan(want)), f"{name}: NaN in other places"
            finite = np.isfinite(want)
            assert np.array_equal(got[~finite], want[~finite], equal_nan=True)
            error = np.linalg.norm((got - want)[finite]) / max(np.linalg.norm(want[finite]), 1e-30)
            assert error <= self.tolerance, f"{name}: relative error {error}\n{self.programs[0]}"


def check_all(jobs: dict[str, Job], seeds: tuple[int, ...] = (0, 11)) -> None:
    """All jobs in one translation unit: compiling is what takes time."""
    programs, buffers, inputs, places = [], {}, {}, {}
    for prefix, job in jobs.items():
        rename = {b: f"{prefix}_{b}" for b in job.buffers}
        places[prefix] = rename
        for b in job.buffers.values():
            buffers[rename[b.name]] = replace(b, name=rename[b.name])
        inputs |= {rename[n]: x for n, x in job.inputs.items()}
        renamed = [renamed_kernel(k, rename, f"{prefix}_{n}") for n, k in enumerate(job.kernels)]
        programs += [lower(k, buffers, job.compute) for k in renamed]
    for out in run(programs, buffers, inputs, seeds=seeds):
        for prefix, job in jobs.items():
            job.check({n: out[places[prefix][n]] for n in job.want})


def renamed_kernel(k: Kernel, names: dict[str, str], name: str) -> Kernel:
    def f(t: T.Term, args: tuple[T.Term, ...]) -> T.Term | None:
        return T.make("input", (names[t.attr[0]], t.attr[1])) if t.op == "input" else None  # type: ignore[index]

    terms = T.rewrite([s.term for s in k.stores], f)
    return replace(k, name=name, stores=tuple(Store(names[s.buffer], t, s.index) for s, t in zip(k.stores, terms, strict=True)))


def make(dtype: str, shape: tuple[int, ...], seed: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(numpy_dtype(dtype))


def f64(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


# ------------------------------------------------------------------ attention, under many schedules


def attention(
    h: int = 2, g: int = 1, n: int = 70, m: int = 90, d: int = 32, e: int = 32, *, mask: str = "all", cap: float = 0.0, alibi: bool = False,
    pivot: bool = True, rows: tuple[int, int] = (1, 32), keys: int = 32, split: int = 1, dtype: str = "bfloat16", compute: str = "float32",
    choices: dict | None = None, change: Callable[[dict[str, np.ndarray]], None] | None = None, tolerance: float = 5e-3,
) -> Job:  # fmt: skip
    """Heads h·g over h key heads, n query rows, m keys; rows: (heads of a group, query rows) of a block; split: parts of the keys."""
    key = "k.i" if split > 1 else "k"
    head = A("h").plus(A("g")) if False else (A("g").plus(A("h"), g) if g > 1 else A("h"))
    q = inp("Q", (head, A("q"), A("d"))) if n > 1 else inp("Q", (head, Affine(0), A("d")))
    k, v = inp("K", (A("h"), A("k"), A("d"))), inp("V", (A("h"), A("k"), A("e")))
    here = iota("q") if n > 1 else num(m - 1)
    s = mul(T.red("+", "d", mul(q, k)), 1 / math.sqrt(d))
    if cap:
        s = mul(cap, un("tanh", mul(s, 1 / cap)))
    if alibi:
        s = add(s, mul(inp("slopes", (head,)), sub(iota("k"), here)))
    keep = {
        "all": None,
        "causal": bi("le", iota("k"), here),
        "window": bi("and", bi("le", iota("k"), here), bi("lt", sub(here, iota("k")), num(20.0))),
        "late": bi("le", add(iota("k"), num(40.0)), here),  # nothing for the first rows
    }[mask]
    if keep is not None:
        s = where(keep, s, num(-math.inf))
    one = num(1.0)
    if pivot:
        top, weight, value = (T.fold(SOFT, i, key, [s, x]) for i, x in ((0, one), (1, one), (1, v)))
    else:
        top, weight, value = None, T.red("+", key, un("exp", s)), T.red("+", key, mul(un("exp", s), v))
    axes = {"h": Axis(h, 1, "grid")}
    extents = {"h": h, "k": m, "d": d, "e": e}
    if g > 1:
        axes["g"], extents["g"] = Axis(g, rows[0], "whole" if rows[0] == g else "grid"), g
    if n > 1:
        axes["q"], extents["q"] = Axis(n, min(n, rows[1]), "grid"), n
    axes |= {"d": Axis(d, d, "whole"), "e": Axis(e, e, "whole")}
    shapes = {"Q": (h * g, n, d), "K": (h, m, d), "V": (h, m, e)}
    buffers = {b: Buffer(b, x, dtype, "input") for b, x in shapes.items()}
    if alibi:
        buffers["slopes"] = Buffer("slopes", (h * g,), "float32", "input")
    buffers["O"] = Buffer("O", (h * g, n, e), dtype, "output")
    at = (head, A("q") if n > 1 else Affine(0), A("e"))
    inputs = {b.name: make(b.dtype, b.shape, i, 0.1 if b.name == "slopes" else 1.0) for i, b in enumerate(buffers.values()) if b.kind == "input"}
    if change:
        change(inputs)
    want = {"O": attend(inputs, g, mask, cap, alibi, n, m, d)}
    if split == 1:
        axes["k"] = Axis(m, keys, "loop")
        return Job([Kernel("k0", (Store("O", T.div(value, weight), at),), axes, extents, choices or {})], buffers, inputs, want, tolerance, compute)
    block = -(-m // split // keys) * keys
    axes |= {"k.o": Axis(split, 1, "grid"), "k.i": Axis(block, keys, "loop")}
    extents |= {"k.o": split, "k.i": block}
    part = (head, at[1], A("k.o"))
    buffers["tO"] = Buffer("tO", (h * g, n, split, e), "float32", "temp")
    stores = [Store("tO", value, (*part, A("e")))]
    named = [("tL", weight)] + ([("tM", top)] if top is not None else [])
    for name, term in named:
        buffers[name] = Buffer(name, (h * g, n, split), "float32", "temp")
        stores.append(Store(name, term, part))
    o, l = inp("tO", (*part, A("e"))), inp("tL", part)
    if pivot:
        t = inp("tM", part)
        joined = T.div(T.fold(SOFT, 1, "k.o", [t, o]), T.fold(SOFT, 1, "k.o", [t, l]))
    else:
        joined = T.div(T.red("+", "k.o", o), T.red("+", "k.o", l))
    last = {a: Axis(x.extent, 1, "grid") for a, x in axes.items() if a in "hgq"} | {
        "e": Axis(e, e, "whole"), "k.o": Axis(split, split, "whole"),
    }  # fmt: skip
    first = Kernel("k0", tuple(stores), axes, extents, choices or {})
    return Job([first, Kernel("k1", (Store("O", joined, at),), last, extents)], buffers, inputs, want, tolerance, compute)


def attend(x: dict[str, np.ndarray], g: int, mask: str, cap: float, alibi: bool, n: int, m: int, d: int) -> np.ndarray:
    k, v = (np.repeat(f64(x[i]), g, 0) for i in "KV")
    s = np.einsum("hqd,hkd->hqk", f64(x["Q"]), k) / math.sqrt(d)
    if cap:
        s = cap * np.tanh(s / cap)
    i, j = (np.arange(n) if n > 1 else np.array([m - 1]))[:, None], np.arange(m)[None]
    if alibi:
        s = s + f64(x["slopes"])[:, None, None] * (j - i)
    keep = {"all": j >= 0, "causal": j <= i, "window": (j <= i) & (i - j < 20), "late": j + 40 <= i}[mask]
    with np.errstate(all="ignore"):
        s = np.where(keep, s, -np.inf)
        top = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isneginf(top), 0.0, top))
        return np.einsum("hqk,hke->hqe", p, v) / p.sum(-1, keepdims=True)


@needs_compiler
def test_attention_under_many_schedules() -> None:
    check_all({
        "global": attention(),
        "causal": attention(mask="causal", rows=(1, 64), keys=16),
        "window": attention(mask="window", n=90, cap=5.0, pivot=False, rows=(1, 16), keys=16),
        "dead": attention(mask="late", n=90),  # whole rows, and first tiles, without a key: NaN as 0/0
        "alibi": attention(mask="causal", alibi=True, n=50, m=50),
        "heads": attention(g=3, mask="causal", rows=(3, 16), n=33, m=33),
        "wide": attention(d=64, e=16, rows=(1, 128), n=130, choices={"warps": 4, "stages": 3}),
        "eighty": attention(d=80, e=40, m=33, keys=16, choices={"stages": 1}),
        "fp16": attention(dtype="float16", tolerance=1e-3),
    })  # fmt: skip


@needs_compiler
def test_few_rows_share_the_keys_between_warps() -> None:
    check_all({
        "one": attention(n=1, m=300, keys=64),
        "group": attention(g=5, n=1, m=150, rows=(5, 1), keys=64, choices={"warps": 4, "stages": 3}),
        "split": attention(n=1, m=500, keys=64, split=3),
        "nopivot": attention(g=2, n=1, m=300, rows=(2, 1), keys=64, split=2, cap=5.0, pivot=False),
        "alibi": attention(g=2, n=1, m=200, rows=(2, 1), keys=32, alibi=True, choices={"warps": 2}),
        "rows": attention(n=7, m=100, mask="causal", rows=(1, 7), keys=64),
        "nothing": attention(n=7, m=64, mask="late", rows=(1, 7), keys=64),
    })  # fmt: skip


def rounded_sums(job: Job) -> list[bool]:
    """Of the sums that add rounded values: do they so on the tensor cores?"""
    precision = precision_of(job.buffers, job.compute)
    return [x.by_matrix for p in job.programs for x in plan(p, cuda_arch("sm_90a"), precision).sums.values()]


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_weighted_mean_of_one_value_is_that_value(dtype: str) -> None:
    """Weights with no maximum taken out are rounded for the product: their sum adds what the product takes."""

    def change(inputs: dict[str, np.ndarray]) -> None:
        inputs["Q"] *= inputs["Q"].dtype.type(3)

    more = dict(mask="causal", cap=8.0, pivot=False, dtype=dtype, change=change)
    jobs = {
        "many": attention(n=40, m=40, **more),
        "few": attention(n=7, m=100, rows=(1, 7), keys=64, **more),
        "heads": attention(g=3, n=20, m=64, rows=(3, 16), keys=16, **more),
    }
    programs, buffers, inputs = [], {}, {}
    for name, job in jobs.items():
        assert rounded_sums(job) == [True]
        names = {b: f"{name}_{b}" for b in job.buffers}
        buffers |= {names[b.name]: replace(b, name=names[b.name]) for b in job.buffers.values()}
        inputs |= {names[n]: x for n, x in job.inputs.items()}
        programs += [lower(renamed_kernel(k, names, name), buffers) for k in job.kernels]
    (out,) = run(programs, buffers, inputs, seeds=(4,))
    for name, job in jobs.items():
        got, v = out[f"{name}_O"], job.inputs["V"]
        assert np.array_equal(got[:, 0], np.repeat(v[:, 0], len(got) // len(v), 0))
        error = np.abs(f64(got) - job.want["O"]).max(-1) / np.abs(job.want["O"]).max(-1)
        assert error[:, :4].max() < 2.0 ** (-8 if dtype == "bfloat16" else -11), error


@needs_compiler
def test_sums_of_operands_in_shared_memory_are_rounded_too() -> None:
    """Weights on the right of a product, for each column its own, all but one of them 0."""
    x, v = make("bfloat16", (20, 64), 0), make("bfloat16", (64, 32), 1)
    b = where(bi("eq", iota("k"), 5.0), un("exp", inp("V", (A("k"), A("e")))), num(0.0))
    y = T.div(T.red("+", "k", mul(inp("X", (A("m"), A("k"))), b)), T.red("+", "k", b))
    axes = {"m": Axis(20, 20, "whole"), "k": Axis(64, 32, "loop"), "e": Axis(32, 32, "grid")}
    job = simple_job({"Y": (y, ("m", "e"))}, axes, {"X": x, "V": v}, {"Y": np.repeat(f64(x)[:, 5:6], 32, 1)}, tolerance=0.0)
    assert rounded_sums(job) == [False]
    # weights that are products: of a value in registers with one for each key
    w = make("bfloat16", (32, 64), 2)
    p = un("exp", T.red("+", "d", mul(inp("X", (A("m"), A("d"))), inp("W", (A("d"), A("k"))))))
    p = where(bi("eq", iota("k"), iota("m")), p, num(0.0))
    one = inp("V", (A("k"), Affine(3)))
    y = T.div(T.red("+", "k", mul(p, one, inp("V", (A("k"), A("e"))))), T.red("+", "k", mul(p, one)))
    axes = {"m": Axis(20, 20, "whole"), "d": Axis(32, 32, "whole"), "k": Axis(64, 32, "loop"), "e": Axis(32, 32, "grid")}
    products = simple_job({"Y": (y, ("m", "e"))}, axes, {"X": x[:, :32], "W": w, "V": v}, {"Y": f64(v)[:20]}, tolerance=0.0)
    assert rounded_sums(products) == [True]
    check_all({"columns": job, "products": products}, seeds=(1,))


def test_sums_beside_unrounded_ones_stay_unrounded() -> None:
    """What is compared with sums of the same weights that no product rounds must add what they add."""
    X, W, V, G = inp("X", (A("m"), A("d"))), inp("W", (A("d"), A("k"))), inp("V", (A("k"), A("e"))), inp("G", (A("m"), A("k")))
    p = un("exp", T.red("+", "d", mul(X, W)))
    weight, value = T.red("+", "k", p), T.red("+", "k", mul(p, V))
    mean = T.div(T.red("+", "k", mul(p, un("tanh", G))), weight)
    axes = {"m": Axis(64, 32, "grid"), "d": Axis(32, 32, "whole"), "k": Axis(64, 32, "loop"), "e": Axis(32, 32, "whole")}
    shapes = {"X": (64, 32), "W": (32, 64), "V": (64, 32), "G": (64, 64)}
    inputs = {n: make("bfloat16", s, i, 0.3) for i, (n, s) in enumerate(shapes.items())}

    def sums(**terms: tuple[T.Term, tuple[str, ...]]) -> list[bool]:
        return rounded_sums(simple_job(terms, axes, inputs, {}))

    assert sums(Y=(T.div(value, weight), ("m", "e"))) == [True]
    scaled = T.red("+", "k", mul(p, inp("W", (Affine(3), A("k"))), V)), T.red("+", "k", mul(p, inp("W", (Affine(3), A("k")))))
    assert sums(Y=(T.div(*scaled), ("m", "e"))) == [True]
    assert sums(Y=(value, ("m", "e")), S=(weight, ("m",))) == [True]
    assert sums(Y=(T.div(value, add(weight, 1.0)), ("m", "e"))) == [True]
    assert sums(Y=(sub(value, mean), ("m", "e"))) == []  # the mean is a quotient of two unrounded sums
    assert sums(Y=(T.div(value, weight), ("m", "e")), Z=(mean, ("m",))) == []
    assert sums(Y=(value, ("m", "e")), S=(weight, ("m",)), R=(T.red("+", "k", mul(p, p)), ("m",))) == []


@needs_compiler
def test_full_precision_goes_without_tensor_cores() -> None:
    check_all({
        "f32": attention(dtype="float32", mask="causal", tolerance=2e-6),
        "f64": attention(dtype="float64", compute="float64", mask="causal", tolerance=1e-13),
        "one": attention(n=1, m=100, dtype="float32", tolerance=2e-6),
    }, seeds=(3,))  # fmt: skip


def strided(x: np.ndarray, how: str) -> np.ndarray:
    """The same values in other places of memory."""
    if how == "transposed":
        return np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0)
    if how == "backwards":
        return np.ascontiguousarray(x[:, ::-1])[:, ::-1]
    if how == "odd":  # rows start anywhere
        wide = np.zeros((*x.shape[:2], x.shape[2] + 3), x.dtype)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if how == "rows":  # contiguous rows at multiples of 16 bytes, not row-major
        return np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)
    return np.broadcast_to(x[:, :1], x.shape)


@needs_compiler
@pytest.mark.parametrize("how", ["transposed", "backwards", "odd", "rows", "broadcast"])
def test_inputs_of_any_strides(how: str) -> None:
    def change(inputs: dict[str, np.ndarray]) -> None:
        for n in inputs:
            inputs[n] = strided(inputs[n], how)

    job = attention(n=40, m=40, mask="causal", change=change)
    (out,) = run(job.programs, job.buffers, job.inputs)
    job.check(out)


def test_packing_of_arrays() -> None:
    shape = (4, 6, 32)
    assert is_packed(shape, (192, 32, 1), "bfloat16") == 2
    assert is_packed(shape, (192, 32, 1), "bfloat16", 8) == 0
    assert is_packed(shape, (32, 128, 1), "bfloat16") == 1
    assert is_packed(shape, (0, 32, 1), "bfloat16") == 1
    assert is_packed(shape, (1, 4, 24), "bfloat16") == 0
    assert is_packed((4, 6, 33), (198, 33, 1), "bfloat16") == 0
    assert is_packed((1, 1), (7, 9), "float32") == 2


def test_no_tensor_map_describes_repeated_rows_or_rows_that_lie_backwards() -> None:
    """Real calls and the emulator decide by one function."""
    shape = (4, 6, 32)
    assert packing(shape, (192, 32, 1), "bfloat16", 0) == 2 and packing(shape, (32, 128, 1), "bfloat16", 0) == 1
    assert packing(shape, (0, 32, 1), "bfloat16", 0) == packing(shape, (192, -32, 1), "bfloat16", 0) == 0
    assert packing((1, 6, 32), (-192, 32, 1), "bfloat16", 0) == 2


# ------------------------------------------------------------------ rows, products, chains


def simple_job(terms: dict[str, tuple[T.Term, tuple[str, ...]]], axes: dict[str, Axis], inputs: dict[str, np.ndarray], want: dict[str, np.ndarray],
               dtype: str = "bfloat16", **more: object) -> Job:  # fmt: skip
    extents = {a: x.extent for a, x in axes.items()}
    buffers = {n: Buffer(n, x.shape, x.dtype.name, "input") for n, x in inputs.items()}
    stores = []
    for name, (term, dims) in terms.items():
        buffers[name] = Buffer(name, tuple(extents[a] for a in dims), dtype, "output")
        stores.append(Store(name, term, tuple(map(A, dims))))
    choices = more.pop("choices", {})
    return Job([Kernel("k0", tuple(stores), axes, extents, choices)], buffers, inputs, want, **more)  # type: ignore[arg-type]


def softmax_rows(m: int, n: int, rows: int, tile: int | None, dtype: str = "bfloat16", warps: int | None = None) -> Job:
    x = inp("X", (A("m"), A("n")))
    if tile:
        y = T.div(un("exp", sub(x, T.fold(SOFT, 0, "n", [x, num(1.0)]))), T.fold(SOFT, 1, "n", [x, num(1.0)]))
    else:
        p = un("exp", sub(x, T.red("max", "n", x)))
        y = T.div(p, T.red("+", "n", p))
    axes = {"m": Axis(m, rows, "grid"), "n": Axis(n, tile or n, "loop" if tile else "whole")}
    a = make(dtype, (m, n), 1)
    p64 = np.exp(f64(a) - f64(a).max(-1, keepdims=True))
    choices = {"warps": warps} if warps else {}
    return simple_job({"Y": (y, ("m", "n"))}, axes, {"X": a}, {"Y": p64 / p64.sum(-1, keepdims=True)}, dtype, choices=choices,
                      tolerance=5e-3 if dtype == "bfloat16" else 2e-6)  # fmt: skip


def product(m: int, n: int, k: int, tile: tuple[int, int, int], order: str = "mk,kn", normed: bool = False, dtype: str = "bfloat16", **more: object) -> Job:
    first, second = order.split(",")
    x, w = inp("X", tuple(map(A, first))), inp("W", tuple(map(A, second)))
    size = {"m": m, "n": n, "k": k}
    a, b = (make(dtype, tuple(size[c] for c in o), i) for i, o in enumerate((first, second)))
    y = T.red("+", "k", mul(x, w))
    want = np.einsum(f"{order}->mn", f64(a), f64(b))
    if normed:
        y = mul(y, un("rsqrt", add(mul(T.red("+", "k", mul(x, x)), 1 / k), 1e-6)))
        want = want / np.sqrt((f64(a) ** 2).mean(first.index("k"))[:, None] + 1e-6)
    axes = {"m": Axis(m, tile[0], "grid"), "n": Axis(n, tile[1], "grid"), "k": Axis(k, tile[2], "loop" if tile[2] < k else "whole")}
    return simple_job({"Y": (y, ("m", "n"))}, axes, {"X": a, "W": b}, {"Y": want}, dtype, **more)


@needs_compiler
def test_rows() -> None:
    check_all({
        "short": softmax_rows(5, 37, 2, None),
        "long": softmax_rows(3, 1500, 1, None, warps=2),
        "streamed": softmax_rows(3, 700, 1, 128),
        "ragged": softmax_rows(5, 1001, 4, 250, "float32"),
    })  # fmt: skip


def affine_rows(m: int, n: int, rows: int, warps: int, dtype: str = "bfloat16") -> Job:
    """(x − mean x)/√(mean (x − mean x)² + ε) · gain + bias."""
    x, gain, bias = inp("X", (A("m"), A("n"))), inp("G", (A("n"),)), inp("B", (A("n"),))
    d = sub(x, mul(T.red("+", "n", x), 1 / n))
    y = add(mul(d, un("recip", un("sqrt", add(mul(T.red("+", "n", mul(d, d)), 1 / n), 1e-6))), gain), bias)
    axes = {"m": Axis(m, rows, "grid"), "n": Axis(n, n, "whole")}
    a, g, b = make(dtype, (m, n), 1), make(dtype, (n,), 2), make(dtype, (n,), 3)
    c = f64(a) - f64(a).mean(-1, keepdims=True)
    want = c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-6) * f64(g) + f64(b)
    return simple_job({"Y": (y, ("m", "n"))}, axes, {"X": a, "G": g, "B": b}, {"Y": want}, dtype, choices={"warps": warps})


@needs_compiler
def test_what_rows_share_is_loaded_piece_by_piece() -> None:
    """Also beside the end of the rows and of the array, and for several rows at a time."""
    jobs = {
        "one": affine_rows(3, 2048, 1, 4),
        "two": affine_rows(5, 2048, 2, 4),
        "ragged": affine_rows(3, 2056, 2, 4),
        "float": affine_rows(3, 1028, 2, 4, "float32"),
    }
    for job in jobs.values():
        s = plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, "float32"))
        assert {job.programs[0].buffer(x.load.buffer).name for x in s.tiles.values()} == set() and len(s.pieces) == 2
    check_all(jobs)


@pytest.mark.parametrize("rows, warps, blocks", [(1, 4, 4), (1, 8, 3), (2, 4, 2), (2, 8, 2)])
def test_rows_take_the_registers_that_the_model_reckons_with(rows: int, warps: int, blocks: int) -> None:
    """A row of 8192 in four warps is 64 registers a thread: with gain and bias beside it only two blocks fitted (and spilled)."""
    from eqsat_neptune.runtime.nvrtc import compile_cuda

    if reason := compiler_missing("sm_90a"):
        pytest.skip(reason)
    job = affine_rows(16, 8192, rows, warps)
    assert plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, "float32")).min_blocks == blocks
    (found,) = compile_cuda(emit(job.programs, job.buffers, cuda_arch("sm_90a")).text, "sm_90a").kernels.values()
    sizes = Sizes({"m": np.array([float(rows)]), "n": np.array([8192.0])}, {"m": np.array([16.0]), "n": np.array([8192.0])})
    model = model_for("cuda:sm_90a").cost(replace(job.programs[0], choices={}), sizes, detail=True)
    assert found.spill_bytes == 0 and found.registers <= 65536 // (32 * warps * blocks)
    assert float(model.detail["resident"][0]) * rows >= 3  # of the warps that the model takes: three blocks of eight


@pytest.mark.parametrize("columns", [128, 64, 24])
def test_no_lane_is_left_out_of_a_short_row(columns: int) -> None:
    """A run of 16 bytes for each of 32 lanes is 256 columns of 16 bits: where rows are shorter, so are runs."""
    job = affine_rows(100, columns, 16, 4)
    schedule = plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, "float32"))
    wide = [h.column for h in schedule.home.values() if h.column]
    assert wide and all(g.padded < 2 * columns and (g.run == 1 or 32 * g.run <= columns) for g in wide)


def deviations(n: int, tile: int | None, dtype: str) -> Job:
    """Variances of 1000 ± 10⁻³, in two passes, whose error is that of the mean, squared; `tile`: by a carried mean."""
    x = inp("X", (A("m"), A("n")))
    if tile:
        step = sub(T.var("r0"), T.var("R0"))
        moments = T.Monoid((("mean", 0),), (((0, num(1.0)),), ((1, num(1.0)), (0, step)), ((2, num(1.0)), (1, mul(2.0, step)), (0, mul(step, step)))))
        y = mul(T.fold(moments, 3, "n", [x, num(1.0), num(0.0), num(0.0)]), 1 / n)
    else:
        d = sub(x, mul(T.red("+", "n", x), 1 / n))
        y = mul(T.red("+", "n", mul(d, d)), 1 / n)
    axes = {"m": Axis(16, 4, "grid"), "n": Axis(n, tile or n, "loop" if tile else "whole")}
    a = (1000 + 1e-3 * np.random.default_rng(n).standard_normal((16, n))).astype(np.float32)
    numpy_error = np.linalg.norm(a.var(-1) - f64(a).var(-1)) / np.linalg.norm(f64(a).var(-1))
    return simple_job({"Y": (y, ("m",))}, axes, {"X": a}, {"Y": f64(a).var(-1)}, dtype, tolerance=max(2 * numpy_error, 4e-3 if dtype == "bfloat16" else 0.0))


@needs_compiler
def test_variances_of_values_far_from_zero() -> None:
    check_all({f"{dtype}{n}_{tile}": deviations(n, tile, dtype) for dtype in ("float32", "bfloat16") for n in (100, 384, 500, 1000) for tile in (None, 64)},
              seeds=(0,))  # fmt: skip


@needs_compiler
def test_products() -> None:
    check_all({
        "plain": product(70, 100, 96, (64, 64, 32)),
        "both": product(64, 64, 64, (32, 64, 32), "km,nk"),
        "few": product(5, 96, 200, (5, 32, 64), normed=True),
        "ragged": product(33, 41, 50, (16, 32, 16)),
        "f32": product(40, 40, 70, (32, 32, 16), dtype="float32", tolerance=2e-6),
        "warps": product(64, 128, 64, (64, 128, 32), choices={"warps": 8, "stages": 3}),
    }, seeds=(5,))  # fmt: skip


def shared_by(job: Job) -> int:
    """Warps that share the tiles of the job's loop."""
    return plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, job.compute)).warps_split


@needs_compiler
def test_few_rows_of_a_product_share_the_loop_between_warps() -> None:
    x, u, v = make("bfloat16", (16, 512), 0), make("bfloat16", (512, 64), 1), make("bfloat16", (512, 64), 2)
    X, U, V = inp("X", (A("m"), A("k"))), inp("U", (A("k"), A("n"))), inp("V", (A("k"), A("n")))
    y = mul(T.red("+", "k", mul(X, U)), un("tanh", T.red("+", "k", mul(X, V))))
    axes = {"m": Axis(16, 16, "grid"), "n": Axis(64, 32, "grid"), "k": Axis(512, 128, "loop")}
    want = (f64(x) @ f64(u)) * np.tanh(f64(x) @ f64(v))
    jobs = {
        "statistic": product(32, 96, 1024, (32, 48, 256), normed=True, choices={"warps": 4, "stages": 3}),
        "ragged": product(21, 100, 328, (32, 48, 64), normed=True, choices={"warps": 4, "stages": 2}),
        "eight": product(16, 64, 1000, (16, 64, 256), choices={"warps": 8, "stages": 2}),
        "two": product(3, 40, 200, (3, 32, 32), "mk,nk"),
        "pair": simple_job({"Y": (y, ("m", "n"))}, axes, {"X": x, "U": u, "V": v}, {"Y": want}),
    }
    assert [shared_by(job) for job in jobs.values()] == [4, 4, 8, 2, 4]
    check_all(jobs)


@needs_compiler
def test_operands_that_are_also_read_by_element_come_as_matrices() -> None:
    """Rows or columns of the product, whole or with some missing; on AMD element by element."""
    jobs = {
        "rows": product(32, 64, 512, (32, 64, 128), normed=True),
        "columns": product(32, 64, 512, (32, 64, 128), order="km,kn", normed=True),
        "half": product(32, 64, 512, (32, 64, 128), normed=True, dtype="float16"),
        "some": product(20, 40, 500, (16, 40, 128), normed=True),
    }
    for name, job in jobs.items():
        assert re.search(r"\n +spread\(\w+, RowsByInner\(", emit(job.programs, job.buffers, cuda_arch("sm_80")).text), name
        assert "spread(" not in emit(job.programs, job.buffers, hip_arch("gfx942")).text
    check_all(jobs)


@needs_compiler
def test_blocks_of_a_cluster_share_the_loop() -> None:
    """Products and folds: every block has a part of the tiles, all have the sum, one stores it.  A loop too short for that stays whole."""
    arch = hopper_emulator_arch()
    jobs = {
        "two": product(16, 70, 600, (16, 64, 128), choices={"warps": 4, "stages": 2, "cluster": 2}),
        "four": product(5, 40, 1000, (5, 40, 64), choices={"warps": 4, "stages": 3, "cluster": 4}),
        "normed": product(20, 130, 520, (20, 64, 128), normed=True, choices={"warps": 4, "stages": 3, "cluster": 2}),
        "decode": attention(n=1, m=500, keys=64, choices={"warps": 4, "stages": 2, "cluster": 2}),
        "short": product(16, 70, 100, (16, 64, 64), choices={"warps": 4, "stages": 2, "cluster": 2}),
    }
    for name, job in jobs.items():
        source = emit(job.programs, job.buffers, arch)
        blocks = job.kernels[0].choices["cluster"] if name != "short" else 1
        assert source.launches[0].cluster == blocks and source.text.count("load_shared_of<float>(b") == (blocks > 1) * len(carries(job)), name
        for out in run(job.programs, job.buffers, job.inputs, seeds=(0, 1, 3), arch=arch):
            job.check(out)
    assert emit(jobs["two"].programs, jobs["two"].buffers, cuda_arch("sm_80")).launches[0].cluster == 1


def carries(job: Job) -> tuple:
    return next(s for s in job.programs[0].body if isinstance(s, Loop)).carries


@pytest.mark.parametrize("warps", [0, -1])
def test_numbers_of_warps_that_cannot_be_are_not_looked_for(warps: int) -> None:
    """As a plan from a file may have: halved, they never come to one."""
    job = product(64, 64, 64, (32, 64, 32), choices={"warps": warps})
    s = plan(job.programs[0], cuda_arch("sm_80"), precision_of(job.buffers, job.compute))
    assert s.warps_row * s.warps_column * s.warps_split > 0


def test_large_results_lie_in_many_warps() -> None:
    assert shared_by(product(64, 128, 512, (64, 128, 64))) == 1
    assert shared_by(product(64, 64, 512, (64, 64, 64))) == 1


def test_tiles_that_exist_as_a_whole_are_copied_without_lengths() -> None:
    assert job_text(product(32, 96, 1024, (32, 48, 256))).count("fill_rows<32, true>") == 2
    ragged = job_text(product(30, 96, 1024, (32, 48, 256)))
    assert ragged.count("fill_rows<32, false>") == 1 and ragged.count("fill_rows<32, true>") == 1


@needs_compiler
def test_chains_of_products() -> None:
    """(X·A)·B, a computed operand on either side, operands of 8 bits, a gather."""
    x, a, b = make("bfloat16", (40, 64), 0), make("bfloat16", (64, 16), 1), make("bfloat16", (16, 48), 2)
    X, P, Q = inp("X", (A("m"), A("k"))), inp("P", (A("k"), A("r"))), inp("Q", (A("r"), A("n")))
    chain = T.red("+", "r", mul(T.red("+", "k", mul(X, P)), Q))
    axes = {"m": Axis(40, 16, "grid"), "k": Axis(64, 32, "loop"), "r": Axis(16, 16, "whole"), "n": Axis(48, 48, "whole")}
    jobs = {"lora": simple_job({"Y": (chain, ("m", "n"))}, axes, {"X": x, "P": a, "Q": b}, {"Y": f64(x) @ f64(a) @ f64(b)}, tolerance=8e-3)}

    scaled = T.red("+", "k", mul(un("tanh", X), un("tanh", P)))
    axes = {"m": Axis(40, 32, "grid"), "k": Axis(64, 32, "loop"), "r": Axis(16, 16, "whole")}
    jobs["computed"] = simple_job({"Y": (scaled, ("m", "r"))}, axes, {"X": x, "P": a}, {"Y": np.tanh(f64(x)) @ np.tanh(f64(a))}, tolerance=8e-3)

    x8, p8 = x.astype(ml_dtypes.float8_e4m3fn), a.astype(ml_dtypes.float8_e5m2)
    eight = T.red("+", "k", mul(X, P))
    jobs["eight"] = simple_job({"Y": (eight, ("m", "r"))}, axes, {"X": x8, "P": p8}, {"Y": f64(x8) @ f64(p8)})

    table, index = make("float32", (30, 24), 3), np.array([4, 29, 0, -1, 7, 30], np.int64)
    rows = T.gather(inp("E", (A("v"), A("d"))), "v", inp("I", (A("i"),)))
    want = np.stack([f64(table[i]) if 0 <= i < 30 else np.full(24, np.nan) for i in index])
    axes = {"i": Axis(6, 2, "grid"), "d": Axis(24, 24, "whole"), "v": Axis(30, 30, "whole")}
    jobs["gather"] = simple_job({"Y": (rows, ("i", "d"))}, axes, {"E": table, "I": index}, {"Y": want}, "float32", tolerance=1e-7)
    check_all(jobs)


@needs_compiler
def test_a_product_without_rows_beside_one_with_rows() -> None:
    """Σ x·w and Σ b·w over one axis, added: the second is the same for every row."""
    x, w, b = make("bfloat16", (40, 64), 0), make("bfloat16", (64, 96), 1), make("bfloat16", (64,), 2)
    X, W, B = inp("X", (A("m"), A("k"))), inp("W", (A("k"), A("n"))), inp("B", (A("k"),))
    y = add(T.red("+", "k", mul(un("tanh", X), W)), T.red("+", "k", mul(B, W)))
    want = np.tanh(f64(x)) @ f64(w) + f64(b) @ f64(w)
    jobs = {}
    for name, tile, choices in (("one", (16, 32), {}), ("warps", (32, 96), {"warps": 4})):
        axes = {"m": Axis(40, tile[0], "grid"), "n": Axis(96, tile[1], "grid"), "k": Axis(64, 32, "loop")}
        job = jobs[name] = simple_job({"Y": (y, ("m", "n"))}, axes, {"X": x, "W": w, "B": b}, {"Y": want}, choices=choices)
        assert plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, "float32")).kind == "fragment"
    check_all(jobs, seeds=(0, 3))


@needs_compiler
@pytest.mark.parametrize("keys", [40, 48])
def test_warps_that_share_a_tile_copy_what_is_aligned(keys: int) -> None:
    """Rows of a tile that start at multiples of 16 bytes for the whole tile need not for the half of it that a warp takes."""
    x, w, z = make("bfloat16", (5, 32), 0), make("bfloat16", (32, 160), 1), make("bfloat16", (160, 16), 2)
    X, W, Z = inp("X", (A("m"), A("d"))), inp("W", (A("d"), A("k"))), inp("Z", (A("k"), A("e")))
    y = T.red("+", "k", mul(T.red("+", "d", mul(X, W)), Z))
    axes = {"m": Axis(5, 5, "whole"), "d": Axis(32, 32, "whole"), "k": Axis(160, keys, "loop"), "e": Axis(16, 16, "whole")}
    job = simple_job({"Y": (y, ("m", "e"))}, axes, {"X": x, "W": w, "Z": z}, {"Y": f64(x) @ f64(w) @ f64(z)}, choices={"warps": 2}, tolerance=8e-3)
    assert plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, "float32")).warps_split == 2
    check_all({"shared": job}, seeds=(1,))


@needs_compiler
def test_masks_over_what_varies_less_than_they_do() -> None:
    """A selection that only tiles at the edge need, of a value for each row (key), of a truth value, of a constant."""
    x, y = make("float32", (40, 50), 0), make("float32", (50, 24), 1)
    X, Y, c, b = inp("X", (A("m"), A("k"))), inp("Y", (A("k"), A("e"))), inp("X", (A("m"), Affine(3))), inp("Y", (A("k"), Affine(2)))
    keep = bi("le", iota("k"), iota("m"))
    live = np.arange(50)[None] <= np.arange(40)[:, None]
    kept = {
        "row": (c, f64(x)[:, 3:4]), "key": (b, f64(y)[:, 2]), "truth": (bi("lt", X, b), f64(x) < f64(y)[:, 2]), "one": (num(1.0), 1.0),
        "row_truth": (bi("lt", c, 0.2), f64(x)[:, 3:4] < 0.2), "all": (un("tanh", X), np.tanh(f64(x))),
    }  # fmt: skip
    jobs = {}
    for name, (t, v) in kept.items():
        w = np.where(live, v, 0.0)
        s = where(keep, t, num(0.0))
        terms = {"S": (T.red("+", "k", s), ("m",)), "Z": (T.red("+", "k", mul(s, Y)), ("m", "e"))}
        axes = {"m": Axis(40, 16, "grid"), "k": Axis(50, 16, "loop"), "e": Axis(24, 24, "whole")}
        for part in ("S", "Z"):
            mine = {a: axes[a] for a in ("mk" if part == "S" else "mke")}
            want = {"S": w.sum(-1) if part == "S" else None, "Z": w @ f64(y)}[part]
            jobs[name + part] = simple_job({part: terms[part]}, mine, {"X": x, "Y": y}, {part: want}, "float32", tolerance=2e-6)
    check_all(jobs, seeds=(1,))


@needs_compiler
def test_what_fits_no_fragment_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products over a batch inside one block, distances that are never multiplied out; and everything else, if need be."""
    x, y = make("float32", (3, 20, 9), 0), make("float32", (3, 9, 13), 1)
    X, Y = inp("X", (A("b"), A("m"), A("k"))), inp("Y", (A("b"), A("k"), A("n")))
    axes = {"b": Axis(3, 3, "whole"), "m": Axis(20, 20, "whole"), "k": Axis(9, 4, "loop"), "n": Axis(13, 8, "grid")}
    batch = simple_job({"Z": (T.red("+", "k", mul(X, Y)), ("b", "m", "n"))}, axes, {"X": x, "Y": y}, {"Z": f64(x) @ f64(y)}, "float32", tolerance=1e-6)
    u, v = make("float32", (17, 6), 2), make("float32", (23, 6), 3)
    distance = T.red("+", "d", un("abs", sub(inp("U", (A("i"), A("d"))), inp("V", (A("j"), A("d"))))))
    near = T.red("+", "j", un("exp", mul(-1.0, distance)))
    axes = {"i": Axis(17, 8, "grid"), "j": Axis(23, 5, "loop"), "d": Axis(6, 6, "whole")}
    want = np.exp(-np.abs(f64(u)[:, None] - f64(v)[None]).sum(-1)).sum(-1)
    jobs = {"batch": batch, "near": simple_job({"Z": (near, ("i",))}, axes, {"U": u, "V": v}, {"Z": want}, "float32", tolerance=1e-6)}
    check_all(jobs, seeds=(2,))

    def none(*args: object) -> None:
        raise Unsupported("as if no fragment fitted")

    monkeypatch.setattr(emit_module, "plan", none)
    jobs |= {
        "causal": attention(n=20, m=30, mask="causal", d=16, e=16),
        "split": attention(n=1, m=100, split=3, d=16, e=16),
        "rows": softmax_rows(3, 200, 1, 64),
        "f64": attention(n=5, m=9, d=4, e=4, dtype="float64", compute="float64", tolerance=1e-13),
    }
    check_all(jobs, seeds=(2,))
    monkeypatch.setattr(simple_module, "ROOM", 256)  # nothing but the smallest values in shared memory: the rest in a workspace
    check_all({"causal": jobs["causal"]}, seeds=(2,))


@needs_compiler
def test_nan_and_infinity_show_where_they_count() -> None:
    def change(inputs: dict[str, np.ndarray]) -> None:
        inputs["V"][0, 3, 5] = np.nan
        inputs["Q"][1, 7] = np.nan
        inputs["K"][1, 2] = 300.0

    job = attention(n=40, m=40, mask="causal", change=change, tolerance=1e-2)
    want = job.want["O"]
    assert np.isnan(want).any() and not np.isnan(want).all()
    (out,) = run(job.programs, job.buffers, job.inputs)
    got = f64(out["O"])
    # a key of weight exactly 0 may or may not show its NaN; here every kept key has weight
    assert np.array_equal(np.isnan(got[1]), np.isnan(want[1]))
    assert np.array_equal(np.isnan(got[0, 3:, 5]), np.isnan(want[0, 3:, 5])) and not np.isnan(got[0, :, :5]).any()


# ------------------------------------------------------------------ text


def job_text(job: Job, arch: str = "sm_90a") -> str:
    source = emit(job.programs, job.buffers, cuda_arch(arch))
    return "\n".join(f.text for f in source.functions)


def test_text_reads_well() -> None:
    text = job_text(attention(mask="causal"))
    assert "asm" not in text and "contract<" in text and "Rounded" not in text
    assert text.startswith("// kernel k0(") and "for k  where" in text  # the tile program heads the kernel
    assert all(len(line) < 400 for line in text.splitlines())
    balance = text.count("{") - text.count("}")
    assert balance == 0


@pytest.mark.parametrize("lowering", ["fragments", "an element a thread"])
def test_nothing_is_read_ahead_of_the_wait(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels start while the one ahead ends, another plan's too.  Reads through const __restrict__ pointers may be moved up, past the
    wait for the kernel that writes there."""

    def none(*_: Any) -> Any:
        raise Unsupported("not in this test")

    if lowering != "fragments":
        monkeypatch.setattr(emit_module, "plan", none)
    text = job_text(attention(n=1, m=500, keys=64, split=3), "sm_90a")
    bodies = re.split(r"^k\d+\(.*\) \{$", text, flags=re.MULTILINE)[1:]
    assert len(bodies) > 1 and all(x.count("previous_kernel_wait();") == 1 for x in bodies)
    assert [x.count("next_kernel_may_start();") for x in bodies] == [1] * (len(bodies) - 1) + [0]  # behind the last one comes another plan
    assert not any(re.search(r"\b(load|read|gather|copy)\w*\(", x.partition("previous_kernel_wait();")[0]) for x in bodies)
    assert "const bf16* " in text and not re.search(r"const \w+\* __restrict__", text)
    older = job_text(attention(n=1, m=500, keys=64, split=3), "sm_80")
    assert "const bf16* __restrict__" in older and "previous_kernel_wait();" not in older.partition("k0(")[2]


def test_text_depends_on_the_program_alone() -> None:
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import hashlib, test_cuda as t\n"
        "jobs = [t.attention(mask='causal', g=3, rows=(3, 16)), t.attention(n=1, m=500, keys=64, split=3), t.softmax_rows(5, 700, 1, 128)]\n"
        "print(hashlib.sha256(''.join(map(t.job_text, jobs)).encode()).hexdigest())"
    )
    out = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**_environment(), "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(out) == 1


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}


def test_masked_tiles_are_skipped_and_longest_blocks_run_first() -> None:
    text = job_text(attention(mask="causal", n=256, m=256, rows=(1, 64)))
    assert re.search(r"k_end = at_least\(at_most\(floor_div\(\(i64\)q0 \+ 63, 32\) \+ 1, 8\), k_first \+ 1\);", text)
    assert "the longest first" in text and "if (edge)" in text
    assert "edge" not in job_text(attention(n=256, m=256, rows=(1, 64)))  # nothing masked, nothing ragged: no code for it


def test_tiles_that_no_mask_touches_have_code_without_masks() -> None:
    def parts(arch: str = "sm_90a", **more: object) -> list[str]:
        text = job_text(attention(n=256, m=256, rows=(1, 64), **more), arch)  # type: ignore[arg-type]
        return re.findall(r"for \(; k_tile < k_end(?: && k_tile < (?:k_full_first|k_full_end))?; \+\+k_tile\) k_step\(k_tile, (\w+)\);", text)

    assert parts(mask="causal") == ["false", "true"]
    assert parts(mask="window") == ["true", "false", "true"]
    assert parts() == [] and parts(mask="causal", choices={"warps": 8}) == ["false", "true"]  # 64 rows are work for 4
    wide = dict(n=256, m=256, rows=(1, 256), mask="causal", choices={"warps": 8})
    assert "k_step" not in job_text(attention(**wide))  # type: ignore[arg-type]


def test_warps_that_share_a_loop_exchange_in_places_of_their_own() -> None:
    """Each goes through its iterations without waiting for the others: norms of keys, a value for each row that becomes one for each
    column, were written where other warps' were."""
    spec = en.TensorSpec((8, 256, 64), "bfloat16")
    kernel = en.optimize(CASES["qknorm"].function("full"), "cuda:sm_90a", specs=[spec] * 3)
    loops = [x for x in kernel.source.split("// ---- over ")[1:] if "shared by" in x.partition("\n")[0]]
    exchanges = [y for x in loops for y in re.findall(r"_shared<float>\((.*?), ", x.partition("join their states")[0])]
    exchanges += [y for x in loops for y in re.findall(r"load_shared<float>\((.*?)\);", x.partition("join their states")[0])]
    assert exchanges and all("warp" in y for y in exchanges)


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler on this machine")
def test_warps_overtake_each_other_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where warps that share a loop exchange values in one place, the results are wrong under every order but the first."""
    spec = en.TensorSpec((1, 256, 64), "bfloat16")
    program = en.trace(CASES["qknorm"].function("full"), *[spec] * 3)
    plan = en.optimize(program, "cuda:sm_90a").plan
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    rng = np.random.default_rng(0)
    inputs = {i.name: rng.standard_normal(i.shape).astype(BF16) for i in program.inputs}
    want = en.evaluate(program, *inputs.values())

    def error(seed: int) -> float:
        (out,) = run(programs, plan.buffers, inputs, hopper_emulator_arch(), seeds=(seed,))
        return float(np.abs(out["out0"].astype(np.float64) - want).max())

    assert all(error(seed) < 1e-2 for seed in range(3))
    monkeypatch.setattr(Reductions, "in_split", lambda self: False)  # as if a block's warps waited for each other
    monkeypatch.setattr(Reductions, "sync", lambda self: "warp_sync();")
    assert all(error(seed) > 1e-2 for seed in (1, 2))


def test_names_clash_with_nothing() -> None:
    x = inp("float", (A("int"), A("fill")))
    job = simple_job({"warp": (T.red("+", "fill", mul(x, x)), ("int",))},
                     {"int": Axis(10, 2, "grid"), "fill": Axis(20, 20, "whole")}, {"float": make("float32", (10, 20), 0)},
                     {"warp": (f64(make("float32", (10, 20), 0)) ** 2).sum(-1)}, "float32", tolerance=1e-6)  # fmt: skip
    (out,) = run(job.programs, job.buffers, job.inputs) if host_compiler() else (None,)
    if out is not None:
        job.check(out)


def test_resources_and_reasons() -> None:
    job = attention(h=1, n=256, m=256, d=128, e=128, rows=(1, 128), keys=64)
    shared, registers, threads = resources(job.programs[0], cuda_arch("sm_90a"))
    assert (shared, threads) == (98304, 128) and 190 <= registers <= 255
    assert feasible(job.programs[0], cuda_arch("sm_90a"), job.buffers) is None
    huge = attention(h=1, n=2048, m=256, d=512, e=512, rows=(1, 512), keys=128)
    assert re.search("bytes of shared memory|registers", feasible(huge.programs[0], cuda_arch("sm_120a")) or "")
    assert feasible(huge.programs[0], cuda_arch("sm_120a"), slow=True) is None


def test_hints_that_do_not_fit_are_dropped() -> None:
    job = softmax_rows(4, 16384, 4, None, warps=1)
    assert plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, "float32")).warps > 1


def test_simple_lowering_is_a_last_resort() -> None:
    from eqsat_neptune.codegen.cuda.emit import schedule_of

    for job in (attention(), attention(n=1, m=500, keys=64, split=3), softmax_rows(5, 700, 1, 128), product(70, 100, 96, (64, 64, 32))):
        for p in job.programs:
            assert not isinstance(schedule_of(p, job.buffers, cuda_arch("sm_80")), Simple)


# ------------------------------------------------------------------ compilation


@cache
def compiler_missing(arch: str) -> str:
    from eqsat_neptune.errors import CompilerNotFound
    from eqsat_neptune.runtime.nvrtc import compiler_version

    try:
        compiler_version(arch)
    except CompilerNotFound as e:
        return str(e)
    return ""


OPERATORS = (
    "prefill_global", "prefill_causal", "prefill_gqa", "prefill_alibi", "prefill_softcap", "prefill_windowed",
    "decode_causal", "decode_gqa", "decode_alibi", "decode_softcap",
)  # fmt: skip


def operators(keys: int = 64) -> dict[str, Job]:
    """The ten attention operators at their real tiles (few heads: the text does not depend on it)."""
    pre = dict(h=1, n=2048, m=2048, d=128, e=128, rows=(1, 128), keys=keys)
    dec = dict(h=1, n=1, m=4096, d=128, e=128, keys=64, split=8)
    return {
        "prefill_global": attention(**pre),
        "prefill_causal": attention(**pre, mask="causal"),
        "prefill_gqa": attention(**pre, mask="causal", g=8),
        "prefill_alibi": attention(**pre, mask="causal", alibi=True),
        "prefill_softcap": attention(**{**pre, "keys": 32}, mask="causal", cap=50.0, pivot=False),
        "prefill_windowed": attention(**{**pre, "keys": 32}, mask="window", cap=50.0, pivot=False),
        "decode_causal": attention(**dec),
        "decode_gqa": attention(**dec, g=8, rows=(8, 1)),
        "decode_alibi": attention(**dec, alibi=True),
        "decode_softcap": attention(**dec, g=2, rows=(2, 1), cap=50.0, pivot=False),
    }


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compile_with_hardly_a_spill(name: str, arch: str) -> None:
    """A few values that the loop touches once (row sums, pointers) may lie in memory: it costs nothing measurable."""
    from eqsat_neptune.runtime.nvrtc import compile_cuda

    if reason := compiler_missing(arch):
        pytest.skip(reason)
    job = operators(32 if arch == "sm_120a" else 64)[name]  # 99 KB of shared memory there
    compiled = compile_cuda(emit(job.programs, job.buffers, cuda_arch(arch)).text, arch)
    assert len(compiled.kernels) == len(job.programs)
    assert max(k.spill_bytes for k in compiled.kernels.values()) <= (96 if name.startswith("prefill") else 0)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_compiles(arch: str) -> None:
    from eqsat_neptune.runtime.nvrtc import compile_cuda

    if reason := compiler_missing(arch):
        pytest.skip(reason)
    jobs = [attention(n=1, m=500, keys=64, split=3), softmax_rows(5, 700, 1, 128), product(40, 40, 70, (32, 32, 16), dtype="float32")]
    for job in jobs:
        compiled = compile_cuda(emit(job.programs, job.buffers, cuda_arch(arch)).text, arch)
        assert len(compiled.kernels) == len(job.programs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["gated_linear_attention", "retention", "attention_dq", "performer"])
def test_programs_are_emitted(name: str, arch: str, dtype: str) -> None:
    """Decays are masks over what varies less than they do."""
    case = CASES[name]
    assert en.optimize(en.trace(case.function("full"), *case.specs("full", dtype)), f"cuda:{arch}").source


# ------------------------------------------------------------------ random kernels


@needs_compiler
@pytest.mark.parametrize("mode,first,count", [("tensor", 0, 12), *(pytest.param(m, 100, 80, marks=pytest.mark.slow) for m in ("tensor", "simple", "float64"))])
def test_random_kernels(mode: str, first: int, count: int) -> None:
    from cuda_fuzz import check

    for start in range(first, first + count, 12):
        assert not check(range(start, min(start + 12, first + count)), mode)
