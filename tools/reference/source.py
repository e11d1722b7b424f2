"""Hyper-parameters and tensors of a GGUF file for both references. Independent of ingest and checkpoints.

The graph of an architecture follows from its tensors (a norm of q, a norm behind attention, a gate) as far as they say
it; `_GRAPHS` has the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from stages.worker.rope import RopeTables, Yarn, rope_frequencies, rope_magnitude, rope_tables
from tools.reference.blocks import Matrix, unpack


class Graph(NamedTuple):
    """What neither tensors nor metadata say."""

    pairs: str = "halves"  # "neighbours": RoPE rotates values (2i, 2i+1) together; "halves": (i, i + n_rot / 2)
    gelu: bool = False
    scales_embedding: bool = False  # by sqrt(width)
    wide_layers: int = 0  # with so many layers, scores are scaled by the width of a head of `width`
    caps: tuple[float, float] = (0.0, 0.0)  # defaults for scores and logits
    window: int = 0  # default
    normalizes_experts: bool = True  # their weights are divided by their sum
    is_causal: bool = True
    full_every: int = 0  # so many layers make a period, and its last one has no window; 0: all have one


_GEMMA = Graph(gelu=True, scales_embedding=True)
_GRAPHS = {
    "llama": Graph("neighbours"),
    "qwen2": Graph(),
    "qwen2moe": Graph(normalizes_experts=False),
    "qwen3": Graph(),
    "qwen3moe": Graph(),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(wide_layers=46, caps=(50.0, 30.0), window=4096, full_every=2),
    "gemma3": _GEMMA._replace(wide_layers=62, full_every=6),
    "phi3": Graph(),
    "granite": Graph("neighbours"),
    "granitemoe": Graph("neighbours"),
    "olmo2": Graph(),
    "olmoe": Graph(normalizes_experts=False),
    "stablelm": Graph(),
    "starcoder2": Graph(gelu=True),
    "gpt2": Graph(gelu=True),
    "bert": Graph(gelu=True, is_causal=False),
    "nomic-bert": Graph(is_causal=False),
}


class Hyper(NamedTuple):
    """Hyper-parameters of a graph. Counts, except scales, caps (0: none), `eps` and `pairs`."""

    n_layers: int
    width: int  # of the residual stream
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int  # leading values of a head that RoPE rotates; 0: positions are embedded
    ffn_width: int
    eps: np.float32
    context_length: int
    pairs: str
    gelu: bool
    score_scale: np.float32
    score_cap: np.float32
    logit_cap: np.float32
    logit_scale: np.float32
    embedding_scale: np.float32
    residual_scale: np.float32
    windows: tuple[int, ...]  # of each layer; 0: all positions
    n_experts: int  # 0: the FFN is plain
    n_experts_used: int
    normalizes_experts: bool
    is_causal: bool


class Rope(NamedTuple):
    """The arguments of `rope_tables` but the context."""

    base: float
    n_rot: int
    factors: np.ndarray | None
    scale: float
    yarn: Yarn | None
    magnitude: float

    def tables(self, context_length: int) -> RopeTables:
        """The exact tables."""
        return rope_tables(self.base, self.n_rot, context_length, *self[2:])

    @property
    def frequencies(self) -> list[int]:
        """Fixed point, as of `rope_frequencies`."""
        return rope_frequencies(*self[:5])

    @property
    def largest(self) -> float:
        """What cosines and sines are multiplied with."""
        return float(rope_magnitude(self.scale, self.yarn, self.magnitude))


def pair_slices(n_rot: int, pairs: str) -> tuple[slice, slice]:
    """Positions in a head of the first and of the second values of the pairs that RoPE rotates."""
    if pairs == "neighbours":
        return slice(0, n_rot, 2), slice(1, n_rot, 2)
    return slice(0, n_rot // 2), slice(n_rot // 2, n_rot)


class Source:
    """A GGUF file of a supported architecture. Raises `ValueError` for another one."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {t.name: t for t in reader.tensors}
        self.architecture = arch = self._value("general.architecture")
        if arch not in _GRAPHS:
            raise ValueError(f"{path}: architecture is {arch!r}, expected one of {', '.join(_GRAPHS)}")
        graph = _GRAPHS[arch]
        width, n_heads = self._number("embedding_length"), self._number("attention.head_count")
        head_dim = self._number("attention.key_length", width // n_heads)
        n_layers, context = self._number("block_count"), self._number("context_length")
        score_width = width // n_heads if n_layers == graph.wide_layers else head_dim
        eps = self._number("attention.layer_norm_rms_epsilon", -1.0)
        window = self._number("attention.sliding_window", graph.window)
        every = graph.full_every
        self.hyper = Hyper(
            n_layers=n_layers,
            width=width,
            n_heads=n_heads,
            n_kv_heads=self._number("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            n_rot=0 if "position_embd.weight" in self else self._number("rope.dimension_count", head_dim),
            ffn_width=self._number("feed_forward_length"),
            eps=np.float32(eps if eps >= 0 else self._number("attention.layer_norm_epsilon")),
            context_length=context,
            pairs=graph.pairs,
            gelu=graph.gelu,
            score_scale=np.float32(self._number("attention.scale", 1.0 / score_width**0.5)),
            score_cap=np.float32(self._number("attn_logit_softcapping", graph.caps[0])),
            logit_cap=np.float32(self._number("final_logit_softcapping", graph.caps[1])),
            logit_scale=np.float32(1) / np.float32(self._number("logit_scale", 1.0)),
            embedding_scale=np.sqrt(np.float32(width))
            if graph.scales_embedding
            else np.float32(self._number("embedding_scale", 1.0)),
            residual_scale=np.float32(self._number("residual_scale", 1.0)),
            windows=tuple(0 if every and layer % every == every - 1 else window for layer in range(n_layers)),
            n_experts=self._number("expert_count", 0),
            n_experts_used=self._number("expert_used_count", 0),
            normalizes_experts=graph.normalizes_experts,
            is_causal=self._fields[f"{arch}.attention.causal"].contents()
            if f"{arch}.attention.causal" in self._fields
            else graph.is_causal,
        )

    def _value(self, key: str, default: Any = None) -> Any:
        if key in self._fields:
            return self._fields[key].contents()
        if default is None:
            raise ValueError(f"{key} is missing")
        return default

    def _number(self, key: str, default: Any = None) -> Any:
        return self._value(f"{self.architecture}.{key}", default)

    # -------------------------------------------------------------- RoPE

    def rope(self, is_local: bool = False) -> Rope:
        """The rotations of layers without, or (`is_local`) with a window. Raises `ValueError` (unknown scaling)."""
        h, base = self.hyper, float(self._number("rope.freq_base", 10000.0))
        if is_local and self.architecture == "gemma3":
            magnitude = 1.0 if "rope_factors_long.weight" in self else self._number("rope.scaling.attn_factor", 1.0)
            return Rope(float(self._number("rope.freq_base_swa", 10000.0)), h.n_rot, None, 1.0, None, float(magnitude))
        kind = self._number("rope.scaling.type", "linear")
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise ValueError(f"rope.scaling.type is {kind!r}, expected 'none', 'linear', 'yarn' or 'longrope'")
        original = self._number("rope.scaling.original_context_length", h.context_length)
        yarn = None
        if kind == "yarn":
            fast, slow = (self._number(f"rope.scaling.yarn_beta_{x}", n) for x, n in (("fast", 32.0), ("slow", 1.0)))
            yarn = Yarn(original, fast, slow)
        length = "long" if h.context_length > original else "short"
        factors = None
        for name in ("rope_freqs.weight", f"rope_factors_{length}.weight"):
            if factors is None and name in self:
                factors = self.values(name)
        factor = self._number("rope.scaling.factor", self._number("rope.scale_linear", 1.0))
        scale = (float(factor) or 1.0) if kind in ("linear", "yarn") else 1.0
        return Rope(base, h.n_rot, factors, scale, yarn, float(self._number("rope.scaling.attn_factor", 1.0)))

    # -------------------------------------------------------------- tensors

    def _find(self, name: str) -> tuple[Any, slice | int] | None:
        """A tensor and its rows (q, k and v, or gate and up, may be one tensor of the file); None if it is missing."""
        if name.endswith("]"):
            name, expert = name[:-1].split("[")
            return self._tensors[name], int(expert)
        if name.startswith("blk."):
            h, (_, layer, part, kind) = self.hyper, name.split(".")
            q, kv, ffn = h.n_heads * h.head_dim, h.n_kv_heads * h.head_dim, h.ffn_width
            rows = {"attn_q": (0, q), "attn_k": (q, q + kv), "attn_v": (q + kv, q + 2 * kv)}
            fused = f"blk.{layer}.attn_qkv.{kind}"
            if self.architecture == "phi3":
                rows |= {"ffn_gate": (0, ffn), "ffn_up": (ffn, 2 * ffn)}
                fused = f"blk.{layer}.ffn_up.{kind}" if part.startswith("ffn") else fused
            if part in rows and fused in self._tensors:
                return self._tensors[fused], slice(*rows[part])
        return (self._tensors[name], slice(None)) if name in self._tensors else None

    def _tensor(self, name: str) -> tuple[Any, slice | int]:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    @property
    def head_name(self) -> str:
        """The tensor of the output head: its own, or the embedding's when the two are tied."""
        return "output.weight" if "output.weight" in self else "token_embd.weight"

    def values(self, name: str) -> np.ndarray:
        """A tensor dequantized: f32, rows first. A name as in `matrix`."""
        tensor, rows = self._tensor(name)
        return gguf.dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float32)

    def rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a matrix dequantized: (len(rows), K) f32."""
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data[rows], tensor.tensor_type).astype(np.float32)

    def matrix(self, name: str) -> Matrix | np.ndarray:
        """A matrix as its blocks' integers and scales, or (rows, K) f32 for unquantized formats.

        `NAME_exps.weight[5]` is the matrix of expert 5.
        """
        tensor, rows = self._tensor(name)
        return unpack(np.atleast_2d(tensor.data[rows]), tensor.tensor_type)
