"""Hyper-parameters of a model, in the index of its checkpoint (shm/checkpoint.py). Independent of GGUF and kernels."""

from __future__ import annotations

import msgspec

from shm.layer_groups import LayerGroups, divide_layers


class Hyper(msgspec.Struct, array_like=True, frozen=True):
    """Hyper-parameters of the graph; integers are counts."""

    n_layers: int
    width: int  # of the residual stream
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    context_length: int
    norm_eps: float  # f32 value
    n_rot: int  # leading values of a head that RoPE rotates
    rope_pairing: str  # "neighbours" (2i, 2i+1), "halves" (i, i + n_rot/2), or "": positions are embedded
    activation: str  # "silu" or "gelu"
    rope_base: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by it
    attention_bias: bool = False  # q, k and v have biases
    norm: str = "rms"  # or "layer": of the residual stream. An index of a llama or qwen2 graph may end before it
    attention_scale: float = 0.0  # of scores; 0: 1 / sqrt(head_dim)
    attention_cap: float = 0.0  # soft cap of scores; 0: none
    logit_cap: float = 0.0  # soft cap of logits; 0: none
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what a layer adds to the residual stream
    # Positions that each layer attends to, 0: all; empty: all layers to all.  A window of at least the context masks
    # nothing, but the layer has the RoPE of layers with a window.
    windows: tuple[int, ...] = ()
    has_local_rope: bool = False  # layers with a window have RoPE tables of their own
    # A mixture of experts; `ffn_width` is that of one expert.
    n_experts: int = 0  # of each layer; 0: the FFN is plain
    n_experts_used: int = 0  # that a token is given to
    normalizes_experts: bool = False  # their weights are divided by their sum
    shared_ffn_width: int = 0  # of the expert for all tokens; 0: there is none
    is_causal: bool = True  # a position attends to none behind it; else a model has embeddings alone
    scores_pairs: bool = False  # pooled, it gives the score of a query and a document in place of a hidden state
    kv_revision: int = 0  # of K and V; other than 0 where older releases computed others from the same file
    # Whether the attention factor of RoPE was read with every type of scaling; older releases did not.
    is_factor_read: bool = False

    @property
    def kv_window(self) -> int:
        """Positions, the query's included, behind which KV pages of layers with a window are not read; 0: all are."""
        windows = self.masking_windows
        return 0 if 0 in windows and not self.n_windowed else max(windows, default=0)

    @property
    def masking_windows(self) -> tuple[int, ...]:
        """As `windows`, with 0 in place of a window that is not smaller than the context, which masks nothing."""
        return tuple(window if window < self.context_length else 0 for window in self.windows)

    @property
    def n_windowed(self) -> int:
        """Layers with a window whose KV pages are apart from those of the others (shm/layer_groups.py); 0: none."""
        n_windowed = sum(1 for window in self.masking_windows if window)
        return n_windowed if divide_layers(self.n_layers, n_windowed)[1].full else 0

    @property
    def page_groups(self) -> LayerGroups:
        """The layer groups, each of which has KV pages of its own."""
        return divide_layers(self.n_layers, self.n_windowed)[1]
