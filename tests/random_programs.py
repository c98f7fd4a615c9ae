"""Random programs of positional array code that run on NumPy arrays and on traced tensors alike.

A program is a list of steps over a growing list of tensors; it is drawn by running it on NumPy arrays, so every step fits.
``python tests/random_programs.py 0 10000`` checks trace + evaluate against NumPy for these seeds and prints what disagrees.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

EXTENTS = (1, 1, 2, 2, 3, 4, 6, 6, 8, 12)
SMALL_EXTENTS = (0, 1, 1, 2, 3)
MAX_SIZE = 3000
Step = Callable[[Any, list[Any]], Any]                                          # (namespace, tensors so far) → the next one


@dataclass
class RandomProgram:
    seed: int
    inputs: list[np.ndarray]
    steps: list[tuple[str, Step]]
    results: list[np.ndarray]                                                   # of NumPy, inputs first
    outputs: list[int]

    def function(self, xp: Any) -> Callable[..., tuple[Any, ...]]:
        """The program over tensors of a namespace."""

        def program(*inputs: Any) -> tuple[Any, ...]:
            values = list(inputs)
            for _, step in self.steps:
                values.append(step(xp, values))
            return tuple(values[o] for o in self.outputs)

        return program

    def __str__(self) -> str:
        n = len(self.inputs)
        lines = [f"seed {self.seed}: inputs {', '.join(str(x.shape) for x in self.inputs)}, outputs {self.outputs}"]
        return "\n".join(lines + [f"  {i + n}: {text} {self.results[i + n].shape}" for i, (text, _) in enumerate(self.steps)])


def draw(seed: int, steps: int | None = None, extents: Sequence[int] = EXTENTS) -> RandomProgram:
    r, rng = random.Random(seed), np.random.default_rng(seed)
    shapes = [[r.choice(extents) for _ in range(r.randint(0, 3))] for _ in range(r.randint(1, 3))]
    inputs = [rng.standard_normal(s) for s in shapes]
    program = RandomProgram(seed, inputs, [], list(inputs), [])
    wanted, tries = steps or r.randint(2, 9), 0
    with np.errstate(all="ignore"):
        while len(program.steps) < wanted and tries < 300:
            tries += 1
            drawn = next(_candidates(r, program.results, extents), None)
            if drawn is None:
                continue
            try:
                result = np.asarray(drawn[1](np, program.results))
            except (ValueError, IndexError, np.exceptions.AxisError):           # shapes that do not fit, a max of nothing
                continue
            if result.size <= MAX_SIZE:
                program.steps.append(drawn)
                program.results.append(result)
    last = len(program.results) - 1
    program.outputs = sorted({last, r.randint(min(len(inputs), last), last)})
    return program


def _pick(r: random.Random, values: list[np.ndarray]) -> int:
    return r.randrange(len(values)) if r.random() < 0.5 else len(values) - 1 - r.randrange(min(4, len(values)))


def _candidates(r: random.Random, values: list[np.ndarray], extents: Sequence[int]) -> Iterator[tuple[str, Step]]:
    """One random step, or none if the tensors drawn do not suit it."""
    i, j, k = _pick(r, values), _pick(r, values), _pick(r, values)
    x, y = values[i], values[j]
    d = r.randrange(x.ndim) if x.ndim else 0
    match r.choice(_KINDS):
        case "binary":
            f = r.choice(["add", "multiply", "subtract", "maximum"])
            yield f"{f} {i} {j}", lambda xp, v: getattr(xp, f)(v[i], v[j])
        case "unary":
            g = r.choice(["tanh", "abs", "negative", "sin"])
            yield f"{g} {i}", lambda xp, v: getattr(xp, g)(v[i])
        case "where":
            yield f"where {i} {j} {k}", lambda xp, v: xp.where(v[i] > 0.1, v[j], v[k])
        case "matmul" if x.ndim and y.ndim:
            yield f"matmul {i} {j}", lambda xp, v: xp.tanh(v[i] @ v[j])
        case "self matmul" if x.ndim > 1:
            yield f"self matmul {i}", lambda xp, v: xp.tanh(v[i] @ v[i].mT)
        case "reduce":
            axis: Any = None if r.random() < 0.1 or not x.ndim else tuple(r.sample(range(-x.ndim, 0), r.randint(1, x.ndim)))
            f, keep = r.choice(["sum", "max", "min", "mean", "std", "prod"]), r.random() < 0.5
            yield f"{f} {i} axis {axis} {keep}", lambda xp, v: getattr(xp, f)(v[i], axis=axis, keepdims=keep)
        case "softmax" if x.ndim:
            yield f"softmax {i} axis {d}", lambda xp, v: _softmax(xp, v[i], d)
        case "argmax":
            at, keep = (r.choice([None, d]) if x.ndim else None), r.random() < 0.5
            yield f"argmax {i} axis {at} {keep}", lambda xp, v: 0.1 * xp.astype(
                xp.argmax(v[i], axis=at, keepdims=keep), xp.float64)
        case "cumulative" if x.ndim:
            first = r.random() < 0.3
            yield f"cumulative_sum {i} axis {d} {first}", lambda xp, v: xp.tanh(
                xp.cumulative_sum(v[i], axis=d, include_initial=first))
        case "reshape":
            shape = _factors(r, x.size, r.randint(1, 4))
            yield f"reshape {i} {shape}", lambda xp, v: xp.reshape(v[i], shape)
        case "permute":
            order = tuple(r.sample(range(x.ndim), x.ndim))
            yield f"permute {i} {order}", lambda xp, v: xp.permute_dims(v[i], order)
        case "slice":
            key = _slices(r, x.shape)
            yield f"slice {i} {key}", lambda xp, v: v[i][key] + 0.0
        case "broadcast":
            to = tuple(n if n != 1 or r.random() < 0.5 else r.choice(extents) for n in x.shape)
            to = (r.choice(extents), *to) if r.random() < 0.3 else to
            yield f"broadcast {i} {to}", lambda xp, v: xp.broadcast_to(v[i], to)
        case "expand":
            at = r.randint(0, x.ndim)
            yield f"expand {i} {at}", lambda xp, v: xp.expand_dims(v[i], axis=at)
        case "concat" if x.ndim:
            yield f"concat {i} {j} axis {d}", lambda xp, v: xp.concat([v[i], v[j]], axis=d)
        case "stack":
            at = r.randint(0, x.ndim)
            yield f"stack {i} {j} axis {at}", lambda xp, v: xp.stack([v[i], v[j]], axis=at)
        case "roll" if x.ndim:
            shift, at = r.randint(-3, 5), r.choice([None, d])
            yield f"roll {i} {shift} axis {at}", lambda xp, v: xp.roll(v[i], shift, axis=at)
        case "flip":
            at = r.choice([None, *range(x.ndim)])
            yield f"flip {i} axis {at}", lambda xp, v: xp.flip(v[i], axis=at)
        case "tile" if x.ndim:
            times = r.randint(1, 3)
            reps = tuple(times if p == d else 1 for p in range(x.ndim))
            yield f"tile {i} {reps}", lambda xp, v: xp.tile(v[i], reps)
        case "repeat" if x.ndim:
            times = r.randint(1, 3)
            yield f"repeat {i} {times} axis {d}", lambda xp, v: xp.repeat(v[i], times, axis=d)
        case "mask" if x.ndim > 1:
            yield f"causal mask {i}", lambda xp, v: xp.where(
                xp.arange(v[i].shape[-2])[:, None] >= xp.arange(v[i].shape[-1]), v[i], -2.0)
        case "diagonal" if x.ndim > 1:
            offset = r.randint(-1, 1)
            yield f"diagonal {i} {offset}", lambda xp, v: xp.linalg.diagonal(v[i], offset=offset) + 0.0
        case "take" if x.ndim and x.shape[d] and y.size <= 12:
            yield f"take {i} {j} axis {d}", lambda xp, v: xp.take(
                v[i], xp.reshape(_indices(xp, v[j], v[i].shape[d]), (-1,)), axis=d)
        case "take along" if x.ndim and x.ndim == y.ndim and x.shape[d]:
            yield f"take_along {i} {j} axis {d}", lambda xp, v: xp.take_along_axis(
                v[i], _indices(xp, v[j], v[i].shape[d]), axis=d)
        case "index" if x.ndim and 0 not in x.shape and y.size <= 12 and values[k].size <= 12:
            yield _index(r, i, j, k, x)


_KINDS = (
    "binary", "binary", "binary", "unary", "where", "matmul", "matmul", "self matmul", "reduce", "softmax", "argmax",
    "cumulative", "reshape", "reshape", "permute", "slice", "slice", "broadcast", "expand", "concat", "stack", "roll", "flip",
    "tile", "repeat", "mask", "diagonal", "take", "take along", "index", "index",
)


def _softmax(xp: Any, x: Any, axis: int) -> Any:
    e = xp.exp(x - xp.max(x, axis=axis, keepdims=True))
    return e / xp.sum(e, axis=axis, keepdims=True)


def _indices(xp: Any, x: Any, extent: int) -> Any:
    """Indices into an extent, made of the values of a tensor (the shift keeps 0 and 1 from the edges of an index)."""
    return xp.astype(xp.floor(xp.abs(x) * 7.0 + 0.3137) % extent, xp.int64)


def _index(r: random.Random, i: int, j: int, k: int, x: np.ndarray) -> tuple[str, Step]:
    """x[…] with one or two integer tensors among ints, slices and new dimensions."""
    entries: list[Any] = [r.choice([slice(None), slice(None), r.randrange(n)]) for n in x.shape]
    tensors = dict(zip(r.sample(range(x.ndim), min(x.ndim, r.randint(1, 2))), (j, k)))
    at = r.randint(0, x.ndim) if r.random() < 0.3 else None
    below = r.random() < 0.3                                                    # count from the end

    def step(xp: Any, v: list[Any]) -> Any:
        key = list(entries)
        for p, t in tensors.items():
            n = v[i].shape[p]
            key[p] = _indices(xp, v[t], n) - (n if below else 0)
        if at is not None:
            key.insert(at, None)
        return v[i][tuple(key)] + 0.0

    return f"index {i} {entries} tensors {tensors} new {at} {below}", step


def _factors(r: random.Random, n: int, count: int) -> tuple[int, ...]:
    if n == 0:
        return (0, 3)
    out = []
    for _ in range(count - 1):
        out.append(r.choice([d for d in range(1, n + 1) if n % d == 0]))
        n //= out[-1]
    out.append(n)
    r.shuffle(out)
    return tuple(out)


def _slices(r: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    key: list[Any] = []
    for n in shape:
        a = r.randrange(max(n, 1))
        key.append(r.choice([
            *[slice(None)] * 3, slice(None, None, -1), slice(None, None, 2), slice(n - 1, 0, -2), slice(n // 2),
            slice(n // 2, None), slice(a, r.randint(a, n + 1)), slice(a, r.randint(a, n + 1)),
            *([r.randrange(-n, n)] if n else []),
        ]))
    if r.random() < 0.2:
        key.insert(r.randint(0, len(key)), None)
    if r.random() < 0.1:
        key = [*key[:1], ..., *key[2:]]
    return tuple(key)


def check(program: RandomProgram) -> None:
    """Trace and evaluate; AssertionError where NumPy says otherwise or the terms are not well formed."""
    import eqsat_neptune as en
    from eqsat_neptune.terms import postorder

    specs = [en.TensorSpec(x.shape, "float64") for x in program.inputs]
    traced = en.trace(program.function(en.xp), *specs)
    results = en.evaluate(traced, *program.inputs)
    for o, result, out in zip(program.outputs, results, traced.outputs):
        want = program.results[o]
        assert result.shape == want.shape == out.shape
        np.testing.assert_allclose(result, want, rtol=1e-9, atol=1e-9)
        assert math.prod(traced.axes[a] for d in out.dims for a in d) == math.prod(out.shape)
    for t in postorder([o.term for o in traced.outputs]):
        assert t.free <= set(traced.axes)
    assert 1 not in traced.axes.values()
    assert str(traced) == str(en.trace(program.function(en.xp), *specs))


if __name__ == "__main__":
    start, stop = map(int, sys.argv[1:3])
    failures = 0
    for s in range(start, stop):
        drawn = draw(s, extents=SMALL_EXTENTS if "small" in sys.argv else EXTENTS)
        try:
            check(drawn)
        except Exception as e:
            failures += 1
            print(drawn, f"{type(e).__name__}: {e}", sep="\n", end="\n\n")
    print(f"{failures} of {stop - start} programs disagree")
