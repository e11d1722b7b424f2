"""The exact reference: the forward pass of a GGUF, bit for bit as docs/numerics.md defines it.

    model = ExactModel(path)
    logits = ExactSequence(model, kv_type="f16").extend(tokens)      # (len(tokens), vocab) f32

A sequence keeps its K and V, so it can be extended in any number of pieces; the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stages.worker.rope import SPAN, RopeTables
from tools.reference.adapter import Adapter
from tools.reference.arithmetic import exp, gelu, lane_sum, layer_norm, quantize, rms_norm, silu, soft_cap, stored
from tools.reference.blocks import Matrix
from tools.reference.fma import fma
from tools.reference.source import Source, pair_slices

SEGMENT = 256
BASE = np.float32(12582912)  # 1.5 * 2^23; docs/numerics.md
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
        acc = fma(_scaled(dots, matrix.scales[piece, rows]), scales[piece], acc)
        if matrix.minimums is not None:
            acc = fma(matrix.minimums[piece, rows], sums[piece], acc)
    return acc


def _scaled(dots: np.ndarray, d: np.ndarray) -> np.ndarray:
    """`scaled(dot, D)` of docs/numerics.md; the sign of a zero, which no sum shows, may differ."""
    d = np.where(np.isinf(d), d, np.minimum(d, np.float32(2.0**104)))  # only scales of MXFP4 can be larger
    minus_base = -BASE * d
    if np.isfinite(minus_base).all():
        return dots * d
    return fma(BASE + dots, d, minus_base)


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


class Scores(NamedTuple):
    """How scores are made: their scale, their soft cap (0: none), and the positions a query sees (0: all)."""

    scale: np.float32
    cap: np.float32 = np.float32(0)
    window: int = 0


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, scores: Scores | None = None) -> np.ndarray:
    """Causal attention of queries at positions first, first + 1, ...

    q (n, heads, head_dim); k, v (first + n, kv heads, head_dim), as read back from the cache; all f32.  The scale is
    1 / sqrt(head_dim) without `scores`.
    """
    n, heads, head_dim = q.shape
    scores = scores or Scores(np.float32(1.0 / head_dim**0.5))
    step = max(1, 4 * _CHUNK // (heads * SEGMENT))
    group = np.arange(heads) // (heads // k.shape[1])
    pieces = [
        _attend(q[t : t + step], k[: first + t + step], v[: first + t + step], first + t, group, scores)
        for t in range(0, n, step)
    ]
    return np.concatenate(pieces).reshape(n, heads * head_dim)


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, group: np.ndarray, scores: Scores) -> np.ndarray:
    """One chunk of queries; `group[h]` is the kv head of head h."""
    n, heads, head_dim = q.shape
    largest, total = np.zeros((n, heads), np.float32), np.zeros((n, heads), np.float32)
    out = np.zeros((n, heads, head_dim), np.float32)
    has_begun = np.zeros(n, bool)
    positions = first + np.arange(n)
    lowest = np.maximum(0, positions + 1 - scores.window) if scores.window else np.zeros(n, int)
    for begin in range(0, first + n, SEGMENT):
        # Queries that see positions of this segment.
        some = np.flatnonzero((positions >= begin) & (lowest < begin + SEGMENT))
        if not len(some):
            continue
        part = slice(begin, begin + SEGMENT)
        m, sums, values = _segment(
            q[some], k[part, group], v[part, group], positions[some] - begin, lowest[some] - begin, scores
        )
        starts, goes_on = some[~has_begun[some]], has_begun[some]
        largest[starts], total[starts], out[starts] = m[~goes_on], sums[~goes_on], values[~goes_on]
        has_begun[some] = True
        some, m, sums, values = some[goes_on], m[goes_on], sums[goes_on], values[goes_on]
        new = np.maximum(largest[some], m)
        a, b = exp(largest[some] - new), exp(m - new)
        largest[some] = new
        total[some] = fma(total[some], a, sums * b)
        out[some] = fma(out[some], a[..., None], values * b[..., None])
    return out * (np.float32(1) / total)[..., None]


def _segment(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, last: np.ndarray, lowest: np.ndarray, how: Scores
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maximum (n, heads), sum (n, heads) and weighted values (n, heads, head_dim) over one segment.

    k, v (positions, heads, head_dim); query t sees positions lowest[t] .. last[t] of them; both ascend.
    """
    n, heads, head_dim = q.shape
    length = k.shape[0]
    columns = np.ascontiguousarray(k.transpose(2, 1, 0))
    scores = np.zeros((n, heads, length), np.float32)
    for d in range(head_dim):
        scores = fma(q[:, :, d, None], columns[d], scores)
    scores = soft_cap(scores * how.scale, how.cap)
    hidden = (np.arange(length) > last[:, None]) | (np.arange(length) < lowest[:, None])
    scores = np.where(hidden[:, None, :], np.float32(-np.inf), scores)
    largest = scores.max(axis=-1)
    weights = exp(scores - largest[..., None])  # a hidden position weighs exactly 0
    out = np.zeros((n, heads, head_dim), np.float32)
    for j in range(length):
        sees = slice(np.searchsorted(last, j), np.searchsorted(lowest, j, side="right"))
        out[sees] = fma(weights[sees, :, j, None], v[j], out[sees])
    return largest, lane_sum(weights), out


def routes(logits: np.ndarray, used: int, normalized: bool) -> tuple[np.ndarray, np.ndarray]:
    """The experts of each row of router logits (n, experts), and their weights f32: (n, used) each."""
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :used]
    largest = np.take_along_axis(logits, chosen[:, :1], axis=1)
    weights = exp(np.take_along_axis(logits, chosen, axis=1) - largest)
    if normalized:
        total = np.zeros(len(logits), np.float32)
        for i in range(used):
            total = total + weights[:, i]
    else:
        total = lane_sum(exp(logits - largest))
    return chosen, weights / total[:, None]


class ExactModel:
    """A model's tensors, unpacked when first used and kept (one byte for a quantized value)."""

    def __init__(self, path: Path, adapter: Path | None = None) -> None:
        """`adapter`: a LoRA adapter in a GGUF file, which is computed beside the model's own matrices."""
        self.source = Source(path)
        self.added = Adapter(adapter, self.source).added if adapter is not None else {}
        self.hyper = h = self.source.hyper
        self.rope = [self.source.rope(is_local).tables(h.context_length) for is_local in (False, True) if h.n_rot]
        self._matrices: dict[str, Matrix | np.ndarray] = {}

    def matmul(self, name: str, x: np.ndarray) -> np.ndarray:
        """x (n, K) times the matrix `name`: (n, rows) f32."""
        if name not in self._matrices:
            self._matrices[name] = self.source.matrix(name)
        return matmul(self._matrices[name], x)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """`name`.weight times x; a bias is one addition more."""
        y = self.matmul(f"{name}.weight", x)
        if added := self.added.get(f"{name}.weight"):
            y = fma(matmul(added.b, matmul(added.a, x)), added.scale, y)
        return y + self.source.values(f"{name}.bias") if f"{name}.bias" in self.source else y

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMS norm of x with the weights `name`; a layer norm where they have a bias; x where there are none."""
        if f"{name}.weight" not in self.source:
            return x
        weight = self.source.values(f"{name}.weight")
        if f"{name}.bias" in self.source:
            return layer_norm(x, weight, self.source.values(f"{name}.bias"), self.hyper.eps)
        return rms_norm(x, weight, self.hyper.eps)

    def heads_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMS norm of heads x (n, heads, head_dim): of each, or of all together, as the weights are long; or x."""
        if f"{name}.weight" not in self.source:
            return x
        together = self.source.values(f"{name}.weight").size != x.shape[-1]
        return self.norm(name, x.reshape(len(x), -1) if together else x).reshape(x.shape)


class ExactSequence:
    """One sequence of tokens and its K and V as read back from the cache: [layer] (n, kv heads, head_dim)."""

    def __init__(self, model: ExactModel, kv_type: str = "f16") -> None:
        h = model.hyper
        self.model, self.kv_type, self.length = model, kv_type, 0
        self.keys = [np.empty((0, h.n_kv_heads, h.head_dim), np.float32) for _ in range(h.n_layers)]
        self.values = [np.empty((0, h.n_kv_heads, h.head_dim), np.float32) for _ in range(h.n_layers)]

    def extend(self, tokens: Sequence[int] | np.ndarray, last_only: bool = False) -> np.ndarray:
        """Compute more positions: logits (len(tokens), vocab) f32, or (1, vocab) of the last one."""
        m, h = self.model, self.model.hyper
        x = self._residual(tokens)
        if last_only:
            x = x[-1:]
        logits = m.matmul(m.source.head_name, m.norm("output_norm", x))
        return soft_cap(logits if h.logit_scale == 1 else logits * h.logit_scale, h.logit_cap)

    def hidden(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Compute more positions: their final hidden states (len(tokens), width) f32."""
        return self.model.norm("output_norm", self._residual(tokens))

    def score(self, tokens: Sequence[int] | np.ndarray) -> np.float32:
        """Compute a pair of texts, and the score that the model's head makes of its first position."""
        m, x = self.model, self.hidden(tokens)[:1]
        if "cls.weight" in m.source:
            x = soft_cap(m.linear("cls", x), np.float32(1))
        score: np.float32 = m.linear("cls.output", x)[0, 0]
        return score

    def _residual(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """The residual stream (len(tokens), width) f32 of more positions, after the last layer."""
        m, h = self.model, self.model.hyper
        positions = np.arange(self.length, self.length + len(tokens))
        turns = [rotations(tables, positions) for tables in m.rope]
        x = m.source.rows("token_embd.weight", np.asarray(tokens, np.int64))
        if h.embedding_scale != 1:
            x = x * h.embedding_scale
        if "token_types.weight" in m.source:
            x = x + m.source.rows("token_types.weight", np.zeros(1, np.int64))
        if not turns:
            x = x + m.source.rows("position_embd.weight", positions)
        x = m.norm("token_embd_norm", x)
        for layer in range(h.n_layers):
            block = f"blk.{layer}"
            y = self._attention(layer, m.norm(f"{block}.attn_norm", x), turns)
            x = self._added(x, m.norm(f"{block}.post_attention_norm", y))
            x = m.norm(f"{block}.attn_output_norm", x)
            y = self._feed_forward(block, m.norm(f"{block}.ffn_norm", x))
            x = self._added(x, m.norm(f"{block}.post_ffw_norm", y))
            x = m.norm(f"{block}.layer_output_norm", x)
        self.length += len(tokens)
        return x

    def _added(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        scale = self.model.hyper.residual_scale
        return x + y if scale == 1 else fma(y, scale, x)

    def _mixture(self, block: str, y: np.ndarray) -> np.ndarray:
        """The weighted sum over the experts of each row, ascending, and the shared one."""
        m, h = self.model, self.model.hyper
        logits = m.matmul(f"{block}.ffn_gate_inp.weight", y)
        chosen, weights = routes(logits, h.n_experts_used, h.normalizes_experts)
        total = np.zeros_like(y)
        for e in range(h.n_experts):
            rows, places = np.nonzero(chosen == e)
            if len(rows):
                out = self._expert(block, "_exps", f"[{e}]", y[rows])
                total[rows] = fma(out, weights[rows, places][:, None], total[rows])
        if f"{block}.ffn_up_shexp.weight" not in m.source:
            return total
        weight = np.ones((len(y), 1), np.float32)
        if f"{block}.ffn_gate_inp_shexp.weight" in m.source:
            gate = m.matmul(f"{block}.ffn_gate_inp_shexp.weight", y)
            weight = np.float32(1) / (np.float32(1) + exp(-gate))
        return fma(self._expert(block, "_shexp", "", y), weight, total)

    def _expert(self, block: str, kind: str, number: str, y: np.ndarray) -> np.ndarray:
        gate, up, down = (f"{block}.ffn_{part}{kind}.weight{number}" for part in ("gate", "up", "down"))
        m = self.model
        return m.matmul(down, silu(m.matmul(gate, y)) * m.matmul(up, y))

    def _feed_forward(self, block: str, y: np.ndarray) -> np.ndarray:
        m = self.model
        if m.hyper.n_experts:
            return self._mixture(block, y)
        up = m.linear(f"{block}.ffn_up", y)
        act = gelu if m.hyper.gelu else silu
        if f"{block}.ffn_gate.weight" not in m.source:
            return m.linear(f"{block}.ffn_down", act(up))
        return m.linear(f"{block}.ffn_down", act(m.linear(f"{block}.ffn_gate", y)) * up)

    def _attention(self, layer: int, y: np.ndarray, turns: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        m, h, block = self.model, self.model.hyper, f"blk.{layer}"
        q = m.linear(f"{block}.attn_q", y).reshape(len(y), h.n_heads, h.head_dim)
        k = m.linear(f"{block}.attn_k", y).reshape(len(y), h.n_kv_heads, h.head_dim)
        v = m.linear(f"{block}.attn_v", y).reshape(len(y), h.n_kv_heads, h.head_dim)
        q, k = m.heads_norm(f"{block}.attn_q_norm", q), m.heads_norm(f"{block}.attn_k_norm", k)
        window = h.windows[layer]
        if turns:
            cosine, sine = turns[window > 0]
            q, k = rotate(q, cosine, sine, h.pairs), rotate(k, cosine, sine, h.pairs)
        self.keys[layer] = np.concatenate([self.keys[layer], stored(k, self.kv_type)])
        self.values[layer] = np.concatenate([self.values[layer], stored(v, self.kv_type)])
        scores = Scores(h.score_scale, h.score_cap, window)
        keys, values = self.keys[layer], self.values[layer]
        if h.is_causal:
            mixed = attention(q, keys, values, self.length, scores)
        else:  # all positions are those of this call, and each query is like the last one
            mixed = np.concatenate([attention(one[None], keys, values, len(keys) - 1, scores) for one in q])
        return m.linear(f"{block}.attn_output", mixed)
