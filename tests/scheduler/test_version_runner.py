"""Requests survive the death of a worker group while its successor starts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.protocol.messages import Attach, Frame, Hello, KvReady, WorkerReady
from shm import step_ring as sh
from shm import words
from shm.arena import process_ticks
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.submission_queue import UNAVAILABLE_S
from stages.scheduler.core.version_runner import REATTACH_S, VersionRunner
from stages.scheduler.recovery.attach_failure import LASTING_S

from .peers import VOCAB, submission

DIGEST = "ab" * 32
GATEWAY = b"gateway"
LATE = 10 * UNAVAILABLE_S  # the scheduler has run for a long time before the event


class Group:
    """A process in place of a worker group: it can be killed and waited for."""

    def __init__(self, epoch: int) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        pid = self.process.pid
        self.hello = Hello("worker:m", epoch, pid, process_ticks(pid))
        self.ready = WorkerReady("m", DIGEST, epoch, 1, ((pid, self.hello.start_ticks),), VOCAB, 400)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made = [Group(1), Group(2)]
    yield made
    for group in made:
        group.end()


@pytest.fixture
def sent() -> list[Frame]:
    return []


@pytest.fixture
def runner(request: pytest.FixtureRequest, tmp_path: Path, sent: list[Frame]) -> Iterator[VersionRunner]:
    """The fixture's parameter contains further `Settings`."""
    more = getattr(request, "param", {})

    def to_worker(_: bytes, frame: Frame) -> bool:
        sent.append(frame)
        return True

    made = VersionRunner(
        Settings("m", 4, **more), tmp_path / "m.steps", 16, 0, 10.0, 0.0, lambda _: 1.0, to_worker, lambda _: True
    )
    yield made
    made.close()


def attach(runner: VersionRunner, group: Group, now: float) -> None:
    runner.worker_ready(b"w", group.hello, group.ready, now)
    if runner.kv is None:
        runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), now)
    assert runner.engine.is_ready


def test_requests_wait_for_the_successor_of_a_dead_worker(
    runner: VersionRunner, groups: list[Group], sent: list[Frame]
) -> None:
    first, second = groups
    attach(runner, first, 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), LATE)
    first.end()
    runner.worker_down(LATE)
    runner.tick(LATE + 0.5 * UNAVAILABLE_S)
    assert "s" in runner.engine.table.live
    assert not runner.engine.outbox.rejected
    runner.engine.submissions.submit(GATEWAY, submission("t", [1, 2, 3], 8), LATE + 0.5 * UNAVAILABLE_S)
    assert set(runner.engine.table.live) == {"s", "t"}
    attach(runner, second, LATE + 0.6 * UNAVAILABLE_S)
    assert sum(isinstance(frame, Attach) for frame in sent) == 2


def test_a_disconnected_worker_is_killed_and_requests_wait(runner: VersionRunner, groups: list[Group]) -> None:
    group = groups[0]
    attach(runner, group, 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), LATE)
    runner.worker_down(LATE)  # its process lives
    runner.tick(LATE + 0.1)
    assert "s" in runner.engine.table.live
    runner.tick(LATE + 2.0)  # the time to reconnect is over, and it is killed
    assert group.process.wait() == -9
    runner.tick(LATE + 0.5 * UNAVAILABLE_S)
    assert "s" in runner.engine.table.live


def test_waiting_requests_are_refused_after_a_long_time_without_a_worker(
    runner: VersionRunner, groups: list[Group]
) -> None:
    attach(runner, groups[0], 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), LATE)
    groups[0].end()
    runner.worker_down(LATE)
    runner.tick(LATE + 1.1 * UNAVAILABLE_S)
    assert [(rejected.sequence, rejected.code) for _, rejected in runner.engine.outbox.rejected] == [
        ("s", "MODEL_UNAVAILABLE")
    ]


@pytest.mark.parametrize("runner", [{"batch_timeout_s": 1.0}], indirect=True)
def test_waiting_for_a_batch_counts_as_progress(runner: VersionRunner, groups: list[Group]) -> None:
    """A scheduler with work and without progress counts as stuck, and gateways send it no new requests."""
    attach(runner, groups[0], 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), 5.0)
    seen = []
    for i in range(1, 10):
        runner.tick(5.0 + 0.1 * i)
        seen.append(runner.progress)
    assert len(set(seen)) == 9
    runner.tick(6.1)
    now = runner.progress
    runner.tick(6.2)  # the batch should have begun
    assert runner.progress == now


def test_waiting_for_a_worker_counts_as_progress(runner: VersionRunner, groups: list[Group]) -> None:
    """The model's state is not ready; the scheduler's other models continue."""
    attach(runner, groups[0], 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), LATE)
    groups[0].end()
    runner.worker_down(LATE)
    seen = []
    for i in range(1, 20):
        runner.tick(LATE + 0.1 * i)
        seen.append(runner.progress)
        assert runner.problem
    assert len(set(seen)) == 19
    attach(runner, groups[1], LATE + 3.0)
    now = runner.progress
    runner.tick(LATE + 3.1)  # no step is published although one could be
    assert runner.progress == now


def cannot_attach(group: Group) -> WorkerReady:
    return msgspec.structs.replace(group.ready, error="m.act: needs 9 bytes but /dev/shm has 1 free")


def test_a_worker_that_cannot_attach_fails_its_requests_within_seconds(
    runner: VersionRunner, groups: list[Group], sent: list[Frame]
) -> None:
    group = groups[0]
    attach(runner, group, 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), 1.0)
    now = 1.0
    while now < 1.0 + LASTING_S:
        runner.worker_ready(b"w", group.hello, cannot_attach(group), now)
        runner.run_round(now)
        assert "m.act: needs 9 bytes" in runner.problem, "also right after each attempt"
        assert "s" in runner.engine.table.live
        now += REATTACH_S
        runner.tick(now)
    assert sum(isinstance(frame, Attach) for frame in sent) > 5
    ((_, (ended,)),) = runner.engine.outbox.tokens.items()
    assert (ended.sequence, ended.finish, ended.error) == ("s", "error", "MODEL_UNAVAILABLE")
    assert "m.act: needs 9 bytes" in ended.message
    runner.engine.submissions.submit(GATEWAY, submission("t", [1, 2, 3], 8), now)
    ((_, refused),) = runner.engine.outbox.rejected
    assert (refused.sequence, refused.code) == ("t", "MODEL_UNAVAILABLE")
    assert "m.act: needs 9 bytes" in refused.message


def test_a_worker_that_attaches_at_last_serves_again(runner: VersionRunner, groups: list[Group]) -> None:
    group = groups[0]
    attach(runner, group, 0.0)
    runner.worker_ready(b"w", group.hello, cannot_attach(group), 1.0)
    runner.tick(1.0 + 2 * LASTING_S)
    ring = runner.engine.worker.ring
    assert ring is not None
    words.store(ring._control, sh.WORKER_GENERATION, ring.generation)
    runner.tick(1.1 + 2 * LASTING_S)
    assert runner.problem == ""
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), 2.0 + 2 * LASTING_S)
    assert "s" in runner.engine.table.live
