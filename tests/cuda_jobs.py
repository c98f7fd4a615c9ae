"""Kernels written by hand for the tests of the CUDA lowering, with inputs and what they should give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.arch import cuda_arch
from eqsat_neptune.codegen.cuda.emit import emit
from eqsat_neptune.codegen.cuda.emulate import host_compiler, numpy_dtype, run
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

from eqsat_neptune import terms as T
from eqsat_neptune.terms import Affine, add, bi, inp, iota, mul, num, sub, un, where
from eqsat_neptune.terms import axis_index as A

BF16 = ml_dtypes.bfloat16
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


def job_text(job: Job, arch: str = "sm_90a") -> str:
    source = emit(job.programs, job.buffers, cuda_arch(arch))
    return "\n".join(f.text for f in source.functions)


@cache
def compiler_missing(arch: str) -> str:
    from eqsat_neptune.errors import CompilerNotFound
    from eqsat_neptune.runtime.nvrtc import compiler_version

    try:
        compiler_version(arch)
    except CompilerNotFound as e:
        return str(e)
    return ""
