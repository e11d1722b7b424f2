"""Vetting: one constraint at a time, tenants in turn, and what happens to one that hangs or crashes."""

from __future__ import annotations

import pytest

from pipeline.protocol.messages import Constraint
from stages.scheduler.constraints import vetting as module
from stages.scheduler.constraints.frames import Begun, Vet, Vetted
from stages.scheduler.constraints.vetting import Vetting, VettingFullError, Waiter


def constraint(name: str) -> Constraint:
    return Constraint("regex", name, "regex")


class Trial:
    """A vetting whose trial process is the test."""

    def __init__(self) -> None:
        self.vetting = Vetting(limit_s=5.0)
        self.results: list[tuple[str, str]] = []

    def vet(self, name: str, tenant: str = "t", now: float = 0.0, version: str = "m") -> Waiter:
        def displaced() -> None:
            self.results.append((name, "displaced"))

        waiter = Waiter(lambda error, _: self.results.append((name, error)), displaced)
        self.vetting.vet(version, constraint(name), tenant, waiter, now)
        return waiter

    def take(self) -> Vet:
        [frame] = self.vetting.frames
        self.vetting.frames.clear()
        assert isinstance(frame, Vet)
        return frame


def test_tenants_take_turns_and_equal_constraints_are_compiled_once() -> None:
    trial = Trial()
    for name, tenant in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("a2", "a"), ("a2", "b")]:
        trial.vet(name, tenant)
    order = []
    while trial.vetting.frames:
        frame = trial.take()
        order.append(frame.constraint.text)
        trial.vetting.on_vetted(Vetted(frame.id, ""), 0.0)
    assert order == ["a1", "a2", "b1", "a3"]
    assert [name for name, _ in trial.results] == ["a1", "a2", "a2", "a2", "b1", "a3"]
    assert not trial.vetting.is_busy
    assert trial.vetting.has_passed("m", constraint("a3"))
    assert not trial.vetting.has_passed("m", constraint("c"))


def test_one_that_hangs_is_refused_and_the_next_one_is_compiled() -> None:
    trial = Trial()
    trial.vet("hangs")
    trial.vet("fine")
    late = trial.take()
    assert not trial.vetting.is_late(20.0, 7.0)  # the process starts
    trial.vetting.on_begun(Begun(late.id), 7.0)
    assert not trial.vetting.is_late(100.0, 11.9)  # a busy machine
    assert trial.vetting.is_late(5.1, 12.1)
    trial.vetting.on_late(5.1)
    assert trial.results == [("hangs", "compiling it takes longer than 5 s")]
    frame = trial.take()
    trial.vetting.on_vetted(Vetted(late.id, "late"), 5.2)  # of the process that was killed
    assert len(trial.results) == 1
    trial.vetting.on_vetted(Vetted(frame.id, ""), 5.3)
    assert trial.results[1] == ("fine", "")


def test_one_without_an_end_is_refused_although_it_uses_no_cpu_time() -> None:
    trial = Trial()
    trial.vet("hangs")
    trial.vet("fine")
    assert not trial.vetting.is_late(5.0 * module.MAX_DELAY, 0.0)
    assert trial.vetting.is_late(5.1 * module.MAX_DELAY, 0.0)
    trial.vetting.frames.clear()
    trial.vetting.on_late(400.0)
    trial.vetting.on_begun(Begun(1), 0.0)  # of the process that was killed
    assert not trial.vetting.is_late(500.0, 100.0)
    assert trial.take().constraint.text == "fine"


def test_one_that_ends_the_process_is_refused() -> None:
    trial = Trial()
    trial.vet("crash")
    trial.vet("fine")
    for _ in range(module.MAX_ENDS):
        assert trial.results == []
        frame = trial.take()
        assert frame.constraint.text == "crash"
        trial.vetting.on_begun(Begun(frame.id), 1.0)
        trial.vetting.on_died(1.0)
    assert trial.results[0][0] == "crash"
    assert "memory" in trial.results[0][1]
    frame = trial.take()
    assert frame.constraint.text == "fine"
    trial.vetting.on_vetted(Vetted(frame.id, ""), 1.0)
    trial.vetting.on_died(2.0)  # nothing was being compiled
    assert len(trial.results) == 2


def test_one_during_which_the_process_is_killed_is_tried_again() -> None:
    """Its time begins with the new process."""
    trial = Trial()
    trial.vet("innocent")
    killed = trial.take()
    trial.vetting.on_begun(Begun(killed.id), 3.0)
    trial.vetting.on_died(1.0)
    frame = trial.take()
    assert not trial.vetting.is_late(1.0, 100.0)
    trial.vetting.on_vetted(Vetted(killed.id, "late"), 1.0)
    trial.vetting.on_begun(Begun(frame.id), 0.5)
    assert not trial.vetting.is_late(2.0, 5.4)
    assert trial.vetting.is_late(2.0, 5.6)
    trial.vetting.on_vetted(Vetted(frame.id, ""), 2.0)
    assert trial.results == [("innocent", "")]


def test_a_process_that_cannot_begin_is_started_a_bounded_number_of_times() -> None:
    trial = Trial()
    trial.vet("first")
    for _ in range(module.MAX_STARTS):
        assert trial.results == []
        trial.take()
        trial.vetting.on_died(1.0)
    assert trial.results == [("first", "compiling it takes too much memory, or fails")]


def test_a_tenant_has_a_bounded_number_waiting() -> None:
    trial = Trial()
    for i in range(module.MAX_TENANT_JOBS + 1):  # one of them is being compiled
        trial.vet(f"a{i}", "a")
    with pytest.raises(VettingFullError):
        trial.vet("one more", "a")
    trial.vet("b", "b")


def test_no_tenants_lock_another_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_JOBS", 6)
    trial = Trial()
    for i in range(3):
        for tenant in "ab":
            trial.vet(f"{tenant}{i}", tenant)
    with pytest.raises(VettingFullError):
        trial.vet("one more", "b")
    trial.vet("c1", "c")
    assert trial.results == [("b2", "displaced")]
    with pytest.raises(VettingFullError):
        trial.vet("c2", "c")


def test_no_number_of_tenants_exceeds_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_JOBS", 6)
    trial = Trial()
    refused = 0
    for i in range(5):
        trial.vet(f"a{i}", "a")
    for i in range(20):
        try:
            trial.vet(f"b{i}", f"tenant {i}")
        except VettingFullError:
            refused += 1
        assert len(trial.vetting._jobs) <= 6
    assert trial.results == [(f"a{i}", "displaced") for i in (4, 3, 2)]
    assert refused == 20 - 4
    compiled = []
    while trial.vetting.frames:
        frame = trial.take()
        compiled.append(frame.constraint.text)
        trial.vetting.on_vetted(Vetted(frame.id, ""), 0.0)
    assert compiled == ["a0", "a1", "b0", "b1", "b2", "b3"]


def test_what_no_submission_waits_for_is_not_compiled() -> None:
    trial = Trial()
    waiters = {name: trial.vet(name) for name in ("first", "twice", "none")}
    trial.vet("twice")
    for name, waiter in waiters.items():
        trial.vetting.cancel("m", constraint(name), waiter)
    for compiled in ("first", "twice"):  # the compilation of the first one had begun
        frame = trial.take()
        assert frame.constraint.text == compiled
        trial.vetting.on_vetted(Vetted(frame.id, ""), 0.0)
    assert trial.results == [("twice", "")]
    assert not trial.vetting.is_busy
    assert not trial.vetting.frames
    # Cancelled requests must not displace what others use.
    assert [trial.vetting.has_passed("m", constraint(name)) for name in ("first", "twice")] == [False, True]


def test_an_unloaded_versions_constraints_do_not_wait() -> None:
    trial = Trial()
    for name, version in (("a", "m"), ("b", "m"), ("c", "other")):
        trial.vet(name, version=version)
    frame = trial.take()
    trial.vetting.forget("m")
    trial.vetting.on_vetted(Vetted(frame.id, "the model has been unloaded"), 0.0)
    assert trial.take().constraint.text == "c"
    assert trial.results == []


def test_what_has_passed_is_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PASSED", 2)
    trial = Trial()
    for name in ("a", "b"):
        trial.vet(name)
        trial.vetting.on_vetted(Vetted(trial.take().id, ""), 0.0)
    assert trial.vetting.has_passed("m", constraint("a"))
    trial.vet("c")
    trial.vetting.on_vetted(Vetted(trial.take().id, ""), 0.0)
    assert [trial.vetting.has_passed("m", constraint(name)) for name in "abc"] == [True, False, True]
