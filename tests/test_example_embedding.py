"""The sentence-embedding example: its tokenizer, its reference, and the compiled model on real sentences."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "sentence_embedding.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sentence_embedding", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return example.model_folder()
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def weights(folder: Path) -> dict[str, np.ndarray]:
    return example.load_safetensors(folder / "model.safetensors")


@pytest.fixture(scope="module")
def tokenize(folder: Path) -> Any:
    return example.WordPiece(folder / "tokenizer.json")


def test_words_are_cut_into_the_longest_known_pieces(tmp_path: Path) -> None:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "cafe", "un", "##aff", "##able", "##a", "!", "漢", "字"]
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 20,
        "vocab": {piece: i for i, piece in enumerate(pieces)},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": model}), encoding="utf-8")
    tokenize = example.WordPiece(path)

    def pieces_of(text: str) -> list[str]:
        return [pieces[i] for i in tokenize(text)]

    assert pieces_of("Unaffable\tCAFÉ!") == ["[CLS]", "un", "##aff", "##able", "cafe", "!", "[SEP]"]
    assert pieces_of("漢字 un\x00a") == ["[CLS]", "漢", "字", "un", "##a", "[SEP]"]
    assert pieces_of("unx " + "a" * 21) == ["[CLS]", "[UNK]", "[UNK]", "[SEP]"]
    assert pieces_of("") == ["[CLS]", "[SEP]"]
    assert len(tokenize("un " * 1000)) == example.MAX_TOKENS


def test_safetensors_reader(tmp_path: Path) -> None:
    tensors = {"a": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.array([0.5, -2.0], "<f2")}
    header, body = {"__metadata__": {"format": "pt"}, "n": {"dtype": "I64", "shape": [0], "data_offsets": [0, 0]}}, b""
    for name, tensor in tensors.items():
        end = len(body) + tensor.nbytes
        kind = {"f4": "F32", "f2": "F16"}[tensor.dtype.str[1:]]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(body), end]}
        body += tensor.tobytes()
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    loaded = example.load_safetensors(path)
    assert list(loaded) == ["a", "b"]
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)


@pytest.mark.slow
def test_token_ids_of_the_real_vocabulary(tokenize: Any) -> None:
    assert tokenize("Hello world") == [101, 7592, 2088, 102]
    assert tokenize("The café's naïve!") == [101, 1996, 7668, 1005, 1055, 15743, 999, 102]


@pytest.mark.slow
def test_reference_has_the_published_similarities(weights: dict[str, np.ndarray], tokenize: Any) -> None:
    """The figures that the model's own documentation prints for these sentences."""
    sentences = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    e = np.stack([example.reference_embedding(weights, tokenize(sentence)) for sentence in sentences])
    np.testing.assert_allclose(e @ e.T, [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]], atol=6e-5)


@pytest.mark.slow
def test_compiled_encoder_matches_the_reference(weights: dict[str, np.ndarray], tokenize: Any) -> None:
    tokens = [tokenize(sentence) for sentence in example.SENTENCES]
    ids, real = example.padded(tokens)
    assert real.sum(axis=1).min() < ids.shape[1], "some sentence is padded"
    result = example.Encoder(weights, *ids.shape)(ids, real).astype(np.float64)
    expected = np.stack([example.reference_embedding(weights, t) for t in tokens])
    assert (result * expected).sum(axis=1).min() >= 0.9999
    np.testing.assert_allclose(result, expected, atol=5e-6)
    assert list(np.argsort(-(result @ result[0]))[:3]) == [0, 1, 2], "the two sentences on accounts come first"


@pytest.mark.slow
def test_second_run_starts_warm(folder: Path, tmp_path: Path) -> None:
    """The script as a user runs it, twice, with a cache of its own."""
    environment = {**os.environ, "EQSAT_NEPTUNE_CACHE": str(tmp_path / "cache")}

    def run() -> str:
        done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    cold, warm = run(), run()
    assert "kernels from the cache: none" in cold
    assert "kernels from the cache: embed, layer, pool" in warm
    assert cold.partition("similarity")[2] == warm.partition("similarity")[2], "same kernels, same bits"
