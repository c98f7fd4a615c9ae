"""`verify`: every form of a compilation is compared, and each of them being wrong alone is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import eqsat_neptune.extraction
import numpy as np
import pytest
from eqsat_neptune.codegen.cuda import emulate
from eqsat_neptune.codegen.tile import Loop, Map, TileProgram
from eqsat_neptune.rules import RULES, Rule
from sweeps import some

import eqsat_neptune as en
from eqsat_neptune import TensorSpec, egraph, forms, resizing, verification
from eqsat_neptune.errors import EqsatError
from eqsat_neptune.kernel import Kernel, Record
from eqsat_neptune.program import Program
from eqsat_neptune.programs import CASES
from eqsat_neptune.runtime import cpu
from eqsat_neptune.targets import parse_target
from eqsat_neptune.terms import mul, postorder

OPERATORS = [c for c in CASES.values() if c.section == "A"]
GPU = "cuda:sm_80"
needs_compiler = pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler for the emulator")


def attention(q: Any, k: Any, v: Any) -> Any:
    xp = q.__array_namespace__()
    s = q @ k.mT / q.shape[-1] ** 0.5
    p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
    return (p / xp.sum(p, axis=-1, keepdims=True)) @ v


def traced(n: int = 1000, dtype: str = "bfloat16", fn: Callable[..., Any] = attention) -> Program:
    p = en.trace(fn, *[TensorSpec((2, n, 32), dtype)] * 3)
    assert isinstance(p, Program)
    return p


# ------------------------------------------------------------------ what is right


@needs_compiler
@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a", "hip:gfx942"])
@pytest.mark.parametrize("case", some(OPERATORS, OPERATORS[::4]), ids=lambda c: c.name)
def test_operators_at_full_size(case: Any, target: str) -> None:
    program = en.trace(case.function("full"), *case.specs("full", "bfloat16"))
    kernel = en.optimize(program, target)
    start = sum(os.times()[:4])  # the C++ compiler included
    verdict = en.verify(program, kernel)
    spent = sum(os.times()[:4]) - start
    assert verdict, verdict.counterexample
    said = verdict.evidence
    assert "e-nodes" in said and "source term" in said and "extracted term agrees" in said and "tile program agrees" in said
    assert ("emitted kernel agrees with float64" if target == "cpu" else "(emulator)") in said
    assert "blocks" in said or target == "cpu" or case.name.startswith("prefill")  # decode is split, here unevenly
    assert spent < 5


def test_a_kernel_that_is_small_enough_runs_as_it_is() -> None:
    p = traced(40, "float32")
    assert "; kernel agrees with float64" in en.verify(p, en.optimize(p)).evidence


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "host_compiler", lambda: None)
    p = traced()
    verdict = en.verify(p, en.optimize(p, GPU))
    assert verdict and "emitted kernel not run: no GPU of this architecture and no C++ compiler" in verdict.evidence


@pytest.mark.parametrize("name", ["layernorm", "variance", "cross_entropy", "kmeans_assign", "gated_linear_attention", "performer"])
def test_plans_of_every_kind_at_other_extents(name: str) -> None:
    """Counts that sums are divided by, gathers, positions, strides, temporaries."""
    case = CASES[name]
    program = en.trace(case.function("full"), *case.specs("full"))
    verdict = en.verify(program, en.optimize(program, "cuda:sm_90a"))
    assert verdict, verdict.counterexample
    assert "extracted term agrees" in verdict.evidence and "tile program agrees" in verdict.evidence


# ------------------------------------------------------------------ what is wrong


def test_a_wrong_e_node() -> None:
    wrong = Rule("wrong", "", "(sum k (mul x y))", "(mul (sum k x) (sum k y))")
    p = traced()
    verdict = en.verify(p, en.optimize(p), rules=(*RULES, wrong))
    assert not verdict and "has a node of another value" in str(verdict.counterexample)
    with pytest.raises(EqsatError, match="verification failed: class"):
        en.optimize(p, rules=(*RULES, wrong), verify=True)


def test_a_source_term_that_is_not_in_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    saturate = egraph.saturate

    def misplaced(*args: Any, **options: Any) -> Any:
        s = saturate(*args, **options)
        other = next(c for c in s.graph.nodes if c not in s.graph.outputs and s.graph.free[c] == s.graph.free[s.graph.outputs[0]])
        return replace(s, graph=replace(s.graph, outputs=(other,)))

    p = en.trace(lambda x: en.xp.exp(x) + 1.0, TensorSpec((30, 20)))
    kernel = en.optimize(p)
    monkeypatch.setattr(egraph, "saturate", misplaced)
    verdict = en.verify(p, kernel)
    assert not verdict and "is not the value of its class" in str(verdict.counterexample)


@pytest.mark.parametrize("target", ["cpu", GPU])
def test_a_wrong_extracted_term(target: str) -> None:
    p = traced()
    k = en.optimize(p, target)
    plan = k.plan
    first, *rest = plan.kernels
    stores = (replace(first.stores[0], term=mul(1.001, first.stores[0].term)), *first.stores[1:])
    bad = replace(plan, kernels=(replace(first, stores=stores), *rest))
    verdict = en.verify(p, Kernel(Record(k.program, parse_target(target), bad)))
    assert not verdict and str(verdict.counterexample).startswith("extracted term: error")


@pytest.mark.parametrize("target", ["cpu", GPU])
def test_a_wrong_tile_program(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = forms.lower

    def without_rescaling(*args: Any) -> TileProgram:
        def f(body: Any) -> Any:
            out = []
            for s in body:
                if isinstance(s, Loop):
                    s = replace(s, body=f(s.body))
                elif isinstance(s, Map) and s.role == "rescale" and s.fn == "exp":
                    s = replace(s, fn="cos")  # 1 at 0, and well-formed
                out.append(s)
            return tuple(out)

        p = lower(*args)
        return replace(p, body=f(p.body))

    p = traced()
    k = en.optimize(p, target)
    monkeypatch.setattr(forms, "lower", without_rescaling)
    verdict = en.verify(p, k)
    assert not verdict and str(verdict.counterexample).startswith("tile program: ")


@needs_compiler
@pytest.mark.parametrize("target", [GPU, "cuda:sm_90a", "hip:gfx942"])
def test_a_wrong_emitted_kernel(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emit = emulate.emit

    def slightly_off(*args: Any, **options: Any) -> Any:
        source = emit(*args, **options)
        at = source.text.index("// kernel k0")
        changed = source.text[at:].replace("exp2_fast(", "exp2_fast(0.9f * ")
        assert changed != source.text[at:]
        return replace(source, text=source.text[:at] + changed)

    p = traced()
    k = en.optimize(p, target)
    monkeypatch.setattr(emulate, "emit", slightly_off)
    verdict = en.verify(p, k)
    assert not verdict and str(verdict.counterexample).startswith("emitted kernel: error")


def test_a_wrong_kernel_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(cpu.CpuRunner):
        def __call__(self, arrays: Any, stream: Any) -> list[np.ndarray]:
            (out,) = super().__call__(arrays, stream)
            out[..., -1, -1] *= 2
            return [out]

    p = traced()
    k = en.optimize(p)
    monkeypatch.setattr(cpu, "CpuRunner", Wrong)
    verdict = en.verify(p, k)
    assert not verdict and str(verdict.counterexample).startswith("emitted kernel: error")


def test_a_kernel_of_another_program() -> None:
    p, other = traced(), traced(fn=lambda q, k, v: attention(q, k, 2.0 * v))
    with pytest.raises(EqsatError, match="made from another program"):
        en.verify(p, en.optimize(other))
    small, other = traced(20), traced(20, fn=lambda q, k, v: attention(q, k, 2.0 * v))
    assert not en.verify(small, en.optimize(other)) and en.verify(small, en.optimize(small))


# ------------------------------------------------------------------ the same at other extents


def test_means_stay_means() -> None:
    p = en.trace(lambda x: x - en.xp.mean(x, axis=(-1, -2), keepdims=True), TensorSpec((4, 300, 500)))
    assert isinstance(p, Program)
    small = resizing.resized(p, lambda group: 7 if len(group) == 1 else 5)
    x = np.random.default_rng(0).standard_normal(small.inputs[0].shape).astype(np.float32)
    assert np.allclose(en.evaluate(small, x), x - x.mean((-1, -2), keepdims=True), atol=1e-6)


def test_what_ties_extents_together_is_kept() -> None:
    p = en.trace(lambda x: x.reshape(6, 50, 80)[:, 3:, ::2], TensorSpec((300, 80)))
    assert isinstance(p, Program)
    small = resizing.resized(p, lambda group: 2)
    assert small.outputs[0].shape == (2, 47, 40) or small.outputs[0].shape[1:] == (47, 40)
    x = np.arange(np.prod(small.inputs[0].shape), dtype=np.float32).reshape(small.inputs[0].shape)
    assert en.evaluate(small, x).shape == small.outputs[0].shape


def test_small_instances_split_unevenly() -> None:
    p = en.trace(attention, *[TensorSpec((1, 1 if n == 0 else 100_000, 32)) for n in range(3)])
    assert isinstance(p, Program)
    plan = en.optimize(p, "cuda:sm_90a").plan
    (split,) = resizing.blocks_of(plan)
    small, again = verification._with_small_tiles(p, plan, set())
    (block,) = resizing.blocks_of(again).values()
    assert small.axes[split] % block and all(small.axes[a] < n for a, n in p.axes.items())
    assert not any(t.op == "input" and t.attr[0] not in again.buffers for k in again.kernels for s in k.stores for t in postorder([s.term]))
