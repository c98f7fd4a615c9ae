"""Random chains of matrix products, the ways that layers make them."""

from __future__ import annotations

import math
import random
from typing import Any

from .drawing import layout
from .operands import Operand
from .statements import Call, Statements


def draw_products(r: random.Random, dtype: str) -> Statements:
    """[i, d]·[d, k], something of each element or of rows of them, perhaps masked, and then [i, k]·[k, e]; of extents that tiles of
    matrix instructions and pipelines of them divide, or not.  Keys and values may be read in parts, in another order or at positions
    that an input gives, or come from two inputs; masks come from positions or from inputs."""
    d, e = r.choice((16, 32, 64, 64, 64, 72, 128)), r.choice((16, 32, 64, 64, 64, 128))
    rows, keys = r.choice((8, 64, 64, 96, 128, 130)), r.choice((16, 40, 64, 96, 128, 150))
    heads = r.choice(([], [], [1], [2], [3]))
    shared = bool(heads) and r.random() < 0.3  # heads of queries read the same keys
    turned = r.random() < 0.6  # the right operand has its rows along what is summed
    kinds = ("normal",) * 8 + ("ties", "positive", "constant")
    inputs = [Operand((*heads, rows, d), dtype, r.choice(kinds), layout(r))]
    calls: list[Call] = []

    def call(fn: str, *args: Any, **options: Any) -> str:
        calls.append(Call(fn, args, tuple(options.items())))
        return f"v{len(calls) - 1}"

    def read(*shape: int, kind: str = "", of: str = dtype) -> str:
        inputs.append(Operand(shape, of, kind or r.choice(kinds), layout(r)))
        return f"x{len(inputs) - 1}"

    def along(axis: int, *shape: int) -> str:
        """An operand, the rows of which along an axis are those of an input, or a selection from them."""
        n = shape[axis]

        def longer(m: int) -> str:
            return read(*shape[:axis], m, *shape[axis + 1 :], of=r.choice((*[dtype] * 18, "float32", "float8_e4m3fn")))

        def part(x: str, *slice_: int | None) -> str:
            return call("getitem", x, index=[*[[None, None, None]] * axis, list(slice_)])

        match r.choice((*["whole"] * 20, "part", "back", "step", "gather", "two")):
            case "part":
                return part(longer(n + 5), 2, n + 2, None)
            case "back":
                return part(longer(n), None, None, -1)
            case "step":
                return part(longer(2 * n), 1, None, 2)
            case "gather":
                m = r.choice((4, n))
                most = m + (r.random() < 0.1)  # some positions do not exist
                return call("take", longer(m), read(n, kind=f"below {most}", of=r.choice(("int32", "int64"))), axis=axis)
            case "two":
                return call("concat", [longer(n // 3), longer(n - n // 3)], axis=axis)
        return longer(n)

    over = ((keys,), (rows, keys), (*heads, 1, keys))  # what a mask or a bias may vary along
    outer = [] if shared else heads
    n = len(outer)
    right = along(n, *outer, keys, d) if turned else along(n + 1, *outer, d, keys)
    right = call("permute_dims", right, axes=[*range(n), n + 1, n]) if turned else right
    s = call("matmul", "x0", right)
    if r.random() < 0.15:  # a product and nothing else, or of something of each element of its operand, which may be summed, too
        if r.random() < 0.3:
            return Statements(tuple(inputs), tuple(calls), (s,))
        left = call(r.choice(("tanh", "silu", "square")), "x0")
        left = call("add", left, 1.0) if r.random() < 0.5 else call("multiply", left, read(rows, d))
        outputs = [call("matmul", left, right), *([call("sum", left, axis=-1)] if r.random() < 0.3 else [])]
        return Statements(tuple(inputs), tuple(calls), tuple(outputs)).compact()
    if r.random() < 0.7:
        s = call("multiply", s, r.choice((0.125, 0.25, 0.1, -0.2, 1.0)))
    for _ in range(r.randint(0, 2)):
        match r.choice(("tanh", "bias", "row", "cap", "scale")):
            case "tanh":
                s = call("tanh", s)
            case "bias":
                kind, of = r.choice(("normal", "masked", "padding")), r.choice((dtype, dtype, "float32"))
                s = call("add", s, read(*r.choice(over), kind=kind, of=of))
            case "row":
                s = call("multiply", s, read(rows, 1))
            case "cap":
                s = call("multiply", call("tanh", call("multiply", s, 0.2)), 5.0)
            case "scale":
                s = call("add", s, read(rows, keys, kind="normal"))
    hidden = r.choice((None, None, "tril", "tril", "window", "data", "padding"))
    at = call("astype", call("arange", float(rows)), dtype=dtype) if hidden in ("tril", "window") else ""
    if at:
        row = call("expand_dims", at, axis=1)
        key = call("astype", call("arange", float(keys)), dtype=dtype)
        keep = call("less_equal", key, call("add", row, float(r.choice((0, 0, 5, keys - rows)))))
        if hidden == "window":
            keep = call("multiply", keep, call("less", call("subtract", row, key), float(r.choice((3, 33)))))
            keep = call("greater", call("astype", keep, dtype=dtype), 0.5)
    elif hidden == "data":
        keep = call("less", read(keys), 0.8)
    elif hidden:
        keep = read(*r.choice(over), kind=r.choice(("padding", "padding", "normal")), of="bool")
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
    if r.random() < 0.1:
        outputs = [call("argmax", s, axis=-1)]
    elif r.random() < 0.08:
        best = call("top_k", s, r.randint(1, 2), axis=-1)
        outputs = [call("getitem", best, index=[part]) for part in (0, 1)]
    else:
        outputs = [call("matmul", s, along(len(outer), *outer, keys, e))]
    if form == "written" and r.random() < 0.3:
        outputs.append(r.choice((top, total)))
    if calls[-1].fn == "matmul" and r.random() < 0.3:
        outputs[0] = call(r.choice(("tanh", "relu", "square")), outputs[0])
    return Statements(tuple(inputs), tuple(calls), tuple(outputs)).compact()
