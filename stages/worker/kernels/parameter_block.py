"""The offset table of a step: one row of i64 words that tells a rank where everything is.

`stages/worker/model.py` fills it when arenas are attached; kernels only read it.  Addresses are of this
process's maps, so each rank has its own table.  Knows nothing of who allocates.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# The model: counts, and two f32 by their bits
(
    N_LAYERS,
    WIDTH,
    N_HEADS,
    N_KV_HEADS,
    HEAD_DIM,
    FFN,
    VOCAB,
    N_ROT,
    HALVES,
    GELU,
    EPS,
    SCORE_SCALE,
    MAX_POSITIONS,
) = range(13)

# Weights: addresses, and formats by GGML's number
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
) = range(16, 26)

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

# The KV arena; the width of a value in bytes tells the type (int8: 1)
PAGES, PAGE_BYTES, N_PAGES, PAGE_TOKENS, HEAD_BYTES, KV_WIDTH = range(64, 70)

# The activations arena: addresses, and bytes from one token (or sample) to the next
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
    MIXED,
    MIXED_STRIDE,
    MIXED_Q,
    MIXED_Q_STRIDE,
    HIDDEN,
    HIDDEN_Q,
    HIDDEN_Q_STRIDE,
    TURNS,
    TURNS_STRIDE,
    LOGITS,
    LOGITS_STRIDE,
    PARTIALS,
    N_PARTIALS,
    ARRIVALS,
    STEP_TOKENS,
    STEP_SAMPLES,
) = range(72, 97)

# This rank: its number, how many there are, and its private scratch (addresses)
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

# Entries (linkage.py): addresses
MATMUL, EMBED_ROW, ATTEND, DRAW = range(112, 116)

WORDS = 128

# Words of a layer's row at LAYERS; a bias of 0 is none
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
) = range(19)
LAYER_WORDS = 24

FEW = 4  # tokens up to which every rank norms and quantizes all of them itself, and spares a barrier


@intrinsic
def word(typingctx: Any, table: Any, i: Any) -> Any:
    """Word i of a table at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        at = builder.add(args[0], builder.mul(args[1], ir.Constant(args[1].type, 8)))
        return builder.load(builder.inttoptr(at, args[1].type.as_pointer()))

    return types.int64(types.int64, types.int64), codegen
