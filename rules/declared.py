"""The rules.  `RULES` is the registry: everything that rewrites terms is here, and every entry is tested by `testing.check_rule`.

Phases: "norm" runs to fixpoint with the analyses before each step of the others; "sums" comes first, then "sums", "algebra" and
"contract" together; then "join", and "split" last; "expand" runs only in the small e-graph that derives merges (repair.py).
"""

from __future__ import annotations

from .rule import Rule

_LN2 = repr(0.6931471805599453)

# ---------------------------------------------------------------- normalisation: shrinks, so nothing sees both sides
NORMAL = [
    Rule("single-product", "normal", "(mul x)", "x", law="a product of one factor is the factor", phase="norm", retire=True),
    Rule("single-sum", "normal", "(add x)", "x", law="a sum of one term is the term", phase="norm", retire=True),
    Rule("unit-factor", "normal", "(mul 1.0 rest*)", "(mul rest*)", law="1·x = x", phase="norm", retire=True),
    Rule("zero-term", "normal", "(add 0.0 rest*)", "(add rest*)", law="0 + x = x", phase="norm", retire=True),
    Rule(
        "zero-factor",
        "normal",
        "(mul 0.0 rest*)",
        "0.0",
        when="(all (finite) rest*)",
        guard="(some rest*)",
        law="0·x = 0 for finite x",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        "constant-factors",
        "normal",
        "(mul (num v) (num w) rest*)",
        "(mul (num (* v w)) rest*)",
        law="constants multiply",
        numerics="reassociates",
        phase="norm",
        retire=True,
    ),
    Rule(
        "constant-terms",
        "normal",
        "(add (num v) (num w) rest*)",
        "(add (num (+ v w)) rest*)",
        law="constants add",
        numerics="reassociates",
        phase="norm",
        retire=True,
    ),
    Rule(
        "constant-reciprocal",
        "normal",
        "(recip (num v))",
        "(num (/ 1.0 v))",
        when="(!= v 0.0)",
        law="1/v for a constant v",
        phase="norm",
        retire=True,
    ),
    Rule("exp-of-zero", "normal", "(exp 0.0)", "1.0", law="e⁰ = 1", phase="norm", retire=True),
    Rule("exp-of-minus-infinity", "normal", "(exp -inf)", "0.0", law="e^−∞ = 0", phase="norm", retire=True),
    Rule("log-of-one", "normal", "(log 1.0)", "0.0", law="log 1 = 0", phase="norm", retire=True),
    Rule(
        "cancel-factor",
        "normal",
        "(mul x (recip x) rest*)",
        "(mul rest*)",
        when="(finite x) (nonzero x)",
        law="x·x⁻¹ = 1, x finite and not 0",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        # (fewer in* 3) here and below: what a class that contains itself makes of this would get ever longer
        "cancel-nested-factor",
        "normal",
        "(mul (mul y in*) (recip y) rest*)",
        "(mul in* rest*)",
        when="(finite y) (nonzero y)",
        guard="(fewer in* 3)",
        law="(x·y)/y = x, y finite and not 0",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        "cancel-in-reciprocal",
        "normal",
        "(mul y (recip (mul y in*)) rest*)",
        "(mul (recip (mul in*)) rest*)",
        when="(finite y) (nonzero y) (nonneg y)",
        law="y/(x·y) = 1/x, y finite and positive (see reciprocal-of-product)",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        "cancel-term",
        "normal",
        "(add x (mul -1.0 x) rest*)",
        "(add rest*)",
        when="(finite x)",
        law="x − x = 0, x finite",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        "cancel-nested-term",
        "normal",
        "(add (add y in*) (mul -1.0 y) rest*)",
        "(add in* rest*)",
        when="(finite y)",
        guard="(fewer in* 3)",
        law="(x + y) − y = x, y finite",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        "cancel-across-sums",
        "normal",
        "(add (add y in*) (add (mul -1.0 y) ex*) rest*)",
        "(add (add in*) (add ex*) rest*)",
        when="(finite y)",
        law="(x + y) + (z − y) = x + z, y finite",
        numerics="needs finite",
    ),
    Rule(
        "collect-terms",
        "normal",
        "(add (mul (num v) ms*) (mul (num w) ms*) rest*)",
        "(add (mul (num (+ v w)) ms*) rest*)",
        when="(all (noinf) ms*)",
        guard="(> (abs (+ v w)) (* 1e-12 (abs v)))",
        law="vx + wx = (v+w)x, x not infinite",
        examples=("(add (mul 2.0 x y) (mul -0.5 x y) rest*)", "(add (mul 2.0 x) (mul -0.5 x) rest*)"),
        numerics="reassociates",
        phase="norm",
        retire=True,
    ),
    Rule(
        "cancel-terms",
        "normal",
        "(add (mul (num v) ms*) (mul (num w) ms*) rest*)",
        "(add rest*)",
        when="(all (finite) ms*) (< v inf) (> v -inf) (<= (abs (+ v w)) (* 1e-12 (abs v)))",
        guard="(some ms*)",
        examples=(
            "(add (mul 2.0 x y) (mul -2.0 x y) rest*)",
            "(add (mul 2.0 x) (mul -2.0 x) rest*)",
            "(add (mul 2.0 x) (mul 1.0 x) z)",
            "(add (mul inf x) (mul 1.0 x) z)",
            "(add (mul -inf x) (mul 1.0 x) z)",
        ),
        law="vx − vx = 0, x finite (v up to rounding)",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        "cancel-exponentials",
        "normal",
        "(mul (exp x) (exp (mul -1.0 x)) rest*)",
        "(mul rest*)",
        when="(finite x)",
        law="eˣ·e⁻ˣ = 1, x finite",
        numerics="needs finite",
        phase="norm",
        retire=True,
    ),
    Rule(
        "cancel-guarded",
        "normal",
        "(mul g (recip g) y (recip z) rest*)",
        "(mul y (recip z) rest*)",
        when="(regular m g) (vanish m y) (vanish m z)",
        phase="norm",
        numerics="needs finite",
        retire=True,
        examples=(
            "(mul (exp (mul -1.0 (max k s))) (recip (exp (mul -1.0 (max k s)))) (sum k (mul (exp s) v)) (recip (sum k "
            "(exp s))) rest*)",
            "(mul (exp (add (max k s) (mul -1.0 (max k s)))) (recip (exp (add (max k s) (mul -1.0 (max k s))))) (sum "
            "k (exp s)) (recip z))",
            "(mul (exp (mul -1.0 (max k s))) (recip (exp (mul -1.0 (max k s)))) (sum k (mul (exp s) v)) (recip z))",
            "(mul (exp (mul -1.0 (max k s))) (recip (exp (mul -1.0 (max k s)))) y (recip (sum k (exp s))))",
            "(mul g (recip g) (sum k (mul (exp s) v)) (recip (sum k (exp s))) (max k s))",
        ),
        law="g/g·y/z = y/z: where the maximum m is finite g is finite and not 0; where it is −∞ both sides are NaN "
        "through y/z = 0/0",
    ),
    Rule("where-same", "normal", "(where c x x)", "x", law="both branches alike", phase="norm", retire=True),
    Rule("abs-of-nonnegative", "normal", "(abs x)", "x", when="(nonneg x) (noinf x)", law="|x| = x for x ≥ 0", phase="norm"),
    Rule("double-reciprocal", "normal", "(recip (recip x))", "x", law="1/(1/x) = x", phase="norm"),
]

# ---------------------------------------------------------------- sums and products
ALGEBRA = [
    Rule(
        "flatten-product",
        "associativity",
        "(mul (mul in*) rest*)",
        "(mul in* rest*)",
        guard="(fewer in* 8) (fewer rest* 8)",
        law="(ab)c = abc",
        numerics="reassociates",
    ),
    Rule(
        "nested-constants",
        "associativity",
        "(mul (num v) (mul (num w) in*) rest*)",
        "(mul (num (* v w)) in* rest*)",
        law="constants multiply",
        numerics="reassociates",
        phase="sums",
    ),
    Rule(
        "flatten-sum",
        "associativity",
        "(add (as y (add in*)) rest*)",
        "(add in* rest*)",
        guard="(mixed y) (fewer in* 8) (fewer rest* 8)",
        law="(a+b)+c = a+b+c",
        numerics="reassociates",
        phase="sums",
    ),
    Rule(
        "reciprocal-of-product",
        "associativity",
        "(recip (mul ms*))",
        "(mul (map (recip _) ms*))",
        when="(all (nonzero) ms*)",
        law="1/(ab) = (1/a)(1/b), none 0: 1/0 has the sign of the zero, which sums and products of constants lose",
        numerics="reassociates",
    ),
    Rule(
        "reciprocal-of-nonnegative-product",
        "associativity",
        "(recip (mul ms*))",
        "(mul (map (recip _) ms*))",
        when="(all (nonneg) ms*)",
        law="1/(ab) = (1/a)(1/b) for a, b ≥ 0",
        numerics="reassociates",
    ),
    Rule(
        "reciprocal-of-multiple",
        "associativity",
        "(recip (mul (num v) rest*))",
        "(mul (num (/ 1.0 v)) (recip (mul rest*)))",
        when="(> v 0.0)",
        guard="(some rest*)",
        law="1/(vx) = (1/v)(1/x) for a constant v > 0",
        numerics="reassociates",
    ),
    Rule(
        "distribute-number",
        "distributivity",
        "(mul (num v) (add as*))",
        "(add (map (mul (num v) _) as*))",
        when="(!= v inf) (!= v -inf)",
        law="v(a+b) = va+vb for a constant v",
        numerics="reassociates",
        phase="sums",
    ),
    Rule(
        "distribute-to-part",
        "distributivity",
        "(mul (as y (add as*)) rest*)",
        "(add (mul rest* (add in*)) (mul rest* (add out*)))",
        when="(all (noinf) rest*)",
        guard="(redaxis k) (dep k y) (part as* (indep k) out* in*) (some out*) (some in*) (all (indep k) rest*)",
        law="c(a+b) = ca+cb, c not infinite: to part what does not vary along k",
        numerics="reassociates",
        phase="sums",
    ),
    Rule(
        "exp-of-parted-sum",
        "exponentials",
        "(exp (as y (add as*)))",
        "(mul (exp (add out*)) (exp (add in*)))",
        guard="(redaxis k) (dep k y) (part as* (indep k) out* in*) (some out*) (some in*) (none (partable k) in*)",
        law="exp(a+b) = exp a · exp b",
        numerics="needs bound",
    ),
    Rule("abs-of-product", "associativity", "(abs (mul ms*))", "(mul (map (abs _) ms*))", law="|ab| = |a||b|", phase="sums"),
    Rule(
        "log-of-exp-product",
        "exponentials",
        "(log (mul (exp x) rest*))",
        "(add x (log (mul rest*)))",
        when="(finite x)",
        guard="(some rest*)",
        law="log(eˣ·y) = x + log y",
        numerics="reassociates",
    ),
    Rule("log-of-exp", "exponentials", "(log (exp x))", "x", law="log eˣ = x"),
    Rule("exp-of-log", "exponentials", "(exp (log x))", "x", when="(noinf x) (nonneg x)", law="e^log x = x for x ≥ 0"),
    Rule(
        "exp-of-log-term",
        "exponentials",
        "(exp (add (log x) rest*))",
        "(mul x (exp (add rest*)))",
        when="(noinf x) (nonneg x)",
        guard="(some rest*)",
        law="e^(log x + y) = x·eʸ for x ≥ 0",
        numerics="needs bound",
    ),
    Rule(
        "exp-of-negated-log-term",
        "exponentials",
        "(exp (add (mul -1.0 (log x)) rest*))",
        "(mul (recip x) (exp (add rest*)))",
        when="(noinf x) (nonneg x) (nonzero x)",
        guard="(some rest*)",
        law="e^(y − log x) = eʸ/x for x > 0",
        numerics="needs bound",
    ),
]

# ---------------------------------------------------------------- reductions
REDUCTIONS = [
    Rule(
        "sum-factor-out",
        "factoring",
        "(sum k (mul ms*))",
        "(mul out* (sum k (mul in*)))",
        when="(part ms* (cofactor k) out* in*)",
        guard="(some out*) (some in*)",
        law="Σ c·x = c·Σ x, c not infinite",
        numerics="reassociates",
    ),
    Rule(
        "sum-factor-out-guarded",
        "factoring",
        "(sum k (mul (exp a) rest*))",
        "(mul out* (sum k (mul (exp a) in*)))",
        when="(is m (max k a)) (part rest* (regular m) out* in*) (all (indep k) out*)",
        guard="(some out*) (none (cofactor k) rest*)",
        examples=(
            "(sum k (mul (exp s) (exp (mul -1.0 (max k s))) v*))",
            "(sum k (mul (exp s) (exp (add (mul -1.0 (max k s)) c)) v*))",
            "(sum k (mul (exp s) (exp (add (max k s) (mul -1.0 (max k s)))) v*))",
            "(sum k (mul (exp s) g v*))",
        ),
        law="Σ g·eᵃ·x = g·Σ eᵃ·x, g finite where m = max a is; where m = −∞ both sides are g·0",
        numerics="needs bound",
    ),
    Rule(
        "max-shift-out",
        "factoring",
        "(max k (add as*))",
        "(add out* (max k (add in*)))",
        when="(part as* (addend k) out* in*)",
        guard="(some out*) (some in*)",
        law="max (c + x) = c + max x, c finite",
        numerics="reassociates",
        phase="sums",
    ),
    Rule(
        "min-shift-out",
        "factoring",
        "(min k (add as*))",
        "(add out* (min k (add in*)))",
        when="(part as* (addend k) out* in*)",
        guard="(some out*) (some in*)",
        law="min (c + x) = c + min x, c finite",
        numerics="reassociates",
        phase="sums",
    ),
    Rule(
        "max-of-max",
        "factoring",
        "(max k (max l x))",
        "(max l (max k x))",
        guard="(!= k l)",
        law="max max x = max max x in any order: the inner one may be the pivot of a sum",
        numerics="exact",
        phase="sums",
    ),
    Rule(
        "max-scale-out",
        "factoring",
        "(max k (mul c rest*))",
        "(mul c (max k (mul rest*)))",
        when="(indep k c) (noinf c) (nonneg c) (nonzero c)",
        guard="(some rest*)",
        examples=("(max k (mul c rest*))", "(max k (mul (where m c inf) x))", "(max k (mul (where m c -inf) x))"),
        law="max c·x = c·max x, c > 0",
        phase="sums",
    ),
    Rule(
        "max-negative-scale-out",
        "factoring",
        "(max k (mul c rest*))",
        "(mul c (min k (mul rest*)))",
        when="(indep k c) (noinf c) (hz c h) (< h 0.0)",
        guard="(some rest*)",
        examples=("(max k (mul c rest*))", "(max k (mul (where m c inf) x))", "(max k (mul (where m c -inf) x))"),
        law="max c·x = c·min x, c < 0",
        phase="sums",
    ),
    Rule(
        "min-scale-out",
        "factoring",
        "(min k (mul c rest*))",
        "(mul c (min k (mul rest*)))",
        when="(indep k c) (noinf c) (nonneg c) (nonzero c)",
        guard="(some rest*)",
        examples=("(min k (mul c rest*))", "(min k (mul (where m c inf) x))", "(min k (mul (where m c -inf) x))"),
        law="min c·x = c·min x, c > 0",
        phase="sums",
    ),
    Rule(
        "min-negative-scale-out",
        "factoring",
        "(min k (mul c rest*))",
        "(mul c (max k (mul rest*)))",
        when="(indep k c) (noinf c) (hz c h) (< h 0.0)",
        guard="(some rest*)",
        examples=("(min k (mul c rest*))", "(min k (mul (where m c inf) x))", "(min k (mul (where m c -inf) x))"),
        law="min c·x = c·max x, c < 0",
        phase="sums",
    ),
]

# ---------------------------------------------------------------- masks
MASKS = [
    Rule(
        "mask-shift-out",
        "masks",
        "(where c (as y (add as*)) -inf)",
        "(add out* (where c (add in*) -inf))",
        when="(part as* (addend k) out* in*)",
        guard="(redaxis k) (dep k y) (some out*) (some in*)",
        law="where(c, x+y, −∞) = x + where(c, y, −∞), x finite",
        numerics="needs finite",
        phase="sums",
    ),
    Rule(
        "additive-mask",
        "masks",
        "(add (where c 0.0 -inf) rest*)",
        "(where c (add rest*) -inf)",
        when="(all (masked) rest*)",
        law="x + where(c, 0, −∞) = where(c, x, −∞), x finite or −∞",
        phase="sums",
    ),
    Rule(
        "additive-mask-else",
        "masks",
        "(add (where c -inf 0.0) rest*)",
        "(where c -inf (add rest*))",
        when="(all (masked) rest*)",
        law="x + where(c, −∞, 0) = where(c, −∞, x), x finite or −∞",
        phase="sums",
    ),
    Rule(
        "mask-of-mask",
        "masks",
        "(where c (where d x y) y)",
        '(where (bi "and" c d) x y)',
        law="where(c, where(d, x, y), y) = where(c∧d, x, y)",
        phase="sums",
    ),
]

# ---------------------------------------------------------------- contractions: order of products, by their number
# of multiply-adds
CONTRACTIONS = [
    Rule(
        "reassociate",
        "contractions",
        "(sum l (mul (as p (sum j (as q (mul ab*)))) rest*))",
        "(sum j (mul a* (sum l (mul b* rest*))))",
        when="(free-of j rest*) (divide ab* (cofactor l) a* b*) (all (noinf) rest*)",
        guard="(some a*) (some b*) (some rest*) (cheaper ((vol b* rest*) (vol a* b* rest* - l)) ((vol ab*) (vol p rest*)))",
        law="(AB)C = A(BC)",
        numerics="reassociates",
        phase="contract",
    ),
    Rule(
        "interchange",
        "contractions",
        "(sum j (sum k (mul ms*)))",
        "(sum k (sum j (mul ms*)))",
        guard="(!= j k) (divide ms* (cofactor j) out* in*) (some out*) (some in*)",
        law="ΣΣ x = ΣΣ x in any order: where a factor can then leave a sum",
        numerics="reassociates",
        phase="contract",
    ),
    Rule(
        "merge-products",
        "contractions",
        "(add (sum k (mul x a)) (sum k (mul x b)) rest*)",
        "(add (sum k (mul x (add a b))) rest*)",
        when="(noinf x)",
        guard="(cheaper ((vol a b) (vol x a b)) ((vol x a) (vol x b)))",
        law="XA + XB = X(A+B)",
        numerics="reassociates",
        phase="contract",
    ),
    Rule(
        "merge-low-rank",
        "contractions",
        "(add (sum k (mul x w)) (sum r (mul (as p (sum k (mul x a))) b)) rest*)",
        "(add (sum k (mul x (add w (sum r (mul a b))))) rest*)",
        when="(free-of r x w) (free-of k b) (noinf x) (noinf b)",
        guard="(cheaper ((vol a b) (vol w a b - r)) ((vol x a) (vol p b)))",
        examples=(
            "(add (sum k (mul x w)) (sum r (mul (sum k (mul x a)) b)))",
            "(add (sum k (mul x w)) (sum r (mul (sum k (mul x a)) b)) rest*)",
        ),
        law="XW + (XA)B = X(W + AB)",
        numerics="reassociates",
        phase="contract",
    ),
    Rule(
        "distribute-factored",
        "contractions",
        "(sum k (mul (as y (add a others*)) rest*))",
        "(add (sum k (mul a rest*)) (sum k (mul (add others*) rest*)))",
        when="(all (noinf) rest*)",
        guard="(factored k a) (some others*) (all (factored k) others*) (fewer others* 3) (lacks rest* y)",
        examples=(
            "(sum k (mul (add (mul x (recip (sum k (exp y)))) (mul z (recip (sum k (exp w))))) rest*))",
            "(sum k (mul (add (mul x (recip (sum k y))) (mul z (recip (sum k w)))) rest*))",
            "(sum k (mul (add (mul x (recip (sum k y))) (mul z (recip (sum k w))) (mul u (recip (sum k v)))) c))",
        ),
        law="Σ c(ra+sb) = Σ cra + Σ csb, where r and s can leave their sums",
        numerics="reassociates",
        phase="contract",
    ),
    Rule(
        "distribute-smaller",
        "contractions",
        "(sum k (mul (add as*) rest*))",
        "(add (sum k (mul (add in*) rest*)) (sum k (mul (add out*) rest*)))",
        when="(all (noinf) rest*)",
        guard="(part as* (indep j) out* in*) (some out*) (some in*) (some rest*) (all (indep j) rest*)",
        law="Σ c(a+b) = Σ ca + Σ cb, where one side lacks an axis",
        numerics="reassociates",
        phase="contract",
    ),
]

# ---------------------------------------------------------------- tensors under other names
VIEWS = [
    Rule(
        "gather-of-constant",
        "views",
        "(gather k x i)",
        "x",
        when="(free-of k x)",
        law="what does not vary along an axis is the same at every position",
        phase="norm",
        retire=True,
    ),
    Rule(
        "view-into-product",
        "views",
        "(sum k (mul (view m (mul ms*)) rest*))",
        "(sum k (mul (map (view m _) ms*) rest*))",
        law="a product read elsewhere is the product of its factors read there",
    ),
]

# ---------------------------------------------------------------- products that share an operand, side by side in one kernel
# XA and XB that have the same axes need no rule: a kernel that computes both loads X once, which extraction prices.  The columns of
# [XA XB] are a choice of two sums rather than a sum over a chosen operand, X[A B]: their tiles are copied as they lie in memory, and an
# operand read outside of its array is 0 and no traffic, whereas an operand that is computed goes through registers.
CONCATENATE = Rule(
    "concatenate",
    "concatenation",
    "x y",
    '(view p (where (bi "lt" (iota c) (num n)) (view q x) (view r y))) '
    '(view s (where (bi "lt" (iota c) (num n)) (view q x) (view r y)))',
    when="(joined x y c n p q r s)",
    examples=(
        "(sum k (mul x z*)) (sum k (mul y z*))",
        "(sum k (mul x z)) (sum k (mul y z)) (sum k (mul u z))",
    ),
    law="XA and XB are parts of [XA XB]",
    phase="join",
)

# ---------------------------------------------------------------- splits
SPLITS = [
    Rule(
        "split-reduction",
        "splits",
        "(red f k x)",
        "(red f o (red f i x))",
        when="(splittable k o i)",
        law="⊕ is associative",
        numerics="reassociates",
        phase="split",
    ),
]

# ---------------------------------------------------------------- only where merges are derived: full distribution
EXPAND = [
    Rule(
        "distribute",
        "distributivity",
        "(mul (as z (add x y)) rest*)",
        "(add (mul x rest*) (mul y rest*))",
        when="(all (noinf) rest*)",
        guard="(some rest*) (redaxis k) (dep k z) (indep k y)",
        law="c(a+b) = ca+cb, c not infinite, where b does not vary along k",
        numerics="reassociates",
        phase="expand",
    ),
    Rule(
        "sum-of-sum",
        "distributivity",
        "(sum k (add as*))",
        "(add (map (sum k _) as*))",
        law="Σ(a+b) = Σa + Σb",
        numerics="reassociates",
        phase="expand",
    ),
    Rule(
        "sum-of-constant",
        "factoring",
        "(sum k x)",
        "(mul x (sum k 1.0))",
        when="(free-of k x)",
        law="Σ c = c·Σ 1",
        numerics="reassociates",
        phase="expand",
    ),
]

# ---------------------------------------------------------------- made by the driver, not by pattern: see folds.py and repair.py
BREAK = Rule(
    "break-dependency",
    "folds",
    "",
    "",
    law="Σ g(c, R) = Σⱼ hⱼ(r, R)·foldⱼ: a sum and the reductions that it needs are one fold, with derived h",
    numerics="reassociates",
    phase="driver",
)
SPLIT_FOLD = Rule(
    "split-fold",
    "folds",
    "",
    "",
    law="a fold is a fold over blocks of folds inside them: its merge is associative",
    numerics="reassociates",
    phase="driver",
)
PIVOT = Rule("pivot-of-fold", "folds", "", "", law="the pivot of a fold is the reduction that it follows", phase="driver")
PAYLOAD = Rule(
    "carry-payload",
    "folds",
    "",
    "",
    law="minₖ where(x = max x, p, ∞) is carried along with max x (and so for min and max in any place): what counts is at the "
    "pivot of its part, and the part's pivot is the whole's",
    phase="driver",
)
FOLDS = [BREAK, SPLIT_FOLD, PIVOT, PAYLOAD]

RULES: tuple[Rule, ...] = (*NORMAL, *ALGEBRA, *REDUCTIONS, *MASKS, *CONTRACTIONS, *VIEWS, CONCATENATE, *SPLITS, *EXPAND, *FOLDS)

# empty multisets are units; what maps in results leave behind becomes ordinary nodes
LATER = [
    "(rule ((= t (Mul ms)) (= 0 (multiset-length ms))) ((union t (Num 1.0)) (subsume (Mul ms))) :ruleset norm)",
    "(rule ((= t (Add ms)) (= 0 (multiset-length ms))) ((union t (Num 0.0)) (subsume (Add ms))) :ruleset norm)",
    *(
        f"(rule ((= t (Later{n} w ms x))) ((let m (multiset-insert ms x)) (union t ({n} m)) (set (why-{n} m) w) "
        f"(subsume (Later{n} w ms x))) :ruleset ix)"
        for n in ("Mul", "Add")
    ),
    "(rule ((= t (LaterUn w f x))) ((union t (Un f x)) (set (why-Un f x) w) (subsume (LaterUn w f x))) :ruleset ix)",
    "(rule ((= t (LaterRed w op k x))) ((union t (Red op k x)) (set (why-Red op k x) w) (subsume (LaterRed w op k "
    "x))) :ruleset ix)",
    "(rule ((= t (LaterView w m x))) ((union t (View m x)) (set (why-View m x) w) (subsume (LaterView w m x))) :ruleset ix)",
    # a view of what has none of the view's axes is the thing itself
    "(rule ((= t (View m x)) (= s (free x)) (reads m bound new) (= 0 (set-length (set-intersect s bound)))) ((union t "
    "x) (subsume (View m x))) :ruleset norm)",
]

# constants that differ by rounding are one: products of constants depend on their order in the last bit
_NEAR = "(= a (Num x)) (= b (Num y)) (< -inf x) (< x y) (< y inf) (<= (- y x) (* 1e-14 (abs x)))"
CONSTANTS = [
    f"(rule ({_NEAR} (!= y 1.0) (!= y -1.0)) ((union a b) (subsume (Num y))) :ruleset norm)",
    f"(rule ({_NEAR} (= y 1.0)) ((union a b) (subsume (Num x))) :ruleset norm)",
    f"(rule ({_NEAR} (= y -1.0)) ((union a b) (subsume (Num x))) :ruleset norm)",
]

# sizes of sets of axes, on demand
VOLUMES = [
    "(rule ((need-volume s) (= 0 (set-length s))) ((set (volume s) 1.0)) :ruleset an)",
    "(rule ((need-volume s) (= a (set-get s 0)) (= rest (set-remove s a))) ((need-volume rest) (volume-of s a rest)) "
    ":ruleset an)",
    "(rule ((volume-of s a rest) (= v (volume rest)) (= n (length a))) ((set (volume s) (* n v))) :ruleset an)",
]
