"""Plans, kernels and programs as JSON text, for `save`, `load` and the cache.  Tile programs are not stored: lowering makes them.

Terms form a DAG, and monoids contain terms: all lie in one table, each entry after what it refers to, by number.  Text is
deterministic.  Reading is strict: whatever is unknown, missing, left over, of another type or out of range raises ValueError, and
nothing is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ..extraction.plan import Axis, Buffer, Cost, Kernel, Plan, Store
from ..program import DTYPES, Input, Output, Program
from ..terms import BINARY, REDUCTIONS, UNARY, Affine, Monoid, Term, make, variables

FORMAT = 3


def to_json(value: Plan | Kernel | Program) -> str:
    name = type(value).__name__
    if name not in KINDS:
        raise TypeError(f"a {name} cannot be stored")
    w = _Writer()
    body = KINDS[name].encode(value, w)
    return json.dumps(
        {"format": FORMAT, "kind": name, "nodes": w.nodes, "value": body},
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=False,
    )


def from_json(text: str) -> Any:
    """The Plan, Kernel or Program that `to_json` wrote.  Raises ValueError if the text is anything else."""
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
        top = _object(data, ("format", "kind", "nodes", "value"))
        if top["format"] != FORMAT or type(top["format"]) is not int:
            raise ValueError(f"format {top['format']!r}, not {FORMAT}")
        if top["kind"] not in KINDS:
            raise ValueError(f"unknown kind {top['kind']!r}")
        return KINDS[top["kind"]].decode(top["value"], _Reader(top["nodes"]))
    except (RecursionError, OverflowError, TypeError) as err:  # too deep, too large, unhashable
        raise ValueError(f"not a stored plan or program: {err}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number here")


def _object(x: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(x, dict) or tuple(x) != names:
        raise ValueError(f"expected {{{', '.join(names)}}}, found {str(x)[:80]}")
    return x


def _array(x: Any, length: int | None = None) -> list[Any]:
    if not isinstance(x, list) or (length is not None and len(x) != length):
        raise ValueError(f"expected {'an array' if length is None else f'{length} elements'}, found {str(x)[:80]}")
    return x


# ------------------------------------------------------------------ codecs


@dataclass(frozen=True)
class Codec:
    encode: Callable[[Any, _Writer], Any]
    decode: Callable[[Any, _Reader], Any]


def plain(kind: type, valid: Callable[[Any], bool] = lambda x: True) -> Codec:
    def decode(x: Any, r: _Reader) -> Any:
        if type(x) is not kind or not valid(x):
            raise ValueError(f"{str(x)[:80]!r} is no valid {kind.__name__} here")
        return x

    return Codec(lambda x, w: kind(x), decode)


def sequence(item: Codec) -> Codec:
    return Codec(lambda xs, w: [item.encode(x, w) for x in xs], lambda xs, r: tuple(item.decode(x, r) for x in _array(xs)))


def pair(*items: Codec) -> Codec:
    return Codec(
        lambda xs, w: [c.encode(x, w) for c, x in zip(items, xs, strict=True)],
        lambda xs, r: tuple(c.decode(x, r) for c, x in zip(items, _array(xs, len(items)))),
    )


def mapping(item: Codec) -> Codec:
    def decode(xs: Any, r: _Reader) -> dict[str, Any]:
        if not isinstance(xs, dict):
            raise ValueError(f"expected an object, found {str(xs)[:80]}")
        return {k: item.decode(x, r) for k, x in xs.items()}

    return Codec(lambda xs, w: {k: item.encode(x, w) for k, x in xs.items()}, decode)


def optional(item: Codec) -> Codec:
    return Codec(lambda x, w: None if x is None else item.encode(x, w), lambda x, r: None if x is None else item.decode(x, r))


def record(cls: type, **members: Codec) -> Codec:
    names = tuple(members)
    if names != tuple(f.name for f in fields(cls)):
        raise TypeError(f"the codec of {cls.__name__} lacks a field")

    def decode(x: Any, r: _Reader) -> Any:
        got = _object(x, names)
        return cls(**{n: c.decode(got[n], r) for n, c in members.items()})

    return Codec(lambda x, w: {n: c.encode(getattr(x, n), w) for n, c in members.items()}, decode)


def _float(x: Any, r: _Reader) -> float:
    if type(x) is not str or float.fromhex(x).hex() != x:
        raise ValueError(f"{str(x)[:80]!r} is no number")
    return float.fromhex(x)


def _encode_data(x: Any, w: _Writer) -> Any:
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return {"float": x.hex()}
    if isinstance(x, (tuple, list)):
        return {type(x).__name__: [_encode_data(y, w) for y in x]}
    if isinstance(x, dict) and all(type(k) is str for k in x):
        return {"dict": {k: _encode_data(y, w) for k, y in x.items()}}
    raise TypeError(f"a {type(x).__name__} cannot be stored")


def _decode_data(x: Any, r: _Reader) -> Any:
    if x is None or type(x) in (bool, int, str):
        return x
    if not isinstance(x, dict) or len(x) != 1:
        raise ValueError(f"unknown data {str(x)[:80]}")
    ((kind, y),) = x.items()
    if kind == "float":
        return _float(y, r)
    if kind in ("tuple", "list"):
        items = [_decode_data(z, r) for z in _array(y)]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict" and isinstance(y, dict):
        return {k: _decode_data(z, r) for k, z in y.items()}
    raise ValueError(f"unknown data {kind!r}")


text = plain(str)
name = plain(str, bool)
integer = plain(int)
natural = plain(int, lambda x: x >= 0)
flag = plain(bool)
number = Codec(lambda x, w: float(x).hex(), _float)
data = Codec(_encode_data, _decode_data)


def one_of(*values: str) -> Codec:
    return plain(str, lambda x: x in values)


dtype = one_of(*DTYPES)
shape = sequence(natural)
affine = Codec(
    lambda x, w: [x.const, [[a, c] for a, c in x.terms]],
    lambda x, r: Affine(*pair(integer, sequence(pair(name, plain(int, bool)))).decode(x, r)),
)
index = sequence(affine)
term = Codec(lambda t, w: w.term(t), lambda n, r: r.term(n))
monoid = Codec(lambda h, w: w.monoid(h), lambda n, r: r.monoid(n))

# ------------------------------------------------------------------ terms and monoids

# operator → codec of its attribute, number of arguments (least, most)
nothing = Codec(lambda x, w: None, lambda x, r: _none(x))
TERMS: dict[str, tuple[Codec, int, float]] = {
    "num": (number, 0, 0),
    "input": (pair(name, index), 0, 0),
    "iota": (name, 0, 0),
    "var": (name, 0, 0),
    "add": (nothing, 2, float("inf")),
    "mul": (nothing, 2, float("inf")),
    "un": (one_of(*UNARY), 1, 1),
    "bi": (one_of(*BINARY), 2, 2),
    "where": (nothing, 3, 3),
    "red": (pair(one_of(*REDUCTIONS), name), 1, 1),
    "fold": (pair(monoid, natural, name), 1, float("inf")),
    "view": (sequence(pair(name, affine)), 1, 1),
    "gather": (name, 2, 2),
}


def _none(x: Any) -> None:
    if x is not None:
        raise ValueError(f"{str(x)[:80]!r} where nothing belongs")


class _Writer:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.number: dict[Term | Monoid, int] = {}

    def append(self, key: Term | Monoid, node: Any) -> int:
        self.number[key] = len(self.nodes)
        self.nodes.append(node)
        return self.number[key]

    def term(self, root: Term) -> int:
        stack = [(root, False)]
        while stack:
            t, ready = stack.pop()
            if t in self.number:
                continue
            if ready:
                self.append(t, [t.op, TERMS[t.op][0].encode(t.attr, self), [self.number[a] for a in t.args]])
            else:
                stack.append((t, True))
                stack.extend((a, False) for a in reversed(t.args))
        return self.number[root]

    def monoid(self, h: Monoid) -> int:
        if h not in self.number:
            pivots = [p if isinstance(p, str) else [p[0], self.term(p[1])] if p[0] == "fn" else [p[0], *p[1:]] for p in h.pivots]
            coef = [[[j, self.term(e)] for j, e in row] for row in h.coef]
            self.append(h, ["monoid", pivots, coef])
        return self.number[h]


class _Reader:
    def __init__(self, nodes: Any):
        self.made: list[Term | Monoid] = []
        for node in _array(nodes):
            op, attr, args = _array(node, 3)
            self.made.append(self._monoid(attr, args) if op == "monoid" else self._term(op, attr, args))

    def get(self, n: Any, kind: type) -> Any:
        if type(n) is not int or not 0 <= n < len(self.made) or not isinstance(self.made[n], kind):
            raise ValueError(f"{str(n)[:80]!r} is no {kind.__name__.lower()} in the table")
        return self.made[n]

    def term(self, n: Any) -> Term:
        return self.get(n, Term)

    def monoid(self, n: Any) -> Monoid:
        return self.get(n, Monoid)

    def _term(self, op: Any, attr: Any, args: Any) -> Term:
        if type(op) is not str or op not in TERMS:
            raise ValueError(f"unknown operator {str(op)[:80]!r}")
        codec, least, most = TERMS[op]
        below = [self.term(a) for a in _array(args)]
        if not least <= len(below) <= most:
            raise ValueError(f"{op} with {len(below)} arguments")
        value = codec.decode(attr, self)
        if op == "fold" and (len(below) != value[0].size or value[1] >= value[0].size):
            raise ValueError("a fold that does not fit its monoid")
        return make(op, value, below)

    def _monoid(self, pivots: Any, coef: Any) -> Monoid:
        rows = tuple(
            tuple((natural.decode(j, self), self.term(e)) for j, e in (_array(x, 2) for x in _array(row))) for row in _array(coef)
        )
        kinds: list[str | tuple] = []
        for p in _array(pivots):
            if p in ("max", "min"):
                kinds.append(p)
                continue
            if _array(p)[:1] == ["at"]:
                _, at, op, nans = _array(p, 4)
                q = natural.decode(at, self)
                if q >= len(kinds) or kinds[q] not in ("max", "min") or op not in ("max", "min") or type(nans) is not bool:
                    raise ValueError("a payload of what the monoid does not have")
                kinds.append(("at", q, op, nans))
                continue
            kind, what = _array(p, 2)
            if kind not in ("mean", "fn"):
                raise ValueError(f"unknown pivot {str(kind)[:80]!r}")
            kinds.append((kind, self.term(what) if kind == "fn" else natural.decode(what, self)))
        known = {f"{x}{n}" for x in "rR" for n in range(len(kinds))}, {f"y{j}" for j in range(len(rows))}
        if any(j >= len(rows) or not set(variables(e)) <= known[0] for row in rows for j, e in row):
            raise ValueError("a coefficient of what the monoid does not have")
        if any(
            not isinstance(p, str)
            and p[0] != "at"
            and (p[1] >= len(rows) if p[0] == "mean" else not set(variables(p[1])) <= known[1])
            for p in kinds
        ):
            raise ValueError("a pivot of what the monoid does not have")
        return Monoid(tuple(kinds), rows)


# ------------------------------------------------------------------ plans and programs


def checked(codec: Codec, holds: Callable[[Any], str | None]) -> Codec:
    """The codec, with a condition on what it reads: `holds` says what is wrong, if anything."""

    def decode(x: Any, r: _Reader) -> Any:
        value = codec.decode(x, r)
        if wrong := holds(value):
            raise ValueError(wrong)
        return value

    return Codec(codec.encode, decode)


def _plan_wrong(p: Plan) -> str | None:
    for n, b in p.buffers.items():
        if n != b.name:
            return f"buffer {b.name} under the name {n}"
    for k in p.kernels:
        for s in k.stores:
            if s.buffer not in p.buffers or len(s.index) != len(p.buffers[s.buffer].shape):
                return f"{k.name} stores to what is no such buffer: {s.buffer}"
            stack, seen = [s.term], set()
            while stack:
                t = stack.pop()
                if t in seen:
                    continue
                seen.add(t)
                stack.extend(t.args)
                if t.op == "input" and (t.attr[0] not in p.buffers or len(t.attr[1]) != len(p.buffers[t.attr[0]].shape)):  # type: ignore[index]
                    return f"{k.name} reads what is no such buffer: {t.attr[0]}"  # type: ignore[index]
        if any(a not in k.extents and a not in k.axes for s in k.stores for ix in s.index for a in ix.axes):
            return f"{k.name} has an axis without an extent"
    return None


def _axis_wrong(a: Axis) -> str | None:
    return None if 0 < a.tile <= max(1, a.extent) or a.tile == a.extent else f"a tile of {a.tile} on an axis of {a.extent}"


axis = checked(record(Axis, extent=natural, tile=natural, role=one_of("grid", "loop", "whole")), _axis_wrong)
kind = one_of("input", "output", "temp")
known = sequence(one_of("finite", "nonzero", "nonneg"))
buffer = record(Buffer, name=name, shape=shape, dtype=dtype, kind=kind, axes=sequence(name), known=known)
cost = record(Cost, seconds=number, parts=mapping(number), bound=text, detail=mapping(data))
kernel = record(
    Kernel,
    name=name,
    stores=sequence(record(Store, buffer=name, term=term, index=index)),
    axes=mapping(axis),
    extents=mapping(natural),
    choices=mapping(data),
    cost=optional(cost),
    wide=flag,
)
compute = one_of("float32", "float64")
plan = checked(record(Plan, kernels=sequence(kernel), buffers=mapping(buffer), compute_dtype=compute), _plan_wrong)
program = record(
    Program,
    name=text,
    inputs=sequence(record(Input, name=name, shape=shape, dtype=dtype, range=optional(pair(number, number)))),
    outputs=sequence(record(Output, term=term, dims=sequence(sequence(name)), shape=shape, dtype=dtype)),
    axes=mapping(natural),
    structured=flag,
    wide=flag,
)
KINDS: dict[str, Codec] = {"Plan": plan, "Kernel": kernel, "Program": program}
