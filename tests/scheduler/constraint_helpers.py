"""The scheduler's real helper processes for constraints, with engines of which there is only what they need."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline.config.load import resolve
from pipeline.protocol.messages import Constraint, ModelVocabulary
from shm import step_ring as sh
from shm.step_ring import StepsGeometry, create_steps
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import helper_main
from stages.scheduler.constraints.constraints import Constraints
from stages.scheduler.constraints.helper_processes import ConstraintHelpers
from stages.scheduler.constraints.vetting import Waiter
from stages.scheduler.core.ring import Ring
from stages.scheduler.core.sequence import SequenceState
from stages.scheduler.core.worker_link import WorkerLink
from stages.scheduler.policy.tenant import Tenant

from . import vocabularies
from .peers import submission
from .vocabularies import SIZE

WAIT_S = 240.0  # that only a failure reaches
ROWS = 8
GEOMETRY = StepsGeometry(ROWS, 4, 4, 64, 4, mask_words=sh.mask_words(SIZE))


def vetted(sent: Iterable[f.ToHelper]) -> list[f.FromHelper]:
    """What `serve_vet` answers to these frames, in this process."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        for packet in f.packets(list(sent)):
            ours.send(packet)
        ours.shutdown(socket.SHUT_WR)
        helper_main.serve_vet(its.fileno())
        its.close()
        answers: list[f.FromHelper] = []
        while packet := ours.recv(1 << 16):
            answers += f.decode_answers(packet)
    return answers


class Loop:
    """A loop whose time is the test's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.clock = lambda: self.now
        self._poll = select.poll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    def add_fd(self, fd: int, callback: Callable[[], None]) -> None:
        """As `PollLoop`."""
        self._callbacks[fd] = callback
        self._poll.register(fd, select.POLLIN)

    def remove_fd(self, fd: int) -> None:
        """As `PollLoop`."""
        self._poll.unregister(fd)
        del self._callbacks[fd]

    def poll(self, timeout_s: float) -> None:
        """Handle what is readable."""
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd in self._callbacks:
                self._callbacks[fd]()


class Version:
    """A loaded version: its step arena, and the constraints of its engine."""

    def __init__(self, name: str, directory: Path, helpers: ConstraintHelpers) -> None:
        self.path = directory / f"{name}.steps"
        self.arena, self.steps = create_steps(self.path, GEOMETRY, bytes(32))
        link = WorkerLink(0.0)
        self.ring = link.ring = Ring(self.steps, GEOMETRY, time.time_ns())
        self.failed: dict[str, str] = {}  # code by sequence
        self.constraints = Constraints(name, link, helpers.vetting)
        self.constraints.fail = self._fail
        self.constraints.set_rows(str(self.path))
        vocabulary = vocabularies.vocabulary()
        frame = ModelVocabulary(
            name, vocabulary.pieces, vocabulary.piece_ends, vocabulary.control, tuple(vocabulary.eos_ids)
        )
        helpers.add_vocabulary(frame, directory / f"vocabulary-{name}.msgpack", self.constraints)
        self.sequences: dict[str, SequenceState] = {}

    def _fail(self, sequence: SequenceState, code: str, message: str, param: str) -> None:
        self.failed[sequence.id] = code
        sequence.is_done = True
        self.constraints.close(sequence)

    def close(self) -> None:
        """Unmap and remove the arena."""
        self.arena.close()
        self.arena.unlink()


class Site:
    """The helpers, and the loaded versions by name."""

    def __init__(self, home: Path, **bounds: int) -> None:
        (home / "run").mkdir(mode=0o700)
        config = resolve(
            {
                "server": {"run_dir": str(home / "run"), "arena_dir": str(home / "arenas")},
                "scheduler": {"constraints": bounds},
            },
            {},
        )
        self.home = home
        self.loop = Loop()
        self.versions: dict[str, Version] = {}
        self.helpers = ConstraintHelpers(
            config, self.loop, lambda: [version.constraints for version in self.versions.values()]
        )

    @property
    def mask_pid(self) -> int:
        """Of the mask process; 0: none runs."""
        return self.helpers._masks.pid

    def load(self, name: str) -> Version:
        """A new version."""
        version = self.versions[name] = Version(name, self.home, self.helpers)
        return version

    def unload(self, name: str) -> None:
        """As the stage does it."""
        version = self.versions.pop(name)
        for sequence in version.sequences.values():
            version.constraints.close(sequence)
        self.helpers.forget(name)
        version.close()

    def vet(self, version: Version, constraint: Constraint) -> str:
        """Compile the constraint on trial; returns the error."""
        results: list[str] = []
        waiter = Waiter(lambda error, _: results.append(error), lambda: None)
        self.helpers.vetting.vet(version.constraints._model, constraint, "t", waiter, self.loop.now)
        self.until(lambda: bool(results))
        return results[0]

    def ask(self, version: Version, name: str, constraint: Constraint, tenant: str = "t") -> SequenceState:
        """A new sequence, whose first mask is asked for."""
        frame = submission(name, [1, 2, 3], 9, tenant=tenant, constraint=constraint)
        sequence = SequenceState(frame, b"", Tenant(tenant, 1.0), self.loop.now, 0)
        sequence.run.row = len(version.sequences)
        version.sequences[name] = sequence
        version.constraints.open(sequence)
        version.constraints.restart(sequence)
        version.constraints.flush(self.loop.now)
        self.helpers.send()
        return sequence

    def has_mask(self, version: Version, name: str) -> bool:
        """The mask that was asked for is there."""
        sequence = version.sequences[name]
        assert sequence.masks is not None
        return version.ring.has_mask(sequence.run.row, sequence.masks.epoch, sequence.run.length)

    def until(self, condition: Callable[[], bool]) -> None:
        """Handle what the helpers send, without any time that passes, until the condition holds."""
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, "never"
            self.loop.poll(0.002)
            self.helpers.send()

    def close(self) -> None:
        """End the helpers."""
        self.helpers.close()
        for version in self.versions.values():
            version.close()


def mappings(pid: int, directory: Path) -> list[str]:
    """The files of the directory that the process maps; removed ones end with "(deleted)"."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [os.fsdecode(line.split(maxsplit=5)[5]) for line in lines if str(directory) in line]
