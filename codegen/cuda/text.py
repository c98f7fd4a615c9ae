"""Pieces of C++ text: names, constants, scalar functions, indented lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

from ...terms import Affine
from .arch import Arch

C_TYPES = {
    "float64": "double", "float32": "float", "float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8", "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8",
    "bool": "u8",
}  # fmt: skip
INTEGERS = tuple(d for d in C_TYPES if "int" in d)

_KEYWORDS = set(
    "alignas and asm auto bool break case catch char class const constexpr continue default delete do double else enum explicit "
    "extern false float for friend goto if inline int long mutable namespace new not operator or private protected public register "
    "return short signed sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void "
    "volatile while xor restrict warp lane thread block i j n w x into row column edge next main".split()
)


class Names:
    """Identifiers that clash with nothing."""

    def __init__(self, arch: Arch):
        self.outer = self
        self.taken = _KEYWORDS | _global_names(arch) | set(re.findall(r"[a-z]\w+", " ".join(_PLAIN.values())))

    def inner(self) -> Names:
        """Names for the inside of one function."""
        names = object.__new__(Names)
        names.taken, names.outer = set(self.taken), self
        return names

    def outer_name(self, wish: str) -> str:
        """A name of the whole translation unit."""
        name = self.outer.new(wish)
        self.taken.add(name)
        return name

    def new(self, wish: str) -> str:
        base = re.sub(r"\W+", "_", wish, flags=re.ASCII).strip("_") or "x"
        if base[0].isdigit():
            base = "x" + base
        name, n = base, 1
        while name in self.taken:
            n += 1
            name = f"{base}_{n}"
        self.taken.add(name)
        return name


def _global_names(arch: Arch) -> set[str]:
    """What the device headers define, macros included (a few names too many do no harm)."""
    head = arch.vocabulary
    found = re.findall(r"#define (\w+)|struct (\w+)|\b(\w+);|(\w+)\(|\b([A-Z][A-Z_0-9]{2,})\b|(\w+) = |namespace (\w+)", head)
    return {x for names in found for x in names if len(x) > 1}


class Text:
    def __init__(self) -> None:
        self.out: list[str] = []
        self.depth = 0

    def __call__(self, line: str = "") -> None:
        self.out.append("    " * self.depth + line if line else "")

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Iterator[None]:
        self(f"{head} {{" if head else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self(tail)

    def __str__(self) -> str:
        return "\n".join(self.out) + "\n"


def constant(x: float, compute: str) -> str:
    cast = "" if compute == "float" else f"({compute})"
    if math.isnan(x):
        return cast + "NOT_A_NUMBER"
    if math.isinf(x):
        return cast + ("INFINITE" if x > 0 else "-INFINITE")
    return repr(float(x)) + ("f" if compute == "float" else "")


def affine(ix: Affine, position: dict[str, str], wide: bool = False) -> str:
    """An affine expression as text; `position` names each axis' position (an axis of a single position: "0")."""
    text = ""
    for a, c in ix.terms:
        p = position[a]
        if p == "0":
            continue
        p = f"(i64){p}" if wide else p
        term = p if abs(c) == 1 else f"{abs(c)} * {p}"
        text += f" - {term}" if text and c < 0 else f" + {term}" if text else f"-{term}" if c < 0 else term
    if ix.const or not text:
        text += f" - {-ix.const}" if text and ix.const < 0 else f" + {ix.const}" if text else str(ix.const)
    return text


def at_least_zero(ix: Affine, position: dict[str, str], wide: bool = False) -> str:
    """The condition ix ≥ 0 with positive terms on either side."""
    left = Affine(max(ix.const, 0), tuple((a, c) for a, c in ix.terms if c > 0))
    right = Affine(max(-ix.const, 0), tuple((a, -c) for a, c in ix.terms if c < 0))
    a, b = affine(left, position, wide), affine(right, position, wide)
    return f"{b} <= {a}" if not left.terms else f"{a} >= {b}"


# ------------------------------------------------------------------ scalar functions: {0} {1} … are arguments

_PLAIN = {
    "neg": "-{0}", "abs": "fabs{f}({0})", "sqrt": "sqrt{f}({0})", "floor": "floor{f}({0})", "ceil": "ceil{f}({0})",
    "round": "rint{f}({0})", "trunc": "trunc{f}({0})", "sign": "sign_of({0})", "log": "log{f}({0})", "log2": "log2{f}({0})",
    "log10": "log10{f}({0})", "log1p": "log1p{f}({0})", "expm1": "expm1{f}({0})", "sinh": "sinh{f}({0})", "cosh": "cosh{f}({0})",
    "sin": "sin{f}({0})", "cos": "cos{f}({0})", "tan": "tan{f}({0})", "asin": "asin{f}({0})", "acos": "acos{f}({0})",
    "atan": "atan{f}({0})", "asinh": "asinh{f}({0})", "acosh": "acosh{f}({0})", "atanh": "atanh{f}({0})", "erf": "erf{f}({0})",
    "isnan": "({0} != {0})", "isinf": "(fabs{f}({0}) == INFINITE)", "isfinite": "(fabs{f}({0}) < INFINITE)",
    "sub": "({0} - {1})", "div": "({0} / {1})", "max": "Max::of({0}, {1})", "min": "Min::of({0}, {1})",
    "lt": "({0} < {1})", "le": "({0} <= {1})", "eq": "({0} == {1})", "ne": "({0} != {1})",
    "pow": "pow{f}({0}, {1})", "floordiv": "floor{f}({0} / {1})", "mod": "modulo({0}, {1})", "atan2": "atan2{f}({0}, {1})",
    "hypot": "hypot{f}({0}, {1})", "copysign": "copysign{f}({0}, {1})",
    "recip": "({one} / {0})", "exp": "exp{f}({0})", "exp2": "exp2{f}({0})", "tanh": "tanh{f}({0})", "rsqrt": "({one} / sqrt{f}({0}))",
}  # fmt: skip
_FAST = {
    "recip": "rcp_fast({0})",
    "exp": "exp2_fast({0} * LOG2_E)",
    "exp2": "exp2_fast({0})",
    "tanh": "tanh_fast({0})",
    "rsqrt": "rsqrt_fast({0})",
}
_LOGIC = {"and": "&&", "or": "||", "xor": "!="}


def apply(fn: str, args: list[str], predicates: list[bool], compute: str, fast: bool) -> str:
    """The text of fn(args).  predicates: which arguments are bool (others are numbers)."""

    def truth(n: int) -> str:
        return args[n] if predicates[n] else f"({args[n]} != 0)"

    def number(n: int) -> str:
        return f"({compute}){args[n]}" if predicates[n] else args[n]

    if fn in _LOGIC:
        return f"({truth(0)} {_LOGIC[fn]} {truth(1)})"
    if fn == "not":
        return f"!{truth(0)}"
    if fn == "where":
        return f"({truth(0)} ? {number(1)} : {number(2)})"
    if fn in ("add", "mul"):
        if len(args) == 1:
            return number(0)
        return "(" + (" + " if fn == "add" else " * ").join(number(n) for n in range(len(args))) + ")"
    if fn in ("max", "min") and len(args) == 1:
        return number(0)
    form = _FAST.get(fn) if fast and compute == "float" else None
    form = form or _PLAIN[fn]
    f, one = ("f", "1.0f") if compute == "float" else ("", "1.0")
    return form.format(*(number(n) for n in range(len(args))), f=f, one=one)

