"""A peer of the measured kernels: attention written by hand in TileLang, as well as its language allows on a Hopper GPU.

K and V come by TMA from warps of their own and products are wgmma, both by TileLang's own passes; exponentials are base 2 with the scale
folded in; blocks that a mask empties are skipped, and only those that it cuts are masked.  Long rows start first, by few heads at a time
so that their K and V stay in the L2.

Importing raises ImportError where TileLang is absent.  Annotations are evaluated here: they say a kernel's shapes.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import tilelang
import tilelang.language as T
from operators import Attention, Shape
from tuned import Bind, fastest

LOG2E = math.log2(math.e)
L2 = 24 << 20  # bytes of K and V that heads running together may have
NEVER = -1e30  # below every score, yet finite: differences of it are no NaN


@dataclass(frozen=True)
class Tile:
    """How the work is cut.  threads: that compute; those that load are added by TileLang."""

    rows: int
    keys: int
    threads: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}×{self.keys}, {self.threads} threads, {self.stages} stages"


def tiles(d: int) -> tuple[Tile, ...]:
    """Worth a try for a head dim, the likeliest first."""
    if d <= 64:
        return (Tile(128, 128, 256, 2), Tile(192, 128, 384, 2), Tile(128, 64, 256, 4))
    if d <= 128:
        return (Tile(128, 128, 256, 2), Tile(128, 96, 256, 3), Tile(128, 64, 256, 3))
    return (Tile(128, 64, 256, 2), Tile(64, 64, 128, 2))


def program(f: Attention, tile: Tile, q: Shape, k: Shape, v: Shape, dtype: str) -> Any:
    """The kernel as TileLang's intermediate code, of (q, k, v, slopes, out).  Shapes: (b, hq, n, d), (b, hkv, n, d), (b, hkv, n, dv)."""
    rows, keys, (b, hq, n, d), (_, hkv, _, dv) = tile.rows, tile.keys, q, v
    heads, shared, count = b * hq, hq // hkv, -(-n // rows)
    together = min(heads, max(1, L2 // (2 * n * (d + dv))) * shared)
    causal, alibi, cap, window = f.causal, f.alibi, f.cap, f.window
    inner = 1 / (math.sqrt(d) * cap) if cap else 0.0
    unit = (cap or 1 / math.sqrt(d)) * LOG2E  # scores to base 2
    scale = 1.0 if alibi else unit  # a bias is added to scores to base 2
    capped, masked = cap > 0, causal or n % keys != 0
    per_row = T.GemmWarpPolicy.FullRow

    def kept(i: Any, j: Any) -> Any:
        if not causal:
            return j < n
        return T.And(j <= i, i - j < window) if window else j <= i

    @T.prim_func
    def attention(
        q: T.Tensor((b, hq, n, d), dtype),
        k: T.Tensor((b, hkv, n, d), dtype),
        v: T.Tensor((b, hkv, n, dv), dtype),
        slopes: T.Tensor((hq,), dtype),
        out: T.Tensor((b, hq, n, dv), dtype),
    ):
        with T.Kernel(count * heads, threads=tile.threads) as pid:
            q_shared = T.alloc_shared((rows, d), dtype)
            k_shared = T.alloc_shared((keys, d), dtype)
            v_shared = T.alloc_shared((keys, dv), dtype)
            o_shared = T.alloc_shared((rows, dv), dtype)
            s = T.alloc_fragment((rows, keys), "float32")
            e = T.alloc_fragment((rows, keys), dtype)
            acc = T.alloc_fragment((rows, dv), "float32")
            top = T.alloc_fragment((rows,), "float32")
            last = T.alloc_fragment((rows,), "float32")
            shrink = T.alloc_fragment((rows,), "float32")
            part = T.alloc_fragment((rows,), "float32")
            total = T.alloc_fragment((rows,), "float32")

            before = pid // (together * count) * together
            beside = T.min(together, heads - before)
            rest = pid - before * count
            head = before + rest % beside
            row = (count - 1 - rest // beside if causal else rest // beside) * rows
            z, h = head // hq, head % hq
            g = h // shared

            # blocks begin … left - 1 are cut by the window, left … right - 1 are whole, right … end - 1 are cut by the diagonal or the end
            begin = T.max(row - window + 1, 0) // keys if window else 0
            left = T.ceildiv(T.max(row + rows - window, 0), keys) if window else 0
            right = (row + 1) // keys if causal else n // keys
            end = T.min(T.ceildiv(row + rows, keys), T.ceildiv(n, keys)) if causal else T.ceildiv(n, keys)

            T.copy(q[z, h, row : row + rows, :], q_shared)
            T.clear(acc)
            T.clear(total)
            T.fill(top, NEVER)
            for step in T.Pipelined(end - begin, num_stages=tile.stages):
                at = begin + step
                T.copy(k[z, g, at * keys : (at + 1) * keys, :], k_shared)
                if masked and not capped:  # the product is added to what is there
                    if at >= left and at < right:
                        T.clear(s)
                    else:
                        for i, j in T.Parallel(rows, keys):
                            s[i, j] = T.if_then_else(kept(row + i, at * keys + j), 0.0, -T.infinity("float32"))
                else:
                    T.clear(s)
                T.gemm(q_shared, k_shared, s, transpose_B=True, policy=per_row)
                if capped:
                    for i, j in T.Parallel(rows, keys):
                        s[i, j] = T.tanh(s[i, j] * inner)
                    if masked:
                        if at < left or at >= right:
                            for i, j in T.Parallel(rows, keys):
                                s[i, j] = T.if_then_else(kept(row + i, at * keys + j), s[i, j], -T.infinity("float32"))
                if alibi:  # a row's own share of the bias cancels out; counted from the tile's first row, numbers stay small
                    for i, j in T.Parallel(rows, keys):
                        s[i, j] = s[i, j] * unit + T.cast(slopes[h], "float32") * LOG2E * T.cast(at * keys + j - row, "float32")
                T.copy(top, last)
                T.reduce_max(s, top, dim=1, clear=False)
                for i in T.Parallel(rows):
                    shrink[i] = T.exp2((last[i] - top[i]) * scale)
                for i, j in T.Parallel(rows, keys):
                    s[i, j] = T.exp2(s[i, j] * scale - top[i] * scale)
                T.reduce_sum(s, part, dim=1)
                for i in T.Parallel(rows):
                    total[i] = total[i] * shrink[i] + part[i]
                T.copy(s, e)
                for i, j in T.Parallel(rows, dv):
                    acc[i, j] *= shrink[i]
                T.copy(v[z, g, at * keys : (at + 1) * keys, :], v_shared)
                T.gemm(e, v_shared, acc, policy=per_row)
            for i, j in T.Parallel(rows, dv):
                acc[i, j] /= total[i]
            T.copy(acc, o_shared)
            T.copy(o_shared, out[z, h, row : row + rows, :])

    return attention


def compiled(code: Any) -> Any:
    """For the GPU that is there; tanh is the approximate one, as FlexAttention's and Triton's."""
    return tilelang.compile(code, pass_configs={tilelang.PassConfigKey.TL_ENABLE_FAST_MATH: True})


def peer(f: Attention, args: Sequence[Any], budget: float) -> tuple[Bind, str]:
    """What makes the function of the fastest tile, and what was tried.  budget: seconds; tiles are compiled beside each other."""
    import torch

    q, k, v, *_ = args
    tried = tiles(max(q.shape[3], v.shape[3]))
    dtype = str(q.dtype).removeprefix("torch.")
    codes = [program(f, tile, tuple(q.shape), tuple(k.shape), tuple(v.shape), dtype) for tile in tried]

    def way(made: Future[Any]) -> Bind:
        def bind(args: Sequence[Any]) -> Callable[[], Any]:
            q, k, v = (x.contiguous() for x in args[:3])
            slopes = args[3] if f.alibi else torch.zeros(q.shape[1], dtype=q.dtype, device=q.device)
            kernel = made.result()
            out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)

            def call() -> Any:
                kernel(q, k, v, slopes, out)
                return out

            return call

        return bind

    with ThreadPoolExecutor(len(tried)) as pool:
        made = [pool.submit(compiled, code) for code in codes]
        return fastest(((str(tile), way(x)) for tile, x in zip(tried, made)), args, budget)
