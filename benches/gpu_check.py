"""Kernels with schedules given by hand, built here and checked and timed on a GPU in one go.

    python benches/gpu_check.py save DIR [--arch sm_90a] [--only TEXT]     # emits; needs no GPU
    python benches/gpu_check.py run DIR [--only TEXT] [--out FILE]         # compiles in parallel, checks, times; needs PyTorch and PyCUDA

It bypasses the search: each variant is a kernel in terms, axis roles, tiles and choices, so that one run compares many schedules
of one program.  Every output is poisoned, checked against float64 (on sampled rows where the program is large), and timed with
the L2 flushed, beside a peer from PyTorch where there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CAP = 50.0


@dataclass
class Attention:
    """What an attention variant computes and how it is tiled.  rows: (heads of a group, query rows) of a block."""

    name: str
    b: int
    hq: int
    hkv: int
    n: int
    d: int = 128
    decode: bool = False
    causal: bool = False
    window: int = 0
    cap: float = 0.0
    alibi: bool = False
    rows: tuple[int, int] = (1, 128)
    keys: int = 64
    split: int = 1
    warps: int | None = None
    stages: int | None = None
    pivot: bool = True
    dtype: str = "bfloat16"
    planned: str = ""  # the program of that name in eqsat_neptune.programs, scheduled by the search
    kind: str = field(default="attention")

    @property
    def label(self) -> str:
        if self.planned:
            return f"planned {self.planned} b{self.b} n{self.n} d{self.d}"
        more = f" warps {self.warps}" if self.warps else ""
        more += f" stages {self.stages}" if self.stages else ""
        more += f" split {self.split}" if self.split > 1 else ""
        more += "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"{self.name} b{self.b} n{self.n} d{self.d} rows {self.rows[0]}x{self.rows[1]} keys {self.keys}{more}"


@dataclass
class Gemm:
    """O[m, n] = X[m, k] · W[k, n]; normed: X is RMS-normalised over k first (the division after the product)."""

    name: str
    m: int
    n: int
    k: int
    tile: tuple[int, int, int]
    warps: int | None = None
    stages: int | None = None
    normed: bool = False
    dtype: str = "bfloat16"
    kind: str = "gemm"

    @property
    def label(self) -> str:
        return f"{self.name} {self.m}x{self.n}x{self.k} tile {self.tile} warps {self.warps} stages {self.stages} {self.dtype}"


@dataclass
class Rows:
    """softmax, rmsnorm or layernorm over rows.  rows: of a block; stream: columns of a tile (0: the whole row in registers)."""

    name: str
    m: int
    n: int
    rows: int = 1
    warps: int | None = None
    stream: int = 0
    dtype: str = "bfloat16"
    kind: str = "rows"

    @property
    def label(self) -> str:
        return f"{self.name} {self.m}x{self.n} rows {self.rows} warps {self.warps}" + (f" stream {self.stream}" if self.stream else "")


@dataclass
class Case:
    """A program of eqsat_neptune.programs at its small size, as the search plans it; only checked."""

    name: str
    dtype: str
    kind: str = "case"

    @property
    def label(self) -> str:
        return f"case {self.name} {self.dtype}"


def variants() -> list[Any]:
    out: list[Any] = []
    for n in (16384, 4096):
        out += [Attention("global", 1, 32, 32, n, rows=(1, r), keys=k, warps=w) for r, k, w in ((128, 64, 4), (256, 64, 8))]
        for keys in (32, 64):
            out.append(Attention("causal", 1, 32, 32, n, causal=True, keys=keys))
            out.append(Attention("alibi", 1, 32, 32, n, causal=True, alibi=True, keys=keys))
            out.append(Attention("softcap", 1, 32, 16, n, causal=True, cap=CAP, pivot=False, keys=keys))
            out.append(Attention("windowed", 1, 32, 8, n, causal=True, cap=CAP, window=4096, pivot=False, keys=keys))
        out.append(Attention("gqa", 1, 64, 8, n, causal=True))
        out.append(Attention("gqa", 1, 64, 8, n, causal=True, rows=(8, 32), warps=8))
    out += [Attention("global", 1, 32, 32, 4097), Attention("global", 1, 32, 32, 1024), Attention("causal", 1, 32, 32, 1024, causal=True)]
    out += [Attention("global", 1, 32, 32, 16384, d=64, keys=k) for k in (64, 128)]
    out += [Attention("global", 1, 32, 32, 16384, dtype="float16")]
    for b, n, split in ((1, 8192, 8), (16, 8192, 1), (1, 65536, 16)):
        more = dict(decode=True, split=split)
        for w, keys, stages in ((4, 64, 4), (4, 64, 2), (4, 128, 2)):
            out.append(Attention("decode_causal", b, 32, 32, n, rows=(1, 1), keys=keys, warps=w, stages=stages, **more))
        for s in (split, split * 2, split * 4):
            out.append(Attention("decode_gqa", b, 64, 8, n, rows=(8, 1), keys=64, warps=4, stages=2, decode=True, split=s))
        out.append(Attention("decode_gqa", b, 64, 8, n, rows=(8, 1), keys=128, warps=8, stages=2, decode=True, split=split * 2))
        out.append(Attention("decode_alibi", b, 32, 32, n, rows=(1, 1), keys=64, warps=4, stages=2, alibi=True, **more))
        soft = dict(rows=(2, 1), keys=64, warps=4, cap=CAP, pivot=False, decode=True, split=split * 2)
        out += [Attention("decode_softcap", b, 32, 16, n, stages=s, **soft) for s in (2, 4)]
    full = [dict(name="global"), dict(name="causal", causal=True), dict(name="gqa", hq=64, hkv=8, causal=True), dict(name="alibi", causal=True, alibi=True)]
    full += [dict(name="softcap", hkv=16, causal=True, cap=CAP), dict(name="windowed", hkv=8, causal=True, cap=CAP, window=4096)]
    for n in (16384, 4096, 1000):
        out += [Attention(**{"b": 1, "hq": 32, "hkv": 32, **x}, n=n, planned=f"prefill_{x['name']}") for x in full]
    few = [dict(name="causal"), dict(name="gqa", hq=64, hkv=8), dict(name="alibi", alibi=True), dict(name="softcap", hkv=16, cap=CAP)]
    for b, n in ((1, 8192), (16, 8192), (1, 65536)):
        out += [Attention(**{"hq": 32, "hkv": 32, **x}, b=b, n=n, decode=True, planned=f"decode_{x['name']}") for x in few]
    for tile, w, s in (((128, 128, 32), 4, 4), ((128, 128, 64), 4, 3), ((128, 128, 64), 8, 3), ((256, 128, 32), 8, 4), ((256, 128, 64), 8, 3)):
        out.append(Gemm("gemm", 8192, 8192, 8192, tile, w, s))
    for tile, w, s in (((16, 64, 128), 4, 4), ((16, 32, 128), 2, 4), ((16, 32, 256), 4, 3)):
        out.append(Gemm("rmsnorm_linear", 16, 6144, 4096, tile, w, s, normed=True))
    out.append(Gemm("gemm", 2048, 2048, 2048, (128, 128, 32), 4, 2, dtype="float32"))
    for name in ("softmax", "rmsnorm", "layernorm"):
        for rows, w in ((1, None), (1, 2), (1, 4), (2, 8)):
            out.append(Rows(name, 8192, 8192, rows, w))
    out += [Rows("softmax", 65536, 1024, 4, 4), *(Rows("softmax", 4096, 16384, 1, w) for w in (4, 8, 16))]
    out.append(Rows("softmax", 1024, 131072, 1, 8, stream=8192))
    out += [Rows("softmax", 1024, 32768, 1, w) for w in (8, 16, 32)]
    return out


# ------------------------------------------------------------------ building (no GPU)


def planned(v: Attention) -> tuple[list[Any], dict[str, Any]]:
    """The search's kernels, over inputs with the names that hand-made variants have."""
    from dataclasses import replace

    import eqsat_neptune as en
    from eqsat_neptune import terms as T
    from eqsat_neptune.programs import CASES

    c = CASES[v.planned]
    extents = {"batch": v.b, "n": v.n} if v.decode else {"n": v.n}
    program = en.trace(c.function("full"), *c.specs("full", dtype=v.dtype, **extents))
    plan = en.optimize(program, "cuda:sm_90a").plan
    names = dict(zip((i.name for i in program.inputs), ("Q", "K", "V", "slopes"), strict=False))

    def renamed(t: Any, args: tuple[Any, ...]) -> Any:
        return T.make("input", (names.get(t.attr[0], t.attr[0]), t.attr[1])) if t.op == "input" else None

    kernels = []
    for k in plan.kernels:
        terms = T.rewrite([s.term for s in k.stores], renamed)
        kernels.append(replace(k, stores=tuple(replace(s, term=t) for s, t in zip(k.stores, terms, strict=True))))
        print(v.label, {a: (x.extent, x.tile, x.role) for a, x in k.axes.items()}, k.choices)
    return kernels, {names.get(n, n): replace(b, name=names.get(n, n)) for n, b in plan.buffers.items()}


def attention(v: Attention) -> tuple[list[Any], dict[str, Any]]:
    if v.planned:
        return planned(v)
    from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

    from eqsat_neptune.terms import Monoid, add, bi, div, fold, inp, iota, mul, num, red, sub, un, var, where
    from eqsat_neptune.terms import axis_index as A

    group, q_len = v.hq // v.hkv, 1 if v.decode else v.n
    scale = 1 / math.sqrt(v.d)
    head = A("h").plus(A("g")) if group == 1 else A("g").plus(A("h"), group)
    if group == 1:
        head = A("h")
    q_dim = (A("q"),) if not v.decode else (A("h").plus(A("h"), -1),)
    key = "k.i" if v.split > 1 else "k"
    q = inp("Q", (A("b"), head, *q_dim, A("d")))
    k = inp("K", (A("b"), A("h"), A("k"), A("d")))
    val = inp("V", (A("b"), A("h"), A("k"), A("e")))
    s = mul(red("+", "d", mul(q, k)), scale)
    here = num(v.n - 1) if v.decode else iota("q")
    if v.cap:
        s = mul(v.cap, un("tanh", mul(s, 1 / v.cap)))
    if v.alibi:
        s = add(s, mul(inp("slopes", (head,)), sub(iota("k"), here)))
    if v.causal:
        keep = bi("le", iota("k"), here)
        if v.window:
            keep = bi("and", keep, bi("lt", sub(here, iota("k")), num(v.window)))
        s = where(keep, s, num(-math.inf))
    one = num(1.0)
    if v.pivot:
        h = Monoid(("max",), (((0, un("exp", sub(var("r0"), var("R0")))),),))
        top, weight, value = fold(h, 0, key, [s, one]), fold(h, 1, key, [s, one]), fold(h, 1, key, [s, val])
    else:
        top, weight, value = None, red("+", key, un("exp", s)), red("+", key, mul(un("exp", s), val))
    axes = {"b": Axis(v.b, 1, "grid"), "h": Axis(v.hkv, 1, "grid")}
    extents = {"b": v.b, "h": v.hkv, "k": v.n, "d": v.d, "e": v.d}
    if group > 1:
        axes["g"] = Axis(group, v.rows[0], "whole" if v.rows[0] == group else "grid")
        extents["g"] = group
    if not v.decode:
        axes["q"] = Axis(q_len, v.rows[1], "grid")
        extents["q"] = q_len
    axes |= {"d": Axis(v.d, v.d, "whole"), "e": Axis(v.d, v.d, "whole")}
    choices = {n: x for n, x in (("warps", v.warps), ("stages", v.stages)) if x}
    shapes = {"Q": (v.b, v.hq, q_len, v.d), "K": (v.b, v.hkv, v.n, v.d), "V": (v.b, v.hkv, v.n, v.d)}
    buffers = {n: Buffer(n, x, v.dtype, "input") for n, x in shapes.items()}
    buffers["out0"] = Buffer("out0", (v.b, v.hq, q_len, v.d), v.dtype, "output")
    if v.alibi:
        buffers["slopes"] = Buffer("slopes", (v.hq,), "float32", "input")
    where_out = (A("b"), head, *q_dim, A("e"))
    if v.split == 1:
        axes["k"] = Axis(v.n, v.keys, "loop")
        return [Kernel("k0", (Store("out0", div(value, weight), where_out),), axes, extents, choices)], buffers
    block = -(-v.n // v.split // v.keys) * v.keys
    axes |= {"k.o": Axis(v.split, 1, "grid"), "k.i": Axis(block, v.keys, "loop")}
    extents |= {"k.o": v.split, "k.i": block}
    buffers["part"] = Buffer("part", (v.b, v.hq, v.split, v.d), "float32", "temp")
    buffers["weight"] = Buffer("weight", (v.b, v.hq, v.split), "float32", "temp")
    stores = [Store("part", value, (A("b"), head, A("k.o"), A("e"))), Store("weight", weight, (A("b"), head, A("k.o")))]
    tp, tw = inp("part", (A("b"), head, A("k.o"), A("e"))), inp("weight", (A("b"), head, A("k.o")))
    if v.pivot:
        buffers["top"] = Buffer("top", (v.b, v.hq, v.split), "float32", "temp")
        stores.append(Store("top", top, (A("b"), head, A("k.o"))))
        tt = inp("top", (A("b"), head, A("k.o")))
        result = div(fold(h, 1, "k.o", [tt, tp]), fold(h, 1, "k.o", [tt, tw]))
    else:
        result = div(red("+", "k.o", tp), red("+", "k.o", tw))
    last = {a: Axis(x.extent, 1, "grid") for a, x in axes.items() if a in ("b", "h", "g")}
    last |= {"e": Axis(v.d, v.d, "whole"), "k.o": Axis(v.split, v.split, "whole")}
    return [Kernel("k0", tuple(stores), axes, extents, choices), Kernel("k1", (Store("out0", result, where_out),), last, extents)], buffers


def gemm(v: Gemm) -> tuple[list[Any], dict[str, Any]]:
    from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

    from eqsat_neptune.terms import add, inp, mul, red, un
    from eqsat_neptune.terms import axis_index as A

    x, w = inp("X", (A("m"), A("k"))), inp("W", (A("k"), A("n")))
    y = red("+", "k", mul(x, w))
    if v.normed:
        y = mul(y, un("rsqrt", add(mul(red("+", "k", mul(x, x)), 1 / v.k), 1e-6)))
    bm, bn, bk = v.tile
    axes = {"m": Axis(v.m, bm, "grid"), "n": Axis(v.n, bn, "grid"), "k": Axis(v.k, bk, "loop")}
    shapes = {"X": (v.m, v.k), "W": (v.k, v.n)}
    buffers = {n: Buffer(n, s, v.dtype, "input") for n, s in shapes.items()}
    buffers["out0"] = Buffer("out0", (v.m, v.n), v.dtype, "output")
    choices = {n: c for n, c in (("warps", v.warps), ("stages", v.stages)) if c}
    return [Kernel("k0", (Store("out0", y, (A("m"), A("n"))),), axes, {"m": v.m, "n": v.n, "k": v.k}, choices)], buffers


def rows(v: Rows) -> tuple[list[Any], dict[str, Any]]:
    from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

    from eqsat_neptune.terms import Monoid, add, div, fold, inp, mul, num, red, sub, un, var
    from eqsat_neptune.terms import axis_index as A

    x = inp("X", (A("m"), A("n")))
    if v.name == "softmax" and v.stream:
        h = Monoid(("max",), (((0, un("exp", sub(var("r0"), var("R0")))),),))
        y = div(un("exp", sub(x, fold(h, 0, "n", [x, num(1.0)]))), fold(h, 1, "n", [x, num(1.0)]))
    elif v.name == "softmax":
        p = un("exp", sub(x, red("max", "n", x)))
        y = div(p, red("+", "n", p))
    elif v.name == "rmsnorm":
        y = mul(x, un("rsqrt", add(mul(red("+", "n", mul(x, x)), 1 / v.n), 1e-6)))
    else:
        c = sub(x, mul(red("+", "n", x), 1 / v.n))
        y = mul(c, un("rsqrt", add(mul(red("+", "n", mul(c, c)), 1 / v.n), 1e-6)))
    axes = {"m": Axis(v.m, v.rows, "grid"), "n": Axis(v.n, v.stream or v.n, "loop" if v.stream else "whole")}
    buffers = {"X": Buffer("X", (v.m, v.n), v.dtype, "input"), "out0": Buffer("out0", (v.m, v.n), v.dtype, "output")}
    return [Kernel("k0", (Store("out0", y, (A("m"), A("n"))),), axes, {"m": v.m, "n": v.n}, {"warps": v.warps} if v.warps else {})], buffers


def case(v: Case) -> tuple[list[Any], dict[str, Any]]:
    import eqsat_neptune as en
    from eqsat_neptune.programs import CASES

    c = CASES[v.name]
    plan = en.optimize(en.trace(c.function("small"), *c.specs("small", dtype=v.dtype)), "cuda:sm_90a").plan
    return list(plan.kernels), dict(plan.buffers)


def case_data(v: Case) -> dict[str, Any]:
    """Inputs by name and float64 outputs, as arrays that NumPy can save (bfloat16 as bits)."""
    import numpy as np

    import eqsat_neptune as en
    from eqsat_neptune.programs import CASES

    c = CASES[v.name]
    program = en.trace(c.function("small"), *c.specs("small", dtype=v.dtype))
    arrays = c.inputs("small", np.random.default_rng(0), dtype=v.dtype)
    want = en.evaluate(program, *arrays)
    want = want if isinstance(want, tuple | list) else [want]
    data = {i.name: x.view(np.uint16) if x.dtype.name == "bfloat16" else x for i, x in zip(program.inputs, arrays, strict=True)}
    return data | {f"want{n}": np.asarray(w, np.float64) for n, w in enumerate(want)}


BUILD = {"attention": attention, "gemm": gemm, "rows": rows, "case": case}


def save(folder: Path, arch: str, only: str) -> None:
    import eqsat_neptune.extraction  # noqa: F401  (before codegen.lower)
    from eqsat_neptune.codegen.cuda.arch import cuda_arch
    from eqsat_neptune.codegen.cuda.emit import emit
    from eqsat_neptune.codegen.lower import lower

    folder.mkdir(parents=True, exist_ok=True)
    from eqsat_neptune.programs import CASES

    listed = [*variants(), *(Case(name, dtype) for dtype in ("float32", "bfloat16") for name in CASES)]
    for n, v in enumerate(listed):
        if not re.search(only, v.label):
            continue
        try:
            kernels, buffers = BUILD[v.kind](v)
            source = emit([lower(k, buffers) for k in kernels], buffers, cuda_arch(arch))
        except Exception as e:
            print(f"{v.label}: {type(e).__name__} {str(e)[:200]}")
            continue
        if v.kind == "case":
            import numpy as np

            np.savez(folder / f"{n:03d}.npz", **case_data(v))
        meta = {
            "variant": {**vars(v)},
            "label": v.label,
            "launches": [vars(x) for x in source.launches],
            "workspaces": source.workspaces,
            "buffers": {b.name: [list(b.shape), b.dtype, b.kind] for b in buffers.values()},
            "arch": arch,
        }
        (folder / f"{n:03d}.cu").write_text(source.text)
        (folder / f"{n:03d}.json").write_text(json.dumps(meta))


# ------------------------------------------------------------------ running


def compile_all(paths: list[Path], arch: str, defines: list[str]) -> dict[str, str]:
    def one(path: Path) -> tuple[str, str]:
        out = path.with_suffix(".cubin")
        flags = ["-std=c++17", "-cubin", "-Xptxas", "-v", f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"]
        flags += [f"-D{d}" for d in defines]
        done = subprocess.run(["nvcc", *flags, "-o", str(out), str(path)], capture_output=True, text=True)
        return path.stem, done.stderr if done.returncode == 0 else "FAILED " + done.stderr

    with ThreadPoolExecutor(16) as pool:
        return dict(pool.map(one, paths))


class Runner:
    """One variant's kernels, launched as the package launches them."""

    def __init__(self, cubin: Path, meta: dict[str, Any]):
        import numpy as np
        import torch

        from eqsat_neptune.runtime.module import GpuModule, Launch

        self.torch = torch
        data = np.load(cubin.with_suffix(".npz")) if cubin.with_suffix(".npz").exists() else {}
        torch.manual_seed(1)
        self.arrays = {}
        for name, (shape, dtype, kind) in meta["buffers"].items():
            to = getattr(torch, dtype)
            if name in data:
                x = torch.from_numpy(data[name].copy()).cuda()
                self.arrays[name] = x.view(torch.bfloat16) if dtype == "bfloat16" else x
            elif kind == "input":
                self.arrays[name] = torch.randn(shape, device="cuda", dtype=torch.float32).to(to)
            else:
                self.arrays[name] = torch.full(shape, math.nan if to.is_floating_point else 77, device="cuda", dtype=to)
        self.want = [torch.from_numpy(data[f"want{n}"]).cuda() for n in range(len([k for k in data if k.startswith("want")]))]
        if "slopes" in self.arrays:
            h = self.arrays["slopes"].numel()
            self.arrays["slopes"].copy_(2.0 ** (-8.0 * torch.arange(1, h + 1) / h))
        launches = [Launch(**{**x, "grid": tuple(x["grid"]), "args": tuple(x["args"])}) for x in meta["launches"]]
        scratch = {n: size for n, size in meta["workspaces"].items() if n not in self.arrays}
        self.module = GpuModule(cubin.read_bytes(), launches, scratch)
        self.values = {name: x.data_ptr() for name, x in self.arrays.items()}
        self.values |= {f"{name}.stride{n}": s for name, x in self.arrays.items() for n, s in enumerate(x.stride())}

    def __call__(self) -> None:
        self.module.run(self.values, self.torch.cuda.current_stream().cuda_stream)


def timed(call: Any, flush: Any, repeats: int = 15) -> float:
    """Median seconds of a call with a cold L2."""
    import torch

    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        flush.zero_()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        times.append((a, b))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in times)[repeats // 2] / 1e3


def reference(v: dict[str, Any], x: dict[str, Any]) -> tuple[Any, Any]:
    """(float64 values, the same elements of the output)."""
    import torch

    out = x["out0"]
    if v["kind"] == "attention":
        q, k, val = x["Q"], x["K"], x["V"]
        n, group = v["n"], v["hq"] // v["hkv"]
        picks = sorted({0, 1, n // 3, n // 2, n - 1}) if not v["decode"] else [0]
        want, have = [], []
        for b, h in {(0, 0), (v["b"] - 1, v["hq"] - 1), (v["b"] // 2, v["hq"] // 2 + 1)}:
            s = q[b, h, picks].double() @ k[b, h // group].double().T / math.sqrt(v["d"])
            if v["cap"]:
                s = v["cap"] * torch.tanh(s / v["cap"])
            i = torch.tensor([n - 1] if v["decode"] else picks, device="cuda")[:, None]
            j = torch.arange(n, device="cuda")[None]
            if v["alibi"]:
                s = s + x["slopes"][h].double() * (j - i)
            if v["causal"]:
                keep = j <= i
                if v["window"]:
                    keep = keep & (i - j < v["window"])
                s = s.masked_fill(~keep, -math.inf)
            want.append(torch.softmax(s, -1) @ val[b, h // group].double())
            have.append(out[b, h, picks].double())
        return torch.cat(want), torch.cat(have)
    a = x["X"].double()
    if v["kind"] == "gemm":
        pick = torch.arange(0, v["m"], max(1, v["m"] // 64), device="cuda")
        a = a[pick]
        y = a @ x["W"].double()
        if v["normed"]:
            y = y * torch.rsqrt((a * a).mean(-1, keepdim=True) + 1e-6)
        return y, out[pick].double()
    if v["name"] == "softmax":
        return torch.softmax(a, -1), out.double()
    if v["name"] == "rmsnorm":
        return a * torch.rsqrt((a * a).mean(-1, keepdim=True) + 1e-6), out.double()
    c = a - a.mean(-1, keepdim=True)
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-6), out.double()


def work(v: dict[str, Any]) -> tuple[str, float]:
    """(unit, amount): TFLOP of kept pairs, or GB that must move."""
    if v["kind"] == "attention":
        n = v["n"]
        if v["decode"]:
            return "GB/s", (2 * v["b"] * v["hkv"] * n * v["d"] + 2 * v["b"] * v["hq"] * v["d"]) * 2 / 1e9
        pairs = n * n if not v["causal"] else n * (n + 1) // 2
        if v["window"] and v["window"] < n:
            w = v["window"]
            pairs = w * (w + 1) // 2 + (n - w) * w
        return "TFLOP/s", 4 * v["b"] * v["hq"] * pairs * v["d"] / 1e12
    width = 4 if v["dtype"] == "float32" else 2
    if v["kind"] == "gemm":
        if v["m"] <= 64:
            return "GB/s", (v["m"] * v["k"] + v["k"] * v["n"] + v["m"] * v["n"]) * width / 1e9
        return "TFLOP/s", 2 * v["m"] * v["n"] * v["k"] / 1e12
    return "GB/s", 2 * v["m"] * v["n"] * width / 1e9


def peer(v: dict[str, Any], x: dict[str, Any]) -> Any:
    import torch
    import torch.nn.functional as F

    if v["kind"] == "gemm" and not v["normed"]:
        return lambda: x["X"] @ x["W"]
    if v["kind"] == "rows" and v["name"] == "softmax":
        return lambda: torch.softmax(x["X"], -1)
    if v["kind"] == "rows" and v["name"] == "layernorm":
        return lambda: F.layer_norm(x["X"], (v["n"],))
    if v["kind"] == "attention" and not v["cap"] and not v["alibi"]:
        gqa = v["hq"] != v["hkv"]
        return lambda: F.scaled_dot_product_attention(x["Q"], x["K"], x["V"], is_causal=v["causal"], enable_gqa=gqa)
    return None


def copy_rate(flush: Any) -> float:
    """TB/s, read and written."""
    import torch

    big = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    return 2 * (1 << 30) / timed(lambda: big[: 1 << 30].copy_(big[1 << 30 :]), flush) / 1e12


def run(folder: Path, only: str, out: Path | None, defines: list[str]) -> None:
    import torch

    metas = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
    metas = {s: m for s, m in metas.items() if re.search(only, m["label"])}
    logs = compile_all([folder / f"{s}.cu" for s in metas], next(iter(metas.values()))["arch"], defines)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    print(f"copy {copy_rate(flush):.2f} TB/s; {torch.cuda.get_device_name()}", flush=True)
    peers: dict[str, float] = {}
    results = []
    for stem, meta in metas.items():
        v, label = meta["variant"], meta["label"]
        log = logs[stem]
        if log.startswith("FAILED"):
            print(f"{label}: {log[:1500]}", flush=True)
            continue
        registers, spills = re.findall(r"Used (\d+) registers", log), re.findall(r"(\d+) bytes spill stores", log)
        try:
            r = Runner(folder / f"{stem}.cubin", meta)
            r()
            torch.cuda.synchronize()
            if r.want:
                errors = []
                for n, want in enumerate(r.want):
                    have = r.arrays[f"out{n}"].double()
                    same = torch.equal(torch.isfinite(have), torch.isfinite(want))
                    gap = torch.nan_to_num(want - have, 0.0, 0.0, 0.0).norm() / want[torch.isfinite(want)].norm().clamp_min(1e-30)
                    errors.append(float(gap) if same else math.nan)
                error, limit = max(errors, key=lambda e: math.inf if e != e else e), 3e-6 if v["dtype"] == "float32" else 1e-2
                print(f"{label:70s} error {error:.2e}" + ("" if error < limit else "   <<<<< WRONG"), flush=True)
                continue
            want, have = reference(v, r.arrays)
            error = float((want - have).norm() / want.norm())
            seconds = timed(r, flush)
            unit, amount = work(v)
            rate = amount / seconds
            text = f"{label:70s} {seconds * 1e6:9.1f} µs {rate:8.1f} {unit:8s} error {error:.5f} regs {'/'.join(registers)} spill {'/'.join(spills)}"
            p = peer(v, r.arrays)
            if p is not None:
                same = json.dumps({k: v.get(k) for k in ("kind", "name", "b", "hq", "hkv", "n", "m", "k", "d", "dtype")})
                if same not in peers:
                    try:
                        peers[same] = timed(p, flush)
                    except Exception:
                        peers[same] = math.nan
                text += f" torch {amount / peers[same]:.1f}"
            print(text + ("" if error < 0.01 else "   <<<<< WRONG"), flush=True)
            results.append({"label": label, "seconds": seconds, "rate": rate, "unit": unit, "error": error})
            del r
        except Exception as e:
            print(f"{label}: {type(e).__name__} {str(e)[:300]}", flush=True)
            if "CUDA" in str(e) and "illegal" in str(e):
                sys.exit(1)
        torch.cuda.empty_cache()
    if out:
        out.write_text(json.dumps(results, indent=1))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("command", choices=("save", "run"))
    p.add_argument("folder", type=Path)
    p.add_argument("--arch", default="sm_90a")
    p.add_argument("--only", default="")
    p.add_argument("--out", type=Path)
    p.add_argument("--define", action="append", default=[], help="a macro for the device compiler, to try variants of the headers")
    a = p.parse_args()
    save(a.folder, a.arch, a.only) if a.command == "save" else run(a.folder, a.only, a.out, a.define)


if __name__ == "__main__":
    main()
