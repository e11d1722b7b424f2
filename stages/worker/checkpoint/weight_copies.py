"""Copies of the weights for the memory nodes that a group's ranks are on: `performance.weight_copies`.

    weights (a map of the file, or memory) --threads beside node k--> private mapping k, then read-only --fork--> ranks

A rank reads the weights from its own node, with the bandwidth of that node's memory.  The mappings are made before the
other ranks are forked, which share their pages, and end with the last rank (as weights_memory.py).  A thread that runs
beside a node touches the pages first, so that they lie there.  If a node has no room, some lie on another one: that
changes the speed, never a byte.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.errors import ResourceError
from pipeline.models import weight_copies
from shm import memory_nodes
from shm.checkpoint import PIECE_BYTES, Checkpoint, n_pieces
from stages.worker.checkpoint.verify import read_in
from stages.worker.checkpoint.weights_memory import allocate, protect

log = logging.getLogger("starling.checkpoint")

Progress = Callable[[str, int, int], None]  # phase, done, total (bytes)
PHASE = "copy weights"
THREADS = 8  # for one node: some cores take what its memory gives
SHARE = 0.5  # of the memory beside a version's arenas that `auto` takes at most, for the copies of all versions


def reserve_copies(
    run_dir: Path,
    stage: str,
    setting: str,
    name: str,
    bin_bytes: int,
    n_nodes: int,
    left: Callable[[], int],
    *,
    n_copies: int = 0,
) -> bool:
    """Whether a model's weights are copied to each of so many memory nodes, whose memory is recorded as promised.

    stage: of the version's worker; setting: `performance.weight_copies`; left: bytes of memory beside the arenas of
    the version and what is promised to the copies of others; n_copies: that this worker makes, where other worker
    groups make others (0: one on each node).
    Raises `ResourceError` if they must be and memory is too small, `OSError` if it cannot be recorded.
    """
    if n_nodes < 2 or setting == "never":
        return False
    needed = (n_copies or n_nodes) * bin_bytes
    try:
        with weight_copies.one_at_a_time(run_dir):
            others = weight_copies.totals(run_dir, without=stage)
            if not should_copy(setting, name, needed, n_nodes, left(), sum(others)):
                weight_copies.remove(run_dir, stage)
                return False
            weight_copies.record(run_dir, stage, needed, is_made=False)
            return True
    except OSError as error:
        if setting != "auto":
            raise
        log.warning("weights are not copied to each memory node", extra={"model": name, "reason": error.strerror})
        return False


def should_copy(setting: str, name: str, needed: int, n_nodes: int, available: int, others: int) -> bool:
    """Whether so many bytes are taken for copies on so many memory nodes, beside the copies of other versions.

    Raises `ResourceError` if they must be and memory is too small.
    """
    if setting == "always" and needed > available:
        raise ResourceError(
            f"the weights of {name} need {needed:,} bytes of memory for {n_nodes} memory nodes, and the machine has "
            f"{available:,} left beside the arenas: set performance.weight_copies: auto, or free some memory",
            param="performance.weight_copies",
        )
    allowed = max(0, int(SHARE * (available + others)) - others)
    if setting == "auto" and needed > allowed:
        facts = {"model": name, "bytes": needed, "allowed": allowed, "nodes": n_nodes, "others": others}
        log.warning("weights are not copied to each memory node: they would take too much memory", extra=facts)
        return False
    return True


def copy_weights(
    checkpoint: Checkpoint, node_cpus: Sequence[Sequence[int]], progress: Progress, setting: str = "always"
) -> list[np.ndarray]:
    """A read-only copy of `checkpoint.data` for each node, whose CPUs are given; uint8 each.

    setting: with `auto` there are none ([]) where the system gives no memory for them.
    Raises `CheckpointError` when a piece of a mapped file cannot be read, `OSError` without memory.
    """
    begun, total = time.monotonic(), len(node_cpus) * checkpoint.data.nbytes
    copies: list[np.ndarray] = []
    progress(PHASE, 0, total)
    kinds = []
    for cpus in node_cpus:
        try:
            memory = allocate(checkpoint.data.nbytes)
        except OSError as error:
            if setting != "auto":
                raise
            reason = {"model": checkpoint.index.name, "reason": error.strerror}
            log.warning("weights are not copied to each memory node", extra=reason)
            return []
        done = len(copies) * checkpoint.data.nbytes

        def copy(piece: int, to: np.ndarray = memory.data) -> int:
            data = checkpoint.piece(piece)
            read_in(checkpoint, piece, data)
            to[piece * PIECE_BYTES : piece * PIECE_BYTES + data.nbytes] = data
            return data.nbytes

        n_threads = min(THREADS, len(cpus))
        with ThreadPoolExecutor(n_threads, "copy", memory_nodes.stay_on, (cpus,)) as pool:
            futures = [pool.submit(copy, piece) for piece in range(n_pieces(checkpoint.data.nbytes))]
            try:
                for future in as_completed(futures):
                    done += future.result()
                    progress(PHASE, done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        protect(memory.data)
        copies.append(memory.data)
        kinds.append(memory.pages)
    seconds = round(time.monotonic() - begun, 3)
    facts = {"model": checkpoint.index.name, "nodes": len(copies), "bytes": total, "pages": kinds, "seconds": seconds}
    log.info("weights are copied to each memory node", extra=facts)
    return copies


class CopyPlace(NamedTuple):
    """Which worker makes copies, and where."""

    run_dir: Path
    stage: str  # of the worker
    node_cpus: list[list[int]]  # of its ranks, by memory node; [] if there is one
    n_nodes: int  # of all worker groups of the version


def make_copies(
    place: CopyPlace,
    setting: str,
    name: str,
    checkpoint: Checkpoint,
    left: Callable[[], int],
    progress: Progress,
) -> list[np.ndarray]:
    """The weights of each memory node, recorded; [] if the ranks use those of the checkpoint, which else is the first.

    Raises as `reserve_copies` and `copy_weights` do.
    """
    n_copies, nbytes = len(place.node_cpus), checkpoint.data.nbytes
    run_dir, stage = place.run_dir, place.stage
    if not reserve_copies(run_dir, stage, setting, name, nbytes, place.n_nodes, left, n_copies=n_copies):
        return []
    copies = copy_weights(checkpoint, place.node_cpus, progress, setting)
    if copies:
        checkpoint.data = copies[0]  # what `use_mmap: false` has read is freed
        weight_copies.record(run_dir, stage, n_copies * nbytes, is_made=True)
    else:
        weight_copies.remove(run_dir, stage)
    return copies
