"""The CUDA lowering: emitted kernels run in the emulator against float64."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from cuda_jobs import (
    Job,
    attention,
    check_all,
    compiler_missing,
    f64,
    job_text,
    make,
    needs_compiler,
    product,
    renamed_kernel,
    simple_job,
    softmax_rows,
)
from eqsat_neptune.codegen.cuda import emit as emit_module
from eqsat_neptune.codegen.cuda import simple as simple_module
from eqsat_neptune.codegen.cuda.arch import cuda_arch, hopper_emulator_arch
from eqsat_neptune.codegen.cuda.emit import emit, is_packed, packing, precision_of
from eqsat_neptune.codegen.cuda.emulate import run
from eqsat_neptune.codegen.cuda.layout import Unsupported
from eqsat_neptune.codegen.cuda.planner import plan
from eqsat_neptune.codegen.hip.arch import hip_arch
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.tile import Loop
from eqsat_neptune.cost_models import model_for
from eqsat_neptune.cost_models.base import Sizes
from eqsat_neptune.extraction.plan import Axis

from eqsat_neptune import terms as T
from eqsat_neptune.terms import Affine, add, bi, inp, iota, mul, num, sub, un, where
from eqsat_neptune.terms import axis_index as A

# ------------------------------------------------------------------ attention, under many schedules


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


# ------------------------------------------------------------------ random kernels


@needs_compiler
@pytest.mark.parametrize("mode,first,count", [("tensor", 0, 12), *(pytest.param(m, 100, 80, marks=pytest.mark.slow) for m in ("tensor", "simple", "float64"))])
def test_random_kernels(mode: str, first: int, count: int) -> None:
    from cuda_fuzz import check

    for start in range(first, first + count, 12):
        assert not check(range(start, min(start + 12, first + count)), mode)
