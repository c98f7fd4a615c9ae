"""Pipelines of warpgroups (sm_90a), run in the emulator: copies and products happen late, and races are failures there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.arch import cuda_arch, hopper_emulator_arch
from eqsat_neptune.codegen.cuda.emit import Source, emit, schedule_of
from eqsat_neptune.codegen.cuda.emulate import host_compiler, run
from eqsat_neptune.codegen.cuda.layout import Unsupported
from eqsat_neptune.codegen.cuda.simplify import behind_loops
from eqsat_neptune.codegen.hopper.pipeline import Pipeline
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.tile import Load, Loop, Stmt, walk
from eqsat_neptune.extraction.plan import Kernel, Plan
from sweeps import some

import eqsat_neptune as en
from eqsat_neptune import programs
from eqsat_neptune.programs import CASES
from eqsat_neptune.runtime.compiled import Compiled
from eqsat_neptune.runtime.nvrtc import compiler_version
from eqsat_neptune.terms import postorder

needs_compiler = pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler for the emulator")


def planned(program: en.Program, tiles: Mapping[str, int], **choices: object) -> Plan:
    """The plan for sm_90a with the first kernel's tiles and choices given."""
    plan = en.optimize(program, "cuda:sm_90a").plan
    k = plan.kernels[0]
    assert set(tiles) <= set(k.axes), k
    axes = {
        a: replace(x, tile=tiles[a], role="loop" if x.role == "whole" else x.role) if a in tiles else x for a, x in k.axes.items()
    }
    return replace(plan, kernels=(replace(k, axes=axes, choices=dict(choices)), *plan.kernels[1:]))


def smaller(plan: Plan, program: en.Program, parts: Mapping[str, int] | None = None) -> Plan:
    """The plan of a larger program of the same form, for this one.  parts: extents of the parts of an axis."""
    extents = {**program.axes, **(parts or {})}
    shapes = {i.name: i.shape for i in program.inputs} | {f"out{n}": o.shape for n, o in enumerate(program.outputs)}

    def kernel(k: Kernel) -> Kernel:
        axes = {
            a: replace(x, extent=extents[a], tile=extents[a] if x.role == "whole" else min(x.tile, extents[a]))
            for a, x in k.axes.items()
        }
        return replace(k, axes=axes, extents={a: extents[a] for a in k.extents})

    buffers = {n: replace(b, shape=shapes.get(n) or tuple(extents[a] for a in b.axes)) for n, b in plan.buffers.items()}
    return replace(plan, kernels=tuple(map(kernel, plan.kernels)), buffers=buffers)


def attention(name: str, *shapes: tuple[int, ...], dtype: str = "bfloat16") -> en.Program:
    return en.trace(CASES[name].function("full"), *(en.TensorSpec(s, dtype) for s in shapes))


def emulated(
    program: en.Program, plan: Plan, arrays: Mapping[str, np.ndarray], seeds: tuple[int, ...] = (0, 1)
) -> list[np.ndarray]:
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    arch = hopper_emulator_arch()
    assert isinstance(schedule_of(programs[0], plan.buffers, arch), Pipeline)
    return [np.asarray(o["out0"]).astype(np.float64) for o in run(programs, plan.buffers, arrays, arch, seeds)]


def draw(program: en.Program, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    types = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
    return {i.name: (scale * rng.standard_normal(i.shape)).astype(types[i.dtype]) for i in program.inputs}


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check(program: en.Program, plan: Plan, arrays: dict[str, np.ndarray], limit: float = 3e-3) -> None:
    want = en.evaluate(program, *arrays.values())
    for got in emulated(program, plan, arrays):
        assert error(got, want) < limit


@needs_compiler
@pytest.mark.parametrize(
    "choices",
    some([
        {},
        {"pivot": "lazy", "overlap": False},
        {"pivot": "lazy", "chain": False, "order": "static"},
        {"pivot": "frozen", "turns": True},
        {"pivot": "frozen", "order": "folded"},
        {"pivot": "frozen", "peek": True},
        {"pivot": "frozen", "peek": True, "split": 2},
        {"pivot": "lazy", "peek": True, "split": 1, "turns": False},
        {"pivot": "lazy", "peek": True, "turns": False},
        {"pivot": "frozen", "peek": True, "sums": "matrix", "order": "static"},
        {"pivot": "lazy", "order": "folded", "turns": False},
        {"pivot": "frozen", "order": "grid", "sums": "registers"},
        {"pivot": "frozen", "chain": False, "group": 1, "sums": "registers"},
    ], 4),
    ids=lambda c: "-".join(f"{k}_{v}" for k, v in c.items()) or "plain",
)
def test_masked_stream(choices: dict[str, object]) -> None:
    """Dead, mixed and full tiles, a ragged end, several tiles to a block."""
    p = attention("prefill_causal", *[(1, 3, 300, 64)] * 3)
    plan = planned(p, {"a1": 128, "a3": 64}, warpgroups=2, stages=2, **choices)
    check(p, plan, draw(p))


@needs_compiler
@pytest.mark.parametrize("pivot", ["lazy", "frozen"])
def test_two_blocks_share_a_multiprocessor(pivot: str) -> None:
    """Each has one warpgroup, half of the registers and of the shared memory, and twice as many take tiles of work."""
    p = attention("prefill_causal", *[(1, 9, 2000, 64)] * 3)
    plan = planned(p, {"a1": 64, "a3": 64}, warpgroups=1, stages=2, together=2, pivot=pivot)
    arch = cuda_arch("sm_90a")
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, arch)
    assert isinstance(s, Pipeline) and s.together == 2 and s.blocks == 2 * arch.multiprocessors
    assert sum(s.registers) * 128 * 2 <= arch.registers and 2 * (s.shared + 1024) <= arch.shared_sm
    text = emit([lower(plan.kernels[0], plan.buffers)], plan.buffers, arch).text
    assert f"KERNEL({s.threads}, 2)" in text and f"more_registers<{s.registers[1]}>" in text
    other = planned(p, {"a1": 128, "a3": 64}, warpgroups=2, stages=2, together=2)  # two warpgroups have all registers
    t = schedule_of(lower(other.kernels[0], other.buffers), other.buffers, arch)
    assert isinstance(t, Pipeline) and t.together == 1 and t.blocks == arch.multiprocessors
    small = attention("prefill_causal", *[(1, 3, 300, 64)] * 3)
    check(small, smaller(plan, small), draw(small))


@needs_compiler
@pytest.mark.parametrize("dtype", some(["bfloat16", "float16"]))
@pytest.mark.parametrize("case", some(["prefill_global", "prefill_alibi", "prefill_softcap", "prefill_windowed", "prefill_gqa"], 3))
def test_streams(case: str, dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(1, 2, 300, 128)] * 3
    tiles = {"a1": 64, "a3": 64}
    if case == "prefill_alibi":
        shapes.append((2,))
    elif case == "prefill_gqa":
        shapes = [(1, 16, 72, 64), (1, 2, 72, 64), (1, 2, 72, 64)]
        tiles = {"a1": 8, "a2": 16, "a4": 64}
    elif case != "prefill_global":
        shapes = [(1, 4, 300, 128), (1, 2, 300, 128), (1, 2, 300, 128)]
        tiles = {"a1": 1, "a2": 64, "a4": 64}
    p = attention(case, *shapes, dtype=dtype)
    plan = planned(p, tiles, warpgroups=1, stages=2, pivot="frozen")
    check(p, plan, draw(p))


@needs_compiler
@pytest.mark.parametrize(
    ("case", "dims", "rows", "keys", "dtype"),
    some([
        ("prefill_global", (64, 64), 192, 128, "bfloat16"),
        ("prefill_causal", (64, 64), 192, 112, "float16"),
        ("prefill_causal", (96, 96), 192, 96, "bfloat16"),
        ("prefill_causal", (128, 128), 192, 80, "bfloat16"),
        ("prefill_global", (192, 128), 192, 80, "float16"),
        ("prefill_causal", (256, 256), 128, 80, "bfloat16"),
        ("prefill_global", (256, 256), 128, 80, "float16"),
        ("prefill_causal", (96, 96), 128, 176, "bfloat16"),
    ]),
    ids=str,
)
def test_tiles_of_many_sizes(case: str, dims: tuple[int, int], rows: int, keys: int, dtype: str) -> None:
    """Rows of three warpgroups, keys of any number of matrix instructions, in as much as registers hold of two iterations; ragged ends."""
    d, e = dims
    large, p = (attention(case, (1, 2, n, d), (1, 2, n, d), (1, 2, n, e), dtype=dtype) for n in (4096, 403))
    plan = smaller(planned(large, {"a1": rows, "a3": keys}, warpgroups=rows // 64, stages=2, pivot="frozen"), p)
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and s.overlap and s.pivot == "frozen"
    check(p, plan, draw(p))


@needs_compiler
@pytest.mark.parametrize("choices", some([{}, {"overlap": False}, {"chain": False, "order": "static"}]), ids=str)
def test_scores_that_are_read_once_more(choices: dict[str, object]) -> None:
    """The weights overwrite the scores that they are made of, but not before the row's maximum, an output, has been taken of these."""

    def f(q, k, v):  # type: ignore[no-untyped-def]
        s = q @ k.mT
        top = en.xp.max(s, axis=-1, keepdims=True)
        e = en.xp.exp(s - top)
        return e / en.xp.sum(e, axis=-1, keepdims=True) @ v, top

    p = en.trace(f, *[en.TensorSpec((2, 300, 64), "bfloat16")] * 3)
    plan = planned(p, {"a1": 128, "a3": 64, "a4": 64}, warpgroups=2, stages=2, **choices)
    arrays = draw(p)
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    arch = hopper_emulator_arch()
    assert isinstance(schedule_of(programs[0], plan.buffers, arch), Pipeline)
    for out in run(programs, plan.buffers, arrays, arch, (0, 1)):
        for n, want in enumerate(en.evaluate(p, *arrays.values())):
            assert error(np.asarray(out[f"out{n}"]).astype(np.float64), want) < 4e-3


@pytest.mark.parametrize("pivot", ["frozen", "running"])
def test_a_pipeline_waits_for_the_kernel_ahead_before_it_copies(pivot: str) -> None:
    """… and says once, when it takes no more work, that the next one may come."""
    p = attention("prefill_global", *[(1, 2, 384, 64)] * 3)
    plan = planned(p, {"a1": 128, "a3": 64}, warpgroups=2, stages=2, pivot=pivot)
    text = emit([lower(x, plan.buffers) for x in plan.kernels], plan.buffers, cuda_arch("sm_90a")).text.split("KERNEL(")[-1]
    ahead, _, rest = text.partition("previous_kernel_wait();")
    assert rest and "copy_box" not in ahead and "fetch_add" not in ahead and "previous_kernel_wait" not in rest
    assert text.count("next_kernel_may_start();") == 1 and text.index("next_kernel_may_start();") > text.index("for (;;)")


@needs_compiler
def test_frozen_pivots_that_are_too_low() -> None:
    """Scores that grow by more than float32 can hold beyond the first tile's: those tiles are computed again, with running pivots."""
    p = attention("prefill_global", *[(1, 2, 384, 64)] * 3)
    arrays = draw(p)
    k = arrays["k"].astype(np.float32)
    k[:, 1, 100:110] *= 400.0  # keys are walked from the last to the first
    arrays["k"] = k.astype(ml_dtypes.bfloat16)
    plan = planned(p, {"a1": 128, "a3": 64}, warpgroups=2, stages=2, pivot="frozen")
    text = emit([lower(x, plan.buffers) for x in plan.kernels], plan.buffers, cuda_arch("sm_90a")).text
    assert "note_failed" in text.split("KERNEL(")[-1]
    check(p, plan, arrays, 4e-3)


@needs_compiler
def test_weights_that_a_half_has_no_room_for() -> None:
    """Frozen pivots let weights grow to where float16 ends: the sums show it, and those tiles are computed again."""
    p = attention("prefill_global", *[(1, 2, 384, 64)] * 3, dtype="float16")
    arrays = draw(p)
    k = arrays["k"].astype(np.float32)
    k[:, 1, 100:110] *= 9.0  # scores of up to 30: e³⁰ fits into bfloat16 only
    arrays["k"] = k.astype(np.float16)
    plan = planned(p, {"a1": 128, "a3": 64}, warpgroups=2, stages=2, pivot="frozen")
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and s.pivot == "frozen"
    check(p, plan, arrays, 1e-3)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_whose_first_tiles_are_masked(dtype: str) -> None:
    """There is no pivot yet when it is frozen, and all scores are so low that without one their weights would vanish."""

    def f(q, k, v):  # type: ignore[no-untyped-def]
        xp = q.__array_namespace__()
        i, j = xp.arange(q.shape[-2])[:, None], xp.arange(k.shape[-2])
        s = xp.where(j < i, q @ k.mT, -xp.inf)  # the first row of a tile sees nothing of the first tile of keys
        e = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
        return e / xp.sum(e, axis=-1, keepdims=True) @ v

    p = en.trace(f, *[en.TensorSpec((2, 256, 64), dtype)] * 3)
    arrays = draw(p, 0.5)
    q, k = (arrays[x].astype(np.float32) for x in "qk")
    q[..., 0], k[..., 0] = -13.0, 13.0
    arrays |= {x: y.astype(arrays[x].dtype) for x, y in (("q", q), ("k", k))}
    plan = planned(p, {"a1": 64, "a3": 64}, warpgroups=1, stages=2, pivot="frozen")
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and s.pivot == "frozen"
    want = np.asarray(en.evaluate(p, *arrays.values()))
    for got in emulated(p, plan, arrays):
        assert np.array_equal(np.isnan(got), np.isnan(want))  # the first row sees nothing at all
        assert error(np.nan_to_num(got), np.nan_to_num(want)) < 4e-3


@needs_compiler
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [(256, 192, 160), (200, 328, 72)])
def test_matrix_product(size: tuple[int, int, int], turned: bool) -> None:
    m, n, k = size
    p = en.trace(
        lambda x, w: x @ (w.mT if turned else w),
        en.TensorSpec((m, k), "bfloat16"),
        en.TensorSpec((n, k) if turned else (k, n), "bfloat16"),
    )
    plan = planned(p, {"a0": 128, "a1": 64, "a2": 64}, warpgroups=2, stages=3)
    check(p, plan, draw(p))


@needs_compiler
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("size", "tiles", "cluster"),
    some([((512, 192, 160), (128, 64, 128), 2), ((1000, 264, 136), (128, 64, 64), 4), ((256, 512, 64), (64, 64, 128), 2)]),
)
def test_matrix_product_in_clusters(size: tuple[int, int, int], tiles: tuple[int, int, int], cluster: int, turned: bool) -> None:
    """Blocks at neighbouring tiles copy for one another what both read: panels of it, or rows; more tiles than blocks."""
    m, n, k = size
    p = en.trace(
        lambda x, w: x @ (w.mT if turned else w),
        en.TensorSpec((m, k), "bfloat16"),
        en.TensorSpec((n, k) if turned else (k, n), "bfloat16"),
    )
    plan = planned(p, dict(zip(("a0", "a1", "a2"), tiles)), warpgroups=tiles[0] // 64, stages=3, cluster=cluster)
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, cuda_arch("sm_90a"))
    assert isinstance(s, Pipeline) and s.cluster == cluster and s.spread
    check(p, plan, draw(p))


def feature(x):  # type: ignore[no-untyped-def]
    return en.xp.where(x > 0, x + 1.0, en.xp.exp(en.xp.minimum(x, 0.0)))  # 1 where a copy brings zeros


@needs_compiler
@pytest.mark.parametrize(("hold", "cluster"), some([(True, 1), (False, 2)]))
@pytest.mark.parametrize(
    ("operands", "size", "dtype"),
    some([
        ("x @ w", (512, 192, 160), "bfloat16"),
        ("x @ w", (200, 328, 72), "float16"),
        ("x @ w.mT", (200, 328, 72), "bfloat16"),
        ("x.mT @ w", (256, 300, 136), "bfloat16"),
        ("x * y @ w", (300, 200, 80), "bfloat16"),
    ]),
)
def test_operands_that_are_made_of_loaded_tiles(
    operands: str, size: tuple[int, int, int], dtype: str, hold: bool, cluster: int
) -> None:
    """Elementwise work on what copies have brought, straight or turned, of one tile or two; ends that are ragged, where it does not
    make zeros of zeros; several tiles of work to a block."""
    m, k, n = size
    shapes = {"x": (k, m) if operands.startswith("x.mT") else (m, k), "w": (n, k) if operands.endswith("w.mT") else (k, n)}
    if "y" in operands:
        shapes["y"] = shapes["x"]

    def f(x, w, y=None):  # type: ignore[no-untyped-def]
        left = feature(x) if y is None else feature(x) * y
        return (left.mT if operands.startswith("x.mT") else left) @ (w.mT if operands.endswith("w.mT") else w)

    p = en.trace(f, *[en.TensorSpec(s, dtype) for s in shapes.values()])
    k0 = en.optimize(p, "cuda:sm_90a").plan.kernels[0]
    (loop,) = (t.attr[1] for t in postorder([k0.stores[0].term]) if t.op == "red")  # type: ignore[index]
    rows, columns = (next(a for a in d if a in k0.axes) for d in p.outputs[0].dims)
    plan = planned(p, {rows: 128, loop: 64, columns: 64}, warpgroups=2, stages=2, hold=hold, cluster=cluster)
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and len(s.sources) == 1 + ("y" in operands) and not s.parts.early
    check(p, plan, draw(p))


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "n", "d", "dv", "streamed"), some([(3, 300, 128, 96, 128), (2, 200, 96, 64, 64), (2, 328, 80, 128, 64)])
)
def test_short_sums_are_streamed(heads: int, n: int, d: int, dv: int, streamed: int) -> None:
    """Linear attention: keys' features times values, and their sum, in parts; then queries' features times that and times the sum.  The
    second product adds over one dimension of a head, which the search leaves whole: without a loop there would be no pipeline."""
    fn = CASES["linear_attention"].function("full")
    large = en.optimize(en.trace(fn, *[en.TensorSpec((32, 16384, 128), "bfloat16")] * 3), "cuda:sm_90a").plan
    p = en.trace(fn, *[en.TensorSpec((heads, n, x), "bfloat16") for x in (d, d, dv)])
    plan = smaller(large, p, {"a3.i": 128, "a3.o": -(-n // 128)})
    tiles = {"a2": streamed, "a4": dv}

    def fitted(k: Kernel) -> Kernel:
        if k.axes["a2"].role == "loop":
            return replace(k, axes={a: replace(x, tile=tiles.get(a, x.tile)) for a, x in k.axes.items()})
        return replace(k, axes=k.axes | {"a2": replace(k.axes["a2"], tile=128)}) if "a3.i" in k.axes else k

    plan = replace(plan, kernels=tuple(map(fitted, plan.kernels)))
    made = [schedule_of(lower(k, plan.buffers), plan.buffers, hopper_emulator_arch()) for k in plan.kernels]
    assert [isinstance(s, Pipeline) and len(s.sources) for s in made] == [1, False, 1]
    check(p, plan, draw(p))


def test_tiles_that_are_read_by_products_and_by_element() -> None:
    """As they are and made something of: the layout that one product wants is not the other's."""
    specs = [en.TensorSpec(s, "bfloat16") for s in ((512, 256), (256, 128), (256, 128))]
    p = en.trace(lambda x, w, u: x @ w + feature(x) @ u, *specs)
    plan = planned(p, {"a0": 128, "a1": 64, "a2": 64}, warpgroups=2, stages=2)
    with pytest.raises(Unsupported, match="read by products and by element"):
        schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())


@needs_compiler
@pytest.mark.parametrize("cluster", some([1, 2]))
@pytest.mark.parametrize(("size", "columns"), some([((1000, 256, 328), 128), ((512, 192, 72), 64), ((384, 512, 40), 256)]))
def test_results_that_are_stored_beside_the_next_tile(size: tuple[int, int, int], columns: int, cluster: int) -> None:
    """Several tiles to a block; loops longer and shorter than the parts that results are stored in; a map before the store."""
    m, n, k = size
    p = en.trace(
        lambda x, w, b: en.xp.silu(x @ w.mT + b),
        en.TensorSpec((m, k), "bfloat16"),
        en.TensorSpec((n, k), "bfloat16"),
        en.TensorSpec((n,), "bfloat16"),
    )
    tiles = {"a0": 128, "a1": 64, "a2": columns}
    plan = planned(p, tiles, warpgroups=2, stages=2, cluster=cluster, hold=True)
    text = emit([lower(x, plan.buffers) for x in plan.kernels], plan.buffers, hopper_emulator_arch()).text.split("KERNEL(")[-1]
    assert f".store<0, {min(4, columns // 32)}>" in text and ("cluster_sync" in text) == (cluster > 1)
    check(p, plan, draw(p))


@needs_compiler
def test_two_products_and_two_results() -> None:
    """In pairs of blocks that share the right operands of both; each result is held."""

    def f(x, w1, w2):  # type: ignore[no-untyped-def]
        a = x @ w1
        return en.xp.silu(a) * (x @ w2), a

    specs = [en.TensorSpec(s, "bfloat16") for s in ((500, 136), (136, 192), (136, 192))]
    p = en.trace(f, *specs)
    plan = planned(p, {"a0": 128, "a1": 64, "a2": 64}, warpgroups=2, stages=2, cluster=2, hold=True)
    assert len(plan.kernels) == 1
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    text = emit(programs, plan.buffers, hopper_emulator_arch()).text.split("KERNEL(")[-1]
    assert text.count("copy_box_to_all") == 2 and text.count(".take(") == 2
    arrays = draw(p)
    for outs in run(programs, plan.buffers, arrays, hopper_emulator_arch(), (0, 1, 2)):
        for name, want in zip(("out0", "out1"), en.evaluate(p, *arrays.values())):
            assert error(np.asarray(outs[name]).astype(np.float64), want) < 3e-3


@needs_compiler
@pytest.mark.parametrize("hold", some([False, True]))
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("order", some(["dynamic", "static", "folded", "grid"]))
def test_orders_of_tiles(order: str, cluster: int, hold: bool) -> None:
    """Six tiles by two columns, for two blocks or one cluster of them; a counter cannot serve a cluster, nor can the grid."""
    p = en.trace(lambda x, w: x @ w, en.TensorSpec((380, 72), "bfloat16"), en.TensorSpec((72, 104), "bfloat16"))
    plan = planned(p, {"a0": 64, "a1": 64, "a2": 64}, warpgroups=1, stages=2, order=order, cluster=cluster, hold=hold)
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and s.tiles == 12
    if order == "grid":
        assert (s.order, s.cluster, s.blocks, s.hold) == (order, 1, 12, False)
    else:
        assert s.order == ("static" if (order, cluster) == ("dynamic", 2) else order)
        assert (s.cluster, s.blocks, s.works, s.workers, s.hold) == (cluster, 2, 12 // cluster, 2 // cluster, hold)
    check(p, plan, draw(p))


@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_blocks_that_run_at_the_same_time(cluster: int) -> None:
    """As many as the architecture has room for, whole clusters of them; where that is enough for all tiles, nobody asks for more."""
    for rows, blocks in ((640, 20), (128 * 70, {4: 128}.get(cluster, 132))):
        p = en.trace(lambda x, w: x @ w, en.TensorSpec((rows, 64), "bfloat16"), en.TensorSpec((64, 512), "bfloat16"))
        plan = planned(p, {"a0": 128, "a1": 64, "a2": 128}, warpgroups=2, stages=2, cluster=cluster)
        s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, cuda_arch("sm_90a"))
        assert isinstance(s, Pipeline) and (s.cluster, s.order, s.blocks) == (cluster, "static", blocks)
        few = replace(cuda_arch("sm_90a"), multiprocessors=8, clusters=((2, 3),))
        s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, few)
        assert isinstance(s, Pipeline) and (s.cluster, s.blocks) == {1: (1, 8), 2: (2, 6), 4: (1, 8)}[cluster]


@needs_compiler
@pytest.mark.parametrize("choices", some([{}, {"peek": True}, {"overlap": False}, {"chain": False, "order": "folded"}]))
def test_streams_in_clusters(choices: dict[str, object]) -> None:
    """Two blocks with rows of their own read the same keys and values."""
    p = attention("prefill_global", *[(1, 2, 500, 64)] * 3)
    plan = planned(p, {"a1": 128, "a3": 64}, warpgroups=2, stages=2, pivot="lazy", cluster=2, **choices)
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, cuda_arch("sm_90a"))
    assert isinstance(s, Pipeline) and s.cluster == 2 and len(s.spread) == 2
    check(p, plan, draw(p))


@needs_compiler
@pytest.mark.parametrize("peek", some([False, True]))
def test_masked_streams_in_clusters(peek: bool) -> None:
    """Two heads of queries that share one of keys: their loops are of one length, those of their next tiles of another."""
    p = attention("prefill_gqa", (1, 4, 300, 64), *[(1, 2, 300, 64)] * 2)
    plan = planned(p, {"a1": 1, "a2": 128, "a4": 64, "a5": 64}, warpgroups=2, stages=2, pivot="lazy", cluster=2, peek=peek)
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and (s.cluster, s.along, s.order, s.works, s.workers) == (2, "a1", "folded", 6, 1)
    check(p, plan, draw(p))


@pytest.mark.parametrize(
    ("case", "choices"), [("prefill_global", {"pivot": "frozen"}), ("prefill_causal", {}), ("prefill_global", {"order": "grid"})]
)
def test_where_blocks_cannot_stay_together(case: str, choices: dict[str, object]) -> None:
    """Tiles computed again, loops of different lengths, blocks that take one tile each."""
    p = attention(case, *[(1, 2, 512, 64)] * 3)
    plan = planned(p, {"a1": 128, "a3": 64, "a4": 64}, warpgroups=2, stages=2, cluster=2, **{"pivot": "lazy", **choices})
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, cuda_arch("sm_90a"))
    assert isinstance(s, Pipeline) and s.cluster == 1


@pytest.mark.parametrize("what", ["logsumexp", "sum"])
def test_pivots_beside_the_quotient(what: str) -> None:
    """What goes with the true maximum, a sum at it or its own logarithm, keeps a running pivot."""

    def f(q, k, v):  # type: ignore[no-untyped-def]
        s = q @ k.mT
        e = en.xp.exp(s - en.xp.max(s, axis=-1, keepdims=True))
        total = en.xp.sum(e, axis=-1, keepdims=True)
        return e / total @ v, en.xp.logsumexp(s, axis=-1) if what == "logsumexp" else total

    p = en.trace(f, *[en.TensorSpec((2, 1024, 64), "bfloat16")] * 3)
    plan = en.optimize(p, "cuda:sm_90a").plan
    k = plan.kernels[0]
    rows = next(a for a, x in k.axes.items() if x.role == "grid" and x.extent == 1024)
    keys = next(a for a, x in k.axes.items() if x.role == "loop")
    wanted = planned(p, {rows: 128, keys: 64}, warpgroups=2, pivot="frozen")
    s = schedule_of(lower(wanted.kernels[0], wanted.buffers), wanted.buffers, cuda_arch("sm_90a"))
    assert isinstance(s, Pipeline) and s.pivots.candidates and s.pivot == "running"


def test_what_would_read_beyond_its_tiles_has_no_such_form() -> None:
    """40 keys end inside a matrix instruction's 16: what registers and tiles hold behind them is anything, and 0 · anything may be
    NaN.  A product outside the loop would never be issued."""

    def f(q, k, v):  # type: ignore[no-untyped-def]
        return en.xp.tanh(q @ k.mT) @ v

    shapes = [(64, 64), (40, 64), (40, 64)]
    p = en.trace(f, *(en.TensorSpec(s, "bfloat16") for s in shapes))
    plan = en.optimize(p, "cuda:sm_90a").plan
    (k,) = plan.kernels
    loop = next(a for a, x in k.axes.items() if x.extent == 40)
    whole = {a: replace(x, tile=x.extent, role="grid" if x.role == "grid" else "whole") for a, x in k.axes.items()}
    for streamed, why in (({loop: 40}, "ends inside"), ({"a1": 16}, "outside the loop")):
        axes = whole | {a: replace(whole[a], tile=n, role="loop") for a, n in streamed.items()}
        wanted = replace(k, axes=axes, choices={"warpgroups": 1})
        with pytest.raises(Unsupported, match=why):
            schedule_of(lower(wanted, plan.buffers), plan.buffers, hopper_emulator_arch())


def test_what_has_no_such_form() -> None:
    p = attention("prefill_global", *[(1, 2, 300, 64)] * 3)
    for tiles, choices in (({"a1": 96, "a3": 64}, {}), ({"a1": 128, "a3": 64}, {"stages": 99}), ({"a1": 256, "a3": 64}, {})):
        plan = planned(p, tiles, warpgroups=1, **choices)
        programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
        if choices:
            emit(programs, plan.buffers, cuda_arch("sm_90a"))  # more stages than fit: as many as do
        else:
            with pytest.raises(Unsupported):
                emit(programs, plan.buffers, cuda_arch("sm_90a"))


def sunk(q, k, v, sink):  # type: ignore[no-untyped-def]
    """Attention with a sink beside keys that start behind the row, so that the last rows see none."""
    xp = q.__array_namespace__()
    i, j = xp.arange(q.shape[-2])[:, None], xp.arange(k.shape[-2])
    s = xp.where(j > i + 20, q @ k.mT / 8.0, -xp.inf)
    sink = sink[:, None, None]
    m = xp.maximum(xp.max(s, axis=-1, keepdims=True), sink)
    e = xp.exp(s - m)
    return (e / (xp.exp(sink - m) + xp.sum(e, axis=-1, keepdims=True))) @ v


@needs_compiler
@pytest.mark.parametrize("pivot", some(["frozen", "running"]))
def test_sinks_of_any_size(pivot: str) -> None:
    """A sink that is the maximum, one that is nothing, one of −∞: rows that see no key are 0 with a sink, NaN without."""
    p = en.trace(sunk, *[en.TensorSpec((4, 200, 64), "bfloat16")] * 3, en.TensorSpec((4,), "bfloat16"))
    plan = planned(p, {"a1": 64, "a3": 64}, warpgroups=1, stages=2, pivot=pivot)
    arrays = draw(p)
    arrays["sink"] = np.array([1.0, 300.0, -300.0, -np.inf], ml_dtypes.bfloat16)
    want = np.asarray(en.evaluate(p, *arrays.values()))
    assert np.isnan(want[3, 180:]).all() and (want[:3, 180:] == 0).all()
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and s.pivot == pivot
    for got in emulated(p, plan, arrays):
        assert np.array_equal(np.isnan(got), np.isnan(want))
        assert error(np.nan_to_num(got), np.nan_to_num(want)) < 3e-3


@needs_compiler
def test_a_sink_of_zero() -> None:
    """What stands beside the maximum is a constant: rows whose scores are all far below it, or far above."""
    p = attention("off_by_one_attention", *[(3, 200, 64)] * 3)
    plan = planned(p, {"a1": 64, "a3": 64}, warpgroups=1, stages=2, pivot="frozen")
    arrays = draw(p)
    q = arrays["q"].astype(np.float32)
    q[1] = q[1] * 0.1 - np.sign(arrays["k"][1].astype(np.float32).mean(0)) * 9.0
    q[2] *= 30.0
    arrays["q"] = q.astype(ml_dtypes.bfloat16)
    s = schedule_of(lower(plan.kernels[0], plan.buffers), plan.buffers, hopper_emulator_arch())
    assert isinstance(s, Pipeline) and s.pivot == "frozen"
    check(p, plan, arrays)


def test_pivots_that_something_else_may_exceed() -> None:
    """An exponential of anything that is not below the pivot might overflow when the pivot lags far behind: it may only be lazy."""

    def f(q, k, v, sink):  # type: ignore[no-untyped-def]
        xp = q.__array_namespace__()
        s = q @ k.mT
        m = xp.max(s, axis=-1, keepdims=True)
        e = xp.exp(s - m)
        return (e / (xp.exp(sink[:, None, None] - m) + xp.sum(e, axis=-1, keepdims=True))) @ v

    p = en.trace(f, *[en.TensorSpec((32, 4096, 64), "bfloat16")] * 3, en.TensorSpec((32,), "bfloat16"))
    plan = en.optimize(p, "cuda:sm_90a").plan
    (k,) = plan.kernels
    s = schedule_of(lower(replace(k, choices={**k.choices, "pivot": "frozen"}), plan.buffers), plan.buffers, cuda_arch("sm_90a"))
    assert isinstance(s, Pipeline) and s.pivots.free and s.pivots.rising and s.pivot == "lazy"


# ---- products whose results are only reduced along rows: nothing is added to by late products


def statistics(what: str, mask: bool = False):  # type: ignore[no-untyped-def]
    def f(q, k):  # type: ignore[no-untyped-def]
        xp = q.__array_namespace__()
        s = q @ k.mT / 8.0
        if mask:
            s = xp.where(xp.arange(k.shape[-2]) <= xp.arange(q.shape[-2])[:, None], s, -xp.inf)
        return getattr(en.xp, what)(s, axis=-1)

    return f


def rows_and_keys(what: str, q: tuple[int, ...], k: tuple[int, ...], mask: bool = False, dtype: str = "bfloat16") -> en.Program:
    return en.trace(statistics(what, mask), en.TensorSpec(q, dtype), en.TensorSpec(k, dtype))


@needs_compiler
@pytest.mark.parametrize("groups", some([1, 2, 3]))
@pytest.mark.parametrize("what", some(["logsumexp", "max", "argmax"]))
def test_row_statistics_of_a_product(what: str, groups: int) -> None:
    """Ragged rows and keys, tiles with a wide and a narrow result, several tiles to a block."""
    dtype = "float16" if groups == 1 else "bfloat16"
    large = rows_and_keys(what, (32, 4096, 64), (32, 4000, 64), dtype=dtype)
    p = rows_and_keys(what, (3, 230, 64), (3, 300, 64), dtype=dtype)
    plan = planned(large, {"a1": 64 * groups, "a3": 128 if groups == 2 else 64}, warpgroups=groups, stages=2, pivot="frozen")
    assert len(plan.kernels) == 1
    arrays = draw(p)
    want = np.asarray(en.evaluate(p, *arrays.values()), np.float64)
    q, k = (x.astype(np.float64) for x in arrays.values())
    for got in emulated(p, smaller(plan, p), arrays):
        if what == "argmax":  # the value there: products of bfloat16 tie
            scores = q @ np.swapaxes(k, 1, 2)
            at = np.take_along_axis(scores, got.astype(np.int64)[..., None], -1)[..., 0]
            assert np.allclose(at, scores.max(-1), rtol=1e-6)
        else:
            assert error(got, want) < 3e-3


@needs_compiler
@pytest.mark.parametrize("pivot", some(["frozen", "running", "lazy"]))
def test_row_statistics_under_a_mask(pivot: str) -> None:
    """Dead tiles are skipped, mixed ones masked; and pivots that the first tiles leave too low are found out."""
    large = rows_and_keys("logsumexp", (32, 4096, 64), (32, 4096, 64), mask=True)
    p = rows_and_keys("logsumexp", (2, 300, 64), (2, 300, 64), mask=True)
    plan = smaller(planned(large, {"a1": 128, "a3": 64}, warpgroups=2, stages=3, pivot=pivot), p)
    arrays = draw(p)
    k = arrays["k"].astype(np.float32)
    k[:, 3:9] *= 300.0  # walked last
    arrays["k"] = k.astype(ml_dtypes.bfloat16)
    check(p, plan, arrays)


@needs_compiler
@pytest.mark.parametrize("pivot,keys", some([("running", 64), ("lazy", 64), ("lazy", 32)]))
def test_pivots_that_stay_where_the_first_tile_puts_them(pivot: str, keys: int) -> None:
    """The gradient of the queries, masked: some rows' first tiles have no weight, and the last ones more than the others."""

    def gradient(q, k, v, do):  # type: ignore[no-untyped-def]
        xp = q.__array_namespace__()
        p = programs.softmax(programs.causal(programs.scores(q, k)))
        dp = do @ v.mT
        return (p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))) @ k / q.shape[-1] ** 0.5

    def program(heads: int, n: int) -> en.Program:
        return en.trace(gradient, *[en.TensorSpec((1, heads, n, 128), "bfloat16")] * 4)

    p = program(2, 200)
    plan = planned(program(32, 4096), {"a1": 128, "a3": keys}, warpgroups=2, stages=2, pivot=pivot)
    assert len(plan.kernels) == 1
    arrays = draw(p)
    k = arrays["k"].astype(np.float32)
    k[..., 3:9, :] *= 60.0  # walked last
    arrays["k"] = k.astype(ml_dtypes.bfloat16)
    arrays["do"] = (arrays["do"].astype(np.float32) + 2.0).astype(ml_dtypes.bfloat16)  # rows whose mean is not 0
    plan = smaller(plan, p)
    schedule = schedule_of(lower(plan.kernels[0], plan.buffers, plan.compute_dtype), plan.buffers, hopper_emulator_arch())
    assert isinstance(schedule, Pipeline) and schedule.pivot == pivot and not schedule.overlap
    check(p, plan, arrays, 8e-3)


@needs_compiler
def test_a_product_with_statistics_behind_it() -> None:
    """The cross entropy with its vocabulary product: each block leaves the statistics of the columns that it has."""
    case = CASES["cross_entropy_linear"]
    large = en.trace(case.function("full"), *case.specs("full"))
    p = en.trace(case.function("full"), *case.specs("full", n=150, d=136, v=300))
    plan = planned(large, {"a0": 128, "a1": 64}, warpgroups=2, stages=3)
    assert len(plan.kernels) == 2 and not any(b.kind == "temp" and b.size > 1 << 21 for b in plan.buffers.values())
    arrays = dict(zip((i.name for i in p.inputs), case.inputs("full", np.random.default_rng(0), n=150, d=136, v=300)))
    want = np.asarray(en.evaluate(p, *arrays.values()), np.float64)
    for got in emulated(p, smaller(plan, p, {"a2.i": 64, "a2.o": 5}), arrays):
        assert error(got, want) < 3e-3


@needs_compiler
def test_tiles_that_early_and_late_products_share() -> None:
    """Gradients of keys and values: rows are keys, what goes with a query is a column's, and two products read each tile."""
    case = CASES["attention_dkv"]
    large = en.trace(case.function("full"), *case.specs("full"))
    plan = en.optimize(large, "cuda:sm_90a").plan
    assert [bool(k.choices.get("warpgroups")) for k in plan.kernels] == [True, True]
    p = en.trace(case.function("full"), *case.specs("full", hq=2, hkv=2, n=200))  # with its scale
    arrays = draw(p)
    wants = en.evaluate(p, *arrays.values())
    small = smaller(plan, p)
    arch = hopper_emulator_arch()
    programs = [lower(k, small.buffers, small.compute_dtype) for k in small.kernels]
    assert all(isinstance(schedule_of(x, small.buffers, arch), Pipeline) for x in programs)
    for outs in run(programs, small.buffers, arrays, arch, (0, 1)):
        for name, want in zip(("out0", "out1"), wants):
            assert error(np.asarray(outs[name]).astype(np.float64), np.asarray(want)) < 6e-3


# program, extents: of its kernels, those that are pipelines and all; what the last pipeline does with its pivot
PIPELINES: dict[str, tuple[dict[str, int], tuple[int, int], str | None]] = {
    "sink_attention": ({}, (1, 1), "frozen"),
    "off_by_one_attention": ({}, (1, 1), "frozen"),
    "sigmoid_attention": ({}, (1, 1), None),
    "retention": ({}, (1, 1), None),
    "differential_attention": ({}, (2, 2), None),
    "attention_dq": ({}, (1, 1), None),
    "attention_dkv": ({}, (2, 2), None),
    "attention_backward": ({}, (2, 3), None),
    "qknorm": ({"n": 4096, "h": 32, "d": 128}, (1, 3), None),
    "cross_entropy_linear": ({"n": 8192, "d": 4096, "v": 128256}, (1, 2), None),
    "attention_logsumexp": ({}, (1, 1), "frozen"),
    "nearest_centre": ({}, (1, 2), None),
    "top2_gating": ({}, (1, 2), None),
    "linear_attention": ({"n": 16384}, (2, 3), None),
}


@pytest.mark.parametrize("name", some(PIPELINES, 2))
def test_programs_that_nobody_tuned_for(name: str) -> None:
    extents, (pipelines, kernels), pivot = PIPELINES[name]
    case = CASES[name]
    plan = en.optimize(case.function("full"), "cuda:sm_90a", specs=case.specs("full", **extents)).plan
    mine = [k for k in plan.kernels if k.choices.get("warpgroups")]
    assert (len(mine), len(plan.kernels)) == (pipelines, kernels)
    assert sum(k.cost.seconds for k in mine if k.cost) > 0.75 * plan.cost.seconds
    if pivot:
        assert mine[-1].choices["pivot"] == pivot


@pytest.mark.slow
@pytest.mark.parametrize("name", ["differential_attention", "cross_entropy_linear"])
def test_nothing_spills(name: str) -> None:
    """Sums of 256 columns: what only the end of a tile wants is not read before its loop, results go where the sums were, and the
    copying warp has few registers.  Where registers still run out, what is shipped keeps its overlap and gives up the frozen pivot."""
    from eqsat_neptune.runtime.fitting import fit, fits
    from eqsat_neptune.runtime.nvrtc import compile_cuda

    try:
        compiler_version("sm_90a")
    except en.EqsatError as e:
        pytest.skip(str(e))
    case = CASES[name]
    plan = en.optimize(case.function("full"), target="cuda:sm_90a", specs=case.specs("full", n=4096)).plan
    assert plan.kernels[0].choices["warpgroups"] == 2 and "hold" not in plan.kernels[0].choices
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    arch = cuda_arch("sm_90a")

    def compiled(source: Source) -> Compiled:
        return compile_cuda(source.text, "sm_90a")

    planned = compiled(emit(programs, plan.buffers, arch)).kernels
    shipped = fit(programs, plan.buffers, arch, planned, compiled).programs(programs)
    assert all(fits(k) for k in compiled(emit(shipped, plan.buffers, arch)).kernels.values())
    for p, k in zip(shipped, plan.kernels, strict=True):
        assert {n: v for n, v in p.choices.items() if n != "pivot"} == {n: v for n, v in k.choices.items() if n != "pivot"}


def test_what_only_the_end_wants_is_made_behind_the_loop() -> None:
    """A tile of another kernel's result is; a value a row, and what the loop reads, are not."""
    case = CASES["differential_attention"]
    plan = en.optimize(case.function("full"), target="cuda:sm_90a", specs=case.specs("full", n=4096)).plan
    p = lower(plan.kernels[1], plan.buffers, plan.compute_dtype)
    (temporary,) = (b.name for b in plan.buffers.values() if b.kind == "temp")
    early = next(s for s in p.body if isinstance(s, Load) and s.buffer == temporary)  # where it comes depends on the order of terms
    p = replace(p, body=(early, *(s for s in p.body if s is not early)))

    def place(body: tuple[Stmt, ...]) -> tuple[list[str], list[str]]:
        """Buffers that are loaded before and after the loop."""
        at = next(n for n, s in enumerate(body) if isinstance(s, Loop))
        before, after = ([s.buffer for s in part if isinstance(s, Load)] for part in (body[:at], body[at:]))
        return before, after

    before, after = place(p.body)
    assert temporary in before and len(before) > 1
    moved = behind_loops(p)
    assert place(moved.body) == ([b for b in before if b != temporary], [temporary, *after])
    assert {s.out for s in walk(moved.body) if isinstance(s, Load)} == {s.out for s in walk(p.body) if isinstance(s, Load)}
    assert behind_loops(moved) == moved
    small = replace(p, axes={a: replace(x, tile=1 if a in ("a1", "a5") else x.tile) for a, x in p.axes.items()})
    assert place(behind_loops(small).body) == (before, after)


def test_sums_are_read_behind_a_loop_after_the_last_wait() -> None:
    """Else the assembler may move the reads ahead of the wait: wrong on a GPU, and right in the emulator."""
    text = en.optimize(lambda x, w: x @ w, "cuda:sm_90a", specs=[en.TensorSpec((4096, 4096), "bfloat16")] * 2).source
    assert "(No{});" in text and text.count("products_wait<0>();") == 1
    waits, asks, stores = (text.rindex(x) for x in ("products_wait<0>();", "const int coming = next_work();", "work = coming;"))
    assert waits < asks < stores and "pin(" in text[waits:asks]


@pytest.mark.parametrize("name, lazy", [("attention_dq", {"bfloat16"}), ("prefill_global", {"bfloat16", "float16"})])
def test_multiples_of_weights_are_never_larger_than_they_would_be(name: str, lazy: set[str]) -> None:
    """Pivots that lag let weights grow to 2⁸: times what is near the end of float16's range that is infinite, and nothing checks it."""
    case = CASES[name]
    for dtype in ("bfloat16", "float16"):
        plan = en.optimize(case.function("full"), "cuda:sm_90a", specs=case.specs("full", dtype=dtype)).plan
        (k,) = plan.kernels
        program = lower(replace(k, choices=k.choices | {"pivot": "lazy"}), plan.buffers, plan.compute_dtype)
        pipe = schedule_of(program, plan.buffers, cuda_arch("sm_90a"))
        assert isinstance(pipe, Pipeline) and pipe.pivot == ("lazy" if dtype in lazy else "running")
