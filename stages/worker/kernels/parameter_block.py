"""The kernel parameter block: i64 words with the model's sizes and the addresses of weights, arenas and scratch.

`stages/worker/model.py` fills it when arenas are attached; kernels only read it.  Addresses are those of one process's
maps, so each rank has a block of its own.  Jitted code reads it through parameter_access.py; this module knows nothing
of numba.
"""

from __future__ import annotations

# The model: counts, and f32 by their bits.  attention.py reads SCORE_CAP (0: none) behind SCORE_SCALE.
(
    N_LAYERS,
    WIDTH,
    N_HEADS,
    N_KV_HEADS,
    HEAD_DIM,
    FFN,
    VOCAB,
    N_ROT,
    NEOX_ROPE,
    GELU,
    EPS,
    LAYER_NORM,
    MAX_POSITIONS,
    SCORE_SCALE,
    SCORE_CAP,
) = range(15)

# Weights: addresses, and formats by GGML's number; POSITIONS (embeddings of positions) is 0 where RoPE has them
(
    EMBEDDING,
    EMBEDDING_FORMAT,
    HEAD,
    HEAD_FORMAT,
    FINAL_NORM,
    COS_LO,
    SIN_LO,
    COS_HI,
    SIN_HI,
    LAYERS,
    FINAL_NORM_BIAS,
    POSITIONS,
    POSITIONS_FORMAT,
) = range(16, 29)

# The steps arena: addresses, and bytes from one slot or row to the next
(
    SLOT_HEAD,
    ENTRIES,
    ENTRIES_STRIDE,
    OUT_TOKEN,
    OUT_LOGPROB,
    OUT_TOP_ID,
    OUT_TOP_LP,
    OUT_STRIDE,
    ROW_INTS_AT,
    ROW_FLOATS_AT,
    MASK_IDS,
    BIAS_IDS,
    BIAS,
    TABLES,
    TABLES_STRIDE,
    TOKENS,
    TOKENS_STRIDE,
    PROGRESS_AT,
    MAX_ROWS,
    MAX_ENTRIES,
    MAX_SAMPLES,
    MAX_TOKENS,
    MAX_PAGES,
) = range(32, 55)

# Token masks, sums of hidden states and sets of tokens, also of the steps arena; MASK_STRIDE: bytes of one mask or set,
# POOLED_WIDTH: values of a sum, 0 where entries cannot be pooled
MASK_READY, MASKS, MASK_STRIDE, POOL_STATES, POOLED, POOLED_WIDTH, BREAKERS = range(56, 63)

# The KV arena; KV_WIDTH is the bytes of a stored value: 1 int8, 2 f16, 4 f32
PAGES, PAGE_BYTES, N_PAGES, PAGE_TOKENS, HEAD_BYTES, KV_WIDTH = range(64, 70)

# The activations arena: addresses, and bytes from one token (or sample) to the next; at ROPE SINES is the bytes from a
# token's cosines to its sines
(
    PLAN,
    PLAN_TABLES,
    X,
    Y,
    NORM,
    NORM_Q,
    NORM_Q_STRIDE,
    QKV,
    QKV_STRIDE,
    ATTN_OUT,
    ATTN_OUT_STRIDE,
    ATTN_OUT_Q,
    ATTN_OUT_Q_STRIDE,
    HIDDEN,
    HIDDEN_Q,
    HIDDEN_Q_STRIDE,
    ROPE,
    ROPE_STRIDE,
    LOGITS,
    LOGITS_STRIDE,
    SPLIT_RESULTS,
    N_SPLIT_RESULTS,
    SPLITS_DONE,
    STEP_TOKENS,
    STEP_SAMPLES,
    SINES,
) = range(72, 98)

# The part of a step that rank 0 computes next: its first layer and the end of its layers; END_LAYER 0: of all layers
FIRST_LAYER, END_LAYER = range(98, 100)

# This rank: its number, the number of ranks, and its private scratch (addresses)
(
    RANK,
    RANKS,
    BARRIER,
    LINES,
    OWN_NORM,
    OWN_NORM_Q,
    ATTENTION,
    GATED,
    SAMPLER,
    MULTIPLY,
    PHASES,
) = range(100, 111)

# Entries (entries.py): addresses; EXPERTS is below
MATMUL, EMBED_ROW, ATTEND, DRAW = range(112, 116)

# Scales as f32 bits (1: none), a soft cap (0: none), and the tables for layers with RoPE of their own (addresses)
(
    EMBEDDING_SCALE,
    RESIDUAL_SCALE,
    LOGIT_SCALE,
    LOGIT_CAP,
    LOCAL_COS_LO,
    LOCAL_SIN_LO,
    LOCAL_COS_HI,
    LOCAL_SIN_HI,
) = range(116, 124)

# A mixture of experts (experts.py, which draws the buffers): the entry; counts, 0 in a plain graph; NORMALIZE_ROUTES:
# the weights of the chosen experts are divided by their sum; buffers of the activations arena; this rank's scratch
(
    EXPERTS,
    N_EXPERTS,
    EXPERTS_USED,
    NORMALIZE_ROUTES,
    SHARED_FFN,
    ROUTES,
    SHARED_HIDDEN,
    SHARED_HIDDEN_Q,
    SHARED_HIDDEN_Q_STRIDE,
    OWN_ROUTES,
    ROUTER_LOGITS,
    PAIR_ENDS,
    PAIRS,
    GATHERED,
    GATHERED_Q,
) = range(124, 139)

# The norm of the embedding, and what is added to it before (addresses, 0: none); whether positions attend to those
# behind them
EMBEDDING_NORM, EMBEDDING_NORM_BIAS, TOKEN_TYPE, ATTENDS_ALL = range(139, 143)

# LoRA adapters (adapters.py, adapter_table.py): the entries; the table of loaded adapters, 0: the group has none; a
# buffer of the activations arena, and bytes of a place in it; this rank's scratch
(
    SHRINK,
    EXPAND,
    ADAPTERS,
    ADAPTER_SUMS,
    ADAPTER_SUMS_STRIDE,
    OWN_ADAPTER_SUMS,
    ADAPTER_GATHERED,
    ADAPTER_DELTA,
    FIND_ADAPTER,
    LIST_ADAPTED,
) = range(143, 153)

# The head that scores pairs (score_head.py): the entry; weights of its dense layer and of the score, 0: none
(
    SCORE_HEAD,
    DENSE,
    DENSE_FORMAT,
    DENSE_BIAS,
    SCORE,
    SCORE_FORMAT,
    SCORE_BIAS,
) = range(153, 160)

# The plan of the last layer (needed_plan.py), and this rank's other parameter block, in which it is the plan
NEEDED_PLAN, NEEDED_BLOCK = range(160, 162)

# Address of the clusters of the ranks' barrier; 0: it has none
CLUSTERS = 162

PAGE_GROUPS = 163  # pages of a place (shm/layer_groups.py)

# The ranks of this rank's memory node, all ranks where the machine has one: its number among them, and their number;
# addresses of the node's barrier (0: its ranks wait for all ranks) and in it of the line of its first rank; and of the
# node's copies of ATTN_OUT_Q and HIDDEN_Q (0: there is one node)
NODE_RANK, NODE_RANKS, NODE_BARRIER, NODE_LINES, ATTN_OUT_COPY, HIDDEN_COPY = range(164, 170)

# The records at NORM_Q, ... packed for AMX tiles (packed_activations.py): addresses; 0: the CPU has none
NORM_P, ATTN_OUT_P, HIDDEN_P, SHARED_HIDDEN_P, GATHERED_P = range(170, 175)

# How ranks divide products (row_claims.py): the address of the claims line of rank 0; bytes of weights that a rank
# claims at once, and the most tokens of a step in which it does
CLAIMS, CLAIM_BYTES, CLAIM_TOKENS = range(175, 178)

# Address of the group's table of what uses AMX tiles (activations_arena.py): at the GGML number of a format the tokens
# of a product from which on it does, at ANY_FORMAT the fewest of these; 0: never
TILES_FROM = 178
ANY_FORMAT = 63  # above all numbers of formats

WORDS = 179

# Words of a layer's row at LAYERS: addresses and formats; 0: the layer has no such tensor.  NORM_ALL_HEADS: q and k
# have one norm for all heads.  WINDOW: positions that a query sees, 0 for all.  ANGLES: bytes from a token's place at
# ROPE to the angles of this layer.  KV_AT: bytes from a page's begin to the layer's K and V.  TABLE_AT: bytes from an
# entry's page tables at PLAN_TABLES to the one of the layer's group.
(
    ATTN_NORM,
    Q,
    Q_FORMAT,
    Q_BIAS,
    K,
    K_FORMAT,
    K_BIAS,
    V,
    V_FORMAT,
    V_BIAS,
    O,
    O_FORMAT,
    FFN_NORM,
    GATE,
    GATE_FORMAT,
    UP,
    UP_FORMAT,
    DOWN,
    DOWN_FORMAT,
    ATTN_NORM_BIAS,
    Q_NORM,
    K_NORM,
    NORM_ALL_HEADS,
    O_BIAS,
    POST_ATTENTION_NORM,
    FFN_NORM_BIAS,
    GATE_BIAS,
    UP_BIAS,
    DOWN_BIAS,
    POST_FFN_NORM,
    WINDOW,
    ANGLES,
    ROUTER,
    ROUTER_FORMAT,
    GATE_EXPERTS,
    GATE_EXPERTS_FORMAT,
    UP_EXPERTS,
    UP_EXPERTS_FORMAT,
    DOWN_EXPERTS,
    DOWN_EXPERTS_FORMAT,
    SHARED_ROUTER,
    SHARED_ROUTER_FORMAT,
    SHARED_GATE,
    SHARED_GATE_FORMAT,
    SHARED_UP,
    SHARED_UP_FORMAT,
    SHARED_DOWN,
    SHARED_DOWN_FORMAT,
    ATTN_OUTPUT_NORM,
    ATTN_OUTPUT_NORM_BIAS,
    LAYER_OUTPUT_NORM,
    LAYER_OUTPUT_NORM_BIAS,
    KV_AT,
    TABLE_AT,
) = range(54)
LAYER_WORDS = 56

FEW = 4  # up to so many tokens every rank norms and quantizes all of them itself, which saves a barrier
