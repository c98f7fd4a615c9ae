"""The bridge to egglog and the driver: round trips, determinism, limits, analyses, sizes."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eqsat_neptune.rules import RULES
from eqsat_neptune.rules.rule import Rule

import eqsat_neptune as en
from eqsat_neptune.egraph import Graph, Limits, Node, engine, explain, load, saturate
from eqsat_neptune.program import Input, Output, Program
from eqsat_neptune.programs import CASES
from eqsat_neptune.reference import Env, evaluate_term
from eqsat_neptune.terms import (
    Affine,
    Term,
    add,
    axis_index,
    bi,
    div,
    gather,
    inp,
    iota,
    mul,
    num,
    postorder,
    red,
    sub,
    un,
    view,
    where,
)  # fmt: skip
from eqsat_neptune.testing import check_graph
from eqsat_neptune.trace import trace

AXES = {"a": 3, "k": 10, "d": 4}


def x(name: str, *axes: str) -> Term:
    return inp(name, [axis_index(a) for a in axes])


def program(*terms: Term, axes: dict[str, int] = AXES, bounds: dict[str, tuple[float, float]] | None = None) -> Program:
    """A program over single-axis dimensions."""
    inputs: dict[str, Input] = {}
    for t in postorder(terms):
        if t.op == "input":
            name, index = t.attr
            shape = tuple(axes[ix.axes[0]] for ix in index)
            inputs.setdefault(name, Input(name, shape, "float64", (bounds or {}).get(name)))
    outputs = []
    for t in terms:
        free = sorted(t.free)
        outputs.append(Output(t, tuple((a,) for a in free), tuple(axes[a] for a in free), "float64"))
    return Program("test", tuple(inputs.values()), tuple(outputs), dict(axes))


def traced(name: str, size: str = "small") -> Program:
    case = CASES[name]
    return trace(case.function(size), *case.specs(size))


def digest(g: Graph) -> str:
    return hashlib.sha256(
        repr((g.nodes, sorted((c, sorted(f)) for c, f in g.free.items()), sorted(g.lo.items()), g.outputs)).encode()
    ).hexdigest()


def test_terms_come_back() -> None:
    k, a = x("x", "k", "a"), x("y", "a")
    terms = [
        add(mul(k, a, 2.5), -1.0),
        where(bi("le", iota("k"), 3.0), k, num(-math.inf)),
        red("max", "k", un("tanh", k)),
        view(red("+", "k", k), (("a", Affine(1, (("d", -1),))),)),
        gather(k, "k", bi("min", iota("d"), 2.0)),
    ]
    p = program(*terms)
    with engine(()) as eg:
        load(eg, p)
        eg.saturate("settle", [], Limits())
        g = eg.freeze(len(terms))
    env = Env(AXES, {i.name: np.random.default_rng(0).standard_normal(i.shape) for i in p.inputs})
    for t, c in zip(terms, g.outputs):
        back = g.term(c)
        assert back.op == t.op and back.attr == t.attr and back.free == t.free == g.free[c]
        _, (u, v) = env.align([evaluate_term(t, env), evaluate_term(back, env)])
        np.testing.assert_allclose(u, v, rtol=1e-15)
    assert all(n.why == "source" for _, n in g.items())


def test_arguments_have_smaller_numbers() -> None:
    g = saturate(traced("prefill_alibi"), splittable=()).graph
    for c, ns in g.nodes.items():
        assert all(a < c for a in ns[0].args)
    assert list(g.nodes) == sorted(g.nodes)


@pytest.mark.parametrize("name", ["prefill_causal", "layernorm_linear", "attention_dq"])
def test_same_graph_whatever_the_engine_did_before(name: str) -> None:
    first = digest(saturate(traced(name), splittable=("a3",)).graph)
    saturate(traced("performer"))
    assert digest(saturate(traced(name), splittable=("a3",)).graph) == first


def test_few_engines_are_kept() -> None:
    """An engine takes megabytes, and every other set of rules asks for another one."""
    from eqsat_neptune.engine import _POOL

    for n in range(_POOL.KEPT + 3):
        for _ in range(2):  # the same one
            with engine(RULES[n : n + 1]) as eg:
                load(eg, program(x("x", "k")))
        assert [k for k, _ in _POOL.idle].count(_POOL.idle[-1][0]) == 1
    assert len(_POOL.idle) == _POOL.KEPT


SCRIPT = """
import sys
sys.path.insert(0, {path!r})
from tests.test_egraph import digest, saturate, traced
print([digest(saturate(traced(n), splittable=("a3",)).graph) for n in ("prefill_alibi", "attention_dq", "layernorm")])
"""


def test_same_graph_in_every_process() -> None:
    from pathlib import Path

    root = str(Path(__file__).resolve().parent.parent)
    out = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(path=root)], env={"PYTHONHASHSEED": seed, "PATH": ""}, cwd=root,
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(out) == 1


@pytest.mark.parametrize("name", ["prefill_alibi", "layernorm_linear", "layers1", "attention_dkv"])
def test_names_change_nothing(name: str) -> None:
    p = traced(name)
    axes = {a: f"z{len(p.axes) - i}" for i, a in enumerate(p.axes)}
    inputs = {i.name: f"in{len(p.inputs) - n}" for n, i in enumerate(p.inputs)}
    long = max(p.axes, key=lambda a: (p.axes[a], a))
    g, h = saturate(p, splittable=(long,)).graph, saturate(p.renamed(axes, inputs), splittable=(axes[long],)).graph
    back = {v: k for k, v in axes.items()}
    names = {v: k for k, v in inputs.items()}

    def axis(a: str) -> str:
        head, dot, tail = a.partition(".")
        return back[head] + dot + tail

    def affine(ix: Affine) -> Affine:
        return Affine(ix.const, tuple((axis(a), c) for a, c in ix.terms))

    def attr(n: Node) -> object:
        match n.op:
            case "input":
                return (names[n.attr[0]], tuple(map(affine, n.attr[1])))
            case "iota" | "gather":
                return axis(n.attr)
            case "red" | "fold":
                return (*n.attr[:-1], axis(n.attr[-1]))
            case "view":
                return tuple((axis(a), affine(i)) for a, i in n.attr)
        return n.attr

    assert {c: [(n.op, attr(n), n.args, n.why) for n in ns] for c, ns in h.nodes.items()} == {
        c: [(n.op, n.attr, n.args, n.why) for n in ns] for c, ns in g.nodes.items()
    }
    assert g.outputs == h.outputs and g.lo == h.lo and g.facts == h.facts
    assert {c: frozenset(map(axis, f)) for c, f in h.free.items()} == g.free


@pytest.mark.parametrize(
    ("limits", "stop"), [(Limits(nodes=20), "nodes"), (Limits(seconds=0.0), "time"), (Limits(iterations=1), "iterations")]
)
def test_limits_leave_a_sound_graph(limits: Limits, stop: str) -> None:
    p = traced("attention_dq")
    s = saturate(p, limits=limits, splittable=("a3",))
    assert s.stop == stop
    assert check_graph(s, p)
    assert all(any(n.why == "source" for n in s.graph.nodes[c]) for c in s.graph.outputs)


def test_limits_end_normalisation() -> None:
    """A normalisation that has no normal form runs until a limit is met, between the steps of algebra as well."""
    tower = Rule("tower", "normal", "(exp x)", "(log (exp (exp x)))", law="x = log eˣ", phase="norm")
    p = traced("prefill_global")
    s = saturate(p, rules=[*RULES, tower], splittable=("a3",))
    assert s.stop == "nodes"
    assert all(any(n.why == "source" for n in s.graph.nodes[c]) for c in s.graph.outputs)


def test_constants_have_no_other_form() -> None:
    """0 = max(x − max x) would stand as that maximum in every sum.  (That no form contains itself is what keeps the corpus's
    hang-constant-factors from growing without end.)"""
    p = en.trace(lambda x: en.xp.max(x - en.xp.max(x)), en.TensorSpec((5,), "float32"))
    g = saturate(p).graph
    assert [n.op for n in g.nodes[g.outputs[0]]] == ["num"] and g.term(g.outputs[0]) == num(0.0)


def test_statistics() -> None:
    s = saturate(traced("prefill_global"), splittable=("a3",))
    assert [p.name for p in s.stats] == ["load", "sums", "algebra", "folds", "split", "freeze"]
    assert s.stop == "fixpoint" and all(p.seconds >= 0 and p.nodes > 0 for p in s.stats)


def test_no_rules_is_the_program_itself() -> None:
    p = traced("prefill_causal")
    s = saturate(p, rules=())
    assert all(n.why == "source" for _, n in s.graph.items()) and check_graph(s, p)


def test_subset_of_rules() -> None:
    p = traced("prefill_global")
    s = saturate(p, rules=[r for r in RULES if r.family != "folds"])
    assert not any(n.op == "fold" for _, n in s.graph.items()) and check_graph(s, p)


# programs in which a sum is rewritten to what is made of the sum itself: with x = ½·(x+x) known, x + x is 1·(x+x)
CIRCULAR: dict[str, Callable[[Any], Any]] = {
    "leaky relu": lambda x: en.xp.leaky_relu(x + x, 0.5),
    "a sum and its half": lambda x: (x + x, (x + x) * 0.5),
    "maximum": lambda x: en.xp.maximum(x + x, (x + x) / 2),
    "three terms": lambda x: en.xp.where(x > 0, x + x + x, (x + x + x) / 3),
    "sums": lambda x: (en.xp.sum(x) + en.xp.sum(x), (en.xp.sum(x) + en.xp.sum(x)) / 2),
    "in a circle": lambda x: (x + x, (x + x) + (x + x), ((x + x) + (x + x)) * 0.25),
    "once retired": lambda x: (x + x, (x + x) * 0.5 + (x + x) * 0.5),
}


@pytest.mark.parametrize("name", CIRCULAR)
def test_a_normal_form_made_of_itself_leaves_a_term(name: str) -> None:
    """Normalisation may retire every row of a class; the class keeps a term, and both targets a kernel."""
    p = trace(CIRCULAR[name], en.TensorSpec((4, 3)))
    s = saturate(p)
    assert s.stop == "fixpoint" and check_graph(s, p)
    assert all(a < c for c, ns in s.graph.nodes.items() for a in ns[0].args)
    value = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")
    want, got = (r if isinstance(r, tuple) else (r,) for r in (en.evaluate(p, value), en.optimize(p)(value)))
    for u, v in zip(want, got, strict=True):
        np.testing.assert_allclose(v, u, rtol=1e-6)
    assert "__global__" in en.optimize(p, "cuda:sm_90a").source


CANCELLING: dict[str, Callable[[Any], Any]] = {
    "a difference of doubles": lambda x: (x + x) + x * -1,
    "under a reduction": lambda x: en.xp.min(x + x - x, axis=-1),
    "sums of sums": lambda x: _tripled((x + _tripled(x)) + _tripled(x) * -1),
    "a third": lambda x: (x + x + x) / 3 - x * 0.5,
    "a mean that comes back": lambda x: (x - en.xp.mean(x, axis=-1, keepdims=True)) + en.xp.mean(x, axis=-1, keepdims=True) + x,
    "quotients": lambda x: (en.xp.exp(x) * x / en.xp.exp(x)) * en.xp.exp(x) / en.xp.exp(x),
}


def _tripled(x: Any) -> Any:
    return (x + x) + x


@pytest.mark.parametrize("name", CANCELLING)
def test_sums_that_cancel_stay_small(name: str) -> None:
    """What a normalisation has taken apart is not put together again from what it became: x = (x + x) − x is x alone."""
    p = trace(CANCELLING[name], en.TensorSpec((4, 3)))
    s = saturate(p)
    assert s.stop == "fixpoint" and max(x.nodes for x in s.stats) < 60
    assert check_graph(s, p)


def test_only_what_terms_need_comes_back() -> None:
    """`x + x` comes back; the products by 1 that it was rewritten to do not."""
    g = saturate(trace(CIRCULAR["a sum and its half"], en.TensorSpec((4, 3)))).graph
    total, half = g.outputs
    assert [n.op for n in g.nodes[total]] == ["add"] and g.nodes[total][0].args == (half, half)


def test_empty_axes() -> None:
    axes = AXES | {"k": 0}
    p = program(red("+", "k", x("x", "k", "a")), axes=axes)
    s = saturate(p, splittable=("k",))
    assert check_graph(s, p)


# ------------------------------------------------------------------ sizes

SIZES = {
    "prefill_global": 100, "prefill_causal": 110, "prefill_alibi": 200, "prefill_softcap": 130, "prefill_windowed": 130,
    "decode_causal": 100, "decode_alibi": 140, "decode_softcap": 110, "qknorm": 140, "attention_dq": 200, "performer": 270,
    "layernorm_linear": 90, "variance": 30, "lora": 20, "layers1": 250, "softmax_backward": 110, "rope_attention": 140,
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_size(name: str) -> None:
    p = traced(name, "full")
    longest = [t.attr[1] for t in postorder([o.term for o in p.outputs]) if t.op == "red" and p.axes[t.attr[1]] > 256]
    s = saturate(p, splittable=dict.fromkeys(longest))
    assert s.stop == "fixpoint"
    assert s.graph.size <= SIZES[name]


@pytest.mark.slow
def test_size_grows_linearly_with_layers() -> None:
    from eqsat_neptune.program import TensorSpec
    from eqsat_neptune.programs import transformer_layers

    def size(n: int) -> tuple[int, float]:
        weights = [TensorSpec(s, "float32") for s in ((64, 64),) * 4 + ((64, 128), (128, 64))] * n
        p = trace(transformer_layers(n, 4), TensorSpec((32, 64), "float32"), *weights)
        start = time.process_time()
        s = saturate(p)
        assert s.stop == "fixpoint"
        return s.graph.size, time.process_time() - start

    (s1, _), (s2, t2), (s8, t8) = size(1), size(2), size(8)
    assert s8 - s2 == 6 * (s2 - s1)
    assert t8 < 8 * t2


# ------------------------------------------------------------------ analyses


def interval(t: Term, **bounds: tuple[float, float]) -> tuple[float, float]:
    s = saturate(program(t, bounds=bounds))
    assert check_graph(s, program(t, bounds=bounds))
    return s.graph.interval(s.graph.outputs[0])


def test_bounds() -> None:
    k = x("x", "k", "a")
    assert interval(mul(50.0, un("tanh", k))) == (-50.0, 50.0)
    lo, hi = interval(sub(k, red("max", "k", k)))
    assert lo == -math.inf and hi == 0.0
    assert interval(add(mul(-2.0, k), 1.0), x=(0.0, 3.0)) == (-5.0, 1.0)
    assert interval(red("+", "k", k), x=(-1.0, 2.0)) == (-10.0, 20.0)
    lo, hi = interval(red("+", "k", un("exp", sub(k, red("max", "k", k)))))
    assert lo == 1.0 and 10.0 <= hi < 10.001
    lo, hi = interval(un("rsqrt", add(mul(k, k), 0.25)))
    assert lo >= 0.0 and hi == pytest.approx(2.0, rel=1e-6)
    assert interval(bi("min", bi("max", k, -1.0), 2.0)) == (-1.0, 2.0)
    lo, hi = interval(where(bi("lt", 0.0, k), add(k, 1.0), un("exp", k)))
    assert lo == 0.0 and hi == math.inf


def test_masked_values_are_left_out_of_bounds() -> None:
    """Below a mask lies −∞; exp makes 0 of it; both are outside [lo, hi], which holds for the rest."""
    k = mul(5.0, un("tanh", x("x", "k", "a")))
    masked = where(bi("le", iota("k"), iota("a")), k, num(-math.inf))
    p = program(masked, un("exp", masked), red("+", "k", un("exp", masked)))
    s = saturate(p)
    scores, e, total = s.graph.outputs
    assert check_graph(s, p)
    assert s.graph.interval(scores) == (-5.0, 5.0) and not s.graph.has(scores, "finite") and s.graph.has(scores, "masked")
    assert s.graph.interval(e)[0] == pytest.approx(math.exp(-5), rel=1e-6) and s.graph.has(e, "finite")
    assert not s.graph.has(e, "nonzero")
    assert s.graph.interval(total)[0] == pytest.approx(math.exp(-5), rel=1e-6)


def test_guard_of_wholly_masked_rows_is_bounded() -> None:
    """exp(M − M), which stands beside a fold whose maximum may be −∞, is 1 or NaN: a kernel may compute it."""
    masked = where(bi("le", iota("k"), iota("a")), x("x", "k", "a"), num(-math.inf))
    m = red("max", "k", masked)
    s = saturate(program(add(m, un("log", red("+", "k", un("exp", sub(masked, m)))))))
    guards = [n for _, n in s.graph.items() if n.op == "un" and n.attr == "exp" and n.why == "break-dependency"]
    assert [s.graph.interval(n.args[0]) for n in guards] == [(0.0, 0.0)]


def normalised(t: Term, k: str, n: int) -> Term:
    return div(t, un("sqrt", add(mul(red("+", k, mul(t, t)), 1 / n), 1e-6)))


def test_norm_bound() -> None:
    """Cauchy–Schwarz: normalised vectors have bounded products, also scaled; an unknown weight leaves none."""
    q, k, w = x("q", "a", "d"), x("r", "k", "d"), x("w", "d")
    dot = red("+", "d", mul(normalised(q, "d", 4), normalised(k, "d", 4)))
    lo, hi = interval(mul(0.5, dot))
    assert hi == pytest.approx(2.0, rel=1e-6) and lo == pytest.approx(-2.0, rel=1e-6)
    weighted = red("+", "d", mul(mul(normalised(q, "d", 4), w), normalised(k, "d", 4)))
    assert interval(weighted) == (-math.inf, math.inf)
    lo, hi = interval(weighted, w=(-3.0, 2.0))
    assert hi == pytest.approx(12.0, rel=1e-6)


def test_facts() -> None:
    k = x("x", "k", "a")
    e = un("exp", sub(k, red("max", "k", k)))
    weights = div(e, red("+", "k", e))
    s = saturate(program(weights, bounds={"x": (-1e30, 1e30)}))
    (c,) = s.graph.outputs
    assert s.graph.has(c, "finite") and s.graph.has(c, "nonzero") and s.graph.has(c, "source")
    s = saturate(program(weights))
    assert not s.graph.has(s.graph.outputs[0], "finite"), "a score may be −∞ in a whole row"
    assert s.graph.has(next(c for c, n in s.graph.items() if n.op == "input"), "masked")
    s = saturate(program(add(weights, red("+", "k", mul(k, k)))))
    assert s.graph.has(next(c for c, n in s.graph.items() if n.op == "input"), "finite"), "what is multiplied is no score"


# ------------------------------------------------------------------ explanations


def test_explain_names_rules_in_order() -> None:
    p = traced("prefill_global")
    s = saturate(p)
    g = s.graph
    chosen = {c: next((n for n in ns if n.op == "fold"), ns[0]) for c, ns in g.nodes.items()}
    (c,) = g.outputs
    chosen[c] = next(n for n in g.nodes[c] if n.op == "mul" and any(m.op == "fold" for a in n.args for m in g.nodes[a]))
    steps = explain(s, {c: (n,) for c, n in chosen.items()})
    names = [name for name, _, _ in steps]
    laws = {r.name: r.law for r in RULES}
    assert "break-dependency" in names and names.index("break-dependency") < len(names) - 1
    assert all(law == laws[name] and "  =  " in text for name, law, text in steps)


def test_explain_of_the_source_is_empty() -> None:
    p = traced("prefill_global")
    s = saturate(p, rules=())
    assert explain(s, {c: ns[:1] for c, ns in s.graph.nodes.items()}) == []


THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import eqsat_neptune as en

xp, T = en.xp, en.TensorSpec

def job(i, spec=T(("n", 5))):
    k = en.optimize(en.trace(lambda x: xp.softmax(x) * (i + 1), spec))
    x = np.linspace(-1, 1, 5 * (3 + i), dtype=np.float32).reshape(3 + i, 5)
    e = np.exp(x)
    np.testing.assert_allclose(k(x), e / e.sum(-1, keepdims=True) * (i + 1), rtol=1e-5)
    return k

if sys.argv[1] == "warm":  # an engine of the main thread is idle
    en.optimize(en.trace(lambda x: xp.softmax(x), T((3, 5))))
with ThreadPoolExecutor(3) as several:
    kernels = list(several.map(job, range(4)))
with ThreadPoolExecutor(1) as another:
    kernels += another.map(job, (4, 5))
for k in kernels:
    k(np.ones((2, 5), np.float32))
done = threading.Event()
threading.Thread(target=lambda: (job(6), done.set(), threading.Event().wait()), daemon=True).start()
assert done.wait(60)
print("fine")
"""


@pytest.mark.parametrize("start", ["cold", "warm"])
def test_engines_stay_in_their_threads(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that search at once, one after another, and one that still runs at exit: egglog complains on stderr of an engine
    that is used or dropped elsewhere than where it was made."""
    monkeypatch.setenv("EQSAT_NEPTUNE_CACHE", str(tmp_path))
    r = subprocess.run([sys.executable, "-c", THREADS, start], capture_output=True, text=True, timeout=120)
    assert (r.stdout, r.stderr, r.returncode) == ("fine\n", "", 0)
