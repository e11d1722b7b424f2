"""Sizes of the buffers that kernels work in, and the numbers that they follow from.

The kernels' modules import these numbers and draw the layouts; `stages/worker/model.py` and `activations_arena.py`
allocate the buffers.  Knows nothing of numba: a process that only runs compiled kernels need not import it.
"""

from __future__ import annotations

from shm.pages import KV_SPLIT
from stages.worker.kernels.formats import BLOCK, GROUP, QUANTIZED, QuantizedFormat
from stages.worker.kernels.formats.description import LINE, RUNS

# ------------------------------------------------------------------ plan.py

PLAN_HEAD = 12  # i64 words
ENTRY_PLAN = 21  # i64 words of an entry
TOKEN_PLAN = 3  # of a token
SAMPLE_PLAN = 3  # of a sample
ADAPTED_PLAN = 2  # of the tokens of one adapter, besides one for each token
SPLIT_UNITS = 16  # with fewer (entry, kv head) units than this, KV splits are units of their own


def plan_words(max_entries: int, max_tokens: int, max_samples: int) -> int:
    """i64 words of a plan."""
    entries = (ENTRY_PLAN + ADAPTED_PLAN) * max_entries
    return PLAN_HEAD + entries + (TOKEN_PLAN + 1) * max_tokens + SAMPLE_PLAN * max_samples


# ------------------------------------------------------------------ quantize_activations.py

RECORD = 64  # bytes of an activation record


def row_bytes(columns: int) -> int:
    """Bytes between rows of records; never a multiple of 4096, so that rows do not share cache sets."""
    n = -(-columns // BLOCK) * RECORD
    return n + 64 if n % 1024 == 0 else n


# ------------------------------------------------------------------ packed_activations.py

PACKED = 960  # bytes of 16 tokens' records of a block: all but their last field


def packed_bytes(tokens: int, columns: int) -> int:
    """Bytes of the packed records of some tokens."""
    return -(-tokens // 16) * -(-columns // BLOCK) * PACKED


# ------------------------------------------------------------------ gemm.py, amx.py, amx_gemm.py, amx_tiles.py

CHUNK = 18  # bound of the blocks of a row group that are unpacked at a time: 11 KB of scratch
DENSE_CHUNK = 160  # K values of a dense row group unpacked at a time
CODE_BYTES = RUNS * LINE  # of an unpacked block
PRODUCT = 1024  # bytes of the stored sums of a tile product, and of an emulated tile
TOTALS = 2 * PRODUCT + 64  # behind two stored products and the tile configuration: two vectors of 16 tokens' half sums
SPILL_BYTES = TOTALS + 128 + 6 * PRODUCT  # and six emulated tiles


def unpacked_bytes(parts: int, minimum: bool) -> int:
    """Of an unpacked block of `parts` scales, with minimums or without."""
    return CODE_BYTES + LINE * max(2, parts * (1 + minimum))


def unpacked_bytes_of(fmt: QuantizedFormat) -> int:
    """Of an unpacked block of a format."""
    return unpacked_bytes(fmt.scales.parts, fmt.scales.minimum)


def _chunk_bytes() -> int:
    """Scratch of one row group's chunk in any format."""
    quantized = max(CHUNK // f.blocks * f.blocks * unpacked_bytes_of(f) for f in QUANTIZED)
    return max(quantized, 64 * DENSE_CHUNK)


CHUNK_BYTES = _chunk_bytes()
CHUNKS_BYTES = 2 * CHUNK_BYTES
# Scratch of `matmul`, 64-byte aligned: chunks, SPILL_BYTES, and sums of two row groups in a tile with lanes of no token
MATMUL_BYTES = CHUNKS_BYTES + SPILL_BYTES + 2 * PRODUCT

# ------------------------------------------------------------------ attention.py

BLOCK_ROWS = 192  # bound of the rows of a block of queries; for many rows K and V are converted to f32 once
MAX_GROUP_ROWS = 24  # bound of the query heads of a KV head; two KV heads' rows are computed together (MANY_ROWS)
TILE_ROWS = 6  # of a tile of a block
BUFFER_ROWS = BLOCK_ROWS + 16  # vectors of the state of rows, and tiles, reach past the last row
KEY_DIMS = 64  # dims of K that are converted at once, of 64 positions
V_DIMS = 64  # V that is converted takes up whole runs of so many dims


def attention_words(head_dim: int) -> int:
    """f32 words of one rank's scratch."""
    converted = KV_SPLIT * (-(-head_dim // V_DIMS) * V_DIMS + -(-head_dim // BLOCK))  # with the scales of V
    return BUFFER_ROWS * (3 * head_dim + KV_SPLIT + 8) + 2 * (4 * 16 + 2 * 12) + converted


# ------------------------------------------------------------------ projections.py, rank_sync.py

MIN_CHUNK = 2  # row groups: 32 rows make an activation record
GATED_BYTES = 64 * 1024  # of gate, and of up: what is computed at once before the two are multiplied
# Bytes of records from which on ranks copy them to their memory node.  By the figures that tools/bench/cores assumes,
# and with ten lines on their way at a time, a rank reads half of so many from another node in about the time of a
# barrier of 32 ranks.  No such machine has been timed.
COPIED_BYTES = 16 << 10
PHASES = ("embed", "norm", "qkv", "keys", "attention", "output", "gate_up", "down", "head", "sample", "wait")


def gated_bytes(max_tokens: int) -> int:
    """Scratch for gate and up of one chunk of rows."""
    return 2 * max(GATED_BYTES, max_tokens * MIN_CHUNK * GROUP * 4)


# ------------------------------------------------------------------ experts.py

ROUTED_AT_ONCE = 32  # tokens whose router logits are computed at once
GATHERED_ROWS = 128  # rows of activations that are copied together for an expert: about what the L2 cache holds
PAIR_BYTES = 8  # a token and an expert's weight for it


def route_bytes(used: int) -> int:
    """Of a token: the numbers of its experts, then their weights and that of the shared one."""
    return 4 * (2 * used + 1)


def router_logits_bytes(n_experts: int) -> int:
    """Of a token: whole row groups of the router, and one of the shared expert's gate."""
    return 4 * GROUP * (-(-n_experts // GROUP) + 1)


# ------------------------------------------------------------------ adapters.py

ADAPTED_ROWS = 32  # rows of one adapter that are multiplied at once
ADAPTER_PLACES = 3  # matrices with the same input: q, k and v
DELTA_BYTES = 64 * 1024  # of the products of one adapter's rows that are added at once


def adapter_sums_stride(max_rank: int) -> int:
    """Bytes of A x of one token and one matrix, for adapters of at most that rank."""
    return 64 * -(-max_rank // GROUP)


# ------------------------------------------------------------------ sampler_vocabulary.py

SUM_BLOCK = 1024  # ids of which the weights are summed apart
MAX_BLOCK = 64  # ids of which the maximum is taken apart
DIGIT = 11  # bits of one pass of the radix sort
SAMPLES = 128  # values from which it is guessed how all are distributed
PIVOTS = 15  # values between which candidates are divided
PIVOT_BYTES = 4 * (PIVOTS + 1) + 8 * (PIVOTS + 1)  # f32, and sums of weights above them, f64
BINS = 2048  # of values, whose weights are summed apart
BINS_AT = 2 * (PIVOT_BYTES + 4 * SAMPLES)  # of the sums of bins, f64, behind two sets of pivots and samples
NUMBERS_AT = BINS_AT + 8 * (BINS + 16)  # of 16 numbers of bins, the last of which is one for each lane
CUT_AT = NUMBERS_AT + 64 + 16  # of what describes a list that is not made, behind what defines a bin
PARTS_BYTES = CUT_AT + 3 * 8


def sampler_bytes(vocab_size: int, max_tokens: int) -> int:
    """Scratch of one rank's sampler; zeroed when it is made. `max_tokens`: of a sequence."""
    n = -(-vocab_size // SUM_BLOCK) * SUM_BLOCK
    arrays = 8 * 4 * n + 4 * (1 << DIGIT) + 8 * (n // SUM_BLOCK) + 4 * (n // MAX_BLOCK)
    return arrays + PARTS_BYTES + 4 * (max_tokens + 1)
