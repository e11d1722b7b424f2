"""Sizes of the arenas of a model version, computed before any of them exists.

The scheduler creates the step arena with the geometry given here.  kv and worker lay out theirs themselves
(shm/pages.py, stages/worker/activations_arena.py); the tests compare the sizes with the files that they create.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from pipeline.config.schema import Config, ModelConfig
from pipeline.models import worker_groups
from pipeline.runtime import cpu
from shm import memory_nodes
from shm.arena import HEADER_BYTES, align
from shm.checkpoint import Hyper
from shm.layer_groups import LayerGroups
from shm.pages import KV_SPLIT, KvGeometry, kv_arena_bytes, pages_that_fit
from shm.step_ring import MAX_RANKS, StepsGeometry, mask_words, steps_bytes
from shm.step_rings import ring_bytes

SPARE_SAMPLES = 64  # samples of a step for draft tokens, in addition to one for each sequence
LEASED_AHEAD = 160  # positions beyond a step for which a sequence holds pages (stages/scheduler/core/leases.py)
LATE_TENANT_ROWS = 8  # rows beyond twice the batch, so that a small batch has some as well
MAX_DRAFT_SEQUENCES = 4  # sequences of a model that have draft sequences in another model, at most


class ArenaSizes(NamedTuple):
    """Bytes of each kind of arena: of its file, or of all worker groups' files."""

    kv: int
    steps: int
    activations: int

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.kv + self.steps + self.activations


def max_samples(max_batch_size: int) -> int:
    """Samples of one step."""
    return max_batch_size + SPARE_SAMPLES


def n_rows(max_batch_size: int, max_draft_sequences: int) -> int:
    """Rows of the step arena. Twice the batch: other tenants still get rows while one tenant's streams fill it."""
    return 2 * max_batch_size + LATE_TENANT_ROWS + max_draft_sequences


def max_draft_sequences(config: Config, name: str) -> int:
    """Draft sequences that the model computes for other models."""
    return MAX_DRAFT_SEQUENCES if any(one.draft_model == name for one in config.models) else 0


def steps_geometry(
    max_batch_size: int,
    draft_sequences: int,
    context: int,
    page_tokens: int,
    vocab_size: int,
    width: int,
    n_groups: int = 1,
) -> StepsGeometry:
    """Geometry of the step arena for sequences of up to `context` positions; a page table has one place to spare.

    `width`: values of a hidden state.  `n_groups`: pages of a place (shm/layer_groups.py).
    """
    rows, pages = n_rows(max_batch_size, draft_sequences), (-(-context // page_tokens) + 1) * n_groups
    samples, masks = max_samples(max_batch_size), mask_words(vocab_size)
    return StepsGeometry(rows, max_batch_size, samples, context, pages, masks, width)


def most_positions(end: int, window: int, step_tokens: int, page_tokens: int) -> int:
    """Positions for which a sequence of `end` positions holds KV pages of layers with a window at once, at most.

    window: positions that attention reads in these layers; 0: all.  step_tokens: of a step, at most.  With a window the
    sequence holds what its next step reads, two steps that are not acknowledged, and what is leased ahead.
    """
    if not window:
        return end
    return min(end, window + KV_SPLIT + 3 * step_tokens + LEASED_AHEAD + 3 * page_tokens)


def most_pages(end: int, window: int, step_tokens: int, page_tokens: int, groups: LayerGroups) -> int:
    """KV pages that a sequence of `end` positions holds at once, at most. As `most_positions`."""
    places = -(-most_positions(end, window, step_tokens, page_tokens) // page_tokens)
    return groups.full * -(-end // page_tokens) + groups.windowed * places


def max_positions(config: Config, model: ModelConfig, shape: tuple[int, int, int, int, int], context: int) -> int:
    """Most tokens of a prompt and its output that an empty KV arena has room for; 0: of the whole context.

    shape: layers, KV heads, head dim, the window of attention, 0 if it reads all positions, and the number of layers
    that have it, 0 if all have.
    """
    layers, heads, head_dim, window, windowed = shape
    kv = KvGeometry(layers, heads, head_dim, model.page_tokens, model.kv_type, windowed)
    step_tokens = config.scheduler.max_step_tokens

    def pages_of(end: int) -> int:
        return most_pages(end, window, step_tokens, model.page_tokens, kv.groups)

    n_pages = pages_that_fit(kv, config.kv_cache_bytes(model))
    if pages_of(context) <= n_pages:
        return 0
    return bisect_right(range(1, context), n_pages, key=pages_of) + 1  # the last token is never computed


def most_tokens(config: Config, model: ModelConfig, hyper: Hyper) -> int:
    """Most tokens of a prompt and its output: of the context, or as many as an empty KV arena has room for."""
    context = min(hyper.context_length, model.max_sequence_length or hyper.context_length)
    shape = hyper.n_layers, hyper.n_kv_heads, hyper.head_dim, hyper.kv_window, hyper.n_windowed
    return max_positions(config, model, shape, context) or context


def version_steps_geometry(config: Config, model: ModelConfig, name: str, hyper: Hyper) -> StepsGeometry:
    """Geometry of the step arena of a version with the settings `model`. `name`: of the model, without a serial."""
    context = min(hyper.context_length, model.max_sequence_length or hyper.context_length)
    groups = KvGeometry.of(hyper, model.page_tokens, model.kv_type).groups
    batch, drafts = config.max_batch_size(model), max_draft_sequences(config, name)
    vocab, width = hyper.vocab_size, hyper.width
    return steps_geometry(batch, drafts, context, model.page_tokens, vocab, width, groups.n_groups)


def arena_sizes(config: Config, model: ModelConfig, hyper: Hyper) -> ArenaSizes:
    """The sizes for a version of `model` whose checkpoint has these hyper-parameters."""
    kv = KvGeometry.of(hyper, model.page_tokens, model.kv_type)
    steps = version_steps_geometry(config, model, model.name, hyper)
    groups = worker_groups.cpus_of_groups(config, model, model.name)
    tokens, adapter_rank = config.scheduler.max_step_tokens, model.max_adapter_rank if model.adapters else 0
    return ArenaSizes(
        _file_bytes(kv_arena_bytes(kv, pages_that_fit(kv, config.kv_cache_bytes(model)))),
        _file_bytes(steps_bytes(steps)) + (len(groups) - 1) * _file_bytes(ring_bytes(steps)),
        sum(
            _file_bytes(activations_bytes(steps, hyper, tokens, adapter_rank, _n_nodes(cpus, model.ranks)))
            for cpus in groups
        ),
    )


def _file_bytes(contents: int) -> int:
    return HEADER_BYTES + align(contents, 4096)


def n_weight_copies(config: Config, model: ModelConfig) -> int:
    """How many copies the worker groups of `model` have of its weights if each memory node has one; 0 on one node."""
    groups = worker_groups.cpus_of_groups(config, model, model.name)
    if len(memory_nodes.of(sorted({cpu for cpus in groups for cpu in cpus}))) < 2:
        return 0
    found = sum(_n_nodes(cpus, model.ranks) for cpus in groups if model.ranks <= len(cpus))
    return found if found > 1 or len(groups) > 1 else 0


def _n_nodes(cpus: list[int], ranks: int) -> int:
    """Memory nodes that the ranks of a group are on, as `stages.worker.rank_places` finds them. `ranks` 0: on all."""
    ranks = ranks or len(cpus)
    return 1 if ranks > len(cpus) else len(memory_nodes.of(cpus[:ranks]))


def activations_bytes(steps: StepsGeometry, h: Hyper, max_step_tokens: int, adapter_rank: int, nodes: int = 1) -> int:
    """As `stages.worker.activations_arena.activations_bytes`, which only the worker may import.

    nodes: memory nodes that the ranks are on.
    """
    tokens = max(max_step_tokens, steps.max_entries, steps.max_samples)
    samples, heads = steps.max_samples, h.n_heads * h.head_dim
    positions = min(steps.max_tokens, h.context_length)
    splits = max(2048, -(-positions // KV_SPLIT) * h.n_heads, steps.max_entries * h.n_heads)
    pairs = tokens * max(1, h.n_experts_used)  # of a token and an expert
    experts = (
        tokens * 4 * (2 * h.n_experts_used + 1),
        4 * tokens * h.shared_ffn_width,
        tokens * _row_bytes(h.shared_ffn_width),
    )
    plan = 8 * (12 + 23 * steps.max_entries + 4 * tokens + 3 * samples)
    by_tiles = cpu.may_use_tiles()
    normed = (4 * tokens * h.width, tokens * _row_bytes(h.width), *((_packed_bytes(tokens, h.width),) * by_tiles))
    packed = (
        _packed_bytes(tokens, heads),
        _packed_bytes(pairs + 16 * h.n_experts, h.ffn_width),
        *((_packed_bytes(tokens, h.shared_ffn_width),) if h.n_experts else ()),
    )
    buffers = (
        plan,
        plan,  # of the last layer
        4 * steps.max_pages * steps.max_entries,
        64 * 16,
        4 * tokens * h.width,
        4 * tokens * h.width,
        *(normed if nodes == 1 else ()),
        tokens * align(4 * (heads + 2 * h.n_kv_heads * h.head_dim)),
        tokens * 4 * heads,
        tokens * _row_bytes(heads),
        4 * pairs * h.ffn_width,
        pairs * _row_bytes(h.ffn_width),
        tokens * (2 if h.has_local_rope else 1) * 2 * align(2 * h.n_rot),
        samples * 4 * align(h.vocab_size),
        4 * (h.head_dim + 16) * splits,
        *(experts if h.n_experts else ()),
        *(packed if by_tiles else ()),
        *((tokens * 3 * align(4 * adapter_rank),) if adapter_rank else ()),
    )
    end = _end_of_buffers(buffers, align(8 * (128 + 44 * MAX_RANKS)))
    if nodes == 1:
        return end
    copies = (heads,) if h.n_experts else (heads, h.ffn_width)
    copied = (max(tokens * _row_bytes(n), _packed_bytes(tokens, n) if by_tiles else 0) for n in copies)
    own = _end_of_buffers((*normed, *copied), 0)  # of each node
    return align(end, 4096) + nodes * align(own, 4096)


def _end_of_buffers(sizes: tuple[int, ...], at: int) -> int:
    """Where buffers of these sizes end that begin at `at`."""
    for size in sizes:
        at = align(at + size) + 64
    return at


def _row_bytes(columns: int) -> int:
    """Bytes of a row of int8 activations with its scales."""
    n = align(columns, 32) * 2
    return n + 64 if n % 1024 == 0 else n


def _packed_bytes(tokens: int, columns: int) -> int:
    """Bytes of such rows packed for AMX tiles, 16 together."""
    return -(-tokens // 16) * -(-columns // 32) * 960
