"""`verify`: does a kernel compute its program?  Each form that it went through is compared with float64 evaluation, on small instances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from .errors import EqsatError
from .extraction.plan import Kernel as PlanKernel
from .extraction.plan import Plan
from .forms import NotRun, kernel_values, term_values, tile_values
from .program import FLOATS, Program
from .resizing import blocks_of, resized, resized_plan
from .runtime.checked import present
from .targets import Target, parse_target
from .terms import Term, postorder

LARGEST = 1 << 22  # points of the whole iteration space up to which a kernel is run as it is
MOST_WORK = {"emulator": 1 << 26, "GPU": 1 << 30}  # elements of one term of an instance that the emitted kernels are run on
MOST = {"float32": 1e35}  # beyond, what a sum is made of may overflow
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative rounding error
SMALL = (3, 5, 7, 4, 6, 11, 2)
BLOCK, BLOCKED = 4, 11  # a split axis of a small instance: blocks of 4, the last of them has 3


@dataclass(frozen=True)
class Verdict:
    """Truthy when sound.  `evidence` says what was checked; `counterexample` what disagreed."""

    ok: bool
    evidence: str
    counterexample: str | None = None

    def __bool__(self) -> bool:
        return self.ok


def verify(program: Program, kernel: Any = None, *, seed: int = 0, rules: Iterable[Any] | None = None) -> Verdict:
    """Every e-node of every e-class of the saturated e-graph of a small instance evaluates to its class's value, and so does the
    source term; the kernel's plan at small extents, with tiles and splits that do not divide them, agrees with `evaluate` as terms, as
    tile programs and as emitted kernels: these run on the CPU target, on the GPU if it is here, else in the emulator, if there is a C++
    compiler.  A kernel that is small enough is run as it is, too.  Without a kernel: the plan for the CPU of a small instance.

    With a `Term` in the kernel's place: does it have the value of the program's first output?  rules: those that the kernel was made
    with, if they are not `rules.RULES`.  EqsatError for anything else, and for a large kernel that was made from another program.
    """
    from .compiler import optimize, splittable
    from .egraph import saturate
    from .kernel import Kernel
    from .rules.joins import find
    from .testing import check_graph

    if not isinstance(program, Program):
        remedy = "bind its extents first: program.bind(n=…)" if hasattr(program, "bind") else "trace the function first"
        raise EqsatError(f"verify takes a traced program, not {type(program).__name__}", remedy)
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise EqsatError(f"seed must be an int ≥ 0, not {seed!r}", "it decides the random inputs")
    if isinstance(kernel, Term):
        return _same_value(program, kernel, int(seed))
    if kernel is not None and not isinstance(kernel, Kernel):
        raise EqsatError(f"verify takes a kernel or a term, not {type(kernel).__name__}", "a kernel is what optimize returns")
    small = shrink(program)
    chosen = None if rules is None else tuple(rules)
    saturated = saturate(small, rules=chosen, splittable=splittable(program, Target("cuda")), joins=find(small))
    verdict = check_graph(saturated, small, int(seed))
    if not verdict.ok:
        return Verdict(False, verdict.evidence, verdict.counterexample)
    evidence = [f"{verdict.evidence} at {small.axes}, the source term among them"]
    if kernel is None:
        kernel = optimize(small, "cpu", rules=chosen)
        program = small
    try:
        evidence.extend(_agreeing(program, kernel, int(seed)))
    except _Disagreement as e:
        return Verdict(False, "; ".join(evidence), str(e))
    return Verdict(True, "; ".join(evidence))


class _Disagreement(Exception):
    pass


def _agreeing(program: Program, kernel: Any, seed: int) -> Iterator[str]:
    """What was found to agree, one form after the other.  _Disagreement at the first that does not."""
    from .compiler import without_clashes

    target = parse_target(kernel.target)
    own = replace(kernel.program, name=program.name)
    as_it_is = space(program) <= LARGEST
    if own == without_clashes(program):
        program = own
        yield from _at_other_extents(program, kernel.plan, target, seed, emitted=target.kind == "cpu" or not as_it_is)
    elif not as_it_is:
        raise EqsatError("the kernel was made from another program", "verify it with kernel.program, or at small extents")
    if not as_it_is or not all(program.axes.values()):
        return
    if [(i.shape, i.dtype) for i in own.inputs] != [(i.shape, i.dtype) for i in program.inputs]:
        raise _Disagreement("kernel: its inputs have other shapes or dtypes than the program's")
    arrays = random_inputs(program, np.random.default_rng(seed))

    def run() -> tuple[list[np.ndarray], str]:
        return kernel_values(own, kernel.plan, target, arrays, seed)

    yield _compared("kernel", program, arrays, run, seed)


def _at_other_extents(program: Program, plan: Plan, target: Target, seed: int, emitted: bool) -> Iterator[str]:
    small, arrays, found = _as_terms(program, plan, seed)
    if found is None:
        yield "the plan's constants hold at its own extents only, which are too large to check it at"
        return
    where = f"at {small.axes}" + (f" in blocks of {blocks_of(found)}" if blocks_of(found) else "")
    yield f"extracted term agrees {where}"
    yield _compared("tile program", small, arrays, lambda: (tile_values(small, found, arrays), ""), seed)
    if target.kind == "cpu":
        yield _compared("emitted kernel", small, arrays, lambda: kernel_values(small, found, target, arrays, seed), seed)
    elif emitted:
        kept = {a for a, n in small.axes.items() if n == program.axes[a]}
        large, again = _with_its_tiles(program, plan, kept if kept - _small_anyway(program) else set())
        if work(large) > MOST_WORK["GPU" if present(target) else "emulator"]:
            yield f"emitted kernel not run: a term has {work(large)} elements even at a few tiles"
            return
        values = random_inputs(large, np.random.default_rng(seed))
        yield _compared("emitted kernel", large, values, lambda: kernel_values(large, again, target, values, seed), seed)


def _small_anyway(program: Program) -> set[str]:
    small = shrink(program)
    return {a for a, n in program.axes.items() if small.axes[a] == n}


def _as_terms(program: Program, plan: Plan, seed: int) -> tuple[Program, list[np.ndarray], Plan | None]:
    """A small instance of the program and of the plan on which the plan's terms are right.

    A rule may have made a number of an extent (Σₖ 1 = n), and then the plan is right at that extent only; so where terms disagree, axes
    that are reduced keep theirs, one after the other and then all.  None in the plan's place: even then it cannot be told."""
    reduced = [t.attr[1] for t in postorder(o.term for o in program.outputs) if t.op == "red"]  # type: ignore[index]
    tries: list[set[str]] = [set(), *({a} for a in dict.fromkeys(reduced)), set(reduced)]
    wrong = ""
    for keep in tries:
        small, found = _with_small_tiles(program, plan, keep)
        if keep and space(small) > LARGEST:
            continue
        arrays = random_inputs(small, np.random.default_rng(seed))
        try:
            bad = _bad(small, arrays, term_values(small, found, arrays), "float64")
        except (EqsatError, ValueError) as e:
            bad = str(e)
        if not bad:
            return small, arrays, found
        wrong = wrong or f"extracted term: {bad} (seed {seed}, extents {small.axes})"
        if not _own_numbers(program, plan):
            break
    else:
        if space(_with_small_tiles(program, plan, set(reduced))[0]) > LARGEST:
            return small, arrays, None
    raise _Disagreement(wrong)


def _own_numbers(program: Program, plan: Plan) -> bool:
    """Are there numbers that may have been made of extents: those that the plan has and the program has not?"""

    def numbers(terms: Iterable[Term]) -> set[object]:
        return {t.attr for t in postorder(terms) if t.op == "num"}

    return bool(numbers(s.term for k in plan.kernels for s in k.stores) - numbers(o.term for o in program.outputs) - {0.0, 1.0, -1.0})


def _with_small_tiles(program: Program, plan: Plan, keep: set[str]) -> tuple[Program, Plan]:
    """Both at small extents, except those to keep, in tiles that do not divide them."""
    split = blocks_of(plan)
    small = resized(program, _small_extents(program, keep, split))
    block = {a: min(n, BLOCK if a in small.axes and a not in keep else n) for a, n in split.items()}

    def tile(k: PlanKernel, a: str, n: int) -> int:
        if a.endswith(".i"):
            return 2 if n % 2 == 0 else n
        return 1 if n <= 2 else n // 2 + 1 if n < 8 else n // 3 + 1

    return small, resized_plan(plan, program, small, block, tile)


def _with_its_tiles(program: Program, plan: Plan, keep: set[str]) -> tuple[Program, Plan]:
    """Both at extents of a few of the plan's tiles each, the last of them cut short."""
    blocks = blocks_of(plan)
    tiles: dict[str, list[tuple[int, str]]] = {}
    for k in plan.kernels:
        for a, x in k.axes.items():
            tiles.setdefault(a, []).append((x.tile, x.role))
    block = {}
    for a, n in blocks.items():
        streamed = [t for t, role in tiles.get(f"{a}.i", []) if role != "whole" and t < n]
        block[a] = min(n, 2 * max(streamed)) if streamed else n
    rows = _rows(program)

    def extent(a: str) -> int:
        if a in keep:
            return program.axes[a]
        if a in block:
            return 2 * block[a] + block[a] // 2 + 1
        held = [(t, role) for t, role in tiles.get(a, []) if role != "whole" and t < program.axes[a]]
        if len(held) < len(tiles.get(a, [])) or not held:
            return program.axes[a] if a in tiles or any(x.startswith(a + ".") for x in tiles) else 2
        t, role = max(held)
        if t == 1:
            return 2
        n = (2 if role == "loop" else 1) * t + t // 2 + 1
        return -(-n // 8) * 8 if a in rows else n  # so that 16 bytes can be read at once

    large = resized(program, lambda group: max(map(extent, group)))
    kept = {a: min(n, large.axes[a] if a in large.axes else n) for a, n in block.items()}

    def tile(k: PlanKernel, a: str, n: int) -> int:
        t = k.axes[a].tile
        return next(m for m in range(min(t, n), 0, -1) if n % m == 0) if a.endswith(".i") else t

    return large, resized_plan(plan, program, large, kept, tile)


def _rows(program: Program) -> set[str]:
    """Axes along which the elements of an input or output are adjacent."""
    last = {t.attr[1][-1].axes[-1:] for t in postorder(o.term for o in program.outputs) if t.op == "input" and t.attr[1]}  # type: ignore[index]
    return {a for axes in last for a in axes} | {a for o in program.outputs if o.dims for a in o.dims[-1][-1:]}


def _compared(
    name: str, program: Program, arrays: list[np.ndarray], run: Callable[[], tuple[list[np.ndarray], str]], seed: int
) -> str:
    """Says that the outputs agree, and where they were computed.  _Disagreement if they do not."""
    at = f"(seed {seed}, extents {program.axes})"
    try:
        got, where = run()
    except NotRun as e:
        return f"{name} not run: {e}"
    except (EqsatError, ValueError) as e:
        raise _Disagreement(f"{name}: {e} {at}") from e
    bad = _bad(program, arrays, got, "float64" if name == "tile program" else None)
    if bad:
        raise _Disagreement(f"{name}: {bad} {at}")
    return f"{name} agrees with float64" + (f" ({where})" if where not in ("", "cpu") else "")


def _bad(program: Program, arrays: Sequence[np.ndarray], got: Sequence[np.ndarray], exact: str | None) -> str | None:
    """How outputs differ from what the program says.  exact: the dtype that they were computed in, None: that of each output."""
    from .reference import evaluate

    want = evaluate(program, *arrays)
    wants = want if isinstance(want, tuple) else (want,)
    bounds: list[np.ndarray] | None = None
    for n, (o, w, g) in enumerate(zip(program.outputs, wants, got, strict=True)):
        w, g = np.asarray(w, np.float64), np.asarray(g).astype(np.float64)
        if w.shape != g.shape:
            return f"output {n} has shape {g.shape} instead of {w.shape}"
        dtype = exact or o.dtype
        if not disagreement(w, g, dtype):
            continue
        if bounds is None:  # elements that rounding alone may have changed do not count
            bounds = _rounding(program, arrays, wants, exact)
        loose = np.isinf(bounds[n]) | (np.isfinite(w) & np.isfinite(g) & (np.abs(w - g) <= 8.0 * bounds[n]))
        g = np.where(loose, w, g)
        if bad := disagreement(w, g, dtype):
            return f"output {n}: {bad}" if len(wants) > 1 else bad
    return None


def _rounding(program: Program, arrays: Sequence[np.ndarray], wants: Sequence[np.ndarray], exact: str | None) -> list[np.ndarray]:
    """What rounding may do to each element, inf where it cannot be told: by bounds, or of large programs by what it does do to the
    program as it is written.  Where 16-bit operands are multiplied, what as small a change of the inputs does counts too."""
    from .reference import evaluate
    from .testing.rounding import reference

    def changes(inputs: Sequence[np.ndarray], dtype: str) -> list[np.ndarray]:
        result = evaluate(program, *inputs, dtype=dtype)
        out = []
        for w, x in zip(wants, result if isinstance(result, tuple) else (result,)):
            with np.errstate(all="ignore"):
                gap = np.abs(np.asarray(x, np.float64) - w)
            lost = (np.isfinite(w) & ~np.isfinite(gap)) | (np.isfinite(w) & (np.abs(w) > MOST.get(dtype, 1e300)))
            out.append(np.where(lost, np.inf, np.where(np.isfinite(gap), gap, 0.0)))
        return out

    dtype = exact or program.compute_dtype
    bounds = reference(program, arrays, dtype)[1] if work(program) <= LARGEST else changes(arrays, dtype)
    unit = max((UNITS.get(i.dtype, 0.0) for i in program.inputs), default=0.0)
    if exact or not unit:
        return bounds
    for seed in range(2):
        rng = np.random.default_rng(seed)
        moved = [_moved_by(x, unit, rng) if i.dtype in FLOATS else x for i, x in zip(program.inputs, arrays)]
        bounds = [b + c + np.mean(c) for b, c in zip(bounds, changes(moved, "float64"))]
    return bounds


def _moved_by(x: np.ndarray, unit: float, rng: np.random.Generator) -> np.ndarray:
    """Each number by a unit of its dtype, up or down."""
    return (x.astype(np.float64) * (1 + 2 * unit * rng.choice([-1.0, 1.0], x.shape))).astype(x.dtype)


def _same_value(program: Program, term: Term, seed: int) -> Verdict:
    """Does a term over the program's axes and inputs have the value of its first output?  On a small instance, in float64."""
    from .reference import Env, evaluate_term

    first = program.outputs[0]
    small = shrink(replace(program, outputs=(first, replace(first, term=term))))
    arrays = {i.name: x for i, x in zip(small.inputs, random_inputs(small, np.random.default_rng(seed)))}
    env = Env(small.axes, arrays, dict.fromkeys(small.axes, 3))
    _, (want, got) = env.align([evaluate_term(o.term, env) for o in small.outputs])
    want, got = np.broadcast_arrays(want, got)
    bad = disagreement(want, got, "float64")
    where = f"seed {seed}, extents {small.axes}"
    return Verdict(False, "", f"{bad} ({where})") if bad else Verdict(True, f"the term has the output's values ({where})")


def disagreement(want: np.ndarray, got: np.ndarray, dtype: str) -> str | None:
    """What differs beyond the rounding of the dtype, if anything does."""
    tolerance = {"float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}.get(
        dtype, 0.5 if dtype.startswith("float8") else 0.0
    )
    finite = np.isfinite(want)
    if (np.isnan(want) & ~np.isnan(got)).any():
        return "a number where the program gives NaN"
    if (finite & ~np.isfinite(got)).any():
        return "inf or NaN where the program is finite"
    if (np.isinf(want) & (got != want)).any():
        return "another value where the program is infinite"
    scale = np.abs(want[finite]).max(initial=0.0)
    errors = np.abs(np.where(finite, got - want, 0.0))
    error = errors.max(initial=0.0)
    if error > tolerance * max(scale, 1e-30):
        return f"error {error:.3g} at values up to {scale:.3g}"
    if scale and tolerance:  # many small errors are not rounding, which differs from element to element
        of, off = (np.sqrt(np.mean(np.square(np.where(finite, x, 0.0) / scale))) for x in (want, errors))
        if off > tolerance / 4 * of:
            return f"error {off / of:.3g} of the root mean square"
    return None


def space(program: Program) -> int:
    """Points of the whole iteration space."""
    return math.prod(program.axes.values())


def work(program: Program) -> int:
    """Elements of the term that has the most, reduced axes among them."""
    return max((math.prod(program.axes[a] for a in t.free) for t in postorder(o.term for o in program.outputs)), default=0)


def random_inputs(program: Program, rng: np.random.Generator) -> list[np.ndarray]:
    """Normal floats (uniform in a declared range), integers within a declared range or below 2."""
    import ml_dtypes  # noqa: F401

    out = []
    for i in program.inputs:
        lo, hi = i.range or (-math.inf, math.inf)
        if i.dtype in FLOATS:
            bounded = math.isfinite(lo) and math.isfinite(hi)
            x: np.ndarray = np.asarray(rng.uniform(lo, hi, i.shape) if bounded else np.clip(rng.standard_normal(i.shape), lo, hi))
        else:
            x = np.asarray(rng.integers(int(max(lo, 0)), 2 if math.isinf(hi) else int(hi) + 1, i.shape))
        out.append(x.astype(np.dtype(i.dtype)))
    return out


def shrink(program: Program) -> Program:
    """The same program at small, mostly odd extents."""
    return resized(program, _small_extents(program, set(), {}))


def _small_extents(program: Program, keep: set[str], split: dict[str, int]) -> Callable[[tuple[str, ...]], int]:
    numbers = count()

    def want(group: tuple[str, ...]) -> int:
        n = SMALL[next(numbers) % len(SMALL)]
        return max(program.axes[a] for a in group) if keep & set(group) else BLOCKED if split.keys() & set(group) else n

    return want
