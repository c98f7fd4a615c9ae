"""The fuzzer: the same cases from the same seed, planted faults found and shrunk, the corpus replayed, a run taken up again."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eqsat_neptune.codegen.cuda.emulate import host_compiler
from eqsat_neptune.rules import RULES, Rule

from eqsat_neptune import xp
from eqsat_neptune.errors import EqsatError
from eqsat_neptune.runtime import cpu
from eqsat_neptune.runtime.checked import image
from eqsat_neptune.testing import cases, fuzz
from eqsat_neptune.testing.cases import Case, Outcome, difference, run
from eqsat_neptune.testing.drawing import draw, mutate
from eqsat_neptune.testing.fuzz import Fuzzer, alone, keep, load, main, shrink
from eqsat_neptune.testing.layers import draw_products
from eqsat_neptune.testing.operands import KINDS, LAYOUTS, Operand, drawn, laid_out
from eqsat_neptune.testing.rounding import reference
from eqsat_neptune.testing.statements import FUNCTIONS, REDUCTIONS, ROWWISE, Call, Statements

CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
SOFTMAX = Statements(
    (Operand((3, 5)), Operand((5, 4))),
    (
        Call("max", ("x0",), (("axis", -1), ("keepdims", True))),
        Call("subtract", ("x0", "v0")),
        Call("exp", ("v1",)),
        Call("sum", ("v2",), (("axis", -1), ("keepdims", True))),
        Call("divide", ("v2", "v3")),
        Call("matmul", ("v4", "x1")),
    ),
    ("v5",),
)


def found_by(fuzzer: Fuzzer, most: int) -> tuple[Case, Outcome]:
    for _ in range(most):
        if found := fuzzer.step():
            return found
    raise AssertionError(f"nothing found: {fuzzer}")


# ------------------------------------------------------------------ programs as data


def test_programs_survive_json_and_fit_together() -> None:
    for seed in range(60):
        r = random.Random(seed)
        s = draw(r)
        for p in (s, mutate(r, s)):
            assert Statements.from_json(json.loads(json.dumps(p.to_json()))) == p
            assert p.trace().outputs


def test_programs_are_biased_towards_chains_of_reductions() -> None:
    def depth(s: Statements) -> int:
        deep: dict[str, int] = {}
        for n, c in enumerate(s.calls):
            deep[f"v{n}"] = max((deep.get(a, 0) for a in c.names()), default=0) + (c.fn in REDUCTIONS) + 2 * (c.fn in ROWWISE)
        return max(deep.values(), default=0)

    chained = sum(depth(draw(random.Random(seed))) > 1 for seed in range(100))
    assert chained > 40


def test_all_that_the_front_has_is_drawn() -> None:
    """What programs are made of, and what is left out of them by compaction only."""
    inputs: list[Operand] = []
    calls: list[Call] = []
    for seed in range(400):
        r = random.Random(seed)
        for s in (draw(r, "float32"), draw_products(r, "float16")):
            inputs += s.inputs
            calls += s.calls
    functions = {c.fn for c in calls}
    assert {i.layout for i in inputs} == set(LAYOUTS) and {i.kind for i in inputs} >= set(KINDS)
    assert {i.dtype for i in inputs} >= {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"}
    assert sum(i.dtype == "bool" and i.kind == "padding" for i in inputs) > 10
    assert {"top_k", "argmax", "argmin", "take", "take_along_axis", "concat", "stack", "pad", "einsum"} <= functions
    assert len(FUNCTIONS - functions) < 20, FUNCTIONS - functions
    slices = [k for c in calls if c.fn == "getitem" for k in dict(c.options)["index"] if isinstance(k, list)]
    assert sum((k[2] or 1) < -1 for k in slices) > 5 and sum((k[2] or 1) > 1 for k in slices) > 5
    assert any("@1" in dict(c.options)["index"] for c in calls if c.fn == "getitem")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_layouts_keep_the_values(dtype: str) -> None:
    x = drawn(Operand((3, 4), dtype, "normal"), 1, 0, False)
    for layout in LAYOUTS:
        y = laid_out(x, layout)
        assert y.dtype == x.dtype and y.shape == x.shape
        same = x[:1] if layout == "repeated rows" else x[:, :1] if layout == "repeated columns" else x
        assert np.array_equal(y.astype(float), np.broadcast_to(same, x.shape).astype(float)), layout
        assert np.array_equal(laid_out(y, layout).astype(float), y.astype(float))  # as a printed program does
    size = x.itemsize
    assert [laid_out(x, n).strides for n in ("strided", "reversed", "reversed rows", "turned", "repeated rows")] == [
        (8 * size, 2 * size), (4 * size, -size), (-4 * size, size), (size, 3 * size), (0, size)
    ]  # fmt: skip
    assert laid_out(x, "offset").ctypes.data % (2 * size) and laid_out(x, "padded").strides == (7 * size, size)


@pytest.mark.parametrize("layout", [*LAYOUTS, "one number", "nothing"])
def test_layouts_are_kept_in_copies_of_memory(layout: str) -> None:
    """What goes to a GPU for a check: the same elements at the same strides and alignment."""
    shape = {"one number": (), "nothing": (3, 0)}.get(layout, (3, 4))
    x = laid_out(drawn(Operand(shape, "bfloat16"), 1, 0, False), layout)
    memory, offset = image(x)
    again = np.lib.stride_tricks.as_strided(memory[offset : offset + x.itemsize].view(x.dtype), x.shape, x.strides)
    assert np.array_equal(again.astype(float), x.astype(float))
    assert x.size == 0 or offset % 16 == x.ctypes.data % 16


def test_padding_hides_whole_rows_and_none() -> None:
    masks = [drawn(Operand((5, 7), "bool", "padding"), seed, 0, False) for seed in range(20)]
    assert any((~m).all(axis=1).any() for m in masks) and any(m.all(axis=1).any() for m in masks)
    assert all((np.diff(m.astype(int), axis=1) <= 0).all() for m in masks)
    scores = drawn(Operand((5, 7), "float32", "padding"), 1, 0, True)
    assert set(np.unique(scores)) == {-np.inf, 0.0}
    positions = drawn(Operand((50,), "int8", "below 3"), 1, 0, False)
    assert set(positions) == {0, 1, 2}


def test_programs_written_before_layouts_are_read_as_they_were() -> None:
    old = {"inputs": [[[3, 5], "float32", "masked"]], "calls": [["max", ["x0"], {"axis": -1}]], "outputs": ["v0"]}
    program = Statements.from_json(old)
    assert program.inputs == (Operand((3, 5), "float32", "masked", "packed"),) and program.to_json() == old


@pytest.mark.parametrize(
    "change",
    [
        {"calls": [["__class__", ["x0"], {}]]},
        {"calls": [["exp", ["v0"], {}]]},
        {"calls": [["exp", [{"a": 1}], {}]]},
        {"outputs": ["v9"]},
        {"inputs": [[[-1], "float64", "normal"]]},
        {"inputs": [[[2], "object", "normal"]]},
        {"inputs": [[[2], "float64", "below 3"]]},
        {"inputs": [[[2], "int32", "below 0"]]},
        {"inputs": [[[2], "float64", "normal", "upside down"]]},
        {"inputs": [[[2], "float64", "normal", "packed", "more"]]},
        {"calls": [["getitem", ["x0"], {"index": ["@1"]}]]},
        {"calls": [["getitem", ["x0"], {"index": [[None, None]]}]]},
        {"calls": [["getitem", ["x0"], {"index": ["__class__"]}]]},
        {"calls": [["getitem", ["x0"], {}]]},
        {"calls": [["linalg.__init__", ["x0"], {}]]},
    ],
)
def test_data_that_is_no_program_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a"):
        Statements.from_json(SOFTMAX.to_json() | change)


ALL_FORMS = Statements(
    (
        Operand((4, 6), "float32", "nans", "reversed"),
        Operand((3,), "int32", "below 4", "strided"),
        Operand((6,), "bool", "padding"),
        Operand((4, 6), "bfloat16", "spikes", "repeated columns"),
    ),
    (
        Call("getitem", ("x0", "x1"), (("index", ["@1", [None, None, -2]]),)),
        Call("getitem", ("x2",), (("index", [[None, None, 2]]),)),
        Call("where", ("v1", "v0", -math.inf)),
        Call("top_k", ("v2", 2), (("axis", -1),)),
        Call("getitem", ("v3",), (("index", [1]),)),
        Call("getitem", ("x3",), (("index", ["...", 0, None]),)),
        Call("einsum", ("v5", "v0"), (("subscripts", "ij,kl->ik"),)),
        Call("pad", ("v6",), (("pad_width", [0, 1]), ("constant_values", 1))),
        Call("astype", ("v7",), (("dtype", "float32"),)),
    ),
    ("v4", "v8"),
)


@pytest.mark.parametrize("program", [SOFTMAX, ALL_FORMS])
def test_the_printed_program_runs(program: Statements, tmp_path: Path) -> None:
    path = tmp_path / "case.py"
    path.write_text(str(Case(program, seed=3)), encoding="utf-8")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("ok in cpu")


# ------------------------------------------------------------------ cases


def test_a_case_says_what_it_saw() -> None:
    outcome = run(Case(SOFTMAX, split=1, schedule=5))
    assert outcome.kind == "ok", outcome
    assert any(c.startswith("rule break-dependency") for c in outcome.coverage)
    assert any(c.startswith("cpu Contract") for c in outcome.coverage)


@pytest.mark.parametrize("target", ["cuda:sm_80", "hip:gfx942"])
def test_emulated_targets(target: str) -> None:
    if cases_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    small = Statements((Operand((3, 5), "float32"),), (Call("softmax", ("x0",), (("axis", -1),)),), ("v0",))
    outcome = run(Case(small, target=target))
    assert outcome.kind == "ok", outcome
    assert any(" as " in c for c in outcome.coverage)


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is in memory")
def test_emulated_kernels_are_unloaded() -> None:
    """A run of the fuzzer loads thousands of them, each with the stacks of its threads."""
    small = Statements((Operand((3, 5), "float32"),), (Call("exp", ("x0",)),), ("v0",))

    def mapped() -> tuple[int, int]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ends = [[int(n, 16) for n in line.split()[0].split("-")] for line in lines]
        return sum("kernel.so" in line for line in lines), sum(b - a for a, b in ends)

    run(Case(small, target="cuda:sm_80"))
    loaded, before = mapped()
    for seed in range(3):
        assert run(Case(small, seed, target="cuda:sm_80")).kind == "ok"
    assert mapped()[0] == loaded and mapped()[1] < before + (1 << 28)


def cases_compiler() -> str | None:
    from eqsat_neptune.codegen.cuda.emulate import host_compiler

    return host_compiler()


def test_bounds_tell_rounding_from_faults() -> None:
    want, bound = np.array([1.0, np.inf, np.nan, 2.0]), np.array([1e-15, 0.0, 0.0, np.inf])
    assert difference(want, bound, np.array([1.0 + 1e-15, np.inf, np.nan, 7.0]), "float64") is None
    for n, wrong in enumerate([1.001, 3.0, 0.0]):
        got = want.copy()
        got[n] = wrong
        assert difference(want, bound, got, "float64")


@pytest.mark.skipif(not hasattr(cases.signal, "SIGPROF"), reason="no timers of CPU time")
def test_a_case_that_never_ends_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(*_: object, **__: object) -> None:
        while True:
            pass

    monkeypatch.setattr(cases, "extract", forever)
    outcome = run(Case(SOFTMAX), limit=0.5)
    assert (outcome.kind, outcome.stage) == ("hang", "extraction")


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler on this machine")
def test_random_pipelines_are_reached() -> None:
    """Most chains of products for sm_90a run as pipelines of warpgroups, by schedules that differ, and their cases are kept."""
    seen: set[str] = set()
    count = 0
    for n in (7, 10, 12, 13, 16, 33):
        r = random.Random(n)
        outcome = run(Case(draw_products(r, "bfloat16"), seed=n, target="cuda:sm_90a", pipeline=n + 1))
        assert not outcome.faulty, outcome
        count += "cuda:sm_90a as Pipeline" in outcome.coverage
        seen |= outcome.coverage
    assert count >= 4
    assert {"pipeline products 1 1", "pipeline warpgroups 1"} <= seen and len([s for s in seen if s.startswith("pipeline order")]) > 1


def test_drawn_products_fit_together_and_reach_each_target() -> None:
    for n in range(40):
        draw_products(random.Random(n), "float16").trace()
    f = Fuzzer(1, targets=("cuda", "hip"))
    drawn = [f.case(n) for n in range(60)]
    assert {c.target for c in drawn} == {"cuda:sm_80", "cuda:sm_90a", "hip:gfx942", "hip:gfx1100"}
    piped = [c for c in drawn if c.pipeline]
    assert piped and all(c.target == "cuda:sm_90a" for c in piped)
    assert [f.case(n) for n in range(60)] == drawn


def test_pipelines_are_shrunk_away_where_they_play_no_part() -> None:
    start = Case(SOFTMAX, target="cuda:sm_90a", pipeline=5)
    case, _ = shrink(start, Outcome("crash", "run"), lambda case: Outcome("crash" if case.program.calls else "ok", "run"))
    assert not case.pipeline and case.target == "cuda:sm_90a"
    kept, _ = shrink(start, Outcome("crash", "run"), lambda case: Outcome("crash" if case.pipeline else "ok", "run"))
    assert kept.pipeline == 5 and Case.from_json(json.loads(json.dumps(kept.to_json()))) == kept


def test_a_nan_may_vanish_but_not_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """x − x may become 0 though an x is NaN, and then what it is compared with sees 0.  A maximum is NaN if one of its elements is, and
    a row without NaN does not become NaN."""
    x = (Operand((4, 6), kind="nans"),)
    last = (("axis", -1),)
    gone = Statements(x, (Call("subtract", ("x0", "x0")), Call("all", ("v0",), last)), ("v0", "v1"))
    calls = (Call("sum", ("x0",), last), Call("max", ("x0",), last), Call("argmax", ("x0",), last))
    rows = Statements(x, calls, ("v0", "v1", "v2"))
    seed = next(s for s in range(99) if 0 < np.isnan(cases.arrays(Case(rows, s), rows.trace())[0]).any(axis=1).sum() < 4)
    for program in (gone, rows):
        outcome = run(Case(program, seed))
        assert outcome.kind == "ok", outcome

    def changed(number: int, change: Any) -> type[cpu.CpuRunner]:
        class Wrong(cpu.CpuRunner):
            def __call__(self, arrays: Any, stream: Any) -> list[np.ndarray]:
                return [change(o) if n == number else o for n, o in enumerate(super().__call__(arrays, stream))]

        return Wrong

    true = cpu.CpuRunner
    for number, change in [(0, lambda o: np.full_like(o, np.nan)), (1, lambda o: np.nan_to_num(o)), (2, lambda o: 0 * o)]:
        monkeypatch.setattr(cpu, "CpuRunner", changed(number, change))
        assert run(Case(rows, seed)).kind == "disagreement", number
        monkeypatch.setattr(cpu, "CpuRunner", true)


def test_what_is_read_beyond_an_axis_is_nan_on_a_gpu_and_an_error_on_the_cpu() -> None:
    rows = Statements(
        (Operand((5, 6), "float32"), Operand((4,), "int32", "below 7")),
        (Call("take", ("x0", "x1"), (("axis", 0),)), Call("max", ("v0",), (("axis", -1),))),
        ("v1",),
    )
    seed = next(s for s in range(99) if set(cases.arrays(Case(rows, s), rows.trace())[1] > 4) == {True, False})
    program = rows.trace()
    values = cases.arrays(Case(rows, seed), program)
    (want,), (bound,) = reference(program, values, stray=True)
    assert np.array_equal(np.isnan(want), values[1] > 4) and np.isfinite(bound).all()
    outcome = run(Case(rows, seed))
    assert outcome.kind == "refused" and "out of range" in outcome.text
    if cases_compiler() is not None:
        outcome = run(Case(rows, seed, target="cuda:sm_80"))
        assert outcome.kind == "ok", outcome


# ------------------------------------------------------------------ planted faults


def test_a_wrong_rule_is_found_and_shrunk() -> None:
    wrong = Rule("wrong", "", "(sum k (mul x y))", "(mul (sum k x) (sum k y))")
    case, outcome = found_by(Fuzzer(1, rules=(*RULES, wrong)), 60)
    assert outcome.kind == "disagreement" and outcome.stage == "e-graph"
    assert len(case.program.calls) <= 3, case.program
    assert run(case).kind == "ok"  # without the rule


def test_a_wrong_kernel_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(cpu.CpuRunner):
        def __call__(self, arrays: Any, stream: Any) -> list[np.ndarray]:
            outs = super().__call__(arrays, stream)
            return [np.where(o == o.max(), o + 1e-3, o) if o.ndim == 1 and o.dtype.kind == "f" else o for o in outs]

    monkeypatch.setattr(cpu, "CpuRunner", Wrong)
    case, outcome = found_by(Fuzzer(2), 60)
    assert outcome.stage == "cpu values"
    assert len(case.program.calls) <= 2, case.program


def test_an_unexpected_exception_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = cases.lower

    def fails(kernel: Any, *args: Any) -> Any:
        program = lower(kernel, *args)
        if "exp" in str(program):
            raise KeyError("exp")
        return program

    monkeypatch.setattr(cases, "lower", fails)
    case, outcome = found_by(Fuzzer(3), 60)
    assert (outcome.kind, outcome.stage) == ("crash", "lowering")
    assert [c.fn for c in case.program.calls] in (["exp"], ["silu"], ["softmax"], ["log_softmax"], ["logsumexp"])


def test_shrinking_keeps_the_fault() -> None:
    """Fails where there is a division: nothing else must be left, and options play no part."""

    def runs(case: Case) -> Outcome:
        bad = any(c.fn == "divide" for c in case.program.calls)
        return Outcome("crash" if bad else "ok", "run")

    start = Case(SOFTMAX, seed=9, split=1, schedule=2, without=("split-fold", "push-max"))
    case, outcome = shrink(start, runs(start), runs)
    assert [c.fn for c in case.program.calls] == ["divide"] and outcome.faulty
    assert all(np.prod(i.shape) == 1 for i in case.program.inputs)
    assert case == Case(case.program)


@pytest.mark.parametrize(
    "needed, left",
    [
        ("steps back", [Call("getitem", ("x0",), (("index", [[None, None, -1], [None, None, None]]),))]),
        ("best of several", [Call("top_k", ("x0", 1), (("axis", -1),)), Call("getitem", ("v0",), (("index", [1]),))]),
        ("lies backwards", []),
        ("takes positions", [Call("take", ("x0", "x1"), (("axis", -1),))]),
    ],
)
def test_new_forms_shrink_to_simpler_ones(needed: str, left: list[Call]) -> None:
    start = Statements(
        (Operand((6, 8), "float16", "spikes", "reversed"), Operand((5,), "int16", "below 5", "strided")),
        (
            Call("getitem", ("x0",), (("index", [[-2, None, -2], "...", [1, 6, 2]]),)),
            Call("take", ("x0", "x1"), (("axis", 0),)),
            Call("top_k", ("v1", 3), (("axis", -1),)),
            Call("getitem", ("v2",), (("index", [0]),)),
            Call("getitem", ("v2",), (("index", [1]),)),
            Call("sum", ("v0",)),
            Call("add", ("v5", "v3")),
            Call("add", ("v6", "v4")),
        ),
        ("v7",),
    )

    def runs(case: Case) -> Outcome:
        p = case.program
        steps = [k[2] or 1 for c in p.calls if c.fn == "getitem" for k in dict(c.options)["index"] if isinstance(k, list)]
        bad = {
            "steps back": any(s < 0 for s in steps),
            "best of several": any(c.fn == "top_k" for c in p.calls),
            "lies backwards": any(i.layout == "reversed" for i in p.inputs),
            "takes positions": any(c.fn == "take" for c in p.calls),
        }[needed]
        return Outcome("crash" if bad else "ok", "run")

    case, _ = shrink(Case(start), Outcome("crash", "run"), runs)
    assert [c.fn for c in case.program.calls] == [c.fn for c in left], case.program
    if needed == "steps back":
        (index,) = [dict(c.options)["index"] for c in case.program.calls]
        assert [None, None, -1] in index and all(k in ([None, None, -1], [None, None, None], "...") for k in index)
    if needed == "best of several":
        assert case.program.calls[0].args[1] == 1
    plain = [i for i in case.program.inputs if i.layout == "packed"]
    assert len(plain) == len(case.program.inputs) - (needed == "lies backwards")
    assert all(i.dtype in ("float64", "int64") and i.kind in ("normal", "below 1") for i in case.program.inputs)


def test_a_function_that_cannot_be_traced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("max")

    monkeypatch.setattr(xp, "max", fails)
    case, outcome = found_by(Fuzzer(3), 60)
    assert (outcome.kind, outcome.stage) == ("crash", "trace")
    assert [c.fn for c in case.program.calls] == ["max"]


# ------------------------------------------------------------------ runs


def test_the_same_seed_gives_the_same_run() -> None:
    def record() -> tuple[Any, ...]:
        f = Fuzzer(7)
        for _ in range(8):
            f.step()
        return f.queue, f.coverage, f.figures.refused, list(f.faults)

    assert record() == record()
    assert Fuzzer(7).case(0) != Fuzzer(8).case(0)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    whole = Fuzzer(5)
    for _ in range(8):
        whole.step()
    first = Fuzzer(5, folder=tmp_path)
    for _ in range(4):
        first.step()
    first.save()
    second = Fuzzer(5, folder=tmp_path)
    assert second.figures.tried == 4
    for _ in range(4):
        second.step()
    assert (second.queue, second.coverage) == (whole.queue, whole.coverage)
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]  # nothing half written


def test_a_process_that_died_leaves_its_case_as_a_fault(tmp_path: Path) -> None:
    f = Fuzzer(5, folder=tmp_path)
    f.step()
    last = load(tmp_path / "running-5-cpu.json")
    again = Fuzzer(5, folder=tmp_path)
    found = again.recover(lambda case: Outcome("crash" if case == last else "ok", "process", "exit -11"))
    assert found == (last, Outcome("crash", "process", "exit -11")) and again.figures.tried == 2
    assert [load(p) for p in (tmp_path / "faults").glob("*.json")] == [last]
    assert [c for c, _ in Fuzzer(5, folder=tmp_path).faults.values()] == [last]
    assert again.recover(lambda case: Outcome("crash", "process")) is None  # once is enough


def test_what_ends_while_it_recovers_is_not_forgotten(tmp_path: Path) -> None:
    def ended(case: Case) -> Outcome:
        raise KeyboardInterrupt

    f = Fuzzer(5, folder=tmp_path)
    f.step()
    with pytest.raises(KeyboardInterrupt):
        Fuzzer(5, folder=tmp_path).recover(ended)
    again = Fuzzer(5, folder=tmp_path)
    assert again.figures.tried == 1
    assert again.recover(lambda case: Outcome("hang", "process")) and again.figures.tried == 2


def test_a_process_that_was_ended_is_no_fault(tmp_path: Path) -> None:
    f = Fuzzer(5, folder=tmp_path)
    f.step()
    again = Fuzzer(5, folder=tmp_path)
    assert again.recover(alone) is None and not again.faults and again.figures.lost == 1


def test_bad_states_and_arguments_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EqsatError, match="unknown target"):
        Fuzzer(targets=("tpu",))
    Fuzzer(0, folder=tmp_path).save()
    (tmp_path / "state-0-cpu.json").write_text("{}")
    with pytest.raises(EqsatError, match="not a state"):
        Fuzzer(0, folder=tmp_path)
    assert main(["--replay", str(tmp_path / "state-0-cpu.json")]) == 2
    assert "no case" in capsys.readouterr().err


def test_the_command_prints_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eqsat_neptune.testing.fuzz", "--seconds", "1", "--seed", "4", "--corpus", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 3), done.stderr
    assert "programs in" in done.stdout
    assert (tmp_path / "state-4-cpu.json").exists() and not list(tmp_path.glob("running*"))


@pytest.mark.slow
def test_jobs_have_streams_of_their_own_and_one_summary(tmp_path: Path) -> None:
    """One of them is killed on the way: it is started anew, and nothing is counted twice or forgotten."""
    command = [sys.executable, "-m", "eqsat_neptune.testing.fuzz", "--seconds", "14", "--jobs", "2", "--corpus", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        deadline = time.monotonic() + 60
        while not (states := [s for s in tmp_path.glob("state-0*.json") if load_state(s)["tried"]]) or len(states) < 2:
            assert time.monotonic() < deadline and p.poll() is None
            time.sleep(0.1)
        children = Path(f"/proc/{p.pid}/task/{p.pid}/children")
        if children.exists():
            os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        out, err = p.communicate(timeout=120)
    assert p.returncode in (0, 3), err
    states = sorted(tmp_path.glob("state-0*.json"))
    assert [s.name for s in states] == ["state-0-cpu.json", "state-0.1-cpu.json"]
    tried = [load_state(s)["tried"] for s in states]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tried"] == sum(tried) and all(tried) and summary["cpu_hours"] > 0 and f"{sum(tried)} programs" in out
    assert sum(summary["kinds"].values()) + summary["lost"] == summary["tried"] == sum(summary["targets"].values())
    assert Fuzzer(0).case(0) != Fuzzer(0, 1).case(0)


def load_state(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())["figures"])


def test_a_lost_device_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors of a kernel CUDA is lost to the process: shrinking takes others, and so does the next case."""
    lost = Outcome("refused", "cuda run", "DeviceError: running the kernels: CUDA error 700 (a kernel that ran before failed, and CUDA is lost")
    apart: list[Case] = []

    def elsewhere(case: Case) -> Outcome:
        apart.append(case)
        return replace(lost, kind="crash")

    monkeypatch.setattr(fuzz, "run", lambda *_: replace(lost, kind="crash"))
    monkeypatch.setattr(fuzz, "alone", elsewhere)
    f = Fuzzer(3)
    assert f.step() and f.broken and 0 < len(apart) <= fuzz.ALONE


def test_programs_without_inputs_stay_what_they_are() -> None:
    alone = Statements((), (), ())
    assert mutate(random.Random(0), alone) == alone


# ------------------------------------------------------------------ the corpus


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.stem)
def test_corpus(path: Path) -> None:
    case = load(path)
    if case.target != "cpu" and cases_compiler() is None:
        pytest.skip("no C++ compiler on this machine")
    outcome = run(case)
    if case.reason:
        assert outcome.faulty, f"no longer fails: take out its reason ({case.reason})"
        pytest.xfail(case.reason)
    assert not outcome.faulty, f"{outcome}\n\n{case}"


def test_kept_cases_are_read_back(tmp_path: Path) -> None:
    case = Case(SOFTMAX, seed=3, without=("split-fold",), reason="because")
    assert load(keep(tmp_path, case, Outcome("crash", "run"))) == case
