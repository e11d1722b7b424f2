"""The float reference: the forward pass of a llama or qwen2 GGUF with dequantized weights and f32 activations.

It is not part of the numerics contract: it checks that the graph is right, within a tolerance of an independent
engine, and does not define bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.worker.rope import FRACTION_BITS, rope_frequencies
from tools.reference.arithmetic import stored
from tools.reference.source import Source, pair_slices


class FloatModel:
    """Reads a layer's tensors when it computes the layer and keeps none.

    A `kv_type` other than f32 applies the rounding of that type to K and V, and nothing else.
    """

    def __init__(self, path: Path, kv_type: str = "f32") -> None:
        self.kv_type = kv_type
        self.source = Source(path)
        h = self.source.hyper
        factors = self.source.values("rope_freqs.weight") if "rope_freqs.weight" in self.source else None
        fixed = rope_frequencies(h.rope_base, h.n_rot, factors, h.rope_scale)
        self._frequencies = np.array([f / (1 << FRACTION_BITS) for f in fixed])

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits of all positions of one sequence: (len(tokens), vocab) f32."""
        source, h = self.source, self.source.hyper
        angles = np.arange(len(tokens))[:, None] * self._frequencies
        x = source.rows("token_embd.weight", np.asarray(tokens, np.int64))
        for layer in range(h.n_layers):
            block = f"blk.{layer}"
            y = self._norm(f"{block}.attn_norm.weight", x)
            x = x + self._attention(block, y, angles)
            y = self._norm(f"{block}.ffn_norm.weight", x)
            gate, up = self._matmul(f"{block}.ffn_gate.weight", y), self._matmul(f"{block}.ffn_up.weight", y)
            x = x + self._matmul(f"{block}.ffn_down.weight", gate / (1 + np.exp(-gate)) * up)
        return self._matmul(source.head_name, self._norm("output_norm.weight", x))

    def _matmul(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.source.values(name).T

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = self._matmul(f"{name}.weight", x)
        return y + self.source.values(f"{name}.bias") if f"{name}.bias" in self.source else y

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + self.source.hyper.eps
        return (x / np.sqrt(mean)).astype(np.float32) * self.source.values(name)

    def _attention(self, block: str, y: np.ndarray, angles: np.ndarray) -> np.ndarray:
        h, n = self.source.hyper, len(y)
        q = self._rotate(self._linear(f"{block}.attn_q", y).reshape(n, h.n_heads, -1), angles)
        k = self._rotate(self._linear(f"{block}.attn_k", y).reshape(n, h.n_kv_heads, -1), angles)
        v = self._linear(f"{block}.attn_v", y).reshape(n, h.n_kv_heads, -1)
        k, v = stored(k, self.kv_type), stored(v, self.kv_type)
        q = q.reshape(n, h.n_kv_heads, -1, h.head_dim)  # heads that share a kv head are neighbours
        scores = np.einsum("ighd,jgd->ghij", q, k, optimize=True) / np.sqrt(np.float32(h.head_dim))
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("ghij,jgd->ighd", weights, v, optimize=True).reshape(n, -1).astype(np.float32)
        return self._matmul(f"{block}.attn_output.weight", mixed)

    def _rotate(self, x: np.ndarray, angles: np.ndarray) -> np.ndarray:
        first, second = pair_slices(2 * angles.shape[1], self.source.hyper.pairs)
        a, b = x[..., first], x[..., second]
        c = np.cos(angles)[:, None, :].astype(np.float32)
        s = np.sin(angles)[:, None, :].astype(np.float32)
        turned = x.copy()
        turned[..., first] = a * c - b * s
        turned[..., second] = a * s + b * c
        return turned
