"""Programs: what tracing produces and everything later consumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .errors import DtypeError, ShapeError
from .terms import PREDICATES, Affine, Index, Term, base, make, postorder, rewrite

# dtype → bytes of an element
DTYPES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
LARGEST = 2**63  # extents are below it
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def dtype_name(dtype: object) -> str:
    """The canonical name of a dtype given as a string, a NumPy / ml_dtypes dtype or type, or a framework's dtype object."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = str(name).rpartition(".")[2]  # "torch.bfloat16" → "bfloat16"
    name = {"bool_": "bool", "half": "float16", "float": "float32", "double": "float64"}.get(name, name)
    if name not in DTYPES:
        raise DtypeError(f"unknown dtype {dtype!r}", f"known: {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of an input.  An extent is an int ≥ 0, or a string naming a dynamic extent.  `range` = (lo, hi) declares
    bounds that every value keeps; the compiler may rely on them."""

    shape: tuple[int | str, ...]
    dtype: str = "float32"
    range: tuple[float, float] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        shape = self.shape
        if isinstance(shape, (int, str)) or not isinstance(shape, Sequence):
            raise ShapeError(f"shape must be a tuple, not {shape!r}", "for one axis write (n,)")
        for n in shape:
            if isinstance(n, str):
                if not n.isidentifier():
                    raise ShapeError(f"the name of a dynamic extent must be an identifier, not {n!r}")
            elif not hasattr(n, "__index__") or isinstance(n, bool) or n < 0:
                raise ShapeError(f"an extent must be an int ≥ 0 or a name, not {n!r}")
            elif n >= LARGEST:
                raise ShapeError("an extent is beyond 2^63", "no array is that large")
        object.__setattr__(self, "shape", tuple(n if isinstance(n, str) else n.__index__() for n in shape))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.range is not None:
            try:
                lo, hi = map(float, self.range)
            except (TypeError, ValueError, OverflowError):
                raise ShapeError(
                    f"range must be two numbers, not {self.range!r:.100}", "give (lo, hi), for example range=(0, math.inf)"
                ) from None
            if not lo <= hi:
                raise ShapeError(f"range {self.range!r} is empty", "give (lo, hi) with lo ≤ hi")
            object.__setattr__(self, "range", (lo, hi))


@dataclass(frozen=True)
class Input:
    """An array parameter.  Terms read it by op "input", with an affine index for each dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Output:
    """A result: element [i₀, i₁, …] of the array is the term at the axes' values for which index₀ = i₀, ….

    Each dimension is a tuple of axes, row-major (a merged dimension has several, a dimension of extent 1 none); an axis that
    the term does not depend on is a broadcast.
    """

    term: Term
    dims: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    dtype: str

    def index(self, extents: dict[str, int]) -> Index:
        """Where the element at given axes lies, as an affine index for each dimension."""
        out = []
        for axes in self.dims:
            step, terms = 1, []
            for a in reversed(axes):
                terms.append((a, step))
                step *= extents[a]
            out.append(Affine(0, tuple(reversed(terms))))
        return tuple(out)


@dataclass(frozen=True)
class Program:
    """A traced program: outputs as terms over named axes.

    `axes` gives the extent of each (whole) axis; axes of extent 1 do not occur.  Inputs are in the order of the function's
    parameters.  Names of axes are made while tracing, in an order that depends on the program alone.  `wide`: some product of the
    source takes a computed value in float32 or float64 (frontend/wide.py), so none may round what is computed to 16 bits.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    axes: dict[str, int]
    structured: bool = False  # outputs were returned as a tuple (even if there is one)
    wide: bool = False

    def input(self, name: str) -> Input:
        return next(i for i in self.inputs if i.name == name)

    @cached_property
    def compute_dtype(self) -> str:
        """float64 programs compute in float64, and so do those that give integers or positions which float32 cannot hold; all others
        in float32."""
        dtypes = [i.dtype for i in self.inputs] + [o.dtype for o in self.outputs]
        return "float64" if "float64" in dtypes or self._has_large_integers() else "float32"

    def _has_large_integers(self) -> bool:
        """May an integer output, or a position that is gathered at, be beyond 2²⁴?"""
        most: dict[Term, float] = {}  # integer terms → their largest magnitude; what is made of floats needs no more than float32
        for t in postorder(o.term for o in self.outputs):
            bound = _magnitude(t, most, self)
            if bound is not None:
                most[t] = bound
            if t.op == "gather" and self.axes.get(base(t.attr), 0) > EXACT:
                return True
        return any(o.dtype not in FLOATS and most.get(o.term, 0) > EXACT for o in self.outputs)

    def renamed(self, axes: dict[str, str], inputs: dict[str, str]) -> Program:
        """The same program under other names: its plan must be the same up to those names."""
        ax = {a: axes.get(a, a) for a in self.axes}
        if len(set(ax.values())) != len(ax):
            raise ShapeError("two axes would get the same name")

        def affine(ix: Affine) -> Affine:
            return Affine(ix.const, tuple((ax[a], c) for a, c in ix.terms))

        def f(t: Term, args: tuple[Term, ...]) -> Term | None:
            match t.op:
                case "input":
                    return make("input", (inputs.get(t.attr[0], t.attr[0]), tuple(map(affine, t.attr[1]))))  # type: ignore[index]
                case "iota":
                    return make("iota", ax[t.attr])  # type: ignore[index]
                case "red":
                    return make("red", (t.attr[0], ax[t.attr[1]]), args)  # type: ignore[index]
                case "view":
                    return make("view", tuple((ax[a], affine(i)) for a, i in t.attr), args)  # type: ignore[attr-defined]
                case "gather":
                    return make("gather", ax[t.attr], args)  # type: ignore[index]
            return None

        terms = rewrite([o.term for o in self.outputs], f)
        outs = tuple(
            Output(t, tuple(tuple(ax[a] for a in d) for d in o.dims), o.shape, o.dtype) for t, o in zip(terms, self.outputs)
        )
        ins = tuple(Input(inputs.get(i.name, i.name), i.shape, i.dtype, i.range) for i in self.inputs)
        return Program(self.name, ins, outs, {ax[a]: n for a, n in self.axes.items()}, self.structured, self.wide)

    def __reduce__(self) -> Any:
        from .codegen.serial import from_json, to_json

        return from_json, (to_json(self),)  # terms may be nested deeper than pickle can go

    def __str__(self) -> str:
        ins = ", ".join(f"{i.name}: {i.dtype}{list(i.shape)}" for i in self.inputs)
        outs = "\n".join(f"  {o.term} : {o.dtype}{list(o.shape)} dims {o.dims}" for o in self.outputs)
        return f"{self.name}({ins})\n  axes {self.axes}\n{outs}"


EXACT = 2**24  # float32 holds all integers up to here


def _magnitude(t: Term, most: dict[Term, float], program: Program) -> float | None:
    """A bound on |t| if t is made of integers."""
    a: Any = t.attr
    args = [most[x] for x in t.args if x in most]
    match t.op:
        case "num":
            return abs(a) if float(a).is_integer() or math.isinf(a) else None
        case "iota":
            return program.axes[base(a)] - 1.0
        case "input":
            i = program.input(a[0])
            return None if i.dtype in FLOATS else max(map(abs, i.range or range_of(i.dtype)))
        case "un" | "bi" if a in PREDICATES:
            return 1.0
        case "gather" | "where":
            values = t.args[:1] if t.op == "gather" else t.args[1:]
            finite = [most[x] for x in values if x in most and math.isfinite(most[x])]
            return max(finite, default=0.0) if all(x in most for x in values) else None
    if len(args) < len(t.args):
        return None
    match t.op:
        case "add":
            return sum(args)
        case "mul":
            return math.prod(args)
        case "red":
            extent = program.axes.get(base(a[1]), 1)
            return args[0] * extent if a[0] == "+" else math.inf if a[0] == "*" and args[0] > 1 else args[0]
        case "view":
            return args[0]
        case "un" | "bi" if a in ("neg", "abs", "sign", "max", "min", "floordiv", "mod", "floor", "ceil", "round", "trunc"):
            return max(args)
    return None


def range_of(dtype: str) -> tuple[float, float]:
    """Bounds of an integer dtype's values, or of bool's."""
    bits = 1 if dtype == "bool" else 8 * DTYPES[dtype]
    return (0.0, 2.0**bits - 1) if dtype == "bool" or dtype.startswith("uint") else (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)


def elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
