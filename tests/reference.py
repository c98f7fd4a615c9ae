"""Independent float64 references of the programs in ``eqsat_neptune.programs``, at their small size.

They are written another way than the programs wherever that is cheap: loops over heads and rows, only the kept keys,
states instead of matrices, Jacobians instead of the closed form. Each returns one array or a tuple, like its program.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

EPS = 1e-6


def _over_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `function` to each row of the first argument (and of every other two-dimensional one)."""

    def apply(x: np.ndarray, *others: np.ndarray) -> Any:
        rows = [function(x[i], *(o[i] if o.ndim == 2 else o for o in others)) for i in range(len(x))]
        return tuple(map(np.stack, zip(*rows))) if isinstance(rows[0], tuple) else np.stack(rows)

    return apply


def _over_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `function` to each index of the leading axis of every argument."""

    def apply(*arrays: np.ndarray) -> Any:
        parts = [function(*(a[h] for a in arrays)) for h in range(len(arrays[0]))]
        return tuple(map(np.stack, zip(*parts))) if isinstance(parts[0], tuple) else np.stack(parts)

    return apply


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.einsum("ij,jk->ik", a, b)


# ------------------------------------------------------------------------------------------------------------ attention


def _weights(s: np.ndarray) -> np.ndarray:
    w = np.exp(s - s.max())
    return w / math.fsum(w)


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    score: Callable[..., np.ndarray] = lambda s, i, j: s,
    keep: Callable[..., np.ndarray] = lambda i, j: j >= 0,
) -> np.ndarray:
    """One head: q (n, d), k (m, d), v (m, e); only the kept keys take part."""
    out = np.zeros((len(q), v.shape[-1]))
    j = np.arange(len(k))
    for i in range(len(q)):
        kept = j[keep(i, j)]
        out[i] = _weights(score(k[kept] @ q[i] / math.sqrt(q.shape[-1]), i, kept)) @ v[kept]
    return out


def _attention(score: Any = None, keep: Any = lambda i, j: j >= 0) -> Callable[..., np.ndarray]:
    """All heads: q (b, hq, n, d), k and v (b, hkv, m, d), and `per_head` parameters that `score` takes last."""

    def apply(q: np.ndarray, k: np.ndarray, v: np.ndarray, *per_head: np.ndarray) -> np.ndarray:
        batch, heads = q.shape[:2]
        group = heads // k.shape[1]
        out = np.zeros((*q.shape[:3], v.shape[-1]))
        for b in range(batch):
            for h in range(heads):
                params = [p[h] for p in per_head]
                fn = (lambda s, i, j: s) if score is None else (lambda s, i, j, p=params: score(s, i, j, *p))
                out[b, h] = _attend(q[b, h], k[b, h // group], v[b, h // group], fn, keep)
        return out

    return apply


def _causal(i: int, j: np.ndarray) -> np.ndarray:
    return j <= i


def _window(i: int, j: np.ndarray) -> np.ndarray:
    return (j <= i) & (j > i - 11)


def _alibi(s: np.ndarray, i: int, j: np.ndarray, slope: float) -> np.ndarray:
    return s - slope * (i - j)


def _softcap(s: np.ndarray, i: int, j: np.ndarray) -> np.ndarray:
    return np.array([50.0 * math.tanh(x / 50.0) for x in s])


def _decode_alibi(q: np.ndarray, k: np.ndarray, v: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    last = k.shape[-2] - 1
    return _attention(lambda s, i, j, slope: _alibi(s, last, j, slope))(q, k, v, slopes)


def _rope(q: np.ndarray, k: np.ndarray, v: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    def rotate(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    return _attention(keep=_causal)(rotate(q), rotate(k), v)


def _gradients(keep: Callable[..., np.ndarray]) -> Callable[..., tuple[np.ndarray, ...]]:
    """dq, dk, dv of one head, row by row through the Jacobian diag(p) - p pᵀ."""

    def head(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> tuple[np.ndarray, ...]:
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        j = np.arange(len(k))
        scale = 1.0 / math.sqrt(q.shape[-1])
        for i in range(len(q)):
            kept = j[keep(i, j)]
            p = _weights(k[kept] @ q[i] * scale)
            ds = (np.diag(p) - np.outer(p, p)) @ (v[kept] @ do[i]) * scale
            dq[i] = ds @ k[kept]
            dk[kept] += np.outer(ds, q[i])
            dv[kept] += np.outer(p, do[i])
        return dq, dk, dv

    return _over_heads(_over_heads(head))


def _everywhere(i: int, j: np.ndarray) -> np.ndarray:
    return j >= 0


# -------------------------------------------------------------------------------------------------- layers of a network


def _gqa_plain_head(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _attend(q * math.sqrt(q.shape[-1]), k.T, v)


def _rms_row(x: np.ndarray) -> np.ndarray:
    return x / math.sqrt(math.fsum(x * x) / len(x) + EPS)


_rms = _over_rows(_rms_row)


def _norm_row(x: np.ndarray) -> np.ndarray:
    mean = math.fsum(x) / len(x)
    return (x - mean) / math.sqrt(math.fsum((x - mean) ** 2) / len(x) + EPS)


def _layernorm(x: np.ndarray, gain: np.ndarray, bias: np.ndarray) -> np.ndarray:
    return np.stack([gain * _norm_row(row) + bias for row in x])


def _silu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def _qknorm_head(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _attend(_rms(q), _rms(k), v)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _ntrans(h: np.ndarray, x: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return _rms((1.0 - alpha) * x + alpha * _rms(h))


def _swiglu_linear(x: np.ndarray, w: np.ndarray, residual: np.ndarray) -> np.ndarray:
    gate, up = np.split(x, 2, axis=1)
    return _matmul(_silu(gate) * up, w.T) + residual


def _diamond(x: np.ndarray, w1: np.ndarray, w2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = _rms(x)
    return _silu(_matmul(y, w1)) * _matmul(y, w2), x + y


def _layers(x: np.ndarray, *weights: np.ndarray, heads: int = 2) -> np.ndarray:
    for start in range(0, len(weights), 6):
        wq, wk, wv, wo, w1, w2 = weights[start : start + 6]
        y = _rms(x)
        width = x.shape[1] // heads
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            o = _attend(y @ wq[:, part], y @ wk[:, part], y @ wv[:, part])
            x = x + o @ wo[part]
        x = x + _silu(_rms(x) @ w1) @ w2
    return x


# ------------------------------------------------------------------------------------------------- chains of reductions


def _logsumexp_row(x: np.ndarray) -> float:
    return math.log(math.fsum(np.exp(x)))


def _cross_entropy(logits: np.ndarray, target: np.ndarray) -> np.ndarray:
    return np.array([-math.log(_weights(row)[t]) for row, t in zip(logits, target)])


def _softmax_backward_row(s: np.ndarray, dp: np.ndarray) -> np.ndarray:
    p = _weights(s)
    return (np.diag(p) - np.outer(p, p)) @ dp


def _quantize(x: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = _rms(x) * gain
    scale = np.array([max(abs(value) for value in row) for row in y]) / 127.0
    return np.array([[round(value) for value in row] for row in y / scale[:, None]]), scale


def _performer(q: np.ndarray, k: np.ndarray, v: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The stabilisers cancel, so they are left out."""
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    root = q.shape[-1] ** 0.25
    for h in range(len(q)):
        for i, query in enumerate(q[h] / root):
            keys = k[h] / root
            a = np.array([np.exp(w @ query - query @ query / 2) @ np.exp(w @ key - key @ key / 2) for key in keys])
            out[h, i] = a @ v[h] / math.fsum(a)
    return out


def _with_sink(q: np.ndarray, k: np.ndarray, v: np.ndarray, logit: float, keep: Any) -> np.ndarray:
    """One more key, of a given logit, whose value is zero."""
    out = np.zeros_like(q)
    j = np.arange(len(k))
    for i in range(len(q)):
        kept = j[keep(i, j)]
        s = np.append(k[kept] @ q[i] / math.sqrt(q.shape[-1]), logit)
        out[i] = _weights(s)[:-1] @ v[kept]
    return out


def _off_by_one_head(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _with_sink(q, k, v, 0.0, _everywhere)


def _sink_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, logit: float) -> np.ndarray:
    return _with_sink(q, k, v, logit, _causal)


def _differential_head(
    q1: np.ndarray, q2: np.ndarray, k1: np.ndarray, k2: np.ndarray, v: np.ndarray, weight: float
) -> np.ndarray:
    return _attend(q1, k1, v, keep=_causal) - weight * _attend(q2, k2, v, keep=_causal)


def _sigmoid_head(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """sigmoid(s - log n) = e^s / (e^s + n)."""
    e = np.exp(_matmul(q, k.T) / math.sqrt(q.shape[-1]))
    return _matmul(e / (e + len(k)), v)


def _linear_head(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    fq, fk = (np.where(x > 0, x + 1, np.exp(np.where(x > 0, 0, x))) for x in (q, k))
    return np.stack([row @ (fk.T @ v) / (row @ fk.sum(axis=0)) for row in fq])


def _recurrent(q: np.ndarray, k: np.ndarray, v: np.ndarray, log_gates: np.ndarray) -> np.ndarray:
    """One head as a state that decays: S ← gate·S + k vᵀ, o = q S / √d."""
    state = np.zeros((k.shape[-1], v.shape[-1]))
    out = np.zeros_like(v)
    for t in range(len(q)):
        state = math.exp(log_gates[t]) * state + np.outer(k[t], v[t])
        out[t] = q[t] @ state / math.sqrt(q.shape[-1])
    return out


def _retention_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, log_decay: float) -> np.ndarray:
    return _recurrent(q, k, v, np.full(len(q), log_decay))


def _running_mean(x: np.ndarray) -> np.ndarray:
    return np.stack([x[: t + 1].mean(axis=0) for t in range(len(x))])


def _distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.array([[math.dist(a, b) ** 2 for b in y] for a in x])


def _kmeans(x: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    best = [min(range(len(centres)), key=lambda c, a=a: math.dist(a, centres[c])) for a in x]
    return np.array(best), np.array([math.dist(a, centres[c]) ** 2 for a, c in zip(x, best)])


def _nearest(x: np.ndarray, y: np.ndarray, count: int = 4) -> tuple[np.ndarray, np.ndarray]:
    order = [sorted(range(len(y)), key=lambda c, a=a: math.dist(a, y[c]))[:count] for a in x]
    return np.array([[math.dist(a, y[c]) ** 2 for c in row] for a, row in zip(x, order)]), np.array(order)


def _kernel_sum(x: np.ndarray, y: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _matmul(np.exp(-_distances(x, y)), v)


def _kernel_regression(x: np.ndarray, y: np.ndarray, v: np.ndarray) -> np.ndarray:
    weights = np.exp(-_distances(x, y))
    return _matmul(weights, v) / weights.sum(axis=1, keepdims=True)


def _topk_gating(x: np.ndarray, w: np.ndarray, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    logits = _matmul(x, w)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    return np.stack([_weights(row[chosen]) for row, chosen in zip(logits, order)]), order


def _top2_gating(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
    weights, order = _topk_gating(x, w, count=2)
    return weights[:, 0], order[:, 0], order[:, 1]


def _decision_trees(
    x: np.ndarray,
    tests: np.ndarray,
    thresholds: np.ndarray,
    paths: np.ndarray,
    left_turns: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """Walk every tree from its root; nodes are in heap order."""
    inner = thresholds.shape[1]
    out = np.zeros(len(x))
    for i, point in enumerate(x):
        for t in range(len(tests)):
            node = 0
            while node < inner:
                feature = int(np.flatnonzero(tests[t, :, node])[0])
                node = 2 * node + (1 if point[feature] < thresholds[t, node] else 2)
            out[i] += values[t, node - inner]
    return out


REFERENCES: dict[str, Callable[..., Any]] = {
    "prefill_global": _attention(),
    "prefill_causal": _attention(keep=_causal),
    "prefill_gqa": _attention(keep=_causal),
    "prefill_alibi": _attention(_alibi, _causal),
    "prefill_softcap": _attention(_softcap, _causal),
    "prefill_windowed": _attention(_softcap, _window),
    "decode_causal": _attention(),
    "decode_gqa": _attention(),
    "decode_alibi": _decode_alibi,
    "decode_softcap": _attention(_softcap),
    "gqa_plain": _over_heads(_gqa_plain_head),
    "qknorm": _over_heads(_qknorm_head),
    "rmsnorm_linear": lambda x, w: _matmul(_rms(x), w),
    "rmsnorm_gain_linear": lambda x, gain, w: _matmul(_rms(x), gain[:, None] * w),
    "lora": lambda x, w, a, b: _matmul(x, w + _matmul(a, b)),
    "gated_mlp": lambda x, w1, w2: _silu(_matmul(x, w1)) * _matmul(x, w2),
    "gated_mlp_gelu": lambda x, w1, w2: _gelu_tanh(_matmul(x, w1)) * _matmul(x, w2),
    "ntrans": _ntrans,
    "layernorm_linear": lambda x, gain, bias, w: _matmul(_layernorm(x, gain, bias), w),
    "swiglu_linear": _swiglu_linear,
    "matmul_chain": lambda a, b, c: _matmul(a, _matmul(b, c)),
    "rmsnorm_diamond": _diamond,
    "rope_attention": _rope,
    "attention_sugar": _attention(),
    "attention_dq": lambda *args: _gradients(_everywhere)(*args)[0],
    "attention_dkv": lambda *args: _gradients(_everywhere)(*args)[1:],
    "attention_backward": _gradients(_causal),
    "layers1": _layers,
    "layers2": _layers,
    "softmax": _over_rows(_weights),
    "softmax_sugar": _over_rows(_weights),
    "log_softmax": _over_rows(lambda x: np.log(_weights(x))),
    "logsumexp": _over_rows(_logsumexp_row),
    "logsumexp_sugar": _over_rows(_logsumexp_row),
    "cross_entropy": _cross_entropy,
    "cross_entropy_linear": lambda h, w, target: _cross_entropy(_matmul(h, w.T), target),
    "softmax_backward": _over_rows(_softmax_backward_row),
    "variance": lambda x: np.var(x, axis=1),
    "standard_deviation": lambda x: np.std(x, axis=1),
    "layernorm": _layernorm,
    "layernorm_sugar": _layernorm,
    "l2_normalize": _over_rows(lambda x: x / math.hypot(*x)),
    "rmsnorm_quantize": _quantize,
    "performer": _performer,
    "off_by_one_attention": _over_heads(_off_by_one_head),
    "sink_attention": _over_heads(_sink_head),
    "differential_attention": _over_heads(_differential_head),
    "sigmoid_attention": _over_heads(_sigmoid_head),
    "attention_logsumexp": _over_heads(lambda q, k: np.array([_logsumexp_row(r) for r in _matmul(q, k.T) / math.sqrt(q.shape[-1])])),
    "linear_attention": _over_heads(_linear_head),
    "retention": _over_heads(_retention_head),
    "gated_linear_attention": _over_heads(_recurrent),
    "running_mean": _running_mean,
    "kmeans_assign": _kmeans,
    "nearest_centre": lambda x, centres: _kmeans(x, centres)[0],
    "nearest_neighbours": _nearest,
    "kernel_sum": _kernel_sum,
    "kernel_regression": _kernel_regression,
    "top2_gating": _top2_gating,
    "topk_gating": _topk_gating,
    "decision_trees": _decision_trees,
}
