"""One input of the fuzzer through all stages: traced, saturated under some rules, extracted, scheduled and run, each compared with
float64 evaluation of the source."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..codegen.check import check
from ..codegen.cuda.arch import cuda_arch
from ..codegen.cuda.emit import schedule_of
from ..codegen.cuda.emulate import EmulationError, emit_for, emulated, host_compiler, run_source
from ..codegen.hopper.pipeline import Pipeline
from ..codegen.lower import LoweringError, lower
from ..codegen.tile import Loop, Stmt, TileProgram, walk
from ..compiler import _settled
from ..cost_models import model_for
from ..egraph import Saturated, saturate
from ..engine import Limits
from ..errors import EqsatError, InputError, PlanError
from ..extraction.extract import extract
from ..extraction.plan import Axis, Kernel, Plan
from ..program import Program
from ..rules import RULES, Rule
from ..rules.joins import find
from ..runtime import checked
from ..scores import may_be_masked
from ..targets import Target, parse_target
from ..terms import postorder
from ..verification import space, work
from .graphs import check_graph
from .operands import drawn
from .pipelines import as_pipelines, seen
from .rounding import difference, reference, worst
from .statements import MOST_SPACE, Statements

TARGETS = {"cpu": ("cpu",), "cuda": ("cuda:sm_80", "cuda:sm_90a"), "hip": ("hip:gfx942", "hip:gfx1100")}
DEVICE = "EQSAT_NEPTUNE_FUZZ_DEVICE"
_MOST_VALUES = 1 << 24  # numbers that all e-nodes together may have, for their values to be compared
_MOST_WORK = 1 << 22  # elements of one term, of a program that has a larger space
_NODES = 3000  # of an e-graph, at which saturation stops: by size and not by time, so that a case runs the same everywhere


@dataclass(frozen=True)
class Case:
    """What to compile and how.

    seed       of the input values
    without    names of rules that are left out
    order      0: rules as in the registry; else a seed of their order and of which run with the contractions
    split      0: no reduction may be split; else a seed of which may
    schedule   0: the plan that the search found; else a seed of another candidate and of other tiles
    pipeline   0: as the schedule says; else a seed of a pipeline of warpgroups, for a target and a plan that can be one
    reason     why it fails, of a case in a corpus that is known to
    """

    program: Statements
    seed: int = 0
    target: str = "cpu"
    without: tuple[str, ...] = ()
    order: int = 0
    split: int = 0
    numerics: str = "safe"
    schedule: int = 0
    pipeline: int = 0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"program": self.program.to_json(), "without": list(self.without)}

    @staticmethod
    def from_json(d: Any) -> Case:
        """ValueError unless this is a case."""
        if not isinstance(d, dict) or set(d) | {"pipeline"} != set(Case.__dataclass_fields__):
            raise ValueError("not a case")
        numbers = [d.get(n, 0) for n in ("seed", "order", "split", "schedule", "pipeline")]
        texts = [d["target"], d["numerics"], d["reason"], *d["without"]]
        if not all(isinstance(n, int) for n in numbers) or not all(isinstance(t, str) for t in texts):
            raise ValueError("not a case")
        parse_target(d["target"])
        return Case(**(d | {"program": Statements.from_json(d["program"]), "without": tuple(d["without"])}))

    def __str__(self) -> str:
        """A Python program that shows the fault: where the public interface can, it compiles and runs the case; otherwise the last
        lines replay it with the same rules and schedule."""
        program = self.program.trace()
        lines = [
            "import ml_dtypes  # names bfloat16 and float8 for NumPy",
            "import numpy as np",
            "",
            "import eqsat_neptune as en",
            "from eqsat_neptune import xp",
            "from eqsat_neptune.testing.operands import laid_out",
            "",
            "",
            str(self.program),
            "",
            "",
        ]
        for n, (i, x) in enumerate(zip(self.program.inputs, arrays(self, program))):
            ranged = f", range={i.range}" if i.range is not None else ""
            lines.append(f's{n} = en.TensorSpec({i.shape}, "{i.dtype}"{ranged})')
            exact = x if x.dtype.kind in "biu" else x.astype(np.float64)
            values = np.array2string(exact, separator=", ", threshold=1 << 20, floatmode="unique")
            text = f'np.array({values.replace("inf", "np.inf").replace("nan", "np.nan")}).reshape({i.shape}).astype("{i.dtype}")'
            lines.append(f"x{n} = {text}" if i.layout == "packed" else f'x{n} = laid_out({text}, "{i.layout}")')
        names = [f"{{}}{n}" for n in range(len(self.program.inputs))]
        specs, xs = (", ".join(n.format(c) for n in names) for c in "sx")
        plain = self.target == "cpu" and not (self.without or self.order or self.split or self.schedule or self.pipeline)
        lines += [f"traced = en.trace(program, {specs})", f"print(en.evaluate(traced, {xs}))"]
        if plain:
            lines.append(f'print(en.optimize(traced, "cpu", numerics="{self.numerics}")({xs}))')
        lines += ["", "import json", "", "from eqsat_neptune.testing.cases import Case, run", ""]
        text = json.dumps(self.to_json()).replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"print(run(Case.from_json(json.loads('{text}'))))")
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """kind: "ok", "refused" (an EqsatError said why), "disagreement", "crash" or "hang"; stage: where; coverage: what was seen."""

    kind: str
    stage: str
    text: str = ""
    coverage: frozenset[str] = frozenset()

    @property
    def faulty(self) -> bool:
        return self.kind not in ("ok", "refused")

    @property
    def sign(self) -> tuple[str, str, str]:
        """What two outcomes of the same fault have in common."""
        return self.kind, self.stage, self.text.partition(":")[0] if self.kind == "crash" else ""

    def __str__(self) -> str:
        return f"{self.kind} in {self.stage}: {self.text}" if self.text else f"{self.kind} in {self.stage}"


class TimedOut(BaseException):
    """Not an Exception, so that nothing on the way takes it for an ordinary error."""


class _Disagreement(Exception):
    pass


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimedOut after so many seconds of this process's CPU time, where there are such timers (not under Windows, not in threads)."""
    if not hasattr(signal, "SIGPROF") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def run(case: Case, rules: Sequence[Rule] = RULES, limit: float = 20.0) -> Outcome:
    """The case through all stages, within `limit` seconds of CPU time.  rules: the registry that it chooses from."""
    stages = _Stages(case, rules)
    kind, text = "ok", ""
    try:
        with time_limit(limit), np.errstate(all="ignore"):
            stages.run()
    except TimedOut:
        kind, text = "hang", f"more than {limit:g} s"
    except _Disagreement as e:
        kind, text = "disagreement", str(e)
    except EqsatError as e:
        planless = isinstance(e, PlanError) and stages.whole  # what can be traced has a plan
        kind, text = "crash" if planless or "please report" in str(e) else "refused", f"{type(e).__name__}: {e}"
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as e:  # panics of the engine are no Exceptions
        if isinstance(e, (SystemExit, GeneratorExit)):
            raise
        kind, text = "crash", f"{type(e).__name__}: {e}"
    return Outcome(kind, stages.stage, text.strip()[:2000], frozenset(stages.coverage))


class _Stages:
    def __init__(self, case: Case, rules: Sequence[Rule]):
        self.case, self.rules, self.stage = case, rules, "trace"
        self.coverage: set[str] = set()

    def run(self) -> None:
        case = self.case
        program = case.program.trace()
        program = replace(program, outputs=tuple(o for o in program.outputs if math.prod(o.shape)))  # as the compiler does
        if not program.outputs:
            return
        if space(program) > MOST_SPACE and work(program) > _MOST_WORK:
            raise EqsatError("too large to compare")
        target = parse_target(case.target)
        values = arrays(case, program)
        self.stage = "reference"
        stray = False  # is something read beyond the end of an axis?  Then the CPU says so, and a GPU gives NaN
        try:
            want = reference(program, values)
        except InputError:
            stray, want = True, reference(program, values, stray=True)
        self.stage = "saturation"
        saturated = saturate(
            program, self._rules(), Limits(_NODES, 1e9), self._splittable(program), find(program) if case.split else ()
        )
        self._saw(saturated)
        self.stage = "e-graph"
        if not stray and saturated.graph.size * space(program) <= _MOST_VALUES:
            exact = {i.name: without_nans(x) for i, x in zip(program.inputs, values)}
            verdict = check_graph(saturated, program, case.seed, exact, 2 + case.split % 3)
            if not verdict.ok:
                raise _Disagreement(verdict.counterexample)
        self.stage = "extraction"
        model = model_for(case.target)
        found = extract(saturated.graph, program, model, numerics=case.numerics)
        plan = self._pipelines(found, target) or _settled(self._plan(found), target, model)
        self.stage = "lowering"
        tiles = [check(lower(k, plan.buffers, plan.compute_dtype)) for k in plan.kernels]
        for p in tiles:
            self._lowered(p)
        self.stage = f"{target.kind} run"
        got = self._results(program, plan, tiles, target, values)
        self.stage = f"{target.kind} values"
        for n, (w, b, g) in enumerate(zip(*want, got)):
            bad = difference(w, b, np.asarray(g).astype(np.float64), worst(program))
            if bad:
                raise _Disagreement(f"output {n}: {bad}")
        self.stage = target.kind

    @property
    def whole(self) -> bool:
        """Are all rules there, as in the compiler?"""
        return not (self.case.without or self.case.order or self.case.numerics == "strict")

    def _rules(self) -> tuple[Rule, ...]:
        case = self.case
        rules = [r for r in self.rules if r.name not in case.without and (case.numerics != "strict" or r.numerics == "exact")]
        if case.order:
            r = random.Random(case.order)
            rules = [replace(x, phase="contract") if x.phase == "algebra" and r.random() < 0.3 else x for x in rules]
            r.shuffle(rules)
        return tuple(rules)

    def _splittable(self, program: Program) -> tuple[str, ...]:
        if not self.case.split:
            return ()
        r = random.Random(self.case.split)
        axes = dict.fromkeys(t.attr[1] for t in postorder(o.term for o in program.outputs) if t.op == "red")  # type: ignore[index]
        return tuple(a for a in axes if program.axes[a] > 1 and r.random() < 0.7)

    def _saw(self, saturated: Saturated) -> None:
        """How often each rule fired, to a power of two."""
        counts: dict[str, int] = {}
        for _, n in saturated.graph.items():
            counts[n.why] = counts.get(n.why, 0) + 1
        self.coverage.update(f"rule {why} {n.bit_length()}" for why, n in counts.items() if why != "source")
        self.coverage.update(f"phase {p.name} {p.stop}" for p in saturated.stats)
        self.coverage.update(
            f"monoid {len(n.attr[0].pivots)} {n.attr[0].size}" for _, n in saturated.graph.items() if n.op == "fold"
        )  # type: ignore[index]

    def _lowered(self, p: TileProgram) -> None:
        kind = self.case.target.partition(":")[0]
        self.coverage.update(f"{kind} axes {' '.join(sorted(x.role for x in p.axes.values()))}" for _ in (0,))
        depth = [0]

        def loops(body: tuple[Stmt, ...], at: int) -> None:
            for s in body:
                if isinstance(s, Loop):
                    depth[0] = max(depth[0], at + 1)
                    self.coverage.update(f"{kind} carry {c.kind} {c.op}" for c in s.carries)
                    self.coverage.update([f"{kind} skips"] if s.constraints else [])
                    loops(s.body, at + 1)

        loops(p.body, 0)
        self.coverage.add(f"{kind} depth {depth[0]}")
        for s in walk(p.body):
            what = getattr(s, "fn", getattr(s, "op", ""))
            self.coverage.add(f"{kind} {type(s).__name__} {what} {getattr(s, 'role', '')}".strip())

    def _plan(self, found: Any) -> Plan:
        """The plan found; or, by the seed, one that lost, its streamed and its block's axes in other tiles."""
        case = self.case
        plan = found.plan
        if case.schedule:
            r = random.Random(case.schedule)
            plan = r.choice([plan, *(c.plan for c in found.candidates)])
            plan = replace(plan, kernels=tuple(_rescheduled(r, case.target, k, plan) for k in plan.kernels))
        return plan

    def _pipelines(self, found: Any, target: Target) -> Plan | None:
        """By the seed, a plan whose kernels are pipelines of warpgroups; None if none can be."""
        if not self.case.pipeline or target.kind != "cuda" or not cuda_arch(target.arch).warpgroups:
            return None
        r = random.Random(self.case.pipeline)
        plans = [found.plan, *(c.plan for c in found.candidates)]
        for plan in r.sample(plans, len(plans)):
            if (new := as_pipelines(r, plan, emulated(target))) is not None:
                return new
        return None

    def _results(
        self, program: Program, plan: Plan, tiles: Sequence[TileProgram], target: Target, values: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        if target.kind == "cpu":
            from ..backends import make_runner

            return make_runner(program, plan, target)(values, None)
        arch = emulated(target)
        for p in tiles:
            schedule = schedule_of(p, plan.buffers, arch)
            self.coverage.add(f"{target} as {type(schedule).__name__}")
            self.coverage.update(seen(schedule) if isinstance(schedule, Pipeline) else ())
        if on_device(target):
            self.coverage.add(f"{target} on the device")
            return checked.run(program, plan, target, values)
        inputs = {i.name: x for i, x in zip(program.inputs, values)}
        source = emit_for(tiles, plan.buffers, inputs, arch)
        try:
            (out,) = run_source(source, plan.buffers, inputs, (1 + self.case.seed % 7,))
        except EmulationError as e:
            if "not emulated" in str(e):
                raise EqsatError(str(e)) from None
            raise
        return [out[f"out{n}"] for n in range(len(program.outputs))]


def on_device(target: Target) -> bool:
    """Does this target's code run on a GPU that is here?  With "emulator" in the environment (see DEVICE): never."""
    return os.environ.get(DEVICE) != "emulator" and checked.present(target)


def runnable(target: str) -> str | None:
    """None if a target's code can be run here, else what is missing."""
    if target == "cpu" or host_compiler() is not None or on_device(parse_target(target)):
        return None
    return "no C++ compiler for the emulator"


def _rescheduled(r: random.Random, target: str, k: Kernel, plan: Plan) -> Kernel:
    """The kernel under other tiles and, if its terms allow them, other roles: small axes lie whole in a block unless asked to stream."""
    roles = {a: "loop" for a, x in k.axes.items() if x.role == "whole" and x.extent > 1 and r.random() < 0.5}
    for a in list(roles):
        axes = {b: replace(x, role=roles[b]) if b in roles else x for b, x in k.axes.items()}
        try:
            lower(replace(k, axes=axes), plan.buffers, plan.compute_dtype)
        except LoweringError:
            del roles[a]
    axes = {a: replace(x, role=roles.get(a, x.role)) for a, x in k.axes.items()}
    return replace(k, axes={a: _tiled(r, target, x) for a, x in axes.items()})


def _tiled(r: random.Random, target: str, x: Axis) -> Axis:
    if x.role == "whole" or r.random() < 0.3:
        return x
    tiles = [n for n in (1, 2, 3, 4, 5, 8, 16, 32, 64, 128) if n <= x.extent] if target == "cpu" else [8, 16, 32, 64, 128]
    return replace(x, tile=min(r.choice([*tiles, x.extent]), x.extent))


# ------------------------------------------------------------------ values


def arrays(case: Case, program: Program) -> list[np.ndarray]:
    """Input arrays of the kinds and layouts that the case asks for.  −∞ is given only to inputs that the compiler takes for scores."""
    scores = may_be_masked(program, [o.term for o in program.outputs])
    return [drawn(o, case.seed, n, i.name in scores) for n, (o, i) in enumerate(zip(case.program.inputs, program.inputs))]


def without_nans(x: np.ndarray) -> np.ndarray:
    """In float64.  Where a rule counts on finite inputs, a node may have a number where its class is NaN."""
    y = x.astype(np.float64)
    return np.where(np.isnan(y), 0.5, y)
