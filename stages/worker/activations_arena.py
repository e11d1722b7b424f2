"""The activations arena: the buffers that the ranks of one group share while they compute a step.

Rank 0 creates it when it attaches to the other arenas, the other ranks map it, and it has no use after the group's
end.  It begins with `CONTROL_WORDS` control words; but for claims, each cache line has one writer:

    word 0           rank 0: barrier epoch (shm/barrier.py)
    word 16          rank 0: STEP, the number announced last: even for a step, odd to return to Python
    word 64 + 8 r    rank r: barrier line; its third word is set while the rank sleeps on STEP
    word 576 + 8 r   rank r: cluster line of the barrier
    word 1088 + 2 r  rank 0, before the others are attached: leader and end of the cluster of rank r
    word 1216 + 8 r  rank r, the first of a memory node: barrier epoch of the node's ranks
    word 1728 + 8 r  rank r: its line in the barrier of its node
    word 2240 + 2 r  rank 0, before the others are attached: first rank and end of the node of rank r; end 0: no nodes
    word 2368 + 8 r  what is unclaimed of the share of rank r: it and its neighbours (kernels/row_claims.py)
    word 2880 + f    rank 0, before the others are attached: what uses AMX tiles (`TILES_FROM` of parameter_block.py)

The buffers of kernels/parameter_block.py follow, each aligned to 64 bytes.  kernels/forward.py decides which rank
writes which rows or columns; between two barriers no value has two writers, or a writer and a reader of different
ranks.

Where ranks are on several memory nodes (rank_places.py), each node has a part of the arena to itself, at the end, with
normed rows of its own, and copies of records that ranks of all nodes write.  Its memory is reserved beside its ranks;
that of the other buffers is taken from the nodes in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import ResourceError
from pipeline.runtime import cpu
from shm import memory_nodes, words
from shm.arena import Arena, ArenaError, align
from shm.checkpoint import Hyper
from shm.pages import KV_SPLIT
from shm.step_ring import MAX_RANKS, StepsGeometry
from stages.worker.kernels import parameter_block as c
from stages.worker.kernels.amx_verdict import tile_thresholds
from stages.worker.kernels.buffer_sizes import (
    ADAPTER_PLACES,
    SPLIT_UNITS,
    adapter_sums_stride,
    packed_bytes,
    plan_words,
    route_bytes,
    row_bytes,
)
from stages.worker.kernels.features import TILE_TOKENS, Thresholds
from stages.worker.kernels.formats import QUANTIZED

KIND = "activations"
LAYOUT = 6
BARRIER, STEP, LINES = 0, 16, 64  # words
CLUSTERS = LINES + 8 * MAX_RANKS
_CLUSTER_TABLE = CLUSTERS + 8 * MAX_RANKS
SLEEPS = 2  # word of a rank's line: the rank sleeps on STEP
NODE_EPOCHS = _CLUSTER_TABLE + 2 * MAX_RANKS
NODE_LINES = NODE_EPOCHS + 8 * MAX_RANKS
_NODE_TABLE = NODE_LINES + 8 * MAX_RANKS
CLAIMS = _NODE_TABLE + 2 * MAX_RANKS
TILES_FROM = CLAIMS + 8 * MAX_RANKS
CONTROL_WORDS = TILES_FROM + c.ANY_FORMAT + 1
MIN_SPLIT_RESULTS = 2048
TURN_BYTES = 64 << 10  # of the buffers of all ranks, taken from one node: so that each buffer lies on all nodes


class ActivationsGeometry(NamedTuple):
    """The bounds that determine the buffers' sizes; stored in the arena's header."""

    step_tokens: int  # positions computed in one step
    step_samples: int  # positions sampled in one step
    max_entries: int
    max_pages: int  # of a page table
    max_positions: int  # of a sequence
    ranks: int
    adapter_rank: int = 0  # of LoRA adapters; 0: none can be loaded
    nodes: int = 1  # memory nodes that the ranks are on

    def check(self) -> None:
        """Raises `ValueError` for a bound that is impossible."""
        for name, value in self._asdict().items():
            least = 0 if name == "adapter_rank" else 1
            if value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")
        if self.ranks > MAX_RANKS:
            raise ValueError(f"ranks is {self.ranks}, at most {MAX_RANKS}")
        if self.nodes > self.ranks:
            raise ValueError(f"nodes is {self.nodes}, at most {self.ranks}, the number of ranks")


def geometry_for(
    steps: StepsGeometry, h: Hyper, max_step_tokens: int, ranks: int, adapter_rank: int = 0, nodes: int = 1
) -> ActivationsGeometry:
    """The bounds that the scheduler's steps arena and `scheduler.max_step_tokens` give a group of `ranks`.

    nodes: memory nodes that the ranks are on.
    """
    return ActivationsGeometry(
        step_tokens=max(max_step_tokens, steps.max_entries, steps.max_samples),
        step_samples=steps.max_samples,
        max_entries=steps.max_entries,
        max_pages=steps.max_pages,
        max_positions=min(steps.max_tokens, h.context_length),
        ranks=ranks,
        adapter_rank=adapter_rank,
        nodes=nodes,
    )


def check_size(g: ActivationsGeometry, h: Hyper, bound_mb: int, model: str) -> None:
    """Raises `ResourceError` when the arena would exceed `performance.memory_pool_size_mb` (0: no bound)."""
    needed, bound = activations_bytes(g, h), bound_mb << 20
    if bound and needed > bound:
        raise ResourceError(
            f"performance.memory_pool_size_mb allows {bound:,} bytes, and the activations of {model!r} need "
            f"{needed:,}; raise it, or lower scheduler.max_step_tokens or max_batch_size",
            param="performance.memory_pool_size_mb",
        )


def n_split_results(g: ActivationsGeometry, h: Hyper) -> int:
    """Places for partial results of attention.

    One sequence of any length always has room, and so have the shared prefixes of all entries.
    """
    return max(MIN_SPLIT_RESULTS, -(-g.max_positions // KV_SPLIT) * h.n_heads, g.max_entries * h.n_heads)


def strides(h: Hyper) -> dict[int, int]:
    """Bytes from one token (or sample) to the next, by word of the parameter block."""
    heads = h.n_heads * h.head_dim
    return {
        c.NORM_Q_STRIDE: row_bytes(h.width),
        c.QKV_STRIDE: align(4 * (heads + 2 * h.n_kv_heads * h.head_dim)),
        c.ATTN_OUT_STRIDE: 4 * heads,
        c.ATTN_OUT_Q_STRIDE: row_bytes(heads),
        c.HIDDEN_Q_STRIDE: row_bytes(h.ffn_width),
        c.SHARED_HIDDEN_Q_STRIDE: row_bytes(h.shared_ffn_width),
        c.ROPE_STRIDE: (2 if h.has_local_rope else 1) * 2 * align(2 * h.n_rot),
        c.SINES: align(2 * h.n_rot),
        c.LOGITS_STRIDE: 4 * align(h.vocab_size),
    }


def _sizes(g: ActivationsGeometry, h: Hyper) -> dict[int, int]:
    """Bytes of each buffer, by the word of the parameter block that holds its address; in the order of the file.

    With several memory nodes those of `_node_sizes` follow, for each node.
    """
    s = strides(h)
    pairs = g.step_tokens * max(1, h.n_experts_used)  # of a token and an expert
    sizes = {
        c.PLAN: 8 * plan_words(g.max_entries, g.step_tokens, g.step_samples),
        c.NEEDED_PLAN: 8 * plan_words(g.max_entries, g.step_tokens, g.step_samples),
        c.PLAN_TABLES: 4 * g.max_pages * g.max_entries,
        c.SPLITS_DONE: 64 * SPLIT_UNITS,
        c.X: 4 * g.step_tokens * h.width,
        c.Y: 4 * g.step_tokens * h.width,
        **(_normed_sizes(g, h) if g.nodes == 1 else {}),
        c.QKV: g.step_tokens * s[c.QKV_STRIDE],
        c.ATTN_OUT: g.step_tokens * s[c.ATTN_OUT_STRIDE],
        c.ATTN_OUT_Q: g.step_tokens * s[c.ATTN_OUT_Q_STRIDE],
        c.HIDDEN: 4 * pairs * h.ffn_width,
        c.HIDDEN_Q: pairs * s[c.HIDDEN_Q_STRIDE],
        c.ROPE: g.step_tokens * s[c.ROPE_STRIDE],
        c.LOGITS: g.step_samples * s[c.LOGITS_STRIDE],
        c.SPLIT_RESULTS: 4 * (h.head_dim + 16) * n_split_results(g, h),
    }
    if h.n_experts:
        sizes |= {
            c.ROUTES: g.step_tokens * route_bytes(h.n_experts_used),
            c.SHARED_HIDDEN: 4 * g.step_tokens * h.shared_ffn_width,
            c.SHARED_HIDDEN_Q: g.step_tokens * s[c.SHARED_HIDDEN_Q_STRIDE],
        }
    if cpu.may_use_tiles():
        sizes |= {
            c.ATTN_OUT_P: packed_bytes(g.step_tokens, h.n_heads * h.head_dim),
            # Each expert's pairs begin with a tile of their own.
            c.HIDDEN_P: packed_bytes(pairs + TILE_TOKENS * h.n_experts, h.ffn_width),
        }
        if h.n_experts:
            sizes[c.SHARED_HIDDEN_P] = packed_bytes(g.step_tokens, h.shared_ffn_width)
    if g.adapter_rank:
        sizes[c.ADAPTER_SUMS] = g.step_tokens * ADAPTER_PLACES * adapter_sums_stride(g.adapter_rank)
    return sizes


def _normed_sizes(g: ActivationsGeometry, h: Hyper) -> dict[int, int]:
    rows = max(g.step_tokens, g.step_samples)
    sizes = {c.NORM: 4 * rows * h.width, c.NORM_Q: rows * strides(h)[c.NORM_Q_STRIDE]}
    return sizes | ({c.NORM_P: packed_bytes(rows, h.width)} if cpu.may_use_tiles() else {})


def _node_sizes(g: ActivationsGeometry, h: Hyper) -> dict[int, int]:
    """As `_sizes`, of the buffers that each of several memory nodes has; {} with one node."""
    if g.nodes == 1:
        return {}
    sizes = _normed_sizes(g, h) | {c.ATTN_OUT_COPY: _copy_bytes(g.step_tokens, h.n_heads * h.head_dim)}
    if not h.n_experts:
        sizes[c.HIDDEN_COPY] = _copy_bytes(g.step_tokens, h.ffn_width)
    return sizes


def _copy_bytes(tokens: int, columns: int) -> int:
    """Of a copy of some tokens' records, or of these packed: a product reads the one or the other."""
    return max(tokens * row_bytes(columns), packed_bytes(tokens, columns) if cpu.may_use_tiles() else 0)


def _place(sizes: dict[int, int], at: int) -> tuple[dict[int, int], int]:
    """Offsets of buffers of these sizes from `at` on, and their end."""
    found = {}
    for name, size in sizes.items():
        found[name] = at
        # One cache line more than needed: whole vectors are stored, and rows do not share cache sets.
        at = align(at + size) + 64
    return found, at


def offsets(g: ActivationsGeometry, h: Hyper, node: int = 0) -> tuple[dict[int, int], int]:
    """The offset of each buffer in bytes as ranks of `node` use them, and the size of all buffers of all nodes."""
    found, end = _place(_sizes(g, h), align(8 * CONTROL_WORDS))
    sizes = _node_sizes(g, h)
    if not sizes:
        return found, end
    first = align(end, 4096)  # pages belong to one node
    each = align(_place(sizes, 0)[1], 4096)
    return found | _place(sizes, first + node * each)[0], first + g.nodes * each


def activations_bytes(g: ActivationsGeometry, h: Hyper) -> int:
    """Size of the arena's contents in bytes."""
    return offsets(g, h)[1]


def create_activations(
    path: Path, g: ActivationsGeometry, h: Hyper, digest: bytes, node_cpus: Sequence[Sequence[int]] = ()
) -> Arena:
    """Create the arena; called by rank 0. Raises `ArenaError` when it does not fit, `ValueError` for a bad geometry.

    node_cpus: the CPUs of the ranks of each memory node, beside which memory is reserved; without nodes none.
    """
    g.check()
    size = activations_bytes(g, h)
    if not node_cpus:
        return Arena.create(path, KIND, LAYOUT, size, dict(g._asdict()), digest)
    arena = Arena.create(path, KIND, LAYOUT, size, dict(g._asdict()), digest, reserved=0)
    try:
        memory_nodes.reserve(arena, _parts(g, h, size, node_cpus))
    except OSError as error:
        arena.close()
        arena.unlink()
        raise ArenaError(f"{path}: {size:,} bytes cannot be reserved: {error.strerror}") from None
    return arena


def _parts(g: ActivationsGeometry, h: Hyper, size: int, node_cpus: Sequence[Sequence[int]]) -> list[memory_nodes.Part]:
    """Which part of the arena lies on which node."""
    first = align(_place(_sizes(g, h), align(8 * CONTROL_WORDS))[1], 4096)
    each = (size - first) // len(node_cpus)
    own = [(first + (node + 1) * each, cpus) for node, cpus in enumerate(node_cpus)]
    # The arena's header lies before its contents, and a part's last page is whole.
    return memory_nodes.in_turns(0, first, node_cpus, TURN_BYTES) + own


def attach_activations(path: Path, digest: bytes) -> tuple[Arena, ActivationsGeometry]:
    """Map the arena; called by the other ranks. Raises `FileNotFoundError`, `ArenaError`."""
    arena = Arena.attach(path, KIND, LAYOUT, digest=digest)
    return arena, ActivationsGeometry(*(int(arena.meta[name]) for name in ActivationsGeometry._fields))


# ------------------------------------------------------------------ control words


def control_words(arena: Arena) -> np.ndarray:
    """The control words: i64 (CONTROL_WORDS,), a view of the arena."""
    return arena.view(0, (CONTROL_WORDS,), np.int64)


def set_up(control: np.ndarray, ranks: int, clusters: Sequence[int] = (), nodes: Sequence[int] = ()) -> None:
    """Write what all ranks read: `reset_barrier`, and what uses tiles from now on. Only for rank 0, as there."""
    reset_barrier(control, ranks, clusters, nodes)
    set_thresholds(control, tile_thresholds())


def reset_barrier(control: np.ndarray, ranks: int, clusters: Sequence[int] = (), nodes: Sequence[int] = ()) -> None:
    """Set up the words of the barriers (shm/barrier.py). Only for rank 0, before any rank is attached.

    clusters: the number of ranks of each (rank_clusters.py); without any the barrier has none.
    nodes: likewise of each memory node (rank_places.py); without any there is no barrier of a node.
    Raises `ValueError` if their sum is not `ranks`.
    """
    for name, parts in (("clusters", clusters), ("nodes", nodes)):
        if parts and (sum(parts) != ranks or min(parts) < 1):
            raise ValueError(f"{name} have {list(parts)} ranks, expected {ranks} in all and at least 1 in each")
    for rank in range(ranks):
        for at in (NODE_EPOCHS + 8 * rank, NODE_LINES + 8 * rank, NODE_LINES + 8 * rank + 1):
            words.store(control, at, 0)
        for at in (_NODE_TABLE + 2 * rank, _NODE_TABLE + 2 * rank + 1):
            words.store(control, at, 0)
        words.store(control, CLAIMS + 8 * rank, 0)
        words.store(control, LINES + 8 * rank, 0)
        words.store(control, LINES + 8 * rank + 1, 0)
        words.store(control, CLUSTERS + 8 * rank, 0)
        words.store(control, _CLUSTER_TABLE + 2 * rank, 0)
        words.store(control, _CLUSTER_TABLE + 2 * rank + 1, 0)
    leader = 0
    for size in clusters:
        for rank in range(leader, leader + size):
            words.store(control, _CLUSTER_TABLE + 2 * rank, leader)
            words.store(control, _CLUSTER_TABLE + 2 * rank + 1, leader + size)
        leader += size
    first = 0
    for size in nodes:
        for rank in range(first, first + size):
            words.store(control, _NODE_TABLE + 2 * rank, first)
            words.store(control, _NODE_TABLE + 2 * rank + 1, first + size)
        first += size
    words.store(control, BARRIER, 0)


def set_thresholds(control: np.ndarray, thresholds: Thresholds) -> None:
    """Store the formats whose products use AMX tiles, and from how many tokens on.

    All ranks of a group read them here: each packs activations that the others read.
    """
    tokens = dict(thresholds)
    words.store(control, TILES_FROM + c.ANY_FORMAT, min(tokens.values(), default=0))
    for fmt in QUANTIZED:
        words.store(control, TILES_FROM + fmt.id, tokens.get(fmt.name, 0))


def has_clusters(control: np.ndarray) -> bool:
    """Whether the barrier was set up with clusters."""
    return words.load(control, _CLUSTER_TABLE + 1) != 0


def ranks_of_node(control: np.ndarray, rank: int) -> range:
    """The ranks of the memory node of a rank; empty if the barrier was set up without nodes."""
    return range(words.load(control, _NODE_TABLE + 2 * rank), words.load(control, _NODE_TABLE + 2 * rank + 1))


def node_of(control: np.ndarray, rank: int) -> int:
    """The number of a rank's memory node; 0 without nodes."""
    first, found = ranks_of_node(control, rank).start, 0
    while first > 0:
        first, found = ranks_of_node(control, first - 1).start, found + 1
    return found


def announce(control: np.ndarray, number: int, ranks: int) -> None:
    """Rank 0: store `number` at STEP and wake the ranks, as `rank_loop.announce` does in jitted code."""
    words.store(control, STEP, number)
    words.fence()
    if any(words.load(control, LINES + 8 * rank + SLEEPS) for rank in range(1, ranks)):
        words.wake(control, STEP)
