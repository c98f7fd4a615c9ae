"""What is known of values: that they are real numbers; and masks that leave nothing, in sums that go beyond their row."""

from __future__ import annotations

import math
from typing import Any

from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.real import Real, reached
from eqsat_neptune.codegen.tile import Loop, walk
from eqsat_neptune.extraction.plan import Buffer

import eqsat_neptune as en
from eqsat_neptune import terms as T
from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import add, axis_index, bi, inp, iota, mul, num, red, un, where
from eqsat_neptune.testing.masked import gradient_of_values


def test_where_a_mask_leaves_something() -> None:
    i, j = iota("i"), iota("j")
    extents = {"i": 5, "j": 7}
    assert reached(bi("le", j, i), "j", extents)
    assert not reached(bi("lt", j, i), "j", extents), "the first row has nothing"
    assert not reached(bi("lt", i, j), "i", {"i": 5, "j": 5}), "nor has the first column"
    window = bi("and", bi("le", j, i), bi("lt", add(i, mul(-1.0, j)), num(3.0)))
    assert reached(window, "j", extents)
    assert not reached(window, "j", {"i": 9, "j": 5}), "the last rows look beyond all keys"
    assert not reached(bi("le", j, add(i, num(-2.0))), "j", extents)
    assert reached(bi("le", j, add(i, num(2.0))), "j", extents)
    assert reached(bi("eq", j, i), "j", extents) and not reached(bi("eq", j, i), "j", {"i": 7, "j": 5})
    assert not reached(bi("le", mul(2.0, j), i), "j", extents), "not told: in steps"
    assert not reached(bi("lt", inp("m", (axis_index("j"),)), num(0.0)), "j", extents)


def test_folds_over_what_is_left() -> None:
    """The maximum, and a sum that counts it as 1; where some rows have nothing they are −∞ and 0."""
    x = inp("x", (axis_index("i"), axis_index("j")))
    h = T.Monoid(("max",), (((0, un("exp", T.sub(T.var("r0"), T.var("R0")))),),))
    top, total = (T.fold(h, n, "j", [where(bi("le", iota("j"), iota("i")), x, num(-math.inf)), num(1.0)]) for n in (0, 1))
    some = Real({"x": Buffer("x", (5, 7), "float32", "input")}, {"i": 5, "j": 7})
    assert some.finite(top) and some.finite(un("recip", total)) and some.finite(un("exp", T.sub(x, top)))
    first = bi("lt", iota("j"), iota("i"))
    top, total = (T.fold(h, n, "j", [where(first, x, num(-math.inf)), num(1.0)]) for n in (0, 1))
    assert some.below(top) and not some.finite(top) and some.finite(total) and not some.finite(un("recip", total))
    other = Real({"x": Buffer("x", (5, 7), "float32", "temp", ("i", "j"), ())}, {"i": 5, "j": 7})
    assert not other.finite(total)


def test_folds_that_divide_by_the_greatest() -> None:
    """Σ s/max s may be 0, where elements have both signs."""
    s = where(bi("lt", inp("x", (axis_index("i"), axis_index("j"))), num(0.0)), num(1.0), num(-1.0))
    h = T.Monoid(("max",), (((0, mul(T.var("r0"), un("recip", T.var("R0")))),),))
    total = T.fold(h, 1, "j", [s, num(1.0)])
    real = Real({"x": Buffer("x", (5, 7), "float32", "input")}, {"i": 5, "j": 7})
    assert real.finite(total) and not real.finite(un("recip", total)) and not real.finite(un("sqrt", total))


REAL = Buffer("r", (9,), "float32", "temp", ("i",), ("finite",))
POSITIVE = Buffer("p", (9,), "float32", "temp", ("i",), ("finite", "nonzero", "nonneg"))
ANY = Buffer("a", (9,), "float32", "temp", ("i",), ())
SCORE = Buffer("s", (9,), "float32", "input", (), ())


def test_what_is_known_of_values() -> None:
    real = Real({b.name: b for b in (REAL, POSITIVE, ANY, SCORE)}, {"i": 9})
    r, p, a, s = (inp(n, (axis_index("i"),)) for n in "rpas")
    for t in (r, p, un("exp", s), un("tanh", s), un("recip", p), un("rsqrt", add(mul(r, r), num(1e-6))), add(r, p), mul(r, p),
              where(bi("lt", s, num(0.0)), r, p), red("+", "i", mul(r, p)), un("log", p), un("recip", un("exp", r)), bi("max", r, p)):  # fmt: skip
        assert real.finite(t), str(t)
    for t in (a, s, num(-math.inf), un("recip", r), un("log", r), un("exp", a), mul(r, s), add(r, s), un("sqrt", r),
              where(bi("lt", r, num(0.0)), r, num(-math.inf)), un("exp", mul(-1.0, s)), un("recip", un("exp", s))):  # fmt: skip
        assert not real.finite(t), str(t)
    for t in (s, add(r, s), mul(2.0, s), red("max", "i", s), where(bi("lt", r, num(0.0)), r, num(-math.inf)), num(-math.inf)):
        assert real.below(t), str(t)
    for t in (a, mul(-1.0, s), mul(r, s), num(math.inf), un("neg", s), un("recip", r)):
        assert not real.below(t), str(t)


def _skips(plan: Any) -> int:
    tiles = (lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels)
    return sum(bool(s.constraints) for p in tiles for s in walk(p.body) if isinstance(s, Loop))


def test_sums_over_rows_skip_only_what_is_surely_zero() -> None:
    """Weights of a row without keys are NaN, for all keys.  Where every row has one, and its score is finite, a sum over rows may
    leave out what is masked."""
    case = CASES["attention_backward"]
    sure = en.optimize(en.trace(case.function("full"), *case.specs("full", n=1024)), "cuda:sm_90a").plan
    assert _skips(sure) == len([k for k in sure.kernels if k.choices.get("warpgroups")]) >= 2
    shapes = [(1, n, 128) for n in (1024, 1024, 1024)]
    specs = [*(en.TensorSpec(s, "bfloat16") for s in shapes), en.TensorSpec((1024, 1024), "bfloat16")]
    plan = en.optimize(en.trace(gradient_of_values, *specs), "cuda:sm_90a").plan
    last = plan.kernels[-1]
    (program,) = [lower(last, plan.buffers, plan.compute_dtype)]
    assert not any(s.constraints for s in walk(program.body) if isinstance(s, Loop))
    assert _skips(plan) > 0, "the statistics of each row are of what it keeps"
