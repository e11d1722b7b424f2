"""Ranks 1 and up: processes that rank 0 forks, one for each core, and that compute the steps it announces.

A rank starts with mapped weights and loaded kernels, as a copy of rank 0 from before that opened sockets.  Rank 0
sends messages through a pair of pipes: each names the arenas to attach to, or none.  Between messages a rank stays in
compiled code, and returns to Python when rank 0 announces an odd number.

A rank dies with rank 0 (`PR_SET_PDEATHSIG`), and rank 0 exits when a rank dies (`watch`): a group lives as a whole.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeline.runtime import process
from shm.arena import Arena, ArenaError, populate, process_ticks
from shm.pages import attach_kv
from shm.step_rings import attach_ring
from stages.worker.activations_arena import announce, attach_activations, control_words
from stages.worker.kernels import compiled
from stages.worker.mapped_weights import map_memory, map_weights
from stages.worker.model import Arenas, Model, RankTable

FOLLOW_NS = 60_000_000_000  # in compiled code without a step; rank 0's death ends it there, too
ACK_S = 30.0  # for a rank to attach, which takes milliseconds
DETACHED = b"ok"  # answer of a rank that is attached to no arenas; to some: `Attachment.files`
_unpinned: list[int] = []  # the cores of this process before `pin`; empty: it is not pinned


class GroupError(RuntimeError):
    """A rank has died or does not answer: the group cannot go on."""


class ArenaPaths(msgspec.Struct, frozen=True):
    """The arenas that a group is attached to; "" in all fields: none."""

    steps: str = ""
    kv: str = ""
    activations: str = ""
    ring: int = 0  # of the steps, the group's


class Attachment:
    """One rank's maps of a group's arenas and its kernel parameter block. `close` unmaps them."""

    def __init__(self, model: Model, paths: ArenaPaths, rank: int) -> None:
        """Raises `FileNotFoundError`, `ArenaError`, or `ValueError` for arenas of another model."""
        self._arenas: list[Arena] = []
        self.paths = paths
        try:
            steps_arenas, self.steps, steps_geometry = attach_ring(Path(paths.steps), paths.ring, model.digest)
            self._arenas += steps_arenas
            kv_arena, kv, kv_geometry = attach_kv(Path(paths.kv), model.digest)
            self._arenas.append(kv_arena)
            activations, geometry = attach_activations(Path(paths.activations), model.digest)
            self._arenas.append(activations)
            self.arenas = Arenas(self.steps, steps_geometry, kv, kv_geometry, activations, geometry)
            self.table = RankTable(model, self.arenas, rank)
            # The first request has it, and its first step need not map it.  Without memory (stages/kv/pool/extents.py)
            # it would get some that nothing counts.
            pages_at = kv.pages.ctypes.data - kv_arena.buffer.ctypes.data
            if kv_arena.reserved >= pages_at + kv_geometry.page_bytes:
                map_memory(kv.pages[:1])
            populate(self._arenas, _unpinned)
        except BaseException:
            self.close()
            raise
        self.control = activations.buffer.ctypes.data
        self.words = control_words(activations)
        self.ring = self.steps.control.ctypes.data
        self.timing = self.steps.timing.ctypes.data

    @property
    def is_current(self) -> bool:
        """Whether the files at its paths are those that are mapped."""
        return all(arena.is_in_place for arena in self._arenas)

    @property
    def files(self) -> bytes:
        """Names the files that are mapped."""
        return b" ".join(b"%d" % arena.inode for arena in self._arenas)

    def close(self) -> None:
        """Unmap the arenas. Idempotent."""
        for arena in self._arenas:
            arena.close()
        self._arenas = []


class Channel(NamedTuple):
    """One end of two pipes that keep messages apart. Messages are smaller than a pipe's atomic write."""

    reader: int
    writer: int

    def send(self, message: bytes) -> None:
        """Send one message. Raises `OSError` when the other end is closed."""
        os.write(self.writer, message)

    def receive(self) -> bytes:
        """The next message; b"" when the other end is closed."""
        return os.read(self.reader, select.PIPE_BUF)

    def close(self) -> None:
        """Close both pipes' ends."""
        os.close(self.reader)
        os.close(self.writer)


def channel_pair() -> tuple[Channel, Channel]:
    """The two ends of a new channel. Raises `OSError`: then nothing is open."""
    flags = os.O_CLOEXEC | os.O_DIRECT  # a read returns one message
    a, b = os.pipe2(flags)
    try:
        c, d = os.pipe2(flags)
    except OSError:
        os.close(a)
        os.close(b)
        raise
    return Channel(a, d), Channel(c, b)


class Rank(NamedTuple):
    """Rank 0's handle of another rank."""

    pid: int
    ticks: int
    pidfd: int
    channel: Channel


def pin(cpus: list[int], rank: int, ranks: int) -> None:
    """Pin this thread to its rank's CPU, unless there are more ranks than CPUs."""
    if ranks <= len(cpus):
        _unpinned[:] = _unpinned or sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank]})


def spawn(model: Model, rank: int, ranks: int, cpus: list[int], maps_weights: bool = False) -> Rank:
    """Fork one rank. Call it before this process has other threads or sockets.

    maps_weights: it maps the weights, all of which are in memory, until the first message.
    """
    return fork_rank(lambda channel: follow(model, rank, ranks, cpus, channel, maps_weights))


def fork_rank(body: Callable[[Channel], int]) -> Rank:
    """Fork a process that ends with the code that `body` returns, or with this process.

    Raises `OSError`: then there is none.
    """
    leader_end, rank_end = channel_pair()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError:
        leader_end.close()
        rank_end.close()
        raise
    if pid:
        rank_end.close()
        try:
            return Rank(pid, process_ticks(pid), os.pidfd_open(pid), leader_end)
        except BaseException:  # no descriptor is left
            leader_end.close()
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    code = process.EXIT_FATAL
    try:
        process.die_with_parent(parent)
        leader_end.close()
        # Ctrl-C in a terminal and a unit's SIGTERM reach every process: rank 0 handles them for the group.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()
        code = body(rank_end)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def follow(model: Model, rank: int, ranks: int, cpus: list[int], channel: Channel, maps_weights: bool) -> int:
    """Be a rank: attach as messages say, and compute steps between them. Returns the exit code."""
    pin(cpus, rank, ranks)
    process.use_default_time_slice()
    if maps_weights:
        # Rank 0 does not wait for it: what a rank has not mapped when it must attach, its steps do.
        map_weights(model.weights, lambda: not select.select([channel.reader], [], [], 0)[0])
    return _follow(model, rank, channel)


def _follow(model: Model, rank: int, channel: Channel) -> int:
    """The main loop of a rank. Returns the exit code."""
    attachment: Attachment | None = None
    while True:
        raw = channel.receive()
        if not raw:
            return process.EXIT_OK
        paths = msgspec.msgpack.decode(raw, type=ArenaPaths)
        if attachment is not None:
            attachment.close()
            attachment = None
        if paths.steps:
            attachment = Attachment(model, paths, rank)
        channel.send(DETACHED if attachment is None else attachment.files)
        if attachment is None:
            continue
        number = 0
        while not number & 1:
            number = compiled.run_steps(attachment.table.address, attachment.control, number, 0, 0, FOLLOW_NS, 0, -1)


def attach_group(
    model: Model, ranks: list[Rank], paths: ArenaPaths, activations: Arena, await_ready: Callable[[], object]
) -> Attachment:
    """Attach all ranks, and this process as rank 0. `activations`: as at `paths`, where nothing was announced yet.

    await_ready: waits until all ranks have begun.
    Raises `GroupError`; otherwise what `Attachment` raises, and `ArenaError` if files were replaced meanwhile, so that
    not all ranks have the same: then none is attached.
    """
    begin_attach(ranks, paths)
    attachment: Attachment | None = None
    try:
        try:
            attachment = Attachment(model, paths, 0)
        finally:
            await_ready()
            files = finish_attach(ranks)
        if any(found != attachment.files for found in files):
            raise ArenaError(f"{paths.steps} or {paths.kv} was replaced while the worker group attached to it")
    except (ArenaError, OSError, ValueError):
        announce(control_words(activations), 1, 1 + len(ranks))
        attach_ranks(ranks, ArenaPaths())
        if attachment is not None:
            attachment.close()
        raise
    return attachment


def attach_ranks(ranks: list[Rank], paths: ArenaPaths) -> None:
    """Attach all ranks to the arenas at `paths`, or to none, and wait until they are. Raises `GroupError`."""
    begin_attach(ranks, paths)
    finish_attach(ranks)


def begin_attach(ranks: list[Rank], paths: ArenaPaths) -> None:
    """Let all ranks attach; `finish_attach` follows. Raises `GroupError`."""
    message = msgspec.msgpack.encode(paths)
    try:
        for rank in ranks:
            rank.channel.send(message)
    except OSError as error:
        raise GroupError(f"a rank process has ended: {error}") from None


def finish_attach(ranks: list[Rank]) -> list[bytes]:
    """Wait until all ranks are attached; returns `Attachment.files` of each. Raises `GroupError`."""
    files: list[bytes] = []
    try:
        for rank in ranks:
            is_there = select.select([rank.channel.reader], [], [], ACK_S)[0]
            if not is_there or not (found := rank.channel.receive()):
                raise GroupError(f"rank process {rank.pid} did not attach within {ACK_S:g} s")
            files.append(found)
        return files
    except OSError as error:
        raise GroupError(f"a rank process has ended: {error}") from None


def watch(ranks: list[Rank]) -> None:
    """Exit as soon as one of the ranks ends, even while this process waits for it in compiled code.

    When a rank is stopped, the supervisor gets a SIGCHLD, so that it need not poll often.  Call it in the main thread,
    while the only other threads are ZeroMQ's.
    """
    children = process.open_child_signal_fd()

    def wait() -> None:
        poll = select.poll()
        for fd in (children, *(rank.pidfd for rank in ranks)):
            poll.register(fd, select.POLLIN)
        while not (ended := [rank.pid for rank in ranks if state(rank) == "ended"]):
            ready = [fd for fd, _ in poll.poll()]
            if children in ready:
                os.read(children, 4096)
            if any(state(rank) == "stopped" for rank in ranks):
                os.kill(os.getppid(), signal.SIGCHLD)
        for pid in ended:
            os.write(2, f"rank process {pid} has ended; the worker group ends with it\n".encode())
        # An exception would not do: the main thread may be in a kernel that waits for the dead rank.
        os._exit(process.EXIT_FATAL)

    threading.Thread(target=wait, name="ranks", daemon=True).start()


def state(rank: Rank) -> str:
    """The rank's state: "ended", "stopped", or "" while it runs. A traced process (a debugger, a profiler) runs."""
    found = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return ""
    return "stopped" if found.si_code == os.CLD_STOPPED else "ended"
