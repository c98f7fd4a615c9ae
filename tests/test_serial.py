"""Stored plans and programs: the same objects come back; anything else is refused."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from eqsat_neptune.codegen.serial import from_json, to_json
from eqsat_neptune.extraction.plan import Cost, Plan
from tile_kernels import SOFT, close, make_plan, moments, quotient, read, run

from eqsat_neptune import terms as T
from eqsat_neptune.program import Input, Output, Program
from eqsat_neptune.terms import Affine, Monoid, add, axis_index, bi, fold, iota, mul, num, red, sub, un, var, where


def sample() -> tuple[Plan, dict[str, np.ndarray]]:
    x = {"X": np.random.default_rng(0).standard_normal((5, 9)), "I": np.arange(5)}
    c = read("X", "i", "k")
    s = where(bi("le", iota("k"), iota("i")), c, num(-math.inf))
    rows = T.gather(read("X", "v", "k"), "v", read("I", "i"))
    outs = {
        "a": (quotient(fold(SOFT, 1, "k", [s, c]), fold(SOFT, 1, "k", [s, num(1.0)])), ("i",)),
        "b": (moments(3, "k", mul(c, 0.1)), ("i",)),
        "c": (red("+", "k", mul(rows, c)), ("i",)),
    }
    plan = make_plan([(outs, dict(i=("grid", 2), k=("loop", 4)))], dict(i=5, k=9, v=5), x)
    k = plan.kernels[0]
    cost = Cost(1.5e-6, {"dram": 1e-6}, "dram", {"why": ("x", 3, [1.5, None, {"deep": (True,)}])})
    return replace(plan, kernels=(replace(k, choices={"warps": 4, "shape": (64, 128), "safe": False}, cost=cost),)), x


def program() -> Program:
    q = T.inp("q", (axis_index("i"), Affine(3, (("d", -1), ("i", 2)))))
    x = T.view(red("max", "d", q), (("i", axis_index("j")),))
    term = add(x, un("tanh", T.inp("w", ())), num(-0.0), num(math.pi), num(math.inf))
    return Program(
        "f",
        (Input("q", (4, 4), "bfloat16", (-1.0, math.inf)), Input("w", (), "float64")),
        (Output(term, (("j",), ()), (4, 1), "float32"),),
        {"i": 4, "d": 4, "j": 4},
        True,
    )


def test_plans_and_programs_come_back() -> None:
    plan, x = sample()
    for value in (plan, plan.kernels[0], program()):
        text = to_json(value)
        back = from_json(text)
        assert back == value and type(back) is type(value)
        assert to_json(back) == text
    want = run(plan, x)
    for name, y in run(from_json(to_json(plan)), x).items():
        close(y, want[name])


def test_terms_come_back_as_the_same_objects() -> None:
    plan, _ = sample()
    for s, t in zip(plan.kernels[0].stores, from_json(to_json(plan)).kernels[0].stores):
        assert s.term is t.term


def test_derived_pivots_come_back() -> None:
    h = Monoid(
        ("max", ("fn", mul(var("y1"), un("recip", var("y0"))))),
        (((0, num(1.0)),), ((1, sub(var("r1"), var("R1"))), (0, num(0.1)))),
    )
    t = fold(h, 3, "k", [read("A", "k"), num(0.0), num(1.0), read("A", "k")])
    p = Program("f", (Input("A", (3,), "float32"),), (Output(t, ((),), (1,), "float32"),), {"k": 3})
    assert from_json(to_json(p)) == p


def test_large_shared_terms_stay_small() -> None:
    t = read("A", "i")
    for n in range(3000):  # 2³⁰⁰⁰ paths, and deeper than the interpreter's stack
        t = add(t, mul(t, float(n) + 0.5))
    p = Program("f", (Input("A", (3,), "float32"),), (Output(t, (("i",),), (3,), "float32"),), {"i": 3})
    start = time.perf_counter()
    text = to_json(p)
    assert from_json(text).outputs[0].term is t
    assert len(text) < 400_000 and time.perf_counter() - start < 5


def test_text_is_the_same_in_every_process() -> None:
    code = "import sys; sys.path.insert(0, 'tests'); import test_serial as t; print(t.to_json(t.sample()[0]))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in "12"
    }
    assert texts == {to_json(sample()[0]) + "\n"}


def mutations(x: object) -> list[object]:
    """Everything that one value in the tree could be replaced by."""
    return [v for v in (None, -1, "zzz", True, [x]) if not (v == x and type(v) is type(x))]


def paths(x: object, at: tuple = ()) -> list[tuple]:
    items = list(x.items()) if isinstance(x, dict) else list(enumerate(x)) if isinstance(x, list) else []
    return [at, *(p for k, v in items for p in paths(v, (*at, k)))]


@pytest.mark.parametrize("which", ["plan", "program"])
def test_damaged_text_is_refused_or_means_another_valid_value(which: str) -> None:
    value = sample()[0] if which == "plan" else program()
    whole = json.loads(to_json(value))
    refused = 0
    for path in paths(whole):
        old = whole
        for k in path:
            old = old[k]
        for new in mutations(old):
            bad = copy.deepcopy(whole) if path else new
            if path:
                at = bad
                for k in path[:-1]:
                    at = at[k]  # type: ignore[index]
                at[path[-1]] = new  # type: ignore[index]
            try:
                back = from_json(json.dumps(bad))
            except ValueError:
                refused += 1
                continue
            assert type(back) is type(value)
            assert from_json(to_json(back)) == back
    assert refused > 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "\x80\x04",
        '{"format":1}',
        "[" * 100_000,
        '{"format":3,"kind":"Plan","nodes":[],"value":{}}',
        '{"format":true,"kind":"Plan","nodes":[],"value":{}}',
        '{"format":1,"kind":"os.system","nodes":[],"value":{}}',
        '{"format":1,"kind":["Plan"],"nodes":[],"value":{}}',
        '{"format":1,"format":1,"kind":"Plan","nodes":[],"value":{}}',
        '{"format":1,"kind":"Plan","nodes":[],"value":{"kernels":[],"buffers":{},"compute_dtype":"float16"}}',
        '{"format":1,"kind":"Plan","nodes":[["num","0x1p+0",[0]]],"value":{"kernels":[],"buffers":{},"compute_dtype":"float32"}}',
        '{"format":1,"kind":"Plan","nodes":[["num",NaN,[]]],"value":{"kernels":[],"buffers":{},"compute_dtype":"float32"}}',
        '{"format":1,"kind":"Plan","nodes":[["eval","1",[]]],"value":{"kernels":[],"buffers":{},"compute_dtype":"float32"}}',
        '{"format":1,"kind":"Plan","nodes":[["un","exp",[0]]],"value":{"kernels":[],"buffers":{},"compute_dtype":"float32"}}',
    ],
)
def test_foreign_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(text)


def test_what_has_no_form_is_refused_when_written() -> None:
    plan, _ = sample()
    with pytest.raises(TypeError):
        to_json(replace(plan.kernels[0], choices={"x": object()}))
    with pytest.raises(TypeError):
        to_json(3)  # type: ignore[arg-type]


def test_reading_needs_no_egraph() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); sys.modules['egglog'] = None\n"
        "import test_serial as t\n"
        "plan, x = t.sample(); print(sorted(t.run(t.from_json(t.to_json(plan)), x)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['a', 'b', 'c']"
