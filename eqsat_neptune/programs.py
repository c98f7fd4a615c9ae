"""A library of textbook programs: what the tests, the benches and the notebooks compile.

Each program is ordinary array-API code, written the way a textbook writes it: nothing fused, no online form, the
division where the formula has it. ``CASES`` maps a name to a :class:`Case`, which knows the shapes at a ``"small"``
size (odd and ragged, for tests) and at the ``"full"`` size (the one to be judged on), and draws inputs for them::

    case = CASES["prefill_causal"]
    program = en.trace(case.function("full"), *case.specs("full", n=8192))
    arrays = case.inputs("small", np.random.default_rng(0), dtype="bfloat16")

The functions use only ``x.__array_namespace__()``, so they run on NumPy arrays too, except those marked ``sugar``: they
call functions that only traced tensors have (``softmax``, ``top_k``, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  (makes "bfloat16" and the float8 names known to np.dtype)
import numpy as np

if TYPE_CHECKING:
    from eqsat_neptune.program import TensorSpec

EPS = 1e-6
CAP = 50.0

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


# -------------------------------------------------------------------------------------------------- inputs of a program


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def _alibi_slopes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    (heads,) = shape
    return 2.0 ** (-8.0 * (np.arange(heads) + 1) / heads)


def _uniform(low: float, high: float) -> Draw:
    return lambda rng, shape: low + (high - low) * rng.random(shape, dtype=np.float32)


def _below(limit: int) -> Draw:
    return lambda rng, shape: rng.integers(0, limit, shape)


def _retention_log_decay(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.log1p(-(2.0 ** (-5.0 - np.arange(shape[0]))))


def _rope_table(function: Callable[[np.ndarray], np.ndarray]) -> Draw:
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        n, half = shape
        return function(np.arange(n)[:, None] * 10000.0 ** (-np.arange(half) / half))

    return draw


def _one_feature_per_test(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    trees, features, tests = shape
    chosen = rng.integers(0, features, (trees, 1, tests))
    return (np.arange(features)[:, None] == chosen).astype(np.float32)


def _tree_paths(tests: int, leaves: int) -> np.ndarray:
    """+1 where a leaf lies left of a test of a complete binary tree (heap order), -1 where right, 0 where elsewhere."""
    paths = np.zeros((tests, leaves), np.float32)
    for leaf in range(leaves):
        node = leaf + tests
        while node:
            parent = (node - 1) // 2
            paths[parent, leaf] = 1.0 if node == 2 * parent + 1 else -1.0
            node = parent
    return paths


def _draw_tree_paths(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(_tree_paths(*shape[1:]), shape)


def _draw_left_turns(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to((_tree_paths(shape[1] - 1, shape[1]) > 0).sum(axis=0), shape)


@dataclass(frozen=True)
class Arg:
    """One input: shape, dtype (None: the floating dtype that the caller picks), declared bounds, how to draw it."""

    shape: tuple[int, ...]
    dtype: str | None = None
    range: tuple[float, float] | None = None
    draw: Draw = _normal


def _indices(shape: tuple[int, ...], limit: int) -> Arg:
    return Arg(shape, "int32", (0, limit - 1), _below(limit))


@dataclass(frozen=True)
class Case:
    """A program with its sizes.

    `args` gives the inputs for keyword extents; `small` and `full` are those extents at the two sizes; `sweep` lists
    the extents that replace those of `full` when the program is measured. `fn_small` replaces `fn` at the small size
    where a constant of the program (a window, say) must shrink with it.
    """

    name: str
    section: str
    fn: Callable[..., Any]
    args: Callable[..., tuple[Arg, ...]]
    small: Mapping[str, int]
    full: Mapping[str, int]
    sweep: tuple[Mapping[str, int], ...] = ()
    fn_small: Callable[..., Any] | None = None
    sugar: bool = False
    needs_scan: bool = False

    def function(self, size: str = "full") -> Callable[..., Any]:
        """The program's function at `size` (``"small"`` or ``"full"``)."""
        self._check(size)
        return self.fn_small if size == "small" and self.fn_small is not None else self.fn

    def arguments(self, size: str = "full", **extents: int) -> tuple[Arg, ...]:
        """The inputs at `size`, with `extents` replacing those that the case names."""
        self._check(size)
        chosen = {**(self.small if size == "small" else self.full)}
        unknown = sorted(set(extents) - set(chosen))
        if unknown:
            raise ValueError(f"{self.name} has no extent {', '.join(unknown)}; it has {', '.join(chosen)}")
        return self.args(**{**chosen, **extents})

    def specs(self, size: str = "full", dtype: str | None = None, **extents: int) -> tuple[TensorSpec, ...]:
        """The inputs as ``TensorSpec``s. `dtype`: of the floating inputs (default float32 small, bfloat16 full)."""
        from eqsat_neptune.program import TensorSpec

        default = dtype or self.dtype(size)
        return tuple(TensorSpec(a.shape, a.dtype or default, range=a.range) for a in self.arguments(size, **extents))

    def inputs(
        self, size: str, rng: np.random.Generator, dtype: str | None = None, **extents: int
    ) -> list[np.ndarray]:
        """Arrays for :meth:`specs`, rounded to their dtype; an `rng` state gives the same numbers before rounding."""
        default = dtype or self.dtype(size)
        return [
            np.asarray(a.draw(rng, a.shape)).astype(np.dtype(a.dtype or default))
            for a in self.arguments(size, **extents)
        ]

    @staticmethod
    def dtype(size: str) -> str:
        """The floating dtype that `size` has when none is given."""
        return "float32" if size == "small" else "bfloat16"

    @staticmethod
    def _check(size: str) -> None:
        if size not in ("small", "full"):
            raise ValueError(f'size is "small" or "full", not {size!r}')


# ------------------------------------------------------------------------------------------- pieces that programs share


def softmax(x: Any) -> Any:
    """Along the last axis, in the usual safe form."""
    xp = x.__array_namespace__()
    e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def rmsnorm(x: Any) -> Any:
    xp = x.__array_namespace__()
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + EPS)


def layernorm(x: Any) -> Any:
    xp = x.__array_namespace__()
    c = x - xp.mean(x, axis=-1, keepdims=True)
    return c / xp.sqrt(xp.mean(c * c, axis=-1, keepdims=True) + EPS)


def silu(x: Any) -> Any:
    xp = x.__array_namespace__()
    return x / (1.0 + xp.exp(-x))


def scores(q: Any, k: Any) -> Any:
    return q @ k.mT / q.shape[-1] ** 0.5


def positions(x: Any) -> tuple[Any, Any]:
    """Query positions as a column and key positions as a row, for scores `x`."""
    xp = x.__array_namespace__()
    return xp.arange(x.shape[-2])[:, None], xp.arange(x.shape[-1])


def causal(s: Any) -> Any:
    xp = s.__array_namespace__()
    i, j = positions(s)
    return xp.where(j <= i, s, -xp.inf)


def softcap(s: Any) -> Any:
    xp = s.__array_namespace__()
    return CAP * xp.tanh(s / CAP)


def grouped(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Split the query heads into groups that share a key head: (b, hkv, g, n, d) against (b, hkv, 1, n, d)."""
    xp = q.__array_namespace__()
    b, hq, n, d = q.shape
    hkv = k.shape[1]
    return xp.reshape(q, (b, hkv, hq // hkv, n, d)), k[:, :, None], v[:, :, None]


def ungrouped(o: Any) -> Any:
    xp = o.__array_namespace__()
    b, hkv, g, n, d = o.shape
    return xp.reshape(o, (b, hkv * g, n, d))


# --------------------------------------------------------------------------- A: ten attention operators, and their like


def attention(q: Any, k: Any, v: Any) -> Any:
    return softmax(scores(q, k)) @ v


def causal_attention(q: Any, k: Any, v: Any) -> Any:
    return softmax(causal(scores(q, k))) @ v


def gqa_attention(q: Any, k: Any, v: Any) -> Any:
    q, k, v = grouped(q, k, v)
    return ungrouped(attention(q, k, v))


def gqa_causal_attention(q: Any, k: Any, v: Any) -> Any:
    q, k, v = grouped(q, k, v)
    return ungrouped(causal_attention(q, k, v))


def alibi_attention(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    s = scores(q, k)
    i, j = positions(s)
    return softmax(causal(s + slopes[:, None, None] * (j - i))) @ v


def alibi_decode_attention(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    """The one query row stands at the last position, n - 1."""
    xp = q.__array_namespace__()
    n = k.shape[-2]
    j = xp.arange(n)
    return softmax(scores(q, k) + slopes[:, None, None] * (j - (n - 1))) @ v


def softcap_attention(q: Any, k: Any, v: Any) -> Any:
    q, k, v = grouped(q, k, v)
    return ungrouped(softmax(softcap(scores(q, k))) @ v)


def softcap_causal_attention(q: Any, k: Any, v: Any) -> Any:
    q, k, v = grouped(q, k, v)
    return ungrouped(softmax(causal(softcap(scores(q, k)))) @ v)


def windowed_attention(window: int) -> Callable[..., Any]:
    def windowed_attention(q: Any, k: Any, v: Any) -> Any:
        xp = q.__array_namespace__()
        q, k, v = grouped(q, k, v)
        s = softcap(scores(q, k))
        i, j = positions(s)
        s = xp.where((j <= i) & (i - j < window), s, -xp.inf)
        return ungrouped(softmax(s) @ v)

    return windowed_attention


def attention_sugar(q: Any, k: Any, v: Any) -> Any:
    """The same as :func:`attention`, through the namespace's extras."""
    xp = q.__array_namespace__()
    s = xp.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    return xp.einsum("bhij,bhje->bhie", xp.softmax(s, axis=-1), v)


def rope_attention(q: Any, k: Any, v: Any, cos: Any, sin: Any) -> Any:
    xp = q.__array_namespace__()

    def rotate(x: Any) -> Any:
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return causal_attention(rotate(q), rotate(k), v)


def attention_dq(q: Any, k: Any, v: Any, do: Any) -> Any:
    """Gradient of :func:`attention` with respect to q, given that of its output."""
    xp = q.__array_namespace__()
    p = softmax(scores(q, k))
    dp = do @ v.mT
    ds = p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))
    return ds @ k / q.shape[-1] ** 0.5


def attention_dkv(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, Any]:
    xp = q.__array_namespace__()
    p = softmax(scores(q, k))
    dp = do @ v.mT
    ds = p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))
    return ds.mT @ q / q.shape[-1] ** 0.5, p.mT @ do


def attention_backward(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, Any, Any]:
    """All three gradients of causal attention."""
    xp = q.__array_namespace__()
    scale = 1.0 / q.shape[-1] ** 0.5
    p = softmax(causal(scores(q, k)))
    dp = do @ v.mT
    ds = p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))
    return scale * (ds @ k), scale * (ds.mT @ q), p.mT @ do


def speculative_attention(q: Any, k: Any, v: Any) -> Any:
    """The rows are the last ones of the sequence, guessed ahead: each sees the keys up to its own."""
    xp = q.__array_namespace__()
    ahead = k.shape[-2] - q.shape[-2]
    q, k, v = grouped(q, k, v)
    s = scores(q, k)
    i, j = positions(s)
    return ungrouped(softmax(xp.where(j <= i + ahead, s, -xp.inf)) @ v)


# ----------------------------------------------------------------------------------------- B: fused layers of a network


def gqa_plain(q: Any, k: Any, v: Any) -> Any:
    """No maximum is subtracted: unsafe for large logits, as its users write it. k is stored transposed."""
    xp = q.__array_namespace__()
    e = xp.exp(q @ k)
    return (e / xp.sum(e, axis=-1, keepdims=True)) @ v


def qknorm_attention(q: Any, k: Any, v: Any) -> Any:
    return attention(rmsnorm(q), rmsnorm(k), v)


def rmsnorm_linear(x: Any, w: Any) -> Any:
    return rmsnorm(x) @ w


def rmsnorm_gain_linear(x: Any, gain: Any, w: Any) -> Any:
    xp = x.__array_namespace__()
    return xp.rms_norm(x, gain, eps=EPS) @ w


def layernorm_linear(x: Any, gain: Any, bias: Any, w: Any) -> Any:
    return (layernorm(x) * gain + bias) @ w


def lora(x: Any, w: Any, a: Any, b: Any) -> Any:
    return x @ w + (x @ a) @ b


def gated_mlp(x: Any, w1: Any, w2: Any) -> Any:
    return silu(x @ w1) * (x @ w2)


def gated_mlp_sugar(x: Any, w1: Any, w2: Any) -> Any:
    xp = x.__array_namespace__()
    return xp.gelu(x @ w1, approximate="tanh") * (x @ w2)


def ntrans(h: Any, x: Any, alpha: Any) -> Any:
    return rmsnorm(x + alpha * (rmsnorm(h) - x))


def swiglu_linear(x: Any, w: Any, residual: Any) -> Any:
    n = x.shape[-1] // 2
    return (silu(x[:, :n]) * x[:, n:]) @ w.mT + residual


def matmul_chain(a: Any, b: Any, c: Any) -> Any:
    return (a @ b) @ c


def rmsnorm_diamond(x: Any, w1: Any, w2: Any) -> tuple[Any, Any]:
    """Two products and a residual share one normalised tensor."""
    y = rmsnorm(x)
    return silu(y @ w1) * (y @ w2), x + y


def transformer_layer(heads: int) -> Callable[..., Any]:
    """A pre-norm layer on (n, m): attention over `heads` heads, then a two-matrix MLP, each with its residual."""

    def transformer_layer(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, w1: Any, w2: Any) -> Any:
        xp = x.__array_namespace__()
        n, m = x.shape

        def split_heads(t: Any) -> Any:
            return xp.permute_dims(xp.reshape(t, (n, heads, m // heads)), (1, 0, 2))

        y = rmsnorm(x)
        o = attention(split_heads(y @ wq), split_heads(y @ wk), split_heads(y @ wv))
        x = x + xp.reshape(xp.permute_dims(o, (1, 0, 2)), (n, m)) @ wo
        return x + silu(rmsnorm(x) @ w1) @ w2

    return transformer_layer


WEIGHTS_PER_LAYER = 6


def transformer_layers(n_layers: int, heads: int) -> Callable[..., Any]:
    """`n_layers` layers in a row; the weights of each follow those of the one before."""
    layer = transformer_layer(heads)

    def transformer_layers(x: Any, *weights: Any) -> Any:
        for i in range(n_layers):
            x = layer(x, *weights[i * WEIGHTS_PER_LAYER : (i + 1) * WEIGHTS_PER_LAYER])
        return x

    return transformer_layers


# ---------------------------------------------------------------------------------------------- C: chains of reductions


def log_softmax(x: Any) -> Any:
    xp = x.__array_namespace__()
    c = x - xp.max(x, axis=-1, keepdims=True)
    return c - xp.log(xp.sum(xp.exp(c), axis=-1, keepdims=True))


def logsumexp(x: Any) -> Any:
    xp = x.__array_namespace__()
    m = xp.max(x, axis=-1, keepdims=True)
    return xp.squeeze(m, axis=-1) + xp.log(xp.sum(xp.exp(x - m), axis=-1))


def softmax_sugar(x: Any) -> Any:
    return x.__array_namespace__().softmax(x, axis=-1)


def logsumexp_sugar(x: Any) -> Any:
    return x.__array_namespace__().logsumexp(x, axis=-1)


def cross_entropy(logits: Any, target: Any) -> Any:
    """Loss of each row; `target` holds the index of its true class."""
    xp = logits.__array_namespace__()
    return logsumexp(logits) - xp.squeeze(xp.take_along_axis(logits, target[:, None], axis=-1), axis=-1)


def cross_entropy_linear(h: Any, w: Any, target: Any) -> Any:
    """The loss with the product over the vocabulary in it; the true class is picked by comparing positions."""
    xp = h.__array_namespace__()
    logits = h @ w.mT
    chosen = xp.arange(w.shape[0], dtype=xp.int32) == target[:, None]
    return logsumexp(logits) - xp.sum(xp.where(chosen, logits, 0.0), axis=-1)


def softmax_backward(s: Any, dp: Any) -> Any:
    xp = s.__array_namespace__()
    p = softmax(s)
    return p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))


def variance(x: Any) -> Any:
    xp = x.__array_namespace__()
    c = x - xp.mean(x, axis=-1, keepdims=True)
    return xp.mean(c * c, axis=-1)


def standard_deviation(x: Any) -> Any:
    return x.__array_namespace__().std(x, axis=-1)


def layernorm_affine(x: Any, gain: Any, bias: Any) -> Any:
    return layernorm(x) * gain + bias


def layernorm_sugar(x: Any, gain: Any, bias: Any) -> Any:
    return x.__array_namespace__().layer_norm(x, gain, bias, eps=EPS)


def l2_normalize(x: Any) -> Any:
    xp = x.__array_namespace__()
    return x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True))


def rmsnorm_quantize(x: Any, gain: Any) -> tuple[Any, Any]:
    """Normalise, then quantise each row to int8 by its largest magnitude; returns codes and scales."""
    xp = x.__array_namespace__()
    y = rmsnorm(x) * gain
    scale = xp.max(xp.abs(y), axis=-1, keepdims=True) / 127.0
    return xp.astype(xp.round(y / scale), xp.int8), xp.squeeze(scale, axis=-1)


def performer(q: Any, k: Any, v: Any, w: Any) -> Any:
    """Attention by exponential random features `w` (m, d), with the usual stabilisers."""
    xp = q.__array_namespace__()
    q, k = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
    zq = q @ w.mT - 0.5 * xp.sum(q * q, axis=-1, keepdims=True)
    zk = k @ w.mT - 0.5 * xp.sum(k * k, axis=-1, keepdims=True)
    fq = xp.exp(zq - xp.max(zq, axis=-1, keepdims=True))
    fk = xp.exp(zk - xp.max(zk, axis=(-2, -1), keepdims=True))
    return (fq @ (fk.mT @ v)) / (fq @ xp.sum(fk, axis=-2, keepdims=True).mT)


def off_by_one_attention(q: Any, k: Any, v: Any) -> Any:
    """A sink of logit 0: exp(s) / (1 + sum exp(s)), kept safe by a maximum that counts the sink."""
    xp = q.__array_namespace__()
    s = scores(q, k)
    m = xp.maximum(xp.max(s, axis=-1, keepdims=True), 0.0)
    e = xp.exp(s - m)
    return (e / (xp.exp(-m) + xp.sum(e, axis=-1, keepdims=True))) @ v


def sink_attention(q: Any, k: Any, v: Any, sink: Any) -> Any:
    """A learnt sink logit for each head takes part in the denominator."""
    xp = q.__array_namespace__()
    s = causal(scores(q, k))
    sink = sink[:, None, None]
    m = xp.maximum(xp.max(s, axis=-1, keepdims=True), sink)
    e = xp.exp(s - m)
    return (e / (xp.exp(sink - m) + xp.sum(e, axis=-1, keepdims=True))) @ v


def differential_attention(q1: Any, q2: Any, k1: Any, k2: Any, v: Any, weight: Any) -> Any:
    p = softmax(causal(scores(q1, k1))) - weight[:, None, None] * softmax(causal(scores(q2, k2)))
    return p @ v


def attention_logsumexp(q: Any, k: Any) -> Any:
    """The logarithm of each row's denominator: what a backward pass keeps of attention."""
    return logsumexp(scores(q, k))


def sigmoid_attention(q: Any, k: Any, v: Any) -> Any:
    xp = q.__array_namespace__()
    s = scores(q, k) - math.log(k.shape[-2])
    return (1.0 / (1.0 + xp.exp(-s))) @ v


def linear_attention(q: Any, k: Any, v: Any) -> Any:
    """Features elu(x) + 1, written with the full matrix of weights."""
    xp = q.__array_namespace__()

    def feature(x: Any) -> Any:
        return xp.where(x > 0, x + 1.0, xp.exp(xp.minimum(x, 0.0)))

    a = feature(q) @ feature(k).mT
    return (a / xp.sum(a, axis=-1, keepdims=True)) @ v


def retention(q: Any, k: Any, v: Any, log_decay: Any) -> Any:
    """Parallel form of retention: one decay for each head."""
    xp = q.__array_namespace__()
    s = scores(q, k)
    i, j = positions(s)
    decay = xp.where(j <= i, xp.exp(log_decay[:, None, None] * xp.maximum(i - j, 0)), 0.0)
    return (s * decay) @ v


def gated_linear_attention(q: Any, k: Any, v: Any, log_gate: Any) -> Any:
    """Decay that depends on the data: a scan over positions gives its running logarithm."""
    xp = q.__array_namespace__()
    total = xp.cumulative_sum(log_gate, axis=-1)
    s = scores(q, k)
    i, j = positions(s)
    decay = xp.exp(xp.where(j <= i, total[..., :, None] - total[..., None, :], -xp.inf))
    return (s * decay) @ v


def running_mean(x: Any) -> Any:
    xp = x.__array_namespace__()
    count = xp.arange(1, x.shape[-2] + 1)
    return xp.cumulative_sum(x, axis=-2) / count[:, None]


def squared_distances(x: Any, y: Any) -> Any:
    """(n, m) from (n, d) and (m, d), through the (n, m, d) differences."""
    xp = x.__array_namespace__()
    difference = x[:, None, :] - y[None, :, :]
    return xp.sum(difference * difference, axis=-1)


def kmeans_assign(x: Any, centres: Any) -> tuple[Any, Any]:
    """Index of the nearest centre, and the squared distance to it."""
    xp = x.__array_namespace__()
    distances = squared_distances(x, centres)
    return xp.argmin(distances, axis=-1), xp.min(distances, axis=-1)


def nearest_centre(x: Any, centres: Any) -> Any:
    """Index of the nearest centre, by the product: |x − c|² is |c|² − 2x·c beside what is the same for all."""
    xp = x.__array_namespace__()
    return xp.argmax(x @ centres.mT - 0.5 * xp.sum(centres * centres, axis=-1), axis=-1)


def nearest_neighbours(count: int) -> Callable[..., Any]:
    def nearest_neighbours(x: Any, y: Any) -> tuple[Any, Any]:
        xp = x.__array_namespace__()
        negated, indices = xp.top_k(-squared_distances(x, y), count, axis=-1)
        return -negated, indices

    return nearest_neighbours


def kernel_sum(x: Any, y: Any, v: Any) -> Any:
    xp = x.__array_namespace__()
    return xp.exp(-squared_distances(x, y)) @ v


def kernel_regression(x: Any, y: Any, v: Any) -> Any:
    """Nadaraya-Watson: weights exp(-|x - y|^2) that sum to one."""
    return softmax(-squared_distances(x, y)) @ v


def top2_gating(x: Any, w: Any) -> tuple[Any, Any, Any]:
    """The two best experts and the weight of the first, by two rounds of argmax."""
    xp = x.__array_namespace__()
    logits = x @ w
    first = xp.argmax(logits, axis=-1, keepdims=True)
    rest = xp.where(xp.arange(w.shape[-1]) == first, -xp.inf, logits)
    second = xp.argmax(rest, axis=-1, keepdims=True)
    best, next_best = xp.max(logits, axis=-1), xp.max(rest, axis=-1)
    return 1.0 / (1.0 + xp.exp(next_best - best)), xp.squeeze(first, axis=-1), xp.squeeze(second, axis=-1)


def topk_gating(count: int) -> Callable[..., Any]:
    def topk_gating(x: Any, w: Any) -> tuple[Any, Any]:
        xp = x.__array_namespace__()
        values, indices = xp.top_k(x @ w, count, axis=-1)
        return softmax(values), indices

    return topk_gating


def decision_trees(x: Any, tests: Any, thresholds: Any, paths: Any, left_turns: Any, values: Any) -> Any:
    """An ensemble of decision trees as two products: which tests hold, then which leaf every test agrees with.

    x (n, f); tests (t, f, i) picks a feature for each inner node, thresholds (t, i); paths (t, i, l) is +1 or -1 where
    leaf l lies left or right of node i, left_turns (t, l) counts its +1; values (t, l). Returns (n,).
    """
    xp = x.__array_namespace__()
    goes_left = xp.astype(x[None] @ tests < thresholds[:, None], x.dtype)
    reached = goes_left @ paths == left_turns[:, None]
    return xp.sum(xp.where(reached, values[:, None], 0.0), axis=(0, 2))


# --------------------------------------------------------------------------------------------------------- the registry


def _qkv(b: int, hq: int, hkv: int, n: int, d: int, *more: Arg) -> tuple[Arg, ...]:
    return (Arg((b, hq, n, d)), Arg((b, hkv, n, d)), Arg((b, hkv, n, d)), *more)


def _prefill(b: int, hq: int, hkv: int, n: int, d: int) -> tuple[Arg, ...]:
    return _qkv(b, hq, hkv, n, d)


def _prefill_alibi(b: int, hq: int, hkv: int, n: int, d: int) -> tuple[Arg, ...]:
    return _qkv(b, hq, hkv, n, d, Arg((hq,), draw=_alibi_slopes))


def _decode(batch: int, hq: int, hkv: int, n: int, d: int) -> tuple[Arg, ...]:
    return (Arg((batch, hq, 1, d)), Arg((batch, hkv, n, d)), Arg((batch, hkv, n, d)))


def _decode_alibi(batch: int, hq: int, hkv: int, n: int, d: int) -> tuple[Arg, ...]:
    return (*_decode(batch, hq, hkv, n, d), Arg((hq,), draw=_alibi_slopes))


def _backward(b: int, hq: int, hkv: int, n: int, d: int) -> tuple[Arg, ...]:
    return _qkv(b, hq, hkv, n, d, Arg((b, hq, n, d)))


_PREFILL_SWEEP = tuple({"n": n} for n in (512, 1024, 2048, 4096, 8192, 16384, 32768))
_DECODE_SWEEP = tuple(
    {"batch": b, "n": n} for b, n in ((1, 1024), (1, 8192), (1, 65536), (16, 4096), (16, 8192), (16, 16384))
)
_BATCH_SWEEP = tuple({"b": b} for b in (1, 8, 16))


def _heads(hq: int, hkv: int, n: int = 4096, d: int = 128, **batch: int) -> dict[str, int]:
    return {**(batch or {"b": 1}), "hq": hq, "hkv": hkv, "n": n, "d": d}


def _attention_operators() -> list[Case]:
    def prefill(name: str, fn: Callable[..., Any], hq: int, hkv: int, args: Any = _prefill, **more: Any) -> Case:
        small = _heads(4, 4 if hq == hkv else 2, n=37, d=8)
        return Case(f"prefill_{name}", "A", fn, args, small, _heads(hq, hkv), _PREFILL_SWEEP, **more)

    def decode(name: str, fn: Callable[..., Any], hq: int, hkv: int, args: Any = _decode) -> Case:
        small = _heads(4, 4 if hq == hkv else 2, n=37, d=8, batch=2)
        return Case(f"decode_{name}", "A", fn, args, small, _heads(hq, hkv, n=8192, batch=1), _DECODE_SWEEP)

    return [
        prefill("global", attention, 32, 32),
        prefill("causal", causal_attention, 32, 32),
        prefill("gqa", gqa_causal_attention, 64, 8),
        prefill("alibi", alibi_attention, 32, 32, _prefill_alibi),
        prefill("softcap", softcap_causal_attention, 32, 16),
        prefill("windowed", windowed_attention(4096), 32, 8, fn_small=windowed_attention(11)),
        decode("causal", attention, 32, 32),
        decode("gqa", gqa_attention, 64, 8),
        decode("alibi", alibi_decode_attention, 32, 32, _decode_alibi),
        decode("softcap", softcap_attention, 32, 16),
    ]


def _layer_operators() -> list[Case]:
    def qkv3(h: int, n: int, d: int) -> tuple[Arg, ...]:
        return (Arg((h, n, d)),) * 3

    def plain(b: int, nq: int, nk: int, d: int) -> tuple[Arg, ...]:
        return (Arg((2 * b, nq, d)), Arg((2 * b, d, nk)), Arg((2 * b, nk, d)))

    def linear(b: int, m: int, f: int) -> tuple[Arg, ...]:
        return (Arg((2 * b, m)), Arg((m, f)))

    def gain_linear(b: int, m: int, f: int) -> tuple[Arg, ...]:
        return (Arg((2 * b, m)), Arg((m,)), Arg((m, f)))

    def affine_linear(n: int, m: int, f: int) -> tuple[Arg, ...]:
        return (Arg((n, m)), Arg((m,)), Arg((m,)), Arg((m, f)))

    def two_products(n: int, m: int, f: int) -> tuple[Arg, ...]:
        return (Arg((n, m)), Arg((m, f)), Arg((m, f)))

    def adapted(n: int, m: int, f: int, r: int) -> tuple[Arg, ...]:
        return (Arg((n, m)), Arg((m, f)), Arg((m, r)), Arg((r, f)))

    def rope(b: int, hq: int, hkv: int, n: int, d: int) -> tuple[Arg, ...]:
        unit = (-1.0, 1.0)
        cos = Arg((n, d // 2), range=unit, draw=_rope_table(np.cos))
        sin = Arg((n, d // 2), range=unit, draw=_rope_table(np.sin))
        return _qkv(b, hq, hkv, n, d, cos, sin)

    def stack(layers: int) -> Callable[..., tuple[Arg, ...]]:
        def args(n: int, m: int, f: int) -> tuple[Arg, ...]:
            weights = (*(Arg((m, m)),) * 4, Arg((m, f)), Arg((f, m)))
            return (Arg((n, m)), *weights * layers)

        return args

    layer_small, layer_full = {"n": 9, "m": 8, "f": 12}, {"n": 4096, "m": 2048, "f": 8192}
    return [
        Case(
            "gqa_plain", "B", gqa_plain, plain,
            {"b": 1, "nq": 11, "nk": 37, "d": 4}, {"b": 1, "nq": 256, "nk": 4096, "d": 64}, _BATCH_SWEEP,
        ),
        Case(
            "qknorm", "B", qknorm_attention, qkv3,
            {"h": 2, "n": 37, "d": 8}, {"h": 8, "n": 128, "d": 64}, ({"n": 128}, {"n": 4096}),
        ),
        Case(
            "rmsnorm_linear", "B", rmsnorm_linear, linear,
            {"b": 3, "m": 37, "f": 11}, {"b": 8, "m": 4096, "f": 6144}, _BATCH_SWEEP,
        ),
        Case(
            "rmsnorm_gain_linear", "B", rmsnorm_gain_linear, gain_linear,
            {"b": 3, "m": 37, "f": 11}, {"b": 8, "m": 4096, "f": 6144}, _BATCH_SWEEP, sugar=True,
        ),
        Case(
            "lora", "B", lora, adapted,
            {"n": 5, "m": 19, "f": 23, "r": 3}, {"n": 16, "m": 256, "f": 4096, "r": 16},
        ),
        Case(
            "gated_mlp", "B", gated_mlp, two_products,
            {"n": 5, "m": 19, "f": 23}, {"n": 8, "m": 4096, "f": 4096}, tuple({"n": n} for n in (8, 64, 128)),
        ),
        Case(
            "gated_mlp_gelu", "B", gated_mlp_sugar, two_products,
            {"n": 5, "m": 19, "f": 23}, {"n": 8, "m": 4096, "f": 4096}, sugar=True,
        ),
        Case(
            "ntrans", "B", ntrans, lambda b, m: (Arg((b, m)),) * 3,
            {"b": 5, "m": 37}, {"b": 8, "m": 4096}, _BATCH_SWEEP,
        ),
        Case(
            "layernorm_linear", "B", layernorm_linear, affine_linear,
            {"n": 5, "m": 37, "f": 11}, {"n": 4096, "m": 4096, "f": 6144}, ({"n": 16}, {"n": 4096}),
        ),
        Case(
            "swiglu_linear", "B", swiglu_linear,
            lambda n, m, f: (Arg((n, 2 * m)), Arg((f, m)), Arg((n, f))),
            {"n": 5, "m": 19, "f": 11}, {"n": 4096, "m": 4096, "f": 4096}, ({"n": 8}, {"n": 4096}),
        ),
        Case(
            "matmul_chain", "B", matmul_chain,
            lambda n, r, m: (Arg((n, r)), Arg((r, m)), Arg((m, r))),
            {"n": 13, "r": 3, "m": 17}, {"n": 4096, "r": 64, "m": 4096},
        ),
        Case(
            "rmsnorm_diamond", "B", rmsnorm_diamond, two_products,
            {"n": 5, "m": 19, "f": 23}, {"n": 8, "m": 4096, "f": 4096},
        ),
        Case(
            "rope_attention", "B", rope_attention, rope,
            _heads(2, 2, n=37, d=8), _heads(32, 32), _PREFILL_SWEEP,
        ),
        Case(
            "attention_sugar", "B", attention_sugar, _prefill,
            _heads(2, 2, n=37, d=8), _heads(32, 32), sugar=True,
        ),
        Case("attention_dq", "B", attention_dq, _backward, _heads(2, 2, n=37, d=8), _heads(32, 32), _PREFILL_SWEEP),
        Case("attention_dkv", "B", attention_dkv, _backward, _heads(2, 2, n=37, d=8), _heads(32, 32), _PREFILL_SWEEP),
        Case("attention_backward", "B", attention_backward, _backward, _heads(2, 2, n=37, d=8), _heads(32, 32)),
        Case(
            "layers1", "B", transformer_layers(1, 16), stack(1), layer_small, layer_full,
            fn_small=transformer_layers(1, 2),
        ),
        Case(
            "layers2", "B", transformer_layers(2, 16), stack(2), layer_small, layer_full,
            fn_small=transformer_layers(2, 2),
        ),
    ]


def _reduction_chains() -> list[Case]:
    rows_small, rows_full = {"n": 5, "m": 37}, {"n": 8192, "m": 8192}

    def rows(name: str, fn: Callable[..., Any], inputs: int = 1, **more: Any) -> Case:
        return Case(name, "C", fn, lambda n, m: (Arg((n, m)),) * inputs, rows_small, rows_full, **more)

    def affine_rows(name: str, fn: Callable[..., Any], vectors: int, **more: Any) -> Case:
        def args(n: int, m: int) -> tuple[Arg, ...]:
            return (Arg((n, m)), *(Arg((m,)),) * vectors)

        return Case(name, "C", fn, args, rows_small, rows_full, **more)

    def heads(name: str, fn: Callable[..., Any], *per_head: Draw, **more: Any) -> Case:
        def args(h: int, n: int, d: int) -> tuple[Arg, ...]:
            return (*(Arg((h, n, d)),) * 3, *(Arg((h,), draw=draw) for draw in per_head))

        return Case(name, "C", fn, args, {"h": 2, "n": 37, "d": 8}, {"h": 32, "n": 4096, "d": 128}, **more)

    def labelled(n: int, m: int) -> tuple[Arg, ...]:
        return (Arg((n, m)), _indices((n,), m))

    def vocabulary(n: int, d: int, v: int) -> tuple[Arg, ...]:
        return (Arg((n, d)), Arg((v, d)), _indices((n,), v))

    def features(h: int, n: int, d: int, m: int) -> tuple[Arg, ...]:
        return (*(Arg((h, n, d)),) * 3, Arg((m, d)))

    def differential(h: int, n: int, d: int) -> tuple[Arg, ...]:
        return (*(Arg((h, n, d)),) * 4, Arg((h, n, 2 * d)), Arg((h,), draw=_uniform(0.2, 0.8)))

    def gated(h: int, n: int, d: int) -> tuple[Arg, ...]:
        return (*(Arg((h, n, d)),) * 3, Arg((h, n), draw=_uniform(-0.5, 0.0)))

    def points(n: int, m: int, d: int) -> tuple[Arg, ...]:
        return (Arg((n, d)), Arg((m, d)))

    def weighted_points(n: int, m: int, d: int, e: int) -> tuple[Arg, ...]:
        return (Arg((n, d)), Arg((m, d)), Arg((m, e)))

    def experts(n: int, d: int, e: int) -> tuple[Arg, ...]:
        return (Arg((n, d)), Arg((d, e)))

    def trees(n: int, f: int, t: int, depth: int) -> tuple[Arg, ...]:
        leaves = 2**depth
        return (
            Arg((n, f)),
            Arg((t, f, leaves - 1), range=(0.0, 1.0), draw=_one_feature_per_test),
            Arg((t, leaves - 1)),
            Arg((t, leaves - 1, leaves), range=(-1.0, 1.0), draw=_draw_tree_paths),
            Arg((t, leaves), range=(0.0, float(depth)), draw=_draw_left_turns),
            Arg((t, leaves)),
        )

    head_small, head_full = {"h": 2, "n": 37, "d": 8}, {"h": 32, "n": 4096, "d": 128}
    points_small, points_full = {"n": 13, "m": 37, "d": 3}, {"n": 16384, "m": 4096, "d": 64}
    weights_small, weights_full = {**points_small, "e": 5}, {"n": 16384, "m": 16384, "d": 16, "e": 64}
    experts_small, experts_full = {"n": 13, "d": 7, "e": 9}, {"n": 8192, "d": 4096, "e": 64}
    return [
        rows("softmax", softmax),
        rows("softmax_sugar", softmax_sugar, sugar=True),
        rows("log_softmax", log_softmax),
        rows("logsumexp", logsumexp),
        rows("logsumexp_sugar", logsumexp_sugar, sugar=True),
        Case("cross_entropy", "C", cross_entropy, labelled, {"n": 5, "m": 37}, {"n": 4096, "m": 65536}),
        Case(
            "cross_entropy_linear", "C", cross_entropy_linear, vocabulary,
            {"n": 5, "d": 7, "v": 37}, {"n": 4096, "d": 2048, "v": 65536},
        ),
        rows("softmax_backward", softmax_backward, 2),
        rows("variance", variance),
        rows("standard_deviation", standard_deviation),
        affine_rows("layernorm", layernorm_affine, 2),
        affine_rows("layernorm_sugar", layernorm_sugar, 2, sugar=True),
        rows("l2_normalize", l2_normalize),
        affine_rows("rmsnorm_quantize", rmsnorm_quantize, 1),
        Case("performer", "C", performer, features, {**head_small, "m": 11}, {"h": 8, "n": 4096, "d": 64, "m": 256}),
        heads("off_by_one_attention", off_by_one_attention),
        heads("sink_attention", sink_attention, _normal),
        Case("differential_attention", "C", differential_attention, differential, head_small, head_full),
        heads("sigmoid_attention", sigmoid_attention),
        Case(
            "attention_logsumexp", "C", attention_logsumexp, lambda h, n, d: (Arg((h, n, d)),) * 2, head_small, head_full
        ),
        heads("linear_attention", linear_attention),
        heads("retention", retention, _retention_log_decay),
        Case(
            "gated_linear_attention", "C", gated_linear_attention, gated, head_small, head_full, needs_scan=True
        ),
        rows("running_mean", running_mean, needs_scan=True),
        Case("kmeans_assign", "C", kmeans_assign, points, points_small, points_full),
        Case("nearest_centre", "C", nearest_centre, points, points_small, {"n": 65536, "m": 1024, "d": 128}),
        Case(
            "nearest_neighbours", "C", nearest_neighbours(16), points, points_small, points_full,
            fn_small=nearest_neighbours(4), sugar=True,
        ),
        Case("kernel_sum", "C", kernel_sum, weighted_points, weights_small, weights_full),
        Case("kernel_regression", "C", kernel_regression, weighted_points, weights_small, weights_full),
        Case("top2_gating", "C", top2_gating, experts, experts_small, experts_full),
        Case(
            "topk_gating", "C", topk_gating(8), experts, experts_small, experts_full,
            fn_small=topk_gating(3), sugar=True,
        ),
        Case(
            "decision_trees", "C", decision_trees, trees,
            {"n": 13, "f": 5, "t": 3, "depth": 2}, {"n": 16384, "f": 64, "t": 128, "depth": 6},
        ),
    ]


CASES: dict[str, Case] = {
    case.name: case for case in (*_attention_operators(), *_layer_operators(), *_reduction_chains())
}
