"""Traced tensors: positional array code becomes terms over named axes.

A dimension of a `Tensor` is a tuple of axes, row-major: none for extent 1, several if a reshape merged it.  All axes of a
tensor differ.  The functions here are the primitives that `xp` is written with: `elementwise` (which aligns and broadcasts),
`reduce`, `reshape`, `read` (slices), `take`, `permute`.  Where one tensor is needed under two names, an elementwise function of
inputs is read again under the other name (that costs nothing), anything computed gets a `view`.
"""
from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..errors import DtypeError, ShapeError, TraceError
from ..program import LARGEST
from ..terms import (
    PREDICATES,
    Affine,
    Index,
    Term,
    add,
    affine_of,
    axis_index,
    bi,
    gather,
    inp,
    iota,
    is_num,
    make,
    mul,
    num,
    postorder,
    red,
    un,
    view,
)
from . import dtypes
from .axes import AxisTable
from .wide import WIDE

Number = bool | int | float
Map = dict[str, Affine]
_UNBOUNDED = (-math.inf, math.inf)
BINDERS = frozenset({"red", "fold", "view", "gather"})
_ITERATE_LIMIT = 256


# ------------------------------------------------------------------ the trace

class Trace:
    """What is known while one function is traced: the axes, and which of them each term depends on."""

    def __init__(self) -> None:
        self.axes = AxisTable()
        self.ranges: dict[str, tuple[float, float]] = {}                        # of inputs whose values are bounded
        self.wide: set[Term] = set()                                            # sums of what the source has in float32 or float64
        # free axes of a term, and those of them that lie below a reduction, view or gather; under their provisional names
        self._info: dict[Term, tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def _known(self, term: Term) -> tuple[tuple[str, ...], tuple[str, ...]]:
        stack = [term]
        while stack:
            t = stack[-1]
            if t in self._info:
                stack.pop()
                continue
            if t.op == "input":
                own = tuple(dict.fromkeys(a for ix in _read_of(t)[1] for a in ix.axes))
                self._info[t] = own, ()
            elif t.op == "iota":
                self._info[t] = (t.attr,), ()                                   # type: ignore[assignment]
            elif missing := [a for a in t.args if a not in self._info]:
                stack.extend(missing)
            else:
                below = [self._info[a] for a in t.args]
                free, locked = ({a: None for info in below for a in info[i]} for i in (0, 1))
                self._info[t] = tuple(free), tuple(locked)
        return self._info[term]

    def free(self, term: Term) -> frozenset[str]:
        """The live axes that a term varies along."""
        return frozenset(self.axes.resolve(self._known(term)[0]))

    def locked(self, term: Term) -> frozenset[str]:
        """Those that it cannot be read along under another name without a view."""
        return frozenset(self.axes.resolve(self._known(term)[1]))

    def bound(self, term: Term, free: Iterable[str]) -> Term:
        """Register a term whose operator binds axes."""
        if term.op in BINDERS:
            names = tuple(sorted(free, key=self.axes.age))
            self._info[term] = names, names
        return term

    def summed(self, op: str, term: Term, dtype: str) -> None:
        """Note a reduction of what has this dtype, if it is a sum that is wide."""
        if op == "+" and term.op == "red" and dtype in WIDE:
            self.wide.add(term)

    def reindex(self, term: Term, m: Map) -> Term:
        """The term read at m[a] in place of each live axis a.  Where that leaves an axis' range the value is unspecified."""
        free = self.free(term)
        m = {a: m[a] for a in sorted(m, key=self.axes.age) if a in free and m[a] != axis_index(a)}
        if not m:
            return term
        after = (free - m.keys()) | {b for e in m.values() for b in e.axes}
        self.axes.apart(after)
        if not self.locked(term) & m.keys():
            return self._push(term, m)
        if term.op == "view":                               # a view of a view is one view
            first = {a: self.axes.resolved(e) for a, e in term.attr}            # type: ignore[attr-defined]
            source = term.args[0]
            mapped = set(self.axes.resolve(first))
            m = {a: e.substitute(m) for a, e in first.items()} | {a: e for a, e in m.items() if a in self.free(source) - mapped}
            term = source
        return self.bound(view(term, tuple(m.items())), after)

    def _push(self, term: Term, m: Map) -> Term:
        """Substitute at the leaves.  The term is elementwise in the axes of m."""
        out: dict[Term, Term] = {}
        stack = [term]
        while stack:
            t = stack[-1]
            if t in out:
                stack.pop()
            elif not self.free(t) & m.keys():
                out[t] = t
            elif t.op == "input":
                name, index = _read_of(t)
                out[t] = inp(name, tuple(self.axes.resolved(ix).substitute(m) for ix in index))
            elif t.op == "iota":
                out[t] = affine_term(self.axes.resolved(axis_index(t.attr)).substitute(m))      # type: ignore[arg-type]
            elif missing := [a for a in t.args if a not in out]:
                stack.extend(missing)
            else:
                out[t] = make(t.op, t.attr, [out[a] for a in t.args])
        return out[term]

    def read_linear(self, term: Term, axes: Sequence[str], e: Affine, m: Map) -> Term:
        """Read the dimension that `axes` form at index e: by adding to m what `reindex` is to do later, where the index of each
        axis is affine, else at once by gathers (div and mod of the position)."""
        sizes = tuple(self.axes.extent[a] for a in axes)
        if (digits := self.axes.digits_by_splitting(e, sizes)) is not None:
            m.update(zip(axes, digits))
            return term
        low, high = e.bounds(self.axes.extent)
        position, last = affine_term(e), math.prod(sizes) - 1
        position = bi("max", position, 0.0) if low < 0 else position            # a gather must not leave the dimension
        return self.gather_linear(term, axes, bi("min", position, last) if high > last else position)

    def gather_linear(self, term: Term, axes: Sequence[str], position: Term) -> Term:
        """Read the dimension that `axes` form at a computed position, whose own axes the term does not have."""
        for i, a in reversed(list(enumerate(axes))):
            n = self.axes.extent[a]
            here = position if i == 0 else bi("mod", position, num(n))
            position = bi("floordiv", position, num(n))
            free = self.free(term)
            if a not in free:
                continue
            own = self.free(here)
            self.axes.apart(free | own)
            term = self.bound(gather(term, a, here), (free - {a}) | own)
        return term

    def lower_bound(self, term: Term) -> float:
        """A number that the term is never below: enough to see that an index is not negative."""
        low: dict[Term, float] = {}
        for t in postorder([term]):
            a = [low[x] for x in t.args]
            match t.op:
                case "num":
                    low[t] = t.attr                                             # type: ignore[assignment]
                case "input":
                    low[t] = self.ranges.get(_read_of(t)[0], _UNBOUNDED)[0]
                case "iota":
                    low[t] = 0
                case "add":
                    low[t] = math.fsum(a) if -math.inf not in a else -math.inf
                case "mul" | "fold":
                    low[t] = 0 if a and min(a) >= 0 else -math.inf
                case "where":
                    low[t] = min(a[1:])
                case "red":
                    low[t] = a[0] if t.attr[0] in ("max", "min") or a[0] >= 0 else -math.inf    # type: ignore[index]
                case "bi":
                    if t.attr in ("max", "min"):
                        low[t] = max(a) if t.attr == "max" else min(a)
                    else:
                        positive = {"floordiv": min(a) >= 0, "mod": a[1] >= 0, "hypot": True}
                        low[t] = 0 if t.attr in PREDICATES or positive.get(t.attr) else -math.inf       # type: ignore[call-overload]
                case "un" if t.attr in ("floor", "ceil", "round", "trunc", "sign", "tanh", "expm1", "log1p", "erf"):
                    low[t] = 0 if a[0] >= 0 else -math.inf
                case "un":
                    low[t] = 0 if t.attr in PREDICATES or t.attr in ("abs", "exp", "exp2", "sqrt") else -math.inf
                case "view":
                    low[t] = min(a[0], 0)
                case "gather":
                    low[t] = a[0]
                case _:
                    low[t] = -math.inf
        return low[term]

    # -------------------------------------------------------------- tensors

    def tensor(self, term: Term, dims: Iterable[Sequence[str]], dtype: str) -> Tensor:
        own = tuple(tuple(d) for d in dims)
        self.axes.apart(self.axes.resolve(a for d in own for a in d))
        return Tensor(self, term, own, dtype)

    def empty(self, shape: Iterable[int], dtype: str) -> Tensor:
        """A tensor without elements: its term does not matter."""
        return self.tensor(num(0.0), [self.axes.fresh(n) for n in shape], dtype)

    def constant(self, value: Number, dtype: str) -> Tensor:
        return self.tensor(num(value), (), dtype)

    def positions(self, axes: Sequence[str]) -> Term:
        """The position along the dimension that these live axes form."""
        return affine_term(self.axes.linear(axes))


_CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


def current() -> Trace:
    trace = _CURRENT.get()
    if trace is None:
        raise TraceError("xp works on traced tensors only", "call it inside a function given to trace() or optimize()")
    return trace


def _read_of(t: Term) -> tuple[str, Index]:
    return t.attr                                                               # type: ignore[return-value]


def affine_term(e: Affine) -> Term:
    return add(*[mul(iota(a), float(c)) for a, c in e.terms], float(e.const))


# ------------------------------------------------------------------ the tensor

class Tensor:
    """A tensor of a traced function: the array API standard's array object.  It has a shape and a dtype, but no values."""

    __slots__ = ("_dims", "dtype", "shape", "term", "trace")
    __hash__ = None                                                             # type: ignore[assignment]

    def __init__(self, trace: Trace, term: Term, dims: tuple[tuple[str, ...], ...], dtype: str):
        self.trace, self.term, self._dims, self.dtype = trace, term, dims, dtype
        self.shape: tuple[int, ...] = tuple(trace.axes.size(d) for d in dims)

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The live axes of each dimension."""
        return tuple(self.trace.axes.resolve(d) for d in self._dims)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def device(self) -> str:
        return "traced"

    def to_device(self, device: Any, /, *, stream: Any = None) -> Tensor:
        return self

    @property
    def T(self) -> Tensor:
        if self.ndim != 2:
            raise ShapeError(f".T is for two dimensions, this tensor has shape {self.shape}", "use .mT or xp.permute_dims")
        return permute(self, (1, 0))

    @property
    def mT(self) -> Tensor:
        if self.ndim < 2:
            raise ShapeError(f".mT needs two or more dimensions, this tensor has shape {self.shape}")
        return permute(self, (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        from .. import xp
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise TraceError(f"array API version {api_version!r} is not known", "2024.12 is what xp follows")
        return xp

    def __repr__(self) -> str:
        return f"<traced tensor {self.dtype}{list(self.shape)}>"

    # arithmetic: each operator is the function of xp that the standard names for it

    def __add__(self, other: Any) -> Tensor: return _call("add", self, other)
    def __sub__(self, other: Any) -> Tensor: return _call("subtract", self, other)
    def __mul__(self, other: Any) -> Tensor: return _call("multiply", self, other)
    def __truediv__(self, other: Any) -> Tensor: return _call("divide", self, other)
    def __floordiv__(self, other: Any) -> Tensor: return _call("floor_divide", self, other)
    def __mod__(self, other: Any) -> Tensor: return _call("remainder", self, other)
    def __pow__(self, other: Any) -> Tensor: return _call("pow", self, other)
    def __matmul__(self, other: Any) -> Tensor: return _call("matmul", self, other)
    def __and__(self, other: Any) -> Tensor: return _call("bitwise_and", self, other)
    def __or__(self, other: Any) -> Tensor: return _call("bitwise_or", self, other)
    def __xor__(self, other: Any) -> Tensor: return _call("bitwise_xor", self, other)
    def __lshift__(self, other: Any) -> Tensor: return _call("bitwise_left_shift", self, other)
    def __rshift__(self, other: Any) -> Tensor: return _call("bitwise_right_shift", self, other)
    def __radd__(self, other: Any) -> Tensor: return _call("add", other, self)
    def __rsub__(self, other: Any) -> Tensor: return _call("subtract", other, self)
    def __rmul__(self, other: Any) -> Tensor: return _call("multiply", other, self)
    def __rtruediv__(self, other: Any) -> Tensor: return _call("divide", other, self)
    def __rfloordiv__(self, other: Any) -> Tensor: return _call("floor_divide", other, self)
    def __rmod__(self, other: Any) -> Tensor: return _call("remainder", other, self)
    def __rpow__(self, other: Any) -> Tensor: return _call("pow", other, self)
    def __rmatmul__(self, other: Any) -> Tensor: return _call("matmul", other, self)
    def __rand__(self, other: Any) -> Tensor: return _call("bitwise_and", other, self)
    def __ror__(self, other: Any) -> Tensor: return _call("bitwise_or", other, self)
    def __rxor__(self, other: Any) -> Tensor: return _call("bitwise_xor", other, self)
    def __rlshift__(self, other: Any) -> Tensor: return _call("bitwise_left_shift", other, self)
    def __rrshift__(self, other: Any) -> Tensor: return _call("bitwise_right_shift", other, self)
    def __lt__(self, other: Any) -> Tensor: return _call("less", self, other)
    def __le__(self, other: Any) -> Tensor: return _call("less_equal", self, other)
    def __gt__(self, other: Any) -> Tensor: return _call("greater", self, other)
    def __ge__(self, other: Any) -> Tensor: return _call("greater_equal", self, other)
    def __eq__(self, other: Any) -> Tensor: return _call("equal", self, other)             # type: ignore[override]
    def __ne__(self, other: Any) -> Tensor: return _call("not_equal", self, other)         # type: ignore[override]
    def __neg__(self) -> Tensor: return _call("negative", self)
    def __pos__(self) -> Tensor: return _call("positive", self)
    def __abs__(self) -> Tensor: return _call("abs", self)
    def __invert__(self) -> Tensor: return _call("bitwise_invert", self)

    # the methods that NumPy's arrays have beside the standard's functions and that array code uses most

    def astype(self, dtype: Any, copy: bool = True) -> Tensor: return _call("astype", self, dtype)
    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
        return _call("sum", self, axis=axis, dtype=dtype, keepdims=keepdims)
    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor: return _call("mean", self, axis=axis, keepdims=keepdims)
    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor: return _call("max", self, axis=axis, keepdims=keepdims)
    def min(self, axis: Any = None, keepdims: bool = False) -> Tensor: return _call("min", self, axis=axis, keepdims=keepdims)
    def reshape(self, *shape: Any) -> Tensor:
        return _call("reshape", self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    def __getitem__(self, key: Any) -> Tensor:
        return getitem(self, key)

    def __len__(self) -> int:
        if not self.shape:
            raise TraceError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:
            raise TraceError("a tensor without dimensions cannot be iterated over")
        if self.shape[0] > _ITERATE_LIMIT:
            raise TraceError(f"iterating over {self.shape[0]} rows would write the program out {self.shape[0]} times",
                             "use array operations over the whole tensor, or slices")
        return (self[i] for i in range(self.shape[0]))

    # what a tensor without values cannot do

    def __bool__(self) -> bool:
        raise TraceError("the truth of a traced tensor is not known (if, while, and, or, not, in)",
                         "use xp.where to choose between values, & | ~ to combine conditions; shapes may steer an if")

    def _no_number(self, *_: Any) -> Any:
        raise TraceError("a traced tensor has no value that could become a Python number", "in place of math.f(x) use xp.f(x)")

    __float__ = __int__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = item = tolist = _no_number

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TraceError("tensors cannot be assigned to", "build the result with xp.where(mask, new, old) or xp.concat")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TraceError("a traced tensor cannot become a NumPy array",
                         "in place of np.f(x) use xp.f(x); xp = x.__array_namespace__()")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise TraceError("a traced tensor has no memory that another library could read", "use functions of xp")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # NumPy's scalars bring us here from an operator, as in np.float32(2) * x
        operator = _UFUNC_OPERATORS.get(ufunc.__name__)
        if operator and method == "__call__" and not kwargs and any(isinstance(x, (np.generic, np.ndarray)) for x in inputs):
            return _call(operator, *inputs)
        raise TraceError(f"np.{ufunc.__name__} was applied to a traced tensor", _instead(ufunc.__name__))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TraceError(f"np.{func.__name__} was applied to a traced tensor", _instead(func.__name__))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Absent(f"traced tensors have no attribute {name!r}", _instead(name))


class Absent(TraceError, AttributeError):
    """So that hasattr() and getattr() with a default work."""


_UFUNC_OPERATORS = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide", "true_divide": "divide", "power": "pow",
    "floor_divide": "floor_divide", "remainder": "remainder", "less": "less", "less_equal": "less_equal", "greater": "greater",
    "greater_equal": "greater_equal", "equal": "equal", "not_equal": "not_equal", "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "matmul": "matmul",
}


def _instead(name: str) -> str:
    from .. import xp
    name = xp.NUMPY_NAMES.get(name, name)
    return f"use {f'xp.{name}(…)' if name in xp.__all__ else 'functions of xp'}, with xp = x.__array_namespace__()"


def _call(name: str, *args: Any, **kwargs: Any) -> Tensor:
    from .. import xp
    return getattr(xp, name)(*args, **kwargs)


# ------------------------------------------------------------------ arguments

def argument(x: Any) -> Tensor | Number:
    """A tensor of this trace, or a Python number."""
    if isinstance(x, Tensor):
        if x.trace is not _CURRENT.get():
            raise TraceError("a tensor of one trace was used in another, or after tracing ended", "pass it as an input")
        return x
    if isinstance(x, (bool, int, float)):
        current()
        return _of_float(x)
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0):
        value = x.item()
        if isinstance(value, (bool, int, float)):
            return value
        try:
            return float(x)                                 # scalars of ml_dtypes
        except (TypeError, ValueError):
            raise DtypeError(f"{x!r} is no real number") from None
    if isinstance(x, np.ndarray) or hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        raise TraceError(f"an array of shape {tuple(x.shape)} was used as a constant",
                         "pass it as an input of the function, with its own TensorSpec")
    if isinstance(x, complex):
        raise DtypeError("complex numbers are not supported")
    raise TraceError(f"expected a tensor or a number, not {type(x).__name__}", "pass arrays as inputs of the function")


def _of_float(x: Number) -> Number:
    """The number, if a float can hold its magnitude."""
    try:
        float(x)
    except OverflowError:
        raise DtypeError(f"an integer of {int(x).bit_length()} bits is beyond every dtype", "for no bound use math.inf") from None
    return x


def lift(x: Any, dtype: str | None = None) -> Tensor:
    x = argument(x)
    return x if isinstance(x, Tensor) else current().constant(x, dtype or dtypes.of_number(x))


def result_dtype(*xs: Tensor | Number) -> str:
    out: str | None = None
    for x in xs:
        if isinstance(x, Tensor):
            out = x.dtype if out is None else dtypes.promote(out, x.dtype)
    for x in xs:
        if not isinstance(x, Tensor):
            out = dtypes.of_number(x) if out is None else dtypes.promote_number(out, x)
    assert out is not None
    return out


def extent(n: Any) -> int:
    """An int that a shape or an axis is made of."""
    if isinstance(n, Tensor):
        raise TraceError("a shape or an axis depends on a tensor's values", "only Python ints can be used there")
    try:
        return operator.index(n)
    except TypeError:
        raise ShapeError(f"an int is needed, not {n!r}") from None


def count(n: Any, what: str) -> int:
    """How many of something there are: an int ≥ 0 that an extent can be."""
    if not 0 <= (r := extent(n)) < LARGEST:
        raise ShapeError(f"{what} must be at least 0, not {r}" if r < 0 else f"{what} is beyond 2^63")
    return r


def shape_of(shape: Any) -> tuple[int, ...]:
    """The extents of a shape."""
    return tuple(count(n, "an extent") for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))


def dimension(axis: Any, ndim: int, extra: int = 0) -> int:
    """A dimension's number, counted from 0; negative ones count from the end."""
    i, n = extent(axis), ndim + extra
    if not -n <= i < n:
        raise ShapeError(f"axis {i} does not exist in {ndim} dimension{'s' if ndim != 1 else ''}",
                         f"use {-n} … {n - 1}" if n else "the tensor has no dimensions")
    return i % n


def dimensions(axis: Any, ndim: int) -> tuple[int, ...]:
    """The dimensions that `axis` (None, an int or a tuple) names, in order of the tensor."""
    if axis is None:
        return tuple(range(ndim))
    out = [dimension(a, ndim) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    if len(set(out)) < len(out):
        raise ShapeError(f"axis {axis} names a dimension twice")
    return tuple(sorted(out))


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    out = [1] * rank
    for s in shapes:
        for i, n in enumerate(s, rank - len(s)):
            if n != 1 and out[i] != 1 and n != out[i]:
                all_shapes = " and ".join(map(str, shapes))
                raise ShapeError(f"shapes {all_shapes} do not fit together: {out[i]} against {n} in dimension {i - rank}",
                                 "dimensions must be equal or 1, counted from the last")
            if n != 1:
                out[i] = n
    return tuple(out)


# ------------------------------------------------------------------ primitives

def align(tensors: Sequence[Tensor]) -> tuple[list[Term], list[tuple[str, ...]]]:
    """Bring tensors under common axes: their terms, and the dimensions of the broadcast result (which must not be empty)."""
    trace = tensors[0].trace
    ax = trace.axes
    shape = broadcast_shape([t.shape for t in tensors])
    target: list[tuple[str, ...]] = [()] * len(shape)
    terms: dict[int, Term] = {}
    # computed tensors first: where two must stay apart, it is the cheaper one that is read under another name
    for i in sorted(range(len(tensors)), key=lambda i: not trace.locked(tensors[i].term)):
        t, term = tensors[i], tensors[i].term
        pad = len(shape) - t.ndim
        dims = [(), ] * pad + list(t._dims)
        before = -1
        while before != len(ax.extent):                     # splitting for one dimension may matter to another
            before = len(ax.extent)
            for p in range(pad, len(shape)):
                if dims[p] and target[p] and not ax.refine(target[p], dims[p]):         # 6·4 against 8·3: read it by position
                    temporary = [b for a in ax.resolve(target[p]) for b in ax.fresh(ax.extent[a])]
                    m: Map = {}
                    term = trace.reindex(trace.read_linear(term, ax.resolve(dims[p]), ax.linear(temporary), m), m)
                    dims[p] = tuple(temporary)
        renamed: list[tuple[str, str]] = []
        for p in range(pad, len(shape)):
            if dims[p] and target[p]:
                for a, b in zip(ax.resolve(target[p]), ax.resolve(dims[p]), strict=True):
                    if not ax.unify(a, b):
                        renamed.append((b, a))
        m = {ax.resolve((b,))[0]: axis_index(ax.resolve((a,))[0]) for b, a in renamed}
        taken = set(ax.resolve(a for d in target for a in d))
        for p in range(pad, len(shape)):
            if dims[p] and not target[p]:
                own = []
                for a in ax.resolve(dims[p]):
                    if a in taken:
                        (b,) = ax.fresh(ax.extent[a])
                        m[a] = axis_index(b)
                        a = b
                    own.append(a)
                target[p] = tuple(own)
        terms[i] = trace.reindex(term, m)
        target = [ax.resolve(d) for d in target]
        ax.apart(a for d in target for a in d)
    return [terms[i] for i in range(len(tensors))], target


def elementwise(build: Callable[..., Term], args: Sequence[Any], dtype: str) -> Tensor:
    """build(term of each argument) over tensors and numbers that broadcast together."""
    trace = current()
    tensors = [lift(a) for a in args]
    shape = broadcast_shape([t.shape for t in tensors])
    if 0 in shape:
        return trace.empty(shape, dtype)
    terms, dims = align(tensors)
    return trace.tensor(build(*terms), dims, dtype)


def reduce(op: str, x: Tensor, over: Sequence[int], keepdims: bool, dtype: str) -> Tensor:
    """Reduce dimensions by "+", "*", "max" or "min"."""
    trace = x.trace
    shape = [1 if i in over else n for i, n in enumerate(x.shape) if keepdims or i not in over]
    if any(x.shape[i] == 0 for i in over):
        if op in ("max", "min"):
            raise ShapeError(f"{op} over an empty axis: shape {x.shape}, axis {tuple(over)}", f"a {op} needs one element or more")
        if 0 not in shape:
            dims = [trace.axes.fresh(n) for n in shape]
            return trace.tensor(num(0.0 if op == "+" else 1.0), dims, dtype)
    if 0 in shape:
        return trace.empty(shape, dtype)
    term = x.term
    dims = list(x.dims)
    for i in reversed(over):
        for a in reversed(dims[i]):
            term = reduce_axis(trace, op, a, term)
            trace.summed(op, term, x.dtype)
    return trace.tensor(term, [() if i in over else d for i, d in enumerate(dims) if keepdims or i not in over], dtype)


def reduce_axis(trace: Trace, op: str, axis: str, term: Term) -> Term:
    free = trace.free(term)
    if axis in free:
        return trace.bound(red(op, axis, term), free - {axis})
    n = trace.axes.extent[axis]                             # the same value n times
    return mul(term, n) if op == "+" else bi("pow", term, n) if op == "*" else term


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    return x.trace.tensor(x.term, [x._dims[i] for i in order], x.dtype)


def expand(x: Tensor, position: int) -> Tensor:
    """Insert a dimension of extent 1."""
    return x.trace.tensor(x.term, [*x._dims[:position], (), *x._dims[position:]], x.dtype)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Row-major: splits and merges axes.  Where the factorisations do not agree (6·4, 8·3), elements are gathered."""
    trace, ax = x.trace, x.trace.axes
    if math.prod(shape) != x.size:
        raise ShapeError(f"cannot reshape {x.shape} ({x.size} elements) to {tuple(shape)} ({math.prod(shape)} elements)",
                         "one extent may be −1, which stands for the rest")
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    new = [ax.fresh(n) for n in shape]
    # the shortest runs of old axes and new dimensions, from the end, that have equally many elements
    old = list(ax.resolve(a for d in x._dims for a in d))
    dims: list[tuple[str, ...]] = [()] * len(shape)
    term = x.term
    m: Map = {}
    p = len(shape)
    while old:
        mine = [old.pop()]
        theirs: list[int] = []
        n, k = ax.extent[mine[0]], 1
        while n != k:
            if k < n:
                p -= 1
                if new[p]:
                    theirs.insert(0, p)
                    k *= shape[p]
            else:
                mine.insert(0, old.pop())
                n *= ax.extent[mine[0]]
        whole = tuple(a for q in theirs for a in new[q])
        if ax.refine(whole, tuple(mine)):
            for a, b in zip(ax.resolve(mine), ax.resolve(whole), strict=True):
                assert ax.unify(a, b)                       # the new axes are nobody's yet
        else:
            term = trace.read_linear(term, mine, ax.linear(whole), m)
        for q in theirs:
            dims[q] = new[q]
    return trace.tensor(trace.reindex(term, m), dims, x.dtype)


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    trace = x.trace
    pad = len(shape) - x.ndim
    if pad < 0 or any(n not in (1, m) for n, m in zip(x.shape, shape[pad:])):
        raise ShapeError(f"shape {x.shape} cannot be broadcast to {tuple(shape)}", "only dimensions of extent 1 can grow")
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    own = [()] * pad + list(x.dims)
    dims = [d or trace.axes.fresh(n) for d, n in zip(own, shape)]
    return trace.tensor(x.term, dims, x.dtype)


def read(x: Tensor, index: Sequence[int | tuple[int, int, int] | None]) -> Tensor:
    """Each dimension at a position (which drops it), at (start, step, count), or whole (None)."""
    trace, ax = x.trace, x.trace.axes
    shape = [n if i is None else i[2] for i, n in zip(index, x.shape) if not isinstance(i, int)]
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    term = x.term
    dims: list[tuple[str, ...]] = []
    m: Map = {}
    for i, d in zip(index, x._dims):
        if i is None:
            dims.append(d)
            continue
        own = () if isinstance(i, int) else ax.fresh(i[2])
        e = Affine(i) if isinstance(i, int) else Affine(i[0], tuple((a, i[1]) for a in own))
        if d:
            term = trace.read_linear(term, ax.resolve(d), e, m)
        if not isinstance(i, int):
            dims.append(own)
    # splitting an axis while reading one dimension cannot touch another one's: all axes of a tensor differ, new ones are fresh
    return trace.tensor(trace.reindex(term, {a: ax.resolved(e) for a, e in m.items()}), dims, x.dtype)


def part(x: Tensor, dim: int, start: int, count: int, step: int = 1) -> Tensor:
    """A slice of one dimension."""
    return read(x, [(start, step, count) if i == dim else None for i in range(x.ndim)])


def shifted(x: Tensor, dim: int, axes: tuple[str, ...], e: Affine) -> Tensor:
    """Dimension `dim` read at index e over new axes that form it from now on.  Where e leaves the dimension nothing is said."""
    trace = x.trace
    m: Map = {}
    term = trace.read_linear(x.term, trace.axes.resolve(x._dims[dim]), e, m) if x._dims[dim] else x.term
    term = trace.reindex(term, {a: trace.axes.resolved(i) for a, i in m.items()})
    return trace.tensor(term, [axes if i == dim else d for i, d in enumerate(x._dims)], x.dtype)


def index_term(x: Tensor, extent: int, what: str) -> Tensor:
    """Indices as array code counts them: negative ones from the end."""
    if dtypes.kind(x.dtype) != "int":
        raise DtypeError(f"{what} with {x.dtype} indices", "indices must be integers; to choose by a condition use xp.where")
    if x.trace.lower_bound(x.term) >= 0:
        return x
    return elementwise(lambda i: make("where", None, (bi("lt", i, 0.0), add(i, extent), i)), [x], x.dtype)


def take(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """x[…, indices, …]: the dimensions of `indices` replace dimension `dim`."""
    trace, ax = x.trace, x.trace.axes
    shape = [*x.shape[:dim], *indices.shape, *x.shape[dim + 1:]]
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    if x.shape[dim] == 0:
        raise ShapeError(f"cannot take from an empty axis: shape {x.shape}, axis {dim}")
    i = index_term(indices, x.shape[dim], "take")
    mine = set(ax.resolve(a for d in x._dims for a in d))
    rename = {a: b for a in ax.resolve(a for d in i._dims for a in d) if a in mine for b in ax.fresh(ax.extent[a])}
    position = trace.reindex(i.term, {a: axis_index(b) for a, b in rename.items()})
    new = [tuple(rename.get(a, a) for a in d) for d in i.dims]
    ax.apart(mine | {a for d in new for a in d})
    own = ax.resolve(x._dims[dim])
    m: Map = {}
    e = affine_of(position)
    if e is not None and 0 <= (ends := ax.resolved(e).bounds(ax.extent))[0] and ends[1] < x.shape[dim]:
        term = trace.read_linear(x.term, own, ax.resolved(e), m)                # positions known now: a slice
        term = trace.reindex(term, {a: ax.resolved(ix) for a, ix in m.items()})
    else:
        term = trace.gather_linear(x.term, own, position)
    return trace.tensor(term, [*x._dims[:dim], *new, *x._dims[dim + 1:]], x.dtype)


def take_along(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """result[…, j, …] = x[…, indices[…, j, …], …]; the other dimensions broadcast together."""
    trace, ax = x.trace, x.trace.axes
    if x.ndim != indices.ndim:
        raise ShapeError(f"take_along_axis needs as many dimensions in both: {x.shape} and indices {indices.shape}")
    without = [tuple(1 if i == dim else n for i, n in enumerate(s)) for s in (x.shape, indices.shape)]
    shape = [*broadcast_shape(without)]
    shape[dim] = indices.shape[dim]
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    if x.shape[dim] == 0:
        raise ShapeError(f"cannot take from an empty axis: shape {x.shape}, axis {dim}")
    i = index_term(indices, x.shape[dim], "take_along_axis")
    # the gathered dimension of x and that of the indices go to dimensions of their own
    spread_x = trace.tensor(x.term, [*(() if p == dim else d for p, d in enumerate(x._dims)), x._dims[dim], ()], x.dtype)
    spread_i = trace.tensor(i.term, [*(() if p == dim else d for p, d in enumerate(i._dims)), (), i._dims[dim]], i.dtype)
    (term, position), dims = align([spread_x, spread_i])
    term = trace.gather_linear(term, ax.resolve(dims[-2]), position)
    return trace.tensor(term, [dims[-1] if p == dim else d for p, d in enumerate(dims[:-2])], x.dtype)


# ------------------------------------------------------------------ indexing

def getitem(x: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    argument(x)
    used = 0
    for k in keys:
        _check_key(k)
        used += k is not None and k is not Ellipsis
    if sum(k is Ellipsis for k in keys) > 1:
        raise ShapeError("an index can have one ellipsis only")
    if used > x.ndim:
        raise ShapeError(f"{used} indices for a tensor of shape {x.shape}")
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at:at + 1] = [slice(None)] * (x.ndim - used)

    index: list[int | tuple[int, int, int] | None] = []
    arrays: list[Tensor | None] = []                        # for each dimension that is left: the indices into it
    result: list[str] = []                                  # what each entry of the result comes from: "new", "dim" or "array"
    for k in keys:
        if k is None:
            result.append("new")
            continue
        n = x.shape[len(index)]
        if isinstance(k, slice):
            start, stop, step = _slice(k).indices(n)
            count = len(range(start, stop, step))
            index.append(None if (start, step, count) == (0, 1, n) else (start, step, count))
            arrays.append(None)
            result.append("dim")
        elif isinstance(k, Tensor):
            index.append(None)
            arrays.append(k)
            result.append("array")
        else:
            i = extent(k)
            if not -n <= i < n:
                raise ShapeError(f"index {i} is out of range for dimension {len(index)} of shape {x.shape}")
            index.append(i % n)
            result.append("int")
    out = read(x, index)
    if any(a is not None for a in arrays):
        return _advanced(out, arrays, result)
    position = 0
    for r in result:
        if r == "new":
            out = expand(out, position)
        position += r in ("new", "dim")
    return out


def _check_key(k: Any) -> None:
    if k is None or k is Ellipsis or isinstance(k, (slice, Tensor)):
        if isinstance(k, Tensor) and k.dtype == "bool":
            raise TraceError("indexing by a condition gives a shape that depends on values", "use xp.where(condition, x, other)")
        return
    if isinstance(k, (bool, np.bool_)):
        raise TraceError("a tensor cannot be indexed with True or False", "use None to add a dimension")
    if isinstance(k, (list, np.ndarray)):
        raise TraceError("a tensor cannot be indexed with a list or a NumPy array",
                         "pass the indices as an integer input, or use slices and xp.concat")
    if isinstance(k, float):
        raise ShapeError(f"indices must be ints, not {k!r}", "use // where an int is meant")


def _slice(k: slice) -> slice:
    start, stop, step = (v if v is None else extent(v) for v in (k.start, k.stop, k.step))
    if step == 0:
        raise ShapeError("the step of a slice must not be 0")
    return slice(start, stop, step)


def _advanced(x: Tensor, arrays: list[Tensor | None], result: list[str]) -> Tensor:
    """Integer tensors as indices: they broadcast together; their dimensions stand where the first of them stood if they are next
    to each other (ints count as such), else in front."""
    trace = x.trace
    positions = [i for i, r in enumerate(result) if r in ("array", "int")]
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    dims = [i for i, a in enumerate(arrays) if a is not None]
    shape = broadcast_shape([a.shape for a in arrays if a is not None])
    before = sum(r == "dim" for r in result[:positions[0]]) if adjacent else 0
    kept = [n for n, a in zip(x.shape, arrays) if a is None]
    if len(dims) == 1:                                      # take puts the new dimensions in place of the old one
        out = take(x, arrays[dims[0]], dims[0])             # type: ignore[arg-type]
        order = list(range(out.ndim))
        moved = order[dims[0]:dims[0] + len(shape)]
        rest = [i for i in order if i not in moved]
        out = permute(out, rest[:before] + moved + rest[before:])
    elif 0 in shape or 0 in kept:
        out = trace.empty([*kept[:before], *shape, *kept[before:]], x.dtype)
    else:
        if any(x.shape[d] == 0 for d in dims):
            raise ShapeError(f"cannot index an empty axis: shape {x.shape}")
        # x's indexed dimensions, its others, and those of the indices, each in a place of its own
        k, rank = len(dims), len(shape)
        others = [d for d, a in zip(x._dims, arrays) if a is None]
        front = trace.tensor(x.term, [*(x._dims[d] for d in dims), *others, *[()] * rank], x.dtype)
        spread = []
        for d in dims:
            i = index_term(arrays[d], x.shape[d], "indexing")                   # type: ignore[arg-type]
            spread.append(trace.tensor(i.term, [()] * (k + len(kept) + rank - i.ndim) + list(i._dims), i.dtype))
        terms, together = align([front, *spread])
        term = terms[0]
        for axes, position_there in zip(together[:k], terms[1:]):
            term = trace.gather_linear(term, trace.axes.resolve(axes), position_there)
        others = together[k:k + len(kept)]
        out = trace.tensor(term, [*others[:before], *together[k + len(kept):], *others[before:]], x.dtype)
    position = 0
    seen = False
    if not adjacent:
        position, seen = len(shape), True
    for r in result:
        if r == "new":
            out = expand(out, position)
        if r in ("new", "dim"):
            position += 1
        elif not seen:
            seen, position = True, position + len(shape)
    return out


# ------------------------------------------------------------------ small constructors that fold numbers

def unary(f: str, x: Term) -> Term:
    """un(f, x), computed now if x is a number."""
    out = un(f, x)
    return _folded(out) if out.op == "un" else out


def binary(f: str, x: Term, y: Term) -> Term:
    return _folded(bi(f, x, y))


def _folded(t: Term) -> Term:
    if not all(is_num(a) for a in t.args):
        return t
    from ..reference import BI, UN
    with np.errstate(all="ignore"):
        f: Any = (UN if t.op == "un" else BI)[t.attr]                           # type: ignore[index]
        return num(float(f(*[np.float64(a.attr) for a in t.args])))             # type: ignore[arg-type]
