"""Random array programs as data: lists of calls into `xp`, that can be traced, printed as Python, stored as JSON and taken apart.

Nothing read from a file is ever evaluated: a program may only call the functions in `FUNCTIONS`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .. import xp
from ..errors import EqsatError
from ..program import FLOATS, Program, TensorSpec
from ..trace import trace

UNARY = ("exp", "tanh", "abs", "negative", "square", "sqrt", "log", "sin", "sign", "floor", "reciprocal", "rsqrt", "relu", "silu")
BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum")
REDUCTIONS = ("sum", "max", "min", "mean", "prod", "var", "std", "logsumexp")
COMPARISONS = ("less", "less_equal", "greater", "equal")
ROWWISE = ("softmax", "log_softmax", "layer_norm", "rms_norm")
OTHERS = (
    "where", "matmul", "permute_dims", "reshape", "broadcast_to", "expand_dims", "concat", "roll", "flip", "repeat", "triu", "tril",
    "cumulative_sum", "argmax", "argmin", "astype", "clip", "arange",
)  # fmt: skip
FUNCTIONS = frozenset((*UNARY, *BINARY, *REDUCTIONS, *COMPARISONS, *ROWWISE, *OTHERS))
KINDS = ("normal", "positive", "ties", "constant", "large", "offset", "masked")  # of input values: see running the case
RANGES = {"positive": (0.5, 2.0)}
MOST_ELEMENTS = 4096  # of one tensor, of a program that is no chain of matrix products
MOST_SPACE = 1 << 16  # points of a program's whole iteration space

Arg = str | float | list[str]  # a name, a number, names


@dataclass(frozen=True)
class Operand:
    """An input.  kind: one of `KINDS`."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    kind: str = "normal"


@dataclass(frozen=True)
class Call:
    """One statement: xp.fn(*args, **options).  args: names "x0" (an input) or "v0" (a statement), numbers, lists of names."""

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
        return f"xp.{self.fn}({', '.join(args + [f'{v!r}' if k == 'dtype' else f'{k}={tuple(v) if isinstance(v, list) else v!r}' for k, v in self.options])})"

    def apply(self, values: Mapping[str, Any]) -> Any:
        args = [[values[n] for n in a] if isinstance(a, list) else values[a] if isinstance(a, str) else a for a in self.args]
        args += [v for k, v in self.options if k == "dtype"]  # by position, says the standard
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in self.options if k != "dtype"}
        return getattr(xp, self.fn)(*args, **options)


@dataclass(frozen=True)
class Statements:
    """A program: inputs x0, x1, …; statements v0, v1, …; names of outputs."""

    inputs: tuple[Operand, ...]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]

    def trace(self) -> Program:
        """The traced program.  EqsatError where the calls do not fit together."""
        specs = [TensorSpec(i.shape, i.dtype, range=RANGES.get(i.kind)) for i in self.inputs]
        program = trace(_named(self._run, len(self.inputs)), *specs)
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
            "inputs": [[list(i.shape), i.dtype, i.kind] for i in self.inputs],
            "calls": [[c.fn, list(c.args), dict(c.options)] for c in self.calls],
            "outputs": list(self.outputs),
        }

    @staticmethod
    def from_json(d: Any) -> Statements:
        """ValueError unless this is a program: known functions, plain data, names that are defined before they are used."""
        try:
            inputs = tuple(Operand(tuple(map(_extent, s)), str(t), str(k)) for s, t, k in d["inputs"])
            calls = tuple(
                Call(f, tuple(map(_argument, a)), tuple((str(k), _plain(v)) for k, v in o.items())) for f, a, o in d["calls"]
            )
            out = Statements(inputs, calls, tuple(map(str, d["outputs"])))
        except (TypeError, KeyError, AttributeError) as e:
            raise ValueError(f"not a program: {e}") from None
        known = {f"x{i}" for i in range(len(inputs))}
        for n, c in enumerate(calls):
            if c.fn not in FUNCTIONS or not known.issuperset(c.names()):
                raise ValueError(f"not a program: {c}")
            known.add(f"v{n}")
        if not out.outputs or not known.issuperset(out.outputs):
            raise ValueError("not a program: its outputs are not defined")
        if any(i.dtype not in FLOATS or i.kind not in KINDS for i in inputs):
            raise ValueError("not a program: unknown dtype or kind of an input")
        return out


def _named(run: Any, count: int) -> Any:
    """`trace` names inputs after parameters."""
    import inspect

    def program(*tensors: Any) -> Any:
        return run(*tensors)

    program.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(f"x{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for i in range(count)]
    )
    return program


def _number(x: float) -> str:
    return ("-xp.inf" if x < 0 else "xp.inf") if math.isinf(x) else repr(x)


def _extent(n: Any) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= 1 << 16:
        raise ValueError(f"not an extent: {n!r}")
    return n


def _argument(a: Any) -> Any:
    if isinstance(a, (str, int, float)) or (isinstance(a, list) and all(isinstance(n, str) for n in a)):
        return a
    raise ValueError(f"not an argument: {a!r}")


def _plain(v: Any) -> Any:
    if v is None or isinstance(v, (bool, int, float, str)) or (isinstance(v, list) and all(isinstance(n, int) for n in v)):
        return v
    raise ValueError(f"not an option: {v!r}")


# ------------------------------------------------------------------ drawing


class _Growing:
    """A program while it is drawn: it is traced along with that, so that every statement fits."""

    def __init__(self, r: random.Random, values: dict[str, Any], calls: list[Call], extents: Sequence[int], most: int):
        self.r, self.values, self.calls, self.extents, self.most = r, values, calls, extents, most
        self.reduced: list[str] = [f"v{n}" for n, c in enumerate(calls) if c.fn in REDUCTIONS]

    def grow(self, wanted: int) -> None:
        tries = 0
        while len(self.calls) < wanted and tries < 200:
            tries += 1
            call = self._call()
            if call is None:
                continue
            try:
                value = call.apply(self.values)
                size = math.prod(value.shape)
            except EqsatError:
                continue
            if not 0 < size <= self.most:
                continue
            if call.fn in REDUCTIONS:
                self.reduced.append(f"v{len(self.calls)}")
            self.values[f"v{len(self.calls)}"] = value
            self.calls.append(call)

    def _name(self, truth: bool = False) -> str:
        """A tensor, most often a recent one."""
        names = [n for n, v in self.values.items() if (str(v.dtype) == "bool") == truth and (truth or str(v.dtype) in FLOATS)]
        names = names or list(self.values)
        return self.r.choice(names[-3:]) if self.r.random() < 0.6 else self.r.choice(names)

    def _call(self) -> Call | None:
        r = self.r
        x, y = self._name(), self._name()
        shape = self.values[x].shape
        kind = r.choices(*zip(*_WEIGHTS.items()))[0]
        match kind:
            case "reduce":
                some = r.choice([-1, -1, -1, 0, None, *range(-len(shape), 0)]) if shape else None
                several = sorted(r.sample(range(-len(shape), 0), r.randint(1, len(shape)))) if shape else None
                axis = several if r.random() < 0.15 else some
                return Call(r.choice(REDUCTIONS[:4] * 3 + REDUCTIONS), (x,), (("axis", axis), ("keepdims", r.random() < 0.75)))
            case "chain" if self.reduced:  # a tensor at what was reduced: the next reduction depends on it
                red = self.reduced[-1] if r.random() < 0.7 else r.choice(self.reduced)
                if r.random() < 0.6:
                    (x,) = self.calls[int(red[1:])].names()
                return Call(r.choice(("subtract", "subtract", "divide", "multiply", "add", *BINARY)), (x, red))
            case "binary":
                return Call(r.choice(BINARY), (x, y))
            case "number":
                return Call(r.choice(BINARY), (x, r.choice([0.5, 2.0, -1.0, 1.0, 3.0, 0.125])))
            case "unary":
                return Call(r.choice(("exp", "exp", *UNARY)), (x,))
            case "matmul":
                return Call("matmul", (x, y))
            case "self matmul" if len(shape) > 1:
                return Call("permute_dims", (x,), (("axes", [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]),))
            case "compare":
                return Call(r.choice(COMPARISONS), (x, r.choice([y, 0.0, 0.5])))
            case "where":
                truth = self._name(True)
                if str(self.values[truth].dtype) == "bool":
                    return Call("where", (truth, x, r.choice([y, y, 0.0, -math.inf, -1.0])))
            case "triangle" if len(shape) > 1:
                return Call(r.choice(["triu", "tril"]), (x,), (("k", r.randint(-1, 1)),))
            case "rowwise" if shape:
                return Call(r.choice(ROWWISE), (x,), (("axis", r.choice([-1, -1, 0])),))
            case "shape":
                return self._reshaped(x, shape)
            case "scan" if shape:
                return Call("cumulative_sum", (x,), (("axis", r.randrange(len(shape))),))
            case "extremum" if shape:
                return Call(
                    r.choice(["argmax", "argmin"]), (x,), (("axis", r.randrange(len(shape))), ("keepdims", r.random() < 0.5))
                )
            case "cast":
                indices = [n for n, v in self.values.items() if str(v.dtype) not in FLOATS]
                if indices:
                    return Call("astype", (r.choice(indices),), (("dtype", str(self.values["x0"].dtype)),))
            case "clip":
                return Call("clip", (x, -1.0, r.choice([0.5, 2.0])))
        return None

    def _reshaped(self, x: str, shape: tuple[int, ...]) -> Call | None:
        r, n = self.r, len(shape)
        match r.choice(("permute", "reshape", "broadcast", "expand", "concat", "roll", "flip", "repeat")):
            case "permute":
                return Call("permute_dims", (x,), (("axes", r.sample(range(n), n)),))
            case "reshape":
                size, first = math.prod(shape), r.choice(self.extents)
                return Call("reshape", (x,), (("shape", [first, size // first] if size % first == 0 else [size]),))
            case "broadcast":
                return Call("broadcast_to", (x,), (("shape", [r.choice(self.extents), *shape]),))
            case "expand":
                return Call("expand_dims", (x,), (("axis", r.randint(0, n)),))
            case "concat" if n:
                return Call("concat", ([x, self._name()],), (("axis", r.randrange(n)),))
            case "roll" if n:
                return Call("roll", (x, r.randint(-2, 3)), (("axis", r.randrange(n)),))
            case "flip" if n:
                return Call("flip", (x,), (("axis", r.randrange(n)),))
            case "repeat" if n:
                return Call("repeat", (x, 2), (("axis", r.randrange(n)),))
        return None


_WEIGHTS = {
    "reduce": 28, "chain": 26, "binary": 9, "number": 5, "unary": 13, "matmul": 8, "self matmul": 3, "compare": 4, "where": 5,
    "triangle": 2, "rowwise": 4, "shape": 6, "scan": 1, "extremum": 2, "cast": 2, "clip": 1,
}  # fmt: skip


def draw(r: random.Random, dtype: str = "float64", extents: Sequence[int] = (1, 2, 3, 4, 5, 7, 8, 12)) -> Statements:
    """A program of up to 14 statements."""
    pool = [r.choice(extents) for _ in range(3)]
    inputs = tuple(
        Operand(tuple(r.choice(pool) for _ in range(r.choice([1, 2, 2, 2, 3]))), dtype, r.choice(("normal",) * 6 + KINDS))
        for _ in range(r.randint(1, 3))
    )
    return _grown(r, Statements(inputs, (), ("x0",)), r.randint(4, 14), pool)


def draw_products(r: random.Random, dtype: str) -> Statements:
    """Matrix products one after the other, the ways that layers make them: [i, d]·[d, k], something of each element or of rows of
    them, perhaps masked, and then [i, k]·[k, e]; of extents that tiles of matrix instructions and pipelines of them divide, or not."""
    d, e = r.choice((16, 32, 64, 64, 64, 72, 128)), r.choice((16, 32, 64, 64, 64, 128))
    rows, keys = r.choice((8, 64, 64, 96, 128, 130)), r.choice((16, 40, 64, 96, 128, 150))
    heads = r.choice(([], [], [1], [2], [3]))
    shared = bool(heads) and r.random() < 0.3  # heads of queries read the same keys
    turned = r.random() < 0.6  # the right operand has its rows along what is summed
    kinds = ("normal",) * 8 + ("ties", "positive", "constant")
    inputs = [Operand((*heads, rows, d), dtype, r.choice(kinds))]
    calls: list[Call] = []

    def call(fn: str, *args: Any, **options: Any) -> str:
        calls.append(Call(fn, args, tuple(options.items())))
        return f"v{len(calls) - 1}"

    def read(*shape: int, kind: str = "") -> str:
        inputs.append(Operand(shape, dtype, kind or r.choice(kinds)))
        return f"x{len(inputs) - 1}"

    outer = [] if shared else heads
    n = len(outer)
    right = read(*outer, keys, d) if turned else read(*outer, d, keys)
    s = call("matmul", "x0", call("permute_dims", right, axes=[*range(n), n + 1, n]) if turned else right)
    if r.random() < 0.15:
        return Statements(tuple(inputs), tuple(calls), (s,))  # a product and nothing else
    if r.random() < 0.7:
        s = call("multiply", s, r.choice((0.125, 0.25, 0.1, -0.2, 1.0)))
    for _ in range(r.randint(0, 2)):
        match r.choice(("tanh", "bias", "row", "cap", "scale")):
            case "tanh":
                s = call("tanh", s)
            case "bias":
                s = call("add", s, read(keys, kind=r.choice(("normal", "masked"))))
            case "row":
                s = call("multiply", s, read(rows, 1))
            case "cap":
                s = call("multiply", call("tanh", call("multiply", s, 0.2)), 5.0)
            case "scale":
                s = call("add", s, read(rows, keys, kind="normal"))
    hidden = r.choice((None, None, "tril", "tril", "window", "data"))
    at = call("astype", call("arange", float(rows)), dtype=dtype) if hidden in ("tril", "window") else ""
    if at:
        row = call("expand_dims", at, axis=1)
        key = call("astype", call("arange", float(keys)), dtype=dtype)
        keep = call("less_equal", key, call("add", row, float(r.choice((0, 0, 5, keys - rows)))))
        if hidden == "window":
            keep = call("multiply", keep, call("less", call("subtract", row, key), float(r.choice((3, 33)))))
            keep = call("greater", call("astype", keep, dtype=dtype), 0.5)
    elif hidden:
        keep = call("less", read(keys), 0.8)
    form = r.choice(("softmax", "written", "written", "activation", "plain", "exp"))
    if form in ("softmax", "written", "exp"):
        s = call("where", keep, s, -math.inf) if hidden else s
        if form == "softmax":
            s = call("softmax", s, axis=-1)
        else:
            top = call("max", s, axis=-1, keepdims=True)
            s = call("exp", call("subtract", s, top) if form == "written" else call("multiply", s, 0.1))
            total = call("sum", s, axis=-1, keepdims=True)
            s = call("divide", s, total) if r.random() < 0.7 else s
    else:
        s = call(r.choice(("tanh", "relu", "square", "silu")), s) if form == "activation" else s
        s = call("where", keep, s, 0.0) if hidden else s
    outputs = [call("matmul", s, read(*outer, keys, e))]
    if form == "written" and r.random() < 0.3:
        outputs.append(r.choice((top, total)))
    if r.random() < 0.3:
        outputs[0] = call(r.choice(("tanh", "relu", "square")), outputs[0])
    return Statements(tuple(inputs), tuple(calls), tuple(outputs)).compact()


def mutate(r: random.Random, old: Statements) -> Statements:
    """Another program: a statement changed, or cut short, or grown (the same if it has no input to begin with)."""
    if not old.inputs:
        return old
    calls, inputs = list(old.calls), list(old.inputs)
    match r.choice(("function", "cut", "grow", "grow", "kind", "extents")):
        case "function" if calls:
            n = r.randrange(len(calls))
            group = next((g for g in (UNARY, BINARY, REDUCTIONS, COMPARISONS, ROWWISE) if calls[n].fn in g), (calls[n].fn,))
            calls[n] = replace(calls[n], fn=r.choice(group))
        case "cut":
            calls = calls[: r.randint(0, len(calls))]
        case "kind":
            n = r.randrange(len(inputs))
            inputs[n] = replace(inputs[n], kind=r.choice(KINDS))
        case "extents":
            a, b = (r.choice([n for i in inputs for n in i.shape] or [1]) for _ in range(2))
            b = r.choice([1, 2, 3, 5, 8, 16, b])
            inputs = [replace(i, shape=tuple(b if n == a else n for n in i.shape)) for i in inputs]
    pool = sorted({n for i in inputs for n in i.shape}) or [1]
    return _grown(r, Statements(tuple(inputs), tuple(calls), ("x0",)), len(calls) + r.randint(0, 3), pool)


def _grown(r: random.Random, start: Statements, wanted: int, extents: Sequence[int]) -> Statements:
    calls: list[Call] = []

    def grow(*tensors: Any) -> tuple[Any, ...]:
        calls.clear()
        values = {f"x{i}": t for i, t in enumerate(tensors)}
        for c in start.calls:  # what no longer fits is left out, and what needs it
            if values.keys() >= set(c.names()):
                try:
                    value = c.apply(values)
                except EqsatError:
                    break
                values[f"v{len(calls)}"] = value
                calls.append(c)
        _Growing(r, values, calls, extents, max([MOST_ELEMENTS, *(math.prod(v.shape) for v in values.values())])).grow(wanted)
        return (values["x0"],)

    specs = [TensorSpec(i.shape, i.dtype, range=RANGES.get(i.kind)) for i in start.inputs]
    trace(_named(grow, len(specs)), *specs)
    outputs = [max((f"v{n}" for n in range(len(calls))), key=partial(_depth, calls), default="x0")]
    if len(calls) > 1 and r.random() < 0.25:
        outputs.append(f"v{r.randrange(len(calls) - 1)}")
    return Statements(start.inputs, tuple(calls), tuple(outputs)).compact()


def _depth(calls: Sequence[Call], name: str) -> tuple[int, int]:
    """How many reductions of reductions lead to a value, and its place."""
    if name.startswith("x"):
        return 0, -1
    depths: list[int] = []
    for c in calls[: int(name[1:]) + 1]:
        below = max((depths[int(a[1:])] for a in c.names() if a.startswith("v")), default=0)
        depths.append(below + (c.fn in REDUCTIONS or c.fn in ROWWISE))
    return depths[-1], len(depths)


# ------------------------------------------------------------------ taking apart


def smaller(s: Statements) -> Iterator[Statements]:
    """Programs that are simpler in one respect, the simplest first.  Not all of them fit together."""
    for o in s.outputs if len(s.outputs) > 1 else ():
        yield replace(s, outputs=(o,)).compact()
    for n in range(len(s.calls) - 1, -1, -1):  # an argument, or an input, in the place of a statement
        for name in dict.fromkeys(s.calls[n].names()):
            yield _without(s, n, name)
    for n in range(len(s.calls) - 1, -1, -1):
        if s.calls[n].fn not in ("expand_dims", "arange"):
            fresh = f"x{len(s.inputs)}"
            shape = _shape_of(s, n)
            if shape is not None and any(a.startswith("v") for a in s.calls[n].names()):
                grown = replace(s, inputs=(*s.inputs, Operand(shape, s.inputs[0].dtype if s.inputs else "float64")))
                yield _without(grown, n, fresh)
    extents = sorted({n for i in s.inputs for n in i.shape}, reverse=True)
    for n in extents:
        for m in (1, 2, 3, n // 2):
            if 0 < m < n:
                yield replace(s, inputs=tuple(replace(i, shape=tuple(m if k == n else k for k in i.shape)) for i in s.inputs))
    for n, i in enumerate(s.inputs):
        for d in range(len(i.shape)):
            shapes = [(*i.shape[:d], *i.shape[d + 1 :])] + ([(*i.shape[:d], 1, *i.shape[d + 1 :])] if i.shape[d] > 1 else [])
            for shape in shapes:
                yield replace(s, inputs=(*s.inputs[:n], replace(i, shape=shape), *s.inputs[n + 1 :]))
        if i.kind != "normal":
            yield replace(s, inputs=(*s.inputs[:n], replace(i, kind="normal"), *s.inputs[n + 1 :]))
    for n, i in enumerate(s.inputs):  # two inputs that are one
        for m in range(n):
            if s.inputs[m].shape == i.shape:
                names = {f"x{n}": f"x{m}"}
                yield replace(s, calls=tuple(c.renamed(names) for c in s.calls)).compact()


def _without(s: Statements, n: int, name: str) -> Statements:
    names = {f"v{n}": name}
    outputs = tuple(names.get(o, o) for o in s.outputs)
    return replace(s, calls=tuple(c.renamed(names) for c in s.calls), outputs=outputs).compact()


def _shape_of(s: Statements, n: int) -> tuple[int, ...] | None:
    try:
        out = replace(s, outputs=(f"v{n}",)).trace().outputs[0]
    except EqsatError:
        return None
    return out.shape if out.dtype in FLOATS else None


def size(s: Statements) -> tuple[int, int, int]:
    """How complicated a program is."""
    return len(s.calls), sum(math.prod(i.shape) for i in s.inputs), len(json.dumps(s.to_json()))
