"""`verify`: does a kernel compute its program?  Checked on a small instance of it, and on the kernel if that is small."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .errors import EqsatError
from .program import FLOATS, Input, Output, Program
from .terms import Affine, Term, make, postorder, rewrite

LARGEST = 1 << 22  # elements of the whole iteration space that are still evaluated as they are
SMALL = (3, 5, 7, 4, 6, 11, 2)


@dataclass(frozen=True)
class Verdict:
    """Truthy when sound.  `evidence` says what was checked; `counterexample` what disagreed."""

    ok: bool
    evidence: str
    counterexample: str | None = None

    def __bool__(self) -> bool:
        return self.ok


def verify(program: Program, kernel: Any = None, *, seed: int = 0) -> Verdict:
    """Every e-node of every e-class of the saturated e-graph of a small instance evaluates to its class's value; the plan chosen
    for that instance, run on the cpu, agrees with `evaluate`; so does `kernel`, if it runs on the cpu and is small enough.

    With a `Term` in the kernel's place: does it have the value of the program's first output?  EqsatError for anything else.
    """
    from .compiler import optimize, splittable
    from .egraph import saturate
    from .kernel import Kernel
    from .reference import evaluate
    from .rules.joins import find
    from .targets import Target
    from .testing import check_graph

    if not isinstance(program, Program):
        remedy = "bind its extents first: program.bind(n=…)" if hasattr(program, "bind") else "trace the function first"
        raise EqsatError(f"verify takes a traced program, not {type(program).__name__}", remedy)
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise EqsatError(f"seed must be an int ≥ 0, not {seed!r}", "it decides the random inputs")
    if isinstance(kernel, Term):
        return _same_value(program, kernel, seed)
    if kernel is not None and not isinstance(kernel, Kernel):
        raise EqsatError(f"verify takes a kernel or a term, not {type(kernel).__name__}", "a kernel is what optimize returns")
    small = shrink(program)
    saturated = saturate(small, splittable=splittable(program, Target("cuda")), joins=find(small))
    verdict = check_graph(saturated, small, seed)
    if not verdict.ok:
        return Verdict(False, verdict.evidence, verdict.counterexample)
    evidence = [f"{verdict.evidence} at {small.axes}"]
    for name, p, k in (("plan of the small instance", small, optimize(small, "cpu")), ("kernel", program, kernel)):
        if k is None or space(p) > LARGEST or k.target != "cpu":
            continue
        arrays = random_inputs(p, np.random.default_rng(seed))
        want, got = evaluate(p, *arrays), k(*arrays)
        for o, w, g in zip(p.outputs, *((x if isinstance(x, tuple) else (x,)) for x in (want, got))):
            bad = disagreement(np.asarray(w, np.float64), np.asarray(g).astype(np.float64), o.dtype)
            if bad:
                return Verdict(False, "; ".join(evidence), f"{name}: {bad} (seed {seed}, extents {p.axes})")
        evidence.append(f"{name} agrees with float64")
    return Verdict(True, "; ".join(evidence))


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
    error = np.abs(np.where(finite, got - want, 0.0)).max(initial=0.0)
    return None if error <= tolerance * max(scale, 1e-30) else f"error {error:.3g} at values up to {scale:.3g}"


def space(program: Program) -> int:
    """Points of the whole iteration space."""
    return math.prod(program.axes.values())


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
    """The same program at small, mostly odd extents.  An axis keeps its extent if an index uses it with an offset, or a stride
    that is not the row-major one of its dimension."""
    shapes = {i.name: i.shape for i in program.inputs}
    fixed: set[str] = set()
    same: dict[str, str] = {}

    def root(a: str) -> str:
        while a in same:
            a = same[a]
        return a

    terms = list(postorder(o.term for o in program.outputs))
    for t in terms:
        if t.op == "input":
            name, index = t.attr  # type: ignore[misc]
            for ix, n in zip(index, shapes[name]):
                if not clean(ix, program.axes, n):
                    fixed.update(ix.axes)
        elif t.op == "view":
            for a, ix in t.attr:  # type: ignore[attr-defined]
                if ix.terms != ((ix.axes[0], 1),) if ix.axes else True:
                    fixed.update((a, *ix.axes))
                elif ix.const or program.axes[a] != program.axes[ix.axes[0]]:
                    fixed.update((a, *ix.axes))
                elif root(a) != root(ix.axes[0]):
                    same[root(a)] = root(ix.axes[0])
        elif t.op == "gather":
            fixed.add(t.attr)  # type: ignore[arg-type]
    keep = {root(a) for a in fixed}
    roots = list(dict.fromkeys(root(a) for a in program.axes))
    size = {r: program.axes[r] if r in keep else min(program.axes[r], SMALL[n % len(SMALL)]) for n, r in enumerate(roots)}
    axes = {a: size[root(a)] for a in program.axes}

    def resize(ix: Affine, n: int) -> Affine:
        return row_major(ix.axes, axes) if clean(ix, program.axes, n) else ix

    def f(t: Term, args: tuple[Term, ...]) -> Term | None:
        if t.op != "input":
            return None
        name, index = t.attr  # type: ignore[misc]
        return make("input", (name, tuple(resize(ix, n) for ix, n in zip(index, shapes[name]))))

    new = rewrite([o.term for o in program.outputs], f)
    shape = dict(shapes)
    for t in terms:
        if t.op == "input":
            name, index = t.attr  # type: ignore[misc]
            shape[name] = tuple(
                math.prod(axes[a] for a in ix.axes) if clean(ix, program.axes, n) else n for ix, n in zip(index, shapes[name])
            )
    ins = tuple(Input(i.name, shape[i.name], i.dtype, i.range) for i in program.inputs)
    outs = tuple(
        Output(t, o.dims, tuple(math.prod(axes[a] for a in d) for d in o.dims), o.dtype) for t, o in zip(new, program.outputs)
    )
    return replace(program, inputs=ins, outputs=outs, axes=axes)


def row_major(order: tuple[str, ...], axes: dict[str, int]) -> Affine:
    step, terms = 1, []
    for a in reversed(order):
        terms.append((a, step))
        step *= axes[a]
    return Affine(0, tuple(reversed(terms)))


def clean(ix: Affine, axes: dict[str, int], n: int) -> bool:
    """Is the index the row-major one of its axes, covering the dimension?"""
    return ix == row_major(ix.axes, axes) and math.prod(axes[a] for a in ix.axes) == n
