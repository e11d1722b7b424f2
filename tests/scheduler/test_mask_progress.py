"""A mask process that works is not killed, however long others wait; one that hangs is, and its death has a reason."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import procfs
from pipeline.protocol.messages import Constraint
from shm import step_ring as sh
from stages.scheduler.constraints import constraints as constraints_module
from stages.scheduler.constraints import frames as f
from stages.scheduler.constraints import mask_progress as module
from stages.scheduler.constraints import mask_writer
from stages.scheduler.constraints.mask_progress import MaskProgress

from .constraint_helpers import Site, Version
from .masks import PLAIN, Masks

LIMIT_S = 10.0
SHORT = Constraint("regex", "[ab]{3}", "regex")


def slow(number: int, size: int = 6) -> Constraint:
    """A schema that takes about a tenth of a second of CPU time for each of its `size` properties."""
    properties = {f"k{i}": {"type": "integer", "multipleOf": 9973 + 2 * i + 100 * number} for i in range(size)}
    return Constraint("json_schema", json.dumps({"type": "object", "properties": properties}), "json_schema")


# -------------------------------------------------------------- rules


def test_time_alone_is_no_reason_while_the_process_uses_the_cpu() -> None:
    progress = MaskProgress(LIMIT_S)
    progress.on_compiling(f.Compiling(1, "a"), 0.0)
    for second in range(0, 600, 20):
        assert not progress.is_stuck(0.0, float(second), second / 15)
    progress.on_compiled(f.Compiled(1), 600.0)
    progress.on_compiling(f.Compiling(2, "b"), 600.0)
    assert not progress.is_stuck(0.0, 629.0, 600 / 15)  # a mask waits for 629 s: behind two compilations


def test_a_process_without_cpu_time_hangs() -> None:
    for is_compiling in (True, False):
        progress = MaskProgress(LIMIT_S)
        if is_compiling:
            progress.on_compiling(f.Compiling(1, "a"), 100.0)
        assert not progress.is_stuck(100.0, 100.0, 5.0)
        assert not progress.is_stuck(100.0, 100.0 + module.STUCK_S, 5.0)
        assert progress.is_stuck(100.0, 100.1 + module.STUCK_S, 5.0)


def test_a_process_that_was_idle_for_long_has_its_time_from_the_first_request_on() -> None:
    progress = MaskProgress(LIMIT_S)
    assert not progress.is_stuck(1.0, 1.0, 5.0)
    assert not progress.is_stuck(1000.0, 1001.0, 5.0)


@pytest.mark.parametrize("is_compiling", [True, False])
def test_an_endless_loop_has_bounded_cpu_time_and_a_deadlock_bounded_time(is_compiling: bool) -> None:
    for cpu_per_s in (1.0, 0.01):
        progress, now = MaskProgress(LIMIT_S), 0.0
        if is_compiling:
            progress.on_compiling(f.Compiling(1, "a"), 0.0)
        while not progress.is_stuck(0.0, now, 7.0 + now * cpu_per_s):
            now += 1.0
            assert now < 1000.0
        most = module.MAX_CPU_LIMITS * LIMIT_S if cpu_per_s == 1.0 else module.MAX_DELAY * LIMIT_S
        assert now == most + module.STUCK_S + 1.0


def test_the_next_compilation_may_begin_before_the_end_of_the_last_one_is_reported() -> None:
    progress = MaskProgress(LIMIT_S)
    progress.on_compiling(f.Compiling(1, "a"), 0.0)
    progress.on_compiling(f.Compiling(2, "b"), 1.0)
    progress.on_compiled(f.Compiled(1), 1.0)
    assert progress.compiling == "b"
    progress.on_compiled(f.Compiled(2), 2.0)
    assert progress.compiling == ""
    progress.on_compiling(f.Compiling(3, "c"), 2.0)
    progress.restart()
    assert progress.compiling == ""


# -------------------------------------------------------------- masks that are being computed


def test_a_mask_is_marked_while_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(PLAIN, PLAIN)
    masks.steps.row_ints[:, sh.SERIAL] = (7, 8)
    seen: list[list[int]] = []
    write = mask_writer.write_mask

    def record(*arguments: object) -> None:
        seen.append([int((masks.steps.mask_ready[row] == sh.begun_tag(7 + row)).sum()) for row in (0, 1)])
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(mask_writer, "write_mask", record)
    masks.writer.handle(f.Mask("0", 0, 0, 2, 1, (97, 98), 7))
    masks.writer.handle(f.Mask("1", 1, 0, 2, 1, (97, 65), 8))  # the second one is not allowed
    assert seen == [[1, 0], [1, 0], [1, 0], [0, 1], [0, 1]]
    assert (masks.steps.mask_ready >= 0).all()
    masks.steps.tokens[0, 2] = ord("A")
    masks.writer.handle(f.Mask("0", 0, 0, 4, 2, (), 7))
    assert isinstance(masks.writer.answers[-1], f.Failed)
    assert (masks.steps.mask_ready >= 0).all()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    one = Site(tmp_path)
    try:
        yield one
    finally:
        one.close()


def deaths(version: Version) -> dict[str, int]:
    return {name: one.masks.deaths for name, one in version.sequences.items() if one.masks is not None}


@pytest.mark.slow  # the helper starts, but is asked for little
def test_a_death_is_charged_to_the_sequence_whose_mask_was_computed(site: Site) -> None:
    versions = [site.load(name) for name in ("m", "other")]
    for version in versions:
        for name in ("a", "b"):
            site.ask(version, name, SHORT)
    first = versions[0]
    row = first.sequences["b"].run.row
    first.steps.mask_ready[row, 5] = sh.begun_tag(first.ring.serial(row))
    first.steps.mask_ready[first.sequences["a"].run.row, 5] = -99  # of the sequence that had the row before
    constraints_module.charge_death([version.constraints for version in versions], "")
    assert [deaths(version) for version in versions] == [{"a": 0, "b": 1}, {"a": 0, "b": 0}]
    assert (first.steps.mask_ready >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("is_compiling", [True, False])
def test_a_death_for_a_sequence_that_has_ended_is_charged_to_none(site: Site, is_compiling: bool) -> None:
    """Otherwise a request that is cancelled in time would fail those of others."""
    version = site.load("m")
    for name in ("ended", "b"):
        site.ask(version, name, SHORT)
    ended = version.sequences.pop("ended")
    if not is_compiling:
        version.steps.mask_ready[ended.run.row, 5] = sh.begun_tag(version.ring.serial(ended.run.row))
    version.constraints.close(ended)
    constraints_module.charge_death([version.constraints], "ended" if is_compiling else "")
    assert deaths(version) == {"b": 0}
    constraints_module.charge_death([version.constraints], "")
    assert deaths(version) == {"b": 1}


# -------------------------------------------------------------- the real process


def record_compilations(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sequences for which compilations begin."""
    order: list[str] = []
    begin = MaskProgress.on_compiling

    def on_compiling(self: MaskProgress, frame: f.Compiling, now: float) -> None:
        order.append(frame.sequence)
        begin(self, frame, now)

    monkeypatch.setattr(MaskProgress, "on_compiling", on_compiling)
    return order


@pytest.mark.slow
def test_slow_constraints_of_one_tenant_delay_another_one_by_one_compilation(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = record_compilations(site, monkeypatch)
    version = site.load("m")
    for number in range(3):
        site.ask(version, f"attacker {number}", slow(number), "attacker")
    site.ask(version, "victim", SHORT, "victim")
    pid, used = site.mask_pid, 0.0

    def all_there() -> bool:
        return all(site.has_mask(version, name) for name in version.sequences)

    def has_worked() -> bool:
        return procfs.cpu_s(pid) > used or all_there()

    while not all_there():
        site.until(has_worked)
        used = procfs.cpu_s(pid)
        if site.loop.now < 100 + 10 * module.STUCK_S:  # less than the bound on the time of one compilation
            site.loop.now += 0.9 * module.STUCK_S
        site.helpers.tick(site.loop.now)
        assert site.mask_pid == pid, "killed"
    site.until(lambda: not site.helpers._progress.compiling)
    assert order == ["attacker 0", "victim", "attacker 1", "attacker 2"]
    assert site.loop.now > 100 + 5 * module.STUCK_S
    assert (set(deaths(version).values()), version.failed) == ({0}, {})


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True], ids=["hangs", "killed"])
def test_a_process_that_hangs_or_ends_is_replaced_and_its_work_is_charged(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    order = record_compilations(site, monkeypatch)
    version, other = site.load("m"), site.load("other")
    for name in ("slow", "same"):
        site.ask(version, name, slow(0, 16), "attacker")
    pid = site.mask_pid
    if is_killed:  # with what it sent, and what was sent to it, unread
        channel = site.helpers._masks._channel
        assert channel is not None
        select.select([channel], [], [])
    else:
        site.until(lambda: bool(order))
    os.kill(pid, signal.SIGSTOP)
    site.ask(version, "victim", SHORT, "victim")
    site.ask(other, "victim 2", SHORT, "victim")
    if not is_killed:
        site.helpers.tick(site.loop.now)
        assert site.mask_pid == pid
    site.loop.now += 1.0 + module.STUCK_S
    if is_killed:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        site.until(lambda: site.mask_pid != pid)
    site.helpers.tick(site.loop.now)
    assert site.mask_pid not in (0, pid)
    assert (deaths(version), deaths(other)) == ({"slow": 1, "same": 1, "victim": 0}, {"victim 2": 0})
    names = [*((version, name) for name in version.sequences), (other, "victim 2")]
    site.until(lambda: all(site.has_mask(*name) for name in names))
    assert (version.failed, other.failed) == ({}, {})
    pid = site.mask_pid
    os.kill(pid, signal.SIGSTOP)
    site.loop.now += 1000.0
    for _ in range(2):
        site.helpers.tick(site.loop.now)
        site.loop.now += 1000.0
    assert site.mask_pid == pid, "killed although no mask is owed"


@pytest.mark.slow
def test_a_process_that_cannot_work_fails_the_sequences_that_wait(site: Site) -> None:
    """Otherwise they would wait for ever."""
    version = site.load("m")
    version.constraints.set_rows(str(site.home / "gone"))
    site.ask(version, "a", SHORT)
    for _ in range(constraints_module.MAX_DEATHS + 1):
        pid = site.mask_pid
        os.kill(pid, signal.SIGKILL)
        site.until(lambda pid=pid: site.mask_pid != pid)  # type: ignore[misc]
        site.loop.now += 1.0
        site.helpers.tick(site.loop.now)
    assert version.failed == {"a": "INFERENCE"}
