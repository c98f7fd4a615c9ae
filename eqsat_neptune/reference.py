"""The meaning of terms: a plain NumPy interpreter, in float64 unless asked otherwise.

A value is (axes, array) with one dimension for each axis, sorted by name.  Values align by name; where one depends on a part of
an axis (k.o) and another on all of it (k), the part is read at k's position.  Elements past the end of a ragged split do not
exist: every reduction takes them as its identity.  Comparisons and conditions are 0 or 1.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InputError, wrong_index
from .integers import wrapped
from .program import Input, Output, Program, dtype_name
from .terms import REDUCTIONS, Affine, Monoid, Term, axis_index, base, inner, normalise, outer, postorder, variables

if TYPE_CHECKING:
    from .trace import DynamicProgram

Value = tuple[tuple[str, ...], np.ndarray]

_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Any) -> Any:
    """To the last bit of the C library; NumPy has none."""
    x = np.asarray(x)
    return _erf(x).astype(x.dtype) if x.ndim else x.dtype.type(math.erf(x))


def _predicate(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: f(*xs).astype(np.result_type(*xs))


UN: dict[str, Callable[[Any], Any]] = {
    "neg": np.negative, "recip": lambda x: 1.0 / x, "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log,
    "log2": np.log2, "log10": np.log10, "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "abs": np.abs, "sign": np.sign, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc,
    "tanh": np.tanh, "sinh": np.sinh, "cosh": np.cosh, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "erf": erf, "not": _predicate(np.logical_not), "isnan": _predicate(np.isnan), "isinf": _predicate(np.isinf),
    "isfinite": _predicate(np.isfinite),
}
BI: dict[str, Callable[[Any, Any], Any]] = {
    "max": np.maximum, "min": np.minimum, "lt": _predicate(np.less), "le": _predicate(np.less_equal),
    "eq": _predicate(np.equal), "ne": _predicate(np.not_equal), "and": _predicate(np.logical_and),
    "or": _predicate(np.logical_or), "xor": _predicate(np.logical_xor), "pow": np.power, "floordiv": np.floor_divide,
    "mod": np.mod, "atan2": np.arctan2, "hypot": np.hypot, "copysign": np.copysign,
}
COMBINE: dict[str, np.ufunc] = {"+": np.add, "*": np.multiply, "max": np.maximum, "min": np.minimum}


class Env:
    """What terms are evaluated in: extents of whole axes, input arrays by name, block sizes of axes that are split.  signed_zeros:
    whether `testing` takes −0 for another value than 0, as IEEE arithmetic does; a plan may lose the sign (0 + x = x).  sure_zeros: whether
    it takes the sign of 0·(−1) for known."""

    def __init__(self, extents: Mapping[str, int], inputs: Mapping[str, Any] | None = None,
                 block: Mapping[str, int] | None = None, dtype: Any = np.float64, signed_zeros: bool = True,
                 sure_zeros: bool = True):
        self.signed_zeros, self.sure_zeros = signed_zeros, sure_zeros
        self.extents, self.block, self.dtype = dict(extents), dict(block or {}), np.dtype(dtype)
        self.inputs = {name: np.asarray(x).astype(self.dtype, copy=False) for name, x in (inputs or {}).items()}

    def size(self, axis: str) -> int:
        """Extent of an axis or a part of one (the blocks of k are ⌈k / block⌉)."""
        if axis in self.extents:
            return self.extents[axis]
        parent, dot, part = axis.rpartition(".")
        if not dot or parent not in self.block:
            raise InputError(f"axis {axis!r} has no extent", "give it in extents, or the block size of its parent in block")
        return self.block[parent] if part == "i" else -(-self.size(parent) // self.block[parent])

    def digit(self, whole: str, part: str) -> np.ndarray:
        """Position along `part` for each position along `whole`."""
        position = np.arange(self.size(whole))
        for step in part[len(whole) + 1:].split(".") if part != whole else ():
            block = self.block[whole]
            position = position // block if step == "o" else position % block
            whole = f"{whole}.{step}"
        return position

    # -------------------------------------------------------------- alignment

    def expand(self, value: Value, want: Sequence[str]) -> np.ndarray:
        """The array with one dimension for each axis of `want` (extent 1 where the value does not depend on it)."""
        axes, x = value
        if not any(a not in want for a in axes):
            x = x.transpose([axes.index(a) for a in want if a in axes])
            return x.reshape([self.size(a) if a in axes else 1 for a in want])
        index = []
        for a in axes:
            i, w = next((i, w) for i, w in enumerate(want) if a == w or a.startswith(w + "."))
            index.append(self.digit(w, a).reshape([-1 if j == i else 1 for j in range(len(want))]))
        return x[tuple(index)]

    def align(self, values: Sequence[Value], also: Iterable[str] = ()) -> tuple[tuple[str, ...], list[np.ndarray]]:
        want = tuple(sorted(normalise([*also, *(a for axes, _ in values for a in axes)])))
        return want, [self.expand(v, want) for v in values]

    def whole(self, axes: Sequence[str], x: np.ndarray) -> Value:
        """A value from an array whose axes are in any order and may be all the parts of one."""
        want, (x,) = self.align([(tuple(axes), x)])
        return want, x

    def explicit(self, axis: str, value: Value, pad: float) -> Value:
        """The value with `axis` as its first dimension; elements that do not exist (the last block may be short) are `pad`.

        A value that varies along k.i but not along k.o stands for all blocks.  One that varies along neither is taken at every
        element of k, so that a short block counts what it has.
        """
        steps = axis[len(base(axis)) + 1:].split(".") if "." in axis else []
        path = [".".join([base(axis), *steps[:i]]) for i in range(len(steps) + 1)]
        short = [p for p, s in zip(path, steps) if s == "i" and self.size(p) % self.block[p]]
        also = [axis]
        if short and not any(a == axis or a.startswith(axis + ".") or axis.startswith(a + ".") for a in value[0]):
            below = path[path.index(short[0]):]
            also += [outer(p) for p, q in pairwise(below) if q == inner(p)]
        axes, (x,) = self.align([value], also)
        x = np.broadcast_to(x, [self.size(a) for a in axes])
        while axis not in axes:
            i = next(i for i, a in enumerate(axes) if axis.startswith(a + "."))
            axes, x = self._split(axes, x, i, pad)
        for p in short:
            if (position := self._offset(axes, p, axis)) is not None:
                x = np.where(position < self.size(p), x, pad)
        i = axes.index(axis)
        return (axis, *axes[:i], *axes[i + 1:]), np.moveaxis(x, i, 0)

    def _split(self, axes: tuple[str, ...], x: np.ndarray, i: int, pad: float) -> Value:
        a = axes[i]
        o, b = self.size(outer(a)), self.block[a]
        x = np.moveaxis(x, i, 0)
        if o * b > len(x):
            x = np.concatenate([x, np.full((o * b - len(x), *x.shape[1:]), pad, x.dtype)])
        return (outer(a), inner(a), *axes[:i], *axes[i + 1:]), x.reshape(o, b, *x.shape[1:])

    def _position(self, axes: Sequence[str], name: str) -> np.ndarray | None:
        """Position along `name` over the dimensions `axes`, of which one or several form it; None if they do not."""
        if name in axes:
            return np.arange(self.size(name)).reshape([-1 if a == name else 1 for a in axes])
        cover = next((a for a in axes if name.startswith(a + ".")), None)
        if cover is not None:
            return self.digit(cover, name).reshape([-1 if a == cover else 1 for a in axes])
        if not any(a.startswith(name + ".") for a in axes):
            return None
        hi, lo = self._position(axes, outer(name)), self._position(axes, inner(name))
        return None if hi is None or lo is None else hi * self.block[name] + lo

    def _offset(self, axes: Sequence[str], whole: str, part: str) -> np.ndarray | None:
        """Position along `whole` of the first element that a position along `part` stands for; None if `axes` do not tell."""
        if whole == part:
            return self._position(axes, part)
        if part == outer(whole) or part.startswith(outer(whole) + "."):
            hi = self._offset(axes, outer(whole), part)
            return None if hi is None else hi * self.block[whole]
        hi, lo = self._position(axes, outer(whole)), self._offset(axes, inner(whole), part)
        return None if hi is None or lo is None else hi * self.block[whole] + lo

    def read(self, x: np.ndarray, index: Sequence[Affine]) -> Value:
        """An array read at an affine index for each dimension; 0 where that leaves the array."""
        axes = tuple(dict.fromkeys(a for ix in index for a in ix.axes))
        sizes = {a: self.size(a) for a in axes}
        ends = [ix.bounds(sizes) for ix in index]
        if all(0 <= lo and hi < n for (lo, hi), n in zip(ends, x.shape)):
            start = x[tuple(slice(ix.const, ix.const + 1) for ix in index)]
            strides = [sum(c * s for ix, s in zip(index, x.strides) for b, c in ix.terms if b == a) for a in axes]
            return self.whole(axes, np.lib.stride_tricks.as_strided(start, [sizes[a] for a in axes], strides, writeable=False))
        inside: Any = True
        at = []
        for ix, n in zip(index, x.shape):
            p: Any = np.asarray(ix.const)
            for a, c in ix.terms:
                p = p + c * np.arange(sizes[a]).reshape([-1 if b == a else 1 for b in axes])
            inside = inside & (p >= 0) & (p < n)
            at.append(np.clip(p, 0, max(n - 1, 0)))
        if 0 in x.shape:
            return self.whole(axes, np.zeros([sizes[a] for a in axes], x.dtype))
        y = np.where(inside, x[tuple(at)], x.dtype.type(0))
        return self.whole(axes, np.broadcast_to(y, [sizes[a] for a in axes]))


# ------------------------------------------------------------------ terms

def apply(op: str, attr: Any, args: Sequence[Value], env: Env) -> Value:
    """The value of one operator from the values of its arguments."""
    with np.errstate(all="ignore"):
        match op:
            case "num":
                return (), env.dtype.type(attr)
            case "input":
                name, index = attr
                if name not in env.inputs:
                    raise InputError(f"no array was given for input {name!r}", f"given: {', '.join(env.inputs) or 'none'}")
                return env.read(env.inputs[name], index)
            case "iota":
                return (attr,), np.arange(env.size(attr)).astype(env.dtype)
            case "red":
                f, axis = attr
                axes, x = env.explicit(axis, args[0], REDUCTIONS[f])
                return env.whole(axes[1:], COMBINE[f].reduce(x, axis=0))
            case "fold":
                monoid, component, axis = attr
                return _fold(monoid, component, axis, args, env)
            case "view":
                moved = dict(attr)
                want, (x,) = env.align([args[0]], [a for a in moved if _depends(args[0][0], a)])
                return env.read(x, [moved.get(a, axis_index(a)) for a in want])
            case "gather":
                return _gather(attr, args[0], args[1], env)
        axes, xs = env.align(args)
        return axes, np.asarray(_pointwise(op, attr, xs))


def _depends(axes: Iterable[str], axis: str) -> bool:
    return any(a == axis or a.startswith(axis + ".") for a in axes)


def _pointwise(op: str, attr: Any, xs: Sequence[Any]) -> Any:
    match op:
        case "add" | "mul":
            f = np.add if op == "add" else np.multiply
            out = xs[0]
            for x in xs[1:]:
                out = f(out, x)
            return out
        case "un":
            return UN[attr](xs[0])
        case "bi":
            return BI[attr](xs[0], xs[1])
        case "where":
            return np.where(xs[0] != 0, xs[1], xs[2])
    raise ValueError(f"operator {op!r} has no meaning")


def _gather(axis: str, x: Value, i: Value, env: Env) -> Value:
    # x's own axis gets another name while the two align: the index may depend on an axis of that name too
    slot = "\0"
    mine, (xs,) = env.align([x], [axis])
    axes = tuple(slot if a == axis else a for a in mine)
    size = env.size(axis)
    index = i[1]
    if index.size and not (np.min(index) >= 0 and np.max(index) < size):        # NaN fails too
        bad = index[~((index >= 0) & (index < size))].flat[0]
        raise wrong_index(bad, size)
    want = tuple(sorted(normalise({a for a in axes if a != slot} | set(i[0]))))
    position = env.expand(i, want).astype(np.int64)
    k = axes.index(slot)
    xs = np.broadcast_to(xs, [size if a == slot else env.size(a) for a in axes])   # x may be the same at every position
    rows = np.arange(xs.size // size).reshape(xs.shape[:k] + xs.shape[k + 1:])
    rest = env.expand((tuple(a for a in axes if a != slot), rows), want)
    flat = np.moveaxis(xs, k, -1).reshape(-1, size)
    return want, flat[rest, position]


def evaluate_term(term: Term, env: Env, memo: dict[Term, Value] | None = None) -> Value:
    """(axes, array) of a term.  `memo` keeps the values of subterms for later calls."""
    (value,) = _evaluate([term], env, memo)
    return value


def _evaluate(roots: Sequence[Term], env: Env, memo: dict[Term, Value] | None = None) -> list[Value]:
    """Values of the roots; without a memo every other value is freed once nothing needs it."""
    done: dict[Term, Value] = {} if memo is None else memo
    order: list[Term] = []
    seen = set(done)
    for r in roots:
        stack = [(r, False)]
        while stack:
            t, ready = stack.pop()
            if ready:
                order.append(t)
            elif t not in seen:
                seen.add(t)
                stack.append((t, True))
                stack.extend((a, False) for a in reversed(_operands(t)) if a not in seen)
    uses: dict[Term, int] = dict.fromkeys(roots, 1)
    for t in order:
        for a in _operands(t):
            uses[a] = uses.get(a, 0) + 1
    for t in order:
        operands = _operands(t)
        values = [done[a] for a in operands]
        done[t] = _contract(t, values, env) if operands is not t.args else apply(t.op, t.attr, values, env)
        if memo is None:
            for a in operands:
                uses[a] -= 1
                if uses[a] == 0 and a in done:
                    del done[a]
    return [done[r] for r in roots]


# ------------------------------------------------------------------ contractions: sums of products, without the product in memory

def _sums(t: Term) -> tuple[list[str], Term]:
    axes: list[str] = []
    while t.op == "red" and t.attr[0] == "+" and t.attr[1] not in axes:         # type: ignore[index]
        axes.append(t.attr[1])                                                  # type: ignore[index]
        t = t.args[0]
    return axes, t


def _operands(t: Term) -> tuple[Term, ...]:
    """What must be known before t: for a sum of products the factors, else the arguments."""
    axes, product = _sums(t)
    return product.args if axes and product.op == "mul" else t.args


def _contract(t: Term, factors: list[Value], env: Env) -> Value:
    axes, _ = _sums(t)
    if any("." in a for a in (*axes, *(a for v, _ in factors for a in v))):     # parts of axes: one step after the other
        value = apply("mul", None, factors, env)
        for a in reversed(axes):
            value = apply("red", ("+", a), [value], env)
        return value
    while len(factors) > 2:                                 # the smallest factor into the smallest that covers it
        factors = sorted(factors, key=lambda v: v[1].size)
        small = factors.pop(0)
        i = next((i for i, v in enumerate(factors) if set(small[0]) <= set(v[0])), 0)
        factors[i] = apply("mul", None, [small, factors[i]], env)
    with np.errstate(all="ignore"):
        return _contract_two(factors[0], factors[1], axes, env) if len(factors) == 2 else _sum(factors[0], axes, env)


def _sum(value: Value, over: Iterable[str], env: Env) -> Value:
    axes, x = value
    over = list(over)
    if not over:
        return value
    x = x.sum(axis=tuple(i for i, a in enumerate(axes) if a in over))
    missing = math.prod(env.size(a) for a in over if a not in axes)
    return tuple(a for a in axes if a not in over), np.asarray(x * missing if missing != 1 else x)


def _contract_two(x: Value, y: Value, over: list[str], env: Env) -> Value:
    shared = set(x[0]) & set(y[0])
    for a, b in ((x, y), (y, x)):                           # Σ a·∞ is NaN where some a are negative and some are not
        if any(k in a[0] and k not in b[0] for k in over) and not np.isfinite(b[1]).all():
            return _sum(apply("mul", None, [x, y], env), over, env)
    x = _sum(x, [a for a in over if a not in shared and a not in y[0]], env)
    y = _sum(y, [a for a in over if a not in shared and a in y[0]], env)
    k = [a for a in over if a in shared]
    batch = [a for a in x[0] if a in y[0] and a not in k]
    m, n = [a for a in x[0] if a not in y[0]], [a for a in y[0] if a not in x[0]]

    def matrix(v: Value, *groups: list[str]) -> np.ndarray:
        return env.expand(v, [a for g in groups for a in g]).reshape([math.prod(map(env.size, g)) for g in groups])

    out = np.matmul(matrix(x, batch, m, k), matrix(y, batch, k, n))
    axes = [*batch, *m, *n]
    return env.whole(axes, out.reshape([env.size(a) for a in axes]))


# ------------------------------------------------------------------ folds

def evaluate_scalar(term: Term, names: Mapping[str, Any]) -> Any:
    """A term over holes ("var") with the given values: coefficients of monoids, sides of rules."""
    out: dict[Term, Any] = {}
    for t in postorder([term]):
        match t.op:
            case "num":
                out[t] = np.float64(t.attr)                                     # type: ignore[arg-type]
            case "var":
                out[t] = names[t.attr]                                          # type: ignore[index]
            case _:
                out[t] = _pointwise(t.op, t.attr, [out[a] for a in t.args])
    return out[term]


State = tuple[np.ndarray, list[Any], list[Any]]                                 # exists (0 or 1), pivots, linear components


def _rebased(h: Monoid, i: int, state: State, merged: list[Any]) -> Any:
    """Component i of a state at the merged pivots; 0 where the state is empty or its pivot is the identity."""
    exists, r, x = state
    total: Any = 0.0
    for j, e in h.coef[i]:
        names = variables(e)
        c = evaluate_scalar(e, {v: (merged if v[0] == "R" else r)[int(v[1:])] for v in names})
        part = c * x[j]
        for v in names:
            if h.pivots[int(v[1:])] in ("max", "min"):
                part = np.where(r[int(v[1:])] == REDUCTIONS[h.pivots[int(v[1:])]], 0.0, part)   # type: ignore[index]
        total = total + part
    return np.where(exists == 0, 0.0, total)


def _weighed(h: Monoid, i: int, state: State) -> Any:
    """Component i of a state at its own pivots: as it is, but 0 where a pivot that weighs it is its identity."""
    _, r, x = state
    own = [e for j, e in h.coef[i] if j == i]
    pivots = [(int(v[1:]), h.pivots[int(v[1:])]) for e in own for v in variables(e)]
    empty = [r[p] == REDUCTIONS[kind] for p, kind in pivots if isinstance(kind, str)]
    return np.where(np.any(np.broadcast_arrays(*empty), axis=0), 0.0, x[i]) if empty else x[i]


def merge(h: Monoid, a: State, b: State) -> State:
    """The associative operation of a joint monoid."""
    (ea, ra, xa), (eb, rb, xb) = a, b
    pivots: list[Any] = [None] * len(h.pivots)
    xs: list[Any] = [None] * len(h.coef)
    for p, kind in enumerate(h.pivots):
        if isinstance(kind, str):
            merged = COMBINE[kind](ra[p], rb[p])
        elif kind[0] == "mean":
            na, nb = xa[kind[1]] * ea, xb[kind[1]] * eb
            merged = ra[p] + (rb[p] - ra[p]) * np.where(nb == 0, 0.0, nb / np.where(na + nb == 0, 1.0, na + nb))
        elif kind[0] == "at":
            _, q, op, nans = kind
            sides = [np.where((r[q] == pivots[q]) | (np.isnan(r[q]) & nans), r[p], REDUCTIONS[op]) for r in (ra, rb)]
            merged = COMBINE[op](*sides)
        else:
            continue
        pivots[p] = np.where(ea == 0, rb[p], np.where(eb == 0, ra[p], merged))
    todo = list(range(len(h.coef)))
    while todo:                                             # a component may need a pivot that is a function of other components
        ready = [i for i in todo if all(pivots[int(v[1:])] is not None for _, e in h.coef[i] for v in variables(e))]
        if not ready:
            raise InputError("a monoid's pivots depend on each other in a circle")
        for i in ready:
            todo.remove(i)
            xs[i] = _rebased(h, i, a, pivots) + _rebased(h, i, b, pivots)
        for p, kind in enumerate(h.pivots):
            if pivots[p] is None and all(xs[int(v[1:])] is not None for v in variables(kind[1])):       # type: ignore[arg-type]
                pivots[p] = evaluate_scalar(kind[1],                            # type: ignore[arg-type]
                                            {f"y{j}": x for j, x in enumerate(xs)})
    return np.maximum(ea, eb), pivots, xs


def _fold(h: Monoid, component: int, axis: str, singletons: Sequence[Value], env: Env) -> Value:
    joint, xs = env.align(singletons)
    shape = [env.size(a) for a in joint]
    spread = [env.explicit(axis, (joint, np.broadcast_to(x, shape)), 0.0) for x in (np.ones([1] * len(shape)), *xs)]
    rest = spread[0][0][1:]
    exists, *xs = (x for _, x in spread)
    state: State = exists, xs[:len(h.pivots)], xs[len(h.pivots):]

    def rows(s: slice) -> State:
        return state[0][s], [r[s] for r in state[1]], [x[s] for x in state[2]]

    if len(state[0]) == 1:                                  # nothing to merge with; an empty element contributes 0 all the same
        state = state[0], state[1], [_weighed(h, i, state) for i in range(len(h.coef))]
    while (n := len(state[0])) > 1:                         # a tree of merges: the meaning does not depend on the bracketing
        a, tail = merge(h, rows(slice(0, n - n % 2, 2)), rows(slice(1, n, 2))), rows(slice(n - n % 2, n))
        state = (np.concatenate([a[0], tail[0]]), [np.concatenate(c) for c in zip(a[1], tail[1])],
                 [np.concatenate(c) for c in zip(a[2], tail[2])])
    return env.whole(rest, np.asarray((state[1] + state[2])[component][0]))


# ------------------------------------------------------------------ programs

def evaluate(program: Program | DynamicProgram, *arrays: Any, dtype: Any = "float64") -> Any:
    """Run a program step by step in `dtype`: its meaning, in float64.

    Takes one array for each input, in order.  Outputs of a floating dtype are returned in `dtype`, others in their own, integers
    modulo 2^bits; integer inputs must be exact in `dtype`.  InputError if an array does not match its spec.
    """
    from .trace import DynamicProgram

    if isinstance(program, DynamicProgram):
        program = program.bind_shapes([np.shape(a) for a in arrays])
    if not isinstance(program, Program):
        raise InputError(f"evaluate takes a traced program, not {type(program).__name__}", "trace the function first")
    real = np.dtype(dtype_name(dtype))
    if real.kind != "f":
        raise InputError(f"cannot evaluate in {real}", 'use "float64" or "float32"')
    inputs = {i.name: x for i, x in zip(program.inputs, check_inputs(program, arrays))}
    env = Env(program.axes, {n: _exactly(x, real, n) for n, x in inputs.items()}, dtype=real)
    values = _evaluate([o.term for o in program.outputs], env)
    results = tuple(_assembled(o, v, env) for o, v in zip(program.outputs, values))
    return results if program.structured or len(results) != 1 else results[0]


def check_inputs(program: Program, arrays: Sequence[Any]) -> list[np.ndarray]:
    """The arrays as NumPy arrays; InputError if there are too few or many, or one does not match its input."""
    if len(arrays) != len(program.inputs):
        raise InputError(f"{program.name} takes {len(program.inputs)} arrays, {len(arrays)} were given",
                         f"its inputs: {', '.join(i.name for i in program.inputs)}")
    return [_checked(i, a) for i, a in zip(program.inputs, arrays)]


def _checked(spec: Input, a: Any) -> np.ndarray:
    try:
        x = np.asarray(a)
    except Exception as e:
        raise InputError(f"input {spec.name!r} cannot be read as a NumPy array ({type(a).__name__}: {e})",
                         "pass a NumPy array, with ml_dtypes for bfloat16 and float8") from None
    if isinstance(a, (bool, int, float)):
        x = x.astype(_numpy_dtype(spec.dtype))
    if x.shape != spec.shape:
        raise InputError(f"input {spec.name!r} has shape {x.shape}, the program was traced for {spec.shape}")
    if x.dtype.name != spec.dtype:
        raise InputError(f"input {spec.name!r} has dtype {x.dtype.name}, the program was traced for {spec.dtype}",
                         f"convert it, or trace with TensorSpec({spec.shape}, {x.dtype.name!r})")
    return x


def _numpy_dtype(name: str) -> np.dtype:
    import ml_dtypes  # noqa: F401  (makes "bfloat16" and the float8 names known to NumPy)
    return np.dtype(name)


def _exactly(x: np.ndarray, real: np.dtype, name: str) -> np.ndarray:
    limit = 2 ** (np.finfo(real).nmant + 1)
    if x.dtype.kind in "iu" and x.dtype.itemsize >= 4 and x.size and (x.max() > limit or x.min() < -limit):
        raise InputError(f"input {name!r} has integers beyond ±{limit} (2^{limit.bit_length() - 1}): programs are evaluated in {real}, "
                         "which is exact up to there", "keep integers within it" + ("" if limit > 2**24 else ", or evaluate in float64"))
    return x.astype(real, copy=False)


def _assembled(o: Output, value: Value, env: Env) -> np.ndarray:
    """The array of an output from its value over axes."""
    flat = [a for d in o.dims for a in d]
    x = np.broadcast_to(env.expand(value, flat), [env.size(a) for a in flat])
    x, dtype = x.reshape(o.shape), _numpy_dtype(o.dtype)
    if dtype.kind in "iu":
        return np.array(wrapped(x, dtype))
    return np.array(x, dtype=dtype if dtype.kind == "b" else env.dtype)
