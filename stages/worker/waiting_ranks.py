"""Ranks that are forked before it is known what they compute: those of a spare worker group (spare_group.py).

    the spare's process --fork--> ranks that wait in a read
      a version is given to it --Begin--> each maps the checkpoint, and is a rank as any other (ranks.py)

So that rank 0 of a version that is loaded forks nothing, and the others map the model while it greets the scheduler.
There are as many as a model with the default settings has.  A version that needs another number, or whose ranks share
more with rank 0 than files, forks its own; then, as when one of them has ended, these are killed.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec

from pipeline.config.schema import Config
from pipeline.models import worker_groups
from pipeline.runtime.process import EXIT_OK
from shm.checkpoint import Checkpoint
from stages.worker.kernels import compiled, stored_code
from stages.worker.model import Model
from stages.worker.ranks import Channel, Rank, follow, fork_rank

MAX_WAITING = 7  # each takes 1 MB: on larger machines loads fork their ranks

_waiting: list[Rank] = []  # of this process


class Begin(msgspec.Struct, frozen=True):
    """What a rank becomes."""

    rank: int
    ranks: int
    cpus: list[int]
    index_path: str
    inode: int  # of the `.bin`, which rank 0 has verified
    kv_type: str
    kernels: str  # `Model.load_kernels` of rank 0
    maps_weights: bool  # as for `ranks.spawn`


def fork_waiting(config: Config) -> None:
    """Fork the ranks; none if there is no room for them. Call it before this process has threads or sockets."""
    model = config.models[0]
    n = (model.ranks or len(worker_groups.cpus_of_groups(config, model, model.name)[0])) - 1
    if n > MAX_WAITING:
        return
    try:
        for _ in range(n):
            _waiting.append(fork_rank(_wait))
    except OSError:  # too many processes, or too little memory
        dismiss()


def take(checkpoint: Checkpoint | None, kv_type: str, cpus: list[int], ranks: int, maps_weights: bool) -> list[Rank]:
    """Let them become all ranks of a group but rank 0; [] if there are not so many: then they are killed.

    checkpoint: a file that they map; None: the ranks share more than that.  The others as for `ranks.spawn`.
    """
    if checkpoint is None or len(_waiting) != ranks - 1 or any(map(_has_ended, _waiting)):
        dismiss()
        return []
    index, inode = checkpoint.index_path, checkpoint.info.st_ino
    kernels = compiled.identity(kv_type, stored_code.extra_entries(checkpoint.index.hyper, False))
    try:
        for number, rank in enumerate(_waiting, 1):
            begin = Begin(number, ranks, cpus, str(index), inode, kv_type, kernels, maps_weights)
            rank.channel.send(msgspec.msgpack.encode(begin))
    except OSError:  # one has just ended
        dismiss()
    taken = _waiting[:]
    _waiting.clear()
    return taken


def dismiss() -> None:
    """Kill those that wait, and wait for their end. Idempotent."""
    while _waiting:
        rank = _waiting.pop()
        rank.channel.close()
        signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED)
        os.close(rank.pidfd)


def _has_ended(rank: Rank) -> bool:
    return os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _wait(channel: Channel) -> int:
    """A rank's process: the exit code."""
    raw = channel.receive()
    if not raw:
        return EXIT_OK
    begin = msgspec.msgpack.decode(raw, type=Begin)
    checkpoint = Checkpoint(Path(begin.index_path))
    model = Model(checkpoint)
    kernels = model.load_kernels(begin.kv_type)
    if (checkpoint.info.st_ino, kernels) != (begin.inode, begin.kernels):
        raise RuntimeError(f"{checkpoint.path} or the kernels were replaced while the worker group began")
    return follow(model, begin.rank, begin.ranks, begin.cpus, channel, begin.maps_weights)
