"""Random array programs as data: lists of calls into `xp`, that can be traced, printed as Python, stored as JSON and taken apart.

Nothing read from a file is ever evaluated: a program may only call the functions in `FUNCTIONS`, and "getitem", which is indexing.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import xp
from ..errors import EqsatError, ShapeError
from ..program import DTYPES, FLOATS, Program
from ..trace import trace
from .operands import INTEGERS, Operand, below

UNARY = ("exp", "tanh", "abs", "negative", "square", "sqrt", "log", "sin", "sign", "floor", "reciprocal", "rsqrt", "relu", "silu")
RARE_UNARY = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "elu", "erf", "exp2", "expm1", "gelu", "leaky_relu",
    "log10", "log1p", "log2", "positive", "round", "sigmoid", "sinh", "softplus", "tan", "trunc",
)  # fmt: skip
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
RARE_BINARY = ("pow", "remainder", "floor_divide", "atan2", "hypot", "copysign", "logaddexp")
REDUCTIONS = ("sum", "max", "min", "mean", "prod", "var", "std", "logsumexp")
TRUTHS = ("all", "any", "count_nonzero")
COMPARISONS = ("less", "less_equal", "greater", "equal", "greater_equal", "not_equal")
LOGIC = ("logical_and", "logical_or", "logical_xor")
PROPERTIES = ("isnan", "isinf", "isfinite", "signbit", "logical_not")
ROWWISE = ("softmax", "log_softmax", "layer_norm", "rms_norm")
SCANS = ("cumulative_sum", "cumulative_prod")
SHIFTS = ("bitwise_left_shift", "bitwise_right_shift")
TUPLES = ("top_k", "unstack")  # these give several tensors, which "getitem" takes apart
OTHERS = (
    "where", "matmul", "permute_dims", "reshape", "broadcast_to", "expand_dims", "concat", "roll", "flip", "repeat", "triu", "tril",
    "argmax", "argmin", "astype", "clip", "arange", "getitem", "take", "take_along_axis", "stack", "pad", "tile", "squeeze",
    "moveaxis", "diff", "one_hot", "searchsorted", "einsum", "vecdot", "tensordot", "eye", "linspace", "full", "zeros_like",
    "ones_like", "full_like", "bitwise_invert", "linalg.diagonal", "linalg.trace", "linalg.vector_norm",
)  # fmt: skip
FUNCTIONS = frozenset((
    *UNARY, *RARE_UNARY, *BINARY, *RARE_BINARY, *REDUCTIONS, *TRUTHS, *COMPARISONS, *LOGIC, *PROPERTIES, *ROWWISE, *SCANS, *SHIFTS,
    *TUPLES, *OTHERS,
))  # fmt: skip
MOST_ELEMENTS = 4096  # of one tensor, of a program that is no chain of matrix products
MOST_SPACE = 1 << 16  # points of a program's whole iteration space

Arg = str | float | list[str]  # a name, a number, names


@dataclass(frozen=True)
class Call:
    """One statement: xp.fn(*args, **options).  args: names "x0" (an input) or "v0" (a statement), numbers, lists of names.

    fn "getitem" is args[0][index]; its option `index` has an entry for each index: a number, None (a new dimension), "...", [start,
    stop, step], or "@n", which is args[n], an integer tensor."""

    fn: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def names(self) -> Iterator[str]:
        for a in self.args:
            yield from ([a] if isinstance(a, str) else a if isinstance(a, list) else [])

    def renamed(self, names: Mapping[str, Any]) -> Call:
        def new(a: Any) -> Any:
            return names.get(a, a) if isinstance(a, str) else [names.get(n, n) for n in a] if isinstance(a, list) else a

        return replace(self, args=tuple(map(new, self.args)))

    def __str__(self) -> str:
        args = [f"[{', '.join(a)}]" if isinstance(a, list) else a if isinstance(a, str) else _number(a) for a in self.args]
        options = dict(self.options)
        if self.fn == "getitem":
            return f"{args[0]}[{', '.join(_index_text(k, args) for k in options['index'])}]"
        first = [repr(options.pop(k)) for k in _FIRST if k in options]
        last = [repr(options.pop(k)) for k in _LAST if k in options]
        named = [f"{k}={tuple(v) if isinstance(v, list) else _number(v)}" for k, v in options.items()]
        return f"xp.{self.fn}({', '.join([*first, *args, *last, *named])})"

    def apply(self, values: Mapping[str, Any]) -> Any:
        args = [[values[n] for n in a] if isinstance(a, list) else values[a] if isinstance(a, str) else a for a in self.args]
        options = dict(self.options)
        if self.fn == "getitem":
            return _item(args, options["index"])
        first = [options.pop(k) for k in _FIRST if k in options]
        last = [options.pop(k) for k in _LAST if k in options]
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        return functools.reduce(getattr, self.fn.split("."), xp)(*first, *args, *last, **options)  # type: ignore[operator]


_FIRST, _LAST = ("subscripts",), ("dtype", "pad_width", "repetitions")  # options that are given by position


def _item(args: list[Any], index: list[Any]) -> Any:
    key = tuple(slice(*k) if isinstance(k, list) else _placed(k, args) if isinstance(k, str) else k for k in index)
    if not isinstance(args[0], tuple):
        return args[0][key]
    if len(key) != 1 or not isinstance(key[0], int) or not 0 <= key[0] < len(args[0]):
        raise ShapeError(f"{index} is no place of {len(args[0])} tensors")
    return args[0][key[0]]


def _placed(k: str, args: list[Any]) -> Any:
    return Ellipsis if k == "..." else args[int(k[1:])]


def _index_text(k: Any, args: list[str]) -> str:
    if isinstance(k, list):
        start, stop, step = ("" if v is None else str(v) for v in k)
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return ("..." if k == "..." else args[int(k[1:])]) if isinstance(k, str) else repr(k)


@dataclass(frozen=True)
class Statements:
    """A program: inputs x0, x1, …; statements v0, v1, …; names of outputs."""

    inputs: tuple[Operand, ...]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]

    def trace(self) -> Program:
        """The traced program.  EqsatError where the calls do not fit together."""
        program = trace(named(self._run, len(self.inputs)), *(i.spec for i in self.inputs))
        assert isinstance(program, Program)  # all extents are numbers
        return program

    def _run(self, *tensors: Any) -> tuple[Any, ...]:
        values = {f"x{i}": t for i, t in enumerate(tensors)}
        for n, c in enumerate(self.calls):
            values[f"v{n}"] = c.apply(values)
        return tuple(values[o] for o in self.outputs)

    def compact(self) -> Statements:
        """Without inputs and statements that no output needs, the rest numbered anew."""
        used = set(self.outputs)
        for n in range(len(self.calls) - 1, -1, -1):
            if f"v{n}" in used:
                used.update(self.calls[n].names())
        inputs = [i for i in range(len(self.inputs)) if f"x{i}" in used]
        calls = [n for n in range(len(self.calls)) if f"v{n}" in used]
        names = {f"x{i}": f"x{j}" for j, i in enumerate(inputs)} | {f"v{n}": f"v{m}" for m, n in enumerate(calls)}
        return Statements(
            tuple(self.inputs[i] for i in inputs),
            tuple(self.calls[n].renamed(names) for n in calls),
            tuple(dict.fromkeys(names[o] for o in self.outputs)),
        )

    def __str__(self) -> str:
        """As a Python function over `xp`."""
        head = f"def program({', '.join(f'x{i}' for i in range(len(self.inputs)))}):"
        return "\n".join([head, *(f"    v{n} = {c}" for n, c in enumerate(self.calls)), f"    return {', '.join(self.outputs)},"])

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [[list(i.shape), i.dtype, i.kind, *([i.layout] if i.layout != "packed" else [])] for i in self.inputs],
            "calls": [[c.fn, list(c.args), dict(c.options)] for c in self.calls],
            "outputs": list(self.outputs),
        }

    @staticmethod
    def from_json(d: Any) -> Statements:
        """ValueError unless this is a program: known functions, plain data, names that are defined before they are used."""
        try:
            inputs = tuple(Operand(tuple(map(_extent, s)), *map(str, words)) for s, *words in d["inputs"])
            calls = tuple(
                Call(f, tuple(map(_argument, a)), tuple((str(k), _option(str(k), v, a)) for k, v in o.items()))
                for f, a, o in d["calls"]
            )
            out = Statements(inputs, calls, tuple(map(str, d["outputs"])))
        except (TypeError, KeyError, AttributeError) as e:
            raise ValueError(f"not a program: {e}") from None
        known = {f"x{i}" for i in range(len(inputs))}
        for n, c in enumerate(calls):
            if c.fn not in FUNCTIONS or not known.issuperset(c.names()) or (c.fn == "getitem" and not _is_getitem(c)):
                raise ValueError(f"not a program: {c.fn} of {', '.join(c.names())}")
            known.add(f"v{n}")
        if not out.outputs or not known.issuperset(out.outputs):
            raise ValueError("not a program: its outputs are not defined")
        if not all(i.known for i in inputs):
            raise ValueError("not a program: unknown dtype, kind or layout of an input")
        return out


def named(run: Any, count: int) -> Any:
    """`trace` names inputs after parameters."""
    import inspect

    def program(*tensors: Any) -> Any:
        return run(*tensors)

    program.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f"x{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for i in range(count)]
    )
    return program


def _number(x: Any) -> str:
    return ("-xp.inf" if x < 0 else "xp.inf") if isinstance(x, float) and math.isinf(x) else repr(x)


def _extent(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= 1 << 16:
        raise ValueError(f"not an extent: {n!r}")
    return n


def _argument(a: Any) -> Any:
    if isinstance(a, (str, int, float)) or (isinstance(a, list) and all(isinstance(n, str) for n in a)):
        return a
    raise ValueError(f"not an argument: {a!r}")


def _option(name: str, v: Any, args: list[Any]) -> Any:
    if name == "index" and isinstance(v, list) and all(_is_index(k, len(args)) for k in v):
        return v
    if v is None or isinstance(v, (bool, int, float, str)) or (isinstance(v, list) and all(isinstance(n, int) for n in v)):
        return v
    raise ValueError(f"not an option: {v!r}")


def _is_index(k: Any, args: int) -> bool:
    if isinstance(k, str):
        return k == "..." or (k[:1] == "@" and k[1:].isdecimal() and 0 < int(k[1:]) < args)
    if isinstance(k, list):
        return len(k) == 3 and all(n is None or isinstance(n, int) for n in k)
    return k is None or isinstance(k, int)


def _is_getitem(c: Call) -> bool:
    return bool(c.args) and all(isinstance(a, str) for a in c.args) and [k for k, _ in c.options] == ["index"]


# ------------------------------------------------------------------ taking apart


def smaller(s: Statements) -> Iterator[Statements]:
    """Programs that are simpler in one respect, the simplest first.  Not all of them fit together."""
    for o in s.outputs if len(s.outputs) > 1 else ():
        yield replace(s, outputs=(o,)).compact()
    for n in range(len(s.calls) - 1, -1, -1):  # an argument, or an input, in the place of a statement
        for name in dict.fromkeys(s.calls[n].names()):
            yield _without(s, n, name)
    for n in range(len(s.calls) - 1, -1, -1):
        if s.calls[n].fn != "expand_dims" and any(a.startswith("v") for a in [*s.calls[n].names()] or ["v"]):
            fresh = _input_like(s, n)
            if fresh is not None:
                yield _without(replace(s, inputs=(*s.inputs, fresh)), n, f"x{len(s.inputs)}")
    for n, c in enumerate(s.calls):
        for call in _plainer_calls(c):
            yield replace(s, calls=(*s.calls[:n], call, *s.calls[n + 1 :]))
    extents = sorted({n for i in s.inputs for n in i.shape}, reverse=True)
    for n in extents:
        for m in (1, 2, 3, n // 2):
            if 0 < m < n:
                yield replace(s, inputs=tuple(_resized(i, n, m) for i in s.inputs))
    for n, i in enumerate(s.inputs):
        for plainer in _plainer_operands(i):
            yield replace(s, inputs=(*s.inputs[:n], plainer, *s.inputs[n + 1 :]))
    for n, i in enumerate(s.inputs):  # two inputs that are one, or of one dtype
        for m in range(n):
            if s.inputs[m].shape == i.shape and (s.inputs[m].dtype in FLOATS) == (i.dtype in FLOATS):
                names = {f"x{n}": f"x{m}"}
                yield replace(s, calls=tuple(c.renamed(names) for c in s.calls)).compact()
            if i.dtype != s.inputs[m].dtype and {i.dtype, s.inputs[m].dtype} <= {*FLOATS}:
                one = max(i.dtype, s.inputs[m].dtype, key=lambda d: (DTYPES[d], d))  # the wider one
                same = tuple(replace(o, dtype=one) if o in (i, s.inputs[m]) else o for o in s.inputs)
                yield replace(s, inputs=same)


def _without(s: Statements, n: int, name: str) -> Statements:
    names = {f"v{n}": name}
    outputs = tuple(names.get(o, o) for o in s.outputs)
    return replace(s, calls=tuple(c.renamed(names) for c in s.calls), outputs=outputs).compact()


def _input_like(s: Statements, n: int) -> Operand | None:
    """An input that fits where the n-th statement stands, if that gives one tensor."""
    if s.calls[n].fn in TUPLES:
        return None
    try:
        out = replace(s, outputs=(f"v{n}",)).trace().outputs[0]
    except EqsatError:
        return None
    floats = [i.dtype for i in s.inputs if i.dtype in FLOATS]
    if out.dtype in FLOATS:
        return Operand(out.shape, floats[0] if floats else "float64")
    return Operand(out.shape, out.dtype, "below 3" if out.dtype in INTEGERS else "normal")


def _plainer_calls(c: Call) -> Iterator[Call]:
    """The same statement with fewer or simpler options."""
    if c.fn == "getitem":
        index = dict(c.options)["index"]
        for n, k in enumerate(index):
            for v in _plainer_index(k):
                yield replace(c, options=(("index", [*index[:n], v, *index[n + 1 :]]),))
    simple = {"keepdims": True, "axis": -1, "correction": 0, "include_initial": False}
    for n, (name, v) in enumerate(c.options):
        if name in simple and v != simple[name]:
            yield replace(c, options=(*c.options[:n], (name, simple[name]), *c.options[n + 1 :]))
    if c.fn == "top_k" and c.args[1] > 1:
        yield replace(c, args=(c.args[0], 1))
    for group in (RARE_UNARY, RARE_BINARY):
        if c.fn in group:
            yield replace(c, fn={RARE_UNARY: "exp", RARE_BINARY: "multiply"}[group])


def _plainer_index(k: Any) -> list[Any]:
    if k is None or isinstance(k, str) or k == [None, None, None]:
        return []
    several = isinstance(k, list) and sum(p is not None for p in k) > 1
    return [[None, None, None], *([[None, None, -1], [None, None, 2], [1, None, None]] if several else [])]


def _resized(i: Operand, n: int, m: int) -> Operand:
    """With extents m instead of n, and positions that fit them."""
    most = below(i.kind)
    kind = f"below {m}" if most is not None and most > m else i.kind
    return replace(i, shape=tuple(m if k == n else k for k in i.shape), kind=kind)


def _plainer_operands(i: Operand) -> Iterator[Operand]:
    if i.layout != "packed":
        yield replace(i, layout="packed")
    for d in range(len(i.shape)):
        yield replace(i, shape=(*i.shape[:d], *i.shape[d + 1 :]))
        if i.shape[d] > 1:
            yield replace(i, shape=(*i.shape[:d], 1, *i.shape[d + 1 :]))
    most = below(i.kind)
    if most is None and i.kind != "normal":
        yield replace(i, kind="normal")
    elif most is not None:
        for m in (1, 2, 3):
            if m < most:
                yield replace(i, kind=f"below {m}")
    if i.dtype in INTEGERS and i.dtype != "int64":
        yield replace(i, dtype="int64")
    if i.dtype in FLOATS and i.dtype != "float64":
        yield replace(i, dtype="float64")
        if i.dtype != "float32":
            yield replace(i, dtype="float32")


def size(s: Statements) -> tuple[int, int, int]:
    """How complicated a program is."""
    return len(s.calls), sum(math.prod(i.shape) for i in s.inputs), len(json.dumps(s.to_json()))
