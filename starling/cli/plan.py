"""`starling models --plan`: the memory that a prepared model takes, and the speed that memory allows.

A decode step reads all weights and the K and V that its sequence attends to, so one request gets no more tokens per
second than the machine reads that many bytes.  The rate is measured on the model's own file, by all cores together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from pipeline.config.schema import Config, ModelConfig
from pipeline.models import store
from pipeline.models.arena_sizes import arena_sizes, most_pages, most_positions
from shm.checkpoint import Checkpoint, Hyper, piece_checksum
from shm.pages import KvGeometry, pages_that_fit
from stages.worker.adapters.memory import used_bytes
from stages.worker.checkpoint.prepare import prepare_adapters

MEASURE_S = 0.5  # long beside the start of the threads
MEASURED_BYTES = 1 << 29  # at most so much of the weights: far more than caches hold
_SLICE = 1 << 20  # bytes between two checks of the clock


class Plan(msgspec.Struct, frozen=True):
    """Bytes, unless the name says otherwise. `tokens_per_s` bounds one request."""

    name: str
    weights: int  # the `.bin`
    weights_per_token: int  # of them that a step reads
    kv_arena: int
    kv_positions: int  # number of positions, of all layers, that fit in it
    kv_per_position: int
    kv_behind_window: int  # of each position behind the window of a sequence
    kv_sequence: int  # positions that a sequence at its full context holds; of layers with a window, if there are any
    kv_sequences: int  # sequences at full context that fit in it
    step_arena: int
    activations: int
    adapters: int  # those that are configured, and their table
    context_length: int  # positions of a sequence
    read_bytes_per_s: float
    tokens_per_s: float
    tokens_per_s_at_full_context: float

    @property
    def memory(self) -> int:
        """Weights, arenas and adapters."""
        return self.weights + self.kv_arena + self.step_arena + self.activations + self.adapters


def plan(config: Config, model: ModelConfig, models_dir: Path) -> Plan | None:
    """The plan of a model; None if it is not prepared. Its adapters are prepared if they are not.

    Raises `CheckpointError`, `ConfigError` or `ResourceError` (an adapter cannot be used), `OSError`.
    """
    index_path = store.find_index(model, models_dir)
    if index_path is None:
        return None
    checkpoint = Checkpoint(index_path)
    index, h = checkpoint.index, checkpoint.index.hyper
    sizes = arena_sizes(config, model, h)
    geometry = KvGeometry.of(h, model.page_tokens, model.kv_type)
    groups, n_pages = geometry.groups, pages_that_fit(geometry, config.kv_cache_bytes(model))
    context = min(h.context_length, model.max_sequence_length or h.context_length)
    step_tokens = max(config.scheduler.max_step_tokens, config.max_batch_size(model))
    adapters = prepare_adapters(model, index, models_dir).values()
    rate = read_rate(checkpoint.data[:MEASURED_BYTES], len(os.sched_getaffinity(0)))
    per_layer = geometry.head_bytes * h.n_kv_heads / model.page_tokens
    full = index.decode_bytes + per_layer * attended(h, context)
    return Plan(
        name=model.name,
        weights=index.bin_bytes,
        weights_per_token=index.decode_bytes,
        kv_arena=sizes.kv,
        kv_positions=n_pages // groups.n_groups * model.page_tokens,
        kv_per_position=round(per_layer * geometry.page_layers * groups.n_groups),
        kv_behind_window=round(per_layer * geometry.page_layers * (groups.full if h.kv_window else groups.n_groups)),
        kv_sequence=most_positions(context, h.kv_window, step_tokens, model.page_tokens),
        kv_sequences=n_pages // most_pages(context, h.kv_window, step_tokens, model.page_tokens, groups),
        step_arena=sizes.steps,
        activations=sizes.activations,
        adapters=used_bytes(index, adapters) if adapters else 0,
        context_length=context,
        read_bytes_per_s=rate,
        tokens_per_s=rate / index.decode_bytes,
        tokens_per_s_at_full_context=rate / full,
    )


def attended(h: Hyper, positions: int) -> int:
    """Positions that the last of `positions` attends to, summed over the layers."""
    return sum(min(positions, window or positions) for window in h.windows or (0,) * h.n_layers)


def read_rate(data: np.ndarray, n_threads: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that `n_threads` threads read of `data` (u8), each its own part again and again."""
    parts = np.array_split(data, n_threads)

    def read(part: np.ndarray) -> int:
        done, begun = 0, clock()
        while not done or clock() - begun < MEASURE_S:
            for at in range(0, len(part), _SLICE):
                piece_checksum(part[at : at + _SLICE])
                done += len(part[at : at + _SLICE])
                if clock() - begun >= MEASURE_S:
                    break
        return done

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(lambda part: piece_checksum(part), parts))  # into the page cache
        begun = clock()
        total = sum(pool.map(read, parts))
        return total / (clock() - begun)


def lines(p: Plan) -> list[str]:
    """The plan for people."""

    def mb(n: float) -> str:
        return f"{n / 1e6:,.1f} MB"

    positions = f"{p.kv_positions:,} positions of {p.kv_per_position:,} bytes; "
    if 0 < p.kv_behind_window < p.kv_per_position:
        positions += f"{p.kv_behind_window:,} behind the last {p.kv_sequence:,} of a sequence: "
        positions += f"{p.kv_sequences:,} of {p.context_length:,} fit"
    else:
        positions += f"a sequence holds up to {min(p.kv_sequence, p.kv_positions):,}"
    adapters = [f"  adapters     {mb(p.adapters)}"] if p.adapters else []
    return [
        f"{p.name}  {mb(p.memory)} of memory",
        f"  weights      {mb(p.weights)}, of which each token reads {mb(p.weights_per_token)}",
        f"  KV arena     {mb(p.kv_arena)}: {positions}",
        f"  step arena   {mb(p.step_arena)}",
        f"  activations  {mb(p.activations)}",
        *adapters,
        f"  speed        at most {p.tokens_per_s:,.1f} tokens/s for one request",
        f"               {p.tokens_per_s_at_full_context:,.1f} at its full context ({p.context_length:,})",
        f"  read rate    {p.read_bytes_per_s / 1e9:,.1f} GB/s, measured now",
    ]
