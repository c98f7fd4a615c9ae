"""Does a product of the source take computed values in float32 or float64?

Matrix units of GPUs take 16-bit operands, so a program with 16-bit inputs or outputs has what it computes rounded for them.  That is
what the source says too where its operands have 16 bits; where it has cast them to float32, or computed them so, it is not: 16 bits
have less precision, and float16 less range.  What 16 bits hold anyway (an input of 16 or 8 bits, or a choice between such values) is
read as it lies, whatever it is cast to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import ml_dtypes
import numpy as np

from ..terms import PREDICATES, Term, postorder

WIDE = ("float32", "float64")
HALVES = ("bfloat16", "float16")
SHORT = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool")  # both 16-bit floats hold these
_SELECTS = frozenset({"abs", "neg"})


def reads_wide(
    roots: Collection[Term],
    sums: Collection[Term],
    dtypes: Mapping[str, str],
    others: Collection[str],
    free: Callable[[Term], frozenset[str]],
) -> bool:
    """Is one of the sums, as far as the roots need them, a product of matrices with an operand that 16 bits do not hold?

    sums: of values that the source has in float32 or float64; dtypes: of the inputs, by name; others: of the outputs; free: the axes
    of a term.  False where nothing has 16 bits: there nothing is rounded.
    """
    halves = {d for d in (*dtypes.values(), *others) if d in HALVES}
    needed = list(postorder(roots)) if halves and sums else []
    wanted = [t for t in needed if t in sums]
    if not wanted:
        return False
    # with two 16-bit types, what is computed may be rounded to the one that does not hold it
    held = _held(needed, dtypes, halves.pop() if len(halves) == 1 else None)
    for t in wanted:
        for product in _summed(t):
            factors, plain = _factors(product)
            if _of_matrices([free(f) for f in factors]) and not (plain and len(factors) == 2 and all(f in held for f in factors)):
                return True
    return False


def _summed(total: Term) -> Iterator[Term]:
    """The products that a sum adds up, seen through what only chooses between them or adds them."""
    todo, seen = [total], set()
    while todo:
        t = todo.pop()
        if t in seen:
            continue
        seen.add(t)
        if t.op == "mul":
            yield t
        elif t.op in ("add", "view") or (t.op == "red" and t.attr[0] == "+"):  # type: ignore[index]
            todo.extend(t.args)
        elif t.op == "where":
            todo.extend(t.args[1:])


def _factors(product: Term) -> tuple[list[Term], bool]:
    """What is multiplied, without numbers; and are these signs alone?"""
    out: list[Term] = []
    plain = True
    todo = [product]
    while todo:
        t = todo.pop()
        if t.op == "mul":
            todo.extend(t.args)
        elif t.op == "num":
            plain = plain and abs(t.attr) == 1  # type: ignore[arg-type]
        else:
            out.append(t)
    return out, plain


def _of_matrices(axes: list[frozenset[str]]) -> bool:
    """Has one factor an axis that another one lacks, and the other way round?"""
    return any(a - b and b - a for i, a in enumerate(axes) for b in axes[:i])


def _held(terms: list[Term], dtypes: Mapping[str, str], half: str | None) -> set[Term]:
    """Terms whose values the 16-bit type holds, as long as the inputs are what their dtypes say (None: two types are in use, and only
    what is read as it lies is sure to stay so)."""
    out: set[Term] = set()
    for t in terms:
        below = [a in out for a in t.args]
        match t.op:
            case "input":
                own = dtypes[t.attr[0]]  # type: ignore[index]
                good = own in (HALVES if half is None else (half, *SHORT))
            case "view":
                good = below[0]
            case _ if half is None:
                good = False
            case "num":
                good = _fits(t.attr, half)  # type: ignore[arg-type]
            case "gather":
                good = below[0]
            case "where":
                good = all(below[1:])
            case "red":
                good = t.attr[0] in ("max", "min") and below[0]  # type: ignore[index]
            case "un" | "bi":
                good = t.attr in PREDICATES or (t.attr in (*_SELECTS, "max", "min") and all(below))
            case "mul":
                rest = [a for a in t.args if not (a.op == "num" and abs(a.attr) == 1)]  # type: ignore[arg-type]
                good = len(rest) <= 1 and all(a in out for a in rest)
            case _:
                good = False
        if good:
            out.add(t)
    return out


def _fits(x: float, half: str) -> bool:
    if math.isnan(x) or math.isinf(x):
        return True
    with np.errstate(over="ignore"):
        return float(np.float64(x).astype(np.float16 if half == "float16" else ml_dtypes.bfloat16)) == x
