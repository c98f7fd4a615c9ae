"""`trace`: a function of positional arrays becomes a `Program` over named axes."""
from __future__ import annotations

import inspect
import os
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import EqsatError, InputError, ShapeError, TraceError
from .frontend import dtypes
from .frontend.tensor import Tensor
from .frontend.tracing import _CURRENT, Map, Trace, affine_term
from .frontend.views import sink_slices
from .frontend.wide import reads_wide
from .program import Input, Output, Program, TensorSpec
from .terms import Affine, Term, axis_index, bi, gather, inp, num, postorder, red, rewrite, view

_HERE = os.path.dirname(os.path.abspath(__file__))
_OURS = tuple(os.path.join(_HERE, m) for m in ("frontend" + os.sep, "program.py", "terms.py", "trace.py", "xp.py"))
_NUMPY = os.path.dirname(os.path.abspath(np.__file__)) + os.sep


def trace(fn: Callable[..., Any], *specs: TensorSpec, **named_specs: TensorSpec) -> Program | DynamicProgram:
    """Trace a function of tensors, given the `TensorSpec` of each parameter.

    `fn` is ordinary array-API code that returns a tensor or a tuple of them; it is called once with tensors that have shapes and
    dtypes but no values.  With named extents in a spec the result is a `DynamicProgram`, to be bound to numbers later.
    Errors say where in `fn` they arose; exceptions that `fn` itself raises pass unchanged.
    """
    if not callable(fn):
        raise TraceError(f"trace needs a function, not {type(fn).__name__}")
    names, flat, call = _bind(fn, specs, named_specs)
    program = DynamicProgram(_name(fn), names, flat, call)
    if program.extent_names:
        program.probe()
        return program
    return program.bind({})


class DynamicProgram:
    """A function whose specs name some extents: traced for each set of numbers that it meets, and kept."""

    def __init__(self, name: str, names: Sequence[str], specs: Sequence[TensorSpec], call: Callable[[Sequence[Tensor]], Any]):
        self.name, self.names, self.specs, self._call = name, tuple(names), tuple(specs), call
        self.extent_names = tuple(dict.fromkeys(n for s in specs for n in s.shape if isinstance(n, str)))
        self._bound: dict[tuple[int, ...], Program] = {}
        self._lock = threading.Lock()

    def bind(self, extents: Mapping[str, int] | None = None, /, **more: int) -> Program:
        """The program with numbers for its named extents, as in bind({"n": 128}) or bind(n=128)."""
        values = {**(extents or {}), **more}
        for n, v in values.items():
            if n not in self.extent_names:
                raise ShapeError(f"{self.name} has no extent {n!r}", f"it has {', '.join(self.extent_names) or 'none'}")
            if isinstance(v, bool) or not hasattr(v, "__index__") or v < 0:
                raise ShapeError(f"extent {n!r} must be an int ≥ 0, not {v!r}")
        if missing := [n for n in self.extent_names if n not in values]:
            raise ShapeError(f"no number was given for extent {', '.join(map(repr, missing))} of {self.name}")
        key = tuple(values[n].__index__() for n in self.extent_names)
        with self._lock:
            if key not in self._bound:
                known = dict(zip(self.extent_names, key))
                self._bound[key] = _trace(self.name, self._call, [
                    Input(name, tuple(known[n] if isinstance(n, str) else n for n in s.shape), s.dtype, s.range)
                    for name, s in zip(self.names, self.specs)])
            return self._bound[key]

    def extents(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """The numbers that these shapes, one for each input, give the named extents."""
        if len(shapes) != len(self.specs):
            raise InputError(f"{self.name} takes {len(self.specs)} arrays, {len(shapes)} were given",
                             f"its inputs: {', '.join(self.names)}")
        out: dict[str, tuple[int, str]] = {}
        for name, spec, shape in zip(self.names, self.specs, shapes):
            said = f"input {name!r} has shape {tuple(shape)}, its spec says ({', '.join(map(str, spec.shape))})"
            if len(shape) != len(spec.shape):
                raise InputError(said)
            for want, n in zip(spec.shape, shape):
                if isinstance(want, str):
                    if out.setdefault(want, (n, name))[0] != n:
                        raise InputError(f"{said}, and {want} is {out[want][0]} in input {out[want][1]!r}")
                elif want != n:
                    raise InputError(said)
        return {n: v for n, (v, _) in out.items()}

    def bind_shapes(self, shapes: Sequence[Sequence[int]]) -> Program:
        """The program for arrays of these shapes."""
        return self.bind(self.extents(shapes))

    def probe(self) -> None:
        """Trace once with made-up extents, so that errors show early: different ones for different names, first some with many
        divisors (a reshape may need them), then small, then odd ones.  One that works is enough."""
        failed: Exception | None = None
        for extent in (lambda i: 5040 << i, lambda i: 64 << i, lambda i: 1009 + 2 * i):
            try:
                self.bind({n: extent(i) for i, n in enumerate(self.extent_names)})
                return
            except Exception as e:
                failed = failed or e
            finally:
                self._bound.clear()
        assert failed is not None
        raise failed

    def __copy__(self) -> DynamicProgram:
        return self

    def __deepcopy__(self, memo: object) -> DynamicProgram:
        return self

    def __reduce__(self) -> Any:
        raise TraceError("a program with open extents holds the traced function and cannot be pickled", "pickle program.bind(n=…)")

    def __repr__(self) -> str:
        ins = ", ".join(f"{n}: {s.dtype}[{', '.join(map(str, s.shape))}]" for n, s in zip(self.names, self.specs))
        return f"<DynamicProgram {self.name}({ins})>"


# ------------------------------------------------------------------ the call

def _name(fn: Any) -> str:
    while hasattr(fn, "func"):                              # functools.partial
        fn = fn.func
    name = getattr(fn, "__name__", type(fn).__name__)
    return name if name.isidentifier() else "program"


def _defined(fn: Any) -> str | None:
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else None


def _bind(
    fn: Callable[..., Any], specs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[list[str], list[TensorSpec], Callable[..., Any]]:
    """Names and specs of the inputs in the order of the parameters, and a call of fn with a tensor for each."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        raise TraceError(f"the parameters of {_name(fn)} cannot be found out", "wrap it in a function of your own") from None
    try:
        bound = signature.bind(*specs, **named)
    except TypeError as e:
        raise TraceError(f"the specs do not fit {_name(fn)}{signature}: {e}", "give a TensorSpec for each parameter",
                         _defined(fn)) from None
    names: list[str] = []
    flat: list[TensorSpec] = []

    def slot(name: str, spec: Any) -> int:
        if not isinstance(spec, TensorSpec):
            hint = "TensorSpec(x.shape, x.dtype)" if hasattr(spec, "shape") else "fix other arguments with functools.partial"
            raise TraceError(f"the spec of parameter {name!r} is no TensorSpec but {type(spec).__name__}", hint, _defined(fn))
        while name in names:
            name += "_"
        names.append(name)
        flat.append(spec)
        return len(flat) - 1

    slots: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                slots[name] = tuple(slot(f"{name}{i}", s) for i, s in enumerate(value))
            case inspect.Parameter.VAR_KEYWORD:
                slots[name] = {k: slot(k, s) for k, s in value.items()}
            case _:
                slots[name] = slot(name, value)

    def call(tensors: Sequence[Tensor]) -> Any:
        filled = inspect.BoundArguments(signature, {                            # type: ignore[arg-type]
            n: tensors[s] if isinstance(s, int) else tuple(tensors[i] for i in s) if isinstance(s, tuple)
            else {k: tensors[i] for k, i in s.items()} for n, s in slots.items()})
        return fn(*filled.args, **filled.kwargs)

    return names, flat, call


def _trace(name: str, call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Input]) -> Program:
    context = Trace()
    token = _CURRENT.set(context)
    try:
        tensors = [_input(context, i) for i in inputs]
        own = [d for t in tensors for d in t._dims]
        result = call(tensors)
        structured = isinstance(result, (tuple, list))
        outputs = list(result) if structured else [result]
        _check_outputs(name, outputs, structured, context)
        return _Finish(context, name, inputs, own, outputs, structured).program()
    except EqsatError as e:
        if e.where is None and (place := _user_line(e)):
            e.at(place)
        raise
    finally:
        _CURRENT.reset(token)


def _input(context: Trace, i: Input) -> Tensor:
    dims = [context.axes.fresh(n) for n in i.shape]
    if 0 in i.shape:
        return context.tensor(num(0.0), dims, i.dtype)
    if i.range is not None:
        context.ranges[i.name] = i.range
    elif i.dtype == "bool" or dtypes.is_unsigned(i.dtype):
        context.ranges[i.name] = (0.0, float("inf"))
    return context.tensor(inp(i.name, tuple(axis_index(d[0]) if d else Affine() for d in dims)), dims, i.dtype)


def _check_outputs(name: str, outputs: Sequence[Any], structured: bool, context: Trace) -> None:
    for i, t in enumerate(outputs):
        if not isinstance(t, Tensor):
            what = "nothing" if t is None else f"a {type(t).__name__}"
            hint = "is a return missing?" if t is None else "return tensors; xp.asarray makes one of a number"
            raise TraceError(f"{name} returned {what}{f' as result {i}' if structured else ''}", hint)
        if t.trace is not context:
            raise TraceError(f"{name} returned a tensor of another trace")
    if not outputs:
        raise TraceError(f"{name} returned no tensor")


def _user_line(e: EqsatError) -> str | None:
    """The innermost line outside this package's front end (and NumPy) on the way to where e was raised."""
    where = None
    for frame, line in traceback.walk_tb(e.__traceback__):
        file = frame.f_code.co_filename
        if not os.path.abspath(file).startswith((*_OURS, _NUMPY)):
            where = f"{file}:{line}"
    return where


# ------------------------------------------------------------------ final terms

class _Finish:
    """Rewrites terms over provisional axes into a program over the axes that are left, named in order of the inputs."""

    def __init__(self, trace: Trace, name: str, inputs: Sequence[Input], own: Sequence[tuple[str, ...]],
                 outputs: Sequence[Tensor], structured: bool):
        self.trace, self.ax, self.name, self.inputs, self.own = trace, trace.axes, name, inputs, own
        self.outputs, self.structured = outputs, structured

    def program(self) -> Program:
        roots = [t.term for t in self.outputs]
        dtypes = {i.name: i.dtype for i in self.inputs}
        wide = reads_wide(roots, self.trace.wide, dtypes, [t.dtype for t in self.outputs], self.trace.free)
        self._split_views(roots)
        terms = rewrite(sink_slices(rewrite(roots, self._resolved), self.ax.extent), self._tidied)
        dims = [t.dims for t in self.outputs]
        used = self._axes_of(terms) | {a for ds in dims for d in ds for a in d}
        order = [a for a in dict.fromkeys(self.ax.resolve(a for d in self.own for a in d)) if a in used]
        order += sorted(used - set(order), key=self.ax.age)
        taken = {i.name for i in self.inputs}
        fresh = (n for i in range(len(order) + len(taken)) if (n := f"a{i}") not in taken)
        outs = tuple(Output(t, d, x.shape, x.dtype) for t, d, x in zip(terms, dims, self.outputs))
        program = Program(self.name, tuple(self.inputs), outs, {a: self.ax.extent[a] for a in order}, self.structured, wide)
        return program.renamed(dict(zip(order, fresh)), {})

    def _axes_of(self, terms: Iterable[Term]) -> set[str]:
        used: set[str] = set()
        for t in postorder(terms):
            match t.op:
                case "input":
                    used.update(a for ix in t.attr[1] for a in ix.axes)         # type: ignore[index]
                case "iota" | "gather":
                    used.add(t.attr)                                            # type: ignore[arg-type]
                case "red":
                    used.add(t.attr[1])                                         # type: ignore[index]
                case "view":
                    used.update(b for a, ix in t.attr for b in (a, *ix.axes))   # type: ignore[attr-defined]
        return used

    def _split_views(self, roots: Sequence[Term]) -> None:
        """Where an axis that a view reads was split later on, split the view's own axes likewise if they can be."""
        views = [t for t in postorder(roots) if t.op == "view"]
        before = -1
        while before != len(self.ax.extent):                # splitting one may matter to another
            before = len(self.ax.extent)
            for t in views:
                for a, e in t.attr:                         # type: ignore[attr-defined]
                    self.ax.digits_by_splitting(self.ax.resolved(e), tuple(self.ax.extent[p] for p in self.ax.resolve((a,))))

    def _resolved(self, t: Term, args: tuple[Term, ...]) -> Term | None:
        match t.op:
            case "input":
                return inp(t.attr[0], tuple(map(self.ax.resolved, t.attr[1])))  # type: ignore[index]
            case "iota":
                return affine_term(self.ax.resolved(axis_index(t.attr)))        # type: ignore[arg-type]
            case "red":
                (x,) = args
                for a in reversed(self.ax.resolve(t.attr[1:])):                 # type: ignore[index]
                    x = red(t.attr[0], a, x)                                    # type: ignore[index]
                return x
            case "gather":
                return self._gather(args[0], self.ax.resolve((t.attr,)), args[1])       # type: ignore[arg-type]
            case "view":
                return self._view(args[0], t.attr)                              # type: ignore[arg-type]
        return None

    def _tidied(self, t: Term, args: tuple[Term, ...]) -> Term | None:
        """One order of terms for equal indices, the largest stride first, and of a view's entries."""
        def tidy(e: Affine) -> Affine:
            return Affine(e.const, tuple(sorted(e.terms, key=lambda t: (-abs(t[1]), self.ax.age(t[0])))))

        if t.op == "input":
            return inp(t.attr[0], tuple(map(tidy, t.attr[1])))                  # type: ignore[index]
        if t.op == "view":
            entries = ((a, tidy(e)) for a, e in t.attr)                         # type: ignore[attr-defined]
            return view(args[0], tuple(sorted(entries, key=lambda entry: self.ax.age(entry[0]))))
        return None

    def _gather(self, x: Term, parts: Sequence[str], position: Term) -> Term:
        for i, a in reversed(list(enumerate(parts))):
            n = self.ax.extent[a]
            if a in x.free:
                x = self._gather_axis(x, a, position if i == 0 else bi("mod", position, n))
            position = bi("floordiv", position, n)
        return x

    def _gather_axis(self, x: Term, axis: str, position: Term) -> Term:
        """A gather along one axis.  A diagonal has it in several dimensions of an array: each is gathered along its own axis."""
        if x.op != "input":
            return gather(x, axis, position)
        name, index = x.attr                                                    # type: ignore[misc]
        own: list[str] = []
        dims: list[Affine] = []
        for ix in index:
            if axis not in ix.axes:
                dims.append(ix)
                continue
            own.append(axis if not own else self.ax.fresh(self.ax.extent[axis])[0])
            dims.append(ix.substitute({axis: axis_index(own[-1])}))
        x = inp(name, tuple(dims))
        for a in own:
            x = gather(x, a, position)
        return x

    def _view(self, x: Term, attr: Iterable[tuple[str, Affine]]) -> Term:
        m: Map = {}
        for a, e in attr:
            parts, e = self.ax.resolve((a,)), self.ax.resolved(e)
            digits = self.ax.digits(e, [self.ax.extent[p] for p in parts])
            if digits is not None:
                m.update(zip(parts, digits))
                continue
            # no affine index for each part: gather by position, over axes of its own that the view then renames
            own = {b: self.ax.fresh(self.ax.extent[b])[0] for b in e.axes}
            m.update({c: axis_index(b) for b, c in own.items()})
            size = self.ax.size(parts)
            position = affine_term(e.substitute({b: axis_index(c) for b, c in own.items()}))
            # where the position leaves the dimension, a `where` does not choose this value; the index must still be one
            x = self._gather(x, parts, bi("min", bi("max", position, 0.0), size - 1))
        m = {a: e for a, e in m.items() if a in x.free and e != axis_index(a)}
        return view(x, tuple(m.items())) if m else x
