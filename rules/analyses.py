"""Analyses: facts and bounds of classes, as egglog rules that run to fixpoint between single steps of algebra.

Merging classes merges facts by a lattice join: free axes by intersection, bounds by the tighter one, facts by union.

Meaning, for an element v of a class (finite inputs, axes not empty):
    lz ≤ v ≤ hz   unless v is −inf or NaN
    lo ≤ v ≤ hi   unless v is −inf, NaN or 0
so lo, hi bound what is not masked (a masked score is −inf, and exp makes 0 of it).  "finite": v is a real number; "noinf":
not ±inf (NaN may be); "masked": a real number or −inf; "nonzero": v ≠ 0 as a real number, or NaN; "nonneg": v ≥ 0, or −inf
or NaN. normsq(k, t): Σₖ t² is at most that.  below(x, y): x ≤ y, or one is NaN.  attained(m, y, t, n): t ≥ 1
wherever y = m, unless it is −inf or NaN; n: 1 for exp(y − m) itself, 2 for a sum.

regular(M, t): t is a real number ≠ 0 wherever the maximum M is one.   tame(M, t): t is a real number there.
vanish(M, t): t is 0 or NaN wherever M is −inf: all that it sums is masked there.
"""

from __future__ import annotations


def _rule(premises: str, *actions: str, ruleset: str = "an") -> str:
    return f"(rule ({premises}) ({' '.join(actions)}) :ruleset {ruleset})"


def _has(fact: str, x: str, var: str = "u") -> str:
    return f'(= {var} (has "{fact}" {x}))'


def _gives(fact: str, x: str = "t") -> str:
    return f'(set (has "{fact}" {x}) ())'


def _nary(ctor: str) -> str:
    """Premises that bind an element e of t's multiset: the trigger of what is computed from all of them."""
    return f"(= t ({ctor} ms)) (= c (idx{ctor[0]} ms e))"


def _all(fn: str) -> str:
    """Premises that fs holds a value of fn for every element of ms."""
    return f'(= fs (unstable-multiset-map (unstable-fn "{fn}") ms)) (= (multiset-length fs) (multiset-length ms))'


def _each(predicate: str) -> str:
    """Premise that every element of ms satisfies a partial application of a fact."""
    return f"(= 0 (multiset-length (unstable-multiset-filter-not (unstable-fn {predicate}) ms)))"


def _sum(fn: str, start: str = "0.0") -> str:
    return f'(unstable-multiset-reduce (unstable-fn "+") {start} fs)'


# A sum or product of two, e and x, is a row of a relation: patterns then join on e and x, and a query that joins on
# what a function
# of a multiset gives would go through all pairs.
_TWO = "(product-of t e x)"
_SCALED = "(multiple-of t v x)"
PAIRS = [
    *(
        _rule(
            f"(= t ({c} ms)) (= 2 (multiset-length ms)) (= n (idx{c[0]} ms e)) (= x (multiset-pick (multiset-remove ms e)))",
            f"({r} t e x)",
        )
        for c, r in (("Mul", "product-of"), ("Add", "sum-of"))
    ),
    _rule(f"{_TWO} (= e (Num v)) (< v inf) (> v -inf)", "(multiple-of t v x)"),
]
_DOWN, _UP = repr(1 - 1e-9), repr(1 + 1e-9)  # bounds are rounded outward where they are not exact
_EULER = "2.718281828459045"

INDEX = [
    _rule(f"(= t ({n} ms))", f'(unstable-multiset-fill-index ms (unstable-fn "idx{n[0]}"))', ruleset="ix") for n in ("Add", "Mul")
]

_KIDS = {"Un": ("f x", "x"), "Bi": ("f x y", "xy"), "Where": ("c x y", "cxy")}


def _free() -> list[str]:
    out = [
        _rule("(= t (Num v))", "(set (free t) (set-empty))"),
        _rule("(= t (Iota k)) (= s (parts k))", "(set (free t) s)"),
        _rule(
            "(= t (Red op k x)) (= s (free x)) (= p (parts k)) (= q (beside k))",
            "(set (free t) (set-union (set-diff s p) q)) (redaxis k)",
        ),
        _rule("(= t (View m x)) (= s (free x)) (reads m bound new)", "(set (free t) (set-union (set-diff s bound) new))"),
        _rule(
            "(= t (Gather k x i)) (= s (free x)) (= p (parts k)) (= r (free i))", "(set (free t) (set-union (set-diff s p) r))"
        ),
    ]
    for ctor, (args, kids) in _KIDS.items():
        union = f"s{kids[0]}"
        for k in kids[1:]:
            union = f"(set-union {union} s{k})"
        out.append(_rule(f"(= t ({ctor} {args})) " + " ".join(f"(= s{k} (free {k}))" for k in kids), f"(set (free t) {union})"))
    for n in ("Add", "Mul"):
        out.append(
            _rule(
                f"{_nary(n)} (= s (free e)) {_all('free')}",
                '(set (free t) (unstable-multiset-reduce (unstable-fn "set-union") (set-empty) fs))',
            )
        )
    return out


# which elements of a sum or product may leave a reduction over k: asked only where the whole varies along k
AXES = [
    *_free(),
    _rule("(nth i) (= s (free t)) (= a (set-get s i))", "(along a t)"),
    _rule("(along a t) (leaf-of a k)", "(dep k t)"),
    *(
        _rule(
            f"(dep k t) {_nary(n)} (= s (free e)) (= p (parts k)) (= 0 (set-length (set-intersect s p)))", "(set (indep k e) ())"
        )
        for n in ("Add", "Mul")
    ),
    _rule(
        "(= u (indep k e)) (= c (idxA ms e)) (= t (Add ms)) (dep k t) (> (multiset-length "
        '(unstable-multiset-filter-not (unstable-fn "indep" k) ms)) 0)',
        "(set (partable k t) ())",
    ),
    _rule("(= u (partable k t)) (redaxis k)", _gives("mixed")),
    # how many steps above a reduction over k, up to five: what has a factor from there can be summed in one pass only without it
    _rule("(= t (Red op k x))", "(set (steps k t) 0)"),
    _rule("(= n (steps k x)) (< n 5) (= t (Un f x))", "(set (steps k t) (+ n 1))"),
    *(
        _rule(f"(= n (steps k e)) (< n 5) (= c (idx{c[0]} ms e)) (= t ({c} ms))", "(set (steps k t) (+ n 1))")
        for c in ("Add", "Mul")
    ),
    _rule("(= u (indep k e)) (= n (steps k e)) (= c (idxM ms e)) (= t (Mul ms)) (dep k t)", "(set (factored k t) ())"),
    _rule(f"(= u (indep k t)) {_has('noinf', 't', 'w')}", "(set (cofactor k t) ())"),
    _rule(f"(= u (indep k t)) {_has('finite', 't', 'w')}", "(set (addend k t) ())"),
]

# Tables: one rule serves many functions.
GIVES = [("noinf", "tanh erf sin cos atan sign"), ("finite", "not isnan isinf isfinite lt le eq ne and or xor")]
KEEPS = [  # premise, conclusion, functions
    ("masked", "finite", "exp exp2 expm1 tanh erf atan sign"),
    ("finite", "finite", "abs floor ceil round trunc sin cos sinh cosh asinh max min"),
    ("noinf", "noinf", "abs floor ceil round trunc max min"),
    ("masked", "masked", "floor ceil round trunc max min"),
    ("finite", "nonzero", "exp exp2 cosh"),
    ("nonzero", "nonzero", "abs sign tanh erf atan sinh asinh expm1 max min"),
]
RED_KEEPS = [
    ("+", "finite noinf masked"),
    ("*", "finite noinf nonzero"),
    ("max", "finite noinf masked nonzero"),
    ("min", "finite noinf masked nonzero"),
]
NARY_KEEPS = "finite noinf"
LOWER = [
    ("0.0", "exp exp2 abs sqrt rsqrt not isnan isinf isfinite lt le eq ne and or xor"),
    ("-1.0", "tanh erf sin cos sign expm1"),
    ("1.0", "cosh"),
    ("-1.5707963267948968", "atan"),
]
UPPER = [("1.0", "tanh erf sin cos sign not isnan isinf isfinite lt le eq ne and or xor"), ("1.5707963267948968", "atan")]


def tables() -> list[str]:
    """The rows of the tables, as actions."""
    out = [f'(un-gives "{f}" "{q}")' for q, fs in GIVES for f in fs.split()]
    out += [f'(un-keeps "{f}" "{p}" "{q}")' for p, q, fs in KEEPS for f in fs.split()]
    out += [f'(red-keeps "{op}" "{q}")' for op, qs in RED_KEEPS for q in qs.split()]
    out += [f'(nary-keeps "{q}")' for q in NARY_KEEPS.split()]
    out += [f'(un-lower "{f}" {v})' for v, fs in LOWER for f in fs.split()]
    out += [f'(un-upper "{f}" {v})' for v, fs in UPPER for f in fs.split()]
    return out + [f"(nth {i})" for i in range(24)]


FACTS = [
    _rule(_has("finite", "t"), _gives("noinf"), _gives("masked")),
    _rule("(= t (Num v)) (< v inf) (> v -inf)", _gives("finite"), "(set (lz t) v) (set (hz t) v)"),
    _rule("(= t (Num v)) (!= v 0.0)", _gives("nonzero")),
    _rule("(= t (Num -inf))", _gives("masked")),
    _rule("(= t (Num inf))", "(set (lz t) 1e300)"),
    _rule("(= t (Iota k)) (= n (extent k))", _gives("finite"), "(set (lz t) 0.0) (set (hz t) (- n 1.0))"),
    _rule("(= t (Un f x)) (un-gives f q)", "(set (has q t) ())"),
    _rule("(= t (Bi f x y)) (un-gives f q)", "(set (has q t) ())"),
    _rule("(= t (Un f x)) (un-keeps f p q) (= u (has p x))", "(set (has q t) ())"),
    _rule("(= t (Bi f x y)) (un-keeps f p q) (= u (has p x)) (= w (has p y))", "(set (has q t) ())"),
    _rule(f'(= t (Bi "max" x y)) {_has("masked", "x")} {_has("finite", "y", "w")}', _gives("finite")),
    _rule(f'(= t (Bi "max" y x)) {_has("masked", "x")} {_has("finite", "y", "w")}', _gives("finite")),
    _rule("(= t (Where c x y)) (= u (has q x)) (= w (has q y))", "(set (has q t) ())"),
    _rule('(= t (View m x)) (= u (has q x)) (!= q "nonzero")', "(set (has q t) ())"),
    _rule("(= t (View m x)) (= u (has q x)) (inside m)", "(set (has q t) ())"),
    _rule("(= t (Gather k x i)) (= u (has q x))", "(set (has q t) ())"),
    _rule("(= t (Red op k x)) (red-keeps op q) (= u (has q x))", "(set (has q t) ())"),
    *(
        _rule(f"{_nary(n)} (nary-keeps q) (= u (has q e)) {_each(chr(34) + 'has' + chr(34) + ' q')}", "(set (has q t) ())")
        for n in ("Add", "Mul")
    ),
    *(
        _rule(f"{_nary(n)} {_has(q, 'e')} {_each(f'{chr(34)}has{chr(34)} {chr(34)}{q}{chr(34)}')}", _gives(q))
        for n, q in (("Add", "masked"), ("Mul", "nonzero"), ("Mul", "nonneg"))
    ),
    _rule(f"{_SCALED} (> v 0.0) {_has('masked', 'x')}", _gives("masked")),
    _rule('(= t (Un "exp" x)) (= h (hz x))', _gives("noinf")),
    _rule(f'(= t (Un "recip" x)) {_has("nonzero", "x")}', _gives("noinf")),
    _rule(f'(= t (Un "recip" x)) {_has("nonzero", "x")} {_has("finite", "x", "w")}', _gives("finite"), _gives("nonzero")),
    *(
        _rule(f'(= t (Un "{f}" x)) (= l (lz x)) (> l 0.0) {_has("finite", "x")}', _gives("finite"), *more)
        for f, more in (("rsqrt", [_gives("nonzero")]), ("log", []), ("log2", []), ("log10", []), ("log1p", []))
    ),
    _rule(f'(= t (Un "rsqrt" x)) (= l (lz x)) (> l 0.0) {_has("noinf", "x")}', _gives("noinf")),
    _rule(f'(= t (Un "sqrt" x)) (= l (lz x)) (>= l 0.0) {_has("finite", "x")}', _gives("finite")),
    _rule('(= t (Un "sqrt" x)) (= l (lz x)) (> l 0.0)', _gives("nonzero")),
    _rule(
        f'(= t (Red "+" k x)) {_has("nonneg", "x")} {_has("nonzero", "x", "w")} {_has("finite", "x", "w2")}', _gives("nonzero")
    ),
    _rule(f"{_nary('Add')} {_has('nonzero', 'e')} {_has('finite', 'e', 'w')} " + _each('"has" "nonneg"'), _gives("nonzero")),
    _rule("(= t (Where c x y)) (= l (lz-if c x)) (> l 0.0)" + _has("nonzero", "y"), _gives("nonzero")),
    _rule("(= l (lz t)) (>= l 0.0)", _gives("nonneg")),
    _rule("(= l (lz t)) (> l 0.0)", _gives("nonzero")),
    _rule("(= h (hz t)) (< h 0.0)", _gives("nonzero")),
]

BOUNDS = [
    # strict bounds and those of what is not masked
    _rule("(= l (lz t))", "(set (lo t) l)"),
    _rule("(= h (hz t))", "(set (hi t) h)"),
    _rule("(= l (lo t))", "(set (lz t) (min l 0.0))"),
    _rule("(= h (hi t))", "(set (hz t) (max h 0.0))"),
    _rule(f"(= l (lo t)) {_has('nonzero', 't')}", "(set (lz t) l)"),
    _rule(f"(= h (hi t)) {_has('nonzero', 't')}", "(set (hz t) h)"),
    _rule(_has("nonneg", "t"), "(set (lz t) 0.0)"),
    # functions
    *(_rule(f"(= t ({n})) (un-lower f a)", "(set (lz t) a)") for n in ("Un f x", "Bi f x y")),
    *(_rule(f"(= t ({n})) (un-upper f b)", "(set (hz t) b)") for n in ("Un f x", "Bi f x y")),
    _rule('(= t (Un "exp" x)) (= h (hz x)) (< h 700.0)', f"(set (hz t) (* (^ {_EULER} h) {_UP}))"),
    _rule('(= t (Un "exp" x)) (= l (lz x)) (> l -700.0) (< l 700.0)', f"(set (lo t) (* (^ {_EULER} l) {_DOWN}))"),
    _rule('(= t (Un "recip" x)) (= h (hi x)) (= l (lo x)) (> l 0.0) (> h 0.0)', f"(set (lo t) (* (/ 1.0 h) {_DOWN})) (set (lz t) 0.0)"),
    _rule('(= t (Un "recip" x)) (= l (lz x)) (> l 0.0)', f"(set (hz t) (* (/ 1.0 l) {_UP}))"),
    _rule('(= t (Un "rsqrt" x)) (= l (lz x)) (> l 0.0)', f"(set (hz t) (* (/ 1.0 (^ l 0.5)) {_UP}))"),
    _rule('(= t (Un "rsqrt" x)) (= h (hz x)) (> h 0.0)', f"(set (lo t) (* (/ 1.0 (^ h 0.5)) {_DOWN}))"),
    _rule('(= t (Un "sqrt" x)) (= l (lz x)) (>= l 0.0)', f"(set (lz t) (* (^ l 0.5) {_DOWN}))"),
    _rule('(= t (Un "sqrt" x)) (= h (hz x)) (>= h 0.0)', f"(set (hz t) (* (^ h 0.5) {_UP}))"),
    _rule('(= t (Un "abs" x)) (= l (lz x)) (= h (hz x))' + _has("noinf", "x"), "(set (hz t) (max (abs l) (abs h)))"),
    _rule('(= t (Un "log" x)) (= h (hz x)) (> h 0.0)', "(set (hz t) (- h 1.0))"),
    *(_rule(f'(= t (Un "{f}" x)) (= l (lz x))', "(set (lz t) (- l 1.0))") for f in ("floor", "round", "trunc")),
    *(_rule(f'(= t (Un "{f}" x)) (= h (hz x))', "(set (hz t) (+ h 1.0))") for f in ("ceil", "round", "trunc")),
    *(_rule(f'(= t (Bi "{f}" x y)) (= a (lz x)) (= b (lz y))', "(set (lz t) (min a b))") for f in ("max", "min")),
    *(_rule(f'(= t (Bi "{f}" x y)) (= a (hz x)) (= b (hz y))', "(set (hz t) (max a b))") for f in ("max", "min")),
    *(_rule(f'(= t (Bi "max" {xy})) (= a (lz x)) {_has("noinf", "x")}', "(set (lz t) a)") for xy in ("x y", "y x")),
    *(_rule(f'(= t (Bi "min" {xy})) (= a (hz x))', "(set (hz t) a)") for xy in ("x y", "y x")),
    # products
    _rule(f"{_SCALED} (> v 0.0) (= l (lz x))", "(set (lz t) (* v l))"),
    _rule(f"{_SCALED} (> v 0.0) (= h (hz x))", "(set (hz t) (* v h))"),
    _rule(f"{_SCALED} (> v 0.0) (= l (lo x))", "(set (lo t) (* v l))"),
    _rule(f"{_SCALED} (> v 0.0) (= h (hi x))", "(set (hi t) (* v h))"),
    _rule(f"{_SCALED} (< v 0.0) (= h (hz x))", "(set (lz t) (* v h))"),
    _rule(f"{_SCALED} (< v 0.0) (= h (hi x))", "(set (lo t) (* v h))"),
    _rule(f"{_SCALED} (< v 0.0) (= l (lz x)) {_has('noinf', 'x')}", "(set (hz t) (* v l))"),
    _rule(f"{_SCALED} (< v 0.0) (= l (lo x)) {_has('noinf', 'x')}", "(set (hi t) (* v l))"),
    _rule("(product-of t e e)", "(set (lz t) 0.0)"),
    _rule(
        f"{_TWO} (= l (lz e)) (= h (hz e)) (= a (lz x)) (= b (hz x)) {_has('noinf', 'e')} {_has('noinf', 'x', 'w')}",
        "(set (lz t) (min (min (* l a) (* l b)) (min (* h a) (* h b)))) (set (hz t) (max (max (* l a) (* l b)) (max "
        "(* h a) (* h b))))",
    ),
    # sums
    _rule(f"{_nary('Add')} (= q (lz e)) {_all('lz')}", f"(set (lz t) {_sum('lz')})"),
    _rule(f"{_nary('Add')} (= q (hz e)) {_all('hz')}", f"(set (hz t) {_sum('hz')})"),
    # choices: what is −inf or 0 is masked
    _rule("(= t (Where c x y)) (= a (lz x)) (= b (lz y))", "(set (lz t) (min a b))"),
    _rule("(= t (Where c x y)) (= a (hz x)) (= b (hz y))", "(set (hz t) (max a b))"),
    *(
        _rule(f"(= t (Where c {xy})) (= y (Num -inf)) (= a ({f} x))", f"(set ({f} t) a)")
        for xy in ("x y", "y x")
        for f in ("lz", "hz", "lo", "hi")
    ),
    *(
        _rule(f"(= t (Where c {xy})) (= y (Num 0.0)) (= a ({f} x))", f"(set ({f} t) a)")
        for xy in ("x y", "y x")
        for f in ("lo", "hi")
    ),
    # what a condition says of the branch that it guards
    *(_rule(f'(= c (Bi "{f}" a x)) (= l (lz a))', "(set (lz-if c x) l)") for f in ("lt", "le")),
    _rule(
        "(= l (lz-if c e)) (sum-of t e x) (= k (lz x))",
        "(set (lz-if c t) (+ l k))",
    ),
    _rule("(= t (Where c x y)) (= a (lz-if c x)) (= b (lz y))", "(set (lz t) (min a b))"),
    # reads
    *(_rule(f"(= t (View m x)) (= a ({f} x))", f"(set ({f} t) a)") for f in ("lo", "hi")),
    *(_rule(f"(= t (Gather k x i)) (= a ({f} x))", f"(set ({f} t) a)") for f in ("lo", "hi", "lz", "hz")),
    # reductions: a maximum is one of its elements
    *(
        _rule(f'(= t (Red "{op}" k x)) (= a ({f} x))', f"(set ({f} t) a)")
        for op in ("max", "min")
        for f in ("lo", "hi", "lz", "hz")
    ),
    _rule('(= t (Red "+" k x)) (= a (lz x)) (>= a 0.0)', "(set (lz t) a)"),
    _rule('(= t (Red "+" k x)) (= a (hz x)) (<= a 0.0)', "(set (hz t) a)"),
    _rule('(= t (Red "+" k x)) (= a (lz x)) (< a 0.0) (= n (extent k))', "(set (lz t) (* a n))"),
    _rule('(= t (Red "+" k x)) (= a (hz x)) (> a 0.0) (= n (extent k))', "(set (hz t) (* a n))"),
    _rule('(= t (Red "+" k x)) (= a (lo x)) (> a 0.0)', "(set (lo t) a)"),
    # order: x − y ≤ 0 where x is below y
    _rule('(= y (Red "max" k x))', "(set (below x y) ())"),
    *(_rule(f'(= y (Bi "max" {xz}))', "(set (below x y) ())") for xz in ("x z", "z x")),
    _rule("(= u (below x y)) (= w (below y z))", "(set (below x z) ())"),
    _rule(
        "(sum-of t m x) (multiple-of m -1.0 y) (= u (below x y))",
        "(set (hz t) 0.0)",
    ),
    # x − x is 0 or NaN
    _rule("(sum-of t m x) (multiple-of m -1.0 x)", "(set (hz t) 0.0) (set (lz t) 0.0)"),
    # M − (M, or 0 where M = −inf) is 0 or −inf
    _rule(
        "(sum-of t m x) (multiple-of m -1.0 p) (= p (Where c z x)) (= z (Num 0.0)) (unless-finite c x)",
        "(set (hz t) 0.0)",
    ),
    _rule('(= c (Bi "eq" x i)) (= i (Num -inf))', "(unless-finite c x)"),
    _rule('(= c (Un "isinf" x))' + _has("masked", "x"), "(unless-finite c x)"),
    _rule('(= c (Un "not" f)) (= f (Un "isfinite" x))' + _has("masked", "x"), "(unless-finite c x)"),
    # of the exponentials of what a maximum is of, less the maximum, one is 1
    _rule('(= t (Un "exp" d)) (sum-of d n y) (multiple-of n -1.0 m)', "(attained m y t 1)"),
    _rule('(= t (Un "exp" n)) (multiple-of n -1.0 m) (= y (Num 0.0))', "(attained m y t 1)"),
    _rule(
        '(attained m x e 1) (= t (Red "+" k e)) (= y (Red "max" k x)) (= s (free m)) (= p (parts k)) '
        "(= 0 (set-length (set-intersect s p)))",
        "(attained m y t 2)",
    ),
    _rule(
        '(attained m x d i) (attained m z e j) (= y (Bi "max" x z)) (= c1 (idxA ms d)) (= c2 (idxA ms e)) (= t (Add ms)) '
        + f"(!= d e) (= c3 (idxA ms f)) {_has('nonneg', 'f')} "  # whichever of them is known last
        + _each('"has" "nonneg"'),
        "(attained m y t 2)",
    ),
    _rule("(attained m m t 2)", "(set (lz t) 1.0)"),
]

# ‖x / √(c·Σx² + ε)‖² ≤ 1/c, scaled and rotated; then Cauchy–Schwarz
_SQUARES = '(= q (Red "+" d s)) (= s (Mul (multiset-of x x)))'
NORMS = [
    _rule('(= q (Red "+" d s)) (= s (Mul ss)) (= 2 (multiset-length ss)) (= 2 (idxM ss x))', "(sumsq d x q 1.0)"),
    # within a range: a class that is a multiple of itself (0) would never come to an end
    _rule("(sumsq d x q a) (multiple-of t v q) (> v 0.0) (!= t q) (> (* a v) 1e-30) (< (* a v) 1e30)", "(sumsq d x t (* a v))"),
    _rule(
        "(sumsq d x e a) (sum-of t e y) (= l (lz y)) (>= l 0.0)",
        "(sumsq d x t a)",
    ),
    _rule('(sumsq d x q a) (= t (Un "rsqrt" q))', "(inverse-norm d x t a)"),
    _rule('(sumsq d x q a) (= s (Un "sqrt" q)) (= t (Un "recip" s))', "(inverse-norm d x t a)"),
    _rule(f"(inverse-norm d x e a) {_TWO}", "(set (normsq d t) (/ 1.0 a))"),
    _rule(
        f"{_TWO} (= l (lz e)) (= h (hz e)) (= n2 (normsq d x)) {_has('noinf', 'e')}",
        "(set (normsq d t) (* (max (* l l) (* h h)) n2))",
    ),
    _rule("(= t (Where c x y)) (= a (normsq d x)) (= b (normsq d y))", "(set (normsq d t) (+ a b))"),
    _rule(
        "(sum-of t e x) (= a (normsq d e)) (= b (normsq d x))",
        "(set (normsq d t) (* 2.0 (+ a b)))",
    ),
    _rule(  # not along a diagonal
        "(= t (View m x)) (shifted m d f) (= a (normsq d x)) (reads m bound new) (= s (free x)) (= p (parts f)) "
        "(= 0 (set-length (set-intersect (set-diff s bound) p)))",
        "(set (normsq f t) a)",
    ),
    _rule(
        f'(= r (Red "+" d t)) {_TWO} (= a (normsq d e)) (= b (normsq d x))',
        f"(set (hz r) (* {_UP} (^ (* a b) 0.5))) (set (lz r) (- 0.0 (* {_UP} (^ (* a b) 0.5))))",
    ),
]

MASKS = [
    # "holed": −inf where a mask is.  Only there is more to say than "finite".
    _rule("(= t (Where c x y)) (= y (Num -inf))", _gives("holed")),
    _rule("(= t (Where c y x)) (= y (Num -inf))", _gives("holed")),
    *(_rule(f"{_nary(n)} {_has('holed', 'e')}", _gives("holed")) for n in ("Add", "Mul")),
    _rule(f'(= t (Red "max" k x)) {_has("masked", "x")} {_has("holed", "x", "w")}', _gives("holed"), "(set (tame t t) ())"),
    *(
        _rule(
            f'{_nary(n)} (= u (tame m e)) {more} (= r (unstable-multiset-filter-not (unstable-fn "tame" m) ms)) '
            '(= 0 (multiset-length (unstable-multiset-filter-not (unstable-fn "has" "finite") r)))',
            "(set (tame m t) ())",
        )
        for n in ("Add", "Mul")
        for more in ("", f"(= c2 (idx{n[0]} ms f)) {_has('finite', 'f', 'w')}")
    ),  # whichever fact comes last
    _rule('(= t (Un "exp" x)) (= u (tame m x))', "(set (regular m t) ())"),
    _rule('(= u (tame m m)) (= m (Red "max" k a)) (= e (Un "exp" a)) (= t (Red "+" k e))', "(set (vanish m t) ())"),
    _rule(
        '(= u (tame m m)) (= m (Red "max" k a)) (= e (Un "exp" a)) (= n (idxM ms e)) (= p (Mul ms)) (= t (Red "+" k p)) '
        + _has("noinf", "p", "w"),
        "(set (vanish m t) ())",
    ),
]

ALL = [*INDEX, *PAIRS, *AXES, *FACTS, *BOUNDS, *NORMS, *MASKS]
