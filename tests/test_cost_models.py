"""Machine descriptions, the analyses of tile programs, and what the models make of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.tile import TileProgram
from eqsat_neptune.cost_models import CostModel, Cpu, Gpu, Sizes, Work, machine_for, model_for
from eqsat_neptune.cost_models import walk as W
from eqsat_neptune.cost_models.block import Block
from eqsat_neptune.cost_models.host import HostModel
from eqsat_neptune.cost_models.machines import A100, DEVICES, H200, host
from eqsat_neptune.cost_models.roofline import Roofline
from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

from eqsat_neptune import optimize, trace
from eqsat_neptune import terms as T
from eqsat_neptune.errors import TargetError
from eqsat_neptune.programs import CASES
from eqsat_neptune.targets import CUDA_ARCHS, HIP_ARCHS
from eqsat_neptune.terms import Affine, axis_index

A = axis_index


# ------------------------------------------------------------------------------------------------ kernels to be priced


def attention(
    n: int = 4096, d: int = 128, heads: int = 32, causal: bool = False, names: str = "hqdek", dtype: str = "bfloat16"
) -> TileProgram:
    """One pass over the keys: h, q on the grid, k streamed."""
    h, q, dd, e, k = names
    load = lambda x, *axes: T.inp(x, tuple(map(A, axes)))  # noqa: E731
    s = T.mul(T.red("+", dd, T.mul(load("Q", h, q, dd), load("K", h, k, dd))), 0.1)
    if causal:
        s = T.where(T.bi("le", T.iota(k), T.iota(q)), s, T.num(-math.inf))
    m = T.Monoid(("max",), (((0, T.un("exp", T.sub(T.var("r0"), T.var("R0")))),),))
    o = T.div(T.fold(m, 1, k, [s, load("V", h, k, e)]), T.fold(m, 1, k, [s, T.num(1.0)]))
    axes = {
        h: Axis(heads, 1, "grid"), q: Axis(n, 128, "grid"), dd: Axis(d, d, "whole"), e: Axis(d, d, "grid"), k: Axis(n, 64, "loop"),
    }  # fmt: skip
    kernel = Kernel("k0", (Store("O", o, (A(h), A(q), A(e))),), axes, {a: x.extent for a, x in axes.items()})
    shape = (heads, n, d)
    buffers = {x: Buffer(x, shape, dtype, "input") for x in "QKV"} | {"O": Buffer("O", shape, dtype, "output")}
    return lower(kernel, buffers)


def product(m: int, n: int, k: int, dtype: str = "bfloat16") -> TileProgram:
    t = T.red("+", "k", T.mul(T.inp("A", (A("m"), A("k"))), T.inp("B", (A("k"), A("n")))))
    axes = {"m": Axis(m, 128, "grid"), "n": Axis(n, 128, "grid"), "k": Axis(k, 64, "loop")}
    kernel = Kernel("k0", (Store("C", t, (A("m"), A("n"))),), axes, {"m": m, "n": n, "k": k})
    buffers = {
        "A": Buffer("A", (m, k), dtype, "input"),
        "B": Buffer("B", (k, n), dtype, "input"),
        "C": Buffer("C", (m, n), dtype, "output"),
    }
    return lower(kernel, buffers)


def copy(rows: int, columns: int) -> TileProgram:
    axes = {"i": Axis(rows, 8, "grid"), "j": Axis(columns, 512, "grid")}
    index = (A("i"), A("j"))
    kernel = Kernel("k0", (Store("Y", T.mul(T.inp("X", index), 2.0), index),), axes, {"i": rows, "j": columns})
    return lower(kernel, {x: Buffer(x, (rows, columns), "float32", "input" if x == "X" else "output") for x in "XY"})


def sizes(program: TileProgram, **tiles: int | list[int]) -> Sizes:
    tile = {a: np.atleast_1d(np.array(tiles.get(a, x.tile), float)) for a, x in program.axes.items()}
    return Sizes(tile, {a: np.array([float(x.extent)]) for a, x in program.axes.items()})


def seconds(model: CostModel, program: TileProgram, **tiles: int) -> float:
    return float(model.cost(program, sizes(program, **tiles)).seconds[0])


def best(model: CostModel, program: TileProgram) -> tuple[float, dict[str, int]]:
    """The cheapest tiles among those that the model itself proposes."""
    ladder = model.tiles(program, {a: x.extent for a, x in program.axes.items()})
    grids = np.meshgrid(*[np.array(v, float) for v in ladder.values()], indexing="ij")
    tile = {a: g.ravel() for a, g in zip(ladder, grids)}
    s = model.cost(program, Sizes(tile, {a: np.array([float(x.extent)]) for a, x in program.axes.items()}))
    i = int(np.argmin(s.seconds))
    return float(s.seconds[i]), {a: int(v[i]) for a, v in tile.items()}


H = Roofline(H200)


# ------------------------------------------------------------------------------------------------------------ machines


def test_every_target_has_a_machine() -> None:
    for target in (*(f"cuda:{a}" for a in CUDA_ARCHS), *(f"hip:{a}" for a in HIP_ARCHS)):
        assert isinstance(machine_for(target), Gpu)
        assert model_for(target).name == machine_for(target).name
    assert isinstance(machine_for("cpu"), Cpu)


def test_unknown_target_names_those_known() -> None:
    with pytest.raises(TargetError, match=r"cuda:sm_999.*cpu.*hip:gfx942"):
        machine_for("cuda:sm_999")


def test_machines_are_plausible() -> None:
    for m in DEVICES.values():
        assert m.dram < m.l2 < m.shared, m.name  # the nearer, the faster
        assert m.tensor == 0 or m.tensor > m.ops, m.name
        assert m.shared_block <= m.shared_sm and m.registers_thread * 128 <= m.registers, m.name


def test_host_depends_on_the_number_of_cores_alone() -> None:
    assert host(4) == host(4) and host(4).cores == 4


# ------------------------------------------------------------------------------------------------------ live tiles


def live_by_counting(constraints: tuple[Affine, ...], tile: dict[str, int], extent: dict[str, int]) -> tuple[float, float]:
    axes = sorted(tile)
    alive = full = total = 0
    for at in np.ndindex(*[-(-extent[a] // tile[a]) for a in axes]):
        first = {a: i * tile[a] for a, i in zip(axes, at)}
        values = []
        for c in constraints:
            grids = np.meshgrid(*[np.arange(first[a], min(first[a] + tile[a], extent[a])) for a in axes], indexing="ij")
            values.append(c.const + sum(k * grids[axes.index(a)] for a, k in c.terms))
        total += 1
        alive += all(v.max() >= 0 for v in values)
        full += all(v.min() >= 0 for v in values)
    return alive / total, full / total


@pytest.mark.parametrize(
    "constraints",
    [
        (Affine(0, (("q", 1), ("k", -1))),),
        (Affine(0, (("q", 1), ("k", -1))), Affine(63, (("q", -1), ("k", 1)))),
        (Affine(-7, (("q", 2), ("k", -1))),),
    ],
    ids=["causal", "window", "skewed"],
)
@pytest.mark.parametrize("tile", [(32, 16), (64, 64), (1, 8)])
def test_share_of_live_tiles(constraints: tuple[Affine, ...], tile: tuple[int, int]) -> None:
    t, n = dict(zip("qk", tile)), {"q": 256, "k": 256}
    alive, full = W.live_share(
        constraints, Sizes({a: np.array([float(x)]) for a, x in t.items()}, {a: np.array([256.0]) for a in n})
    )
    want = live_by_counting(constraints, t, n)
    assert abs(alive[0] - want[0]) < 0.04 and abs(full[0] - want[1]) < 0.04


def test_dead_loop_still_counts_for_something() -> None:
    alive, full = W.live_share((Affine(-1),), Sizes({"q": np.array([16.0])}, {"q": np.array([64.0])}))
    assert 0 < alive[0] < 0.01 and full[0] == 0


def test_causal_attention_takes_about_half() -> None:
    whole, half = seconds(H, attention(), q=128, k=64), seconds(H, attention(causal=True), q=128, k=64)
    assert 0.45 * whole < half < 0.75 * whole


# ------------------------------------------------------------------------------------------------ registers, memory


def test_peak_holds_scores_beside_accumulator() -> None:
    program = attention()
    sets = [set(point) for point in W.peaks(program, lambda v: v.axes if len(v.axes) > 1 else None, transient=True)]
    assert any({("h", "k", "q"), ("e", "h", "q")} <= s for s in sets)


def test_what_is_made_for_a_reduction_takes_no_room() -> None:
    """Σ exp(x − m): of a row, x is held and nothing else; where the exponentials are stored, too, they take its place."""
    x = T.inp("x", (A("r"), A("c")))
    shifted = T.sub(x, T.red("max", "c", x))
    e = T.un("exp", shifted)
    buffers = {"x": Buffer("x", (4096, 4096), "bfloat16", "input"), "y": Buffer("y", (4096, 4096), "bfloat16", "output")}
    axes = {"r": Axis(4096, 1, "grid"), "c": Axis(4096, 4096, "whole")}
    total = T.red("+", "c", e)
    for y in (T.sub(shifted, T.un("log", total)), T.div(e, total)):
        p = lower(Kernel("k", (Store("y", y, (A("r"), A("c"))),), axes, {"r": 4096, "c": 4096}), buffers)
        s = H.cost(p, sizes(p), detail=True)
        threads = 32 * s.choices["warps"][0]
        assert s.detail["registers"][0] * threads <= 4096 + 36 * threads


def test_what_fits_no_register_is_infeasible() -> None:
    s = H.cost(attention(), sizes(attention(), q=[64, 128, 4096], k=[64, 64, 64], h=1, d=128, e=128))
    assert np.isfinite(s.seconds[:2]).all() and np.isinf(s.seconds[2])


def test_small_shared_memory_forbids_large_tiles() -> None:
    small = Roofline(replace(H200, shared_block=48 * 1024, shared_sm=64 * 1024))
    assert np.isfinite(seconds(H, attention(), q=128, k=64)) and np.isinf(seconds(small, attention(), q=128, k=64))


def test_schedule_choices_come_with_the_tiles() -> None:
    s = H.cost(attention(), sizes(attention(), q=128, k=64), detail=True)
    assert s.choices["warps"][0] in (4, 8) and s.choices["stages"][0] in (2, 3, 4)
    assert set(s.parts) >= {"tensor", "ops", "special", "shared", "l2", "dram", "launch"}
    assert s.detail["registers"][0] <= H200.registers_thread and s.detail["shared bytes"][0] <= H200.shared_block


# ------------------------------------------------------------------------------------------------------------ GPU


def test_copy_runs_at_the_memory_rate() -> None:
    t, _ = best(H, copy(8192, 8192))
    assert 2 * 4 * 8192 * 8192 / t > 0.85 * H200.dram


def test_large_product_is_bound_by_the_matrix_units() -> None:
    program = product(8192, 8192, 8192)
    t, tile = best(H, program)
    assert 0.4 * H200.wgmma < 2 * 8192**3 / t <= H200.wgmma
    assert min(tile["m"], tile["n"]) >= 64


def test_float32_products_do_not_run_on_matrix_units() -> None:
    p = product(2048, 2048, 2048, "float32")
    s = H.cost(p, sizes(p, m=64, n=64, k=16), detail=True)
    assert s.parts["tensor"][0] == 0 and s.parts["ops"][0] > 0


def test_attention_tile_is_one_that_kernels_have() -> None:
    for machine in (H200, A100):
        t, tile = best(Roofline(machine), attention())
        assert tile["h"] == 1 and tile["q"] in (64, 128, 256) and tile["k"] in (32, 64, 128), machine.name
        assert 4 * 4096**2 * 128 * 32 / t > 0.3 * machine.tensor, machine.name


def test_products_of_few_columns_wait_for_shared_memory() -> None:
    """Both operands lie there: a step of 64 × n × 16 reads 64 + n rows, whatever n is."""
    p = attention(d=256)
    few, many = (seconds(H, p, q=128, k=k, d=256, e=256) for k in (32, 80))
    assert few > 1.1 * many
    assert seconds(H, p, q=128, k=96, d=256, e=256) > many  # two stages of those do not fit


def test_three_warpgroups_hide_more_of_the_elementwise_work() -> None:
    """Where it takes as long as the products, two of them leave the units idle in turn."""
    p = attention(n=12288, d=64)
    two, three = (seconds(H, p, q=q, k=128, d=64, e=64) for q in (128, 192))
    assert three < 0.9 * two


def test_tiles_around_those_of_a_pipeline() -> None:
    p = attention(d=64)
    tiles, extents = {"h": 1, "q": 128, "d": 64, "e": 64, "k": 128}, {a: x.extent for a, x in p.axes.items()}
    found = H.finer(p, tiles, extents)
    assert {64, 96, 128, 192} <= set(found["q"]) and set(found["k"]) == set(range(16, 257, 16))
    assert {a: found[a] for a in "hde"} == {"h": (1,), "d": (64,), "e": (64,)}
    alone = product(8192, 8192, 8192)
    assert H.finer(alone, {"m": 128, "n": 128, "k": 64}, {"m": 8192, "n": 8192, "k": 8192}) == {"m": (128,), "n": (128,), "k": (64,)}


def test_few_blocks_leave_the_machine_idle() -> None:
    """Wave quantisation: 132 and 133 blocks differ by a wave."""
    one, two = (seconds(H, product(128 * n, 128, 4096), m=128, n=128, k=64) for n in (132, 133))
    assert two > 1.5 * one


def test_some_tile_gives_every_multiprocessor_a_block() -> None:
    program = product(16, 6144, 4096)
    assert 48 in H.tiles(program, {a: x.extent for a, x in program.axes.items()})["n"]


def test_rows_of_tiles_that_are_whole_lines_come_faster() -> None:
    """Measured (2 rows, weights 4096 × 6144): 64 columns 18.4 µs, 48 columns 23.2, 32 columns 22.9."""
    program = product(16, 6144, 4096)
    t = {n: seconds(H, program, m=16, n=n, k=256) for n in (32, 48, 64)}
    assert 1.1 < t[48] / t[64] < 1.4 and 1.1 < t[32] / t[64] < 1.4
    assert best(H, program)[1]["n"] == 64
    whole = product(16, 48, 4096)  # a tile of the whole row: neighbours are its own
    b = [Block(p, s := sizes(p, m=16, n=48, k=256), W.steps(p, s)[0], np.ones(1), H200) for p in (whole, program)]
    assert b[0].partial[0] == 0 and b[1].partial[0] > 0.2 * b[1].dram[0]


def test_what_the_cache_has_takes_its_time_too() -> None:
    """Blocks that load as much again from the cache pull half as fast from memory."""
    one, few, flight = np.ones(1), np.full(1, 64.0), np.full(1, 49152.0)
    alone, half = (float(H._per_byte(few, H200.sms * one, flight, 0 * one, np.full(1, x))[0]) for x in (1.0, 0.5))
    assert 1.5 < half / alone <= 2


def test_blocks_share_a_loop_where_else_few_would_work() -> None:
    """64 tiles of 64 columns: two blocks to a tile keep all multiprocessors busy; 132 tiles need no help, and two iterations are too few."""
    at = dict(m=16, n=64, k=256)
    clustered = Roofline(replace(H200, clusters=(2, 4)))
    few, many, short = (clustered.cost(p, sizes(p, **at)) for p in (product(16, 4096, 4096), product(16, 132 * 64, 4096), product(16, 4096, 512)))
    assert few.choices["cluster"][0] == 2 and "cluster" not in many.choices and "cluster" not in short.choices
    t = T.red("+", "k", T.mul(T.inp("A", (A("k"),)), T.inp("B", (A("k"), A("n")))))
    axes = {"n": Axis(4096, 64, "grid"), "k": Axis(4096, 256, "loop")}
    buffers = {n: Buffer(n, s, "bfloat16", kind) for n, s, kind in (("A", (4096,), "input"), ("B", (4096, 4096), "input"), ("C", (4096,), "output"))}
    vector = lower(Kernel("k0", (Store("C", t, (A("n"),)),), axes, {"n": 4096, "k": 4096}), buffers)
    assert clustered.cost(vector, sizes(vector)).choices["cluster"][0] == 2  # kernels give it rows
    alone = H.cost(product(16, 4096, 4096), sizes(product(16, 4096, 4096), **at))
    assert "cluster" not in alone.choices and few.seconds[0] < 0.9 * alone.seconds[0]


def test_warps_with_results_of_their_own_read_operands_once() -> None:
    """16 × 64 results are shared by loop, 64 × 128 by columns: rows are read again by every warp."""
    model = Roofline(H200, plain=True)
    few, many = (model.cost(product(m, 6144, 4096), sizes(product(m, 6144, 4096), m=m, n=n, k=256), detail=True) for m, n in ((16, 64), (64, 128)))
    traffic = 2 * 4096 * (16 + 64) * 2  # written and read
    assert few.parts["shared"][0] == pytest.approx(traffic / H200.shared * H200.sms, rel=0.05)
    assert many.parts["shared"][0] > 1.3 * 2 * 4096 * (64 + 128) * 2 / H200.shared * H200.sms


def norm(rows: int, columns: int, own: bool = False) -> TileProgram:
    """Rows, each divided by the sum of its squares, times a row that all of them share (own: that each has of its own)."""
    x, gain = T.inp("X", (A("i"), A("j"))), T.inp("G", (A("i"), A("j")) if own else (A("j"),))
    t = T.mul(T.div(x, T.red("+", "j", T.mul(x, x))), gain)
    axes = {"i": Axis(rows, 1, "grid"), "j": Axis(columns, columns, "whole")}
    kernel = Kernel("k0", (Store("Y", t, (A("i"), A("j"))),), axes, {"i": rows, "j": columns})
    shapes = {"X": (rows, columns), "G": (rows, columns) if own else (columns,), "Y": (rows, columns)}
    return lower(kernel, {n: Buffer(n, s, "bfloat16", "output" if n == "Y" else "input") for n, s in shapes.items()})


def test_what_all_blocks_read_stays_in_the_first_level_cache() -> None:
    """Measured on layernorm, 8192 × 8192: gain and bias, read by each row anew, cost 1 µs of 68."""
    program, own = norm(8192, 8192), norm(8192, 8192, own=True)
    block = [Block(p, s := sizes(p), W.steps(p, s)[0], W.blocks(p, s), H200) for p in (program, own, norm(1, 8192, own=True))]
    assert [float(b.common[0]) for b in block] == [2 * 8192, 0, 2 * 8192]  # one row: nothing differs between blocks
    cached, none = (Roofline(replace(H200, l1=n)).cost(program, sizes(program), detail=True) for n in (128 * 1024, 0))
    assert cached.seconds[0] < 0.95 * none.seconds[0]
    bytes_l2 = 2 * 2 * 8192 * 8192
    assert cached.parts["l2"][0] == pytest.approx(bytes_l2 / H200.l2, rel=0.02)
    assert none.parts["l2"][0] == pytest.approx(1.5 * bytes_l2 / H200.l2, rel=0.02)


def test_few_warps_do_not_keep_a_multiprocessor_at_work() -> None:
    """Measured on layernorm, 8192 × 8192: two blocks of 4 warps, with two rows each, 81.3 µs; two of 8 warps 69.7; four of 4, with a row
    each, 68.5."""
    case = CASES["layernorm"]
    kernel = optimize(trace(case.function("full"), *case.specs("full", dtype="bfloat16", **dict.fromkeys(case.full, 8192))), "cuda:sm_90a")
    (k,) = kernel.plan.kernels
    assert k.cost is not None and float(k.cost.detail["resident"]) * int(k.choices["warps"]) >= 16
    assert 60e-6 < k.cost.seconds < 75e-6


def chain(steps: int, n: int = 32) -> TileProgram:
    """Powers of a matrix, one from the other, in one block."""
    matrix = lambda a, b: T.inp("A", (A(a), A(b)))  # noqa: E731
    t, axes = matrix("i", "k0"), {"i": Axis(n, n, "whole")} | {f"k{s}": Axis(n, n, "whole") for s in range(steps + 1)}
    for s in range(steps):
        t = T.red("+", f"k{s}", T.mul(t, matrix(f"k{s}", f"k{s + 1}")))
    kernel = Kernel("k0", (Store("C", t, (A("i"), A(f"k{steps}"))),), axes, {a: x.extent for a, x in axes.items()})
    return lower(kernel, {x: Buffer(x, (n, n), "float32", "input" if x == "A" else "output") for x in "AC"})


def test_products_of_a_chain_wait_for_each_other() -> None:
    """Fitted to chains of small products: 0.6 µs for one that sums 32 elements, 2.3 times as much where there are more than 24; what starts
    and ends a kernel has a few in it."""
    few, some, many = (seconds(model_for("cuda:sm_90a"), chain(n)) for n in (4, 20, 30))
    assert 0.4e-6 < (some - few) / 16 < 0.7e-6
    assert (many - few) / 26 > 1.2e-6


def test_the_second_level_cache_serves_few_multiprocessors_faster() -> None:
    """Measured (16 rows, two weights of 4096 × 4096): 64 blocks of 64 columns 23.9 µs, 128 of 32 columns 26.2."""
    program = product(16, 4096, 4096)
    few, all_ = (H.cost(program, sizes(program, m=16, n=n, k=256), detail=True) for n in (64, 32))
    each = [16 * 4096 * 2 + 4096 * n * 2 for n in (64, 32)]
    rate = [e / float(x.parts["l2"][0]) for e, x in zip(each, (few, all_))]
    assert 1.1 < rate[0] / rate[1] < 2.0


def test_copies_of_whole_boxes_share_no_lines() -> None:
    """A pipeline's copies of 32 columns come as fast as those of 64; loads do not."""
    program = product(64, 4096, 4096)
    at = sizes(program, m=64, n=32, k=128)
    parts = H.cost(program, at, detail=True)
    assert parts.choices["warpgroups"][0] == 1
    loads = Roofline(H200, plain=True).cost(program, at, detail=True)
    assert loads.parts["dram"][0] > 1.2 * parts.parts["dram"][0]


def test_a_tile_that_is_waited_for_as_one_is_not_under_way_all_the_time() -> None:
    one, block, flight = np.ones(1), np.full(1, 96.0), np.full(1, 49152.0)
    whole, parts = (float(H._per_byte(block, H200.sms * one, flight, np.full(1, piece), one)[0]) for piece in (49152.0, 0.0))
    assert whole > 1.3 * parts


def test_faster_memory_helps_only_what_waits_for_it() -> None:
    fast = Roofline(replace(H200, dram=2 * H200.dram))
    assert best(fast, copy(8192, 8192))[0] < 0.75 * best(H, copy(8192, 8192))[0]
    assert best(fast, product(8192, 8192, 8192))[0] > 0.95 * best(H, product(8192, 8192, 8192))[0]


@pytest.mark.parametrize("model", [H, HostModel(Cpu("two cores", 2))], ids=["gpu", "cpu"])
def test_floor_is_below_every_price(model: CostModel) -> None:
    for program, w in [
        (attention(1024), Work(tensor=4.0 * 1024**2 * 128 * 32, special=32.0 * 1024**2, bytes=4.0 * 2 * 32 * 1024 * 128)),
        (copy(4096, 4096), Work(ops=4096.0**2, bytes=2.0 * 4 * 4096**2)),
        (product(1024, 1024, 1024), Work(tensor=2.0 * 1024**3, bytes=3.0 * 2 * 1024**2)),
    ]:
        assert model.floor(w) <= best(model, program)[0]


@pytest.mark.parametrize("model", [H, HostModel(Cpu("two cores", 2))], ids=["gpu", "cpu"])
def test_names_do_not_matter(model: CostModel) -> None:
    a, b = attention(1000, names="hqdek"), attention(1000, names="zyxwa")
    tiles = {"q": 64, "k": 64}
    assert seconds(model, a, **tiles) == seconds(model, b, **{"y": 64, "a": 64})


# ------------------------------------------------------------------------------------------------------------ CPU


def test_cpu_prefers_large_tiles() -> None:
    m = HostModel(Cpu("two cores", 2))
    p = attention(1024, 64, 8, dtype="float32")
    small, large = seconds(m, p, q=64, k=64, d=64, e=64), seconds(m, p, q=256, k=256, d=64, e=64)
    assert large < 0.8 * small


def test_cpu_blocks_stay_small() -> None:
    """Fused attention at n = 16384 holds far less than its inputs and outputs."""
    m = HostModel(Cpu("two cores", 2))
    p = attention(16384, 64, 1, dtype="float32")
    _, tile = best(m, p)
    s = m.cost(p, sizes(p, **tile), detail=True)
    assert 2 * s.detail["bytes"][0] < 4 * 16384 * 64 * 4
    assert np.isinf(seconds(m, p, q=16384, k=16384, d=64, e=64, h=1))


def test_cpu_uses_its_cores() -> None:
    p = attention(1024, 64, 8, dtype="float32")
    one, four = (best(HostModel(Cpu("", n)), p)[0] for n in (1, 4))
    assert 3.0 < one / four < 4.5
