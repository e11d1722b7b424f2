"""Ranks that are forked before it is known what they compute: those of a spare worker group (spare_group.py).

    the spare's process --fork--> ranks that wait in a read
      a version is given to it --Begin--> each maps the checkpoint, and is a rank as any other (ranks.py)

So that rank 0 of a version that is loaded forks nothing, and the others map the model while it greets the scheduler;
the one that is expected next (expected_model.py) is mapped in all of them while they wait.
There are as many as a model with the default settings has.  A version that needs another number, or whose ranks share
more with rank 0 than files, forks its own; then, as when one of them has ended, these are killed.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.config.schema import Config
from pipeline.models import worker_groups
from pipeline.runtime.process import EXIT_OK
from shm.checkpoint import Checkpoint
from stages.worker import expected_model
from stages.worker.expected_model import Expected
from stages.worker.model import kernels_of
from stages.worker.ranks import Channel, GroupError, Rank, follow, fork_rank, pin, state

log = logging.getLogger("starling.worker")

MAX_WAITING = 7  # each takes 1 MB: on larger machines loads fork their ranks
READY = b"ready"  # a rank has loaded its kernels

_waiting: list[Rank] = []  # of this process
_beginning: list[Rank] = []  # that were taken, and have not been ready


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


def prepare_spare(config: Config, in_child: Callable[[], object], finish: Callable[[], object]) -> list[int]:
    """Fork the ranks, and open the model that is expected, in each of them and here.

    Call it before this process has threads or sockets.  `in_child` is called in each rank, to close what is not its
    own, and `finish` when it has opened the model.  Returns a descriptor that is readable when the model's file is
    removed, if one is open.
    """
    try:
        expected = expected_model.choose(config)
        watched = [] if expected is None else [expected_model.watch_file(expected)]
    except Exception as error:  # whatever a file holds: the worker that needs it reports it
        _note(error)
        expected, watched = None, []

    def begin() -> None:
        in_child()
        for fd in watched:
            os.close(fd)

    fork_waiting(config, begin, expected, finish)
    try:
        _open(expected)
    except Exception as error:
        _note(error)
    return watched


def _note(error: Exception) -> None:
    """Log why a spare opens no model, once for all of its processes."""
    level = logging.DEBUG if isinstance(error, FileNotFoundError) else logging.WARNING  # it has just been removed
    log.log(level, "no model is opened ahead", extra={"reason": str(error)})


def fork_waiting(
    config: Config,
    in_child: Callable[[], object] = lambda: None,
    expected: Expected | None = None,
    finish: Callable[[], object] = lambda: None,
) -> None:
    """Fork the ranks; none if there is no room for them. Call it before this process has threads or sockets.

    `in_child` is called in each, to close what is not its own, before it opens the model that is `expected`, and
    `finish` after that.
    """
    model = config.models[0]
    n = (model.ranks or len(worker_groups.cpus_of_groups(config, model, model.name)[0])) - 1
    if n > MAX_WAITING:
        return

    def body(channel: Channel) -> int:
        in_child()
        try:
            _open(expected)
        except Exception as error:  # mostly as in rank 0, whose log line has the level of its cause
            log.debug("a rank opens no model ahead", extra={"reason": str(error)})
        finish()
        return _wait(channel)

    try:
        for _ in range(n):
            _waiting.append(fork_rank(body))
    except OSError:  # too many processes, or too little memory
        dismiss()


def _open(expected: Expected | None) -> None:
    if expected is not None:
        expected_model.open_expected(expected)


def begin_version(index_path: Path | None) -> None:
    """A version is given to this process; `index_path`: of its checkpoint, if there is one.

    While the checkpoint is made, which may take long, nothing keeps the file of another model.
    """
    expected_model.keep_only(index_path)
    if index_path is None:
        dismiss()


def take(checkpoint: Checkpoint | None, kv_type: str, cpus: list[int], ranks: int, maps_weights: bool) -> list[Rank]:
    """Let them become all ranks of a group but rank 0; [] if there are not so many: then they are killed.

    checkpoint: a file that they map; None: the ranks share more than that.  The others as for `ranks.spawn`.
    """
    if checkpoint is None or len(_waiting) != ranks - 1 or any(map(state, _waiting)):
        dismiss()
        return []
    index, inode = checkpoint.index_path, checkpoint.info.st_ino
    kernels = kernels_of(checkpoint.index.hyper, kv_type, False)
    messages = [
        msgspec.msgpack.encode(Begin(number, ranks, cpus, str(index), inode, kv_type, kernels, maps_weights))
        for number in range(1, ranks)
    ]
    if any(len(message) > select.PIPE_BUF for message in messages):  # a long path: they would arrive in parts
        dismiss()
    try:
        for rank, message in zip(_waiting, messages, strict=False):
            rank.channel.send(message)
    except OSError:  # one has just ended
        dismiss()
    taken = _waiting[:]
    _waiting.clear()
    _beginning[:] = taken
    return taken


def await_ready() -> None:
    """Wait until those that were taken have loaded their kernels, however long that takes. Idempotent.

    Raises `GroupError`.
    """
    while _beginning:
        rank = _beginning.pop()
        if rank.channel.receive() != READY:
            raise GroupError(f"rank process {rank.pid} has ended")


def dismiss() -> None:
    """Kill those that wait, and wait for their end. Idempotent."""
    for rank in _waiting:
        rank.channel.close()
        signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
    for rank in _waiting:
        os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED)
        os.close(rank.pidfd)
    _waiting.clear()


def _wait(channel: Channel) -> int:
    """A rank's process: the exit code."""
    raw = channel.receive()
    if not raw:
        return EXIT_OK
    begin = msgspec.msgpack.decode(raw, type=Begin)
    pin(begin.cpus, begin.rank, begin.ranks)
    checkpoint = expected_model.open_checkpoint(Path(begin.index_path))
    model = expected_model.model_of(checkpoint)
    kernels = model.load_kernels(begin.kv_type)
    if (checkpoint.info.st_ino, kernels) != (begin.inode, begin.kernels):
        raise RuntimeError(f"{checkpoint.path} or the kernels were replaced while the worker group began")
    channel.send(READY)
    maps_weights = begin.maps_weights and not expected_model.is_mapped(checkpoint)
    return follow(model, begin.rank, begin.ranks, begin.cpus, channel, maps_weights)
