"""Special values, end to end: emitted GPU code, run in the emulator, beside float64 evaluation of the source.

    python -m eqsat_neptune.testing.specials                        # everything: hours of one core; --jobs N takes N
    python -m eqsat_neptune.testing.specials --only qknorm,variance --ways general:sm_80 --dtypes float16

A *subject* is a program at one size (the library's, and masked ones), a *way* a target with a kind of plan: streamed in small tiles
("general") or as pipelines of warpgroups under random schedules ("pipeline", where there is one).  All value sets of a subject
(`values_of`) run through each way.  What is compared, element by element (w: float64, on the inputs as they are stored; s: step by
step in float32; h: step by step in float16, if that is what products read or anything is stored in):

- w is NaN: the result is NaN.
- w, s and h are the same infinity: the result is that infinity.
- w, s and h are finite: the result is finite, and as near to w as s is, or as rounding of what is stored explains.
- A result beyond its type's largest value is infinite.
- Where only s or h is not finite (what is between overflows): nothing is said.

Inputs count as finite, but for −∞ in scores (see scores.py).  An element that is NaN all the same shows in the outputs in which it
does in float64, and in no others; one that is infinite makes those NaN or infinite that are so in float64, perhaps not the same of the
two.  What masks may win over it: an output may also be what it is where 0·NaN = 0·∞ = 0 and −∞ + NaN = −∞.  And an output that is the
same whatever real numbers such elements are (a softmax over one key) may be just that.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from ..codegen.check import check
from ..codegen.cuda import emulate
from ..codegen.cuda.emit import emit
from ..codegen.lower import lower
from ..errors import EqsatError
from ..extraction.plan import Plan
from ..program import FLOATS, Program, TensorSpec
from ..programs import CASES, Case
from ..reference import Env, Value, _assembled, apply, evaluate
from ..scores import may_be_masked
from ..targets import parse_target
from ..terms import Term, postorder
from ..trace import trace
from . import masked
from .pipelines import as_pipelines
from .rounding import difference, reference
from .small_tiles import SmallTilesOnGpu, plans

Arrays = list[np.ndarray]

DTYPES = ("bfloat16", "float16", "float32")
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
NEGLIGIBLE = 1e-3  # of a norm: below it errors count absolutely
EDGE = 0.02  # results so near to their type's largest value may round to infinity
TARGETS = {"sm_80": "cuda:sm_80", "sm_90a": "cuda:sm_90a", "gfx942": "hip:gfx942", "gfx1100": "hip:gfx1100"}
WAYS = ("general:sm_80", "general:gfx942", "general:gfx1100", "pipeline:sm_90a")
PIPELINES = 2  # random schedules of one plan


# ------------------------------------------------------------------ subjects


@dataclass(frozen=True)
class Subject:
    """A program at one size.  specs: of its inputs, draw: their ordinary values (None: normal ones), both for a floating type that
    is given."""

    name: str
    fn: Callable[..., Any]
    specs: Callable[[str], Sequence[TensorSpec]]
    draw: Callable[[str], Arrays] | None = None
    masks: tuple[int, int] | None = None  # the last input is a mask of this shape

    def trace(self, dtype: str) -> Program:
        p = trace(self.fn, *self.specs(dtype))
        assert isinstance(p, Program)
        return p

    def normal(self, dtype: str) -> Arrays:
        if self.draw is not None:
            return self.draw(dtype)
        rng = np.random.default_rng(3)
        return [rng.standard_normal(i.shape).astype(np.dtype(i.dtype)) for i in self.trace(dtype).inputs]


def subjects() -> list[Subject]:
    return [*_of_the_library(), *_of_other_lengths(), *_masked()]


def _of_the_library() -> Iterator[Subject]:
    """Every program with all extents off the tile, and with those in memory's order as copies of whole boxes need them."""
    for case in CASES.values():
        for size in ("ragged", "aligned"):
            extents = _extents(case, size)
            if size == "aligned" and (case.section == "A" or extents == _extents(case, "ragged")):
                continue

            def specs(dtype: str, case: Case = case, extents: Mapping[str, int] = extents) -> Sequence[TensorSpec]:
                return case.specs("small", dtype, **extents)

            def draw(dtype: str, case: Case = case, extents: Mapping[str, int] = extents) -> Arrays:
                return case.inputs("small", np.random.default_rng(3), dtype, **extents)

            yield Subject(f"{case.name} {size}", case.function("small"), specs, draw)


def _extents(case: Case, size: str) -> dict[str, int]:
    """Long axes are longer than a tile of warpgroups; heads' dims are whole fragments."""
    out = {}
    for name, n in case.small.items():
        heads = name in ("b", "hq", "hkv", "h", "batch", "t", "depth")
        if heads:
            out[name] = n
        elif size == "aligned":
            out[name] = 80 if n >= 30 else -(-n // 16) * 16
        else:
            out[name] = 83 if n >= 30 else 16 if name == "d" and case.section in "AC" and n == 8 else n
    if "f" in out and "heads" in case.small:
        out["f"] = case.small["f"]
    return out


LENGTHS = {"more queries": (83, 37), "one key": (37, 1), "two keys": (70, 2), "few queries": (5, 83)}


def _of_other_lengths() -> Iterator[Subject]:
    for case in (c for c in CASES.values() if c.section == "A" and c.name.startswith("prefill")):
        for what, (nq, nk) in LENGTHS.items():

            def specs(dtype: str, case: Case = case, nq: int = nq, nk: int = nk) -> Sequence[TensorSpec]:
                q, k, v, *rest = case.specs("small", dtype, d=16)
                return [_with_rows(q, nq), _with_rows(k, nk), _with_rows(v, nk), *rest]

            yield Subject(f"{case.name} {what}", case.function("small"), specs)


def _with_rows(s: TensorSpec, n: int) -> TensorSpec:
    return TensorSpec((*s.shape[:-2], n, s.shape[-1]), s.dtype)


def _masked() -> Iterator[Subject]:
    programs: list[Callable[..., Any]] = [*masked.BY_POSITION, *masked.BY_INPUT]
    for fn in programs:
        for nq, nk in ((37, 83), (83, 37), (70, 1)):
            if nk == 1 and fn is masked.single_key:
                continue
            by_input = fn in masked.BY_INPUT

            def specs(dtype: str, nq: int = nq, nk: int = nk, by_input: bool = by_input) -> Sequence[TensorSpec]:
                shapes = [(1, n, 16) for n in (nq, nk, nk)]
                return [*(TensorSpec(s, dtype) for s in shapes), *([TensorSpec((nq, nk), dtype)] if by_input else [])]

            yield Subject(f"{fn.__name__} {nq}x{nk}", fn, specs, masks=(nq, nk) if by_input else None)


# ------------------------------------------------------------------ values


@dataclass(frozen=True)
class Values:
    """Inputs with something in them.  wild: "NaN" or "∞" if elements are that (NaN: any) and no score's −∞."""

    name: str
    arrays: Arrays
    wild: str = ""


def values_of(subject: Subject, p: Program, dtype: str) -> Iterator[Values]:
    normal = subject.normal(dtype)
    scores = may_be_masked(p, [o.term for o in p.outputs])
    yield Values("normal", normal)
    free = [n for n, i in enumerate(p.inputs) if i.dtype in FLOATS and i.range is None and i.shape and 0 not in i.shape]

    def changed(what: str, new: Mapping[int, np.ndarray]) -> Values:
        arrays = list(normal)
        wild = ""
        for n, x in new.items():
            with np.errstate(all="ignore"):
                arrays[n] = np.ascontiguousarray(x).astype(normal[n].dtype)  # all lie alike: one library runs them
            y = arrays[n].astype(np.float64)
            if np.isnan(y).any():
                wild = "NaN"
            elif (y == np.inf).any() or ((y == -np.inf).any() and p.inputs[n].name not in scores):
                wild = wild or "∞"
        return Values(what, arrays, wild)

    wide = {n: normal[n].astype(np.float64) for n in free}
    yield changed("all ·100", {n: 100 * x for n, x in wide.items()})
    yield changed("all denormal", {n: (1e-6 if dtype == "float16" else 1e-39) * x for n, x in wide.items()})
    yield changed("all zero", {n: 0 * x for n, x in wide.items()})
    for n in free:
        for what, x in _finite(wide[n], dtype):
            yield changed(f"{p.inputs[n].name}: {what}", {n: x})
        for what, x in _infinite(wide[n]):
            yield changed(f"{p.inputs[n].name}: {what}", {n: x})
    if subject.masks is not None:
        for what, m in masked.masks(*subject.masks):
            yield changed(f"mask: {what}", {len(normal) - 1: m})
            if what in ("all masked", "first tile masked", "whole rows"):
                yield changed(f"mask: {what}, ·100", {**{n: 100 * wide[n] for n in free[:2]}, len(normal) - 1: m})


def _finite(x: np.ndarray, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    yield "±1e4", 1e4 * np.clip(x, -3, 3)
    yield "constant rows", np.broadcast_to(x[..., :1], x.shape)
    if x.ndim > 1:
        yield "equal rows", np.broadcast_to(x[..., :1, :], x.shape)
    yield "1000 ± 1e-3", 1000 + 1e-3 * x
    yield "zero", 0 * x
    yield "−0", -0.0 * np.abs(x)
    yield "a zero row", _with(x, (*_last(x), slice(None)), 0.0)
    if dtype != "float16":
        yield "1e15", 1e15 * x
        yield "denormal", 1e-39 * x
    else:
        yield "denormal", 1e-6 * x


def _infinite(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    first, last = (0,) * x.ndim, (-1,) * x.ndim
    middle = tuple(n // 2 for n in x.shape)
    tile = slice(0, min(17, max(1, x.shape[-1] - 1)))
    for what, v in (("NaN", np.nan), ("∞", np.inf), ("−∞", -np.inf)):
        yield f"{what} first", _with(x, first, v)
        yield f"{what} last", _with(x, last, v)
        yield f"{what} in the middle", _with(x, middle, v)
    yield "two ∞", _with(_with(x, middle, np.inf), last, np.inf)
    yield "−∞ in a row", _with(x, (*_last(x), slice(None)), -np.inf)
    yield "−∞ in the first tile", _with(x, (..., tile), -np.inf)
    yield "−∞ everywhere", np.full_like(x, -np.inf)
    if x.ndim > 1:
        yield "−∞ in the first rows", _with(x, (..., slice(0, min(17, max(1, x.shape[-2] - 1))), slice(None)), -np.inf)


def _last(x: np.ndarray) -> tuple[Any, ...]:
    return (-1,) if x.ndim > 1 else ()


def _with(x: np.ndarray, place: Any, value: float) -> np.ndarray:
    x = x.copy()
    x[place] = value
    return x


# ------------------------------------------------------------------ what is right


@dataclass
class Expected:
    """All that results of a program on some values are compared with."""

    program: Program
    values: Values
    half: bool  # does anything pass through float16?

    def at(self, dtype: str, arrays: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            out = evaluate(self.program, *(arrays or self.values.arrays), dtype=dtype)
        return [np.asarray(x) for x in (out if isinstance(out, tuple) else (out,))]

    @cached_property
    def want(self) -> list[np.ndarray]:
        return self.at("float64")

    @cached_property
    def single(self) -> list[np.ndarray]:
        return self.at("float32")

    @cached_property
    def halves(self) -> list[np.ndarray]:
        return self.at("float16") if self.half else self.single

    @cached_property
    def bounds(self) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            return reference(self.program, self.values.arrays)[1]

    @cached_property
    def skipping(self) -> list[np.ndarray]:
        """Outputs in float64 where what masks wins: a factor 0 over NaN and infinities, a term −∞ over NaN."""
        env = Env(self.program.axes, {i.name: x.astype(np.float64) for i, x in zip(self.program.inputs, self.values.arrays)})
        memo: dict[Term, Value] = {}
        for t in postorder(o.term for o in self.program.outputs):
            axes, x = apply(t.op, t.attr, [memo[a] for a in t.args], env)
            if t.op in ("mul", "add"):
                least = 0.0 if t.op == "mul" else -np.inf
                _, xs = env.align([memo[a] for a in t.args])
                masks = np.logical_or.reduce(np.broadcast_arrays(*(y == least for y in xs)))
                wild = np.logical_or.reduce(np.broadcast_arrays(*(np.isnan(y) for y in xs))) if t.op == "add" else True
                x = np.where(masks & wild, least, x)
            memo[t] = axes, x
        return [_assembled(o, memo[o.term], env) for o in self.program.outputs]

    @cached_property
    def without(self) -> list[np.ndarray]:
        """Outputs in float64 with real numbers where elements are wild; NaN where these decide what an output is."""
        scores = may_be_masked(self.program, [o.term for o in self.program.outputs])
        variants = []
        for seed in (0, 1):
            rng, arrays = np.random.default_rng(seed), []
            for i, a in zip(self.program.inputs, self.values.arrays):
                x = a.astype(np.float64)
                wild = np.isnan(x) | (x == np.inf) | ((x == -np.inf) & (i.name not in scores))
                arrays.append(np.where(wild, rng.uniform(0.5, 2.0, x.shape), x).astype(a.dtype))
            variants.append(self.at("float64", arrays))
        return [np.where(x == y, x, np.nan) for x, y in zip(*variants)]

    def wrong(self, got: Sequence[np.ndarray]) -> str | None:
        """What is wrong with results, if anything is."""
        for n, g in enumerate(got):
            said = self._wrong(n, np.asarray(g))
            if said:
                return f"output {n}: {said}"
        return None

    def _wrong(self, n: int, g: np.ndarray) -> str | None:
        w, s, h = self.want[n], self.single[n], self.halves[n]
        if g.shape != w.shape:
            return f"shape {g.shape} instead of {w.shape}"
        wild = self.values.wild
        if g.dtype.kind in "iub":
            sure = (w == s) & (w == h) & np.isfinite(self.bounds[n])
            if wild:
                sure &= (g != self.skipping[n]) & (g != self.without[n])
            return _at(sure & (g != w), g, w, "another integer")
        with np.errstate(all="ignore"):
            sharp = np.ones(w.shape, bool)
            if g.dtype.itemsize < 4:
                largest = float(ml_dtypes.finfo(g.dtype).max)
                sharp = (np.abs(w) < (1 - EDGE) * largest) | ~(np.abs(w) < (1 + EDGE) * largest)
                w, s = (x.astype(g.dtype).astype(np.float64) for x in (w, s))
            narrow, g, h = g, g.astype(np.float64), h.astype(np.float64)
        finite = np.isfinite(w) & np.isfinite(s) & np.isfinite(h) & sharp
        infinite = sharp & np.isinf(w) & (w == s) & (w == h)
        lost = np.isnan(w) & ~np.isnan(g)
        if wild == "∞":
            lost, infinite = lost & np.isfinite(g), infinite & np.isfinite(g)
        if wild and lost.any():
            lost &= ~self._near(narrow, self.skipping[n]) & ~self._near(narrow, self.without[n])
        for bad, what in (
            (lost, "no NaN where the source has one"),
            (infinite & (g != w), "not the infinity that the source has"),
            (finite & ~np.isfinite(g), "not finite where the source is"),
        ):
            if said := _at(bad, g, w, what):
                return said
        return self._inexact(n, g, w, s, finite)

    def _near(self, g: np.ndarray, want: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            x, y = g.astype(np.float64), want.astype(g.dtype).astype(np.float64)
            tolerance = TOLERANCE.get(self.worst, 1e-5)
            near = np.abs(x - y) <= 8 * tolerance * np.maximum(np.abs(y), np.abs(y[np.isfinite(y)]).max(initial=0.0))
            return np.asarray((x == y) | (np.isnan(x) & np.isnan(y)) | near)

    @property
    def worst(self) -> str:
        types = {i.dtype for i in self.program.inputs} | {o.dtype for o in self.program.outputs}
        return max((t for t in types if t in TOLERANCE), key=TOLERANCE.__getitem__, default="float32")

    def _inexact(self, n: int, g: np.ndarray, w: np.ndarray, s: np.ndarray, finite: np.ndarray) -> str | None:
        """By the norm of what float32 gets right, or else element by element, within what rounding explains."""
        with np.errstate(all="ignore"):
            good = finite & (np.abs(s - w) <= 1e-2 * np.abs(w[finite]).max(initial=0.0) + 1e-300)
            size = max(float(np.linalg.norm(w[good])), NEGLIGIBLE)
            error, theirs = (float(np.linalg.norm(x[good] - w[good])) / size for x in (g, s))
        if error <= max(TOLERANCE[self.worst], 3 * theirs):
            return None
        bound = np.where(good, self.bounds[n], np.inf)
        with np.errstate(all="ignore"):
            said = difference(w, bound, g, self.worst)
        return said and f"error {error:.2g} (float32 step by step: {theirs:.2g}): {said}"


def _at(bad: np.ndarray, g: np.ndarray, w: np.ndarray, what: str) -> str | None:
    if not bad.any():
        return None
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{what}: {g[at]} instead of {w[at]} at {at} ({int(bad.sum())} of {bad.size} elements)"


# ------------------------------------------------------------------ running


@dataclass
class Fault:
    subject: str
    dtype: str
    way: str
    values: str
    said: str

    def __str__(self) -> str:
        return f"{self.subject}, {self.dtype}, {self.way}, {self.values}: {self.said}"


@dataclass
class Tally:
    """plans and runs: how many; refused: subjects that a way has no plan for."""

    plans: int = 0
    runs: int = 0
    refused: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.plans, self.runs, self.refused = self.plans + other.plans, self.runs + other.runs, self.refused + other.refused
        self.faults += other.faults


def plans_of(p: Program, ways: Sequence[str], seed: int = 0) -> Iterator[tuple[str, Plan | None]]:
    """A plan for each way; pipelines: up to PIPELINES of them, None if there is none."""
    found = plans(p, SmallTilesOnGpu())
    for way in ways:
        kind, arch = way.split(":")
        if kind == "general":
            yield way, found[seed % len(found)]
            continue
        r = random.Random(seed)
        some = [as_pipelines(r, plan, emulate.emulated(parse_target(TARGETS[arch]))) for plan in (found * PIPELINES)[:PIPELINES]]
        kept = [x for x in some if x is not None]
        yield from ((way, x) for x in kept)
        if not kept:
            yield way, None


def examine(subject: Subject, dtype: str, ways: Sequence[str], seed: int = 0, share: int = 1) -> Tally:
    """One subject by plans for these ways, with every share-th of its values."""
    tally = Tally()
    p = subject.trace(dtype)
    half = "float16" in {*(i.dtype for i in p.inputs), *(o.dtype for o in p.outputs)}
    expected = [Expected(p, v, half) for n, v in enumerate(values_of(subject, p, dtype)) if (n + seed) % share == 0]
    for way, plan in plans_of(p, ways, seed):
        if plan is None:
            tally.refused += 1
            continue
        tally.plans += 1
        arch = emulate.emulated(parse_target(TARGETS[way.split(":")[1]]))
        source = emit([check(lower(k, plan.buffers, plan.compute_dtype)) for k in plan.kernels], plan.buffers, arch)
        with tempfile.TemporaryDirectory(prefix="eqsat_neptune_") as folder:
            library = None
            try:
                for e in expected:
                    inputs = {i.name: x for i, x in zip(p.inputs, e.values.arrays)}
                    library = library or emulate.build(source, plan.buffers, inputs, folder)
                    (out,) = emulate.launch(library, source, plan.buffers, inputs, (seed % 7,))
                    tally.runs += 1
                    said = e.wrong([out[f"out{n}"] for n in range(len(p.outputs))])
                    if said:
                        tally.faults.append(Fault(subject.name, dtype, way, e.values.name, said))
            finally:
                if library is not None:
                    emulate.unload(library)
    return tally


# ------------------------------------------------------------------ the command


Job = tuple[int, str, tuple[str, ...], int]  # subject, dtype, ways, every how many-th of its values


def jobs(names: Sequence[str] = (), dtypes: Sequence[str] = DTYPES, ways: Sequence[str] = WAYS, share: int = 1) -> list[Job]:
    """names: parts of names of subjects, all if there are none."""
    known = list(enumerate(subjects()))
    chosen = [n for n, s in known if not names or any(x in s.name for x in names)]
    if not chosen:
        raise EqsatError(f"no subject is called {', '.join(names)}", f"there are {', '.join(s.name for _, s in known[:3])}, …")
    return [(n, d, tuple(ways), share) for n in chosen for d in dtypes]


def run(job: Job) -> Tally:
    """A subject that cannot be compiled or run is a fault, too."""
    n, dtype, ways, share = job
    subject = subjects()[n]
    try:
        return examine(subject, dtype, ways, n, share)
    except Exception as e:
        return Tally(faults=[Fault(subject.name, dtype, ",".join(ways), "", f"{type(e).__name__}: {e}"[:500])])


def main(argv: Sequence[str] | None = None) -> int:
    a = argparse.ArgumentParser(prog="python -m eqsat_neptune.testing.specials", description=(__doc__ or "").partition("\n")[0])
    a.add_argument("--only", default="", help="parts of names of subjects, with commas between")
    a.add_argument("--dtypes", default=",".join(DTYPES))
    a.add_argument("--ways", default=",".join(WAYS))
    a.add_argument("--share", type=int, default=1, metavar="N", help="every N-th of the values of a subject")
    a.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the work")
    a.add_argument("--jobs", type=int, default=1, help="processes")
    args = a.parse_args(argv)
    try:
        todo = _chosen(args)
    except EqsatError as e:
        print(e, file=sys.stderr)
        return 2
    from tqdm import tqdm

    start, whole = time.monotonic(), Tally()
    with multiprocessing.get_context("spawn").Pool(max(1, args.jobs)) as pool:
        for tally in tqdm(pool.imap_unordered(run, todo), total=len(todo), disable=None):
            whole.add(tally)
            for f in tally.faults:
                print(f, flush=True)
    print(
        f"{len(todo)} programs and types, {whole.plans} plans, {whole.runs} runs, {whole.refused} without a pipeline, "
        f"{len(whole.faults)} faults, {time.monotonic() - start:.0f} s"
    )
    return 1 if whole.faults else 0


def _chosen(args: argparse.Namespace) -> list[Job]:
    dtypes, ways = args.dtypes.split(","), args.ways.split(",")
    for given, known, what in ((dtypes, DTYPES, "dtype"), (ways, WAYS, "way")):
        if wrong := [x for x in given if x not in known]:
            raise EqsatError(f"{wrong[0]!r} is no {what}", f"one of {', '.join(known)}")
    if emulate.host_compiler() is None:
        raise EqsatError("no C++ compiler for the emulator", "install g++")
    part, _, parts = args.part.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)) or args.share < 1:
        raise EqsatError(f"--part {args.part} --share {args.share}", "parts are 1/N to N/N, and a share is 1 or more")
    names = [x for x in args.only.split(",") if x]
    return jobs(names, dtypes, ways, args.share)[int(part) - 1 :: int(parts)]


if __name__ == "__main__":
    sys.exit(main())
