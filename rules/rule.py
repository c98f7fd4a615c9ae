"""Rules as data, and the pattern language they are written in.

A rule says that two terms are equal under conditions.  Patterns are s-expressions over terms.py's operators:

    x, v, k, f                 variables: a term, a number, an axis, a function name (by where they stand)
    2.0, -inf                  a constant
    (num v)                    any constant
    (add p… rest*)             a sum with these summands among others; rest* is the multiset of the others.
    (mul p… rest*)             Without rest*, exactly these.
    (exp p), (recip p), …      a unary function;     (un f p) any
    (bi "max" p q)             a binary function;    (bi f p q) any
    (where c p q)  (sum k p)  (max k p)  (min k p)  (red op k p)  (view m p)  (gather k p i)
    (as x p)                   pattern p, and x names what it matched

A pattern may be several of these, one after the other: it matches classes side by side, and has a result for each.

Conditions, all monotone facts:

    (finite x)  (noinf x)  (masked x)  (nonzero x)      see egraph.Graph; masked: finite or −inf
    (indep k x)                x does not vary along k;  (cofactor k x): and is noinf;  (addend k x): and is finite.  Known of
                               the elements of sums and products that do vary along k; (free-of k x y* …) is known of all
    (regular m x)  (vanish m x)  see analyses.py
    (part ms* (indep k) a* b*) a* = those of ms* that satisfy the fact, b* = the others
    (nonneg x)                 x ≥ 0, or −inf or NaN
    (factored k x)             x is a product with a factor that does not vary along k but needs a reduction over it
    (partable k x)             x is a sum with terms that vary along k and others that do not
    (divide ms* (indep k) a* b*)  the same, but facts that arrive after the node do not count: for long patterns
    (mixed x)                  x is partable along some axis that is reduced
    (some a*)  (all (noinf) a*)  (none (noinf) a*)  (fewer a* 8)        none: only as a guard, it is not monotone
    (lacks a* x)               x is not one of a*
    (is x p)                   x also matches pattern p
    (lz x v)  (hz x v)         v is the strict lower (upper) bound of x
    (> v 0.0)  (!= v w)  …     on numbers
    (redaxis k)                some reduction runs over k;  (splittable k o i): k may be split into o and i
    (dep k x)                  x varies along k
    (joined x y c n p q r s)   x and y may stand side by side along a new axis c, x at the first n places: view q reads x there and r reads
                               y, p and s lead back (joins.py says which)
    (cheaper (v…) (w…))        Σv < Σw, where (vol x y* … - k) is the number of elements of a tensor with the axes of all these
                               but k: multiply-adds of a contraction

Results use the same forms; star variables splice, and (map (mul c* _) as*), (map (recip _) ms*), (map (sum k _) as*) map
over a multiset.  `(num (* v w))` computes; (iota c) is the position along an axis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import RuleError
from ..terms import BINARY, UNARY

Sexpr = str | list

FACTS = ("finite", "noinf", "masked", "nonzero", "nonneg", "mixed", "any")  # any: only in weakened rules, for tests
RELATIVE = (
    "indep",
    "cofactor",
    "addend",
    "partable",
    "factored",
    "regular",
    "vanish",
)  # facts about a term and an axis or another term
RELATIONS = ("redaxis", "splittable", "dep", "joined")
BINDING = ("is", "lz", "hz", "splittable", "joined")  # conditions that give values to variables
COMPARISONS = ("<", ">", "<=", ">=", "!=", "=")
NUMERICS = ("exact", "reassociates", "needs bound", "needs finite")
_RED = {"sum": '"+"', "max": '"max"', "min": '"min"', "prod": '"*"'}
_NUMBER = re.compile(r"-?(\d+(\.\d*)?([eE][-+]?\d+)?|inf)$")


def parse(text: str) -> list:
    """A sequence of s-expressions as nested lists."""
    stack: list[list] = [[]]
    for tok in re.findall(r'\(|\)|"[^"]*"|[^\s()]+', text):
        if tok == "(":
            stack.append([])
        elif tok == ")":
            if len(stack) == 1:
                raise RuleError(f"unbalanced ')' in {text!r}")
            top = stack.pop()
            stack[-1].append(top)
        else:
            stack[-1].append(tok)
    if len(stack) != 1:
        raise RuleError(f"missing ')' in {text!r}")
    return stack[0]


def unparse(x: Sexpr) -> str:
    return x if isinstance(x, str) else "(" + " ".join(map(unparse, x)) + ")"


def is_number(x: Sexpr) -> bool:
    return isinstance(x, str) and bool(_NUMBER.match(x))


def is_star(x: Sexpr) -> bool:
    return isinstance(x, str) and x.endswith("*") and x != "*"


@dataclass(frozen=True)
class Rule:
    """pattern = result, wherever the conditions hold.

    when       conditions without which the law is false (each is dropped in turn by a test, which must notice)
    guard      conditions that only keep the e-graph small
    numerics   "exact" (the same operations), "reassociates" (the same up to rounding), "needs bound" (may overflow: whether
               a kernel may use the result is judged at extraction), "needs finite" (rests on finiteness facts)
    phase      the ruleset that it runs in; "driver": made by code (folds.py), pattern and result are empty
    retire     a normalisation: the matched node is taken out once the result is there
    examples   patterns that the test puts terms into, instead of `pattern`, where that alone would seldom meet the conditions;
               in them s is a masked score that varies along k
    """

    name: str
    family: str
    pattern: str
    result: str
    when: str = ""
    guard: str = ""
    law: str = ""
    numerics: str = "exact"
    phase: str = "algebra"
    retire: bool = False
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.numerics not in NUMERICS:
            raise RuleError(f"rule {self.name}: numerics must be one of {NUMERICS}, not {self.numerics!r}")
        if '"' in self.name:
            raise RuleError(f"rule name {self.name!r} must not have quotes")
        _ = self.egglog  # malformed rules fail where they are declared

    @cached_property
    def conditions(self) -> list[Sexpr]:
        return parse(self.when)

    @cached_property
    def egglog(self) -> str:
        """The egglog rule; nothing for a rule that the driver makes."""
        if self.phase == "driver":
            return ""
        c = _Compiler(self.name)
        pattern, result = parse(self.pattern), parse(self.result)
        if not pattern or len(pattern) != len(result):
            raise RuleError(f"rule {self.name}: pattern and result must have as many expressions, at least one")
        heads = [f"t{i or ''}" for i in range(len(pattern))]
        for p, head in zip(pattern, heads):
            c.match(p, head)
        for cond in parse(self.when) + parse(self.guard):
            c.condition(cond)
        node = c.nodes[0] if c.nodes else None
        text, premises = "", " ".join(c.premises)
        if c.volumes:  # sizes are computed on demand: what matches waits in a relation for them
            wait = "wait-" + re.sub(r"\W+", "-", self.name)
            columns = {h: "T" for h in heads} | {v: k for v, k in c.sorts.items() if v in c.used(result)}
            row = f"({wait} {' '.join(columns)} {' '.join(c.volumes)})"
            text = (
                f"(relation {wait} ({' '.join(columns.values())}{' AS' * len(c.volumes)}))\n"
                f"(rule ({premises}) ({row} {' '.join(f'(need-volume {s})' for s in c.volumes)}) :ruleset {self.phase})\n"
            )
            premises = f"{row} {' '.join(c.late)}"
        for r, head in zip(result, heads):
            c.actions.append(f"(union {head} {c.build(r)})")
        if self.retire:
            if node is None:
                raise RuleError(f"rule {self.name}: nothing to retire")
            c.actions.append(f"(subsume {node})")
        return text + f'(rule ({premises}) ({" ".join(c.actions)}) :ruleset {self.phase} :name "{self.name}")'

    def weakened(self) -> list[Rule]:
        """The rule with one of its conditions dropped or weakened, for each: mutants that the rule's test must catch."""
        out = []
        weaker = {"cofactor": "indep", "addend": "indep", "indep": "any", "regular": "any", "finite": "any"}
        for i, c in enumerate(self.conditions):
            rest: list[Sexpr] = [x for j, x in enumerate(self.conditions) if j != i]
            if c[0] in ("part", "divide"):
                assert isinstance(c[2], list)
                head, *args = c[2]
                f = [weaker[head], *args] if weaker[head] != "any" else ["any"]
                rest.insert(i, [*c[:2], f, *c[3:]])
            elif c[0] in BINDING:
                continue
            out.append(
                replace(self, name=f"{self.name} without {unparse(c)}".replace('"', "'"), when=" ".join(map(unparse, rest)))
            )
        return out


class _Compiler:
    """Writes the premises and actions of one rule."""

    def __init__(self, name: str):
        self.name = name
        self.premises: list[str] = []
        self.actions: list[str] = []
        self.nodes: list[str] = []  # the egglog call of each matched node, outermost first
        self.stars: dict[str, str] = {}  # star variable → egglog multiset expression
        self.kinds: dict[str, str] = {}  # star variable → index function of the multiset that it is part of
        self.volumes: list[str] = []  # sets of axes whose sizes the late premises compare
        self.late: list[str] = []
        self.sorts: dict[str, str] = {}  # egglog variable → sort
        self.count = 0

    def error(self, x: Sexpr) -> RuleError:
        return RuleError(f"rule {self.name}: cannot read {unparse(x)}")

    def fresh(self, prefix: str = "_") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def used(self, r: Sexpr) -> set[str]:
        """egglog variables that a result mentions."""
        if isinstance(r, list):
            return set().union(*map(self.used, r))
        return {self.stars.get(r, r)}

    # ---- patterns
    def match(self, p: Sexpr, name: str) -> None:
        """Premises that class `name` matches p."""
        if is_number(p):
            self.premises.append(f"(= {name} (Num {p}))")
            return
        self.sorts.setdefault(name, "T")
        if isinstance(p, str):
            if p != name:
                self.premises.append(f"(= {name} {p})")
            return
        head, *args = p
        if head in ("add", "mul"):
            self.match_nary(head, args, name)
            return
        if head == "as":
            self.match(args[1], args[0])
            if name != args[0]:
                self.premises.append(f"(= {name} {args[0]})")
            return
        ctor, attrs, kids = self.shape(p)
        call = f"({' '.join([ctor, *attrs, *map(self.var, kids)])})"
        self.nodes.append(call)
        self.premises.append(f"(= {name} {call})")
        self.sorts.update({a: "f64" if ctor == "Num" else "String" for a in attrs if '"' not in a})
        self.sorts.update({k: "T" for k in kids if isinstance(k, str) and not is_number(k)})
        for k, v in zip(kids, call[1:-1].split(" ")[1 + len(attrs) :]):
            if not (isinstance(k, str) and not is_number(k)):
                self.match(k, v)

    def var(self, p: Sexpr) -> str:
        if isinstance(p, str) and not is_number(p):
            return p
        if isinstance(p, list) and p[0] == "as":
            return p[1]
        return self.fresh()

    def shape(self, p: list) -> tuple[str, list[str], list]:
        """(constructor, attributes as text, argument patterns) of a form that is not n-ary."""
        head, *args = p
        if head == "num" and len(args) == 1:
            return "Num", [unparse(args[0])], []
        if head == "iota" and len(args) == 1:
            return "Iota", args, []
        if head in _RED and len(args) == 2:
            return "Red", [_RED[head], args[0]], args[1:]
        if head == "red" and len(args) == 3:
            return "Red", args[:2], args[2:]
        if head in UNARY and len(args) == 1:
            return "Un", [f'"{head}"'], args
        if head == "un" and len(args) == 2:
            return "Un", args[:1], args[1:]
        if head == "bi" and len(args) == 3:
            if args[0].startswith('"') and args[0].strip('"') not in BINARY:
                raise self.error(p)
            return "Bi", args[:1], args[1:]
        if head == "where" and len(args) == 3:
            return "Where", [], args
        if head == "view" and len(args) == 2:
            return "View", args[:1], args[1:]
        if head == "gather" and len(args) == 3:
            return "Gather", args[:1], args[1:]
        raise self.error(p)

    def match_nary(self, head: str, args: list, name: str) -> None:
        ctor, idx = {"add": ("Add", "idxA"), "mul": ("Mul", "idxM")}[head]
        stars = [a for a in args if is_star(a)]
        picks = [a for a in args if not is_star(a)]
        if len(stars) > 1:
            raise self.error([head, *args])
        if self.nodes and len(picks) == 2 and not stars:  # a relation has these: cheaper to join
            a, b = map(self.var, picks)
            self.premises.append(f"({'product-of' if head == 'mul' else 'sum-of'} {name} {a} {b})")
            for p, v in zip(picks, (a, b)):
                self.sorts[v] = "T"
                self.match(p, v)
            return
        ms = self.fresh("ms")
        self.premises.append(f"(= {name} ({ctor} {ms}))")
        self.nodes.append(f"({ctor} {ms})")
        rest = ms
        for p in picks:
            v = self.var(p)
            self.sorts[v] = "T"
            self.premises.append(f"(= {self.fresh('n')} ({idx} {ms} {v}))")
            self.match(p, v)
            rest = f"(multiset-remove {rest} {v})"
        if stars:
            whole = rest
            if picks:
                rest = self.fresh("ms")
                self.premises.append(f"(= {rest} {whole})")
            if stars[0] in self.stars:
                self.premises.append(f"(= {rest} {self.stars[stars[0]]})")
            else:
                self.stars[stars[0]] = rest
                self.kinds[stars[0]] = f"{idx} {ms}"
                self.sorts[rest] = "MS"
        else:
            self.premises.append(f"(= {len(picks)} (multiset-length {ms}))")
            if len(picks) > 1:
                self.premises.append(f"(= 0 (multiset-length {rest}))")

    # ---- conditions
    def fact(self, f: list, *more: str) -> str:
        head, *args = f
        if head in FACTS:
            return f'(has "{head}" {" ".join([*args, *more])})'
        if head in RELATIVE:
            return f"({' '.join([head, *args, *more])})"
        raise self.error(f)

    def predicate(self, f: list) -> str:
        """A fact with its last argument left out, as a function value."""
        head, *args = f
        if head in FACTS:
            return f'(unstable-fn "has" "{head}")'
        if head not in RELATIVE:
            raise self.error(f)
        return f'(unstable-fn "{head}" {" ".join(args)})'

    def star(self, s: str) -> str:
        if s not in self.stars:
            raise RuleError(f"rule {self.name}: {s} is not bound")
        return self.stars[s]

    def free(self, names: list) -> str:
        """The free axes of terms and multisets together; "- k" at the end takes k out."""
        out = ""
        minus = names[-1] if "-" in names else None
        for n in names[: names.index("-")] if minus else names:
            if is_star(n):
                sets = f'(unstable-multiset-map (unstable-fn "free") {self.star(n)})'
                e = f'(unstable-multiset-reduce (unstable-fn "set-union") (set-empty) {sets})'
            else:
                e = self.fresh("s")
                self.premises.append(f"(= {e} (free {n}))")
            out = f"(set-union {out} {e})" if out else e
        if minus:
            p = self.fresh("p")
            self.premises.append(f"(= {p} (parts {minus}))")
            out = f"(set-diff {out} {p})"
        v = self.fresh("s")
        self.premises.append(f"(= {v} {out})")
        return v

    def condition(self, c: Sexpr) -> None:
        if not isinstance(c, list) or not c:
            raise self.error(c)
        head, *args = c
        if head in (*FACTS, *RELATIVE):
            self.premises.append(f"(= {self.fresh('u')} {self.fact(c)})")
        elif head in ("part", "divide"):
            ms, f, yes, no = args
            if head == "part":  # one that satisfies the fact: makes the rule look again when a fact arrives
                e = self.fresh("e")
                self.premises += [f"(= {self.fresh('n')} ({self.kinds[ms]} {e}))", f"(= {self.fresh('u')} {self.fact(f, e)})"]
            for var, prim in ((yes, "unstable-multiset-filter"), (no, "unstable-multiset-filter-not")):
                v = self.fresh("ms")
                self.premises.append(f"(= {v} ({prim} {self.predicate(f)} {self.star(ms)}))")
                self.stars[var] = v
                self.sorts[v] = "MS"
        elif head == "some":
            self.premises.append(f"(> (multiset-length {self.star(args[0])}) 0)")
        elif head == "fewer":
            self.premises.append(f"(< (multiset-length {self.star(args[0])}) {args[1]})")
        elif head == "all":
            self.premises.append(
                f"(= 0 (multiset-length (unstable-multiset-filter-not {self.predicate(args[0])} {self.star(args[1])})))"
            )
        elif head == "none":
            self.premises.append(
                f"(= 0 (multiset-length (unstable-multiset-filter {self.predicate(args[0])} {self.star(args[1])})))"
            )
        elif head == "lacks":
            self.premises.append(f"(multiset-not-contains {self.star(args[0])} {args[1]})")
        elif head == "is":
            self.match(args[1], args[0])
        elif head in ("lz", "hz"):
            self.premises.append(f"(= {args[1]} ({head} {args[0]}))")
        elif head == "free-of":
            p = self.fresh("p")
            self.premises += [f"(= {p} (parts {args[0]}))", f"(= 0 (set-length (set-intersect {self.free(args[1:])} {p})))"]
        elif head == "cheaper":
            sums = []
            for side in args:
                vs = []
                for _, *names in side:
                    self.volumes.append(self.free(names))
                    vs.append(self.fresh("w"))
                    self.late.append(f"(= {vs[-1]} (volume {self.volumes[-1]}))")
                e = vs[0]
                for v in vs[1:]:
                    e = f"(+ {e} {v})"
                sums.append(e)
            self.late.append(f"(< {sums[0]} {sums[1]})")
        elif head in COMPARISONS or head in RELATIONS:
            self.premises.append(unparse(c))
        else:
            raise self.error(c)

    # ---- results
    def build(self, r: Sexpr) -> str:
        """Actions that make r; gives the egglog variable (or pattern variable) that holds it."""
        if is_number(r):
            return f"(Num {r})"
        if isinstance(r, str):
            return r
        head, *args = r
        if head in ("add", "mul"):
            ctor = head.capitalize()
            ms = self.let(self.multiset(args))
            t = self.let(f"({ctor} {ms})")
            self.actions.append(f'(set (why-{ctor} {ms}) "{self.name}")')
            return t
        ctor, attrs, kids = self.shape(r)
        inner = " ".join([*attrs, *map(self.build, kids)])
        t = self.let(f"({ctor} {inner})")
        if ctor not in ("Num", "Iota"):
            self.actions.append(f'(set (why-{ctor} {inner}) "{self.name}")')
        return t

    def let(self, e: str) -> str:
        v = self.fresh("v")
        self.actions.append(f"(let {v} {e})")
        return v

    def multiset(self, args: list) -> str:
        plain = [self.build(a) for a in args if not is_star(a) and not (isinstance(a, list) and a[0] == "map")]
        sums = [self.star(a) for a in args if is_star(a)] + [
            self.mapped(a) for a in args if isinstance(a, list) and a[0] == "map"
        ]
        if not sums:
            return f"(multiset-of {' '.join(plain)})"
        out = sums[0]
        for s in sums[1:]:
            out = f"(multiset-sum {out} {s})"
        for p in plain:
            out = f"(multiset-insert {out} {p})"
        return out

    def mapped(self, m: list) -> str:
        """(map (form … _) xs*).  The nodes are made by a deferred constructor, which remembers the rule's name."""
        _, form, xs = m
        head, *args = form
        if args[-1] != "_":
            raise self.error(m)
        if head in ("mul", "add"):
            ms = self.let(self.multiset(args[:-1]))
            fn = f'(unstable-fn "Later{head.capitalize()}" "{self.name}" {ms})'
        else:
            ctor, attrs, _ = self.shape([head, *args])
            if ctor not in ("Un", "Red", "View"):
                raise self.error(m)
            fn = f"(unstable-fn {' '.join([chr(34) + 'Later' + ctor + chr(34), chr(34) + self.name + chr(34), *attrs])})"
        return f"(unstable-multiset-map {fn} {self.star(xs)})"
