"""Random kernels with random roles and tiles for the CUDA lowering: run in the emulator, many in one translation unit, and compared
with the reference interpreter.

    python tests/cuda_fuzz.py FIRST_SEED COUNT [MODE]        # float64 | simple | tensor
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace

import eqsat_neptune.extraction  # noqa: F401  (before codegen.lower)
import ml_dtypes
import numpy as np
from eqsat_neptune.codegen.cuda import emit as emit_module
from eqsat_neptune.codegen.cuda.emulate import run
from eqsat_neptune.codegen.cuda.layout import Unsupported
from eqsat_neptune.codegen.lower import LoweringError, lower
from eqsat_neptune.extraction.plan import Axis, Buffer, Kernel, Store

from eqsat_neptune import terms as T
from eqsat_neptune.reference import Env, evaluate_term
from eqsat_neptune.terms import add, axis_index, bi, fold, inp, iota, mul, num, red, sub, un, where

SOFT = T.Monoid(("max",), (((0, un("exp", sub(T.var("r0"), T.var("R0")))),),))
_D = sub(T.var("r0"), T.var("R0"))
MOMENTS = T.Monoid(
    (("mean", 0),), (((0, num(1.0)),), ((1, num(1.0)), (0, _D)), ((2, num(1.0)), (1, mul(2.0, _D)), (0, mul(_D, _D))))
)
SHAPES = {"A": "ik", "B": "k", "C": "i", "D": "dk", "E": "id", "F": "ke"}


def term(r: random.Random, depth: int, smooth: bool) -> T.Term:
    if depth == 0:
        leaves = [inp(n, tuple(map(axis_index, s))) for n, s in SHAPES.items()] + ([] if smooth else [iota("k"), iota("i")]) + [num(0.5)]
        return r.choice(leaves)

    def below() -> T.Term:
        return term(r, depth - 1, smooth)

    kinds = ["leaf", "add", "mul", "un", "bi", "red", "red", "soft", "product", "product"] + ([] if smooth else ["where", "moments", "truth"])
    kind = r.choice(kinds)
    match kind:
        case "leaf":
            return term(r, 0, smooth)
        case "add":
            return add(below(), below(), below())
        case "mul":
            return mul(below(), below())
        case "un":
            return un(r.choice(["tanh", "sin", "erf"] + ([] if smooth else ["abs", "floor"])), below())
        case "bi":
            return bi(r.choice(["max", "min"]), below(), below())
        case "truth":
            return bi("lt", below(), below())
        case "where":
            c = r.choice([bi("le", iota("k"), iota("i")), bi("lt", iota("d"), 2.0), bi("lt", below(), 0.3)])
            return where(c, below(), r.choice([below(), num(-1.0)]))
    x = mul(below(), below()) if kind == "product" else below()
    axes = [a for a in ("k", "d") if a in x.free]
    if not axes:
        return x
    axis = r.choice(axes)
    if kind in ("red", "product"):
        y = red("+" if kind == "product" else r.choice(["+", "max", "min"]), axis, x)
        return un("tanh", y) if smooth else y
    bounded = un("tanh", x)
    if kind == "moments":
        return fold(MOMENTS, r.choice([0, 3]), axis, [bounded, num(1.0), num(0.0), num(0.0)])
    return T.div(fold(SOFT, 1, axis, [bounded, below()]), fold(SOFT, 1, axis, [bounded, num(1.0)]))


def products(r: random.Random) -> T.Term:
    """Chains of matrix products, the ways that layers and attention make them: [i, d]·[d, k] and then [i, k]·[k, e], with what is
    between, before and after them."""
    q, k, v = inp("E", (axis_index("i"), axis_index("d"))), inp("D", (axis_index("d"), axis_index("k"))), inp("F", (axis_index("k"), axis_index("e")))

    def prepared(x: T.Term, axis: str) -> T.Term:
        kind = r.randint(0, 9)
        if kind == 0:
            return un("tanh", x)
        if kind == 1:
            return mul(x, un("rsqrt", add(red("+", axis, mul(x, x)), 1.0)))
        return x

    s = mul(red("+", "d", mul(prepared(q, "d"), prepared(k, "d"))), r.choice([1.0, 0.3, -0.2]))
    for _ in range(r.randint(0, 2)):
        s = r.choice([
            lambda s: un("tanh", s), lambda s: add(s, inp("B", (axis_index("k"),))), lambda s: add(s, mul(inp("C", (axis_index("i"),)), iota("k"), 0.05)),
            lambda s: mul(s, inp("C", (axis_index("i"),))), lambda s: add(s, inp("A", (axis_index("i"), axis_index("k")))),
        ])(s)  # fmt: skip
    keep = r.choice([None, None, bi("le", iota("k"), iota("i")), bi("le", iota("k"), add(iota("i"), -3.0)), bi("lt", sub(iota("i"), iota("k")), num(5.0))])
    kind = r.randint(0, 7)
    if kind >= 6:  # a weighted mean without a maximum, perhaps of weights that vary less than the mask does
        w = r.choice([un("exp", un("tanh", s)), un("exp", un("tanh", s)), inp("C", (axis_index("i"),)), bi("lt", s, num(0.1))])
        w = mul(w, r.choice([num(1.0), num(1.0), mul(inp("B", (axis_index("k"),)), inp("B", (axis_index("k"),)))]))
        w = w if keep is None else where(keep, w, num(0.0))
        top = T.div(red("+", "k", mul(w, v)), add(un("abs", red("+", "k", w)), 0.5))
    elif kind <= 2:
        hidden = where(keep, s, num(-1e9)) if keep is not None and r.random() < 0.5 else s if keep is None else where(keep, s, num(-np.inf))
        top = T.div(fold(SOFT, 1, "k", [hidden, v]), add(fold(SOFT, 1, "k", [hidden, num(1.0)]), 0.01))
    else:
        p = un(r.choice(["tanh", "sin"]), s)
        p = p if keep is None else where(keep, p, num(0.0))
        top = red("+", "k", mul(p, v)) if kind <= 4 else red(r.choice(["+", "max"]), "k", p)
    post = r.randint(0, 3)
    if post == 0:
        top = mul(top, inp("C", (axis_index("i"),)))
    if post == 1 and "e" in top.free:
        top = mul(top, un("rsqrt", add(red("+", "e", mul(top, top)), 0.5)))
    if r.random() < 0.25:
        return un("tanh", s) if keep is None else where(keep, un("tanh", s), num(0.0))
    return top


def split(t: T.Term, axis: str) -> T.Term:
    o, i = T.outer(axis), T.inner(axis)

    def step(x: T.Term, args: tuple[T.Term, ...]) -> T.Term | None:
        if x.op == "red" and x.attr[1] == axis:  # type: ignore[index]
            return red(x.attr[0], o, red(x.attr[0], i, args[0]))  # type: ignore[index]
        if x.op == "fold" and x.attr[2] == axis:  # type: ignore[index]
            h, c, _ = x.attr  # type: ignore[misc]
            return fold(h, c, o, [fold(h, j, i, args) for j in range(h.size)])
        return None

    return T.rewrite([t], step)[0]


def draw(seed: int, mode: str) -> tuple[Kernel, dict[str, Buffer], dict[str, np.ndarray], np.ndarray, str] | None:
    """(kernel, buffers, inputs, float64 result, description), or None where the drawn roles do not fit the term."""
    r = random.Random(seed)
    smooth = mode == "tensor"
    chain = r.random() < 0.6
    t = products(r) if chain else term(r, r.randint(1, 4), smooth)
    ext = {a: r.randint(1, 7) if r.random() < 0.5 and not smooth else r.choice([1, 3, 8, 16, 20, 33, 48, 64]) for a in "ikde"}
    ext = {a: max(2, n) for a, n in ext.items()}  # programs have no axes of extent 1
    shape = tuple(r.sample(sorted(t.free), len(t.free)))
    used = {a for x in T.postorder([t]) for a in x.free} | t.free
    block: dict[str, int] = {}
    if "k" in used and r.random() < 0.4:
        block["k"] = r.choice([2, 3, 4]) if ext["k"] < 16 else r.choice([8, 16, 24])
        ext |= {"k.o": -(-ext["k"] // block["k"]), "k.i": block["k"]}
        t = split(t, "k")
        used = used - {"k"} | {"k.o", "k.i"}
    axes = {}
    for a in r.sample(sorted(used), len(used)):
        reduced = any(x.op in ("red", "fold") and x.attr[-1] == a for x in T.postorder([t]))  # type: ignore[index]
        role = r.choice(["whole", "loop"] if reduced else ["whole", "grid", "grid"] if chain else ["whole", "loop", "grid"])
        if chain and a in ("d", "e"):
            role = r.choice(["whole", "whole", role])
        tiles = [n for n in range(1, ext[a] + 1) if a != "k.i" or ext[a] % n == 0]
        tile = ext[a] if role == "whole" else r.choice(tiles[-max(1, len(tiles) * 2 // 3) :])
        axes[a] = Axis(ext[a], tile, role)
    rng = np.random.default_rng(seed)
    dtype = r.choice(["bfloat16", "bfloat16", "float16"]) if mode == "tensor" else "float64"
    inputs = {n: rng.standard_normal([ext[a] for a in s]) for n, s in SHAPES.items()}
    if mode == "tensor":
        cast = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        inputs = {n: x.astype(cast) for n, x in inputs.items()}
    # inputs may lie in memory in any order of their dimensions
    inputs = {n: np.ascontiguousarray(x.T).T if r.random() < 0.3 else x for n, x in inputs.items()}
    out = tuple(ext[a] for a in shape)
    buffers = {n: Buffer(n, x.shape, dtype, "input") for n, x in inputs.items()}
    buffers["Y"] = Buffer("Y", out, "float32" if mode == "tensor" and r.random() < 0.2 else dtype, "output")
    choices = {n: v for n, v in (("warps", r.choice([None, None, 1, 2, 4])), ("stages", r.choice([None, None, 1, 3]))) if v}
    kernel = Kernel(f"k{seed}", (Store("Y", t, tuple(map(axis_index, shape))),), axes, ext, choices)
    env = Env({a: n for a, n in ext.items() if "." not in a}, {n: x.astype(np.float64) for n, x in inputs.items()}, block or None)
    try:
        lower(kernel, buffers, "float64")
        want = np.broadcast_to(env.expand(evaluate_term(t, env), shape), out)
    except LoweringError:
        return None
    return kernel, buffers, inputs, want, f"seed {seed}: {t}\n  axes {axes}\n  choices {choices} block {block}"


def check(seeds: range, mode: str) -> list[str]:
    """What went wrong, for the kernels drawn from these seeds."""
    plan = emit_module.plan

    def none(*args: object) -> None:
        raise Unsupported("as if no fragment fitted")

    if mode == "simple":
        emit_module.plan = none  # type: ignore[assignment]
    try:
        return _check(seeds, mode)
    finally:
        emit_module.plan = plan


def _check(seeds: range, mode: str) -> list[str]:
    compute = "float32" if mode == "tensor" else "float64"
    programs, buffers, inputs, wants, failures = [], {}, {}, {}, []
    for seed in seeds:
        drawn = draw(seed, mode)
        if drawn is None:
            continue
        kernel, own, arrays, want, text = drawn
        names = {n: f"{n}{seed}" for n in own}

        def rename(t: T.Term, args: tuple[T.Term, ...], names: dict[str, str] = names) -> T.Term | None:
            return T.make("input", (names[t.attr[0]], t.attr[1])) if t.op == "input" else None  # type: ignore[index]

        store = kernel.stores[0]
        kernel = replace(kernel, stores=(Store(names["Y"], T.rewrite([store.term], rename)[0], store.index),))
        mine = {names[n]: replace(b, name=names[n]) for n, b in own.items()}
        program = lower(kernel, mine, compute)
        try:
            emit_module.emit([program], mine, emit_module_arch())
        except Unsupported:
            if mode == "simple":
                failures.append(f"unsupported: {text}")
            continue
        except Exception as e:
            failures.append(f"{type(e).__name__} {e}: {text}")
            continue
        programs.append(program)
        buffers |= mine
        inputs |= {names[n]: x for n, x in arrays.items()}
        wants[seed] = names["Y"], want, text
    if not programs:
        return failures
    for out in run(programs, buffers, inputs, seeds=(seeds.start % 7,)):
        for name, want, text in wants.values():
            got = np.asarray(out[name]).astype(np.float64)
            scale = max(1.0, float(np.abs(want).max(initial=0.0)))
            error = float(np.abs(np.nan_to_num(got - want, nan=1e30)).max(initial=0.0)) / scale
            if error > (6e-2 if mode == "tensor" else 1e-8):
                failures.append(f"relative error {error}: {text}")
    return failures


def emit_module_arch():  # type: ignore[no-untyped-def]
    from eqsat_neptune.codegen.cuda.arch import emulator_arch

    return emulator_arch()


if __name__ == "__main__":
    first, count, kind = int(sys.argv[1]), int(sys.argv[2]), (sys.argv[3:] or ["float64"])[0]
    for start in range(first, first + count, 10):
        for failure in check(range(start, min(start + 10, first + count)), kind):
            print(failure, flush=True)
    print(f"{count} kernels, {kind}")
