"""What measured kernels are compared with: PyTorch eager and compiled, its fused attention, FlashAttention-3, FlexAttention, and attention
by hand in Triton and TileLang."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from operators import Attention
from timing import Call, deadline, synchronize
from tuned import Bind

from eqsat_neptune.programs import CAP, EPS

TUNING = 10.0  # seconds in which a kernel by hand tries its tiles


def torch_programs() -> dict[str, Callable[..., Any]]:
    """The programs as one would write them in PyTorch."""
    import torch
    import torch.nn.functional as F

    def causal(s: Any) -> Any:
        i = torch.arange(s.shape[-1], device=s.device)
        return s.masked_fill(i > i[:, None], -math.inf)

    def scores(q: Any, k: Any) -> Any:
        return q @ k.mT / math.sqrt(q.shape[-1])

    def differential(q1: Any, q2: Any, k1: Any, k2: Any, v: Any, weight: Any) -> Any:
        p1, p2 = (torch.softmax(causal(scores(q, k)), -1) for q, k in ((q1, k1), (q2, k2)))
        return (p1 - weight[:, None, None] * p2) @ v

    def sink(q: Any, k: Any, v: Any, logit: Any) -> Any:
        s = causal(scores(q, k))
        s = torch.cat([s, logit[:, None, None].expand(*s.shape[:-1], 1)], -1)
        return torch.softmax(s, -1)[..., :-1] @ v

    def off_by_one(q: Any, k: Any, v: Any) -> Any:
        s = scores(q, k)
        m = s.amax(-1, keepdim=True).clamp_min(0.0)
        e = torch.exp(s - m)
        return (e / (torch.exp(-m) + e.sum(-1, keepdim=True))) @ v

    def performer(q: Any, k: Any, v: Any, w: Any) -> Any:
        q, k = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
        zq = q @ w.mT - 0.5 * (q * q).sum(-1, keepdim=True)
        zk = k @ w.mT - 0.5 * (k * k).sum(-1, keepdim=True)
        fq, fk = torch.exp(zq - zq.amax(-1, keepdim=True)), torch.exp(zk - zk.amax((-2, -1), keepdim=True))
        return (fq @ (fk.mT @ v)) / (fq @ fk.sum(-2, keepdim=True).mT)

    def linear_attention(q: Any, k: Any, v: Any) -> Any:
        fq, fk = F.elu(q) + 1, F.elu(k) + 1
        return (fq @ (fk.mT @ v)) / (fq @ fk.sum(-2, keepdim=True).mT)

    def dq(q: Any, k: Any, v: Any, do: Any) -> Any:
        p = torch.softmax(scores(q, k), -1)
        dp = do @ v.mT
        return (p * (dp - (p * dp).sum(-1, keepdim=True))) @ k / math.sqrt(q.shape[-1])

    def norm(x: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], eps=EPS)

    return {
        "matmul": lambda x, w: x @ w,
        "matmul_nk": lambda x, w: x @ w.mT,
        "rmsnorm_linear": lambda x, w: norm(x) @ w,
        "gated_mlp": lambda x, w1, w2: F.silu(x @ w1) * (x @ w2),
        "lora": lambda x, w, a, b: x @ w + (x @ a) @ b,
        "softmax": lambda x: torch.softmax(x, -1),
        "rmsnorm": norm,
        "layernorm": lambda x, gain, bias: F.layer_norm(x, x.shape[-1:], gain, bias, EPS),
        "cross_entropy": lambda x, target: F.cross_entropy(x, target.long(), reduction="none"),
        "cross_entropy_linear": lambda h, w, target: F.cross_entropy(h @ w.mT, target.long(), reduction="none"),
        "differential_attention": differential,
        "sink_attention": sink,
        "off_by_one_attention": off_by_one,
        "attention_logsumexp": lambda q, k: torch.logsumexp(scores(q, k), -1),
        "sigmoid_attention": lambda q, k, v: torch.sigmoid(scores(q, k) - math.log(k.shape[-2])) @ v,
        "performer": performer,
        "linear_attention": linear_attention,
        "attention_dq": dq,
        "qknorm": lambda q, k, v: torch.softmax(scores(norm(q), norm(k)), -1) @ v,
    }


def library_programs() -> dict[str, Callable[..., Any]]:
    """What PyTorch's fused attention can be put together to, where it can."""
    import torch.nn.functional as F

    def attend(q: Any, k: Any, v: Any, **kw: Any) -> Any:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], **kw)[0]

    def differential(q1: Any, q2: Any, k1: Any, k2: Any, v: Any, weight: Any) -> Any:
        a, b = (attend(q, k, v, is_causal=True) for q, k in ((q1, k1), (q2, k2)))
        return a - weight[:, None, None] * b

    def qknorm(q: Any, k: Any, v: Any) -> Any:
        q, k = (F.rms_norm(x, x.shape[-1:], eps=EPS) for x in (q, k))
        return attend(q, k, v)

    return {"differential_attention": differential, "qknorm": qknorm}


def bound(fn: Callable[..., Any]) -> Bind:
    return lambda args: lambda: fn(*args)


def compiled(fn: Callable[..., Any], args: Sequence[Any], budget: float) -> tuple[Bind, str]:
    """torch.compile's function, and in which mode: tuned if that takes no longer than the budget."""
    import torch

    if budget > 0:
        from torch._inductor import select_algorithm

        select_algorithm.PRINT_AUTOTUNE = False  # pages of tables
        start = time.monotonic()
        tuned = torch.compile(fn, mode="max-autotune-no-cudagraphs", dynamic=False)
        try:
            with deadline(budget):
                tuned(*args)
                synchronize()
            return bound(tuned), "max-autotune"
        except Exception:  # the compiler may wrap a TimeoutError
            if time.monotonic() - start < budget:
                raise
            torch._dynamo.reset()
    plain = torch.compile(fn, dynamic=False)
    plain(*args)
    return bound(plain), f"default mode: max-autotune was cut after {budget:g} s" if budget > 0 else "default mode"


def peer(kind: str, name: str, args: Sequence[Any], moved: int, budget: float) -> tuple[Bind, str] | None:
    """What makes functions of no arguments with the same result, of inputs like `args`, and a note; None if this peer has no such operator."""
    import torch

    if kind == "copy":

        def copy(args: Sequence[Any]) -> Call:
            source, to = (torch.empty(moved // 2, dtype=torch.uint8, device=args[0].device) for _ in range(2))
            return lambda: to.copy_(source)

        return copy, "a copy that moves as many bytes"
    if name.startswith(("prefill", "decode")):
        if kind in ("triton", "tilelang"):
            return handwritten(kind, Attention.of(name), args, min(budget, TUNING))
        bind = attention_peer(kind, Attention.of(name), args)
        return (bind, "") if bind else None
    if kind in ("cublas", "cublaslt"):
        return (lambda args: vendor_product(kind, *args, turned=name == "matmul_nk")), "torch.matmul into an output that is there"
    if kind == "flex":
        return sink_by_flex(*args), ""
    if kind == "library" and name == "attention_dq":

        def gradient(args: Sequence[Any]) -> Call:
            q, k, v = (x.detach().requires_grad_() for x in args[:3])
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            return lambda: torch.autograd.grad(out, q, args[3], retain_graph=True)[0]

        return gradient, "SDPA's backward pass alone: all three gradients"
    if kind == "library":
        return compiled(library_programs()[name], args, 0)
    fn = torch_programs()[name]
    return compiled(fn, args, budget) if kind == "compile" else (bound(fn), "")


def handwritten(kind: str, f: Attention, args: Sequence[Any], budget: float) -> tuple[Bind, str] | None:
    """Prefill by a kernel of benches/triton_attention.py or benches/tilelang_attention.py.  ImportError where the language is absent."""
    if f.decode:
        return None
    if kind == "triton":
        import triton_attention

        return triton_attention.peer(f, args, budget)
    import tilelang_attention

    return tilelang_attention.peer(f, args, budget)


def vendor_product(kind: str, x: Any, w: Any, turned: bool) -> Callable[[], Any]:
    """The vendor's matrix product by one of its two interfaces, which choose kernels by rules of their own."""
    import torch

    right = w.mT if turned else w
    out = torch.empty(x.shape[0], right.shape[1], dtype=x.dtype, device=x.device)
    if not x.is_cuda:
        return lambda: torch.matmul(x, right, out=out)

    def product() -> Any:
        torch.backends.cuda.preferred_blas_library(kind)
        return torch.matmul(x, right, out=out)

    return product


def attention_peer(kind: str, f: Attention, args: Sequence[Any]) -> Bind | None:
    import torch
    import torch.nn.functional as F

    q, k, *_ = args
    grouped = q.shape[1] != k.shape[1]
    if kind in ("cudnn", "flash"):
        late = f.causal and q.shape[2] < k.shape[2]
        if f.cap or f.alibi or f.window or (late and kind == "cudnn"):
            return None
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right

        backend = SDPBackend.CUDNN_ATTENTION if kind == "cudnn" else SDPBackend.FLASH_ATTENTION

        which = {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])} if late else {"is_causal": f.causal}

        def sdpa(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **which)

        return bound(sdpa)
    if kind == "fa3":
        if f.alibi or q.dtype != torch.bfloat16:
            return None
        import fa3_fwd_interface as fa3

        kw: dict[str, Any] = dict(causal=f.causal)
        if f.cap:
            kw["softcap"] = f.cap
        if f.window:
            kw["window_size"] = (f.window - 1, 0)
        if f.decode:
            kw["num_splits"] = 0

        def flash3(q: Any, k: Any, v: Any) -> Any:
            r = fa3.flash_attn_func(q, k, v, **kw)
            return (r[0] if isinstance(r, tuple) else r).transpose(1, 2)

        return lambda args: bound(flash3)([x.transpose(1, 2).contiguous() for x in args])
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, last, ahead = k.shape[2], k.shape[2] - 1, k.shape[2] - q.shape[2]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if f.cap:
            s = CAP * torch.tanh(s / CAP)
        if f.alibi:
            s = s + args[3][h] * (j - (last if f.decode else i))
        return s

    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i - j < f.window) if f.window else j <= i + ahead

    mask = create_block_mask(keep, None, None, q.shape[2], n, device=q.device) if f.causal else None
    fn = torch.compile(flex_attention, dynamic=False)
    mod = score if f.cap or f.alibi else None  # the same of all inputs: it would be compiled again
    return bound(lambda q, k, v, *_: fn(q, k, v, score_mod=mod, block_mask=mask, enable_gqa=grouped))


def sink_by_flex(q: Any, k: Any, *_: Any) -> Bind:
    """FlexAttention gives the logarithm of the denominator; the sink then scales the result."""
    import torch
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, q.shape[1], k.shape[1], device=q.device)

    def attend(q: Any, k: Any, v: Any, sink: Any) -> Any:
        out, more = flex_attention(q[None], k[None], v[None], block_mask=mask, return_aux=AuxRequest(lse=True))
        return (out * torch.sigmoid(more.lse - sink[:, None])[..., None].to(out.dtype))[0]

    return bound(torch.compile(attend, dynamic=False))
