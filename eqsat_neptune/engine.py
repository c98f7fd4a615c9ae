"""A running e-graph: egglog program text in, plain Python rows out.  Nothing else touches egglog, which is imported on first use.

Terms are loaded under canonical names of axes and inputs (in order of occurrence), so that programs that differ in names
alone are the same text.
"""

from __future__ import annotations

import heapq
import importlib
import importlib.machinery
import importlib.util
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from .errors import EqsatError
from .graph import Graph, Node
from .terms import Term, base, normalise, postorder


@dataclass(frozen=True)
class Phase:
    """Statistics of a phase.  stop: "fixpoint", "nodes", "time" or "iterations"."""

    name: str
    iterations: int
    nodes: int
    seconds: float
    stop: str


@dataclass(frozen=True)
class Limits:
    """When saturation stops short.  What has been found by then is sound and usable.

    nodes: e-nodes; None is a number that grows with the program, well above what programs need whose saturation ends."""

    nodes: int | None = None
    seconds: float = 10.0
    iterations: int = 30


FACTS = 200  # rounds of analyses in one go, besides one for each node of the program (facts climb a term step by step): bounds that
# depend on themselves may get tighter for ever, by less each time


class _Watch:
    """Says which limit a phase that begins now has met."""

    def __init__(self, eg: EGraph, limits: Limits):
        self.eg = eg
        self.most = limits.nodes or 500 + 20 * eg.loaded
        self.end = time.perf_counter() + limits.seconds

    def met(self) -> str:
        """"nodes", "time" or "" for none."""
        if self.eg.nodes() > self.most:
            return "nodes"
        return "time" if time.perf_counter() > self.end else ""


# ------------------------------------------------------------------ the engine's declarations

CONSTRUCTORS = {  # name → argument sorts; f: attribute, T: class
    "Num": "f64",
    "Input": "String",
    "Iota": "String",
    "Add": "MS",
    "Mul": "MS",
    "Un": "String T",
    "Bi": "String T T",
    "Where": "T T T",
    "Red": "String String T",
    "Fold": "String i64 String TV",
    "View": "String T",
    "Gather": "String T T",
}
_LEAVES = ("Num", "Input", "Iota")

PRELUDE = "\n".join(
    [
        "(sort AS (Set String)) (sort MAS (MultiSet AS)) (sort MF (MultiSet f64))",
        "(sort T) (sort MS (MultiSet T)) (sort TV (Vec T)) (sort MMS (MultiSet MS))",
        *(f"(constructor {c} ({s}) T)" for c, s in CONSTRUCTORS.items()),
        # what wrote a node: the source, also where a rule came first with what turns out to be the same node, or else the first rule
        *(f"(relation source-{c} ({s})) (function why-{c} ({s}) String :merge old)" for c, s in CONSTRUCTORS.items() if c not in _LEAVES),
        # nodes that a mapped result makes, with the rule's name; normalisation turns them into ordinary ones
        "(constructor LaterMul (String MS T) T) (constructor LaterAdd (String MS T) T)",
        "(constructor LaterUn (String String T) T) (constructor LaterRed (String String String T) T) (constructor "
        "LaterView (String String T) T)",
        "(function idxA (MS T) i64 :merge (max old new)) (function idxM (MS T) i64 :merge (max old new))",
        "(function handle (i64) T :merge old)",
        # axes: free sets and parts hold the leaves of the tree of parts
        "(function free (T) AS :merge (set-intersect old new)) (function parts (String) AS :no-merge)",
        "(function beside (String) AS :no-merge)",
        "(relation need-volume (AS)) (relation volume-of (AS String AS)) (function volume (AS) f64 :no-merge) "
        "(function length (String) f64 :no-merge)",
        "(function extent (String) f64 :no-merge) (relation leaf-of (String String)) (relation nth (i64))",
        "(relation redaxis (String)) (relation dep (String T)) (relation splittable (String String String)) (relation "
        "inside (String))",
        "(relation shifted (String String String)) (relation reads (String AS AS))",
        "(relation joined (T T String f64 String String String String))",
        # facts
        "(function has (String T) Unit :no-merge)",
        "(function indep (String T) Unit :no-merge) (function cofactor (String T) Unit :no-merge) (function addend "
        "(String T) Unit :no-merge)",
        "(function partable (String T) Unit :no-merge) (function factored (String T) Unit :no-merge)",
        "(function steps (String T) i64 :merge (min old new))",
        "(function regular (T T) Unit :no-merge) (function vanish (T T) Unit :no-merge) (function tame (T T) Unit :no-merge)",
        "(function below (T T) Unit :no-merge) (relation unless-finite (T T)) (relation attained (T T T i64))",
        "(relation product-of (T T T)) (relation sum-of (T T T)) (relation multiple-of (T f64 T)) (relation along (String T))",
        "(relation sumsq (String T T f64)) (relation inverse-norm (String T T f64))",
        "(function lz (T) f64 :merge (max old new)) (function hz (T) f64 :merge (min old new))",
        "(function lo (T) f64 :merge (max old new)) (function hi (T) f64 :merge (min old new))",
        "(function lz-if (T T) f64 :merge (max old new))",
        "(function normsq (String T) f64 :merge (min old new))",
        # tables that make one analysis rule serve many functions
        "(relation un-gives (String String)) (relation un-keeps (String String String))",
        "(relation un-lower (String f64)) (relation un-upper (String f64))",
        "(relation nary-keeps (String)) (relation red-keeps (String String))",
        "(sort Fidx (UnstableFn (MS T) i64)) (sort Ffact (UnstableFn (T) Unit)) (sort Ffree (UnstableFn (T) AS))",
        "(sort Fset (UnstableFn (AS AS) AS)) (sort Fmap (UnstableFn (T) T)) (sort Fbound (UnstableFn (T) f64)) (sort "
        "Fnum (UnstableFn (f64 f64) f64))",
    ]
)


def bindings() -> Any:
    """egglog's extension module alone: the package around it takes 0.3 s to import and is not needed.

    Raises EqsatError where egglog is not installed."""
    with _LOADING:  # an extension module may be initialised once only
        return _bindings()


_LOADING = threading.RLock()


@cache
def _bindings() -> Any:
    if "egglog" not in sys.modules:
        package = importlib.util.find_spec("egglog")
        if package is None:
            raise EqsatError("egglog is not installed", "pip install egglog")
        spec = importlib.machinery.PathFinder.find_spec("egglog.bindings", package.submodule_search_locations)
        if spec is not None and isinstance(spec.loader, importlib.machinery.ExtensionFileLoader):
            module = sys.modules["egglog.bindings"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return importlib.import_module("egglog.bindings")


def _declared(text: str) -> str:
    """Rules (a line each) as this egglog wants them: since 14 those that apply a function value to a table must be matched anew each
    time."""
    if not hasattr(bindings(), "Naive"):
        return text
    lines = (x.rstrip() for x in text.splitlines())
    return "\n".join(f"{x[:-1]} :naive)" if x.startswith("(rule ") and "unstable-fn" in x else x for x in lines)


def literal(v: float) -> str:
    """A float as egglog text."""
    return "NaN" if v != v else "inf" if v == math.inf else "-inf" if v == -math.inf else repr(float(v))


class _Pool(threading.local):
    """Idle engines by declarations: declaring rules costs 0.1 s, push and pop 5 ms.  An engine must be used and dropped in the
    thread that made it, so each thread has its own; a daemon thread, whose things the main thread drops at exit, keeps none.  Other
    rules are other declarations, and each engine takes megabytes: those that were used last are kept."""

    KEPT = 8

    def __init__(self) -> None:
        self.idle: list[tuple[object, Any]] = []

    def take(self, key: object) -> Any | None:
        """An engine with these declarations, if one is idle."""
        n = next((n for n, (k, _) in enumerate(self.idle) if k == key), None)
        return None if n is None else self.idle.pop(n)[1]

    def give(self, key: object, engine: Any) -> None:
        self.idle.append((key, engine))
        del self.idle[: -self.KEPT]


_POOL = _Pool()
_process: int | None = None  # the process that has run an engine


def _same_process() -> None:
    """An engine's threads do not survive a fork: the first command in the child would wait for them for ever."""
    global _process
    if _process not in (None, os.getpid()):
        remedy = 'start processes by multiprocessing\'s "spawn" or "forkserver", or optimize in this one\'s parent; kernels run in both'
        raise EqsatError("this process was forked from one that had used the e-graph engine, whose threads it has not", remedy)
    _process = os.getpid()


class EGraph:
    """A running e-graph over given declarations (egglog text).  Use as a context manager: the engine goes back to a pool."""

    def __init__(self, declarations: Callable[[], Iterable[str]], key: object):
        """`declarations()` gives the rules, one text each; it is asked only if no engine with this key is idle."""
        _same_process()
        self._key = key
        self._engine: Any = _POOL.take(key)
        if self._engine is None:
            self._engine = bindings().EGraph()
            self.run(PRELUDE)
            for text in declarations():  # one by one: every parsed command keeps a copy of the whole text
                self.run(_declared(text))
        self.run("(push)")
        self._lines: list[str] = []
        self._names: dict[Term, str] = {}
        self._axes: dict[str, str] = {}
        self._back: dict[str, str] = {}  # canonical axis → the program's
        self._keys: dict[str, dict] = {"Input": {}, "View": {}, "Fold": {}}
        self._rounds = 0
        self.extents: dict[str, int] = {}
        self.loaded = 0  # nodes of the program

    def __enter__(self) -> EGraph:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an error the engine's state is unknown: drop it
            self.run("(pop)")
            if not threading.current_thread().daemon:
                _POOL.give(self._key, self._engine)
        del self._engine

    # ---- text in
    def run(self, text: str) -> list:
        return self._engine.run_program(*self._engine.parse_program(text))

    def axis(self, a: str) -> str:
        """Canonical name of an axis (or a part): the first that occurs is a0, and so on."""
        b = base(a)
        if b not in self._axes:
            name = f"a{len(self._axes)}"
            self._axes[b], self._back[name] = name, b
        return self._axes[b] + a[len(b) :]

    def user_axis(self, a: str) -> str:
        b = base(a)
        return self._back[b] + a[len(b) :]

    def key(self, table: str, value: object) -> str:
        """The string that stands for an attribute that is no string: an input with its index, a view's map, a monoid."""
        keys = self._keys[table]
        if value not in keys:
            keys[value] = f"{table[0].lower()}{len(keys)}"
        return keys[value]

    def name(self, t: Term, why: str = "") -> str:
        """The egglog variable that holds t in the actions to come.  why: "source", or the rule that makes what is new of it ("": all is
        known already, or of no interest)."""
        for x in postorder([t]):
            if x not in self._names:
                self._emit(x, why)
        return self._names[t]

    def _emit(self, t: Term, why: str) -> None:
        a = [self._names[x] for x in t.args]
        ctor, attrs = {"un": "Un", "bi": "Bi"}.get(t.op, t.op.capitalize()), ""
        attr: Any = t.attr
        match t.op:
            case "num":
                attrs = literal(attr)
            case "input":
                for ix in attr[1]:
                    for b in ix.axes:
                        self.axis(b)
                attrs = f'"{self.key("Input", attr)}"'
            case "var":
                ctor, attrs = "Input", f'"{self.key("Input", (None, attr))}"'
            case "iota" | "gather":
                attrs = f'"{self.axis(attr)}"'
            case "un" | "bi":
                attrs = f'"{attr}"'
            case "red":
                attrs = f'"{attr[0]}" "{self.axis(attr[1])}"'
            case "view":
                for b, ix in attr:
                    for x in (b, *ix.axes):
                        self.axis(x)
                attrs = f'"{self.key("View", attr)}"'
            case "fold":
                attrs = f'"{self.key("Fold", attr[0])}" {attr[1]} "{self.axis(attr[2])}"'
        inner = (
            attrs
            + " "
            + (
                f"(multiset-of {' '.join(a)})"
                if t.op in ("add", "mul")
                else f"(vec-of {' '.join(a)})"
                if t.op == "fold"
                else " ".join(a)
            )
        )
        v = f"x{self._rounds}_{len(self._names)}"
        self._lines.append(f"(let {v} ({ctor} {inner}))")
        if ctor not in _LEAVES and why:
            self._lines.append(f"(source-{ctor} {inner})" if why == "source" else f'(set (why-{ctor} {inner}) "{why}")')
        self._names[t] = v

    def act(self, line: str) -> None:
        """Queue an action (egglog text over variables from `name`)."""
        self._lines.append(line)

    def flush(self) -> None:
        """Run the queued actions, as one premise-free rule (a let at top level would make a table).  It is handed over as syntax
        rather than text: each piece of parsed syntax carries the whole text with it, which takes time quadratic in its length."""
        if self._lines:
            b = bindings()
            syntax = _Syntax(b)
            r = f"go{self._rounds}"
            rule = b.Rule(syntax.span, [a for x in self._lines for a in syntax.actions(x)], [], r, r)
            self._engine.run_program(b.AddRuleset(syntax.span, r), b.RuleCommand(rule))
            self.run(f"(run-schedule (run {r}))")
        self._rounds += 1
        self._lines, self._names = [], {}

    def everywhere(self, action: str) -> None:
        """Run an action once for every class t that there is."""
        r = f"go{self._rounds}"
        self._rounds += 1
        rules = " ".join(
            f"(rule ((= t ({c} {' '.join(f'x{i}' for i in range(len(s.split())))}))) ({action}) :ruleset {r})"
            for c, s in CONSTRUCTORS.items()
        )
        self.run(f"(ruleset {r}) {rules} (run-schedule (run {r}))")

    # ---- running
    def nodes(self) -> int:
        """Rows of the term tables, retired ones included."""
        return sum(n for f, n in self.run("(print-size)")[0].sizes if f in CONSTRUCTORS)

    def updated(self, schedule: str) -> bool:
        """Run a schedule; did it change anything?"""
        return self.run(f"(run-schedule {schedule})")[0].report.updated

    def saturate(self, name: str, schedules: Sequence[str], limits: Limits) -> Phase:
        """Run the schedules, each on a settled e-graph, round after round until nothing changes or a limit is met.  Looks at clock
        and size between single runs: egglog has no time limit inside one."""
        start, rounds = time.perf_counter(), 0
        watch = _Watch(self, limits)
        stop, changed = self._settle(watch), bool(schedules)
        while changed and not stop:
            if rounds == limits.iterations:
                stop = "iterations"
                break
            rounds, changed = rounds + 1, False
            for schedule in schedules:
                if self.updated(schedule):
                    changed, stop = True, self._settle(watch)
                if stop:
                    break
        return Phase(name, rounds, self.nodes(), time.perf_counter() - start, stop or "fixpoint")

    def _settle(self, watch: _Watch) -> str:
        """Facts and normalisation to fixpoint, facts first: rules ask for them.  Returns the limit that was met, "" if none was;
        facts are whole in either case."""
        while True:
            for _ in range(FACTS + self.loaded):
                if not self.updated("(seq (run ix) (run an))"):
                    break
            stop = watch.met()
            if stop or not self.updated("(seq (run prune) (run norm))"):
                return stop

    # ---- rows out
    def freeze(self, handles: int = 0, revive: bool = True) -> Graph:
        """A copy of the e-graph as it is.  Classes get numbers by their smallest terms, so numbering does not depend on what the
        engine did before.  `outputs` are the classes of the handles 0 … handles-1.
        A class that has no term of rows not retired gets back its smallest retired one; KeyError without `revive`."""
        e = self._engine
        functions = e.freeze().functions
        text = e.value_to_string

        def rows(name: str, retired: bool = False) -> Iterable[Any]:
            return [r for r in functions[name].rows if r.subsumed == retired] if name in functions else ()

        back = {t: {s: v for v, s in keys.items()} for t, keys in self._keys.items()}
        axis = self.user_axis

        def read(ctor: str, ins: Any) -> _Row:
            """(op, attribute in canonical names, arguments) of a row."""
            match ctor:
                case "Num":
                    return "num", (e.value_to_f64(ins[0]),), ()
                case "Add" | "Mul":
                    return ctor.lower(), (), tuple(e.value_to_multiset(ins[0]))
                case "Where":
                    return "where", (), tuple(ins)
                case "Red":
                    return "red", (text(ins[0]), text(ins[1])), (ins[2],)
                case "Fold":
                    return "fold", (text(ins[0]), e.value_to_i64(ins[1]), text(ins[2])), tuple(e.value_to_vec(ins[3]))
            return ctor.lower(), (text(ins[0]),), tuple(ins[1:])

        def attribute(op: str, a: tuple) -> tuple[str, object]:
            """Operator and attribute of terms.py."""
            match op:
                case "num" | "un" | "bi":
                    return op, a[0]
                case "input":
                    key = back["Input"][a[0]]
                    return ("var", key[1]) if key[0] is None else ("input", key)
                case "iota" | "gather":
                    return op, axis(a[0])
                case "red":
                    return op, (a[0], axis(a[1]))
                case "view":
                    return op, back["View"][a[0]]
                case "fold":
                    return op, (back["Fold"][a[0]], a[1], axis(a[2]))
            return op, None

        def nodes(retired: bool) -> _Rows:
            out: _Rows = {}
            for ctor in CONSTRUCTORS:
                found = [(read(ctor, r.inputs), r.output) for r in rows(ctor, retired)]
                leaf = ctor in _LEAVES
                why = {read(ctor, r.inputs): text(r.output) for r in rows(f"why-{ctor}")} if found and not leaf else {}
                why |= {read(ctor, r.inputs): "source" for r in rows(f"source-{ctor}")} if found and not leaf else {}
                for n, v in found:
                    out.setdefault(v, []).append((n, "source" if leaf else why.get(n, "congruence")))
            return out

        outs = [v for _, v in sorted((e.value_to_i64(r.inputs[0]), r.output) for r in rows("handle"))]
        raw, gone = nodes(retired=False), nodes(retired=True)
        number, ordered = _number(raw)
        used = {a for ns in raw.values() for (_, _, args), _ in ns for a in args}
        if revive and not number.keys() >= used.union(raw, outs):
            # What a class was rewritten to may be made of the class itself: with x = ½·(x+x) known, x + x = ½·(x+x) + ½·(x+x) is
            # 1·(x+x).  Such a class has no term left without what was retired.
            number, ordered = _number(raw, gone)
        g = Graph(outputs=tuple(number[v] for v in outs[:handles]), extents=dict(self.extents))

        def node(row: _Row, rule: str) -> Node:
            op, canonical, args = row
            ids = tuple(number[a] for a in args)
            return Node(*attribute(op, canonical), tuple(sorted(ids)) if op in ("add", "mul") else ids, rule)

        for v, c in number.items():
            found: dict[tuple, Node] = {}
            for row, rule in ordered[v]:
                n = node(row, rule)
                found.setdefault(n.key, n)
            g.nodes[c] = list(found.values())
            lost = [node(row, rule) for row, rule in gone.get(v, ()) if rule == "source" and number.keys() >= set(row[2])]
            if lost := [n for n in lost if n.key not in found]:
                g.retired[c] = lost

        def table(name: str, key: int, value: Callable[[Any], Any]) -> dict[int, Any]:
            return {number[r.inputs[key]]: value(r.output) for r in rows(name) if r.inputs[key] in number}

        g.free = table("free", 0, lambda v: normalise(axis(text(a)) for a in e.value_to_set(v)))
        g.lo, g.hi = table("lo", 0, e.value_to_f64), table("hi", 0, e.value_to_f64)
        facts: dict[str, set[int]] = {f: set() for f in ("finite", "noinf", "masked", "nonzero")}
        for r in rows("has"):
            if r.inputs[1] in number:
                facts.setdefault(text(r.inputs[0]), set()).add(number[r.inputs[1]])
        facts["source"] = {c for c, n in g.items() if n.why == "source"}
        g.facts = {f: frozenset(s) for f, s in facts.items()}
        for r in rows("normsq"):
            if r.inputs[1] in number:
                g.normsq.setdefault(number[r.inputs[1]], {})[axis(text(r.inputs[0]))] = e.value_to_f64(r.output)
        return g


class _Syntax:
    """Actions given as text, as egglog's syntax objects without source positions."""

    def __init__(self, bindings: Any):
        self.b, self.span = bindings, bindings.PanicSpan()

    def actions(self, text: str) -> list[Any]:
        return [self.action(x) for x in sexpressions(text)]

    def action(self, x: list) -> Any:
        match x:
            case ["let", name, e]:
                return self.b.Let(self.span, name, self.expression(e))
            case ["set", [f, *args], e]:
                return self.b.Set(self.span, f, [self.expression(a) for a in args], self.expression(e))
            case ["union", a, b]:
                return self.b.Union(self.span, self.expression(a), self.expression(b))
        return self.b.Expr_(self.span, self.expression(x))

    def expression(self, x: str | list) -> Any:
        if isinstance(x, list):
            return (
                self.b.Call(self.span, x[0], [self.expression(a) for a in x[1:]]) if x else self.b.Lit(self.span, self.b.Unit())
            )
        if x[0] == '"':
            return self.b.Lit(self.span, self.b.String(x[1:-1]))
        if re.fullmatch(r"-?\d+", x):
            return self.b.Lit(self.span, self.b.Int(int(x)))
        if re.fullmatch(r"-?\d.*|-?inf|NaN", x):
            return self.b.Lit(self.span, self.b.Float(float(x)))
        return self.b.Var(self.span, x)


_TOKEN = re.compile(r'\(|\)|"[^"]*"|[^\s()]+')


def sexpressions(text: str) -> list:
    """A sequence of s-expressions as nested lists."""
    stack: list[list] = [[]]
    for token in _TOKEN.findall(text):
        if token == "(":
            stack.append([])
        elif token == ")":
            top = stack.pop()
            stack[-1].append(top)
        else:
            stack[-1].append(token)
    return stack[0]


_Row = tuple[str, tuple, tuple]
_Rows = dict[Any, list[tuple[_Row, str]]]  # class → its rows, each with the rule that made it


def _number(live: _Rows, retired: _Rows | None = None) -> tuple[dict[Any, int], _Rows]:
    """Number classes in order of their smallest terms (tree size, then structure); nodes of a class in that order too.

    A class that has no term of live rows gets back its smallest retired row, one class after the other and smallest terms first, so
    that no more come back than terms need."""
    retired = retired or {}
    raw = {v: [*live.get(v, ()), *retired.get(v, ())] for v in {**live, **retired}}
    spare: list[tuple] = []  # retired rows whose arguments have terms
    users: dict[Any, list[tuple[Any, int]]] = {}
    waiting: dict[tuple[Any, int], int] = {}
    heap: list[tuple] = []
    size: dict[Any, int] = {}
    number: dict[Any, int] = {}
    found: dict[Any, list] = {v: [] for v in raw}
    tick = 0

    def offer(v: Any, i: int) -> None:
        nonlocal tick
        op, attr, args = raw[v][i][0]
        ranks = [number[a] for a in args]
        key = (
            1 + sum(size[a] for a in args),
            op,
            [(len(str(a)), str(a)) for a in attr],
            sorted(ranks) if op in ("add", "mul") else ranks,
        )
        tick += 1
        heapq.heappush(heap if i < len(live.get(v, ())) else spare, (key, tick, v, i))

    for v, ns in raw.items():
        for i, n in enumerate(ns):
            distinct = set(n[0][2])
            waiting[v, i] = len(distinct)
            for a in distinct:
                users.setdefault(a, []).append((v, i))
            if not distinct:
                offer(v, i)
    while heap or spare:
        back = not heap
        key, _, v, i = heapq.heappop(heap or spare)
        if back and v in number:
            continue
        found[v].append(raw[v][i])
        if v in number:
            continue
        number[v], size[v] = len(number), key[0]
        for u in users.get(v, ()):
            waiting[u] -= 1
            if not waiting[u]:
                offer(*u)
    return number, found
