"""What ranks share of the work, how they wait for each other, and the cycles that each phase of a step takes."""

from __future__ import annotations

from numba import njit

from shm.atomics import cycles
from shm.barrier import wait, wait_in_clusters
from stages.worker.kernels import parameter_block as pb
from stages.worker.kernels.buffer_sizes import MIN_CHUNK, PHASES
from stages.worker.kernels.entries import INNER
from stages.worker.kernels.format_traits import group_bytes
from stages.worker.kernels.formats.description import GROUP
from stages.worker.kernels.parameter_access import param
from stages.worker.kernels.simd import get_i64, put_i64

PREFETCH_BYTES = 8192  # of weights that a rank prefetches while it waits
(EMBED, NORM, QKV, KEYS, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, SAMPLE, WAIT) = range(len(PHASES))


@njit(**INNER)
def share(params, n):
    """This rank's part of 0 .. n-1."""
    rank, ranks = param(params, pb.RANK), param(params, pb.RANKS)
    return n * rank // ranks, n * (rank + 1) // ranks


@njit(**INNER)
def node_share(params, n):
    """This rank's part of 0 .. n-1, which the ranks of each memory node divide among themselves."""
    rank, ranks = param(params, pb.NODE_RANK), param(params, pb.NODE_RANKS)
    return n * rank // ranks, n * (rank + 1) // ranks


@njit(**INNER)
def hidden_share(params, ffn):
    """This rank's groups of `ffn` rows of gate and up: whole records of what comes out."""
    first, end = share(params, ffn // (MIN_CHUNK * GROUP))
    return first * MIN_CHUNK, end * MIN_CHUNK


@njit(**INNER)
def phase_begin(params):
    """The time in CPU cycles, 0 when phases are not counted."""
    return cycles() if param(params, pb.PHASES) else 0


@njit(**INNER)
def phase_end(params, phase, since):
    """Add the cycles since `since` to a phase, when phases are counted; returns the time."""
    phases = param(params, pb.PHASES)
    if phases == 0:
        return 0
    now = cycles()
    put_i64(phases + 8 * phase, get_i64(phases + 8 * phase) + now - since)
    return now


@njit(**INNER)
def _wait(params, first, end):
    since = phase_begin(params)
    barrier, lines, clusters = param(params, pb.BARRIER), param(params, pb.LINES), param(params, pb.CLUSTERS)
    if clusters:
        wait_in_clusters(barrier, lines, clusters, param(params, pb.RANK), param(params, pb.RANKS), first, end)
    else:
        wait(barrier, lines, param(params, pb.RANK), param(params, pb.RANKS), first, end)
    phase_end(params, WAIT, since)


@njit(**INNER)
def wait_for_ranks(params):
    """Wait until every rank has come here; what they stored before is visible after."""
    _wait(params, 0, 0)


@njit(**INNER)
def wait_for_node(params):
    """Wait until every rank of this rank's memory node has come here; all ranks if the node has no barrier."""
    barrier = param(params, pb.NODE_BARRIER)
    if barrier == 0:
        wait_for_ranks(params)
        return
    since = phase_begin(params)
    wait(barrier, param(params, pb.NODE_LINES), param(params, pb.NODE_RANK), param(params, pb.NODE_RANKS), 0, 0)
    phase_end(params, WAIT, since)


@njit(**INNER)
def wait_prefetching(params, kind, w, columns, groups, skip):
    """As `wait_for_ranks`; meanwhile prefetch weights that this rank reads next, so that memory is not idle.

    These are PREFETCH_BYTES of the matrix at `w`, from byte `skip` of row groups groups[0] .. groups[1]-1 on.
    """
    size = group_bytes(kind, columns)
    first = w + groups[0] * size + skip
    _wait(params, first, min(first + PREFETCH_BYTES, w + groups[1] * size))


@njit(**INNER)
def wait_before_q(params, layer):
    """`wait_prefetching` for this rank's rows of a layer's Q matrix."""
    groups = share(params, param(params, pb.N_HEADS) * param(params, pb.HEAD_DIM) // GROUP)
    wait_prefetching(params, param(layer, pb.Q_FORMAT), param(layer, pb.Q), param(params, pb.WIDTH), groups, 0)


@njit(**INNER)
def wait_before_output(params, layer, skip):
    """`wait_prefetching` for this rank's rows of a layer's output matrix."""
    columns = param(params, pb.N_HEADS) * param(params, pb.HEAD_DIM)
    kind, w, width = param(layer, pb.O_FORMAT), param(layer, pb.O), param(params, pb.WIDTH)
    wait_prefetching(params, kind, w, columns, share(params, width // GROUP), skip)
