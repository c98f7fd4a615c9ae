"""What each form of a compilation computes: the terms that a plan stores, the tile programs they were lowered to, the emitted kernels.

All take the plan of one program and its input arrays, and give the outputs in order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .backends import make_runner
from .codegen.check import check
from .codegen.lower import lower
from .errors import EqsatError
from .extraction.plan import Plan
from .integers import wrapped
from .program import FLOATS, Program
from .reference import Env, Value, evaluate_term
from .targets import Target
from .terms import Index


class NotRun(Exception):
    """There is nothing here that could run the emitted kernels; the text says what is missing."""


def term_values(program: Program, plan: Plan, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """By the interpreter, in float64: each kernel's terms, read from what the kernels before have stored."""
    held = {b.name: np.full(b.shape, np.nan) for b in plan.buffers.values() if b.kind != "input"}
    held |= {i.name: np.asarray(x).astype(np.float64) for i, x in zip(program.inputs, arrays)}
    for k in plan.kernels:
        whole = {a: n for a, n in k.extents.items() if "." not in a}
        env = Env(whole, held, {a[:-2]: n for a, n in k.extents.items() if a.endswith(".i")})
        done: dict[str, np.ndarray] = {}
        for s in k.stores:
            b = plan.buffers[s.buffer]
            axes = tuple(sorted({a for ix in s.index for a in ix.axes}))
            x = np.broadcast_to(env.expand(_along(evaluate_term(s.term, env), axes), axes), [env.size(a) for a in axes])
            out = done.setdefault(b.name, np.full(b.shape, np.nan))
            out[_places(s.index, axes, env)] = x if b.dtype in FLOATS else wrapped(x, np.dtype(b.dtype))
        held |= done
    return [held[f"out{n}"] for n in range(len(program.outputs))]


def _along(value: Value, axes: tuple[str, ...]) -> Value:
    """The value without other axes: an array of a fold has those of all components, whichever is asked for."""
    mine, x = value
    for n in reversed(range(len(mine))):
        if not any(mine[n] == a or mine[n].startswith(a + ".") for a in axes):
            first = x.take([0], axis=n)
            if not np.allclose(x, first, rtol=1e-9, atol=0.0, equal_nan=True):
                raise ValueError(f"a value that varies along {mine[n]} is stored along {', '.join(axes)}")
            mine, x = (*mine[:n], *mine[n + 1 :]), first.squeeze(n)
    return mine, x


def _places(index: Index, axes: tuple[str, ...], env: Env) -> tuple[np.ndarray, ...]:
    out = []
    for ix in index:
        at = np.full([env.size(a) for a in axes], ix.const)
        for a, c in ix.terms:
            at = at + c * np.arange(env.size(a)).reshape([-1 if b == a else 1 for b in axes])
        out.append(at)
    return tuple(out)


def tile_values(program: Program, plan: Plan, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """By the interpreter of tile programs, in float64."""
    from .codegen.interpret import interpret

    tiles = [check(lower(k, plan.buffers, plan.compute_dtype)) for k in plan.kernels]
    out = interpret(tiles, plan.buffers, {i.name: x for i, x in zip(program.inputs, arrays)})
    return [out[f"out{n}"] for n in range(len(program.outputs))]


def kernel_values(
    program: Program, plan: Plan, target: Target, arrays: Sequence[np.ndarray], seed: int = 0
) -> tuple[list[np.ndarray], str]:
    """By the emitted kernels, and where they ran: on the CPU target, on the GPU if it is here, else in the emulator (its threads in an
    order that `seed` varies).  NotRun if there is neither GPU nor C++ compiler."""
    if not plan.kernels:
        return [np.empty(o.shape) for o in program.outputs], "no elements"
    if target.kind == "cpu":
        return list(make_runner(program, plan, target)(arrays, None)), "cpu"
    from .codegen.cuda.emulate import EmulationError, emit_for, emulated, host_compiler, run_source
    from .codegen.cuda.layout import Unsupported
    from .runtime import checked

    if checked.present(target):
        return checked.run(program, plan, target, arrays), "GPU"
    if host_compiler() is None:
        raise NotRun("no GPU of this architecture and no C++ compiler for the emulator")
    tiles = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    inputs = {i.name: x for i, x in zip(program.inputs, arrays)}
    try:
        source = emit_for(tiles, plan.buffers, inputs, emulated(target))
    except Unsupported as e:
        raise NotRun(str(e)) from None
    try:
        (out,) = run_source(source, plan.buffers, inputs, (1 + seed % 7,))
    except EmulationError as e:
        if "not emulated" in str(e):
            raise NotRun(str(e)) from None
        raise EqsatError(f"the emitted kernel is wrong: {e}") from None
    return [out[f"out{n}"] for n in range(len(program.outputs))], "emulator"
