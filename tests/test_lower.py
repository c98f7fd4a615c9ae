"""Lowering: hand-written kernels of every shape, lowered, executed and compared with float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from eqsat_neptune.codegen import tile
from eqsat_neptune.codegen.check import check, problems
from eqsat_neptune.codegen.lower import LoweringError, lower
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tile_kernels import SOFT, affine, close, make_plan, moments, quotient, read, run, verify

from eqsat_neptune import terms as T
from eqsat_neptune.terms import Monoid, add, bi, fold, iota, mul, num, red, sub, un, var, where

NEG = num(-math.inf)
few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def qkv(h: int, n: int, m: int, d: int, e: int, seed: int = 0) -> dict[str, np.ndarray]:
    r = rng(seed)
    return {"Q": r.standard_normal((h, n, d)), "K": r.standard_normal((h, m, d)), "V": r.standard_normal((h, m, e))}


def scores(mask: str = "all", n: int = 0, m: int = 0, cap: float = 0.0) -> T.Term:
    s = mul(red("+", "d", mul(read("Q", "h", "q", "d"), read("K", "h", "k", "d"))), 0.3)
    if cap:
        s = mul(un("tanh", mul(s, 1 / cap)), cap)
    q, k = iota("q"), iota("k")
    keep = {
        "all": None,
        "causal": bi("le", k, q),
        "causal from the end": bi("le", k, add(q, float(m - n))),
        "window": bi("and", bi("le", k, q), bi("lt", sub(q, k), 5.0)),
        "two windows": bi("or", bi("lt", k, 3.0), bi("le", k, q)),
        "nothing for some rows": bi("le", add(k, 4.0), q),
        "nothing in the first tile": bi("le", 7.0, k),
        "nothing": bi("lt", k, 0.0),
        "padding": bi("lt", k, read("length", "h")),
    }[mask]
    return s if keep is None else where(keep, s, NEG)


def attend(s: T.Term, axis: str = "k") -> T.Term:
    return quotient(fold(SOFT, 1, axis, [s, read("V", "h", "k", "e")]), fold(SOFT, 1, axis, [s, num(1.0)]))


def softmax_reference(s: np.ndarray, v: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        top = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isinf(top), 0, top))
        return p / p.sum(-1, keepdims=True) @ v


MASKS = {
    "all": lambda q, k, n, m: k >= 0,
    "causal": lambda q, k, n, m: k <= q,
    "causal from the end": lambda q, k, n, m: k <= q + m - n,
    "window": lambda q, k, n, m: (k <= q) & (q - k < 5),
    "two windows": lambda q, k, n, m: (k < 3) | (k <= q),
    "nothing for some rows": lambda q, k, n, m: k + 4 <= q,
    "nothing in the first tile": lambda q, k, n, m: k >= 7,
    "nothing": lambda q, k, n, m: k < 0,
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (13, 13, 4), (9, 22, 8), (22, 9, 5), (16, 16, 16)])
def test_one_pass_over_the_keys(mask: str, cap: float, sizes: tuple[int, int, int]) -> None:
    n, m, tk = sizes
    x = qkv(2, n, m, 3, 5)
    roles = dict(h=("grid", 1), q=("grid", 4), k=("loop", tk), d=("whole", 0), e=("whole", 0))
    plan = make_plan([({"O": (attend(scores(mask, n, m, cap)), ("h", "q", "e"))}, roles)], dict(h=2, q=n, k=m, d=3, e=5), x)
    got = run(plan, x)["O"]
    s = x["Q"] @ x["K"].swapaxes(-1, -2) * 0.3
    s = cap * np.tanh(s / cap) if cap else s
    s = np.where(MASKS[mask](np.arange(n)[:, None], np.arange(m)[None], n, m), s, -np.inf)
    close(got, softmax_reference(s, x["V"]))


def test_one_fold_makes_one_loop_and_its_mask_bounds_it() -> None:
    x = qkv(1, 8, 8, 2, 2)
    roles = dict(h=("grid", 1), q=("grid", 4), k=("loop", 4), d=("whole", 0), e=("whole", 0))
    plan = make_plan([({"O": (attend(scores("window")), ("h", "q", "e"))}, roles)], dict(h=1, q=8, k=8, d=2, e=2), x)
    p = check(lower(plan.kernels[0], plan.buffers, "float64"))
    loops = [s for s in tile.walk(p.body) if isinstance(s, tile.Loop)]
    assert len(loops) == 1 and len(loops[0].constraints) == 2
    assert [c.kind for c in loops[0].carries] == ["pivot", "linear", "linear"]
    assert {str(c) for c in loops[0].constraints} == {"q+-1·k", "-1·q+k+4"}
    exps = [s for s in tile.walk(p.body) if isinstance(s, tile.Map) and s.fn == "exp"]
    assert len(exps) == 2  # weights and rescale, shared between numerator and denominator


def test_padding_given_as_data() -> None:
    x = qkv(3, 5, 11, 2, 2) | {"length": np.array([11.0, 4.0, 0.0])}
    roles = dict(h=("grid", 1), q=("whole", 0), k=("loop", 4), d=("whole", 0), e=("whole", 0))
    ext = dict(h=3, q=5, k=11, d=2, e=2)
    verify({"O": (attend(scores("padding")), ("h", "q", "e"))}, roles, ext, x)


@few
@given(st.data())
def test_attention_under_any_roles(data: st.DataObject) -> None:
    n, d, e, h = (data.draw(st.integers(1, 9)) for _ in range(4))
    m = data.draw(st.integers(2, 9))
    ext = dict(h=h, q=n, k=m, d=d, e=e)
    mask = data.draw(st.sampled_from([*MASKS]))
    roles = {
        a: (
            data.draw(st.sampled_from(["grid", "whole", "loop"] if a in "hqe" else ["loop", "whole"])),
            data.draw(st.integers(1, ext[a])),
        )
        for a in "hqekd"
    }
    order = data.draw(st.permutations(list(roles)))
    x = qkv(h, n, m, d, e, data.draw(st.integers(0, 99)))
    out = {"O": (attend(scores(mask, n, m, data.draw(st.sampled_from([0.0, 1.5])))), data.draw(st.permutations(["h", "q", "e"])))}
    try:
        verify({k: (t, tuple(a)) for k, (t, a) in out.items()}, {a: roles[a] for a in order}, ext, x)
    except LoweringError as err:  # the only ones that may be refused: a stream inside out
        assert "outside its loops" in str(err)


# ------------------------------------------------------------------ splits


def split_kernels(s: T.Term, roles: dict, blocks: int) -> list:
    one = num(1.0)
    parts = {
        "tN": (fold(SOFT, 1, "k.i", [s, read("V", "h", "k", "e")]), ("h", "q", "k.o", "e")),
        "tD": (fold(SOFT, 1, "k.i", [s, one]), ("h", "q", "k.o")),
        "tM": (fold(SOFT, 0, "k.i", [s, one]), ("h", "q", "k.o")),
    }
    tm = read("tM", "h", "q", "k.o")
    o = quotient(
        fold(SOFT, 1, "k.o", [tm, read("tN", "h", "q", "k.o", "e")]), fold(SOFT, 1, "k.o", [tm, read("tD", "h", "q", "k.o")])
    )
    rest = {a: r for a, r in roles.items() if a in "hqe"}
    return [(parts, roles), ({"O": (o, ("h", "q", "e"))}, rest | {"k.o": ("loop", 3) if blocks % 2 else ("whole", 0)})]


@pytest.mark.parametrize("mask", ["all", "causal", "nothing in the first tile", "nothing for some rows", "nothing"])
@pytest.mark.parametrize("m,block", [(24, 8), (23, 8), (17, 8), (5, 8), (30, 4), (1, 4), (4, 4)])
@pytest.mark.parametrize("tile_o,roles_i", [(1, ("loop", 4)), (2, ("loop", 4)), (1, ("whole", 0)), (3, ("whole", 0))])
def test_split_and_merge(mask: str, m: int, block: int, tile_o: int, roles_i: tuple[str, int]) -> None:
    blocks = -(-m // block) + 1  # one block too many: it is empty
    n = 6
    x = qkv(2, n, m, 3, 4)
    ext = {"h": 2, "q": n, "k": m, "d": 3, "e": 4, "k.o": blocks, "k.i": block}
    roles = {"h": ("grid", 1), "q": ("grid", 4), "k.o": ("grid", tile_o), "k.i": roles_i, "d": ("whole", 0), "e": ("whole", 0)}
    plan = make_plan(split_kernels(scores(mask, n, m), roles, blocks), ext, x)
    s = np.where(MASKS[mask](np.arange(n)[:, None], np.arange(m)[None], n, m), x["Q"] @ x["K"].swapaxes(-1, -2) * 0.3, -np.inf)
    close(run(plan, x)["O"], softmax_reference(s, x["V"]))


@pytest.mark.parametrize("o_role", [("loop", 1), ("loop", 2), ("whole", 0)])
@pytest.mark.parametrize("i_role", [("loop", 2), ("whole", 0)])
@pytest.mark.parametrize("m", [8, 7, 5, 9])
def test_both_parts_of_an_axis_in_one_block(o_role: tuple, i_role: tuple, m: int) -> None:
    """Σ over blocks of Σ in the block, of values that would be NaN or inf where elements do not exist."""
    x = {"X": rng().standard_normal((3, m)) + 3}
    body = un("recip", read("X", "q", "k"))
    total = red("+", "k.o", red("+", "k.i", body))
    top = red("max", "k.o", red("max", "k.i", un("neg", body)))
    ext = {"q": 3, "k": m, "k.o": -(-m // 4), "k.i": 4}
    roles = {"q": ("grid", 2), "k.o": o_role, "k.i": i_role}
    verify({"S": (total, ("q",)), "M": (top, ("q",))}, roles, ext, x, {"k": 4})


@pytest.mark.parametrize("m", [8, 7, 5])
def test_products_over_a_ragged_split(m: int) -> None:
    x = {"X": rng().standard_normal((3, m)) + 3, "Y": rng(1).standard_normal((m, 2)) + 3}
    body = mul(un("recip", read("X", "q", "k")), un("log", read("Y", "k", "e")))
    ext = {"q": 3, "e": 2, "k": m, "k.o": 2, "k.i": 4}
    roles = {"q": ("grid", 2), "e": ("whole", 0), "k.o": ("whole", 0), "k.i": ("whole", 0)}
    out = {"S": (red("+", "k.o", red("+", "k.i", body)), ("q", "e")), "P": (red("+", "k.i", body), ("k.o", "q", "e"))}
    verify(out, roles, ext, x, {"k": 4})


@pytest.mark.parametrize("m", [8, 7])
def test_a_whole_axis_is_written_by_its_parts(m: int) -> None:
    x = {"X": rng().standard_normal((3, m))}
    y = add(read("X", "q", "k"), iota("k"))
    ext = {"q": 3, "k": m, "k.o": 2, "k.i": 4}
    for roles in (
        {"q": ("grid", 2), "k.o": ("grid", 1), "k.i": ("whole", 0)},
        {"q": ("grid", 2), "k.o": ("whole", 0), "k.i": ("whole", 0)},
        {"q": ("whole", 0), "k.o": ("grid", 1), "k.i": ("loop", 2)},
        {"q": ("whole", 0), "k.o": ("grid", 2), "k.i": ("loop", 2)},
    ):
        verify({"Y": (y, ("q", "k"))}, roles, ext, x, {"k": 4})


# ------------------------------------------------------------------ other folds


@pytest.mark.parametrize("n", [1, 3, 8, 17])
@pytest.mark.parametrize("role", [("loop", 4), ("loop", 1), ("whole", 0)])
def test_variance_in_one_pass(n: int, role: tuple[str, int]) -> None:
    x = {"X": 1000 + 1e-3 * rng().standard_normal((5, n))}
    c = read("X", "i", "k")
    out = {
        "mean": (moments(0, "k", c), ("i",)),
        "count": (moments(1, "k", c), ("i",)),
        "var": (mul(moments(3, "k", c), 1 / n), ("i",)),
    }
    plan = make_plan([(out, dict(i=("grid", 2), k=role))], dict(i=5, k=n), x)
    got = run(plan, x)
    close(got["mean"], x["X"].mean(1))
    assert np.array_equal(got["count"], np.full(5, float(n)))
    exact = x["X"].var(1)
    assert np.all(np.abs(got["var"] - exact) <= 1e-9 * exact)
    if role[0] == "loop":
        p = lower(plan.kernels[0], plan.buffers, "float64")
        assert sum(isinstance(s, tile.Loop) for s in tile.walk(p.body)) == 1


def test_split_variance_merges_counts() -> None:
    n, block = 23, 4
    x = {"X": 1000 + 1e-3 * rng().standard_normal((5, n))}
    ext = {"i": 5, "k": n, "k.o": 7, "k.i": block}
    c = read("X", "i", "k")
    parts = {f"t{j}": (moments(j, "k.i", c), ("i", "k.o")) for j in range(4)}
    merged = T.fold(moments(0, "k.o", c).attr[0], 3, "k.o", [read(f"t{j}", "i", "k.o") for j in range(4)])
    for tile_o in (1, 3):
        for role in (("loop", 2), ("whole", 0)):
            plan = make_plan(
                [
                    (parts, {"i": ("grid", 2), "k.o": ("grid", tile_o), "k.i": ("loop", 2)}),
                    ({"S": (merged, ("i",))}, {"i": ("grid", 2), "k.o": role}),
                ],
                ext,
                x,
            )
            close(run(plan, x)["S"], ((x["X"] - x["X"].mean(1, keepdims=True)) ** 2).sum(1), 1e-9)


def test_weighted_mean_where_the_count_is_a_softmax_weight() -> None:
    """Pivots: the running maximum, and the mean of v weighted with exp(s − max).  x1 = Σ w·(v − mean)²."""
    w, d = un("exp", sub(var("r0"), var("R0"))), sub(var("r1"), var("R1"))
    h = Monoid(("max", ("mean", 0)), (((0, w),), ((1, w), (2, mul(2.0, w, d)), (0, mul(w, d, d))), ((2, w), (0, mul(w, d)))))
    x = {"S": rng().standard_normal((4, 11)) * 3, "V": 50 + rng(1).standard_normal((4, 11))}
    s, v = read("S", "i", "k"), read("V", "i", "k")
    args = [s, v, num(1.0), num(0.0), num(0.0)]
    for role in (("loop", 4), ("loop", 3), ("whole", 0)):
        plan = make_plan([({"Y": (fold(h, 3, "k", args), ("i",))}, dict(i=("grid", 2), k=role))], dict(i=4, k=11), x)
        p = np.exp(x["S"] - x["S"].max(1, keepdims=True))
        mean = (p * x["V"]).sum(1, keepdims=True) / p.sum(1, keepdims=True)
        close(run(plan, x)["Y"], (p * (x["V"] - mean) ** 2).sum(1), 1e-10)


def backward() -> tuple[Monoid, T.Term]:
    """dQ of attention in one pass: r0 = max s; x0 = Σe, x1 = Σ e·dP, r1 = D = x1/x0 (a function of other components),
    x2 = Σ e·(dP − D)·K  moves with D by x2(R) = w·(x2 + (r1 − R1)·x3), x3 = Σ e·K."""
    w = un("exp", sub(var("r0"), var("R0")))
    y = mul(var("y1"), un("recip", var("y0")))
    h = Monoid(("max", ("fn", y)), (((0, w),), ((1, w),), ((2, w), (3, mul(w, sub(var("r1"), var("R1"))))), ((3, w),)))
    return h, y


@pytest.mark.parametrize("role", [("loop", 4), ("loop", 3), ("whole", 0)])
@pytest.mark.parametrize("mask", ["all", "causal"])
def test_backward_in_one_pass(role: tuple[str, int], mask: str) -> None:
    n, d = 10, 3
    r = rng()
    x = {k: r.standard_normal((1, n, d)) for k in ("Q", "K", "V", "G")}
    s = scores(mask)
    dp = red("+", "e", mul(read("G", "h", "q", "e"), read("V", "h", "k", "e")))
    h, _ = backward()
    kk = read("K", "h", "k", "c")
    one = num(1.0)
    args = [s, dp, one, dp, num(0.0), kk]  # on one element D = dP, so e·(dP − D)·K = 0
    dq = mul(quotient(fold(h, 4, "k", args), fold(h, 2, "k", args)), 0.3)
    roles = dict(h=("grid", 1), q=("grid", 4), k=role, d=("whole", 0), e=("whole", 0), c=("whole", 0))
    plan = make_plan([({"dQ": (dq, ("h", "q", "c"))}, roles)], dict(h=1, q=n, k=n, d=d, e=d, c=d), x)
    got = run(plan, x)["dQ"]
    sc = x["Q"][0] @ x["K"][0].T * 0.3
    sc = np.where(MASKS[mask](np.arange(n)[:, None], np.arange(n)[None], n, n), sc, -np.inf)
    p = np.exp(sc - sc.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    g = x["G"][0] @ x["V"][0].T
    ds = p * (g - (p * g).sum(1, keepdims=True))
    close(got[0], ds @ x["K"][0] * 0.3, 1e-10)
    if role[0] == "loop":
        lowered = lower(plan.kernels[0], plan.buffers, "float64")
        assert sum(isinstance(s, tile.Loop) for s in tile.walk(lowered.body)) == 1


def test_backward_without_a_running_maximum() -> None:
    """Weights exp(s), bounded by a soft cap; in the first tile some rows have no key, so that D = 0/0 there."""
    n, d = 12, 3
    y = mul(var("y1"), un("recip", var("y0")))
    one = num(1.0)
    h = Monoid((("fn", y),), (((0, one),), ((1, one),), ((2, one), (3, sub(var("r0"), var("R0")))), ((3, one),)))
    r = rng()
    x = {k: r.standard_normal((1, n, d)) for k in ("Q", "K", "V", "G")}
    e = un("exp", scores("nothing in the first tile", cap=2.0))
    dp = red("+", "e", mul(read("G", "h", "q", "e"), read("V", "h", "k", "e")))
    kk = read("K", "h", "k", "c")
    args = [dp, e, mul(e, dp), num(0.0), mul(e, kk)]
    dq = quotient(fold(h, 3, "k", args), fold(h, 1, "k", args))
    for role in (("loop", 4), ("loop", 5), ("whole", 0)):
        roles = dict(h=("grid", 1), q=("grid", 4), k=role, d=("whole", 0), e=("whole", 0), c=("whole", 0))
        plan = make_plan([({"dQ": (dq, ("h", "q", "c"))}, roles)], dict(h=1, q=n, k=n, d=d, e=d, c=d), x)
        p = np.exp(2.0 * np.tanh(x["Q"][0] @ x["K"][0].T * 0.3 / 2.0)) * (np.arange(n) >= 7)
        p /= p.sum(1, keepdims=True)
        g = x["G"][0] @ x["V"][0].T
        close(run(plan, x)["dQ"][0], p * (g - (p * g).sum(1, keepdims=True)) @ x["K"][0], 1e-10)


@pytest.mark.parametrize("masked", [0, 7])
def test_a_pivot_that_is_infinite_where_nothing_counts(masked: int) -> None:
    """Σ e^(s − M)·(v − log Z) in one pass: log Z is −∞ as long as all that was seen is masked, and 0·∞ must not come of it."""
    n = 12
    e = un("exp", sub(var("r0"), var("R0")))
    h = Monoid(("max", ("fn", un("log", var("y0")))), (((0, e),), ((0, mul(e, sub(var("r1"), var("R1")))), (1, e))))
    x = {"S": rng().standard_normal((n, n)), "V": rng().standard_normal((n,))}
    x["S"][:, :masked] = -np.inf
    total = fold(h, 3, "k", [read("S", "q", "k"), num(0.0), num(1.0), read("V", "k")])
    p = np.exp(x["S"] - x["S"].max(1, keepdims=True))
    want = (p * (x["V"] - np.log(p.sum(1, keepdims=True)))).sum(1)
    for role in (("loop", 4), ("loop", 5), ("whole", 0)):
        plan = make_plan([({"O": (total, ("q",))}, dict(q=("grid", 4), k=role))], dict(q=n, k=n), x)
        close(run(plan, x)["O"], want, 1e-10)


def test_what_no_pivot_weighs_is_not_skipped() -> None:
    """A joint monoid that also counts all elements: the mask of the maximum must not bound the loop."""
    w = un("exp", sub(var("r0"), var("R0")))
    h = Monoid(("max",), (((0, w), (1, num(0.5))), ((1, num(1.0)),)))
    h2 = Monoid(("max",), (((0, w), (1, mul(0.5, w))), ((1, w),)))
    x = {"S": rng().standard_normal((8, 12))}
    s = where(bi("le", iota("k"), iota("i")), read("S", "i", "k"), NEG)
    for monoid, bounded in ((h, False), (h2, True)):
        outs = {"Y": (fold(monoid, 1, "k", [s, num(1.0), num(1.0)]), ("i",))}
        plan = make_plan([(outs, dict(i=("grid", 4), k=("loop", 4)))], dict(i=8, k=12), x)
        (loop,) = (z for z in tile.walk(lower(plan.kernels[0], plan.buffers, "float64").body) if isinstance(z, tile.Loop))
        assert bool(loop.constraints) == bounded


def test_a_component_may_move_by_one_that_comes_later() -> None:
    d = sub(var("r0"), var("R0"))
    h = Monoid((("mean", 2),), (((0, num(1.0)), (1, mul(2.0, d)), (2, mul(d, d))), ((1, num(1.0)), (2, d)), ((2, num(1.0)),)))
    x = {"X": 1000 + rng().standard_normal((5, 11))}
    y = fold(h, 1, "k", [read("X", "i", "k"), num(0.0), num(0.0), num(1.0)])
    for role in (("loop", 4), ("whole", 0)):
        plan = make_plan([({"Y": (y, ("i",))}, dict(i=("grid", 2), k=role))], dict(i=5, k=11), x)
        close(run(plan, x)["Y"], x["X"].var(1) * 11, 1e-10)


def test_reductions_of_what_is_constant_along_their_axis() -> None:
    x = {"C": rng().standard_normal(4), "A": rng(1).standard_normal((4, 7))}
    c, a = read("C", "i"), read("A", "i", "k")
    outs = {
        "sum": (red("+", "k", c), ("i",)),
        "product": (red("*", "k", c), ("i",)),
        "top": (red("max", "k", c), ("i",)),
        "seven": (red("+", "k", num(1.0)), ("i",)),
        "soft": (fold(SOFT, 1, "k", [c, a]), ("i",)),
        "count": (fold(SOFT, 1, "k", [c, num(1.0)]), ("i",)),
        "scaled": (red("+", "k", mul(c, 2.0)), ("i",)),
    }
    for role in (("loop", 3), ("whole", 0)):
        got = verify(outs, dict(i=("grid", 3), k=role), dict(i=4, k=7), x)
        assert (got["seven"] == 7).all()


@pytest.mark.parametrize("m, block", [(7, 3), (12, 4), (5, 8)])
def test_a_short_last_block_counts_what_it_has(m: int, block: int) -> None:
    """Sums over the places of a block of what is the same at all of them."""
    x = {"C": rng().standard_normal(4)}
    parts = {"k.o": -(-m // block), "k.i": block}
    sizes = red("+", "k.i", num(1.0))
    outs = {
        "sizes": (sizes, ("k.o",)),
        "weighed": (red("+", "k.i", read("C", "i")), ("i", "k.o")),
        "counts": (fold(SOFT, 1, "k.i", [read("C", "i"), num(1.0)]), ("i", "k.o")),
    }
    sums = {
        "total": (red("+", "k.o", mul(sizes, sizes)), ()),
        "soft": (fold(SOFT, 1, "k.o", [fold(SOFT, j, "k.i", [read("C", "i"), num(1.0)]) for j in (0, 1)]), ("i",)),
    }
    for i_role in (("loop", 1), ("whole", 0)):
        for o_role in (("grid", 1), ("loop", 1), ("loop", 2), ("whole", 0)):
            every = outs if o_role[0] == "grid" else outs | sums
            roles: dict[str, tuple[str, int]] = {"k.o": o_role, "k.i": i_role}
            for name, (t, axes) in every.items():
                mine = roles | ({"i": ("grid", 3)} if "i" in axes else {})
                verify({name: (t, axes)}, mine, dict(i=4, k=m) | parts, x, {"k": block})


@pytest.mark.parametrize("role", [("loop", 1), ("whole", 0)])
def test_one_key_that_is_masked(role: tuple[str, int]) -> None:
    x = qkv(2, 3, 1, 4, 5)
    t = [fold(SOFT, 1, "k", [scores("nothing"), v]) for v in (read("V", "h", "k", "e"), num(1.0))]
    roles = dict(h=("grid", 1), q=("whole", 0), k=role, d=("whole", 0), e=("whole", 0))
    got = verify({"O": (t[0], ("h", "q", "e")), "L": (t[1], ("h", "q"))}, roles, dict(h=2, q=3, k=1, d=4, e=5), x)
    assert (got["O"] == 0).all() and (got["L"] == 0).all()


def divisions(outputs: dict[str, tuple[T.Term, tuple[str, ...]]], roles: dict, extents: dict, inputs: dict) -> list[float | None]:
    """Constants that something is divided by (None: by what is no constant)."""
    plan = make_plan([(outputs, roles)], extents, inputs)
    (kernel,) = plan.kernels
    body = list(tile.walk(lower(kernel, plan.buffers).body))
    consts = {s.out.id: s.value for s in body if isinstance(s, tile.Const)}
    return [consts.get(s.args[1].id) for s in body if isinstance(s, tile.Map) and s.fn == "div"]


def test_means_are_divided() -> None:
    """1/n is rounded and n is not; but only what stands for a row is worth a division."""
    x = {"X": rng().standard_normal((5, 50)), "W": rng(1).standard_normal((50, 6))}
    X, W, roles, extents = read("X", "i", "k"), read("W", "k", "j"), dict(i=("grid", 2), k=("loop", 7)), dict(i=5, k=50)
    row = red("+", "k", X)
    both = roles | dict(j=("whole", 0)), extents | dict(j=6)
    assert divisions({"Y": (mul(row, 1 / 50), ("i",))}, roles, extents, x) == [50.0]
    assert divisions({"Y": (mul(-1 / 49, red("+", "k", mul(X, X))), ("i",))}, roles, extents, x) == [-49.0]
    assert divisions({"Y": (mul(1 / 50, sub(row, 1.0), row), ("i",))}, roles, extents, x) == [50.0]
    assert divisions({"Y": (mul(1 / 50, row, red("+", "k", mul(X, W))), ("i", "j"))}, *both, x) == [50.0]
    assert divisions({"Y": (mul(moments(3, "k", X), 1 / 50), ("i",))}, roles, extents, x) == [None, 50.0]  # a carried mean has a count
    for t in (mul(row, 1 / 64), mul(row, -1 / 64), mul(row, 0.03), mul(row, 2.0**-25 / 3), mul(row, 50.0)):
        assert divisions({"Y": (t, ("i",))}, roles, extents, x) == []
    assert divisions({"Y": (mul(0.1, red("+", "k", mul(X, W))), ("i", "j"))}, *both, x) == []
    assert divisions({"Y": (red("+", "k", mul(0.1, X)), ("i",))}, roles, extents, x) == []
    for role in (("loop", 7), ("whole", 0)):
        verify({"Y": (mul(1 / 50, row, red("+", "k", mul(X, W))), ("i", "j"))}, both[0] | dict(k=role), both[1], x)
    # a sum that an earlier kernel left in memory
    kernels = [({"S": (row, ("i",))}, roles), ({"Y": (sub(X, mul(read("S", "i"), 1 / 50)), ("i", "k"))}, dict(i=("grid", 2), k=("whole", 0)))]
    plan = make_plan(kernels, extents, x)
    assert any(isinstance(s, tile.Map) and s.fn == "div" for s in tile.walk(lower(plan.kernels[1], plan.buffers).body))
    close(run(plan, x)["Y"], x["X"] - x["X"].mean(1, keepdims=True))


def test_chains_of_thousands_of_operations() -> None:
    x = {"X": rng().standard_normal((3, 5))}
    y = read("X", "i", "k")
    keep = where(bi("le", iota("k"), iota("i")), y, NEG)
    for n in range(1200):
        y = add(mul(y, 0.999), un("sin", y)) if n % 2 else un("tanh", y)
        keep = add(keep, 0.001)
    outs = {"Y": (y, ("i", "k")), "top": (red("max", "k", keep), ("i",))}
    verify(outs, dict(i=("grid", 2), k=("loop", 2)), dict(i=3, k=5), x, tolerance=1e-9)


def test_division_by_a_pivot() -> None:
    """x0(R) = x0·r/R: quantisation to the running maximum."""
    h = Monoid(("max",), (((0, mul(var("r0"), un("recip", var("R0")))),),))
    x = {"A": np.abs(rng().standard_normal((3, 9))) + 0.1, "B": rng(1).standard_normal((3, 9))}
    a, b = read("A", "i", "k"), read("B", "i", "k")
    y = fold(h, 1, "k", [a, mul(b, un("recip", a))])  # Σ b/a · a/R
    plan = make_plan([({"Y": (y, ("i",))}, dict(i=("grid", 2), k=("loop", 4)))], dict(i=3, k=9), x)
    close(run(plan, x)["Y"], (x["B"] / x["A"].max(1, keepdims=True)).sum(1))


# ------------------------------------------------------------------ placement of loops


def test_two_dependent_reductions_make_two_loops() -> None:
    x = {"X": rng().standard_normal((5, 11))}
    s = read("X", "i", "k")
    m = red("max", "k", s)
    p = un("exp", sub(s, m))
    y = mul(p, un("recip", red("+", "k", p)))
    out = {"Y": (y, ("i", "k"))}
    for role, loops in ((("loop", 4), 3), (("whole", 0), 0)):
        roles = dict(i=("grid", 2), k=role)
        verify(out, roles, dict(i=5, k=11), x)
        plan = make_plan([(out, roles)], dict(i=5, k=11), x)
        p_ = lower(plan.kernels[0], plan.buffers, "float64")
        assert sum(isinstance(s, tile.Loop) for s in p_.body) == loops


def test_streamed_inside_streamed() -> None:
    x = qkv(2, 7, 9, 5, 3)
    for d in (("loop", 2), ("whole", 0)):
        for order in ("hqdke", "hqkde"):
            roles = dict(h=("grid", 1), q=("grid", 3), k=("loop", 4), d=d, e=("whole", 0))
            verify(
                {"O": (attend(scores("causal")), ("h", "q", "e"))}, {a: roles[a] for a in order}, dict(h=2, q=7, k=9, d=5, e=3), x
            )


def test_rows_reduced_and_streamed_out() -> None:
    x = {"X": rng().standard_normal((6, 13)), "W": rng(1).standard_normal(13)}
    c = read("X", "i", "k")
    y = mul(c, un("rsqrt", add(mul(red("+", "k", mul(c, c)), 1 / 13), 1e-6)), read("W", "k"))
    for k in (("loop", 4), ("whole", 0)):
        verify({"Y": (y, ("i", "k")), "norm": (red("+", "k", mul(c, c)), ("i",))}, dict(i=("grid", 4), k=k), dict(i=6, k=13), x)


def test_product_after_a_row_statistic() -> None:
    x = {"X": rng().standard_normal((6, 13)), "W": rng(1).standard_normal((13, 7))}
    c = read("X", "i", "k")
    y = mul(red("+", "k", mul(c, read("W", "k", "j"))), un("rsqrt", red("+", "k", mul(c, c))))
    for j in (("grid", 3), ("whole", 0), ("loop", 3)):
        for k in (("loop", 4), ("whole", 0)):
            verify({"Y": (y, ("i", "j"))}, dict(i=("grid", 4), j=j, k=k), dict(i=6, j=7, k=13), x)


def test_products_of_several_factors() -> None:
    r = rng()
    x = {
        "A": r.standard_normal((4, 5)),
        "B": r.standard_normal((5, 6)),
        "C": r.standard_normal((4,)),
        "D": r.standard_normal((4, 5, 6)),
    }
    a, b, c, d = read("A", "i", "k"), read("B", "k", "j"), read("C", "i"), read("D", "i", "k", "j")
    outs = {
        "chain": (red("+", "k", mul(a, b, c, 2.0)), ("i", "j")),
        "batch": (red("+", "k", mul(d, a)), ("i", "j")),
        "dot": (red("+", "k", mul(a, a)), ("i",)),
        "both": (red("+", "j", red("+", "k", mul(a, b, d))), ("i",)),
        "cube": (red("+", "k", mul(a, a, a)), ("i",)),
        "scalar": (red("+", "i", red("+", "k", mul(a, c))), ()),
        "prod": (red("*", "k", a), ("i",)),
        "min": (red("min", "j", red("max", "k", d)), ("i",)),
    }
    for i in (("grid", 2), ("whole", 0), ("loop", 3)):
        for k in (("loop", 2), ("whole", 0)):
            for j in (("whole", 0), ("loop", 4)):
                chosen = {n: o for n, o in outs.items() if not (i[0] == "grid" and n == "scalar")}
                for name, o in chosen.items():
                    needs = {ax for t in T.postorder([o[0]]) for ax in t.free}
                    roles = {ax: role for ax, role in dict(i=i, k=k, j=j).items() if ax in needs}
                    verify({name: o}, roles, dict(i=4, k=5, j=6), x)


def test_several_stores_share_what_they_can() -> None:
    r = rng()
    x = {"X": r.standard_normal((5, 6)), "A": r.standard_normal((6, 4)), "B": r.standard_normal((6, 3))}
    c = read("X", "i", "k")
    outs = {
        "P": (red("+", "k", mul(c, read("A", "k", "a"))), ("i", "a")),
        "R": (red("+", "k", mul(c, read("B", "k", "b"))), ("b", "i")),
    }
    plan = make_plan([(outs, dict(i=("grid", 2), k=("loop", 4), a=("whole", 0), b=("whole", 0)))], dict(i=5, k=6, a=4, b=3), x)
    p = lower(plan.kernels[0], plan.buffers, "float64")
    assert sum(isinstance(s, tile.Load) and s.buffer == "X" for s in tile.walk(p.body)) == 1
    assert sum(isinstance(s, tile.Loop) for s in tile.walk(p.body)) == 1
    got = run(plan, x)
    close(got["P"], x["X"] @ x["A"])
    close(got["R"], (x["X"] @ x["B"]).T)


@pytest.mark.parametrize("role", [("grid", 3), ("whole", 0), ("loop", 3)])
def test_gathers(role: tuple[str, int]) -> None:
    x = {"E": rng().standard_normal((10, 4)), "I": rng(1).integers(0, 10, (7,)), "J": rng(2).integers(0, 10, (7, 4))}
    table = read("E", "v", "c")
    rows = T.gather(table, "v", read("I", "t"))
    each = T.gather(table, "v", read("J", "t", "c"))
    for name, t in {"rows": rows, "each": each}.items():
        verify({name: (t, ("t", "c"))}, dict(t=role, c=("whole", 0)), dict(t=7, c=4, v=10), x)
    pooled = red("max", "t", rows)
    verify({"pooled": (pooled, ("c",))}, dict(t=("loop", 3), c=("whole", 0)), dict(t=7, c=4, v=10), x)


def test_reads_through_affine_indices() -> None:
    x = {"X": rng().standard_normal(12), "Y": rng(1).standard_normal((5, 9)), "F": rng(2).standard_normal(3)}
    outs = {
        "reversed": read("X", affine(11, i=-1)),
        "every other": read("X", affine(1, i=2)) if True else None,
        "shifted": read("X", affine(-4, i=1)),
        "convolved": red("+", "t", mul(read("X", affine(-1, i=1, t=1)), read("F", "t"))),
        "diagonal": read("Y", affine(0, i=1), affine(3, i=1)),
    }
    for i in (("grid", 3), ("whole", 0), ("loop", 2)):
        for name, y in outs.items():
            n = 5 if name in ("every other", "diagonal") else 12
            roles = dict(i=i) | (dict(t=("whole", 0)) if name == "convolved" else {})
            verify({name: (y, ("i",))}, roles, dict(i=n, t=3), x)


def test_positions_and_masks_of_every_kind() -> None:
    x = {"X": rng().standard_normal((7, 9))}
    i, k, c = iota("i"), iota("k"), read("X", "i", "k")
    conditions = [
        bi("le", k, i),
        bi("lt", k, i),
        bi("eq", k, i),
        bi("ne", k, i),
        un("not", bi("le", k, i)),
        bi("and", bi("le", k, i), bi("le", i, add(k, 3.0))),
        bi("or", bi("le", k, i), bi("eq", k, 8.0)),
        bi("xor", bi("le", k, i), bi("lt", i, 3.0)),
        mul(bi("le", k, i), bi("le", 2.0, k)),
        bi("le", mul(2.0, k), add(i, 1.0)),
        bi("le", mul(0.5, k), i),
        bi("lt", c, 0.0),
        c,
    ]
    outs = {}
    for n, cond in enumerate(conditions):
        outs[f"w{n}"] = (where(cond, c, num(2.0)), ("i", "k"))
        outs[f"v{n}"] = (where(cond, num(2.0), c), ("k", "i"))
        outs[f"m{n}"] = (mul(cond, add(c, 1.0)), ("i", "k"))
        outs[f"s{n}"] = (red("+", "k", where(cond, c, num(0.0))), ("i",))
        outs[f"x{n}"] = (red("max", "k", where(cond, c, NEG)), ("i",))
        outs[f"p{n}"] = (add(cond, cond), ("i", "k"))
    outs["pos"] = (add(mul(2.0, i), mul(-3.0, k), 0.5), ("i", "k"))
    for ri, rk in ((("grid", 3), ("loop", 4)), (("loop", 2), ("whole", 0)), (("whole", 0), ("loop", 4))):
        verify(outs, dict(i=ri, k=rk), dict(i=7, k=9), x)


# ------------------------------------------------------------------ random kernels


def random_term(draw: st.DrawFn, depth: int, axes: tuple[str, ...]) -> T.Term:
    """A term over (some of) the axes; reductions range over k and d."""
    if depth == 0:
        return draw(
            st.sampled_from(
                [
                    read("A", "i", "k"),
                    read("B", "k"),
                    read("C", "i"),
                    read("D", "d", "k"),
                    read("E", "i", "d"),
                    iota("k"),
                    iota("i"),
                    num(0.5),
                ]
            )
        )
    sub_term = lambda: random_term(draw, depth - 1, axes)  # noqa: E731
    kind = draw(st.sampled_from(["leaf", "add", "mul", "un", "bi", "where", "red", "red", "soft", "moments"]))
    match kind:
        case "leaf":
            return random_term(draw, 0, axes)
        case "add":
            return add(sub_term(), sub_term(), sub_term())
        case "mul":
            return mul(sub_term(), sub_term())
        case "un":
            return un(draw(st.sampled_from(["tanh", "abs", "sin", "erf", "floor"])), sub_term())
        case "bi":
            return bi(draw(st.sampled_from(["max", "min"])), sub_term(), sub_term())
        case "where":
            c = draw(st.sampled_from([bi("le", iota("k"), iota("i")), bi("lt", iota("d"), 2.0), bi("lt", sub_term(), 0.3)]))
            return where(c, sub_term(), draw(st.sampled_from([sub_term(), num(-1.0)])))
    x = sub_term()
    choices = [a for a in ("k", "d") if a in x.free]
    if not choices:
        return x
    axis = draw(st.sampled_from(choices))
    if kind == "red":
        return red(draw(st.sampled_from(["+", "max", "min"])), axis, x)
    bounded = un("tanh", x)
    if kind == "moments":
        return moments(draw(st.sampled_from([0, 3])), axis, bounded)
    y = sub_term()
    return quotient(fold(SOFT, 1, axis, [bounded, y]), fold(SOFT, 1, axis, [bounded, num(1.0)]))


def split(t: T.Term, axis: str) -> T.Term:
    """Every reduction over the axis in two steps: in blocks, then over blocks."""
    o, i = T.outer(axis), T.inner(axis)

    def step(x: T.Term, args: tuple[T.Term, ...]) -> T.Term | None:
        if x.op == "red" and x.attr[1] == axis:
            return red(x.attr[0], o, red(x.attr[0], i, args[0]))
        if x.op == "fold" and x.attr[2] == axis:
            h, c, _ = x.attr
            return fold(h, c, o, [fold(h, j, i, args) for j in range(h.size)])
        return None

    return T.rewrite([t], step)[0]


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_kernels(data: st.DataObject) -> None:
    t = random_term(data.draw, data.draw(st.integers(1, 4)), ("i", "k", "d"))
    ext = {a: data.draw(st.integers(1, 7), a) for a in "ikd"}
    shape = tuple(data.draw(st.permutations(sorted(t.free))))
    used = {a for x in T.postorder([t]) for a in x.free} | t.free
    block = {}
    if "k" in used and data.draw(st.booleans()):
        block["k"] = data.draw(st.sampled_from([2, 3, 4]))
        ext |= {"k.o": -(-ext["k"] // block["k"]), "k.i": block["k"]}
        t = split(t, "k")
        used = used - {"k"} | {"k.o", "k.i"}
    roles = {}
    for a in data.draw(st.permutations(sorted(used))):
        reduced = any(x.op in ("red", "fold") and x.attr[-1] == a for x in T.postorder([t]))
        roles[a] = (
            data.draw(st.sampled_from(["whole", "loop"] if reduced else ["whole", "loop", "grid"])),
            data.draw(st.sampled_from([n for n in range(1, ext[a] + 1) if a != "k.i" or ext[a] % n == 0])),
        )
    r = rng(data.draw(st.integers(0, 1000)))
    x = {n: r.standard_normal([ext[a] for a in ax]) for n, ax in {"A": "ik", "B": "k", "C": "i", "D": "dk", "E": "id"}.items()}
    try:
        verify({"Y": (t, shape)}, roles, ext, x, block, tolerance=1e-8, least=1.0)
    except LoweringError as err:
        assert "its loops" in str(err) or "inside a loop over it" in str(err)


# ------------------------------------------------------------------ the checker


def lowered() -> tile.TileProgram:
    x = qkv(2, 8, 8, 3, 3)
    roles = dict(h=("grid", 1), q=("grid", 4), k=("loop", 4), d=("whole", 0), e=("whole", 0))
    plan = make_plan([({"O": (attend(scores("causal")), ("h", "q", "e"))}, roles)], dict(h=2, q=8, k=8, d=3, e=3), x)
    return lower(plan.kernels[0], plan.buffers, "float64")


def changed(p: tile.TileProgram, kind: type, change: Callable[[Any], Any]) -> tile.TileProgram:
    """The program with its first statement of a kind changed (None: dropped)."""
    done = False

    def visit(body: tuple[tile.Stmt, ...]) -> tuple[tile.Stmt, ...]:
        nonlocal done
        out: list[tile.Stmt] = []
        for s in body:
            if not done and isinstance(s, kind):
                done = True
                new = change(s)
                out += [] if new is None else [new]
            else:
                out.append(replace(s, body=visit(s.body)) if isinstance(s, tile.Loop) else s)
        return tuple(out)

    return replace(p, body=visit(p.body))


def wrong_axes(s: Any) -> Any:
    return replace(s, out=replace(s.out, axes=s.out.axes[:-1]))


def in_each_carry(**change: Any) -> Callable[[Any], Any]:
    return lambda s: replace(s, carries=tuple(replace(c, **change) for c in s.carries))


def streaming(s: Any) -> tile.Load:
    return tile.Load(tile.Value(s.out.id, ("h", "k")), "K", (affine(0, h=1), affine(0, k=1), T.Affine()))


DAMAGE: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "read before it is known": (tile.Load, lambda s: None),
    "is defined twice": (tile.Mask, lambda s: replace(s, out=replace(s.out, id=1))),
    "load .*should have axes": (tile.Load, wrong_axes),
    "contract .*should have axes": (tile.Contract, wrong_axes),
    "reduce .*should have axes": (tile.Reduce, wrong_axes),
    "map .*should have axes": (tile.Map, wrong_axes),
    "the axes of": (tile.Load, lambda s: replace(s, out=replace(s.out, axes=s.out.axes[::-1]))),
    "a known function": (tile.Map, lambda s: replace(s, fn="softmax")),
    "as many arguments": (tile.Map, lambda s: replace(s, args=s.args[:1])),
    "a predicate if its function is": (tile.Map, lambda s: replace(s, out=replace(s.out, predicate=True))),
    "is a predicate": (tile.Mask, lambda s: replace(s, out=replace(s.out, predicate=False))),
    "reduces no grid axis": (tile.Reduce, lambda s: replace(s, axes=("q",))),
    "reduces axes of its argument": (tile.Reduce, lambda s: replace(s, axes=("e",))),
    "sums axes of its operands": (tile.Contract, lambda s: replace(s, axes=("e",))),
    "a known operator": (tile.Reduce, lambda s: replace(s, op="-")),
    "a buffer that the kernel reads": (tile.Load, lambda s: replace(s, buffer="O")),
    "an index for each dimension": (tile.Load, lambda s: replace(s, index=s.index[1:])),
    "a place for each element": (tile.Store, lambda s: replace(s, index=(*s.index[:2], T.Affine()))),
    "no two elements in one place": (tile.Store, lambda s: replace(s, index=(affine(0, h=1, q=1), *s.index[1:]))),
    "stores cover 0 of 48": (tile.Store, lambda s: None),
    "walks a loop axis": (tile.Loop, lambda s: replace(s, axis="q")),
    "carries do not vary along it": (tile.Loop, in_each_carry(phi=tile.Value(99, ("h", "k", "q")))),
    "carried on before it is known": (tile.Loop, lambda s: replace(s, body=s.body[:-1])),
    "known carries": (tile.Loop, in_each_carry(kind="?")),
    "outside of its loops": (tile.Const, streaming),
}


@pytest.mark.parametrize("law", DAMAGE)
def test_the_checker_sees_damage(law: str) -> None:
    kind, change = DAMAGE[law]
    p = lowered()
    assert not list(problems(p))
    assert any(re.search(law, found) for found in problems(changed(p, kind, change))), list(problems(changed(p, kind, change)))


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "hip:gfx942"])
def test_gathered_values_are_divided(target: str) -> None:
    """x·(1/n) may be x/n, if x stands for a row: what a gather reads from is not looked at for that, its axes are none of the kernel's."""
    import eqsat_neptune as en

    def program(x: Any, i: Any) -> Any:
        return en.xp.take(x, i, axis=0) / 3, en.xp.mean(en.xp.take(en.xp.sum(x, axis=1), i, axis=0)), en.xp.reshape(x, (2, 21)) / 10

    kernel = en.optimize(program, target, specs=[en.TensorSpec((7, 6)), en.TensorSpec((4,), "int32")])
    assert kernel.source
    if target == "cpu":
        x, i = rng().standard_normal((7, 6)).astype(np.float32), np.array([3, 0, 6, -1], np.int32)
        for got, want in zip(kernel(x, i), (x[i] / 3, x.sum(1)[i].mean(), x.reshape(2, 21) / 10)):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
