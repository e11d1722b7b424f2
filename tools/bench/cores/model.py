"""The time of a step on n cores, one rank on each, from measurements with one rank.

    step(n)      = sum over phases of max(one * slow(n) * share(n), nbytes / bandwidth(n))  +  barriers * barrier(n)

    one          seconds of the phase with one rank
    slow(n)      how much longer a core computes while the others compute; 1 for n = 1
    share(n)     part of the work of the rank that has most: ceil(units / n) / units
    nbytes       of weights, K and V that the phase reads
    bandwidth(n) of n cores: n times that of one, at most that of the sockets that they are on
    barrier(n)   between two ranks, and a cache line of each further one, which rank 0 reads one after the other; in
                 clusters, as many ranks have, leaders read those of their clusters at the same time, then rank 0 theirs

Ranks share groups of rows of a matrix, tokens, samples, or the KV heads of a stretch of positions, and nothing smaller:
a phase has so many units.  A phase that every rank computes in full has one.  Bytes and seconds.

On several sockets the ranks of each compute the norms of many tokens, and wait for each other alone then; where they
copy records that those of all sockets have written, they wait once more.  What a copy itself takes is not in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from shm.checkpoint import Hyper, Tensor
from shm.pages import KV_SPLIT
from stages.worker.kernels.buffer_sizes import COPIED_BYTES, MIN_CHUNK, row_bytes
from stages.worker.kernels.formats.description import GROUP
from stages.worker.kernels.parameter_block import FEW
from stages.worker.rank_clusters import MAX_CLUSTER, sizes

MATRICES = {
    "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    "output": ("attn_output.weight",),
    "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "down": ("ffn_down.weight",),
}


class Step(NamedTuple):
    """A step: `batch` sequences, each with `tokens` new positions behind `cached` ones, and one sample."""

    name: str
    batch: int
    tokens: int
    cached: int

    @property
    def rows(self) -> int:
        """Positions that are computed."""
        return self.batch * self.tokens


class Phase(NamedTuple):
    """What one phase of a step is made of."""

    units: int
    nbytes: int
    is_repeated: bool = False  # the ranks of each socket share all units


class SocketBarriers(NamedTuple):
    """Barriers of a step that only the ranks of one socket take part in, if there are several sockets."""

    norms: int = 0  # in place of barriers of all ranks
    copies: int = 0  # in addition


ONE_SOCKET = SocketBarriers()


class Machine(NamedTuple):
    """What the model takes from a machine, or assumes of one."""

    core_bandwidth: float  # bytes/s that one core reads
    bandwidth: float  # bytes/s that all cores read
    slow: float  # a core's time for the same work while the others work, beside alone
    barrier_s: float  # between two ranks
    line_s: float  # a rank reads a line of the cache that another rank has written
    remote_line_s: float  # the same from another socket
    socket_cores: int  # cores of a socket

    def read_s(self, nbytes: int, n: int) -> float:
        """Seconds in which n cores read so many bytes."""
        return nbytes / min(n * self.core_bandwidth, self.bandwidth)

    def wait_s(self, n: int) -> float:
        """Seconds of a barrier of n ranks, with clusters where the worker would have them, which fill the sockets."""
        sockets = [min(self.socket_cores, n - first) for first in range(0, n, self.socket_cores)]
        ends = list(accumulate(sizes(sockets) or (n,)))
        leaders = [0, *ends[:-1]]
        inside = max(self._collect_s(first, range(first + 1, end)) for first, end in zip(leaders, ends, strict=True))
        return inside + self._collect_s(0, leaders[1:])

    def wait_nearby_s(self, n: int) -> float:
        """Seconds in which the ranks of one socket wait for each other, if there are n in all; if many, for all."""
        nearby = min(n, self.socket_cores)
        return self.wait_s(n) if nearby > MAX_CLUSTER else self._collect_s(0, range(1, nearby))

    def _collect_s(self, rank: int, others: Sequence[int]) -> float:
        """Seconds in which a rank collects the arrivals of others, one after the other, and releases them."""
        if not others:
            return 0.0
        near = sum(other // self.socket_cores == rank // self.socket_cores for other in others)
        return self.barrier_s + (near - 1) * self.line_s + (len(others) - near) * self.remote_line_s


def phases(step: Step, hyper: Hyper, tensors: list[Tensor]) -> dict[str, Phase]:
    """The units and bytes of each phase of `step`, for all layers together where a phase is in each."""
    kv_bytes = 4 * hyper.n_layers * hyper.n_kv_heads * hyper.head_dim  # K and V of a position, f16
    nbytes = {
        phase: sum(t.nbytes for t in tensors if t.name.partition(".")[2].partition(".")[2] in names)
        for phase, names in MATRICES.items()
    }
    head = [t.nbytes for t in tensors if t.name in ("output.weight", "token_embd.weight")]
    shared_rows = 1 if step.rows <= FEW else step.rows
    splits = -(-(step.cached + step.tokens) // KV_SPLIT)
    attended = step.batch * hyper.n_kv_heads * (splits if step.tokens == 1 else step.tokens)
    return {
        "embed": Phase(step.rows, 0),
        "norm": Phase(shared_rows, 0, step.rows > FEW),
        "qkv": Phase(hyper.n_kv_heads * hyper.head_dim // GROUP, nbytes["qkv"]),
        "keys": Phase(step.rows, 0),
        "attention": Phase(attended, step.batch * step.cached * kv_bytes),
        "output": Phase(hyper.width // GROUP, nbytes["output"]),
        "gate_up": Phase(hyper.ffn_width // (MIN_CHUNK * GROUP), nbytes["gate_up"]),
        "down": Phase(hyper.width // GROUP, nbytes["down"]),
        "head": Phase(-(-hyper.vocab_size // GROUP), head[-1] if head else 0),
        "sample": Phase(step.batch, 0),
    }


def socket_barriers(step: Step, hyper: Hyper) -> SocketBarriers:
    """Those of `step` on several sockets (stages/worker/kernels/projections.py)."""
    copied = [hyper.n_heads * hyper.head_dim, *(() if hyper.n_experts else (hyper.ffn_width,))]
    copies = sum(step.rows * row_bytes(columns) >= COPIED_BYTES for columns in copied)
    norms = 2 * hyper.n_layers if step.rows > FEW else 0
    return SocketBarriers(norms + (step.batch > FEW), copies * hyper.n_layers)


def bandwidth(n: int, per_core: float, per_socket: float, socket_cores: int) -> float:
    """Bytes/s of n cores that fill the sockets, of which each reads at most `per_socket`."""
    return min(n * per_core, -(-n // socket_cores) * per_socket)


def share(units: int, n: int) -> float:
    """The part of the work of the rank that has most of `units`."""
    return -(-units // n) / units


def predict(
    one: dict[str, float],
    made_of: dict[str, Phase],
    barriers: int,
    machine: Machine,
    n: int,
    nearby: SocketBarriers = ONE_SOCKET,
) -> float:
    """Seconds of a step on n cores. `one`: of each phase with one rank; what `made_of` lacks is not shared.

    barriers: as many as the step has on one socket; nearby: what changes on several ones.
    """
    seconds = barriers * machine.wait_s(n)
    if n > machine.socket_cores:
        seconds -= nearby.norms * machine.wait_s(n)
        seconds += (nearby.norms + nearby.copies) * machine.wait_nearby_s(n)
    for name, alone in one.items():
        phase = made_of.get(name, Phase(1, 0))
        slow = 1.0 if n == 1 else machine.slow
        sharing = min(n, machine.socket_cores) if phase.is_repeated else n
        seconds += max(
            alone * slow * share(phase.units, sharing), machine.read_s(phase.nbytes, n) if phase.nbytes else 0.0
        )
    return seconds
