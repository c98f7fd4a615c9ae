"""HIP: the text of the ten operators compiles for every architecture with matrix instructions and no spills, and computes the
right thing in the emulator, which knows the instructions' layouts."""

from __future__ import annotations

import ctypes as C
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda import emulate
from eqsat_neptune.codegen.cuda.arch import DEVICE
from eqsat_neptune.codegen.cuda.emit import emit
from eqsat_neptune.codegen.hip import hip_arch, hip_emulator
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Plan, Store

import eqsat_neptune as en
from eqsat_neptune import terms as T
from eqsat_neptune.errors import CompilerNotFound, DriverNotFound, TargetError, WrongDevice
from eqsat_neptune.program import Input, Program
from eqsat_neptune.programs import CASES
from eqsat_neptune.runtime import compile_hip
from eqsat_neptune.runtime.hip import HipRunner
from eqsat_neptune.runtime.hipcc import find_compiler
from eqsat_neptune.terms import Monoid, Term, add, axis_index, bi, fold, inp, iota, mul, num, red, sub, un, var, where

ARCHS = ("gfx90a", "gfx942", "gfx1100")
FAMILIES = ("gfx942", "gfx1100")  # one of each set of device headers
SOFT = Monoid(("max",), (((0, un("exp", sub(var("r0"), var("R0")))),),))
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def compiler(arch: str) -> None:
    try:
        find_compiler(arch)
    except CompilerNotFound as e:
        pytest.skip(str(e))


def cxx() -> str:
    return emulate.host_compiler() or pytest.skip("no C++ compiler on this machine")


# ------------------------------------------------------------------ the operators, as kernels


class Operator:
    """Attention of `rows` queries of each of g·h heads over `keys` keys of h heads; scores capped, biased by position, masked."""

    def __init__(
        self,
        name: str,
        g: int = 1,
        mask: str = "all",
        cap: float = 0.0,
        bias: bool = False,
        rows: int = 4096,
        keys: int = 4096,
        h: int = 4,
        d: int = 128,
        tile: tuple[int, int] = (128, 64),
        splits: int = 0,
        window: int = 1024,
        dtype: str = "bfloat16",
    ):
        self.name, self.g, self.mask, self.cap, self.bias, self.window, self.dtype = name, g, mask, cap, bias, window, dtype
        self.rows, self.keys, self.h, self.d, self.tile, self.splits = rows, keys, h, d, tile, splits

    def sized(self, **sizes: object) -> Operator:
        keep = ("name", "g", "mask", "cap", "bias", "window", "dtype", "rows", "keys", "h", "d", "tile", "splits")
        return Operator(**{**{k: getattr(self, k) for k in keep}, **sizes})  # type: ignore[arg-type]

    def index(self, *axes: str) -> tuple[T.Affine, ...]:
        return tuple(axis_index(a) for a in axes)

    def kernels(self) -> tuple[list[Kernel], dict[str, Buffer]]:
        ix, one = self.index, num(1.0)
        s = mul(red("+", "d", mul(inp("q", ix("h", "g", "i", "d")), inp("k", ix("h", "j", "d")))), num(self.d**-0.5))
        if self.cap:
            s = mul(num(self.cap), un("tanh", mul(s, num(1 / self.cap))))
        i: Term = iota("i") if self.rows > 1 else num(float(self.keys - 1))
        if self.bias:
            s = add(s, mul(inp("slope", ix("h", "g")), sub(iota("j"), i)))
        if self.mask != "all":
            keep = bi("le", iota("j"), i)
            if self.mask == "window":
                keep = bi("and", keep, bi("lt", sub(i, iota("j")), num(float(self.window))))
            s = where(keep, s, num(-math.inf))
        shapes = {"q": (self.h, self.g, self.rows, self.d), "k": (self.h, self.keys, self.d), "v": (self.h, self.keys, self.d)}
        buffers = {n: Buffer(n, x, self.dtype, "input") for n, x in shapes.items()}
        if self.bias:
            buffers["slope"] = Buffer("slope", (self.h, self.g), "float32", "input")
        buffers["o"] = Buffer("o", shapes["q"], self.dtype, "output")
        extents = dict(h=self.h, g=self.g, i=self.rows, j=self.keys, d=self.d, e=self.d)
        rows = Axis(self.rows, min(self.tile[0], self.rows), "grid" if self.rows > 1 else "whole")
        g = Axis(self.g, 1, "grid") if self.rows > 1 else Axis(self.g, self.g, "whole")
        axes = dict(h=Axis(self.h, 1, "grid"), g=g, i=rows, d=Axis(self.d, self.d, "whole"), e=Axis(self.d, self.d, "whole"))
        out, v = ix("h", "g", "i", "e"), inp("v", ix("h", "j", "e"))
        if not self.splits:
            total, weight = fold(SOFT, 1, "j", [s, v]), fold(SOFT, 1, "j", [s, one])
            kernel = Kernel(
                self.name,
                (Store("o", mul(total, un("recip", weight)), out),),
                {**axes, "j": Axis(self.keys, self.tile[1], "loop")},
                extents,
            )
            return [kernel], buffers
        block = -(-self.keys // (self.splits * self.tile[1])) * self.tile[1]
        extents |= {"j.o": self.splits, "j.i": block}
        part = {**axes, "j.o": Axis(self.splits, 1, "grid"), "j.i": Axis(block, self.tile[1], "loop")}
        total, weight, pivot = (fold(SOFT, n, "j.i", [s, x]) for n, x in ((1, v), (1, one), (0, one)))
        places = {"total": ix("h", "g", "i", "j.o", "e"), "weight": ix("h", "g", "i", "j.o"), "pivot": ix("h", "g", "i", "j.o")}
        for n, place in places.items():
            shape = tuple(extents[a] for p in place for a in p.axes)
            buffers[n] = Buffer(n, shape, "float32", "temp", tuple(a for p in place for a in p.axes))
        first = Kernel(
            f"{self.name}_part",
            tuple(Store(n, t, places[n]) for n, t in (("total", total), ("weight", weight), ("pivot", pivot))),
            part,
            extents,
        )
        t, w, p = (inp(n, places[n]) for n in ("total", "weight", "pivot"))
        merged = mul(fold(SOFT, 1, "j.o", [p, t]), un("recip", fold(SOFT, 1, "j.o", [p, w])))
        join = {**axes, "g": Axis(self.g, 1, "grid"), "j.o": Axis(self.splits, self.splits, "whole")}
        return [first, Kernel(f"{self.name}_join", (Store("o", merged, out),), join, extents)], buffers

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng, out = np.random.default_rng(seed), {}
        for b in self.kernels()[1].values():
            if b.kind == "input":
                out[b.name] = rng.standard_normal(b.shape).astype(NUMPY[b.dtype])
        return out

    def reference(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        q, k, v = (inputs[n].astype(np.float64) for n in "qkv")
        s = np.einsum("hgid,hjd->hgij", q, k) * self.d**-0.5
        i = np.arange(self.rows)[:, None] if self.rows > 1 else np.array([[self.keys - 1]])
        j = np.arange(self.keys)
        if self.cap:
            s = self.cap * np.tanh(s / self.cap)
        if self.bias:
            s = s + inputs["slope"].astype(np.float64)[..., None, None] * (j - i)
        if self.mask != "all":
            s = np.where((j <= i) & ((i - j < self.window) | (self.mask != "window")), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return np.einsum("hgij,hje->hgie", p / p.sum(-1, keepdims=True), v)


DECODE = dict(rows=1, keys=65536, splits=16)
OPERATORS = [
    Operator("prefill_global"),
    Operator("prefill_causal", mask="causal"),
    Operator("prefill_gqa", g=8, mask="causal"),
    Operator("prefill_alibi", mask="causal", bias=True),
    Operator("prefill_softcap", g=2, mask="causal", cap=50.0),
    Operator("prefill_windowed", g=4, mask="window", cap=50.0),
    Operator("decode_causal", **DECODE),  # type: ignore[arg-type]
    Operator("decode_gqa", g=8, **DECODE),  # type: ignore[arg-type]
    Operator("decode_alibi", bias=True, **DECODE),  # type: ignore[arg-type]
    Operator("decode_softcap", g=2, cap=50.0, **DECODE),  # type: ignore[arg-type]
]


def emitted(operator: Operator, arch: str):  # type: ignore[no-untyped-def]
    kernels, buffers = operator.kernels()
    return emit([lower(k, buffers) for k in kernels], buffers, hip_arch(arch))


def emulated(operator: Operator, arch: str, seeds: Sequence[int] = (0, 5)) -> float:
    """Largest relative error over the orders in which threads run."""
    cxx()
    kernels, buffers = operator.kernels()
    inputs = operator.inputs()
    want = operator.reference(inputs)
    runs = emulate.run([lower(k, buffers) for k in kernels], buffers, inputs, hip_emulator(arch), seeds)
    errors = [float(np.linalg.norm(r["o"].astype(np.float64) - want) / np.linalg.norm(want)) for r in runs]
    assert np.isfinite(errors).all()
    return max(errors)


# ------------------------------------------------------------------ compiled


def check_compiled(operator: Operator, arch: str) -> None:
    compiler(arch)
    source = emitted(operator, arch)
    code = compile_hip(source.text, arch)
    for name, info in code.kernels.items():
        assert info.spill_bytes == 0 and info.stack == 0, f"{name}: {info}"
    assert re.search(r"\bv_wmma_f32_16x16x16_bf16" if arch == "gfx1100" else r"\bv_mfma_f32_16x16x16_?bf16", code.assembly)
    assert all(launch.smem <= 64 * 1024 for launch in source.launches)


QUICK = ("prefill_windowed", "decode_gqa")
some, others = [o for o in OPERATORS if o.name in QUICK], [o for o in OPERATORS if o.name not in QUICK]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("operator", some, ids=lambda o: o.name)
def test_compiles(operator: Operator, arch: str) -> None:
    check_compiled(operator, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("operator", others, ids=lambda o: o.name)
def test_compiles_all(operator: Operator, arch: str) -> None:
    check_compiled(operator, arch)


@pytest.mark.parametrize("arch", FAMILIES)
def test_float16_and_float32(arch: str) -> None:
    compiler(arch)
    code = compile_hip(emitted(OPERATORS[0].sized(dtype="float16"), arch).text, arch)
    assert ("v_wmma_f32_16x16x16_f16" if arch == "gfx1100" else "v_mfma_f32_16x16x16") in code.assembly
    code = compile_hip(emitted(OPERATORS[1].sized(dtype="float32", tile=(32, 32), d=64), arch).text, arch)
    assert "mfma" not in code.assembly and "wmma" not in code.assembly
    assert all(info.spill_bytes == 0 for info in code.kernels.values())


# ------------------------------------------------------------------ computed
SMALL = dict(h=2, d=40, rows=70, keys=90, tile=(64, 32), window=20)
SMALL_DECODE = dict(h=2, d=40, keys=150, splits=2, tile=(64, 64))


def small(operator: Operator) -> Operator:
    return operator.sized(**(SMALL_DECODE if operator.splits else SMALL))


@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("operator", some, ids=lambda o: o.name)
def test_computes(operator: Operator, arch: str) -> None:
    assert emulated(small(operator), arch) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("operator", others, ids=lambda o: o.name)
def test_computes_all(operator: Operator, arch: str) -> None:
    assert emulated(small(operator), arch) < 4e-3


@pytest.mark.parametrize("arch", FAMILIES)
def test_computes_float32(arch: str) -> None:
    assert emulated(OPERATORS[1].sized(**{**SMALL, "tile": (32, 32)}, dtype="float32"), arch, (3,)) < 1e-6


@pytest.mark.parametrize("arch", FAMILIES)
def test_a_weighted_mean_of_one_value_is_that_value(arch: str) -> None:
    """Without a maximum, weights are anything: sums add them as products take them."""
    cxx()
    v = inp("v", (axis_index("h"), axis_index("j"), axis_index("e")))
    s = where(bi("le", iota("j"), iota("i")), inp("s", (axis_index("h"), axis_index("i"), axis_index("j"))), num(-math.inf))
    p = un("exp", s)
    out = mul(red("+", "j", mul(p, v)), un("recip", red("+", "j", p)))
    shapes = {"s": (2, 40, 40), "v": (2, 40, 32)}
    rng = np.random.default_rng(0)
    inputs = {n: (3 * rng.standard_normal(x)).astype(ml_dtypes.bfloat16) for n, x in shapes.items()}
    buffers = {n: Buffer(n, x, "bfloat16", "input") for n, x in shapes.items()}
    buffers["o"] = Buffer("o", (2, 40, 32), "bfloat16", "output")
    axes = dict(h=Axis(2, 1, "grid"), i=Axis(40, 32, "grid"), j=Axis(40, 32, "loop"), e=Axis(32, 32, "whole"))
    kernel = Kernel("k0", (Store("o", out, tuple(map(axis_index, "hie"))),), axes, dict(h=2, i=40, j=40, e=32))
    for got in emulate.run([lower(kernel, buffers)], buffers, inputs, hip_emulator(arch), (0, 3)):
        assert np.array_equal(got["o"][:, 0], inputs["v"][:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("arch", FAMILIES)
def test_computes_float16(arch: str) -> None:
    assert emulated(OPERATORS[4].sized(**{**SMALL, "d": 64}, dtype="float16"), arch, (3,)) < 5e-4


# ------------------------------------------------------------------ from the program as written


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", [o.name for o in OPERATORS])
def test_optimized(name: str, arch: str) -> None:
    compiler(arch)
    case = CASES[name]
    kernel = en.optimize(en.trace(case.function("full"), *case.specs("full")), f"hip:{arch}")
    code = compile_hip(kernel.source, arch)
    assert ("v_wmma_" if arch == "gfx1100" else "v_mfma_") in code.assembly
    assert all(info.spill_bytes == 0 for info in code.kernels.values())


@pytest.mark.slow
@pytest.mark.parametrize("arch", FAMILIES)
@pytest.mark.parametrize("name", ["prefill_gqa", "prefill_alibi", "decode_causal", "lora", "layernorm"])
def test_optimized_computes(name: str, arch: str) -> None:
    cxx()
    case = CASES[name]
    arrays = case.inputs("small", np.random.default_rng(0), dtype="float16")
    program = en.trace(case.function("small"), *(en.TensorSpec(a.shape, a.dtype.name) for a in arrays))
    plan = en.optimize(program, f"hip:{arch}").plan
    inputs = {i.name: a for i, a in zip(program.inputs, arrays)}
    kernels = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    (got,) = emulate.run(kernels, plan.buffers, inputs, hip_emulator(arch))
    want = np.asarray(en.evaluate(program, *arrays), np.float64)
    assert np.linalg.norm(got["out0"].astype(np.float64) - want) < 2e-3 * np.linalg.norm(want)


# ------------------------------------------------------------------ device headers


@pytest.mark.parametrize("arch", FAMILIES[:1])
def test_beside_rocm_headers(arch: str, tmp_path: Path) -> None:
    """ROCm makes clang include its own HIP header first, which brings attributes and the mathematical functions."""
    compiler(arch)
    if find_compiler(arch).rocm:
        pytest.skip("the compiler here is ROCm's already")
    for place, text in (
        ("share/hip/version", "HIP_VERSION_MAJOR=6\nHIP_VERSION_MINOR=2\nHIP_VERSION_PATCH=0\n"),
        ("include/hip/hip_version.h", ""),
    ):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(text)
    (tmp_path / "kernel.hip").write_text(emitted(OPERATORS[3].sized(cap=50.0, dtype="float32", tile=(32, 32)), arch).text)
    flags = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-std=c++17", f"--offload-arch={arch}", "-nogpulib"]
    command = [*find_compiler(arch).command, *flags, f"--rocm-path={tmp_path}", "-O1", "-S", "-o", "kernel.s", "kernel.hip"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if re.search(r"fatal error: '\w+(\.h)?' file not found", done.stderr):
        pytest.skip("no C++ standard library, which ROCm's header needs")
    assert done.returncode == 0, done.stderr
    assert "__ocml_tanh_f32" in (tmp_path / "kernel.s").read_text()  # the library's function, not ours


@pytest.mark.parametrize("arch", FAMILIES)
def test_fragments(arch: str, tmp_path: Path) -> None:
    """Operands from rows or columns in shared memory and from registers, reductions over lanes: against plain sums."""
    found = hip_emulator(arch)
    (tmp_path / "fragments.cpp").write_text(found.prelude + (Path(__file__).parent / "fragments.cpp").read_text())
    slots = [f"-DROW_SLOTS={found.row_slots}", f"-DCOLUMN_SLOTS={found.column_slots}"]
    subprocess.run([cxx(), "-O0", "-std=c++17", "-w", *slots, "-o", "fragments", "fragments.cpp"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "fragments"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("program", ["primitives", "fragments"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_primitives(arch: str, program: str, tmp_path: Path) -> None:
    """The primitives' own text on the host, over the compiler's builtins as AMD's manuals describe them."""
    compiler(arch)
    if find_compiler(arch).rocm:
        pytest.skip("the emulator is not compiled by hipcc")
    here, found = Path(__file__).parent, hip_arch(arch)
    headers = "".join((DEVICE / h).read_text() for h in found.headers if h not in ("wave64.h", "hip_math.h"))
    text = [f"#include <{h}>" for h in ("initializer_list", "math.h", "stdint.h", "stdio.h", "stdlib.h", "string.h")]
    text += ["namespace host {", (DEVICE / "emulator.h").read_text(), (DEVICE / "emulator_hip.h").read_text(), "}"]
    text += [(here / "amd_builtins.h").read_text(), headers, (here / f"{program}.cpp").read_text()]
    (tmp_path / "host.cpp").write_text("\n".join(text))
    sizes = [f"-DWARP_SIZE={found.warp}", f"-DROW_SLOTS={found.row_slots}", f"-DCOLUMN_SLOTS={found.column_slots}"]
    command = [*find_compiler(arch).command, "-x", "c++", "-O0", "-std=c++17", "-w", *sizes, "-o", "host", "host.cpp", "-lm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if re.search(r"fatal error: '\w+(\.h)?' file not found", done.stderr):
        pytest.skip("no C++ standard library")
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "host"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[:2000] + done.stderr


UNARY = {
    "exp": (-700, 700), "exp2": (-1000, 1000), "expm1": (-700, 700), "log": (0, 1e3), "log2": (0, 1e3), "log10": (0, 1e3),
    "log1p": (-1, 1e3), "sinh": (-700, 700), "cosh": (-700, 700), "tanh": (-5, 5), "asinh": (-1e3, 1e3), "acosh": (1, 1e3),
    "atanh": (-1, 1), "sin": (-1e3, 1e3), "cos": (-1e3, 1e3), "tan": (-1e3, 1e3), "asin": (-1, 1), "acos": (-1, 1),
    "atan": (-50, 50), "erf": (-4, 4),
}  # fmt: skip
BINARY = {"pow": (0, 20), "atan2": (-9, 9), "hypot": (-9, 9), "fmod": (-1e5, 1e5)}
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0, -0.5, 3.0, 1e308, 5e-324, 1e17, -1e-300]


@pytest.fixture(scope="module")
def mathematics(tmp_path_factory: pytest.TempPathFactory) -> C.CDLL:
    """The functions that stand in for a device library, on the host."""
    folder = tmp_path_factory.mktemp("math")
    text = ["typedef unsigned long long u64;", "typedef long long i64;", "namespace ours {", "#define DEV static inline"]
    text += [(DEVICE / "hip_math.h").read_text(), "}"]
    for n, args in [(n, 1) for n in UNARY] + [(n, 2) for n in BINARY]:
        call = ", ".join(["x[i]", "z[i]"][:args])
        head = f'extern "C" void {n}_(const double* x, const double* z, double* y, long n)'
        text.append(f"{head} {{ for (long i = 0; i < n; ++i) y[i] = ours::{n}({call}); }}")
    (folder / "math.cpp").write_text("\n".join(text))
    subprocess.run(
        [cxx(), "-O1", "-std=c++17", "-w", "-fPIC", "-shared", "-o", "mathematics.so", "math.cpp"], cwd=folder, check=True
    )
    return C.CDLL(str(folder / "mathematics.so"))


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_mathematics(mathematics: C.CDLL, name: str) -> None:
    rng = np.random.default_rng(0)
    low, high = (UNARY | BINARY)[name]
    x, z = rng.uniform(low, high, 2000), rng.uniform(low, high, 2000)
    if name in ("sin", "cos"):
        x = np.append(x, 10.0 ** rng.uniform(3, 300, 500))
    odd = np.array(ODD)
    x, z = np.concatenate([x, np.repeat(odd, len(odd))]), np.concatenate([np.resize(z, len(x)), np.tile(odd, len(odd))])
    got = np.empty_like(x)
    pointers = [a.ctypes.data_as(C.c_void_p) for a in (x, z, got)]
    getattr(mathematics, f"{name}_")(*pointers, C.c_long(len(x)))
    own = {
        "pow": "power",
        "atan2": "arctan2",
        "asin": "arcsin",
        "acos": "arccos",
        "atan": "arctan",
        "asinh": "arcsinh",
        "acosh": "arccosh",
        "atanh": "arctanh",
    }
    with np.errstate(all="ignore"):
        if name == "erf":
            want = np.vectorize(math.erf)(x)
        else:
            want = getattr(np, own.get(name, name))(*([x, z] if name in BINARY else [x]))
        close = np.abs(got - want) <= (2e-15 if name == "pow" else 8e-16) * np.abs(want)
    equal = (got == want) & (np.signbit(got) == np.signbit(want))
    bad = ~(close | equal | (np.isnan(got) & np.isnan(want)))
    assert not bad.any(), list(zip(x[bad][:5], z[bad][:5], got[bad][:5], want[bad][:5]))


# ------------------------------------------------------------------ the runner


def test_runner() -> None:
    operator = OPERATORS[1]
    kernels, buffers = operator.kernels()
    program = Program("f", tuple(Input(b.name, b.shape, b.dtype) for b in buffers.values() if b.kind == "input"), (), {})
    runner = HipRunner(program, Plan(tuple(kernels), buffers), "gfx942")
    assert runner.source == emitted(operator, "gfx942").text
    assert runner.details() == []
    with pytest.raises(WrongDevice, match="NumPy array"):
        runner([np.zeros(1)] * 3, None)
    with pytest.raises(DriverNotFound, match="no AMD driver support"):
        runner([object()] * 3, None)
    with pytest.raises(TargetError, match="gfx90a, gfx942, gfx1100"):
        HipRunner(program, Plan(tuple(kernels), buffers), "gfx803")
    compiler("gfx942")
    runner.compile()
    ((name, threads, *_, spilled),) = runner.details()
    assert (name, threads, spilled) == (operator.name, "256 threads", "0 bytes spilled")
