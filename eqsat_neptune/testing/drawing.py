"""Random well-typed programs, most of them chains of reductions that depend on one another, and changes of what there is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import EqsatError
from ..program import FLOATS
from ..trace import trace
from .operands import INTEGERS, KINDS, LAYOUTS, Operand, below
from .statements import (
    BINARY,
    COMPARISONS,
    LOGIC,
    MOST_ELEMENTS,
    PROPERTIES,
    RARE_BINARY,
    RARE_UNARY,
    REDUCTIONS,
    ROWWISE,
    SCANS,
    SHIFTS,
    TRUTHS,
    TUPLES,
    UNARY,
    Call,
    Statements,
    named,
)

RARELY = 0.1  # of the tensors that a program makes, empty ones are kept
_CASTS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")
_NUMBERS = (0.5, 2.0, -1.0, 1.0, 3.0, 0.125)
_WHOLE = [None, None, None]  # the slice :


class _Growing:
    """A program while it is drawn: it is traced along with that, so that every statement fits."""

    def __init__(self, r: random.Random, values: dict[str, Any], calls: list[Call], extents: Sequence[int], most: int):
        self.r, self.values, self.calls, self.extents, self.most = r, values, calls, extents, most
        self.reduced: list[str] = [f"v{n}" for n, c in enumerate(calls) if c.fn in REDUCTIONS]
        self.broken = False  # tracing the last statement raised what no call should: a fault, which running the program will show

    def grow(self, wanted: int) -> None:
        tries = 0
        while len(self.calls) < wanted and tries < 200 and not self.broken:
            tries += 1
            call = self._call()
            if call is not None and self._fits(call) and call.fn in TUPLES:
                whole = f"v{len(self.calls) - 1}"
                parts = range(len(self.values[whole]))
                for n in sorted(self.r.sample(parts, min(len(parts), self.r.randint(1, 2)))):
                    self._fits(Call("getitem", (whole,), (("index", [n]),)))

    def _fits(self, call: Call) -> bool:
        """Add a statement, if it can be traced and is not too large."""
        try:
            value = call.apply(self.values)
            sizes = [math.prod(v.shape) for v in (value if isinstance(value, tuple) else (value,))]
        except EqsatError:
            return False
        except Exception:
            self.calls.append(call)
            self.broken = True
            return False
        if not sizes or max(sizes) > self.most or (0 in sizes and self.r.random() > RARELY):
            return False
        if call.fn in REDUCTIONS:
            self.reduced.append(f"v{len(self.calls)}")
        self.values[f"v{len(self.calls)}"] = value
        self.calls.append(call)
        return True

    # ---- what statements are made of

    def _names(self, *dtypes: str) -> list[str]:
        return [n for n, v in self.values.items() if not isinstance(v, tuple) and str(v.dtype) in dtypes]

    def _name(self, *dtypes: str) -> str | None:
        """A tensor, most often a recent one; None if there is none."""
        names = self._names(*dtypes)
        if not names:
            return None
        return self.r.choice(names[-3:]) if self.r.random() < 0.6 else self.r.choice(names)

    def _float(self) -> str:
        return self._name(*FLOATS) or self._any()

    def _any(self) -> str:
        names = [n for n, v in self.values.items() if not isinstance(v, tuple)]
        return self.r.choice(names[-3:]) if self.r.random() < 0.6 else self.r.choice(names)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def _axis(self, name: str) -> int:
        return self.r.randrange(len(self._shape(name)))

    # ---- statements

    def _call(self) -> Call | None:
        r = self.r
        x, y = self._float(), self._float()
        shape = self._shape(x)
        kind = r.choices(*zip(*_WEIGHTS.items()))[0]
        match kind:
            case "reduce":
                options = (("axis", self._over(shape)), ("keepdims", r.random() < 0.75))
                return Call(r.choice(REDUCTIONS[:4] * 3 + REDUCTIONS), (x,), options)
            case "chain" if self.reduced:  # a tensor at what was reduced: the next reduction depends on it
                red = self.reduced[-1] if r.random() < 0.7 else r.choice(self.reduced)
                if r.random() < 0.6:
                    (x,) = self.calls[int(red[1:])].names()
                return Call(r.choice(("subtract", "subtract", "divide", "multiply", "add", *BINARY)), (x, red))
            case "binary":
                if r.random() < 0.4:
                    x, y = self._any(), self._any()
                return Call(r.choice(BINARY * 3 + RARE_BINARY), (x, y))
            case "number":
                return Call(r.choice(BINARY), (x, r.choice(_NUMBERS)))
            case "unary":
                return Call(r.choice(("exp", "exp", *UNARY)), (x,))
            case "rare":
                return Call(r.choice(RARE_UNARY), (x,))
            case "self matmul" if len(shape) > 1:
                return Call("permute_dims", (x,), (("axes", [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]),))
            case "matmul":
                return Call("matmul", (x, y))
            case "product":
                return self._product(x, y, shape)
            case "truth":
                return self._truth(x, y)
            case "where":
                truth = self._name("bool")
                if truth is not None:
                    return Call("where", (truth, x, r.choice([y, y, 0.0, -math.inf, -1.0])))
            case "triangle" if len(shape) > 1:
                return Call(r.choice(["triu", "tril"]), (x,), (("k", r.randint(-1, 1)),))
            case "rowwise" if shape:
                return Call(r.choice(ROWWISE), (x,), (("axis", r.choice([-1, -1, 0])),))
            case "shape":
                return self._reshaped(self._any() if r.random() < 0.3 else x)
            case "slice":
                return self._sliced(self._any() if r.random() < 0.3 else x)
            case "gather":
                return self._gathered(self._any() if r.random() < 0.2 else x)
            case "scan" if shape:
                return Call(r.choice(SCANS), (x,), (("axis", self._axis(x)), ("include_initial", r.random() < 0.3)))
            case "extremum" if shape:
                if r.random() < 0.5:
                    d = self._axis(x)
                    return Call("top_k", (x, min(r.randint(1, 3), shape[d])), (("axis", d),))
                options = (("axis", r.choice([self._axis(x), None])), ("keepdims", r.random() < 0.5))
                return Call(r.choice(["argmax", "argmin"]), (x,), options)
            case "cast":
                other = self._name(*INTEGERS, "bool")
                to = str(self.values[other].dtype if r.random() < 0.1 else self.values["x0"].dtype) if other else ""
                return Call("astype", (other,), (("dtype", to),)) if other else None
            case "any cast":
                return Call("astype", (self._any(),), (("dtype", r.choice(_CASTS)),))
            case "clip":
                return Call("clip", (x, -1.0, r.choice([0.5, 2.0])))
            case "integers":
                return self._integers()
            case "made":
                return self._made(x)
            case "input":
                return self._using(x)
        return None

    def _using(self, x: str) -> Call | None:
        """An input that nothing uses yet, beside what there is."""
        r = self.r
        used = {n for c in self.calls for n in c.names()}
        left = [n for n in self.values if n.startswith("x") and n not in (*used, x)]
        if not left:
            return None
        i = r.choice(left)
        if str(self.values[i].dtype) == "bool":
            return Call("where", (i, x, r.choice([0.0, -math.inf, -math.inf, self._float()])))
        if str(self.values[i].dtype) in INTEGERS and self._shape(x) and r.random() < 0.6:
            return Call("take", (x, i), (("axis", self._axis(x)),))
        return Call(r.choice(BINARY), (x, i))

    def _over(self, shape: Sequence[int]) -> Any:
        r, n = self.r, len(shape)
        if not n:
            return None
        if r.random() < 0.15:
            return sorted(r.sample(range(-n, 0), r.randint(1, n)))
        return r.choice([-1, -1, -1, 0, None, *range(-n, 0)])

    def _product(self, x: str, y: str, shape: tuple[int, ...]) -> Call:
        """Contractions that are no plain matrix products."""
        r, other = self.r, self._shape(y)
        match r.choice(("vecdot", "tensordot", "einsum", "einsum", "trace")):
            case "vecdot":
                return Call("vecdot", (x, y), (("axis", -1),))
            case "tensordot":
                return Call("tensordot", (x, y), (("axes", r.choice([0, 1, 1, 2])),))
            case "trace":
                return Call(r.choice(("linalg.diagonal", "linalg.trace")), (x,), (("offset", r.randint(-1, 1)),))
        extents = dict.fromkeys([*shape, *other])
        letters = dict(zip(extents, "abcdefgh"))  # an extent, a letter: one of a tensor that is repeated is a diagonal
        left, right = ("".join(letters[n] for n in s) for s in (shape, other))
        out = [c for c in dict.fromkeys(left + right) if r.random() < 0.6]
        r.shuffle(out)
        return Call("einsum", (x, y), (("subscripts", f"{left},{right}->{''.join(out)}"),))

    def _truth(self, x: str, y: str) -> Call | None:
        r = self.r
        match r.choice(("compare", "compare", "compare", "property", "logic", "logic", "reduce")):
            case "compare":
                if r.random() < 0.3:
                    x, y = self._any(), self._any()
                return Call(r.choice(COMPARISONS[:4] * 2 + COMPARISONS), (x, r.choice([y, 0.0, 0.5])))
            case "property":
                return Call(r.choice(PROPERTIES), (x,))
            case "reduce":
                z = self._name("bool") or x
                return Call(r.choice(TRUTHS), (z,), (("axis", self._over(self._shape(z))), ("keepdims", r.random() < 0.5)))
        a, b = self._name("bool"), self._name("bool")
        return Call(r.choice(LOGIC), (a, b)) if a and b else None

    def _reshaped(self, x: str) -> Call | None:
        r, shape = self.r, self._shape(x)
        n = len(shape)
        match r.choice((
            "permute", "reshape", "broadcast", "expand", "concat", "concat", "roll", "flip", "repeat", "stack", "pad", "tile",
            "squeeze", "moveaxis", "unstack", "diff",
        )):  # fmt: skip
            case "permute":
                return Call("permute_dims", (x,), (("axes", r.sample(range(n), n)),))
            case "reshape":
                size, first = math.prod(shape), r.choice([*self.extents, 2])
                return Call("reshape", (x,), (("shape", [first, size // first] if size % first == 0 else [size]),))
            case "broadcast":
                return Call("broadcast_to", (x,), (("shape", [r.choice(self.extents), *shape]),))
            case "expand":
                return Call("expand_dims", (x,), (("axis", r.randint(0, n)),))
            case "concat" if n:
                others = [self._any() for _ in range(r.choice([1, 1, 2]))]
                return Call("concat", ([x, *(x if r.random() < 0.2 else o for o in others)],), (("axis", r.randrange(n)),))
            case "stack":
                alike = [m for m, v in self.values.items() if not isinstance(v, tuple) and tuple(v.shape) == shape]
                return Call("stack", ([x, *(r.choice(alike) for _ in range(r.randint(1, 2)))],), (("axis", r.randint(0, n)),))
            case "roll" if n:
                return Call("roll", (x, r.randint(-2, 3)), (("axis", r.randrange(n)),))
            case "flip" if n:
                return Call("flip", (x,), (("axis", r.choice([r.randrange(n), None])),))
            case "repeat" if n:
                return Call("repeat", (x, 2), (("axis", r.randrange(n)),))
            case "pad" if n:
                width = [r.randint(0, 2), r.randint(0, 2)]
                return Call("pad", (x,), (("pad_width", width), ("constant_values", r.choice([0, 1]))))
            case "tile" if n:
                return Call("tile", (x,), (("repetitions", [r.randint(1, 2) for _ in range(n)]),))
            case "squeeze" if 1 in shape:
                return Call("squeeze", (x,), (("axis", shape.index(1)),))
            case "moveaxis" if n:
                return Call("moveaxis", (x, r.randrange(n), r.randrange(n)))
            case "unstack" if n:
                return Call("unstack", (x,), (("axis", r.randrange(n)),))
            case "diff" if n:
                return Call("diff", (x,), (("axis", r.randrange(n)),))
        return None

    def _sliced(self, x: str) -> Call:
        """Basic indexing: steps of both signs, single places, new dimensions, an ellipsis."""
        r = self.r
        index: list[Any] = [self._slice(n) for n in self._shape(x)]
        if index and r.random() < 0.3:
            cut = r.randint(0, len(index))
            index = [*index[:cut], "..."] if r.random() < 0.5 else ["...", *index[cut:]]
        if r.random() < 0.2:
            index.insert(r.randint(0, len(index)), None)
        return Call("getitem", (x,), (("index", index),))

    def _slice(self, n: int) -> Any:
        r = self.r
        match r.choice(("all", "all", "step", "back", "back step", "part", "part", "place", "any")):
            case "step":
                return [r.choice([None, 1]), None, r.randint(2, 3)]
            case "back":
                return [None, None, -1]
            case "back step":
                return [r.choice([None, -2, n // 2]), None, -r.randint(2, 3)]
            case "part":
                a, b = sorted((r.randint(0, n), r.randint(0, n)))
                return [a or None, b if b < n else None, None]
            case "place" if n:
                return r.randint(-n, n - 1)
            case "any":
                return [r.choice([None, r.randint(-n - 1, n + 1)]) for _ in range(2)] + [r.choice([None, 1, 2, -1, -2, 5])]
        return list(_WHOLE)

    def _gathered(self, x: str) -> Call | None:
        """Elements at computed positions, or at those that an input gives."""
        r, shape = self.r, self._shape(x)
        i = self._name(*INTEGERS)
        if i is None:
            if r.random() < 0.5:
                return Call("argmax", (x,), (("axis", r.randrange(len(shape))), ("keepdims", True))) if shape else None
            return Call("arange", (float(r.choice(self.extents)),))
        match r.choice(("take", "take", "index", "index", "along", "along", "one hot", "search", "within")):
            case "take" if shape:
                return Call("take", (x, i), (("axis", r.randrange(len(shape))),))
            case "along" if shape:
                return Call("take_along_axis", (x, i), (("axis", r.randrange(len(shape))),))
            case "index" if shape:
                index: list[Any] = [r.choice([_WHOLE, _WHOLE, self._slice(n)]) for n in shape]
                index[r.randrange(len(shape))] = "@1"
                names = [x, i]
                if len(shape) > 1 and r.random() < 0.3:
                    names.append(self._name(*INTEGERS) or i)
                    index[r.randrange(len(shape))] = "@2"
                    names = names if "@1" in index else [x, names[2]]
                    index = index if "@1" in index else ["@1" if k == "@2" else k for k in index]
                return Call("getitem", tuple(names[: 2 + ("@2" in index)]), (("index", index),))
            case "one hot":
                return Call("one_hot", (i, r.choice(self.extents)))
            case "search":
                sorted_ = [n for n in self._names(*FLOATS) if len(self._shape(n)) == 1]
                return Call("searchsorted", (r.choice(sorted_), x), (("side", r.choice(["left", "right"])),)) if sorted_ else None
            case "within" if shape:  # positions that are valid along some axis
                return Call("remainder", (i, r.choice(shape) or 1))
        return None

    def _integers(self) -> Call | None:
        r = self.r
        i = self._name(*INTEGERS)
        if i is None:
            return Call("arange", (r.choice(self.extents),))
        match r.choice(("binary", "number", "reduce", "shift", "divide", "invert", "where")):
            case "binary":
                return Call(r.choice(("add", "subtract", "multiply", "maximum", "minimum")), (i, self._name(*INTEGERS)))
            case "number":
                return Call(r.choice(("add", "subtract", "multiply", "maximum", "minimum")), (i, r.randint(-3, 3)))
            case "reduce":
                fn = r.choice(("sum", "max", "min", "prod", "cumulative_sum"))
                options = (("axis", self._over(self._shape(i))), ("keepdims", r.random() < 0.5))
                return Call(fn, (i,), options if fn != "cumulative_sum" else (("axis", 0),))
            case "shift":
                return Call(r.choice(SHIFTS), (i, r.randint(0, 2)))
            case "divide":
                return Call(r.choice(("floor_divide", "remainder")), (i, r.choice([2, 3, -2])))
            case "invert":
                return Call("bitwise_invert", (i,))
        truth = self._name("bool")
        return Call("where", (truth, i, self._name(*INTEGERS))) if truth else None

    def _made(self, x: str) -> Call:
        r = self.r
        n = r.choice(self.extents)
        match r.choice(("eye", "linspace", "full", "like", "arange", "norm")):
            case "eye":
                return Call("eye", (n, r.choice(self.extents)), (("k", r.randint(-1, 1)),))
            case "linspace":
                return Call("linspace", (-1.0, 1.0, n))
            case "full":
                return Call("full", (), (("shape", [n]), ("fill_value", r.choice([2.0, -1.0, -math.inf]))))
            case "like":
                like = r.choice(("zeros_like", "ones_like", "full_like"))
                return Call(like, (x, 0.5) if like == "full_like" else (x,))
            case "arange":
                return Call("arange", (-1, 2 * n - 1, 2))
        return Call("linalg.vector_norm", (x,), (("axis", self._over(self._shape(x))), ("ord", r.choice([1, 2, math.inf]))))


_WEIGHTS = {
    "reduce": 36, "chain": 40, "binary": 9, "number": 5, "unary": 13, "rare": 6, "matmul": 8, "self matmul": 3, "product": 2,
    "truth": 8, "where": 8, "triangle": 2, "rowwise": 4, "shape": 8, "slice": 6, "gather": 6, "scan": 1, "extremum": 3, "cast": 3,
    "any cast": 2, "clip": 1, "integers": 5, "made": 1, "input": 20,
}  # fmt: skip


def draw(r: random.Random, dtype: str = "float64", extents: Sequence[int] = (1, 2, 3, 4, 5, 7, 8, 12)) -> Statements:
    """A program of up to 14 statements, some of up to 24, of which those remain that outputs need.  Most inputs have the dtype, some
    another one; x0 has it."""
    pool = [r.choice(extents) for _ in range(3)]
    mixed = r.random() < 0.25
    inputs: list[Operand] = []
    for n in range(r.choice([1, 2, 2, 3, 3, 4])):
        shape = tuple(r.choice(pool) for _ in range(r.choice([0, 1, 1, 2, 2, 2, 2, 2, 3, 3])))
        if n and r.random() < 0.5:  # one that fits the first
            first = inputs[0].shape
            shape = tuple(1 if r.random() < 0.2 else m for m in first[r.randint(0, len(first)) :])
        inputs.append(_operand(r, shape, dtype, n > 0, mixed))
    wanted = r.randint(5, 14) if r.random() < 0.7 else r.randint(12, 24)
    return _grown(r, Statements(tuple(inputs), (), ("x0",)), wanted, pool)


def _operand(r: random.Random, shape: tuple[int, ...], dtype: str, other: bool, mixed: bool) -> Operand:
    kind = r.choice(("normal",) * 8 + KINDS)
    if other and r.random() < 0.25:
        dtype = r.choice(("bool", "bool", "int64", "int64", "int32", "int32", "int8", "uint8", "int16"))
        if dtype == "bool":
            kind = r.choice(("normal", "normal", "padding", "padding", "constant"))
        elif r.random() < 0.6:
            kind = f"below {r.choice([1, 2, 3, 3, 4, 5])}"
    elif other and mixed:
        dtype = r.choice(("float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"))
    return Operand(shape, dtype, kind, layout(r))


def layout(r: random.Random) -> str:
    """Most arrays lie packed."""
    return r.choice(LAYOUTS) if r.random() < 0.25 else "packed"


# ------------------------------------------------------------------ changing


def mutate(r: random.Random, old: Statements) -> Statements:
    """Another program: a statement changed, or cut short, or grown (the same if it has no input to begin with)."""
    if not old.inputs:
        return old
    calls, inputs = list(old.calls), list(old.inputs)
    match r.choice(("function", "cut", "grow", "grow", "kind", "extents", "layout", "dtype", "index")):
        case "function" if calls:
            n = r.randrange(len(calls))
            group = next((g for g in _GROUPS if calls[n].fn in g), (calls[n].fn,))
            calls[n] = replace(calls[n], fn=r.choice(group))
        case "cut":
            calls = calls[: r.randint(0, len(calls))]
        case "kind":
            n = r.randrange(len(inputs))
            inputs[n] = replace(inputs[n], kind=r.choice(KINDS))
        case "layout":
            n = r.randrange(len(inputs))
            inputs[n] = replace(inputs[n], layout=r.choice(LAYOUTS))
        case "dtype":
            n = r.randrange(len(inputs))
            if inputs[n].dtype in FLOATS:
                inputs[n] = replace(inputs[n], dtype=r.choice(FLOATS))
        case "index":
            places = [n for n, c in enumerate(calls) if c.fn == "getitem" and len(c.args) == 1]
            if places:
                n = r.choice(places)
                others = (_WHOLE, [None, None, -1], [None, None, 2], [1, None, None])
                index = [r.choice([*others, k]) for k in dict(calls[n].options)["index"]]
                calls[n] = replace(calls[n], options=(("index", index),))
        case "extents":
            a, b = (r.choice([n for i in inputs for n in i.shape] or [1]) for _ in range(2))
            b = r.choice([1, 2, 3, 5, 8, 16, b])
            inputs = [replace(i, shape=tuple(b if n == a else n for n in i.shape)) for i in inputs]
    inputs = [i if below(i.kind) is None or i.dtype in INTEGERS else replace(i, kind="normal") for i in inputs]
    pool = sorted({n for i in inputs for n in i.shape}) or [1]
    return _grown(r, Statements(tuple(inputs), tuple(calls), ("x0",)), len(calls) + r.randint(0, 3), pool)


_GROUPS = (UNARY, RARE_UNARY, BINARY, RARE_BINARY, REDUCTIONS, TRUTHS, COMPARISONS, LOGIC, PROPERTIES, ROWWISE, SCANS, SHIFTS)


def _grown(r: random.Random, start: Statements, wanted: int, extents: Sequence[int]) -> Statements:
    calls: list[Call] = []
    broken: list[bool] = []

    def grow(*tensors: Any) -> tuple[Any, ...]:
        calls.clear()
        values = {f"x{i}": t for i, t in enumerate(tensors)}
        for c in start.calls:  # what no longer fits is left out, and what needs it
            if values.keys() >= set(c.names()):
                try:
                    value = c.apply(values)
                except EqsatError:
                    break
                except Exception:
                    broken.append(True)
                    calls.append(c)
                    return (values["x0"],)
                values[f"v{len(calls)}"] = value
                calls.append(c)
        largest = [math.prod(v.shape) for v in values.values() if not isinstance(v, tuple)]
        growing = _Growing(r, values, calls, extents, max([MOST_ELEMENTS, *largest]))
        growing.grow(wanted)
        broken.extend([True] if growing.broken else [])
        return (values["x0"],)

    trace(named(grow, len(start.inputs)), *(i.spec for i in start.inputs))
    values = [f"v{n}" for n, c in enumerate(calls) if c.fn not in TUPLES]
    outputs = [max(values, key=partial(_depth, calls), default="x0") if r.random() < 0.8 or not values else values[-1]]
    while len(calls) > 1 and len(outputs) < 4 and r.random() < 0.3:
        outputs.append(r.choice(values))
    if broken:
        outputs = [f"v{len(calls) - 1}"]
    return Statements(start.inputs, tuple(calls), tuple(outputs)).compact()


def _depth(calls: Sequence[Call], name: str) -> tuple[int, int]:
    """How many reductions of reductions lead to a value, and its place."""
    if name.startswith("x"):
        return 0, -1
    depths: list[int] = []
    for c in calls[: int(name[1:]) + 1]:
        below = max((depths[int(a[1:])] for a in c.names() if a.startswith("v")), default=0)
        depths.append(below + (c.fn in REDUCTIONS or c.fn in ROWWISE or c.fn == "top_k"))
    return depths[-1], len(depths)
