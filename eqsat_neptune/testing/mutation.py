"""Corrupted rules and merges: what the checks are worth is how many of these they catch.

A mutant changes one thing: a side condition is dropped or weakened, an operator, a function, an axis, a variable or a sign is
changed, an operand is left out, two are swapped.  A mutant that says something true is no mutant: what survives sampling and is
proved to hold is counted apart (`equivalent`), and never a dropped condition, for proofs speak of real values only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..errors import RuleError
from ..rules.repair import Derived
from ..rules.rule import Rule, Sexpr, is_number, is_star, parse, unparse
from ..terms import UNARY, Term, mul, num, substitute, var, variables
from .check import sample
from .symbolic import algebra, expression, prove_merge, prove_rule

# what each operator becomes
_HEADS = {
    "add": "mul",
    "mul": "add",
    "sum": "max",
    "max": "min",
    "min": "max",
    "prod": "sum",
    "exp": "exp2",
    "log": "log2",
    "recip": "neg",
    "abs": "neg",
    '"and"': '"or"',
    '"max"': '"min"',
    "*": "+",
    "+": "-",
    "/": "*",
}
_COMMUTE = ("add", "mul", "bi")  # "and", "max": swapping the operands changes nothing


@dataclass(frozen=True)
class Mutant:
    """A corrupted rule.  kind: "condition", "operator", "axis", "variable", "sign", "operand" or "swap"."""

    rule: Rule
    kind: str
    of: str  # the rule's name


def mutants(rule: Rule) -> list[Mutant]:
    """Every corruption of a rule that is still a well-formed rule."""
    if rule.phase == "driver":
        return []
    out = [Mutant(w, "condition", rule.name) for w in rule.weakened()]
    patterns, results = parse(rule.pattern), parse(rule.result)
    names = _variables(patterns, rule.conditions)
    for i, result in enumerate(results):
        seen = {unparse(result)}
        for kind, new in _corrupted(result, names):
            text = unparse(new)
            if text not in seen:
                seen.add(text)
                out += _made(rule, kind, f"= {text}", result=_with(results, i, new))
    for i, pattern in enumerate(patterns):
        for new in _operators(pattern):
            out += _made(rule, "operator", f"{unparse(new)} = …", pattern=_with(patterns, i, new), examples=())
    return out


def _with(ps: list[Sexpr], i: int, new: Sexpr) -> str:
    """The i-th of several expressions replaced."""
    return " ".join(map(unparse, [*ps[:i], new, *ps[i + 1 :]]))


def _made(rule: Rule, kind: str, what: str, **changes: Any) -> list[Mutant]:
    try:
        return [Mutant(replace(rule, name=f"{rule.name} with {what}".replace('"', "'"), **changes), kind, rule.name)]
    except RuleError:
        return []


def _corrupted(result: Sexpr, names: dict[str, list[str]]) -> Iterator[tuple[str, Sexpr]]:
    yield "sign", ["mul", "-1.0", result]
    for new in _operators(result):
        yield "operator", new
    for path, x in _walk(result):
        if isinstance(x, str):
            yield from ((k, _put(result, path, y)) for k, y in _other_names(x, names, path, result))
            continue
        head, *args = x
        if head == "where":
            yield "swap", _put(result, path, ["where", args[0], args[2], args[1]])
        if head in ("-", "/"):
            yield "swap", _put(result, path, [head, args[1], args[0]])
        if head in ("add", "mul") and len(args) > 1:
            for i in range(len(args)):
                yield "operand", _put(result, path, [head, *args[:i], *args[i + 1 :]])
        if head in ("sum", "max", "min", "prod") or (head in UNARY and len(args) == 1):  # left out altogether
            yield "operator", _put(result, path, args[-1]) if args[-1] != "_" else result


def _operators(p: Sexpr) -> Iterator[Sexpr]:
    for path, x in _walk(p):
        if isinstance(x, list) and x[0] in _HEADS:
            yield _put(p, path, [_HEADS[x[0]], *x[1:]])
        elif isinstance(x, list) and x[0] == "bi" and x[1] in _HEADS:
            yield _put(p, path, ["bi", _HEADS[x[1]], *x[2:]])


def _other_names(x: str, names: dict[str, list[str]], path: tuple[int, ...], whole: Sexpr) -> Iterator[tuple[str, Sexpr]]:
    """What may stand in a name's or number's place."""
    if is_number(x):
        v = float(x)
        yield "sign", repr(-v) if v else "1.0"
        return
    for sort, known in names.items():
        if x in known and len(known) > 1:
            kind = "axis" if sort == "axis" else "variable"
            yield kind, known[(known.index(x) + 1) % len(known)]


def _variables(patterns: list[Sexpr], conditions: list[Sexpr]) -> dict[str, list[str]]:
    """Names in patterns by sort, and the views that conditions name."""
    out: dict[str, dict[str, None]] = {"axis": {}, "number": {}, "star": {}, "term": {}, "view": {}}
    for c in conditions:
        if c[0] == "joined":
            out["view"] |= dict.fromkeys(c[5:])  # type: ignore[arg-type]

    def visit(q: Sexpr) -> None:
        if isinstance(q, str):
            if not is_number(q):
                out["star" if is_star(q) else "term"][q] = None
            return
        head, *args = q
        match head:
            case "num":
                out["number"][args[0]] = None
                return
            case "sum" | "max" | "min" | "prod" | "gather":
                out["axis"][args[0]] = None
                args = args[1:]
            case "red":
                out["axis"][args[1]] = None
                args = args[2:]
            case "as":
                out["term"][args[0]] = None
                args = args[1:]
            case "view" | "un" | "bi":
                args = args[1:]
        for a in args:
            visit(a)

    for p in patterns:
        visit(p)
    return {sort: list(names) for sort, names in out.items()}


def _walk(p: Sexpr, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Sexpr]]:
    yield path, p
    if isinstance(p, list):
        for i, a in enumerate(p):
            if i:
                yield from _walk(a, (*path, i))


def _put(p: Sexpr, path: tuple[int, ...], new: Sexpr) -> Sexpr:
    if not path:
        return new
    assert isinstance(p, list)
    return [_put(a, path[1:], new) if i == path[0] else a for i, a in enumerate(p)]


# ------------------------------------------------------------------ are they caught?

OUTCOMES = ("caught", "equivalent", "inert", "survived")


def outcome(mutant: Mutant, seed: int = 0) -> str:
    """What the checks say of a mutant: "caught" (a disagreement, or the engine cannot run it), "equivalent" (proved to hold),
    "inert" (it never applies: `check_rule` refuses it too) or "survived"."""
    quick = sample(mutant.rule, seed, 12, 4, 1, 3, ("plain", "rows masked"))
    if quick.failure or quick.error:
        return "caught"
    if mutant.kind != "condition" and prove_rule(mutant.rule):
        return "equivalent"
    long = sample(mutant.rule, seed, 32, 60, 3, 9)
    if long.failure or long.error:
        return "caught"
    return "survived" if long.applied else "inert"


@dataclass(frozen=True)
class Score:
    """How many mutants came to which end; survivors by name."""

    counts: dict[str, int]
    survivors: tuple[str, ...]

    @property
    def caught(self) -> float:
        """Of those that apply and say something else than the rule."""
        real = self.counts["caught"] + self.counts["survived"]
        return self.counts["caught"] / real if real else 1.0


def score(all_mutants: Iterable[Mutant], seed: int = 0) -> Score:
    """Check mutants."""
    counts = dict.fromkeys(OUTCOMES, 0)
    survivors = []
    for m in all_mutants:
        end = outcome(m, seed)
        counts[end] += 1
        if end == "survived":
            survivors.append(m.rule.name)
    return Score(counts, tuple(survivors))


# ------------------------------------------------------------------ merges


def merge_mutants(d: Derived) -> Iterator[tuple[str, Derived]]:
    """Corrupted merges: a coefficient negated, doubled, left out, or with old and new pivots swapped."""
    for i, row in enumerate(d.coef):
        for n, (j, e) in enumerate(row):
            others = row[:n] + row[n + 1 :]
            for what, new in (
                ("negated", [(j, mul(-1.0, e))]),
                ("doubled", [(j, mul(2.0, e))]),
                ("left out", []),
                ("with pivots swapped", [(j, _swapped(e))]),
                ("one", [(j, num(1.0))]),
            ):
                changed = (*others, *new)
                if sum(_value(t) for k, t in changed if k == j) - _value(e):  # an even power keeps its value when swapped
                    yield f"coefficient {i}, {j} {what}", Derived(d.basis, (*d.coef[:i], changed, *d.coef[i + 1 :]))


def _swapped(e: Term) -> Term:
    names = {v: ("R" if v[0] == "r" else "r") + v[1:] for v in variables(e)}
    return substitute(e, {var(v): var(w) for v, w in names.items()})


def _value(e: Term) -> Any:
    """A coefficient as an expression, in a form that shows whether two are equal."""
    return algebra().expand(expression(e, {v: algebra().Symbol(v, positive=True) for v in variables(e)}))


def uncaught_merges(d: Derived) -> list[str]:
    """Corruptions of a merge that are proved all the same."""
    return [what for what, m in merge_mutants(d) if prove_merge(m)]
