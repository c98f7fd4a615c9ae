"""The operators that are measured on a GPU: their programs, full extents, and what counts as their work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eqsat_neptune import programs
from eqsat_neptune.programs import CAP, CASES, Arg, Case

WINDOW = 4096
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """A program as it is measured.

    keys    extents that a file's name holds, in order; the last ones may be left out
    sizes   values of keys to measure; quick: of these, for a first look
    flops   from the inputs' shapes; None: bytes count
    rows    inputs that have a row for each row of the result; (): the result's heads are independent instead
    """

    case: Case
    keys: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    quick: tuple[tuple[int, ...], ...]
    peers: tuple[str, ...]
    flops: Callable[..., float] | None = None
    rows: tuple[int, ...] = ()

    def extents(self, sizes: Sequence[int]) -> dict[str, int]:
        return dict(zip(self.keys, sizes))


@dataclass(frozen=True)
class Attention:
    """What the peers must be told of one of the prefill and decode programs.  causal: up to the diagonal that ends in the last row's last
    key."""

    decode: bool
    causal: bool
    alibi: bool
    cap: float
    window: int

    @staticmethod
    def of(name: str) -> Attention:
        kind, decode = name.partition("_")[2], name.startswith("decode")
        cap = CAP if kind in ("softcap", "windowed") else 0.0
        masked = kind != "global" and (not decode or kind == "speculative")
        return Attention(decode, masked, kind == "alibi", cap, WINDOW if kind == "windowed" else 0)

    def pairs(self, queries: int, keys: int) -> float:
        """(query, key) pairs of one head that are kept."""
        if not self.causal:
            return queries * keys
        w = self.window
        return w * (w + 1) / 2 + (queries - w) * w if 0 < w < queries else queries * (queries + 1) / 2


def _operators() -> dict[str, Operator]:
    out: dict[str, Operator] = {}

    def add(
        case: Case, keys: tuple[str, ...], sizes: Sequence[tuple[int, ...]], peers: str, flops: Any = None, **more: Any
    ) -> None:
        out[case.name] = Operator(
            case, keys, tuple(sizes), more.pop("quick", tuple(sizes)[:1]), tuple(peers.split()), flops, **more
        )

    def values(case: Case) -> Case:
        """With a dimension of the values of its own (0: that of the keys)."""

        def args(b: int, hq: int, hkv: int, n: int, d: int, dv: int) -> tuple[Arg, ...]:
            q, k, v, *more = case.args(b, hq, hkv, n, d)
            return (q, k, replace(v, shape=(*v.shape[:-1], dv or d)), *more)

        return replace(case, args=args, full={**case.full, "dv": 0})

    lengths: list[tuple[int, ...]] = [(n,) for n in (512, 1024, 2048, 4096, 8192, 16384)]
    odd: list[tuple[int, ...]] = [(1000,), (4097,), (8191,)]
    dims: list[tuple[int, ...]] = [(n, *d) for d in ((64,), (96,), (192, 128), (256,)) for n in (2048, 8192)]
    for kind in ("global", "causal", "gqa", "alibi", "softcap", "windowed"):
        name = f"prefill_{kind}"
        mask = Attention.of(name)

        def flops(q: Shape, k: Shape, v: Shape, *_: Shape, f: Attention = mask) -> float:
            return 2 * q[0] * q[1] * f.pairs(q[2], k[2]) * (q[3] + v[3])

        sizes = [*lengths, *(odd + dims if kind in ("global", "causal") else [])]
        compared = "cudnn flash fa3 flex triton tilelang"
        add(values(CASES[name]), ("n", "d", "dv"), sizes, compared, flops, quick=((4096,), (16384,)))
    batches: list[tuple[int, ...]] = [(1, 1024), (1, 8192), (1, 65536), (16, 4096), (16, 8192), (16, 16384)]
    for kind in ("causal", "gqa", "alibi", "softcap"):
        groups = [(16, 8192, 8 * g, 8) for g in (3, 6, 12)] if kind == "gqa" else []
        first = ((1, 8192), (16, 8192), (1, 65536))
        add(CASES[f"decode_{kind}"], ("batch", "n", "hq", "hkv"), [*batches, *groups], "cudnn flash fa3 flex", quick=first)

    def speculative(batch: int, hq: int, hkv: int, n: int, d: int, nq: int) -> tuple[Arg, ...]:
        q, *rest = CASES["decode_gqa"].args(batch, hq, hkv, n, d)
        return (replace(q, shape=(batch, hq, nq, d)), *rest)

    gqa = CASES["decode_gqa"]
    add(
        replace(gqa, name="decode_speculative", fn=programs.speculative_attention, args=speculative,
                small={**gqa.small, "nq": 3}, full={**gqa.full, "nq": 4}),
        ("batch", "n", "nq"), [(b, 8192, rows) for b in (1, 16) for rows in (2, 4, 8)], "flash fa3 flex",
    )  # fmt: skip

    def product(name: str, fn: Callable[..., Any]) -> Case:
        return Case(name, "B", fn, lambda n: (Arg((n, n)),) * 2, {"n": 37}, {"n": 4096})

    for case in (product("matmul", lambda x, w: x @ w), product("matmul_nk", lambda x, w: x @ w.mT)):
        add(case, ("n",), [(4096,), (8192,)], "torch cublas cublaslt", lambda x, w: 2 * x[0] * x[1] * w[0], rows=(0,))
    linear = "torch compile"
    add(CASES["rmsnorm_linear"], ("b",), [(1,), (8,), (16,)], linear, rows=(0,))
    add(CASES["gated_mlp"], ("n",), [(1,), (8,), (16,), (64,), (128,)], linear, rows=(0,), quick=((8,),))
    add(CASES["lora"], ("n",), [(1,), (8,), (16,)], linear, rows=(0,), quick=((16,),))
    row = CASES["softmax"]
    for case in (row, replace(row, name="rmsnorm", fn=programs.rmsnorm), CASES["layernorm"], CASES["cross_entropy"]):
        add(
            case,
            ("n", "m"),
            [tuple(case.full.values())],
            "torch compile copy",
            rows=(0, 1) if case.name == "cross_entropy" else (0,),
        )

    fresh = "compile library"
    add(CASES["differential_attention"], ("n",), [(4096,), (8192,)], fresh,
        lambda q, q2, k, k2, v, w: q[0] * q[1] * (q[1] + 1) * (2 * q[2] + v[2]))  # fmt: skip
    add(CASES["sink_attention"], ("n",), [(4096,), (8192,)], "compile flex", lambda q, *_: q[0] * q[1] * (q[1] + 1) * 2 * q[2])
    add(CASES["off_by_one_attention"], ("n",), [(4096,), (8192,)], "compile", lambda q, *_: 4 * q[0] * q[1] ** 2 * q[2])
    add(CASES["attention_logsumexp"], ("n", "d"), [(4096, 128), (8192, 128), (8192, 64)], "compile",
        lambda q, k: 2 * q[0] * q[1] * k[1] * q[2])  # fmt: skip
    add(CASES["sigmoid_attention"], ("n",), [(4096,), (8192,)], "compile", lambda q, *_: 4 * q[0] * q[1] ** 2 * q[2])
    add(CASES["performer"], ("n",), [(1024,), (4096,), (16384,)], "compile", lambda q, k, v, w: 8 * q[0] * q[1] * q[2] * w[0])
    add(CASES["linear_attention"], ("n",), [(4096,), (16384,)], "compile", lambda q, k, v: 4 * q[0] * q[1] * q[2] * v[2])
    add(CASES["cross_entropy_linear"], ("n", "d", "v"), [(4096,), (8192, 4096, 32000), (8192, 4096, 128256)], "torch compile", lambda h, w, t: 2 * h[0] * h[1] * w[0], rows=(0, 2))
    add(CASES["attention_dq"], ("n",), [(4096,), (8192,)], fresh, lambda q, k, *_: 6 * q[0] * q[1] * q[2] * k[2] * q[3])
    add(CASES["qknorm"], ("n", "h", "d"), [(4096, 32, 128), (16384, 32, 128), (4096, 8, 64)], fresh,
        lambda q, *_: 4 * q[0] * q[1] ** 2 * q[2])  # fmt: skip
    return out


OPERATORS = _operators()
