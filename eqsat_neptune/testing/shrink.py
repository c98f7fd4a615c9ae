"""The smallest counterexample: fewer instances, smaller extents, simpler terms, simpler values, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..program import Input, Program
from ..reference import Env
from ..terms import Term, make, num, postorder, rewrite, substitute
from .conditioning import Approx, disagree, step
from .instances import POOL, program

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """An instance with values at which something disagrees.  text: what does; extents: of all axes, those that rules made too."""

    program: Program
    arrays: Arrays
    block: int
    text: str = ""
    left: Term | None = None
    right: Term | None = None
    culprit: int = -1  # index of an output in which it does
    extents: Mapping[str, int] = field(default_factory=dict)


Fails = Callable[[Case], Case | None]  # the case with what disagrees in it, or None


class Counterexample(str):
    """A counterexample as text, with its parts: two terms that should be equal, extents, and the input arrays."""

    left: Term | None
    right: Term | None
    extents: dict[str, int]
    arrays: dict[str, np.ndarray]

    @classmethod
    def of(cls, case: Case, heading: str) -> Counterexample:
        used = _axes(case)
        extents = {a: n for a, n in (case.extents or case.program.axes).items() if a in used}
        arrays = {n: x for n, x in case.arrays.items() if n in _inputs(case)}
        lines = [heading, f"  {case.text}"]
        if case.left is not None and case.right is not None:
            lines[1:] = [f"  {case.left}  =  {left}\n  {case.right}  =  {right}" for left, right in [_values(case)]]
            lines[1] += f"\n  ({case.text})" if case.text else ""
        at = [f"{a} = {n}" for a, n in extents.items()] + [f"{n} = {_show(x)}" for n, x in arrays.items()]
        self = cls("\n".join([*lines, *(["  where " + ", ".join(at)] if at else [])]))
        self.left, self.right, self.extents, self.arrays = case.left, case.right, extents, arrays
        return self


def _terms(case: Case) -> list[Term]:
    return [t for t in (case.left, case.right) if t is not None] or [o.term for o in case.program.outputs]


def _axes(case: Case) -> set[str]:
    found: set[str] = set()
    for t in postorder(_terms(case)):
        found |= {a.partition(".")[0] for a in t.free} | ({t.attr[-1].partition(".")[0]} if t.op in ("red", "fold") else set())
    return found


def _inputs(case: Case) -> set[str]:
    return {t.attr[0] for t in postorder(_terms(case)) if t.op == "input"}


def _values(case: Case) -> tuple[str, str]:
    """The values of both sides, or of one element that differs."""
    assert case.left is not None and case.right is not None
    env = Env(dict(case.extents or case.program.axes), case.arrays, dict.fromkeys(POOL, case.block))
    memo: dict[Term, Approx] = {}
    for t in postorder([case.left, case.right]):
        memo[t] = step(t.op, t.attr, [memo[a] for a in t.args], env)
    a, b = memo[case.left], memo[case.right]
    axes, (x, y) = env.align([a.value, b.value])
    x, y = np.broadcast_arrays(x, y)
    if x.size <= 4:
        return _show(x + 0.0), _show(y + 0.0)
    bad = np.broadcast_to(disagree(a, b, env), x.shape)
    i = tuple(int(v) for v in np.argwhere(bad)[0]) if bad.any() else (0,) * x.ndim
    at = ", ".join(f"{n}={v}" for n, v in zip(axes, i))
    return f"{x[i] + 0.0:.6g} at {at}", f"{y[i] + 0.0:.6g}"


def _show(x: np.ndarray) -> str:
    return np.array2string(np.asarray(x), separator=", ", threshold=24, precision=6).replace("\n", " ")


# ------------------------------------------------------------------ shrinking


def shrink(case: Case, fails: Fails) -> Case:
    """A smaller case that fails too: no single step makes it smaller.  `fails` may give up (return None) when it has been asked
    often enough; nothing here depends on time."""
    case = _fewer(case, fails)
    changed = True
    while changed:
        changed = False
        for smaller in (_narrower, _simpler, _plainer):
            while (found := _first(fails, smaller(case))) is not None:
                case, changed = found, True
    return _named(case)


def _first(fails: Fails, cases: Iterator[Case]) -> Case | None:
    return next((found for c in cases if (found := fails(c)) is not None), None)


def _named(case: Case) -> Case:
    """Inputs named x0, x1, … in order of occurrence (those of masks m0, …)."""
    names: dict[str, str] = {}
    for t in postorder(_terms(case)):
        if t.op == "input":
            kind = t.attr[0][0]
            names.setdefault(t.attr[0], f"{kind}{sum(n[0] == kind for n in names.values())}")

    def named(t: Term, args: tuple[Term, ...]) -> Term | None:
        return make("input", (names[t.attr[0]], t.attr[1])) if t.op == "input" and t.attr[0] in names else None

    left, right = (rewrite([t], named)[0] if t is not None else None for t in (case.left, case.right))
    inputs = tuple(replace(i, name=names[i.name]) for i in case.program.inputs if i.name in names)
    arrays = {names[n]: x for n, x in case.arrays.items() if n in names}
    outputs = [rewrite([o.term], named)[0] for o in case.program.outputs]
    return replace(
        case, program=program(case.program.name, outputs, inputs, case.program.axes), arrays=arrays, left=left, right=right
    )


def _with(case: Case, terms: list[Term]) -> Case:
    """The case with other terms, and only the inputs that they read."""
    used = {t.attr[0] for t in postorder(terms) if t.op == "input"}
    inputs = [i for i in case.program.inputs if i.name in used]
    return replace(
        case,
        program=program(case.program.name, terms, inputs, case.program.axes),
        arrays={n: x for n, x in case.arrays.items() if n in used},
    )


def _fewer(case: Case, fails: Fails) -> Case:
    """As few of the instances as still fail, by halves and then one by one."""
    terms = [o.term for o in case.program.outputs]
    if 0 <= case.culprit < len(terms):  # most often one instance is enough, or one with the reductions that conditions ask for
        culprit = terms[case.culprit]
        reductions = [t for t in terms if t.op == "red" and t.args[0].op == "input" and t is not culprit]
        for rest in ([culprit], [*reductions, culprit]):
            found = fails(_with(case, rest))
            if found is not None:
                case, terms = found, rest
                break
    size = len(terms) // 2
    while size:
        i = 0
        while i < len(terms) and len(terms) > 1:
            rest = terms[:i] + terms[i + size :]
            found = fails(_with(case, rest)) if rest else None
            if found is not None:
                case, terms = found, rest
            else:
                i += size
        size //= 2
    return case


def _narrower(case: Case) -> Iterator[Case]:
    """An axis (with the one that views read it by) of smaller extent, at any place of the old one."""
    axes = case.program.axes
    for a in [a for a in axes if not a.startswith("n")]:
        for n in (1, 2, 3):
            for start in range(axes[a] - n + 1 if n < axes[a] else 0):
                yield _resized(case, {b: n if b in (a, "n" + a) else v for b, v in axes.items()}, start)


def _resized(case: Case, sizes: dict[str, int], start: int) -> Case:
    terms = [o.term for o in case.program.outputs]
    dims = {t.attr[0]: [ix.axes[0] for ix in t.attr[1]] for t in postorder(terms) if t.op == "input"}
    arrays, inputs = dict(case.arrays), []
    for i in case.program.inputs:
        along = dims.get(i.name, [])
        cut = tuple(slice(start, start + sizes[a]) if sizes[a] < case.program.axes[a] else slice(None) for a in along)
        arrays[i.name] = case.arrays[i.name][cut]
        inputs.append(replace(i, shape=tuple(sizes[a] for a in along)))
    return replace(case, program=program(case.program.name, terms, inputs, sizes), arrays=arrays)


def _simpler(case: Case) -> Iterator[Case]:
    """A subterm in the place of a term, or 0 or 1."""
    terms = [o.term for o in case.program.outputs]
    for t in sorted(set(postorder(terms)), key=lambda t: (-_size(t), str(t))):
        if t.op == "num":
            continue
        choices = [*t.args, num(1.0), num(0.0)]
        if t.op in ("add", "mul") and len(t.args) > 2:
            choices += [make(t.op, None, [a for j, a in enumerate(t.args) if j != i]) for i in range(len(t.args))]
        if t.op == "input" and t.attr[1]:  # along fewer axes
            choices = [make("input", (t.attr[0], t.attr[1][:i] + t.attr[1][i + 1 :])) for i in range(len(t.attr[1]))] + choices
        for new in choices:
            if new is not t:
                yield _replaced(case, terms, t, new)


def _size(t: Term) -> int:
    return sum(1 for _ in postorder([t]))


def _replaced(case: Case, terms: list[Term], old: Term, new: Term) -> Case:
    smaller = list(dict.fromkeys(substitute(t, {old: new}) for t in terms))
    if old.op == "input" and new.op == "input":  # the array loses a dimension: its first element is kept
        name = old.attr[0]
        lost = next(i for i in range(len(old.attr[1])) if i >= len(new.attr[1]) or old.attr[1][i] != new.attr[1][i])
        arrays = {n: np.take(x, 0, axis=lost) if n == name and x.shape[lost] else x for n, x in case.arrays.items()}
        inputs: list[Input] = [
            replace(i, shape=i.shape[:lost] + i.shape[lost + 1 :]) if i.name == name else i for i in case.program.inputs
        ]
        case = replace(case, program=replace(case.program, inputs=tuple(inputs)), arrays=arrays)
    return _with(case, smaller)


def _plainer(case: Case) -> Iterator[Case]:
    """Simpler numbers, within the declared ranges."""
    for i in case.program.inputs:
        x = case.arrays[i.name]
        lo, hi = i.range or (-np.inf, np.inf)
        simple = [np.full(x.shape, v) for v in (1.0, 0.0)] + [np.array(np.round(x)), np.array(np.round(x, 1))]
        if x.size <= 6:
            for at in np.ndindex(x.shape):
                for v in (0.0, 1.0, -1.0, 2.0):
                    y = np.array(x)
                    y[at] = v
                    simple.append(y)
        for y in simple:
            y = np.asarray(np.clip(y, lo, hi))
            if _weight(y) < _weight(x):
                yield replace(case, arrays={**case.arrays, i.name: y})


def _weight(x: np.ndarray) -> float:
    """How complicated an array is: what each number costs to write down, 0 before 1 before others, and −0 last."""
    return float(
        sum(len(f"{abs(v):g}") + (v != 0) + (v not in (0.0, 1.0)) + (9 if v == 0 else 1) * np.signbit(v) for v in np.ravel(x))
    )
