"""Reads a GGUF's hyper-parameters by the row of its architecture, and checks the bounds that the kernels rely on.

Errors name the key, its value, the bound and a remedy.  Nothing is mapped or written before all of them are checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from pipeline.models.vocabularies import UNIGRAM
from shm.checkpoint import Hyper
from stages.worker.checkpoint.architectures import (
    ARCHITECTURES,
    GATED,
    LAYER,
    LEARNED,
    Architecture,
    window_of,
)
from stages.worker.checkpoint.gguf import AGAIN, GgufError
from stages.worker.checkpoint.source import Source, vector
from stages.worker.rope import RopeTables, Yarn, rope_frequencies, rope_tables

UNSUPPORTED = "this model cannot be served; use another one"
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ROPE, _LOCAL_ROPE = "rope.", "rope.local."  # prefixes of the tables' names
_MAX_DIMENSION = 1 << 24
_MAX_CONTEXT = 1 << 20  # as `max_sequence_length`; step arena and RoPE tables grow with it
_MAX_SCALE = 1e6
_POOLINGS = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's LLAMA_POOLING_TYPE_*
_RANK = 4  # LLAMA_POOLING_TYPE_RANK
_MAX_EXPERTS = 1024
_SOFTMAX = 1  # llama.cpp's LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX
MAX_GROUP = 24  # query heads of a KV head; `MAX_GROUP_ROWS` of kernels/buffer_sizes.py


class _Rope(NamedTuple):
    """Arguments of `rope_tables`."""

    scale: float
    yarn: Yarn | None
    magnitude: float


class _Mixture(NamedTuple):
    """The experts of a layer: their number, those that a token is given to, the widths of one's FFN and the shared."""

    n: int
    used: int
    width: int
    shared_width: int


class HyperReader:
    """Typed access to the metadata of one file."""

    def __init__(self, file: Source) -> None:
        """Raises `GgufError` for an architecture that cannot be served."""
        self.file, self.metadata = file, file.metadata
        parts = self.metadata.get("split.count")
        if isinstance(parts, int) and parts > 1:
            raise GgufError(
                f"{file.path}: split.count is {parts}: the file is one of {parts} parts, expected a whole model; "
                f"join them with llama-gguf-split --merge"
            )
        kind = self.metadata.get("general.type")
        if isinstance(kind, str) and kind == "adapter":
            raise GgufError(
                f"{file.path}: general.type is 'adapter', expected a model; name the file in models[].adapters of the "
                f"model that it changes"
            )
        self.architecture = self._get("general.architecture", str)
        if self.architecture not in ARCHITECTURES:
            raise GgufError(
                f"{file.path}: general.architecture is {self.architecture[:60]!r}; supported: "
                f"{', '.join(ARCHITECTURES)}; use another model"
            )
        self.row: Architecture = ARCHITECTURES[self.architecture]

    # -------------------------------------------------------------- keys

    def _get(self, key: str, kind: Any, default: Any = None) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise GgufError(f"{self.file.path}: metadata key {key!r} is missing; {AGAIN}")
        kinds = (int, float) if kind is float else kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise GgufError(f"{self.file.path}: {key} is {str(value)[:60]!r}, expected {kind.__name__}; {AGAIN}")
        return value

    def _int(self, key: str, low: int, high: int = _MAX_DIMENSION, default: int | None = None) -> int:
        key = f"{self.architecture}.{key}"
        if isinstance(listed := self.metadata.get(key), np.ndarray):
            first = ", ".join(map(str, listed[:8].tolist())) + (", ..." if len(listed) > 8 else "")
            raise GgufError(
                f"{self.file.path}: {key} is a list of {len(listed)} ({first}), expected one number for all layers: "
                f"counts for each layer, such as of heads, are not supported; {UNSUPPORTED}"
            )
        value: int = self._get(key, int, default)
        if not low <= value <= high:
            raise GgufError(f"{self.file.path}: {key} is {value}, expected {low} to {high}; {UNSUPPORTED}")
        return value

    def _float(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """An f32 value from `low` to `high`."""
        key = f"{self.architecture}.{key}"
        value = float(self._get(key, float, default))
        if not low <= value <= high:
            raise GgufError(f"{self.file.path}: {key} is {value}, expected {low:g} to {high:g}; {UNSUPPORTED}")
        return float(np.float32(value))

    def _multiple(self, key: str, value: int, of: int) -> None:
        if value % of:
            raise GgufError(
                f"{self.file.path}: {self.architecture}.{key} is {value}, expected a multiple of {of}; {UNSUPPORTED}"
            )

    def _refuse(self, key: str, value: object, expected: str) -> GgufError:
        return GgufError(
            f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected {expected}; {UNSUPPORTED}"
        )

    # -------------------------------------------------------------- the graph

    def hyper(self) -> Hyper:
        """The hyper-parameters. Raises `GgufError`."""
        path, arch, row = self.file.path, self.architecture, self.row
        mixture = self._mixture()
        width = self._int("embedding_length", 32)
        n_layers = self._int("block_count", 1, 4096)
        n_heads = self._int("attention.head_count", 1, 4096)
        n_kv_heads = self._int("attention.head_count_kv", 1, n_heads, default=n_heads)
        if n_heads % n_kv_heads:
            raise GgufError(
                f"{path}: {arch}.attention.head_count is {n_heads}, expected a multiple of head_count_kv "
                f"({n_kv_heads}); {UNSUPPORTED}"
            )
        if n_heads // n_kv_heads > MAX_GROUP:
            raise GgufError(
                f"{path}: {arch}.attention.head_count_kv is {n_kv_heads}, so that {n_heads // n_kv_heads} query heads "
                f"share a KV head, expected at most {MAX_GROUP}; {UNSUPPORTED}"
            )
        head_dim = self._int("attention.key_length", 1, 1024, default=width // n_heads)
        if self._int("attention.value_length", 1, 1024, default=head_dim) != head_dim:
            raise GgufError(
                f"{path}: {arch}.attention.value_length differs from key_length, expected {head_dim}; {UNSUPPORTED}"
            )
        learned = row.positions == LEARNED
        n_rot = 0 if learned else self._int("rope.dimension_count", 2, head_dim, default=head_dim)
        ffn_width = mixture.width or self._int("feed_forward_length", 32)
        self._multiple("embedding_length", width, 32)
        self._multiple("feed_forward_length", ffn_width, 32)
        self._multiple("expert_shared_feed_forward_length", mixture.shared_width, 32)
        self._multiple("attention.key_length", head_dim, 16)
        self._multiple("rope.dimension_count", n_rot, 2)
        if (n_heads * head_dim) % 32:
            raise GgufError(
                f"{path}: {n_heads} heads of {head_dim} values are {n_heads * head_dim}, expected a multiple of 32; "
                f"{UNSUPPORTED}"
            )
        context = self._int("context_length", 1, _MAX_CONTEXT)
        eps_key = "attention.layer_norm_epsilon" if row.norm == LAYER else "attention.layer_norm_rms_epsilon"
        eps = float(self._get(f"{arch}.{eps_key}", float))
        if not 0 <= eps < 1:
            raise GgufError(f"{path}: {arch}.{eps_key} is {eps}, expected 0 to below 1; {AGAIN}")
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise GgufError(f"{path}: tensor 'token_embd.weight' is missing or not a matrix; {AGAIN}")
        windows = self._windows(n_layers, context)
        return Hyper(
            n_layers=n_layers,
            width=width,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            ffn_width=ffn_width,
            vocab_size=embedding.shape[0],
            context_length=context,
            norm_eps=float(np.float32(eps)),
            n_rot=n_rot,
            rope_pairing="" if learned else row.positions,
            activation=row.activation,
            rope_base=float(self._get(f"{arch}.rope.freq_base", float, 10000.0)),
            rope_scale=self._rope().scale,
            attention_bias="blk.0.attn_q.bias" in self.file.tensors,
            norm=row.norm,
            attention_scale=self._attention_scale(n_layers, width, n_heads, head_dim),
            attention_cap=self._cap("attn_logit_softcapping", row.attention_cap, row.attention_cap > 0),
            logit_cap=self._cap("final_logit_softcapping", row.logit_cap, row.has_logit_cap),
            logit_scale=self._logit_scale(),
            embedding_scale=self._embedding_scale(width),
            residual_scale=self._scale("residual_scale"),
            windows=windows,
            has_local_rope=bool(row.local_rope_base) and any(windows),
            n_experts=mixture.n,
            n_experts_used=mixture.used,
            normalizes_experts=mixture.n > 0 and row.experts is not None and row.experts.normalized,
            shared_ffn_width=mixture.shared_width,
            is_causal=self._is_causal(any(windows)),
            scores_pairs=self.scores_pairs(),
            kv_revision=self.kv_revision(),
            is_factor_read=True,
        )

    def _is_causal(self, has_windows: bool) -> bool:
        is_causal = bool(self._get(f"{self.architecture}.attention.causal", bool, self.row.is_causal))
        if is_causal and not self.row.is_causal:
            raise self._refuse("attention.causal", is_causal, "false")
        if not is_causal and has_windows:
            raise self._refuse("attention.causal", is_causal, "true where layers have a sliding window")
        return is_causal

    def token_types(self) -> int:
        """The kinds of texts that the embedding tells apart; 0: none."""
        table = self.file.tensors.get("token_types.weight")
        return table.shape[0] if table is not None and self.row.norms_residual else 0

    def _mixture(self) -> _Mixture:
        """The experts; all 0 for a plain graph."""
        experts, count = self.row.experts, self._int("expert_count", 0, _MAX_EXPERTS, default=0)
        if experts is None:
            if count:
                raise self._refuse("expert_count", count, "0 (no mixture of experts)")
            return _Mixture(0, 0, 0, 0)
        if not count:
            if not experts.is_optional:
                raise self._refuse("expert_count", count, f"1 to {_MAX_EXPERTS}")
            return _Mixture(0, 0, 0, 0)
        for key, expected in (("expert_gating_func", _SOFTMAX), ("expert_weights_scale", 1.0)):
            value = self._get(f"{self.architecture}.{key}", float, expected)
            if value not in (0, expected):
                raise self._refuse(key, value, f"{expected:g}")
        used = self._int("expert_used_count", 1, count)
        ffn = self._int("feed_forward_length", 32)
        width = self._int("expert_feed_forward_length", 32, default=ffn // used) if experts.has_own_width else ffn
        shared = 0
        if experts.shared:
            default = ffn if experts.shared == GATED else 0
            shared = self._int("expert_shared_feed_forward_length", 32 if default else 0, default=default)
        return _Mixture(count, used, width, shared)

    def pooling(self) -> str:
        """How the file says to pool hidden states into an embedding; "": it does not, or not in a way of the engine."""
        return "rank" if self.scores_pairs() else _POOLINGS.get(self._pooling_type(), "")

    def scores_pairs(self) -> bool:
        """Whether the file has the weights of a pair's score; that of an older converter states no pooling type."""
        has_head = "cls.output.weight" in self.file.tensors
        return has_head and self.row.norms_residual and self._pooling_type() in (0, _RANK)

    def _pooling_type(self) -> int:
        return self._int("pooling_type", 0, 255, default=0)

    def adds_eos(self) -> bool:
        """Whether a text to be embedded ends with the EOS token; by default with a unigram vocabulary."""
        default = self.file.metadata.get("tokenizer.ggml.model") == UNIGRAM
        return bool(self._get("tokenizer.ggml.add_eos_token", bool, default))

    def _scale(self, key: str) -> float:
        return self._float(key, 0.0, _MAX_SCALE, 1.0) if self.row.scales else 1.0

    def _embedding_scale(self, width: int) -> float:
        return float(np.sqrt(np.float32(width))) if self.row.scaled_embedding else self._scale("embedding_scale")

    def _logit_scale(self) -> float:
        """Granite's key is a divisor."""
        if not self.row.scales:
            return 1.0
        return float(np.float32(1) / np.float32(self._float("logit_scale", 1e-6, _MAX_SCALE, 1.0)))

    def _attention_scale(self, n_layers: int, width: int, n_heads: int, head_dim: int) -> float:
        if self.row.scales and f"{self.architecture}.attention.scale" in self.metadata:
            return self._float("attention.scale", 1e-6, _MAX_SCALE)
        is_wide = n_layers == self.row.wide_scale_layers
        return float(np.float32(1.0 / (width // n_heads if is_wide else head_dim) ** 0.5))

    def _cap(self, key: str, default: float, counts: bool) -> float:
        """Bound of a soft cap; 0: none."""
        return self._float(key, 0.0, _MAX_SCALE, default) if counts else 0.0

    def kv_revision(self) -> int:
        """`Hyper.kv_revision`: 1 where older releases ignored the local RoPE or the attention factor."""
        if self.row.positions == LEARNED:
            return 0
        is_local = self.row.local_rope_base > 0 and self._window() > 0
        if is_local and self._window() >= self._int("context_length", 1, _MAX_CONTEXT):
            return 1
        kind = self.metadata.get(f"{self.architecture}.rope.scaling.type")
        was_read = kind in ("yarn", "longrope") or "rope_factors_long.weight" in self.file.tensors
        return int((not was_read and self._magnitude() != 1) or (is_local and self._local_magnitude() != 1))

    def _window(self) -> int:
        """Positions that layers with a window attend to; 0: no layer has one."""
        return self._int("attention.sliding_window", 0, 1 << 31, default=self.row.window)

    def _windows(self, n_layers: int, context: int) -> tuple[int, ...]:
        """Window of each layer, 0 where it has none; empty when all layers see all positions and have the same RoPE.

        Where layers with a window have a RoPE of their own, it is never empty (`Index.has_current_windows`).
        """
        window = self._window()
        if not window:
            return (0,) * n_layers if self.row.local_rope_base else ()
        if window >= context and not self.row.local_rope_base:
            return ()
        period = self.row.window_period
        if period is None:
            raise self._refuse("attention.sliding_window", window, f"0 or at least the context length ({context})")
        key = f"{self.architecture}.attention.sliding_window_pattern"
        pattern = self.metadata.get(key)
        if isinstance(pattern, np.ndarray):
            if len(pattern) != n_layers:
                raise self._refuse("attention.sliding_window_pattern", len(pattern), f"{n_layers} entries")
            return tuple(window if is_local else 0 for is_local in pattern.tolist())
        if pattern is not None:
            period = self._int("attention.sliding_window_pattern", 0, 4096)
        return tuple(window_of(layer, window, period) for layer in range(n_layers))

    # -------------------------------------------------------------- positions

    def _rope(self) -> _Rope:
        arch = self.architecture
        if self.row.scales and not self._get(f"{arch}.rope.scaling.finetuned", bool, True):
            # Granite's switch for RoPE; in files of other architectures it changes nothing.
            raise self._refuse("rope.scaling.finetuned", False, "true (a graph with RoPE)")
        kind = self._get(f"{arch}.rope.scaling.type", str, "linear")  # llama.cpp's default
        if kind not in ("none", "linear", "yarn", "longrope"):
            raise GgufError(
                f"{self.file.path}: {arch}.rope.scaling.type is {kind[:60]!r}; supported: 'none', 'linear', 'yarn', "
                f"'longrope' and rope_freqs factors; {UNSUPPORTED}"
            )
        magnitude = self._magnitude()
        if kind == "linear":
            # As in llama.cpp a factor of 0 is none.
            return _Rope(float(self._get(self._rope_factor_key(), float, 1.0)) or 1.0, None, magnitude)
        if kind != "yarn":
            return _Rope(1.0, None, magnitude)
        for key, expected in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
            value = float(self._get(f"{arch}.rope.scaling.{key}", float, expected))
            if value != expected:
                raise self._refuse(f"rope.scaling.{key}", value, f"{expected:g}")
        yarn = Yarn(
            self._int("rope.scaling.original_context_length", 1, default=self._int("context_length", 1)),
            self._float("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
            self._float("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
        )
        return _Rope(float(self._get(self._rope_factor_key(), float)), yarn, magnitude)

    def _magnitude(self) -> float:
        """The attention factor, which as in llama.cpp counts with every type of scaling."""
        return self._float("rope.scaling.attn_factor", 1e-3, 1e3, 1.0)

    def _local_magnitude(self) -> float:
        """That of layers with a window: the same, unless it belongs to long factors, which these layers do not have."""
        return 1.0 if "rope_factors_long.weight" in self.file.tensors else self._magnitude()

    def _rope_factor_key(self) -> str:
        """The key of the scaling factor: the name of older files only if they have no other."""
        key, old = f"{self.architecture}.rope.scaling.factor", f"{self.architecture}.rope.scale_linear"
        return old if key not in self.metadata and old in self.metadata else key

    def rope(self, h: Hyper) -> dict[str, np.ndarray]:
        """The RoPE tables by their names in the checkpoint; none where positions are learned. Raises `GgufError`."""
        found: dict[str, np.ndarray] = {}
        for prefix, (base, rope) in self._rope_settings(h).items():
            factors = self._factors(h) if prefix == _ROPE else None
            with self._bounded_rope():
                found |= _named(prefix, rope_tables(base, h.n_rot, h.context_length, factors, *rope))
        return found

    def check_rope(self, h: Hyper) -> None:
        """Raise the `GgufError` of `rope`, as far as it does not depend on bytes of tensors."""
        for base, rope in self._rope_settings(h).values():
            with self._bounded_rope():
                rope_frequencies(base, h.n_rot, None, rope.scale, rope.yarn)

    def _rope_settings(self, h: Hyper) -> dict[str, tuple[float, _Rope]]:
        """Base and scaling of each set of tables, by the prefix of its names."""
        if not h.n_rot:
            return {}
        found = {_ROPE: (h.rope_base, self._rope())}
        if h.has_local_rope:
            base = float(self._get(f"{self.architecture}.rope.freq_base_swa", float, self.row.local_rope_base))
            found[_LOCAL_ROPE] = base, _Rope(1.0, None, self._local_magnitude())
        return found

    @contextmanager
    def _bounded_rope(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise GgufError(f"{self.file.path}: {error}; {UNSUPPORTED}") from None

    def _factors(self, h: Hyper) -> np.ndarray | None:
        """The divisors of the frequencies: of a long context those for it, if the file has two sets."""
        original = self._int("rope.scaling.original_context_length", 1, default=h.context_length)
        long = "rope_factors_long.weight" if h.context_length > original else "rope_factors_short.weight"
        for name in ("rope_freqs.weight", long):
            info = self.file.tensors.get(name)
            if info is None:
                continue
            if info.shape != (h.n_rot // 2,) or not info.format.dense:
                raise GgufError(
                    f"{self.file.path}: tensor {name!r} is {info.format.name} {list(info.shape)}, "
                    f"expected F32 [{h.n_rot // 2}]; {AGAIN}"
                )
            return vector(self.file, info)
        return None


def _named(prefix: str, tables: RopeTables) -> dict[str, np.ndarray]:
    return {f"{prefix}{name}": table for name, table in tables._asdict().items()}
