"""A rank's kernel parameter block, made from a mapped checkpoint and mapped arenas.

`Model` holds the weights' addresses; `RankTable` joins them with one group's arenas and the rank's private buffers.
Kernels work on plain addresses, so both objects must live as long as kernels use them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeline.errors import ModelUnavailable
from pipeline.runtime import cpu
from shm.arena import Arena
from shm.checkpoint import Checkpoint, Hyper
from shm.layer_groups import places_of_layers
from shm.pages import KV_TYPES, KvArena, KvGeometry
from shm.step_ring import PROGRESS, Steps, StepsGeometry
from stages.worker import activations_arena as act
from stages.worker.adapters.memory import AdapterMemory
from stages.worker.kernels import buffer_sizes as bs
from stages.worker.kernels import compiled, stored_code
from stages.worker.kernels import parameter_block as c
from stages.worker.kernels.formats import FORMATS
from stages.worker.rank_clusters import MAX_CLUSTER

# How ranks divide products (kernels/row_claims.py): bytes of weights that a rank claims at once, some 10 us of a core's
# reads; and the most tokens of a step in which it does, as with more of them each piece reads activations again
CLAIM_BYTES = 64 << 10
CLAIM_TOKENS = 16

_MATRICES = (
    ("attn_q", c.Q, c.Q_FORMAT),
    ("attn_k", c.K, c.K_FORMAT),
    ("attn_v", c.V, c.V_FORMAT),
    ("attn_output", c.O, c.O_FORMAT),
    ("ffn_gate", c.GATE, c.GATE_FORMAT),
    ("ffn_up", c.UP, c.UP_FORMAT),
    ("ffn_down", c.DOWN, c.DOWN_FORMAT),
    ("ffn_gate_inp", c.ROUTER, c.ROUTER_FORMAT),
    ("ffn_gate_exps", c.GATE_EXPERTS, c.GATE_EXPERTS_FORMAT),
    ("ffn_up_exps", c.UP_EXPERTS, c.UP_EXPERTS_FORMAT),
    ("ffn_down_exps", c.DOWN_EXPERTS, c.DOWN_EXPERTS_FORMAT),
    ("ffn_gate_inp_shexp", c.SHARED_ROUTER, c.SHARED_ROUTER_FORMAT),
    ("ffn_gate_shexp", c.SHARED_GATE, c.SHARED_GATE_FORMAT),
    ("ffn_up_shexp", c.SHARED_UP, c.SHARED_UP_FORMAT),
    ("ffn_down_shexp", c.SHARED_DOWN, c.SHARED_DOWN_FORMAT),
)
_VECTORS = (
    ("attn_norm.weight", c.ATTN_NORM),
    ("attn_norm.bias", c.ATTN_NORM_BIAS),
    ("attn_q.bias", c.Q_BIAS),
    ("attn_k.bias", c.K_BIAS),
    ("attn_v.bias", c.V_BIAS),
    ("attn_q_norm.weight", c.Q_NORM),
    ("attn_k_norm.weight", c.K_NORM),
    ("attn_output.bias", c.O_BIAS),
    ("post_attention_norm.weight", c.POST_ATTENTION_NORM),
    ("ffn_norm.weight", c.FFN_NORM),
    ("ffn_norm.bias", c.FFN_NORM_BIAS),
    ("ffn_gate.bias", c.GATE_BIAS),
    ("ffn_up.bias", c.UP_BIAS),
    ("ffn_down.bias", c.DOWN_BIAS),
    ("post_ffw_norm.weight", c.POST_FFN_NORM),
    ("attn_output_norm.weight", c.ATTN_OUTPUT_NORM),
    ("attn_output_norm.bias", c.ATTN_OUTPUT_NORM_BIAS),
    ("layer_output_norm.weight", c.LAYER_OUTPUT_NORM),
    ("layer_output_norm.bias", c.LAYER_OUTPUT_NORM_BIAS),
)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


class Model:
    """A checkpoint, mapped: `hyper`, `digest` (raw), `words` (the model's part of a parameter block), `layers`."""

    def __init__(
        self, checkpoint: Checkpoint, adapters: AdapterMemory | None = None, weights: np.ndarray | None = None
    ) -> None:
        """`adapters`: those that its sequences may name. `weights`: a copy of `checkpoint.data` that is used instead.

        Raises `ModelUnavailable` (kernels do not support it).
        """
        self.checkpoint = checkpoint
        self.adapters = adapters
        self.index = self.checkpoint.index
        self.hyper = h = self.index.hyper
        self.digest = bytes.fromhex(self.index.digest)
        group = h.n_heads // h.n_kv_heads
        if group > bs.MAX_GROUP_ROWS:
            raise ModelUnavailable(
                f"{self.index.name}: {group} query heads share a KV head; the kernels support at most "
                f"{bs.MAX_GROUP_ROWS}",
                param="model",
            )
        self.weights = checkpoint.data if weights is None else weights
        self._base = self.weights.ctypes.data
        self._tensors = {tensor.name: tensor for tensor in self.index.tensors}
        self.layers = np.zeros((h.n_layers, c.LAYER_WORDS), np.int64)
        no_windows = (0,) * h.n_layers
        windows, masking = h.windows or no_windows, h.masking_windows or no_windows
        for i, row in enumerate(self.layers):
            for name, at, kind in _MATRICES:
                row[at], row[kind] = self._matrix(f"blk.{i}.{name}.weight")
            for name, at in _VECTORS:
                row[at] = self._address(f"blk.{i}.{name}")
            q_norm = self._tensors.get(f"blk.{i}.attn_q_norm.weight")
            row[c.NORM_ALL_HEADS] = q_norm is not None and q_norm.columns != h.head_dim
            row[c.WINDOW] = masking[i]
            if windows[i] and h.has_local_rope:
                row[c.ANGLES] = act.strides(h)[c.ROPE_STRIDE] // 2
        self.words = self._words(h)

    def load_kernels(self, kv_type: str) -> str:
        """Load the kernels that compute it; returns `kernels_of` it. Raises `RuntimeError`."""
        return kernels_of(self.hyper, kv_type, self.adapters is not None)

    def _address(self, name: str) -> int:
        """Address of a tensor; 0 when the model has none of this name."""
        tensor = self._tensors.get(name)
        return 0 if tensor is None else self._base + tensor.offset

    def _matrix(self, name: str) -> tuple[int, int]:
        tensor = self._tensors.get(name)
        return self._address(name), 0 if tensor is None else FORMATS[tensor.format].id

    def _words(self, h: Hyper) -> dict[int, int]:
        words = {
            c.N_LAYERS: h.n_layers,
            c.WIDTH: h.width,
            c.N_HEADS: h.n_heads,
            c.N_KV_HEADS: h.n_kv_heads,
            c.HEAD_DIM: h.head_dim,
            c.FFN: h.ffn_width,
            c.VOCAB: h.vocab_size,
            c.N_ROT: h.n_rot,
            c.NEOX_ROPE: int(h.rope_pairing == "halves"),
            c.GELU: int(h.activation == "gelu"),
            c.EPS: _bits(h.norm_eps),
            c.LAYER_NORM: int(h.norm == "layer"),
            c.MAX_POSITIONS: h.context_length,
            c.SCORE_SCALE: _bits(h.attention_scale or 1.0 / h.head_dim**0.5),
            c.SCORE_CAP: _bits(h.attention_cap),
            c.EMBEDDING_SCALE: _bits(h.embedding_scale),
            c.RESIDUAL_SCALE: _bits(h.residual_scale),
            c.LOGIT_SCALE: _bits(h.logit_scale),
            c.LOGIT_CAP: _bits(h.logit_cap),
            c.N_EXPERTS: h.n_experts,
            c.EXPERTS_USED: h.n_experts_used,
            c.NORMALIZE_ROUTES: int(h.normalizes_experts),
            c.SHARED_FFN: h.shared_ffn_width,
            c.EMBEDDING_NORM: self._address("token_embd_norm.weight"),
            c.EMBEDDING_NORM_BIAS: self._address("token_embd_norm.bias"),
            c.TOKEN_TYPE: self._address("token_types.weight"),
            c.ATTENDS_ALL: int(not h.is_causal),
            c.FINAL_NORM: self._address("output_norm.weight"),
            c.FINAL_NORM_BIAS: self._address("output_norm.bias"),
            c.COS_LO: self._address("rope.cos_lo"),
            c.SIN_LO: self._address("rope.sin_lo"),
            c.COS_HI: self._address("rope.cos_hi"),
            c.SIN_HI: self._address("rope.sin_hi"),
            c.LOCAL_COS_LO: self._address("rope.local.cos_lo"),
            c.LOCAL_SIN_LO: self._address("rope.local.sin_lo"),
            c.LOCAL_COS_HI: self._address("rope.local.cos_hi"),
            c.LOCAL_SIN_HI: self._address("rope.local.sin_hi"),
        }
        words[c.POSITIONS], words[c.POSITIONS_FORMAT] = self._matrix("position_embd.weight")
        words[c.EMBEDDING], words[c.EMBEDDING_FORMAT] = self._matrix("token_embd.weight")
        words[c.HEAD], words[c.HEAD_FORMAT] = self._matrix(self.index.head_name)
        if h.scores_pairs:
            words[c.DENSE], words[c.DENSE_FORMAT] = self._matrix("cls.weight")
            words[c.SCORE], words[c.SCORE_FORMAT] = self._matrix("cls.output.weight")
            words[c.DENSE_BIAS], words[c.SCORE_BIAS] = self._address("cls.bias"), self._address("cls.output.bias")
        return words

    @property
    def weight_bytes(self) -> int:
        """Bytes of the checkpoint that a decode step reads."""
        return self.index.decode_bytes


def kernels_of(hyper: Hyper, kv_type: str, has_adapters: bool) -> str:
    """Load the kernels of a model; returns what names them and `Hyper.kv_revision`. Raises `RuntimeError`."""
    name = compiled.identity(kv_type, stored_code.extra_entries(hyper, has_adapters))
    return f"{name} {hyper.kv_revision}" if hyper.kv_revision else name


class Arenas(NamedTuple):
    """The arenas of one worker group: views, and the geometry of each."""

    steps: Steps
    steps_geometry: StepsGeometry
    kv: KvArena
    kv_geometry: KvGeometry
    activations: Arena
    geometry: act.ActivationsGeometry


def _have_barriers(control: np.ndarray, ranks: int) -> bool:
    """Whether the ranks of each memory node wait for each other alone, as they do if no node has many ranks.

    Otherwise they wait for all: the barrier of a node has no clusters, and takes longer than one with clusters.
    """
    return 0 < max(len(act.ranks_of_node(control, rank)) for rank in range(ranks)) <= MAX_CLUSTER


def check_arenas(hyper: Hyper, arenas: Arenas) -> None:
    """Raises `ValueError` when the arenas' geometries do not fit the model or each other."""
    kv, s, g = arenas.kv_geometry, arenas.steps_geometry, arenas.geometry
    if kv.revision != hyper.kv_revision:
        raise ValueError(
            f"KV revision is {kv.revision}, expected {hyper.kv_revision}: the index was made again, with another K and "
            "V, while the model was loaded; reload the model"
        )
    for name, value, expected in (
        ("KV layers", kv.n_layers, hyper.n_layers),
        ("KV layers with a window", kv.n_windowed, hyper.n_windowed),
        ("KV heads", kv.n_kv_heads, hyper.n_kv_heads),
        ("KV head_dim", kv.head_dim, hyper.head_dim),
        ("max_entries", g.max_entries, s.max_entries),
        ("max_samples", g.step_samples, s.max_samples),
        ("max_pages", g.max_pages, s.max_pages),
        ("pages beyond whole places of a row", s.max_pages % kv.groups.n_groups, 0),
    ):
        if value != expected:
            raise ValueError(f"{name} is {value}, expected {expected}")


def _layers_with_pages(model: Model, kv: KvGeometry, max_pages: int) -> np.ndarray:
    """The rows of the model's layers, with the places of their K and V: (n_layers, LAYER_WORDS) i64."""
    layers = model.layers.copy()
    windows = model.hyper.masking_windows or (0,) * kv.n_layers
    for row, (group, place) in zip(layers, places_of_layers(windows, kv.page_layers, kv.groups), strict=True):
        row[c.KV_AT] = place * kv.n_kv_heads * kv.head_bytes
        row[c.TABLE_AT] = 4 * group * (max_pages // kv.groups.n_groups)
    return layers


class RankTable:
    """One rank's kernel parameter block at `address`, and everything that it points at."""

    def __init__(self, model: Model, arenas: Arenas, rank: int, profile: bool = False) -> None:
        check_arenas(model.hyper, arenas)
        self.model, self.arenas, self.rank = model, arenas, rank
        self.phases = np.zeros(len(bs.PHASES), np.int64)  # cycles spent in each phase, counted with `profile`
        self._keep: list[np.ndarray] = []
        words = dict(model.words)
        words |= self._steps_words(arenas.steps, arenas.steps_geometry)
        kv, g = arenas.kv_geometry, arenas.geometry
        self.layers = _layers_with_pages(model, kv, g.max_pages)
        words |= {
            c.LAYERS: self.layers.ctypes.data,
            c.PAGES: arenas.kv.pages.ctypes.data,
            c.PAGE_BYTES: kv.page_bytes,
            c.N_PAGES: arenas.kv.pages.shape[0],
            c.PAGE_TOKENS: kv.page_tokens,
            c.PAGE_GROUPS: kv.groups.n_groups,
            c.HEAD_BYTES: kv.head_bytes,
            c.KV_WIDTH: KV_TYPES[kv.kv_type],
        }
        base = arenas.activations.buffer.ctypes.data
        control = act.control_words(arenas.activations)
        nearby = act.ranks_of_node(control, rank) or range(g.ranks)
        node = act.node_of(control, rank)
        words |= {name: base + at for name, at in act.offsets(g, model.hyper, node)[0].items()}
        words |= act.strides(model.hyper)
        if g.adapter_rank:
            words |= {
                c.ADAPTERS: model.adapters.address if model.adapters is not None else 0,
                c.ADAPTER_SUMS_STRIDE: bs.adapter_sums_stride(g.adapter_rank),
            }
        words |= {
            c.N_SPLIT_RESULTS: act.n_split_results(g, model.hyper),
            c.STEP_TOKENS: g.step_tokens,
            c.STEP_SAMPLES: g.step_samples,
            c.RANK: rank,
            c.RANKS: g.ranks,
            c.BARRIER: base + 8 * act.BARRIER,
            c.LINES: base + 8 * act.LINES,
            c.CLUSTERS: base + 8 * act.CLUSTERS if act.has_clusters(control) else 0,
            c.CLAIMS: base + 8 * act.CLAIMS,
            c.CLAIM_BYTES: CLAIM_BYTES,
            c.CLAIM_TOKENS: CLAIM_TOKENS,
            c.TILES_FROM: base + 8 * act.TILES_FROM,
            c.NODE_RANK: rank - nearby.start,
            c.NODE_RANKS: len(nearby),
            c.PHASES: self.phases.ctypes.data if profile else 0,
        }
        if _have_barriers(control, g.ranks):
            words |= {
                c.NODE_BARRIER: base + 8 * (act.NODE_EPOCHS + 8 * nearby.start),
                c.NODE_LINES: base + 8 * (act.NODE_LINES + 8 * nearby.start),
            }
        words |= self._scratch(model.hyper, g)
        words |= compiled.addresses(kv.kv_type, stored_code.extra_entries(model.hyper, g.adapter_rank > 0))
        self.table, needed = np.zeros((2, c.WORDS), np.int64)  # views of one array, which `table` keeps
        self.address = self.table.ctypes.data
        self.table[list(words)] = list(words.values())
        self.table[c.NEEDED_BLOCK] = needed.ctypes.data
        needed[:] = self.table
        needed[c.PLAN] = words[c.NEEDED_PLAN]

    @staticmethod
    def _steps_words(s: Steps, g: StepsGeometry) -> dict[int, int]:
        def at(array: np.ndarray) -> int:
            return array.ctypes.data

        return {
            c.SLOT_HEAD: at(s.slot_head),
            c.ENTRIES: at(s.entries),
            c.ENTRIES_STRIDE: s.entries.strides[0],
            c.OUT_TOKEN: at(s.out_token),
            c.OUT_LOGPROB: at(s.out_logprob),
            c.OUT_TOP_ID: at(s.out_top_id),
            c.OUT_TOP_LP: at(s.out_top_lp),
            c.OUT_STRIDE: s.out_token.strides[0],
            c.ROW_INTS_AT: at(s.row_ints),
            c.ROW_FLOATS_AT: at(s.row_floats),
            c.MASK_IDS: at(s.mask_ids),
            c.BIAS_IDS: at(s.bias_ids),
            c.BIAS: at(s.bias),
            c.TABLES: at(s.tables),
            c.TABLES_STRIDE: s.tables.strides[0],
            c.TOKENS: at(s.tokens),
            c.TOKENS_STRIDE: s.tokens.strides[0],
            c.MASK_READY: at(s.mask_ready),
            c.MASKS: at(s.masks),
            c.MASK_STRIDE: 4 * g.mask_words,
            c.POOL_STATES: at(s.pool_states),
            c.POOLED: at(s.pooled),
            c.POOLED_WIDTH: g.pooled_width,
            c.BREAKERS: at(s.breakers),
            c.PROGRESS_AT: at(s.control) + 8 * PROGRESS,
            c.MAX_ROWS: g.max_rows,
            c.MAX_ENTRIES: g.max_entries,
            c.MAX_SAMPLES: g.max_samples,
            c.MAX_TOKENS: g.max_tokens,
            c.MAX_PAGES: g.max_pages,
        }

    def _scratch(self, h: Hyper, g: act.ActivationsGeometry) -> dict[int, int]:
        """Addresses of this rank's private buffers, by word of the parameter block."""
        sizes = {
            c.OWN_NORM: 4 * c.FEW * h.width,
            c.OWN_NORM_Q: c.FEW * act.strides(h)[c.NORM_Q_STRIDE],
            c.ATTENTION: 4 * bs.attention_words(h.head_dim),
            c.GATED: bs.gated_bytes(g.step_tokens),
            c.SAMPLER: bs.sampler_bytes(h.vocab_size, g.max_positions),
            c.MULTIPLY: bs.MATMUL_BYTES,
        }
        if h.n_experts:
            rows, pairs = bs.GATHERED_ROWS, g.step_tokens * h.n_experts_used
            sizes |= {
                c.OWN_ROUTES: c.FEW * bs.route_bytes(h.n_experts_used),
                c.ROUTER_LOGITS: bs.ROUTED_AT_ONCE * bs.router_logits_bytes(h.n_experts),
                c.PAIR_ENDS: 8 * (h.n_experts + 1),
                c.PAIRS: bs.PAIR_BYTES * pairs,
                c.GATHERED: 4 * rows * h.width,
                c.GATHERED_Q: rows * act.strides(h)[c.NORM_Q_STRIDE],
            }
            if cpu.may_use_tiles():
                sizes[c.GATHERED_P] = bs.packed_bytes(rows, h.width)
        if g.adapter_rank:
            widest = max(h.width, h.ffn_width, h.n_heads * h.head_dim)
            sizes |= {
                c.OWN_ADAPTER_SUMS: c.FEW * bs.ADAPTER_PLACES * bs.adapter_sums_stride(g.adapter_rank),
                c.ADAPTER_GATHERED: 4 * bs.ADAPTED_ROWS * widest,
                c.ADAPTER_DELTA: bs.DELTA_BYTES,
            }
        addresses = {}
        for name, size in sizes.items():
            buffer = np.zeros(size + 128, np.uint8)
            self._keep.append(buffer)
            addresses[name] = -(-buffer.ctypes.data // 64) * 64
        return addresses
