"""The exact reference: the forward pass of a llama or qwen2 GGUF, bit for bit as docs/numerics.md defines it.

    model = ExactModel(path)
    logits = ExactSequence(model, kv_type="f16").extend(tokens)      # (len(tokens), vocab) f32

A sequence keeps its K and V, so it can be extended in any number of pieces; the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import numpy as np

from stages.worker.rope import SPAN, RopeTables, rope_tables
from tools.reference.arithmetic import exp, lane_sum, quantize, rms_norm, silu, stored
from tools.reference.blocks import Matrix
from tools.reference.fma import fma
from tools.reference.source import Source, pair_slices

SEGMENT = 256
_CHUNK = 1 << 16  # f32 elements of a piece of work: they and their f64 fit into the CPU's cache


def matmul(weights: Matrix | np.ndarray, x: np.ndarray) -> np.ndarray:
    """x (n, K) f32 times a matrix of R rows of K: (n, R) f32."""
    step = max(16, _CHUNK // x.shape[0])
    if isinstance(weights, Matrix):
        prepared, n_rows = _prepare(weights, x), weights.codes.shape[1]
        parts = [_quantized(weights, slice(r, r + step), prepared) for r in range(0, n_rows, step)]
    else:
        parts = [_dense(weights[r : r + step], x) for r in range(0, weights.shape[0], step)]
    return np.concatenate(parts, axis=1)


def _dense(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    columns = np.ascontiguousarray(weights.T)
    acc = np.zeros((x.shape[0], columns.shape[1]), np.float32)
    for k in range(columns.shape[0]):
        acc = fma(columns[k], x[:, k, None], acc)
    return acc


def _prepare(matrix: Matrix, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x quantized: codes (pieces, n, width) as f32, scales and scaled sums (pieces, n, 1) f32."""
    codes, scales = quantize(x)
    pieces = matrix.codes.shape[0]
    codes = codes.reshape(x.shape[0], -1, matrix.width)[:, :pieces].transpose(1, 0, 2)
    scales = np.repeat(scales, 32 // matrix.width, axis=1)[:, :pieces].T
    sums = scales * codes.sum(axis=2, dtype=np.int32).astype(np.float32)
    return codes.astype(np.float32), scales[..., None], sums[..., None]


def _quantized(matrix: Matrix, rows: slice, prepared: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    codes, scales, sums = prepared
    weights = matrix.codes[:, rows].astype(np.float32)
    acc = np.zeros((codes.shape[1], weights.shape[1]), np.float32)
    for piece in range(weights.shape[0]):
        # Whole numbers below 2^24 (32 * 128 * 127): exact in f32 in whatever order BLAS adds them.
        dots = codes[piece] @ weights[piece].T
        acc = fma(dots * matrix.scales[piece, rows], scales[piece], acc)
        if matrix.minimums is not None:
            acc = fma(matrix.minimums[piece, rows], sums[piece], acc)
    return acc


def rotations(tables: RopeTables, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine (n, n_rot / 2) f32 of some positions, combined from the two tables."""
    low, high = positions % SPAN, positions // SPAN
    cl, sl = tables.cos_lo[low], tables.sin_lo[low]
    ch, sh = tables.cos_hi[high], tables.sin_hi[high]
    return fma(ch, cl, -(sh * sl)), fma(sh, cl, ch * sl)


def rotate(x: np.ndarray, cosine: np.ndarray, sine: np.ndarray, pairs: str) -> np.ndarray:
    """RoPE: x (n, heads, head_dim), cosine and sine (n, n_rot / 2), `pairs` as in `Hyper`."""
    first, second = pair_slices(2 * cosine.shape[1], pairs)
    a, b = x[..., first], x[..., second]
    c, s = cosine[:, None, :], sine[:, None, :]
    turned = x.copy()
    turned[..., first] = fma(a, c, -(b * s))
    turned[..., second] = fma(a, s, b * c)
    return turned


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int) -> np.ndarray:
    """Causal attention of queries at positions first, first + 1, ...

    q (n, heads, head_dim); k, v (first + n, kv heads, head_dim), as read back from the cache; all f32.
    """
    n, heads, head_dim = q.shape
    step = max(1, 4 * _CHUNK // (heads * SEGMENT))
    group = np.arange(heads) // (heads // k.shape[1])
    pieces = [
        _attend(q[t : t + step], k[: first + t + step], v[: first + t + step], first + t, group)
        for t in range(0, n, step)
    ]
    return np.concatenate(pieces).reshape(n, heads * head_dim)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, group: np.ndarray) -> np.ndarray:
    """One chunk of queries; `group[h]` is the kv head of head h."""
    n = q.shape[0]
    largest, total, out = _segment(q, k[:SEGMENT, group], v[:SEGMENT, group], first)
    for begin in range(SEGMENT, first + n, SEGMENT):
        some = slice(max(0, begin - first), n)  # queries that reach into this segment
        part = slice(begin, begin + SEGMENT)
        m, sums, values = _segment(q[some], k[part, group], v[part, group], first + some.start - begin)
        new = np.maximum(largest[some], m)
        a, b = exp(largest[some] - new), exp(m - new)
        largest[some] = new
        total[some] = fma(total[some], a, sums * b)
        out[some] = fma(out[some], a[..., None], values * b[..., None])
    return out * (np.float32(1) / total)[..., None]


def _segment(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum (n, heads), sum (n, heads) and weighted values (n, heads, head_dim) over one segment.

    k, v (positions, heads, head_dim); query t sees positions 0 .. first + t of them.
    """
    n, heads, head_dim = q.shape
    length = k.shape[0]
    columns = np.ascontiguousarray(k.transpose(2, 1, 0))
    scores = np.zeros((n, heads, length), np.float32)
    for d in range(head_dim):
        scores = fma(q[:, :, d, None], columns[d], scores)
    scores = scores * np.float32(1.0 / sqrt(head_dim))
    hidden = np.arange(length) > (first + np.arange(n))[:, None]
    scores = np.where(hidden[:, None, :], np.float32(-np.inf), scores)
    largest = scores.max(axis=-1)
    weights = exp(scores - largest[..., None])  # a hidden position weighs exactly 0
    out = np.zeros((n, heads, head_dim), np.float32)
    for j in range(length):
        sees = max(0, j - first)
        out[sees:] = fma(weights[sees:, :, j, None], v[j], out[sees:])
    return largest, lane_sum(weights), out


class ExactModel:
    """A model's tensors, unpacked when first used and kept (one byte for a quantized value)."""

    def __init__(self, path: Path) -> None:
        self.source = Source(path)
        self.hyper = h = self.source.hyper
        factors = self.source.values("rope_freqs.weight") if "rope_freqs.weight" in self.source else None
        self.rope = rope_tables(h.rope_base, h.n_rot, h.context_length, factors, h.rope_scale)
        self._matrices: dict[str, Matrix | np.ndarray] = {}

    def matmul(self, name: str, x: np.ndarray) -> np.ndarray:
        """x (n, K) times the matrix `name`: (n, rows) f32."""
        if name not in self._matrices:
            self._matrices[name] = self.source.matrix(name)
        return matmul(self._matrices[name], x)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """`name`.weight times x; a bias is one addition more."""
        y = self.matmul(f"{name}.weight", x)
        return y + self.source.values(f"{name}.bias") if f"{name}.bias" in self.source else y

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMS norm of x with the weights `name`."""
        return rms_norm(x, self.source.values(name), self.hyper.eps)


class ExactSequence:
    """One sequence of tokens and its K and V as read back from the cache: [layer] (n, kv heads, head_dim)."""

    def __init__(self, model: ExactModel, kv_type: str = "f16") -> None:
        h = model.hyper
        self.model, self.kv_type, self.length = model, kv_type, 0
        self.keys = [np.empty((0, h.n_kv_heads, h.head_dim), np.float32) for _ in range(h.n_layers)]
        self.values = [np.empty((0, h.n_kv_heads, h.head_dim), np.float32) for _ in range(h.n_layers)]

    def extend(self, tokens: Sequence[int] | np.ndarray, last_only: bool = False) -> np.ndarray:
        """Compute more positions: logits (len(tokens), vocab) f32, or (1, vocab) of the last one."""
        m = self.model
        positions = np.arange(self.length, self.length + len(tokens))
        cosine, sine = rotations(m.rope, positions)
        x = m.source.rows("token_embd.weight", np.asarray(tokens, np.int64))
        for layer in range(m.hyper.n_layers):
            block = f"blk.{layer}"
            x = x + self._attention(layer, m.norm(f"{block}.attn_norm.weight", x), cosine, sine)
            y = m.norm(f"{block}.ffn_norm.weight", x)
            gated = silu(m.matmul(f"{block}.ffn_gate.weight", y)) * m.matmul(f"{block}.ffn_up.weight", y)
            x = x + m.matmul(f"{block}.ffn_down.weight", gated)
        self.length += len(tokens)
        if last_only:
            x = x[-1:]
        return m.matmul(m.source.head_name, m.norm("output_norm.weight", x))

    def _attention(self, layer: int, y: np.ndarray, cosine: np.ndarray, sine: np.ndarray) -> np.ndarray:
        m, h, block = self.model, self.model.hyper, f"blk.{layer}"
        q = m.linear(f"{block}.attn_q", y).reshape(len(y), h.n_heads, h.head_dim)
        k = m.linear(f"{block}.attn_k", y).reshape(len(y), h.n_kv_heads, h.head_dim)
        v = m.linear(f"{block}.attn_v", y).reshape(len(y), h.n_kv_heads, h.head_dim)
        q, k = rotate(q, cosine, sine, h.pairs), rotate(k, cosine, sine, h.pairs)
        self.keys[layer] = np.concatenate([self.keys[layer], stored(k, self.kv_type)])
        self.values[layer] = np.concatenate([self.values[layer], stored(v, self.kv_type)])
        mixed = attention(q, self.keys[layer], self.values[layer], self.length)
        return m.matmul(f"{block}.attn_output.weight", mixed)
