"""Requests survive the death of a worker group while its successor starts."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.protocol.messages import (
    Acquire,
    Attach,
    Detach,
    Frame,
    Granted,
    KvAttach,
    KvReady,
    Reconcile,
)
from shm import step_ring as sh
from shm import words
from shm.arena import process_ticks
from stages.scheduler.core.group_runner import REATTACH_S
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.submission_queue import UNAVAILABLE_S
from stages.scheduler.core.version_runner import KV_RETRY_S, VersionRunner
from stages.scheduler.recovery.attach_failure import LASTING_S

from .peers import submission
from .worker_processes import DIGEST, GATEWAY, LATE, Group, cannot_attach, index_of, other_arena

FULL = b"full"  # a peer whose queue takes no frame


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

    def to_worker(peer: bytes, frame: Frame) -> bool:
        if peer == FULL:
            return False
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
    (before,) = runner.state().attachments
    first.end()
    runner.worker_down(b"w", LATE)
    assert runner.state().attachments == ()
    runner.tick(LATE + 0.5 * UNAVAILABLE_S)
    assert "s" in runner.engine.table.live
    assert not runner.engine.outbox.rejected
    runner.engine.submissions.submit(GATEWAY, submission("t", [1, 2, 3], 8), LATE + 0.5 * UNAVAILABLE_S)
    assert set(runner.engine.table.live) == {"s", "t"}
    attach(runner, second, LATE + 0.6 * UNAVAILABLE_S)
    assert sum(isinstance(frame, Attach) for frame in sent) == 2
    (after,) = runner.state().attachments
    assert after > before > 0


def test_a_worker_that_its_supervisor_has_not_waited_for_is_dead(runner: VersionRunner, groups: list[Group]) -> None:
    """The scheduler may notice the end first; the timelines have the time until the successor, all of it."""
    first, second = groups
    attach(runner, first, 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), LATE)
    pidfd = os.pidfd_open(first.process.pid)
    first.process.kill()
    assert select.select([pidfd], [], [], 600)[0]
    os.close(pidfd)
    assert process_ticks(first.process.pid) == first.hello.start_ticks  # a zombie
    runner.worker_down(b"w", LATE)
    attach(runner, second, LATE + 0.4)
    events = [(event.name, event.at) for event in runner.engine.outbox.events[GATEWAY] if not event.sequence]
    assert events == [("lost", LATE), ("started", LATE + 0.4)]


def test_a_disconnected_worker_is_killed_and_requests_wait(runner: VersionRunner, groups: list[Group]) -> None:
    group = groups[0]
    attach(runner, group, 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), LATE)
    runner.worker_down(b"w", LATE)  # its process lives
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
    runner.worker_down(b"w", LATE)
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
    runner.worker_down(b"w", LATE)
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


def test_an_arena_that_kv_could_not_provide_is_asked_for_again(
    runner: VersionRunner, groups: list[Group], sent: list[Frame]
) -> None:
    to_kv: list[Frame] = []

    def ask(frame: Frame) -> bool:
        to_kv.append(frame)
        return True

    runner._to_kv = ask
    runner.worker_ready(b"w", groups[0].hello, groups[0].ready, 1.0)
    assert [type(frame) for frame in to_kv] == [KvAttach]
    runner.tick(1.0 + 2 * KV_RETRY_S)
    assert len(to_kv) == 1, "kv may be opening the arena"
    for i in range(1, 4):
        runner.kv_ready(KvReady("m", DIGEST, "", 0, 0, 0, False, "Too many open files"), 5.0 * i)
        runner.tick(5.0 * i + 0.9 * KV_RETRY_S)
        assert len(to_kv) == i
        runner.tick(5.0 * i + 1.1 * KV_RETRY_S)
        runner.tick(5.0 * i + 1.2 * KV_RETRY_S)
        assert len(to_kv) == i + 1
    assert set(to_kv) == {to_kv[0]}
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 20.0)
    assert [type(frame) for frame in sent] == [Attach]
    runner.tick(30.0)
    assert len(to_kv) == 4


def with_a_step(runner: VersionRunner, group: Group, now: float) -> int:
    """Attach, and publish steps of a sequence "s". Returns the number of the step that the worker computes."""
    attach(runner, group, now)
    ring = runner.engine.worker.ring
    assert ring is not None
    words.store(ring._control, sh.WORKER_GENERATION, ring.generation)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), now)
    grant(runner, now, 0)
    return runner.engine.steps.unacknowledged[0].number


def test_the_load_of_a_version_is_no_wait_in_the_queue(runner: VersionRunner, groups: list[Group]) -> None:
    """Its self-test arrives before its worker is attached."""
    runner.engine.submissions.submit(GATEWAY, submission("early", [4, 5, 6], 8), 1.0)
    attach(runner, groups[0], 9.0)
    ring = runner.engine.worker.ring
    assert ring is not None
    words.store(ring._control, sh.WORKER_GENERATION, ring.generation)
    grant(runner, 9.5, 0)
    assert runner.engine.stats.waited_s.total == 0.5


def grant(runner: VersionRunner, now: float, page: int) -> None:
    """A round, kv's answer to the first pages that were requested, and a round."""
    runner.run_round(now)
    leases = runner.engine.leases
    (acquired,) = [frame for frame in leases.frames if isinstance(frame, Acquire)]
    leases.frames.clear()
    runner.engine.pages.granted(Granted(acquired.id, acquired.sequence, (page,), 0, "m"))
    runner.run_round(now)


def test_another_kv_arena_waits_for_the_end_of_the_workers_step(
    runner: VersionRunner, groups: list[Group], sent: list[Frame]
) -> None:
    """The end of that step is not taken for the end of a step of the next attachment."""
    group = groups[0]
    step = with_a_step(runner, group, 1.0)
    ring = runner.engine.worker.ring
    assert ring is not None
    runner.engine.submissions.submit(GATEWAY, submission("t", [9, 9, 9], 8), 1.0)
    sent.clear()
    runner.kv_down()
    runner.kv_ready(other_arena(), 5.0)
    assert [type(frame) for frame in sent] == [Detach]
    runner.kv_ready(other_arena(reconciled=True), 5.0)
    runner.tick(5.1)
    runner.run_round(5.1)
    assert [type(frame) for frame in sent] == [Detach]
    ring._steps.out_token[:, :] = 42
    words.store(ring._control, sh.DONE, step)
    runner.worker_ready(b"w", group.hello, group.ready, 5.2)
    assert [type(frame) for frame in sent] == [Detach, Attach]
    runner.engine.outbox.tokens.clear()
    runner.run_round(5.2)
    acquired = [frame for frame in runner.engine.leases.frames if isinstance(frame, Acquire)]
    for page, frame in enumerate(acquired):
        runner.engine.pages.granted(Granted(frame.id, frame.sequence, (page,), 0, "m"))
    for i in range(3):
        runner.run_round(5.3 + i)
    assert {frame.sequence for frame in acquired} == {"s", "t"}
    assert not runner.engine.outbox.tokens, "no step of this attachment has been computed"


def test_a_detach_that_found_no_place_is_sent_again(
    runner: VersionRunner, groups: list[Group], sent: list[Frame]
) -> None:
    attach(runner, groups[0], 1.0)
    sent.clear()
    runner.kv_down()
    runner.groups[0].peer = FULL
    runner.kv_ready(other_arena(), 5.0)
    runner.tick(5.1)
    assert not sent
    runner.groups[0].peer = b"w"
    runner.tick(5.2)
    runner.tick(5.3)
    assert [type(frame) for frame in sent] == [Detach]


def test_a_worker_that_does_not_detach_is_killed(runner: VersionRunner, groups: list[Group]) -> None:
    with_a_step(runner, groups[0], 1.0)
    runner.kv_down()
    runner.kv_ready(other_arena(), 5.0)
    runner.tick(5.1)
    runner.tick(14.0)
    assert groups[0].process.poll() is None
    runner.tick(5.1 + 61.0)
    assert groups[0].process.wait(600) == -9


class Prepared:
    """A runner of a new version, and what kv is sent."""

    def __init__(self, tmp_path: Path, sent: list[Frame]) -> None:
        self.to_kv: list[Frame] = []
        self.runner = VersionRunner(
            Settings("m", 4),
            tmp_path / "m.steps",
            16,
            0,
            10.0,
            0.0,
            lambda _: 1.0,
            lambda _, frame: sent.append(frame) or True,
            lambda frame: self.to_kv.append(frame) or True,
        )


@pytest.mark.parametrize("fields", [{}, {"vocab_size": 7}])
def test_the_arena_of_a_new_version_is_there_before_its_worker(
    tmp_path: Path, groups: list[Group], sent: list[Frame], fields: dict[str, int]
) -> None:
    """kv maps it meanwhile, so the worker is attached at once. One that needs another arena gets that."""
    made = Prepared(tmp_path, sent)
    runner, group = made.runner, groups[0]
    runner.create_ahead(index_of(group.ready, **fields))
    (ahead,) = runner._arenas
    assert made.to_kv == [KvAttach("m", DIGEST, str(tmp_path / "m.steps"), ahead.generation)]
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    runner.worker_ready(b"w", group.hello, group.ready, 0.0)
    assert [type(frame) for frame in sent] == ([] if fields else [Attach])
    assert (runner._arenas == [ahead]) == (not fields)
    # kv must answer for another arena, so its frame differs.
    assert len(made.to_kv) == len(set(made.to_kv)) == (2 if fields else 1)
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    assert [type(frame) for frame in sent] == [Attach]
    runner.close()


def test_kv_reconciles_an_arena_made_ahead_when_the_worker_computes_no_step(
    tmp_path: Path, groups: list[Group], sent: list[Frame]
) -> None:
    """A worker that an earlier scheduler has attached may still write to pages: kv must not give them to others."""
    made = Prepared(tmp_path, sent)
    runner, group = made.runner, groups[0]
    runner.create_ahead(index_of(group.ready))
    for _ in range(2):  # kv restarts meanwhile
        runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, reconciled=False, generation=1), 0.0)
        runner.tick(0.1)
        assert not runner.engine.leases.frames
        runner.kv_down()
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, reconciled=False, generation=1), 0.0)
    runner.worker_ready(b"w", group.hello, group.ready, 0.2)
    assert [type(frame) for frame in runner.engine.leases.frames] == [Reconcile]
    assert [type(frame) for frame in sent] == [Attach]
    runner.close()


def kv_error() -> KvReady:
    return KvReady("m", DIGEST, "", 0, 0, 0, False, "m.kv: needs 9 bytes but /dev/shm has 1 free")


def test_kv_may_have_no_room_until_an_older_version_is_gone(
    tmp_path: Path, groups: list[Group], sent: list[Frame]
) -> None:
    """It is asked before the worker is ready, and finds room at its next attempt: no request fails."""
    made = Prepared(tmp_path, sent)
    runner, group = made.runner, groups[0]
    runner.create_ahead(index_of(group.ready))
    runner.kv_ready(kv_error(), 0.0)
    assert "m.kv: needs 9 bytes" in runner.problem
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.2)
    assert "m.kv: needs 9 bytes" not in runner.problem
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), 0.3)
    runner.tick(0.2 + 2 * LASTING_S)
    assert "s" in runner.engine.table.live
    attach(runner, group, 0.3 + 2 * LASTING_S)
    assert "s" in runner.engine.table.live
    runner.close()


def test_requests_fail_when_kv_has_no_room_for_seconds_after_the_worker_was_ready(
    tmp_path: Path, groups: list[Group], sent: list[Frame]
) -> None:
    made = Prepared(tmp_path, sent)
    runner, group = made.runner, groups[0]
    runner.create_ahead(index_of(group.ready))
    runner.kv_ready(kv_error(), 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), 0.3)
    runner.tick(2 * LASTING_S)
    runner.worker_ready(b"w", group.hello, group.ready, 2 * LASTING_S)
    runner.tick(2.9 * LASTING_S)
    assert "s" in runner.engine.table.live
    runner.tick(3.1 * LASTING_S)
    ((_, (ended,)),) = runner.engine.outbox.tokens.items()
    assert (ended.sequence, ended.error) == ("s", "MODEL_UNAVAILABLE")
    assert "m.kv: needs 9 bytes" in ended.message
    runner.close()
