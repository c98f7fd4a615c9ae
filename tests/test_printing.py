"""The search knows what the code generator prints: prices are those of the kernels that run (extraction/printing.py)."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.arch import cuda_arch
from eqsat_neptune.codegen.cuda.emit import refusal, schedule_of
from eqsat_neptune.codegen.cuda.simple import Simple
from eqsat_neptune.codegen.hip.arch import hip_arch
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.tile import Contract, TileProgram, walk
from eqsat_neptune.cost_models import Refusal, Scores, Sizes, machine_for, model_for
from eqsat_neptune.cost_models.by_element import ByElement
from eqsat_neptune.cost_models.roofline import Roofline
from eqsat_neptune.extraction.extract import extract
from eqsat_neptune.extraction.kernels import Scored
from eqsat_neptune.extraction.plan import Axis, Kernel, Plan
from eqsat_neptune.extraction.printing import Printing

import eqsat_neptune as en
from eqsat_neptune import compiler, egraph
from eqsat_neptune.programs import CASES
from eqsat_neptune.targets import Target, parse_target

GPU = "cuda:sm_90a"


@functools.cache
def kernel(name: str, target: str, dtype: str | None = None, numerics: str = "safe", **extents: int) -> en.Kernel:
    case = CASES[name]
    return en.optimize(en.trace(case.function("full"), *case.specs("full", dtype, **extents)), target, numerics=numerics)


@functools.cache
def believing(name: str, **extents: int) -> list[Plan]:
    """Plans of a search that takes every kernel for printed as it is priced, the best one first."""
    case, target, model = CASES[name], parse_target(GPU), Roofline(machine_for(GPU))
    p = en.trace(case.function("full"), *case.specs("full", **extents))
    found = egraph.saturate(p, splittable=compiler.splittable(p, target), joins=compiler.joins(p, model))
    extracted = extract(found.graph, p, model)
    return [extracted.plan, *(c.plan for c in extracted.candidates)]


def tiles(k: Kernel, p: Plan) -> TileProgram:
    return lower(k, p.buffers, p.compute_dtype)


def sizes(k: Kernel) -> Sizes:
    return Sizes(*({a: np.array([float(getattr(x, f))]) for a, x in k.axes.items()} for f in ("tile", "extent")))


def arch(target: Target):  # type: ignore[no-untyped-def]
    return cuda_arch(target.arch) if target.kind == "cuda" else hip_arch(target.arch)


def slow(p: Plan, target: str = GPU) -> list[Kernel]:
    """Kernels with products whose elements go to a thread each."""
    made = [(k, tiles(k, p)) for k in p.kernels]
    return [
        k
        for k, x in made
        if any(isinstance(s, Contract) for s in walk(x.body))
        and isinstance(schedule_of(x, p.buffers, arch(parse_target(target))), Simple)
    ]


@pytest.mark.parametrize(
    "name, target, extents",
    [
        ("performer", GPU, {"n": 4096}),
        ("linear_attention", GPU, {}),
        ("linear_attention", "hip:gfx1100", {}),
        ("kernel_sum", GPU, {}),
        ("kmeans_assign", "hip:gfx942", {}),
        ("layers2", "hip:gfx942", {}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_products_do_not_go_one_element_to_a_thread(name: str, target: str, extents: dict[str, int]) -> None:
    """Believing the price of tiles, the search took kernels for these that cannot be laid out, and take a hundred times as long."""
    assert not slow(kernel(name, target, **extents).plan, target)


def test_a_kernel_by_element_takes_what_was_measured() -> None:
    """Two kernels of matrix products, the second of which merges parts in its loop: 2,986 µs on an H200."""
    p = next(p for p in believing("performer", n=4096) if len(p.kernels) == 2)
    (k,) = slow(p)
    took = ByElement(machine_for(GPU)).cost(tiles(k, p), sizes(k)).seconds[0] + sum(
        x.cost.seconds for x in p.kernels if x is not k and x.cost
    )
    assert 0.8 < took / 2986e-6 < 1.25 and k.cost is not None and k.cost.seconds < took / 100


def test_prices_are_those_of_what_is_printed() -> None:
    """A reduction over one position of three axes at a time has no layout, and its price is by element where it must be one."""
    k = kernel("linear_attention", GPU)
    for x in k.plan.kernels:
        assert x.cost is not None and refusal(tiles(x, k.plan), k.plan.buffers, cuda_arch("sm_90a")) is None
        again = model_for(GPU).cost(tiles(x, k.plan), sizes(x)).seconds[0]
        assert again == pytest.approx(x.cost.seconds)


def test_short_axes_are_gone_through_one_by_one_where_tiles_have_no_room_for_them() -> None:
    """Parts of a sum, in the kernel that multiplies with it: tiles of (part, row, column) fit neither rows nor columns."""
    p = kernel("linear_attention", GPU, "float16", "fast").plan
    (k,) = [x for x in p.kernels if "a3.o" in x.axes and x.axes["a3.o"].role == "loop"]
    assert k.axes["a3.o"].tile == 1 and refusal(tiles(k, p), p.buffers, cuda_arch("sm_90a")) is None
    n = k.axes["a3.o"].extent
    whole = replace(k, axes=k.axes | {"a3.o": Axis(n, n, "whole")})
    assert refusal(tiles(whole, p), p.buffers, cuda_arch("sm_90a")) is not None


def test_refusals_say_whether_smaller_tiles_would_do() -> None:
    p = kernel("linear_attention", GPU, "float16", "fast").plan
    k = next(x for x in p.kernels if x.axes.get("a3.o", Axis(1, 1, "")).role == "grid")
    large = {"a2": replace(k.axes["a2"], tile=k.axes["a2"].extent), "a3.i": replace(k.axes["a3.i"], tile=1024)}
    many = replace(k, axes=k.axes | large, choices={})  # no pipeline
    why = refusal(tiles(many, p), p.buffers, cuda_arch("sm_90a"))
    assert why is not None and why.smaller and ("registers" in why.reason or "shared memory" in why.reason)
    joined = next(x for x in p.kernels if x.axes.get("a3.o", Axis(1, 1, "")).role == "loop")
    n = joined.axes["a3.o"].extent
    why = refusal(tiles(replace(joined, axes=joined.axes | {"a3.o": Axis(n, n, "whole")}), p), p.buffers, cuda_arch("sm_90a"))
    assert why is not None and not why.smaller and "merged" in why.reason


@pytest.mark.parametrize(
    "tile, rows, why",
    [
        (256, 128, "bytes of shared memory"),
        (128, 192, "registers"),
        (512, 128, "a result of 128 × 512"),
        (64, 256, "256 rows"),
    ],
)
def test_pipelines_of_smaller_tiles_are_not_refused_with_larger_ones(tile: int, rows: int, why: str) -> None:
    """What is refused whatever the tiles are is taken for refused at all of them (`Printing.known`)."""
    p = kernel("prefill_global", GPU, n=2048, d=256).plan
    (k,) = p.kernels
    (loop,) = (a for a, x in k.axes.items() if x.role == "loop")
    row = next(a for a, x in k.axes.items() if x.role == "grid" and x.tile == 128)

    def at(tile: int, rows: int) -> Refusal | None:
        axes = k.axes | {loop: replace(k.axes[loop], tile=tile), row: replace(k.axes[row], tile=rows)}
        return refusal(tiles(replace(k, axes=axes, choices={"warpgroups": rows // 64}), p), p.buffers, cuda_arch("sm_90a"))

    refused = at(tile, rows)
    assert refused is not None and why in refused.reason and refused.smaller
    assert at(64, 128) is None


@pytest.mark.parametrize("name, target", [("kernel_regression", GPU), ("kernel_regression", "hip:gfx942")])
def test_what_is_torn_stays_so_with_more(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator, where it is not asked, would say the same."""
    asked, told = [], []

    class Doubting(Printing):
        def refusal(self, k: Scored, point: int, choices: dict[str, object]) -> Refusal | None:
            before = self.asked
            why = super().refusal(k, point, choices)
            (asked if self.asked > before else told).append(why)
            if why is not None and self.asked == before:
                one = k.one(point)
                sizes = {a: int(v[0]) for a, v in one.extent.items()}
                axes = {a: Axis(sizes[a], int(one.tile[a][0]), role) for a, role in k.roles.items()}
                said = self._ask(k, axes, sizes, choices)
                self.asked = before
                assert said is not None and said.smaller == why.smaller, k.program
            return why

    monkeypatch.setattr("eqsat_neptune.extraction.search.Printing", Doubting)
    case, model = CASES[name], model_for(target)
    p = en.trace(case.function("full"), *case.specs("full"))
    parsed = parse_target(target)
    found = egraph.saturate(p, splittable=compiler.splittable(p, parsed), joins=compiler.joins(p, model))
    extract(found.graph, p, model)
    assert sum(why is not None and why.torn for why in told) >= 20
    assert len(asked) <= 50  # 102 of kernel regression, were each kernel to be asked for


@pytest.mark.parametrize("name, extents", [("gated_mlp", {}), ("gqa_plain", {})], ids=["products", "parts"])
def test_a_generator_that_lays_out_nothing_has_prices_by_element(name: str, extents: dict[str, int]) -> None:
    """Every kernel of the plan, whatever it was believed to take: as far as it matters."""
    case, target = CASES[name], parse_target(GPU)
    model = Roofline(machine_for(GPU), printed=lambda program, buffers: Refusal("never", False))
    p = en.trace(case.function("full"), *case.specs("full", **extents))
    saturated = egraph.saturate(p, splittable=compiler.splittable(p, target), joins=compiler.joins(p, model))
    found = extract(saturated.graph, p, model)
    assert found.stats["asked"]
    took = sum(float(model.by_element.cost(tiles(k, found.plan), sizes(k)).seconds[0]) for k in found.plan.kernels)
    assert found.plan.cost.seconds <= took <= 1.04 * found.plan.cost.seconds
    assert took > 2 * kernel(name, GPU, **extents).cost.seconds


def test_what_nothing_else_has_room_for_goes_by_element() -> None:
    """A pipeline that is refused, where the general lowering has no tiles at all."""

    class Pipelines(Roofline):
        def cost(self, program: TileProgram, sizes: Sizes, detail: bool = False) -> Scores:
            scores = super().cost(program, sizes, detail)
            return replace(scores, seconds=np.where(scores.choices.get("warpgroups", 0) > 0, scores.seconds, np.inf))

    def never(program: TileProgram, buffers: object) -> Refusal:
        return Refusal("never", False)

    model = Pipelines(machine_for(GPU), printed=never)
    model.__dict__["without_pipelines"] = Pipelines(machine_for(GPU), plain=True, printed=never)
    p = en.trace(lambda x, w: x @ w, *[en.TensorSpec((2048, 2048), "bfloat16")] * 2)
    found = extract(egraph.saturate(p, splittable=()).graph, p, model)
    (only,) = found.plan.kernels
    took = model.by_element.cost(tiles(only, found.plan), sizes(only)).seconds[0]
    assert np.isfinite(took) and found.plan.cost.seconds == pytest.approx(float(took))
