"""BERT embeddings of a Hugging Face directory, in NumPy: a reading of the files that shares no code with the server.

Devlin et al. 2019; mean pooling and vectors of length 1, as sentence-transformers do.  All values are f64 but the
weights; GELU is exact.  Token ids come from the `tokenizers` library and the directory's tokenizer.json.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

_erf = np.vectorize(math.erf, otypes=[np.float64])


class MiniLm:
    """The model of a directory with config.json, model.safetensors (F32) and tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._n_heads, self._n_layers = config["num_attention_heads"], config["num_hidden_layers"]
        self._epsilon = config["layer_norm_eps"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        raw = (folder / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        self._tensors: dict[str, np.ndarray] = {}
        for name, about in json.loads(raw[8:begin]).items():
            if about.get("dtype") == "F32":
                first, last = (begin + offset for offset in about["data_offsets"])
                self._tensors[name] = np.frombuffer(raw[first:last], "<f4").reshape(about["shape"])

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, with [CLS] and [SEP]."""
        return list(self._tokenizer.encode(text).ids)

    def embed(self, ids: list[int]) -> np.ndarray:
        """The vector of length 1 of a text, (width,) f64."""
        x = self._tensors["embeddings.word_embeddings.weight"][ids].astype(np.float64)
        x += self._tensors["embeddings.position_embeddings.weight"][: len(ids)]
        x += self._tensors["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings")
        for layer in range(self._n_layers):
            name = f"encoder.layer.{layer}."
            q, k, v = (self._heads(x, f"{name}attention.self.{part}") for part in ("query", "key", "value"))
            scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            mixed = (weights / weights.sum(axis=2, keepdims=True)) @ v
            x = x + self._linear(mixed.transpose(1, 0, 2).reshape(x.shape), f"{name}attention.output.dense")
            x = self._norm(x, f"{name}attention.output")
            up = self._linear(x, f"{name}intermediate.dense")
            x = x + self._linear(up * (1 + _erf(up / math.sqrt(2))) / 2, f"{name}output.dense")
            x = self._norm(x, f"{name}output")
        mean = x.mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean))

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ self._tensors[f"{name}.weight"].T.astype(np.float64) + self._tensors[f"{name}.bias"])

    def _heads(self, x: np.ndarray, name: str) -> np.ndarray:
        """(heads, positions, values of a head)."""
        return self._linear(x, name).reshape(len(x), self._n_heads, -1).transpose(1, 0, 2)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + self._epsilon)
        return np.asarray(scaled * self._tensors[f"{name}.LayerNorm.weight"] + self._tensors[f"{name}.LayerNorm.bias"])
