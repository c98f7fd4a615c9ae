"""Every function of the namespace: traced and evaluated it gives what NumPy gives (or, for the extras, their formula)."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import eqsat_neptune as en
from eqsat_neptune import xp
from eqsat_neptune.errors import DtypeError, ShapeError, TraceError
from eqsat_neptune.program import Program
from eqsat_neptune.terms import postorder

RNG = np.random.default_rng(17)


# ------------------------------------------------------------------------------------- NumPy's namespace, with our extras


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf)(x)


def _softmax(x: Any, axis: int = -1) -> Any:
    e = np.exp(x - np.max(x, axis=axis, keepdims=True))
    return e / np.sum(e, axis=axis, keepdims=True)


def _logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))


def _rms_norm(x: Any, weight: Any = 1.0, eps: float = 1e-6, axis: Any = -1) -> Any:
    return weight * x / np.sqrt((x**2).mean(axis=axis, keepdims=True) + eps)


def _layer_norm(x: Any, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5, axis: Any = -1) -> Any:
    return weight * (x - x.mean(axis=axis, keepdims=True)) / np.sqrt(x.var(axis=axis, keepdims=True) + eps) + bias


def _gelu(x: Any, approximate: str = "none") -> Any:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * 0.5 * (1 + (_erf(x / math.sqrt(2)) if approximate == "none" else np.tanh(inner)))


def _top_k(x: Any, k: int, axis: int = -1) -> Any:
    order = np.argsort(-x, axis=axis, kind="stable")
    first = np.take(order, np.arange(k), axis=axis)
    return np.take_along_axis(x, first, axis=axis), first


EXTRAS: dict[str, Callable[..., Any]] = {
    "softmax": _softmax,
    "log_softmax": lambda x, axis=-1: np.log(_softmax(x, axis)),
    "logsumexp": _logsumexp,
    "erf": _erf,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "gelu": _gelu,
    "top_k": _top_k,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x, negative_slope=0.01: np.where(x > 0, x, negative_slope * x),
    "elu": lambda x, alpha=1.0: np.where(x > 0, x, alpha * (np.exp(x) - 1)),
    "softplus": lambda x: np.log(1 + np.exp(x)),
    "one_hot": lambda x, n, dtype=None: np.eye(n)[x],
    "pad": lambda x, w, constant_values=0: np.pad(x, w, constant_values=constant_values),
}


class _NumPy:
    def __getattr__(self, name: str) -> Any:
        return EXTRAS[name] if name in EXTRAS else getattr(np, name)


@dataclass
class Case:
    """fn(namespace, *tensors), and the inputs: shapes of normal float64 tensors, or arrays."""

    names: tuple[str, ...]
    fn: Callable[..., Any]
    inputs: tuple[Any, ...]


CASES: list[Case] = []


def case(names: str, fn: Callable[..., Any], *inputs: Any) -> None:
    CASES.append(Case(tuple(names.split()), fn, inputs))


INTS = np.array([[-7, -2, -1, 0], [1, 2, 5, 9]])
SMALL = np.array([[1, 2, 3, 2], [3, 1, 4, 2]])
BOOLS = np.array([[True, False, True, True], [False, False, True, False]])
POSITIVE = np.abs(RNG.standard_normal((3, 4))) + 0.1
UNIT = RNG.uniform(-0.99, 0.99, (3, 4))
SPECIAL = np.array([[0.0, -0.0, np.inf, -np.inf], [np.nan, 1.5, -2.5, 3.5], [0.5, -0.5, 2.0, -1e300]])

for _name in (
    "exp exp2 expm1 sin cos tan atan sinh cosh tanh asinh abs sign negative positive square floor ceil trunc round real conj"
).split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), (3, 4))
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), SPECIAL)
for _name in "log log2 log10 log1p sqrt rsqrt reciprocal acosh".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), POSITIVE + 1.0)
for _name in "asin acos atanh erf".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), UNIT)
for _name in "isnan isinf isfinite signbit logical_not".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), SPECIAL)
for _name in "abs sign negative positive square floor ceil trunc round isnan isinf isfinite bitwise_invert logical_not".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), INTS)
for _name in "bitwise_invert logical_not".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), BOOLS)
case("bitwise_invert", lambda xp, x: xp.bitwise_invert(x), SMALL.astype(np.uint8))
for _name in (
    "add subtract multiply divide maximum minimum less less_equal greater greater_equal equal not_equal logical_and logical_or "
    "logical_xor atan2 hypot copysign floor_divide remainder logaddexp"
).split():
    case(_name, lambda xp, x, y, f=_name: getattr(xp, f)(x, y), (3, 4), (4,))
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, 0.75), (3, 4))
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(0.75, x), (2, 1, 3))
    case(_name, lambda xp, x, y, f=_name: getattr(xp, f)(x, y), SPECIAL, SPECIAL[::-1])
for _name in "add subtract multiply maximum minimum less floor_divide remainder logical_and".split():
    case(_name, lambda xp, x, y, f=_name: getattr(xp, f)(x, y), INTS, SMALL)
for _name in "add multiply bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor".split():
    case(_name, lambda xp, x, y, f=_name: getattr(xp, f)(x, y), BOOLS, ~BOOLS[::-1])
for _exponent in (-1, -0.5, 0, 0.5, 1, 2, 3, 4, 5, 2.5):
    case("pow", lambda xp, x, e=_exponent: (xp.pow(x, e), x**e), POSITIVE)
case("pow", lambda xp, x, y: (xp.pow(x, y), 2.0**x), POSITIVE, (3, 4))
case("pow", lambda xp, x: x**3, INTS)
case(
    "bitwise_left_shift bitwise_right_shift",
    lambda xp, x: (xp.bitwise_left_shift(x, 3), xp.bitwise_right_shift(x, 1), x << 1, x >> 2),
    INTS,
)
case("clip", lambda xp, x: (xp.clip(x, -0.5, 0.5), xp.clip(x, min=0.0), xp.clip(x, max=0.0), xp.clip(x)), (3, 4))
case("clip", lambda xp, x, y: xp.clip(x, -1.0, y), (3, 4), (4,))
case("where", lambda xp, x, y: (xp.where(x > 0, x, y), xp.where(x > y, 1.0, x), xp.where(x < 0, 0.0, x)), (3, 4), (4,))

for _name in "sum prod max min mean var std all any count_nonzero argmax argmin".split():
    for _axis in (None, 0, -1, *(() if _name.startswith("arg") else ((0, 2), (-1, 1), ()))):
        case(_name, lambda xp, x, f=_name, a=_axis: getattr(xp, f)(x, axis=a), (3, 4, 5))
        case(
            _name,
            lambda xp, x, f=_name, a=_axis: getattr(xp, f)(x, axis=a, keepdims=True),
            np.round(RNG.standard_normal((2, 3, 4))),
        )
for _name in "sum prod max min mean all any count_nonzero argmax".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=-1), INTS)
for _name in "sum prod all any count_nonzero".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=0), BOOLS)
for _name in "argmax argmin max min".split():
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=1), SPECIAL)
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=0), np.full((3, 2), -np.inf))
case("sum prod", lambda xp, x: (xp.sum(x, axis=0, dtype=xp.float64), xp.prod(x, dtype=xp.int64)), SMALL)
case(
    "var std",
    lambda xp, x: (xp.var(x, axis=1, correction=1), xp.std(x, correction=1.0), xp.var(x, axis=0, keepdims=True)),
    (3, 4),
)
case(
    "sum mean",
    lambda xp, x: (xp.sum(xp.broadcast_to(x, (3, 4)), axis=0), xp.mean(xp.ones_like(x)), xp.max(xp.tile(x, 2))),
    (4,),
)
for _axis in (0, 1, -1):
    case(
        "cumulative_sum cumulative_prod",
        lambda xp, x, a=_axis: (
            xp.cumulative_sum(x, axis=a),
            xp.cumulative_prod(x, axis=a),
            xp.cumulative_sum(x, axis=a, include_initial=True),
            xp.cumulative_prod(x, axis=a, include_initial=True),
        ),
        (3, 4),
    )
case("cumulative_sum", lambda xp, x: xp.cumulative_sum(x), (5,))
case("cumulative_sum", lambda xp, x, w: xp.cumulative_sum(x @ w, axis=0) * (x @ w), (5, 3), (3, 4))
case("cumulative_sum", lambda xp, x: xp.cumulative_sum(xp.reshape(x, (12,))) + xp.reshape(x, (12,)), (3, 4))
case("cumulative_sum", lambda xp, x: (xp.cumulative_sum(x, axis=0), xp.cumulative_sum(x, axis=0, include_initial=True)), (1, 3))
case("diff", lambda xp, x: (xp.diff(x), xp.diff(x, axis=0, n=2), xp.diff(x, axis=0, prepend=x[:1], append=x[-1:])), (4, 5))

case("matmul", lambda xp, x, y: (xp.matmul(x, y), x @ y), (3, 4), (4, 5))
case("matmul", lambda xp, x, y: x @ y, (2, 1, 3, 4), (5, 4, 2))
case("matmul", lambda xp, x, y: (x @ y, y @ y, x[0] @ y[None, :, None]), (3, 4), (4,))
case("matmul", lambda xp, x: x @ x @ x, (4, 4))
case("matmul", lambda xp, x, y: x @ y, INTS, SMALL.T.copy())
case("matrix_transpose", lambda xp, x: (xp.matrix_transpose(x), x.mT), (2, 3, 4))
case("vecdot", lambda xp, x, y: (xp.vecdot(x, y), xp.vecdot(x, y * 2.0, axis=-1)), (3, 4), (4,))
case(
    "tensordot", lambda xp, x, y: (xp.tensordot(x, y, axes=1), xp.tensordot(x, y, axes=((1, 2), (1, 0)))), (2, 3, 4), (4, 3, 5)
)
case("tensordot", lambda xp, x, y: xp.tensordot(x, y, axes=0), (2, 3), (4,))
for _text, *_shapes in (
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("ij->ji", (3, 4)),
    ("ii->i", (4, 4)),
    ("ii", (4, 4)),
    ("ij->", (3, 4)),
    ("i,j->ij", (3,), (4,)),
    ("ij,kj,kl->il", (3, 4), (5, 4), (5, 6)),
    ("...ij,...jk->...ik", (2, 3, 4), (4, 5)),
    ("ij,jk", (3, 4), (4, 5)),
    ("b...d->d...b", (2, 3, 4)),
    ("ij,ij->i", (3, 4), (3, 4)),
    ("ij,jk->k", (3, 4), (4, 5)),
    ("i->i", (3,)),
    ("abab->ba", (2, 3, 2, 3)),
    ("iji->j", (3, 2, 3)),
    ("...,...->...", (3, 4), (4,)),
    ("aij,a->ij", (2, 3, 4), (2,)),
    ("i,->i", (3,), ()),
    ("ab,bc,cd,da->", (2, 3), (3, 4), (4, 5), (5, 2)),
):
    case("einsum", lambda xp, *xs, t=_text: xp.einsum(t, *xs), *_shapes)
case("einsum", lambda xp, x: xp.einsum("ij,kj->ik", x, x), (3, 4))
case(
    "linalg",
    lambda xp, x: (xp.linalg.diagonal(x), xp.linalg.diagonal(x, offset=1), xp.linalg.diagonal(x, offset=-2)),
    (2, 4, 5),
)
case("linalg", lambda xp, x: (xp.linalg.trace(x), xp.linalg.trace(x, offset=1), xp.linalg.matrix_transpose(x)), (2, 4, 5))
case("linalg", lambda xp, x, y: (xp.linalg.outer(x, y), xp.linalg.outer(x, x)), (3,), (4,))
for _ord in (0, 1, 2, 3, 2.5, math.inf, -math.inf):
    case("linalg", lambda xp, x, o=_ord: (xp.linalg.vector_norm(x, axis=-1, ord=o), xp.linalg.vector_norm(x, ord=o)), (3, 4))

case(
    "reshape",
    lambda xp, x: (xp.reshape(x, (6, 4)), xp.reshape(x, (-1,)), xp.reshape(x, (8, -1)), xp.reshape(x, (2, 1, 12))),
    (2, 3, 4),
)
case(
    "permute_dims moveaxis",
    lambda xp, x: (xp.permute_dims(x, (2, 0, 1)), xp.moveaxis(x, 0, -1), xp.moveaxis(x, (0, 1), (1, 2)), xp.moveaxis(x, -1, 0)),
    (2, 3, 4),
)
case(
    "expand_dims squeeze",
    lambda xp, x: (xp.expand_dims(x, axis=0), xp.expand_dims(x, axis=-1), xp.squeeze(x, axis=1), xp.squeeze(x, axis=(1, -1))),
    (2, 1, 3, 1),
)
case("broadcast_to", lambda xp, x: (xp.broadcast_to(x, (2, 3, 4)), xp.broadcast_to(x[:1], (5, 4))), (3, 4))
case("broadcast_arrays", lambda xp, x, y: tuple(xp.broadcast_arrays(x, y)), (3, 1), (2, 1, 4))
case("flip", lambda xp, x: (xp.flip(x), xp.flip(x, axis=1), xp.flip(x, axis=(0, 2))), (2, 3, 4))
case("flip", lambda xp, x, w: xp.flip(x @ w, axis=1) - x @ w, (2, 3), (3, 4))
case(
    "roll",
    lambda xp, x: (xp.roll(x, 1), xp.roll(x, 2, axis=1), xp.roll(x, -1, axis=0), xp.roll(x, (1, -2), axis=(0, 1))),
    (3, 5),
)
case("roll", lambda xp, x, w: (xp.roll(x @ w, 7, axis=0), xp.roll(x, 0, axis=1)), (3, 4), (4, 2))
case("tile", lambda xp, x: (xp.tile(x, (2, 3)), xp.tile(x, 2), xp.tile(x, (2, 1, 2)), xp.tile(x, (2, 2)) + 1.0), (3, 4))
case("repeat", lambda xp, x: (xp.repeat(x, 2), xp.repeat(x, 3, axis=0), xp.repeat(x, 2, axis=-1) * 2.0), (3, 4))
case("repeat", lambda xp, x, y: xp.repeat(x, 3, axis=1) @ y, (2, 2), (6, 3))
case("concat", lambda xp, x, y: (xp.concat([x, y]), xp.concat((x, x, y), axis=0), xp.concat([x, y], axis=None)), (3, 4), (2, 4))
case("concat", lambda xp, x, y, w: xp.concat([x @ w, y, x @ w], axis=-1), (3, 4), (3, 5), (4, 2))
case("concat", lambda xp, x, y: xp.concat([x, xp.zeros((3, 0)), y], axis=1), (3, 4), (3, 1))
case(
    "stack",
    lambda xp, x, y: (xp.stack([x, y]), xp.stack([x, y, x], axis=1), xp.stack([x], axis=-1), xp.stack([x, y], axis=-1)),
    (3, 4),
    (3, 4),
)
case("unstack", lambda xp, x: (*xp.unstack(x), *xp.unstack(x, axis=1)), (2, 3))
case("pad", lambda xp, x: (xp.pad(x, 1), xp.pad(x, (2, 0)), xp.pad(x, ((0, 1), (2, 0)), constant_values=-1.5)), (3, 4))
case("pad", lambda xp, x, w: xp.pad(x @ w, ((1, 1), (0, 0))), (3, 4), (4, 2))
case("meshgrid", lambda xp, x, y: (*xp.meshgrid(x, y), *xp.meshgrid(x, y, indexing="ij"), *xp.meshgrid(x, y, x)), (3,), (4,))

case(
    "take",
    lambda xp, x, i: (xp.take(x, i, axis=1), xp.take(x, i[:2], axis=0), xp.take(x[0], i)),
    (3, 4),
    np.array([0, 2, 1, -1, 1]),
)
case("take", lambda xp, x, i: xp.take(xp.reshape(x, (12,)), i, axis=0), (3, 4), np.array([0, 5, 11]))
case(
    "take_along_axis",
    lambda xp, x, i: (xp.take_along_axis(x, i, axis=1), xp.take_along_axis(x, i[:, :1], axis=-1)),
    (3, 4),
    np.array([[0, 3], [1, -1], [2, 2]]),
)
case("take_along_axis", lambda xp, x, i: xp.take_along_axis(x, i, axis=0), (3, 4), np.array([[1, 0, 2, 2]]))
case("one_hot", lambda xp, i: xp.one_hot(i, 5), np.array([[0, 4], [2, 2]]))
case(
    "searchsorted",
    lambda xp, x, v: (xp.searchsorted(x, v), xp.searchsorted(x, v, side="right")),
    np.array([0.0, 1.0, 1.0, 2.5]),
    np.array([[-1.0, 0.0, 1.0], [2.0, 2.5, 3.0]]),
)
case("top_k", lambda xp, x: (*xp.top_k(x, 3), *xp.top_k(x, 2, axis=0), *xp.top_k(x, 1)), (4, 5))
case("top_k", lambda xp, x: xp.top_k(x, 4), np.array([[1.0, 1.0, -np.inf, -np.inf, 2.0], [-np.inf] * 5, [3.0] * 5]))
case("top_k", lambda xp, x: xp.top_k(x, 3), np.array([[3, -5, 3, 7], [0, 0, 0, 0]]))

case(
    "softmax log_softmax",
    lambda xp, x: (xp.softmax(x), xp.softmax(x, axis=0), xp.log_softmax(x), xp.log_softmax(x, axis=1)),
    (3, 4),
)
case(
    "logsumexp",
    lambda xp, x: (xp.logsumexp(x), xp.logsumexp(x, axis=-1), xp.logsumexp(x, axis=(0, 2), keepdims=True)),
    (2, 3, 4),
)
case(
    "rms_norm",
    lambda xp, x, w: (xp.rms_norm(x), xp.rms_norm(x, w), xp.rms_norm(x, eps=0.1), xp.rms_norm(x, axis=(-2, -1))),
    (2, 3, 4),
    (4,),
)
case(
    "layer_norm",
    lambda xp, x, w, b: (xp.layer_norm(x), xp.layer_norm(x, w, b), xp.layer_norm(x, w, eps=0.1, axis=0)),
    (3, 4),
    (4,),
    (4,),
)
case(
    "sigmoid silu relu leaky_relu elu softplus",
    lambda xp, x: (
        xp.sigmoid(x),
        xp.silu(x),
        xp.relu(x),
        xp.leaky_relu(x),
        xp.leaky_relu(x, 0.2),
        xp.elu(x),
        xp.elu(x, 2.0),
        xp.softplus(x),
    ),
    (3, 4),
)
case("gelu", lambda xp, x: (xp.gelu(x), xp.gelu(x, approximate="tanh")), (3, 4))

case(
    "arange",
    lambda xp, x: (
        x * xp.arange(4),
        x + xp.arange(2, 10, 2),
        x + xp.arange(4, 0, -1),
        xp.arange(0.0, 1.0, 0.3, dtype=xp.float64) * 1.0,
    ),
    (3, 4),
)
case(
    "linspace",
    lambda xp, x: (x + xp.linspace(0, 1, 4), x * xp.linspace(2.0, -1.0, 4, endpoint=False), xp.linspace(1, 5, 1) * 1.0),
    (3, 4),
)
case(
    "zeros ones full empty",
    lambda xp, x: (x + xp.zeros((3, 4)), x * xp.ones(4), xp.full((2,), 2.5) * 1.0, x + 0 * xp.zeros_like(xp.empty((3, 4)))),
    (3, 4),
)
case(
    "zeros_like ones_like full_like empty_like",
    lambda xp, x: (xp.zeros_like(x), xp.ones_like(x), xp.full_like(x, 7.0), 0.0 * xp.zeros_like(xp.empty_like(x))),
    (3, 4),
)
case(
    "eye tril triu",
    lambda xp, x: (x @ xp.eye(4), xp.eye(3, 5) * 1.0, xp.eye(4, k=1) * 1.0, xp.tril(x), xp.triu(x, k=1), xp.tril(x, k=-1)),
    (3, 4),
)
case("tril triu", lambda xp, x: xp.tril(x @ x.mT) + xp.triu(x @ x.mT), (2, 4, 3))
case("asarray", lambda xp, x: (xp.asarray(x), x + xp.asarray(2.0), xp.asarray(3, dtype=xp.float64) * x), (3, 4))
case("astype", lambda xp, x: (xp.astype(x * 3, xp.int32), xp.astype(x, xp.bool), xp.astype(x > 0, xp.float64)), SPECIAL[2:, :3])


def _arrays(c: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(23)
    return [i if isinstance(i, np.ndarray) else rng.standard_normal(i) for i in c.inputs]


def _tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


@pytest.mark.parametrize("c", CASES, ids=[f"{i}-{c.names[0]}" for i, c in enumerate(CASES)])
def test_function_gives_what_numpy_gives(c: Case) -> None:
    arrays = _arrays(c)
    program = en.trace(lambda *xs: c.fn(xp, *xs), *[en.TensorSpec(a.shape, a.dtype.name) for a in arrays])
    assert isinstance(program, Program)
    with np.errstate(all="ignore"):
        wants = _tuple(c.fn(_NumPy(), *arrays))
    results = _tuple(en.evaluate(program, *arrays))
    assert len(results) == len(wants)
    for result, want, out in zip(results, wants, program.outputs):
        want = np.asarray(want)
        assert result.shape == want.shape == out.shape
        assert result.dtype.kind == want.dtype.kind
        if result.dtype.kind == "f":
            np.testing.assert_allclose(result, want, rtol=1e-12, atol=1e-13)
        else:
            np.testing.assert_array_equal(result, want)


NOT_FUNCTIONS_OF_TENSORS = {"can_cast", "finfo", "iinfo", "isdtype", "result_type", "__array_namespace_info__"}


def test_every_function_is_tested_and_documented() -> None:
    functions = {n for n in xp.__all__ if callable(getattr(xp, n)) or isinstance(getattr(xp, n), types.ModuleType)} | {"linalg"}
    assert functions - NOT_FUNCTIONS_OF_TENSORS == {n for c in CASES for n in c.names}
    for n in functions - {"linalg"}:
        assert inspect.getdoc(getattr(xp, n)), n
    for n in ("outer", "diagonal", "trace", "vector_norm"):
        assert getattr(xp.linalg, n).__doc__, n


def test_the_standard_is_covered() -> None:
    """All of array API 2024.12 but what depends on values, complex numbers, bit patterns, order of all elements, or devices."""
    absent = """nonzero unique_all unique_counts unique_inverse unique_values sort argsort from_dlpack nextafter imag
        complex64 complex128""".split()
    standard = """
        asarray arange empty empty_like eye full full_like linspace meshgrid ones ones_like tril triu zeros
        zeros_like astype broadcast_arrays broadcast_to can_cast finfo iinfo isdtype result_type abs acos
        acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert bitwise_or
        bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1 floor
        floor_divide greater greater_equal hypot isfinite isinf isnan less less_equal log log1p log2 log10
        logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply negative not_equal
        positive pow real reciprocal remainder round sign signbit sin sinh square sqrt subtract tan tanh
        trunc matmul matrix_transpose tensordot vecdot concat expand_dims flip moveaxis permute_dims repeat
        reshape roll squeeze stack tile unstack argmax argmin count_nonzero searchsorted where
        cumulative_prod cumulative_sum max mean min prod std sum var all any diff take take_along_axis e inf
        nan newaxis pi bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64
        __array_namespace_info__
    """.split()
    for n in standard:
        assert hasattr(xp, n), n
    for n in absent:
        assert not hasattr(xp, n), n


# --------------------------------------------------------------------------------------- what has no counterpart in NumPy


def evaluated(fn: Any, *arrays: np.ndarray) -> Any:
    return en.evaluate(en.trace(fn, *[en.TensorSpec(a.shape, a.dtype.name) for a in arrays]), *arrays)


def test_logsumexp_of_infinities() -> None:
    x = np.array([[-np.inf, -np.inf], [np.inf, 1.0], [np.nan, 1.0], [800.0, 800.0]])
    np.testing.assert_allclose(evaluated(lambda x: xp.logsumexp(x, axis=-1), x), [-np.inf, np.inf, np.nan, 800 + math.log(2)])


def test_softmax_of_a_masked_row_is_nan_as_written() -> None:
    assert np.isnan(evaluated(lambda x: xp.softmax(x), np.full((1, 3), -np.inf))).all()


def test_top_k_with_nan_takes_nan_first() -> None:
    values, indices = evaluated(lambda x: xp.top_k(x, 3), np.array([1.0, np.nan, 5.0, np.nan]))
    np.testing.assert_array_equal(values, [np.nan, np.nan, 5.0])
    np.testing.assert_array_equal(indices, [1, 3, 2])


def test_ties_go_to_the_first() -> None:
    x = np.array([[2.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    assert evaluated(lambda x: xp.argmax(x, axis=1), x).tolist() == [0, 0]
    assert evaluated(lambda x: xp.top_k(x, 2)[1], x).tolist() == [[0, 2], [0, 1]]


def test_numbers_fold() -> None:
    program = en.trace(lambda x: x / xp.sqrt(16.0) * xp.maximum(2, 3) - xp.exp(0), en.TensorSpec((3,), "float64"))
    assert str(program.outputs[0].term) == str(
        en.trace(lambda x: x * 0.25 * 3 - 1, en.TensorSpec((3,), "float64")).outputs[0].term
    )


def test_functions_expand_into_primitive_terms_only() -> None:
    program = en.trace(lambda x, w: xp.layer_norm(xp.gelu(x @ w)), en.TensorSpec((3, 4)), en.TensorSpec((4, 5)))
    assert {t.op for t in postorder([program.outputs[0].term])} <= {"num", "input", "add", "mul", "un", "red"}


def test_einsum_contracts_from_left_to_right() -> None:
    program = en.trace(lambda a, b, c: xp.einsum("ab,bc,cd->ad", a, b, c), *[en.TensorSpec((4, 4))] * 3)
    outer = program.outputs[0].term
    assert outer.op == "red" and [a.op for a in outer.args[0].args] == ["red", "input"]


def test_dtype_functions() -> None:
    assert xp.can_cast("int8", xp.int16) and not xp.can_cast(xp.float32, "float16") and not xp.can_cast("uint64", "int64")
    assert xp.isdtype("bfloat16", "real floating") and xp.isdtype(xp.uint8, ("bool", "unsigned integer"))
    assert not xp.isdtype("float32", "integral") and xp.isdtype("int8", xp.int8) and xp.isdtype(np.int8, "numeric")
    assert xp.finfo("bfloat16").bits == 16 and xp.iinfo(xp.int8).max == 127
    assert float(xp.finfo(xp.float32).eps) == 2.0**-23
    info = xp.__array_namespace_info__()
    assert info.default_dtypes()["real floating"] == "float32"
    assert set(info.dtypes(kind="integral")) == {f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64)}
    program = en.trace(lambda x: xp.astype(x, xp.result_type(x, xp.float64, 1)), en.TensorSpec((2,), "float16"))
    assert program.outputs[0].dtype == "float64"
    for call in (lambda: xp.finfo("int8"), lambda: xp.iinfo("float32"), lambda: xp.isdtype("int128", "bool")):
        with pytest.raises(DtypeError):
            call()


def test_casts() -> None:
    x = np.array([-1.7, -0.2, 0.0, 2.9])
    assert evaluated(lambda x: xp.astype(x, "int32"), x).tolist() == [-1, 0, 0, 2]
    assert evaluated(lambda x: xp.astype(x, "bool"), x).tolist() == [True, True, False, True]
    assert evaluated(lambda x: xp.astype(x > 0, "int8") + 1, x).tolist() == [1, 1, 1, 2]


@pytest.mark.parametrize(
    "fn, error, words",
    [
        (lambda x: xp.einsum("ij,jk->ik", x), ShapeError, ["names 2 operands, 1 were given"]),
        (lambda x: xp.einsum("ijk->i", x), ShapeError, ["does not fit an operand of shape (2, 3)"]),
        (lambda x: xp.einsum("ij,jk->ik", x, x), ShapeError, ["'j' has extents 3 and 2"]),
        (lambda x: xp.einsum("ij->ijk", x), ShapeError, ["no operand has"]),
        (lambda x: xp.einsum("i1->i", x), ShapeError, ["not made of letters"]),
        (lambda x: xp.concat([x, x[:, :2]]), ShapeError, ["(2, 3), (2, 2)", "axis 0"]),
        (lambda x: xp.stack([x, x[0]]), ShapeError, ["(2, 3), (3,)"]),
        (lambda x: xp.concat(x), ShapeError, ["list or tuple"]),
        (lambda x: xp.squeeze(x, axis=0), ShapeError, ["its extent is 2, not 1"]),
        (lambda x: xp.permute_dims(x, (0, 0)), ShapeError, ["no order"]),
        (lambda x: xp.moveaxis(x, (0, 1), 0), ShapeError, ["moveaxis"]),
        (lambda x: xp.broadcast_to(x, (3, 3)), ShapeError, ["(2, 3)", "(3, 3)"]),
        (lambda x: xp.reshape(x, (-1, 4)), ShapeError, ["4 does not divide 6"]),
        (lambda x: xp.reshape(x, (-2, -3)), ShapeError, ["≥ 0"]),
        (lambda x: xp.top_k(x, 4), ShapeError, ["4 elements", "extent 3"]),
        (lambda x: xp.take(x, xp.argmax(x)), ShapeError, ["needs an axis"]),
        (lambda x: xp.take(x, x, axis=0), DtypeError, ["float64 indices"]),
        (lambda x: xp.one_hot(x, 3), DtypeError, ["one_hot of float64"]),
        (lambda x: (x > 0) - (x < 0), DtypeError, ["bools", "^"]),
        (lambda x: -(x > 0), DtypeError, ["negative of a bool"]),
        (lambda x: x << 1, DtypeError, ["bitwise_left_shift of float64"]),
        (lambda x: xp.repeat(x, xp.argmax(x)), TraceError, ["depends on values"]),
        (lambda x: xp.tensordot(x, x, axes=1), ShapeError, ["extents differ"]),
        (lambda x: xp.gelu(x, approximate="erf"), TraceError, ["approximate"]),
        (lambda x: xp.full((2,), x), ShapeError, ["must be a number"]),
        (lambda x: xp.nonzero(x), TraceError, ["depends on values"]),
        (lambda x: xp.linalg.svd(x), TraceError, ["svd is not supported"]),
        (lambda x: xp.fft(x), TraceError, ["xp.fft is not supported"]),
        (lambda x: xp.asarray([1, 2]), TraceError, ["list", "xp.arange"]),
        (lambda x: xp.asarray(1j), DtypeError, ["complex"]),
        (lambda x: x.T @ xp.zeros((2, 2, 2)).T, ShapeError, [".mT or xp.permute_dims"]),
        (lambda x: xp.arange(0, 5, 0), ShapeError, ["step"]),
        (lambda x: xp.sum(x, axis=(0, -2)), ShapeError, ["twice"]),
        (lambda x: xp.cumulative_sum(x), ShapeError, ["needs an axis"]),
        (lambda x: x[:, :, 0], ShapeError, ["3 indices", "(2, 3)"]),
        (lambda x: x[2], ShapeError, ["index 2 is out of range"]),
        (lambda x: x[1.0], ShapeError, ["must be ints"]),
        (lambda x: x[True], TraceError, ["True or False"]),
        (lambda x: x[::0], ShapeError, ["step"]),
        (lambda x: x[..., ...], ShapeError, ["one ellipsis"]),
        (lambda x: x[: x[0, 0]], TraceError, ["depends on a tensor's values"]),
    ],
)
def test_misuse(fn: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as info:
        en.trace(fn, en.TensorSpec((2, 3), "float64"))
    assert __file__ in str(info.value)
    for w in words:
        assert w in str(info.value)
