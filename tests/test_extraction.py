"""Extraction: legality, plans that are well formed and right, exhaustive search on small graphs, names, layers, limits."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from eager_models import Eager, ManyCores
from eqsat_neptune.codegen.check import check
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.cost_models import CostModel, model_for
from eqsat_neptune.cost_models.machines import H200
from eqsat_neptune.cost_models.roofline import Roofline
from eqsat_neptune.extraction import kernels as K
from eqsat_neptune.extraction.bodies import Bodies, State
from eqsat_neptune.extraction.build import Builder
from eqsat_neptune.extraction.classes import Classes
from eqsat_neptune.extraction.extract import Extraction, extract
from eqsat_neptune.extraction.legality import legal_nodes, usable
from eqsat_neptune.extraction.plan import Plan
from eqsat_neptune.extraction.prices import bits
from eqsat_neptune.extraction.region import Region, canonical
from eqsat_neptune.extraction.regions import Cone, Pieces, forced_cuts, regions
from eqsat_neptune.extraction.search import Limits, Search

import eqsat_neptune as en
from eqsat_neptune import egraph, xp
from eqsat_neptune.errors import PlanError
from eqsat_neptune.graph import Graph, Node
from eqsat_neptune.program import DTYPES, Program
from eqsat_neptune.programs import CASES, transformer_layers
from eqsat_neptune.runtime.cpu import CpuRunner
from eqsat_neptune.terms import Term, base, postorder
from eqsat_neptune.testing.cases import time_limit

GPU = "cuda:sm_90a"


# ------------------------------------------------------------------------------------------------------------ helpers


@cache
def saturated(name: str, size: str = "full", dtype: str | None = None, least: int = 512, **extents: int) -> tuple[Graph, Program]:
    case = CASES[name]
    program = en.trace(case.function(size), *case.specs(size, dtype, **extents))
    summed = dict.fromkeys(t.attr[1] for t in postorder(o.term for o in program.outputs) if t.op == "red")  # type: ignore[index]
    return egraph.saturate(program, splittable=[a for a in summed if program.axes[a] >= least]).graph, program


@cache
def extraction(name: str, target: str = GPU, **options: Any) -> Extraction:
    return extract(*saturated(name, **options), model_for(target))


def graph_of(fn: Callable[..., Any], *specs: en.TensorSpec) -> tuple[Graph, Program]:
    program = en.trace(fn, *specs)
    return egraph.saturate(program).graph, program


def well_formed(plan: Plan, program: Program) -> None:
    """Every kernel lowers to a checked tile program; what is read was written before; every output is written once."""
    written = {i.name for i in program.inputs}
    for k in plan.kernels:
        p = check(lower(k, plan.buffers, plan.compute_dtype))
        assert {b.name for b in p.reads} <= written, f"{k.name} reads what nobody has written"
        stores = [s.buffer for s in k.stores]
        assert len(stores) == len(set(stores)) and not written & set(stores)
        written |= set(stores)
        assert k.cost is not None and k.cost.seconds > 0 and k.cost.bound in k.cost.parts
        for a, x in k.axes.items():
            assert x.role in ("grid", "loop", "whole") and 1 <= x.tile <= max(x.extent, 1)
            assert x.role != "whole" or x.tile == x.extent
            assert not a.endswith(".i") or x.extent % x.tile == 0
    assert {f"out{i}" for i in range(len(program.outputs))} <= written
    for b in plan.buffers.values():
        assert b.kind != "temp" or (len(b.axes) == len(b.shape) and b.dtype in DTYPES)


def close(plan: Plan, program: Program, arrays: list[np.ndarray], tolerance: float = 2e-6) -> None:
    got = CpuRunner(program, plan)(arrays, None)
    want = en.evaluate(program, *arrays)
    for g, w in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        assert np.linalg.norm(np.asarray(g, float) - w) <= tolerance * max(np.linalg.norm(w), 1e-30)


def inside(plan: Plan) -> Iterator[Term]:
    return postorder(s.term for k in plan.kernels for s in k.stores)


def temps(plan: Plan) -> list[int]:
    return [b.size for b in plan.buffers.values() if b.kind == "temp"]


# ------------------------------------------------------------------------------------------------ plans that are right

FAST = ["decode_softcap", "lora", "ntrans", "rope_attention", "attention_dkv", "rmsnorm_quantize", "top2_gating"]
SLOW = [
    "prefill_causal", "decode_gqa", "qknorm", "rmsnorm_linear", "layernorm_linear", "attention_dq", "attention_backward", "layers1",
    "layers2", "cross_entropy", "swiglu_linear", "performer", "retention", "sink_attention", "kmeans_assign", "decision_trees",
]  # fmt: skip


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
@pytest.mark.parametrize(
    "model", [Eager(), Eager(shared_block=3000, shared_sm=3000, registers=4096), ManyCores()], ids=["gpu", "tiny", "cpu"]
)
def test_plans_of_many_kernels_are_right(name: str, model: CostModel) -> None:
    """The chosen plan and every one that lost, on machines that make small programs fall apart: split, several outputs, streamed rows."""
    graph, program = saturated(name, "small", least=16)
    found = extract(graph, program, model)
    arrays = CASES[name].inputs("small", np.random.default_rng(3))
    for plan in (found.plan, *(c.plan for c in found.candidates[:4])):
        well_formed(plan, program)
        close(plan, program, arrays)


@pytest.mark.parametrize(
    "name", ["prefill_global", "decode_causal", "attention_dq", "layers1", "rmsnorm_diamond", "kmeans_assign"]
)
@pytest.mark.parametrize("target", [GPU, "cpu"])
def test_full_size_plans_are_well_formed(name: str, target: str) -> None:
    found = extraction(name, target)
    well_formed(found.plan, saturated(name)[1])
    assert found.plan.cost.seconds > 0 and len(found.form) == len(saturated(name)[1].outputs)


def test_candidates_are_sorted_and_have_plans() -> None:
    found = extraction("attention_dkv")
    times = [c.seconds for c in found.candidates]
    assert times and times == sorted(times)
    for c in found.candidates:
        well_formed(c.plan, saturated("attention_dkv")[1])
        assert c.kernels == len(c.plan.kernels) and c.form and math.isclose(c.seconds, c.plan.cost.seconds, rel_tol=1e-6)


def test_chosen_nodes_are_those_of_the_graph() -> None:
    found, (graph, _) = extraction("prefill_causal"), saturated("prefill_causal")
    assert found.chosen and all(n in graph.nodes[c] for c, ns in found.chosen.items() for n in ns)


# ------------------------------------------------------------------------------------------------ unusual programs

S = en.TensorSpec


@pytest.mark.parametrize("model", [Eager(), ManyCores(), model_for("cpu")], ids=["gpu", "many", "cpu"])
@pytest.mark.parametrize(
    "fn, shapes",
    [
        (lambda x: x, [(3, 4)]),
        (lambda x: (x, x), [(3, 4)]),
        (lambda x: xp.flip(x, axis=-1), [(3, 4)]),
        (lambda x: (xp.sum(x, axis=-1), xp.sum(x, axis=-1) + 1), [(5, 7)]),
        (lambda x: xp.sum(x), [(5, 7)]),
        (lambda x: xp.zeros((2, 3)) + 1, [(1,)]),
        (lambda x: xp.sum(x, axis=0), [(0, 4)]),
        (lambda x: (lambda s: s + xp.permute_dims(s, (1, 0)))(x @ x.mT), [(5, 7)]),
        (lambda x: (lambda s: s[:, :3] * s[:, 2:])(xp.exp(x) @ x.mT), [(5, 4)]),
        (lambda x, y: xp.broadcast_to(xp.max(x @ y, axis=-1, keepdims=True), (6, 5)), [(6, 3), (3, 4)]),
    ],
    ids=["input", "twice", "flipped", "shared", "scalar", "constant", "empty", "transposed", "sliced", "broadcast"],
)
def test_unusual_outputs(fn: Callable[..., Any], shapes: list[tuple[int, ...]], model: CostModel) -> None:
    graph, program = graph_of(fn, *(S(s, "float32") for s in shapes))
    found = extract(graph, program, model)
    rng = np.random.default_rng(0)
    well_formed(found.plan, program)
    close(found.plan, program, [rng.standard_normal(s).astype(np.float32) for s in shapes])


# ------------------------------------------------------------------------------------------------ exhaustive search


def every_body(b: Bodies, root: int, most: int = 4000) -> list[State]:
    """Every acyclic choice of an option for each class that the root needs, cutting wherever a class may be stored."""
    out: list[State] = []

    def go(todo: tuple[int, ...], chosen: dict[int, int | None]) -> None:
        todo = tuple(c for c in todo if c not in chosen)
        if not todo:
            if not cyclic(chosen):
                out.append(state(chosen))
                assert len(out) < most
            return
        c, rest = todo[0], todo[1:]
        if c != root and b.r.read[c] and b.r.stored(c) is None:
            go(rest, chosen | {c: None})
        for i, o in enumerate(b.options[c]):
            go(rest + o.children, chosen | {c: i})

    def kids(c: int, chosen: dict[int, int | None]) -> tuple[int, ...]:
        i = chosen[c]
        return () if i is None else b.options[c][i].children

    def cyclic(chosen: dict[int, int | None]) -> bool:
        done: set[int] = set()

        def visit(c: int, open_: frozenset[int]) -> bool:
            if c in open_:
                return True
            if c in done:
                return False
            bad = any(visit(x, open_ | {c}) for x in kids(c, chosen))
            done.add(c)
            return bad

        return visit(root, frozenset())

    def state(chosen: dict[int, int | None]) -> State:
        s = State(0.0, 0, 0, 0, 0, 0, 1.0, (0.0,) * 4)
        for c, i in chosen.items():
            s.classes |= 1 << c
            s.chosen |= 1 << (b.offset[c] + (len(b.options[c]) if i is None else i))
            if i is None:
                s.leaves |= 1 << c
            elif b.options[c][i].leaf >= 0:
                s.leaves |= 1 << b.options[c][i].leaf
        return s

    go((root,), {})
    return out


def exhaustive(region: Region, model: CostModel) -> float:
    """Cheapest plan of a region without splits, over all bodies, cuts, roles and tiles, one root a kernel."""
    search = Search(region, model, Limits())
    bodies = search._view(None)
    best: dict[int, dict[frozenset[int], float]] = {}

    def kernels(c: int) -> dict[frozenset[int], float]:
        if c not in best:
            best[c] = {}
            for s in every_body(bodies, c):
                leaves = frozenset(bits(s.leaves))
                for k in search.pricer.price((c,), bodies, s, None):
                    best[c][leaves] = min(best[c].get(leaves, math.inf), float(k.seconds.min()))
        return best[c]

    memo: dict[frozenset[int], float] = {frozenset(): 0.0}

    def solve(wanted: frozenset[int], open_: frozenset[frozenset[int]]) -> float:
        if wanted not in memo:
            if wanted in open_:
                return math.inf
            last = max(wanted, key=lambda c: region.rank[c])
            rows = [(t, (wanted - {last}) | leaves) for leaves, t in kernels(last).items() if last not in leaves]
            memo[wanted] = min((t + solve(rest, open_ | {wanted}) for t, rest in rows), default=math.inf)
        return memo[wanted]

    return solve(frozenset(region.roots), frozenset())


def regions_of(graph: Graph, program: Program, model: CostModel) -> list[Region]:
    cl = Classes(graph, program, legal_nodes(graph, program.compute_dtype, None))
    build = Builder(cl, model)
    out = []
    for cone in regions(cl, forced_cuts(cl, model)):
        out.append(canonical(cl, cone, build.stored)[0])
    return out


@pytest.mark.parametrize("model", [Roofline(H200), model_for("cpu")], ids=["gpu", "cpu"])  # whatever can be printed
@pytest.mark.parametrize(
    "name, extents",
    [
        ("softmax", {}), ("log_softmax", {}), ("logsumexp", {}), ("variance", {}), ("l2_normalize", {}), ("lora", {}), ("gated_mlp", {}),
        ("gated_mlp", {"n": 512}), ("matmul_chain", {}), ("rmsnorm_linear", {}), ("rmsnorm_linear", {"b": 512}), ("swiglu_linear", {}),
        ("kernel_sum", {}), pytest.param("gqa_plain", {}, marks=pytest.mark.slow),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)  # fmt: skip
def test_search_finds_what_exhaustive_search_finds(name: str, extents: dict[str, int], model: CostModel) -> None:
    graph, program = saturated(name, least=1 << 30, **extents)
    for region in regions_of(graph, program, model):
        found = Search(region, model, Limits()).run()
        assert found is not None
        cheapest = min(c.seconds for c in (found.best, *found.others))
        assert cheapest <= 1.02 * exhaustive(region, model)


# ------------------------------------------------------------------------------------------------------------ legality


def one(
    f: str, lo: float, hi: float, why: str = "rule", least: float = -math.inf, most: float = math.inf
) -> tuple[Graph, bool]:
    """A graph of f(x) with these bounds of x and of f(x), and whether the node is legal."""
    nodes = {0: [Node("input", ("x", ()))], 1: [Node("un", f, (0,), why)]}
    g = Graph(nodes, {0: frozenset(), 1: frozenset()}, {0: lo, 1: least}, {0: hi, 1: most}, {}, {}, (1,), {})
    return g, 1 in legal_nodes(g, "float32", None)


def test_exp_needs_a_bound_unless_it_is_the_source() -> None:
    assert not one("exp", -math.inf, math.inf)[1] and not one("exp", -math.inf, 100.0)[1]
    assert one("exp", -math.inf, 0.0)[1] and one("exp", -50.0, 50.0)[1]
    assert one("exp", -math.inf, math.inf, why="source")[1]
    assert one("exp2", 0.0, 115.0)[1] and not one("exp2", 0.0, 130.0)[1]


def test_quotients_stay_away_from_zero() -> None:
    for f in ("recip", "log", "rsqrt"):
        assert one(f, 1e-6, math.inf)[1] and not one(f, 0.0, math.inf)[1] and not one(f, -math.inf, math.inf)[1]
    assert one("recip", -5.0, -1.0)[1] and not one("log", -5.0, -1.0)[1]


def test_bounds_of_a_quotient_keep_its_divisor_from_zero() -> None:
    """They may be known where those of the divisor, a fold that a rule has made, are not."""
    unknown = -math.inf, math.inf
    assert one("recip", *unknown, least=0.5, most=1.0)[1] and one("recip", *unknown, least=-3.0, most=1.0)[1]
    assert one("rsqrt", *unknown, most=1.0)[1] and one("log", *unknown, least=-2.0)[1]
    assert not one("recip", *unknown, most=1.0)[1] and not one("recip", *unknown, least=0.0)[1]
    assert not one("rsqrt", *unknown, least=0.0)[1] and not one("log", *unknown, most=2.0)[1]
    assert not one("recip", *unknown, least=0.0, most=1e35)[1]


def test_fast_numerics_relax() -> None:
    g, _ = one("exp", -math.inf, math.inf)
    assert legal_nodes(g, "float32", None, "fast")[1]


def test_what_cannot_overflow_in_the_source_is_not_made_of_what_can() -> None:
    """log Σ exp x of x ≥ 1 needs no maximum, as bounds go, and the source has exp x anyway: but that may be ∞."""

    def program(x):
        e = xp.exp(x)
        return xp.exp(e), xp.logsumexp(e, axis=-1)

    g, _ = graph_of(program, en.TensorSpec((4, 8), "float32"))
    exponential = next(c for c, n in g.items() if n.op == "un" and n.attr == "exp" and n.why == "source" and c == g.outputs[0])
    sums = {c for c, n in g.items() if n.op == "red" and n.attr[0] == "+" and exponential in n.args}

    def reads(nodes) -> bool:
        below, todo = set(), [g.outputs[1]]
        while todo:
            if (c := todo.pop()) not in below:
                below.add(c)
                todo += [a for n in nodes.get(c, ()) for a in n.args]
        return bool(below & sums)

    assert sums and reads(legal_nodes(g, "float32", None, "fast")) and not reads(legal_nodes(g, "float32", None))


def test_no_fold_moves_a_mean_through_an_exponential_that_may_overflow() -> None:
    """A part's mean may lie far above the whole's, which its maximum does not."""

    def folds(program, numerics):
        g, _ = graph_of(program, en.TensorSpec((4, 8), "float32"))
        nodes = legal_nodes(g, "float32", None, numerics).values()
        return [n for ns in nodes for n in ns if n.op == "fold" and any("exp" in str(e) for row in n.attr[0].coef for _, e in row)]

    def centred(x):
        return xp.sum(xp.exp(x - xp.mean(x, axis=-1, keepdims=True)), axis=-1)

    def shifted(x):
        return xp.sum(xp.exp(x - xp.max(x, axis=-1, keepdims=True)), axis=-1)

    assert folds(centred, "fast") and not folds(centred, "safe")
    assert folds(shifted, "fast") and folds(shifted, "safe")


def test_centred_products_stay_centred() -> None:
    """(x − m)·(y − m) is no sum of x·y, x·m and m·m, which cancel where both differences are small; with m an input it may be."""

    def program(reduced: bool) -> Program:
        def f(x: Any, m: Any) -> Any:
            d = x - (xp.min(x, axis=-1, keepdims=True) if reduced else m)
            return d.mT @ d

        return en.trace(f, en.TensorSpec((6, 4)), en.TensorSpec((6, 1)))

    for reduced in (True, False):
        g = egraph.saturate(program(reduced)).graph
        (out,) = g.outputs
        opened = [n for n in g.nodes[out] if n.op == "add"]
        assert opened and bool([n for n in legal_nodes(g, "float32", None)[out] if n.op == "add"]) is not reduced
        assert [n for n in legal_nodes(g, "float32", None, "fast")[out] if n.op == "add"] == opened


def test_no_legal_form_is_an_error() -> None:
    g, _ = one("exp", -math.inf, math.inf)
    program = en.trace(lambda x: xp.exp(x), S((), "float32"))
    with pytest.raises(PlanError, match=r"no legal form of output 0.*fast"):
        extract(g, program, model_for("cpu"))


def test_unusable_nodes_go() -> None:
    nodes = {
        0: [Node("input", ("x", ()))],
        1: [Node("un", "exp", (2,)), Node("un", "neg", (0,))],
        2: [Node("un", "exp", (3,))],
        3: [],
    }
    assert usable(nodes, (1,)) == {0: nodes[0], 1: nodes[1][1:]}  # type: ignore[arg-type]


def test_bounds_follow_the_type_of_the_operand() -> None:
    """exp of a score bounded by ±50 fits bfloat16, not float16: there a running maximum stays."""

    def pivots(dtype: str) -> int:
        graph, program = saturated("prefill_softcap", dtype=dtype)
        return sum(t.op == "fold" for t in inside(extract(graph, program, model_for(GPU)).plan))

    assert pivots("bfloat16") == 0 and pivots("float16") > 0


# ------------------------------------------------------------------------------------------------------ types in memory


@pytest.mark.parametrize("name", ["matmul_chain", "rmsnorm_gain_linear"])
def test_operands_that_the_source_does_not_make_may_overflow_float16(name: str) -> None:
    """B·C of (A·B)·C, x·g of (x·r·g)·w: products read them in 16 bits, and nothing bounds them."""

    def form(dtype: str, numerics: str = "safe") -> tuple[str, ...]:
        case = CASES[name]
        return en.optimize(case.function("full"), GPU, specs=case.specs("full", dtype=dtype), numerics=numerics).form

    def kept(f: tuple[str, ...]) -> bool:
        return "b[a1, a2]·a[a0, a1]" in f[0] if name == "matmul_chain" else "Σ[a1] recip(" in f[0]

    assert kept(form("float16")) and not kept(form("float16", "fast"))


@pytest.mark.parametrize(("bound", "kept"), [(1e-4, True), (1e-3, True), (0.1, False)])
def test_operands_that_the_source_does_not_make_may_vanish_in_float16(bound: float, kept: bool) -> None:
    """B·C of (A·B)·C is the smaller one, but where B and C are known to be small it has few digits, or none."""
    specs = [en.TensorSpec(s, "float16", range=(0, r)) for s, r in (((256, 16), 1e4), ((16, 256), bound), ((256, 16), bound))]
    (form,) = en.optimize(lambda a, b, c: (a @ b) @ c, GPU, specs=specs).form
    assert ("b[a1, a2]·a[a0, a1]" in form) is kept


def test_types_of_intermediates() -> None:
    """16 bits for what feeds products; partial states, statistics of rows and positions keep float32."""
    decode = extraction("decode_gqa", n=65536)
    assert {b.dtype for b in decode.plan.buffers.values() if b.kind == "temp"} == {"float32"}
    layers = extraction("layers1").plan
    multiplied = {
        x.attr[0]
        for k in layers.kernels
        for s in k.stores
        for t in postorder([s.term])
        if t.op == "red" and t.args[0].op == "mul"
        for x in t.args[0].args
        if x.op == "input"
    }
    temps = {b.name: b.dtype for b in layers.buffers.values() if b.kind == "temp"}
    assert {temps[name] for name in multiplied & temps.keys()} == {"bfloat16"}
    cl = Classes(*saturated("kmeans_assign"), legal_nodes(saturated("kmeans_assign")[0], "float32", None))
    assert {cl.dtype(c) for c in cl._positions if c not in cl.outputs} <= {"float32"}


def test_what_only_matrix_units_read_is_stored_as_they_take_it() -> None:
    """A product that a rule has made, and that another product reads: rounded in memory where it would be rounded in a kernel."""

    def chain(x, a, b, exact: bool = False):  # type: ignore[no-untyped-def]
        y = (x @ a) @ b
        return en.xp.astype(y, en.xp.float32) if exact else y

    def temporaries(fn, target: str, dtype: str = "bfloat16", most: float = math.inf, numerics: str = "safe", least: float = 0) -> set[str]:  # type: ignore[no-untyped-def]
        shapes = (8192, 1024), (1024, 4096), (4096, 64)  # a·b is the small one
        program = en.trace(fn, *[en.TensorSpec(s, dtype, range=(least, most)) for s in shapes])
        plan = extract(egraph.saturate(program).graph, program, model_for(target), numerics=numerics).plan
        assert len(plan.kernels) == 2
        return {b.dtype for b in plan.buffers.values() if b.kind == "temp"}

    assert temporaries(chain, "cuda:sm_90a") == {"bfloat16"}
    assert temporaries(chain, "cuda:sm_90a", least=-math.inf) == {"float32"}  # x may take differences of rows of a·b
    assert temporaries(chain, "cuda:sm_90a", least=-math.inf, numerics="fast") == {"bfloat16"}
    assert temporaries(chain, "cuda:sm_90a", "float16", numerics="fast") == {"float32"}  # a sum of 4096 products may not fit
    assert temporaries(chain, "cuda:sm_90a", "float16", 1.0) == {"float16"}
    assert temporaries(chain, "cuda:sm_90a", "float32") == {"float32"}
    assert temporaries(partial(chain, exact=True), "cuda:sm_90a") == {"float32"}  # nothing is rounded on the way there
    assert temporaries(chain, "cpu") == {"float32"}  # no matrix unit rounds there

    plan = extraction("linear_attention", n=16384).plan
    stored = {s.buffer: s.term for k in plan.kernels for s in k.stores}
    kept = {b.name: b.dtype for b in plan.buffers.values() if b.kind == "temp"}
    narrow = {name for name in kept if len(stored[name].free) == 3 and not any("." in a for a in stored[name].free)}
    assert {name for name, dtype in kept.items() if dtype == "bfloat16"} == narrow  # no parts of it, nor the sum that divides
    assert len(narrow) == 1 and len(kept) == 4


# ------------------------------------------------------------------------------------------------ names, determinism


def test_names_change_nothing_but_names() -> None:
    case = CASES["attention_dkv"]
    program = en.trace(case.function("full"), *case.specs("full"))
    other = program.renamed(
        {a: f"z{len(program.axes) - i}" for i, a in enumerate(program.axes)}, {i.name: f"in_{i.name}" for i in program.inputs}
    )
    plans = [extract(egraph.saturate(p).graph, p, model_for(GPU)).plan for p in (program, other)]
    shapes = [
        [(k.cost and k.cost.seconds, [(x.role, x.extent, x.tile) for x in k.axes.values()], k.choices) for k in p.kernels]
        for p in plans
    ]
    assert shapes[0] == shapes[1]


def test_same_plan_in_every_process() -> None:
    code = (
        "import eqsat_neptune as en; from eqsat_neptune import egraph; from eqsat_neptune.programs import CASES;"
        "from eqsat_neptune.extraction.extract import extract; from eqsat_neptune.cost_models import model_for; from eqsat_neptune.codegen.serial import to_json;"
        "c = CASES['rmsnorm_diamond']; p = en.trace(c.function(), *c.specs());"
        "x = extract(egraph.saturate(p).graph, p, model_for('cuda:sm_80')); print(x.plan, to_json(x.plan), [str(c.plan) for c in x.candidates])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, check=True
        ).stdout
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1] and b"k0" in runs[0]


# ------------------------------------------------------------------------------------------------------ growth, limits


def layers(n: int) -> tuple[Graph, Program]:
    weights = (S((1024, 1024), "bfloat16"),) * 4 + (S((1024, 4096), "bfloat16"), S((4096, 1024), "bfloat16"))
    return graph_of(transformer_layers(n, 8), S((2048, 1024), "bfloat16"), *weights * n)


def test_each_structure_is_searched_once() -> None:
    three, four, six = (extract(*layers(n), model_for(GPU)) for n in (3, 4, 6))
    assert six.stats["regions"] == 2 * three.stats["regions"] > 10
    assert six.stats["searched"] == four.stats["searched"] and six.stats["lowerings"] == four.stats["lowerings"]
    count = [len(x.plan.kernels) for x in (three, four, six)]
    seconds = [x.plan.cost.seconds for x in (three, four, six)]
    assert count[2] - count[1] == 2 * (count[1] - count[0])
    assert math.isclose(seconds[2] - seconds[1], 2 * (seconds[1] - seconds[0]))


def small_layers(n: int) -> tuple[Graph, Program]:
    (x, *weights) = CASES["layers1"].specs("small")
    return graph_of(transformer_layers(n, 2), x, *weights * n)


def test_long_programs_on_small_tensors_are_cut() -> None:
    """No product of theirs is worth a cut; one region of six layers would take half a minute, and a kernel for each operation."""
    _, program = small_layers(6)
    two, six = (extract(*small_layers(n), model_for("cpu")) for n in (2, 6))
    assert len(two.plan.kernels) == 2 and len(six.plan.kernels) == six.stats["regions"] == 6
    assert six.stats["lowerings"] <= 2 * two.stats["lowerings"]  # the pieces of a layer, alone and joined, are searched once
    well_formed(six.plan, program)
    rng = np.random.default_rng(3)
    close(six.plan, program, [rng.standard_normal(x.shape).astype(np.float32) / 4 for x in program.inputs])


def recurrence(kind: str, steps: int) -> tuple[Graph, Program]:
    """Steps on small tensors: residual layers, an RNN, or cells whose gates are slices of one product (an LSTM)."""

    def layers(x, *ws):  # type: ignore[no-untyped-def]
        for w in ws:
            x = x + xp.tanh(x @ w)
        return x

    def rnn(xs, h, w, u):  # type: ignore[no-untyped-def]
        for t in range(steps):
            h = xp.tanh(xs[t] @ w + h @ u)
        return h

    def cells(xs, h, c, w, u):  # type: ignore[no-untyped-def]
        for t in range(steps):
            g = xs[t] @ w + h @ u
            i, f, o = (xp.sigmoid(g[:, 32 * n : 32 * n + 32]) for n in range(3))
            c = f * c + i * xp.tanh(g[:, 96:])
            h = o * xp.tanh(c)
        return h

    state = S((4, 32), "float32")
    match kind:
        case "layers":
            return graph_of(layers, state, *[S((32, 32), "float32")] * steps)
        case "rnn":
            return graph_of(rnn, S((steps, 4, 16), "float32"), state, S((16, 32), "float32"), S((32, 32), "float32"))
    weights = S((16, 128), "float32"), S((32, 128), "float32")
    return graph_of(cells, S((steps, 4, 16), "float32"), state, state, *weights)


@pytest.mark.parametrize("target", ["cpu", GPU])
@pytest.mark.parametrize("kind, most", [("layers", 3), ("rnn", 2), ("cells", 6)])
def test_a_step_of_a_recurrence_takes_no_more_than_a_kernel(kind: str, most: int, target: str) -> None:
    graph, program = recurrence(kind, 6)
    found = extract(graph, program, model_for(target))
    assert len(found.plan.kernels) <= most
    well_formed(found.plan, program)
    rng = np.random.default_rng(6)
    close(found.plan, program, [rng.standard_normal(x.shape).astype(np.float32) / 4 for x in program.inputs])


def deep(kind: str) -> tuple[Graph, Program]:
    """Twelve layers that all read a vector, or the last of which reads the first, or of which some are results."""
    xp = en.xp

    def fn(x, e, w0, *ws):  # type: ignore[no-untyped-def]
        c, outs = xp.tanh(e @ w0), []
        for i, w in enumerate(ws):
            x = x + xp.tanh((x * (1 + c)) @ w) if kind == "vector" else x + xp.tanh(x @ w)
            if i % 5 == 0:
                outs.append(x)
        return {"vector": x, "skip": x * outs[0] + c, "results": (*outs, x + c)}[kind]

    return graph_of(fn, S((8, 32), "float32"), S((8, 16), "float32"), S((16, 32), "float32"), *[S((32, 32), "float32")] * 12)


@pytest.mark.parametrize("kind", ["vector", "skip", "results"])
def test_several_values_go_through_a_cut(kind: str) -> None:
    graph, program = deep(kind)
    found = extract(graph, program, model_for("cpu"))
    assert found.stats["regions"] > 1
    well_formed(found.plan, program)
    rng = np.random.default_rng(4)
    close(found.plan, program, [rng.standard_normal(x.shape).astype(np.float32) / 8 for x in program.inputs])


def pieces_of(graph: Graph, program: Program, target: str = "cpu") -> tuple[Classes, list[tuple[Cone, Pieces]]]:
    cl = Classes(graph, program, legal_nodes(graph, program.compute_dtype, None))
    cuts = forced_cuts(cl, model_for(target))
    return cl, [(c, Pieces(cl, cuts, frozenset(), c)) for c in regions(cl, cuts)]


@pytest.mark.parametrize("name", ["nearest_neighbours", "topk_gating", "attention_backward", "differential_attention"])
def test_operators_are_of_one_piece(name: str) -> None:
    """What goes from product to product is larger than what is given."""
    _, found = pieces_of(*saturated(name))
    assert all(len(p) == 1 for _, p in found)


def below(cl: Classes, c: int) -> set[int]:
    """What a class is made of in the source, itself among it."""
    out: set[int] = set()
    todo = [c]
    while todo:
        x = todo.pop()
        if x not in out:
            out.add(x)
            todo += cl.source[x].args
    return out


@pytest.mark.parametrize("make", [lambda: small_layers(3), lambda: recurrence("cells", 3), lambda: deep("results")])
def test_pieces_follow_one_another(make: Callable[[], tuple[Graph, Program]]) -> None:
    """Each stores what later ones need, and reads no product that nobody has stored; all of them together are the region."""
    cl, found = pieces_of(*make())
    for cone, split in found:
        assert len(split) > 3
        stored: set[int] = set()
        for i in range(len(split)):
            for piece in split.between(i, i + 1):
                assert piece.leaves <= stored
                stored |= set(piece.roots)
        assert stored >= set(cone.roots)
        (whole,) = split.between(0, len(split))
        assert set(whole.roots) == set(cone.roots) and whole.nodes == cone.nodes and whole.leaves == cone.leaves
        first, rest = split.between(0, 2), split.between(2, len(split))
        handed = set().union(*[c.roots for c in first])
        made = {c for c in set().union(*[below(cl, r) for r in handed]) if cl.flops(c)}
        assert made and not made & set().union(*[c.nodes.keys() for c in rest]) - handed


@pytest.mark.parametrize("limits", [Limits(statements=1, bodies=1, sets=1), Limits(statements=300, bodies=2, sets=5)])
@pytest.mark.parametrize("name", ["prefill_causal", "attention_dkv", "layers1", "rmsnorm_diamond"])
def test_any_limit_leaves_a_plan(name: str, limits: Limits) -> None:
    graph, program = saturated(name, "small", least=16)
    found = extract(graph, program, model_for("cpu"), limits=limits)
    well_formed(found.plan, program)
    close(found.plan, program, CASES[name].inputs("small", np.random.default_rng(5)))


def test_progress_is_told() -> None:
    seen: list[tuple[str, int, int | None]] = []
    extract(*saturated("layers1"), model_for(GPU), progress=lambda *x: seen.append(x))
    assert seen and all(stage == "search" and 0 <= done < total for stage, done, total in seen)  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------ shapes of plans


def test_shared_work_is_done_once() -> None:
    """Gradients of keys and values come out of one kernel that computes the scores once."""
    plan = extraction("attention_dkv").plan
    last = next(k for k in plan.kernels if any(s.buffer == "out0" for s in k.stores))
    assert any(s.buffer == "out1" for s in last.stores) or len(plan.kernels) <= 3


def test_layernorm_before_a_product() -> None:
    """One kernel when rows are few; a kernel of its own when they are many."""
    assert len(extraction("layernorm_linear", n=16).plan.kernels) == 1
    assert len(extraction("layernorm_linear", n=4096).plan.kernels) == 2


def test_no_matrix_of_weights_in_memory() -> None:
    h, n = (CASES["linear_attention"].full[x] for x in "hn")
    assert all(size < h * n * n / 4 for size in temps(extraction("linear_attention").plan))


def test_number_of_parts_fills_the_machine() -> None:
    for n in (8192, 65536):
        plan = extraction("decode_gqa", n=n).plan
        first = plan.kernels[0]
        blocks = math.prod(x.trips for x in first.axes.values() if x.role == "grid")
        assert len(plan.kernels) == 2 and 0.9 * H200.sms <= blocks <= 4 * H200.sms, first
        part = next(a for a in first.axes if a.endswith(".o"))
        assert first.extents[part] * first.extents[base(part) + ".i"] >= n


def test_masks_skip_tiles() -> None:
    whole, half = (extraction(x).plan.cost.seconds for x in ("prefill_global", "prefill_causal"))
    assert half < 0.7 * whole


def test_split_blocks_are_multiples_of_their_tiles() -> None:
    for extent, counts in itertools.product((1000, 4097, 65536), ((2, 3, 8, 24, 64),)):
        s = K.Split.of("k", extent, counts)
        assert s is not None and (s.parts * s.block >= extent).all() and ((s.parts - 1) * s.block < extent).all()
        assert (s.block % 16 == 0).all()


def test_a_kernel_that_fits_with_some_numbers_of_parts_only_does_not_end_the_search() -> None:
    """Projections of a few rows: computed again for each block in one kernel, once in two."""

    def f(x: Any, wq: Any, wk: Any, wv: Any) -> Any:
        q, k, v = x @ wq, x @ wk, x @ wv
        s = q @ k.mT
        p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
        return (p / xp.sum(p, axis=-1, keepdims=True)) @ v

    plan = en.optimize(f, GPU, specs=[en.TensorSpec(s, "bfloat16") for s in ((64, 1024), *((1024, 64),) * 3)]).plan
    assert len(plan.kernels) == 2 and plan.cost.seconds < 13e-6


# ------------------------------------------------------------------ long programs


STEPS: dict[str, tuple[int, Callable[[Any], Any]]] = {  # each needs the last value once, or more often
    "one of each": (400, xp.tanh),
    "three of each": (120, lambda x: xp.tanh(x * 1.01 + 0.01)),
    "with what it came from": (60, lambda x: x + 0.1 * xp.sin(x)),
    "a quotient": (40, lambda x: x / (1 + xp.abs(x))),
    "a gate": (20, lambda x: x + xp.gelu(x)),
}


@pytest.mark.parametrize("name", STEPS)
def test_long_chains(name: str) -> None:
    """The search looks at each value once, however many ways lead to it; no recursion, and facts of all values."""
    count, step = STEPS[name]

    def f(x: Any) -> Any:
        for _ in range(count):
            x = step(x)
        return x

    x = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    with time_limit(30.0):
        kernel = en.optimize(f, specs=[en.TensorSpec(x.shape)])
    want = en.evaluate(kernel.program, x)
    np.testing.assert_allclose(kernel(x), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.slow
def test_many_layers() -> None:
    """Parts of a tensor that are computed again for a product with itself would double what a kernel does with every layer."""

    def layers(x: Any, *ws: Any) -> Any:
        for w in ws:
            h = xp.layer_norm(x)
            x = x + xp.softmax(h @ h.mT / 3.0, axis=-1) @ h
            x = x + xp.gelu(xp.layer_norm(x) @ w) @ w.mT
        return x

    arrays = [np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in ((4, 9), *[(9, 12)] * 10)]
    with time_limit(90.0):
        kernel = en.optimize(layers, specs=[en.TensorSpec(x.shape) for x in arrays])
    want = en.evaluate(kernel.program, *arrays)
    np.testing.assert_allclose(kernel(*arrays), want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
