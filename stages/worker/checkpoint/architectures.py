"""The architectures that can be served: one row each, with the tensors of its files and the switches of its graph.

All share one forward pass (kernels/forward.py), which is a llama graph with switches.  A row says what differs:

    x = embedding * embedding_scale (+ a learned position)
    per layer:  x += residual_scale * after(W_o attention(qk_norm(rope(W_q before(x))), ...))
                x += residual_scale * after(W_down (act(W_gate before(x)) * (W_up before(x))))
    logits = cap(logit_scale * (W_head norm(x)))

    with `norms_residual`: x = norm(embedding + token type 0 + position), then x = norm(x + ...) twice a layer;
    such a model may have a head that scores pairs: kernels/score_head.py

In a mixture of experts the FFN is a sum over experts that a token is given to and a shared one: kernels/experts.py.

`tensors` lists what a file must have; ingest compares names and shapes before anything is written, and the worker maps
what it finds in the checkpoint's index (stages/worker/model.py).  Names are those of the GGUF files of llama.cpp:
https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

NEIGHBOURS, HALVES, LEARNED = "neighbours", "halves", "learned"
RMS, LAYER = "rms", "layer"
EACH_HEAD, ALL_HEADS = "each head", "all heads"
EVERY_LAYER = 0  # a `window_period`
GATED, PLAIN = "gated", "plain"


class Experts(NamedTuple):
    """How an architecture mixes experts."""

    is_optional: bool = False  # a file without `expert_count` is of the plain graph
    normalized: bool = True  # the weights of the chosen experts are divided by their sum
    has_own_width: bool = False  # the key expert_feed_forward_length; else feed_forward_length is that of an expert
    shared: str = ""  # an expert for all tokens: GATED by a weight from 0 to 1, PLAIN where the file has one, "": none


class Architecture(NamedTuple):
    """One row: switches, and defaults of metadata keys. A key that the file has replaces the default."""

    positions: str = HALVES  # RoPE pairs: NEIGHBOURS (2i, 2i+1), HALVES (i, i + n_rot / 2); LEARNED: an embedding
    norm: str = RMS
    activation: str = "silu"
    gated: bool = True  # FFN: act(gate) * up; else act(up)
    norms_before: bool = True  # of the inputs of attention and FFN
    norms_after: bool = False  # of their outputs: post_attention_norm, post_ffw_norm
    norms_residual: bool = False  # of the residual stream behind both, and of the embedding: no norm at the end
    qk_norm: str = ""  # RMS norm of q and k before RoPE: over EACH_HEAD or ALL_HEADS
    fused: tuple[str, ...] = ()  # of "attn_qkv" (rows of q, then k, then v) and "ffn_up" (gate, then up)
    biases: tuple[str, ...] = ()  # matrices and norms that must have one; others may
    scales: bool = False  # the keys embedding_scale, residual_scale, logit_scale and attention.scale count
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(width)
    wide_scale_layers: int = 0  # a model of so many layers scales scores by sqrt(n_heads / width)
    attention_cap: float = 0.0  # default of attn_logit_softcapping; 0: the key does not count
    logit_cap: float = 0.0  # default of final_logit_softcapping
    has_logit_cap: bool = False  # the key counts
    window: int = 0  # default of attention.sliding_window; 0: none
    window_period: int | None = None  # every so many-th layer sees all positions; None: a window is refused
    local_rope_base: float = 0.0  # default of rope.freq_base_swa, for layers with a window; 0: as the others
    experts: Experts | None = None  # None: a mixture of experts is refused
    is_causal: bool = True  # default of attention.causal: a position attends to none behind it


_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
_BERT = Architecture(
    norm=LAYER,
    norms_before=False,
    norms_residual=True,
    biases=("token_embd_norm", "attn_output_norm", "layer_output_norm"),
    is_causal=False,
)
_GEMMA = Architecture(activation="gelu", scaled_embedding=True)
_GRANITE = Architecture(NEIGHBOURS, scales=True)

ARCHITECTURES = {
    # Mistral, Mixtral, SmolLM, TinyLlama and Yi, too
    "llama": Architecture(NEIGHBOURS, window_period=EVERY_LAYER, experts=Experts(is_optional=True)),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(experts=Experts(normalized=False, has_own_width=True, shared=GATED)),
    "qwen3": Architecture(qk_norm=EACH_HEAD),
    "qwen3moe": Architecture(qk_norm=EACH_HEAD, experts=Experts(has_own_width=True)),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(
        norms_after=True,
        wide_scale_layers=46,
        attention_cap=50.0,
        logit_cap=30.0,
        has_logit_cap=True,
        window=4096,
        window_period=2,
    ),
    "gemma3": _GEMMA._replace(
        norms_after=True,
        qk_norm=EACH_HEAD,
        wide_scale_layers=62,
        has_logit_cap=True,
        window_period=6,
        local_rope_base=10000.0,
    ),
    "phi3": Architecture(fused=("attn_qkv", "ffn_up"), window_period=EVERY_LAYER),
    "granite": _GRANITE,
    "granitemoe": _GRANITE._replace(experts=Experts(shared=PLAIN)),
    "olmo2": Architecture(norms_before=False, norms_after=True, qk_norm=ALL_HEADS),
    "olmoe": Architecture(qk_norm=ALL_HEADS, experts=Experts(normalized=False)),
    "stablelm": Architecture(norm=LAYER, biases=("attn_norm", "ffn_norm", "output_norm")),
    "starcoder2": Architecture(
        norm=LAYER,
        activation="gelu",
        gated=False,
        biases=("attn_norm", *_MATRICES[:4], "ffn_norm", *_MATRICES[4:], "output_norm"),
        window_period=EVERY_LAYER,
    ),
    "gpt2": Architecture(
        LEARNED,
        norm=LAYER,
        activation="gelu",
        gated=False,
        fused=("attn_qkv",),
        biases=("attn_norm", *_MATRICES[:4], "ffn_norm", *_MATRICES[4:], "output_norm"),
    ),
    "bert": _BERT._replace(
        positions=LEARNED, activation="gelu", gated=False, fused=("attn_qkv",), biases=(*_BERT.biases, *_MATRICES)
    ),
    "nomic-bert": _BERT._replace(fused=("attn_qkv",)),
}


class Sizes(NamedTuple):
    """Numbers of rows and columns that shapes are made of."""

    n_layers: int
    width: int
    q: int  # values of all query heads
    kv: int  # of all kv heads
    head_dim: int
    ffn: int  # of one expert, in a mixture of experts
    vocab: int
    context: int
    experts: int = 0
    shared: int = 0  # values of the shared expert's FFN; 0: there is none
    token_types: int = 0  # kinds of texts that the embedding tells apart; 0: none
    scores_pairs: bool = False


class Needed(NamedTuple):
    """A tensor of the checkpoint, and where its values are in the file.

    name      in the checkpoint
    shape     rows first; a vector has one number
    source    the file's tensor
    first     its row (a vector: value) at which they begin
    of        rows (values) of the file's tensor
    optional  the file may lack it
    in_file   the shape of the file's tensor, where it is not (`of`, columns)
    """

    name: str
    shape: tuple[int, ...]
    source: str
    first: int
    of: int
    optional: bool = False
    in_file: tuple[int, ...] = ()

    @property
    def source_shape(self) -> tuple[int, ...]:
        """The shape that the file's tensor must have."""
        return self.in_file or (self.of, *self.shape[1:])


def window_of(layer: int, window: int, period: int | None) -> int:
    """The positions that a layer attends to; 0: all."""
    if period is None or (period != EVERY_LAYER and layer % period == period - 1):
        return 0
    return window


def tensors(arch: Architecture, s: Sizes, in_file: frozenset[str]) -> Iterator[Needed]:
    """Every tensor of the graph, in the order of use. `in_file`: names of the file's tensors."""
    yield _whole("token_embd.weight", (s.vocab, s.width))
    if s.token_types:
        # The first row: of texts that stand alone.
        yield _whole("token_types.weight", (s.width,))._replace(in_file=(s.token_types, s.width))
    if arch.positions == LEARNED:
        yield _whole("position_embd.weight", (s.context, s.width))
    if arch.norms_residual:
        yield from _norm(arch, "token_embd_norm", s.width)
    for layer in range(s.n_layers):
        for part in _layer(arch, s, in_file, f"blk.{layer}."):
            # Tensors that the first layer has or lacks, all layers have or lack.
            first = part.source.replace(f"blk.{layer}.", "blk.0.", 1)
            if not part.optional or first in in_file:
                yield part._replace(optional=False)
    if s.scores_pairs:
        yield from _score_head(s, in_file)
    if arch.norms_residual:
        return
    yield from _norm(arch, "output_norm", s.width)
    yield _whole("output.weight", (s.vocab, s.width))._replace(optional=True)


def _score_head(s: Sizes, in_file: frozenset[str]) -> Iterator[Needed]:
    """The weights that make a score of the first position: a dense layer, which may be missing, and the score's."""
    if "cls.weight" in in_file:
        yield _whole("cls.weight", (s.width, s.width))
        yield _whole("cls.bias", (s.width,), optional=True)
    yield _whole("cls.output.weight", (1, s.width))._replace(in_file=(s.width,))
    yield _whole("cls.output.bias", (1,), optional=True)


def _whole(name: str, shape: tuple[int, ...], optional: bool = False) -> Needed:
    return Needed(name, shape, name, 0, shape[0], optional)


def _norm(arch: Architecture, name: str, n: int, prefix: str = "") -> Iterator[Needed]:
    """The weights of a norm of n values and, of a layer norm, its bias."""
    yield _whole(f"{prefix}{name}.weight", (n,))
    if arch.norm == LAYER and name in arch.biases:
        yield _whole(f"{prefix}{name}.bias", (n,))


def _layer(arch: Architecture, s: Sizes, in_file: frozenset[str], prefix: str) -> Iterator[Needed]:
    qkv = {"attn_q": s.q, "attn_k": s.kv, "attn_v": s.kv}
    is_fused = "attn_qkv" in arch.fused and f"{prefix}attn_qkv.weight" in in_file
    if arch.norms_before:
        yield from _norm(arch, "attn_norm", s.width, prefix)
    yield from _matrices(arch, prefix, qkv, s.width, "attn_qkv" if is_fused else "")
    if arch.qk_norm:
        each = arch.qk_norm == EACH_HEAD
        yield _whole(f"{prefix}attn_q_norm.weight", (s.head_dim if each else s.q,))
        yield _whole(f"{prefix}attn_k_norm.weight", (s.head_dim if each else s.kv,))
    yield from _matrices(arch, prefix, {"attn_output": s.width}, s.q)
    if arch.norms_after:
        yield _whole(f"{prefix}post_attention_norm.weight", (s.width,))
    if arch.norms_residual:
        yield from _norm(arch, "attn_output_norm", s.width, prefix)
    if arch.norms_before:
        yield from _norm(arch, "ffn_norm", s.width, prefix)
    if s.experts:
        yield from _experts(arch, s, prefix)
    else:
        up = {"ffn_gate": s.ffn, "ffn_up": s.ffn} if arch.gated else {"ffn_up": s.ffn}
        yield from _matrices(arch, prefix, up, s.width, "ffn_up" if "ffn_up" in arch.fused else "")
        yield from _matrices(arch, prefix, {"ffn_down": s.width}, s.ffn)
    if arch.norms_after:
        yield _whole(f"{prefix}post_ffw_norm.weight", (s.width,))
    if arch.norms_residual:
        yield from _norm(arch, "layer_output_norm", s.width, prefix)


def _experts(arch: Architecture, s: Sizes, prefix: str) -> Iterator[Needed]:
    """The router; the matrices of all experts, one below the other; the shared expert and its gate."""
    assert arch.experts is not None
    yield _whole(f"{prefix}ffn_gate_inp.weight", (s.experts, s.width))
    for name, rows, columns in (("gate", s.ffn, s.width), ("up", s.ffn, s.width), ("down", s.width, s.ffn)):
        all_rows = _whole(f"{prefix}ffn_{name}_exps.weight", (s.experts * rows, columns))
        yield all_rows._replace(in_file=(s.experts, rows, columns))
    if s.shared:
        if arch.experts.shared == GATED:
            yield _whole(f"{prefix}ffn_gate_inp_shexp.weight", (1, s.width))._replace(in_file=(s.width,))
        yield _whole(f"{prefix}ffn_gate_shexp.weight", (s.shared, s.width))
        yield _whole(f"{prefix}ffn_up_shexp.weight", (s.shared, s.width))
        yield _whole(f"{prefix}ffn_down_shexp.weight", (s.width, s.shared))


def _matrices(arch: Architecture, prefix: str, rows: dict[str, int], columns: int, fused: str = "") -> Iterator[Needed]:
    """Matrices by name and number of rows, then their biases; `fused`: they are one tensor of the file."""
    total = sum(rows.values())
    for kind in ("weight", "bias"):
        first = 0
        for name, n in rows.items():
            shape = (n, columns) if kind == "weight" else (n,)
            optional = kind == "bias" and name not in arch.biases
            if fused:
                yield Needed(f"{prefix}{name}.{kind}", shape, f"{prefix}{fused}.{kind}", first, total, optional)
            else:
                yield _whole(f"{prefix}{name}.{kind}", shape, optional)
            first += n
