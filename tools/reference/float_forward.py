"""The float reference: the forward pass of a GGUF with dequantized weights and f32 activations.

It is not part of the numerics contract: it checks that the graph is right, within a tolerance of an independent
engine, and does not define bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.worker.rope import FRACTION_BITS
from tools.reference.arithmetic import stored
from tools.reference.source import Source, pair_slices


class FloatModel:
    """Reads a layer's tensors when it computes the layer and keeps none.

    A `kv_type` other than f32 applies the rounding of that type to K and V, and nothing else.
    """

    def __init__(self, path: Path, kv_type: str = "f32") -> None:
        self.kv_type = kv_type
        self.source = Source(path)
        self._rope = [self.source.rope(is_local) for is_local in (False, True) if self.source.hyper.n_rot]

    def logits(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Logits of all positions of one sequence: (len(tokens), vocab) f32."""
        source, h = self.source, self.source.hyper
        y = self.hidden(tokens)
        return _capped(y @ source.values(source.head_name).T * h.logit_scale, h.logit_cap)

    def score(self, tokens: Sequence[int] | np.ndarray) -> float:
        """The score that the model's head makes of the first position of a pair of texts."""
        x = self.hidden(tokens)[:1]
        if "cls.weight" in self.source:
            x = np.tanh(self._linear("cls", x))
        return float(np.ravel(self._linear("cls.output", x))[0])

    def hidden(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Final hidden states of all positions of one sequence: (len(tokens), width) f32."""
        source, h = self.source, self.source.hyper
        positions = np.arange(len(tokens))
        turns = []
        for rope in self._rope:
            angles = positions[:, None] * np.array([f / (1 << FRACTION_BITS) for f in rope.frequencies])
            turns.append([(rope.largest * part(angles))[:, None, :].astype(np.float32) for part in (np.cos, np.sin)])
        x: np.ndarray = source.rows("token_embd.weight", np.asarray(tokens, np.int64)) * h.embedding_scale
        if "token_types.weight" in source:
            x = x + source.rows("token_types.weight", np.zeros(1, np.int64))
        if not turns:
            x = x + source.rows("position_embd.weight", positions)
        x = self._norm("token_embd_norm", x)
        for layer in range(h.n_layers):
            block = f"blk.{layer}"
            y = self._attention(layer, self._norm(f"{block}.attn_norm", x), turns)
            x = x + self._norm(f"{block}.post_attention_norm", y) * h.residual_scale
            x = self._norm(f"{block}.attn_output_norm", x)
            y = self._feed_forward(block, self._norm(f"{block}.ffn_norm", x))
            x = x + self._norm(f"{block}.post_ffw_norm", y) * h.residual_scale
            x = self._norm(f"{block}.layer_output_norm", x)
        return self._norm("output_norm", x)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.source.values(f"{name}.weight").T
        return y + self.source.values(f"{name}.bias") if f"{name}.bias" in self.source else y

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        if f"{name}.weight" not in self.source:
            return x
        wide, has_bias = x.astype(np.float64), f"{name}.bias" in self.source
        if has_bias:
            wide = wide - wide.mean(axis=-1, keepdims=True)
        mean = np.mean(wide**2, axis=-1, keepdims=True) + self.source.hyper.eps
        y = (wide / np.sqrt(mean)).astype(np.float32) * self.source.values(f"{name}.weight")
        return y + self.source.values(f"{name}.bias") if has_bias else y

    def _mixture(self, block: str, y: np.ndarray) -> np.ndarray:
        h, out = self.source.hyper, np.zeros_like(y)
        logits = y @ self.source.values(f"{block}.ffn_gate_inp.weight").T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights[logits < np.sort(logits, axis=1)[:, -h.n_experts_used, None]] *= 0 if h.normalizes_experts else 1
        weights /= weights.sum(axis=1, keepdims=True)
        for row, chosen in enumerate(np.argsort(-logits, axis=1)[:, : h.n_experts_used]):
            for e in chosen:
                out[row] += weights[row, e] * self._expert(block, "_exps", f"[{e}]", y[row])
        if f"{block}.ffn_up_shexp.weight" in self.source:
            gate = f"{block}.ffn_gate_inp_shexp.weight"
            weight = 1 / (1 + np.exp(-(y @ self.source.values(gate)))) if gate in self.source else np.ones(len(y))
            out += weight[:, None].astype(np.float32) * self._expert(block, "_shexp", "", y)
        return out

    def _expert(self, block: str, kind: str, number: str, y: np.ndarray) -> np.ndarray:
        gate, up, down = (
            self.source.values(f"{block}.ffn_{part}{kind}.weight{number}").T for part in ("gate", "up", "down")
        )
        return (self._activation(y @ gate) * (y @ up)) @ down

    def _feed_forward(self, block: str, y: np.ndarray) -> np.ndarray:
        if self.source.hyper.n_experts:
            return self._mixture(block, y)
        up = self._linear(f"{block}.ffn_up", y)
        if f"{block}.ffn_gate.weight" not in self.source:
            return self._linear(f"{block}.ffn_down", self._activation(up))
        return self._linear(f"{block}.ffn_down", self._activation(self._linear(f"{block}.ffn_gate", y)) * up)

    def _activation(self, x: np.ndarray) -> np.ndarray:
        if self.source.hyper.gelu:
            return (0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))).astype(np.float32)
        return x / (1 + np.exp(-x))

    def _heads(self, block: str, part: str, y: np.ndarray) -> np.ndarray:
        """q, k or v (n, heads, head_dim), normed where the model has a norm of it."""
        x = self._linear(f"{block}.attn_{part}", y)
        norm = f"{block}.attn_{part}_norm"
        heads = (len(y), -1, self.source.hyper.head_dim)
        if f"{norm}.weight" in self.source and self.source.values(f"{norm}.weight").size == x.shape[-1]:
            return self._norm(norm, x).reshape(heads)
        return self._norm(norm, x.reshape(heads))

    def _attention(self, layer: int, y: np.ndarray, turns: list[list[np.ndarray]]) -> np.ndarray:
        h, n, block = self.source.hyper, len(y), f"blk.{layer}"
        q, k, v = (self._heads(block, part, y) for part in "qkv")
        window = h.windows[layer]
        if turns:
            q, k = self._rotate(q, *turns[window > 0]), self._rotate(k, *turns[window > 0])
        k, v = stored(k, self.kv_type), stored(v, self.kv_type)
        q = q.reshape(n, h.n_kv_heads, -1, h.head_dim)  # heads that share a kv head are neighbours
        scores = _capped(np.einsum("ighd,jgd->ghij", q, k, optimize=True) * h.score_scale, h.score_cap)
        visible = np.tri(n, dtype=bool) & ~np.tri(n, k=-window if window else -n, dtype=bool)
        visible |= not h.is_causal
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = np.einsum("ghij,jgd->ighd", weights, v, optimize=True).reshape(n, -1).astype(np.float32)
        return self._linear(f"{block}.attn_output", mixed)

    def _rotate(self, x: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
        first, second = pair_slices(self.source.hyper.n_rot, self.source.hyper.pairs)
        a, b = x[..., first], x[..., second]
        turned = x.copy()
        turned[..., first] = a * cosine - b * sine
        turned[..., second] = a * sine + b * cosine
        return turned


def _capped(x: np.ndarray, cap: np.float32) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x
