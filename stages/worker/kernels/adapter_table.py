"""The table of the LoRA adapters that a worker group has in memory: i64 words at ADAPTERS of the parameter block.

    0    the tag of the adapter in each of MAX_ADAPTERS slots (shm/step_ring.py, `adapter_tag`); 0: the slot is empty
    64   for each slot, layer and target: PAIR_WORDS words, all 0 where the adapter does not change that matrix

stages/worker/adapters/memory.py fills it, and stores a slot's tag last.  Knows nothing of numba.
"""

from __future__ import annotations

MAX_ADAPTERS = 64

# Targets: the matrices of a layer. Those with the same input are neighbours.
Q, K, V, OUTPUT, GATE, UP, DOWN = range(7)
TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

# Words of a pair: addresses and formats of A (rank, columns) and B (rows, rank), the rank, the scale as f32 bits
A, A_FORMAT, B, B_FORMAT, PAIR_RANK, SCALE = range(6)
PAIR_WORDS = 8


def table_words(n_layers: int) -> int:
    """Words of the whole table."""
    return MAX_ADAPTERS * (1 + n_layers * len(TARGETS) * PAIR_WORDS)
