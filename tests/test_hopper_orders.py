"""In which order blocks of a pipeline take tiles: how long tiles are, and which order that asks for."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.arch import cuda_arch
from eqsat_neptune.codegen.cuda.emit import emit, schedule_of
from eqsat_neptune.codegen.hopper.choices import choices_of
from eqsat_neptune.codegen.hopper.orders import COUNTER, DRIFT, END, lengths, makespan, makespans, starts
from eqsat_neptune.codegen.hopper.pipeline import Pipeline
from eqsat_neptune.codegen.lower import lower
from test_hopper import attention, planned

import eqsat_neptune as en

SM90 = cuda_arch("sm_90a")


def pipeline(program: en.Program, tiles: dict[str, int], warpgroups: int = 2, **choices: object) -> tuple[Pipeline, str]:
    plan = planned(program, tiles, warpgroups=warpgroups, **choices)
    p = lower(plan.kernels[0], plan.buffers, plan.compute_dtype)
    pipe = schedule_of(p, plan.buffers, SM90)
    assert isinstance(pipe, Pipeline)
    return pipe, emit([p], plan.buffers, SM90).text.split("\nKERNEL(")[-1]


@pytest.mark.parametrize(
    ("case", "n", "window"), [("prefill_causal", 1024, None), ("prefill_causal", 1000, None), ("prefill_windowed", 8192, 4096)]
)
def test_lengths(case: str, n: int, window: int | None) -> None:
    """As counted from the mask, key block by key block; and the longest come first."""
    shapes = [(1, 4, n, 64)] * 3 if window is None else [(1, 4, n, 64), (1, 2, n, 64), (1, 2, n, 64)]
    tiles = {"a1": 128, "a3": 128} if window is None else {"a1": 1, "a2": 128, "a4": 128}
    pipe, _ = pipeline(attention(case, *shapes), tiles)
    p, (rows, keys) = pipe.schedule.program, ("a1", "a3") if window is None else ("a2", "a4")
    assert pipe.loop.axis == keys
    got, start = lengths(p, pipe.loop, pipe.traversal), starts(p, pipe.traversal)
    assert len(got) == pipe.tiles == len(set(zip(*(x.tolist() for x in start.values()), strict=True)))
    for q, length in zip(start[rows].tolist(), got.tolist(), strict=True):
        ahead = np.arange(q, q + 128)[:, None] - np.arange(n)  # of how many places each row is past each key
        live = np.flatnonzero(((ahead >= 0) & (ahead < (window or n + 128))).any(0))
        assert length == live[-1] // 128 - live[0] // 128 + 1
    assert got[0] == got.max() and got[-1] == got.min()


def brute(order: str, tiles: list[int], blocks: int) -> float:
    ends = [0.0] * blocks
    for n, x in enumerate(tiles):
        row, place = divmod(n, blocks)
        ends[blocks - 1 - place if order == "folded" and row % 2 else place] += x + END
    return max(ends) * (1 + DRIFT)


def test_makespans() -> None:
    rng = np.random.default_rng(0)
    for blocks, n in product((3, 132), (1, 7, 400)):
        tiles = rng.integers(1, 30, n).tolist()
        for order in ("static", "folded"):
            assert makespan(order, tiles, blocks) == pytest.approx(brute(order, tiles, blocks))
        least = max((sum(tiles) + END * n) / blocks, max(tiles) + END)
        assert least + COUNTER <= makespan("dynamic", tiles, blocks) + 1e-9 <= least + max(tiles) + END + COUNTER + 1e-9
    assert makespan("dynamic", [9, 1, 1, 1, 1, 1], 2) == pytest.approx(5 + 5 * END + COUNTER)


def test_who_asks_late_gets_what_balances() -> None:
    """If blocks asked at the start of a tile for the next, as many as there are would be dealt out before any has ended."""
    tiles = np.repeat(np.arange(8, 0, -1), 32)
    assert makespan("dynamic", tiles, 132, 2) < 12 < 14 < makespan("dynamic", tiles, 132, 100)


def test_order_comes_from_the_lengths() -> None:
    short = np.repeat(np.arange(8, 0, -1), 32)  # two tiles a block: to and fro is as good as a counter, without one
    assert min(makespans(short, 132, 3).items(), key=lambda x: x[1])[0] == "folded"
    assert min(makespans(np.repeat(np.arange(128, 0, -1), 32), 132, 3).items(), key=lambda x: x[1])[0] == "dynamic"
    assert set(makespans(short[:100], 132, 3)) == {"static"}
    for n, order in ((512, "static"), (1024, "folded"), (4096, "dynamic")):
        pipe, text = pipeline(attention("prefill_causal", *[(1, 32, n, 128)] * 3), {"a1": 128, "a3": 128})
        assert pipe.order == order
        assert ("fetch_add(counter, 1)" in text) == (order == "dynamic")
        assert {t.stages for t in pipe.schedule.tiles.values() if t.loop} == {3}


def test_who_has_the_longest_shares_a_multiprocessor_with_who_has_the_shortest() -> None:
    """Two blocks to each, all there from the start: what they take they take of each other's time."""
    short = np.repeat(np.arange(8, 0, -1), 32)
    assert makespans(short, 264, 2, together=2)["folded"] == pytest.approx((9 + 2 * END) * (1 + DRIFT))  # 8 + 1, 7 + 2, …
    assert makespans(short, 264, 2, together=2)["static"] == pytest.approx((12 + 2 * END) * (1 + DRIFT))  # 8 + 4, …
    assert set(makespans(short[:132], 264, 2, together=2)) == {"static"}
    program, tiles = attention("prefill_causal", *[(1, 32, 512, 128)] * 3), {"a1": 64, "a3": 64}
    pipe, text = pipeline(program, tiles, warpgroups=1, together=2)
    assert pipe.order == "folded" and pipe.works == pipe.workers == 256
    taken = [b if b < 132 else 387 - b for b in range(256)]
    assert sorted(taken) == list(range(256))
    assert "int work = (int)block_index() < 132 ? (int)block_index() : 387 - (int)block_index();" in text
    apart, text = pipeline(program, tiles, warpgroups=1, together=2, order="static")
    assert apart.order == "static" and "int work = (int)block_index();" in text
    plain = pipeline(attention("prefill_global", *[(1, 32, 512, 128)] * 3), tiles, warpgroups=1, together=2)[0]
    assert plain.order == "static", "all are as long"


@pytest.mark.parametrize(("n", "ahead"), [(512, False), (1024, True)])
def test_no_tiles_come_ahead_where_no_work_follows(n: int, ahead: bool) -> None:
    pipe, _ = pipeline(attention("prefill_causal", *[(1, 32, n, 128)] * 3), {"a1": 128, "a3": 64}, stages=2)
    assert choices_of(pipe)["ahead"] == ahead


def test_the_counter_is_asked_beside_the_last_copies() -> None:
    _, text = pipeline(attention("prefill_causal", *[(1, 32, 4096, 128)] * 3), {"a1": 128, "a3": 128})
    produce = text[text.index("for (;;)") :]
    ask, loop, late = produce.index("fetch_add(counter, 1)"), produce.index("for (int a3_tile"), produce.rindex("v_map")
    assert loop < ask < late
    assert "if (a3_tile == a3_first) next = " in produce


def test_producers_do_not_wait_for_the_block() -> None:
    _, text = pipeline(attention("prefill_causal", *[(1, 32, 512, 128)] * 3), {"a1": 128, "a3": 128})
    assert "block_sync()" not in text
    assert text.index("named_arrive(5, 384)") < text.index("copy_box(") < text.index("named_sync(5, 384)")


def test_late_products_in_two_parts() -> None:
    """The second part lies between the work on scores and the exponentials, and nothing touches registers under way before it."""
    program, tiles = attention("prefill_causal", *[(1, 4, 512, 128)] * 3), {"a1": 128, "a3": 128}
    pipe, text = pipeline(program, tiles, peek=True, split=3)
    assert pipe.split == 3
    assert text.count("multiply_part<3, 8>") == text.count("multiply_part<0, 3>") == 2
    before = text[: text.index("multiply_part<3, 8>")].rsplit("if constexpr (!start) {", 1)[1]
    assert "pin(t9_a1_a3)" in before and "operand)" not in before and "t27" not in before
    after = text.split("multiply_part<3, 8>")[1]
    assert after.index("products_commit") < after.index("exp2_fast(t9") < after.index("products_wait<0>()")
    assert pipeline(program, tiles, split=3)[0].split == 0, "it needs the work that comes behind it to be beside late products"
