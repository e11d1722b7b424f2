"""The offset table of a step: one row of i64 words that tells a rank where everything is.

`stages/worker/model.py` fills it when arenas are attached; kernels only read it.  Addresses are of this
process's maps, so each rank has its own table.  Knows nothing of who allocates.
"""

from __future__ import annotations

from numba import njit

from stages.worker.kernels.simd import JIT, get_i64

# The model: counts, and two f32 by their bits
(
    N_LAYERS, WIDTH, N_HEADS, N_KV_HEADS, HEAD_DIM, FFN, VOCAB, N_ROT, HALVES, GELU, EPS, SCORE_SCALE,
    MAX_POSITIONS,
) = range(13)  # fmt: skip

# Weights: addresses, and formats by GGML's number
(
    EMBEDDING, EMBEDDING_FORMAT, HEAD, HEAD_FORMAT, FINAL_NORM, COS_LO, SIN_LO, COS_HI, SIN_HI, LAYERS,
) = range(16, 26)  # fmt: skip

# The steps arena: addresses, and bytes from one slot or row to the next
(
    SLOT_HEAD, ENTRIES, ENTRIES_STRIDE, OUT_TOKEN, OUT_LOGPROB, OUT_TOP_ID, OUT_TOP_LP, OUT_STRIDE, ROW_INTS_AT,
    ROW_FLOATS_AT, MASK_IDS, BIAS_IDS, BIAS, TABLES, TABLES_STRIDE, TOKENS, TOKENS_STRIDE, PROGRESS_AT,
    MAX_ROWS, MAX_ENTRIES, MAX_SAMPLES, MAX_TOKENS, MAX_PAGES,
) = range(32, 55)  # fmt: skip

# The KV arena
PAGES, PAGE_BYTES, N_PAGES, PAGE_TOKENS, HEAD_BYTES = range(64, 69)

# The activations arena: addresses, and bytes from one token (or sample) to the next
(
    PLAN, PLAN_TABLES, X, Y, NORM, NORM_Q, NORM_Q_STRIDE, QKV, QKV_STRIDE, MIXED, MIXED_STRIDE, MIXED_Q,
    MIXED_Q_STRIDE, HIDDEN, HIDDEN_Q, HIDDEN_Q_STRIDE, TURNS, TURNS_STRIDE, LOGITS, LOGITS_STRIDE, PARTIALS,
    N_PARTIALS, ARRIVALS, STEP_TOKENS, STEP_SAMPLES,
) = range(72, 97)  # fmt: skip

# This rank: its number, how many there are, and its private scratch (addresses)
(
    RANK, RANKS, BARRIER, LINES, OWN_NORM, OWN_NORM_Q, ATTENTION, GATED, SAMPLER, MULTIPLY, PHASES,
) = range(100, 111)  # fmt: skip

WORDS = 128

# Words of a layer's row at LAYERS; a bias of 0 is none
(
    ATTN_NORM, Q, Q_FORMAT, Q_BIAS, K, K_FORMAT, K_BIAS, V, V_FORMAT, V_BIAS, O, O_FORMAT, FFN_NORM, GATE,
    GATE_FORMAT, UP, UP_FORMAT, DOWN, DOWN_FORMAT,
) = range(19)  # fmt: skip
LAYER_WORDS = 24

FEW = 4  # tokens up to which every rank norms and quantizes all of them itself, and spares a barrier


@njit(**JIT)
def word(table, i):
    """Word i of a table at an address."""
    return get_i64(table + 8 * i)
