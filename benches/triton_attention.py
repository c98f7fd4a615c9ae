"""A peer of the measured kernels: attention written by hand in Triton, as well as its language allows on a Hopper GPU.

Blocks of K and V come by TMA through tensor descriptors, products are wgmma, exponentials base 2 with the scale folded in, blocks that a
mask empties are skipped, and only blocks that a mask cuts are masked.  Long rows start first, by few heads at a time so that their K and
V stay in the L2.  Head dims that are no power of two are filled up with zeros by the descriptor.  No tile has its loop's warps specialised:
Triton 3.6 compiles that for Hopper (tl.range(…, warp_specialize=True), one loop, all blocks masked), but on an H200 it did not end.

Importing raises ImportError where Triton is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from operators import Attention
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor
from tuned import Bind, fastest

LOG2E = math.log2(math.e)
L2 = 24 << 20  # bytes of K and V that heads running together may have
NEVER = tl.constexpr(-1e30)  # below every score, yet finite: differences of it are no NaN


@triton.jit
def _tanh(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:  # what the interpreter can do
        y = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return y


@triton.jit
def _blocks(
    acc, total, top, q, k_blocks, v_blocks, keys, row, first, last, n, scale, inner, slope,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
    MASKED: tl.constexpr, APPROXIMATE: tl.constexpr,
):  # fmt: skip
    """Positions first … last - 1 (first: a multiple of KEYS) of the head of K and V that begins at row `keys`.

    acc: sums of exp2(score - top)·V, a row for each of the queries row … row + ROWS - 1; total: sums of exp2(score - top)
    """
    for start in tl.range(first, last, KEYS):
        k = k_blocks.load([keys + start, 0])
        s = tl.dot(q, k.T)
        j = start + tl.arange(0, KEYS)
        if CAP:
            s = _tanh(s * inner, APPROXIMATE)
        if ALIBI:  # a row's own share of the bias cancels out: counted from the tile's first row, which keeps numbers small
            s = s * scale + (slope * (j - row).to(tl.float32))[None, :]
        if MASKED:
            i = row + tl.arange(0, ROWS)
            if CAUSAL:
                keep = j[None, :] <= i[:, None]
                if WINDOW:
                    keep = keep & (i[:, None] - j[None, :] < WINDOW)
            else:
                keep = (j < n)[None, :]
            s = tl.where(keep, s, -float("inf"))
        if ALIBI:
            new = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
        else:
            new = tl.maximum(top, tl.max(s, 1) * scale)
            p = tl.exp2(s * scale - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = v_blocks.load([keys + start, 0])
        acc = tl.dot(p.to(v.dtype), v, acc)
        top = new
    return acc, total, top


@triton.jit(do_not_specialize=["n", "heads", "batches", "together", "shared"])  # other lengths take the same machine code
def attention_kernel(
    q_blocks, k_blocks, v_blocks, o_blocks, out, slopes, n, width, heads, batches, together, shared, scale, inner,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DV: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    ALIBI: tl.constexpr, APPROXIMATE: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS query rows of one head.

    Heads lie one after another in the descriptors.
    n, width    rows of a head; elements of a row of the result
    heads       of all batches; together: of these, how many have their tiles run beside each other; shared: how many read one of K and V
    scale       of what is exponentiated, to base 2; inner: of what the cap's tanh is taken of
    WHOLE, EVEN the tile's rows, its keys divide n
    """
    pid, tiles = tl.program_id(0), tl.cdiv(n, ROWS)
    before = pid // (together * tiles) * together
    beside = tl.minimum(together, heads - before)
    rest = pid - before * tiles
    head = before + rest % beside
    tile = rest // beside
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest first
    row = tile * ROWS
    keys = head // shared * n

    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + head % (heads // batches)).to(tl.float32) * 1.4426950408889634
    q = q_blocks.load([head * n + row, 0])
    acc = tl.zeros((ROWS, DV), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), NEVER, tl.float32)

    # [begin, left) is cut by the window, [left, right) is whole, [right, end) is cut by the diagonal or the end
    begin, left = 0, 0
    if CAUSAL:
        end = tl.minimum(row + ROWS, n)
        right = (row + 1) // KEYS * KEYS
        if WINDOW:
            begin = tl.maximum(row - WINDOW + 1, 0) // KEYS * KEYS
            left = tl.cdiv(tl.maximum(row + ROWS - WINDOW, 0), KEYS) * KEYS
            right = tl.maximum(right, begin)
            left = tl.minimum(left, right)
    else:
        end = n
        right = n // KEYS * KEYS
    if WINDOW:
        acc, total, top = _blocks(acc, total, top, q, k_blocks, v_blocks, keys, row, begin, left, n, scale, inner, slope,
                                  ROWS, KEYS, CAUSAL, WINDOW, CAP, ALIBI, True, APPROXIMATE)  # fmt: skip
    acc, total, top = _blocks(acc, total, top, q, k_blocks, v_blocks, keys, row, left, right, n, scale, inner, slope,
                              ROWS, KEYS, CAUSAL, WINDOW, CAP, ALIBI, False, APPROXIMATE)  # fmt: skip
    if CAUSAL or not EVEN:
        acc, total, top = _blocks(acc, total, top, q, k_blocks, v_blocks, keys, row, right, end, n, scale, inner, slope,
                                  ROWS, KEYS, CAUSAL, WINDOW, CAP, ALIBI, True, APPROXIMATE)  # fmt: skip
    result = (acc / total[:, None]).to(o_blocks.dtype)
    if WHOLE:
        o_blocks.store([head * n + row, 0], result)
    else:  # the tile's last rows may be the next head's
        i, x = row + tl.arange(0, ROWS)[:, None], tl.arange(0, DV)[None, :]
        tl.store(out + (head * n + i).to(tl.int64) * width + x, result, mask=(i < n) & (x < width))


@dataclass(frozen=True)
class Tile:
    """How the work is cut."""

    rows: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.rows}×{self.keys}, {self.warps} warps, {self.stages} stages"


def tiles(d: int) -> tuple[Tile, ...]:
    """Worth a try for a head dim, the likeliest first."""
    if d <= 64:
        return Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 4, 3), Tile(128, 128, 4, 3)
    if d <= 128:
        return Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 128, 4, 2), Tile(128, 64, 4, 3)
    return Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(128, 32, 8, 3)


def padded(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def meta(f: Attention, n: int, d: int, dv: int, tile: Tile, interpreted: bool) -> dict[str, Any]:
    """The kernel's constants."""
    return dict(
        ROWS=tile.rows, KEYS=tile.keys, DV=padded(dv), CAUSAL=f.causal, WINDOW=f.window, CAP=bool(f.cap),
        ALIBI=f.alibi, APPROXIMATE=not interpreted,
        WHOLE=n % tile.rows == 0, EVEN=n % tile.keys == 0,
    )  # fmt: skip


def attention(f: Attention, q: Any, k: Any, v: Any, slopes: Any, tile: Tile) -> Callable[[], Any]:
    """softmax(mask(score(q kᵀ))) v as a function of no arguments.  q: (b, hq, n, d); k: (b, hkv, n, d); v: (b, hkv, n, dv)."""
    import torch

    b, hq, n, d = q.shape
    hkv, dv = k.shape[1], v.shape[3]
    scale = 1 / math.sqrt(d)
    constants = meta(f, n, d, dv, tile, knobs.runtime.interpret)

    def blocks(x: Any, rows: int, width: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.contiguous().view(-1, x.shape[-1]), [rows, width])

    out = torch.empty(b, hq, n, dv, dtype=q.dtype, device=q.device)
    width, wide = padded(d), padded(dv)
    keys, values = blocks(k, tile.keys, width), blocks(v, tile.keys, wide)
    queries, outs = blocks(q, tile.rows, width), blocks(out, tile.rows, wide)
    shared = hq // hkv
    together = max(1, L2 // (k.element_size() * n * (d + dv))) * shared
    grid = (triton.cdiv(n, tile.rows) * b * hq,)

    def call() -> Any:
        attention_kernel[grid](
            queries, keys, values, outs, out, slopes if f.alibi else q, n, dv, b * hq, b, min(together, b * hq), shared,
            (f.cap or scale) * LOG2E, scale / f.cap if f.cap else 0.0, **constants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out

    return call


def peer(f: Attention, args: Sequence[Any], budget: float) -> tuple[Bind, str]:
    """What makes the function of the fastest tile, and what was tried in `budget` seconds."""
    q, _, v, *_ = args

    def way(tile: Tile) -> Bind:
        return lambda args: attention(f, *args[:3], args[3] if f.alibi else None, tile)

    return fastest(((str(t), way(t)) for t in tiles(max(q.shape[3], v.shape[3]))), args, budget)
