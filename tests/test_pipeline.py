"""What the whole pipeline decides, asserted on plans: terms, kernels, roles and loops, never on printed text."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.tile import Contract, Load, Loop, Map, Reduce, TileProgram, walk
from eqsat_neptune.extraction.plan import Kernel, Plan, Store

import eqsat_neptune as en
from eqsat_neptune import TensorSpec, codegen, egraph, extraction, rules, terms
from eqsat_neptune.program import Program
from eqsat_neptune.programs import CASES, WEIGHTS_PER_LAYER, transformer_layers
from eqsat_neptune.terms import Affine, Term, base, make, postorder

GPU = "cuda:sm_90a"


# ------------------------------------------------------------------ looking at plans


@functools.cache
def kernel(name: str, target: str, **extents: int) -> en.Kernel:
    """A case compiled at its full size, or at other extents."""
    case = CASES[name]
    return en.optimize(en.trace(case.function("full"), *case.specs("full", **extents)), target)


def plan(name: str, target: str, **extents: int) -> Plan:
    return kernel(name, target, **extents).plan


def stored(p: Plan) -> list[Term]:
    return [s.term for k in p.kernels for s in k.stores]


def below(t: Term) -> Iterator[Term]:
    yield from postorder([t])


def everything(p: Plan) -> Iterator[Term]:
    yield from postorder(stored(p))


def reductions(p: Plan) -> list[Term]:
    return [t for t in everything(p) if t.op in ("red", "fold")]


def reduced_axis(t: Term) -> str:
    return base(t.attr[-1])  # type: ignore[index]


def running_extremes(p: Plan) -> list[Term]:
    """Reductions that keep a maximum or minimum, alone or as the pivot of a fold."""
    return [
        t
        for t in reductions(p)
        if (t.op == "red" and t.attr[0] in ("max", "min"))  # type: ignore[index]
        or (t.op == "fold" and any(k in ("max", "min") for k in t.attr[0].pivots))
    ]  # type: ignore[index]


def divisions_inside(p: Plan, extent: int) -> list[Term]:
    """Divisions by something that was reduced over an axis of this extent, within a sum over such an axis."""
    out = []
    for r in reductions(p):
        if p.kernels[0].extents.get(reduced_axis(r)) == extent:
            for a in r.args:
                out += [
                    t
                    for t in below(a)
                    if t.op == "un"
                    and t.attr in ("recip", "rsqrt")
                    and any(x.op in ("red", "fold") and reduced_axis(x) == reduced_axis(r) for x in below(t))
                ]
    return out


def temps(p: Plan) -> dict[str, int]:
    return {b.name: b.size for b in p.buffers.values() if b.kind == "temp"}


def programs(p: Plan) -> list[TileProgram]:
    return [lower(k, p.buffers, p.compute_dtype) for k in p.kernels]


def loads(p: Plan, name: str) -> int:
    return sum(isinstance(s, Load) and s.buffer == name for q in programs(p) for s in walk(q.body))


def passes(p: Plan, extent: int) -> list[str]:
    """Loops over axes of this extent (parts of axes too), one entry for each; an axis that lies in the block counts once for each
    kernel that reduces over it."""
    out = []
    for k, q in zip(p.kernels, programs(p)):
        looped = [s.axis for s in walk(q.body) if isinstance(s, Loop) and k.extents[base(s.axis)] == extent]
        held = {a for a, x in k.axes.items() if x.role == "whole" and k.extents[base(a)] == extent and a not in looped}
        out += looped + sorted(held & {t.attr[-1] for t in postorder(s.term for s in k.stores) if t.op in ("red", "fold")})  # type: ignore[index]
    return out


# ------------------------------------------------------------------ forms that must win


@pytest.mark.parametrize("target", [GPU, "cpu"])
@pytest.mark.parametrize(
    "name",
    [
        "prefill_global",
        "prefill_causal",
        pytest.param("prefill_gqa", marks=pytest.mark.slow),
        pytest.param("prefill_alibi", marks=pytest.mark.slow),
    ],
)
def test_prefill_is_one_kernel_that_divides_last(name: str, target: str) -> None:
    p = plan(name, target)
    n = CASES[name].full["n"]
    assert len(p.kernels) == 1 and temps(p) == {}
    assert not divisions_inside(p, n)
    assert len(passes(p, n)) == 1  # one loop over the keys: the maximum, the sum and the product together


@pytest.mark.parametrize("name", ["decode_causal", "decode_gqa"])
@pytest.mark.parametrize("n", [8192, 65536])
def test_decode_splits_the_keys(name: str, n: int) -> None:
    p = plan(name, GPU, n=n)
    d = CASES[name].full["d"]
    first = p.kernels[0]
    split = [
        a for a, x in first.axes.items() if a.endswith(".o") and first.extents[base(a)] == n and x.role == "grid" and x.trips > 1
    ]
    assert len(split) == 1, f"the keys are not split over blocks:\n{p}"
    assert len(p.kernels) == 2 or (len(p.kernels) == 1 and first.choices.get("merge"))
    parts, rows = first.axes[split[0]].extent, CASES[name].full["hq"]
    assert sum(temps(p).values()) <= parts * rows * (d + 2)  # a state for each part, no scores


@pytest.mark.parametrize("name", ["decode_causal", "prefill_global"])
def test_few_keys_need_no_split(name: str) -> None:
    p = plan(name, GPU, n=64)
    assert len(p.kernels) == 1 and temps(p) == {}


@pytest.mark.parametrize("target", [GPU, "cpu"])
@pytest.mark.parametrize(
    "name, extents",
    [("prefill_softcap", {}), ("decode_softcap", {}), ("qknorm", {}), ("qknorm", {"n": 4096})],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
def test_bounded_scores_need_no_running_maximum(name: str, extents: Mapping[str, int], target: str) -> None:
    assert not running_extremes(plan(name, target, **extents))


@pytest.mark.parametrize("name", ["prefill_global", "decode_causal", "prefill_alibi"])
def test_unbounded_scores_keep_it(name: str) -> None:
    assert running_extremes(plan(name, GPU))


def test_rmsnorm_divides_after_the_product() -> None:
    p = plan("rmsnorm_linear", GPU)
    assert len(p.kernels) == 1
    products = [t for t in reductions(p) if {"x", "w"} <= {x.attr[0] for x in below(t) if x.op == "input"}]  # type: ignore[index]
    assert products and not any(x.op == "un" and x.attr in ("recip", "rsqrt", "sqrt") for t in products for x in below(t))


@pytest.mark.parametrize("name", ["lora", "gated_mlp"])
def test_products_share_their_load(name: str) -> None:
    p = plan(name, GPU)
    assert all(loads(p, b) == 1 for b, x in p.buffers.items() if x.kind == "input"), f"loaded more than once:\n{p}"


@pytest.mark.parametrize(("d", "rows"), [(64, 192), (256, 128)])
def test_tiles_of_pipelines_are_refined(d: int, rows: int) -> None:
    """As many keys as registers and shared memory have room for, of two iterations at a time; three warpgroups where sums are small."""
    (k,) = kernel("prefill_global", GPU, n=8192, d=d).plan.kernels
    (keys,) = [x.tile for x in k.axes.values() if x.role == "loop"]
    assert [x.tile for x in k.axes.values() if x.role == "grid"].count(rows) == 1 and k.choices["warpgroups"] == rows // 64
    assert k.choices["overlap"] and keys >= 64 and keys % 16 == 0


def test_gradient_of_the_queries_is_one_pass_over_the_keys() -> None:
    p = plan("attention_dq", GPU)
    n = CASES["attention_dq"].full["n"]
    assert len(p.kernels) == 1 and temps(p) == {} and len(passes(p, n)) == 1
    (loop,) = [s for q in programs(p) for s in walk(q.body) if isinstance(s, Loop)]
    weights = [s for s in loop.body if isinstance(s, Map) and s.fn == "exp" and loop.axis in s.out.axes]
    assert len(weights) == 1 and len(loop.carries) == 7  # weights and their sum serve all components; the sum where a pivot moved last


@pytest.mark.parametrize(
    "name, most", [("softmax", 1), ("layernorm", 1), ("cross_entropy", 1), ("logsumexp", 1), ("variance", 1), ("ntrans", 1)]
)
def test_rows_are_read_by_one_kernel(name: str, most: int) -> None:
    p = plan(name, GPU)
    assert len(p.kernels) <= most and temps(p) == {}


def test_distances_never_lie_in_memory() -> None:
    p = plan("kernel_regression", GPU)
    n, m, d = (CASES["kernel_regression"].full[a] for a in "nmd")
    assert n == m and all(size < n * d * 4 for size in temps(p).values())


def test_learnt_sinks_cost_no_pass() -> None:
    """The denominator counts something beside the keys, and may still leave their sum."""
    p = plan("sink_attention", GPU)
    assert len(p.kernels) == 1 and temps(p) == {} and len(passes(p, CASES["sink_attention"].full["n"])) == 1
    (program,) = programs(p)
    assert sum(isinstance(s, Reduce) and s.op == "max" for s in walk(program.body)) == 1  # the fold's pivot is the maximum


def test_logits_of_a_cross_entropy_never_lie_in_memory() -> None:
    """Blocks leave the statistics of a few columns each: the summed dimension is too long for a pass over the vocabulary."""
    p = plan("cross_entropy_linear", GPU)
    n, v = (CASES["cross_entropy_linear"].full[a] for a in "nv")
    assert all(size <= n * v / 128 * 4 for size in temps(p).values()) and len(p.kernels) == 2


@pytest.mark.parametrize("n", [1024, 4096, 16384])
def test_what_every_block_needs_is_computed_once(n: int) -> None:
    """Sums over the keys do not depend on queries: no block of queries computes them again."""
    p = plan("performer", GPU, n=n)
    keys = [k for k in p.kernels if any(base(a) == "a3" and not a.endswith(".o") for a in k.axes)]
    assert keys and not any("a1" in k.axes for k in keys)


def test_an_extremum_over_two_axes_needs_no_pass_of_its_own() -> None:
    """Features of the keys are relative to the greatest of all: each feature's sums have a pivot of their own."""
    p = plan("performer", GPU, n=4096)
    keys = [k for k in programs(p) if any(b.name == "k" for b in k.reads)]
    assert len(keys) == 1 and all(size < 4096 * 64 * 8 * 4 for size in temps(p).values())


def test_what_an_earlier_kernel_can_supply_needs_no_pivot() -> None:
    """Where the features of many queries meet the sums of the keys, these are there, at their greatest: one pass, one maximum."""
    p = plan("performer", GPU, n=16384)
    loops = [s for s in walk(programs(p)[-1].body) if isinstance(s, Loop)]
    assert len(loops) == 1 and [c.kind for c in loops[0].carries].count("pivot") == 1


def test_norms_leave_the_loop_that_multiplies() -> None:
    """A loop that also computes on its tiles by element is no pipeline of warpgroups: where it multiplies much, it does nothing else."""
    p = plan("qknorm", GPU, n=4096, h=32, d=128)
    assert len(p.kernels) == 3 and [bool(k.choices.get("warpgroups")) for k in p.kernels] == [False, False, True]
    (keys,) = [b for b in p.buffers.values() if b.kind == "temp" and len(b.shape) == 3]
    # normalised once, not norms that every score is multiplied by; in the order in which the keys lie
    assert (keys.shape, keys.dtype) == ((32, 4096, 128), "bfloat16") and all(size <= keys.size for size in temps(p).values())


def test_what_only_weights_multiply_is_stored_in_16_bits() -> None:
    """As in the kernel that multiplies it by them, where it would be rounded for matrix units."""
    p = plan("performer", GPU, n=1024)
    sums = [b for b in p.buffers.values() if b.kind == "temp" and len(b.shape) == 3]
    assert [b.dtype for b in sums] == ["bfloat16"]
    exact = plan("performer", GPU, n=1024, dtype="float32")
    assert all(b.dtype == "float32" for b in exact.buffers.values() if b.kind == "temp")


@pytest.mark.parametrize("name", ["performer", "qknorm", "decode_gqa", "rmsnorm_gain_linear", "lora"])
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_kernels_get_the_warps_that_they_are_priced_for(name: str, target: str) -> None:
    k = kernel(name, target, dtype="bfloat16")
    printed = {m[1]: int(m[2]) for m in re.finditer(r"// kernel (\w+)\(.*?^KERNEL\((\d+), ", k.source, re.DOTALL | re.MULTILINE)}
    checked = 0
    for x in k.plan.kernels:
        if any(isinstance(s, Contract) for s in walk(lower(x, k.plan.buffers, k.plan.compute_dtype).body)):
            assert x.cost
            if "warps" in x.cost.detail:  # else a thread has an element
                producer = 4 if x.choices.get("warpgroups") else 0
                assert printed[x.name] == 32 * (int(x.cost.detail["warps"]) + producer), x  # type: ignore[call-overload]
                checked += 1
    assert checked


@pytest.mark.parametrize("name", ["prefill_alibi", "prefill_windowed"])
def test_long_and_short_tiles_share_a_multiprocessor_where_each_block_has_one(name: str) -> None:
    assert plan(name, GPU, n=512).kernels[0].choices.get("together") == 2
    assert "together" not in plan(name, GPU, n=1024).kernels[0].choices


def test_chains_of_products_go_the_cheap_way() -> None:
    """(AB)C with A tall and B wide: A(BC) takes 64 times fewer multiply-adds."""
    p = plan("matmul_chain", GPU)
    n, r, m = (CASES["matmul_chain"].full[a] for a in ("n", "r", "m"))
    work = sum(
        math.prod(k.extents[a] for a in {*s.a.axes, *s.b.axes})
        for k, q in zip(p.kernels, programs(p))
        for s in walk(q.body)
        if isinstance(s, Contract)
    )
    assert work <= 2 * (r * m * r + n * r * r) < n * r * m


# ------------------------------------------------------------------ names

WORDS = re.compile("attention|softmax|flash", re.IGNORECASE)


@pytest.mark.parametrize("package", [rules, extraction, codegen], ids=lambda m: m.__name__.rpartition(".")[2])
def test_nothing_knows_what_it_compiles(package: Any) -> None:
    root = Path(next(iter(package.__path__)))
    sources = [f for f in root.rglob("*") if f.suffix in (".py", ".h", ".cuh", ".cpp", ".cu")]
    assert len(sources) > 3
    assert [f"{f}:{i}" for f in sources for i, line in enumerate(f.read_text().splitlines(), 1) if WORDS.search(line)] == []


def with_names(p: Plan, axes: Mapping[str, str], buffers: Mapping[str, str]) -> Plan:
    """The same plan under other names of whole axes and of inputs."""

    def axis(a: str) -> str:
        return axes.get(base(a), base(a)) + a[len(base(a)) :]

    def index(ix: Affine) -> Affine:
        return Affine(ix.const, tuple((axis(a), c) for a, c in ix.terms))

    def new(t: Term, args: tuple[Term, ...]) -> Term | None:
        a: Any = t.attr
        match t.op:
            case "input":
                return make("input", (buffers.get(a[0], a[0]), tuple(map(index, a[1]))))
            case "iota" | "gather":
                return make(t.op, axis(a), args)
            case "red" | "fold":
                return make(t.op, (*a[:-1], axis(a[-1])), args)
            case "view":
                return make("view", tuple((axis(x), index(i)) for x, i in a), args)
        return None

    def launch(k: Kernel) -> Kernel:
        values = terms.rewrite([s.term for s in k.stores], new)
        stores = tuple(Store(s.buffer, t, tuple(map(index, s.index))) for s, t in zip(k.stores, values))
        return replace(
            k, stores=stores, axes={axis(a): x for a, x in k.axes.items()}, extents={axis(a): n for a, n in k.extents.items()}
        )

    named = (replace(b, name=buffers.get(b.name, b.name), axes=tuple(map(axis, b.axes))) for b in p.buffers.values())
    return Plan(tuple(map(launch, p.kernels)), {b.name: b for b in named}, p.compute_dtype)


@pytest.mark.parametrize(
    "name, target",
    [
        ("prefill_alibi", GPU),
        ("rmsnorm_diamond", "cpu"),
        ("layernorm_linear", GPU),
        ("kmeans_assign", "cpu"),
        *(
            pytest.param(name, target, marks=pytest.mark.slow)
            for name in ("prefill_causal", "swiglu_linear", "attention_dq", "performer", "layers1")
            for target in (GPU, "cpu")
        ),
    ],
)
def test_other_names_change_nothing_but_names(name: str, target: str) -> None:
    case = CASES[name]
    program = en.trace(case.function("small"), *case.specs("small"))
    assert isinstance(program, Program)
    axes = {a: f"z{len(program.axes) - i}" for i, a in enumerate(program.axes)}  # in the opposite alphabetical order
    inputs = {x.name: f"m{len(program.inputs) - i}_{x.name}" for i, x in enumerate(program.inputs)}
    ours = en.optimize(program, target, rules=rules.RULES)  # rules=: nothing comes from the cache
    other = en.optimize(program.renamed(axes, inputs), target, rules=rules.RULES)
    back = with_names(other.plan, {v: k for k, v in axes.items()}, {v: k for k, v in inputs.items()})
    assert [len(k.stores) for k in back.kernels] == [len(k.stores) for k in ours.plan.kernels]
    for a, b in zip(back.kernels, ours.plan.kernels):
        assert a == b
    assert back == ours.plan
    assert other._record.info["egraph"]["nodes"] == ours._record.info["egraph"]["nodes"]


# ------------------------------------------------------------------ the same everywhere


def test_what_was_compiled_before_does_not_matter() -> None:
    def compiled(name: str) -> en.Kernel:
        case = CASES[name]
        return en.optimize(en.trace(case.function("small"), *case.specs("small")), GPU, rules=rules.RULES)

    first = compiled("prefill_causal")
    compiled("layernorm_linear"), compiled("lora")
    again = compiled("prefill_causal")
    assert again.plan == first.plan and again.source == first.source and again.explain() == first.explain()


SOURCES = """
import hashlib, json
import eqsat_neptune as en
from eqsat_neptune.programs import CASES
out = {}
for name in ("prefill_alibi", "rmsnorm_diamond"):
    case = CASES[name]
    program = en.trace(case.function("small"), *case.specs("small"))
    for target in ("cpu", "cuda:sm_90a", "hip:gfx942"):
        k = en.optimize(program, target)
        out[f"{name} {target}"] = [hashlib.sha256(k.source.encode()).hexdigest(), k.explain(), str(k.plan)]
print(json.dumps(out))
"""


def test_the_same_source_in_every_process(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SOURCES],
            text=True,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed, "EQSAT_NEPTUNE_CACHE": str(tmp_path / seed)},
        )
        for seed in ("0", "1234")
    ]
    a, b = (json.loads(p.communicate(timeout=300)[0]) for p in started)
    assert a == b and len(a) == 6


# ------------------------------------------------------------------ size, time, memory


def layers(n: int, rows: int = 512, width: int = 512) -> Program:
    weights = [TensorSpec((width, width))] * 4 + [TensorSpec((width, 4 * width)), TensorSpec((4 * width, width))]
    assert len(weights) == WEIGHTS_PER_LAYER
    program = en.trace(transformer_layers(n, heads=4), TensorSpec((rows, width)), *weights * n)
    assert isinstance(program, Program)
    return program


def test_graphs_grow_linearly_with_layers() -> None:
    one, two, three = (egraph.saturate(layers(n)) for n in (1, 2, 3))
    assert three.graph.size - two.graph.size <= 1.1 * (two.graph.size - one.graph.size)
    assert one.stop == two.stop == three.stop == "fixpoint"


@pytest.mark.slow
@pytest.mark.parametrize("target", [GPU, "cpu"])
def test_search_grows_linearly_with_layers(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    seconds, nodes, kernels = {}, {}, {}
    for n in (2, 4, 8):
        program = layers(n)
        start = time.process_time()
        k = en.optimize(program, target, rules=rules.RULES)
        seconds[n], nodes[n] = time.process_time() - start, k._record.info["egraph"]["nodes"]
        kernels[n] = len(k.plan.kernels)
    with capsys.disabled():
        print(
            f"\n    layers on {target}: "
            + ", ".join(f"{n}: {nodes[n]} e-nodes, {kernels[n]} kernels, {s:.1f} s of CPU" for n, s in seconds.items())
        )
    assert seconds[8] <= 2.5 * seconds[4] and nodes[8] - nodes[4] <= 2.2 * (nodes[4] - nodes[2])
    assert kernels[8] - kernels[4] <= 1.3 * 2 * (kernels[4] - kernels[2]), f"{kernels}: layers become about as many kernels each"


MEMORY = """
import json, sys
import numpy as np
import eqsat_neptune as en
from eqsat_neptune.programs import attention

def status(field):
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

n, d = int(sys.argv[1]), 64
spec = en.TensorSpec((1, 1, n, d))
k = en.optimize(en.trace(attention, spec, spec, spec))
small = en.TensorSpec((1, 1, 512, d))
en.optimize(en.trace(attention, small, small, small))(*np.ones((3, 1, 1, 512, d), np.float32))      # BLAS and threads are up
before = status("VmRSS")
q, key, v = np.random.default_rng(0).standard_normal((3, 1, 1, n, d), dtype=np.float32)
open("/proc/self/clear_refs", "w").write("5")                # forgets the peak so far
out = k(q, key, v)
print(json.dumps([status("VmHWM") - before, q.nbytes + key.nbytes + v.nbytes + out.nbytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_memory_of_long_rows(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, "16384"], text=True, stdout=subprocess.PIPE, timeout=300, check=True)
    peak, data = json.loads(done.stdout)
    with capsys.disabled():
        print(f"\n    one head, n = 16384: peak {peak / 2**20:.1f} MiB, inputs and outputs {data / 2**20:.1f} MiB")
    assert peak < 3 * data


# ------------------------------------------------------------------ the notation


def test_the_chosen_form_and_its_derivation_are_shown() -> None:
    k = kernel("prefill_global", GPU)
    steps = k._record.info["explain"]
    laws = {r.name: r.law for r in rules.RULES}
    assert steps and all(laws[name] == law and shown for name, law, shown in steps)
    names = {s[0] for s in steps}
    assert {"break-dependency", "sum-factor-out"} <= names and all(n in k.explain() for n in names)
    report = k.report()
    titles = " ".join(s.title for s in report.sections)
    for part in ("Chosen form", "Kernels (1), predicted", "Roofline", "Candidates that lost", "E-graph: ", "Compile time"):
        assert part in titles
    assert "<table>" in report._repr_html_() and k.cost.seconds > 0 and k.cost.bound in k.cost.parts


def test_a_plan_that_cannot_be_printed_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheapest one that can is taken; if none can, the error is that of the cheapest of all."""
    from types import SimpleNamespace

    from eqsat_neptune import compiler
    from eqsat_neptune.targets import parse_target

    def plan_of(seconds: float) -> SimpleNamespace:
        return SimpleNamespace(cost=SimpleNamespace(seconds=seconds), seconds=seconds, form=f"{seconds}")

    def chosen(*ways: tuple[float, bool]) -> float:
        plans = [plan_of(s) for s, _ in ways]
        for p in plans:
            p.plan = p
        monkeypatch.setattr(compiler, "_settled", lambda plan, *_: plan)
        monkeypatch.setattr(compiler, "_emits", lambda plan, _: dict(ways)[plan.seconds])
        found = SimpleNamespace(plan=plans[0], form=[plans[0].form], candidates=plans[1:])
        return compiler._expressible(found, parse_target(GPU), None)[0].cost.seconds

    assert chosen((1.0, True), (2.0, True)) == 1.0
    assert chosen((1.0, False), (2.0, False), (3.0, True)) == 3.0
    assert chosen((1.0, False), (2.0, False)) == 1.0
