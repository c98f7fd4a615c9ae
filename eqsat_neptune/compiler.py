"""`optimize`: the stages in order, the cache around them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import cache
from .codegen.serial import to_json
from .errors import EqsatError, PlanError
from .extraction.plan import Buffer, Plan, Store
from .kernel import Kernel, Record
from .program import DTYPES, Program, TensorSpec
from .targets import Target, parse_target

if TYPE_CHECKING:
    from .cost_models.base import CostModel
    from .rules.joins import Join

NUMERICS = ("safe", "fast", "strict")


def optimize(
    program: Any,
    target: str = "cpu",
    *,
    specs: Sequence[TensorSpec] | None = None,
    numerics: str = "safe",
    tune: int = 0,
    rules: Iterable[Any] | None = None,
    cost_model: Any = None,
    memory_limit: int | None = None,
    verify: bool = False,
    progress: bool | Callable[[str, int, int | None], None] | None = None,
) -> Kernel:
    """Find the cheapest provably equal form of a program for a target.

    program       what `trace` returned, or a function if `specs` gives the `TensorSpec` of each parameter
    target        "cpu", "cuda" (the GPU present), "cuda:sm_90a", "hip:gfx942", …; the device need not be here
    numerics      "safe": reassociation where bounds show that it cannot overflow; "fast": without that check; "strict": only
                  rules that are exact
    tune          measure the best `tune` candidates on the device and take the fastest (0: trust the cost model)
    rules         `Rule`s to use instead of all of `rules.RULES`
    cost_model    a `cost_models.CostModel` instead of the target's own
    memory_limit  bytes that intermediates in memory may take
    verify        check the saturated e-graph and the kernel on random instances; EqsatError if they disagree
    progress      True or a callable (stage, done, total); None: a bar once a search takes long; False: none

    Raises EqsatError for an argument that none of this allows, PlanError if no plan keeps to the memory limit.
    """
    if callable(program) and not isinstance(program, Program) and not hasattr(program, "bind"):
        from .trace import trace

        if specs is None:
            raise EqsatError("optimize was given a function without specs", "pass specs=[TensorSpec(…), …] or trace it first")
        if isinstance(specs, TensorSpec) or not isinstance(specs, Iterable):
            raise EqsatError(
                f"specs must be a list of TensorSpecs, not {specs!r}", "one for each parameter: specs=[TensorSpec(…), …]"
            )
        program = trace(program, *specs)
    elif specs is not None:
        raise EqsatError("specs go with a function; this program has its own", "leave out specs=")
    rules = _checked(numerics, tune, rules, cost_model, memory_limit, progress, verify)
    options = dict(numerics=numerics, tune=tune, rules=rules, cost_model=cost_model, memory_limit=memory_limit, verify=verify)
    if hasattr(program, "bind") and not isinstance(program, Program):
        from .dynamic import DynamicKernel

        return DynamicKernel(program, parse_target(target), options, progress)  # type: ignore[return-value]
    if not isinstance(program, Program):
        raise EqsatError(f"optimize takes a traced program or a function, not {type(program).__name__}")
    program = without_clashes(program)
    where = parse_target(target)
    key = None if rules is not None or cost_model is not None else _key(program, where, numerics, tune, memory_limit)
    record = _cached(key, program, where) if key else None
    from_cache = record is not None
    if record is None:
        record = _compile(program, where, progress=progress, **options)  # type: ignore[arg-type]
        if key:
            cache.write(key, record.to_bytes())
    kernel = Kernel(record, from_cache=from_cache)
    if verify:
        from .verification import verify as check

        verdict = check(program, kernel, rules=_rules(rules, numerics))
        if not verdict:
            raise EqsatError(f"verification failed: {verdict.counterexample}", "please report this program")
    return kernel


def without_clashes(program: Program) -> Program:
    """Plans call outputs out0, out1, … and temporaries t0, t1, …: inputs of such names get others."""
    names = [i.name for i in program.inputs]
    new: dict[str, str] = {}
    for n in names:
        if re.fullmatch(r"(out|t)\d+", n):
            other = n + "_"
            while other in names or other in new.values():
                other += "_"
            new[n] = other
    return program.renamed({}, new) if new else program


def _checked(
    numerics: Any, tune: Any, rules: Any, cost_model: Any, memory_limit: Any, progress: Any, verify: Any
) -> tuple[Any, ...] | None:
    """The rules; EqsatError if an option has no meaning."""
    if numerics not in NUMERICS:
        raise EqsatError(f"numerics must be one of {', '.join(map(repr, NUMERICS))}, not {numerics!r}")
    if not isinstance(tune, int) or isinstance(tune, bool) or tune < 0:
        raise EqsatError(f"tune must be an int ≥ 0, not {tune!r}", "it is the number of candidates to measure")
    if memory_limit is not None and (not isinstance(memory_limit, int) or isinstance(memory_limit, bool) or memory_limit < 0):
        raise EqsatError(f"memory_limit must be a number of bytes, an int ≥ 0, not {memory_limit!r}")
    if not isinstance(verify, bool):
        raise EqsatError(f"verify must be True or False, not {verify!r}")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise EqsatError(f"progress must be True, False, None or a callable (stage, done, total), not {progress!r}")
    if cost_model is not None and not (hasattr(cost_model, "cost") and hasattr(cost_model, "tensor_dtypes")):
        raise EqsatError(
            f"cost_model must be a cost_models.CostModel, not {cost_model!r}", 'for example cost_models.model_for("cuda:sm_80")'
        )
    if rules is None:
        return None
    from .rules import Rule

    try:
        chosen = tuple(rules)
    except TypeError:
        raise EqsatError(f"rules must be a collection of Rules, not {rules!r}", "choose from eqsat_neptune.rules.RULES") from None
    for r in chosen:
        if not isinstance(r, Rule):
            raise EqsatError(f"rules must hold Rules, not {r!r}", "choose from eqsat_neptune.rules.RULES")
    return chosen


def _key(program: Program, target: Target, numerics: str, tune: int, memory_limit: int | None) -> str:
    host = str(os.cpu_count()) if target.kind == "cpu" else ""
    return cache.digest("plan", to_json(program), str(target), numerics, str(tune), str(memory_limit), _engine_build(), host)


def _engine_build() -> str:
    """Which build of egglog is installed.  Its own metadata would say, but reading that takes longer than all else on the way
    to a cached kernel."""
    spec = find_spec("egglog")
    if spec is None or spec.origin is None:
        return "none"
    files = sorted(Path(spec.origin).parent.glob("bindings*"))
    return " ".join(f"{f.name} {s.st_size} {s.st_mtime_ns}" for f in files for s in [f.stat()])


def _cached(key: str, program: Program, target: Target) -> Record | None:
    raw = cache.read(key)
    if raw is None:
        return None
    try:
        record = Record.from_bytes(raw)
    except (ValueError, KeyError, TypeError):
        cache.warn(f"cache entry {key} is damaged; it is made again")
        return None
    return record if record.target == target and to_json(record.program) == to_json(program) else None


def _compile(
    program: Program,
    target: Target,
    *,
    numerics: str,
    tune: int,
    rules: tuple[Any, ...] | None,
    cost_model: Any,
    memory_limit: int | None,
    verify: bool,
    progress: Any,
) -> Record:
    full, numbers = program, [n for n, o in enumerate(program.outputs) if math.prod(o.shape)]
    empty = {
        f"out{n}": Buffer(f"out{n}", o.shape, o.dtype, "output") for n, o in enumerate(full.outputs) if not math.prod(o.shape)
    }
    if not numbers:  # nothing to compute
        return Record(full, target, Plan((), empty, program.compute_dtype), {"form": ["no elements"] * len(empty)})
    if find_spec("egglog") is None:
        raise EqsatError("egglog is not installed", "pip install egglog; only saved and cached kernels run without it")
    from . import egraph
    from .cost_models import model_for
    from .extraction.extract import extract

    t0 = time.perf_counter()
    program = replace(program, outputs=tuple(full.outputs[n] for n in numbers))
    model = cost_model or model_for(str(target))
    with _progress(progress) as step:
        saturated = egraph.saturate(
            program, rules=_rules(rules, numerics), splittable=splittable(program, target), joins=joins(program, model)
        )
        t1 = time.perf_counter()
        step("search", 0, None)
        found = extract(saturated.graph, program, model, numerics=numerics, progress=step)
        t2 = time.perf_counter()
    plan, form = _expressible(found, target, model)
    if memory_limit is not None:
        plan = _settled(_within(found, memory_limit), target, model)
    measured: list[dict[str, Any]] = []
    if tune:
        from .tuning import fastest

        fits = [p for p in _plans(found) if memory_limit is None or p.temporaries <= memory_limit][:tune]
        fits = [_settled(p, target, model) for p in fits]
        plan, medians = fastest(fits, program, target)
        measured = [{"predicted": p.cost.seconds, "seconds": s, "taken": p is plan} for p, s in zip(fits, medians)]
    if empty:
        form = [form.pop(0) if n in numbers else "no elements" for n in range(len(full.outputs))]
        plan = _numbered(plan, {f"out{i}": f"out{n}" for i, n in enumerate(numbers)}, empty)
    info = {
        "form": form,
        "egraph": {
            "nodes": saturated.graph.size,
            "classes": len(saturated.graph.nodes),
            "phases": [
                {"name": p.name, "iterations": p.iterations, "nodes": p.nodes, "seconds": p.seconds, "stop": p.stop}
                for p in saturated.stats
            ],
        },
        "seconds": {"saturation": t1 - t0, "extraction": t2 - t1},
        "candidates": [{"form": c.form, "seconds": c.seconds, "kernels": c.kernels} for c in found.candidates],
        "measured": measured,
        "explain": [list(s) for s in egraph.explain(saturated, found)],
    }
    if found.forbidden is not None:
        info["forbidden"] = asdict(found.forbidden)
    return Record(full, target, plan, info)


def _expressible(found: Any, target: Target, model: Any) -> tuple[Plan, list[str]]:
    """The cheapest plan that the code generator can print, and its form; the cheapest of all if it can print none (its error says why)."""
    best, form = _settled(found.plan, target, model), list(found.form)
    if target.kind == "cpu" or _emits(best, target):
        return best, form
    for c in found.candidates:
        plan = _settled(c.plan, target, model)
        if _emits(plan, target):
            return plan, c.form.split("; ")
    return best, form


def _emits(plan: Plan, target: Target) -> bool:
    """Can the plan be printed?"""
    from .codegen.cuda.arch import cuda_arch
    from .codegen.cuda.emit import feasible
    from .codegen.hip.arch import hip_arch
    from .codegen.lower import lower

    arch = cuda_arch(target.arch) if target.kind == "cuda" else hip_arch(target.arch)
    programs = (lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels)
    return all(feasible(p, arch, plan.buffers, slow=True) is None for p in programs)


def _settled(plan: Plan, target: Target, model: Any) -> Plan:
    """The plan with schedules that the code generator has."""
    from .cost_models.roofline import Roofline

    if target.kind != "cuda" or not isinstance(model, Roofline) or not model.machine.wgmma:
        return plan
    from .codegen.cuda.arch import cuda_arch
    from .codegen.cuda.emit import warpgroup_choices
    from .extraction.settle import settle

    arch = cuda_arch(target.arch)
    plain = Roofline(model.machine, plain=True)
    return settle(plan, model, plain, lambda p, buffers: warpgroup_choices(p, buffers, arch), model.finer)


def splittable(program: Program, target: Target) -> tuple[str, ...]:
    """Axes whose reductions may be split over blocks: those long enough that the parts are worth a block each."""
    from .terms import postorder

    least = 4096 if target.kind == "cpu" else 512
    seen = {t.attr[1]: None for t in postorder(o.term for o in program.outputs) if t.op == "red"}  # type: ignore[index]
    return tuple(a for a in seen if program.axes[a] >= least)


def joins(program: Program, model: CostModel) -> list[Join]:
    """Products worth a place side by side in one kernel, by the least time that each kernel takes."""
    from .cost_models.base import Work
    from .rules.joins import Size, find

    width = DTYPES[next((i.dtype for i in program.inputs if i.dtype in model.tensor_dtypes), program.compute_dtype)]

    def least(s: Size) -> float:
        return model.floor(Work(tensor=s.flops, bytes=s.elements * width))

    return find(program, lambda a, b, both: least(both) < least(a) + least(b))


def _rules(rules: tuple[Any, ...] | None, numerics: str) -> Any:
    if numerics != "strict":
        return rules
    from .rules import RULES

    return tuple(r for r in (RULES if rules is None else rules) if r.numerics == "exact")


def _numbered(plan: Plan, names: Mapping[str, str], empty: dict[str, Buffer]) -> Plan:
    """The plan with its outputs under the numbers that they have in the program, and the outputs that have no elements."""

    def new(s: Store) -> Store:
        return replace(s, buffer=names.get(s.buffer, s.buffer))

    kernels = tuple(replace(k, stores=tuple(map(new, k.stores))) for k in plan.kernels)
    buffers = [replace(b, name=names.get(b.name, b.name)) for b in plan.buffers.values()]
    return Plan(kernels, {b.name: b for b in buffers} | empty, plan.compute_dtype)


def _plans(found: Any) -> list[Plan]:
    """The chosen plan and those that lost, cheapest first."""
    return [found.plan, *(c.plan for c in found.candidates if c.plan is not None)]


def _within(found: Any, limit: int) -> Plan:
    plans = _plans(found)
    fits = [p for p in plans if p.temporaries <= limit]
    if not fits:
        least = min(p.temporaries for p in plans)
        raise PlanError(f"no plan keeps its intermediates within {limit} bytes", f"the leanest one found takes {least}")
    return min(fits, key=lambda p: p.cost.seconds)


class _progress:
    """Calls back, or shows a bar on stderr once a stage has taken two seconds."""

    def __init__(self, how: Any):
        self.how, self.start = how, time.perf_counter()
        self.bar: Any = None

    def __enter__(self) -> Callable[[str, int, int | None], None]:
        return self.step

    def step(self, stage: str, done: int, total: int | None) -> None:
        if callable(self.how):
            self.how(stage, done, total)
        elif self.how or (self.how is None and time.perf_counter() - self.start > 2.0):
            if self.bar is None:
                from tqdm import tqdm

                self.bar = tqdm(desc=stage, total=total, leave=False, disable=None if self.how is None else False)
            self.bar.set_description(stage)
            self.bar.total = total
            self.bar.update(done - self.bar.n)

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.close()
