"""A version with several worker groups: when they are attached, and which failures end its requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.protocol.messages import Attach, Detach, Frame, KvAttach, KvReady, WorkerReady
from shm import step_ring as sh
from shm import words
from stages.scheduler.core.settings import Settings
from stages.scheduler.core.submission_queue import UNAVAILABLE_S
from stages.scheduler.core.version_runner import VersionRunner
from stages.scheduler.recovery.attach_failure import LASTING_S

from .peers import submission
from .worker_processes import DIGEST, GATEWAY, LATE, Group, cannot_attach, index_of, other_arena


@pytest.fixture
def groups() -> Iterator[list[Group]]:
    made = [Group(1), Group(2)]
    yield made
    for group in made:
        group.end()


def of_group(group: Group, number: int) -> WorkerReady:
    return msgspec.structs.replace(group.ready, group=number)


def two_groups(tmp_path: Path, to_kv: list[Frame], sent: list[tuple[bytes, Frame]], n: int = 2) -> VersionRunner:
    def to_worker(peer: bytes, frame: Frame) -> bool:
        sent.append((peer, frame))
        return True

    def ask(frame: Frame) -> bool:
        to_kv.append(frame)
        return True

    settings = Settings("m", 4, worker_groups=n)
    runner = VersionRunner(settings, tmp_path / "m.steps", 16, 0, 10.0, 0.0, lambda _: 1.0, to_worker, ask)
    runner.group_stages = tuple(f"worker-m~{number}" if number else "worker-m" for number in range(n))
    return runner


def test_a_new_scheduler_reconciles_when_no_group_may_compute_a_step_of_the_old_one(
    tmp_path: Path, groups: list[Group]
) -> None:
    """kv gives the pages of the old scheduler's sequences to others as soon as the leases are reconciled."""
    first, second = groups
    to_kv: list[Frame] = []
    sent: list[tuple[bytes, Frame]] = []
    old = two_groups(tmp_path, to_kv, sent)
    old.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    old.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    old.worker_ready(b"1", second.hello, of_group(second, 1), 0.0)
    assert [(peer, type(frame)) for peer, frame in sent] == [(b"0", Attach), (b"1", Attach)]
    assert all(group.is_attached for group in old.groups)
    to_kv.clear()  # the old scheduler dies here: its arenas and the file stay

    new = two_groups(tmp_path, to_kv, sent)
    sent.clear()
    new.worker_ready(b"0", first.hello, of_group(first, 0), 1.0)
    new.tick(1.1)
    assert not to_kv and not sent, "the second group may be in a step"
    assert new.problem
    new.worker_ready(b"1", second.hello, of_group(second, 1), 2.0)
    assert [type(frame) for frame in to_kv] == [KvAttach]
    new.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 2.0)
    assert sorted(peer for peer, frame in sent if isinstance(frame, Attach)) == [b"0", b"1"]

    # A group that does not answer is killed in the end; the other one then begins.
    to_kv.clear()
    third = two_groups(tmp_path, to_kv, sent)
    third.worker_ready(b"0", first.hello, of_group(first, 0), 3.0)
    third.tick(9.9)
    assert not to_kv
    assert second.process.poll() is None
    third.tick(10.1)
    assert second.process.wait(600) == -9
    third.tick(10.2)
    assert [type(frame) for frame in to_kv] == [KvAttach]

    for runner in (old, new, third):
        runner.close()


def test_no_arena_is_made_ahead_while_a_group_may_compute_a_step_of_the_old_scheduler(
    tmp_path: Path, groups: list[Group]
) -> None:
    """It has removed its arenas at its end; kv and what detects a stuck step must wait for the groups."""
    first, second = groups
    to_kv: list[Frame] = []
    old = two_groups(tmp_path, to_kv, [])
    old.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    old.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    old.worker_ready(b"1", second.hello, of_group(second, 1), 0.0)
    new = two_groups(tmp_path, to_kv, [])
    old.close()
    to_kv.clear()
    new.create_ahead(index_of(first.ready))
    assert not to_kv
    assert all(group._worker_counter() >= 0 for group in new.groups), "the ring of the old step is still read"
    new.worker_ready(b"0", first.hello, of_group(first, 0), 1.0)
    new.worker_ready(b"1", second.hello, of_group(second, 1), 1.0)
    assert [type(frame) for frame in to_kv] == [KvAttach]
    new.close()


def test_with_fewer_groups_than_before_the_others_are_killed_at_once(tmp_path: Path, groups: list[Group]) -> None:
    first, second = groups
    to_kv: list[Frame] = []
    old = two_groups(tmp_path, to_kv, [])
    old.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    old.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    old.worker_ready(b"1", second.hello, of_group(second, 1), 0.0)
    to_kv.clear()
    new = two_groups(tmp_path, to_kv, [], n=1)
    assert second.process.wait(600) == -9
    new.worker_ready(b"0", first.hello, of_group(first, 0), 1.0)
    assert [type(frame) for frame in to_kv] == [KvAttach]
    for runner in (old, new):
        runner.close()


def test_processes_that_have_ended_keep_no_group_waiting(tmp_path: Path, groups: list[Group]) -> None:
    first, second = groups
    to_kv: list[Frame] = []
    old = two_groups(tmp_path, to_kv, [])
    old.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    old.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    first.end()
    to_kv.clear()
    new = two_groups(tmp_path, to_kv, [])
    new.worker_ready(b"1", second.hello, of_group(second, 1), 1.0)
    assert [type(frame) for frame in to_kv] == [KvAttach]
    for runner in (old, new):
        runner.close()


def test_a_group_that_computes_a_long_step_outlives_a_new_scheduler(tmp_path: Path, groups: list[Group]) -> None:
    """Its step stands still when its ring's counter does, as under one scheduler."""
    first, second = groups
    old = two_groups(tmp_path, [], [])
    old.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    old.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    old.worker_ready(b"1", second.hello, of_group(second, 1), 0.0)
    ring = old.engine.groups[1].link.ring
    assert ring is not None
    new = two_groups(tmp_path, [], [])
    new.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    for second_of_step in range(1, 40):
        words.store(ring._control, sh.PROGRESS, second_of_step)
        new.tick(float(second_of_step))
        assert not new.groups[1].is_settled
        assert second.process.poll() is None
    new.tick(45.0)
    assert second.process.poll() is None
    new.tick(50.0)
    assert second.process.wait(600) == -9
    new.tick(50.1)
    assert new.groups[1].is_settled
    for runner in (old, new):
        runner.close()


def test_a_scheduler_that_cannot_read_which_groups_compute_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "m.groups").mkdir()
    with pytest.raises(OSError, match=r"m\.groups"):
        two_groups(tmp_path, [], [])


def test_a_group_with_other_files_waits_for_the_end_of_the_attached_ones(
    tmp_path: Path, groups: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    """Its step arena would replace the one that the other group reads."""
    first, second = groups
    sent: list[tuple[bytes, Frame]] = []
    runner = two_groups(tmp_path, [], sent)
    runner.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    other = msgspec.structs.replace(of_group(second, 1), digest="cd" * 32)
    runner.worker_ready(b"1", second.hello, other, 1.0)
    for i in range(5):
        runner.tick(1.0 + 0.1 * i)
    assert [peer for peer, _ in sent] == [b"0"]
    assert "different files" in runner.groups[1].reason
    logged = [record for record in caplog.records if "different files" in getattr(record, "reason", "")]
    assert len(logged) == 1, "once, and the model's own state does not say it"
    assert runner.problem == "", "the first group serves"
    assert runner.waiting_groups == [f"worker-m~1: {runner.groups[1].reason}"]
    assert runner.state().groups == ("", runner.groups[1].reason)
    assert (tmp_path / "m.steps").exists()
    runner.worker_ready(b"1", second.hello, of_group(second, 1), 2.0)
    assert [peer for peer, _ in sent] == [b"0", b"1"]
    assert runner.waiting_groups == []
    assert runner.state().groups == ("", "")
    runner.close()


def test_the_reason_of_a_group_is_shown_while_another_one_serves(tmp_path: Path, groups: list[Group]) -> None:
    """While none does, the reason of the first one is the model's; a single group has no list."""
    first, second = groups
    runner = two_groups(tmp_path, [], [])
    assert runner.problem == "waiting for its worker" and runner.waiting_groups == []
    runner.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    assert runner.waiting_groups == ["worker-m~1: waiting for its worker"]
    runner.worker_ready(b"1", second.hello, of_group(second, 1), 0.0)
    assert runner.waiting_groups == []
    second.end()
    runner.worker_down(b"1", 1.0)
    assert runner.waiting_groups == ["worker-m~1: its worker has exited"]
    runner.close()
    alone = two_groups(tmp_path / "alone", [], [], n=1)
    assert (alone.problem, alone.state().groups) == ("waiting for its worker", ())
    alone.close()


def test_another_kv_arena_waits_for_the_steps_of_all_groups(tmp_path: Path, groups: list[Group]) -> None:
    first, second = groups
    sent: list[tuple[bytes, Frame]] = []
    runner = two_groups(tmp_path, [], sent)
    runner.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    runner.worker_ready(b"1", second.hello, of_group(second, 1), 0.0)
    sent.clear()
    runner.kv_down()
    runner.kv_ready(other_arena(), 5.0)
    assert [(peer, type(frame)) for peer, frame in sent] == [(b"0", Detach), (b"1", Detach)]
    runner.worker_ready(b"0", first.hello, of_group(first, 0), 5.1)
    assert len(sent) == 2, "the second group may still write with the old page tables"
    runner.worker_ready(b"1", second.hello, of_group(second, 1), 5.2)
    assert sorted(peer for peer, frame in sent if isinstance(frame, Attach)) == [b"0", b"1"]
    runner.close()


def keep_failing(runner: VersionRunner, group: Group, begin: float, end: float) -> None:
    """Group 0 is attached again and again, and cannot map its arenas."""
    now = begin
    while now < end:
        runner.tick(now)
        if runner.groups[0].is_attached:
            runner.worker_ready(b"0", group.hello, cannot_attach(group), now)
        now += 0.1


def test_a_group_that_cannot_attach_fails_the_requests_where_the_other_group_has_no_worker(
    tmp_path: Path, groups: list[Group]
) -> None:
    runner = two_groups(tmp_path, [], [])
    runner.worker_ready(b"0", groups[0].hello, of_group(groups[0], 0), 0.0)
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), 0.0)
    keep_failing(runner, groups[0], 0.1, 0.9 * LASTING_S)
    assert set(runner.engine.table.live) == {"s"}
    keep_failing(runner, groups[0], 0.9 * LASTING_S, LASTING_S + 1.0)
    ((_, (ended,)),) = runner.engine.outbox.tokens.items()
    assert (ended.sequence, ended.finish, ended.error) == ("s", "error", "MODEL_UNAVAILABLE")
    assert "m.act: needs 9 bytes" in ended.message
    runner.close()


def test_requests_outlive_a_group_that_served_while_the_other_one_could_not_attach(
    tmp_path: Path, groups: list[Group]
) -> None:
    """Its successor is about to come; without one they are refused, however often the other one tries."""
    first, second = groups
    runner = two_groups(tmp_path, [], [])
    runner.worker_ready(b"0", first.hello, of_group(first, 0), 0.0)
    runner.kv_ready(KvReady("m", DIGEST, "/none", 64, 16, 1024, generation=1), 0.0)
    runner.worker_ready(b"1", second.hello, of_group(second, 1), 0.0)
    ring = runner.engine.groups[1].link.ring
    assert ring is not None
    words.store(ring._control, sh.WORKER_GENERATION, ring.generation)
    runner.engine.submissions.submit(GATEWAY, submission("s", [1, 2, 3], 8), 0.0)
    keep_failing(runner, first, 0.1, LATE)
    assert runner.engine.worker.failure == ""
    second.end()
    runner.worker_down(b"1", LATE)
    keep_failing(runner, first, LATE, LATE + 0.9 * UNAVAILABLE_S)
    assert set(runner.engine.table.live) == {"s"}
    keep_failing(runner, first, LATE + 0.9 * UNAVAILABLE_S, LATE + UNAVAILABLE_S + 1.0)
    assert [rejected.code for _, rejected in runner.engine.outbox.rejected] == ["MODEL_UNAVAILABLE"]
    runner.close()


def test_a_group_beyond_the_configured_ones_is_ignored(
    tmp_path: Path, groups: list[Group], caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[tuple[bytes, Frame]] = []
    runner = two_groups(tmp_path, [], sent)
    for number in (2, -1):
        runner.worker_ready(b"2", groups[0].hello, of_group(groups[0], number), 0.0)
    assert not sent
    assert len(caplog.records) == 2
