"""Programs and plans as JSON text: pure data, the same text in every process, strictly checked when it is read.

Terms and monoids share one table in which every entry refers only to earlier ones, so shared subterms are written once.
"""

from __future__ import annotations

import json
import math
from typing import Any

from .. import terms as T
from ..extraction.plan import Axis, Buffer, Cost, Kernel, Plan, Store
from ..program import DTYPES, Input, Output, Program
from ..terms import Affine, Index, Monoid, Term

ROLES = ("grid", "loop", "whole")
KINDS = ("input", "output", "temp")
_ARITY = {"num": 0, "input": 0, "iota": 0, "var": 0, "un": 1, "bi": 2, "where": 3, "red": 1, "view": 1, "gather": 2}


def to_json(x: Program | Plan) -> str:
    w = _Writer()
    root = w.program(x) if isinstance(x, Program) else w.plan(x)
    return json.dumps({"table": w.table, "root": root}, separators=(",", ":"), ensure_ascii=False)


def from_json(text: str) -> Program | Plan:
    """Raises ValueError for anything that `to_json` does not write."""
    try:
        d = json.loads(text)
        return _Reader(d["table"]).root(d["root"])
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as e:
        raise ValueError(f"malformed program or plan: {type(e).__name__} {e}") from None


class _Writer:
    def __init__(self) -> None:
        self.table: list[list[Any]] = []
        self.ids: dict[Term | Monoid, int] = {}

    def entry(self, key: Term | Monoid, row: list[Any]) -> int:
        self.ids[key] = len(self.table)
        self.table.append(row)
        return self.ids[key]

    def term(self, t: Term) -> int:
        for x in T.postorder([t]):
            if x not in self.ids:
                self.entry(x, [x.op, self.attr(x), [self.ids[a] for a in x.args]])
        return self.ids[t]

    def monoid(self, m: Monoid) -> int:
        if m not in self.ids:
            pivots = [p if isinstance(p, str) else [p[0], p[1] if p[0] == "mean" else self.term(p[1])] for p in m.pivots]
            coef = [[[j, self.term(e)] for j, e in row] for row in m.coef]
            self.entry(m, ["monoid", pivots, coef])
        return self.ids[m]

    def attr(self, t: Term) -> Any:
        a: Any = t.attr
        match t.op:
            case "num":
                return a.hex()
            case "input":
                return [a[0], [self.affine(i) for i in a[1]]]
            case "view":
                return [[axis, self.affine(i)] for axis, i in a]
            case "fold":
                return [self.monoid(a[0]), a[1], a[2]]
            case "red":
                return list(a)
        return a

    @staticmethod
    def affine(ix: Affine) -> list[Any]:
        return [ix.const, [list(t) for t in ix.terms]]

    def program(self, p: Program) -> dict[str, Any]:
        return dict(
            kind="program",
            name=p.name,
            inputs=[[i.name, list(i.shape), i.dtype, i.range and [v.hex() for v in i.range]] for i in p.inputs],
            outputs=[[self.term(o.term), [list(d) for d in o.dims], list(o.shape), o.dtype] for o in p.outputs],
            axes=[[a, n] for a, n in p.axes.items()],
            structured=p.structured,
        )

    def plan(self, p: Plan) -> dict[str, Any]:
        return dict(
            kind="plan",
            kernels=[
                dict(
                    name=k.name,
                    stores=[[s.buffer, self.term(s.term), [self.affine(i) for i in s.index]] for s in k.stores],
                    axes=[[a, x.extent, x.tile, x.role] for a, x in k.axes.items()],
                    extents=[[a, n] for a, n in k.extents.items()],
                    choices=k.choices,
                    cost=k.cost and dict(seconds=k.cost.seconds, parts=k.cost.parts, bound=k.cost.bound, detail=k.cost.detail),
                )
                for k in p.kernels
            ],
            buffers=[[b.name, list(b.shape), b.dtype, b.kind, list(b.axes)] for b in p.buffers.values()],
            compute_dtype=p.compute_dtype,
        )


class _Reader:
    def __init__(self, table: list[Any]):
        self.items: list[Term | Monoid] = []
        for row in table:
            self.items.append(self.monoid(row[1], row[2]) if row[0] == "monoid" else self.make(*row))

    def at(self, i: int, kind: type) -> Any:
        x = self.items[i] if type(i) is int and i >= 0 else None
        if not isinstance(x, kind):
            raise ValueError(f"entry {i!r} of the table is not what was expected")
        return x

    def make(self, op: str, attr: Any, args: list[int]) -> Term:
        xs = [self.at(i, Term) for i in args]
        if op not in ("add", "mul", "fold") and _ARITY.get(op) != len(xs) or op in ("add", "mul") and not xs:
            raise ValueError(f"{op!r} with {len(xs)} arguments is no term")
        match op:
            case "num":
                return T.make("num", float.fromhex(_str(attr)))
            case "input":
                return T.inp(_str(attr[0]), self.index(attr[1]))
            case "iota" | "var" | "gather":
                return T.make(op, _str(attr), xs)
            case "un" | "bi":
                if attr not in (T.UNARY if op == "un" else T.BINARY):
                    raise ValueError(f"unknown function {attr!r}")
                return T.make(op, attr, xs)
            case "red":
                if attr[0] not in T.REDUCTIONS:
                    raise ValueError(f"unknown reduction {attr[0]!r}")
                return T.red(attr[0], _str(attr[1]), xs[0])
            case "view":
                return T.view(xs[0], tuple((_str(a), self.affine(i)) for a, i in attr))
            case "fold":
                m = self.at(attr[0], Monoid)
                if not 0 <= _int(attr[1]) < m.size or len(xs) != m.size:
                    raise ValueError("a fold that does not fit its monoid")
                return T.fold(m, attr[1], _str(attr[2]), xs)
        if attr is not None:
            raise ValueError(f"{op!r} has no attribute")
        return T.make(op, None, xs)

    def monoid(self, pivots: list[Any], coef: list[Any]) -> Monoid:
        ps: list[str | tuple] = []
        for p in pivots:
            if p in ("max", "min"):
                ps.append(p)
            elif p[0] == "mean" and 0 <= _int(p[1]) < len(coef):
                ps.append(("mean", p[1]))
            elif p[0] == "fn":
                ps.append(("fn", self.at(p[1], Term)))
            else:
                raise ValueError(f"unknown pivot {p!r}")
        return Monoid(tuple(ps), tuple(tuple((_int(j), self.at(e, Term)) for j, e in row) for row in coef))

    @staticmethod
    def affine(x: list[Any]) -> Affine:
        return Affine(_int(x[0]), tuple((_str(a), _int(c)) for a, c in x[1]))

    def index(self, xs: list[Any]) -> Index:
        return tuple(map(self.affine, xs))

    def root(self, d: dict[str, Any]) -> Program | Plan:
        if d["kind"] == "program":
            return Program(
                _str(d["name"]),
                tuple(Input(_str(n), _shape(s), _dtype(t), r and tuple(map(float.fromhex, r))) for n, s, t, r in d["inputs"]),
                tuple(
                    Output(self.at(t, Term), tuple(tuple(map(_str, x)) for x in dims), _shape(s), _dtype(dt))
                    for t, dims, s, dt in d["outputs"]
                ),
                {_str(a): _int(n) for a, n in d["axes"]},
                bool(d["structured"]),
            )
        if d["kind"] != "plan":
            raise ValueError(f"neither a program nor a plan: {d['kind']!r}")
        buffers = [Buffer(_str(n), _shape(s), _dtype(t), _one(k, KINDS), tuple(map(_str, a))) for n, s, t, k, a in d["buffers"]]
        return Plan(tuple(map(self.kernel, d["kernels"])), {b.name: b for b in buffers}, _one(d["compute_dtype"], ("float32", "float64")))

    def kernel(self, d: dict[str, Any]) -> Kernel:
        c = d["cost"]
        axes = {_str(a): Axis(_int(n), _int(t), _one(r, ROLES)) for a, n, t, r in d["axes"]}
        if any(x.extent < 1 or x.tile < 1 for x in axes.values()):
            raise ValueError("an axis without elements")
        return Kernel(
            _str(d["name"]),
            tuple(Store(_str(b), self.at(t, Term), self.index(ix)) for b, t, ix in d["stores"]),
            axes,
            {_str(a): _int(n) for a, n in d["extents"]},
            {_str(k): _plain(v) for k, v in d["choices"].items()},
            c and Cost(_float(c["seconds"]), {_str(k): _float(v) for k, v in c["parts"].items()}, _str(c["bound"]), _plain(c["detail"])),
        )


def _str(x: Any) -> str:
    if type(x) is not str:
        raise ValueError(f"expected text, not {x!r}")
    return x


def _int(x: Any) -> int:
    if type(x) is not int:
        raise ValueError(f"expected an integer, not {x!r}")
    return x


def _float(x: Any) -> float:
    if type(x) not in (int, float) or math.isnan(x):
        raise ValueError(f"expected a number, not {x!r}")
    return float(x)


def _shape(x: Any) -> tuple[int, ...]:
    if any(_int(n) < 0 for n in x):
        raise ValueError(f"not a shape: {x!r}")
    return tuple(x)


def _dtype(x: Any) -> str:
    return _one(x, tuple(DTYPES))


def _one(x: Any, known: tuple[str, ...]) -> str:
    if x not in known:
        raise ValueError(f"{x!r} is none of {known}")
    return x


def _plain(x: Any) -> Any:
    """JSON values; lists become tuples again."""
    if isinstance(x, dict):
        return {_str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, list):
        return tuple(map(_plain, x))
    if x is None or isinstance(x, str | int | float):
        return x
    raise ValueError(f"not plain data: {x!r}")
